//! A transformer block: attention and a feed-forward branch, each behind a norm, each added back to the trunk.

use super::{DEVIATION, Geometry, GptConfig, site};
use crate::chain::{Flow, Unit};
use crate::kernels::{Activation, Branch, Kernels};
use crate::layers::attention::{Attention, AttentionSpec};
use crate::layers::mlp::{Mlp, MlpSpec};
use crate::layers::norm::{Norm, NormGrads, NormSpec, Over};
use crate::layers::{Ctx, Elements, Remembered, Saved, Site};
use crate::parameter::{Init, Parameters};
use crate::stage::{Recompute, StageError};

pub struct Block {
    geometry: Geometry,
    norm_1: Norm,
    attention: Attention,
    norm_2: Norm,
    mlp: Mlp,
    after_attention: Site,
    after_mlp: Site,
}

impl Block {
    pub fn new(
        config: &GptConfig,
        layer: usize,
        geometry: Geometry,
        parameters: &mut Parameters<'_>,
    ) -> Self {
        let name = |rest: &str| format!("h.{layer}.{rest}");
        let init = Init::Normal { deviation: DEVIATION };
        // GPT-2: what is added to the trunk starts smaller the more often something is added.
        let out_init = Init::Normal { deviation: DEVIATION / (2.0 * config.layers as f64).sqrt() };
        let first_site = 1 + 3 * layer as u32;
        let norm = |name: &str, parameters: &mut Parameters<'_>| {
            let spec = NormSpec {
                name,
                shape: &[config.width],
                split: None,
                epsilon: config.epsilon,
                partial_over_tp: geometry.region.sequence_parallel,
            };
            Norm::new(&spec, parameters)
        };
        let norm_1 = norm(&name("ln_1"), parameters);
        let attention = AttentionSpec {
            project: &name("attn.c_attn"),
            out: &name("attn.c_proj"),
            context: None,
            width: config.width,
            heads: config.heads,
            queries: config.context,
            causal: true,
            dropout: (first_site, config.dropout),
            bias: true,
            init,
            out_init,
        };
        let attention = Attention::new(&attention, parameters);
        let norm_2 = norm(&name("ln_2"), parameters);
        let mlp = MlpSpec {
            up: &name("mlp.c_fc"),
            down: &name("mlp.c_proj"),
            width: config.width,
            hidden: config.hidden,
            activation: Activation::Gelu,
            up_init: init,
            down_init: out_init,
        };
        let mlp = Mlp::new(&mlp, parameters);
        let after_attention = site(config, first_site + 1);
        let after_mlp = site(config, first_site + 2);
        Self { geometry, norm_1, attention, norm_2, mlp, after_attention, after_mlp }
    }

    fn over(&self) -> Over {
        Over::Rows(self.geometry.outside())
    }

    /// The trunk and a branch's summands together.
    fn join<K: Kernels>(
        &self,
        ctx: &Ctx<'_, K>,
        trunk: &K::Buf,
        summands: K::Buf,
        bias: Option<usize>,
        site: Site,
    ) -> Result<K::Buf, StageError> {
        let size = self.geometry.outside();
        let x = &self.geometry.region.leave(ctx, summands)?;
        let bias = bias.map(|start| ctx.weight(start));
        let dropout = ctx.dropout(site, self.geometry.own.start as u64, size.cols);
        let mut y = ctx.kernels.buffer(size.len());
        ctx.kernels.residual(size, trunk, Branch { x, bias, dropout }, &mut y);
        Ok(y)
    }

    /// The gradient of a branch's summands, all rows of it, where it is not that of the trunk.
    fn split<K: Kernels>(
        &self,
        ctx: &Ctx<'_, K>,
        dy: &K::Buf,
        site: Site,
    ) -> Result<Option<K::Buf>, StageError> {
        let size = self.geometry.outside();
        let dropout = ctx.dropout(site, self.geometry.own.start as u64, size.cols);
        let dropped = dropout.map(|dropout| {
            let mut dropped = ctx.kernels.buffer(size.len());
            ctx.kernels.dropout(&dropout, dy, &mut dropped);
            dropped
        });
        let all_rows = self.geometry.region.leave_grad(ctx, dropped.as_ref().unwrap_or(dy))?;
        Ok(all_rows.or(dropped))
    }
}

