//! torch.distributed.checkpoint: a `.distcp` file for every rank, `.metadata` for all; and what Megatron puts beside.

use std::collections::{BTreeMap, HashMap};

use crossmesh_core::region::Region;

use super::hf::document;
use super::{OutFile, Part, Plan, What};
use crate::catalog::{Format, PathStep};
use crate::element::Element;
use crate::open::METADATA;
use crate::pickle::Writer;
use crate::zip::{Shell, object_zip};

/// An item of a file, for `.metadata`.
struct Item {
    name: String,
    /// None for what is no tensor.
    region: Option<Region>,
    file: String,
    offset: u64,
    bytes: u64,
}

pub fn files(plan: &Plan<'_>) -> (Vec<OutFile>, Vec<String>) {
    let mut by_rank: BTreeMap<u32, OutFile> = BTreeMap::new();
    let mut items = Vec::new();
    let mut add = |rank: u32, name: &str, region: Option<Region>, bytes: u64, what: What| {
        let empty = || OutFile { name: format!("__{rank}_0.distcp"), bytes: 0, parts: vec![] };
        let file = by_rank.entry(rank).or_insert_with(empty);
        items.push(Item { name: name.into(), region, file: file.name.clone(), offset: file.bytes, bytes });
        file.parts.push(Part { at: file.bytes, what });
        file.bytes += bytes;
    };
    for (name, object) in &plan.catalog.objects {
        let crate::catalog::Object { file, offset, bytes } = *object;
        add(0, name, None, bytes, What::Object { file, offset, bytes });
    }
    // Boxes of one type and shape have zip files of one size, and a model has few shapes.
    let mut sizes: HashMap<(Element, Vec<u64>), (u64, u64)> = HashMap::new();
    for (name, boxes) in &plan.boxes {
        for (rank, region) in boxes {
            let shape: Vec<u64> = region.spans().iter().map(|s| s.len()).collect();
            let (head, bytes) =
                *sizes.entry((plan.elements[name], shape)).or_insert_with_key(|(element, shape)| {
                    let shell = Shell::of_tensor(*element, shape);
                    (shell.data_at(), shell.item_bytes())
                });
            let head_bytes = Some(head);
            let what = What::Box { tensor: name.clone(), region: region.clone(), head_bytes };
            add(*rank, name, Some(region.clone()), bytes, what);
        }
    }
    let mut files: Vec<OutFile> = by_rank.into_values().collect();
    files.push(document(METADATA, metadata(plan, &items)));
    let has_common =
        plan.catalog.format == Format::TorchDist && plan.catalog.extras.contains_key("common.pt");
    if plan.spec.format == Format::TorchDist && !has_common {
        let text = r#"{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}"#;
        files.push(document("metadata.json", text.into()));
        files.push(document("common.pt", object_zip(&common())));
    }
    (files, vec![])
}

/// What Megatron's loader wants to find beside the tensors.
fn common() -> Vec<u8> {
    let mut writer = Writer::default();
    writer.dict(|w| {
        w.str("checkpoint_version");
        w.float(3.0);
        w.str("iteration");
        w.int(0);
    });
    writer.finish()
}

const MODULE: &str = "torch.distributed.checkpoint.metadata";

fn metadata(plan: &Plan<'_>, items: &[Item]) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.object(MODULE, "Metadata", |w| {
        w.dict(|w| {
            w.str("state_dict_metadata");
            w.dict(|w| described(w, plan));
            w.str("planner_data");
            match plan.spec.format {
                Format::TorchDist => w.none(),
                _ => w.dict(|w| paths(w, plan)),
            }
            w.str("storage_data");
            w.dict(|w| items.iter().for_each(|item| place(w, item)));
            w.str("storage_meta");
            w.object(MODULE, "StorageMeta", |w| {
                w.dict(|w| {
                    for name in ["checkpoint_id", "save_id", "load_id"] {
                        w.str(name);
                        w.none();
                    }
                    w.str("modules");
                    w.list(|_| {});
                });
            });
            w.str("version");
            w.str("1.0.0");
        });
    });
    writer.finish()
}

/// `state_dict_metadata`.
fn described(w: &mut Writer, plan: &Plan<'_>) {
    for (name, boxes) in &plan.boxes {
        w.str(name);
        w.object(MODULE, "TensorStorageMetadata", |w| {
            w.dict(|w| {
                w.word("properties");
                properties(w, plan.elements[name]);
                w.word("size");
                size(w, plan.catalog.tensors[name].shape.iter().copied());
                w.word("chunks");
                w.list(|w| boxes.iter().for_each(|(_, region)| chunk(w, region)));
            });
        });
    }
    for name in plan.catalog.objects.keys() {
        w.str(name);
        w.object(MODULE, "BytesStorageMetadata", |w| w.dict(|_| {}));
    }
}

fn properties(w: &mut Writer, element: Element) {
    w.object(MODULE, "TensorProperties", |w| {
        w.tuple(|w| {
            w.global("torch", element.torch());
            w.call("torch.serialization", "_get_layout", |w| w.word("torch.strided"));
            w.bool(false);
            w.call(MODULE, "_MEM_FORMAT_ENCODING", |w| w.int(0));
            w.bool(false);
        });
    });
}

fn size(w: &mut Writer, sizes: impl Iterator<Item = u64>) {
    w.call("torch", "Size", |w| w.tuple(|w| sizes.for_each(|n| w.int(n))));
}

fn chunk(w: &mut Writer, region: &Region) {
    w.object(MODULE, "ChunkStorageMetadata", |w| {
        w.dict(|w| {
            w.word("offsets");
            size(w, region.spans().iter().map(|s| s.start));
            w.word("sizes");
            size(w, region.spans().iter().map(|s| s.len()));
        });
    });
}

/// `planner_data`: where a name was in nested dicts and lists.
fn paths(w: &mut Writer, plan: &Plan<'_>) {
    for name in plan.boxes.keys().chain(plan.catalog.objects.keys()) {
        w.str(name);
        w.tuple(|w| match plan.catalog.paths.get(name) {
            Some(path) => path.iter().for_each(|step| match step {
                PathStep::Key(key) => w.word(key),
                PathStep::Index(index) => w.int(*index),
            }),
            None => w.str(name),
        });
    }
}

/// An entry of `storage_data`.
fn place(w: &mut Writer, item: &Item) {
    w.object(MODULE, "MetadataIndex", |w| {
        w.dict(|w| {
            w.word("fqn");
            w.str(&item.name);
            w.word("index");
            w.none();
            if let Some(region) = &item.region {
                w.word("offset");
                size(w, region.spans().iter().map(|s| s.start));
            }
        });
    });
    w.object("torch.distributed.checkpoint.filesystem", "_StorageInfo", |w| {
        w.dict(|w| {
            w.word("relative_path");
            w.word(&item.file);
            w.word("offset");
            w.int(item.offset);
            w.word("length");
            w.int(item.bytes);
        });
    });
}
