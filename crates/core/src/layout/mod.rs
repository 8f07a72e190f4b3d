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
//! Where no split says who holds what, boxes do, device by device ([`held`]):
//!
//! ```
//! # use crossmesh_core::layout::Layout;
//! let layout: Layout = "f32[8,6]@A{x:2}{0: [0:4, 0:6]; 1: [4:8, 0:3] [4:8, 3:6]}".parse().unwrap();
//! assert_eq!(layout.held_at(&[1])[1].offset_elements, 12);
//! ```
//!
//! [`notation`] has the grammar, [`interop`] what is read of Alpa, torch and JAX.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

mod box_notation;
mod by_axes;
pub mod held;
pub mod interop;
mod memory;
pub mod notation;
mod notation_error;
mod split;

pub use by_axes::{ByAxes, NoCounterpart};
pub use held::{BoxError, BoxFault, BoxTable, HeldBox, MAX_BOXES};
pub(crate) use memory::share_a_place;
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

/// A tensor's dtype and shape, its mesh, and who holds what of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Layout {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<u64>,
    pub(crate) mesh: Mesh,
    pub(crate) holding: Holding,
    pub(crate) partial: Option<Partial>,
}

/// The two ways to say who holds what.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Holding {
    /// For every dim, the axes that split it.
    Splits(Vec<Split>),
    /// For every device, its boxes.
    Boxes(Arc<BoxTable>),
}

impl Layout {
    /// A layout that lists the boxes of every position of the mesh, row-major; they may come in any order.
    pub fn of_boxes(
        dtype: DType,
        shape: Vec<u64>,
        mesh: Mesh,
        positions: Vec<Vec<HeldBox>>,
    ) -> Result<Self, BoxError> {
        let fits = shape.iter().try_fold(dtype.bytes(), |bytes, &len| bytes.checked_mul(len.max(1)));
        if fits.is_none() || shape.len() > MAX_DIMS {
            return Err(BoxError::TensorTooLarge);
        }
        let table = BoxTable::new(&mesh, &shape, dtype.bytes(), positions)?;
        Ok(Self { dtype, shape, mesh, holding: Holding::Boxes(Arc::new(table)), partial: None })
    }

    /// The same layout, every device's boxes listed.
    pub fn to_boxes(&self) -> Result<Self, BoxError> {
        let coord = |position| self.mesh.coord(position);
        let positions = 0..self.mesh.len();
        let count = positions.clone().map(|p| self.num_boxes_at(&coord(p))).fold(0, u64::saturating_add);
        if count > MAX_BOXES {
            return Err(BoxError::TooManyBoxes);
        }
        let positions = positions.map(|p| self.held_at(&coord(p))).collect();
        let boxes = Self::of_boxes(self.dtype, self.shape.clone(), self.mesh.clone(), positions)?;
        Ok(Self { partial: self.partial.clone(), ..boxes })
    }

    /// The same layout on another mesh with the same axes.
    pub(crate) fn on_mesh(self, mesh: Mesh) -> Self {
        assert_eq!(self.mesh.axes, mesh.axes, "a layout goes with its axes");
        Self { mesh, ..self }
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The splits, where the layout is said by axes.
    pub fn by_axes(&self) -> Option<ByAxes<'_>> {
        match &self.holding {
            Holding::Splits(splits) => Some(ByAxes { layout: self, splits }),
            Holding::Boxes(_) => None,
        }
    }

    /// The axes that chunk every dim, major first: all that torch and JAX can say about who holds what.
    pub fn chunking_axes(&self) -> Result<Vec<&[usize]>, NoCounterpart> {
        let by_axes = self.by_axes().ok_or_else(|| NoCounterpart::Boxes { summary: self.summary() })?;
        (0..self.shape.len()).map(|dim| by_axes.chunking_axes(dim)).collect()
    }

