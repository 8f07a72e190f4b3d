//! Steps against closed forms.

use super::*;
use crate::cluster::Host;
use crate::id::{MicrobatchId, StageId};
use crate::reshard::problem::Hosts;
use crate::reshard::{PlanOptions, Problem, plan};
use crate::schedule::memory::peaks;
use crate::schedule::{Costs, Footprint, Name, Placement, Routes, Spec, generate, time};
use crate::sim::simulate;

/// `warm(stage)` forwards, then one backward and one forward by turns.
fn one_f_one_b(stages: u32, microbatches: u32, warm: impl Fn(u32) -> u32) -> Schedule {
    let order = |stage: u32| {
        let pass = |kind, m| Pass::new(kind, StageId(stage), MicrobatchId(m));
        let warm = warm(stage).min(microbatches);
        let mut passes: Vec<Pass> = (0..warm).map(|m| pass(PassKind::F, m)).collect();
        for m in 0..microbatches {
            passes.push(pass(PassKind::BW, m));
            if warm + m < microbatches {
                passes.push(pass(PassKind::F, warm + m));
            }
        }
        passes
    };
    let placement = Placement::linear(stages).unwrap();
    let routes = Routes::model_order(stages as usize);
    Schedule::new("test", placement, routes, microbatches, (0..stages).map(order).collect()).unwrap()
}

const SECOND: u64 = 1_000_000_000;

/// A stage per host, NICs of 1000 B/s, `bytes` on every edge; forwards take 1 s, backwards 2 s.
fn step(schedule: Schedule, bytes: u64, overlap: bool) -> Step {
    let stages = schedule.placement().num_stages();
    let host = Host { nic_out_bytes_per_s: 1000.0, nic_in_bytes_per_s: 1000.0, ..Host::with_devices(1) };
    let cluster = Cluster::of_hosts(vec![host; stages]);
    let edges = (0..stages - 1).map(|from| Edge { from: StageId::at(from), to: StageId::at(from + 1) });
    Step {
        crossings: edges.map(|edge| crossing(&cluster, edge, bytes, Carries::Tensors)).collect(),
        ranks: (0..stages).map(|s| vec![Rank::at(s)]).collect(),
        times: vec![PassTimes { f_ns: SECOND, b_ns: SECOND, w_ns: SECOND, optimizer_ns: 0 }; stages],
        cluster,
        schedule,
        overlap,
        lockstep: false,
    }
}

/// A number of bytes from one rank to another, and back.
fn crossing(cluster: &Cluster, edge: Edge, bytes: u64, carries: Carries) -> Crossing {
    let layout = |stage: StageId| {
        let text = format!("u8[{bytes}]@S{0}{{x:1}}={0}(_)", stage.0);
        text.parse().unwrap()
    };
    let reshard = |a: StageId, b: StageId| {
        let pair = vec![("act".to_string(), layout(a), layout(b))];
        let problem = Problem::new(pair, Hosts::Described(cluster.clone())).unwrap();
        plan(&problem, &PlanOptions::default()).unwrap()
    };
    let Edge { from, to } = edge;
    let (forward, backward) = (reshard(from, to), reshard(to, from));
    Crossing { name: format!("act {from}"), edge, carries, forward, backward, made: 1.0, needed: 0.0 }
}

/// A step whose early stages leave what they remember with late ones: so many bytes for every microbatch.
fn evicting(devices: u32, microbatches: u32, bytes: u64, overlap: bool) -> Step {
    let schedule = generate(Name::BPipe, &Spec::even(devices, microbatches)).unwrap();
    let mut step = step(schedule, 1, overlap);
    for device in step.schedule.placement().devices() {
        if let Some(keeper) = step.schedule.keeper(device) {
            let edge = Edge { from: StageId(device.0), to: StageId(keeper.0) };
            step.crossings.push(crossing(&step.cluster, edge, bytes, Carries::Memory));
        }
    }
    step
}

fn step_s(step: &Step) -> f64 {
    let lowered = lower_step(step).unwrap();
    let trace = simulate(&lowered.program, &step.cluster).unwrap();
    StepReport::of(step, &lowered, &trace).step_s
}

fn close(a: f64, b: f64) {
    assert!((a - b).abs() < 1e-6 * b, "{a} is not {b}");
}

#[test]
fn without_bytes_a_step_takes_what_the_schedule_says() {
    // Nothing moves in no time, but for a byte on each edge.
    let s = step_s(&step(one_f_one_b(4, 8, |s| 4 - s), 1, true));
    assert!((33.0..33.1).contains(&s), "{s}");
}

#[test]
fn eager_hides_what_it_can_hide() {
    for (p, m, bytes) in [(2, 8, 500), (4, 8, 1000), (4, 16, 700), (3, 9, 100)] {
        let eager = one_f_one_b(p, m, |s| 2 * (p - s) - 1);
        let c = bytes as f64 / 1000.0;
        let ideal = f64::from(m + p - 1) * 3.0 + 2.0 * f64::from(p - 1) * c;
        close(step_s(&step(eager, bytes, true)), ideal);
    }
}

