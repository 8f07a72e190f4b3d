//! A flight record beside what the simulator says about the same program: what should have happened by the moment nothing
//! moved any more, what had not, and which of it hangs on the culprit.
//!
//! ```text
//! record ──▶ plan ──▶ program ──▶ simulate ──▶ predicted spans ─┐
//!    └────── how far every op was ──────────────────────────────┴──▶ Replay
//! ```

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use crossmesh_comm::clock::{Moment, by_one_clock};
use crossmesh_comm::flight::{Flight, FlightRecord, JobRecord, OpRecord, OpState, SCHEMA};
use crossmesh_comm::rendezvous::Abort;
use crossmesh_core::cluster::Cluster;
use crossmesh_core::id::Rank;
use crossmesh_core::program::{OpKind, Program};
use crossmesh_core::sim::simulate;
use crossmesh_core::stall::{OpRef, Waits, share_at};
use crossmesh_core::trace::Trace;
use serde::Serialize;

use crate::input::read_text;
use crate::summary;
use crate::task::Task;
use crate::trace_doc::describe;

/// Everything there is to say about a flight record.
#[derive(Debug, Serialize)]
pub struct Replay {
    pub schema: &'static str,
    /// What ran, in a line.
    pub what: String,
    pub verdict: Option<Abort>,
    /// Which repetition it was, from 1.
    pub run: u32,
    /// When the run was given up and when something last moved, by one clock, from the start of the first rank.
    pub ended_s: f64,
    pub moved_s: f64,
    /// By how much times of two ranks may be apart that are the same; missing where nobody compared the clocks.
    pub clock_error_s: Option<f64>,
    /// How long all of it was predicted to take.
    pub predicted_s: f64,
    pub ranks: Vec<RankReplay>,
    /// Ops that should have ended by then and had not, or that hang on the culprit. Those stuck at it come first.
    pub ops: Vec<OpReplay>,
    /// Unfinished ops: those that wait for the culprit, directly or not, and those that were simply under way.
    pub held_up: usize,
    pub under_way: usize,
}

/// What a rank did.
#[derive(Debug, Serialize)]
pub struct RankReplay {
    pub rank: u32,
    pub host: String,
    pub ended: Option<String>,
    /// Whether it could write a record.
    pub recorded: bool,
    pub ops: usize,
    pub done: usize,
    /// How many should have been.
    pub predicted_done: usize,
    pub waits_for: Option<u32>,
    /// What it waits for there, in words.
    pub waits_at: Option<String>,
    pub culprit: bool,
}

/// An op, as it was and as it should have been.
#[derive(Debug, Serialize)]
pub struct OpReplay {
    pub rank: u32,
    pub op: u32,
    pub what: String,
    pub tensor: String,
    pub bytes: u64,
    pub moved: u64,
    pub state: &'static str,
    pub predicted_start_s: f64,
    pub predicted_end_s: f64,
    pub predicted_moved: u64,
    /// It should have ended by then.
    pub late: bool,
    /// It waits at the culprit itself.
    pub stuck: bool,
    pub held_up: bool,
}

/// Reads a record and replays it.
pub fn replay(path: &Path) -> Result<Replay> {
    let text = read_text(path)?;
    let flight = parse(&text).with_context(|| path.display().to_string())?;
    let course = Course::of(&flight).with_context(|| path.display().to_string())?;
    Ok(Analysis::new(&flight, &course)?.replay())
}

fn parse(text: &str) -> Result<Flight> {
    let value: serde_json::Value = serde_json::from_str(text).context("not JSON")?;
    match value.get("schema").and_then(|s| s.as_str()) {
        Some(SCHEMA) => serde_json::from_value(value).context("not a flight record"),
        Some(other) => bail!(
            "a document of schema {other:?}, not {SCHEMA:?}\nhint: `crossmesh run --flight FILE` writes one"
        ),
        None => {
            bail!("not a flight record: it has no schema\nhint: `crossmesh run --flight FILE` writes one")
        }
    }
}

/// What was to happen, and when.
struct Course {
    what: String,
    program: Program,
    trace: Trace,
    tensors: Vec<String>,
}

impl Course {
    fn of(flight: &Flight) -> Result<Self> {
        let (task, cluster, what) = task_of(flight)?;
        let program = task.program().context("it is not of one program")?.clone();
        let trace = simulate(&program, &cluster).context("its program cannot be simulated")?;
        let tensors = (0..program.tensors.len() as u32).map(|tensor| task.tensor_name(tensor)).collect();
        Ok(Self { what, program, trace, tensors })
    }
}

