//! The verifier: what every program must obey, whoever made it, and what a plan must obey beside.
//!
//! ```text
//! plan    -> shape (malformed), holding (causality) -> lower -> goals: the program begins and ends as the layouts say
//!                                                       |
//! program -> tables (malformed) -> messages (matched) -> order (deadlock) -> cells (causality, race, coverage) -> memory
//! ```
//!
//! It trusts nobody: not that a sender holds a box, not that boxes fit together, not that lowering reads the right buffer, not
//! a figure. It shares boxes, ids and tables with those that make plans and programs, and no decision. It knows boxes and
//! who touches them, never an element, so its cost grows with the program and not with the tensors.
//!
//! What it proves of a program holds for any engine that keeps to [`crate::program`]: with sends that complete on their own and
//! with sends that wait for their receive.

mod before;
mod cells;
mod error;
mod goals;
mod holding;
mod order;
mod sets;
mod shape;
mod spaces;
mod tables;
mod tiling;
mod verified;

use std::fmt;

pub use error::{Does, Law, OpName, VerifyError};
pub use verified::{Verified, VerifiedRank};

use crate::id::Rank;
use crate::program::messages::Messages;
use crate::program::{OpKind, Program};
use crate::reshard::doc::PlanDoc;
use crate::reshard::lower::{Addressing, lower_with};
use crate::reshard::shards::AllSides;
use crate::reshard::{Plan, Problem, lower_bound};
use crate::sim::simulate;
use before::Before;
use cells::RankMemory;
use order::{Event, Order};
use sets::PartSet;

/// What has been proven of a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Proof {
    pub transfers: usize,
    pub bytes: u64,
    /// The most memory that a rank needs beside its tensors, and the first rank that needs it.
    pub peak_extra_bytes: u64,
    pub peak_rank: Rank,
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "every element arrives exactly once: {} B in {} transfers", self.bytes, self.transfers)?;
        match self.peak_extra_bytes {
            0 => write!(f, ", no deadlock, no extra memory"),
            peak => write!(f, ", no deadlock, at most {peak} B of extra memory ({})", self.peak_rank),
        }
    }
}

/// Figures that came with a plan, to be held against it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Claims {
    pub bytes: Option<u64>,
    /// No rank needs more beside its tensors.
    pub peak_extra_bytes: Option<u64>,
    pub lower_bound_s: Option<f64>,
    pub predicted_s: Option<f64>,
}

impl Claims {
    /// Whoever writes a plan by hand may leave times at 0: that is no claim.
    pub fn of(doc: &PlanDoc) -> Self {
        Self {
            bytes: Some(doc.bytes),
            peak_extra_bytes: Some(doc.peak_extra_bytes),
            lower_bound_s: Some(doc.lower_bound_s).filter(|s| *s != 0.0),
            predicted_s: Some(doc.predicted_s).filter(|s| *s != 0.0),
        }
    }
}

/// Proves a plan right, or names the first law it breaks.
pub fn verify(plan: &Plan) -> Result<Proof, VerifyError> {
    verify_claims(plan, &Claims::default())
}

/// Proves a plan and the figures that came with it.
pub fn verify_claims(plan: &Plan, claims: &Claims) -> Result<Proof, VerifyError> {
    let (program, proof) = prove(plan, Addressing::Apart)?;
    check_claims(plan, &program, &proof, claims)?;
    Ok(proof)
}

/// Lowers a plan, and proves it and its program.
fn prove(plan: &Plan, addressing: Addressing) -> Result<(Program, Proof), VerifyError> {
    shape::check(plan)?;
    holding::check_senders(plan, &AllSides::of(&plan.problem))?;
    let program = lower_with(plan, addressing);
    let proof = verify_for(&program, &plan.problem)?;
    let proof = Proof { transfers: plan.transfers().len(), bytes: plan.bytes_moved(), ..proof };
    Ok((program, proof))
}

/// Proves that a program moves a problem's tensors from their source layouts to their destinations.
pub fn verify_for(program: &Program, problem: &Problem) -> Result<Proof, VerifyError> {
    let proof = verify_program(program)?;
    goals::check(program, problem)?;
    Ok(proof)
}

/// Proves a program right by itself: messages match, nothing waits in a cycle, every read sees what was to be there, nothing is
/// written while somebody uses it, and goals end up with whole values.
pub fn verify_program(program: &Program) -> Result<Proof, VerifyError> {
    let messages = tables::check(program)?;
    let order = Order::new(program, &messages)?;
    match program.tensors.iter().any(|t| t.partial.is_some()) {
        true => follow_all(&order)?,
        false => follow_by_rank(&order)?,
    }
    let extra = (0..).map(Rank).zip(&program.ranks).map(|(rank, ranked)| (ranked.extra_bytes(), rank));
    let (peak_extra_bytes, peak_rank) =
        extra.reduce(|a, b| if b.0 > a.0 { b } else { a }).unwrap_or((0, Rank(0)));
    let Messages { count: transfers, bytes, .. } = messages;
    Ok(Proof { transfers, bytes, peak_extra_bytes, peak_rank })
}

