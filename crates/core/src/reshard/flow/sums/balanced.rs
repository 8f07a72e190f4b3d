//! Trees by load: for every box the root, and for every host on the way the devices it comes in and leaves through, such
//! that no link has more to do than others.
//!
//! Any host may be the root: one that adds and wants the sum saves a message each way, one that only adds saves others
//! from taking in what they cannot, and one with nothing to do can help. Of each kind the least busy is tried, and the
//! tree whose links are the cheapest ([`super::loads`]) is taken. Who chose first did not know what the others would
//! need, so every box may choose again.
//!
//! A host with nothing to do may also stand before the root, so that who wants the sum takes in less:
//!
//! ```text
//! parts on a b c, wanted on all, x idle      a -> x <- b,  x -> c,  c -> a, c -> b      into a b c: one each
//! ```
//!
//! Groups of a tier are visited one after the other, or add up for themselves before they send, so that each uplink
//! carries a box once:
//!
//! ```text
//! path   h0 -> h1 | h2 -> h3 | h4 -> root        star   h0 -> h1 -> root,  h2 -> h3 -> root,  h4 -> root
//! ```
//!
//! Where the port beside a holder has no time left, a neighbour relays.

use crate::id::{HostId, Rank};

use super::super::super::plan::Plan;
use super::super::super::problem::Problem;
use super::cuts::Cut;
use super::loads::Loads;
use super::tree::{Shape, Tree};

/// How often boxes choose again.
const ROUNDS: u32 = 3;
/// Of every kind of host so many are tried as the root.
const TRIED: usize = 2;
/// Up to here a port counts as having time left.
const FULL: f64 = 1.0 + 1e-6;

/// The tree of every cut.
pub(super) fn balanced(
    problem: &Problem,
    cuts: &[Cut],
    shapes: (Shape, Shape),
    plan: &Plan,
    bound_s: f64,
) -> Vec<Tree> {
    let mut loads = Loads::new(problem, plan, bound_s);
    let mut trees: Vec<Tree> = vec![];
    for cut in cuts {
        let tree = choose(&mut loads, cut, shapes);
        loads.add(&tree, cut.bytes as f64);
        trees.push(tree);
    }
    let mut best = (loads.busiest(), trees.clone());
    for _ in 0..ROUNDS {
        if best.0 <= FULL {
            break;
        }
        for (cut, tree) in cuts.iter().zip(&mut trees) {
            loads.add(tree, -(cut.bytes as f64));
            *tree = choose(&mut loads, cut, shapes);
            loads.add(tree, cut.bytes as f64);
        }
        if loads.busiest() < best.0 {
            best = (loads.busiest(), trees.clone());
        }
    }
    best.1
}

fn choose(loads: &mut Loads, cut: &Cut, shapes: (Shape, Shape)) -> Tree {
    let mut best: Option<(f64, Tree)> = None;
    for (root_host, hub) in candidates(loads, cut, shapes.0) {
        let mut tree = Builder { loads, cut, shapes, root_host, hub }.tree();
        tree.settle(cut.num_parts());
        let price = loads.price(&tree, cut.bytes);
        if best.as_ref().is_none_or(|b| price < b.0 * (1.0 - 1e-9)) {
            best = Some((price, tree));
        }
    }
    best.expect("a sum has receivers").1
}

/// Hosts that may be the root: a few of those that add and receive, of those that do one of the two, and of the others.
/// With stars also those where another host adds up for the root, one that would have nothing to take in.
fn candidates(loads: &Loads, cut: &Cut, up: Shape) -> Vec<(HostId, Option<HostId>)> {
    let num_hosts = loads.links.topology.num_hosts();
    let mut kinds: [Vec<(f64, usize, HostId)>; 4] = Default::default();
    for h in 0..num_hosts {
        let host = HostId::at(h);
        let adds = cut.cover.binary_search_by_key(&host, |c| c.0).is_ok();
        let kind = match (adds, cut.receivers.contains_key(&host)) {
            (true, true) => 0,
            (true, false) => 1,
            (false, true) => 2,
            (false, false) => 3,
        };
        let (into, out) = loads.host(host);
        kinds[kind].push((into.max(out), (h + num_hosts - cut.turn % num_hosts) % num_hosts, host));
    }
    let mut found = vec![];
    for kind in &mut kinds {
        kind.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        found.extend(kind.iter().take(TRIED).map(|c| (c.2, None)));
    }
    if up == Shape::Star && cut.cover.len() > 2 {
        let hub = kinds[3].first().map(|c| c.2);
        found.extend(kinds[0].iter().take(TRIED).filter_map(|c| hub.map(|hub| (c.2, Some(hub)))));
    }
    found
}

