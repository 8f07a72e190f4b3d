//! Checkpoints of a job: written beside training, complete when all ranks have written their part.
//!
//! ```text
//! step k     every rank copies what it writes, and a thread of its own writes it
//! step k+1.. between steps, ranks tell each other whether they are through
//!            all are: their reports go to the first rank, where another thread makes the checkpoint complete
//! ```
//!
//! Nobody waits for a disk without a word: while there is nothing else to do, ranks go on telling each other how far they are.

use std::num::NonZeroUsize;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;

use crossmesh_comm::collectives::{CallError, GroupId};
use crossmesh_core::id::Rank;
use crossmesh_train::checkpoint::{
    CheckpointError, Draft, Facts, Moments, OptimizerFacts, Snapshot, Source, StageState, StageTarget, Store,
    Writing, hf,
};
use crossmesh_train::config::AnyModel;
use crossmesh_train::job::Job;
use crossmesh_train::kernels::Kernels;
use crossmesh_train::kernels::scalar::Scalar as _;
use crossmesh_train::optim::OptimizerConfig;
use crossmesh_train::runtime::{TrainError, Trainer};
use crossmesh_train::stage_rank::StageRank;

use super::Training;
use super::rank::Trouble;

/// See the module.
pub struct Saver {
    store: Store,
    every: u64,
    /// Whether the last step is saved.
    last: bool,
    rank: Rank,
    ranks: Vec<Rank>,
    /// All ranks, where there are several.
    world: Option<GroupId>,
    place: StageRank,
    pending: Option<Pending>,
    /// The step of the last save that was started.
    saved: Option<u64>,
}

/// A save that is under way.
struct Pending {
    facts: Facts,
    writing: Option<Writing>,
    /// There once this rank has written its part.
    report: Vec<u8>,
    /// Whether older ones may go for it: not for a state whose loss is not finite.
    is_good: bool,
    /// All ranks have written theirs; on the first one it is being made complete.
    committing: Option<Option<Committing>>,
}

/// A thread that makes a checkpoint complete; what it has to remark.
type Committing = JoinHandle<Result<Option<String>, CheckpointError>>;

/// Between two looks at a disk.
const LOOK: Duration = Duration::from_millis(5);

