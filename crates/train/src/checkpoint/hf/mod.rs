//! GPT-2 and Llama as Hugging Face transformers has them: a file `model.safetensors` and its `config.json`.
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
//!
//! Our Llama is theirs too: maps are `[out, in]`, names are the same, and heads are kept apart as `[kv heads, heads that ask each, head]`.

mod export;
mod import;

pub use export::{Exported, export};
pub use import::{Imported, import};

use crossmesh_checkpoint::manifest::VALUE;
use serde_json::{Value, json};

use super::error::CheckpointError;
use super::load::Checkpoint;
use crate::models::gpt::rotary::{Llama3Scaling, RotaryConfig};
use crate::models::gpt::{Family, GptConfig, Residual};
use crate::parameter::Parameter;

/// What transformers puts before all names but that of the head.
const PREFIX: &str = "transformer.";
const HEAD: &str = "lm_head.weight";
/// Under this name the facts of an imported model keep the header of the file it came from.
const HEADER: &str = "header";
/// What tells a Llama from a GPT-2.
const LLAMA_TABLE: &str = "model.embed_tokens.weight";
/// Before the kind of a model whose branches are on a ladder.
pub const LADDER: &str = "ladder-";
/// Maps to heads.
const LLAMA_HEADS: [&str; 3] = ["q_proj.weight", "k_proj.weight", "v_proj.weight"];

/// A decoder's sizes as [`super::Facts::model`] keeps them, under the names that a config has for them.
pub fn model_json(config: &GptConfig) -> Value {
    let GptConfig { vocab, context, width, layers, heads, hidden, tied, dropout, epsilon, .. } = config;
    let mut facts = json!({
        "kind": "gpt", "vocab": vocab, "context": context, "width": width, "layers": layers, "heads": heads, "hidden": hidden,
        "tied": tied, "dropout": dropout, "epsilon": epsilon, "residual": config.residual.name(),
    });
    if let Family::Llama { kv_heads, rotary } = &config.family {
        facts["kind"] = json!("llama");
        facts["kv_heads"] = json!(kv_heads);
        facts["rope_theta"] = json!(rotary.theta);
        if let Some(s) = rotary.scaling {
            facts["rope_scaling"] = json!([s.factor, s.low, s.high, s.old_context]);
        }
    }
    // What nobody else has goes by no name that they know.
    if let (Residual::Ladder, Value::String(kind)) = (config.residual, &mut facts["kind"]) {
        kind.insert_str(0, LADDER);
    }
    facts
}

/// The sizes of the decoder in a checkpoint: those of its tensors. What no tensor tells (epsilon, dropout, rotary positions) is in the facts,
/// or as usual.
pub fn decoder_config(checkpoint: &Checkpoint) -> Result<GptConfig, CheckpointError> {
    let manifest = checkpoint.manifest();
    let shape = |name: &str| manifest.tensor(name, VALUE).map(|t| &t.shape[..]);
    let wrong = |what: String| CheckpointError::Model { path: checkpoint.folder().to_path_buf(), what };
    let number = |name: &str| checkpoint.facts().model.get(name).and_then(Value::as_f64);
    let sizes = match shape(LLAMA_TABLE) {
        Some(_) => llama_sizes(&shape, &number, checkpoint.facts().model.get("rope_scaling")),
        None => gpt2_sizes(&shape),
    };
    let sizes = sizes.map_err(|name| {
        wrong(format!("it is neither GPT-2 nor Llama: `{name}` is missing or has other dims"))
    })?;
    let residual = checkpoint.facts().model.get("residual").and_then(Value::as_str);
    let residual = match residual.map(|name| (name, Residual::named(name))) {
        None => Residual::Serial,
        Some((_, Some(residual))) => residual,
        Some((name, None)) => return Err(wrong(format!("it has the residual `{name}`, which nobody knows"))),
    };
    Ok(GptConfig {
        residual,
        tied: shape(HEAD).is_none(),
        dropout: number("dropout").unwrap_or(sizes.dropout),
        epsilon: number("epsilon").unwrap_or(sizes.epsilon),
        ..sizes
    })
}

