//! Time is a parameter.

use std::fmt::Debug;

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
