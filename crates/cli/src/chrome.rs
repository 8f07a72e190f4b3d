//! A trace in Chrome's format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.
//!
//! ```text
//! process  h0 measured     one per host, the measured one above the predicted
//!   r0 -> r2  [====]         a track per transfer: from the send's start to its end
//! process  h0 predicted
//!   r0 -> r2  [===]
//!   nic out   /‾‾\_          a counter per link: percent of its rate in use
//! ```
//!
//! The same file carries the spans of all ops as [`TraceDoc`], for other programs and for `crossmesh diff`.

use anyhow::{Context, Result};
use crossmesh_core::id::{HostId, Rank};
use crossmesh_core::program::OpKind;
use crossmesh_core::trace::{Link, LinkUse, Trace};
use serde_json::{Value, json};

use crate::links;
use crate::predict::Prediction;
use crate::records::MeasuredTrace;
use crate::trace_doc::{Source, TraceDoc};

/// What was predicted, as a file.
pub fn render(prediction: &Prediction) -> Result<String> {
    let doc = TraceDoc::new(prediction, &prediction.trace, Source::Predicted, None);
    file(predicted(prediction), doc)
}

/// What was measured, with the prediction below.
pub fn render_measured(prediction: &Prediction, measured: &MeasuredTrace) -> Result<String> {
    let mut events = vec![];
    process_names(prediction, Source::Measured, &mut events);
    sends(prediction, &measured.trace, Source::Measured, &mut events);
    events.extend(predicted(prediction));
    let doc = TraceDoc::new(prediction, &measured.trace, Source::Measured, measured.clock_error_s);
    file(events, doc)
}

fn file(events: Vec<Value>, doc: TraceDoc) -> Result<String> {
    let document = json!({ "displayTimeUnit": "ms", "crossmesh": doc, "traceEvents": events });
    Ok(serde_json::to_string(&document).context("cannot write the trace")? + "\n")
}

fn predicted(prediction: &Prediction) -> Vec<Value> {
    let mut events = vec![];
    process_names(prediction, Source::Predicted, &mut events);
    sends(prediction, &prediction.trace, Source::Predicted, &mut events);
    for link in &prediction.trace.links {
        counter(prediction, link, &mut events);
    }
    events
}

/// The number of a host's process: the measured ones come behind all predicted ones.
fn pid(prediction: &Prediction, host: HostId, source: Source) -> u32 {
    match source {
        Source::Predicted => host.0,
        Source::Measured => prediction.plan.problem.topology.num_hosts() as u32 + 1 + host.0,
    }
}

fn process_names(prediction: &Prediction, source: Source, events: &mut Vec<Value>) {
    for host in (0..prediction.plan.problem.topology.num_hosts()).map(HostId::at) {
        let pid = pid(prediction, host, source);
        let name = format!("{host} {}", source.name());
        let order = 2 * host.0 + u32::from(source == Source::Predicted);
        let about = |what: &str, args: Value| json!({ "ph": "M", "name": what, "pid": pid, "args": args });
        events.push(about("process_name", json!({ "name": name })));
        events.push(about("process_sort_index", json!({ "sort_index": order })));
    }
}

/// An asynchronous span per send: sends of one rank overlap, and spans on one track must not.
fn sends(prediction: &Prediction, trace: &Trace, source: Source, events: &mut Vec<Value>) {
    let problem = &prediction.plan.problem;
    for (rank, program) in prediction.program.ranks.iter().enumerate() {
        let rank = Rank::at(rank);
        let pid = pid(prediction, problem.topology.host(rank), source);
        for (op, span) in program.ops.iter().zip(&trace.ops[rank.index()]) {
            let OpKind::Send { to, tag, .. } = op.kind else { continue };
            let region = prediction.plan.regions()[op.region.index()].to_string();
            let (name, cat) = (format!("{rank} -> {to}"), format!("{} send", source.name()));
            let common = |ph: &str, seconds: f64| json!({ "ph": ph, "cat": cat, "name": name, "id": tag, "pid": pid, "tid": rank.0, "ts": micros(seconds) });
            let mut begin = common("b", span.start_s);
            begin["args"] = json!({ "transfer": tag, "bytes": op.bytes, "box": region, "tensor": problem.reshards[op.tensor as usize].name });
            events.push(begin);
            events.push(common("e", span.end_s));
        }
    }
}

fn counter(prediction: &Prediction, link: &LinkUse, events: &mut Vec<Value>) {
    let problem = &prediction.plan.problem;
    let pid = match link.link {
        Link::NicOut(port) | Link::NicIn(port) => problem.topology.ports[port.index()].host.0,
        Link::LocalOut(rank) | Link::LocalIn(rank) => problem.topology.host(rank).0,
        Link::GroupOut(..) | Link::GroupIn(..) => problem.topology.num_hosts() as u32,
    };
    let name = links::name(problem, link.link);
    let mut at = |seconds: f64, share: f64| {
        let percent = (share * 1000.0).round() / 10.0;
        events.push(json!({ "ph": "C", "name": name, "pid": pid, "ts": micros(seconds), "args": { "percent": percent } }));
    };
    for (i, busy) in link.busy.iter().enumerate() {
        at(busy.start_s, busy.share);
        if link.busy.get(i + 1).is_none_or(|next| next.start_s > busy.end_s) {
            at(busy.end_s, 0.0);
        }
    }
}

fn micros(seconds: f64) -> f64 {
    seconds * 1e6
}
