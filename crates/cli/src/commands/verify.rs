//! `crossmesh verify`: is this plan right?

use std::path::PathBuf;

use anyhow::{Context, Result};
use crossmesh_core::program::doc::ProgramDoc;
use crossmesh_core::reshard::doc::PlanDoc;
use crossmesh_core::step::doc::StepDoc;
use crossmesh_core::step::{StepError, lower_step};
use crossmesh_core::verify::{Claims, Proof, verify_claims, verify_program};
use serde::Serialize;

use crate::Answer;
use crate::input::{Document, read_document};
use crate::output::{self, Format, FormatArgs};
use crate::predict::Violation;

/// Check that a plan, a program or a training step delivers every element exactly once, in an order that cannot get stuck.
#[derive(Debug, clap::Args)]
#[command(after_help = "Exits 0 with a line, or 1 with the first law the plan breaks.

Examples:
  crossmesh verify plan.json
  # what `crossmesh explain … --program --format json` printed
  crossmesh verify program.json
  crossmesh explain 'f32[8]@A{tp:2}(tp)' 'f32[8]@B{tp:2}(_)' --format json |
      crossmesh verify -")]
pub struct Args {
    /// A document of a plan, of a program or of a training step; `-` reads stdin
    #[arg(value_name = "PLAN")]
    plan: PathBuf,
    #[command(flatten)]
    format: FormatArgs,
}

/// The verdict as JSON.
#[derive(Debug, Serialize)]
struct Verdict {
    schema: &'static str,
    ok: bool,
    violation: Option<Violation>,
}

pub fn run(args: &Args) -> Result<Answer> {
    let name = args.plan.display().to_string();
    let checked = match read_document(&args.plan)? {
        Document::Plan(doc) => check(&doc).context(name.clone())?,
        Document::Program(doc) => check_program(&doc).context(name.clone())?,
        Document::Step(doc) => check_step(&doc).context(name.clone())?,
    };
    let ok = checked.is_ok();
    match args.format.get() {
        Format::Json => {
            output::print_json(&Verdict { schema: "crossmesh.verdict/1", ok, violation: checked.err() })?;
        }
        Format::Text => {
            output::print(&format!("{name}: {}\n", checked.unwrap_or_else(|v| v.to_string())))?;
        }
    }
    Ok(if ok { Answer::Yes } else { Answer::No })
}

/// The same for a step: its plans, its passes and the buffers they share are one program.
fn check_step(doc: &StepDoc) -> Result<Result<String, Violation>> {
    let step = doc.to_step()?;
    Ok(match lower_step(&step) {
        Ok(lowered) => {
            let ops: usize = lowered.program.ranks.iter().map(|rank| rank.ops.len()).sum();
            let passes: usize = step.schedule.devices().iter().map(Vec::len).sum();
            let ranks = output::count(lowered.program.ranks.len(), "rank");
            Ok(format!(
                "ok: every pass finds what it needs, no buffer is filled while somebody reads it: {passes} passes on {ranks}, \
                 {ops} ops, no race, no deadlock"
            ))
        }
        Err(StepError::Verify(error)) => Err((*error).into()),
        Err(StepError::Schedule(error)) => {
            Err(Violation { law: error.check().name(), message: error.to_string() })
        }
        Err(error) => return Err(error.into()),
    })
}

/// The same for a program: whatever can be read is judged.
fn check_program(doc: &ProgramDoc) -> Result<Result<String, Violation>> {
    let program = doc.to_program()?;
    // It proves nothing, and yet nobody could run on one that is none.
    doc.to_cluster()?;
    Ok(match verify_program(&program) {
        Ok(Proof { transfers, bytes, peak_extra_bytes, .. }) => Ok(format!(
            "ok: every goal gets whole values, every read sees what it should: {bytes} B in {transfers} messages, no race, \
             no deadlock, at most {peak_extra_bytes} B of extra memory"
        )),
        Err(error) => Err(error.into()),
    })
}

/// A line of praise, or the first law that is broken. An error where the document says no plan at all.
fn check(doc: &PlanDoc) -> Result<Result<String, Violation>> {
    let plan = match doc.to_plan() {
        Ok(plan) => plan,
        Err(error) => match error.law() {
            Some(law) => return Ok(Err(Violation { law, message: error.to_string() })),
            None => return Err(error.into()),
        },
    };
    Ok(match verify_claims(&plan, &Claims::of(doc)) {
        Ok(proof) => Ok(format!("ok: {proof}")),
        Err(error) => Err(error.renumbered(|t| doc.id_of(t)).into()),
    })
}
