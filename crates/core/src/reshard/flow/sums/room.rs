//! What ranks hold besides their tensors, under a limit.
//!
//! A rank has room for so many boxes. Once that many are there, the next one waits until the oldest has left, and takes
//! its place. All boxes fit into any place, so a larger limit never has less room.
//!
//! ```text
//! room for 2     box 0 -> place 0     box 1 -> place 1     box 2, after box 0 was sent on -> place 0
//! ```

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use crate::id::{Rank, TransferId};

/// With room for this many boxes one can arrive while others leave.
pub(super) const BOXES_IN_ROOM: u64 = 4;

#[derive(Debug)]
pub(super) struct Room {
    /// How many boxes fit on a rank.
    places: u64,
    /// By rank: how many places have been used, and the transfers that free them, oldest first.
    ranks: FxHashMap<Rank, (u64, VecDeque<TransferId>)>,
}

impl Room {
    pub(super) fn new(limit: u64, largest_box: u64) -> Self {
        Self { places: (limit / largest_box.max(1)).max(1), ranks: FxHashMap::default() }
    }

    /// A place for a box at a rank: `None` if one was never used, else the transfer that frees it.
    pub(super) fn take(&mut self, rank: Rank) -> Option<TransferId> {
        let (used, leaving) = self.ranks.entry(rank).or_default();
        if *used < self.places {
            *used += 1;
            return None;
        }
        leaving.pop_front()
    }

    /// A box leaves a rank with this transfer.
    pub(super) fn leave(&mut self, rank: Rank, by: TransferId) {
        self.ranks.entry(rank).or_default().1.push_back(by);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_handed_on_in_order() {
        let mut room = Room::new(10, 4);
        assert_eq!(room.take(Rank(0)), None);
        room.leave(Rank(0), TransferId(7));
        assert_eq!(room.take(Rank(0)), None);
        room.leave(Rank(0), TransferId(8));
        assert_eq!((room.take(Rank(0)), room.take(Rank(0))), (Some(TransferId(7)), Some(TransferId(8))));
        assert_eq!(room.take(Rank(1)), None);
    }
}
