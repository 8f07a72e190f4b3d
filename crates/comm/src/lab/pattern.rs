//! What a run is checked with: every element has a value that tells where it belongs.
//!
//! Whole values are moved, never computed with, so an element's bits are a hash of its tensor and its global index,
//! cut to its width. Parts of a partial sum are whole numbers, small enough that their sum is exact in the dtype,
//! whatever the order they are added in.

use std::fmt;
use std::io;

use crossmesh_core::dtype::DType;
use crossmesh_core::layout::ReduceOp;
use crossmesh_core::program::{Holds, Tensor, Tile};
use crossmesh_core::region::Region;
use half::{bf16, f16};

use crate::buffer::RankBuffers;
use crate::combine::{F8E4M3, F8E5M2};
use crate::memory::Place;

/// What destinations hold before a run, so that what never arrives is noticed.
const POISON: u8 = 0xA5;
const BLOCK_BYTES: usize = 64 << 10;
const DEVICE_BLOCK_BYTES: usize = 8 << 20;
/// Elements that are filled or looked at together: what is checked should not need memory of its own.
const MAX_ROW: usize = 8 << 10;

/// An element that is not what it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wrong {
    pub tensor: String,
    /// Its global coordinates.
    pub element: Vec<u64>,
    pub found: Vec<u8>,
    pub expected: Vec<u8>,
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tensor, element, found, expected } = self;
        write!(f, "element {element:?} of tensor {tensor} is {found:02x?}, expected {expected:02x?}")
    }
}

/// Patterns are for runs to start from and to end with.
const NO_PROGRAM: &str = "no program runs on the memory";

/// A tensor as a pattern knows it, and the number that its values are made of.
#[derive(Debug, Clone, Copy)]
pub struct Patterned<'a> {
    pub number: usize,
    pub tensor: &'a Tensor,
}

impl<'a> Patterned<'a> {
    fn values(self) -> Values<'a> {
        Values { number: self.number as u64, tensor: self.tensor }
    }

    /// Fills a box with a part of the tensor.
    pub fn fill(self, region: &Region, part: u32, place: &Place) -> io::Result<()> {
        let (values, element) = (self.values(), self.tensor.dtype.bytes());
        let mut memory = place.memory.own().expect(NO_PROGRAM);
        // Rows follow each other in the box's stream: several go at once where each call costs.
        let (block_bytes, total) = (block_bytes(place), place.bytes());
        let (mut rows, mut put) = (vec![], Ok(()));
        for_rows(region, &self.tensor.shape, |index, len, at| {
            (index..index + len)
                .for_each(|i| rows.extend_from_slice(&values.part(i, u64::from(part)).bytes()));
            let end = (at + len) * element;
            if rows.len() >= block_bytes || end == total {
                let start = end - rows.len() as u64;
                put = std::mem::replace(&mut put, Ok(()))
                    .and_then(|()| memory.unpack(&place.view, start, &rows));
                rows.clear();
            }
        });
        put
    }

    /// Looks at every element of a box; the first that is not whole and right, if there is one.
    pub fn check(self, region: &Region, place: &Place) -> io::Result<Option<Wrong>> {
        let (values, element) = (self.values(), self.tensor.dtype.bytes());
        let memory = place.memory.own().expect(NO_PROGRAM);
        let (block_bytes, total) = (block_bytes(place) as u64, place.bytes());
        let (mut block, mut ahead, mut expected, mut wrong) = (vec![], 0..0, vec![], None);
        let mut got = Ok(());
        for_rows(region, &self.tensor.shape, |index, len, at| {
            if got.is_err() {
                return;
            }
            let row = at * element..(at + len) * element;
            if row.end > ahead.end {
                ahead = row.start..(row.start + block_bytes).clamp(row.end, total);
                block.clear();
                got = memory.pack(&place.view, ahead.clone(), &mut block);
                if got.is_err() {
                    return;
                }
            }
            let found = &block[(row.start - ahead.start) as usize..(row.end - ahead.start) as usize];
            expected.clear();
            (index..index + len).for_each(|i| expected.extend_from_slice(&values.whole(i).bytes()));
            if found != expected && wrong.is_none() {
                let (f, e) = (found.chunks(element as usize), expected.chunks(element as usize));
                wrong = (index..).zip(f.zip(e)).find(|(_, (f, e))| f != e).map(|(i, (f, e))| Wrong {
                    tensor: format!("{} {}", self.number, self.tensor.name),
                    element: coordinates(i, &self.tensor.shape),
                    found: f.to_vec(),
                    expected: e.to_vec(),
                });
            }
        });
        got.map(|()| wrong)
    }
}

/// How much is filled or looked at in one call: a row, or on a device as many as make its calls worth while.
fn block_bytes(place: &Place) -> usize {
    if place.memory.gpu().is_some() { DEVICE_BLOCK_BYTES } else { 0 }
}

/// Overwrites a box, so that what never arrives is noticed.
pub fn poison(place: &Place) -> io::Result<()> {
    let block_bytes = block_bytes(place).max(BLOCK_BYTES);
    let block = vec![POISON; block_bytes];
    let mut memory = place.memory.own().expect(NO_PROGRAM);
    let mut at = 0;
    while at < place.bytes() {
        let len = (place.bytes() - at).min(block_bytes as u64);
        memory.unpack(&place.view, at, &block[..len as usize])?;
        at += len;
    }
    Ok(())
}

/// The tiles of a rank that hold something of their own, each with its pattern.
fn patterned(
    buffers: &RankBuffers,
    holds: impl Fn(Holds) -> bool,
) -> impl Iterator<Item = (Patterned<'_>, &Tile)> {
    let program = buffers.program();
    let of = |tile: &'_ Tile| Patterned {
        number: tile.tensor as usize,
        tensor: &program.whole().tensors[tile.tensor as usize],
    };
    program.tiles.iter().filter(move |tile| holds(tile.holds)).map(move |tile| (of(tile), tile))
}

