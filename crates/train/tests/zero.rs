//! Parameters, gradients and states dealt out over data axes: the same bits as without, and as much sent and held as the formulas say.

mod common;
mod grid;

use std::collections::BTreeMap;

use crossmesh_train::chain::Outline;
use crossmesh_train::job::{Dealt, Over};
use crossmesh_train::kernels::cpu::Cpu;
use crossmesh_train::models::gpt::GptConfig;
use crossmesh_train::runtime::most_fetched;
use grid::{Case, Kind, adamw, compare, gpt_config, run};

/// Every subset of the data axes `dpo` and `dpi`.
fn subsets() -> [Over; 4] {
    let axes = |names: &[&str]| Over::Axes(names.iter().map(|n| n.to_string()).collect());
    [Over::Nothing, axes(&["dpo"]), axes(&["dpi"]), axes(&["dpo", "dpi"])]
}

fn choices() -> impl Iterator<Item = (usize, Dealt)> {
    (0..64).map(|i| {
        let [parameters, gradients, states] = [i % 4, i / 4 % 4, i / 16].map(|k| subsets()[k].clone());
        (i, Dealt { parameters, gradients, states })
    })
}

/// As sets of bits, P and G have to be in O.
fn is_legal(choice: usize) -> bool {
    let [p, g, o] = [choice % 4, choice / 4 % 4, choice / 16];
    p & !o == 0 && g & !o == 0
}

fn bits(weights: &BTreeMap<String, Vec<f64>>) -> Vec<u64> {
    weights.values().flatten().map(|x| x.to_bits()).collect()
}

#[test]
fn every_choice_ends_with_the_same_bits() {
    let steps = if std::env::var_os("CROSSMESH_SWEEP").is_some() { 20 } else { 3 };
    let case = |dealt: Dealt| Case {
        dealt,
        fixed_order: true,
        clip: Some(0.1),
        microbatches: 2,
        kind: Kind::Gpt(GptConfig { layers: 2, ..gpt_config(true, 0.1) }),
        ..Case::gpt("gpipe", &["A{dpo:2,dpi:2}"])
    };
    let plain = run::<f32>(&case(Dealt::default()), adamw(), steps);
    let mut legal = 0;
    for (choice, dealt) in choices() {
        if !is_legal(choice) {
            let job = case(dealt.clone()).job::<f32>(adamw());
            let error = job.check(4).unwrap_err().to_string();
            assert!(error.contains("and the optimizer's states are not"), "{dealt:?}: {error}");
            continue;
        }
        legal += 1;
        let got = run::<f32>(&case(dealt.clone()), adamw(), steps);
        assert!(bits(&got.weights) == bits(&plain.weights), "{dealt:?}");
        for (a, b) in got.records[0].iter().zip(&plain.records[0]) {
            assert_eq!((a.loss, a.grad_norm), (b.loss, b.grad_norm), "{dealt:?}");
        }
    }
    assert_eq!(legal, 25);
}

/// Against one rank, where sums are taken as they come.
#[test]
fn choices_equal_one_rank() {
    let some = [16, 16 + 4 + 1, 32 + 8, 48 + 1, 48 + 4, 48 + 9, 48 + 15];
    for (choice, dealt) in choices().filter(|(choice, _)| some.contains(choice)) {
        assert!(is_legal(choice), "{choice}");
        compare(&Case { dealt: dealt.clone(), ..Case::gpt("1f1b", &["A{dpo:2,tp:2,dpi:2}"]) });
        compare(&Case {
            dealt,
            bucket_bytes: 1,
            ..Case::gpt("zb-h1", &["A{dpo:2,dpi:2}", "B{dpi:3,dpo:1}"])
        });
    }
}

#[test]
fn ranks_keep_their_share() {
    let case = |zero| Case { dealt: Dealt::zero(zero), ..Case::gpt("gpipe", &["A{dp:4}"]) };
    let kept = |zero| {
        let case = case(zero);
        let (model, job) = (case.kind.model::<f32>(), case.job::<f32>(adamw()));
        crossmesh_train::runtime::in_threads::<f32, _>(&*model, &job, &case.feed(), |trainer| {
            trainer.step()?;
            Ok(trainer.kept())
        })
        .unwrap()
    };
    let all = kept(0)[0].parameters;
    for zero in 0..4 {
        let parts = kept(zero);
        let sum = |f: fn(&crossmesh_train::runtime::Kept) -> usize| parts.iter().map(f).sum::<usize>();
        let times = |least: usize| if zero >= least { 1 } else { 4 };
        assert_eq!(sum(|k| k.parameters), times(3) * all, "stage {zero}");
        assert_eq!(sum(|k| k.gradients), times(2) * all, "stage {zero}");
        assert_eq!(sum(|k| k.states), 2 * times(1) * all, "stage {zero}");
        // And no more of other ranks' for a pass than predicted.
        let case = case(zero);
        let (model, job) = (case.kind.model::<f32>(), case.job::<f32>(adamw()));
        let stage = crossmesh_core::id::StageId(0);
        let setup = crossmesh_train::wiring::setup(&job, stage, 0).unwrap();
        let outline = Outline::new::<Cpu<f32>>(&*model, job.stages[0].clone(), &setup).unwrap();
        let of = |least: usize, elements: usize| if zero >= least { elements } else { 0 };
        for k in &parts {
            assert_eq!(k.fetched, of(3, most_fetched::<Cpu<f32>>(outline.largest_unit())), "stage {zero}");
            assert_eq!(k.opened, of(2, outline.most_opened()), "stage {zero}");
        }
    }
}
