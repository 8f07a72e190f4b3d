//! How far, and how fast, a small model learns made-up data whose best loss is known: a GPT the language, a U-Transformer the images.
//!
//! ```text
//! cargo run --release -p crossmesh-train --example learn -- gpt [--threads 2] [--steps 300] [--samples 16] [--context 64] [--width 64]
//!     [--layers 2] [--heads 4] [--rate 3e-3] [--warmup 20] [--groups 2] [--branching 8] [--tied 1]
//! cargo run --release -p crossmesh-train --example learn -- unet [--steps 300] [--samples 16] [--side 16] [--base 16] [--rate 2e-3] ..
//! ```
#![allow(clippy::print_stdout, clippy::disallowed_methods)]

use std::sync::Arc;
use std::time::Instant;

use crossmesh_train::chain::{Chain, Model, Setup};
use crossmesh_train::data::images::{Images, ImagesSpec};
use crossmesh_train::data::language::{Language, LanguageSpec};
use crossmesh_train::data::{Column, DataSet, Split, check_model};
use crossmesh_train::deal::{Runs, Share};
use crossmesh_train::group::Alone;
use crossmesh_train::kernels::Kernels;
use crossmesh_train::kernels::cpu::{Cpu, HostBuf};
use crossmesh_train::models::gpt::{Gpt, GptConfig};
use crossmesh_train::models::unet::{Unet, UnetConfig};
use crossmesh_train::optim::schedule::Schedule;
use crossmesh_train::optim::{Optimizer, OptimizerConfig, StepNumbers, clip_scale, norm_piece};
use crossmesh_train::parameter::initial;
use crossmesh_train::stage::{Microbatch, MicrobatchId, Stage, Value};
use crossmesh_train::stage_rank::StageRank;

struct Trainer<'a> {
    data: &'a dyn DataSet,
    samples: u64,
    cpu: Arc<Cpu<f32>>,
    chain: Chain<Cpu<f32>>,
    params: HostBuf<f32>,
    grads: HostBuf<f32>,
    optimizer: Optimizer<HostBuf<f32>>,
}

impl<'a> Trainer<'a> {
    fn new(model: &dyn Model<Cpu<f32>>, data: &'a dyn DataSet, samples: usize, threads: usize) -> Self {
        check_model(data, model).unwrap_or_else(|error| panic!("{error}"));
        let cpu = Arc::new(Cpu::new(threads));
        let (units, setup) = (0..model.num_units(), Setup::alone(samples, 1));
        let chain = Chain::new(model, units, Arc::clone(&cpu), Arc::new(Alone), setup).expect("a stage");
        let params: HostBuf<f32> = initial(chain.parameters(), &[0, 0], 1).into();
        let grads = vec![0.0; params.len()].into();
        let optimizer =
            Optimizer::new(&*cpu, OptimizerConfig::ADAMW, chain.parameters(), Share::whole(params.len()));
        Self { data, samples: samples as u64, cpu, chain, params, grads, optimizer }
    }

    fn inputs(&self, step: u64, split: Split) -> Vec<Value<HostBuf<f32>>> {
        let samples = step * self.samples..(step + 1) * self.samples;
        let read = |port: &str| match self.data.read(port, samples.clone(), split).expect("data") {
            Column::Ids(ids) => Value::Ids(ids),
            Column::Real(values) => Value::Real(values.iter().map(|x| *x as f32).collect::<Vec<_>>().into()),
        };
        self.chain.inputs().iter().map(|port| read(&port.name)).collect()
    }

    fn microbatch(&self, step: u64) -> Microbatch {
        Microbatch { id: MicrobatchId(0), step, first_sample: 0, batch_samples: self.samples }
    }

    fn step(&mut self, step: u64, learning_rate: f64) -> f64 {
        let microbatch = self.microbatch(step);
        let inputs = self.inputs(step, Split::Training);
        let outputs = self.chain.forward(microbatch, &mut &self.params, inputs).expect("forward");
        self.chain.backward_input(microbatch.id, &mut &self.params, vec![]).expect("B");
        let all = Runs::whole(self.grads.len());
        self.cpu.fill(0.0, (&mut self.grads).into(), all.len());
        self.chain.backward_weight(microbatch.id, &mut &mut self.grads).expect("W");
        let (alone, grads) = (StageRank::alone(), (&self.grads, &all));
        let norm = norm_piece(&*self.cpu, self.chain.parameters(), &alone, &all, grads, &[]);
        let numbers = StepNumbers { learning_rate, grad_scale: clip_scale(norm, 1.0) };
        self.optimizer.step(&*self.cpu, numbers, (&mut self.params, &all), (&self.grads, &all));
        loss(&outputs)
    }

