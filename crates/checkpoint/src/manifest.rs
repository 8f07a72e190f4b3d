//! The manifest of our own checkpoints: what one holds, and which box of which tensor lies where (docs/checkpoint-format.md).
//!
//! Every element of every tensor is in exactly one box. The document ends with the hash of everything before it, so that not even a digit
//! of it changes unnoticed.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use crossmesh_core::box_index::BoxIndex;
use crossmesh_core::dtype::DType;
use crossmesh_core::id::Rank;
use crossmesh_core::region::{Region, Span};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::CheckpointError;

/// The name and number of the format.
pub const SCHEMA: &str = "crossmesh.checkpoint/1";
/// What it is called.
pub const MANIFEST: &str = "manifest.json";
/// What keeps the facts of a run beside the tensors of other formats.
pub const FACTS: &str = "crossmesh.json";
const FACTS_SCHEMA: &str = "crossmesh.facts/1";
/// The state of a tensor that is the parameter itself; the others are an optimizer's moments.
pub const VALUE: &str = "value";
/// What stands between the document and its hash.
const SEAL: &str = ",\n  \"blake3\": \"";

/// What a checkpoint says beside its tensors; rank 0 gives it when it commits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Facts {
    /// Steps done.
    pub step: u64,
    /// Samples seen: where the data goes on.
    pub samples: u64,
    pub seed: u64,
    /// The model's sizes, under the names that a config of `crossmesh train` has for them.
    pub model: Value,
    /// Whatever else the run wants to find again.
    pub run: Value,
    /// None where there are parameters only.
    pub optimizer: Option<OptimizerFacts>,
}

impl Facts {
    /// Whether there was a run, and this is not just a model.
    pub fn have_a_past(&self) -> bool {
        self.step > 0 || self.optimizer.is_some() || !self.run.is_null()
    }

    /// The document that goes along with the tensors.
    pub fn to_text(&self) -> String {
        let mut document = serde_json::to_value(self).expect("facts are a document");
        document["schema"] = Value::from(FACTS_SCHEMA);
        serde_json::to_string_pretty(&document).expect("a document is text") + "\n"
    }

    pub fn read(path: &Path) -> Result<Self, CheckpointError> {
        let damaged = |what: String| CheckpointError::damaged(path, what);
        let document: Value = crate::open::read_json(path)?;
        let schema = document.get("schema").and_then(Value::as_str).unwrap_or("nothing");
        if schema != FACTS_SCHEMA {
            let found = schema.to_string();
            return Err(CheckpointError::Schema { path: path.to_path_buf(), found, wanted: FACTS_SCHEMA });
        }
        serde_json::from_value(document).map_err(|e| damaged(format!("it is damaged: {e}")))
    }
}

/// Which optimizer goes on from here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OptimizerFacts {
    /// `adamw`, `sgd`.
    pub kind: String,
    /// Its steps: Adam's bias correction depends on them.
    pub steps: u64,
    /// As `Optimizer::moment_names` has them.
    pub moments: Vec<String>,
}

/// A file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    pub name: String,
    pub bytes: u64,
    /// In hexadecimal digits.
    pub blake3: String,
}

/// Where a box of a tensor is: `at` elements behind the start of a key of a file, row-major.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoxEntry {
    /// In the list of files.
    pub file: usize,
    pub key: String,
    pub at: u64,
    /// A start and an end for every dim.
    #[serde(rename = "box")]
    pub spans: Vec<[u64; 2]>,
}

/// A tensor: a parameter, or one of its moments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorEntry {
    pub name: String,
    /// [`VALUE`], or the name of a moment.
    pub state: String,
    pub shape: Vec<u64>,
    /// How the parameter lay when it was saved; nobody needs it to load.
    pub layout: String,
    pub boxes: Vec<BoxEntry>,
}

/// The whole document.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    pub schema: String,
    #[serde(flatten)]
    pub facts: Facts,
    /// Of all tensors: `f32` or `f64`.
    pub dtype: String,
    pub files: Vec<FileEntry>,
    pub tensors: Vec<TensorEntry>,
}

/// A box's spans as they are written.
pub fn spans_of(region: &Region) -> Vec<[u64; 2]> {
    region.spans().iter().map(|s| [s.start, s.end]).collect()
}

impl BoxEntry {
    /// None for a span that runs backwards.
    pub fn region(&self) -> Option<Region> {
        region(&self.spans)
    }
}

/// The box of these spans; None where one runs backwards.
pub fn region(spans: &[[u64; 2]]) -> Option<Region> {
    let span = |&[start, end]: &[u64; 2]| (start <= end).then(|| Span::new(start, end));
    Some(Region::new(spans.iter().map(span).collect::<Option<Vec<_>>>()?))
}

/// The key of a tensor in a file: the parameter's name, or that and the name of a moment.
pub fn key_of(name: &str, state: &str) -> String {
    if state == VALUE { name.to_string() } else { format!("{name}/{state}") }
}

/// What a file of a rank is called.
pub fn file_name(rank: Rank) -> String {
    format!("rank-{:03}.safetensors", rank.0)
}

