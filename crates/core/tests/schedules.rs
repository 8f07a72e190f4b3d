//! Every schedule against every checker, and the checkers and the clock against slow oracles that share nothing with them.

use std::collections::{BTreeMap, BTreeSet};

use crossmesh_core::id::{DeviceId, MicrobatchId, StageId};
use crossmesh_core::schedule::memory::{peaks, within};
use crossmesh_core::schedule::{
    Backward, Channel, Check, Costs, Footprint, GenerateError, Hop, Name, Pass, PassKind, Placement, Routes,
    Schedule, ScheduleError, Spec, StageCost, check, generate, time,
};
use crossmesh_testkit::seed::Seed;

/// Everything that can be had for these devices and microbatches.
fn all(devices: u32, microbatches: u32) -> Vec<Schedule> {
    let mut schedules = Vec::new();
    for name in Name::ALL.into_iter().filter(|name| *name != Name::Search) {
        for chunks in [None, Some(1), Some(3), Some(4)] {
            for backward in [None, Some(Backward::Split), Some(Backward::Fused)] {
                let spec = Spec { chunks, backward, ..Spec::even(devices, microbatches) };
                match generate(name, &spec) {
                    Ok(schedule) => schedules.push(schedule),
                    Err(
                        GenerateError::Chunks { .. }
                        | GenerateError::Backward { .. }
                        | GenerateError::NotAMultiple { .. }
                        | GenerateError::TooFew { .. },
                    ) => {}
                    Err(error) => panic!("{name} {devices}x{microbatches}: {error}"),
                }
            }
        }
    }
    schedules
}

fn describe(schedule: &Schedule) -> String {
    let placement = schedule.placement();
    let (devices, chunks) = (placement.num_devices(), placement.num_chunks());
    format!("{} p={devices} m={} v={chunks}", schedule.name(), schedule.num_microbatches())
}

#[test]
fn every_generator_passes_every_checker() {
    let mut seen = BTreeMap::new();
    for devices in 1..=16 {
        for microbatches in [1, 2, 3, 7, 16, 24, 33, 48, 64] {
            for schedule in all(devices, microbatches) {
                let what = describe(&schedule);
                check(&schedule).unwrap_or_else(|e| panic!("{what}: {e}"));
                check::channels(&schedule).unwrap_or_else(|e| panic!("{what}: {e}"));
                let costs = Costs::shared(schedule.placement(), 1.0, 1.0, 1.0, 0.3).unwrap();
                let timed = time(&schedule, &costs).unwrap_or_else(|e| panic!("{what}: {e}"));
                let ideal = 3.0 * f64::from(microbatches);
                assert!(timed.makespan >= ideal - 1e-9 && timed.bubble() < 1.0, "{what}: {}", timed.makespan);
                *seen.entry(schedule.name().to_string()).or_insert(0) += 1;
            }
        }
    }
    assert_eq!(seen.len(), Name::ALL.len() - 1, "{seen:?}");
    assert!(seen.values().all(|n| *n >= 40), "{seen:?}");
}

/// What a pass needs, told again: straight from the rules, for pipelines in model order without skips or moves.
fn needs(schedule: &Schedule, pass: Pass) -> Vec<Pass> {
    let (s, m) = (pass.stage.0, pass.microbatch);
    let has = |kind, s| schedule.devices().iter().flatten().any(|p| *p == Pass::new(kind, StageId(s), m));
    let backward = |s| if has(PassKind::BW, s) { PassKind::BW } else { PassKind::B };
    let last = schedule.placement().num_stages() as u32 - 1;
    match pass.kind {
        PassKind::F if s == 0 => vec![],
        PassKind::F => vec![Pass::new(PassKind::F, StageId(s - 1), m)],
        PassKind::W => vec![pass.with_kind(PassKind::B)],
        _ if s == last => vec![pass.with_kind(PassKind::F)],
        _ => vec![pass.with_kind(PassKind::F), Pass::new(backward(s + 1), StageId(s + 1), m)],
    }
}

/// Runs devices in any order, messages as late as chance has it; whether all get to their end.
fn runs_to_the_end(schedule: &Schedule, seed: &mut Seed) -> bool {
    let orders = schedule.devices();
    let mut done: BTreeSet<Pass> = BTreeSet::new();
    let mut next = vec![0; orders.len()];
    loop {
        let able: Vec<usize> = (0..orders.len())
            .filter(|d| {
                orders[*d].get(next[*d]).is_some_and(|p| needs(schedule, *p).iter().all(|n| done.contains(n)))
            })
            .collect();
        if able.is_empty() {
            return next.iter().zip(orders).all(|(n, order)| *n == order.len());
        }
        let device = able[seed.below(able.len())];
        done.insert(orders[device][next[device]]);
        next[device] += 1;
    }
}

