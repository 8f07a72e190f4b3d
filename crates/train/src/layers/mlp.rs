//! The feed-forward branch: a column-parallel map, an activation, a row-parallel map.

use crate::kernels::{Activation, Kernels};
use crate::layers::linear::{Linear, LinearSpec};
use crate::layers::{Ctx, Elements, Remembered, Saved};
use crate::parameter::{Init, Parameters};

/// Two linear maps with an activation between them.
#[derive(Debug, Clone)]
pub struct Mlp {
    /// To the hidden columns; each rank has some of them.
    up: Linear,
    down: Linear,
    activation: Activation,
}

/// A feed-forward branch to be declared.
#[derive(Debug, Clone)]
pub struct MlpSpec<'a> {
    pub up: &'a str,
    pub down: &'a str,
    pub width: usize,
    pub hidden: usize,
    pub activation: Activation,
    pub up_init: Init,
    pub down_init: Init,
}

impl Mlp {
    pub fn new(spec: &MlpSpec<'_>, parameters: &mut Parameters<'_>) -> Self {
        let (width, hidden) = ([spec.width], [spec.hidden]);
        let up = LinearSpec {
            name: spec.up,
            ins: &width,
            outs: &hidden,
            split: Some(1),
            init: spec.up_init,
            bias: true,
        };
        let down = LinearSpec {
            name: spec.down,
            ins: &hidden,
            outs: &width,
            split: Some(0),
            init: spec.down_init,
            bias: true,
        };
        let (up, down) = (Linear::new(&up, parameters), Linear::new(&down, parameters));
        Self { up, down, activation: spec.activation }
    }

    /// Where the last bias lies: it is added after the sum over the group.
    pub fn bias(&self) -> Option<usize> {
        self.down.bias()
    }

    pub fn remembered(&self, rows: usize) -> Remembered {
        let (width, hidden) = (self.up.ins(), self.up.outs());
        Remembered {
            after_forward: Elements::real(rows * (width + 2 * hidden)),
            // The gradient that came in has replaced nothing: it is remembered too.
            after_backward_input: Elements::real(rows * (2 * width + 2 * hidden)),
        }
    }

    /// Summands of the result, without the last bias.
    pub fn forward<K: Kernels>(
        &self,
        ctx: &Ctx<'_, K>,
        rows: usize,
        x: K::Buf,
        saved: &mut Saved<K::Buf>,
    ) -> K::Buf {
        let hidden = self.up.forward(ctx, rows, &x);
        let mut active = ctx.kernels.buffer(rows * self.up.outs());
        ctx.kernels.activate(self.activation, &hidden, &mut active);
        let y = self.down.forward_without_bias(ctx, rows, &active);
        saved.put("x", x);
        saved.put("hidden", hidden);
        saved.put("active", active);
        y
    }

    /// B: summands of the gradient of `x`. The caller remembers `dy` for W, by [`Saved::put`], as `dy`.
    pub fn backward_input<K: Kernels>(
        &self,
        ctx: &Ctx<'_, K>,
        rows: usize,
        dy: &K::Buf,
        saved: &mut Saved<K::Buf>,
    ) -> K::Buf {
        let mut d_hidden = self.down.backward_input(ctx, rows, dy);
        ctx.kernels.activate_grad(self.activation, &saved.take("hidden"), &mut d_hidden);
        let dx = self.up.backward_input(ctx, rows, &d_hidden);
        saved.put("d_hidden", d_hidden);
        dx
    }

    /// W.
    pub fn backward_weight<K: Kernels>(
        &self,
        kernels: &K,
        rows: usize,
        saved: &mut Saved<K::Buf>,
        grads: &mut K::Buf,
    ) {
        self.down.backward_weight(kernels, rows, &saved.take("active"), &saved.take("dy"), grads);
        self.up.backward_weight(kernels, rows, &saved.take("x"), &saved.take("d_hidden"), grads);
    }
}
