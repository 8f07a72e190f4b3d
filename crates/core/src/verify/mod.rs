//! The verifier: what every program must obey, whoever made it, and what a plan must obey beside.
//!
//! ```text
//! plan    -> shape (malformed), holding (causality) -> lower -> goals: the program begins and ends as the layouts say
//!                                                       |
//! step    -> lower -> step_goals: every pass begins with what the schedule says it needs, and what it makes arrives
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
mod by_rank;
mod cells;
mod error;
mod follow;
mod goals;
mod holding;
mod order;
mod sets;
mod shape;
mod spaces;
mod step_goals;
mod tables;
mod tiling;
mod verified;

use std::fmt;

#[doc(hidden)]
pub use by_rank::accepts as accepts_by_rank;
pub use error::{Does, Law, OpName, VerifyError};
pub use step_goals::check as check_step;
pub use verified::{Verified, VerifiedRank};

use crate::id::Rank;
use crate::program::Program;
use crate::program::messages::Messages;
use crate::reshard::doc::PlanDoc;
use crate::reshard::lower::{Addressing, lower_with};
use crate::reshard::shards::AllSides;
use crate::reshard::{Plan, Problem, lower_bound};
use crate::sim::simulate;
use follow::{follow_all, follow_by_rank};
use order::Order;

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
    let sides = check_plan(plan)?;
    // Only a claimed time, which is simulated, needs the whole program.
    let proof = match by_rank::prove(plan, &sides).filter(|_| claims.predicted_s.is_none()) {
        Some(proof) => proof,
        None => {
            let (program, proof) = prove_program(plan, &sides, Addressing::Apart)?;
            check_time(plan, &program, claims)?;
            proof
        }
    };
    check_claims(plan, &proof, claims)?;
    Ok(proof)
}

/// A plan's own laws.
fn check_plan(plan: &Plan) -> Result<AllSides, VerifyError> {
    shape::check(plan)?;
    let sides = AllSides::of(&plan.problem);
    holding::check_senders(plan, &sides)?;
    Ok(sides)
}

/// Proves a plan and its program, lowered.
fn prove(plan: &Plan, addressing: Addressing) -> Result<(Program, Proof), VerifyError> {
    let sides = check_plan(plan)?;
    prove_program(plan, &sides, addressing)
}

fn prove_program(
    plan: &Plan,
    sides: &AllSides,
    addressing: Addressing,
) -> Result<(Program, Proof), VerifyError> {
    let program = lower_with(plan, addressing);
    let proof = match by_rank::prove_lowered(plan, sides, &program) {
        Some(proof) => proof,
        None => {
            let proof = verify_for(&program, &plan.problem)?;
            Proof { transfers: plan.transfers().len(), bytes: plan.bytes_moved(), ..proof }
        }
    };
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

/// Figures may differ by this much: they come from sums in another order.
const ROUNDING: f64 = 1e-6;

fn check_claims(plan: &Plan, proof: &Proof, claims: &Claims) -> Result<(), VerifyError> {
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
    if let Some(claimed) = claims.lower_bound_s {
        let seconds = lower_bound(&plan.problem).map_or(0.0, |bound| bound.seconds);
        if differs(seconds, claimed) {
            return Err(VerifyError::BoundClaimed { seconds, claimed });
        }
    }
    Ok(())
}

fn check_time(plan: &Plan, program: &Program, claims: &Claims) -> Result<(), VerifyError> {
    let Some(claimed) = claims.predicted_s else { return Ok(()) };
    let seconds = simulate(program, &plan.problem.cluster).map_or(f64::INFINITY, |trace| trace.makespan_s);
    match differs(seconds, claimed) {
        true => Err(VerifyError::TimeClaimed { seconds, claimed }),
        false => Ok(()),
    }
}

fn differs(a: f64, b: f64) -> bool {
    (a - b).abs() > ROUNDING * a.abs().max(b.abs()) || a.is_nan() != b.is_nan()
}

#[cfg(test)]
mod tests;
