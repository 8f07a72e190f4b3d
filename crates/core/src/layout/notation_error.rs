//! What can be wrong with a piece of notation, told with the line and the characters underlined:
//!
//! ```text
//! layout splits two dims over the same axis `tp`
//!   f32[8,6]@A{tp:2}(tp,tp)
//!                   ^^^^^^^
//! hint: an axis splits one dim at most; name another axis, or `_` to leave a dim whole
//! ```

use std::fmt;
use std::ops::Range;

use super::{BoxError, MAX_DIMS, ReduceOp};
use crate::dtype::DType;
use crate::mesh::{MAX_AXES, MAX_MESH_LEN};

/// More spans than this from fused parts of one dim is refused: every part of the dim holds a slice of each.
pub(super) const MAX_FUSED_SPANS: usize = 1 << 24;
/// An error shows this many characters on either side of the place it is about.
const CONTEXT_CHARS: usize = 100;

/// What is wrong with a piece of notation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    #[error("expected {expected}, found {found}")]
    Expected { expected: &'static str, found: String },
    #[error("unknown dtype `{name}`")]
    UnknownDType { name: String },
    #[error("mesh `{mesh}` has no axis `{axis}`")]
    UnknownAxis { mesh: String, axis: String, known: Vec<String> },
    #[error("layout splits two dims over the same axis `{axis}`")]
    AxisSplitsTwice { axis: String },
    #[error("axis `{axis}` both splits a dim and carries a partial {op}")]
    AxisSplitsAndReduces { axis: String, op: ReduceOp },
    #[error("axis `{axis}` is named twice")]
    AxisRepeated { axis: String },
    #[error("axis `{axis}` has length 0")]
    AxisEmpty { axis: String },
    #[error("the number {number} does not fit into 64 bits")]
    NumberTooLarge { number: String },
    #[error("the tensor has more than 2^64 bytes")]
    TensorTooLarge,
    #[error("the mesh has {len} devices, more than {MAX_MESH_LEN}")]
    MeshTooLarge { len: String },
    #[error("the mesh has {axes} axes, more than {MAX_AXES}")]
    TooManyAxes { axes: usize },
    #[error("the tensor has {dims} dims, more than {MAX_DIMS}")]
    TooManyDims { dims: usize },
    #[error("the shape has {dims} dims, the layout splits {splits}")]
    DimsDiffer { dims: usize, splits: usize, whole: &'static str },
    #[error("the tensor has {dims} dims, there is no dim {dim}")]
    NoSuchDim { dim: String, dims: usize },
    #[error("the mesh has {axes} axes, {placements} placements are given")]
    PlacementsDiffer { axes: usize, placements: usize },
    #[error("unknown placement `{name}`")]
    UnknownPlacement { name: String },
    #[error("one layout has both a partial {first} and a partial {second}")]
    ReductionsDiffer { first: ReduceOp, second: ReduceOp },
    #[error("rank {rank} is listed twice")]
    RankRepeated { rank: u32 },
    #[error("rank {rank} is too large")]
    RankTooLarge { rank: u64 },
    #[error("the mesh has {len} devices, {listed} ranks are listed")]
    RanksDiffer { len: usize, listed: u64 },
    #[error("{given} cuts make {} parts, the axes make {parts}", given.saturating_sub(1))]
    CutsDiffer { given: usize, parts: usize },
    #[error("cuts run from {first} to {last}, the dim from 0 to {dim_len}")]
    CutsMissTheEnds { first: u64, last: u64, dim_len: u64 },
    #[error("cut {next} comes after cut {cut}")]
    CutsFall { cut: u64, next: u64 },
    #[error("fused parts add up to {sum}, the dim has {dim_len}")]
    PartsDiffer { sum: String, dim_len: u64 },
    #[error("{fused} fused parts split over {parts} devices make more than {MAX_FUSED_SPANS} slices")]
    TooManyParts { fused: usize, parts: usize },
    #[error("the mesh has {devices} devices, there is no position {position}")]
    NoSuchPosition { position: u32, devices: usize },
    #[error("position {position} is listed twice")]
    PositionRepeated { position: usize },
    #[error("{0}")]
    Boxes(BoxError),
    #[error("unknown reduction `{name}`")]
    UnknownReduction { name: String },
}

impl Problem {
    /// A way out, where we know one.
    fn hint(&self) -> Option<String> {
        Some(match self {
            Problem::UnknownDType { .. } => format!("dtypes are {}", DType::ALL.map(|d| d.name()).join(" ")),
            Problem::UnknownAxis { known, .. } if known.is_empty() => "the mesh has no axes".into(),
            Problem::UnknownAxis { known, .. } => format!("its axes are {}", known.join(", ")),
            Problem::AxisSplitsTwice { .. } => {
                "an axis splits one dim at most; name another axis, or `_` to leave a dim whole".into()
            }
            Problem::AxisSplitsAndReduces { .. } => "name the axis on one side of the `|` only".into(),
            Problem::AxisEmpty { .. } => "an axis has at least one device".into(),
            Problem::DimsDiffer { dims, whole, .. } => {
                format!("give {dims} terms; `{whole}` leaves a dim whole")
            }
            Problem::PlacementsDiffer { axes, .. } => {
                format!("give {axes} placements, one for each axis of the mesh")
            }
            Problem::UnknownPlacement { .. } => {
                "placements are Shard(dim), Replicate() and Partial(sum)".into()
            }
            Problem::ReductionsDiffer { .. } => "combine one of them before the tensor moves".into(),
            Problem::RankTooLarge { .. } => format!("ranks go up to {}", u32::MAX - 1),
            Problem::RanksDiffer { len, .. } => {
                format!("list {len} ranks, or none to take the next free ones")
            }
            Problem::CutsDiffer { parts, .. } => {
                format!("give {} cuts, from 0 to the dim's length", parts + 1)
            }
            Problem::NoSuchPosition { devices, .. } => {
                format!("positions count the devices of the mesh, from 0 to {}", devices - 1)
            }
            Problem::PositionRepeated { .. } => "list all boxes of a device together".into(),
            Problem::Boxes(error) => return error.hint().map(str::to_string),
            Problem::UnknownReduction { .. } => "reductions are sum, max and min".into(),
            Problem::TooManyDims { .. } => "merge dims that are never split apart".into(),
            _ => return None,
        })
    }
}

/// A [`Problem`] and the characters it is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotationError {
    pub text: String,
    /// Byte range in `text`; may be empty, at the end.
    pub at: Range<usize>,
    pub problem: Problem,
}

