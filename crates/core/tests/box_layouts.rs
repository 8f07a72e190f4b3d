//! Layouts by boxes: planned by every strategy, verified, carried out element by element, and held against the bound's
//! oracle; and splits by axes written as boxes, which are the same problem.
//!
//! `CROSSMESH_SWEEP=2000 cargo test -p crossmesh-core --test box_layouts` looks at so many problems.

use std::collections::HashMap;

use crossmesh_core::layout::{HeldBox, Layout};
use crossmesh_core::region::Region;
use crossmesh_core::reshard::doc::{Figures, PlanDoc};
use crossmesh_core::reshard::pieces::Pieces;
use crossmesh_core::reshard::{Plan, PlanError, PlanOptions, Problem, Strategy, lower, lower_bound, plan};
use crossmesh_core::sim::simulate;
use crossmesh_core::verify::verify;
use crossmesh_testkit::boxes;
use crossmesh_testkit::cuts::bound_s;
use crossmesh_testkit::replay::{elements, replay, run_program};
use crossmesh_testkit::seed::{self, Shape};
use crossmesh_testkit::sweep;

fn describe(problem: &Problem) -> String {
    let layouts =
        problem.reshards.iter().map(|r| format!("{} -> {}", r.src.layout.summary(), r.dst.layout.summary()));
    layouts.collect::<Vec<_>>().join(", ")
}

/// The plans of every strategy that can plan this.
fn plans(problem: &Problem) -> Vec<Plan> {
    let plan_by =
        |strategy: Strategy| match plan(problem, &PlanOptions { strategy, ..PlanOptions::default() }) {
            Ok(plan) => Some(plan),
            Err(PlanError::CannotReduce { .. }) if strategy != Strategy::Flow => None,
            Err(error) => panic!("{strategy} cannot plan {}: {error}", describe(problem)),
        };
    Strategy::CONCRETE.into_iter().filter_map(plan_by).collect()
}

/// Verifies a plan, carries it out and then its program; every destination element is compared.
fn prove(plan: &Plan, seed: u64) {
    let context = || format!("seed {seed}, {} of {}", plan.strategy, describe(&plan.problem));
    let proof = verify(plan).unwrap_or_else(|e| panic!("{}: {e}", context()));
    assert_eq!(proof.bytes, plan.bytes_moved());
    replay(plan, seed).unwrap_or_else(|e| panic!("{}: {e}", context()));
    run_program(plan, &lower(plan), seed).unwrap_or_else(|e| panic!("{}: {e}", context()));
}

#[test]
fn box_layouts_are_planned_verified_and_carried_out() {
    let (mut most, mut largest) = (0, 0);
    for seed in 0..sweep::count(120) as u64 {
        let problem = boxes::problem(seed);
        let layouts = problem.reshards.iter().flat_map(|r| [&r.src.layout, &r.dst.layout]);
        let lens = layouts.filter_map(|l| l.by_boxes()).flat_map(|t| t.kinds().iter().map(Vec::len));
        most = lens.fold(most, usize::max);
        let plans = plans(&problem);
        largest = plans.iter().map(|p| p.transfers().len()).fold(largest, usize::max);
        // Large plans one a seed, in turn: carrying them out looks at every transfer at every step.
        let few = plans[0].transfers().len() < 200;
        let turn = seed as usize % plans.len();
        for (_, plan) in plans.iter().enumerate().filter(|(i, _)| few || *i == turn) {
            prove(plan, seed);
        }
    }
    assert!(most >= 500 && largest >= 1000, "up to {most} boxes a device, {largest} transfers a plan");
}

/// Where an element lies in a shard's memory, the slow way.
fn place(held: &HeldBox, element: &[u64]) -> u64 {
    let steps = held.region.spans().iter().zip(&held.strides).zip(element);
    held.offset_elements + steps.map(|((span, stride), x)| (x - span.start) * stride).sum::<u64>()
}

