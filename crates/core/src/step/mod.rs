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
//!
//! A stage's memory of a microbatch may cross too ([`Carries::Memory`]), to a device that keeps it for a while (BPipe):
//!
//! ```text
//! device 0   | 0F1 | 0EVICT1 | 0F2 | ... | 0LOAD1 | 0F4 | 0BW1 |     it leaves when it is told to, comes back when it is
//!                           \               / '-------------^          asked for, and a backward waits for it
//! device 3                   '-> a slot ---'                          computes nothing for it
//! ```

mod blocking;
mod check;
mod coarse;
pub mod doc;
mod error;
pub mod lists;
mod lower;
mod report;
mod slots;
#[cfg(test)]
mod tests;

pub use error::StepError;
pub use lower::{Instance, PassPart, StepProgram, lower_lists, lower_step};
pub use report::{DeviceReport, StepReport};

use crate::cluster::Cluster;
use crate::id::{DeviceId, MicrobatchId, Rank};
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
    /// How long a pass takes: of those that move a stage's memory to its keeper and back, no time at all. Those of a shared vocabulary, and
    /// moves to the host, have none here.
    pub fn of(&self, pass: Pass) -> Option<u64> {
        match pass.kind {
            PassKind::F => Some(self.f_ns),
            PassKind::B => Some(self.b_ns),
            PassKind::W => Some(self.w_ns),
            PassKind::BW => Some(self.b_ns + self.w_ns),
            PassKind::Optimizer => Some(self.optimizer_ns),
            PassKind::Evict | PassKind::Load => Some(0),
            PassKind::S | PassKind::T | PassKind::Offload => None,
        }
    }
}

/// What crosses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Carries {
    /// Tensors from one stage to another, and their gradients back.
    #[default]
    Tensors,
    /// What a stage remembers of a microbatch: to the device of `edge.to`, which keeps it, when the stage evicts it, and back when it
    /// loads it. No edge of the model.
    Memory,
}

/// Tensors that cross from one stage to another together, and their gradients, which cross back.
#[derive(Debug, Clone, PartialEq)]
pub struct Crossing {
    pub name: String,
    pub edge: Edge,
    pub carries: Carries,
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
        crossings.filter_map(move |(i, c)| {
            let (starts, ends) = (c.edge.from == pass.stage, c.edge.to == pass.stage);
            match (c.carries, pass.kind) {
                (Carries::Tensors, PassKind::F) if starts => Some((i, Direction::Forward)),
                (Carries::Tensors, PassKind::B | PassKind::BW) if ends => Some((i, Direction::Backward)),
                (Carries::Memory, PassKind::Evict) if starts => Some((i, Direction::Forward)),
                (Carries::Memory, PassKind::Load) if starts => Some((i, Direction::Backward)),
                _ => None,
            }
        })
    }

    /// Whether a microbatch visits those stages that a crossing needs it to.
    fn crosses(&self, crossing: usize, microbatch: MicrobatchId) -> bool {
        let (routes, c) = (self.schedule.routes(), &self.crossings[crossing]);
        let ends = c.carries == Carries::Memory || routes.visits(microbatch, c.edge.to);
        ends && routes.visits(microbatch, c.edge.from)
    }

    /// Whether a rank keeps what a crossing brings until it is asked for.
    pub fn keeps(&self, crossing: usize, rank: Rank) -> bool {
        let Crossing { carries, edge, .. } = &self.crossings[crossing];
        let keeper = self.schedule.placement().device(edge.to);
        *carries == Carries::Memory && self.ranks_of(keeper).contains(&rank)
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
