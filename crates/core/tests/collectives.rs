//! Collectives of random groups on random clusters, by every algorithm: proven, replayed element by element, and no
//! faster than the bound.

use crossmesh_core::cluster::{Cluster, Host};
use crossmesh_core::collective::{Algorithm, Call, Collective, CollectiveOptions, Counts, Group, plan};
use crossmesh_core::dtype::DType;
use crossmesh_core::id::Rank;
use crossmesh_core::layout::ReduceOp;
use crossmesh_core::reshard::{Plan, lower, lower_bound};
use crossmesh_core::sim::simulate;
use crossmesh_core::verify::verify;
use crossmesh_testkit::replay::{replay, run_program};
use crossmesh_testkit::seed::Seed;

fn random_cluster(seed: &mut Seed) -> Cluster {
    let host = |seed: &mut Seed| Host {
        nics: 1 + seed.below(2) as u32,
        ..Host::with_devices(1 + seed.below(3) as u32)
    };
    let hosts = (0..1 + seed.below(4)).map(|_| host(seed)).collect();
    Cluster { latency_s: 1e-6 * seed.below(100) as f64, ..Cluster::of_hosts(hosts) }
}

/// Some of the ranks, in some order.
fn random_group(seed: &mut Seed, ranks: usize) -> Group {
    let mut all: Vec<Rank> = (0..ranks).map(Rank::at).collect();
    for i in (1..ranks).rev() {
        all.swap(i, seed.below(i + 1));
    }
    all.truncate(1 + seed.below(ranks));
    if seed.one_in(2) {
        all.sort();
    }
    Group::new(all).unwrap()
}

fn random_call(seed: &mut Seed, group: &Group) -> Call {
    let collective = seed.pick(&Collective::ALL);
    let dtype = seed.pick(&[DType::F32, DType::F64, DType::Bf16, DType::F16, DType::I32, DType::I64]);
    let call = Call::new(collective, group, dtype, seed.below(30) as u64)
        .with_op(seed.pick(&ReduceOp::ALL))
        .with_root(seed.pick(group.ranks()));
    let uneven = seed.one_in(2);
    let mut counts = || (0..group.len()).map(|_| seed.below(5) as u64).collect::<Vec<u64>>();
    match collective {
        Collective::AllGather | Collective::ReduceScatter if uneven => {
            call.with_counts(Counts::PerRank(counts()))
        }
        Collective::AllToAll if uneven => {
            call.with_counts(Counts::PerPair((0..group.len()).map(|_| counts()).collect()))
        }
        _ => call,
    }
}

fn check(plan: &Plan, number: u64) {
    let layouts = plan.problem.reshards.iter().map(|r| format!("{} -> {}", r.src.layout, r.dst.layout));
    let context = format!("seed {number}, {}: {}", plan.strategy, layouts.collect::<Vec<_>>().join(", "));
    verify(plan).unwrap_or_else(|e| panic!("{context}: {e}"));
    let program = lower(plan);
    replay(plan, number).unwrap_or_else(|e| panic!("{context}: {e}"));
    run_program(plan, &program, number).unwrap_or_else(|e| panic!("{context}: {e}"));
    let seconds = simulate(&program, &plan.problem.cluster).unwrap().makespan_s;
    let bound = lower_bound(&plan.problem).unwrap().seconds;
    assert!(seconds >= bound * (1.0 - 1e-6), "{context}: {seconds} s beats the bound of {bound} s");
}

#[test]
fn every_algorithm_is_right() {
    let mut planned = [0; 7];
    for number in 0..400 {
        let mut seed = Seed(number);
        let cluster = random_cluster(&mut seed);
        let group = random_group(&mut seed, cluster.num_devices());
        let call = random_call(&mut seed, &group);
        for (i, algorithm) in Algorithm::CONCRETE.into_iter().chain([Algorithm::Auto]).enumerate() {
            for fixed_order in [false, true] {
                let in_order = fixed_order && call.order_matters();
                let options = CollectiveOptions { algorithm, fixed_order, ..Default::default() };
                match plan(std::slice::from_ref(&call), &cluster, &options) {
                    Ok(plan) => check(&plan, number),
                    Err(error) => {
                        assert!(!algorithm.can(call.collective, in_order), "seed {number}: {error}");
                        continue;
                    }
                }
                planned[i] += 1;
            }
        }
    }
    assert!(planned.iter().all(|n| *n > 100), "{planned:?}");
}

#[test]
fn several_groups_in_one_plan_are_right() {
    for number in 0..100 {
        let mut seed = Seed(number);
        let cluster = random_cluster(&mut seed);
        let calls: Vec<Call> = (0..1 + seed.below(3))
            .map(|_| {
                let group = random_group(&mut seed, cluster.num_devices());
                random_call(&mut seed, &group)
            })
            .collect();
        let options = CollectiveOptions { fixed_order: seed.one_in(2), ..Default::default() };
        check(&plan(&calls, &cluster, &options).unwrap(), number);
    }
}
