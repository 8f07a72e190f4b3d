//! Between hosts: who is visited in which order, and in which order boxes set off.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};

use rustc_hash::FxHashMap;

use crate::id::{HostId, PortId, Rank, TransferId};

use super::super::super::strategy::MIN_CHUNK_BYTES;
use super::super::emit::Emitter;
use super::Style;
use super::balanced::balanced;
use super::cuts::Cut;
use super::holders::{in_turn, nics, through};
use super::room::Room;
use super::roots::{Job, roots};
use super::tree::{Box, Shape, Tree, busiest_s};

/// How much more than paths stars may put on a link.
const AS_GOOD: f64 = 1.002;

/// Paths of boxes side by side that take more than this share of the time to fill are too slow.
const SLOW_FILL_SHARE: u64 = 90;

/// So many boxes of a stream are looked at for the next one.
const MAX_AHEAD: usize = 64;

/// Whether boxes that set off at one rank follow each other all the way, as one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Following {
    /// Where no sum arrives at a host that adds, nobody is in anybody's way. Where sums end at hosts that add, paths are alike up to these
    /// hosts.
    Always,
    /// Where boxes side by side use ports more evenly.
    IfSlow,
    Never,
}

/// What NICs have sent in this step, and in the last one before in which they sent anything.
#[derive(Default)]
struct Steps {
    before: FxHashMap<PortId, Vec<TransferId>>,
    now: FxHashMap<PortId, Vec<TransferId>>,
}

impl Steps {
    /// What it sent in the step before, if there was one, and how much it has sent in this one.
    fn before(&self, port: PortId) -> Option<(&[TransferId], usize)> {
        let before = self.before.get(&port)?;
        Some((before.as_slice(), self.now.get(&port).map_or(0, Vec::len)))
    }

    fn add(&mut self, port: PortId, id: TransferId) {
        self.now.entry(port).or_default().push(id);
    }

    fn next(&mut self) {
        self.before.extend(self.now.drain());
    }
}

/// By which devices a box comes into hosts.
#[derive(Debug, Clone, Copy)]
struct WaysIn {
    /// Into the root's host through the port that it enters all others through.
    by_port: bool,
    /// Into hosts that want it by all NICs in turn.
    by_nic: bool,
}

/// In which order boxes set off.
struct Order<'a> {
    /// All boxes that set off at one rank are one stream.
    follow: bool,
    /// Hosts that all streams pass, each box in another order, because it ends at one of them.
    ends: &'a BTreeSet<HostId>,
    /// Stars begin in so many batches, one after the other.
    batches: u64,
    /// Senders of stars keep step: all take turns, so that in each step everybody takes in from one and sends to one.
    in_step: bool,
}

