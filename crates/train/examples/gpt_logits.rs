//! What a GPT-2 or a Llama from a checkpoint says about tokens: logits, loss and gradients as JSON. For comparing with other programs.
//!
//! ```text
//! cargo run -p crossmesh-train --example gpt_logits -- CHECKPOINT TOKEN,TOKEN,.. [--gradients] [--weights] [--f64]
//! cargo run -p crossmesh-train --example gpt_logits -- --new FOLDER VOCAB,CONTEXT,WIDTH,LAYERS,HEADS,HIDDEN[,KV_HEADS] [--untied] [--scaled]
//! ```
//!
//! There are as many tokens as the model's context, or a multiple of it: several samples. Gradients are those of training, dropout included. The loss is that of the next token, and of the first behind
//! the last. `--f64` computes in double precision. `--new` makes a checkpoint of an untrained model whose weights matter: none is zero or one;
//! `--scaled` gives a Llama rotary positions with Llama 3.1's scaling, of an old context of 16.
#![allow(clippy::print_stdout)]

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use crossmesh_core::id::Rank;
use crossmesh_train::chain::{Chain, Flow, Setup};
use crossmesh_train::checkpoint::{Checkpoint, Convert, Facts, Snapshot, StageState, StageTarget, Store, hf};
use crossmesh_train::flat::Flat;
use crossmesh_train::graph::{Ctx, Mode};
use crossmesh_train::group::{Alone, Group};
use crossmesh_train::kernels::Kernels;
use crossmesh_train::kernels::cpu::{Cpu, HostBuf};
use crossmesh_train::kernels::random::Stream;
use crossmesh_train::kernels::scalar::Scalar;
use crossmesh_train::models::gpt::rotary::Llama3Scaling;
use crossmesh_train::models::gpt::{Family, Gpt, GptConfig};
use crossmesh_train::parameter::Parameter;
use crossmesh_train::stage::{Microbatch, MicrobatchId, Stage, Value};
use crossmesh_train::stage_rank::StageRank;

type Buf<T> = HostBuf<T>;

/// A stage of some units, with its weights.
struct Piece<T: Scalar> {
    chain: Chain<Cpu<T>>,
    params: Buf<T>,
}

fn piece<T: Scalar>(
    config: &GptConfig,
    units: std::ops::Range<usize>,
    samples: usize,
    checkpoint: Option<&Checkpoint>,
) -> Piece<T> {
    let model = Gpt::new(config.clone()).expect("a model");
    let setup = Setup::alone(samples, 0);
    let chain = Chain::new(&model, units, Arc::new(Cpu::new(1)), Arc::new(Alone), setup).expect("a stage");
    let mut params = vec![T::ZERO; chain.parameters().last().map_or(0, |p| p.range.end)];
    if let Some(checkpoint) = checkpoint {
        let (parameters, place) = (chain.parameters(), &StageRank::alone());
        let target = StageTarget::of_weights(parameters, place, &mut params);
        checkpoint.load(&mut [target], Convert::Yes).unwrap_or_else(|error| panic!("{error}"));
    }
    Piece { chain, params: params.into() }
}

fn print_logits<T: Scalar>(path: &Path, tokens: &[i32], (gradients, weights): (bool, bool)) {
    let checkpoint = Checkpoint::open(path).unwrap_or_else(|error| panic!("{error}"));
    let config = hf::decoder_config(&checkpoint).unwrap_or_else(|error| panic!("{error}"));
    let samples = tokens.len() / config.context;
    let mut whole = piece::<T>(&config, 0..config.layers + 2, samples, Some(&checkpoint));
    let mut targets = tokens.to_vec();
    targets.rotate_left(1);
    let inputs = || vec![Value::Ids(tokens.to_vec()), Value::Ids(targets.clone())];
    let Piece { chain, params } = &mut whole;
    let (id, batch_samples) = (MicrobatchId(0), samples as u64);
    let microbatch = Microbatch { id, step: 0, first_sample: 0, batch_samples };
    let Value::Loss(loss) = chain.evaluate(microbatch, &mut &*params, inputs()).expect("a pass").remove(0)
    else {
        panic!("a loss")
    };
    let logits = logits(&config, params, tokens);
    let mut grads: Vec<String> = vec![];
    if gradients {
        chain.forward(microbatch, &mut &*params, inputs()).expect("F");
        chain.backward_input(id, &mut &*params, vec![]).expect("B");
        let mut sums: Buf<T> = vec![T::ZERO; params.len()].into();
        chain.backward_weight(id, &mut &mut sums).expect("W");
        grads = chain.parameters().iter().map(|p| named(p, &sums)).collect();
    }
    let weights: Vec<String> =
        chain.parameters().iter().filter(|_| weights).map(|p| named(p, params)).collect();
    let (grads, weights) = (grads.join(", "), weights.join(", "));
    println!(
        "{{\"loss\": {loss:?}, \"gradients\": {{{grads}}}, \"weights\": {{{weights}}}, \"logits\": {logits:?}}}"
    );
}

