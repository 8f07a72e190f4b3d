//! What passes and messages cost: seconds, or any other unit, the same throughout.
//!
//! ```
//! use crossmesh_core::schedule::{Costs, Placement};
//! // Two chunks a device: each costs half of what a device's whole share of the layers costs. A hop costs what it costs.
//! let costs = Costs::shared(&Placement::zigzag(4, 2).unwrap(), 1.0, 1.0, 1.0, 0.25).unwrap();
//! assert_eq!(costs.stages()[0].f, 0.5);
//! assert!(Costs::even(4, -1.0, 1.0, 1.0, 0.0).is_err());
//! ```

use std::collections::BTreeMap;

use crate::id::StageId;

use super::{Edge, Pass, PassKind, Placement, ScheduleError};

/// How long a stage's passes take.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StageCost {
    pub f: f64,
    pub b: f64,
    pub w: f64,
    /// Its shares of the vocabulary.
    pub s: f64,
    pub t: f64,
    pub optimizer: f64,
}

impl StageCost {
    pub fn new(f: f64, b: f64, w: f64) -> Self {
        Self { f, b, w, ..Self::default() }
    }

    /// All passes of one microbatch.
    pub fn all(&self) -> f64 {
        self.f + self.b + self.w + self.s + self.t
    }

    fn of(&self, kind: PassKind) -> f64 {
        match kind {
            PassKind::F => self.f,
            PassKind::B => self.b,
            PassKind::W => self.w,
            PassKind::BW => self.b + self.w,
            PassKind::S => self.s,
            PassKind::T => self.t,
            PassKind::Optimizer => self.optimizer,
            PassKind::Evict | PassKind::Offload | PassKind::Load => 0.0,
        }
    }
}

/// How long an edge's messages take between two devices.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Hop {
    pub activation: f64,
    pub gradient: f64,
}

impl Hop {
    pub fn both(cost: f64) -> Self {
        Self { activation: cost, gradient: cost }
    }
}

/// What messages on the same channel (an edge, one direction) do to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Channel {
    /// One message at a time: a hop's cost is its bytes over a rate.
    #[default]
    Serial,
    /// Messages overtake nothing but do not wait either: a hop's cost is a latency.
    Delay,
}

impl Channel {
    /// When a message begins that could at `ready`, on a channel whose last one is over at `free`.
    pub fn start(self, ready: f64, free: f64) -> f64 {
        match self {
            Channel::Serial => ready.max(free),
            Channel::Delay => ready,
        }
    }
}

/// What everything costs. All numbers are finite and not negative, and so are sums of as many of them as a schedule may have.
#[derive(Debug, Clone, PartialEq)]
pub struct Costs {
    stages: Vec<StageCost>,
    hop: Hop,
    edges: BTreeMap<Edge, Hop>,
    moved: f64,
    channel: Channel,
}

impl Costs {
    pub fn new(stages: Vec<StageCost>, hop: Hop) -> Result<Self, ScheduleError> {
        for (at, cost) in stages.iter().enumerate() {
            let stage = StageId::at(at);
            let named = [
                ("f", cost.f),
                ("b", cost.b),
                ("w", cost.w),
                ("s", cost.s),
                ("t", cost.t),
                ("optimizer", cost.optimizer),
            ];
            for (what, value) in named {
                checked(&format!("{what} of {stage}"), value)?;
            }
        }
        checked_hop("comm", hop)?;
        Ok(Self { stages, hop, edges: BTreeMap::new(), moved: 0.0, channel: Channel::default() })
    }

    /// The same for every stage.
    pub fn even(num_stages: usize, f: f64, b: f64, w: f64, comm: f64) -> Result<Self, ScheduleError> {
        for (what, value) in [("f", f), ("b", b), ("w", w)] {
            checked(what, value)?;
        }
        Self::new(vec![StageCost::new(f, b, w); num_stages], Hop::both(comm))
    }

    /// From a device's whole share of the layers, split evenly over its chunks.
    pub fn shared(placement: &Placement, f: f64, b: f64, w: f64, comm: f64) -> Result<Self, ScheduleError> {
        for (what, value) in [("f", f), ("b", b), ("w", w)] {
            checked(what, value)?;
        }
        let of = |stage| {
            let chunks = placement.stages_on(placement.device(stage)).len() as f64;
            StageCost::new(f / chunks, b / chunks, w / chunks)
        };
        Self::new(placement.stages().map(of).collect(), Hop::both(comm))
    }

