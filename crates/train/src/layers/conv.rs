//! Convolutions over `[samples, height, width, channels]`, as products of patches.
//!
//! The patches of an image are nine times as large as the image, so they are made for a few samples at a time, and again for W.

use crate::kernels::{BufSlice, Conv as Size, Gemm, Kernels, PartMut, Rows};
use crate::layers::Ctx;
use crate::parameter::{Declaration, Init, Parameters, Weight};

/// Elements of patches that exist at a time, unless one sample has more.
const PATCHES: usize = 1 << 22;

/// A rank's part of a convolution.
#[derive(Debug, Clone)]
pub struct Conv {
    weight: Weight,
    bias: Weight,
    kernel: usize,
    stride: usize,
    ins: usize,
    outs: usize,
}

/// A convolution to be declared: its channels in as many dims as it takes to say what is split. Odd kernels keep the size of an
/// image; stride 2 halves it.
#[derive(Debug, Clone)]
pub struct ConvSpec<'a> {
    pub name: &'a str,
    pub kernel: usize,
    pub stride: usize,
    pub ins: &'a [usize],
    pub outs: &'a [usize],
    /// The dim of `[ins.., outs..]` that `tp` splits.
    pub split: Option<usize>,
    pub init: Init,
}

/// The images a convolution is applied to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    pub samples: usize,
    pub height: usize,
    pub width: usize,
}

impl Grid {
    pub fn pixels(self) -> usize {
        self.samples * self.height * self.width
    }
}

impl Conv {
    pub fn new(spec: &ConvSpec<'_>, parameters: &mut Parameters<'_>) -> Self {
        let kernel = [spec.kernel; 2];
        let shape: Vec<usize> = kernel.iter().chain(spec.ins).chain(spec.outs).copied().collect();
        let weight = parameters.declare(Declaration {
            name: format!("{}.weight", spec.name),
            shape: &shape,
            split: spec.split.map(|dim| dim + 2),
            init: spec.init,
            decay: true,
            partial_over_tp: false,
        });
        let bias = parameters.declare(Declaration {
            name: format!("{}.bias", spec.name),
            shape: spec.outs,
            split: spec.split.and_then(|dim| dim.checked_sub(spec.ins.len())),
            init: Init::Zeros,
            decay: false,
            partial_over_tp: false,
        });
        let (ins, outs) = weight.dims[2..].split_at(spec.ins.len());
        let (ins, outs) = (ins.iter().product(), outs.iter().product());
        Self { weight, bias, kernel: spec.kernel, stride: spec.stride, ins, outs }
    }

    /// Channels of `x` on this rank.
    pub fn ins(&self) -> usize {
        self.ins
    }

    /// Channels of `y` on this rank.
    pub fn outs(&self) -> usize {
        self.outs
    }

    pub fn bias(&self) -> usize {
        self.bias.start
    }

    /// The images that come out.
    pub fn result(&self, grid: Grid) -> Grid {
        let size = self.size(grid, grid.samples);
        Grid { samples: grid.samples, height: size.out_height(), width: size.out_width() }
    }

    fn size(&self, grid: Grid, samples: usize) -> Size {
        let Grid { height, width, .. } = grid;
        let (channels, kernel, stride, padding) = (self.ins, self.kernel, self.stride, self.kernel / 2);
        Size { samples, height, width, channels, kernel, stride, padding }
    }

    /// Runs of samples whose patches exist together: the first sample and the size of each.
    fn runs(&self, grid: Grid) -> Vec<(usize, Size)> {
        let one = self.size(grid, 1).patches().len().max(1);
        let samples = (PATCHES / one).max(1);
        let run = |first: usize| (first, self.size(grid, samples.min(grid.samples - first)));
        (0..grid.samples).step_by(samples).map(run).collect()
    }

    pub fn forward<K: Kernels>(&self, ctx: &Ctx<'_, K>, grid: Grid, x: &K::Buf) -> K::Buf {
        self.product(ctx, grid, x, Some(self.bias.start))
    }

    /// Summands of a row-parallel convolution, which gets its bias after the sum.
    pub fn forward_without_bias<K: Kernels>(&self, ctx: &Ctx<'_, K>, grid: Grid, x: &K::Buf) -> K::Buf {
        self.product(ctx, grid, x, None)
    }

    fn product<K: Kernels>(&self, ctx: &Ctx<'_, K>, grid: Grid, x: &K::Buf, bias: Option<usize>) -> K::Buf {
        let mut y = ctx.kernels.buffer(self.result(grid).pixels() * self.outs);
        for (first, size) in self.runs(grid) {
            let Rows { rows, cols } = size.patches();
            let mut patches = ctx.kernels.buffer(rows * cols);
            ctx.kernels.patches(&size, first, x, &mut patches);
            let start = first * (rows / size.samples) * self.outs;
            let gemm = Gemm::new(rows, self.outs, cols);
            let (weight, bias) = (ctx.weight(self.weight.start), bias.map(|b| ctx.weight(b)));
            ctx.kernels.gemm(gemm, (&patches).into(), weight, bias, PartMut { buf: &mut y, start });
        }
        y
    }

    /// B.
    pub fn backward_input<K: Kernels>(&self, ctx: &Ctx<'_, K>, grid: Grid, dy: &K::Buf) -> K::Buf {
        let mut dx = ctx.kernels.buffer(grid.pixels() * self.ins);
        for (first, size) in self.runs(grid) {
            let Rows { rows, cols } = size.patches();
            let mut patches = ctx.kernels.buffer(rows * cols);
            let start = first * (rows / size.samples) * self.outs;
            let gemm = Gemm::new(rows, cols, self.outs).b_transposed();
            let (dy, weight) = (BufSlice { buf: dy, start }, ctx.weight(self.weight.start));
            ctx.kernels.gemm(gemm, dy, weight, None, (&mut patches).into());
            ctx.kernels.patches_grad(&size, first, &patches, &mut dx);
        }
        dx
    }

    /// W.
    pub fn backward_weight<K: Kernels>(
        &self,
        kernels: &K,
        grid: Grid,
        x: &K::Buf,
        dy: &K::Buf,
        grads: &mut K::Buf,
    ) {
        for (first, size) in self.runs(grid) {
            let Rows { rows, cols } = size.patches();
            let mut patches = kernels.buffer(rows * cols);
            kernels.patches(&size, first, x, &mut patches);
            let start = first * (rows / size.samples) * self.outs;
            let gemm = Gemm::new(cols, self.outs, rows).a_transposed().added();
            let target = PartMut { buf: grads, start: self.weight.start };
            kernels.gemm(gemm, (&patches).into(), BufSlice { buf: dy, start }, None, target);
        }
        let size = Rows { rows: self.result(grid).pixels(), cols: self.outs };
        kernels.sum_rows(size, dy, PartMut { buf: grads, start: self.bias.start });
    }
}
