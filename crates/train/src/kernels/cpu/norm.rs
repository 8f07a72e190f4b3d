//! Layer norm, RMS norm and group norm.
//!
//! Sums for gamma and beta are taken over blocks of rows (or samples) of a fixed size and then in order, so they do not
//! depend on the number of threads.

use super::simd::{dot, dot3, sum, vectorized};
use super::{Cpu, HostBuf};
use crate::kernels::scalar::Scalar;
use crate::kernels::{GroupNorm, NormGrad, NormSaved, NormWeights, Normed, Rows};

/// Rows whose sums are taken together.
const BLOCK: usize = 128;

impl<T: Scalar> Cpu<T> {
    pub(super) fn norm_rows(
        &self,
        size: Rows,
        x: &[T],
        weights: NormWeights<'_, HostBuf<T>>,
        out: Normed<'_, HostBuf<T>>,
    ) {
        if size.is_empty() {
            return;
        }
        assert_eq!((x.len(), out.y.len(), out.stats.len()), (size.len(), size.len(), 2 * size.rows));
        let (gamma, beta) = affine(&weights, size.cols);
        let rows = self.chunk(size.len()).div_ceil(size.cols);
        let items = x.chunks(rows * size.cols);
        let items = items.zip(out.y.chunks_mut(rows * size.cols)).zip(out.stats.chunks_mut(2 * rows));
        self.threads.each(items, |((x, y), stats)| {
            let rows = x.chunks_exact(size.cols).zip(y.chunks_exact_mut(size.cols));
            for ((x, y), stats) in rows.zip(stats.chunks_exact_mut(2)) {
                let (mean, rstd) = norm_row(x, gamma, beta, weights.epsilon, y);
                stats.copy_from_slice(&[mean, rstd]);
            }
        });
    }

    pub(super) fn norm_rows_grad(
        &self,
        size: Rows,
        saved: NormSaved<'_, HostBuf<T>>,
        dy: &[T],
        out: NormGrad<'_, HostBuf<T>>,
    ) {
        let cols = size.cols;
        out.sums[..2 * cols].fill(T::ZERO);
        if size.is_empty() {
            return;
        }
        assert_eq!((saved.x.len(), dy.len(), out.dx.len()), (size.len(), size.len(), size.len()));
        let gamma = &saved.gamma.buf[saved.gamma.start..][..cols];
        let mut partial = self.take(size.rows.div_ceil(BLOCK) * 2 * cols);
        let blocks = saved.x.chunks(BLOCK * cols).zip(saved.stats.chunks(2 * BLOCK));
        let blocks = blocks.zip(dy.chunks(BLOCK * cols)).zip(out.dx.chunks_mut(BLOCK * cols));
        let blocks = blocks.zip(partial.chunks_mut(2 * cols)).enumerate();
        self.threads.each(blocks, |(b, ((((x, stats), dy), dx), sums))| {
            sums.fill(T::ZERO);
            let (dgamma, dbeta) = sums.split_at_mut(cols);
            let rows = x.chunks_exact(cols).zip(stats.chunks_exact(2));
            let rows = rows.zip(dy.chunks_exact(cols)).zip(dx.chunks_exact_mut(cols)).enumerate();
            for (r, (((x, stats), dy), dx)) in rows {
                let row = GradRow { x, dy, gamma, mean: stats[0], rstd: stats[1] };
                match out.residual {
                    Some(residual) => dx.copy_from_slice(&residual[(b * BLOCK + r) * cols..][..cols]),
                    None => dx.fill(T::ZERO),
                }
                norm_row_grad(row, dx, dgamma, dbeta);
            }
        });
        for block in partial.chunks_exact(2 * cols) {
            self.add_into(block, &mut out.sums[..2 * cols]);
        }
    }

    pub(super) fn rms_rows(
        &self,
        size: Rows,
        x: &[T],
        gamma: &[T],
        epsilon: f64,
        out: Normed<'_, HostBuf<T>>,
    ) {
        if size.is_empty() {
            return;
        }
        assert_eq!((x.len(), out.y.len(), out.stats.len()), (size.len(), size.len(), size.rows));
        let rows = self.chunk(size.len()).div_ceil(size.cols);
        let items = x.chunks(rows * size.cols);
        let items = items.zip(out.y.chunks_mut(rows * size.cols)).zip(out.stats.chunks_mut(rows));
        self.threads.each(items, |((x, y), stats)| {
            let rows = x.chunks_exact(size.cols).zip(y.chunks_exact_mut(size.cols));
            for ((x, y), factor) in rows.zip(stats) {
                *factor = rms_row(x, gamma, epsilon, y);
            }
        });
    }

