//! Checkpoints of a job: written beside training, complete when all ranks have written their part.
//!
//! ```text
//! step k     every rank copies what it writes, and a thread of its own writes it
//! step k+1.. between steps, ranks tell each other whether they are through
//!            all are: their reports go to the first rank, which makes the checkpoint complete
//! ```

use std::num::NonZeroUsize;
use std::path::Path;

use crossmesh_comm::collectives::{CallError, Element, GroupId};
use crossmesh_core::id::Rank;
use crossmesh_train::checkpoint::{
    Checkpoint, CheckpointError, Convert, Draft, Facts, Moments, OptimizerFacts, Sharding, Snapshot,
    StageState, StageTarget, Store, Writing,
};
use crossmesh_train::config::AnyModel;
use crossmesh_train::job::Job;
use crossmesh_train::kernels::scalar::Scalar;
use crossmesh_train::optim::OptimizerConfig;
use crossmesh_train::runtime::{TrainError, Trainer};
use crossmesh_train::stage_rank::StageRank;

use super::Training;
use super::rank::Trouble;

/// See the module.
pub struct Saver {
    store: Store,
    every: u64,
    rank: Rank,
    ranks: Vec<Rank>,
    /// All ranks, where there are several.
    world: Option<GroupId>,
    place: StageRank,
    sharding: Sharding,
    pending: Option<Pending>,
}

/// A save that is under way.
struct Pending {
    facts: Facts,
    writing: Option<Writing>,
    /// There once this rank has written its part.
    report: Vec<u8>,
}

impl Saver {
    pub fn new<T: Scalar + Element>(training: &Training, trainer: &mut Trainer<T>) -> Result<Self, Trouble> {
        let (job, rank) = (&training.resolved.job, trainer.rank());
        let ranks = job.ranks();
        let world = match ranks.len() {
            1 => None,
            _ => Some(trainer.collectives().group(&ranks).map_err(TrainError::from)?),
        };
        let saving = &training.config.saving;
        let keep = NonZeroUsize::new(saving.keep).unwrap_or(NonZeroUsize::MIN);
        Ok(Self {
            store: Store::new(&saving.folder, keep),
            every: saving.every,
            rank,
            ranks,
            world,
            place: place(job, rank)?,
            sharding: if job.update.zero { Sharding::AlongDp } else { Sharding::Replicated },
            pending: None,
        })
    }

    /// Fills the trainer from a checkpoint.
    pub fn load<T: Scalar + Element>(&self, trainer: &mut Trainer<T>, folder: &Path) -> Result<(), Trouble> {
        let checkpoint = Checkpoint::open(folder)?;
        let (step, optimizer) = (checkpoint.facts().step, checkpoint.facts().optimizer.clone());
        let sharding = self.sharding;
        trainer.each_stage(|stage| -> Result<(), CheckpointError> {
            let (names, shard) = (stage.optimizer.moment_names(), stage.optimizer.shard());
            let moments = stage.optimizer.resume(optimizer.as_ref().map_or(0, |o| o.steps));
            let values = moments.iter_mut().map(|m| &mut m[..]).collect();
            let target = StageTarget {
                parameters: stage.parameters,
                place: &self.place,
                values: &mut stage.params[..],
                moments: Some(Moments { names, values, shard, sharding }),
            };
            checkpoint.load(&mut [target], Convert::No).map(drop)
        })?;
        // An imported model has weights and no past.
        trainer.resume_at(if optimizer.is_some() { step } else { 0 });
        Ok(())
    }

    /// Between two steps: goes on with a save, and starts one where it is due.
    pub fn after_step<T: Scalar + Element>(
        &mut self,
        training: &Training,
        trainer: &mut Trainer<T>,
    ) -> Result<(), Trouble> {
        self.go_on(trainer, false)?;
        let due = self.every > 0 && trainer.steps().is_multiple_of(self.every);
        match due || (self.every > 0 && trainer.steps() == training.config.train.steps) {
            true => self.start(training, trainer),
            false => Ok(()),
        }
    }

    /// After the last step: what was written has to be complete.
    pub fn finish<T: Scalar + Element>(&mut self, trainer: &mut Trainer<T>) -> Result<(), Trouble> {
        self.go_on(trainer, true)
    }

    fn start<T: Scalar + Element>(
        &mut self,
        training: &Training,
        trainer: &mut Trainer<T>,
    ) -> Result<(), Trouble> {
        // One at a time: a slow disk makes training wait rather than fall behind.
        self.go_on(trainer, true)?;
        let snapshot = self.snapshot(training, trainer)?;
        let facts = facts(training, trainer.steps());
        self.pending = Some(Pending { facts, writing: Some(self.store.write(snapshot)), report: vec![] });
        Ok(())
    }

