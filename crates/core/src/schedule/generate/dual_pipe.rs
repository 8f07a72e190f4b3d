//! DualPipeV (DeepSeek): two chunks a device in a V; in the steady state each forward of one chunk is paired with a backward
//! of the other, so that the communication of one hides behind the compute of the other.
//!
//! Here pairs run one after the other, but start together: the first waits until both can ([`Schedule::with_pairs`]).
//! torch reads and writes them as one action.

use std::collections::VecDeque;

use crate::id::{DeviceId, MicrobatchId, StageId};

use super::{GenerateError, Name, Pass, Placement, Schedule, Spec, named};
use crate::schedule::PassKind;

pub fn dual_pipe_v(spec: &Spec, placement: Placement) -> Result<Schedule, GenerateError> {
    let (devices, microbatches) = (spec.devices, spec.microbatches);
    let least = 2 * u64::from(devices);
    if u64::from(microbatches) < least {
        return Err(GenerateError::TooFew { name: Name::DualPipeV, microbatches, devices, least });
    }
    let rows: Vec<Row> = placement.devices().map(|d| row(&placement, d, microbatches)).collect();
    let pairs = rows.iter().flat_map(|row| row.pairs.iter().copied()).collect();
    let orders = rows.into_iter().map(|row| row.order).collect();
    named(Name::DualPipeV, spec, placement, orders)?.with_pairs(pairs).map_err(GenerateError::Schedule)
}

/// The eight steps of the published schedule, for one device.
fn row(placement: &Placement, device: DeviceId, microbatches: u32) -> Row {
    let (p, i) = (placement.num_devices() as u32, device.0);
    let behind = p - 1 - i;
    let mut row = Row::new(placement.stages_on(device));
    (0..2 * behind).for_each(|_| row.forward(0));
    for _ in 0..=i {
        row.forward(0);
        row.forward(1);
    }
    for _ in 0..behind {
        row.input(1);
        row.weight();
        row.forward(1);
    }
    for step in 0..microbatches - 2 * p + i + 1 {
        // On the device at the turn, the first two have nothing to hide behind each other.
        row.both(0, 1, !(step == 0 && behind == 0));
        row.both(1, 0, true);
    }
    for _ in 0..behind {
        row.fused(1);
        row.both(1, 0, true);
    }
    let split_from = i.div_ceil(2);
    for step in 0..=i {
        // The second half is split, so that W can fill the end: on odd devices from chunk 1 on, on even ones from chunk 0.
        let splits = step > split_from || (step == split_from && i % 2 == 1);
        if splits {
            row.input(1)
        } else {
            row.fused(1)
        }
        if splits || step == split_from { row.input(0) } else { row.fused(0) }
    }
    for _ in 0..behind {
        row.weight();
        row.input(0);
    }
    (0..=i).for_each(|_| row.weight());
    row
}

struct Row {
    stages: [StageId; 2],
    order: Vec<Pass>,
    pairs: Vec<(Pass, Pass)>,
    /// Of each chunk: the next forward and the next backward.
    next_forward: [u32; 2],
    next_backward: [u32; 2],
    /// W that are due, oldest first.
    due: VecDeque<Pass>,
}

impl Row {
    fn new(stages: &[StageId]) -> Self {
        Self {
            stages: [stages[0], stages[1]],
            order: vec![],
            pairs: vec![],
            next_forward: [0; 2],
            next_backward: [0; 2],
            due: VecDeque::new(),
        }
    }

    fn forward(&mut self, chunk: usize) {
        let m = self.next_forward[chunk];
        self.next_forward[chunk] += 1;
        self.order.push(Pass::new(PassKind::F, self.stages[chunk], MicrobatchId(m)));
    }

    fn backward(&mut self, chunk: usize, kind: PassKind) -> Pass {
        let pass = Pass::new(kind, self.stages[chunk], MicrobatchId(self.next_backward[chunk]));
        self.next_backward[chunk] += 1;
        self.order.push(pass);
        pass
    }

    fn fused(&mut self, chunk: usize) {
        self.backward(chunk, PassKind::BW);
    }

    fn input(&mut self, chunk: usize) {
        let pass = self.backward(chunk, PassKind::B);
        self.due.push_back(pass.with_kind(PassKind::W));
    }

    fn weight(&mut self) {
        self.order.extend(self.due.pop_front());
    }

    /// A forward of one chunk and a backward of the other.
    fn both(&mut self, forward: usize, backward: usize, paired: bool) {
        self.forward(forward);
        self.fused(backward);
        if let (true, [.., first, second]) = (paired, &self.order[..]) {
            self.pairs.push((*first, *second));
        }
    }
}
