//! `crossmesh run`: move real bytes, check every element, and compare with what was predicted.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use crossmesh_comm::environment::variables;
use crossmesh_comm::lab::usage::ExtraMemory;
use crossmesh_comm::protect::{PROTECT_VARIABLE, Protect};
use crossmesh_core::cluster::Topology;
use crossmesh_core::id::Rank;
use crossmesh_core::program::doc::ProgramDoc;
use crossmesh_core::reshard::lower_bound;
use crossmesh_core::sim::simulate;
use crossmesh_core::units::{Bytes, Seconds, parse_seconds};
use crossmesh_core::verify::{Claims, Verified};
use crossmesh_cuda::CudaError;
use serde::Serialize;

use crate::Answer;
use crate::chrome;
use crate::input::{HostArgs, PlanArgs, PlanFile, ProblemArgs, is_program, read_plan, read_text};
use crate::machine;
use crate::memory::Memory;
use crate::output::{self, Format, FormatArgs, Progress, count};
use crate::predict::{Prediction, Violation, proven};
use crate::runner::{Measured, RunOptions, Started, Work, run_plan, run_work};
use crate::summary;
use crate::task::Task;

/// What `--emulate` says instead of a rate, to take the cluster's own.
pub const CLUSTER_RATES: &str = "cluster";

/// Run a reshard for real, one process per rank, and check every element.
#[derive(Debug, clap::Args)]
#[command(after_help = "Without --emulate the processes talk over loopback, whatever the NICs of the
cluster are.

Started as a rank by `crossmesh launch`, torchrun, srun or mpirun, it takes that
rank's part in the plan instead of starting processes; the first rank prints the
result. Ranks meet at MASTER_ADDR and MASTER_PORT, or where the launcher lets us
find out; CROSSMESH_MASTER=HOST:PORT goes before both. CROSSMESH_SECRET keeps
strangers out.

Examples:
  crossmesh run 'f32[1024,1024]@A{tp:2}(tp,_)' 'f32[1024,1024]@B{tp:3}(_,tp)'
  # as root
  crossmesh run 'f32[4096,4096]@A{tp:4}(tp,_)' \\
      'f32[4096,4096]@B{dp:2,tp:4}(_,_)' --emulate 400Mbit --repeat 5
  crossmesh run plan.json --cluster cluster.toml --emulate cluster --format json
  crossmesh launch -n 5 --hosts node1,node2 -- crossmesh run plan.json
  srun -n 5 crossmesh run plan.json")]
pub struct Args {
    #[command(flatten)]
    problem: ProblemArgs,
    #[command(flatten)]
    plan: PlanArgs,
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    format: FormatArgs,
    /// Write how far every op of every rank was in the end, for `explain --flight`
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    flight: Option<PathBuf>,
    /// Also write when every op ran, measured above predicted, as a Chrome trace for Perfetto
    #[arg(long, alias = "perfetto", value_name = "FILE", help_heading = "Output")]
    trace: Option<PathBuf>,
}

/// How to run; also the flags of a measured bench.
#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Running")]
pub struct RunArgs {
    /// Put every host into a network namespace with a NIC of this rate (`400Mbit`; one host slower: `400Mbit,h1=200Mbit`),
    /// or `cluster` for the cluster's rates; needs root
    #[arg(long, value_name = "RATE", allow_hyphen_values = true)]
    pub emulate: Option<String>,
    /// How often [default: 1; a bench: 5]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub repeat: Option<u32>,
    /// How long nothing may move before the run is given up [default: from the predicted time]
    #[arg(long, value_name = "TIME")]
    pub deadline: Option<String>,
    /// How long the processes may take to meet
    #[arg(long, value_name = "TIME", default_value = "30s")]
    pub arrive: String,
    /// Start the processes here, even where torchrun, Slurm or mpirun started this one as a rank of a job
    #[arg(long)]
    pub standalone: bool,
    /// What to do to frames between hosts: `none` (checksums), `sign` (nobody can change them) or `encrypt` (nor read them); the
    /// same on all ranks [default: what CROSSMESH_PROTECT says, or none]
    #[arg(long, value_name = "WAY")]
    pub protect: Option<Protect>,
    /// Where tensors lie: `host`, `cuda`, or `cuda:0,2-3` for those ranks; a GPU each [default: host]
    #[arg(long, value_name = "WHERE")]
    pub memory: Option<Memory>,
    /// Ranks may share GPUs
    #[arg(long)]
    pub share_gpus: bool,
}

