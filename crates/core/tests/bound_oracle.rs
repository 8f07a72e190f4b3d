//! The bound against enumeration: every element, every set of nodes.

use crossmesh_core::reshard::lower_bound;
use crossmesh_testkit::cuts;
use crossmesh_testkit::seed::{Shape, problem};

/// Whole values, on up to 4 and 4 hosts, with rates that differ from host to host.
#[test]
fn the_bound_is_the_worst_set_of_nodes() {
    let shape = Shape { hosts: 4, devices: 3, dims: 2, dim_len: 9, tensors: 2, partial: false };
    let (mut checked, mut out_bound) = (0, 0);
    for seed in 0..400 {
        let mut problem = problem(seed, shape);
        if problem.cluster.hosts.len() > 12 {
            continue;
        }
        for (h, host) in problem.cluster.hosts.iter_mut().enumerate() {
            let slow = 1.0 + ((seed as usize + h) % 3) as f64;
            host.nic_out_bytes_per_s /= slow;
            host.nic_in_bytes_per_s /= 1.0 + (h % 2) as f64;
        }
        let bound = lower_bound(&problem).unwrap();
        let expected = cuts::bound_s(&problem);
        // Capacities are whole bytes, so tiny problems are off by a byte or so.
        let slack = 4.0 / 1.25e9 * 3.0;
        assert!(
            (bound.seconds - expected).abs() <= slack + 1e-9 * expected,
            "seed {seed}: {} s ({}), enumeration says {expected} s",
            bound.seconds,
            bound.reason
        );
        checked += usize::from(expected > 0.0);
        out_bound += usize::from(bound.reason.contains("out"));
    }
    assert!(checked >= 200, "only {checked} problems had anything to move");
    assert!(out_bound >= 20, "only {out_bound} problems were limited by sending");
}
