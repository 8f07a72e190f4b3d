//! Which ports everything that crosses between hosts has a choice of.

use crate::id::{HostId, PortId, Rank};

use super::super::super::demand::RankSet;
use super::super::ports::{Crossing, Part, PortTable, Way, ports_beside};
use super::super::routes::Route;
use super::Emitter;
use super::stretches::{Stretch, on_host};

impl Emitter<'_> {
    /// Chooses ports for everything that crosses between hosts. Returns the seconds the busiest port needs, and the
    /// bytes that take a detour over another device.
    pub(in super::super) fn choose_ports(&mut self, routes: &[Vec<Route>], relay: bool) -> (f64, u64) {
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
    pub(super) fn relays(&self, stretch: &Stretch, host: HostId) -> impl Iterator<Item = Rank> + '_ {
        let wanters = on_host(self.demands.set(stretch.wanters), host, &self.problem.topology);
        let others = self.problem.topology.ranks_of(host);
        wanters.iter().copied().chain(others.filter(|r| wanters.binary_search(r).is_err()))
    }

    fn ports_of_set(&self, set: RankSet, host: HostId) -> Vec<PortId> {
        ports_beside(on_host(self.demands.set(set), host, &self.problem.topology), &self.problem.topology)
    }
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
