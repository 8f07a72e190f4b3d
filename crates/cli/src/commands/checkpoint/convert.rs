//! `crossmesh checkpoint convert`: any checkpoint to any format and parallelism.

use std::path::PathBuf;

use anyhow::Result;
use crossmesh_checkpoint::{Element, Format as Kind, Limits, Planned, Report, Request, RunOptions};
use crossmesh_comm::launch::asked_to_end;
use crossmesh_core::printable::printable;
use crossmesh_core::units::{Bytes, parse_bytes};
use serde::Serialize;

use crate::Answer;
use crate::output::{self, Format, FormatArgs, Progress, count};

/// Write a checkpoint in another format, for another parallelism, or both.
#[derive(Debug, clap::Args)]
#[command(after_help = "Streams: memory stays under --max-memory whatever the model's size. The output
is complete or not there; after a kill or Ctrl-C the same command goes on
where it stopped.

Examples:
  crossmesh checkpoint convert llama-hf --to torch_dist --tp 4 --pp 2 \\
      -o llama-megatron
  crossmesh checkpoint convert run/iter_0000100 --to hf --config config.json \\
      -o out-hf
  crossmesh checkpoint convert fsdp-dcp --to hf --dtype bf16 \\
      --leave-out 'optim*' -o out-hf
  crossmesh checkpoint convert fsdp-dcp --to crossmesh -o mine &&
      crossmesh train my.toml --resume mine
  crossmesh checkpoint convert moe-hf --to torch_dist --tp 2 --pp 2 --ep 8 \\
      --explain")]
pub struct ConvertArgs {
    /// A checkpoint: hf, dcp, dcp-hf, torch_dist or ours, told by its content
    #[arg(value_name = "DIR")]
    checkpoint: PathBuf,
    /// The format to write: hf, dcp, dcp-hf, torch_dist or crossmesh, which is ours
    #[arg(long, value_name = "FORMAT")]
    to: Kind,
    /// The folder to make
    #[arg(short, long, value_name = "OUT", required_unless_present = "explain")]
    output: Option<PathBuf>,
    #[command(flatten)]
    names: NameArgs,
    /// Ranks that split tensors
    #[arg(long, value_name = "N", help_heading = "Parallelism")]
    tp: Option<u32>,
    /// Stages that split layers
    #[arg(long, value_name = "N", help_heading = "Parallelism")]
    pp: Option<u32>,
    /// Ranks that split experts
    #[arg(long, value_name = "N", help_heading = "Parallelism")]
    ep: Option<u32>,
    /// Ranks that split the first dim of every tensor, as FSDP does
    #[arg(long, value_name = "N", help_heading = "Parallelism")]
    ranks: Option<u32>,
    /// Round real numbers to f64, f32, bf16 or f16
    #[arg(long, value_name = "TYPE", value_parser = element)]
    dtype: Option<Element>,
    /// Of a Hugging Face file at most
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "5GB")]
    shard_size: u64,
    /// Tensors to leave behind, with `*`; may be repeated
    #[arg(long, value_name = "PATTERN")]
    leave_out: Vec<String>,
    /// Of all buffers together [default: 1GiB]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    max_memory: Option<u64>,
    /// Print which bytes come from where, and write nothing
    #[arg(long)]
    explain: bool,
    #[command(flatten)]
    format: FormatArgs,
}

