//! `crossmesh generate`: lets a decoder of a checkpoint go on with a text.

use std::path::PathBuf;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use crossmesh_comm::protect::Protect;
use crossmesh_train::checkpoint::{Checkpoint, hf};
use crossmesh_train::generate::Crew;
use crossmesh_train::kernels::cpu::{HostBuf, MOST_THREADS};
use crossmesh_train::models::gpt::Gpt;
use serde::Serialize;

use crate::Answer;
use crate::commands::checkpoint::find;
use crate::commands::run::protection;
use crate::memory::Memory;
use crate::output::{self, Format, FormatArgs, Progress};
use crate::runner::{RunOptions, Work, run_work};
use crate::talk::{self, SCHEMA, Talk, TalkDoc, Talked};
use crate::task::Task;
use crate::training::words::Words;

/// How long nothing may move: reading a long prompt takes its time.
const DEADLINE: Duration = Duration::from_secs(120);
/// How long the processes may take to meet.
const ARRIVE: Duration = Duration::from_secs(30);

/// Generate text with a model from a checkpoint.
#[derive(Debug, clap::Args)]
#[command(after_help = "A temperature of 0 always takes the most likely token; the same seed samples the
same text. Where the model's context is full, the newer half of the text is read
again, and generation goes on from there.

Examples:
  crossmesh generate runs/gpt-text/checkpoints --prompt 'The '
  crossmesh generate runs/gpt-text --prompt 'The ' --tokens 200 \\
      --temperature 0.8 --top-k 40 --seed 7
  crossmesh generate runs/gpt-mini --tokenizer ids --prompt '3 1 4'
  # four processes here
  crossmesh generate runs/llama --prompt 'The ' --tp 2 --stages 2
  crossmesh launch -n 4 -- crossmesh generate runs/llama --prompt 'The ' \\
      --tp 2 --stages 2")]
pub struct Args {
    /// A checkpoint, a folder of them, or a run's folder: the newest complete one
    #[arg(value_name = "DIR")]
    checkpoint: PathBuf,
    /// The text to continue
    #[arg(long, value_name = "TEXT", default_value = "")]
    prompt: String,
    /// Tokens to generate, unless a document ends before
    #[arg(short = 'n', long, value_name = "N", default_value_t = 100)]
    tokens: usize,
    /// 0 takes the most likely token, 1 samples from the distribution of the model
    #[arg(long, value_name = "NUMBER", default_value_t = 0.0)]
    temperature: f64,
    /// Sample from so many most likely tokens only
    #[arg(long, value_name = "N")]
    top_k: Option<usize>,
    /// Of the sampling
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// `bytes`, `ids` (numbers, for data that has no text), or a Hugging Face tokenizer.json [default: what the model was trained with]
    #[arg(long, value_name = "WHICH")]
    tokenizer: Option<String>,
    /// Threads to compute with
    #[arg(long, value_name = "N", default_value_t = 1)]
    threads: usize,
    /// Ranks that split heads, columns and vocabulary, each a process; up to the heads of keys and values, or a multiple of them
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Running")]
    tp: usize,
    /// Stages that split the layers; with --tp N, each has N ranks
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Running")]
    stages: usize,
    /// Start the processes here, even where torchrun, Slurm or mpirun started this one as a rank of a job
    #[arg(long, help_heading = "Running")]
    standalone: bool,
    /// What to do to frames between hosts: `none`, `sign` or `encrypt`; the same on all ranks [default: what CROSSMESH_PROTECT says, or none]
    #[arg(long, value_name = "WAY", help_heading = "Running")]
    protect: Option<Protect>,
    #[command(flatten)]
    format: FormatArgs,
}

/// What was said, as JSON.
#[derive(Debug, Serialize)]
struct Generated {
    schema: &'static str,
    checkpoint: PathBuf,
    step: u64,
    prompt: String,
    /// Behind the prompt.
    text: String,
    prompt_ids: Vec<u32>,
    ids: Vec<u32>,
    /// Whether a document ended.
    ended: bool,
    /// From the prompt to the last of them.
    seconds: f64,
    /// Of a rank's cache of keys and values; the first one's.
    cache_elements: usize,
}

