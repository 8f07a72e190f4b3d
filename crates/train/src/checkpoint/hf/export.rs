//! Writing `model.safetensors` and `config.json`, one tensor in memory at a time.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use crossmesh_checkpoint::Element;
use crossmesh_checkpoint::model::config_of;
use crossmesh_checkpoint::safetensors::{Entry, Header, header_bytes};
use crossmesh_core::dtype::DType;
use serde_json::Value;

use super::super::error::CheckpointError;
use super::super::load::Checkpoint;
use super::super::state::Convert;
use super::super::store::write_synced;
use super::super::write::sync_folder;
use super::{HEAD, HEADER, LLAMA_TABLE, PREFIX, decoder_config, foreign, model_json};
use crate::chain::parameters;
use crate::kernels::cpu::Cpu;
use crate::kernels::scalar::Scalar;
use crate::models::gpt::{Gpt, Residual};
use crate::parameter::Parameter;

/// What was written.
#[derive(Debug, Clone, PartialEq)]
pub struct Exported {
    pub model: PathBuf,
    pub config: PathBuf,
    pub tensors: usize,
    pub bytes: u64,
    /// Whether the file is written as the one was that the model was imported from: the same header, order and types. Where not, why not;
    /// nothing where it was not imported.
    pub as_imported: Option<Result<(), String>>,
}

/// Writes a checkpoint of a decoder into a folder, as transformers' `GPT2LMHeadModel` or `LlamaForCausalLM` loads it. Numbers stay as wide as they
/// are; a model that was imported, and not trained since, becomes the file that it came from, byte by byte, where its numbers are as wide as those were. `end` is the token that ends a document, where that is known.
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
    if config.residual != Residual::Serial {
        return Err(wrong(format!(
            "its branches are on a ladder (model.residual = \"{}\"), and transformers' GPT-2 and Llama would compute something else from its weights\nhint: `crossmesh generate` talks with it as it is; only a model of residual = \"serial\" can be exported",
            config.residual.name()
        )));
    }
    let model = Gpt::new(config.clone()).map_err(|e| wrong(e.to_string()))?;
    let parameters = parameters::<Cpu<T>>(&model);
    checkpoint.verify()?;
    fs::create_dir_all(folder).map_err(CheckpointError::io("create", folder))?;
    let path = folder.join("model.safetensors");
    let beside = folder.join(".model.safetensors.partial");
    let imported = checkpoint.facts().run.get(HEADER).and_then(Value::as_str);
    let kept = imported.map(|text| as_imported::<T>(text, &parameters));
    let (header, tensors) = match &kept {
        Some(Ok(kept)) => kept.clone(),
        _ => as_ours::<T>(&parameters),
    };
    let bytes = write_tensors::<T>(checkpoint, &header, &tensors, &beside).inspect_err(|_| {
        // Half a file is of no use, and may be what fills the disk.
        let _ = fs::remove_file(&beside);
    })?;
    fs::rename(&beside, &path).map_err(CheckpointError::io("rename", &beside))?;
    let config_path = folder.join("config.json");
    let text = serde_json::to_string_pretty(&config_of(&model_json(&config), Element::Of(T::DTYPE), end))
        .expect("a document")
        + "\n";
    write_synced(&config_path, text.as_bytes())?;
    sync_folder(folder)?;
    let (tensors, as_imported) = (tensors.len(), kept.map(|kept| kept.map(drop)));
    Ok(Exported { model: path, config: config_path, tensors, bytes, as_imported })
}

/// A tensor to be written: which one, and in what type.
type Tensor<'a> = (&'a Parameter, Element);

/// A header, and the tensors in the order of their bytes, as we write them.
fn as_ours<T: Scalar>(parameters: &[Parameter]) -> (Vec<u8>, Vec<Tensor<'_>>) {
    let element = Element::Of(T::DTYPE);
    let entries = parameters.iter().map(|p| {
        let (name, shape) = foreign(p);
        (name, element, shape)
    });
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    (header_bytes(&metadata, entries), parameters.iter().map(|p| (p, element)).collect())
}

/// The same as the file was that the model came from; or why it cannot be.
fn as_imported<'a, T: Scalar>(
    text: &str,
    parameters: &'a [Parameter],
) -> Result<(Vec<u8>, Vec<Tensor<'a>>), String> {
    let header = Header::parse(text.as_bytes())?;
    let tensor = |(key, entry): (&String, &Entry)| {
        let name = key.strip_prefix(PREFIX).unwrap_or(key);
        let named = |name: &str| parameters.iter().find(|p| p.name == name);
        // A head that is the table of tokens again.
        let tied = || [LLAMA_TABLE, "wte.weight"].into_iter().find_map(named).filter(|_| name == HEAD);
        let parameter =
            named(name).or_else(tied).ok_or_else(|| format!("`{key}` is no weight and was not kept"))?;
        let element = entry.element;
        if !element.is_real() {
            return Err(format!("`{key}` is {element}"));
        }
        if !element.widens_to(Element::Of(T::DTYPE)) {
            return Err(format!("`{key}` was {element}, and is kept as {}", T::DTYPE));
        }
        let (_, shape) = foreign(parameter);
        if shape != entry.shape {
            return Err(format!("`{key}` was {:?}, and is {shape:?}", entry.shape));
        }
        Ok((parameter, element))
    };
    let tensors: Vec<_> = header.in_order().into_iter().map(tensor).collect::<Result<_, _>>()?;
    match parameters.iter().find(|p| !tensors.iter().any(|(known, _)| known.name == p.name)) {
        Some(p) => Err(format!("it had no `{}`", p.name)),
        None => Ok(([&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat(), tensors)),
    }
}

fn write_tensors<T: Scalar>(
    checkpoint: &Checkpoint,
    header: &[u8],
    tensors: &[Tensor<'_>],
    path: &Path,
) -> Result<u64, CheckpointError> {
    let io = |error| CheckpointError::io("write", path)(error);
    let mut file = File::create(path).map_err(CheckpointError::io("create", path))?;
    file.write_all(header).map_err(io)?;
    let mut bytes = header.len() as u64;
    for (parameter, element) in tensors {
        let values = checkpoint.whole::<T>(&parameter.name, parameter.layout.shape(), Convert::No)?;
        let written = encoded(*element, &values);
        file.write_all(&written).map_err(io)?;
        bytes += written.len() as u64;
    }
    file.sync_all().map_err(io)?;
    Ok(bytes)
}

/// Little-endian numbers; the same bits where the type is the same.
fn encoded<T: Scalar>(element: Element, values: &[T]) -> Cow<'_, [u8]> {
    fn each<T: Scalar, const N: usize>(values: &[T], bytes: impl Fn(f64) -> [u8; N]) -> Cow<'_, [u8]> {
        Cow::Owned(values.iter().flat_map(|x| bytes(x.to_f64())).collect())
    }
    match element {
        same if same == Element::Of(T::DTYPE) => Cow::Borrowed(bytemuck::cast_slice(values)),
        Element::F64 => each(values, f64::to_le_bytes),
        Element::F32 => each(values, |x| (x as f32).to_le_bytes()),
        Element::F16 => each(values, |x| half::f16::from_f64(x).to_le_bytes()),
        Element::BF16 => each(values, |x| half::bf16::from_f64(x).to_le_bytes()),
        other => unreachable!("{other} is no real number"),
    }
}