/// How names change.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Names")]
struct NameArgs {
    /// A map of names: llama, qwen3, qwen3_moe, mixtral, gpt2, or a .toml file [default: by config.json's model_type, where names change]
    #[arg(long, value_name = "MAP")]
    names: Option<String>,
    /// The side of the map that the checkpoint has [default: told by its names]
    #[arg(long, value_name = "SIDE")]
    from_names: Option<String>,
    /// The side of the map to write [default: megatron for torch_dist, crossmesh for ours, hf for the others]
    #[arg(long, value_name = "SIDE")]
    to_names: Option<String>,
    /// Which of several names is written: `local` for Megatron's layers without Transformer Engine, `unfused` for norms on their own
    #[arg(long, value_name = "SPELLING")]
    spelling: Option<String>,
    /// The model's config.json, where the checkpoint has none; it goes along, to `hf` with the tokenizer beside it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

fn element(text: &str) -> Result<Element, String> {
    text.parse().map_err(|()| "no type of numbers; f64, f32, bf16 or f16".to_string())
}

#[derive(Debug, Serialize)]
struct Done<'a> {
    schema: &'static str,
    output: String,
    tensors: usize,
    files: usize,
    bytes_read: u64,
    bytes_written: u64,
    /// Of what was written, for the hashes that a manifest of ours has.
    bytes_read_again: u64,
    /// What an earlier, stopped conversion had written already.
    bytes_kept: u64,
    left_out: &'a [String],
    map: &'a Option<String>,
}

pub fn run(args: &ConvertArgs) -> Result<Answer> {
    let planned = request(args).plan(super::open_any(&args.checkpoint, args.max_memory)?)?;
    let mut options = RunOptions::default();
    options.max_memory = args.max_memory.unwrap_or(options.max_memory);
    if args.explain {
        let limits = Limits::new(options.max_memory, options.threads)?;
        let explanation = planned.explain(limits);
        match args.format.get() {
            Format::Text => output::print(&printable(&explanation.to_string()))?,
            Format::Json => output::print_json(&explanation)?,
        }
        return Ok(Answer::Yes);
    }
    let Some(to) = &args.output else { unreachable!("clap asks for it") };
    let progress = Progress::new();
    let say = |p: crossmesh_checkpoint::Progress| {
        progress.say(&format!("{} of {}", Bytes(p.bytes_done), Bytes(p.bytes)));
    };
    let shown: Option<&(dyn Fn(crossmesh_checkpoint::Progress) + Sync)> =
        if progress.is_shown() { Some(&say) } else { None };
    let stop = asked_to_end()?;
    let report = planned.conversion.run(to, &RunOptions { progress: shown, stop: Some(&stop), ..options })?;
    match args.format.get() {
        Format::Text => output::print(&printable(&text(args, &planned, &report)))?,
        Format::Json => output::print_json(&Done {
            schema: "crossmesh.checkpoint-convert/1",
            output: to.display().to_string(),
            tensors: report.tensors,
            files: report.files,
            bytes_read: report.bytes_read,
            bytes_written: report.bytes_written,
            bytes_read_again: report.bytes_read_again,
            bytes_kept: report.bytes_kept,
            left_out: &planned.left_out,
            map: &planned.map,
        })?,
    }
    Ok(Answer::Yes)
}

fn request(args: &ConvertArgs) -> Request {
    Request {
        format: args.to,
        names: args.names.names.clone(),
        from_names: args.names.from_names.clone(),
        to_names: args.names.to_names.clone(),
        spelling: args.names.spelling.clone(),
        tp: args.tp,
        pp: args.pp,
        ep: args.ep,
        ranks: args.ranks,
        element: args.dtype,
        shard_bytes: args.shard_size,
        leave_out: args.leave_out.clone(),
        config: args.names.config.clone(),
    }
}

fn text(args: &ConvertArgs, planned: &Planned, report: &Report) -> String {
    let to = args.output.as_ref().map_or(String::new(), |p| p.display().to_string());
    let mut text = String::new();
    if !planned.left_out.is_empty() {
        let shown: Vec<&str> = planned.left_out.iter().take(4).map(String::as_str).collect();
        let more = match planned.left_out.len() - shown.len() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        text += &format!("left out, for {} has no place for them: {}{more}\n", args.to, shown.join(", "));
    }
    if report.bytes_kept > 0 {
        text += &format!("{} had been written before\n", Bytes(report.bytes_kept));
    }
    let (tensors, files) = (count(report.tensors, "tensor"), count(report.files, "file"));
    text += &format!(
        "{to}: {tensors} as {}, {} read, {} written in {files}\n",
        args.to,
        Bytes(report.bytes_read),
        Bytes(report.bytes_written)
    );
    text
}
