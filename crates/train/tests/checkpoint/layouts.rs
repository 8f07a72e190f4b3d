//! Any layout to any other.

use std::collections::BTreeMap;

use crossmesh_train::checkpoint::{Checkpoint, CheckpointError, Convert};
use proptest::prelude::*;
use safetensors::SafeTensors;

use crate::world::{MOMENTS, Weight, World, element, small, store};

/// Weights of a model that several worlds share.
fn arb_weights() -> impl Strategy<Value = Vec<Weight>> {
    let weight = (prop::collection::vec(1usize..6, 0..5), prop::option::of(0usize..4));
    prop::collection::vec(weight, 1..7).prop_map(|weights| {
        let weight = |(i, (shape, split)): (usize, (Vec<usize>, Option<usize>))| {
            let split = split.filter(|&dim| dim < shape.len());
            Weight { name: format!("w.{i}"), shape, split }
        };
        weights.into_iter().enumerate().map(weight).collect()
    })
}

/// A way to lay them out: up to four stages on up to three devices, the first weight tied where there is a last stage.
fn arb_world(weights: Vec<Weight>) -> impl Strategy<Value = World> {
    let mesh = prop::sample::select(vec![
        "M{dp:1,tp:1}",
        "M{dp:2}",
        "M{tp:2}",
        "M{tp:3}",
        "M{dp:2,tp:2}",
        "M{tp:2,dp:3}",
        "M{dp:4}",
        "M{dp:3,tp:2}",
        "M{dpo:2,tp:2,dpi:2}",
    ]);
    let meshes = prop::collection::vec(mesh, 1..4);
    let cuts = prop::collection::vec(0..=weights.len(), 0..4);
    (meshes, cuts, prop::sample::select(vec![0, 1, 3]), any::<bool>()).prop_map(
        move |(meshes, mut cuts, zero, tied)| {
            cuts.extend([0, weights.len()]);
            cuts.sort_unstable();
            let stage = |(i, w): (usize, &[usize])| (i % meshes.len(), (w[0]..w[1]).collect::<Vec<_>>());
            let mut stages: Vec<_> = cuts.windows(2).enumerate().map(stage).collect();
            let last = stages.len() - 1;
            if tied && !stages[last].1.contains(&0) {
                stages[last].1.push(0);
            }
            let meshes = meshes.iter().map(|m| m.to_string()).collect();
            World { weights: weights.clone(), meshes, stages, zero }
        },
    )
}

fn arb_worlds() -> impl Strategy<Value = (World, World)> {
    arb_weights().prop_flat_map(|w| (arb_world(w.clone()), arb_world(w)))
}

/// Reads all files with the reference implementation, and puts every box where it belongs: each element comes once.
fn assert_stored_once(world: &World, checkpoint: &Checkpoint) {
    let manifest = checkpoint.manifest();
    let mut whole: BTreeMap<(&str, &str), BTreeMap<Vec<u64>, f64>> = BTreeMap::new();
    let mut keys = 0;
    for (i, file) in manifest.files.iter().enumerate() {
        let bytes = std::fs::read(checkpoint.folder().join(&file.name)).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        keys += tensors.names().len();
        for t in &manifest.tensors {
            for b in t.boxes.iter().filter(|b| b.file == i) {
                let data = tensors.tensor(&b.key).unwrap();
                let numbers = data.data().as_chunks().0.iter().map(|c| f64::from_le_bytes(*c));
                let mut numbers = numbers.skip(b.at as usize);
                for at in crossmesh_testkit::replay::elements(&b.region().unwrap()) {
                    let old =
                        whole.entry((&t.name, &t.state)).or_default().insert(at, numbers.next().unwrap());
                    assert_eq!(old, None, "stored twice");
                }
            }
        }
    }
    assert_eq!(keys, manifest.tensors.iter().map(distinct_keys).sum::<usize>(), "nothing else is stored");
    let mut count = 0;
    for ((name, state), elements) in whole {
        let weight = world.weights.iter().position(|w| w.name == name).unwrap();
        let state = MOMENTS.iter().position(|m| *m == state).map_or(0, |i| i + 1);
        let shape = &world.weights[weight].shape;
        for (at, number) in elements {
            let index = at.iter().zip(shape).fold(0, |i, (x, n)| i * *n as u64 + x);
            assert_eq!(number, element(weight, state, checkpoint.facts().step, index), "{name} {at:?}");
            count += 1;
        }
    }
    assert_eq!(count, 3 * world.volume());
}

