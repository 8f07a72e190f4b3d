//! `crossmesh bench train`: real steps on emulated hosts, in several orders; how much of the communication each hides. Inside stages: [`super::inside`].

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use crossmesh_core::units::{Rate, Seconds};
use serde::Serialize;

use crate::Answer;
use crate::commands::run::RunArgs;
use crate::input::read_text;
use crate::machine;
use crate::output::{self, Format, FormatArgs, Progress, Table};
use crate::training::overlap::{Bench, Ran, SERIES, Series, config_of, nic_for, predicted_s};

/// A rank may compute for a while before anything moves.
const DEADLINE: Duration = Duration::from_secs(120);
/// For finding out how long passes take: fast enough for bytes.
pub const FAST: &str = "10Gbit";

/// Training steps in several orders, on emulated hosts: how much of the communication between stages each hides. Needs root.
///
/// Everything is real: processes, bytes, NICs, and what the passes compute.
#[derive(Debug, clap::Args)]
#[command(after_help = "Without a config: a GPT of --stages stages, each on a host of its own with a
thread to compute.

Without --emulate, NICs get the rate at which a tensor takes --edge of a forward
pass to cross.

Examples:
  crossmesh bench train
  crossmesh bench train --stages 8 --edge 0.5
  # what hides the all-reduces inside a stage
  crossmesh bench train --all-reduce 0.5
  # how far off predictions of steps are
  crossmesh bench train --predicted
  crossmesh bench train my.toml --emulate 1Gbit \\
      --series no-overlap,minimal-window,signal")]
pub struct TrainArgs {
    /// A config of `crossmesh train`
    #[arg(value_name = "CONFIG")]
    config: Option<PathBuf>,
    /// Compare what hides the all-reduces inside a stage of ranks on two hosts: strands, a ladder. How long one takes, in shares of the compute beside it
    #[arg(long, value_name = "SHARE", conflicts_with_all = ["stages", "edge", "series"])]
    all_reduce: Option<f64>,
    /// Hold steps of twelve jobs against what is predicted of them: tensor parallelism, ZeRO, pipelines of both
    #[arg(long, conflicts_with_all = ["stages", "edge", "series", "all_reduce"])]
    predicted: bool,
    /// Override a value of the config; may be given several times
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// Stages, where there is no config
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(2..=64))]
    stages: u16,
    /// How long a tensor takes to cross, in forward passes
    #[arg(long, value_name = "SHARE", default_value_t = 0.75)]
    edge: f64,
    /// The series to compare [default: all]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    series: Vec<String>,
    /// Measured steps of every series
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub steps: u16,
    #[command(flatten)]
    pub run: RunArgs,
    #[command(flatten)]
    pub format: FormatArgs,
}

#[derive(Debug, Serialize)]
struct Results {
    schema: &'static str,
    about: String,
    /// The machine whose times these are.
    machine: String,
    nic_bytes_per_s: f64,
    /// Mean forward pass, from the series `signal`.
    forward_s: f64,
    series: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    series: &'static str,
    about: &'static str,
    schedule: String,
    steps_s: Vec<f64>,
    median_s: f64,
    predicted_s: f64,
    over_predicted: f64,
    /// The speed of the series `signal` is 1.
    of_signal: f64,
    /// How many times as fast as without overlap; missing where that was not run.
    over_no_overlap: Option<f64>,
    exposed: f64,
}

impl TrainArgs {
    /// The name and the text of the config that was given, or else of this one.
    pub fn config_or(&self, usual: impl FnOnce() -> String) -> Result<(String, String)> {
        Ok(match &self.config {
            Some(path) => (path.display().to_string(), read_text(path)?),
            None => ("bench-train.toml".to_string(), usual()),
        })
    }
}

