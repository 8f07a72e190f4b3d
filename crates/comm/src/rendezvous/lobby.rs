//! The lobby: takes the ranks in, hands out the table, runs barriers, feels everybody's pulse, and says who is at fault.
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
use super::pulse::{HUSHED_NS, PING_NS, Pulse, RoundTrip};
use super::{Abort, Entry, Log, RankNames, RendezvousError};
use crate::auth::{self, AuthError, Claim, Refusal, Role, Secret};
use crate::clock::{Clock, Monotonic};
use crate::deadline::{Deadline, Socket, StreamError};

/// A stranger has this long to prove itself.
pub const HANDSHAKE: Duration = Duration::from_secs(5);
/// Connections that may be proving themselves at once, beside the ranks; more are dropped unheard.
const MAX_STRANGERS: usize = 256;
/// A rank that does not take a message within this time is as good as gone.
const SEND: Duration = Duration::from_millis(500);
/// How long a connection may be silent; the lobby itself never is that patient.
const QUIET: Duration = Duration::from_secs(365 * 86400);
/// Between two looks at the deadlines.
const LOOK: Duration = Duration::from_millis(50);

/// How long the lobby waits for whom.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// For ranks that have not come yet.
    pub arrive: Deadline,
    /// For a rank that says nothing.
    pub silence: Duration,
    /// For the last at a barrier, after the first.
    pub barrier: Duration,
}

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
    /// Why somebody who claimed to be that rank was turned away.
    refused: Mutex<BTreeMap<Rank, Refusal>>,
    proving: AtomicUsize,
    stop: Arc<AtomicBool>,
    log: Log,
}

enum Event {
    Arrived(Entry, Socket),
    /// What a rank said, and when it was heard.
    Said(Rank, ToLobby, u64),
    /// How its connection ended.
    Lost(Rank, StreamError),
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

    /// Opens at `listener` for the ranks of `roster`. Whoever tries its patience is named to the others.
    pub fn open(
        listener: TcpListener,
        secret: Secret,
        roster: BTreeSet<Rank>,
        patience: Patience,
        log: Log,
    ) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (taken, refused, proving) = (Mutex::default(), Mutex::default(), AtomicUsize::new(0));
        let shared = Arc::new(Shared { secret, roster, taken, refused, proving, stop: stop.clone(), log });
        let (events, inbox) = channel();
        let door = shared.clone();
        Builder::new().name("lobby-door".into()).spawn(move || keep_door(&listener, &door, &events))?;
        let deciding =
            Builder::new().name("lobby".into()).spawn(move || Desk::new(shared, patience).run(&inbox))?;
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
            Ok(message) => events.send(Event::Said(rank, message, Monotonic.now_ns())).is_ok(),
            Err(why) => {
                let _ = events.send(Event::Lost(rank, why));
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
    let claim =
        auth::answer(link, &shared.secret, deadline, |claim| shared.admit(claim)).map_err(|error| {
            if let AuthError::Refused { claim: Some(claim), why } = error {
                shared.refused().insert(claim.from, why);
            }
            (address.clone(), first_line(&error))
        })?;
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

    fn refused(&self) -> MutexGuard<'_, BTreeMap<Rank, Refusal>> {
        self.refused.lock().expect("no thread panics while it holds the list")
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
    patience: Patience,
    members: BTreeMap<Rank, (Entry, Socket)>,
    /// By round: who is ready, and when the first was.
    ready: BTreeMap<u64, (BTreeSet<Rank>, Deadline)>,
    gone: BTreeSet<Rank>,
    pulse: Pulse,
    evidence: Evidence,
}

impl Desk {
    fn new(shared: Arc<Shared>, patience: Patience) -> Self {
        let (members, ready, gone) = Default::default();
        let pulse = Pulse::new(Monotonic.now_ns());
        Self { shared, patience, members, ready, gone, pulse, evidence: Evidence::default() }
    }

