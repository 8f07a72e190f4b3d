//! From one checkpoint to another: planned, explained, run.
//!
//! A target's files are cut into slabs: boxes whose bytes lie in one stretch of a file, small enough for a buffer. A slab
//! is read from wherever its elements lie, and written at once:
//!
//! ```text
//! target box  [0:8, 0:6]  ->  slabs  [0:3, 0:6]  [3:6, 0:6]  [6:8, 0:6]
//!                                       |  a read for every source box that meets it
//! ```
//!
//! Threads take slabs in the order of the files. Memory is two or three buffers a thread, whatever the tensors' sizes.

mod cast;
mod folder;
mod journal;
mod run;

use std::collections::BTreeMap;
use std::path::PathBuf;

use crossmesh_core::box_index::BoxIndex;
use crossmesh_core::region::{Region, Span};

use crate::catalog::{Catalog, Tensor, row_major};
use crate::copy::Copy;
use crate::element::Element;
use crate::error::CheckpointError;
use crate::target::{Spec, Target, What, lay_out};

pub(crate) use cast::cast;
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
        Ok(Self { catalog, target, spec, indexes })
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
    fn sources<'a>(&'a self, name: &str, region: &Region) -> Vec<(&'a crate::catalog::StoredBox, Region)> {
        let tensor = &self.catalog.tensors[name];
        let meet = |stored: &'a crate::catalog::StoredBox| Some((stored, stored.region.intersect(region)?));
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
                        let from = self.catalog.tensors[tensor].element;
                        let width = from.bytes().max(self.target.elements[tensor].bytes());
                        let limit = (buffer_bytes / width).max(1);
                        cut(region, limit, &mut |slab| {
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
                    What::Bytes(_) => {}
                }
            }
        }
        slabs
    }

    /// Where the bytes come from, box by box, as text.
    pub fn explain(&self, limits: Limits) -> String {
        use std::fmt::Write as _;
        let mut text = String::new();
        let (mut read, mut copied) = (0u64, 0u64);
        for out in &self.target.files {
            let _ = writeln!(text, "{}  {} B", out.name, out.bytes);
            for part in &out.parts {
                let What::Box { tensor, region, .. } = &part.what else { continue };
                let (from, to) = (self.catalog.tensors[tensor].element, self.target.elements[tensor]);
                let rounded = if from == to { String::new() } else { format!(", {from} rounded to {to}") };
                let bytes = region.volume() * to.bytes();
                let _ = writeln!(text, "  {tensor} {region}  {bytes} B at {}{rounded}", part.data_at());
                let strides = row_major(region.spans().iter().map(|s| s.len()), from.bytes());
                for (stored, common) in self.sources(tensor, region) {
                    let copy = Copy::new(stored, region, &strides, &common, from.bytes());
                    let range = copy.file_range();
                    let file = &self.catalog.files[stored.file as usize].name;
                    let _ = writeln!(
                        text,
                        "    {common}  {} B of {file} {}..{}",
                        copy.bytes(),
                        range.start,
                        range.end
                    );
                    read += copy.bytes_read(limits.buffer_bytes);
                    copied += copy.bytes();
                }
            }
        }
        let (written, tensors) = (self.bytes(), self.catalog.tensors.len());
        let memory = limits.memory_bytes();
        let _ = writeln!(
            text,
            "{tensors} tensors: reads {read} B, writes {written} B in {} files; {copied} B have to be read at least\nbuffers: {memory} B in {} threads",
            self.target.files.len(),
            limits.threads
        );
        text
    }

    pub fn target_bytes_of(&self, name: &str) -> Option<u64> {
        self.target.files.iter().find(|f| f.name == name).map(|f| f.bytes)
    }

    /// The folder's files that are copied as they are.
    fn extras(&self) -> impl Iterator<Item = (&String, PathBuf)> {
        self.target.extras.iter().map(|name| (name, self.catalog.folder.join(name)))
    }

    fn elements_of(&self, tensor: &str) -> (Element, Element) {
        (self.catalog.tensors[tensor].element, self.target.elements[tensor])
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
    /// A box that lies in one stretch of its part.
    Box(Region),
    /// Bytes of an object.
    Object(std::ops::Range<u64>),
}

/// Cuts a box into boxes of at most so many elements that follow each other row-major, in their order.
pub(crate) fn cut(region: &Region, limit: u64, each: &mut impl FnMut(Region)) {
    if region.is_empty() {
        return;
    }
    // The first dim whose rows fit is cut into so many rows; the dims before it, one by one.
    let lens: Vec<u64> = region.spans().iter().map(|s| s.len()).collect();
    let rows = |dim: usize| lens[dim + 1..].iter().product::<u64>();
    let Some(dim) = (0..lens.len()).find(|&dim| rows(dim) <= limit) else { return each(region.clone()) };
    let step = (limit / rows(dim)).max(1);
    let mut spans: Vec<Span> = region.spans().to_vec();
    let mut outer: Vec<u64> = region.spans()[..dim].iter().map(|s| s.start).collect();
    loop {
        outer.iter().enumerate().for_each(|(d, &at)| spans[d] = Span::new(at, at + 1));
        let whole = region.spans()[dim];
        let mut at = whole.start;
        while at < whole.end {
            let end = whole.end.min(at.saturating_add(step));
            spans[dim] = Span::new(at, end);
            each(Region::new(spans.clone()));
            at = end;
        }
        // The next of the dims before, like the hands of a clock.
        let Some(d) = (0..dim).rev().find(|&d| outer[d] + 1 < region.spans()[d].end) else { return };
        outer[d] += 1;
        (d + 1..dim).for_each(|later| outer[later] = region.spans()[later].start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossmesh_testkit::seed::Seed;

    #[test]
    fn slabs_follow_each_other_and_are_the_box() {
        let mut seed = Seed(3);
        for _ in 0..500 {
            let dims = seed.below(4);
            let span = |seed: &mut Seed| {
                let start = seed.below(5) as u64;
                Span::new(start, start + 1 + seed.below(6) as u64)
            };
            let region = Region::new((0..dims).map(|_| span(&mut seed)).collect());
            let limit = 1 + seed.below(40) as u64;
            let strides = row_major(region.spans().iter().map(|s| s.len()), 1);
            let mut next = 0;
            cut(&region, limit, &mut |slab| {
                assert!(slab.volume() <= limit && region.contains(&slab));
                let starts = slab.spans().iter().zip(region.spans()).map(|(s, r)| s.start - r.start);
                assert_eq!(starts.zip(&strides).map(|(x, s)| x * s).sum::<u64>(), next);
                // In one stretch: all dims behind the first that is longer than one are whole.
                let first = slab.spans().iter().position(|s| s.len() > 1).unwrap_or(dims);
                let whole = |d: usize| slab.spans()[d] == region.spans()[d];
                assert!((first + 1..dims).all(whole), "{slab} of {region}");
                next += slab.volume();
            });
            assert_eq!(next, region.volume());
        }
    }
}
