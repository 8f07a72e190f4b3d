//! Attention branches: heads are columns, so a rank has some of the heads.
//!
//! Weights are declared with the head as a dim of its own (`[in, 3, heads, head_dim]`), so that `tp` splits heads, unevenly where it must
//! (8 heads over 3 ranks: 3, 3 and 2), and never a head.

use crate::kernels::random::Stream;
use crate::kernels::{Attention as Size, AttentionDropout, AttentionSaved, Kernels, Projected, ProjectedMut};
use crate::layers::linear::{Linear, LinearSpec};
use crate::layers::{Ctx, Elements, Remembered, Saved};
use crate::parameter::{Init, Parameters};
use crate::stage::Recompute;

/// Self-attention, or attention to a context.
#[derive(Debug, Clone)]
pub struct Attention {
    /// Queries, keys and values of the rows; or queries alone.
    project: Linear,
    /// Keys and values of a context.
    context: Option<Linear>,
    out: Linear,
    heads: usize,
    first_head: usize,
    all_heads: usize,
    head_dim: usize,
    queries: usize,
    keys: usize,
    causal: bool,
    /// Where scores are dropped: site and rate.
    dropout: (u32, f64),
}

/// A branch to be declared.
#[derive(Debug, Clone)]
pub struct AttentionSpec<'a> {
    pub project: &'a str,
    pub out: &'a str,
    /// Attention to a context: name, columns and rows of it.
    pub context: Option<(&'a str, usize, usize)>,
    pub width: usize,
    pub heads: usize,
    /// Rows of a sample.
    pub queries: usize,
    pub causal: bool,
    pub dropout: (u32, f64),
    pub bias: bool,
    pub init: Init,
    pub out_init: Init,
}

impl Attention {
    pub fn new(spec: &AttentionSpec<'_>, parameters: &mut Parameters<'_>) -> Self {
        let head_dim = spec.width / spec.heads;
        let (width, heads) = ([spec.width], [spec.heads, head_dim]);
        let parts = if spec.context.is_some() { 1 } else { 3 };
        let mut projection = |name, ins: &[usize], parts| {
            let outs = [parts, spec.heads, head_dim];
            let (init, bias) = (spec.init, spec.bias);
            Linear::new(&LinearSpec { name, ins, outs: &outs, split: Some(2), init, bias }, parameters)
        };
        let project = projection(spec.project, &width, parts);
        let context = spec.context.map(|(name, cols, _)| projection(name, &[cols], 2));
        let (init, bias) = (spec.out_init, true);
        let out = LinearSpec { name: spec.out, ins: &heads, outs: &width, split: Some(0), init, bias };
        let out = Linear::new(&out, parameters);
        let held = parameters.place.tp().part(spec.heads);
        Self {
            project,
            context,
            out,
            heads: held.len(),
            first_head: held.start,
            all_heads: spec.heads,
            head_dim,
            queries: spec.queries,
            keys: spec.context.map_or(spec.queries, |(_, _, rows)| rows),
            causal: spec.causal,
            dropout: spec.dropout,
        }
    }

    /// Where the last bias lies: it is added after the sum over the group.
    pub fn bias(&self) -> Option<usize> {
        self.out.bias()
    }

    pub fn remembered(&self, samples: usize, recompute: Recompute) -> Remembered {
        let (rows, keys) = (samples * self.queries, samples * self.keys);
        let width = self.heads * self.head_dim;
        let context = self.context.as_ref();
        let inputs = rows * self.project.ins() + context.map_or(0, |c| keys * c.ins());
        let projected = rows * self.project.outs() + context.map_or(0, |c| keys * c.outs());
        let insides = projected + rows * width + rows * self.heads;
        let forward = if recompute == Recompute::Attention { inputs } else { inputs + insides };
        Remembered {
            after_forward: Elements::real(forward),
            // The gradients of the projections, the result of the heads, and the gradient that came in.
            after_backward_input: Elements::real(inputs + projected + rows * width + rows * self.out.outs()),
        }
    }

    fn size<K: Kernels>(&self, ctx: &Ctx<'_, K>, samples: usize) -> Size {
        let (site, rate) = self.dropout;
        let dropout = ctx.dropping(rate).then(|| AttentionDropout {
            rate,
            stream: Stream::new(ctx.seed, ctx.microbatch.step, site),
            first_sample: ctx.first_sample,
            first_head: self.first_head as u64,
            all_heads: self.all_heads as u64,
        });
        let Self { heads, head_dim, queries, keys, causal, .. } = *self;
        Size { samples, heads, head_dim, queries, keys, causal, dropout }
    }

