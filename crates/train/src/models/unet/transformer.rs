//! A transformer over the pixels of an image: self-attention, attention to the context, a feed-forward branch.

use super::{UnetConfig, init};
use crate::chain::Setup;
use crate::kernels::{Activation, Branch as Joined, GroupNorm, Kernels, Rows};
use crate::layers::attention::{Attention, AttentionSpec};
use crate::layers::branch::{Branch, Geometry, Inner};
use crate::layers::conv::Grid;
use crate::layers::linear::{Linear, LinearSpec};
use crate::layers::mlp::{Mlp, MlpSpec};
use crate::layers::norm::{Norm, NormGrads, NormSpec, Over};
use crate::layers::{Ctx, Elements, Remembered, Saved, Site};
use crate::parameter::Parameters;
use crate::stage::{Recompute, StageError};

pub struct Transformer {
    grid: Grid,
    channels: usize,
    groups: usize,
    context: usize,
    norm: Norm,
    project_in: Linear,
    to_itself: Branch,
    to_context: Branch,
    mlp: Branch,
    project_out: Linear,
}

impl Transformer {
    pub fn new(
        config: &UnetConfig,
        name: &str,
        channels: usize,
        grid: Grid,
        setup: &Setup,
        parameters: &mut Parameters<'_>,
    ) -> Self {
        let name = |rest: &str| format!("{name}.{rest}");
        let normed = |rest: &str, parameters: &mut Parameters<'_>| {
            let (name, epsilon) = (name(rest), config.epsilon);
            let spec =
                NormSpec { name: &name, shape: &[channels], split: None, epsilon, partial_over_tp: false };
            Norm::new(&spec, parameters)
        };
        let mapped = |rest: &str, parameters: &mut Parameters<'_>| {
            let (name, both, init) = (name(rest), [channels], init(channels));
            let spec = LinearSpec { name: &name, ins: &both, outs: &both, split: None, init, bias: true };
            Linear::new(&spec, parameters)
        };
        let pixels = grid.height * grid.width;
        let attended = |rest: &str, context: bool, parameters: &mut Parameters<'_>| {
            let context_name = name(&format!("{rest}.to_kv"));
            let attention = AttentionSpec {
                project: &name(&format!("{rest}.{}", if context { "to_q" } else { "to_qkv" })),
                out: &name(&format!("{rest}.to_out")),
                context: context.then_some((&context_name, config.context_width, config.context_rows)),
                width: channels,
                heads: config.heads,
                queries: pixels,
                causal: false,
                dropout: (0, 0.0),
                bias: false,
                init: init(channels),
                out_init: init(channels),
            };
            Inner::Attention(Attention::new(&attention, parameters))
        };
        let geometry = Geometry::new(setup, pixels, channels);
        let site = Site { id: 0, rate: 0.0, rows: pixels };
        let branch = |norm, inner| Branch { geometry: geometry.clone(), norm, inner, site };
        let norm = normed("norm", parameters);
        let project_in = mapped("proj_in", parameters);
        let norm_1 = normed("norm1", parameters);
        let to_itself = branch(norm_1, attended("attn1", false, parameters));
        let norm_2 = normed("norm2", parameters);
        let to_context = branch(norm_2, attended("attn2", true, parameters));
        let norm_3 = normed("norm3", parameters);
        let mlp = MlpSpec {
            up: &name("ff.up"),
            down: &name("ff.down"),
            width: channels,
            hidden: 4 * channels,
            activation: Activation::Gelu,
            up_init: init(channels),
            down_init: init(4 * channels),
        };
        let mlp = branch(norm_3, Inner::Mlp(Mlp::new(&mlp, parameters)));
        let project_out = mapped("proj_out", parameters);
        let context = grid.samples * config.context_rows * config.context_width;
        let groups = config.groups;
        Self { grid, channels, groups, context, norm, project_in, to_itself, to_context, mlp, project_out }
    }

    fn over(&self) -> Over {
        let pixels = self.grid.height * self.grid.width;
        let (samples, channels, groups) = (self.grid.samples, self.channels, self.groups);
        Over::Groups(GroupNorm { samples, pixels, channels, groups })
    }

    fn size(&self) -> Rows {
        Rows { rows: self.grid.pixels(), cols: self.channels }
    }

    pub fn remembered(&self, recompute: Recompute) -> Remembered {
        let image = self.size().len();
        // The input, normed, and what goes into the last map; then the two maps' inputs and gradients.
        let own = Remembered {
            after_forward: Elements::real(3 * image),
            after_backward_input: Elements::real(4 * image),
        };
        let branches = [&self.to_itself, &self.to_context, &self.mlp];
        own + Norm::remembered(self.over()) + branches.iter().map(|b| b.remembered(recompute)).sum()
    }

    pub fn forward<K: Kernels>(
        &self,
        ctx: &Ctx<'_, K>,
        x: K::Buf,
        context: &K::Buf,
        saved: &mut Saved<K::Buf>,
    ) -> Result<K::Buf, StageError> {
        let size = self.size();
        let normed = self.norm.forward(ctx, self.over(), &x, saved.part("norm"));
        let h = self.project_in.forward(ctx, size.rows, &normed);
        saved.put("normed", normed);
        let h = self.to_itself.forward(ctx, h, None, saved.part("to_itself"))?;
        let context = super::res::duplicate(ctx.kernels, context, self.context);
        let h = self.to_context.forward(ctx, h, Some(context), saved.part("to_context"))?;
        let h = self.mlp.forward(ctx, h, None, saved.part("mlp"))?;
        let branch = &self.project_out.forward(ctx, size.rows, &h);
        saved.put("h", h);
        let mut y = ctx.kernels.buffer(size.len());
        ctx.kernels.residual(size, &x, Joined { x: branch, bias: None, dropout: None }, &mut y);
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
        let rows = self.size().rows;
        let d = self.project_out.backward_input(ctx, rows, &dy);
        let d = self.mlp.backward_input(ctx, d, saved.part("mlp"))?;
        let d = self.to_context.backward_input(ctx, d, saved.part("to_context"))?;
        let dh = self.to_itself.backward_input(ctx, d, saved.part("to_itself"))?;
        let d_normed = self.project_in.backward_input(ctx, rows, &dh);
        let x = saved.take("x");
        let grads = NormGrads { dy: &d_normed, residual: Some(&dy) };
        let dx = self.norm.backward_input(ctx, self.over(), &x, grads, saved.part("norm"));
        saved.put("dh", dh);
        saved.put("dy", dy);
        Ok(dx)
    }

    /// W.
    pub fn backward_weight<K: Kernels>(&self, kernels: &K, saved: &mut Saved<K::Buf>, grads: &mut K::Buf) {
        let rows = self.size().rows;
        self.project_out.backward_weight(kernels, rows, &saved.take("h"), &saved.take("dy"), grads);
        self.mlp.backward_weight(kernels, saved.part("mlp"), grads);
        self.to_context.backward_weight(kernels, saved.part("to_context"), grads);
        self.to_itself.backward_weight(kernels, saved.part("to_itself"), grads);
        self.project_in.backward_weight(kernels, rows, &saved.take("normed"), &saved.take("dh"), grads);
        self.norm.backward_weight(kernels, saved.part("norm"), grads);
    }
}
