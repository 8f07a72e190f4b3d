//! The two ends: from an image and its time step to channels, and from channels to the noise and the loss.

use super::res::{activate, duplicate};
use super::{UnetConfig, init, skip_name};
use crate::chain::{Flow, Unit};
use crate::kernels::{Activation, GroupNorm, Kernels};
use crate::layers::conv::{Conv, ConvSpec, Grid};
use crate::layers::linear::{Linear, LinearSpec};
use crate::layers::norm::{Norm, NormGrads, NormSpec, Over};
use crate::layers::{Ctx, Elements, Remembered, Saved};
use crate::parameter::Parameters;
use crate::stage::{Recompute, StageError, Value};

pub struct Stem {
    grid: Grid,
    conv: Conv,
    /// Columns of the waves that a time step becomes.
    waves: usize,
    time_1: Linear,
    time_2: Linear,
}

impl Stem {
    pub fn new(config: &UnetConfig, grid: Grid, parameters: &mut Parameters<'_>) -> Self {
        let (ins, base, wide) = ([config.image_channels], [config.base], [config.time_width()]);
        let outs = [config.channels(0)];
        let init_in = init(9 * config.image_channels);
        let conv = ConvSpec {
            name: "conv_in",
            kernel: 3,
            stride: 1,
            ins: &ins,
            outs: &outs,
            split: None,
            init: init_in,
        };
        let conv = Conv::new(&conv, parameters);
        let mut time = |name: &str, ins: &[usize]| {
            let spec = LinearSpec { name, ins, outs: &wide, split: None, init: init(ins[0]), bias: true };
            Linear::new(&spec, parameters)
        };
        let time_1 = time("time_embedding.linear_1", &base);
        let time_2 = time("time_embedding.linear_2", &wide);
        Self { grid, conv, waves: config.base, time_1, time_2 }
    }

    fn time_len(&self) -> usize {
        self.grid.samples * self.time_1.outs()
    }

    fn waves<K: Kernels>(&self, kernels: &K, time: &[i32]) -> K::Buf {
        let mut waves = kernels.buffer(self.grid.samples * self.waves);
        kernels.time_waves(time, self.waves, &mut waves);
        waves
    }
}

impl<K: Kernels> Unit<K> for Stem {
    fn forward(
        &self,
        ctx: &Ctx<'_, K>,
        flow: &mut Flow<K::Buf>,
        saved: &mut Saved<K::Buf>,
    ) -> Result<(), StageError> {
        let samples = self.grid.samples;
        let image = duplicate(ctx.kernels, flow.real("image"), self.grid.pixels() * self.conv.ins());
        let h = self.conv.forward(ctx, self.grid, &image);
        let time = flow.ids("time").to_vec();
        let hidden = self.time_1.forward(ctx, samples, &self.waves(ctx.kernels, &time));
        let active = activate(ctx.kernels, &hidden, self.time_len());
        let temb = self.time_2.forward(ctx, samples, &active);
        flow.put_real(&skip_name(0), duplicate(ctx.kernels, &h, self.grid.pixels() * self.conv.outs()));
        flow.put_real("h", h);
        flow.put_real("temb", temb);
        saved.put("image", image);
        saved.put("hidden", hidden);
        saved.put_ids("time", time);
        Ok(())
    }

    fn backward_input(
        &self,
        ctx: &Ctx<'_, K>,
        flow: &mut Flow<K::Buf>,
        saved: &mut Saved<K::Buf>,
    ) -> Result<(), StageError> {
        let mut dh = flow.take_real("h");
        ctx.kernels.add(&flow.take_real(&skip_name(0)), (&mut dh).into());
        let d_temb = flow.take_real("temb");
        let mut d_hidden = self.time_2.backward_input(ctx, self.grid.samples, &d_temb);
        ctx.kernels.activate_grad(Activation::Silu, saved.get("hidden"), &mut d_hidden);
        saved.put("dh", dh);
        saved.put("d_temb", d_temb);
        saved.put("d_hidden", d_hidden);
        Ok(())
    }

    fn backward_weight(&self, kernels: &K, saved: &mut Saved<K::Buf>, grads: &mut K::Buf) {
        let samples = self.grid.samples;
        self.conv.backward_weight(kernels, self.grid, &saved.take("image"), &saved.take("dh"), grads);
        let active = activate(kernels, &saved.take("hidden"), self.time_len());
        self.time_2.backward_weight(kernels, samples, &active, &saved.take("d_temb"), grads);
        let waves = self.waves(kernels, &saved.take_ids("time"));
        self.time_1.backward_weight(kernels, samples, &waves, &saved.take("d_hidden"), grads);
    }

