//! What differs between two clusters: everything that times depend on, and nothing else.
//!
//! Hosts that changed alike are one line, and so are the groups of a tier:
//!
//! ```text
//! cluster h0-h3 nic             10 Gbit/s    ->  25 Gbit/s    +150.0 %
//! cluster leaf 0-1 uplink out   100 Gbit/s   ->  50 Gbit/s    -50.0 %
//! cluster local latency         0 s          ->  1.00 us
//! ```

use crossmesh_core::cluster::{Cluster, Group, Host, Tier};
use crossmesh_core::units::{Bytes, Rate, Seconds};

use super::changes::{Change, Number};
use crate::output::count;

/// All differences, in the order of the file.
pub fn changes(a: &Cluster, b: &Cluster) -> Vec<Change> {
    let seconds = |s: f64| Seconds(s).to_string();
    let times = [
        ("cluster latency", [a.latency_s, b.latency_s]),
        ("cluster local latency", [a.local_latency_s, b.local_latency_s]),
        ("cluster message", [a.message_s, b.message_s]),
        ("cluster local message", [a.local_message_s, b.local_message_s]),
    ];
    let mut changes: Vec<Change> =
        times.into_iter().filter_map(|(what, values)| Change::number(what, values, &seconds)).collect();
    let measured = |c: &Cluster| c.measured.clone().unwrap_or_else(|| "nowhere".into());
    changes.extend(Change::words("cluster measured", measured(a), measured(b)));
    changes.extend(hosts(a, b));
    changes.extend(tiers(a, b));
    changes
}

/// Changes that several hosts or groups have in common, with their numbers.
#[derive(Default)]
struct Alike {
    found: Vec<(Change, Vec<usize>)>,
}

impl Alike {
    fn add(&mut self, number: usize, changes: Vec<Change>) {
        for change in changes {
            match self.found.iter_mut().find(|(known, _)| *known == change) {
                Some((_, numbers)) => numbers.push(number),
                None => self.found.push((change, vec![number])),
            }
        }
    }

    /// A line each; `name` puts the numbers into words.
    fn told(self, name: impl Fn(&str) -> String) -> impl Iterator<Item = Change> {
        self.found.into_iter().map(move |(change, numbers)| {
            let what = format!("cluster {} {}", name(&ranges(&numbers)), change.what);
            Change { what, ..change }
        })
    }
}

/// `0-3,7`, of numbers that rise.
fn ranges(numbers: &[usize]) -> String {
    let runs = numbers.chunk_by(|a, b| a + 1 == *b);
    let run = |run: &[usize]| match run {
        [one] => one.to_string(),
        [first, .., last] => format!("{first}-{last}"),
        [] => String::new(),
    };
    runs.map(run).collect::<Vec<_>>().join(",")
}

fn hosts(a: &Cluster, b: &Cluster) -> Vec<Change> {
    let mut alike = Alike::default();
    for h in 0..a.hosts.len().max(b.hosts.len()) {
        alike.add(
            h,
            match (a.hosts.get(h), b.hosts.get(h)) {
                (Some(a), Some(b)) => host(a, b),
                (a, b) => {
                    Change::words("", a.map_or("absent".into(), whole), b.map_or("absent".into(), whole))
                        .into_iter()
                        .collect()
                }
            },
        );
    }
    alike.told(|numbers| format!("host {numbers}")).map(trimmed).collect()
}

/// Of a host or group that only one has, there is no property to name.
fn trimmed(change: Change) -> Change {
    Change { what: change.what.trim_end().into(), ..change }
}

/// `8 devices, 1 NIC of 10 Gbit/s, local 100 GB/s`.
fn whole(host: &Host) -> String {
    let (out, into) = (Rate(host.nic_out_bytes_per_s).to_string(), Rate(host.nic_in_bytes_per_s).to_string());
    let nic = if out == into { out } else { format!("{out} out, {into} in") };
    let memory = host.memory_bytes.map_or(String::new(), |bytes| format!(", {} each", Bytes(bytes)));
    format!(
        "{}{memory}, {} of {nic}, local {}",
        count(host.devices as usize, "device"),
        count(host.nics as usize, "NIC"),
        Rate(host.local_bytes_per_s)
    )
}

