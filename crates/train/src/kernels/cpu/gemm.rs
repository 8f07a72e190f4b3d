//! The matrix product: packed, blocked for the caches, shared out by rows.
//!
//! ```text
//! pack all of B (every thread some panels)
//! each thread, for its rows of C:
//!   for a block of k:       pack those columns of A
//!     for a block of n:     this much of B stays in the second-level cache
//!       panels of A x panels of B -> tiles of C
//! ```
//!
//! An element of C is the same sum in the same order whatever rows or columns are computed beside it, so results do not
//! depend on the number of threads, nor on how a matrix is split over ranks (but for splits of `k`, and for ranks that get a handful of rows: these are
//! multiplied with B as it lies).

use super::Cpu;
use super::panel::{Geometry, Multiply, Update, View};
use super::simd::{dot, vectorized};
use super::tile::{Tile, cut, tiles};
use crate::kernels::scalar::Scalar;

/// Depth of a block. A panel of A is then about 18 KiB of f32, more than half of a first-level cache.
const DEPTH: usize = 384;
/// Bytes of B that a block of A is multiplied with: they stay in a second-level cache beside it.
const RIGHT_BYTES: usize = 768 << 10;
/// So many rows are multiplied with the right side as it lies: packing it would take longer than the product. A decoder reads one token at a time.
const FEW: usize = 4;
/// Below this many multiplications waking another thread costs more than it brings.
const SERIAL: usize = 1 << 16;

impl<T: Scalar> Cpu<T> {
    /// `c = alpha * a * b + beta * c + bias`, with C row-major and dense.
    pub(super) fn product(&self, a: View<'_, T>, b: View<'_, T>, update: Update<'_, T>, c: &mut [T]) {
        assert_eq!(a.cols, b.rows, "inner dims");
        assert_eq!(c.len(), a.rows * b.cols, "the result's size");
        let (m, n, k) = (a.rows, b.cols, a.cols);
        if m == 0 || n == 0 {
            return;
        }
        if k == 0 {
            return without_product(update, c, n);
        }
        if m <= FEW {
            return self.few_rows(a, b, update, c);
        }
        let geometry = Geometry::of::<T>();
        let blocks = k_blocks(k);
        let right = self.pack_all(geometry, b, &blocks);
        let threads = if m * n * k < SERIAL { 1 } else { self.threads.count() };
        let rows = cut(m, 2 * threads, geometry.mr);
        let bands = tiles(c, n, &rows, &cut(n, 1, 1));
        let job = |(rows, mut band): (std::ops::Range<usize>, Tile<'_, T>)| {
            let a = a.row_range(rows.start, rows.len());
            self.band(geometry, a, &right, &blocks, update, &mut band);
        };
        if threads == 1 {
            rows.into_iter().zip(bands).for_each(job);
        } else {
            self.threads.each(rows.into_iter().zip(bands), job);
        }
    }

    /// A product of a few rows: B is read once, front to back, and nothing is packed.
    fn few_rows(&self, a: View<'_, T>, b: View<'_, T>, update: Update<'_, T>, c: &mut [T]) {
        let (n, k) = (b.cols, a.cols);
        let mut left = self.take(a.rows * k);
        for (r, row) in left.chunks_exact_mut(k).enumerate() {
            let at = r * a.row_stride;
            row.iter_mut().enumerate().for_each(|(i, x)| *x = a.data[at + i * a.col_stride]);
        }
        let left = &left[..];
        let threads = if a.rows * n * k < SERIAL { 1 } else { self.threads.count() };
        let cols = cut(n, 2 * threads, 64);
        let job = |(cols, mut out): (std::ops::Range<usize>, Tile<'_, T>)| {
            let mut sums = self.take(cols.len());
            for (r, left) in left.chunks_exact(k).enumerate() {
                let right = b.col_range(cols.start, cols.len());
                match b.row_stride {
                    // The columns of B lie one behind the other, or its rows do.
                    1 => columns_times(left, right.data, right.col_stride, &mut sums),
                    _ => rows_times(left, right.data, right.row_stride, &mut sums),
                }
                let bias = update.bias.map(|bias| &bias[cols.clone()]);
                for (i, (out, &sum)) in out.row(r, 0..cols.len()).iter_mut().zip(&*sums).enumerate() {
                    let base = bias.map_or(T::ZERO, |bias| bias[i]);
                    let base = if update.beta == T::ZERO { base } else { update.beta.mul_add(*out, base) };
                    *out = update.alpha.mul_add(sum, base);
                }
            }
        };
        let rows = a.rows;
        let items = cols.iter().cloned().zip(tiles(c, n, &cut(rows, 1, 1), &cols));
        if threads == 1 {
            items.for_each(job);
        } else {
            self.threads.each(items, job);
        }
    }

