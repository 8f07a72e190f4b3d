//! One rank's whole job in `crossmesh run`: fill the source, run the plan, look at every element of the destination.

use std::io;
use std::sync::Arc;

use crossmesh_core::id::Rank;
use crossmesh_core::program::{OpKind, Program};
use crossmesh_core::verify::VerifiedRank;
use crossmesh_cuda::Gpu;
use serde::{Deserialize, Serialize};

use crate::buffer::{RankBuffers, Sharing};
use crate::clock::Monotonic;
use crate::engine::{Engine, EngineOptions, JobReport, JobSpec};
use crate::error::CommError;
use crate::flight::FlightRecord;
use crate::lab::pattern;
use crate::lab::usage::{ExtraMemory, Meter};
use crate::transport::Link;

/// Where ranks wait for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// Before the clock starts.
    Start,
    /// Before they look at what arrived: whoever is done would else take the processor from those who are not.
    Look,
}

/// How ranks wait for each other. Whoever connected them knows how.
pub type Barrier<'a> = dyn FnMut(Gate) -> Result<(), CommError> + Send + 'a;

/// What a user may set.
#[derive(Debug, Clone)]
pub struct ExecuteOptions {
    pub engine: EngineOptions,
    pub sharing: Sharing,
    /// Where shards and staging lie, if not in memory of the host.
    pub gpu: Option<Arc<Gpu>>,
    pub repeat: u32,
    /// Whether to look at the destination after every repetition.
    pub check: bool,
    /// Whether to measure memory beside the tensors; for ranks that are processes.
    pub measure_memory: bool,
}

impl Default for ExecuteOptions {
    fn default() -> Self {
        Self {
            engine: EngineOptions::default(),
            sharing: Sharing::Host,
            gpu: None,
            repeat: 1,
            check: true,
            measure_memory: false,
        }
    }
}

/// What a rank has to report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankReport {
    pub rank: Rank,
    /// From the barrier to the end of the rank's program, by repetition.
    pub seconds: Vec<f64>,
    /// Of one repetition.
    pub bytes_sent: u64,
    pub bytes_received: u64,
    pub verified: bool,
    /// The first element that was not what it should be.
    pub wrong: Option<String>,
    /// When each op ran in the last repetition, in seconds from its start.
    pub ops: Vec<(f64, f64)>,
    /// Missing where it was not measured.
    pub memory: Option<ExtraMemory>,
    /// Repetitions began with a barrier of the ranks' own: when each of them started need not be compared.
    #[serde(default)]
    pub synced: bool,
}

impl RankReport {
    /// Takes down one more repetition.
    pub(crate) fn note(&mut self, done: &JobReport) {
        self.seconds.push(done.seconds);
        self.bytes_sent = done.bytes_sent;
        self.bytes_received = done.bytes_received;
        self.ops = done.ops.iter().map(|span| (span.start_s, span.end_s)).collect();
    }

    /// Of a rank that has nothing to do.
    pub fn idle(rank: Rank) -> Self {
        Self {
            rank,
            seconds: vec![],
            bytes_sent: 0,
            bytes_received: 0,
            verified: true,
            wrong: None,
            ops: vec![],
            memory: None,
            synced: false,
        }
    }
}

/// Why a rank has nothing to report.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{error}")]
pub struct Failure {
    #[source]
    pub error: CommError,
    pub flight: Option<Box<FlightRecord>>,
}

impl From<CommError> for Failure {
    fn from(error: CommError) -> Self {
        Self { error, flight: None }
    }
}

/// The ranks that a rank exchanges messages with, sorted.
pub fn peers_of(program: &Program, rank: Rank) -> Vec<Rank> {
    let peer = |kind: &OpKind| match *kind {
        OpKind::Send { to, .. } => Some(to),
        OpKind::Recv { from, .. } => Some(from),
        OpKind::Copy { .. } | OpKind::Compute { .. } => None,
    };
    let mut peers: Vec<Rank> =
        program.ranks[rank.index()].ops.iter().filter_map(|op| peer(&op.kind)).collect();
    peers.sort_unstable();
    peers.dedup();
    peers
}

/// Runs one rank's part of a program: fills what it holds, runs it, and looks at every element of its goals. `links` leads to
/// every rank of [`peers_of`].
pub fn execute(
    program: VerifiedRank,
    links: Vec<(Rank, Box<dyn Link>)>,
    options: &ExecuteOptions,
    barrier: &mut Barrier<'_>,
) -> Result<RankReport, Failure> {
    let rank = program.id();
    let meter = options.measure_memory.then(Meter::start).flatten();
    let allocated = match &options.gpu {
        None => RankBuffers::allocate(program, options.sharing),
        Some(gpu) => RankBuffers::allocate_on(program, gpu, options.sharing),
    };
    let buffers = allocated.map_err(|e| CommError::System {
        me: rank,
        what: "allocate its shards",
        cause: e.to_string(),
    })?;
    pattern::fill_sources(&buffers).map_err(unreachable_memory(rank))?;
    let mut engine = Engine::new(rank, links, Box::new(Monotonic), options.engine.clone())?;
    let mut run = Run { rank, buffers: &buffers, check: options.check, meter };
    let result = run.repeat(&mut engine, options.repeat, barrier);
    engine.close();
    result.map_err(|error| Failure { error, flight: engine.flight_record().cloned().map(Box::new) })
}

struct Run<'a> {
    rank: Rank,
    buffers: &'a RankBuffers,
    check: bool,
    meter: Option<Meter>,
}

impl Run<'_> {
    fn repeat(
        &mut self,
        engine: &mut Engine,
        times: u32,
        barrier: &mut Barrier<'_>,
    ) -> Result<RankReport, CommError> {
        let mut report = RankReport { verified: self.check, ..RankReport::idle(self.rank) };
        for job in 0..times {
            let spec = JobSpec::new(job, self.buffers)?;
            pattern::poison_destinations(self.buffers).map_err(unreachable_memory(self.rank))?;
            // The first run shows what runs need.
            let mut meter = self.meter.as_mut().filter(|_| job == 0);
            if let Some(meter) = &mut meter {
                meter.begin();
            }
            barrier(Gate::Start)?;
            let handle = engine.start(spec)?;
            let done = engine.wait(handle)?;
            if let Some(meter) = meter {
                meter.end();
            }
            report.note(&done);
            if self.check {
                barrier(Gate::Look)?;
                self.look(&mut report)?;
            }
        }
        report.memory = self.extra_memory(engine);
        Ok(report)
    }

    fn extra_memory(&mut self, engine: &Engine) -> Option<ExtraMemory> {
        let meter = self.meter.as_mut()?;
        meter.look();
        Some(ExtraMemory {
            extra_bytes_measured: meter.extra_bytes(self.buffers.tensor_bytes()),
            extra_bytes_proven: self.buffers.program().extra_bytes(),
            socket_bytes: engine.kernel_bytes(),
        })
    }

    fn look(&self, report: &mut RankReport) -> Result<(), CommError> {
        let wrong = pattern::check_destinations(self.buffers).map_err(unreachable_memory(self.rank))?;
        if let Some(wrong) = wrong {
            report.verified = false;
            report.wrong.get_or_insert(wrong.to_string());
        }
        Ok(())
    }
}

/// What a rank says whose device no longer copies.
pub(crate) fn unreachable_memory(me: Rank) -> impl Fn(io::Error) -> CommError {
    move |e| CommError::System { me, what: "fill or check its shards", cause: e.to_string() }
}
