//! The U-Transformer: a U-Net of residual convolutions with self- and cross-attention, trained to predict noise.
//!
//! Images are made smaller level by level and larger again, and what was there on the way down is joined in on the way up. Each unit below
//! is a piece that stages are cut at; a skip goes from its source straight to the stage that needs it.
//!
//! ```text
//! image, time -> stem -> down 0.0 -> shrink 0 -> down 1.0 -> mid -> up 1.0 -> up 1.1 -> grow 1 -> up 0.0 -> up 0.1 -> end -> loss
//!                  |        |           |           |                 |         |                   |         |      ^ noise
//!                  |        |           |           +-- skip.3 -------+         |                   |         |
//!                  |        |           +-------------- skip.2 -----------------+                   |         |
//!                  |        +-------------------------- skip.1 -------------------------------------+         |
//!                  +----------------------------------- skip.0 -----------------------------------------------+
//! ```
//!
//! The embedding of the time step, `temb`, is read by every residual block and handed from stage to stage. Tensor parallelism splits the
//! channels inside residual blocks by the groups of their second norm, heads, and hidden columns.

mod units;

use crate::chain::{Interface, Model, Setup, Shape, Tensor};
use crate::graph::ops::conv::Grid;
use crate::graph::{Builder, Unit};
use crate::kernels::Kernels;
use crate::models::{ConfigError, positive};
use crate::parameter::{Init, Parameters};
use crate::stage::Role;
use units::{Pair, Units};

/// Sizes of a U-Transformer.
#[derive(Debug, Clone, PartialEq)]
pub struct UnetConfig {
    /// Height and width of an image.
    pub image: usize,
    pub image_channels: usize,
    /// Channels of the first level; the others have multiples of them.
    pub base: usize,
    pub multipliers: Vec<usize>,
    /// Residual blocks of a level on the way down; there is one more on the way up.
    pub blocks: usize,
    /// Which levels have attention.
    pub attention: Vec<bool>,
    pub heads: usize,
    /// Groups of a norm.
    pub groups: usize,
    /// Rows and columns of what cross-attention looks at.
    pub context_rows: usize,
    pub context_width: usize,
    pub epsilon: f64,
}

impl UnetConfig {
    /// The proportions of the paper's U-Transformer: levels of 1, 2, 4 and 4 times the base, one block each, attention on all but the
    /// smallest images.
    pub fn new(image: usize, base: usize) -> Self {
        Self {
            image,
            image_channels: 4,
            base,
            multipliers: vec![1, 2, 4, 4],
            blocks: 1,
            attention: vec![true, true, true, false],
            heads: 8,
            groups: 32,
            context_rows: 16,
            context_width: base,
            epsilon: 1e-5,
        }
    }

    /// Columns of the embedding of time steps.
    fn time_width(&self) -> usize {
        4 * self.base
    }

    fn channels(&self, level: usize) -> usize {
        self.base * self.multipliers[level]
    }

    fn side(&self, level: usize) -> usize {
        self.image >> level
    }
}

/// Time steps of the noise: ids below this.
pub const TIME_STEPS: usize = 1000;

/// A U-Transformer.
#[derive(Debug, Clone)]
pub struct Unet {
    config: UnetConfig,
    pieces: Vec<Piece>,
}

/// A unit, with the channels that come into it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Piece {
    Stem,
    Down { level: usize, block: usize, ins: usize, skip: usize },
    Shrink { level: usize, skip: usize },
    Mid,
    Up { level: usize, block: usize, ins: usize, skip: usize, skip_ins: usize },
    Grow { level: usize },
    End,
}