impl Saver {
    pub fn new<K: Kernels>(training: &Training, trainer: &mut Trainer<K>) -> Result<Self, Trouble> {
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
            last: saving.last,
            rank,
            ranks,
            world,
            place: place(job, rank)?,
            pending: None,
            saved: None,
        })
    }

    /// Fills the trainer from a checkpoint: with all it has, or with its weights alone.
    pub fn load<K: Kernels>(
        &self,
        training: &Training,
        trainer: &mut Trainer<K>,
        folder: &Path,
        weights_only: bool,
    ) -> Result<(), Trouble> {
        let source = Source::open(folder, &model_facts(&training.resolved.model), weights_only)?;
        let facts = source.facts().filter(|_| !weights_only);
        let past = facts.and_then(|facts| facts.optimizer.as_ref());
        trainer.each_stage(|mut stage| -> Result<(), CheckpointError> {
            let (names, share) = (stage.optimizer.moment_names(), stage.optimizer.share().clone());
            let mut weights = vec![K::Real::ZERO; stage.share().runs.len()];
            let kept = if past.is_some() { names.len() } else { 0 };
            let mut moments = vec![vec![K::Real::ZERO; share.runs.len()]; kept];
            let values = moments.iter_mut().map(|m| &mut m[..]).collect();
            let target = StageTarget {
                parameters: stage.parameters,
                place: &self.place,
                values: &mut weights,
                share: stage.share().clone(),
                moments: past.map(|_| Moments { names, values, share }),
            };
            source.load(&mut [target])?;
            stage.replace(&weights, past.map_or(0, |o| o.steps), past.map(|_| &moments[..]));
            Ok(())
        })?;
        if let Some(facts) = facts.filter(|facts| facts.optimizer.is_some()) {
            trainer.resume_at(facts.step, facts.samples);
        }
        Ok(())
    }

    /// Between two steps: goes on with a save, and starts one where it is due. A step that changed nothing is none to push older ones out for.
    pub fn after_step<K: Kernels>(
        &mut self,
        training: &Training,
        trainer: &mut Trainer<K>,
        skipped: bool,
    ) -> Result<(), Trouble> {
        self.go_on(trainer, false)?;
        let due = self.every > 0 && trainer.steps().is_multiple_of(self.every) && !skipped;
        match due || (self.last && trainer.steps() == training.config.train.steps) {
            true => self.start(training, trainer, !skipped),
            false => Ok(()),
        }
    }

    /// Whether there are checkpoints at all.
    pub fn is_on(&self) -> bool {
        self.every > 0 || self.last
    }

    /// Saves this step, unless that is under way.
    pub fn save_now<K: Kernels>(
        &mut self,
        training: &Training,
        trainer: &mut Trainer<K>,
        skipped: bool,
    ) -> Result<(), Trouble> {
        if self.saved == Some(trainer.steps()) { Ok(()) } else { self.start(training, trainer, !skipped) }
    }

    /// After the last step: what was written has to be complete.
    pub fn finish<K: Kernels>(&mut self, trainer: &mut Trainer<K>) -> Result<(), Trouble> {
        self.go_on(trainer, true)
    }

    fn start<K: Kernels>(
        &mut self,
        training: &Training,
        trainer: &mut Trainer<K>,
        is_good: bool,
    ) -> Result<(), Trouble> {
        // One at a time: a slow disk makes training wait rather than fall behind.
        self.go_on(trainer, true)?;
        let snapshot = self.snapshot(training, trainer)?;
        let facts = facts(training, trainer)?;
        let writing = Some(self.store.write(snapshot));
        self.pending = Some(Pending { facts, writing, report: vec![], is_good, committing: None });
        self.saved = Some(trainer.steps());
        Ok(())
    }

    /// A copy of what this rank writes, and of nothing else.
    fn snapshot<K: Kernels>(
        &self,
        training: &Training,
        trainer: &mut Trainer<K>,
    ) -> Result<Snapshot, CheckpointError> {
        let mut draft = Draft::new(trainer.steps(), self.rank);
        trainer.each_stage(|stage| -> Result<(), CheckpointError> {
            // Tied weights are saved by the first stage that has them.
            let tied = training.wiring.tied.iter();
            let saved_before =
                tied.filter(|tied| tied.stages.contains(&stage.stage) && tied.stages[0] != stage.stage);
            let elsewhere: Vec<&str> = saved_before.map(|tied| tied.name.as_str()).collect();
            let ((values, share), moments) = (stage.weights(), stage.moments());
            draft.add(&StageState {
                parameters: stage.parameters,
                place: &self.place,
                values: &values,
                share: share.clone(),
                moments: Moments {
                    names: stage.optimizer.moment_names(),
                    values: moments.iter().map(|m| &m[..]).collect(),
                    share: stage.optimizer.share().clone(),
                },
                elsewhere: &elsewhere,
            })
        })?;
        draft.finish()
    }

    /// Takes a save a step further where all ranks are through with the one before; or waits until it is complete.
    fn go_on<K: Kernels>(&mut self, trainer: &mut Trainer<K>, wait: bool) -> Result<(), Trouble> {
        while let Some(pending) = &mut self.pending {
            let went_on = match pending.committing {
                None => self.collect(trainer)?,
                Some(_) => self.complete(trainer)?,
            };
            match (went_on, wait) {
                (true, _) => {}
                (false, false) => return Ok(()),
                (false, true) => std::thread::sleep(LOOK),
            }
        }
        Ok(())
    }

    /// Whether all have written their part: the first one then makes the checkpoint complete.
    fn collect<K: Kernels>(&mut self, trainer: &mut Trainer<K>) -> Result<bool, Trouble> {
        let Some(pending) = &mut self.pending else { return Ok(false) };
        if let Some(writing) = pending.writing.take_if(|writing| writing.is_finished()) {
            pending.report = writing.report();
        }
        let mine = if pending.writing.is_some() { -1 } else { pending.report.len() as i64 };
        let report = pending.report.clone();
        let Some(reports) = self.gather(trainer, mine, &report)? else { return Ok(false) };
        let (store, first) = (self.store.clone(), self.ranks.first() == Some(&self.rank));
        if let Some(pending) = &mut self.pending {
            let (facts, is_good) = (pending.facts.clone(), pending.is_good);
            pending.committing =
                Some(if first { Some(commit(store, facts, reports, is_good)?) } else { None });
        }
        Ok(true)
    }

    /// Whether it is complete.
    fn complete<K: Kernels>(&mut self, trainer: &mut Trainer<K>) -> Result<bool, Trouble> {
        let Some(Pending { committing: Some(committing), .. }) = &mut self.pending else { return Ok(false) };
        if let Some(thread) = committing.take_if(|thread| thread.is_finished()) {
            let panicked = |_| CheckpointError::Parts {
                step: self.saved.unwrap_or(0),
                what: "the thread that completes it panicked".into(),
            };
            let remark = thread.join().map_err(panicked)??;
            remark.iter().for_each(|remark| crate::part::log()(remark));
        }
        let busy = i64::from(committing.is_some());
        if self.exchange(trainer, &[busy])?.contains(&1) {
            return Ok(false);
        }
        self.pending = None;
        Ok(true)
    }

    /// What every rank has to tell, one after the other.
    pub fn exchange<K: Kernels>(&self, trainer: &mut Trainer<K>, mine: &[i64]) -> Result<Vec<i64>, Trouble> {
        let Some(world) = self.world else { return Ok(mine.to_vec()) };
        let mut all = vec![0i64; mine.len() * self.ranks.len()];
        let call = |error: CallError| Trouble::from(TrainError::from(error));
        trainer.collectives().all_gather(world, mine, &mut all).map_err(call)?;
        Ok(all)
    }

    /// Everybody's report, if all of them have one.
    fn gather<K: Kernels>(
        &self,
        trainer: &mut Trainer<K>,
        mine: i64,
        report: &[u8],
    ) -> Result<Option<Vec<Vec<u8>>>, Trouble> {
        let Some(world) = self.world else { return Ok((mine >= 0).then(|| vec![report.to_vec()])) };
        let lengths = self.exchange(trainer, &[mine])?;
        let comm = trainer.collectives();
        let call = |error: CallError| Trouble::from(TrainError::from(error));
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

/// On the first rank: makes a checkpoint complete beside training. That old ones could not be removed is worth a remark.
fn commit(
    store: Store,
    facts: Facts,
    reports: Vec<Vec<u8>>,
    is_good: bool,
) -> Result<Committing, CheckpointError> {
    let step = facts.step;
    let run = move || {
        store.commit(&facts, &reports)?;
        let pruned = if is_good { store.prune() } else { Ok(()) };
        Ok(pruned.err().map(|error| format!("warning: old checkpoints could not be removed: {error}")))
    };
    let thread = std::thread::Builder::new().name("commit".into()).spawn(run);
    thread.map_err(|cause| CheckpointError::Parts {
        step,
        what: format!("no thread could be started to complete it: {cause}"),
    })
}

fn place(job: &Job, rank: Rank) -> Result<StageRank, Trouble> {
    let (device, position) = job.home(rank).ok_or(TrainError::NoPart { rank })?;
    Ok(job.place(device, position).map_err(|e| TrainError::Job(e.into()))?)
}

fn facts<K: Kernels>(training: &Training, trainer: &mut Trainer<K>) -> Result<Facts, Trouble> {
    let job = &training.resolved.job;
    let kind = match job.update.optimizer {
        OptimizerConfig::AdamW { .. } => "adamw",
        OptimizerConfig::Sgd { .. } => "sgd",
    };
    let moments = job.update.optimizer.moment_names();
    let moments = moments.iter().map(|name| name.to_string()).collect();
    // Fewer than the steps where some were skipped.
    let mut steps = 0;
    trainer.each_stage(|stage| -> Result<(), Trouble> {
        steps = stage.optimizer.steps();
        Ok(())
    })?;
    Ok(Facts {
        step: trainer.steps(),
        samples: trainer.samples(),
        seed: job.seed,
        model: model_facts(&training.resolved.model),
        run: serde_json::json!({ "name": training.doc.name, "config": training.doc.config }),
        optimizer: Some(OptimizerFacts { kind: kind.into(), steps, moments }),
    })
}

/// The model's sizes, under the names that a config has for them.
pub fn model_facts(model: &AnyModel) -> serde_json::Value {
    match model {
        AnyModel::Gpt(gpt) => hf::model_json(gpt.config()),
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
