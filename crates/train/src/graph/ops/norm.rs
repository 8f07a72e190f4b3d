//! Norms with a gain and a shift, or with a gain alone.
//!
//! The gradients of gain and shift are sums over the very rows that B walks over, so B computes them too, and W only adds them
//! to the others: a delayed W needs two rows of numbers instead of two tensors.

use crate::flat::FlatMut;
use crate::graph::build::{Builder, Keep};
use crate::graph::op::{Arg, Born, Ctx, Extra, Made, Needs, Op, Reads, Saved};
use crate::graph::{Axis, Spread, Val};
use crate::kernels::{Buffer as _, GroupNorm, Kernels, NormGrad, NormSaved, NormWeights, Normed, Rows};
use crate::parameter::Init;
use crate::stage::{StageError, Value};

/// What is normalised together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Over {
    /// Every row.
    Rows(Rows),
    /// Every row, about zero: RMS norm.
    Squares(Rows),
    /// Every group of channels of every sample.
    Groups(GroupNorm),
}

impl Over {
    fn channels(self) -> usize {
        match self {
            Over::Rows(size) | Over::Squares(size) => size.cols,
            Over::Groups(size) => size.channels,
        }
    }

    fn len(self) -> usize {
        match self {
            Over::Rows(size) | Over::Squares(size) => size.len(),
            Over::Groups(size) => size.samples * size.pixels * size.channels,
        }
    }

    fn stats(self) -> usize {
        match self {
            Over::Rows(size) => 2 * size.rows,
            Over::Squares(size) => size.rows,
            Over::Groups(size) => 2 * size.samples * size.groups,
        }
    }

    /// Gains and shifts.
    fn weights(self) -> usize {
        match self {
            Over::Squares(size) => size.cols,
            _ => 2 * self.channels(),
        }
    }
}

/// A norm to be declared: `name.weight`, and `name.bias` where it has one.
#[derive(Debug, Clone)]
pub struct NormSpec<'a> {
    pub name: &'a str,
    pub epsilon: f64,
}

struct Norm {
    over: Over,
    gamma: usize,
    beta: Option<usize>,
    epsilon: f64,
}

impl<K: Kernels> Builder<'_, '_, K> {
    /// Every row by itself.
    pub fn layer_norm(&mut self, x: Val, spec: &NormSpec<'_>) -> Val {
        let size = self.typed(x).size();
        self.normed(x, spec, &[size.cols], &[], Over::Rows(size))
    }

    /// Every row by itself, about zero and without a shift.
    pub fn rms_norm(&mut self, x: Val, spec: &NormSpec<'_>) -> Val {
        let size = self.typed(x).size();
        self.normed(x, spec, &[size.cols], &[], Over::Squares(size))
    }

    /// Groups of channels of images of `pixels` pixels. Where channels are split, whole groups are.
    pub fn group_norm(
        &mut self,
        x: Val,
        spec: &NormSpec<'_>,
        pixels: usize,
        groups: usize,
        each: usize,
    ) -> Val {
        let size = self.typed(x).size();
        let over =
            GroupNorm { samples: size.rows / pixels, pixels, channels: size.cols, groups: size.cols / each };
        match self.typed(x).split(Spread::Columns) {
            Some(axis) => self.normed(x, spec, &[groups, each], &[(0, axis)], Over::Groups(over)),
            None => self.normed(x, spec, &[groups * each], &[], Over::Groups(over)),
        }
    }

    fn normed(
        &mut self,
        x: Val,
        spec: &NormSpec<'_>,
        shape: &[usize],
        split: &[(usize, Axis)],
        over: Over,
    ) -> Val {
        let mut declare = |kind: &str, init: Init| {
            self.weight(x, format!("{}.{kind}", spec.name), shape, split, (init, false)).start
        };
        let gamma = declare("weight", Init::Ones);
        let beta = (!matches!(over, Over::Squares(_))).then(|| declare("bias", Init::Zeros));
        let op = Norm { over, gamma, beta, epsilon: spec.epsilon };
        let out = self.typed(x).clone();
        self.push(op, &[x], out, Keep::Always)
    }
}

impl<K: Kernels> Op<K> for Norm {
    fn name(&self) -> &'static str {
        "norm"
    }

    fn needs(&self) -> Needs {
        Needs {
            backward: Reads { ins: vec![0], extras: vec![0], gradient: true, ..Reads::default() },
            weights: Reads { extras: vec![1], ..Reads::default() },
            adds_to: Some(0),
            ..Needs::default()
        }
    }

    /// Means and deviations; the gradients of gain and shift.
    fn extras(&self) -> Vec<Extra> {
        vec![Extra::wide(self.over.stats(), Born::Forward), Extra::wide(self.over.weights(), Born::Backward)]
    }

    fn has_weights(&self) -> bool {
        true
    }

    fn forward(&self, ctx: &Ctx<'_, K>, ins: Vec<Arg<'_, K::Buf>>) -> Result<Vec<Value<K::Buf>>, StageError> {
        let mut y = ctx.kernels.buffer(self.over.len());
        let mut stats = ctx.kernels.wide(self.over.stats());
        let (gamma, epsilon) = (ctx.weight(self.gamma), self.epsilon);
        let weights = || {
            let beta = ctx.weight(self.beta.expect("only RMS norms have no shift"));
            NormWeights { gamma, beta, epsilon }
        };
        let out = Normed { y: &mut y, stats: &mut stats };
        match self.over {
            Over::Rows(size) => ctx.kernels.layer_norm(size, ins[0].real(), weights(), out),
            Over::Squares(size) => ctx.kernels.rms_norm(size, ins[0].real(), gamma, epsilon, out),
            Over::Groups(size) => ctx.kernels.group_norm(size, ins[0].real(), weights(), out),
        }
        Ok(vec![Value::Real(y), Value::Real(stats)])
    }

    fn backward(&self, ctx: &Ctx<'_, K>, saved: Saved<'_, K::Buf>) -> Result<Made<K::Buf>, StageError> {
        let mut dx = ctx.kernels.buffer(self.over.len());
        let mut sums = ctx.kernels.wide(self.over.weights());
        let (x, stats) = (saved.ins[0].real(), saved.extras[0].real());
        let given = NormSaved { x, stats, gamma: ctx.weight(self.gamma) };
        let out = NormGrad { residual: saved.residual, dx: &mut dx, sums: &mut sums };
        let dy = saved.gradient.real();
        match self.over {
            Over::Rows(size) => ctx.kernels.layer_norm_grad(size, given, dy, out),
            Over::Squares(size) => ctx.kernels.rms_norm_grad(size, given, dy, out),
            Over::Groups(size) => ctx.kernels.group_norm_grad(size, given, dy, out),
        }
        Ok(Made { extras: vec![Value::Real(sums)], ..Made::one(dx) })
    }

    fn weights(&self, kernels: &K, saved: Saved<'_, K::Buf>, grads: &mut FlatMut<'_, K::Buf>) {
        // Gamma and beta were declared one after the other, so they lie together.
        let sums = saved.extras[1].real();
        kernels.add(sums.into(), grads.at(self.gamma), sums.len());
    }
}
