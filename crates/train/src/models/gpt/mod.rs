//! Decoders, with the architectures and the parameter names of GPT-2 and Llama.
//!
//! Norms before the branches, a final norm, and logits from the token table itself (tied) or from a matrix of their own. GPT-2 has learned
//! positions, GELU with tanh and biases; Llama has rotary positions, RMS norms, SwiGLU, heads that share keys and values, and no
//! biases. Units: the embedding, the blocks, the head.
//!
//! ```text
//! tokens -> embed -h-> block 0 -h-> .. -h-> block L-1 -h-> head -> loss
//!                                                           ^ targets
//! ```
//!
//! On a ladder ([`Residual::Ladder`]) every branch reads the stream without the branch just before it, whose sum over `tp` is then under way while it
//! computes. Between blocks flows that last branch too, as `late`.

pub mod rotary;
mod units;

use std::ops::Range;

use crossmesh_core::mesh::Mesh;

use crate::chain::{Interface, Model, Setup, Shape, Tensor};
use crate::graph::ops::rotary::Turns;
use crate::graph::{Builder, Unit};
use crate::kernels::Kernels;
use crate::models::branch::team;
use crate::models::{ConfigError, few, positive, product};
use crate::parameter::{Parameter, Parameters};
use crate::stage::Role;
use crate::stage_rank::{KV, StageRank, sharing_heads};
use rotary::RotaryConfig;
use units::Units;

/// Sizes of a GPT.
#[derive(Debug, Clone, PartialEq)]
pub struct GptConfig {
    pub vocab: usize,
    /// Tokens of a sample.
    pub context: usize,
    pub width: usize,
    pub layers: usize,
    pub heads: usize,
    /// Columns between the two maps of a feed-forward branch; GPT-2 has four times the width.
    pub hidden: usize,
    /// Whether logits come from the token table.
    pub tied: bool,
    pub dropout: f64,
    pub epsilon: f64,
    pub family: Family,
    pub residual: Residual,
}

/// What a branch reads of the residual stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Residual {
    /// All of it.
    #[default]
    Serial,
    /// All but what the branch just before adds to it, which has not landed yet (Ladder-Residual, Zhang et al., 2025).
    Ladder,
}

impl Residual {
    /// As a config has it.
    pub const NAMES: &[&str] = &["serial", "ladder"];

    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    pub fn named(name: &str) -> Option<Self> {
        [Self::Serial, Self::Ladder].into_iter().find(|residual| residual.name() == name)
    }
}

/// Which decoder.
#[derive(Debug, Clone, PartialEq)]
pub enum Family {
    Gpt2,
    Llama {
        /// Heads of keys and values.
        kv_heads: usize,
        rotary: RotaryConfig,
    },
}

impl GptConfig {
    /// GPT-2's proportions: a hidden layer of four times the width, tied embeddings, no dropout.
    pub fn new(vocab: usize, context: usize, width: usize, layers: usize, heads: usize) -> Self {
        let (hidden, tied, dropout, epsilon) = (width.saturating_mul(4), true, 0.0, 1e-5);
        let (family, residual) = (Family::Gpt2, Residual::Serial);
        Self { vocab, context, width, layers, heads, hidden, tied, dropout, epsilon, family, residual }
    }

    /// Llama's proportions: untied, no dropout.
    pub fn llama(
        (vocab, context): (usize, usize),
        width: usize,
        layers: usize,
        (heads, kv_heads): (usize, usize),
        hidden: usize,
    ) -> Self {
        let family = Family::Llama { kv_heads, rotary: RotaryConfig::default() };
        Self { hidden, tied: false, family, ..Self::new(vocab, context, width, layers, heads) }
    }
}

/// A GPT.
#[derive(Debug, Clone)]
pub struct Gpt {
    config: GptConfig,
    /// Of a Llama.
    turns: Option<Turns>,
}

