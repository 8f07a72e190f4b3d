//! Convolutions by patches, sampling, joining.

use proptest::prelude::*;

use super::{assert_close, buf, cpu, dot, noise};
use crate::kernels::{Conv, Images, Kernels, Rows};

/// The patches under the kernel, pixel by pixel.
fn naive_patches(conv: &Conv, x: &[f64]) -> Vec<f64> {
    let mut patches = Vec::new();
    for (s, oy, ox) in places(conv.samples, conv.out_height(), conv.out_width()) {
        for (ky, kx, c) in places(conv.kernel, conv.kernel, conv.channels) {
            let y = (oy * conv.stride + ky) as i64 - conv.padding as i64;
            let x_at = (ox * conv.stride + kx) as i64 - conv.padding as i64;
            let inside = (0..conv.height as i64).contains(&y) && (0..conv.width as i64).contains(&x_at);
            let at = |y: usize, x: usize| ((s * conv.height + y) * conv.width + x) * conv.channels + c;
            patches.push(if inside { x[at(y as usize, x_at as usize)] } else { 0.0 });
        }
    }
    patches
}

fn places(a: usize, b: usize, c: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..a).flat_map(move |i| (0..b).flat_map(move |j| (0..c).map(move |k| (i, j, k))))
}

fn arb_conv() -> impl Strategy<Value = Conv> {
    (1usize..3, 1usize..7, 1usize..7, 1usize..4, 1usize..4, 1usize..3, 0usize..2).prop_map(
        |(samples, height, width, channels, kernel, stride, padding)| {
            let kernel = kernel.min(height + 2 * padding).min(width + 2 * padding);
            Conv { samples, height, width, channels, kernel, stride, padding }
        },
    )
}

proptest! {
    #[test]
    fn patches_and_their_adjoint(conv in arb_conv()) {
        let cpu = cpu();
        // One more sample in front, which is left alone.
        let image = conv.height * conv.width * conv.channels;
        let x = noise("x", (conv.samples + 1) * image);
        let mut y = cpu.buffer(conv.patches().len());
        cpu.patches(&conv, 1, &buf(&cpu, &x), &mut y);
        prop_assert_eq!(&y[..], &naive_patches(&conv, &x[image..])[..]);
        let dy = noise("dy", y.len());
        let mut dx = buf(&cpu, &x);
        cpu.patches_grad(&conv, 1, &buf(&cpu, &dy), &mut dx);
        prop_assert_eq!(&dx[..image], &x[..image]);
        // A linear map and its transpose: <A x, dy> = <x, A' dy>.
        let (left, right) = (dot(&y, &dy), dot(&x[image..], &dx[image..]));
        prop_assert!((left - right).abs() < 1e-10, "{left} {right}");
    }

    #[test]
    fn sampling_and_its_adjoint(samples in 1usize..3, height in 1usize..4, width in 1usize..4, channels in 1usize..4) {
        let cpu = cpu();
        let from = Images { samples, height, width, channels };
        let x = noise("x", from.len());
        let mut y = cpu.buffer(4 * from.len());
        cpu.upsample(from, &buf(&cpu, &x), &mut y);
        for (s, py, px) in places(samples, 2 * height, 2 * width) {
            for c in 0..channels {
                let big = ((s * 2 * height + py) * 2 * width + px) * channels + c;
                prop_assert_eq!(y[big], x[((s * height + py / 2) * width + px / 2) * channels + c]);
            }
        }
        let dy = noise("dy", y.len());
        let mut dx = cpu.buffer(x.len());
        cpu.upsample_grad(from, &buf(&cpu, &dy), &mut dx);
        prop_assert!((dot(&y, &dy) - dot(&x, &dx)).abs() < 1e-10);
    }

    #[test]
    fn columns_are_joined_and_split(rows in 0usize..5, a in 1usize..5, b in 1usize..5) {
        let cpu = cpu();
        let (left, right) = (noise("a", rows * a), noise("b", rows * b));
        let mut y = cpu.buffer(rows * (a + b));
        cpu.concat((&buf(&cpu, &left), a), (&buf(&cpu, &right), b), &mut y);
        for r in 0..rows {
            prop_assert_eq!(&y[r * (a + b)..][..a], &left[r * a..][..a]);
            prop_assert_eq!(&y[r * (a + b) + a..][..b], &right[r * b..][..b]);
        }
        let (mut p, mut q) = (cpu.buffer(rows * a), cpu.buffer(rows * b));
        cpu.split(&y, (&mut p, a), (&mut q, b));
        prop_assert_eq!((&p[..], &q[..]), (&left[..], &right[..]));
    }

    #[test]
    fn samples_get_their_own_summand(samples in 0usize..4, pixels in 1usize..5, cols in 1usize..5) {
        let cpu = cpu();
        let size = Rows { rows: samples * pixels, cols };
        let (x, e) = (noise("x", size.len()), noise("e", samples * cols));
        let mut y = buf(&cpu, &x);
        cpu.add_per_sample(pixels, size, &buf(&cpu, &e), &mut y);
        let of = |i: usize| e[i / (pixels * cols) * cols + i % cols];
        assert_close(&y, &x.iter().enumerate().map(|(i, x)| x + of(i)).collect::<Vec<_>>(), 1e-15);
        let mut de = cpu.buffer(e.len());
        cpu.add_per_sample_grad(pixels, size, &buf(&cpu, &x), &mut de);
        let spread: Vec<f64> = (0..x.len()).map(of).collect();
        prop_assert!((dot(&spread, &x) - dot(&e, &de)).abs() < 1e-10);
    }
}

#[test]
fn waves_of_time() {
    let cpu = cpu();
    let mut y = cpu.buffer(8);
    cpu.time_waves(&[0, 3], 4, &mut y);
    let slow = 3.0 * 0.01f64;
    assert_close(&y, &[0.0, 0.0, 1.0, 1.0, 3f64.sin(), slow.sin(), 3f64.cos(), slow.cos()], 1e-14);
}
