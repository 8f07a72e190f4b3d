//! The cluster file.
//!
//! ```toml
//! latency = "10us"          # from host to host, per message; default 0
//! local_latency = "1us"     # between devices of a host; default 0
//! message = "4us"           # of its sender's time and of its receiver's, per message between hosts; default 0
//! local_message = "500ns"   # the same between devices of a host; default 0
//! measured = "AMD EPYC, 2 threads, 2026-11-19"   # where and when all of these were measured; default: nowhere
//!
//! [[host]]                  # in rank order; at least one
//! count = 16                # that many hosts alike; default 1
//! devices = 8               # on each of them; the only key that has to be there
//! nics = 8                  # on each of them; default 1
//! nic = "400Gbit"           # each NIC, each way; default 10Gbit
//! # nic_out = "400Gbit"     # or each way on its own
//! # nic_in = "200Gbit"
//! local = "450GB/s"         # each device's link to its neighbours, each way; default 100GB/s
//! # cache = "4MiB"          # of what the devices of a host receive in a run, so much moves at the rate of `cached`; default nothing
//! # cached = "600GB/s"      # at least as much as `local`
//! memory = "80GiB"          # of each device; default unknown
//!
//! [[tier]]                  # switch levels, from the hosts upwards
//! name = "leaf"             # default tier0, tier1, ...
//! hosts_per_group = 4       # hosts 0-3, 4-7, ...; the last group may be smaller
//! # groups = [[0,1], [2,3]] # or by number; hosts in no group hang off the core directly
//! oversubscription = 2.0    # uplink of a group = NIC rates of its hosts / 2
//! # uplink = "100Gbit"      # or outright, each way
//! ```
//!
//! ```
//! use crossmesh_core::cluster::Cluster;
//! let cluster = Cluster::from_toml("[[host]]\ncount = 2\ndevices = 4\nnic = '25Gbit'").unwrap();
//! assert_eq!(cluster.num_devices(), 8);
//! ```

use std::ops::Range;

use toml::de::{DeTable, DeValue};

use super::table::Table;
use super::{Cache, Cluster, Group, Host, Tier};
use crate::id::HostId;
use crate::mesh::MAX_MESH_LEN;
use crate::units::{Rate, UnitError, shown};

/// More devices than this in one cluster is taken for a typing mistake.
pub const MAX_CLUSTER_DEVICES: u64 = MAX_MESH_LEN;
/// More NICs than this in one host is taken for a typing mistake.
pub const MAX_NICS: u32 = 1024;
/// More hosts than this is taken for a typing mistake; every tier may hold a group for each.
pub const MAX_HOSTS: u64 = 1 << 17;
/// More switch levels than this is taken for a typing mistake.
pub const MAX_TIERS: usize = 8;

/// Uplinks outside of this come from a mistaken ratio, and would overflow the times computed from them.
const UPLINKS_BYTES_PER_S: std::ops::RangeInclusive<f64> = 0.125..=1e30;

const TOP_KEYS: &[&str] =
    &["latency", "local_latency", "message", "local_message", "measured", "host", "tier"];
const HOST_KEYS: &[&str] =
    &["count", "devices", "nics", "nic", "nic_out", "nic_in", "local", "cache", "cached", "memory"];
const TIER_KEYS: &[&str] = &["name", "hosts_per_group", "groups", "oversubscription", "uplink"];

