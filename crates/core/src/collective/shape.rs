//! The shapes that ways have: star, line, tree, and two levels.
//!
//! ```text
//! star        every part straight to the root, the sum straight to everyone       one step, much at the root
//! line        from rank to rank, around the ring                                   many steps, every link carries it once
//! tree        two below each                                                       few steps, every rank sends it twice
//! two levels  inside a host to one rank, between hosts, inside the hosts again     the network carries it once a host
//! ```
//!
//! With a fixed order a sum is added up from the group's first rank to its last, one part at a time, wherever that
//! happens: a star's root waits for its turn, a line runs along the group, and hosts are visited in the group's order.

use super::block_route::{BlockRoute, Input};
use crate::cluster::Topology;
use crate::id::Rank;

/// How a group's ranks stand to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    Star,
    Line,
    Tree,
    /// Between hosts a line, or a star.
    TwoLevels {
        between: Between,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Between {
    Line,
    Star,
}

/// A group with its hosts.
pub(super) struct Team {
    /// In the group's order.
    pub group: Vec<Rank>,
    /// Host by host, and within a host in the group's order.
    pub by_host: Vec<Rank>,
    hosts: Vec<Vec<Rank>>,
    /// Stretches of the group's order on one host.
    runs: Vec<Vec<Rank>>,
}

/// Which of the ways between two levels: the one through a host's `slot`-th rank.
pub(super) type Slot = usize;

impl Team {
    pub fn new(group: &[Rank], topology: &Topology) -> Self {
        let mut by_host = group.to_vec();
        by_host.sort_by_key(|r| topology.host(*r));
        let split = |ranks: &[Rank]| -> Vec<Vec<Rank>> {
            ranks.chunk_by(|a, b| topology.same_host(*a, *b)).map(<[Rank]>::to_vec).collect()
        };
        Self { group: group.to_vec(), hosts: split(&by_host), runs: split(group), by_host }
    }

    pub fn num_hosts(&self) -> usize {
        self.hosts.len()
    }

    /// Ranks on the fullest host.
    pub fn num_slots(&self) -> usize {
        self.hosts.iter().map(Vec::len).max().unwrap_or(1)
    }

    pub fn leader(&self, host: usize, slot: Slot) -> Rank {
        self.hosts[host][slot % self.hosts[host].len()]
    }

    /// The rank at which a sum in the group's order ends up, along a line or through hosts.
    pub fn last(&self, slot: Slot) -> Rank {
        let run = self.runs.last().expect("a group has ranks");
        run[slot % run.len()]
    }

    pub fn last_of_group(&self) -> Rank {
        *self.group.last().expect("a group has ranks")
    }

    pub fn slot_of(&self, rank: Rank) -> Slot {
        self.host_of(rank).1
    }

    fn host_of(&self, rank: Rank) -> (usize, Slot) {
        let on =
            |(h, ranks): (usize, &Vec<Rank>)| ranks.iter().position(|r| *r == rank).map(|slot| (h, slot));
        self.hosts.iter().enumerate().find_map(on).expect("a rank of the group is on one of its hosts")
    }

    /// Ranks from the one behind `first` around to it, host by host.
    fn around(&self, first: Rank) -> impl DoubleEndedIterator<Item = Rank> + '_ {
        let at = self.by_host.iter().position(|r| *r == first).expect("a rank of the group");
        let n = self.by_host.len();
        (1..=n).map(move |i| self.by_host[(at + i) % n])
    }

    /// Hosts from the one behind the root's around to it, each with its leader.
    fn hosts_around(&self, root: Rank, slot: Slot) -> Vec<(usize, Rank)> {
        let (home, n) = (self.host_of(root).0, self.hosts.len());
        let others = (1..n).map(|i| (home + i) % n).map(|h| (h, self.leader(h, slot)));
        others.chain([(home, root)]).collect()
    }

    /// Everybody's part to the root, in any order.
    pub fn gather(&self, shape: Shape, root: Rank, slot: Slot) -> BlockRoute {
        let mut way = BlockRoute::default();
        match shape {
            Shape::Star => {
                let leaves = self.around(root).filter(|r| *r != root).map(|r| way.leaf(r));
                let inputs: Vec<Input> = [Input::Own].into_iter().chain(leaves.collect::<Vec<_>>()).collect();
                way.add(root, inputs);
            }
            Shape::Line => {
                let mut last = None;
                for rank in self.around(root) {
                    let inputs = [Some(Input::Own), last].into_iter().flatten().collect();
                    last = Some(Input::From(way.add(rank, inputs)));
                }
            }
            Shape::Tree => {
                let ranks: Vec<Rank> = [root].into_iter().chain(self.around(root)).collect();
                add_tree(&mut way, &ranks[..ranks.len() - 1]);
            }
            Shape::TwoLevels { between } => self.gather_in_hosts(&mut way, between, root, slot),
        }
        way
    }

    fn gather_in_hosts(&self, way: &mut BlockRoute, between: Between, root: Rank, slot: Slot) {
        let mut waiting: Vec<Input> = vec![];
        for (host, leader) in self.hosts_around(root, slot) {
            let mut inputs = vec![Input::Own];
            inputs.extend(self.hosts[host].iter().filter(|r| **r != leader).map(|r| way.leaf(*r)));
            if leader == root || between == Between::Line {
                // Last, so that it passes through as it comes.
                inputs.append(&mut waiting);
            }
            waiting.push(Input::From(way.add(leader, inputs)));
        }
    }

    /// Everybody's part, added up in the group's order. The last station is `root`, but for two levels, where it is
    /// [`Team::last`]. There is no tree: its sums are not those of the group's order.
    pub fn gather_in_order(&self, shape: Shape, root: Rank, slot: Slot) -> BlockRoute {
        let mut way = BlockRoute::default();
        let own_or_leaf = |way: &mut BlockRoute, rank: Rank, me: Rank| match rank == me {
            true => Input::Own,
            false => way.leaf(rank),
        };
        match shape {
            Shape::Star | Shape::Tree => {
                let inputs = self.group.iter().map(|r| own_or_leaf(&mut way, *r, root)).collect();
                way.add(root, inputs);
            }
            Shape::Line => {
                let at = self.group.iter().position(|r| *r == root).expect("a rank of the group");
                let mut last: Option<Input> = None;
                for rank in &self.group[..at] {
                    let inputs = last.into_iter().chain([Input::Own]).collect();
                    last = Some(Input::From(way.add(*rank, inputs)));
                }
                let rest: Vec<Input> = self.group[at + 1..].iter().map(|r| way.leaf(*r)).collect();
                way.add(root, last.into_iter().chain([Input::Own]).chain(rest).collect());
            }
            Shape::TwoLevels { .. } => {
                let mut last: Option<Input> = None;
                for run in &self.runs {
                    let leader = run[slot % run.len()];
                    let parts: Vec<Input> = run.iter().map(|r| own_or_leaf(&mut way, *r, leader)).collect();
                    last = Some(Input::From(way.add(leader, last.into_iter().chain(parts).collect())));
                }
            }
        }
        way
    }

    /// Who passes on what the root has, until all have it.
    pub fn spread(&self, shape: Shape, root: Rank, slot: Slot) -> Vec<(Rank, Rank)> {
        match shape {
            Shape::Star => self.around(root).filter(|r| *r != root).map(|r| (root, r)).collect(),
            Shape::Line => {
                let mut ranks = vec![root];
                ranks.extend(self.around(root).filter(|r| *r != root));
                ranks.windows(2).map(|w| (w[0], w[1])).collect()
            }
            Shape::Tree => {
                let ranks: Vec<Rank> = [root].into_iter().chain(self.around(root)).collect();
                let mut edges = vec![];
                tree_edges(&ranks[..ranks.len() - 1], &mut edges);
                edges
            }
            Shape::TwoLevels { between } => self.spread_to_hosts(between, root, slot),
        }
    }

    fn spread_to_hosts(&self, between: Between, root: Rank, slot: Slot) -> Vec<(Rank, Rank)> {
        let mut hosts = self.hosts_around(root, slot);
        hosts.rotate_right(1);
        let mut edges = vec![];
        let mut from = root;
        for (_, leader) in &hosts[1..] {
            edges.push((from, *leader));
            from = if between == Between::Line { *leader } else { root };
        }
        for (host, leader) in hosts {
            let others = self.hosts[host].iter().filter(|r| **r != leader);
            edges.extend(others.map(|r| (leader, *r)));
        }
        edges
    }

    /// Back along the line that a sum in the group's order came.
    pub fn spread_back(&self) -> Vec<(Rank, Rank)> {
        let back: Vec<Rank> = self.group.iter().rev().copied().collect();
        back.windows(2).map(|w| (w[0], w[1])).collect()
    }
}

/// Two halves below the first of some ranks, each a tree of its own. Neighbours stay close: of a host's ranks, few have
/// a branch on another host.
fn halves(ranks: &[Rank]) -> impl Iterator<Item = &[Rank]> {
    let below = &ranks[1..];
    let (left, right) = below.split_at(below.len().div_ceil(2));
    [left, right].into_iter().filter(|half| !half.is_empty())
}

fn add_tree(way: &mut BlockRoute, ranks: &[Rank]) -> usize {
    let mut inputs = vec![Input::Own];
    for half in halves(ranks) {
        inputs.push(Input::From(add_tree(way, half)));
    }
    way.add(ranks[0], inputs)
}

fn tree_edges(ranks: &[Rank], edges: &mut Vec<(Rank, Rank)>) {
    // The larger half first: it takes longer.
    for half in halves(ranks) {
        edges.push((ranks[0], half[0]));
    }
    for half in halves(ranks) {
        tree_edges(half, edges);
    }
}
