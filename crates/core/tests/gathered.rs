//! Small tensors beside a large one: put together by one receiver and passed on, in few messages.

use std::collections::BTreeMap;

use crossmesh_core::id::TransferId;
use crossmesh_core::reshard::problem::Hosts;
use crossmesh_core::reshard::{Plan, PlanOptions, Problem, lower, lower_bound, plan};
use crossmesh_core::sim::simulate;
use crossmesh_core::verify::verify;
use crossmesh_testkit::replay::{replay, run_program};
use crossmesh_testkit::seed::Seed;

/// The place of the large tensor: between the others, so that numbers have to be right.
const LARGE: u32 = 2;

fn problem(pairs: &[(String, String)]) -> Problem {
    let named =
        pairs.iter().enumerate().map(|(i, (s, d))| (i.to_string(), s.parse().unwrap(), d.parse().unwrap()));
    Problem::new(named.collect(), Hosts::default()).unwrap()
}

fn planned(problem: &Problem) -> Plan {
    plan(problem, &PlanOptions::default()).unwrap()
}

/// A matrix, whole, split or replicated on either side.
fn small(seed: &mut Seed, src: (u32, u32), dst: (u32, u32)) -> (String, String) {
    let (rows, cols) = (1 + seed.below(24), 1 + seed.below(4));
    let mut layout = |mesh: &str, (dp, tp): (u32, u32), splits: [&str; 3]| {
        let split = splits[seed.below(splits.len())];
        match seed.below(3) {
            0 => format!("i32[{rows},{cols}]@{mesh}{{dp:{dp},tp:{tp}}}(_,{split})"),
            _ => format!("i32[{rows},{cols}]@{mesh}{{dp:{dp},tp:{tp}}}({split},_)"),
        }
    };
    (layout("A", src, ["dp+tp", "dp", "tp"]), layout("B", dst, ["_", "tp", "dp"]))
}

/// Five small tensors and a large one.
fn pairs(seed: &mut Seed) -> Vec<(String, String)> {
    let mut axes = || (1 + seed.below(3) as u32, 1 + seed.below(4) as u32);
    let (src, dst) = (axes(), axes());
    let mut pairs: Vec<_> = (0..5).map(|_| small(seed, src, dst)).collect();
    let large = |mesh: &str, (dp, tp)| format!("i32[6000000]@{mesh}{{dp:{dp},tp:{tp}}}(tp)");
    pairs.insert(LARGE as usize, (large("A", src), large("B", dst)));
    pairs
}

/// The transfers of the small tensors alone; those of a large one take too long to follow element by element.
fn without_large(plan: &Plan) -> Plan {
    let mut problem = plan.problem.clone();
    problem.reshards.remove(LARGE as usize);
    let mut rest = Plan::new(problem, plan.strategy.clone(), plan.chunk_bytes);
    let mut numbers: BTreeMap<TransferId, TransferId> = BTreeMap::new();
    for (i, t) in plan.transfers().iter().enumerate().filter(|(_, t)| t.tensor != LARGE) {
        let region = rest.add_region(plan.region(t).clone());
        // What waits for a large one in its lane only keeps an order.
        let after: Vec<TransferId> = plan.after(t).iter().filter_map(|a| numbers.get(a).copied()).collect();
        let id = rest.add(t.tensor - u32::from(t.tensor > LARGE), t.src, t.dst, region, &after);
        rest.transfer_mut(id).lane = t.lane;
        numbers.insert(TransferId::at(i), id);
    }
    rest
}

#[test]
fn every_element_arrives_where_tensors_are_gathered() {
    let mut gathered = 0;
    for number in 0..40 {
        let pairs = pairs(&mut Seed(number));
        let problem = problem(&pairs);
        let plan = planned(&problem);
        verify(&plan).unwrap_or_else(|error| panic!("seed {number}: {pairs:?}: {error}"));
        gathered += usize::from(plan.reasons.iter().any(|reason| reason.contains("put together")));
        let rest = without_large(&plan);
        replay(&rest, number).unwrap_or_else(|error| panic!("seed {number}: {pairs:?}: {error}"));
        run_program(&rest, &lower(&rest), number)
            .unwrap_or_else(|error| panic!("seed {number}: {pairs:?}: {error}"));
        let alone = planned(&rest.problem);
        assert!(rest.transfers().len() <= alone.transfers().len(), "seed {number}: {pairs:?}");
    }
    assert!(gathered > 10, "only {gathered} problems had something to gather");
}

#[test]
fn few_messages_cost_hardly_any_time_and_no_memory() {
    let split = |mesh: &str, n: u64| format!("bf16[{n}]@{mesh}{{fsdp:16}}(fsdp)");
    let mut pairs: Vec<_> =
        (0..6).map(|_| (split("A", 4096), "bf16[4096]@B{dp:2,tp:8}(_)".to_string())).collect();
    pairs.push((split("A", 1 << 28), "bf16[268435456]@B{dp:2,tp:8}(tp)".to_string()));
    let problem = problem(&pairs);
    let options = PlanOptions { max_extra_bytes: Some(0), ..PlanOptions::default() };
    let plan = plan(&problem, &options).unwrap();
    verify(&plan).unwrap();
    let norms = plan.transfers().iter().filter(|t| t.tensor < 6).count();
    assert_eq!(norms, 6 * (16 + 15), "apart they are {}", 6 * 16 * 16);
    let program = lower(&plan);
    assert_eq!(program.ranks.iter().map(|r| r.extra_bytes()).max(), Some(0));
    let predicted_s = simulate(&program, &problem.cluster).unwrap().makespan_s;
    let over = predicted_s / lower_bound(&problem).unwrap().seconds;
    assert!(over < 1.01, "{over} × the bound");
    let late =
        crossmesh_core::cluster::Cluster { message_s: 5e-6, latency_s: 20e-6, ..problem.cluster.clone() };
    let with_messages_s = simulate(&program, &late).unwrap().makespan_s;
    assert!(
        with_messages_s < 1.02 * predicted_s,
        "{with_messages_s} s, {predicted_s} s if messages were free"
    );
}

#[test]
fn a_host_that_holds_some_of_it_is_left_alone() {
    // Both meshes are on the same ranks: every device has a part of what it wants.
    let pair = |n: u64, to: &str| (format!("i32[{n}]@A{{x:8}}(x)"), format!("i32[{n}]@A{{x:8}}({to})"));
    let problem = problem(&[pair(16, "_"), pair(1 << 20, "_")]);
    let plan = planned(&problem);
    assert!(!plan.reasons.iter().any(|reason| reason.contains("put together")), "{:?}", plan.reasons);
    verify(&plan).unwrap();
}
