//! A rank's shard as one array of somebody else's, with strides.
//!
//! A program has a shard's boxes lie one behind the other. An array has them beside each other, along the one dim in which they
//! differ, as of fused tensors; and its rows may be further apart than they are long, as of a column block of something larger:
//!
//! ```text
//! boxes [0:2, 0:2] and [0:2, 4:5]      program   a b c d | x y
//!                                      array     a b x
//!                                                c d y
//! ```
//!
//! Where every box begins, and how far apart its elements are, follows from the array's shape and strides. A program that was proven
//! for boxes that do not overlap is right on any memory in which they do not either.
//!
//! A layout may also say itself where its boxes lie, with gaps and strides. Such a shard is no array but a row of memory, as
//! long as its last box reaches.

use std::sync::Arc;

use crossmesh_core::region::{Region, Span};

use crate::view::View;

/// An array's shape, and how many bytes lie from one element of a dim to the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Strided {
    pub shape: Vec<u64>,
    pub strides: Vec<u64>,
}

/// Why an array cannot be a shard.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ArrayError {
    #[error("shape {expected:?} is expected, {given:?} was given")]
    Shape { expected: Vec<u64>, given: Vec<u64> },
    #[error("its boxes differ in several dims, so that no array holds them beside each other")]
    NotOneArray,
    #[error("elements share memory: strides of {strides:?} bytes for shape {shape:?}")]
    Overlaps { shape: Vec<u64>, strides: Vec<u64> },
}

impl Strided {
    /// Row-major, without gaps.
    pub fn packed(shape: &[u64], element_bytes: u64) -> Self {
        let mut strides = vec![element_bytes; shape.len()];
        for dim in (1..shape.len()).rev() {
            strides[dim - 1] = strides[dim] * shape[dim].max(1);
        }
        Self { shape: shape.to_vec(), strides }
    }

    /// From its first byte to behind its last.
    pub fn extent_bytes(&self, element_bytes: u64) -> Option<u64> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        let mut dims = self.shape.iter().zip(&self.strides);
        dims.try_fold(element_bytes, |end, (len, stride)| end.checked_add(stride.checked_mul(len - 1)?))
    }

    /// Where each of some boxes lies in the array: its offset, with the array's strides.
    pub fn slots(&self, boxes: &[&Region], element_bytes: u64) -> Result<Vec<u64>, ArrayError> {
        let (expected, dim) = stacked(boxes).ok_or(ArrayError::NotOneArray)?;
        if expected != self.shape {
            return Err(ArrayError::Shape { expected, given: self.shape.clone() });
        }
        self.check_apart(element_bytes)?;
        let start = |place: Region| place.spans().get(dim).map_or(0, |span| span.start);
        let stride = self.strides.get(dim).copied().unwrap_or(0);
        Ok(beside(boxes, dim).into_iter().map(|place| start(place) * stride).collect())
    }

    /// Every dim steps over all that the finer ones reach. Arrays that come from slicing and transposing do.
    fn check_apart(&self, element_bytes: u64) -> Result<(), ArrayError> {
        let overlaps = || ArrayError::Overlaps { shape: self.shape.clone(), strides: self.strides.clone() };
        let mut dims: Vec<(u64, u64)> =
            self.strides.iter().copied().zip(self.shape.iter().copied()).collect();
        if dims.iter().any(|(_, len)| *len == 0) {
            return Ok(());
        }
        dims.retain(|(_, len)| *len > 1);
        dims.sort_unstable();
        let mut reach = element_bytes;
        for (stride, len) in dims {
            if stride < reach {
                return Err(overlaps());
            }
            reach =
                stride.checked_mul(len - 1).and_then(|step| reach.checked_add(step)).ok_or_else(overlaps)?;
        }
        Ok(())
    }
}

/// The one array that a shard is: its shape, and the dim along which its boxes lie beside each other. Boxes come in the order of memory,
/// each with the element at which the layout has it begin, or None where it has strides. No array are boxes that differ in
/// several dims, and those that the layout has lie anywhere but one behind the other.
pub fn one_array(boxes: &[(&Region, Option<u64>)]) -> Option<(Vec<u64>, usize)> {
    let mut next = 0;
    let behind = |(region, at): &(&Region, Option<u64>)| {
        let behind = *at == Some(next);
        next += region.volume();
        behind
    };
    if !boxes.iter().all(behind) {
        return None;
    }
    stacked(&boxes.iter().map(|(region, _)| *region).collect::<Vec<_>>())
}

/// Where each of some boxes lies in the array in which they are beside each other along `dim`.
pub fn beside(boxes: &[&Region], dim: usize) -> Vec<Region> {
    let mut next = 0;
    let place = |region: &&Region| {
        let mut spans: Vec<Span> = region.spans().iter().map(|span| Span::new(0, span.len())).collect();
        if let Some(span) = spans.get_mut(dim) {
            *span = Span::new(next, next + span.len());
            next = span.end;
        }
        Region::new(spans)
    };
    boxes.iter().map(place).collect()
}

