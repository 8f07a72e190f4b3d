//! `crossmesh verify`: is this plan right?

use std::path::PathBuf;

use anyhow::Result;
use crossmesh_core::units::Bytes;
use serde::Serialize;

use crate::Answer;
use crate::input::read_plan;
use crate::output::{self, Format, count};

/// Check that a plan delivers every element exactly once, in an order that cannot get stuck.
#[derive(Debug, clap::Args)]
#[command(after_help = "Exits 0 with a line, or 1 with the first law the plan breaks.

Examples:
  crossmesh verify plan.json
  crossmesh explain 'f32[8]@A{tp:2}(tp)' 'f32[8]@B{tp:2}(_)' --format json | crossmesh verify -")]
pub struct Args {
    /// A plan document; `-` reads stdin
    #[arg(value_name = "PLAN")]
    plan: PathBuf,
    /// Text for people, or one JSON document
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// The verdict as JSON.
#[derive(Debug, Serialize)]
struct Verdict {
    schema: &'static str,
    ok: bool,
    /// The first law that is broken, with rank, region and transfer.
    violation: Option<String>,
}

pub fn run(args: &Args) -> Result<Answer> {
    let plan = read_plan(&args.plan)?;
    let violation = crossmesh_core::verify::verify(&plan).err().map(|e| e.to_string());
    let ok = violation.is_none();
    match (args.format, violation) {
        (Format::Json, violation) => {
            output::print_json(&Verdict { schema: "crossmesh.verdict/1", ok, violation })?;
        }
        (Format::Text, Some(violation)) => output::print(&format!("{}: {violation}\n", args.plan.display()))?,
        (Format::Text, None) => {
            let transfers = count(plan.transfers().len(), "transfer");
            let moved = Bytes(plan.bytes_moved());
            output::print(&format!(
                "{}: ok: {moved} in {transfers}, every element arrives exactly once\n",
                args.plan.display()
            ))?;
        }
    }
    Ok(if ok { Answer::Yes } else { Answer::No })
}
