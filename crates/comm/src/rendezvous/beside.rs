//! A meeting that somebody else arranged, with ours beside it: bytes go their way, and who lives, barriers and blame ours.
//!
//! ```text
//! tensors     r0 ══════ MPI ══════ r1        theirs
//! pulse       r0 ──── sockets ──── r1        ours: a thread of its own answers, however busy the rank is
//! ```
//!
//! MPI's own barrier does not tell a rank that is stopped from one that is busy. The place and a secret of their own come to
//! the ranks by the exchange that brought them together, so nobody has to configure anything.

use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpListener;

use crossmesh_core::id::Rank;
use serde::{Deserialize, Serialize};

use super::{Abort, Fault, Links, Log, Meeting, Member, OnNews, Patience, RendezvousError, Ticket, listen};
use crate::auth::Secret;
use crate::buffer::Sharing;
use crate::clock::ClockOffset;
use crate::deadline::Deadline;
use crate::transport::tcp::Shares;

/// Where the ranks meet, and what proves that they belong there.
#[derive(Debug, Serialize, Deserialize)]
pub struct Place {
    addr: String,
    port: u16,
    secret: String,
}

/// The first rank's open place.
pub struct Host {
    pub place: Place,
    listener: TcpListener,
}

impl Host {
    /// Opens a place at an address of this host.
    pub fn open(addr: &str, deadline: Deadline) -> Result<Self, RendezvousError> {
        let listener = listen((addr, 0), deadline)?;
        let at = listener.local_addr()?;
        let secret = Secret::generate().map_err(|error| std::io::Error::other(error.to_string()))?.to_hex();
        Ok(Self { place: Place { addr: at.ip().to_string(), port: at.port(), secret }, listener })
    }
}

/// See the module.
pub struct Beside {
    theirs: Box<dyn Meeting>,
    member: Member,
}

impl Beside {
    /// Meets the ranks of `theirs` at a place that all of them know; the first of them is its host.
    pub fn meet(
        theirs: Box<dyn Meeting>,
        (rank, world): (Rank, u32),
        place: &Place,
        host: Option<Host>,
        patience: Patience,
        on_news: OnNews,
        log: Log,
    ) -> Result<Self, RendezvousError> {
        let nonsense = |_| RendezvousError::Unexpected { expected: "the secret of a place to meet" };
        let secret = Secret::from_text(&place.secret).map_err(nonsense)?;
        let name = theirs.hosts().get(rank.index()).cloned().unwrap_or_default();
        let ticket = Ticket {
            master: (&place.addr, place.port),
            rank,
            roster: (0..world).map(Rank).collect(),
            host: &name,
            secret: &secret,
            patience,
        };
        let mut member = match host {
            Some(host) => Member::join_as_root(&ticket, host.listener, on_news, log)?,
            None => Member::join(&ticket, on_news, log)?,
        };
        // A rank that is done waits here while others still need its side of a transfer to move.
        if let Some(mover) = theirs.mover() {
            member.moves(mover);
        }
        Ok(Self { theirs, member })
    }
}

impl Meeting for Beside {
    fn hosts(&self) -> &[String] {
        self.theirs.hosts()
    }

    fn num_hosts(&self) -> usize {
        self.theirs.num_hosts()
    }

    fn sharing(&self) -> Sharing {
        self.theirs.sharing()
    }

    fn transport(&self) -> &'static str {
        self.theirs.transport()
    }

    fn connect(&mut self, peers: &BTreeSet<Rank>, deadline: Deadline) -> Result<Links, RendezvousError> {
        self.theirs.connect(peers, deadline)
    }

    fn expect_shares(&mut self, shares: Shares) {
        self.theirs.expect_shares(shares);
    }

    fn barrier(&mut self, deadline: Deadline) -> Result<(), RendezvousError> {
        self.member.barrier(deadline)
    }

    fn clock(&self) -> Option<ClockOffset> {
        self.member.clock
    }

    fn gather(
        &mut self,
        text: String,
        deadline: Deadline,
    ) -> Result<Option<BTreeMap<Rank, String>>, RendezvousError> {
        self.member.gather(text, deadline)
    }

    fn fail(&mut self, fault: Fault) -> Abort {
        let abort = self.member.fail(fault);
        // They end the job on their side, too; who is to blame has been agreed on here.
        let told = Fault { blames: Some(abort.culprit), hearsay: true, text: abort.text.clone() };
        let _theirs = self.theirs.fail(told);
        abort
    }

    fn leave(self: Box<Self>) {
        self.member.leave();
        self.theirs.leave();
    }
}
