//! The units of a level: a residual block and, where there is attention, a transformer; on the way up with a skip joined in.

use super::res::{Res, duplicate};
use super::transformer::Transformer;
use super::{UnetConfig, skip_name};
use crate::chain::{Flow, Setup, Unit};
use crate::kernels::Kernels;
use crate::layers::conv::Grid;
use crate::layers::{Ctx, Remembered, Saved};
use crate::parameter::Parameters;
use crate::stage::{Recompute, StageError};

/// A residual block and perhaps a transformer.
struct Pair {
    res: Res,
    transformer: Option<Transformer>,
}

impl Pair {
    fn forward<K: Kernels>(
        &self,
        ctx: &Ctx<'_, K>,
        x: K::Buf,
        flow: &Flow<K::Buf>,
        saved: &mut Saved<K::Buf>,
    ) -> Result<K::Buf, StageError> {
        let y = self.res.forward(ctx, x, flow.real("temb"), saved.part("res"))?;
        match &self.transformer {
            Some(transformer) => transformer.forward(ctx, y, flow.real("context"), saved.part("transformer")),
            None => Ok(y),
        }
    }

    /// Adds the time's gradient to the flow.
    fn backward_input<K: Kernels>(
        &self,
        ctx: &Ctx<'_, K>,
        mut dy: K::Buf,
        flow: &mut Flow<K::Buf>,
        saved: &mut Saved<K::Buf>,
    ) -> Result<K::Buf, StageError> {
        if let Some(transformer) = &self.transformer {
            dy = transformer.backward_input(ctx, dy, saved.part("transformer"))?;
        }
        let (dx, d_temb) = self.res.backward_input(ctx, dy, saved.part("res"))?;
        flow.add_real(ctx.kernels, "temb", d_temb);
        Ok(dx)
    }

    fn backward_weight<K: Kernels>(&self, kernels: &K, saved: &mut Saved<K::Buf>, grads: &mut K::Buf) {
        if let Some(transformer) = &self.transformer {
            transformer.backward_weight(kernels, saved.part("transformer"), grads);
        }
        self.res.backward_weight(kernels, saved.part("res"), grads);
    }

    fn remembered(&self, recompute: Recompute) -> Remembered {
        let transformer = self.transformer.as_ref().map(|t| t.remembered(recompute));
        self.res.remembered() + transformer.unwrap_or_default()
    }
}

/// Where a unit of a level stands.
pub struct LevelUnit<'a> {
    pub name: &'a str,
    pub block: usize,
    pub level: usize,
    /// Channels that come in, without a skip's.
    pub ins: usize,
    pub grid: Grid,
}

impl LevelUnit<'_> {
    /// A residual block, which gets a skip's channels too, and the level's transformer.
    fn pair(
        &self,
        config: &UnetConfig,
        skip_ins: usize,
        setup: &Setup,
        parameters: &mut Parameters<'_>,
    ) -> Pair {
        let outs = config.channels(self.level);
        let res = format!("{}.resnets.{}", self.name, self.block);
        let res = Res::new(config, &res, (self.ins + skip_ins, outs), self.grid, parameters);
        let transformer = config.attention[self.level].then(|| {
            let name = format!("{}.attentions.{}", self.name, self.block);
            Transformer::new(config, &name, outs, self.grid, setup, parameters)
        });
        Pair { res, transformer }
    }
}

/// On the way down: leaves a copy for the way up.
pub struct Down {
    pair: Pair,
    skip: String,
    len: usize,
}

impl Down {
    pub fn new(
        config: &UnetConfig,
        place: LevelUnit<'_>,
        skip: usize,
        setup: &Setup,
        parameters: &mut Parameters<'_>,
    ) -> Self {
        let pair = place.pair(config, 0, setup, parameters);
        Self { pair, skip: skip_name(skip), len: place.grid.pixels() * config.channels(place.level) }
    }
}

impl<K: Kernels> Unit<K> for Down {
    fn forward(
        &self,
        ctx: &Ctx<'_, K>,
        flow: &mut Flow<K::Buf>,
        saved: &mut Saved<K::Buf>,
    ) -> Result<(), StageError> {
        let x = flow.take_real("h");
        let y = self.pair.forward(ctx, x, flow, saved)?;
        flow.put_real(&self.skip, duplicate(ctx.kernels, &y, self.len));
        flow.put_real("h", y);
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
        let dx = self.pair.backward_input(ctx, dy, flow, saved)?;
        flow.put_real("h", dx);
        Ok(())
    }

    fn backward_weight(&self, kernels: &K, saved: &mut Saved<K::Buf>, grads: &mut K::Buf) {
        self.pair.backward_weight(kernels, saved, grads);
    }

