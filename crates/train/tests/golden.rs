//! What units hold between passes and what they compute: the numbers that were once written down by hand for every layer, kept in
//! `golden/held.txt`. Of the bytes all 624 lines were equal but for 24: the middle of a U-Transformer held its time embedding twice, and holds it
//! once. Behind them stand the operations of F, B and W.

use crossmesh_train::chain::{Model, Outline, Setup};
use crossmesh_train::kernels::cpu::Cpu;
use crossmesh_train::models::gpt::{Gpt, GptConfig};
use crossmesh_train::models::unet::{Unet, UnetConfig};
use crossmesh_train::stage::Recompute;
use crossmesh_train::stage_rank::StageRank;

type AnyModel = Box<dyn Model<Cpu<f64>>>;

/// A line for every unit of every model in every setup.
fn held() -> String {
    let gpt = |dropout, tied| GptConfig { dropout, tied, hidden: 40, ..GptConfig::new(37, 9, 24, 2, 4) };
    let small =
        UnetConfig { groups: 4, heads: 4, context_rows: 5, context_width: 6, ..UnetConfig::new(16, 8) };
    let uneven =
        UnetConfig { multipliers: vec![1, 3], attention: vec![false, true], blocks: 2, ..small.clone() };
    let models: [(&str, bool, AnyModel); 4] = [
        ("gpt tied", true, Box::new(Gpt::new(gpt(0.0, true)).unwrap())),
        ("gpt dropping", true, Box::new(Gpt::new(gpt(0.1, false)).unwrap())),
        ("unet", false, Box::new(Unet::new(small).unwrap())),
        ("unet uneven", false, Box::new(Unet::new(uneven).unwrap())),
    ];
    let mut lines = String::new();
    for (name, has_rows, model) in &models {
        for (mesh, position) in [("A{dp:1}", 0), ("A{dp:2,tp:2}", 1), ("A{tp:3}", 2), ("A{dp:2,tp:3}", 5)] {
            for recompute in [Recompute::Nothing, Recompute::Attention, Recompute::Everything] {
                for sequence_parallel in [false, true] {
                    if sequence_parallel && !has_rows {
                        continue;
                    }
                    let place = StageRank::new(mesh.parse().unwrap(), position).unwrap();
                    let setup = Setup { place, sequence_parallel, recompute, ..Setup::alone(3, 1) };
                    for unit in 0..model.num_units() {
                        let outline = Outline::new(&**model, unit..unit + 1, &setup).unwrap();
                        let bytes = outline.activations;
                        let [f, b, w] = outline.passes();
                        lines += &format!(
                            "{name} | {mesh} {position} | {recompute:?} {sequence_parallel} | {unit}: {} {} {} | {f} {b} {w}\n",
                            bytes.after_forward,
                            bytes.after_backward_input,
                            outline.num_elements()
                        );
                    }
                }
            }
        }
    }
    lines
}

#[test]
fn units_hold_and_compute_what_was_declared() {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/held.txt");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(golden, held()).unwrap();
    }
    let wanted = std::fs::read_to_string(golden).unwrap();
    let differ: Vec<String> = held()
        .lines()
        .zip(wanted.lines())
        .filter(|(got, wanted)| got != wanted)
        .map(|(got, wanted)| format!("{got}, declared {wanted}"))
        .collect();
    assert!(differ.is_empty(), "{} of {}:\n{}", differ.len(), wanted.lines().count(), differ.join("\n"));
    assert_eq!((held().lines().count(), wanted.lines().count()), (624, 624));
}

/// A GPT's operations as they were declared by hand, for a rank of `tp` that has its share of every block.
#[test]
fn a_gpt_computes_what_was_declared() {
    let (vocab, context, width, hidden) = (36, 9, 24, 40);
    let config = GptConfig { hidden, ..GptConfig::new(vocab, context, width, 2, 4) };
    let model = Gpt::new(config).unwrap();
    let [v, s, d, f] = [vocab, context, width, hidden].map(|n| n as f64);
    for (mesh, dp, tp) in [("A{dp:1}", 1.0, 1.0), ("A{tp:2}", 1.0, 2.0), ("A{dp:3,tp:4}", 3.0, 4.0)] {
        let rows = 3.0 * s / dp;
        let declared = [
            (rows * d, 0.0),
            (2.0 * rows * d * (4.0 * d + 2.0 * f) / tp, 2.0 * rows * s * d / tp),
            (2.0 * rows * d * v / tp, 0.0),
        ];
        for (unit, (matrix, attention)) in [0, 1, 3].into_iter().zip(declared) {
            let setup =
                Setup { place: StageRank::new(mesh.parse().unwrap(), 0).unwrap(), ..Setup::alone(3, 1) };
            let outline = Outline::new::<Cpu<f64>>(&model, unit..unit + 1, &setup).unwrap();
            let found = (outline.forward.matrix, outline.forward.attention);
            assert_eq!(found, (matrix, attention), "{mesh}, unit {unit}");
        }
    }
}
