//! Models as tables of tensors: names, shapes, and how parallel training and serving cut them.
//!
//! ```text
//! llama3-70b            q, k, v   gate, up   o, down   embeddings   norms        (fused: qkv and gate_up are one tensor each)
//! fsdp 64               rows, by 64, of every tensor; a fused one's parts each on their own
//! dp 4, tp 8            column-parallel ones by rows, row-parallel ones by columns, norms whole; four times
//! pp 2, tp 4            the same, half of the layers on each half of the ranks
//! ```
//!
//! ```
//! use crossmesh_core::models::{Model, Parallel};
//! let model = Model::preset("llama3-8b").unwrap();
//! assert_eq!(model.parameters(), 8_030_261_248);
//! let pairs = model.pairs(&"fsdp 8".parse().unwrap(), &"dp 2, tp 4".parse::<Parallel>().unwrap(), true).unwrap();
//! assert_eq!(pairs[1].0, "model.layers.0.self_attn.qkv_proj.weight");
//! ```

mod config;
mod into_fused;
mod parallel;
mod presets;
mod table;
mod tensors;

pub use config::ConfigError;
pub use parallel::{Parallel, ParallelError};
pub use tensors::{ModelTensor, Role};

use crate::dtype::DType;
use crate::layout::Layout;

/// A model's weights.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    pub name: String,
    pub dtype: DType,
    weights: Weights,
}

/// How a model's tensors are known.
#[derive(Debug, Clone, PartialEq)]
enum Weights {
    Decoder(Decoder),
    /// All of them listed.
    Table {
        tensors: Vec<ModelTensor>,
        layers: u64,
    },
}

/// A decoder of the Llama family: grouped-query attention, gated feed-forward, experts or none.
#[derive(Debug, Clone, PartialEq)]
struct Decoder {
    hidden: u64,
    layers: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
    /// Of the feed-forward, or of an expert.
    ffn: u64,
    vocab: u64,
    /// Whether the output shares the embeddings' weights.
    tied: bool,
    /// Norms of queries and keys, as Qwen3 has them.
    qk_norm: bool,
    experts: Option<u64>,
    /// What the router and the experts are called.
    expert_block: &'static str,
}

impl Model {
    /// A model that is known by name: `llama3-70b`, `qwen3-235b-a22b`, …
    pub fn preset(name: &str) -> Option<Self> {
        presets::preset(name)
    }

    pub fn preset_names() -> impl Iterator<Item = &'static str> {
        presets::names()
    }

    /// All tensors, in the order of the model. `fused`: query, key and value are one tensor, and so are gate and up, as serving engines
    /// have them; a table stays as it is.
    pub fn tensors(&self, fused: bool) -> Vec<ModelTensor> {
        match &self.weights {
            Weights::Decoder(decoder) => decoder.tensors(fused),
            Weights::Table { tensors, .. } => tensors.clone(),
        }
    }

    fn layers(&self) -> u64 {
        match &self.weights {
            Weights::Decoder(decoder) => decoder.layers,
            Weights::Table { layers, .. } => *layers,
        }
    }

    /// Whether there is something for `ep` to cut.
    fn has_experts(&self) -> bool {
        match &self.weights {
            Weights::Decoder(decoder) => decoder.experts.is_some(),
            Weights::Table { tensors, .. } => tensors.iter().any(|t| matches!(t.role, Role::Experts { .. })),
        }
    }

    /// How many numbers it has learnt.
    pub fn parameters(&self) -> u64 {
        self.tensors(false).iter().map(|tensor| tensor.shape.iter().product::<u64>()).sum()
    }

    /// Every tensor with its layout before and after; `fused` as in [`Model::tensors`].
    pub fn pairs(
        &self,
        src: &Parallel,
        dst: &Parallel,
        fused: bool,
    ) -> Result<Vec<(String, Layout, Layout)>, ParallelError> {
        let tensors = self.tensors(fused);
        let first = src.num_ranks();
        let mut pairs = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            let before = src.layout(self, &tensor, "T", 0)?;
            let after = dst.layout(self, &tensor, "I", first)?;
            pairs.push((tensor.name, before, after));
        }
        Ok(pairs)
    }
}

#[cfg(test)]
mod tests;
