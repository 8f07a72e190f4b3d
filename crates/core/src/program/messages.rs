//! Sends and receives, matched.
//!
//! A send and the receive of its tag are one message. Both ends of a channel (a lane from one rank to another) see its
//! messages in one order, each in the order of its own list.

use rustc_hash::FxHashMap;

use super::{Op, OpKind, Program};
use crate::id::{Rank, RegionId};

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
    /// By tag.
    pairs: Vec<Pair>,
    /// How many there are.
    pub count: usize,
    /// What they carry together, or the largest number there is.
    pub bytes: u64,
}

impl Messages {
    /// One above the largest tag.
    pub fn num_tags(&self) -> usize {
        self.pairs.len()
    }

    /// The message of a tag, if there is such a tag.
    pub fn get(&self, tag: u32) -> Option<&Message> {
        self.pairs.get(tag as usize).map(|pair| &pair.message)
    }

    /// The messages that there are, with their tags.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Message)> {
        (0..).zip(self.pairs.iter().map(|pair| &pair.message)).filter(|(_, m)| m.send != NOWHERE)
    }
}

impl std::ops::Index<u32> for Messages {
    type Output = Message;

    fn index(&self, tag: u32) -> &Message {
        &self.pairs[tag as usize].message
    }
}

/// Matches ends, rank by rank.
pub struct Matcher<'a> {
    program: &'a Program,
    pairs: Vec<Pair>,
    /// Messages whose ends do not fit together.
    differing: Vec<(u32, &'static str)>,
    sent: Channels,
    received: Channels,
    num_ops: usize,
    count: usize,
    bytes: u64,
}

/// A message in the making, and what the end that was seen first says of it: the other is held against that, without a look
/// back at an op that may be hundreds of megabytes away.
#[derive(Debug, Clone, Copy)]
struct Pair {
    message: Message,
    received_after: u32,
    said: Said,
}

#[derive(Debug, Clone, Copy)]
struct Said {
    peer: Rank,
    lane: u32,
    tensor: u32,
    region: RegionId,
    bytes: u64,
}

const NEW: Pair = Pair {
    message: UNUSED,
    received_after: NO_MESSAGE,
    said: Said { peer: Rank(u32::MAX), lane: 0, tensor: 0, region: RegionId(0), bytes: 0 },
};

impl<'a> Matcher<'a> {
    pub fn new(program: &'a Program) -> Self {
        let num_ops: usize = program.ranks.iter().map(|r| r.ops.len()).sum();
        Self {
            program,
            pairs: Vec::with_capacity(num_ops / 2 + 1),
            differing: vec![],
            sent: Channels::new(program),
            received: Channels::new(program),
            num_ops,
            count: 0,
            bytes: 0,
        }
    }

    /// Adds a rank's sends and receives.
    pub fn add(&mut self, rank: Rank) -> Result<(), MatchError> {
        for (i, op) in (0..).zip(&self.program.ranks[rank.index()].ops) {
            match op.kind {
                OpKind::Send { to, lane, tag, .. } => {
                    self.make_room(rank, tag, "sends")?;
                    let pair = &mut self.pairs[tag as usize];
                    if pair.message.send != NOWHERE {
                        return Err(MatchError::NotOnce { rank, tag, what: "sends" });
                    }
                    pair.message.send = (rank.0, i);
                    pair.message.previous = self.sent.follow(rank, to, lane, tag);
                    let other = pair.message.recv;
                    self.hold(tag, rank, other, Said::by(op, to, lane));
                    (self.count, self.bytes) = (self.count + 1, self.bytes.saturating_add(op.bytes));
                }
                OpKind::Recv { from, lane, tag, .. } => {
                    self.make_room(rank, tag, "receives")?;
                    let pair = &mut self.pairs[tag as usize];
                    if pair.message.recv != NOWHERE {
                        return Err(MatchError::NotOnce { rank, tag, what: "receives" });
                    }
                    pair.message.recv = (rank.0, i);
                    pair.received_after = self.received.follow(rank, from, lane, tag);
                    let other = pair.message.send;
                    self.hold(tag, rank, other, Said::by(op, from, lane));
                }
                OpKind::Copy { .. } | OpKind::Compute { .. } => {}
            }
        }
        Ok(())
    }

    /// Holds what an end says against what the other said, or keeps it until that comes.
    fn hold(&mut self, tag: u32, rank: Rank, other: At, said: Said) {
        let pair = &mut self.pairs[tag as usize];
        if other == NOWHERE {
            pair.said = said;
        } else if let Some(what) = pair.said.differs(Rank(other.0), &said, rank, self.program) {
            self.differing.push((tag, what));
        }
    }

    /// Tags may leave gaps, but a table of them stays in proportion to the ops.
    fn make_room(&mut self, rank: Rank, tag: u32, what: &'static str) -> Result<(), MatchError> {
        const GAPS: usize = 64;
        if (tag as usize) >= self.pairs.len() {
            if tag as usize >= GAPS * (self.num_ops + GAPS) {
                return Err(MatchError::TagTooLarge { rank, tag, what, ops: self.num_ops });
            }
            self.pairs.resize(tag as usize + 1, NEW);
        }
        Ok(())
    }

    /// Once all ranks were added: the first message with a flaw, or all of them.
    pub fn finish(mut self) -> Result<Messages, MatchError> {
        self.differing.sort_unstable();
        let differs = |tag: u32| {
            let at = self.differing.binary_search_by_key(&tag, |(tag, _)| *tag).ok()?;
            Some(self.differing[at].1)
        };
        for (tag, Pair { message, received_after, .. }) in (0..).zip(&self.pairs) {
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
            if let Some(what) = differs(tag) {
                return Err(MatchError::EndsDiffer { tag, src, dst, what });
            }
            if message.previous != *received_after {
                return Err(MatchError::ChannelOrder { tag, src, dst });
            }
        }
        Ok(Messages { pairs: self.pairs, count: self.count, bytes: self.bytes })
    }
}

impl Said {
    fn by(op: &Op, peer: Rank, lane: u32) -> Self {
        Self { peer, lane, tensor: op.tensor, region: op.region, bytes: op.bytes }
    }

    /// In what this, said by one rank, differs from what another rank says.
    fn differs(&self, by: Rank, other: &Said, other_by: Rank, program: &Program) -> Option<&'static str> {
        let boxes = &program.boxes;
        let same_box = || self.region == other.region || boxes.get(self.region) == boxes.get(other.region);
        if self.peer != other_by || other.peer != by {
            Some("peers")
        } else if self.lane != other.lane {
            Some("lane")
        } else if self.bytes != other.bytes {
            Some("bytes")
        } else if self.tensor != other.tensor {
            Some("tensor")
        } else if self.bytes > 0 && !same_box() {
            Some("box")
        } else {
            None
        }
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
