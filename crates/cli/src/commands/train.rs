//! `crossmesh train`: trains a model across meshes of ranks, as a config says.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use crossmesh_comm::protect::Protect;
use crossmesh_core::id::Rank;
use crossmesh_core::units::{Bytes, Seconds, parse_seconds};
use crossmesh_train::checkpoint::{Checkpoint, Store};
use crossmesh_train::config::Config;
use serde::Serialize;

use crate::Answer;
use crate::commands::run::{CLUSTER_RATES, protection};
use crate::files;
use crate::input::read_text;
use crate::joined;
use crate::output::{self, Format, Progress};
use crate::report;
use crate::runner::{Measured, RunFailed, RunOptions, Work, run_work};
use crate::task::Task;
use crate::training::board::{Board, Facts, Seen, loss_text, speed_text};
use crate::training::dry::{self, DryRun};
use crate::training::steps::StepSpread;
use crate::training::{Training, timeline};

/// A rank may compute for a while before anything moves. One that dies is noticed at once, by other means.
const DEADLINE: Duration = Duration::from_secs(120);

/// Train a model across meshes of ranks, as a config says.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Keys of a config are in docs/train-config.md. A run writes metrics.jsonl (a line a step), report.html, config.toml and
checkpoints into its folder, runs/NAME unless the config says otherwise.

Started as a rank by `crossmesh launch`, torchrun, srun or mpirun, it takes that rank's part instead of starting processes.

Examples:
  crossmesh train examples/gpt-mini.toml
  crossmesh train examples/gpt-mini.toml --dry-run --set stage.1.mesh='dp 2, tp 2'
  crossmesh train my.toml --set checkpoint.every=100 --restarts 3
  crossmesh train my.toml --resume --set train.steps=2000
  torchrun --nproc-per-node 4 --no-python crossmesh train examples/gpt-mini.toml"
)]
pub struct Args {
    /// The config (TOML)
    #[arg(value_name = "CONFIG", required_unless_present = "resume")]
    config: Option<PathBuf>,
    /// Put a value over the config's, such as `train.steps=10` or `stage.0.mesh=dp 2`; may be given several times
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Go on from the newest checkpoint of the run, or from this one
    #[arg(long, value_name = "DIR", num_args = 0..=1)]
    resume: Option<Option<PathBuf>>,
    /// When a rank dies, start again from the newest checkpoint, up to so often
    #[arg(long, value_name = "N", default_value_t = 0)]
    restarts: u32,
    /// Print what would run, the memory of every rank and the predicted time of a step, and stop
    #[arg(long, help_heading = "Looking")]
    dry_run: bool,
    /// Print the config with all that follows from it, and stop
    #[arg(long, help_heading = "Looking", conflicts_with = "dry_run")]
    print_config: bool,
    /// Put every host into a network namespace with a NIC of this rate, or `cluster` for the config's; needs root
    #[arg(long, value_name = "RATE", allow_hyphen_values = true, help_heading = "Running")]
    emulate: Option<String>,
    /// How long the processes may take to meet
    #[arg(long, value_name = "TIME", default_value = "30s", help_heading = "Running")]
    arrive: String,
    /// How long nothing may move before the run is given up [default: 120s]
    #[arg(long, value_name = "TIME", help_heading = "Running")]
    deadline: Option<String>,
    /// Start the processes here, even where torchrun, Slurm or mpirun started this one as a rank of a job
    #[arg(long, help_heading = "Running")]
    standalone: bool,
    /// What to do to frames between hosts: `none` (checksums), `sign` (nobody can change them) or `encrypt` (nor read them); the
    /// same on all ranks [default: what CROSSMESH_PROTECT says, or none]
    #[arg(long, value_name = "WAY", help_heading = "Running")]
    protect: Option<Protect>,
    /// Text for people, or one JSON document
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,
    /// The same as --format json
    #[arg(long, help_heading = "Output")]
    json: bool,
    /// Write the report here [default: report.html in the run's folder]
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    html: Option<PathBuf>,
    /// Also write the loss as a figure for a paper: an SVG, 85 mm wide
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    svg: Option<PathBuf>,
}

/// What to go on from: nothing, the newest checkpoint, or this one.
type Resume = Option<Option<PathBuf>>;

impl Args {
    fn format(&self) -> Format {
        if self.json { Format::Json } else { self.format }
    }

