//! Cuts through links of more than one kind.
//!
//! A level of the cluster alone can promise too much: what a rack's host cannot send may not fit through the rack's
//! uplink either. So some groups of a tier stand as one node, with the uplink's rate, and the hosts of others by
//! themselves. What only some nodes hold and another wants has to leave one of them, once at least, whoever helps; the
//! worst set of nodes is found as at any level.
//!
//! ```text
//! racks of 3, uplinks of 7.5 Gbit/s, NICs of 10      rack 0: h0 h1 h2 hold a and b
//!                                                    rack 1: h3 holds a and b, h4 wants a, h5 wants b
//! h4 in: a at 10 Gbit/s                              1
//! rack 0 and h3 out: a and b at 17.5 Gbit/s          8/7 as long
//! ```
//!
//! A device's own link and the NIC beside it are two ways in, and the only ones.

use std::collections::BTreeMap;

use crate::id::{HostId, PortId, Rank};

use super::super::assign::{Candidate, Job, least_time};
use super::super::demand::Demands;
use super::super::problem::Problem;
use super::messages::{Need, Parts};
use super::{Bound, at_rate};

/// Cuts times classes: beyond, cuts are left out. The bound is then lower, and true.
const MAX_WORK: usize = 1 << 19;

/// The worst of them, where it is worse than `floor_s`.
pub(super) fn joint_bound(problem: &Problem, demands: &Demands, floor_s: f64) -> Option<Bound> {
    let mut worst = devices_in(problem, demands).filter(|b| b.seconds > floor_s);
    let cuts = Cut::all(problem);
    let sums =
        demands.sum_classes.iter().map(|c| demands.sources[c.source as usize].parts.len()).sum::<usize>();
    if cuts.len() * (demands.remote.len() + sums) > MAX_WORK {
        return worst;
    }
    for cut in cuts {
        let so_far = worst.as_ref().map_or(floor_s, |b| b.seconds);
        worst = cut.bound(problem, demands, so_far).or(worst);
    }
    worst
}

/// Hosts as nodes, some of them together.
struct Cut {
    /// By host.
    node_of: Vec<u32>,
    out_rates: Vec<f64>,
    names: Vec<String>,
}

impl Cut {
    /// For every group: it alone taken apart, it alone put together, and it alone against everything else.
    fn all(problem: &Problem) -> Vec<Cut> {
        let mut cuts = vec![];
        for (t, tier) in problem.cluster.tiers.iter().enumerate() {
            for g in 0..tier.groups.len() as u32 {
                cuts.push(Cut::groups(problem, t, |other| other != g));
                cuts.push(Cut::groups(problem, t, |other| other == g));
                cuts.push(Cut::inside(problem, t, g));
            }
        }
        cuts
    }

    /// The groups of a tier that are `together` are one node each, all other hosts are nodes.
    fn groups(problem: &Problem, tier: usize, together: impl Fn(u32) -> bool) -> Cut {
        let (groups, name) = (&problem.cluster.tiers[tier].groups, &problem.cluster.tiers[tier].name);
        let mut cut = Cut { node_of: vec![], out_rates: vec![], names: vec![] };
        let mut node_of_group: Vec<Option<u32>> = vec![None; groups.len()];
        for (h, host) in problem.cluster.hosts.iter().enumerate() {
            let group = problem.topology.group(tier, HostId::at(h)).filter(|&g| together(g));
            let node = match group {
                Some(g) => *node_of_group[g as usize].get_or_insert_with(|| {
                    cut.add(groups[g as usize].out_bytes_per_s, format!("{name} {g}"))
                }),
                None => cut.add(host.out_bytes_per_s(), format!("h{h}")),
            };
            cut.node_of.push(node);
        }
        cut
    }

    /// The hosts of a group, and everything outside, which has to come through the group's uplink.
    fn inside(problem: &Problem, tier: usize, group: u32) -> Cut {
        let (groups, name) = (&problem.cluster.tiers[tier].groups, &problem.cluster.tiers[tier].name);
        let mut cut = Cut { node_of: vec![], out_rates: vec![], names: vec![] };
        let outside = cut.add(groups[group as usize].in_bytes_per_s, format!("into {name} {group},"));
        for (h, host) in problem.cluster.hosts.iter().enumerate() {
            let node = match problem.topology.group(tier, HostId::at(h)) == Some(group) {
                true => cut.add(host.out_bytes_per_s(), format!("h{h}")),
                false => outside,
            };
            cut.node_of.push(node);
        }
        cut
    }

