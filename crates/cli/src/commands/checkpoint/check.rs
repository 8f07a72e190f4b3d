//! `crossmesh checkpoint check` and `diff`, and what `show` says of other systems' checkpoints.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Result;
use crossmesh_checkpoint::{Catalog, NameMap, Naming, Problem, RunOptions, diff, open};
use crossmesh_core::printable::printable;
use crossmesh_core::units::{Bytes, parse_bytes};
use serde::Serialize;

use crate::Answer;
use crate::output::{self, Format, FormatArgs, Table, count};

/// Say what is wrong with a checkpoint of any format: missing files, boxes that overlap, holes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Reads headers only; what a pickle would run is named, and not run. Exits 1 if
something is wrong; what cannot be known is said, and is no fault.

Examples:
  crossmesh checkpoint check llama-hf
  crossmesh checkpoint check run/iter_0000100 --format json")]
pub struct CheckArgs {
    /// A checkpoint: hf, dcp, dcp-hf, torch_dist or ours, told by its content
    #[arg(value_name = "DIR")]
    checkpoint: PathBuf,
    /// Name every problem, not the first ten of a kind
    #[arg(long)]
    all: bool,
    /// For headers, and 256 MiB beside it [default: 4GiB]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    max_memory: Option<u64>,
    #[command(flatten)]
    format: FormatArgs,
}

/// So many problems of a kind are named one by one: a lost file of a large model makes thousands of holes.
const NAMED: usize = 10;

#[derive(Debug, Serialize)]
struct Checked {
    schema: &'static str,
    path: String,
    kind: &'static str,
    tensors: usize,
    bytes: u64,
    good: bool,
    problems: Vec<ProblemDoc>,
}

#[derive(Debug, Serialize)]
struct ProblemDoc {
    kind: &'static str,
    warning: bool,
    what: String,
}

pub fn check(args: &CheckArgs) -> Result<Answer> {
    let catalog = super::open_any(&args.checkpoint, args.max_memory)?;
    let problems = catalog.check();
    let good = problems.iter().all(|p| p.kind.is_warning());
    match args.format.get() {
        Format::Json => output::print_json(&Checked {
            schema: "crossmesh.checkpoint-check/1",
            path: catalog.folder.display().to_string(),
            kind: catalog.format.name(),
            tensors: catalog.tensors.len(),
            bytes: catalog.bytes(),
            good,
            problems: problems
                .iter()
                .map(|p| ProblemDoc {
                    kind: p.kind.name(),
                    warning: p.kind.is_warning(),
                    what: p.what.clone(),
                })
                .collect(),
        })?,
        Format::Text => {
            let mut text = named(&problems, if args.all { usize::MAX } else { NAMED });
            let tensors = count(catalog.tensors.len(), "tensor");
            let answer = if good { "every element is there, once" } else { "it cannot be used as it is" };
            text += &format!(
                "{}: {}, {tensors}, {}: {answer}\n",
                catalog.folder.display(),
                catalog.format,
                Bytes(catalog.bytes())
            );
            output::print(&text)?;
        }
    }
    Ok(if good { Answer::Yes } else { Answer::No })
}

/// The first problems of every kind, a line each, and how many more there are.
fn named(problems: &[Problem], most: usize) -> String {
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    let mut text = String::new();
    for problem in problems {
        let of_kind = seen.entry(problem.kind.name()).or_default();
        *of_kind += 1;
        if *of_kind <= most {
            text += &printable(&format!("{problem}\n"));
        }
    }
    for (kind, found) in seen.into_iter().filter(|(_, found)| *found > most) {
        text += &format!("{kind}: {} more; --all names them\n", found - most);
    }
    text
}

/// Compare two checkpoints of any formats: names, shapes, types and every number, bit by bit.
#[derive(Debug, clap::Args)]
#[command(after_help = "Exits 1 if they differ.

Examples:
  crossmesh checkpoint diff llama-hf llama-dcp
  crossmesh checkpoint diff llama-hf llama-megatron --names llama")]
pub struct DiffArgs {
    /// A checkpoint
    #[arg(value_name = "ONE")]
    one: PathBuf,
    /// Another
    #[arg(value_name = "TWO")]
    two: PathBuf,
    /// Compare under Hugging Face's names: a map, by family or file
    #[arg(long, value_name = "MAP")]
    names: Option<String>,
    /// Of all buffers together [default: 1GiB]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    max_memory: Option<u64>,
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, Serialize)]
struct Compared {
    schema: &'static str,
    same: bool,
    differences: Vec<String>,
}