    /// The config, and what to go on from. What stands behind `--resume` may be either: a config is a file, a checkpoint a folder.
    fn asked(&self) -> Result<(PathBuf, Resume)> {
        match (&self.config, &self.resume) {
            (Some(config), Some(Some(other))) if config.is_dir() && other.is_file() => {
                Ok((other.clone(), Some(Some(config.clone()))))
            }
            (Some(config), resume) => Ok((config.clone(), resume.clone())),
            (None, Some(Some(config))) if !config.is_dir() => Ok((config.clone(), Some(None))),
            (None, Some(Some(folder))) => {
                let folder = folder.display();
                bail!(
                    "a config is missing: {folder} says where to go on, not what to train\nhint: crossmesh train CONFIG --resume {folder}"
                )
            }
            (None, _) => bail!("a config is missing\nhint: crossmesh train CONFIG --resume"),
        }
    }

    fn nic(&self) -> Option<&str> {
        self.emulate.as_deref().filter(|rate| *rate != CLUSTER_RATES)
    }

    fn options(&self) -> Result<RunOptions> {
        let time = |text: &str, flag| {
            let seconds = parse_seconds(text).context(flag)?;
            let time = Duration::try_from_secs_f64(seconds).ok().filter(|d| !d.is_zero());
            time.with_context(|| format!("{flag}: `{text}` is no time to wait"))
        };
        let deadline = self.deadline.as_deref().map(|text| time(text, "--deadline")).transpose()?;
        Ok(RunOptions {
            emulate: self.emulate.is_some(),
            repeat: 1,
            deadline: Some(deadline.unwrap_or(DEADLINE)),
            arrive: time(&self.arrive, "--arrive")?,
            flight: None,
            trace: false,
            standalone: self.standalone,
            protect: protection(self.protect)?,
            spare_ranks: false,
        })
    }
}

/// What came of it, as JSON.
#[derive(Debug, Serialize)]
struct Summary {
    schema: &'static str,
    name: String,
    ranks: usize,
    /// Done, in this run and those it went on from.
    steps: u64,
    /// From which step this run went on.
    resumed_at: u64,
    restarts: u32,
    first_loss: Option<f64>,
    last_loss: Option<f64>,
    /// The mean of the last ten.
    loss: Option<f64>,
    reachable_loss: Option<f64>,
    seconds: f64,
    /// The mean.
    step_s: f64,
    steps_s: Option<StepSpread>,
    samples_per_s: f64,
    tokens_per_s: Option<f64>,
    compute: f64,
    exposed_comm: f64,
    bubble: f64,
    optimizer: f64,
    /// Of every rank whose process the system tells about.
    memory: Vec<Memory>,
    metrics: PathBuf,
    report: PathBuf,
}

/// The most memory of a rank's process, and the weights, gradients, moments, activations and crossings it was predicted to hold.
#[derive(Debug, Serialize)]
struct Memory {
    rank: u32,
    peak_rss_bytes: u64,
    predicted_bytes: u64,
}

pub fn run(args: &Args) -> Result<Answer> {
    let (path, resume) = args.asked()?;
    let text = read_text(&path)?;
    let config = Config::read(&path.display().to_string(), &text, &args.sets)?;
    if args.print_config || args.dry_run {
        let training = Training::open(config, args.nic(), None, Arc::new(|_| {}))?;
        return look(args, &training);
    }
    train(args, config, &resume)
}

fn look(args: &Args, training: &Training) -> Result<Answer> {
    if args.print_config {
        output::print(&training.doc.config)?;
        return Ok(Answer::Yes);
    }
    let dry = DryRun::of(training)?;
    match args.format() {
        Format::Text => output::print(&dry::render(&dry))?,
        Format::Json => output::print_json(&dry)?,
    }
    Ok(Answer::Yes)
}

/// A checkpoint to go on from.
struct From {
    folder: PathBuf,
    step: u64,
}

impl From {
    fn open(checkpoint: &Checkpoint) -> Self {
        // An imported model has weights and no past.
        let step = checkpoint.facts().optimizer.as_ref().map_or(0, |_| checkpoint.facts().step);
        Self { folder: checkpoint.folder().to_path_buf(), step }
    }
}

