//! Partial sums: combined on the way.
//!
//! A host that has every part adds up for itself. For the others, one holder of every part passes on what it has, host
//! by host; every rank on the way adds its own part, so each host sends its parts on as one, once. From the root, which
//! is on a receiver's host, the whole sum goes on through the other receivers.
//!
//! ```text
//! parts on h0 h1 h2, wanted on all three         third 0   h1 -> h0 <- h2,  then h0 -> h1, h0 -> h2
//! cut into three, each with a root of its own    third 1   h2 -> h1 <- h0,  then h1 -> h2, h1 -> h0
//!                                                third 2   h0 -> h2 <- h1,  then h2 -> h0, h2 -> h1
//!
//! parts on h0 h1 h2, wanted on h3 h4             h0 -> h1 -> h2 -> h3 -> h4
//! ```
//!
//! The first is an all-reduce, found as a special case. Which of the two it is, [`tree`] says. The devices through
//! which a host is entered and left take turns from cut to cut, so that all ports are used.
//!
//! A rank that adds up what it does not want needs memory for it. Under a limit everything goes along paths, in boxes
//! so small that several fit ([`room`]).

mod blocks;
pub(super) mod chunk;
mod holders;
mod room;
mod roots;
mod tree;

use std::collections::{BTreeMap, BTreeSet};

use rustc_hash::FxHashMap;

use super::boxes;
use super::emit::Emitter;
use crate::id::{HostId, Rank};
use crate::region::Region;

use super::super::demand::{SumClass, SumItem};
use super::super::problem::PlanError;
use super::super::strategy::MIN_CHUNK_BYTES;
use blocks::{Blocks, MANY_PAIRS};
use holders::{Holders, by_host, in_turn};
use room::{BOXES_IN_ROOM, Room};
use roots::{Job, roots};
use tree::{Box, Shape, Tree, busiest_s};

/// A cut has at least this many bytes; below, the turns do not pay.
const MIN_CUT: u64 = 64 << 10;
/// The most turns that ports and roots take within one piece.
const MAX_TURNS: u64 = 1024;
/// A piece is cut into this many boxes at most, however little memory there is.
const MAX_BOXES: u64 = 1 << 16;
/// Beyond this many transfers, pieces are cut no more than they have to be.
const MANY_TRANSFERS: u64 = 100_000;

/// Paths of boxes side by side that take more than this share of the time to fill are too slow.
const SLOW_FILL_SHARE: u64 = 90;

/// A cut of a piece on its way: between hosts, or inside one that has all parts.
struct Cut<'a> {
    sum: &'a SumItem,
    region: Region,
    bytes: u64,
    /// Of how many classes with the same parts, the how manieth.
    place: (usize, usize),
    /// Whose turn it is, among devices that can stand in for each other.
    turn: usize,
    /// Adders by host (or for a cut inside a host, its own alone), each part with its holders.
    cover: Vec<(HostId, Vec<&'a [Rank]>)>,
    /// Receivers by host, without those that are served by their own host.
    receivers: BTreeMap<HostId, Vec<Rank>>,
}

