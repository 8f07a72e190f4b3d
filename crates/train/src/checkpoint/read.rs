//! Reading a box of a box: runs of bytes of a file into runs of a buffer.
//!
//! Runs that lie close together in the file are read at once, with what is between them; what is far apart is not read.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crossmesh_comm::view::View;
use crossmesh_core::dtype::DType;
use crossmesh_core::region::Region;

use super::error::CheckpointError;
use crate::kernels::scalar::Scalar;

/// Bytes between two runs that cost less to read than to ask again.
const GAP_BYTES: u64 = 16 << 10;
/// Read at once at most.
const READ_BYTES: u64 = 4 << 20;

/// A box's elements in a file, row-major.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    pub file: &'a File,
    pub path: &'a Path,
    /// Of its first byte in the file.
    pub start: u64,
    pub dtype: DType,
}

/// Copies what two boxes have in common from the one in the file to the one in memory. Returns the bytes read.
pub fn fetch<T: Scalar>(
    source: &Source<'_>,
    from: &Region,
    to: &Region,
    values: &mut [T],
) -> Result<u64, CheckpointError> {
    let Some(common) = from.intersect(to) else { return Ok(0) };
    let width = source.dtype.bytes();
    let file = View::of_box(source.start, from, &common, width).expect("a part of both");
    let memory = View::of_box(0, to, &common, 1).expect("a part of both");
    let (mut read, mut done) = (0, 0);
    let mut scratch = Scratch::default();
    while done < common.volume() {
        let end = common.volume().min(done + READ_BYTES / width);
        read += scratch.read(source, &file, done * width..end * width)?;
        let numbers = numbers::<T>(source.dtype, &scratch.stream);
        let mut next = 0;
        for (at, len) in memory.runs(done..end) {
            let (at, len) = (at as usize, len as usize);
            values[at..at + len].copy_from_slice(&numbers[next..next + len]);
            next += len;
        }
        done = end;
    }
    Ok(read)
}

/// Buffers that are used again.
#[derive(Debug, Default)]
struct Scratch {
    raw: Vec<u8>,
    /// The bytes of a part of a view, one behind the other.
    stream: Vec<u8>,
}

impl Scratch {
    fn read(
        &mut self,
        source: &Source<'_>,
        view: &View,
        part: std::ops::Range<u64>,
    ) -> Result<u64, CheckpointError> {
        self.stream.clear();
        let mut read = 0;
        let mut runs = view.runs(part).peekable();
        let mut group: Vec<(u64, u64)> = Vec::new();
        while let Some((at, len)) = runs.next() {
            group.push((at, len));
            let first = group[0].0;
            let joins = |&(next, len): &(u64, u64)| {
                next - group.last().map_or(0, |g| g.0 + g.1) <= GAP_BYTES && next + len - first <= READ_BYTES
            };
            if runs.peek().is_some_and(joins) {
                continue;
            }
            self.raw.resize((at + len - first) as usize, 0);
            source
                .file
                .read_exact_at(&mut self.raw, first)
                .map_err(CheckpointError::io("read", source.path))?;
            read += self.raw.len() as u64;
            for (at, len) in group.drain(..) {
                let start = (at - first) as usize;
                self.stream.extend_from_slice(&self.raw[start..start + len as usize]);
            }
        }
        Ok(read)
    }
}

/// Little-endian numbers; the same bits where the type is the same.
fn numbers<T: Scalar>(dtype: DType, bytes: &[u8]) -> Vec<T> {
    if dtype == T::DTYPE {
        let mut numbers = vec![T::ZERO; bytes.len() / size_of::<T>()];
        bytemuck::cast_slice_mut(&mut numbers).copy_from_slice(bytes);
        return numbers;
    }
    match dtype {
        DType::F64 => bytes.as_chunks().0.iter().map(|b| T::from_f64(f64::from_le_bytes(*b))).collect(),
        DType::F32 => {
            bytes.as_chunks().0.iter().map(|b| T::from_f64(f32::from_le_bytes(*b).into())).collect()
        }
        DType::F16 => {
            bytes.as_chunks().0.iter().map(|b| T::from_f64(half::f16::from_le_bytes(*b).into())).collect()
        }
        DType::Bf16 => {
            bytes.as_chunks().0.iter().map(|b| T::from_f64(half::bf16::from_le_bytes(*b).into())).collect()
        }
        other => unreachable!("{other} is no real number"),
    }
}
