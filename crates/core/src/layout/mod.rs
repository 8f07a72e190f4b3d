//! Layouts: which elements of a tensor each device of a mesh holds.
//!
//! One notation everywhere. Splitting a dim of 8 over an axis of 3 gives pieces of 3, 3 and 2, by torch.chunk's rule:
//!
//! ```text
//! f32[8]@A{tp:3}(tp)      dim 0   0 1 2 | 3 4 5 | 6 7
//!                         rank      0       1      2
//! ```
//!
//! ```
//! use crossmesh_core::layout::Layout;
//! let layout: Layout = "f32[8,6]@A{dp:2,tp:4}(tp,_)".parse().unwrap();
//! assert_eq!(layout.shard_at(&[0, 1])[0].to_string(), "[2:4, 0:6]");
//! assert_eq!(layout.to_string(), "f32[8,6]@A{dp:2,tp:4}(tp,_)");
//! ```
//!
//! [`notation`] has the grammar, [`interop`] what is read of Alpa, torch and JAX.

use std::fmt;
use std::str::FromStr;

pub mod interop;
pub mod notation;
mod notation_error;
mod split;

pub use notation::NotationError;
pub use split::{Rule, Split};

use crate::dtype::DType;
use crate::mesh::Mesh;
use crate::region::{Region, Span};

/// The most dims a tensor may have.
pub const MAX_DIMS: usize = 8;

/// How the parts of a partial sum combine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    Sum,
    Max,
    Min,
}

impl ReduceOp {
    pub const ALL: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min];

    pub fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Max => "max",
            ReduceOp::Min => "min",
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The axes over which devices hold parts that still have to be combined.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Partial {
    pub op: ReduceOp,
    pub axes: Vec<usize>,
}

/// A tensor's dtype and shape, its mesh, and for every dim the axes that split it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Layout {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<u64>,
    pub(crate) mesh: Mesh,
    pub(crate) splits: Vec<Split>,
    pub(crate) partial: Option<Partial>,
}

impl Layout {
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// How each dim is split; as many as the shape has dims.
    pub fn splits(&self) -> &[Split] {
        &self.splits
    }

    pub fn partial(&self) -> Option<&Partial> {
        self.partial.as_ref()
    }

    /// Elements of the whole tensor; checked to fit when the layout was made.
    pub fn volume(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Bytes of the whole tensor, once.
    pub fn bytes(&self) -> u64 {
        self.volume() * self.dtype.bytes()
    }

    /// Into how many parts a dim is split.
    pub fn num_parts(&self, dim: usize) -> usize {
        self.splits[dim].axes.iter().map(|&a| self.mesh.axes[a].len as usize).product()
    }

    /// Which part of `dim` a device holds: its coordinates on the axes that split the dim, major first.
    pub fn part_at(&self, dim: usize, coord: &[u32]) -> usize {
        self.splits[dim]
            .axes
            .iter()
            .fold(0, |part, &a| part * self.mesh.axes[a].len as usize + coord[a] as usize)
    }

    /// The spans of every part of a dim, without the empty ones. One span a part, but for fused parts.
    pub fn part_spans(&self, dim: usize) -> Vec<Vec<Span>> {
        self.splits[dim].rule.spans(self.shape[dim], &self.axis_lens(dim))
    }

    fn axis_lens(&self, dim: usize) -> Vec<u32> {
        self.splits[dim].axes.iter().map(|&a| self.mesh.axes[a].len).collect()
    }

    /// The boxes that the device at `coord` holds: none for an empty shard, several for fused parts.
    pub fn shard_at(&self, coord: &[u32]) -> Vec<Region> {
        let spans_of = |dim: usize| {
            let rule = &self.splits[dim].rule;
            rule.spans_of(self.shape[dim], &self.axis_lens(dim), self.part_at(dim, coord))
        };
        let spans: Vec<Vec<Span>> = (0..self.shape.len()).map(spans_of).collect();
        let choices: Vec<&[Span]> = spans.iter().map(Vec::as_slice).collect();
        boxes(&choices)
    }

    /// How many different parts of a partial sum there are; 1 when the values are whole.
    pub fn num_contributions(&self) -> usize {
        self.partial.as_ref().map_or(1, |p| p.axes.iter().map(|&a| self.mesh.axes[a].len as usize).product())
    }

    /// Which part of the partial sum the device at `coord` holds.
    pub fn contribution_at(&self, coord: &[u32]) -> usize {
        self.partial.as_ref().map_or(0, |p| {
            p.axes.iter().fold(0, |part, &a| part * self.mesh.axes[a].len as usize + coord[a] as usize)
        })
    }
}

/// Every box that takes one span of each dim, row-major.
pub fn boxes(choices: &[&[Span]]) -> Vec<Region> {
    let mut out = vec![Vec::with_capacity(choices.len())];
    for spans in choices {
        out = out
            .iter()
            .flat_map(|prefix: &Vec<Span>| {
                spans.iter().map(move |span| {
                    let mut spans = prefix.clone();
                    spans.push(*span);
                    spans
                })
            })
            .collect();
    }
    out.into_iter().map(Region::new).collect()
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axis_names = |axes: &[usize]| {
            axes.iter().map(|&a| self.mesh.axes[a].name.as_str()).collect::<Vec<_>>().join("+")
        };
        let numbers = |v: &[u64], sep: &str| v.iter().map(u64::to_string).collect::<Vec<_>>().join(sep);
        write!(f, "{}[{}]@{}(", self.dtype, numbers(&self.shape, ","), self.mesh)?;
        for (dim, split) in self.splits.iter().enumerate() {
            f.write_str(if dim == 0 { "" } else { "," })?;
            match (&split.rule, split.axes.is_empty()) {
                (_, true) => f.write_str("_")?,
                (Rule::Chunk, _) => f.write_str(&axis_names(&split.axes))?,
                (Rule::Cuts(cuts), _) => write!(f, "{}[{}]", axis_names(&split.axes), numbers(cuts, ","))?,
                (Rule::Parts(parts), _) => {
                    write!(f, "{} of {}", axis_names(&split.axes), numbers(parts, "+"))?
                }
            }
        }
        if let Some(partial) = &self.partial {
            let gap = if self.splits.is_empty() { "" } else { " " };
            write!(f, "{gap}| {} {}", partial.op, axis_names(&partial.axes))?;
        }
        f.write_str(")")
    }
}

impl FromStr for Layout {
    type Err = NotationError;

    fn from_str(s: &str) -> Result<Self, NotationError> {
        let mut cursor = notation::Cursor::new(s);
        let layout = cursor.layout()?;
        cursor.finish()?;
        Ok(layout)
    }
}
