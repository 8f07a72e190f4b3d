//! Token by token with a cache, held against reading everything again for every token.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use crossmesh_core::id::Rank;
use crossmesh_train::chain::{Chain, Setup};
use crossmesh_train::checkpoint::{Checkpoint, Facts, Snapshot, StageState, Store, hf};
use crossmesh_train::generate::{Crew, Generator, Sampling};
use crossmesh_train::group::{Alone, Group, in_process};
use crossmesh_train::kernels::cpu::{Cpu, HostBuf};
use crossmesh_train::kernels::random::Stream;
use crossmesh_train::models::gpt::{Family, Gpt, GptConfig, Residual};
use crossmesh_train::stage::{Microbatch, MicrobatchId, Stage, Value};
use crossmesh_train::stage_rank::StageRank;

/// The whole model without its head, on full contexts, and the head by hand.
struct Slow {
    config: GptConfig,
    body: Chain<Cpu<f64>>,
    parameters: Vec<crossmesh_train::parameter::Parameter>,
    values: Vec<f64>,
}

impl Slow {
    /// Weights that matter: none is zero or one.
    fn new(config: &GptConfig) -> Self {
        let model = Gpt::new(config.clone()).unwrap();
        let parameters = crossmesh_train::chain::parameters::<Cpu<f64>>(&model);
        let mut values = vec![0.0; parameters.last().unwrap().range.end];
        for p in &parameters {
            let (stream, around) = (
                Stream::named(5, &p.name),
                if p.name.contains("ln_") || p.name.contains("norm") { 1.0 } else { 0.0 },
            );
            values[p.range.clone()]
                .iter_mut()
                .zip(0..)
                .for_each(|(v, i)| *v = around + 0.2 * stream.normal(i));
        }
        let units = 0..config.layers + 1;
        let setup = Setup::alone(1, 0);
        let body = Chain::new(&model, units, Arc::new(Cpu::new(1)), Arc::new(Alone), setup).unwrap();
        Self { config: config.clone(), body, parameters, values }
    }

    fn save(&self, folder: &Path) -> Checkpoint {
        let (place, store) = (StageRank::alone(), Store::new(folder, NonZeroUsize::MIN));
        let (parameters, values) = (&self.parameters, &self.values);
        let state = StageState::of_weights(parameters, &place, values);
        let snapshot = Snapshot::take(0, Rank(0), &[state]).unwrap();
        let (model, run) = (hf::model_json(&self.config), serde_json::Value::Null);
        let facts = Facts { step: 0, samples: 0, seed: 1, model, run, optimizer: None };
        Checkpoint::open(&store.commit(&facts, &[store.write(snapshot).report()]).unwrap()).unwrap()
    }

    fn tensor(&self, name: &str) -> &[f64] {
        &self.values[self.parameters.iter().find(|p| p.name == name).unwrap().range.clone()]
    }

    /// What comes behind these tokens: a pass over all of them, filled up to the context.
    fn logits(&mut self, tokens: &[i32]) -> Vec<f64> {
        let GptConfig { context, width, vocab, tied, epsilon, .. } = self.config;
        let mut ids = tokens.to_vec();
        ids.resize(context, 0);
        let microbatch = Microbatch { id: MicrobatchId(0), step: 0, first_sample: 0, batch_samples: 1 };
        // The body has the first parameters, and a tied head no further table.
        let held = self.body.parameters().last().unwrap().range.end;
        let params = self.values[..held].to_vec().into();
        let out = self.body.evaluate(microbatch, &mut &params, vec![Value::Ids(ids)]).unwrap();
        // The residual stream, and on a ladder the branch that has not landed on it.
        let mut row = vec![0.0; width];
        for part in out {
            let Value::Real(part) = part else { panic!("a hidden state") };
            let of_row = &part[(tokens.len() - 1) * width..tokens.len() * width];
            row.iter_mut().zip(of_row).for_each(|(sum, x)| *sum += x);
        }
        let llama = self.config.family != Family::Gpt2;
        let mean = if llama { 0.0 } else { row.iter().sum::<f64>() / width as f64 };
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
        let gamma = self.tensor(if llama { "model.norm.weight" } else { "ln_f.weight" });
        let none = vec![0.0; width];
        let beta = if llama { &none } else { self.tensor("ln_f.bias") };
        let normed = |i: usize| (row[i] - mean) / (variance + epsilon).sqrt() * gamma[i] + beta[i];
        let tokens = if llama { "model.embed_tokens.weight" } else { "wte.weight" };
        let table = self.tensor(if tied { tokens } else { "lm_head.weight" });
        (0..vocab).map(|v| (0..width).map(|i| normed(i) * table[v * width + i]).sum()).collect()
    }
}

fn close(got: &[f64], wanted: &[f64], what: &str) {
    let largest = wanted.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    for (a, b) in got.iter().zip(wanted) {
        assert!((a - b).abs() <= 1e-10 * largest, "{what}: {a} for {b}");
    }
}