impl Emitter<'_> {
    pub(super) fn between_hosts(&mut self, cuts: &[Cut], style: Style, room: Option<&mut Room>) {
        let (stars, follow, by_nic) = match style {
            Style::Balanced(style) if room.is_none() => {
                let trees = balanced(self.problem, cuts, (style.up, style.down), &self.plan, style.bound_s);
                let ends = &BTreeSet::new();
                let order = Order { follow: false, ends, batches: style.batches, in_step: false };
                return self.emit_trees(cuts, &trees, style.up, order, None);
            }
            Style::Balanced(_) | Style::Served => (false, false, false),
            Style::Turns { stars, follow, by_nic } => (stars, follow, by_nic && room.is_none()),
        };
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
        let ways_in = WaysIn { by_port: follow && self.many_ports && room.is_none(), by_nic };
        let with = |emitter: &Self, shape| -> Vec<Tree> {
            let trees = cuts.iter().zip(&roots);
            trees
                .map(|(cut, &root)| emitter.tree_between(cut, HostId(root), shape, (&ends, ways_in)))
                .collect()
        };
        let following = match (apart, self.many_ports) {
            _ if follow && (apart || !ends.is_empty()) => Following::Always,
            (true, false) => Following::Always,
            (true, true) => Following::IfSlow,
            (false, _) => Following::Never,
        };
        self.emit_best(cuts, with, (may_star, following, &ends), room);
    }

    /// Emits the cuts with stars, if these put no more on any link than paths do, else with paths.
    pub(super) fn emit_best(
        &mut self,
        cuts: &[Cut],
        with: impl Fn(&Self, Shape) -> Vec<Tree>,
        (may_star, following, ends): (bool, Following, &BTreeSet<HostId>),
        room: Option<&mut Room>,
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
        let follow = match following {
            Following::Always => true,
            Following::IfSlow => self.fills_slowly(cuts, &trees),
            Following::Never => false,
        };
        self.is_streamed |= follow && shape == Shape::Path;
        self.emit_trees(cuts, &trees, shape, Order { follow, ends, batches: 1, in_step: true }, room);
    }

    /// Emits the cuts along their trees.
    fn emit_trees(
        &mut self,
        cuts: &[Cut],
        trees: &[Tree],
        shape: Shape,
        order: Order,
        mut room: Option<&mut Room>,
    ) {
        let mut routes: FxHashMap<&Tree, u32> = FxHashMap::default();
        let mut boxes: Vec<Box> = vec![];
        for (cut, tree) in cuts.iter().zip(trees) {
            let region = self.plan.add_region(cut.region.clone());
            let mut of = Box::new(cut.sum.tensor, region, tree, self.demands.set(cut.sum.receivers));
            of.root_adds = cut.root_adds(tree);
            if shape == Shape::Path && !order.follow {
                let next = routes.len() as u32 + 1;
                of.route = *routes.entry(tree).or_insert(next);
            }
            boxes.push(of);
        }
        match shape {
            Shape::Path => {
                let turns = match order.follow {
                    true => self.in_streams(&boxes, cuts),
                    false => in_lanes(&boxes),
                };
                for index in turns {
                    let of = &mut boxes[index];
                    let first = self.plan.transfers().len();
                    (0..of.tree.up.len()).for_each(|path| self.sum_up(of, path, room.as_deref_mut()));
                    if order.follow {
                        self.let_pass(first, order.ends);
                    }
                    self.sum_down(of);
                }
            }
            Shape::Star => {
                let last = cuts.iter().map(|cut| cut.turn).max().unwrap_or(0) as u64 + 1;
                let batch = |turn: usize| (turn as u64 * order.batches / last) as usize;
                let mut batches: Vec<Vec<Box>> = (0..order.batches).map(|_| vec![]).collect();
                boxes.into_iter().zip(cuts).for_each(|(of, cut)| batches[batch(cut.turn)].push(of));
                batches.iter_mut().for_each(|boxes| self.stars(boxes, order.in_step));
            }
        }
    }

    /// What is on its way through the hosts where streams end goes before what enters them: a box that has to share its links with the
    /// next one falls behind, the next one too, and so on for good.
    ///
    /// ```text
    /// boxes 0 1 2 from p, ends a b c       box 0   p -> b -> c -> a
    ///                                      box 1   p -> c -> a -> b        enters c while the last of box 0 is on its way there
    /// ```
    fn let_pass(&mut self, first: usize, ends: &BTreeSet<HostId>) {
        let topology = &self.problem.topology;
        for id in first..self.plan.transfers().len() {
            let t = &self.plan.transfers()[id];
            if ends.contains(&topology.host(t.src)) && !topology.same_host(t.src, t.dst) {
                self.urgent.push(TransferId::at(id));
            }
        }
    }

    /// The order of boxes in streams: every rank at which some set off has one stream. Two that came to one port at a time would both be slow
    /// there, and what a stream loses it does not get back: so each takes next what ends at a port that is free by then.
    fn in_streams(&self, boxes: &[Box], cuts: &[Cut]) -> Vec<usize> {
        let topology = &self.problem.topology;
        let mut streams: BTreeMap<Rank, VecDeque<usize>> = BTreeMap::new();
        for index in in_lanes(boxes) {
            streams.entry(boxes[index].tree.start()).or_default().push_back(index);
        }
        let mut free: FxHashMap<PortId, u64> = FxHashMap::default();
        // When each stream is through with what it has been given, in bytes.
        let mut next: BinaryHeap<Reverse<(u64, Rank)>> = streams.keys().map(|&r| Reverse((0, r))).collect();
        let mut order = Vec::with_capacity(boxes.len());
        while let Some(Reverse((now, start))) = next.pop() {
            let Some(stream) = streams.get_mut(&start) else { continue };
            let port = |index: usize| topology.port(boxes[index].tree.root);
            let waits = |index: usize| free.get(&port(index)).copied().unwrap_or(0).saturating_sub(now);
            let ahead = stream.iter().copied().take(MAX_AHEAD).enumerate();
            let Some((place, index)) = ahead.min_by_key(|&(place, index)| (waits(index), place)) else {
                continue;
            };
            stream.remove(place);
            let until = now + cuts[index].bytes;
            free.insert(port(index), until);
            order.push(index);
            next.push(Reverse((until, start)));
        }
        order
    }

    /// Whether boxes side by side would take too long to fill their paths even with the smallest chunks.
    fn fills_slowly(&self, cuts: &[Cut], trees: &[Tree]) -> bool {
        let mut starts: FxHashMap<Rank, (u64, u64)> = FxHashMap::default();
        for (cut, tree) in cuts.iter().zip(trees) {
            let (count, bytes) = starts.entry(tree.start()).or_default();
            (*count, *bytes) = (*count + 1, *bytes + cut.bytes);
        }
        let crossings =
            cuts.iter().map(|cut| cut.cover.len() + cut.receivers.len()).max().unwrap_or(0) as u64;
        starts.values().any(|(count, bytes)| count * crossings * MIN_CHUNK_BYTES * SLOW_FILL_SHARE > *bytes)
    }

    /// Everybody sends to its neighbour first, then to the next but one, and so on: nobody has to wait for others, if all keep
    /// step. Where boxes differ in size some would be early, and take from others what these need to be in time: so `in_step` a
    /// NIC begins a step when it is through with the one before. And a device that others of its host wait for begins with one box at a time:
    /// with all of them at once on local links, the first one would be late.
    fn stars(&mut self, boxes: &mut [Box], in_step: bool) {
        let topology = &self.problem.topology;
        let steps = boxes.iter().map(|of| of.tree.up.len()).max().unwrap_or(0);
        let (mut sent, mut begun) = (Steps::default(), FxHashMap::<Rank, TransferId>::default());
        for step in 0..steps {
            for of in boxes.iter_mut().filter(|of| step < of.tree.up.len()) {
                if !in_step {
                    self.sum_up(of, step, None);
                    continue;
                }
                let way = &of.tree.up[step];
                let (start, exit) = (way.ranks[0], *way.ranks.last().expect("a way has ranks"));
                let port = (!topology.same_host(exit, way.to)).then(|| topology.port(exit));
                let is_local = way.ranks.len() > 1 || port.is_none();
                let leave = port.and_then(|port| self.kept_step_with(sent.before(port), exit));
                let begin = begun.get(&start).filter(|_| is_local);
                let ends = self.sum_up_since(of, step, None, [begin.copied().as_slice(), leave.as_slice()]);
                let [first, last] = ends.expect("a way has ranks");
                if is_local {
                    begun.insert(start, first);
                }
                if let Some(port) = port {
                    sent.add(port, last);
                }
            }
            sent.next();
        }
        boxes.iter_mut().for_each(|of| self.sum_down(of));
    }

    /// Of what a NIC sent in the step before, what the next box that leaves from `exit` waits for: one that left from there
    /// too, if there is one, so that nobody has to be told.
    fn kept_step_with(&self, before: Option<(&[TransferId], usize)>, exit: Rank) -> Option<TransferId> {
        let (earlier, place) = before?;
        let is_own = |id: &&TransferId| self.plan.transfers()[id.index()].src == exit;
        match earlier.iter().filter(is_own).count() {
            0 => earlier.get(place % earlier.len()).copied(),
            count => earlier.iter().filter(is_own).nth(place % count).copied(),
        }
    }

    /// Up to the root's host, around the ring of hosts, and on to the other receivers. Where every sum ends at one of
    /// the hosts `ends`, these come last, so that all sums go the same way as far as they can.
    fn tree_between(
        &self,
        cut: &Cut,
        root_host: HostId,
        shape: Shape,
        (ends, ways_in): (&BTreeSet<HostId>, WaysIn),
    ) -> Tree {
        let own = cut.cover.iter().find(|(host, _)| *host == root_host).map(|(_, parts)| parts.as_slice());
        let nics_of_root = nics(&self.problem.topology, root_host);
        let root = match ways_in.by_nic {
            true => nics_of_root[cut.root_turn % nics_of_root.len()],
            false => root_of(&cut.receivers[&root_host], own.unwrap_or(&[]), &nics_of_root, cut.root_turn),
        };
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
        let mut joining = vec![];
        for (host, parts) in cover {
            if ways_in.by_port && shape == Shape::Path && *host == root_host {
                let entry = nics_of_root[cut.turn % nics_of_root.len()];
                joining = enter_root(parts, (root, entry), cut.turn, &mut path);
                continue;
            }
            let others: Vec<&[Rank]> = parts.iter().copied().filter(|p| !p.contains(&root)).collect();
            match self.many_ports && !others.is_empty() {
                true => path.extend(through(&others, &nics(&self.problem.topology, *host), cut.turn)),
                false => path.extend(in_turn(&others, cut.turn)),
            }
            if shape == Shape::Star {
                tree.push_path(std::mem::take(&mut path));
            }
        }
        tree.push_path(path);
        // Behind the others: a stream must not wait.
        tree.push_way(joining, root, true);
        self.spread(cut, root_host, (shape, ways_in.by_nic), &mut tree);
        tree
    }

    /// From the root through its host, and to the other hosts; those that have sent parts come last, the very last
    /// sends nothing more.
    fn spread(&self, cut: &Cut, root_host: HostId, (shape, by_nic): (Shape, bool), tree: &mut Tree) {
        let adds = |host: &HostId| cut.cover.iter().any(|(h, _)| h == host);
        let mut receivers: Vec<(&HostId, &Vec<Rank>)> = cut.receivers.iter().collect();
        receivers.sort_by_key(|(h, _)| (**h != root_host, adds(h), **h < root_host, **h));
        let mut entry = tree.root;
        for (host, ranks) in receivers {
            let mut ranks: Vec<Rank> = ranks.iter().copied().filter(|&r| r != tree.root).collect();
            let start = cut.turn % ranks.len().max(1);
            ranks.rotate_left(start);
            if by_nic && *host != root_host {
                let nics = nics(&self.problem.topology, *host);
                let landing = nics[cut.root_turn % nics.len()];
                ranks.retain(|&r| r != landing);
                ranks.insert(0, landing);
            }
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
        lanes.entry(of.tree.start()).or_default().push(index);
    }
    let num_lanes = lanes.len();
    let step = spread_step(num_lanes);
    let mut turns: Vec<(usize, usize)> = Vec::with_capacity(boxes.len());
    for (l, lane) in lanes.into_values().enumerate() {
        let first = (l * step % num_lanes) * lane.len() / num_lanes;
        let order = lane[first..].iter().chain(&lane[..first]);
        turns.extend(order.enumerate().map(|(turn, &index)| (turn, index)));
    }
    turns.sort_unstable();
    turns.into_iter().map(|(_, index)| index).collect()
}

