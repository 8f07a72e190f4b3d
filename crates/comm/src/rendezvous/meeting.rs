//! What a rank needs of the others beside bytes: links to them, a word when all are ready, and one culprit.
//!
//! The ranks may have met over sockets of ours, here, or have been brought together by somebody else.

use std::collections::{BTreeMap, BTreeSet};

use crossmesh_core::id::Rank;

use super::{Abort, Connection, Fault, Log, Member, Mover, OnNews, Patience, RendezvousError, Ticket};
use crate::auth::Secret;
use crate::buffer::Sharing;
use crate::clock::ClockOffset;
use crate::deadline::{Deadline, Socket};
use crate::environment::Place;
use crate::transport::stream::StreamLink;
use crate::transport::tcp::{Shares, set_window};
use crate::transport::{Link, LinkError};

/// A connection to each of some ranks.
pub type Links = Vec<(Rank, Box<dyn Link>)>;

/// The ranks of a job, come together.
pub trait Meeting: Send {
    /// By rank, as far as they are known: of ourselves, and of everybody that we connected with.
    fn hosts(&self) -> &[String];

    /// How many hosts there are.
    fn num_hosts(&self) -> usize {
        let hosts: BTreeSet<&String> = self.hosts().iter().collect();
        hosts.len()
    }

    /// Whether ranks of a host read each other's memory.
    fn sharing(&self) -> Sharing;

    /// What carries the bytes, for messages.
    fn transport(&self) -> &'static str;

    /// Links to these ranks. Each of them has to ask for one to us.
    fn connect(&mut self, peers: &BTreeSet<Rank>, deadline: Deadline) -> Result<Links, RendezvousError>;

    /// Says how much of the NICs each connection made from now on will have to itself. Who has no use for it forgets it.
    fn expect_shares(&mut self, _shares: Shares) {}

    /// What has to be called again and again while a rank waits elsewhere. None where bytes move by themselves.
    fn mover(&self) -> Option<Mover> {
        None
    }

    /// Waits until every rank has come this far.
    fn barrier(&mut self, deadline: Deadline) -> Result<(), RendezvousError>;

    /// By how much our clock is ahead of the first rank's, as of the last barrier. None where nobody compared them.
    fn clock(&self) -> Option<ClockOffset> {
        None
    }

    /// Tells the first rank something; there, what everybody told. Others do not wait for it.
    fn gather(
        &mut self,
        text: String,
        deadline: Deadline,
    ) -> Result<Option<BTreeMap<Rank, String>>, RendezvousError>;

    /// Reports a fault; the answer is what the job agrees on. Nothing else can be done here afterwards.
    fn fail(&mut self, fault: Fault) -> Abort;

    /// The job may end without us.
    fn leave(self: Box<Self>);
}

/// A meeting at one address.
pub struct OverSockets {
    place: Place,
    member: Member,
    hosts: Vec<String>,
    shares: Shares,
}

impl OverSockets {
    /// Meets the ranks of `roster`. The first of them is where the others come.
    pub fn meet(
        place: Place,
        host: &str,
        roster: BTreeSet<Rank>,
        secret: Secret,
        patience: Patience,
        log: Log,
        on_news: OnNews,
    ) -> Result<Self, RendezvousError> {
        let master = (place.master_addr.as_str(), place.master_port);
        let ticket = Ticket { master, rank: place.rank, roster, host, secret: &secret, patience };
        let member = Member::join(&ticket, on_news, log)?;
        let mut hosts = vec!["a host of its own".to_string(); place.world as usize];
        if let Some(mine) = hosts.get_mut(place.rank.index()) {
            *mine = host.into();
        }
        Ok(Self { place, member, hosts, shares: Shares::default() })
    }

    fn link(&self, peer: Rank, (socket, session): Connection) -> Result<Box<dyn Link>, RendezvousError> {
        let me = self.place.rank;
        let link = match socket {
            Socket::Tcp(stream) => {
                let share = self.shares.bytes_per_s(peer, me);
                share
                    .map_or(Ok(()), |share| set_window(&stream, share))
                    .map_err(LinkError::Io)
                    .and_then(|()| StreamLink::protected(me, peer, stream, &session))
            }
            // What is said inside a host passes nobody.
            Socket::Unix(stream) => StreamLink::local(me, peer, stream),
        };
        Ok(Box::new(link.map_err(|cause| RendezvousError::BadLink { me, peer, cause })?))
    }
}

impl Meeting for OverSockets {
    fn hosts(&self) -> &[String] {
        &self.hosts
    }

    fn num_hosts(&self) -> usize {
        self.member.num_hosts
    }

    fn sharing(&self) -> Sharing {
        Sharing::Host
    }

    fn transport(&self) -> &'static str {
        "sockets and shared memory"
    }

    fn connect(&mut self, peers: &BTreeSet<Rank>, deadline: Deadline) -> Result<Links, RendezvousError> {
        let (sockets, entries) = self.member.connect(peers, deadline)?;
        for entry in entries {
            self.hosts.get_mut(entry.rank.index()).into_iter().for_each(|host| *host = entry.host.clone());
        }
        sockets.into_iter().map(|(peer, socket)| Ok((peer, self.link(peer, socket)?))).collect()
    }

    fn expect_shares(&mut self, shares: Shares) {
        self.shares = shares;
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
        self.member.fail(fault)
    }

    fn leave(self: Box<Self>) {
        self.member.leave();
    }
}
