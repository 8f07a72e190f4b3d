//! `crossmesh train`: trains a model across meshes of ranks, as a config says.

mod summary;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use crossmesh_comm::protect::Protect;
use crossmesh_core::units::parse_seconds;
use crossmesh_train::checkpoint::Store;
use crossmesh_train::config::{Config, NonFinite};

use crate::Answer;
use crate::commands::checkpoint::find;
use crate::commands::run::{CLUSTER_RATES, protection};
use crate::files;
use crate::input::read_text;
use crate::joined;
use crate::memory::Memory;
use crate::output::{self, Format, Progress};
use crate::report;
use crate::runner::{Measured, RunFailed, RunOptions, Work, run_work};
use crate::task::Task;
use crate::training::board::{Board, Facts, Seen};
use crate::training::dry::{self, DryRun};
use crate::training::resume::{From, lies_in};
use crate::training::{Training, timeline};
use summary::{memory, render, summary};

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
    /// Go on from the newest checkpoint of the run, or from this one, or the newest of this folder
    #[arg(long, value_name = "DIR", num_args = 0..=1)]
    resume: Option<Option<PathBuf>>,
    /// Start a run of its own with the weights of this checkpoint, or of the newest of this folder
    #[arg(long, value_name = "DIR", conflicts_with = "resume")]
    from: Option<PathBuf>,
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

    /// The command that goes on with the run.
    fn to_go_on(&self) -> String {
        let quoted = |set: &String| match set.contains([' ', '"', '\'', '$', '*', '[']) {
            true => format!(" --set '{}'", set.replace('\'', "'\\''")),
            false => format!(" --set {set}"),
        };
        let config = self.config.as_deref().or(self.resume.as_ref().and_then(|r| r.as_deref()));
        let sets: String = self.sets.iter().map(quoted).collect();
        format!("crossmesh train {}{sets} --resume", config.unwrap_or(Path::new("CONFIG")).display())
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
            memory: Memory::Host,
            share_gpus: false,
        })
    }
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