/// Why a cluster file cannot be used.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ClusterError {
    #[error("{}", .0.to_string().trim_end())]
    Syntax(toml::de::Error),
    #[error(
        "line {line}: {table} has no key `{key}`{}\nhint: its keys are {known}",
        nearest.map_or(String::new(), |n| format!("; did you mean `{n}`?"))
    )]
    UnknownKey { line: usize, table: &'static str, key: String, nearest: Option<&'static str>, known: String },
    #[error(
        "line {line}: {table} has no `{key}`\nhint: give `{key}`{}",
        instead.map_or(String::new(), |i| format!(" or `{i}`"))
    )]
    NoKey { line: usize, table: &'static str, key: &'static str, instead: Option<&'static str> },
    #[error("line {line}: {table} has both `{key}` and `{other}`\nhint: leave one of them out")]
    BothKeys { line: usize, table: &'static str, key: &'static str, other: &'static str },
    #[error("line {line}: `{key}` wants {expected}, found {found}")]
    WrongType { line: usize, key: &'static str, expected: &'static str, found: &'static str },
    #[error("line {line}: {key}: {error}")]
    BadQuantity { line: usize, key: &'static str, error: UnitError },
    #[error("line {line}: {key} = {value} is out of range\nhint: give a number {range}")]
    OutOfRange { line: usize, key: &'static str, value: String, range: String },
    #[error("the cluster has no hosts\nhint: add a `[[host]]` with `devices = 8`")]
    NoHosts,
    #[error("the cluster has {devices} devices, more than {MAX_CLUSTER_DEVICES}")]
    TooManyDevices { devices: u64 },
    #[error("the cluster has {hosts} hosts, more than {MAX_HOSTS}")]
    TooManyHosts { hosts: u64 },
    #[error("the cluster has {tiers} tiers, more than {MAX_TIERS}")]
    TooManyTiers { tiers: usize },
    #[error("line {line}: two tiers are called `{name}`")]
    TierRepeated { line: usize, name: String },
    #[error("line {line}: group {group} of tier `{tier}` has no hosts")]
    EmptyGroup { line: usize, tier: String, group: usize },
    #[error(
        "line {line}: tier `{tier}` names host {host}, the cluster has {hosts} hosts (0 to {})",
        hosts - 1
    )]
    UnknownHost { line: usize, tier: String, host: String, hosts: usize },
    #[error(
        "line {line}: tier `{tier}` names host {host} twice\nhint: a host is in one group of a tier at most"
    )]
    HostRepeated { line: usize, tier: String, host: usize },
    #[error(
        "line {line}: the uplink of tier `{tier}` would be {bytes_per_s} B/s\nhint: change `oversubscription`"
    )]
    BadUplink { line: usize, tier: String, bytes_per_s: String },
}

impl Cluster {
    /// Reads a cluster file's text; [`toml_file`](self) has the schema.
    pub fn from_toml(text: &str) -> Result<Cluster, ClusterError> {
        let document = DeTable::parse(text).map_err(ClusterError::Syntax)?;
        let top = Table::new(text, "the cluster file", document.span(), document.get_ref(), TOP_KEYS)?;
        let mut cluster = Cluster::of_hosts(read_hosts(&top)?);
        cluster.latency_s = top.seconds("latency")?.unwrap_or(0.0);
        cluster.local_latency_s = top.seconds("local_latency")?.unwrap_or(0.0);
        cluster.message_s = top.seconds("message")?.unwrap_or(0.0);
        cluster.local_message_s = top.seconds("local_message")?.unwrap_or(0.0);
        cluster.measured = top.text("measured", "a machine and a date in quotes")?;
        let tiers = top.tables("tier", "a [[tier]]", TIER_KEYS)?;
        if tiers.len() > MAX_TIERS {
            return Err(ClusterError::TooManyTiers { tiers: tiers.len() });
        }
        for table in tiers {
            let tier = read_tier(&table, &cluster)?;
            cluster.tiers.push(tier);
        }
        Ok(cluster)
    }
}

fn read_hosts(top: &Table) -> Result<Vec<Host>, ClusterError> {
    let mut counted = Vec::new();
    let (mut hosts, mut devices) = (0u64, 0u64);
    for table in top.tables("host", "a [[host]]", HOST_KEYS)? {
        let max = MAX_CLUSTER_DEVICES as u32;
        let count = table.count("count", max)?.unwrap_or(1);
        let host = read_host(&table, max)?;
        hosts = hosts.saturating_add(u64::from(count));
        devices = devices.saturating_add(u64::from(count) * u64::from(host.devices));
        counted.push((count, host));
    }
    if counted.is_empty() {
        return Err(ClusterError::NoHosts);
    }
    // Before they are spelt out.
    if devices > MAX_CLUSTER_DEVICES {
        return Err(ClusterError::TooManyDevices { devices });
    }
    if hosts > MAX_HOSTS {
        return Err(ClusterError::TooManyHosts { hosts });
    }
    Ok(counted.into_iter().flat_map(|(count, host)| std::iter::repeat_n(host, count as usize)).collect())
}