    pub(super) fn rms_rows_grad(
        &self,
        size: Rows,
        saved: NormSaved<'_, HostBuf<T>>,
        dy: &[T],
        out: NormGrad<'_, HostBuf<T>>,
    ) {
        let cols = size.cols;
        out.sums[..cols].fill(T::ZERO);
        if size.is_empty() {
            return;
        }
        assert_eq!((saved.x.len(), dy.len(), out.dx.len()), (size.len(), size.len(), size.len()));
        let gamma = &saved.gamma.buf[saved.gamma.start..][..cols];
        let mut partial = self.take(size.rows.div_ceil(BLOCK) * cols);
        let blocks = saved.x.chunks(BLOCK * cols).zip(saved.stats.chunks(BLOCK));
        let blocks = blocks.zip(dy.chunks(BLOCK * cols)).zip(out.dx.chunks_mut(BLOCK * cols));
        let blocks = blocks.zip(partial.chunks_mut(cols)).enumerate();
        self.threads.each(blocks, |(b, ((((x, stats), dy), dx), dgamma))| {
            dgamma.fill(T::ZERO);
            let rows = x.chunks_exact(cols).zip(stats);
            let rows = rows.zip(dy.chunks_exact(cols)).zip(dx.chunks_exact_mut(cols)).enumerate();
            for (r, (((x, &rstd), dy), dx)) in rows {
                match out.residual {
                    Some(residual) => dx.copy_from_slice(&residual[(b * BLOCK + r) * cols..][..cols]),
                    None => dx.fill(T::ZERO),
                }
                rms_row_grad(GradRow { x, dy, gamma, mean: T::ZERO, rstd }, dx, dgamma);
            }
        });
        for block in partial.chunks_exact(cols) {
            self.add_into(block, &mut out.sums[..cols]);
        }
    }

    pub(super) fn norm_groups(
        &self,
        size: GroupNorm,
        x: &[T],
        weights: NormWeights<'_, HostBuf<T>>,
        out: Normed<'_, HostBuf<T>>,
    ) {
        let sample = size.pixels * size.channels;
        if size.samples * sample == 0 {
            return;
        }
        let (gamma, beta) = affine(&weights, size.channels);
        let items = x.chunks_exact(sample).zip(out.y.chunks_exact_mut(sample));
        let items = items.zip(out.stats.chunks_exact_mut(2 * size.groups));
        self.threads.each(items, |((x, y), stats)| {
            group_stats(size, x, weights.epsilon, stats);
            let (scale, shift) = group_affine(size, stats, gamma, beta);
            for (x, y) in x.chunks_exact(size.channels).zip(y.chunks_exact_mut(size.channels)) {
                scale_shift(x, &scale, &shift, y);
            }
        });
    }

    pub(super) fn norm_groups_grad(
        &self,
        size: GroupNorm,
        saved: NormSaved<'_, HostBuf<T>>,
        dy: &[T],
        out: NormGrad<'_, HostBuf<T>>,
    ) {
        let (sample, channels) = (size.pixels * size.channels, size.channels);
        out.sums[..2 * channels].fill(T::ZERO);
        if size.samples * sample == 0 {
            return;
        }
        let gamma = &saved.gamma.buf[saved.gamma.start..][..channels];
        let mut partial = self.take(size.samples * 2 * channels);
        let items = saved.x.chunks_exact(sample).zip(saved.stats.chunks_exact(2 * size.groups));
        let items = items.zip(dy.chunks_exact(sample)).zip(out.dx.chunks_exact_mut(sample));
        let items = items.zip(partial.chunks_exact_mut(2 * channels)).enumerate();
        self.threads.each(items, |(i, ((((x, stats), dy), dx), sums))| {
            match out.residual {
                Some(residual) => dx.copy_from_slice(&residual[i * sample..][..sample]),
                None => dx.fill(T::ZERO),
            }
            group_grad(size, GroupSample { x, stats, gamma }, dy, dx, sums);
        });
        for sample in partial.chunks_exact(2 * channels) {
            self.add_into(sample, &mut out.sums[..2 * channels]);
        }
    }
}

fn affine<'a, T>(weights: &NormWeights<'a, HostBuf<T>>, cols: usize) -> (&'a [T], &'a [T]) {
    let part = |p: crate::kernels::BufSlice<'a, HostBuf<T>>| &p.buf[p.start..][..cols];
    (part(weights.gamma), part(weights.beta))
}