pub fn run(args: &Args) -> Result<Answer> {
    if !args.temperature.is_finite() || args.temperature < 0.0 {
        bail!(
            "--temperature {}: it is no number from 0 on\nhint: 0 is greedy, 0.8 is usual",
            args.temperature
        );
    }
    if args.top_k == Some(0) {
        bail!("--top-k 0: there would be nothing to draw from\nhint: use 1 or more, or leave it out");
    }
    if args.threads == 0 {
        bail!("--threads 0: nobody would compute\nhint: use 1 or more");
    }
    if args.threads > MOST_THREADS {
        bail!(
            "--threads {}: these are more than any machine has cores\nhint: use {MOST_THREADS} at most",
            args.threads
        );
    }
    let checkpoint = Checkpoint::open(&find(&args.checkpoint)?)?;
    let model = Gpt::new(hf::decoder_config(&checkpoint)?)?;
    Crew::<HostBuf<f32>>::check(&model, args.tp, args.stages)
        .map_err(|error| anyhow!("--tp {} --stages {}: {error}", args.tp, args.stages))?;
    let vocab = model.config().vocab;
    let words = match args.tokenizer.as_deref() {
        Some(name) => Words::named(name, vocab)?,
        None => Words::of(&checkpoint, vocab)?,
    };
    let prompt_ids = words.encode(&args.prompt)?;
    let doc = ask(args, &checkpoint, &words, &prompt_ids, vocab)?;
    let Some(talked) = talk(args, doc)? else { return Ok(Answer::Yes) };
    let text = words.decode(&prompt_ids, &talked.ids)?;
    let generated = Generated {
        schema: "crossmesh.generated/1",
        checkpoint: checkpoint.folder().to_path_buf(),
        step: checkpoint.facts().step,
        prompt: args.prompt.clone(),
        text,
        prompt_ids,
        ids: talked.ids,
        ended: talked.ended,
        seconds: talked.seconds,
        cache_elements: talked.cache_elements,
    };
    match args.format.get() {
        Format::Text => output::print(&format!("{}{}\n", generated.prompt, generated.text))?,
        Format::Json => output::print_json(&generated)?,
    }
    Ok(Answer::Yes)
}

/// What the ranks are told.
fn ask(
    args: &Args,
    checkpoint: &Checkpoint,
    words: &Words,
    prompt_ids: &[u32],
    vocab: usize,
) -> Result<TalkDoc> {
    let (mut prompt, end) = (prompt_ids.to_vec(), words.end());
    if prompt.is_empty() {
        // What stands between two documents stands before the first.
        prompt.push(end.with_context(|| {
            "there is nothing to go on with, and no token that ends a document\nhint: give some: --prompt TEXT".to_string()
        })?);
    }
    if let Some(id) = prompt.iter().find(|id| **id as usize >= vocab) {
        bail!(
            "token {id} of the prompt is outside of the model's vocabulary of {vocab}\nhint: was it trained with another tokenizer?"
        );
    }
    let folder = checkpoint.folder();
    let checkpoint = folder.canonicalize().with_context(|| format!("cannot find {}", folder.display()))?;
    let Args { tokens, temperature, top_k, seed, threads, tp, stages, .. } = *args;
    let schema = SCHEMA.to_string();
    Ok(TalkDoc { schema, checkpoint, tp, stages, prompt, tokens, end, temperature, top_k, seed, threads })
}

/// What was said; nothing where another rank tells.
fn talk(args: &Args, doc: TalkDoc) -> Result<Option<Talked>> {
    if doc.tp * doc.stages == 1 {
        return Ok(Some(talk::alone(&doc)?));
    }
    let said = Arc::new(Mutex::new(None));
    let hear = Arc::clone(&said);
    let on_talked = move |talked| *hear.lock().unwrap_or_else(PoisonError::into_inner) = Some(talked);
    let talk = Talk::new(doc, Arc::new(on_talked));
    let work = Work {
        task: &Task::of_talk(&talk),
        document: talk.document(),
        cluster: &talk.cluster,
        topology: &talk.topology,
        predicted_s: 0.0,
    };
    let options = RunOptions {
        emulate: false,
        repeat: 1,
        deadline: Some(DEADLINE),
        arrive: ARRIVE,
        flight: None,
        trace: false,
        standalone: args.standalone,
        protect: protection(args.protect)?,
        spare_ranks: false,
        memory: Memory::default(),
        share_gpus: false,
    };
    run_work(&work, &options, &Progress::new())?;
    let talked = said.lock().unwrap_or_else(PoisonError::into_inner).take();
    Ok(talked)
}
