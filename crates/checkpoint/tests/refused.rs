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

/// Puts other bytes in the place of some of a file, wherever they are; how often that was.
fn patch(path: &Path, from: &[u8], to: &[u8]) -> usize {
    let (mut rest, mut out, mut found) = (&std::fs::read(path).unwrap()[..], Vec::new(), 0);
    while let Some(at) = rest.windows(from.len()).position(|w| w == from) {
        out.extend([&rest[..at], to].concat());
        (rest, found) = (&rest[at + from.len()..], found + 1);
    }
    std::fs::write(path, [&out[..], rest].concat()).unwrap();
    found
}

fn kinds(folder: &Path) -> Vec<ProblemKind> {
    let mut kinds: Vec<ProblemKind> = problems(folder).into_iter().map(|(kind, _)| kind).collect();
    kinds.dedup();
    kinds
}

#[test]
fn a_dtype_that_does_not_fit() {
    // `.metadata` says that `w` is i32, and its items are f32.
    let folder = tempfile::tempdir().unwrap();
    let out = made(Format::Dcp, folder.path());
    assert_eq!(patch(&out.join(".metadata"), b"ctorch\nfloat32\n", b"ctorch\nint32\n"), 1);
    let found = problems(&out);
    let named = |(kind, what): &&(ProblemKind, String)| {
        *kind == ProblemKind::Dtype && what.contains("of i32 is f32 [2, 4] in __1_0.distcp")
    };
    assert_eq!(found.iter().filter(named).count(), 1, "{found:?}");
    assert_eq!(found.iter().filter(|(kind, _)| *kind == ProblemKind::Dtype).count(), 3, "{found:?}");
    // A shape that is not that of the item.
    let folder = tempfile::tempdir().unwrap();
    let out = made(Format::Dcp, folder.path());
    assert_eq!(patch(&out.join(".metadata"), b"K\x02K\x04", b"K\x01K\x04"), 3);
    assert!(kinds(&out).contains(&ProblemKind::Dtype));
    // One of three files has another type.
    let folder = tempfile::tempdir().unwrap();
    let out = made(Format::DcpHf, folder.path());
    let shard = out.join("shard-00002-model-00001-of-00001.safetensors");
    assert_eq!(patch(&shard, b"\"F32\"", b"\"I32\""), 1);
    let found = problems(&out);
    let says = "`w`: f32 [2, 4] in one file, i32 [2, 4] in shard-00002";
    assert!(found.iter().any(|(k, w)| *k == ProblemKind::Dtype && w.contains(says)), "{found:?}");
    // What cannot be rounded.
    let spec = Spec { element: Some(Element::I64), ..Spec::new(Format::Hf) };
    let refused = Conversion::plan(open(&folder.path().join("in")).unwrap(), spec).unwrap_err();
    assert!(refused.to_string().contains("cannot be rounded to i64"));
}

#[test]
fn overlaps_and_holes_in_metadata() {
    // Small numbers of pickles are `K` and a byte. The last box begins at [4, 0], as a chunk and as an item.
    for (from, to, times, kind, says) in [
        (b"K\x04K\x00", b"K\x03K\x00", 2, ProblemKind::Overlap, "both hold [3:4, 0:4]"),
        (b"K\x04K\x00", b"K\x05K\x00", 2, ProblemKind::Outside, "box [5:7, 0:4] lies outside"),
        (
            b"K\x06K\x04",
            b"K\x07K\x04",
            1,
            ProblemKind::Hole,
            "nobody holds 4 elements, [6:7, 0:4] among them",
        ),
    ] {
        for format in [Format::Dcp, Format::TorchDist] {
            let folder = tempfile::tempdir().unwrap();
            let out = made(format, folder.path());
            assert_eq!(patch(&out.join(".metadata"), from, to), times, "{says}");
            let found = problems(&out);
            assert!(
                found.iter().all(|(k, w)| *k == kind && w.contains("`w`") && w.contains(says)),
                "{found:?}"
            );
            assert_eq!(found.len(), 1);
        }
    }
    // An item that its tensor does not have, and a box that no item is.
    let folder = tempfile::tempdir().unwrap();
    let out = made(Format::Dcp, folder.path());
    let whole = std::fs::read(out.join(".metadata")).unwrap();
    let at = whole.windows(4).rposition(|w| w == b"K\x04K\x00").unwrap();
    let mut other = whole.clone();
    other[at + 1] = 3;
    std::fs::write(out.join(".metadata"), other).unwrap();
    assert_eq!(kinds(&out), [ProblemKind::MissingTensor, ProblemKind::Hole, ProblemKind::Outside]);
}

