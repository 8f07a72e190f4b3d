//! Loading: what a rank holds, straight into its memory, and nothing else is read.
//!
//! A rank says which box of which tensor it wants, and where that lies in its memory. Boxes that meet it are read to
//! where they go; of a box of which it needs a column, the columns are read.

use std::collections::HashMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crossmesh_core::region::Region;

use crate::catalog::{Catalog, Tensor, row_major};
use crate::convert::{Limits, cast, cut};
use crate::copy::Copy;
use crate::element::Element;
use crate::error::CheckpointError;

/// A box that is wanted, and the memory it goes to.
#[derive(Debug)]
pub struct Want<'a> {
    pub tensor: String,
    pub region: Region,
    /// Of the memory: real numbers are rounded to it.
    pub element: Element,
    /// In bytes, for every dim: element `x` lies `Σ strides·(x - start)` behind the start of `memory`.
    pub strides: Vec<u64>,
    pub memory: &'a mut [u8],
}

/// What was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Loaded {
    pub boxes: usize,
    /// Of the files.
    pub bytes_read: u64,
    /// Into memory.
    pub bytes: u64,
}

/// Fills all that is wanted. An error leaves memory with some of it.
pub fn load(
    catalog: &Catalog,
    wants: Vec<Want<'_>>,
    max_memory: u64,
    threads: usize,
) -> Result<Loaded, CheckpointError> {
    catalog.checked()?;
    let limits = Limits::new(max_memory, threads)?;
    for want in &wants {
        check(catalog, want)?;
    }
    let boxes = wants.len();
    let bytes = wants.iter().map(|w| w.region.volume() * w.element.bytes()).sum();
    let wants: Vec<Mutex<Want<'_>>> = wants.into_iter().map(Mutex::new).collect();
    let (next, bytes_read) = (AtomicUsize::new(0), AtomicU64::new(0));
    let failure: Mutex<Option<CheckpointError>> = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..limits.threads.min(wants.len()) {
            scope.spawn(|| {
                let mut reader = Reader::new(catalog, limits.buffer_bytes);
                while let Some(want) = wants.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let mut want = want.lock().expect("one thread takes it");
                    match reader.fill(&mut want) {
                        Ok(read) => drop(bytes_read.fetch_add(read, Ordering::Relaxed)),
                        Err(error) => {
                            failure.lock().expect("nobody panics with it").get_or_insert(error);
                            next.store(wants.len(), Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    match failure.into_inner().expect("nobody panics with it") {
        Some(error) => Err(error),
        None => Ok(Loaded { boxes, bytes_read: bytes_read.into_inner(), bytes }),
    }
}

/// That it can be filled from this checkpoint, and lies inside its memory.
fn check(catalog: &Catalog, want: &Want<'_>) -> Result<(), CheckpointError> {
    let wrong = |what: String| CheckpointError::Tensor { tensor: want.tensor.clone(), what };
    let tensor = catalog.tensors.get(&want.tensor).ok_or_else(|| {
        let near = nearest(&want.tensor, catalog.tensors.keys());
        wrong(format!(
            "the checkpoint does not have it{}",
            near.map_or(String::new(), |n| format!("\nhint: it has `{n}`"))
        ))
    })?;
    let whole = Region::whole(&tensor.shape);
    if want.region.num_dims() != whole.num_dims() || !whole.contains(&want.region) {
        return Err(wrong(format!(
            "{} is no box of {:?}, its shape in the checkpoint",
            want.region, tensor.shape
        )));
    }
    if want.element != tensor.element && !(want.element.is_real() && tensor.element.is_real()) {
        return Err(wrong(format!(
            "it is {} in the checkpoint, and {} in memory",
            tensor.element, want.element
        )));
    }
    let steps = want.region.spans().iter().zip(&want.strides);
    let end = steps
        .map(|(span, stride)| span.len().saturating_sub(1).checked_mul(*stride))
        .try_fold(want.element.bytes(), |at, step| at.checked_add(step?));
    let fits = want.strides.len() == want.region.num_dims()
        && (want.region.is_empty() || end.is_some_and(|end| end <= want.memory.len() as u64));
    if fits { Ok(()) } else { Err(wrong(format!("{} does not fit into its memory", want.region))) }
}

/// The name that has most in common with this one, if it is much.
fn nearest<'a>(name: &str, names: impl Iterator<Item = &'a String>) -> Option<&'a String> {
    let common = |other: &str| {
        let head = name.bytes().zip(other.bytes()).take_while(|(a, b)| a == b).count();
        let tail = name.bytes().rev().zip(other.bytes().rev()).take_while(|(a, b)| a == b).count();
        head + tail
    };
    names.max_by_key(|other| common(other)).filter(|other| common(other) * 2 > name.len())
}

/// Reads boxes of a checkpoint; its buffer is used again and again.
pub(crate) struct Reader<'a> {
    catalog: &'a Catalog,
    scratch: Vec<u8>,
    open: HashMap<u32, (Arc<File>, PathBuf)>,
}

impl<'a> Reader<'a> {
    pub fn new(catalog: &'a Catalog, scratch_bytes: u64) -> Self {
        Self { catalog, scratch: vec![0; scratch_bytes as usize], open: HashMap::new() }
    }

    pub fn catalog(&self) -> &'a Catalog {
        self.catalog
    }

    /// Fills memory with what is wanted; [`check`] has passed.
    pub fn fill(&mut self, want: &mut Want<'_>) -> Result<u64, CheckpointError> {
        let catalog = self.catalog;
        let tensor = &catalog.tensors[&want.tensor];
        let mut read = 0;
        if tensor.element == want.element {
            for (stored, common) in meeting(tensor, &want.region) {
                let copy = Copy::new(stored, &want.region, &want.strides, &common, want.element.bytes());
                let (file, path) = self.source(stored.file)?;
                read += copy.read(&file, &path, want.memory, &mut self.scratch)?;
            }
            return Ok(read);
        }
        // Rounded a slab at a time.
        let mut slabs = Vec::new();
        let width = tensor.element.bytes();
        cut(&want.region, (self.scratch.len() as u64 / width).max(1), &mut |slab| slabs.push(slab));
        let (mut buffer, mut rounded) = (Vec::new(), Vec::new());
        for slab in slabs {
            buffer.resize((slab.volume() * width) as usize, 0);
            let strides = row_major(slab.spans().iter().map(|s| s.len()), width);
            for (stored, common) in meeting(tensor, &slab) {
                let copy = Copy::new(stored, &slab, &strides, &common, width);
                let (file, path) = self.source(stored.file)?;
                read += copy.read(&file, &path, &mut buffer, &mut self.scratch)?;
            }
            let bytes = want.element.bytes();
            rounded.resize((slab.volume() * bytes) as usize, 0);
            cast(tensor.element, &buffer, want.element, &mut rounded);
            let from = row_major(slab.spans().iter().map(|s| s.len()), bytes);
            let held = crate::catalog::StoredBox { region: slab.clone(), file: 0, offset: 0, strides: from };
            let copy = Copy::new(&held, &want.region, &want.strides, &slab, bytes);
            copy.scatter(&rounded, want.memory);
        }
        Ok(read)
    }

    fn source(&mut self, file: u32) -> Result<(Arc<File>, PathBuf), CheckpointError> {
        if let Some((file, path)) = self.open.get(&file) {
            return Ok((file.clone(), path.clone()));
        }
        let path = self.catalog.path(file);
        let opened = Arc::new(File::open(&path).map_err(CheckpointError::io("open", &path))?);
        self.open.clear();
        self.open.insert(file, (opened.clone(), path.clone()));
        Ok((opened, path))
    }
}

fn meeting<'a>(
    tensor: &'a Tensor,
    region: &'a Region,
) -> impl Iterator<Item = (&'a crate::catalog::StoredBox, Region)> {
    tensor.boxes.iter().filter_map(move |stored| Some((stored, stored.region.intersect(region)?)))
}