pub fn run(args: &TrainArgs) -> Result<Answer> {
    let mut options = args.run.options(1, None)?;
    options.emulate = true;
    options.repeat = 1;
    options.deadline = options.deadline.or(Some(DEADLINE));
    if args.predicted {
        return super::predicted::run(args, &options);
    }
    if let Some(share) = args.all_reduce {
        return super::inside::run(args, share, &options);
    }
    if !(args.edge.is_finite() && args.edge > 0.0) {
        bail!("--edge {}: a tensor takes some time to cross\nhint: 0.5 is half a forward pass", args.edge);
    }
    let series = chosen(&args.series)?;
    let (name, text) = args.config_or(|| config_of(usize::from(args.stages)))?;
    let (sets, steps) = (&args.sets[..], usize::from(args.steps));
    let bench = Bench { name: &name, text: &text, sets, steps, options: &options };
    let progress = Progress::new();
    let signal = SERIES[SERIES.len() - 1];
    let first = Bench { steps: 2, ..bench }.run(signal, FAST, &progress)?;
    let nic = match args.run.nic() {
        Some(rate) => rate.to_string(),
        None => nic_for(args.edge, &bench, &first.times())?,
    };
    let mut ran = vec![];
    for series in series {
        ran.push((series, bench.run(series, &nic, &progress)?));
    }
    let results = results(&ran)?;
    match args.format.get() {
        Format::Text => output::print(&render(&results))?,
        Format::Json => output::print_json(&results)?,
    }
    Ok(Answer::Yes)
}

/// The series that were asked for; `signal` always, since all are compared with it.
fn chosen(names: &[String]) -> Result<Vec<Series>> {
    if let Some(unknown) = names.iter().find(|n| !SERIES.iter().any(|s| s.name == n.as_str())) {
        let known: Vec<&str> = SERIES.iter().map(|s| s.name).collect();
        bail!("unknown series `{unknown}`\nhint: series are {}", known.join(", "));
    }
    let wanted = |s: &Series| names.is_empty() || s.name == "signal" || names.iter().any(|n| n == s.name);
    Ok(SERIES.into_iter().filter(wanted).collect())
}

fn results(ran: &[(Series, Ran)]) -> Result<Results> {
    let (_, signal) = ran.last().context("no series was run")?;
    let times = signal.times();
    let blocking = ran.iter().find(|(s, _)| s.name == "no-overlap").map(|(_, ran)| ran.median_s());
    let row = |(series, ran): &(Series, Ran)| -> Result<Row> {
        let (median_s, predicted_s) = (ran.median_s(), predicted_s(ran, &times)?);
        Ok(Row {
            series: series.name,
            about: series.about,
            schedule: ran.training.resolved.job.schedule.name().to_string(),
            steps_s: ran.steps.clone(),
            median_s,
            predicted_s,
            over_predicted: median_s / predicted_s,
            of_signal: signal.median_s() / median_s,
            over_no_overlap: blocking.map(|blocking| blocking / median_s),
            exposed: ran.exposed(),
        })
    };
    Ok(Results {
        schema: "crossmesh.bench-train/1",
        about: signal.training.about(),
        machine: machine::machine(),
        nic_bytes_per_s: signal.training.resolved.job.cluster.hosts[0].out_bytes_per_s(),
        forward_s: times.iter().map(|t| t.f_ns as f64 * 1e-9).sum::<f64>() / times.len().max(1) as f64,
        series: ran.iter().map(row).collect::<Result<_>>()?,
    })
}

fn render(results: &Results) -> String {
    let mut text = String::new();
    let (nic, forward) = (Rate(results.nic_bytes_per_s), Seconds(results.forward_s));
    let _ = writeln!(
        text,
        "{}\n{}\nNICs of {nic}, emulated; a forward pass takes {forward}\n",
        results.about,
        machine::whose(&results.machine, None, true)
    );
    let mut table = Table::new("lrrrrrl");
    table.row(["series", "step", "predicted", "of signal", "× no overlap", "exposed", ""]);
    for row in &results.series {
        table.row([
            row.series.to_string(),
            Seconds(row.median_s).to_string(),
            Seconds(row.predicted_s).to_string(),
            format!("{:.1} %", 100.0 * row.of_signal),
            row.over_no_overlap.map_or("–".into(), |ratio| format!("{ratio:.2}")),
            format!("{:.0} %", 100.0 * row.exposed),
            row.about.to_string(),
        ]);
    }
    text + &table.render(0)
}
