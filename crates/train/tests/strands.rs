//! Two strands of a microbatch: the same step, with ranks that wait for each other half as long.

mod common;
mod grid;

use crossmesh_train::job::{Dealt, Over};
use crossmesh_train::models::gpt::GptConfig;
use crossmesh_train::stage::Recompute;
use grid::{Case, Kind, Outcome, adamw, gpt_config, run};

fn close(got: &Outcome, wanted: &Outcome, tolerance: f64, case: &Case) {
    for (name, wanted) in &wanted.weights {
        let scale = wanted.iter().fold(1e-3, |most: f64, x| most.max(x.abs()));
        for (got, wanted) in got.weights[name].iter().zip(wanted) {
            assert!((got - wanted).abs() <= tolerance * scale, "{case:?}: {name} has {got} for {wanted}");
        }
    }
    for (got, wanted) in got.records[0].iter().zip(&wanted.records[0]) {
        assert!((got.loss - wanted.loss).abs() <= tolerance * wanted.loss, "{case:?}");
        assert!((got.grad_norm - wanted.grad_norm).abs() <= tolerance * wanted.grad_norm, "{case:?}");
    }
}

#[test]
fn strands_equal_the_plain_step() {
    let llama = Kind::Gpt(GptConfig::llama((13, 7), 24, 3, (4, 2), 31));
    let zero = |stage: usize| {
        let over = |least: usize| if stage >= least { Over::All } else { Over::Nothing };
        Dealt { states: over(1), gradients: over(2), parameters: Over::Nothing }
    };
    let cases = [
        Case::gpt("gpipe", &["A{dp:1}"]),
        Case { sequence_parallel: true, ..Case::gpt("1f1b", &["A{dp:2,tp:2}"]) },
        Case { recompute: Recompute::Everything, ..Case::gpt("1f1b", &["A{tp:2}", "B{dp:2}"]) },
        Case {
            dealt: zero(2),
            recompute: Recompute::Attention,
            ..Case::gpt("zb-h1", &["A{dp:2}", "B{tp:2}"])
        },
        Case { dealt: zero(1), ..Case::gpt("interleaved", &["A{tp:2}", "B{dp:2}"]) },
    ];
    for kind in [Kind::Gpt(gpt_config(true, 0.1)), llama] {
        for case in cases.clone() {
            let case = Case { kind: kind.clone(), ..case };
            let plain = run::<f64>(&case, adamw(), 3);
            let strands = run::<f64>(&Case { strands: 2, ..case.clone() }, adamw(), 3);
            close(&strands, &plain, 1e-11, &case);
            // Without an optimizer's division by small numbers: gradients.
            let [plain_one, two] =
                [1, 2].map(|strands| run::<f64>(&Case { strands, ..case.clone() }, grid::plain(), 1));
            close(&two, &plain_one, 1e-12, &case);
            let sent =
                |outcome: &Outcome| outcome.records.iter().flatten().map(|r| r.bytes_sent).sum::<u64>();
            // As many bytes, but for the frames of messages.
            let (one, two) = (sent(&plain) as f64, sent(&strands) as f64);
            assert!(two >= one && two <= 1.6 * one + 1e5, "{case:?}: {two} bytes for {one}");
        }
    }
}