/// What a flag or the environment asks for.
pub fn protection(flag: Option<Protect>) -> Result<Protect> {
    flag.map_or_else(|| Protect::from_variables(&variables()).context(PROTECT_VARIABLE), Ok)
}

impl RunArgs {
    pub fn options(&self, repeat: u32, flight: Option<PathBuf>) -> Result<RunOptions> {
        let time = |text: &str, flag| {
            let seconds = parse_seconds(text).context(flag)?;
            Duration::try_from_secs_f64(seconds)
                .ok()
                .filter(|d| !d.is_zero())
                .with_context(|| format!("{flag}: `{text}` is no time to wait"))
        };
        let memory = self.memory.clone().unwrap_or_default();
        if memory != Memory::Host && !cfg!(feature = "cuda") {
            return Err(CudaError::NotBuilt).context("--memory");
        }
        Ok(RunOptions {
            emulate: self.emulate.is_some(),
            repeat: self.repeat.unwrap_or(repeat),
            deadline: self.deadline.as_deref().map(|text| time(text, "--deadline")).transpose()?,
            arrive: time(&self.arrive, "--arrive")?,
            flight,
            trace: false,
            standalone: self.standalone,
            protect: protection(self.protect)?,
            spare_ranks: false,
            memory,
            share_gpus: self.share_gpus,
        })
    }

    /// The NIC rate that `--emulate` asks for, if it names one.
    pub fn nic(&self) -> Option<&String> {
        self.emulate.as_ref().filter(|rate| *rate != CLUSTER_RATES)
    }
}

/// The answer as JSON.
#[derive(Debug, Serialize)]
struct Report {
    schema: &'static str,
    strategy: String,
    ranks: usize,
    hosts: usize,
    /// Who started the processes, where it was not this command.
    launcher: Option<&'static str>,
    /// And what carried their bytes.
    transport: Option<&'static str>,
    /// The rate that NICs were shaped to; `cluster` where they differ; missing on loopback.
    emulated: Option<String>,
    /// What was assumed of hosts that nobody described, where people should know it.
    assumed: Option<String>,
    bytes: u64,
    /// From the start until everybody was in, where the launcher says when that was.
    met_s: Option<f64>,
    measured_s: Vec<f64>,
    median_s: f64,
    predicted_s: f64,
    lower_bound_s: f64,
    /// The machine whose times these are; of a job, that of its first rank.
    machine: String,
    /// Missing where the NICs of the prediction were not there: neither emulated nor of a cluster that was measured.
    over_bound: Option<f64>,
    over_predicted: Option<f64>,
    verified: bool,
    wrong: Vec<String>,
    peak_extra_bytes: u64,
    peak_rss_bytes: Option<u64>,
    /// Beside the tensors, by rank.
    memory: Vec<RankMemory>,
}

#[derive(Debug, Serialize)]
struct RankMemory {
    rank: Rank,
    #[serde(flatten)]
    extra: ExtraMemory,
}

impl RankMemory {
    fn of((rank, extra): (Rank, ExtraMemory)) -> Self {
        Self { rank, extra }
    }

    /// What was not proven.
    fn beyond(&self) -> i64 {
        self.extra.extra_bytes_measured as i64 - self.extra.extra_bytes_proven as i64
    }
}

pub fn run(mut args: Args) -> Result<Answer> {
    if let Some(rate) = args.run.nic()
        && let Some(nic) = args.problem.hosts.nic.replace(rate.clone())
    {
        bail!(
            "NICs cannot be of {nic} and be emulated with {rate}\nhint: leave --nic out, or say --emulate {CLUSTER_RATES}"
        );
    }
    let options = args.run.options(1, args.flight.clone())?;
    let options = RunOptions { trace: args.trace.is_some(), ..options };
    if let Some(path) = document_file(&args.problem)
        && is_program(&read_text(path)?)
    {
        return run_program(&args, path, &options);
    }
    let prediction = predict(&args)?;
    let measured = run_plan(&prediction, &options, &Progress::new())?;
    if let (Some(path), Some(trace)) = (&args.trace, &measured.trace) {
        output::write_file(path, &chrome::render_measured(&prediction, trace)?)?;
    }
    let report = report(&args, &prediction, measured);
    match args.format.get() {
        Format::Text => output::print(&render(&prediction, &report))?,
        Format::Json => output::print_json(&report)?,
    }
    Ok(if report.verified { Answer::Yes } else { Answer::No })
}

