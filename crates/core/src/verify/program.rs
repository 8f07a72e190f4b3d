//! The laws of a program: messages match, nothing waits in a circle, staging memory has one user at a time.
//!
//! A send and its receive are one message, which starts once both sides are ready. So the graph has a node for every
//! message and every copy, and an edge for every dependency and from every message to the next one on its
//! channel:
//!
//! ```text
//! r0: send t0 to r1                   t0 --> t1        t1's send waits for t0's receive
//! r1: recv t0, send t1 to r2           |
//! r0: send t2 to r1                   t2               second on the channel r0 -> r1
//! ```
//!
//! Without a circle in this graph there is none when sends complete on their own either: that graph splits every node
//! into a send that leads to a receive, and has no other new edges. So one search proves both.

use rustc_hash::FxHashMap;

use crate::id::{Rank, TransferId};
use crate::program::{Buffer, Dep, DepKind, Op, OpKind, Program, RankProgram};

use super::error::VerifyError;

/// An op's place: rank and index.
type At = (u32, u32);

const NOWHERE: At = (u32::MAX, u32::MAX);
const NO_NODE: u32 = u32::MAX;

/// A program as a graph of messages and copies. Node `i` below `num_messages` is the message with tag `i`.
pub struct Graph<'a> {
    program: &'a Program,
    sends: Vec<At>,
    recvs: Vec<At>,
    copies: Vec<At>,
    /// By message: the one before it on its channel.
    previous: Vec<u32>,
    /// By rank and op: its node.
    nodes: Vec<Vec<u32>>,
}

/// A graph without a circle: its nodes in an order they could run in, and each node's place there.
pub struct Order {
    pub nodes: Vec<u32>,
    pub places: Vec<u32>,
}

impl<'a> Graph<'a> {
    /// Matches sends and receives.
    pub fn new(program: &'a Program) -> Result<Self, VerifyError> {
        let ops = || program.ranks.iter().flat_map(|r| &r.ops);
        let num_messages = ops().filter(|op| matches!(op.kind, OpKind::Send { .. })).count();
        let mut graph = Graph {
            program,
            sends: vec![NOWHERE; num_messages],
            recvs: vec![NOWHERE; num_messages],
            copies: vec![],
            previous: vec![NO_NODE; num_messages],
            nodes: vec![],
        };
        for (rank, program) in (0..).zip(&program.ranks) {
            let nodes: Result<Vec<u32>, VerifyError> =
                (0..).zip(&program.ops).map(|(i, op)| graph.add((rank, i), op)).collect();
            graph.nodes.push(nodes?);
        }
        graph.match_ends()?;
        graph.match_channels()?;
        graph.check_dependencies()?;
        Ok(graph)
    }

    fn add(&mut self, at: At, op: &Op) -> Result<u32, VerifyError> {
        let (tag, ends, what, missing) = match op.kind {
            OpKind::Send { tag, .. } => (tag, &mut self.sends, "sends", "receives"),
            OpKind::Recv { tag, .. } => (tag, &mut self.recvs, "receives", "sends"),
            OpKind::Copy { .. } => {
                self.copies.push(at);
                return Ok((self.sends.len() + self.copies.len()) as u32 - 1);
            }
        };
        let rank = Rank(at.0);
        let end = ends.get_mut(tag as usize).ok_or(VerifyError::Unmatched { rank, tag, what, missing })?;
        if *end != NOWHERE {
            return Err(VerifyError::NotOnce { rank, tag, what, count: 2 });
        }
        *end = at;
        Ok(tag)
    }

