//! Schedules that a window per stage describes: so many microbatches are in flight, and then a backward comes before every
//! further forward.
//!
//! ```text
//! window 3   F0 F1 F2 B0 F3 B1 F4 B2 B3 B4
//! ```
//! GPipe's windows are all microbatches, 1F1B's the stages that are left, and eager's nearly twice as many.

use crate::id::{MicrobatchId, StageId};

use super::{Backward, GenerateError, Name, Pass, Placement, Schedule, Spec, named};
use crate::schedule::PassKind;

pub fn gpipe(spec: &Spec, placement: Placement, backward: Backward) -> Result<Schedule, GenerateError> {
    let orders = windowed(&vec![spec.microbatches; spec.devices as usize], spec.microbatches, backward);
    named(Name::GPipe, spec, placement, orders)
}

pub fn one_f_one_b(spec: &Spec, placement: Placement, backward: Backward) -> Result<Schedule, GenerateError> {
    let windows: Vec<u32> = (1..=spec.devices).rev().collect();
    named(Name::OneF1B, spec, placement, windowed(&windows, spec.microbatches, backward))
}

/// algorithms.md B0: forwards before the first backward at stage i are 2(p - i) - 1.
pub fn eager(spec: &Spec, placement: Placement, backward: Backward) -> Result<Schedule, GenerateError> {
    let orders = windowed(&eager_windows(spec.devices), spec.microbatches, backward);
    named(Name::Eager1F1B, spec, placement, orders)
}

pub fn eager_windows(devices: u32) -> Vec<u32> {
    (1..=devices).rev().map(|left| 2 * left - 1).collect()
}

/// The order of every device, one stage each.
pub fn windowed(windows: &[u32], microbatches: u32, backward: Backward) -> Vec<Vec<Pass>> {
    let order = |(stage, window): (usize, &u32)| {
        stage_order(StageId::at(stage), (*window).clamp(1, microbatches), microbatches, backward)
    };
    windows.iter().enumerate().map(order).collect()
}

fn stage_order(stage: StageId, window: u32, microbatches: u32, backward: Backward) -> Vec<Pass> {
    let pass = |kind, microbatch| Pass::new(kind, stage, MicrobatchId(microbatch));
    let mut order: Vec<Pass> = (0..window).map(|m| pass(PassKind::F, m)).collect();
    for m in 0..microbatches {
        match backward {
            Backward::Fused => order.push(pass(PassKind::BW, m)),
            Backward::Split => order.extend([pass(PassKind::B, m), pass(PassKind::W, m)]),
        }
        if m + window < microbatches {
            order.push(pass(PassKind::F, m + window));
        }
    }
    order
}