/// The slow clock: every pass starts at 0, and all are put off until nothing is too early.
fn slow_makespan(schedule: &Schedule, costs: &Costs) -> f64 {
    let orders = schedule.devices();
    let mut start: BTreeMap<Pass, f64> = orders.iter().flatten().map(|p| (*p, 0.0)).collect();
    loop {
        let before = start.clone();
        for order in orders {
            for (at, pass) in order.iter().enumerate() {
                let mut earliest = start[pass];
                if at > 0 {
                    earliest = earliest.max(start[&order[at - 1]] + costs.pass(order[at - 1]));
                }
                for need in needs(schedule, *pass) {
                    let crosses =
                        schedule.placement().device(need.stage) != schedule.placement().device(pass.stage);
                    let hop = if crosses { 0.37 } else { 0.0 };
                    earliest = earliest.max(start[&need] + costs.pass(need) + hop);
                }
                start.insert(*pass, earliest);
            }
        }
        if before == start {
            return start.iter().map(|(pass, s)| s + costs.pass(*pass)).fold(0.0, f64::max);
        }
    }
}

#[test]
fn the_clock_agrees_with_the_slow_one() {
    let mut seed = Seed(11);
    for (devices, microbatches) in [(1, 1), (2, 4), (3, 5), (4, 8), (5, 3)] {
        for schedule in
            all(devices, microbatches).into_iter().filter(|s| s.name() != "bpipe" && s.name() != "dualpipev")
        {
            let mut time_of = || 0.25 * (1 + seed.below(9)) as f64;
            let stages =
                schedule.placement().stages().map(|_| StageCost::new(time_of(), time_of(), time_of()));
            let costs = Costs::new(stages.collect(), Hop::both(0.37)).unwrap().with_channel(Channel::Delay);
            let (fast, slow) = (time(&schedule, &costs).unwrap().makespan, slow_makespan(&schedule, &costs));
            assert!((fast - slow).abs() < 1e-9, "{}: {fast}, slowly {slow}", describe(&schedule));
        }
    }
}

/// The first checker that should complain, by going through the rules one after another.
fn expected(schedule: &Schedule, seed: &mut Seed) -> Option<Check> {
    let passes: BTreeSet<Pass> = schedule.devices().iter().flatten().copied().collect();
    for stage in schedule.placement().stages() {
        for microbatch in schedule.microbatches() {
            let has = |kind| passes.contains(&Pass::new(kind, stage, microbatch));
            let split = (has(PassKind::B), has(PassKind::W));
            let whole = matches!((has(PassKind::BW), split), (true, (false, false)) | (false, (true, true)));
            if !has(PassKind::F) || !whole {
                return Some(Check::Completeness);
            }
        }
    }
    for order in schedule.devices() {
        for (at, pass) in order.iter().enumerate() {
            let late = needs(schedule, *pass).into_iter().any(|need| order[at..].contains(&need));
            if late {
                return Some(Check::Dependencies);
            }
        }
    }
    (!runs_to_the_end(schedule, seed)).then_some(Check::Deadlock)
}

/// One small thing wrong with the orders.
fn mutated(orders: &[Vec<Pass>], seed: &mut Seed) -> Vec<Vec<Pass>> {
    let mut orders = orders.to_vec();
    let device = seed.below(orders.len());
    let order = &mut orders[device];
    let at = seed.below(order.len());
    match seed.below(4) {
        0 => {
            order.remove(at);
        }
        1 => {
            let kind = seed.pick(&[PassKind::F, PassKind::B, PassKind::W, PassKind::BW]);
            order[at] = order[at].with_kind(kind);
        }
        2 => {
            let other = seed.below(order.len());
            order.swap(at, other);
        }
        _ => {
            let to = seed.below(order.len());
            let pass = order.remove(at);
            order.insert(to, pass);
        }
    }
    orders
}

