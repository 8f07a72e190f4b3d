//! Through which port of a host each byte enters or leaves.
//!
//! A host with one port has no choice. Otherwise a stretch of a class may enter through the port of any device that
//! wants it, and leave through the port of any device that holds it; each host's ports are filled evenly. Where those
//! ports alone would take longer than the host as a whole, the host's other devices may relay.

use rustc_hash::FxHashMap;

use crate::cluster::Topology;
use crate::id::{HostId, PortId, Rank};

use super::super::assign::{Candidate, Job, least_time, share};

/// Which way bytes cross a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Way {
    In,
    Out,
}

/// Bytes of one stretch that cross one host's ports.
#[derive(Debug, Clone)]
pub(super) struct Crossing {
    /// Class and stretch.
    pub key: (u32, u32),
    /// Which parts of the stretch, and how often each.
    pub parts: Vec<Part>,
    /// The ports beside devices that hold or want it; sorted.
    pub ports: Vec<PortId>,
    /// Ports beside devices that may relay it.
    pub relays: Vec<PortId>,
}

/// Bytes of a stretch, counted from its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub start: u64,
    pub end: u64,
    pub copies: u64,
}

impl Crossing {
    fn bytes(&self) -> u64 {
        self.parts.iter().map(|p| (p.end - p.start) * p.copies).sum()
    }

    /// Turns bytes carried by one port after the other into where in the stretch each port's turn ends.
    fn ends(&self, taken: &[(PortId, u64)]) -> Vec<(PortId, u64)> {
        let mut parts = self.parts.iter().copied();
        let mut part = parts.next();
        let mut ends = Vec::with_capacity(taken.len());
        for &(port, mut bytes) in taken {
            let mut end = self.parts.last().map_or(0, |p| p.end);
            while let Some(p) = part {
                let whole = (p.end - p.start) * p.copies;
                if bytes < whole {
                    end = p.start + bytes / p.copies;
                    part = Some(Part { start: end, ..p });
                    break;
                }
                bytes -= whole;
                part = parts.next();
                end = p.end;
            }
            ends.push((port, end));
        }
        ends
    }
}

/// Class, stretch, host and direction.
type Place = (u32, u32, HostId, Way);

/// For stretches with a choice: ports, and where in the stretch the turn of each ends, in order.
#[derive(Debug, Default)]
pub(super) struct PortTable {
    chosen: FxHashMap<Place, Vec<(PortId, u64)>>,
    /// The longest any port is busy.
    pub seconds: f64,
    pub relayed_bytes: u64,
}

impl PortTable {
    /// The turns of a stretch's ports, if there was a choice.
    pub(super) fn turns(&self, key: (u32, u32), host: HostId, way: Way) -> Option<&[(PortId, u64)]> {
        self.chosen.get(&(key.0, key.1, host, way)).map(Vec::as_slice)
    }

    /// Fills a host's ports evenly.
    pub(super) fn fill(&mut self, topology: &Topology, host: HostId, way: Way, crossings: &[Crossing]) {
        let all: Vec<PortId> = topology.ports_of(host).collect();
        let rate = |port: &PortId| match way {
            Way::In => topology.ports[port.index()].in_bytes_per_s,
            Way::Out => topology.ports[port.index()].out_bytes_per_s,
        };
        let rates: Vec<f64> = all.iter().map(rate).collect();
        let first = all[0].0;
        let mut jobs: Vec<Job> = vec![];
        let mut group_of: FxHashMap<(&[PortId], &[PortId]), usize> = FxHashMap::default();
        for crossing in crossings {
            let group = *group_of.entry((&crossing.ports, &crossing.relays)).or_insert_with(|| {
                jobs.push(job(&crossing.ports, &crossing.relays, first));
                jobs.len() - 1
            });
            jobs[group].bytes += crossing.bytes();
        }
        let loads = vec![0; rates.len()];
        let (seconds, _) = least_time(&jobs, &rates, &loads, 0.0);
        let shares = share(&jobs, &rates, &loads, seconds).expect("the least time is enough");
        self.seconds = self.seconds.max(seconds);
        let mut left: Vec<Vec<(PortId, u64)>> = shares
            .into_iter()
            .map(|s| s.into_iter().rev().map(|(node, bytes)| (PortId(first + node), bytes)).collect())
            .collect();
        for crossing in crossings {
            let taken = take(
                &mut left[group_of[&(crossing.ports.as_slice(), crossing.relays.as_slice())]],
                crossing.bytes(),
            );
            let strange = taken.iter().filter(|(port, _)| !crossing.ports.contains(port));
            self.relayed_bytes += strange.map(|(_, bytes)| bytes).sum::<u64>();
            if taken.len() > 1
                || crossing.ports.len() > 1
                || taken.iter().any(|(p, _)| !crossing.ports.contains(p))
            {
                self.chosen.insert((crossing.key.0, crossing.key.1, host, way), crossing.ends(&taken));
            }
        }
    }
}

fn job(ports: &[PortId], relays: &[PortId], first: u32) -> Job {
    let candidate =
        |port: &PortId, preference| Candidate { node: port.0 - first, preference, most: u64::MAX };
    let others = relays.iter().filter(|p| !ports.contains(p));
    let candidates = ports.iter().map(|p| candidate(p, 0)).chain(others.map(|p| candidate(p, 1)));
    Job { bytes: 0, candidates: candidates.collect() }
}

/// Takes `bytes` off the end of a stack of port shares.
fn take(stack: &mut Vec<(PortId, u64)>, mut bytes: u64) -> Vec<(PortId, u64)> {
    let mut taken = vec![];
    while bytes > 0 {
        let Some((port, left)) = stack.last_mut() else { break };
        let part = bytes.min(*left);
        taken.push((*port, part));
        *left -= part;
        bytes -= part;
        if *left == 0 {
            stack.pop();
        }
    }
    taken
}

/// The ports beside some ranks of one host.
pub(super) fn ports_beside(ranks: &[Rank], topology: &Topology) -> Vec<PortId> {
    let mut ports: Vec<PortId> = ranks.iter().map(|&r| topology.port(r)).collect();
    ports.dedup();
    ports
}
