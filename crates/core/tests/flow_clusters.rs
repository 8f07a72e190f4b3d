//! `flow` on clusters of every kind: many NICs, unequal rates, racks, latency. Every plan is verified, and how far it
//! is from the bound is held to what it is today.

use crossmesh_core::cluster::{Cluster, Group, Host, Tier};
use crossmesh_core::id::HostId;
use crossmesh_core::reshard::problem::Hosts;
use crossmesh_core::reshard::{PlanOptions, Problem, lower, lower_bound, plan};
use crossmesh_core::sim::simulate;
use crossmesh_core::verify::verify;
use crossmesh_testkit::big;
use crossmesh_testkit::seed::Seed;

/// Mean and worst of predicted over bound, on a hundred large reshards whose cluster has been changed.
fn gaps(change: impl Fn(&mut Seed, &mut Cluster)) -> (f64, f64) {
    let mut gaps = vec![];
    for seed in 0..100 {
        let (src, dst) = big::pair(seed);
        let pair = || (String::new(), src.parse().unwrap(), dst.parse().unwrap());
        let mut cluster = Problem::new(vec![pair()], Hosts::default()).unwrap().cluster;
        change(&mut Seed(seed), &mut cluster);
        let problem = Problem::new(vec![pair()], Hosts::Described(cluster)).unwrap();
        let bound = lower_bound(&problem).unwrap().seconds;
        let plan = plan(&problem, &PlanOptions::default()).unwrap();
        verify(&plan).unwrap_or_else(|error| panic!("seed {seed}: {src} -> {dst}: {error}"));
        if bound > 0.0 {
            let seconds = simulate(&lower(&plan), &problem.cluster).unwrap().makespan_s;
            assert!(seconds >= bound * (1.0 - 1e-6), "seed {seed}: {src} -> {dst} beats the bound");
            gaps.push(seconds / bound);
        }
    }
    (gaps.iter().sum::<f64>() / gaps.len() as f64, gaps.iter().copied().fold(0.0, f64::max))
}

#[track_caller]
fn at_most((mean, worst): (f64, f64), most_mean: f64, most: f64) {
    eprintln!("mean {mean:.4}, worst {worst:.4}");
    assert!(mean <= most_mean && worst <= most, "mean {mean:.4}, worst {worst:.4}");
}

fn each_host(change: impl Fn(&mut Seed, &mut Host)) -> impl Fn(&mut Seed, &mut Cluster) {
    move |seed, cluster| cluster.hosts.iter_mut().for_each(|host| change(seed, host))
}

#[test]
fn unequal_rates() {
    let change = each_host(|seed, host| {
        host.nic_in_bytes_per_s *= 1.0 + seed.below(4) as f64;
        host.nic_out_bytes_per_s *= 1.0 + seed.below(4) as f64;
    });
    at_most(gaps(change), 1.001, 1.02);
}

#[test]
fn a_nic_per_device() {
    // Local links are no more than twice as fast as all NICs together.
    let change = each_host(|_, host| (host.nics, host.local_bytes_per_s) = (host.devices, 20e9));
    at_most(gaps(change), 1.005, 1.08);
}

#[test]
fn some_nics() {
    let change = each_host(|seed, host| {
        host.nics = 1 + seed.below(host.devices as usize) as u32;
        host.local_bytes_per_s = 20e9;
    });
    // The bound lets hosts help that have nothing to do with a tensor; `flow` does not ask them. Without them: 1.08.
    at_most(gaps(change), 1.005, 1.10);
}

#[test]
fn latency() {
    let change =
        |_: &mut Seed, cluster: &mut Cluster| (cluster.latency_s, cluster.local_latency_s) = (20e-6, 2e-6);
    at_most(gaps(change), 1.01, 1.1);
}

#[test]
fn messages_that_cost() {
    let change = |_: &mut Seed, cluster: &mut Cluster| {
        (cluster.message_s, cluster.local_message_s) = (5e-6, 1e-6);
    };
    at_most(gaps(change), 1.02, 1.15);
}

#[test]
fn racks_of_two_with_narrow_uplinks() {
    let change = |_: &mut Seed, cluster: &mut Cluster| {
        let hosts: Vec<HostId> = (0..cluster.hosts.len()).map(HostId::at).collect();
        let group = |hosts: &[HostId]| {
            let rate = 1.25e9 * hosts.len() as f64 / 1.5;
            Group { hosts: hosts.to_vec(), out_bytes_per_s: rate, in_bytes_per_s: rate }
        };
        cluster.tiers.push(Tier { name: "rack".into(), groups: hosts.chunks(2).map(group).collect() });
    };
    at_most(gaps(change), 1.003, 1.02);
}