    /// Gives one edge its own cost.
    pub fn with_edge(mut self, edge: Edge, hop: Hop) -> Result<Self, ScheduleError> {
        checked_hop(&format!("comm from {} to {}", edge.from, edge.to), hop)?;
        self.edges.insert(edge, hop);
        Ok(self)
    }

    /// How long evicting an activation, or loading it back, takes.
    pub fn with_moves(mut self, moved: f64) -> Result<Self, ScheduleError> {
        self.moved = checked("moving an activation", moved)?;
        Ok(self)
    }

    pub fn with_channel(mut self, channel: Channel) -> Self {
        self.channel = channel;
        self
    }

    pub fn stages(&self) -> &[StageCost] {
        &self.stages
    }

    pub fn stage(&self, stage: StageId) -> StageCost {
        self.stages[stage.index()]
    }

    pub fn channel(&self) -> Channel {
        self.channel
    }

    /// How long a pass takes.
    pub fn pass(&self, pass: Pass) -> f64 {
        if pass.kind.is_move() { self.moved } else { self.stages[pass.stage.index()].of(pass.kind) }
    }

    /// What an edge costs on this placement: within a device nothing, unless the edge was given a cost.
    pub fn hop(&self, placement: &Placement, edge: Edge) -> Hop {
        match self.edges.get(&edge) {
            Some(hop) => *hop,
            None if placement.device(edge.from) == placement.device(edge.to) => Hop::default(),
            None => self.hop,
        }
    }
}

fn checked_hop(what: &str, hop: Hop) -> Result<(), ScheduleError> {
    checked(what, hop.activation)?;
    checked(what, hop.gradient).map(|_| ())
}

/// Beyond these, sums and quotients of times are none any more.
const LEAST: f64 = 1e-100;
const MOST: f64 = 1e100;

fn checked(what: &str, value: f64) -> Result<f64, ScheduleError> {
    match value == 0.0 || (LEAST..=MOST).contains(&value) {
        true => Ok(value),
        false => Err(ScheduleError::BadCost { what: what.into(), value }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::StageId;

    #[test]
    fn costs_are_times() {
        let error = |f, b, w, c| Costs::even(2, f, b, w, c).unwrap_err().to_string();
        assert_eq!(
            error(1.0, f64::NAN, 1.0, 0.0),
            "the cost of b is NaN\nhint: costs are times: finite, and not negative; 0, or from 1e-100 to 1e100"
        );
        assert!(error(-1.0, 1.0, 1.0, 0.0).starts_with("the cost of f is -1"));
        assert!(error(1.0, 1.0, f64::INFINITY, 0.0).starts_with("the cost of w is inf"));
        assert!(error(1.0, 1.0, 1.0, -0.5).starts_with("the cost of comm is -0.5"));
        // Finite, and yet a sum of two of them is not; or nothing beside anything else.
        assert!(error(1e308, 1.0, 1.0, 0.0).starts_with("the cost of f is 1e308"));
        assert!(error(1.0, 1.0, 1.0, 1e308).starts_with("the cost of comm is 1e308"));
        assert!(error(1.0, 1.0, 1e-308, 0.0).starts_with("the cost of w is 1e-308"));
        assert!(Costs::even(2, 0.0, 1e-100, 1e100, 0.0).is_ok());
    }

    #[test]
    fn a_hop_within_a_device_is_free_unless_said() {
        let v = Placement::zigzag(2, 2).unwrap();
        let costs = Costs::shared(&v, 1.0, 1.0, 1.0, 0.25).unwrap();
        let turn = Edge { from: StageId(1), to: StageId(2) };
        assert_eq!(costs.hop(&v, turn), Hop::default());
        assert_eq!(costs.hop(&v, Edge { from: StageId(0), to: StageId(1) }), Hop::both(0.25));
        let costs = costs.with_edge(turn, Hop::both(0.1)).unwrap();
        assert_eq!(costs.hop(&v, turn), Hop::both(0.1));
    }
}
