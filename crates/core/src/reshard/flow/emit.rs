//! From routes to transfers: boxes for bytes, devices for hosts.
//!
//! A class is a row of bytes. Routes cut it one way, stretches of items with the same holders and wanters another, the
//! choice of ports a third; between two cuts everything is settled, and each box there becomes a tree of transfers:
//!
//! ```text
//! routes     |      h0 -> h2 -> h3      |   h1 -> h2 -> h3   |
//! stretches  |  r0 -> r8 r9 | r1 -> r10 |                    |
//! cells      |      0       |     1     |         2          |
//! ```
//!
//! Inside a host the box passes from the device it entered at through all others that want it.
//!
//! Where neighbours of a holder relay, those that want the box themselves do so too: they get it for both ends, and pass
//! it on inside their host as well as out of it.
//!
//! Where boxes are forwarded, a chain fills the faster the fewer streams share a link. So what one device sends along
//! one route is one lane: its boxes follow each other, and weigh as much as all of them together. Large boxes of all
//! devices behind a NIC share a lane.

use std::borrow::Cow;

use rustc_hash::FxHashMap;

use crate::cluster::Topology;
use crate::id::{HostId, PortId, Rank, RegionId, TransferId};

use super::super::demand::{Class, Demands, RankSet};
use super::super::plan::Plan;
use super::super::problem::Problem;
use super::boxes;
use super::packing::Shares;
use super::trees::{Commodity, Tree};
use super::ports::{Crossing, Part, PortTable, Way, ports_beside};
use super::routes::Route;

/// Items of a class with the same holders and the same wanters, side by side.
#[derive(Debug, Clone)]
struct Stretch {
    start: u64,
    end: u64,
    items: std::ops::Range<usize>,
    holders: RankSet,
    wanters: RankSet,
}

/// Where in the list of arrivals those of a host begin.
#[derive(Clone, Copy)]
struct Has {
    /// Void for any other box than the one under way.
    box_number: u32,
    first: usize,
}

pub(super) struct Emitter<'a> {
    pub(super) problem: &'a Problem,
    pub(super) demands: &'a Demands,
    pub(super) plan: Plan,
    stretches: Vec<Vec<Stretch>>,
    ports: PortTable,
    /// Whether any host has a choice of ports.
    many_ports: bool,
    /// Whether what crosses between hosts is also brought to who wants it on the holders' own.
    serves_home: bool,
    /// Counts boxes, so that devices that can stand in for each other take turns.
    turn: usize,
    lanes: Lanes,
    /// Who has received the box under way, host after host, and since which transfer.
    arrivals: Vec<(Rank, TransferId)>,
    /// By host.
    has: Vec<Has>,
    box_number: u32,
}

/// Devices of a host take turns in a lane with boxes from this size on: well above what telling the next one costs.
const MIN_HANDED_OVER: u64 = 1 << 20;

/// Lanes of forwarded boxes.
#[derive(Default)]
struct Lanes {
    /// By route, source (a device or the first of its host), and the node it sends to.
    numbers: FxHashMap<(RouteId, Rank, u32), usize>,
    lanes: Vec<Lane>,
}

/// Between hosts with forwarding (0) or without (5), inside one (1), of a sum (2), on a holder's host to a relay (3) or
/// to stay (4); its class or path; its place in the class, or the host.
pub(super) type RouteId = (u8, u32, u32);

struct Lane {
    bytes: u64,
    last: Option<TransferId>,
}

impl Lanes {
    fn number(&mut self, route: RouteId, src: Rank, to: u32) -> usize {
        *self.numbers.entry((route, src, to)).or_insert_with(|| {
            self.lanes.push(Lane { bytes: 0, last: None });
            self.lanes.len() - 1
        })
    }
}

