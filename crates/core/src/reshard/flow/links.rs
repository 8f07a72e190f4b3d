//! Every link of a cluster by number, and which of them a copy from one device to another takes.
//!
//! ```text
//! NICs out | NICs in | local out | local in | tier 0: group 0 out, in, group 1 out, in, … | tier 1 …
//! ```

use crate::cluster::{Cluster, Topology};
use crate::id::{HostId, Rank};

use super::super::plan::Plan;
use super::super::problem::Problem;

pub(super) struct Links<'a> {
    pub topology: &'a Topology,
    /// By link: the seconds that a byte takes.
    pub seconds_per_byte: Vec<f64>,
    /// The number of each tier's first link.
    tiers: Vec<u32>,
}

impl<'a> Links<'a> {
    pub(super) fn of(problem: &'a Problem) -> Self {
        let (cluster, topology) = (&problem.cluster, &problem.topology);
        let local = local_rates(cluster);
        let mut rates: Vec<f64> = topology.ports.iter().map(|p| p.out_bytes_per_s).collect();
        rates.extend(topology.ports.iter().map(|p| p.in_bytes_per_s));
        rates.extend(local.iter().chain(&local));
        let mut tiers = vec![];
        for tier in &cluster.tiers {
            tiers.push(rates.len() as u32);
            rates.extend(tier.groups.iter().flat_map(|g| [g.out_bytes_per_s, g.in_bytes_per_s]));
        }
        let seconds_per_byte = rates.into_iter().map(|rate| 1.0 / rate).collect();
        Self { topology, seconds_per_byte, tiers }
    }

    fn num_ports(&self) -> u32 {
        self.topology.ports.len() as u32
    }

    pub(super) fn nic_out(&self, rank: Rank) -> usize {
        self.topology.port(rank).index()
    }

    pub(super) fn nic_in(&self, rank: Rank) -> usize {
        (self.num_ports() + self.topology.port(rank).0) as usize
    }

    pub(super) fn local_out(&self, rank: Rank) -> usize {
        (2 * self.num_ports() + rank.0) as usize
    }

    pub(super) fn local_in(&self, rank: Rank) -> usize {
        self.local_out(rank) + self.topology.num_ranks()
    }

    /// The uplinks between two ranks of different hosts.
    pub(super) fn uplinks(&self, src: Rank, dst: Rank) -> impl Iterator<Item = usize> + '_ {
        let hosts = (self.topology.host(src), self.topology.host(dst));
        self.tiers.iter().enumerate().flat_map(move |(tier, &first)| {
            let (from, to) = (self.topology.group(tier, hosts.0), self.topology.group(tier, hosts.1));
            let crosses = from != to;
            let out = from.filter(|_| crosses).map(|g| (first + 2 * g) as usize);
            out.into_iter().chain(to.filter(|_| crosses).map(|g| (first + 2 * g + 1) as usize))
        })
    }

    /// The uplinks of the groups that a host is in, out and in.
    pub(super) fn groups_of(&self, host: HostId) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.tiers.iter().enumerate().filter_map(move |(tier, &first)| {
            let group = self.topology.group(tier, host)?;
            Some(((first + 2 * group) as usize, (first + 2 * group + 1) as usize))
        })
    }

    /// All links that a copy takes.
    pub(super) fn between(&self, src: Rank, dst: Rank, links: &mut Vec<u32>) {
        if self.topology.same_host(src, dst) {
            links.extend([self.local_out(src) as u32, self.local_in(dst) as u32]);
            return;
        }
        links.extend([self.nic_out(src) as u32, self.nic_in(dst) as u32]);
        links.extend(self.uplinks(src, dst).map(|l| l as u32));
    }

    /// Whether bytes have a choice of links: several NICs a host, or uplinks.
    pub(super) fn has_choice(&self) -> bool {
        !self.tiers.is_empty() || self.topology.ports.len() > self.topology.num_hosts()
    }

    /// When the busiest link would be done with a plan.
    pub(super) fn busiest_s(&self, plan: &Plan) -> f64 {
        self.loads_s(plan).into_iter().fold(0.0, f64::max)
    }

    /// What the transfers of a plan load on every link, in seconds.
    pub(super) fn loads_s(&self, plan: &Plan) -> Vec<f64> {
        let mut loads = vec![0.0; self.seconds_per_byte.len()];
        let mut path = vec![];
        for t in plan.transfers() {
            path.clear();
            self.between(t.src, t.dst, &mut path);
            for &link in &path {
                loads[link as usize] += t.bytes as f64 * self.seconds_per_byte[link as usize];
            }
        }
        loads
    }
}

fn local_rates(cluster: &Cluster) -> Vec<f64> {
    cluster.hosts.iter().flat_map(|h| (0..h.devices).map(|_| h.local_bytes_per_s)).collect()
}
