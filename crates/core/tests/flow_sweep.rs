//! `flow` over the bound by class of cluster: random reshards of 64 MiB and more, each planned, verified and simulated.
//!
//! `CROSSMESH_SWEEP=2000 cargo test --release -p crossmesh-core --test flow_sweep` runs that many of each class; by
//! default a few. `sum_sweep` does the same for partial sums.

use crossmesh_testkit::classes::{self, Class};
use crossmesh_testkit::{big, gaps};

/// What every class is held to.
const MOST_MEAN: f64 = 1.02;
const MOST: f64 = 1.10;

#[track_caller]
fn hold(class: Class) {
    let seen = gaps::sweep(class, big::pair, 40, MOST_MEAN, 1);
    let (mean, worst) = (seen.mean(), seen.worst().over);
    eprintln!("{}", seen.row(class));
    assert!(mean <= MOST_MEAN && worst <= MOST, "{}: mean {mean:.4}, worst {worst:.4}", class.name);
}

#[test]
fn one_nic_a_host() {
    hold(classes::ONE_NIC);
}

#[test]
fn a_nic_per_device_local_links_2x() {
    hold(classes::NIC_PER_DEVICE_2X);
}

#[test]
fn a_nic_per_device_local_links_9x() {
    hold(classes::NIC_PER_DEVICE_9X);
}

#[test]
fn four_nics_a_host() {
    hold(classes::FOUR_NICS);
}

#[test]
fn racks_oversubscribed_1_5x() {
    hold(classes::RACKS_1_5X);
}

#[test]
fn racks_oversubscribed_4x() {
    hold(classes::RACKS_4X);
}
