//! The cheapest tree: where every byte over a link has a price, which way from the holders to everybody who wants it
//! costs the least?
//!
//! A copy from one device to another pays its sender's link and its receiver's link, and the uplinks between them. So
//! inside a host whoever has it and sends most cheaply sends all; the first copy goes to the cheapest sender of them
//! all, if that pays. Between hosts the same holds, and with uplinks it is a minimum-cost arborescence (Chu, Liu and
//! Edmonds):
//!
//! ```text
//! holder's host        r0 -> r1 (relay, a cheaper NIC)
//! between hosts              r1 => r8            every host is entered once, at its cheapest device
//! entered host                     r8 -> r9 r10
//! ```

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use crate::cluster::Topology;
use crate::id::{HostId, Rank};

use super::super::demand::{Demands, RankSet};
use super::super::problem::Problem;
use super::links::Links;

/// Everything that the same devices hold and the same devices want.
#[derive(Debug, Clone, Default)]
pub(super) struct Commodity {
    pub bytes: u64,
    /// Indices of items, in order.
    pub items: Vec<u32>,
    /// Hosts with holders, then hosts that have to be entered.
    pub places: Vec<Place>,
    pub num_homes: usize,
}

impl Commodity {
    /// What the cheapest tree takes to find, in steps.
    pub(super) fn work(&self, links: &Links) -> usize {
        let devices: usize = self.places.iter().map(|p| links.topology.ranks_of(p.host).count()).sum();
        let away = self.places.len() - self.num_homes;
        devices + if links.topology.num_tiers() > 0 { away.saturating_pow(3) / 4 } else { 0 }
    }
}

/// All that has to move, by who holds it and who wants it, in order of first appearance.
pub(super) fn commodities(demands: &Demands, problem: &Problem) -> Vec<Commodity> {
    let mut known: FxHashMap<(RankSet, RankSet), usize> = FxHashMap::default();
    let mut commodities: Vec<Commodity> = vec![];
    for (index, item) in demands.items.iter().enumerate() {
        let at = *known.entry((item.holders, item.wanters)).or_insert_with(|| {
            let (holders, wanters) = (demands.set(item.holders), demands.set(item.wanters));
            commodities.push(Commodity::between(holders, wanters, &problem.topology));
            commodities.len() - 1
        });
        commodities[at].items.push(index as u32);
        commodities[at].bytes += item.bytes;
    }
    commodities
}

impl Commodity {
    fn between(holders: &[Rank], wanters: &[Rank], topology: &Topology) -> Self {
        let mut hosts: BTreeMap<HostId, Place> = BTreeMap::new();
        let mut place = |rank: Rank, is_holder: bool| {
            let host = topology.host(rank);
            let place = hosts.entry(host).or_insert_with(|| Place { host, holders: vec![], wanters: vec![] });
            if is_holder { place.holders.push(rank) } else { place.wanters.push(rank) }
        };
        holders.iter().for_each(|&r| place(r, true));
        wanters.iter().for_each(|&r| place(r, false));
        let (mut places, away): (Vec<Place>, Vec<Place>) =
            hosts.into_values().partition(|p| !p.holders.is_empty());
        let num_homes = places.len();
        places.extend(away);
        Self { bytes: 0, items: vec![], places, num_homes }
    }
}

/// A host that has it or wants it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub host: HostId,
    pub holders: Vec<Rank>,
    pub wanters: Vec<Rank>,
}

/// Copies from device to device; an edge comes after the one that brings its source what it sends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tree {
    pub edges: Vec<(Rank, Rank)>,
}

/// What a byte costs on every link.
pub(super) struct Prices<'a> {
    pub links: &'a Links<'a>,
    pub per_byte: &'a [f64],
}

