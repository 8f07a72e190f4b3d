//! What a rank holds goes straight into its memory, and two checkpoints are compared number by number.

mod common;

use common::*;
use crossmesh_checkpoint::{Cut, Element, Format, Spec, Want, diff, load, open, rounds};
use crossmesh_core::region::{Region, Span};
use crossmesh_testkit::seed::Seed;

#[test]
fn random_boxes_arrive_where_they_go() {
    for round in 0..crossmesh_testkit::sweep::count(20) as u64 {
        let mut seed = Seed(300 + round);
        let model = random_model(&mut seed, 5);
        let folder = tempfile::tempdir().unwrap();
        write_hf(&model, &folder.path().join("start"));
        convert(&folder.path().join("start"), &folder.path().join("in"), random_spec(&mut seed, &model));
        let catalog = open(&folder.path().join("in")).unwrap();
        for (name, held) in model.iter().filter(|(_, t)| t.shape.iter().all(|n| *n > 0)) {
            let width = held.element.bytes();
            let span = |seed: &mut Seed, n: u64| {
                let (a, b) = (seed.below(n as usize) as u64, seed.below(n as usize) as u64);
                Span::new(a.min(b), a.max(b) + 1)
            };
            let region = Region::new(held.shape.iter().map(|n| span(&mut seed, *n)).collect());
            // Column-major, with room between.
            let mut next = width;
            let strides: Vec<u64> = region
                .spans()
                .iter()
                .map(|s| {
                    let stride = next;
                    next = next * s.len() + width * seed.below(2) as u64;
                    stride
                })
                .collect();
            let mut memory = vec![0xAA; next as usize];
            let want = Want {
                tensor: name.clone(),
                region: region.clone(),
                element: held.element,
                strides: strides.clone(),
                memory: &mut memory,
            };
            load(&catalog, vec![want], 1 << 20, 2).unwrap();
            for index in indexes(&region) {
                let steps = index.iter().zip(region.spans()).zip(&strides);
                let at = steps.map(|((x, s), stride)| (x - s.start) * stride).sum::<u64>() as usize;
                let flat = index.iter().zip(&held.shape).fold(0, |flat, (x, n)| flat * n + x) as usize;
                let width = width as usize;
                assert_eq!(
                    memory[at..at + width],
                    held.bytes[flat * width..(flat + 1) * width],
                    "{round} {name}"
                );
            }
        }
    }
}

#[test]
fn only_what_is_needed_is_read_and_rounded() {
    let folder = tempfile::tempdir().unwrap();
    let numbers: Vec<f32> = (0..4096).map(|i| i as f32 / 3.0).collect();
    let bytes = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
    let model = Model::from([("w".to_string(), Held { element: Element::F32, shape: vec![64, 64], bytes })]);
    write_hf(&model, folder.path());
    let catalog = open(folder.path()).unwrap();
    let rows = Region::new(vec![Span::new(3, 5), Span::new(0, 64)]);
    let mut memory = vec![0; 2 * 64 * 2];
    fn want<'a>(region: &Region, memory: &'a mut [u8]) -> Want<'a> {
        let strides = vec![128, 2];
        Want { tensor: "w".into(), region: region.clone(), element: Element::BF16, strides, memory }
    }
    let loaded = load(&catalog, vec![want(&rows, &mut memory)], 1 << 20, 1).unwrap();
    assert_eq!(loaded.bytes_read, 2 * 64 * 4);
    let wanted: Vec<u8> =
        numbers[192..320].iter().flat_map(|n| half::bf16::from_f32(*n).to_le_bytes()).collect();
    assert_eq!(memory, wanted);
    let refused = |want| load(&catalog, vec![want], 1 << 20, 1).unwrap_err().to_string();
    let mut small = vec![0; 10];
    assert!(refused(want(&rows, &mut small)).contains("does not fit into its memory"));
    let other = Want { tensor: "v".into(), ..want(&rows, &mut memory) };
    assert!(refused(other).contains("the checkpoint does not have it"));
    let mut ints = vec![0; 1 << 12];
    let other = Want { element: Element::I32, strides: vec![256, 4], ..want(&rows, &mut ints) };
    assert!(refused(other).contains("it is f32 in the checkpoint, and i32 in memory"));
}

#[test]
fn a_file_that_is_not_what_was_opened_is_not_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let held = Held { element: Element::U8, shape: vec![8], bytes: vec![1; 8] };
    write_hf(&Model::from([("w".to_string(), held)]), folder.path());
    let catalog = open(folder.path()).unwrap();
    let mut memory = [0; 8];
    let mut loaded = || {
        let region = Region::whole(&[8]);
        let (element, strides) = (Element::U8, vec![1]);
        load(
            &catalog,
            vec![Want { tensor: "w".into(), region, element, strides, memory: &mut memory }],
            1 << 20,
            1,
        )
    };
    loaded().unwrap();
    // The same bytes, by somebody who writes to it.
    let path = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    std::fs::write(&path, bytes).unwrap();
    let error = loaded().unwrap_err().to_string();
    assert!(error.contains("model.safetensors: it changed while it was read"), "{error}");
}

#[test]
fn interleaved_views_are_filled_one_after_the_other() {
    // Two halves of every row of an array of [4, 6], which interleave; what lies behind them; and nothing.
    assert_eq!(rounds(&[(100, 21), (103, 21), (124, 8), (110, 0)]), [vec![0, 3, 2], vec![1]]);
    assert_eq!(rounds(&[(0, 4), (4, 4), (8, 4)]), [vec![0, 1, 2]]);
    let mut seed = Seed(41);
    for _ in 0..200 {
        let pieces: Vec<(usize, usize)> = (0..12).map(|_| (seed.below(50), seed.below(12))).collect();
        let found = rounds(&pieces);
        let mut all: Vec<usize> = found.concat();
        all.sort_unstable();
        assert_eq!(all, (0..12).collect::<Vec<_>>());
        for round in found {
            let mut seen = [false; 64];
            let bytes = round.iter().flat_map(|&i| pieces[i].0..pieces[i].0 + pieces[i].1);
            bytes.for_each(|b| assert!(!std::mem::replace(&mut seen[b], true), "{pieces:?}"));
        }
    }
}

#[test]
fn differences_are_named() {
    let mut seed = Seed(8);
    let folder = tempfile::tempdir().unwrap();
    let mut model = Model::new();
    for name in ["a", "b", "c"] {
        let bytes = (0..60).map(|_| seed.draw() as u8).collect();
        model.insert(name.into(), Held { element: Element::U8, shape: vec![6, 10], bytes });
    }
    write_hf(&model, &folder.path().join("one"));
    convert(
        &folder.path().join("one"),
        &folder.path().join("dcp"),
        Spec { cut: Cut::Rows(4), ..Spec::new(Format::Dcp) },
    );
    let at = |name: &str| open(&folder.path().join(name)).unwrap();
    assert_eq!(diff::diff(&at("one"), &at("dcp"), 1 << 20, 2).unwrap(), []);
    let mut other = model.clone();
    other.get_mut("b").unwrap().bytes[37] ^= 1;
    other.remove("c");
    other.insert("d".into(), model["c"].clone());
    write_hf(&other, &folder.path().join("two"));
    let found: Vec<String> =
        diff::diff(&at("dcp"), &at("two"), 1 << 20, 2).unwrap().iter().map(ToString::to_string).collect();
    assert_eq!(
        found,
        ["b: 1 elements differ, the first at [3, 7]", "c: only in the first", "d: only in the second"]
    );
}
