//! What an optimizer does to flat runs of parameters, and sums over them.

use super::simd::vectorized;
use super::{Cpu, HostBuf};
use crate::kernels::scalar::Scalar;
use crate::kernels::{AdamW, AdamWState, Sgd, SgdState};

/// Elements whose squares are added together; fixed, so that a norm does not depend on the number of threads.
const BLOCK: usize = 1 << 16;

impl<T: Scalar> Cpu<T> {
    pub(super) fn adamw_run(
        &self,
        step: &AdamW,
        run: std::ops::Range<usize>,
        state: AdamWState<'_, HostBuf<T>>,
    ) {
        let len = run.len();
        let chunk = self.chunk(len);
        let params = &mut state.params.buf[state.params.start + run.start..][..len];
        let grads = &state.grads.buf[state.grads.start + run.start..][..len];
        let first = &mut state.first.buf[state.first.start + run.start..][..len];
        let second = &mut state.second.buf[state.second.start + run.start..][..len];
        let items = params.chunks_mut(chunk).zip(grads.chunks(chunk));
        let items = items.zip(first.chunks_mut(chunk).zip(second.chunks_mut(chunk)));
        let numbers = AdamNumbers::new(step);
        self.threads.each(items, |((params, grads), (first, second))| {
            adam(&numbers, params, grads, first, second);
        });
    }

    pub(super) fn sgd_run(&self, step: &Sgd, run: std::ops::Range<usize>, state: SgdState<'_, HostBuf<T>>) {
        let len = run.len();
        let chunk = self.chunk(len);
        let params = &mut state.params.buf[state.params.start + run.start..][..len];
        let grads = &state.grads.buf[state.grads.start + run.start..][..len];
        let velocity = &mut state.velocity.buf[state.velocity.start + run.start..][..len];
        let items = params.chunks_mut(chunk).zip(grads.chunks(chunk)).zip(velocity.chunks_mut(chunk));
        self.threads.each(items, |((params, grads), velocity)| momentum(step, params, grads, velocity));
    }

    pub(super) fn squares(&self, x: &[T]) -> f64 {
        let mut sums = vec![0.0; x.len().div_ceil(BLOCK)];
        self.threads.each(x.chunks(BLOCK).zip(&mut sums), |(x, sum)| *sum = sum_squares(x));
        sums.iter().sum()
    }

    pub(super) fn squared_differences(&self, x: &[T], target: &[T]) -> f64 {
        let mut sums = vec![0.0; x.len().div_ceil(BLOCK)];
        let items = x.chunks(BLOCK).zip(target.chunks(BLOCK)).zip(&mut sums);
        self.threads.each(items, |((x, target), sum)| {
            *sum = x.iter().zip(target).map(|(&x, &t)| (x - t).to_f64().powi(2)).sum();
        });
        sums.iter().sum()
    }

    pub(super) fn differences(&self, x: &[T], target: &[T], scale: f64, dx: &mut [T]) {
        let factor = T::from_f64(2.0 * scale);
        for (dx, (&x, &target)) in dx.iter_mut().zip(x.iter().zip(target)) {
            *dx = factor * (x - target);
        }
    }
}

/// A step's numbers in the parameters' own type.
struct AdamNumbers<T> {
    grad_scale: T,
    decay: T,
    beta1: T,
    rest1: T,
    beta2: T,
    rest2: T,
    rate: T,
    second_scale: T,
    epsilon: T,
}

impl<T: Scalar> AdamNumbers<T> {
    fn new(step: &AdamW) -> Self {
        let t = step.step as f64 + 1.0;
        let (correction1, correction2) = (1.0 - step.beta1.powf(t), 1.0 - step.beta2.powf(t));
        Self {
            grad_scale: T::from_f64(step.grad_scale),
            decay: T::from_f64(1.0 - step.learning_rate * step.weight_decay),
            beta1: T::from_f64(step.beta1),
            rest1: T::from_f64(1.0 - step.beta1),
            beta2: T::from_f64(step.beta2),
            rest2: T::from_f64(1.0 - step.beta2),
            rate: T::from_f64(step.learning_rate / correction1),
            second_scale: T::from_f64(1.0 / correction2.sqrt()),
            epsilon: T::from_f64(step.epsilon),
        }
    }
}

vectorized! {
    fn adam<T>(n: &'a AdamNumbers<T>, params: &'a mut [T], grads: &'a [T], first: &'a mut [T], second: &'a mut [T]) {
        let moments = first.iter_mut().zip(second);
        for ((p, &g), (m, v)) in params.iter_mut().zip(grads).zip(moments) {
            let g = g * n.grad_scale;
            *m = n.beta1 * *m + n.rest1 * g;
            *v = n.beta2 * *v + n.rest2 * g * g;
            *p = *p * n.decay - n.rate * *m / (v.sqrt() * n.second_scale + n.epsilon);
        }
    }
}

vectorized! {
    fn momentum<T>(step: &'a Sgd, params: &'a mut [T], grads: &'a [T], velocity: &'a mut [T]) {
        let (rate, momentum) = (T::from_f64(step.learning_rate), T::from_f64(step.momentum));
        let (scale, decay) = (T::from_f64(step.grad_scale), T::from_f64(step.weight_decay));
        for ((p, &g), v) in params.iter_mut().zip(grads).zip(velocity) {
            *v = momentum * *v + (g * scale + decay * *p);
            *p -= rate * *v;
        }
    }
}

vectorized! {
    fn sum_squares<T>(x: &'a [T]) -> f64 {
        let mut strands = [0.0; 16];
        let (chunks, rest) = x.as_chunks::<16>();
        for chunk in chunks {
            for (strand, &x) in strands.iter_mut().zip(chunk) {
                *strand += x.to_f64() * x.to_f64();
            }
        }
        for (strand, &x) in strands.iter_mut().zip(rest) {
            *strand += x.to_f64() * x.to_f64();
        }
        strands.iter().sum()
    }
}
