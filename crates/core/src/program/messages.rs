//! Sends and receives, matched.
//!
//! A send and the receive of its tag are one message. Both ends of a channel (a lane from one rank to another) see its
//! messages in one order, each in the order of its own list.

use rustc_hash::FxHashMap;

use super::{Op, OpKind, Program};
use crate::id::Rank;

/// An op's place: rank and index.
pub type At = (u32, u32);

pub const NOWHERE: At = (u32::MAX, u32::MAX);
/// No message.
pub const NO_MESSAGE: u32 = u32::MAX;

/// Both ends of a message, and the message before it on its channel. No ends: a tag that nobody uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    pub send: At,
    pub recv: At,
    pub previous: u32,
}

const UNUSED: Message = Message { send: NOWHERE, recv: NOWHERE, previous: NO_MESSAGE };

/// Sends and receives that do not fit together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MatchError {
    #[error(
        "{rank} {what} message {tag}, while the program has {ops} ops\nhint: messages are numbered from 0, with few gaps"
    )]
    TagTooLarge { rank: Rank, tag: u32, what: &'static str, ops: usize },
    #[error("{rank} {what} message {tag} twice")]
    NotOnce { rank: Rank, tag: u32, what: &'static str },
    #[error("{rank} {what} message {tag}, but nobody {missing} it")]
    Unmatched { rank: Rank, tag: u32, what: &'static str, missing: &'static str },
    #[error("message {tag} from {src} to {dst} differs between its ends: {what}")]
    EndsDiffer { tag: u32, src: Rank, dst: Rank, what: &'static str },
    #[error("{src} and {dst} disagree about what comes before message {tag} on their channel")]
    ChannelOrder { tag: u32, src: Rank, dst: Rank },
}

/// All messages of a program, by tag.
#[derive(Debug)]
pub struct Messages {
    pub by_tag: Vec<Message>,
}

impl Messages {
    pub fn of(program: &Program) -> Result<Self, MatchError> {
        let num_ops: usize = program.ranks.iter().map(|r| r.ops.len()).sum();
        let mut matcher = Matcher {
            messages: Vec::with_capacity(num_ops / 2 + 1),
            received_after: Vec::with_capacity(num_ops / 2 + 1),
            num_ops,
        };
        let (mut sent, mut received) = (Channels::new(program), Channels::new(program));
        for (rank, ops) in (0..).map(Rank).zip(&program.ranks) {
            for (i, op) in (0..).zip(&ops.ops) {
                matcher.add(rank, (rank.0, i), op, &mut sent, &mut received)?;
            }
        }
        matcher.check(program)?;
        Ok(Self { by_tag: matcher.messages })
    }

    /// The messages that there are, with their tags.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Message)> {
        (0..).zip(&self.by_tag).filter(|(_, m)| m.send != NOWHERE)
    }
}

struct Matcher {
    messages: Vec<Message>,
    received_after: Vec<u32>,
    num_ops: usize,
}

impl Matcher {
    fn add(
        &mut self,
        rank: Rank,
        at: At,
        op: &Op,
        sent: &mut Channels,
        received: &mut Channels,
    ) -> Result<(), MatchError> {
        match op.kind {
            OpKind::Send { to, lane, tag, .. } => {
                self.make_room(rank, tag, "sends")?;
                let message = &mut self.messages[tag as usize];
                if message.send != NOWHERE {
                    return Err(MatchError::NotOnce { rank, tag, what: "sends" });
                }
                message.send = at;
                message.previous = sent.follow(rank, to, lane, tag);
            }
            OpKind::Recv { from, lane, tag, .. } => {
                self.make_room(rank, tag, "receives")?;
                let message = &mut self.messages[tag as usize];
                if message.recv != NOWHERE {
                    return Err(MatchError::NotOnce { rank, tag, what: "receives" });
                }
                message.recv = at;
                self.received_after[tag as usize] = received.follow(rank, from, lane, tag);
            }
            OpKind::Copy { .. } | OpKind::Compute { .. } => {}
        }
        Ok(())
    }

    /// Tags may leave gaps, but a table of them stays in proportion to the ops.
    fn make_room(&mut self, rank: Rank, tag: u32, what: &'static str) -> Result<(), MatchError> {
        const GAPS: usize = 64;
        if (tag as usize) >= self.messages.len() {
            if tag as usize >= GAPS * (self.num_ops + GAPS) {
                return Err(MatchError::TagTooLarge { rank, tag, what, ops: self.num_ops });
            }
            self.messages.resize(tag as usize + 1, UNUSED);
            self.received_after.resize(tag as usize + 1, NO_MESSAGE);
        }
        Ok(())
    }

    fn check(&self, program: &Program) -> Result<(), MatchError> {
        for (tag, (message, received_after)) in (0..).zip(self.messages.iter().zip(&self.received_after)) {
            let (src, dst) = (Rank(message.send.0), Rank(message.recv.0));
            match (message.send, message.recv) {
                (NOWHERE, NOWHERE) => continue,
                (NOWHERE, _) => {
                    let (what, missing) = ("receives", "sends");
                    return Err(MatchError::Unmatched { rank: dst, tag, what, missing });
                }
                (_, NOWHERE) => {
                    let (what, missing) = ("sends", "receives");
                    return Err(MatchError::Unmatched { rank: src, tag, what, missing });
                }
                _ => {}
            }
            let op = |at: At| &program.ranks[at.0 as usize].ops[at.1 as usize];
            if let Some(what) = difference(program, op(message.send), op(message.recv), src, dst) {
                return Err(MatchError::EndsDiffer { tag, src, dst, what });
            }
            if message.previous != *received_after {
                return Err(MatchError::ChannelOrder { tag, src, dst });
            }
        }
        Ok(())
    }
}

/// In what a send and its receive differ.
fn difference(program: &Program, send: &Op, recv: &Op, src: Rank, dst: Rank) -> Option<&'static str> {
    let (OpKind::Send { to, lane, .. }, OpKind::Recv { from, lane: other_lane, .. }) = (send.kind, recv.kind)
    else {
        unreachable!("a message's ends are a send and a receive");
    };
    let same_box =
        || send.region == recv.region || program.boxes.get(send.region) == program.boxes.get(recv.region);
    if to != dst || from != src {
        Some("peers")
    } else if lane != other_lane {
        Some("lane")
    } else if send.bytes != recv.bytes {
        Some("bytes")
    } else if send.tensor != recv.tensor {
        Some("tensor")
    } else if send.bytes > 0 && !same_box() {
        Some("box")
    } else {
        None
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
        let first_lane = vec![Channel { of: nobody, lane: 0, last: NO_MESSAGE }; program.ranks.len()];
        Self { first_lane, other_lanes: FxHashMap::default(), rank: nobody }
    }

    /// Puts a message behind the last one on its channel, and returns that.
    fn follow(&mut self, rank: Rank, peer: Rank, lane: u32, tag: u32) -> u32 {
        if self.rank != rank {
            self.rank = rank;
            self.other_lanes.clear();
        }
        match self.first_lane.get_mut(peer.index()) {
            Some(channel) if channel.of != rank => {
                *channel = Channel { of: rank, lane, last: tag };
                NO_MESSAGE
            }
            Some(channel) if channel.lane == lane => std::mem::replace(&mut channel.last, tag),
            _ => self.other_lanes.insert((peer, lane), tag).unwrap_or(NO_MESSAGE),
        }
    }
}