fn distinct_keys(tensor: &crossmesh_train::checkpoint::TensorEntry) -> usize {
    let keys: std::collections::BTreeSet<_> = tensor.boxes.iter().map(|b| (b.file, &b.key)).collect();
    keys.len()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn what_is_saved_on_one_layout_is_loaded_on_another((from, to) in arb_worlds()) {
        let folder = tempfile::tempdir().unwrap();
        let path = from.save::<f64>(&store(folder.path(), 1), 5).unwrap();
        assert_stored_once(&from, &Checkpoint::open(&path).unwrap());
        to.load::<f64>(&path, Convert::No).unwrap();
        from.load::<f64>(&path, Convert::No).unwrap();
    }
}

#[test]
fn widths_change_only_when_asked() {
    let folder = tempfile::tempdir().unwrap();
    let from = small(["A{dp:2,tp:2}", "B{tp:3}", "C{dp:2}"], 1);
    let to = small(["A{dp:1}", "B{dp:3}", "C{tp:2}"], 0);
    let narrow = from.save::<f32>(&store(&folder.path().join("a"), 1), 3).unwrap();
    let wide = from.save::<f64>(&store(&folder.path().join("b"), 1), 3).unwrap();
    to.load::<f32>(&narrow, Convert::No).unwrap();
    to.load::<f64>(&narrow, Convert::Yes).unwrap();
    to.load::<f32>(&wide, Convert::Yes).unwrap();
    let error = to.load::<f32>(&wide, Convert::No).unwrap_err();
    assert!(matches!(error, CheckpointError::DType { .. }), "{error}");
}

/// Replicas share the writing: of `n` ranks with the same tensors none writes more than its share, but for rounding.
#[test]
fn writing_is_spread_over_replicas() {
    for zero in [0, 1, 3] {
        let mut world = small(["A{dp:2,tp:2}", "B{tp:1}", "C{tp:1}"], zero);
        world.stages = vec![(0, vec![0, 1, 2, 3, 4])];
        let ranks = world.ranks::<f64>();
        let snapshot = |rank: usize| world.snapshot::<f64>(rank, &ranks[rank], 1);
        let bytes: Vec<u64> = (0..4).map(|rank| snapshot(rank).tensor_bytes()).collect();
        let all = (3 * world.volume() * 8) as u64;
        assert_eq!(bytes.iter().sum::<u64>(), all);
        // Unequal shards along tp (13 rows, 5 heads) are as they are; along dp it is halves.
        assert!(bytes[0].abs_diff(bytes[2]) <= 8 * 3 * 10, "{bytes:?}");
        assert!(bytes[1].abs_diff(bytes[3]) <= 8 * 3 * 10, "{bytes:?}");
    }
}

/// A rank of many reads its part of the files, not all of them.
#[test]
fn a_rank_reads_what_it_needs() {
    let folder = tempfile::tempdir().unwrap();
    let weight = |i: usize, split| Weight { name: format!("w.{i}"), shape: vec![64, 16, 64], split };
    let weights = vec![weight(0, Some(0)), weight(1, Some(1)), weight(2, Some(2))];
    let world = |mesh: &str, zero| World {
        weights: weights.clone(),
        meshes: vec![mesh.into()],
        stages: vec![(0, vec![0, 1, 2])],
        zero,
    };
    let path = world("A{dp:1}", 0).save::<f32>(&store(folder.path(), 1), 1).unwrap();
    let tensor = 64 * 16 * 64 * 4;
    for restored in world("A{tp:4}", 0).load::<f32>(&path, Convert::No).unwrap() {
        // Rows of 16 x 64, of 4 x 64 and of 16 numbers: the last two are closer together than it pays to skip.
        assert!(restored.bytes_read >= 9 * tensor / 4, "{restored:?}");
        assert!(restored.bytes_read <= 3 * (tensor / 4 + 2 * tensor), "{restored:?}");
    }
    // Values whole, moments in runs: four times a quarter.
    for restored in world("A{dp:4}", 1).load::<f32>(&path, Convert::No).unwrap() {
        assert_eq!(restored.bytes_read, 3 * tensor + 2 * 3 * tensor / 4, "{restored:?}");
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let meshes = ["A{dp:1}", "B{dp:1}", "C{dp:1}"];
    let world = small(meshes, 0);
    let path = world.save::<f32>(&store(folder.path(), 1), 1).unwrap();
    let mut larger = small(meshes, 0);
    larger.weights[3].shape = vec![5, 2, 7];
    let error = larger.load::<f32>(&path, Convert::No).unwrap_err().to_string();
    assert!(error.contains("`h.1.c_proj.weight` has the shape [5, 2, 6], the model [5, 2, 7]"), "{error}");
    let mut other = small(meshes, 0);
    other.weights[4].name = "transformer.ln_f.weight".into();
    let error = other.load::<f32>(&path, Convert::No).unwrap_err().to_string();
    assert!(error.contains("no tensor `transformer.ln_f.weight`\nhint: it has `ln_f.weight`"), "{error}");
}