    fn run(mut self, inbox: &Receiver<Event>) {
        let mut judged_at: Option<Deadline> = None;
        while self.gone.len() < self.shared.roster.len() && !self.shared.stop.load(Ordering::Relaxed) {
            let until = judged_at.or((!self.all_in()).then_some(self.patience.arrive));
            match self.next(inbox, until) {
                Some(event) => self.take(event),
                None if until.is_some_and(Deadline::passed) || self.all_reported() => break,
                None => {}
            }
            self.feel_pulse();
            if self.late_at_barrier().is_some() {
                break;
            }
            judged_at = self.judged_at(judged_at);
        }
        self.finish();
    }

    fn all_in(&self) -> bool {
        self.members.len() == self.shared.roster.len()
    }

    /// Asks everybody for a sign of life from time to time, and notes who gives none.
    fn feel_pulse(&mut self) {
        let now = Monotonic.now_ns();
        self.pulse.look(now);
        // Who waits for the others to arrive has nothing to say.
        if !self.all_in() {
            return;
        }
        if self.pulse.is_due(now) {
            let present = self.members.keys().filter(|r| !self.gone.contains(r)).copied();
            present.collect::<Vec<_>>().into_iter().for_each(|rank| self.ping(rank));
        }
        let patience = self.patience.silence.as_nanos() as u64 + 2 * PING_NS;
        let silent = |for_ns| &self.pulse.silent(now, for_ns) - &self.gone;
        self.evidence.overdue = !silent(patience).is_empty();
        self.evidence.silent = silent(HUSHED_NS);
    }

    fn ping(&mut self, rank: Rank) {
        let Some((_, link)) = self.members.get_mut(&rank) else { return };
        // Who cannot be told does not answer either, which will be noticed.
        let _ = send(link, &ToRank::Ping { sent_ns: Monotonic.now_ns() }, Deadline::after(SEND));
    }

    /// When to decide who is at fault: soon after the first sign, the sooner the more is known.
    fn judged_at(&self, before: Option<Deadline>) -> Option<Deadline> {
        let settle = self.evidence.settles_after();
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

    /// Those who keep the others waiting at a barrier for too long.
    fn late_at_barrier(&self) -> Option<BTreeSet<Rank>> {
        let (ready, _) = self.ready.values().find(|(_, until)| until.passed())?;
        Some(&self.shared.roster - ready)
    }

    /// The next event; none after a while, so that the loop looks at its deadlines.
    fn next(&self, inbox: &Receiver<Event>, until: Option<Deadline>) -> Option<Event> {
        let wait = until.map_or(LOOK, |until| until.left().unwrap_or_default().min(LOOK));
        inbox.recv_timeout(wait).ok()
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Arrived(entry, link) => {
                self.pulse.heard(entry.rank, Monotonic.now_ns());
                self.evidence.hosts.insert(entry.rank, entry.host.clone());
                self.members.insert(entry.rank, (entry, link));
                if self.all_in() {
                    let table: Vec<Entry> = self.members.values().map(|(entry, _)| entry.clone()).collect();
                    self.tell_all(|_| ToRank::Table(table.clone()));
                    // Until now nobody was asked for a sign of life.
                    let now = Monotonic.now_ns();
                    self.shared.roster.iter().for_each(|rank| self.pulse.heard(*rank, now));
                }
            }
            Event::Said(rank, said, heard_ns) => {
                self.pulse.heard(rank, heard_ns);
                self.hear(rank, said, heard_ns);
            }
            // A rank that said what was wrong, or goodbye, has left.
            Event::Lost(rank, why) => {
                if self.gone.insert(rank) && !self.evidence.faults.contains_key(&rank) {
                    self.evidence.lost.insert(rank, how_lost(&why));
                }
            }
        }
    }

