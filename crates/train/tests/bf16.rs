//! Training in bf16: weights are their masters, rounded, wherever they are kept; layouts and choices of ZeRO change as little as they do in f32.

mod common;
mod grid;

use std::collections::BTreeMap;

use crossmesh_train::job::{Dealt, Over};
use crossmesh_train::kernels::cpu::CpuBf16;
use crossmesh_train::models::gpt::GptConfig;
use crossmesh_train::runtime::{StageState, TrainError, in_threads_on};
use grid::{Case, Kind, Outcome, adamw, gpt_config, run, run_on};
use half::bf16;

fn rounded(x: f32) -> u32 {
    bf16::from_f32(x).to_f32().to_bits()
}

/// Of what this rank keeps masters of, the weights that passes use.
fn weights_are_rounded_masters(stage: &StageState<'_, CpuBf16>) {
    let ((masters, held), params) = (stage.weights(), stage.params());
    let mut seen = 0;
    for (run, at) in held.runs.iter() {
        let here = &params[stage.share().runs.at(&run)];
        for (master, weight) in masters[at..at + run.len()].iter().zip(here) {
            assert_eq!(rounded(*master), weight.to_bits(), "{master} as {weight}");
            seen += usize::from(*master != *weight);
        }
    }
    assert!(masters.len() < 100 || seen > masters.len() / 2, "masters know more than weights");
}

fn trained(case: &Case, steps: u64) -> Outcome {
    run_on(|| CpuBf16::new(1), case, adamw(), steps, weights_are_rounded_masters)
}

fn zero(stage: usize) -> Dealt {
    let over = |least: usize| if stage >= least { Over::All } else { Over::Nothing };
    Dealt { states: over(1), gradients: over(2), parameters: over(3) }
}

fn llama() -> Kind {
    Kind::Gpt(GptConfig::llama((13, 7), 24, 3, (4, 2), 31))
}

#[test]
fn weights_are_their_masters_rounded_for_a_hundred_steps() {
    let alone = |kind: Kind| Case { kind, ..Case::gpt("gpipe", &["A{dp:1}"]) };
    trained(&alone(Kind::Gpt(gpt_config(true, 0.1))), 100);
    trained(&alone(llama()), 100);
}

/// Elements of bf16 are summed as they are sent; masters and their gradients, which are f32, decide what is learnt.
#[test]
fn layouts_learn_alike() {
    for kind in [Kind::Gpt(gpt_config(true, 0.0)), llama()] {
        let alone = trained(&Case { kind: kind.clone(), ..Case::gpt("gpipe", &["A{dp:1}"]) }, 12);
        let exact = run::<f64>(&Case { kind: kind.clone(), ..Case::gpt("gpipe", &["A{dp:1}"]) }, adamw(), 12);
        let cases = [
            Case::gpt("1f1b", &["A{dp:2,tp:2}"]),
            Case { sequence_parallel: true, ..Case::gpt("zb-h1", &["A{tp:2}", "B{dp:2}"]) },
            Case { dealt: zero(3), ..Case::gpt("1f1b", &["A{dp:2}", "B{dp:3}"]) },
        ];
        for case in cases {
            let case = Case { kind: kind.clone(), ..case };
            let got = trained(&case, 12);
            for (step, record) in got.records[0].iter().enumerate() {
                let (one, exact) = (alone.records[0][step].loss, exact.records[0][step].loss);
                assert!((record.loss - one).abs() < 0.01 * one, "{case:?}: {} for {one}", record.loss);
                assert!((record.loss - exact).abs() < 0.01 * exact, "{case:?}: {} for {exact}", record.loss);
            }
        }
    }
}

/// 2 bytes of a weight, 4 of its gradient, 12 of master and moments, each whole or dealt out over N ranks (Rajbhandari et al., ZeRO, 2020; with f32 gradients).
#[test]
fn ranks_keep_the_bytes_of_the_formulas() {
    let (n, dp) = (4, "A{dp:4}");
    for (stage, whole, dealt) in [(0, 18, 0), (1, 6, 12), (2, 2, 16), (3, 0, 18)] {
        let case = Case { dealt: zero(stage), kind: llama(), ..Case::gpt("gpipe", &[dp]) };
        let (model, job) = (case.kind.model_on::<CpuBf16>(), case.job::<f32>(adamw()));
        let kept = in_threads_on(
            || CpuBf16::new(1),
            &*model,
            &job,
            &case.feed(),
            |trainer| {
                trainer.step()?;
                let mut elements = 0;
                trainer.each_stage::<TrainError>(|stage| {
                    elements += stage.parameters.last().map_or(0, |p| p.range.end);
                    Ok(())
                })?;
                Ok((trainer.kept().bytes::<CpuBf16>(), elements))
            },
        );
        let kept = kept.unwrap();
        let psi = kept[0].1;
        let all: usize = kept.iter().map(|(bytes, _)| bytes).sum();
        assert_eq!(all, n * whole * psi + dealt * psi, "stage {stage}");
        // Nobody has more than his part, but for what does not divide by four of every unit.
        for (bytes, _) in &kept {
            assert!(*bytes <= whole * psi + dealt * (psi / n + 8), "stage {stage}: {bytes}");
        }
    }
}

/// What is remembered waits in a file: the same bits, and next to nothing in memory.
#[test]
fn offloaded_activations_change_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    for kind in [Kind::Gpt(gpt_config(true, 0.1)), llama()] {
        for (schedule, meshes, dealt) in
            [("gpipe", &["A{dp:2,tp:2}"][..], zero(3)), ("zb-h1", &["A{tp:2}", "B{dp:2}"], zero(1))]
        {
            let case = Case { dealt, kind: kind.clone(), fixed_order: true, ..Case::gpt(schedule, meshes) };
            let plain = trained(&case, 4);
            let offload = Some(folder.path().to_path_buf());
            let filed = trained(&Case { offload, ..case.clone() }, 4);
            assert!(bits(&filed.weights) == bits(&plain.weights), "{case:?}");
            for (plain, filed) in plain.records.iter().flatten().zip(filed.records.iter().flatten()) {
                assert_eq!((plain.loss, plain.grad_norm), (filed.loss, filed.grad_norm));
                assert_eq!(plain.bytes_sent, filed.bytes_sent);
                // From B to W a microbatch is in memory; from F to B none is.
                let most =
                    if schedule == "gpipe" { plain.activation_bytes / 2 } else { plain.activation_bytes };
                assert!(filed.activation_bytes < most, "{} of {most}", filed.activation_bytes);
            }
        }
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

fn bits(weights: &BTreeMap<String, Vec<f64>>) -> Vec<u64> {
    weights.values().flatten().map(|x| x.to_bits()).collect()
}

#[test]
fn stages_of_zero_end_with_the_same_bits() {
    let case = |dealt: Dealt| Case {
        dealt,
        fixed_order: true,
        clip: Some(0.1),
        microbatches: 2,
        kind: llama(),
        ..Case::gpt("gpipe", &["A{dpo:2,dpi:2}"])
    };
    let plain = trained(&case(zero(0)), 5);
    for stage in 1..4 {
        let got = trained(&case(zero(stage)), 5);
        assert!(bits(&got.weights) == bits(&plain.weights), "stage {stage}");
    }
}
