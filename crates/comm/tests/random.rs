//! Random problems, planned with every strategy, run by threads: every element is looked at.

mod common;

use common::{Kind, options, run_all};
use crossmesh_core::reshard::{PlanError, PlanOptions, Problem, Strategy, plan};
use crossmesh_core::verify::verify;
use crossmesh_testkit::arb::{Limits, arb_reshard};
use crossmesh_testkit::simple::{self, Way};
use proptest::prelude::*;

/// Plans with every strategy that can, and runs.
fn every_strategy(problem: &Problem, kind: Kind, chunk_bytes: u64) -> Result<(), TestCaseError> {
    for strategy in Strategy::CONCRETE {
        let plan_options = PlanOptions { strategy, chunk_bytes: Some(chunk_bytes), ..Default::default() };
        let plan = match plan(problem, &plan_options) {
            Err(PlanError::CannotReduce { .. }) => continue,
            other => other.unwrap(),
        };
        for (rank, report) in run_all(&plan, kind, &options(kind)) {
            match report {
                Err(e) => return Err(TestCaseError::fail(format!("{strategy} {rank}: {e}"))),
                Ok(report) => prop_assert!(report.verified, "{strategy} {rank}: {:?}", report.wrong),
            }
        }
    }
    Ok(())
}

/// Plans too simple to be wrong: direct, in chains, and in an order that needs tokens between ranks.
fn simple_ways(problem: &Problem, kind: Kind) -> Result<(), TestCaseError> {
    for way in [Way::Direct, Way::Chain, Way::Ordered] {
        let plan = simple::plan(problem, way);
        if verify(&plan).is_err() {
            continue; // it has its limits with sums
        }
        for (rank, report) in run_all(&plan, kind, &options(kind)) {
            let report = report.map_err(|e| TestCaseError::fail(format!("{way:?} {rank}: {e}")))?;
            prop_assert!(report.verified, "{way:?} {rank}: {:?}", report.wrong);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_element_arrives((src, dst) in arb_reshard(Limits::small()), kind in prop::sample::select(common::KINDS.to_vec())) {
        let problem = Problem::pair(src, dst).unwrap();
        every_strategy(&problem, kind, 1024)?;
    }

    #[test]
    fn simple_plans_run((src, dst) in arb_reshard(Limits { partial: false, ..Limits::small() }), kind in prop::sample::select(common::KINDS.to_vec())) {
        simple_ways(&Problem::pair(src, dst).unwrap(), kind)?;
    }
}
