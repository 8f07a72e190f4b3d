//! What two checkpoints do not have in common: names, shapes, types, and numbers bit by bit.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossmesh_core::region::Region;

use crate::catalog::{Catalog, row_major};
use crate::convert::{Limits, cut};
use crate::error::CheckpointError;
use crate::load::{Reader, Want};

/// A tensor that is not the same.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Difference {
    pub tensor: String,
    pub what: What,
}

/// In what it differs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum What {
    /// Only the first has it, or only the second.
    OnlyIn(u8),
    /// Type and shape of both.
    Kind(String, String),
    /// So many elements, and where the first of them is.
    Elements { count: u64, first: Vec<u64> },
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: ", self.tensor)?;
        match &self.what {
            What::OnlyIn(1) => write!(f, "only in the first"),
            What::OnlyIn(_) => write!(f, "only in the second"),
            What::Kind(a, b) => write!(f, "{a} in the first, {b} in the second"),
            What::Elements { count, first } => write!(f, "{count} elements differ, the first at {first:?}"),
        }
    }
}

/// Everything in which two checkpoints differ, by name. Numbers are compared as bits.
pub fn diff(
    one: &Catalog,
    two: &Catalog,
    max_memory: u64,
    threads: usize,
) -> Result<Vec<Difference>, CheckpointError> {
    one.checked()?;
    two.checked()?;
    let limits = Limits::new(max_memory, threads)?;
    for catalog in [one, two] {
        catalog.verify(&catalog.all_files(), limits.threads)?;
    }
    let mut found = Vec::new();
    let mut both = Vec::new();
    for (name, a) in &one.tensors {
        let what = match two.tensors.get(name) {
            None => What::OnlyIn(1),
            Some(b) if (a.element, &a.shape) != (b.element, &b.shape) => {
                What::Kind(format!("{}{:?}", a.element, a.shape), format!("{}{:?}", b.element, b.shape))
            }
            Some(_) => {
                both.push(name.as_str());
                continue;
            }
        };
        found.push(Difference { tensor: name.clone(), what });
    }
    let missing = two.tensors.keys().filter(|name| !one.tensors.contains_key(*name));
    found.extend(missing.map(|name| Difference { tensor: name.clone(), what: What::OnlyIn(2) }));
    let (found, failure) = (Mutex::new(found), Mutex::new(None));
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..limits.threads {
            scope.spawn(|| {
                let mut sides = [one, two].map(|catalog| Reader::new(catalog, limits.buffer_bytes / 2));
                while let Some(name) = both.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match elements(&mut sides, name, limits.buffer_bytes / 2) {
                        Ok(None) => {}
                        Ok(Some(what)) => {
                            let difference = Difference { tensor: name.to_string(), what };
                            found.lock().expect("nobody panics with it").push(difference);
                        }
                        Err(error) => {
                            failure.lock().expect("nobody panics with it").get_or_insert(error);
                            next.store(both.len(), Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    if let Some(error) = failure.into_inner().expect("nobody panics with it") {
        return Err(error);
    }
    let mut found = found.into_inner().expect("nobody panics with it");
    found.sort();
    Ok(found)
}

fn elements(
    sides: &mut [Reader<'_>; 2],
    name: &str,
    buffer_bytes: u64,
) -> Result<Option<What>, CheckpointError> {
    let tensor = &sides[0].catalog().tensors[name];
    let (element, whole) = (tensor.element, Region::whole(&tensor.shape));
    let width = element.bytes();
    let mut slabs = Vec::new();
    cut(&whole, (buffer_bytes / width).max(1), &mut |slab| slabs.push(slab));
    let mut buffers = [vec![], vec![]];
    let (mut count, mut first) = (0, None);
    for slab in slabs {
        for (side, buffer) in sides.iter_mut().zip(&mut buffers) {
            buffer.resize((slab.volume() * width) as usize, 0);
            let strides = row_major(slab.spans().iter().map(|s| s.len()), width);
            let tensor = name.to_string();
            side.fill(&mut Want { tensor, region: slab.clone(), element, strides, memory: buffer })?;
        }
        let [a, b] = &buffers;
        if a == b {
            continue;
        }
        for (i, (a, b)) in a.chunks(width as usize).zip(b.chunks(width as usize)).enumerate() {
            if a != b {
                count += 1;
                first.get_or_insert_with(|| index(&slab, i as u64));
            }
        }
    }
    Ok(first.map(|first| What::Elements { count, first }))
}

/// The place in the tensor of an element of a box.
fn index(slab: &Region, mut flat: u64) -> Vec<u64> {
    let mut index: Vec<u64> = slab
        .spans()
        .iter()
        .rev()
        .map(|span| {
            let x = span.start + flat % span.len();
            flat /= span.len();
            x
        })
        .collect();
    index.reverse();
    index
}
