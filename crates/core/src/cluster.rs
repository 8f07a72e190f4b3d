//! Clusters: hosts with devices, NICs and local links, and the tiers between them.
//!
//! The cost model: a NIC carries its outgoing bytes at its rate and, independently, its incoming bytes. A device uses
//! the NIC beside it, so a host with several NICs is filled by spreading work over its devices:
//!
//! ```text
//! 4 devices, 2 NICs     devices 0 1 | 2 3        1 device, 4 NICs     device   0
//!                       ports    0  |  1                              port     0, four NICs wide
//! ```
//!
//! [`toml_file`] has the schema of cluster files.
//!
//! Devices of one host reach each other over local links, one each way per device.

use crate::id::{HostId, PortId, Rank};

mod table;
pub mod toml_file;

pub use toml_file::{ClusterError, MAX_CLUSTER_DEVICES, MAX_HOSTS, MAX_NICS, MAX_TIERS};

/// 10 Gbit/s in bytes: the NIC of a cluster nobody described.
pub const DEFAULT_NIC_BYTES_PER_S: f64 = 10e9 / 8.0;
/// NVLink-like, and far above any default NIC: the local link of a cluster nobody described.
pub const DEFAULT_LOCAL_BYTES_PER_S: f64 = 100e9;

/// Devices that share memory and NICs.
#[derive(Debug, Clone, PartialEq)]
pub struct Host {
    pub devices: u32,
    pub nics: u32,
    /// Of each NIC.
    pub nic_out_bytes_per_s: f64,
    pub nic_in_bytes_per_s: f64,
    /// Of each device's link to its neighbours, each way.
    pub local_bytes_per_s: f64,
    /// What is small stays in the processor's cache, and moves at another rate.
    pub cache: Option<Cache>,
    /// Of each device, where it is known.
    pub memory_bytes: Option<u64>,
}

/// The rate of local links for the first bytes that a host's devices receive in a run; what is beyond them moves at the rate of memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cache {
    pub bytes: u64,
    pub bytes_per_s: f64,
}

impl Host {
    /// A host of a cluster nobody described: one NIC, 10 Gbit/s.
    pub fn with_devices(devices: u32) -> Self {
        Self {
            devices,
            nics: 1,
            nic_out_bytes_per_s: DEFAULT_NIC_BYTES_PER_S,
            nic_in_bytes_per_s: DEFAULT_NIC_BYTES_PER_S,
            local_bytes_per_s: DEFAULT_LOCAL_BYTES_PER_S,
            cache: None,
            memory_bytes: None,
        }
    }

    pub fn out_bytes_per_s(&self) -> f64 {
        f64::from(self.nics) * self.nic_out_bytes_per_s
    }

    pub fn in_bytes_per_s(&self) -> f64 {
        f64::from(self.nics) * self.nic_in_bytes_per_s
    }

    /// The host as it is in a run in which its devices receive so many bytes: one rate of its local links, that takes as long for all of
    /// them as the cache's and the memory's take one after the other.
    fn settle(&mut self, bytes: f64) {
        let Some(cache) = self.cache.take() else { return };
        let near = bytes.min(cache.bytes as f64);
        let seconds = near / cache.bytes_per_s + (bytes - near) / self.local_bytes_per_s;
        self.local_bytes_per_s = if bytes > 0.0 { bytes / seconds } else { cache.bytes_per_s };
    }
}

/// A switch level: groups of hosts, each with an uplink that all traffic in or out of the group shares.
#[derive(Debug, Clone, PartialEq)]
pub struct Tier {
    pub name: String,
    pub groups: Vec<Group>,
}

/// Hosts below one uplink.
#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    pub hosts: Vec<HostId>,
    pub out_bytes_per_s: f64,
    pub in_bytes_per_s: f64,
}

/// Hosts in rank order, and what joins them.
#[derive(Debug, Clone, PartialEq)]
pub struct Cluster {
    pub hosts: Vec<Host>,
    /// From the hosts upwards. A host in no group of a tier hangs off the core directly.
    pub tiers: Vec<Tier>,
    /// From one host to another, per message.
    pub latency_s: f64,
    /// From one device of a host to another, per message.
    pub local_latency_s: f64,
    /// How long a message to another host keeps its sender busy before its first byte leaves, and its receiver after its
    /// last one has arrived. A device sees to one message at a time.
    pub message_s: f64,
    /// The same for messages between devices of a host.
    pub local_message_s: f64,
    /// Where and when these rates and costs were measured. Without it they are what somebody says of a cluster: what a run
    /// takes elsewhere cannot be held against them.
    pub measured: Option<String>,
}

impl Cluster {
    pub fn of_hosts(hosts: Vec<Host>) -> Self {
        Self {
            hosts,
            tiers: vec![],
            latency_s: 0.0,
            local_latency_s: 0.0,
            message_s: 0.0,
            local_message_s: 0.0,
            measured: None,
        }
    }

    /// Every message costs nothing but its bytes over the rate.
    pub fn messages_are_free(&self) -> bool {
        self.message_s == 0.0 && self.local_message_s == 0.0
    }

    /// What one message takes that has no bytes: at its sender, on its way, at its receiver.
    pub fn empty_message_s(&self, within_host: bool) -> f64 {
        match within_host {
            true => self.local_latency_s + 2.0 * self.local_message_s,
            false => self.latency_s + 2.0 * self.message_s,
        }
    }