impl Gpt {
    pub fn new(config: GptConfig) -> Result<Self, ConfigError> {
        positive(&[
            ("vocab", config.vocab),
            ("context", config.context),
            ("width", config.width),
            ("heads", config.heads),
            ("hidden", config.hidden),
        ])?;
        few("layers", config.layers)?;
        let GptConfig { width, hidden, vocab, context, layers, .. } = config;
        let depth = layers.max(1);
        product("context", context, &[context, width])?;
        product("vocab", vocab, &[vocab, width])?;
        product("context", context, &[context, context])?;
        product("width", width, &[depth, 4, width, width])?;
        product("hidden", hidden, &[depth, 2, hidden, width])?;
        if !config.width.is_multiple_of(config.heads) {
            let reason = format!("{} columns do not divide among them", config.width);
            return Err(ConfigError::new("heads", config.heads, reason, "use a divisor of the width"));
        }
        if let Family::Llama { kv_heads, rotary } = &config.family {
            positive(&[("kv_heads", *kv_heads)])?;
            if !config.heads.is_multiple_of(*kv_heads) {
                let reason = format!("{} heads of queries do not divide among them", config.heads);
                return Err(ConfigError::new("kv_heads", kv_heads, reason, "use a divisor of the heads"));
            }
            let head_dim = config.width / config.heads;
            if !head_dim.is_multiple_of(2) {
                let reason =
                    format!("a head has {head_dim} columns, and rotary positions turn pairs of them");
                return Err(ConfigError::new(
                    "heads",
                    config.heads,
                    reason,
                    "use an even number of columns a head",
                ));
            }
            rotary.check()?;
        }
        if i32::try_from(config.vocab).is_err() {
            return Err(ConfigError::new(
                "vocab",
                config.vocab,
                "token ids are 32 bits wide",
                "use 2^31 - 1 at most",
            ));
        }
        if !(0.0..1.0).contains(&config.dropout) {
            let reason = "it is the share of elements to drop";
            return Err(ConfigError::new(
                "dropout",
                config.dropout,
                reason,
                "use 0 or more, and less than 1",
            ));
        }
        let turns = match config.family {
            Family::Gpt2 => None,
            Family::Llama { rotary, .. } => Some(rotary.turns(config.width / config.heads, config.context)),
        };
        Ok(Self { config, turns })
    }

    pub fn config(&self) -> &GptConfig {
        &self.config
    }

    /// Cuts the model so that stages have so many blocks each; the first one also gets the embedding, the last one the head.
    pub fn split(&self, blocks: &[usize]) -> Result<Vec<Range<usize>>, ConfigError> {
        let sum: usize = blocks.iter().sum();
        if sum != self.config.layers || blocks.is_empty() {
            let reason = format!("they are {sum} blocks, and the model has {}", self.config.layers);
            return Err(ConfigError::new(
                "stages",
                format!("{blocks:?}"),
                reason,
                "give every block to one stage",
            ));
        }
        let last = blocks.len() - 1;
        let mut next = 0;
        let stage = |(i, blocks): (usize, &usize)| {
            let start = next;
            next += blocks + usize::from(i == 0) + usize::from(i == last);
            start..next
        };
        Ok(blocks.iter().enumerate().map(stage).collect())
    }

    /// The units `range` of those that read `rows` rows of one sample and say what may come next, as a rank holds them; and their parameters, which are
    /// the same for any number of rows.
    pub fn reading<K: Kernels>(
        &self,
        rows: usize,
        range: Range<usize>,
        place: &StageRank,
    ) -> (Vec<Unit<K>>, Vec<Parameter>) {
        let setup = Setup { place: place.clone(), ..Setup::alone(1, 0) };
        let mut parameters = Parameters::new::<K::Real>(&setup.place);
        let last = self.config.layers + 1;
        let mut unit = |unit: usize| {
            let units = Units::reading(self, rows, Builder::new(team(&setup), &mut parameters));
            let graph = match unit {
                0 => units.embed(),
                unit if unit < last => units.block(unit - 1),
                _ => units.talking_head(),
            };
            setup.unit(unit, graph)
        };
        let units = range.map(&mut unit).collect();
        (units, parameters.into_list())
    }

    /// Columns of keys, and of values, of a layer that a rank has.
    pub fn kv_width(&self, place: &StageRank) -> usize {
        let kv_heads = match self.config.family {
            Family::Gpt2 => self.config.heads,
            Family::Llama { kv_heads, .. } => kv_heads,
        };
        let axis = if place.mesh().axis_index(KV).is_some() { KV } else { "tp" };
        place.along(axis).part(kv_heads).len() * (self.config.width / self.config.heads)
    }

