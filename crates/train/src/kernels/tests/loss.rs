//! Losses, whole and in parts.

use proptest::prelude::*;

use super::{assert_close, assert_gradient, buf, cpu, noise};
use crate::kernels::cpu::Cpu;
use crate::kernels::{Classes, Kernels, Rows};

fn naive(logits: &[f64], classes: usize, targets: &[i32]) -> f64 {
    let row = |(x, &target): (&[f64], &i32)| {
        let max = x.iter().copied().fold(f64::MIN, f64::max);
        max + x.iter().map(|x| (x - max).exp()).sum::<f64>().ln() - x[target as usize]
    };
    logits.chunks(classes).zip(targets).map(row).sum()
}

/// What one rank would do, with `parts` ranks holding parts of the classes; sums and maxima taken across them by hand.
fn in_parts(
    cpu: &Cpu<f64>,
    logits: &[f64],
    classes: usize,
    targets: &[i32],
    parts: usize,
) -> (f64, Vec<f64>) {
    let rows = targets.len();
    let each = classes.div_ceil(parts);
    let held: Vec<_> = (0..parts).map(|p| (p * each).min(classes)..((p + 1) * each).min(classes)).collect();
    let mut shards: Vec<_> = held
        .iter()
        .map(|held| {
            let cols: Vec<f64> = logits.chunks(classes).flat_map(|row| row[held.clone()].to_vec()).collect();
            buf(cpu, &cols)
        })
        .collect();
    let mut max = vec![f64::MIN; rows];
    for (held, shard) in held.iter().zip(&shards) {
        let mut part = cpu.buffer(rows);
        cpu.row_max(Rows { rows, cols: held.len() }, shard, &mut part);
        max.iter_mut().zip(&part[..]).for_each(|(m, &p)| *m = m.max(p));
    }
    let (max, mut sums) = (buf(cpu, &max), vec![0.0; 2 * rows]);
    for (held, shard) in held.iter().zip(&mut shards) {
        let mut part = cpu.buffer(2 * rows);
        cpu.exp_sums(&Classes { rows, held: held.clone(), targets }, &max, shard, &mut part);
        sums.iter_mut().zip(&part[..]).for_each(|(s, &p)| *s += p);
    }
    let sums = buf(cpu, &sums);
    let mut gradient = vec![0.0; logits.len()];
    for (held, shard) in held.iter().zip(&mut shards) {
        cpu.cross_entropy_grad(&Classes { rows, held: held.clone(), targets }, &sums, 1.0, shard);
        for row in 0..rows {
            gradient[row * classes..][held.clone()].copy_from_slice(&shard[row * held.len()..][..held.len()]);
        }
    }
    (cpu.cross_entropy(rows, &sums), gradient)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn cross_entropy_in_any_number_of_parts(rows in 0usize..5, classes in 1usize..30, parts in 1usize..5) {
        let cpu = cpu();
        let logits: Vec<f64> = noise("logits", rows * classes).iter().map(|x| 5.0 * x).collect();
        let targets: Vec<i32> = (0..rows).map(|i| (i * 7 % classes) as i32).collect();
        let (loss, gradient) = in_parts(&cpu, &logits, classes, &targets, parts);
        prop_assert!((loss - naive(&logits, classes, &targets)).abs() < 1e-12 * (1.0 + loss));
        assert_gradient(&logits, &gradient, |logits| naive(logits, classes, &targets));
    }
}

#[test]
fn a_gradient_is_scaled() {
    let cpu = cpu();
    let classes = Classes { rows: 1, held: 0..3, targets: &[2] };
    let (max, mut x, mut sums) = (buf(&cpu, &[0.5]), buf(&cpu, &[0.1, 0.5, -0.5]), cpu.buffer(2));
    cpu.exp_sums(&classes, &max, &mut x, &mut sums);
    let mut y = buf(&cpu, &x);
    cpu.cross_entropy_grad(&classes, &sums, 1.0, &mut x);
    cpu.cross_entropy_grad(&classes, &sums, 0.25, &mut y);
    assert_close(&y, &x.iter().map(|x| x / 4.0).collect::<Vec<_>>(), 1e-15);
}

#[test]
fn squared_errors() {
    let cpu = cpu();
    let (x, target) = (noise("x", 33), noise("target", 33));
    let (xs, targets) = (buf(&cpu, &x), buf(&cpu, &target));
    let naive = |x: &[f64]| 0.5 * x.iter().zip(&target).map(|(x, t)| (x - t).powi(2)).sum::<f64>();
    assert!((0.5 * cpu.squared_error(&xs, &targets) - naive(&x)).abs() < 1e-12);
    let mut dx = cpu.buffer(33);
    cpu.squared_error_grad(&xs, &targets, 0.5, &mut dx);
    assert_gradient(&x, &dx, naive);
}
