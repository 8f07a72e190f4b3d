//! Several streams, drawn from by weight.
//!
//! Weights are whole numbers. Of every `sum` samples in a row, each part has exactly its weight, in an order that changes from block to block; so which sample of which
//! part is the n-th is a matter of arithmetic, as it has to be for ranks that read here and there and runs that go on:
//!
//! ```text
//! weights 3, 1    a b a a | a a a b | b a a a | ..
//! sample          0 1 2 3   4 5 6 7   8 ..
//! of its part     0 0 1 2   3 4 5 1   2 ..
//! ```

use std::ops::Range;

use super::order::Order;
use super::tokens::Tokens;
use super::{Column, DataError, DataSet, Feature, Kind, Split};

/// See the module.
#[derive(Debug)]
pub struct Mixture {
    parts: Vec<(Tokens, u64)>,
    /// Which place of a block a sample has.
    order: Order,
    sum: u64,
}

/// A block is a shuffled table of this many samples at most.
const MOST: u64 = 1 << 32;

impl Mixture {
    pub fn new(parts: Vec<(Tokens, u64)>, seed: u64) -> Result<Self, DataError> {
        let sum = parts.iter().try_fold(0u64, |sum, (_, weight)| sum.checked_add(*weight));
        match sum.filter(|sum| (1..=MOST).contains(sum) && parts.iter().all(|(_, weight)| *weight > 0)) {
            // Apart from the order inside of the parts.
            Some(sum) => Ok(Self { parts, order: Order::new(seed ^ 0x6d69_7874, sum), sum }),
            None => {
                let weights: Vec<String> = parts.iter().map(|(_, weight)| weight.to_string()).collect();
                let hint = "use small whole numbers, such as [7, 3]";
                Err(DataError::value("weights", weights.join(", "), "samples cannot be shared out so", hint))
            }
        }
    }

    /// Which sample of which part.
    fn place(&self, sample: u64) -> (usize, u64) {
        let (block, mut at) = (sample / self.sum, self.order.item(sample));
        for (i, (_, weight)) in self.parts.iter().enumerate() {
            if at < *weight {
                return (i, block * weight + at);
            }
            at -= weight;
        }
        unreachable!("places are below the sum of the weights")
    }
}

impl DataSet for Mixture {
    /// Those of the first; of ids, as many classes as any part has.
    fn features(&self) -> Vec<Feature> {
        let mut all = self.parts.iter().map(|(part, _)| part.features());
        let mut features = all.next().unwrap_or_default();
        for other in all {
            for (feature, other) in features.iter_mut().zip(other) {
                if let (Kind::Ids { classes }, Kind::Ids { classes: more }) = (&mut feature.kind, other.kind)
                {
                    *classes = (*classes).max(more);
                }
            }
        }
        features
    }

    /// Until the first part has been seen whole.
    fn num_samples(&self, split: Split) -> Option<u64> {
        let rounds = |(part, weight): &(Tokens, u64)| match part.num_samples(split) {
            Some(0) => 0,
            samples => samples.map_or(u64::MAX, |n| (n / weight).max(1)),
        };
        Some(self.parts.iter().map(rounds).min().unwrap_or(0).saturating_mul(self.sum))
    }

    fn read(&self, port: &str, samples: Range<u64>, split: Split) -> Result<Column, DataError> {
        let mut ids = vec![];
        for sample in samples {
            let (part, at) = self.place(sample);
            match self.parts[part].0.read(port, at..at + 1, split)? {
                Column::Ids(more) => ids.extend(more),
                Column::Real(_) => unreachable!("tokens are ids"),
            }
        }
        Ok(Column::Ids(ids))
    }

    fn describe(&self) -> String {
        let part =
            |(part, weight): &(Tokens, u64)| format!("{weight} of {} from {}", self.sum, part.describe());
        self.parts.iter().map(part).collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::super::text::{Encoder, Text};
    use super::super::tokens::{Source, WindowSpec};
    use super::*;

    fn stream(letter: char, folder: &std::path::Path) -> Tokens {
        let path = folder.join(letter.to_string());
        std::fs::write(&path, letter.to_string().repeat(400)).unwrap();
        let text = Text::read(&[path], &Encoder::bytes(&Default::default()).unwrap(), 1).unwrap();
        Tokens::new(Source::Text(text), WindowSpec { context: 4, validation_share: 0.1, seed: 3 }).unwrap()
    }

    #[test]
    fn every_block_has_its_shares_and_every_sample_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let parts = || ['a', 'b', 'c'].map(|letter| stream(letter, folder.path()));
        let weights = [5, 2, 1];
        let mixture = Mixture::new(parts().into_iter().zip(weights).collect(), 7).unwrap();
        let mut next = [0u64; 3];
        let mut orders = std::collections::BTreeSet::new();
        for block in 0..20u64 {
            let places: Vec<(usize, u64)> = (block * 8..block * 8 + 8).map(|n| mixture.place(n)).collect();
            for (part, weight) in weights.iter().enumerate() {
                let mut own: Vec<u64> =
                    places.iter().filter(|(p, _)| *p == part).map(|(_, at)| *at).collect();
                own.sort_unstable();
                assert_eq!(
                    own,
                    (next[part]..next[part] + weight).collect::<Vec<_>>(),
                    "each once, none left out"
                );
                next[part] += weight;
            }
            orders.insert(places.iter().map(|(part, _)| *part).collect::<Vec<_>>());
        }
        assert!(orders.len() > 10, "another order in every block");
        let Column::Ids(ids) = mixture.read("tokens", 0..80, Split::Training).unwrap() else { panic!() };
        let share = |letter: u8| ids.iter().filter(|id| **id == i32::from(letter)).count();
        assert_eq!([b'a', b'b', b'c'].map(share), [200, 80, 40]);
        assert!(mixture.num_samples(Split::Validation).unwrap() >= 8);
        assert!(Mixture::new(parts().into_iter().zip([1, 0, 1]).collect(), 7).is_err());
    }
}