struct Builder<'a, 'b> {
    loads: &'a Loads<'b>,
    cut: &'a Cut<'a>,
    shapes: (Shape, Shape),
    root_host: HostId,
    /// Who adds up for the root what comes from other groups.
    hub: Option<HostId>,
}

/// A host on the way, with the parts it adds.
type Stop<'a> = (HostId, Vec<&'a [Rank]>);

impl Builder<'_, '_> {
    fn tree(&self) -> Tree {
        let root = self.root_rank();
        let mut tree = Tree::new(root);
        let hub =
            self.hub.and_then(|hub| least(self.loads.ranks(hub), |r| self.loads.nic_in(r, self.bytes())));
        for stops in self.ways_up() {
            let is_own = self.group(stops[0].0) == self.group(self.root_host);
            let mut path = vec![];
            for (host, parts) in stops {
                self.through(*host, parts, &mut path, &mut tree);
            }
            let to = hub.filter(|_| !is_own).unwrap_or(root);
            tree.push_way(path, to, false);
        }
        if let Some(hub) = hub.filter(|&hub| tree.up.iter().any(|way| way.to == hub)) {
            tree.relays.push(hub);
            tree.push_path(vec![hub]);
        }
        self.spread(&mut tree);
        tree
    }

    fn bytes(&self) -> u64 {
        self.cut.bytes
    }

    /// The root's device: the one whose port has the most time, and among those one that wants the sum and has a part.
    fn root_rank(&self) -> Rank {
        let wants = |r: Rank| self.cut.receivers.get(&self.root_host).is_some_and(|ranks| ranks.contains(&r));
        let own = self.cut.cover.iter().find(|(host, _)| *host == self.root_host);
        let has = |r: Rank| own.is_some_and(|(_, parts)| parts.iter().any(|ranks| ranks.contains(&r)));
        let num_groups = |hosts: &mut dyn Iterator<Item = HostId>| {
            let mut groups: Vec<(u32, u32)> = hosts.map(|h| self.group(h)).collect();
            groups.sort_unstable();
            groups.dedup();
            groups.len() as u64
        };
        let copies = |shape, hosts: &mut dyn Iterator<Item = HostId>| match shape {
            Shape::Path => 1,
            Shape::Star => num_groups(&mut hosts.filter(|h| *h != self.root_host)),
        };
        let into = self.bytes() * copies(self.shapes.0, &mut self.cut.cover.iter().map(|c| c.0));
        let out = self.bytes() * copies(self.shapes.1, &mut self.cut.receivers.keys().copied());
        let cost = |r: Rank| self.loads.nic_in(r, into).max(self.loads.nic_out(r, out));
        let ranks: Vec<Rank> = self.loads.ranks(self.root_host).collect();
        let place = |r: Rank| (r.0 as usize + ranks.len() * 64 - self.cut.turn % ranks.len()) % ranks.len();
        let worth = |r: Rank| usize::from(wants(r)) + usize::from(has(r));
        let key = |r: Rank| {
            let full = cost(r).max(FULL);
            (full, std::cmp::Reverse(worth(r)), cost(r), place(r))
        };
        let better = |a: &Rank, b: &Rank| {
            let (a, b) = (key(*a), key(*b));
            let roughly = |x: f64| (x * 1e6).round();
            roughly(a.0)
                .total_cmp(&roughly(b.0))
                .then(a.1.cmp(&b.1))
                .then(roughly(a.2).total_cmp(&roughly(b.2)))
                .then(a.3.cmp(&b.3))
        };
        ranks.iter().copied().min_by(better).expect("a host has devices")
    }

    /// The outermost group of a host; hosts in none are groups of their own.
    fn group(&self, host: HostId) -> (u32, u32) {
        let topology = self.loads.links.topology;
        match topology.num_tiers().checked_sub(1) {
            Some(tier) => topology.group(tier, host).map_or((1, host.0), |g| (0, g)),
            None => (1, host.0),
        }
    }

