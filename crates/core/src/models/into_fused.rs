//! Tensors of their own that become parts of fused ones.
//!
//! A trainer has query, key and value apart, an engine has them one behind the other in one parameter. Each stays a tensor of its own,
//! with the trainer's name, and its destination says where in the memory of the engine's parameter it lies:
//!
//! ```text
//! q_proj  [8192,8192] ──►  | q q q q | k | v |     rows 0 to 1024 of rank 0's parameter
//! k_proj  [1024,8192] ──►  | q q q q | k | v |     rows 1024 to 1152
//! v_proj  [1024,8192] ──►  | q q q q | k | v |     rows 1152 to 1280
//! ```

use crate::layout::{HeldBox, Layout};
use crate::region::{Region, Span};

use super::tensors::{ModelTensor, Role};
use super::{Model, Parallel, ParallelError};

impl ModelTensor {
    /// The dim that the parts of a fused tensor share out: rows, of experts those of every one.
    pub(super) fn dim_of_parts(&self) -> usize {
        usize::from(matches!(self.role, Role::Experts { .. }))
    }

    pub(super) fn len_of_parts(&self) -> u64 {
        self.shape[self.dim_of_parts()]
    }
}

impl Model {
    /// Every tensor as the source has it, unfused, with its layout before, and its place inside of what the destination has: in the
    /// memory of a fused parameter, where it is a part of one. A table's tensors are what they are on both sides.
    pub fn pairs_into_fused(
        &self,
        src: &Parallel,
        dst: &Parallel,
    ) -> Result<Vec<(String, Layout, Layout)>, ParallelError> {
        let first = src.num_ranks();
        let apart = self.tensors(false);
        let (mut rest, mut pairs) = (&apart[..], Vec::with_capacity(apart.len()));
        for fused in self.tensors(true) {
            let whole = dst.layout(self, &fused, "I", first)?;
            let mut start = 0;
            while let Some((tensor, others)) = rest.split_first().filter(|_| start < fused.len_of_parts()) {
                let len = tensor.shape[fused.dim_of_parts()];
                let before = src.layout(self, tensor, "T", 0)?;
                let after = match tensor.shape == fused.shape {
                    true => whole.clone(),
                    false => inside(&whole, tensor, fused.dim_of_parts(), Span::new(start, start + len))?,
                };
                pairs.push((tensor.name.clone(), before, after));
                (start, rest) = (start + len, others);
            }
        }
        Ok(pairs)
    }
}

/// A part of a tensor, where that tensor lies.
fn inside(whole: &Layout, tensor: &ModelTensor, dim: usize, part: Span) -> Result<Layout, ParallelError> {
    let mesh = whole.mesh();
    let held = |position: usize| {
        let all = whole.held_at(&mesh.coord(position)).into_iter();
        all.filter_map(|held| cut(held, dim, part)).collect()
    };
    let positions = (0..mesh.len()).map(held).collect();
    Layout::of_boxes(whole.dtype(), tensor.shape.clone(), mesh.clone(), positions)
        .map_err(|error| ParallelError::Layout { name: tensor.name.clone(), why: error.to_string() })
}

/// What a box has of a stretch of a dim, counted from its start; where it lies stays the same.
fn cut(held: HeldBox, dim: usize, part: Span) -> Option<HeldBox> {
    let own = held.region.spans()[dim];
    let (start, end) = (own.start.max(part.start), own.end.min(part.end));
    if start >= end {
        return None;
    }
    let mut spans = held.region.spans().to_vec();
    spans[dim] = Span::new(start - part.start, end - part.start);
    let offset_elements = held.offset_elements + (start - own.start) * held.strides[dim];
    Some(HeldBox { region: Region::new(spans), offset_elements, strides: held.strides })
}
