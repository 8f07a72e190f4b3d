//! In which order a rank posts its messages where it can only post and wait: on somebody else's transport, such as torch's.
//!
//! There a rank posts sends and receives, piece by piece, and stands still until one of them is over. So that nobody stands still for what
//! somebody else has not come to yet, all ranks go by one clock, in which a piece takes a tick:
//!
//! ```text
//! tick                       0      1      2      3      4      5
//! t0: r0 -> r1, 3 pieces     t0.0   t0.1   t0.2
//! t1: r1 -> r2, follows t0          t1.0   t1.1   t1.2           a piece behind
//! t2: r3 -> r2, after t0                          t2.0   t2.1    behind the last piece of t0
//! ```
//!
//! Every rank posts in the order of the ticks, and what it stands still for has an earlier one. Of all pieces that have not moved, take
//! one with the earliest tick: nothing that either of its ends has to stand still for before it is left, so both have posted it, and it moves.
//! That holds even where a send waits for its receive. Receives are posted before their tick, as soon as their memory is free.

use std::collections::BTreeMap;

use super::messages::{At, MatchError, Matcher, NOWHERE};
use super::{Dep, DepKind, Op, OpKind, Program, RankProgram};
use crate::id::Rank;
use crate::topological::topological;

/// How messages are cut, and what tells them from each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Matching {
    /// Each piece has a tag of its own.
    ByTag { piece_bytes: u64 },
    /// A message is for whatever its receiver has posted next for the sender; it goes whole, and two ranks post for each other in one order.
    ByOrder,
}

/// Something to post on one rank, or a copy to make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Post {
    pub op: u32,
    /// Of a receive the first: all of them are posted.
    pub piece: u32,
    /// Of the piece, among all pieces from this sender to this receiver; those of a receive rise by one.
    pub tag: u32,
    /// What has to be over first: of these ops so many pieces.
    pub waits: Vec<(u32, u32)>,
}

/// Why a program has no such order.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PostingError {
    #[error(transparent)]
    Unmatched(#[from] MatchError),
    #[error("messages {tags:?} wait for each other\nhint: `verify` names the transfers")]
    Cycle { tags: Vec<u32> },
}

/// When every op of a program begins.
#[derive(Debug)]
pub struct Posting {
    matching: Matching,
    /// By rank and op; empty where nothing waits for a message.
    ticks: Vec<Vec<u64>>,
}

impl Posting {
    /// Of all ranks' ops.
    pub fn new(program: &Program, matching: Matching) -> Result<Self, PostingError> {
        let mut matcher = Matcher::new(program);
        for rank in (0..program.ranks.len()).map(Rank::at) {
            matcher.add(rank)?;
        }
        let messages = matcher.finish()?;
        let mut graph =
            Graph { program, matching, nodes: vec![[NOWHERE; 2]; messages.num_tags()], locals: vec![] };
        for (tag, message) in messages.iter() {
            graph.nodes[tag as usize] = [message.send, message.recv];
        }
        for (rank, ranked) in (0..).zip(&program.ranks) {
            let own = (0..).zip(&ranked.ops).filter(|(_, op)| op.tag().is_none());
            graph.locals.extend(own.map(|(op, _)| (rank, op)));
        }
        graph.nodes.extend(graph.locals.iter().map(|at| [*at, NOWHERE]));
        Ok(Self { matching, ticks: graph.ticks(messages.num_tags())? })
    }

    /// Of programs in which nothing waits for a message: a rank's order is its own business, and nobody has to look at the others.
    pub fn unordered(matching: Matching) -> Self {
        Self { matching, ticks: vec![] }
    }

    /// What a rank posts, in order.
    pub fn of_rank(&self, ranked: &RankProgram, rank: Rank) -> Vec<Post> {
        let of = Cut { ranked, matching: self.matching };
        let alone;
        let ticks = match self.ticks.get(rank.index()) {
            Some(ticks) => ticks,
            None => {
                alone = of.ticks_alone();
                &alone
            }
        };
        let tags = self.tags(&of);
        let mut posts = vec![];
        for (index, op) in (0..).zip(&ranked.ops) {
            let is_send = matches!(op.kind, OpKind::Send { .. });
            for piece in 0..if is_send { of.pieces(op) } else { 1 } {
                let waits = of.waits(op, piece);
                let tick = match op.kind {
                    OpKind::Recv { .. } if self.matching != Matching::ByOrder => waits
                        .iter()
                        .map(|(on, count)| ticks[*on as usize] + u64::from(*count))
                        .max()
                        .unwrap_or(0),
                    _ => ticks[index as usize] + u64::from(piece),
                };
                let tag = tags[index as usize] + piece;
                posts.push((self.key(tick, op), Post { op: index, piece, tag, waits }));
            }
        }
        posts.sort_by_key(|(key, post)| (*key, post.op));
        posts.into_iter().map(|(_, post)| post).collect()
    }

    /// Of what has one tick, receives go first, for senders wait for them; in one order of both ends where that is what matches them. Copies
    /// are made once others have something to do.
    fn key(&self, tick: u64, op: &Op) -> (u64, u32, u32) {
        match (self.matching, op.tag()) {
            (_, None) => (tick, 2, 0),
            (Matching::ByOrder, Some(tag)) => (tick, 0, tag),
            (Matching::ByTag { .. }, Some(_)) => (tick, u32::from(matches!(op.kind, OpKind::Send { .. })), 0),
        }
    }