impl Prices<'_> {
    fn nic_out(&self, rank: Rank) -> f64 {
        self.per_byte[self.links.nic_out(rank)]
    }

    fn nic_in(&self, rank: Rank) -> f64 {
        self.per_byte[self.links.nic_in(rank)]
    }

    fn local_out(&self, rank: Rank) -> f64 {
        self.per_byte[self.links.local_out(rank)]
    }

    fn local_in(&self, rank: Rank) -> f64 {
        self.per_byte[self.links.local_in(rank)]
    }

    /// What a byte costs along a tree.
    pub(super) fn of(&self, tree: &Tree) -> f64 {
        let mut path = vec![];
        tree.edges.iter().for_each(|&(src, dst)| self.links.between(src, dst, &mut path));
        path.iter().map(|&l| self.per_byte[l as usize]).sum()
    }

    /// The cheapest tree, as far as the order above finds it: relays pay if all copies leave through them, or if one
    /// does.
    pub(super) fn cheapest_tree(&self, commodity: &Commodity) -> (f64, Tree) {
        let away = (commodity.places.len() - commodity.num_homes).max(1);
        let single = self.tree(commodity, 1);
        let cost = self.of(&single);
        if away == 1 {
            return (cost, single);
        }
        let shared = self.tree(commodity, away);
        let shared_cost = self.of(&shared);
        if shared_cost < cost { (shared_cost, shared) } else { (cost, single) }
    }

    /// A tree chosen as if every sender sent this many copies.
    fn tree(&self, commodity: &Commodity, copies: usize) -> Tree {
        let places: Vec<Reached> = commodity.places.iter().map(|place| self.reach(place)).collect();
        let exits: Vec<f64> =
            places.iter().map(|p| self.exit(p, copies as f64).cost / copies as f64).collect();
        let parents = self.parents(&places, &exits, commodity.num_homes);
        let mut children: Vec<Vec<usize>> = vec![vec![]; places.len()];
        for (place, parent) in parents.iter().enumerate() {
            parent.iter().for_each(|&p| children[p].push(place));
        }
        let mut tree = Tree { edges: vec![] };
        let mut open: Vec<usize> = (0..commodity.num_homes).rev().collect();
        while let Some(at) = open.pop() {
            self.spread(&places[at], &mut tree);
            if children[at].is_empty() {
                continue;
            }
            let exit = self.exit(&places[at], children[at].len() as f64);
            tree.edges.extend(exit.relayed_by.map(|from| (from, exit.rank)));
            for &child in children[at].iter().rev() {
                tree.edges.push((exit.rank, places[child].entry.expect("an entered host has an entry")));
                open.push(child);
            }
        }
        tree
    }

    /// The host that each entered host gets it from.
    fn parents(&self, places: &[Reached], exits: &[f64], num_homes: usize) -> Vec<Option<usize>> {
        let num_away = places.len() - num_homes;
        let mut parents = vec![None; places.len()];
        if num_away == 0 {
            return parents;
        }
        let cheapest = |range: std::ops::Range<usize>| {
            range.min_by(|&a, &b| exits[a].total_cmp(&exits[b])).expect("a range with places")
        };
        if self.links.topology.num_tiers() == 0 {
            let (home, hub) = (cheapest(0..num_homes), cheapest(num_homes..places.len()));
            let rest = if exits[hub] < exits[home] { hub } else { home };
            for (place, parent) in parents.iter_mut().enumerate().skip(num_homes) {
                *parent = Some(if place == hub { home } else { rest });
            }
            return parents;
        }
        // Node 0 stands for all homes.
        let cost = |from: usize, to: usize| exits[from] + self.uplinks(&places[from], &places[to]);
        let home_of: Vec<usize> = (0..num_away)
            .map(|v| {
                let cost = |u: usize| cost(u, num_homes + v);
                (0..num_homes).min_by(|&a, &b| cost(a).total_cmp(&cost(b))).expect("somebody holds it")
            })
            .collect();
        let costs: Vec<Vec<f64>> = (0..=num_away)
            .map(|u| {
                let from = |v: usize| if u == 0 { home_of[v - 1] } else { num_homes + u - 1 };
                (0..=num_away).map(|v| if v == 0 { 0.0 } else { cost(from(v), num_homes + v - 1) }).collect()
            })
            .collect();
        for (v, &u) in arborescence(&costs).iter().enumerate().skip(1) {
            parents[num_homes + v - 1] = Some(if u == 0 { home_of[v - 1] } else { num_homes + u - 1 });
        }
        parents
    }

    fn uplinks(&self, from: &Reached, to: &Reached) -> f64 {
        self.links.uplinks(from.place_rank(), to.place_rank()).map(|l| self.per_byte[l]).sum()
    }

    /// How a host is entered, where it has to be, and who has it then.
    fn reach<'p>(&self, place: &'p Place) -> Reached<'p> {
        if !place.holders.is_empty() {
            return Reached { place, entry: None };
        }
        let entry = |rank: Rank| {
            let others = place.wanters.iter().filter(|&&w| w != rank);
            let arrive: f64 = others.clone().map(|&w| self.local_in(w)).sum();
            let (own, best) =
                (self.local_out(rank), others.clone().map(|&w| self.local_out(w)).fold(f64::MAX, f64::min));
            let leave = match others.count() {
                0 => 0.0,
                n => own + (n - 1) as f64 * own.min(best),
            };
            self.nic_in(rank) + arrive + leave
        };
        // Those who want it first: a stranger has to be cheaper, and needs memory.
        let ranks = place.wanters.iter().copied().chain(self.links.topology.ranks_of(place.host));
        let best = ranks.map(|r| (entry(r), r)).reduce(|a, b| if b.0 < a.0 * (1.0 - 1e-9) { b } else { a });
        Reached { place, entry: best.map(|(_, rank)| rank) }
    }

    /// From the holders, or from the device it entered at, to all others of the host that want it.
    fn spread(&self, reached: &Reached, tree: &mut Tree) {
        let others: Vec<Rank> =
            reached.place.wanters.iter().copied().filter(|&w| Some(w) != reached.entry).collect();
        let starts = reached.entry.as_slice().iter().chain(&reached.place.holders).copied();
        let cheapest = |a: Rank, b: Rank| if self.local_out(b) < self.local_out(a) { b } else { a };
        let Some(best) = others.iter().copied().reduce(cheapest) else { return };
        let start = starts.reduce(cheapest).expect("a host has holders or an entry");
        let hub = if self.local_out(best) < self.local_out(start) { best } else { start };
        if hub == best {
            tree.edges.push((start, best));
        }
        tree.edges.extend(others.into_iter().filter(|&w| w != hub).map(|w| (hub, w)));
    }

    /// The device that copies leave a host from.
    fn exit(&self, reached: &Reached, copies: f64) -> Exit {
        let has = || reached.has();
        let giver = has().reduce(|a, b| if self.local_out(b) < self.local_out(a) { b } else { a });
        let giver = giver.expect("a host has holders or an entry");
        let own = has().map(|rank| Exit { rank, relayed_by: None, cost: copies * self.nic_out(rank) });
        let relays = self.links.topology.ranks_of(reached.place.host).filter(|&r| has().all(|h| h != r));
        let relays = relays.map(|rank| {
            let cost = self.local_out(giver) + self.local_in(rank) + copies * self.nic_out(rank);
            Exit { rank, relayed_by: Some(giver), cost }
        });
        let best = own.chain(relays).reduce(|a, b| if b.cost < a.cost * (1.0 - 1e-9) { b } else { a });
        best.expect("a host has holders or an entry")
    }
}

