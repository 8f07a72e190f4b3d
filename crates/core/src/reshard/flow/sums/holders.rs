//! Who has which parts of a sum, host by host, and which hosts to ask.

use std::collections::BTreeMap;

use crate::cluster::Topology;
use crate::id::{HostId, PortId, Rank};

use super::super::super::demand::SumSource;

/// No port counts as more NICs than this.
const MAX_WIDTH: f64 = 16.0;

/// The parts of a sum on one host, each with its holders there.
#[derive(Debug, Clone, Default)]
pub(super) struct OnHost {
    pub parts: Vec<(u32, Vec<Rank>)>,
}

/// The holders of a sum's parts.
#[derive(Debug)]
pub(super) struct Holders {
    pub hosts: BTreeMap<HostId, OnHost>,
    /// Hosts with every part; rising.
    pub complete: Vec<HostId>,
    num_parts: usize,
    /// Every part is on one host alone.
    is_fixed: bool,
}

impl Holders {
    pub(super) fn of(source: &SumSource, topology: &Topology) -> Self {
        let mut hosts: BTreeMap<HostId, OnHost> = BTreeMap::new();
        let mut is_fixed = true;
        for (part, ranks) in source.parts.iter().enumerate() {
            for on_host in ranks.chunk_by(|a, b| topology.same_host(*a, *b)) {
                is_fixed &= on_host.len() == ranks.len();
                let host = hosts.entry(topology.host(on_host[0])).or_default();
                host.parts.push((part as u32, on_host.to_vec()));
            }
        }
        let num_parts = source.parts.len();
        let complete = hosts.iter().filter(|(_, on)| on.parts.len() == num_parts).map(|(&h, _)| h).collect();
        Self { hosts, complete, num_parts, is_fixed }
    }

    /// Hosts that have every part together, rising, with the parts that each is to add. A few hosts with many parts
    /// rather than many with few, hosts in `first` before others, then those that have the least to send.
    pub(super) fn cover(
        &self,
        first: &[HostId],
        sends_s: impl Fn(HostId) -> f64,
    ) -> Vec<(HostId, Vec<&[Rank]>)> {
        let whole = |on: &'_ OnHost| -> Vec<u32> { (0..on.parts.len() as u32).collect() };
        let chosen: Vec<(HostId, Vec<u32>)> = match self.is_fixed {
            true => self.hosts.iter().map(|(&host, on)| (host, whole(on))).collect(),
            false => self.greedy(first, sends_s),
        };
        let ranks = |host: HostId, places: Vec<u32>| {
            places.into_iter().map(|p| self.hosts[&host].parts[p as usize].1.as_slice()).collect()
        };
        chosen.into_iter().map(|(host, places)| (host, ranks(host, places))).collect()
    }

    fn greedy(&self, first: &[HostId], sends_s: impl Fn(HostId) -> f64) -> Vec<(HostId, Vec<u32>)> {
        let mut missing = vec![true; self.num_parts];
        let mut chosen: BTreeMap<HostId, Vec<u32>> = BTreeMap::new();
        while missing.contains(&true) {
            let lacking = |on: &OnHost| on.parts.iter().filter(|(p, _)| missing[*p as usize]).count();
            let better = |a: &(HostId, usize), b: &(HostId, usize)| {
                let key = |&(host, count): &(HostId, usize)| (count, first.contains(&host));
                key(a).cmp(&key(b)).then(sends_s(b.0).total_cmp(&sends_s(a.0))).then(b.0.cmp(&a.0))
            };
            let counts = self.hosts.iter().map(|(&host, on)| (host, lacking(on)));
            let (host, _) = counts.max_by(better).expect("every part has a holder");
            let parts = &self.hosts[&host].parts;
            let new = |&p: &u32| missing[parts[p as usize].0 as usize];
            let places: Vec<u32> = (0..parts.len() as u32).filter(new).collect();
            places.iter().for_each(|&p| missing[parts[p as usize].0 as usize] = false);
            chosen.insert(host, places);
        }
        chosen.into_iter().collect()
    }
}

/// The NICs of a host one by one, each as a device behind it: a port as wide as two NICs is there twice.
///
/// ```text
/// 3 devices, 4 NICs    r0 r1 r2 r2          5 devices, 4 NICs    r0 r2 r3 r4, since r1 shares that of r0
/// ```
pub(super) fn nics(topology: &Topology, host: HostId) -> Vec<Rank> {
    let rate = |port: PortId| topology.ports[port.index()].out_bytes_per_s;
    let narrowest = topology.ports_of(host).map(rate).fold(f64::INFINITY, f64::min);
    let mut nics = vec![];
    let mut last = None;
    for rank in topology.ranks_of(host) {
        let port = topology.port(rank);
        if last != Some(port) {
            let width = (rate(port) / narrowest).round().clamp(1.0, MAX_WIDTH);
            nics.extend(std::iter::repeat_n(rank, width as usize));
            last = Some(port);
        }
    }
    nics
}

/// A holder of every part, in an order in which a box comes in by one NIC and leaves by another, all NICs taking turns both ways.
pub(super) fn through(parts: &[&[Rank]], nics: &[Rank], turn: usize) -> Vec<Rank> {
    let widest = nics.chunk_by(|a, b| a == b).map(<[Rank]>::len).max().unwrap_or(1);
    let (entry, exit) = (nics[turn % nics.len()], nics[(turn + widest) % nics.len()]);
    let one = |ranks: &&[Rank]| {
        let own = [entry, exit].into_iter().find(|nic| ranks.contains(nic));
        own.unwrap_or(ranks[turn % ranks.len()])
    };
    let mut ranks: Vec<Rank> = parts.iter().map(one).collect();
    if !ranks.contains(&entry) {
        return in_turn(parts, turn);
    }
    ranks.sort_by_key(|&r| if r == entry { 0 } else { 1 + u8::from(r == exit) });
    ranks
}

/// One holder of every part, in an order in which the devices of a host take turns at being first and last.
pub(super) fn in_turn(parts: &[&[Rank]], turn: usize) -> Vec<Rank> {
    let mut ranks: Vec<Rank> = parts.iter().map(|ranks| ranks[turn % ranks.len()]).collect();
    let start = turn % ranks.len().max(1);
    ranks.rotate_left(start);
    ranks
}

/// Ranks by host; both rise.
pub(super) fn by_host(ranks: &[Rank], topology: &Topology) -> BTreeMap<HostId, Vec<Rank>> {
    let on_hosts = ranks.chunk_by(|a, b| topology.same_host(*a, *b));
    on_hosts.map(|on_host| (topology.host(on_host[0]), on_host.to_vec())).collect()
}
