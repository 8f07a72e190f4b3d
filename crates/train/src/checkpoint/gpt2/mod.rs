//! GPT-2 as Hugging Face transformers has it: a file `model.safetensors` and its `config.json`.
//!
//! Our GPT is GPT-2 (tests/transformers_export.py compares logits), and its weights lie in memory as GPT-2's do: a linear map is `[in, out]`, queries, keys
//! and values are fused. Only the dims are written differently, for ours keep heads apart:
//!
//! ```text
//! ours                                 transformers
//! wte.weight               [v, w]      transformer.wte.weight               [v, w]
//! h.0.attn.c_attn.weight   [w, 3, h, d]    transformer.h.0.attn.c_attn.weight   [w, 3 w]
//! h.0.attn.c_proj.weight   [h, d, w]   transformer.h.0.attn.c_proj.weight   [w, w]
//! (tied)                               lm_head.weight is left out
//! ```

mod export;
mod import;

pub use export::{Exported, export};
pub use import::{Imported, import};

use serde_json::{Value, json};

use super::error::CheckpointError;
use super::load::Checkpoint;
use super::manifest::VALUE;
use crate::models::gpt::GptConfig;
use crate::parameter::Parameter;

/// What transformers puts before all names but that of the head.
const PREFIX: &str = "transformer.";
const HEAD: &str = "lm_head.weight";

/// A GPT's sizes as [`super::Facts::model`] keeps them.
pub fn model_json(config: &GptConfig) -> Value {
    let GptConfig { vocab, context, width, layers, heads, hidden, tied, dropout, epsilon, family: _ } =
        config;
    json!({
        "kind": "gpt", "vocab": vocab, "context": context, "width": width, "layers": layers, "heads": heads, "hidden": hidden,
        "tied": tied, "dropout": dropout, "epsilon": epsilon,
    })
}

/// The sizes of the GPT in a checkpoint: those of its tensors. What no tensor tells (epsilon, dropout) is in the facts, or GPT-2's.
pub fn gpt_config(checkpoint: &Checkpoint) -> Result<GptConfig, CheckpointError> {
    let manifest = checkpoint.manifest();
    let shape = |name: &str| manifest.tensor(name, VALUE).map(|t| &t.shape[..]);
    let wrong = |what: String| CheckpointError::Model { path: checkpoint.folder().to_path_buf(), what };
    let missing = |name: &str| wrong(format!("it is no GPT: `{name}` is missing or has other dims"));
    let Some(&[vocab, width]) = shape("wte.weight") else { return Err(missing("wte.weight")) };
    let Some(&[context, _]) = shape("wpe.weight") else { return Err(missing("wpe.weight")) };
    let name = "h.0.attn.c_attn.weight";
    let Some(&[_, 3, heads, _]) = shape(name) else { return Err(missing(name)) };
    let name = "h.0.mlp.c_fc.weight";
    let Some(&[_, hidden]) = shape(name) else { return Err(missing(name)) };
    let layers = (0..).take_while(|l| shape(&format!("h.{l}.ln_1.weight")).is_some()).count();
    let number = |name: &str| checkpoint.facts().model.get(name).and_then(Value::as_f64);
    let new = GptConfig::new(vocab as usize, context as usize, width as usize, layers, heads as usize);
    Ok(GptConfig {
        hidden: hidden as usize,
        tied: shape(HEAD).is_none(),
        dropout: number("dropout").unwrap_or(new.dropout),
        epsilon: number("epsilon").unwrap_or(new.epsilon),
        ..new
    })
}

/// A parameter's name and shape in transformers.
fn foreign(parameter: &Parameter) -> (String, Vec<u64>) {
    let (name, shape) = (&parameter.name, parameter.layout.shape());
    let prefix = if name == HEAD { "" } else { PREFIX };
    let shape = match shape {
        &[ins, 3, heads, dim] if name.ends_with("attn.c_attn.weight") => vec![ins, 3 * heads * dim],
        &[3, heads, dim] if name.ends_with("attn.c_attn.bias") => vec![3 * heads * dim],
        &[heads, dim, outs] if name.ends_with("attn.c_proj.weight") => vec![heads * dim, outs],
        other => other.to_vec(),
    };
    (format!("{prefix}{name}"), shape)
}
