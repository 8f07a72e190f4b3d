//! Where the boxes shall be: the files of a checkpoint that does not exist yet, down to the byte.
//!
//! ```text
//! model.safetensors     header | embed | layers.0.q | ..
//! __0_0.distcp          zip head | box | zip tail | zip head | ..
//! ```

mod dcp;
mod hf;
mod ours;

pub(crate) use ours::adopt;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use crossmesh_core::region::{Region, Span};

use crate::catalog::{Catalog, Format};
use crate::element::Element;
use crate::error::CheckpointError;
use crate::manifest::{FACTS, Manifest};

/// What Hugging Face's tools cut models into.
pub const SHARD_BYTES: u64 = 5_000_000_000;

/// What is wanted.
#[derive(Debug, Clone)]
pub struct Spec {
    pub format: Format,
    pub cut: Cut,
    /// Real numbers are rounded to this; others stay as they are. None: all stay.
    pub element: Option<Element>,
    /// Of a Hugging Face file at most.
    pub shard_bytes: u64,
}

impl Spec {
    pub fn new(format: Format) -> Self {
        Self { format, cut: Cut::Whole, element: None, shard_bytes: SHARD_BYTES }
    }
}

/// Which rank writes which boxes.
#[derive(Debug, Clone)]
pub enum Cut {
    /// Rank 0 has everything.
    Whole,
    /// The first dim over so many ranks, by torch.chunk's rule, as FSDP does.
    Rows(u32),
    /// As listed. A tensor that is not listed is whole, on rank 0.
    Boxes(BTreeMap<String, Vec<(u32, Region)>>),
}

impl Cut {
    /// The boxes of a tensor; none of them is empty, unless the tensor is.
    fn boxes(&self, name: &str, shape: &[u64]) -> Vec<(u32, Region)> {
        let whole = Region::whole(shape);
        match self {
            Cut::Rows(ranks) if !shape.is_empty() && !whole.is_empty() => {
                let rows = shape[0].div_ceil(u64::from((*ranks).max(1)));
                let part = |rank: u32| {
                    let start = (u64::from(rank) * rows).min(shape[0]);
                    (rank, whole.with_span(0, Span::new(start, (start + rows).min(shape[0]))))
                };
                // Ranks behind the last row have none of it, however many there are.
                let holding = shape[0].div_ceil(rows) as usize;
                (0..*ranks).take(holding).map(part).collect()
            }
            Cut::Boxes(listed) if listed.contains_key(name) => listed[name].clone(),
            _ => vec![(0, whole)],
        }
    }
}

/// A file to be written.
#[derive(Debug, Clone)]
pub struct OutFile {
    pub name: String,
    pub bytes: u64,
    pub parts: Vec<Part>,
}

/// What lies at a place of a file.
#[derive(Debug, Clone)]
pub struct Part {
    pub at: u64,
    pub what: What,
}

#[derive(Debug, Clone)]
pub enum What {
    Bytes(Vec<u8>),
    /// A box, row-major; where a zip file is around it, the part begins with so many bytes of that.
    Box {
        tensor: String,
        region: Region,
        head_bytes: Option<u64>,
    },
    /// Of our own format: complete once the hashes of all other files are known.
    Manifest(Box<Manifest>),
    /// Bytes of a file of the source, as they are.
    Object {
        file: u32,
        offset: u64,
        bytes: u64,
    },
}

impl Part {
    /// Where a box's elements begin.
    pub fn data_at(&self) -> u64 {
        match &self.what {
            What::Box { head_bytes: Some(head), .. } => self.at + head,
            _ => self.at,
        }
    }
}

/// All files of the target.
#[derive(Debug, Clone)]
pub struct Target {
    pub files: Vec<OutFile>,
    /// Tensors and the types they will have.
    pub elements: BTreeMap<String, Element>,
    /// What the target has no place for.
    pub left_out: Vec<String>,
    /// Files beside the source that are copied as they are: what they are called, and where they are.
    pub extras: Vec<(String, PathBuf)>,
}

impl Target {
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|f| f.bytes).sum()
    }
}

