//! `crossmesh plan`: the plan document, into a file.

use std::path::PathBuf;

use anyhow::Result;
use crossmesh_core::units::{Bytes, Seconds};

use crate::Answer;
use crate::input::{PlanArgs, ProblemArgs};
use crate::output::{self, count};
use crate::predict::Prediction;

/// Write the plan document: every transfer, its order, and what it should take.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  crossmesh plan 'f32[8,6]@A{tp:2}(tp,_)' 'f32[8,6]@B{tp:3}(_,tp)' -o plan.json
  crossmesh plan --pairs weights.txt --cluster cluster.toml --strategy auto -o plan.json")]
pub struct Args {
    #[command(flatten)]
    problem: ProblemArgs,
    #[command(flatten)]
    plan: PlanArgs,
    /// Where to write it; `-` is stdout
    #[arg(short, long, value_name = "FILE", help_heading = "Output", default_value = "-")]
    output: PathBuf,
}

pub fn run(args: &Args) -> Result<Answer> {
    let problem = args.problem.problem()?;
    let prediction = Prediction::of_problem(&problem, &args.plan.options()?)?;
    let document = prediction.document();
    if args.output.as_os_str() == "-" {
        output::print(&document)?;
        return Ok(Answer::Yes);
    }
    output::write_file(&args.output, &document)?;
    output::print(&format!(
        "{}: {} in {}, predicted {}, {:.3} × the bound\n",
        args.output.display(),
        Bytes(prediction.plan.bytes_moved()),
        count(prediction.plan.transfers().len(), "transfer"),
        Seconds(prediction.seconds()),
        prediction.ratio(),
    ))?;
    Ok(Answer::Yes)
}
