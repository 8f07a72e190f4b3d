//! What crosses between hosts: boxes along their routes, from port to port.
//!
//! Inside a host the box passes from the device it entered at through all others that want it.
//!
//! Where neighbours of a holder relay, those that want the box themselves do so too: they get it for both ends, and pass
//! it on inside their host as well as out of it.

use crate::id::{HostId, PortId, Rank, RegionId, TransferId};

use super::super::super::demand::Class;
use super::super::ports::Way;
use super::super::routes::Route;
use super::lanes::RouteId;
use super::stretches::{Cell, Row, Stretch, on_host};
use super::{Emitter, Has};

impl Emitter<'_> {
    /// Emits everything that crosses between hosts.
    pub(in super::super) fn remote(&mut self, routes: &[Vec<Route>]) {
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
}
