//! A synthetic language whose entropy is known to the last digit.
//!
//! Words follow each other as in a Markov chain of order 2: of the last word everything matters, of the one before only which of a few
//! groups it is in (with one group, the order is 1). A context allows a handful of words, with uneven chances:
//!
//! ```text
//! .. the one before   last     next
//!    group 0          17   ->  18 (41 %)  3 (30 %)  59 (20 %)  40 (9 %)
//!    group 1          17   ->  18 (7 %)  22 (64 %)  5 (11 %)  30 (18 %)
//! ```
//!
//! Chances are multiples of 2^-32, which is how they are drawn, so the entropy is that of the very samples. A sample is drawn from
//! (seed, its number) alone; it starts anywhere in a text that never began.

use std::collections::BTreeMap;
use std::ops::Range;

use super::order::Order;
use super::{Column, DataError, DataSet, Feature, Kind, Split, no_port};
use crate::kernels::random::Stream;

/// Which language.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LanguageSpec {
    /// Words, from 2.
    pub vocab: usize,
    /// Groups of the word before the last; 1: only the last word matters.
    pub groups: usize,
    /// Words that may follow a context.
    pub branching: usize,
    pub seed: u64,
}

impl Default for LanguageSpec {
    /// A small GPT learns it within minutes, and not without attention.
    fn default() -> Self {
        Self { vocab: 64, groups: 2, branching: 8, seed: 0 }
    }
}

/// A language, in samples of `context` words and the words that follow them.
#[derive(Debug, Clone)]
pub struct Language {
    spec: LanguageSpec,
    context: usize,
    /// For a state (group of the word before, word): words that may follow, and below which draw each is the one.
    next: Vec<Vec<(u32, u64)>>,
    /// How often a text is in a state.
    stationary: Vec<f64>,
    /// Below which draw a sample starts in each state.
    starts: Vec<u64>,
}

/// Of draws.
const ALL: u64 = 1 << 32;

impl Language {
    pub fn new(spec: LanguageSpec, context: usize) -> Result<Self, DataError> {
        check(&spec, context)?;
        let next: Vec<_> = (0..spec.groups * spec.vocab).map(|state| followers(&spec, state)).collect();
        let stationary = stationary(&spec, &next);
        let starts = thresholds(&stationary);
        Ok(Self { spec, context, next, stationary, starts })
    }

    /// Nats a word, in a text without beginning: no model predicts better.
    pub fn entropy(&self) -> f64 {
        let each = self.stationary.iter().zip(&self.next);
        each.map(|(p, next)| p * entropy(chances(next))).sum()
    }

    /// Nats of a word after one whose own predecessor is unknown: that of a sample's first word is.
    fn entropy_after_one(&self) -> f64 {
        let LanguageSpec { vocab, groups, .. } = self.spec;
        let after = |word: usize| {
            let states = (0..groups).map(|group| group * vocab + word);
            let total: f64 = states.clone().map(|s| self.stationary[s]).sum();
            let mut mixed: BTreeMap<u32, f64> = BTreeMap::new();
            for state in states {
                chances(&self.next[state])
                    .zip(&self.next[state])
                    .for_each(|(p, (to, _))| *mixed.entry(*to).or_default() += self.stationary[state] * p);
            }
            if total > 0.0 { total * entropy(mixed.into_values().map(|p| p / total)) } else { 0.0 }
        };
        (0..vocab).map(after).sum()
    }

    /// The words of a sample: its context, and one more.
    fn sample(&self, number: u64, split: Split) -> Vec<u32> {
        let stream = Stream::named(self.spec.seed, sampled(split));
        let draws = self.context as u64 + 1;
        let draw = |i: usize| u64::from(stream.at(number.wrapping_mul(draws).wrapping_add(i as u64)));
        let mut state = self.starts.partition_point(|&end| end <= draw(0));
        let mut words = vec![(state % self.spec.vocab) as u32];
        for i in 1..=self.context {
            let next = &self.next[state];
            let (word, _) = next[next.partition_point(|(_, end)| *end <= draw(i))];
            state = self.spec.follow(state, word as usize);
            words.push(word);
        }
        words
    }
}

