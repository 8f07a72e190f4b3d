//! A job whose ranks are threads of this process: for tests, and for models that fit.

use std::sync::Arc;

use crossmesh_comm::buffer::Sharing;
use crossmesh_comm::engine::EngineOptions;
use crossmesh_comm::error::CommError;
use crossmesh_comm::transport::mem::mesh;
use crossmesh_core::id::Rank;

use super::{Feed, Links, TrainError, Trainer, TrainerOptions};
use crate::chain::Model;
use crate::job::Job;
use crate::kernels::Kernels;
use crate::kernels::cpu::Cpu;
use crate::kernels::scalar::Scalar;
use crate::wiring::Wiring;

/// Runs the same program on every rank, each of which computes with one thread. Answers what each came to, in the order of ranks.
pub fn in_threads<T: Scalar, R: Send>(
    model: &(dyn Model<Cpu<T>> + Sync),
    job: &Job,
    feed: &Arc<dyn Feed>,
    program: impl Fn(&mut Trainer<Cpu<T>>) -> Result<R, TrainError> + Sync,
) -> Result<Vec<R>, TrainError> {
    in_threads_on(|| Cpu::new(1), model, job, feed, program)
}

/// The same with other kernels, one set for every rank.
pub fn in_threads_on<K: Kernels, R: Send>(
    kernels: impl Fn() -> K + Sync,
    model: &(dyn Model<K> + Sync),
    job: &Job,
    feed: &Arc<dyn Feed>,
    program: impl Fn(&mut Trainer<K>) -> Result<R, TrainError> + Sync,
) -> Result<Vec<R>, TrainError> {
    let (job, wiring) = (Arc::new(job.clone()), Arc::new(Wiring::new(model, job)?));
    let links = mesh(job.ranks().len()).map_err(|e| CommError::System {
        me: Rank(0),
        what: "link threads",
        cause: e.to_string(),
    })?;
    let run = |me: Rank, links: Links| {
        let (engine, sharing) = (EngineOptions::default(), Sharing::Private);
        let options = TrainerOptions { engine, sharing };
        let kernels = Arc::new(kernels());
        let mut trainer = Trainer::new(kernels, model, &job, &wiring, Arc::clone(feed), me, links, &options)?;
        let result = program(&mut trainer)?;
        trainer.close();
        Ok(result)
    };
    let run = &run;
    std::thread::scope(|scope| {
        let start = |(me, links)| scope.spawn(move || run(me, links));
        let threads: Vec<_> = (0..).map(Rank).zip(links).map(start).collect();
        threads.into_iter().map(|t| t.join().unwrap_or(Err(TrainError::Panicked))).collect()
    })
}
