//! Attention: heads are columns, so a rank has some of the heads, and none is ever split.

use crate::graph::build::{Builder, Keep};
use crate::graph::op::{Arg, Born, Cache, Cost, Ctx, Extra, Made, Needs, Op, Reads, Saved};
use crate::graph::{Axis, Spread, Typed, Val};
use crate::kernels::random::Stream;
use crate::kernels::{
    Attention as Size, AttentionDropout, AttentionSaved, BufSlice, Kernels, PartMut, Projected, ProjectedMut,
};
use crate::stage::{StageError, Value};

/// Sizes of all heads together.
#[derive(Debug, Clone, Copy)]
pub struct AttentionSpec {
    /// Along which heads of keys and values are split, each with the heads that ask it.
    pub axis: Axis,
    /// Along which the heads that ask the same keys are split.
    pub group_axis: Option<Axis>,
    /// Which of the model's attentions it is, to find its keys and values of earlier rows.
    pub layer: usize,
    pub heads: usize,
    /// Heads of keys and values; each is asked by as many heads of queries.
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Rows of a sample that ask, and that are asked.
    pub queries: usize,
    pub keys: usize,
    pub causal: bool,
    /// Where scores are dropped: site and rate.
    pub dropout: (u32, f64),
}

struct Attention {
    spec: AttentionSpec,
    samples: usize,
    /// Heads here, and the first of them.
    heads: usize,
    first_head: usize,
    kv_heads: usize,
    /// All in one, keys and values apart from queries, or each apart.
    inputs: usize,
}

impl<K: Kernels> Builder<'_, '_, K> {
    /// Rows of queries, keys and values attend to each other.
    pub fn self_attention(&mut self, projected: Val, spec: AttentionSpec) -> Val {
        self.attention(&[projected], spec)
    }

    /// Queries attend to keys and values of other rows.
    pub fn cross_attention(&mut self, queries: Val, keys_and_values: Val, spec: AttentionSpec) -> Val {
        self.attention(&[queries, keys_and_values], spec)
    }

    /// Queries attend to keys and values, each of their own.
    pub fn grouped_attention(&mut self, q: Val, k: Val, v: Val, spec: AttentionSpec) -> Val {
        self.attention(&[q, k, v], spec)
    }

    fn attention(&mut self, ins: &[Val], spec: AttentionSpec) -> Val {
        let typed = self.typed(ins[0]).clone();
        debug_assert_eq!(typed.lie.value[spec.axis.0], Spread::Columns, "heads are columns");
        let held = self.team.along(spec.axis).part(spec.kv_heads);
        let all = spec.heads / spec.kv_heads;
        let group = spec.group_axis.map_or(0..all, |axis| self.team.along(axis).part(all));
        assert!(
            held.len() <= 1 || group.len() == all,
            "heads that ask the same keys are split for one of them at a time"
        );
        let (heads, first_head) = (held.len() * group.len(), held.start * all + group.start);
        let samples = typed.rows.len() / spec.queries;
        let op = Attention { spec, samples, heads, first_head, kv_heads: held.len(), inputs: ins.len() };
        let out = Typed { cols: heads * spec.head_dim, ..typed };
        self.push(op, ins, out, Keep::Attention)
    }
}

impl Attention {
    fn size<K: Kernels>(&self, ctx: &Ctx<'_, K>) -> Size {
        let AttentionSpec { heads: all_heads, head_dim, queries, keys, causal, dropout, .. } = self.spec;
        let (site, rate) = dropout;
        let dropout = ctx.dropping(rate).then(|| AttentionDropout {
            rate,
            stream: Stream::new(ctx.seed, ctx.microbatch.step, site),
            first_sample: ctx.first_sample,
            first_head: self.first_head as u64,
            all_heads: all_heads as u64,
        });
        Size {
            samples: self.samples,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim,
            queries,
            keys,
            causal,
            dropout,
        }
    }

    fn rows(&self) -> usize {
        self.samples * self.spec.queries
    }

    /// Puts keys and values behind those of earlier rows; how many there are then.
    fn remember<K: Kernels>(
        &self,
        ctx: &Ctx<'_, K>,
        x: Projected<'_, K::Buf>,
        cache: &mut Cache<K::Buf>,
    ) -> usize {
        let (cols, rows, before) = (self.kv_heads * self.spec.head_dim, self.rows(), cache.rows);
        for (part, kept) in cache.layers[self.spec.layer].iter_mut().enumerate() {
            // Where they lie: rows so far apart, from so far on.
            let (from, apart, first) = match x {
                Projected::Fused(x) => (x, 3 * cols, (1 + part) * cols),
                Projected::Apart { kv, .. } => (kv, 2 * cols, part * cols),
                Projected::Three { k, v, .. } => ([k, v][part], cols, 0),
            };
            for row in 0..rows {
                let from = BufSlice { buf: from, start: row * apart + first };
                ctx.kernels.copy(from, PartMut { buf: kept, start: (before + row) * cols }, cols);
            }
        }
        before + rows
    }

