//! What ranks say to each other beside tensors: a length, the same with all bits flipped, then JSON of that many bytes. So
//! bytes that are no message are noticed at once, and do not pass for the length of one that never comes.
//!
//! ```text
//! joining    rank ── report ──▶ root ── welcome ──▶ rank ── settled ──▶ root
//! tree       child ── ready, tell, ping, trouble, bye ──▶ parent
//!            child ◀── deputies, all in, go, pong ─────── parent
//! asking     anybody ── look, where, trouble ──▶ anybody ── alive, seen, entries ──▶
//! anywhere   abort
//! ```

use crossmesh_core::id::Rank;
use serde::{Deserialize, Serialize};

use super::{Abort, Entry, Fault};
use crate::clock::ClockOffset;

/// The words of thousands of ranks fit; a stranger's idea of a length does not.
pub const MAX_MESSAGE_BYTES: usize = 16 << 20;
const HEADER_BYTES: usize = 8;

/// A message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Say {
    /// To the root: who came, and where it can be reached.
    Report(Entry),
    /// From the root: the rank to hang under, if it is not the root itself.
    Welcome {
        parent: Option<Entry>,
    },
    /// To the root: the rank hangs where it should.
    Settled,
    /// The ranks right under the root: whom to turn to where the root is gone, in this order.
    Deputies(Vec<Entry>),
    /// Everybody has arrived, on so many hosts.
    AllIn {
        hosts: u32,
    },
    /// A whole subtree has come to a barrier.
    Ready {
        round: u64,
    },
    /// A part of a subtree has.
    Waiting {
        round: u64,
    },
    /// Everybody is ready.
    Go {
        round: u64,
    },
    /// Somebody keeps the others waiting: whoever has not come says so.
    Overdue {
        round: u64,
    },
    Late {
        rank: Rank,
    },
    /// What the root should know of a rank.
    Tell {
        round: u64,
        rank: Rank,
        text: String,
    },
    /// To be answered at once.
    Ping {
        sent_ns: u64,
    },
    /// When the ping was sent, by the child's clock, and when it came and was answered, by the parent's; what the parent
    /// knows of its own clock, and whether it hears the root.
    Pong {
        sent_ns: u64,
        there_ns: u64,
        answered_ns: u64,
        clock: Option<ClockOffset>,
        root: bool,
    },
    /// Something is wrong.
    Trouble(Report),
    /// The subtree is done; that its connection closes now means nothing.
    Bye,
    /// Are you there? And do you reach these?
    Look {
        at: Vec<Entry>,
    },
    /// Yes; and whether we hear the root.
    Alive {
        rank: Rank,
        root: bool,
    },
    /// Whom we reach, and whom not.
    Seen {
        by: Rank,
        reach: Vec<(Rank, Reach)>,
    },
    /// Where can these be reached?
    Where(Vec<Rank>),
    Entries(Vec<Entry>),
    /// Your side of this connection has ended without a word. Who reads this is still there, and did not mean to.
    HungUp,
    /// The job is over, and why.
    Abort(Abort),
}

/// What a rank noticed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub by: Entry,
    /// About whom, if anybody.
    pub about: Option<Entry>,
    pub what: Notice,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Notice {
    /// Its part of the job failed.
    Fault(Fault),
    /// The connection to the other ended without a word.
    Lost(String),
    /// The other said what nobody says.
    Nonsense(String),
    /// The other says nothing, and what came of an attempt to reach it otherwise.
    Silent { silent_ms: u64, reach: Reach },
}

/// What came of an attempt to reach somebody.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reach {
    Answers,
    /// Its host says that nobody is there.
    Refused,
    /// Its host takes the connection, and nobody says anything.
    Mute,
    /// Not even its host answers.
    Unreachable,
}

impl Say {
    /// As it travels.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        serde_json::to_writer(&mut bytes, self).expect("messages are numbers and text");
        let len = u32::try_from(bytes.len() - HEADER_BYTES).expect("messages are far below 4 GiB");
        bytes[..4].copy_from_slice(&len.to_le_bytes());
        bytes[4..HEADER_BYTES].copy_from_slice(&(!len).to_le_bytes());
        bytes
    }

    /// The first message of `bytes`, and how many of them it takes; none if it is not all there.
    pub fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, String> {
        let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let header = u64::from_le_bytes(*header);
        let (len, flipped) = (header as u32, (header >> 32) as u32);
        if flipped != !len {
            return Err(format!("no message begins with {:02x?}", header.to_le_bytes()));
        }
        let len = len as usize;
        if len > MAX_MESSAGE_BYTES {
            return Err(format!("a message of {len} B is longer than the {MAX_MESSAGE_BYTES} B allowed"));
        }
        let Some(body) = rest.get(..len) else { return Ok(None) };
        let say = serde_json::from_slice(body).map_err(|e| e.to_string())?;
        Ok(Some((say, len + HEADER_BYTES)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn messages_come_back_one_by_one() {
        let said =
            [Say::Bye, Say::Ready { round: 7 }, Say::Tell { round: 1, rank: Rank(2), text: "é".into() }];
        let mut bytes: Vec<u8> = said.iter().flat_map(Say::to_bytes).collect();
        for say in &said {
            let (parsed, len) = Say::parse(&bytes).unwrap().unwrap();
            assert_eq!(parsed, *say);
            bytes.drain(..len);
        }
        assert_eq!(Say::parse(&bytes), Ok(None));
        assert_eq!(Say::parse(&Say::Bye.to_bytes()[..5]), Ok(None));
    }

    #[test]
    fn nonsense_is_refused() {
        let long = Say::parse(&[0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]).unwrap_err();
        assert!(long.starts_with("a message of 4294967295 B is longer"), "{long}");
        assert!(Say::parse(b"\x02\0\0\0\xfd\xff\xff\xff{}").is_err());
        // A length that would be allowed, and would swallow what comes after it.
        let spoilt = Say::parse(&[0x5a, 0x5a, 0, 0, 0x5a, 0x5a, 0, 0]).unwrap_err();
        assert!(spoilt.starts_with("no message begins with [5a, 5a, 00"), "{spoilt}");
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = Say::parse(&bytes);
        }
    }
}
