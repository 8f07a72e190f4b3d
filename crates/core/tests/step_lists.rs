//! What ranks do inside their passes, in a step's program: by closed forms on small clusters, and what the verifier says of programs that lack something.

use crossmesh_core::cluster::{Cluster, Host};
use crossmesh_core::collective::{Call as Asked, Collective, CollectiveOptions, Group, plan as plan_call};
use crossmesh_core::dtype::DType;
use crossmesh_core::id::{Rank, StageId};
use crossmesh_core::program::{OpKind, Program};
use crossmesh_core::reshard::problem::Hosts;
use crossmesh_core::reshard::{PlanOptions, Problem, lower, plan};
use crossmesh_core::schedule::{Edge, Name, Pass, PassKind, Spec, generate};
use crossmesh_core::sim::simulate;
use crossmesh_core::step::lists::{Call, CallKind, GroupIndex, ListError, RankList, StepLists};
use crossmesh_core::step::{
    Carries, Crossing, PassTimes, Step, StepError, StepProgram, StepReport, lower_lists, lower_step,
};
use crossmesh_core::verify::verify_program;

const SECOND: u64 = 1_000_000_000;

/// Stages of two ranks, a host each with a NIC of 1000 B/s; every pass takes 2 s, and so many bytes cross between stages.
fn step(stages: u32, microbatches: u32, bytes: u64) -> Step {
    let host = Host { nic_out_bytes_per_s: 1000.0, nic_in_bytes_per_s: 1000.0, ..Host::with_devices(1) };
    let cluster = Cluster::of_hosts(vec![host; 2 * stages as usize]);
    let reshard = |from: u32, to: u32| {
        let layout =
            |s: u32| format!("u8[{bytes}]@S{s}{{tp:2}}={}-{}(tp)", 2 * s, 2 * s + 1).parse().unwrap();
        let pair = vec![("act".to_string(), layout(from), layout(to))];
        plan(&Problem::new(pair, Hosts::Described(cluster.clone())).unwrap(), &PlanOptions::default())
            .unwrap()
    };
    let crossings = (1..stages).map(|to| Crossing {
        name: "act".into(),
        edge: Edge { from: StageId(to - 1), to: StageId(to) },
        carries: Carries::Tensors,
        forward: reshard(to - 1, to),
        backward: reshard(to, to - 1),
        made: 1.0,
        needed: 0.0,
    });
    let f_ns = 2 * SECOND;
    Step {
        schedule: generate(Name::OneF1B, &Spec::even(stages, microbatches)).unwrap().with_updates().unwrap(),
        crossings: crossings.collect(),
        ranks: (0..stages).map(|s| vec![Rank(2 * s), Rank(2 * s + 1)]).collect(),
        times: vec![PassTimes { f_ns, b_ns: f_ns, w_ns: f_ns, optimizer_ns: SECOND }; stages as usize],
        cluster,
        overlap: true,
        lockstep: false,
    }
}

/// Every F, and every backward pass, computes half, adds so many bytes up among its stage's ranks, and computes the rest, beside the sum or behind it; all ranks meet
/// in the optimizer's pass.
fn lists(step: &Step, bytes: u64, beside: bool) -> StepLists {
    let world: Vec<usize> = (0..step.cluster.num_devices()).collect();
    let mut groups: Vec<Vec<usize>> = world.chunks(2).map(<[usize]>::to_vec).collect();
    groups.push(world.clone());
    let program = |(group, bytes): (&Vec<usize>, u64)| {
        let group = Group::new(group.iter().map(|r| Rank::at(*r)).collect()).unwrap();
        let call = Asked::new(Collective::AllReduce, &group, DType::F32, bytes / 4);
        lower(&plan_call(&[call], &step.cluster, &CollectiveOptions::default()).unwrap())
    };
    let sizes = |g: usize| if g + 1 == groups.len() { 8 } else { bytes };
    let programs = groups.iter().enumerate().map(|(g, group)| program((group, sizes(g)))).collect();
    let call = |g: usize| {
        let group = GroupIndex(g as u32);
        Call { group, kind: CallKind::AllReduce, bytes: sizes(g), ns: 0, program: g as u32 }
    };
    let rank = |rank: &usize| {
        let mut of = RankList::default();
        for pass in &step.schedule.devices()[rank / 2] {
            match pass.kind {
                PassKind::Optimizer => {
                    let all = of.list.start(call(groups.len() - 1));
                    of.list.wait(all);
                    of.list.compute(SECOND);
                }
                _ => {
                    of.list.compute(SECOND);
                    let sum = of.list.start(call(rank / 2));
                    if beside {
                        of.list.compute(SECOND);
                    }
                    of.list.wait(sum);
                    of.list.compute(SECOND);
                }
            }
            of.end_pass(*pass);
        }
        of
    };
    let lists = StepLists { ranks: world.iter().map(rank).collect(), groups, programs };
    lists.retimed(|rank, pass| step.times[rank.index() / 2].of(pass).unwrap())
}