/// A host on its way.
struct Reached<'a> {
    place: &'a Place,
    entry: Option<Rank>,
}

impl Reached<'_> {
    /// Everybody there who has it in the end.
    fn has(&self) -> impl Iterator<Item = Rank> + '_ {
        let others = self.place.wanters.iter().filter(|&&w| Some(w) != self.entry);
        self.place.holders.iter().chain(self.entry.as_slice()).chain(others).copied()
    }

    /// Any rank of the host.
    fn place_rank(&self) -> Rank {
        self.has().next().expect("a host has holders or an entry")
    }
}

/// How copies leave a host, and what they cost together.
struct Exit {
    rank: Rank,
    relayed_by: Option<Rank>,
    cost: f64,
}

/// The parents of a minimum-cost arborescence from node 0, which is its own: every node takes its cheapest edge, cycles
/// become one node, and where the rest enters a cycle the cycle opens (Chu-Liu, Edmonds).
fn arborescence(costs: &[Vec<f64>]) -> Vec<usize> {
    let n = costs.len();
    let cheapest = |v: usize| {
        let others = (0..n).filter(|&u| u != v);
        others.min_by(|&a, &b| costs[a][v].total_cmp(&costs[b][v])).unwrap_or(0)
    };
    let mut parents: Vec<usize> = (0..n).map(|v| if v == 0 { 0 } else { cheapest(v) }).collect();
    let Some(cycle) = find_cycle(&parents) else { return parents };
    // The nodes outside the cycle keep their order, so that the root stays first; the cycle is last.
    let outside: Vec<usize> = (0..n).filter(|v| !cycle.contains(v)).collect();
    let by = |cost: &dyn Fn(usize) -> f64| {
        cycle.iter().copied().min_by(|&a, &b| cost(a).total_cmp(&cost(b))).expect("a cycle has nodes")
    };
    let leave: Vec<usize> = outside.iter().map(|&v| by(&|u| costs[u][v])).collect();
    let enter: Vec<usize> = outside.iter().map(|&u| by(&|v| costs[u][v] - costs[parents[v]][v])).collect();
    let m = outside.len();
    let mut smaller = vec![vec![0.0; m + 1]; m + 1];
    for (i, &u) in outside.iter().enumerate() {
        for (j, &v) in outside.iter().enumerate() {
            smaller[i][j] = costs[u][v];
        }
        smaller[i][m] = costs[u][enter[i]] - costs[parents[enter[i]]][enter[i]];
        smaller[m][i] = costs[leave[i]][u];
    }
    let found = arborescence(&smaller);
    for (j, &v) in outside.iter().enumerate().skip(1) {
        parents[v] = if found[j] == m { leave[j] } else { outside[found[j]] };
    }
    parents[enter[found[m]]] = outside[found[m]];
    parents
}

