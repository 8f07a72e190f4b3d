//! How often to look for news before sleeping. To be woken costs tens of microseconds on some machines, many times as long as a small
//! message takes; to look costs a processor that somebody else may need.
//!
//! ```text
//! news while looking       look again next time; a look in vain costs half of what it did
//! none                     sleep; then 1, 3, 7 ... times in a row sleep without looking
//! we lost our core         the same, and SHY times at least: others have something to compute
//! more ranks than cores    never look
//! ```
//!
//! We look for about as long as it takes the other side to be woken and to answer: two that talk to each other then find out of sleeping
//! again, whoever fell asleep first. Where fewer than half of the looks find something, they become rare. Ranks that talk all the time and
//! have a core each hardly ever sleep; those that wait for long do at once.

/// Looks before a sleep, of a third to half of a microsecond each.
const LOOKS: u32 = 160;
/// Between two looks we had no core for longer than a look or an interrupt takes.
pub(super) const LOST_NS: u64 = 50_000;
const SHY: u32 = 63;
/// Sleeps in a row without a look, at most.
const LONGEST_REST: u32 = 1023;

/// What came of looking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Looked {
    Found,
    InVain,
    /// Others had our core meanwhile.
    LostCore,
}

#[derive(Debug)]
pub(super) struct Spin {
    /// Whether there can be a core for every rank here.
    has_cores: bool,
    /// Sleeps to come without a look before.
    rest: u32,
    /// Half of what the next look in vain costs.
    price: u32,
}

impl Spin {
    /// For one of so many ranks of a machine, as far as is known.
    pub fn new(ranks: usize, cores: usize) -> Self {
        Self { has_cores: ranks <= cores, rest: 0, price: 0 }
    }

    /// How often to look before this sleep.
    pub fn looks(&mut self) -> u32 {
        if !self.has_cores {
            return 0;
        }
        match self.rest.checked_sub(1) {
            None => LOOKS,
            Some(rest) => {
                self.rest = rest;
                0
            }
        }
    }

    pub fn note(&mut self, looked: Looked) {
        (self.price, self.rest) = match looked {
            Looked::Found => (self.price / 2, 0),
            Looked::InVain => {
                let price = (2 * self.price + 1).min(LONGEST_REST);
                (price, price)
            }
            Looked::LostCore => {
                let price = (2 * self.price + 1).clamp(SHY, LONGEST_REST);
                (price, price)
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of `sleeps` had looks before, if each of them ends so.
    fn looked_at(sleeps: u32, how: Looked) -> u32 {
        let mut spin = Spin::new(2, 2);
        let mut looked = 0;
        for _ in 0..sleeps {
            if spin.looks() > 0 {
                spin.note(how);
                looked += 1;
            }
        }
        looked
    }

    #[test]
    fn who_finds_news_looks_every_time() {
        assert_eq!(looked_at(1000, Looked::Found), 1000);
    }

    #[test]
    fn looks_in_vain_become_rare() {
        // A look, then 1, 3, 7 ... 511 sleeps without one; from then on one in 1,024.
        let soon: u32 = (1..=9).map(|n| 1 << n).sum();
        assert_eq!(looked_at(soon, Looked::InVain), 9);
        assert_eq!(looked_at(soon + 20 * 1024, Looked::InVain), 9 + 20);
        assert_eq!(looked_at(64, Looked::LostCore), 1);
        assert_eq!(looked_at(65, Looked::LostCore), 2);
    }

    /// Of 100,000 sleeps, how many had looks before, where `found` of ten looks find something.
    fn looks_where(found: u32) -> u32 {
        let mut spin = Spin::new(2, 2);
        let mut looked = 0u32;
        for _ in 0..100_000 {
            if spin.looks() > 0 {
                // Spread out: 7 has no divisor in common with 10.
                spin.note(if looked * 7 % 10 < found { Looked::Found } else { Looked::InVain });
                looked += 1;
            }
        }
        looked
    }

    #[test]
    fn it_is_worth_it_where_most_looks_find_something() {
        assert!(looks_where(3) < 1_000, "{}", looks_where(3));
        assert!(looks_where(7) > 50_000, "{}", looks_where(7));
    }

    #[test]
    fn news_ends_the_rest() {
        let mut spin = Spin::new(1, 1);
        (0..5).for_each(|_| spin.note(Looked::InVain));
        while spin.looks() == 0 {}
        spin.note(Looked::Found);
        assert_eq!(spin.looks(), LOOKS);
    }

    #[test]
    fn ranks_without_a_core_each_never_look() {
        let mut spin = Spin::new(4, 2);
        assert!((0..5000).all(|_| spin.looks() == 0));
    }
}
