//! `flow` against the bound on partial sums: the cases that once went wrong. Random ones are in `sum_sweep`.

use crossmesh_core::cluster::{Cluster, Host};
use crossmesh_core::reshard::problem::{Assumed, Hosts};
use crossmesh_core::reshard::{Plan, PlanOptions, Problem, lower, lower_bound, plan};
use crossmesh_core::sim::simulate;
use crossmesh_core::verify::verify;
use crossmesh_testkit::sweep;

fn problem(src: &str, dst: &str, devices_per_host: Option<u32>) -> Problem {
    let pair = (String::new(), src.parse().unwrap(), dst.parse().unwrap());
    Problem::new(vec![pair], Hosts::Assumed(Assumed { devices_per_host, ..Assumed::default() })).unwrap()
}

/// A verified plan and its predicted time over the bound.
fn flow(problem: &Problem) -> (Plan, f64) {
    let plan = plan(problem, &PlanOptions::default()).unwrap();
    verify(&plan).unwrap();
    let gap = ratio(problem, &plan);
    (plan, gap)
}

fn ratio(problem: &Problem, plan: &Plan) -> f64 {
    let bound = lower_bound(problem).unwrap();
    let seconds = simulate(&lower(plan), &problem.cluster).unwrap().makespan_s;
    if bound.seconds == 0.0 {
        assert_eq!(seconds, 0.0);
        return 1.0;
    }
    assert!(seconds >= bound.seconds * (1.0 - 1e-6), "{seconds} s beats {bound:?}");
    seconds / bound.seconds
}

/// Three hosts add up and idle ones beside them help. The bound says 4/3 of the tensor's time without, 8/7 with one and 1
/// with two of them; plans with helpers lie between.
#[test]
fn idle_hosts_help_to_add_up() {
    let mut before = f64::MAX;
    for (idle, most) in [(0, 1.335), (1, 1.29), (2, 1.29), (4, 1.29)] {
        let cluster = Cluster::of_hosts(vec![Host::with_devices(1); 3 + idle]);
        let layout = |split: &str| format!("f32[33554432]@A{{d:3}}({split})").parse().unwrap();
        let pair = (String::new(), layout("_ | sum d"), layout("_"));
        let problem = Problem::new(vec![pair], Hosts::Described(cluster)).unwrap();
        let bound = lower_bound(&problem).unwrap();
        let (plan, gap) = flow(&problem);
        let tensor_s = 4.0 * 33554432.0 / 1.25e9;
        let seconds = gap * bound.seconds / tensor_s;
        eprintln!("{idle} idle: bound {:.4}, predicted {seconds:.4}", bound.seconds / tensor_s);
        assert!(seconds <= most && seconds <= before * 1.001, "{idle} idle: {seconds}, {bound:?}");
        assert_eq!(plan.transfers().iter().any(|t| t.dst.index() >= 3), idle > 0, "{idle} idle");
        before = seconds;
    }
}

#[test]
fn a_sum_that_every_host_can_make_stays_there() {
    let problem = problem("f32[1048576]@A{h:2,d:2}(_ | sum d)", "f32[1048576]@A{h:2,d:2}(_)", None);
    let (plan, gap) = flow(&problem);
    assert!(plan.transfers().iter().all(|t| !plan.crosses_hosts(t)));
    assert!(gap <= 1.02, "{gap}");
}

#[test]
fn gradients_of_64_devices_reach_four_replicas() {
    let problem =
        problem("bf16[8192,8192]@T{fsdp:64}(_,_ | sum fsdp)", "bf16[8192,8192]@I{dp:4,tp:8}(tp,_)", Some(8));
    let gap = flow(&problem).1;
    assert!(gap <= 1.02, "{gap}");
}

