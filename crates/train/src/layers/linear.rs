//! A linear map of rows: `y = x W + b`, with W `[in, out]` as GPT-2 stores it.

use crate::kernels::{Gemm, Kernels, PartMut, Rows};
use crate::layers::Ctx;
use crate::parameter::{Declaration, Init, Parameters, Weight};

/// A rank's part of a linear map.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Weight,
    bias: Option<Weight>,
    ins: usize,
    outs: usize,
}

/// A linear map to be declared: its dims in as many as it takes to say what is split.
#[derive(Debug, Clone)]
pub struct LinearSpec<'a> {
    /// `name.weight` and `name.bias`.
    pub name: &'a str,
    pub ins: &'a [usize],
    pub outs: &'a [usize],
    /// The dim of `[ins.., outs..]` that `tp` splits.
    pub split: Option<usize>,
    pub init: Init,
    pub bias: bool,
}

impl Linear {
    pub fn new(spec: &LinearSpec<'_>, parameters: &mut Parameters<'_>) -> Self {
        let shape: Vec<usize> = spec.ins.iter().chain(spec.outs).copied().collect();
        let weight = parameters.declare(Declaration {
            name: format!("{}.weight", spec.name),
            shape: &shape,
            split: spec.split,
            init: spec.init,
            decay: true,
            partial_over_tp: false,
        });
        let bias = spec.bias.then(|| {
            parameters.declare(Declaration {
                name: format!("{}.bias", spec.name),
                shape: spec.outs,
                split: spec.split.and_then(|dim| dim.checked_sub(spec.ins.len())),
                init: Init::Zeros,
                decay: false,
                partial_over_tp: false,
            })
        });
        let (ins, outs) = weight.dims.split_at(spec.ins.len());
        let (ins, outs) = (ins.iter().product(), outs.iter().product());
        Self { weight, bias, ins, outs }
    }

    /// Columns of `x` on this rank.
    pub fn ins(&self) -> usize {
        self.ins
    }

    /// Columns of `y` on this rank.
    pub fn outs(&self) -> usize {
        self.outs
    }

    /// Where the bias lies, for those who add it later than here.
    pub fn bias(&self) -> Option<usize> {
        self.bias.as_ref().map(|b| b.start)
    }

    /// `x W + b`, for so many rows (a rank without columns cannot tell from `x`).
    pub fn forward<K: Kernels>(&self, ctx: &Ctx<'_, K>, rows: usize, x: &K::Buf) -> K::Buf {
        self.product(ctx, rows, x, self.bias())
    }

    /// `x W`: summands of a row-parallel map, which gets its bias after the sum.
    pub fn forward_without_bias<K: Kernels>(&self, ctx: &Ctx<'_, K>, rows: usize, x: &K::Buf) -> K::Buf {
        self.product(ctx, rows, x, None)
    }

    fn product<K: Kernels>(&self, ctx: &Ctx<'_, K>, rows: usize, x: &K::Buf, bias: Option<usize>) -> K::Buf {
        let mut y = ctx.kernels.buffer(rows * self.outs);
        let bias = bias.map(|start| ctx.weight(start));
        let gemm = Gemm::new(rows, self.outs, self.ins);
        ctx.kernels.gemm(gemm, x.into(), ctx.weight(self.weight.start), bias, (&mut y).into());
        y
    }

    /// B: `dx = dy W'`.
    pub fn backward_input<K: Kernels>(&self, ctx: &Ctx<'_, K>, rows: usize, dy: &K::Buf) -> K::Buf {
        let mut dx = ctx.kernels.buffer(rows * self.ins);
        let gemm = Gemm::new(rows, self.ins, self.outs).b_transposed();
        ctx.kernels.gemm(gemm, dy.into(), ctx.weight(self.weight.start), None, (&mut dx).into());
        dx
    }

    /// W: `dW += x' dy`, `db += ` the sum of the rows of `dy`.
    pub fn backward_weight<K: Kernels>(
        &self,
        kernels: &K,
        rows: usize,
        x: &K::Buf,
        dy: &K::Buf,
        grads: &mut K::Buf,
    ) {
        let gemm = Gemm::new(self.ins, self.outs, rows).a_transposed().added();
        let start = self.weight.start;
        kernels.gemm(gemm, x.into(), dy.into(), None, PartMut { buf: grads, start });
        if let Some(bias) = &self.bias {
            let size = Rows { rows, cols: self.outs };
            kernels.sum_rows(size, dy, PartMut { buf: grads, start: bias.start });
        }
    }
}
