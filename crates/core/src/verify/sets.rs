//! Which parts of a sum some memory holds, as ranges: rings and trees add up neighbours, so there are few.

/// A set of parts: ranges that rise, do not touch and are not empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PartSet {
    One(u32, u32),
    Many(Box<[(u32, u32)]>),
}

impl PartSet {
    pub fn single(part: u32) -> Self {
        Self::One(part, part + 1)
    }

    fn ranges(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        let (one, many) = match self {
            Self::One(start, end) => (Some((*start, *end)), &[][..]),
            Self::Many(ranges) => (None, &ranges[..]),
        };
        one.into_iter().chain(many.iter().copied())
    }

    /// The union of two sets, or the first part that is in both.
    pub fn union(&self, other: &Self) -> Result<Self, u32> {
        // Neighbours, as most are.
        if let (&Self::One(start, end), &Self::One(other, other_end)) = (self, other)
            && (end == other || other_end == start)
        {
            return Ok(Self::One(start.min(other), end.max(other_end)));
        }
        let mut all: Vec<(u32, u32)> = self.ranges().chain(other.ranges()).collect();
        all.sort_unstable();
        let mut joined: Vec<(u32, u32)> = Vec::with_capacity(all.len());
        for (start, end) in all {
            match joined.last_mut() {
                Some(last) if start < last.1 => return Err(start),
                Some(last) if start == last.1 => last.1 = end,
                _ => joined.push((start, end)),
            }
        }
        Ok(match joined[..] {
            [(start, end)] => Self::One(start, end),
            _ => Self::Many(joined.into()),
        })
    }

    /// The first of the parts `0..parts` that is not in the set.
    pub fn first_missing(&self, parts: u32) -> Option<u32> {
        let (start, end) = self.ranges().next().unwrap_or((0, 0));
        let first = if start > 0 { 0 } else { end };
        (first < parts).then_some(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn set(parts: &BTreeSet<u32>) -> Option<PartSet> {
        let singles = parts.iter().map(|p| PartSet::single(*p));
        singles.reduce(|a, b| a.union(&b).expect("single parts are disjoint"))
    }

    proptest! {
        #[test]
        fn agrees_with_sets_of_numbers(a in prop::collection::btree_set(0u32..12, 1..8), b in prop::collection::btree_set(0u32..12, 1..8)) {
            let common = a.intersection(&b).next();
            let union = set(&a).unwrap().union(&set(&b).unwrap());
            match common {
                Some(common) => prop_assert_eq!(union, Err(*common)),
                None => {
                    let all: BTreeSet<u32> = a.union(&b).copied().collect();
                    let missing = (0..12).find(|p| !all.contains(p));
                    prop_assert_eq!(union.as_ref().unwrap().first_missing(12), missing);
                    prop_assert_eq!(union.ok(), set(&all));
                }
            }
        }
    }
}
