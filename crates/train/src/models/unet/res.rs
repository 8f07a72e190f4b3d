//! A residual block: two convolutions behind norms, with the time step's embedding added between them.
//!
//! ```text
//! x -+-> norm -> silu -> conv (columns) -> + time -> norm -> silu -> conv (rows) -> sum -+-> y
//!    +-> 1x1 if the channels change ------------------------------------------------------+
//! ```
//!
//! Between the convolutions a rank has some groups of the second norm, so that norm needs no other rank.

use super::{UnetConfig, init};
use crate::kernels::{Activation, Branch, GroupNorm, Kernels, Rows};
use crate::layers::conv::{Conv, ConvSpec, Grid};
use crate::layers::linear::{Linear, LinearSpec};
use crate::layers::norm::{Norm, NormGrads, NormSpec, Over};
use crate::layers::region::Region;
use crate::layers::{Ctx, Elements, Remembered, Saved};
use crate::parameter::Parameters;
use crate::stage::StageError;

pub struct Res {
    grid: Grid,
    ins: usize,
    outs: usize,
    groups: usize,
    /// Groups between the convolutions on this rank.
    own_groups: usize,
    time_width: usize,
    norm_1: Norm,
    conv_1: Conv,
    time: Linear,
    norm_2: Norm,
    conv_2: Conv,
    shortcut: Option<Linear>,
}

