//! What units hold between passes: the numbers that were once written down by hand for every layer, kept in
//! `golden/held.txt`. All 624 lines were equal but for 24: the middle of a U-Transformer held its time embedding twice, and holds it
//! once.

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
                    let setup = Setup { place, samples: 3, sequence_parallel, recompute, seed: 1 };
                    for unit in 0..model.num_units() {
                        let outline = Outline::new(&**model, unit..unit + 1, &setup).unwrap();
                        let bytes = outline.activations;
                        lines += &format!(
                            "{name} | {mesh} {position} | {recompute:?} {sequence_parallel} | {unit}: {} {} {}\n",
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
fn units_hold_what_was_declared() {
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
}