#[test]
fn one_f_one_b_pays_for_every_edge_and_blocking_twice() {
    // Two stages, one second on the edge: every microbatch pays a round trip; with blocking calls, both devices stand
    // still for it.
    let overlapped = step_s(&step(one_f_one_b(2, 32, |s| 2 - s), 1000, true));
    let blocking = step_s(&step(one_f_one_b(2, 32, |s| 2 - s), 1000, false));
    let ideal = 33.0 * 3.0;
    assert!((ideal / overlapped - 0.756).abs() < 0.01, "{}", ideal / overlapped);
    assert!((ideal / blocking - 0.607).abs() < 0.01, "{}", ideal / blocking);
}

#[test]
fn what_is_made_early_leaves_early() {
    let mut early = step(one_f_one_b(2, 1, |s| 2 - s), 1000, true);
    let late = step_s(&early);
    // Made half-way through a second, needed half-way through the next: one second of the edge hides, each way.
    (early.crossings[0].made, early.crossings[0].needed) = (0.5, 0.5);
    close(late, 8.0);
    // F 0.5, edge 1, F 0.5, BW 1 (half of it), edge 1, BW 1
    close(step_s(&early), 0.5 + 1.0 + 0.5 + 1.0 + 1.0 + 1.0);
}

#[test]
fn mistakes_are_named() {
    let good = step(one_f_one_b(2, 2, |s| 2 - s), 10, true);
    let error = |change: &dyn Fn(&mut Step)| {
        let mut bad = good.clone();
        change(&mut bad);
        lower_step(&bad).unwrap_err().to_string()
    };
    assert!(error(&|s| s.crossings.clear()).starts_with("nothing crosses from stage 0 to stage 1"));
    assert!(error(&|s| s.ranks[1] = vec![Rank(0)]).starts_with("r0 is on device 0 and on device 1"));
    assert!(error(&|s| s.crossings[0].made = f64::NAN).contains("not between 0 and 1"));
    assert!(error(&|s| s.ranks.swap(0, 1)).contains("which is not on device"));
    assert!(error(&|s| s.times.truncate(1)).contains("2 stages, the step gives 1"));
}

/// Stages of four ranks on a host each (or two stages on one), tensors split and copied.
fn wide(schedule: Schedule, elements: u64, stages_per_host: usize) -> Step {
    let stages = schedule.placement().num_stages();
    let host = Host {
        nic_out_bytes_per_s: 1000.0,
        nic_in_bytes_per_s: 1000.0,
        local_bytes_per_s: 1e6,
        ..Host::with_devices(4 * stages_per_host as u32)
    };
    let cluster = Cluster::of_hosts(vec![host; stages.div_ceil(stages_per_host)]);
    let mut step = step(schedule, 1, true);
    for (from, crossing) in step.crossings.iter_mut().enumerate() {
        let layout = |stage: usize| {
            let first = 4 * stage;
            let text = format!("u8[4,{elements}]@S{stage}{{dp:2,tp:2}}={first}-{}(dp,_)", first + 3);
            text.parse().unwrap()
        };
        let reshard = |a: usize, b: usize| {
            let pair = vec![("act".to_string(), layout(a), layout(b))];
            let problem = Problem::new(pair, Hosts::Described(cluster.clone())).unwrap();
            plan(&problem, &PlanOptions::default()).unwrap()
        };
        (crossing.forward, crossing.backward) = (reshard(from, from + 1), reshard(from + 1, from));
    }
    step.ranks = (0..stages as u32).map(|s| (4 * s..4 * s + 4).map(Rank).collect()).collect();
    step.cluster = cluster;
    step
}

#[test]
fn broad_strokes_take_as_long_as_the_whole_picture() {
    for (p, m, elements, per_host, extra) in
        [(2, 8, 200, 1, 1), (4, 12, 200, 1, 2), (4, 12, 400, 2, 2), (3, 9, 50, 1, 1), (4, 8, 600, 1, 1)]
    {
        let schedule = one_f_one_b(p, m, |s| extra * (p - s));
        let exact = wide(schedule, elements, per_host);
        let (fine, coarse) = (step_s(&exact), step_s(&exact.coarse().unwrap()));
        assert!((coarse / fine - 1.0).abs() < 0.02, "p {p} m {m}: {coarse} for {fine}");
    }
}

#[test]
fn ranks_of_a_device_may_begin_together() {
    // One rank's part comes over a slow NIC; without lockstep the other one would be ahead.
    let mut apart = wide(one_f_one_b(2, 4, |s| 2 - s), 100, 1);
    apart.cluster.hosts[0].nic_out_bytes_per_s = 500.0;
    let mut together = apart.clone();
    together.lockstep = true;
    let (a, b) = (step_s(&apart), step_s(&together));
    assert!(b >= a * (1.0 - 1e-9), "{a} {b}");
    let lowered = lower_step(&together).unwrap();
    let trace = simulate(&lowered.program, &together.cluster).unwrap();
    for ranks in &together.ranks {
        let starts = |rank: &Rank| -> Vec<f64> {
            let ops = lowered.program.ranks[rank.index()].ops.iter().zip(&trace.ops[rank.index()]);
            let computes = ops.filter(|(op, _)| matches!(op.kind, crate::program::OpKind::Compute { .. }));
            computes.map(|(_, span)| span.start_s).collect()
        };
        assert!(ranks.windows(2).all(|pair| starts(&pair[0]) == starts(&pair[1])));
    }
}