/// Lays out the files.
pub fn lay_out(catalog: &Catalog, spec: &Spec) -> Result<Target, CheckpointError> {
    let mut elements = BTreeMap::new();
    for (name, tensor) in &catalog.tensors {
        let wanted = spec.element.filter(|_| tensor.element.is_real());
        elements.insert(name.clone(), wanted.unwrap_or(tensor.element));
    }
    if let Some(element) = spec.element.filter(|e| !e.is_real()) {
        let what =
            format!("numbers cannot be rounded to {element}\nhint: f64, f32, bf16 and f16 are possible");
        return Err(CheckpointError::target(what));
    }
    if matches!(spec.cut, Cut::Rows(0)) {
        return Err(CheckpointError::target("no ranks are to write it\nhint: 1 or more"));
    }
    let boxes = cut(catalog, spec)?;
    let plan = Plan { catalog, spec, elements: &elements, boxes };
    let (files, left_out) = match spec.format {
        Format::Hf => hf::whole_files(&plan)?,
        Format::DcpHf => hf::box_files(&plan)?,
        Format::Dcp | Format::TorchDist => dcp::files(&plan),
        Format::Crossmesh => ours::files(&plan)?,
    };
    let mut files = files;
    files.extend(documents(catalog, spec.format));
    let taken: BTreeSet<&str> = files.iter().map(|f| f.name.as_str()).collect();
    let of_megatron = ["common.pt", "metadata.json"];
    let fits = |name: &&String| {
        !taken.contains(name.as_str())
            && (spec.format == Format::TorchDist || !of_megatron.contains(&name.as_str()))
    };
    let extras = catalog.extras.iter().filter(|(name, _)| fits(name));
    let extras = extras.map(|(name, path)| (name.clone(), path.clone())).collect();
    Ok(Target { files, elements, left_out, extras })
}

/// What others need to know of a checkpoint of ours, and lies in no file of it: config.json, and where the run was.
fn documents(catalog: &Catalog, format: Format) -> Vec<OutFile> {
    if format == Format::Crossmesh {
        return vec![];
    }
    let mut files = Vec::new();
    if let Some(config) = catalog.config.as_ref().filter(|_| !catalog.extras.contains_key("config.json")) {
        let text = serde_json::to_string_pretty(config).expect("it was read as JSON") + "\n";
        files.push(hf::document("config.json", text.into_bytes()));
    }
    if let Some(facts) = catalog.facts.as_ref().filter(|facts| facts.have_a_past()) {
        files.push(hf::document(FACTS, facts.to_text().into_bytes()));
    }
    files
}

/// What the layouts of all formats begin with.
struct Plan<'a> {
    catalog: &'a Catalog,
    spec: &'a Spec,
    elements: &'a BTreeMap<String, Element>,
    /// For every tensor, in the order of names.
    boxes: BTreeMap<String, Vec<(u32, Region)>>,
}

/// The boxes of all tensors, each element in one of them.
fn cut(catalog: &Catalog, spec: &Spec) -> Result<BTreeMap<String, Vec<(u32, Region)>>, CheckpointError> {
    let mut all = BTreeMap::new();
    if let Cut::Boxes(listed) = &spec.cut
        && let Some(name) = listed.keys().find(|name| !catalog.tensors.contains_key(*name))
    {
        let what = "it is to be cut, and is not there".to_string();
        return Err(CheckpointError::Tensor { tensor: name.clone(), what });
    }
    for (name, tensor) in &catalog.tensors {
        let boxes = spec.cut.boxes(name, &tensor.shape);
        let wrong = |what: String| CheckpointError::Tensor { tensor: name.clone(), what };
        if let Cut::Boxes(_) = spec.cut {
            let whole = Region::whole(&tensor.shape);
            let outside = |r: &Region| r.num_dims() != whole.num_dims() || !whole.contains(r);
            if let Some((_, region)) = boxes.iter().find(|(_, r)| outside(r)) {
                return Err(wrong(format!("box {region} lies outside of {:?}", tensor.shape)));
            }
            let held: u64 = boxes.iter().map(|(_, r)| r.volume()).sum();
            let index = crossmesh_core::box_index::BoxIndex::new(
                boxes.iter().map(|(_, r)| r).filter(|r| !r.is_empty()).collect::<Vec<_>>().iter().copied(),
            );
            if held != tensor.volume() || index.first_overlap().is_some() {
                return Err(wrong(format!("its boxes are not {:?}, each element once", tensor.shape)));
            }
        }
        all.insert(name.clone(), boxes);
    }
    Ok(all)
}
