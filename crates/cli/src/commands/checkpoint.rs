//! `crossmesh checkpoint`: what is in one, whoever wrote it, and the way to other programs and back.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use crossmesh_core::units::Bytes;
use crossmesh_train::checkpoint::{Checkpoint, Store, hf};
use serde_json::json;

use crate::Answer;
use crate::files;
use crate::output::{self, Format, FormatArgs, count};
use crate::training::words::Words;

mod check;
mod convert;
mod maps;
mod show;

pub use check::is_foreign;

/// Show, check, compare and convert checkpoints: ours, Hugging Face's, torch DCP's and Megatron's.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  crossmesh checkpoint show runs/gpt/checkpoints --verify
  crossmesh checkpoint check llama-hf
  crossmesh checkpoint convert llama-hf --to torch_dist --tp 4 --pp 2 \\
      -o llama-megatron
  crossmesh checkpoint export runs/gpt/checkpoints -o gpt2-format
  crossmesh checkpoint import gpt2/model.safetensors -o runs/tuned/checkpoints")]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    Show(show::ShowArgs),
    Check(check::CheckArgs),
    Diff(check::DiffArgs),
    Convert(convert::ConvertArgs),
    Maps(maps::MapsArgs),
    Export(ExportArgs),
    Import(ImportArgs),
}

/// Write a GPT or a Llama as one file that Hugging Face transformers loads: model.safetensors and config.json.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  crossmesh checkpoint export runs/gpt/checkpoints -o gpt2-format
  crossmesh checkpoint export runs/gpt/checkpoints/step-00000100 -o gpt2-format")]
struct ExportArgs {
    /// A checkpoint, or a folder of them: the newest complete one
    #[arg(value_name = "DIR")]
    checkpoint: PathBuf,
    /// The folder to write to
    #[arg(short, long, value_name = "OUT")]
    output: PathBuf,
    #[command(flatten)]
    format: FormatArgs,
}

/// Read a GPT-2 or a Llama as Hugging Face transformers saves it, to train on from.
#[derive(Debug, clap::Args)]
#[command(after_help = "The number of heads is in the config.json beside the file; without one, give it.

Examples:
  crossmesh checkpoint import gpt2/model.safetensors -o runs/tuned/checkpoints
  crossmesh checkpoint import weights.safetensors --heads 12 \\
      -o runs/tuned/checkpoints")]
