//! What travels on a connection to the lobby: a length, then JSON of at most that many bytes.

use crossmesh_core::id::Rank;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Abort, Entry, Fault};
use crate::clock::ClockOffset;
use crate::deadline::{Deadline, Stream, StreamError, read_exact_by, write_all_by};

/// A table of many thousand ranks fits; a stranger's idea of a length does not.
pub const MAX_MESSAGE_BYTES: usize = 16 << 20;
/// A rank says little about itself.
pub const MAX_REPORT_BYTES: usize = 64 << 10;

/// From a rank to the lobby.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToLobby {
    Report(Entry),
    Ready {
        round: u64,
    },
    /// What the first rank should know of this one.
    Tell {
        round: u64,
        text: String,
    },
    Fault(Fault),
    /// The answer to a ping: when that was sent, by the lobby's clock, and when it came and was answered, by ours.
    Pong {
        sent_ns: u64,
        there_ns: u64,
        answered_ns: u64,
    },
    /// The rank is done; that its connection closes now means nothing.
    Bye,
}

/// From the lobby to a rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToRank {
    Table(Vec<Entry>),
    /// Everybody is ready. With it comes what the lobby knows of the rank's clock.
    Go {
        round: u64,
        clock: Option<ClockOffset>,
    },
    /// To the first rank: what another has to tell.
    Told {
        round: u64,
        rank: Rank,
        text: String,
    },
    /// To be answered at once.
    Ping {
        sent_ns: u64,
    },
    Abort(Abort),
}

pub fn send(
    stream: &mut impl Stream,
    message: &impl Serialize,
    deadline: Deadline,
) -> Result<(), StreamError> {
    let body = serde_json::to_vec(message).map_err(|e| StreamError::Io(e.into()))?;
    let len = u32::try_from(body.len()).expect("messages are far below 4 GiB");
    write_all_by(stream, &[&len.to_le_bytes()[..], &body].concat(), deadline)
}

/// The next message, if it has at most `limit` bytes and makes sense.
pub fn receive<M: DeserializeOwned>(
    stream: &mut impl Stream,
    limit: usize,
    deadline: Deadline,
) -> Result<M, StreamError> {
    let mut len = [0; 4];
    read_exact_by(stream, &mut len, deadline)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > limit {
        let text = format!("a message of {len} B is longer than the {limit} B allowed");
        return Err(StreamError::Io(std::io::Error::other(text)));
    }
    let mut body = vec![0; len];
    read_exact_by(stream, &mut body, deadline)?;
    serde_json::from_slice(&body).map_err(|e| StreamError::Io(e.into()))
}