impl LanguageSpec {
    /// The state after a word.
    fn follow(&self, state: usize, word: usize) -> usize {
        let last = state % self.vocab;
        (last % self.groups) * self.vocab + word
    }
}

impl DataSet for Language {
    fn features(&self) -> Vec<Feature> {
        let kind = Kind::Ids { classes: self.spec.vocab };
        ["tokens", "targets"].map(|port| Feature { port, dims: vec![self.context], kind }).to_vec()
    }

    fn num_samples(&self, _: Split) -> Option<u64> {
        None
    }

    fn read(&self, port: &str, samples: Range<u64>, split: Split) -> Result<Column, DataError> {
        let shift = match port {
            "tokens" => 0,
            "targets" => 1,
            _ => return Err(no_port(self, port)),
        };
        let words = |n: u64| self.sample(n, split).into_iter().skip(shift).take(self.context);
        Ok(Column::Ids(samples.flat_map(words).map(|word| word as i32).collect()))
    }

    fn reachable_loss(&self) -> Option<f64> {
        let context = self.context as f64;
        Some((self.entropy_after_one() + (context - 1.0) * self.entropy()) / context)
    }

    fn describe(&self) -> String {
        let LanguageSpec { vocab, groups, branching, seed } = self.spec;
        format!("the language of {vocab} words, {groups} groups, {branching} followers and seed {seed}")
    }
}

fn sampled(split: Split) -> &'static str {
    match split {
        Split::Training => "language/training",
        Split::Validation => "language/validation",
    }
}

fn check(spec: &LanguageSpec, context: usize) -> Result<(), DataError> {
    /// Of all contexts together: 64 MiB of tables.
    const MOST_FOLLOWERS: usize = 1 << 22;
    let LanguageSpec { vocab, groups, branching, .. } = *spec;
    if !(2..=1 << 20).contains(&vocab) {
        let reason = "a language has from 2 to 2^20 words";
        return Err(DataError::value("vocab", vocab, reason, "64 is a good start"));
    }
    if groups == 0 || groups > vocab {
        let reason = format!("there are from 1 to {vocab} groups of {vocab} words");
        return Err(DataError::value("groups", groups, reason, "use 1 for a chain of order 1, or 2"));
    }
    if branching == 0 || branching > vocab {
        let reason = format!("a context is followed by 1 to {vocab} words");
        return Err(DataError::value("branching", branching, reason, "8 is a good start"));
    }
    if groups * vocab > MOST_FOLLOWERS / branching {
        let reason = format!("{groups} groups × {vocab} words × {branching} followers are more than 2^22");
        return Err(DataError::value("groups", groups, reason, "make one of the three smaller"));
    }
    if context == 0 {
        return Err(DataError::value("context", context, "a sample has words", "use 1 or more"));
    }
    Ok(())
}

/// The words that may follow a state, and their draws. The next word of the vocabulary is always among them, so that all of a text can be
/// reached from anywhere and there is one stationary distribution.
fn followers(spec: &LanguageSpec, state: usize) -> Vec<(u32, u64)> {
    let stream = Stream::named(spec.seed, &format!("language/state {state}"));
    let next = (state % spec.vocab + 1) % spec.vocab;
    // The state's own shuffle of all words.
    let vocab = spec.vocab as u64;
    let shuffled = Order::new(spec.seed ^ 0x1a4_9a6e, vocab);
    let others = (state as u64 * vocab..(state as u64 + 1) * vocab).map(|i| shuffled.item(i) as usize);
    let others = others.filter(|word| *word != next).take(spec.branching - 1);
    let words: Vec<usize> = std::iter::once(next).chain(others).collect();
    // Exponential draws, divided by their sum, are uniform over all distributions; the shift keeps rare words from being too rare to learn.
    let weight = |i: usize| 0.1 - ((f64::from(stream.at(i as u64)) + 1.0) / ALL as f64).ln();
    let weights: Vec<f64> = (0..words.len()).map(weight).collect();
    let total: f64 = weights.iter().sum();
    let ends = thresholds(&weights.iter().map(|w| w / total).collect::<Vec<_>>());
    words.into_iter().map(|word| word as u32).zip(ends).collect()
}

