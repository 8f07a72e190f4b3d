//! Boxes of elements.
//!
//! A [`Span`] is a half-open range of one dim; a [`Region`] is a span per dim. A scalar has no dims, and its one
//! region holds one element.
//!
//! ```
//! use crossmesh_core::region::{Region, Span};
//! let rows = Region::new(vec![Span::new(0, 4), Span::new(0, 6)]);
//! let cols = Region::new(vec![Span::new(0, 8), Span::new(4, 6)]);
//! assert_eq!(rows.intersect(&cols).unwrap().to_string(), "[0:4, 4:6]");
//! assert_eq!(rows.volume(), 24);
//! ```

use std::fmt;

/// The elements `start..end` of a dim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span {
    pub start: u64,
    pub end: u64,
}

impl Span {
    pub fn new(start: u64, end: u64) -> Self {
        assert!(start <= end, "span {start}:{end} runs backwards");
        Self { start, end }
    }

    pub fn len(self) -> u64 {
        self.end - self.start
    }

    pub fn is_empty(self) -> bool {
        self.start == self.end
    }

    pub fn intersect(self, other: Span) -> Option<Span> {
        let (start, end) = (self.start.max(other.start), self.end.min(other.end));
        (start < end).then_some(Span { start, end })
    }

    pub fn contains(self, other: Span) -> bool {
        self.start <= other.start && other.end <= self.end
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.start, self.end)
    }
}

/// A box: one span per dim.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Region {
    spans: Box<[Span]>,
}

impl Region {
    pub fn new(spans: Vec<Span>) -> Self {
        Self { spans: spans.into_boxed_slice() }
    }

    /// The whole tensor of this shape.
    pub fn whole(shape: &[u64]) -> Self {
        Self::new(shape.iter().map(|&len| Span::new(0, len)).collect())
    }

    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    pub fn num_dims(&self) -> usize {
        self.spans.len()
    }

    /// Elements in the box. A layout checks once that its whole tensor fits into `u64`, and every box is part of one.
    pub fn volume(&self) -> u64 {
        self.spans.iter().map(|s| s.len()).product()
    }

    pub fn is_empty(&self) -> bool {
        self.spans.iter().any(|s| s.is_empty())
    }

    pub fn intersect(&self, other: &Region) -> Option<Region> {
        debug_assert_eq!(self.num_dims(), other.num_dims());
        let spans: Option<Vec<Span>> =
            self.spans.iter().zip(&other.spans).map(|(a, b)| a.intersect(*b)).collect();
        spans.map(Region::new)
    }

    pub fn overlaps(&self, other: &Region) -> bool {
        self.spans.iter().zip(&other.spans).all(|(a, b)| a.start.max(b.start) < a.end.min(b.end))
    }

    pub fn contains(&self, other: &Region) -> bool {
        self.spans.iter().zip(&other.spans).all(|(a, b)| a.contains(*b))
    }

    /// What is left of `self` once `other` is taken away, as disjoint boxes: at most two per dim.
    pub fn subtract(&self, other: &Region) -> Vec<Region> {
        let Some(common) = self.intersect(other) else { return vec![self.clone()] };
        let mut left = Vec::new();
        let mut core = self.spans.to_vec();
        for (dim, cut) in common.spans.iter().enumerate() {
            let span = core[dim];
            for part in [Span::new(span.start, cut.start), Span::new(cut.end, span.end)] {
                if !part.is_empty() {
                    core[dim] = part;
                    left.push(Region::new(core.clone()));
                }
            }
            core[dim] = *cut;
        }
        left
    }

    /// The same box with one dim narrowed.
    pub fn with_span(&self, dim: usize, span: Span) -> Region {
        let mut spans = self.spans.clone();
        spans[dim] = span;
        Region { spans }
    }
}

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (dim, span) in self.spans.iter().enumerate() {
            write!(f, "{}{span}", if dim == 0 { "" } else { ", " })?;
        }
        f.write_str("]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn arb_region(dims: usize) -> impl Strategy<Value = Region> {
        prop::collection::vec((0u64..6, 0u64..6), dims)
            .prop_map(|v| Region::new(v.into_iter().map(|(a, b)| Span::new(a.min(b), a.max(b))).collect()))
    }

    proptest! {
        #[test]
        fn subtracting_leaves_disjoint_boxes_that_fill_the_rest((a, b) in (1usize..4).prop_flat_map(|d| (arb_region(d), arb_region(d)))) {
            prop_assume!(!a.is_empty());
            let left = a.subtract(&b);
            let common = a.intersect(&b).map_or(0, |r| r.volume());
            prop_assert_eq!(left.iter().map(Region::volume).sum::<u64>() + common, a.volume());
            for (i, x) in left.iter().enumerate() {
                prop_assert!(a.contains(x) && !x.overlaps(&b));
                prop_assert!(left[..i].iter().all(|y| !y.overlaps(x)));
            }
        }
    }

    #[test]
    fn a_scalar_holds_one_element() {
        assert_eq!(Region::whole(&[]).volume(), 1);
        assert!(!Region::whole(&[]).is_empty());
    }
}
