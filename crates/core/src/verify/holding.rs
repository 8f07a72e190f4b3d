//! Whole values: senders hold what they send, and receivers end up with what they want, each element once.
//!
//! A box that lies in the receiver's destination shard is delivered there; any other is in transit, and delivers
//! nothing:
//!
//! ```text
//! r2 wants [0:4]      held from the start [0:1]  +  t3 brings [1:3]  +  t7 brings [3:4]   fills it
//!                     t9 brings [4:8]            in transit
//! ```

use rustc_hash::FxHashMap;

use crate::id::{Rank, RegionId, TransferId};
use crate::region::Region;
use crate::reshard::Plan;
use crate::reshard::shards::{AllSides, Sides};

use super::error::VerifyError;
use super::tiling::{Flaw, Tile, check_tiling, uncovered};

/// Every sender holds what it sends: from the start, or by transfers named in `after`.
pub fn check_senders(plan: &Plan, sides: &AllSides) -> Result<(), VerifyError> {
    for (i, t) in plan.transfers().iter().enumerate() {
        let brought = plan.after(t).iter().map(|a| &plan.transfers()[a.index()]);
        let mut brought = brought.filter(|a| a.dst == t.src && a.tensor == t.tensor);
        if brought.clone().any(|b| b.region == t.region) {
            continue; // the usual forwarding, seen without a look at the box
        }
        let (region, shards) = (plan.region(t), &sides.tensor(t.tensor).src);
        if shards.contains(t.src, region) || brought.clone().any(|b| plan.region(b).contains(region)) {
            continue;
        }
        let brought = brought.by_ref().map(|b| plan.region(b));
        let own = if shards.is_partial() { vec![] } else { shards.common(t.src, region) };
        let held = own.iter().chain(brought).map(Region::spans);
        if let Some(lacking) = uncovered(region, held).into_iter().next() {
            let (transfer, region) = (TransferId::at(i), region.clone());
            return Err(VerifyError::NotHeld { transfer, rank: t.src, region, lacking });
        }
    }
    Ok(())
}

/// Every receiver of whole values ends up with its destination shard.
pub fn check_receivers(plan: &Plan, sides: &AllSides) -> Result<(), VerifyError> {
    let arrivals = Arrivals::new(plan);
    for (tensor, sides) in (0..).zip(sides.iter()) {
        if sides.src.is_partial() {
            continue;
        }
        let mut filled = Filled::default();
        arrivals.for_each_receiver(plan, tensor, |rank, arrived| {
            if filled.is_known(plan, sides, rank, arrived) {
                return Ok(());
            }
            check_receiver(plan, sides, tensor, rank, arrived)?;
            filled.learn(sides, rank);
            Ok(())
        })?;
    }
    Ok(())
}

/// The boxes that filled a shard, kept for those who want the same shard: they mostly get the same boxes.
#[derive(Default)]
struct Filled<'a> {
    /// By tile of the destination: ids of boxes, sorted.
    by_tile: FxHashMap<&'a [u32], Vec<RegionId>>,
    asked: Vec<RegionId>,
}

impl<'a> Filled<'a> {
    /// Whether the very boxes that arrive here filled the same shard elsewhere. Where the rank holds something itself,
    /// that has to be looked at too.
    fn is_known(&mut self, plan: &Plan, sides: &Sides, rank: Rank, arrived: &[TransferId]) -> bool {
        self.asked.clear();
        let Some(tile) = sides.dst.tile(rank).filter(|_| sides.src.tile(rank).is_none()) else {
            return false;
        };
        self.asked.extend(arrived.iter().map(|id| plan.transfers()[id.index()].region));
        self.asked.sort_unstable();
        self.by_tile.get(tile).is_some_and(|known| *known == self.asked)
    }

    /// What was asked last is right.
    fn learn(&mut self, sides: &'a Sides, rank: Rank) {
        if let Some(tile) = sides.dst.tile(rank).filter(|_| sides.src.tile(rank).is_none()) {
            self.by_tile.insert(tile, std::mem::take(&mut self.asked));
        }
    }
}

