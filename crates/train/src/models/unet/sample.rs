//! Between levels: images of half and of twice the size.

use super::res::duplicate;
use super::{UnetConfig, init, skip_name};
use crate::chain::{Flow, Unit};
use crate::kernels::{Images, Kernels};
use crate::layers::conv::{Conv, ConvSpec, Grid};
use crate::layers::{Ctx, Elements, Remembered, Saved};
use crate::parameter::Parameters;
use crate::stage::{Recompute, StageError};

fn conv(name: &str, channels: usize, stride: usize, parameters: &mut Parameters<'_>) -> Conv {
    let (both, init) = ([channels], init(9 * channels));
    let spec = ConvSpec { name, kernel: 3, stride, ins: &both, outs: &both, split: None, init };
    Conv::new(&spec, parameters)
}

/// A convolution that takes every second pixel; leaves a copy for the way up.
pub struct Shrink {
    grid: Grid,
    conv: Conv,
    skip: String,
}

impl Shrink {
    pub fn new(
        config: &UnetConfig,
        level: usize,
        skip: usize,
        grid: Grid,
        parameters: &mut Parameters<'_>,
    ) -> Self {
        let name = format!("down_blocks.{level}.downsamplers.0.conv");
        Self { grid, conv: conv(&name, config.channels(level), 2, parameters), skip: skip_name(skip) }
    }

    fn out_len(&self) -> usize {
        self.conv.result(self.grid).pixels() * self.conv.outs()
    }
}

impl<K: Kernels> Unit<K> for Shrink {
    fn forward(
        &self,
        ctx: &Ctx<'_, K>,
        flow: &mut Flow<K::Buf>,
        saved: &mut Saved<K::Buf>,
    ) -> Result<(), StageError> {
        let x = flow.take_real("h");
        let y = self.conv.forward(ctx, self.grid, &x);
        flow.put_real(&self.skip, duplicate(ctx.kernels, &y, self.out_len()));
        flow.put_real("h", y);
        saved.put("x", x);
        Ok(())
    }

    fn backward_input(
        &self,
        ctx: &Ctx<'_, K>,
        flow: &mut Flow<K::Buf>,
        saved: &mut Saved<K::Buf>,
    ) -> Result<(), StageError> {
        let mut dy = flow.take_real("h");
        ctx.kernels.add(&flow.take_real(&self.skip), (&mut dy).into());
        flow.put_real("h", self.conv.backward_input(ctx, self.grid, &dy));
        saved.put("dy", dy);
        Ok(())
    }

    fn backward_weight(&self, kernels: &K, saved: &mut Saved<K::Buf>, grads: &mut K::Buf) {
        self.conv.backward_weight(kernels, self.grid, &saved.take("x"), &saved.take("dy"), grads);
    }

    fn remembered(&self, _: Recompute) -> Remembered {
        let x = self.grid.pixels() * self.conv.ins();
        Remembered {
            after_forward: Elements::real(x),
            after_backward_input: Elements::real(x + self.out_len()),
        }
    }
}

/// Every pixel twice in both directions, then a convolution.
pub struct Grow {
    from: Images,
    conv: Conv,
}

impl Grow {
    pub fn new(config: &UnetConfig, level: usize, grid: Grid, parameters: &mut Parameters<'_>) -> Self {
        let name = format!("up_blocks.{level}.upsamplers.0.conv");
        let channels = config.channels(level);
        let Grid { samples, height, width } = grid;
        Self { from: Images { samples, height, width, channels }, conv: conv(&name, channels, 1, parameters) }
    }

    /// The larger images.
    fn grid(&self) -> Grid {
        Grid { samples: self.from.samples, height: 2 * self.from.height, width: 2 * self.from.width }
    }

    fn grown<K: Kernels>(&self, kernels: &K, x: &K::Buf) -> K::Buf {
        let mut large = kernels.buffer(4 * self.from.len());
        kernels.upsample(self.from, x, &mut large);
        large
    }
}

impl<K: Kernels> Unit<K> for Grow {
    fn forward(
        &self,
        ctx: &Ctx<'_, K>,
        flow: &mut Flow<K::Buf>,
        saved: &mut Saved<K::Buf>,
    ) -> Result<(), StageError> {
        let x = flow.take_real("h");
        let y = self.conv.forward(ctx, self.grid(), &self.grown(ctx.kernels, &x));
        flow.put_real("h", y);
        saved.put("x", x);
        Ok(())
    }

    fn backward_input(
        &self,
        ctx: &Ctx<'_, K>,
        flow: &mut Flow<K::Buf>,
        saved: &mut Saved<K::Buf>,
    ) -> Result<(), StageError> {
        let dy = flow.take_real("h");
        let d_large = self.conv.backward_input(ctx, self.grid(), &dy);
        let mut dx = ctx.kernels.buffer(self.from.len());
        ctx.kernels.upsample_grad(self.from, &d_large, &mut dx);
        flow.put_real("h", dx);
        saved.put("dy", dy);
        Ok(())
    }

    fn backward_weight(&self, kernels: &K, saved: &mut Saved<K::Buf>, grads: &mut K::Buf) {
        let large = self.grown(kernels, &saved.take("x"));
        self.conv.backward_weight(kernels, self.grid(), &large, &saved.take("dy"), grads);
    }

    fn remembered(&self, _: Recompute) -> Remembered {
        let x = self.from.len();
        Remembered { after_forward: Elements::real(x), after_backward_input: Elements::real(5 * x) }
    }
}