/// Below which of 2^32 draws each of several outcomes is the one.
fn thresholds(chances: &[f64]) -> Vec<u64> {
    let mut sum = 0.0;
    let mut ends: Vec<u64> = chances
        .iter()
        .map(|p| {
            sum += p;
            ((sum * ALL as f64) as u64).min(ALL)
        })
        .collect();
    if let Some(last) = ends.last_mut() {
        *last = ALL;
    }
    ends
}

fn chances(next: &[(u32, u64)]) -> impl Iterator<Item = f64> {
    let starts = std::iter::once(0).chain(next.iter().map(|(_, end)| *end));
    next.iter().zip(starts).map(|((_, end), start)| (end - start) as f64 / ALL as f64)
}

fn entropy(chances: impl Iterator<Item = f64>) -> f64 {
    chances.filter(|p| *p > 0.0).map(|p| -p * p.ln()).sum()
}

/// How often each state occurs, by power iteration. Half of every state stays where it is: that changes no stationary distribution, and
/// keeps a periodic chain from swinging forever.
fn stationary(spec: &LanguageSpec, next: &[Vec<(u32, u64)>]) -> Vec<f64> {
    let mut now = vec![1.0 / next.len() as f64; next.len()];
    for _ in 0..10_000 {
        let mut then: Vec<f64> = now.iter().map(|p| 0.5 * p).collect();
        for (state, next) in next.iter().enumerate() {
            chances(next)
                .zip(next)
                .for_each(|(p, (word, _))| then[spec.follow(state, *word as usize)] += 0.5 * p * now[state]);
        }
        let moved: f64 = now.iter().zip(&then).map(|(a, b)| (a - b).abs()).sum();
        now = then;
        if moved < 1e-14 {
            break;
        }
    }
    now
}

#[cfg(test)]
mod tests {
    use super::*;

    fn language(vocab: usize, groups: usize, branching: usize, seed: u64, context: usize) -> Language {
        Language::new(LanguageSpec { vocab, groups, branching, seed }, context).unwrap()
    }

    fn ids(language: &Language, port: &str, samples: Range<u64>, split: Split) -> Vec<i32> {
        match language.read(port, samples, split).unwrap() {
            Column::Ids(ids) => ids,
            other => panic!("{other:?}"),
        }
    }

    /// The chance of a word after two others, straight from the tables.
    fn chance(language: &Language, before: i32, last: i32, word: i32) -> f64 {
        let LanguageSpec { vocab, groups, .. } = language.spec;
        let next = &language.next[before as usize % groups * vocab + last as usize];
        chances(next).zip(next).find(|(_, (to, _))| *to as i32 == word).map_or(0.0, |(p, _)| p)
    }

    #[test]
    fn entropy_is_the_cross_entropy_of_the_true_chances() {
        for (groups, branching, seed) in [(1, 4, 0), (2, 8, 1), (4, 6, 2)] {
            let language = language(64, groups, branching, seed, 500);
            let (mut sum, mut count) = (0.0, 0.0);
            for n in 0..400 {
                let words: Vec<i32> = language.sample(n, Split::Training).iter().map(|w| *w as i32).collect();
                for w in words.windows(3) {
                    sum -= chance(&language, w[0], w[1], w[2]).ln();
                    count += 1.0;
                }
            }
            let (seen, stated) = (sum / count, language.entropy());
            // The deviation of a mean over 200 000 words with a deviation of about 1 nat is 0.0025.
            assert!((seen - stated).abs() < 0.01, "{groups} groups: saw {seen}, stated {stated}");
        }
    }

