//! What happened, or would happen, and when. The simulator writes it; so does the engine.

use std::fmt;

use crate::id::{PortId, Rank};

/// A run of a program, predicted or measured.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Trace {
    pub makespan_s: f64,
    /// Every op of every rank, in program order: `ops[rank][op]`.
    pub ops: Vec<Vec<OpSpan>>,
    /// Every link that carried a byte.
    pub links: Vec<LinkUse>,
}

/// When an op ran.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct OpSpan {
    pub start_s: f64,
    pub end_s: f64,
}

/// A link and what it carried.
#[derive(Debug, Clone, PartialEq)]
pub struct LinkUse {
    pub link: Link,
    pub bytes: u64,
    pub bytes_per_s: f64,
    /// Stretches of time with the share of the link's rate in use, rising, without the idle ones.
    pub busy: Vec<Busy>,
}

impl LinkUse {
    /// The time its bytes take at its full rate.
    pub fn busy_s(&self) -> f64 {
        self.bytes as f64 / self.bytes_per_s
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Busy {
    pub start_s: f64,
    pub end_s: f64,
    /// Of the link's rate; 1 is full.
    pub share: f64,
}

/// Something that bytes pass through at a limited rate, in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Link {
    NicOut(PortId),
    NicIn(PortId),
    LocalOut(Rank),
    LocalIn(Rank),
    /// A tier's uplink: tier, group.
    GroupOut(u32, u32),
    GroupIn(u32, u32),
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Link::NicOut(port) => write!(f, "{port} out"),
            Link::NicIn(port) => write!(f, "{port} in"),
            Link::LocalOut(rank) => write!(f, "{rank} local out"),
            Link::LocalIn(rank) => write!(f, "{rank} local in"),
            Link::GroupOut(tier, group) => write!(f, "tier {tier} group {group} out"),
            Link::GroupIn(tier, group) => write!(f, "tier {tier} group {group} in"),
        }
    }
}