fn named<T: Scalar>(p: &Parameter, flat: &[T]) -> String {
    format!("\"{}\": {:?}", p.name, &flat[p.range.clone()])
}

/// Of every row of every sample.
fn logits<T: Scalar>(config: &GptConfig, params: &Buf<T>, tokens: &[i32]) -> Vec<T> {
    let model = Gpt::new(config.clone()).expect("a model");
    let units = model.reading::<Cpu<T>>(config.context, 0..config.layers + 2, &StageRank::alone()).0;
    let kernels = Cpu::new(1);
    let groups: [Arc<dyn Group<Buf<T>>>; 1] = [Arc::new(Alone)];
    let microbatch = Microbatch { id: MicrobatchId(0), step: 0, first_sample: 0, batch_samples: 1 };
    let of_sample = |tokens: &[i32]| {
        let ctx = Ctx {
            kernels: &kernels,
            groups: &groups,
            params: Some(Flat::Whole(params)),
            microbatch,
            first_sample: 0,
            seed: 0,
            mode: Mode::Evaluate,
            cache: None,
        };
        let mut flow = Flow::default();
        flow.put("tokens", Value::Ids(tokens.to_vec()));
        units.iter().for_each(|unit| drop(unit.forward(&ctx, &mut flow).expect("a pass")));
        kernels.download(&flow.take_real("logits"))
    };
    tokens.chunks_exact(config.context).flat_map(of_sample).collect()
}

/// Saves an untrained model; norms and biases are random too.
fn new(folder: &str, sizes: &str, tied: bool, scaled: bool) {
    let sizes: Vec<usize> = sizes.split(',').map(|n| n.parse().expect("a size")).collect();
    let config = match sizes[..] {
        [vocab, context, width, layers, heads, hidden] => {
            GptConfig { hidden, ..GptConfig::new(vocab, context, width, layers, heads) }
        }
        [vocab, context, width, layers, heads, hidden, kv_heads] => {
            GptConfig::llama((vocab, context), width, layers, (heads, kv_heads), hidden)
        }
        _ => panic!("six sizes, or seven"),
    };
    let (layers, mut config) = (config.layers, GptConfig { tied, ..config });
    if let Family::Llama { rotary, .. } = &mut config.family {
        let scaling = Llama3Scaling { factor: 8.0, low: 1.0, high: 4.0, old_context: 16.0 };
        rotary.scaling = scaled.then_some(scaling);
    }
    let piece = piece::<f32>(&config, 0..layers + 2, 1, None);
    let mut values = vec![0.0; piece.params.len()];
    let fill = |p: &Parameter, values: &mut [f32]| {
        let (stream, around) = (
            Stream::named(1, &p.name),
            if p.name.contains("ln_") || p.name.contains("norm") { 1.0 } else { 0.0 },
        );
        values.iter_mut().zip(0..).for_each(|(v, i)| *v = (around + 0.1 * stream.normal(i)) as f32);
    };
    piece.chain.parameters().iter().for_each(|p| fill(p, &mut values[p.range.clone()]));
    let place = StageRank::alone();
    let parameters = piece.chain.parameters();
    let state = StageState::of_weights(parameters, &place, &values);
    let snapshot = Snapshot::take(0, Rank(0), &[state]).expect("a snapshot");
    let store = Store::new(folder, NonZeroUsize::MIN);
    let (model, run) = (hf::model_json(&config), serde_json::Value::Null);
    let facts = Facts { step: 0, samples: 0, seed: 1, model, run, optimizer: None };
    let path = store.commit(&facts, &[store.write(snapshot).report()]);
    println!("{}", path.unwrap_or_else(|error| panic!("{error}")).display());
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match &args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--new", folder, sizes, flags @ ..] => {
            new(folder, sizes, !flags.contains(&"--untied"), flags.contains(&"--scaled"));
        }
        [path, tokens, flags @ ..] => {
            let tokens: Vec<i32> = tokens.split(',').map(|t| t.parse().expect("a token")).collect();
            let what = (flags.contains(&"--gradients"), flags.contains(&"--weights"));
            match flags.contains(&"--f64") {
                true => print_logits::<f64>(Path::new(path), &tokens, what),
                false => print_logits::<f32>(Path::new(path), &tokens, what),
            }
        }
        _ => panic!("a checkpoint and tokens, or --new, a folder and sizes"),
    }
}
