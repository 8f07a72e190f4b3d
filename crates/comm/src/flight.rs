//! The flight record, `crossmesh.flight/1`: what every rank was doing when the run was given up, as JSON.
//!
//! ```text
//! rank    its last ops, how far each is, whom it waits for, when it last heard of whom      FlightRecord
//! run     the plan, the verdict, how every process ended, and the records of those that could write one      Flight
//! ```
//!
//! `docs/plan-format.md` has the fields; `crossmesh explain --flight` replays it in the simulator.

use crossmesh_core::id::Rank;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::clock::Moment;
use crate::engine::Job;
use crate::error::CommError;
use crate::rendezvous::Abort;

pub const SCHEMA: &str = "crossmesh.flight/1";
/// Ops that ended, the latest ones; all that have not ended are kept, up to the same number.
const KEPT: usize = 256;

/// The record of a whole run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Flight {
    pub schema: String,
    /// What ran, complete: a plan, a step, or a sweep of collectives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sweep: Option<Value>,
    /// What the ranks agreed on; nothing where all went well.
    pub verdict: Option<Abort>,
    pub processes: Vec<ProcessRecord>,
    /// Of the ranks that could write one: who was killed or stopped could not.
    pub ranks: Vec<FlightRecord>,
}

/// How a rank's process ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessRecord {
    pub rank: Rank,
    pub host: String,
    /// As a shell would say it: `exit status: 2`, `signal: 9 (SIGKILL)`.
    pub ended: String,
    /// Why the run ended, as this rank was told; nothing where it ended first, or all went well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Abort>,
}

/// One rank's record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FlightRecord {
    pub rank: Rank,
    /// Whom this rank blames, and in which words; nothing where all went well.
    pub culprit: Option<Rank>,
    pub error: Option<String>,
    /// When its run started; missing where it had not.
    #[serde(default)]
    pub started: Option<Moment>,
    /// The wait that began first, of those that have not ended.
    #[serde(default)]
    pub waits_for: Option<Wait>,
    #[serde(default)]
    pub peers: Vec<PeerRecord>,
    /// The programs under way; none where the rank waited for the others to start or to end.
    pub jobs: Vec<JobRecord>,
}

/// What a rank waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wait {
    pub peer: Rank,
    /// Whom that one waits for, by its last word.
    pub further: Option<Rank>,
    /// The op, in the rank's program.
    pub job: u32,
    pub op: u32,
}

/// What a rank knows of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PeerRecord {
    pub rank: Rank,
    /// How long ago it was last heard.
    pub silent_s: f64,
    pub waits_for: Option<Rank>,
    pub state: PeerState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PeerState {
    Connected,
    /// It took its leave.
    Done,
    /// The connection ended.
    Lost,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobRecord {
    pub job: u32,
    pub ops_left: usize,
    /// When this was written, and when something last moved; all times are seconds from the job's start on this rank.
    #[serde(default)]
    pub at_s: f64,
    #[serde(default)]
    pub moved_s: f64,
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
    /// The record of a rank that has nothing under way.
    pub fn idle(rank: Rank, error: Option<&CommError>) -> Self {
        Self {
            rank,
            culprit: error.and_then(CommError::culprit),
            error: error.map(CommError::to_string),
            started: None,
            waits_for: None,
            peers: vec![],
            jobs: vec![],
        }
    }
}

impl JobRecord {
    pub(crate) fn of(job: &Job, now_ns: u64) -> Self {
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
        let seconds = |ns: u64| ns.saturating_sub(job.started_ns) as f64 * 1e-9;
        Self {
            job: job.spec.id,
            ops_left: job.left,
            at_s: seconds(now_ns),
            moved_s: seconds(job.moved_ns),
            ops: kept.into_iter().map(record).collect(),
        }
    }
}
