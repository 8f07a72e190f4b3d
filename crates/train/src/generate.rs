//! Generating text: one token after the other, with what earlier ones left behind kept in a cache.
//!
//! ```text
//! prompt  t o   b e        all rows at once, causal; keys and values of every layer go into the cache
//! then        _            one row a token, or several: their queries meet the cache
//! ```
//!
//! On one rank, by the graphs that training has. The cache holds `2 · layers · columns of keys · context` numbers. A model ends at its context; whoever goes on drops the older half of what was said, and reads the rest again ([`Generator::next`]).

use std::cell::RefCell;
use std::sync::Arc;

use crate::chain::{Flow, parameters};
use crate::checkpoint::{Checkpoint, CheckpointError, Convert, StageTarget, hf};
use crate::flat::Flat;
use crate::graph::{Cache, Ctx, Mode, Unit};
use crate::group::{Alone, Group};
use crate::kernels::cpu::{Cpu, HostBuf};
use crate::kernels::random::Stream;
use crate::kernels::scalar::Scalar;
use crate::kernels::{Buffer, Kernels};
use crate::models::gpt::{Gpt, GptConfig};
use crate::stage::{Microbatch, MicrobatchId, Value};
use crate::stage_rank::StageRank;

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// 0 takes the most likely token always; 1 draws as the model says; more is bolder.
    pub temperature: f64,
    /// Only the so many most likely ones are drawn from; none: all of them.
    pub top_k: Option<usize>,
    pub seed: u64,
}

impl Sampling {
    pub const GREEDY: Self = Self { temperature: 0.0, top_k: None, seed: 0 };

    /// The token to say next, the `index`-th of those that are drawn.
    pub fn choose(&self, logits: &[f64], index: u64) -> usize {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        // The first of equals: no draw depends on how a sort goes.
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        order.truncate(self.top_k.unwrap_or(usize::MAX).max(1));
        let Some(&first) = order.first() else { return 0 };
        if self.temperature <= 0.0 {
            return first;
        }
        let weight = |token: &usize| ((logits[*token] - logits[first]) / self.temperature).exp();
        let all: f64 = order.iter().map(weight).sum();
        let draw = f64::from(Stream::new(self.seed, index, SITE).at(0)) / (f64::from(u32::MAX) + 1.0);
        let mut left = draw * all;
        for token in &order {
            left -= weight(token);
            if left < 0.0 {
                return *token;
            }
        }
        *order.last().unwrap_or(&first)
    }
}

/// Apart from the places in a model that draw random numbers.
const SITE: u32 = 0x7e87_0000;

/// A decoder that talks. See the module.
pub struct Generator<T: Scalar> {
    kernels: Cpu<T>,
    model: Gpt,
    params: HostBuf<T>,
    cache: RefCell<Cache<HostBuf<T>>>,
    /// Tokens in the cache.
    tokens: Vec<i32>,
    /// The units that read one token; and those of the piece that was read last.
    one: Vec<Unit<Cpu<T>>>,
    piece: (usize, Vec<Unit<Cpu<T>>>),
}

impl<T: Scalar> Generator<T> {
    /// The model of a checkpoint, with numbers made as wide as `T`.
    pub fn load(checkpoint: &Checkpoint, threads: usize) -> Result<Self, CheckpointError> {
        let config = hf::decoder_config(checkpoint)?;
        let model = Gpt::new(config).map_err(|error| CheckpointError::Model {
            path: checkpoint.folder().to_path_buf(),
            what: error.to_string(),
        })?;
        let parameters = parameters::<Cpu<T>>(&model);
        checkpoint.check_model(&parameters)?;
        let mut values = vec![T::ZERO; parameters.last().map_or(0, |p| p.range.end)];
        let place = StageRank::alone();
        let target = StageTarget::of_weights(&parameters, &place, &mut values);
        checkpoint.load(&mut [target], Convert::Yes)?;
        let kernels = Cpu::new(threads);
        let room = model.config().context * model.kv_width();
        let layer = |_| [(); 2].map(|()| kernels.buffer(room));
        let cache = Cache { layers: (0..model.config().layers).map(layer).collect(), rows: 0 };
        let (one, cache, params) = (model.reading(1), RefCell::new(cache), values.into());
        Ok(Self { kernels, model, params, cache, tokens: vec![], one, piece: (0, vec![]) })
    }

