//! The matrix product.

use proptest::prelude::*;

use super::{assert_close, cpu, noise};
use crate::kernels::cpu::Cpu;
use crate::kernels::scalar::Scalar;
use crate::kernels::{BufSlice, Gemm, Kernels, Order, PartMut};

/// Three loops.
fn naive(g: &Gemm<f64>, a: &[f64], b: &[f64], bias: Option<&[f64]>, c: &mut [f64]) {
    for i in 0..g.m {
        for j in 0..g.n {
            let a_at = |k: usize| if g.a == Order::Plain { a[i * g.k + k] } else { a[k * g.m + i] };
            let b_at = |k: usize| if g.b == Order::Plain { b[k * g.n + j] } else { b[j * g.k + k] };
            let product: f64 = (0..g.k).map(|k| a_at(k) * b_at(k)).sum();
            let old = if g.beta == 0.0 { 0.0 } else { g.beta * c[i * g.n + j] };
            c[i * g.n + j] = g.alpha * product + old + bias.map_or(0.0, |b| b[j]);
        }
    }
}

fn run<T: Scalar>(cpu: &Cpu<T>, g: &Gemm<f64>, inputs: [&[f64]; 4], biased: bool) -> Vec<f64> {
    let up = |x: &[f64]| cpu.upload(&x.iter().map(|&x| T::from_f64(x)).collect::<Vec<_>>());
    let [a, b, bias, mut c] = inputs.map(up);
    let Gemm { m, n, k, a: a_order, b: b_order, .. } = *g;
    let (alpha, beta) = (T::from_f64(g.alpha), T::from_f64(g.beta));
    let g = Gemm { m, n, k, a: a_order, b: b_order, alpha, beta };
    // Operands that start within a buffer, as weights do.
    let (a, b) = (BufSlice { buf: &a, start: 1 }, BufSlice { buf: &b, start: 2 });
    cpu.gemm(g, a, b, biased.then_some((&bias).into()), PartMut { buf: &mut c, start: 3 });
    cpu.download(&c).into_iter().map(T::to_f64).collect()
}

fn order(transposed: bool) -> Order {
    if transposed { Order::Transposed } else { Order::Plain }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn equals_three_loops(
        (m, n, k) in prop_oneof![(0usize..40, 0usize..80, 0usize..40), (1usize..90, 1usize..130, 380usize..800)],
        (ta, tb, biased) in any::<(bool, bool, bool)>(),
        alpha in -2.0..2.0f64,
        beta in prop_oneof![Just(0.0), Just(1.0), -1.0..1.0f64],
    ) {
        let g = Gemm { m, n, k, a: order(ta), b: order(tb), alpha, beta };
        let a = noise("a", m * k + 1);
        let b = noise("b", k * n + 2);
        let bias = noise("bias", n);
        let c = noise("c", m * n + 3);
        let mut wanted = c.clone();
        naive(&g, &a[1..], &b[2..], biased.then_some(&bias), &mut wanted[3..]);
        let inputs = [&a[..], &b, &bias, &c];
        let wide = run(&cpu(), &g, inputs, biased);
        assert_close(&wide, &wanted, 1e-12);
        assert_close(&run(&Cpu::<f32>::new(2), &g, inputs, biased), &wanted, 1e-5);
        prop_assert_eq!(wide, run(&Cpu::<f64>::new(1), &g, inputs, biased));
    }
}

/// At beta zero what was there is not read, not even NaN.
#[test]
fn overwrites_what_is_not_a_number() {
    let cpu = cpu();
    let (a, b) = (cpu.upload(&[2.0]), cpu.upload(&[3.0]));
    let mut c = cpu.upload(&[f64::NAN]);
    cpu.gemm(Gemm::new(1, 1, 1), (&a).into(), (&b).into(), None, (&mut c).into());
    assert_eq!(c[..], [6.0]);
}

/// What makes "parallel equals single rank" hold to the bit where sums are not split: rows and columns do not know
/// of their neighbours.
#[test]
fn shards_of_rows_and_columns_are_the_same_bits() {
    let (m, n, k) = (50, 70, 600);
    let (a, b) = (noise("a", m * k), noise("b", k * n));
    let cpu = cpu();
    let product = |rows: &[f64], cols: &[f64], m: usize, n: usize| {
        let (a, b) = (cpu.upload(rows), cpu.upload(cols));
        let mut c = cpu.buffer(m * n);
        cpu.gemm(Gemm::new(m, n, k).b_transposed(), (&a).into(), (&b).into(), None, (&mut c).into());
        cpu.download(&c)
    };
    let whole = product(&a, &b, m, n);
    assert_eq!(product(&a[13 * k..], &b, m - 13, n), whole[13 * n..]);
    let right = product(&a, &b[31 * k..], m, n - 31);
    for i in 0..m {
        assert_eq!(right[i * (n - 31)..][..n - 31], whole[i * n + 31..(i + 1) * n]);
    }
}
