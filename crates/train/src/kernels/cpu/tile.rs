//! A matrix borrowed in pieces: disjoint tiles that different threads write.
//!
//! Rows of a row-major matrix can be split by safe code, columns cannot. A [`Tile`] is a band of columns of some rows, and
//! hands out one row of it at a time:
//!
//! ```text
//!            cols 0..3   cols 3..5
//! rows 0..2   t0 t0 t0   t1 t1
//!             t0 t0 t0   t1 t1
//! rows 2..3   t2 t2 t2   t3 t3
//! ```
//!
//! The crate's `unsafe` is here and in [`super::threads`]. What makes this one sound: [`tiles`] borrows the whole matrix for as
//! long as its tiles live, cuts rows and columns into ranges that do not overlap, and a tile reaches only its own
//! rows and columns, checked at every access.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Range;

/// Some columns of some rows of a matrix, to write.
pub struct Tile<'a, T> {
    /// The first element of the tile.
    start: *mut T,
    rows: usize,
    cols: usize,
    /// Elements from one row to the next.
    stride: usize,
    _matrix: PhantomData<&'a mut [T]>,
}

// SAFETY: a tile is a `&mut` to its own elements, which no other tile reaches.
unsafe impl<T: Send> Send for Tile<'_, T> {}

impl<'a, T> Tile<'a, T> {
    /// A whole matrix with rows of `cols` elements.
    pub fn whole(data: &'a mut [T], cols: usize) -> Self {
        let rows = data.len().checked_div(cols).unwrap_or(0);
        assert_eq!(rows * cols, data.len(), "rows of {cols} elements");
        Self { start: data.as_mut_ptr(), rows, cols, stride: cols, _matrix: PhantomData }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Some of its rows, for a while.
    pub fn row_range(&mut self, rows: Range<usize>) -> Tile<'_, T> {
        assert!(rows.start <= rows.end && rows.end <= self.rows);
        let at = if rows.is_empty() { 0 } else { rows.start * self.stride };
        // SAFETY: the row is one of this tile's (checked above), and the new tile borrows this one.
        let start = unsafe { self.start.add(at) };
        Tile { start, rows: rows.len(), cols: self.cols, stride: self.stride, _matrix: PhantomData }
    }

    /// A row of the tile, or the part of it in `cols`.
    #[inline(always)]
    pub fn row(&mut self, row: usize, cols: Range<usize>) -> &mut [T] {
        assert!(row < self.rows && cols.start <= cols.end && cols.end <= self.cols);
        // SAFETY: row and columns lie in this tile (checked above), whose elements nobody else reaches while it lives;
        // the slice borrows the tile mutably, so there is one at a time.
        unsafe {
            let at = self.start.add(row * self.stride + cols.start);
            std::slice::from_raw_parts_mut(at, cols.len())
        }
    }
}

/// Cuts a matrix with rows of `cols` elements into tiles: for every range of rows one for every range of columns, in
/// that order. Both lists of ranges ascend.
pub fn tiles<'a, T>(
    data: &'a mut [T],
    cols: usize,
    row_ranges: &[Range<usize>],
    col_ranges: &[Range<usize>],
) -> Vec<Tile<'a, T>> {
    let rows = data.len().checked_div(cols).unwrap_or(0);
    check(row_ranges, rows);
    check(col_ranges, cols);
    let start = data.as_mut_ptr();
    let tile = |r: &Range<usize>, c: &Range<usize>| {
        // An empty tile has no address of its own: that of the matrix does.
        let at = if r.is_empty() || c.is_empty() { 0 } else { r.start * cols + c.start };
        // SAFETY: `at` is the index of an element of `data`, or zero.
        let start = unsafe { start.add(at) };
        Tile { start, rows: r.len(), cols: c.len(), stride: cols, _matrix: PhantomData }
    };
    row_ranges.iter().flat_map(|r| col_ranges.iter().map(move |c| tile(r, c))).collect()
}

/// Ranges ascend, do not overlap and end within `len`.
fn check(ranges: &[Range<usize>], len: usize) {
    let ends = ranges.iter().fold(0, |end, r| {
        assert!(end <= r.start && r.start <= r.end, "ranges {ranges:?} overlap");
        r.end
    });
    assert!(ends <= len, "ranges {ranges:?} leave a length of {len}");
}

/// Cuts `len` into `parts` ranges of nearly one size, each a multiple of `unit` but for the last; empty ones left out.
pub fn cut(len: usize, parts: usize, unit: usize) -> Vec<Range<usize>> {
    let units = len.div_ceil(unit);
    let parts = parts.clamp(1, units.max(1));
    let at = |i: usize| (units * i / parts * unit).min(len);
    (0..parts).map(|i| at(i)..at(i + 1)).filter(|r| !r.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn tiles_cover_a_matrix_once(rows in 0usize..9, cols in 1usize..9, p in 1usize..4, q in 1usize..4) {
            let mut data = vec![0; rows * cols];
            for mut tile in tiles(&mut data, cols, &cut(rows, p, 1), &cut(cols, q, 2)) {
                for r in 0..tile.rows() {
                    let all = 0..tile.cols();
                    tile.row(r, all).iter_mut().for_each(|x| *x += 1);
                }
            }
            prop_assert!(data.iter().all(|&x| x == 1), "{:?}", data);
        }

        #[test]
        fn cuts_tile_a_length(len in 0usize..200, parts in 0usize..9, unit in 1usize..9) {
            let ranges = cut(len, parts, unit);
            let next = ranges.iter().fold(0, |next, r| {
                assert_eq!(next, r.start);
                r.end
            });
            prop_assert_eq!(next, len);
            prop_assert!(ranges.len() <= parts.max(1));
        }
    }

    #[test]
    #[should_panic(expected = "overlap")]
    fn refuses_overlapping_tiles() {
        tiles(&mut [0; 6], 3, &cut(2, 1, 1), &[0..2, 1..3]);
    }
}
