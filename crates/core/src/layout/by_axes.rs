//! Layouts by axes: for every dim of the tensor the axes of the mesh that split it.

use std::fmt;

use crate::region::{Region, Span};

use super::{Layout, Rule, Split, boxes, numbers};

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

    pub(super) fn elements_at(self, coord: &[u32]) -> u64 {
        self.spans_at(coord).iter().map(|spans| spans.iter().map(|s| s.len()).sum::<u64>()).product()
    }

    pub(super) fn num_boxes_at(self, coord: &[u32]) -> u64 {
        self.spans_at(coord).iter().map(|spans| spans.len() as u64).fold(1, u64::saturating_mul)
    }
}

/// Prints `tp,_`, the inside of the parentheses.
impl fmt::Display for ByAxes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (dim, split) in self.splits.iter().enumerate() {
            f.write_str(if dim == 0 { "" } else { "," })?;
            let names = self.layout.axis_names(&split.axes);
            match (&split.rule, split.axes.is_empty()) {
                (_, true) => f.write_str("_")?,
                (Rule::Chunk, _) => f.write_str(&names)?,
                (Rule::Cuts(cuts), _) => write!(f, "{names}[{}]", numbers(cuts, ","))?,
                (Rule::Parts(parts), _) => write!(f, "{names} of {}", numbers(parts, "+"))?,
            }
        }
        Ok(())
    }
}
