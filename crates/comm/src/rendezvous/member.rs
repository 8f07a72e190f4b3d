//! A rank's side of the rendezvous: join, learn who is there, answer pings, wait for the others, report faults.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::Builder;
use std::time::Duration;

use crossmesh_core::id::Rank;

use super::doors::Doors;
use super::lobby::without_delay;
use super::message::{MAX_MESSAGE_BYTES, ToLobby, ToRank, receive, send};
use super::pulse::{HUSHED_NS, PING_NS};
use super::{Abort, Entry, Fault, RendezvousError};
use crate::auth::{self, AuthError, Claim, Role, Secret};
use crate::clock::{Clock, ClockOffset, Monotonic};
use crate::deadline::{Deadline, Socket, StreamError};

/// The lobby may open a moment after we knock.
const RETRY: Duration = Duration::from_millis(20);
/// Sends to the lobby are small; it reads them at once or is not there.
const SEND: Duration = Duration::from_secs(2);
/// The lobby names the ranks that are missing; wait a little longer than it does, to hear it.
const LOBBY_FIRST: Duration = Duration::from_secs(2);
/// The lobby's word on a fault comes within this time, or the lobby itself is in trouble.
const VERDICT: Duration = Duration::from_millis(900);

/// What to do when the job is aborted: called once, on another thread, maybe in the middle of a run.
pub type OnAbort = Box<dyn Fn(&Abort, Word) + Send>;

/// Whose word an abort is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// The lobby's: everybody hears the same.
    Lobby,
    /// Our own, as the lobby is not there: others may know more.
    Ours,
}

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
    /// How long the lobby may be silent afterwards.
    pub silence: Duration,
}

/// A rank that has joined its job.
pub struct Member {
    pub me: Entry,
    pub table: BTreeMap<Rank, Entry>,
    /// What our clock says, compared with the lobby's, as of the last barrier.
    pub clock: Option<ClockOffset>,
    link: Writer,
    round: u64,
    inbox: Receiver<Heard>,
    /// What we were told at a barrier.
    aborted: Option<(Abort, Word)>,
    shared: Arc<Shared>,
}

/// Both threads write: one answers pings, the other reports.
type Writer = Arc<Mutex<Socket>>;

/// What the two threads know of each other.
#[derive(Default)]
struct Shared {
    leaving: AtomicBool,
    /// When the lobby was last heard.
    heard_ns: AtomicU64,
}

/// What the thread that reads passes on.
enum Heard {
    Go(u64, Option<ClockOffset>),
    Told { round: u64, rank: Rank, text: String },
    Abort(Abort, Word),
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
        let shared = Arc::new(Shared::default());
        shared.heard_ns.store(Monotonic.now_ns(), Ordering::SeqCst);
        let lobby = table.values().next().cloned().unwrap_or_else(|| me.clone());
        let (reading, link) = (link.try_clone()?, Arc::new(Mutex::new(link)));
        let silence = ticket.silence + Duration::from_nanos(2 * PING_NS);
        let answers = link.clone();
        let reader =
            Reader { link: reading, answers, heard, lobby, silence, shared: shared.clone(), on_abort };
        Builder::new().name("member".into()).spawn(move || reader.run())?;
        Ok((Self { me, table, clock: None, link, round: 0, inbox, aborted: None, shared }, doors))
    }

    /// Waits until every rank has come this far.
    pub fn barrier(&mut self, deadline: Deadline) -> Result<(), RendezvousError> {
        self.round += 1;
        tell(&self.link, &ToLobby::Ready { round: self.round }, deadline)?;
        loop {
            if let Heard::Go(round, clock) = self.hear(deadline)?
                && round == self.round
            {
                self.clock = clock.or(self.clock);
                return Ok(());
            }
        }
    }

    /// Tells the first rank something; there, what everybody told, itself included. Others do not wait for it.
    pub fn gather(
        &mut self,
        text: String,
        deadline: Deadline,
    ) -> Result<Option<BTreeMap<Rank, String>>, RendezvousError> {
        self.round += 1;
        tell(&self.link, &ToLobby::Tell { round: self.round, text }, deadline)?;
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
    fn hear(&mut self, deadline: Deadline) -> Result<Heard, RendezvousError> {
        let timed_out = || RendezvousError::BarrierTimedOut(deadline.allowed_s());
        match self.inbox.recv_timeout(deadline.left().ok_or_else(timed_out)?) {
            Ok(Heard::Abort(abort, word)) => {
                self.aborted = Some((abort.clone(), word));
                Err(RendezvousError::Aborted(abort))
            }
            Ok(heard) => Ok(heard),
            Err(RecvTimeoutError::Timeout) => Err(timed_out()),
            Err(RecvTimeoutError::Disconnected) => Err(StreamError::Closed.into()),
        }
    }

    /// Reports a fault, and waits for the lobby's word on who is to blame; without one, it is what we saw.
    pub fn fail(&mut self, fault: Fault) -> Abort {
        if let Some((abort, _)) = &self.aborted {
            return abort.clone();
        }
        let _ = tell(&self.link, &ToLobby::Fault(fault.clone()), Deadline::after(SEND));
        let deadline = Deadline::after(VERDICT);
        while let Some(left) = deadline.left() {
            match self.inbox.recv_timeout(left) {
                Ok(Heard::Abort(abort, Word::Lobby)) => return abort,
                Ok(Heard::Abort(abort, Word::Ours)) => return self.own_verdict(fault, Some(abort)),
                Ok(_) => {}
                Err(_) => break,
            }
        }
        self.own_verdict(fault, None)
    }

    /// What we think without the lobby, and if we know, how we lost it. If both it and the rank that we waited for are
    /// silent, on two other hosts than ours, it is ours that is cut off.
    fn own_verdict(&self, fault: Fault, gone: Option<Abort>) -> Abort {
        let silent_ns = Monotonic.now_ns().saturating_sub(self.shared.heard_ns.load(Ordering::SeqCst));
        let host_of = |rank: Rank| self.table.get(&rank).map_or("an unknown host", |entry| &entry.host);
        let culprit = fault.blames.unwrap_or(self.me.rank);
        let lobby = self.table.values().next().unwrap_or(&self.me);
        let abort = |rank: Rank, text: String| Abort { culprit: rank, host: host_of(rank).into(), text };
        let hosts = BTreeSet::from([host_of(culprit), &self.me.host, &lobby.host]);
        if silent_ns > HUSHED_NS && hosts.len() == 3 {
            let whom = format!("neither {culprit} nor the rendezvous on {}", lobby.host);
            return abort(self.me.rank, format!("is cut off: {whom} answers; {}", fault.text));
        }
        match gone {
            // We were stopped because of that, and know no more.
            Some(gone) if fault.hearsay && fault.text == gone.text => gone,
            Some(gone) if host_of(culprit) == lobby.host && culprit != self.me.rank => {
                abort(gone.culprit, format!("{}; {}", gone.text, fault.text))
            }
            _ if fault.blames.is_none() || fault.hearsay || culprit == self.me.rank => {
                abort(culprit, format!("failed: {}", fault.text))
            }
            _ => abort(culprit, format!("does not answer; {}", fault.text)),
        }
    }

    /// Says goodbye: the job may end without us.
    pub fn leave(self) {
        self.shared.leaving.store(true, Ordering::SeqCst);
        // If the lobby is gone already, nobody misses us.
        let _ = tell(&self.link, &ToLobby::Bye, Deadline::after(SEND));
    }
}

