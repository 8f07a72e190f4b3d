use super::*;
use crate::schedule::memory::peaks;
use crate::schedule::{check, time};

fn spec(devices: u32, microbatches: u32) -> Spec {
    Spec::even(devices, microbatches)
}

fn made(name: Name, spec: &Spec) -> Schedule {
    let schedule = generate(name, spec).unwrap_or_else(|e| panic!("{name}: {e}"));
    check::check(&schedule).unwrap_or_else(|e| panic!("{name} {}x{}: {e}", spec.devices, spec.microbatches));
    schedule
}

fn makespan(name: Name, spec: &Spec) -> f64 {
    let schedule = made(name, spec);
    time(&schedule, &spec.costs(schedule.placement()).unwrap()).unwrap().makespan
}

/// Peaks in activations of a stage, where B lets go of none.
fn peak(name: Name, spec: &Spec, kept: f64) -> Vec<f64> {
    let schedule = made(name, spec);
    let timed = time(&schedule, &spec.costs(schedule.placement()).unwrap()).unwrap();
    let footprint = Footprint::units(schedule.placement()).keeping(kept);
    peaks(&schedule, &timed, &footprint).iter().map(|p| p.amount).collect()
}

#[test]
fn golden_makespans_of_the_1f1b_family() {
    for name in [Name::GPipe, Name::OneF1B, Name::Eager1F1B] {
        assert_eq!(makespan(name, &spec(4, 8)), 33.0, "{name}");
        assert_eq!(makespan(name, &spec(8, 32)), 117.0, "{name}");
    }
    let chunks = |p, m, v| makespan(Name::Interleaved1F1B, &Spec { chunks: Some(v), ..spec(p, m) });
    assert_eq!([chunks(4, 8, 2), chunks(4, 8, 4)], [28.5, 26.25]);
    assert_eq!([chunks(8, 32, 2), chunks(8, 32, 4)], [106.5, 101.25]);
}

#[test]
fn golden_peaks_of_the_1f1b_family() {
    assert_eq!(peak(Name::OneF1B, &spec(4, 8), 0.5), [4.0, 3.0, 2.0, 1.0]);
    assert_eq!(peak(Name::Eager1F1B, &spec(4, 8), 0.5), [7.0, 5.0, 3.0, 1.0]);
    assert_eq!(peak(Name::GPipe, &spec(4, 8), 0.5), [8.0; 4]);
    assert_eq!(peak(Name::Interleaved1F1B, &spec(4, 8), 0.5), [11.0, 9.0, 7.0, 5.0]);
    let p8: Vec<f64> = (0..8).map(|i| f64::from(23 - 2 * i)).collect();
    assert_eq!(peak(Name::Interleaved1F1B, &spec(8, 32), 0.5), p8);
}