    fn add(&mut self, rate: f64, name: String) -> u32 {
        self.out_rates.push(rate);
        self.names.push(name);
        self.out_rates.len() as u32 - 1
    }

    /// What has to leave one of some nodes; classes that the same nodes hold are one. Parts of a sum that different nodes hold leave in
    /// different messages; a node with all of them has the sum.
    fn jobs(&self, problem: &Problem, demands: &Demands) -> Vec<Job> {
        let mut bytes: BTreeMap<Vec<u32>, u64> = BTreeMap::new();
        let nodes = |ranks: &[Rank]| {
            let host = |r: &Rank| self.node_of[problem.topology.host(*r).index()];
            let mut nodes: Vec<u32> = ranks.iter().map(host).collect();
            nodes.sort_unstable();
            nodes.dedup();
            nodes
        };
        let parts =
            demands.sources.iter().map(|s| Parts::of(s.parts.iter().map(|ranks| nodes(ranks)).collect()));
        let parts: Vec<Parts> = parts.collect();
        for class in &demands.sum_classes {
            let parts = &parts[class.source as usize];
            let mut receivers = nodes(demands.set(class.receivers));
            receivers.retain(|n| parts.complete.binary_search(n).is_err());
            if receivers.is_empty() {
                continue;
            }
            let need = Need::of_sum(class.bytes, parts, receivers);
            need.leaving_alone().for_each(|node| *bytes.entry(vec![node]).or_default() += class.bytes);
            need.leaving_groups().for_each(|group| *bytes.entry(group.to_vec()).or_default() += class.bytes);
        }
        for class in &demands.remote {
            let mut holders: Vec<u32> = class.holders.iter().map(|&h| self.node_of[h as usize]).collect();
            holders.sort_unstable();
            holders.dedup();
            let is_wanted = |&host: &u32| holders.binary_search(&self.node_of[host as usize]).is_err();
            if class.receivers.iter().any(is_wanted) {
                *bytes.entry(holders).or_default() += class.bytes;
            }
        }
        let candidate = |node| Candidate { node, preference: 0, most: u64::MAX };
        let job = |(nodes, bytes): (Vec<u32>, u64)| Job {
            bytes,
            candidates: nodes.into_iter().map(candidate).collect(),
        };
        bytes.into_iter().map(job).collect()
    }

    fn bound(&self, problem: &Problem, demands: &Demands, floor_s: f64) -> Option<Bound> {
        let jobs = self.jobs(problem, demands);
        let loads = vec![0; self.out_rates.len()];
        let (seconds, binding) = least_time(&jobs, &self.out_rates, &loads, floor_s);
        let rate: f64 = binding.iter().map(|&n| self.out_rates[n as usize]).sum();
        let names: Vec<&str> = binding.iter().map(|&n| self.names[n as usize].as_str()).collect();
        // A byte more or less is rounding.
        (!binding.is_empty() && seconds > floor_s + 2.0 / rate).then(|| {
            let reason = format!("{} out: {}", names.join(" "), at_rate((seconds * rate) as u64, rate));
            Bound { seconds, reason, ..Bound::default() }
        })
    }
}

/// What the devices beside a port want comes in through the port, or over their local links.
fn devices_in(problem: &Problem, demands: &Demands) -> Option<Bound> {
    let topology = &problem.topology;
    let mut set_bytes = vec![0u64; demands.sets.len()];
    demands.items.iter().for_each(|item| set_bytes[item.wanters as usize] += item.bytes);
    let mut wanted = vec![0u64; topology.num_ranks()];
    for (set, &bytes) in set_bytes.iter().enumerate().filter(|(_, b)| **b > 0) {
        demands.sets[set].iter().for_each(|rank| wanted[rank.index()] += bytes);
    }
    let local = |rank: Rank| problem.cluster.hosts[topology.host(rank).index()].local_bytes_per_s;
    let mut ports = vec![(0u64, 0.0); topology.ports.len()];
    let mut worst: Option<Bound> = None;
    let mut offer = |bytes: u64, rate: f64, name: &dyn Fn() -> String| {
        let seconds = bytes as f64 / rate;
        if worst.as_ref().is_none_or(|w| seconds > w.seconds) {
            let reason = format!("{} in, by NIC and local links: {}", name(), at_rate(bytes, rate));
            worst = Some(Bound { seconds, reason, ..Bound::default() });
        }
    };
    for (r, &bytes) in wanted.iter().enumerate() {
        let (rank, port) = (Rank::at(r), topology.port(Rank::at(r)));
        offer(bytes, local(rank) + topology.ports[port.index()].in_bytes_per_s, &|| rank.to_string());
        let (all, rate) = &mut ports[port.index()];
        (*all, *rate) = (*all + bytes, *rate + local(rank));
    }
    for (p, (bytes, rate)) in ports.into_iter().enumerate() {
        let rate = rate + topology.ports[p].in_bytes_per_s;
        offer(bytes, rate, &|| format!("the devices beside {}", PortId::at(p)));
    }
    worst
}

