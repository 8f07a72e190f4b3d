//! Classes of clusters that plans are held against the bound on: how NICs, local links and racks are laid out.

use crossmesh_core::cluster::{Cluster, Group, Host, Tier};
use crossmesh_core::id::HostId;

use crate::seed::Seed;

/// A class: what it is called, and how a cluster of assumed hosts is changed into one of it.
#[derive(Debug, Clone, Copy)]
pub struct Class {
    pub name: &'static str,
    pub change: fn(&mut Seed, &mut Cluster),
}

pub const ONE_NIC: Class = Class { name: "one NIC a host", change: |_, _| {} };

pub const NIC_PER_DEVICE_2X: Class = Class {
    name: "a NIC per device, local links 2 x",
    change: |_, cluster| each_host(cluster, |host| nic_per_device(host, 2.0)),
};

pub const NIC_PER_DEVICE_9X: Class = Class {
    name: "a NIC per device, local links 9 x",
    change: |_, cluster| each_host(cluster, |host| nic_per_device(host, 9.0)),
};

pub const FOUR_NICS: Class = Class {
    name: "four NICs a host",
    change: |seed, cluster| {
        each_host(cluster, |host| {
            host.nics = 4;
            let factor = seed.pick(&[2.0, 9.0, 20.0]);
            local_links(host, factor);
        });
    },
};

pub const RACKS_1_5X: Class =
    Class { name: "racks oversubscribed 1.5 x", change: |seed, cluster| racks(seed, cluster, 1.5) };

pub const RACKS_4X: Class =
    Class { name: "racks oversubscribed 4 x", change: |seed, cluster| racks(seed, cluster, 4.0) };

fn each_host(cluster: &mut Cluster, change: impl FnMut(&mut Host)) {
    cluster.hosts.iter_mut().for_each(change);
}

fn nic_per_device(host: &mut Host, factor: f64) {
    host.nics = host.devices;
    local_links(host, factor);
}

/// Local links that are `factor` times as fast as all NICs of the host together.
fn local_links(host: &mut Host, factor: f64) {
    host.local_bytes_per_s = factor * host.out_bytes_per_s();
}

/// Racks of two to four hosts, whose uplinks carry what their hosts' NICs do, over `oversubscription`.
fn racks(seed: &mut Seed, cluster: &mut Cluster, oversubscription: f64) {
    let size = 2 + seed.below(3);
    let hosts: Vec<HostId> = (0..cluster.hosts.len()).map(HostId::at).collect();
    let group = |hosts: &[HostId]| {
        let rate = 1.25e9 * hosts.len() as f64 / oversubscription;
        Group { hosts: hosts.to_vec(), out_bytes_per_s: rate, in_bytes_per_s: rate }
    };
    cluster.tiers.push(Tier { name: "rack".into(), groups: hosts.chunks(size).map(group).collect() });
}

/// A command that plans the same: the cluster as a file that the shell makes on the way.
pub fn command(src: &str, dst: &str, cluster: &Cluster) -> String {
    format!("crossmesh explain '{src}' '{dst}' --cluster <(echo '{}')", toml(cluster))
}

/// A cluster of the classes above as a cluster file.
fn toml(cluster: &Cluster) -> String {
    let mut lines = vec![];
    for alike in cluster.hosts.chunk_by(|a, b| a == b) {
        let Host { devices, nics, local_bytes_per_s, .. } = alike[0];
        let local = format!("{}GB/s", local_bytes_per_s / 1e9);
        let count = alike.len();
        lines.push(format!(
            "[[host]]\ncount = {count}\ndevices = {devices}\nnics = {nics}\nlocal = \"{local}\""
        ));
    }
    for tier in &cluster.tiers {
        let first = &tier.groups[0];
        let nics: f64 = first.hosts.iter().map(|h| cluster.hosts[h.index()].out_bytes_per_s()).sum();
        let (size, over) = (first.hosts.len(), nics / first.out_bytes_per_s);
        lines.push(format!(
            "[[tier]]\nname = \"{}\"\nhosts_per_group = {size}\noversubscription = {over}",
            tier.name
        ));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_as_a_file_is_the_same_cluster() {
        for class in [ONE_NIC, NIC_PER_DEVICE_2X, NIC_PER_DEVICE_9X, FOUR_NICS, RACKS_1_5X, RACKS_4X] {
            let mut cluster = Cluster::of_hosts(vec![Host::with_devices(4); 5]);
            cluster.hosts.push(Host::with_devices(3));
            (class.change)(&mut Seed(7), &mut cluster);
            let read = Cluster::from_toml(&toml(&cluster)).unwrap();
            assert_eq!(read.hosts, cluster.hosts, "{}", class.name);
            let uplinks = |c: &Cluster| -> Vec<(usize, u64)> {
                let groups = c.tiers.iter().flat_map(|t| &t.groups);
                groups.map(|g| (g.hosts.len(), g.out_bytes_per_s.round() as u64)).collect()
            };
            assert_eq!(uplinks(&read), uplinks(&cluster), "{}", class.name);
        }
    }
}
