//! Panels: a matrix copied into the order in which a product reads it.
//!
//! The innermost loop of a product holds a tile of the result in registers, `MR` rows by `NR` columns, and walks
//! along `k`. Packed, both operands are read front to back, whatever their strides were (powers of two among them, which would
//! otherwise fight for the same lines of a cache):
//!
//! ```text
//! left, MR = 2                right, NR = 3
//! a00 a01 a02      panel 0: a00 a10 a01 a11 a02 a12      b00 b01 b02 | b03 ..    panel 0: b00 b01 b02 b10 b11 b12
//! a10 a11 a12      panel 1: a20  0  a21  0  a22  0       b10 b11 b12 | b13 ..    panel 1: b03 ..
//! a20 a21 a22
//! ```

use pulp::{Simd, WithSimd};

use super::tile::Tile;
use crate::kernels::scalar::Scalar;

/// A matrix somewhere in memory.
#[derive(Debug, Clone, Copy)]
pub struct View<'a, T> {
    pub data: &'a [T],
    pub rows: usize,
    pub cols: usize,
    pub row_stride: usize,
    pub col_stride: usize,
}

impl<'a, T> View<'a, T> {
    /// Row after row, with `stride` elements from one to the next.
    pub fn rows_of(data: &'a [T], rows: usize, cols: usize, stride: usize) -> Self {
        Self { data, rows, cols, row_stride: stride, col_stride: 1 }
    }

    pub fn transposed(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }

    /// Some of its rows.
    pub fn row_range(self, start: usize, len: usize) -> Self {
        assert!(start + len <= self.rows);
        let at = (start * self.row_stride).min(self.data.len());
        Self { data: &self.data[at..], rows: len, ..self }
    }

    /// Some of its columns.
    pub fn col_range(self, start: usize, len: usize) -> Self {
        self.transposed().row_range(start, len).transposed()
    }
}

/// The tile that this machine's registers hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    pub mr: usize,
    pub nr: usize,
}

/// Vector registers side by side in a row of the tile.
const WIDTH: usize = 2;
/// Rows of the tile with 32 registers: 24 sums, 2 of the right panel, 1 of the left.
const TALL: usize = 12;
/// Rows with 16 registers.
const LOW: usize = 6;
/// The most columns a tile can have.
const MAX_NR: usize = 64;

impl Geometry {
    pub fn of<T: Scalar>() -> Self {
        struct Of<T>(std::marker::PhantomData<T>);
        impl<T: Scalar> WithSimd for Of<T> {
            type Output = Geometry;
            #[inline(always)]
            fn with_simd<S: Simd>(self, _: S) -> Geometry {
                Geometry { mr: if S::REGISTER_COUNT >= 32 { TALL } else { LOW }, nr: WIDTH * T::lanes::<S>() }
            }
        }
        pulp::Arch::new().dispatch(Of::<T>(std::marker::PhantomData))
    }

    /// Elements of `rows` packed rows of `k`.
    pub fn left_len(self, rows: usize, k: usize) -> usize {
        rows.next_multiple_of(self.mr) * k
    }

    /// Elements of `cols` packed columns of `k`.
    pub fn right_len(self, cols: usize, k: usize) -> usize {
        cols.next_multiple_of(self.nr) * k
    }

    /// Packs the left operand: panels of `mr` rows.
    pub fn pack_left<T: Scalar>(self, from: View<'_, T>, to: &mut [T]) {
        pack(from, self.mr, to);
    }

    /// Packs the right operand: panels of `nr` columns.
    pub fn pack_right<T: Scalar>(self, from: View<'_, T>, to: &mut [T]) {
        pack(from.transposed(), self.nr, to);
    }
}

/// Packs rows into panels of `width`; what a last panel lacks is zero.
fn pack<T: Scalar>(from: View<'_, T>, width: usize, to: &mut [T]) {
    if from.cols == 0 {
        return;
    }
    for (p, panel) in to.chunks_exact_mut(width * from.cols).enumerate() {
        let start = p * width;
        if start >= from.rows {
            break;
        }
        let rows = from.row_range(start, width.min(from.rows - start));
        match width {
            32 => pack_panel::<T, 32>(rows, panel),
            16 => pack_panel::<T, 16>(rows, panel),
            12 => pack_panel::<T, 12>(rows, panel),
            8 => pack_panel::<T, 8>(rows, panel),
            6 => pack_panel::<T, 6>(rows, panel),
            4 => pack_panel::<T, 4>(rows, panel),
            2 => pack_panel::<T, 2>(rows, panel),
            _ => unreachable!("no tile is {width} wide"),
        }
    }
}

fn pack_panel<T: Scalar, const R: usize>(rows: View<'_, T>, panel: &mut [T]) {
    if rows.rows < R {
        panel.fill(T::ZERO);
    }
    if rows.rows == R && rows.row_stride == 1 {
        // The panel's rows lie side by side: copy them in one piece.
        for (k, out) in panel.chunks_exact_mut(R).enumerate() {
            let at = k * rows.col_stride;
            out.copy_from_slice(&rows.data[at..at + R]);
        }
    } else if rows.col_stride == 1 {
        for r in 0..rows.rows {
            let at = r * rows.row_stride;
            let row = &rows.data[at..at + rows.cols];
            panel[r..].iter_mut().step_by(R).zip(row).for_each(|(out, &x)| *out = x);
        }
    } else {
        for (k, out) in panel.chunks_exact_mut(R).enumerate() {
            for (r, out) in out[..rows.rows].iter_mut().enumerate() {
                *out = rows.data[r * rows.row_stride + k * rows.col_stride];
            }
        }
    }
}

