//! Kernels that go element by element: activations, gates, residuals, dropout, conversions, rotary positions.
#![allow(clippy::missing_safety_doc, reason = "the module above says it for all of them")]

use std::ffi::c_void;

use super::{At, Draws, Queue, Real, Rows, THREADS, arguments, drop_numbers};
use crate::CudaError;

/// An element-wise activation: GPT-2's gelu, the form with tanh, or silu.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    Gelu,
    Silu,
}

impl Activation {
    fn name(self) -> &'static str {
        match self {
            Activation::Gelu => "gelu",
            Activation::Silu => "silu",
        }
    }

    fn gate(self) -> &'static str {
        match self {
            Activation::Gelu => "geglu",
            Activation::Silu => "swiglu",
        }
    }
}

/// Rotary positions of rows `first..` of samples of `positions` rows; heads lie beside each other in rows `stride` elements apart.
#[derive(Debug, Clone, Copy)]
pub struct Rotary {
    /// f32, `[positions, head_dim / 2]`.
    pub cosines: At,
    pub sines: At,
    pub first: u32,
    pub positions: u32,
    pub rows: u32,
    pub heads: u32,
    pub head_dim: u32,
    pub stride: u32,
    pub back: bool,
}

impl Queue {
    pub(super) unsafe fn pointwise(
        &self,
        kernel: &str,
        real: Real,
        len: u64,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let name = format!("{kernel}_{}", real.name());
        let blocks = self.blocks(len, 16 / real.bytes());
        // SAFETY: the module's.
        unsafe { self.launch(("pointwise", &name), (blocks, 1), (THREADS, 0), arguments) }
    }

    pub unsafe fn activate(
        &self,
        activation: Activation,
        real: Real,
        x: At,
        len: u64,
        y: At,
    ) -> Result<(), CudaError> {
        let name = format!("{}_forward", activation.name());
        // SAFETY: the module's.
        unsafe { self.pointwise(&name, real, len, &mut arguments![x, len, y]) }
    }

    /// `dy *= activation'(x)`.
    pub unsafe fn activate_backward(
        &self,
        activation: Activation,
        real: Real,
        x: At,
        len: u64,
        dy: At,
    ) -> Result<(), CudaError> {
        let name = format!("{}_backward", activation.name());
        // SAFETY: the module's.
        unsafe { self.pointwise(&name, real, len, &mut arguments![x, len, dy]) }
    }

    /// `y = activation(gate) up`.
    pub unsafe fn gate(
        &self,
        activation: Activation,
        real: Real,
        (gate, up): (At, At),
        len: u64,
        y: At,
    ) -> Result<(), CudaError> {
        let name = format!("{}_forward", activation.gate());
        // SAFETY: the module's.
        unsafe { self.pointwise(&name, real, len, &mut arguments![gate, up, len, y]) }
    }

    /// From `dy`, the gradients of both: that of `up` in its place.
    pub unsafe fn gate_backward(
        &self,
        activation: Activation,
        real: Real,
        (gate, up): (At, At),
        len: u64,
        (dy, d_gate): (At, At),
    ) -> Result<(), CudaError> {
        let name = format!("{}_backward", activation.gate());
        // SAFETY: the module's.
        unsafe { self.pointwise(&name, real, len, &mut arguments![gate, up, len, dy, d_gate]) }
    }

    /// `y += x`.
    pub unsafe fn add(&self, real: Real, x: At, len: u64, y: At) -> Result<(), CudaError> {
        // SAFETY: the module's.
        unsafe { self.pointwise("add", real, len, &mut arguments![x, len, y]) }
    }

    /// Drops a share of the elements and scales the others; element `i` here is element `first + i` of the draws. May be in place.
    pub unsafe fn dropout(
        &self,
        real: Real,
        x: At,
        (draws, first): (Draws, u64),
        rate: f64,
        len: u64,
        y: At,
    ) -> Result<(), CudaError> {
        let (threshold, scale) = drop_numbers(rate);
        // SAFETY: the module's.
        unsafe {
            self.pointwise("dropout", real, len, &mut arguments![x, draws, first, threshold, scale, len, y])
        }
    }

    /// `y = x + dropped(branch + bias)`; no bias is 0.
    pub unsafe fn join(
        &self,
        real: Real,
        size: Rows,
        (x, branch, bias): (At, At, At),
        dropped: Option<(Draws, u64, f64)>,
        y: At,
    ) -> Result<(), CudaError> {
        let (draws, first, rate) = dropped.unwrap_or((Draws { key: [0; 2], high: [0; 2] }, 0, 0.0));
        let ((threshold, scale), cols) = (drop_numbers(rate), size.cols);
        let len = u64::from(size.rows) * u64::from(cols);
        let mut arguments = arguments![x, branch, bias, cols, draws, first, threshold, scale, len, y];
        // SAFETY: the module's.
        unsafe { self.pointwise("join", real, len, &mut arguments) }
    }

    /// `y += bias`, to every row.
    pub unsafe fn add_bias(&self, real: Real, size: Rows, bias: At, y: At) -> Result<(), CudaError> {
        let (cols, len) = (size.cols, u64::from(size.rows) * u64::from(size.cols));
        // SAFETY: the module's.
        unsafe { self.pointwise("add_bias", real, len, &mut arguments![bias, cols, len, y]) }
    }

    /// `dx = factor (x - target)`.
    pub unsafe fn difference(
        &self,
        real: Real,
        (x, target): (At, At),
        factor: f32,
        len: u64,
        dx: At,
    ) -> Result<(), CudaError> {
        // SAFETY: the module's.
        unsafe { self.pointwise("difference", real, len, &mut arguments![x, target, factor, len, dx]) }
    }

    pub unsafe fn to_f32(&self, x: At, len: u64, y: At) -> Result<(), CudaError> {
        // SAFETY: the module's.
        unsafe { self.pointwise("widen", Real::Bf16, len, &mut arguments![x, len, y]) }
    }

    pub unsafe fn to_bf16(&self, x: At, len: u64, y: At) -> Result<(), CudaError> {
        let (blocks, mut arguments) = (self.blocks(len, 8), arguments![x, len, y]);
        // SAFETY: the module's.
        unsafe { self.launch(("pointwise", "to_bf16"), (blocks, 1), (THREADS, 0), &mut arguments) }
    }

    /// Turns the columns of every head, in place: the first half with the second.
    pub unsafe fn rotary(&self, real: Real, rotary: &Rotary, x: At) -> Result<(), CudaError> {
        let Rotary { cosines, sines, first, positions, rows, heads, head_dim, stride, back } = *rotary;
        if !head_dim.is_multiple_of(2) {
            let found = head_dim.to_string();
            return Err(CudaError::Refused { what: "a head's columns", found, needed: "an even number" });
        }
        let (half, sign) = (head_dim / 2, if back { -1.0f32 } else { 1.0 });
        // A block for every row, with a thread for every vector of it.
        let threads =
            (heads * half).div_ceil(16 / real.bytes() as u32).next_multiple_of(32).clamp(32, THREADS);
        let name = format!("rotary_{}", real.name());
        let mut arguments = arguments![cosines, sines, first, positions, heads, half, stride, sign, x];
        // SAFETY: the module's.
        unsafe { self.launch(("pointwise", &name), (rows, 1), (threads, 0), &mut arguments) }
    }
}