impl<'a> Emitter<'a> {
    pub(super) fn new(problem: &'a Problem, demands: &'a Demands, plan: Plan) -> Self {
        let many_ports = problem.topology.ports.len() > problem.topology.num_hosts();
        let stretches = demands.remote.iter().map(|class| stretches(class, demands)).collect();
        Self {
            problem,
            demands,
            plan,
            stretches,
            ports: PortTable::default(),
            many_ports,
            serves_home: false,
            turn: 0,
            lanes: Lanes::default(),
            arrivals: vec![],
            has: vec![Has { box_number: 0, first: 0 }; problem.topology.num_hosts()],
            box_number: 0,
        }
    }

    /// The plan, with every transfer weighed: a forwarded one as its lane, any other as its channel, so that all that
    /// share a link end together.
    pub(super) fn into_plan(mut self) -> Plan {
        let first_lane = self.first_lane();
        let weights = channel_bytes(&self.plan, first_lane);
        for (id, channel_bytes) in weights.into_iter().enumerate() {
            let t = self.plan.transfer_mut(TransferId::at(id));
            let weight = match t.lane.checked_sub(first_lane) {
                Some(lane) => self.lanes.lanes[lane as usize].bytes,
                None => channel_bytes,
            };
            t.weight = weight.max(1);
        }
        self.plan
    }

    /// Lanes below this are those of ranks.
    fn first_lane(&self) -> u32 {
        self.problem.topology.num_ranks() as u32
    }

    /// Adds a transfer from a device that holds the box. Where it is forwarded, it joins its lane, and where that may
    /// go on to another device, behind the lane's last.
    fn add_root(
        &mut self,
        tensor: u32,
        ends: (Rank, Rank),
        region: RegionId,
        lane: Option<(RouteId, u32)>,
    ) -> TransferId {
        let (src, dst) = ends;
        let Some((route, to)) = lane else { return self.plan.add(tensor, src, dst, region, &[]) };
        let number = self.lanes.number(route, self.lane_source(src, region, tensor), to);
        let last = self.lanes.lanes[number].last.filter(|_| !self.many_ports);
        // Between the same two devices the channel keeps the order by itself.
        let last = last.filter(|l| {
            let last = &self.plan.transfers()[l.index()];
            (last.src, last.dst) != ends
        });
        let id = self.plan.add(tensor, src, dst, region, last.as_slice());
        self.join_lane(id, number);
        id
    }

    /// Who stands for a lane's source: the device itself, or its host for boxes that are worth a message between its
    /// devices.
    fn lane_source(&self, src: Rank, region: RegionId, tensor: u32) -> Rank {
        let topology = &self.problem.topology;
        let width = self.problem.reshards[tensor as usize].src.layout.dtype().bytes();
        match self.many_ports || self.plan.regions()[region.index()].volume() * width < MIN_HANDED_OVER {
            true => src,
            false => topology.ranks_of(topology.host(src)).next().expect("a host of a rank has ranks"),
        }
    }

    /// Adds the first transfer of a path that has a lane of its own.
    pub(super) fn add_first(
        &mut self,
        tensor: u32,
        (src, dst): (Rank, Rank),
        region: RegionId,
        after: &[TransferId],
        route: RouteId,
    ) -> TransferId {
        let number = self.lanes.number(route, src, dst.0);
        let id = self.plan.add(tensor, src, dst, region, after);
        self.join_lane(id, number);
        id
    }

    fn join_lane(&mut self, id: TransferId, number: usize) {
        let first_lane = self.first_lane();
        let added = self.plan.transfer_mut(id);
        added.lane = first_lane + number as u32;
        self.lanes.lanes[number].bytes += added.bytes;
        self.lanes.lanes[number].last = Some(id);
    }

    /// What every host has been given to send so far.
    pub(super) fn bytes_out(&self) -> Vec<u64> {
        let topology = &self.problem.topology;
        let mut bytes = vec![0; topology.num_hosts()];
        for t in self.plan.transfers().iter().filter(|t| self.plan.crosses_hosts(t)) {
            bytes[topology.host(t.src).index()] += t.bytes;
        }
        bytes
    }