    #[test]
    fn the_reachable_loss_is_that_of_the_best_guess_at_every_place() {
        let language = language(20, 3, 4, 5, 4);
        let samples = 40_000;
        // How often a word follows a first word, counted: the best a model can know.
        let mut pairs: BTreeMap<(u32, u32), f64> = BTreeMap::new();
        let mut firsts: BTreeMap<u32, f64> = BTreeMap::new();
        let mut sum = 0.0;
        for n in 0..samples {
            let w = language.sample(n, Split::Training);
            *pairs.entry((w[0], w[1])).or_default() += 1.0;
            *firsts.entry(w[0]).or_default() += 1.0;
            sum -= (2..5)
                .map(|i| chance(&language, w[i - 2] as i32, w[i - 1] as i32, w[i] as i32).ln())
                .sum::<f64>();
        }
        sum -= pairs.iter().map(|((first, _), n)| n * (n / firsts[first]).ln()).sum::<f64>();
        let (seen, stated) = (sum / (4 * samples) as f64, language.reachable_loss().unwrap());
        assert!((seen - stated).abs() < 0.01, "saw {seen}, stated {stated}");
        assert!(stated > language.entropy() + 0.01, "the first place is harder");
        let order_1 = super::tests::language(20, 1, 4, 5, 4);
        assert!((order_1.reachable_loss().unwrap() - order_1.entropy()).abs() < 1e-12);
    }

    /// Solved by brute force: the chain is run for long from every state, and all of them agree.
    #[test]
    fn the_stationary_distribution_is_reached_from_anywhere() {
        let language = language(9, 2, 3, 3, 8);
        let states = language.next.len();
        for start in 0..states {
            let mut now = vec![0.0; states];
            now[start] = 1.0;
            let mut mean = vec![0.0; states];
            for _ in 0..4000 {
                let mut then = vec![0.0; states];
                for (state, next) in language.next.iter().enumerate() {
                    for (p, (word, _)) in chances(next).zip(next) {
                        then[language.spec.follow(state, *word as usize)] += p * now[state];
                    }
                }
                now = then;
                mean.iter_mut().zip(&now).for_each(|(m, p)| *m += p / 4000.0);
            }
            let off = mean.iter().zip(&language.stationary).map(|(a, b)| (a - b).abs()).sum::<f64>();
            assert!(off < 5e-3, "from state {start}: {off}");
        }
    }

    #[test]
    fn a_sample_is_the_same_whoever_reads_it() {
        let language = language(64, 2, 8, 0, 16);
        let all = ids(&language, "tokens", 0..10, Split::Training);
        assert_eq!(all[3 * 16..5 * 16], ids(&language, "tokens", 3..5, Split::Training));
        let targets = ids(&language, "targets", 3..4, Split::Training);
        assert_eq!(all[3 * 16 + 1..4 * 16], targets[..15]);
        assert_ne!(all, ids(&language, "tokens", 0..10, Split::Validation));
        let far = ids(&language, "tokens", u64::MAX - 1..u64::MAX, Split::Training);
        assert_eq!(far.len(), 16, "no number is too large");
    }

    #[test]
    fn words_follow_only_where_they_may() {
        let language = language(30, 2, 4, 9, 200);
        let words = language.sample(7, Split::Validation);
        let words: Vec<i32> = words.iter().map(|w| *w as i32).collect();
        assert!(words.windows(3).all(|w| chance(&language, w[0], w[1], w[2]) > 0.0));
        assert!(language.next.iter().all(|next| {
            let mut to: Vec<u32> = next.iter().map(|(word, _)| *word).collect();
            to.sort_unstable();
            to.dedup();
            to.len() == 4 && (chances(next).sum::<f64>() - 1.0).abs() < 1e-12
        }));
    }

    #[test]
    fn refuses_what_is_no_language() {
        let refused = |vocab, groups, branching, context| {
            let spec = LanguageSpec { vocab, groups, branching, seed: 0 };
            Language::new(spec, context).unwrap_err().to_string()
        };
        assert!(refused(1, 1, 1, 8).starts_with("vocab = 1: "));
        assert!(refused(8, 9, 1, 8).starts_with("groups = 9: "));
        assert!(refused(8, 0, 1, 8).starts_with("groups = 0: "));
        assert!(refused(8, 2, 9, 8).starts_with("branching = 9: "));
        assert!(refused(4096, 1024, 2, 8).contains("are more than 2^22"));
        assert!(refused(8, 2, 2, 0).starts_with("context = 0: "));
    }
}
