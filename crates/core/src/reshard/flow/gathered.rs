//! Small tensors in few messages: put together by one of those who want them, and passed on whole.
//!
//! Where 256 devices hold a slice of a norm that 128 others want whole, every slice sent to everybody makes 32,768 messages of some
//! bytes each; a model has hundreds of norms, and nearly all messages of its plan would be theirs:
//!
//! ```text
//! 256 slices ──► one that wants it ──► a device of every other host ──► the others there       255 + 1 + 127 messages
//!                                      two each, and two each of those
//! ```
//!
//! It takes the bytes of whoever puts together, and a wait until all slices are there. So it is done only for tensors that are, all
//! together, a thousandth of what has to be moved, and only where it saves most of the messages. They weigh as much as the heaviest
//! stream beside them: nobody is slowed down by more than that thousandth, and they do not come last.
//!
//! Everything arrives where it is wanted, so no memory is needed beside the tensors. Where a host both holds and wants some of a
//! tensor it is left alone: what a host has is not brought in.

use std::collections::{BTreeMap, BTreeSet};

use crate::id::{HostId, Rank, RegionId, TransferId};
use crate::region::{Region, Span};

use super::super::pieces::Pieces;
use super::super::plan::Plan;
use super::super::problem::{PlanError, Problem, Reshard};

/// Tensors that are gathered have this share of all bytes that devices will hold, together.
const SHARE: u128 = 1024;
/// A slice of this size costs more to send than to announce.
const MAX_SLICE_BYTES: u64 = 64 << 10;
/// How many times fewer messages make it worth it.
const FEWER: usize = 2;

/// Tensors in few messages.
pub(super) struct Gathered {
    tensors: Vec<(u32, Vec<Wanted>)>,
    /// How many messages they take, and how many they would take slice by slice.
    pub messages: usize,
    pub apart: usize,
}

/// A box that some ranks want, and the slices of it that others hold.
struct Wanted {
    region: Region,
    receivers: Vec<Rank>,
    slices: Vec<(Region, Vec<Rank>)>,
}

impl Wanted {
    fn messages(&self) -> usize {
        self.slices.len() + self.receivers.len() - 1
    }

    fn messages_apart(&self) -> usize {
        self.slices.len() * self.receivers.len()
    }
}

impl Gathered {
    /// The tensors of a problem that are worth it.
    pub(super) fn of(problem: &Problem) -> Result<Self, PlanError> {
        let all: u128 = problem.reshards.iter().map(|r| r.dst.layout.bytes_on_devices()).sum();
        let mut by_size: Vec<(u128, usize)> = vec![];
        for (tensor, reshard) in problem.reshards.iter().enumerate() {
            let bytes = reshard.dst.layout.bytes_on_devices();
            if bytes * SHARE <= all && may_be_gathered(problem, reshard) {
                by_size.push((bytes, tensor));
            }
        }
        by_size.sort_unstable();
        let mut gathered = Self { tensors: vec![], messages: 0, apart: 0 };
        let mut taken = 0;
        for (bytes, tensor) in by_size {
            if (taken + bytes) * SHARE > all {
                break;
            }
            let Some(wanted) = wanted(&problem.reshards[tensor])? else { continue };
            let messages = wanted.iter().map(Wanted::messages).sum::<usize>();
            let apart = wanted.iter().map(Wanted::messages_apart).sum::<usize>();
            if FEWER * messages <= apart {
                taken += bytes;
                gathered.messages += messages;
                gathered.apart += apart;
                gathered.tensors.push((tensor as u32, wanted));
            }
        }
        gathered.tensors.sort_unstable_by_key(|(tensor, _)| *tensor);
        Ok(gathered)
    }

    pub(super) fn len(&self) -> usize {
        self.tensors.len()
    }

    /// The problem without these tensors, and the numbers that the others have in it.
    pub(super) fn others(&self, problem: &Problem) -> (Problem, Vec<u32>) {
        let is_gathered = |tensor: u32| self.tensors.binary_search_by_key(&tensor, |(t, _)| *t).is_ok();
        let numbers: Vec<u32> = (0..problem.reshards.len() as u32).filter(|t| !is_gathered(*t)).collect();
        let reshards = numbers.iter().map(|&t| problem.reshards[t as usize].clone()).collect();
        (Problem { reshards, ..problem.clone() }, numbers)
    }

    /// Adds their transfers to a plan of the others.
    pub(super) fn add_to(&self, plan: &mut Plan) {
        let stream = Stream {
            weight: plan.transfers().iter().map(|t| t.weight).max().unwrap_or(1),
            lane: plan.transfers().iter().map(|t| t.lane + 1).max().unwrap_or(0),
        };
        // Whose turn it is to put together.
        let mut turn = 0;
        for (tensor, wanted) in &self.tensors {
            for wanted in wanted {
                stream.add(plan, *tensor, wanted, turn);
                turn += 1;
            }
        }
    }
}

