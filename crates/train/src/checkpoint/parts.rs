//! What every rank has written, and the manifest that all of it makes.
//!
//! A rank that has written its file describes it as a [`RankPart`]. The parts of all ranks make a [`Manifest`], if every element of every tensor is
//! in exactly one box.

use std::collections::BTreeMap;

use crossmesh_checkpoint::manifest::{BoxEntry, Facts, FileEntry, Manifest, SCHEMA, TensorEntry, region};
use serde::{Deserialize, Serialize};

use super::error::CheckpointError;

/// What a rank has written of one tensor: boxes one behind the other under one key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartTensor {
    pub name: String,
    pub state: String,
    pub shape: Vec<u64>,
    pub layout: String,
    pub key: String,
    pub boxes: Vec<Vec<[u64; 2]>>,
}

/// What a rank has written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankPart {
    pub rank: u32,
    pub step: u64,
    pub dtype: String,
    pub file: FileEntry,
    pub tensors: Vec<PartTensor>,
}

/// Puts the parts of all ranks together, if they are a whole.
pub fn assemble(facts: &Facts, mut parts: Vec<RankPart>) -> Result<Manifest, CheckpointError> {
    let wrong = |what: String| CheckpointError::Parts { step: facts.step, what };
    parts.sort_by_key(|p| p.rank);
    let Some(first) = parts.first() else { return Err(wrong("no rank wrote anything".into())) };
    let dtype = first.dtype.clone();
    for (i, part) in parts.iter().enumerate() {
        if part.rank as usize != i {
            return Err(wrong(format!("rank {i} is missing or there twice")));
        }
        if part.step != facts.step {
            return Err(wrong(format!("rank {i} wrote step {}", part.step)));
        }
        if part.dtype != dtype {
            return Err(wrong(format!("rank 0 has {dtype}, rank {i} {}", part.dtype)));
        }
    }
    let files = parts.iter().map(|p| p.file.clone()).collect();
    let tensors = merge(&parts).map_err(wrong)?;
    let manifest = Manifest { schema: SCHEMA.into(), facts: facts.clone(), dtype, files, tensors };
    manifest.check().map_err(wrong)?;
    Ok(manifest)
}

/// The tensors of all parts, by name and state.
fn merge(parts: &[RankPart]) -> Result<Vec<TensorEntry>, String> {
    let mut tensors: BTreeMap<(&str, &str), TensorEntry> = BTreeMap::new();
    for (file, part) in parts.iter().enumerate() {
        for t in &part.tensors {
            let entry = tensors.entry((&t.name, &t.state)).or_insert_with(|| {
                let (name, state, shape) = (t.name.clone(), t.state.clone(), t.shape.clone());
                TensorEntry { name, state, shape, layout: t.layout.clone(), boxes: vec![] }
            });
            if (&entry.shape, &entry.layout) != (&t.shape, &t.layout) {
                let TensorEntry { name, layout, .. } = entry;
                return Err(format!("`{name}` is {layout}, and on rank {file} {}", t.layout));
            }
            let mut at = 0;
            for spans in &t.boxes {
                let volume = region(spans).map_or(0, |r| r.volume());
                entry.boxes.push(BoxEntry { file, key: t.key.clone(), at, spans: spans.clone() });
                at += volume;
            }
        }
    }
    Ok(tensors.into_values().collect())
}