    /// Gives local links the one rate that they have in a run, by what the devices of every host receive in it.
    pub(crate) fn settle(&mut self, received: impl FnOnce(&Topology) -> Vec<f64>) {
        if self.hosts.iter().all(|host| host.cache.is_none()) {
            return;
        }
        let received = received(&Topology::new(self));
        self.hosts.iter_mut().zip(received).for_each(|(host, bytes)| host.settle(bytes));
    }

    pub fn num_devices(&self) -> usize {
        self.hosts.iter().map(|h| h.devices as usize).sum()
    }
}

/// A NIC or several, as wide as the devices behind it can use.
#[derive(Debug, Clone, PartialEq)]
pub struct Port {
    pub host: HostId,
    pub out_bytes_per_s: f64,
    pub in_bytes_per_s: f64,
}

/// A cluster with everything looked up: which host and port a rank is behind.
#[derive(Debug, Clone, PartialEq)]
pub struct Topology {
    pub ports: Vec<Port>,
    rank_host: Vec<HostId>,
    rank_port: Vec<PortId>,
    /// `host_ranks[h]..host_ranks[h + 1]` are the ranks of host `h`; the same for its ports.
    host_ranks: Vec<u32>,
    host_ports: Vec<u32>,
    /// For every tier, the group of each host.
    tier_group: Vec<Vec<Option<u32>>>,
}

impl Topology {
    pub fn new(cluster: &Cluster) -> Self {
        let mut topology = Topology {
            ports: vec![],
            rank_host: vec![],
            rank_port: vec![],
            host_ranks: vec![0],
            host_ports: vec![0],
            tier_group: vec![],
        };
        for (h, host) in cluster.hosts.iter().enumerate() {
            topology.add_host(HostId::at(h), host);
        }
        for tier in &cluster.tiers {
            let mut group_of = vec![None; cluster.hosts.len()];
            for (g, group) in tier.groups.iter().enumerate() {
                for host in &group.hosts {
                    group_of[host.index()] = Some(g as u32);
                }
            }
            topology.tier_group.push(group_of);
        }
        topology
    }

    fn add_host(&mut self, id: HostId, host: &Host) {
        let (devices, nics) = (host.devices, host.nics);
        let ports = devices.min(nics);
        let first_port = self.ports.len() as u32;
        for port in 0..ports {
            // With more NICs than devices, a device's port is as wide as the NICs it has to itself.
            let width = if nics > devices {
                f64::from((port + 1) * nics / devices - port * nics / devices)
            } else {
                1.0
            };
            self.ports.push(Port {
                host: id,
                out_bytes_per_s: host.nic_out_bytes_per_s * width,
                in_bytes_per_s: host.nic_in_bytes_per_s * width,
            });
        }
        for device in 0..devices {
            self.rank_host.push(id);
            self.rank_port.push(PortId(first_port + device * ports / devices));
        }
        self.host_ranks.push(self.rank_host.len() as u32);
        self.host_ports.push(self.ports.len() as u32);
    }

    pub fn num_ranks(&self) -> usize {
        self.rank_host.len()
    }

    pub fn num_hosts(&self) -> usize {
        self.host_ranks.len() - 1
    }

    pub fn host(&self, rank: Rank) -> HostId {
        self.rank_host[rank.index()]
    }

    pub fn port(&self, rank: Rank) -> PortId {
        self.rank_port[rank.index()]
    }

    pub fn same_host(&self, a: Rank, b: Rank) -> bool {
        self.host(a) == self.host(b)
    }

    pub fn ranks_of(&self, host: HostId) -> impl Iterator<Item = Rank> + use<> {
        (self.host_ranks[host.index()]..self.host_ranks[host.index() + 1]).map(Rank)
    }

    pub fn ports_of(&self, host: HostId) -> impl Iterator<Item = PortId> + use<> {
        (self.host_ports[host.index()]..self.host_ports[host.index() + 1]).map(PortId)
    }

    pub fn num_tiers(&self) -> usize {
        self.tier_group.len()
    }

    /// The group of a tier that a host is in, if any.
    pub fn group(&self, tier: usize, host: HostId) -> Option<u32> {
        self.tier_group[tier][host.index()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_into_a_cache_moves_at_its_rate_and_the_rest_at_the_memorys() {
        let cache = Some(Cache { bytes: 4000, bytes_per_s: 40.0 });
        for (bytes, seconds) in [(1000.0, 25.0), (4000.0, 100.0), (14_000.0, 1100.0)] {
            let mut host = Host { local_bytes_per_s: 10.0, cache, ..Host::with_devices(2) };
            host.settle(bytes);
            assert!((bytes / host.local_bytes_per_s - seconds).abs() < 1e-9, "{host:?}");
            assert_eq!(host.cache, None, "a rate is settled once");
        }
    }

    #[test]
    fn devices_share_ports_evenly() {
        let host = |devices, nics| Host { nics, ..Host::with_devices(devices) };
        let topology = Topology::new(&Cluster::of_hosts(vec![host(4, 2), host(1, 4), host(3, 1)]));
        let ports: Vec<u32> = (0..8).map(|r| topology.port(Rank(r)).0).collect();
        assert_eq!(ports, [0, 0, 1, 1, 2, 3, 3, 3]);
        assert_eq!(topology.ports[2].out_bytes_per_s, 4.0 * DEFAULT_NIC_BYTES_PER_S);
        assert_eq!(topology.host(Rank(4)), HostId(1));
        assert_eq!(topology.ranks_of(HostId(2)).collect::<Vec<_>>(), [Rank(5), Rank(6), Rank(7)]);
    }
}