pub fn compare(args: &DiffArgs) -> Result<Answer> {
    let open = |path| super::open_any(path, args.max_memory);
    let mut sides = [open(&args.one)?, open(&args.two)?];
    if let Some(name) = &args.names {
        let map = NameMap::find(name)?;
        // One of them may have no config.json; both are of one model.
        let config = sides.iter().find_map(|side| side.config.clone());
        for side in &mut sides {
            side.config = side.config.take().or_else(|| config.clone());
            let naming = Naming { to: "hf".into(), ..Naming::default() };
            *side = map.apply(side, &naming)?.catalog;
        }
    }
    let options = RunOptions::default();
    let max_memory = args.max_memory.unwrap_or(options.max_memory);
    let found = diff::diff(&sides[0], &sides[1], max_memory, options.threads)?;
    let same = found.is_empty();
    match args.format.get() {
        Format::Json => output::print_json(&Compared {
            schema: "crossmesh.checkpoint-diff/1",
            same,
            differences: found.iter().map(ToString::to_string).collect(),
        })?,
        Format::Text => {
            let mut text: String = found.iter().map(|d| printable(&format!("{d}\n"))).collect();
            let tensors = count(sides[0].tensors.len(), "tensor");
            text += &match same {
                true => format!("the same: {tensors}, {}\n", Bytes(sides[0].bytes())),
                false => format!("{} of {tensors} differ\n", found.len()),
            };
            output::print(&text)?;
        }
    }
    Ok(if same { Answer::Yes } else { Answer::No })
}

#[derive(Debug, Serialize)]
struct Summary<'a> {
    schema: &'static str,
    path: String,
    kind: &'static str,
    bytes: u64,
    files: Vec<&'a str>,
    objects: usize,
    tensors: Vec<TensorDoc<'a>>,
}

#[derive(Debug, Serialize)]
struct TensorDoc<'a> {
    name: &'a str,
    dtype: &'static str,
    shape: &'a [u64],
    boxes: usize,
}

/// Whether a path holds a checkpoint that is not ours.
pub fn is_foreign(path: &Path) -> bool {
    let has = |name: &str| path.join(name).exists();
    let safetensors = || {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        entries.into_iter().any(|e| e.path().extension().is_some_and(|x| x == "safetensors"))
    };
    path.is_file()
        || (!crossmesh_checkpoint::is_ours(path)
            && (has(".metadata") || has("latest_checkpointed_iteration.txt") || safetensors()))
}

/// What `show` says of them.
pub fn show(path: &Path, tensors: bool, format: Format) -> Result<Answer> {
    let catalog = open(path)?;
    match format {
        Format::Text => output::print(&render(&catalog, tensors))?,
        Format::Json => output::print_json(&Summary {
            schema: "crossmesh.checkpoint-catalog/1",
            path: catalog.folder.display().to_string(),
            kind: catalog.format.name(),
            bytes: catalog.bytes(),
            files: catalog.files.iter().map(|f| f.name.as_str()).collect(),
            objects: catalog.objects.len(),
            tensors: catalog
                .tensors
                .iter()
                .map(|(name, t)| TensorDoc {
                    name,
                    dtype: t.element.name(),
                    shape: &t.shape,
                    boxes: t.boxes.len(),
                })
                .collect(),
        })?,
    }
    Ok(Answer::Yes)
}

fn render(catalog: &Catalog, tensors: bool) -> String {
    let mut table = Table::new("l");
    let mut row = |name: &str, value: String| table.row([name.to_string(), value]);
    row("format", catalog.format.to_string());
    let boxes: usize = catalog.tensors.values().map(|t| t.boxes.len()).sum();
    let parameters: u64 = catalog.tensors.values().map(|t| t.volume()).sum();
    row("tensors", format!("{}, {parameters} numbers in {boxes} boxes", catalog.tensors.len()));
    if !catalog.objects.is_empty() {
        row("objects", format!("{}, pickled", catalog.objects.len()));
    }
    let mut elements: Vec<&str> = catalog.tensors.values().map(|t| t.element.name()).collect();
    elements.sort_unstable();
    elements.dedup();
    row("numbers", elements.join(", "));
    row("files", format!("{}, {} of tensors", catalog.files.len(), Bytes(catalog.bytes())));
    if let Some(model) = catalog.config.as_ref().and_then(|c| c.get("model_type")).and_then(|t| t.as_str()) {
        row("model", model.to_string());
    }
    let mut text = format!("{}\n{}", catalog.folder.display(), table.render(2));
    if tensors {
        let mut table = Table::new("lrr");
        for (name, t) in &catalog.tensors {
            let shape = t.shape.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
            table.row([
                name.clone(),
                format!("{}[{shape}]", t.element),
                format!("{} box{}", t.boxes.len(), if t.boxes.len() == 1 { "" } else { "es" }),
            ]);
        }
        text += &table.render(2);
    }
    text
}
