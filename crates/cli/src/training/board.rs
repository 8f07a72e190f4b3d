//! Where the ranks' words come together while a job trains: a line for people, a line of metrics, and what the report will show.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::Result;
use crossmesh_core::id::Rank;
use crossmesh_train::record::{StepRecord, StepTimes};

use crate::output::{self, Progress};

use super::metrics::{MetricsFile, StepMetrics};
use super::note::StepNote;

/// What is known beforehand.
#[derive(Debug, Clone)]
pub struct Facts {
    /// Whose words make a step complete.
    pub ranks: Vec<Rank>,
    pub steps: u64,
    /// Samples of a step.
    pub batch: u64,
    /// Of a sample, where it is made of tokens.
    pub tokens: Option<usize>,
    /// Steps between two printed lines.
    pub every: u64,
}

/// See the module.
pub struct Board {
    pub facts: Facts,
    progress: Progress,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    file: Option<MetricsFile>,
    /// Steps that some ranks have told of.
    pending: BTreeMap<u64, BTreeMap<Rank, StepRecord>>,
    done: Vec<StepMetrics>,
    /// By rank, over the steps of this process: how many, and their sums.
    sums: BTreeMap<Rank, (u64, StepTimes)>,
    /// The latest step whose passes are known.
    shown: Option<BTreeMap<Rank, StepRecord>>,
    /// The first error in writing metrics.
    failed: Option<anyhow::Error>,
}

/// What came of a run.
pub struct Seen {
    pub metrics: Vec<StepMetrics>,
    /// By rank, the mean of a step's times, without the first step.
    pub means: BTreeMap<Rank, StepTimes>,
    pub shown: Option<BTreeMap<Rank, StepRecord>>,
}

impl Board {
    pub fn new(facts: Facts) -> Self {
        Self { facts, progress: Progress::new(), state: Mutex::default() }
    }

    /// Starts, or goes on, behind `steps` steps.
    pub fn open(&self, path: &Path, steps: u64) -> Result<()> {
        let (file, done) = MetricsFile::open(path, steps)?;
        let mut state = self.state();
        state.pending.clear();
        (state.file, state.done) = (Some(file), done);
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A rank is through with a step.
    pub fn hear(&self, note: StepNote) {
        let (rank, record) = (note.rank, note.record());
        if !self.facts.ranks.contains(&rank) {
            return;
        }
        let mut state = self.state();
        let step = record.step;
        let heard = state.pending.entry(step).or_default();
        heard.insert(rank, record);
        if heard.len() == self.facts.ranks.len() {
            let records = state.pending.remove(&step).unwrap_or_default();
            self.complete(&mut state, records);
        }
    }

    fn complete(&self, state: &mut State, records: BTreeMap<Rank, StepRecord>) {
        let Some(metrics) = StepMetrics::of(&records, self.facts.batch, self.facts.tokens) else { return };
        if let Some(Err(error)) = state.file.as_mut().map(|file| file.add(&metrics)) {
            state.failed.get_or_insert(error);
        }
        for (rank, record) in &records {
            let (count, sum) = state.sums.entry(*rank).or_default();
            // The first step of a process pays for memory that is touched for the first time.
            if *count == 1 {
                *sum = StepTimes::default();
            }
            *count += 1;
            add(sum, &record.times);
        }
        state.done.push(metrics);
        self.tell(&state.done);
        if records.values().all(|record| !record.passes.is_empty()) {
            state.shown = Some(records);
        }
    }

    fn tell(&self, done: &[StepMetrics]) {
        let Some(last) = done.last() else { return };
        if self.progress.is_shown() {
            self.progress.say(&live_line(&self.facts, done));
        } else if last.step == 1 || last.step % self.facts.every == 0 || last.step == self.facts.steps {
            output::remark(&plain_line(&self.facts, last));
        }
    }

    /// The last step that all ranks are through with.
    pub fn steps(&self) -> u64 {
        self.state().done.last().map_or(0, |metrics| metrics.step)
    }

    /// Clears the line; answers what was seen, or why it could not be written down.
    pub fn close(&self) -> Result<Seen> {
        self.progress.say("");
        let mut state = self.state();
        if let Some(error) = state.failed.take() {
            return Err(error);
        }
        let mean = |(rank, (count, sum)): (&Rank, &(u64, StepTimes))| {
            (*rank, scaled(sum, 1.0 / (count.saturating_sub(1)).max(1) as f64))
        };
        let means = state.sums.iter().map(mean).collect();
        Ok(Seen { metrics: state.done.clone(), means, shown: state.shown.clone() })
    }
}

fn add(sum: &mut StepTimes, times: &StepTimes) {
    sum.step += times.step;
    sum.compute += times.compute;
    sum.exposed += times.exposed;
    sum.bubble += times.bubble;
    sum.optimizer += times.optimizer;
}

fn scaled(sum: &StepTimes, by: f64) -> StepTimes {
    StepTimes {
        step: sum.step * by,
        compute: sum.compute * by,
        exposed: sum.exposed * by,
        bubble: sum.bubble * by,
        optimizer: sum.optimizer * by,
    }
}

/// Steps whose mean tells how fast it is going.
const RECENT: usize = 20;
const BAR: u64 = 12;

/// `step 120/400 ████░░░░ loss 2.345 · 12.3k tokens/s · exposed 8 % · 0:42 left`
fn live_line(facts: &Facts, done: &[StepMetrics]) -> String {
    let Some(last) = done.last() else { return String::new() };
    let recent = &done[done.len().saturating_sub(RECENT)..];
    let seconds: f64 = recent.iter().map(|m| m.step_s).sum();
    let exposed: f64 = recent.iter().map(|m| m.exposed_comm_s).sum();
    let left = facts.steps.saturating_sub(last.step) as f64 * seconds / recent.len() as f64;
    let speed = recent.iter().map(StepMetrics::speed).sum::<f64>() / recent.len() as f64;
    let full = (BAR * last.step).checked_div(facts.steps).unwrap_or(0).min(BAR);
    let bar = "█".repeat(full as usize) + &"░".repeat((BAR - full) as usize);
    let share = if seconds > 0.0 { 100.0 * exposed / seconds } else { 0.0 };
    format!(
        "step {}/{} {bar} loss {} · {} · exposed {share:.0} % · {} left",
        last.step,
        facts.steps,
        loss_text(last.loss),
        speed_text(facts, speed),
        clock_text(left)
    )
}

fn plain_line(facts: &Facts, last: &StepMetrics) -> String {
    let share = if last.step_s > 0.0 { 100.0 * last.exposed_comm_s / last.step_s } else { 0.0 };
    let width = facts.steps.to_string().len();
    format!(
        "step {:>width$}  loss {}  {}  exposed {share:.0} %",
        last.step,
        loss_text(last.loss),
        speed_text(facts, last.speed())
    )
}

pub fn loss_text(loss: Option<f64>) -> String {
    loss.map_or("not a number".into(), |loss| format!("{loss:.4}"))
}

/// `12.3k tokens/s`.
pub fn speed_text(facts: &Facts, speed: f64) -> String {
    let what = if facts.tokens.is_some() { "tokens/s" } else { "samples/s" };
    let (number, letter) = match speed {
        s if s >= 1e6 => (s / 1e6, "M"),
        s if s >= 1e3 => (s / 1e3, "k"),
        s => (s, ""),
    };
    let digits = if number >= 100.0 { 0 } else { 1 };
    format!("{number:.digits$}{letter} {what}")
}

/// `1:02:03`, `0:42`.
pub fn clock_text(seconds: f64) -> String {
    let all = seconds.max(0.0).round() as u64;
    let (h, m, s) = (all / 3600, all / 60 % 60, all % 60);
    if h > 0 { format!("{h}:{m:02}:{s:02}") } else { format!("{m}:{s:02}") }
}

#[cfg(test)]
mod tests {
    use super::super::metrics::tests::{metrics, record};
    use super::*;

