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

use std::fmt::{self, Display};

use anyhow::{Context, Result};
use crossmesh_core::id::{HostId, Rank};
use crossmesh_core::program::OpKind;
use crossmesh_core::region::Region;
use crossmesh_core::trace::{Link, LinkUse, Trace};
use serde::{Serialize, Serializer};

use crate::links;
use crate::predict::Prediction;
use crate::records::MeasuredTrace;
use crate::trace_doc::{Source, TraceDoc};

/// What was predicted, as a file.
pub fn render(prediction: &Prediction) -> Result<String> {
    let mut file = File::new(TraceDoc::new(prediction, &prediction.trace, Source::Predicted, None))?;
    predicted(prediction, &mut file)?;
    file.end()
}

/// What was measured, with the prediction below.
pub fn render_measured(prediction: &Prediction, measured: &MeasuredTrace) -> Result<String> {
    let doc = TraceDoc::new(prediction, &measured.trace, Source::Measured, measured.clock_error_s);
    let mut file = File::new(doc)?;
    process_names(prediction, Source::Measured, &mut file)?;
    sends(prediction, &measured.trace, Source::Measured, &mut file)?;
    predicted(prediction, &mut file)?;
    file.end()
}

/// The file as far as it is written: a model has more than a million events, and none is held beside its text.
struct File {
    text: Vec<u8>,
    events: u64,
}

impl File {
    fn new(doc: TraceDoc) -> Result<Self> {
        let mut text = br#"{"crossmesh":"#.to_vec();
        serde_json::to_writer(&mut text, &doc).context("cannot write the trace")?;
        text.extend_from_slice(br#","displayTimeUnit":"ms","traceEvents":["#);
        Ok(Self { text, events: 0 })
    }

    fn push(&mut self, event: &impl Serialize) -> Result<()> {
        if self.events > 0 {
            self.text.push(b',');
        }
        self.events += 1;
        serde_json::to_writer(&mut self.text, event).context("cannot write the trace")
    }

    fn end(mut self) -> Result<String> {
        self.text.extend_from_slice(b"]}\n");
        String::from_utf8(self.text).context("cannot write the trace")
    }
}

/// What a viewer calls a process, or where it puts it.
#[derive(Serialize)]
struct Meta<'a, A> {
    ph: &'a str,
    name: &'a str,
    pid: u32,
    args: A,
}

/// From a rank to another.
struct Way(Rank, Rank);

impl Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} -> {}", self.0, self.1)
    }
}

/// The beginning or the end of a span.
#[derive(Serialize)]
struct Edge<'a> {
    ph: &'a str,
    cat: &'a str,
    #[serde(serialize_with = "in_words")]
    name: Way,
    id: u64,
    pid: u32,
    tid: u32,
    ts: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<SendArgs<'a>>,
}

#[derive(Serialize)]
struct SendArgs<'a> {
    transfer: u64,
    bytes: u64,
    #[serde(rename = "box", serialize_with = "in_words")]
    region: &'a Region,
    tensor: &'a str,
}

#[derive(Serialize)]
struct Counter<'a> {
    ph: &'a str,
    name: &'a str,
    pid: u32,
    ts: f64,
    args: Percent,
}

#[derive(Serialize)]
struct Percent {
    percent: f64,
}

#[derive(Serialize)]
struct Name {
    name: String,
}

#[derive(Serialize)]
struct SortIndex {
    sort_index: u32,
}

fn in_words<S: Serializer>(value: &impl Display, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(value)
}

fn predicted(prediction: &Prediction, file: &mut File) -> Result<()> {
    process_names(prediction, Source::Predicted, file)?;
    sends(prediction, &prediction.trace, Source::Predicted, file)?;
    prediction.trace.links.iter().try_for_each(|link| counter(prediction, link, file))
}

/// The number of a host's process: the measured ones come behind all predicted ones.
fn pid(prediction: &Prediction, host: HostId, source: Source) -> u32 {
    match source {
        Source::Predicted => host.0,
        Source::Measured => prediction.plan.problem.topology.num_hosts() as u32 + 1 + host.0,
    }
}

fn process_names(prediction: &Prediction, source: Source, file: &mut File) -> Result<()> {
    for host in (0..prediction.plan.problem.topology.num_hosts()).map(HostId::at) {
        let pid = pid(prediction, host, source);
        let name = Name { name: format!("{host} {}", source.name()) };
        let sort_index = 2 * host.0 + u32::from(source == Source::Predicted);
        file.push(&Meta { ph: "M", name: "process_name", pid, args: name })?;
        file.push(&Meta { ph: "M", name: "process_sort_index", pid, args: SortIndex { sort_index } })?;
    }
    Ok(())
}

/// An asynchronous span per send: sends of one rank overlap, and spans on one track must not.
fn sends(prediction: &Prediction, trace: &Trace, source: Source, file: &mut File) -> Result<()> {
    let problem = &prediction.plan.problem;
    let cat = format!("{} send", source.name());
    for (rank, program) in prediction.program.ranks.iter().enumerate() {
        let rank = Rank::at(rank);
        let pid = pid(prediction, problem.topology.host(rank), source);
        for (op, span) in program.ops.iter().zip(&trace.ops[rank.index()]) {
            let OpKind::Send { to, tag, .. } = op.kind else { continue };
            let edge = |ph, seconds, args| Edge {
                ph,
                cat: &cat,
                name: Way(rank, to),
                id: tag.into(),
                pid,
                tid: rank.0,
                ts: micros(seconds),
                args,
            };
            let args = SendArgs {
                transfer: tag.into(),
                bytes: op.bytes,
                region: &prediction.plan.regions()[op.region.index()],
                tensor: &problem.reshards[op.tensor as usize].name,
            };
            file.push(&edge("b", span.start_s, Some(args)))?;
            file.push(&edge("e", span.end_s, None))?;
        }
    }
    Ok(())
}

fn counter(prediction: &Prediction, link: &LinkUse, file: &mut File) -> Result<()> {
    let problem = &prediction.plan.problem;
    let pid = match link.link {
        Link::NicOut(port) | Link::NicIn(port) => problem.topology.ports[port.index()].host.0,
        Link::LocalOut(rank) | Link::LocalIn(rank) => problem.topology.host(rank).0,
        Link::GroupOut(..) | Link::GroupIn(..) => problem.topology.num_hosts() as u32,
    };
    let name = links::name(problem, link.link);
    let mut at = |seconds: f64, share: f64| {
        let args = Percent { percent: (share * 1000.0).round() / 10.0 };
        file.push(&Counter { ph: "C", name: &name, pid, ts: micros(seconds), args })
    };
    for (i, busy) in link.busy.iter().enumerate() {
        at(busy.start_s, busy.share)?;
        if link.busy.get(i + 1).is_none_or(|next| next.start_s > busy.end_s) {
            at(busy.end_s, 0.0)?;
        }
    }
    Ok(())
}

fn micros(seconds: f64) -> f64 {
    seconds * 1e6
}
