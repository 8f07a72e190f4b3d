//! A run that stopped: what should have happened by then, and what hangs on what.
//!
//! ```text
//! r1: send t0 ──▶ r2: receive t0 ──▶ r2: send t1 ──▶ r3: receive t1       r2 stopped:
//!     held up         the culprit's    the culprit's      held up           these four, and nothing else
//! ```
//!
//! An op waits for what it depends on, for the op before it in its channel, and for the other end of its message: neither
//! end completes without the other. Following that from the culprit's ops leads to everything it holds up; what is left
//! was still under way.

use std::collections::BTreeMap;

use crate::id::Rank;
use crate::program::{OpKind, Program};
use crate::trace::OpSpan;

/// An op of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpRef {
    pub rank: Rank,
    /// Its place in the rank's program.
    pub op: u32,
}

impl OpRef {
    pub fn new(rank: Rank, op: u32) -> Self {
        Self { rank, op }
    }
}

/// How much of an op has happened at a moment of a trace, of 1. What takes no time happens at once.
pub fn share_at(span: OpSpan, at_s: f64) -> f64 {
    if at_s >= span.end_s {
        1.0
    } else if at_s <= span.start_s {
        0.0
    } else {
        (at_s - span.start_s) / (span.end_s - span.start_s)
    }
}

/// Who waits for whom in a program.
pub struct Waits {
    /// By rank and op: the ops that wait for it.
    waiting: Vec<Vec<Vec<OpRef>>>,
    /// By rank and op: the other end of its message.
    other_end: BTreeMap<OpRef, OpRef>,
}

impl Waits {
    pub fn of(program: &Program) -> Self {
        let waiting = program.ranks.iter().map(|r| vec![vec![]; r.ops.len()]).collect();
        let mut waits = Self { waiting, other_end: other_ends(program) };
        for (rank, ops) in program.ranks.iter().enumerate() {
            let rank = Rank::at(rank);
            let mut last_in_channel = BTreeMap::new();
            for (i, op) in (0..).zip(&ops.ops) {
                let here = OpRef::new(rank, i);
                for dep in ops.deps(op) {
                    waits.add(here, OpRef::new(rank, dep.op));
                }
                if let Some(channel) = channel(&op.kind)
                    && let Some(before) = last_in_channel.insert(channel, here)
                {
                    waits.add(here, before);
                }
            }
        }
        for (a, b) in waits.other_end.clone() {
            waits.add(a, b);
        }
        waits
    }

    fn add(&mut self, waiter: OpRef, on: OpRef) {
        let of_rank = self.waiting.get_mut(on.rank.index());
        if let Some(list) = of_rank.and_then(|ops| ops.get_mut(on.op as usize)) {
            list.push(waiter);
        }
    }

    /// The other end of an op's message, if it has one.
    pub fn other_end(&self, op: OpRef) -> Option<OpRef> {
        self.other_end.get(&op).copied()
    }

    /// The unfinished ops that wait for one of `roots`, directly or not, with the roots themselves, sorted.
    pub fn held_up(
        &self,
        roots: impl IntoIterator<Item = OpRef>,
        unfinished: impl Fn(OpRef) -> bool,
    ) -> Vec<OpRef> {
        let mut found: std::collections::BTreeSet<OpRef> =
            roots.into_iter().filter(|r| unfinished(*r)).collect();
        let mut queue: Vec<OpRef> = found.iter().copied().collect();
        while let Some(next) = queue.pop() {
            for &waiter in &self.waiting[next.rank.index()][next.op as usize] {
                if unfinished(waiter) && found.insert(waiter) {
                    queue.push(waiter);
                }
            }
        }
        found.into_iter().collect()
    }
}

/// Ops of one channel take place in order: sends to a peer in a lane, receives from one.
fn channel(kind: &OpKind) -> Option<(bool, Rank, u32)> {
    match *kind {
        OpKind::Send { to, lane, .. } => Some((true, to, lane)),
        OpKind::Recv { from, lane, .. } => Some((false, from, lane)),
        OpKind::Copy { .. } | OpKind::Compute { .. } => None,
    }
}

fn other_ends(program: &Program) -> BTreeMap<OpRef, OpRef> {
    let (mut sends, mut receives) = (BTreeMap::new(), BTreeMap::new());
    for (rank, ops) in program.ranks.iter().enumerate() {
        for (i, op) in (0..).zip(&ops.ops) {
            let here = OpRef::new(Rank::at(rank), i);
            match op.kind {
                OpKind::Send { tag, .. } => drop(sends.insert(tag, here)),
                OpKind::Recv { tag, .. } => drop(receives.insert(tag, here)),
                OpKind::Copy { .. } | OpKind::Compute { .. } => {}
            }
        }
    }
    let pairs = sends.iter().filter_map(|(tag, send)| Some((*send, *receives.get(tag)?)));
    pairs.flat_map(|(send, receive)| [(send, receive), (receive, send)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reshard::{PlanOptions, Problem, Scheduler, Strategy, lower, plan};

    /// r0 to r1 to r2 to r3, in one piece.
    fn chain() -> Program {
        let layout = |words: &str| words.parse().unwrap();
        let problem = Problem::pair(layout("u8[999]@A{x:1}(_)"), layout("u8[999]@B{x:3}(_)")).unwrap();
        let strategy = Strategy::Broadcast(Scheduler::Greedy);
        lower(&plan(&problem, &PlanOptions { strategy, ..Default::default() }).unwrap())
    }

    fn ops_of(program: &Program, rank: u32) -> Vec<OpRef> {
        (0..program.ranks[rank as usize].ops.len() as u32).map(|op| OpRef::new(Rank(rank), op)).collect()
    }

    #[test]
    fn everything_behind_a_culprit_is_held_up_and_nothing_before_it() {
        let program = chain();
        let waits = Waits::of(&program);
        assert_eq!(program.ranks.iter().map(|r| r.ops.len()).collect::<Vec<_>>(), [1, 2, 2, 1]);
        // r2 stopped, and nothing had ended: r1's send to it, its own two, and r3's receive.
        let held = waits.held_up(ops_of(&program, 2), |_| true);
        let ranks: Vec<u32> = held.iter().map(|op| op.rank.0).collect();
        assert_eq!(ranks, [1, 2, 2, 3]);
        // r3 stopped when r2 had received all.
        let received = |op: OpRef| op.rank.0 >= 2 && !(op.rank.0 == 2 && op.op == 0);
        let held = waits.held_up(ops_of(&program, 3), received);
        assert_eq!(held.iter().map(|op| op.rank.0).collect::<Vec<_>>(), [2, 3]);
        assert!(waits.held_up(ops_of(&program, 0), |_| false).is_empty());
    }

    #[test]
    fn both_ends_of_a_message_know_each_other() {
        let program = chain();
        let waits = Waits::of(&program);
        let send = OpRef::new(Rank(0), 0);
        let receive = waits.other_end(send).unwrap();
        assert_eq!(receive.rank, Rank(1));
        assert_eq!(waits.other_end(receive), Some(send));
    }

    #[test]
    fn an_op_happens_between_its_start_and_its_end() {
        let span = OpSpan { start_s: 1.0, end_s: 3.0 };
        assert_eq!([0.5, 1.0, 1.5, 3.0, 9.0].map(|at| share_at(span, at)), [0.0, 0.0, 0.25, 1.0, 1.0]);
        assert_eq!(share_at(OpSpan { start_s: 1.0, end_s: 1.0 }, 1.0), 1.0);
    }
}