    /// What flows into a unit from the one before it: the residual stream, and on a ladder the branch that has not landed on it.
    pub(crate) fn stream(&self, unit: usize) -> Vec<Tensor> {
        let shape = Shape::Rows { rows: self.config.context, cols: self.config.width };
        let tensor = |name: &str| Tensor { name: name.into(), shape: shape.clone(), role: Role::Activation };
        let names: &[&str] = match self.config.residual {
            // Before the first block there is none.
            Residual::Ladder if unit > 1 => &["h", "late"],
            _ => &["h"],
        };
        names.iter().map(|name| tensor(name)).collect()
    }

    fn ids(&self, name: &str) -> Tensor {
        let shape = Shape::Ids { dims: vec![self.config.context], classes: self.config.vocab };
        Tensor { name: name.into(), shape, role: Role::Data }
    }
}

#[cfg(test)]
impl Gpt {
    /// A block as it is put together, before its passes are derived.
    pub(crate) fn block<'s, 'p, K: Kernels>(
        &self,
        setup: &Setup,
        parameters: &'s mut Parameters<'p>,
    ) -> Builder<'s, 'p, K> {
        Units::new(self, setup, Builder::new(team(setup), parameters)).block(1)
    }
}

impl<K: Kernels> Model<K> for Gpt {
    fn num_units(&self) -> usize {
        self.config.layers + 2
    }

    fn mesh(&self, mesh: &Mesh) -> Mesh {
        match self.config.family {
            Family::Gpt2 => mesh.clone(),
            Family::Llama { kv_heads, .. } => sharing_heads(mesh, kv_heads),
        }
    }

    fn check(&self, setup: &Setup) -> Result<(), ConfigError> {
        let Family::Llama { kv_heads, .. } = self.config.family else { return Ok(()) };
        let (tp, kv) = (setup.place.tp().size, setup.place.along(KV).size);
        let (reason, hint) = if tp > kv_heads && !tp.is_multiple_of(kv_heads) {
            let reason =
                format!("{tp} ranks along tp are more than there are heads, and no multiple of them");
            (reason, format!("use up to {kv_heads} ranks along tp, or a multiple such as {}", 2 * kv_heads))
        } else if tp > kv_heads && kv != kv_heads {
            let mesh = setup.place.mesh();
            let reason = format!("{tp} ranks along tp share them, and the mesh {mesh} does not say how");
            (reason, "give a stage the mesh that `Model::mesh` makes of it".to_string())
        } else {
            return Ok(());
        };
        Err(ConfigError::new("kv_heads", kv_heads, reason, hint))
    }

    fn interface(&self, unit: usize) -> Interface {
        let (takes, gives) = (self.stream(unit), self.stream(unit + 1));
        if unit == 0 {
            return Interface { reads: vec![self.ids("tokens")], gives, ..Interface::default() };
        }
        if unit <= self.config.layers {
            return Interface { takes, gives, ..Interface::default() };
        }
        let loss = Tensor { name: "loss".into(), shape: Shape::Number, role: Role::Loss };
        Interface { takes, reads: vec![self.ids("targets")], gives: vec![loss] }
    }

    /// Blocks are; on a ladder all but the first, on which nothing lands.
    fn repeated(&self, unit: usize) -> Option<String> {
        let first = match self.config.residual {
            Residual::Serial => 1,
            Residual::Ladder => 2,
        };
        (first..=self.config.layers).contains(&unit).then(|| units::prefix(&self.config.family, unit - 1))
    }

    fn unit(&self, unit: usize, setup: &Setup, parameters: &mut Parameters<'_>) -> Unit<K> {
        let units = Units::new(self, setup, Builder::new(team(setup), parameters));
        let graph = match unit {
            0 => units.embed(),
            unit if unit <= self.config.layers => units.block(unit - 1),
            _ => units.head(),
        };
        setup.unit(unit, graph)
    }
}

/// GPT-2's deviation of initial weights.
const DEVIATION: f64 = 0.02;
