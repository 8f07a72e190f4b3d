//! `crossmesh simulate`: how long will this plan take?

mod step;

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use crossmesh_core::cluster::Cluster;
use crossmesh_core::program::doc::ProgramDoc;
use crossmesh_core::reshard::lower::Addressing;
use crossmesh_core::reshard::{Plan, lower_bound};
use crossmesh_core::sim::simulate;
use crossmesh_core::units::{Bytes, Seconds};
use crossmesh_core::verify::Verified;
use serde::Serialize;

use crate::Answer;
use crate::chrome;
use crate::input::{Document, HostArgs, read_document};
use crate::links::{self, Row};
use crate::output::{self, Format, FormatArgs, count};
use crate::path::{self, PathRow};
use crate::predict::{Prediction, Violation};
use crate::summary;
use crate::tensors::{self, TensorRow};

/// Predict how long a plan, a program or a training step takes, on its own cluster or another.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  crossmesh simulate plan.json
  crossmesh simulate plan.json --nic 100Gbit --latency 10us
  # a step that `crossmesh bench pipeline --predict --steps DIR` wrote
  crossmesh simulate step.json --coarse
  # open it in ui.perfetto.dev
  crossmesh simulate plan.json --cluster other.toml --trace trace.json")]
pub struct Args {
    /// A document of a plan, of a program or of a training step; `-` reads stdin
    #[arg(value_name = "PLAN")]
    plan: PathBuf,
    /// Of a step: one rank stands for the mesh of every stage, for steps on thousands of devices
    #[arg(long)]
    coarse: bool,
    #[command(flatten)]
    hosts: HostArgs,
    #[command(flatten)]
    format: FormatArgs,
    /// Also write the run as a Chrome trace, for Perfetto
    #[arg(long, alias = "perfetto", value_name = "FILE", help_heading = "Output")]
    trace: Option<PathBuf>,
}

/// The answer as JSON.
#[derive(Debug, Serialize)]
struct Simulation {
    schema: &'static str,
    strategy: String,
    predicted_s: f64,
    lower_bound_s: f64,
    over_bound: Option<f64>,
    bound_reason: String,
    peak_extra_bytes: u64,
    /// Busiest first.
    links: Vec<LinkReport>,
    /// Largest first.
    tensors: Vec<TensorRow>,
    /// Who kept whom waiting, from the start to the end.
    critical_path: Vec<PathRow>,
}

#[derive(Debug, Serialize)]
struct LinkReport {
    link: String,
    bytes: u64,
    bytes_per_s: f64,
    busy_s: f64,
}

pub fn run(args: &Args) -> Result<Answer> {
    let (plan, doc) = match read_document(&args.plan)? {
        Document::Step(doc) => return step::simulate_step(args, &doc),
        _ if args.coarse => {
            bail!("--coarse: {} is not a training step\nhint: leave --coarse out", args.plan.display())
        }
        Document::Program(doc) => return simulate_program(args, &doc),
        Document::Plan(doc) => {
            let plan = doc.to_plan().with_context(|| args.plan.display().to_string())?;
            (plan, doc)
        }
    };
    let program = Verified::plan(&plan, Addressing::Apart);
    let program = program.map_err(|error| {
        let violation = Violation::from(error.renumbered(|t| doc.id_of(t)));
        anyhow::anyhow!("{}: the plan breaks a law: {violation}", args.plan.display())
    })?;
    let mut cluster = match args.hosts.described()? {
        Some(cluster) => cluster,
        None => plan.problem.cluster.clone(),
    };
    args.hosts.adjust(&mut cluster)?;
    let prediction = predict_on(plan, program, cluster)?;
    if let Some(path) = &args.trace {
        output::write_file(path, &chrome::render(&prediction).context("cannot write the trace")?)?;
    }
    match args.format.get() {
        Format::Text => output::print(&render(&prediction))?,
        Format::Json => output::print(&document(&prediction)?)?,
    }
    Ok(Answer::Yes)
}

/// Predicts a plan that was proven, on this cluster.
pub fn predict_on(mut plan: Plan, program: Verified, cluster: Cluster) -> Result<Prediction> {
    move_to(&mut plan, cluster)?;
    let bound = lower_bound(&plan.problem).context("no lower bound")?;
    Prediction::of_program(plan, program, bound)
}

