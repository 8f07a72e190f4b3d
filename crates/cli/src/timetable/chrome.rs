//! A timetable in Chrome's trace format, which Perfetto opens. A unit of time is shown as a millisecond.
//!
//! ```text
//! process  device 0     one per device
//!   passes       [F0][F1]
//!   activations     [0 -> 1]      what it sends
//!   memory       /‾\_             a counter
//! ```

use anyhow::Result;
use crossmesh_core::id::DeviceId;
use crossmesh_core::schedule::Via;
use serde_json::{Value, json};

use super::Timetable;

/// Microseconds of the trace for a unit of the schedule's time.
const UNIT: f64 = 1000.0;

pub fn render(table: &Timetable) -> Result<String> {
    let mut events = Vec::new();
    for device in table.schedule.placement().devices() {
        names(device, &mut events);
        passes(table, device, &mut events);
    }
    messages(table, &mut events);
    for (device, levels) in table.memory().iter().enumerate() {
        for level in levels {
            let args = json!({ "activations": level.amount });
            events.push(
                json!({ "ph": "C", "name": "memory", "pid": device, "ts": level.at * UNIT, "args": args }),
            );
        }
    }
    let document = json!({ "displayTimeUnit": "ms", "traceEvents": events });
    Ok(serde_json::to_string(&document)? + "\n")
}

fn names(device: DeviceId, events: &mut Vec<Value>) {
    let name = device.to_string();
    events.push(json!({ "ph": "M", "name": "process_name", "pid": device.0, "args": { "name": name } }));
    for (tid, name) in ["passes", "moves", "activations", "gradients"].iter().enumerate() {
        let args = json!({ "name": name });
        events.push(json!({ "ph": "M", "name": "thread_name", "pid": device.0, "tid": tid, "args": args }));
    }
}

fn passes(table: &Timetable, device: DeviceId, events: &mut Vec<Value>) {
    let d = device.index();
    for (pass, span) in table.schedule.devices()[d].iter().zip(&table.timed.spans[d]) {
        let args = json!({ "stage": pass.stage.0, "chunk": table.schedule.placement().chunk(pass.stage), "microbatch": pass.microbatch.0 });
        let (ts, dur) = (span.start * UNIT, (span.end - span.start) * UNIT);
        let tid = u8::from(pass.kind.is_move());
        events.push(json!({ "ph": "X", "cat": pass.kind.letters(), "name": pass.to_string(), "pid": d, "tid": tid, "ts": ts, "dur": dur, "args": args }));
    }
}

/// Messages of one channel follow each other, those of several may overlap: each is an asynchronous span.
fn messages(table: &Timetable, events: &mut Vec<Value>) {
    for (id, message) in table.timed.messages.iter().enumerate() {
        let (what, tid) = match message.via {
            Via::Activation(_) => ("activation", 2),
            _ => ("gradient", 3),
        };
        let name = format!("{what} {} to {}", message.microbatch.0, message.to);
        for (ph, at) in [("b", message.span.start), ("e", message.span.end)] {
            events.push(json!({ "ph": ph, "cat": what, "name": name, "id": id, "pid": message.from.0, "tid": tid, "ts": at * UNIT }));
        }
    }
}
