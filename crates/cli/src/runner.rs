//! Runs a plan for real: one process per rank, on loopback or on emulated hosts, and collects what they saw.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write as _;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use crossmesh_comm::auth::{SECRET_VARIABLE, Secret};
use crossmesh_comm::emulate::{Emulation, NicRate};
use crossmesh_comm::environment::{DEFAULT_PORT, HOST_VARIABLE, Place};
use crossmesh_comm::launch::{Grace, Job, Line, OnLine, Outcome, Process, Signals, Source};
use crossmesh_comm::usage::ExtraMemory;
use crossmesh_core::cluster::{Cluster, Topology};
use crossmesh_core::id::{HostId, Rank};

use crate::commands::launch::free_port;
use crate::commands::rank::Said;
use crate::joined;
use crate::output::Progress;
use crate::part::Summary;
use crate::predict::Prediction;
use crate::task::Task;

/// More processes than this are a mistake on one machine.
const MAX_PROCESSES: usize = 512;
/// After a failure, ranks agree on the culprit and say so within this time. One that still runs then is stuck.
const GRACE: Grace =
    Grace { after_failure: Duration::from_millis(1500), after_term: Duration::from_millis(100) };

/// How to run.
#[derive(Debug, Clone)]
pub struct RunOptions {
    /// Every host in a network namespace, its NIC shaped to the cluster's rate.
    pub emulate: bool,
    pub repeat: u32,
    /// How long nothing may move.
    pub deadline: Option<Duration>,
    /// How long ranks may take to arrive.
    pub arrive: Duration,
    /// Where to write, after a failure, how far every op of every rank was.
    pub flight: Option<std::path::PathBuf>,
    /// Start processes here, even where this one is a rank of a job.
    pub standalone: bool,
    /// A job may have more ranks than the plan.
    pub spare_ranks: bool,
}

impl RunOptions {
    /// How long nothing may move, in milliseconds.
    pub fn deadline_ms(&self, predicted_s: f64) -> u64 {
        let deadline = self.deadline.unwrap_or_else(|| default_deadline(predicted_s));
        (deadline.as_millis() as u64).max(1)
    }
}

/// Who started the processes of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Started {
    ByUs,
    ByOthers { launcher: &'static str, hosts: usize, transport: &'static str },
}

/// What a run showed.
#[derive(Debug, Clone)]
pub struct Measured {
    /// From the first rank's start to the last rank's end, by run.
    pub seconds: Vec<f64>,
    /// Elements that are not what they should be: the first of each rank that has one.
    pub wrong: Vec<String>,
    pub peak_rss_bytes: Option<u64>,
    /// What ranks needed beside their tensors, where the system tells.
    pub memory: Vec<(Rank, ExtraMemory)>,
    pub started: Started,
}

impl Measured {
    pub fn median_s(&self) -> f64 {
        median(&self.seconds)
    }

    pub fn verified(&self) -> bool {
        self.wrong.is_empty()
    }
}

pub fn median(seconds: &[f64]) -> f64 {
    let mut sorted = seconds.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 }
}

/// How a run failed.
#[derive(Debug)]
pub struct RunFailed {
    outcome: Outcome,
    /// What ranks said on stderr.
    said: Vec<(Rank, String)>,
}

impl std::error::Error for RunFailed {}

impl fmt::Display for RunFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // What most ranks agree on; a rank that died said nothing.
        let mut votes: BTreeMap<&str, usize> = BTreeMap::new();
        for (_, line) in &self.said {
            if let Some(reason) = line.strip_prefix("error: ") {
                *votes.entry(reason).or_default() += 1;
            }
        }
        match (votes.into_iter().max_by_key(|(_, votes)| *votes), self.outcome) {
            (Some((reason, _)), _) => f.write_str(reason),
            (None, Outcome::Failed { rank, status }) => write!(f, "{rank} failed: {status}"),
            (None, Outcome::Signalled(signal)) => write!(f, "ended by signal {signal}"),
            (None, _) => f.write_str("the run took too long and was ended"),
        }
    }
}

/// What is to be run, by one process per rank.
pub struct Work<'a> {
    pub task: &'a Task<'a>,
    /// What the task is made from, by every rank for itself.
    pub document: String,
    pub cluster: &'a Cluster,
    pub topology: &'a Topology,
    pub predicted_s: f64,
}

