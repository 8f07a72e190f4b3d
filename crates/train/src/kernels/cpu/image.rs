//! Images, `[samples, height, width, channels]`: patches for convolutions, sampling, joining.

use super::Cpu;
use crate::kernels::scalar::Scalar;
use crate::kernels::{Conv, Images, Rows};

impl<T: Scalar> Cpu<T> {
    /// A row of `y` for every pixel of the result: the pixels under the kernel, zero outside of the image.
    pub(super) fn gather_patches(&self, conv: &Conv, first: usize, x: &[T], y: &mut [T]) {
        let size = conv.patches();
        let image = conv.height * conv.width * conv.channels;
        let x = &x[first * image..][..conv.samples * image];
        let out_row = conv.out_width() * size.cols;
        assert_eq!(y.len(), size.len());
        if size.is_empty() {
            return;
        }
        self.threads.each(y.chunks_exact_mut(out_row).enumerate(), |(row, y)| {
            let (sample, oy) = (row / conv.out_height(), row % conv.out_height());
            let x = &x[sample * image..][..image];
            for (ox, patch) in y.chunks_exact_mut(size.cols).enumerate() {
                for (k, pixel) in patch.chunks_exact_mut(conv.channels).enumerate() {
                    match source(conv, (oy, ox), (k / conv.kernel, k % conv.kernel)) {
                        Some(at) => pixel.copy_from_slice(&x[at * conv.channels..][..conv.channels]),
                        None => pixel.fill(T::ZERO),
                    }
                }
            }
        });
    }

    /// Every pixel of an image gathers from the patches it was part of.
    pub(super) fn scatter_patches(&self, conv: &Conv, first: usize, dy: &[T], dx: &mut [T]) {
        let size = conv.patches();
        let row = conv.width * conv.channels;
        let image = conv.height * row;
        let dx = &mut dx[first * image..][..conv.samples * image];
        if dx.is_empty() {
            return;
        }
        self.threads.each(dx.chunks_exact_mut(row).enumerate(), |(i, dx)| {
            let (sample, y) = (i / conv.height, i % conv.height);
            dx.fill(T::ZERO);
            for (x, dx) in dx.chunks_exact_mut(conv.channels).enumerate() {
                for k in 0..conv.kernel * conv.kernel {
                    let (ky, kx) = (k / conv.kernel, k % conv.kernel);
                    let oy = result(conv, y, ky).filter(|&oy| oy < conv.out_height());
                    let ox = result(conv, x, kx).filter(|&ox| ox < conv.out_width());
                    if let (Some(oy), Some(ox)) = (oy, ox) {
                        let patch = (sample * conv.out_height() + oy) * conv.out_width() + ox;
                        let from = &dy[patch * size.cols + k * conv.channels..][..conv.channels];
                        dx.iter_mut().zip(from).for_each(|(dx, &dy)| *dx += dy);
                    }
                }
            }
        });
    }

    pub(super) fn double_pixels(&self, from: Images, x: &[T], y: &mut [T]) {
        let (row, wide) = (from.width * from.channels, 2 * from.width * from.channels);
        assert_eq!((x.len(), y.len()), (from.len(), 4 * from.len()));
        self.threads.each(y.chunks_exact_mut(wide).enumerate(), |(i, y)| {
            let (sample, line) = (i / (2 * from.height), i % (2 * from.height) / 2);
            let x = &x[(sample * from.height + line) * row..][..row];
            for (x, y) in x.chunks_exact(from.channels).zip(y.chunks_exact_mut(2 * from.channels)) {
                let (left, right) = y.split_at_mut(from.channels);
                left.copy_from_slice(x);
                right.copy_from_slice(x);
            }
        });
    }

