//! The lobby: takes the ranks in, hands out the table, runs barriers, and says who is at fault.
//!
//! One thread decides; one accepts; every connection has a thread that reads. They talk through one queue.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use crossmesh_core::id::Rank;

use super::blame::Evidence;
use super::doors::{Accepted, accept_until};
use super::message::{MAX_MESSAGE_BYTES, MAX_REPORT_BYTES, ToLobby, ToRank, receive, send};
use super::{Abort, Entry, Log, RankNames, RendezvousError};
use crate::auth::{self, Claim, Refusal, Role, Secret};
use crate::deadline::{Deadline, Socket, StreamError};

/// A stranger has this long to prove itself.
pub const HANDSHAKE: Duration = Duration::from_secs(5);
/// Connections that may be proving themselves at once, beside the ranks; more are dropped unheard.
const MAX_STRANGERS: usize = 256;
/// After a death the others have this long to say what they lost.
const SETTLE_DEATH: Duration = Duration::from_millis(300);
/// After a first fault they have this long to say whom they wait for; an engine that gives up takes its time to tell
/// its peers first.
const SETTLE_FAULT: Duration = Duration::from_millis(500);
/// A rank that does not take a message within this time is as good as gone.
const SEND: Duration = Duration::from_millis(500);
/// How long a connection may be silent; the lobby itself never is that patient.
const QUIET: Duration = Duration::from_secs(365 * 86400);

/// The meeting place of a job. It ends when every rank has said goodbye, or the job was aborted.
pub struct Lobby {
    deciding: Option<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
}

/// What the threads of the lobby share.
struct Shared {
    secret: Secret,
    roster: BTreeSet<Rank>,
    /// Ranks that are in, so that no one comes twice.
    taken: Mutex<BTreeSet<Rank>>,
    proving: AtomicUsize,
    stop: Arc<AtomicBool>,
    log: Log,
}

enum Event {
    Arrived(Entry, Socket),
    Said(Rank, ToLobby),
    Lost(Rank),
}

impl Lobby {
    /// Listens where the ranks will look for it; port 0 takes a free one.
    pub fn listen(master: (&str, u16)) -> Result<TcpListener, RendezvousError> {
        let addr = format!("{}:{}", master.0, master.1);
        let mut last = std::io::Error::other("the name has no address");
        for addr in master.to_socket_addrs().into_iter().flatten() {
            match tcp_listener(addr) {
                Ok(listener) => return Ok(listener),
                Err(error) => last = error,
            }
        }
        Err(RendezvousError::CannotListen { addr, cause: last })
    }

    /// Opens at `listener` for the ranks of `roster`; those that have not arrived by `arrive` are named to the others.
    pub fn open(
        listener: TcpListener,
        secret: Secret,
        roster: BTreeSet<Rank>,
        arrive: Deadline,
        log: Log,
    ) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (taken, proving) = (Mutex::default(), AtomicUsize::new(0));
        let shared = Arc::new(Shared { secret, roster, taken, proving, stop: stop.clone(), log });
        let (events, inbox) = channel();
        let door = shared.clone();
        Builder::new().name("lobby-door".into()).spawn(move || keep_door(&listener, &door, &events))?;
        let deciding =
            Builder::new().name("lobby".into()).spawn(move || Desk::new(shared).run(&inbox, arrive))?;
        Ok(Self { deciding: Some(deciding), stop })
    }

    /// Waits until every rank is gone.
    pub fn close(mut self) {
        self.join();
    }

    fn join(&mut self) {
        if let Some(deciding) = self.deciding.take() {
            // A panic of that thread was printed; there is nothing to add.
            let _ = deciding.join();
        }
        self.stop.store(true, Ordering::Relaxed);
    }
}

impl Drop for Lobby {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.join();
    }
}

/// Accepts until the job ends, also when all ranks are in: whoever comes then hears that the rank is taken.
fn keep_door(listener: &TcpListener, shared: &Arc<Shared>, events: &Sender<Event>) {
    accept_until(
        &[Accepted::tcp(listener)],
        || shared.stop.load(Ordering::Relaxed),
        |link| {
            if shared.proving.fetch_add(1, Ordering::Relaxed) >= MAX_STRANGERS + shared.roster.len() {
                shared.proving.fetch_sub(1, Ordering::Relaxed);
                return;
            }
            let (shared, events) = (shared.clone(), events.clone());
            // Without a thread to listen to it, the connection closes.
            let _ = Builder::new()
                .name("lobby-reader".into())
                .spawn(move || serve_connection(link, &shared, &events));
        },
    );
}

