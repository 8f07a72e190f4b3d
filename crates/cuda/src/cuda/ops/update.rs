//! What a step ends with: sums over all numbers, the factor that clips gradients, AdamW and gradient descent.
#![allow(clippy::missing_safety_doc, reason = "the module above says it for all of them")]

use std::ffi::c_void;

use super::{At, Queue, Real, THREADS, arguments};
use crate::CudaError;

/// A step of AdamW, as numbers.
#[derive(Debug, Clone, Copy)]
pub struct AdamW {
    pub learning_rate: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub epsilon: f64,
    pub weight_decay: f64,
    /// Steps done before this one.
    pub step: u64,
    /// Gradients count this much.
    pub grad_scale: f64,
}

/// What the kernel multiplies with.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct AdamNumbers {
    decay: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    rate: f32,
    second_scale: f32,
    epsilon: f32,
    grad_scale: f32,
}

impl AdamNumbers {
    fn new(n: &AdamW) -> Self {
        let t = (n.step + 1) as f64;
        let (one, two) = (1.0 - n.beta1.powf(t), 1.0 - n.beta2.powf(t));
        Self {
            decay: (1.0 - n.learning_rate * n.weight_decay) as f32,
            beta1: n.beta1 as f32,
            rest1: (1.0 - n.beta1) as f32,
            beta2: n.beta2 as f32,
            rest2: (1.0 - n.beta2) as f32,
            rate: (n.learning_rate / one) as f32,
            second_scale: (1.0 / two.sqrt()) as f32,
            epsilon: n.epsilon as f32,
            grad_scale: n.grad_scale as f32,
        }
    }
}

/// f32 masters and moments, which change in place, and the copy in bf16 that is written, if there is one.
#[derive(Debug, Clone, Copy)]
pub struct AdamState {
    pub params: At,
    pub first: At,
    pub second: At,
    pub copy: At,
}

/// A step of gradient descent with momentum, as numbers.
#[derive(Debug, Clone, Copy)]
pub struct Sgd {
    pub learning_rate: f64,
    pub momentum: f64,
    pub weight_decay: f64,
    pub grad_scale: f64,
}

/// Its f32 parameters and velocity, and the copy in bf16, if there is one.
#[derive(Debug, Clone, Copy)]
pub struct SgdState {
    pub params: At,
    pub velocity: At,
    pub copy: At,
}

impl Queue {
    unsafe fn sums(&self, kernel: &str, x: At, len: u64, total: (At, bool)) -> Result<(), CudaError> {
        // SAFETY: the module's.
        unsafe { self.partial_sums(kernel, len, |partial| arguments![x, len, *partial].to_vec(), total) }
    }

    /// Sums of blocks, then of all of them.
    unsafe fn partial_sums(
        &self,
        kernel: &str,
        len: u64,
        arguments: impl FnOnce(&At) -> Vec<*mut c_void>,
        (total, add): (At, bool),
    ) -> Result<(), CudaError> {
        let blocks = self.blocks(len, 16).max(1);
        let partial = self.partial("a sum", u64::from(blocks) * 8)?;
        let add = u32::from(add);
        // SAFETY: the module's.
        unsafe {
            self.launch(("update", kernel), (blocks, 1), (THREADS, 0), &mut arguments(&partial))?;
            let mut arguments = arguments![partial, blocks, add, total];
            self.launch(("update", "add_partials"), (1, 1), (THREADS, 0), &mut arguments)
        }
    }

    /// `total`, an f64, is the sum of squares, or is added to.
    pub unsafe fn sum_squares(
        &self,
        real: Real,
        x: At,
        len: u64,
        total: (At, bool),
    ) -> Result<(), CudaError> {
        // SAFETY: the module's.
        unsafe { self.sums(&format!("sum_squares_{}", real.name()), x, len, total) }
    }

    /// `total`, an f64, is the sum of f32 numbers, or is added to: the loss of all rows.
    pub unsafe fn sum(&self, x: At, len: u64, total: (At, bool)) -> Result<(), CudaError> {
        // SAFETY: the module's.
        unsafe { self.sums("sum_f32", x, len, total) }
    }

    /// `total`, an f64, is the sum of squared differences.
    pub unsafe fn squared_distance(
        &self,
        real: Real,
        (x, y): (At, At),
        len: u64,
        total: At,
    ) -> Result<(), CudaError> {
        let name = format!("squared_distance_{}", real.name());
        // SAFETY: the module's.
        unsafe {
            self.partial_sums(&name, len, |partial| arguments![x, y, len, *partial].to_vec(), (total, false))
        }
    }

    /// A step of gradient descent with momentum, on f32; a copy in bf16 is written, if there is one.
    pub unsafe fn sgd(&self, grads: At, numbers: &Sgd, len: u64, state: SgdState) -> Result<(), CudaError> {
        let [rate, momentum, decay, scale] =
            [numbers.learning_rate, numbers.momentum, numbers.weight_decay, numbers.grad_scale]
                .map(|x| x as f32);
        let SgdState { params, velocity, copy } = state;
        let mut arguments = arguments![grads, rate, momentum, decay, scale, len, params, velocity, copy];
        // SAFETY: the module's.
        unsafe { self.launch(("update", "sgd"), (self.blocks(len, 4), 1), (THREADS, 0), &mut arguments) }
    }

    /// `scale`, an f32, is what brings gradients with this sum of squares (an f64) to a norm of at most `limit`.
    pub unsafe fn clip_scale(&self, squares: At, limit: f64, scale: At) -> Result<(), CudaError> {
        // SAFETY: the module's.
        unsafe {
            self.launch(("update", "clip_scale"), (1, 1), (1, 0), &mut arguments![squares, limit, scale])
        }
    }

    /// A step, with gradients of either sort; `scale` is an f32 on the card that they are multiplied with, or 0.
    pub unsafe fn adamw(
        &self,
        real: Real,
        grads: At,
        numbers: &AdamW,
        scale: At,
        len: u64,
        state: AdamState,
    ) -> Result<(), CudaError> {
        let (name, numbers) = (format!("adamw_{}", real.name()), AdamNumbers::new(numbers));
        let AdamState { params, first, second, copy } = state;
        let mut arguments = arguments![grads, numbers, scale, len, params, first, second, copy];
        // SAFETY: the module's.
        unsafe { self.launch(("update", &name), (self.blocks(len, 8), 1), (THREADS, 0), &mut arguments) }
    }
}
