//! Llamas as jobs of ranks with engines between them: every way to share heads out, and every schedule, equals one rank.

mod grid;

use std::collections::BTreeMap;

use crossmesh_core::schedule::Name;
use crossmesh_train::job::Dealt;
use crossmesh_train::kernels::cpu::{Cpu, CpuBf16};
use crossmesh_train::models::gpt::GptConfig;
use crossmesh_train::stage::Recompute;
use grid::{Case, Kind, Outcome, adamw, difference, plain, run, run_on};

/// Nothing of it divides by 2 or 3 but its heads.
fn llama(kv_heads: usize, layers: usize) -> Kind {
    let heads = 2 * kv_heads;
    Kind::Gpt(GptConfig {
        dropout: 0.1,
        ..GptConfig::llama((13, 5), 4 * heads, layers, (heads, kv_heads), 11)
    })
}

/// What one rank comes to: its weights before a plain step and after it, and some steps of AdamW.
struct Wanted {
    before: Outcome,
    after: Outcome,
    steps: Outcome,
}

const STEPS: u64 = 2;

impl Wanted {
    fn of(case: &Case) -> Self {
        let alone = case.alone();
        Self {
            before: run::<f64>(&alone, plain(), 0),
            after: run::<f64>(&alone, plain(), 1),
            steps: run::<f64>(&alone, adamw(), STEPS),
        }
    }

    fn gradients(&self, after: &Outcome) -> BTreeMap<String, Vec<f64>> {
        let lost = |(name, before): (&String, &Vec<f64>)| {
            let after = &after.weights[name];
            (name.clone(), before.iter().zip(after).map(|(a, b)| a - b).collect())
        };
        self.before.weights.iter().map(lost).collect()
    }

    /// Holds a job against it: initial weights to the bit, the first gradients, losses and norms of some steps.
    fn check(&self, case: &Case) {
        let before = run::<f64>(case, plain(), 0);
        assert_eq!(before.weights, self.before.weights, "{case:?}: initial weights");
        let after = run::<f64>(case, plain(), 1);
        let (apart, name) = difference(&self.gradients(&after), &self.gradients(&self.after));
        assert!(apart <= 1e-10, "{case:?}: the gradient of {name} is {apart:e} off");
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-10 * b.abs();
        for rank in &run::<f64>(case, adamw(), STEPS).records {
            for (got, wanted) in rank.iter().zip(&self.steps.records[0]) {
                assert!(close(got.loss, wanted.loss), "{case:?}: {} for {}", got.loss, wanted.loss);
                let norms = (got.grad_norm, wanted.grad_norm);
                assert!(close(norms.0, norms.1), "{case:?}: norm {} for {}", norms.0, norms.1);
            }
        }
    }
}

/// Fewer heads of keys than ranks, as many, and more; evenly and not; with ranks along `dp` that share the sums.
#[test]
fn every_pair_of_key_heads_and_ranks() {
    let (mut pairs, mut jobs) = (0, 0);
    for kv_heads in 1..=4 {
        let case = Case { kind: llama(kv_heads, 2), microbatches: 2, ..Case::gpt("gpipe", &["S{dp:1}"]) };
        let wanted = Wanted::of(&case);
        let legal = |tp: &usize| *tp <= kv_heads || tp.is_multiple_of(kv_heads);
        for tp in (1..=4usize).filter(legal) {
            pairs += 1;
            let (flat, wide): (&str, &str) = [
                ("A{tp:1}", "B{dp:2,tp:1}"),
                ("A{tp:2}", "B{dp:2,tp:2}"),
                ("A{tp:3}", "B{dp:2,tp:3}"),
                ("A{tp:4}", "B{dp:2,tp:4}"),
            ][tp - 1];
            for sequence_parallel in [false, true] {
                let shapes: [(&str, &[&str]); 2] = [("gpipe", &[wide]), ("1f1b", &[flat, "B{dp:1}"])];
                for (i, (schedule, meshes)) in shapes.into_iter().enumerate() {
                    let recompute = if sequence_parallel { Recompute::Attention } else { Recompute::Nothing };
                    let dealt = Dealt::zero(if i == 0 { (tp + kv_heads) % 4 } else { 0 });
                    let kind = case.kind.clone();
                    let meshes = meshes.to_vec();
                    let job =
                        Case { kind, meshes, schedule, sequence_parallel, recompute, dealt, ..case.clone() };
                    wanted.check(&job);
                    jobs += 1;
                }
            }
        }
    }
    assert_eq!((pairs, jobs), (14, 56));
}

/// Two heads of keys on four ranks, then on one: every schedule.
#[test]
fn every_schedule_with_shared_keys() {
    let case = Case { kind: llama(2, 6), microbatches: 4, ..Case::gpt("gpipe", &["S{dp:1}"]) };
    let wanted = Wanted::of(&case);
    let mut jobs = 0;
    for name in Name::ALL {
        for sequence_parallel in [false, true] {
            let (schedule, meshes) = (name.name(), vec!["A{tp:4}", "B{dp:1}"]);
            wanted.check(&Case { schedule, meshes, sequence_parallel, ..case.clone() });
            jobs += 1;
        }
    }
    assert_eq!(jobs, 28);
}

/// Who computes a part makes no difference to what it is, in f32 and in bf16: not to losses, nor norms, nor any weight behind AdamW.
#[test]
fn threads_change_no_bit() {
    // Some products have several tiles of rows and of columns, the last ones smaller.
    let kind = Kind::Gpt(GptConfig { dropout: 0.1, ..GptConfig::llama((150, 40), 144, 2, (6, 3), 200) });
    let case =
        Case { kind, microbatches: 2, samples: 3, clip: Some(0.5), ..Case::gpt("gpipe", &["A{dp:1}"]) };
    let bits = |outcome: Outcome| -> Vec<u64> {
        let seen = outcome.records[0].iter().flat_map(|r| [r.loss, r.grad_norm]);
        let weights = outcome.weights.into_values().flatten();
        seen.chain(weights).map(f64::to_bits).collect()
    };
    let f32s = [1, 2, 3].map(|threads| bits(run_on(|| Cpu::<f32>::new(threads), &case, adamw(), 3, |_| {})));
    let bf16s = [1, 2, 3].map(|threads| bits(run_on(|| CpuBf16::new(threads), &case, adamw(), 3, |_| {})));
    for [one, two, three] in [f32s, bf16s] {
        assert!(one.len() > 200_000 && one == two && one == three);
    }
}
