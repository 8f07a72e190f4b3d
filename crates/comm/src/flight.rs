//! The flight record: what a rank was doing when it gave up, as JSON.

use crossmesh_core::id::Rank;
use serde::{Deserialize, Serialize};

use crate::engine::Job;
use crate::error::CommError;

pub const SCHEMA: &str = "crossmesh.flight/1";
/// Ops that ended, the latest ones; all that have not ended are kept, up to the same number.
const KEPT: usize = 256;

/// One rank's record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FlightRecord {
    pub schema: String,
    pub rank: Rank,
    pub culprit: Option<Rank>,
    pub error: String,
    pub jobs: Vec<JobRecord>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobRecord {
    pub job: u32,
    pub ops_left: usize,
    pub ops: Vec<OpRecord>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OpRecord {
    /// Its place in the rank's program.
    pub op: u32,
    pub what: String,
    pub peer: Option<Rank>,
    pub tensor: String,
    pub bytes: u64,
    pub moved: u64,
    pub state: OpState,
    pub start_s: f64,
    pub end_s: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OpState {
    /// Something it depends on has not ended.
    Blocked,
    /// It could run, and no byte has moved.
    Waiting,
    Moving,
    Done,
}

impl FlightRecord {
    pub(crate) fn of<'a>(me: Rank, error: &CommError, jobs: impl Iterator<Item = &'a Job>) -> Self {
        let jobs = jobs.map(JobRecord::of).collect();
        let (culprit, error) = (error.culprit(), error.to_string());
        Self { schema: SCHEMA.into(), rank: me, culprit, error, jobs }
    }
}

impl JobRecord {
    fn of(job: &Job) -> Self {
        let spans = job.spans();
        let mut done: Vec<u32> = (0..job.ops.len() as u32).filter(|i| job.ops[*i as usize].done).collect();
        done.sort_by_key(|i| job.ops[*i as usize].ended_ns);
        let open = (0..job.ops.len() as u32).filter(|i| !job.ops[*i as usize].done).take(KEPT);
        let mut kept: Vec<u32> = done.iter().rev().take(KEPT).copied().chain(open).collect();
        kept.sort_unstable();
        let record = |op: u32| {
            let (progress, span) = (&job.ops[op as usize], spans[op as usize]);
            OpRecord {
                op,
                what: job.describe(op),
                peer: job.peer_of(op),
                tensor: job.spec.tensors[job.op(op).tensor as usize].name.clone(),
                bytes: job.op(op).bytes,
                moved: progress.moved,
                state: match progress {
                    p if p.done => OpState::Done,
                    p if p.waits > 0 => OpState::Blocked,
                    p if p.moved > 0 || p.issued > 0 => OpState::Moving,
                    _ => OpState::Waiting,
                },
                start_s: span.start_s,
                end_s: span.end_s,
            }
        };
        Self { job: job.spec.id, ops_left: job.left, ops: kept.into_iter().map(record).collect() }
    }
}
