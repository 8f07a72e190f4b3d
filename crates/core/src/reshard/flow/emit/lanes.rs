//! Lanes: which transfers follow each other in one stream, and what each weighs.
//!
//! Where boxes are forwarded, a chain fills the faster the fewer streams share a link. So what one device sends along
//! one route is one lane: its boxes follow each other, and weigh as much as all of them together. Large boxes of all
//! devices behind a NIC share a lane.

use rustc_hash::FxHashMap;

use crate::id::{Rank, RegionId, TransferId};

use super::super::super::plan::Plan;
use super::Emitter;

/// Devices of a host take turns in a lane with boxes from this size on: well above what telling the next one costs.
const MIN_HANDED_OVER: u64 = 1 << 20;

/// The kind of routes that others wait for, and by how much more than others they weigh.
const WAITED_FOR: u8 = 7;
const URGENCY: u64 = 8;
/// What goes before others weighs so much more than they do: it has nearly all of a link.
const PRECEDENCE: u64 = 64;

/// Lanes of forwarded boxes.
#[derive(Default)]
pub(super) struct Lanes {
    /// By route, source (a device or the first of its host), and the node it sends to.
    numbers: FxHashMap<(RouteId, Rank, u32), usize>,
    lanes: Vec<Lane>,
}

/// Between hosts with forwarding (0) or without (5), inside one (1), of a sum (2), on a holder's host to a relay (3) or
/// to stay (4), along a packed tree (6), of a
/// sum that others wait for (7); its class or path; its place in the class, or the host.
pub(in super::super) type RouteId = (u8, u32, u32);

struct Lane {
    bytes: u64,
    last: Option<TransferId>,
}

impl Lanes {
    fn number(&mut self, route: RouteId, src: Rank, to: u32) -> usize {
        *self.numbers.entry((route, src, to)).or_insert_with(|| {
            self.lanes.push(Lane { bytes: 0, last: None });
            self.lanes.len() - 1
        })
    }
}

impl Emitter<'_> {
    /// The plan, with every transfer weighed: a forwarded one as its lane, any other as its channel, so that all that
    /// share a link end together.
    pub(in super::super) fn into_plan(mut self) -> Plan {
        let first_lane = self.first_lane();
        let weights = channel_bytes(&self.plan, first_lane);
        for (id, channel_bytes) in weights.into_iter().enumerate() {
            let t = self.plan.transfer_mut(TransferId::at(id));
            let weight = match t.lane.checked_sub(first_lane) {
                Some(lane) => self.lanes.lanes[lane as usize].bytes,
                None => channel_bytes,
            };
            t.weight = weight.max(1);
        }
        for id in std::mem::take(&mut self.alone) {
            let t = self.plan.transfer_mut(id);
            t.weight = t.bytes;
        }
        for id in std::mem::take(&mut self.urgent) {
            self.plan.transfer_mut(id).weight *= PRECEDENCE;
        }
        self.plan
    }

    /// Lanes below this are those of ranks.
    fn first_lane(&self) -> u32 {
        self.problem.topology.num_ranks() as u32
    }

    /// Adds a transfer from a device that holds the box. Where it is forwarded, it joins its lane, and where that may
    /// go on to another device, behind the lane's last.
    pub(super) fn add_root(
        &mut self,
        tensor: u32,
        ends: (Rank, Rank),
        region: RegionId,
        lane: Option<(RouteId, u32)>,
    ) -> TransferId {
        let (src, dst) = ends;
        let Some((route, to)) = lane else { return self.plan.add(tensor, src, dst, region, &[]) };
        let number = self.lanes.number(route, self.lane_source(src, region, tensor), to);
        let last = self.lanes.lanes[number].last.filter(|_| !self.many_ports);
        // Between the same two devices the channel keeps the order by itself.
        let last = last.filter(|l| {
            let last = &self.plan.transfers()[l.index()];
            (last.src, last.dst) != ends
        });
        let id = self.plan.add(tensor, src, dst, region, last.as_slice());
        self.join_lane(id, number);
        id
    }

    /// Who stands for a lane's source: the device itself, or its host for boxes that are worth a message between its
    /// devices.
    fn lane_source(&self, src: Rank, region: RegionId, tensor: u32) -> Rank {
        let topology = &self.problem.topology;
        let width = self.problem.reshards[tensor as usize].src.layout.dtype().bytes();
        match self.many_ports || self.plan.regions()[region.index()].volume() * width < MIN_HANDED_OVER {
            true => src,
            false => topology.ranks_of(topology.host(src)).next().expect("a host of a rank has ranks"),
        }
    }

    /// Adds the first transfer of a path that has a lane of its own.
    pub(in super::super) fn add_first(
        &mut self,
        tensor: u32,
        (src, dst): (Rank, Rank),
        region: RegionId,
        after: &[TransferId],
        route: RouteId,
    ) -> TransferId {
        let number = self.lanes.number(route, src, dst.0);
        let id = self.plan.add(tensor, src, dst, region, after);
        self.join_lane(id, number);
        if route.0 == WAITED_FOR {
            self.lanes.lanes[number].bytes += (URGENCY - 1) * self.plan.transfers()[id.index()].bytes;
        }
        id
    }

    fn join_lane(&mut self, id: TransferId, number: usize) {
        let first_lane = self.first_lane();
        let added = self.plan.transfer_mut(id);
        added.lane = first_lane + number as u32;
        self.lanes.lanes[number].bytes += added.bytes;
        self.lanes.lanes[number].last = Some(id);
    }
}

/// For every transfer on a lane below `first_lane`, the bytes of its channel. Source by source: a table of one source's
/// channels stays in the cache, one of all channels of a large plan does not.
fn channel_bytes(plan: &Plan, first_lane: u32) -> Vec<u64> {
    let transfers = plan.transfers();
    let mut start = vec![0u32; plan.problem.topology.num_ranks() + 1];
    transfers.iter().for_each(|t| start[t.src.index() + 1] += 1);
    (1..start.len()).for_each(|r| start[r] += start[r - 1]);
    let (mut next, mut by_source) = (start.clone(), vec![0u32; transfers.len()]);
    for (i, t) in transfers.iter().enumerate() {
        let place = &mut next[t.src.index()];
        by_source[*place as usize] = i as u32;
        *place += 1;
    }
    let mut weights = vec![0; transfers.len()];
    let mut bytes: FxHashMap<(Rank, u32), u64> = FxHashMap::default();
    for source in start.windows(2) {
        let own = &by_source[source[0] as usize..source[1] as usize];
        bytes.clear();
        for t in own.iter().map(|&i| &transfers[i as usize]).filter(|t| t.lane < first_lane) {
            *bytes.entry((t.dst, t.lane)).or_default() += t.bytes;
        }
        for &i in own {
            let t = &transfers[i as usize];
            weights[i as usize] = bytes.get(&(t.dst, t.lane)).copied().unwrap_or(0);
        }
    }
    weights
}