#[test]
fn zero_bubble_schedules_meet_their_goldens() {
    for (p, m) in [(4, 8), (8, 32), (2, 5), (16, 40)] {
        let (p_, m_) = (f64::from(p), f64::from(m));
        assert_eq!(makespan(Name::ZbH1, &spec(p, m)), 3.0 * m_ + p_ - 1.0);
        let h2 = made(Name::ZbH2, &spec(p, m));
        let timed = time(&h2, &spec(p, m).costs(h2.placement()).unwrap()).unwrap();
        for device in h2.placement().devices() {
            let span = timed.span_of(device);
            assert_eq!(span.end - span.start, 3.0 * m_, "h2 {p}x{m} {device}");
        }
        let peak_h2 = peak(Name::ZbH2, &spec(p, m), 1.0).into_iter().fold(0.0, f64::max);
        assert!(peak_h2 < 2.0 * p_, "{peak_h2}");
    }
    assert_eq!(peak(Name::ZbH1, &spec(4, 8), 0.5), [4.0, 3.5, 3.0, 2.5]);
    assert_eq!(peak(Name::ZbH1, &spec(4, 8), 1.0), [4.0; 4]);
    let row = |stage: usize| {
        let orders = made(Name::ZbH1, &spec(4, 8)).devices()[stage].clone();
        orders.iter().map(|p| format!("{}{}", p.kind, p.microbatch.0)).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(row(0), "F0 F1 F2 F3 B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 B5 W5 B6 W6 B7 W7");
    assert_eq!(row(3), "F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7");
}

#[test]
fn v_schedules_are_no_longer_and_hold_no_more_than_the_goldens() {
    // Half-stage units: makespan and peak of V-Half, V-Min and ZBV.
    let goldens = [
        ((4, 8), [(53, 6), (59, 4), (51, 8)]),
        ((4, 16), [(101, 6), (107, 4), (99, 8)]),
        ((6, 12), [(83, 8), (89, 6), (77, 12)]),
        ((8, 16), [(113, 10), (123, 8), (103, 16)]),
        ((8, 32), [(209, 10), (219, 8), (199, 16)]),
    ];
    for ((p, m), golden) in goldens {
        let names = [Name::VHalf, Name::VMin, Name::Zbv];
        for (name, (longest, highest)) in names.into_iter().zip(golden).chain([(Name::VZb, golden[2])]) {
            let (made, held) = (2.0 * makespan(name, &spec(p, m)), peak(name, &spec(p, m), 1.0));
            assert!(made <= f64::from(longest), "{name} {p}x{m} takes {made}, golden {longest}");
            assert!(held.iter().all(|h| *h <= f64::from(highest)), "{name} {p}x{m} holds {held:?}");
        }
    }
}

#[test]
fn eager_hides_a_hop_as_long_as_its_closed_form_says() {
    for (p, m) in [(2u32, 8u32), (4, 16), (8, 32)] {
        for c in [0.0, 0.1, 0.5, 1.0, 1.5] {
            let spec = spec(p, m).with_hop(c);
            let (p_, m_) = (f64::from(p), f64::from(m));
            let closed = (m_ + p_ - 1.0) * 3.0 + 2.0 * (p_ - 1.0) * c;
            let eager = makespan(Name::Eager1F1B, &spec);
            assert!((eager - closed).abs() < 1e-9, "{p}x{m} c={c}: {eager}, closed form {closed}");
        }
    }
    let spec = spec(4, 16).with_hop(1.0);
    assert_eq!([makespan(Name::OneF1B, &spec), makespan(Name::Eager1F1B, &spec)], [85.0, 63.0]);
}

#[test]
fn bpipe_keeps_to_its_bound() {
    for p in 2..=16 {
        for m in [1, 2, 7, 33] {
            let held = peak(Name::BPipe, &spec(p, m), 0.5);
            let bound = f64::from(p + 2) / 2.0;
            assert!(held.iter().all(|h| *h <= bound.ceil()), "{p}x{m}: {held:?}");
            assert_eq!(makespan(Name::BPipe, &spec(p, m)), makespan(Name::OneF1B, &spec(p, m)));
        }
    }
}

/// F 10, B 10, W 8 for every stage, hops of 1, p8m32: bubbles of the authors' generators (algorithms.md B8). Those of the V count
/// a chunk as a stage, so a device's whole share costs twice as much.
#[test]
fn uneven_passes_leave_no_more_bubble_than_the_goldens() {
    let bubble = |name, spec: &Spec| {
        let schedule = made(name, spec);
        100.0 * time(&schedule, &spec.costs(schedule.placement()).unwrap()).unwrap().bubble()
    };
    let linear = spec(8, 32).with_work(10.0, 10.0, 8.0).with_hop(1.0);
    let v = spec(8, 32).with_work(20.0, 20.0, 16.0).with_hop(1.0);
    for (name, spec, golden) in [
        (Name::ZbH1, &linear, 11.1),
        (Name::ZbH2, &linear, 7.9),
        (Name::Zbv, &v, 5.5),
        (Name::VZb, &v, 5.5),
        (Name::VHalf, &v, 11.6),
        (Name::VMin, &v, 24.6),
    ] {
        let bubble = bubble(name, spec);
        assert!(bubble < golden + 0.05, "{name}: {bubble} %, golden {golden} %");
    }
}
