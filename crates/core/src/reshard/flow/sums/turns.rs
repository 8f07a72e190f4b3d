//! How many boxes a piece is cut into, so that everybody who can gets a turn.

use crate::id::{HostId, Rank};

use super::super::super::demand::SumClass;
use super::super::emit::Emitter;
use super::Balanced;
use super::holders::{Holders, OnHost, by_host, nics};
use super::tree::Shape;

/// The most turns that ports and roots take within one piece.
const MAX_TURNS: u64 = 1024;
/// The most boxes for the sake of ports of different width.
const MAX_PORT_TURNS: u64 = 48;
/// With fewer boxes loads cannot be made even.
const MIN_BALANCED: u64 = 12;
/// The most transfers of trees by load, of the classes of one source together.
const MAX_BALANCED: u64 = 3_500;
/// The same where fewer boxes could not be shared out evenly over ports: five boxes over four of them take twice as long as four.
const MAX_EVEN: u64 = 10_000;

impl Emitter<'_> {
    /// How many turns a piece takes: one for every host that could be its root, and for every device of a host.
    pub(super) fn num_turns(
        &self,
        class: &SumClass,
        holders: &Holders,
        few: bool,
        by_nic: bool,
    ) -> (u64, u64) {
        let topology = &self.problem.topology;
        let receivers = by_host(self.demands.set(class.receivers), topology);
        let shared = receivers.keys().filter(|h| holders.hosts.contains_key(h)).count();
        let inside = holders.complete.iter().filter_map(|h| receivers.get(h)).map(Vec::len).max();
        let roots = shared.max(holders.complete.len()).max(inside.unwrap_or(1)).max(1) as u64;
        let mut devices = 1;
        if self.many_ports {
            let adding = holders.hosts.iter().map(|(&host, on)| self.num_nics(host, on));
            let wanting = receivers.iter().map(|(&host, ranks)| self.num_landings(host, ranks, by_nic));
            for count in adding.chain(wanting) {
                devices = lcm(devices, count.max(1)).min(MAX_TURNS);
            }
        }
        if few { (roots.min(MAX_TURNS), devices.min(MAX_TURNS / roots.min(MAX_TURNS))) } else { (1, 1) }
    }

    /// How many NICs a host's parts can take turns over.
    fn num_nics(&self, host: HostId, on: &OnHost) -> u64 {
        match on.parts.as_slice() {
            [(_, only)] => self.num_choices(host, only),
            _ => nics(&self.problem.topology, host).len() as u64,
        }
    }

    /// The same for devices of which one is enough.
    fn num_choices(&self, host: HostId, ranks: &[Rank]) -> u64 {
        match ranks {
            [_] => 1,
            _ => (nics(&self.problem.topology, host).len() as u64).max(1),
        }
    }

    /// How many NICs a box can arrive at where these want it.
    fn num_landings(&self, host: HostId, ranks: &[Rank], by_nic: bool) -> u64 {
        match by_nic {
            true => nics(&self.problem.topology, host).len() as u64,
            false => self.num_choices(host, ranks),
        }
    }

    /// How many NICs a source's pieces are shared out over, each a stream, if there are to be so many turns at least.
    pub(super) fn num_streams(&self, holders: &Holders, turns: u64) -> u64 {
        let nics = |(&host, on): (&HostId, &OnHost)| self.num_nics(host, on);
        match self.many_ports {
            true => holders.hosts.iter().map(nics).fold(turns, |all, n| lcm(all, n).min(MAX_PORT_TURNS)),
            false => 1,
        }
    }

    /// So many turns that all NICs of those who want a piece have the same.
    pub(super) fn with_landings(&self, class: &SumClass, turns: u64) -> u64 {
        let receivers = by_host(self.demands.set(class.receivers), &self.problem.topology);
        let landings = receivers.iter().map(|(&host, ranks)| self.num_landings(host, ranks, true));
        landings.fold(turns, |all, n| lcm(all, n).min(MAX_PORT_TURNS))
    }

    /// How many ways a piece of a class can arrive at a host: by each NIC of those who want it.
    pub(super) fn num_ways(&self, class: &SumClass) -> u64 {
        let receivers = by_host(self.demands.set(class.receivers), &self.problem.topology);
        let most = receivers.iter().map(|(&host, ranks)| self.num_choices(host, ranks)).max().unwrap_or(1);
        if self.many_ports { most.min(MAX_PORT_TURNS) } else { 1 }
    }

    /// How many boxes a piece is cut into, of one class of `num_classes` with the same parts, where each box gets the
    /// tree that suits the loads: enough to share ports and roots out evenly.
    pub(super) fn num_boxes(
        &self,
        class: &SumClass,
        holders: &Holders,
        style: Balanced,
        num_classes: usize,
    ) -> u64 {
        let receivers = by_host(self.demands.set(class.receivers), &self.problem.topology);
        let hosts = holders.hosts.keys().chain(receivers.keys());
        let nics = |h: &HostId| u64::from(self.problem.cluster.hosts[h.index()].nics);
        let ports = hosts.map(nics).fold(1, |all, n| lcm(all, n).min(MAX_PORT_TURNS));
        let shared = receivers.keys().filter(|h| holders.hosts.contains_key(h)).count();
        let roots = match style.up {
            Shape::Star => holders.hosts.len().max(receivers.len()),
            Shape::Path => shared.max(1),
        };
        let wanted = (ports * roots as u64).max(MIN_BALANCED).div_ceil(num_classes as u64);
        let wanted = wanted.next_multiple_of(ports) * style.batches;
        let parts = self.demands.sources[class.source as usize].parts.len();
        let edges = (parts + self.demands.set(class.receivers).len()) * class.items.len() * num_classes;
        // Whole turns of the ports, where there is room for one.
        let most = (MAX_BALANCED / edges as u64).max(1);
        let turns = if most > ports { most / ports * ports } else { most };
        // The boxes of all classes together are whole turns from here on.
        let even = ports / gcd(ports, num_classes as u64);
        match turns < even && even * edges as u64 <= MAX_EVEN {
            true => wanted.min(even),
            false => wanted.min(turns),
        }
    }
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

fn lcm(a: u64, b: u64) -> u64 {
    a / gcd(a, b) * b
}
