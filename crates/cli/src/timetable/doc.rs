//! The document `crossmesh.schedule/1`.

use crossmesh_core::id::DeviceId;
use crossmesh_core::schedule::{Bubble, Step, Via};
use serde::Serialize;

use super::Timetable;

/// Times are in the unit of the costs.
#[derive(Debug, Serialize)]
pub struct Document<'a> {
    schema: &'static str,
    name: &'a str,
    microbatches: u32,
    /// The most stages that a device holds.
    chunks: usize,
    makespan: f64,
    /// The share of all devices' time in which nothing is computed.
    bubble: f64,
    /// The same within the longest time from a device's first pass to its last, as the zero-bubble papers count it.
    bubble_inside: f64,
    /// That time: what a step takes where steps follow each other without a barrier.
    period: f64,
    /// No schedule for this pipeline is shorter, whatever its chunks are.
    lower_bound: f64,
    /// What the bubble is made of: shares that add up to it.
    bubble_causes: Causes,
    /// The passes that the makespan is made of, in order of time.
    critical_path: Vec<PathStep>,
    devices: Vec<Device>,
    /// What takes time between devices.
    messages: Vec<MessageDoc>,
}

/// Why devices are idle.
#[derive(Debug, Serialize)]
pub struct Causes {
    ramp: f64,
    imbalance: f64,
    communication: f64,
    dependency: f64,
}

impl From<Bubble> for Causes {
    fn from(bubble: Bubble) -> Self {
        let Bubble { ramp, imbalance, communication, dependency } = bubble;
        Self { ramp, imbalance, communication, dependency }
    }
}

#[derive(Debug, Serialize)]
struct Device {
    device: u32,
    /// The virtual stages it holds.
    stages: Vec<u32>,
    busy: f64,
    bubble: f64,
    /// Idle between its first pass and its last, and before and behind them: with `busy`, the makespan.
    idle_inside: f64,
    idle_between: f64,
    /// The same idle time by cause.
    idle: Causes,
    /// In activations of one stage.
    peak_activations: f64,
    /// In activations of the device's whole share of the layers.
    peak_memory: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_bytes: Option<f64>,
    ops: Vec<Op>,
}

#[derive(Debug, Serialize)]
struct PathStep {
    op: &'static str,
    stage: u32,
    microbatch: u32,
    device: u32,
    start: f64,
    end: f64,
    /// When the next one had what this one made.
    arrived: f64,
}

#[derive(Debug, Serialize)]
struct Op {
    op: &'static str,
    stage: u32,
    chunk: u32,
    microbatch: u32,
    start: f64,
    end: f64,
}

#[derive(Debug, Serialize)]
struct MessageDoc {
    what: &'static str,
    from_device: u32,
    to_device: u32,
    from_stage: u32,
    to_stage: u32,
    microbatch: u32,
    start: f64,
    end: f64,
}

pub fn document(table: &Timetable) -> Document<'_> {
    let schedule = &table.schedule;
    Document {
        schema: "crossmesh.schedule/1",
        name: schedule.name(),
        microbatches: schedule.num_microbatches(),
        chunks: schedule.placement().num_chunks(),
        makespan: table.timed.makespan,
        bubble: table.timed.bubble(),
        bubble_inside: table.timed.inner_bubble(),
        period: table.timed.period(),
        lower_bound: table.bound,
        bubble_causes: table.causes().into(),
        critical_path: table.path.iter().map(|step| path_step(table, step)).collect(),
        devices: schedule.placement().devices().map(|d| device(table, d)).collect(),
        messages: messages(table),
    }
}

fn path_step(table: &Timetable, step: &Step) -> PathStep {
    let Step { pass, span, arrived } = *step;
    PathStep {
        op: pass.kind.letters(),
        stage: pass.stage.0,
        microbatch: pass.microbatch.0,
        device: table.schedule.placement().device(pass.stage).0,
        start: span.start,
        end: span.end,
        arrived,
    }
}

fn device(table: &Timetable, device: DeviceId) -> Device {
    let (schedule, d) = (&table.schedule, device.index());
    let placement = schedule.placement();
    let passes = schedule.devices()[d].iter().zip(&table.timed.spans[d]);
    let op = |(pass, span): (&crossmesh_core::schedule::Pass, &crossmesh_core::schedule::Span)| Op {
        op: pass.kind.letters(),
        stage: pass.stage.0,
        chunk: placement.chunk(pass.stage),
        microbatch: pass.microbatch.0,
        start: span.start,
        end: span.end,
    };
    Device {
        device: device.0,
        stages: placement.stages_on(device).iter().map(|s| s.0).collect(),
        busy: table.timed.busy[d],
        bubble: table.timed.device_bubble(device),
        idle_inside: table.timed.idle_inside(device),
        idle_between: table.makespan() - table.timed.busy[d] - table.timed.idle_inside(device),
        idle: table.bubbles[d].into(),
        peak_activations: table.peaks[d],
        peak_memory: table.shares[d],
        peak_bytes: table.bytes.as_ref().map(|bytes| bytes[d]),
        ops: passes.map(op).collect(),
    }
}

fn messages(table: &Timetable) -> Vec<MessageDoc> {
    let doc = |message: &crossmesh_core::schedule::Message| {
        let (what, from_stage, to_stage) = match message.via {
            Via::Activation(edge) => ("activation", edge.from, edge.to),
            Via::Gradient(edge) => ("gradient", edge.to, edge.from),
            Via::Own | Via::Vocabulary => return None,
        };
        Some(MessageDoc {
            what,
            from_device: message.from.0,
            to_device: message.to.0,
            from_stage: from_stage.0,
            to_stage: to_stage.0,
            microbatch: message.microbatch.0,
            start: message.span.start,
            end: message.span.end,
        })
    };
    let mut messages: Vec<MessageDoc> = table.timed.messages.iter().filter_map(doc).collect();
    messages.sort_by(|a, b| {
        let key = |m: &MessageDoc| (m.from_stage, m.to_stage, m.microbatch);
        a.start.total_cmp(&b.start).then(key(a).cmp(&key(b)))
    });
    messages
}
