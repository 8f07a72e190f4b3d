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

/// Reads; its buffers are used again and again.
#[derive(Debug, Default)]
pub struct Reader {
    /// Runs of a file with what is between them.
    raw: Vec<u8>,
    /// The bytes of a part of a view, one behind the other.
    stream: Vec<u8>,
}

impl Reader {
    /// Copies what two boxes have in common from the one in the file to the one in memory. Returns the bytes read.
    pub fn fetch<T: Scalar>(
        &mut self,
        source: &Source<'_>,
        from: &Region,
        to: &Region,
        values: &mut [T],
    ) -> Result<u64, CheckpointError> {
        let Some(common) = from.intersect(to) else { return Ok(0) };
        let width = source.dtype.bytes();
        let file = View::of_box(source.start, from, &common, width).expect("a part of both");
        let memory = View::of_box(0, to, &common, 1).expect("a part of both");
        if source.dtype == T::DTYPE && file.outer().is_empty() && memory.outer().is_empty() {
            let at = memory.base() as usize;
            let target = &mut values[at..at + common.volume() as usize];
            read_at(source, bytemuck::cast_slice_mut(target), file.base())?;
            return Ok(file.bytes());
        }
        let (mut read, mut done) = (0, 0);
        while done < common.volume() {
            let end = common.volume().min(done + READ_BYTES / width);
            read += self.read(source, &file, done * width..end * width)?;
            let mut next = 0;
            for (at, len) in memory.runs(done..end) {
                let (at, bytes) = (at as usize, (len * width) as usize);
                put(source.dtype, &self.stream[next..next + bytes], &mut values[at..at + len as usize]);
                next += bytes;
            }
            done = end;
        }
        Ok(read)
    }

    /// Reads a part of a view into the stream.
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
            let joins = |&(next, next_len): &(u64, u64)| {
                next - (at + len) <= GAP_BYTES && next + next_len - first <= READ_BYTES
            };
            if runs.peek().is_some_and(joins) {
                continue;
            }
            self.raw.resize((at + len - first) as usize, 0);
            read_at(source, &mut self.raw, first)?;
            read += self.raw.len() as u64;
            for (at, len) in group.drain(..) {
                let start = (at - first) as usize;
                self.stream.extend_from_slice(&self.raw[start..start + len as usize]);
            }
        }
        Ok(read)
    }
}

fn read_at(source: &Source<'_>, bytes: &mut [u8], at: u64) -> Result<(), CheckpointError> {
    source.file.read_exact_at(bytes, at).map_err(CheckpointError::io("read", source.path))
}

/// Little-endian numbers; the same bits where the type is the same.
fn put<T: Scalar>(dtype: DType, bytes: &[u8], out: &mut [T]) {
    fn each<T: Scalar, const N: usize>(bytes: &[u8], out: &mut [T], number: impl Fn([u8; N]) -> f64) {
        out.iter_mut().zip(bytes.as_chunks().0).for_each(|(out, b)| *out = T::from_f64(number(*b)));
    }
    match dtype {
        same if same == T::DTYPE => bytemuck::cast_slice_mut(out).copy_from_slice(bytes),
        DType::F64 => each(bytes, out, f64::from_le_bytes),
        DType::F32 => each(bytes, out, |b| f32::from_le_bytes(b).into()),
        DType::F16 => each(bytes, out, |b| half::f16::from_le_bytes(b).into()),
        DType::Bf16 => each(bytes, out, |b| half::bf16::from_le_bytes(b).into()),
        other => unreachable!("{other} is no real number"),
    }
}
