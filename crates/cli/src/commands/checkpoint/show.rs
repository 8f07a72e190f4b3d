//! `crossmesh checkpoint show`: what is in a checkpoint, and whether it still is what was written.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::Result;
use crossmesh_core::layout::Layout;
use crossmesh_core::units::Bytes;
use crossmesh_train::checkpoint::{Checkpoint, CheckpointError, Manifest, TensorEntry, VALUE};
use serde::Serialize;

use super::find;
use crate::Answer;
use crate::output::{self, Format, FormatArgs, Table, count};

/// Show what a checkpoint holds, how large it is, and the layout it was saved on. Those of other systems too.
#[derive(Debug, clap::Args)]
#[command(after_help = "Exits 1 if --verify finds damage.

Examples:
  crossmesh checkpoint show runs/gpt/checkpoints
  crossmesh checkpoint show runs/gpt/checkpoints/step-00000100 --verify \\
      --format json")]
pub struct ShowArgs {
    /// A checkpoint, or a folder of ours: the newest complete one; or one of another system
    #[arg(value_name = "DIR")]
    checkpoint: PathBuf,
    /// Also check the hash of every file
    #[arg(long)]
    verify: bool,
    /// Also list every tensor
    #[arg(long)]
    tensors: bool,
    #[command(flatten)]
    format: FormatArgs,
}

/// A checkpoint as JSON.
#[derive(Debug, Serialize)]
struct Summary<'a> {
    schema: &'static str,
    path: String,
    step: u64,
    samples: u64,
    seed: u64,
    dtype: &'a str,
    /// Elements of all parameters, each once.
    parameters: u64,
    /// Of all files.
    bytes: u64,
    optimizer: &'a Option<crossmesh_train::checkpoint::OptimizerFacts>,
    model: &'a serde_json::Value,
    run: &'a serde_json::Value,
    /// The meshes it was saved on.
    meshes: BTreeSet<String>,
    files: &'a [crossmesh_train::checkpoint::FileEntry],
    tensors: Vec<TensorSummary<'a>>,
    /// Missing unless asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    verified: Option<bool>,
}

#[derive(Debug, Serialize)]
struct TensorSummary<'a> {
    name: &'a str,
    shape: &'a [u64],
    layout: &'a str,
}

#[derive(Debug, Serialize)]
struct Damage {
    schema: &'static str,
    path: String,
    verified: bool,
    damage: String,
}

pub fn run(args: &ShowArgs) -> Result<Answer> {
    if super::check::is_foreign(&args.checkpoint) {
        return super::check::show(&args.checkpoint, args.tensors, args.format.get());
    }
    let path = find(&args.checkpoint)?;
    let opened = Checkpoint::open(&path).and_then(|c| match args.verify {
        true => c.verify().map(|()| c),
        false => Ok(c),
    });
    match opened {
        Err(error @ CheckpointError::Damaged { .. }) if args.verify => {
            damaged(args, &path.display().to_string(), &error)
        }
        opened => {
            let checkpoint = opened?;
            let text = match args.format.get() {
                Format::Text => render(&checkpoint, args),
                Format::Json => output::to_json(&summary(&checkpoint, args))?,
            };
            output::print(&text)?;
            Ok(Answer::Yes)
        }
    }
}

fn damaged(args: &ShowArgs, path: &str, error: &CheckpointError) -> Result<Answer> {
    match args.format.get() {
        Format::Text => output::print(&format!("{error}\n"))?,
        Format::Json => output::print_json(&Damage {
            schema: "crossmesh.checkpoint-summary/1",
            path: path.into(),
            verified: false,
            damage: error.to_string(),
        })?,
    }
    Ok(Answer::No)
}

fn values(manifest: &Manifest) -> impl Iterator<Item = &TensorEntry> {
    manifest.tensors.iter().filter(|t| t.state == VALUE)
}

fn parameters(manifest: &Manifest) -> u64 {
    values(manifest).map(|t| t.shape.iter().product::<u64>()).sum()
}

fn bytes(manifest: &Manifest) -> u64 {
    manifest.files.iter().map(|f| f.bytes).sum()
}

/// The meshes of the layouts, as far as they can be read.
fn meshes(manifest: &Manifest) -> BTreeSet<String> {
    let layouts = manifest.tensors.iter().filter_map(|t| t.layout.parse::<Layout>().ok());
    layouts.map(|l| l.mesh().to_string()).collect()
}

fn summary<'a>(checkpoint: &'a Checkpoint, args: &ShowArgs) -> Summary<'a> {
    let (manifest, facts) = (checkpoint.manifest(), checkpoint.facts());
    let tensor = |t: &'a TensorEntry| TensorSummary { name: &t.name, shape: &t.shape, layout: &t.layout };
    Summary {
        schema: "crossmesh.checkpoint-summary/1",
        path: checkpoint.folder().display().to_string(),
        step: facts.step,
        samples: facts.samples,
        seed: facts.seed,
        dtype: &manifest.dtype,
        parameters: parameters(manifest),
        bytes: bytes(manifest),
        optimizer: &facts.optimizer,
        model: &facts.model,
        run: &facts.run,
        meshes: meshes(manifest),
        files: &manifest.files,
        tensors: values(manifest).map(tensor).collect(),
        verified: args.verify.then_some(true),
    }
}

fn render(checkpoint: &Checkpoint, args: &ShowArgs) -> String {
    let (manifest, facts) = (checkpoint.manifest(), checkpoint.facts());
    let mut table = Table::new("l");
    let mut row = |name: &str, value: String| table.row([name.to_string(), value]);
    row(
        "step",
        format!("{}, {} seen, seed {}", facts.step, count(facts.samples as usize, "sample"), facts.seed),
    );
    row("model", facts.model.to_string());
    let tensors = count(values(manifest).count(), "tensor");
    row("numbers", format!("{} parameters in {tensors}, {}", parameters(manifest), manifest.dtype));
    row(
        "optimizer",
        match &facts.optimizer {
            Some(o) => {
                format!("{}, {}, {}", o.kind, count(o.steps as usize, "step"), o.moments.join(" and "))
            }
            None => "none: training starts with new moments".into(),
        },
    );
    row("saved on", meshes(manifest).into_iter().collect::<Vec<_>>().join(", "));
    let verified = if args.verify { ", all of them as they were written" } else { "" };
    row("files", format!("{}, {}{verified}", manifest.files.len(), Bytes(bytes(manifest))));
    let mut text = format!("{}\n{}", checkpoint.folder().display(), table.render(2));
    if args.tensors {
        let mut table = Table::new("lr");
        for t in values(manifest) {
            table.row([&t.name, &t.layout]);
        }
        text += &table.render(2);
    }
    text
}
