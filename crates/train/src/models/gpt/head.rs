//! The last norm, logits over the vocabulary, and their cross-entropy.
//!
//! Each rank has the logits of its part of the vocabulary; what the softmax needs of the others are three numbers a row, a maximum
//! and two sums (Megatron-LM's vocabulary-parallel cross-entropy).

use super::GptConfig;
use super::embed::declare_tokens;
use crate::chain::{Flow, Unit};
use crate::group::ReduceOp;
use crate::kernels::{Classes, Gemm, Kernels, PartMut};
use crate::layers::branch::Geometry;
use crate::layers::norm::{Norm, NormGrads, NormSpec, Over};
use crate::layers::{Ctx, Elements, Remembered, Saved};
use crate::parameter::Parameters;
use crate::stage::{Recompute, StageError, Value};

pub struct Head {
    geometry: Geometry,
    norm: Norm,
    /// The table that makes logits, `[vocab, width]`.
    table: usize,
    held: std::ops::Range<usize>,
    context: usize,
    width: usize,
}

impl Head {
    pub fn new(config: &GptConfig, geometry: Geometry, parameters: &mut Parameters<'_>) -> Self {
        let norm = NormSpec {
            name: "ln_f",
            shape: &[config.width],
            split: None,
            epsilon: config.epsilon,
            partial_over_tp: geometry.region.sequence_parallel,
        };
        let norm = Norm::new(&norm, parameters);
        let name = if config.tied { "wte.weight" } else { "lm_head.weight" };
        let table = declare_tokens(name, config, parameters);
        let held = parameters.place.tp().part(config.vocab);
        Self { geometry, norm, table, held, context: config.context, width: config.width }
    }

    fn over(&self) -> Over {
        Over::Rows(self.geometry.outside())
    }

    fn classes<'a>(&self, targets: &'a [i32]) -> Classes<'a> {
        Classes { rows: self.geometry.rows(), held: self.held.clone(), targets }
    }

    /// What one row counts in the batch's mean.
    fn share<K: Kernels>(&self, ctx: &Ctx<'_, K>) -> f64 {
        1.0 / (ctx.microbatch.batch_samples as f64 * self.context as f64)
    }

    /// Logits as exponentials, and the sums of every row over the whole vocabulary.
    fn exponentials<K: Kernels>(
        &self,
        ctx: &Ctx<'_, K>,
        x: &K::Buf,
        targets: &[i32],
    ) -> Result<(K::Buf, K::Buf), StageError> {
        let classes = self.classes(targets);
        let size = classes.size();
        let mut logits = ctx.kernels.buffer(size.len());
        let gemm = Gemm::new(size.rows, size.cols, self.width).b_transposed();
        ctx.kernels.gemm(gemm, x.into(), ctx.weight(self.table), None, (&mut logits).into());
        let mut max = ctx.kernels.buffer(size.rows);
        ctx.kernels.row_max(size, &logits, &mut max);
        ctx.tp.all_reduce(&mut max, ReduceOp::Max)?;
        let mut sums = ctx.kernels.buffer(2 * size.rows);
        ctx.kernels.exp_sums(&classes, &max, &mut logits, &mut sums);
        ctx.tp.all_reduce(&mut sums, ReduceOp::Sum)?;
        Ok((logits, sums))
    }
}

impl<K: Kernels> Unit<K> for Head {
    fn forward(
        &self,
        ctx: &Ctx<'_, K>,
        flow: &mut Flow<K::Buf>,
        saved: &mut Saved<K::Buf>,
    ) -> Result<(), StageError> {
        let x = flow.take_real("h");
        let targets = flow.ids("targets").to_vec();
        let normed = self.norm.forward(ctx, self.over(), &x, saved.part("norm"));
        let normed = self.geometry.region.enter(ctx, normed)?;
        let (exps, sums) = self.exponentials(ctx, &normed, &targets)?;
        let loss = ctx.kernels.cross_entropy(self.geometry.rows(), &sums) * self.share(ctx);
        flow.put("loss", Value::Loss(loss));
        saved.put("x", x);
        saved.put("normed", normed);
        saved.put("exps", exps);
        saved.put("sums", sums);
        saved.put_ids("targets", targets);
        Ok(())
    }

    fn backward_input(
        &self,
        ctx: &Ctx<'_, K>,
        flow: &mut Flow<K::Buf>,
        saved: &mut Saved<K::Buf>,
    ) -> Result<(), StageError> {
        let (targets, sums) = (saved.take_ids("targets"), saved.take("sums"));
        let mut d_logits = saved.take("exps");
        let classes = self.classes(&targets);
        ctx.kernels.cross_entropy_grad(&classes, &sums, self.share(ctx), &mut d_logits);
        let mut d_normed = ctx.kernels.buffer(self.geometry.region.size.len());
        let gemm = Gemm::new(classes.rows, self.width, self.held.len());
        ctx.kernels.gemm(gemm, (&d_logits).into(), ctx.weight(self.table), None, (&mut d_normed).into());
        let d_normed = self.geometry.region.enter_grad(ctx, d_normed)?;
        let x = saved.take("x");
        let grads = NormGrads { dy: &d_normed, residual: None };
        let dx = self.norm.backward_input(ctx, self.over(), &x, grads, saved.part("norm"));
        saved.put("d_logits", d_logits);
        flow.put_real("h", dx);
        Ok(())
    }

    fn backward_weight(&self, kernels: &K, saved: &mut Saved<K::Buf>, grads: &mut K::Buf) {
        let (normed, d_logits) = (saved.take("normed"), saved.take("d_logits"));
        let gemm = Gemm::new(self.held.len(), self.width, self.geometry.rows()).a_transposed().added();
        let target = PartMut { buf: grads, start: self.table };
        kernels.gemm(gemm, (&d_logits).into(), (&normed).into(), None, target);
        self.norm.backward_weight(kernels, saved.part("norm"), grads);
    }

    fn remembered(&self, _: Recompute) -> Remembered {
        let (rows, inside) = (self.geometry.rows(), self.geometry.region.size.len());
        let logits = rows * self.held.len();
        let real = self.geometry.outside().len() + inside + logits + 2 * rows;
        let own = Remembered {
            after_forward: Elements { real, ids: rows },
            after_backward_input: Elements::real(inside + logits),
        };
        own + Norm::remembered(self.over())
    }
}
