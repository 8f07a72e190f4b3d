//! What a step's trace says: who computed when, who stood still, and what communication cost.

use super::{Step, StepProgram};
use crate::id::DeviceId;
use crate::program::OpKind;
use crate::schedule::Pass;
use crate::trace::{OpSpan, Trace};

/// A step, predicted or measured.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    pub step_s: f64,
    pub devices: Vec<DeviceReport>,
    /// When each instance's first byte left and its last arrived, by instance.
    pub crossings: Vec<OpSpan>,
}

/// A device of a step. Its ranks do the same; the first of them stands for all.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceReport {
    pub device: DeviceId,
    /// Every pass, in order; a pass that was cut is from its first part's start to its last one's end.
    pub passes: Vec<(Pass, OpSpan)>,
    /// Its ranks computed.
    pub busy_s: f64,
    /// A pass had begun, and stood still: for other ranks inside it, or for what is needed only on the way.
    pub waited_s: f64,
}

impl StepReport {
    pub fn of(step: &Step, lowered: &StepProgram, trace: &Trace) -> Self {
        let devices = step.schedule.placement().devices().map(|d| device(step, lowered, trace, d)).collect();
        let crossings = lowered.instances.iter().map(|instance| {
            let spans = instance.ops.iter().flat_map(|(rank, ops)| {
                let (ranked, spans) = (&lowered.program.ranks[rank.index()], &trace.ops[rank.index()]);
                let moves = |op: &usize| ranked.ops[*op].bytes > 0;
                (ops.start as usize..ops.end as usize).filter(moves).map(|op| spans[op])
            });
            let whole = |a: OpSpan, b: OpSpan| OpSpan {
                start_s: a.start_s.min(b.start_s),
                end_s: a.end_s.max(b.end_s),
            };
            spans.reduce(whole).unwrap_or_default()
        });
        Self { step_s: trace.makespan_s, devices, crossings: crossings.collect() }
    }

    /// The share of time, over all devices, in which nothing was computed.
    pub fn bubble(&self) -> f64 {
        let busy: f64 = self.devices.iter().map(|d| d.busy_s).sum();
        let all = self.step_s * self.devices.len() as f64;
        if all > 0.0 { 1.0 - busy / all } else { 0.0 }
    }

    /// The share of it in which a pass had begun, and stood still.
    pub fn waited(&self) -> f64 {
        let waited: f64 = self.devices.iter().map(|d| d.waited_s).sum();
        let all = self.step_s * self.devices.len() as f64;
        if all > 0.0 { waited / all } else { 0.0 }
    }
}

fn device(step: &Step, lowered: &StepProgram, trace: &Trace, device: DeviceId) -> DeviceReport {
    let mut report = DeviceReport { device, passes: vec![], busy_s: 0.0, waited_s: 0.0 };
    let Some(rank) = step.ranks_of(device).first() else { return report };
    let ops = &lowered.program.ranks[rank.index()].ops;
    for (op, span) in ops.iter().zip(&trace.ops[rank.index()]) {
        let OpKind::Compute { pass, .. } = op.kind else { continue };
        let part = lowered.parts[pass as usize];
        report.busy_s += span.end_s - span.start_s;
        match report.passes.last_mut() {
            Some((last, whole)) if *last == part.pass => whole.end_s = span.end_s,
            _ => report.passes.push((part.pass, *span)),
        }
    }
    let under_way: f64 = report.passes.iter().map(|(_, span)| span.end_s - span.start_s).sum();
    report.waited_s = (under_way - report.busy_s).max(0.0);
    report
}
