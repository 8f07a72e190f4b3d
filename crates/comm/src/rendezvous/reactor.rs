//! The one thread of a rank beside its program: all its connections but those for tensors, in one loop.
//!
//! ```text
//! doors ── strangers, a bounded number ── prove themselves ──┬─ for tensors: kept until somebody asks
//!                                                            └─ for control: messages ──▶ node ──▶ messages, dials
//! ```
//!
//! Who has not proven itself costs a connection and at most 52 bytes, for at most five seconds; of too many the oldest
//! goes. A rank that is dropped by such a crowd knocks again. What is logged about strangers is bounded too.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use crossmesh_core::id::Rank;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

use super::doors::{Arrivals, Connection, Doors};
use super::message::{Reach, Say};
use super::node::{Action, Command, Ended, Heard, Input, LinkId, Node};
use super::wire::{Turn, Wire};
use super::{Abort, Entry, Log, News, OnNews};
use crate::auth::{AuthError, Claim, Refusal, Role, Secret};
use crate::clock::{Clock, Monotonic};
use crate::deadline::{Socket, StreamError};
use crate::protect::Session;

const MS: u64 = 1_000_000;
/// A stranger has this long to prove itself.
const HANDSHAKE_NS: u64 = 5_000 * MS;
/// Connections that may be proving themselves at once, beside one of every rank: they all come at the same time, and must not
/// push each other out.
const MAX_STRANGERS: usize = 128;
/// A dial that was dropped unheard is tried again after this time.
const REDIAL_NS: u64 = 20 * MS;
/// Once the job is over, others are told, and those who ask, for so long before the program hears of it.
const LINGER_NS: u64 = 150 * MS;
/// Last words get this long to leave.
const FLUSH_NS: u64 = 1_000 * MS;
/// Lines about strangers that are written out; then one for twice as many, and so on.
const STRANGER_LINES: u64 = 8;
/// It needs little; a process may have little.
const STACK_BYTES: usize = 256 << 10;
const OUT_OF_DESCRIPTORS: Duration = Duration::from_millis(5);

const TCP_DOOR: u64 = u64::MAX;
const UNIX_DOOR: u64 = u64::MAX - 1;
const ROOT_DOOR: u64 = u64::MAX - 2;
const WAKE: u64 = u64::MAX - 3;
const NO_EVENT: epoll::Event =
    epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };

/// What other threads have of it.
#[derive(Debug, Clone)]
pub struct Post {
    commands: Sender<Command>,
    wake: Arc<OwnedFd>,
    stop: Arc<AtomicBool>,
    over: Arc<AtomicBool>,
}

impl Post {
    pub fn send(&self, command: Command) {
        // A loop that is over has said why.
        let _ = self.commands.send(command);
        self.wake();
    }

