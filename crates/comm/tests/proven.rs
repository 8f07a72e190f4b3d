//! What is planned and proved runs: random problems of every dtype and operator, with and without memory limits, by every strategy,
//! on the real engine.

mod common;

use common::{Kind, options, run_all};
use crossmesh_core::dtype::DType;
use crossmesh_core::reshard::problem::Hosts;
use crossmesh_core::reshard::{Plan, PlanError, PlanOptions, Problem, Strategy, plan};
use crossmesh_core::verify::verify;
use crossmesh_testkit::seed::{Seed, Shape, problem};
use crossmesh_testkit::sweep;

/// The same problem with another dtype, and sums that may be largest or smallest values instead.
fn varied(problem: &Problem, seed: &mut Seed) -> Problem {
    let dtype = seed.pick(&DType::ALL);
    let op = seed.pick(&["| sum", "| max", "| min"]);
    let vary = |layout: &crossmesh_core::layout::Layout| {
        let text = layout.to_string();
        let (_, rest) = text.split_once('[').unwrap();
        format!("{dtype}[{}", rest.replace("| sum", op)).parse().unwrap()
    };
    let pairs = problem.reshards.iter().map(|r| (r.name.clone(), vary(&r.src.layout), vary(&r.dst.layout)));
    Problem::new(pairs.collect(), Hosts::Described(problem.cluster.clone())).unwrap()
}

/// A plan under a limit, if there is one so small; else under none.
fn planned(problem: &Problem, strategy: Strategy, seed: &mut Seed) -> Option<Plan> {
    let limit = (!seed.one_in(3)).then(|| 1u64 << seed.below(12));
    let options = PlanOptions { strategy, max_extra_bytes: limit, ..PlanOptions::default() };
    match plan(problem, &options) {
        Ok(plan) => Some(plan),
        Err(PlanError::OverBudget { .. }) => {
            plan(problem, &PlanOptions { max_extra_bytes: None, ..options }).ok()
        }
        Err(PlanError::CannotReduce { .. }) => None,
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn what_is_proven_runs() {
    let wanted = sweep::count(250);
    let (mut runs, mut sums, mut staged) = (0, 0, 0);
    for number in 0.. {
        let mut seed = Seed(number);
        let problem = varied(&problem(number, Shape::SMALL), &mut seed);
        let has_sums = problem.reshards.iter().any(|r| r.src.layout.num_contributions() > 1);
        if number.is_multiple_of(2) && !has_sums {
            continue; // sums are what goes wrong most easily
        }
        let strategy = if seed.one_in(2) { Strategy::Flow } else { seed.pick(&Strategy::CONCRETE) };
        let Some(plan) = planned(&problem, strategy, &mut seed) else { continue };
        let context = || {
            let pairs = problem.reshards.iter().map(|r| format!("{} -> {}", r.src.layout, r.dst.layout));
            format!("seed {number}, {strategy}: {}", pairs.collect::<Vec<_>>().join(", "))
        };
        let proof = verify(&plan).unwrap_or_else(|e| panic!("{}: {e}", context()));
        for (rank, report) in run_all(&plan, Kind::Mem, &options(Kind::Mem)) {
            let report = report.unwrap_or_else(|e| panic!("{}, {rank}: {e}", context()));
            assert!(report.verified, "{}, {rank}: {:?}", context(), report.wrong);
        }
        runs += 1;
        sums += usize::from(has_sums);
        staged += usize::from(proof.peak_extra_bytes > 0);
        if runs >= wanted {
            break;
        }
    }
    eprintln!("{runs} runs, {sums} with sums, {staged} with memory beside the tensors");
    assert!(sums > wanted / 10 && staged > wanted / 20, "{sums} sums, {staged} staged");
}
