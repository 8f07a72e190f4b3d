//! An order in which a program can run, or the cycle that keeps it from running.
//!
//! A send and its receive are one message, which starts once both sides are ready. So the graph has a node for every
//! message and every copy or pass, and an edge for every dependency and from every message to the next one on its
//! channel:
//!
//! ```text
//! r0: send t0 to r1                   t0 --> t1        t1's send waits for t0's receive
//! r1: recv t0, send t1 to r2           |
//! r0: send t2 to r1                   t2               second on the channel r0 -> r1
//! ```
//!
//! Without a cycle in this graph there is none when sends complete on their own either: that graph splits every node
//! into a send that leads to a receive, and has no other new edges. So one search proves both.
//!
//! Plans list transfers behind what they wait for, so that tags mostly rise along every edge; then they are the
//! order, and nothing has to be searched.

use crate::id::TransferId;
use crate::program::messages::{At, Message, Messages, NO_MESSAGE, NOWHERE};
use crate::program::{DepKind, Op, OpKind, Program};
use crate::topological::topological;

use super::error::VerifyError;

/// Where every op stands. Both ends of a message stand in one place.
pub struct Order<'a> {
    pub program: &'a Program,
    pub messages: &'a Messages,
    /// By rank: where its ops begin in tables of all ops.
    firsts: Vec<u32>,
    /// By op. An op comes after all that it waits for: its key is larger, or equal where it waits for a message and is
    /// no end of one itself.
    keys: Vec<u32>,
    /// Ops that are no ends of messages, in order of place.
    locals: Vec<At>,
}

impl<'a> Order<'a> {
    pub fn new(program: &'a Program, messages: &'a Messages) -> Result<Self, VerifyError> {
        let mut firsts = Vec::with_capacity(program.ranks.len());
        let mut num_ops = 0;
        for ranked in &program.ranks {
            firsts.push(num_ops);
            num_ops += ranked.ops.len() as u32;
        }
        let keys = Vec::with_capacity(num_ops as usize);
        let mut order = Self { program, messages, firsts, keys, locals: vec![] };
        if !order.follows_tags() {
            order.locals.clear();
            for (rank, ranked) in (0..).zip(&program.ranks) {
                let own = (0..).zip(&ranked.ops).filter(|(_, op)| is_local(op));
                order.locals.extend(own.map(|(i, _)| (rank, i)));
            }
            order.keys = vec![0; num_ops as usize];
            order.search()?;
        }
        Ok(order)
    }

    pub fn index(&self, at: At) -> usize {
        self.firsts[at.0 as usize] as usize + at.1 as usize
    }

    pub fn key(&self, at: At) -> u32 {
        self.keys[self.index(at)]
    }

    pub fn num_ops(&self) -> usize {
        self.keys.len()
    }