fn train(args: &Args, config: Config, resume: &Resume) -> Result<Answer> {
    let options = args.options()?;
    let me = joined::rank_of_job(args.standalone)?;
    if me.is_some() && args.restarts > 0 {
        bail!(
            "this process is a rank of somebody else's job, and cannot start it again\nhint: let the launcher restart it (torchrun --max-restarts), and say --resume"
        );
    }
    let folder = PathBuf::from(&config.log.folder);
    let mut from = starting_point(resume, &config)?;
    if let Some(from) = from.as_ref().filter(|from| from.step >= config.train.steps) {
        bail!(
            "{} is at step {}, and train.steps is {}\nhint: ask for more steps: --set train.steps={}",
            from.folder.display(),
            from.step,
            config.train.steps,
            from.step + 100
        );
    }
    let first =
        Training::open(config, args.nic(), from.as_ref().map(|f| f.folder.clone()), Arc::new(|_| {}))?;
    let board = Arc::new(Board::new(facts(&first, me.is_some())));
    let writes = me.is_none_or(|rank| rank.0 == 0);
    let metrics = folder.join("metrics.jsonl");
    let resumed_at = from.as_ref().map_or(0, |f| f.step);
    // Held until the run is over.
    let _lock = if writes { Some(files::lock_folder(&folder)?) } else { None };
    if writes {
        files::write(&folder.join("config.toml"), &first.doc.config)?;
        board.open(&metrics, resumed_at)?;
        output::remark(&format!("{}\n{}", first.about(), first.data.describe()));
    }
    let mut restarts = 0;
    let outcome = loop {
        let training = with_board(&first, from.as_ref().map(|f| f.folder.clone()), &board);
        match run_once(&training, &options) {
            Ok(measured) => break Ok(measured),
            Err(error) if restarts < args.restarts && can_restart(&error) => {
                restarts += 1;
                let reached = board.steps();
                from = restart_from(&training, from, resumed_at)?;
                let step = from.as_ref().map_or(0, |f| f.step);
                board.open(&metrics, step)?;
                output::remark(&format!(
                    "{error:#}\nit was at step {reached}; starting again from step {step}, restart {restarts} of {}",
                    args.restarts
                ));
            }
            Err(error) => break Err(error),
        }
    };
    let seen = board.close()?;
    let html = args.html.clone().unwrap_or_else(|| folder.join("report.html"));
    if writes && !seen.metrics.is_empty() {
        let page = timeline::report(&first, &seen, board.facts.tokens.is_some());
        output::write_file(&html, &report::train::render(&page, report::provenance()))?;
        if let Some(path) = &args.svg {
            output::write_file(path, &report::train::figure(&page))?;
        }
    }
    let measured = outcome?;
    if !writes {
        return Ok(Answer::Yes);
    }
    let mut summary = summary(&first, &seen, resumed_at, restarts, (metrics, html));
    summary.memory = memory(&first, &measured)?;
    match args.format() {
        Format::Text => output::print(&render(&summary, &board.facts))?,
        Format::Json => output::print_json(&summary)?,
    }
    Ok(if summary.last_loss.is_some() { Answer::Yes } else { Answer::No })
}

fn store(config: &Config) -> Store {
    let keep = std::num::NonZeroUsize::new(config.saving.keep).unwrap_or(std::num::NonZeroUsize::MIN);
    Store::new(&config.saving.folder, keep)
}

/// The checkpoint that was asked for. A new run does not mix its checkpoints with an old one's.
fn starting_point(resume: &Resume, config: &Config) -> Result<Option<From>> {
    let store = store(config);
    match resume {
        Some(Some(folder)) => Ok(Some(From::open(&Checkpoint::open(folder)?))),
        Some(None) => match newest(&store)? {
            Some(from) => Ok(Some(from)),
            None => bail!(
                "there is no checkpoint to go on from in {}\nhint: leave --resume out, or name one: --resume DIR",
                store.folder().display()
            ),
        },
        None => match store.steps()?.last() {
            None => Ok(None),
            Some(step) => bail!(
                "{} has checkpoints of an earlier run, up to step {step}\nhint: --resume goes on from there; or delete them, or take another folder: --set log.folder=runs/another",
                store.folder().display()
            ),
        },
    }
}

/// The newest checkpoint that is whole; what is wrong with newer ones is said.
fn newest(store: &Store) -> Result<Option<From>> {
    let (found, faults) = store.latest_loadable()?;
    for fault in faults {
        output::remark(&format!("{} is passed over: {}", fault.path.display(), fault.error));
    }
    Ok(found.as_ref().map(From::open))
}

/// Where to start again: from what this run saved, or from where it began.
fn restart_from(training: &Training, from: Option<From>, resumed_at: u64) -> Result<Option<From>> {
    let newer = newest(&store(&training.config))?.filter(|newer| newer.step >= resumed_at);
    Ok(newer.or(from))
}

/// A failed run may be started again; one that somebody stopped may not, nor one that never could run.
fn can_restart(error: &anyhow::Error) -> bool {
    error.downcast_ref::<RunFailed>().is_some_and(RunFailed::is_by_accident)
}

fn facts(training: &Training, joined: bool) -> Facts {
    let ranks = training.resolved.job.ranks();
    Facts {
        // Of a job that somebody else started, every rank hears only itself while it runs.
        ranks: if joined { ranks[..1].to_vec() } else { ranks },
        steps: training.config.train.steps,
        batch: training.resolved.job.batch(),
        tokens: training.tokens(),
        every: training.config.log.every,
    }
}

fn with_board(first: &Training, resume: Option<PathBuf>, board: &Arc<Board>) -> Training {
    let board = Arc::clone(board);
    let mut training = Training { on_step: Arc::new(move |note| board.hear(note)), ..first.clone() };
    training.doc.resume = resume;
    training
}