/// Whole values, from hosts that want none of it.
fn may_be_gathered(problem: &Problem, reshard: &Reshard) -> bool {
    let hosts =
        |ranks: &[Rank]| ranks.iter().map(|&r| problem.topology.host(r)).collect::<BTreeSet<HostId>>();
    let whole = reshard.src.layout.partial().is_none() && reshard.dst.layout.partial().is_none();
    whole && reshard.dst.ranks.len() > 1 && hosts(&reshard.src.ranks).is_disjoint(&hosts(&reshard.dst.ranks))
}

/// The boxes that are wanted; none where a device wants more than one, or where slices are large.
fn wanted(reshard: &Reshard) -> Result<Option<Vec<Wanted>>, PlanError> {
    let Pieces { src_tiles, dst_tiles, pieces } = Pieces::of(reshard)?;
    let mut slices: Vec<Vec<(Region, Vec<Rank>)>> = vec![vec![]; dst_tiles.len()];
    for piece in pieces {
        let holders = src_tiles[piece.src_tile as usize].ranks.clone();
        slices[piece.dst_tile as usize].push((piece.region, holders));
    }
    let width = reshard.src.layout.dtype().bytes();
    let mut wanted = vec![];
    for (tile, slices) in dst_tiles.into_iter().zip(slices) {
        let region = around(&slices);
        let volume: u64 = slices.iter().map(|(slice, _)| slice.volume()).sum();
        let is_box = region.volume() == volume;
        if !is_box || slices.iter().any(|(slice, _)| slice.volume() * width > MAX_SLICE_BYTES) {
            return Ok(None);
        }
        wanted.push(Wanted { region, receivers: tile.ranks, slices });
    }
    // With boxes, a device may be in several tiles: then it is not one box that it wants.
    let mut ranks: Vec<Rank> = wanted.iter().flat_map(|w| w.receivers.iter().copied()).collect();
    let all = ranks.len();
    ranks.sort_unstable();
    ranks.dedup();
    Ok((ranks.len() == all).then_some(wanted))
}

/// The smallest box around all slices.
fn around(slices: &[(Region, Vec<Rank>)]) -> Region {
    let dims = slices.first().map_or(0, |(slice, _)| slice.num_dims());
    let span = |dim: usize| {
        let spans = slices.iter().map(|(slice, _)| slice.spans()[dim]);
        let start = spans.clone().map(|s| s.start).min().unwrap_or(0);
        Span::new(start, spans.map(|s| s.end).max().unwrap_or(0))
    };
    Region::new((0..dims).map(span).collect())
}

/// What all of these transfers have in common.
struct Stream {
    weight: u64,
    lane: u32,
}

impl Stream {
    fn add(&self, plan: &mut Plan, tensor: u32, wanted: &Wanted, turn: usize) {
        let first = wanted.receivers[turn % wanted.receivers.len()];
        let mut brought = vec![];
        for (at, (slice, holders)) in wanted.slices.iter().enumerate() {
            let holder = holders[(turn + at) % holders.len()];
            let region = plan.add_region(slice.clone());
            brought.push(self.send(plan, tensor, (holder, first), region, &[]));
        }
        let region = match &wanted.slices[..] {
            [_] => plan.transfers()[brought[0].index()].region,
            _ => plan.add_region(wanted.region.clone()),
        };
        // The first of every host, the one who put together before all others.
        let mut hosts: BTreeMap<(bool, HostId), Vec<Rank>> = BTreeMap::new();
        let home = plan.problem.topology.host(first);
        for &rank in wanted.receivers.iter().filter(|r| **r != first) {
            let host = plan.problem.topology.host(rank);
            hosts.entry((host != home, host)).or_default().push(rank);
        }
        let neighbours = hosts.remove(&(false, home)).unwrap_or_default();
        let mut leaders = vec![first];
        for ranks in hosts.values_mut() {
            let leader = turn % ranks.len();
            leaders.push(ranks.swap_remove(leader));
        }
        let has = self.pass_on(plan, tensor, region, &leaders, brought);
        let inside = std::iter::once(neighbours).chain(hosts.into_values());
        for ((leader, others), brought) in leaders.into_iter().zip(inside).zip(has) {
            let ranks: Vec<Rank> = std::iter::once(leader).chain(others).collect();
            self.pass_on(plan, tensor, region, &ranks, brought);
        }
    }

    /// From the first of some ranks to all of them: each tells two. Returns what brought it to each.
    fn pass_on(
        &self,
        plan: &mut Plan,
        tensor: u32,
        region: RegionId,
        ranks: &[Rank],
        brought: Vec<TransferId>,
    ) -> Vec<Vec<TransferId>> {
        let mut has = vec![brought];
        for (at, &rank) in ranks.iter().enumerate().skip(1) {
            let teller = (at - 1) / 2;
            let after = has[teller].clone();
            has.push(vec![self.send(plan, tensor, (ranks[teller], rank), region, &after)]);
        }
        has
    }

    fn send(
        &self,
        plan: &mut Plan,
        tensor: u32,
        (src, dst): (Rank, Rank),
        region: RegionId,
        after: &[TransferId],
    ) -> TransferId {
        let id = plan.add(tensor, src, dst, region, after);
        let transfer = plan.transfer_mut(id);
        (transfer.weight, transfer.lane) = (self.weight, self.lane);
        id
    }
}
