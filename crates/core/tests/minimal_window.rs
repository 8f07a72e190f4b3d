//! What minimal-window promises, against eager-1F1B and against every order there is; and what search promises.

use crossmesh_core::schedule::generate::{SEARCH_STEPS, search};
use crossmesh_core::schedule::memory::peaks;
use crossmesh_core::schedule::{
    Backward, Footprint, GenerateError, Hop, Name, Schedule, Spec, StageCost, check, generate, time,
};
use crossmesh_testkit::seed::Seed;

/// Makespan, and the most activations of each device.
fn run(name: Name, spec: &Spec) -> (f64, Vec<f64>) {
    let schedule = generate(name, spec).unwrap_or_else(|e| panic!("{name} {spec:?}: {e}"));
    figures(&schedule, spec)
}

fn figures(schedule: &Schedule, spec: &Spec) -> (f64, Vec<f64>) {
    check(schedule).unwrap();
    let timed = time(schedule, &spec.costs(schedule.placement()).unwrap()).unwrap();
    let held = peaks(schedule, &timed, &Footprint::shares(schedule.placement()));
    (timed.makespan, held.iter().map(|p| p.amount).collect())
}

#[test]
fn within_eagers_memory_it_is_never_slower_than_eager() {
    for backward in [Backward::Split, Backward::Fused] {
        for p in [2u32, 3, 4, 6, 9, 16] {
            for hop in [0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0] {
                let m = 4 * p;
                let spec = Spec { backward: Some(backward), ..Spec::even(p, m).with_hop(hop) };
                let (eager, held) = run(Name::Eager1F1B, &spec);
                let capped = Spec { caps: Some(held.clone()), ..spec.clone() };
                let (ours, ours_held) = run(Name::MinimalWindow, &capped);
                assert!(ours <= eager * (1.0 + 1e-9), "{backward} p={p} c={hop}: {ours}, eager {eager}");
                assert!(ours_held.iter().zip(&held).all(|(ours, eager)| ours <= eager));
                if backward == Backward::Split && hop <= 1.0 {
                    assert!(ours_held[0] < held[0], "{backward} p={p} c={hop}: holds {ours_held:?}");
                }
            }
        }
    }
}

#[test]
fn without_caps_communication_is_hidden_as_long_as_a_hop_fits_into_a_period() {
    for backward in [Backward::Split, Backward::Fused] {
        for p in [2u32, 4, 7] {
            for hop in [0.1, 1.0, 1.7, 2.0, 2.5, 3.0] {
                let m = 40;
                let spec = Spec { backward: Some(backward), ..Spec::even(p, m).with_hop(hop) };
                let (p, m) = (f64::from(p), f64::from(m));
                // Nothing but the way of the first microbatch there and of the last one back.
                let filled = (m + p - 1.0) * 3.0 + 2.0 * (p - 1.0) * hop;
                let (ours, _) = run(Name::MinimalWindow, &spec);
                assert!(ours <= filled + 1e-9, "{backward} p={p} c={hop}: {ours}, hidden is {filled}");
            }
        }
    }
}

/// Every order of F and BW of one stage with at most `window` microbatches in flight.
fn orders(m: usize, window: usize) -> Vec<Vec<bool>> {
    fn extend(f: usize, b: usize, m: usize, window: usize, order: &mut Vec<bool>, all: &mut Vec<Vec<bool>>) {
        if b == m {
            all.push(order.clone());
        }
        for (forward, able) in [(true, f < m && f - b < window), (false, b < f)] {
            if able {
                order.push(forward);
                extend(f + usize::from(forward), b + usize::from(!forward), m, window, order, all);
                order.pop();
            }
        }
    }
    let mut all = vec![];
    extend(0, 0, m, window, &mut vec![], &mut all);
    all
}

