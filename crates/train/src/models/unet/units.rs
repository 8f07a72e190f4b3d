//! The units of a U-Transformer.

use super::{UnetConfig, init, skip_name};
use crate::graph::ops::conv::{ConvSpec, Grid};
use crate::graph::ops::linear::{LinearSpec, Parallel};
use crate::graph::ops::norm::NormSpec;
use crate::graph::{Builder, Site, Val};
use crate::kernels::{Activation, Kernels};
use crate::models::branch::{Attend, FeedForward, TP, attend, feed_forward};

/// Nothing is dropped anywhere.
const KEEP: Site = Site { id: 0, rate: 0.0, rows: 1 };

/// What all units know.
pub(super) struct Units<'a, 's, 'p, K: Kernels> {
    pub config: &'a UnetConfig,
    pub b: Builder<'s, 'p, K>,
    /// The images that come in.
    pub grid: Grid,
}

/// Where a residual block, and perhaps a transformer behind it, stands.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pair<'a> {
    /// Of the level.
    pub name: &'a str,
    pub block: usize,
    pub ins: usize,
    pub outs: usize,
    pub attends: bool,
}

impl<'s, 'p, K: Kernels> Units<'_, 's, 'p, K> {
    /// From an image and its time step to channels and the time's embedding.
    pub fn stem(mut self) -> Builder<'s, 'p, K> {
        let (base, wide) = (self.config.base, self.config.time_width());
        let image = self.image(self.config.image_channels);
        let image = self.b.data("image", image);
        let outs = self.config.channels(0);
        let h = self.conv(image, "conv_in", self.config.image_channels, outs, 1);
        let time = self.b.ids("time", self.grid.samples);
        let waves = self.b.time_waves(time, base);
        let hidden = self.map(waves, "time_embedding.linear_1", base, wide);
        let active = self.b.activate_again(hidden, Activation::Silu);
        let temb = self.map(active, "time_embedding.linear_2", wide, wide);
        self.b.give("h", h);
        self.b.give("temb", temb);
        self.b.give(&skip_name(0), h);
        self.b
    }

    /// On the way down: leaves a copy for the way up.
    pub fn down(mut self, pair: Pair<'_>, skip: usize) -> Builder<'s, 'p, K> {
        let x = self.taken("h", pair.ins);
        let temb = self.temb();
        let y = self.pair(x, temb, pair);
        self.b.give("h", y);
        self.b.give(&skip_name(skip), y);
        self.b
    }

    /// Images of half the size; leaves a copy for the way up.
    pub fn shrink(mut self, level: usize, skip: usize) -> Builder<'s, 'p, K> {
        let channels = self.config.channels(level);
        let x = self.taken("h", channels);
        let y = self.conv(x, &format!("down_blocks.{level}.downsamplers.0.conv"), channels, channels, 2);
        self.b.give("h", y);
        self.b.give(&skip_name(skip), y);
        self.b
    }

    /// At the bottom: attention between two residual blocks.
    pub fn mid(mut self) -> Builder<'s, 'p, K> {
        let channels = self.config.channels(self.config.multipliers.len() - 1);
        let x = self.taken("h", channels);
        let temb = self.temb();
        let x = self.res(x, temb, "mid_block.resnets.0", channels, channels);
        let x = self.transformer(x, "mid_block.attentions.0", channels);
        let x = self.res(x, temb, "mid_block.resnets.1", channels, channels);
        self.b.give("h", x);
        self.b
    }

    /// On the way up: joins what was left.
    pub fn up(mut self, pair: Pair<'_>, skip: usize, skip_ins: usize) -> Builder<'s, 'p, K> {
        let x = self.taken("h", pair.ins);
        let left = self.taken(&skip_name(skip), skip_ins);
        let temb = self.temb();
        let joined = self.b.concat(x, left);
        let y = self.pair(joined, temb, Pair { ins: pair.ins + skip_ins, ..pair });
        self.b.give("h", y);
        self.b
    }

    /// Images of twice the size.
    pub fn grow(mut self, level: usize) -> Builder<'s, 'p, K> {
        let channels = self.config.channels(level);
        let x = self.taken("h", channels);
        let large = self.b.upsample(x, self.grid);
        let Grid { samples, height, width } = self.grid;
        self.grid = Grid { samples, height: 2 * height, width: 2 * width };
        let y = self.conv(large, &format!("up_blocks.{level}.upsamplers.0.conv"), channels, channels, 1);
        self.b.give("h", y);
        self.b
    }

    /// A norm, a last convolution, and the squared error of the noise it predicts.
    pub fn end(mut self) -> Builder<'s, 'p, K> {
        let (channels, outs) = (self.config.channels(0), self.config.image_channels);
        let x = self.taken("h", channels);
        let noise = self.image(outs);
        let noise = self.b.data("noise", noise);
        let normed = self.group_norm(x, "conv_norm_out", channels);
        let active = self.b.activate_again(normed, Activation::Silu);
        let y = self.conv(active, "conv_out", channels, outs, 1);
        let loss = self.b.squared_error(y, noise, self.pixels() * outs);
        self.b.give("loss", loss);
        self.b
    }

    /// A residual block and, where there is attention, a transformer.
    fn pair(&mut self, x: Val, temb: Val, pair: Pair<'_>) -> Val {
        let Pair { name, block, ins, outs, attends } = pair;
        let y = self.res(x, temb, &format!("{name}.resnets.{block}"), ins, outs);
        if attends { self.transformer(y, &format!("{name}.attentions.{block}"), outs) } else { y }
    }

    /// A residual block: two convolutions behind norms, with the time step's embedding added between them.
    ///
    /// ```text
    /// x -+-> norm -> silu -> conv (columns) -> + time -> norm -> silu -> conv (summands) -> sum -+-> y
    ///    +-> 1x1 if the channels change ----------------------------------------------------------+
    /// ```
    ///
    /// Between the convolutions a rank has some groups of the second norm, so that norm needs no other rank.
    fn res(&mut self, x: Val, temb: Val, name: &str, ins: usize, outs: usize) -> Val {
        let name = |rest: &str| format!("{name}.{rest}");
        let (groups, each, wide) = (self.config.groups, outs / self.config.groups, self.config.time_width());
        let between = [groups, each];
        let normed = self.group_norm(x, &name("norm1"), ins);
        let active = self.b.activate_again(normed, Activation::Silu);
        let first = ConvSpec {
            name: &name("conv1"),
            kernel: 3,
            stride: 1,
            ins: &[ins],
            outs: &between,
            parallel: Parallel::Columns(&[(TP, 0)]),
            init: init(9 * ins),
        };
        let h = self.b.conv(active, self.grid, &first);
        let time = self.b.activate_again(temb, Activation::Silu);
        let projected = LinearSpec {
            name: &name("time_emb_proj"),
            ins: &[wide],
            outs: &between,
            parallel: Parallel::Columns(&[(TP, 0)]),
            init: init(wide),
            bias: true,
            transposed: false,
            in_attention: false,
        };
        let time = self.b.linear(time, &projected);
        let h = self.b.add_per_sample(h, time, self.pixels());
        let normed = self.group_norm(h, &name("norm2"), outs);
        let active = self.b.activate_again(normed, Activation::Silu);
        let second = ConvSpec {
            name: &name("conv2"),
            kernel: 3,
            stride: 1,
            ins: &between,
            outs: &[outs],
            parallel: Parallel::Summands(&[(TP, 0)]),
            init: init(9 * outs),
        };
        let branch = self.b.conv(active, self.grid, &second);
        let trunk = if ins == outs { x } else { self.map(x, &name("conv_shortcut"), ins, outs) };
        self.b.residual(trunk, branch, KEEP)
    }

    /// A transformer over the pixels of an image: self-attention, attention to the context, a feed-forward map.
    fn transformer(&mut self, x: Val, name: &str, channels: usize) -> Val {
        let name = |rest: &str| format!("{name}.{rest}");
        let (config, pixels) = (self.config, self.pixels());
        let normed = self.group_norm(x, &name("norm"), channels);
        let h = self.map(normed, &name("proj_in"), channels, channels);
        let attention = Attend {
            layer: 0,
            project: &name("attn1.to_qkv"),
            out: &name("attn1.to_out"),
            context: None,
            width: channels,
            heads: config.heads,
            queries: pixels,
            causal: false,
            dropout: (0, 0.0),
            bias: false,
            init: init(channels),
            out_init: init(channels),
        };
        let normed = self.layer_norm(h, &name("norm1"));
        let branch = attend(&mut self.b, normed, &attention);
        let h = self.b.residual(h, branch, KEEP);
        let context = self.context();
        let normed = self.layer_norm(h, &name("norm2"));
        let to_context = Attend {
            project: &name("attn2.to_q"),
            out: &name("attn2.to_out"),
            context: Some((context, &name("attn2.to_kv"), config.context_width, config.context_rows)),
            ..attention
        };
        let branch = attend(&mut self.b, normed, &to_context);
        let h = self.b.residual(h, branch, KEEP);
        let normed = self.layer_norm(h, &name("norm3"));
        let map = FeedForward {
            up: &name("ff.up"),
            down: &name("ff.down"),
            width: channels,
            hidden: 4 * channels,
            activation: Activation::Gelu,
            up_init: init(channels),
            down_init: init(4 * channels),
        };
        let branch = feed_forward(&mut self.b, normed, &map);
        let h = self.b.residual(h, branch, KEEP);
        let out = self.map(h, &name("proj_out"), channels, channels);
        self.b.residual(x, out, KEEP)
    }

    fn pixels(&self) -> usize {
        self.grid.height * self.grid.width
    }

    fn image(&self, channels: usize) -> crate::graph::Typed {
        self.b.matrix(self.grid.pixels(), channels, self.b.team.whole())
    }

    fn taken(&mut self, name: &str, channels: usize) -> Val {
        let typed = self.image(channels);
        self.b.take(name, typed)
    }

    fn temb(&mut self) -> Val {
        let typed = self.b.matrix(self.grid.samples, self.config.time_width(), self.b.team.whole());
        self.b.read("temb", typed)
    }

    fn context(&mut self) -> Val {
        let rows = self.grid.samples * self.config.context_rows;
        let typed = self.b.matrix(rows, self.config.context_width, self.b.team.whole());
        self.b.data("context", typed)
    }

    fn conv(&mut self, x: Val, name: &str, ins: usize, outs: usize, stride: usize) -> Val {
        let (ins, outs) = ([ins], [outs]);
        let (parallel, init) = (Parallel::None, init(9 * ins[0]));
        self.b.conv(
            x,
            self.grid,
            &ConvSpec { name, kernel: 3, stride, ins: &ins, outs: &outs, parallel, init },
        )
    }

    fn map(&mut self, x: Val, name: &str, ins: usize, outs: usize) -> Val {
        let (parallel, init) = (Parallel::None, init(ins));
        let (ins, outs) = ([ins], [outs]);
        let (bias, in_attention) = (true, false);
        self.b.linear(
            x,
            &LinearSpec {
                name,
                ins: &ins,
                outs: &outs,
                parallel,
                init,
                bias,
                transposed: false,
                in_attention,
            },
        )
    }

    fn layer_norm(&mut self, x: Val, name: &str) -> Val {
        self.b.layer_norm(x, &NormSpec { name, epsilon: self.config.epsilon })
    }

    fn group_norm(&mut self, x: Val, name: &str, channels: usize) -> Val {
        let (groups, pixels) = (self.config.groups, self.pixels());
        let spec = NormSpec { name, epsilon: self.config.epsilon };
        self.b.group_norm(x, &spec, pixels, groups, channels / groups)
    }
}
