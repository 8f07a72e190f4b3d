//! Partial sums: combined on the way.
//!
//! A path runs through one holder of every part, host by host, and ends at a receiver, the root. Every rank on it adds
//! its own part to what comes by, so each host sends its parts on as one, once. From the root the whole sum goes on
//! through the other receivers.
//!
//! ```text
//! parts on h0 h1 h2, wanted on all three         third 0   h1 -> h2 -> h0,  then h0 -> h1 -> h2
//! cut into three, each with a root of its own    third 1   h2 -> h0 -> h1,  then h1 -> h2 -> h0
//!                                                third 2   h0 -> h1 -> h2,  then h2 -> h0 -> h1
//! ```
//!
//! which is the ring all-reduce, found as a special case. Roots, and the devices through which a host is entered and
//! left, take turns from cut to cut, so that all ports are used.
//!
//! A rank that adds up what it does not want needs memory for it. Under a limit, a box waits until an earlier one has
//! left the rank, and takes its place.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use super::boxes;
use super::emit::{Emitter, RouteId};
use crate::id::{HostId, Rank, RegionId, TransferId};

use super::super::demand::SumItem;
use super::super::problem::PlanError;

/// A cut has at least this many bytes; below, the turns do not pay.
const MIN_CUT: u64 = 64 << 10;

/// Under a memory limit a rank has room for this many boxes, so that one can arrive while another leaves.
const BOXES_IN_ROOM: u64 = 4;

/// What ranks hold besides their tensors, under a limit.
#[derive(Default)]
pub(super) struct Room {
    /// By rank: bytes in use, and the boxes there with the transfers that read them, oldest first.
    used: FxHashMap<Rank, (u64, std::collections::VecDeque<(u64, TransferId)>)>,
}

impl Room {
    /// Makes room for a box at a rank: `None` if there is room left, else the transfer it has to wait for.
    fn wait_for(&mut self, rank: Rank, bytes: u64, limit: u64) -> Option<TransferId> {
        let (used, boxes) = self.used.entry(rank).or_default();
        if *used + bytes <= limit {
            *used += bytes;
            return None;
        }
        let fits = boxes.iter().position(|(size, _)| *size >= bytes)?;
        boxes.remove(fits).map(|(_, reader)| reader)
    }

    fn occupy(&mut self, rank: Rank, bytes: u64, reader: TransferId) {
        self.used.entry(rank).or_default().1.push_back((bytes, reader));
    }
}

/// The way of one cut: who adds up, and who gets the sum.
struct Path {
    /// Ranks that add their part, in order; the last passes to the root.
    adders: Vec<Rank>,
    root: Rank,
    root_adds: bool,
    /// Receivers besides the root, host by host, the root's own host first.
    others: Vec<Vec<Rank>>,
}