    /// A copy of what this rank writes, and of nothing else.
    fn snapshot<T: Scalar + Element>(
        &self,
        training: &Training,
        trainer: &mut Trainer<T>,
    ) -> Result<Snapshot, CheckpointError> {
        let mut draft = Draft::new(trainer.steps(), self.rank);
        trainer.each_stage(|stage| -> Result<(), CheckpointError> {
            // Tied weights are saved by the first stage that has them.
            let tied = training.wiring.tied.iter();
            let saved_before =
                tied.filter(|tied| tied.stages.contains(&stage.stage) && tied.stages[0] != stage.stage);
            let elsewhere: Vec<&str> = saved_before.map(|tied| tied.name.as_str()).collect();
            draft.add(&StageState {
                parameters: stage.parameters,
                place: &self.place,
                values: &stage.params[..],
                moments: Moments {
                    names: stage.optimizer.moment_names(),
                    values: stage.optimizer.moments().iter().map(|m| &m[..]).collect(),
                    shard: stage.optimizer.shard(),
                    sharding: self.sharding,
                },
                elsewhere: &elsewhere,
            })
        })?;
        draft.finish()
    }

    /// Makes a save complete if all ranks have written their part; or waits until they have.
    fn go_on<T: Scalar + Element>(&mut self, trainer: &mut Trainer<T>, wait: bool) -> Result<(), Trouble> {
        let Some(pending) = &mut self.pending else { return Ok(()) };
        if let Some(writing) = pending.writing.take_if(|writing| wait || writing.is_finished()) {
            pending.report = writing.report();
        }
        let mine = if pending.writing.is_some() { -1 } else { pending.report.len() as i64 };
        let report = pending.report.clone();
        let Some(reports) = self.gather(trainer, mine, &report)? else { return Ok(()) };
        if let Some(pending) = self.pending.take().filter(|_| self.ranks.first() == Some(&self.rank)) {
            self.store.commit(&pending.facts, &reports)?;
        }
        Ok(())
    }

    /// Everybody's report, if all of them have one.
    fn gather<T: Scalar + Element>(
        &self,
        trainer: &mut Trainer<T>,
        mine: i64,
        report: &[u8],
    ) -> Result<Option<Vec<Vec<u8>>>, Trouble> {
        let Some(world) = self.world else { return Ok((mine >= 0).then(|| vec![report.to_vec()])) };
        let comm = trainer.collectives();
        let call = |error: CallError| Trouble::from(TrainError::from(error));
        let mut lengths = vec![0i64; self.ranks.len()];
        comm.all_gather(world, &[mine], &mut lengths).map_err(call)?;
        let longest = lengths.iter().copied().max().unwrap_or(0).max(0) as usize;
        if lengths.iter().any(|len| *len < 0) {
            return Ok(None);
        }
        let mut padded = report.to_vec();
        padded.resize(longest, 0);
        let mut all = vec![0u8; longest * self.ranks.len()];
        comm.all_gather(world, &padded, &mut all).map_err(call)?;
        let parts = all.chunks(longest.max(1)).zip(&lengths);
        Ok(Some(parts.map(|(part, len)| part[..*len as usize].to_vec()).collect()))
    }
}

fn place(job: &Job, rank: Rank) -> Result<StageRank, Trouble> {
    let (device, position) = job.home(rank).ok_or(TrainError::NoPart { rank })?;
    Ok(job.place(device, position).map_err(|e| TrainError::Job(e.into()))?)
}

fn facts(training: &Training, step: u64) -> Facts {
    let job = &training.resolved.job;
    let (kind, moments): (&str, &[&str]) = match job.update.optimizer {
        OptimizerConfig::AdamW { .. } => ("adamw", &["exp_avg", "exp_avg_sq"]),
        OptimizerConfig::Sgd { .. } => ("sgd", &["momentum"]),
    };
    let moments = moments.iter().map(|name| name.to_string()).collect();
    Facts {
        step,
        samples: step * job.batch(),
        seed: job.seed,
        model: model_facts(&training.resolved.model),
        run: serde_json::json!({ "name": training.doc.name, "config": training.doc.config }),
        optimizer: Some(OptimizerFacts { kind: kind.into(), steps: step, moments }),
    }
}

/// The model's sizes, under the names that a config has for them.
fn model_facts(model: &AnyModel) -> serde_json::Value {
    match model {
        AnyModel::Gpt(gpt) => {
            let c = gpt.config();
            serde_json::json!({
                "kind": "gpt", "vocab": c.vocab, "context": c.context, "width": c.width, "layers": c.layers,
                "heads": c.heads, "hidden": c.hidden, "tied": c.tied, "dropout": c.dropout, "epsilon": c.epsilon,
            })
        }
        AnyModel::Unet(unet) => {
            let c = unet.config();
            serde_json::json!({
                "kind": "u-transformer", "image": c.image, "image_channels": c.image_channels, "base": c.base,
                "multipliers": c.multipliers, "blocks": c.blocks, "attention": c.attention, "heads": c.heads,
                "groups": c.groups, "context_rows": c.context_rows, "context_width": c.context_width,
                "epsilon": c.epsilon,
            })
        }
    }
}
