//! All of it, as `crossmesh bench kernels` runs it.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;

use serde::Serialize;

use super::bench::{self, Timed};
use super::{Checked, Lab, Random, boxes, check, products};
use crate::cuda::Cuda;
use crate::cuda::lt::{Choice, Products};
use crate::cuda::ops::Queue;
use crate::{CudaError, Gpu};

/// What to do.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Random sizes that every kernel is held against the reference with; none: nothing is checked.
    pub checks: usize,
    /// Whether to time.
    pub times: bool,
    pub seed: u64,
    /// Where choices of algorithms are kept.
    pub choices: Option<PathBuf>,
}

/// What was found.
#[derive(Debug, Clone, Serialize)]
pub struct Found {
    pub card: String,
    pub wrong: Vec<String>,
    pub checks: usize,
    pub timed: Vec<Timed>,
}

impl Found {
    pub fn is_right(&self) -> bool {
        self.wrong.is_empty()
    }
}

/// Runs on the card of that number, and tells what is found as it is found.
pub fn run(ordinal: usize, options: &Options, mut say: impl FnMut(&str)) -> Result<Found, CudaError> {
    let gpu = Gpu::open(ordinal)?;
    let cuda = Arc::new(Cuda::open(ordinal)?);
    let card = gpu.card().clone();
    say(&format!(
        "{}, compute capability {}.{}, {} multiprocessors",
        card.name, card.capability.0, card.capability.1, card.multiprocessors
    ));
    let partial = Arc::new(gpu.allocate(64 << 20, false)?);
    let workspace = Arc::new(gpu.allocate(64 << 20, false)?);
    let mut lab = Lab { cuda: &cuda, queue: Queue::new(&cuda, &partial)?, random: Random(options.seed) };
    let products = Products::new(&cuda, &workspace, Choice::Timed, options.choices.as_deref());
    let mut found = Found { card: card.name, wrong: vec![], checks: 0, timed: vec![] };
    if options.checks > 0 {
        let mut checked = boxes::all(&mut lab, options.checks * 60)?;
        checked.extend(check::all(&mut lab, options.checks)?);
        if let Ok(products) = &products {
            checked.extend(products::all(&mut lab, products));
        }
        for one in &checked {
            say(&one.to_string());
        }
        found.checks = checked.len();
        found.wrong = checked.iter().filter(|c| !c.is_right()).map(Checked::to_string).collect();
    }
    if options.times {
        found.timed = bench::kernels(&lab)?;
        found.timed.iter().for_each(|timed| say(&timed.to_string()));
    }
    if let (true, Ok(products)) = (options.times, &products) {
        let timed = bench::products(&lab, products)?;
        timed.iter().for_each(|timed| say(&timed.to_string()));
        found.timed.extend(timed);
    }
    if let Err(error) = products {
        say(&format!("no products: {error}"));
    }
    let mut last = String::new();
    let _ = write!(last, "{} of {} checks right", found.checks - found.wrong.len(), found.checks);
    say(&last);
    Ok(found)
}
