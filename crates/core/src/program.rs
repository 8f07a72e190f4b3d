//! The program: for every rank the ops it performs, with buffers, tags and dependencies.
//!
//! Resharding, collectives and pipeline steps all lower to this. The simulator and the engine interpret it:
//! - an op starts once everything in its `deps` allows it; a rank's ops are otherwise unordered, but for this:
//! - sends to one peer in one lane, and receives from one, take place in program order (a channel is first in, first
//!   out);
//! - a send and the receive of its tag move the same bytes; neither side completes without the other (rendezvous).
//!   Tags number the messages of the whole program, from 0.

use std::ops::Range;

use crate::id::{Rank, RegionId};
use crate::region::Region;

/// All ranks' programs, by rank.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Program {
    /// How much of a receive has to arrive before a streaming dependent may use it.
    pub chunk_bytes: u64,
    pub ranks: Vec<RankProgram>,
    /// The boxes of copies that the plan does not name. Ids go on where the plan's own table of regions ends.
    pub copied: Vec<Region>,
}

/// One rank's ops, and the memory it needs beside its tensors.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RankProgram {
    pub ops: Vec<Op>,
    /// The dependencies of all ops, one behind the other; see [`RankProgram::deps`].
    pub deps: Vec<Dep>,
    /// Bytes of each staging buffer.
    pub stages: Vec<u64>,
}

impl RankProgram {
    pub fn deps(&self, op: &Op) -> &[Dep] {
        &self.deps[op.deps.start as usize..op.deps.end as usize]
    }

    /// Memory beside the tensors.
    pub fn extra_bytes(&self) -> u64 {
        self.stages.iter().sum()
    }
}

/// What an op waits for: another op of the same rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dep {
    pub op: u32,
    pub kind: DepKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DepKind {
    /// Wait for its end.
    Done,
    /// Follow it, a chunk behind. Both ops move the same box.
    Stream,
}

/// Where an op reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Buffer {
    /// The rank's shard of the tensor's source layout.
    Src,
    /// Its shard of the destination layout.
    Dst,
    /// A staging buffer: index into [`RankProgram::stages`]. It holds the box of the receive that fills it, or where
    /// copies fill it, of the send that reads it.
    Stage(u32),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Op {
    pub kind: OpKind,
    /// Index into the problem's reshards.
    pub tensor: u32,
    pub region: RegionId,
    pub bytes: u64,
    pub deps: Range<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpKind {
    Send {
        to: Rank,
        lane: u32,
        tag: u32,
        weight: u64,
        from: Buffer,
    },
    /// With `reduce`, what arrives is combined with what the buffer has.
    Recv {
        from: Rank,
        lane: u32,
        tag: u32,
        into: Buffer,
        reduce: bool,
    },
    /// Inside the rank's own memory. With `reduce`, combined with what is there.
    Copy {
        from: Buffer,
        into: Buffer,
        reduce: bool,
    },
    /// A part of a pass on the rank's device: `pass` is for whoever computes to know, `nanos` is how long it is
    /// thought to take. A device does one thing at a time, so each waits for the one before it.
    Compute {
        pass: u32,
        nanos: u64,
    },
}