#[test]
fn overlaps_and_holes_among_safetensors() {
    // Both files of an index have the one tensor, and none the other.
    let folder = tempfile::tempdir().unwrap();
    let out = made(Format::Hf, folder.path());
    let shard = |n: u32| out.join(format!("model-0000{n}-of-00002.safetensors"));
    std::fs::copy(shard(1), shard(2)).unwrap();
    let found = problems(&out);
    for (kind, says) in [
        (ProblemKind::MissingTensor, "`z`: the index says it is in model-00002-of-00002.safetensors"),
        (ProblemKind::Overlap, "`w`: boxes [0:6, 0:4] and [0:6, 0:4] both hold [0:6, 0:4]"),
        (
            ProblemKind::Twice,
            "`w`: it is in model-00002-of-00002.safetensors, where the index does not have it",
        ),
    ] {
        assert!(found.iter().any(|(k, w)| *k == kind && w.contains(says)), "{kind:?}: {found:?}");
    }
    // A file in the middle of DCP's: a hole, whoever wrote them.
    let folder = tempfile::tempdir().unwrap();
    let out = made(Format::DcpHf, folder.path());
    std::fs::remove_file(out.join("shard-00002-model-00001-of-00001.safetensors")).unwrap();
    let found = problems(&out);
    let hole = |(k, w): &(ProblemKind, String)| *k == ProblemKind::Hole && w.contains("[2:4, 0:4]");
    assert!(found.iter().any(hole), "{found:?}");
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

#[test]
fn a_name_that_safetensors_keeps_for_itself_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let held = Held { element: Element::F32, shape: vec![2], bytes: vec![0; 8] };
    write_hf(&Model::from([("w".to_string(), held)]), &at("in"));
    convert(&at("in"), &at("dcp"), Spec::new(Format::Dcp));
    let mut catalog = open(&at("dcp")).unwrap();
    let tensor = catalog.tensors.remove("w").unwrap();
    catalog.tensors.insert("__metadata__".into(), tensor);
    for format in [Format::Hf, Format::DcpHf, Format::Crossmesh] {
        let error = Conversion::plan(catalog.clone(), Spec::new(format)).unwrap_err().to_string();
        assert!(
            error.contains("tensor `__metadata__`: safetensors keeps this name for itself\nhint: "),
            "{error}"
        );
    }
    Conversion::plan(catalog, Spec::new(Format::Dcp)).unwrap();
}

#[test]
fn odd_names_go_through_every_format() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let names = [
        "",
        " ",
        "a/b",
        "/",
        "..",
        "../../x",
        "ä\u{1F600}",
        "tab\t",
        "line\nline",
        "quote\"s",
        "nul\u{0}",
        "{name}",
        "*",
    ];
    let held = |i: usize| Held { element: Element::F32, shape: vec![2], bytes: vec![i as u8; 8] };
    let model: Model = names.iter().enumerate().map(|(i, name)| (name.to_string(), held(i))).collect();
    write_hf(&model, &at("in"));
    let mut from = at("in");
    for (i, format) in [Format::Dcp, Format::DcpHf, Format::TorchDist, Format::Hf].into_iter().enumerate() {
        let to = at(&i.to_string());
        convert(&from, &to, Spec { cut: Cut::Rows(2), ..Spec::new(format) });
        assert_eq!(read_slowly(&open(&to).unwrap()), model, "{format}");
        from = to;
    }
    let mut ours = open(&from).unwrap();
    // What stands behind the slash is no state where nothing is called as what stands before it.
    ours.tensors.retain(|name, _| !name.is_empty());
    let conversion = Conversion::plan(ours, Spec::new(Format::Crossmesh)).unwrap();
    conversion.run(&at("ours"), &options(1)).unwrap();
    let read = read_slowly(&open(&at("ours")).unwrap());
    assert!(names[1..].iter().all(|name| read[*name] == model[*name]));
}

#[test]
fn what_is_no_regular_file_is_not_read() {
    for name in [".metadata", "model.safetensors.index.json"] {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/dev/null", folder.path().join(name)).unwrap();
        let error = open(folder.path()).unwrap_err().to_string();
        assert!(error.ends_with(&format!("{name}: it is no regular file")), "{error}");
    }
}

#[test]
fn bytes_behind_the_last_tensor_are_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    write_hf(&model(), folder.path());
    let path = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes.extend([7; 5]);
    std::fs::write(&path, bytes).unwrap();
    let found = open(folder.path()).unwrap().check();
    assert_eq!(found.iter().map(|p| p.kind).collect::<Vec<_>>(), [ProblemKind::Stray]);
    assert!(found[0].what.contains("5 bytes behind the last tensor"), "{}", found[0].what);
}

#[test]
fn more_ranks_than_rows_cost_nothing() {
    let folder = tempfile::tempdir().unwrap();
    write_hf(&model(), folder.path());
    let spec = Spec { cut: Cut::Rows(u32::MAX), ..Spec::new(Format::Dcp) };
    let plan = Conversion::plan(open(folder.path()).unwrap(), spec).unwrap();
    // A file for every row of the longest tensor, and `.metadata`.
    assert_eq!(plan.num_files(), 7);
}

#[test]
fn one_list_that_is_the_boxes_of_many_tensors_is_not_looked_through_for_each() {
    let word = |text: &str| [&b"X"[..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat();
    let object = |name: &str| format!("ctorch.distributed.checkpoint.metadata\n{name}\n)").into_bytes();
    // A thousand boxes, remembered as 5; a tensor that has them, as 6; and a thousand names of it.
    let mut bytes = [&b"\x80\x02]("[..], &vec![b'N'; 1000], b"eq\x050"].concat();
    bytes
        .extend([&object("TensorStorageMetadata")[..], b"\x81}", &word("chunks"), b"h\x05sbq\x060"].concat());
    bytes.extend([&object("Metadata")[..], b"\x81}", &word("storage_data"), b"}s"].concat());
    bytes.extend([&word("state_dict_metadata")[..], b"}("].concat());
    for i in 0..1000 {
        bytes.extend([&word(&format!("t.{i}"))[..], b"h\x06"].concat());
    }
    bytes.extend(b"usb.");
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(".metadata"), bytes).unwrap();
    let error = open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("it speaks of many more boxes than the 0 that lie in files"), "{error}");
}
