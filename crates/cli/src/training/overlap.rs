//! What communication between stages costs a real step, and how much of it a schedule hides.
//!
//! Every series is the same job with another order of passes, or with communication that blocks. The one called `signal` sends a byte
//! where the others send a tensor: what it takes is what compute alone takes, and no order can be faster.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, bail};
use crossmesh_core::id::Rank;
use crossmesh_core::reshard::lower_bound;
use crossmesh_core::step::PassTimes;
use crossmesh_train::config::Config;
use crossmesh_train::record::StepRecord;

use super::Training;
use super::note::StepNote;
use super::timeline::{measured_times, predict};
use crate::output::Progress;
use crate::runner::{RunOptions, Work, run_work};
use crate::task::Task;

/// The first steps of a job find caches cold and connections slow.
const WARM_UP: usize = 2;

/// A way to run the same job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Series {
    pub name: &'static str,
    pub about: &'static str,
    schedule: &'static str,
    overlap: bool,
    signal: bool,
}

pub const SERIES: [Series; 5] = [
    Series {
        name: "no-overlap",
        about: "1F1B, and devices stand still while something moves",
        schedule: "1f1b",
        overlap: false,
        signal: false,
    },
    Series {
        name: "overlap",
        about: "1F1B, communication beside compute",
        schedule: "1f1b",
        overlap: true,
        signal: false,
    },
    Series {
        name: "eager-1f1b",
        about: "more microbatches in flight",
        schedule: "eager-1f1b",
        overlap: true,
        signal: false,
    },
    Series {
        name: "minimal-window",
        about: "as many in flight as hide the communication, W when there is time",
        schedule: "minimal-window",
        overlap: true,
        signal: false,
    },
    Series {
        name: "signal",
        about: "a byte in place of every tensor: compute alone",
        schedule: "1f1b",
        overlap: true,
        signal: true,
    },
];

/// Communication beside compute, as a job runs that nobody asked anything of.
pub const BESIDE: Series = SERIES[1];

/// A GPT of so many stages, each on a host of its own, a thread each.
pub fn config_of(stages: usize) -> String {
    let microbatches = 4 * stages;
    let mut text = format!(
        "[model]\nkind = \"gpt\"\ncontext = 128\nwidth = 256\nlayers = {}\nheads = 4\n\n\
         [data]\nkind = \"language\"\n\n\
         [train]\nbatch = {}\nmicrobatches = {microbatches}\nthreads = 1\n\n\
         [cluster]\ndevices_per_host = 1\n",
        3 * stages,
        4 * microbatches,
    );
    let _ = write!(text, "\n[[stage]]\nmesh = \"1\"\nlayers = 3\nrepeat = {stages}\n");
    text
}

/// A job to be run in several ways.
pub struct Bench<'a> {
    pub name: &'a str,
    pub text: &'a str,
    pub sets: &'a [String],
    pub steps: usize,
    pub options: &'a RunOptions,
}

/// What a series came to.
pub struct Ran {
    pub training: Training,
    /// Of every step but the first ones: as long as its slowest rank took.
    pub steps: Vec<f64>,
    /// The last step of every rank.
    pub last: BTreeMap<Rank, StepRecord>,
}

impl Ran {
    pub fn median_s(&self) -> f64 {
        let mut steps = self.steps.clone();
        steps.sort_by(f64::total_cmp);
        steps.get(steps.len() / 2).copied().unwrap_or(f64::NAN)
    }

    /// The last step: as long as its slowest rank took.
    pub fn last_s(&self) -> f64 {
        self.last.values().map(|record| record.times.step).fold(0.0, f64::max)
    }

    /// The mean over all ranks of something about their last step.
    pub fn mean(&self, of: impl Fn(&StepRecord) -> f64) -> f64 {
        self.last.values().map(of).sum::<f64>() / self.last.len().max(1) as f64
    }

    /// How long passes took.
    pub fn times(&self) -> Vec<PassTimes> {
        measured_times(self.training.wiring.step.times.len(), &self.last)
    }

    /// The share of a rank's time in which it stood still for something on its way, over all ranks.
    pub fn exposed(&self) -> f64 {
        self.mean(|r| r.times.exposed / r.times.step.max(f64::MIN_POSITIVE))
    }
}

impl Bench<'_> {
    /// Runs a series, with NICs of this rate.
    pub fn run(&self, series: Series, nic: &str, progress: &Progress) -> Result<Ran> {
        let notes: Arc<Mutex<Vec<StepNote>>> = Arc::default();
        let heard = Arc::clone(&notes);
        let mut training = self.training(series, nic)?;
        training.on_step =
            Arc::new(move |note| heard.lock().unwrap_or_else(PoisonError::into_inner).push(note));
        progress.say(&format!("{}: {} steps", series.name, self.steps));
        let work = Work {
            task: &Task::of_training(&training),
            document: training.document(),
            cluster: &training.resolved.job.cluster,
            topology: &training.topology,
            predicted_s: 0.0,
        };
        run_work(&work, self.options, progress).with_context(|| format!("the series {}", series.name))?;
        let notes = std::mem::take(&mut *notes.lock().unwrap_or_else(PoisonError::into_inner));
        let mut steps: BTreeMap<u64, f64> = BTreeMap::new();
        let mut last: BTreeMap<Rank, StepRecord> = BTreeMap::new();
        for note in notes {
            let (rank, record) = (note.rank, note.record());
            let longest = steps.entry(record.step).or_default();
            *longest = longest.max(record.times.step);
            last.insert(rank, record);
        }
        let steps: Vec<f64> = steps.into_values().skip(WARM_UP).collect();
        if steps.is_empty() {
            bail!("no step is left behind the first {WARM_UP}\nhint: ask for more: --steps");
        }
        Ok(Ran { training, steps, last })
    }

    fn training(&self, series: Series, nic: &str) -> Result<Training> {
        let sets = [
            format!("pipeline.schedule=\"{}\"", series.schedule),
            format!("train.overlap={}", series.overlap),
            format!("train.steps={}", self.steps + WARM_UP),
            "checkpoint.every=0".to_string(),
            "checkpoint.last=false".to_string(),
            "evaluate.every=0".to_string(),
        ];
        let sets = [self.sets, &sets[..]].concat();
        let config = Config::read(self.name, self.text, &sets)?;
        Training::open_as(config, Some(nic), None, series.signal, Arc::new(|_| {}))
    }
}

/// The rate at which the slowest edge takes `share` of the mean forward pass, given how long passes take.
pub fn nic_for(share: f64, ran: &Bench<'_>, times: &[PassTimes]) -> Result<String> {
    // Any rate will do to ask: the bound is inverse to it.
    const ASKED: f64 = 1e9;
    let training = ran.training(BESIDE, &format!("{ASKED}B/s"))?;
    let mut slowest: f64 = 0.0;
    for crossing in &training.wiring.step.crossings {
        slowest = slowest.max(lower_bound(&crossing.forward.problem)?.seconds);
    }
    let forward = times.iter().map(|t| t.f_ns as f64 * 1e-9).sum::<f64>() / times.len().max(1) as f64;
    if slowest <= 0.0 || forward <= 0.0 {
        bail!("nothing crosses between the stages of this job\nhint: give it two stages or more");
    }
    Ok(format!("{:.0}B/s", ASKED * slowest / (share * forward)))
}

/// What a series is predicted to take, where its passes take as long as they did.
pub fn predicted_s(ran: &Ran, times: &[PassTimes]) -> Result<f64> {
    Ok(predict(&ran.training, times.to_vec())?.report.step_s)
}
