//! `crossmesh completions`: what a shell needs to complete our arguments.

use anyhow::Result;
use clap_complete::Shell;

use crate::Answer;
use crate::output;

/// Print the completion script of a shell.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  crossmesh completions bash > /etc/bash_completion.d/crossmesh
  crossmesh completions zsh > \"${fpath[1]}/_crossmesh\"")]
pub struct Args {
    shell: Shell,
}

pub fn run(args: &Args, mut command: clap::Command) -> Result<Answer> {
    // Into memory first: clap_complete panics when it cannot write.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "crossmesh", &mut script);
    output::print(&String::from_utf8_lossy(&script))?;
    Ok(Answer::Yes)
}