/// Follows whole values: what is received is what was to be sent, if every sender is right, so ranks can be looked at one by
/// one.
fn follow_by_rank(order: &Order) -> Result<(), VerifyError> {
    let mut before = Before::new(order);
    let whole = PartSet::single(0);
    for rank in 0..order.program.ranks.len() as u32 {
        let mut memory = RankMemory::new(order.program, Rank(rank))?;
        for op in order.of_rank(rank) {
            let of = order.op((rank, op));
            if let (None, Some(into)) = of.ends() {
                memory.write(op, into, &whole, &mut before)?;
            } else {
                follow_local(&mut memory, order, (rank, op), &mut before)?;
            }
        }
        memory.check_goals()?;
    }
    Ok(())
}

/// Follows everything in the order in which it can happen.
fn follow_all(order: &Order) -> Result<(), VerifyError> {
    let mut before = Before::new(order);
    let ranks = (0..order.program.ranks.len() as u32).map(|rank| RankMemory::new(order.program, Rank(rank)));
    let mut memories = ranks.collect::<Result<Vec<_>, _>>()?;
    for event in order.events() {
        match event {
            Event::Local(at) => follow_local(&mut memories[at.0 as usize], order, at, &mut before)?,
            Event::Message(tag) => {
                let message = order.messages[tag];
                let ((src, send), (dst, recv)) = (message.send, message.recv);
                let (Some(from), Some(into)) =
                    (order.op(message.send).ends().0, order.op(message.recv).ends().1)
                else {
                    continue;
                };
                let carried = memories[src as usize].read(send, from, &mut before)?;
                memories[dst as usize].write(recv, into, &carried, &mut before)?;
            }
        }
    }
    memories.iter().try_for_each(RankMemory::check_goals)
}

/// Follows what a rank does by itself: a copy, a pass, or what a send reads.
fn follow_local(
    memory: &mut RankMemory,
    order: &Order,
    at: (u32, u32),
    before: &mut Before,
) -> Result<(), VerifyError> {
    let (op, ranked) = (at.1, &order.program.ranks[at.0 as usize]);
    if let OpKind::Compute { needs, makes, .. } = order.op(at).kind {
        for tile in ranked.touched(needs) {
            let found = memory.read(op, *tile, before)?;
            memory.check_whole(op, *tile, &found)?;
        }
        for tile in ranked.touched(makes) {
            let crate::program::Holds::Made(part) = ranked.tile(*tile).holds else {
                unreachable!("tables::check saw that it is made");
            };
            memory.write(op, *tile, &PartSet::single(part), before)?;
        }
        return Ok(());
    }
    match order.op(at).ends() {
        (Some(from), None) => memory.read(op, from, before).map(|_| ()),
        (Some(from), Some(into)) => {
            let carried = memory.read(op, from, before)?;
            memory.write(op, into, &carried, before)
        }
        _ => Ok(()),
    }
}

/// Figures may differ by this much: they come from sums in another order.
const ROUNDING: f64 = 1e-6;

fn check_claims(plan: &Plan, program: &Program, proof: &Proof, claims: &Claims) -> Result<(), VerifyError> {
    match (claims.peak_extra_bytes, claims.bytes) {
        (Some(claimed), _) if proof.peak_extra_bytes > claimed => {
            let (rank, needed) = (proof.peak_rank, proof.peak_extra_bytes);
            return Err(VerifyError::OverClaim { rank, needed, claimed });
        }
        (_, Some(claimed)) if proof.bytes != claimed => {
            return Err(VerifyError::BytesClaimed { moved: proof.bytes, claimed });
        }
        _ => {}
    }
    let differs =
        |a: f64, b: f64| (a - b).abs() > ROUNDING * a.abs().max(b.abs()) || a.is_nan() != b.is_nan();
    if let Some(claimed) = claims.lower_bound_s {
        let seconds = lower_bound(&plan.problem).map_or(0.0, |bound| bound.seconds);
        if differs(seconds, claimed) {
            return Err(VerifyError::BoundClaimed { seconds, claimed });
        }
    }
    if let Some(claimed) = claims.predicted_s {
        let seconds =
            simulate(program, &plan.problem.cluster).map_or(f64::INFINITY, |trace| trace.makespan_s);
        if differs(seconds, claimed) {
            return Err(VerifyError::TimeClaimed { seconds, claimed });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
