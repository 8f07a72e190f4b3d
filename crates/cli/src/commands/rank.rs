//! One rank of `crossmesh run`: joins the others, moves its part of the plan, and tells what it saw.
//!
//! It reads its place from the environment and says, to the process that started it, a JSON line for each of these:
//!
//! ```text
//! {"round":1}                      the first rank: everybody was ready, a run begins
//! {"step":{"rank":3,...}}          training: a step is done
//! {"talked":{"ids":[..],..}}       generating: the first rank tells what was said
//! {"report":{"rank":3,...}}        all runs are over
//! {"abort":{"culprit":2,...}}      the run failed, and why; the same is said on stderr
//! ```

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use crossmesh_comm::auth::Secret;
use crossmesh_comm::deadline::Deadline;
use crossmesh_comm::environment::{Flags, host_name, place, variables};
use crossmesh_comm::protect::Protect;
use crossmesh_comm::rendezvous::{Abort, Meeting, OverSockets};
use crossmesh_core::id::Rank;
use serde::{Deserialize, Serialize};

use crate::Answer;
use crate::memory::GpuChoice;
use crate::output;
use crate::part::{Ending, Part, Summary, log, met_s, patience, write_record};
use crate::talk::Talked;
use crate::task::Task;
use crate::training::note::StepNote;

/// Run one rank of a plan, a step, training or text generation; `crossmesh run`, `bench`, `train` and `generate` start these.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The plan document, to be proven here
    #[arg(long, value_name = "FILE", required_unless_present_any = ["handed", "step", "sweep", "train", "generate"])]
    plan: Option<PathBuf>,
    /// This rank's part of what the process that starts it has proven
    #[arg(long, value_name = "FILE", conflicts_with_all = ["plan", "step", "sweep", "train", "generate"])]
    handed: Option<PathBuf>,
    /// The document of a training step
    #[arg(long, value_name = "FILE", conflicts_with = "plan")]
    step: Option<PathBuf>,
    /// The document of a sweep of collectives
    #[arg(long, value_name = "FILE", conflicts_with_all = ["plan", "step"])]
    sweep: Option<PathBuf>,
    /// The document of a training job
    #[arg(long, value_name = "FILE", conflicts_with_all = ["plan", "step", "sweep"])]
    train: Option<PathBuf>,
    /// The document of what to generate
    #[arg(long, value_name = "FILE", conflicts_with_all = ["plan", "step", "sweep", "train"])]
    generate: Option<PathBuf>,
    #[arg(long, default_value_t = 1)]
    repeat: u32,
    /// How long nothing may move
    #[arg(long, value_name = "MS")]
    deadline_ms: u64,
    /// How long ranks may take to arrive
    #[arg(long, value_name = "MS")]
    arrive_ms: u64,
    /// Where to write down when every op ran or, after a failure, how far it was
    #[arg(long, value_name = "FOLDER")]
    records: Option<PathBuf>,
    /// Tensors lie on the GPU of this number, or of those that are shared the next in turn
    #[arg(long, value_name = "N")]
    gpu: Option<usize>,
    /// Ranks may share GPUs
    #[arg(long, value_name = "YES", default_value_t = false, action = clap::ArgAction::Set)]
    share_gpus: bool,
}

/// A line to the process that started us.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Said {
    Round(u32),
    Step(StepNote),
    Talked(Talked),
    Report(Summary),
    Abort(Abort),
}

/// Where a rank leaves the ops of its summary: a line would be too long for them.
pub fn spans_file(folder: &Path, rank: Rank) -> PathBuf {
    folder.join(format!("{rank}-spans.json"))
}

/// Where a rank's flight record is.
pub fn flight_file(folder: &Path, rank: Rank) -> PathBuf {
    folder.join(format!("{rank}-flight.json"))
}

pub fn run(args: &Args) -> Result<Answer> {
    let variables = variables();
    let place = place(&Flags::default(), &variables)?;
    let secret = Secret::from_variables(&variables)?.context("no secret was given to this rank")?;
    let secret = secret.protecting(Protect::from_variables(&variables)?);
    let task = match (&args.handed, &args.train, &args.generate) {
        (Some(path), ..) => Task::read_handed(path)?,
        (None, Some(path), _) => Task::read_training(path, Arc::new(|note| say(&Said::Step(note))))?,
        (None, None, Some(path)) => Task::read_talk(path, Arc::new(|talked| say(&Said::Talked(talked))))?,
        (None, None, None) => Task::read(args.plan.as_deref(), args.step.as_deref(), args.sweep.as_deref())?,
    };
    let arrive = Deadline::after(Duration::from_millis(args.arrive_ms));
    let ending = Ending::new(|abort| say(&Said::Abort(abort.clone())));
    let roster: BTreeSet<Rank> = task.ranks().into_iter().collect();
    let (rank, first) = (place.rank, roster.first() == Some(&place.rank));
    let (host, patience) = (host_name(&variables), patience(&place, &variables, arrive, args.deadline_ms));
    let met = OverSockets::meet(place, &host, roster, secret, patience, log(), ending.on_news());
    let mut meeting = met.map_err(|error| ending.not_met(error))?;
    let part = Part {
        task: &task,
        rank,
        met_s: met_s(&variables),
        repeat: args.repeat,
        deadline_ms: args.deadline_ms,
        flight: args.records.as_ref().map(|folder| flight_file(folder, rank)),
        trace: args.records.is_some(),
        interrupt: ending.interrupt.clone(),
        gpu: args.gpu.map(|index| GpuChoice { index, share: args.share_gpus }),
    };
    let on_round = |round| {
        if first {
            say(&Said::Round(round));
        }
    };
    let connected = part.connect(&mut meeting, Deadline::after(Duration::from_millis(args.arrive_ms)));
    match connected.and_then(|links| part.take(&mut meeting, links, on_round)) {
        Ok(mut summary) => {
            let verified = summary.verified;
            if let Some(folder) = &args.records {
                write_record(&spans_file(folder, rank), &std::mem::take(&mut summary.ops));
            }
            say(&Said::Report(summary));
            Box::new(meeting).leave();
            Ok(if verified { Answer::Yes } else { Answer::No })
        }
        Err(abort) => {
            ending.say_once(&abort);
            Ok(Answer::Code(2))
        }
    }
}

fn say(said: &Said) {
    let line = serde_json::to_string(said).expect("a report is made of numbers and text");
    // If nobody listens any more, the launcher is gone, and we soon are.
    let _ = output::print(&(line + "\n"));
}