impl Emitter<'_> {
    /// Emits everything that has to be added up.
    pub(super) fn sums(&mut self, max_extra_bytes: Option<u64>, stars: bool) -> Result<(), PlanError> {
        let demands = self.demands;
        if demands.sums.is_empty() {
            return Ok(());
        }
        let topology = &self.problem.topology;
        let holders: Vec<Holders> = demands.sources.iter().map(|s| Holders::of(s, topology)).collect();
        let few = self.num_transfers() <= MANY_TRANSFERS;
        let (mut between, mut inside) = (vec![], BTreeMap::<HostId, Vec<Cut>>::new());
        let mut sends = vec![0u64; topology.num_hosts()];
        let in_blocks = match max_extra_bytes {
            None => self.sums_in_blocks(&holders),
            Some(_) => vec![false; holders.len()],
        };
        let rest = demands.sum_classes.iter().enumerate().filter(|(_, c)| !in_blocks[c.source as usize]);
        let mut of_source = vec![(0, 0); holders.len()];
        demands.sum_classes.iter().for_each(|class| of_source[class.source as usize].1 += 1);
        for (c, class) in rest {
            let place = of_source[class.source as usize];
            of_source[class.source as usize].0 += 1;
            let (roots, devices) = self.num_turns(class, &holders[class.source as usize], few);
            for &item in &class.items {
                let sum = &demands.sums[item as usize];
                for (i, region) in cuts(sum, roots * devices, max_extra_bytes).into_iter().enumerate() {
                    let bytes = region.volume() * (sum.bytes / sum.region.volume());
                    let holders = &holders[class.source as usize];
                    // Roots take turns by their load, devices one turn of all roots after the other.
                    let turn = match (self.many_ports, few) {
                        (true, true) => i / roots as usize,
                        (true, false) => c,
                        (false, _) => 0,
                    };
                    let cut = Draft { sum, region, bytes, place, turn, holders };
                    self.sort_cut(cut, &mut sends, &mut between, &mut inside);
                }
            }
        }
        let mut room = self.room(&between, &inside, max_extra_bytes)?;
        self.between_hosts(&between, stars, room.as_mut());
        for (host, cuts) in &inside {
            self.inside_host(*host, cuts, room.as_mut());
        }
        Ok(())
    }

    /// Emits sums that would take very many transfers piece by piece; says which.
    fn sums_in_blocks(&mut self, holders: &[Holders]) -> Vec<bool> {
        let (demands, topology) = (self.demands, &self.problem.topology);
        let mut by_source: Vec<Vec<&SumClass>> = vec![vec![]; holders.len()];
        demands.sum_classes.iter().for_each(|class| by_source[class.source as usize].push(class));
        let mut done = vec![false; holders.len()];
        for (source, classes) in by_source.iter().enumerate() {
            let pairs = classes.len() as u64 * demands.sources[source].parts.len() as u64;
            if pairs < MANY_PAIRS {
                continue;
            }
            let one_host = |class: &&SumClass| {
                let receivers = demands.set(class.receivers);
                let host = topology.host(*receivers.first()?);
                receivers.iter().all(|&r| topology.host(r) == host).then_some(host)
            };
            let Some(hosts) = classes.iter().map(one_host).collect::<Option<Vec<HostId>>>() else { continue };
            if let Some(blocks) = Blocks::of(classes, &holders[source], demands, &hosts) {
                self.blocks(&blocks);
                done[source] = true;
            }
        }
        done
    }

    /// How many transfers there will be at least.
    fn num_transfers(&self) -> u64 {
        let of = |class: &SumClass| {
            let source = &self.demands.sources[class.source as usize];
            (source.parts.len() + self.demands.set(class.receivers).len()) as u64 * class.items.len() as u64
        };
        self.demands.sum_classes.iter().map(of).sum()
    }

    /// How many turns a piece takes: one for every host that could be its root, and for every device of a host.
    fn num_turns(&self, class: &SumClass, holders: &Holders, few: bool) -> (u64, u64) {
        let topology = &self.problem.topology;
        let receivers = by_host(self.demands.set(class.receivers), topology);
        let shared = receivers.keys().filter(|h| holders.hosts.contains_key(h)).count();
        let inside = holders.complete.iter().filter_map(|h| receivers.get(h)).map(Vec::len).max();
        let roots = shared.max(holders.complete.len()).max(inside.unwrap_or(1)).max(1) as u64;
        let mut devices = 1;
        if self.many_ports {
            let adding = holders.hosts.values().map(|on| match on.parts.as_slice() {
                [(_, only)] => only.len(),
                parts => parts.len(),
            });
            for count in adding.chain(receivers.values().map(Vec::len)).map(|n| n as u64) {
                devices = lcm(devices, count.max(1)).min(MAX_TURNS);
            }
        }
        if few { (roots.min(MAX_TURNS), devices.min(MAX_TURNS / roots.min(MAX_TURNS))) } else { (1, 1) }
    }

    /// Receivers on hosts with every part are served there; one of those hosts, or all that have some, serve the rest.
    fn sort_cut<'a>(
        &self,
        cut: Draft<'a>,
        sends: &mut [u64],
        between: &mut Vec<Cut<'a>>,
        inside: &mut BTreeMap<HostId, Vec<Cut<'a>>>,
    ) {
        let topology = &self.problem.topology;
        let mut remote = by_host(self.demands.set(cut.sum.receivers), topology);
        let complete = &cut.holders.complete;
        let mut served: BTreeMap<HostId, Vec<Rank>> = BTreeMap::new();
        for host in complete {
            served.extend(remote.remove(host).map(|ranks| (*host, ranks)));
        }
        if !remote.is_empty() {
            let rate = |h: HostId| self.problem.cluster.hosts[h.index()].out_bytes_per_s();
            let among: Vec<HostId> = if complete.is_empty() {
                remote.keys().copied().collect()
            } else {
                served.keys().copied().collect()
            };
            let cover = cut.holders.cover(&among, |h| sends[h.index()] as f64 / rate(h));
            cover.iter().for_each(|(host, _)| sends[host.index()] += cut.bytes);
            if let [(only, _)] = cover.as_slice() {
                remote.extend(served.remove(only).map(|ranks| (*only, ranks)));
            }
            between.push(cut.with(cover, remote));
        }
        for (host, ranks) in served {
            let parts = cut.holders.hosts[&host].parts.iter().map(|(_, ranks)| ranks.as_slice()).collect();
            inside.entry(host).or_default().push(cut.with(vec![(host, parts)], [(host, ranks)].into()));
        }
    }

    /// Room for the boxes that ranks hold for others, if there is a limit; or why there is not.
    fn room(
        &self,
        between: &[Cut],
        inside: &BTreeMap<HostId, Vec<Cut>>,
        max_extra_bytes: Option<u64>,
    ) -> Result<Option<Room>, PlanError> {
        let Some(limit) = max_extra_bytes else { return Ok(None) };
        let cuts = between.iter().chain(inside.values().flatten());
        let Some(largest) = cuts.filter(|c| c.needs_room()).max_by_key(|c| c.bytes) else { return Ok(None) };
        if largest.bytes > limit {
            let rank = in_turn(&largest.cover[0].1, largest.turn)[0];
            let needed = largest.bytes;
            return Err(PlanError::OverBudget { rank, needed, limit, smallest: needed });
        }
        Ok(Some(Room::new(limit, largest.bytes)))
    }

    fn between_hosts(&mut self, cuts: &[Cut], stars: bool, room: Option<&mut Room>) {
        let rates: Vec<f64> = self.problem.cluster.hosts.iter().map(|h| h.in_bytes_per_s()).collect();
        let jobs: Vec<Job> = cuts.iter().map(Cut::among_hosts).collect();
        let (roots, all_add) = roots(&jobs, &rates);
        let adding: BTreeSet<u32> = jobs.iter().flat_map(|job| job.adders.iter().copied()).collect();
        let apart = !jobs.iter().flat_map(|job| &job.receivers).any(|r| adding.contains(r));
        let one_end = |job: &Job| job.receivers.len() == 1;
        let ends: BTreeSet<HostId> = match jobs.iter().all(one_end) {
            true => roots.iter().map(|&h| HostId(h)).collect(),
            false => BTreeSet::new(),
        };
        // A star sends nothing on before all has arrived: others must not wait for that.
        let may_star = stars && all_add && jobs.iter().all(|job| one_end(job) || job.receivers == job.adders);
        let with = |emitter: &Self, shape| -> Vec<Tree> {
            let trees = cuts.iter().zip(&roots);
            trees.map(|(cut, &root)| emitter.tree_between(cut, HostId(root), shape, &ends)).collect()
        };
        self.emit_best(cuts, with, (may_star, apart), room);
    }

    fn inside_host(&mut self, host: HostId, cuts: &[Cut], room: Option<&mut Room>) {
        let first = self.problem.topology.ranks_of(host).next().map_or(0, |r| r.0);
        let of = &self.problem.cluster.hosts[host.index()];
        let jobs: Vec<Job> = cuts.iter().map(|cut| cut.among_devices(first)).collect();
        let (roots, all_add) = roots(&jobs, &vec![of.local_bytes_per_s; of.devices as usize]);
        let with = |_: &Self, shape| -> Vec<Tree> {
            jobs.iter().zip(&roots).map(|(job, &root)| job.tree_inside(first, root, shape)).collect()
        };
        self.emit_best(cuts, with, (all_add, false), room);
    }

    /// Emits the cuts with stars, if these put no more on any link than paths do, else with paths.
    fn emit_best(
        &mut self,
        cuts: &[Cut],
        with: impl Fn(&Self, Shape) -> Vec<Tree>,
        (may_star, apart): (bool, bool),
        mut room: Option<&mut Room>,
    ) {
        let (mut trees, mut shape) = (with(self, Shape::Path), Shape::Path);
        if may_star && room.is_none() {
            let bytes = || cuts.iter().map(|cut| cut.bytes);
            let stars = with(self, Shape::Star);
            let stars_s = busiest_s(stars.iter().zip(bytes()), self.problem);
            if stars_s <= AS_GOOD * busiest_s(trees.iter().zip(bytes()), self.problem) {
                (trees, shape) = (stars, Shape::Star);
            }
        }
        let follow = apart && (!self.many_ports || self.fills_slowly(cuts, &trees));
        let mut routes: FxHashMap<&Tree, u32> = FxHashMap::default();
        let mut boxes: Vec<Box> = vec![];
        for (cut, tree) in cuts.iter().zip(&trees) {
            let region = self.plan.add_region(cut.region.clone());
            let mut of = Box::new(cut.sum.tensor, region, tree, self.demands.set(cut.sum.receivers));
            of.root_adds = cut.root_adds(tree);
            if shape == Shape::Path && !follow {
                let next = routes.len() as u32 + 1;
                of.route = *routes.entry(tree).or_insert(next);
            }
            boxes.push(of);
        }
        match shape {
            Shape::Path => {
                for index in in_lanes(&boxes) {
                    let of = &mut boxes[index];
                    (0..of.tree.up.len()).for_each(|path| self.sum_up(of, path, room.as_deref_mut()));
                    self.sum_down(of);
                }
            }
            Shape::Star => self.stars(&mut boxes),
        }
    }

    /// Whether boxes side by side would take too long to fill their paths even with the smallest chunks. Where no sum
    /// arrives at a host that adds, they may as well follow each other all the way; but with several ports, those that
    /// run side by side use them more evenly.
    fn fills_slowly(&self, cuts: &[Cut], trees: &[Tree]) -> bool {
        let mut starts: FxHashMap<Rank, (u64, u64)> = FxHashMap::default();
        for (cut, tree) in cuts.iter().zip(trees) {
            let (count, bytes) = starts.entry(tree.up.first().map_or(tree.root, |path| path[0])).or_default();
            (*count, *bytes) = (*count + 1, *bytes + cut.bytes);
        }
        let crossings =
            cuts.iter().map(|cut| cut.cover.len() + cut.receivers.len()).max().unwrap_or(0) as u64;
        starts.values().any(|(count, bytes)| count * crossings * MIN_CHUNK_BYTES * SLOW_FILL_SHARE > *bytes)
    }

    /// Everybody sends to its neighbour first, then to the next but one, and so on: nobody has to wait for others.
    fn stars(&mut self, boxes: &mut [Box]) {
        let steps = boxes.iter().map(|of| of.tree.up.len()).max().unwrap_or(0);
        for step in 0..steps {
            for of in boxes.iter_mut().filter(|of| step < of.tree.up.len()) {
                self.sum_up(of, step, None);
            }
        }
        boxes.iter_mut().for_each(|of| self.sum_down(of));
    }

    /// Up to the root's host, around the ring of hosts, and on to the other receivers. Where every sum ends at one of
    /// the hosts `ends`, these come last, so that all sums go the same way as far as they can.
    fn tree_between(&self, cut: &Cut, root_host: HostId, shape: Shape, ends: &BTreeSet<HostId>) -> Tree {
        let own = cut.cover.iter().find(|(host, _)| *host == root_host).map(|(_, parts)| parts.as_slice());
        let root = root_of(&cut.receivers[&root_host], own.unwrap_or(&[]), cut.turn);
        let mut tree = Tree::new(root);
        let mut cover: Vec<&(HostId, Vec<&[Rank]>)> = cut.cover.iter().collect();
        // Who also receives comes first on a path: the first takes in nothing.
        let receives = |host: &HostId| cut.receivers.contains_key(host);
        match shape {
            Shape::Star if ends.is_empty() || !self.many_ports => {
                cover.sort_by_key(|(h, _)| (*h == root_host, *h < root_host, *h));
            }
            // Classes of the same parts are asked for at different hosts at a time.
            Shape::Star => {
                let start = cut.place.0 * cover.len() / cut.place.1;
                cover.rotate_left(start);
                cover.sort_by_key(|(h, _)| *h == root_host);
            }
            Shape::Path => cover.sort_by_key(|(h, _)| {
                let turns = receives(h) || ends.contains(h);
                (*h == root_host, !receives(h), ends.contains(h), turns && *h < root_host, *h)
            }),
        }
        let mut path: Vec<Rank> = vec![];
        for (_, parts) in cover {
            let others: Vec<&[Rank]> = parts.iter().copied().filter(|p| !p.contains(&root)).collect();
            path.extend(in_turn(&others, cut.turn));
            if shape == Shape::Star {
                tree.push_path(std::mem::take(&mut path));
            }
        }
        tree.push_path(path);
        self.spread(cut, root_host, shape, &mut tree);
        tree
    }

    /// From the root through its host, and to the other hosts; those that have sent parts come last, the very last
    /// sends nothing more.
    fn spread(&self, cut: &Cut, root_host: HostId, shape: Shape, tree: &mut Tree) {
        let adds = |host: &HostId| cut.cover.iter().any(|(h, _)| h == host);
        let mut receivers: Vec<(&HostId, &Vec<Rank>)> = cut.receivers.iter().collect();
        receivers.sort_by_key(|(h, _)| (**h != root_host, adds(h), **h < root_host, **h));
        let mut entry = tree.root;
        for (host, ranks) in receivers {
            let mut ranks: Vec<Rank> = ranks.iter().copied().filter(|&r| r != tree.root).collect();
            let start = cut.turn % ranks.len().max(1);
            ranks.rotate_left(start);
            let mut from = entry;
            for (i, &to) in ranks.iter().enumerate() {
                tree.down.push((from, to));
                from = to;
                if i == 0 && shape == Shape::Path && *host != root_host {
                    entry = to;
                }
            }
        }
    }
}