fn find_cycle(parents: &[usize]) -> Option<Vec<usize>> {
    // The walk that first came by a node.
    let mut walk = vec![0; parents.len()];
    for start in 1..parents.len() {
        let mut at = start;
        while at != 0 && walk[at] == 0 {
            walk[at] = start;
            at = parents[at];
        }
        if at != 0 && walk[at] == start {
            let mut cycle = vec![at];
            let mut next = parents[at];
            while next != at {
                cycle.push(next);
                next = parents[next];
            }
            return Some(cycle);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The least cost over all ways to give every node a parent that lead to node 0.
    fn least_cost(costs: &[Vec<f64>]) -> f64 {
        let n = costs.len();
        let ways = (n as u64).pow(n as u32 - 1);
        let parents = |way: u64| {
            let mut way = way;
            (0..n).map(move |v| {
                if v == 0 {
                    0
                } else {
                    let p = way % n as u64;
                    way /= n as u64;
                    p as usize
                }
            })
        };
        let cost = |way| {
            let parents: Vec<usize> = parents(way).collect();
            let is_tree = (1..n).all(|v| parents[v] != v) && find_cycle(&parents).is_none();
            is_tree.then(|| (1..n).map(|v| costs[parents[v]][v]).sum::<f64>())
        };
        (0..ways).filter_map(cost).fold(f64::MAX, f64::min)
    }

    proptest! {
        #[test]
        fn arborescences_cost_the_least(costs in prop::collection::vec(prop::collection::vec(1u32..20, 5), 5)) {
            let costs: Vec<Vec<f64>> = costs.iter().map(|row| row.iter().map(|&c| f64::from(c)).collect()).collect();
            let parents = arborescence(&costs);
            prop_assert!(find_cycle(&parents).is_none(), "{:?}", parents);
            let cost: f64 = (1..5).map(|v| costs[parents[v]][v]).sum();
            prop_assert_eq!(cost, least_cost(&costs));
        }
    }
}
