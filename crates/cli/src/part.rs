//! A rank's part in a run, whoever started the process: connect, move its tensors, check them, and tell what it saw.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crossmesh_comm::clock::Moment;
use crossmesh_comm::deadline::Deadline;
use crossmesh_comm::engine::{EngineOptions, Interrupt};
use crossmesh_comm::environment::{Place, Variables, late};
use crossmesh_comm::error::CommError;
use crossmesh_comm::flight::FlightRecord;
use crossmesh_comm::job;
use crossmesh_comm::job::unconnected;
pub use crossmesh_comm::job::{comm_error, fault};
use crossmesh_comm::lab::execute::{ExecuteOptions, Failure, Gate, RankReport};
use crossmesh_comm::lab::usage::ExtraMemory;
use crossmesh_comm::rendezvous::{Abort, Links, Log, Meeting, News, OnNews, Patience, RendezvousError};
use crossmesh_core::id::Rank;
use serde::{Deserialize, Serialize};

use crate::files;
use crate::memory::GpuChoice;
use crate::output;
use crate::task::Task;

/// An aborted rank has this long to come to its own end, and write down where it stood.
const LAST_WORDS: Duration = Duration::from_millis(700);
/// Ranks come to a barrier when their part is done, and checking every element takes a while on a small machine. One that
/// is stopped or dies meanwhile is noticed by other means, and sooner.
pub const BARRIER: Duration = Duration::from_secs(120);
const BARRIER_DEADLINES: u32 = 20;

/// How long the ranks of a job wait for each other.
pub fn patience(place: &Place, variables: &Variables, arrive: Deadline, deadline_ms: u64) -> Patience {
    job::patience(place, variables, arrive, deadline_ms, barrier_limit(deadline_ms))
}

/// The same where nobody says how many ranks are on a host, and when they were started.
#[cfg(feature = "mpi")]
pub fn unplaced_patience(arrive: Deadline, deadline_ms: u64) -> Patience {
    let (silence, barrier) = (Duration::from_millis(deadline_ms), barrier_limit(deadline_ms));
    Patience { arrive, silence, barrier, late: None, local_world: None }
}

fn barrier_limit(deadline_ms: u64) -> Duration {
    BARRIER + BARRIER_DEADLINES * Duration::from_millis(deadline_ms)
}

/// Now that everybody is in: how long ago the job was started, where the launcher says.
pub fn met_s(variables: &Variables) -> Option<f64> {
    late(variables).map(|late| late.came.as_secs_f64())
}

/// What a rank saw.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Summary {
    pub rank: Rank,
    /// From the job's start until everybody was in, where the launcher says when it started.
    #[serde(default)]
    pub met_s: Option<f64>,
    /// By run: when the barrier opened, and how long the rank's part took.
    pub started: Vec<Moment>,
    pub seconds: Vec<f64>,
    /// Runs began together; when each rank started need not be compared.
    #[serde(default)]
    pub synced: bool,
    pub bytes_sent: u64,
    pub bytes_received: u64,
    pub verified: bool,
    pub wrong: Option<String>,
    /// The most memory the process had, by the system's account.
    pub peak_rss_bytes: Option<u64>,
    /// Beside its tensors, where the system tells.
    pub memory: Option<ExtraMemory>,
    /// Where it was asked for: when every op of the last run ran, in seconds from its start.
    #[serde(default)]
    pub ops: Vec<(f64, f64)>,
}

/// What a rank has to do.
pub struct Part<'a> {
    pub task: &'a Task<'a>,
    pub rank: Rank,
    /// See [`met_s`].
    pub met_s: Option<f64>,
    pub repeat: u32,
    /// How long nothing may move.
    pub deadline_ms: u64,
    /// Where to write down, after a failure, how far every op was.
    pub flight: Option<PathBuf>,
    /// Whether to tell when every op ran.
    pub trace: bool,
    pub interrupt: Interrupt,
    /// The GPU whose memory its tensors are in; else it is the host's.
    pub gpu: Option<GpuChoice>,
}

