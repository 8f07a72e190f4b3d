//! What a checkpoint holds, whatever its format: boxes of named tensors, each at a place of a file.
//!
//! The one idea of this crate. A checkpoint is a mesh whose ranks are files; a box lies in a file as a strided array,
//! so a slice, a transpose, a head of a fused projection are boxes of the same bytes under another name:
//!
//! ```text
//! qkv [6, 4] in one file                 q [4, 4]  [0:2, 0:4] at 0,  [2:4, 0:4] at 48
//! rows  q q k v | q q k v   (2 groups)   k [2, 4]  [0:1, 0:4] at 32, ..
//! ```
//!
//! To convert is to say where the boxes shall be, and to copy where old and new ones meet.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};

use crossmesh_core::box_index::BoxIndex;
use crossmesh_core::region::Region;

use crate::element::Element;
use crate::error::CheckpointError;
use crate::hash::{Input, hash_files};
use crate::manifest::Facts;

/// Problems that are kept of what opening notices, and what is kept of each.
const MAX_NOTICED: usize = 1 << 16;
const MAX_NOTICE_BYTES: usize = 1 << 11;

/// More dims than any tensor of a model has.
pub const MAX_DIMS: usize = 16;

/// How a checkpoint is written down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Format {
    /// Hugging Face: safetensors, one or several with an index.
    Hf,
    /// torch.distributed.checkpoint: `.metadata` and `.distcp` files.
    Dcp,
    /// The same stored as safetensors, a box of a tensor in each.
    DcpHf,
    /// Megatron-core: DCP with `metadata.json` and `common.pt`.
    TorchDist,
    /// What `crossmesh train` writes.
    Crossmesh,
}

impl Format {
    pub const ALL: [Format; 5] =
        [Format::Hf, Format::Dcp, Format::DcpHf, Format::TorchDist, Format::Crossmesh];

    pub fn name(self) -> &'static str {
        match self {
            Format::Hf => "hf",
            Format::Dcp => "dcp",
            Format::DcpHf => "dcp-hf",
            Format::TorchDist => "torch_dist",
            Format::Crossmesh => "crossmesh",
        }
    }
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Format {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let names = || Format::ALL.map(Format::name).join(", ");
        let found = Format::ALL.into_iter().find(|f| f.name() == s);
        found.ok_or_else(|| format!("no format is called `{s}`\nhint: one of {}", names()))
    }
}

/// A file with tensors in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataFile {
    /// Relative to the folder.
    pub name: String,
    /// None where it is missing.
    pub bytes: Option<u64>,
    /// Seconds and nanoseconds: a file that changes while it is read is noticed.
    pub modified: (i64, i64),
    /// Its hash in hexadecimal digits, where the format says one.
    pub blake3: Option<String>,
}

/// A box of a tensor in a file: element `x` lies `offset + Σ strides·(x - start)` bytes behind the file's start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredBox {
    pub region: Region,
    /// In the list of files.
    pub file: u32,
    pub offset: u64,
    /// In bytes, for every dim.
    pub strides: Vec<u64>,
}

impl StoredBox {
    /// A box that lies row-major in one stretch.
    pub fn packed(region: Region, file: u32, offset: u64, element: Element) -> Self {
        let strides = row_major(region.spans().iter().map(|s| s.len()), element.bytes());
        Self { region, file, offset, strides }
    }

    /// Behind its last byte; None if that is more than a file can have.
    pub fn end(&self, element: Element) -> Option<u64> {
        if self.region.is_empty() {
            return Some(self.offset);
        }
        let steps = self.region.spans().iter().zip(&self.strides);
        steps
            .map(|(span, stride)| (span.len() - 1).checked_mul(*stride))
            .try_fold(self.offset.checked_add(element.bytes())?, |at, step| at.checked_add(step?))
    }
}

/// The strides of a row-major array of these lengths.
pub fn row_major(lens: impl DoubleEndedIterator<Item = u64>, width: u64) -> Vec<u64> {
    let mut next = width;
    let mut strides: Vec<u64> = lens
        .rev()
        .map(|len| {
            let stride = next;
            // What is so large is outside every file, and refused for that.
            next = next.saturating_mul(len.max(1));
            stride
        })
        .collect();
    strides.reverse();
    strides
}

/// A tensor and where its boxes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    pub element: Element,
    pub shape: Vec<u64>,
    pub boxes: Vec<StoredBox>,
    /// Of a tensor without dims that lies in no file: its bytes.
    pub value: Option<Vec<u8>>,
}

impl Tensor {
    pub fn volume(&self) -> u64 {
        self.shape.iter().product()
    }

    pub fn bytes(&self) -> u64 {
        self.volume() * self.element.bytes()
    }
}

/// The bytes of a tensor of this shape, if there can be one.
pub(crate) fn checked_bytes(shape: &[u64], element: Element) -> Option<u64> {
    if shape.len() > MAX_DIMS {
        return None;
    }
    // A dim of nothing makes the tensor empty, but the others must still be lengths.
    shape.iter().try_fold(element.bytes(), |bytes, &n| bytes.checked_mul(n.max(1)))?;
    Some(shape.iter().product::<u64>() * element.bytes())
}

