//! A model from the `config.json` that Hugging Face keeps beside its weights.

use serde::Deserialize;

use super::{Decoder, Model, Weights};

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
    #[error(
        "not a table of tensors: {0}\nhint: {{\"dtype\": \"bf16\", \"tensors\": {{\"lm_head.weight\": [50, 24]}}, \"roles\": {{\"lm_head\": \"column\"}}}}"
    )]
    Table(String),
    #[error("`{name}` of shape {shape:?}: no model is so large")]
    TooLarge { name: String, shape: Vec<u64> },
    #[error(
        "`{end}` is the end of no tensor's name\nhint: roles are by the last words of names, such as `self_attn.q_proj`"
    )]
    NoTensor { end: String },
    #[error("`{name}` is listed twice")]
    Twice { name: String },
    #[error(
        "`{name}`: how its {rows} rows are query, key and value does not follow from a name and a shape\nhint: list the `o_proj` beside it, or say it in `roles`: `column 4096+1024+1024`"
    )]
    Parts { name: String, rows: u64 },
    #[error(
        "`{name}`, of shape {shape:?}, cannot be `{role}`\nhint: `column`, `column 4096+1024+1024`, `row`, `whole`, `experts column 64+64` or `experts row`"
    )]
    Role { name: String, role: String, shape: Vec<u64> },
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
    /// Reads the text of a `config.json`, or of a table of tensors, which has `tensors`.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        #[derive(Deserialize)]
        struct Probe {
            tensors: Option<serde::de::IgnoredAny>,
        }
        let is_table = serde_json::from_str::<Probe>(text).is_ok_and(|probe| probe.tensors.is_some());
        if is_table { Self::from_table(text) } else { Self::from_config(text) }
    }

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
        let decoder = Decoder {
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
        Ok(Self {
            name: config.model_type,
            dtype: dtype.parse().map_err(|()| ConfigError::UnknownDType(dtype.into()))?,
            weights: Weights::Decoder(decoder.checked()?),
        })
    }
}

impl Decoder {
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