/// The pieces of a model, in order.
fn pieces(config: &UnetConfig) -> Vec<Piece> {
    let levels = config.multipliers.len();
    let mut channels = config.channels(0);
    // The channels of every skip that is on its way.
    let mut skips = vec![channels];
    let mut pieces = vec![Piece::Stem];
    for level in 0..levels {
        for block in 0..config.blocks {
            pieces.push(Piece::Down { level, block, ins: channels, skip: skips.len() });
            channels = config.channels(level);
            skips.push(channels);
        }
        if level + 1 < levels {
            pieces.push(Piece::Shrink { level, skip: skips.len() });
            skips.push(channels);
        }
    }
    pieces.push(Piece::Mid);
    for level in (0..levels).rev() {
        for block in 0..=config.blocks {
            let skip_ins = skips.pop().expect("every skip is joined once");
            pieces.push(Piece::Up { level, block, ins: channels, skip: skips.len(), skip_ins });
            channels = config.channels(level);
        }
        if level > 0 {
            pieces.push(Piece::Grow { level });
        }
    }
    pieces.push(Piece::End);
    pieces
}

impl Unet {
    pub fn new(config: UnetConfig) -> Result<Self, ConfigError> {
        let levels = config.multipliers.len();
        positive(&[
            ("image", config.image),
            ("image_channels", config.image_channels),
            ("base", config.base),
            ("multipliers", levels),
            ("blocks", config.blocks),
            ("heads", config.heads),
            ("groups", config.groups),
            ("context_rows", config.context_rows),
            ("context_width", config.context_width),
        ])?;
        if let Some(zero) = config.multipliers.iter().position(|&m| m == 0) {
            let reason = format!("level {zero} has no channels");
            return Err(ConfigError::new(
                "multipliers",
                format!("{:?}", config.multipliers),
                reason,
                "use 1 or more",
            ));
        }
        if config.attention.len() != levels {
            let value = format!("{:?}", config.attention);
            return Err(ConfigError::new(
                "attention",
                value,
                format!("there are {levels} levels"),
                "say it for each",
            ));
        }
        for (key, value) in [("groups", config.groups), ("heads", config.heads)] {
            if !config.base.is_multiple_of(value) {
                let reason = format!("{} channels do not divide among them", config.base);
                return Err(ConfigError::new(key, value, reason, "use a divisor of the base"));
            }
        }
        let factor = 1usize.checked_shl(levels as u32 - 1).unwrap_or(0);
        if factor == 0 || !config.image.is_multiple_of(factor) {
            let reason = format!("{levels} levels halve it {} times", levels - 1);
            return Err(ConfigError::new(
                "image",
                config.image,
                reason,
                "use a multiple of that power of two",
            ));
        }
        let pieces = pieces(&config);
        Ok(Self { config, pieces })
    }

    pub fn config(&self) -> &UnetConfig {
        &self.config
    }

    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    pub fn is_empty(&self) -> bool {
        false
    }

    fn image_of(&self, name: &str, level: usize, channels: usize) -> Tensor {
        let side = self.config.side(level);
        Tensor {
            name: name.into(),
            shape: Shape::Samples(vec![side, side, channels]),
            role: Role::Activation,
        }
    }

    fn data_image(&self, name: &str) -> Tensor {
        Tensor { role: Role::Data, ..self.image_of(name, 0, self.config.image_channels) }
    }

    fn temb(&self) -> Tensor {
        let shape = Shape::Samples(vec![self.config.time_width()]);
        Tensor { name: "temb".into(), shape, role: Role::Activation }
    }

    /// What a piece with residual blocks reads.
    fn reads(&self, level: usize, always: bool) -> Vec<Tensor> {
        let shape = Shape::Samples(vec![self.config.context_rows, self.config.context_width]);
        let context = Tensor { name: "context".into(), shape, role: Role::Data };
        let attends = always || self.config.attention[level];
        [self.temb()].into_iter().chain(attends.then_some(context)).collect()
    }
}

fn skip_name(skip: usize) -> String {
    format!("skip.{skip}")
}

impl<K: Kernels> Model<K> for Unet {
    fn num_units(&self) -> usize {
        self.pieces.len()
    }

