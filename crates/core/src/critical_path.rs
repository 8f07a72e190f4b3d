//! What a run's time is made of: back from the op that ends last, over what each waited for, to the start.
//!
//! ```text
//! r0 -> r1   |=========|                    r1 waits for what it passes on, r2 for its turn in the lane:
//! r1 -> r2             |=====|              0 s ── r0 -> r1 ── r1 -> r2 ── r1 -> r2 ── the end
//! r1 -> r2                   |=======|
//! ```
//!
//! A message that is passed on while it arrives ends a moment before the one that follows it: the path has the first for as long as it
//! was under way and the second for that moment. So the legs follow each other without a gap, and add up to the whole run.

use crate::id::Rank;
use crate::program::{OpKind, Program};
use crate::stall::OpRef;
use crate::trace::{OpSpan, Trace};

/// A part of the path: an op, and the stretch of time that it is the reason for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Leg {
    /// The send of a message; else what the rank did by itself.
    pub op: OpRef,
    /// The receiver of a message.
    pub to: Option<Rank>,
    pub start_s: f64,
    pub end_s: f64,
}

/// The legs in order of time. Of a verified program and its trace; what took no time is left out.
pub fn critical_path(program: &Program, trace: &Trace) -> Vec<Leg> {
    let ends = Ends::of(program);
    let mut legs = vec![];
    let Some(mut at) = last(trace) else { return legs };
    let mut until_s = trace.makespan_s;
    // Dependencies of a verified program have no cycle; of any other this ends too.
    for _ in 0..trace.ops.iter().map(Vec::len).sum::<usize>() {
        let (first, to) = ends.beginning(program, at);
        let cause = cause(program, trace, &ends, at);
        let from_s = cause.map_or(0.0, |op| span(trace, op).end_s.min(until_s));
        if from_s < until_s {
            legs.push(Leg { op: first, to, start_s: from_s, end_s: until_s });
        }
        until_s = from_s;
        match cause {
            Some(op) => at = op,
            None => break,
        }
    }
    legs.reverse();
    legs
}

/// Both ends of every message, by its tag.
struct Ends {
    sends: Vec<Option<OpRef>>,
    receives: Vec<Option<OpRef>>,
}

impl Ends {
    fn of(program: &Program) -> Self {
        let mut ends = Self { sends: vec![], receives: vec![] };
        for (rank, ops) in program.ranks.iter().enumerate() {
            for (i, op) in (0..).zip(&ops.ops) {
                let (list, tag) = match op.kind {
                    OpKind::Send { tag, .. } => (&mut ends.sends, tag as usize),
                    OpKind::Recv { tag, .. } => (&mut ends.receives, tag as usize),
                    OpKind::Copy { .. } | OpKind::Compute { .. } => continue,
                };
                if list.len() <= tag {
                    list.resize(tag + 1, None);
                }
                list[tag] = Some(OpRef::new(Rank::at(rank), i));
            }
        }
        ends
    }

    fn pair(&self, tag: u32) -> (Option<OpRef>, Option<OpRef>) {
        let of = |list: &[Option<OpRef>]| list.get(tag as usize).copied().flatten();
        (of(&self.sends), of(&self.receives))
    }

    /// The send of a message and its receiver, or the op itself.
    fn beginning(&self, program: &Program, op: OpRef) -> (OpRef, Option<Rank>) {
        match kind(program, op).and_then(tag).map(|tag| self.pair(tag)) {
            Some((Some(send), Some(receive))) => (send, Some(receive.rank)),
            _ => (op, None),
        }
    }
}

fn kind(program: &Program, op: OpRef) -> Option<&OpKind> {
    program.ranks.get(op.rank.index())?.ops.get(op.op as usize).map(|op| &op.kind)
}

fn tag(kind: &OpKind) -> Option<u32> {
    match kind {
        OpKind::Send { tag, .. } | OpKind::Recv { tag, .. } => Some(*tag),
        OpKind::Copy { .. } | OpKind::Compute { .. } => None,
    }
}

fn span(trace: &Trace, op: OpRef) -> OpSpan {
    trace.ops.get(op.rank.index()).and_then(|ops| ops.get(op.op as usize)).copied().unwrap_or_default()
}

/// The op that ends last; of several the first.
fn last(trace: &Trace) -> Option<OpRef> {
    let mut last: Option<(OpRef, f64)> = None;
    for (rank, ops) in trace.ops.iter().enumerate() {
        for (i, span) in (0..).zip(ops) {
            if last.is_none_or(|(_, end_s)| span.end_s > end_s) {
                last = Some((OpRef::new(Rank::at(rank), i), span.end_s));
            }
        }
    }
    last.map(|(op, _)| op)
}

