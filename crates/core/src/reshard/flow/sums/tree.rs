//! The way of one box: who adds up, and who gets the sum.
//!
//! Parts flow up a tree to its root, every rank on the way adding its own; from the root the sum flows to whoever else
//! wants it.
//!
//! ```text
//! up     r0 -> r1 -> r4,  r2 -> r3 -> r4      r1, r3 and r4 add what arrives to their own part
//! root   r4
//! down   r4 -> r0,  r0 -> r2
//! ```
//!
//! Trees have one of two shapes:
//!
//! ```text
//! star   a -> w, b -> w, c -> w     w takes in all of them, one after the other
//! path   a -> b -> c -> w           everybody takes in one and sends one
//! ```
//!
//! With a star nobody waits for others, but its root takes in as much as there are parts. Where everybody who adds is
//! the root of its share, stars put no more on any link than paths do; where few want what many hold, only paths keep up.

use rustc_hash::FxHashMap;

use crate::id::{Rank, RegionId, TransferId};

use super::super::super::problem::Problem;
use super::super::emit::Emitter;
use super::room::Room;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Shape {
    Star,
    Path,
}

impl Shape {
    pub(in super::super) fn name(self) -> &'static str {
        match self {
            Shape::Star => "a star",
            Shape::Path => "a path",
        }
    }
}

/// A path up to a rank that adds what arrives.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Way {
    pub ranks: Vec<Rank>,
    pub to: Rank,
    /// Whether it joins another path on its way, or the root: others wait for it.
    pub is_side: bool,
}

impl Way {
    fn edges(&self) -> impl Iterator<Item = (Rank, Rank)> + '_ {
        let next = self.ranks[1..].iter().chain([&self.to]);
        self.ranks.iter().copied().zip(next.copied())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Tree {
    /// Paths to the root, in the order in which they arrive there.
    pub up: Vec<Way>,
    pub root: Rank,
    /// Ranks on the way up that pass on what they get and add nothing.
    pub relays: Vec<Rank>,
    /// Edges, each after the one that leads to it.
    pub down: Vec<(Rank, Rank)>,
}

impl Tree {
    pub(super) fn new(root: Rank) -> Self {
        Self { up: vec![], root, relays: vec![], down: vec![] }
    }

    /// A path to the root, unless it is empty.
    pub(super) fn push_path(&mut self, ranks: Vec<Rank>) {
        self.push_way(ranks, self.root, false);
    }

    pub(super) fn push_way(&mut self, ranks: Vec<Rank>, to: Rank, is_side: bool) {
        if !ranks.is_empty() {
            self.up.push(Way { ranks, to, is_side });
        }
    }

    /// Where its last path starts, of those that nobody waits for.
    pub(super) fn start(&self) -> Rank {
        let path = self.up.iter().rev().find(|way| !way.is_side);
        path.or(self.up.last()).map_or(self.root, |way| way.ranks[0])
    }

    /// Whether a rank passes on what comes from others, other than to be waited for.
    pub(super) fn is_on_path(&self, rank: Rank) -> bool {
        self.up.iter().any(|way| !way.is_side && way.ranks.contains(&rank))
    }

    /// Lets the sum flow down from where it comes together: whoever has all of it before the root and wants it would else get it
    /// twice. `num_parts` are added up.
    ///
    /// ```text
    /// up   r3 -> r2 -> r18, which adds nothing    down   r18 -> r2, r18 -> r10      so far
    /// up   r3 -> r2                               down   r2 -> r18, r18 -> r10      settled: r2 is the root
    /// ```
    pub(super) fn settle(&mut self, num_parts: usize) {
        let root_adds = self.num_senders() - self.relays.len() < num_parts;
        let mut into_root = self.up.iter().enumerate().filter(|(_, way)| way.to == self.root);
        let (Some((last, way)), None, false) = (into_root.next(), into_root.next(), root_adds) else {
            return;
        };
        // The last one that adds, and those behind it that only pass on.
        let passing = way.ranks.iter().rev().take_while(|rank| self.relays.contains(rank)).count();
        let complete = way.ranks.len() - (passing + 1).min(way.ranks.len());
        let wants = |rank: &Rank| self.down.iter().any(|(_, to)| to == rank);
        let Some(first) = way.ranks[complete..].iter().position(wants) else { return };
        let way = &mut self.up[last];
        let mut chain = way.ranks.split_off(complete + first);
        chain.push(self.root);
        self.root = chain[0];
        way.to = chain[0];
        self.relays.retain(|rank| !chain.contains(rank));
        if self.up[last].ranks.is_empty() {
            self.up.remove(last);
        }
        self.down.retain(|(_, to)| !chain.contains(to));
        self.down.splice(..0, chain.iter().copied().zip(chain[1..].iter().copied()));
    }

    /// How many ranks send something up.
    pub(super) fn num_senders(&self) -> usize {
        self.up.iter().map(|way| way.ranks.len()).sum()
    }

    pub(super) fn edges(&self) -> impl Iterator<Item = (Rank, Rank)> + '_ {
        self.up.iter().flat_map(Way::edges).chain(self.down.iter().copied())
    }
}