fn task_of(flight: &Flight) -> Result<(Task<'static>, Cluster, String)> {
    match (&flight.plan, &flight.step) {
        (Some(plan), None) => {
            let doc = crossmesh_core::reshard::doc::PlanDoc::parse(&plan.to_string()).context("its plan")?;
            let plan = doc.to_plan().context("its plan")?;
            let (what, cluster) =
                (format!("reshard {}", summary::headline(&plan)), plan.problem.cluster.clone());
            Ok((Task::of_owned_plan(plan).context("its plan")?, cluster, what))
        }
        (None, Some(step)) => {
            let task = Task::of_step_doc(&step.to_string()).context("its step")?;
            let Task::Step { step, .. } = &task else { bail!("its step is none") };
            let (cluster, what) =
                (step.cluster.clone(), format!("step of schedule {}", step.schedule.name()));
            Ok((task, cluster, what))
        }
        (None, None) if flight.sweep.is_some() => {
            bail!("a sweep of collectives cannot be replayed yet\nhint: its records can be read as they are")
        }
        _ => bail!("a flight record holds either a plan or a step"),
    }
}

/// The record, looked at from the program's side.
struct Analysis<'a> {
    flight: &'a Flight,
    course: &'a Course,
    waits: Waits,
    /// By rank: the record and the job that ran, and how much later than the first it started.
    jobs: BTreeMap<Rank, (&'a FlightRecord, Option<&'a JobRecord>, f64)>,
    ops: BTreeMap<OpRef, &'a OpRecord>,
    clock_error_s: Option<f64>,
}

impl<'a> Analysis<'a> {
    fn new(flight: &'a Flight, course: &'a Course) -> Result<Self> {
        let started: Vec<(&FlightRecord, &Moment)> =
            flight.ranks.iter().filter_map(|r| Some((r, r.started.as_ref()?))).collect();
        let moments: Vec<&Moment> = started.iter().map(|(_, moment)| *moment).collect();
        let aligned = by_one_clock(&moments);
        let first = aligned.as_ref().and_then(|(at, _)| at.iter().min().copied()).unwrap_or(0);
        let late = |rank: Rank| {
            let place = started.iter().position(|(r, _)| r.rank == rank)?;
            Some((aligned.as_ref()?.0[place] - first) as f64 * 1e-9)
        };
        let (mut jobs, mut ops) = (BTreeMap::new(), BTreeMap::new());
        for record in &flight.ranks {
            let Some(program) = course.program.ranks.get(record.rank.index()) else {
                bail!("{} is recorded, and not part of what ran", record.rank);
            };
            // Repetitions are jobs of their own; the last one is the one that failed.
            let job = record.jobs.last();
            for op in job.iter().flat_map(|job| &job.ops) {
                if op.op as usize >= program.ops.len() {
                    bail!("op {} of {} is recorded, and not part of what ran", op.op, record.rank);
                }
                ops.insert(OpRef::new(record.rank, op.op), op);
            }
            jobs.insert(record.rank, (record, job, late(record.rank).unwrap_or(0.0)));
        }
        let clock_error_s = aligned.map(|(_, error_ns)| error_ns as f64 * 1e-9);
        Ok(Self { flight, course, waits: Waits::of(&course.program), jobs, ops, clock_error_s })
    }

    fn culprit(&self) -> Option<Rank> {
        self.flight.verdict.as_ref().map(|verdict| verdict.culprit)
    }

    /// The latest of some time of every rank's job.
    fn latest(&self, time: impl Fn(&JobRecord) -> f64) -> f64 {
        let times = self.jobs.values().filter_map(|(_, job, late)| Some(time((*job)?) + late));
        times.fold(0.0, f64::max)
    }

    /// Whether an op had ended: by its own record, else by that of its other end, else it is one of the many that had.
    fn is_done(&self, op: OpRef) -> bool {
        if let Some(record) = self.ops.get(&op) {
            return record.state == OpState::Done;
        }
        match self.jobs.get(&op.rank) {
            Some((_, Some(job), _)) => {
                let open = job.ops.iter().filter(|o| o.state != OpState::Done).count();
                open == job.ops_left
            }
            // Between two runs all has ended; nothing has before the first.
            Some((record, None, _)) => record.started.is_some(),
            None => {
                let other = self.waits.other_end(op).and_then(|other| self.ops.get(&other));
                other.is_some_and(|o| o.state == OpState::Done)
            }
        }
    }

    fn all_ops(&self) -> impl Iterator<Item = OpRef> {
        let ranks = self.course.program.ranks.iter().enumerate();
        ranks.flat_map(|(rank, ops)| (0..ops.ops.len() as u32).map(move |op| OpRef::new(Rank::at(rank), op)))
    }

