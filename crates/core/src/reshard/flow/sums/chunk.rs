//! How much of a sum has to arrive before it is passed on.
//!
//! Paths of sums run through every device that has a part, so they are long: with large chunks the last device would
//! wait for most of the time. A hop's first chunk takes as many chunks' time as there are lanes side by side on its
//! link; a chain fills in the sum of its hops.
//!
//! ```text
//! hop        NIC, 2 lanes    local, 1 lane    NIC, 3 lanes
//! fills in   2 c / nic   +   c / local    +   3 c / nic        c is a chunk
//! ```

use rustc_hash::{FxHashMap, FxHashSet};

use crate::id::TransferId;

use super::super::super::plan::{Plan, Transfer};
use super::super::super::strategy::MIN_CHUNK_BYTES;

/// The longest chain is to fill in this share of the busiest link's time.
const FILL_SHARE: f64 = 512.0;
/// Chunks below this size cost more than they save, unless a chain would not fill in this share even so.
const SMALL_CHUNK: u64 = 32 << 10;
const LONG_FILL_SHARE: f64 = 256.0;
const MAX_CHUNK: u64 = 4 << 20;

/// The chunk for a plan with sums.
pub(in super::super) fn fitting(plan: &Plan) -> u64 {
    let topology = &plan.problem.topology;
    let link = |t: &Transfer| match plan.crosses_hosts(t) {
        true => (true, topology.port(t.src).0),
        false => (false, t.src.0),
    };
    let rate = |t: &Transfer| match plan.crosses_hosts(t) {
        true => topology.ports[topology.port(t.src).index()].out_bytes_per_s,
        false => plan.problem.cluster.hosts[topology.host(t.src).index()].local_bytes_per_s,
    };
    let mut loads: FxHashMap<(bool, u32), (f64, FxHashSet<u32>)> = FxHashMap::default();
    for t in plan.transfers() {
        let (seconds, lanes) = loads.entry(link(t)).or_default();
        *seconds += t.bytes as f64 / rate(t);
        lanes.insert(t.lane);
    }
    let fill_s = longest_chain(plan, |t| loads[&link(t)].1.len() as f64 / rate(t));
    let busiest_s = loads.values().map(|(seconds, _)| *seconds).fold(0.0, f64::max);
    let within = |share: f64| (busiest_s / fill_s / share).min(1e18) as u64;
    let chunk = within(FILL_SHARE).max(within(LONG_FILL_SHARE).min(SMALL_CHUNK));
    (1 << chunk.max(1).ilog2()).clamp(MIN_CHUNK_BYTES, MAX_CHUNK)
}

/// What the hops of the longest chain come to; at least a single hop.
fn longest_chain(plan: &Plan, of: impl Fn(&Transfer) -> f64) -> f64 {
    let mut sums: Vec<f64> = Vec::with_capacity(plan.transfers().len());
    for t in plan.transfers() {
        sums.push(of(t) + leader(plan, t).map_or(0.0, |id| sums[id.index()]));
    }
    sums.into_iter().fold(1e-30, f64::max)
}

/// The transfer that brings a box to where another takes it up; it is the first in the other's `after`.
fn leader(plan: &Plan, t: &Transfer) -> Option<TransferId> {
    let first = *plan.after(t).first()?;
    let before = &plan.transfers()[first.index()];
    (before.dst == t.src && before.region == t.region).then_some(first)
}
