//! Time is a parameter; and what clocks of several machines have to do with each other.

use std::fmt::Debug;

use serde::{Deserialize, Serialize};

/// Nanoseconds since some moment, never going back.
pub trait Clock: Send + Debug {
    fn now_ns(&self) -> u64;
}

/// The clock of the machine: one for all processes of a host.
#[derive(Debug, Clone, Copy, Default)]
pub struct Monotonic;

impl Clock for Monotonic {
    fn now_ns(&self) -> u64 {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
    }
}

/// By how much a clock is ahead of another, and by how much that may be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ClockOffset {
    pub offset_ns: i64,
    pub error_ns: u64,
}

impl ClockOffset {
    /// What the other clock says when this one says `ns`.
    pub fn to_other(self, ns: u64) -> u64 {
        ns.saturating_add_signed(-self.offset_ns)
    }
}

/// A moment by the clock of some process, and what is known of that clock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    pub at_ns: u64,
    /// The same for processes that read the same clock.
    pub clock: String,
    /// Compared with the first rank's, where somebody compared them.
    pub offset: Option<ClockOffset>,
}

impl Moment {
    pub fn now(offset: Option<ClockOffset>) -> Self {
        Self { at_ns: Monotonic.now_ns(), clock: clock_name(), offset }
    }
}

/// Clocks start when a machine does, or with the time namespace that a process was put into.
fn clock_name() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/time").unwrap_or_default();
    format!("{} {}", boot.trim(), namespace.display())
}

/// Moments by one clock, in the same order, and by how much two of them may be wrong against each other. None if
/// nobody compared the clocks.
pub fn by_one_clock(moments: &[&Moment]) -> Option<(Vec<u64>, u64)> {
    if moments.windows(2).all(|pair| pair[0].clock == pair[1].clock) {
        return Some((moments.iter().map(|m| m.at_ns).collect(), 0));
    }
    let aligned = moments.iter().map(|m| Some((m.offset?.to_other(m.at_ns), m.offset?.error_ns)));
    let (at_ns, errors): (Vec<u64>, Vec<u64>) = aligned.collect::<Option<Vec<_>>>()?.into_iter().unzip();
    // Two may both be wrong, each its own way.
    Some((at_ns, 2 * errors.into_iter().max().unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moment(at_ns: u64, clock: &str, offset_ns: Option<i64>) -> Moment {
        let offset = offset_ns.map(|offset_ns| ClockOffset { offset_ns, error_ns: 30 });
        Moment { at_ns, clock: clock.into(), offset }
    }

    #[test]
    fn moments_of_one_clock_are_as_they_are() {
        let (a, b) = (moment(1000, "x", Some(7)), moment(1500, "x", None));
        assert_eq!(by_one_clock(&[&a, &b]), Some((vec![1000, 1500], 0)));
    }

    #[test]
    fn moments_of_several_clocks_are_shifted_and_less_certain() {
        let (a, b) = (moment(1000, "x", Some(7)), moment(9500, "y", Some(8000)));
        assert_eq!(by_one_clock(&[&a, &b]), Some((vec![993, 1500], 60)));
        assert_eq!(by_one_clock(&[&a, &moment(9500, "y", None)]), None);
    }
}