    fn replay(&self) -> Replay {
        let moved_s = self.latest(|job| job.moved_s);
        let of_culprit = self.all_ops().filter(|op| Some(op.rank) == self.culprit());
        let held_up = self.waits.held_up(of_culprit.collect::<Vec<_>>(), |op| !self.is_done(op));
        let unfinished = self.all_ops().filter(|op| !self.is_done(*op)).count();
        let mut ops: Vec<OpReplay> = self.all_ops().map(|op| self.op(op, moved_s, &held_up)).collect();
        ops.retain(|op| op.state != "done" && (op.late || op.held_up));
        ops.sort_by(|a, b| {
            let key = |o: &OpReplay| (!o.stuck, !o.late);
            key(a)
                .cmp(&key(b))
                .then(a.predicted_end_s.total_cmp(&b.predicted_end_s))
                .then((a.rank, a.op).cmp(&(b.rank, b.op)))
        });
        Replay {
            schema: "crossmesh.replay/1",
            what: self.course.what.clone(),
            verdict: self.flight.verdict.clone(),
            run: self.jobs.values().filter_map(|(_, job, _)| Some(job.as_ref()?.job + 1)).max().unwrap_or(1),
            ended_s: self.latest(|job| job.at_s),
            moved_s,
            clock_error_s: self.clock_error_s,
            predicted_s: self.course.trace.makespan_s,
            ranks: self.taking_part().into_iter().map(|rank| self.rank(rank, moved_s)).collect(),
            ops,
            held_up: held_up.len(),
            under_way: unfinished - held_up.len(),
        }
    }

    /// Ranks that had a process, or a record, or something to do.
    fn taking_part(&self) -> Vec<Rank> {
        let busy = self.course.program.ranks.iter().enumerate().filter(|(_, r)| !r.ops.is_empty());
        let processes = self.flight.processes.iter().map(|p| p.rank);
        let mut ranks: Vec<Rank> =
            busy.map(|(rank, _)| Rank::at(rank)).chain(processes).chain(self.jobs.keys().copied()).collect();
        ranks.retain(|rank| rank.index() < self.course.program.ranks.len());
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    fn rank(&self, rank: Rank, at_s: f64) -> RankReplay {
        let process = self.flight.processes.iter().find(|p| p.rank == rank);
        let spans = &self.course.trace.ops[rank.index()];
        let ops = 0..self.course.program.ranks[rank.index()].ops.len() as u32;
        let record = self.jobs.get(&rank).map(|(record, ..)| *record);
        let wait = record.and_then(|r| r.waits_for);
        RankReplay {
            rank: rank.0,
            host: process.map_or("?".into(), |p| p.host.clone()),
            ended: process.map(|p| p.ended.clone()),
            recorded: record.is_some(),
            ops: ops.len(),
            done: ops.filter(|op| self.is_done(OpRef::new(rank, *op))).count(),
            predicted_done: spans.iter().filter(|span| share_at(**span, at_s) >= 1.0).count(),
            waits_for: wait.map(|w| w.peer.0),
            waits_at: wait.map(|w| self.in_words(OpRef::new(rank, w.op))),
            culprit: Some(rank) == self.culprit(),
        }
    }

    fn in_words(&self, op: OpRef) -> String {
        let planned = &self.course.program.ranks[op.rank.index()].ops[op.op as usize];
        let moved = self.ops.get(&op).map_or(0, |record| record.moved);
        let left = crossmesh_core::units::Bytes(planned.bytes.saturating_sub(moved));
        format!("{}{}, {left} outstanding", describe(&planned.kind), of_tensor(&self.tensor(planned.tensor)))
    }

    fn tensor(&self, tensor: u32) -> String {
        self.course.tensors.get(tensor as usize).cloned().unwrap_or_default()
    }

    fn op(&self, op: OpRef, at_s: f64, held_up: &[OpRef]) -> OpReplay {
        let planned = &self.course.program.ranks[op.rank.index()].ops[op.op as usize];
        let span = self.course.trace.ops[op.rank.index()][op.op as usize];
        let (share, record) = (share_at(span, at_s), self.ops.get(&op));
        let other = self.waits.other_end(op).and_then(|other| self.ops.get(&other));
        let done = self.is_done(op);
        let state = match record.map(|r| r.state) {
            _ if done => "done",
            Some(OpState::Blocked) => "blocked",
            Some(OpState::Waiting) => "waiting",
            Some(OpState::Moving) => "moving",
            Some(OpState::Done) | None => "unknown",
        };
        let with_culprit = match planned.kind {
            OpKind::Send { to, .. } => Some(to) == self.culprit(),
            OpKind::Recv { from, .. } => Some(from) == self.culprit(),
            OpKind::Copy { .. } | OpKind::Compute { .. } => false,
        };
        OpReplay {
            rank: op.rank.0,
            op: op.op,
            what: describe(&planned.kind),
            tensor: self.tensor(planned.tensor),
            bytes: planned.bytes,
            moved: if done { planned.bytes } else { record.or(other).map_or(0, |r| r.moved) },
            state,
            predicted_start_s: span.start_s,
            predicted_end_s: span.end_s,
            predicted_moved: (planned.bytes as f64 * share) as u64,
            late: !done && share >= 1.0,
            // What was not due yet only waits for its turn.
            stuck: !done && with_culprit && span.start_s <= at_s && matches!(state, "waiting" | "moving"),
            held_up: held_up.binary_search(&op).is_ok(),
        }
    }
}

/// ` of w`, where it has a name.
pub fn of_tensor(name: &str) -> String {
    if name.is_empty() { String::new() } else { format!(" of {name}") }
}
