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

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};

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
#[derive(Clone)]
pub struct Region {
    spans: Spans,
}

/// So many dims lie in the box itself. Programs have millions of boxes, nearly all of vectors and matrices, and a look at one
/// that lies elsewhere is a miss of the cache.
const FEW_DIMS: usize = 2;

#[derive(Clone)]
enum Spans {
    Few { len: u8, spans: [Span; FEW_DIMS] },
    Many(Box<[Span]>),
}

impl FromIterator<Span> for Region {
    fn from_iter<I: IntoIterator<Item = Span>>(iter: I) -> Self {
        let mut iter = iter.into_iter();
        let (mut len, mut spans) = (0, [Span { start: 0, end: 0 }; FEW_DIMS]);
        for span in iter.by_ref() {
            if len == FEW_DIMS {
                let many = spans.into_iter().chain([span]).chain(iter);
                return Self { spans: Spans::Many(many.collect()) };
            }
            spans[len] = span;
            len += 1;
        }
        Self { spans: Spans::Few { len: len as u8, spans } }
    }
}

impl Region {
    pub fn new(spans: Vec<Span>) -> Self {
        spans.into_iter().collect()
    }

    /// The whole tensor of this shape.
    pub fn whole(shape: &[u64]) -> Self {
        shape.iter().map(|&len| Span::new(0, len)).collect()
    }

    #[inline]
    pub fn spans(&self) -> &[Span] {
        match &self.spans {
            Spans::Few { len, spans } => &spans[..usize::from(*len)],
            Spans::Many(spans) => spans,
        }
    }

    fn spans_mut(&mut self) -> &mut [Span] {
        match &mut self.spans {
            Spans::Few { len, spans } => &mut spans[..usize::from(*len)],
            Spans::Many(spans) => spans,
        }
    }

    pub fn num_dims(&self) -> usize {
        self.spans().len()
    }

    /// Elements in the box. A layout checks once that its whole tensor fits into `u64`, and every box is part of one.
    pub fn volume(&self) -> u64 {
        self.spans().iter().map(|s| s.len()).product()
    }

    pub fn is_empty(&self) -> bool {
        self.spans().iter().any(|s| s.is_empty())
    }

    pub fn intersect(&self, other: &Region) -> Option<Region> {
        debug_assert_eq!(self.num_dims(), other.num_dims());
        self.spans().iter().zip(other.spans()).map(|(a, b)| a.intersect(*b)).collect()
    }

    pub fn overlaps(&self, other: &Region) -> bool {
        self.spans().iter().zip(other.spans()).all(|(a, b)| a.start.max(b.start) < a.end.min(b.end))
    }

    pub fn contains(&self, other: &Region) -> bool {
        self.spans().iter().zip(other.spans()).all(|(a, b)| a.contains(*b))
    }

    /// What is left of `self` once `other` is taken away, as disjoint boxes: at most two per dim.
    pub fn subtract(&self, other: &Region) -> Vec<Region> {
        let Some(common) = self.intersect(other) else { return vec![self.clone()] };
        let mut left = Vec::new();
        let mut core = self.clone();
        for (dim, cut) in common.spans().iter().enumerate() {
            let span = core.spans()[dim];
            for part in [Span::new(span.start, cut.start), Span::new(cut.end, span.end)] {
                if !part.is_empty() {
                    left.push(core.with_span(dim, part));
                }
            }
            core.spans_mut()[dim] = *cut;
        }
        left
    }

    /// The same box with one dim narrowed.
    pub fn with_span(&self, dim: usize, span: Span) -> Region {
        let mut region = self.clone();
        region.spans_mut()[dim] = span;
        region
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("spans", &self.spans()).finish()
    }
}

impl PartialEq for Region {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        self.spans() == other.spans()
    }
}

impl Eq for Region {}

impl PartialOrd for Region {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Region {
    fn cmp(&self, other: &Self) -> Ordering {
        self.spans().cmp(other.spans())
    }
}

impl Hash for Region {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.spans().hash(state);
    }
}

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (dim, span) in self.spans().iter().enumerate() {
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

    proptest! {
        #[test]
        fn regions_compare_as_their_spans_do(
            (a, b) in (0usize..5, 0usize..5).prop_flat_map(|(x, y)| (arb_region(x), arb_region(y)))
        ) {
            prop_assert_eq!(a.cmp(&b), a.spans().cmp(b.spans()));
            prop_assert_eq!(a == b, a.spans() == b.spans());
            prop_assert_eq!(Region::new(a.spans().to_vec()), a);
        }
    }

    #[test]
    fn a_scalar_holds_one_element() {
        assert_eq!(Region::whole(&[]).volume(), 1);
        assert!(!Region::whole(&[]).is_empty());
    }
}