impl<K: Kernels> Unit<K> for Block {
    fn forward(
        &self,
        ctx: &Ctx<'_, K>,
        flow: &mut Flow<K::Buf>,
        saved: &mut Saved<K::Buf>,
    ) -> Result<(), StageError> {
        let (region, rows) = (self.geometry.region, self.geometry.rows());
        let x = flow.take_real("h");
        let normed = self.norm_1.forward(ctx, self.over(), &x, saved.part("norm_1"));
        let normed = region.enter(ctx, normed)?;
        let attended =
            self.attention.forward(ctx, self.geometry.samples, normed, None, saved.part("attention"));
        let middle = self.join(ctx, &x, attended, self.attention.bias(), self.after_attention)?;
        saved.put("x", x);
        let normed = self.norm_2.forward(ctx, self.over(), &middle, saved.part("norm_2"));
        let normed = region.enter(ctx, normed)?;
        let summands = self.mlp.forward(ctx, rows, normed, saved.part("mlp"));
        let y = self.join(ctx, &middle, summands, self.mlp.bias(), self.after_mlp)?;
        saved.put("middle", middle);
        flow.put_real("h", y);
        Ok(())
    }

    fn backward_input(
        &self,
        ctx: &Ctx<'_, K>,
        flow: &mut Flow<K::Buf>,
        saved: &mut Saved<K::Buf>,
    ) -> Result<(), StageError> {
        let (region, rows) = (self.geometry.region, self.geometry.rows());
        let dy = flow.take_real("h");
        let own = self.split(ctx, &dy, self.after_mlp)?;
        let d_normed = self.mlp.backward_input(ctx, rows, own.as_ref().unwrap_or(&dy), saved.part("mlp"));
        let d_normed = region.enter_grad(ctx, d_normed)?;
        let middle = saved.take("middle");
        let grads = NormGrads { dy: &d_normed, residual: Some(&dy) };
        let d_middle = self.norm_2.backward_input(ctx, self.over(), &middle, grads, saved.part("norm_2"));
        saved.part("mlp").put("dy", own.unwrap_or(dy));

        let own = self.split(ctx, &d_middle, self.after_attention)?;
        let given = own.as_ref().unwrap_or(&d_middle);
        let samples = self.geometry.samples;
        let d_normed = self.attention.backward_input(ctx, samples, given, saved.part("attention"));
        let d_normed = region.enter_grad(ctx, d_normed)?;
        let x = saved.take("x");
        let grads = NormGrads { dy: &d_normed, residual: Some(&d_middle) };
        let dx = self.norm_1.backward_input(ctx, self.over(), &x, grads, saved.part("norm_1"));
        saved.part("attention").put("dy", own.unwrap_or(d_middle));
        flow.put_real("h", dx);
        Ok(())
    }

    fn backward_weight(&self, kernels: &K, saved: &mut Saved<K::Buf>, grads: &mut K::Buf) {
        self.mlp.backward_weight(kernels, self.geometry.rows(), saved.part("mlp"), grads);
        self.norm_2.backward_weight(kernels, saved.part("norm_2"), grads);
        self.attention.backward_weight(kernels, self.geometry.samples, saved.part("attention"), grads);
        self.norm_1.backward_weight(kernels, saved.part("norm_1"), grads);
    }

    fn remembered(&self, recompute: Recompute) -> Remembered {
        let trunk = Elements::real(2 * self.geometry.outside().len());
        let own = Remembered { after_forward: trunk, after_backward_input: Elements::default() };
        let norm = Norm::remembered(self.over());
        let attention = self.attention.remembered(self.geometry.samples, recompute);
        own + norm + norm + attention + self.mlp.remembered(self.geometry.rows())
    }
}
