//! A trace in Chrome's format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.
//!
//! ```text
//! process  h0        one per host
//!   r0 -> r2  [===]    a track per transfer: from the send's start to its end
//!   nic out   /‾‾\_    a counter per link: percent of its rate in use
//! ```

use anyhow::Result;
use crossmesh_core::id::{HostId, Rank};
use crossmesh_core::program::OpKind;
use crossmesh_core::trace::{Link, LinkUse};
use serde_json::{Value, json};

use crate::links;
use crate::predict::Prediction;

/// The whole file.
pub fn render(prediction: &Prediction) -> Result<String> {
    let mut events = Vec::new();
    process_names(prediction, &mut events);
    for rank in 0..prediction.program.ranks.len() {
        sends(prediction, Rank::at(rank), &mut events);
    }
    for link in &prediction.trace.links {
        counter(prediction, link, &mut events);
    }
    let document = json!({ "displayTimeUnit": "ms", "traceEvents": events });
    Ok(serde_json::to_string(&document)? + "\n")
}

fn process_names(prediction: &Prediction, events: &mut Vec<Value>) {
    for host in 0..prediction.plan.problem.topology.num_hosts() {
        let name = HostId::at(host).to_string();
        events.push(json!({ "ph": "M", "name": "process_name", "pid": host, "args": { "name": name } }));
    }
}

/// An asynchronous span per send: sends of one rank overlap, and spans on one track must not.
fn sends(prediction: &Prediction, rank: Rank, events: &mut Vec<Value>) {
    let problem = &prediction.plan.problem;
    let pid = problem.topology.host(rank).0;
    let spans = &prediction.trace.ops[rank.index()];
    for (op, span) in prediction.program.ranks[rank.index()].ops.iter().zip(spans) {
        let OpKind::Send { to, tag, .. } = op.kind else { continue };
        let region = prediction.plan.regions()[op.region.index()].to_string();
        let name = format!("{rank} -> {to}");
        let common = |ph: &str, seconds: f64| json!({ "ph": ph, "cat": "send", "name": name, "id": tag, "pid": pid, "tid": rank.0, "ts": micros(seconds) });
        let mut begin = common("b", span.start_s);
        begin["args"] = json!({ "transfer": tag, "bytes": op.bytes, "box": region, "tensor": problem.reshards[op.tensor as usize].name });
        events.push(begin);
        events.push(common("e", span.end_s));
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