    /// Chooses ports for everything that crosses between hosts. Returns the seconds the busiest port needs, and the
    /// bytes that take a detour over another device.
    pub(super) fn choose_ports(&mut self, routes: &[Vec<Route>], relay: bool) -> (f64, u64) {
        self.ports = PortTable::default();
        self.serves_home = relay && self.many_ports;
        if !self.many_ports {
            return (0.0, 0);
        }
        let topology = &self.problem.topology;
        let mut crossings: Vec<[Vec<Crossing>; 2]> = vec![Default::default(); topology.num_hosts()];
        for (c, class) in self.demands.remote.iter().enumerate() {
            for (s, stretch) in self.stretches[c].iter().enumerate() {
                let key = (c as u32, s as u32);
                for &host in &class.receivers {
                    let ports = self.ports_of_set(stretch.wanters, HostId(host));
                    let parts = vec![Part { start: 0, end: stretch.end - stretch.start, copies: 1 }];
                    let relays = if relay { topology.ports_of(HostId(host)).collect() } else { vec![] };
                    let forwarded = Crossing {
                        key,
                        parts: parts_sent(&routes[c], stretch, host),
                        ports: ports.clone(),
                        relays: vec![],
                    };
                    crossings[host as usize][0].push(Crossing { key, parts, ports, relays });
                    if !forwarded.parts.is_empty() {
                        crossings[host as usize][1].push(forwarded);
                    }
                }
                for &host in &class.holders {
                    let ports = self.ports_of_set(stretch.holders, HostId(host));
                    let parts = parts_sent(&routes[c], stretch, host);
                    let relays = self.relays(stretch, HostId(host)).filter(|_| relay);
                    let mut relays: Vec<PortId> = relays.map(|r| topology.port(r)).collect();
                    relays.sort_unstable();
                    relays.dedup();
                    if !parts.is_empty() {
                        crossings[host as usize][1].push(Crossing { key, parts, ports, relays });
                    }
                }
            }
        }
        for (host, [into, out_of]) in crossings.iter().enumerate() {
            self.ports.fill(topology, HostId::at(host), Way::In, into);
            self.ports.fill(topology, HostId::at(host), Way::Out, out_of);
        }
        (self.ports.seconds, self.ports.relayed_bytes)
    }

