//! A decoder that talks, on one rank or on several: what `generate` asks, and a rank's part in it.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use crossmesh_comm::clock::{Clock as _, Monotonic};
use crossmesh_comm::collectives::{CallError, Collectives, Element};
use crossmesh_comm::engine::Engine;
use crossmesh_comm::error::CommError;
use crossmesh_comm::lab::execute::{Barrier, ExecuteOptions, Failure, Gate, RankReport};
use crossmesh_core::cluster::{Cluster, Host, Topology};
use crossmesh_core::collective::CollectiveOptions;
use crossmesh_core::dtype::DType;
use crossmesh_core::id::Rank;
use crossmesh_train::checkpoint::{Checkpoint, CheckpointError};
use crossmesh_train::generate::{Crew, Generator, Sampling};
use crossmesh_train::kernels::cpu::{Cpu, HostBuf};
use crossmesh_train::kernels::scalar::Scalar;
use crossmesh_train::runtime::{Direct, Links};
use crossmesh_train::stage::StageError;
use serde::{Deserialize, Serialize};

pub const SCHEMA: &str = "crossmesh.generate/1";

/// What every rank is told.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TalkDoc {
    pub schema: String,
    pub checkpoint: PathBuf,
    pub tp: usize,
    pub stages: usize,
    /// Ids to go on with, one at least.
    pub prompt: Vec<u32>,
    /// How many to say.
    pub tokens: usize,
    /// The one that ends a document.
    pub end: Option<u32>,
    pub temperature: f64,
    pub top_k: Option<usize>,
    pub seed: u64,
    pub threads: usize,
}

/// What was said.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Talked {
    pub ids: Vec<u32>,
    /// Whether a document ended.
    pub ended: bool,
    /// From the prompt to the last of them.
    pub seconds: f64,
    /// Of this rank's cache.
    pub cache_elements: usize,
}

/// Who hears what was said.
pub type OnTalked = Arc<dyn Fn(Talked) + Send + Sync>;

/// See the module.
#[derive(Clone)]
pub struct Talk {
    pub doc: TalkDoc,
    pub cluster: Cluster,
    pub topology: Topology,
    pub on_talked: OnTalked,
}

impl Talk {
    pub fn new(doc: TalkDoc, on_talked: OnTalked) -> Self {
        let cluster = Cluster::of_hosts(vec![Host::with_devices((doc.tp * doc.stages) as u32)]);
        let topology = Topology::new(&cluster);
        Self { doc, cluster, topology, on_talked }
    }

    pub fn read(path: &Path, on_talked: OnTalked) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read what to generate in {}", path.display()))?;
        Ok(Self::new(serde_json::from_str(&text).context("what to generate is no document")?, on_talked))
    }

    pub fn document(&self) -> String {
        serde_json::to_string(&self.doc).expect("numbers and text are a document")
    }

    pub fn ranks(&self) -> Vec<Rank> {
        (0..self.doc.tp * self.doc.stages).map(Rank::at).collect()
    }
}

/// What keeps a model from talking.
#[derive(Debug, thiserror::Error)]
pub enum Silence {
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Stage(#[from] StageError),
    #[error(
        "{}: the model says {logit} after {tokens} tokens: its weights are of no use\nhint: take an earlier checkpoint",
        folder.display()
    )]
    NotFinite { folder: PathBuf, logit: f64, tokens: usize },
}

/// Lets a model on one rank talk, in this thread.
pub fn alone(doc: &TalkDoc) -> Result<Talked, Silence> {
    let checkpoint = Checkpoint::open(&doc.checkpoint)?;
    match checkpoint.dtype() {
        DType::F64 => talk(doc, Generator::<f64>::load(&checkpoint, doc.threads)?),
        _ => talk(doc, Generator::<f32>::load(&checkpoint, doc.threads)?),
    }
}

