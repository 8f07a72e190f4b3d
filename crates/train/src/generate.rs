//! Generating text: one token after the other, with what earlier ones left behind kept in a cache.
//!
//! ```text
//! prompt  t o   b e        all rows at once, causal; keys and values of every layer go into the cache
//! then        _            one row a token, or several: their queries meet the cache
//! ```
//!
//! By the graphs that training has, on one rank or on several ([`Crew`]): along `tp` they share out heads, columns and vocabulary, stages have some of the
//! layers each. A rank's cache holds `2 · its layers · its columns of keys · tokens` numbers. A model ends at its context; whoever goes on drops the older
//! half of what was said, and reads the rest again ([`Generator::next`]).
//!
//! ```text
//!            tp 0     tp 1
//! stage 0    rank 0   rank 1     embed, blocks      h goes down, from each rank to the one below
//! stage 1    rank 2   rank 3     blocks, logits     which are gathered along tp, and told to everybody
//! ```

use std::cell::RefCell;
use std::sync::Arc;

use std::ops::Range;

use crate::chain::{Flow, Model, parameters};
use crate::checkpoint::{Checkpoint, CheckpointError, Convert, StageTarget, hf};
use crate::flat::Flat;
use crate::graph::{Cache, Ctx, Mode, Unit};
use crate::group::{Alone, Group, chunked};
use crate::kernels::cpu::{Cpu, HostBuf};
use crate::kernels::random::Stream;
use crate::kernels::scalar::Scalar;
use crate::kernels::{BufSlice, Buffer, Kernels, PartMut};
use crate::models::ConfigError;
use crate::models::gpt::{Gpt, GptConfig};
use crate::stage::{Microbatch, MicrobatchId, StageError, Value};
use crate::stage_rank::{Along, StageRank};

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
        let likelier = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
        if self.temperature <= 0.0 {
            return order.into_iter().min_by(likelier).unwrap_or(0);
        }
        let most = self.top_k.unwrap_or(usize::MAX).max(1);
        if most < order.len() {
            order.select_nth_unstable_by(most - 1, likelier);
            order.truncate(most);
        }
        order.sort_by(likelier);
        let Some(&first) = order.first() else { return 0 };
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

/// The ranks that talk together, as one of them sees them: rank `stage · tp + its place along tp`.
pub struct Crew<B> {
    pub stage: Along,
    pub tp: Along,
    /// Those of its stage.
    pub along_tp: Arc<dyn Group<B>>,
    /// It and the one that hands over to it; it and the one that it hands over to.
    pub before: Arc<dyn Group<B>>,
    pub behind: Arc<dyn Group<B>>,
    pub everybody: Arc<dyn Group<B>>,
}

impl<B: Buffer> Crew<B> {
    /// One rank with everything.
    pub fn alone() -> Self {
        let (alone, nobody) = (Along { rank: 0, size: 1 }, || Arc::new(Alone));
        let (along_tp, before, behind, everybody) = (nobody(), nobody(), nobody(), nobody());
        Self { stage: alone, tp: alone, along_tp, before, behind, everybody }
    }

    /// The groups of a rank, each by its ranks in order, from whoever makes them: along `tp`, with the one before, with the one behind, and of
    /// everybody. A group of one is nobody's business.
    pub fn new<E>(
        rank: usize,
        tp: usize,
        stages: usize,
        mut group: impl FnMut(&[usize]) -> Result<Arc<dyn Group<B>>, E>,
    ) -> Result<Self, E> {
        let (stage, at) = (rank / tp, rank % tp);
        let mut of = |ranks: Vec<usize>| match ranks.len() {
            0 | 1 => Ok(Arc::new(Alone) as Arc<dyn Group<B>>),
            _ => group(&ranks),
        };
        let along_tp = of((stage * tp..(stage + 1) * tp).collect())?;
        let before = of(if stage > 0 { vec![rank - tp, rank] } else { vec![] })?;
        let behind = of(if stage + 1 < stages { vec![rank, rank + tp] } else { vec![] })?;
        let everybody = of((0..stages * tp).collect())?;
        let (stage, tp) = (Along { rank: stage, size: stages }, Along { rank: at, size: tp });
        Ok(Self { stage, tp, along_tp, before, behind, everybody })
    }