fn train(args: &Args, config: Config, resume: &Resume) -> Result<Answer> {
    let options = args.options()?;
    let me = joined::rank_of_job(args.standalone)?;
    if me.is_some() && args.restarts > 0 {
        bail!(
            "this process is a rank of somebody else's job, and cannot start it again\nhint: let the launcher restart it (torchrun --max-restarts), and say --resume"
        );
    }
    let writes = me.is_none_or(|rank| rank.0 == 0);
    let folder = PathBuf::from(&config.log.folder);
    let html = args.html.clone().unwrap_or_else(|| folder.join("report.html"));
    if writes {
        for path in [&args.html, &args.svg].into_iter().flatten() {
            files::check_folder_of(path)?;
        }
    }
    let mut from = starting_point(args, resume, &config)?;
    if let Some(from) = from.as_ref().filter(|from| from.step >= config.train.steps) {
        bail!(
            "{} is at step {}, and train.steps is {}\nhint: ask for more steps: --set train.steps={}",
            from.folder.display(),
            from.step,
            config.train.steps,
            from.step + 100
        );
    }
    let first = Training::open(config, args.nic(), None, Arc::new(|_| {}))?;
    let changes = from.as_ref().map(|from| from.check(&first)).transpose()?.unwrap_or_default();
    let board = Arc::new(Board::new(facts(&first, me.is_some())));
    let metrics = folder.join("metrics.jsonl");
    let resumed_at = from.as_ref().map_or(0, |f| f.step);
    // Held until the run is over.
    let _lock = if writes { Some(files::lock_folder(&folder)?) } else { None };
    if writes {
        refuse_to_overwrite(from.as_ref(), &first.config, &metrics)?;
        files::write(&folder.join("config.toml"), &first.doc.config)?;
        board.open(&metrics, resumed_at)?;
        output::remark(&format!("{}\n{}", first.about(), first.data.describe()));
        if let Some(from) = &from {
            output::remark(&where_it_goes_on(from, &changes));
        }
    }
    let mut restarts = 0;
    let outcome = loop {
        let training = with_board(&first, from.as_ref(), &board, writes.then_some(&html));
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
    stopped(args, &first, &seen)?;
    let mut summary = summary(&first, &seen, resumed_at, restarts, (metrics, html));
    summary.memory = memory(&first, &measured)?;
    match args.format() {
        Format::Text => output::print(&render(&summary, &board.facts))?,
        Format::Json => output::print_json(&summary)?,
    }
    if summary.steps < first.config.train.steps {
        output::remark(&format!(
            "it was asked to end, and saved step {}\nto go on: {}",
            summary.steps,
            args.to_go_on()
        ));
    }
    Ok(if summary.loss.is_some() { Answer::Yes } else { Answer::No })
}

/// An error where the last step was not finite and the run stopped for it.
fn stopped(args: &Args, training: &Training, seen: &Seen) -> Result<()> {
    let Some(last) = seen.metrics.last() else { return Ok(()) };
    let (Some(what), NonFinite::Stop) = (&last.not_finite, training.config.train.nonfinite) else {
        return Ok(());
    };
    let saved = match store(&training.config).steps()?.last() {
        Some(step) => format!("the last checkpoint is of step {step}: {}", args.to_go_on()),
        None => "no checkpoint was saved before; checkpoint.every saves some".into(),
    };
    bail!(
        "step {} has a {what} (learning rate {:e}): training stopped, and the step changed nothing\nhint: take a lower optimizer.learning_rate or optimizer.clip, or leave such steps out: --set train.nonfinite=skip\nhint: {saved}",
        last.step,
        last.learning_rate
    )
}

/// What a run goes on from, for people.
fn where_it_goes_on(from: &From, changes: &[String]) -> String {
    let folder = from.folder.display();
    let what = match from.weights_only {
        true => format!("it starts with the weights of {folder}"),
        false => format!("it goes on behind step {} of {folder}, at sample {}", from.step, from.samples),
    };
    let lines = changes.iter().map(|change| format!("\n  {change}")).collect::<String>();
    what + &lines
}

fn store(config: &Config) -> Store {
    let keep = std::num::NonZeroUsize::new(config.saving.keep).unwrap_or(std::num::NonZeroUsize::MIN);
    Store::new(&config.saving.folder, keep)
}

/// The checkpoint that was asked for.
fn starting_point(args: &Args, resume: &Resume, config: &Config) -> Result<Option<From>> {
    let store = store(config);
    match (resume, &args.from) {
        (Some(Some(folder)), _) => From::open(&find(folder)?, false).map(Some),
        (Some(None), _) => match From::newest(&store)? {
            Some(from) => Ok(Some(from)),
            None => bail!(
                "there is no checkpoint to go on from in {}\nhint: leave --resume out, or name one: --resume DIR",
                store.folder().display()
            ),
        },
        (None, Some(folder)) => From::open(&find(folder)?, true).map(Some),
        (None, None) => Ok(None),
    }
}

/// A run never writes over another one: only who goes on from a run's own checkpoint writes into its folder.
fn refuse_to_overwrite(from: Option<&From>, config: &Config, metrics: &Path) -> Result<()> {
    let store = store(config);
    if from.is_some_and(|from| !from.weights_only && lies_in(&from.folder, store.folder())) {
        return Ok(());
    }
    let elsewhere = "take another folder: --set log.folder=runs/another";
    if let Some(step) = store.steps()?.last() {
        bail!(
            "{} has checkpoints of an earlier run, up to step {step}\nhint: --resume goes on from there; or {elsewhere}",
            store.folder().display()
        );
    }
    if std::fs::metadata(metrics).is_ok_and(|found| found.len() > 0) {
        bail!(
            "{} has an earlier run, which saved no checkpoint to --resume from\nhint: {elsewhere}; or delete it",
            config.log.folder
        );
    }
    Ok(())
}

/// Where to start again: from what this run saved, or from where it began.
fn restart_from(training: &Training, from: Option<From>, resumed_at: u64) -> Result<Option<From>> {
    let newer = From::newest(&store(&training.config))?.filter(|newer| newer.step >= resumed_at);
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
        operations: training.resolved.operations() * training.resolved.job.batch() as f64,
        operations_per_s: training.resolved.job.ranks().len() as f64 * training.config.operations_per_s(),
        every: training.config.log.every,
    }
}

/// A training whose steps the board hears of; now and then it writes the report, for whoever wants to look while it trains.
fn with_board(first: &Training, from: Option<&From>, board: &Arc<Board>, html: Option<&PathBuf>) -> Training {
    let (board, shown, html) = (Arc::clone(board), first.clone(), html.cloned());
    let on_step = move |note| {
        board.hear(note);
        let Some((path, seen)) = html.as_ref().and_then(|path| Some((path, board.seen_now_and_then()?)))
        else {
            return;
        };
        let page = timeline::report(&shown, &seen, board.facts.tokens.is_some());
        if let Err(error) = output::write_file(path, &report::train::render(&page, report::provenance())) {
            output::remark(&format!("warning: {error:#}"));
        }
    };
    let mut training = Training { on_step: Arc::new(on_step), ..first.clone() };
    training.doc.resume = from.map(|from| from.folder.clone());
    training.doc.weights_only = from.is_some_and(|from| from.weights_only);
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
