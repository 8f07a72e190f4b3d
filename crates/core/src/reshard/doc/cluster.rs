//! The resolved cluster inside a plan document.

use serde::{Deserialize, Serialize};

use crate::cluster::{Cluster, Group, Host, MAX_CLUSTER_DEVICES, MAX_HOSTS, MAX_NICS, MAX_TIERS, Tier};
use crate::id::HostId;
use crate::printable::one_line;

use super::error::PlanDocError;

/// Every host, what joins them, and how fast; all rates in bytes per second.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClusterDoc {
    pub hosts: Vec<HostDoc>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tiers: Vec<TierDoc>,
    #[serde(default)]
    pub latency_s: f64,
    #[serde(default)]
    pub local_latency_s: f64,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub message_s: f64,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub local_message_s: f64,
    /// Where and when all of these were measured, if they were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<String>,
}

/// A run of hosts that are alike.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HostDoc {
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub count: u32,
    pub devices: u32,
    pub nics: u32,
    pub nic_out_bytes_per_s: f64,
    pub nic_in_bytes_per_s: f64,
    pub local_bytes_per_s: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TierDoc {
    pub name: String,
    pub groups: Vec<GroupDoc>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GroupDoc {
    pub hosts: Vec<u32>,
    pub out_bytes_per_s: f64,
    pub in_bytes_per_s: f64,
}

fn one() -> u32 {
    1
}

fn is_one(count: &u32) -> bool {
    *count == 1
}

fn is_zero(seconds: &f64) -> bool {
    *seconds == 0.0
}

/// A rate outside of this is taken for a damaged file, and would overflow the times computed from it.
const RATES_BYTES_PER_S: std::ops::RangeInclusive<f64> = 1e-30..=1e30;

impl ClusterDoc {
    pub fn new(cluster: &Cluster) -> Self {
        let hosts = cluster.hosts.chunk_by(|a, b| a == b).map(HostDoc::new).collect();
        let tiers = cluster.tiers.iter().map(TierDoc::new).collect();
        let Cluster { latency_s, local_latency_s, message_s, local_message_s, .. } = *cluster;
        let measured = cluster.measured.clone();
        Self { hosts, tiers, latency_s, local_latency_s, message_s, local_message_s, measured }
    }

    pub fn to_cluster(&self) -> Result<Cluster, PlanDocError> {
        let mut hosts = Vec::new();
        let mut devices = 0;
        for run in &self.hosts {
            let host = run.to_host()?;
            if run.count == 0 || hosts.len() as u64 + u64::from(run.count) > MAX_HOSTS {
                return Err(bad("hosts[].count", run.count));
            }
            devices += u64::from(run.count) * u64::from(run.devices);
            if devices > MAX_CLUSTER_DEVICES {
                return Err(bad("hosts[].devices", run.devices));
            }
            hosts.extend(std::iter::repeat_n(host, run.count as usize));
        }
        let Self { latency_s, local_latency_s, message_s, local_message_s, .. } = *self;
        let times = [
            ("latency_s", latency_s),
            ("local_latency_s", local_latency_s),
            ("message_s", message_s),
            ("local_message_s", local_message_s),
        ];
        for (field, seconds) in times {
            if !(seconds.is_finite() && seconds >= 0.0) {
                return Err(bad(field, seconds));
            }
        }
        if self.tiers.len() > MAX_TIERS {
            return Err(bad("tiers", self.tiers.len()));
        }
        let tiers = self.tiers.iter().map(|t| t.to_tier(hosts.len())).collect::<Result<_, _>>()?;
        let measured = self.measured.as_deref().map(one_line);
        Ok(Cluster { hosts, tiers, latency_s, local_latency_s, message_s, local_message_s, measured })
    }
}

fn bad(field: &'static str, value: impl ToString) -> PlanDocError {
    PlanDocError::Cluster { field, value: value.to_string() }
}

fn check_rate(field: &'static str, rate: f64) -> Result<f64, PlanDocError> {
    if RATES_BYTES_PER_S.contains(&rate) { Ok(rate) } else { Err(bad(field, rate)) }
}

impl HostDoc {
    /// Of hosts that are all the same.
    fn new(hosts: &[Host]) -> Self {
        let host = &hosts[0];
        Self {
            count: hosts.len() as u32,
            devices: host.devices,
            nics: host.nics,
            nic_out_bytes_per_s: host.nic_out_bytes_per_s,
            nic_in_bytes_per_s: host.nic_in_bytes_per_s,
            local_bytes_per_s: host.local_bytes_per_s,
            memory_bytes: host.memory_bytes,
        }
    }

    fn to_host(&self) -> Result<Host, PlanDocError> {
        let limits = [
            ("hosts[].devices", self.devices, MAX_CLUSTER_DEVICES),
            ("hosts[].nics", self.nics, u64::from(MAX_NICS)),
        ];
        for (field, count, max) in limits {
            if count == 0 || u64::from(count) > max {
                return Err(bad(field, count));
            }
        }
        Ok(Host {
            devices: self.devices,
            nics: self.nics,
            nic_out_bytes_per_s: check_rate("hosts[].nic_out_bytes_per_s", self.nic_out_bytes_per_s)?,
            nic_in_bytes_per_s: check_rate("hosts[].nic_in_bytes_per_s", self.nic_in_bytes_per_s)?,
            local_bytes_per_s: check_rate("hosts[].local_bytes_per_s", self.local_bytes_per_s)?,
            // A plan's rates are those of its run.
            cache: None,
            memory_bytes: self.memory_bytes,
        })
    }
}

impl TierDoc {
    fn new(tier: &Tier) -> Self {
        let group = |g: &Group| GroupDoc {
            hosts: g.hosts.iter().map(|h| h.0).collect(),
            out_bytes_per_s: g.out_bytes_per_s,
            in_bytes_per_s: g.in_bytes_per_s,
        };
        Self { name: tier.name.clone(), groups: tier.groups.iter().map(group).collect() }
    }

    fn to_tier(&self, num_hosts: usize) -> Result<Tier, PlanDocError> {
        let mut taken = vec![false; num_hosts];
        let mut groups = Vec::with_capacity(self.groups.len());
        for group in &self.groups {
            for &host in &group.hosts {
                if taken.get(host as usize).is_none_or(|t| *t) {
                    return Err(bad("tiers[].groups[].hosts", host));
                }
                taken[host as usize] = true;
            }
            groups.push(Group {
                hosts: group.hosts.iter().copied().map(HostId).collect(),
                out_bytes_per_s: check_rate("tiers[].groups[].out_bytes_per_s", group.out_bytes_per_s)?,
                in_bytes_per_s: check_rate("tiers[].groups[].in_bytes_per_s", group.in_bytes_per_s)?,
            });
        }
        Ok(Tier { name: self.name.clone(), groups })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_a_cluster_that_would_fill_the_memory() {
        let host =
            HostDoc { count: 65535, ..HostDoc::new(&[Host { devices: 65535, ..Host::with_devices(1) }]) };
        let doc = ClusterDoc { hosts: vec![host], ..ClusterDoc::new(&Cluster::of_hosts(vec![])) };
        assert!(doc.to_cluster().unwrap_err().to_string().contains("hosts[].devices"));
        let tier = TierDoc { name: String::new(), groups: vec![] };
        let tiers = vec![tier; 10_000];
        let doc = ClusterDoc { hosts: vec![HostDoc::new(&[Host::with_devices(1)])], tiers, ..doc };
        assert!(doc.to_cluster().unwrap_err().to_string().contains("tiers"));
    }
}
