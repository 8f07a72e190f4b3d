//! `crossmesh train`: trains a model across meshes of ranks, as a config says.

mod summary;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use crossmesh_checkpoint::Format as Kind;
use crossmesh_comm::protect::Protect;
use crossmesh_core::printable::printable;
use crossmesh_core::units::parse_seconds;
use crossmesh_train::checkpoint::{MANIFEST, Store};
use crossmesh_train::config::{Config, NonFinite};

use crate::Answer;
use crate::commands::checkpoint::find_any;
use crate::commands::run::{CLUSTER_RATES, protection};
use crate::files;
use crate::input::read_text;
use crate::joined;
use crate::memory::Memory;
use crate::output::{self, Format, FormatArgs, Progress};
use crate::picture;
use crate::report;
use crate::runner::{Measured, RunFailed, RunOptions, Work, run_work};
use crate::task::Task;
use crate::training::board::{Board, Facts, Seen};
use crate::training::device::{self, Gpus};
use crate::training::dry::{self, DryRun};
use crate::training::resume::{From, lies_in};
use crate::training::{Training, timeline};
use summary::{memory, render, summary};

/// A rank may compute for a while before anything moves. One that dies is noticed at once, by other means.
const DEADLINE: Duration = Duration::from_secs(120);

/// Train a model across meshes of ranks, as a config says.
#[derive(Debug, clap::Args)]
#[command(after_help = "Keys of a config are in docs/train-config.md. A run writes metrics.jsonl (a line
a step), report.html, config.toml and checkpoints into its folder, runs/NAME
unless the config says otherwise.

Started as a rank by `crossmesh launch`, torchrun, srun or mpirun, it takes that
rank's part instead of starting processes.

Examples:
  crossmesh train examples/gpt-mini.toml
  crossmesh train examples/gpt-mini.toml --dry-run \\
      --set stage.1.mesh='dp 2, tp 2'
  crossmesh train my.toml --set checkpoint.every=100 --restarts 3
  crossmesh train my.toml --resume --set train.steps=2000
  torchrun --nproc-per-node 4 --no-python crossmesh train examples/gpt-mini.toml")]
pub struct Args {
    /// The config (TOML)
    #[arg(value_name = "CONFIG", required_unless_present = "resume")]
    config: Option<PathBuf>,
    /// Override a value of the config, such as `train.steps=10` or `stage.0.mesh=dp 2`; may be given several times
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Continue from the newest checkpoint of the run, or from this one, or the newest of this folder; of any format that says where the
    /// run was, as `checkpoint convert` from ours leaves it
    #[arg(long, value_name = "DIR", num_args = 0..=1)]
    resume: Option<Option<PathBuf>>,
    /// Start a run of its own with the weights of this checkpoint, or of the newest of this folder: ours, Hugging Face's, torch DCP's or
    /// Megatron's
    #[arg(long, value_name = "PATH", conflicts_with = "resume")]
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
    /// What ranks compute with: `cpu`, `cuda` (a GPU each) or `auto`; the same as --set train.device=...
    #[arg(long, value_name = "DEVICE", help_heading = "Running")]
    device: Option<String>,
    /// On a GPU, take the same algorithms in every run, so that the same bits come out; the same as --set train.deterministic=true
    #[arg(long, help_heading = "Running")]
    deterministic: bool,
    /// Ranks may share GPUs
    #[arg(long, help_heading = "Running")]
    share_gpus: bool,
    /// Start the processes here, even where torchrun, Slurm or mpirun started this one as a rank of a job
    #[arg(long, help_heading = "Running")]
    standalone: bool,
    /// What to do to frames between hosts: `none` (checksums), `sign` (nobody can change them) or `encrypt` (nor read them); the
    /// same on all ranks [default: what CROSSMESH_PROTECT says, or none]
    #[arg(long, value_name = "WAY", help_heading = "Running")]
    protect: Option<Protect>,
    #[command(flatten)]
    format: FormatArgs,
    /// Write the report here [default: report.html in the run's folder]
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    html: Option<PathBuf>,
    /// Also write the loss as a figure for a paper: an SVG, 85 mm wide, or a PDF where its name ends so
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    svg: Option<PathBuf>,
}

