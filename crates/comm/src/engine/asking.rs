//! How often links are asked that nothing wakes: at once while there is news, then less and less often.
//!
//! ```text
//! questions without news    0 .. 199    200    201    202 ...
//! pause                     none        10 µs  20 µs  40 µs ... 1 ms
//! ```
//!
//! So a busy link costs no sleep, and an idle one about a thousand questions a second.

use crate::transport::Event;

/// Questions in a row without a pause.
const EAGER: u32 = 200;
const FIRST_PAUSE_NS: u64 = 10_000;
const LONGEST_PAUSE_NS: u64 = 1_000_000;

pub(super) struct Asking {
    /// Whether there are such links.
    needed: bool,
    in_vain: u32,
}

impl Asking {
    pub fn new(needed: bool) -> Self {
        Self { needed, in_vain: 0 }
    }

    pub fn is_needed(&self) -> bool {
        self.needed
    }

    pub fn heard(&mut self) {
        self.in_vain = 0;
    }

    /// How long to wait before the next question, at most; none where there is nobody to ask.
    pub fn pause_ns(&mut self) -> Option<u64> {
        if !self.needed {
            return None;
        }
        self.in_vain = self.in_vain.saturating_add(1);
        match self.in_vain.checked_sub(EAGER + 1) {
            None => Some(0),
            Some(doublings) => Some((FIRST_PAUSE_NS << doublings.min(16)).min(LONGEST_PAUSE_NS)),
        }
    }
}

/// Whether the peer is behind one of these events. That memory may be reused shows only that a send has left.
pub(super) fn is_sign_of_life(events: &[Event]) -> bool {
    events.iter().any(|event| !matches!(event, Event::Sent { .. }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_become_rare_until_there_is_news() {
        let mut asking = Asking::new(true);
        let pauses: Vec<u64> = (0..EAGER + 20).filter_map(|_| asking.pause_ns()).collect();
        assert_eq!(pauses[EAGER as usize - 1..][..4], [0, 10_000, 20_000, 40_000]);
        assert_eq!(pauses.last(), Some(&LONGEST_PAUSE_NS));
        asking.heard();
        assert_eq!(asking.pause_ns(), Some(0));
        assert_eq!(Asking::new(false).pause_ns(), None);
    }
}