    fn op(&self, at: At) -> &'a Op {
        &self.program.ranks[at.0 as usize].ops[at.1 as usize]
    }

    fn match_ends(&self) -> Result<(), VerifyError> {
        for (tag, (&send_at, &recv_at)) in (0..).zip(self.sends.iter().zip(&self.recvs)) {
            match (send_at, recv_at) {
                (NOWHERE, NOWHERE) => continue,
                (NOWHERE, (rank, _)) => return Err(unmatched(rank, tag, "receives", "sends")),
                ((rank, _), NOWHERE) => return Err(unmatched(rank, tag, "sends", "receives")),
                _ => {}
            }
            let (send, recv) = (self.op(send_at), self.op(recv_at));
            let (OpKind::Send { to, lane, .. }, OpKind::Recv { from, lane: other_lane, .. }) =
                (send.kind, recv.kind)
            else {
                unreachable!("only sends and receives have tags");
            };
            let what = if to.0 != recv_at.0 || from.0 != send_at.0 {
                "peers"
            } else if lane != other_lane {
                "lane"
            } else if send.bytes != recv.bytes {
                "bytes"
            } else if (send.tensor, send.region) != (recv.tensor, recv.region) {
                "box"
            } else {
                continue;
            };
            return Err(VerifyError::EndsDiffer { tag, src: Rank(send_at.0), dst: Rank(recv_at.0), what });
        }
        Ok(())
    }

    /// Both ends of every channel see its messages in one order.
    fn match_channels(&mut self) -> Result<(), VerifyError> {
        let mut places = vec![0u32; self.sends.len()];
        // By peer and lane: how many messages so far, and the last of them.
        let mut channels: FxHashMap<(Rank, u32), (u32, u32)> = FxHashMap::default();
        for rank in &self.program.ranks {
            channels.clear();
            for op in &rank.ops {
                if let OpKind::Send { to, lane, tag, .. } = op.kind {
                    let channel = channels.entry((to, lane)).or_insert((0, NO_NODE));
                    places[tag as usize] = channel.0;
                    self.previous[tag as usize] = channel.1;
                    *channel = (channel.0 + 1, tag);
                }
            }
        }
        for (dst, rank) in (0..).map(Rank).zip(&self.program.ranks) {
            channels.clear();
            for op in &rank.ops {
                if let OpKind::Recv { from, lane, tag, .. } = op.kind {
                    let channel = channels.entry((from, lane)).or_insert((0, NO_NODE));
                    let (sent, received) = (places[tag as usize], channel.0);
                    if sent != received {
                        return Err(VerifyError::ChannelOrder { tag, src: from, dst, sent, received });
                    }
                    channel.0 += 1;
                }
            }
        }
        Ok(())
    }

    fn check_dependencies(&self) -> Result<(), VerifyError> {
        for (rank, program) in (0..).map(Rank).zip(&self.program.ranks) {
            for (i, op) in (0..).zip(&program.ops) {
                for dep in program.deps(op) {
                    let bad = |why| Err(VerifyError::BadDependency { rank, op: i, dep: dep.op, why });
                    let Some(on) = program.ops.get(dep.op as usize) else { return bad("does not exist") };
                    let same = (on.tensor, on.bytes) == (op.tensor, op.bytes);
                    if dep.kind == DepKind::Stream && !same {
                        return bad("moves another box and cannot be streamed");
                    }
                }
            }
        }
        Ok(())
    }

    fn num_nodes(&self) -> usize {
        self.sends.len() + self.copies.len()
    }

    fn deps(&self, at: At) -> &'a [Dep] {
        let program = &self.program.ranks[at.0 as usize];
        program.deps(&program.ops[at.1 as usize])
    }

    /// The `i`-th thing a node waits for: the message before it on its channel, then what its ops wait for.
    fn waits_for(&self, node: u32, i: u32, with_channels: bool) -> Option<(u32, DepKind)> {
        let (first, second) = match self.sends.get(node as usize) {
            Some(send) => (*send, self.recvs[node as usize]),
            None => (self.copies[node as usize - self.sends.len()], NOWHERE),
        };
        let mut i = i as usize;
        if with_channels && self.previous.get(node as usize).is_some_and(|p| *p != NO_NODE) {
            if i == 0 {
                return Some((self.previous[node as usize], DepKind::Done));
            }
            i -= 1;
        }
        let deps = self.deps(first);
        let (rank, dep) = match deps.get(i) {
            Some(dep) => (first.0, dep),
            None if second == NOWHERE => return None,
            None => (second.0, self.deps(second).get(i - deps.len())?),
        };
        Some((self.nodes[rank as usize][dep.op as usize], dep.kind))
    }

    /// An order in which the program can run, or the circle that keeps it from running.
    pub fn order(&self) -> Result<Order, VerifyError> {
        const OPEN: u32 = u32::MAX - 1;
        let n = self.num_nodes();
        let mut order = Order { nodes: Vec::with_capacity(n), places: vec![NO_NODE; n] };
        let mut path: Vec<(u32, u32)> = Vec::new();
        for start in 0..n as u32 {
            if order.places[start as usize] != NO_NODE || self.is_unused(start) {
                continue;
            }
            path.push((start, 0));
            order.places[start as usize] = OPEN;
            while let Some((node, i)) = path.last_mut() {
                let waits_for = self.waits_for(*node, *i, true);
                *i += 1;
                match waits_for {
                    Some((next, _)) if order.places[next as usize] == NO_NODE => {
                        order.places[next as usize] = OPEN;
                        path.push((next, 0));
                    }
                    Some((next, _)) if order.places[next as usize] == OPEN => {
                        let first =
                            path.iter().position(|(n, _)| *n == next).expect("open nodes are on the path");
                        return Err(self.circle(&path[first..]));
                    }
                    Some(_) => {}
                    None => {
                        order.places[*node as usize] = order.nodes.len() as u32;
                        order.nodes.push(*node);
                        path.pop();
                    }
                }
            }
        }
        Ok(order)
    }

    /// A tag that no op uses.
    fn is_unused(&self, node: u32) -> bool {
        self.sends.get(node as usize) == Some(&NOWHERE)
    }

    fn circle(&self, path: &[(u32, u32)]) -> VerifyError {
        let messages = path.iter().map(|(n, _)| *n).filter(|n| (*n as usize) < self.sends.len());
        VerifyError::Circle {
            transfers: messages.map(TransferId).collect(),
            buffered: self.hangs_buffered(path),
        }
    }

    /// Whether the circle remains where a send completes on its own: every step must then lead from a message's
    /// receive, or from its send, to the op that waits.
    fn hangs_buffered(&self, path: &[(u32, u32)]) -> bool {
        // The circle closes if it can be walked so that it never has to go from a receive back to its own send.
        let steps = path.len();
        (0..steps).all(|k| {
            let (node, i) = path[k];
            let (waiting, _) = path[(k + steps - 1) % steps];
            let on_send = self.waits_on_its_send(node, i - 1);
            on_send || !self.is_waited_for_by_send(node, waiting)
        })
    }

    /// Whether the `i`-th thing a node waits for holds up its send side.
    fn waits_on_its_send(&self, node: u32, i: u32) -> bool {
        let Some(send) = self.sends.get(node as usize) else { return true };
        let channel = u32::from(self.previous[node as usize] != NO_NODE);
        i < channel + self.deps(*send).len() as u32
    }

    /// Whether what waits for a message waits for its send, on the sender.
    fn is_waited_for_by_send(&self, node: u32, waiting: u32) -> bool {
        let Some(&(rank, op)) = self.sends.get(node as usize) else { return false };
        let ends = match self.sends.get(waiting as usize) {
            Some(send) => [*send, self.recvs[waiting as usize]],
            None => [self.copies[waiting as usize - self.sends.len()], NOWHERE],
        };
        ends.iter().any(|end| end.0 == rank && self.deps(*end).iter().any(|d| d.op == op))
    }

    /// Checks every staging buffer of every rank; the most memory any rank needs, and which.
    pub fn check_memory(&self, order: &Order) -> Result<(Rank, u64), VerifyError> {
        let mut search = Search::new(self, order);
        let mut peak = (Rank(0), 0);
        for (rank, program) in (0..).map(Rank).zip(&self.program.ranks) {
            check_slots(rank, program, &mut search)?;
            if program.extra_bytes() > peak.1 {
                peak = (rank, program.extra_bytes());
            }
        }
        Ok(peak)
    }
}