#[test]
fn long_chains_fill_fast() {
    for devices in [64, 128, 256, 1024] {
        let src = format!("f32[16777216]@A{{d:{devices}}}(_ | sum d)");
        let gap = flow(&problem(&src, "f32[16777216]@B{d:8}(d)", Some(8))).1;
        eprintln!("{devices} devices: {gap:.4}");
        assert!(gap <= 1.02, "{devices} devices: {gap}");
    }
}

/// A larger limit never refuses what a smaller one allows, every plan keeps to its limit, and the hint is true.
#[test]
fn limits_are_monotone_and_hints_true() {
    use crossmesh_core::reshard::PlanError;
    use crossmesh_testkit::seed::{Seed, Shape, problem};
    let case = |src: &str, dst: &str| self::problem(src, dst, Some(2));
    let mut problems = vec![
        case("f32[128,128]@A{h:2}(_,_ | max h)", "f32[128,128]@B{h:2}(h,_)"),
        case("f32[32,32]@A{h:4}(_,_ | sum h)", "f32[32,32]@B{x:1}(_,_)"),
        case("f32[999]@A{h:5}(_ | sum h)", "f32[999]@B{x:3}(x)"),
    ];
    let shape = Shape { hosts: 3, devices: 3, dims: 2, dim_len: 30, tensors: 2, partial: true };
    let sums = (0..).map(|seed| problem(seed, shape));
    let sums = sums.filter(|p| p.reshards.iter().any(|r| r.src.layout.num_contributions() > 1));
    problems.extend(sums.take(sweep::count(120)));
    let (mut planned, mut refused) = (0, 0);
    for (p, problem) in problems.iter().enumerate() {
        let mut seed = Seed(p as u64);
        let mut limits: Vec<u64> = (0..6).map(|_| seed.draw() % (2 << seed.below(14))).collect();
        limits.extend([0, 256, 1000, 10_000]);
        limits.sort_unstable();
        let mut allowed = false;
        for limit in limits {
            let with = |limit| {
                plan(problem, &PlanOptions { max_extra_bytes: Some(limit), ..PlanOptions::default() })
            };
            let hint = match with(limit) {
                Ok(plan) => {
                    let proof = verify(&plan).unwrap_or_else(|e| panic!("problem {p} with {limit} B: {e}"));
                    assert!(proof.peak_extra_bytes <= limit, "problem {p}: {proof} under {limit} B");
                    (allowed, planned) = (true, planned + 1);
                    continue;
                }
                Err(PlanError::OverBudget { needed, .. }) => needed,
                Err(error) => panic!("problem {p} with {limit} B: {error}"),
            };
            refused += 1;
            assert!(!allowed, "problem {p} is refused with {limit} B, and not with less");
            assert!(hint > limit, "problem {p} with {limit} B: the hint says {hint} B");
            assert!(
                with(hint).is_ok(),
                "problem {p}: the hint {hint} B does not work: {:?}",
                with(hint).err()
            );
        }
    }
    eprintln!("{planned} planned, {refused} refused with a hint that works");
    assert!(planned > problems.len() && refused > problems.len() / 4);
}

/// Pieces are put together: 512 devices on 64 hosts, and 4,096 on 512, which would take 16 million transfers one by one.
#[test]
fn reduce_scatters_over_very_many_devices_take_few_transfers() {
    let over = |n: u32| {
        problem(
            &format!("f32[{n},4096]@A{{d:{n}}}(_,_ | sum d)"),
            &format!("f32[{n},4096]@A{{d:{n}}}(d,_)"),
            Some(8),
        )
    };
    let (plan, gap) = flow(&over(512));
    eprintln!("512 devices: {gap:.4} x the bound, {} transfers", plan.transfers().len());
    assert!(gap <= 1.10, "{gap}");
    let large = over(4096);
    let plan = crossmesh_core::reshard::plan(&large, &PlanOptions::default()).unwrap();
    eprintln!("4096 devices: {} transfers", plan.transfers().len());
    assert!(plan.transfers().len() < 1_000_000);
}
