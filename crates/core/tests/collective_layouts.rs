//! Collectives are pairs of layouts on one mesh: `flow` plans them at the bound.

use crossmesh_core::reshard::problem::{Assumed, Hosts};
use crossmesh_core::reshard::{PlanOptions, Problem, lower, lower_bound, plan};
use crossmesh_core::sim::simulate;
use crossmesh_core::verify::verify;

/// What plans are held to, with 64 MiB on every device.
const MOST: f64 = 1.02;

/// Predicted time over the bound, of a verified plan.
fn gap(src: &str, dst: &str, devices_per_host: u32) -> f64 {
    let pair = (String::new(), src.parse().unwrap(), dst.parse().unwrap());
    let assumed = Assumed { devices_per_host: Some(devices_per_host), ..Assumed::default() };
    let problem = Problem::new(vec![pair], Hosts::Assumed(assumed)).unwrap();
    let plan = plan(&problem, &PlanOptions::default()).unwrap();
    verify(&plan).unwrap();
    let seconds = simulate(&lower(&plan), &problem.cluster).unwrap().makespan_s;
    let bound = lower_bound(&problem).unwrap();
    assert!(seconds >= bound.seconds * (1.0 - 1e-6), "{src} -> {dst}: {seconds} s beats {bound:?}");
    seconds / bound.seconds
}

/// Holds a collective to the bound on 2 to 64 devices, on hosts of 1, 4 and 8.
fn hold(name: &str, layouts: impl Fn(u32) -> (String, String)) {
    let mut failures = vec![];
    for devices_per_host in [1, 4, 8] {
        for devices in [2, 3, 4, 6, 8, 16, 32, 64] {
            let (src, dst) = layouts(devices);
            let gap = gap(&src, &dst, devices_per_host);
            eprintln!("{name}, {devices} devices on hosts of {devices_per_host}: {gap:.4}");
            if gap > MOST {
                failures.push(format!("{src} -> {dst} on hosts of {devices_per_host}: {gap:.4}"));
            }
        }
    }
    assert!(failures.is_empty(), "above {MOST}:\n{}", failures.join("\n"));
}

#[test]
fn all_reduce() {
    let layout = |n: u32, split: &str| format!("f32[16777216]@A{{d:{n}}}({split})");
    hold("all-reduce", |n| (layout(n, "_ | sum d"), layout(n, "_")));
}

#[test]
fn reduce_scatter() {
    let layout = |n: u32, split: &str| format!("f32[16777216]@A{{d:{n}}}({split})");
    hold("reduce-scatter", |n| (layout(n, "_ | sum d"), layout(n, "d")));
}

#[test]
fn all_gather() {
    let layout = |n: u32, split: &str| format!("f32[16777216]@A{{d:{n}}}({split})");
    hold("all-gather", |n| (layout(n, "d"), layout(n, "_")));
}

#[test]
fn all_to_all() {
    let layout = |n: u32, split: &str| format!("f32[4096,4096]@A{{d:{n}}}({split})");
    hold("all-to-all", |n| (layout(n, "d,_"), layout(n, "_,d")));
}