impl Emitter<'_> {
    /// Emits everything that has to be added up.
    pub(super) fn sums(&mut self, max_extra_bytes: Option<u64>) -> Result<(), PlanError> {
        let demands = self.demands;
        let mut room = Room::default();
        let mut paths: FxHashMap<Vec<Rank>, u32> = FxHashMap::default();
        for (index, sum) in demands.sums.iter().enumerate() {
            let cuts = self.num_cuts(sum, max_extra_bytes);
            for cut in 0..cuts {
                let offset = |c: u64| (u128::from(sum.bytes) * u128::from(c) / u128::from(cuts)) as u64;
                let Some(region) = boxes::part(&sum.region, sum.bytes, offset(cut), offset(cut + 1)) else {
                    continue;
                };
                let path = self.path(sum, index + cut as usize);
                let route = paths.len() as u32;
                let route =
                    *paths.entry(path.adders.iter().copied().chain([path.root]).collect()).or_insert(route);
                let bytes = region.volume() * (sum.bytes / sum.region.volume());
                let region = self.plan.add_region(region);
                if let Some(limit) = max_extra_bytes.filter(|&limit| bytes > limit && path.adders.len() > 1) {
                    let rank = path.adders[1];
                    return Err(PlanError::OverBudget { rank, needed: bytes, limit, smallest: bytes });
                }
                self.sum(
                    sum,
                    &path,
                    region,
                    bytes,
                    (2, route, 0),
                    max_extra_bytes.map(|limit| (&mut room, limit)),
                );
            }
        }
        Ok(())
    }

    /// Into how many boxes a sum is cut: a turn for every receiving host and port, and small enough for the room.
    fn num_cuts(&self, sum: &SumItem, max_extra_bytes: Option<u64>) -> u64 {
        let topology = &self.problem.topology;
        let hosts = by_host(self.demands.set(sum.receivers), topology);
        let ports = hosts.keys().map(|&h| topology.ports_of(h).count() as u64).max().unwrap_or(1);
        let turns = (hosts.len() as u64 * ports).min((sum.bytes / MIN_CUT).max(1));
        let fitting = max_extra_bytes.map_or(1, |limit| (sum.bytes * BOXES_IN_ROOM).div_ceil(limit.max(1)));
        turns.max(fitting)
    }

    fn path(&self, sum: &SumItem, turn: usize) -> Path {
        let topology = &self.problem.topology;
        let receivers = by_host(self.demands.set(sum.receivers), topology);
        let (&root_host, on_root_host) =
            receivers.iter().nth(turn % receivers.len()).expect("a sum has receivers");
        let part_of: FxHashMap<Rank, usize> = self.demands.sources[sum.source as usize]
            .parts
            .iter()
            .enumerate()
            .flat_map(|(p, ranks)| ranks.iter().map(move |&r| (r, p)))
            .collect();
        // A root that has a part saves a hop.
        let device_turn = turn / receivers.len();
        let holding: Vec<Rank> = on_root_host.iter().copied().filter(|r| part_of.contains_key(r)).collect();
        let roots = if holding.is_empty() { on_root_host } else { &holding };
        let root = roots[device_turn % roots.len()];
        let mut missing: Vec<bool> = vec![true; self.demands.sources[sum.source as usize].parts.len()];
        if let Some(&part) = part_of.get(&root) {
            missing[part] = false;
        }
        let mut adders: Vec<(HostId, Vec<Rank>)> = vec![];
        while missing.contains(&true) {
            let (host, ranks) = self.best_host(sum, &missing, root_host);
            ranks.iter().for_each(|r| missing[part_of[r]] = false);
            adders.push((host, ranks));
        }
        // Around the ring of hosts, ending at the root's.
        adders.sort_by_key(|(host, _)| (host.0 <= root_host.0, host.0));
        if let Some(at) = adders.iter().position(|(host, _)| *host == root_host) {
            let own = adders.remove(at);
            adders.push(own);
        }
        let adders = adders.into_iter().flat_map(|(_, mut ranks)| {
            let turns = device_turn % ranks.len();
            ranks.rotate_left(turns);
            ranks
        });
        let adders: Vec<Rank> = adders.collect();
        // If the root adds nothing, the last adder has the whole sum before it.
        let root_adds = part_of.contains_key(&root);
        let complete = adders.last().copied().filter(|_| !root_adds);
        let unserved = |r: &Rank| *r != root && Some(*r) != complete;
        let mut others: Vec<(HostId, Vec<Rank>)> = receivers
            .iter()
            .map(|(&host, ranks)| (host, ranks.iter().copied().filter(unserved).collect()))
            .collect();
        others.sort_by_key(|(host, _)| (*host != root_host, host.0 <= root_host.0, host.0));
        Path {
            adders,
            root,
            root_adds,
            others: others
                .into_iter()
                .map(|(_, mut ranks)| {
                    let turns = device_turn % ranks.len().max(1);
                    ranks.rotate_left(turns);
                    ranks
                })
                .collect(),
        }
    }

    /// The host with most of the missing parts, and a holder of each: the root's own host first, it costs nothing.
    fn best_host(&self, sum: &SumItem, missing: &[bool], root_host: HostId) -> (HostId, Vec<Rank>) {
        let mut found: BTreeMap<HostId, Vec<Rank>> = BTreeMap::new();
        for (part, _) in missing.iter().enumerate().filter(|(_, m)| **m) {
            for (host, ranks) in
                by_host(&self.demands.sources[sum.source as usize].parts[part], &self.problem.topology)
            {
                found.entry(host).or_default().push(ranks[0]);
            }
        }
        let best = found
            .into_iter()
            .max_by_key(|(host, ranks)| (*host == root_host, ranks.len(), std::cmp::Reverse(*host)));
        best.expect("every part has a holder")
    }

    fn sum(
        &mut self,
        sum: &SumItem,
        path: &Path,
        region: RegionId,
        bytes: u64,
        route: RouteId,
        mut room: Option<(&mut Room, u64)>,
    ) {
        let mut read_by: FxHashMap<Rank, TransferId> = FxHashMap::default();
        let mut last: Option<TransferId> = None;
        for (i, &adder) in path.adders.iter().enumerate() {
            let next = path.adders.get(i + 1).copied().unwrap_or(path.root);
            let mut after: Vec<TransferId> = last.into_iter().collect();
            let staged = next != path.root && !self.demands.set(sum.receivers).contains(&next);
            if let Some((room, limit)) = room.as_mut().filter(|_| staged) {
                after.extend(room.wait_for(next, bytes, *limit));
            }
            let id = match last {
                Some(_) => self.plan.add(sum.tensor, adder, next, region, &after),
                None => self.add_first(sum.tensor, (adder, next), region, &after, route),
            };
            self.plan.transfer_mut(id).reduce = next != path.root || path.root_adds;
            if let Some((room, _)) =
                room.as_mut().filter(|_| i > 0 && !self.demands.set(sum.receivers).contains(&adder))
            {
                room.occupy(adder, bytes, id);
            }
            read_by.insert(adder, id);
            last = Some(id);
        }
        // From host to host, and through each of them.
        let (mut host_from, mut host_since) = (path.root, last);
        for receivers in &path.others {
            let (mut from, mut since) = (host_from, host_since);
            for (i, &to) in receivers.iter().enumerate() {
                let read = read_by.get(&to).copied().filter(|&read| Some(read) != since);
                let after: Vec<TransferId> = since.into_iter().chain(read).collect();
                since = Some(self.plan.add(sum.tensor, from, to, region, &after));
                from = to;
                if i == 0 && !self.problem.topology.same_host(to, path.root) {
                    (host_from, host_since) = (to, since);
                }
            }
        }
    }
}

fn by_host(ranks: &[Rank], topology: &crate::cluster::Topology) -> BTreeMap<HostId, Vec<Rank>> {
    let mut hosts: BTreeMap<HostId, Vec<Rank>> = BTreeMap::new();
    for &rank in ranks {
        hosts.entry(topology.host(rank)).or_default().push(rank);
    }
    hosts
}