/// Whether three stages end by `deadline` with f = 1, b + w = 2.
fn ends_by(deadline: f64, m: usize, hop: f64, stages: [&[bool]; 3]) -> bool {
    let mut made = [[vec![], vec![]], [vec![], vec![]], [vec![], vec![]]];
    let (mut next, mut free) = ([0; 3], [0.0f64; 3]);
    loop {
        let before = next;
        for s in 0..3 {
            while let Some(&forward) = stages[s].get(next[s]) {
                let k = made[s][usize::from(!forward)].len();
                let input = match (forward, s) {
                    (true, 0) => Some(0.0),
                    (true, _) => made[s - 1][0].get(k).map(|t: &f64| t + hop),
                    (false, 2) => made[2][0].get(k).copied(),
                    (false, _) => made[s + 1][1].get(k).map(|t: &f64| t + hop),
                };
                let Some(input) = input else { break };
                let end = input.max(free[s]) + if forward { 1.0 } else { 2.0 };
                if end > deadline {
                    return false;
                }
                free[s] = end;
                made[s][usize::from(!forward)].push(end);
                next[s] += 1;
            }
        }
        if next == [2 * m; 3] {
            return true;
        }
        if next == before {
            return false;
        }
    }
}

/// With fused backwards eager's windows are the smallest: no order at all with one less in flight is as fast. (The window
/// `(n - i) + (n - 1 - i) 2c / (F + B)` rounded up, 4 here, is not enough.)
#[test]
fn no_order_with_a_smaller_window_than_eagers_is_as_fast() {
    let (m, hop) = (8, 1.0);
    let eager = (8.0 + 2.0) * 3.0 + 4.0 * hop + 1e-9;
    let last = orders(m, 1);
    let fast = |first: usize, second: usize| {
        let (first, second) = (orders(m, first), orders(m, second));
        first.iter().any(|a| second.iter().any(|b| ends_by(eager, m, hop, [a, b, &last[0]])))
    };
    assert!(fast(5, 3));
    assert!(!fast(4, 3));
    assert!(!fast(5, 2));
    let spec = Spec { backward: Some(Backward::Fused), ..Spec::even(3, 8).with_hop(hop) };
    assert_eq!(run(Name::MinimalWindow, &spec), (34.0, vec![5.0, 3.0, 1.0]));
}

#[test]
fn a_cap_makes_the_step_longer_but_is_kept() {
    let mut last = 0.0;
    for cap in [8.0, 5.0, 3.0, 2.0, 1.0] {
        let spec = Spec { caps: Some(vec![cap; 4]), ..Spec::even(4, 12).with_hop(1.0) };
        let (makespan, held) = run(Name::MinimalWindow, &spec);
        assert!(held.iter().all(|h| *h <= cap + 1e-9), "cap {cap}: {held:?}");
        assert!(makespan >= last, "cap {cap}: {makespan} after {last}");
        last = makespan;
    }
    let none = Spec { caps: Some(vec![4.0, 0.5, 4.0]), ..Spec::even(3, 4) };
    assert_eq!(
        generate(Name::MinimalWindow, &none).unwrap_err().to_string(),
        "no schedule fits: device 1 may hold 0.5 activations, and a single microbatch leaves 1 there\nhint: raise its memory cap to 1 at least"
    );
}

#[test]
fn search_is_never_worse_than_the_best_named_one_and_always_the_same() {
    let mut seed = Seed(5);
    for round in 0..12 {
        let p = 2 + seed.below(4) as u32;
        let m = 1 + seed.below(12) as u32;
        let mut cost = || 0.25 * (1 + seed.below(8)) as f64;
        let work = (0..p).map(|_| StageCost::new(cost(), cost(), cost())).collect();
        let hop = Hop { activation: cost() - 0.25, gradient: cost() - 0.25 };
        let caps = (round % 3 == 0).then(|| (0..p).map(|_| 1.0 + seed.below(5) as f64).collect());
        let spec = Spec { work, hop, caps, ..Spec::even(p, m) };
        let found = search(&spec, SEARCH_STEPS).unwrap();
        let (makespan, held) = figures(&found.schedule, &spec);
        assert!((makespan - found.makespan).abs() < 1e-9);
        for name in Name::ALL.into_iter().filter(|name| *name != Name::Search) {
            if let Ok(schedule) = generate(name, &spec) {
                let (named, _) = figures(&schedule, &spec);
                assert!(makespan <= named * (1.0 + 1e-9), "round {round}: {makespan}, {name} {named}");
            }
        }
        if let Some(caps) = &spec.caps {
            assert!(held.iter().zip(caps).all(|(held, cap)| *held <= cap + 1e-9), "{held:?} of {caps:?}");
        }
        assert_eq!(search(&spec, SEARCH_STEPS).unwrap().schedule, found.schedule, "round {round}");
    }
}