/// What to go on from: nothing, the newest checkpoint, or this one.
type Resume = Option<Option<PathBuf>>;

impl Args {
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
        let config = self.config.as_deref().or(self.resume.as_ref().and_then(|r| r.as_deref()));
        let config = quoted(&config.unwrap_or(Path::new("CONFIG")).display().to_string());
        let sets: String = self.all_sets().iter().map(|set| format!(" --set {}", quoted(set))).collect();
        format!("crossmesh train {config}{sets} --resume")
    }

    /// What is put over the config's values, by whatever flag.
    fn all_sets(&self) -> Vec<String> {
        let device = self.device.iter().map(|device| format!("train.device={device}"));
        let same = self.deterministic.then(|| "train.deterministic=true".into());
        self.sets.iter().cloned().chain(device).chain(same).collect()
    }

    fn nic(&self) -> Option<&str> {
        self.emulate.as_deref().filter(|rate| *rate != CLUSTER_RATES)
    }

    fn options(&self, memory: Memory) -> Result<RunOptions> {
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
            memory,
            share_gpus: self.share_gpus,
        })
    }
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_./=:,+@%".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.into(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

pub fn run(args: &Args) -> Result<Answer> {
    let (path, resume) = args.asked()?;
    let text = read_text(&path)?;
    let config = Config::read(&path.display().to_string(), &text, &args.all_sets())?;
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
    match args.format.get() {
        Format::Text => output::print(&dry::render(&dry))?,
        Format::Json => output::print_json(&dry)?,
    }
    Ok(Answer::Yes)
}

