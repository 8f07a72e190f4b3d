//! The laws of a program, judged while it passes: most programs are right for a simple reason, and need not be kept.
//!
//! Lowering makes ops in some order over all ranks. If in this order
//! - a receive follows its send, with no other message's end in between,
//! - and every op waits only for ops that came before it,
//!
//! then sends and receives match, both ends of every channel see its messages in that order, and the program can run
//! in that order, so nothing waits in a circle. Without staging memory and sums there is nothing else to prove.
//!
//! ```text
//! r0 send t0, r1 recv t0, r1 send t1 (waits for the op before), r2 recv t1        right
//! r0 send t0, r1 send t1, ...                                                     undecided: the program is kept
//! ```
//!
//! What is not right for this reason may be right for another; the graph of the whole program says.

use crate::id::{Rank, RegionId};
use crate::program::{Buffer, Dep, DepKind, OpKind};
use crate::reshard::Plan;
use crate::reshard::lower::{Lowering, Sink, What};
use crate::reshard::shards::AllSides;

/// Whether the program that the plan lowers to is right for the simple reason.
pub fn is_right(plan: &Plan, sides: &AllSides) -> bool {
    if sides.any_partial() {
        return false;
    }
    let lowering = Lowering::new(plan, sides);
    if lowering.has_stages() {
        return false;
    }
    let mut passing = Passing::new(plan.problem.topology.num_ranks(), plan.transfers().len());
    lowering.emit_into(&mut passing);
    passing.is_right()
}

/// A message that has been sent and not yet received.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Sent {
    from: Rank,
    to: Rank,
    lane: u32,
    tag: u32,
    what: (u32, RegionId, u64),
}

struct Passing {
    /// By rank: the tensor and the bytes of each op so far.
    moved: Vec<Vec<(u32, u32)>>,
    sent: Option<Sent>,
    tags: Tags,
    right: bool,
}

impl Passing {
    fn new(num_ranks: usize, num_messages: usize) -> Self {
        Self { moved: vec![vec![]; num_ranks], sent: None, tags: Tags::new(num_messages), right: true }
    }

    fn is_right(&self) -> bool {
        self.right && self.sent.is_none() && self.tags.are_dense()
    }

    /// Whether an op waits for earlier ops of its rank only, and follows only what moves as much of the same tensor.
    fn waits_for_earlier(&self, rank: Rank, moved: (u32, u32), deps: &[Dep]) -> bool {
        let ops = &self.moved[rank.index()];
        deps.iter().all(|dep| match ops.get(dep.op as usize) {
            Some(on) => dep.kind == DepKind::Done || *on == moved,
            None => false,
        })
    }
}

impl Sink for Passing {
    fn reserve(&mut self, rank: Rank, ops: usize) {
        self.moved[rank.index()].reserve_exact(ops);
    }

    fn num_ops(&self, rank: Rank) -> u32 {
        self.moved[rank.index()].len() as u32
    }

    fn push(&mut self, rank: Rank, kind: OpKind, what: What, deps: &[Dep]) {
        // Boxes of 4 GiB and more are left to the graph: they are few, and half the memory matters here.
        let Ok(bytes) = u32::try_from(what.bytes) else {
            self.right = false;
            return self.moved[rank.index()].push((what.tensor, u32::MAX));
        };
        let moved = (what.tensor, bytes);
        let what = (what.tensor, what.region, what.bytes);
        let right = match kind {
            OpKind::Send { to, lane, tag, from, .. } => {
                let before = self.sent.replace(Sent { from: rank, to, lane, tag, what });
                before.is_none() && to != rank && self.tags.add(tag) && !is_stage(from)
            }
            OpKind::Recv { from, lane, tag, into, .. } => {
                self.sent.take() == Some(Sent { from, to: rank, lane, tag, what }) && !is_stage(into)
            }
            OpKind::Copy { from, into, .. } => !is_stage(from) && !is_stage(into),
            OpKind::Compute { .. } => false,
        };
        self.right &= right && self.waits_for_earlier(rank, moved, deps);
        self.moved[rank.index()].push(moved);
    }
}

fn is_stage(buffer: Buffer) -> bool {
    matches!(buffer, Buffer::Stage(_))
}

/// Which tags there have been.
struct Tags {
    seen: Vec<u64>,
    count: u32,
    end: u32,
}

impl Tags {
    fn new(expected: usize) -> Self {
        Self { seen: vec![0; expected.div_ceil(64)], count: 0, end: 0 }
    }

    /// Whether the tag is new.
    fn add(&mut self, tag: u32) -> bool {
        let (word, bit) = (tag as usize / 64, 1 << (tag % 64));
        if word >= self.seen.len() {
            self.seen.resize(word + 1, 0);
        }
        let new = self.seen[word] & bit == 0;
        self.seen[word] |= bit;
        self.count += 1;
        self.end = self.end.max(tag.saturating_add(1));
        new
    }

