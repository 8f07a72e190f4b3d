//! `flow` against the bound on large random reshards.

use crossmesh_core::reshard::{PlanOptions, Problem, lower, lower_bound, plan};
use crossmesh_core::sim::simulate;
use crossmesh_testkit::big;

/// Predicted time over the bound, for one seed.
fn gap(seed: u64) -> f64 {
    let (src, dst) = big::pair(seed);
    let problem = Problem::pair(src.parse().unwrap(), dst.parse().unwrap()).unwrap();
    let bound = lower_bound(&problem).unwrap();
    let plan = plan(&problem, &PlanOptions::default()).unwrap();
    let trace = simulate(&lower(&plan), &problem.cluster).unwrap();
    if bound.seconds == 0.0 {
        assert!(plan.transfers().is_empty(), "{src} -> {dst} moves although it need not");
        return 1.0;
    }
    let gap = trace.makespan_s / bound.seconds;
    assert!(gap > 1.0 - 1e-6, "{src} -> {dst} beats the bound: {gap}");
    assert!(gap <= 1.05, "seed {seed}: {src} -> {dst} takes {gap:.4} times the bound ({})", bound.reason);
    gap
}

#[test]
fn a_thousand_large_reshards_are_at_the_bound() {
    let gaps: Vec<f64> = (0..1000).map(gap).collect();
    let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
    let worst = gaps.iter().copied().fold(0.0, f64::max);
    eprintln!("flow over the bound: mean {mean:.5}, worst {worst:.5}");
    assert!(mean <= 1.01, "mean {mean}");
}
