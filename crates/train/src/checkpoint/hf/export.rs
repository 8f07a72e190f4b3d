//! Writing `model.safetensors` and `config.json`, one tensor in memory at a time.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use crossmesh_core::dtype::DType;
use serde_json::{Value, json};

use super::super::error::CheckpointError;
use super::super::load::Checkpoint;
use super::super::state::Convert;
use super::super::store::write_synced;
use super::super::tensor_file::header_bytes;
use super::super::write::sync_folder;
use super::{decoder_config, foreign};
use crate::chain::parameters;
use crate::kernels::cpu::Cpu;
use crate::kernels::scalar::Scalar;
use crate::models::gpt::{Family, Gpt, GptConfig};
use crate::parameter::Parameter;

/// What was written.
#[derive(Debug, Clone, PartialEq)]
pub struct Exported {
    pub model: PathBuf,
    pub config: PathBuf,
    pub tensors: usize,
    pub bytes: u64,
}

/// Writes a checkpoint of a decoder into a folder, as transformers' `GPT2LMHeadModel` or `LlamaForCausalLM` loads it. Numbers stay as wide as they
/// are. `end` is the token that ends a document, where that is known.
pub fn export(checkpoint: &Checkpoint, folder: &Path, end: Option<u32>) -> Result<Exported, CheckpointError> {
    match checkpoint.dtype() {
        DType::F64 => export_as::<f64>(checkpoint, folder, end),
        _ => export_as::<f32>(checkpoint, folder, end),
    }
}

fn export_as<T: Scalar>(
    checkpoint: &Checkpoint,
    folder: &Path,
    end: Option<u32>,
) -> Result<Exported, CheckpointError> {
    let config = decoder_config(checkpoint)?;
    let wrong = |what: String| CheckpointError::Model { path: checkpoint.folder().to_path_buf(), what };
    let model = Gpt::new(config.clone()).map_err(|e| wrong(e.to_string()))?;
    let parameters = parameters::<Cpu<T>>(&model);
    checkpoint.verify()?;
    fs::create_dir_all(folder).map_err(CheckpointError::io("create", folder))?;
    let path = folder.join("model.safetensors");
    let beside = folder.join(".model.safetensors.partial");
    let bytes = write_tensors::<T>(checkpoint, &parameters, &beside).inspect_err(|_| {
        // Half a file is of no use, and may be what fills the disk.
        let _ = fs::remove_file(&beside);
    })?;
    fs::rename(&beside, &path).map_err(CheckpointError::io("rename", &beside))?;
    let config_path = folder.join("config.json");
    let text = serde_json::to_string_pretty(&foreign_config::<T>(&config, end)).expect("a document") + "\n";
    write_synced(&config_path, text.as_bytes())?;
    sync_folder(folder)?;
    Ok(Exported { model: path, config: config_path, tensors: parameters.len(), bytes })
}

fn write_tensors<T: Scalar>(
    checkpoint: &Checkpoint,
    parameters: &[Parameter],
    path: &Path,
) -> Result<u64, CheckpointError> {
    let dtype = T::DTYPE.name().to_uppercase();
    let entry = |p: &Parameter| {
        let (name, shape) = foreign(p);
        (name, dtype.clone(), shape)
    };
    let entries: Vec<_> = parameters.iter().map(entry).collect();
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let header = header_bytes(&metadata, &entries);
    let io = |error| CheckpointError::io("write", path)(error);
    let mut file = File::create(path).map_err(CheckpointError::io("create", path))?;
    file.write_all(&header).map_err(io)?;
    let mut bytes = header.len() as u64;
    for parameter in parameters {
        let values = checkpoint.whole::<T>(&parameter.name, parameter.layout.shape(), Convert::No)?;
        file.write_all(bytemuck::cast_slice(&values)).map_err(io)?;
        bytes += size_of_val(&values[..]) as u64;
    }
    file.sync_all().map_err(io)?;
    Ok(bytes)
}

/// What transformers calls the sizes.
fn foreign_config<T: Scalar>(config: &GptConfig, end: Option<u32>) -> Value {
    let dtype = if T::DTYPE == DType::F64 { "float64" } else { "float32" };
    if let Family::Llama { kv_heads, rotary } = &config.family {
        let mut rope = json!({ "rope_type": "default", "rope_theta": rotary.theta });
        if let Some(s) = rotary.scaling {
            rope["rope_type"] = json!("llama3");
            rope["factor"] = json!(s.factor);
            rope["low_freq_factor"] = json!(s.low);
            rope["high_freq_factor"] = json!(s.high);
            rope["original_max_position_embeddings"] = json!(s.old_context as u64);
        }
        return json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": config.vocab,
            "max_position_embeddings": config.context,
            "hidden_size": config.width,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": kv_heads,
            "head_dim": config.width / config.heads,
            "intermediate_size": config.hidden,
            "hidden_act": "silu",
            "attention_bias": false,
            "mlp_bias": false,
            "attention_dropout": config.dropout,
            "rms_norm_eps": config.epsilon,
            // Where transformers looks since version 5, and where it looked before.
            "rope_parameters": rope,
            "rope_theta": rotary.theta,
            "rope_scaling": if rotary.scaling.is_some() { rope.clone() } else { Value::Null },
            "tie_word_embeddings": config.tied,
            "bos_token_id": null,
            "eos_token_id": end,
            "dtype": dtype,
            "torch_dtype": dtype,
        });
    }
    json!({
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab,
        "n_positions": config.context,
        "n_ctx": config.context,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.hidden,
        "activation_function": "gelu_new",
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "layer_norm_epsilon": config.epsilon,
        "scale_attn_weights": true,
        "tie_word_embeddings": config.tied,
        // As GPT-2 has it, what ends a document also starts one. Its own would be outside of a smaller vocabulary.
        "bos_token_id": end,
        "eos_token_id": end,
        "dtype": dtype,
        "torch_dtype": dtype,
    })
}