vectorized! {
    fn norm_row<T>(x: &'a [T], gamma: &'a [T], beta: &'a [T], epsilon: f64, y: &'a mut [T]) -> (T, T) {
        let inverse = T::from_f64(1.0 / x.len() as f64);
        let mean = sum(x, |x| x) * inverse;
        let variance = sum(x, |x| (x - mean) * (x - mean)) * inverse;
        let rstd = T::ONE / (variance + T::from_f64(epsilon)).sqrt();
        for ((y, &x), (&gamma, &beta)) in y.iter_mut().zip(x).zip(gamma.iter().zip(beta)) {
            *y = (x - mean) * rstd * gamma + beta;
        }
        (mean, rstd)
    }
}

/// One row of a norm's gradient.
struct GradRow<'a, T> {
    x: &'a [T],
    dy: &'a [T],
    gamma: &'a [T],
    mean: T,
    rstd: T,
}

vectorized! {
    /// Adds to `dx` the gradient of a row, and to the sums what gamma and beta get from it.
    fn norm_row_grad<T>(row: GradRow<'a, T>, dx: &'a mut [T], dgamma: &'a mut [T], dbeta: &'a mut [T]) {
        let GradRow { x, dy, gamma, mean, rstd } = row;
        let inverse = T::from_f64(1.0 / x.len() as f64);
        let columns = dgamma.iter_mut().zip(dbeta.iter_mut()).zip(x.iter().zip(dy));
        for ((dgamma, dbeta), (&x, &dy)) in columns {
            *dgamma += dy * (x - mean) * rstd;
            *dbeta += dy;
        }
        let mean_g = dot(dy, gamma, |dy, gamma| dy * gamma) * inverse;
        let mean_gx = dot3(x, dy, gamma, |x, dy, gamma| dy * gamma * (x - mean)) * rstd * inverse;
        for (dx, ((&x, &dy), &gamma)) in dx.iter_mut().zip(x.iter().zip(dy).zip(gamma)) {
            *dx += rstd * (dy * gamma - mean_g - (x - mean) * rstd * mean_gx);
        }
    }
}

vectorized! {
    fn rms_row<T>(x: &'a [T], gamma: &'a [T], epsilon: f64, y: &'a mut [T]) -> T {
        let inverse = T::from_f64(1.0 / x.len() as f64);
        let factor = T::ONE / (sum(x, |x| x * x) * inverse + T::from_f64(epsilon)).sqrt();
        for ((y, &x), &gamma) in y.iter_mut().zip(x).zip(gamma) {
            *y = x * factor * gamma;
        }
        factor
    }
}

vectorized! {
    /// The same without a mean: its gradient lacks the terms that come from one.
    fn rms_row_grad<T>(row: GradRow<'a, T>, dx: &'a mut [T], dgamma: &'a mut [T]) {
        let GradRow { x, dy, gamma, rstd, .. } = row;
        let inverse = T::from_f64(1.0 / x.len() as f64);
        for (dgamma, (&x, &dy)) in dgamma.iter_mut().zip(x.iter().zip(dy)) {
            *dgamma += dy * x * rstd;
        }
        let mean_gx = dot3(x, dy, gamma, |x, dy, gamma| dy * gamma * x) * rstd * inverse;
        for (dx, ((&x, &dy), &gamma)) in dx.iter_mut().zip(x.iter().zip(dy).zip(gamma)) {
            *dx += rstd * (dy * gamma - x * rstd * mean_gx);
        }
    }
}

/// Mean and 1/deviation of every group of a sample.
fn group_stats<T: Scalar>(size: GroupNorm, x: &[T], epsilon: f64, stats: &mut [T]) {
    let per_group = size.channels / size.groups;
    let inverse = T::from_f64(1.0 / (size.pixels * per_group) as f64);
    let mut sums = vec![T::ZERO; size.channels];
    for x in x.chunks_exact(size.channels) {
        add_row(x, &mut sums);
    }
    let mut means = vec![T::ZERO; size.channels];
    for (group, sums) in sums.chunks_exact(per_group).enumerate() {
        let mean = sums.iter().copied().sum::<T>() * inverse;
        stats[2 * group] = mean;
        means[group * per_group..][..per_group].fill(mean);
    }
    sums.fill(T::ZERO);
    for x in x.chunks_exact(size.channels) {
        add_squares(x, &means, &mut sums);
    }
    for (group, sums) in sums.chunks_exact(per_group).enumerate() {
        let variance = sums.iter().copied().sum::<T>() * inverse;
        stats[2 * group + 1] = T::ONE / (variance + T::from_f64(epsilon)).sqrt();
    }
}

/// The norm of a sample as one factor and one summand for every channel.
fn group_affine<T: Scalar>(size: GroupNorm, stats: &[T], gamma: &[T], beta: &[T]) -> (Vec<T>, Vec<T>) {
    let per_group = size.channels / size.groups;
    let channel = |c: usize| {
        let (mean, rstd) = (stats[2 * (c / per_group)], stats[2 * (c / per_group) + 1]);
        (rstd * gamma[c], beta[c] - mean * rstd * gamma[c])
    };
    (0..size.channels).map(channel).unzip()
}