fn host(a: &Host, b: &Host) -> Vec<Change> {
    let whole = |n: f64| n.to_string();
    let rate = |r: f64| Rate(r).to_string();
    let numbers: [(&str, [f64; 2], Number<'_>); 3] = [
        ("devices", [a.devices.into(), b.devices.into()], &whole),
        ("NICs", [a.nics.into(), b.nics.into()], &whole),
        ("local", [a.local_bytes_per_s, b.local_bytes_per_s], &rate),
    ];
    let mut changes: Vec<Change> =
        numbers.into_iter().filter_map(|(what, values, show)| Change::number(what, values, show)).collect();
    let out = [a.nic_out_bytes_per_s, b.nic_out_bytes_per_s];
    changes.extend(both_ways("nic", out, [a.nic_in_bytes_per_s, b.nic_in_bytes_per_s]));
    let memory = |host: &Host| host.memory_bytes.map_or("unknown".into(), |bytes| Bytes(bytes).to_string());
    if a.memory_bytes != b.memory_bytes {
        changes.extend(match (a.memory_bytes, b.memory_bytes) {
            (Some(x), Some(y)) => {
                Change::number("memory", [x as f64, y as f64], &|n| Bytes(n as u64).to_string())
            }
            _ => Change::words("memory", memory(a), memory(b)),
        });
    }
    changes
}

/// One line where both ways changed alike.
fn both_ways(what: &str, out: [f64; 2], into: [f64; 2]) -> Vec<Change> {
    let rate = |r: f64| Rate(r).to_string();
    let ways = match out == into {
        true => vec![(what.to_string(), out)],
        false => vec![(format!("{what} out"), out), (format!("{what} in"), into)],
    };
    ways.into_iter().filter_map(|(what, values)| Change::number(&what, values, &rate)).collect()
}

fn tiers(a: &Cluster, b: &Cluster) -> Vec<Change> {
    let mut changes = vec![];
    for t in 0..a.tiers.len().max(b.tiers.len()) {
        match (a.tiers.get(t), b.tiers.get(t)) {
            (Some(a), Some(b)) => changes.extend(tier(a, b)),
            (a, b) => {
                let said = |tier: Option<&Tier>| {
                    tier.map_or("absent".to_string(), |t| {
                        format!("{} of {}", count(t.groups.len(), "group"), uplinks(t))
                    })
                };
                let name = a.or(b).map_or("", |tier| tier.name.as_str());
                changes.extend(Change::words(&format!("cluster tier {name}"), said(a), said(b)));
            }
        }
    }
    changes
}

/// The uplinks of a tier that only one cluster has: the least and the most.
fn uplinks(tier: &Tier) -> String {
    let rates = || tier.groups.iter().flat_map(|g| [g.out_bytes_per_s, g.in_bytes_per_s]);
    let (least, most) = (rates().fold(f64::INFINITY, f64::min), rates().fold(0.0, f64::max));
    match least < most {
        true => format!("{} to {}", Rate(least), Rate(most)),
        false => Rate(most).to_string(),
    }
}

fn tier(a: &Tier, b: &Tier) -> Vec<Change> {
    let mut changes: Vec<Change> = Change::words(
        &format!("cluster tier {}", a.name),
        format!("is called {}", a.name),
        format!("is called {}", b.name),
    )
    .into_iter()
    .collect();
    let mut alike = Alike::default();
    for g in 0..a.groups.len().max(b.groups.len()) {
        alike.add(
            g,
            match (a.groups.get(g), b.groups.get(g)) {
                (Some(a), Some(b)) => group(a, b),
                (a, b) => Change::words("", members(a), members(b)).into_iter().collect(),
            },
        );
    }
    let name = a.name.clone();
    changes.extend(alike.told(move |numbers| format!("{name} {numbers}")).map(trimmed));
    changes
}

fn members(group: Option<&Group>) -> String {
    let numbers = |g: &Group| g.hosts.iter().map(|h| h.index()).collect::<Vec<_>>();
    group.map_or("absent".into(), |g| {
        format!("hosts {}, uplink {}", ranges(&numbers(g)), Rate(g.out_bytes_per_s))
    })
}

fn group(a: &Group, b: &Group) -> Vec<Change> {
    let hosts = |group: &Group| ranges(&group.hosts.iter().map(|h| h.index()).collect::<Vec<_>>());
    let mut changes: Vec<Change> = Change::words("hosts", hosts(a), hosts(b)).into_iter().collect();
    let out = [a.out_bytes_per_s, b.out_bytes_per_s];
    changes.extend(both_ways("uplink", out, [a.in_bytes_per_s, b.in_bytes_per_s]));
    changes
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: &str = "latency = '5us'
local_latency = '1us'
message = '2us'
local_message = '1us'
measured = 'a rack'
[[host]]
count = 4
devices = 8
nics = 2
nic_out = '100Gbit'
nic_in = '100Gbit'
local = '450GB/s'
memory = '80GiB'
[[host]]
devices = 4
[[tier]]
name = 'leaf'
groups = [[0, 1], [2, 3]]
uplink = '200Gbit'
[[tier]]
name = 'spine'
hosts_per_group = 4
oversubscription = 2
";

    /// What is said when one text of the file stands in the place of another.
    fn said(old: &str, new: &str) -> Vec<String> {
        assert!(CLUSTER.contains(old), "{old}");
        let (a, b) = (CLUSTER, CLUSTER.replacen(old, new, 1));
        let read = |text: &str| Cluster::from_toml(text).unwrap();
        let line = |c: Change| format!("{} {} -> {}", c.what, c.a, c.b);
        changes(&read(a), &read(&b)).into_iter().map(line).collect()
    }

    /// Whatever times depend on is said; in one line, and in its own words.
    #[test]
    fn everything_that_times_depend_on_is_said() {
        for (old, new, line) in [
            ("latency = '5us'", "latency = '6us'", "cluster latency 5.00 us -> 6.00 us"),
            ("local_latency = '1us'", "local_latency = '2us'", "cluster local latency 1.00 us -> 2.00 us"),
            ("message = '2us'", "message = '0'", "cluster message 2.00 us -> 0 s"),
            ("local_message = '1us'", "local_message = '3us'", "cluster local message 1.00 us -> 3.00 us"),
            ("measured = 'a rack'\n", "", "cluster measured a rack -> nowhere"),
            ("devices = 8", "devices = 9", "cluster host 0-3 devices 8 -> 9"),
            ("nics = 2", "nics = 4", "cluster host 0-3 NICs 2 -> 4"),
            ("nic_out = '100Gbit'", "nic_out = '50Gbit'", "cluster host 0-3 nic out 100 Gbit/s -> 50 Gbit/s"),
            ("nic_in = '100Gbit'", "nic_in = '50Gbit'", "cluster host 0-3 nic in 100 Gbit/s -> 50 Gbit/s"),
            ("'450GB/s'", "'900GB/s'", "cluster host 0-3 local 3.6 Tbit/s -> 7.2 Tbit/s"),
            ("'80GiB'", "'96GiB'", "cluster host 0-3 memory 80.0 GiB -> 96.0 GiB"),
            ("memory = '80GiB'\n", "", "cluster host 0-3 memory 80.0 GiB -> unknown"),
            ("devices = 4", "devices = 4\nnic = '1Gbit'", "cluster host 4 nic 10 Gbit/s -> 1 Gbit/s"),
            ("uplink = '200Gbit'", "uplink = '400Gbit'", "cluster leaf 0-1 uplink 200 Gbit/s -> 400 Gbit/s"),
            ("[[0, 1], [2, 3]]", "[[0, 1], [3, 2]]", "cluster leaf 1 hosts 2-3 -> 3,2"),
            ("name = 'leaf'", "name = 'rack'", "cluster tier leaf is called leaf -> is called rack"),
        ] {
            // NICs that change change the uplinks made of them, too.
            let lines: Vec<String> = said(old, new).into_iter().filter(|l| !l.contains(" spine ")).collect();
            assert_eq!(lines, [line], "{old} -> {new}");
        }
        let more = said("oversubscription = 2", "oversubscription = 4");
        assert_eq!(more.len(), 2, "{more:?}");
        assert!(more[0].starts_with("cluster spine 0 uplink 400 Gbit/s -> 200 Gbit/s"), "{more:?}");
    }

    #[test]
    fn hosts_and_tiers_that_one_has_alone_are_described() {
        let gone = said("[[host]]\ndevices = 4\n", "");
        assert_eq!(gone[0], "cluster host 4 4 devices, 1 NIC of 10 Gbit/s, local 800 Gbit/s -> absent");
        let spine = "[[tier]]\nname = 'spine'\nhosts_per_group = 4\noversubscription = 2\n";
        assert_eq!(said(spine, ""), ["cluster tier spine 2 groups of 5 Gbit/s to 400 Gbit/s -> absent"]);
        assert!(said(spine, spine).is_empty(), "the same cluster");
    }
}
