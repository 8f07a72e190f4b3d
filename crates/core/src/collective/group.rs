//! Process groups: any ranks, in any order.

use super::CollectiveError;
use crate::id::Rank;

/// Ranks that act together, in an order: that of their parts in what is gathered or dealt out, and of a sum whose order
/// is fixed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Group {
    ranks: Vec<Rank>,
}

impl Group {
    pub fn new(ranks: Vec<Rank>) -> Result<Self, CollectiveError> {
        let mut sorted = ranks.clone();
        sorted.sort_unstable();
        match sorted.windows(2).find(|w| w[0] == w[1]) {
            _ if ranks.is_empty() => Err(CollectiveError::EmptyGroup),
            Some(pair) => Err(CollectiveError::Repeated(pair[0])),
            None => Ok(Self { ranks }),
        }
    }

    pub fn ranks(&self) -> &[Rank] {
        &self.ranks
    }

    pub fn len(&self) -> usize {
        self.ranks.len()
    }

    /// Never: a group has at least one rank.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// A rank's place in the group.
    pub fn position(&self, rank: Rank) -> Option<usize> {
        self.ranks.iter().position(|r| *r == rank)
    }
}
