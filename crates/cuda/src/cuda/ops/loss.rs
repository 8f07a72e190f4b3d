//! Cross-entropy: loss and gradient of the logits in one pass, and in four steps where classes are split over ranks.
#![allow(clippy::missing_safety_doc, reason = "the module above says it for all of them")]

use super::{At, Queue, Real, Rows, THREADS, arguments};
use crate::CudaError;

impl Queue {
    /// Logits of rows `stride` elements apart become the gradients of `scale` times their cross-entropy, of which `loss`, f32, has every row's.
    pub unsafe fn classifier(
        &self,
        real: Real,
        size: Rows,
        (logits, stride): (At, u32),
        targets: At,
        scale: f32,
        loss: At,
    ) -> Result<(), CudaError> {
        if stride < size.cols || size.cols == 0 {
            let found = format!("{} classes in rows of {stride}", size.cols);
            return Err(CudaError::Refused {
                what: "a row of logits",
                found,
                needed: "room for every class, of which there is one",
            });
        }
        let (name, classes) = (format!("classifier_{}", real.name()), size.cols);
        let mut arguments = arguments![logits, targets, classes, stride, scale, loss];
        // SAFETY: the module's.
        unsafe { self.launch(("loss", &name), (size.rows, 1), (1024, 0), &mut arguments) }
    }

    /// `max`, f32, is every row's largest column.
    pub unsafe fn row_max(&self, real: Real, size: Rows, x: At, max: At) -> Result<(), CudaError> {
        let (name, cols) = (format!("row_max_{}", real.name()), size.cols);
        // SAFETY: the module's.
        unsafe { self.launch(("loss", &name), (size.rows, 1), (1024, 0), &mut arguments![x, cols, max]) }
    }

    /// Logits become `exp(logit - max)`; `sums`, f32 `[2, rows]`, their sums, and the targets' logits less max where they are among these columns, of
    /// which the first is class `first`.
    pub unsafe fn exp_sums(
        &self,
        real: Real,
        size: Rows,
        logits: At,
        (targets, first): (At, u32),
        (max, sums): (At, At),
    ) -> Result<(), CudaError> {
        let (name, cols) = (format!("exp_sums_{}", real.name()), size.cols);
        let mut arguments = arguments![logits, targets, first, cols, max, sums];
        // SAFETY: the module's.
        unsafe { self.launch(("loss", &name), (size.rows, 1), (1024, 0), &mut arguments) }
    }

    /// `loss`, f32, is every row's, from sums over all classes.
    pub unsafe fn entropy(&self, rows: u32, sums: At, loss: At) -> Result<(), CudaError> {
        let blocks = self.blocks(u64::from(rows), 1);
        // SAFETY: the module's.
        unsafe {
            self.launch(("loss", "entropy"), (blocks, 1), (THREADS, 0), &mut arguments![sums, rows, loss])
        }
    }

    /// Exponentials become the gradients of `scale` times the cross-entropy.
    pub unsafe fn exps_grad(
        &self,
        real: Real,
        size: Rows,
        exps: At,
        (targets, first): (At, u32),
        sums: At,
        scale: f32,
    ) -> Result<(), CudaError> {
        let (name, cols) = (format!("exps_grad_{}", real.name()), size.cols);
        let mut arguments = arguments![exps, targets, first, cols, sums, scale];
        // SAFETY: the module's.
        unsafe { self.launch(("loss", &name), (size.rows, 1), (1024, 0), &mut arguments) }
    }
}
