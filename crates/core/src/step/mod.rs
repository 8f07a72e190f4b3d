//! A training step as a program: the passes of a schedule on every rank, and a reshard plan on every edge between
//! stages.
//!
//! ```text
//! device 0   | 0F0 | 0F1 | ...          a compute op per pass and rank
//!                 \ plan of the edge    sends wait for the pass that made what they send, and for nothing else
//! device 1         '-> | 1F0 | ...      a pass waits for the receives that bring what it needs
//! ```
//!
//! Communication sits where its data exists: it starts when a tensor is made, runs beside compute, and never keeps an
//! unrelated pass waiting. A tensor may be made before its pass ends, and be needed only after the next has begun (skip
//! tensors of a U-Net): passes are cut where that happens. Without overlap ([`Step::overlap`]), devices stand still
//! while something of theirs moves, as in a runtime with blocking calls.
//!
//! Every edge has a number of buffers, used in turn; a buffer is filled again when its last reader is done.

mod blocking;
mod coarse;
pub mod doc;
mod error;
mod lower;
mod order;
mod report;
#[cfg(test)]
mod tests;

pub use error::StepError;
pub use lower::{Instance, Part, StepProgram, lower_step};
pub use report::{DeviceReport, StepReport};

use crate::cluster::Cluster;
use crate::id::{DeviceId, Rank};
use crate::reshard::Plan;
use crate::schedule::{Edge, Pass, PassKind, Schedule};

/// How long the passes of a stage take on each of its ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PassTimes {
    pub f_ns: u64,
    pub b_ns: u64,
    pub w_ns: u64,
    pub optimizer_ns: u64,
}

impl PassTimes {
    /// How long a pass takes. Passes that only move, and those of a shared vocabulary, have no time here.
    pub fn of(&self, pass: Pass) -> Option<u64> {
        match pass.kind {
            PassKind::F => Some(self.f_ns),
            PassKind::B => Some(self.b_ns),
            PassKind::W => Some(self.w_ns),
            PassKind::BW => Some(self.b_ns + self.w_ns),
            PassKind::Optimizer => Some(self.optimizer_ns),
            PassKind::S | PassKind::T | PassKind::Evict | PassKind::Offload | PassKind::Load => None,
        }
    }
}

/// Tensors that cross from one stage to another together, and their gradients, which cross back.
#[derive(Debug, Clone, PartialEq)]
pub struct Crossing {
    pub name: String,
    pub edge: Edge,
    pub forward: Plan,
    pub backward: Plan,
    /// How far into its forward pass `edge.from` has made the tensors: 1 is its end.
    pub made: f64,
    /// How far into its forward pass `edge.to` needs them: 0 is its start. Backward mirrors both.
    pub needed: f64,
}

/// A whole training step.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    pub schedule: Schedule,
    pub cluster: Cluster,
    /// The ranks of every device of the schedule: one device stands for a mesh, whose ranks all do the same.
    pub ranks: Vec<Vec<Rank>>,
    /// By virtual stage.
    pub times: Vec<PassTimes>,
    pub crossings: Vec<Crossing>,
    /// Whether communication runs beside compute.
    pub overlap: bool,
    /// Whether the ranks of a device begin a pass together, as they do where they meet in collectives inside it.
    pub lockstep: bool,
}

impl Step {
    pub fn ranks_of(&self, device: DeviceId) -> &[Rank] {
        &self.ranks[device.index()]
    }

    /// The crossings that carry what `pass` makes, and whether they carry it forwards.
    fn crossings_from(&self, pass: Pass) -> impl Iterator<Item = (usize, Direction)> {
        let crossings = self.crossings.iter().enumerate();
        crossings.filter_map(move |(i, c)| match pass.kind {
            PassKind::F if c.edge.from == pass.stage => Some((i, Direction::Forward)),
            PassKind::B | PassKind::BW if c.edge.to == pass.stage => Some((i, Direction::Backward)),
            _ => None,
        })
    }
}

/// Which way a crossing is crossed: activations go forwards, gradients backwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    Forward,
    Backward,
}

impl Crossing {
    pub fn plan(&self, direction: Direction) -> &Plan {
        match direction {
            Direction::Forward => &self.forward,
            Direction::Backward => &self.backward,
        }
    }

    /// How far into the pass that makes them the tensors are made.
    fn made_at(&self, direction: Direction) -> f64 {
        match direction {
            Direction::Forward => self.made,
            Direction::Backward => 1.0 - self.needed,
        }
    }

    /// How far into the pass that needs them they are needed.
    fn needed_at(&self, direction: Direction) -> f64 {
        match direction {
            Direction::Forward => self.needed,
            Direction::Backward => 1.0 - self.made,
        }
    }
}
