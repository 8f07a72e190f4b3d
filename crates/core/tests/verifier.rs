//! The verifier against slow oracles: it accepts what replays right, and names the law of whatever was broken.

use crossmesh_core::reshard::doc::{Figures, PlanDoc};
use crossmesh_core::reshard::{Plan, PlanError, PlanOptions, Problem, Strategy, lower, lower_bound, plan};
use crossmesh_core::sim::simulate;
use crossmesh_core::verify::{Claims, Law, verify, verify_claims};
use crossmesh_testkit::mutate::{Mutation, mutate, scramble};
use crossmesh_testkit::replay::{replay, run_program};
use crossmesh_testkit::seed::{Seed, Shape, problem};
use crossmesh_testkit::simple::{self, Way};

const WAYS: [Way; 3] = [Way::Direct, Way::Chain, Way::Ordered];

/// The plans of every strategy that can plan this, and of the simple ways.
fn plans(problem: &Problem) -> Vec<Plan> {
    let mut plans: Vec<Plan> = WAYS.map(|way| simple::plan(problem, way)).into();
    for strategy in Strategy::CONCRETE {
        match plan(problem, &PlanOptions { strategy, ..PlanOptions::default() }) {
            Ok(plan) => plans.push(plan),
            Err(PlanError::CannotReduce { .. }) if strategy != Strategy::Flow => {}
            Err(error) => panic!("{strategy} cannot plan: {error}"),
        }
    }
    plans
}

fn describe(plan: &Plan) -> String {
    let layouts = plan.problem.reshards.iter().map(|r| format!("{} -> {}", r.src.layout, r.dst.layout));
    format!("{} of {}", plan.strategy, layouts.collect::<Vec<_>>().join(", "))
}

fn accepts_every_plan(seeds: std::ops::Range<u64>) {
    for seed in seeds {
        for plan in plans(&problem(seed, Shape::FULL)) {
            let proof = verify(&plan).unwrap_or_else(|e| panic!("seed {seed}, {}: {e}", describe(&plan)));
            assert_eq!(proof.bytes, plan.bytes_moved());
        }
    }
}

macro_rules! accepts {
    ($($name:ident: $seeds:expr;)*) => {
        $(#[test]
        fn $name() {
            accepts_every_plan($seeds);
        })*
    };
}

// Ten thousand problems, every strategy.
accepts! {
    accepts_every_plan_of_problems_0_to_1250: 0..1250;
    accepts_every_plan_of_problems_1250_to_2500: 1250..2500;
    accepts_every_plan_of_problems_2500_to_3750: 2500..3750;
    accepts_every_plan_of_problems_3750_to_5000: 3750..5000;
    accepts_every_plan_of_problems_5000_to_6250: 5000..6250;
    accepts_every_plan_of_problems_6250_to_7500: 6250..7500;
    accepts_every_plan_of_problems_7500_to_8750: 7500..8750;
    accepts_every_plan_of_problems_8750_to_10000: 8750..10000;
}

#[test]
fn what_it_accepts_replays_and_runs() {
    for seed in 0..150 {
        for plan in plans(&problem(seed, Shape::SMALL)) {
            let context = || format!("seed {seed}, {}", describe(&plan));
            verify(&plan).unwrap_or_else(|e| panic!("{}: {e}", context()));
            replay(&plan, seed).unwrap_or_else(|e| panic!("{}: {e}", context()));
            run_program(&plan, &lower(&plan), seed).unwrap_or_else(|e| panic!("{}: {e}", context()));
        }
    }
}

/// Breaks plans of small problems until `wanted` are broken; calls `check` with each.
fn broken(wanted: usize, mut check: impl FnMut(u64, Mutation, &Plan, Plan, Vec<Law>)) {
    let mut count = 0;
    for number in 0.. {
        let mut seed = Seed(number);
        let problem = problem(number, Shape::SMALL);
        let plans = plans(&problem);
        let plan = &plans[seed.below(plans.len())];
        for mutation in Mutation::ALL {
            if let Some((mutant, laws)) = mutate(plan, mutation, &mut seed) {
                check(number, mutation, plan, mutant, laws);
                count += 1;
            }
        }
        if count >= wanted {
            return;
        }
    }
}

#[test]
fn a_thousand_broken_plans_fail_with_the_right_law() {
    let mut seen: Vec<(Mutation, Law)> = Vec::new();
    broken(5000, |number, mutation, plan, mutant, laws| {
        let context = || format!("seed {number}, {mutation:?} of {}", describe(plan));
        let error = match verify(&mutant) {
            Err(error) => error,
            // To wait for the last part of a sum is to wait for all of them.
            Ok(_) if mutation == Mutation::Hasten => {
                return run_program(&mutant, &lower(&mutant), number)
                    .unwrap_or_else(|e| panic!("{} passes, but {e}", context()));
            }
            Ok(_) => panic!("{} passes", context()),
        };
        assert!(laws.contains(&error.law()), "{}: {} is not among {laws:?}: {error}", context(), error.law());
        seen.push((mutation, error.law()));
    });
    for mutation in Mutation::ALL {
        let times = seen.iter().filter(|(m, _)| *m == mutation).count();
        assert!(times >= 100, "{mutation:?} was tried only {times} times");
    }
}