/// A sample, for its gradient.
struct GroupSample<'a, T> {
    x: &'a [T],
    stats: &'a [T],
    gamma: &'a [T],
}

fn group_grad<T: Scalar>(
    size: GroupNorm,
    sample: GroupSample<'_, T>,
    dy: &[T],
    dx: &mut [T],
    sums: &mut [T],
) {
    let (channels, per_group) = (size.channels, size.channels / size.groups);
    let inverse = T::from_f64(1.0 / (size.pixels * per_group) as f64);
    let stat = |c: usize, which: usize| sample.stats[2 * (c / per_group) + which];
    let means: Vec<T> = (0..channels).map(|c| stat(c, 0)).collect();
    let rstds: Vec<T> = (0..channels).map(|c| stat(c, 1)).collect();
    sums.fill(T::ZERO);
    let (dgamma, dbeta) = sums.split_at_mut(channels);
    for (x, dy) in sample.x.chunks_exact(channels).zip(dy.chunks_exact(channels)) {
        add_channel_grads(ChannelRow { x, dy, means: &means, rstds: &rstds }, dgamma, dbeta);
    }
    // dx = factor * dy - a - b * x for every channel.
    let mut factors = vec![T::ZERO; channels];
    let (mut a, mut b) = (vec![T::ZERO; channels], vec![T::ZERO; channels]);
    for group in 0..size.groups {
        let range = group * per_group..(group + 1) * per_group;
        let weigh = |s: &[T]| range.clone().map(|c| sample.gamma[c] * s[c]).sum::<T>() * inverse;
        let (mean_g, mean_gx) = (weigh(dbeta), weigh(dgamma));
        for c in range.clone() {
            factors[c] = rstds[c] * sample.gamma[c];
            b[c] = rstds[c] * rstds[c] * mean_gx;
            a[c] = rstds[c] * mean_g - b[c] * means[c];
        }
    }
    let pixels = sample.x.chunks_exact(channels).zip(dy.chunks_exact(channels));
    for ((x, dy), dx) in pixels.zip(dx.chunks_exact_mut(channels)) {
        add_input_grads(InputRow { x, dy, factors: &factors, a: &a, b: &b }, dx);
    }
}

vectorized! {
    fn add_row<T>(x: &'a [T], sums: &'a mut [T]) {
        for (sum, &x) in sums.iter_mut().zip(x) {
            *sum += x;
        }
    }
}

vectorized! {
    fn add_squares<T>(x: &'a [T], means: &'a [T], sums: &'a mut [T]) {
        for (sum, (&x, &mean)) in sums.iter_mut().zip(x.iter().zip(means)) {
            *sum += (x - mean) * (x - mean);
        }
    }
}

vectorized! {
    fn scale_shift<T>(x: &'a [T], scale: &'a [T], shift: &'a [T], y: &'a mut [T]) {
        for ((y, &x), (&scale, &shift)) in y.iter_mut().zip(x).zip(scale.iter().zip(shift)) {
            *y = x * scale + shift;
        }
    }
}

/// A pixel, for the gradients of gamma and beta.
struct ChannelRow<'a, T> {
    x: &'a [T],
    dy: &'a [T],
    means: &'a [T],
    rstds: &'a [T],
}

vectorized! {
    fn add_channel_grads<T>(row: ChannelRow<'a, T>, dgamma: &'a mut [T], dbeta: &'a mut [T]) {
        let sums = dgamma.iter_mut().zip(dbeta);
        let columns = row.x.iter().zip(row.dy).zip(row.means.iter().zip(row.rstds));
        for ((dgamma, dbeta), ((&x, &dy), (&mean, &rstd))) in sums.zip(columns) {
            *dgamma += dy * (x - mean) * rstd;
            *dbeta += dy;
        }
    }
}

/// A pixel, for the gradient of the input.
struct InputRow<'a, T> {
    x: &'a [T],
    dy: &'a [T],
    factors: &'a [T],
    a: &'a [T],
    b: &'a [T],
}

vectorized! {
    fn add_input_grads<T>(row: InputRow<'a, T>, dx: &'a mut [T]) {
        let columns = row.x.iter().zip(row.dy).zip(row.factors).zip(row.a.iter().zip(row.b));
        for (dx, (((&x, &dy), &factor), (&a, &b))) in dx.iter_mut().zip(columns) {
            *dx += factor * dy - a - b * x;
        }
    }
}
