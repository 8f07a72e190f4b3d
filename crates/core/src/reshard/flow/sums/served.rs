//! Few hosts want what many more add up: those that want nothing add up for them.
//!
//! Along paths a host that wants the sum beside adding to it takes in nearly two boxes for one, the parts and the sum. Instead all that
//! want nothing are the root of their share: everybody sends its part there, and the sum goes from there to each that wants it. With `C`
//! hosts that add and `N` of them that want nothing, these take in and send `(C - 1) / N` of the tensor, the others no more than all of it.
//!
//! Hosts stand in a ring, and in every round each sends to the next but so many, so that all NICs are busy both ways. Boxes come in batches:
//! while the parts of one come together, the sums of the batch before go out.
//!
//! ```text
//! a b c want nothing, d wants the sum     round 1   a -> b   part of b's box      b -> c   part of c's     c -> d   sum of c's, of the batch before
//!                                                   d -> a   part of a's
//! ```

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

use crate::id::{HostId, PortId, Rank, RegionId, TransferId};
use crate::region::Region;

use super::super::super::demand::SumClass;
use super::super::boxes;
use super::super::emit::Emitter;
use super::cuts::Line;
use super::holders::{Holders, by_host, nics};
use super::tree::{Box, Tree};

/// How much less the busiest host must have to do than along paths.
const WORTH: f64 = 0.97;
/// The most batches, and the most transfers of all of them.
const MAX_BATCHES: u64 = 16;
const MAX_TRANSFERS: u64 = 160_000;

/// Who adds up for others.
pub(super) struct Served<'a> {
    holders: &'a Holders,
    classes: Vec<&'a SumClass>,
    /// Everybody with something to do; rising.
    hosts: Vec<HostId>,
    /// Those that want nothing.
    roots: Vec<HostId>,
    /// How many NICs of every host are used.
    rails: usize,
    batches: u64,
}

/// The last transfers over NICs.
#[derive(Default)]
struct Busy {
    out: FxHashMap<PortId, TransferId>,
    into: FxHashMap<PortId, TransferId>,
}

/// A box with its tree, and by which way of it a host sends its parts.
struct Errand {
    tensor: u32,
    region: Region,
    receivers: Vec<Rank>,
    tree: Tree,
    ways: FxHashMap<HostId, usize>,
    num_parts: usize,
}

/// The boxes of a batch by where they come together.
type ByRoot = FxHashMap<HostId, Vec<usize>>;

impl<'a> Served<'a> {
    pub(super) fn of<'e: 'a>(source: usize, holders: &'a Holders, emitter: &Emitter<'e>) -> Option<Self> {
        let (demands, topology) = (emitter.demands, &emitter.problem.topology);
        let classes: Vec<&SumClass> =
            demands.sum_classes.iter().filter(|c| c.source as usize == source).collect();
        if classes.is_empty() || !holders.complete.is_empty() {
            return None;
        }
        let wanting = |class: &&SumClass| by_host(demands.set(class.receivers), topology);
        let receivers: BTreeSet<HostId> = classes.iter().flat_map(|c| wanting(c).into_keys()).collect();
        let adding: Vec<HostId> = holders.cover(&[], |_| 0.0).into_iter().map(|(host, _)| host).collect();
        let roots: Vec<HostId> = adding.iter().copied().filter(|h| !receivers.contains(h)).collect();
        let bytes: u64 = classes.iter().map(|c| c.bytes).sum();
        let along_paths = |class: &&SumClass| {
            let count = wanting(class).into_keys().filter(|h| adding.binary_search(h).is_ok()).count() as f64;
            class.bytes as f64 / bytes as f64 * (2.0 - 2.0 / count.max(1.0))
        };
        let path_load: f64 = classes.iter().map(along_paths).sum();
        let load = (adding.len() - 1) as f64 / roots.len() as f64;
        if roots.len() < 2 || load > WORTH * path_load {
            return None;
        }
        let hosts: BTreeSet<HostId> = adding.iter().copied().chain(receivers.iter().copied()).collect();
        let hosts: Vec<HostId> = hosts.into_iter().collect();
        let rails = hosts.iter().map(|&h| nics(topology, h).len()).min().unwrap_or(1);
        let parts = demands.sources[source].parts.len() as u64;
        let most = classes.iter().map(|c| demands.set(c.receivers).len() as u64).max().unwrap_or(0);
        let a_batch = (roots.len() * rails + classes.len()) as u64 * (parts + most);
        let batches = (MAX_TRANSFERS / a_batch).min(MAX_BATCHES);
        (batches >= 2).then_some(Self { holders, classes, hosts, roots, rails, batches })
    }

