//! Where the ranks' words come together while a job trains: a line for people, a line of metrics, and what the report will show.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::Result;
use crossmesh_comm::clock::{Clock as _, Monotonic};
use crossmesh_comm::environment::now_ms;
use crossmesh_core::id::Rank;
use crossmesh_train::record::{StepRecord, StepTimes};

use crate::output::{self, Progress};

use super::events::EventFile;
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
    /// Operations of a step that the model needs, and how many all ranks could make in a second.
    pub operations: f64,
    pub operations_per_s: f64,
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
    events: Option<EventFile>,
    /// Of steps that are not complete yet.
    validation: BTreeMap<u64, f64>,
    /// When the report was last written, by the machine's clock.
    shown_ns: u64,
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
        state.validation.clear();
        if state.events.is_none() {
            state.events = Some(EventFile::create(path.parent().unwrap_or(Path::new(".")), now_s())?);
        }
        (state.file, state.done) = (Some(file), done);
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A rank is through with a step.
    pub fn hear(&self, note: StepNote) {
        let (rank, validation, record) = (note.rank, note.validation_loss, note.record());
        if !self.facts.ranks.contains(&rank) {
            return;
        }
        let mut state = self.state();
        let step = record.step;
        if let Some(loss) = validation {
            state.validation.insert(step, loss);
        }
        let heard = state.pending.entry(step).or_default();
        heard.insert(rank, record);
        if heard.len() == self.facts.ranks.len() {
            let records = state.pending.remove(&step).unwrap_or_default();
            self.complete(&mut state, records);
        }
    }

    fn complete(&self, state: &mut State, records: BTreeMap<Rank, StepRecord>) {
        let Some(mut metrics) = StepMetrics::of(&records, self.facts.batch, self.facts.tokens) else {
            return;
        };
        metrics.validation_loss = state.validation.remove(&(metrics.step - 1));
        metrics.mfu = self.facts.mfu(metrics.step_s);
        let written = [
            state.file.as_mut().map(|file| file.add(&metrics)),
            state.events.as_mut().map(|file| file.add(&metrics, now_s())),
        ];
        if let Some(error) = written.into_iter().flatten().find_map(Result::err) {
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
        } else if last.step == 1
            || last.step % self.facts.every == 0
            || last.step == self.facts.steps
            || last.validation_loss.is_some()
        {
            output::remark(&plain_line(&self.facts, done));
        }
    }

    /// The last step that all ranks are through with.
    pub fn steps(&self) -> u64 {
        self.state().done.last().map_or(0, |metrics| metrics.step)
    }

    /// What was seen so far, now and then: for a report that can be opened while it trains.
    pub fn seen_now_and_then(&self) -> Option<Seen> {
        let now = Monotonic.now_ns();
        let mut state = self.state();
        if state.done.is_empty() || (state.shown_ns > 0 && now - state.shown_ns < SHOWN_EVERY_NS) {
            return None;
        }
        state.shown_ns = now;
        Some(state.seen())
    }

    /// Clears the line; answers what was seen, or why it could not be written down.
    pub fn close(&self) -> Result<Seen> {
        self.progress.say("");
        let mut state = self.state();
        if let Some(error) = state.failed.take() {
            return Err(error);
        }
        Ok(state.seen())
    }
}

impl State {
    fn seen(&self) -> Seen {
        let mean = |(rank, (count, sum)): (&Rank, &(u64, StepTimes))| {
            (*rank, scaled(sum, 1.0 / (count.saturating_sub(1)).max(1) as f64))
        };
        let means = self.sums.iter().map(mean).collect();
        Seen { metrics: self.done.clone(), means, shown: self.shown.clone() }
    }
}

impl Facts {
    /// How much of what the ranks could compute the model needed.
    fn mfu(&self, step_s: f64) -> f64 {
        let possible = self.operations_per_s * step_s;
        if possible > 0.0 { self.operations / possible } else { 0.0 }
    }
}