#[cfg(test)]
mod tests {
    use crate::cluster::Cluster;
    use crate::reshard::problem::Hosts;
    use crate::reshard::{Bound, Problem, lower_bound};

    fn bound(src: &str, dst: &str, cluster: &str) -> Bound {
        let cluster = Cluster::from_toml(cluster).unwrap();
        let pair = (String::new(), src.parse().unwrap(), dst.parse().unwrap());
        lower_bound(&Problem::new(vec![pair], Hosts::Described(cluster)).unwrap()).unwrap()
    }

    #[test]
    fn a_host_and_a_rack_together() {
        let cluster = "[[host]]\ncount = 6\ndevices = 1\nnic = \"10Gbit\"\n\
                       [[tier]]\nname = \"rack\"\nhosts_per_group = 3\noversubscription = 4\n";
        let b = bound("u8[35000000]@A{h:4}(_)", "u8[35000000]@B{h:2}(h)", cluster);
        assert!((b.seconds - 35e6 / (1.25e9 + 0.75 * 1.25e9)).abs() < 1e-6, "{b:?}");
        assert!(b.reason.contains("rack 0 h3 out"), "{b:?}");
    }

    /// Seven hosts can make the sum: those of two racks, and h6. Eight others want it, two of them beside h6; what h6 has no time for comes from
    /// the racks, which have as much to do as their uplinks can.
    #[test]
    fn sums_leave_hosts_and_racks_together() {
        let cluster = "[[host]]\ncount = 7\ndevices = 3\nnic = \"10Gbit\"\n\
                       [[host]]\ncount = 8\ndevices = 7\nnic = \"10Gbit\"\n\
                       [[tier]]\nname = \"rack\"\nhosts_per_group = 3\noversubscription = 1.5\n";
        let b = bound("f32[5600]@A{a:7,b:3}(_ | sum b)", "f32[5600]@B{a:8,b:7}(a+b)", cluster);
        assert!((b.seconds - 22400.0 / 6.25e9).abs() < 1e-11, "{b:?}");
        assert!(b.reason.starts_with("rack 0 rack 1 h6 out"), "{b:?}");
    }

    #[test]
    fn into_a_rack_and_inside_it() {
        // Three racks can send what one uplink cannot take.
        let cluster = "[[host]]\ncount = 8\ndevices = 1\nnic = \"10Gbit\"\n\
                       [[tier]]\nname = \"rack\"\nhosts_per_group = 4\nuplink = \"5Gbit\"\n";
        let b = bound("u8[30000000]@A{h:5}(_)", "u8[30000000]@B{h:3}(h)", cluster);
        assert!((b.seconds - 30e6 / (1.25e9 + 0.625e9)).abs() < 1e-6, "{b:?}");
    }

    #[test]
    fn a_device_has_two_ways_in() {
        let cluster = "[[host]]\ncount = 2\ndevices = 2\nnics = 2\nnic = \"10Gbit\"\nlocal = \"10Gbit\"\n";
        let b = bound("u8[40000000]@A{d:4}(d)", "u8[40000000]@A{d:4}(_)", cluster);
        // 30 MB over 20 Gbit/s; between hosts alone 20 MB over 20 Gbit/s, inside one 10 MB over 10 Gbit/s.
        assert!((b.seconds - 30e6 / 2.5e9).abs() < 1e-9, "{b:?}");
        assert!(b.reason.starts_with("r0 in, by NIC and local links"), "{b:?}");
    }
}
