//! A rank's part in training: set up, go on from a checkpoint, step after step, checkpoints on the way.

use std::path::Path;
use std::sync::Arc;

use crossmesh_comm::error::CommError;
use crossmesh_comm::lab::execute::{Barrier, ExecuteOptions, Failure, Gate, RankReport};
use crossmesh_core::id::Rank;
use crossmesh_train::by_precision;
use crossmesh_train::config::NonFinite;
use crossmesh_train::kernels::Kernels;
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
    if let Some(gpu) = &options.gpu {
        return on_gpu(gpu, training, rank, links, options, barrier);
    }
    let threads = training.config.train.threads;
    by_precision!(training.config.train.precision, K => {
        train(Arc::new(K::new(threads)), training, rank, links, options, barrier)
    })
}

/// The same on a GPU.
#[cfg(feature = "cuda")]
fn on_gpu(
    device: &Arc<crossmesh_cuda::Gpu>,
    training: &Training,
    rank: Rank,
    links: Links,
    options: &ExecuteOptions,
    barrier: &mut Barrier<'_>,
) -> Result<RankReport, Failure> {
    use crossmesh_train::config::Precision;
    use crossmesh_train::kernels::gpu::{Chosen, Gpu};

    let chosen = match training.config.train.deterministic {
        true => Chosen::Same,
        false => {
            Chosen::Fastest(crossmesh_cuda::cuda::image::cache().map(|folder| folder.join("choices.json")))
        }
    };
    let failed = |error: crossmesh_cuda::CudaError| {
        Failure::from(CommError::System { me: rank, what: "set up its GPU", cause: error.to_string() })
    };
    match training.config.train.precision {
        Precision::F32 => {
            let kernels = Arc::new(Gpu::<f32>::new(device, &chosen).map_err(failed)?);
            let report = train(Arc::clone(&kernels), training, rank, links, options, barrier);
            tell(rank, kernels.times());
            report
        }
        Precision::Bf16 => {
            let kernels = Arc::new(Gpu::<half::bf16>::new(device, &chosen).map_err(failed)?);
            let report = train(Arc::clone(&kernels), training, rank, links, options, barrier);
            tell(rank, kernels.times());
            report
        }
        Precision::F64 => Err(failed(crossmesh_cuda::CudaError::Refused {
            what: "train.dtype",
            found: "f64".into(),
            needed: "f32 or bf16 on a GPU",
        })),
    }
}

/// Leaves the table of times where the variable says.
#[cfg(feature = "cuda")]
fn tell(rank: Rank, times: Option<String>) {
    use crossmesh_train::kernels::gpu::times::VARIABLE;
    let (Some(times), Some(file)) = (times, std::env::var_os(VARIABLE)) else { return };
    let path = format!("{}.{rank}", file.display());
    if let Err(error) = std::fs::write(&path, times) {
        crate::output::print_error(&anyhow::anyhow!("{VARIABLE}: {path}: {error}"));
    }
}

#[cfg(not(feature = "cuda"))]
fn on_gpu(
    _: &Arc<crossmesh_cuda::Gpu>,
    _: &Training,
    me: Rank,
    _: Links,
    _: &ExecuteOptions,
    _: &mut Barrier<'_>,
) -> Result<RankReport, Failure> {
    let cause = crossmesh_cuda::CudaError::NotBuilt.to_string();
    Err(Failure::from(CommError::System { me, what: "set up its GPU", cause }))
}

fn train<K: Kernels>(
    kernels: Arc<K>,
    training: &Training,
    rank: Rank,
    links: Links,
    options: &ExecuteOptions,
    barrier: &mut Barrier<'_>,
) -> Result<RankReport, Failure> {
    let model = training.resolved.model.with_kernels::<K>();
    let set_up = TrainerOptions { engine: options.engine.clone(), sharing: options.sharing };
    let job = Arc::new(training.resolved.job.clone());
    let samples: Arc<dyn Feed> = Arc::new(Samples(Arc::clone(&training.data)));
    let feed: Arc<dyn Feed> = Arc::new(Ahead::new(samples, job.samples as u64));
    let made = Trainer::new(kernels, &*model, &job, &training.wiring, feed, rank, links, &set_up);
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

fn run<K: Kernels>(
    training: &Training,
    trainer: &mut Trainer<K>,
    barrier: &mut Barrier<'_>,
) -> Result<RankReport, Trouble> {
    let rank = trainer.rank();
    let mut saver = Saver::new(training, trainer)?;
    if let Some(folder) = &training.doc.resume {
        saver.load(training, trainer, Path::new(folder), training.doc.weights_only)?;
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