fn run_once(training: &Training, options: &RunOptions) -> Result<Measured> {
    let work = Work {
        task: &Task::of_training(training),
        document: training.document(),
        cluster: &training.resolved.job.cluster,
        topology: &training.topology,
        predicted_s: 0.0,
    };
    run_work(&work, options, &Progress::new())
}

/// What every rank had, beside what it was predicted to hold.
fn memory(training: &Training, measured: &Measured) -> Result<Vec<Memory>> {
    let of = |(rank, peak): &(Rank, u64)| -> Result<Memory> {
        let predicted_bytes = dry::memory(training, *rank)?.sum();
        Ok(Memory { rank: rank.0, peak_rss_bytes: *peak, predicted_bytes })
    };
    measured.peak_rss.iter().map(of).collect()
}

fn summary(
    training: &Training,
    seen: &Seen,
    resumed_at: u64,
    restarts: u32,
    (metrics, report): (PathBuf, PathBuf),
) -> Summary {
    let own: Vec<_> = seen.metrics.iter().filter(|m| m.step > resumed_at).collect();
    let mean = |of: &dyn Fn(&crate::training::metrics::StepMetrics) -> f64| {
        own.iter().map(|m| of(m)).sum::<f64>() / own.len().max(1) as f64
    };
    let step_s = mean(&|m| m.step_s);
    let share = |seconds: f64| if step_s > 0.0 { seconds / step_s } else { 0.0 };
    let tail: Vec<f64> = own.iter().rev().take(10).filter_map(|m| m.loss).collect();
    Summary {
        schema: "crossmesh.train-summary/1",
        name: training.doc.name.clone(),
        ranks: training.resolved.job.ranks().len(),
        steps: own.last().map_or(resumed_at, |m| m.step),
        resumed_at,
        restarts,
        first_loss: own.first().and_then(|m| m.loss),
        last_loss: own.last().and_then(|m| m.loss),
        loss: (!tail.is_empty()).then(|| tail.iter().sum::<f64>() / tail.len() as f64),
        reachable_loss: training.data.reachable_loss(),
        seconds: own.iter().map(|m| m.step_s).sum(),
        step_s,
        steps_s: StepSpread::of(own.iter().copied()),
        samples_per_s: mean(&|m| m.samples_per_s),
        tokens_per_s: training.tokens().map(|_| mean(&|m| m.speed())),
        compute: share(mean(&|m| m.compute_s)),
        exposed_comm: share(mean(&|m| m.exposed_comm_s)),
        bubble: share(mean(&|m| m.bubble_s)),
        optimizer: share(mean(&|m| m.optimizer_s)),
        memory: vec![],
        metrics,
        report,
    }
}

fn render(summary: &Summary, facts: &Facts) -> String {
    let percent = |share: f64| format!("{:.0} %", 100.0 * share);
    let reachable = match (summary.loss, summary.reachable_loss) {
        (Some(loss), Some(best)) if best > 0.0 => {
            format!("; the best possible is {best:.4}, {:.1} % below", 100.0 * (1.0 - best / loss))
        }
        _ => String::new(),
    };
    let mean = || Seconds(summary.step_s).to_string();
    let steps = summary.steps_s.as_ref().map_or_else(mean, StepSpread::text);
    let outliers = summary.steps_s.as_ref().and_then(StepSpread::outliers);
    let outliers = outliers.map_or_else(String::new, |text| format!("held up    {text}\n"));
    format!(
        "loss       {} → {}{reachable}\n\
         step       {steps}; {}\n\
         {outliers}\
         time       compute {}, exposed communication {}, bubble {}, optimizer {}\n\
         memory     {}\n\
         report     {}\n\
         trained {} to step {} in {}\n",
        loss_text(summary.first_loss),
        loss_text(summary.loss),
        speed_text(facts, summary.tokens_per_s.unwrap_or(summary.samples_per_s)),
        percent(summary.compute),
        percent(summary.exposed_comm),
        percent(summary.bubble),
        percent(summary.optimizer),
        memory_text(&summary.memory),
        shown(&summary.report),
        summary.name,
        summary.steps,
        Seconds(summary.seconds),
    )
}

/// The rank that had the most beyond what was predicted.
fn memory_text(memory: &[Memory]) -> String {
    let beyond = |m: &Memory| m.peak_rss_bytes.saturating_sub(m.predicted_bytes);
    match memory.iter().max_by_key(|m| beyond(m)) {
        Some(most) => format!(
            "{} of r{}'s process, {} beyond what was predicted to be held",
            Bytes(most.peak_rss_bytes),
            most.rank,
            Bytes(beyond(most))
        ),
        None => "the system does not tell".into(),
    }
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}