/// The most that a device holds, in the order of its passes as they ran.
fn held(report: &DeviceReport) -> f64 {
    let units = |pass: Pass| match pass.kind {
        PassKind::F | PassKind::Load => 1.0,
        PassKind::BW | PassKind::Evict => -1.0,
        _ => 0.0,
    };
    let levels = report.passes.iter().scan(0.0, |level, (pass, _)| {
        *level += units(*pass);
        Some(*level)
    });
    levels.fold(0.0, f64::max)
}

#[test]
fn evicting_stages_hold_what_the_checker_says() {
    for (p, m) in [(4, 4), (4, 8), (5, 15), (6, 12), (7, 9), (8, 16)] {
        for overlap in [true, false] {
            let step = evicting(p, m, 100, overlap);
            let lowered = lower_step(&step).unwrap();
            let trace = simulate(&lowered.program, &step.cluster).unwrap();
            let report = StepReport::of(&step, &lowered, &trace);
            let costs = Costs::even(p as usize, 1.0, 1.0, 1.0, 0.0).unwrap();
            let timed = time(&step.schedule, &costs).unwrap();
            let peaks = peaks(&step.schedule, &timed, &Footprint::units(step.schedule.placement()));
            for (device, peak) in report.devices.iter().zip(peaks).take(p as usize / 2) {
                assert_eq!(held(device), peak.amount, "p {p} m {m} {:?}", device.device);
                assert!(held(device) <= f64::from((p + 2).div_ceil(2)));
            }
        }
    }
}

#[test]
fn evicted_memory_leaves_is_kept_and_comes_back_in_time() {
    for (p, m, bytes) in [(4, 8, 100), (4, 8, 3000), (6, 12, 1000), (8, 16, 700), (8, 24, 5000)] {
        for overlap in [true, false] {
            let step = evicting(p, m, bytes, overlap);
            let lowered = lower_step(&step).unwrap();
            let trace = simulate(&lowered.program, &step.cluster).unwrap();
            let report = StepReport::of(&step, &lowered, &trace);
            let ran = |kind, stage: StageId, microbatch| {
                let wanted = Pass::new(kind, stage, microbatch);
                report.devices[stage.index()].passes.iter().find(|(pass, _)| *pass == wanted).unwrap().1
            };
            // By crossing and slot: when what was there last had left.
            let mut left = std::collections::BTreeMap::new();
            let mut moved = 0;
            for (instance, span) in lowered.instances.iter().zip(&report.crossings) {
                let Some(slot) = instance.slot else { continue };
                let (stage, at) =
                    (step.crossings[instance.crossing as usize].edge.from, (instance.crossing, slot));
                moved += 1;
                match instance.direction {
                    Direction::Forward => {
                        assert!(span.start_s >= ran(PassKind::Evict, stage, instance.microbatch).end_s);
                        assert!(left.insert(at, f64::INFINITY).is_none_or(|left: f64| span.start_s >= left));
                    }
                    Direction::Backward => {
                        assert!(span.start_s >= ran(PassKind::Load, stage, instance.microbatch).start_s);
                        assert!(span.end_s <= ran(PassKind::BW, stage, instance.microbatch).start_s);
                        assert_eq!(left.insert(at, span.end_s), Some(f64::INFINITY));
                    }
                }
            }
            let moves = step.schedule.devices().iter().flatten().filter(|p| p.kind.is_move()).count();
            assert!(moves > 0 && moved == moves, "{moved} of {moves}");
            assert!(lowered.slots.iter().sum::<u32>() < moves as u32 / 2, "slots are used again");
        }
    }
}

#[test]
fn small_memories_cost_no_time() {
    let s = step_s(&evicting(4, 8, 1, true));
    assert!((33.0..33.1).contains(&s), "{s}");
    // Edges are a byte here. Beside a message of many bytes they would crawl: links are shared by the bytes of a plan's transfers.
    let (fine, coarse) = (evicting(8, 16, 1, true), evicting(8, 16, 1, true).coarse().unwrap());
    let (fine, coarse) = (step_s(&fine), step_s(&coarse));
    assert!((coarse / fine - 1.0).abs() < 0.02, "{coarse} for {fine}");
}

#[test]
fn memory_that_nobody_keeps_is_named() {
    let mut step = evicting(4, 8, 1, true);
    step.crossings.retain(|c| c.carries == Carries::Tensors);
    let error = lower_step(&step).unwrap_err().to_string();
    assert!(error.starts_with("0EVICT1 sends away what stage 0 remembers"), "{error}");
}
