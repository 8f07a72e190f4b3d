//! A rank's side of the rendezvous, for its program: join, learn where others are, wait for them, report faults.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use crossmesh_core::id::Rank;

use super::check::plain_host;
use super::doors::{Arrivals, Doors, knock, make_roomy};
use super::node::{Command, Heard, Limits, Node};
use super::reactor::{self, Post, Setup};
use super::{Abort, Connection, Entry, Fault, Log, Mover, OnNews, Patience, RendezvousError};
use crate::auth::{AuthError, Claim, Dialing, Refusal, Role, Secret};
use crate::clock::{Clock, ClockOffset, Monotonic};
use crate::deadline::{Deadline, Socket, StreamError, read_some_by, write_all_by};
use crate::launch::continued_ns;
use crate::protect::Session;

/// The root may open a moment after we knock.
const RETRY: Duration = Duration::from_millis(20);
/// A try at the root's door, and a step of waiting for its answer.
const KNOCK: Duration = Duration::from_secs(2);
const STEP: Duration = Duration::from_millis(100);
/// A handshake gets at least this long.
const SHORTEST_PROOF: Duration = Duration::from_millis(300);
/// Where the root was there and its host now says that nobody is, this often in a row, it is gone.
const GONE_TRIES: u32 = 10;
/// A verdict comes within this time; see `node::trouble`.
const VERDICT: Duration = Duration::from_secs(4);

/// How often what somebody has to move is moved while we wait.
const MOVE: Duration = Duration::from_micros(200);

/// Where and as whom to join.
pub struct Ticket<'a> {
    /// Host and port of the root.
    pub master: (&'a str, u16),
    pub rank: Rank,
    pub roster: BTreeSet<Rank>,
    /// Ranks of the same host name reach each other without the network.
    pub host: &'a str,
    pub secret: &'a Secret,
    pub patience: Patience,
}

/// A rank that has joined its job.
pub struct Member {
    pub me: Entry,
    pub num_hosts: usize,
    /// What our clock says, compared with the root's, as of the last barrier.
    pub clock: Option<ClockOffset>,
    secret: Secret,
    world: usize,
    is_root: bool,
    barriers: u64,
    gathers: u64,
    inbox: Receiver<Heard>,
    told: Vec<(u64, Rank, String)>,
    /// What we were told in the end.
    aborted: Option<Abort>,
    post: Post,
    thread: Option<JoinHandle<()>>,
    arrivals: Arc<Arrivals>,
    /// What has to be called while this rank waits here, so that others' bytes go on.
    mover: Option<Mover>,
}

/// Where the root is.
enum Way {
    Here(TcpListener),
    There(Connection),
}

impl Member {
    /// Joins, and waits until everybody has. `on_news` is called once, on another thread, when the job is over before
    /// its time.
    pub fn join(ticket: &Ticket<'_>, on_news: OnNews, log: Log) -> Result<Self, RendezvousError> {
        let first = *ticket.roster.first().ok_or(RendezvousError::Unexpected { expected: "ranks" })?;
        if first == ticket.rank {
            let listener = listen(ticket.master, ticket.patience.arrive)?;
            return Self::join_as_root(ticket, listener, on_news, log);
        }
        let (stream, root, session) = enter(ticket, first)?;
        let doors = Doors::open(stream.local_addr()?.ip(), ticket.rank)?;
        let me = entry(ticket, &doors);
        let now = Monotonic.now_ns();
        let node = Node::member(me.clone(), root, 0, limits(&ticket.patience, now), now);
        Self::start(ticket, node, me, doors, Way::There((Socket::Tcp(stream), session)), on_news, log)
    }

    /// The same for the first rank, at a listener that is open already.
    pub fn join_as_root(
        ticket: &Ticket<'_>,
        listener: TcpListener,
        on_news: OnNews,
        log: Log,
    ) -> Result<Self, RendezvousError> {
        make_roomy(&listener)?;
        let doors = Doors::open(listener.local_addr()?.ip(), ticket.rank)?;
        let me = entry(ticket, &doors);
        let now = Monotonic.now_ns();
        let node = Node::root(me.clone(), ticket.roster.clone(), limits(&ticket.patience, now), now);
        Self::start(ticket, node, me, doors, Way::Here(listener), on_news, log)
    }

