//! Transports: how one rank's bytes get to another. Nothing here waits; waiting, deadlines and order are the engine's.
//!
//! A [`Link`] joins a rank to one peer. Messages travel in parts, each part of a message behind the one before:
//!
//! ```text
//! sender                                    receiver
//!                     <-- announce          expect: here is the place for it
//! Event::Ready
//! send part 0, 1, 2   -->                   Event::Arrived, part by part, already in place
//! Event::Sent: the memory may be reused
//! ```
//!
//! A part that was not announced is an error, so no link needs memory for messages that nobody waits for.
//! [`mem`] joins threads, [`stream`] sockets: TCP between hosts, and inside a host Unix sockets beside shared memory.
//! With the feature `mpi`, `mpi` joins the ranks that mpirun or srun started.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use crossmesh_core::id::Rank;

use crate::combine::Combine;
use crate::memory::place::Lent;
use crate::wake::Waker;
use crate::wire::WireError;

mod arrivals;
mod inbox;
pub mod mem;
#[cfg(feature = "mpi")]
pub mod mpi;
pub(crate) mod outbox;
mod sealed;
mod shm;
pub mod stream;
pub mod tcp;
mod words;

/// A message: the program it belongs to, and its tag there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Message {
    pub job: u32,
    pub tag: u32,
}

/// Where a message goes.
#[derive(Debug, Clone)]
pub struct Expected {
    pub place: Lent,
    pub bytes: u64,
    /// How it is combined with what is there; else it replaces it.
    pub combine: Option<Combine>,
}

/// What a link has to say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The peer has a place for these messages.
    Ready { job: u32, tags: Vec<u32> },
    /// The message's bytes below `upto` are in place.
    Arrived { message: Message, upto: u64 },
    /// The message's bytes below `upto` are no longer needed here.
    Sent { message: Message, upto: u64 },
    /// The peer lives, and waits for that rank.
    Beat { waits_for: Option<Rank> },
    /// The job is over.
    Abort { culprit: Rank, reason: String },
    /// The peer is done; it will close the connection.
    Bye,
}

/// Words between engines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Control {
    Beat { waits_for: Option<Rank> },
    Abort { culprit: Rank, reason: String },
    Bye,
}

/// Why a link is of no more use.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    #[error("the connection was closed")]
    Closed,
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Wire(#[from] WireError),
}

impl From<rustix::io::Errno> for LinkError {
    fn from(errno: rustix::io::Errno) -> Self {
        LinkError::Io(errno.into())
    }
}

/// A connection to one peer. No call waits.
pub trait Link: Send {
    /// Readable when `progress` may find something; writable, if `wants_write`, when it can write on. None where nothing
    /// wakes us: then `progress` has to be called again and again.
    fn fd(&self) -> Option<BorrowedFd<'_>>;
    fn wants_write(&self) -> bool;
    /// How much has come from the peer so far, in whatever unit: while it grows, the peer lives. None if the link cannot
    /// tell; then whatever wakes it counts.
    fn heard(&self) -> Option<u64> {
        None
    }
    /// Whether the system may keep what has come to itself until there is more of it; then `progress` is called now and then.
    fn gathers(&self) -> bool {
        false
    }
    /// How much has gone to the peer so far: while it grows, the peer knows that we live. None if the link cannot tell.
    fn said(&self) -> Option<u64> {
        None
    }
    /// Whether `progress` has something to do without waiting for the descriptor.
    fn has_work(&self) -> bool;

    /// Whom to wake when a device has done something for this link.
    fn set_waker(&mut self, _: &Waker) {}
    /// Whether `progress` has something to do once a device is done, which the waker tells.
    fn awaits_device(&self) -> bool {
        false
    }

    /// Makes room for a message. The peer hears of it with [`Link::announce`].
    fn expect(&mut self, message: Message, expected: Expected);
    fn announce(&mut self, job: u32, tags: &[u32]);

    /// Whether the link takes another part now. It takes few at a time, so that the engine decides late whose is next.
    fn has_room(&self) -> bool;
    /// The largest part worth sending, given how much has to arrive before it can be forwarded.
    fn part_bytes(&self, chunk_bytes: u64) -> u64;
    fn send(&mut self, message: Message, part: Range<u64>, from: &Lent);

    fn control(&mut self, control: Control);
    /// Drops what is not yet under way, but for words between engines.
    fn drop_data(&mut self);

    /// Moves what can be moved.
    fn progress(&mut self, events: &mut Vec<Event>) -> Result<(), LinkError>;
    /// Writes what can be written.
    fn flush(&mut self, events: &mut Vec<Event>) -> Result<(), LinkError>;
    /// Nothing has come for a while: what is kept only to be fast may go.
    fn rest(&mut self) {}

    /// Says to the peer that nothing more comes; reading goes on.
    fn shutdown(&mut self);

    /// The most that the kernel may hold for this link, beside memory of ours.
    fn kernel_bytes(&self) -> u64 {
        0
    }
}
