//! Generating text: one token after the other, with what earlier ones left behind kept in a cache.
//!
//! ```text
//! prompt  t o   b e        all rows at once, causal; keys and values of every layer go into the cache
//! then        _            one row a token: its query meets the cache
//! ```
//!
//! On one rank, with the kernels that training has. The cache holds `2 · layers · width · context` numbers. A model with learned positions ends at
//! its context; whoever goes on drops the older half of what was said, and reads the rest again ([`Generator::next`]).

use std::collections::BTreeMap;

use crate::chain::parameters;
use crate::checkpoint::{Checkpoint, CheckpointError, Convert, StageTarget, gpt2};
use crate::kernels::cpu::{Cpu, HostBuf};
use crate::kernels::random::Stream;
use crate::kernels::scalar::Scalar;
use crate::kernels::{
    Activation, Attention, BufSlice, Gemm, Kernels, Lookup, NormWeights, Normed, PartMut, Projected, Rows,
};
use crate::models::gpt::{Gpt, GptConfig};
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

/// A GPT that talks. See the module.
pub struct Generator<T: Scalar> {
    kernels: Cpu<T>,
    config: GptConfig,
    params: HostBuf<T>,
    /// Where every parameter begins.
    starts: BTreeMap<String, usize>,
    /// By layer: a row of keys and values for every token so far.
    cache: Vec<HostBuf<T>>,
    /// Tokens in the cache.
    tokens: Vec<i32>,
}

impl<T: Scalar> Generator<T> {
    /// The model of a checkpoint, with numbers made as wide as `T`.
    pub fn load(checkpoint: &Checkpoint, threads: usize) -> Result<Self, CheckpointError> {
        let config = gpt2::gpt_config(checkpoint)?;
        let model = Gpt::new(config.clone()).map_err(|error| CheckpointError::Model {
            path: checkpoint.folder().to_path_buf(),
            what: error.to_string(),
        })?;
        let parameters = parameters::<Cpu<T>>(&model);
        checkpoint.check_model(&parameters)?;
        let mut values = vec![T::ZERO; parameters.last().map_or(0, |p| p.range.end)];
        let place = StageRank::alone();
        let target =
            StageTarget { parameters: &parameters, place: &place, values: &mut values, moments: None };
        checkpoint.load(&mut [target], Convert::Yes)?;
        let kernels = Cpu::new(threads);
        let cache = (0..config.layers).map(|_| kernels.buffer(config.context * 2 * config.width)).collect();
        let starts = parameters.into_iter().map(|p| (p.name, p.range.start)).collect();
        Ok(Self { kernels, config, params: values.into(), starts, cache, tokens: vec![] })
    }

    pub fn config(&self) -> &GptConfig {
        &self.config
    }

    /// Elements of the cache.
    pub fn cache_elements(&self) -> usize {
        self.cache.iter().map(|layer| layer.len()).sum()
    }

    /// Reads tokens behind those it has read, and says what may come next: a logit for every token of the vocabulary. Tokens are below the
    /// vocabulary, and there is at least one.
    pub fn next(&mut self, tokens: &[i32]) -> Vec<f64> {
        assert!(!tokens.is_empty(), "there is something to read");
        let context = self.config.context;
        let mut unread = tokens.to_vec();
        if self.tokens.len() + unread.len() > context {
            // The newest half of the context, to have room for as much again.
            let all: Vec<i32> = self.tokens.drain(..).chain(unread).collect();
            unread = all[all.len() - (context / 2).max(1)..].to_vec();
        }
        // An empty cache takes all rows at once; else a row meets all that came before it.
        let (first, rest) = if self.tokens.is_empty() { (&unread[..], &[][..]) } else { unread.split_at(1) };
        let mut last = self.read(first);
        for token in rest {
            last = self.read(std::slice::from_ref(token));
        }
        self.logits(&last)
    }