    fn check(&self, setup: &Setup) -> Result<(), ConfigError> {
        if setup.sequence_parallel {
            let reason = "a U-Transformer has no sequence to split";
            return Err(ConfigError::new("sequence_parallel", true, reason, "leave it out for this model"));
        }
        Ok(())
    }

    fn interface(&self, unit: usize) -> Interface {
        let (config, last) = (&self.config, self.config.multipliers.len() - 1);
        let h = |level: usize, channels: usize| self.image_of("h", level, channels);
        let skip =
            |skip: usize, level: usize, channels: usize| self.image_of(&skip_name(skip), level, channels);
        match self.pieces[unit] {
            Piece::Stem => {
                let shape = Shape::Ids { dims: vec![], classes: TIME_STEPS };
                let time = Tensor { name: "time".into(), shape, role: Role::Data };
                let c = config.channels(0);
                Interface {
                    takes: vec![],
                    reads: vec![self.data_image("image"), time],
                    gives: vec![h(0, c), self.temb(), skip(0, 0, c)],
                }
            }
            Piece::Down { level, ins, skip: s, .. } => {
                let c = config.channels(level);
                let gives = vec![h(level, c), skip(s, level, c)];
                Interface { takes: vec![h(level, ins)], reads: self.reads(level, false), gives }
            }
            Piece::Shrink { level, skip: s } => {
                let c = config.channels(level);
                let gives = vec![h(level + 1, c), skip(s, level + 1, c)];
                Interface { takes: vec![h(level, c)], reads: vec![], gives }
            }
            Piece::Mid => {
                let h = h(last, config.channels(last));
                Interface { takes: vec![h.clone()], reads: self.reads(last, true), gives: vec![h] }
            }
            Piece::Up { level, ins, skip: s, skip_ins, .. } => Interface {
                takes: vec![h(level, ins), skip(s, level, skip_ins)],
                reads: self.reads(level, false),
                gives: vec![h(level, config.channels(level))],
            },
            Piece::Grow { level } => {
                let c = config.channels(level);
                Interface { takes: vec![h(level, c)], reads: vec![], gives: vec![h(level - 1, c)] }
            }
            Piece::End => {
                let loss = Tensor { name: "loss".into(), shape: Shape::Number, role: Role::Loss };
                let h = h(0, config.channels(0));
                Interface { takes: vec![h], reads: vec![self.data_image("noise")], gives: vec![loss] }
            }
        }
    }

    fn unit(&self, unit: usize, setup: &Setup, parameters: &mut Parameters<'_>) -> Unit<K> {
        let config = &self.config;
        let samples = setup.own_samples().len();
        let b = Builder::new(setup.team(), parameters);
        let at = |level: usize| {
            let side = config.side(level);
            let grid = Grid { samples, height: side, width: side };
            Units { config, b, grid }
        };
        let pair = |name, level: usize, block, ins| {
            let (outs, attends) = (config.channels(level), config.attention[level]);
            Pair { name, block, ins, outs, attends }
        };
        let graph = match self.pieces[unit] {
            Piece::Stem => at(0).stem(),
            Piece::Down { level, block, ins, skip } => {
                let name = format!("down_blocks.{level}");
                at(level).down(pair(&name, level, block, ins), skip)
            }
            Piece::Shrink { level, skip } => at(level).shrink(level, skip),
            Piece::Mid => at(config.multipliers.len() - 1).mid(),
            Piece::Up { level, block, ins, skip, skip_ins } => {
                let name = format!("up_blocks.{level}");
                at(level).up(pair(&name, level, block, ins), skip, skip_ins)
            }
            Piece::Grow { level } => at(level).grow(level),
            Piece::End => at(0).end(),
        };
        setup.unit(unit, graph)
    }
}

/// Weights that keep the size of what goes through them.
fn init(ins: usize) -> Init {
    Init::Normal { deviation: 1.0 / (ins as f64).sqrt() }
}
