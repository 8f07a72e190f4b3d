//! Optimizers' arithmetic, element by element.

use super::{assert_close, buf, cpu, noise};
use crate::kernels::{AdamW, AdamWState, BufSlice, Kernels, PartMut, Sgd, SgdState};

#[test]
fn adamw_follows_its_paper() {
    let cpu = cpu();
    let len = 50;
    let (mut p, mut m, mut v) = (noise("p", len), vec![0.0; len], vec![0.0; len]);
    let (mut params, mut first, mut second) = (buf(&cpu, &p), buf(&cpu, &m), buf(&cpu, &v));
    for step in 0..5 {
        let g = noise(&format!("g{step}"), len + 3);
        let numbers = AdamW {
            learning_rate: 0.01,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            step,
            grad_scale: 0.5,
        };
        let state = AdamWState {
            rounded: None,
            params: (&mut params).into(),
            grads: BufSlice { buf: &buf(&cpu, &g), start: 3 },
            first: (&mut first).into(),
            second: (&mut second).into(),
        };
        cpu.adamw(&numbers, 10..45, state);
        let t = step as i32 + 1;
        for i in 10..45 {
            let g = 0.5 * g[3 + i];
            m[i] = 0.9 * m[i] + 0.1 * g;
            v[i] = 0.95 * v[i] + 0.05 * g * g;
            let (m_hat, v_hat) = (m[i] / (1.0 - 0.9f64.powi(t)), v[i] / (1.0 - 0.95f64.powi(t)));
            p[i] -= 0.01 * 0.1 * p[i];
            p[i] -= 0.01 * m_hat / (v_hat.sqrt() + 1e-8);
        }
    }
    assert_close(&params, &p, 1e-13);
    assert_close(&first, &m, 1e-13);
    assert_close(&second, &v, 1e-13);
}

#[test]
fn sgd_keeps_its_momentum() {
    let cpu = cpu();
    let len = 40;
    let (mut p, mut v) = (noise("p", len), noise("v", len));
    let (mut params, mut velocity) = (buf(&cpu, &p), buf(&cpu, &v));
    let g = noise("g", len);
    let step = Sgd { learning_rate: 0.1, momentum: 0.9, weight_decay: 0.01, grad_scale: 2.0 };
    for _ in 0..3 {
        let state = SgdState {
            rounded: None,
            params: PartMut { buf: &mut params, start: 1 },
            grads: BufSlice { buf: &buf(&cpu, &g), start: 1 },
            velocity: PartMut { buf: &mut velocity, start: 1 },
        };
        cpu.sgd(&step, 0..30, state);
        for i in 1..31 {
            v[i] = 0.9 * v[i] + 2.0 * g[i] + 0.01 * p[i];
            p[i] -= 0.1 * v[i];
        }
    }
    assert_close(&params, &p, 1e-14);
    assert_close(&velocity, &v, 1e-14);
}

#[test]
fn squares_are_summed() {
    let cpu = cpu();
    let x = noise("x", 200_001);
    let wanted: f64 = x[5..].iter().map(|x| x * x).sum();
    let behind = 5..x.len();
    let got = cpu.sum_squares(&buf(&cpu, &x), std::slice::from_ref(&behind));
    assert!((got - wanted).abs() < 1e-9 * wanted, "{got} {wanted}");
}