/// The shape of boxes beside each other, and the dim in which they differ; of one box, the first.
fn stacked(boxes: &[&Region]) -> Option<(Vec<u64>, usize)> {
    let first = boxes.first()?;
    let differ = |dim: &usize| boxes.iter().any(|b| b.spans()[*dim] != first.spans()[*dim]);
    let dims: Vec<usize> = (0..first.spans().len()).filter(differ).collect();
    let dim = match dims[..] {
        [] => 0,
        [dim] => dim,
        _ => return None,
    };
    let mut shape: Vec<u64> = first.spans().iter().map(|span| span.len()).collect();
    if let Some(len) = shape.get_mut(dim) {
        *len = boxes.iter().map(|b| b.spans()[dim].len()).sum();
    }
    Some((shape, dim))
}

/// Whether two arrays have a byte in common, by their runs; for arrays whose extents meet.
pub fn share_bytes(one: (u64, &Strided), other: (u64, &Strided), element_bytes: (u64, u64)) -> bool {
    let runs = |(address, array): (u64, &Strided), element: u64| {
        let whole = Region::whole(&array.shape);
        let view = View::of_tile(address, &whole, Some(&array.strides), &whole, element);
        let view = view.expect("a box lies in itself");
        let mut runs: Vec<(u64, u64)> = view.runs(0..view.bytes()).collect();
        runs.sort_unstable();
        runs
    };
    let (one, other) = (runs(one, element_bytes.0), runs(other, element_bytes.1));
    let (mut i, mut j) = (0, 0);
    while let (Some(a), Some(b)) = (one.get(i), other.get(j)) {
        if a.0 < b.0 + b.1 && b.0 < a.0 + a.1 {
            return true;
        }
        if a.0 + a.1 <= b.0 { i += 1 } else { j += 1 }
    }
    false
}

/// By tile: where it lies in its buffer's base, where that is an array.
pub(crate) type Slot = Option<(u64, Arc<[u64]>)>;

#[cfg(test)]
mod tests {
    use super::*;

    fn region(spans: &[(u64, u64)]) -> Region {
        Region::new(spans.iter().map(|(a, b)| Span::new(*a, *b)).collect::<Vec<_>>())
    }

    #[test]
    fn boxes_lie_beside_each_other() {
        let (q, k) = (region(&[(0, 2), (0, 2)]), region(&[(0, 2), (4, 5)]));
        let array = Strided { shape: vec![2, 3], strides: vec![100, 4] };
        assert_eq!(array.slots(&[&q, &k], 4).unwrap(), [0, 8]);
        assert_eq!(array.extent_bytes(4), Some(112));
        let wrong = Strided::packed(&[3, 2], 4).slots(&[&q, &k], 4);
        assert_eq!(wrong, Err(ArrayError::Shape { expected: vec![2, 3], given: vec![3, 2] }));
        let apart = region(&[(2, 4), (4, 5)]);
        assert_eq!(array.slots(&[&q, &apart], 4), Err(ArrayError::NotOneArray));
    }

    #[test]
    fn boxes_with_places_of_their_own_are_no_array() {
        let (q, k) = (region(&[(0, 2), (0, 2)]), region(&[(0, 2), (4, 5)]));
        assert_eq!(one_array(&[(&q, Some(0)), (&k, Some(4))]), Some((vec![2, 3], 1)));
        assert_eq!(beside(&[&q, &k], 1), [region(&[(0, 2), (0, 2)]), region(&[(0, 2), (2, 3)])]);
        // A gap before a box, strides, dims that differ.
        assert_eq!(one_array(&[(&q, Some(0)), (&k, Some(5))]), None);
        assert_eq!(one_array(&[(&q, Some(1))]), None);
        assert_eq!(one_array(&[(&q, None)]), None);
        let apart = region(&[(2, 4), (4, 5)]);
        assert_eq!(one_array(&[(&q, Some(0)), (&apart, Some(4))]), None);
    }

    #[test]
    fn elements_that_share_memory_are_refused() {
        let whole = region(&[(0, 4), (0, 3)]);
        let of =
            |strides: [u64; 2]| Strided { shape: vec![4, 3], strides: strides.to_vec() }.slots(&[&whole], 4);
        assert!(of([12, 4]).is_ok() && of([4, 16]).is_ok() && of([400, 100]).is_ok());
        for strides in [[8, 4], [0, 4], [12, 2], [4, 12]] {
            assert!(matches!(of(strides), Err(ArrayError::Overlaps { .. })), "{strides:?}");
        }
    }

    /// Against sets of bytes.
    #[test]
    fn common_bytes_are_found() {
        let bytes = |(start, array): (u64, &Strided)| {
            let mut all = std::collections::BTreeSet::new();
            for i in 0..array.shape[0] {
                for j in 0..array.shape[1] {
                    let at = start + i * array.strides[0] + j * array.strides[1];
                    all.extend(at..at + 4);
                }
            }
            all
        };
        let mut seen = [0; 2];
        for seed in 0..400u64 {
            let draw =
                |k: u64, most: u64| seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(7 * k as u32) % most;
            let array = |k: u64| Strided {
                shape: vec![1 + draw(k, 4), 1 + draw(k + 1, 4)],
                strides: vec![16 + 4 * draw(k + 2, 8), 4],
            };
            let (one, other) = (array(0), array(3));
            let (a, b) = ((0, &one), (4 * draw(6, 20), &other));
            let common = !bytes(a).is_disjoint(&bytes(b));
            assert_eq!(share_bytes(a, b, (4, 4)), common, "{a:?} {b:?}");
            seen[usize::from(common)] += 1;
        }
        assert!(seen.iter().all(|n| *n > 20), "{seen:?}");
    }
}