/// Predicts a program: on its own cluster, or on another.
fn simulate_program(args: &Args, doc: &ProgramDoc) -> Result<Answer> {
    let name = || args.plan.display().to_string();
    let program = doc.to_program().with_context(name)?;
    let program = Verified::program(program).map_err(|error| {
        anyhow::anyhow!("{}: the program breaks a law: {}", name(), Violation::from(error))
    })?;
    let cluster = match args.hosts.described()? {
        Some(described) => Some(described),
        None => doc.to_cluster().with_context(name)?,
    };
    let Some(mut cluster) = cluster else {
        bail!("{} does not say where its ranks are\nhint: give --cluster", name());
    };
    args.hosts.adjust(&mut cluster)?;
    if cluster.num_devices() < program.ranks.len() {
        let (ranks, devices) = (program.ranks.len(), count(cluster.num_devices(), "device"));
        bail!("the program has {ranks} ranks, the cluster has {devices}\nhint: describe a larger cluster");
    }
    if args.trace.is_some() {
        bail!("a trace of a program is not drawn yet\nhint: simulate the plan that it was made of");
    }
    let trace = simulate(&program, &cluster).context("the program cannot be simulated")?;
    let (seconds, bytes) = (trace.makespan_s, program.proof().bytes);
    match args.format.get() {
        Format::Text => output::print(&format!(
            "simulate program {}, {} in {} messages\npredicted    {}\n",
            name(),
            Bytes(bytes),
            program.proof().transfers,
            Seconds(seconds)
        ))?,
        Format::Json => output::print_json(&serde_json::json!({
            "schema": "crossmesh.simulation/1",
            "predicted_s": seconds,
            "bytes": bytes,
            "peak_extra_bytes": program.proof().peak_extra_bytes,
        }))?,
    }
    Ok(Answer::Yes)
}

/// Puts a plan onto another cluster, rank by rank.
pub fn move_to(plan: &mut Plan, cluster: Cluster) -> Result<()> {
    let last = plan.problem.meshes_of_ranks().keys().next_back().map_or(0, |r| r.index());
    if last >= cluster.num_devices() {
        bail!(
            "the plan uses ranks up to {last}, the cluster has {}\nhint: describe a larger cluster",
            count(cluster.num_devices(), "device")
        );
    }
    plan.problem.move_to(cluster);
    Ok(())
}

pub fn render(prediction: &Prediction) -> String {
    let plan = &prediction.plan;
    let mut text = format!("simulate {}\n", summary::headline(plan));
    let _ = writeln!(text, "  strategy {}, {}", plan.strategy, summary::place(&plan.problem));
    text += &summary::busiest_links(prediction, 8);
    text += &path::render(prediction);
    let reason = &prediction.bound.reason;
    let colon = if reason.is_empty() { "" } else { ": " };
    let _ = writeln!(text, "lower bound  {}{colon}{reason}", Seconds(prediction.bound.seconds));
    let (seconds, ratio) = (Seconds(prediction.seconds()), prediction.ratio());
    let _ = writeln!(text, "predicted    {seconds}, {ratio:.3} × the bound");
    text
}

/// The answer as the document `crossmesh.simulation/1`.
pub fn document(prediction: &Prediction) -> Result<String> {
    let mut rows = links::one_by_one(&prediction.plan.problem, &prediction.trace);
    links::sort_busiest(&mut rows);
    output::to_json(&Simulation {
        schema: "crossmesh.simulation/1",
        strategy: prediction.plan.strategy.clone(),
        predicted_s: prediction.seconds(),
        lower_bound_s: prediction.bound.seconds,
        over_bound: Some(prediction.ratio()).filter(|r| r.is_finite()),
        bound_reason: prediction.bound.reason.clone(),
        peak_extra_bytes: prediction.peak_extra_bytes(),
        links: rows.into_iter().map(LinkReport::from).collect(),
        tensors: tensors::rows(prediction).0,
        critical_path: path::rows(prediction),
    })
}

impl From<Row> for LinkReport {
    fn from(row: Row) -> Self {
        Self { link: row.name, bytes: row.bytes, bytes_per_s: row.bytes_per_s, busy_s: row.busy_s }
    }
}