    /// Devices of a holder's host that may relay: first those that want the stretch themselves, and get it anyway.
    fn relays(&self, stretch: &Stretch, host: HostId) -> impl Iterator<Item = Rank> + '_ {
        let wanters = on_host(self.demands.set(stretch.wanters), host, &self.problem.topology);
        let others = self.problem.topology.ranks_of(host);
        wanters.iter().copied().chain(others.filter(|r| wanters.binary_search(r).is_err()))
    }

    fn ports_of_set(&self, set: RankSet, host: HostId) -> Vec<PortId> {
        ports_beside(on_host(self.demands.set(set), host, &self.problem.topology), &self.problem.topology)
    }

    /// Emits everything that crosses between hosts.
    pub(super) fn remote(&mut self, routes: &[Vec<Route>]) {
        for (c, routes) in routes.iter().enumerate() {
            for s in 0..self.stretches[c].len() {
                self.stretch(c as u32, s as u32, routes);
            }
        }
    }

    fn stretch(&mut self, c: u32, s: u32, routes: &[Route]) {
        let demands = self.demands;
        let class = &demands.remote[c as usize];
        let stretch = self.stretches[c as usize][s as usize].clone();
        let port_cuts = self.port_cuts(class, (c, s), &stretch);
        let mut row = Row::new(&class.items[stretch.items.clone()], stretch.start);
        let first = routes.partition_point(|r| r.end <= stretch.start);
        for (r, route) in routes.iter().enumerate().skip(first).take_while(|(_, r)| r.start < stretch.end) {
            let (start, end) = (route.start.max(stretch.start), route.end.min(stretch.end));
            let first_cut = port_cuts.partition_point(|&cut| cut <= start);
            let inner = port_cuts[first_cut..].iter().copied().take_while(|&cut| cut < end);
            let mut at = start;
            for cut in inner.chain([end]) {
                let forwards = route.edges.iter().any(|e| e.depth > 0);
                let lane = forwards.then_some((0, c, r as u32));
                let cell = Cell { key: (c, s), at: at - stretch.start, stretch: &stretch, lane };
                row.for_each(demands, at, cut, |index, region| {
                    let tensor = demands.items[index as usize].tensor;
                    let region = self.plan.add_region(region);
                    self.tree(&cell, route, tensor, region);
                    self.turn += 1;
                });
                at = cut;
            }
        }
    }

    /// Where in the class the port of some host changes.
    fn port_cuts(&self, class: &Class, key: (u32, u32), stretch: &Stretch) -> Vec<u64> {
        if !self.many_ports {
            return vec![];
        }
        let mut cuts = vec![];
        for &host in class.receivers.iter().chain(&class.holders) {
            for way in [Way::In, Way::Out] {
                let turns = self.ports.turns(key, HostId(host), way).unwrap_or(&[]);
                cuts.extend(turns.iter().map(|(_, end)| stretch.start + end));
            }
        }
        cuts.sort_unstable();
        cuts.dedup();
        cuts
    }

    /// The port that a cell crosses at a host.
    fn port_at(&self, cell: &Cell, host: u32, way: Way) -> Option<PortId> {
        if !self.many_ports {
            return None;
        }
        let turns = self.ports.turns(cell.key, HostId(host), way)?;
        turns.iter().find(|(_, end)| cell.at < *end).or(turns.last()).map(|(port, _)| *port)
    }

    /// One box along its route.
    fn tree(&mut self, cell: &Cell, route: &Route, tensor: u32, region: RegionId) {
        self.box_number += 1;
        self.arrivals.clear();
        for edge in &route.edges {
            let (src, since) = match self.has[edge.from as usize] {
                h if h.box_number == self.box_number => self.pass_on(cell, edge.from),
                _ => self.leave_holder(cell, edge.from, tensor, region),
            };
            let entry = self.entry(cell, edge.to);
            let arrived = match since {
                Some(_) => self.plan.add(tensor, src, entry, region, since.as_slice()),
                None => self.add_root(tensor, (src, entry), region, self.lane_to(cell, edge.to, entry)),
            };
            self.has[edge.to as usize] = Has { box_number: self.box_number, first: self.arrivals.len() };
            self.arrivals.push((entry, arrived));
            self.spread_inside(cell, edge.to, entry, arrived, tensor, region);
        }
        if self.serves_home {
            let demands = self.demands;
            for &host in &demands.remote[cell.key.0 as usize].holders {
                self.serve_home(cell, host, tensor, region);
            }
        }
    }

    /// Brings a box to those on a holder's host that want it: from the device that relays it, or from a holder.
    fn serve_home(&mut self, cell: &Cell, host: u32, tensor: u32, region: RegionId) {
        let (demands, topology) = (self.demands, &self.problem.topology);
        let wanters = on_host(demands.set(cell.stretch.wanters), HostId(host), topology);
        let holders = on_host(demands.set(cell.stretch.holders), HostId(host), topology);
        let (mut from, mut since) = match self.has[host as usize] {
            h if h.box_number == self.box_number => {
                let (relay, since) = self.arrivals[h.first];
                (relay, Some(since))
            }
            _ => (holders[self.turn % holders.len()], None),
        };
        let relay = from;
        let first = match since {
            Some(_) => wanters.partition_point(|&r| r <= relay),
            None => self.turn % wanters.len().max(1),
        };
        for &to in wanters[first..].iter().chain(&wanters[..first]).filter(|&&r| r != relay) {
            since = Some(match since {
                Some(_) => self.plan.add(tensor, from, to, region, since.as_slice()),
                None => self.add_first(tensor, (from, to), region, &[], (4, cell.key.0, host)),
            });
            from = to;
        }
    }

    /// The lane of a box that leaves a holder. With several ports, boxes for one host enter it at different devices, and
    /// inside it each goes at its own pace.
    fn lane_to(&self, cell: &Cell, host: u32, entry: Rank) -> Option<(RouteId, u32)> {
        match self.many_ports {
            false => cell.lane.map(|route| (route, host)),
            true => Some((cell.lane.unwrap_or((5, 0, 0)), entry.0)),
        }
    }

    /// The device of a holder's host that sends, with the transfer that brought it the box if it does not hold it.
    fn leave_holder(
        &mut self,
        cell: &Cell,
        host: u32,
        tensor: u32,
        region: RegionId,
    ) -> (Rank, Option<TransferId>) {
        let topology = &self.problem.topology;
        let holders = on_host(self.demands.set(cell.stretch.holders), HostId(host), topology);
        let port = self.port_at(cell, host, Way::Out);
        let beside = |rank: &&Rank| port.is_none_or(|p| topology.port(**rank) == p);
        let count = holders.iter().filter(beside).count();
        if count > 0 {
            let turn = self.turn % count;
            return (*holders.iter().filter(beside).nth(turn).expect("turn is below the count"), None);
        }
        let port = port.expect("without a port to keep to, every holder will do");
        let relay = self.relays(cell.stretch, HostId(host)).find(|&r| topology.port(r) == port);
        let relay = relay.expect("only ports with a device that may relay were offered");
        let holder = holders[self.turn % holders.len()];
        // A relay that keeps it, too, has more streams than one to pass on; each at its own pace.
        let since = match self.demands.set(cell.stretch.wanters).binary_search(&relay) {
            Ok(_) => self.add_first(tensor, (holder, relay), region, &[], (3, cell.key.0, host)),
            Err(_) => self.plan.add(tensor, holder, relay, region, &[]),
        };
        self.has[host as usize] = Has { box_number: self.box_number, first: self.arrivals.len() };
        self.arrivals.push((relay, since));
        (relay, Some(since))
    }

    /// The device of a host that received the box which passes it on: the one beside the right port, if it has it.
    fn pass_on(&self, cell: &Cell, host: u32) -> (Rank, Option<TransferId>) {
        let topology = &self.problem.topology;
        let arrivals = &self.arrivals[self.has[host as usize].first..];
        let mut on_host = arrivals.iter().take_while(|(r, _)| topology.host(*r) == HostId(host));
        let beside = |port| on_host.find(|(r, _)| topology.port(*r) == port);
        let &(rank, since) = self.port_at(cell, host, Way::Out).and_then(beside).unwrap_or(&arrivals[0]);
        (rank, Some(since))
    }

    /// The device at which a cell's boxes enter a host: one that wants them, if the port has one.
    fn entry(&self, cell: &Cell, host: u32) -> Rank {
        let topology = &self.problem.topology;
        let wanters = on_host(self.demands.set(cell.stretch.wanters), HostId(host), topology);
        match self.port_at(cell, host, Way::In) {
            None => wanters[self.turn % wanters.len()],
            Some(port) => {
                let beside = || wanters.iter().copied().filter(|&r| topology.port(r) == port);
                let any = || topology.ranks_of(HostId(host)).find(|&r| topology.port(r) == port);
                let count = beside().count().max(1);
                beside().nth(self.turn % count).or_else(any).expect("a port has devices")
            }
        }
    }

    /// From the device it entered at, through all others of the host that want it.
    fn spread_inside(
        &mut self,
        cell: &Cell,
        host: u32,
        entry: Rank,
        arrived: TransferId,
        tensor: u32,
        region: RegionId,
    ) {
        let demands = self.demands;
        let wanters = on_host(demands.set(cell.stretch.wanters), HostId(host), &self.problem.topology);
        if wanters.len() == 1 && wanters[0] == entry {
            return;
        }
        let split = wanters.partition_point(|&r| r <= entry);
        let (mut from, mut since) = (entry, arrived);
        for &to in wanters[split..].iter().chain(&wanters[..split]).filter(|&&r| r != entry) {
            since = self.plan.add(tensor, from, to, region, &[since]);
            self.arrivals.push((to, since));
            from = to;
        }
    }

    /// What is left to move inside hosts.
    pub(super) fn local_classes(&self) -> Cow<'a, [Class]> {
        if !self.serves_home {
            return Cow::Borrowed(&self.demands.local);
        }
        let mut crosses = vec![false; self.demands.items.len()];
        for &item in self.demands.remote.iter().flat_map(|class| &class.items) {
            crosses[item as usize] = true;
        }
        let left = |class: &Class| {
            let items: Vec<u32> = class.items.iter().copied().filter(|i| !crosses[*i as usize]).collect();
            let bytes = items.iter().map(|i| self.demands.items[*i as usize].bytes).sum();
            Class { bytes, items, ..class.clone() }
        };
        self.demands.local.iter().map(left).filter(|class| !class.items.is_empty()).collect()
    }

    /// Emits what moves inside hosts only.
    pub(super) fn local(&mut self, classes: &[Class], routes: &[Vec<Route>]) {
        let demands = self.demands;
        for (c, (class, routes)) in classes.iter().zip(routes).enumerate() {
            let mut row = Row::new(&class.items, 0);
            for (r, route) in routes.iter().enumerate() {
                let forwards = route.edges.iter().any(|e| e.depth > 0);
                let lane = forwards.then_some((1, c as u32, r as u32));
                row.for_each(demands, route.start, route.end, |index, region| {
                    let tensor = demands.items[index as usize].tensor;
                    let region = self.plan.add_region(region);
                    let mut has: Vec<(u32, TransferId)> = Vec::with_capacity(route.edges.len());
                    for edge in &route.edges {
                        let since = has.iter().find(|h| h.0 == edge.from).map(|h| h.1);
                        let (src, dst) = (Rank(edge.from), Rank(edge.to));
                        let id = match since {
                            Some(_) => self.plan.add(tensor, src, dst, region, since.as_slice()),
                            None => self.add_root(tensor, (src, dst), region, lane.map(|l| (l, edge.to))),
                        };
                        has.push((edge.to, id));
                    }
                });
            }
        }
    }
}