    /// When a batch begins, of a row of so many bytes. Batches get shorter as long as the sums of the one before have the time to leave.
    fn begins(&self, batch: u64, bytes: u64) -> u64 {
        let ratio = self.roots.len() as f64 / (self.hosts.len() - 1) as f64;
        let upto = |count: u64| (0..count).map(|b| ratio.powi(b as i32)).sum::<f64>();
        (upto(batch) / upto(self.batches) * bytes as f64).round() as u64
    }
}

impl Emitter<'_> {
    /// Whether hosts that want nothing can add up for others.
    pub(in super::super) fn could_serve(&self) -> bool {
        let topology = &self.problem.topology;
        let sources = self.demands.sources.iter().map(|source| Holders::of(source, topology)).enumerate();
        sources.into_iter().any(|(number, holders)| Served::of(number, &holders, self).is_some())
    }

    pub(super) fn serve(&mut self, served: &Served) {
        let batches: Vec<Vec<Errand>> = (0..served.batches).map(|b| self.batch(served, b)).collect();
        let mut boxes: Vec<Vec<Box>> =
            batches.iter().map(|of| of.iter().map(|errand| self.box_of(errand)).collect()).collect();
        let by_root: Vec<ByRoot> = batches.iter().map(|of| self.by_root(of)).collect();
        let count = served.hosts.len();
        let mut busy = Busy::default();
        for now in 0..=batches.len() {
            let (coming, before) = (batches.get(now), now.checked_sub(1));
            for (errand, of) in coming.into_iter().flatten().zip(boxes.get_mut(now).into_iter().flatten()) {
                let own = errand.ways.get(&self.problem.topology.host(errand.tree.root));
                own.into_iter().for_each(|&way| self.sum_up(of, way, None));
            }
            for (round, place) in (1..count).flat_map(|round| (0..count).map(move |place| (round, place))) {
                let (from, to) = (served.hosts[place], served.hosts[(place + round) % count]);
                for &i in by_root.get(now).and_then(|roots| roots.get(&to)).into_iter().flatten() {
                    if let Some(&way) = batches[now][i].ways.get(&from) {
                        self.part_to_root(&mut boxes[now][i], way, &mut busy);
                    }
                }
                let Some(before) = before else { continue };
                for &i in by_root[before].get(&from).into_iter().flatten() {
                    self.sum_to_host(&mut boxes[before][i], to, &mut busy);
                }
            }
        }
    }

    fn box_of<'b>(&mut self, errand: &'b Errand) -> Box<'b> {
        let region: RegionId = self.plan.add_region(errand.region.clone());
        let mut of = Box::new(errand.tensor, region, &errand.tree, &errand.receivers);
        of.root_adds = errand.tree.num_senders() < errand.num_parts;
        of
    }

    fn by_root(&self, errands: &[Errand]) -> ByRoot {
        let mut roots = ByRoot::default();
        for (i, errand) in errands.iter().enumerate() {
            roots.entry(self.problem.topology.host(errand.tree.root)).or_default().push(i);
        }
        roots
    }

    /// The boxes of a batch.
    fn batch(&self, served: &Served, batch: u64) -> Vec<Errand> {
        let demands = self.demands;
        let range = |bytes: u64| (served.begins(batch, bytes), served.begins(batch + 1, bytes));
        let total: u64 = served
            .classes
            .iter()
            .flat_map(|c| &c.items)
            .map(|&item| {
                let (start, end) = range(demands.sums[item as usize].bytes);
                end - start
            })
            .sum();
        let ports = (served.roots.len() * served.rails) as u64;
        let mut line = Line::new(total, ports);
        let mut found = vec![];
        for class in &served.classes {
            for &item in &class.items {
                let sum = &demands.sums[item as usize];
                let (start, end) = range(sum.bytes);
                let Some(region) = boxes::part(&sum.region, sum.bytes, start, end) else { continue };
                for share in line.next_of(&region, end - start, 1) {
                    let receivers = demands.set(class.receivers);
                    found.push(self.served_box(served, sum.tensor, share.region, share.turn - 1, receivers));
                }
            }
        }
        found
    }

    fn served_box(
        &self,
        served: &Served,
        tensor: u32,
        region: Region,
        port: usize,
        receivers: &[Rank],
    ) -> Errand {
        let topology = &self.problem.topology;
        let (root_host, rail) = (served.roots[port % served.roots.len()], port / served.roots.len());
        let beside = |host: HostId| nics(topology, host)[rail];
        let root = beside(root_host);
        let mut tree = Tree::new(root);
        let mut ways = FxHashMap::default();
        let mut num_parts = 0;
        for (host, parts) in served.holders.cover(&[], |_| 0.0) {
            let exit = beside(host);
            num_parts += parts.len();
            let one = |ranks: &&[Rank]| if ranks.contains(&exit) { exit } else { ranks[port % ranks.len()] };
            let others = parts.iter().filter(|ranks| !ranks.contains(&root));
            let mut ranks: Vec<Rank> = others.map(one).collect();
            ranks.sort_by_key(|&r| r == exit);
            if !ranks.is_empty() {
                ways.insert(host, tree.up.len());
                tree.push_path(ranks);
            }
        }
        for (host, mut ranks) in by_host(receivers, topology) {
            let landing = beside(host);
            let count = ranks.len();
            ranks.rotate_left(port % count);
            ranks.sort_by_key(|&r| r != landing);
            let mut from = root;
            for to in ranks {
                tree.down.push((from, to));
                from = to;
            }
        }
        Errand { tensor, region, receivers: receivers.to_vec(), tree, ways, num_parts }
    }

    /// What has to be over before one rank sends to another on a different host.
    fn free(&self, (from, to): (Rank, Rank), busy: &Busy) -> Vec<TransferId> {
        let topology = &self.problem.topology;
        let out = busy.out.get(&topology.port(from));
        let into = busy.into.get(&topology.port(to));
        out.into_iter().chain(into).copied().collect()
    }

    fn took(&self, id: TransferId, busy: &mut Busy) {
        let (topology, t) = (&self.problem.topology, &self.plan.transfers()[id.index()]);
        busy.out.insert(topology.port(t.src), id);
        busy.into.insert(topology.port(t.dst), id);
    }

    fn part_to_root(&mut self, of: &mut Box, way: usize, busy: &mut Busy) {
        let last = *of.tree.up[way].ranks.last().expect("a way has ranks");
        let free = self.free((last, of.tree.root), busy);
        if let Some([_, id]) = self.sum_up_since(of, way, None, [&[], &free]) {
            self.took(id, busy);
        }
    }

    /// Sends a sum from its root to those on a host that want it.
    fn sum_to_host(&mut self, of: &mut Box, host: HostId, busy: &mut Busy) {
        let tree = of.tree;
        for &(from, to) in tree.down.iter().filter(|edge| self.problem.topology.host(edge.1) == host) {
            let free = if from == tree.root { self.free((from, to), busy) } else { vec![] };
            let id = self.sum_on(of, (from, to), &free);
            if from == tree.root {
                self.took(id, busy);
            }
        }
    }
}
