//! What kernels should compute, in f64 and in the most obvious way.

/// Rows normalised: y, mean, rstd.
pub fn norm(x: &[f64], cols: usize, gamma: &[f64], beta: Option<&[f64]>, epsilon: f64) -> [Vec<f64>; 3] {
    let (mut y, mut means, mut scales) = (vec![], vec![], vec![]);
    for row in x.chunks(cols) {
        let n = cols as f64;
        let mean = if beta.is_some() { row.iter().sum::<f64>() / n } else { 0.0 };
        let spread = row.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / n;
        let scale = 1.0 / (spread + epsilon).sqrt();
        y.extend((0..cols).map(|i| (row[i] - mean) * scale * gamma[i] + beta.map_or(0.0, |beta| beta[i])));
        means.push(mean);
        scales.push(scale);
    }
    [y, means, scales]
}

/// Its gradients: dx, and the sums of gamma's and beta's.
pub fn norm_grad(
    x: &[f64],
    cols: usize,
    gamma: &[f64],
    stats: (&[f64], &[f64]),
    dy: &[f64],
    layer: bool,
) -> [Vec<f64>; 2] {
    let (mut dx, mut sums) = (vec![], vec![0.0; cols * if layer { 2 } else { 1 }]);
    for (r, (row, dy)) in x.chunks(cols).zip(dy.chunks(cols)).enumerate() {
        let (mean, scale, n) = (if layer { stats.0[r] } else { 0.0 }, stats.1[r], cols as f64);
        let hat: Vec<f64> = row.iter().map(|v| (v - mean) * scale).collect();
        let d: Vec<f64> = (0..cols).map(|i| dy[i] * gamma[i]).collect();
        let shift = if layer { d.iter().sum::<f64>() / n } else { 0.0 };
        let slope = (0..cols).map(|i| d[i] * hat[i]).sum::<f64>() / n;
        dx.extend((0..cols).map(|i| scale * (d[i] - shift - hat[i] * slope)));
        for i in 0..cols {
            sums[i] += dy[i] * hat[i];
            if layer {
                sums[cols + i] += dy[i];
            }
        }
    }
    [dx, sums]
}

pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + (0.797_884_560_802_865_4 * (x + 0.044_715 * x * x * x)).tanh())
}

pub fn gelu_slope(x: f64) -> f64 {
    let u = 0.797_884_560_802_865_4 * (x + 0.044_715 * x * x * x);
    let slope = 0.797_884_560_802_865_4 * (1.0 + 3.0 * 0.044_715 * x * x);
    0.5 * (1.0 + u.tanh()) + 0.5 * x * (1.0 - u.tanh() * u.tanh()) * slope
}

pub fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

pub fn silu_slope(x: f64) -> f64 {
    sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x)))
}

/// Philox 4x32-10, as it was published: the draw at an index.
pub fn draw(index: u64, key: [u32; 2], high: [u32; 2]) -> u32 {
    let (mut c, mut k) = ([index as u32 / 4, 0, high[0], high[1]], key);
    [c[0], c[1]] = [(index / 4) as u32, ((index / 4) >> 32) as u32];
    for _ in 0..10 {
        let (p, q) = (u64::from(c[0]) * 0xD251_1F53, u64::from(c[2]) * 0xCD9E_8D57);
        c = [(q >> 32) as u32 ^ c[1] ^ k[0], q as u32, (p >> 32) as u32 ^ c[3] ^ k[1], p as u32];
        k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
    }
    c[(index % 4) as usize]
}

/// Every row's loss, and the gradients of the logits, `stride` apart.
pub fn classifier(
    logits: &[f64],
    stride: usize,
    classes: usize,
    targets: &[i32],
    scale: f64,
) -> [Vec<f64>; 2] {
    let (mut losses, mut grads) = (vec![], vec![]);
    for (row, target) in logits.chunks(stride).zip(targets) {
        let most = row[..classes].iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row[..classes].iter().map(|x| (x - most).exp()).sum();
        let counts = if *target < 0 { 0.0 } else { scale };
        losses.push(if *target < 0 { 0.0 } else { sum.ln() + most - row[*target as usize] });
        grads.extend((0..stride).map(|i| match i < classes {
            true => counts * ((row[i] - most).exp() / sum - f64::from(i as i32 == *target)),
            false => 0.0,
        }));
    }
    [losses, grads]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_the_published_ones() {
        assert_eq!(draw(0, [0; 2], [0; 2]), 0x6627_e8d5);
        assert_eq!(draw(3, [0; 2], [0; 2]), 0x9b00_dbd8);
    }

    /// Slopes against differences.
    #[test]
    fn slopes_are_slopes() {
        for x in [-3.0, -0.7, 0.0, 0.4, 2.5] {
            let about = |f: fn(f64) -> f64| (f(x + 1e-6) - f(x - 1e-6)) / 2e-6;
            assert!((about(gelu) - gelu_slope(x)).abs() < 1e-8, "{x}");
            assert!((about(silu) - silu_slope(x)).abs() < 1e-8, "{x}");
        }
    }

    #[test]
    fn a_norms_gradient_is_its_slope() {
        let (cols, gamma, beta) = (3, [0.5, -1.0, 2.0], [0.1, 0.2, 0.3]);
        let (x, dy) = (vec![0.3, -1.2, 0.8, 2.0, 0.1, -0.4], vec![1.0, -0.5, 0.25, 0.7, 0.2, -1.1]);
        for layer in [true, false] {
            let beta = layer.then_some(&beta[..]);
            let loss = |x: &[f64]| {
                norm(x, cols, &gamma, beta, 1e-5)[0].iter().zip(&dy).map(|(y, d)| y * d).sum::<f64>()
            };
            let [_, mean, scale] = norm(&x, cols, &gamma, beta, 1e-5);
            let [dx, _] = norm_grad(&x, cols, &gamma, (&mean, &scale), &dy, layer);
            for i in 0..x.len() {
                let (mut up, mut down) = (x.clone(), x.clone());
                (up[i], down[i]) = (x[i] + 1e-6, x[i] - 1e-6);
                assert!(((loss(&up) - loss(&down)) / 2e-6 - dx[i]).abs() < 1e-7);
            }
        }
    }
}
