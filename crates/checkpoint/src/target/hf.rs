//! safetensors: whole tensors in a few files with an index, or boxes of them, a file for every rank.

use std::collections::BTreeMap;

use crossmesh_core::region::Region;
use serde_json::json;

use super::{OutFile, Part, Plan, What};
use crate::element::Element;
use crate::error::CheckpointError;
use crate::open::{INDEX, SHAPES_KEY, SHARDING_KEY};
use crate::safetensors::{METADATA_KEY, RESERVED, header_bytes};

type Files = (Vec<OutFile>, Vec<String>);

/// A tensor, or a box of one, of a file.
struct Entry<'a> {
    name: &'a str,
    element: Element,
    region: Region,
}

impl Entry<'_> {
    fn shape(&self) -> Vec<u64> {
        self.region.spans().iter().map(|s| s.len()).collect()
    }

    fn bytes(&self) -> u64 {
        self.region.volume() * self.element.bytes()
    }
}

/// Hugging Face's own layout.
pub fn whole_files(plan: &Plan<'_>) -> Result<Files, CheckpointError> {
    let mut shards: Vec<Vec<Entry<'_>>> = vec![vec![]];
    let mut bytes = 0;
    let mut names: Vec<&String> = plan.catalog.tensors.keys().collect();
    names.sort_by_key(|name| natural(name));
    for name in names {
        let region = Region::whole(&plan.catalog.tensors[name].shape);
        let entry = entry(plan, name, region)?;
        if bytes > 0 && bytes + entry.bytes() > plan.spec.shard_bytes {
            shards.push(vec![]);
            bytes = 0;
        }
        bytes += entry.bytes();
        shards.last_mut().expect("there is one").push(entry);
    }
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let count = shards.len();
    let (mut files, mut weight_map) = (Vec::new(), BTreeMap::new());
    for (i, shard) in shards.into_iter().enumerate() {
        let name = match count {
            1 => "model.safetensors".to_string(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
        };
        weight_map.extend(shard.iter().map(|e| (e.name.to_string(), name.clone())));
        files.push(file(name, &metadata, shard));
    }
    if count > 1 {
        let tensors = || plan.catalog.tensors.iter();
        let total_size: u64 = tensors().map(|(name, t)| t.volume() * plan.elements[name].bytes()).sum();
        let total_parameters: u64 = tensors().map(|(_, t)| t.volume()).sum();
        let metadata = json!({"total_parameters": total_parameters, "total_size": total_size});
        let index = json!({"metadata": metadata, "weight_map": weight_map});
        let text = serde_json::to_string_pretty(&index).expect("names are JSON") + "\n";
        files.push(document(INDEX, text.into_bytes()));
    }
    Ok((files, plan.catalog.objects.keys().cloned().collect()))
}

/// DCP's storage. A file has one box of a tensor at most: torch's own writer drops the others.
pub fn box_files(plan: &Plan<'_>) -> Result<Files, CheckpointError> {
    // By rank, then by which box of its tensor it is there.
    let mut by_rank: BTreeMap<u32, Vec<Vec<Entry<'_>>>> = BTreeMap::new();
    for (name, boxes) in &plan.boxes {
        let mut seen: BTreeMap<u32, usize> = BTreeMap::new();
        for (rank, region) in boxes {
            let place = seen.entry(*rank).or_default();
            let files = by_rank.entry(*rank).or_default();
            if files.len() <= *place {
                files.push(vec![]);
            }
            files[*place].push(entry(plan, name, region.clone())?);
            *place += 1;
        }
    }
    let mut files = Vec::new();
    for (rank, of_rank) in by_rank {
        let count = of_rank.len();
        for (i, entries) in of_rank.into_iter().enumerate() {
            let name = format!("shard-{:05}-model-{:05}-of-{count:05}.safetensors", rank + 1, i + 1);
            let starts = |e: &Entry<'_>| e.region.spans().iter().map(|s| s.start).collect::<Vec<_>>();
            let offsets: BTreeMap<&str, serde_json::Value> =
                entries.iter().map(|e| (e.name, json!({"saved_offsets": starts(e)}))).collect();
            let shapes: BTreeMap<&str, &Vec<u64>> =
                entries.iter().map(|e| (e.name, &plan.catalog.tensors[e.name].shape)).collect();
            let metadata = BTreeMap::from([
                (SHARDING_KEY.to_string(), json!(offsets).to_string()),
                ("DCP_VERSION".to_string(), "1.0".to_string()),
                (SHAPES_KEY.to_string(), json!(shapes).to_string()),
                ("format".to_string(), "pt".to_string()),
            ]);
            files.push(file(name, &metadata, entries));
        }
    }
    Ok((files, plan.catalog.objects.keys().cloned().collect()))
}

fn entry<'a>(plan: &Plan<'_>, name: &'a str, region: Region) -> Result<Entry<'a>, CheckpointError> {
    let element = plan.elements[name];
    if name == METADATA_KEY {
        return Err(CheckpointError::Tensor { tensor: name.into(), what: RESERVED.into() });
    }
    if element.safetensors().is_none() {
        let what = format!(
            "its elements are {element}, for which safetensors has no name\nhint: `--to dcp` keeps them"
        );
        return Err(CheckpointError::Tensor { tensor: name.into(), what });
    }
    Ok(Entry { name, element, region })
}

/// The order in which the safetensors library puts tensors: wide elements first, then by name.
fn order(element: Element) -> usize {
    const NARROW_FIRST: [Element; 18] = [
        Element::BOOL,
        Element::U8,
        Element::I8,
        Element::F8E5M2,
        Element::F8E4M3,
        Element::F8E8M0,
        Element::I16,
        Element::U16,
        Element::F16,
        Element::BF16,
        Element::I32,
        Element::U32,
        Element::F32,
        Element::C64,
        Element::F64,
        Element::I64,
        Element::U64,
        Element::C128,
    ];
    let place = NARROW_FIRST.iter().position(|e| *e == element);
    usize::MAX - place.expect("every element is in the list")
}

fn file(name: String, metadata: &BTreeMap<String, String>, mut entries: Vec<Entry<'_>>) -> OutFile {
    entries.sort_by_key(|e| (order(e.element), e.name));
    let header = header_bytes(metadata, entries.iter().map(|e| (e.name.to_string(), e.element, e.shape())));
    let mut at = header.len() as u64;
    let mut parts = vec![Part { at: 0, what: What::Bytes(header) }];
    for entry in entries {
        let bytes = entry.bytes();
        let what = What::Box { tensor: entry.name.to_string(), region: entry.region, head_bytes: None };
        parts.push(Part { at, what });
        at += bytes;
    }
    OutFile { name, bytes: at, parts }
}

pub(super) fn document(name: &str, bytes: Vec<u8>) -> OutFile {
    let len = bytes.len() as u64;
    OutFile { name: name.into(), bytes: len, parts: vec![Part { at: 0, what: What::Bytes(bytes) }] }
}

/// Names in the order of the numbers in them: layer 2 before layer 10.
pub(super) fn natural(name: &str) -> Vec<(u64, String)> {
    name.split('.').map(|word| (word.parse().unwrap_or(0), word.to_string())).collect()
}