    /// Refuses more ranks than there is work for.
    pub fn check(model: &Gpt, tp: usize, stages: usize) -> Result<(), ConfigError> {
        let units = model.config().layers + 2;
        if !(1..=units).contains(&stages) {
            let reason = format!("the model has {units} units, an embedding, blocks and a head");
            return Err(ConfigError::new("stages", stages, reason, "give every stage at least one"));
        }
        Model::<Cpu<f32>>::check(
            model,
            &crate::chain::Setup { place: place(model, tp, 0)?, ..crate::chain::Setup::alone(1, 0) },
        )
    }

    fn is_last(&self) -> bool {
        self.stage.rank + 1 == self.stage.size
    }

    /// Its units of so many, as evenly as can be.
    fn units(&self, all: usize) -> Range<usize> {
        let at = |stage: usize| stage * all / self.stage.size;
        at(self.stage.rank)..at(self.stage.rank + 1)
    }
}

/// Where a rank is along `tp`, as the model shares out its heads.
fn place(model: &Gpt, tp: usize, rank: usize) -> Result<StageRank, ConfigError> {
    let mesh = format!("S{{tp:{tp}}}").parse();
    let mesh = mesh.map_err(|_| ConfigError::new("tp", tp, "it is no number of ranks", "use 1 or more"))?;
    let place = StageRank::new(Model::<Cpu<f32>>::mesh(model, &mesh), rank);
    place.map_err(|error| ConfigError::new("tp", tp, error.to_string(), "use 1 or more"))
}

/// A decoder that talks. See the module.
pub struct Generator<T: Scalar> {
    kernels: Cpu<T>,
    model: Gpt,
    crew: Crew<HostBuf<T>>,
    place: StageRank,
    units: Range<usize>,
    params: HostBuf<T>,
    cache: RefCell<Cache<HostBuf<T>>>,
    /// Rows that the cache has room for.
    room: usize,
    /// Tokens in the cache.
    tokens: Vec<i32>,
    /// The units that read one token; and those of the piece that was read last.
    one: Vec<Unit<Cpu<T>>>,
    piece: (usize, Vec<Unit<Cpu<T>>>),
}

impl<T: Scalar> Generator<T> {
    /// The model of a checkpoint on one rank, with numbers made as wide as `T`.
    pub fn load(checkpoint: &Checkpoint, threads: usize) -> Result<Self, CheckpointError> {
        Self::load_with(checkpoint, threads, Crew::alone())
    }

    /// A rank's part of it.
    pub fn load_with(
        checkpoint: &Checkpoint,
        threads: usize,
        crew: Crew<HostBuf<T>>,
    ) -> Result<Self, CheckpointError> {
        let wrong = |error: ConfigError| CheckpointError::Model {
            path: checkpoint.folder().to_path_buf(),
            what: error.to_string(),
        };
        let model = Gpt::new(hf::decoder_config(checkpoint)?).map_err(wrong)?;
        checkpoint.check_model(&parameters::<Cpu<T>>(&model))?;
        Crew::<HostBuf<T>>::check(&model, crew.tp.size, crew.stage.size).map_err(wrong)?;
        let place = place(&model, crew.tp.size, crew.tp.rank).map_err(wrong)?;
        let layers = model.config().layers;
        let units = crew.units(layers + 2);
        let (one, parameters) = model.reading(1, units.clone(), &place);
        let mut values = vec![T::ZERO; parameters.last().map_or(0, |p| p.range.end)];
        let target = StageTarget::of_weights(&parameters, &place, &mut values);
        checkpoint.load(&mut [target], Convert::Yes)?;
        let kernels = Cpu::new(threads);
        let cache =
            Cache { layers: (0..layers).map(|_| [(); 2].map(|()| kernels.buffer(0))).collect(), rows: 0 };
        let (cache, params, piece) = (RefCell::new(cache), values.into(), (0, vec![]));
        let (room, tokens) = (0, vec![]);
        Ok(Self { kernels, model, crew, place, units, params, cache, room, tokens, one, piece })
    }