/// A connection's life: proof, report, and whatever it says until it closes.
fn serve_connection(mut link: Socket, shared: &Shared, events: &Sender<Event>) {
    let entered = enter(&mut link, shared);
    shared.proving.fetch_sub(1, Ordering::Relaxed);
    let (rank, entry) = match entered {
        Ok(entered) => entered,
        Err((address, why)) => return (shared.log)(&format!("rendezvous: turned away {address}: {why}")),
    };
    let Ok(writer) = link.try_clone() else { return };
    let mut going_on = events.send(Event::Arrived(entry, writer)).is_ok();
    while going_on {
        going_on = match receive(&mut link, MAX_MESSAGE_BYTES, Deadline::after(QUIET)) {
            Ok(message) => events.send(Event::Said(rank, message)).is_ok(),
            Err(_) => {
                let _ = events.send(Event::Lost(rank));
                false
            }
        };
    }
}

/// Who came in; or the address of whom we turned away, and why.
fn enter(link: &mut Socket, shared: &Shared) -> Result<(Rank, Entry), (String, String)> {
    use crate::deadline::Stream;
    let address = link.peer_name();
    let deadline = Deadline::after(HANDSHAKE);
    let first_line = |e: &dyn std::fmt::Display| e.to_string().lines().next().unwrap_or("").to_string();
    let claim = auth::answer(link, &shared.secret, deadline, |claim| shared.admit(claim))
        .map_err(|e| (address.clone(), first_line(&e)))?;
    match receive(link, MAX_REPORT_BYTES, deadline) {
        Ok(ToLobby::Report(entry)) if entry.rank == claim.from => Ok((claim.from, entry)),
        Ok(_) => {
            shared.taken().remove(&claim.from);
            Err((address, format!("{} did not report itself", claim.from)))
        }
        Err(error) => {
            shared.taken().remove(&claim.from);
            Err((address, format!("{}: {}", claim.from, first_line(&error))))
        }
    }
}

impl Shared {
    fn taken(&self) -> MutexGuard<'_, BTreeSet<Rank>> {
        self.taken.lock().expect("no thread panics while it holds the list")
    }

    fn admit(&self, claim: Claim) -> Result<(), Refusal> {
        if claim.role != Role::Rendezvous {
            return Err(Refusal::WrongDoor);
        }
        if !self.roster.contains(&claim.from) {
            return Err(Refusal::UnknownRank);
        }
        if self.taken().insert(claim.from) { Ok(()) } else { Err(Refusal::DuplicateRank) }
    }
}

/// The thread that decides.
struct Desk {
    shared: Arc<Shared>,
    members: BTreeMap<Rank, (Entry, Socket)>,
    ready: BTreeMap<u64, BTreeSet<Rank>>,
    gone: BTreeSet<Rank>,
    evidence: Evidence,
}

impl Desk {
    fn new(shared: Arc<Shared>) -> Self {
        let (members, ready, gone) = Default::default();
        Self { shared, members, ready, gone, evidence: Evidence::default() }
    }

    fn run(mut self, inbox: &Receiver<Event>, arrive: Deadline) {
        let mut judged_at: Option<Deadline> = None;
        while self.gone.len() < self.shared.roster.len() && !self.shared.stop.load(Ordering::Relaxed) {
            let all_in = self.members.len() == self.shared.roster.len();
            let until = judged_at.or((!all_in).then_some(arrive));
            match self.next(inbox, until) {
                Some(event) => self.take(event),
                None if until.is_some_and(Deadline::passed) || self.all_reported() => break,
                None => {}
            }
            judged_at = self.judged_at(judged_at);
        }
        self.finish(arrive);
    }

    /// When to decide who is at fault: soon after the first sign, sooner after a death.
    fn judged_at(&self, before: Option<Deadline>) -> Option<Deadline> {
        let settle = if self.evidence.lost.is_empty() { SETTLE_FAULT } else { SETTLE_DEATH };
        match before {
            None if self.evidence.is_empty() => None,
            None => Some(Deadline::after(settle)),
            Some(deadline) => Some(deadline.or_after(settle)),
        }
    }