impl Res {
    pub fn new(
        config: &UnetConfig,
        name: &str,
        (ins, outs): (usize, usize),
        grid: Grid,
        parameters: &mut Parameters<'_>,
    ) -> Self {
        let name = |rest: &str| format!("{name}.{rest}");
        let (groups, each, time_width) = (config.groups, outs / config.groups, config.time_width());
        let between = [groups, each];
        let norm = |name: String, shape: &[usize], split, parameters: &mut Parameters<'_>| {
            let (name, epsilon) = (&name, config.epsilon);
            Norm::new(&NormSpec { name, shape, split, epsilon, partial_over_tp: false }, parameters)
        };
        let conv = |name: String, ins: &[usize], outs: &[usize], split, parameters: &mut Parameters<'_>| {
            let init = init(9 * ins.iter().product::<usize>());
            let split = Some(split);
            Conv::new(&ConvSpec { name: &name, kernel: 3, stride: 1, ins, outs, split, init }, parameters)
        };
        let norm_1 = norm(name("norm1"), &[ins], None, parameters);
        let conv_1 = conv(name("conv1"), &[ins], &between, 1, parameters);
        let time = LinearSpec {
            name: &name("time_emb_proj"),
            ins: &[time_width],
            outs: &between,
            split: Some(1),
            init: init(time_width),
            bias: true,
        };
        let time = Linear::new(&time, parameters);
        let norm_2 = norm(name("norm2"), &between, Some(0), parameters);
        let conv_2 = conv(name("conv2"), &between, &[outs], 0, parameters);
        let shortcut = (ins != outs).then(|| {
            let (name, init) = (name("conv_shortcut"), init(ins));
            let spec = LinearSpec { name: &name, ins: &[ins], outs: &[outs], split: None, init, bias: true };
            Linear::new(&spec, parameters)
        });
        let own_groups = parameters.place.tp().part(groups).len();
        Self {
            grid,
            ins,
            outs,
            groups,
            own_groups,
            time_width,
            norm_1,
            conv_1,
            time,
            norm_2,
            conv_2,
            shortcut,
        }
    }

    fn over(&self, channels: usize, groups: usize) -> Over {
        let pixels = self.grid.height * self.grid.width;
        Over::Groups(GroupNorm { samples: self.grid.samples, pixels, channels, groups })
    }

    fn over_1(&self) -> Over {
        self.over(self.ins, self.groups)
    }

    fn over_2(&self) -> Over {
        self.over(self.conv_1.outs(), self.own_groups)
    }

    fn pixels(&self) -> usize {
        self.grid.pixels()
    }

    /// Pixels with the channels between the convolutions.
    fn between(&self) -> Rows {
        Rows { rows: self.pixels(), cols: self.conv_1.outs() }
    }

    fn region(&self, rows: usize, cols: usize) -> Region {
        Region { size: Rows { rows, cols }, sequence_parallel: false }
    }

    pub fn remembered(&self) -> Remembered {
        let (x, between) = (self.pixels() * self.ins, self.between().len());
        let time = self.grid.samples * self.time_width;
        let shortcut = if self.shortcut.is_some() { x } else { 0 };
        let y = self.pixels() * self.outs;
        let own = Remembered {
            after_forward: Elements::real(2 * x + 2 * between + time),
            after_backward_input: Elements::real(
                x + shortcut + 2 * between + time + self.grid.samples * self.conv_1.outs() + y,
            ),
        };
        own + Norm::remembered(self.over_1()) + Norm::remembered(self.over_2())
    }

    pub fn forward<K: Kernels>(
        &self,
        ctx: &Ctx<'_, K>,
        x: K::Buf,
        temb: &K::Buf,
        saved: &mut Saved<K::Buf>,
    ) -> Result<K::Buf, StageError> {
        let normed = self.norm_1.forward(ctx, self.over_1(), &x, saved.part("norm_1"));
        let active = activate(ctx.kernels, &normed, self.pixels() * self.ins);
        saved.put("normed_1", normed);
        let mut h = self.conv_1.forward(ctx, self.grid, &active);
        let time = activate(ctx.kernels, temb, self.grid.samples * self.time_width);
        let time = self.time.forward(ctx, self.grid.samples, &time);
        ctx.kernels.add_per_sample(self.grid.height * self.grid.width, self.between(), &time, &mut h);
        let normed = self.norm_2.forward(ctx, self.over_2(), &h, saved.part("norm_2"));
        let active = activate(ctx.kernels, &normed, self.between().len());
        saved.put("normed_2", normed);
        saved.put("h", h);
        let summands = self.conv_2.forward_without_bias(ctx, self.grid, &active);
        let size = Rows { rows: self.pixels(), cols: self.outs };
        let branch = &self.region(size.rows, size.cols).leave(ctx, summands)?;
        let shortcut = self.shortcut.as_ref().map(|linear| linear.forward(ctx, size.rows, &x));
        let branch = Branch { x: branch, bias: Some(ctx.weight(self.conv_2.bias())), dropout: None };
        let mut y = ctx.kernels.buffer(size.len());
        ctx.kernels.residual(size, shortcut.as_ref().unwrap_or(&x), branch, &mut y);
        saved.put("x", x);
        saved.put("temb", duplicate(ctx.kernels, temb, self.grid.samples * self.time_width));
        Ok(y)
    }

    /// B: the gradients of `x` and of the time's embedding.
    pub fn backward_input<K: Kernels>(
        &self,
        ctx: &Ctx<'_, K>,
        dy: K::Buf,
        saved: &mut Saved<K::Buf>,
    ) -> Result<(K::Buf, K::Buf), StageError> {
        let (kernels, grid) = (ctx.kernels, self.grid);
        let mut d = self.conv_2.backward_input(ctx, grid, &dy);
        kernels.activate_grad(Activation::Silu, saved.get("normed_2"), &mut d);
        let h = saved.take("h");
        let grads = NormGrads { dy: &d, residual: None };
        let dh = self.norm_2.backward_input(ctx, self.over_2(), &h, grads, saved.part("norm_2"));
        let mut d_time = kernels.buffer(grid.samples * self.conv_1.outs());
        kernels.add_per_sample_grad(grid.height * grid.width, self.between(), &dh, &mut d_time);
        let d_temb = self.time.backward_input(ctx, grid.samples, &d_time);
        let mut d_temb = self.region(grid.samples, self.time_width).enter_grad(ctx, d_temb)?;
        kernels.activate_grad(Activation::Silu, saved.get("temb"), &mut d_temb);
        let d = self.conv_1.backward_input(ctx, grid, &dh);
        let mut d = self.region(self.pixels(), self.ins).enter_grad(ctx, d)?;
        kernels.activate_grad(Activation::Silu, saved.get("normed_1"), &mut d);
        let d_short = self.shortcut.as_ref().map(|s| s.backward_input(ctx, self.pixels(), &dy));
        let x = saved.take("x");
        let grads = NormGrads { dy: &d, residual: Some(d_short.as_ref().unwrap_or(&dy)) };
        let dx = self.norm_1.backward_input(ctx, self.over_1(), &x, grads, saved.part("norm_1"));
        if self.shortcut.is_some() {
            saved.put("x", x);
        }
        saved.put("dh", dh);
        saved.put("d_time", d_time);
        saved.put("dy", dy);
        Ok((dx, d_temb))
    }

    /// W. Activations are cheap, so they are computed again.
    pub fn backward_weight<K: Kernels>(&self, kernels: &K, saved: &mut Saved<K::Buf>, grads: &mut K::Buf) {
        let (dy, dh) = (saved.take("dy"), saved.take("dh"));
        let active = activate(kernels, &saved.take("normed_2"), self.between().len());
        self.conv_2.backward_weight(kernels, self.grid, &active, &dy, grads);
        if let Some(shortcut) = &self.shortcut {
            shortcut.backward_weight(kernels, self.pixels(), &saved.take("x"), &dy, grads);
        }
        self.norm_2.backward_weight(kernels, saved.part("norm_2"), grads);
        let time = activate(kernels, &saved.take("temb"), self.grid.samples * self.time_width);
        self.time.backward_weight(kernels, self.grid.samples, &time, &saved.take("d_time"), grads);
        let active = activate(kernels, &saved.take("normed_1"), self.pixels() * self.ins);
        self.conv_1.backward_weight(kernels, self.grid, &active, &dh, grads);
        self.norm_1.backward_weight(kernels, saved.part("norm_1"), grads);
    }
}

pub(super) fn activate<K: Kernels>(kernels: &K, x: &K::Buf, len: usize) -> K::Buf {
    let mut y = kernels.buffer(len);
    kernels.activate(Activation::Silu, x, &mut y);
    y
}

pub(super) fn duplicate<K: Kernels>(kernels: &K, x: &K::Buf, len: usize) -> K::Buf {
    let mut y = kernels.buffer(len);
    kernels.copy(x.into(), (&mut y).into(), len);
    y
}
