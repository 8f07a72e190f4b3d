//! Copying a box between strided arrays: from a file into memory.
//!
//! The dims of what two boxes have in common, each with its step in the file and its step in memory, the largest step in
//! the file first. Steps that follow each other merge; what is then one run is read straight to where it goes. What lies
//! close together is read at once, with what is between, and sorted out in memory; what is far apart is read apart.
//!
//! ```text
//! file     . a a . . b b . . c c .      read once, from the first a to the last c
//! memory   a a b b c c                  three runs of two
//! ```

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crossmesh_core::region::Region;

use crate::catalog::StoredBox;
use crate::error::CheckpointError;

/// Bytes between two runs that cost less to read than to ask again: as many as the runs have, so that no more than twice of what is needed is
/// read, but these always, and never more than those.
const GAP_BYTES: std::ops::RangeInclusive<u64> = 512..=16 << 10;

/// A dim: how often, and how far apart in the file and in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Step {
    count: u64,
    from: u64,
    to: u64,
}

/// A box to be copied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copy {
    /// Of the first byte in the file, and in memory.
    from: u64,
    to: u64,
    /// Largest step in the file first.
    steps: Vec<Step>,
    /// Bytes that lie together in both.
    run: u64,
}

impl Copy {
    /// What `stored` has of `region`, into an array whose box is `held` and whose steps are `strides`, in bytes.
    pub fn new(stored: &StoredBox, held: &Region, strides: &[u64], region: &Region, width: u64) -> Self {
        let mut copy = Self { from: stored.offset, to: 0, steps: vec![], run: width };
        for (dim, span) in region.spans().iter().enumerate() {
            let (from, to) = (stored.strides[dim], strides[dim]);
            copy.from += (span.start - stored.region.spans()[dim].start) * from;
            copy.to += (span.start - held.spans()[dim].start) * to;
            if span.len() > 1 {
                copy.steps.push(Step { count: span.len(), from, to });
            }
        }
        copy.steps.sort_by_key(|s| std::cmp::Reverse((s.from, s.to)));
        copy.merge();
        copy
    }

    /// Joins dims that follow each other in both, and the last ones with the run.
    fn merge(&mut self) {
        let mut merged: Vec<Step> = Vec::with_capacity(self.steps.len());
        for step in self.steps.drain(..).rev() {
            match merged.last_mut() {
                None if (step.from, step.to) == (self.run, self.run) => self.run *= step.count,
                Some(inner) if (step.from, step.to) == (inner.from * inner.count, inner.to * inner.count) => {
                    inner.count *= step.count;
                }
                _ => merged.push(step),
            }
        }
        merged.reverse();
        self.steps = merged;
    }

    /// From its first byte in the file to its last.
    fn extent(&self, steps: &[Step]) -> u64 {
        self.run + steps.iter().map(|s| (s.count - 1) * s.from).sum::<u64>()
    }

    pub fn file_range(&self) -> std::ops::Range<u64> {
        self.from..self.from + self.extent(&self.steps)
    }

    /// Bytes that are copied.
    pub fn bytes(&self) -> u64 {
        self.run * self.steps.iter().map(|s| s.count).product::<u64>()
    }

    /// How many bytes a copy reads, with a scratch buffer of so many.
    pub fn bytes_read(&self, scratch_bytes: u64) -> u64 {
        let mut read = 0;
        self.plan(&self.steps, 0, 0, scratch_bytes, &mut |_, extent, _, _| {
            read += extent;
            Ok::<_, ()>(())
        })
        .expect("counting does not fail");
        read
    }

    /// Cuts the copy into reads: where each starts, how long it is, where it goes, and what is to be sorted out in memory.
    fn plan<E>(
        &self,
        steps: &[Step],
        from: u64,
        to: u64,
        scratch_bytes: u64,
        read: &mut impl FnMut(u64, u64, u64, &[Step]) -> Result<(), E>,
    ) -> Result<(), E> {
        let Some((&outer, inner)) = steps.split_first() else { return read(from, self.run, to, &[]) };
        let extent = self.extent(inner);
        // Rows that are close together are read together, as many as fit.
        let gap = extent.clamp(*GAP_BYTES.start(), *GAP_BYTES.end());
        let close = outer.from <= extent.saturating_add(gap) && extent <= scratch_bytes;
        let at_once = match (close, outer.from) {
            (true, 0) => outer.count,
            (true, step) => (1 + (scratch_bytes - extent) / step).min(outer.count),
            (false, _) => 1,
        };
        let mut done = 0;
        while done < outer.count {
            let count = at_once.min(outer.count - done);
            let (from, to) = (from + done * outer.from, to + done * outer.to);
            if count > 1 {
                let mut block = Vec::with_capacity(steps.len());
                block.push(Step { count, ..outer });
                block.extend_from_slice(inner);
                read(from, (count - 1) * outer.from + extent, to, &block)?;
            } else {
                self.plan(inner, from, to, scratch_bytes, read)?;
            }
            done += count;
        }
        Ok(())
    }

    /// Every run, in the order of the file: where it is in the file and in memory, and how long it is.
    pub fn each_run<E>(&self, run: &mut impl FnMut(u64, u64, u64) -> Result<(), E>) -> Result<(), E> {
        let mut index = vec![0; self.steps.len()];
        loop {
            let sum = |step: fn(&Step) -> u64| -> u64 {
                index.iter().zip(&self.steps).map(|(i, s)| i * step(s)).sum()
            };
            run(self.from + sum(|s| s.from), self.to + sum(|s| s.to), self.run)?;
            let Some(dim) = (0..index.len()).rev().find(|&d| index[d] + 1 < self.steps[d].count) else {
                return Ok(());
            };
            index[dim] += 1;
            index[dim + 1..].fill(0);
        }
    }