#[test]
fn a_thousand_mutated_schedules_fail_the_right_checker() {
    let sources: Vec<Schedule> = [(2, 4), (3, 6), (4, 8)]
        .into_iter()
        .flat_map(|(p, m)| all(p, m))
        .filter(|s| s.name() != "bpipe" && s.name() != "dualpipev")
        .collect();
    let mut counts: BTreeMap<String, u32> = BTreeMap::new();
    let mut seed = Seed(4);
    let mut wrong = 0;
    while wrong < 1000 {
        let source = &sources[seed.below(sources.len())];
        let placement = source.placement().clone();
        let routes = Routes::model_order(placement.num_stages());
        let orders = mutated(source.devices(), &mut seed);
        let verdict =
            match Schedule::new("mutated", placement, routes, source.num_microbatches(), orders.clone()) {
                Ok(schedule) => {
                    let expected = expected(&schedule, &mut seed);
                    let found = check(&schedule).err();
                    assert_eq!(found.as_ref().map(|e| e.check()), expected, "{found:?} in {orders:?}");
                    if expected.is_none() {
                        assert!(
                            time(
                                &schedule,
                                &Costs::even(schedule.placement().num_stages(), 1.0, 1.0, 1.0, 0.5).unwrap()
                            )
                            .is_ok()
                        );
                        continue;
                    }
                    format!("{:?}", expected.unwrap())
                }
                Err(ScheduleError::PassTwice { pass, device }) => {
                    let times = orders[device.index()].iter().filter(|p| **p == pass).count();
                    assert!(times > 1, "{pass} is there {times} times");
                    "Twice".into()
                }
                Err(error) => panic!("{error}"),
            };
        wrong += 1;
        *counts.entry(verdict).or_default() += 1;
    }
    for check in ["Completeness", "Dependencies", "Deadlock", "Twice"] {
        assert!(counts.get(check).is_some_and(|n| *n >= 30), "{counts:?}");
    }
}

#[test]
fn a_cap_below_the_peak_is_named_with_the_pass() {
    let mut seed = Seed(9);
    for schedule in all(4, 8) {
        let costs = Costs::shared(schedule.placement(), 1.0, 1.0, 1.0, 0.1).unwrap();
        let timed = time(&schedule, &costs).unwrap();
        let units = Footprint::units(schedule.placement());
        let peaks: Vec<f64> = peaks(&schedule, &timed, &units).iter().map(|p| p.amount).collect();
        within(&schedule, &timed, &units, &peaks).unwrap();
        let device = seed.below(4);
        let mut caps = peaks.clone();
        caps[device] -= 0.25;
        let error = within(&schedule, &timed, &units, &caps).unwrap_err();
        assert_eq!(error.check(), Check::Memory);
        assert!(error.to_string().starts_with(&DeviceId::at(device).to_string()), "{error}");
    }
}

/// Counts activations one by one, for schedules that move none.
#[test]
fn peaks_agree_with_a_count() {
    for schedule in all(4, 8).into_iter().chain(all(3, 9)).filter(|s| s.name() != "bpipe") {
        let costs = Costs::shared(schedule.placement(), 1.0, 1.0, 1.0, 0.1).unwrap();
        let timed = time(&schedule, &costs).unwrap();
        let units = Footprint::units(schedule.placement()).keeping(1.0);
        let peaks = peaks(&schedule, &timed, &units);
        for (order, peak) in schedule.devices().iter().zip(peaks) {
            let mut live: BTreeSet<(StageId, MicrobatchId)> = BTreeSet::new();
            let mut most = 0;
            for pass in order {
                match pass.kind {
                    PassKind::F => live.insert((pass.stage, pass.microbatch)),
                    PassKind::B => false,
                    _ => live.remove(&(pass.stage, pass.microbatch)),
                };
                most = most.max(live.len());
            }
            assert_eq!(peak.amount, most as f64, "{}", describe(&schedule));
        }
    }
}

#[test]
fn uneven_costs_and_odd_sizes_make_good_schedules_too() {
    let mut seed = Seed(77);
    for round in 0..60 {
        let devices = 1 + seed.below(7) as u32;
        let microbatches = 1 + seed.below(20) as u32;
        let mut cost = || 0.125 * seed.below(20) as f64;
        let work = (0..devices).map(|_| StageCost::new(cost(), cost(), cost())).collect();
        let hop = Hop { activation: cost(), gradient: cost() };
        let spec = Spec { work, hop, ..Spec::even(devices, microbatches) };
        for name in Name::ALL.into_iter().filter(|name| *name != Name::Search || round % 6 == 0) {
            let Ok(schedule) = generate(name, &spec) else { continue };
            check(&schedule).unwrap_or_else(|e| panic!("round {round}, {}: {e}", describe(&schedule)));
            let placement: &Placement = schedule.placement();
            assert!(time(&schedule, &spec.costs(placement).unwrap()).is_ok());
        }
    }
}
