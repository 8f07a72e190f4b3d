//! An end before the last step: a rank that is asked to end (SIGTERM) tells the others, and all stop after the same step.
//!
//! Ranks of a pipeline are not at the same place, so they agree about once a second, not after every step: how many steps that
//! is follows from what all of them told the last time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossmesh_comm::error::CommError;
use crossmesh_comm::launch::asked_to_end;
use crossmesh_core::id::Rank;
use crossmesh_train::kernels::Kernels;
use crossmesh_train::runtime::Trainer;

use super::rank::Trouble;
use super::save::Saver;

/// Between two agreements.
const EVERY_US: i64 = 1_000_000;
const MOST_STEPS: i64 = 1_000;

/// See the module.
pub struct Stop {
    /// None where there are no checkpoints: then a signal ends the process as it always does.
    asked: Option<Arc<AtomicBool>>,
    /// The next agreement is after this step.
    next: u64,
}

impl Stop {
    pub fn new(rank: Rank, saver: &Saver) -> Result<Self, Trouble> {
        let wrong = |error: crossmesh_comm::launch::LaunchError| CommError::System {
            me: rank,
            what: "watch over signals",
            cause: error.to_string(),
        };
        let asked = saver.is_on().then(asked_to_end).transpose().map_err(wrong)?;
        Ok(Self { asked, next: 0 })
    }

    /// After a step that took so long here: whether this was the last.
    pub fn is_agreed<K: Kernels>(
        &mut self,
        saver: &Saver,
        trainer: &mut Trainer<K>,
        step_s: f64,
    ) -> Result<bool, Trouble> {
        let Some(asked) = self.asked.as_ref().filter(|_| trainer.steps() >= self.next) else {
            return Ok(false);
        };
        let mine = [i64::from(asked.load(Ordering::SeqCst)), (step_s * 1e6) as i64];
        let all = saver.exchange(trainer, &mine)?;
        let longest_us = all.iter().skip(1).step_by(2).copied().max().unwrap_or(1).max(1);
        self.next = trainer.steps() + (EVERY_US / longest_us).clamp(1, MOST_STEPS) as u64;
        Ok(all.iter().step_by(2).any(|asked| *asked != 0))
    }
}
