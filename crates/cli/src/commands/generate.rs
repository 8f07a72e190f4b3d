//! `crossmesh generate`: lets a decoder of a checkpoint go on with a text.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use crossmesh_core::dtype::DType;
use crossmesh_train::checkpoint::Checkpoint;
use crossmesh_train::generate::{Generator, Sampling};
use crossmesh_train::kernels::scalar::Scalar;
use serde::Serialize;

use crate::Answer;
use crate::commands::checkpoint::find;
use crate::output::{self, Format};
use crate::training::words::Words;

/// Let a model of a checkpoint go on with a text.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "A temperature of 0 takes the most likely token always; the same seed draws the same text. Behind the model's context, the newer half of what was
said is read again, and it goes on from there.

Examples:
  crossmesh generate runs/gpt-text/checkpoints --prompt 'The '
  crossmesh generate runs/gpt-text --prompt 'The ' --tokens 200 --temperature 0.8 --top-k 40 --seed 7
  crossmesh generate runs/gpt-mini --tokenizer ids --prompt '3 1 4'"
)]
pub struct Args {
    /// A checkpoint, a folder of them, or a run's folder: the newest complete one
    #[arg(value_name = "DIR")]
    checkpoint: PathBuf,
    /// What to go on with
    #[arg(long, value_name = "TEXT", default_value = "")]
    prompt: String,
    /// How many tokens to say, unless a document ends before
    #[arg(short = 'n', long, value_name = "N", default_value_t = 100)]
    tokens: usize,
    /// How bold to be: 0 takes the most likely token, 1 draws as the model says
    #[arg(long, value_name = "NUMBER", default_value_t = 0.0)]
    temperature: f64,
    /// Draw from so many most likely tokens only
    #[arg(long, value_name = "N")]
    top_k: Option<usize>,
    /// Of what is drawn
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// `bytes`, `ids` (numbers, for data that has no text), or a Hugging Face tokenizer.json [default: what the model was trained with]
    #[arg(long, value_name = "WHICH")]
    tokenizer: Option<String>,
    /// Threads to compute with
    #[arg(long, value_name = "N", default_value_t = 1)]
    threads: usize,
    /// Text for people, or one JSON document
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,
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
    let checkpoint = Checkpoint::open(&find(&args.checkpoint)?)?;
    let generated = match checkpoint.dtype() {
        DType::F64 => generate::<f64>(args, &checkpoint)?,
        _ => generate::<f32>(args, &checkpoint)?,
    };
    match args.format {
        Format::Text => output::print(&format!("{}{}\n", generated.prompt, generated.text))?,
        Format::Json => output::print_json(&generated)?,
    }
    Ok(Answer::Yes)
}

fn generate<T: Scalar>(args: &Args, checkpoint: &Checkpoint) -> Result<Generated> {
    let mut generator = Generator::<T>::load(checkpoint, args.threads)?;
    let vocab = generator.config().vocab;
    let words = match args.tokenizer.as_deref() {
        Some(name) => Words::named(name, vocab)?,
        None => Words::of(checkpoint, vocab)?,
    };
    let (mut prompt, end) = (words.encode(&args.prompt)?, words.end());
    let prompt_ids = prompt.clone();
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
    generator.reserve(prompt.len() + args.tokens);
    let sampling = Sampling { temperature: args.temperature, top_k: args.top_k, seed: args.seed };
    let (mut ids, mut ended): (Vec<u32>, bool) = (vec![], false);
    let mut unread: Vec<i32> = prompt.iter().map(|id| *id as i32).collect();
    while ids.len() < args.tokens {
        let logits = generator.next(&unread)?;
        if let Some(bad) = logits.iter().find(|logit| !logit.is_finite()) {
            bail!(
                "{}: the model says {bad} after {} tokens: its weights are of no use\nhint: take an earlier checkpoint",
                checkpoint.folder().display(),
                prompt.len() + ids.len()
            );
        }
        let token = sampling.choose(&logits, ids.len() as u64) as u32;
        if Some(token) == end {
            ended = true;
            break;
        }
        ids.push(token);
        unread = vec![token as i32];
    }
    let text = words.decode(&prompt_ids, &ids)?;
    Ok(Generated {
        schema: "crossmesh.generated/1",
        checkpoint: checkpoint.folder().to_path_buf(),
        step: checkpoint.facts().step,
        prompt: args.prompt.clone(),
        text,
        prompt_ids,
        ids,
        ended,
    })
}