    fn weight(&self, name: &str) -> BufSlice<'_, HostBuf<T>> {
        BufSlice { buf: &self.params, start: self.starts[name] }
    }

    /// The last row's hidden state.
    fn read(&mut self, tokens: &[i32]) -> HostBuf<T> {
        let (rows, width, before) = (tokens.len(), self.config.width, self.tokens.len());
        let mut h = self.kernels.buffer(rows * width);
        let lookup = Lookup { ids: tokens, held: 0..self.config.vocab, cols: width };
        self.kernels.lookup(&lookup, self.weight("wte.weight"), false, &mut h);
        let positions: Vec<i32> = (before..before + rows).map(|at| at as i32).collect();
        let lookup = Lookup { ids: &positions, held: 0..self.config.context, cols: width };
        self.kernels.lookup(&lookup, self.weight("wpe.weight"), true, &mut h);
        self.tokens.extend_from_slice(tokens);
        for layer in 0..self.config.layers {
            let name = |part: &str| format!("h.{layer}.{part}");
            let branch = self.attention(layer, rows, &h, &name);
            self.kernels.add(&branch, (&mut h).into());
            let branch = self.feed_forward(rows, &h, &name);
            self.kernels.add(&branch, (&mut h).into());
        }
        let mut last = self.kernels.buffer(width);
        let from = BufSlice { buf: &h, start: (rows - 1) * width };
        self.kernels.copy(from, (&mut last).into(), width);
        last
    }

    fn attention(
        &mut self,
        layer: usize,
        rows: usize,
        h: &HostBuf<T>,
        name: &dyn Fn(&str) -> String,
    ) -> HostBuf<T> {
        let GptConfig { width, heads, .. } = self.config;
        let x = self.norm(rows, h, &name("ln_1"));
        let projected = self.linear(rows, (width, 3 * width), &x, &name("attn.c_attn"));
        let (mut q, before) = (self.kernels.buffer(rows * width), self.tokens.len() - rows);
        for row in 0..rows {
            let at = |start| BufSlice { buf: &projected, start };
            self.kernels.copy(at(3 * row * width), PartMut { buf: &mut q, start: row * width }, width);
            let kept = PartMut { buf: &mut self.cache[layer], start: (before + row) * 2 * width };
            self.kernels.copy(at((3 * row + 1) * width), kept, 2 * width);
        }
        let size = Attention {
            samples: 1,
            heads,
            kv_heads: heads,
            head_dim: width / heads,
            queries: rows,
            keys: self.tokens.len(),
            causal: rows > 1,
            dropout: None,
        };
        let (mut y, mut lse) = (self.kernels.buffer(rows * width), self.kernels.buffer(rows * heads));
        self.kernels.attention(&size, Projected::Apart { q: &q, kv: &self.cache[layer] }, &mut y, &mut lse);
        self.linear(rows, (width, width), &y, &name("attn.c_proj"))
    }

    fn feed_forward(&self, rows: usize, h: &HostBuf<T>, name: &dyn Fn(&str) -> String) -> HostBuf<T> {
        let GptConfig { width, hidden, .. } = self.config;
        let x = self.norm(rows, h, &name("ln_2"));
        let up = self.linear(rows, (width, hidden), &x, &name("mlp.c_fc"));
        let mut active = self.kernels.buffer(rows * hidden);
        self.kernels.activate(Activation::Gelu, &up, &mut active);
        self.linear(rows, (hidden, width), &active, &name("mlp.c_proj"))
    }

    fn logits(&self, last: &HostBuf<T>) -> Vec<f64> {
        let GptConfig { width, vocab, tied, .. } = self.config;
        let x = self.norm(1, last, "ln_f");
        let table = self.weight(if tied { "wte.weight" } else { "lm_head.weight" });
        let mut logits = self.kernels.buffer(vocab);
        let gemm = Gemm::new(1, vocab, width).b_transposed();
        self.kernels.gemm(gemm, (&x).into(), table, None, (&mut logits).into());
        self.kernels.download(&logits).into_iter().map(T::to_f64).collect()
    }

    fn norm(&self, rows: usize, x: &HostBuf<T>, name: &str) -> HostBuf<T> {
        let size = Rows { rows, cols: self.config.width };
        let (mut y, mut stats) = (self.kernels.buffer(size.len()), self.kernels.buffer(2 * rows));
        let weights = NormWeights {
            gamma: self.weight(&format!("{name}.weight")),
            beta: self.weight(&format!("{name}.bias")),
            epsilon: self.config.epsilon,
        };
        self.kernels.layer_norm(size, x, weights, Normed { y: &mut y, stats: &mut stats });
        y
    }

    fn linear(&self, rows: usize, (ins, outs): (usize, usize), x: &HostBuf<T>, name: &str) -> HostBuf<T> {
        let mut y = self.kernels.buffer(rows * outs);
        let (weight, bias) = (self.weight(&format!("{name}.weight")), self.weight(&format!("{name}.bias")));
        self.kernels.gemm(Gemm::new(rows, outs, ins), x.into(), weight, Some(bias), (&mut y).into());
        y
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