/// Something that is no tensor: a pickle, carried along as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    pub file: u32,
    pub offset: u64,
    pub bytes: u64,
}

/// A key of a dict, or a place in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PathStep {
    Key(String),
    Index(u64),
}

/// What is wrong with a checkpoint, or cannot be known.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    pub kind: ProblemKind,
    pub what: String,
}

/// By name, for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ProblemKind {
    MissingFile,
    MissingTensor,
    ShortFile,
    Overlap,
    Hole,
    Outside,
    Dtype,
    Twice,
    /// Nothing tells how large a tensor is: a lost shard would not be noticed. A warning.
    ShapeUnknown,
    /// Something lies beside the checkpoint that is no part of it. A warning.
    Stray,
}

impl ProblemKind {
    pub fn name(self) -> &'static str {
        match self {
            ProblemKind::MissingFile => "missing-file",
            ProblemKind::MissingTensor => "missing-tensor",
            ProblemKind::ShortFile => "short-file",
            ProblemKind::Overlap => "overlap",
            ProblemKind::Hole => "hole",
            ProblemKind::Outside => "outside",
            ProblemKind::Dtype => "dtype",
            ProblemKind::Twice => "twice",
            ProblemKind::ShapeUnknown => "shape-unknown",
            ProblemKind::Stray => "stray",
        }
    }

    /// Whether a conversion may go on in spite of it.
    pub fn is_warning(self) -> bool {
        matches!(self, ProblemKind::ShapeUnknown | ProblemKind::Stray)
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.kind.name(), self.what)
    }
}

/// An open checkpoint: headers only, no tensor was read.
#[derive(Debug, Clone)]
pub struct Catalog {
    pub format: Format,
    pub folder: PathBuf,
    pub files: Vec<DataFile>,
    pub tensors: BTreeMap<String, Tensor>,
    pub objects: BTreeMap<String, Object>,
    /// Where names were in nested dicts and lists, for those who put them back: DCP's `planner_data`.
    pub paths: BTreeMap<String, Vec<PathStep>>,
    /// Files beside the tensors that go along: config.json, tokenizers, Megatron's common.pt.
    pub extras: BTreeMap<String, PathBuf>,
    /// The model's config.json, where there is one.
    pub config: Option<serde_json::Value>,
    /// What a run of ours says of it: its own manifest, or what was carried along from one.
    pub facts: Option<Facts>,
    /// How many steps the optimizer has taken whose states are there, where that is known.
    pub optimizer_steps: Option<u64>,
    /// What was noticed while opening; [`Catalog::check`] adds what the boxes say.
    pub(crate) noticed: Vec<Problem>,
}

impl Catalog {
    pub(crate) fn empty(format: Format, folder: &Path) -> Self {
        Self {
            format,
            folder: folder.to_path_buf(),
            files: vec![],
            tensors: BTreeMap::new(),
            objects: BTreeMap::new(),
            paths: BTreeMap::new(),
            extras: BTreeMap::new(),
            config: None,
            facts: None,
            optimizer_steps: None,
            noticed: vec![],
        }
    }

    /// Of all tensors, each element once.
    pub fn bytes(&self) -> u64 {
        self.tensors.values().map(Tensor::bytes).sum()
    }

    pub fn path(&self, file: u32) -> PathBuf {
        self.folder.join(&self.files[file as usize].name)
    }

    /// Of more than anybody reads, and of what is longer, some is enough: a file may repeat a long name as often as it likes.
    pub(crate) fn notice(&mut self, kind: ProblemKind, mut what: String) {
        if self.noticed.len() < MAX_NOTICED {
            let most = MAX_NOTICE_BYTES.min(what.len());
            what.truncate((0..=most).rev().find(|&at| what.is_char_boundary(at)).unwrap_or(0));
            what.shrink_to_fit();
            self.noticed.push(Problem { kind, what });
        }
    }

    /// Adds a file; whether it is there and how long it is are noted.
    pub(crate) fn add_file(&mut self, name: &str) -> u32 {
        let path = self.folder.join(name);
        let meta = std::fs::metadata(&path).ok().filter(std::fs::Metadata::is_file);
        if meta.is_none() {
            let what = format!("{}: it is not there", path.display());
            self.notice(ProblemKind::MissingFile, what);
        }
        let modified = meta.as_ref().map_or((0, 0), modified);
        self.files.push(DataFile { name: name.into(), bytes: meta.map(|m| m.len()), modified, blake3: None });
        self.files.len() as u32 - 1
    }

    /// Everything that is wrong, in the order of names: missing and short files, boxes that overlap, lie outside or leave
    /// a hole.
    pub fn check(&self) -> Vec<Problem> {
        let mut problems = self.noticed.clone();
        for (name, tensor) in &self.tensors {
            self.check_tensor(name, tensor, &mut problems);
        }
        problems.sort();
        problems.dedup();
        problems
    }