/// Runs a plan that was predicted.
pub fn run_plan(prediction: &Prediction, options: &RunOptions, progress: &Progress) -> Result<Measured> {
    let problem = &prediction.plan.problem;
    let work = Work {
        task: &Task::of_plan(&prediction.plan),
        document: prediction.document(),
        cluster: &problem.cluster,
        topology: &problem.topology,
        predicted_s: prediction.seconds(),
    };
    run_work(&work, options, progress)
}

/// Runs a plan or a step: as a rank, where a launcher says that this process is one; else with processes of its own.
pub fn run_work(work: &Work<'_>, options: &RunOptions, progress: &Progress) -> Result<Measured> {
    if let Some(measured) = joined::run_work(work, options, progress)? {
        return Ok(measured);
    }
    let signals = Signals::watch()?;
    let ranks = work.task.ranks();
    if ranks.len() > MAX_PROCESSES {
        bail!("{} ranks are too many for one machine\nhint: up to {MAX_PROCESSES}", ranks.len());
    }
    // Declared before the job: its processes end before their hosts and the plan's folder go.
    let folder =
        tempfile::Builder::new().prefix("crossmesh-run-").tempdir().context("no folder for the plan")?;
    std::fs::write(folder.path().join("work.json"), &work.document).context("cannot write the plan")?;
    let site = Site::of(work, &ranks, options.emulate)?;
    let secret = Secret::generate()?;
    let processes = ranks.iter().map(|rank| process(work, options, &site, *rank, &secret, folder.path()));
    let heard = Arc::new(Heard::default());
    let job = Job::start(
        processes.collect::<Result<_>>()?,
        listen(&heard, work.task.num_barriers(options.repeat)),
        GRACE,
    )?;
    progress.say(&format!("{} processes on {} hosts meet", ranks.len(), site.hosts.len()));
    let outcome = job.wait(&signals, None);
    progress.say("");
    let summaries = std::mem::take(&mut *heard.summaries.lock().expect("no thread panics with it"));
    let wrong_answer = matches!(outcome, Outcome::Failed { status, .. } if status.code() == Some(1));
    if summaries.len() == ranks.len() && (outcome == Outcome::Done || wrong_answer) {
        return Ok(combine(&summaries, work.task.num_times(options.repeat), Started::ByUs));
    }
    save_flight(options, work, folder.path());
    let said = std::mem::take(&mut *heard.said.lock().expect("no thread panics with it"));
    Err(RunFailed { outcome, said }.into())
}

/// The hosts of a run.
struct Site {
    /// Those with ranks, in order; their places are their numbers in the emulation.
    hosts: Vec<HostId>,
    emulation: Option<Emulation>,
    master_addr: String,
    master_port: u16,
}

impl Site {
    fn of(work: &Work<'_>, ranks: &[Rank], emulate: bool) -> Result<Self> {
        let mut hosts: Vec<HostId> = ranks.iter().map(|rank| work.topology.host(*rank)).collect();
        hosts.sort_unstable();
        hosts.dedup();
        if !emulate {
            let (master_addr, master_port) = ("127.0.0.1".into(), free_port()?);
            return Ok(Self { hosts, emulation: None, master_addr, master_port });
        }
        if !work.cluster.tiers.is_empty() {
            bail!("tiers of switches cannot be emulated yet\nhint: describe a cluster without [[tier]]");
        }
        let rate = |host: &HostId| {
            let host = &work.cluster.hosts[host.index()];
            NicRate { out_bytes_per_s: host.out_bytes_per_s(), in_bytes_per_s: host.in_bytes_per_s() }
        };
        let emulation = Emulation::up(&hosts.iter().map(rate).collect::<Vec<_>>())?;
        // The first rank is on the first host, and its port there is nobody else's.
        let (master_addr, master_port) = (Emulation::address(0).to_string(), DEFAULT_PORT);
        Ok(Self { hosts, emulation: Some(emulation), master_addr, master_port })
    }
}

