//! Ranks as threads, with engines between them: what they compute equals what one rank does.

mod common;
mod grid;

use crossmesh_core::schedule::Backward;
use crossmesh_train::data::Split;
use crossmesh_train::job::Dealt;
use crossmesh_train::models::gpt::GptConfig;
use crossmesh_train::models::unet::UnetConfig;
use crossmesh_train::stage::Recompute;
use grid::{Case, Kind, adamw, compare, compare_with, gpt_config, gradients, run};

/// One rank itself, against a runtime without an engine.
#[test]
fn one_rank_equals_the_slow_runtime() {
    let case = Case::gpt("gpipe", &["S{dp:1}"]);
    let (loss, grads) = gradients::<f64>(&case);
    let Kind::Gpt(config) = &case.kind else { unreachable!() };
    let model = crossmesh_train::models::gpt::Gpt::new(config.clone()).unwrap();
    let column = |port: &str, m: u64| {
        let samples = m * case.samples as u64..(m + 1) * case.samples as u64;
        match case.feed().read(port, samples, Split::Training).unwrap() {
            crossmesh_train::runtime::Column::Ids(ids) => (port.to_string(), common::Whole::Ids(ids)),
            crossmesh_train::runtime::Column::Real(x) => (port.to_string(), common::Whole::Real(x)),
        }
    };
    let batch: Vec<_> = (0..u64::from(case.microbatches))
        .map(|m| ["tokens", "targets"].map(|port| column(port, m)).into_iter().collect())
        .collect();
    let job = common::Job { step: 0, ..common::Job::alone(config.layers + 2, case.samples) };
    let wanted = common::run(&model, &job, &batch);
    assert!((loss - wanted.loss).abs() < 1e-12 * wanted.loss);
    let (apart, name) = grid::difference(&grads, &wanted.grads);
    assert!(apart < 1e-11, "{name} is {apart:e} off");
}

const PAIR: [&str; 2] = ["A{dp:1}", "B{dp:1}"];
/// Stages on unequal meshes.
const UNEQUAL: [&str; 3] = ["A{dp:2,tp:2}", "B{dp:4}", "C{tp:3}"];

#[test]
fn every_schedule() {
    let schedules = [
        "gpipe",
        "1f1b",
        "eager-1f1b",
        "zb-h1",
        "zb-h2",
        "minimal-window",
        "search",
        "interleaved-1f1b",
        "zbv",
        "v-half",
        "v-min",
        "v-zb",
        "dualpipev",
        "bpipe",
    ];
    // Deep enough for the eight stages that a search may choose.
    let kind = Kind::Gpt(GptConfig { layers: 6, ..gpt_config(true, 0.1) });
    for schedule in schedules {
        compare(&Case { kind: kind.clone(), ..Case::gpt(schedule, &PAIR) });
        compare(&Case { kind: kind.clone(), ..Case::gpt(schedule, &["A{tp:2}", "B{dp:2}"]) });
    }
}

/// A vocabulary that does not divide puts what all ranks along `tp` hold at other places of their buffers: still they hold the same bits,
/// which `run` checks.
#[test]
fn replicas_are_bit_equal_wherever_they_lie() {
    for (mesh, zero) in [
        ("A{dp:4,tp:2}", 0),
        ("A{dp:4,tp:2}", 1),
        ("A{dp:4,tp:2}", 2),
        ("A{dp:4,tp:2}", 3),
        ("A{dp:3,tp:2}", 0),
    ] {
        let kind = Kind::Gpt(GptConfig { tied: true, ..GptConfig::new(257, 8, 32, 2, 4) });
        let case =
            Case { kind, dealt: Dealt::zero(zero), bucket_bytes: 1 << 14, ..Case::gpt("gpipe", &[mesh]) };
        run::<f32>(&case, adamw(), 4);
    }
}

/// Validation only looks: it is the same on every layout, and the steps around it are as if it had not been.
#[test]
fn validation_is_the_same_on_every_layout_and_changes_nothing() {
    let looked = |case: &Case| {
        let (model, job) = (case.kind.model::<f64>(), case.job::<f64>(adamw()));
        let ranks = crossmesh_train::runtime::in_threads::<f64, _>(&*model, &job, &case.feed(), |trainer| {
            let first = trainer.step()?.loss;
            let (held_out, again) = (trainer.evaluate(3)?, trainer.evaluate(3)?);
            assert_eq!((held_out, trainer.steps()), (again, 1));
            Ok([first, held_out, trainer.step()?.loss])
        });
        let ranks = ranks.unwrap_or_else(|error| panic!("{case:?}: {error}"));
        assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{case:?}: {ranks:?}");
        ranks[0]
    };
    let kind = Kind::Gpt(GptConfig { layers: 6, ..gpt_config(true, 0.1) });
    let cases = [
        ("1f1b", &UNEQUAL[..]),
        ("zbv", &["A{tp:2}", "B{dp:2}"]),
        ("interleaved-1f1b", &["A{dp:2}", "B{tp:3}"]),
        ("bpipe", &["A{tp:2}", "B{dp:1}", "C{dp:2}", "D{dp:1}"]),
    ];
    let alone = looked(&Case { kind: kind.clone(), ..Case::gpt("gpipe", &["S{dp:1}"]) });
    let steps = run::<f64>(&Case { kind: kind.clone(), ..Case::gpt("gpipe", &["S{dp:1}"]) }, adamw(), 2);
    assert_eq!([alone[0], alone[2]], [0, 1].map(|i| steps.records[0][i].loss), "as if nobody had looked");
    for (schedule, meshes) in cases {
        let case = Case { kind: kind.clone(), ..Case::gpt(schedule, meshes) };
        for (got, wanted) in looked(&case).iter().zip(alone) {
            assert!((got - wanted).abs() <= 1e-10 * wanted, "{case:?}: {got} for {wanted}");
        }
    }
}

