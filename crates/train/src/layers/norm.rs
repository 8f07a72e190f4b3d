//! Norms with a gain and a shift.
//!
//! The gradients of gain and shift are sums over the very rows that B walks over, so B computes them too, and W only adds them
//! to the others: a delayed W needs two rows of numbers instead of two tensors.

use crate::kernels::{GroupNorm, Kernels, NormGrad, NormSaved, NormWeights, Normed, PartMut, Rows};
use crate::layers::{Ctx, Elements, Remembered, Saved};
use crate::parameter::{Declaration, Init, Parameters};

/// What is normalised together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Over {
    /// Every row.
    Rows(Rows),
    /// Every group of channels of every sample.
    Groups(GroupNorm),
}

impl Over {
    fn channels(self) -> usize {
        match self {
            Over::Rows(size) => size.cols,
            Over::Groups(size) => size.channels,
        }
    }

    fn len(self) -> usize {
        match self {
            Over::Rows(size) => size.len(),
            Over::Groups(size) => size.samples * size.pixels * size.channels,
        }
    }

    fn stats(self) -> usize {
        match self {
            Over::Rows(size) => 2 * size.rows,
            Over::Groups(size) => 2 * size.samples * size.groups,
        }
    }
}

/// A layer norm or a group norm.
#[derive(Debug, Clone)]
pub struct Norm {
    gamma: usize,
    beta: usize,
    epsilon: f64,
}

/// A norm to be declared.
#[derive(Debug, Clone)]
pub struct NormSpec<'a> {
    /// `name.weight` and `name.bias`.
    pub name: &'a str,
    pub shape: &'a [usize],
    pub split: Option<usize>,
    pub epsilon: f64,
    /// Whether ranks along `tp` see different rows.
    pub partial_over_tp: bool,
}

impl Norm {
    pub fn new(spec: &NormSpec<'_>, parameters: &mut Parameters<'_>) -> Self {
        let mut declare = |kind: &str, init: Init| {
            let declaration = Declaration {
                name: format!("{}.{kind}", spec.name),
                shape: spec.shape,
                split: spec.split,
                init,
                decay: false,
                partial_over_tp: spec.partial_over_tp,
            };
            parameters.declare(declaration).start
        };
        Self {
            gamma: declare("weight", Init::Ones),
            beta: declare("bias", Init::Zeros),
            epsilon: spec.epsilon,
        }
    }

    /// What the norm remembers beside its input.
    pub fn remembered(over: Over) -> Remembered {
        Remembered {
            after_forward: Elements::real(over.stats()),
            after_backward_input: Elements::real(2 * over.channels()),
        }
    }

    pub fn forward<K: Kernels>(
        &self,
        ctx: &Ctx<'_, K>,
        over: Over,
        x: &K::Buf,
        saved: &mut Saved<K::Buf>,
    ) -> K::Buf {
        let mut y = ctx.kernels.buffer(over.len());
        let mut stats = ctx.kernels.buffer(over.stats());
        let (gamma, beta) = (ctx.weight(self.gamma), ctx.weight(self.beta));
        let weights = NormWeights { gamma, beta, epsilon: self.epsilon };
        let out = Normed { y: &mut y, stats: &mut stats };
        match over {
            Over::Rows(size) => ctx.kernels.layer_norm(size, x, weights, out),
            Over::Groups(size) => ctx.kernels.group_norm(size, x, weights, out),
        }
        saved.put("stats", stats);
        y
    }

    /// B: `residual` plus the gradient of `x`.
    pub fn backward_input<K: Kernels>(
        &self,
        ctx: &Ctx<'_, K>,
        over: Over,
        x: &K::Buf,
        grads: NormGrads<'_, K::Buf>,
        saved: &mut Saved<K::Buf>,
    ) -> K::Buf {
        let stats = saved.take("stats");
        let mut dx = ctx.kernels.buffer(over.len());
        let mut sums = ctx.kernels.buffer(2 * over.channels());
        let given = NormSaved { x, stats: &stats, gamma: ctx.weight(self.gamma) };
        let out = NormGrad { residual: grads.residual, dx: &mut dx, sums: &mut sums };
        match over {
            Over::Rows(size) => ctx.kernels.layer_norm_grad(size, given, grads.dy, out),
            Over::Groups(size) => ctx.kernels.group_norm_grad(size, given, grads.dy, out),
        }
        saved.put("sums", sums);
        dx
    }

    /// W.
    pub fn backward_weight<K: Kernels>(&self, kernels: &K, saved: &mut Saved<K::Buf>, grads: &mut K::Buf) {
        // Gamma and beta were declared one after the other, so they lie together.
        kernels.add(&saved.take("sums"), PartMut { buf: grads, start: self.gamma });
    }
}

/// Gradients that come into a norm's B.
#[derive(Debug)]
pub struct NormGrads<'a, B> {
    pub dy: &'a B,
    pub residual: Option<&'a B>,
}
