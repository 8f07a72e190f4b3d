//! Reading such a file into a checkpoint that training goes on from: parameters without moments, step 0.

use std::fs::File;
use std::path::{Path, PathBuf};

use crossmesh_checkpoint::manifest::Facts;
use crossmesh_checkpoint::model::{computes_as_ours, rotary_of};
use crossmesh_checkpoint::safetensors::{Entry, Header, read_text};
use crossmesh_checkpoint::{BoxReader, Element, StoredBox, Want, row_major};
use crossmesh_core::id::Rank;
use crossmesh_core::region::Region;
use serde_json::{Value, json};

use super::super::error::CheckpointError;
use super::super::snapshot::Snapshot;
use super::super::state::StageState;
use super::super::store::Store;
use super::{HEAD, HEADER, LLAMA_TABLE, PREFIX, foreign, model_json};
use crate::chain::parameters;
use crate::kernels::cpu::Cpu;
use crate::kernels::scalar::Scalar;
use crate::models::gpt::rotary::{Llama3Scaling, RotaryConfig};
use crate::models::gpt::{Family, Gpt, GptConfig};
use crate::parameter::Parameter;
use crate::stage_rank::StageRank;

/// What was read, and where it is now.
#[derive(Debug, Clone, PartialEq)]
pub struct Imported {
    pub path: PathBuf,
    pub config: GptConfig,
    pub tensors: usize,
}

/// A file of tensors, open.
struct Foreign {
    path: PathBuf,
    file: File,
    header: Header,
    /// The same as it was written.
    text: String,
    /// The `config.json` beside it; null where there is none.
    config: Value,
}

/// Reads a GPT-2 (with or without the prefix `transformer.`) or a Llama as transformers saves it, and puts it into a store as numbers of type `T`. The number
/// of heads is in the `config.json` beside the file, or given.
pub fn import<T: Scalar>(
    file: &Path,
    heads: Option<usize>,
    store: &Store,
) -> Result<Imported, CheckpointError> {
    if let Some(step) = store.steps()?.last() {
        let what = format!("it has a checkpoint of step {step} already\nhint: import into a new folder");
        return Err(CheckpointError::Model { path: store.folder().to_path_buf(), what });
    }
    let foreign = Foreign::open(file)?;
    foreign.check_config()?;
    let config = foreign.config(heads)?;
    let model = Gpt::new(config.clone()).map_err(|e| foreign.wrong(e.to_string()))?;
    let parameters = parameters::<Cpu<T>>(&model);
    foreign.check_names(&parameters, config.tied)?;
    let mut values = vec![T::ZERO; parameters.last().map_or(0, |p| p.range.end)];
    for parameter in &parameters {
        foreign.read(parameter, &mut values[parameter.range.clone()])?;
    }
    let place = StageRank::alone();
    let state = StageState::of_weights(&parameters, &place, &values);
    let snapshot = Snapshot::take(0, Rank(0), &[state])?;
    let from = file.file_name().map(|n| n.to_string_lossy().into_owned());
    // What the file looked like, to write the same again.
    let (model, run) = (model_json(&config), json!({ "imported": from, HEADER: foreign.text }));
    let facts = Facts { step: 0, samples: 0, seed: 0, model, run, optimizer: None };
    let path = store.commit(&facts, &[store.write(snapshot).report()])?;
    Ok(Imported { path, config, tensors: parameters.len() })
}

