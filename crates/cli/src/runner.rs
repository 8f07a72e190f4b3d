//! Runs a plan for real: one process per rank, on loopback or on emulated hosts, and collects what they saw.

use std::fmt;
use std::io::Write as _;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use crossmesh_comm::auth::{SECRET_VARIABLE, Secret};
use crossmesh_comm::clock::{Moment, by_one_clock};
use crossmesh_comm::environment::{DEFAULT_PORT, HOST_VARIABLE, Place, STARTED_VARIABLE, now_ms};
use crossmesh_comm::lab::emulate::{Emulation, NicRate};
use crossmesh_comm::lab::usage::ExtraMemory;
use crossmesh_comm::launch::janitor::{Kept, keep};
use crossmesh_comm::launch::{Grace, Job, Line, OnLine, Outcome, Process, Signals, Source};
use crossmesh_comm::protect::{PROTECT_VARIABLE, Protect};
use crossmesh_core::cluster::{Cluster, Topology};
use crossmesh_core::id::{HostId, Rank};

use crate::commands::launch::free_port;
use crate::commands::rank::Said;
use crate::files;
use crate::joined;
use crate::memory::Memory;
use crate::output::{self, Progress};
use crate::part::Summary;
use crate::predict::Prediction;
use crate::records::{MeasuredTrace, Records, measured_trace};
use crate::task::Task;
use crate::verdict::Verdicts;

/// More processes than this are a mistake on one machine.
const MAX_PROCESSES: usize = 2048;
/// After a failure, ranks agree on the culprit and say so within this time. One that still runs then is stuck.
const GRACE: Grace = Grace {
    after_failure: Duration::from_millis(1500),
    after_term: Duration::from_millis(100),
    to_finish: None,
};

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
    /// Where to write how far every op of every rank was in the end.
    pub flight: Option<std::path::PathBuf>,
    /// Whether to note when every op ran.
    pub trace: bool,
    /// Start processes here, even where this one is a rank of a job.
    pub standalone: bool,
    /// A job may have more ranks than the plan.
    pub spare_ranks: bool,
    pub protect: Protect,
    /// Where ranks have their tensors, and whether they may share GPUs.
    pub memory: Memory,
    pub share_gpus: bool,
}

impl RunOptions {
    /// Whether ranks leave a record of when what ran.
    fn records(&self) -> bool {
        self.flight.is_some() || self.trace
    }

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
    /// From the start until everybody was in, where the launcher says when that was.
    pub met_s: Option<f64>,
    /// Elements that are not what they should be: the first of each rank that has one.
    pub wrong: Vec<String>,
    /// The most memory that each process had, where the system tells.
    pub peak_rss: Vec<(Rank, u64)>,
    /// What ranks needed beside their tensors, where the system tells.
    pub memory: Vec<(Rank, ExtraMemory)>,
    pub started: Started,
    /// Of the last run, where it was asked for.
    pub trace: Option<MeasuredTrace>,
}

impl Measured {
    pub fn median_s(&self) -> f64 {
        median(&self.seconds)
    }

    /// Of the largest process.
    pub fn peak_rss_bytes(&self) -> Option<u64> {
        self.peak_rss.iter().map(|(_, bytes)| *bytes).max()
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
    verdicts: Verdicts,
    /// Goes with this value: how a run failed is told before its hosts are cleared away, which may take longer.
    _site: Site,
}

impl RunFailed {
    /// Whether nobody stopped it.
    pub fn is_by_accident(&self) -> bool {
        !matches!(self.outcome, Outcome::Signalled(_))
    }
}

impl std::error::Error for RunFailed {}

impl fmt::Display for RunFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.verdicts.reason(), self.outcome) {
            (Some(reason), _) => f.write_str(&reason),
            (None, Outcome::Failed { rank, status }) => write!(f, "{rank} failed: {status}"),
            (None, Outcome::Signalled(signal)) => write!(f, "ended by signal {signal}"),
            (None, _) => f.write_str("the run took too long and was ended"),
        }
    }
}

/// What is to be run, by one process per rank.
pub struct Work<'a> {
    pub task: &'a Task<'a>,
    /// What the task is made from, by every rank for itself: of training steps, sweeps and training, and wherever others started the
    /// ranks.
    pub document: String,
    pub cluster: &'a Cluster,
    pub topology: &'a Topology,
    pub predicted_s: f64,
}

