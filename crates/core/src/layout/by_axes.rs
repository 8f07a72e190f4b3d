//! Layouts by axes: for every dim of the tensor the axes of the mesh that split it.

use std::fmt;

use crate::region::{Region, Span};

use super::{Layout, Rule, Split, boxes, numbers};

/// What a layout says that torch's placements and JAX's specs have no word for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoCounterpart {
    #[error(
        "dim {dim} is split `{term}`: fused parts have no counterpart\nhint: make each part a tensor of its own, split by {axes}"
    )]
    Fused { dim: usize, term: String, axes: String },
    #[error(
        "dim {dim} is split `{term}`: cuts that are not torch.chunk's have no counterpart\nhint: `{axes}` chunks evenly"
    )]
    Cuts { dim: usize, term: String, axes: String },
    #[error("{summary}: listed boxes have no counterpart\nhint: layouts that are split by axes have")]
    Boxes { summary: String },
}

/// A layout that is said by splits.
#[derive(Debug, Clone, Copy)]
pub struct ByAxes<'a> {
    pub(super) layout: &'a Layout,
    pub(super) splits: &'a [Split],
}

impl<'a> ByAxes<'a> {
    /// How each dim is split; as many as the shape has dims.
    pub fn splits(self) -> &'a [Split] {
        self.splits
    }

    /// Into how many parts a dim is split.
    pub fn num_parts(self, dim: usize) -> usize {
        self.splits[dim].axes.iter().map(|&a| self.layout.mesh.axes[a].len as usize).product()
    }

    /// Which part of `dim` a device holds: its coordinates on the axes that split the dim, major first.
    pub fn part_at(self, dim: usize, coord: &[u32]) -> usize {
        self.splits[dim]
            .axes
            .iter()
            .fold(0, |part, &a| part * self.layout.mesh.axes[a].len as usize + coord[a] as usize)
    }

    /// The spans of every part of a dim, without the empty ones. One span a part, but for fused parts.
    pub fn part_spans(self, dim: usize) -> Vec<Vec<Span>> {
        self.splits[dim].rule.spans(self.layout.shape[dim], &self.axis_lens(dim))
    }

    fn axis_lens(self, dim: usize) -> Vec<u32> {
        self.splits[dim].axes.iter().map(|&a| self.layout.mesh.axes[a].len).collect()
    }

    /// The axes of a dim that is cut where torch.chunk would cut it, however that is said: `tp[0,4,8]` of 8 over 2 is.
    pub(super) fn chunking_axes(self, dim: usize) -> Result<&'a [usize], NoCounterpart> {
        let Split { axes, rule } = &self.splits[dim];
        let (len, lens) = (self.layout.shape[dim], self.axis_lens(dim));
        if *rule == Rule::Chunk || rule.spans(len, &lens) == Rule::Chunk.spans(len, &lens) {
            return Ok(axes);
        }
        let (term, axes) = (self.term(dim), self.layout.axis_names(axes));
        Err(match rule {
            Rule::Parts(_) => NoCounterpart::Fused { dim, term, axes },
            _ => NoCounterpart::Cuts { dim, term, axes },
        })
    }

    /// How a dim is split, as the notation has it.
    pub(super) fn term(self, dim: usize) -> String {
        let Split { axes, rule } = &self.splits[dim];
        let names = self.layout.axis_names(axes);
        match rule {
            _ if axes.is_empty() => "_".into(),
            Rule::Chunk => names,
            Rule::Cuts(cuts) => format!("{names}[{}]", numbers(cuts, ",")),
            Rule::Parts(parts) => format!("{names} of {}", numbers(parts, "+")),
        }
    }

    /// For every dim, the spans that the device at `coord` holds.
    fn spans_at(self, coord: &[u32]) -> Vec<Vec<Span>> {
        let spans_of = |dim: usize| {
            let rule = &self.splits[dim].rule;
            rule.spans_of(self.layout.shape[dim], &self.axis_lens(dim), self.part_at(dim, coord))
        };
        (0..self.layout.shape.len()).map(spans_of).collect()
    }

    pub(super) fn shard_at(self, coord: &[u32]) -> Vec<Region> {
        let spans = self.spans_at(coord);
        boxes(&spans.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }

    /// How much of every dim the device at `coord` holds; 0 of one or more where its shard is empty.
    pub fn lens_at(self, coord: &[u32]) -> Vec<u64> {
        self.spans_at(coord).iter().map(|spans| spans.iter().map(|s| s.len()).sum()).collect()
    }

    pub(super) fn elements_at(self, coord: &[u32]) -> u64 {
        self.lens_at(coord).into_iter().product()
    }

    pub(super) fn num_boxes_at(self, coord: &[u32]) -> u64 {
        self.spans_at(coord).iter().map(|spans| spans.len() as u64).fold(1, u64::saturating_mul)
    }
}

/// Prints `tp,_`, the inside of the parentheses.
impl fmt::Display for ByAxes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for dim in 0..self.splits.len() {
            f.write_str(if dim == 0 { "" } else { "," })?;
            f.write_str(&self.term(dim))?;
        }
        Ok(())
    }
}