    pub fn config(&self) -> &GptConfig {
        self.model.config()
    }

    /// Elements of the cache.
    pub fn cache_elements(&self) -> usize {
        self.cache.borrow().layers.iter().flatten().map(|kept| kept.len()).sum()
    }

    /// Reads tokens behind those it has read, and says what may come next: a logit for every token of the vocabulary. Tokens are below the
    /// vocabulary, and there is at least one.
    pub fn next(&mut self, tokens: &[i32]) -> Vec<f64> {
        assert!(!tokens.is_empty(), "there is something to read");
        let context = self.config().context;
        let mut unread = tokens.to_vec();
        if self.tokens.len() + unread.len() > context {
            // The newest half of the context, to have room for as much again.
            let all: Vec<i32> = self.tokens.drain(..).chain(unread).collect();
            unread = all[all.len() - (context / 2).max(1)..].to_vec();
            self.cache.borrow_mut().rows = 0;
        }
        self.read(&unread)
    }

    /// The logits of the last row.
    fn read(&mut self, tokens: &[i32]) -> Vec<f64> {
        let rows = tokens.len();
        if rows > 1 && self.piece.0 != rows {
            self.piece = (rows, self.model.reading(rows));
        }
        let alone: [Arc<dyn Group<HostBuf<T>>>; 1] = [Arc::new(Alone)];
        let ctx = Ctx {
            kernels: &self.kernels,
            groups: &alone,
            params: Some(Flat::Whole(&self.params)),
            microbatch: Microbatch { id: MicrobatchId(0), step: 0, first_sample: 0, batch_samples: 1 },
            first_sample: 0,
            seed: 0,
            mode: Mode::Evaluate,
            cache: Some(&self.cache),
        };
        let mut flow = Flow::default();
        flow.put("tokens", Value::Ids(tokens.to_vec()));
        for unit in if rows == 1 { &self.one } else { &self.piece.1 } {
            unit.forward(&ctx, &mut flow).expect("one rank asks nobody");
        }
        self.cache.borrow_mut().rows += rows;
        self.tokens.extend_from_slice(tokens);
        let logits = self.kernels.download(&flow.take_real("logits"));
        logits[(rows - 1) * self.config().vocab..].iter().map(|x| x.to_f64()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_follow_the_weights_and_the_seed() {
        let logits = [0.0, 2.0f64.ln(), f64::NEG_INFINITY, 5.0f64.ln()];
        assert_eq!(Sampling::GREEDY.choose(&logits, 3), 3);
        let drawn = |sampling: Sampling| -> Vec<usize> {
            (0..8000).map(|index| sampling.choose(&logits, index)).collect()
        };
        let all = Sampling { temperature: 1.0, top_k: None, seed: 7 };
        let share = |drawn: &[usize], token| drawn.iter().filter(|t| **t == token).count() as f64 / 8000.0;
        for (token, wanted) in [(0, 1.0 / 8.0), (1, 2.0 / 8.0), (2, 0.0), (3, 5.0 / 8.0)] {
            let found = share(&drawn(all), token);
            assert!((found - wanted).abs() < 0.02, "{token}: {found} for {wanted}");
        }
        let two = Sampling { top_k: Some(2), ..all };
        assert!(drawn(two).iter().all(|t| [1, 3].contains(t)));
        assert!((share(&drawn(two), 1) - 2.0 / 7.0).abs() < 0.02);
        let cold = Sampling { temperature: 0.5, ..all };
        assert!((share(&drawn(cold), 3) - 25.0 / 30.0).abs() < 0.02, "weights are squared");
        assert_eq!(drawn(all), drawn(all));
        assert_ne!(drawn(all), drawn(Sampling { seed: 8, ..all }));
        assert_eq!(Sampling { top_k: Some(1), ..all }.choose(&[1.0, 1.0], 0), 0, "the first of equals");
    }
}