    fn start(
        ticket: &Ticket<'_>,
        node: Node,
        me: Entry,
        doors: Doors,
        way: Way,
        on_news: OnNews,
        log: Log,
    ) -> Result<Self, RendezvousError> {
        let (heard, inbox) = channel();
        let arrivals = Arc::new(Arrivals::default());
        let (root_door, root) = match way {
            Way::Here(listener) => (Some(listener), None),
            Way::There(connection) => (None, Some(connection)),
        };
        let is_root = root_door.is_some();
        let secret = ticket.secret.clone();
        let setup = Setup {
            node,
            me: me.clone(),
            roster: ticket.roster.clone(),
            doors,
            root_door,
            root,
            secret: secret.clone(),
            arrivals: arrivals.clone(),
            heard,
            on_news,
            log,
        };
        let (post, thread) = reactor::start(setup).map_err(RendezvousError::CannotStart)?;
        let (world, told) = (ticket.roster.len(), vec![]);
        let mut member = Self {
            me,
            num_hosts: 0,
            clock: None,
            secret,
            world,
            is_root,
            barriers: 0,
            gathers: 0,
            inbox,
            told,
            aborted: None,
            post,
            thread: Some(thread),
            arrivals,
            mover: None,
        };
        member.wait_for_all()?;
        Ok(member)
    }

    /// The root decides how long that takes, and whoever hears nothing of it says so: there is no deadline of our own.
    fn wait_for_all(&mut self) -> Result<(), RendezvousError> {
        loop {
            if let Heard::AllIn(hosts) = self.hear(None)? {
                self.num_hosts = hosts as usize;
                return Ok(());
            }
        }
    }

    /// From now on this is called again and again wherever this rank waits for others.
    pub fn moves(&mut self, mover: Mover) {
        self.mover = Some(mover);
    }

