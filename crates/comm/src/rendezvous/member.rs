//! A rank's side of the rendezvous: join, learn who is there, wait for the others, report faults.

use std::collections::BTreeMap;
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::Builder;
use std::time::Duration;

use crossmesh_core::id::Rank;

use super::doors::Doors;
use super::lobby::without_delay;
use super::message::{MAX_MESSAGE_BYTES, ToLobby, ToRank, receive, send};
use super::{Abort, Entry, Fault, RendezvousError};
use crate::auth::{self, AuthError, Claim, Role, Secret};
use crate::deadline::{Deadline, Socket, StreamError};

/// The lobby may open a moment after we knock.
const RETRY: Duration = Duration::from_millis(20);
/// Sends to the lobby are small; it reads them at once or is not there.
const SEND: Duration = Duration::from_secs(2);
/// How long the lobby may be silent: barriers have deadlines of their own.
const QUIET: Duration = Duration::from_secs(365 * 86400);

/// The lobby names the ranks that are missing; wait a little longer than it does, to hear it.
const LOBBY_FIRST: Duration = Duration::from_secs(2);
/// The lobby's word on a fault comes within this time, or the lobby itself is in trouble.
const VERDICT: Duration = Duration::from_millis(900);

/// What to do when the job is aborted: called once, on another thread, maybe in the middle of a run.
pub type OnAbort = Box<dyn Fn(&Abort) + Send>;

/// Where and as whom to join.
#[derive(Debug, Clone)]
pub struct Ticket<'a> {
    /// Host and port of the lobby.
    pub master: (&'a str, u16),
    pub rank: Rank,
    /// Ranks of the same host name reach each other without the network.
    pub host: &'a str,
    pub secret: &'a Secret,
    pub deadline: Deadline,
}

/// A rank that has joined its job.
pub struct Member {
    pub me: Entry,
    pub table: BTreeMap<Rank, Entry>,
    link: Socket,
    round: u64,
    inbox: Receiver<Heard>,
    leaving: Arc<AtomicBool>,
}

/// What the thread that reads passes on.
enum Heard {
    Go(u64),
    Told { round: u64, rank: Rank, text: String },
    Abort(Abort),
}

impl Member {
    /// Joins, and waits for the table. The doors are for [`super::connect`].
    pub fn join(ticket: &Ticket<'_>, on_abort: OnAbort) -> Result<(Self, Doors), RendezvousError> {
        let stream = enter(ticket)?;
        let doors = Doors::open(stream.local_addr()?.ip(), ticket.rank)?;
        let me = Entry {
            rank: ticket.rank,
            host: ticket.host.into(),
            pid: std::process::id(),
            tcp: doors.tcp_addr,
            unix: doors.unix_name.clone(),
        };
        let mut link = Socket::Tcp(stream);
        send(&mut link, &ToLobby::Report(me.clone()), ticket.deadline)?;
        let table = wait_for_table(&mut link, ticket.deadline.plus(LOBBY_FIRST))?;
        let (heard, inbox) = channel();
        let leaving = Arc::new(AtomicBool::new(false));
        let lobby = table.values().next().cloned().unwrap_or_else(|| me.clone());
        let reader = Reader { link: link.try_clone()?, heard, lobby, leaving: leaving.clone(), on_abort };
        Builder::new().name("member".into()).spawn(move || reader.run())?;
        Ok((Self { me, table, link, round: 0, inbox, leaving }, doors))
    }

    /// Waits until every rank has come this far.
    pub fn barrier(&mut self, deadline: Deadline) -> Result<(), RendezvousError> {
        self.round += 1;
        send(&mut self.link, &ToLobby::Ready { round: self.round }, deadline)?;
        while !matches!(self.hear(deadline)?, Heard::Go(round) if round == self.round) {}
        Ok(())
    }

    /// Tells the first rank something; there, what everybody told, itself included. Others do not wait for it.
    pub fn gather(
        &mut self,
        text: String,
        deadline: Deadline,
    ) -> Result<Option<BTreeMap<Rank, String>>, RendezvousError> {
        self.round += 1;
        send(&mut self.link, &ToLobby::Tell { round: self.round, text }, deadline)?;
        if self.table.keys().next() != Some(&self.me.rank) {
            return Ok(None);
        }
        let mut told = BTreeMap::new();
        while told.len() < self.table.len() {
            if let Heard::Told { round, rank, text } = self.hear(deadline)?
                && round == self.round
            {
                told.insert(rank, text);
            }
        }
        Ok(Some(told))
    }

    /// What the lobby says next.
    fn hear(&self, deadline: Deadline) -> Result<Heard, RendezvousError> {
        let timed_out = || RendezvousError::BarrierTimedOut(deadline.allowed_s());
        match self.inbox.recv_timeout(deadline.left().ok_or_else(timed_out)?) {
            Ok(Heard::Abort(abort)) => Err(RendezvousError::Aborted(abort)),
            Ok(heard) => Ok(heard),
            Err(RecvTimeoutError::Timeout) => Err(timed_out()),
            Err(RecvTimeoutError::Disconnected) => Err(StreamError::Closed.into()),
        }
    }

