//! Reading such a file into a checkpoint that training goes on from: parameters without moments, step 0.

use std::fs::File;
use std::path::{Path, PathBuf};

use crossmesh_core::dtype::DType;
use crossmesh_core::id::Rank;
use crossmesh_core::region::Region;
use serde_json::{Value, json};

use super::super::error::CheckpointError;
use super::super::manifest::Facts;
use super::super::read::{Reader, Source};
use super::super::snapshot::Snapshot;
use super::super::state::{Moments, Sharding, StageState};
use super::super::store::Store;
use super::super::tensor_file::{Entry, Header};
use super::{HEAD, PREFIX, foreign, model_json};
use crate::chain::parameters;
use crate::kernels::cpu::Cpu;
use crate::kernels::scalar::Scalar;
use crate::models::gpt::{Gpt, GptConfig};
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
    /// The `config.json` beside it; null where there is none.
    config: Value,
}

/// Reads a GPT-2 as transformers saves it, with or without the prefix `transformer.`, and puts it into a store as numbers of type `T`. The number
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
    let config = foreign.gpt_config(heads)?;
    let model = Gpt::new(config.clone()).map_err(|e| foreign.wrong(e.to_string()))?;
    let parameters = parameters::<Cpu<T>>(&model);
    foreign.check_names(&parameters, config.tied)?;
    let mut values = vec![T::ZERO; parameters.last().map_or(0, |p| p.range.end)];
    for parameter in &parameters {
        foreign.read(parameter, &mut values[parameter.range.clone()])?;
    }
    let place = StageRank::alone();
    let moments = Moments { names: &[], values: vec![], shard: 0..0, sharding: Sharding::Replicated };
    let state =
        StageState { parameters: &parameters, place: &place, values: &values, moments, elsewhere: &[] };
    let snapshot = Snapshot::take(0, Rank(0), &[state])?;
    let from = file.file_name().map(|n| n.to_string_lossy().into_owned());
    let (model, run) = (model_json(&config), json!({ "imported": from }));
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
        let header = Header::read(&file, found.len(), path)?;
        let beside = path.with_file_name("config.json");
        let config = match std::fs::read_to_string(&beside) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Value::Null,
            text => serde_json::from_str(&text.map_err(CheckpointError::io("read", &beside))?)
                .map_err(|e| CheckpointError::damaged(&beside, format!("it is no JSON: {e}")))?,
        };
        Ok(Self { path: path.to_path_buf(), file, header, config })
    }

    fn wrong(&self, what: impl Into<String>) -> CheckpointError {
        CheckpointError::Model { path: self.path.clone(), what: what.into() }
    }

    /// A tensor by our name.
    fn entry(&self, name: &str) -> Option<&Entry> {
        let entries = &self.header.entries;
        entries.get(name).or_else(|| entries.get(&format!("{PREFIX}{name}")))
    }

    /// Refuses what looks like GPT-2 and computes something else.
    fn check_config(&self) -> Result<(), CheckpointError> {
        let allowed = [
            ("model_type", vec![json!("gpt2")]),
            ("activation_function", vec![json!("gelu_new"), json!("gelu_pytorch_tanh")]),
            ("scale_attn_weights", vec![json!(true)]),
            ("scale_attn_by_inverse_layer_idx", vec![json!(false)]),
            ("add_cross_attention", vec![json!(false)]),
        ];
        for (key, values) in allowed {
            if let Some(found) = self.config.get(key).filter(|v| !values.contains(v)) {
                let config = self.path.with_file_name("config.json");
                let what = format!("{key} is {found}, and our GPT has {}", values[0]);
                return Err(CheckpointError::Model { path: config, what });
            }
        }
        Ok(())
    }

    fn gpt_config(&self, heads: Option<usize>) -> Result<GptConfig, CheckpointError> {
        let dims = |name: &str| match self.entry(name).map(|e| &e.shape[..]) {
            Some(&[rows, cols]) => Ok((rows as usize, cols as usize)),
            Some(other) => Err(self.wrong(format!("`{name}` has the dims {other:?}, not two"))),
            None => Err(self.wrong(format!("it is no GPT-2: it has no `{name}`"))),
        };
        let ((vocab, width), (context, _)) = (dims("wte.weight")?, dims("wpe.weight")?);
        let layers = (0..).take_while(|l| self.entry(&format!("h.{l}.ln_1.weight")).is_some()).count();
        let number = |key: &str| self.config.get(key).and_then(Value::as_f64);
        let hidden = dims("h.0.mlp.c_fc.weight")?.1;
        let sizes = [
            ("vocab_size", vocab),
            ("n_positions", context),
            ("n_embd", width),
            ("n_layer", layers),
            ("n_inner", hidden),
        ];
        for (key, found) in sizes {
            // `n_inner` is null where it is four times the width.
            if let Some(said) = number(key).filter(|said| *said != found as f64) {
                return Err(self.wrong(format!(
                    "its tensors have {key} {found}, and the config.json beside it says {said}\nhint: they are not of one model, or the file is cut short"
                )));
            }
        }
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
            let of_no_use = name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
            let known = parameters.iter().any(|p| p.name == name) || (tied && name == HEAD);
            if !known && !of_no_use {
                return Err(self.wrong(format!("`{key}` is no tensor of a GPT-2")));
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
        let dtype = match entry.dtype.as_str() {
            "F64" => DType::F64,
            "F32" => DType::F32,
            "F16" => DType::F16,
            "BF16" => DType::Bf16,
            other => return Err(self.wrong(format!("`{name}` is {other}, not F64, F32, F16 or BF16"))),
        };
        let start = self.header.range(entry).start;
        let source = Source { file: &self.file, path: &self.path, start, dtype };
        let whole = Region::whole(parameter.layout.shape());
        Reader::default().fetch(&source, &whole, &whole, values).map(|_| ())
    }
}
