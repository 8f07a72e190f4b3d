//! BPipe: 1F1B whose early stages leave activations with late ones.
//!
//! 1F1B's stage x holds p - x activations, its partner p - 1 - x holds x + 1. An early stage that holds more than
//! ⌈(p + 2) / 2⌉ evicts the newest one to its partner while it computes something else, and loads it back one pass before
//! its backward. algorithms.md B28.
//!
//! ```text
//! p = 4, stage 0   F0 F1 EVICT1 F2 F3 BW0 LOAD1 EVICT3 F4 BW1 ...
//! ```

use std::collections::{BTreeSet, VecDeque};

use crate::id::{DeviceId, MicrobatchId, StageId};

use super::{Backward, GenerateError, Name, Pass, Placement, Schedule, Spec, named, windows};
use crate::schedule::PassKind;

/// What every stage may hold.
pub fn limit(devices: u32) -> usize {
    (devices as usize + 2).div_ceil(2)
}

pub fn bpipe(spec: &Spec, placement: Placement) -> Result<Schedule, GenerateError> {
    let p = spec.devices;
    let plain: Vec<u32> = (1..=p).rev().collect();
    let mut orders = windows::windowed(&plain, spec.microbatches, Backward::Fused);
    let mut keepers = vec![None; p as usize];
    for stage in 0..p / 2 {
        if (p - stage) as usize > limit(p) {
            keepers[stage as usize] = Some(DeviceId(p - 1 - stage));
            orders[stage as usize] = evicting(StageId(stage), &orders[stage as usize], limit(p));
        }
    }
    Ok(named(Name::BPipe, spec, placement, orders)?.with_keepers(keepers))
}

/// The order with moves: an eviction one pass before the forward it makes room for, a load one pass before its backward.
fn evicting(stage: StageId, order: &[Pass], limit: usize) -> Vec<Pass> {
    let mut moved = Moves { stage, resident: BTreeSet::new(), away: BTreeSet::new(), order: vec![] };
    let mut ahead: VecDeque<Pass> = order.iter().copied().collect();
    while let Some(pass) = ahead.pop_front() {
        let m = pass.microbatch.0;
        moved.load(m, pass.kind);
        // Room for this pass, the forward behind it, and what has to come back for the backward behind that.
        let here = usize::from(pass.kind == PassKind::F);
        let freed = usize::from(pass.kind == PassKind::BW);
        let next = usize::from(ahead.front().is_some_and(|p| p.kind == PassKind::F));
        let soon = ahead.iter().take(2).find(|p| p.kind == PassKind::BW).map(|p| p.microbatch.0);
        let back = usize::from(soon.is_some_and(|m| moved.away.contains(&m)));
        while moved.resident.len() + here + next + back > limit + freed && moved.evict(m, soon) {}
        moved.order.push(pass);
        match pass.kind {
            PassKind::F => moved.resident.insert(m),
            _ => moved.resident.remove(&m),
        };
        if let Some(soon) = soon.filter(|_| pass.kind == PassKind::BW) {
            moved.load(soon, PassKind::BW);
        }
    }
    moved.order
}

struct Moves {
    stage: StageId,
    resident: BTreeSet<u32>,
    away: BTreeSet<u32>,
    order: Vec<Pass>,
}

impl Moves {
    /// Fetches what a backward needs, if it is away.
    fn load(&mut self, microbatch: u32, kind: PassKind) {
        if kind == PassKind::BW && self.away.remove(&microbatch) {
            self.resident.insert(microbatch);
            self.push(PassKind::Load, microbatch);
        }
    }

    /// Sends the newest away: of all it is needed last.
    fn evict(&mut self, now: u32, soon: Option<u32>) -> bool {
        let newest = self.resident.iter().copied().rev().find(|m| *m != now && Some(*m) != soon);
        if let Some(newest) = newest {
            self.resident.remove(&newest);
            self.away.insert(newest);
            self.push(PassKind::Evict, newest);
        }
        newest.is_some()
    }

    fn push(&mut self, kind: PassKind, microbatch: u32) {
        self.order.push(Pass::new(kind, self.stage, MicrobatchId(microbatch)));
    }
}
