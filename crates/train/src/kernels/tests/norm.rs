//! Layer norm and group norm.

use proptest::prelude::*;

use super::{assert_close, assert_gradient, buf, cpu, dot, noise};
use crate::kernels::{BufSlice, GroupNorm, Kernels, NormGrad, NormSaved, NormWeights, Normed, Rows};

const EPSILON: f64 = 1e-3;

/// `groups` lists for every group of elements that are normalised together; `channel` the weight of an element.
fn naive(
    x: &[f64],
    gamma: &[f64],
    beta: &[f64],
    group: impl Fn(usize) -> usize,
    channel: impl Fn(usize) -> usize,
) -> Vec<f64> {
    let groups = (0..x.len()).map(&group).max().map_or(0, |g| g + 1);
    let mut members = vec![Vec::new(); groups];
    (0..x.len()).for_each(|i| members[group(i)].push(i));
    let mut y = vec![0.0; x.len()];
    for members in members {
        let n = members.len() as f64;
        let mean = members.iter().map(|&i| x[i]).sum::<f64>() / n;
        let variance = members.iter().map(|&i| (x[i] - mean).powi(2)).sum::<f64>() / n;
        for i in members {
            y[i] = (x[i] - mean) / (variance + EPSILON).sqrt() * gamma[channel(i)] + beta[channel(i)];
        }
    }
    y
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Layer(Rows),
    Group(GroupNorm),
}

impl Kind {
    fn len(self) -> usize {
        match self {
            Kind::Layer(size) => size.len(),
            Kind::Group(size) => size.samples * size.pixels * size.channels,
        }
    }

    fn channels(self) -> usize {
        match self {
            Kind::Layer(size) => size.cols,
            Kind::Group(size) => size.channels,
        }
    }

    fn stats(self) -> usize {
        match self {
            Kind::Layer(size) => 2 * size.rows,
            Kind::Group(size) => 2 * size.samples * size.groups,
        }
    }

    fn naive(self, x: &[f64], gamma: &[f64], beta: &[f64]) -> Vec<f64> {
        let channel = |i: usize| i % self.channels();
        match self {
            Kind::Layer(size) => naive(x, gamma, beta, |i| i / size.cols, channel),
            Kind::Group(size) => {
                let sample = |i: usize| i / (size.pixels * size.channels);
                let group = |i: usize| channel(i) / (size.channels / size.groups);
                naive(x, gamma, beta, |i| sample(i) * size.groups + group(i), channel)
            }
        }
    }
}