/// A step around a ring of `n` places that comes by all of them, and is never near to where it was lately: about the golden
/// ratio of the ring.
fn spread_step(n: usize) -> usize {
    let coprime = |step: &usize| {
        let (mut a, mut b) = (n, *step);
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a == 1
    };
    (n * 618 / 1000..n).find(coprime).unwrap_or(1)
}

/// Takes a path into the host of its root by the device whose turn it is. Where that is the root itself, the others' parts join it there.
fn enter_root(
    parts: &[&[Rank]],
    (root, entry): (Rank, Rank),
    turn: usize,
    path: &mut Vec<Rank>,
) -> Vec<Rank> {
    let others = parts.iter().filter(|ranks| !ranks.contains(&root));
    let one = |ranks: &&[Rank]| if ranks.contains(&entry) { entry } else { ranks[turn % ranks.len()] };
    let mut ranks: Vec<Rank> = others.map(one).collect();
    if entry == root {
        return ranks;
    }
    ranks.sort_by_key(|&r| r != entry);
    path.extend(ranks);
    vec![]
}

/// The receiver at which a sum comes together: one that has a part, so that it saves a hop.
fn root_of(receivers: &[Rank], own: &[&[Rank]], nics: &[Rank], turn: usize) -> Rank {
    let holds = |r: &&Rank| own.iter().any(|ranks| ranks.contains(r));
    let holding: Vec<Rank> = receivers.iter().filter(holds).copied().collect();
    let roots = if holding.is_empty() { receivers } else { &holding };
    let nic = nics[turn % nics.len()];
    if roots.contains(&nic) && nics.iter().all(|nic| roots.contains(nic)) {
        nic
    } else {
        roots[turn % roots.len()]
    }
}
