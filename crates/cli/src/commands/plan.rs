//! `crossmesh plan`: the plan document, into a file.

use std::path::{Path, PathBuf};

use anyhow::Result;
use crossmesh_core::units::{Bytes, Seconds};
use serde::Serialize;

use crate::Answer;
use crate::input::{PlanArgs, ProblemArgs};
use crate::output::{self, Format, FormatArgs, count};
use crate::predict::Prediction;

/// Write the plan document: every transfer, its order, and what it should take.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  crossmesh plan 'f32[8,6]@A{tp:2}(tp,_)' 'f32[8,6]@B{tp:3}(_,tp)' -o plan.json
  crossmesh plan --pairs weights.txt --cluster cluster.toml --strategy auto \\
      -o plan.json")]
pub struct Args {
    #[command(flatten)]
    problem: ProblemArgs,
    #[command(flatten)]
    plan: PlanArgs,
    /// Where to write it; `-` is stdout
    #[arg(short, long, value_name = "FILE", help_heading = "Output", default_value = "-")]
    output: PathBuf,
    #[command(flatten)]
    format: FormatArgs,
}

/// What was written, without its transfers.
#[derive(Debug, Serialize)]
struct Written<'a> {
    schema: &'static str,
    file: String,
    strategy: &'a str,
    assumed: Option<&'a str>,
    bytes: u64,
    transfers: usize,
    lower_bound_s: f64,
    predicted_s: f64,
    over_bound: Option<f64>,
    peak_extra_bytes: u64,
}

fn written<'a>(path: &Path, prediction: &'a Prediction) -> Written<'a> {
    Written {
        schema: "crossmesh.planned/1",
        file: path.display().to_string(),
        strategy: &prediction.plan.strategy,
        assumed: prediction.assumed.as_deref(),
        bytes: prediction.plan.bytes_moved(),
        transfers: prediction.plan.transfers().len(),
        lower_bound_s: prediction.bound.seconds,
        predicted_s: prediction.seconds(),
        over_bound: Some(prediction.ratio()).filter(|ratio| ratio.is_finite()),
        peak_extra_bytes: prediction.peak_extra_bytes(),
    }
}

pub fn run(args: &Args) -> Result<Answer> {
    let problem = args.problem.problem()?;
    let assumed = args.problem.assumption(&problem);
    let prediction = Prediction::of_problem(&problem, &args.plan.options()?)?.assuming(assumed);
    let document = prediction.document();
    if args.output.as_os_str() == "-" {
        // The document is JSON whatever is asked for.
        output::print(&document)?;
        return Ok(Answer::Yes);
    }
    output::write_file(&args.output, &document)?;
    if args.format.get() == Format::Json {
        output::print_json(&written(&args.output, &prediction))?;
        return Ok(Answer::Yes);
    }
    let note = prediction.assumed.as_ref().map_or(String::new(), |assumed| format!("note: {assumed}\n"));
    output::print(&format!(
        "{note}{}: {} in {}, predicted {}, {:.3} × the bound\n",
        args.output.display(),
        Bytes(prediction.plan.bytes_moved()),
        count(prediction.plan.transfers().len(), "transfer"),
        Seconds(prediction.seconds()),
        prediction.ratio(),
    ))?;
    Ok(Answer::Yes)
}