impl Emitter<'_> {
    /// Emits commodities along their trees.
    pub(super) fn packed(&mut self, commodities: &[Commodity], shares: &[Shares]) {
        let demands = self.demands;
        for (c, (commodity, shares)) in commodities.iter().zip(shares).enumerate() {
            let mut row = Row::new(&commodity.items, 0);
            let mut at = 0;
            for (t, (tree, bytes)) in shares.iter().enumerate() {
                row.for_each(demands, at, at + bytes, |index, region| {
                    let tensor = demands.items[index as usize].tensor;
                    let region = self.plan.add_region(region);
                    self.along(tree, (6, c as u32, t as u32), tensor, region);
                });
                at += bytes;
            }
        }
    }

    fn along(&mut self, tree: &Tree, route: RouteId, tensor: u32, region: RegionId) {
        let mut has: Vec<(Rank, TransferId)> = Vec::with_capacity(tree.edges.len());
        for &(src, dst) in &tree.edges {
            let since = has.iter().find(|h| h.0 == src).map(|h| h.1);
            let forwards = || tree.edges.iter().any(|e| e.0 == dst);
            let id = match since {
                Some(_) => self.plan.add(tensor, src, dst, region, since.as_slice()),
                None if forwards() => self.add_first(tensor, (src, dst), region, &[], route),
                None => self.plan.add(tensor, src, dst, region, &[]),
            };
            has.push((dst, id));
        }
    }
}