/// Fills a rank's source shards.
pub fn fill_sources(buffers: &RankBuffers) -> io::Result<()> {
    for (pattern, tile) in patterned(buffers, |holds| matches!(holds, Holds::Source(_))) {
        let Holds::Source(part) = tile.holds else { continue };
        pattern.fill(&buffers.program().whole().boxes[tile.region], part, &buffers.whole(tile))?;
    }
    Ok(())
}

/// Overwrites a rank's destination shards.
pub fn poison_destinations(buffers: &RankBuffers) -> io::Result<()> {
    patterned(buffers, |holds| holds == Holds::Goal).try_for_each(|(_, tile)| poison(&buffers.whole(tile)))
}

/// Looks at every element of a rank's destination shards; the first wrong one, if there is one.
pub fn check_destinations(buffers: &RankBuffers) -> io::Result<Option<Wrong>> {
    let mut goals = patterned(buffers, |holds| holds == Holds::Goal);
    let wrong = goals.find_map(|(pattern, tile)| {
        pattern.check(&buffers.program().whole().boxes[tile.region], &buffers.whole(tile)).transpose()
    });
    wrong.transpose()
}

/// Calls with every row of a box, long ones in pieces: the first global index, the length, and the place in the box, in
/// elements.
fn for_rows(region: &Region, shape: &[u64], mut row: impl FnMut(u64, u64, u64)) {
    let spans = region.spans();
    let Some((last, outer)) = spans.split_last() else { return row(0, 1, 0) };
    let mut pieces = |index: u64, len: u64, at: u64| {
        (0..len).step_by(MAX_ROW).for_each(|k| row(index + k, (len - k).min(MAX_ROW as u64), at + k));
    };
    let rows: u64 = outer.iter().map(|s| s.len()).product();
    for r in 0..rows {
        let (mut left, mut index, mut stride) = (r, last.start, shape[shape.len() - 1]);
        for (span, len) in outer.iter().zip(shape).rev() {
            index += (span.start + left % span.len()) * stride;
            left /= span.len();
            stride *= len;
        }
        pieces(index, last.len(), r * last.len());
    }
}

fn coordinates(mut index: u64, shape: &[u64]) -> Vec<u64> {
    let mut out = vec![0; shape.len()];
    for (x, len) in out.iter_mut().zip(shape).rev() {
        *x = index % len;
        index /= len;
    }
    out
}

/// A tensor's values.
struct Values<'a> {
    number: u64,
    tensor: &'a Tensor,
}

/// An element's bytes, little-endian.
struct Bits {
    bits: u64,
    width: usize,
}

impl Bits {
    fn bytes(&self) -> ElementBytes {
        ElementBytes { bytes: self.bits.to_le_bytes(), width: self.width }
    }
}

struct ElementBytes {
    bytes: [u8; 8],
    width: usize,
}

impl std::ops::Deref for ElementBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.width]
    }
}

impl Values<'_> {
    /// What the holder of this part of the sum has; whole values have one part.
    fn part(&self, index: u64, part: u64) -> Bits {
        match self.tensor.partial {
            Some(_) => self.number(self.summand(index, part)),
            None => self.hash(index),
        }
    }

    /// What a destination has.
    fn whole(&self, index: u64) -> Bits {
        let Some(partial) = self.tensor.partial else { return self.hash(index) };
        let parts = (0..u64::from(self.parts())).map(|part| self.summand(index, part));
        let combined = match partial.op {
            ReduceOp::Sum if self.tensor.dtype == DType::Bool => parts.max(),
            ReduceOp::Sum => Some(parts.sum()),
            ReduceOp::Max => parts.max(),
            ReduceOp::Min => parts.min(),
        };
        self.number(combined.unwrap_or(0))
    }

    fn parts(&self) -> u32 {
        self.tensor.partial.map_or(1, |p| p.count)
    }

    fn hash(&self, index: u64) -> Bits {
        let width = self.tensor.dtype.bytes() as usize;
        Bits { bits: mix(index ^ (self.number << 44)) >> (64 - 8 * width), width }
    }

    /// A whole number, so small that all parts together are exact.
    fn summand(&self, index: u64, part: u64) -> u64 {
        let limit = match self.tensor.dtype {
            DType::Bool => 2,
            DType::F8E4M3 => 16,
            DType::F8E5M2 => 8,
            DType::I8 | DType::U8 => 120,
            DType::Bf16 => 256,
            DType::F16 => 2048,
            _ => 1 << 20,
        };
        let each = (limit / u64::from(self.parts())).max(2);
        if part >= limit { 0 } else { (mix(index ^ (self.number << 44) ^ (part << 56)) >> 40) % each }
    }

    fn number(&self, value: u64) -> Bits {
        let dtype = self.tensor.dtype;
        let bits = match dtype {
            DType::F64 => (value as f64).to_bits(),
            DType::F32 => u64::from((value as f32).to_bits()),
            DType::Bf16 => u64::from(bf16::from_f32(value as f32).to_bits()),
            DType::F16 => u64::from(f16::from_f32(value as f32).to_bits()),
            DType::F8E4M3 => u64::from(F8E4M3::from_f32(value as f32).0),
            DType::F8E5M2 => u64::from(F8E5M2::from_f32(value as f32).0),
            _ => value,
        };
        Bits { bits, width: dtype.bytes() as usize }
    }
}

/// Fibonacci hashing: neighbours end up far apart, and the high bits are the good ones.
fn mix(x: u64) -> u64 {
    (x ^ (x >> 29)).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}