impl fmt::Display for NotationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (line, before, width) = self.window();
        writeln!(f, "{}", self.problem)?;
        writeln!(f, "  {line}")?;
        write!(f, "  {}{}", " ".repeat(before), "^".repeat(width))?;
        match self.problem.hint() {
            Some(hint) => write!(f, "\nhint: {hint}"),
            None => Ok(()),
        }
    }
}

impl NotationError {
    /// The text around the error on one line, and which of its characters to underline.
    fn window(&self) -> (String, usize, usize) {
        let count = |range: Range<usize>| self.text.get(range).map_or(0, |s| s.chars().count());
        let (start, len) = (count(0..self.at.start), count(self.at.clone()));
        let first = start.saturating_sub(CONTEXT_CHARS);
        let shown = (start - first) + len.min(CONTEXT_CHARS) + CONTEXT_CHARS;
        let clean = |c: char| if c.is_control() { ' ' } else { c };
        let cut_before = if first > 0 { "…" } else { "" };
        let mut line: String =
            cut_before.chars().chain(self.text.chars().skip(first).take(shown).map(clean)).collect();
        if self.text.chars().nth(first + shown).is_some() {
            line.push('…');
        }
        let before = start - first + cut_before.chars().count();
        (line, before, len.clamp(1, CONTEXT_CHARS))
    }
}

impl std::error::Error for NotationError {}
