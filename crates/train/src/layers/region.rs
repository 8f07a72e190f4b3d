//! The borders of a tensor-parallel region (Megatron-LM; with sequence parallelism, Korthikanti et al., 2022).
//!
//! Inside a region every rank of the group sees all rows and some of the columns; outside, all columns and, where the sequence is
//! parallel, some of the rows. A region costs the group the same either way, 4 times `rows * cols * (t - 1) / t` elements for
//! a rank, forward and backward together:
//!
//! ```text
//!                       enter                      leave
//!               forward   backward         forward   backward
//! replicated    -         all-reduce       all-reduce      -
//! sequence      gather    scatter sums     scatter sums    gather
//! ```

use std::ops::Range;

use crate::group::{Group, ReduceOp, chunked};
use crate::kernels::{BufSlice, Buffer, Kernels, PartMut, Rows};
use crate::layers::Ctx;
use crate::stage::StageError;

/// A region's rows and columns, and which of the rows lie outside of it on this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// All rows, as inside.
    pub size: Rows,
    pub sequence_parallel: bool,
}

impl Region {
    fn parts(&self, size: usize) -> Vec<Range<usize>> {
        chunked(self.size.rows, self.size.cols, size)
    }

    /// Rows outside of the region that are this rank's.
    pub fn own_rows(&self, rank: usize, size: usize) -> Range<usize> {
        if !self.sequence_parallel {
            return 0..self.size.rows;
        }
        chunked(self.size.rows, 1, size)[rank].clone()
    }

    /// From this rank's rows to all rows.
    pub fn enter<K: Kernels>(&self, ctx: &Ctx<'_, K>, x: K::Buf) -> Result<K::Buf, StageError> {
        match self.gathers(ctx.tp) {
            true => self.gather(ctx, &x),
            false => Ok(x),
        }
    }

    /// From summands of the gradient of all rows to the gradient of this rank's.
    pub fn enter_grad<K: Kernels>(&self, ctx: &Ctx<'_, K>, dx: K::Buf) -> Result<K::Buf, StageError> {
        self.sum(ctx, dx)
    }

    /// From summands of all rows to the sums of this rank's rows.
    pub fn leave<K: Kernels>(&self, ctx: &Ctx<'_, K>, y: K::Buf) -> Result<K::Buf, StageError> {
        self.sum(ctx, y)
    }

    /// From the gradient of this rank's rows to that of all rows; nothing where they are the same.
    pub fn leave_grad<K: Kernels>(
        &self,
        ctx: &Ctx<'_, K>,
        dy: &K::Buf,
    ) -> Result<Option<K::Buf>, StageError> {
        match self.gathers(ctx.tp) {
            true => self.gather(ctx, dy).map(Some),
            false => Ok(None),
        }
    }

    /// Whether rows inside and outside differ.
    fn gathers<B>(&self, tp: &dyn Group<B>) -> bool {
        self.sequence_parallel && tp.size() > 1
    }

    fn gather<K: Kernels>(&self, ctx: &Ctx<'_, K>, own: &K::Buf) -> Result<K::Buf, StageError> {
        let parts = self.parts(ctx.tp.size());
        let mut whole = ctx.kernels.buffer(self.size.len());
        let start = parts[ctx.tp.rank()].start;
        ctx.kernels.copy(own.into(), PartMut { buf: &mut whole, start }, own.len());
        ctx.tp.all_gather(&mut whole, &parts)?;
        Ok(whole)
    }

    fn sum<K: Kernels>(&self, ctx: &Ctx<'_, K>, mut summands: K::Buf) -> Result<K::Buf, StageError> {
        if ctx.tp.size() == 1 {
            return Ok(summands);
        }
        if !self.sequence_parallel {
            ctx.tp.all_reduce(&mut summands, ReduceOp::Sum)?;
            return Ok(summands);
        }
        let parts = self.parts(ctx.tp.size());
        ctx.tp.reduce_scatter(&mut summands, &parts)?;
        let own = &parts[ctx.tp.rank()];
        let mut rows = ctx.kernels.buffer(own.len());
        ctx.kernels.copy(BufSlice { buf: &summands, start: own.start }, (&mut rows).into(), own.len());
        Ok(rows)
    }
}