impl Foreign {
    fn open(path: &Path) -> Result<Self, CheckpointError> {
        let file = File::open(path).map_err(CheckpointError::io("open", path))?;
        let found = file.metadata().map_err(CheckpointError::io("look at", path))?;
        if !found.is_file() {
            let what = "it is no file\nhint: name the model.safetensors in it".into();
            return Err(CheckpointError::Model { path: path.to_path_buf(), what });
        }
        let header = Header::read_whole(&file, path)?;
        let text = String::from_utf8_lossy(&read_text(&file, path)?).into_owned();
        let beside = path.with_file_name("config.json");
        let config = match std::fs::read_to_string(&beside) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Value::Null,
            text => serde_json::from_str(&text.map_err(CheckpointError::io("read", &beside))?)
                .map_err(|e| CheckpointError::damaged(&beside, format!("it is no JSON: {e}")))?,
        };
        Ok(Self { path: path.to_path_buf(), file, header, text, config })
    }

    fn wrong(&self, what: impl Into<String>) -> CheckpointError {
        CheckpointError::Model { path: self.path.clone(), what: what.into() }
    }

    /// A tensor by our name.
    fn entry(&self, name: &str) -> Option<&Entry> {
        let entries = &self.header.entries;
        entries.get(name).or_else(|| entries.get(&format!("{PREFIX}{name}")))
    }

    fn is_llama(&self) -> bool {
        self.header.entries.contains_key(LLAMA_TABLE)
    }

    /// Refuses what looks like GPT-2 or Llama and computes something else.
    fn check_config(&self) -> Result<(), CheckpointError> {
        let kind = if self.is_llama() { "llama" } else { "gpt" };
        let path = self.path.with_file_name("config.json");
        computes_as_ours(&self.config, kind).map_err(|what| CheckpointError::Model { path, what })
    }

    fn config(&self, heads: Option<usize>) -> Result<GptConfig, CheckpointError> {
        if self.is_llama() { self.llama_config(heads) } else { self.gpt2_config(heads) }
    }

    fn llama_config(&self, heads: Option<usize>) -> Result<GptConfig, CheckpointError> {
        let number = |key: &str| self.config.get(key).and_then(Value::as_f64);
        let need = |key: &str| {
            number(key).map(|n| n as usize).ok_or_else(|| {
                self.wrong(format!(
                    "the config.json beside it has no `{key}`\nhint: a Llama's tensors do not tell it"
                ))
            })
        };
        let Some(&[vocab, width]) = self.entry(LLAMA_TABLE).map(|e| &e.shape[..]) else {
            return Err(self.wrong(format!("`{LLAMA_TABLE}` has not two dims")));
        };
        let rows = |name: &str| self.entry(name).and_then(|e| e.shape.first()).map_or(0, |&n| n as usize);
        let hidden = rows("model.layers.0.mlp.gate_proj.weight");
        let layer = |l: usize| self.entry(&format!("model.layers.{l}.input_layernorm.weight")).is_some();
        let layers = (0..).take_while(|&l| layer(l)).count();
        let heads = heads.map_or_else(|| need("num_attention_heads"), Ok)?;
        let kv_heads = number("num_key_value_heads").map_or(heads, |n| n as usize);
        self.agree(&[
            ("vocab_size", vocab as usize),
            ("hidden_size", width as usize),
            ("num_hidden_layers", layers),
            ("intermediate_size", hidden),
            ("head_dim", width as usize / heads.max(1)),
        ])?;
        let context = need("max_position_embeddings")?;
        let sizes =
            GptConfig::llama((vocab as usize, context), width as usize, layers, (heads, kv_heads), hidden);
        Ok(GptConfig {
            tied: self.tied(),
            dropout: number("attention_dropout").unwrap_or(sizes.dropout),
            epsilon: number("rms_norm_eps").unwrap_or(sizes.epsilon),
            family: Family::Llama { kv_heads, rotary: self.rotary()? },
            ..sizes
        })
    }

    fn rotary(&self) -> Result<RotaryConfig, CheckpointError> {
        let path = self.path.with_file_name("config.json");
        let (theta, scaling) =
            rotary_of(&self.config).map_err(|what| CheckpointError::Model { path, what })?;
        let scaling =
            scaling.map(|[factor, low, high, old_context]| Llama3Scaling { factor, low, high, old_context });
        Ok(RotaryConfig { theta: theta.unwrap_or(RotaryConfig::default().theta), scaling })
    }

    /// Refuses a config.json that says otherwise than the tensors.
    fn agree(&self, sizes: &[(&str, usize)]) -> Result<(), CheckpointError> {
        let number = |key: &str| self.config.get(key).and_then(Value::as_f64);
        for &(key, found) in sizes {
            if let Some(said) = number(key).filter(|said| *said != found as f64) {
                return Err(self.wrong(format!(
                    "its tensors have {key} {found}, and the config.json beside it says {said}\nhint: they are not of one model, or the file is cut short"
                )));
            }
        }
        Ok(())
    }

    fn gpt2_config(&self, heads: Option<usize>) -> Result<GptConfig, CheckpointError> {
        let dims = |name: &str| match self.entry(name).map(|e| &e.shape[..]) {
            Some(&[rows, cols]) => Ok((rows as usize, cols as usize)),
            Some(other) => Err(self.wrong(format!("`{name}` has the dims {other:?}, not two"))),
            None => Err(self.wrong(format!("it is no GPT-2: it has no `{name}`"))),
        };
        let ((vocab, width), (context, _)) = (dims("wte.weight")?, dims("wpe.weight")?);
        let layers = (0..).take_while(|l| self.entry(&format!("h.{l}.ln_1.weight")).is_some()).count();
        let number = |key: &str| self.config.get(key).and_then(Value::as_f64);
        let hidden = dims("h.0.mlp.c_fc.weight")?.1;
        // `n_inner` is null where it is four times the width.
        self.agree(&[
            ("vocab_size", vocab),
            ("n_positions", context),
            ("n_embd", width),
            ("n_layer", layers),
            ("n_inner", hidden),
        ])?;
        let heads = heads.or(number("n_head").map(|n| n as usize)).ok_or_else(|| {
            self.wrong(
                "there is no config.json beside it, so nobody knows its heads\nhint: give their number",
            )
        })?;
        let new = GptConfig::new(vocab, context, width, layers, heads);
        Ok(GptConfig {
            hidden,
            tied: self.tied(),
            dropout: number("resid_pdrop").unwrap_or(new.dropout),
            epsilon: number("layer_norm_epsilon").unwrap_or(new.epsilon),
            ..new
        })
    }

    /// What the config says; without one, whether there is a head.
    fn tied(&self) -> bool {
        let said = self.config.get("tie_word_embeddings").and_then(Value::as_bool);
        said.unwrap_or(!self.config.is_null() || self.entry(HEAD).is_none())
    }

    /// Every tensor is one that the model has, or known to be of no use.
    fn check_names(&self, parameters: &[Parameter], tied: bool) -> Result<(), CheckpointError> {
        for key in self.header.entries.keys() {
            let name = key.strip_prefix(PREFIX).unwrap_or(key);
            if name != key && self.header.entries.contains_key(name) {
                return Err(self.wrong(format!(
                    "`{key}` and `{name}` are two tensors of one name\nhint: keep one of them"
                )));
            }
            // Masks that older files carry along; a head that is the table of tokens again.
            let of_no_use = [".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"]
                .iter()
                .any(|end| name.ends_with(end));
            let known = parameters.iter().any(|p| p.name == name) || (tied && name == HEAD);
            if !known && !of_no_use {
                let what = if self.is_llama() { "Llama" } else { "GPT-2" };
                return Err(self.wrong(format!("`{key}` is no tensor of a {what}")));
            }
        }
        Ok(())
    }

    fn read<T: Scalar>(&self, parameter: &Parameter, values: &mut [T]) -> Result<(), CheckpointError> {
        let name = &parameter.name;
        let entry = self.entry(name).ok_or_else(|| self.wrong(format!("it has no `{name}`")))?;
        let (_, wanted) = foreign(parameter);
        if entry.shape != wanted {
            return Err(self.wrong(format!("`{name}` has the shape {:?}, not {wanted:?}", entry.shape)));
        }
        if !entry.element.is_real() {
            return Err(self.wrong(format!("`{name}` is {}, not f64, f32, f16 or bf16", entry.element)));
        }
        let region = Region::whole(parameter.layout.shape());
        let stored = StoredBox::packed(region.clone(), 0, self.header.range(entry).start, entry.element);
        let element = Element::Of(T::DTYPE);
        let strides = row_major(parameter.layout.shape().iter().copied(), element.bytes());
        let memory = bytemuck::cast_slice_mut(values);
        let mut want = Want { tensor: name.clone(), region, element, strides, memory };
        BoxReader::default().read((&self.file, &self.path), (&stored, entry.element), &mut want)?;
        Ok(())
    }
}