    fn facts() -> Facts {
        let ranks = vec![Rank(0), Rank(1)];
        Facts { ranks, steps: 10, batch: 8, tokens: Some(4), every: 5 }
    }

    fn note(rank: u32, step: u64, seconds: f64) -> StepNote {
        StepNote::new(Rank(rank), &record(step, 1.5, seconds), true)
    }

    #[test]
    fn a_step_is_complete_when_all_ranks_have_told() {
        let folder = tempfile::tempdir().unwrap();
        let board = Board::new(facts());
        board.open(&folder.path().join("metrics.jsonl"), 0).unwrap();
        board.hear(note(0, 0, 1.0));
        board.hear(note(0, 1, 1.0));
        board.hear(note(7, 0, 1.0));
        assert_eq!(board.steps(), 0, "a rank that nobody knows does not count");
        board.hear(note(1, 0, 9.0));
        assert_eq!(board.steps(), 1);
        board.hear(note(1, 1, 3.0));
        let seen = board.close().unwrap();
        assert_eq!(seen.metrics.iter().map(|m| m.step).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(seen.means[&Rank(1)].step, 3.0, "without the first step");
    }

    #[test]
    fn lines_for_people() {
        let done: Vec<StepMetrics> = (1..=4).map(metrics).collect();
        assert_eq!(
            live_line(&facts(), &done),
            "step 4/10 ████░░░░░░░░ loss 1.2500 · 64.0 tokens/s · exposed 25 % · 0:03 left"
        );
        assert_eq!(plain_line(&facts(), &done[3]), "step  4  loss 1.2500  64.0 tokens/s  exposed 25 %");
        assert_eq!(clock_text(3723.0), "1:02:03");
        assert_eq!(speed_text(&facts(), 12345.0), "12.3k tokens/s");
        assert!(live_line(&facts(), &done).chars().count() < 80);
    }
}
