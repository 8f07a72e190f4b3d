//! A bounded run of every fuzz target on stable. `fuzz/` runs the same functions for longer.

use crossmesh_testkit::fuzz::{self, Mutator};

const ITERATIONS: usize = 20_000;

/// Runs a target over spoilt seeds; a failure prints the bytes, to become a test of their own.
fn smoke(target: fn(&[u8]), seeds: &[&str]) {
    for seed in seeds {
        target(seed.as_bytes());
    }
    let mut mutator = Mutator::new(seeds, 0x9E37_79B9_7F4A_7C15);
    for iteration in 0..ITERATIONS {
        let data = mutator.draw();
        let shown = String::from_utf8_lossy(&data).into_owned();
        if let Err(cause) = std::panic::catch_unwind(|| target(&data)) {
            eprintln!("iteration {iteration}: {shown:?}");
            std::panic::resume_unwind(cause);
        }
    }
}

#[test]
fn layout() {
    smoke(fuzz::layout, fuzz::LAYOUT_SEEDS);
}

#[test]
fn mesh() {
    smoke(fuzz::mesh, fuzz::MESH_SEEDS);
}

#[test]
fn cluster_toml() {
    smoke(fuzz::cluster_toml, fuzz::CLUSTER_SEEDS);
}

#[test]
fn units() {
    smoke(fuzz::units, fuzz::UNITS_SEEDS);
}

#[test]
fn plan_json() {
    let seeds = fuzz::plan_seeds();
    let seeds: Vec<&str> = seeds.iter().map(String::as_str).collect();
    smoke(fuzz::plan_json, &seeds);
}

#[test]
fn program_json() {
    let seeds = fuzz::program_seeds();
    let seeds: Vec<&str> = seeds.iter().map(String::as_str).collect();
    smoke(fuzz::program_json, &seeds);
}

#[test]
fn schedule_csv() {
    smoke(fuzz::schedule_csv, fuzz::SCHEDULE_SEEDS);
}

#[test]
fn layers() {
    smoke(fuzz::layers, fuzz::LAYERS_SEEDS);
}

/// The run would prove little if hardly anything parsed, or everything did.
#[test]
fn spoilt_seeds_are_good_and_bad() {
    let mut mutator = Mutator::new(fuzz::LAYOUT_SEEDS, 1);
    let texts = (0..2000).map(|_| String::from_utf8_lossy(&mutator.draw()).into_owned());
    let good = texts.filter(|t| t.parse::<crossmesh_core::layout::Layout>().is_ok()).count();
    assert!((200..1800).contains(&good), "{good} of 2000 parse");
}
