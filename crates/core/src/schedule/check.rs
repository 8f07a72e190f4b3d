//! Whether a schedule can be run, and what it takes: each checker answers one question and names what is in the way.
//!
//! - [`completeness`]: is every pass there?
//! - [`dependencies`]: does every device run what it makes for itself before it uses it?
//! - [`deadlock`]: does the order lead to the end however long messages take? Then, and only then, nobody waits in a
//!   cycle. [`deadlock_if_blocking`] asks the same where a send and its receive hold up both devices.
//! - [`channels`]: are messages on an edge used in the order they were sent?
//! - [`memory`](super::memory): do the activations fit?

use crate::id::{DeviceId, MicrobatchId, StageId};

use super::order_graph::{OrderGraph, Wait};
use super::{Costs, Pass, PassKind, Schedule, Via};

/// The question that a schedule failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Check {
    Completeness,
    Dependencies,
    Deadlock,
    Channels,
    Memory,
    Costs,
}

/// What is wrong with a schedule.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    #[error("{pass} is missing: {device} never runs it")]
    Missing { pass: Pass, device: DeviceId },
    #[error("{device} runs both {fused} and {split}\nhint: a backward is fused (BW) or split (B and W)")]
    FusedAndSplit { fused: Pass, split: Pass, device: DeviceId },
    #[error("{device} moves the activation of {pass} away, but never loads it back")]
    NeverLoaded { pass: Pass, device: DeviceId },
    #[error("{device} evicts with {pass}, but no device keeps what it evicts")]
    NoKeeper { pass: Pass, device: DeviceId },
    #[error("{device} runs {pass} before {needed}, which it needs")]
    TooEarly { pass: Pass, needed: Pass, device: DeviceId },
    #[error("deadlock: {}", story(cycle))]
    Deadlock { cycle: Vec<Wait> },
    #[error("{from} sends {what} of {first} before that of {second}, but {to} uses them the other way round")]
    Overtaking { from: DeviceId, to: DeviceId, what: &'static str, first: MicrobatchId, second: MicrobatchId },
    #[error("{device} holds {} at {pass}, more than its cap of {}", Amount(*peak, unit), Amount(*cap, unit))]
    OverMemory { device: DeviceId, pass: Pass, peak: f64, cap: f64, unit: Unit },
    #[error("there are {given} memory caps for {devices} devices")]
    CapsDiffer { given: usize, devices: usize },
    #[error("there are costs for {given} stages, the schedule has {stages}")]
    CostsDiffer { given: usize, stages: usize },
}

impl CheckError {
    /// The question that was answered with no.
    pub fn check(&self) -> Check {
        match self {
            CheckError::Missing { .. }
            | CheckError::FusedAndSplit { .. }
            | CheckError::NeverLoaded { .. }
            | CheckError::NoKeeper { .. } => Check::Completeness,
            CheckError::TooEarly { .. } => Check::Dependencies,
            CheckError::Deadlock { .. } => Check::Deadlock,
            CheckError::Overtaking { .. } => Check::Channels,
            CheckError::OverMemory { .. } | CheckError::CapsDiffer { .. } => Check::Memory,
            CheckError::CostsDiffer { .. } => Check::Costs,
        }
    }
}

/// What memory is counted in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Activations of one stage.
    Activations,
    Bytes,
}

struct Amount<'a>(f64, &'a Unit);

impl std::fmt::Display for Amount<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.1 {
            Unit::Activations if self.0 == 1.0 => write!(f, "1 activation"),
            Unit::Activations => write!(f, "{} activations", self.0),
            Unit::Bytes => write!(f, "{} B of activations", self.0),
        }
    }
}

fn story(cycle: &[Wait]) -> String {
    const SHOWN: usize = 8;
    let mut steps: Vec<String> = cycle.iter().take(SHOWN).map(Wait::to_string).collect();
    if cycle.len() > SHOWN {
        steps.push(format!("and {} more, back to the start", cycle.len() - SHOWN));
    }
    steps.join("; ")
}

/// Everything that holds for every good schedule; the first violation otherwise.
pub fn check(schedule: &Schedule) -> Result<(), CheckError> {
    completeness(schedule)?;
    dependencies(schedule)?;
    deadlock(schedule)
}

/// Every stage on a microbatch's way has its forward and its backward, fused or split.
pub fn completeness(schedule: &Schedule) -> Result<(), CheckError> {
    for microbatch in schedule.microbatches() {
        for stage in schedule.placement().stages().filter(|s| schedule.routes().visits(microbatch, *s)) {
            complete_at(schedule, stage, microbatch)?;
        }
    }
    Ok(())
}

