//! A rank's part in a run, whoever started the process: connect, move its tensors, check them, and tell what it saw.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crossmesh_comm::clock::{Clock, Monotonic};
use crossmesh_comm::deadline::Deadline;
use crossmesh_comm::engine::EngineOptions;
use crossmesh_comm::error::CommError;
use crossmesh_comm::execute::{ExecuteOptions, Failure, RankReport};
use crossmesh_comm::rendezvous::{Abort, Fault, Links, Log, Meeting, OnAbort, RendezvousError};
use crossmesh_comm::usage::ExtraMemory;
use crossmesh_core::id::Rank;
use serde::{Deserialize, Serialize};

use crate::output;
use crate::task::Task;

/// An aborted rank has this long to come to its own end, and write down where it stood.
const LAST_WORDS: Duration = Duration::from_millis(700);
/// Checking every element between runs takes a while on a small machine.
pub const BARRIER: Duration = Duration::from_secs(120);

/// What a rank saw.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Summary {
    pub rank: Rank,
    /// Which machine's clock it read; ranks of one can compare their times.
    pub machine: String,
    /// By run: when the barrier opened, by the machine's clock, and how long the rank's part took.
    pub started_ns: Vec<u64>,
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
}

/// What a rank has to do.
pub struct Part<'a> {
    pub task: &'a Task<'a>,
    pub rank: Rank,
    pub repeat: u32,
    /// How long nothing may move.
    pub deadline_ms: u64,
    /// Where to write down, after a failure, how far every op was.
    pub flight: Option<PathBuf>,
}

impl Part<'_> {
    /// Connects with the ranks that the plan needs.
    pub fn connect(&self, meeting: &mut dyn Meeting, deadline: Deadline) -> Result<Links, RendezvousError> {
        let peers: BTreeSet<Rank> = self.task.peers(self.rank).into_iter().collect();
        meeting.connect(&peers, deadline)
    }

    /// Moves the tensors; an error is what the job agreed on.
    pub fn take(
        &self,
        meeting: &mut dyn Meeting,
        links: Links,
        on_round: impl Fn(u32) + Sync,
    ) -> Result<Summary, Abort> {
        let engine = EngineOptions { deadline_ms: self.deadline_ms, hosts: meeting.hosts().to_vec() };
        let sharing = meeting.sharing();
        let options =
            ExecuteOptions { engine, sharing, repeat: self.repeat, check: true, measure_memory: true };
        let mut started_ns = vec![];
        let mut barrier = || {
            meeting.barrier(Deadline::after(BARRIER)).map_err(|e| comm_error(self.rank, e))?;
            started_ns.push(Monotonic.now_ns());
            on_round(started_ns.len() as u32);
            Ok(())
        };
        match self.task.execute(self.rank, links, &options, &mut barrier) {
            Ok(report) => Ok(summary(report, started_ns)),
            Err(failure) => {
                write_flight(self.flight.as_deref(), &failure);
                Err(meeting.fail(fault(&failure.error)))
            }
        }
    }

    /// For a rank that the plan does not know: waits where the others do.
    pub fn watch(&self, meeting: &mut dyn Meeting) -> Result<Summary, Abort> {
        for _ in 0..self.task.num_barriers(self.repeat) {
            if let Err(error) = meeting.barrier(Deadline::after(BARRIER)) {
                return Err(meeting.fail(fault(&comm_error(self.rank, error))));
            }
        }
        Ok(summary(RankReport::idle(self.rank), vec![]))
    }
}

pub fn log() -> Log {
    Arc::new(|line: &str| drop(writeln!(std::io::stderr(), "{line}")))
}

/// Ends this process soon after the job was aborted, in case it does not come to an end itself.
pub fn leave_soon(said: Arc<AtomicBool>) -> OnAbort {
    Box::new(move |abort| {
        std::thread::sleep(LAST_WORDS);
        say_once(&said, abort);
        std::process::exit(2);
    })
}

pub fn say_once(said: &AtomicBool, abort: &Abort) {
    if !said.swap(true, Ordering::SeqCst) {
        output::print_error(&anyhow::anyhow!("{abort}"));
    }
}

pub fn comm_error(me: Rank, error: RendezvousError) -> CommError {
    match error {
        RendezvousError::Aborted(Abort { culprit, host, text }) => {
            CommError::Aborted { me, culprit, host, reason: text }
        }
        other => CommError::System { me, what: "wait for the others", cause: other.to_string() },
    }
}

/// What to report: of an abort, the reason of the one who found out first.
pub fn fault(error: &CommError) -> Fault {
    let text = match error {
        CommError::Aborted { reason, .. } => reason.clone(),
        other => other.to_string(),
    };
    Fault { blames: error.culprit(), text: text.lines().next().unwrap_or_default().to_string() }
}

fn summary(report: RankReport, started_ns: Vec<u64>) -> Summary {
    Summary {
        rank: report.rank,
        machine: machine(),
        started_ns,
        seconds: report.seconds,
        synced: report.synced,
        bytes_sent: report.bytes_sent,
        bytes_received: report.bytes_received,
        verified: report.verified,
        wrong: report.wrong,
        peak_rss_bytes: peak_rss_bytes(),
        memory: report.memory,
    }
}

/// A name that processes share exactly if they read the same clock: clocks start when a machine does.
fn machine() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_string()
}

/// `VmHWM:  1234 kB` of this process.
fn peak_rss_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib << 10)
}

fn write_flight(path: Option<&Path>, failure: &Failure) {
    let (Some(path), Some(flight)) = (path, &failure.flight) else { return };
    // The record helps; that it cannot be written must not hide what went wrong.
    if let Ok(text) = serde_json::to_string(flight) {
        let _ = std::fs::write(path, text);
    }
}