struct ImportArgs {
    /// A safetensors file
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The folder of checkpoints to make
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// Attention heads [default: what config.json says]
    #[arg(long, value_name = "N")]
    heads: Option<usize>,
    /// What the run will compute in
    #[arg(long, value_enum, default_value_t)]
    dtype: Real,
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum Real {
    #[default]
    F32,
    F64,
}

pub fn run(args: &Args) -> Result<Answer> {
    match &args.what {
        What::Show(args) => show::run(args),
        What::Check(args) => check::check(args),
        What::Diff(args) => check::compare(args),
        What::Convert(args) => convert::run(args),
        What::Maps(args) => maps::run(args),
        What::Export(args) => export(args),
        What::Import(args) => import(args),
    }
}

/// A folder of checkpoints. What is kept is decided by those who save.
fn store(folder: &Path) -> Store {
    Store::new(folder, NonZeroUsize::MAX)
}

/// The checkpoint that a path means: itself, or the newest complete one in it, where it may also be the folder of a run.
pub fn find(path: &Path) -> Result<PathBuf> {
    if path.join(crossmesh_train::checkpoint::MANIFEST).exists() {
        return Ok(path.to_path_buf());
    }
    let there = std::fs::metadata(path).map_err(|error| files::with_path_hint(error, path));
    there.with_context(|| format!("cannot read {}", path.display()))?;
    let of_run = || store(&path.join("checkpoints")).latest();
    match store(path).latest()?.map_or_else(of_run, |found| Ok(Some(found)))? {
        Some(found) => Ok(found),
        None => bail!(
            "{}: there is no complete checkpoint here\nhint: a checkpoint is a folder with a manifest.json",
            path.display()
        ),
    }
}

/// The checkpoint that a path means, whoever wrote it: one of another system is meant itself.
pub fn find_any(path: &Path) -> Result<PathBuf> {
    if is_foreign(path) { Ok(path.to_path_buf()) } else { find(path) }
}

/// Opens a checkpoint of any format; of a folder of ours, the newest complete one. Its headers take no more memory than was allowed, and what
/// the library allows beside that; more where nothing was said.
fn open_any(path: &Path, max_memory: Option<u64>) -> Result<crossmesh_checkpoint::Catalog> {
    let ours = path.is_dir() && !check::is_foreign(path);
    let path = if ours { find(path).unwrap_or_else(|_| path.to_path_buf()) } else { path.to_path_buf() };
    std::fs::metadata(&path)
        .map_err(|error| files::with_path_hint(error, &path))
        .with_context(|| format!("cannot open {}", path.display()))?;
    Ok(match max_memory {
        Some(max_memory) => crossmesh_checkpoint::open_within(&path, max_memory)?,
        None => crossmesh_checkpoint::open(&path)?,
    })
}

fn export(args: &ExportArgs) -> Result<Answer> {
    let checkpoint = Checkpoint::open(&find(&args.checkpoint)?)?;
    // What nobody knows is left out: the file has no need of it.
    let vocab = hf::decoder_config(&checkpoint)?.vocab;
    let words = Words::of(&checkpoint, vocab).ok();
    let exported = hf::export(&checkpoint, &args.output, words.as_ref().and_then(Words::end))?;
    let tokenizer = match &words {
        Some(Words::Text { file: Some(file), .. }) => {
            let to = args.output.join("tokenizer.json");
            std::fs::copy(file, &to)
                .with_context(|| format!("cannot copy {} to {}", file.display(), to.display()))?;
            Some(to)
        }
        _ => None,
    };
    if args.format.get() == Format::Json {
        output::print_json(&json!({
            "schema": "crossmesh.export/1",
            "step": checkpoint.facts().step,
            "model": exported.model,
            "config": exported.config,
            "tokenizer": tokenizer,
            "tensors": exported.tensors,
            "bytes": exported.bytes,
            "as_imported": exported.as_imported.as_ref().map(Result::is_ok),
            "why_not_as_imported": exported.as_imported.as_ref().and_then(|r| r.as_ref().err()).map(ToString::to_string),
        }))?;
        return Ok(Answer::Yes);
    }
    let tokenizer = tokenizer.map_or(String::new(), |to| format!("; its tokenizer in {}", to.display()));
    let (bytes, tensors) = (Bytes(exported.bytes), count(exported.tensors, "tensor"));
    let (step, model, config) =
        (checkpoint.facts().step, exported.model.display(), exported.config.display());
    let like = match exported.as_imported {
        None => String::new(),
        Some(Ok(())) => "\nnames, order and types are those of the file it was imported from".into(),
        Some(Err(why)) => format!("\nit is not written as the file it was imported from: {why}"),
    };
    output::print(&format!(
        "step {step}: {tensors}, {bytes} in {model}; its sizes in {config}{tokenizer}{like}\n"
    ))?;
    Ok(Answer::Yes)
}

fn import(args: &ImportArgs) -> Result<Answer> {
    let store = store(&args.output);
    let imported = match args.dtype {
        Real::F32 => hf::import::<f32>(&args.file, args.heads, &store)?,
        Real::F64 => hf::import::<f64>(&args.file, args.heads, &store)?,
    };
    if args.format.get() == Format::Json {
        let c = &imported.config;
        output::print_json(&json!({
            "schema": "crossmesh.import/1",
            "checkpoint": imported.path,
            "tensors": imported.tensors,
            "config": {
                "vocab": c.vocab, "context": c.context, "width": c.width, "layers": c.layers,
                "heads": c.heads, "hidden": c.hidden, "tied": c.tied,
            },
        }))?;
        return Ok(Answer::Yes);
    }
    let (tensors, path, c) = (count(imported.tensors, "tensor"), imported.path.display(), &imported.config);
    let tied = if c.tied { "tied" } else { "untied" };
    output::print(&format!(
        "{path}: {tensors}\nvocab {}, context {}, width {}, {}, {}, hidden {}, {tied}\n",
        c.vocab,
        c.context,
        c.width,
        count(c.layers, "layer"),
        count(c.heads, "head"),
        c.hidden
    ))?;
    Ok(Answer::Yes)
}
