//! Every kernel against a slow obvious version, and every gradient against finite differences, in f64.
//!
//! f32 goes through the same code; it is compared with f64 where rounding could hide a mistake (the product, attention).

mod attention;
mod gemm;
mod image;
mod loss;
mod mixed;
mod norm;
mod pointwise;
mod update;

use super::Kernels;
use super::cpu::{Cpu, HostBuf};
use super::random::Stream;

pub type Buf = HostBuf<f64>;

/// Kernels to test with: an odd number of threads, so that jobs are not cut in halves only.
pub fn cpu() -> Cpu<f64> {
    Cpu::new(3)
}

/// Numbers around zero that are the same in every run.
pub fn noise(name: &str, len: usize) -> Vec<f64> {
    let stream = Stream::named(1, name);
    (0..len as u64).map(|i| stream.normal(i)).collect()
}

pub fn buf(cpu: &Cpu<f64>, values: &[f64]) -> Buf {
    cpu.upload(values)
}

#[track_caller]
pub fn assert_close(got: &[f64], wanted: &[f64], tolerance: f64) {
    assert_eq!(got.len(), wanted.len());
    let scale = wanted.iter().fold(1.0, |m: f64, x| m.max(x.abs()));
    for (i, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        assert!((got - wanted).abs() <= tolerance * scale, "element {i}: {got} instead of {wanted}");
    }
}

/// Compares a gradient with central differences of `f` at `x`.
#[track_caller]
pub fn assert_gradient(x: &[f64], gradient: &[f64], f: impl Fn(&[f64]) -> f64) {
    let step = 1e-5;
    let mut x = x.to_vec();
    let differences: Vec<f64> = (0..x.len())
        .map(|i| {
            let old = x[i];
            x[i] = old + step;
            let above = f(&x);
            x[i] = old - step;
            let below = f(&x);
            x[i] = old;
            (above - below) / (2.0 * step)
        })
        .collect();
    assert_close(gradient, &differences, 1e-7);
}

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