#[test]
fn the_replay_agrees_on_every_broken_plan() {
    broken(600, |number, mutation, plan, mutant, _| {
        let whole = mutant.problem.reshards.iter().all(|r| r.src.layout.num_contributions() == 1);
        let replayed = replay(&mutant, number);
        let context = || format!("seed {number}, {mutation:?} of {}", describe(plan));
        if whole {
            assert!(replayed.is_err(), "{} replays", context());
        }
    });
}

#[test]
fn scrambled_plans_pass_exactly_if_they_replay() {
    let (mut good, mut bad) = (0, 0);
    for number in 0..3000 {
        let mut seed = Seed(number);
        let problem = problem(number, Shape::SMALL);
        let plan = scramble(&simple::plan(&problem, seed.pick(&WAYS)), &mut seed);
        let whole = problem.reshards.iter().all(|r| r.src.layout.num_contributions() == 1);
        let context = || format!("seed {number}, {}", describe(&plan));
        match (verify(&plan), replay(&plan, number)) {
            (Ok(_), Ok(())) => {
                good += 1;
                for order in 0..3 {
                    replay(&plan, order).unwrap_or_else(|e| panic!("{}: {e}", context()));
                    let run = run_program(&plan, &lower(&plan), order);
                    run.unwrap_or_else(|e| panic!("{}: {e}", context()));
                }
            }
            (Ok(_), Err(e)) => panic!("{} passes, but {e}", context()),
            (Err(e), Ok(())) if whole => panic!("{} replays, but {e}", context()),
            (Err(_), _) => bad += 1,
        }
    }
    assert!(good > 300 && bad > 300, "{good} good and {bad} bad plans");
}

#[test]
fn documents_carry_plans_and_their_claims() {
    for seed in 0..60 {
        for plan in plans(&problem(seed, Shape::SMALL)) {
            let proof = verify(&plan).unwrap();
            let figures = Figures {
                peak_extra_bytes: proof.peak_extra_bytes,
                lower_bound_s: lower_bound(&plan.problem).unwrap().seconds,
                predicted_s: simulate(&lower(&plan), &plan.problem.cluster).unwrap().makespan_s,
            };
            let doc = PlanDoc::parse(&PlanDoc::new(&plan, figures).to_json()).unwrap();
            let read = doc.to_plan().unwrap();
            assert_eq!(read, plan, "{}", describe(&plan));
            verify_claims(&read, &Claims::of(&doc)).unwrap();
            let lie = Claims { bytes: Some(proof.bytes + 1), ..Claims::default() };
            assert_eq!(verify_claims(&read, &lie).unwrap_err().law(), Law::Claims);
            let lie =
                Claims { lower_bound_s: Some(figures.lower_bound_s * 1.01 + 1e-9), ..Claims::default() };
            assert_eq!(verify_claims(&read, &lie).unwrap_err().law(), Law::Claims);
            let lie = Claims { predicted_s: Some(figures.predicted_s * 0.99 - 1e-9), ..Claims::default() };
            assert_eq!(verify_claims(&read, &lie).unwrap_err().law(), Law::Claims);
            if let Some(less) = proof.peak_extra_bytes.checked_sub(1) {
                let lie = Claims { peak_extra_bytes: Some(less), ..Claims::default() };
                assert_eq!(verify_claims(&read, &lie).unwrap_err().law(), Law::Memory);
            }
        }
    }
}

#[test]
fn damaged_documents_never_panic() {
    let mut passed = 0;
    for number in 0..4000 {
        let mut seed = Seed(number);
        let problem = problem(number % 50, Shape::SMALL);
        let plan = simple::plan(&problem, seed.pick(&WAYS));
        let mut text = PlanDoc::new(&plan, Figures::default()).to_json().into_bytes();
        for _ in 0..1 + seed.below(3) {
            let at = seed.below(text.len());
            match seed.below(3) {
                0 => text[at] = seed.pick(b"0123456789-[]{},:\"e."),
                1 => text.insert(at, seed.pick(b"0123456789-[]{},:\"e.")),
                _ => {
                    text.remove(at);
                }
            }
        }
        let text = String::from_utf8(text).unwrap();
        let Ok(doc) = PlanDoc::parse(&text) else { continue };
        let Ok(plan) = doc.to_plan() else { continue };
        passed += 1;
        let _ = verify_claims(&plan, &Claims::of(&doc));
    }
    assert!(passed > 100, "only {passed} documents could still be read");
}
