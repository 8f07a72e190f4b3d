//! From one checkpoint to another: planned, explained, run.
//!
//! A target's files are cut into slabs: boxes that are small enough for a buffer. A slab is read from wherever its elements lie, and written
//! where they go, as a rule in one stretch:
//!
//! ```text
//! target box  [0:8, 0:6]  ->  slabs  [0:3, 0:6]  [3:6, 0:6]  [6:8, 0:6]
//!                                       |  a read for every source box that meets it
//! ```
//!
//! A box that lies transposed in its source is cut into tiles instead (`cut`). Threads take slabs in the order of the files. Memory is two or
//! three buffers a thread, whatever the tensors' sizes.

mod cast;
mod cut;
mod explain;
mod folder;
mod journal;
mod run;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crossmesh_core::box_index::BoxIndex;
use crossmesh_core::region::{Region, Span};

use crate::catalog::{Catalog, StoredBox, Tensor, modified, row_major};
use crate::copy::Copy;
use crate::element::Element;
use crate::error::CheckpointError;
use crate::target::{Spec, Target, What, lay_out};

pub(crate) use cast::cast;
pub(crate) use cut::cut;
pub use explain::{Explanation, Reads, Writes};
pub use run::{Progress, Report, RunOptions};

/// A buffer is never larger: beyond this a read costs what its bytes do.
const MAX_BUFFER_BYTES: u64 = 8 << 20;
/// Nor smaller: memory for less is not asked for.
const MIN_BUFFER_BYTES: u64 = 64 << 10;
/// What a thread holds: a slab, its scratch, and the slab rounded to another type.
const BUFFERS: u64 = 3;
/// So few boxes are looked at one by one.
const FEW_BOXES: usize = 8;

/// A conversion that is planned.
#[derive(Debug)]
pub struct Conversion {
    catalog: Catalog,
    target: Target,
    spec: Spec,
    /// What the files beside the tensors were when it was planned, in the order of the target's extras.
    beside: Vec<Stamp>,
    /// Source boxes by place, of tensors that have many.
    indexes: BTreeMap<String, BoxIndex>,
}

impl Conversion {
    /// Plans it: the source is checked, the target laid out. Reads and writes nothing.
    pub fn plan(catalog: Catalog, spec: Spec) -> Result<Self, CheckpointError> {
        catalog.checked()?;
        let target = lay_out(&catalog, &spec)?;
        let many = catalog.tensors.iter().filter(|(_, t)| t.boxes.len() > FEW_BOXES);
        let index = |t: &Tensor| BoxIndex::new(t.boxes.iter().map(|b| &b.region));
        let indexes = many.map(|(name, t)| (name.clone(), index(t))).collect();
        let beside = target.extras.iter().map(|(_, path)| Stamp::of(path)).collect::<Result<_, _>>()?;
        Ok(Self { catalog, target, spec, beside, indexes })
    }

    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// What the target has no place for.
    pub fn left_out(&self) -> &[String] {
        &self.target.left_out
    }

    /// Of all files of the target.
    pub fn bytes(&self) -> u64 {
        self.target.bytes()
    }

    pub fn num_files(&self) -> usize {
        self.target.files.len()
    }

