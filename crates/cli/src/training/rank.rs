//! A rank's part in training: set up, go on from a checkpoint, step after step, checkpoints on the way.

use std::path::Path;
use std::sync::Arc;

use crossmesh_comm::collectives::Element;
use crossmesh_comm::error::CommError;
use crossmesh_comm::lab::execute::{Barrier, ExecuteOptions, Failure, Gate, RankReport};
use crossmesh_core::id::Rank;
use crossmesh_train::config::{NonFinite, Precision};
use crossmesh_train::kernels::cpu::Cpu;
use crossmesh_train::kernels::scalar::Scalar;
use crossmesh_train::runtime::{Ahead, Feed, Links, Samples, TrainError, Trainer, TrainerOptions};

use super::Training;
use super::note::StepNote;
use super::save::Saver;
use super::stop::Stop;

/// Trains on this rank until the last step.
pub fn execute(
    training: &Training,
    rank: Rank,
    links: Links,
    options: &ExecuteOptions,
    barrier: &mut Barrier<'_>,
) -> Result<RankReport, Failure> {
    match training.config.train.precision {
        Precision::F32 => train::<f32>(training, rank, links, options, barrier),
        Precision::F64 => train::<f64>(training, rank, links, options, barrier),
    }
}

fn train<T: Scalar + Element>(
    training: &Training,
    rank: Rank,
    links: Links,
    options: &ExecuteOptions,
    barrier: &mut Barrier<'_>,
) -> Result<RankReport, Failure> {
    let model = training.resolved.model.with_kernels::<Cpu<T>>();
    let threads = training.config.train.threads;
    let set_up = TrainerOptions { engine: options.engine.clone(), sharing: options.sharing, threads };
    let job = Arc::new(training.resolved.job.clone());
    let samples: Arc<dyn Feed> = Arc::new(Samples(Arc::clone(&training.data)));
    let feed: Arc<dyn Feed> = Arc::new(Ahead::new(samples, job.samples as u64));
    let made = Trainer::<T>::new(&*model, &job, &training.wiring, feed, rank, links, &set_up);
    let mut trainer = made.map_err(|e| failure(rank, e))?;
    let ended = run(training, &mut trainer, barrier);
    match ended {
        Ok(report) => {
            trainer.close();
            Ok(report)
        }
        Err(error) => {
            let flight = trainer.flight_record().cloned().map(Box::new);
            Err(Failure { error: comm_error(rank, error), flight })
        }
    }
}

fn run<T: Scalar + Element>(
    training: &Training,
    trainer: &mut Trainer<T>,
    barrier: &mut Barrier<'_>,
) -> Result<RankReport, Trouble> {
    let rank = trainer.rank();
    let mut saver = Saver::new(training, trainer)?;
    if let Some(folder) = &training.doc.resume {
        saver.load(trainer, Path::new(folder), training.doc.weights_only)?;
    }
    let mut stop = Stop::new(rank, &saver)?;
    barrier(Gate::Start)?;
    let steps = training.config.train.steps;
    let (mut seconds, mut sent, mut received) = (0.0, 0, 0);
    while trainer.steps() < steps {
        let record = trainer.step()?;
        seconds += record.times.step;
        (sent, received) = (record.bytes_sent, record.bytes_received);
        let mut note = StepNote::new(rank, &record, record.step + 1 == steps);
        if training.is_evaluated_behind(trainer.steps()) && !record.skipped {
            note.validation_loss = Some(trainer.evaluate(training.validation_batches())?);
        }
        (training.on_step)(note);
        // All ranks have the same loss and norm, so all stop here, and none of it is saved.
        if record.skipped && training.config.train.nonfinite == NonFinite::Stop {
            break;
        }
        saver.after_step(training, trainer, record.skipped)?;
        if stop.is_agreed(&saver, trainer, record.times.step)? {
            saver.save_now(training, trainer, record.skipped)?;
            break;
        }
    }
    saver.finish(trainer)?;
    Ok(RankReport {
        seconds: vec![seconds],
        bytes_sent: sent,
        bytes_received: received,
        verified: true,
        ..RankReport::idle(rank)
    })
}

/// What ends a rank's training early.
#[derive(Debug, thiserror::Error)]
pub enum Trouble {
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error(transparent)]
    Train(#[from] TrainError),
    #[error(transparent)]
    Checkpoint(#[from] crossmesh_train::checkpoint::CheckpointError),
}

fn failure(rank: Rank, error: TrainError) -> Failure {
    Failure::from(comm_error(rank, error.into()))
}

fn comm_error(me: Rank, trouble: Trouble) -> CommError {
    match trouble {
        Trouble::Comm(error) | Trouble::Train(TrainError::Comm(error)) => error,
        Trouble::Train(other) => CommError::System { me, what: "train", cause: other.to_string() },
        Trouble::Checkpoint(error) => {
            CommError::System { me, what: "save or load its checkpoint", cause: error.to_string() }
        }
    }
}
