//! Loading: what a rank holds, straight into its memory, and nothing else is read.
//!
//! A rank says which box of which tensor it wants, and where that lies in its memory. Boxes that meet it are read to
//! where they go; of a box of which it needs a column, the columns are read.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crossmesh_core::region::Region;

use crate::catalog::{Catalog, StoredBox, row_major};
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
    let meeting = |want: &Want<'_>| {
        let boxes = catalog.tensors[&want.tensor].boxes.iter();
        boxes.filter(|b| b.region.overlaps(&want.region)).map(|b| b.file).collect::<Vec<_>>()
    };
    let files: BTreeSet<u32> = wants.iter().flat_map(meeting).collect();
    catalog.verify(&files, limits.threads)?;
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
        None => {
            // What was read is what was opened.
            catalog.unchanged(&files)?;
            Ok(Loaded { boxes, bytes_read: bytes_read.into_inner(), bytes })
        }
    }
}

/// Sorts pieces of memory, as starts and lengths, into rounds: those of a round have no byte in common, and can be lent out at the same
/// time. Views of one array may interleave, and then each has a round of its own.
pub fn rounds(pieces: &[(usize, usize)]) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..pieces.len()).collect();
    order.sort_by_key(|&i| pieces[i]);
    let mut rounds: Vec<(usize, Vec<usize>)> = Vec::new();
    for i in order {
        let (start, len) = pieces[i];
        let end = start.saturating_add(len);
        match rounds.iter_mut().find(|(free, _)| *free <= start || len == 0) {
            Some((free, round)) => {
                *free = end.max(*free);
                round.push(i);
            }
            None => rounds.push((end, vec![i])),
        }
    }
    rounds.into_iter().map(|(_, round)| round).collect()
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

/// Reads boxes of files into memory; its buffers are used again and again.
#[derive(Debug)]
pub struct BoxReader {
    scratch: Vec<u8>,
    /// Numbers before and after they are rounded.
    raw: Vec<u8>,
    rounded: Vec<u8>,
}

impl Default for BoxReader {
    fn default() -> Self {
        Self::new(4 << 20)
    }
}

impl BoxReader {
    pub fn new(scratch_bytes: u64) -> Self {
        Self { scratch: vec![0; scratch_bytes as usize], raw: vec![], rounded: vec![] }
    }

    /// Copies what a stored box has of a wanted one into its memory; real numbers are rounded where types differ. Returns the bytes read.
    pub fn read(
        &mut self,
        (file, path): (&File, &Path),
        (stored, element): (&StoredBox, Element),
        want: &mut Want<'_>,
    ) -> Result<u64, CheckpointError> {
        let Some(common) = stored.region.intersect(&want.region) else { return Ok(0) };
        if element == want.element {
            let copy = Copy::new(stored, &want.region, &want.strides, &common, element.bytes());
            return copy.read(file, path, want.memory, &mut self.scratch);
        }
        // Rounded a slab at a time.
        let (mut slabs, mut read) = (Vec::new(), 0);
        let (from, to) = (element.bytes(), want.element.bytes());
        cut(&common, (self.scratch.len() as u64 / from).max(1), &mut |slab| slabs.push(slab));
        for slab in slabs {
            let lens = || slab.spans().iter().map(|s| s.len());
            self.raw.resize((slab.volume() * from) as usize, 0);
            let copy = Copy::new(stored, &slab, &row_major(lens(), from), &slab, from);
            read += copy.read(file, path, &mut self.raw, &mut self.scratch)?;
            self.rounded.resize((slab.volume() * to) as usize, 0);
            cast(element, &self.raw, want.element, &mut self.rounded);
            let held = StoredBox { region: slab.clone(), file: 0, offset: 0, strides: row_major(lens(), to) };
            Copy::new(&held, &want.region, &want.strides, &slab, to).scatter(&self.rounded, want.memory);
        }
        Ok(read)
    }
}

/// Reads boxes of a checkpoint.
pub(crate) struct Reader<'a> {
    catalog: &'a Catalog,
    boxes: BoxReader,
    open: HashMap<u32, (Arc<File>, PathBuf)>,
}

impl<'a> Reader<'a> {
    pub fn new(catalog: &'a Catalog, scratch_bytes: u64) -> Self {
        Self { catalog, boxes: BoxReader::new(scratch_bytes), open: HashMap::new() }
    }

    pub fn catalog(&self) -> &'a Catalog {
        self.catalog
    }

    /// A number without dims that counts something; None where it does not.
    pub fn count(&mut self, name: &str) -> Result<Option<u64>, CheckpointError> {
        let tensor = &self.catalog.tensors[name];
        let mut bytes = [0; 16];
        let width = tensor.element.bytes() as usize;
        let memory = &mut bytes[..width];
        let (element, region) = (tensor.element, Region::whole(&tensor.shape));
        self.fill(&mut Want { tensor: name.into(), region, element, strides: vec![], memory })?;
        let mut number = [0; 8];
        let value = match element {
            Element::I64 | Element::U64 => {
                i64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as f64
            }
            Element::I32 => f64::from(i32::from_le_bytes(bytes[..4].try_into().expect("four bytes"))),
            real if real.is_real() => {
                cast(real, &bytes[..width], Element::F64, &mut number);
                f64::from_le_bytes(number)
            }
            _ => return Ok(None),
        };
        let counts = value >= 0.0 && value.fract() == 0.0 && value < 2f64.powi(53);
        Ok(counts.then_some(value as u64))
    }

    /// Fills memory with what is wanted; [`check`] has passed.
    pub fn fill(&mut self, want: &mut Want<'_>) -> Result<u64, CheckpointError> {
        let tensor = &self.catalog.tensors[&want.tensor];
        if let Some(value) = &tensor.value {
            match tensor.element == want.element {
                true => want.memory[..value.len()].copy_from_slice(value),
                false => cast(tensor.element, value, want.element, want.memory),
            }
            return Ok(0);
        }
        let mut read = 0;
        for stored in &tensor.boxes {
            if !stored.region.overlaps(&want.region) {
                continue;
            }
            let (file, path) = self.source(stored.file)?;
            read += self.boxes.read((&file, &path), (stored, tensor.element), want)?;
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