    /// Queries alone, where they do not lie alone.
    fn queries<K: Kernels>(&self, ctx: &Ctx<'_, K>, x: Projected<'_, K::Buf>) -> Option<K::Buf> {
        let Projected::Fused(x) = x else { return None };
        let cols = self.width();
        let mut q = ctx.kernels.buffer(self.rows() * cols);
        for row in 0..self.rows() {
            let from = BufSlice { buf: x, start: row * 3 * cols };
            ctx.kernels.copy(from, PartMut { buf: &mut q, start: row * cols }, cols);
        }
        Some(q)
    }

    fn width(&self) -> usize {
        self.heads * self.spec.head_dim
    }
}

fn projected<'a, B: crate::kernels::Buffer>(ins: &'a [Arg<'_, B>]) -> Projected<'a, B> {
    match ins {
        [fused] => Projected::Fused(fused.real()),
        [q, kv] => Projected::Apart { q: q.real(), kv: kv.real() },
        [q, k, v] => Projected::Three { q: q.real(), k: k.real(), v: v.real() },
        other => panic!("attention has {} inputs", other.len()),
    }
}

impl<K: Kernels> Op<K> for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn needs(&self) -> Needs {
        let ins = (0..self.inputs).collect();
        let backward = Reads { ins, out: true, extras: vec![0], gradient: true };
        Needs { backward, ..Needs::default() }
    }

    /// The logarithms of the sums of exponentials.
    fn extras(&self) -> Vec<Extra> {
        vec![Extra::wide(self.rows() * self.heads, Born::Forward)]
    }

    /// Scores and their sums of values, for the pairs that are not masked.
    fn cost(&self) -> Cost {
        let pairs = self.rows() as f64 * self.spec.keys as f64 * if self.spec.causal { 0.5 } else { 1.0 };
        Cost { matrix: 0.0, attention: 4.0 * pairs * self.width() as f64 }
    }

    fn forward(&self, ctx: &Ctx<'_, K>, ins: Vec<Arg<'_, K::Buf>>) -> Result<Vec<Value<K::Buf>>, StageError> {
        let mut y = ctx.kernels.buffer(self.rows() * self.width());
        let mut lse = ctx.kernels.wide(self.rows() * self.heads);
        match ctx.cache {
            None => ctx.kernels.attention(&self.size(ctx), projected(&ins), &mut y, &mut lse),
            Some(cache) => {
                let keys = self.remember(ctx, projected(&ins), &mut cache.borrow_mut());
                let q = self.queries(ctx, projected(&ins));
                let q = q.as_ref().unwrap_or_else(|| ins[0].real());
                let [k, v] = &cache.borrow().layers[self.spec.layer];
                let size = Size { keys, ..self.size(ctx) };
                ctx.kernels.attention(&size, Projected::Three { q, k, v }, &mut y, &mut lse);
            }
        }
        Ok(vec![Value::Real(y), Value::Real(lse)])
    }

    fn backward(&self, ctx: &Ctx<'_, K>, saved: Saved<'_, K::Buf>) -> Result<Made<K::Buf>, StageError> {
        let (kernels, size) = (ctx.kernels, self.size(ctx));
        let given = AttentionSaved { y: saved.out.real(), lse: saved.extras[0].real() };
        let (rows, keys) = (self.rows(), self.samples * self.spec.keys);
        let x = projected(&saved.ins);
        let dy = saved.gradient.real();
        let kv_width = self.kv_heads * self.spec.head_dim;
        let gradients = match self.inputs {
            1 => {
                let mut d = kernels.buffer(rows * 3 * self.width());
                kernels.attention_grad(&size, x, given, dy, ProjectedMut::Fused(&mut d));
                vec![d]
            }
            2 => {
                let (mut q, mut kv) =
                    (kernels.buffer(rows * self.width()), kernels.buffer(keys * 2 * kv_width));
                kernels.attention_grad(&size, x, given, dy, ProjectedMut::Apart { q: &mut q, kv: &mut kv });
                vec![q, kv]
            }
            _ => {
                let mut q = kernels.buffer(rows * self.width());
                let [mut k, mut v] = [(); 2].map(|()| kernels.buffer(keys * kv_width));
                let out = ProjectedMut::Three { q: &mut q, k: &mut k, v: &mut v };
                kernels.attention_grad(&size, x, given, dy, out);
                vec![q, k, v]
            }
        };
        Ok(Made::several(gradients))
    }
}
