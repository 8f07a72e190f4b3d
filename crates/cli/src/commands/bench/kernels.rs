//! `crossmesh bench kernels`: every kernel on a GPU, held against f64 and timed against what the card does at best.

use anyhow::{Result, bail};

use crate::Answer;
use crate::output::FormatArgs;

/// Every CUDA kernel: right, and how fast, beside what the card's memory or its matrix units do.
#[derive(Debug, clap::Args)]
#[command(after_help = "Needs a build with the feature `cuda`, and a GPU.

Examples:
  crossmesh bench kernels
  crossmesh bench kernels --checks 3 --no-times      # under compute-sanitizer
  crossmesh bench kernels --checks 0 --format json")]
pub struct KernelsArgs {
    /// Which GPU
    #[arg(long, value_name = "N", default_value_t = 0)]
    gpu: usize,
    /// Random sizes to hold every kernel against f64 with
    #[arg(long, value_name = "N", default_value_t = 6)]
    checks: usize,
    /// Check only
    #[arg(long)]
    no_times: bool,
    /// For the sizes and the numbers
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Where the fastest algorithm of every product is kept
    #[arg(long, value_name = "FILE")]
    choices: Option<std::path::PathBuf>,
    #[command(flatten)]
    format: FormatArgs,
}

#[cfg(feature = "cuda")]
pub fn run(args: &KernelsArgs) -> Result<Answer> {
    use crate::output::{self, Format};
    use crossmesh_cuda::cuda::lab::run::{Options, run};
    let options = Options {
        checks: args.checks,
        times: !args.no_times,
        seed: args.seed,
        choices: args.choices.clone(),
    };
    let mut text = String::new();
    let found = run(args.gpu, &options, |line| {
        text.push_str(line);
        text.push('\n');
    });
    let found = match found {
        Ok(found) => found,
        Err(error) => bail!("{error}"),
    };
    match args.format.get() {
        Format::Text => output::print(&text)?,
        Format::Json => output::print_json(&found)?,
    }
    Ok(if found.is_right() { Answer::Yes } else { Answer::No })
}

#[cfg(not(feature = "cuda"))]
pub fn run(args: &KernelsArgs) -> Result<Answer> {
    let KernelsArgs { gpu, checks, no_times, seed, choices, format } = args;
    let _unused = (gpu, checks, no_times, seed, choices, format);
    bail!("{}", crossmesh_cuda::CudaError::NotBuilt)
}