#[test]
fn every_token_is_what_reading_everything_again_says() {
    let gpt2 =
        |tied, heads, layers| GptConfig { tied, hidden: 31, ..GptConfig::new(13, 9, 20, layers, heads) };
    let llama = |tied, heads, layers| GptConfig {
        tied,
        ..GptConfig::llama((13, 9), 4 * heads, layers, (heads, heads / 2), 11)
    };
    let ladder = |config| GptConfig { residual: Residual::Ladder, ..config };
    let ladders = [ladder(gpt2(true, 5, 2)), ladder(llama(false, 6, 3))];
    let configs =
        [gpt2(true, 5, 3), gpt2(false, 1, 2), gpt2(true, 4, 1), llama(false, 6, 2), llama(true, 2, 1)];
    for config in configs.into_iter().chain(ladders) {
        let mut slow = Slow::new(&config);
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = slow.save(folder.path());
        for prompt in 1..=4 {
            let mut fast = Generator::<f64>::load(&checkpoint, 1).unwrap();
            let columns = Gpt::new(config.clone()).unwrap().kv_width(&StageRank::alone());
            fast.reserve(7);
            assert_eq!(fast.cache_elements(), 2 * config.layers * columns * 7);
            let mut tokens: Vec<i32> = (0..prompt).map(|i| (7 * i + prompt) % 13).collect();
            let mut logits = fast.next(&tokens).unwrap();
            while tokens.len() < config.context {
                close(&logits, &slow.logits(&tokens), &format!("{config:?}, {tokens:?}"));
                tokens.push(Sampling::GREEDY.choose(&logits, 0) as i32);
                logits = fast.next(&tokens[tokens.len() - 1..]).unwrap();
            }
            close(&logits, &slow.logits(&tokens), "a full context");
            // Behind it, the newer half is what counts, and then grows again.
            tokens.push(2);
            close(&fast.next(&[2]).unwrap(), &slow.logits(&tokens[tokens.len() - 4..]), "behind the context");
            close(
                &fast.next(&[1, 3]).unwrap(),
                &slow.logits(&[&tokens[tokens.len() - 4..], &[1, 3]].concat()),
                "further on",
            );
        }
    }
}

type Members = Vec<Arc<dyn Group<HostBuf<f64>>>>;

/// Ranks that are threads.
fn crews(tp: usize, stages: usize) -> Vec<Crew<HostBuf<f64>>> {
    let mut groups: BTreeMap<Vec<usize>, Members> = BTreeMap::new();
    let mut crew = |rank: usize| {
        let made = Crew::new(rank, tp, stages, |ranks| {
            let group = groups.entry(ranks.to_vec()).or_insert_with(|| in_process(ranks.len()));
            let at = ranks.iter().position(|r| *r == rank).unwrap();
            Ok::<_, std::convert::Infallible>(Arc::clone(&group[at]))
        });
        made.unwrap()
    };
    (0..tp * stages).map(&mut crew).collect()
}

/// Heads, columns and vocabulary over ranks, layers over stages: the same text, and every rank hears it.
#[test]
fn several_ranks_say_what_one_says() {
    let gpt2 = GptConfig { hidden: 31, ..GptConfig::new(13, 9, 20, 3, 5) };
    let llama = |kv_heads| GptConfig::llama((13, 9), 32, 3, (8, kv_heads), 11);
    let shapes = [(2, 1), (1, 3), (2, 2), (4, 2), (1, 5)];
    let ladder = GptConfig { residual: Residual::Ladder, ..llama(2) };
    for (config, kv_heads) in [(gpt2, 5usize), (llama(2), 2), (llama(8), 8), (llama(1), 1), (ladder, 2)] {
        let slow = Slow::new(&config);
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = slow.save(folder.path());
        let talk = |crew: Crew<HostBuf<f64>>| {
            let mut generator = Generator::<f64>::load_with(&checkpoint, 1, crew).unwrap();
            generator.reserve(9);
            let mut heard = vec![generator.next(&[5, 1, 7]).unwrap()];
            let mut said = vec![];
            // Behind the context, too.
            for _ in 0..9 {
                said.push(Sampling::GREEDY.choose(heard.last().unwrap(), 0) as i32);
                heard.push(generator.next(&said[said.len() - 1..]).unwrap());
            }
            (heard, said, generator.cache_elements())
        };
        let (heard, said, _) = talk(Crew::alone());
        for (tp, stages) in shapes {
            let ranks: Vec<_> = std::thread::scope(|scope| {
                let threads: Vec<_> =
                    crews(tp, stages).into_iter().map(|crew| scope.spawn(|| talk(crew))).collect();
                threads.into_iter().map(|t| t.join().unwrap()).collect()
            });
            let what = format!("{config:?} on {tp} x {stages}");
            let head_dim = config.width / config.heads;
            for (rank, (logits, tokens, cache)) in ranks.iter().enumerate() {
                logits.iter().zip(&heard).for_each(|(got, wanted)| close(got, wanted, &what));
                assert_eq!(tokens, &said, "{what}");
                assert_eq!(logits, &ranks[0].0, "{what}: the same bits everywhere");
                let (stage, units) = (rank / tp, config.layers + 2);
                let blocks = stage * units / stages..(stage + 1) * units / stages;
                let layers = blocks.filter(|unit| (1..=config.layers).contains(unit)).count();
                let most = 2 * layers * kv_heads.div_ceil(tp) * head_dim * 9;
                let even = kv_heads % tp == 0 || tp % kv_heads == 0;
                assert!(*cache == most || (!even && *cache < most), "{what}: {cache} of {most}");
            }
        }
    }
}

#[test]
fn more_ranks_than_can_share_a_model_are_refused() {
    let model = Gpt::new(GptConfig::llama((13, 9), 24, 2, (6, 3), 11)).unwrap();
    let refused = |tp, stages| Crew::<HostBuf<f64>>::check(&model, tp, stages).unwrap_err().to_string();
    assert!(refused(4, 1).contains("4 ranks along tp are more than there are heads"), "{}", refused(4, 1));
    assert!(refused(1, 5).starts_with("stages = 5: the model has 4 units"), "{}", refused(1, 5));
    assert!(refused(0, 1).starts_with("tp = 0") && refused(1, 0).starts_with("stages = 0"));
    assert_eq!(Crew::<HostBuf<f64>>::check(&model, 6, 4), Ok(()));
}