    /// Whether the tags, all of them new, are those below their number.
    fn are_dense(&self) -> bool {
        self.count == self.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{Program, RankProgram};
    use crate::region::{Region, Span};
    use crate::reshard::{PlanOptions, Problem, plan};
    use crate::verify::verify_program;
    use proptest::prelude::*;

    type Event = (Rank, OpKind, What, Vec<Dep>);

    /// Keeps everything that passes.
    struct Recorder {
        counts: Vec<u32>,
        events: Vec<Event>,
    }

    impl Sink for Recorder {
        fn reserve(&mut self, _: Rank, _: usize) {}

        fn num_ops(&self, rank: Rank) -> u32 {
            self.counts[rank.index()]
        }

        fn push(&mut self, rank: Rank, kind: OpKind, what: What, deps: &[Dep]) {
            self.counts[rank.index()] += 1;
            self.events.push((rank, kind, what, deps.to_vec()));
        }
    }

    const RANKS: usize = 10;

    /// Copies, forwarding chains, and tokens from r5 to r6 and from r7 to r3.
    fn events() -> Vec<Event> {
        let (src, dst) = ("f32[8,4]@A{x:2,y:2}(x+y,_)", "f32[8,4]@B{z:2,w:4}=2-9(_,z)");
        let problem = Problem::pair(src.parse().unwrap(), dst.parse().unwrap()).unwrap();
        let mut plan = plan(&problem, &PlanOptions::default()).unwrap();
        assert!(is_right(&plan, &AllSides::of(&plan.problem)));
        let half = |start| Region::new(vec![Span::new(0, 8), Span::new(start, start + 2)]);
        let (left, right) = (plan.add_region(half(0)), plan.add_region(half(2)));
        let last = plan.add(0, Rank(4), Rank(5), left, &[]);
        let unseen = plan.add(0, Rank(6), Rank(7), right, &[last]);
        plan.add(0, Rank(3), Rank(4), left, &[unseen]);
        let sides = AllSides::of(&plan.problem);
        let mut recorder = Recorder { counts: vec![0; RANKS], events: vec![] };
        Lowering::new(&plan, &sides).emit_into(&mut recorder);
        recorder.events
    }

    fn is_right_when_passing(events: &[Event]) -> bool {
        let mut passing = Passing::new(RANKS, 0);
        for (rank, kind, what, deps) in events {
            passing.push(*rank, *kind, *what, deps);
        }
        passing.is_right()
    }

    fn is_right_as_a_graph(events: &[Event]) -> bool {
        let mut ranks = vec![RankProgram::default(); RANKS];
        for (rank, kind, what, deps) in events {
            Sink::push(&mut ranks, *rank, *kind, *what, deps);
        }
        verify_program(&Program { chunk_bytes: 1, ranks, copied: vec![] }).is_ok()
    }

    fn spoil(events: &mut Vec<Event>, at: usize, other: usize, how: u32) {
        let (at, other) = (at % events.len(), other % events.len());
        let number = other as u32;
        match (how, &mut events[at].1) {
            (0, _) => drop(events.remove(at)),
            (1, _) => events.swap(at, other),
            (2, _) => {
                let event = events[at].clone();
                events.insert(other, event);
            }
            (3, OpKind::Send { tag, .. } | OpKind::Recv { tag, .. }) => *tag = number,
            (4, OpKind::Send { lane, .. } | OpKind::Recv { lane, .. }) => *lane = number,
            (5, OpKind::Send { to: peer, .. } | OpKind::Recv { from: peer, .. }) => *peer = Rank(number % 10),
            (6, OpKind::Send { from: buffer, .. } | OpKind::Recv { into: buffer, .. }) => {
                *buffer = Buffer::Stage(0)
            }
            (7, _) => events[at].2.bytes += 1,
            (8, _) => events[at].2.region = RegionId(number),
            (9, _) => events[at].0 = Rank(number % 10),
            (10, _) => events[at].3.push(Dep { op: number, kind: DepKind::Done }),
            _ => events[at].3.push(Dep { op: number, kind: DepKind::Stream }),
        }
    }

    #[test]
    fn copies_chains_and_tokens_are_seen_to_be_right() {
        let events = events();
        let has = |is: fn(&OpKind) -> bool| events.iter().any(|e| is(&e.1));
        assert!(has(|kind| matches!(kind, OpKind::Copy { .. })));
        assert!(events.iter().any(|e| matches!(e.1, OpKind::Send { .. }) && e.2.bytes == 0), "no token");
        assert!(events.iter().any(|e| e.3.iter().any(|d| d.kind == DepKind::Stream)), "no forwarding");
        assert!(is_right_when_passing(&events) && is_right_as_a_graph(&events));
    }

    #[test]
    fn huge_boxes_are_left_to_the_graph() {
        let mut events = events();
        events.iter_mut().for_each(|e| e.2.bytes += 1 << 32);
        assert!(!is_right_when_passing(&events) && is_right_as_a_graph(&events));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn what_passes_is_right_as_a_graph(spoils in prop::collection::vec((0usize..99, 0usize..99, 0u32..12), 1..3)) {
            let mut events = events();
            for (at, other, how) in spoils {
                spoil(&mut events, at, other, how);
            }
            prop_assert!(!is_right_when_passing(&events) || is_right_as_a_graph(&events));
        }
    }
}