fn read_host(table: &Table, max_devices: u32) -> Result<Host, ClusterError> {
    let devices = table.count("devices", max_devices)?.ok_or_else(|| table.missing("devices"))?;
    let mut host = Host::with_devices(devices);
    table.excludes("nic", "nic_out")?;
    table.excludes("nic", "nic_in")?;
    if let Some(nics) = table.count("nics", MAX_NICS)? {
        host.nics = nics;
    }
    let both = table.rate("nic")?;
    if let Some(rate) = table.rate("nic_out")?.or(both) {
        host.nic_out_bytes_per_s = rate;
    }
    if let Some(rate) = table.rate("nic_in")?.or(both) {
        host.nic_in_bytes_per_s = rate;
    }
    if let Some(rate) = table.rate("local")? {
        host.local_bytes_per_s = rate;
    }
    host.cache = read_cache(table, host.local_bytes_per_s)?;
    host.memory_bytes = table.bytes("memory")?;
    Ok(host)
}

fn read_cache(table: &Table, local_bytes_per_s: f64) -> Result<Option<Cache>, ClusterError> {
    match (table.bytes("cache")?, table.rate("cached")?) {
        (None, None) => Ok(None),
        (None, Some(_)) => Err(table.missing("cache")),
        (Some(_), None) => Err(table.missing("cached")),
        (Some(bytes), Some(bytes_per_s)) => match table.get("cached") {
            Some(found) if bytes_per_s < local_bytes_per_s => {
                let range = format!("from the rate of `local` upwards, {}", Rate(local_bytes_per_s));
                Err(found.out_of_range(&Rate(bytes_per_s).to_string(), range))
            }
            _ => Ok(Some(Cache { bytes, bytes_per_s })),
        },
    }
}

fn read_tier(table: &Table, cluster: &Cluster) -> Result<Tier, ClusterError> {
    let name = tier_name(table, cluster)?;
    let hosts = match table.one_of("hosts_per_group", "groups")? {
        "groups" => listed_groups(table, &name, cluster.hosts.len())?,
        _ => {
            let size = table.count("hosts_per_group", MAX_CLUSTER_DEVICES as u32)?.unwrap_or(1) as usize;
            (0..cluster.hosts.len())
                .step_by(size)
                .map(|first| first..first + size)
                .map(|r| upto(r, cluster))
                .collect()
        }
    };
    let key = table.one_of("oversubscription", "uplink")?;
    let uplink = table.rate("uplink")?;
    let ratio = table.factor("oversubscription")?.unwrap_or(1.0);
    let mut groups = Vec::with_capacity(hosts.len());
    for hosts in hosts {
        let sum = |rate: fn(&Host) -> f64| hosts.iter().map(|h| rate(&cluster.hosts[h.index()])).sum::<f64>();
        let out_bytes_per_s = uplink.unwrap_or_else(|| sum(Host::out_bytes_per_s) / ratio);
        let in_bytes_per_s = uplink.unwrap_or_else(|| sum(Host::in_bytes_per_s) / ratio);
        for rate in [out_bytes_per_s, in_bytes_per_s] {
            if !UPLINKS_BYTES_PER_S.contains(&rate) {
                let line = table.get(key).map_or(table.line, |found| found.line);
                return Err(ClusterError::BadUplink { line, tier: name, bytes_per_s: rate.to_string() });
            }
        }
        groups.push(Group { hosts, out_bytes_per_s, in_bytes_per_s });
    }
    Ok(Tier { name, groups })
}

fn upto(hosts: Range<usize>, cluster: &Cluster) -> Vec<HostId> {
    (hosts.start..hosts.end.min(cluster.hosts.len())).map(HostId::at).collect()
}

