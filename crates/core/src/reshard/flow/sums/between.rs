//! Between hosts: who is visited in which order, and in which order boxes set off.

use std::collections::{BTreeMap, BTreeSet};

use rustc_hash::FxHashMap;

use crate::id::{HostId, Rank};

use super::super::super::strategy::MIN_CHUNK_BYTES;
use super::super::emit::Emitter;
use super::Style;
use super::balanced::balanced;
use super::cuts::Cut;
use super::holders::in_turn;
use super::room::Room;
use super::roots::{Job, roots};
use super::tree::{Box, Shape, Tree, busiest_s};

/// How much more than paths stars may put on a link.
const AS_GOOD: f64 = 1.002;

/// Paths of boxes side by side that take more than this share of the time to fill are too slow.
const SLOW_FILL_SHARE: u64 = 90;

/// Whether boxes that set off at one rank follow each other all the way, as one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Following {
    /// Where no sum arrives at a host that adds, nobody is in anybody's way.
    Always,
    /// Where boxes side by side use ports more evenly, or where sums end at hosts that add: paths are alike up to these hosts,
    /// but behind them boxes are in each other's way for as long as it takes to get from one to the next.
    IfSlow,
    Never,
}

/// In which order boxes set off.
struct Order {
    /// All boxes that set off at one rank are one stream.
    follow: bool,
    /// Stars begin in so many batches, one after the other.
    batches: u64,
}

impl Emitter<'_> {
    pub(super) fn between_hosts(&mut self, cuts: &[Cut], style: Style, room: Option<&mut Room>) {
        let (stars, follow) = match style {
            Style::Balanced(style) if room.is_none() => {
                let trees = balanced(self.problem, cuts, (style.up, style.down), &self.plan, style.bound_s);
                return self.emit_trees(
                    cuts,
                    &trees,
                    style.up,
                    Order { follow: false, batches: style.batches },
                    None,
                );
            }
            Style::Balanced(_) => (false, false),
            Style::Turns { stars, follow } => (stars, follow),
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
        let with = |emitter: &Self, shape| -> Vec<Tree> {
            let trees = cuts.iter().zip(&roots);
            trees.map(|(cut, &root)| emitter.tree_between(cut, HostId(root), shape, &ends)).collect()
        };
        let following = match (apart, self.many_ports) {
            (true, false) => Following::Always,
            (true, true) => Following::IfSlow,
            (false, _) if follow && !ends.is_empty() => Following::IfSlow,
            (false, _) => Following::Never,
        };
        self.emit_best(cuts, with, (may_star, following), room);
    }

    /// Emits the cuts with stars, if these put no more on any link than paths do, else with paths.
    pub(super) fn emit_best(
        &mut self,
        cuts: &[Cut],
        with: impl Fn(&Self, Shape) -> Vec<Tree>,
        (may_star, following): (bool, Following),
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
        self.emit_trees(cuts, &trees, shape, Order { follow, batches: 1 }, room);
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
                for index in in_lanes(&boxes) {
                    let of = &mut boxes[index];
                    (0..of.tree.up.len()).for_each(|path| self.sum_up(of, path, room.as_deref_mut()));
                    self.sum_down(of);
                }
            }
            Shape::Star => {
                let last = cuts.iter().map(|cut| cut.turn).max().unwrap_or(0) as u64 + 1;
                let batch = |turn: usize| (turn as u64 * order.batches / last) as usize;
                let mut batches: Vec<Vec<Box>> = (0..order.batches).map(|_| vec![]).collect();
                boxes.into_iter().zip(cuts).for_each(|(of, cut)| batches[batch(cut.turn)].push(of));
                batches.iter_mut().for_each(|boxes| self.stars(boxes));
            }
        }
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

/// The receiver at which a sum comes together: one that has a part, so that it saves a hop.
fn root_of(receivers: &[Rank], own: &[&[Rank]], turn: usize) -> Rank {
    let holds = |r: &&Rank| own.iter().any(|ranks| ranks.contains(r));
    let holding: Vec<Rank> = receivers.iter().filter(holds).copied().collect();
    let roots = if holding.is_empty() { receivers } else { &holding };
    roots[turn % roots.len()]
}
