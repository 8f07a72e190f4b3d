//! `crossmesh bench`: a suite of cases, every strategy, seconds and the distance to the bound.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use crossmesh_core::reshard::{Bound, PlanOptions, Problem, Strategy, lower_bound};
use crossmesh_core::units::{Bytes, Seconds};
use serde::Serialize;

use crate::Answer;
use crate::output::{self, Format, Progress, Table, count};
use crate::predict::{Prediction, proven_plan};
use crate::report;
use crate::suite::{Case, Reference, Suite};

/// Compare strategies over a suite of cases.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  crossmesh bench reshard --predict
  crossmesh bench reshard --predict --suite modern")]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    Reshard(ReshardArgs),
}

/// Every strategy and scheduler over a suite of reshards.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  crossmesh bench reshard --predict
  crossmesh bench reshard --predict --suite modern --html bench.html
  crossmesh bench reshard --predict --suite mine.toml --format json")]
struct ReshardArgs {
    /// Simulate instead of running
    #[arg(long)]
    predict: bool,
    /// paper, modern, or a suite file
    #[arg(long, value_name = "S", default_value = "paper")]
    suite: String,
    /// Only the cases whose name contains this
    #[arg(long, value_name = "TEXT")]
    case: Option<String>,
    /// For the randomized schedulers
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Text for people, or one JSON document
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,
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
    let What::Reshard(args) = &args.what;
    if !args.predict {
        bail!("measuring needs the engine, which this version does not have yet\nhint: add --predict");
    }
    let suite = Suite::open(&args.suite)?;
    let results = predict_suite(&suite, args.case.as_deref(), args.seed)?;
    if let Some(path) = &args.html {
        output::write_file(path, &report::bench::render(&results, report::provenance()))?;
    }
    match args.format {
        Format::Text => output::print(&render(&results))?,
        Format::Json => output::print_json(&results)?,
    }
    Ok(Answer::Yes)
}

fn predict_suite(suite: &Suite, only: Option<&str>, seed: u64) -> Result<Results> {
    let cases: Vec<&Case> = suite.cases.iter().filter(|c| only.is_none_or(|o| c.name.contains(o))).collect();
    if cases.is_empty() {
        bail!("no case of suite {} has `{}` in its name", suite.name, only.unwrap_or(""));
    }
    let progress = Progress::new();
    let mut results = Vec::with_capacity(cases.len());
    for case in cases {
        results.push(predict_case(suite, case, seed, &progress)?);
    }
    let worst_flow = results
        .iter()
        .filter_map(|case| Some(Worst { case: case.name.clone(), over_bound: flow_over_bound(case)? }))
        .max_by(|a, b| a.over_bound.total_cmp(&b.over_bound));
    Ok(Results {
        schema: "crossmesh.bench/1",
        suite: suite.name.clone(),
        about: suite.about.clone(),
        seed,
        cases: results,
        worst_flow,
    })
}

fn flow_over_bound(case: &CaseResult) -> Option<f64> {
    case.strategies.iter().find(|s| s.strategy == Strategy::Flow.name())?.over_bound
}

fn predict_case(suite: &Suite, case: &Case, seed: u64, progress: &Progress) -> Result<CaseResult> {
    let problem = suite.problem(case)?;
    let bound = lower_bound(&problem).with_context(|| format!("case `{}`", case.name))?;
    let mut strategies = Vec::new();
    for strategy in Strategy::CONCRETE {
        progress.say(&format!("{}: {strategy}", case.name));
        strategies.push(predict_strategy(&problem, &bound, case, strategy, seed));
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

fn predict_strategy(
    problem: &Problem,
    bound: &Bound,
    case: &Case,
    strategy: Strategy,
    seed: u64,
) -> StrategyResult {
    let options = PlanOptions { strategy, seed, ..PlanOptions::default() };
    let planned = proven_plan(problem, &options).and_then(|plan| Prediction::with_bound(plan, bound.clone()));
    let (prediction, why_not) = match planned {
        Ok(prediction) => (Some(prediction), None),
        Err(error) => (None, Some(format!("{error:#}"))),
    };
    let bytes: u64 = problem.reshards.iter().map(|r| r.src.layout.bytes()).sum();
    let t = problem.cluster.hosts.first().map(|host| bytes as f64 / host.nic_out_bytes_per_s);
    let seconds = prediction.as_ref().map(Prediction::seconds);
    StrategyResult {
        strategy: strategy.name(),
        predicted_s: seconds,
        over_bound: prediction.as_ref().map(Prediction::ratio).filter(|r| r.is_finite()),
        peak_extra_bytes: prediction.as_ref().map(Prediction::peak_extra_bytes),
        t: seconds.zip(t).map(|(seconds, t)| seconds / t).filter(|t| t.is_finite()),
        reference_t: case.reference.get(strategy.name()).copied(),
        why_not,
    }
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

fn column_names() -> impl Iterator<Item = String> {
    Strategy::CONCRETE.into_iter().map(|s| s.name().replace("broadcast:", "bc:"))
}

fn times(results: &Results) -> Table {
    let mut table = Table::new("lr");
    table.row(["case", "bytes", "bound"].map(String::from).into_iter().chain(column_names()));
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
    table.row(["case".to_string()].into_iter().chain(column_names()));
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