/// Reads the prompt, and says one token after the other. All ranks hear the same logits, and choose the same.
fn talk<T: Scalar>(doc: &TalkDoc, mut generator: Generator<T>) -> Result<Talked, Silence> {
    let sampling = Sampling { temperature: doc.temperature, top_k: doc.top_k, seed: doc.seed };
    generator.reserve(doc.prompt.len().saturating_add(doc.tokens));
    let start = Monotonic.now_ns();
    let mut talked = Talked { cache_elements: generator.cache_elements(), ..Talked::default() };
    let mut unread: Vec<i32> = doc.prompt.iter().map(|id| *id as i32).collect();
    while talked.ids.len() < doc.tokens {
        let logits = generator.next(&unread)?;
        if let Some(&logit) = logits.iter().find(|logit| !logit.is_finite()) {
            let (folder, tokens) = (doc.checkpoint.clone(), doc.prompt.len() + talked.ids.len());
            return Err(Silence::NotFinite { folder, logit, tokens });
        }
        let token = sampling.choose(&logits, talked.ids.len() as u64) as u32;
        if Some(token) == doc.end {
            talked.ended = true;
            break;
        }
        talked.ids.push(token);
        unread = vec![token as i32];
    }
    talked.seconds = (Monotonic.now_ns() - start) as f64 / 1e9;
    Ok(talked)
}

/// A rank's part, from its weights to the last token. The first rank tells.
pub fn execute(
    work: &Talk,
    rank: Rank,
    links: Links,
    options: &ExecuteOptions,
    barrier: &mut Barrier<'_>,
) -> Result<RankReport, Failure> {
    let engine = Engine::new(rank, links, Box::new(Monotonic), options.engine.clone())?;
    let (cluster, collectives) = (work.cluster.clone(), CollectiveOptions::default());
    let comm = Collectives::new(rank, engine, cluster, options.sharing, collectives);
    let comm = Arc::new(Mutex::new(comm));
    let ended = take_part(work, rank, &comm, barrier);
    let comm = Arc::into_inner(comm).map(|comm| comm.into_inner().unwrap_or_else(PoisonError::into_inner));
    match ended {
        Ok(talked) => {
            comm.into_iter().for_each(Collectives::close);
            let report = RankReport { seconds: vec![talked.seconds], ..RankReport::idle(rank) };
            if rank == Rank(0) {
                (work.on_talked)(talked);
            }
            Ok(report)
        }
        Err(error) => {
            let flight = comm.and_then(|comm| comm.engine_ref().flight_record().cloned().map(Box::new));
            Err(Failure { error: comm_error(rank, error), flight })
        }
    }
}

fn take_part(
    work: &Talk,
    rank: Rank,
    comm: &Arc<Mutex<Collectives>>,
    barrier: &mut Barrier<'_>,
) -> Result<Talked, Silence> {
    let checkpoint = Checkpoint::open(&work.doc.checkpoint)?;
    match checkpoint.dtype() {
        DType::F64 => of_type::<f64>(work, rank, &checkpoint, comm, barrier),
        _ => of_type::<f32>(work, rank, &checkpoint, comm, barrier),
    }
}

fn of_type<T: Scalar + Element>(
    work: &Talk,
    rank: Rank,
    checkpoint: &Checkpoint,
    comm: &Arc<Mutex<Collectives>>,
    barrier: &mut Barrier<'_>,
) -> Result<Talked, Silence> {
    let doc = &work.doc;
    // Loading takes one rank longer than another; nobody waits for a group before all are there.
    barrier(Gate::Start)?;
    let kernels = Arc::new(Cpu::<T>::new(1));
    let crew: Crew<HostBuf<T>> = Crew::new(rank.index(), doc.tp, doc.stages, |ranks| {
        let ranks: Vec<Rank> = ranks.iter().copied().map(Rank::at).collect();
        Ok::<_, CallError>(Arc::new(Direct::group(comm, &ranks, &kernels)?) as _)
    })?;
    let generator = Generator::load_with(checkpoint, doc.threads, crew)?;
    talk(doc, generator)
}

fn comm_error(me: Rank, silence: Silence) -> CommError {
    match silence {
        Silence::Comm(error) | Silence::Call(CallError::Comm(error)) => error,
        other => CommError::System { me, what: "generate", cause: other.to_string() },
    }
}