    /// The boxes of every position, where the layout is said by boxes.
    pub fn by_boxes(&self) -> Option<&BoxTable> {
        match &self.holding {
            Holding::Splits(_) => None,
            Holding::Boxes(table) => Some(table),
        }
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

    /// The boxes that the device at `coord` holds, in the order of its memory: none for an empty shard, several for fused
    /// parts or where they are listed.
    pub fn shard_at(&self, coord: &[u32]) -> Vec<Region> {
        match &self.holding {
            Holding::Splits(splits) => ByAxes { layout: self, splits }.shard_at(coord),
            Holding::Boxes(table) => {
                table.boxes(self.mesh.position(coord)).iter().map(|held| held.region.clone()).collect()
            }
        }
    }

    /// The boxes that the device at `coord` holds and where each lies in the memory of its shard, by rising offset. None
    /// is empty, no two share a place, and offsets are in elements. Shards of splits are packed: box behind box, row-major
    /// each, in the order of [`Layout::shard_at`]. A shard's memory has [`Layout::shard_elements`].
    pub fn held_at(&self, coord: &[u32]) -> Vec<HeldBox> {
        match &self.holding {
            Holding::Splits(splits) => packed(ByAxes { layout: self, splits }.shard_at(coord)),
            Holding::Boxes(table) => table.boxes(self.mesh.position(coord)).to_vec(),
        }
    }

    /// How many elements the memory of a device's shard has room for: up to the end of its last box, gaps included.
    pub fn shard_elements(&self, coord: &[u32]) -> u64 {
        match &self.holding {
            Holding::Splits(splits) => ByAxes { layout: self, splits }.elements_at(coord),
            Holding::Boxes(table) => end_of(table.boxes(self.mesh.position(coord))),
        }
    }

    fn num_boxes_at(&self, coord: &[u32]) -> u64 {
        match &self.holding {
            Holding::Splits(splits) => ByAxes { layout: self, splits }.num_boxes_at(coord),
            Holding::Boxes(table) => table.boxes(self.mesh.position(coord)).len() as u64,
        }
    }

    /// Bytes of all shards together; where splits do not divide evenly, rounded up.
    pub fn bytes_on_devices(&self) -> u128 {
        let width = u128::from(self.dtype.bytes());
        match &self.holding {
            Holding::Splits(splits) => {
                let split = ByAxes { layout: self, splits };
                let tiles: u128 = (0..self.shape.len()).map(|dim| split.num_parts(dim) as u128).product();
                (u128::from(self.bytes()) * self.mesh.len() as u128).div_ceil(tiles)
            }
            Holding::Boxes(table) => {
                let ends: Vec<u128> = table.kinds().iter().map(|boxes| end_of(boxes).into()).collect();
                (0..self.mesh.len()).map(|p| ends[table.kind(p)] * width).sum()
            }
        }
    }

    /// The notation where it is short; a long list of boxes is counted instead, for a reader who knows it.
    pub fn summary(&self) -> String {
        const SHORT: usize = 160;
        let text = self.to_string();
        let Holding::Boxes(table) = &self.holding else { return text };
        if text.len() <= SHORT {
            return text;
        }
        let counts = (0..self.mesh.len()).map(|p| table.boxes(p).len());
        let (boxes, holders) = (counts.clone().sum::<usize>(), counts.filter(|n| *n > 0).count());
        let sum = self.partial.as_ref().map(|p| format!(" | {} {}", p.op, self.axis_names(&p.axes)));
        let (mesh, shape, sum) = (&self.mesh, numbers(&self.shape, ","), sum.unwrap_or_default());
        format!("{}[{shape}]@{mesh}{{{boxes} boxes on {holders} devices{sum}}}", self.dtype)
    }

    /// How many different parts of a partial sum there are; 1 when the values are whole.
    pub fn num_contributions(&self) -> usize {
        self.partial.as_ref().map_or(1, |p| p.axes.iter().map(|&a| self.mesh.axes[a].len as usize).product())
    }

    fn axis_names(&self, axes: &[usize]) -> String {
        axes.iter().map(|&a| self.mesh.axes[a].name.as_str()).collect::<Vec<_>>().join("+")
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

/// Boxes one behind the other, row-major each.
fn packed(regions: Vec<Region>) -> Vec<HeldBox> {
    let mut next = 0;
    let held = |region: Region| {
        let held = HeldBox::packed(region, next);
        next = held.end_elements();
        held
    };
    regions.into_iter().filter(|region| !region.is_empty()).map(held).collect()
}

fn end_of(boxes: &[HeldBox]) -> u64 {
    boxes.iter().map(HeldBox::end_elements).max().unwrap_or(0)
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}]@{}", self.dtype, numbers(&self.shape, ","), self.mesh)?;
        let (open, close) = match &self.holding {
            Holding::Splits(_) => ("(", ")"),
            Holding::Boxes(_) => ("{", "}"),
        };
        let inside = match &self.holding {
            Holding::Splits(splits) => ByAxes { layout: self, splits }.to_string(),
            Holding::Boxes(table) => table.to_string(),
        };
        write!(f, "{open}{inside}")?;
        if let Some(partial) = &self.partial {
            let gap = if inside.is_empty() { "" } else { " " };
            write!(f, "{gap}| {} {}", partial.op, self.axis_names(&partial.axes))?;
        }
        f.write_str(close)
    }
}

fn numbers(numbers: &[u64], separator: &str) -> String {
    numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(separator)
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
