//! Plans without order, proven rank by rank. Where nobody needs the program, each rank is lowered, looked at and forgotten, so that
//! all of it is never there.
//!
//! Where no transfer waits for another and nothing is added up, ranks have little to do with each other. Everything that follows
//! together says that they fit:
//!
//! ```text
//! messages    a tag is a transfer; the op says of it what the plan says (ranks, lane, box, bytes); a rank's tags rise, of its
//!             sends and of its receives; over all ranks there are as many of each as transfers     each has both ends, in one order
//! order       ops wait for copies before them in the list, and for nothing else                    nothing waits in a cycle
//! memory      what is read was there from the start, or was put there by a copy that is waited for
//! goals       as the layouts say
//! ```
//!
//! Whatever does not look like that (and whatever is wrong) is left to the proof of the whole program, which also says why.

use crate::id::{Rank, TransferId};
use crate::program::{DepKind, Op, OpKind, Program, RankProgram};
use crate::region::Region;
use crate::reshard::Plan;
use crate::reshard::lower::{Addressing, lower_each};
use crate::reshard::shards::AllSides;

use super::before::Over;
use super::cells::RankMemory;
use super::goals::{self, Sides};
use super::sets::PartSet;
use super::{Proof, VerifyError, tables};

/// The proof of a plan, if it can be had rank by rank. The plan's own laws were checked.
pub fn prove(plan: &Plan, sides: &AllSides) -> Option<Proof> {
    Proving::new(plan, sides)?.proof(|proving| {
        lower_each(plan, sides, Addressing::Apart, |program, rank, ranked| {
            proving.holds(program, rank, ranked).is_some()
        })
    })
}

/// The same of a program that the plan was lowered to.
pub fn prove_lowered(plan: &Plan, sides: &AllSides, program: &Program) -> Option<Proof> {
    let proving = Proving::new(plan, sides)?;
    if program.ranks.len() != plan.problem.topology.num_ranks() {
        return None;
    }
    proving.proof(|proving| {
        let mut ranks = (0..).map(Rank).zip(&program.ranks);
        ranks.all(|(rank, ranked)| proving.holds(program, rank, ranked).is_some())
    })
}

/// Whether a program passes for a plan's, rank by rank: for tests, which have wrong ones.
#[doc(hidden)]
pub fn accepts(plan: &Plan, program: &Program) -> bool {
    prove_lowered(plan, &AllSides::of(&plan.problem), program).is_some()
}

struct Proving<'a> {
    plan: &'a Plan,
    goals: Sides<'a>,
    /// The tensors as boxes, once there is a rank.
    wholes: Option<Vec<Region>>,
    sent: usize,
    received: usize,
    peak: (u64, Rank),
}

impl<'a> Proving<'a> {
    /// `None` where transfers wait for others, or parts are added up.
    fn new(plan: &'a Plan, sides: &AllSides) -> Option<Self> {
        if !plan.is_unordered() || sides.any_partial() {
            return None;
        }
        let goals = Sides::of(&plan.problem);
        let fits = goals.num_ranks as usize <= plan.problem.topology.num_ranks();
        fits.then_some(Self { plan, goals, wholes: None, sent: 0, received: 0, peak: (0, Rank(0)) })
    }

    /// The proof, if `look_at_all` says that all ranks hold, and every transfer has both ends.
    fn proof(mut self, look_at_all: impl FnOnce(&mut Self) -> bool) -> Option<Proof> {
        let all = look_at_all(&mut self);
        let transfers = self.plan.transfers().len();
        let matched = self.sent == transfers && self.received == transfers;
        let (peak_extra_bytes, peak_rank) = self.peak;
        let bytes = self.plan.bytes_moved();
        (all && matched).then_some(Proof { transfers, bytes, peak_extra_bytes, peak_rank })
    }

    /// Looks at one rank.
    fn holds(&mut self, program: &Program, rank: Rank, ranked: &RankProgram) -> Option<()> {
        if self.wholes.is_none() {
            self.wholes = Some(tables::wholes(program).ok()?);
        }
        tables::check_rank(program, rank, ranked, self.wholes.as_deref()?).ok()?;
        self.match_messages(rank, ranked)?;
        follow(program, rank, ranked).ok()?;
        goals::check_rank(&self.goals, program, rank, ranked).ok()?;
        let extra = ranked.extra_bytes();
        if extra > self.peak.0 {
            self.peak = (extra, rank);
        }
        Some(())
    }

    fn match_messages(&mut self, rank: Rank, ranked: &RankProgram) -> Option<()> {
        let (mut last_sent, mut last_received) = (None, None);
        for (i, op) in (0..).zip(&ranked.ops) {
            let waits_for_copies = ranked.deps(op).iter().all(|dep| {
                let on = &ranked.ops[dep.op as usize];
                dep.op < i && dep.kind == DepKind::Done && matches!(on.kind, OpKind::Copy { .. })
            });
            let (last, count) = match op.kind {
                OpKind::Send { .. } => (&mut last_sent, &mut self.sent),
                OpKind::Recv { reduce: false, .. } => (&mut last_received, &mut self.received),
                OpKind::Copy { reduce: false, .. } if waits_for_copies => continue,
                _ => return None,
            };
            let tag = op.tag()?;
            if !waits_for_copies || !says_as_planned(self.plan, rank, op, tag) || *last >= Some(tag) {
                return None;
            }
            (*last, *count) = (Some(tag), *count + 1);
        }
        Some(())
    }
}

/// Whether an end of a message is what the plan says of the transfer of its tag.
fn says_as_planned(plan: &Plan, rank: Rank, op: &Op, tag: u32) -> bool {
    let Some(t) = plan.transfers().get(TransferId(tag).index()) else { return false };
    let ends = match op.kind {
        OpKind::Send { to, lane, .. } => (t.src, t.dst, t.lane) == (rank, to, lane),
        OpKind::Recv { from, lane, .. } => (t.src, t.dst, t.lane) == (from, rank, lane),
        OpKind::Copy { .. } | OpKind::Compute { .. } => false,
    };
    ends && (t.tensor, t.region, t.bytes) == (op.tensor, op.region, op.bytes)
}

/// Follows a rank's memory in the order of its list, in which every op stands behind what it waits for.
fn follow(program: &Program, rank: Rank, ranked: &RankProgram) -> Result<(), VerifyError> {
    let mut memory = RankMemory::new(program, rank, ranked)?;
    let (mut before, whole) = (Waited(ranked), PartSet::single(0));
    for (i, op) in (0..).zip(&ranked.ops) {
        let (from, into) = op.ends();
        // What is received is what was to be sent: every sender is looked at, too.
        let carried = from.map(|from| memory.read(i, from, &mut before)).transpose()?;
        if let Some(into) = into {
            memory.write(i, into, carried.as_ref().unwrap_or(&whole), &mut before)?;
        }
    }
    memory.check_goals()
}

/// What an op itself waits for is over, and nothing else is known.
struct Waited<'a>(&'a RankProgram);

impl Over for Waited<'_> {
    fn is_over(&mut self, _rank: u32, first: u32, then: u32) -> bool {
        self.0.deps(&self.0.ops[then as usize]).iter().any(|dep| dep.op == first && dep.kind == DepKind::Done)
    }
}
