//! Where a step's time went, from when its ops ran.

use crossmesh_comm::engine::JobReport;
use crossmesh_core::id::Rank;
use crossmesh_core::program::{OpKind, RankProgram};
use crossmesh_core::schedule::PassKind;
use crossmesh_core::step::StepProgram;
use crossmesh_core::trace::OpSpan;

use super::passes::Waited;
use crate::record::{PassSpan, StepTimes};

/// See [`StepTimes`]. `waited` is how long passes stood still for collectives inside them.
pub fn of(
    lowered: &StepProgram,
    me: Rank,
    report: &JobReport,
    waited: &Waited,
    waited_for_all: f64,
) -> StepTimes {
    let program = &lowered.program.ranks[me.index()];
    let mut times = StepTimes { step: report.seconds, ..StepTimes::default() };
    let mut free_at = 0.0;
    for (op, span, kind) in computed(lowered, program, report) {
        let gap = (span.start_s - free_at).max(0.0);
        let exposed = arriving(program, op, report, (free_at, span.start_s)).min(gap);
        times.exposed += exposed;
        times.bubble += gap - exposed;
        match kind {
            PassKind::Optimizer => times.optimizer += span.end_s - span.start_s,
            _ => times.compute += span.end_s - span.start_s,
        }
        free_at = free_at.max(span.end_s);
    }
    let in_update = waited.update.min(times.optimizer);
    let for_all = waited_for_all.min(in_update);
    times.compute = (times.compute - waited.passes).max(0.0);
    times.optimizer -= in_update;
    times.exposed += waited.passes + in_update - for_all;
    times.bubble += for_all + (times.step - free_at).max(0.0);
    times
}

/// The rank's passes, and when they ran.
pub fn spans(lowered: &StepProgram, me: Rank, report: &JobReport, waited: &Waited) -> Vec<PassSpan> {
    let ops = lowered.program.ranks[me.index()].ops.iter().zip(&report.ops);
    let span = |(op, span): (&crossmesh_core::program::Op, &OpSpan)| match op.kind {
        OpKind::Compute { pass, .. } => {
            let pass = lowered.parts[pass as usize].pass;
            let waited = waited.by_pass.iter().find(|(of, _)| *of == pass).map_or(0.0, |(_, s)| *s);
            Some(PassSpan { pass: pass.to_string(), start: span.start_s, end: span.end_s, waited })
        }
        _ => None,
    };
    ops.filter_map(span).collect()
}

fn computed<'a>(
    lowered: &'a StepProgram,
    program: &'a RankProgram,
    report: &'a JobReport,
) -> Vec<(usize, &'a OpSpan, PassKind)> {
    let ops = program.ops.iter().zip(&report.ops).enumerate();
    let compute = |(i, (op, span)): (usize, (&crossmesh_core::program::Op, &'a OpSpan))| match op.kind {
        OpKind::Compute { pass, .. } => Some((i, span, lowered.parts[pass as usize].pass.kind)),
        _ => None,
    };
    let mut passes: Vec<_> = ops.filter_map(compute).collect();
    passes.sort_by(|a, b| a.1.start_s.total_cmp(&b.1.start_s));
    passes
}

/// For how much of a time something that the op waits for was arriving.
fn arriving(program: &RankProgram, op: usize, report: &JobReport, (from, to): (f64, f64)) -> f64 {
    let receives = program.deps(&program.ops[op]).iter().filter_map(|dep| {
        let waited_for = &program.ops[dep.op as usize];
        let span = &report.ops[dep.op as usize];
        matches!(waited_for.kind, OpKind::Recv { .. }).then_some((span.start_s.max(from), span.end_s.min(to)))
    });
    // They arrive side by side: from the first byte of the first to the last of the last.
    let (start, end) = receives
        .filter(|(start, end)| start < end)
        .fold((f64::INFINITY, 0.0f64), |(a, b), (start, end)| (a.min(start), b.max(end)));
    (end - start).max(0.0)
}