#[test]
fn every_element_of_a_shard_has_a_place_of_its_own() {
    for seed in 0..sweep::count(200) as u64 {
        let layout = boxes::layout(seed);
        let text = layout.to_string();
        assert_eq!(text.parse::<Layout>().as_ref(), Ok(&layout), "seed {seed}");
        for position in 0..layout.mesh().len() {
            let coord = layout.mesh().coord(position);
            let held = layout.held_at(&coord);
            let regions: Vec<Region> = held.iter().map(|h| h.region.clone()).collect();
            assert_eq!(regions, layout.shard_at(&coord), "seed {seed}");
            let mut places: HashMap<u64, (usize, Vec<u64>)> = HashMap::new();
            for (i, held) in held.iter().enumerate() {
                for element in elements(&held.region) {
                    let at = place(held, &element);
                    assert!(at < layout.shard_elements(&coord), "seed {seed}");
                    let before = places.insert(at, (i, element.clone()));
                    assert_eq!(before, None, "seed {seed}: {element:?} lies where another does");
                }
            }
        }
    }
}

#[test]
fn the_bound_of_box_layouts_is_the_oracles() {
    let mut looked_at = 0;
    for seed in 0..sweep::count(150) as u64 {
        let problem = boxes::problem(seed);
        let hosts = problem.cluster.hosts.len();
        let partial = problem.reshards.iter().any(|r| r.src.layout.partial().is_some());
        let elements: u64 = problem.reshards.iter().map(|r| r.src.layout.volume()).sum();
        if partial || elements > 400 || hosts > 8 {
            continue;
        }
        looked_at += 1;
        let (bound, oracle) = (lower_bound(&problem).unwrap().seconds, bound_s(&problem));
        let off = (bound - oracle).abs() / oracle.max(1e-30);
        assert!(off < 1e-9, "seed {seed}, {}: {bound} for {oracle}", describe(&problem));
    }
    assert!(looked_at >= 50, "{looked_at}");
}

/// The problem with layouts of some sides written as boxes.
fn listed(problem: &Problem, src: bool, dst: bool) -> Problem {
    let mut listed = problem.clone();
    for reshard in &mut listed.reshards {
        for (side, wanted) in [(&mut reshard.src, src), (&mut reshard.dst, dst)] {
            if wanted {
                side.layout = side.layout.to_boxes().unwrap();
                assert!(side.layout.by_boxes().is_some());
                let text = side.layout.to_string();
                assert_eq!(text.parse::<Layout>().unwrap(), side.layout, "{text}");
            }
        }
    }
    listed
}

#[test]
fn splits_written_as_boxes_are_planned_alike() {
    for seed in 0..sweep::count(150) as u64 {
        let problem = seed::problem(seed, Shape::FULL);
        let sides = [(true, true), (true, false), (false, true)][seed as usize % 3];
        let boxes = listed(&problem, sides.0, sides.1);
        let context = || format!("seed {seed}, {}", describe(&problem));
        for (a, b) in problem.reshards.iter().zip(&boxes.reshards) {
            assert_eq!(Pieces::of(a).unwrap(), Pieces::of(b).unwrap(), "{}", context());
        }
        assert_eq!(lower_bound(&problem).unwrap(), lower_bound(&boxes).unwrap(), "{}", context());
        for (a, b) in plans(&problem).iter().zip(&plans(&boxes)) {
            let transfers = |plan: &Plan| PlanDoc::new(plan, Figures::default()).transfers;
            assert_eq!(transfers(a), transfers(b), "{} of {}", a.strategy, context());
            let seconds = |plan: &Plan| simulate(&lower(plan), &plan.problem.cluster).unwrap().makespan_s;
            assert_eq!(seconds(a), seconds(b), "{} of {}", a.strategy, context());
        }
    }
}

#[test]
fn a_plan_document_keeps_the_boxes() {
    for seed in 0..40 {
        let problem = boxes::problem(seed);
        let plan = plan(&problem, &PlanOptions::default()).unwrap();
        let text = PlanDoc::new(&plan, Figures::default()).to_json();
        let read = PlanDoc::parse(&text).unwrap().to_plan().unwrap();
        assert_eq!(read.problem.reshards, plan.problem.reshards, "seed {seed}");
        assert_eq!(read, plan, "seed {seed}");
    }
}
