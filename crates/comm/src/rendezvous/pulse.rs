//! The ranks' pulse: who answers, and by how much their clocks differ from the lobby's.
//!
//! ```text
//! lobby  t0 ── ping ──▶            rank        a few times a second, and a few at once in the beginning
//!        t3 ◀── pong: t1, t2 ──
//!
//! offset  ((t1 − t0) + (t2 − t3)) / 2          the rank's clock less the lobby's
//! error   ((t3 − t0) − (t2 − t1)) / 2          at most: half of what both ways took together
//! ```
//!
//! The answer that took the shortest time says most. It grows old, as no two clocks run at the same speed.
//!
//! A rank answers from a thread that does nothing else, so one that is busy still answers; one that was stopped, or whose
//! host was cut off, does not. Silence counts only while the lobby itself was there to listen.

use std::collections::{BTreeMap, BTreeSet};

use crossmesh_core::id::Rank;

use crate::clock::ClockOffset;

/// Between two pings.
pub const PING_NS: u64 = 200_000_000;
/// Answers that are asked for one behind the other, before the ranks start to work.
const FIRST_PINGS: u32 = 16;
/// Missing so many answers is a sign that something is wrong, where there are others.
pub const HUSHED_NS: u64 = 3 * PING_NS;
/// If nobody listened for so long, the silence was ours.
const AWAY_NS: u64 = 500_000_000;
/// How fast two clocks drift apart: 50 µs a second, more than any oscillator that machines are sold with.
const DRIFT: f64 = 50e-6;

/// A ping that came back: when it left, was received and answered there, and was received here.
#[derive(Debug, Clone, Copy)]
pub struct RoundTrip {
    pub sent_ns: u64,
    pub there_ns: u64,
    pub answered_ns: u64,
    pub back_ns: u64,
}

impl RoundTrip {
    fn offset(self) -> ClockOffset {
        let ahead = |a: u64, b: u64| i128::from(a) - i128::from(b);
        let sum = ahead(self.there_ns, self.sent_ns) + ahead(self.answered_ns, self.back_ns);
        let way = ahead(self.back_ns, self.sent_ns) - ahead(self.answered_ns, self.there_ns);
        // Half a nanosecond is lost in each division.
        let error_ns = u64::try_from(way / 2).unwrap_or(0) + 1;
        ClockOffset { offset_ns: i64::try_from(sum / 2).unwrap_or(0), error_ns }
    }
}

/// What is known of one rank.
#[derive(Debug, Clone, Copy)]
struct Beat {
    heard_ns: u64,
    answers: u32,
    best: Option<(ClockOffset, u64)>,
}

/// Everybody's pulse, felt by the lobby.
#[derive(Debug)]
pub struct Pulse {
    beats: BTreeMap<Rank, Beat>,
    next_ping_ns: u64,
    looked_ns: u64,
}

impl Pulse {
    pub fn new(now_ns: u64) -> Self {
        Self { beats: BTreeMap::new(), next_ping_ns: now_ns, looked_ns: now_ns }
    }

    /// A sign of life.
    pub fn heard(&mut self, rank: Rank, now_ns: u64) {
        let first = Beat { heard_ns: now_ns, answers: 0, best: None };
        let beat = self.beats.entry(rank).or_insert(first);
        beat.heard_ns = beat.heard_ns.max(now_ns);
    }

    /// An answer to a ping. True if the next one should go out at once.
    pub fn answered(&mut self, rank: Rank, trip: RoundTrip) -> bool {
        self.heard(rank, trip.back_ns);
        let beat = self.beats.get_mut(&rank).expect("just heard of it");
        beat.answers += 1;
        let offset = trip.offset();
        let known = beat.best.map(|(best, at)| aged(best, at, trip.back_ns).error_ns);
        if known.is_none_or(|error| offset.error_ns <= error) {
            beat.best = Some((offset, trip.back_ns));
        }
        beat.answers < FIRST_PINGS
    }

    /// What is known of a rank's clock.
    pub fn offset(&self, rank: Rank, now_ns: u64) -> Option<ClockOffset> {
        let (best, at) = self.beats.get(&rank)?.best?;
        Some(aged(best, at, now_ns))
    }