/// A stretch of a class between two cuts.
struct Cell<'a> {
    key: (u32, u32),
    /// Where it starts, in its stretch.
    at: u64,
    stretch: &'a Stretch,
    /// The route, if it forwards.
    lane: Option<RouteId>,
}

/// Items as a row of bytes, walked from left to right.
struct Row<'a> {
    items: &'a [u32],
    next: usize,
    /// Where item `next` starts.
    at: u64,
}

impl<'a> Row<'a> {
    fn new(items: &'a [u32], at: u64) -> Self {
        Self { items, next: 0, at }
    }

    /// The boxes between two offsets; offsets do not fall from call to call.
    fn for_each(
        &mut self,
        demands: &Demands,
        start: u64,
        end: u64,
        mut emit: impl FnMut(u32, crate::region::Region),
    ) {
        while let Some(&index) = self.items.get(self.next) {
            let item = &demands.items[index as usize];
            let item_end = self.at + item.bytes;
            if self.at >= end {
                return;
            }
            let (from, to) = (start.saturating_sub(self.at), end.min(item_end) - self.at);
            if let Some(region) = boxes::part(&item.region, item.bytes, from, to) {
                emit(index, region);
            }
            if item_end > end {
                return;
            }
            self.at = item_end;
            self.next += 1;
        }
    }
}

