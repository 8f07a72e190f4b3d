//! Follows what the memory of every rank holds through a program.
//!
//! What ranks know of each other is what messages carry, so each rank's ops are followed in their order, as far as what they
//! receive was sent; then the next rank's. That is the same as everything in one order over all ranks, except that what belongs
//! together is looked at together: with thousands of ranks their memories are in nobody's cache.

use std::collections::VecDeque;

use crate::id::Rank;
use crate::program::{Holds, OpKind};

use super::before::{Before, Over};
use super::cells::RankMemory;
use super::error::VerifyError;
use super::order::Order;
use super::sets::PartSet;

/// Follows whole values: what is received is what was to be sent, if every sender is right, so ranks can be looked at one by
/// one.
pub fn follow_by_rank(order: &Order) -> Result<(), VerifyError> {
    let mut before = Before::new(order);
    let whole = PartSet::single(0);
    for rank in 0..order.program.ranks.len() as u32 {
        let mut memory = RankMemory::new(order.program, Rank(rank), &order.program.ranks[rank as usize])?;
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

/// Follows everything, with what messages carry.
pub fn follow_all(order: &Order) -> Result<(), VerifyError> {
    let ranks = (0..).map(Rank).zip(&order.program.ranks);
    let memories = ranks.map(|(rank, ranked)| RankMemory::new(order.program, rank, ranked));
    let mut following = Following {
        order,
        before: Before::new(order),
        memories: memories.collect::<Result<_, _>>()?,
        ops: (0..order.program.ranks.len() as u32).map(|rank| order.of_rank(rank)).collect(),
        next: vec![0; order.program.ranks.len()],
        carried: vec![None; order.messages.num_tags()],
        waits_for: vec![None; order.program.ranks.len()],
        ready: (0..order.program.ranks.len() as u32).collect(),
    };
    while let Some(rank) = following.ready.pop_front() {
        following.advance(rank)?;
    }
    let ends = following.next.iter().zip(&following.ops);
    assert!(ends.into_iter().all(|(next, ops)| *next == ops.len()), "messages with an order arrive");
    following.memories.iter().try_for_each(RankMemory::check_goals)
}

struct Following<'a> {
    order: &'a Order<'a>,
    before: Before<'a>,
    /// By rank, as all but what is carried: its memory, its ops in an order in which they can run, and how many have.
    memories: Vec<RankMemory<'a>>,
    ops: Vec<Vec<u32>>,
    next: Vec<usize>,
    /// By tag: the parts that were read and are still to be written.
    carried: Vec<Option<PartSet>>,
    /// The tag that a rank cannot go on without.
    waits_for: Vec<Option<u32>>,
    ready: VecDeque<u32>,
}

impl Following<'_> {
    /// Follows a rank until it needs what was not sent yet.
    fn advance(&mut self, rank: u32) -> Result<(), VerifyError> {
        let r = rank as usize;
        while let Some(&op) = self.ops[r].get(self.next[r]) {
            let of = self.order.op((rank, op));
            match (of.tag(), of.ends()) {
                (None, _) => follow_local(&mut self.memories[r], self.order, (rank, op), &mut self.before)?,
                (Some(tag), (Some(from), _)) => {
                    self.carried[tag as usize] = Some(self.memories[r].read(op, from, &mut self.before)?);
                    let to = self.order.messages[tag].recv.0;
                    if self.waits_for[to as usize].take_if(|waited| *waited == tag).is_some() {
                        self.ready.push_back(to);
                    }
                }
                (Some(tag), (None, Some(into))) => {
                    let Some(parts) = self.carried[tag as usize].take() else {
                        self.waits_for[r] = Some(tag);
                        return Ok(());
                    };
                    self.memories[r].write(op, into, &parts, &mut self.before)?;
                }
                (Some(_), (None, None)) => {} // a word carries order, and that is known
            }
            self.next[r] += 1;
        }
        Ok(())
    }
}

/// Follows what a rank does by itself: a copy, a pass, or what a send reads.
fn follow_local(
    memory: &mut RankMemory,
    order: &Order,
    at: (u32, u32),
    before: &mut dyn Over,
) -> Result<(), VerifyError> {
    let (op, ranked) = (at.1, &order.program.ranks[at.0 as usize]);
    if let OpKind::Compute { needs, makes, .. } = order.op(at).kind {
        for tile in ranked.touched(needs) {
            let found = memory.read(op, *tile, before)?;
            memory.check_whole(op, *tile, &found)?;
        }
        for tile in ranked.touched(makes) {
            let Holds::Made(part) = ranked.tile(*tile).holds else {
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