/// The order of boxes in which those that start at different ranks take turns. Each rank starts at another place of its
/// list, so that what goes to different receivers is under way at the same time.
fn in_lanes(boxes: &[Box]) -> Vec<usize> {
    let mut lanes: BTreeMap<Rank, Vec<usize>> = BTreeMap::new();
    for (index, of) in boxes.iter().enumerate() {
        lanes.entry(of.tree.up.first().map_or(of.tree.root, |path| path[0])).or_default().push(index);
    }
    let num_lanes = lanes.len();
    let mut turns: Vec<(usize, usize)> = Vec::with_capacity(boxes.len());
    for (l, lane) in lanes.into_values().enumerate() {
        let first = l * lane.len() / num_lanes;
        let order = lane[first..].iter().chain(&lane[..first]);
        turns.extend(order.enumerate().map(|(turn, &index)| (turn, index)));
    }
    turns.sort_unstable();
    turns.into_iter().map(|(_, index)| index).collect()
}

/// How much more than paths stars may put on a link.
const AS_GOOD: f64 = 1.002;

impl Job {
    /// Among devices of a host, around the ring that ends at the root.
    fn tree_inside(&self, first: u32, root: u32, shape: Shape) -> Tree {
        let root = Rank(first + root);
        let ring = |nodes: &[u32]| {
            let mut ranks: Vec<Rank> = nodes.iter().map(|n| Rank(first + n)).filter(|&r| r != root).collect();
            ranks.sort_by_key(|&r| (r < root, r));
            ranks
        };
        let mut tree = Tree::new(root);
        let (adders, receivers) = (ring(&self.adders), ring(&self.receivers));
        match shape {
            Shape::Path => tree.push_path(adders),
            Shape::Star => adders.iter().for_each(|&r| tree.push_path(vec![r])),
        }
        let mut from = root;
        for &to in &receivers {
            tree.down.push((from, to));
            from = if shape == Shape::Path { to } else { root };
        }
        tree
    }
}