impl Part<'_> {
    /// Connects with the ranks that the plan needs; an error is what the job agreed on.
    pub fn connect(&self, meeting: &mut dyn Meeting, deadline: Deadline) -> Result<Links, Abort> {
        let peers: BTreeSet<Rank> = self.task.peers(self.rank).into_iter().collect();
        meeting.expect_shares(self.task.shares());
        meeting.connect(&peers, deadline).map_err(|error| meeting.fail(unconnected(self.rank, error)))
    }

    /// Moves the tensors; an error is what the job agreed on.
    pub fn take(
        &self,
        meeting: &mut dyn Meeting,
        links: Links,
        on_round: impl Fn(u32) + Sync,
    ) -> Result<Summary, Abort> {
        let (hosts, interrupt) = (meeting.hosts().to_vec(), self.interrupt.clone());
        let engine =
            EngineOptions { deadline_ms: self.deadline_ms, hosts, interrupt, ..EngineOptions::default() };
        let sharing = meeting.sharing();
        let gpu = self.gpu.map(GpuChoice::open).transpose().map_err(|error| {
            let cause = error.to_string();
            meeting.fail(fault(&CommError::System { me: self.rank, what: "open its GPU", cause }))
        })?;
        let measure_memory = gpu.is_none();
        let options =
            ExecuteOptions { engine, sharing, gpu, repeat: self.repeat, check: true, measure_memory };
        let mut started = vec![];
        let mut barrier = |gate: Gate| {
            meeting.barrier(self.barrier()).map_err(|e| comm_error(self.rank, e))?;
            if gate == Gate::Start {
                started.push(Moment::now(meeting.clock()));
                on_round(started.len() as u32);
            }
            Ok(())
        };
        let executed = self.task.execute(self.rank, links, &options, &mut barrier);
        // A run is over when it is for all: who is done early hears how it ended.
        let ended = executed.and_then(|report| {
            meeting.barrier(self.barrier()).map_err(|e| comm_error(self.rank, e))?;
            Ok(report)
        });
        ended.map(|report| self.summary(report, started.clone())).map_err(|failure| {
            self.write_flight(&failure, started.last());
            meeting.fail(fault(&failure.error))
        })
    }

    /// The lobby is less patient, and says whom it waited for.
    fn barrier(&self) -> Deadline {
        Deadline::after(2 * barrier_limit(self.deadline_ms))
    }

    /// For a rank that the plan does not know: waits where the others do.
    pub fn watch(&self, meeting: &mut dyn Meeting) -> Result<Summary, Abort> {
        // Wherever the others do, and when all is over.
        for _ in 0..=self.task.num_barriers(self.repeat) {
            if let Err(error) = meeting.barrier(self.barrier()) {
                return Err(meeting.fail(fault(&comm_error(self.rank, error))));
            }
        }
        Ok(self.summary(RankReport::idle(self.rank), vec![]))
    }

    fn summary(&self, report: RankReport, started: Vec<Moment>) -> Summary {
        Summary {
            rank: report.rank,
            met_s: self.met_s,
            started,
            seconds: report.seconds,
            synced: report.synced,
            bytes_sent: report.bytes_sent,
            bytes_received: report.bytes_received,
            verified: report.verified,
            wrong: report.wrong,
            peak_rss_bytes: peak_rss_bytes(),
            memory: report.memory,
            ops: if self.trace { report.ops } else { vec![] },
        }
    }

    fn write_flight(&self, failure: &Failure, started: Option<&Moment>) {
        let Some(path) = &self.flight else { return };
        let idle = || FlightRecord::idle(self.rank, Some(&failure.error));
        let mut flight = failure.flight.as_deref().cloned().unwrap_or_else(idle);
        flight.started = started.cloned();
        write_record(path, &flight);
    }
}

/// A record helps; that it cannot be written is said, and must not hide what went wrong.
pub fn write_record(path: &Path, record: &impl Serialize) {
    let written = output::to_json(record).and_then(|text| files::write(path, &text));
    if let Err(error) = written {
        let _ = writeln!(std::io::stderr(), "{error:#}");
    }
}

pub fn log() -> Log {
    Arc::new(|line: &str| drop(writeln!(std::io::stderr(), "{line}")))
}

/// How this process ends when its job is aborted: with the reason, once.
#[derive(Debug, Clone)]
pub struct Ending {
    said: Arc<AtomicBool>,
    pub interrupt: Interrupt,
    /// Who else is to be told.
    tell: fn(&Abort),
}

impl Ending {
    pub fn new(tell: fn(&Abort)) -> Self {
        Self { said: Arc::default(), interrupt: Interrupt::default(), tell }
    }

    /// Interrupts the engine, and ends this process soon if it does not come to an end itself.
    pub fn on_news(&self) -> OnNews {
        let ending = self.clone();
        Arc::new(move |news| {
            let abort = match news {
                News::Suspect(rank, why) => return ending.interrupt.suspect(rank, why),
                News::Abort(abort) => abort,
            };
            ending.interrupt.raise(abort.culprit, &abort.host, &abort.text);
            std::thread::sleep(LAST_WORDS);
            ending.say_once(abort);
            std::process::exit(2);
        })
    }

    /// Where the ranks did not meet: who is to blame, said once.
    pub fn not_met(&self, error: RendezvousError) -> anyhow::Error {
        match error {
            RendezvousError::Aborted(abort) => {
                self.say_once(&abort);
                output::Told.into()
            }
            other => other.into(),
        }
    }

    pub fn say_once(&self, abort: &Abort) {
        if !self.said.swap(true, Ordering::SeqCst) {
            (self.tell)(abort);
            output::print_error(&anyhow::anyhow!("{abort}"));
        }
    }
}

/// `VmHWM:  1234 kB` of this process.
fn peak_rss_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib << 10)
}