impl Manifest {
    /// The document, sealed. One line for every file and tensor.
    pub fn to_text(&self) -> String {
        let mut head = serde_json::to_value(self).expect("a manifest is a document");
        let members = head.as_object_mut().expect("an object");
        let (files, tensors) = (members.remove("files"), members.remove("tensors"));
        let mut text = String::from("{\n");
        let mut member = |name: &str, value: &Value| {
            let _ = writeln!(text, "  {}: {value},", Value::from(name));
        };
        // What it is comes first.
        let names = ["schema", "step", "samples", "seed", "dtype", "optimizer", "model", "run"];
        names.iter().for_each(|name| member(name, &members[*name]));
        let lines = |name: &str, list: Option<Value>| {
            let rows: Vec<String> =
                list.iter().flat_map(|l| l.as_array()).flatten().map(|row| format!("    {row}")).collect();
            format!("  \"{name}\": [\n{}\n  ]", rows.join(",\n"))
        };
        let _ = write!(text, "{},\n{}", lines("files", files), lines("tensors", tensors));
        let hash = blake3::hash(text.as_bytes()).to_hex();
        let _ = write!(text, "{SEAL}{hash}\"\n}}\n");
        text
    }

    /// Reads a document and refuses one that is damaged or does not make sense.
    pub fn parse(text: &str, path: &Path) -> Result<Self, CheckpointError> {
        let damaged = |what: String| CheckpointError::damaged(path, what);
        #[derive(Deserialize)]
        struct Schema {
            schema: String,
        }
        let schema: Schema =
            serde_json::from_str(text).map_err(|e| damaged(format!("it is no manifest: {e}")))?;
        if schema.schema != SCHEMA {
            let path = path.to_path_buf();
            return Err(CheckpointError::Schema { path, found: schema.schema, wanted: SCHEMA });
        }
        let sealed = text.rsplit_once(SEAL);
        let hash = sealed.and_then(|(_, hash)| hash.strip_suffix("\"\n}\n"));
        let Some(((document, _), hash)) = sealed.zip(hash) else {
            return Err(damaged("it does not end with its hash".into()));
        };
        if blake3::hash(document.as_bytes()).to_hex().as_str() != hash {
            return Err(damaged("it is not what was written: its hash differs".into()));
        }
        let manifest: Self =
            serde_json::from_str(text).map_err(|e| damaged(format!("it is no manifest: {e}")))?;
        manifest.check().map_err(damaged)?;
        Ok(manifest)
    }

    pub fn dtype(&self) -> DType {
        self.dtype.parse().unwrap_or(DType::F32)
    }

    pub fn tensor(&self, name: &str, state: &str) -> Option<&TensorEntry> {
        self.tensors.iter().find(|t| t.name == name && t.state == state)
    }

    /// The laws: known numbers, files that are files, every element of every tensor in one box, moments for every parameter.
    pub fn check(&self) -> Result<(), String> {
        if !["f32", "f64"].contains(&self.dtype.as_str()) {
            return Err(format!("its dtype is {}, not f32 or f64", self.dtype));
        }
        if let Some(file) = self.files.iter().find(|f| !is_plain(&f.name)) {
            return Err(format!("`{}` is no name of a file", file.name));
        }
        for tensor in &self.tensors {
            covers(tensor, self.files.len())
                .map_err(|e| format!("`{}` ({}): {e}", tensor.name, tensor.state))?;
        }
        let mut states: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        self.tensors.iter().for_each(|t| states.entry(&t.name).or_default().push(&t.state));
        let moments = self.facts.optimizer.as_ref().map_or(&[][..], |o| &o.moments);
        let mut wanted: Vec<&str> = moments.iter().map(String::as_str).chain([VALUE]).collect();
        wanted.sort_unstable();
        for (name, mut states) in states {
            states.sort_unstable();
            if states != wanted {
                return Err(format!("`{name}` has {states:?}, where {wanted:?} belong to it"));
            }
        }
        Ok(())
    }
}

/// A name that leads nowhere else.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0'])
}

/// Whether a tensor's boxes are all of it, once.
fn covers(tensor: &TensorEntry, num_files: usize) -> Result<(), String> {
    let volume = tensor.shape.iter().try_fold(1u64, |v, &n| v.checked_mul(n));
    let volume = volume.filter(|v| v.checked_mul(8).is_some()).ok_or("it is larger than can be")?;
    let whole = Region::whole(&tensor.shape);
    let mut regions = Vec::with_capacity(tensor.boxes.len());
    for entry in &tensor.boxes {
        let region = entry.region().filter(|r| r.num_dims() == whole.num_dims() && whole.contains(r));
        let region = region.ok_or_else(|| format!("{:?} is no box of {:?}", entry.spans, tensor.shape))?;
        if entry.file >= num_files {
            return Err(format!("{region} is in file {}, and there are {num_files}", entry.file));
        }
        if entry.at.checked_add(region.volume()).is_none() {
            return Err(format!("{region} lies behind the end of everything"));
        }
        regions.push(region);
    }
    regions.retain(|region| !region.is_empty());
    if let Some((a, b)) = BoxIndex::new(regions.iter()).first_overlap() {
        return Err(format!("{} and {} overlap", regions[a as usize], regions[b as usize]));
    }
    let stored: u64 = regions.iter().map(Region::volume).sum();
    if stored != volume {
        return Err(format!("{stored} of its {volume} elements are there"));
    }
    Ok(())
}
