//! The command `crossmesh`: talks to people and files, and leaves every decision to `crossmesh-core`. A library, so that the Python package
//! says the same in the same words.
//!
//! ```text
//! arguments -> input (files, notation) -> core (plan, verify, simulate) -> summary -> text, JSON, HTML
//! ```
//!
//! Answers go to stdout, everything else to stderr. Exit 0: yes. 1: the answer is no. 2: could not do it.

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::OnceLock;

use clap::{CommandFactory, Parser, Subcommand};

use predict::Prediction;

mod chrome;
mod commands;
mod files;
mod handed;
mod hints;
pub mod input;
mod joined;
mod known;
mod links;
mod machine;
mod memory;
mod output;
mod part;
mod path;
mod picture;
mod pipeline;
pub mod predict;
mod rates;
mod records;
#[cfg(test)]
mod reference;
mod replay;
mod report;
mod runner;
mod suite;
mod summary;
mod sweep_doc;
mod talk;
mod task;
mod tensors;
mod timetable;
mod trace_doc;
mod training;
mod verdict;

/// What `crossmesh explain` prints about a plan.
pub fn explained(prediction: &Prediction) -> String {
    commands::explain::render(prediction)
}

/// The report of a plan as one HTML page; the footer says where it came from.
pub fn page(prediction: &Prediction, provenance: Vec<String>) -> String {
    report::plan::render(prediction, provenance)
}

/// What `crossmesh simulate` finds out: a plan that was proven, on another cluster.
pub mod simulation {
    pub use crate::chrome::render as trace;
    pub use crate::commands::simulate::{document, predict_on, render};
}

/// What a command found out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Yes,
    No,
    /// A program that was started for somebody ended with this code.
    Code(u8),
}

/// Move sharded tensors between device meshes, and train models across them: plan, prove, predict, run.
#[derive(Debug, Parser)]
#[command(name = "crossmesh", version, propagate_version = true)]
#[command(after_help = "Exit status: 0 yes, 1 no (a check failed, documents differ), 2 could not do it.
Words such as bound, lane, window, exposed, signal, B and W: docs/glossary.md.

Examples:
  # train a small GPT on four processes
  crossmesh train examples/gpt-mini.toml
  # who sends what to whom when a tensor changes its mesh, and how long it takes
  crossmesh explain 'f32[8,6]@A{tp:2}(tp,_)' 'f32[8,6]@B{tp:3}(_,tp)'
  # pipeline schedules beside each other
  crossmesh schedule compare --stages 8 --microbatches 32
  # a command's own help
  crossmesh help train")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    // In the order of the help: what most people come for is first.
    Train(commands::train::Args),
    Explain(commands::explain::Args),
    Run(commands::run::Args),
    Schedule(commands::schedule::Args),
    Bench(commands::bench::Args),
    Checkpoint(commands::checkpoint::Args),
    Generate(commands::generate::Args),
    Data(commands::data::Args),
    Plan(commands::plan::Args),
    Verify(commands::verify::Args),
    Simulate(commands::simulate::Args),
    Diff(commands::diff::Args),
    Launch(commands::launch::Args),
    #[command(hide = true)]
    Rank(commands::rank::Args),
    Completions(commands::completions::Args),
}

/// Runs the command line that the process was started with.
pub fn main() -> ExitCode {
    ExitCode::from(main_with(std::env::args_os()))
}

/// Set where the process is not the command's own program.
static AGAIN: OnceLock<Vec<OsString>> = OnceLock::new();

/// Says how this very command is started, for the ranks of a run: a program and its first arguments. The first word counts.
pub fn started_by(words: Vec<OsString>) {
    let _earlier = AGAIN.set(words);
}

/// The program that is this command, and its first arguments.
fn again() -> std::io::Result<(OsString, Vec<OsString>)> {
    match AGAIN.get().and_then(|words| words.split_first()) {
        Some((program, arguments)) => Ok((program.clone(), arguments.to_vec())),
        None => Ok((std::env::current_exe()?.into(), vec![])),
    }
}

/// Runs a command line, whose first word is what the command is called, and returns the exit status.
pub fn main_with(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    crossmesh_comm::launch::survive_file_limits();
    // From now on we know whether we were stopped.
    let _ = crossmesh_comm::launch::continued_ns();
    let words: Vec<OsString> = arguments.into_iter().collect();
    let cli = Cli::try_parse_from(&words).unwrap_or_else(|error| hints::better(error, &words).exit());
    if !matches!(cli.command, Command::Launch(_)) {
        // Programs of others that we start keep the limits that their user gave them.
        crossmesh_comm::limits::raise_descriptor_limit();
    }
    let answer = match cli.command {
        Command::Explain(args) => commands::explain::run(&args),
        Command::Plan(args) => commands::plan::run(&args),
        Command::Verify(args) => commands::verify::run(&args),
        Command::Simulate(args) => commands::simulate::run(&args),
        Command::Diff(args) => commands::diff::run(&args),
        Command::Bench(args) => commands::bench::run(&args),
        Command::Schedule(args) => commands::schedule::run(&args),
        Command::Data(args) => commands::data::run(&args),
        Command::Run(args) => commands::run::run(args),
        Command::Train(args) => commands::train::run(&args),
        Command::Generate(args) => commands::generate::run(&args),
        Command::Rank(args) => commands::rank::run(&args),
        Command::Launch(args) => commands::launch::run(&args),
        Command::Checkpoint(args) => commands::checkpoint::run(&args),
        Command::Completions(args) => commands::completions::run(&args, Cli::command()),
    };
    joined::leave(answer.is_ok());
    match answer {
        Ok(Answer::Yes) => 0,
        Ok(Answer::No) => 1,
        Ok(Answer::Code(code)) => code,
        Err(error) => {
            output::print_error(&error);
            2
        }
    }
}