    /// Waits until every rank has come this far.
    pub fn barrier(&mut self, deadline: Deadline) -> Result<(), RendezvousError> {
        self.barriers += 1;
        self.post.send(Command::Ready(self.barriers));
        loop {
            if let Heard::Go { round, clock } = self.hear(Some(deadline))?
                && round == self.barriers
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
        self.gathers += 1;
        let round = self.gathers;
        self.post.send(Command::Tell { round, text });
        if !self.is_root {
            return Ok(None);
        }
        let mut told = BTreeMap::new();
        while told.len() < self.world {
            let early = self.told.iter().position(|(of, ..)| *of == round);
            match early.map(|at| self.told.swap_remove(at)) {
                Some((_, rank, text)) => drop(told.insert(rank, text)),
                None => drop(self.hear(Some(deadline))?),
            }
        }
        Ok(Some(told))
    }

    /// Connections to some ranks, for tensors. Each of them has to ask for one to us.
    pub fn connect(
        &mut self,
        peers: &BTreeSet<Rank>,
        deadline: Deadline,
    ) -> Result<(BTreeMap<Rank, Connection>, Vec<Entry>), RendezvousError> {
        let entries = self.look_up(peers, deadline)?;
        let unknown = peers.iter().find(|peer| !entries.iter().any(|entry| entry.rank == **peer));
        if let Some(&peer) = unknown {
            return Err(RendezvousError::UnknownPeer { peer });
        }
        let post = self.post.clone();
        let over = || post.is_over();
        let mut links = BTreeMap::new();
        let me = self.me.rank;
        for peer in entries.iter().filter(|entry| entry.rank < me) {
            let knocked = knock(&self.me, peer, &self.secret, deadline, over);
            links.insert(peer.rank, knocked.map_err(|error| self.or_aborted(error))?);
        }
        let higher = peers.iter().copied().filter(|peer| *peer > self.me.rank).collect();
        let came = self.arrivals.take(&higher, deadline, over);
        let waited_s = deadline.allowed_s();
        let missing = |missing| RendezvousError::PeersMissing { me, missing, waited_s };
        links.extend(came.map_err(|left| self.or_aborted(missing(left)))?);
        Ok((links, entries))
    }

    /// Where some ranks can be reached.
    fn look_up(&mut self, ranks: &BTreeSet<Rank>, deadline: Deadline) -> Result<Vec<Entry>, RendezvousError> {
        self.post.send(Command::Where(ranks.iter().copied().collect()));
        loop {
            if let Heard::Entries(entries) = self.hear(Some(deadline))? {
                return Ok(entries);
            }
        }
    }

    /// Where the job is over, that is why something else did not work.
    fn or_aborted(&mut self, error: RendezvousError) -> RendezvousError {
        while self.aborted.is_none()
            && self.post.is_over()
            && self.hear(Some(Deadline::after(VERDICT))).is_ok()
        {}
        self.aborted.clone().map_or(error, RendezvousError::Aborted)
    }

    /// What comes next.
    fn hear(&mut self, deadline: Option<Deadline>) -> Result<Heard, RendezvousError> {
        if let Some(abort) = &self.aborted {
            return Err(RendezvousError::Aborted(abort.clone()));
        }
        let timed_out = |d: Deadline| RendezvousError::BarrierTimedOut(d.allowed_s());
        let heard = self.next_word(deadline);
        match (heard, deadline) {
            (Ok(Heard::Abort(abort)), _) => {
                self.aborted = Some(abort.clone());
                Err(RendezvousError::Aborted(abort))
            }
            (Ok(Heard::Told { round, rank, text }), _) => {
                self.told.push((round, rank, text.clone()));
                Ok(Heard::Told { round, rank, text })
            }
            (Ok(heard), _) => Ok(heard),
            (Err(RecvTimeoutError::Timeout), Some(deadline)) => Err(timed_out(deadline)),
            (Err(_), _) => Err(StreamError::Closed.into()),
        }
    }

    fn next_word(&mut self, deadline: Option<Deadline>) -> Result<Heard, RecvTimeoutError> {
        loop {
            let left = deadline.map(|d| d.left().unwrap_or_default());
            let heard = match (left, &self.mover) {
                (None, None) => return self.inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
                (Some(left), None) => return self.inbox.recv_timeout(left),
                (left, Some(_)) => self.inbox.recv_timeout(left.map_or(MOVE, |left| left.min(MOVE))),
            };
            let is_late = deadline.is_some_and(|d| d.passed());
            match (heard, &mut self.mover) {
                (Err(RecvTimeoutError::Timeout), Some(mover)) if !is_late => mover(),
                (heard, _) => return heard,
            }
        }
    }

    /// Reports a fault, and waits for the word on who is to blame; without one, it is what we saw.
    pub fn fail(&mut self, fault: Fault) -> Abort {
        if let Some(abort) = &self.aborted {
            return abort.clone();
        }
        self.post.send(Command::Fail(fault.clone()));
        let deadline = Deadline::after(VERDICT);
        loop {
            match self.hear(Some(deadline)) {
                Err(RendezvousError::Aborted(abort)) => return abort,
                Ok(_) => {}
                Err(_) => break,
            }
        }
        let me = (self.me.rank, self.me.host.clone());
        let text = format!("no verdict came; {}", fault.text);
        match fault.blames.filter(|blamed| *blamed != me.0) {
            Some(blamed) => Abort::either(me, (blamed, "an unknown host".into()), text),
            None => Abort::new(me.0, me.1, format!("failed: {}", fault.text)),
        }
    }

    /// Says goodbye, and stays until everybody under us has: they may still need us to be told how it ended.
    pub fn leave(mut self) {
        self.post.send(Command::Leave);
        while !matches!(self.hear(None), Ok(Heard::Left) | Err(_)) {}
    }
}

impl Drop for Member {
    /// Its doors are closed afterwards: whoever is left may meet again, at the same place.
    fn drop(&mut self) {
        self.post.stop();
        if let Some(thread) = self.thread.take() {
            // A panic of that thread was printed; there is nothing to add.
            let _ = thread.join();
        }
    }
}

fn entry(ticket: &Ticket<'_>, doors: &Doors) -> Entry {
    Entry {
        rank: ticket.rank,
        host: plain_host(ticket.host),
        pid: std::process::id(),
        tcp: doors.tcp_addr,
        unix: doors.unix_name.clone(),
    }
}

fn limits(patience: &Patience, now: u64) -> Limits {
    let left = patience.arrive.left().unwrap_or_default();
    Limits {
        arrive_ns: now + left.as_nanos() as u64,
        arrive_s: patience.arrive.allowed_s(),
        silence_ns: patience.silence.as_nanos() as u64,
        barrier_ns: patience.barrier.as_nanos() as u64,
        local_world: patience.local_world,
        late_s: lateness_s(patience),
    }
}

/// How late this process came, where that is later than anybody waits for it: by the launcher's clock, or since it set out.
fn lateness_s(patience: &Patience) -> Option<f64> {
    let since = patience.arrive.passed().then(|| patience.arrive.elapsed().as_secs_f64());
    patience.came_late().map(|late| late.came.as_secs_f64()).or(since)
}

/// Listens where the ranks will look for the first of them; port 0 takes a free one.
pub fn listen(master: (&str, u16), deadline: Deadline) -> Result<TcpListener, RendezvousError> {
    let addr = format!("{}:{}", master.0, master.1);
    let wrong = |cause| RendezvousError::CannotListen { addr: addr.clone(), cause };
    let mut last = std::io::Error::other("the name has no address");
    for addr in resolve(master, deadline).map_err(wrong)? {
        match TcpListener::bind(addr) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(wrong(last))
}

/// The addresses of a name, within the time left: the system's resolver knows no deadline.
fn resolve(master: (&str, u16), deadline: Deadline) -> std::io::Result<Vec<SocketAddr>> {
    if let Ok(ip) = master.0.parse() {
        return Ok(vec![SocketAddr::new(ip, master.1)]);
    }
    let (found, answer) = channel();
    let (name, port) = (master.0.to_string(), master.1);
    let resolver = move || {
        let _ = found.send((name.as_str(), port).to_socket_addrs().map(Iterator::collect));
    };
    Builder::new().name("resolver".into()).spawn(resolver)?;
    let slow =
        || std::io::Error::new(std::io::ErrorKind::TimedOut, "its name could not be looked up in time");
    answer.recv_timeout(deadline.left().unwrap_or_default()).map_err(|_| slow())?
}

/// What is known of a root that cannot be reached.
#[derive(Default)]
struct Attempts {
    cause: String,
    /// Its host was there, and so was somebody who listened.
    was_there: bool,
    /// Its host says, again and again, that nobody is.
    refused: u32,
    /// Somebody takes the connection, and says nothing.
    mute: bool,
    /// The name or the way there are unknown.
    dark: bool,
    /// The longest time that passed without us: stopped, we hear nobody.
    away: Duration,
}

impl Attempts {
    /// Does something that takes no longer than it should; the rest of the time we were not there.
    fn watched<T>(&mut self, limit: Duration, mut what: impl FnMut() -> T) -> T {
        let planned = Deadline::after(limit);
        let result = what();
        self.away = self.away.max(planned.elapsed().saturating_sub(limit));
        result
    }
}

/// Knocks until the root opens, and proves itself there.
fn enter(ticket: &Ticket<'_>, root: Rank) -> Result<(TcpStream, Entry, Session), RendezvousError> {
    let addr = format!("{}:{}", ticket.master.0, ticket.master.1);
    let claim = Claim { role: Role::Rendezvous, from: ticket.rank, to: root };
    let deadline = ticket.patience.arrive;
    let mut tries = Attempts { cause: "no time was left".into(), ..Attempts::default() };
    let (begun_ns, continued_ns) = (Monotonic.now_ns(), continued_ns());
    if deadline.passed() {
        // We have not even begun.
        tries.away = deadline.elapsed();
    }
    let mut refused = None;
    while let Some(left) = deadline.left() {
        match tries.watched(KNOCK, || try_knock(ticket.master, deadline, left.min(KNOCK))) {
            // What takes no time proves nothing by taking longer.
            Err(error) if left < SHORTEST_PROOF => tries.cause = error.to_string(),
            Err(error) => tries.failed(&error),
            Ok(stream) => {
                (tries.dark, tries.was_there, tries.refused) = (false, true, 0);
                // A try that had no time left says nothing new of who listens there.
                let in_earnest = left >= SHORTEST_PROOF;
                refused = refused.filter(|_| !in_earnest);
                let tcp = stream.peer_addr()?;
                // One that says nothing is left in time to see whether it can still be reached.
                let patience = deadline.or_after((left / 2).max(SHORTEST_PROOF));
                match prove(&stream, ticket.secret, claim, patience, &mut tries) {
                    Ok(session) => return Ok((stream, root_entry(root, ticket, tcp), session)),
                    // A root that is about to open, or close, or that strangers crowd, may hang up on us.
                    Err(AuthError::Stream(StreamError::Closed)) => tries.cause = "it hung up".into(),
                    Err(AuthError::Stream(StreamError::TimedOut(_))) => {
                        (tries.mute, tries.cause) = (true, "somebody listens there, and says nothing".into());
                    }
                    // The attempt before this one is about to end there.
                    Err(cause @ AuthError::Refused { why: Refusal::WrongSecret, .. })
                        if ticket.secret.is_another_attempt() =>
                    {
                        refused = Some(cause);
                    }
                    Err(cause) => return Err(RendezvousError::Refused { addr, cause }),
                }
            }
        }
        if tries.was_there && tries.refused >= GONE_TRIES {
            break;
        }
        tries.watched(RETRY, || std::thread::sleep(RETRY));
    }
    if let Some(cause) = refused {
        return Err(RendezvousError::Refused { addr, cause });
    }
    // A machine that stalled has stalled the others too.
    let set_out_ns = begun_ns.saturating_sub(deadline.elapsed().as_nanos() as u64);
    if continued_ns.load(Ordering::SeqCst) < set_out_ns {
        tries.away = Duration::ZERO;
    }
    Err(RendezvousError::Aborted(tries.verdict(ticket, root, &addr)))
}

/// Proves itself, and waits in short steps: a process that is stopped meanwhile notices.
fn prove(
    stream: &TcpStream,
    secret: &Secret,
    claim: Claim,
    deadline: Deadline,
    tries: &mut Attempts,
) -> Result<Session, AuthError> {
    let mut link = Socket::Tcp(stream.try_clone().map_err(StreamError::Io)?);
    let mut out = vec![];
    let mut dialing = Dialing::start(secret, claim, &mut out)?;
    loop {
        write_all_by(&mut link, &std::mem::take(&mut out), deadline)?;
        let (mut bytes, mut read) = (vec![0; dialing.needs()], 0);
        while read < bytes.len() {
            let step = Deadline::after(STEP).or_before(deadline);
            match tries.watched(STEP, || read_some_by(&mut link, &mut bytes[read..], step)) {
                Ok(more) => read += more,
                Err(StreamError::TimedOut(_)) if !deadline.passed() => {}
                Err(error) => return Err(error.into()),
            }
        }
        if let Some(session) = dialing.take(&bytes, &mut out)? {
            return Ok(session);
        }
    }
}

/// Until it says more about itself.
fn root_entry(rank: Rank, ticket: &Ticket<'_>, tcp: SocketAddr) -> Entry {
    Entry { rank, host: ticket.master.0.into(), tcp, ..Entry::unknown() }
}

fn try_knock(master: (&str, u16), deadline: Deadline, limit: Duration) -> std::io::Result<TcpStream> {
    let mut last = std::io::Error::other("the name has no address");
    for addr in resolve(master, deadline)? {
        let opened = TcpStream::connect_timeout(&addr, limit).and_then(|stream| {
            stream.set_nodelay(true)?;
            // Where nobody listens, a connection from a port of its own range may reach itself.
            let itself = stream.local_addr()? == stream.peer_addr()?;
            if itself { Err(std::io::ErrorKind::ConnectionRefused.into()) } else { Ok(stream) }
        });
        match opened {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

impl Attempts {
    fn failed(&mut self, error: &std::io::Error) {
        let refused = error.kind() == std::io::ErrorKind::ConnectionRefused;
        self.refused = if refused { self.refused + 1 } else { 0 };
        self.dark = !refused;
        self.mute &= refused;
        self.cause = error.to_string();
    }

    /// Whose fault it is that we are not in.
    fn verdict(&self, ticket: &Ticket<'_>, root: Rank, addr: &str) -> Abort {
        let (waited_s, cause) = (ticket.patience.arrive.allowed_s(), &self.cause);
        let (there, me) = ((root, ticket.master.0.to_string()), (ticket.rank, ticket.host.to_string()));
        if self.away >= ticket.patience.silence {
            let (away_s, allowed_s) = (self.away.as_secs_f64(), ticket.patience.silence.as_secs_f64());
            let text = format!("was stopped for {away_s:.1} s, longer than the {allowed_s:.1} s allowed");
            return Abort::new(me.0, me.1, text);
        }
        if let Some(late) = ticket.patience.came_late().filter(|_| !self.was_there) {
            let late_s = late.came.as_secs_f64();
            let text =
                format!("came too late: {late_s:.1} s after its job began, when nobody was left at {addr}");
            return match ticket.patience.is_own_lateness(late) {
                true => Abort::new(me.0, me.1, text),
                false => Abort::either(there, me, text),
            };
        }
        if self.was_there && !self.mute && self.refused >= GONE_TRIES {
            return Abort::new(there.0, there.1, format!("is gone: it listened at {addr}, and now {cause}"));
        }
        let text = format!("cannot reach the rendezvous at {addr} within {waited_s:.1} s: {cause}");
        if self.mute {
            return Abort::new(there.0, there.1, format!("does not answer; {text}"));
        }
        if !self.dark && ticket.patience.late.is_some() {
            return Abort::new(there.0, there.1, format!("did not arrive; {text}"));
        }
        let hint = "\nhint: is rank 0 running, and MASTER_ADDR right?";
        Abort::either(there, me, format!("{text}{hint}"))
    }
}
