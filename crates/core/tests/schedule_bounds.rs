//! What is said about schedules holds for all of them: the common bound, the split of the bubble, the critical path, and that `search`
//! is never worse.
//!
//! `CROSSMESH_SWEEP=3000` tries more pipelines.

use crossmesh_core::id::DeviceId;
use crossmesh_core::schedule::{
    Hop, Name, Schedule, Spec, StageCost, Timed, bound, bubble, critical_path, generate, memory, time,
};
use crossmesh_testkit::seed::Seed;
use crossmesh_testkit::sweep;

fn cost(seed: &mut Seed) -> f64 {
    0.125 * (1 + seed.below(16)) as f64
}

/// Stages, microbatches, device speeds, communication and memory, each its own or none.
fn random(seed: &mut Seed) -> Spec {
    let devices = 1 + seed.below(6) as u32;
    let microbatches = 1 + seed.below(12) as u32;
    let slices = if seed.below(2) == 0 { 1 } else { devices };
    let work = (0..slices).map(|_| StageCost::new(cost(seed), cost(seed), cost(seed))).collect();
    let hop = match seed.below(3) {
        0 => Hop::default(),
        1 => Hop::both(cost(seed)),
        _ => Hop { activation: cost(seed), gradient: cost(seed) },
    };
    let speeds = match seed.below(2) {
        0 => vec![],
        _ => (0..devices).map(|_| 0.25 * (1 + seed.below(8)) as f64).collect(),
    };
    let caps = (seed.below(3) == 0)
        .then(|| (0..devices).map(|_| 1.0 + 0.5 * seed.below(2 * devices as usize) as f64).collect());
    Spec { work, hop, speeds, caps, ..Spec::even(devices, microbatches) }
}

#[test]
fn no_schedule_beats_the_common_bound_and_every_bubble_adds_up() {
    let mut seed = Seed(12);
    let (pipelines, mut seen) = (sweep::count(300), 0);
    for round in 0..pipelines {
        let spec = random(&mut seed);
        let bound = spec.bound();
        let mut named = Vec::new();
        for name in Name::ALL {
            let Ok(schedule) = generate(name, &spec) else {
                assert!(name != Name::Search, "round {round}: one microbatch at a time fits {spec:?}");
                continue;
            };
            let costs = spec.costs(schedule.placement()).unwrap();
            let timed = time(&schedule, &costs).unwrap();
            let about = format!("round {round}, {name} of {spec:?}");
            assert!(timed.makespan >= bound * (1.0 - 1e-9), "{about}: {} < {bound}", timed.makespan);
            let own = bound::placed(schedule.placement(), &costs, spec.microbatches);
            assert!(timed.makespan >= own * (1.0 - 1e-9), "{about}: {} < {own}", timed.makespan);
            adds_up(&schedule, &timed, &about);
            leads_through(&schedule, &timed, &about);
            if let Some(caps) = &spec.caps {
                let footprint = memory::Footprint::shares(schedule.placement());
                memory::within(&schedule, &timed, &footprint, caps).expect("within the cap");
            }
            named.push((name, timed.makespan));
            seen += 1;
        }
        let (_, found) = named.pop().expect("search is the last");
        for (name, makespan) in named {
            assert!(
                found <= makespan * (1.0 + 1e-9),
                "round {round}: search {found}, {name} {makespan}, {spec:?}"
            );
        }
    }
    assert!(seen > 5 * pipelines, "{seen} schedules");
}

/// The path begins with the step and ends with it, and nothing on it waits for anything but what is before it.
fn leads_through(schedule: &Schedule, timed: &Timed, about: &str) {
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * timed.makespan.max(1e-9);
    let path = critical_path(schedule, timed);
    let (first, last) = (path.first().expect("a step has passes"), path.last().expect("a step has passes"));
    assert!(close(first.span.start, 0.0) && close(last.span.end, timed.makespan), "{about}: {path:?}");
    for pair in path.windows(2) {
        assert!(close(pair[0].arrived, pair[1].span.start), "{about}: {pair:?}");
        assert!(pair[0].arrived >= pair[0].span.end - 1e-9, "{about}: {pair:?}");
    }
}

/// busy + inside + between = busy + ramp + imbalance + communication + dependency = the whole step, on every device.
fn adds_up(schedule: &Schedule, timed: &Timed, about: &str) {
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * timed.makespan.max(1e-9);
    for (at, bubble) in bubble::split(schedule, timed).iter().enumerate() {
        let device = DeviceId::at(at);
        assert!(close(timed.busy[at] + bubble.total(), timed.makespan), "{about}: {device} {bubble:?}");
        let parts = [bubble.ramp, bubble.imbalance, bubble.communication, bubble.dependency];
        assert!(parts.iter().all(|part| *part >= -1e-9), "{about}: {device} {bubble:?}");
        let span = timed.span_of(device);
        let inside = timed.idle_inside(device);
        assert!(close(timed.busy[at] + inside, span.end - span.start), "{about}: {device}");
        let most = timed.busy.iter().copied().fold(0.0, f64::max);
        assert!(bubble.imbalance <= most - timed.busy[at] + 1e-9, "{about}: {device} {bubble:?}");
    }
}

#[test]
fn causes_show_only_where_they_are() {
    let mut seed = Seed(5);
    for _ in 0..40 {
        let spec = random(&mut seed);
        let even = Spec { speeds: vec![], hop: Hop::default(), work: vec![spec.work[0]], caps: None, ..spec };
        for name in Name::ALL.into_iter().filter(|name| *name != Name::Search) {
            let Ok(schedule) = generate(name, &even) else { continue };
            let timed = time(&schedule, &even.costs(schedule.placement()).unwrap()).unwrap();
            for bubble in bubble::split(&schedule, &timed) {
                assert!(bubble.imbalance <= 1e-9 && bubble.communication <= 1e-9, "{name}: {bubble:?}");
            }
        }
    }
}

#[test]
fn zero_bubble_is_counted_as_its_papers_do() {
    // Between steps a device waits for the next one; inside, ZB-H2 does not.
    for (devices, microbatches) in [(4, 12), (8, 32)] {
        let spec = Spec::even(devices, microbatches);
        let timed = |name| {
            let schedule = generate(name, &spec).unwrap();
            time(&schedule, &spec.costs(schedule.placement()).unwrap()).unwrap()
        };
        let (h2, plain) = (timed(Name::ZbH2), timed(Name::OneF1B));
        assert!(h2.inner_bubble() < 1e-9 && h2.bubble() > 0.03, "{} {}", h2.inner_bubble(), h2.bubble());
        assert!(
            (plain.inner_bubble() - plain.bubble()).abs() < 1e-9,
            "device 0 of 1F1B has both ends of the step"
        );
    }
}
