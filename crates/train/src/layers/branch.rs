//! A branch of a transformer: a norm, attention or a feed-forward map, and back to the trunk.
//!
//! ```text
//! x -+-> norm -> [enter] -> attention | mlp -> [leave] -> + bias -> dropout -+-> y
//!    +----------------------------------------------------------------------+
//! ```
//!
//! What is between the brackets is a tensor-parallel region; outside of it every rank has all columns, and all rows or, where the
//! sequence is parallel, some of them.

use std::ops::Range;

use crate::chain::Setup;
use crate::kernels::{Branch as Joined, Kernels, Rows};
use crate::layers::attention::Attention;
use crate::layers::mlp::Mlp;
use crate::layers::norm::{Norm, NormGrads, Over};
use crate::layers::region::Region;
use crate::layers::{Ctx, Elements, Remembered, Saved, Site};
use crate::stage::{Recompute, StageError};

/// A microbatch's rows on this rank.
#[derive(Debug, Clone)]
pub struct Geometry {
    pub samples: usize,
    /// Rows inside of tensor-parallel regions, and the border.
    pub region: Region,
    /// Which of these rows are here outside.
    pub own: Range<usize>,
}

impl Geometry {
    /// For samples of `rows` rows and `cols` columns.
    pub fn new(setup: &Setup, rows: usize, cols: usize) -> Self {
        let samples = setup.own_samples().len();
        let size = Rows { rows: samples * rows, cols };
        let region = Region { size, sequence_parallel: setup.sequence_parallel };
        let tp = setup.place.tp();
        Self { samples, region, own: region.own_rows(tp.rank, tp.size) }
    }

    /// Rows inside.
    pub fn rows(&self) -> usize {
        self.region.size.rows
    }

    /// The matrix outside.
    pub fn outside(&self) -> Rows {
        Rows { rows: self.own.len(), cols: self.region.size.cols }
    }
}

/// What a branch does.
#[derive(Debug, Clone)]
pub enum Inner {
    Attention(Attention),
    Mlp(Mlp),
}

#[derive(Debug, Clone)]
pub struct Branch {
    pub geometry: Geometry,
    pub norm: Norm,
    pub inner: Inner,
    /// Where elements are dropped on the way back.
    pub site: Site,
}

impl Branch {
    fn over(&self) -> Over {
        Over::Rows(self.geometry.outside())
    }

    pub fn remembered(&self, recompute: Recompute) -> Remembered {
        let trunk = Elements::real(self.geometry.outside().len());
        let own = Remembered { after_forward: trunk, after_backward_input: Elements::default() };
        let inner = match &self.inner {
            Inner::Attention(attention) => attention.remembered(self.geometry.samples, recompute),
            Inner::Mlp(mlp) => mlp.remembered(self.geometry.rows()),
        };
        own + Norm::remembered(self.over()) + inner
    }

    pub fn forward<K: Kernels>(
        &self,
        ctx: &Ctx<'_, K>,
        x: K::Buf,
        context: Option<K::Buf>,
        saved: &mut Saved<K::Buf>,
    ) -> Result<K::Buf, StageError> {
        let normed = self.norm.forward(ctx, self.over(), &x, saved.part("norm"));
        let normed = self.geometry.region.enter(ctx, normed)?;
        let inside = saved.part("inner");
        let (summands, bias) = match &self.inner {
            Inner::Attention(attention) => {
                let y = attention.forward(ctx, self.geometry.samples, normed, context, inside);
                (y, attention.bias())
            }
            Inner::Mlp(mlp) => (mlp.forward(ctx, self.geometry.rows(), normed, inside), mlp.bias()),
        };
        let branch = &self.geometry.region.leave(ctx, summands)?;
        let size = self.geometry.outside();
        let (bias, dropout) = (bias.map(|start| ctx.weight(start)), self.dropout(ctx));
        let mut y = ctx.kernels.buffer(size.len());
        ctx.kernels.residual(size, &x, Joined { x: branch, bias, dropout }, &mut y);
        saved.put("x", x);
        Ok(y)
    }

    /// B.
    pub fn backward_input<K: Kernels>(
        &self,
        ctx: &Ctx<'_, K>,
        dy: K::Buf,
        saved: &mut Saved<K::Buf>,
    ) -> Result<K::Buf, StageError> {
        let own = self.own_grad(ctx, &dy)?;
        let given = own.as_ref().unwrap_or(&dy);
        let inside = saved.part("inner");
        let d_normed = match &self.inner {
            Inner::Attention(attention) => {
                attention.backward_input(ctx, self.geometry.samples, given, inside)
            }
            Inner::Mlp(mlp) => mlp.backward_input(ctx, self.geometry.rows(), given, inside),
        };
        let d_normed = self.geometry.region.enter_grad(ctx, d_normed)?;
        let x = saved.take("x");
        let grads = NormGrads { dy: &d_normed, residual: Some(&dy) };
        let dx = self.norm.backward_input(ctx, self.over(), &x, grads, saved.part("norm"));
        saved.part("inner").put("dy", own.unwrap_or(dy));
        Ok(dx)
    }

    /// W.
    pub fn backward_weight<K: Kernels>(&self, kernels: &K, saved: &mut Saved<K::Buf>, grads: &mut K::Buf) {
        let inside = saved.part("inner");
        match &self.inner {
            Inner::Attention(attention) => {
                attention.backward_weight(kernels, self.geometry.samples, inside, grads);
            }
            Inner::Mlp(mlp) => mlp.backward_weight(kernels, self.geometry.rows(), inside, grads),
        }
        self.norm.backward_weight(kernels, saved.part("norm"), grads);
    }

    fn dropout<K: Kernels>(&self, ctx: &Ctx<'_, K>) -> Option<crate::kernels::Dropout> {
        ctx.dropout(self.site, self.geometry.own.start as u64, self.geometry.region.size.cols)
    }

    /// The gradient of the branch, all rows of it, where it is not that of the trunk.
    fn own_grad<K: Kernels>(&self, ctx: &Ctx<'_, K>, dy: &K::Buf) -> Result<Option<K::Buf>, StageError> {
        let dropped = self.dropout(ctx).map(|dropout| {
            let mut dropped = ctx.kernels.buffer(self.geometry.outside().len());
            ctx.kernels.dropout(&dropout, dy, &mut dropped);
            dropped
        });
        let all_rows = self.geometry.region.leave_grad(ctx, dropped.as_ref().unwrap_or(dy))?;
        Ok(all_rows.or(dropped))
    }
}