    pub(super) fn sum_pixels(&self, from: Images, dy: &[T], dx: &mut [T]) {
        let (row, wide) = (from.width * from.channels, 2 * from.width * from.channels);
        assert_eq!((dx.len(), dy.len()), (from.len(), 4 * from.len()));
        self.threads.each(dx.chunks_exact_mut(row).zip(dy.chunks_exact(2 * wide)), |(dx, dy)| {
            let (upper, lower) = dy.split_at(wide);
            for (i, dx) in dx.iter_mut().enumerate() {
                let at = i / from.channels * 2 * from.channels + i % from.channels;
                let beside = at + from.channels;
                *dx = (upper[at] + upper[beside]) + (lower[at] + lower[beside]);
            }
        });
    }

    pub(super) fn join_columns(&self, a: (&[T], usize), b: (&[T], usize), y: &mut [T]) {
        let rows = a.0.chunks_exact(a.1).zip(b.0.chunks_exact(b.1));
        for ((from_a, from_b), y) in rows.zip(y.chunks_exact_mut(a.1 + b.1)) {
            y[..a.1].copy_from_slice(from_a);
            y[a.1..].copy_from_slice(from_b);
        }
    }

    pub(super) fn split_columns(&self, y: &[T], a: (&mut [T], usize), b: (&mut [T], usize)) {
        let rows = a.0.chunks_exact_mut(a.1).zip(b.0.chunks_exact_mut(b.1));
        for ((to_a, to_b), y) in rows.zip(y.chunks_exact(a.1 + b.1)) {
            to_a.copy_from_slice(&y[..a.1]);
            to_b.copy_from_slice(&y[a.1..]);
        }
    }

    pub(super) fn add_to_samples(&self, pixels: usize, size: Rows, e: &[T], x: &mut [T]) {
        if size.is_empty() {
            return;
        }
        let samples = x.chunks_exact_mut(pixels * size.cols).zip(e.chunks_exact(size.cols));
        self.threads.each(samples, |(x, e)| {
            for x in x.chunks_exact_mut(size.cols) {
                x.iter_mut().zip(e).for_each(|(x, &e)| *x += e);
            }
        });
    }

    pub(super) fn sum_samples(&self, pixels: usize, size: Rows, dx: &[T], de: &mut [T]) {
        if size.is_empty() {
            return;
        }
        let samples = dx.chunks_exact(pixels * size.cols).zip(de.chunks_exact_mut(size.cols));
        self.threads.each(samples, |(dx, de)| {
            de.fill(T::ZERO);
            for dx in dx.chunks_exact(size.cols) {
                de.iter_mut().zip(dx).for_each(|(de, &dx)| *de += dx);
            }
        });
    }
}

/// The pixel of the image that lies under a place of the kernel, if it is not padding.
fn source(conv: &Conv, out: (usize, usize), kernel: (usize, usize)) -> Option<usize> {
    let y = (out.0 * conv.stride + kernel.0).checked_sub(conv.padding).filter(|&y| y < conv.height)?;
    let x = (out.1 * conv.stride + kernel.1).checked_sub(conv.padding).filter(|&x| x < conv.width)?;
    Some(y * conv.width + x)
}

/// Where in the result the kernel lies when its place `k` is over a pixel: the other way round along one dim.
fn result(conv: &Conv, pixel: usize, k: usize) -> Option<usize> {
    let from = (pixel + conv.padding).checked_sub(k)?;
    (from % conv.stride == 0).then_some(from / conv.stride)
}

/// Sines and cosines of falling frequency, 1 to 1/10000.
pub(super) fn time_waves<T: Scalar>(steps: &[i32], dim: usize, y: &mut [T]) {
    let half = dim / 2;
    for (&step, y) in steps.iter().zip(y.chunks_exact_mut(dim)) {
        y.fill(T::ZERO);
        for i in 0..half {
            let frequency = 10_000f64.powf(-(i as f64) / half as f64);
            let (sin, cos) = (f64::from(step) * frequency).sin_cos();
            y[i] = T::from_f64(sin);
            y[half + i] = T::from_f64(cos);
        }
    }
}