    /// The groups of a host from the outermost tier to the innermost, and the host.
    fn address(&self, host: HostId) -> Vec<(u32, u32)> {
        let topology = self.loads.links.topology;
        let tiers = (0..topology.num_tiers()).rev();
        let group = |tier| topology.group(tier, host).map_or((1, host.0), |g| (0, g));
        tiers.map(group).chain([(1, host.0)]).collect()
    }

    /// An order of hosts in which those of a group follow each other, `first` at the beginning and `last` at the end.
    fn in_order<T>(
        &self,
        mut stops: Vec<T>,
        of: impl Fn(&T) -> HostId,
        first: HostId,
        last: HostId,
    ) -> Vec<T> {
        let (first, last) = (self.address(first), self.address(last));
        stops.sort_by_cached_key(|stop| {
            let address = self.address(of(stop));
            let levels = address.iter().zip(first.iter().zip(&last));
            // Around the ring, from behind the last to it.
            levels.map(|(g, (first, last))| (g == last, g != first, g < last, *g)).collect::<Vec<(
                bool,
                bool,
                bool,
                (u32, u32),
            )>>()
        });
        stops
    }

    /// The hosts that add, path by path: all of them, or with a star those of a group.
    fn ways_up(&self) -> Vec<Vec<&Stop<'_>>> {
        let busiest_in = |stops: &[&Stop]| {
            let load = |s: &&&Stop| self.loads.around(s.0).0;
            let others = stops.iter().filter(|s| s.0 != self.root_host);
            others.max_by(|a, b| load(a).total_cmp(&load(b)).then(b.0.cmp(&a.0))).map(|s| s.0)
        };
        let all: Vec<&Stop> = self.cut.cover.iter().collect();
        if self.shapes.0 == Shape::Path {
            let first = busiest_in(&all).unwrap_or(self.root_host);
            return vec![self.in_order(all, |s| s.0, first, self.root_host)];
        }
        // The root's own group comes last here, and second in the end: by then it has added up.
        let ring = self.in_order(all, |s| s.0, self.root_host, self.root_host);
        let groups = ring.chunk_by(|a, b| self.group(a.0) == self.group(b.0));
        let ways = groups.map(|stops| {
            let first = busiest_in(stops).unwrap_or(self.root_host);
            self.in_order(stops.to_vec(), |s| s.0, first, self.root_host)
        });
        let mut ways: Vec<Vec<&Stop>> = ways.collect();
        // What is added up over NICs is under way as early as others; inside a host it is there at once.
        let is_own = ways.last().is_some_and(|way| self.group(way[0].0) == self.group(self.root_host));
        if is_own && self.loads.links.topology.num_tiers() > 0 {
            ways.rotate_right(1);
        }
        ways
    }

    /// Takes a box through the devices of a host that add, in by one port and out by another.
    fn through(&self, host: HostId, parts: &[&[Rank]], path: &mut Vec<Rank>, tree: &mut Tree) {
        let root = tree.root;
        let is_last = host == self.root_host;
        let enters = !path.is_empty();
        let rest = parts.iter().filter(|ranks| !ranks.contains(&root));
        let mut ranks: Vec<Rank> = rest.map(|ranks| self.one_of(ranks, enters, !is_last)).collect();
        if ranks.is_empty() {
            return;
        }
        let start = self.cut.turn % ranks.len();
        ranks.rotate_left(start);
        let mut joining = vec![];
        if self.shapes.0 == Shape::Path {
            let sides = self.split_off_sides(host, &mut ranks, enters);
            if ranks.is_empty() {
                return tree.push_way(sides, root, enters);
            }
            joining = sides;
        }
        // Who adds from the side passes nothing else on: it would add nothing.
        let mut taken = joining.clone();
        taken.push(root);
        let exit = (!is_last).then(|| self.exit(host, &ranks, &taken));
        if let Some(at) = exit.and_then(|exit| ranks.iter().position(|&r| r == exit)) {
            let exit = ranks.remove(at);
            ranks.push(exit);
        }
        taken.extend(exit);
        let entry = enters.then(|| self.entry(host, &ranks, &taken));
        if let Some(at) = entry.and_then(|entry| ranks.iter().position(|&r| r == entry)) {
            let entry = ranks.remove(at);
            ranks.insert(0, entry);
        }
        tree.push_way(joining, ranks[0], true);
        let relay_in = entry.filter(|r| !ranks.contains(r));
        let relay_out = exit.filter(|r| !ranks.contains(r));
        tree.relays.extend(relay_in.into_iter().chain(relay_out));
        path.extend(relay_in.into_iter().chain(ranks).chain(relay_out));
    }

    /// Who waits for the sum as well as adding to it stays off the path: what it passed on would be in the way of what it
    /// gets, until all of it has left. Its part joins the path at the host's first device; at the root's host all parts do
    /// so at the root. Where everybody waits for the sum, one of them is on the path.
    fn split_off_sides(&self, host: HostId, ranks: &mut Vec<Rank>, enters: bool) -> Vec<Rank> {
        if host == self.root_host {
            return std::mem::take(ranks);
        }
        let Some(receivers) = self.cut.receivers.get(&host) else { return vec![] };
        let (mut sides, mut path): (Vec<Rank>, Vec<Rank>) =
            ranks.iter().partition(|r| receivers.binary_search(r).is_ok());
        if path.is_empty() {
            let one = self.one_of(&sides, enters, true);
            sides.retain(|&r| r != one);
            path.push(one);
        }
        *ranks = path;
        sides
    }

    /// The holder of a part whose ports have the most time.
    fn one_of(&self, ranks: &[Rank], enters: bool, leaves: bool) -> Rank {
        let cost = |r: Rank| {
            let into = if enters { self.loads.nic_in(r, self.bytes()) } else { 0.0 };
            let out = if leaves { self.loads.nic_out(r, self.bytes()) } else { 0.0 };
            into.max(out)
        };
        let start = self.cut.turn % ranks.len();
        let turns = ranks[start..].iter().chain(&ranks[..start]).copied();
        least(turns, cost).expect("a part has a holder")
    }

    /// The device that a host's sum leaves from: one that adds while its port has time, else any that is not `taken`.
    fn exit(&self, host: HostId, ranks: &[Rank], taken: &[Rank]) -> Rank {
        let own = least(ranks.iter().copied(), |r| self.loads.nic_out(r, self.bytes()));
        let own = own.expect("a host on the way adds");
        let relay = |r: Rank| {
            let local = self.loads.local_in(r, self.bytes()).max(self.loads.local_out(own, self.bytes()));
            self.loads.nic_out(r, self.bytes()).max(local)
        };
        let others = self.loads.ranks(host).filter(|r| !taken.contains(r) && !ranks.contains(r));
        self.own_or(own, self.loads.nic_out(own, self.bytes()), least(others, relay), relay)
    }

    /// The device that a box enters a host at, none of those `taken`.
    fn entry(&self, host: HostId, ranks: &[Rank], taken: &[Rank]) -> Rank {
        let into = |r: Rank| self.loads.nic_in(r, self.bytes());
        // With a single device that adds, it is entered and left.
        let free: Vec<Rank> = match ranks {
            [only] => vec![*only],
            _ => ranks.iter().copied().filter(|r| !taken.contains(r)).collect(),
        };
        let own = least(free.into_iter(), into).expect("a host on the way adds");
        let relay = |r: Rank| {
            let local = self.loads.local_out(r, self.bytes()).max(self.loads.local_in(own, self.bytes()));
            into(r).max(local)
        };
        let others = self.loads.ranks(host).filter(|r| !taken.contains(r) && !ranks.contains(r));
        self.own_or(own, into(own), least(others, relay), relay)
    }

    /// A relay only where it is worth it.
    fn own_or(&self, own: Rank, cost: f64, relay: Option<Rank>, of: impl Fn(Rank) -> f64) -> Rank {
        match relay {
            Some(relay) if cost > FULL && of(relay) < cost * (1.0 - 1e-3) => relay,
            _ => own,
        }
    }

    /// From the root to everybody who wants the sum.
    fn spread(&self, tree: &mut Tree) {
        let mut has = vec![tree.root];
        if let Some(ranks) = self.cut.receivers.get(&self.root_host) {
            self.spread_inside(ranks, tree.root, tree, &mut has);
        }
        let away: Vec<HostId> = self.cut.receivers.keys().copied().filter(|h| *h != self.root_host).collect();
        let busiest_out = |hosts: &[HostId]| {
            let load = |h: &HostId| self.loads.around(*h).1;
            hosts.iter().copied().max_by(|a, b| load(a).total_cmp(&load(b)).then(b.cmp(a)))
        };
        let Some(last) = busiest_out(&away) else { return };
        let hosts = self.in_order(away, |h| *h, self.root_host, last);
        let mut ways: Vec<&[HostId]> = vec![&hosts];
        if self.shapes.1 == Shape::Star {
            ways = hosts.chunk_by(|a, b| self.group(*a) == self.group(*b)).collect();
        }
        for way in ways {
            let mut from = has.clone();
            let mut from_host = self.root_host;
            for &host in way {
                let sender = self.sender(from_host, &from, tree);
                let ranks = &self.cut.receivers[&host];
                let entry = self.landing(host, ranks, tree);
                tree.down.push((sender, entry));
                from = vec![entry];
                self.spread_inside(ranks, entry, tree, &mut from);
                from_host = host;
            }
        }
    }

    /// Along the devices of a host that want it, from one that has it.
    fn spread_inside(&self, ranks: &[Rank], from: Rank, tree: &mut Tree, has: &mut Vec<Rank>) {
        let mut others: Vec<Rank> = ranks.iter().copied().filter(|&r| r != from).collect();
        let start = self.cut.turn % others.len().max(1);
        others.rotate_left(start);
        others.sort_by_key(|&r| tree.is_on_path(r));
        let mut from = from;
        for to in others {
            tree.down.push((from, to));
            has.push(to);
            from = to;
        }
    }

    /// The device that sends it to the next host, of those that have it; or a relay.
    fn sender(&self, host: HostId, has: &[Rank], tree: &mut Tree) -> Rank {
        let cost = |r: Rank| self.loads.nic_out(r, self.bytes() * (1 + self.crossing(tree, r)));
        let own = least(has.iter().copied(), cost).expect("somebody has it");
        let giver = least(has.iter().copied(), |r| self.loads.local_out(r, self.bytes())).unwrap_or(own);
        let relay = |r: Rank| {
            let local = self.loads.local_in(r, self.bytes()).max(self.loads.local_out(giver, self.bytes()));
            cost(r).max(local)
        };
        // Who was on the way up may be one too, but the order that takes is not worth it.
        let up: Vec<Rank> = tree.up.iter().flat_map(|way| way.ranks.iter().copied()).collect();
        let others = self.loads.ranks(host).filter(|r| !has.contains(r) && !up.contains(r));
        let best = self.own_or(own, cost(own), least(others, relay), relay);
        if best != own && !tree.down.iter().any(|e| e.1 == best) {
            tree.down.push((giver, best));
        }
        best
    }

    /// How many copies a rank sends to other hosts so far.
    fn crossing(&self, tree: &Tree, rank: Rank) -> u64 {
        let topology = self.loads.links.topology;
        tree.down.iter().filter(|e| e.0 == rank && !topology.same_host(e.0, e.1)).count() as u64
    }

    /// The device at which it enters a host that wants it.
    fn landing(&self, host: HostId, ranks: &[Rank], tree: &Tree) -> Rank {
        let start = self.cut.turn % ranks.len();
        let turns = || ranks[start..].iter().chain(&ranks[..start]).copied();
        let into = |r: Rank| self.loads.nic_in(r, self.bytes());
        let own = least(turns().filter(|&r| !tree.is_on_path(r)), into).or_else(|| least(turns(), into));
        let own = own.expect("a host that receives has receivers");
        let relay = |r: Rank| {
            let local = self.loads.local_out(r, self.bytes()).max(self.loads.local_in(own, self.bytes()));
            into(r).max(local)
        };
        let adds = |r: &Rank| {
            self.cut.cover.iter().any(|(h, parts)| *h == host && parts.iter().any(|p| p.contains(r)))
        };
        let others = self.loads.ranks(host).filter(|r| !ranks.contains(r) && !adds(r));
        self.own_or(own, into(own), least(others, relay), relay)
    }
}

/// The first of the cheapest, give or take a millionth.
fn least(ranks: impl Iterator<Item = Rank>, cost: impl Fn(Rank) -> f64) -> Option<Rank> {
    let costs = ranks.map(|r| (cost(r), r));
    costs.reduce(|a, b| if b.0 < a.0 * (1.0 - 1e-6) { b } else { a }).map(|c| c.1)
}
