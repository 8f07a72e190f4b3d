//! Which sample is the n-th: a permutation of every epoch, computed and not stored.
//!
//! A Feistel network is a bijection whatever its round function is: it splits a number's bits in two halves, and adds to each half in turn a
//! hash of the other. Over the smallest power of four that holds all items it also reaches numbers that are none; those are walked through
//! again until an item comes out ("cycle walking", Black & Rogaway 2002), fewer than four times on average.
//!
//! ```text
//! sample   0 1 2 3 4 | 5 6 7 8 9 | ..
//! epoch        0     |     1     |
//! item     3 0 4 1 2 | 1 4 0 2 3 | ..
//! ```

use crate::kernels::random::Stream;

/// Rounds of the network; four are known to look random (Luby & Rackoff 1988), the others are spare.
const ROUNDS: u32 = 6;

/// Apart from the places in a model that draw random numbers.
const SITE: u32 = 0x5aff_1e00;

/// A shuffled order over `len` items that changes from epoch to epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    seed: u64,
    len: u64,
    /// Bits of a half.
    bits: u32,
}

impl Order {
    /// # Panics
    /// Without items, or with more than 2^62.
    pub fn new(seed: u64, len: u64) -> Self {
        assert!((1..=1 << 62).contains(&len), "an order over {len} items");
        let bits = (64 - (len - 1).leading_zeros()).div_ceil(2).max(1);
        Self { seed, len, bits }
    }

    /// The item of a sample, numbers of which go on from epoch to epoch.
    pub fn item(&self, sample: u64) -> u64 {
        let epoch = sample / self.len;
        let mut at = sample % self.len;
        loop {
            at = self.network(epoch, at);
            if at < self.len {
                return at;
            }
        }
    }

    fn network(&self, epoch: u64, at: u64) -> u64 {
        let mask = (1u64 << self.bits) - 1;
        let (mut left, mut right) = (at >> self.bits, at & mask);
        for round in 0..ROUNDS {
            let hash = Stream::new(self.seed, epoch, SITE + round).block(right)[0];
            (left, right) = (right, left ^ (u64::from(hash) & mask));
        }
        left << self.bits | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn epoch(order: &Order, epoch: u64) -> Vec<u64> {
        (epoch * order.len..(epoch + 1) * order.len).map(|n| order.item(n)).collect()
    }

    proptest! {
        #[test]
        fn an_epoch_has_every_item_once(len in 1u64..3000, seed: u64, number in 0u64..1 << 40) {
            let mut items = epoch(&Order::new(seed, len), number % (u64::MAX / len - 1));
            items.sort_unstable();
            prop_assert_eq!(items, (0..len).collect::<Vec<_>>());
        }

        /// The network undone, round by round: it is a bijection on all numbers, however large.
        #[test]
        fn the_network_can_be_undone(len in 1u64..1 << 62, seed: u64, number in 0u64..1000, at: u64) {
            let order = Order::new(seed, len);
            let mask = (1u64 << order.bits) - 1;
            let at = at & (mask << order.bits | mask);
            let out = order.network(number, at);
            let (mut left, mut right) = (out >> order.bits, out & mask);
            for round in (0..ROUNDS).rev() {
                let hash = Stream::new(seed, number, SITE + round).block(left)[0];
                (left, right) = (right ^ (u64::from(hash) & mask), left);
            }
            prop_assert_eq!(left << order.bits | right, at);
        }
    }

    #[test]
    fn epochs_and_seeds_differ() {
        let order = Order::new(7, 1000);
        assert_ne!(epoch(&order, 0), epoch(&order, 1));
        assert_ne!(epoch(&order, 0), epoch(&Order::new(8, 1000), 0));
        assert_eq!(epoch(&order, 3), epoch(&Order::new(7, 1000), 3));
    }

    /// A shuffle leaves about one item in its place, and about half of the neighbours in ascending order.
    #[test]
    fn it_looks_shuffled() {
        for seed in 0..20 {
            let items = epoch(&Order::new(seed, 4096), 0);
            let fixed = items.iter().enumerate().filter(|(i, x)| *i as u64 == **x).count();
            let ascending = items.windows(2).filter(|w| w[0] < w[1]).count();
            assert!(fixed < 10, "{fixed} items stay where they are");
            assert!((1850..2250).contains(&ascending), "{ascending} of 4095 neighbours ascend");
        }
    }
}
