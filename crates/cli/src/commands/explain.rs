//! `crossmesh explain`: who sends what to whom, how long it takes, and why. Or, of a run that failed, who did not.

mod flight;

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::Result;
use crossmesh_core::program::doc::ProgramDoc;
use crossmesh_core::reshard::Plan;
use crossmesh_core::units::{Bytes, Seconds};

use crate::Answer;
use crate::input::{PlanArgs, ProblemArgs};
use crate::output::{self, Format, FormatArgs, Table, and_more};
use crate::path;
use crate::picture;
use crate::predict::Prediction;
use crate::replay::replay;
use crate::report;
use crate::summary::{self, SMALL_PLAN};
use crate::tensors;

/// Show who sends what to whom, how long it takes, and how far from the bound that is.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  crossmesh explain 'f32[8,6]@A{tp:2}(tp,_)' 'f32[8,6]@B{tp:3}(_,tp)'
  crossmesh explain 'bf16[8192,8192]@A{fsdp:16}(fsdp,_)' \\
      'bf16[8192,8192]@B{dp:2,tp:8}(_,tp)' --devices-per-host 8 --nics 8 \\
      --nic 400Gbit --html report.html
  # what every rank does, op by op
  crossmesh explain 'f32[8]@A{tp:2}(tp)' 'f32[8]@B{tp:2}(_)' --program
  crossmesh explain --pairs weights.txt --cluster cluster.toml \\
      --max-extra-bytes 256MiB
  # a record that `crossmesh run … --flight flight.json` wrote
  crossmesh explain --flight flight.json")]
pub struct Args {
    #[command(flatten)]
    problem: ProblemArgs,
    #[command(flatten)]
    plan: PlanArgs,
    /// Explain how a run ended instead: who was at fault, who waited for whom, and what the simulator would have seen
    #[arg(long, value_name = "FILE", help_heading = "Failed runs", conflicts_with_all = ["src", "dst", "pairs", "html"])]
    flight: Option<PathBuf>,
    /// Show the program instead, or its document: what every rank does, with which memory, in which order
    #[arg(long, conflicts_with_all = ["flight", "html"], help_heading = "Output")]
    program: bool,
    #[command(flatten)]
    format: FormatArgs,
    /// Also write a report with pictures: one HTML file
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    html: Option<PathBuf>,
    /// Also write the NICs over time as a figure for a paper: an SVG, 85 mm wide, or a PDF where its name ends so
    #[arg(long, value_name = "FILE", help_heading = "Output", conflicts_with_all = ["flight", "program"])]
    svg: Option<PathBuf>,
}

pub fn run(args: &Args) -> Result<Answer> {
    if let Some(path) = &args.flight {
        let replay = replay(path)?;
        match args.format.get() {
            Format::Text => output::print(&flight::render(&replay))?,
            Format::Json => output::print_json(&replay)?,
        }
        return Ok(Answer::Yes);
    }
    let problem = args.problem.problem()?;
    let assumed = args.problem.assumption(&problem);
    let prediction = Prediction::of_problem(&problem, &args.plan.options()?)?.assuming(assumed);
    if let Some(path) = &args.html {
        output::write_file(path, report::plan::render(&prediction, report::provenance()))?;
    }
    if let Some(path) = &args.svg {
        picture::write(path, &report::figure::links(&prediction))?;
    }
    match (args.format.get(), args.program) {
        (Format::Text, false) => output::print(&render(&prediction))?,
        (Format::Json, false) => output::print(&prediction.document())?,
        (Format::Text, true) => output::print(&prediction.program.to_string())?,
        (Format::Json, true) => {
            output::print(&ProgramDoc::new(&prediction.program, Some(&problem.cluster)).to_json())?;
        }
    }
    Ok(Answer::Yes)
}

