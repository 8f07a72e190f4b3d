//! The program as the simulator needs it: messages, the channels they queue in, and who waits for whom.

use rustc_hash::FxHashMap;

use super::SimError;
use crate::id::Rank;
use crate::program::{DepKind, OpKind, Program};

/// A send and its receive, as one.
#[derive(Debug, Clone)]
pub(super) struct Message {
    pub channel: u32,
    pub bytes: f64,
    pub weight: f64,
    pub src: Rank,
    pub dst: Rank,
    pub send_op: u32,
    pub recv_op: u32,
    /// What still has to end before it may start: its dependencies on both sides.
    pub pending: u32,
}

/// Something in the program that ends, and lets others start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    Sent(u32),
    Received(u32),
    Local(u32),
}

/// What a rank does by itself: a copy, which takes no time but has an order, or a computation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Local {
    pub rank: Rank,
    pub op: u32,
    pub pending: u32,
    pub seconds: f64,
}

/// Lists of ids, one list per key, in one allocation.
#[derive(Debug, Default)]
pub(super) struct Lists {
    start: Vec<u32>,
    items: Vec<u32>,
}

impl Lists {
    pub(super) fn new(keys: usize, pairs: &[(u32, u32)]) -> Self {
        let mut start = vec![0u32; keys + 1];
        for (key, _) in pairs {
            start[*key as usize + 1] += 1;
        }
        for i in 0..keys {
            start[i + 1] += start[i];
        }
        let mut next = start.clone();
        let mut items = vec![0; pairs.len()];
        for (key, item) in pairs {
            items[next[*key as usize] as usize] = *item;
            next[*key as usize] += 1;
        }
        Self { start, items }
    }

    pub(super) fn of(&self, key: u32) -> &[u32] {
        match self.start.get(key as usize..key as usize + 2) {
            Some(range) => &self.items[range[0] as usize..range[1] as usize],
            None => &[],
        }
    }
}

/// Everything static about a simulation.
#[derive(Debug)]
pub(super) struct Wiring {
    pub messages: Vec<Message>,
    pub locals: Vec<Local>,
    /// For every channel its ranks and its messages, in order.
    pub channel_ends: Vec<(Rank, Rank)>,
    pub queues: Lists,
    /// Who waits for an ending: message ids, then those of local ops above them.
    waiting: Lists,
    /// The messages that follow a message chunk by chunk, and the messages one follows.
    pub followers: Lists,
    pub leaders: Lists,
}

impl Wiring {
    pub(super) fn of(program: &Program) -> Result<Self, SimError> {
        let mut wiring = Wiring {
            messages: vec![],
            locals: vec![],
            channel_ends: vec![],
            queues: Lists::default(),
            waiting: Lists::default(),
            followers: Lists::default(),
            leaders: Lists::default(),
        };
        wiring.match_messages(program)?;
        wiring.connect(program);
        Ok(wiring)
    }

    pub(super) fn waiting(&self, ending: Ending) -> &[u32] {
        self.waiting.of(self.key(ending))
    }

    fn key(&self, ending: Ending) -> u32 {
        match ending {
            Ending::Sent(m) => 2 * m,
            Ending::Received(m) => 2 * m + 1,
            Ending::Local(l) => 2 * self.messages.len() as u32 + l,
        }
    }

