//! Which hosts add up on the way to a host far away, where uplinks are in the way.
//!
//! A star sends what every host has to everybody who wants it. Where hosts share an uplink that carries less than their NICs
//! together, those of a group add up along a chain first, so that one copy leaves the group, or as many as its uplink has
//! time for:
//!
//! ```text
//! group h0 h1 h2   wanted on h3   h0 -> h1 -> h2 -> h3        every host still sends one box and takes in one, but the first
//!                  wanted on h4   h1 -> h2 -> h0 -> h4        of a chain, whose turn it is; over the uplink go one box each
//! ```
//!
//! Only groups of the outermost tier add up: inner ones of theirs are passed through in the order of hosts, once each way.

use std::collections::BTreeMap;

use crate::cluster::{Cluster, Group, Host, Topology};
use crate::id::HostId;

/// How much of their time uplinks may be given to do.
const UPLINK_SHARE: f64 = 0.9;

/// Hosts, each of which adds what it has to what the one before it sends.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Chain {
    /// By their places in a list.
    pub hosts: Vec<usize>,
    /// Whether who wants it is in another group.
    pub leaves_group: bool,
}

/// For every host of a list the chains that bring it what all others have, in the order in which they arrive. All hosts
/// begin with other neighbours, so that in every step each sends to one and takes in from one.
pub(super) fn chains(hosts: &[HostId], cluster: &Cluster, topology: &Topology) -> Vec<Vec<Chain>> {
    let groups = Groups::of(hosts, cluster, topology);
    (0..hosts.len()).map(|to| groups.chains_to(to)).collect()
}

/// Hosts below one uplink, in the order of the list.
struct Groups {
    members: Vec<Vec<usize>>,
    /// How many copies an uplink has time for.
    copies: Vec<usize>,
    /// By place in the list.
    of: Vec<usize>,
}

impl Groups {
    fn of(hosts: &[HostId], cluster: &Cluster, topology: &Topology) -> Self {
        let outermost = topology.num_tiers().checked_sub(1);
        let group = |host: HostId| outermost.and_then(|tier| topology.group(tier, host));
        let mut numbers: BTreeMap<(bool, u32), usize> = BTreeMap::new();
        let mut groups = Self { members: vec![], copies: vec![], of: vec![] };
        for (place, &host) in hosts.iter().enumerate() {
            let key = group(host).map_or((false, host.0), |g| (true, g));
            let number = *numbers.entry(key).or_insert(groups.members.len());
            if number == groups.members.len() {
                groups.members.push(vec![]);
            }
            groups.members[number].push(place);
            groups.of.push(number);
        }
        for members in &groups.members {
            let uplink = outermost.zip(group(hosts[members[0]]));
            let uplink = uplink.map(|(tier, g)| &cluster.tiers[tier].groups[g as usize]);
            let nics: Vec<&Host> = members.iter().map(|&m| &cluster.hosts[hosts[m].index()]).collect();
            groups.copies.push(uplink.map_or(1, |uplink| copies(uplink, &nics)));
        }
        groups
    }

    fn chains_to(&self, to: usize) -> Vec<Chain> {
        let own = self.of[to];
        let count = self.members.len();
        let others = (1..count).map(|step| (own + step) % count);
        let mut chains: Vec<Chain> = others.flat_map(|group| self.chains_of(group, to)).collect();
        // Nothing of these goes over an uplink.
        let own = &self.members[own];
        let place = own.iter().position(|&p| p == to).unwrap_or(0);
        let neighbours = (1..own.len()).map(|step| own[(place + step) % own.len()]);
        chains.extend(neighbours.map(|host| Chain { hosts: vec![host], leaves_group: false }));
        chains
    }

