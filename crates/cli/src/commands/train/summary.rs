//! What came of a run: a few lines for people, or a document.

use std::path::{Path, PathBuf};

use anyhow::Result;
use crossmesh_core::id::Rank;
use crossmesh_core::units::{Bytes, Seconds};
use serde::Serialize;

use crate::runner::Measured;
use crate::training::board::{Facts, Seen, loss_text, speed_text};
use crate::training::metrics::{StepMetrics, TAIL, final_loss};
use crate::training::steps::StepSpread;
use crate::training::{Training, dry};

/// What came of it, as JSON.
#[derive(Debug, Serialize)]
pub struct Summary {
    schema: &'static str,
    name: String,
    ranks: usize,
    /// Done, in this run and those it went on from.
    pub steps: u64,
    /// From which step this run went on.
    resumed_at: u64,
    restarts: u32,
    /// Steps whose loss or norm was not finite, which changed nothing.
    skipped: usize,
    first_loss: Option<f64>,
    /// The final one: the mean of the last ten steps'.
    pub loss: Option<f64>,
    reachable_loss: Option<f64>,
    seconds: f64,
    /// The mean.
    step_s: f64,
    steps_s: Option<StepSpread>,
    samples_per_s: f64,
    tokens_per_s: Option<f64>,
    compute: f64,
    exposed_comm: f64,
    bubble: f64,
    optimizer: f64,
    /// Of every rank whose process the system tells about.
    pub memory: Vec<Memory>,
    metrics: PathBuf,
    report: PathBuf,
}

/// The most memory of a rank's process, and the weights, gradients, moments, activations and crossings it was predicted to hold.
#[derive(Debug, Serialize)]
pub struct Memory {
    rank: u32,
    peak_rss_bytes: u64,
    predicted_bytes: u64,
}

/// What every rank had, beside what it was predicted to hold.
pub fn memory(training: &Training, measured: &Measured) -> Result<Vec<Memory>> {
    let of = |(rank, peak): &(Rank, u64)| -> Result<Memory> {
        let predicted_bytes = dry::memory(training, *rank)?.sum();
        Ok(Memory { rank: rank.0, peak_rss_bytes: *peak, predicted_bytes })
    };
    measured.peak_rss.iter().map(of).collect()
}

pub fn summary(
    training: &Training,
    seen: &Seen,
    resumed_at: u64,
    restarts: u32,
    (metrics, report): (PathBuf, PathBuf),
) -> Summary {
    let own: Vec<_> = seen.metrics.iter().filter(|m| m.step > resumed_at).collect();
    let mean =
        |of: &dyn Fn(&StepMetrics) -> f64| own.iter().map(|m| of(m)).sum::<f64>() / own.len().max(1) as f64;
    let step_s = mean(&|m| m.step_s);
    let share = |seconds: f64| if step_s > 0.0 { seconds / step_s } else { 0.0 };
    Summary {
        schema: "crossmesh.train-summary/1",
        name: training.doc.name.clone(),
        ranks: training.resolved.job.ranks().len(),
        steps: own.last().map_or(resumed_at, |m| m.step),
        resumed_at,
        restarts,
        skipped: own.iter().filter(|m| m.not_finite.is_some()).count(),
        first_loss: own.first().and_then(|m| m.loss),
        loss: final_loss(own.iter().copied()),
        reachable_loss: training.data.reachable_loss(),
        seconds: own.iter().map(|m| m.step_s).sum(),
        step_s,
        steps_s: StepSpread::of(own.iter().copied()),
        samples_per_s: mean(&|m| m.samples_per_s),
        tokens_per_s: training.tokens().map(|_| mean(&|m| m.speed())),
        compute: share(mean(&|m| m.compute_s)),
        exposed_comm: share(mean(&|m| m.exposed_comm_s)),
        bubble: share(mean(&|m| m.bubble_s)),
        optimizer: share(mean(&|m| m.optimizer_s)),
        memory: vec![],
        metrics,
        report,
    }
}

pub fn render(summary: &Summary, facts: &Facts) -> String {
    let percent = |share: f64| format!("{:.0} %", 100.0 * share);
    let reachable = match (summary.loss, summary.reachable_loss) {
        (Some(loss), Some(best)) if best > 0.0 => {
            format!("; {:.1} % above the best possible, {best:.4}", 100.0 * (loss / best - 1.0))
        }
        _ => String::new(),
    };
    let mean = || Seconds(summary.step_s).to_string();
    let steps = summary.steps_s.as_ref().map_or_else(mean, StepSpread::text);
    let outliers = summary.steps_s.as_ref().and_then(StepSpread::outliers);
    let outliers = outliers.map_or_else(String::new, |text| format!("held up    {text}\n"));
    let skipped = match summary.skipped {
        0 => String::new(),
        count => format!("skipped    {count} of the steps, whose loss or gradient norm was not finite\n"),
    };
    format!(
        "loss       {} → {}, the mean of the last {TAIL} steps{reachable}\n\
         {skipped}\
         step       {steps}; {}\n\
         {outliers}\
         time       compute {}, exposed communication {}, bubble {}, optimizer {}\n\
         memory     {}\n\
         report     {}\n\
         trained {} to step {} in {}\n",
        loss_text(summary.first_loss),
        loss_text(summary.loss),
        speed_text(facts, summary.tokens_per_s.unwrap_or(summary.samples_per_s)),
        percent(summary.compute),
        percent(summary.exposed_comm),
        percent(summary.bubble),
        percent(summary.optimizer),
        memory_text(&summary.memory),
        shown(&summary.report),
        summary.name,
        summary.steps,
        Seconds(summary.seconds),
    )
}

/// The rank that had the most beyond what was predicted.
fn memory_text(memory: &[Memory]) -> String {
    let beyond = |m: &Memory| m.peak_rss_bytes.saturating_sub(m.predicted_bytes);
    match memory.iter().max_by_key(|m| beyond(m)) {
        Some(most) => format!(
            "{} of r{}'s process, {} beyond what was predicted to be held",
            Bytes(most.peak_rss_bytes),
            most.rank,
            Bytes(beyond(most))
        ),
        None => "the system does not tell".into(),
    }
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}
