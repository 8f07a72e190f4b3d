//! How ranks find each other: they meet at one address, form a tree, and connect in pairs where a program needs it.
//!
//! ```text
//! every rank   -- report: rank, host, addresses -->  the root: the first rank
//!              <-- whom to hang under ------------
//! rank         -- where is r7? ------------------>   the root
//! higher rank  -- data connection --------------->   lower rank      only pairs that the plan needs
//!              inside a host over a Unix socket, else over TCP
//!
//! every rank   -- ready -->  <-- go --               a barrier, up the tree and down
//!              -- ping -->   <-- pong --             who lives, and what its clock says
//!              -- trouble --> <-- abort --           one culprit, the same for everybody
//! ```
//!
//! [`node`] is all of this without sockets and clocks; [`reactor`] runs it over real ones, in one thread; [`blame`] judges.
//! A rank that dies closes its connections, one that is stopped or cut off does not answer. Whoever notices says so, and
//! whoever leads (the root, or the first that is left) has it looked for before anybody is named.
//! Strangers are turned away, and cost little. Every step has a deadline.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use crossmesh_core::id::Rank;
use serde::{Deserialize, Serialize};

use crate::auth::AuthError;
use crate::deadline::{Deadline, StreamError};
use crate::transport::LinkError;

pub mod beside;
mod blame;
mod check;
mod doors;
mod guard;
mod meeting;
mod member;
mod message;
mod node;
mod pulse;
mod reactor;
mod wire;

pub use blame::{Abort, Fault};
pub use doors::Connection;
pub use meeting::{Links, Meeting, OverSockets};
pub use member::{Member, Ticket, listen};

/// What a program hears of its job while it does something else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News<'a> {
    /// A rank seems to be gone, and why: whoever still needs it should say so.
    Suspect(Rank, &'a str),
    /// The job is over before its time. Comes once.
    Abort(&'a Abort),
}

/// Called on another thread, maybe in the middle of a run. News of a suspect should be taken quickly.
pub type OnNews = Arc<dyn Fn(News<'_>) + Send + Sync>;

/// Moves bytes that move only when they are told to.
pub type Mover = Box<dyn FnMut() + Send>;

/// How long the ranks of a job wait for each other.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// For ranks that have not come yet.
    pub arrive: Deadline,
    /// For a rank that says nothing.
    pub silence: Duration,
    /// For the last at a barrier, after the first.
    pub barrier: Duration,
    /// How long after its job this process was started, and has come to meet the others, where the launcher says.
    pub late: Option<Late>,
    /// How many ranks are on this host, where the launcher says.
    pub local_world: Option<u32>,
}

/// How long after its job a process did what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Late {
    pub started: Duration,
    pub came: Duration,
    /// Of the time between, how long it neither ran nor waited for a processor: it was stopped, or waited for a disk.
    pub idle: Duration,
}

impl Patience {
    /// Whether the others had given up before this process came.
    fn came_late(&self) -> Option<Late> {
        self.late.filter(|late| late.came.as_secs_f64() >= self.arrive.allowed_s())
    }

    /// Whether that is nobody else's doing: it was started late, or spent the time on nothing. Else the others may have been
    /// as slow, with the same work.
    fn is_own_lateness(&self, late: Late) -> bool {
        (late.started + late.idle).as_secs_f64() >= self.arrive.allowed_s() / 2.0
    }
}

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
    pub tcp: SocketAddr,
    /// And from its own: a name in Linux's abstract namespace, which vanishes with the process.
    pub unix: String,
}

impl Entry {
    /// Of a rank that never said where it is.
    fn unknown() -> Self {
        let tcp = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        Self { rank: Rank(0), host: "an unknown host".into(), pid: 0, tcp, unix: String::new() }
    }

    /// Whether it can be dialed.
    fn is_known(&self) -> bool {
        self.tcp.port() != 0
    }
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
        "cannot start the thread that meets the others: {0}\nhint: are threads, memory or descriptors limited (ulimit -u, -v, -n)?"
    )]
    CannotStart(std::io::Error),
    #[error("the rendezvous at {addr}: {cause}")]
    Refused { addr: String, cause: AuthError },
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
mod hostile;
#[cfg(test)]
mod sim;
#[cfg(test)]
mod tests;
