//! Layouts by boxes, run on real buffers by ranks that are threads: every element of every destination is checked.
//!
//! `CROSSMESH_SWEEP=2000 cargo test -p crossmesh-comm --test boxes` runs so many.

mod common;

use common::{KINDS, run};
use crossmesh_core::reshard::{PlanOptions, plan};
use crossmesh_testkit::boxes;
use crossmesh_testkit::sweep;

#[test]
fn random_boxes_arrive() {
    for seed in 0..sweep::count(60) as u64 {
        let problem = boxes::problem(seed);
        let plan = plan(&problem, &PlanOptions::default()).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        run(&plan, KINDS[seed as usize % KINDS.len()]);
    }
}
