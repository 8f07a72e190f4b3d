//! What is wrong with a checkpoint is named: the file, the tensor, the box.

mod common;

use std::path::Path;

use common::*;
use crossmesh_checkpoint::{Conversion, Cut, Element, Format, ProblemKind, Spec, open};
use crossmesh_core::region::{Region, Span};

fn model() -> Model {
    let bytes = (0..96).collect();
    Model::from([
        ("w".to_string(), Held { element: Element::F32, shape: vec![6, 4], bytes }),
        ("z".to_string(), Held { element: Element::U8, shape: vec![3], bytes: vec![1, 2, 3] }),
    ])
}

/// The model in a format, over four ranks.
fn made(format: Format, folder: &Path) -> std::path::PathBuf {
    write_hf(&model(), &folder.join("in"));
    let out = folder.join("out");
    convert(&folder.join("in"), &out, Spec { cut: Cut::Rows(3), shard_bytes: 90, ..Spec::new(format) });
    out
}

fn problems(folder: &Path) -> Vec<(ProblemKind, String)> {
    let catalog = open(folder).unwrap();
    let found = catalog.check().into_iter().map(|p| (p.kind, p.what)).collect();
    let refused = Conversion::plan(catalog, Spec::new(Format::Hf)).is_err();
    assert!(refused, "a conversion refuses it too");
    found
}

#[test]
fn a_missing_shard_of_every_format() {
    for (format, file) in [
        (Format::Hf, "model-00001-of-00002.safetensors"),
        (Format::Dcp, "__1_0.distcp"),
        (Format::TorchDist, "__2_0.distcp"),
        // The last one: without our shapes nothing would tell.
        (Format::DcpHf, "shard-00003-model-00001-of-00001.safetensors"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let out = made(format, folder.path());
        assert!(open(&out).unwrap().check().is_empty(), "{format}");
        std::fs::remove_file(out.join(file)).unwrap();
        let found = problems(&out);
        let named = |(kind, what): &(ProblemKind, String)| match format {
            Format::DcpHf => {
                *kind == ProblemKind::Hole && what.contains("`w` [6, 4]") && what.contains("[4:6, 0:4]")
            }
            _ => *kind == ProblemKind::MissingFile && what.contains(file),
        };
        assert!(found.iter().any(named), "{format}: {found:?}");
    }
}

#[test]
fn a_shape_that_nothing_tells_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let out = made(Format::DcpHf, folder.path());
    // What torch writes has no shapes.
    for entry in std::fs::read_dir(&out).unwrap() {
        let path = entry.unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        let text = String::from_utf8_lossy(&bytes).replace("CROSSMESH_SHAPES", "SOMETHING_ELSE__");
        if path.extension().is_some_and(|e| e == "safetensors") && text.len() == bytes.len() {
            let at = bytes.windows(16).position(|w| w == b"CROSSMESH_SHAPES").unwrap();
            let mut bytes = bytes;
            bytes[at..at + 16].copy_from_slice(b"SOMETHING_ELSE__");
            std::fs::write(&path, bytes).unwrap();
        }
    }
    let found = open(&out).unwrap().check();
    assert!(found.iter().any(|p| p.kind == ProblemKind::ShapeUnknown), "{found:?}");
}

#[test]
fn files_that_are_cut_short() {
    for format in [Format::Dcp, Format::TorchDist] {
        let folder = tempfile::tempdir().unwrap();
        let out = made(format, folder.path());
        let path = out.join("__1_0.distcp");
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        let found = problems(&out);
        assert!(
            found.iter().any(|(k, w)| *k == ProblemKind::ShortFile && w.contains("__1_0.distcp")),
            "{found:?}"
        );
    }
    let folder = tempfile::tempdir().unwrap();
    let out = made(Format::Hf, folder.path());
    let path = out.join("model-00002-of-00002.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    let found = problems(&out);
    assert!(found.iter().any(|(k, w)| *k == ProblemKind::ShortFile && w.contains("`z`")), "{found:?}");
}

#[test]
fn boxes_that_overlap_and_holes() {
    let folder = tempfile::tempdir().unwrap();
    let out = made(Format::DcpHf, folder.path());
    let path = out.join("shard-00003-model-00001-of-00001.safetensors");
    // Digits of the header are as many as before: only a box moves.
    let moved = |from: &[u8], to: &[u8]| {
        let mut bytes = std::fs::read(&path).unwrap();
        let at = bytes.windows(from.len()).position(|w| w == from).unwrap();
        bytes[at..at + to.len()].copy_from_slice(to);
        std::fs::write(&path, bytes).unwrap();
    };
    moved(b"[4,0]", b"[3,0]");
    let found = problems(&out);
    let overlap = |(k, w): &(ProblemKind, String)| *k == ProblemKind::Overlap && w.contains("[3:4, 0:4]");
    assert!(found.iter().any(overlap), "{found:?}");
    moved(b"[3,0]", b"[9,0]");
    let found = problems(&out);
    assert!(found.iter().any(|(k, _)| *k == ProblemKind::Outside), "{found:?}");
}

#[test]
fn a_tensor_that_the_index_does_not_have_right() {
    let folder = tempfile::tempdir().unwrap();
    let out = made(Format::Hf, folder.path());
    let path = out.join("model.safetensors.index.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("\"z\"", "\"y\"")).unwrap();
    let found = problems(&out);
    let says = |kind, word: &str| found.iter().any(|(k, w)| *k == kind && w.contains(word));
    assert!(says(ProblemKind::MissingTensor, "`y`") && says(ProblemKind::Stray, "`z`"), "{found:?}");
    std::fs::write(&path, text.replace("model-00001-of-00002", "../../etc/passwd-2-of-2")).unwrap();
    assert!(open(&out).unwrap_err().to_string().contains("is no name of a file beside it"));
}

