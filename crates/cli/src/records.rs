//! What the ranks of a run wrote down, put together: when every op ran, or where everybody was when it failed.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitStatus;

use anyhow::{Context, Result};
use crossmesh_comm::clock::{Moment, by_one_clock};
use crossmesh_comm::flight::{Flight, FlightRecord, JobRecord, OpRecord, OpState, ProcessRecord, SCHEMA};
use crossmesh_core::id::Rank;
use crossmesh_core::program::{Op, OpKind};
use crossmesh_core::trace::{OpSpan, Trace};
use serde::de::DeserializeOwned;

use crate::commands::rank::{flight_file, spans_file};
use crate::output;
use crate::part::Summary;
use crate::runner::Work;
use crate::task::Task;
use crate::trace_doc::describe;
use crate::verdict::Verdicts;

/// A measured trace, and by how much the clocks of any two ranks may differ in it.
#[derive(Debug, Clone)]
pub struct MeasuredTrace {
    pub trace: Trace,
    /// None where nobody compared the clocks: every rank counts from its own start.
    pub clock_error_s: Option<f64>,
}

/// When every op of every rank ran in the last run, from the moment the first rank started. Of one program.
pub fn measured_trace(task: &Task<'_>, summaries: &[Summary]) -> Option<MeasuredTrace> {
    let program = task.program()?;
    let took_part: Vec<(&Summary, &Moment)> =
        summaries.iter().filter_map(|s| Some((s, s.started.last()?))).collect();
    let moments: Vec<&Moment> = took_part.iter().map(|(_, started)| *started).collect();
    let aligned = by_one_clock(&moments);
    let clock_error_s = aligned.as_ref().map(|(_, error_ns)| *error_ns as f64 * 1e-9);
    let starts = aligned.map_or(vec![0; moments.len()], |(starts, _)| starts);
    let first = starts.iter().min().copied().unwrap_or(0);
    let mut ops: Vec<Vec<OpSpan>> = program.ranks.iter().map(|_| vec![]).collect();
    for ((summary, _), start) in took_part.iter().zip(&starts) {
        let shift = (start - first) as f64 * 1e-9;
        let span = |(start, end): &(f64, f64)| OpSpan { start_s: start + shift, end_s: end + shift };
        ops[summary.rank.index()] = summary.ops.iter().map(span).collect();
    }
    let makespan_s = ops.iter().flatten().map(|span| span.end_s).fold(0.0, f64::max);
    Some(MeasuredTrace { trace: Trace { makespan_s, ops, links: vec![] }, clock_error_s })
}

/// The folder where ranks leave their records.
pub struct Records<'a> {
    pub folder: &'a Path,
    pub work: &'a Work<'a>,
}

impl Records<'_> {
    /// Summaries with the ops that did not fit into a line.
    pub fn with_ops(&self, mut summaries: Vec<Summary>) -> Result<Vec<Summary>> {
        for summary in &mut summaries {
            summary.ops = read_json(&spans_file(self.folder, summary.rank))?;
        }
        Ok(summaries)
    }

    /// The record of the whole run; `landed` is what ranks have to tell that came to their end.
    pub fn write_flight(
        &self,
        path: &Path,
        verdicts: &Verdicts,
        ended: &BTreeMap<Rank, ExitStatus>,
        landed: &[Summary],
    ) -> Result<()> {
        let process = |(rank, status): (&Rank, &ExitStatus)| ProcessRecord {
            rank: *rank,
            host: self.work.topology.host(*rank).to_string(),
            ended: status.to_string(),
            verdict: verdicts.of(*rank).cloned(),
        };
        let failed = |rank: Rank| read_json::<FlightRecord>(&flight_file(self.folder, rank)).ok();
        let of_rank =
            |rank: Rank| failed(rank).or_else(|| self.landed(landed.iter().find(|s| s.rank == rank)?));
        let document = serde_json::from_str(&self.work.document).ok();
        let (plan, step, sweep) = match self.work.task {
            Task::Plan { .. } | Task::Program { .. } | Task::Handed(_) => (document, None, None),
            Task::Step { .. } => (None, document, None),
            Task::Sweep { .. } => (None, None, document),
            // It is in the run's folder.
            Task::Train { .. } | Task::Generate { .. } => (None, None, None),
        };
        let flight = Flight {
            schema: SCHEMA.into(),
            plan,
            step,
            sweep,
            verdict: verdicts.agreed().cloned(),
            processes: ended.iter().map(process).collect(),
            ranks: self.work.task.ranks().into_iter().filter_map(of_rank).collect(),
        };
        output::write_file(path, &output::to_json(&flight)?)
    }

    /// The record of a rank that came to its end.
    fn landed(&self, summary: &Summary) -> Option<FlightRecord> {
        let program = &self.work.task.program()?.ranks[summary.rank.index()];
        let done = |(i, (op, span)): (u32, (&Op, &(f64, f64)))| OpRecord {
            op: i,
            what: describe(&op.kind),
            peer: peer_of(&op.kind),
            tensor: self.work.task.tensor_name(op.tensor),
            bytes: op.bytes,
            moved: op.bytes,
            state: OpState::Done,
            start_s: span.0,
            end_s: span.1,
        };
        let ops: Vec<OpRecord> = (0..).zip(program.ops.iter().zip(&summary.ops)).map(done).collect();
        let end_s = ops.iter().map(|op| op.end_s).fold(0.0, f64::max);
        Some(FlightRecord {
            started: summary.started.last().cloned(),
            jobs: vec![JobRecord { job: 0, ops_left: 0, at_s: end_s, moved_s: end_s, ops }],
            ..FlightRecord::idle(summary.rank, None)
        })
    }
}

fn peer_of(kind: &OpKind) -> Option<Rank> {
    match *kind {
        OpKind::Send { to, .. } => Some(to),
        OpKind::Recv { from, .. } => Some(from),
        OpKind::Copy { .. } | OpKind::Compute { .. } => None,
    }
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let text = std::fs::read_to_string(path).with_context(|| format!("a rank left no {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| path.display().to_string())
}
