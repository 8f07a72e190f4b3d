//! The pulse between a rank and the one it hangs under: who answers, and by how much their clocks differ.
//!
//! ```text
//! child  t0 ── ping ──▶            parent      a few times a second, and a few at once in the beginning
//!        t3 ◀── pong: t1, t2 ──
//!
//! offset  ((t1 − t0) + (t2 − t3)) / 2          the parent's clock less the child's
//! error   ((t3 − t0) − (t2 − t1)) / 2          at most: half of what both ways took together
//! ```
//!
//! The answer that took the shortest time says most. It grows old, as no two clocks run at the same speed. Offsets add up
//! on the way to the root, and errors too.
//!
//! A rank answers from a thread that does nothing else, so one that is busy still answers; one that was stopped, or whose
//! host was cut off, does not. Silence counts only while we ourselves were there to listen: see [`Absence`].

use super::check::LONGEST_NS;
use crate::clock::ClockOffset;

const MS: u64 = 1_000_000;
/// Answers that are asked for one behind the other, before the ranks start to work.
const FIRST_PINGS: u32 = 8;
/// If nobody listened for so long, the silence was ours.
const AWAY_NS: u64 = 500 * MS;
/// Whoever was away for too long answers for what comes to light within this time.
const AWAY_COUNTS_NS: u64 = 4_000 * MS;
/// How fast two clocks drift apart: 50 µs a second, more than any oscillator that machines are sold with.
const DRIFT: f64 = 50e-6;

/// Between two pings, where a rank may be silent for so long.
pub fn ping_ns(silence_ns: u64) -> u64 {
    (silence_ns / 5).clamp(200 * MS, 1_000 * MS)
}

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

/// What a rank knows of the clock it is compared with.
#[derive(Debug, Default)]
pub struct Pulse {
    answers: u32,
    best: Option<(ClockOffset, u64)>,
}

impl Pulse {
    /// An answer to a ping. True if the next one should go out at once.
    pub fn answered(&mut self, trip: RoundTrip) -> bool {
        self.answers += 1;
        let offset = trip.offset();
        let known = self.best.map(|(best, at)| aged(best, at, trip.back_ns).error_ns);
        if known.is_none_or(|error| offset.error_ns <= error) {
            self.best = Some((offset, trip.back_ns));
        }
        self.answers < FIRST_PINGS
    }

    /// By how much the other clock is ahead of ours.
    pub fn offset(&self, now_ns: u64) -> Option<ClockOffset> {
        let (best, at) = self.best?;
        Some(aged(best, at, now_ns))
    }

    /// By how much ours is ahead of a third, given by how much the other is.
    pub fn ahead_of(&self, others: ClockOffset, now_ns: u64) -> Option<ClockOffset> {
        let ours = self.offset(now_ns)?;
        let offset_ns = others.offset_ns.checked_sub(ours.offset_ns)?;
        let error_ns = others.error_ns.checked_add(ours.error_ns)?;
        // What nobody would believe is not passed on.
        let is_sane = offset_ns.unsigned_abs().max(error_ns) <= LONGEST_NS;
        is_sane.then_some(ClockOffset { offset_ns, error_ns })
    }
}

/// Whether we ourselves were there all the time: a process that was stopped hears nobody, and is not heard.
#[derive(Debug)]
pub struct Absence {
    /// The longest of late, and when it ended.
    last: Option<(u64, u64)>,
}

impl Absence {
    pub fn new() -> Self {
        Self { last: None }
    }

    /// To be called on every waking, with when that was to be: how long nobody looked, where that was too long.
    pub fn look(&mut self, planned_ns: u64, now_ns: u64) -> Option<u64> {
        let away = now_ns.saturating_sub(planned_ns);
        if away <= AWAY_NS {
            return None;
        }
        let longer = self.recent_ns(now_ns).is_none_or(|before| away >= before);
        if longer {
            self.last = Some((away, now_ns));
        }
        Some(away)
    }