#[test]
fn a_pickle_that_would_run_something() {
    let folder = tempfile::tempdir().unwrap();
    let out = made(Format::Dcp, folder.path());
    let witness = folder.path().join("it-ran");
    let command = format!("touch {}", witness.display());
    // pickle.dumps of an object whose __reduce__ is (os.system, (command,)), protocol 2.
    let mut bytes = b"\x80\x02cposix\nsystem\nX".to_vec();
    bytes.extend((command.len() as u32).to_le_bytes());
    bytes.extend(command.as_bytes());
    bytes.extend(b"\x85R.");
    std::fs::write(out.join(".metadata"), bytes).unwrap();
    let error = open(&out).unwrap_err().to_string();
    assert!(error.contains("posix.system") && error.contains(".metadata"), "{error}");
    assert!(!witness.exists());
}

#[test]
fn a_dtype_that_does_not_fit() {
    let folder = tempfile::tempdir().unwrap();
    let out = made(Format::Dcp, folder.path());
    let path = out.join("__1_0.distcp");
    let bytes = std::fs::read(&path).unwrap();
    let at = bytes.windows(12).position(|w| w == b"FloatStorage").unwrap();
    // As many letters: `IntStorage` in its place leaves the pickle damaged or of another type.
    let mut other = bytes.clone();
    other.splice(at - 6..at + 13, b"torch\n IntStorage\n".iter().copied().chain([b'\n']));
    std::fs::write(&path, other).unwrap();
    let error = open(&out).map(|c| format!("{:?}", c.check())).unwrap_or_else(|e| e.to_string());
    assert!(error.contains("__1_0.distcp"), "{error}");
    // What safetensors has no name for, and what cannot be rounded.
    let spec = Spec { element: Some(Element::I64), ..Spec::new(Format::Hf) };
    let refused = Conversion::plan(open(&folder.path().join("in")).unwrap(), spec).unwrap_err();
    assert!(refused.to_string().contains("cannot be rounded to i64"));
}

#[test]
fn two_boxes_of_a_tensor_on_one_rank_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    write_hf(&model(), &folder.path().join("in"));
    let rows = |a, b| Region::new(vec![Span::new(a, b), Span::new(0, 4)]);
    let boxes = vec![(0, rows(0, 1)), (1, rows(1, 3)), (0, rows(3, 6))];
    for format in [Format::DcpHf, Format::Dcp] {
        let out = folder.path().join(format.name());
        let cut = Cut::Boxes([("w".to_string(), boxes.clone())].into());
        convert(&folder.path().join("in"), &out, Spec { cut, ..Spec::new(format) });
        assert_eq!(read_slowly(&open(&out).unwrap()), model());
    }
}

#[test]
fn boxes_that_are_not_the_tensor_are_not_written() {
    let folder = tempfile::tempdir().unwrap();
    write_hf(&model(), &folder.path().join("in"));
    let rows = |a, b| Region::new(vec![Span::new(a, b), Span::new(0, 4)]);
    for boxes in [vec![(0, rows(0, 5))], vec![(0, rows(0, 4)), (1, rows(3, 6))], vec![(0, rows(0, 7))]] {
        let cut = Cut::Boxes([("w".to_string(), boxes)].into());
        let catalog = open(&folder.path().join("in")).unwrap();
        let error = Conversion::plan(catalog, Spec { cut, ..Spec::new(Format::Dcp) }).unwrap_err();
        assert!(error.to_string().contains("tensor `w`"), "{error}");
    }
}

#[test]
fn folders_that_hold_no_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    assert!(open(folder.path()).unwrap_err().to_string().contains("no checkpoint that is known"));
    assert!(open(&folder.path().join("nowhere")).unwrap_err().to_string().contains("cannot open"));
    std::fs::write(folder.path().join("__0_0.distcp"), "x").unwrap();
    assert!(open(folder.path()).unwrap_err().to_string().contains(".metadata: it is not there"));
}