type Shapes<'a> = dyn Fn(&str) -> Option<&'a [u64]> + 'a;

fn gpt2_sizes(shape: &Shapes<'_>) -> Result<GptConfig, String> {
    let missing = |name: &str| name.to_string();
    let Some(&[vocab, width]) = shape("wte.weight") else { return Err(missing("wte.weight")) };
    let Some(&[context, _]) = shape("wpe.weight") else { return Err(missing("wpe.weight")) };
    let name = "h.0.attn.c_attn.weight";
    let Some(&[_, 3, heads, _]) = shape(name) else { return Err(missing(name)) };
    let name = "h.0.mlp.c_fc.weight";
    let Some(&[_, hidden]) = shape(name) else { return Err(missing(name)) };
    let layers = (0..).take_while(|l| shape(&format!("h.{l}.ln_1.weight")).is_some()).count();
    let [vocab, context, width, heads, hidden] = [vocab, context, width, heads, hidden].map(|n| n as usize);
    Ok(GptConfig { hidden, ..GptConfig::new(vocab, context, width, layers, heads) })
}

fn llama_sizes(
    shape: &Shapes<'_>,
    number: &dyn Fn(&str) -> Option<f64>,
    scaling: Option<&Value>,
) -> Result<GptConfig, String> {
    let missing = |name: &str| name.to_string();
    let Some(&[vocab, width]) = shape(LLAMA_TABLE) else { return Err(missing(LLAMA_TABLE)) };
    let name = "model.layers.0.self_attn.q_proj.weight";
    let Some(&[kv_heads, group, _, _]) = shape(name) else { return Err(missing(name)) };
    let name = "model.layers.0.mlp.gate_proj.weight";
    let Some(&[hidden, _]) = shape(name) else { return Err(missing(name)) };
    let layers =
        (0..).take_while(|l| shape(&format!("model.layers.{l}.input_layernorm.weight")).is_some()).count();
    let context = number("context").ok_or("context` of the facts, `model.context")?;
    let [vocab, width, heads, kv_heads, hidden] =
        [vocab, width, kv_heads * group, kv_heads, hidden].map(|n| n as usize);
    let numbers: Option<Vec<f64>> =
        scaling.and_then(Value::as_array).map(|list| list.iter().filter_map(Value::as_f64).collect());
    let scaling = match numbers.as_deref() {
        Some(&[factor, low, high, old_context]) => Some(Llama3Scaling { factor, low, high, old_context }),
        _ => None,
    };
    let theta = number("rope_theta").unwrap_or(RotaryConfig::default().theta);
    let family = Family::Llama { kv_heads, rotary: RotaryConfig { theta, scaling } };
    let sizes = GptConfig::llama((vocab, context as usize), width, layers, (heads, kv_heads), hidden);
    Ok(GptConfig { family, ..sizes })
}

/// A parameter's name and shape in transformers.
fn foreign(parameter: &Parameter) -> (String, Vec<u64>) {
    let (name, shape) = (&parameter.name, parameter.layout.shape());
    let of_gpt2 = name != HEAD && !name.starts_with("model.");
    let prefix = if of_gpt2 { PREFIX } else { "" };
    let shape = match shape {
        &[outs, ref ins @ ..] if name.ends_with("o_proj.weight") => vec![outs, ins.iter().product()],
        &[ref outs @ .., ins] if LLAMA_HEADS.iter().any(|end| name.ends_with(end)) => {
            vec![outs.iter().product(), ins]
        }
        &[ins, 3, heads, dim] if name.ends_with("attn.c_attn.weight") => vec![ins, 3 * heads * dim],
        &[3, heads, dim] if name.ends_with("attn.c_attn.bias") => vec![3 * heads * dim],
        &[heads, dim, outs] if name.ends_with("attn.c_proj.weight") => vec![heads * dim, outs],
        other => other.to_vec(),
    };
    (format!("{prefix}{name}"), shape)
}
