//! How long a training step of a GPT or a Llama takes on one rank, and what it computes.
//!
//! ```text
//! cargo run --release -p crossmesh-train --example gpt_step -- [--threads 2] [--vocab 8192] [--context 256] [--width 512]
//!     [--layers 8] [--heads 8] [--samples 8] [--llama] [--kv-heads 2] [--hidden 1376] [--dtype f32|bf16]
//!     [--steps N | --serve] [--weights FILE]
//! ```
//!
//! A step is: forward, B, W, clipping to norm 1, AdamW. `--steps` runs that many and prints a line each. `--serve` reads a number of steps from
//! each line of its input and answers with their seconds and losses as JSON, so that another program can be measured in turns
//! with it (bench/peers/gpt_side_by_side.py). `--weights` writes the initial weights, for that program to start from the same.
#![allow(clippy::print_stdout, clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::sync::Arc;
use std::time::Instant;

use crossmesh_train::chain::{Chain, Setup};
use crossmesh_train::deal::{Runs, Share};
use crossmesh_train::group::Alone;
use crossmesh_train::kernels::cpu::{Cpu, CpuBf16};
use crossmesh_train::kernels::{Buffer as _, Kernels};
use crossmesh_train::models::gpt::{Gpt, GptConfig};
use crossmesh_train::optim::{Optimizer, OptimizerConfig, StepNumbers, clip_scale, norm_piece};
use crossmesh_train::parameter::initial;
use crossmesh_train::stage::{Microbatch, MicrobatchId, Stage, Value};
use crossmesh_train::stage_rank::StageRank;

struct Trainer<K: Kernels> {
    config: GptConfig,
    samples: usize,
    kernels: Arc<K>,
    chain: Chain<K>,
    params: K::Buf,
    grads: K::Buf,
    optimizer: Optimizer<K::Buf>,
    step: u64,
}

impl<K: Kernels<Real = f32>> Trainer<K> {
    fn new(kernels: K, config: GptConfig, samples: usize) -> Self {
        let kernels = Arc::new(kernels);
        let model = Gpt::new(config.clone()).expect("a model");
        let setup = Setup::alone(samples, 1);
        let units = 0..config.layers + 2;
        let chain = Chain::new(&model, units, Arc::clone(&kernels), Arc::new(Alone), setup).expect("a stage");
        let weights: Vec<f32> = initial(chain.parameters(), &[0, 0], 1);
        let (params, grads) = (kernels.upload(&weights), kernels.wide(weights.len()));
        let share = Share::whole(weights.len());
        let mut optimizer = Optimizer::new(&*kernels, OptimizerConfig::ADAMW, chain.parameters(), share);
        if let Some(masters) = optimizer.masters_mut() {
            kernels.put_reals(&weights, masters.into());
        }
        Self { config, samples, kernels, chain, params, grads, optimizer, step: 0 }
    }

    /// Numbers that another program can make too.
    fn ids(&self, shift: u64) -> Value<K::Buf> {
        let vocab = self.config.vocab as u64;
        let token = |s: u64, t: u64| (s * 7919 + (t + shift) * 104_729 + self.step * 15_485_863) % vocab;
        let (samples, context) = (self.samples as u64, self.config.context as u64);
        let ids = (0..samples).flat_map(|s| (0..context).map(move |t| token(s, t) as i32));
        Value::Ids(ids.collect())
    }