    /// The same where the bytes are in memory already.
    pub fn scatter(&self, from: &[u8], memory: &mut [u8]) {
        scatter(&from[self.from as usize..], memory, &self.steps, self.to as usize, self.run as usize);
    }

    /// Reads the box into memory. `scratch` is used where runs have to be sorted out.
    pub fn read(
        &self,
        file: &File,
        path: &Path,
        memory: &mut [u8],
        scratch: &mut [u8],
    ) -> Result<u64, CheckpointError> {
        let mut bytes_read = 0;
        self.plan(&self.steps, self.from, self.to, scratch.len() as u64, &mut |from, extent, to, steps| {
            bytes_read += extent;
            if steps.is_empty() {
                return read_exact(file, path, &mut memory[to as usize..(to + extent) as usize], from);
            }
            let scratch = &mut scratch[..extent as usize];
            read_exact(file, path, scratch, from)?;
            scatter(scratch, memory, steps, to as usize, self.run as usize);
            Ok(())
        })?;
        Ok(bytes_read)
    }
}

pub(crate) fn read_exact(file: &File, path: &Path, bytes: &mut [u8], at: u64) -> Result<(), CheckpointError> {
    file.read_exact_at(bytes, at).map_err(|cause| match cause.kind() {
        std::io::ErrorKind::UnexpectedEof => {
            CheckpointError::Shrank { path: path.to_path_buf(), at, wanted: bytes.len() as u64 }
        }
        _ => CheckpointError::Io { what: "read", path: path.to_path_buf(), cause },
    })
}

/// Runs of what was read to where they belong.
fn scatter(from: &[u8], to: &mut [u8], steps: &[Step], base: usize, run: usize) {
    match (steps, run) {
        ([], _) => to[base..base + run].copy_from_slice(&from[..run]),
        // Elements of a transpose: the widths that elements have.
        ([step], 1) => elements::<1>(from, to, *step, base),
        ([step], 2) => elements::<2>(from, to, *step, base),
        ([step], 4) => elements::<4>(from, to, *step, base),
        ([step], 8) => elements::<8>(from, to, *step, base),
        ([step, inner @ ..], _) => {
            for i in 0..step.count as usize {
                let (at, base) = (i * step.from as usize, base + i * step.to as usize);
                scatter(&from[at..], to, inner, base, run);
            }
        }
    }
}

fn elements<const N: usize>(from: &[u8], to: &mut [u8], step: Step, base: usize) {
    for i in 0..step.count as usize {
        let (at, base) = (i * step.from as usize, base + i * step.to as usize);
        let element: [u8; N] = from[at..at + N].try_into().expect("N bytes");
        to[base..base + N].copy_from_slice(&element);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::row_major;
    use crossmesh_core::region::Span;
    use crossmesh_testkit::seed::Seed;
    use std::io::Write;

    #[test]
    fn copies_what_one_element_at_a_time_would() {
        let mut draws = Seed(7);
        for round in 0..crossmesh_testkit::sweep::count(400) {
            let dims = 1 + draws.below(4);
            let width = draws.pick(&[1u64, 2, 4, 8, 16]);
            let lens: Vec<u64> = (0..dims).map(|_| 1 + draws.below(7) as u64).collect();
            // A permuted array with room between, at an offset.
            let mut order: Vec<usize> = (0..dims).collect();
            (1..dims).for_each(|i| order.swap(i, draws.below(i + 1)));
            let (mut strides, mut next) = (vec![0; dims], width);
            for &dim in &order {
                strides[dim] = next;
                next = next * lens[dim] + width * draws.below(3) as u64;
            }
            let offset = draws.below(20) as u64;
            let bytes: Vec<u8> = (0..offset + next).map(|_| draws.draw() as u8).collect();
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&bytes).unwrap();
            let spans = |draws: &mut Seed, outer: &[u64]| -> Vec<Span> {
                let span = |&n: &u64| {
                    let (a, b) = (draws.below(n as usize) as u64, draws.below(n as usize) as u64);
                    Span::new(a.min(b), a.max(b) + 1)
                };
                outer.iter().map(span).collect()
            };
            let held = Region::whole(&lens);
            let region = Region::new(spans(&mut draws, &lens));
            let stored = StoredBox { region: held, file: 0, offset, strides: strides.clone() };
            let to_strides = row_major(region.spans().iter().map(|s| s.len()), width);
            let copy = Copy::new(&stored, &region, &to_strides, &region, width);
            let mut memory = vec![0; (region.volume() * width) as usize];
            let mut scratch = vec![0; draws.pick(&[16usize, 64, 4096])];
            copy.read(&file, Path::new("x"), &mut memory, &mut scratch).unwrap();
            let mut index = vec![0u64; dims];
            for (i, element) in memory.chunks(width as usize).enumerate() {
                let mut rest = i as u64;
                for dim in (0..dims).rev() {
                    let span = region.spans()[dim];
                    index[dim] = span.start + rest % span.len();
                    rest /= span.len();
                }
                let at = (offset + index.iter().zip(&strides).map(|(x, s)| x * s).sum::<u64>()) as usize;
                assert_eq!(element, &bytes[at..at + width as usize], "round {round}");
            }
        }
    }
}
