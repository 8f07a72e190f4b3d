//! Routes through tiers: a group is entered once, and what has entered spreads inside.
//!
//! ```text
//! rack 0: h0 holds          h0 -> h2      the rack's uplink carries one copy
//! rack 1: h2 h3 want        h2 -> h3
//! ```
//!
//! From the widest tier down to the hosts, every group without a copy gets one from the least busy host outside, and is
//! served from within after that. Classes are cut into slices, so that the least busy host is not always the same. Who
//! chose first did not know what the others would need; so every slice may choose again, a few times over.

use std::collections::BTreeMap;

use crate::id::HostId;

use super::super::demand::Class;
use super::super::problem::Problem;
use super::routes::{Edge, Route};

/// Slices per class, where it is large enough; finer slices share the load more evenly.
const SLICES: u64 = 16;
const MIN_SLICE: u64 = 256 << 10;
/// How often slices choose again, where there are not too many.
const ROUNDS: u32 = 4;
const MAX_CHOOSING_AGAIN: usize = 4096;

pub(super) fn tiered_routes(classes: &[Class], problem: &Problem) -> Vec<Vec<Route>> {
    let mut loads = Loads {
        problem,
        hosts_s: vec![0.0; problem.cluster.hosts.len()],
        groups_s: problem.cluster.tiers.iter().map(|t| vec![0.0; t.groups.len()]).collect(),
    };
    let mut routes: Vec<Vec<Route>> = classes.iter().map(|class| class_routes(class, &mut loads)).collect();
    let mut best = (loads.busiest_s(), routes.clone());
    let slices: usize = routes.iter().map(Vec::len).sum();
    let rounds = if slices <= MAX_CHOOSING_AGAIN { ROUNDS } else { 0 };
    for _ in 0..rounds {
        for (class, routes) in classes.iter().zip(&mut routes) {
            routes.iter_mut().for_each(|route| choose_again(class, route, &mut loads));
        }
        if loads.busiest_s() < best.0 {
            best = (loads.busiest_s(), routes.clone());
        }
    }
    best.1
}

fn class_routes(class: &Class, loads: &mut Loads) -> Vec<Route> {
    let slices = (class.bytes / MIN_SLICE).clamp(1, SLICES);
    let cut = |i: u64| (u128::from(class.bytes) * u128::from(i) / u128::from(slices)) as u64;
    (0..slices)
        .map(|i| {
            let (start, end) = (cut(i), cut(i + 1));
            Route { start, end, edges: class_tree(class, end - start, loads) }
        })
        .collect()
}

fn class_tree(class: &Class, bytes: u64, loads: &mut Loads) -> Vec<Edge> {
    let mut tree = Tree { loads, bytes, edges: vec![] };
    let mut have: Vec<(u32, u32)> = class.holders.iter().map(|&h| (h, 0)).collect();
    tree.serve(&class.receivers, &mut have, tree.loads.problem.cluster.tiers.len());
    tree.edges
}

fn choose_again(class: &Class, route: &mut Route, loads: &mut Loads) {
    let bytes = route.end - route.start;
    route.edges.iter().for_each(|e| loads.add(e.from, e.to, -(bytes as f64)));
    route.edges = class_tree(class, bytes, loads);
}

/// Seconds of sending that hosts and groups have been given so far.
struct Loads<'a> {
    problem: &'a Problem,
    hosts_s: Vec<f64>,
    groups_s: Vec<Vec<f64>>,
}

impl Loads<'_> {
    /// The tiers' groups that a copy from one host to another leaves.
    fn groups_left(&self, from: u32, to: u32) -> impl Iterator<Item = (usize, u32)> + '_ {
        let topology = &self.problem.topology;
        (0..topology.num_tiers()).filter_map(move |tier| {
            let (a, b) = (topology.group(tier, HostId(from)), topology.group(tier, HostId(to)));
            a.filter(|_| a != b).map(|group| (tier, group))
        })
    }

    /// When the busiest link would be done, were this copy sent too.
    fn done_s(&self, from: u32, to: u32, bytes: u64) -> f64 {
        let own = self.hosts_s[from as usize]
            + bytes as f64 / self.problem.cluster.hosts[from as usize].out_bytes_per_s();
        let groups = self.groups_left(from, to).map(|(tier, group)| {
            let rate = self.problem.cluster.tiers[tier].groups[group as usize].out_bytes_per_s;
            self.groups_s[tier][group as usize] + bytes as f64 / rate
        });
        groups.fold(own, f64::max)
    }

    fn busiest_s(&self) -> f64 {
        self.hosts_s.iter().chain(self.groups_s.iter().flatten()).copied().fold(0.0, f64::max)
    }

    fn add(&mut self, from: u32, to: u32, bytes: f64) {
        let left: Vec<(usize, u32)> = self.groups_left(from, to).collect();
        for (tier, group) in left {
            let rate = self.problem.cluster.tiers[tier].groups[group as usize].out_bytes_per_s;
            self.groups_s[tier][group as usize] += bytes / rate;
        }
        self.hosts_s[from as usize] += bytes / self.problem.cluster.hosts[from as usize].out_bytes_per_s();
    }
}

struct Tree<'a, 'b> {
    loads: &'a mut Loads<'b>,
    bytes: u64,
    edges: Vec<Edge>,
}

impl Tree<'_, '_> {
    /// Serves receivers from hosts that have it (with their depth), all of them below one group of tier `level`; the
    /// cluster itself lies above the last tier.
    fn serve(&mut self, receivers: &[u32], have: &mut Vec<(u32, u32)>, level: usize) {
        if level == 0 {
            for &to in receivers {
                self.send(to, have);
            }
            return;
        }
        let topology = &self.loads.problem.topology;
        // Hosts outside every group of the tier are groups of their own.
        let group_of = |host: u32| topology.group(level - 1, HostId(host)).map_or((1, host), |g| (0, g));
        let mut groups: BTreeMap<(u32, u32), Vec<u32>> = BTreeMap::new();
        for &host in receivers {
            groups.entry(group_of(host)).or_default().push(host);
        }
        let holds = |group: (u32, u32), have: &[(u32, u32)]| have.iter().any(|h| group_of(h.0) == group);
        let (with, without): (Vec<_>, Vec<_>) = groups.into_iter().partition(|(g, _)| holds(*g, have));
        // Groups that have it first: the more hosts have it, the more can send it to the others.
        let entered = with.len();
        for (i, (group, mut members)) in with.into_iter().chain(without).enumerate() {
            if i >= entered {
                // It will have to pass it on to the others.
                let idle = |h: &u32| self.loads.hosts_s[*h as usize];
                let first =
                    (0..members.len()).min_by(|a, b| idle(&members[*a]).total_cmp(&idle(&members[*b])));
                self.send(members.remove(first.unwrap_or(0)), have);
            }
            let mut inside: Vec<(u32, u32)> =
                have.iter().copied().filter(|h| group_of(h.0) == group).collect();
            self.serve(&members, &mut inside, level - 1);
            have.extend(inside.into_iter().filter(|h| members.contains(&h.0)));
        }
    }

    /// One copy, from whoever is done with it first.
    fn send(&mut self, to: u32, have: &mut Vec<(u32, u32)>) {
        let done = |h: &(u32, u32)| self.loads.done_s(h.0, to, self.bytes);
        let best = have.iter().copied().min_by(|a, b| done(a).total_cmp(&done(b)).then(a.1.cmp(&b.1)));
        let (from, depth) = best.expect("somebody holds every piece");
        self.loads.add(from, to, self.bytes as f64);
        self.edges.push(Edge { from, to, depth });
        have.push((to, depth + 1));
    }
}
