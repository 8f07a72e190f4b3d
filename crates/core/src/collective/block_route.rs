//! The route of one block: where its parts are added up, and who passes the sum on to whom.
//!
//! A station is a rank that combines its own part with what other stations send it, in the order of its inputs, and
//! sends the result to one of the stations behind it. The last station has the whole sum, and from there it spreads:
//!
//! ```text
//! stations   r1: own        r2: own + r1        r0: own + r2          the ring r1 -> r2 -> r0
//! spread     r0 -> r1, r1 -> r2
//! ```
//!
//! Where nothing is added up there is one station, the holder, and only the spreading.

use rustc_hash::FxHashMap;

use crate::id::{Rank, RegionId, TransferId};
use crate::reshard::Plan;

/// What a station adds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Input {
    Own,
    /// An earlier station, by its place in the list.
    From(usize),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Station {
    pub rank: Rank,
    pub inputs: Vec<Input>,
}

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct BlockRoute {
    pub stations: Vec<Station>,
    pub spread: Vec<(Rank, Rank)>,
}

impl BlockRoute {
    /// Adds a station behind the others; answers its place.
    pub fn add(&mut self, rank: Rank, inputs: Vec<Input>) -> usize {
        self.stations.push(Station { rank, inputs });
        self.stations.len() - 1
    }

    /// Adds a station that only sends its own part.
    pub fn leaf(&mut self, rank: Rank) -> Input {
        Input::From(self.add(rank, vec![Input::Own]))
    }
}

/// Writes one block's way into a plan.
pub(super) fn write(plan: &mut Plan, tensor: u32, region: RegionId, way: &BlockRoute) {
    let mut arrivals: Vec<Vec<TransferId>> = vec![vec![]; way.stations.len()];
    // By rank: who reads what it has added up so far.
    let mut read_by: FxHashMap<Rank, TransferId> = FxHashMap::default();
    for (at, station) in way.stations.iter().enumerate() {
        let own = station.inputs.iter().position(|input| *input == Input::Own);
        for (i, input) in station.inputs.iter().enumerate() {
            let Input::From(from) = *input else { continue };
            let (first, sender) = (arrivals[at].is_empty(), way.stations[from].rank);
            let id = plan.add(tensor, sender, station.rank, region, &arrivals[from]);
            let transfer = plan.transfer_mut(id);
            // The own part may as well be there before the first that arrives: the sum of two has no order.
            transfer.reduce = !first || own.is_some_and(|own| own <= i + 1);
            transfer.then_own = !first && own == Some(i + 1);
            if !arrivals[from].is_empty() {
                read_by.insert(sender, id);
            }
            arrivals[at].push(id);
        }
    }
    let root = way.stations.last().map(|s| s.rank).zip(arrivals.pop());
    let mut has: FxHashMap<Rank, Vec<TransferId>> = root.into_iter().collect();
    for &(from, to) in &way.spread {
        let mut after = has[&from].clone();
        after.extend(read_by.get(&to).filter(|read| !has[&from].contains(read)));
        has.insert(to, vec![plan.add(tensor, from, to, region, &after)]);
    }
}