fn check_receiver(
    plan: &Plan,
    sides: &Sides,
    tensor: u32,
    rank: Rank,
    arrived: &[TransferId],
) -> Result<(), VerifyError> {
    let wanted = sides.dst.boxes(rank);
    let kept: Vec<Region> = wanted.iter().flat_map(|w| sides.src.common(rank, w)).collect();
    let mut tiles: Vec<Tile<Option<TransferId>>> =
        kept.iter().map(|k| Tile { spans: k.spans(), by: None }).collect();
    for &id in arrived {
        let region = plan.region(&plan.transfers()[id.index()]);
        if sides.dst.contains(rank, region) {
            tiles.push(Tile { spans: region.spans(), by: Some(id) });
        }
    }
    fill(&wanted, tiles).map_err(|flaw| match flaw {
        Flaw::Missing(region) => VerifyError::Missing { tensor, rank, region },
        Flaw::Overlap { region, first, second } => {
            let (first, second) = (first.min(second), first.max(second));
            let second = second.expect("what a rank holds from the start does not overlap");
            VerifyError::Twice { tensor, rank, region, first, second }
        }
    })
}

/// Checks that tiles, each inside one of the boxes, fill them all.
pub fn fill<T: Copy>(boxes: &[Region], mut tiles: Vec<Tile<T>>) -> Result<(), Flaw<T>> {
    if let [only] = boxes {
        return check_tiling(only, &mut tiles);
    }
    for wanted in boxes {
        let inside = |t: &Tile<T>| wanted.spans().iter().zip(t.spans).all(|(w, s)| w.contains(*s));
        let (mut of_box, rest): (Vec<_>, Vec<_>) = tiles.into_iter().partition(inside);
        check_tiling(wanted, &mut of_box)?;
        tiles = rest;
    }
    Ok(())
}

/// Transfers by tensor, and of one tensor by receiver; in list order within.
pub struct Arrivals {
    by_tensor: Vec<TransferId>,
    starts: Vec<usize>,
}

impl Arrivals {
    pub fn new(plan: &Plan) -> Self {
        let ids = (0..plan.transfers().len()).map(TransferId::at);
        let tensor_of = |id: TransferId| plan.transfers()[id.index()].tensor as usize;
        let (by_tensor, starts) = sort_by_count(ids, plan.problem.reshards.len(), tensor_of);
        Self { by_tensor, starts }
    }

    /// Visits every rank of the destination mesh with what it receives.
    pub fn for_each_receiver(
        &self,
        plan: &Plan,
        tensor: u32,
        mut visit: impl FnMut(Rank, &[TransferId]) -> Result<(), VerifyError>,
    ) -> Result<(), VerifyError> {
        let ids = &self.by_tensor[self.starts[tensor as usize]..self.starts[tensor as usize + 1]];
        let receiver = |id: TransferId| plan.transfers()[id.index()].dst.index();
        let num_ranks = plan.problem.topology.num_ranks();
        let (ids, starts) = sort_by_count(ids.iter().copied(), num_ranks, receiver);
        for &rank in &plan.problem.reshards[tensor as usize].dst.ranks {
            visit(rank, &ids[starts[rank.index()]..starts[rank.index() + 1]])?;
        }
        Ok(())
    }
}

/// Sorts by a small key and keeps the order otherwise; key `k` is at `starts[k]..starts[k + 1]`.
fn sort_by_count(
    ids: impl Iterator<Item = TransferId> + Clone,
    num_keys: usize,
    key: impl Fn(TransferId) -> usize,
) -> (Vec<TransferId>, Vec<usize>) {
    let mut starts = vec![0; num_keys + 1];
    let mut len = 0;
    for id in ids.clone() {
        starts[key(id) + 1] += 1;
        len += 1;
    }
    for k in 0..num_keys {
        starts[k + 1] += starts[k];
    }
    let mut next = starts.clone();
    let mut sorted = vec![TransferId(0); len];
    for id in ids {
        let place = &mut next[key(id)];
        sorted[*place] = id;
        *place += 1;
    }
    (sorted, starts)
}