fn unmatched(rank: u32, tag: u32, what: &'static str, missing: &'static str) -> VerifyError {
    VerifyError::Unmatched { rank: Rank(rank), tag, what, missing }
}

/// Who has a staging buffer at present: the ops that filled or read it since it was last taken.
#[derive(Default, Clone)]
struct Slot {
    users: Vec<u32>,
    filled_by_copy: bool,
}

fn check_slots(rank: Rank, program: &RankProgram, search: &mut Search) -> Result<(), VerifyError> {
    if program.stages.is_empty() {
        return Ok(());
    }
    let mut slots = vec![Slot::default(); program.stages.len()];
    for (i, op) in (0..).zip(&program.ops) {
        let (from, into, adds) = match op.kind {
            OpKind::Send { from, .. } => (Some(from), None, false),
            OpKind::Recv { into, reduce, .. } => (None, Some(into), reduce),
            OpKind::Copy { from, into } => (Some(from), Some(into), false),
        };
        if let Some(Buffer::Stage(slot)) = from {
            let bad =
                VerifyError::BadDependency { rank, op: i, dep: slot, why: "is a staging buffer it lacks" };
            slots.get_mut(slot as usize).ok_or(bad)?.users.push(i);
        }
        let Some(Buffer::Stage(slot)) = into else { continue };
        let slot_bytes = program.stages.get(slot as usize).copied().unwrap_or(0);
        if slot_bytes < op.bytes {
            return Err(VerifyError::SlotTooSmall { rank, slot, slot_bytes, op: i, bytes: op.bytes });
        }
        let held = &mut slots[slot as usize];
        // A box may be put together by several copies; nothing reads it before the last of them.
        let copy = matches!(op.kind, OpKind::Copy { .. });
        let goes_on =
            adds || (copy && held.filled_by_copy && held.users.iter().all(|u| is_copy(program, *u)));
        if !goes_on {
            for reader in std::mem::take(&mut held.users) {
                if !search.comes_before(rank, reader, i) {
                    return Err(VerifyError::SlotTaken { rank, slot, reader, writer: i });
                }
            }
        }
        held.filled_by_copy = copy;
        held.users.push(i);
    }
    Ok(())
}

