//! Norms and their gradients; a residual that waits becomes one kernel with the norm behind it.

use crossmesh_cuda::cuda::ops::{self, At, Norm, NormIn, NormOut};

use super::buffers::{GpuBuf, GpuElem, elems, reals};
use super::calls::go;
use super::{Gpu, lock, rows};
use crate::kernels::{NormGrad, NormSaved, Normed, Rows};

impl<E: GpuElem> Gpu<E> {
    pub(super) fn norm(
        &self,
        norm: Norm,
        size: Rows,
        x: &GpuBuf,
        (gamma, beta): (At, At),
        epsilon: f64,
        out: Normed<'_, GpuBuf>,
    ) {
        let stats = stats(norm, size, out.stats);
        let x = elems::<E>(x).at(0, size.len());
        let y = elems::<E>(out.y).at(0, size.len());
        let waiting = lock(&self.waiting).and_then(|call| call.with_norm(rows(size), x));
        let (from, sum) = match waiting {
            Some((trunk, branch)) => {
                self.take_waiting();
                (NormIn { x: branch, residual: trunk, gamma, beta }, x)
            }
            None => (NormIn { x, residual: 0, gamma, beta }, 0),
        };
        let into = NormOut { sum, y, stats };
        go!(self, norm_forward(norm, E::REAL, rows(size), from, epsilon as f32, into));
    }

    pub(super) fn norm_grad(
        &self,
        norm: Norm,
        size: Rows,
        saved: NormSaved<'_, GpuBuf>,
        dy: &GpuBuf,
        out: NormGrad<'_, GpuBuf>,
    ) {
        let stats = stats(norm, size, saved.stats);
        let sums = reals(out.sums).at(0, norm.sums() as usize * size.cols);
        let residual = out.residual.map_or(0, |residual| elems::<E>(residual).at(0, size.len()));
        let given = ops::NormSaved {
            x: elems::<E>(saved.x).at(0, size.len()),
            gamma: self.weight(saved.gamma, size.cols),
            stats,
            dy: elems::<E>(dy).at(0, size.len()),
            residual,
        };
        let dx = elems::<E>(out.dx).at(0, size.len());
        go!(self, norm_backward(norm, E::REAL, rows(size), given, dx, (sums, false)));
    }
}

/// Every row's mean and factor; a norm about zero has no means.
fn stats(norm: Norm, size: Rows, stats: &GpuBuf) -> At {
    reals(stats).at(0, norm.sums() as usize * size.rows)
}