/// What becomes of the product of two packed operands.
#[derive(Debug, Clone, Copy)]
pub struct Update<'a, T> {
    pub alpha: T,
    /// What was there counts this much; at zero it is not read.
    pub beta: T,
    /// Added to every row.
    pub bias: Option<&'a [T]>,
}

impl<T: Scalar> Update<'_, T> {
    pub const WRITE: Self = Update { alpha: T::ONE, beta: T::ZERO, bias: None };
    pub const ADD: Self = Update { alpha: T::ONE, beta: T::ONE, bias: None };
}

/// `out[.., first_col..][cols] = alpha * left * right + beta * out + bias`, for packed operands of depth `k`.
pub struct Multiply<'a, 'b, T> {
    pub left: &'a [T],
    pub right: &'a [T],
    pub k: usize,
    pub update: Update<'a, T>,
    pub out: &'a mut Tile<'b, T>,
    pub first_col: usize,
    pub cols: usize,
}

impl<T: Scalar> Multiply<'_, '_, T> {
    pub fn run(self) {
        pulp::Arch::new().dispatch(self);
    }
}

impl<T: Scalar> WithSimd for Multiply<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        if S::REGISTER_COUNT >= 32 {
            self.tiles::<S, TALL>(simd);
        } else {
            self.tiles::<S, LOW>(simd);
        }
    }
}

impl<T: Scalar> Multiply<'_, '_, T> {
    #[inline(always)]
    fn tiles<S: Simd, const MR: usize>(self, simd: S) {
        let nr = WIDTH * T::lanes::<S>();
        let Self { left, right, k, update, out, first_col, cols } = self;
        for row in (0..out.rows()).step_by(MR) {
            let left = &left[row * k..][..MR * k];
            let rows = MR.min(out.rows() - row);
            for col in (0..cols).step_by(nr) {
                let right = &right[col * k..][..nr * k];
                let sums = product::<S, T, MR>(simd, left, right);
                let bias = update.bias.map(|bias| &bias[first_col + col..][..nr.min(cols - col)]);
                let width = nr.min(cols - col);
                for (r, sums) in sums.iter().enumerate().take(rows) {
                    let at = first_col + col;
                    let out = out.row(row + r, at..at + width);
                    if width == nr {
                        store(simd, sums, update, bias, T::as_lanes_mut::<S>(out));
                    } else {
                        store_part(simd, sums, update, bias, out);
                    }
                }
            }
        }
    }
}

/// The innermost loop: a tile's sums, in registers from the first `k` to the last.
#[inline(always)]
fn product<S: Simd, T: Scalar, const MR: usize>(
    simd: S,
    left: &[T],
    right: &[T],
) -> [[T::Lanes<S>; WIDTH]; MR] {
    let mut sums = [[T::splat(simd, T::ZERO); WIDTH]; MR];
    let left = left.as_chunks::<MR>().0;
    let right = T::as_lanes::<S>(right).as_chunks::<WIDTH>().0;
    for (left, right) in left.iter().zip(right) {
        for (sums, &x) in sums.iter_mut().zip(left) {
            let x = T::splat(simd, x);
            for (sum, &y) in sums.iter_mut().zip(right) {
                *sum = T::fma(simd, x, y, *sum);
            }
        }
    }
    sums
}

#[inline(always)]
fn store<S: Simd, T: Scalar>(
    simd: S,
    sums: &[T::Lanes<S>; WIDTH],
    update: Update<'_, T>,
    bias: Option<&[T]>,
    out: &mut [T::Lanes<S>],
) {
    let (alpha, beta) = (T::splat(simd, update.alpha), T::splat(simd, update.beta));
    let zero = T::splat(simd, T::ZERO);
    let bias = bias.map(T::as_lanes::<S>);
    for (i, (out, &sum)) in out.iter_mut().zip(sums).enumerate() {
        let base = bias.map_or(zero, |bias| bias[i]);
        let base = if update.beta == T::ZERO { base } else { T::fma(simd, beta, *out, base) };
        *out = T::fma(simd, alpha, sum, base);
    }
}

/// The last columns, fewer than a tile has.
#[inline(always)]
fn store_part<S: Simd, T: Scalar>(
    simd: S,
    sums: &[T::Lanes<S>; WIDTH],
    update: Update<'_, T>,
    bias: Option<&[T]>,
    out: &mut [T],
) {
    let nr = WIDTH * T::lanes::<S>();
    let (mut wide, mut wide_bias) = ([T::ZERO; MAX_NR], [T::ZERO; MAX_NR]);
    wide[..out.len()].copy_from_slice(out);
    if let Some(bias) = bias {
        wide_bias[..out.len()].copy_from_slice(bias);
    }
    store(simd, sums, update, bias.map(|_| &wide_bias[..nr]), T::as_lanes_mut::<S>(&mut wide[..nr]));
    out.copy_from_slice(&wide[..out.len()]);
}
