//! A trace as a document, `crossmesh.trace/1`: when every op of every rank ran, predicted or measured.
//!
//! It travels in the Chrome trace that `simulate --trace` and `run --trace` write, under the key `crossmesh`; a viewer
//! does not mind. `docs/plan-format.md` has the fields.

use anyhow::{Context, Result, bail};
use crossmesh_core::program::OpKind;
use crossmesh_core::trace::{OpSpan, Trace};
use serde::{Deserialize, Serialize};

use crate::predict::Prediction;

pub const SCHEMA: &str = "crossmesh.trace/1";

/// Where a trace comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    Predicted,
    Measured,
}

impl Source {
    pub fn name(self) -> &'static str {
        match self {
            Source::Predicted => "predicted",
            Source::Measured => "measured",
        }
    }
}

/// See the module.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TraceDoc {
    pub schema: String,
    pub source: Source,
    pub strategy: String,
    pub makespan_s: f64,
    /// By how much times of two ranks may be apart that are the same. None where nothing is known of it; 0 for a
    /// prediction, which has one clock.
    pub clock_error_s: Option<f64>,
    pub ops: Vec<OpDoc>,
}

/// An op and when it ran, in seconds from the start of the first rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OpDoc {
    pub rank: u32,
    /// Its place in the rank's program.
    pub op: u32,
    pub what: String,
    pub bytes: u64,
    pub start_s: f64,
    pub end_s: f64,
}

impl TraceDoc {
    pub fn new(prediction: &Prediction, trace: &Trace, source: Source, clock_error_s: Option<f64>) -> Self {
        let mut ops = vec![];
        for (rank, (program, spans)) in (0..).zip(prediction.program.ranks.iter().zip(&trace.ops)) {
            for (op, (action, span)) in (0..).zip(program.ops.iter().zip(spans)) {
                let OpSpan { start_s, end_s } = *span;
                ops.push(OpDoc {
                    rank,
                    op,
                    what: describe(&action.kind),
                    bytes: action.bytes,
                    start_s,
                    end_s,
                });
            }
        }
        Self {
            schema: SCHEMA.into(),
            source,
            strategy: prediction.plan.strategy.clone(),
            makespan_s: trace.makespan_s,
            clock_error_s: clock_error_s.or((source == Source::Predicted).then_some(0.0)),
            ops,
        }
    }

    /// The document in a trace file, or none if the text is something else.
    pub fn find(text: &str) -> Result<Option<Self>> {
        #[derive(Deserialize)]
        struct File {
            crossmesh: Option<serde_json::Value>,
        }
        let Ok(File { crossmesh: Some(doc) }) = serde_json::from_str(text) else { return Ok(None) };
        match doc.get("schema").and_then(|s| s.as_str()) {
            Some(SCHEMA) => Ok(Some(serde_json::from_value(doc).context("not a trace of crossmesh")?)),
            other => bail!("a trace of schema {other:?}, this program reads {SCHEMA}"),
        }
    }
}

/// An op in words, as the engine says it.
pub fn describe(kind: &OpKind) -> String {
    match kind {
        OpKind::Send { to, tag, .. } => format!("send t{tag} to {to}"),
        OpKind::Recv { from, tag, .. } => format!("receive t{tag} from {from}"),
        OpKind::Copy { .. } => "copy".into(),
        OpKind::Compute { pass, .. } => format!("compute pass {pass}"),
    }
}