    /// Whether the job is over, and why is on its way.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    pub fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.wake();
    }

    fn wake(&self) {
        // It fails only where the counter is full, and the loop awake.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// What the loop is started with.
pub struct Setup {
    pub node: Node,
    pub me: Entry,
    /// The job's ranks.
    pub roster: BTreeSet<Rank>,
    pub doors: Doors,
    /// Where everybody comes first, at the root.
    pub root_door: Option<TcpListener>,
    /// The connection to the root, as link 0, and what protects it.
    pub root: Option<Connection>,
    pub secret: Secret,
    pub arrivals: Arc<Arrivals>,
    pub heard: Sender<Heard>,
    pub on_news: OnNews,
    pub log: Log,
}

/// See the module.
struct Reactor {
    setup: Setup,
    poller: OwnedFd,
    commands: Receiver<Command>,
    post: Post,
    wires: BTreeMap<LinkId, Wire>,
    /// Those whose dial or handshake is under way, by when it has to be over: while thousands knock, a turn looks at the first.
    due: BTreeSet<(u64, LinkId)>,
    /// Who has not proven itself: the first came first.
    strangers: BTreeSet<LinkId>,
    next_link: LinkId,
    redials: Vec<(u64, LinkId, Entry, Role, u64)>,
    turned_away: u64,
    /// The end, and when the program hears of it.
    verdict: Option<(Abort, u64)>,
    on_news: Option<OnNews>,
    leaving_ns: Option<u64>,
}

/// Starts the loop in a thread of its own.
pub fn start(mut setup: Setup) -> io::Result<(Post, JoinHandle<()>)> {
    crate::launch::raise_descriptor_limit();
    setup.node.watch_stops(crate::launch::continued_ns());
    let poller = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let (sender, commands) = std::sync::mpsc::channel();
    let (stop, over) = Default::default();
    let post = Post { commands: sender, wake, stop, over };
    let watch = |fd, data| epoll::add(&poller, fd, epoll::EventData::new_u64(data), epoll::EventFlags::IN);
    watch(setup.doors.tcp.as_fd(), TCP_DOOR)?;
    watch(setup.doors.unix.as_fd(), UNIX_DOOR)?;
    watch(post.wake.as_fd(), WAKE)?;
    if let Some(door) = &setup.root_door {
        watch(door.as_fd(), ROOT_DOOR)?;
    }
    let root = setup.root.take();
    let on_news = Some(setup.on_news.clone());
    let mut reactor = Reactor {
        setup,
        poller,
        commands,
        post: post.clone(),
        wires: BTreeMap::new(),
        due: BTreeSet::new(),
        strangers: BTreeSet::new(),
        next_link: 2,
        redials: vec![],
        turned_away: 0,
        verdict: None,
        on_news,
        leaving_ns: None,
    };
    if let Some((root, session)) = root {
        let wire = Wire::proven(root, &session)?;
        reactor.insert(0, wire)?;
    }
    let thread = Builder::new().name("member".into()).stack_size(STACK_BYTES).spawn(move || reactor.run())?;
    Ok((post, thread))
}

impl Reactor {
    fn run(mut self) {
        self.act(Monotonic.now_ns());
        loop {
            let now = Monotonic.now_ns();
            // We may have been stopped anywhere.
            self.setup.node.look(now);
            // How far a dial came says more than that it took too long, which may be our own doing.
            self.expire(now);
            let wake_ns = self.setup.node.tick(now);
            self.act(now);
            if self.is_done(now) {
                return;
            }
            let mut events = [NO_EVENT; 128];
            let count = self.wait(wake_ns, &mut events);
            let now = Monotonic.now_ns();
            self.setup.node.look(now);
            for event in &events[..count] {
                self.take(now, event.data.u64());
            }
            self.take_commands(now);
            self.act(now);
        }
    }

    /// Waits for news, at most until the node, a handshake or a last word is due.
    fn wait(&self, wake_ns: u64, events: &mut [epoll::Event; 128]) -> usize {
        let handshakes = self.due.first().map_or(u64::MAX, |(by_ns, _)| *by_ns);
        let redial = self.redials.iter().map(|redial| redial.0).min().unwrap_or(u64::MAX);
        let last = self.verdict.as_ref().map_or(u64::MAX, |(_, at)| *at);
        let leaving = if self.leaving_ns.is_some() { 20 * MS } else { u64::MAX };
        let at = wake_ns.min(handshakes).min(redial).min(last);
        let wait_ns = at.saturating_sub(Monotonic.now_ns()).min(leaving);
        let wait =
            Timespec { tv_sec: (wait_ns / 1_000_000_000) as i64, tv_nsec: (wait_ns % 1_000_000_000) as i64 };
        epoll::wait(&self.poller, &mut events[..], Some(&wait)).unwrap_or(0)
    }

    /// Whether there is nothing more to do here.
    fn is_done(&mut self, now: u64) -> bool {
        if let Some((abort, _)) = self.verdict.take_if(|(_, at)| now >= *at) {
            let _ = self.setup.heard.send(Heard::Abort(abort));
        }
        if self.leaving_ns.is_none() && self.post.stop.load(Ordering::SeqCst) {
            self.leaving_ns = Some(now);
        }
        self.leaving_ns.is_some_and(|since| now >= since + FLUSH_NS || !self.has_unsaid())
    }

    fn has_unsaid(&self) -> bool {
        self.wires.values().any(|wire| wire.is_open() && wire.wants_write())
    }

    fn take(&mut self, now: u64, data: u64) {
        match data {
            TCP_DOOR | UNIX_DOOR | ROOT_DOOR => self.accept(now, data),
            WAKE => drop(rustix::io::read(&self.post.wake, &mut [0; 8])),
            link => self.turn(now, link),
        }
    }

    fn take_commands(&mut self, now: u64) {
        loop {
            match self.commands.try_recv() {
                Ok(command) => self.setup.node.take(now, Input::Command(command)),
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => return,
            }
        }
    }

    fn accept(&mut self, now: u64, door: u64) {
        for _ in 0..64 {
            let accepted = match (door, &self.setup.root_door) {
                (ROOT_DOOR, Some(listener)) => accept_tcp(listener),
                (UNIX_DOOR, _) => self.setup.doors.unix.accept().map(|(stream, _)| Socket::Unix(stream)),
                _ => accept_tcp(&self.setup.doors.tcp),
            };
            match accepted {
                Ok(socket) => self.let_in(now, socket),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // Out of descriptors, say: those who have proven nothing go first.
                Err(_) => {
                    if !self.drop_stranger() {
                        std::thread::sleep(OUT_OF_DESCRIPTORS);
                    }
                    return;
                }
            }
        }
    }

    fn let_in(&mut self, now: u64, socket: Socket) {
        let most = MAX_STRANGERS + self.setup.roster.len();
        while self.strangers.len() >= most && self.drop_stranger() {}
        let Ok(wire) = Wire::accepted(socket, &self.setup.secret, now + HANDSHAKE_NS) else { return };
        let link = self.next_link;
        self.next_link += 2;
        if self.insert(link, wire).is_ok() {
            self.strangers.insert(link);
        }
    }

    /// Drops the one that has been proving itself for longest.
    fn drop_stranger(&mut self) -> bool {
        let Some(link) = self.strangers.pop_first() else { return false };
        if let Some(wire) = self.remove(link) {
            self.log_stranger(&wire.peer_name(), &"too many are proving themselves");
        }
        true
    }

    fn insert(&mut self, link: LinkId, mut wire: Wire) -> io::Result<()> {
        wire.watches_write = wire.wants_write();
        let flags = flags(wire.watches_write);
        epoll::add(&self.poller, wire.fd(), epoll::EventData::new_u64(link), flags)?;
        if !wire.is_open() {
            self.due.insert((wire.by_ns, link));
        }
        self.wires.insert(link, wire);
        Ok(())
    }

    fn remove(&mut self, link: LinkId) -> Option<Wire> {
        let wire = self.wires.remove(&link)?;
        self.due.remove(&(wire.by_ns, link));
        let _ = epoll::delete(&self.poller, wire.fd());
        Some(wire)
    }

    fn turn(&mut self, now: u64, link: LinkId) {
        let Some(wire) = self.wires.get_mut(&link) else { return };
        let Setup { node, arrivals, roster, .. } = &self.setup;
        let turn =
            wire.turn(self.setup.me.rank, &self.setup.secret, |claim| admit(node, arrivals, roster, claim));
        self.took(now, link, turn);
        self.settle(now, link);
    }

    fn took(&mut self, now: u64, link: LinkId, turn: Turn) {
        match turn {
            Turn::On => {}
            Turn::Said(said) => self.said(now, link, said),
            Turn::Closed(said) => {
                self.said(now, link, said);
                self.hang_up(link);
                self.closed(now, link, Ended::Gone);
            }
            Turn::Nonsense(text) => self.closed(now, link, Ended::Nonsense(text)),
            Turn::Proven(known) => self.proven(now, link, known),
            Turn::Refused(error) => self.refused(now, link, &error),
            Turn::Failed(reach) => self.failed(now, link, reach),
        }
    }

    fn said(&mut self, now: u64, link: LinkId, said: Vec<Say>) {
        for say in said {
            let Some(wire) = self.wires.get(&link) else { return };
            match say.checked(&self.setup.roster) {
                // Our end is well: it is the other side that ends the connection.
                Ok(Say::HungUp) if !wire.is_shut_here() => return self.closed(now, link, Ended::Gone),
                Ok(say) => self.setup.node.take(now, Input::Said(link, say)),
                Err(nonsense) => return self.closed(now, link, Ended::Nonsense(nonsense)),
            }
        }
    }

    /// Should the other side still be there, it has to know that it was its end.
    fn hang_up(&mut self, link: LinkId) {
        if let Some(wire) = self.wires.get_mut(&link) {
            wire.send(&Say::HungUp);
            // Most often nobody is there to read it.
            wire.flush();
        }
    }

    fn closed(&mut self, now: u64, link: LinkId, how: Ended) {
        if self.remove(link).is_some() {
            self.setup.node.take(now, Input::Closed(link, how));
        }
    }

    /// It takes no more bytes.
    fn gone(&mut self, now: u64, link: LinkId) {
        let Some(wire) = self.wires.get(&link) else { return };
        match (wire.is_open(), wire.dialed.is_some()) {
            // What it said before is still to be read.
            (true, _) => {
                let how = if wire.is_closed_here() { Ended::Here } else { Ended::Gone };
                let turn = self.wires.get_mut(&link).map(Wire::last_words);
                turn.into_iter().for_each(|turn| self.took(now, link, turn));
                self.closed(now, link, how);
            }
            (false, true) => self.failed(now, link, Reach::Mute),
            (false, false) => self.refused(now, link, &StreamError::Closed.into()),
        }
    }

    fn proven(&mut self, now: u64, link: LinkId, known: Option<(Claim, Session)>) {
        self.strangers.remove(&link);
        self.wires.get(&link).iter().for_each(|wire| _ = self.due.remove(&(wire.by_ns, link)));
        match known {
            Some((claim, session)) if claim.role == Role::Data => self.hand_over(link, claim.from, &session),
            Some((claim, _)) => self.setup.node.take(now, Input::Linked(link, claim)),
            None => self.setup.node.take(now, Input::Dialed(link, Ok(()))),
        }
        let rest = self.wires.get_mut(&link).map(Wire::rest);
        rest.into_iter().for_each(|turn| self.took(now, link, turn));
    }

    /// A connection for tensors.
    fn hand_over(&mut self, link: LinkId, from: Rank, session: &Session) {
        let Some(mut wire) = self.remove(link) else { return };
        // The verdict is some bytes on a fresh socket.
        if !wire.flush() {
            return;
        }
        let socket = wire.into_socket().and_then(|socket| blocking(socket).ok());
        socket.into_iter().for_each(|socket| self.setup.arrivals.add(from, (socket, session.clone())));
    }

    fn refused(&mut self, now: u64, link: LinkId, error: &AuthError) {
        self.strangers.remove(&link);
        let Some(mut wire) = self.remove(link) else { return };
        if wire.dialed.is_some() {
            // Somebody else has taken the place of the one that we look for.
            return self.setup.node.take(now, Input::Dialed(link, Err(Reach::Refused)));
        }
        wire.flush();
        if let AuthError::Refused { claim: Some(claim), why } = error {
            self.setup.node.refused(claim.from, *why);
        }
        self.log_stranger(&wire.peer_name(), error);
    }

    /// A dial did not get through. One that was dropped unheard is tried again.
    fn failed(&mut self, now: u64, link: LinkId, reach: Reach) {
        let Some(wire) = self.remove(link) else { return };
        let again = now + REDIAL_NS;
        match wire.dialed {
            Some((entry, role)) if reach == Reach::Mute && again < wire.by_ns => {
                self.redials.push((again, link, entry, role, wire.by_ns));
            }
            _ => self.setup.node.take(now, Input::Dialed(link, Err(reach))),
        }
    }

    /// Dials and handshakes that took too long, and dials to be tried again.
    fn expire(&mut self, now: u64) {
        let late: Vec<LinkId> = self.due.range(..=(now, u64::MAX)).map(|(_, link)| *link).collect();
        for link in late {
            let reach = self.wires[&link].reach_so_far();
            if self.wires[&link].dialed.is_some() {
                self.remove(link);
                self.setup.node.take(now, Input::Dialed(link, Err(reach)));
            } else {
                let error = StreamError::TimedOut(HANDSHAKE_NS as f64 / 1e9).into();
                self.refused(now, link, &error);
            }
        }
        let due = self.redials.iter().position(|redial| now >= redial.0);
        if let Some((_, link, entry, role, by_ns)) = due.map(|at| self.redials.swap_remove(at)) {
            self.dial(now, link, &entry, role, by_ns);
        }
    }

    fn dial(&mut self, now: u64, link: LinkId, to: &Entry, role: Role, by_ns: u64) {
        let dialed = Wire::dial(&self.setup.me.host, to, role, by_ns);
        let inserted = dialed.and_then(|wire| self.insert(link, wire).map_err(|_| Reach::Unreachable));
        if let Err(reach) = inserted {
            self.setup.node.take(now, Input::Dialed(link, Err(reach)));
        }
    }

    /// Does what the node wants, and what that leads to.
    fn act(&mut self, now: u64) {
        loop {
            let actions = self.setup.node.take_actions();
            if actions.is_empty() {
                return;
            }
            for action in actions {
                self.do_one(now, action);
            }
        }
    }

    fn do_one(&mut self, now: u64, action: Action) {
        match action {
            Action::Send(link, say) => {
                if let Some(wire) = self.wires.get_mut(&link).filter(|wire| wire.is_open()) {
                    wire.send(&say);
                }
                self.settle(now, link);
            }
            Action::Close(link) => {
                self.wires.get_mut(&link).into_iter().for_each(|wire| wire.closing = true);
                self.settle(now, link);
            }
            Action::Dial { link, to, role, by_ns } => self.dial(now, link, &to, role, by_ns),
            Action::Tell(Heard::Abort(abort)) => self.end(now, abort),
            Action::Tell(Heard::Suspect(rank, why)) => {
                self.on_news.iter().for_each(|hear| hear(News::Suspect(rank, &why)));
            }
            Action::Tell(heard) => {
                if heard == Heard::Left {
                    self.on_news = None;
                }
                let _ = self.setup.heard.send(heard);
            }
        }
    }

    /// Writes what there is, watches for room for the rest, and closes what is to be closed.
    fn settle(&mut self, now: u64, link: LinkId) {
        let Some(wire) = self.wires.get_mut(&link) else { return };
        if !wire.is_connecting() {
            if !wire.flush() {
                return self.gone(now, link);
            }
            if wire.closing && !wire.wants_write() {
                self.remove(link);
                return;
            }
        }
        let wants = wire.wants_write();
        if wants != wire.watches_write {
            wire.watches_write = wants;
            let data = epoll::EventData::new_u64(link);
            let _ = epoll::modify(&self.poller, wire.fd(), data, flags(wants));
        }
    }

    /// The job is over: whoever drives the program hears so at once, and whoever waits here a little later.
    fn end(&mut self, now: u64, abort: Abort) {
        self.post.over.store(true, Ordering::SeqCst);
        self.verdict = Some((abort.clone(), now + LINGER_NS));
        let Some(on_news) = self.on_news.take() else { return };
        // Without a thread the program hears it where it waits for the others.
        let _ = Builder::new()
            .name("abort".into())
            .stack_size(STACK_BYTES)
            .spawn(move || on_news(News::Abort(&abort)));
    }

    fn log_stranger(&mut self, name: &str, why: &dyn std::fmt::Display) {
        self.turned_away += 1;
        let (count, me) = (self.turned_away, self.setup.me.rank);
        let why = why.to_string();
        let why = why.lines().next().unwrap_or("");
        if count <= STRANGER_LINES {
            (self.setup.log)(&format!("{me}: turned away {name}: {why}"));
        } else if count.is_power_of_two() {
            (self.setup.log)(&format!("{me}: turned away {count} strangers so far, the last {name}: {why}"));
        }
    }
}

fn flags(wants_write: bool) -> epoll::EventFlags {
    if wants_write { epoll::EventFlags::IN | epoll::EventFlags::OUT } else { epoll::EventFlags::IN }
}

fn accept_tcp(listener: &TcpListener) -> io::Result<Socket> {
    Ok(Socket::Tcp(listener.accept()?.0))
}

fn blocking(socket: Socket) -> io::Result<Socket> {
    rustix::io::ioctl_fionbio(&socket, false)?;
    socket.without_timeouts()
}

fn admit(node: &Node, arrivals: &Arrivals, roster: &BTreeSet<Rank>, claim: Claim) -> Result<(), Refusal> {
    if claim.role == Role::Data && !arrivals.has_room_for(claim.from) {
        return Err(Refusal::DuplicateRank);
    }
    if !roster.contains(&claim.from) {
        return Err(Refusal::UnknownRank);
    }
    node.admit(claim)
}