/// The plan to run, proven and predicted: from a file, or made now.
fn predict(args: &Args) -> Result<Prediction> {
    match document_file(&args.problem) {
        None => {
            let problem = args.problem.problem()?;
            let assumed = args.problem.assumption(&problem);
            Ok(Prediction::of_problem(&problem, &args.plan.options()?)?.assuming(assumed))
        }
        Some(path) if args.problem.dst_rank_offset.is_some() => {
            bail!(
                "the ranks of {} are planned already\nhint: give --dst-rank-offset when planning",
                path.display()
            )
        }
        Some(path) => match args.plan.first_given() {
            None => read_proven_plan(path, &args.problem.hosts),
            Some(flag) => {
                bail!("{} is planned already\nhint: leave {flag} out, or plan anew with it", path.display())
            }
        },
    }
}

/// Runs a program that comes as a document, once it is proven.
fn run_program(args: &Args, path: &Path, options: &RunOptions) -> Result<Answer> {
    let name = || path.display().to_string();
    let text = read_text(path)?;
    let task = Task::of_program_doc(&ProgramDoc::parse(&text).with_context(name)?).with_context(name)?;
    let Task::Program { program, cluster } = &task else { bail!("{} is no program", path.display()) };
    let trace = simulate(program, cluster).context("the program cannot be simulated")?;
    let work = Work {
        task: &task,
        document: text,
        cluster,
        topology: &Topology::new(cluster),
        predicted_s: trace.makespan_s,
    };
    let measured = run_work(&work, options, &Progress::new())?;
    let (verified, median_s) = (measured.verified(), measured.median_s());
    let report = ProgramReport {
        schema: "crossmesh.run/1",
        ranks: work.task.ranks().len(),
        emulated: args.run.emulate.clone(),
        bytes: program.proof().bytes,
        median_s,
        predicted_s: trace.makespan_s,
        machine: machine::machine(),
        verified,
        peak_extra_bytes: program.proof().peak_extra_bytes,
        measured_s: measured.seconds,
        wrong: measured.wrong,
    };
    match args.format.get() {
        Format::Json => output::print_json(&report)?,
        Format::Text => {
            let wrong: String = report.wrong.iter().map(|w| format!("wrong        {w}\n")).collect();
            let checked = if verified { "every element checked" } else { "a goal is wrong" };
            output::print(&format!(
                "run program {}, {} in {} messages, {}\nmachine      measured on {}\n{wrong}median       {}; {checked}\n",
                name(),
                Bytes(report.bytes),
                program.proof().transfers,
                count(report.ranks, "rank"),
                report.machine,
                Seconds(median_s),
            ))?;
        }
    }
    Ok(if verified { Answer::Yes } else { Answer::No })
}

/// A run of a program as JSON.
#[derive(Debug, Serialize)]
struct ProgramReport {
    schema: &'static str,
    ranks: usize,
    emulated: Option<String>,
    bytes: u64,
    measured_s: Vec<f64>,
    median_s: f64,
    predicted_s: f64,
    machine: String,
    verified: bool,
    wrong: Vec<String>,
    peak_extra_bytes: u64,
}

/// A single argument that names a document.
fn document_file(problem: &ProblemArgs) -> Option<&Path> {
    let (Some(src), None) = (&problem.src, &problem.dst) else { return None };
    let path = Path::new(src);
    let text = if path.is_file() { read_text(path).ok()? } else { return None };
    text.trim_start().starts_with('{').then_some(path)
}

fn read_proven_plan(path: &Path, hosts: &HostArgs) -> Result<Prediction> {
    let PlanFile { mut plan, doc, .. } = read_plan(path)?;
    let program = Verified::claimed_plan(&plan, &Claims::of(&doc)).map_err(|error| {
        anyhow::anyhow!(
            "{}: the plan breaks a law: {}",
            path.display(),
            Violation::from(error.renumbered(|t| doc.id_of(t)))
        )
    })?;
    let assumed = doc.assumed.clone().filter(|_| hosts.cluster.is_none());
    let mut cluster = hosts.described()?.unwrap_or_else(|| plan.problem.cluster.clone());
    hosts.adjust(&mut cluster)?;
    let num_ranks = plan.problem.topology.num_ranks();
    super::simulate::move_to(&mut plan, cluster)?;
    let program = if plan.problem.topology.num_ranks() == num_ranks { program } else { proven(&plan)? };
    let bound = lower_bound(&plan.problem).context("no lower bound")?;
    Ok(Prediction::of_program(plan, program, bound)?.assuming(assumed))
}

