//! metrics.jsonl: a line a step (docs/train-config.md has the fields).

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use crossmesh_core::id::Rank;
use crossmesh_train::record::StepRecord;
use serde::{Deserialize, Serialize};

use crate::files;

/// A step, over all ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Steps done: the first one is 1.
    pub step: u64,
    /// Missing where it is not a number.
    pub loss: Option<f64>,
    /// Over what is held out, behind this step; where it was looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
    pub grad_norm: Option<f64>,
    pub learning_rate: f64,
    /// What was not finite about it, such as `loss NaN`: the step changed no weight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_finite: Option<String>,
    pub samples_per_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_s: Option<f64>,
    /// Operations that the model needs, without what is computed again, over those that `cluster.flops` allows.
    #[serde(default)]
    pub mfu: f64,
    pub step_s: f64,
    pub compute_s: f64,
    pub exposed_comm_s: f64,
    pub bubble_s: f64,
    pub optimizer_s: f64,
    pub bytes_sent: u64,
    /// The most that a rank held of its microbatches.
    pub activation_bytes: u64,
}

impl StepMetrics {
    /// From what the ranks saw; `batch` samples of `tokens` each. What more is known of the step is for others to say.
    pub fn of(records: &BTreeMap<Rank, StepRecord>, batch: u64, tokens: Option<usize>) -> Option<Self> {
        let first = records.values().next()?;
        let mean =
            |of: &dyn Fn(&StepRecord) -> f64| records.values().map(of).sum::<f64>() / records.len() as f64;
        let step_s = records.values().map(|r| r.times.step).fold(0.0, f64::max);
        let samples_per_s = if step_s > 0.0 { batch as f64 / step_s } else { 0.0 };
        let finite = |value: f64| Some(value).filter(|v| v.is_finite());
        Some(Self {
            step: first.step + 1,
            loss: finite(first.loss),
            validation_loss: None,
            grad_norm: finite(first.grad_norm),
            learning_rate: first.learning_rate,
            not_finite: first.skipped.then(|| not_finite(first)),
            samples_per_s,
            tokens_per_s: tokens.map(|tokens| samples_per_s * tokens as f64),
            mfu: 0.0,
            step_s,
            compute_s: mean(&|r| r.times.compute),
            exposed_comm_s: mean(&|r| r.times.exposed),
            bubble_s: mean(&|r| r.times.bubble),
            optimizer_s: mean(&|r| r.times.optimizer),
            bytes_sent: records.values().map(|r| r.bytes_sent).sum(),
            activation_bytes: records.values().map(|r| r.activation_bytes).max().unwrap_or(0),
        })
    }

    /// Tokens, or samples where there are none, a second.
    pub fn speed(&self) -> f64 {
        self.tokens_per_s.unwrap_or(self.samples_per_s)
    }
}

/// The final loss is a mean over so many steps: one batch is easy, another hard.
pub const TAIL: usize = 10;

/// The final loss of a run, wherever it is told.
pub fn final_loss<'a>(metrics: impl DoubleEndedIterator<Item = &'a StepMetrics>) -> Option<f64> {
    let tail: Vec<f64> = metrics.rev().filter_map(|m| m.loss).take(TAIL).collect();
    (!tail.is_empty()).then(|| tail.iter().sum::<f64>() / tail.len() as f64)
}

/// `loss NaN, gradient norm inf`.
fn not_finite(record: &StepRecord) -> String {
    let named = [("loss", record.loss), ("gradient norm", record.grad_norm)];
    let bad = named.iter().filter(|(_, value)| !value.is_finite());
    bad.map(|(name, value)| format!("{name} {value}")).collect::<Vec<_>>().join(", ")
}

/// The file, open.
#[derive(Debug)]
pub struct MetricsFile {
    path: PathBuf,
    file: File,
}

impl MetricsFile {
    /// Goes on behind the first `steps` steps, which it also answers; what came after them is dropped.
    pub fn open(path: &Path, steps: u64) -> Result<(Self, Vec<StepMetrics>)> {
        let old = if steps > 0 { read(path)? } else { vec![] };
        let kept: Vec<StepMetrics> = old.into_iter().filter(|m| m.step <= steps).collect();
        let lines: String = kept.iter().map(line).collect();
        files::write(path, &lines)?;
        let opened = OpenOptions::new().append(true).open(path);
        let file = opened.with_context(|| format!("cannot write {}", path.display()))?;
        Ok((Self { path: path.into(), file }, kept))
    }

    pub fn add(&mut self, metrics: &StepMetrics) -> Result<()> {
        let written = self.file.write_all(line(metrics).as_bytes()).map_err(files::with_hint);
        written.with_context(|| format!("cannot write {}", self.path.display()))
    }
}

fn line(metrics: &StepMetrics) -> String {
    serde_json::to_string(metrics).expect("metrics are made of numbers") + "\n"
}

/// The lines of a file; none where there is no file. A last line that was cut off is left out.
fn read(path: &Path) -> Result<Vec<StepMetrics>> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(vec![]),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    let parse = |(i, line): (usize, &str)| {
        serde_json::from_str(line)
            .with_context(|| format!("{}:{}: not a line of metrics", path.display(), i + 1))
    };
    whole.enumerate().map(parse).collect()
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crossmesh_train::record::StepTimes;

    pub fn record(step: u64, loss: f64, seconds: f64) -> StepRecord {
        let part = seconds / 4.0;
        StepRecord {
            step,
            loss,
            grad_norm: 1.0,
            learning_rate: 0.1,
            skipped: !loss.is_finite(),
            times: StepTimes {
                step: seconds,
                compute: 2.0 * part,
                exposed: part,
                bubble: part,
                optimizer: 0.0,
            },
            bytes_sent: 10,
            bytes_received: 10,
            activation_bytes: 20,
            peaks: vec![],
            passes: vec![],
        }
    }

    pub fn metrics(step: u64) -> StepMetrics {
        let records = [(Rank(0), record(step - 1, 5.0 / step as f64, 0.5))].into();
        StepMetrics::of(&records, 8, Some(4)).unwrap()
    }

    #[test]
    fn a_step_takes_as_long_as_its_slowest_rank() {
        let records = [(Rank(0), record(6, 2.0, 1.0)), (Rank(1), record(6, 2.0, 2.0))].into();
        let metrics = StepMetrics::of(&records, 8, Some(4)).unwrap();
        assert_eq!((metrics.step, metrics.step_s, metrics.compute_s), (7, 2.0, 0.75));
        assert_eq!((metrics.samples_per_s, metrics.tokens_per_s), (4.0, Some(16.0)));
        assert_eq!(metrics.bytes_sent, 20);
        assert_eq!(StepMetrics::of(&BTreeMap::new(), 8, None), None);
    }

    #[test]
    fn a_resumed_run_goes_on_behind_its_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let (mut file, old) = MetricsFile::open(&path, 0).unwrap();
        assert!(old.is_empty());
        (1..=5).for_each(|step| file.add(&metrics(step)).unwrap());
        // A run that died while it wrote.
        std::fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"step\":6,").unwrap();
        let (mut file, old) = MetricsFile::open(&path, 3).unwrap();
        assert_eq!(old.iter().map(|m| m.step).collect::<Vec<_>>(), [1, 2, 3]);
        file.add(&metrics(4)).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 4);
        let (_, old) = MetricsFile::open(&path, 0).unwrap();
        assert!(
            old.is_empty() && std::fs::read_to_string(&path).unwrap().is_empty(),
            "a new run starts anew"
        );
    }
}
