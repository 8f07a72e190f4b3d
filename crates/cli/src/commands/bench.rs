//! `crossmesh bench`: a suite of cases and strategies, seconds and the distance to the bound; predicted, or measured.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use crossmesh_core::reshard::{Bound, PlanOptions, Problem, Strategy, lower_bound, plan};
use crossmesh_core::units::{Bytes, Seconds, parse_bytes};
use serde::Serialize;

use crate::Answer;
use crate::commands::run::RunArgs;
use crate::known::{Known, suites};
use crate::machine::machine;
use crate::output::{self, Format, FormatArgs, Progress, Table, count};
use crate::predict::Prediction;
use crate::report;
use crate::runner::RunOptions;
use crate::suite::{Case, Fit, Reference, Suite};

mod calibrate;
pub mod collective;
mod inside;
mod kernels;
mod measured;
pub mod pipeline;
mod predicted;
mod train;

/// Measure or predict reshards, collectives and training steps, and calibrate this machine.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  crossmesh bench reshard --predict
  crossmesh bench reshard --emulate 400Mbit
  crossmesh bench collective -n 4
  crossmesh bench pipeline --predict
  crossmesh bench calibrate -o here.toml")]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    Reshard(ReshardArgs),
    Collective(collective::CollectiveArgs),
    Pipeline(pipeline::PipelineArgs),
    Train(train::TrainArgs),
    Kernels(kernels::KernelsArgs),
    Calibrate(calibrate::CalibrateArgs),
}

/// Strategies over a suite of reshards: measured, with the prediction beside it, or only predicted.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  crossmesh bench reshard --predict
  # as root
  crossmesh bench reshard --emulate 400Mbit --strategies flow,sendrecv
  # one slow host
  crossmesh bench reshard --emulate 400Mbit,h1=200Mbit --suite uneven
  crossmesh bench reshard --predict --suite modern --html bench.html
  crossmesh bench reshard --predict --suite mine.toml --format json")]
struct ReshardArgs {
    /// Simulate instead of running
    #[arg(long)]
    predict: bool,
    /// paper, modern, uneven, or a suite file
    #[arg(long, value_name = "S", default_value = "paper", value_parser = Known(suites), hide_possible_values = true)]
    suite: String,
    /// Only the cases whose name contains this
    #[arg(long, value_name = "TEXT")]
    case: Option<String>,
    /// The strategies to compare [default: all; measured: flow]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    strategies: Vec<String>,
    /// Shorten the last dim of tensors that are larger [default: none; measured: 64MiB]
    #[arg(long, value_name = "BYTES")]
    tensor_bytes: Option<String>,
    /// For the randomized schedulers
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    format: FormatArgs,
    /// Also write a report with pictures: one HTML file
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    html: Option<PathBuf>,
}

/// A suite's results.
#[derive(Debug, Serialize)]
pub struct Results {
    pub schema: &'static str,
    pub suite: String,
    pub about: String,
    pub seed: u64,
    /// The machine whose times these are; missing where nothing was run.
    pub machine: Option<String>,
    pub cases: Vec<CaseResult>,
    /// The case in which `flow` is furthest from the bound.
    pub worst_flow: Option<Worst>,
}

#[derive(Debug, Serialize)]
pub struct CaseResult {
    pub name: String,
    pub about: String,
    /// Of all its tensors, once.
    pub bytes: u64,
    pub devices: usize,
    pub hosts: usize,
    pub lower_bound_s: f64,
    pub bound_reason: String,
    pub strategies: Vec<StrategyResult>,
}

#[derive(Debug, Serialize)]
pub struct StrategyResult {
    pub strategy: &'static str,
    /// Missing where the strategy has no plan.
    pub predicted_s: Option<f64>,
    pub over_bound: Option<f64>,
    pub peak_extra_bytes: Option<u64>,
    /// In t, the time of the case's bytes over one NIC.
    pub t: Option<f64>,
    #[serde(serialize_with = "reference_as_text")]
    pub reference_t: Option<Reference>,
    pub why_not: Option<String>,
    /// Missing where nothing was run.
    pub measured: Option<MeasuredTimes>,
}

/// What a strategy took for real.
#[derive(Debug, Serialize)]
pub struct MeasuredTimes {
    pub measured_s: Vec<f64>,
    pub median_s: f64,
    /// Missing where the NICs of the prediction were not there: neither emulated nor of a cluster that was measured.
    pub over_bound: Option<f64>,
    pub over_predicted: Option<f64>,
    pub verified: bool,
}

#[derive(Debug, Serialize)]
pub struct Worst {
    pub case: String,
    pub over_bound: f64,
}

fn reference_as_text<S: serde::Serializer>(value: &Option<Reference>, s: S) -> Result<S::Ok, S::Error> {
    match value {
        Some(Reference::One(one)) => s.serialize_some(one),
        Some(Reference::Range(range)) => s.serialize_some(range),
        None => s.serialize_none(),
    }
}

