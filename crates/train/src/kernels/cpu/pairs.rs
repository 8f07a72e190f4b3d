//! Products of bf16: two neighbours along `k` travel together, in 32 bits.
//!
//! Processors that multiply bf16 do it in pairs: a lane takes two numbers of each side, and adds both products to an f32. Packed by pairs a
//! product is that of [`super::panel`] with half its depth; a pair takes the place of a number, and a sum of a row and a column is an f32 from its
//! first product to its last. What `k` lacks to a pair is zero.
//!
//! The crate's third piece of `unsafe`: the instruction itself. What makes it sound: it is reached only where the processor says that it has it, and it
//! reads whole vectors of slices whose lengths were checked.
#![allow(unsafe_code)]

use half::bf16;

use super::Cpu;
use super::gemm::split_by;
use super::panel::View;
use super::tile::{Tile, cut, tiles};

/// Two neighbours along k, the first in the low half.
type Pair = u32;

/// Rows and columns of a tile: 24 sums in registers, 2 of the right panel, 1 of the left.
const MR: usize = 12;
const NR: usize = 32;
/// Pairs of a block: a panel of the left side is about 18 KiB.
const DEPTH: usize = 384;
/// Bytes of the right side that stay in a second-level cache.
const RIGHT_BYTES: usize = 768 << 10;
/// Bytes of the right side that are packed at a time.
const BAND_BYTES: usize = 8 << 20;
/// Below this many multiplications waking another thread costs more than it brings.
const SERIAL: usize = 1 << 17;

/// Whether this processor multiplies bf16.
pub fn are_native() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512f")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// `sums = a * b`, or adds it, in f32, on a processor that multiplies bf16.
pub fn product(cpu: &Cpu<f32>, a: View<'_, bf16>, b: View<'_, bf16>, adds: bool, sums: &mut [f32]) {
    assert_eq!(a.cols, b.rows, "inner dims");
    assert_eq!(sums.len(), a.rows * b.cols, "the result's size");
    let (m, n, k) = (a.rows, b.cols, a.cols);
    if m == 0 || n == 0 {
        return;
    }
    let pairs = k.div_ceil(2);
    let threads = if m * n * k < SERIAL { 1 } else { cpu.threads.count() };
    // A band of columns at a time: what is packed of the right side stays small, however large that is.
    let widest = (BAND_BYTES / (pairs.max(1) * size_of::<Pair>())).max(1).next_multiple_of(NR);
    for first in (0..n).step_by(widest) {
        let cols = first..(first + widest).min(n);
        band(cpu, threads, a, b.col_range(cols.start, cols.len()), adds, (sums, n, cols));
    }
    if k == 0 && !adds {
        sums.fill(0.0);
    }
}

/// Some columns of a product: `out` is the whole result, how wide it is, and which columns these are.
fn band(
    cpu: &Cpu<f32>,
    threads: usize,
    a: View<'_, bf16>,
    b: View<'_, bf16>,
    adds: bool,
    (out, wide, place): (&mut [f32], usize, std::ops::Range<usize>),
) {
    let (m, n, pairs) = (a.rows, b.cols, a.cols.div_ceil(2));
    let blocks: Vec<_> = cut(pairs, pairs.div_ceil(DEPTH).max(1), 1);
    let width = n.next_multiple_of(NR);
    let mut right = cpu.take(width * pairs);
    {
        let right: &mut [Pair] = bytemuck::cast_slice_mut(&mut right);
        let mut jobs = Vec::new();
        let sizes: Vec<usize> = blocks.iter().map(|block| width * block.len()).collect();
        for (block, to) in blocks.iter().zip(split_by(right, &sizes)) {
            let cols = cut(n, threads, NR);
            let sizes: Vec<usize> =
                cols.iter().map(|cols| cols.len().next_multiple_of(NR) * block.len()).collect();
            let of_block = pairs_of(b.transposed(), block);
            for (cols, to) in cols.into_iter().zip(split_by(to, &sizes)) {
                jobs.push((of_block.row_range(cols.start, cols.len()), to));
            }
        }
        cpu.threads.each(jobs, |(from, to)| pack::<NR>(from, to));
    }
    let right: &[Pair] = bytemuck::cast_slice(&right);
    let rows = cut(m, 2 * threads, MR);
    let bands = tiles(out, wide, &rows, &[place]);
    let job = |(rows, mut band): (std::ops::Range<usize>, Tile<'_, f32>)| {
        let a = a.row_range(rows.start, rows.len());
        let mut left = cpu.take(rows.len().next_multiple_of(MR) * DEPTH.min(pairs));
        let left: &mut [Pair] = bytemuck::cast_slice_mut(&mut left);
        for block in &blocks {
            let left = &mut left[..rows.len().next_multiple_of(MR) * block.len()];
            pack::<MR>(pairs_of(a, block), left);
            let right = &right[width * block.start..][..width * block.len()];
            let cols = (RIGHT_BYTES / (block.len() * size_of::<Pair>())).max(1).next_multiple_of(NR);
            for first in (0..n).step_by(cols) {
                let cols = first..(first + cols).min(n);
                let right = &right[first * block.len()..];
                block_product(left, right, block.len(), &mut band, cols, adds || block.start > 0);
            }
        }
    };
    if threads == 1 {
        rows.into_iter().zip(bands).for_each(job);
    } else {
        cpu.threads.each(rows.into_iter().zip(bands), job);
    }
}