/// What the busiest link has to carry, in seconds, if these trees carry so many bytes each.
pub(super) fn busiest_s<'a>(trees: impl Iterator<Item = (&'a Tree, u64)>, problem: &Problem) -> f64 {
    let topology = &problem.topology;
    let mut loads: FxHashMap<(bool, bool, u32), u64> = FxHashMap::default();
    for (tree, bytes) in trees {
        for (from, to) in tree.edges() {
            let crosses = !topology.same_host(from, to);
            let link = |r: Rank| if crosses { topology.port(r).0 } else { r.0 };
            *loads.entry((crosses, false, link(from))).or_default() += bytes;
            *loads.entry((crosses, true, link(to))).or_default() += bytes;
        }
    }
    let seconds = |(&(crosses, into, link), &bytes): (&(bool, bool, u32), &u64)| {
        let port = || &topology.ports[link as usize];
        let rate = match (crosses, into) {
            (true, true) => port().in_bytes_per_s,
            (true, false) => port().out_bytes_per_s,
            (false, _) => problem.cluster.hosts[topology.host(Rank(link)).index()].local_bytes_per_s,
        };
        bytes as f64 / rate
    };
    loads.iter().map(seconds).fold(0.0, f64::max)
}

/// A box on its way.
pub(super) struct Box<'a> {
    pub tensor: u32,
    pub region: RegionId,
    pub tree: &'a Tree,
    /// Sorted.
    pub receivers: &'a [Rank],
    /// Whether the root's own part counts.
    pub root_adds: bool,
    /// Boxes of one route that start between the same two ranks follow each other.
    pub route: u32,
    /// What has arrived where.
    arrived: FxHashMap<Rank, Vec<TransferId>>,
    read_by: FxHashMap<Rank, TransferId>,
}

impl<'a> Box<'a> {
    pub(super) fn new(tensor: u32, region: RegionId, tree: &'a Tree, receivers: &'a [Rank]) -> Self {
        let (arrived, read_by) = Default::default();
        Self { tensor, region, tree, receivers, root_adds: true, route: 0, arrived, read_by }
    }

    fn is_wanted_by(&self, rank: Rank) -> bool {
        self.receivers.binary_search(&rank).is_ok()
    }
}

impl Emitter<'_> {
    /// Emits one path of a box to its root. Under a limit, ranks that do not want the box hold it only where there is
    /// room.
    pub(super) fn sum_up(&mut self, of: &mut Box, path: usize, room: Option<&mut Room>) {
        self.sum_up_since(of, path, room, [&[]; 2]);
    }

    /// The same, where the first and the last of its transfers wait for others of their senders; says which they are.
    pub(super) fn sum_up_since(
        &mut self,
        of: &mut Box,
        path: usize,
        mut room: Option<&mut Room>,
        since: [&[TransferId]; 2],
    ) -> Option<[TransferId; 2]> {
        let tree = of.tree;
        let mut ends: Option<[TransferId; 2]> = None;
        let kind = if tree.up[path].is_side { 7 } else { 2 };
        for (from, to) in tree.up[path].edges() {
            let mut after = of.arrived.remove(&from).unwrap_or_default();
            // What came last is followed.
            after.reverse();
            let is_first = after.is_empty();
            let adds = (to != tree.root || of.root_adds) && !tree.relays.contains(&to);
            let more = of.arrived.contains_key(&to);
            if let Some(room) = room.as_mut().filter(|_| to != tree.root && !of.is_wanted_by(to)) {
                after.extend(room.take(to));
            }
            let begins = if ends.is_none() { since[0] } else { &[] };
            let arrives = if to == tree.up[path].to { since[1] } else { &[] };
            after.extend(begins.iter().chain(arrives));
            let id = match is_first {
                true => self.add_first(of.tensor, (from, to), of.region, &after, (kind, of.route, 0)),
                false => self.plan.add(of.tensor, from, to, of.region, &after),
            };
            self.plan.transfer_mut(id).reduce = adds || more;
            if let Some(room) = room.as_mut().filter(|_| !is_first && !of.is_wanted_by(from)) {
                room.leave(from, id);
            }
            // What it held from the start stays where it is; what came in is in the way of what comes next.
            if !is_first {
                of.read_by.insert(from, id);
            }
            of.arrived.entry(to).or_default().push(id);
            ends = Some([ends.map_or(id, |ends| ends[0]), id]);
        }
        ends
    }

    /// Emits an edge of the way of the sum from its root, once others are over; what came last is all that is waited for.
    pub(super) fn sum_on(
        &mut self,
        of: &mut Box,
        (from, to): (Rank, Rank),
        others: &[TransferId],
    ) -> TransferId {
        let since = of.arrived.get(&from).and_then(|arrived| arrived.last()).copied();
        let read = of.read_by.get(&to).copied().filter(|&read| since != Some(read));
        let after: Vec<TransferId> = since.into_iter().chain(read).chain(others.iter().copied()).collect();
        let id = self.plan.add(of.tensor, from, to, of.region, &after);
        of.arrived.insert(to, vec![id]);
        id
    }

    /// Emits the way of the sum from its root to everybody else.
    pub(super) fn sum_down(&mut self, of: &mut Box) {
        for &(from, to) in &of.tree.down {
            let mut since = of.arrived.get(&from).cloned().unwrap_or_default();
            since.reverse();
            let read = of.read_by.get(&to).copied().filter(|read| !since.contains(read));
            let after: Vec<TransferId> = since.into_iter().chain(read).collect();
            let id = self.plan.add(of.tensor, from, to, of.region, &after);
            of.arrived.insert(to, vec![id]);
        }
    }
}