    pub fn op(&self, at: At) -> &'a Op {
        &self.program.ranks[at.0 as usize].ops[at.1 as usize]
    }

    /// A rank's ops in the order in which they can run.
    pub fn of_rank(&self, rank: u32) -> Vec<u32> {
        let ranked = &self.program.ranks[rank as usize];
        let mut ops: Vec<u32> = (0..ranked.ops.len() as u32).collect();
        let key = |op: u32| (self.key((rank, op)), is_local(&ranked.ops[op as usize]));
        if !ops.is_sorted_by_key(|op| key(*op)) {
            ops.sort_by_key(|op| key(*op));
        }
        ops
    }

    /// Whether the tags of messages rise along every edge. Keys are then a message's tag and one, and of other ops the largest key
    /// that they wait for. Finds keys and local ops on the way.
    fn follows_tags(&mut self) -> bool {
        let rises = |(tag, m): (u32, &Message)| m.previous == NO_MESSAGE || m.previous < tag;
        if !self.messages.iter().all(rises) {
            return false;
        }
        for (rank, ranked) in (0..).zip(&self.program.ranks) {
            let first = self.keys.len();
            for (i, op) in (0..).zip(&ranked.ops) {
                let mut latest = 0;
                for dep in ranked.deps(op) {
                    let on = &ranked.ops[dep.op as usize];
                    latest = latest.max(match on.tag() {
                        Some(tag) => tag.saturating_add(1),
                        None if dep.op < i => self.keys[first + dep.op as usize],
                        None => return false,
                    });
                }
                self.keys.push(match op.tag() {
                    Some(tag) if tag < latest => return false,
                    Some(tag) => tag + 1,
                    None => {
                        self.locals.push((rank, i));
                        latest
                    }
                });
            }
        }
        true
    }

    fn search(&mut self) -> Result<(), VerifyError> {
        let num_messages = self.messages.num_tags();
        let nodes = num_messages + self.locals.len();
        let sorted =
            topological(nodes, |node, i| self.waits_for(node, i)).map_err(|cycle| self.cycle(&cycle))?;
        for (place, node) in (0..).zip(sorted) {
            let ends = match self.messages.get(node) {
                Some(m) => [m.send, m.recv],
                None => [self.locals[node as usize - num_messages], NOWHERE],
            };
            for at in ends.into_iter().filter(|at| *at != NOWHERE) {
                let index = self.index(at);
                self.keys[index] = place;
            }
        }
        Ok(())
    }

    fn node(&self, at: At) -> u32 {
        self.op(at).tag().unwrap_or_else(|| {
            let local = self.locals.binary_search(&at).expect("all of these are listed");
            (self.messages.num_tags() + local) as u32
        })
    }

    /// The `i`-th thing a node waits for: the message before it on its channel, then what its ops wait for.
    fn waits_for(&self, node: u32, i: usize) -> Option<u32> {
        let (ends, previous) = match self.messages.get(node) {
            Some(m) => ([m.send, m.recv], m.previous),
            None => ([self.locals[node as usize - self.messages.num_tags()], NOWHERE], NO_MESSAGE),
        };
        let mut i = i;
        if previous != NO_MESSAGE {
            if i == 0 {
                return Some(previous);
            }
            i -= 1;
        }
        for at in ends.into_iter().filter(|at| *at != NOWHERE) {
            let deps = self.program.ranks[at.0 as usize].deps(self.op(at));
            match deps.get(i) {
                Some(dep) => return Some(self.node((at.0, dep.op))),
                None => i -= deps.len(),
            }
        }
        None
    }

    fn cycle(&self, nodes: &[u32]) -> VerifyError {
        let messages = nodes.iter().filter(|n| (**n as usize) < self.messages.num_tags());
        let transfers = messages.map(|n| TransferId(*n)).collect();
        let buffered = topological(2 * self.num_ops(), |node, i| self.waits_buffered(node, i)).is_err();
        VerifyError::Cycle { transfers, buffered }
    }

    /// The same where sends complete on their own. Nodes are the start and the end of every op.
    fn waits_buffered(&self, node: u32, i: usize) -> Option<u32> {
        let rank = self.firsts.partition_point(|first| *first <= node / 2) as u32 - 1;
        let at = (rank, node / 2 - self.firsts[rank as usize]);
        let (op, ranked) = (self.op(at), &self.program.ranks[rank as usize]);
        let start = |at: At| 2 * self.index(at) as u32;
        let end = |at: At| start(at) + 1;
        let message = op.tag().map(|tag| self.messages[tag]);
        let before = message.filter(|m| m.previous != NO_MESSAGE).map(|m| self.messages[m.previous]);
        let sends = matches!(op.kind, OpKind::Send { .. });
        let mut waits: Vec<u32> = vec![];
        if node.is_multiple_of(2) {
            let deps = ranked.deps(op).iter().map(|dep| (dep.kind, (rank, dep.op)));
            waits.extend(deps.map(|(kind, on)| if kind == DepKind::Done { end(on) } else { start(on) }));
            waits.extend(before.filter(|_| sends).map(|m| end(m.send)));
        } else {
            waits.push(start(at));
            let streams = ranked.deps(op).iter().filter(|dep| dep.kind == DepKind::Stream);
            waits.extend(streams.map(|dep| end((rank, dep.op))));
            waits.extend(message.filter(|_| !sends).map(|m| end(m.send)));
            waits.extend(before.filter(|_| !sends).map(|m| end(m.recv)));
        }
        waits.get(i).copied()
    }
}

fn is_local(op: &Op) -> bool {
    matches!(op.kind, OpKind::Copy { .. } | OpKind::Compute { .. })
}