/// What an op, with the other end of its message, waited for longest: a dependency of either end, or its turn in the channel.
fn cause(program: &Program, trace: &Trace, ends: &Ends, op: OpRef) -> Option<OpRef> {
    let (send, receive) = kind(program, op).and_then(tag).map_or((None, None), |tag| ends.pair(tag));
    let both = [send.or(Some(op)), receive];
    let waited = both.into_iter().flatten().flat_map(|end| {
        let ops = &program.ranks[end.rank.index()];
        ops.deps(&ops.ops[end.op as usize]).iter().map(move |dep| OpRef::new(end.rank, dep.op))
    });
    let turn = send.and_then(|send| before_in_channel(program, send));
    let mut latest: Option<OpRef> = None;
    for other in waited.chain(turn) {
        if latest.is_none_or(|l| span(trace, other).end_s > span(trace, l).end_s) {
            latest = Some(other);
        }
    }
    latest
}

/// The message before it in its channel, which it lets go first.
fn before_in_channel(program: &Program, send: OpRef) -> Option<OpRef> {
    let ops = &program.ranks[send.rank.index()].ops;
    let OpKind::Send { to, lane, .. } = ops[send.op as usize].kind else { return None };
    let same = |op: &OpKind| matches!(op, OpKind::Send { to: t, lane: l, .. } if (*t, *l) == (to, lane));
    let before = (0..send.op).rev().find(|i| same(&ops[*i as usize].kind))?;
    Some(OpRef::new(send.rank, before))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reshard::problem::Hosts;
    use crate::reshard::{PlanOptions, Problem, Scheduler, Strategy, lower, plan};
    use crate::sim::simulate;

    fn path(src: &str, dst: &str, strategy: Strategy) -> (Vec<Leg>, f64) {
        let pair = (String::new(), src.parse().unwrap(), dst.parse().unwrap());
        let problem = Problem::new(vec![pair], Hosts::default()).unwrap();
        let plan = plan(&problem, &PlanOptions { strategy, ..Default::default() }).unwrap();
        let program = lower(&plan);
        let trace = simulate(&program, &problem.cluster).unwrap();
        (critical_path(&program, &trace), trace.makespan_s)
    }

    #[test]
    fn legs_follow_each_other_and_add_up() {
        let pairs = [
            ("u8[9999]@A{x:1}(_)", "u8[9999]@B{x:3}(_)"),
            ("f32[64,48]@A{tp:2}(tp,_)", "f32[64,48]@B{tp:3}(_,tp)"),
            ("f32[512,512]@A{x:2,y:2}(x,y)", "f32[512,512]@B{x:3,y:2}(_,y)"),
            ("f32[4096]@A{x:4}(_ | sum x)", "f32[4096]@B{x:2}(x)"),
        ];
        let strategies =
            [Strategy::Flow, Strategy::SendRecv, Strategy::AllGather, Strategy::Broadcast(Scheduler::Greedy)];
        for (src, dst) in pairs {
            for strategy in strategies.into_iter().filter(|s| !src.contains("sum") || *s == Strategy::Flow) {
                let (legs, makespan_s) = path(src, dst, strategy);
                let (first, last) = (legs.first().unwrap(), legs.last().unwrap());
                assert_eq!((first.start_s, last.end_s), (0.0, makespan_s), "{src} {strategy:?}");
                assert!(legs.windows(2).all(|w| w[0].end_s == w[1].start_s), "{src} {strategy:?}: {legs:?}");
                assert!(legs.iter().all(|leg| leg.start_s < leg.end_s), "{src} {strategy:?}: {legs:?}");
            }
        }
    }

    #[test]
    fn copies_one_behind_the_other_are_the_path_of_sendrecv() {
        // One device sends the same to three, each after the one before.
        let (legs, makespan_s) = path("u8[9999]@A{x:1}(_)", "u8[9999]@B{x:3}(_)", Strategy::SendRecv);
        let ways: Vec<_> = legs.iter().map(|leg| (leg.op.rank.0, leg.to.unwrap().0)).collect();
        assert_eq!(ways, [(0, 1), (0, 2), (0, 3)]);
        assert!(legs.iter().all(|leg| (leg.end_s - leg.start_s) / makespan_s > 0.3), "{legs:?}");
    }

    #[test]
    fn nothing_that_moves_has_no_path() {
        let (legs, _) = path("u8[8]@A{x:2}(x)", "u8[8]@A{x:2}(x)", Strategy::Flow);
        assert_eq!(legs, []);
    }
}