    /// Refuses a checkpoint with problems; warnings are not among them.
    pub fn checked(&self) -> Result<(), CheckpointError> {
        let faults = self.check().into_iter().filter(|p| !p.kind.is_warning());
        let problems: Vec<String> = faults.map(|p| p.to_string()).collect();
        match problems.is_empty() {
            true => Ok(()),
            false => Err(CheckpointError::Problems { path: self.folder.clone(), problems }),
        }
    }

    /// Refuses files that are not what was written, where the format has a hash of them: ours has. Returns how many bytes were read for it.
    pub fn verify(&self, files: &BTreeSet<u32>, threads: usize) -> Result<u64, CheckpointError> {
        let mut read = 0;
        for (i, file) in self.files.iter().enumerate() {
            let Some(wanted) = file.blake3.as_ref().filter(|_| files.contains(&(i as u32))) else { continue };
            let path = self.path(i as u32);
            let opened = File::open(&path).map_err(CheckpointError::io("open", &path))?;
            let input = Input { file: &opened, path: &path, bytes: file.bytes.unwrap_or(0) };
            let found = hash_files(&[input], threads)?.remove(0).to_hex();
            if found.as_str() != wanted {
                let what = format!("it is not what was written: its hash is {found}, not {wanted}");
                return Err(CheckpointError::damaged(&path, what));
            }
            read += input.bytes;
        }
        Ok(read)
    }

    /// Refuses files that are no longer what was opened.
    pub(crate) fn unchanged(&self, files: &BTreeSet<u32>) -> Result<(), CheckpointError> {
        for &i in files {
            let (path, file) = (self.path(i), &self.files[i as usize]);
            let meta = std::fs::metadata(&path).map_err(CheckpointError::io("read", &path))?;
            if (Some(meta.len()), modified(&meta)) != (file.bytes, file.modified) {
                return Err(CheckpointError::Changed { path });
            }
        }
        Ok(())
    }

    /// All files.
    pub(crate) fn all_files(&self) -> BTreeSet<u32> {
        (0..self.files.len() as u32).collect()
    }

    fn check_tensor(&self, name: &str, tensor: &Tensor, problems: &mut Vec<Problem>) {
        if tensor.value.is_some() {
            return;
        }
        let mut say = |kind, what: String| problems.push(Problem { kind, what });
        let whole = Region::whole(&tensor.shape);
        let mut held = 0u64;
        for stored in &tensor.boxes {
            let region = &stored.region;
            if region.num_dims() != whole.num_dims() || !whole.contains(region) {
                say(ProblemKind::Outside, format!("`{name}` {:?}: box {region} lies outside", tensor.shape));
                return;
            }
            let file = &self.files[stored.file as usize];
            let end = stored.end(tensor.element);
            if let Some(bytes) = file.bytes
                && end.is_none_or(|end| end > bytes)
            {
                let end = end.map_or("far away".into(), |e| e.to_string());
                let what =
                    format!("`{name}`: box {region} ends at byte {end} of {}, which has {bytes}", file.name);
                say(ProblemKind::ShortFile, what);
            }
            // More than all of it only where some overlap, which is said.
            held = held.saturating_add(region.volume());
        }
        // One box that is all of it, as most are.
        if held == tensor.volume() && tensor.boxes.len() == 1 {
            return;
        }
        let regions: Vec<&Region> =
            tensor.boxes.iter().map(|b| &b.region).filter(|r| !r.is_empty()).collect();
        let index = BoxIndex::new(regions.iter().copied());
        if let Some((a, b)) = index.first_overlap() {
            let (a, b) = (regions[a as usize], regions[b as usize]);
            let common = a.intersect(b).map_or_else(String::new, |r| r.to_string());
            say(ProblemKind::Overlap, format!("`{name}`: boxes {a} and {b} both hold {common}"));
        } else if held != tensor.volume() {
            let hole = first_hole(&whole, &index).map_or_else(String::new, |r| format!(", {r} among them"));
            let missing = tensor.volume() - held;
            say(
                ProblemKind::Hole,
                format!("`{name}` {:?}: nobody holds {missing} elements{hole}", tensor.shape),
            );
        }
    }
}

/// A box that no box of the index meets: what is left of the whole is halved until one is found.
fn first_hole(whole: &Region, index: &BoxIndex) -> Option<Region> {
    let mut left = vec![whole.clone()];
    for _ in 0..10_000 {
        let region = left.pop()?;
        let meeting = index.meeting(region.spans());
        let mut spans = None;
        index.visit_meeting(region.spans(), |_, s| {
            spans = Some(Region::new(s.to_vec()));
            crossmesh_core::box_index::Visit::Stop
        });
        match (meeting.is_empty(), spans) {
            (false, Some(held)) => left.extend(region.subtract(&held)),
            _ => return Some(region),
        }
    }
    None
}

pub(crate) fn modified(meta: &std::fs::Metadata) -> (i64, i64) {
    use std::os::unix::fs::MetadataExt;
    (meta.mtime(), meta.mtime_nsec())
}

/// A relative path that leads nowhere else, as files of checkpoints are named by what others wrote.
pub(crate) fn is_inside(name: &str) -> bool {
    let path = Path::new(name);
    !name.is_empty()
        && !name.contains('\0')
        && path.components().all(|c| matches!(c, std::path::Component::Normal(_)))
}