#[test]
fn search_finds_the_best_order_of_small_steps() {
    // Two stages, fused: compare with every pair of orders.
    for (f0, f1, hop) in [(1.0, 1.0, 0.0), (1.0, 2.0, 0.5), (2.0, 1.0, 1.5), (1.0, 1.5, 4.0)] {
        let m = 4;
        let work = vec![StageCost::new(f0, 2.0 * f0, 0.0), StageCost::new(f1, 2.0 * f1, 0.0)];
        let spec = Spec {
            work,
            hop: Hop::both(hop),
            chunks: Some(1),
            backward: Some(Backward::Fused),
            ..Spec::even(2, m)
        };
        let found = search(&spec, SEARCH_STEPS).unwrap().makespan;
        let all = orders(m as usize, m as usize);
        let best = all.iter().flat_map(|a| all.iter().map(move |b| (a, b)));
        let best =
            best.map(|(a, b)| two_stages(m as usize, [f0, f1], hop, [a, b])).fold(f64::INFINITY, f64::min);
        assert!((found - best).abs() < 1e-9, "f {f0} {f1} hop {hop}: found {found}, best {best}");
    }
}

/// The makespan of two stages whose backwards take twice as long as their forwards; without end if they get stuck.
fn two_stages(m: usize, f: [f64; 2], hop: f64, stages: [&[bool]; 2]) -> f64 {
    let mut made: [[Vec<f64>; 2]; 2] = Default::default();
    let (mut sent, mut next, mut free) = ([0.0f64; 2], [0; 2], [0.0f64; 2]);
    loop {
        let before = next;
        for s in 0..2 {
            while let Some(&forward) = stages[s].get(next[s]) {
                let kind = usize::from(!forward);
                let k = made[s][kind].len();
                let input = match (forward, s) {
                    (true, 0) => Some(0.0),
                    (true, _) => made[0][0].get(k).copied(),
                    (false, 1) => made[1][0].get(k).copied(),
                    (false, _) => made[1][1].get(k).copied(),
                };
                let Some(input) = input else { break };
                free[s] = input.max(free[s]) + if forward { f[s] } else { 2.0 * f[s] };
                next[s] += 1;
                // What leaves the device is recorded when it arrives; a channel carries one message at a time.
                if (forward, s) == (true, 0) || (forward, s) == (false, 1) {
                    sent[s] = sent[s].max(free[s]) + hop;
                    made[s][kind].push(sent[s]);
                } else {
                    made[s][kind].push(free[s]);
                }
            }
        }
        if next == [2 * m; 2] {
            return free[0].max(free[1]);
        }
        if next == before {
            return f64::INFINITY;
        }
    }
}

#[test]
fn named_schedules_say_which_constraint_is_in_the_way() {
    let error = |name, spec: &Spec| generate(name, spec).unwrap_err().to_string();
    assert_eq!(
        error(Name::Interleaved1F1B, &Spec::even(4, 10)),
        "interleaved-1f1b needs the number of microbatches to be a multiple of the number of stages: 10 is no multiple of 4\nhint: 12 microbatches would do"
    );
    assert_eq!(
        error(Name::DualPipeV, &Spec::even(4, 7)),
        "dualpipev needs at least 8 microbatches for 4 stages: 7 are too few"
    );
    let capped = Spec { caps: Some(vec![3.0; 4]), ..Spec::even(4, 8) };
    assert_eq!(
        error(Name::GPipe, &capped),
        "no schedule of this kind keeps to the memory caps: device 0 holds 8 activations at 0F7, more than its cap of 3 activations"
    );
    let chunks = Spec { chunks: Some(3), ..Spec::even(4, 8) };
    assert_eq!(error(Name::Zbv, &chunks), "zbv cannot have 3 chunks a device\nhint: it has 2");
    assert!(matches!(
        generate(Name::OneF1B, &Spec { work: vec![StageCost::default(); 3], ..Spec::even(4, 8) }),
        Err(GenerateError::Slices { .. })
    ));
    assert!(error(Name::OneF1B, &Spec::even(4, 0)).starts_with("a step needs at least one microbatch"));
    assert!(error(Name::OneF1B, &Spec::even(0, 4)).starts_with("a pipeline needs at least one stage"));
    assert!(error(Name::OneF1B, &Spec::even(60_000, 4_000_000)).contains("more than the"));
    let nan = Spec::even(4, 4).with_work(f64::NAN, 1.0, 1.0);
    assert!(error(Name::OneF1B, &nan).starts_with("the cost of f of stage 0 is NaN"));
}