    /// A group's hosts in as many chains as its uplink has time for. Who begins, and who sends the sum away, takes turns.
    fn chains_of(&self, group: usize, to: usize) -> Vec<Chain> {
        let members = &self.members[group];
        let copies = self.copies[group].min(members.len());
        let mut turned = members.clone();
        turned.rotate_left(to % members.len());
        let ends = (0..=copies).map(|c| c * members.len() / copies);
        let ends: Vec<usize> = ends.collect();
        let hosts = ends.windows(2).map(|w| turned[w[0]..w[1]].to_vec());
        hosts.map(|hosts| Chain { hosts, leaves_group: true }).collect()
    }
}

/// How many copies of what hosts add up their uplink has time for while each of them sends one: as if all were as fast as the
/// fastest of them.
fn copies(uplink: &Group, hosts: &[&Host]) -> usize {
    let fastest = |rate: fn(&Host) -> f64| hosts.iter().map(|h| rate(h)).fold(0.0, f64::max);
    let out = uplink.out_bytes_per_s / fastest(Host::out_bytes_per_s);
    let into = uplink.in_bytes_per_s / fastest(Host::in_bytes_per_s);
    ((UPLINK_SHARE * out.min(into)) as usize).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Tier;

    /// `count` hosts in racks of `size`, whose uplinks carry so many NICs' worth.
    fn racks(count: usize, size: usize, nics: f64) -> Vec<Vec<Chain>> {
        let mut cluster = Cluster::of_hosts(vec![Host::with_devices(1); count]);
        let hosts: Vec<HostId> = (0..count).map(HostId::at).collect();
        let rate = nics * cluster.hosts[0].out_bytes_per_s();
        let group =
            |hosts: &[HostId]| Group { hosts: hosts.to_vec(), out_bytes_per_s: rate, in_bytes_per_s: rate };
        cluster.tiers.push(Tier { name: "rack".into(), groups: hosts.chunks(size).map(group).collect() });
        let topology = Topology::new(&cluster);
        chains(&hosts, &cluster, &topology)
    }

    #[test]
    fn every_other_host_is_in_one_chain() {
        for (count, size, nics) in [(7, 3, 2.0), (8, 4, 3.0), (9, 2, 1.0), (5, 5, 1.0), (12, 4, 9.0)] {
            for (to, chains) in racks(count, size, nics).into_iter().enumerate() {
                let mut all: Vec<usize> = chains.into_iter().flat_map(|c| c.hosts).chain([to]).collect();
                all.sort_unstable();
                assert_eq!(all, (0..count).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn uplinks_carry_what_they_have_time_for() {
        let lengths = |nics| -> Vec<usize> { racks(12, 4, nics)[0].iter().map(|c| c.hosts.len()).collect() };
        assert_eq!(lengths(1.0), [4, 4, 1, 1, 1]);
        assert_eq!(lengths(2.7), [2, 2, 2, 2, 1, 1, 1]);
        assert_eq!(lengths(5.0), [1; 11]);
    }

    #[test]
    fn everybody_begins_and_ends_chains_as_often_as_others() {
        let all: Vec<Chain> = racks(12, 4, 1.0).into_iter().flatten().filter(|c| c.leaves_group).collect();
        for host in 0..12 {
            let count = |of: fn(&[usize]) -> Option<&usize>| {
                all.iter().filter(|c| of(&c.hosts) == Some(&host)).count()
            };
            assert_eq!((count(<[usize]>::first), count(<[usize]>::last)), (2, 2));
        }
    }

    /// One copy less for a NIC that is faster than the first.
    #[test]
    fn the_fastest_of_a_group_says_what_an_uplink_has_time_for() {
        let mut hosts = vec![Host::with_devices(1); 3];
        let nic = hosts[0].out_bytes_per_s();
        hosts[2].nic_out_bytes_per_s *= 2.0;
        let group = Group { hosts: vec![], out_bytes_per_s: 2.5 * nic, in_bytes_per_s: 2.5 * nic };
        assert_eq!(copies(&group, &[&hosts[0], &hosts[1]]), 2);
        assert_eq!(copies(&group, &hosts.iter().collect::<Vec<_>>()), 1);
    }
}