    fn remembered(&self, _: Recompute) -> Remembered {
        let (pixels, ids) = (self.grid.pixels(), self.grid.samples);
        let forward = pixels * self.conv.ins() + self.time_len();
        let real = forward + pixels * self.conv.outs() + 2 * self.time_len();
        Remembered {
            after_forward: Elements { real: forward, ids },
            after_backward_input: Elements { real, ids },
        }
    }
}

/// A norm, a last convolution, and the squared error of the noise it predicts.
pub struct End {
    grid: Grid,
    groups: usize,
    norm: Norm,
    conv: Conv,
}

impl End {
    pub fn new(config: &UnetConfig, grid: Grid, parameters: &mut Parameters<'_>) -> Self {
        let (ins, outs) = ([config.channels(0)], [config.image_channels]);
        let (name, epsilon) = ("conv_norm_out", config.epsilon);
        let norm = NormSpec { name, shape: &ins, split: None, epsilon, partial_over_tp: false };
        let norm = Norm::new(&norm, parameters);
        let init = init(9 * ins[0]);
        let conv =
            ConvSpec { name: "conv_out", kernel: 3, stride: 1, ins: &ins, outs: &outs, split: None, init };
        Self { grid, groups: config.groups, norm, conv: Conv::new(&conv, parameters) }
    }

    fn over(&self) -> Over {
        let (samples, pixels) = (self.grid.samples, self.grid.height * self.grid.width);
        Over::Groups(GroupNorm { samples, pixels, channels: self.conv.ins(), groups: self.groups })
    }

    fn in_len(&self) -> usize {
        self.grid.pixels() * self.conv.ins()
    }

    fn out_len(&self) -> usize {
        self.grid.pixels() * self.conv.outs()
    }

    /// What one element counts in the batch's mean.
    fn share<K: Kernels>(&self, ctx: &Ctx<'_, K>) -> f64 {
        let elements = self.grid.height * self.grid.width * self.conv.outs();
        1.0 / (ctx.microbatch.batch_samples as f64 * elements as f64)
    }
}

impl<K: Kernels> Unit<K> for End {
    fn forward(
        &self,
        ctx: &Ctx<'_, K>,
        flow: &mut Flow<K::Buf>,
        saved: &mut Saved<K::Buf>,
    ) -> Result<(), StageError> {
        let x = flow.take_real("h");
        let normed = self.norm.forward(ctx, self.over(), &x, saved.part("norm"));
        let active = activate(ctx.kernels, &normed, self.in_len());
        let y = self.conv.forward(ctx, self.grid, &active);
        let noise = flow.real("noise");
        let loss = ctx.kernels.squared_error(&y, noise) * self.share(ctx);
        // The difference is all that B needs of prediction and noise.
        let mut dy = ctx.kernels.buffer(self.out_len());
        ctx.kernels.squared_error_grad(&y, noise, self.share(ctx), &mut dy);
        flow.put("loss", Value::Loss(loss));
        saved.put("x", x);
        saved.put("normed", normed);
        saved.put("dy", dy);
        Ok(())
    }

    fn backward_input(
        &self,
        ctx: &Ctx<'_, K>,
        flow: &mut Flow<K::Buf>,
        saved: &mut Saved<K::Buf>,
    ) -> Result<(), StageError> {
        let mut d = self.conv.backward_input(ctx, self.grid, saved.get("dy"));
        ctx.kernels.activate_grad(Activation::Silu, saved.get("normed"), &mut d);
        let x = saved.take("x");
        let grads = NormGrads { dy: &d, residual: None };
        let dx = self.norm.backward_input(ctx, self.over(), &x, grads, saved.part("norm"));
        flow.put_real("h", dx);
        Ok(())
    }

    fn backward_weight(&self, kernels: &K, saved: &mut Saved<K::Buf>, grads: &mut K::Buf) {
        let active = activate(kernels, &saved.take("normed"), self.in_len());
        self.conv.backward_weight(kernels, self.grid, &active, &saved.take("dy"), grads);
        self.norm.backward_weight(kernels, saved.part("norm"), grads);
    }

    fn remembered(&self, _: Recompute) -> Remembered {
        let (x, y) = (self.in_len(), self.out_len());
        let own = Remembered {
            after_forward: Elements::real(2 * x + y),
            after_backward_input: Elements::real(x + y),
        };
        own + Norm::remembered(self.over())
    }
}
