//! Convolutions over `[samples, height, width, channels]`, as products of patches.
//!
//! The patches of an image are nine times as large as the image, so they are made for a few samples at a time, and again for W.

use crate::flat::FlatMut;
use crate::graph::build::{Builder, Keep};
use crate::graph::op::{Arg, Cost, Ctx, Made, Needs, Op, Reads, Saved};
use crate::graph::ops::linear::{Parallel, of_outs};
use crate::graph::{Typed, Val};
use crate::kernels::{BufSlice, Conv as Size, Gemm, Kernels, PartMut, Rows};
use crate::parameter::Init;
use crate::stage::{StageError, Value};

/// Elements of patches that exist at a time, unless one sample has more.
const PATCHES: usize = 1 << 22;

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

/// A convolution to be declared: its channels in as many dims as it takes to say what is split. Odd kernels keep the size of an
/// image; stride 2 halves it.
#[derive(Debug, Clone)]
pub struct ConvSpec<'a> {
    pub name: &'a str,
    pub kernel: usize,
    pub stride: usize,
    pub ins: &'a [usize],
    pub outs: &'a [usize],
    pub parallel: Parallel<'a>,
    pub init: Init,
}

struct Conv {
    grid: Grid,
    weight: usize,
    /// Where the bias lies, and whether this rank adds it.
    bias: (usize, bool),
    kernel: usize,
    stride: usize,
    ins: usize,
    outs: usize,
}

impl<K: Kernels> Builder<'_, '_, K> {
    pub fn conv(&mut self, x: Val, grid: Grid, spec: &ConvSpec<'_>) -> Val {
        let (x, lie, split) = self.shared(x, spec.parallel, spec.ins.len());
        let typed = self.typed(x).clone();
        let kernel = [spec.kernel; 2];
        let shape: Vec<usize> = kernel.iter().chain(spec.ins).chain(spec.outs).copied().collect();
        let of_weight: Vec<_> = split.iter().map(|(dim, axis)| (dim + 2, *axis)).collect();
        let weight = self.weight(x, format!("{}.weight", spec.name), &shape, &of_weight, (spec.init, true));
        let of_bias = of_outs(&split, spec.ins.len());
        let bias = self.weight(x, format!("{}.bias", spec.name), spec.outs, &of_bias, (Init::Zeros, false));
        let outs = weight.dims[2 + spec.ins.len()..].iter().product();
        let op = Conv {
            grid,
            weight: weight.start,
            bias: (bias.start, self.adds_bias(spec.parallel)),
            kernel: spec.kernel,
            stride: spec.stride,
            ins: typed.cols,
            outs,
        };
        let pixels = op.result().pixels();
        let out = Typed { lie, cols: outs, all_rows: pixels, rows: 0..pixels, ..typed };
        self.push(op, &[x], out, Keep::Always)
    }
}

impl Conv {
    /// The images that come out.
    fn result(&self) -> Grid {
        let size = self.size(self.grid.samples);
        Grid { samples: self.grid.samples, height: size.out_height(), width: size.out_width() }
    }

    fn size(&self, samples: usize) -> Size {
        let Grid { height, width, .. } = self.grid;
        let (channels, kernel, stride, padding) = (self.ins, self.kernel, self.stride, self.kernel / 2);
        Size { samples, height, width, channels, kernel, stride, padding }
    }

    /// Runs of samples whose patches exist together: the first sample and the size of each.
    fn runs(&self) -> Vec<(usize, Size)> {
        let one = self.size(1).patches().len().max(1);
        let samples = (PATCHES / one).max(1);
        let run = |first: usize| (first, self.size(samples.min(self.grid.samples - first)));
        (0..self.grid.samples).step_by(samples).map(run).collect()
    }
}

impl<K: Kernels> Op<K> for Conv {
    fn name(&self) -> &'static str {
        "conv"
    }

    fn needs(&self) -> Needs {
        Needs {
            backward: Reads { gradient: true, ..Reads::default() },
            weights: Reads { ins: vec![0], gradient: true, ..Reads::default() },
            ..Needs::default()
        }
    }

    fn has_weights(&self) -> bool {
        true
    }

    fn cost(&self) -> Cost {
        let patch = (self.kernel * self.kernel * self.ins) as f64;
        Cost { matrix: 2.0 * self.result().pixels() as f64 * patch * self.outs as f64, attention: 0.0 }
    }

    fn forward(&self, ctx: &Ctx<'_, K>, ins: Vec<Arg<'_, K::Buf>>) -> Result<Vec<Value<K::Buf>>, StageError> {
        let mut y = ctx.kernels.buffer(self.result().pixels() * self.outs);
        let (start, adds) = self.bias;
        for (first, size) in self.runs() {
            let Rows { rows, cols } = size.patches();
            let mut patches = ctx.kernels.buffer(rows * cols);
            ctx.kernels.patches(&size, first, ins[0].real(), &mut patches);
            let bias = adds.then(|| ctx.weight(start));
            let start = first * (rows / size.samples) * self.outs;
            let gemm = Gemm::new(rows, self.outs, cols);
            let target = PartMut { buf: &mut y, start };
            ctx.kernels.gemm(gemm, (&patches).into(), ctx.weight(self.weight), bias, target);
        }
        Ok(vec![Value::Real(y)])
    }

    fn backward(&self, ctx: &Ctx<'_, K>, saved: Saved<'_, K::Buf>) -> Result<Made<K::Buf>, StageError> {
        let dy = saved.gradient.real();
        let mut dx = ctx.kernels.buffer(self.grid.pixels() * self.ins);
        for (first, size) in self.runs() {
            let Rows { rows, cols } = size.patches();
            let mut patches = ctx.kernels.buffer(rows * cols);
            let start = first * (rows / size.samples) * self.outs;
            let gemm = Gemm::new(rows, cols, self.outs).b_transposed();
            let (dy, weight) = (BufSlice { buf: dy, start }, ctx.weight(self.weight));
            ctx.kernels.gemm(gemm, dy, weight, None, (&mut patches).into());
            ctx.kernels.patches_grad(&size, first, &patches, &mut dx);
        }
        Ok(Made::one(dx))
    }

    fn weights(&self, kernels: &K, saved: Saved<'_, K::Buf>, grads: &mut FlatMut<'_, K::Buf>) {
        let (x, dy) = (saved.ins[0].real(), saved.gradient.real());
        for (first, size) in self.runs() {
            let Rows { rows, cols } = size.patches();
            let mut patches = kernels.buffer(rows * cols);
            kernels.patches(&size, first, x, &mut patches);
            let start = first * (rows / size.samples) * self.outs;
            let gemm = Gemm::new(cols, self.outs, rows).a_transposed().added();
            let target = grads.at(self.weight);
            kernels.gemm(gemm, (&patches).into(), BufSlice { buf: dy, start }, None, target);
        }
        let size = Rows { rows: self.result().pixels(), cols: self.outs };
        kernels.sum_rows(size, dy, grads.at(self.bias.0));
    }
}