/// By the world's clock.
fn now_s() -> f64 {
    now_ms() as f64 / 1e3
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
/// Between two reports of a run that trains.
const SHOWN_EVERY_NS: u64 = 10_000_000_000;

/// `step 120/400 loss 2.3450 · lr 1e-3 · norm 0.52 · 12.3k tokens/s · MFU 12 % · 0:42 left`
fn live_line(facts: &Facts, done: &[StepMetrics]) -> String {
    let Some(last) = done.last() else { return String::new() };
    let recent = Recent::of(facts, done);
    format!(
        "step {}/{} loss {} · {} · {} · MFU {} · {} left",
        last.step,
        facts.steps,
        loss_text(last.loss),
        rate_and_norm(last, " · "),
        speed_text(facts, recent.speed),
        percent(recent.mfu),
        clock_text(recent.left_s)
    )
}

fn plain_line(facts: &Facts, done: &[StepMetrics]) -> String {
    let Some(last) = done.last() else { return String::new() };
    let share = if last.step_s > 0.0 { last.exposed_comm_s / last.step_s } else { 0.0 };
    let width = facts.steps.to_string().len();
    let validation = last.validation_loss.map_or(String::new(), |loss| format!("  validation {loss:.4}"));
    format!(
        "step {:>width$}  loss {}{validation}  {}  {}  MFU {}  exposed {}  {} left",
        last.step,
        loss_text(last.loss),
        rate_and_norm(last, "  "),
        speed_text(facts, last.speed()),
        percent(last.mfu),
        percent(share),
        clock_text(Recent::of(facts, done).left_s)
    )
}

/// Of the last steps.
struct Recent {
    speed: f64,
    mfu: f64,
    left_s: f64,
}

impl Recent {
    fn of(facts: &Facts, done: &[StepMetrics]) -> Self {
        let recent = &done[done.len().saturating_sub(RECENT)..];
        let mean = |of: &dyn Fn(&StepMetrics) -> f64| {
            recent.iter().map(of).sum::<f64>() / recent.len().max(1) as f64
        };
        let left = facts.steps.saturating_sub(done.last().map_or(0, |last| last.step));
        Self {
            speed: mean(&StepMetrics::speed),
            mfu: mean(&|m| m.mfu),
            left_s: left as f64 * mean(&|m| m.step_s),
        }
    }
}

/// `lr 1.0e-3  norm 0.52`.
fn rate_and_norm(last: &StepMetrics, between: &str) -> String {
    let norm = last.grad_norm.map_or("not a number".into(), |norm| match norm {
        n if n != 0.0 && !(1e-2..1e3).contains(&n) => format!("{n:.1e}"),
        n => format!("{n:.2}"),
    });
    format!("lr {:.1e}{between}norm {norm}", last.learning_rate)
}

fn percent(share: f64) -> String {
    let percent = 100.0 * share;
    if percent > 0.0 && percent < 9.95 { format!("{percent:.1} %") } else { format!("{percent:.0} %") }
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
        Facts {
            ranks,
            steps: 10,
            batch: 8,
            tokens: Some(4),
            operations: 1e9,
            operations_per_s: 8e9,
            every: 5,
        }
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
        let with_mfu = |step| StepMetrics { mfu: facts().mfu(0.5), ..metrics(step) };
        let mut done: Vec<StepMetrics> = (1..=4).map(with_mfu).collect();
        assert_eq!(
            live_line(&facts(), &done),
            "step 4/10 loss 1.2500 · lr 1.0e-1 · norm 1.00 · 64.0 tokens/s · MFU 25 % · 0:03 left"
        );
        assert_eq!(
            plain_line(&facts(), &done),
            "step  4  loss 1.2500  lr 1.0e-1  norm 1.00  64.0 tokens/s  MFU 25 %  exposed 25 %  0:03 left"
        );
        done[3].validation_loss = Some(1.5);
        assert!(plain_line(&facts(), &done).starts_with("step  4  loss 1.2500  validation 1.5000  lr "));
        assert_eq!(clock_text(3723.0), "1:02:03");
        assert_eq!(speed_text(&facts(), 12345.0), "12.3k tokens/s");
        assert!(live_line(&facts(), &done).chars().count() < 90);
    }
}