    /// By op: the tag of its first piece. Both ends of a pair of ranks see the same messages, and number them alike.
    fn tags(&self, of: &Cut<'_>) -> Vec<u32> {
        let mut pairs: BTreeMap<(bool, Rank), Vec<(u32, u32)>> = BTreeMap::new();
        for (index, op) in (0..).zip(&of.ranked.ops) {
            match op.kind {
                OpKind::Send { to, tag, .. } => pairs.entry((true, to)).or_default().push((tag, index)),
                OpKind::Recv { from, tag, .. } => pairs.entry((false, from)).or_default().push((tag, index)),
                OpKind::Copy { .. } | OpKind::Compute { .. } => {}
            }
        }
        let mut tags = vec![0; of.ranked.ops.len()];
        for mut messages in pairs.into_values() {
            messages.sort_unstable();
            let mut next = 0;
            for (_, index) in messages {
                tags[index as usize] = next;
                next += of.pieces(&of.ranked.ops[index as usize]);
            }
        }
        tags
    }
}

/// One rank's ops, cut.
#[derive(Clone, Copy)]
struct Cut<'a> {
    ranked: &'a RankProgram,
    matching: Matching,
}

impl Cut<'_> {
    /// Where ops wait for copies at most. Messages that match by their order have one tick then, and so the order of their tags.
    fn ticks_alone(&self) -> Vec<u64> {
        let deps = |op: u32| self.ranked.deps(&self.ranked.ops[op as usize]);
        let sorted = topological(self.ranked.ops.len(), |op, i| deps(op).get(i).map(|dep| dep.op));
        let mut ticks = vec![0; self.ranked.ops.len()];
        for op in sorted.expect("copies that wait for nothing are in no cycle") {
            ticks[op as usize] = deps(op).iter().map(|dep| ticks[dep.op as usize] + 1).max().unwrap_or(0);
        }
        if self.matching == Matching::ByOrder {
            let last = ticks.iter().max().copied().unwrap_or(0);
            let messages = self.ranked.ops.iter().zip(&mut ticks).filter(|(op, _)| op.tag().is_some());
            messages.for_each(|(_, tick)| *tick = last);
        }
        ticks
    }

    /// By a message's bytes alone, so that both ends count the same.
    fn pieces(&self, op: &Op) -> u32 {
        match (self.matching, op.tag()) {
            (Matching::ByTag { piece_bytes }, Some(_)) => {
                let pieces = op.bytes.div_ceil(piece_bytes.max(1)).max(1);
                u32::try_from(pieces).expect("a message has fewer than 2^32 pieces")
            }
            _ => 1,
        }
    }

    /// Whether an op follows another a piece behind: what is passed on as it arrives. A sum is there when all of it is.
    fn by_piece(&self, op: &Op, dep: &Dep) -> bool {
        let on = &self.ranked.ops[dep.op as usize];
        let as_it_arrives = matches!(on.kind, OpKind::Recv { reduce: false, .. }) && on.bytes == op.bytes;
        dep.kind == DepKind::Stream && matches!(op.kind, OpKind::Send { .. }) && as_it_arrives
    }

    /// What a piece of an op waits for that none before it has.
    fn waits(&self, op: &Op, piece: u32) -> Vec<(u32, u32)> {
        let one = |dep: &Dep| match self.by_piece(op, dep) {
            true => Some((dep.op, piece + 1)),
            false => (piece == 0).then(|| (dep.op, self.pieces(&self.ranked.ops[dep.op as usize]))),
        };
        self.ranked.deps(op).iter().filter_map(one).collect()
    }
}

/// A node for every message, then one for every other op.
struct Graph<'a> {
    program: &'a Program,
    matching: Matching,
    nodes: Vec<[At; 2]>,
    /// In order of place.
    locals: Vec<At>,
}

impl<'a> Graph<'a> {
    fn ticks(&self, num_tags: usize) -> Result<Vec<Vec<u64>>, PostingError> {
        let before =
            |node: u32, i: usize| self.nth_dep(node, i).map(|(at, dep)| self.node(num_tags, (at.0, dep.op)));
        let sorted = topological(self.nodes.len(), before).map_err(|cycle| PostingError::Cycle {
            tags: cycle.into_iter().filter(|node| (*node as usize) < num_tags).collect(),
        })?;
        let mut ticks: Vec<Vec<u64>> = self.program.ranks.iter().map(|r| vec![0; r.ops.len()]).collect();
        for node in sorted {
            let ends = self.nodes[node as usize].into_iter().filter(|at| *at != NOWHERE);
            let waits = ends.clone().flat_map(|at| {
                let (of, op) = self.op(at);
                of.waits(op, 0).into_iter().map(move |wait| (at.0, wait))
            });
            let tick =
                waits.map(|(rank, (on, count))| ticks[rank as usize][on as usize] + u64::from(count)).max();
            for (rank, op) in ends {
                ticks[rank as usize][op as usize] = tick.unwrap_or(0);
            }
        }
        Ok(ticks)
    }

    fn op(&self, at: At) -> (Cut<'a>, &'a Op) {
        let ranked = &self.program.ranks[at.0 as usize];
        (Cut { ranked, matching: self.matching }, &ranked.ops[at.1 as usize])
    }

    fn node(&self, num_tags: usize, at: At) -> u32 {
        self.op(at).1.tag().unwrap_or_else(|| {
            let local = self.locals.binary_search(&at).expect("all of these are listed");
            (num_tags + local) as u32
        })
    }

    /// The `i`-th thing that the ops of a node wait for, with the op that does.
    fn nth_dep(&self, node: u32, mut i: usize) -> Option<(At, Dep)> {
        for at in self.nodes[node as usize].into_iter().filter(|at| *at != NOWHERE) {
            let (of, op) = self.op(at);
            let deps = of.ranked.deps(op);
            match deps.get(i) {
                Some(dep) => return Some((at, *dep)),
                None => i -= deps.len(),
            }
        }
        None
    }
}