/// The columns of a block of pairs.
fn pairs_of<'a>(from: View<'a, bf16>, block: &std::ops::Range<usize>) -> View<'a, bf16> {
    let (start, end) = (2 * block.start, (2 * block.end).min(from.cols));
    from.col_range(start, end - start)
}

/// Packs rows into panels of `R`, by pairs of columns; what is lacking is zero.
fn pack<const R: usize>(from: View<'_, bf16>, to: &mut [Pair]) {
    let pairs = from.cols.div_ceil(2);
    if pairs == 0 {
        return;
    }
    for (p, panel) in to.chunks_exact_mut(R * pairs).enumerate() {
        let start = p * R;
        let rows = from.row_range(start.min(from.rows), R.min(from.rows.saturating_sub(start)));
        if rows.rows < R || from.cols % 2 == 1 {
            panel.fill(0);
        }
        if rows.col_stride == 1 {
            for r in 0..rows.rows {
                let row = &rows.data[r * rows.row_stride..][..rows.cols];
                let (whole, last) = row.as_chunks::<2>();
                for (out, pair) in panel[r..].iter_mut().step_by(R).zip(whole) {
                    *out = joined(pair[0], pair[1]);
                }
                if let [last] = last {
                    panel[(pairs - 1) * R + r] = joined(*last, bf16::ZERO);
                }
            }
        } else if rows.row_stride == 1 && rows.rows == R {
            // The panel's rows lie side by side: two of them are one row of pairs.
            for (k, out) in panel.chunks_exact_mut(R).enumerate() {
                let even = &rows.data[2 * k * rows.col_stride..][..R];
                if 2 * k + 1 < rows.cols {
                    let odd = &rows.data[(2 * k + 1) * rows.col_stride..][..R];
                    for (out, (even, odd)) in out.iter_mut().zip(even.iter().zip(odd)) {
                        *out = joined(*even, *odd);
                    }
                } else {
                    out.iter_mut().zip(even).for_each(|(out, even)| *out = joined(*even, bf16::ZERO));
                }
            }
        } else {
            let at = |r: usize, k: usize| rows.data[r * rows.row_stride + k * rows.col_stride];
            for (k, out) in panel.chunks_exact_mut(R).enumerate() {
                for (r, out) in out[..rows.rows].iter_mut().enumerate() {
                    let odd = if 2 * k + 1 < rows.cols { at(r, 2 * k + 1) } else { bf16::ZERO };
                    *out = joined(at(r, 2 * k), odd);
                }
            }
        }
    }
}

fn joined(low: bf16, high: bf16) -> Pair {
    u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16
}

/// `out[.., cols] = left * right`, or adds it, for packed operands of `depth` pairs.
fn block_product(
    left: &[Pair],
    right: &[Pair],
    depth: usize,
    out: &mut Tile<'_, f32>,
    cols: std::ops::Range<usize>,
    adds: bool,
) {
    for row in (0..out.rows()).step_by(MR) {
        let left = &left[row * depth..][..MR * depth];
        let rows = MR.min(out.rows() - row);
        for col in (0..cols.len()).step_by(NR) {
            let sums = tile(left, &right[col * depth..][..NR * depth]);
            let width = NR.min(cols.len() - col);
            for (r, sums) in sums.iter().enumerate().take(rows) {
                let at = cols.start + col;
                let out = out.row(row + r, at..at + width);
                match adds {
                    true => out.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum),
                    false => out.copy_from_slice(&sums[..width]),
                }
            }
        }
    }
}

/// A tile's sums, from the first pair to the last.
#[cfg(target_arch = "x86_64")]
fn tile(left: &[Pair], right: &[Pair]) -> [[f32; NR]; MR] {
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx512f,avx512bf16")]
    fn sums(left: &[[Pair; MR]], right: &[[Pair; NR]]) -> [[f32; NR]; MR] {
        let mut sums = [[_mm512_setzero_ps(); 2]; MR];
        for (left, right) in left.iter().zip(right) {
            // SAFETY: both halves of 32 pairs are whole vectors.
            let right = unsafe {
                [_mm512_loadu_si512(right.as_ptr().cast()), _mm512_loadu_si512(right[16..].as_ptr().cast())]
            };
            // SAFETY: both types are 512 bits that mean what whoever reads them says.
            let right: [__m512bh; 2] = unsafe { std::mem::transmute(right) };
            for (sums, &x) in sums.iter_mut().zip(left) {
                // SAFETY: as above.
                let x: __m512bh = unsafe { std::mem::transmute(_mm512_set1_epi32(x.cast_signed())) };
                sums[0] = _mm512_dpbf16_ps(sums[0], x, right[0]);
                sums[1] = _mm512_dpbf16_ps(sums[1], x, right[1]);
            }
        }
        // SAFETY: two vectors of 16 numbers are 32 numbers.
        unsafe { std::mem::transmute(sums) }
    }

    assert!(are_native(), "products of pairs need a processor that has them");
    // SAFETY: the processor has the instructions.
    unsafe { sums(left.as_chunks::<MR>().0, right.as_chunks::<NR>().0) }
}

#[cfg(not(target_arch = "x86_64"))]
fn tile(_: &[Pair], _: &[Pair]) -> [[f32; NR]; MR] {
    unreachable!("products of pairs need a processor that has them")
}
