//! How ranks find each other: they meet at one address, tell where they listen, and connect in pairs.
//!
//! ```text
//! every rank   -- report: rank, host, addresses -->  the lobby, beside the first rank
//!              <-- table of everybody -------------
//! higher rank  -- data connection --------------->   lower rank      only pairs that the plan needs
//!              inside a host over a Unix socket, else over TCP
//!
//! every rank   -- ready -->  <-- go --               a barrier
//!              <-- ping --   -- pong -->             who lives, and what its clock says
//!              -- fault -->  <-- abort --            one culprit, the same for everybody
//! ```
//!
//! The connection to the lobby stays open. A rank that dies closes it, one that is stopped or cut off does not answer; the
//! lobby then tells the others whom to name. That the lobby is gone itself shows in pings that do not come.
//! Strangers are turned away and logged, in a line with address and reason. Every step has a deadline.

use std::collections::BTreeSet;
use std::sync::Arc;

use crossmesh_core::id::Rank;
use serde::{Deserialize, Serialize};

use crate::auth::AuthError;
use crate::deadline::StreamError;
use crate::transport::LinkError;

mod blame;
mod doors;
mod lobby;
mod meeting;
mod member;
mod message;
mod pulse;

pub use blame::{Abort, Fault};
pub use doors::{Connection, Doors, connect};
pub use lobby::{Lobby, Patience};
pub use meeting::{Links, Meeting, OverSockets};
pub use member::{Member, OnAbort, Ticket, Word};

/// Where a line about a stranger goes.
pub type Log = Arc<dyn Fn(&str) + Send + Sync>;

/// A rank as the others know it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    pub rank: Rank,
    /// Ranks with the same host name share memory.
    pub host: String,
    pub pid: u32,
    /// Where it takes data connections from other hosts.
    pub tcp: std::net::SocketAddr,
    /// And from its own: a name in Linux's abstract namespace, which vanishes with the process.
    pub unix: String,
}

/// Why the ranks did not come together.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RendezvousError {
    #[error(
        "cannot listen at {addr}: {cause}\nhint: MASTER_ADDR must be an address of this host, and MASTER_PORT free"
    )]
    CannotListen { addr: String, cause: std::io::Error },
    #[error(
        "cannot reach the rendezvous at {addr} within {waited_s:.1} s: {cause}\nhint: is rank 0 running, and MASTER_ADDR right?"
    )]
    CannotReachLobby { addr: String, waited_s: f64, cause: String },
    #[error("the rendezvous at {addr}: {cause}")]
    Refused { addr: String, cause: AuthError },
    #[error("{} did not arrive within {waited_s:.1} s", RankNames(missing))]
    Missing { missing: BTreeSet<Rank>, waited_s: f64 },
    #[error("{} did not connect to {me} within {waited_s:.1} s", RankNames(missing))]
    PeersMissing { me: Rank, missing: BTreeSet<Rank>, waited_s: f64 },
    #[error("{me} cannot connect to {peer} on {host} at {addr}: {cause}")]
    CannotReachPeer { me: Rank, peer: Rank, host: String, addr: String, cause: String },
    #[error("{me} cannot use its connection to {peer}: {cause}")]
    BadLink { me: Rank, peer: Rank, cause: LinkError },
    #[error("{peer} is not part of this job")]
    UnknownPeer { peer: Rank },
    #[error("the rendezvous sent something else than {expected}")]
    Unexpected { expected: &'static str },
    #[error("{0}")]
    Aborted(Abort),
    #[error("not everybody was ready within {0:.1} s")]
    BarrierTimedOut(f64),
    #[error("the rendezvous: {0}")]
    Stream(#[from] StreamError),
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// `rank 3`, `ranks 3, 5`.
struct RankNames<'a>(&'a BTreeSet<Rank>);

impl std::fmt::Display for RankNames<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let numbers: Vec<String> = self.0.iter().map(|rank| rank.0.to_string()).collect();
        write!(f, "rank{} {}", if numbers.len() == 1 { "" } else { "s" }, numbers.join(", "))
    }
}

#[cfg(test)]
mod tests;