/// For every transfer on a lane below `first_lane`, the bytes of its channel. Source by source: a table of one source's
/// channels stays in the cache, one of all channels of a large plan does not.
fn channel_bytes(plan: &Plan, first_lane: u32) -> Vec<u64> {
    let transfers = plan.transfers();
    let mut start = vec![0u32; plan.problem.topology.num_ranks() + 1];
    transfers.iter().for_each(|t| start[t.src.index() + 1] += 1);
    (1..start.len()).for_each(|r| start[r] += start[r - 1]);
    let (mut next, mut by_source) = (start.clone(), vec![0u32; transfers.len()]);
    for (i, t) in transfers.iter().enumerate() {
        let place = &mut next[t.src.index()];
        by_source[*place as usize] = i as u32;
        *place += 1;
    }
    let mut weights = vec![0; transfers.len()];
    let mut bytes: FxHashMap<(Rank, u32), u64> = FxHashMap::default();
    for source in start.windows(2) {
        let own = &by_source[source[0] as usize..source[1] as usize];
        bytes.clear();
        for t in own.iter().map(|&i| &transfers[i as usize]).filter(|t| t.lane < first_lane) {
            *bytes.entry((t.dst, t.lane)).or_default() += t.bytes;
        }
        for &i in own {
            let t = &transfers[i as usize];
            weights[i as usize] = bytes.get(&(t.dst, t.lane)).copied().unwrap_or(0);
        }
    }
    weights
}

/// What one host sends of a stretch.
fn parts_sent(routes: &[Route], stretch: &Stretch, host: u32) -> Vec<Part> {
    let part = |r: &Route| Part {
        start: r.start.max(stretch.start).saturating_sub(stretch.start),
        end: r.end.min(stretch.end).saturating_sub(stretch.start),
        copies: r.edges.iter().filter(|e| e.from == host).count() as u64,
    };
    routes.iter().map(part).filter(|p| p.start < p.end && p.copies > 0).collect()
}

/// The ranks of a sorted set that are on a host. A host's ranks follow each other.
fn on_host<'a>(set: &'a [Rank], host: HostId, topology: &Topology) -> &'a [Rank] {
    let start = set.partition_point(|&r| topology.host(r) < host);
    let len = set[start..].partition_point(|&r| topology.host(r) == host);
    &set[start..start + len]
}

/// Items next to each other with the same sets. [`Demands::of`] has brought them together.
fn stretches(class: &Class, demands: &Demands) -> Vec<Stretch> {
    let mut stretches: Vec<Stretch> = vec![];
    let mut at = 0;
    for (i, &index) in class.items.iter().enumerate() {
        let item = &demands.items[index as usize];
        let end = at + item.bytes;
        match stretches.last_mut() {
            Some(s) if s.holders == item.holders && s.wanters == item.wanters => {
                (s.end, s.items.end) = (end, i + 1)
            }
            _ => stretches.push(Stretch {
                start: at,
                end,
                items: i..i + 1,
                holders: item.holders,
                wanters: item.wanters,
            }),
        }
        at = end;
    }
    stretches
}
