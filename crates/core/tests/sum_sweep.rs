//! `flow` over the bound on partial sums, by class of cluster: random sums of 64 MiB and more over 2 to 1,024 devices.
//!
//! `CROSSMESH_SWEEP=2000 cargo test --release -p crossmesh-core --test sum_sweep -- --nocapture` runs that many of each
//! class and prints a row of the table in docs/cost-model-and-bound.md for each; by default a few.

use crossmesh_testkit::classes::{self, Class};
use crossmesh_testkit::{big_sums, gaps};

/// What every class is to reach. The first few problems do, but for those with four NICs a host; of more of them some do
/// not, and docs/cost-model-and-bound.md says which and why.
const MOST_MEAN: f64 = 1.02;
const MOST: f64 = 1.10;

#[track_caller]
fn hold(class: Class) {
    hold_to(class, MOST_MEAN, MOST);
}

#[track_caller]
fn hold_to(class: Class, most_mean: f64, most: f64) {
    let seen = gaps::sweep(class, big_sums::pair, 6, 1.05, 4);
    let (mean, worst) = (seen.mean(), seen.worst().over);
    eprintln!("{}", seen.row(class));
    assert!(mean <= most_mean && worst <= most, "{}: mean {mean:.4}, worst {worst:.4}", class.name);
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

/// Further from the bound than the others: seed 3 is the worst of these, where paths through 335 devices fill slowly. The aim is that
/// of the other classes.
#[test]
fn four_nics_a_host() {
    hold_to(classes::FOUR_NICS, 1.04, 1.14);
}

#[test]
fn racks_oversubscribed_1_5x() {
    hold(classes::RACKS_1_5X);
}

#[test]
fn racks_oversubscribed_4x() {
    hold(classes::RACKS_4X);
}