    /// Every source box that has elements of a region.
    fn sources<'a>(&'a self, name: &str, region: &Region) -> Vec<(&'a StoredBox, Region)> {
        let tensor = &self.catalog.tensors[name];
        let meet = |stored: &'a StoredBox| Some((stored, stored.region.intersect(region)?));
        match self.indexes.get(name) {
            Some(index) => {
                let ids = index.meeting(region.spans());
                ids.into_iter().filter_map(|id| meet(&tensor.boxes[id as usize])).collect()
            }
            None if region.num_dims() == 0 => tensor.boxes.iter().map(|b| (b, region.clone())).collect(),
            None => tensor.boxes.iter().filter_map(meet).collect(),
        }
    }

    /// The slabs of all boxes, file by file.
    fn slabs(&self, buffer_bytes: u64) -> Vec<Slab> {
        let mut slabs = Vec::new();
        for (file, out) in self.target.files.iter().enumerate() {
            for (part, place) in out.parts.iter().enumerate() {
                let (file, part) = (file as u32, part as u32);
                match &place.what {
                    What::Box { tensor, region, .. } => {
                        let lens = self.slab_lens(tensor, region, buffer_bytes);
                        cut::blocks(region, &lens, &mut |slab| {
                            slabs.push(Slab { file, part, what: Work::Box(slab) })
                        });
                    }
                    What::Object { bytes, .. } => {
                        let starts = (0..*bytes).step_by(buffer_bytes as usize);
                        slabs.extend(starts.map(|at| {
                            let end = (at + buffer_bytes).min(*bytes);
                            Slab { file, part, what: Work::Object(at..end) }
                        }));
                    }
                    What::Bytes(_) | What::Manifest(_) => {}
                }
            }
        }
        slabs
    }

    /// How long a slab of a box of the target is in every dim: rows of it, or a tile where rows would read their source again and again.
    fn slab_lens(&self, tensor: &str, region: &Region, buffer_bytes: u64) -> Vec<u64> {
        let (from, to) = self.elements_of(tensor);
        let limit = (buffer_bytes / from.bytes().max(to.bytes())).max(1);
        let rows = cut::rows(region, limit);
        let Some(stored) = self.first_source(tensor, region).filter(|stored| cut::is_turned(stored, region))
        else {
            return rows;
        };
        let start = region.spans().iter().zip(&rows).map(|(s, len)| Span::new(s.start, s.start + len));
        let first = Region::new(start.collect());
        let needed = first.volume() * from.bytes();
        match self.bytes_read_for(tensor, &first, buffer_bytes) <= needed + needed / 4 {
            true => rows,
            false => cut::tile(region, stored, limit),
        }
    }

    /// A source box that has elements of a region.
    fn first_source(&self, tensor: &str, region: &Region) -> Option<&StoredBox> {
        match self.indexes.get(tensor) {
            Some(_) => self.sources(tensor, region).first().map(|(stored, _)| *stored),
            None => self.catalog.tensors[tensor].boxes.iter().find(|b| b.region.overlaps(region)),
        }
    }

    /// The copies that a slab is filled by: from which file, and with how large a buffer for what is sorted out in memory.
    fn copies<'a>(&'a self, tensor: &str, slab: &Region) -> impl Iterator<Item = (u32, Copy)> + use<'a> {
        let width = self.catalog.tensors[tensor].element.bytes();
        let strides = row_major(slab.spans().iter().map(|s| s.len()), width);
        let slab = slab.clone();
        let sources = self.sources(tensor, &slab).into_iter();
        sources.map(move |(stored, common)| (stored.file, Copy::new(stored, &slab, &strides, &common, width)))
    }

    fn bytes_read_for(&self, tensor: &str, slab: &Region, buffer_bytes: u64) -> u64 {
        // What lies in no file is not read.
        if self.catalog.tensors[tensor].value.is_some() {
            return 0;
        }
        self.copies(tensor, slab).map(|(_, copy)| copy.bytes_read(buffer_bytes)).sum()
    }

    pub fn target_bytes_of(&self, name: &str) -> Option<u64> {
        self.target.files.iter().find(|f| f.name == name).map(|f| f.bytes)
    }

    /// Of the files that are copied as they are.
    fn bytes_beside(&self) -> u64 {
        self.beside.iter().map(|stamp| stamp.bytes).sum()
    }

    /// Files that are copied as they are.
    fn extras(&self) -> &[(String, PathBuf)] {
        &self.target.extras
    }

    fn elements_of(&self, tensor: &str) -> (Element, Element) {
        (self.catalog.tensors[tensor].element, self.target.elements[tensor])
    }
}

/// By which it is noticed that a file changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    bytes: u64,
    modified: (i64, i64),
}

impl Stamp {
    fn of(path: &Path) -> Result<Self, CheckpointError> {
        let meta = std::fs::metadata(path).map_err(CheckpointError::io("read", path))?;
        Ok(Self { bytes: meta.len(), modified: modified(&meta) })
    }
}

/// How much memory the buffers may take, and of how many threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub threads: usize,
    pub buffer_bytes: u64,
}

impl Limits {
    /// For all cores, or fewer where memory is short.
    pub fn new(max_memory: u64, threads: usize) -> Result<Self, CheckpointError> {
        let least = BUFFERS * MIN_BUFFER_BYTES;
        if max_memory < least {
            let what =
                format!("a conversion needs {least} bytes of memory at least, and may have {max_memory}");
            return Err(CheckpointError::target(what));
        }
        let threads = threads.clamp(1, (max_memory / least) as usize);
        let buffer = max_memory / (BUFFERS * threads as u64);
        Ok(Self { threads, buffer_bytes: buffer.clamp(MIN_BUFFER_BYTES, MAX_BUFFER_BYTES) })
    }

    pub fn memory_bytes(&self) -> u64 {
        BUFFERS * self.buffer_bytes * self.threads as u64
    }
}

/// What a thread does at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Slab {
    file: u32,
    part: u32,
    what: Work,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Work {
    /// A box of its part: rows, or a tile.
    Box(Region),
    /// Bytes of an object.
    Object(std::ops::Range<u64>),
}