    /// Whether everybody should be asked again.
    pub fn is_due(&mut self, now_ns: u64) -> bool {
        let due = now_ns >= self.next_ping_ns;
        if due {
            self.next_ping_ns = now_ns + PING_NS;
        }
        due
    }

    /// To be called often: while nobody looked, nobody was silent.
    pub fn look(&mut self, now_ns: u64) {
        let away = now_ns.saturating_sub(self.looked_ns);
        if away > AWAY_NS {
            self.beats.values_mut().for_each(|beat| beat.heard_ns += away);
        }
        self.looked_ns = now_ns;
    }

    /// Those who have said nothing for so long.
    pub fn silent(&self, now_ns: u64, for_ns: u64) -> BTreeSet<Rank> {
        let silent = |beat: &Beat| now_ns.saturating_sub(beat.heard_ns) > for_ns;
        self.beats.iter().filter(|(_, beat)| silent(beat)).map(|(rank, _)| *rank).collect()
    }
}

fn aged(offset: ClockOffset, from_ns: u64, to_ns: u64) -> ClockOffset {
    let drift = (to_ns.saturating_sub(from_ns) as f64 * DRIFT) as u64;
    ClockOffset { error_ns: offset.error_ns + drift, ..offset }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const R: Rank = Rank(3);

    proptest! {
        /// Whatever the two ways take, the truth lies within the error.
        #[test]
        fn the_error_bounds_the_offset(
            truth in -5_000_000_000i64..5_000_000_000,
            ways in prop::collection::vec((0u64..2_000_000, 0u64..500_000, 0u64..2_000_000), 1..20),
        ) {
            let mut pulse = Pulse::new(0);
            let mut now = 10_000_000_000;
            let mut shortest = u64::MAX;
            for (there, thinking, back) in ways {
                let there_ns = (now + there).saturating_add_signed(truth);
                let back_ns = now + there + thinking + back;
                pulse.answered(R, RoundTrip { sent_ns: now, there_ns, answered_ns: there_ns + thinking, back_ns });
                shortest = shortest.min((there + back) / 2);
                now = back_ns;
            }
            let found = pulse.offset(R, now).unwrap();
            prop_assert!(found.offset_ns.abs_diff(truth) <= found.error_ns, "{found:?} for {truth}");
            // Twenty answers of a few milliseconds age little.
            prop_assert!(found.error_ns <= shortest + 10_000, "{found:?}, {shortest}");
            prop_assert!(found.to_other(now.saturating_add_signed(truth)).abs_diff(now) <= found.error_ns);
        }
    }

    #[test]
    fn an_old_answer_gives_way_to_a_worse_one() {
        let mut pulse = Pulse::new(0);
        let trip = |sent: u64, way: u64| RoundTrip {
            sent_ns: sent,
            there_ns: sent + way / 2,
            answered_ns: sent + way / 2,
            back_ns: sent + way,
        };
        assert!(pulse.answered(R, trip(0, 20_000)));
        pulse.answered(R, trip(1_000_000, 30_000));
        assert!((10_001..10_100).contains(&pulse.offset(R, 1_000_000).unwrap().error_ns));
        // Ten seconds later the first is off by up to half a millisecond.
        pulse.answered(R, trip(10_000_000_000, 30_000));
        assert_eq!(pulse.offset(R, 10_000_030_000).unwrap().error_ns, 15_001);
    }

    #[test]
    fn silence_counts_while_somebody_listens() {
        let mut pulse = Pulse::new(0);
        pulse.heard(R, 0);
        for step in 1..=10 {
            pulse.look(step * 100_000_000);
        }
        assert_eq!(pulse.silent(1_000_000_000, HUSHED_NS), BTreeSet::from([R]));
        pulse.heard(R, 1_000_000_000);
        // The lobby's own process was stopped for a minute.
        pulse.look(61_000_000_000);
        assert!(pulse.silent(61_000_000_000, HUSHED_NS).is_empty());
    }
}