fn train(args: &Args, config: Config, resume: &Resume) -> Result<Answer> {
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
        args.svg.as_deref().map_or(Ok(()), picture::check)?;
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
    let gpus = device::choose(&first, me.is_some(), args.share_gpus)?;
    let options = args.options(if gpus.is_some() { Memory::Cuda } else { Memory::Host })?;
    let changes = from.as_ref().map(|from| from.check(&first)).transpose()?.unwrap_or_default();
    let board = Arc::new(Board::new(facts(&first, me.is_some(), gpus.as_ref())));
    let metrics = folder.join("metrics.jsonl");
    let resumed_at = from.as_ref().map_or(0, |f| f.step);
    // Held until the run is over.
    let _locks = if writes { lock_folders(&first.config)? } else { vec![] };
    if writes {
        refuse_to_overwrite(from.as_ref(), &first.config, &metrics)?;
        files::write(&folder.join("config.toml"), &first.doc.config)?;
        board.open(&metrics, resumed_at)?;
        output::remark(&format!("{}\n{}", first.about(), first.data.describe()));
        gpus.iter().for_each(|gpus| output::remark(&gpus.to_string()));
        if let Some(from) = &from {
            output::remark(&where_it_goes_on(from, &changes));
        }
    }
    let at_start = if args.restarts > 0 { newest_of(&store(&first.config))? } else { None };
    let mut restarts = 0;
    let outcome = loop {
        let training = with_board(&first, from.as_ref(), &board, writes.then_some(&html));
        match run_once(&training, &options) {
            Ok(measured) => break Ok(measured),
            Err(error) if restarts < args.restarts && can_restart(&error) => {
                restarts += 1;
                let reached = board.steps();
                from = restart_from(&training, from, &at_start)?;
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
    let told = board.close().and_then(|seen| {
        if writes && !seen.metrics.is_empty() {
            let page = timeline::report(&first, &seen, board.facts.tokens.is_some());
            output::write_file(&html, report::train::render(&page, report::provenance()))?;
            if let Some(path) = &args.svg {
                picture::write(path, &report::train::figure(&page))?;
            }
        }
        Ok(seen)
    });
    let measured = outcome.inspect_err(|_| {
        // Why the run failed matters more.
        if let Err(error) = &told {
            output::remark(&format!("warning: {error:#}"));
        }
    })?;
    let seen = told?;
    if !writes {
        return Ok(Answer::Yes);
    }
    stopped(args, &first, &seen)?;
    let mut summary = summary(&first, &seen, resumed_at, restarts, (metrics, html));
    summary.memory = memory(&first, &measured)?;
    match args.format.get() {
        Format::Text => output::print(&printable(&render(&summary, &board.facts)))?,
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
    let folder = match from.format {
        Kind::Crossmesh => from.folder.display().to_string(),
        other => format!("{} ({other})", from.folder.display()),
    };
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
        (Some(Some(folder)), _) => From::open(&find_any(folder)?, false).map(Some),
        (Some(None), _) => match From::newest(&store)? {
            Some(from) => Ok(Some(from)),
            None => bail!(
                "there is no checkpoint to go on from in {}\nhint: leave --resume out, or name one: --resume DIR",
                store.folder().display()
            ),
        },
        (None, Some(folder)) => From::open(&find_any(folder)?, true).map(Some),
        (None, None) => Ok(None),
    }
}

/// Takes the run's folder, and that of its checkpoints, which may be elsewhere: two runs that save into one would mix what they write.
fn lock_folders(config: &Config) -> Result<Vec<File>> {
    let (log, saving) = (Path::new(&config.log.folder), &config.saving);
    let mut locks = vec![files::lock_folder(log, "log.folder=runs/another")?];
    let (store, saves) = (Path::new(&saving.folder), saving.every > 0 || saving.last);
    let real = |folder: &Path| folder.canonicalize().ok();
    if saves && (real(store).is_none() || real(store) != real(log)) {
        locks.push(files::lock_folder(store, "checkpoint.folder=runs/another/checkpoints")?);
    }
    Ok(locks)
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

/// What tells the newest checkpoint from others: where it is, and its manifest, which has the hash of every number.
fn newest_of(store: &Store) -> Result<Option<(PathBuf, Vec<u8>)>> {
    let Some(path) = store.latest()? else { return Ok(None) };
    let manifest = files::read(&path.join(MANIFEST))?;
    Ok(Some((path, manifest)))
}

/// Where to start again: from what this run saved, or, where that is nothing yet, from where it began. It may have gone back behind checkpoints that
/// are still there.
fn restart_from(
    training: &Training,
    from: Option<From>,
    at_start: &Option<(PathBuf, Vec<u8>)>,
) -> Result<Option<From>> {
    let store = store(&training.config);
    if newest_of(&store)? == *at_start {
        return Ok(from);
    }
    Ok(From::newest(&store)?.or(from))
}

/// A failed run may be started again; one that somebody stopped may not, nor one that never could run.
fn can_restart(error: &anyhow::Error) -> bool {
    error.downcast_ref::<RunFailed>().is_some_and(RunFailed::is_by_accident)
}

fn facts(training: &Training, joined: bool, gpus: Option<&Gpus>) -> Facts {
    let ranks = training.resolved.job.ranks();
    let of_host = ranks.len() as f64 * training.config.operations_per_s();
    let of_gpus = gpus.and_then(|gpus| gpus.operations_per_s(ranks.len()));
    Facts {
        // Of a job that somebody else started, every rank hears only itself while it runs.
        ranks: if joined { ranks[..1].to_vec() } else { ranks },
        steps: training.config.train.steps,
        batch: training.resolved.job.batch(),
        tokens: training.tokens(),
        operations: training.resolved.operations() * training.resolved.job.batch() as f64,
        operations_per_s: of_gpus.unwrap_or(of_host),
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
        if let Err(error) = output::write_file(path, report::train::render(&page, report::provenance())) {
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

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn a_command_to_go_on_can_be_pasted_into_a_shell() {
        for word in
            ["runs/a b/c.toml", "a;b", "x$(y)", "it's", "", "a\nb", "~", "größe", "a=\"b\"", "train.steps=10"]
        {
            let script = format!("printf %s {}", quoted(word));
            let said = std::process::Command::new("sh").args(["-c", &script]).output().unwrap().stdout;
            assert_eq!(String::from_utf8(said).unwrap(), word);
        }
        assert_eq!(quoted("train.steps=10"), "train.steps=10");
    }
}