/// A cut before it is known where it goes.
struct Draft<'a> {
    sum: &'a SumItem,
    region: Region,
    bytes: u64,
    place: (usize, usize),
    turn: usize,
    holders: &'a Holders,
}

impl<'a> Draft<'a> {
    fn with(&self, cover: Vec<(HostId, Vec<&'a [Rank]>)>, receivers: BTreeMap<HostId, Vec<Rank>>) -> Cut<'a> {
        let Draft { sum, bytes, place, turn, .. } = *self;
        Cut { sum, region: self.region.clone(), bytes, place, turn, cover, receivers }
    }
}

impl Cut<'_> {
    fn among_hosts(&self) -> Job {
        let adders = self.cover.iter().map(|(host, _)| host.0).collect();
        Job { bytes: self.bytes, adders, receivers: self.receivers.keys().map(|h| h.0).collect() }
    }

    /// One holder of every part: a receiver rather than another.
    fn among_devices(&self, first: u32) -> Job {
        let receivers: Vec<u32> = self.receivers.values().flatten().map(|r| r.0 - first).collect();
        let pick = |ranks: &&[Rank]| {
            let wanting = || ranks.iter().map(|r| r.0 - first).filter(|n| receivers.binary_search(n).is_ok());
            let turn = self.turn % wanting().count().max(1);
            wanting().nth(turn).unwrap_or(ranks[self.turn % ranks.len()].0 - first)
        };
        let mut adders: Vec<u32> = self.cover.iter().flat_map(|(_, parts)| parts.iter().map(pick)).collect();
        adders.sort_unstable();
        Job { bytes: self.bytes, adders, receivers }
    }

    /// Whether the root of a tree has the part that nobody else brings.
    fn root_adds(&self, tree: &Tree) -> bool {
        let num_parts: usize = self.cover.iter().map(|(_, parts)| parts.len()).sum();
        tree.up.iter().map(Vec::len).sum::<usize>() < num_parts
    }

    /// Whether somebody may have to hold it for others.
    fn needs_room(&self) -> bool {
        self.cover.iter().map(|(_, parts)| parts.len()).sum::<usize>() > 1
    }
}

/// The receiver at which a sum comes together: one that has a part, so that it saves a hop.
fn root_of(receivers: &[Rank], own: &[&[Rank]], turn: usize) -> Rank {
    let holds = |r: &&Rank| own.iter().any(|ranks| ranks.contains(r));
    let holding: Vec<Rank> = receivers.iter().filter(holds).copied().collect();
    let roots = if holding.is_empty() { receivers } else { &holding };
    roots[turn % roots.len()]
}

/// Cuts a piece into boxes, `turns` of them or as many as make them small enough.
fn cuts(sum: &SumItem, turns: u64, max_extra_bytes: Option<u64>) -> Vec<Region> {
    let Some(limit) = max_extra_bytes else {
        let count = turns.min((sum.bytes / MIN_CUT).max(1));
        let offset = |c: u64| (u128::from(sum.bytes) * u128::from(c) / u128::from(count)) as u64;
        let part = |c| boxes::part(&sum.region, sum.bytes, offset(c), offset(c + 1));
        return (0..count).filter_map(part).collect();
    };
    let steps = boxes::cut_dim(&sum.region).map_or(1, |dim| sum.region.spans()[dim].len());
    let step_bytes = sum.bytes / steps;
    let fitting = (limit / BOXES_IN_ROOM / step_bytes).max(steps.div_ceil(MAX_BOXES)).max(1);
    let per_box = fitting.min(steps.div_ceil(turns));
    let part = |c: u64| {
        boxes::part(&sum.region, sum.bytes, c * per_box * step_bytes, (c + 1) * per_box * step_bytes)
    };
    (0..steps.div_ceil(per_box)).filter_map(part).collect()
}

fn lcm(a: u64, b: u64) -> u64 {
    let gcd = |mut a: u64, mut b: u64| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    a / gcd(a, b) * b
}