    /// Summands of the result, without the last bias.
    pub fn forward<K: Kernels>(
        &self,
        ctx: &Ctx<'_, K>,
        samples: usize,
        x: K::Buf,
        context: Option<K::Buf>,
        saved: &mut Saved<K::Buf>,
    ) -> K::Buf {
        saved.put("x", x);
        if let Some(context) = context {
            saved.put("context", context);
        }
        self.heads(ctx, samples, saved);
        let y = self.out.forward_without_bias(ctx, samples * self.queries, saved.get("heads"));
        if ctx.recompute == Recompute::Attention {
            saved.take("heads");
            saved.take("lse");
            saved.take("projected");
            if self.context.is_some() {
                saved.take("projected context");
            }
        }
        y
    }

    /// From the saved inputs to the result of the heads.
    fn heads<K: Kernels>(&self, ctx: &Ctx<'_, K>, samples: usize, saved: &mut Saved<K::Buf>) {
        let rows = samples * self.queries;
        let projected = self.project.forward(ctx, rows, saved.get("x"));
        saved.put("projected", projected);
        if let Some(linear) = &self.context {
            let projected = linear.forward(ctx, samples * self.keys, saved.get("context"));
            saved.put("projected context", projected);
        }
        let mut y = ctx.kernels.buffer(rows * self.heads * self.head_dim);
        let mut lse = ctx.kernels.buffer(rows * self.heads);
        ctx.kernels.attention(&self.size(ctx, samples), self.projected(saved), &mut y, &mut lse);
        saved.put("heads", y);
        saved.put("lse", lse);
    }

    fn projected<'a, B: crate::kernels::Buffer>(&self, saved: &'a Saved<B>) -> Projected<'a, B> {
        match self.context {
            None => Projected::Fused(saved.get("projected")),
            Some(_) => Projected::Apart { q: saved.get("projected"), kv: saved.get("projected context") },
        }
    }

    /// B: summands of the gradient of `x`. The caller remembers `dy` for W, by [`Saved::put`], as `dy`.
    pub fn backward_input<K: Kernels>(
        &self,
        ctx: &Ctx<'_, K>,
        samples: usize,
        dy: &K::Buf,
        saved: &mut Saved<K::Buf>,
    ) -> K::Buf {
        if ctx.recompute == Recompute::Attention {
            self.heads(ctx, samples, saved);
        }
        let rows = samples * self.queries;
        let d_heads = self.out.backward_input(ctx, rows, dy);
        let mut d_projected = ctx.kernels.buffer(rows * self.project.outs());
        let mut d_context = self.context.as_ref().map(|c| ctx.kernels.buffer(samples * self.keys * c.outs()));
        let grads = match &mut d_context {
            None => ProjectedMut::Fused(&mut d_projected),
            Some(kv) => ProjectedMut::Apart { q: &mut d_projected, kv },
        };
        let given = AttentionSaved { y: saved.get("heads"), lse: saved.get("lse") };
        let size = self.size(ctx, samples);
        ctx.kernels.attention_grad(&size, self.projected(saved), given, &d_heads, grads);
        let dx = self.project.backward_input(ctx, rows, &d_projected);
        saved.take("projected");
        saved.take("lse");
        saved.put("d_projected", d_projected);
        if let Some(d_context) = d_context {
            saved.take("projected context");
            saved.put("d_context", d_context);
        }
        dx
    }

    /// W.
    pub fn backward_weight<K: Kernels>(
        &self,
        kernels: &K,
        samples: usize,
        saved: &mut Saved<K::Buf>,
        grads: &mut K::Buf,
    ) {
        let rows = samples * self.queries;
        self.out.backward_weight(kernels, rows, &saved.take("heads"), &saved.take("dy"), grads);
        if let Some(linear) = &self.context {
            let (x, dy) = (saved.take("context"), saved.take("d_context"));
            linear.backward_weight(kernels, samples * self.keys, &x, &dy, grads);
        }
        self.project.backward_weight(kernels, rows, &saved.take("x"), &saved.take("d_projected"), grads);
    }
}