fn takes(step: &Step, lowered: &StepProgram) -> f64 {
    StepReport::of(step, lowered, &simulate(&lowered.program, &step.cluster).unwrap()).step_s
}

fn step_s(step: &Step, lists: &StepLists) -> f64 {
    takes(step, &lower_lists(&lower_step(step).unwrap(), lists).unwrap())
}

fn close(a: f64, b: f64) {
    assert!((a - b).abs() < 0.01 * b, "{a} is not {b}");
}

/// An all-reduce of two ranks takes bytes / 1000 s: half there, half back.
#[test]
fn sums_take_their_time_behind_what_is_computed_and_none_beside_it() {
    let step = step(1, 3, 0);
    // Three of F and BW, and an optimizer's.
    let computed = 3.0 * (2.0 + 4.0) + 1.0;
    close(takes(&step, &lower_step(&step).unwrap()), computed);
    close(step_s(&step, &lists(&step, 500, false)), computed + 6.0 * 0.5);
    // A third of F, and of BW, is beside the sum.
    close(step_s(&step, &lists(&step, 500, true)), computed);
    close(step_s(&step, &lists(&step, 1000, true)), computed + 3.0 * (1.0 - 2.0 / 3.0));
}

/// Sums inside passes share NICs with what crosses: both together take longer than either.
#[test]
fn sums_and_crossings_share_links() {
    let both = |crossing: u64, sum: u64| {
        let step = step(2, 4, crossing);
        step_s(&step, &lists(&step, sum, true))
    };
    let (neither, sums, crossings) = (both(4, 4), both(4, 2000), both(3000, 4));
    let together = both(3000, 2000);
    assert!(neither + 1.0 < sums.min(crossings), "{neither} {sums} {crossings}");
    assert!(together > sums.max(crossings) + 1.0, "{together}: {sums} {crossings}");
}

/// With lists that have no calls a step is what it was.
#[test]
fn lists_without_calls_change_nothing() {
    let step = step(2, 4, 700);
    let lowered = lower_step(&step).unwrap();
    let mut lists = lists(&step, 4, false);
    for (rank, of) in lists.ranks.iter_mut().enumerate() {
        *of = RankList::default();
        for pass in &step.schedule.devices()[rank / 2] {
            of.list.compute(step.times[rank / 2].of(*pass).unwrap());
            of.end_pass(*pass);
        }
    }
    let with = lower_lists(&lowered, &lists).unwrap();
    let kinds = |program: &Program| program.ranks.iter().map(|r| r.ops.len()).collect::<Vec<_>>();
    assert_eq!(kinds(&with.program), kinds(&lowered.program));
    assert_eq!(with.instances, lowered.instances);
    assert_eq!(takes(&step, &with), takes(&step, &lowered));
}

/// The verifier sees every part of a pass that does not wait for what it reads.
#[test]
fn the_verifier_sees_a_wait_that_is_missing() {
    let step = step(2, 2, 64);
    let lowered = lower_lists(&lower_step(&step).unwrap(), &lists(&step, 64, false)).unwrap();
    let program = Program::clone(&lowered.program);
    verify_program(&program).unwrap();
    let mut tried = 0;
    for (rank, ranked) in program.ranks.iter().enumerate() {
        for op in ranked.ops.iter().filter(|op| matches!(op.kind, OpKind::Compute { .. })) {
            let computes = |on: u32| matches!(ranked.ops[on as usize].kind, OpKind::Compute { .. });
            let waits: Vec<usize> = (op.deps.start as usize..op.deps.end as usize)
                .filter(|dep| !computes(ranked.deps[*dep].op) && ranked.deps[*dep].op != 0)
                .collect();
            if waits.is_empty() {
                continue;
            }
            // It waits for the rank's first op instead, which is over long before.
            let mut bad = program.clone();
            waits.iter().for_each(|dep| bad.ranks[rank].deps[*dep].op = 0);
            tried += 1;
            assert!(verify_program(&bad).is_err(), "{rank}: {op:?}");
        }
    }
    assert!(tried >= 20, "{tried}");
}

#[test]
fn lists_that_do_not_fit_are_refused() {
    let step = step(2, 2, 64);
    let lowered = lower_step(&step).unwrap();
    let good = lists(&step, 64, false);
    let mut other = good.clone();
    let calls = &mut other.ranks[1];
    *calls = RankList::default();
    for pass in &step.schedule.devices()[0] {
        calls.list.compute(1);
        calls.end_pass(*pass);
    }
    let error = lower_lists(&lowered, &other).unwrap_err();
    assert!(matches!(error, StepError::Lists(ListError::Order { .. })), "{error}");
    let mut short = good.clone();
    short.ranks[0].passes.pop();
    let error = lower_lists(&lowered, &short).unwrap_err();
    let last = Pass::new(PassKind::Optimizer, StageId(0), crossmesh_core::id::MicrobatchId(0));
    assert_eq!(error, StepError::NoList { rank: Rank(0), pass: last });
}