    /// One step: its loss, and the seconds of its parts.
    fn step(&mut self) -> (f64, BTreeMap<&'static str, f64>) {
        let id = MicrobatchId(0);
        let batch_samples = self.samples as u64;
        let microbatch = Microbatch { id, step: self.step, first_sample: 0, batch_samples };
        let inputs = vec![self.ids(0), self.ids(1)];
        let mut seconds = BTreeMap::new();
        let mut last = Instant::now();
        let mut lap = |name| {
            let now = Instant::now();
            seconds.insert(name, now.duration_since(last).as_secs_f64());
            last = now;
        };
        let outputs = self.chain.forward(microbatch, &mut &self.params, inputs).expect("forward");
        lap("forward");
        self.chain.backward_input(id, &mut &self.params, vec![]).expect("B");
        lap("B");
        let len = self.grads.len();
        self.kernels.fill(0.0, (&mut self.grads).into(), len);
        self.chain.backward_weight(id, &mut &mut self.grads).expect("W");
        lap("W");
        let (alone, all) = (StageRank::alone(), Runs::whole(len));
        let norm =
            norm_piece(&*self.kernels, self.chain.parameters(), &alone, &all, (&self.grads, &all), &[]);
        let numbers = StepNumbers { learning_rate: 1e-4, grad_scale: clip_scale(norm, 1.0) };
        self.optimizer.step(&*self.kernels, numbers, (&mut self.params, &all), (&self.grads, &all));
        lap("optimizer");
        self.step += 1;
        let [Value::Loss(loss)] = outputs[..] else { panic!("one loss, not {outputs:?}") };
        (loss, seconds)
    }

    /// Names, shapes and values of all weights: a line of JSON, then the numbers.
    fn save(&self, path: &str) -> std::io::Result<()> {
        let entry =
            |p: &crossmesh_train::parameter::Parameter| format!("[\"{}\", {:?}]", p.name, p.layout.shape());
        let entries: Vec<String> = self.chain.parameters().iter().map(entry).collect();
        let mut file = std::io::BufWriter::new(std::fs::File::create(path)?);
        writeln!(file, "[{}]", entries.join(", "))?;
        let weights = self.optimizer.masters().unwrap_or(&self.params);
        self.kernels.download(weights).iter().try_for_each(|x| file.write_all(&x.to_le_bytes()))?;
        file.flush()
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| args.iter().position(|a| a == name).and_then(|i| args.get(i + 1));
    let number = |name: &str, default: usize| value(name).and_then(|v| v.parse().ok()).unwrap_or(default);
    let (vocab, context) = (number("--vocab", 8192), number("--context", 256));
    let (width, layers, heads) = (number("--width", 512), number("--layers", 8), number("--heads", 8));
    let config = if args.iter().any(|a| a == "--llama") {
        let heads = (heads, number("--kv-heads", 2));
        GptConfig::llama((vocab, context), width, layers, heads, number("--hidden", 1376))
    } else {
        GptConfig::new(vocab, context, width, layers, heads)
    };
    let threads = number("--threads", 2);
    match value("--dtype").map_or("f32", String::as_str) {
        "f32" => run(Cpu::<f32>::new(threads), config, &args),
        "bf16" => run(CpuBf16::new(threads), config, &args),
        other => panic!("--dtype {other} is none of f32, bf16"),
    }
}

fn run<K: Kernels<Real = f32>>(kernels: K, config: GptConfig, args: &[String]) {
    let value = |name: &str| args.iter().position(|a| a == name).and_then(|i| args.get(i + 1));
    let number = |name: &str, default: usize| value(name).and_then(|v| v.parse().ok()).unwrap_or(default);
    let mut trainer = Trainer::new(kernels, config, number("--samples", 8));
    if let Some(path) = value("--weights") {
        trainer.save(path).unwrap_or_else(|error| panic!("cannot write {path}: {error}"));
    }
    if args.iter().any(|a| a == "--serve") {
        return serve(&mut trainer);
    }
    for step in 0..number("--steps", 5) {
        let (loss, seconds) = trainer.step();
        let total: f64 = seconds.values().sum();
        println!("step {step}  loss {loss:.6}  {total:.3} s  {seconds:.3?}");
    }
}

fn serve<K: Kernels<Real = f32>>(trainer: &mut Trainer<K>) {
    println!("ready");
    for line in std::io::stdin().lock().lines() {
        let Some(steps) = line.ok().and_then(|line| line.trim().parse::<usize>().ok()) else { return };
        let (losses, seconds): (Vec<f64>, Vec<f64>) = (0..steps)
            .map(|_| trainer.step())
            .map(|(loss, parts)| (loss, parts.values().sum::<f64>()))
            .unzip();
        println!("{{\"seconds\": {seconds:?}, \"losses\": {losses:?}}}");
    }
}
