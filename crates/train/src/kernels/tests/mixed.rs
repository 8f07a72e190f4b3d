//! bf16 beside f64, from the same rounded inputs: every kernel.

use half::bf16;

use super::super::battery::{self, Kind, Models, Outcome, Rounding};
use crate::kernels::cpu::{Cpu, CpuBf16};
use crate::kernels::{Buffer as _, Gemm, Kernels};

fn seeds() -> u64 {
    crossmesh_testkit::sweep::count(6) as u64
}

/// On the host attention computes in f32 and rounds its result once: that is held to a unit, as all else is. (Devices may round scores for their products, and are held
/// norm-wise.) Its gradients are not: they are sums of products with differences that cancel, of which f32 keeps as much as of the terms, not of the sums.
fn rounded_once(mut outcome: Outcome) -> Outcome {
    if outcome.name.starts_with("attention")
        && !outcome.name.contains("gradient")
        && !outcome.name.contains("lse")
    {
        outcome.kind = Kind::Elems;
    }
    outcome
}

fn hold<K: Kernels>(kernels: &K, rounding: Rounding) {
    let exact = Cpu::<f64>::new(1);
    for seed in 0..seeds() {
        let got = battery::run(kernels, rounding, Models::All, seed);
        let got: Vec<Outcome> = got.into_iter().map(rounded_once).collect();
        assert!(got.iter().filter(|o| o.name.starts_with("attention") && o.kind == Kind::Elems).count() >= 5);
        let wanted = battery::run(&exact, rounding, Models::All, seed);
        for (name, error) in battery::compare(&got, &wanted, rounding) {
            assert!(error <= 1.0, "seed {seed}, {name}: {error} of what it may be off");
        }
    }
}

#[test]
fn every_kernel_is_within_a_unit_of_bf16() {
    hold(&CpuBf16::new(3), Rounding::Bf16);
    hold(&CpuBf16::without_pairs(2), Rounding::Bf16);
}

#[test]
fn every_kernel_of_f32_is_near_f64() {
    hold(&Cpu::<f32>::new(2), Rounding::F32);
}

/// A device that forgets something is found out.
#[test]
fn a_wrong_number_is_noticed() {
    let exact = battery::run(&Cpu::<f64>::new(1), Rounding::Bf16, Models::All, 1);
    for i in 0..exact.len() {
        let mut wrong = exact.clone();
        let last = wrong[i].values.len() - 1;
        let largest = wrong[i].values.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        wrong[i].values[last] += 1e-3 + 0.5 * largest;
        let errors = battery::compare(&wrong, &exact, Rounding::Bf16);
        assert!(errors[i].1 > 1.0, "{:?}", errors[i]);
    }
}

#[test]
fn rounding_is_to_the_nearest_and_to_even() {
    let kernels = CpuBf16::new(1);
    let mut values: Vec<f32> =
        (0..=u16::MAX).step_by(7).map(|b| f32::from_bits(u32::from(b) << 16)).collect();
    values.extend((0..1 << 16).map(|i: u32| f32::from_bits(i.wrapping_mul(0x9e37_79b9))));
    values.extend([0x3f80_8000, 0x3f81_8000, 0x7f7f_ffff, 0x7f80_0000, 0x8000_0000].map(f32::from_bits));
    let got = kernels.upload(&values);
    for (got, value) in kernels.elems((&got).into(), got.len()).iter().zip(&values) {
        let wanted = bf16::from_f32(*value);
        assert!(*got == wanted || (got.is_nan() && wanted.is_nan()), "{value}: {got} for {wanted}");
    }
}

/// Products do not depend on the number of threads.
#[test]
fn threads_change_no_bit() {
    let (m, n, k) = (211, 157, 901);
    let run = |threads: usize| {
        let kernels = CpuBf16::new(threads);
        let values = |len: usize| super::noise("x", len).iter().map(|&x| x as f32).collect::<Vec<_>>();
        let (a, b) = (kernels.upload(&values(m * k)), kernels.upload(&values(k * n)));
        let mut c = kernels.wide(m * n);
        kernels.gemm(Gemm::new(m, n, k), (&a).into(), (&b).into(), None, (&mut c).into());
        kernels.download(&c)
    };
    assert_eq!(run(1), run(2));
    assert_eq!(run(1), run(5));
}
