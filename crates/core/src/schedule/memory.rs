//! How many activations each device holds at once, in units or in bytes.
//!
//! An activation comes with its F and goes with its W or BW; a B alone lets a share of it go. Evicted ones weigh on the
//! device that keeps them, from the moment they leave until they are back; offloaded ones on none.

use crate::id::{DeviceId, StageId};

use super::check::{CheckError, Unit};
use super::time::Timed;
use super::{Pass, PassKind, Placement, Schedule};

/// What one activation of every stage weighs.
#[derive(Debug, Clone, PartialEq)]
pub struct Footprint {
    activations: Vec<f64>,
    /// What stays of them from B to W.
    kept: Vec<f64>,
    unit: Unit,
}

/// Of a split backward, B lets half of an activation go: the inputs of its layers stay for W.
pub const KEPT_FOR_W: f64 = 0.5;

impl Footprint {
    /// Each activation weighs one.
    pub fn units(placement: &Placement) -> Self {
        Self::of(vec![1.0; placement.num_stages()], Unit::Activations)
    }

    /// Each weighs its share of what the layers of its device leave behind, so that placements compare.
    pub fn shares(placement: &Placement) -> Self {
        let chunks = |stage| placement.stages_on(placement.device(stage)).len() as f64;
        Self::of(placement.stages().map(|stage| 1.0 / chunks(stage)).collect(), Unit::Activations)
    }

    /// Bytes of every stage's activation.
    pub fn bytes(activations: Vec<u64>) -> Self {
        Self::of(activations.into_iter().map(|bytes| bytes as f64).collect(), Unit::Bytes)
    }

    /// Bytes of every stage's activation, and those that stay from B to W: more, where B computes again what was not kept.
    pub fn exact(activations: &[(u64, u64)]) -> Self {
        let kept = activations.iter().map(|(_, kept)| *kept as f64).collect();
        let activations = activations.iter().map(|(whole, _)| *whole as f64).collect();
        Self { activations, kept, unit: Unit::Bytes }
    }

    fn of(activations: Vec<f64>, unit: Unit) -> Self {
        let kept = activations.iter().map(|whole| whole * KEPT_FOR_W).collect();
        Self { activations, kept, unit }
    }

    /// With another share that stays from B to W: 1 lets nothing go before W.
    pub fn keeping(mut self, kept: f64) -> Self {
        assert!((0.0..=1.0).contains(&kept), "a share is between 0 and 1, not {kept}");
        self.kept = self.activations.iter().map(|whole| whole * kept).collect();
        self
    }

    pub fn unit(&self) -> Unit {
        self.unit
    }

    /// What a pass adds when it starts, and what it lets go when it is over.
    pub fn change(&self, pass: Pass) -> (f64, f64) {
        let (whole, kept) = (self.activations[pass.stage.index()], self.kept[pass.stage.index()]);
        match pass.kind {
            PassKind::F | PassKind::Load => (whole, 0.0),
            PassKind::B => ((kept - whole).max(0.0), (whole - kept).max(0.0)),
            PassKind::W => (0.0, kept),
            PassKind::BW => ((kept - whole).max(0.0), kept.max(whole)),
            PassKind::Evict | PassKind::Offload => (0.0, whole),
            PassKind::S | PassKind::T | PassKind::Optimizer => (0.0, 0.0),
        }
    }

    /// A stage's activation.
    pub fn activation(&self, stage: StageId) -> f64 {
        self.activations[stage.index()]
    }
}

/// The most a device holds, and the pass at which it does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Peak {
    pub amount: f64,
    pub pass: Option<Pass>,
}

/// A step of a device's memory over time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Level {
    pub at: f64,
    pub amount: f64,
    pub pass: Pass,
}

/// The peak of every device.
pub fn peaks(schedule: &Schedule, timed: &Timed, footprint: &Footprint) -> Vec<Peak> {
    timeline(schedule, timed, footprint).iter().map(|levels| peak(levels)).collect()
}

fn peak(levels: &[Level]) -> Peak {
    levels.iter().fold(Peak { amount: 0.0, pass: None }, |peak, level| match level.amount > peak.amount {
        true => Peak { amount: level.amount, pass: Some(level.pass) },
        false => peak,
    })
}

/// Every device's memory, step by step. A device's own passes change it in their order, whatever the times.
pub fn timeline(schedule: &Schedule, timed: &Timed, footprint: &Footprint) -> Vec<Vec<Level>> {
    let mut changes = vec![Vec::new(); schedule.devices().len()];
    for (device, order) in schedule.placement().devices().zip(schedule.devices()) {
        for (place, &pass) in order.iter().enumerate() {
            let span = timed.spans[device.index()][place];
            let (come, go) = footprint.change(pass);
            let own = &mut changes[device.index()];
            own.push(Change { at: span.start, rank: (1, 2 * place), by: come, pass });
            own.push(Change { at: span.end, rank: (1, 2 * place + 1), by: -go, pass });
            if let Some(keeper) = schedule.keeper(device).filter(|_| kept_elsewhere(schedule, pass)) {
                let weight = footprint.activation(pass.stage);
                // What leaves makes room before anything else happens, what comes needs room last.
                let guest = match pass.kind {
                    PassKind::Evict => Change { at: span.start, rank: (2, place), by: weight, pass },
                    _ => Change { at: span.end, rank: (0, place), by: -weight, pass },
                };
                changes[keeper.index()].push(guest);
            }
        }
    }
    changes.into_iter().map(summed).collect()
}

fn kept_elsewhere(schedule: &Schedule, pass: Pass) -> bool {
    match pass.kind {
        PassKind::Evict => true,
        PassKind::Load => schedule.has(pass.with_kind(PassKind::Evict)),
        _ => false,
    }
}

#[derive(Clone)]
struct Change {
    at: f64,
    /// Which of several at once comes first.
    rank: (u8, usize),
    by: f64,
    pass: Pass,
}

fn summed(mut changes: Vec<Change>) -> Vec<Level> {
    changes.sort_by(|a, b| a.at.total_cmp(&b.at).then(a.rank.cmp(&b.rank)));
    let mut amount = 0.0;
    let steps = changes.into_iter().filter(|change| change.by != 0.0);
    let level = |change: Change| {
        amount += change.by;
        Level { at: change.at, amount, pass: change.pass }
    };
    steps.map(level).collect()
}

/// Whether every device stays within its cap.
pub fn within(
    schedule: &Schedule,
    timed: &Timed,
    footprint: &Footprint,
    caps: &[f64],
) -> Result<(), CheckError> {
    let devices = schedule.devices().len();
    if caps.len() != devices {
        return Err(CheckError::CapsDiffer { given: caps.len(), devices });
    }
    let peaks = peaks(schedule, timed, footprint);
    for (at, (peak, &cap)) in peaks.iter().zip(caps).enumerate() {
        // Sums of halves and thirds are not exact.
        if let Some(pass) = peak.pass.filter(|_| peak.amount > cap * (1.0 + 1e-9)) {
            let (device, unit) = (DeviceId::at(at), footprint.unit);
            return Err(CheckError::OverMemory { device, pass, peak: peak.amount, cap, unit });
        }
    }
    Ok(())
}