/// The text report.
pub fn render(prediction: &Prediction) -> String {
    let plan = &prediction.plan;
    let mut text = format!("reshard {}\n", summary::headline(plan));
    if let Some(assumed) = &prediction.assumed {
        let _ = writeln!(text, "  note: {assumed}");
    }
    let _ = writeln!(
        text,
        "  strategy {}, chunks of {}, {}",
        plan.strategy,
        Bytes(plan.chunk_bytes),
        summary::place(&plan.problem)
    );
    text += &tensors(prediction);
    text += &host_pairs(plan);
    text += &transfers(plan);
    text += &summary::busiest_links(prediction, 6);
    text += &path::render(prediction);
    let reasons = summary::reasons(prediction);
    if !reasons.is_empty() {
        text += "why\n";
        for reason in &reasons {
            let _ = writeln!(text, "  {reason}");
        }
    }
    text += &figures(prediction);
    text
}

/// The tensors of a plan for many, the largest first.
fn tensors(prediction: &Prediction) -> String {
    const SHOWN: usize = 10;
    if prediction.plan.problem.reshards.len() == 1 {
        return String::new();
    }
    let (rows, busiest) = tensors::rows(prediction);
    let mut table = Table::new("lrrrrl");
    let share = if busiest.is_empty() { "share".to_string() } else { format!("of {busiest}") };
    table.row(["name", "bytes", "transfers", "under way", &share, "source -> destination"].map(String::from));
    let shown = tensors::shown(&rows, SHOWN);
    for row in &shown {
        table.row([
            row.name.clone(),
            Bytes(row.bytes).to_string(),
            row.transfers.to_string(),
            Seconds(row.seconds()).to_string(),
            format!("{:.1} %", 100.0 * row.share_of_busiest_link),
            format!("{} -> {}", row.src, row.dst),
        ]);
    }
    let slowest = tensors::slowest_in_words(&rows).map_or(String::new(), |words| format!("  {words}\n"));
    format!("tensors\n{}{}{slowest}", table.render(2), and_more(rows.len(), shown.len(), "tensor"))
}

fn host_pairs(plan: &Plan) -> String {
    const SHOWN: usize = 24;
    let traffic = summary::host_traffic(plan);
    if traffic.is_empty() {
        return "hosts\n  nothing moves: every device already holds what it should\n".into();
    }
    let mut table = Table::new("llr");
    table.row(["from", "to", "bytes", "transfers"]);
    for ((from, to), t) in traffic.iter().take(SHOWN) {
        let to = if from == to { "itself".into() } else { to.to_string() };
        table.row([from.to_string(), to, Bytes(t.bytes).to_string(), t.transfers.to_string()]);
    }
    format!("hosts\n{}{}", table.render(2), and_more(traffic.len(), SHOWN, "pair"))
}

/// Every transfer of a small plan.
fn transfers(plan: &Plan) -> String {
    let all = plan.transfers();
    if all.is_empty() || all.len() > SMALL_PLAN {
        return String::new();
    }
    let many = plan.problem.reshards.len() > 1;
    let mut table = Table::new("lllrl");
    for (id, t) in all.iter().enumerate() {
        let region = plan.region(t).to_string();
        let region =
            if many { format!("{} {region}", tensors::name_of(plan, t.tensor as usize)) } else { region };
        let link = if plan.crosses_hosts(t) { "nic" } else { "local" };
        let after: Vec<String> = plan.after(t).iter().map(|a| a.to_string()).collect();
        let mut notes = vec![];
        if t.reduce {
            notes.push("adds up".to_string());
        }
        if t.then_own {
            notes.push("then its own".to_string());
        }
        if !after.is_empty() {
            notes.push(format!("after {}", after.join(" ")));
        }
        let way = format!("{} -> {}", t.src, t.dst);
        table.row([format!("t{id}"), way, region, Bytes(t.bytes).to_string(), link.into(), notes.join(", ")]);
    }
    format!("transfers\n{}", table.render(2))
}

fn figures(prediction: &Prediction) -> String {
    let mut text = String::new();
    let _ = writeln!(text, "peak extra memory  {} a device", Bytes(prediction.peak_extra_bytes()));
    let reason = &prediction.bound.reason;
    let colon = if reason.is_empty() { "" } else { ": " };
    let _ = writeln!(text, "lower bound        {}{colon}{reason}", Seconds(prediction.bound.seconds));
    let _ = writeln!(
        text,
        "predicted          {}, {:.3} × the bound",
        Seconds(prediction.seconds()),
        prediction.ratio()
    );
    text
}
