//! What a GPT from a checkpoint says about tokens: logits and loss as JSON. For comparing with other programs.
//!
//! ```text
//! cargo run -p crossmesh-train --example gpt_logits -- CHECKPOINT TOKEN,TOKEN,..
//! cargo run -p crossmesh-train --example gpt_logits -- --new FOLDER VOCAB,CONTEXT,WIDTH,LAYERS,HEADS,HIDDEN [--untied]
//! ```
//!
//! There are as many tokens as the model's context, or a multiple of it: several samples. The loss is that of the next token, and of the first behind
//! the last. `--new` makes a checkpoint of an untrained model whose weights matter: none is zero or one.
#![allow(clippy::print_stdout)]

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use crossmesh_core::id::Rank;
use crossmesh_train::chain::{Chain, Setup};
use crossmesh_train::checkpoint::{
    Checkpoint, Convert, Facts, Moments, Sharding, Snapshot, StageState, StageTarget, Store, hf,
};
use crossmesh_train::group::Alone;
use crossmesh_train::kernels::cpu::{Cpu, HostBuf};
use crossmesh_train::kernels::random::Stream;
use crossmesh_train::kernels::{BufSlice, Gemm, Kernels, NormWeights, Normed, Rows};
use crossmesh_train::models::gpt::{Gpt, GptConfig};
use crossmesh_train::parameter::Parameter;
use crossmesh_train::stage::{Microbatch, MicrobatchId, Stage, Value};
use crossmesh_train::stage_rank::StageRank;

type Buf = HostBuf<f32>;

/// A stage of some units, with its weights.
struct Piece {
    chain: Chain<Cpu<f32>>,
    params: Buf,
}

fn piece(
    config: &GptConfig,
    units: std::ops::Range<usize>,
    samples: usize,
    checkpoint: Option<&Checkpoint>,
) -> Piece {
    let model = Gpt::new(config.clone()).expect("a model");
    let setup = Setup::alone(samples, 0);
    let chain = Chain::new(&model, units, Arc::new(Cpu::new(1)), Arc::new(Alone), setup).expect("a stage");
    let mut params = vec![0.0; chain.parameters().last().map_or(0, |p| p.range.end)];
    if let Some(checkpoint) = checkpoint {
        let (parameters, place) = (chain.parameters(), &StageRank::alone());
        let target = StageTarget { parameters, place, values: &mut params, moments: None };
        checkpoint.load(&mut [target], Convert::Yes).unwrap_or_else(|error| panic!("{error}"));
    }
    Piece { chain, params: params.into() }
}

fn evaluate(piece: &mut Piece, samples: usize, inputs: Vec<Value<Buf>>) -> Value<Buf> {
    let batch_samples = samples as u64;
    let microbatch = Microbatch { id: MicrobatchId(0), step: 0, first_sample: 0, batch_samples };
    piece.chain.evaluate(microbatch, &piece.params, inputs).expect("a pass").remove(0)
}

fn print_logits(path: &Path, tokens: &[i32]) {
    let checkpoint = Checkpoint::open(path).unwrap_or_else(|error| panic!("{error}"));
    let config = hf::decoder_config(&checkpoint).unwrap_or_else(|error| panic!("{error}"));
    let samples = tokens.len() / config.context;
    let mut whole = piece(&config, 0..config.layers + 2, samples, Some(&checkpoint));
    let mut targets = tokens.to_vec();
    targets.rotate_left(1);
    let inputs = vec![Value::Ids(tokens.to_vec()), Value::Ids(targets)];
    let Value::Loss(loss) = evaluate(&mut whole, samples, inputs) else { panic!("a loss") };
    let mut body = piece(&config, 0..config.layers + 1, samples, Some(&checkpoint));
    let Value::Real(h) = evaluate(&mut body, samples, vec![Value::Ids(tokens.to_vec())]) else { panic!("h") };
    let logits = head(&config, &whole, &h, tokens.len());
    println!("{{\"loss\": {loss:?}, \"logits\": {:?}}}", &logits[..]);
}

/// The last norm and the product with the table: what the head does before it takes the loss.
fn head(config: &GptConfig, whole: &Piece, h: &Buf, rows: usize) -> Buf {
    let kernels = Cpu::<f32>::new(1);
    let weight = |name: &str| {
        let found = whole.chain.parameters().iter().find(|p| p.name == name).expect(name);
        BufSlice { buf: &whole.params, start: found.range.start }
    };
    let size = Rows { rows, cols: config.width };
    let (mut y, mut stats) = (kernels.buffer(size.len()), kernels.buffer(2 * rows));
    let weights =
        NormWeights { gamma: weight("ln_f.weight"), beta: weight("ln_f.bias"), epsilon: config.epsilon };
    kernels.layer_norm(size, h, weights, Normed { y: &mut y, stats: &mut stats });
    let table = weight(if config.tied { "wte.weight" } else { "lm_head.weight" });
    let mut logits = kernels.buffer(rows * config.vocab);
    let gemm = Gemm::new(rows, config.vocab, config.width).b_transposed();
    kernels.gemm(gemm, (&y).into(), table, None, (&mut logits).into());
    logits
}

/// Saves an untrained model; norms and biases are random too.
fn new(folder: &str, sizes: &str, tied: bool) {
    let sizes: Vec<usize> = sizes.split(',').map(|n| n.parse().expect("a size")).collect();
    let [vocab, context, width, layers, heads, hidden] = sizes[..] else { panic!("six sizes") };
    let config = GptConfig { hidden, tied, ..GptConfig::new(vocab, context, width, layers, heads) };
    let piece = piece(&config, 0..layers + 2, 1, None);
    let mut values = vec![0.0; piece.params.len()];
    let fill = |p: &Parameter, values: &mut [f32]| {
        let (stream, around) = (Stream::named(1, &p.name), if p.name.contains("ln_") { 1.0 } else { 0.0 });
        values.iter_mut().zip(0..).for_each(|(v, i)| *v = (around + 0.1 * stream.normal(i)) as f32);
    };
    piece.chain.parameters().iter().for_each(|p| fill(p, &mut values[p.range.clone()]));
    let place = StageRank::alone();
    let moments = Moments { names: &[], values: vec![], shard: 0..0, sharding: Sharding::Replicated };
    let parameters = piece.chain.parameters();
    let state = StageState { parameters, place: &place, values: &values, moments, elsewhere: &[] };
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
        ["--new", folder, sizes] => new(folder, sizes, true),
        ["--new", folder, sizes, "--untied"] => new(folder, sizes, false),
        [path, tokens] => {
            let tokens: Vec<i32> = tokens.split(',').map(|t| t.parse().expect("a token")).collect();
            print_logits(Path::new(path), &tokens);
        }
        _ => panic!("a checkpoint and tokens, or --new, a folder and sizes"),
    }
}
