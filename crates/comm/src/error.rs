//! What goes wrong between ranks, with the names of everybody concerned.

use crossmesh_core::id::Rank;

use crate::wire::WireError;

/// Why a program did not come to its end on a rank.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    #[error(
        "{me} gave up on {peer} (host {host}): {op} of tensor {tensor}, {bytes} B outstanding, nothing moved for {waited_ms} ms"
    )]
    Timeout { me: Rank, peer: Rank, host: String, op: String, tensor: String, bytes: u64, waited_ms: u64 },
    #[error("{me} lost {peer} (host {host}) during {op} of tensor {tensor}, {bytes} B outstanding: {cause}")]
    PeerLost { me: Rank, peer: Rank, host: String, op: String, tensor: String, bytes: u64, cause: String },
    #[error(
        "{me} cannot make sense of what {peer} (host {host}) sends during {op} of tensor {tensor}, {bytes} B outstanding: {cause}"
    )]
    Protocol {
        me: Rank,
        peer: Rank,
        host: String,
        op: String,
        tensor: String,
        bytes: u64,
        #[source]
        cause: Box<WireError>,
    },
    #[error(
        "{me}'s own end of its connection to {peer} is closed, during {op} of tensor {tensor}, {bytes} B outstanding"
    )]
    BrokenHere { me: Rank, peer: Rank, op: String, tensor: String, bytes: u64 },
    /// Another rank found out first.
    #[error("{me} stops because of {culprit} (host {host}): {reason}")]
    Aborted { me: Rank, culprit: Rank, host: String, reason: String },
    /// The whole job was ended, and everybody told why.
    #[error("{me} stops because of {culprit} (host {host}): {reason}")]
    Interrupted { me: Rank, culprit: Rank, host: String, reason: String },
    #[error("{me} has no connection to {peer}, which its program talks to")]
    NoLink { me: Rank, peer: Rank },
    #[error("{me} cannot {what}: {cause}")]
    System { me: Rank, what: &'static str, cause: String },
}

impl CommError {
    /// Whose fault it is, if it is a rank's.
    pub fn culprit(&self) -> Option<Rank> {
        match self {
            CommError::Timeout { peer, .. }
            | CommError::PeerLost { peer, .. }
            | CommError::Protocol { peer, .. } => Some(*peer),
            CommError::Aborted { culprit, .. } | CommError::Interrupted { culprit, .. } => Some(*culprit),
            CommError::BrokenHere { me, .. } => Some(*me),
            _ => None,
        }
    }

    /// The tensor that was under way, where one was.
    pub fn tensor(&self) -> Option<&str> {
        match self {
            CommError::Timeout { tensor, .. }
            | CommError::PeerLost { tensor, .. }
            | CommError::Protocol { tensor, .. }
            | CommError::BrokenHere { tensor, .. } => Some(tensor),
            _ => None,
        }
    }
}