    /// How long we were stopped of late, given when we were last continued. Else the machine may have stalled, and with it
    /// everybody there.
    pub fn stopped_ns(&self, now_ns: u64, continued_ns: u64) -> Option<u64> {
        let (away, until) = self.last?;
        self.recent_ns(now_ns).filter(|_| continued_ns >= until.saturating_sub(away))
    }

    fn recent_ns(&self, now_ns: u64) -> Option<u64> {
        let (away, until) = self.last?;
        (now_ns.saturating_sub(until) < AWAY_COUNTS_NS).then_some(away)
    }
}

fn aged(offset: ClockOffset, from_ns: u64, to_ns: u64) -> ClockOffset {
    let drift = (to_ns.saturating_sub(from_ns) as f64 * DRIFT) as u64;
    ClockOffset { error_ns: offset.error_ns.saturating_add(drift), ..offset }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever the two ways take, the truth lies within the error.
        #[test]
        fn the_error_bounds_the_offset(
            truth in -5_000_000_000i64..5_000_000_000,
            ways in prop::collection::vec((0u64..2_000_000, 0u64..500_000, 0u64..2_000_000), 1..20),
        ) {
            let mut pulse = Pulse::default();
            let mut now = 10_000_000_000;
            let mut shortest = u64::MAX;
            for (there, thinking, back) in ways {
                let there_ns = (now + there).saturating_add_signed(truth);
                let back_ns = now + there + thinking + back;
                pulse.answered(RoundTrip { sent_ns: now, there_ns, answered_ns: there_ns + thinking, back_ns });
                shortest = shortest.min((there + back) / 2);
                now = back_ns;
            }
            let found = pulse.offset(now).unwrap();
            prop_assert!(found.offset_ns.abs_diff(truth) <= found.error_ns, "{found:?} for {truth}");
            // Twenty answers of a few milliseconds age little.
            prop_assert!(found.error_ns <= shortest + 10_000, "{found:?}, {shortest}");
            // Ours against a third that the other is 7 ns ahead of.
            let third = pulse.ahead_of(ClockOffset { offset_ns: 7, error_ns: 3 }, now).unwrap();
            prop_assert!(third.offset_ns.abs_diff(7 - truth) <= third.error_ns);
        }
    }

    #[test]
    fn an_old_answer_gives_way_to_a_worse_one() {
        let mut pulse = Pulse::default();
        let trip = |sent: u64, way: u64| RoundTrip {
            sent_ns: sent,
            there_ns: sent + way / 2,
            answered_ns: sent + way / 2,
            back_ns: sent + way,
        };
        assert!(pulse.answered(trip(0, 20_000)));
        pulse.answered(trip(1_000_000, 30_000));
        assert!((10_001..10_100).contains(&pulse.offset(1_000_000).unwrap().error_ns));
        // Ten seconds later the first is off by up to half a millisecond.
        pulse.answered(trip(10_000_000_000, 30_000));
        assert_eq!(pulse.offset(10_000_030_000).unwrap().error_ns, 15_001);
    }

    #[test]
    fn an_absence_is_noticed_and_forgotten() {
        let mut absence = Absence::new();
        assert_eq!(absence.look(0, 400 * MS), None);
        assert_eq!(absence.look(400 * MS, 3_400 * MS), Some(3_000 * MS));
        assert_eq!(absence.look(3_400 * MS, 4_000 * MS), Some(600 * MS));
        assert_eq!(absence.look(9_000 * MS, 4_000 * MS), None, "woken early");
        assert_eq!(absence.stopped_ns(4_000 * MS, 3_390 * MS), Some(3_000 * MS), "the longer one counts");
        assert_eq!(absence.stopped_ns(4_000 * MS, 0), None, "the machine stalled");
        assert_eq!(absence.stopped_ns(7_500 * MS, 3_390 * MS), None, "long ago");
    }
}