fn check(kind: Kind, with_residual: bool, differences: bool) {
    let cpu = cpu();
    let (len, channels) = (kind.len(), kind.channels());
    let x: Vec<f64> = noise("x", len).iter().map(|x| 3.0 * x + 5.0).collect();
    // Gamma behind a stranger, beta behind gamma: as weights lie in one buffer.
    let weights = noise("weights", 1 + 2 * channels);
    let (gamma, beta) = (weights[1..=channels].to_vec(), weights[1 + channels..].to_vec());
    let (flat, xs) = (buf(&cpu, &weights), buf(&cpu, &x));
    let (gamma_part, beta_part) =
        (BufSlice { buf: &flat, start: 1 }, BufSlice { buf: &flat, start: 1 + channels });
    let (mut y, mut stats) = (cpu.buffer(len), cpu.buffer(kind.stats()));
    let norm = NormWeights { gamma: gamma_part, beta: beta_part, epsilon: EPSILON };
    let out = Normed { y: &mut y, stats: &mut stats };
    match kind {
        Kind::Layer(size) => cpu.layer_norm(size, &xs, norm, out),
        Kind::Group(size) => cpu.group_norm(size, &xs, norm, out),
    }
    assert_close(&y, &kind.naive(&x, &gamma, &beta), 1e-12);

    let dy = noise("dy", len);
    let residual = noise("residual", len);
    let (mut dx, mut sums) = (cpu.buffer(len), cpu.buffer(2 * channels));
    let saved = NormSaved { x: &xs, stats: &stats, gamma: gamma_part };
    let residual_buf = buf(&cpu, &residual);
    let out = NormGrad { residual: with_residual.then_some(&residual_buf), dx: &mut dx, sums: &mut sums };
    match kind {
        Kind::Layer(size) => cpu.layer_norm_grad(size, saved, &buf(&cpu, &dy), out),
        Kind::Group(size) => cpu.group_norm_grad(size, saved, &buf(&cpu, &dy), out),
    }
    if differences {
        let extra = |x: &[f64]| if with_residual { dot(x, &residual) } else { 0.0 };
        assert_gradient(&x, &dx, |x| dot(&kind.naive(x, &gamma, &beta), &dy) + extra(x));
        assert_gradient(&gamma, &sums[..channels], |gamma| dot(&kind.naive(&x, gamma, &beta), &dy));
        assert_gradient(&beta, &sums[channels..], |beta| dot(&kind.naive(&x, &gamma, beta), &dy));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn layer_norm_and_its_gradient(rows in 0usize..6, cols in 1usize..40, residual: bool) {
        check(Kind::Layer(Rows { rows, cols }), residual, true);
    }

    #[test]
    fn group_norm_and_its_gradient(samples in 0usize..3, pixels in 1usize..5, groups in 1usize..4, each in 1usize..4, residual: bool) {
        check(Kind::Group(GroupNorm { samples, pixels, channels: groups * each, groups }), residual, true);
    }
}

/// More rows than a block of sums has, and more than one job.
#[test]
fn long_norms() {
    check(Kind::Layer(Rows { rows: 301, cols: 130 }), true, false);
    let cpu = cpu();
    let size = Rows { rows: 301, cols: 3 };
    let (x, dy, gamma) = (noise("x", size.len()), noise("dy", size.len()), [1.5, 2.5, 3.5]);
    let (xs, weights) = (buf(&cpu, &x), buf(&cpu, &gamma));
    let (mut y, mut stats) = (cpu.buffer(size.len()), cpu.buffer(2 * size.rows));
    let norm = NormWeights { gamma: (&weights).into(), beta: (&weights).into(), epsilon: EPSILON };
    cpu.layer_norm(size, &xs, norm, Normed { y: &mut y, stats: &mut stats });
    let (mut dx, mut sums) = (cpu.buffer(size.len()), cpu.buffer(6));
    let saved = NormSaved { x: &xs, stats: &stats, gamma: (&weights).into() };
    let out = NormGrad { residual: None, dx: &mut dx, sums: &mut sums };
    cpu.layer_norm_grad(size, saved, &buf(&cpu, &dy), out);
    let kind = Kind::Layer(size);
    assert_gradient(&x, &dx, |x| dot(&kind.naive(x, &gamma, &gamma), &dy));
    assert_gradient(&gamma, &sums[..3], |g| dot(&kind.naive(&x, g, &gamma), &dy));
}

/// Without a mean, and without a shift.
#[test]
fn rms_norm_and_its_gradient() {
    let cpu = cpu();
    for (rows, cols) in [(1, 1), (3, 5), (300, 17), (0, 4)] {
        let size = Rows { rows, cols };
        let x: Vec<f64> = noise("x", size.len()).iter().map(|x| 2.0 * x + 1.0).collect();
        let (weights, dy) = (noise("weights", 1 + cols), noise("dy", size.len()));
        let naive = |x: &[f64], gamma: &[f64]| -> Vec<f64> {
            let row = |x: &[f64]| {
                let factor = 1.0 / (dot(x, x) / cols as f64 + EPSILON).sqrt();
                x.iter().zip(gamma).map(|(x, gamma)| x * factor * gamma).collect::<Vec<f64>>()
            };
            x.chunks_exact(cols).flat_map(row).collect()
        };
        let (xs, flat) = (buf(&cpu, &x), buf(&cpu, &weights));
        let gamma = BufSlice { buf: &flat, start: 1 };
        let (mut y, mut stats) = (cpu.buffer(size.len()), cpu.buffer(rows));
        cpu.rms_norm(size, &xs, gamma, EPSILON, Normed { y: &mut y, stats: &mut stats });
        assert_close(&y, &naive(&x, &weights[1..]), 1e-12);
        let residual = buf(&cpu, &noise("residual", size.len()));
        let (mut dx, mut sums) = (cpu.buffer(size.len()), cpu.buffer(cols));
        let out = NormGrad { residual: Some(&residual), dx: &mut dx, sums: &mut sums };
        let saved = NormSaved { x: &xs, stats: &stats, gamma };
        cpu.rms_norm_grad(size, saved, &buf(&cpu, &dy), out);
        let own: Vec<f64> = dx.iter().zip(&residual[..]).map(|(dx, residual)| dx - residual).collect();
        if rows < 100 {
            assert_gradient(&x, &own, |x| dot(&naive(x, &weights[1..]), &dy));
            assert_gradient(&weights[1..], &sums, |gamma| dot(&naive(&x, gamma), &dy));
        }
    }
}