    /// Reports a fault, and waits for the lobby's word on who is to blame; without one, it is what we saw.
    pub fn fail(&mut self, fault: Fault) -> Abort {
        let _ = send(&mut self.link, &ToLobby::Fault(fault.clone()), Deadline::after(SEND));
        let deadline = Deadline::after(VERDICT);
        while let Some(left) = deadline.left() {
            match self.inbox.recv_timeout(left) {
                Ok(Heard::Abort(abort)) => return abort,
                Ok(_) => {}
                Err(_) => break,
            }
        }
        let culprit = fault.blames.unwrap_or(self.me.rank);
        let host = self.table.get(&culprit).map_or("an unknown host", |entry| &entry.host).to_string();
        Abort { culprit, host, text: format!("failed: {}", fault.text) }
    }

    /// Says goodbye: the job may end without us.
    pub fn leave(mut self) {
        self.leaving.store(true, Ordering::SeqCst);
        // If the lobby is gone already, nobody misses us.
        let _ = send(&mut self.link, &ToLobby::Bye, Deadline::after(SEND));
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.leaving.store(true, Ordering::SeqCst);
        self.link.shut_down();
    }
}

/// The thread that listens to the lobby.
struct Reader {
    link: Socket,
    heard: Sender<Heard>,
    /// The rank beside which the lobby is.
    lobby: Entry,
    leaving: Arc<AtomicBool>,
    on_abort: OnAbort,
}

impl Reader {
    fn run(mut self) {
        loop {
            let passed_on = match receive(&mut self.link, MAX_MESSAGE_BYTES, Deadline::after(QUIET)) {
                Ok(ToRank::Go { round }) => self.heard.send(Heard::Go(round)),
                Ok(ToRank::Told { round, rank, text }) => self.heard.send(Heard::Told { round, rank, text }),
                Ok(ToRank::Abort(abort)) => return self.abort(abort),
                Ok(ToRank::Table(_)) => Ok(()),
                Err(_) if self.leaving.load(Ordering::SeqCst) => return,
                Err(why) => return self.abort(self.lobby_gone(&why)),
            };
            if passed_on.is_err() {
                return;
            }
        }
    }

    fn lobby_gone(&self, why: &StreamError) -> Abort {
        let text = format!("is gone, and the rendezvous with it: {why}");
        Abort { culprit: self.lobby.rank, host: self.lobby.host.clone(), text }
    }

    fn abort(&self, abort: Abort) {
        // Whoever waits at a barrier hears it too.
        let _ = self.heard.send(Heard::Abort(abort.clone()));
        (self.on_abort)(&abort);
    }
}

fn wait_for_table(link: &mut Socket, deadline: Deadline) -> Result<BTreeMap<Rank, Entry>, RendezvousError> {
    match receive(link, MAX_MESSAGE_BYTES, deadline)? {
        ToRank::Table(table) => Ok(table.into_iter().map(|entry| (entry.rank, entry)).collect()),
        ToRank::Abort(abort) => Err(RendezvousError::Aborted(abort)),
        ToRank::Go { .. } | ToRank::Told { .. } => Err(RendezvousError::Unexpected { expected: "the table" }),
    }
}

/// Knocks until the lobby opens, and proves itself there.
fn enter(ticket: &Ticket<'_>) -> Result<TcpStream, RendezvousError> {
    let addr = format!("{}:{}", ticket.master.0, ticket.master.1);
    let claim = Claim { role: Role::Rendezvous, from: ticket.rank, to: ticket.rank };
    let mut cause = "no time was left".to_string();
    while let Some(left) = ticket.deadline.left() {
        match knock(ticket.master, left) {
            Err(error) => cause = error.to_string(),
            Ok(stream) => {
                let mut link = Socket::Tcp(stream);
                match (auth::dial(&mut link, ticket.secret, claim, ticket.deadline), link) {
                    (Ok(()), Socket::Tcp(stream)) => return Ok(stream),
                    // A lobby that is about to open, or close, may hang up on us.
                    (Err(AuthError::Stream(StreamError::Closed)), _) => cause = "it hung up".into(),
                    (Err(cause), _) => return Err(RendezvousError::Refused { addr, cause }),
                    (Ok(()), Socket::Unix(_)) => unreachable!("it was opened as TCP"),
                }
            }
        }
        std::thread::sleep(RETRY);
    }
    Err(RendezvousError::CannotReachLobby { addr, waited_s: ticket.deadline.allowed_s(), cause })
}

fn knock(master: (&str, u16), left: Duration) -> std::io::Result<TcpStream> {
    let mut last = std::io::Error::other("the name has no address");
    for addr in master.to_socket_addrs()? {
        match TcpStream::connect_timeout(&addr, left).and_then(without_delay) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}
