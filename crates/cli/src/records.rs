//! What the ranks of a run wrote down, put together: when every op ran, or where everybody was when it failed.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::process::ExitStatus;

use anyhow::{Context, Result};
use crossmesh_comm::flight::{Flight, FlightRecord, JobRecord, OpRecord, OpState, ProcessRecord, SCHEMA};
use crossmesh_comm::rendezvous::Abort;
use crossmesh_core::id::Rank;
use crossmesh_core::program::OpKind;
use crossmesh_core::trace::{OpSpan, Trace};
use serde::de::DeserializeOwned;

use crate::commands::rank::{Spans, flight_file};
use crate::output;
use crate::predict::Prediction;
use crate::trace_doc::describe;

/// A measured trace, and by how much the clocks of any two ranks may differ in it.
#[derive(Debug, Clone)]
pub struct MeasuredTrace {
    pub trace: Trace,
    /// None where clocks were not compared.
    pub clock_error_s: Option<f64>,
}

/// The folder where ranks leave their records.
pub struct Records<'a> {
    pub folder: &'a Path,
    pub prediction: &'a Prediction,
}

impl Records<'_> {
    /// When every op of every rank ran, from the moment the first rank started.
    pub fn trace(&self) -> Result<MeasuredTrace> {
        let ranks: Vec<Rank> = self.prediction.plan.problem.meshes_of_ranks().into_keys().collect();
        let read = |rank: &Rank| read_json::<Spans>(&Spans::file(self.folder, *rank));
        let spans: Vec<Spans> = ranks.iter().map(read).collect::<Result<_>>()?;
        let first = spans.iter().map(|s| s.started_ns).min().unwrap_or(0);
        let mut ops: Vec<Vec<OpSpan>> = self.prediction.program.ranks.iter().map(|_| vec![]).collect();
        for rank in &spans {
            let shift = (rank.started_ns - first) as f64 * 1e-9;
            let span = |(start, end): &(f64, f64)| OpSpan { start_s: start + shift, end_s: end + shift };
            ops[rank.rank.index()] = rank.ops.iter().map(span).collect();
        }
        let makespan_s = ops.iter().flatten().map(|span| span.end_s).fold(0.0, f64::max);
        let errors: Option<Vec<u64>> = spans.iter().map(|s| s.clock_error_ns).collect();
        // Two ranks may both be wrong, each its own way.
        let clock_error_s = errors.and_then(|e| e.into_iter().max()).map(|ns| 2.0 * ns as f64 * 1e-9);
        Ok(MeasuredTrace { trace: Trace { makespan_s, ops, links: vec![] }, clock_error_s })
    }

    /// The record of the whole run. That it cannot be written is said, and must not hide how the run ended.
    pub fn write_flight(&self, path: &Path, verdict: Option<&Abort>, ended: &BTreeMap<Rank, ExitStatus>) {
        let written =
            output::to_json(&self.flight(verdict, ended)).and_then(|text| output::write_file(path, &text));
        if let Err(error) = written {
            let _ = writeln!(std::io::stderr(), "{error:#}");
        }
    }

    fn flight(&self, verdict: Option<&Abort>, ended: &BTreeMap<Rank, ExitStatus>) -> Flight {
        let problem = &self.prediction.plan.problem;
        let process = |(rank, status): (&Rank, &ExitStatus)| ProcessRecord {
            rank: *rank,
            host: problem.topology.host(*rank).to_string(),
            ended: status.to_string(),
        };
        Flight {
            schema: SCHEMA.into(),
            plan: self.prediction.plan_doc(),
            verdict: verdict.cloned(),
            processes: ended.iter().map(process).collect(),
            ranks: problem.meshes_of_ranks().into_keys().filter_map(|rank| self.rank(rank)).collect(),
        }
    }

    /// What a rank wrote down, if it could.
    fn rank(&self, rank: Rank) -> Option<FlightRecord> {
        let failed = read_json::<FlightRecord>(&flight_file(self.folder, rank)).ok();
        failed.or_else(|| Some(self.landed(&read_json::<Spans>(&Spans::file(self.folder, rank)).ok()?)))
    }

    /// The record of a rank that came to its end.
    fn landed(&self, spans: &Spans) -> FlightRecord {
        let program = &self.prediction.program.ranks[spans.rank.index()];
        let done = |(i, (op, span)): (u32, (&crossmesh_core::program::Op, &(f64, f64)))| OpRecord {
            op: i,
            what: describe(&op.kind),
            peer: peer_of(&op.kind),
            tensor: self.prediction.plan.problem.reshards[op.tensor as usize].name.clone(),
            bytes: op.bytes,
            moved: op.bytes,
            state: OpState::Done,
            start_s: span.0,
            end_s: span.1,
        };
        let ops: Vec<OpRecord> = (0..).zip(program.ops.iter().zip(&spans.ops)).map(done).collect();
        let end_s = ops.iter().map(|op| op.end_s).fold(0.0, f64::max);
        FlightRecord {
            started_ns: Some(spans.started_ns),
            clock_error_ns: spans.clock_error_ns,
            jobs: vec![JobRecord { job: 0, ops_left: 0, at_s: end_s, moved_s: end_s, ops }],
            ..FlightRecord::idle(spans.rank, None)
        }
    }
}

fn peer_of(kind: &OpKind) -> Option<Rank> {
    match *kind {
        OpKind::Send { to, .. } => Some(to),
        OpKind::Recv { from, .. } => Some(from),
        OpKind::Copy { .. } => None,
    }
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let text = std::fs::read_to_string(path).with_context(|| format!("a rank left no {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| path.display().to_string())
}