    /// All of B, packed block of k by block of k.
    fn pack_all(&self, geometry: Geometry, b: View<'_, T>, blocks: &[(usize, usize)]) -> super::HostBuf<T> {
        let width = geometry.right_len(b.cols, 1);
        let mut packed = self.take(width * b.rows);
        let mut rest = &mut packed[..];
        let mut jobs = Vec::new();
        for &(start, depth) in blocks {
            let (block, tail) = rest.split_at_mut(width * depth);
            rest = tail;
            let cols = cut(b.cols, self.threads.count(), geometry.nr);
            let sizes: Vec<usize> = cols.iter().map(|c| geometry.right_len(c.len(), depth)).collect();
            let rows = b.row_range(start, depth);
            for (cols, to) in cols.into_iter().zip(split_by(block, &sizes)) {
                jobs.push((rows.col_range(cols.start, cols.len()), to));
            }
        }
        self.threads.each(jobs, |(from, to)| geometry.pack_right(from, to));
        packed
    }

    /// Some rows of C.
    fn band(
        &self,
        geometry: Geometry,
        a: View<'_, T>,
        right: &[T],
        blocks: &[(usize, usize)],
        update: Update<'_, T>,
        out: &mut Tile<'_, T>,
    ) {
        let n = out.cols();
        let width = geometry.right_len(n, 1);
        let mut left = self.take(geometry.left_len(a.rows, DEPTH.min(a.cols)));
        for &(start, depth) in blocks {
            geometry.pack_left(a.col_range(start, depth), &mut left[..geometry.left_len(a.rows, depth)]);
            let block = &right[width * start..][..width * depth];
            let cols = (RIGHT_BYTES / (depth * size_of::<T>())).max(1).next_multiple_of(geometry.nr);
            for first_col in (0..n).step_by(cols) {
                let update = if start == 0 { update } else { Update { beta: T::ONE, bias: None, ..update } };
                let cols = cols.min(n - first_col);
                let right = &block[first_col * depth..];
                Multiply { left: &left, right, k: depth, update, out, first_col, cols }.run();
            }
        }
    }
}

vectorized! {
    /// The product of a row with columns that lie one behind the other, `stride` apart.
    fn columns_times<T>(left: &'a [T], columns: &'a [T], stride: usize, sums: &'a mut [T]) {
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum = dot(left, &columns[i * stride..][..left.len()], |x, y| x * y);
        }
    }
}

vectorized! {
    /// The product of a row with a band of columns of rows that lie `stride` apart.
    fn rows_times<T>(left: &'a [T], rows: &'a [T], stride: usize, sums: &'a mut [T]) {
        // As many columns at a time as a machine's registers hold.
        const BAND: usize = 64;
        for (band, sums) in sums.chunks_mut(BAND).enumerate() {
            let mut total = [T::ZERO; BAND];
            for (k, &x) in left.iter().enumerate() {
                let row = &rows[k * stride + band * BAND..][..sums.len()];
                match <&[T; BAND]>::try_from(row) {
                    Ok(row) => total.iter_mut().zip(row).for_each(|(total, &y)| *total = x.mul_add(y, *total)),
                    Err(_) => total.iter_mut().zip(row).for_each(|(total, &y)| *total = x.mul_add(y, *total)),
                }
            }
            sums.copy_from_slice(&total[..sums.len()]);
        }
    }
}

/// Cuts k into blocks of nearly one depth: their starts and depths.
fn k_blocks(k: usize) -> Vec<(usize, usize)> {
    cut(k, k.div_ceil(DEPTH), 1).into_iter().map(|r| (r.start, r.len())).collect()
}

/// A product of depth zero adds nothing.
fn without_product<T: Scalar>(update: Update<'_, T>, c: &mut [T], n: usize) {
    for row in c.chunks_exact_mut(n) {
        for (i, out) in row.iter_mut().enumerate() {
            let old = if update.beta == T::ZERO { T::ZERO } else { update.beta * *out };
            *out = old + update.bias.map_or(T::ZERO, |bias| bias[i]);
        }
    }
}

/// Consecutive parts of a slice.
pub(super) fn split_by<'a, T>(mut slice: &'a mut [T], sizes: &[usize]) -> Vec<&'a mut [T]> {
    let mut parts = Vec::with_capacity(sizes.len());
    for &size in sizes {
        let (part, rest) = slice.split_at_mut(size);
        parts.push(part);
        slice = rest;
    }
    parts
}