fn complete_at(schedule: &Schedule, stage: StageId, microbatch: MicrobatchId) -> Result<(), CheckError> {
    let device = schedule.placement().device(stage);
    let pass = |kind| Pass::new(kind, stage, microbatch);
    let has = |kind| schedule.has(pass(kind));
    let missing = |kind| Err(CheckError::Missing { pass: pass(kind), device });
    if !has(PassKind::F) {
        return missing(PassKind::F);
    }
    let split = [PassKind::B, PassKind::W].into_iter().find(|kind| has(*kind));
    match (has(PassKind::BW), split) {
        (true, Some(split)) => {
            return Err(CheckError::FusedAndSplit { fused: pass(PassKind::BW), split: pass(split), device });
        }
        (true, None) => {}
        (false, None) => return missing(PassKind::BW),
        (false, Some(_)) if !has(PassKind::B) => return missing(PassKind::B),
        (false, Some(_)) if !has(PassKind::W) => return missing(PassKind::W),
        (false, Some(_)) => {}
    }
    moves_are_paired(schedule, device, pass(PassKind::F))
}

fn moves_are_paired(schedule: &Schedule, device: DeviceId, pass: Pass) -> Result<(), CheckError> {
    let has = |kind| schedule.has(pass.with_kind(kind));
    let evict = pass.with_kind(PassKind::Evict);
    match (has(PassKind::Evict) || has(PassKind::Offload), has(PassKind::Load)) {
        (true, false) => Err(CheckError::NeverLoaded { pass, device }),
        (false, true) => Err(CheckError::Missing { pass: evict, device }),
        (true, true) if has(PassKind::Evict) && schedule.keeper(device).is_none() => {
            Err(CheckError::NoKeeper { pass: evict, device })
        }
        _ => Ok(()),
    }
}

/// What a pass needs from its own device comes earlier in that device's order; and nothing needed is missing.
pub fn dependencies(schedule: &Schedule) -> Result<(), CheckError> {
    for (device, order) in schedule.placement().devices().zip(schedule.devices()) {
        for (place, &pass) in order.iter().enumerate() {
            let mut wrong = None;
            schedule.each_need(pass, |need| match schedule.place(need.pass) {
                None => {
                    let device = schedule.placement().device(need.pass.stage);
                    wrong = Some(CheckError::Missing { pass: need.pass, device });
                }
                Some((home, at)) if home == device && at > place => {
                    wrong = Some(CheckError::TooEarly { pass, needed: need.pass, device });
                }
                Some(_) => {}
            });
            wrong.map_or(Ok(()), Err)?;
        }
    }
    Ok(())
}

/// The orders of the devices and what passes need make no cycle: then every delay of messages only delays.
pub fn deadlock(schedule: &Schedule) -> Result<(), CheckError> {
    OrderGraph::of(schedule)?.acyclic().map_err(|cycle| CheckError::Deadlock { cycle })
}

/// The same where messages are not buffered: a device sends right after the pass that made a message and receives right
/// before the pass that needs it, and neither goes on before both are there.
pub fn deadlock_if_blocking(schedule: &Schedule) -> Result<(), CheckError> {
    OrderGraph::blocking(schedule)?.acyclic().map_err(|cycle| CheckError::Deadlock { cycle })
}

/// Both ends of every edge agree on the order of its messages, so that a channel without tags is enough.
pub fn channels(schedule: &Schedule) -> Result<(), CheckError> {
    let mut last: std::collections::BTreeMap<Via, (u32, MicrobatchId)> = Default::default();
    for &pass in schedule.devices().iter().flatten() {
        let mut wrong = None;
        schedule.each_need(pass, |need| {
            let Some(sent) = schedule.node(need.pass) else { return };
            let what = match need.via {
                Via::Activation(_) => "the activation",
                Via::Gradient(_) => "the gradient",
                Via::Own | Via::Vocabulary => return,
            };
            let before = last.insert(need.via, (sent, need.pass.microbatch));
            if let Some((_, second)) = before.filter(|(node, _)| *node > sent) {
                let (from, to) = (need.pass.stage, pass.stage);
                let device = |stage| schedule.placement().device(stage);
                wrong = Some(CheckError::Overtaking {
                    from: device(from),
                    to: device(to),
                    what,
                    first: need.pass.microbatch,
                    second,
                });
            }
        });
        wrong.map_or(Ok(()), Err)?;
    }
    Ok(())
}

pub(crate) fn costs_fit(schedule: &Schedule, costs: &Costs) -> Result<(), CheckError> {
    let (given, stages) = (costs.stages().len(), schedule.placement().num_stages());
    if given == stages { Ok(()) } else { Err(CheckError::CostsDiffer { given, stages }) }
}