impl Work<'_> {
    /// What this is and where it starts, in few words: ranks that were started one by one hold it against each other.
    pub fn identity(&self) -> String {
        match self.task {
            Task::Train { training } => {
                let from = training.doc.resume.as_ref().and_then(|folder| folder.file_name());
                let from = from.map_or("the start".into(), |name| name.to_string_lossy());
                let nic = training.doc.nic.as_deref().unwrap_or("");
                let config = hash(&[&training.doc.config, nic]);
                format!("config {config:016x} from {from}")
            }
            _ => format!("plan {:016x}", hash(&[&self.document])),
        }
    }
}

/// FNV-1a. It tells mistakes apart, not attackers.
fn hash(texts: &[&str]) -> u64 {
    let bytes = texts.iter().flat_map(|text| text.bytes().chain([0]));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// Runs a plan that was predicted.
pub fn run_plan(prediction: &Prediction, options: &RunOptions, progress: &Progress) -> Result<Measured> {
    let problem = &prediction.plan.problem;
    let work = Work {
        task: &Task::of_plan(&prediction.plan, &prediction.program),
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
    check_memory(work, options)?;
    let signals = Signals::watch()?;
    let ranks = work.task.ranks();
    if ranks.len() > MAX_PROCESSES {
        bail!("{} ranks are too many for one machine\nhint: up to {MAX_PROCESSES}", ranks.len());
    }
    // Declared before the job: its processes end before their hosts and the plan's folder go.
    let temp = std::env::temp_dir();
    let no_folder = || format!("no folder for the plan in {} (TMPDIR says where)", temp.display());
    let folder =
        tempfile::Builder::new().prefix("crossmesh-run-").tempdir_in(&temp).with_context(no_folder)?;
    let _kept = keep(Kept::Folder(folder.path().display().to_string()));
    write_documents(work, &ranks, folder.path()).with_context(no_folder)?;
    let site = Site::of(work, &ranks, options.emulate)?;
    let secret = Secret::generate()?;
    let processes = ranks.iter().map(|rank| process(work, options, &site, *rank, &secret, folder.path()));
    let heard = Arc::new(Heard::default());
    let job = Job::start(
        processes.collect::<Result<_>>()?,
        listen(&heard, work.task, options.repeat),
        Grace { to_finish: work.task.time_to_finish(), ..GRACE },
    )?;
    progress.say(&format!("{} processes on {} hosts meet", ranks.len(), site.hosts.len()));
    let (outcome, statuses) = job.wait_each(&signals, None);
    progress.say("");
    let summaries = std::mem::take(&mut *heard.summaries.lock().expect("no thread panics with it"));
    let verdicts = std::mem::take(&mut *heard.verdicts.lock().expect("no thread panics with it"));
    let records = Records { folder: folder.path(), work };
    let wrong_answer = matches!(outcome, Outcome::Failed { status, .. } if status.code() == Some(1));
    let landed = summaries.len() == ranks.len() && (outcome == Outcome::Done || wrong_answer);
    let reason = verdicts.reason().filter(|_| !landed);
    verdicts.beside(reason.as_deref()).iter().for_each(|line| output::remark(line));
    if landed {
        let summaries = if options.records() { records.with_ops(summaries)? } else { summaries };
        if let Some(path) = &options.flight {
            records.write_flight(path, &verdicts, &statuses, &summaries)?;
        }
        let trace = if options.trace { measured_trace(work.task, &summaries) } else { None };
        let times = work.task.num_times(options.repeat);
        return Ok(Measured { trace, ..combine(&summaries, times, Started::ByUs) });
    }
    if let Some(path) = &options.flight {
        // How the run failed matters more.
        if let Err(error) = records.write_flight(path, &verdicts, &statuses, &[]) {
            output::print_error(&error);
        }
    }
    Err(RunFailed { outcome, verdicts, _site: site }.into())
}

/// What ranks read: each its own part of what is proven, or all the same.
fn write_documents(work: &Work<'_>, ranks: &[Rank], folder: &std::path::Path) -> Result<()> {
    let shares = work.task.shares();
    for &rank in ranks {
        let Some(part) = work.task.hand(rank, ranks, &shares) else {
            return files::write(&document(work, rank, folder), &work.document);
        };
        files::write(&document(work, rank, folder), &part?)?;
    }
    Ok(())
}

fn document(work: &Work<'_>, rank: Rank, folder: &std::path::Path) -> std::path::PathBuf {
    match work.task {
        Task::Plan { .. } | Task::Program { .. } => folder.join(format!("handed-{}.json", rank.0)),
        _ => folder.join("work.json"),
    }
}

/// Only what moves tensors can have them anywhere.
pub fn check_memory(work: &Work<'_>, options: &RunOptions) -> Result<()> {
    match work.task {
        Task::Plan { .. } | Task::Program { .. } | Task::Train { .. } => Ok(()),
        _ if options.memory == Memory::Host => Ok(()),
        _ => {
            bail!(
                "--memory {}: only plans, programs and training run there yet\nhint: `crossmesh run`",
                options.memory
            )
        }
    }
}

/// The hosts of a run.
#[derive(Debug)]
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
    env.insert(PROTECT_VARIABLE.into(), options.protect.to_string());
    env.insert(HOST_VARIABLE.into(), host.to_string());
    env.insert(STARTED_VARIABLE.into(), now_ms().to_string());
    let document = document(work, rank, folder).display().to_string();
    let mut args = vec!["rank".to_string(), work.task.flag().into(), document];
    let mut flag = |name: &str, value: String| args.extend([name.to_string(), value]);
    flag("--repeat", options.repeat.to_string());
    flag("--deadline-ms", options.deadline_ms(work.predicted_s).to_string());
    flag("--arrive-ms", options.arrive.as_millis().to_string());
    if options.memory.is_on_gpu(rank) {
        // All processes are on this machine, whatever hosts they play.
        let before = |other: &Rank| *other < rank && options.memory.is_on_gpu(*other);
        let index = work.task.ranks().iter().filter(|other| before(other)).count();
        flag("--gpu", index.to_string());
        if options.share_gpus {
            flag("--share-gpus", "true".into());
        }
    }
    if options.records() {
        flag("--records", folder.display().to_string());
    }
    let (program, first) = crate::again().context("the program cannot find itself")?;
    Ok(Process {
        rank,
        program,
        args: first.into_iter().chain(args.into_iter().map(Into::into)).collect(),
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
    verdicts: Mutex<Verdicts>,
}

fn listen(heard: &Arc<Heard>, task: &Task<'_>, repeat: u32) -> OnLine {
    let (heard, progress) = (heard.clone(), Progress::new());
    let (repeat, on_step, on_talked) = (task.num_rounds(repeat), task.on_step(), task.on_talked());
    Arc::new(move |line: Line<'_>| match (line.source, serde_json::from_str::<Said>(line.text)) {
        (Source::Stdout, Ok(Said::Round(round))) => progress.say(&format!("run {round} of {repeat}")),
        (Source::Stdout, Ok(Said::Step(note))) => on_step.iter().for_each(|hear| hear(note.clone())),
        (Source::Stdout, Ok(Said::Talked(talked))) => on_talked.iter().for_each(|hear| hear(talked.clone())),
        (Source::Stdout, Ok(Said::Report(summary))) => {
            heard.summaries.lock().expect("no thread panics with it").push(summary);
        }
        (Source::Stdout, Ok(Said::Abort(abort))) => {
            heard.verdicts.lock().expect("no thread panics with it").told(line.rank, abort);
        }
        _ if heard.verdicts.lock().expect("no thread panics with it").complains(line.rank, line.text) => {}
        _ => {
            let _ = writeln!(std::io::stderr(), "[{}] {}", line.rank.0, line.text);
        }
    })
}

/// Puts together what the ranks saw. Where nobody compared their clocks, they are taken to have started together, when
/// the barrier opened.
pub fn combine(summaries: &[Summary], repeat: u32, started: Started) -> Measured {
    let span = |run: usize| {
        let took_part: Vec<&Summary> = summaries.iter().filter(|s| run < s.seconds.len()).collect();
        let moments: Vec<&Moment> = match took_part.iter().any(|s| s.synced) {
            true => vec![],
            false => took_part.iter().filter_map(|s| s.started.get(run)).collect(),
        };
        let compared = by_one_clock(&moments).filter(|_| moments.len() == took_part.len());
        let starts = compared.map_or(vec![0; took_part.len()], |(starts, _)| starts);
        let first = starts.iter().min().copied().unwrap_or(0);
        let ends = took_part.iter().zip(&starts).map(|(s, at)| (at - first) as f64 / 1e9 + s.seconds[run]);
        ends.fold(0.0, f64::max)
    };
    Measured {
        seconds: (0..repeat as usize).map(span).collect(),
        met_s: summaries.iter().filter_map(|s| s.met_s).max_by(f64::total_cmp),
        wrong: summaries
            .iter()
            .filter(|s| !s.verified)
            .map(|s| format!("{}: {}", s.rank, s.wrong.as_deref().unwrap_or("not checked")))
            .collect(),
        peak_rss: summaries.iter().filter_map(|s| Some((s.rank, s.peak_rss_bytes?))).collect(),
        memory: summaries.iter().filter_map(|s| Some((s.rank, s.memory.clone()?))).collect(),
        started,
        trace: None,
    }
}
