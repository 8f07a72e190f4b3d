//! What a rank does by itself: copies inside its memory, a little at a time, and passes on its device.

use std::io;

use crossmesh_core::id::Rank;
use crossmesh_core::program::OpKind;

use super::Engine;
use super::ops::note_progress;
use crate::device::DeviceError;
use crate::error::CommError;
use crate::memory::moving::Moving;

/// What is copied before the loop looks at its links again.
const COPY_STEP_BYTES: u64 = 1 << 20;

impl Engine {
    /// Takes note of a pass that has ended, and starts the next.
    pub(super) fn compute(&mut self) -> Result<(), CommError> {
        while let Some(&(id, op)) = self.passes.front() {
            let Some(device) = &mut self.device else { return Err(self.cannot_compute(DeviceError::None)) };
            let now = self.clock.now_ns();
            let Some(job) = self.jobs.get_mut(&id) else {
                self.passes.pop_front();
                continue;
            };
            if self.computing {
                let ended = device.ended();
                match ended {
                    Ok(true) => {}
                    Ok(false) => return Ok(()),
                    Err(error) => return Err(self.cannot_compute(error)),
                }
                self.computing = false;
                self.passes.pop_front();
                note_progress(job, op, 0, now);
                self.end(id, op, now);
            } else if let OpKind::Compute { pass, nanos, .. } = job.op(op).kind {
                job.ops[op as usize].started_ns = now;
                self.computing = true;
                let begun = device.begin(pass, nanos);
                begun.map_err(|error| self.cannot_compute(error))?;
            }
        }
        Ok(())
    }

    pub(super) fn cannot_compute(&self, error: DeviceError) -> CommError {
        CommError::System { me: self.me, what: "compute", cause: error.to_string() }
    }

    /// Copies for a while.
    pub(super) fn copy_some(&mut self) -> Result<(), CommError> {
        self.end_moving()?;
        let mut budget = COPY_STEP_BYTES;
        while budget > 0
            && let Some(&(id, op)) = self.copies.front()
        {
            let now = self.clock.now_ns();
            let Some(job) = self.jobs.get_mut(&id) else {
                self.copies.pop_front();
                continue;
            };
            let bytes = job.op(op).bytes;
            // Never half an element.
            let part = self.copied..(self.copied + budget).next_multiple_of(64).min(bytes);
            if let (Some(from), Some(into)) = (job.source(op), job.target(op)) {
                let adds = matches!(job.op(op).kind, OpKind::Copy { reduce: true, .. });
                let combine = job.spec.tensors[job.op(op).tensor as usize].combine.filter(|_| adds);
                if from.gpu().is_some() || into.gpu().is_some() {
                    let moving = Moving::copy(from, into, 0..bytes, combine, Some(&self.sleeper.waker()));
                    note_progress(job, op, 0, now);
                    self.copies.pop_front();
                    self.moving.push_back((id, op, moving.map_err(|e| cannot_copy(self.me, &e))?));
                    continue;
                }
                into.copy_from(from, part.clone(), combine);
            }
            budget = budget.saturating_sub(part.end - part.start);
            self.copied = part.end;
            if note_progress(job, op, part.end, now) {
                job.ops[op as usize].ended_ns = self.clock.now_ns();
                self.copies.pop_front();
                self.copied = 0;
                self.end(id, op, now);
            }
        }
        Ok(())
    }

    /// Takes note of copies that a device has done.
    fn end_moving(&mut self) -> Result<(), CommError> {
        while let Some((id, op, moving)) = self.moving.front_mut() {
            if !moving.is_done().map_err(|e| cannot_copy(self.me, &e))? {
                break;
            }
            let (id, op) = (*id, *op);
            self.moving.pop_front();
            let now = self.clock.now_ns();
            if let Some(job) = self.jobs.get_mut(&id) {
                note_progress(job, op, job.op(op).bytes, now);
                self.end(id, op, now);
            }
        }
        Ok(())
    }
}

fn cannot_copy(me: Rank, error: &io::Error) -> CommError {
    CommError::System { me, what: "copy on its GPU", cause: error.to_string() }
}
