//! Ops by the tags of their messages.
//!
//! Tags mostly follow each other. Then a table is searched in no time, and the next entry is in the cache already: with
//! ten thousand small messages, looking tags up in a hash map took as long as copying the messages.

use rustc_hash::FxHashMap;

/// A table has at most this many places for each of its ops, and some more.
const MAX_SPARSE: usize = 4;
const SOME_MORE: usize = 64;
const NO_OP: u32 = u32::MAX;

#[derive(Debug)]
pub(crate) enum ByTag {
    /// Place `i` is of tag `first + i`.
    Table {
        first: u32,
        ops: Vec<u32>,
    },
    Map(FxHashMap<u32, u32>),
}

impl ByTag {
    /// From pairs of tag and op. Of two with the same tag, the last counts.
    pub fn new(pairs: &[(u32, u32)]) -> Self {
        let tags = || pairs.iter().map(|(tag, _)| *tag);
        let (first, last) = (tags().min().unwrap_or(0), tags().max().unwrap_or(0));
        let span = (last - first) as usize + 1;
        if span > MAX_SPARSE * pairs.len() + SOME_MORE {
            return Self::Map(pairs.iter().copied().collect());
        }
        let mut ops = vec![NO_OP; span];
        for (tag, op) in pairs {
            ops[(tag - first) as usize] = *op;
        }
        Self::Table { first, ops }
    }

    pub fn get(&self, tag: u32) -> Option<u32> {
        match self {
            Self::Table { first, ops } => {
                let place = tag.checked_sub(*first)? as usize;
                ops.get(place).copied().filter(|op| *op != NO_OP)
            }
            Self::Map(map) => map.get(&tag).copied(),
        }
    }

    /// All ops, in no order that means anything.
    pub fn ops(&self) -> Vec<u32> {
        match self {
            Self::Table { ops, .. } => ops.iter().copied().filter(|op| *op != NO_OP).collect(),
            Self::Map(map) => map.values().copied().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Dense or far apart, it finds what a hash map finds.
        #[test]
        fn it_is_a_map(
            tags in prop::collection::vec(0u32..300, 0..200),
            first in prop_oneof![Just(0u32), any::<u32>()],
            stride in prop_oneof![Just(1u32), 1u32..1_000_000],
            asked in prop::collection::vec(any::<u32>(), 20),
        ) {
            let tag = |t: &u32| first.wrapping_add(t.wrapping_mul(stride));
            let pairs: Vec<(u32, u32)> = tags.iter().map(tag).zip(0..).collect();
            let (found, expected) = (ByTag::new(&pairs), pairs.iter().copied().collect::<FxHashMap<_, _>>());
            for tag in pairs.iter().map(|(tag, _)| *tag).chain(asked).chain([0, first, u32::MAX]) {
                prop_assert_eq!(found.get(tag), expected.get(&tag).copied());
            }
            let (mut ops, mut expected) = (found.ops(), expected.into_values().collect::<Vec<_>>());
            ops.sort_unstable();
            expected.sort_unstable();
            prop_assert_eq!(ops, expected);
        }
    }
}
