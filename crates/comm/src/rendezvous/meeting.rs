//! What a rank needs of the others beside bytes: links to them, a word when all are ready, and one culprit.
//!
//! The ranks may have met over sockets of ours, here, or have been brought together by somebody else.

use std::collections::{BTreeMap, BTreeSet};

use crossmesh_core::id::Rank;

use super::{Abort, Doors, Fault, Lobby, Log, Member, OnAbort, RendezvousError, Ticket, connect};
use crate::auth::Secret;
use crate::buffer::Sharing;
use crate::deadline::{Deadline, Socket};
use crate::environment::Place;
use crate::transport::Link;
use crate::transport::stream::StreamLink;

/// A connection to each of some ranks.
pub type Links = Vec<(Rank, Box<dyn Link>)>;

/// The ranks of a job, come together.
pub trait Meeting: Send {
    /// By rank.
    fn hosts(&self) -> &[String];

    /// Whether ranks of a host read each other's memory.
    fn sharing(&self) -> Sharing;

    /// What carries the bytes, for messages.
    fn transport(&self) -> &'static str;

    /// Links to these ranks. Each of them has to ask for one to us.
    fn connect(&mut self, peers: &BTreeSet<Rank>, deadline: Deadline) -> Result<Links, RendezvousError>;

    /// Waits until every rank has come this far.
    fn barrier(&mut self, deadline: Deadline) -> Result<(), RendezvousError>;

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
    doors: Doors,
    secret: Secret,
    hosts: Vec<String>,
    log: Log,
    /// Beside the first rank. Declared last: it waits for the others.
    lobby: Option<Lobby>,
}

impl OverSockets {
    /// Meets the ranks of `roster`. The first of them opens the lobby.
    pub fn meet(
        place: Place,
        host: &str,
        roster: BTreeSet<Rank>,
        secret: Secret,
        deadline: Deadline,
        log: Log,
        on_abort: OnAbort,
    ) -> Result<Self, RendezvousError> {
        let master = (place.master_addr.as_str(), place.master_port);
        let lobby = match roster.first() == Some(&place.rank) {
            true => {
                let listener = Lobby::listen(master)?;
                Some(Lobby::open(listener, secret.clone(), roster, deadline, log.clone())?)
            }
            false => None,
        };
        let ticket = Ticket { master, rank: place.rank, host, secret: &secret, deadline };
        let (member, doors) = Member::join(&ticket, on_abort)?;
        let host = |r| member.table.get(&Rank(r)).map_or("?".into(), |entry| entry.host.clone());
        let hosts = (0..place.world).map(host).collect();
        Ok(Self { place, member, doors, secret, hosts, log, lobby })
    }

    fn link(&self, peer: Rank, socket: Socket) -> Result<Box<dyn Link>, RendezvousError> {
        let me = self.place.rank;
        let link = match socket {
            Socket::Tcp(stream) => StreamLink::tcp(me, peer, stream),
            Socket::Unix(stream) => StreamLink::local(me, peer, stream),
        };
        Ok(Box::new(link.map_err(|cause| RendezvousError::BadLink { me, peer, cause })?))
    }
}

impl Meeting for OverSockets {
    fn hosts(&self) -> &[String] {
        &self.hosts
    }

    fn sharing(&self) -> Sharing {
        Sharing::Host
    }

    fn transport(&self) -> &'static str {
        "sockets and shared memory"
    }

    fn connect(&mut self, peers: &BTreeSet<Rank>, deadline: Deadline) -> Result<Links, RendezvousError> {
        let Self { member, doors, secret, log, .. } = self;
        let sockets = connect(&member.me, &member.table, peers, doors, secret, deadline, log)?;
        sockets.into_iter().map(|(peer, socket)| Ok((peer, self.link(peer, socket)?))).collect()
    }

    fn barrier(&mut self, deadline: Deadline) -> Result<(), RendezvousError> {
        self.member.barrier(deadline)
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
        if let Some(lobby) = self.lobby {
            lobby.close();
        }
    }
}
