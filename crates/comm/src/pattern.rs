//! What a run is checked with: every element has a value that tells where it belongs.
//!
//! Whole values are moved, never computed with, so an element's bits are a hash of its tensor and its global index,
//! cut to its width. Parts of a partial sum are whole numbers, small enough that their sum is exact in the dtype,
//! whatever the order they are added in.

use std::fmt;

use crossmesh_core::dtype::DType;
use crossmesh_core::id::Rank;
use crossmesh_core::layout::{Layout, ReduceOp};
use crossmesh_core::region::Region;
use crossmesh_core::reshard::{Placed, Plan};
use half::{bf16, f16};

use crate::buffer::{HeldBox, RankBuffers};
use crate::view::View;

/// What destinations hold before a run, so that what never arrives is noticed.
const POISON: u8 = 0xA5;
const BLOCK_BYTES: usize = 64 << 10;
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

/// Fills a rank's source shards.
pub fn fill_sources(plan: &Plan, rank: Rank, buffers: &RankBuffers) {
    let mut memory = buffers.src_memory.own().expect(NO_PROGRAM);
    for (tensor, reshard) in plan.problem.reshards.iter().enumerate() {
        let part = contribution(&reshard.src, rank);
        let values = Values { tensor: tensor as u64, layout: &reshard.src.layout };
        for held in &buffers.src[tensor] {
            let view = whole(held, &reshard.src.layout);
            let mut row = vec![];
            for_rows(&held.region, reshard.src.layout.shape(), |index, len, at| {
                row.clear();
                (index..index + len).for_each(|i| row.extend_from_slice(&values.part(i, part).bytes()));
                memory.unpack(&view, at * reshard.src.layout.dtype().bytes(), &row);
            });
        }
    }
}

/// Overwrites a rank's destination shards.
pub fn poison_destinations(plan: &Plan, buffers: &RankBuffers) {
    let block = vec![POISON; BLOCK_BYTES];
    let mut memory = buffers.dst_memory.own().expect(NO_PROGRAM);
    for (tensor, reshard) in plan.problem.reshards.iter().enumerate() {
        for held in &buffers.dst[tensor] {
            let view = whole(held, &reshard.dst.layout);
            let bytes = view.bytes();
            let mut at = 0;
            while at < bytes {
                let len = (bytes - at).min(BLOCK_BYTES as u64);
                memory.unpack(&view, at, &block[..len as usize]);
                at += len;
            }
        }
    }
}

/// Looks at every element of a rank's destination shards; the first wrong one, if there is one.
pub fn check_destinations(plan: &Plan, buffers: &RankBuffers) -> Option<Wrong> {
    let memory = buffers.dst_memory.own().expect(NO_PROGRAM);
    for (tensor, reshard) in plan.problem.reshards.iter().enumerate() {
        let values = Values { tensor: tensor as u64, layout: &reshard.src.layout };
        let element = reshard.src.layout.dtype().bytes();
        for held in &buffers.dst[tensor] {
            let view = whole(held, &reshard.dst.layout);
            let (mut found, mut expected, mut wrong) = (vec![], vec![], None);
            for_rows(&held.region, reshard.src.layout.shape(), |index, len, at| {
                found.clear();
                expected.clear();
                memory.pack(&view, at * element..(at + len) * element, &mut found);
                (index..index + len).for_each(|i| expected.extend_from_slice(&values.whole(i).bytes()));
                if found != expected && wrong.is_none() {
                    let (f, e) = (found.chunks(element as usize), expected.chunks(element as usize));
                    wrong = (index..).zip(f.zip(e)).find(|(_, (f, e))| f != e).map(|(i, (f, e))| Wrong {
                        tensor: format!("{tensor} {}", reshard.name),
                        element: coordinates(i, reshard.src.layout.shape()),
                        found: f.to_vec(),
                        expected: e.to_vec(),
                    });
                }
            });
            if wrong.is_some() {
                return wrong;
            }
        }
    }
    None
}

fn whole(held: &HeldBox, layout: &Layout) -> View {
    let view = View::of_box(held.base, &held.region, &held.region, layout.dtype().bytes());
    view.expect("a box contains itself")
}

fn contribution(placed: &Placed, rank: Rank) -> u64 {
    let position = placed.ranks.iter().position(|r| *r == rank).unwrap_or(0);
    placed.layout.contribution_at(&placed.layout.mesh().coord(position)) as u64
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
    tensor: u64,
    layout: &'a Layout,
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
        match self.layout.partial() {
            Some(_) => self.number(self.summand(index, part)),
            None => self.hash(index),
        }
    }

    /// What a destination has.
    fn whole(&self, index: u64) -> Bits {
        let Some(partial) = self.layout.partial() else { return self.hash(index) };
        let parts = (0..self.layout.num_contributions() as u64).map(|part| self.summand(index, part));
        let combined = match partial.op {
            ReduceOp::Sum if self.layout.dtype() == DType::Bool => parts.max(),
            ReduceOp::Sum => Some(parts.sum()),
            ReduceOp::Max => parts.max(),
            ReduceOp::Min => parts.min(),
        };
        self.number(combined.unwrap_or(0))
    }

    fn hash(&self, index: u64) -> Bits {
        let width = self.layout.dtype().bytes() as usize;
        Bits { bits: mix(index ^ (self.tensor << 44)) >> (64 - 8 * width), width }
    }

    /// A whole number, so small that all parts together are exact.
    fn summand(&self, index: u64, part: u64) -> u64 {
        let limit = match self.layout.dtype() {
            DType::Bool => 2,
            DType::F8E4M3 | DType::F8E5M2 | DType::I8 | DType::U8 => 120,
            DType::Bf16 => 256,
            DType::F16 => 2048,
            _ => 1 << 20,
        };
        let each = (limit / self.layout.num_contributions() as u64).max(2);
        if part >= limit { 0 } else { (mix(index ^ (self.tensor << 44) ^ (part << 56)) >> 40) % each }
    }

    fn number(&self, value: u64) -> Bits {
        let dtype = self.layout.dtype();
        let bits = match dtype {
            DType::F64 => (value as f64).to_bits(),
            DType::F32 => u64::from((value as f32).to_bits()),
            DType::Bf16 => u64::from(bf16::from_f32(value as f32).to_bits()),
            DType::F16 => u64::from(f16::from_f32(value as f32).to_bits()),
            _ => value,
        };
        Bits { bits, width: dtype.bytes() as usize }
    }
}

/// Fibonacci hashing: neighbours end up far apart, and the high bits are the good ones.
fn mix(x: u64) -> u64 {
    (x ^ (x >> 29)).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}
