//! Norms with their residuals, and sums by column: gradients of gamma, beta and biases.
#![allow(clippy::missing_safety_doc, reason = "the module above says it for all of them")]

use super::{At, Queue, Real, Rows, THREADS, arguments};
use crate::CudaError;
use crate::driver::Driver as _;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Norm {
    Layer,
    Rms,
}

impl Norm {
    fn name(self) -> &'static str {
        match self {
            Norm::Layer => "layer_norm",
            Norm::Rms => "rms_norm",
        }
    }

    /// How many sums by column its gradient has: of gamma, and of beta.
    pub fn sums(self) -> u32 {
        match self {
            Norm::Layer => 2,
            Norm::Rms => 1,
        }
    }
}

/// What a norm reads. Without a residual, `x` is normalised; `beta` is a layer norm's alone.
#[derive(Debug, Clone, Copy)]
pub struct NormIn {
    pub x: At,
    pub residual: At,
    pub gamma: At,
    pub beta: At,
}

/// What it writes: the sum where there is a residual, and f32 statistics of every row: mean and 1/deviation, or that alone.
#[derive(Debug, Clone, Copy)]
pub struct NormOut {
    pub sum: At,
    pub y: At,
    pub stats: At,
}

/// What its gradient reads: `x` is what was normalised; a residual's gradient is added to `dx`, if there is one.
#[derive(Debug, Clone, Copy)]
pub struct NormSaved {
    pub x: At,
    pub gamma: At,
    pub stats: At,
    pub dy: At,
    pub residual: At,
}

impl Queue {
    /// How a row is shared out: vectors a thread, and threads; none where rows are no whole vectors, or too long.
    fn cut(real: Real, cols: u32, most: u32, addresses: &[At]) -> Option<(u32, u32)> {
        let lanes = 16 / real.bytes() as u32;
        let vectors = cols / lanes;
        let whole = cols.is_multiple_of(lanes) && addresses.iter().all(|at| at.is_multiple_of(16));
        let chunks = [1, 2, 4].into_iter().find(|chunks| vectors <= 512 * chunks)?;
        (whole && cols > 0 && chunks <= most)
            .then(|| (chunks, vectors.div_ceil(chunks).next_multiple_of(32).max(32)))
    }

    pub unsafe fn norm_forward(
        &self,
        norm: Norm,
        real: Real,
        size: Rows,
        from: NormIn,
        epsilon: f32,
        into: NormOut,
    ) -> Result<(), CudaError> {
        let all = [from.x, from.residual, from.gamma, from.beta, into.sum, into.y];
        let (how, threads) = match Self::cut(real, size.cols, 4, &all) {
            Some((chunks, threads)) => (chunks.to_string(), threads),
            None => ("any".into(), THREADS),
        };
        let name = format!("{}_forward_{how}_{}", norm.name(), real.name());
        let NormIn { x, residual, gamma, beta } = from;
        let NormOut { sum, y, stats } = into;
        let width = size.cols;
        let mut arguments = arguments![x, residual, gamma, beta, epsilon, width, sum, y, stats];
        // SAFETY: the module's.
        unsafe { self.launch(("norm", &name), (size.rows, 1), (threads, 0), &mut arguments) }
    }

    /// `dx = residual + gradient`; `sums`, f32 `[1 or 2, cols]`, are the gradients of gamma and beta, or are added to.
    pub unsafe fn norm_backward(
        &self,
        norm: Norm,
        real: Real,
        size: Rows,
        saved: NormSaved,
        dx: At,
        (sums, add): (At, bool),
    ) -> Result<(), CudaError> {
        let NormSaved { x, gamma, stats, dy, residual } = saved;
        let cut = Self::cut(real, size.cols, 2, &[x, gamma, dy, residual, dx]);
        let (how, threads, shared) = match cut {
            Some((chunks, threads)) => (chunks.to_string(), threads, 0),
            None => ("any".into(), THREADS, u64::from(norm.sums()) * u64::from(size.cols) * 4),
        };
        if shared > 200 << 10 {
            let found = format!("{} columns", size.cols);
            return Err(CudaError::Refused { what: "the width of a norm", found, needed: "at most 25600" });
        }
        let most = self.cuda.card().multiprocessors * (1024 / threads).max(1);
        let (strips, columns) = (size.rows.min(most), norm.sums() * size.cols);
        let partial = self.partial("a norm's gradient", u64::from(strips) * u64::from(columns) * 4)?;
        let name = format!("{}_backward_{how}_{}", norm.name(), real.name());
        let Rows { rows, cols } = size;
        let mut arguments = arguments![x, gamma, stats, dy, residual, rows, cols, dx, partial];
        // SAFETY: the module's.
        unsafe {
            self.launch(("norm", &name), (strips, 1), (threads, shared as u32), &mut arguments)?;
            self.add_strips(partial, strips, columns, add, sums)
        }
    }

    unsafe fn add_strips(
        &self,
        partial: At,
        strips: u32,
        cols: u32,
        add: bool,
        sums: At,
    ) -> Result<(), CudaError> {
        let add = u32::from(add);
        let mut arguments = arguments![partial, strips, cols, add, sums];
        // SAFETY: the module's.
        unsafe { self.launch(("columns", "add_strips"), (cols.div_ceil(32), 1), (1024, 0), &mut arguments) }
    }

    /// `sums`, f32 `[cols]`, are the sums of the rows of `x`, or are added to: the gradient of a bias.
    pub unsafe fn column_sums(
        &self,
        real: Real,
        size: Rows,
        x: At,
        (sums, add): (At, bool),
    ) -> Result<(), CudaError> {
        let lanes = 16 / real.bytes() as u32;
        let whole = size.cols.is_multiple_of(lanes) && x.is_multiple_of(16);
        let (how, wide) = if whole { ("", 32 * lanes) } else { ("_any", 32) };
        let (across, most) = (size.cols.div_ceil(wide), self.cuda.card().multiprocessors * 4);
        let strips = (most / across.max(1)).clamp(1, size.rows.div_ceil(8).max(1));
        let partial = self.partial("sums by column", u64::from(strips) * u64::from(size.cols) * 4)?;
        let name = format!("column_strips{how}_{}", real.name());
        let Rows { rows, cols } = size;
        let mut arguments = arguments![x, rows, cols, partial];
        // SAFETY: the module's.
        unsafe {
            self.launch(("columns", &name), (across, strips), (THREADS, 0), &mut arguments)?;
            self.add_strips(partial, strips, cols, add, sums)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_cut_into_vectors_where_they_can_be() {
        let cut = |real, cols| Queue::cut(real, cols, 4, &[0, 16]);
        assert_eq!(cut(Real::Bf16, 2048), Some((1, 256)));
        assert_eq!(cut(Real::Bf16, 2560), Some((1, 320)));
        assert_eq!(cut(Real::F32, 4096), Some((2, 512)));
        assert_eq!(cut(Real::Bf16, 24), Some((1, 32)));
        assert_eq!(cut(Real::Bf16, 12), None);
        assert_eq!(cut(Real::F32, 100_000), None);
        assert_eq!(Queue::cut(Real::F32, 4096, 1, &[]), None);
        assert_eq!(Queue::cut(Real::F32, 4096, 4, &[8]), None);
    }
}