pub fn run(args: &Args) -> Result<Answer> {
    let args = match &args.what {
        What::Reshard(args) => args,
        What::Collective(args) => return collective::run(args),
        What::Pipeline(args) => return pipeline::run(args),
        What::Train(args) => return train::run(args),
        What::Kernels(args) => return kernels::run(args),
        What::Calibrate(args) => return calibrate::run(args),
    };
    let suite = Suite::open(&args.suite)?;
    let bench = Bench::of(args)?;
    let results = bench.suite(&suite, args.case.as_deref())?;
    if let Some(path) = &args.html {
        output::write_file(path, report::bench::render(&results, report::provenance()))?;
    }
    match args.format.get() {
        Format::Text if args.predict => output::print(&render(&results))?,
        Format::Text => output::print(&measured::render(&results))?,
        Format::Json => output::print_json(&results)?,
    }
    Ok(if measured::all_verified(&results) { Answer::Yes } else { Answer::No })
}

/// What to do with every case.
struct Bench {
    strategies: Vec<Strategy>,
    seed: u64,
    fit: Fit,
    /// Missing where nothing is run.
    run: Option<RunOptions>,
    progress: Progress,
}

impl Bench {
    fn of(args: &ReshardArgs) -> Result<Self> {
        let parsed: Vec<Strategy> = args.strategies.iter().map(|s| Ok(s.parse()?)).collect::<Result<_>>()?;
        let strategies = match (parsed.is_empty(), args.predict) {
            (false, _) => parsed,
            (true, true) => Strategy::CONCRETE.to_vec(),
            (true, false) => vec![Strategy::Flow],
        };
        let given = args.tensor_bytes.as_deref().map(parse_bytes).transpose().context("--tensor-bytes")?;
        let tensor_bytes = given.or((!args.predict).then_some(measured::TENSOR_BYTES));
        let fit = Fit { nic: args.run.nic().cloned(), tensor_bytes };
        let spare = |options| RunOptions { spare_ranks: true, ..options };
        let run = if args.predict { None } else { Some(spare(args.run.options(measured::REPEAT, None)?)) };
        Ok(Self { strategies, seed: args.seed, fit, run, progress: Progress::new() })
    }

    fn suite(&self, suite: &Suite, only: Option<&str>) -> Result<Results> {
        let cases: Vec<&Case> =
            suite.cases.iter().filter(|c| only.is_none_or(|o| c.name.contains(o))).collect();
        if cases.is_empty() {
            bail!("no case of suite {} has `{}` in its name", suite.name, only.unwrap_or(""));
        }
        let results = cases.iter().map(|case| self.case(suite, case)).collect::<Result<Vec<_>>>()?;
        let worst_flow = results
            .iter()
            .filter_map(|case| Some(Worst { case: case.name.clone(), over_bound: flow_over_bound(case)? }))
            .max_by(|a, b| a.over_bound.total_cmp(&b.over_bound));
        Ok(Results {
            schema: "crossmesh.bench/1",
            suite: suite.name.clone(),
            about: suite.about.clone(),
            seed: self.seed,
            machine: self.run.as_ref().map(|_| machine()),
            cases: results,
            worst_flow,
        })
    }

    fn case(&self, suite: &Suite, case: &Case) -> Result<CaseResult> {
        let problem = suite.fitted_problem(case, &self.fit)?;
        let bound = lower_bound(&problem).with_context(|| format!("case `{}`", case.name))?;
        let mut strategies = Vec::new();
        for strategy in &self.strategies {
            self.progress.say(&format!("{}: {strategy}", case.name));
            let result = self.strategy(&problem, &bound, case, *strategy);
            strategies.push(result.with_context(|| format!("case `{}`, {strategy}", case.name))?);
        }
        Ok(CaseResult {
            name: case.name.clone(),
            about: case.about.clone(),
            bytes: problem.reshards.iter().map(|r| r.src.layout.bytes()).sum(),
            devices: problem.cluster.num_devices(),
            hosts: problem.cluster.hosts.len(),
            lower_bound_s: bound.seconds,
            bound_reason: bound.reason,
            strategies,
        })
    }

    fn strategy(
        &self,
        problem: &Problem,
        bound: &Bound,
        case: &Case,
        strategy: Strategy,
    ) -> Result<StrategyResult> {
        let options = PlanOptions { strategy, seed: self.seed, ..PlanOptions::default() };
        let planned = plan(problem, &options)
            .map_err(Into::into)
            .and_then(|plan| Prediction::with_bound(plan, bound.clone()));
        let (prediction, why_not) = match planned {
            Ok(prediction) => (Some(prediction), None),
            Err(error) => (None, Some(format!("{error:#}"))),
        };
        let measured = match (&prediction, &self.run) {
            (Some(prediction), Some(run)) => Some(measured::measure(prediction, run, &self.progress)?),
            _ => None,
        };
        let bytes: u64 = problem.reshards.iter().map(|r| r.src.layout.bytes()).sum();
        let t = problem.cluster.hosts.first().map(|host| bytes as f64 / host.nic_out_bytes_per_s);
        let seconds = prediction.as_ref().map(Prediction::seconds);
        Ok(StrategyResult {
            strategy: strategy.name(),
            predicted_s: seconds,
            over_bound: prediction.as_ref().map(Prediction::ratio).filter(|r| r.is_finite()),
            peak_extra_bytes: prediction.as_ref().map(Prediction::peak_extra_bytes),
            t: seconds.zip(t).map(|(seconds, t)| seconds / t).filter(|t| t.is_finite()),
            reference_t: case.reference.get(strategy.name()).copied(),
            why_not,
            measured,
        })
    }
}