    /// The mean loss of samples that were not trained on.
    fn validate(&mut self, batches: u64) -> f64 {
        let batch = |step: u64| {
            let inputs = self.inputs(step, Split::Validation);
            loss(&self.chain.evaluate(self.microbatch(step), &mut &self.params, inputs).expect("evaluate"))
        };
        (0..batches).map(batch).sum::<f64>() / batches as f64
    }
}

fn loss(outputs: &[Value<HostBuf<f32>>]) -> f64 {
    let [Value::Loss(loss)] = outputs else { panic!("one loss, not {outputs:?}") };
    *loss
}

struct Args(Vec<String>);

impl Args {
    fn number(&self, name: &str, default: f64) -> f64 {
        let value = self.0.iter().position(|a| a == name).and_then(|i| self.0.get(i + 1));
        value.map_or(default, |v| v.parse().unwrap_or_else(|_| panic!("{name} {v}: not a number")))
    }

    fn count(&self, name: &str, default: usize) -> usize {
        self.number(name, default as f64) as usize
    }
}

fn main() {
    let args = Args(std::env::args().skip(1).collect());
    match args.0.first().map(String::as_str) {
        Some("gpt") => gpt(&args),
        Some("unet") => unet(&args),
        _ => panic!("gpt or unet?"),
    }
}

fn gpt(args: &Args) {
    let vocab = args.count("--vocab", 64);
    let (groups, branching) = (args.count("--groups", 2), args.count("--branching", 8));
    let context = args.count("--context", 64);
    let data =
        Language::new(LanguageSpec { vocab, groups, branching, seed: 0 }, context).expect("a language");
    println!("entropy {:.4} nats a token", data.entropy());
    let (width, layers) = (args.count("--width", 64), args.count("--layers", 2));
    let config = GptConfig {
        tied: args.count("--tied", 1) == 1,
        ..GptConfig::new(vocab, context, width, layers, args.count("--heads", 4))
    };
    train(args, &Gpt::new(config).expect("a model"), &data, 3e-3);
}

fn unet(args: &Args) {
    let (side, channels) = (args.count("--side", 16), args.count("--channels", 1));
    let config = UnetConfig {
        image: side,
        image_channels: channels,
        base: args.count("--base", 16),
        multipliers: vec![1, 2],
        blocks: 1,
        attention: vec![false, true],
        heads: 4,
        groups: args.count("--norm-groups", 4),
        context_rows: 4,
        context_width: 16,
        epsilon: 1e-5,
    };
    let spec = ImagesSpec { waves: args.count("--waves", 2), ..ImagesSpec::new(side, channels, 4, 16) };
    train(args, &Unet::new(config).expect("a model"), &Images::new(spec).expect("images"), 2e-3);
}

fn train(args: &Args, model: &dyn Model<Cpu<f32>>, data: &dyn DataSet, rate: f64) {
    let mut trainer = Trainer::new(model, data, args.count("--samples", 16), args.count("--threads", 2));
    let steps = args.count("--steps", 300) as u64;
    let reachable = data.reachable_loss().expect("made-up data know their best loss");
    println!("{}\n{} parameters, reachable loss {reachable:.4}", data.describe(), trainer.params.len());
    let peak = args.number("--rate", rate);
    let warmup_steps = args.count("--warmup", 20) as u64;
    let schedule = Schedule { peak, warmup_steps, total_steps: steps, floor: 0.05 * peak, decay_steps: None };
    let start = Instant::now();
    let mut first = f64::NAN;
    for step in 0..steps {
        let loss = trainer.step(step, schedule.at(step));
        if step == 0 {
            first = loss;
        }
        if step % (steps / 15).max(1) == 0 || step + 1 == steps {
            let seconds = start.elapsed().as_secs_f64();
            println!("step {step:5}  loss {loss:.4}  {:.3} x reachable  {seconds:.1} s", loss / reachable);
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let held_out = trainer.validate(20);
    println!(
        "{steps} steps in {seconds:.1} s: validation {held_out:.4}, {:.3} x reachable, {:.1} times below the first loss of {first:.4}",
        held_out / reachable,
        first / held_out
    );
}