    fn hear(&mut self, rank: Rank, said: ToLobby, back_ns: u64) {
        match said {
            ToLobby::Ready { round } => {
                let late = || Deadline::after(self.patience.barrier);
                let (ready, _) = self.ready.entry(round).or_insert_with(|| (BTreeSet::new(), late()));
                ready.insert(rank);
                if ready.len() == self.shared.roster.len() {
                    self.ready.remove(&round);
                    self.go(round);
                }
            }
            ToLobby::Tell { round, text } => self.tell_first(&ToRank::Told { round, rank, text }),
            ToLobby::Fault(fault) => self.evidence.add(rank, fault),
            ToLobby::Pong { sent_ns, there_ns, answered_ns } => {
                if self.pulse.answered(rank, RoundTrip { sent_ns, there_ns, answered_ns, back_ns }) {
                    self.ping(rank);
                }
            }
            ToLobby::Bye => drop(self.gone.insert(rank)),
            ToLobby::Report(_) => {}
        }
    }

    /// Opens a barrier.
    fn go(&mut self, round: u64) {
        let now = Monotonic.now_ns();
        let clocks: BTreeMap<Rank, _> =
            self.members.keys().filter_map(|rank| Some((*rank, self.pulse.offset(*rank, now)?))).collect();
        self.tell_all(|rank| ToRank::Go { round, clock: clocks.get(&rank).copied() });
    }

    /// Tells everybody how it ended, where it did not end well.
    fn finish(&mut self) {
        let verdict = self.evidence.judge().or_else(|| self.late()).or_else(|| self.missing());
        if let Some((culprit, text)) = verdict {
            let host =
                self.members.get(&culprit).map_or("an unknown host".into(), |(entry, _)| entry.host.clone());
            self.tell_all(|_| ToRank::Abort(Abort { culprit, host: host.clone(), text: text.clone() }));
        }
        self.shared.stop.store(true, Ordering::Relaxed);
        // What was said still arrives; the threads that read end.
        self.members.values().for_each(|(_, link)| link.shut_down());
    }

    fn late(&self) -> Option<(Rank, String)> {
        let late = self.late_at_barrier()?;
        let waited_s = self.patience.barrier.as_secs_f64();
        let text = format!(
            "keeps the others waiting: {} did not come to the barrier within {waited_s:.1} s of the first",
            RankNames(&late)
        );
        Some((*late.first()?, text))
    }

    fn missing(&self) -> Option<(Rank, String)> {
        let there = |rank: &&Rank| !self.members.contains_key(rank);
        let missing: BTreeSet<Rank> = self.shared.roster.iter().filter(there).copied().collect();
        let first = *missing.first()?;
        let (names, waited_s) = (RankNames(&missing), self.patience.arrive.allowed_s());
        let mut text = format!("did not arrive: {names} did not within {waited_s:.1} s");
        if let Some((rank, why)) = self.shared.refused().iter().find(|(rank, _)| missing.contains(rank)) {
            text += &format!("; somebody who claimed to be {rank} was turned away: {why}");
        }
        Some((first, text))
    }

    fn tell_first(&mut self, message: &ToRank) {
        if let Some((rank, (_, link))) = self.members.iter_mut().next()
            && let Err(why) = send(link, message, Deadline::after(SEND))
            && self.gone.insert(*rank)
        {
            self.evidence.lost.insert(*rank, how_lost(&why));
        }
    }

    /// The first rank last: the lobby lives in its process, and may end with it.
    fn tell_all(&mut self, message: impl Fn(Rank) -> ToRank) {
        for (rank, (_, link)) in self.members.iter_mut().rev() {
            // Who took its leave hears nothing more. Who is lost may still listen.
            let lost = self.evidence.lost.contains_key(rank);
            if self.gone.contains(rank) && !lost && !self.evidence.faults.contains_key(rank) {
                continue;
            }
            let told: Result<(), StreamError> = send(link, &message(*rank), Deadline::after(SEND));
            if let Err(why) = told
                && self.gone.insert(*rank)
            {
                self.evidence.lost.insert(*rank, how_lost(&why));
            }
        }
    }
}

fn how_lost(why: &StreamError) -> String {
    match why {
        // What the system says about a connection is about its end; the rest is about what was said.
        StreamError::Io(cause) if cause.raw_os_error().is_none() => {
            format!("says what no rank says to the rendezvous: {cause}")
        }
        _ => "is gone: its process died or its host was cut off".into(),
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
