//! From a plan to the program of every rank, or of one.
//!
//! A transfer becomes a send on one rank and a receive on the other; its `after` becomes dependencies between ops of
//! one rank. Where a transfer waits for one that touches neither of its ranks, a word of no bytes carries the news:
//!
//! ```text
//! t0: r0 -> r1                       r1   recv t0, send a word to r2
//! t1: r2 -> r3, after t0             r2   recv the word, send t1
//! ```
//!
//! What a rank does follows from the transfers that touch it ([`touching`]), so one rank can be lowered without the others:
//! where everything lies ([`homes`]), then its ops in list order ([`emit`]). What a rank holds and also wants is
//! copied first.
//!
//! Any plan lowers to some program; that it is a right one is for the verifier to say.

mod emit;
mod homes;
mod shards;
mod touching;

use std::sync::Arc;

use crate::id::Rank;
use crate::program::posting::{Matching, Posting, PostingError};
use crate::program::{BoxTable, DepKind, Parts, Program, RankProgram, Tensor};

use super::plan::Plan;
use super::problem::Reshard;
use super::shards::AllSides;
use emit::lower_rank;
use touching::Lookup;
pub(crate) use touching::Touching;

/// The chunk of programs in which nobody follows what has half arrived: then nobody gains by small ones.
const WHOLE: u64 = u64::MAX;

/// Whose tensors lie where.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Addressing {
    /// Source and destination apart.
    #[default]
    Apart,
    /// On one rank an element has one address in both layouts: that of its place in the whole tensor.
    InPlace(Rank),
}

/// Lowers a plan.
pub fn lower(plan: &Plan) -> Program {
    lower_with(plan, Addressing::Apart)
}

/// Lowers a plan for tensors that lie as told.
pub fn lower_with(plan: &Plan, memory: Addressing) -> Program {
    let sides = AllSides::of(&plan.problem);
    let touching = plan.touching();
    let mut program = start(plan);
    let mut lookup = Lookup::table(plan.transfers().len());
    for rank in (0..plan.problem.topology.num_ranks()).map(Rank::at) {
        let mine = touching.of(rank);
        lookup.fill(mine.transfers);
        let lowered = lower_rank(plan, &sides, rank, memory, mine, &lookup, &mut program.boxes);
        program.ranks.push(lowered);
    }
    let follows = |rank: &RankProgram| rank.deps.iter().any(|dep| dep.kind == DepKind::Stream);
    if !program.ranks.iter().any(follows) {
        program.chunk_bytes = WHOLE;
    }
    program
}

/// Lowers one rank after the other and keeps none: `look` sees each with the tables of tensors and boxes, until it has seen enough. True
/// if it has seen all.
pub(crate) fn lower_each(
    plan: &Plan,
    sides: &AllSides,
    memory: Addressing,
    mut look: impl FnMut(&Program, Rank, &RankProgram) -> bool,
) -> bool {
    let touching = plan.touching();
    let mut program = start(plan);
    let mut lookup = Lookup::table(plan.transfers().len());
    (0..plan.problem.topology.num_ranks()).map(Rank::at).all(|rank| {
        let mine = touching.of(rank);
        lookup.fill(mine.transfers);
        program.boxes.forget_own();
        let lowered = lower_rank(plan, sides, rank, memory, mine, &lookup, &mut program.boxes);
        look(&program, rank, &lowered)
    })
}

/// One rank's part of what [`lower`] makes: as many ranks, of which the others do nothing. It costs in proportion to the rank's own
/// transfers, and, of a plan that was read or put together and has not been lowered yet, a look at every transfer.
pub fn project(plan: &Plan, rank: Rank, memory: Addressing) -> Program {
    let alone;
    let touching = match plan.known_touching() {
        Some(touching) => touching,
        None => {
            alone = Touching::one(plan, rank);
            &alone
        }
    };
    let sides = AllSides::of(&plan.problem);
    let mut program = start(plan);
    let mine = touching.of(rank);
    let lookup = Lookup::map(mine.transfers);
    let lowered = lower_rank(plan, &sides, rank, memory, mine, &lookup, &mut program.boxes);
    program.ranks = vec![RankProgram::default(); plan.problem.topology.num_ranks()];
    program.ranks[rank.index()] = lowered;
    program
}

/// In which order all ranks of [`project`]'s programs post their messages. Where a transfer waits for another, that takes all of them.
pub fn posting(plan: &Plan, matching: Matching) -> Result<Posting, PostingError> {
    match plan.is_unordered() && !AllSides::of(&plan.problem).any_partial() {
        true => Ok(Posting::unordered(matching)),
        false => Posting::new(&lower(plan), matching),
    }
}

fn start(plan: &Plan) -> Program {
    let tensors = plan.problem.reshards.iter().map(tensor).collect();
    let boxes = BoxTable::sharing(plan.shared_regions());
    let chunk_bytes = if plan.is_unordered() { WHOLE } else { plan.chunk_bytes };
    Program { chunk_bytes, tensors, boxes, ranks: vec![] }
}

fn tensor(reshard: &Reshard) -> Tensor {
    let layout = &reshard.src.layout;
    let count = layout.num_contributions() as u32;
    let partial = layout.partial().filter(|_| count > 1).map(|p| Parts { op: p.op, count });
    Tensor {
        name: Arc::from(reshard.name.as_str()),
        dtype: layout.dtype(),
        shape: layout.shape().into(),
        partial,
    }
}

#[cfg(test)]
mod tests;