fn report(args: &Args, prediction: &Prediction, measured: Measured) -> Report {
    let problem = &prediction.plan.problem;
    let ranks = problem.meshes_of_ranks();
    let mut hosts: Vec<_> = ranks.keys().map(|rank| problem.topology.host(*rank)).collect();
    hosts.dedup();
    let (hosts, launcher, transport) = match measured.started {
        Started::ByUs => (hosts.len(), None, None),
        Started::ByOthers { launcher, hosts, transport } => (hosts, Some(launcher), Some(transport)),
    };
    let median_s = measured.median_s();
    let comparable = machine::comparable(&problem.cluster, args.run.emulate.is_some());
    let finite = |ratio: f64| Some(ratio).filter(|r| comparable && r.is_finite());
    Report {
        schema: "crossmesh.run/1",
        strategy: prediction.plan.strategy.clone(),
        ranks: ranks.len(),
        hosts,
        launcher,
        transport,
        emulated: args.run.emulate.clone(),
        assumed: prediction.assumed.clone(),
        bytes: problem.reshards.iter().map(|r| r.src.layout.bytes()).sum(),
        met_s: measured.met_s,
        median_s,
        predicted_s: prediction.seconds(),
        lower_bound_s: prediction.bound.seconds,
        machine: machine::machine(),
        over_bound: finite(output::ratio(median_s, prediction.bound.seconds)),
        over_predicted: finite(output::ratio(median_s, prediction.seconds())),
        verified: measured.verified(),
        peak_extra_bytes: prediction.peak_extra_bytes(),
        peak_rss_bytes: measured.peak_rss_bytes(),
        memory: {
            let mut memory: Vec<RankMemory> = measured.memory.into_iter().map(RankMemory::of).collect();
            memory.sort_by_key(|m| m.rank);
            memory
        },
        measured_s: measured.seconds,
        wrong: measured.wrong,
    }
}

fn render(prediction: &Prediction, report: &Report) -> String {
    let mut text = format!("run {}\n", summary::headline(&prediction.plan));
    if let Some(assumed) = &report.assumed {
        let _ = writeln!(text, "  note: {assumed}");
    }
    let place = format!("{} on {}", count(report.ranks, "process"), count(report.hosts, "host"));
    let place = place.replace("processs", "processes");
    let nics = match (report.launcher.zip(report.transport), report.emulated.as_deref()) {
        (Some((launcher, transport)), _) => format!("started by {launcher}, over {transport}"),
        (None, None) => "over loopback".to_string(),
        (None, Some(CLUSTER_RATES)) => "emulated with the cluster's NICs".to_string(),
        (None, Some(rate)) => format!("emulated with NICs of {rate}"),
    };
    let _ = writeln!(text, "  strategy {}, {place}, {nics}", report.strategy);
    let runs: Vec<String> = report.measured_s.iter().map(|s| Seconds(*s).to_string()).collect();
    let _ = writeln!(text, "measured     {}", runs.join(", "));
    let cluster = &prediction.plan.problem.cluster;
    let comparable = machine::comparable(cluster, report.emulated.is_some());
    let whose = machine::whose(&report.machine, cluster.measured.as_deref(), comparable);
    let _ = writeln!(text, "machine      {whose}");
    let _ = writeln!(text, "lower bound  {}", Seconds(report.lower_bound_s));
    let _ = writeln!(text, "predicted    {}", Seconds(report.predicted_s));
    if let Some(worst) = report.memory.iter().max_by_key(|m| (m.beyond(), std::cmp::Reverse(m.rank))) {
        let ExtraMemory { extra_bytes_measured, extra_bytes_proven, socket_bytes } = worst.extra;
        let _ = writeln!(
            text,
            "extra memory {} on {}, {} of it proven; its sockets may hold {} more",
            Bytes(extra_bytes_measured),
            worst.rank,
            Bytes(extra_bytes_proven),
            Bytes(socket_bytes),
        );
    }
    for wrong in &report.wrong {
        let _ = writeln!(text, "wrong        {wrong}");
    }
    let over = |ratio: Option<f64>, of: &str| ratio.map_or(String::new(), |r| format!(", {r:.3} × {of}"));
    let checked = if report.verified { "every element checked" } else { "the destination is wrong" };
    let _ = writeln!(
        text,
        "median       {}{}{}; {checked}",
        Seconds(report.median_s),
        over(report.over_bound, "the bound"),
        over(report.over_predicted, "predicted"),
    );
    text
}