    /// Whether everybody who is not gone has reported a fault: nothing more will come.
    fn all_reported(&self) -> bool {
        let reported = |rank: &Rank| self.gone.contains(rank) || self.evidence.faults.contains_key(rank);
        !self.evidence.is_empty() && self.members.keys().all(reported)
    }

    /// The next event; none after a while, so that the loop looks at its deadlines.
    fn next(&self, inbox: &Receiver<Event>, until: Option<Deadline>) -> Option<Event> {
        let a_while = Duration::from_millis(50);
        let wait = until.map_or(a_while, |until| until.left().unwrap_or_default().min(a_while));
        inbox.recv_timeout(wait).ok()
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Arrived(entry, link) => {
                self.members.insert(entry.rank, (entry, link));
                if self.members.len() == self.shared.roster.len() {
                    let table = self.members.values().map(|(entry, _)| entry.clone()).collect();
                    self.tell_all(&ToRank::Table(table));
                }
            }
            Event::Said(rank, ToLobby::Ready { round }) => {
                let ready = self.ready.entry(round).or_default();
                ready.insert(rank);
                if ready.len() == self.shared.roster.len() {
                    self.ready.remove(&round);
                    self.tell_all(&ToRank::Go { round });
                }
            }
            Event::Said(rank, ToLobby::Tell { round, text }) => {
                self.tell_first(&ToRank::Told { round, rank, text });
            }
            Event::Said(rank, ToLobby::Fault(fault)) => {
                self.evidence.faults.insert(rank, fault);
            }
            Event::Said(rank, ToLobby::Bye) => {
                self.gone.insert(rank);
            }
            // A second report, or a rank that said what was wrong or goodbye before it left.
            Event::Said(_, ToLobby::Report(_)) => {}
            Event::Lost(rank) => {
                if self.gone.insert(rank) && !self.evidence.faults.contains_key(&rank) {
                    self.evidence.lost.insert(rank);
                }
            }
        }
    }

    /// Tells everybody how it ended, where it did not end well.
    fn finish(&mut self, arrive: Deadline) {
        let missing: BTreeSet<Rank> =
            self.shared.roster.iter().filter(|r| !self.members.contains_key(r)).copied().collect();
        let quiet = |r: &&Rank| !self.gone.contains(r) && !self.evidence.faults.contains_key(r);
        self.evidence.silent = self.members.keys().filter(quiet).copied().collect();
        let verdict = self.evidence.judge().or_else(|| {
            let first = *missing.first()?;
            let text =
                format!("did not arrive: {} did not within {:.1} s", RankNames(&missing), arrive.allowed_s());
            Some((first, text))
        });
        if let Some((culprit, text)) = verdict {
            let host =
                self.members.get(&culprit).map_or("an unknown host".into(), |(entry, _)| entry.host.clone());
            self.tell_all(&ToRank::Abort(Abort { culprit, host, text }));
        }
        self.shared.stop.store(true, Ordering::Relaxed);
        // What was said still arrives; the threads that read end.
        self.members.values().for_each(|(_, link)| link.shut_down());
    }

    fn tell_first(&mut self, message: &ToRank) {
        if let Some((rank, (_, link))) = self.members.iter_mut().next()
            && send(link, message, Deadline::after(SEND)).is_err()
            && self.gone.insert(*rank)
        {
            self.evidence.lost.insert(*rank);
        }
    }

    /// The first rank last: the lobby lives in its process, and may end with it.
    fn tell_all(&mut self, message: &ToRank) {
        for (rank, (_, link)) in self.members.iter_mut().rev() {
            if self.gone.contains(rank) && !self.evidence.faults.contains_key(rank) {
                continue;
            }
            let told: Result<(), StreamError> = send(link, message, Deadline::after(SEND));
            if told.is_err() && self.gone.insert(*rank) {
                self.evidence.lost.insert(*rank);
            }
        }
    }
}

/// Listens at `addr`; port 0 takes a free one.
pub(super) fn tcp_listener(addr: std::net::SocketAddr) -> std::io::Result<TcpListener> {
    let listener = TcpListener::bind(addr)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Small messages and large ones: none should wait for another.
pub(super) fn without_delay(stream: TcpStream) -> std::io::Result<TcpStream> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}
