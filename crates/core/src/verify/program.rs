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

/// Both ends of a message, and the message before it on its channel as either end sees it.
#[derive(Debug, Clone, Copy)]
struct Ends {
    send: At,
    recv: At,
    sent_after: u32,
    received_after: u32,
}

const NO_ENDS: Ends = Ends { send: NOWHERE, recv: NOWHERE, sent_after: NO_NODE, received_after: NO_NODE };

/// A program as a graph of messages and copies. Node `i` below `num_messages` is the message with tag `i`.
pub struct Graph<'a> {
    program: &'a Program,
    messages: Vec<Ends>,
    /// In order of place.
    copies: Vec<At>,
    /// Whether copies wait for nothing, and messages only for copies and for messages with smaller tags.
    in_tag_order: bool,
}

/// A graph without a circle: its nodes in an order they could run in, and each node's place there.
pub struct Order {
    pub nodes: Vec<u32>,
    pub places: Vec<u32>,
}

impl<'a> Graph<'a> {
    /// Matches sends and receives.
    pub fn new(program: &'a Program) -> Result<Self, VerifyError> {
        let num_ops: usize = program.ranks.iter().map(|r| r.ops.len()).sum();
        // Every message has two ops; a program with larger tags leaves some unused.
        let messages = vec![NO_ENDS; num_ops.div_ceil(2)];
        let mut graph = Graph { program, messages, copies: vec![], in_tag_order: true };
        let mut num_messages = 0;
        let mut bad_dependency = None;
        let (mut sent, mut received) = (Channels::new(program), Channels::new(program));
        for (rank, ops) in (0..).map(Rank).zip(&program.ranks) {
            num_messages += graph.add_rank(rank, ops, &mut sent, &mut received)?;
            bad_dependency = bad_dependency.or_else(|| graph.bad_dependency(rank, ops));
        }
        graph.close(num_messages)?;
        graph.match_ends()?;
        graph.match_channels()?;
        bad_dependency.map_or(Ok(graph), Err)
    }

    /// Notes a rank's ends of messages, and its copies. Answers how many sends there are.
    fn add_rank(
        &mut self,
        rank: Rank,
        program: &RankProgram,
        sent: &mut Channels,
        received: &mut Channels,
    ) -> Result<usize, VerifyError> {
        let mut num_sends = 0;
        for (i, op) in (0..).zip(&program.ops) {
            let at = (rank.0, i);
            match op.kind {
                OpKind::Send { to, lane, tag, .. } => {
                    let ends = self.messages.get_mut(tag as usize).filter(|e| e.send == NOWHERE);
                    let Some(ends) = ends else { return Err(self.no_place(at, tag, "sends", "receives")) };
                    ends.send = at;
                    ends.sent_after = sent.follow(rank, to, lane, tag);
                    num_sends += 1;
                }
                OpKind::Recv { from, lane, tag, .. } => {
                    let ends = self.messages.get_mut(tag as usize).filter(|e| e.recv == NOWHERE);
                    let Some(ends) = ends else { return Err(self.no_place(at, tag, "receives", "sends")) };
                    ends.recv = at;
                    ends.received_after = received.follow(rank, from, lane, tag);
                }
                OpKind::Copy { .. } | OpKind::Compute { .. } => self.copies.push(at),
            }
        }
        Ok(num_sends)
    }

    fn no_place(&self, at: At, tag: u32, what: &'static str, missing: &'static str) -> VerifyError {
        match (tag as usize) < self.messages.len() {
            true => VerifyError::NotOnce { rank: Rank(at.0), tag, what, count: 2 },
            false => unmatched(at.0, tag, what, missing),
        }
    }

    /// Ends the list of messages. No tag is as large as there are sends, so every tag below is sent.
    fn close(&mut self, num_messages: usize) -> Result<(), VerifyError> {
        for (tag, ends) in (0..).zip(&self.messages).skip(num_messages) {
            match (ends.send, ends.recv) {
                (NOWHERE, NOWHERE) => {}
                (NOWHERE, (rank, _)) => return Err(unmatched(rank, tag, "receives", "sends")),
                ((rank, _), _) => return Err(unmatched(rank, tag, "sends", "receives")),
            }
        }
        self.messages.truncate(num_messages);
        Ok(())
    }