    /// Sends become messages, numbered by tag order; receives find theirs.
    fn match_messages(&mut self, program: &Program) -> Result<(), SimError> {
        let mut channels: FxHashMap<(Rank, Rank, u32), u32> = FxHashMap::default();
        let mut by_tag: Vec<u32> = vec![];
        let mut queued: Vec<(u32, u32)> = vec![];
        for (rank, ranked) in program.ranks.iter().enumerate() {
            for (op_index, op) in ranked.ops.iter().enumerate() {
                let OpKind::Send { to, lane, tag, weight, .. } = op.kind else { continue };
                let src = Rank::at(rank);
                let channel = *channels.entry((src, to, lane)).or_insert_with(|| {
                    self.channel_ends.push((src, to));
                    self.channel_ends.len() as u32 - 1
                });
                if by_tag.len() <= tag as usize {
                    by_tag.resize(tag as usize + 1, u32::MAX);
                }
                if by_tag[tag as usize] != u32::MAX {
                    return Err(SimError::Unmatched { rank: src, tag });
                }
                by_tag[tag as usize] = self.messages.len() as u32;
                queued.push((channel, self.messages.len() as u32));
                self.messages.push(Message {
                    channel,
                    bytes: op.bytes as f64,
                    weight: weight.max(1) as f64,
                    src,
                    dst: to,
                    send_op: op_index as u32,
                    recv_op: u32::MAX,
                    pending: 0,
                });
            }
        }
        for (rank, ranked) in program.ranks.iter().enumerate() {
            for (op_index, op) in ranked.ops.iter().enumerate() {
                let OpKind::Recv { from, tag, .. } = op.kind else { continue };
                let message = by_tag.get(tag as usize).and_then(|&m| self.messages.get_mut(m as usize));
                match message {
                    Some(m) if m.src == from && m.dst == Rank::at(rank) && m.recv_op == u32::MAX => {
                        m.recv_op = op_index as u32;
                    }
                    _ => return Err(SimError::Unmatched { rank: Rank::at(rank), tag }),
                }
            }
        }
        if let Some(m) = self.messages.iter().find(|m| m.recv_op == u32::MAX) {
            let OpKind::Send { tag, .. } = program.ranks[m.src.index()].ops[m.send_op as usize].kind else {
                unreachable!("messages are made from sends")
            };
            return Err(SimError::Unmatched { rank: m.src, tag });
        }
        self.queues = Lists::new(self.channel_ends.len(), &queued);
        Ok(())
    }

    /// Turns op dependencies into lists of who waits for what.
    fn connect(&mut self, program: &Program) {
        let mut endings: Vec<Vec<Ending>> =
            program.ranks.iter().map(|r| vec![Ending::Local(0); r.ops.len()]).collect();
        for (m, message) in self.messages.iter().enumerate() {
            endings[message.src.index()][message.send_op as usize] = Ending::Sent(m as u32);
            endings[message.dst.index()][message.recv_op as usize] = Ending::Received(m as u32);
        }
        for (rank, ranked) in program.ranks.iter().enumerate() {
            for (i, op) in ranked.ops.iter().enumerate() {
                let seconds = match op.kind {
                    OpKind::Copy { .. } => 0.0,
                    OpKind::Compute { nanos, .. } => nanos as f64 * 1e-9,
                    OpKind::Send { .. } | OpKind::Recv { .. } => continue,
                };
                endings[rank][i] = Ending::Local(self.locals.len() as u32);
                self.locals.push(Local { rank: Rank::at(rank), op: i as u32, pending: 0, seconds });
            }
        }
        let num_messages = self.messages.len() as u32;
        let (mut waits, mut follows) = (vec![], vec![]);
        for (rank, ranked) in program.ranks.iter().enumerate() {
            for (op_index, op) in ranked.ops.iter().enumerate() {
                let waiter = match endings[rank][op_index] {
                    Ending::Sent(m) | Ending::Received(m) => m,
                    Ending::Local(l) => num_messages + l,
                };
                for dep in ranked.deps(op) {
                    let provider = endings[rank][dep.op as usize];
                    match (dep.kind, provider) {
                        // A message no longer than a chunk arrives as a whole, and is followed as a whole.
                        (DepKind::Stream, Ending::Received(leader))
                            if waiter < num_messages
                                && self.messages[leader as usize].bytes > program.chunk_bytes as f64 =>
                        {
                            follows.push((leader, waiter));
                        }
                        _ => waits.push((self.key(provider), waiter)),
                    }
                }
            }
        }
        for (_, waiter) in &waits {
            match self.messages.get_mut(*waiter as usize) {
                Some(message) => message.pending += 1,
                None => self.locals[(waiter - num_messages) as usize].pending += 1,
            }
        }
        self.waiting = Lists::new(2 * self.messages.len() + self.locals.len(), &waits);
        self.followers = Lists::new(self.messages.len(), &follows);
        for pair in &mut follows {
            *pair = (pair.1, pair.0);
        }
        self.leaders = Lists::new(self.messages.len(), &follows);
    }
}