fn is_copy(program: &RankProgram, op: u32) -> bool {
    matches!(program.ops[op as usize].kind, OpKind::Copy { .. })
}

/// Looks for a chain of dependencies from one op to another.
struct Search<'a> {
    graph: &'a Graph<'a>,
    order: &'a Order,
    /// By node and whether the chain so far waits for an end: the search that saw it last.
    seen: Vec<[u32; 2]>,
    searches: u32,
}

impl<'a> Search<'a> {
    fn new(graph: &'a Graph<'a>, order: &'a Order) -> Self {
        Self { graph, order, seen: vec![], searches: 0 }
    }

    /// Whether `writer` cannot start before `reader` has ended. Streaming alone does not give that; a chain with one
    /// wait for an end in it does, because what streams ends no sooner than what it follows.
    fn comes_before(&mut self, rank: Rank, reader: u32, writer: u32) -> bool {
        let nodes = &self.graph.nodes[rank.index()];
        let (target, start) = (nodes[reader as usize], nodes[writer as usize]);
        if self.seen.is_empty() {
            self.seen = vec![[0; 2]; self.graph.num_nodes()];
        }
        self.searches += 1;
        let mut open = vec![(start, false)];
        while let Some((node, ended)) = open.pop() {
            for i in 0.. {
                let Some((next, kind)) = self.graph.waits_for(node, i, false) else { break };
                let ended = ended || kind == DepKind::Done;
                if next == target && ended {
                    return true;
                }
                let seen = &mut self.seen[next as usize][usize::from(ended)];
                let too_early = self.order.places[next as usize] < self.order.places[target as usize];
                if !too_early && *seen != self.searches {
                    *seen = self.searches;
                    open.push((next, ended));
                }
            }
        }
        false
    }
}