    /// Makes room for so many tokens, or for as many as the model's context has. There is always room for what is read; whoever knows how much it
    /// will be says so before.
    pub fn reserve(&mut self, tokens: usize) {
        let (room, cols) = (tokens.min(self.config().context), self.model.kv_width(&self.place));
        if room <= self.room {
            return;
        }
        let cache = self.cache.get_mut();
        // The first unit is no block.
        let own = cache.layers.iter_mut().enumerate().filter(|(layer, _)| self.units.contains(&(layer + 1)));
        for kept in own.flat_map(|(_, kept)| kept) {
            let mut larger = self.kernels.buffer(room * cols);
            self.kernels.copy((&*kept).into(), (&mut larger).into(), cache.rows * cols);
            *kept = larger;
        }
        self.room = room;
    }

    pub fn config(&self) -> &GptConfig {
        self.model.config()
    }

    /// Elements of this rank's cache.
    pub fn cache_elements(&self) -> usize {
        self.cache.borrow().layers.iter().flatten().map(|kept| kept.len()).sum()
    }

    /// Reads tokens behind those it has read, and says what may come next: a logit for every token of the vocabulary, the same on every rank. Tokens
    /// are below the vocabulary, and there is at least one. All ranks are told the same.
    pub fn next(&mut self, tokens: &[i32]) -> Result<Vec<f64>, StageError> {
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
    fn read(&mut self, tokens: &[i32]) -> Result<Vec<f64>, StageError> {
        let rows = tokens.len();
        if self.tokens.len() + rows > self.room {
            self.reserve((self.tokens.len() + rows).max(2 * self.room));
        }
        if rows > 1 && self.piece.0 != rows {
            self.piece = (rows, self.model.reading(rows, self.units.clone(), &self.place).0);
        }
        let GptConfig { width, vocab, .. } = *self.config();
        let (crew, alike) = (&self.crew, [Arc::clone(&self.crew.along_tp)]);
        let ctx = Ctx {
            kernels: &self.kernels,
            groups: &alike,
            params: Some(Flat::Whole(&self.params)),
            microbatch: Microbatch { id: MicrobatchId(0), step: 0, first_sample: 0, batch_samples: 1 },
            first_sample: 0,
            seed: 0,
            mode: Mode::Evaluate,
            cache: Some(&self.cache),
        };
        let mut flow = Flow::default();
        if crew.stage.rank == 0 {
            flow.put("tokens", Value::Ids(tokens.to_vec()));
        } else {
            for tensor in self.model.stream(self.units.start) {
                let mut values = self.kernels.buffer(rows * width);
                crew.before.all_gather(&mut values, &from_first(rows * width))?;
                flow.put_real(&tensor.name, values);
            }
        }
        for unit in if rows == 1 { &self.one } else { &self.piece.1 } {
            unit.forward(&ctx, &mut flow)?;
        }
        flow.settle(&self.kernels)?;
        self.cache.borrow_mut().rows += rows;
        self.tokens.extend_from_slice(tokens);
        let mut logits = self.kernels.buffer(vocab);
        if crew.is_last() {
            // Those of the last row, of this rank's part of the vocabulary.
            let (said, parts) = (flow.take_real("logits"), chunked(vocab, 1, crew.tp.size));
            let own = parts[crew.tp.rank].clone();
            let from = BufSlice { buf: &said, start: (rows - 1) * own.len() };
            self.kernels.copy(from, PartMut { buf: &mut logits, start: own.start }, own.len());
            crew.along_tp.all_gather(&mut logits, &parts)?;
        } else {
            for tensor in self.model.stream(self.units.end) {
                let mut values = flow.take_real(&tensor.name);
                crew.behind.all_gather(&mut values, &from_first(rows * width))?;
            }
        }
        if crew.stage.size > 1 {
            let first = (crew.stage.size - 1) * crew.tp.size;
            let part = |rank: usize| {
                if rank < first {
                    0..0
                } else if rank == first {
                    0..vocab
                } else {
                    vocab..vocab
                }
            };
            let parts: Vec<_> = (0..crew.stage.size * crew.tp.size).map(part).collect();
            crew.everybody.all_gather(&mut logits, &parts)?;
        }
        Ok(self.kernels.download(&logits).iter().map(|x| x.to_f64()).collect())
    }
}

/// Of two ranks, the first brings everything.
fn from_first(len: usize) -> [Range<usize>; 2] {
    [0..len, len..len]
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