fn process(
    work: &Work<'_>,
    options: &RunOptions,
    site: &Site,
    rank: Rank,
    secret: &Secret,
    folder: &std::path::Path,
) -> Result<Process> {
    let topology = work.topology;
    let host = topology.host(rank);
    let index = site.hosts.binary_search(&host).expect("every rank's host is listed");
    let place = Place {
        rank,
        world: topology.num_ranks() as u32,
        local_rank: topology.ranks_of(host).position(|r| r == rank).unwrap_or(0) as u32,
        local_world: Some(topology.ranks_of(host).count() as u32),
        master_addr: site.master_addr.clone(),
        master_port: site.master_port,
        launcher: "crossmesh",
    };
    let mut env = place.to_variables();
    env.insert(SECRET_VARIABLE.into(), secret.to_hex());
    env.insert(HOST_VARIABLE.into(), host.to_string());
    let document = folder.join("work.json").display().to_string();
    let mut args = vec!["rank".to_string(), work.task.flag().into(), document];
    let mut flag = |name: &str, value: String| args.extend([name.to_string(), value]);
    flag("--repeat", options.repeat.to_string());
    flag("--deadline-ms", options.deadline_ms(work.predicted_s).to_string());
    flag("--arrive-ms", options.arrive.as_millis().to_string());
    flag("--flight", folder.display().to_string());
    Ok(Process {
        rank,
        program: std::env::current_exe().context("the program cannot find itself")?.into(),
        args: args.into_iter().map(Into::into).collect(),
        env,
        namespace: site.emulation.as_ref().map(|emulation| emulation.namespace(index)),
        stdin: None,
    })
}

/// A rank may wait for the others as long as the whole run takes before anything moves there.
fn default_deadline(predicted_s: f64) -> Duration {
    Duration::from_secs_f64((5.0 + 2.0 * predicted_s).min(1e6))
}

/// What came from the ranks.
#[derive(Default)]
struct Heard {
    summaries: Mutex<Vec<Summary>>,
    said: Mutex<Vec<(Rank, String)>>,
}

fn listen(heard: &Arc<Heard>, repeat: u32) -> OnLine {
    let (heard, progress) = (heard.clone(), Progress::new());
    Arc::new(move |line: Line<'_>| match (line.source, serde_json::from_str::<Said>(line.text)) {
        (Source::Stdout, Ok(Said::Round(round))) => progress.say(&format!("run {round} of {repeat}")),
        (Source::Stdout, Ok(Said::Report(summary))) => {
            heard.summaries.lock().expect("no thread panics with it").push(summary);
        }
        _ => {
            let _ = writeln!(std::io::stderr(), "[{}] {}", line.rank.0, line.text);
            heard.said.lock().expect("no thread panics with it").push((line.rank, line.text.to_string()));
        }
    })
}

/// Puts together what the ranks saw. Those of one machine share its clock; ranks of several are taken to have started
/// together, when the barrier opened.
pub fn combine(summaries: &[Summary], repeat: u32, started: Started) -> Measured {
    let one_clock = summaries.windows(2).all(|pair| pair[0].machine == pair[1].machine);
    let span = |run: usize| {
        let took_part = || summaries.iter().filter(|s| run < s.seconds.len());
        let compared = one_clock && !took_part().any(|s| s.synced);
        let started = |s: &Summary| if compared { s.started_ns[run] } else { 0 };
        let start = took_part().map(started).min().unwrap_or(0);
        let late_s = |s: &Summary| (started(s) - start) as f64 / 1e9;
        took_part().map(|s| late_s(s) + s.seconds[run]).fold(0.0, f64::max)
    };
    Measured {
        seconds: (0..repeat as usize).map(span).collect(),
        wrong: summaries
            .iter()
            .filter(|s| !s.verified)
            .map(|s| format!("{}: {}", s.rank, s.wrong.as_deref().unwrap_or("not checked")))
            .collect(),
        peak_rss_bytes: summaries.iter().filter_map(|s| s.peak_rss_bytes).max(),
        memory: summaries.iter().filter_map(|s| Some((s.rank, s.memory.clone()?))).collect(),
        started,
    }
}

/// Puts the records of all ranks, and the plan, into one file.
fn save_flight(options: &RunOptions, work: &Work<'_>, folder: &std::path::Path) {
    let Some(path) = &options.flight else { return };
    let read = |rank: u32| {
        let text = std::fs::read_to_string(folder.join(format!("{}.json", Rank(rank)))).ok()?;
        serde_json::from_str::<serde_json::Value>(&text).ok()
    };
    let ranks = work.topology.num_ranks() as u32;
    let plan: serde_json::Value = serde_json::from_str(&work.document).unwrap_or_default();
    let record = serde_json::json!({
        "schema": "crossmesh.flight/1",
        "plan": plan,
        "ranks": (0..ranks).filter_map(read).collect::<Vec<_>>(),
    });
    // The failure itself is what matters; it is told either way.
    if std::fs::write(path, record.to_string() + "\n").is_err() {
        let _ = writeln!(std::io::stderr(), "cannot write the flight record to {}", path.display());
    }
}