fn tell(link: &Writer, message: &ToLobby, deadline: Deadline) -> Result<(), StreamError> {
    send(&mut *link.lock().expect("no thread panics while it writes"), message, deadline)
}

impl Drop for Member {
    fn drop(&mut self) {
        self.shared.leaving.store(true, Ordering::SeqCst);
        if let Ok(link) = self.link.lock() {
            link.shut_down();
        }
    }
}

/// The thread that listens to the lobby.
struct Reader {
    link: Socket,
    answers: Writer,
    heard: Sender<Heard>,
    /// The rank beside which the lobby is.
    lobby: Entry,
    silence: Duration,
    shared: Arc<Shared>,
    on_abort: OnAbort,
}

impl Reader {
    fn run(mut self) {
        loop {
            let received = self.receive();
            let there_ns = Monotonic.now_ns();
            if received.is_ok() {
                self.shared.heard_ns.store(there_ns, Ordering::SeqCst);
            }
            let passed_on = match received {
                Ok(ToRank::Go { round, clock }) => self.heard.send(Heard::Go(round, clock)),
                Ok(ToRank::Told { round, rank, text }) => self.heard.send(Heard::Told { round, rank, text }),
                Ok(ToRank::Ping { sent_ns }) => {
                    self.answer(sent_ns, there_ns);
                    Ok(())
                }
                Ok(ToRank::Abort(abort)) => return self.abort(abort, Word::Lobby),
                Ok(ToRank::Table(_)) => Ok(()),
                Err(_) if self.shared.leaving.load(Ordering::SeqCst) => return,
                Err(why) => return self.abort(self.lobby_gone(&why), Word::Ours),
            };
            if passed_on.is_err() {
                return;
            }
        }
    }

    fn receive(&mut self) -> Result<ToRank, StreamError> {
        match self.link.is_readable_within(self.silence).map_err(StreamError::Io)? {
            true => receive(&mut self.link, MAX_MESSAGE_BYTES, Deadline::after(self.silence)),
            false => Err(StreamError::TimedOut(self.silence.as_secs_f64())),
        }
    }

    fn answer(&self, sent_ns: u64, there_ns: u64) {
        let pong = ToLobby::Pong { sent_ns, there_ns, answered_ns: Monotonic.now_ns() };
        // A lobby that takes nothing does not ask again, which will be noticed.
        let _ = tell(&self.answers, &pong, Deadline::after(SEND));
    }

    fn lobby_gone(&self, why: &StreamError) -> Abort {
        let text = match why {
            StreamError::TimedOut(_) => format!("does not answer, nor the rendezvous beside it: {why}"),
            _ => format!("is gone, and the rendezvous with it: {why}"),
        };
        Abort { culprit: self.lobby.rank, host: self.lobby.host.clone(), text }
    }

    fn abort(&self, abort: Abort, word: Word) {
        // Whoever waits at a barrier hears it too.
        let _ = self.heard.send(Heard::Abort(abort.clone(), word));
        (self.on_abort)(&abort, word);
    }
}

fn wait_for_table(link: &mut Socket, deadline: Deadline) -> Result<BTreeMap<Rank, Entry>, RendezvousError> {
    match receive(link, MAX_MESSAGE_BYTES, deadline)? {
        ToRank::Table(table) => Ok(table.into_iter().map(|entry| (entry.rank, entry)).collect()),
        ToRank::Abort(abort) => Err(RendezvousError::Aborted(abort)),
        ToRank::Go { .. } | ToRank::Told { .. } | ToRank::Ping { .. } => {
            Err(RendezvousError::Unexpected { expected: "the table" })
        }
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