fn tier_name(table: &Table, cluster: &Cluster) -> Result<String, ClusterError> {
    let (line, name) = match table.get("name") {
        None => (table.line, format!("tier{}", cluster.tiers.len())),
        Some(found) => (found.line, shown(found.text("a name in quotes")?)),
    };
    match cluster.tiers.iter().any(|t| t.name == name) {
        true => Err(ClusterError::TierRepeated { line, name }),
        false => Ok(name),
    }
}

/// `groups = [[0,1], [2,3]]`, each host there once at most.
fn listed_groups(table: &Table, tier: &str, num_hosts: usize) -> Result<Vec<Vec<HostId>>, ClusterError> {
    let expected = "lists of host numbers, such as [[0,1], [2,3]]";
    let found = table.get("groups").ok_or_else(|| table.missing("groups"))?;
    let (line, tier) = (found.line, tier.to_string());
    let mut seen = vec![false; num_hosts];
    let mut groups = Vec::new();
    for entry in found.value.as_array().ok_or_else(|| found.wrong_type(expected))? {
        let listed = entry.get_ref().as_array().ok_or_else(|| found.wrong_type(expected))?;
        if listed.is_empty() {
            return Err(ClusterError::EmptyGroup { line, tier, group: groups.len() });
        }
        let mut hosts = Vec::with_capacity(listed.len());
        for host in listed {
            let DeValue::Integer(number) = host.get_ref() else { return Err(found.wrong_type(expected)) };
            let host = usize::from_str_radix(number.as_str(), number.radix()).ok().filter(|&h| h < num_hosts);
            let Some(host) = host else {
                return Err(ClusterError::UnknownHost {
                    line,
                    tier,
                    host: shown(number.as_str()),
                    hosts: num_hosts,
                });
            };
            if std::mem::replace(&mut seen[host], true) {
                return Err(ClusterError::HostRepeated { line, tier, host });
            }
            hosts.push(HostId::at(host));
        }
        groups.push(hosts);
    }
    Ok(groups)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{DEFAULT_LOCAL_BYTES_PER_S, DEFAULT_NIC_BYTES_PER_S, Topology};

    const FULL: &str = r#"
latency = "10us"
local_latency = "1us"
message = "4us"
local_message = "500ns"
measured = "a rack of ours, 2026-11-19"

[[host]]
count = 3
devices = 8
nics = 4
nic = "400Gbit"
local = "450GB/s"
cache = "48MiB"
cached = "600GB/s"
memory = "80GiB"

[[host]]
devices = 2
nic_out = "25Gbit"

[[tier]]
name = "leaf"
hosts_per_group = 3
oversubscription = 2

[[tier]]
groups = [[3], [0, 1]]
uplink = "100Gbit"
"#;

    #[test]
    fn reads_every_key() {
        let cluster = Cluster::from_toml(FULL).unwrap();
        assert_eq!((cluster.latency_s, cluster.local_latency_s), (10e-6, 1e-6));
        assert_eq!((cluster.message_s, cluster.local_message_s), (4e-6, 500e-9));
        assert!((cluster.empty_message_s(false) - 18e-6).abs() < 1e-15);
        assert_eq!(cluster.measured.as_deref(), Some("a rack of ours, 2026-11-19"));
        assert_eq!(cluster.hosts.len(), 4);
        assert_eq!(cluster.num_devices(), 26);
        let big = &cluster.hosts[2];
        assert_eq!(
            (big.devices, big.nics, big.nic_out_bytes_per_s, big.nic_in_bytes_per_s),
            (8, 4, 50e9, 50e9)
        );
        assert_eq!((big.local_bytes_per_s, big.memory_bytes), (450e9, Some(80 << 30)));
        assert_eq!(big.cache, Some(Cache { bytes: 48 << 20, bytes_per_s: 600e9 }));
        let small = &cluster.hosts[3];
        assert_eq!(small.cache, None);
        assert_eq!((small.devices, small.nics, small.nic_out_bytes_per_s), (2, 1, 25e9 / 8.0));
        assert_eq!(small.nic_in_bytes_per_s, DEFAULT_NIC_BYTES_PER_S);
        assert_eq!((small.local_bytes_per_s, small.memory_bytes), (DEFAULT_LOCAL_BYTES_PER_S, None));

        let [leaf, core] = &cluster.tiers[..] else { panic!("two tiers") };
        assert_eq!((leaf.name.as_str(), core.name.as_str()), ("leaf", "tier1"));
        assert_eq!(leaf.groups[0].hosts, [HostId(0), HostId(1), HostId(2)]);
        assert_eq!(leaf.groups[0].out_bytes_per_s, 3.0 * 4.0 * 50e9 / 2.0);
        assert_eq!(leaf.groups[1].hosts, [HostId(3)]);
        assert_eq!(leaf.groups[1].in_bytes_per_s, DEFAULT_NIC_BYTES_PER_S / 2.0);
        assert_eq!(core.groups[1].hosts, [HostId(0), HostId(1)]);
        assert_eq!(core.groups[1].in_bytes_per_s, 12.5e9);
        assert_eq!(Topology::new(&cluster).group(1, HostId(2)), None);
    }

    fn error(text: &str) -> String {
        Cluster::from_toml(text).unwrap_err().to_string()
    }

    /// The error of a good host followed by this.
    fn tier_error(text: &str) -> String {
        error(&format!("[[host]]\ncount = 4\ndevices = 2\n[[tier]]\n{text}"))
    }

    #[test]
    fn a_cache_has_a_size_and_a_rate_above_that_of_memory() {
        let of = |keys: &str| error(&format!("[[host]]\ndevices = 2\nlocal = '10GB/s'\n{keys}"));
        assert!(of("cache = '4MiB'").contains("has no `cached`"));
        assert!(of("cached = '20GB/s'").contains("has no `cache`"));
        let slower = of("cache = '4MiB'\ncached = '9GB/s'");
        assert!(
            slower.contains("cached = 72 Gbit/s is out of range") && slower.contains("80 Gbit/s"),
            "{slower}"
        );
    }

    #[test]
    fn syntax_errors_keep_their_line() {
        let text = error("[[host]]\ndevices = \n");
        assert!(text.starts_with("TOML parse error at line 2"), "{text}");
    }

    #[test]
    fn deep_nesting_is_an_error() {
        for text in [
            format!("host = {}", "[".repeat(100_000)),
            format!("{}a = 1", "a.".repeat(100_000)),
            format!("[{}a]", "a.".repeat(100_000)),
        ] {
            assert!(!error(&text).is_empty());
        }
    }

    #[test]
    fn unknown_keys_name_the_nearest() {
        assert_eq!(
            error("[[host]]\ndevice = 8"),
            "line 2: a [[host]] has no key `device`; did you mean `devices`?\nhint: its keys are count, devices, nics, nic, nic_out, nic_in, local, cache, cached, memory"
        );
        assert!(error("[[hosts]]\ndevices = 8").contains("did you mean `host`?"));
        assert!(!error("colour = 8").contains("did you mean"));
    }

    #[test]
    fn wrong_types_and_ranges() {
        assert_eq!(error(""), "the cluster has no hosts\nhint: add a `[[host]]` with `devices = 8`");
        assert_eq!(error("host = []"), error(""));
        assert_eq!(error("host = 3"), "line 1: `host` wants a [[host]], found integer");
        assert!(error("[host]\ndevices = 2").contains("`host` wants a [[host]], found table"));
        assert!(error("host = [1]").contains("wants a [[host]]"));
        assert_eq!(error("[[host]]"), "line 1: a [[host]] has no `devices`\nhint: give `devices`");
        assert_eq!(
            error("[[host]]\ndevices = 0"),
            "line 2: devices = 0 is out of range\nhint: give a number from 1 to 1048576"
        );
        assert!(error("[[host]]\ndevices = -4").contains("devices = -4 is out of range"));
        assert!(error("[[host]]\ndevices = 99999999999999999999").contains("out of range"));
        assert!(error("[[host]]\ndevices = '8'").contains("`devices` wants a whole number, found string"));
        assert!(error("[[host]]\ndevices = 1\ncount = 0").contains("count = 0 is out of range"));
        assert!(error("[[host]]\ndevices = 1\nnics = 0").contains("nics = 0 is out of range"));
        assert!(error("[[host]]\ndevices = 1\nnic = 400").contains("`nic` wants a rate in quotes"));
        assert!(error("[[host]]\ndevices = 1\nnic = '400'").starts_with("line 3: nic: `400` is not a rate"));
        assert!(error("[[host]]\ndevices = 1\nnic = '0bit'").contains("nothing would ever arrive"));
        assert!(error("[[host]]\ndevices = 1\nmemory = '-1GiB'").contains("negative"));
        let measured = |value: &str| error(&format!("measured = {value}\n[[host]]\ndevices = 1"));
        assert_eq!(measured("''"), "line 1: `measured` wants a machine and a date in quotes, found string");
        assert!(measured("true").contains("found boolean"));
        assert!(
            error("latency = 'soon'\n[[host]]\ndevices = 1")
                .contains("line 1: latency: `soon` is not a time")
        );
        assert!(
            error("[[host]]\ndevices = 1\nnic = '1Gbit'\nnic_in = '1Gbit'")
                .contains("both `nic` and `nic_in`")
        );
        assert_eq!(
            error("[[host]]\ndevices = 1048576\n[[host]]\ndevices = 1"),
            "the cluster has 1048577 devices, more than 1048576"
        );
        assert!(error("[[host]]\ndevices = 1048576\ncount = 1048576").contains("1099511627776 devices"));
        assert!(error("[[host]]\ndevices = 1\ncount = 1048576").contains("1048576 hosts, more than 131072"));
    }

    #[test]
    fn tiers_are_checked() {
        assert!(tier_error("oversubscription = 2").contains("give `hosts_per_group` or `groups`"));
        assert!(tier_error("hosts_per_group = 2").contains("give `oversubscription` or `uplink`"));
        assert!(
            tier_error("hosts_per_group = 2\ngroups = []").contains("both `hosts_per_group` and `groups`")
        );
        assert!(
            tier_error("hosts_per_group = 2\noversubscription = 0")
                .contains("oversubscription = 0 is out of range")
        );
        assert!(tier_error("hosts_per_group = 2\noversubscription = nan").contains("above zero and finite"));
        assert!(tier_error("hosts_per_group = 2\noversubscription = 1e-305").contains("would be inf B/s"));
        assert!(tier_error("hosts_per_group = 2\noversubscription = '2'").contains("wants a number"));
        assert!(tier_error("groups = [0]\nuplink = '1Gbit'").contains("wants lists of host numbers"));
        assert!(
            tier_error("groups = [[]]\nuplink = '1Gbit'").contains("group 0 of tier `tier0` has no hosts")
        );
        assert_eq!(
            tier_error("groups = [[0, 4]]\nuplink = '1Gbit'"),
            "line 5: tier `tier0` names host 4, the cluster has 4 hosts (0 to 3)"
        );
        assert!(tier_error("groups = [[-1]]\nuplink = '1Gbit'").contains("names host -1"));
        assert!(tier_error("groups = [[0, 1], [1]]\nuplink = '1Gbit'").contains("names host 1 twice"));
        let two = "name = 'a'\nhosts_per_group = 1\nuplink = '1Gbit'";
        assert!(tier_error(&format!("{two}\n[[tier]]\n{two}")).contains("line 9: two tiers are called `a`"));
        let tier = "[[tier]]\nhosts_per_group = 1\nuplink = '1Gbit'\n";
        assert!(
            tier_error(&format!("hosts_per_group = 1\nuplink = '1Gbit'\n{}", tier.repeat(8)))
                .contains("9 tiers")
        );
        assert!(
            tier_error("name = ''\nhosts_per_group = 1\nuplink = '1Gbit'").contains("wants a name in quotes")
        );
    }
}