fn flow_over_bound(case: &CaseResult) -> Option<f64> {
    case.strategies.iter().find(|s| s.strategy == Strategy::Flow.name())?.over_bound
}

/// The tables.
pub fn render(results: &Results) -> String {
    let mut text = format!("suite {}: {}\n\n", results.suite, results.about);
    text += "predicted time, and × the lower bound\n";
    text += &times(results).render(2);
    if results.cases.iter().any(|c| c.strategies.iter().any(|s| s.reference_t.is_some())) {
        text += "\nin t (the whole tensor over one NIC), ours / reference\n";
        text += &references(results).render(2);
        text += &agreement(results);
    }
    text += &why_not(results);
    if let Some(worst) = &results.worst_flow {
        let planned = results.cases.iter().filter(|c| flow_over_bound(c).is_some()).count();
        let cases = match results.cases.len() {
            all if all == planned => count(all, "case"),
            all => format!("{planned} of {all} cases"),
        };
        let _ = writeln!(
            text,
            "\nworst flow ratio over {cases}: {:.3} × the bound, in case {}",
            worst.over_bound, worst.case
        );
    }
    text
}

fn column_names(results: &Results) -> impl Iterator<Item = String> {
    let strategies = results.cases.first().map_or(&[][..], |case| &case.strategies);
    strategies.iter().map(|s| s.strategy.replace("broadcast:", "bc:"))
}

fn times(results: &Results) -> Table {
    let mut table = Table::new("lr");
    table.row(["case", "bytes", "bound"].map(String::from).into_iter().chain(column_names(results)));
    for case in &results.cases {
        let cell = |s: &StrategyResult| match (s.predicted_s, s.over_bound) {
            (Some(seconds), Some(over)) => format!("{} ×{over:.2}", Seconds(seconds)),
            (Some(seconds), None) => Seconds(seconds).to_string(),
            _ => "-".to_string(),
        };
        let first =
            [case.name.clone(), Bytes(case.bytes).to_string(), Seconds(case.lower_bound_s).to_string()];
        table.row(first.into_iter().chain(case.strategies.iter().map(cell)));
    }
    table
}

fn references(results: &Results) -> Table {
    let mut table = Table::new("lr");
    table.row(["case".to_string()].into_iter().chain(column_names(results)));
    for case in &results.cases {
        let cell = |s: &StrategyResult| match (s.t, s.reference_t) {
            (Some(t), Some(reference)) => format!("{t:.2} / {reference}"),
            (Some(t), None) => format!("{t:.2}"),
            _ => "-".to_string(),
        };
        table.row([case.name.clone()].into_iter().chain(case.strategies.iter().map(cell)));
    }
    table
}

/// How many of the reference's values come out again.
fn agreement(results: &Results) -> String {
    const TOLERANCE: f64 = 0.05;
    let errors: Vec<f64> = results
        .cases
        .iter()
        .flat_map(|c| &c.strategies)
        .filter_map(|s| Some(s.reference_t?.error(s.t?)))
        .collect();
    let close = errors.iter().filter(|e| **e <= TOLERANCE).count();
    let worst = errors.iter().copied().fold(0.0, f64::max);
    format!("  {close} of {} within 5 %, the worst {:.1} % off\n", errors.len(), 100.0 * worst)
}

/// Why cells are empty: strategies of a case that fail alike, on a line.
fn why_not(results: &Results) -> String {
    let mut text = String::new();
    for case in &results.cases {
        let mut rest: Vec<(&str, &str)> =
            case.strategies.iter().filter_map(|s| Some((s.strategy, s.why_not.as_deref()?))).collect();
        while let Some(&(first, why)) = rest.first() {
            // Messages name the strategy; apart from that, alike is alike.
            let alike = |(name, other): &(&str, &str)| other.replace(name, "") == why.replace(first, "");
            let names: Vec<&str> = rest.iter().filter(|r| alike(r)).map(|r| r.0).collect();
            let why = why.lines().next().unwrap_or("").replace(&format!("strategy `{first}` "), "");
            let _ = writeln!(text, "  {}: {}: {why}", case.name, names.join(", "));
            rest.retain(|r| !alike(r));
        }
    }
    if text.is_empty() { text } else { format!("\nno plan\n{text}") }
}