    fn op(&self, at: At) -> &'a Op {
        &self.program.ranks[at.0 as usize].ops[at.1 as usize]
    }

    fn match_ends(&self) -> Result<(), VerifyError> {
        for (tag, ends) in (0..).zip(&self.messages) {
            if ends.recv == NOWHERE {
                return Err(unmatched(ends.send.0, tag, "sends", "receives"));
            }
            let (send, recv) = (self.op(ends.send), self.op(ends.recv));
            let (OpKind::Send { to, lane, .. }, OpKind::Recv { from, lane: other_lane, .. }) =
                (send.kind, recv.kind)
            else {
                unreachable!("only sends and receives have tags");
            };
            let what = if to.0 != ends.recv.0 || from.0 != ends.send.0 {
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
            return Err(VerifyError::EndsDiffer {
                tag,
                src: Rank(ends.send.0),
                dst: Rank(ends.recv.0),
                what,
            });
        }
        Ok(())
    }

    /// Both ends of every channel see its messages in one order.
    fn match_channels(&self) -> Result<(), VerifyError> {
        let differs = |e: &Ends| e.sent_after != e.received_after;
        // The message that the receiver sees first.
        let first = self.messages.iter().filter(|e| differs(e)).min_by_key(|e| e.recv);
        let Some(ends) = first else { return Ok(()) };
        let OpKind::Recv { tag, from, .. } = self.op(ends.recv).kind else {
            unreachable!("a message's receive is one");
        };
        let before = |after: fn(&Ends) -> u32| {
            let previous = |t: &u32| Some(after(&self.messages[*t as usize])).filter(|p| *p != NO_NODE);
            std::iter::successors(Some(tag), previous).count() as u32 - 1
        };
        let (sent, received) = (before(|e| e.sent_after), before(|e| e.received_after));
        Err(VerifyError::ChannelOrder { tag, src: from, dst: Rank(ends.recv.0), sent, received })
    }

    fn bad_dependency(&mut self, rank: Rank, program: &RankProgram) -> Option<VerifyError> {
        for (i, op) in (0..).zip(&program.ops).filter(|(_, op)| !op.deps.is_empty()) {
            for dep in program.deps(op) {
                let bad = |why| Some(VerifyError::BadDependency { rank, op: i, dep: dep.op, why });
                let Some(on) = program.ops.get(dep.op as usize) else { return bad("does not exist") };
                let same = (on.tensor, on.bytes) == (op.tensor, op.bytes);
                if dep.kind == DepKind::Stream && !same {
                    return bad("moves another box and cannot be streamed");
                }
                self.in_tag_order &= tag_of(on) < tag_of(op);
            }
        }
        None
    }

    /// The node of an op.
    fn node(&self, at: At) -> u32 {
        tag_of(self.op(at)).unwrap_or_else(|| {
            let copy = self.copies.binary_search(&at).expect("all copies are listed");
            (self.messages.len() + copy) as u32
        })
    }

    fn num_nodes(&self) -> usize {
        self.messages.len() + self.copies.len()
    }

    fn deps(&self, at: At) -> &'a [Dep] {
        let program = &self.program.ranks[at.0 as usize];
        program.deps(&program.ops[at.1 as usize])
    }

    /// The `i`-th thing a node waits for: the message before it on its channel, then what its ops wait for.
    fn waits_for(&self, node: u32, i: u32, with_channels: bool) -> Option<(u32, DepKind)> {
        let (first, second, previous) = match self.messages.get(node as usize) {
            Some(ends) => (ends.send, ends.recv, ends.sent_after),
            None => (self.copies[node as usize - self.messages.len()], NOWHERE, NO_NODE),
        };
        let mut i = i as usize;
        if with_channels && previous != NO_NODE {
            if i == 0 {
                return Some((previous, DepKind::Done));
            }
            i -= 1;
        }
        let deps = self.deps(first);
        let (rank, dep) = match deps.get(i) {
            Some(dep) => (first.0, dep),
            None if second == NOWHERE => return None,
            None => (second.0, self.deps(second).get(i - deps.len())?),
        };
        Some((self.node((rank, dep.op)), dep.kind))
    }

    /// An order in which the program can run, or the circle that keeps it from running.
    pub fn order(&self) -> Result<Order, VerifyError> {
        if self.is_in_tag_order() {
            return Ok(self.tag_order());
        }
        const OPEN: u32 = u32::MAX - 1;
        let n = self.num_nodes();
        let mut order = Order { nodes: Vec::with_capacity(n), places: vec![NO_NODE; n] };
        let mut path: Vec<(u32, u32)> = Vec::new();
        for start in 0..n as u32 {
            if order.places[start as usize] != NO_NODE {
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

    /// Whether everything waits for smaller tags only, as in a program lowered from a plan in which every transfer
    /// waits for earlier ones. There can be no circle then, and there is no need to search for one.
    fn is_in_tag_order(&self) -> bool {
        let in_order = |(tag, ends): (u32, &Ends)| ends.sent_after == NO_NODE || ends.sent_after < tag;
        self.in_tag_order && (0..).zip(&self.messages).all(in_order)
    }

    /// Copies, then messages.
    fn tag_order(&self) -> Order {
        let (num_messages, num_copies) = (self.messages.len() as u32, self.copies.len() as u32);
        let copies = num_messages..num_messages + num_copies;
        let nodes: Vec<u32> = copies.chain(0..num_messages).collect();
        let mut places = vec![NO_NODE; self.num_nodes()];
        for (place, node) in (0..).zip(&nodes) {
            places[*node as usize] = place;
        }
        Order { nodes, places }
    }

    fn circle(&self, path: &[(u32, u32)]) -> VerifyError {
        let messages = path.iter().map(|(n, _)| *n).filter(|n| (*n as usize) < self.messages.len());
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
        let Some(ends) = self.messages.get(node as usize) else { return true };
        let channel = u32::from(ends.sent_after != NO_NODE);
        i < channel + self.deps(ends.send).len() as u32
    }

    /// Whether what waits for a message waits for its send, on the sender.
    fn is_waited_for_by_send(&self, node: u32, waiting: u32) -> bool {
        let Some(&Ends { send: (rank, op), .. }) = self.messages.get(node as usize) else { return false };
        let ends = match self.messages.get(waiting as usize) {
            Some(ends) => [ends.send, ends.recv],
            None => [self.copies[waiting as usize - self.messages.len()], NOWHERE],
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

/// An op's rank in tag order: copies, then messages by tag.
fn tag_of(op: &Op) -> Option<u32> {
    match op.kind {
        OpKind::Send { tag, .. } | OpKind::Recv { tag, .. } => Some(tag),
        OpKind::Copy { .. } | OpKind::Compute { .. } => None,
    }
}

/// The last message of every channel of the rank at hand, by peer: most peers see one lane.
struct Channels {
    first_lane: Vec<Channel>,
    other_lanes: FxHashMap<(Rank, u32), u32>,
    rank: Rank,
}

#[derive(Clone, Copy)]
struct Channel {
    of: Rank,
    lane: u32,
    last: u32,
}

impl Channels {
    fn new(program: &Program) -> Self {
        let nobody = Rank(u32::MAX);
        let first_lane = vec![Channel { of: nobody, lane: 0, last: NO_NODE }; program.ranks.len()];
        Self { first_lane, other_lanes: FxHashMap::default(), rank: nobody }
    }

    /// Puts a message behind the last one on its channel, which it answers.
    fn follow(&mut self, rank: Rank, peer: Rank, lane: u32, tag: u32) -> u32 {
        if self.rank != rank {
            self.rank = rank;
            self.other_lanes.clear();
        }
        match self.first_lane.get_mut(peer.index()) {
            Some(channel) if channel.of != rank => {
                *channel = Channel { of: rank, lane, last: tag };
                NO_NODE
            }
            Some(channel) if channel.lane == lane => std::mem::replace(&mut channel.last, tag),
            _ => self.other_lanes.insert((peer, lane), tag).unwrap_or(NO_NODE),
        }
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
            OpKind::Copy { from, into, reduce } => (Some(from), Some(into), reduce),
            OpKind::Compute { .. } => continue,
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
        let node = |op: u32| self.graph.node((rank.0, op));
        let (target, start) = (node(reader), node(writer));
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
