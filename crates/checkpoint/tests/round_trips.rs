//! Any checkpoint to any other and back, bit for bit, against a reader that takes one element at a time.

mod common;

use common::*;
use crossmesh_checkpoint::{Element, Format, Spec, open};
use crossmesh_testkit::seed::Seed;

#[test]
fn random_pairs_of_layouts_and_formats_keep_every_bit() {
    let (rounds, mut ours) = (crossmesh_testkit::sweep::count(40) as u64, 0);
    for round in 0..rounds {
        let mut seed = Seed(1000 + round);
        let model = random_model(&mut seed, 6);
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        write_hf(&model, &at("start"));
        convert(&at("start"), &at("a"), random_spec(&mut seed, &model));
        assert_eq!(read_slowly(&open(&at("a")).unwrap()), model, "seed {round}");
        convert(&at("a"), &at("b"), random_spec(&mut seed, &model));
        let b = open(&at("b")).unwrap();
        assert!(b.check().iter().all(|p| p.kind.is_warning()), "seed {round}");
        assert_eq!(read_slowly(&b), model, "seed {round}");
        let formats = [open(&at("a")).unwrap().format, b.format];
        ours += usize::from(formats.contains(&Format::Crossmesh));
        // Back to one file: byte for byte what the safetensors crate wrote.
        convert(&at("b"), &at("end"), Spec::new(Format::Hf));
        let bytes = |name: &str| std::fs::read(at(name).join("model.safetensors")).unwrap();
        assert!(bytes("end") == bytes("start"), "seed {round}");
    }
    eprintln!("{ours} of {rounds} pairs had our format");
    assert!(ours > 0 || rounds < 40, "our format was never among them");
}

#[test]
fn real_numbers_are_rounded_and_others_are_not() {
    let folder = tempfile::tempdir().unwrap();
    let numbers = [1.0f32, -2.5, 0.1, 1e30, f32::INFINITY];
    let held = |element, bytes| Held { element, shape: vec![5], bytes };
    let f32s = held(Element::F32, numbers.iter().flat_map(|n| n.to_le_bytes()).collect());
    let ints = held(Element::I64, (0..5i64).flat_map(i64::to_le_bytes).collect());
    let model = Model::from([("a".into(), f32s), ("b".into(), ints.clone())]);
    write_hf(&model, &folder.path().join("in"));
    let spec = Spec { element: Some(Element::BF16), ..Spec::new(Format::Dcp) };
    convert(&folder.path().join("in"), &folder.path().join("out"), spec);
    let out = read_slowly(&open(&folder.path().join("out")).unwrap());
    let wanted: Vec<u8> = numbers.iter().flat_map(|n| half::bf16::from_f32(*n).to_le_bytes()).collect();
    assert_eq!((out["a"].element, &out["a"].bytes), (Element::BF16, &wanted));
    assert_eq!(out["b"], ints);
}

#[test]
fn what_lies_beside_the_tensors_goes_along() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    write_hf(&random_model(&mut Seed(1), 3), &at("in"));
    std::fs::write(at("in").join("config.json"), "{\"model_type\": \"llama\"}").unwrap();
    std::fs::write(at("in").join("tokenizer.json"), "{}").unwrap();
    convert(&at("in"), &at("dcp"), Spec::new(Format::Dcp));
    convert(&at("dcp"), &at("out"), Spec::new(Format::Hf));
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        assert_eq!(std::fs::read(at("in").join(name)).unwrap(), std::fs::read(at("out").join(name)).unwrap());
    }
}
