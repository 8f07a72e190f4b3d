//! `flow` over the bound by class of cluster: random reshards of 64 MiB and more, each planned, verified and simulated.
//!
//! `CROSSMESH_SWEEP=2000 cargo test --release -p crossmesh-core --test flow_sweep` runs that many of each class; by
//! default a few.

use crossmesh_core::cluster::{Cluster, Group, Host, Tier};
use crossmesh_core::id::HostId;
use crossmesh_core::reshard::problem::Hosts;
use crossmesh_core::reshard::{PlanOptions, Problem, lower, lower_bound, plan};
use crossmesh_core::sim::simulate;
use crossmesh_core::verify::verify;
use crossmesh_testkit::seed::Seed;
use crossmesh_testkit::{big, sweep};

/// What every class is held to.
const MOST_MEAN: f64 = 1.02;
const MOST: f64 = 1.10;

/// One reshard on a cluster of the class: predicted over bound, or none where nothing has to move.
fn gap(seed: u64, change: &impl Fn(&mut Seed, &mut Cluster)) -> Option<f64> {
    let (src, dst) = big::pair(seed);
    let pair = || (String::new(), src.parse().unwrap(), dst.parse().unwrap());
    let mut cluster = Problem::new(vec![pair()], Hosts::default()).unwrap().cluster;
    change(&mut Seed(seed ^ 0x5eed), &mut cluster);
    let problem = Problem::new(vec![pair()], Hosts::Described(cluster)).unwrap();
    let bound = lower_bound(&problem).unwrap();
    let plan = plan(&problem, &PlanOptions::default()).unwrap();
    verify(&plan).unwrap_or_else(|error| panic!("seed {seed}: {src} -> {dst}: {error}"));
    if bound.seconds == 0.0 {
        assert!(plan.transfers().is_empty(), "seed {seed}: {src} -> {dst} moves although it need not");
        return None;
    }
    let trace = simulate(&lower(&plan), &problem.cluster).unwrap();
    let gap = trace.makespan_s / bound.seconds;
    assert!(gap >= 1.0 - 1e-6, "seed {seed}: {src} -> {dst} beats the bound: {gap}");
    if gap > MOST_MEAN {
        let busiest = trace.links.iter().map(|l| l.bytes as f64 / l.bytes_per_s).fold(0.0, f64::max);
        eprintln!(
            "seed {seed}: {gap:.4}, the busiest link {:.4}: '{src}' '{dst}' ({})",
            busiest / bound.seconds,
            bound.reason
        );
    }
    Some(gap)
}

#[track_caller]
fn hold(class: &str, change: impl Fn(&mut Seed, &mut Cluster)) {
    let count = sweep::count(40) as u64;
    let gaps: Vec<f64> = (0..count).filter_map(|seed| gap(seed, &change)).collect();
    let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
    let worst = gaps.iter().copied().fold(0.0, f64::max);
    eprintln!("{class}: mean {mean:.4}, worst {worst:.4} over {} problems", gaps.len());
    assert!(mean <= MOST_MEAN && worst <= MOST, "{class}: mean {mean:.4}, worst {worst:.4}");
}

fn each_host(change: impl Fn(&mut Seed, &mut Host)) -> impl Fn(&mut Seed, &mut Cluster) {
    move |seed, cluster| cluster.hosts.iter_mut().for_each(|host| change(seed, host))
}

/// Local links that are `factor` times as fast as all NICs of the host together.
fn local_links(host: &mut Host, factor: f64) {
    host.local_bytes_per_s = factor * host.out_bytes_per_s();
}

#[test]
fn one_nic_a_host() {
    hold("one NIC a host", |_, _| {});
}

#[test]
fn a_nic_per_device_local_links_2x() {
    let change = each_host(|_, host| {
        host.nics = host.devices;
        local_links(host, 2.0);
    });
    hold("a NIC per device, local links 2 x", change);
}

#[test]
fn a_nic_per_device_local_links_9x() {
    let change = each_host(|_, host| {
        host.nics = host.devices;
        local_links(host, 9.0);
    });
    hold("a NIC per device, local links 9 x", change);
}

#[test]
fn four_nics_a_host() {
    let change = each_host(|seed, host| {
        host.nics = 4;
        let factor = seed.pick(&[2.0, 9.0, 20.0]);
        local_links(host, factor);
    });
    hold("four NICs a host", change);
}

/// Racks of two to four hosts, whose uplinks carry what their hosts' NICs do, over `oversubscription`.
fn racks(oversubscription: f64) -> impl Fn(&mut Seed, &mut Cluster) {
    move |seed, cluster| {
        let size = 2 + seed.below(3);
        let hosts: Vec<HostId> = (0..cluster.hosts.len()).map(HostId::at).collect();
        let group = |hosts: &[HostId]| {
            let rate = 1.25e9 * hosts.len() as f64 / oversubscription;
            Group { hosts: hosts.to_vec(), out_bytes_per_s: rate, in_bytes_per_s: rate }
        };
        cluster.tiers.push(Tier { name: "rack".into(), groups: hosts.chunks(size).map(group).collect() });
    }
}

#[test]
fn racks_oversubscribed_1_5x() {
    hold("racks oversubscribed 1.5 x", racks(1.5));
}

#[test]
fn racks_oversubscribed_4x() {
    hold("racks oversubscribed 4 x", racks(4.0));
}