    fn remembered(&self, recompute: Recompute) -> Remembered {
        self.pair.remembered(recompute)
    }
}

/// On the way up: joins what was left.
pub struct Up {
    pair: Pair,
    skip: String,
    pixels: usize,
    ins: usize,
    skip_ins: usize,
}

impl Up {
    pub fn new(
        config: &UnetConfig,
        place: LevelUnit<'_>,
        (skip, skip_ins): (usize, usize),
        setup: &Setup,
        parameters: &mut Parameters<'_>,
    ) -> Self {
        let pair = place.pair(config, skip_ins, setup, parameters);
        let (pixels, ins) = (place.grid.pixels(), place.ins);
        Self { pair, skip: skip_name(skip), pixels, ins, skip_ins }
    }
}

impl<K: Kernels> Unit<K> for Up {
    fn forward(
        &self,
        ctx: &Ctx<'_, K>,
        flow: &mut Flow<K::Buf>,
        saved: &mut Saved<K::Buf>,
    ) -> Result<(), StageError> {
        let (h, skip) = (flow.take_real("h"), flow.take_real(&self.skip));
        let mut x = ctx.kernels.buffer(self.pixels * (self.ins + self.skip_ins));
        ctx.kernels.concat((&h, self.ins), (&skip, self.skip_ins), &mut x);
        drop((h, skip));
        let y = self.pair.forward(ctx, x, flow, saved)?;
        flow.put_real("h", y);
        Ok(())
    }

    fn backward_input(
        &self,
        ctx: &Ctx<'_, K>,
        flow: &mut Flow<K::Buf>,
        saved: &mut Saved<K::Buf>,
    ) -> Result<(), StageError> {
        let dy = flow.take_real("h");
        let dx = self.pair.backward_input(ctx, dy, flow, saved)?;
        let mut dh = ctx.kernels.buffer(self.pixels * self.ins);
        let mut d_skip = ctx.kernels.buffer(self.pixels * self.skip_ins);
        ctx.kernels.split(&dx, (&mut dh, self.ins), (&mut d_skip, self.skip_ins));
        flow.put_real("h", dh);
        flow.put_real(&self.skip, d_skip);
        Ok(())
    }

    fn backward_weight(&self, kernels: &K, saved: &mut Saved<K::Buf>, grads: &mut K::Buf) {
        self.pair.backward_weight(kernels, saved, grads);
    }

    fn remembered(&self, recompute: Recompute) -> Remembered {
        self.pair.remembered(recompute)
    }
}

/// At the bottom: attention between two residual blocks.
pub struct Mid {
    first: Pair,
    second: Res,
}

impl Mid {
    pub fn new(config: &UnetConfig, grid: Grid, setup: &Setup, parameters: &mut Parameters<'_>) -> Self {
        let channels = config.channels(config.multipliers.len() - 1);
        let both = (channels, channels);
        let res = Res::new(config, "mid_block.resnets.0", both, grid, parameters);
        let transformer =
            Transformer::new(config, "mid_block.attentions.0", channels, grid, setup, parameters);
        let second = Res::new(config, "mid_block.resnets.1", both, grid, parameters);
        Self { first: Pair { res, transformer: Some(transformer) }, second }
    }
}

impl<K: Kernels> Unit<K> for Mid {
    fn forward(
        &self,
        ctx: &Ctx<'_, K>,
        flow: &mut Flow<K::Buf>,
        saved: &mut Saved<K::Buf>,
    ) -> Result<(), StageError> {
        let x = flow.take_real("h");
        let middle = self.first.forward(ctx, x, flow, saved.part("first"))?;
        let y = self.second.forward(ctx, middle, flow.real("temb"), saved.part("second"))?;
        flow.put_real("h", y);
        Ok(())
    }

    fn backward_input(
        &self,
        ctx: &Ctx<'_, K>,
        flow: &mut Flow<K::Buf>,
        saved: &mut Saved<K::Buf>,
    ) -> Result<(), StageError> {
        let dy = flow.take_real("h");
        let (d, d_temb) = self.second.backward_input(ctx, dy, saved.part("second"))?;
        flow.add_real(ctx.kernels, "temb", d_temb);
        let dx = self.first.backward_input(ctx, d, flow, saved.part("first"))?;
        flow.put_real("h", dx);
        Ok(())
    }

    fn backward_weight(&self, kernels: &K, saved: &mut Saved<K::Buf>, grads: &mut K::Buf) {
        self.second.backward_weight(kernels, saved.part("second"), grads);
        self.first.backward_weight(kernels, saved.part("first"), grads);
    }

    fn remembered(&self, recompute: Recompute) -> Remembered {
        self.first.remembered(recompute) + self.second.remembered()
    }
}