#[test]
fn backwards_fused_and_split() {
    for schedule in ["gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "minimal-window"] {
        for backward in [Backward::Fused, Backward::Split] {
            compare(&Case { backward: Some(backward), ..Case::gpt(schedule, &["A{dp:2}", "B{tp:2}"]) });
        }
    }
}

#[test]
fn unequal_stages() {
    for (tied, dropout) in [(true, 0.1), (false, 0.0)] {
        let kind = Kind::Gpt(gpt_config(tied, dropout));
        for meshes in
            [&UNEQUAL[..], &["A{tp:3}", "B{dp:2}", "C{dp:1}", "D{dp:2,tp:2}"], &["A{dp:3}", "B{tp:2}"]]
        {
            for (zero, sequence_parallel) in [(0, true), (1, false), (2, false), (3, true)] {
                let dealt = Dealt::zero(zero);
                let case = Case { kind: kind.clone(), dealt, sequence_parallel, ..Case::gpt("1f1b", meshes) };
                compare(&case);
            }
        }
    }
}

#[test]
fn data_parallel_and_zero() {
    for meshes in [&["A{dp:4}"][..], &["A{dp:2,tp:3}"], &["A{dp:3}", "B{dp:2,tp:2}"]] {
        for zero in 0..4 {
            for (clip, bucket_bytes) in [(None, 1), (Some(0.1), 1 << 20)] {
                compare(&Case { dealt: Dealt::zero(zero), clip, bucket_bytes, ..Case::gpt("1f1b", meshes) });
            }
        }
    }
}

#[test]
fn recomputation() {
    for recompute in
        [Recompute::Attention, Recompute::Everything, Recompute::Within(0), Recompute::Within(20_000)]
    {
        for schedule in ["eager-1f1b", "zbv"] {
            compare(&Case { recompute, ..Case::gpt(schedule, &["A{tp:2}", "B{dp:2}"]) });
        }
    }
}

/// BPipe's first stage, of four or more, leaves what it remembers with the last.
#[test]
fn evicted_memory_comes_back() {
    let kind = Kind::Gpt(GptConfig { layers: 6, ..gpt_config(true, 0.1) });
    let even = ["A{dp:1}", "B{dp:1}", "C{dp:1}", "D{dp:1}"];
    let wide_keeper = ["A{dp:2}", "B{dp:1}", "C{dp:1}", "D{tp:3}"];
    let wide_owner = ["A{dp:2,tp:2}", "B{dp:1}", "C{tp:2}", "D{dp:1}"];
    for meshes in [&even, &wide_keeper, &wide_owner] {
        for (recompute, overlap) in
            [(Recompute::Nothing, true), (Recompute::Everything, true), (Recompute::Attention, false)]
        {
            let case = Case { recompute, overlap, microbatches: 8, ..Case::gpt("bpipe", meshes) };
            compare(&Case { kind: kind.clone(), ..case });
        }
    }
}

#[test]
fn without_overlap() {
    for schedule in ["1f1b", "interleaved-1f1b"] {
        compare(&Case { overlap: false, ..Case::gpt(schedule, &["A{tp:2}", "B{dp:2}"]) });
    }
}

#[test]
fn more_ranks_than_samples() {
    compare(&Case { samples: 2, dealt: Dealt::zero(1), ..Case::gpt("1f1b", &["A{dp:3}", "B{dp:4}"]) });
}

#[test]
fn u_transformer() {
    let config = UnetConfig {
        image: 4,
        image_channels: 2,
        base: 6,
        multipliers: vec![1, 2],
        blocks: 1,
        attention: vec![true, false],
        heads: 3,
        groups: 3,
        context_rows: 5,
        context_width: 7,
        epsilon: 1e-5,
    };
    for (schedule, meshes) in
        [("1f1b", &["A{dp:2}", "B{tp:2}"][..]), ("zb-h1", &["A{dp:1}", "B{dp:2}", "C{dp:1}"])]
    {
        let case = Case { kind: Kind::Unet(config.clone()), samples: 2, ..Case::gpt(schedule, meshes) };
        compare(&case);
    }
}

#[test]
fn single_precision() {
    for (schedule, meshes) in [("1f1b", &UNEQUAL[..]), ("zbv", &["A{tp:2}", "B{dp:2}"])] {
        compare_with::<f32>(&Case { dealt: Dealt::zero(1), ..Case::gpt(schedule, meshes) }, 1, 1e-4);
    }
}

/// Losses of 20 steps, as they would be printed.
#[test]
fn twenty_steps_print_alike() {
    let printed = |case: &Case| -> Vec<String> {
        let outcome = run::<f64>(case, adamw(), 20);
        outcome.records[0].iter().map(|r| format!("{:.9}", r.loss)).collect()
    };
    let wanted = printed(&Case::gpt("1f1b", &UNEQUAL).alone());
    assert!(wanted[19] < wanted[0], "it learns: {wanted:?}");
    for (schedule, meshes) in [("eager-1f1b", &UNEQUAL[..]), ("v-half", &["A{tp:2}", "B{dp:2}"])] {
        let case = Case { dealt: Dealt::zero(1), clip: Some(1.0), ..Case::gpt(schedule, meshes) };
        assert_eq!(printed(&case), printed(&case.alone()), "{case:?}");
    }
}
