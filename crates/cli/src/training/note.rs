//! What a rank says after every step: a line of JSON to whoever started it.

use crossmesh_core::id::Rank;
use crossmesh_train::record::{PassSpan, Peak, StepRecord, StepTimes};
use serde::{Deserialize, Serialize};

/// A [`StepRecord`] on its way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepNote {
    pub rank: Rank,
    /// From 0.
    step: u64,
    #[serde(with = "finite")]
    loss: f64,
    #[serde(with = "finite")]
    grad_norm: f64,
    learning_rate: f64,
    #[serde(default)]
    skipped: bool,
    /// Over what is held out, where it was looked at behind this step.
    #[serde(default)]
    pub validation_loss: Option<f64>,
    /// The whole step, compute, exposed, bubble, optimizer.
    times: [f64; 5],
    bytes_sent: u64,
    bytes_received: u64,
    activation_bytes: u64,
    peaks: Vec<(u32, usize, u64)>,
    #[serde(default)]
    passes: Vec<(String, f64, f64, f64)>,
}

/// A line has to be shorter than a pipe's reader takes: later passes of very long steps are left out.
const MAX_PASSES: usize = 1000;

impl StepNote {
    /// Of a step; with its passes, if they will be shown.
    pub fn new(rank: Rank, record: &StepRecord, with_passes: bool) -> Self {
        let StepTimes { step, compute, exposed, bubble, optimizer } = record.times;
        let passes = record.passes.iter().take(if with_passes { MAX_PASSES } else { 0 });
        let micro = |seconds: f64| (seconds * 1e6).round() / 1e6;
        Self {
            rank,
            step: record.step,
            loss: record.loss,
            grad_norm: record.grad_norm,
            learning_rate: record.learning_rate,
            skipped: record.skipped,
            validation_loss: None,
            times: [step, compute, exposed, bubble, optimizer],
            bytes_sent: record.bytes_sent,
            bytes_received: record.bytes_received,
            activation_bytes: record.activation_bytes,
            peaks: record.peaks.iter().map(|p| (p.stage, p.microbatches, p.bytes)).collect(),
            passes: passes.map(|p| (p.pass.clone(), micro(p.start), micro(p.end), micro(p.waited))).collect(),
        }
    }

    pub fn record(self) -> StepRecord {
        let [step, compute, exposed, bubble, optimizer] = self.times;
        let peak = |(stage, microbatches, bytes)| Peak { stage, microbatches, bytes };
        let span = |(pass, start, end, waited)| PassSpan { pass, start, end, waited };
        StepRecord {
            step: self.step,
            loss: self.loss,
            grad_norm: self.grad_norm,
            learning_rate: self.learning_rate,
            skipped: self.skipped,
            times: StepTimes { step, compute, exposed, bubble, optimizer },
            bytes_sent: self.bytes_sent,
            bytes_received: self.bytes_received,
            activation_bytes: self.activation_bytes,
            peaks: self.peaks.into_iter().map(peak).collect(),
            passes: self.passes.into_iter().map(span).collect(),
        }
    }
}

/// JSON has no word for what is not finite: a text, `"inf"` or `"NaN"`.
mod finite {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    #[serde(untagged)]
    enum Written {
        Number(f64),
        Text(String),
    }

    pub fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        let written =
            if value.is_finite() { Written::Number(*value) } else { Written::Text(value.to_string()) };
        written.serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        match Written::deserialize(deserializer)? {
            Written::Number(value) => Ok(value),
            Written::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_says_what_the_record_says() {
        let record = StepRecord {
            step: 3,
            loss: 0.1 + 0.2,
            grad_norm: f64::INFINITY,
            learning_rate: 1e-3,
            skipped: true,
            times: StepTimes { step: 1.0, compute: 0.5, exposed: 0.25, bubble: 0.125, optimizer: 0.125 },
            bytes_sent: 7,
            bytes_received: 8,
            activation_bytes: 9,
            peaks: vec![Peak { stage: 1, microbatches: 2, bytes: 3 }],
            passes: vec![PassSpan { pass: "0F3".into(), start: 0.25, end: 0.5, waited: 0.125 }],
        };
        let line = serde_json::to_string(&StepNote::new(Rank(2), &record, true)).unwrap();
        let heard: StepNote = serde_json::from_str(&line).unwrap();
        assert_eq!(heard.rank, Rank(2));
        let again = heard.record();
        assert_eq!(
            (again.grad_norm, again.skipped),
            (f64::INFINITY, true),
            "JSON has no word for it, and a text has"
        );
        assert_eq!(again.loss, record.loss, "to the last bit");
        assert_eq!((&again.passes, &again.peaks, again.times), (&record.passes, &record.peaks, record.times));
        assert!(StepNote::new(Rank(2), &record, false).record().passes.is_empty());
    }
}
