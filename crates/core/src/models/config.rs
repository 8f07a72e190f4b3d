//! A model from the `config.json` that Hugging Face keeps beside its weights.

use serde::Deserialize;

use super::Model;

/// Why a config says no model of ours.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    #[error("not a model's config.json: {0}")]
    Syntax(String),
    #[error("model_type `{0}` is not known\nhint: llama, mistral, qwen2, qwen3, qwen3_moe and mixtral are")]
    UnknownType(String),
    #[error("`{key}` is {value}: {why}")]
    Bad { key: &'static str, value: u64, why: &'static str },
    #[error("torch_dtype `{0}` is not known")]
    UnknownDType(String),
}

#[derive(Deserialize)]
struct Config {
    model_type: String,
    hidden_size: u64,
    num_hidden_layers: u64,
    num_attention_heads: u64,
    num_key_value_heads: Option<u64>,
    head_dim: Option<u64>,
    intermediate_size: u64,
    moe_intermediate_size: Option<u64>,
    vocab_size: u64,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(alias = "num_local_experts")]
    num_experts: Option<u64>,
    #[serde(alias = "dtype")]
    torch_dtype: Option<String>,
}

/// More than any model has, and far from what would overflow.
const MOST: u64 = 1 << 32;

impl Model {
    /// Reads the text of a `config.json`.
    pub fn from_config(text: &str) -> Result<Self, ConfigError> {
        let config: Config = serde_json::from_str(text).map_err(|e| ConfigError::Syntax(e.to_string()))?;
        let (qk_norm, moe, expert_block) = match config.model_type.as_str() {
            "llama" | "mistral" | "qwen2" => (false, false, "mlp"),
            "qwen3" => (true, false, "mlp"),
            "qwen3_moe" => (true, true, "mlp"),
            "mixtral" => (false, true, "block_sparse_moe"),
            other => return Err(ConfigError::UnknownType(other.into())),
        };
        let dtype = config.torch_dtype.as_deref().unwrap_or("bfloat16");
        let heads = config.num_attention_heads;
        let model = Self {
            name: config.model_type,
            dtype: dtype.parse().map_err(|()| ConfigError::UnknownDType(dtype.into()))?,
            hidden: config.hidden_size,
            layers: config.num_hidden_layers,
            heads,
            kv_heads: config.num_key_value_heads.unwrap_or(heads),
            head_dim: config.head_dim.unwrap_or(config.hidden_size / heads.max(1)),
            ffn: config.moe_intermediate_size.filter(|_| moe).unwrap_or(config.intermediate_size),
            vocab: config.vocab_size,
            tied: config.tie_word_embeddings,
            qk_norm,
            experts: config.num_experts.filter(|_| moe),
            expert_block,
        };
        model.checked()
    }

    fn checked(self) -> Result<Self, ConfigError> {
        let sizes = [
            ("hidden_size", self.hidden),
            ("num_hidden_layers", self.layers),
            ("num_attention_heads", self.heads),
            ("num_key_value_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("intermediate_size", self.ffn),
            ("vocab_size", self.vocab),
            ("num_experts", self.experts.unwrap_or(1)),
        ];
        for (key, value) in sizes {
            if value == 0 || value >= MOST {
                return Err(ConfigError::Bad { key, value, why: "no model has that" });
            }
        }
        if self.layers > 10_000 {
            return Err(ConfigError::Bad {
                key: "num_hidden_layers",
                value: self.layers,
                why: "at most 10000 are planned",
            });
        }
        match self.heads.is_multiple_of(self.kv_heads) {
            true => Ok(self),
            false => {
                let why = "it does not divide num_attention_heads";
                Err(ConfigError::Bad { key: "num_key_value_heads", value: self.kv_heads, why })
            }
        }
    }
}
