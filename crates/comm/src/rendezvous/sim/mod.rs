//! Ranks that meet on a simulated network with a simulated clock: the real [`Node`](super::node::Node), thousands of them,
//! faults at any moment, and the same answer for the same seed.
//!
//! ```text
//! node ── actions ──▶ network: latency, cuts, the dead and the stopped ── inputs ──▶ node
//! ```
//!
//! An engine is modelled by whom a rank waits for: a dead peer is noticed after a moment, a silent one after the deadline.

#![allow(clippy::print_stdout)] // the numbers are part of what this shows

mod faults;
mod scale;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossmesh_core::id::Rank;

use super::message::{Reach, Say};
use super::node::{Action, Command, Ended, Heard, Input, Limits, LinkId, Node};
use super::{Abort, Entry, Fault};
use crate::auth::{Claim, Role};

const MS: u64 = 1_000_000;
const LATENCY_NS: u64 = 100_000;
const SILENCE_NS: u64 = 1_000 * MS;
/// What an engine takes to be sure that a peer is gone.
const GRACE_NS: u64 = 250 * MS;
/// From a verdict to the end of the process.
const EXIT_NS: u64 = 200 * MS;

#[derive(Debug, Clone, PartialEq)]
enum Happens {
    Start(usize),
    Input(usize, Input),
    Tick(usize, u64),
    /// A dial arrives at its listener.
    Knock {
        from: usize,
        link: LinkId,
        to: usize,
        role: Role,
        by_ns: u64,
    },
    /// A rank's engine looks at its peers.
    Engine(usize),
    Exit(usize),
    Fault(SimFault),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SimFault {
    Kill(usize),
    Stop(usize),
    Continue(usize),
    /// The way between two hosts.
    Cut(usize, usize),
    /// A host from all others.
    Isolate(usize),
    /// One of a rank's connections, by its number, and how.
    Break(usize, usize, Break),
}

/// What may happen to a connection between two that are well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Break {
    /// The rank's end is closed for writing; the other notices, and says so.
    HalfClosed,
    /// The same, and the rank notices first.
    NoticedHere,
    Garbage,
    /// Something between them ends it for both.
    Reset,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    NotYet,
    Up,
    Stopped,
    Dead,
}

struct Process {
    host: usize,
    state: State,
    node: Option<Node>,
    /// By our link: the other process, and its link.
    links: BTreeMap<LinkId, (usize, LinkId)>,
    next_in: LinkId,
    /// What came while it was stopped.
    missed: Vec<Happens>,
    ticks: u64,
    /// When it first knocked, and was last continued.
    begun_ns: Option<u64>,
    continued_ns: Arc<AtomicU64>,
    /// Whom its engine waits for, and since when each of them is not heard.
    peers: Vec<usize>,
    unheard: BTreeMap<usize, u64>,
    failed: bool,
    ready: bool,
    heard: Option<Abort>,
    heard_ns: u64,
    all_in: bool,
    sent_bytes: u64,
    found: Vec<Entry>,
}

struct Sim {
    now: u64,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    happens: BTreeMap<u64, Happens>,
    next: u64,
    processes: Vec<Process>,
    cuts: BTreeSet<(usize, usize)>,
    arrive_ns: u64,
    num_messages: u64,
    /// The two ends of the connection that was broken.
    broken: Option<(usize, usize)>,
    /// Who says what it saw of others later than it could, and by how much.
    slow_observer: Option<(usize, u64)>,
}

impl Sim {
    /// `hosts[i]` is rank i's host. Nobody starts by itself.
    fn new(hosts: &[usize], arrive_ns: u64) -> Self {
        let process = |host: &usize| Process {
            host: *host,
            state: State::NotYet,
            node: None,
            links: BTreeMap::new(),
            next_in: 2,
            missed: vec![],
            ticks: 0,
            begun_ns: None,
            continued_ns: Arc::default(),
            peers: vec![],
            unheard: BTreeMap::new(),
            failed: false,
            ready: false,
            heard: None,
            heard_ns: 0,
            all_in: false,
            sent_bytes: 0,
            found: vec![],
        };
        let (queue, happens, cuts) = Default::default();
        let processes = hosts.iter().map(process).collect();
        Self {
            now: 0,
            queue,
            happens,
            next: 0,
            processes,
            cuts,
            arrive_ns,
            num_messages: 0,
            broken: None,
            slow_observer: None,
        }
    }

    fn at(&mut self, ns: u64, what: Happens) {
        self.queue.push(Reverse((ns, self.next)));
        self.happens.insert(self.next, what);
        self.next += 1;
    }

    fn entry(&self, i: usize) -> Entry {
        let tcp = format!("10.0.0.1:{}", i + 1).parse().unwrap();
        Entry {
            rank: Rank(i as u32),
            host: format!("h{}", self.processes[i].host),
            pid: 1,
            tcp,
            unix: "u".into(),
        }
    }

    fn is_cut(&self, a: usize, b: usize) -> bool {
        let (a, b) = (self.processes[a].host, self.processes[b].host);
        a != b && self.cuts.contains(&(a.min(b), a.max(b)))
    }

    /// Runs until nothing happens any more, or the time is up.
    fn run(&mut self, until_ns: u64) {
        while let Some(Reverse((at, id))) = self.queue.pop() {
            if at > until_ns {
                return;
            }
            self.now = at;
            let what = self.happens.remove(&id).unwrap();
            self.happen(what);
        }
    }

    fn happen(&mut self, what: Happens) {
        let whom = match &what {
            Happens::Start(i) | Happens::Input(i, _) | Happens::Tick(i, _) | Happens::Engine(i) => Some(*i),
            Happens::Knock { to, .. } => Some(*to),
            _ => None,
        };
        if let Happens::Knock { from, link, to, by_ns, .. } = what
            && self.processes[to].state == State::Stopped
        {
            // Its host takes the connection; nobody answers.
            return self.at(by_ns, Happens::Input(from, Input::Dialed(link, Err(Reach::Mute))));
        }
        if let Some(i) = whom.filter(|i| self.processes[*i].state == State::Stopped) {
            return self.processes[i].missed.push(what);
        }
        match what {
            Happens::Start(i) => self.start(i),
            Happens::Input(i, input) => self.feed(i, Some(input)),
            Happens::Tick(i, number) if self.processes[i].ticks == number => self.feed(i, None),
            Happens::Tick(..) => {}
            Happens::Knock { from, link, to, role, by_ns } => self.knock(from, link, to, role, by_ns),
            Happens::Engine(i) => self.engine(i),
            Happens::Exit(i) => self.kill(i),
            Happens::Fault(fault) => self.inject(fault),
        }
    }

    fn limits(&self) -> Limits {
        Limits {
            arrive_ns: self.now + self.arrive_ns,
            arrive_s: self.arrive_ns as f64 / 1e9,
            silence_ns: SILENCE_NS,
            barrier_ns: 60_000 * MS,
            late_s: (self.now > self.arrive_ns).then_some(self.now as f64 / 1e9),
            local_world: Some(
                self.processes.iter().filter(|p| p.host == self.processes[0].host).count() as u32
            ),
        }
    }

    /// A process knocks at the root until that opens, as `member::enter` does.
    fn start(&mut self, i: usize) {
        let begun = *self.processes[i].begun_ns.get_or_insert(self.now);
        if self.processes[i].state == State::Dead || self.now > begun + self.arrive_ns {
            return;
        }
        self.processes[i].state = State::Up;
        let (me, root, limits) = (self.entry(i), self.entry(0), self.limits());
        if i == 0 {
            let roster = (0..self.processes.len()).map(|r| Rank(r as u32)).collect();
            let mut node = Node::root(me, roster, limits, self.now);
            node.watch_stops(self.processes[0].continued_ns.clone());
            self.processes[0].node = Some(node);
            return self.feed(0, None);
        }
        let open = self.processes[0].node.is_some() && self.processes[0].state == State::Up;
        if !open || self.is_cut(i, 0) {
            return self.at(self.now + 20 * MS, Happens::Start(i));
        }
        let theirs = self.link_in(0, i, 0);
        let claim = Claim { role: Role::Rendezvous, from: me.rank, to: Rank(0) };
        self.feed(0, Some(Input::Linked(theirs, claim)));
        let mut node = Node::member(me, root, 0, limits, self.now);
        node.watch_stops(self.processes[i].continued_ns.clone());
        self.processes[i].node = Some(node);
        self.feed(i, None);
    }

    /// A new link at `at` from `from`'s link.
    fn link_in(&mut self, at: usize, from: usize, link: LinkId) -> LinkId {
        let theirs = self.processes[at].next_in;
        self.processes[at].next_in += 2;
        self.processes[at].links.insert(theirs, (from, link));
        self.processes[from].links.insert(link, (at, theirs));
        theirs
    }

    fn feed(&mut self, i: usize, input: Option<Input>) {
        if self.processes[i].state != State::Up {
            return;
        }
        let Some(mut node) = self.processes[i].node.take() else { return };
        node.look(self.now);
        input.into_iter().for_each(|input| node.take(self.now, input));
        let wake = node.tick(self.now);
        let actions = node.take_actions();
        self.processes[i].node = Some(node);
        self.processes[i].ticks += 1;
        let number = self.processes[i].ticks;
        self.at(wake, Happens::Tick(i, number));
        actions.into_iter().for_each(|action| self.act(i, action));
    }

    fn act(&mut self, i: usize, action: Action) {
        match action {
            Action::Send(link, say) => self.send(i, link, say),
            Action::Close(link) => {
                if let Some((peer, theirs)) = self.processes[i].links.remove(&link) {
                    self.processes[peer].links.remove(&theirs);
                    self.pass(i, peer, Input::Closed(theirs, Ended::Gone));
                }
            }
            Action::Dial { link, to, role, by_ns } => {
                let to = to.rank.index();
                match self.is_cut(i, to) {
                    true => self.at(by_ns, Happens::Input(i, Input::Dialed(link, Err(Reach::Unreachable)))),
                    false => {
                        self.at(self.now + LATENCY_NS, Happens::Knock { from: i, link, to, role, by_ns })
                    }
                }
            }
            Action::Tell(heard) => self.hear(i, heard),
        }
    }

    fn send(&mut self, i: usize, link: LinkId, say: Say) {
        self.num_messages += 1;
        self.processes[i].sent_bytes += say.to_bytes().len() as u64;
        if let Some((peer, theirs)) = self.processes[i].links.get(&link).copied() {
            match self.slow_observer.filter(|(slow, _)| *slow == i && matches!(say, Say::Seen { .. })) {
                Some((_, late_ns)) => {
                    self.at(self.now + late_ns, Happens::Input(peer, Input::Said(theirs, say)))
                }
                None => self.pass(i, peer, Input::Said(theirs, say)),
            }
        }
    }

    fn pass(&mut self, from: usize, to: usize, input: Input) {
        if !self.is_cut(from, to) {
            self.at(self.now + LATENCY_NS, Happens::Input(to, input));
        }
    }

    fn knock(&mut self, from: usize, link: LinkId, to: usize, role: Role, by_ns: u64) {
        if self.processes[from].state == State::Dead {
            return;
        }
        let claim = Claim { role, from: Rank(from as u32), to: Rank(to as u32) };
        let admitted = self.processes[to].node.as_ref().is_some_and(|node| node.admit(claim).is_ok());
        if self.processes[to].state == State::Dead || !admitted || self.now >= by_ns {
            let reach = if self.now >= by_ns { Reach::Mute } else { Reach::Refused };
            return self.at(self.now + LATENCY_NS, Happens::Input(from, Input::Dialed(link, Err(reach))));
        }
        let theirs = self.link_in(to, from, link);
        self.feed(to, Some(Input::Linked(theirs, claim)));
        self.at(self.now + LATENCY_NS, Happens::Input(from, Input::Dialed(link, Ok(()))));
    }

    fn hear(&mut self, i: usize, heard: Heard) {
        match heard {
            Heard::AllIn(_) => {
                self.processes[i].all_in = true;
                let ranks = self.processes[i].peers.iter().map(|p| Rank(*p as u32)).collect();
                self.feed(i, Some(Input::Command(Command::Where(ranks))));
            }
            Heard::Entries(entries) => {
                self.processes[i].found = entries;
                self.feed(i, Some(Input::Command(Command::Ready(1))));
            }
            Heard::Go { .. } => {
                self.processes[i].ready = true;
                self.at(self.now + 50 * MS, Happens::Engine(i));
            }
            Heard::Abort(abort) => {
                self.processes[i].heard = Some(abort);
                self.processes[i].heard_ns = self.now;
                self.at(self.now + EXIT_NS, Happens::Exit(i));
            }
            Heard::Told { .. } | Heard::Suspect(..) | Heard::Left => {}
        }
    }

    /// Whether a rank hears another's engine.
    fn engine(&mut self, i: usize) {
        if self.processes[i].state != State::Up
            || self.processes[i].heard.is_some()
            || self.processes[i].failed
        {
            return;
        }
        let peers = self.processes[i].peers.clone();
        for peer in peers {
            let silent = self.is_cut(i, peer) || self.processes[peer].state == State::Stopped;
            let dead = self.processes[peer].state == State::Dead && !self.is_cut(i, peer);
            if !silent && !dead {
                self.processes[i].unheard.remove(&peer);
                continue;
            }
            let since = *self.processes[i].unheard.entry(peer).or_insert(self.now);
            // Engines look a few times a second.
            let limit = if dead { GRACE_NS } else { SILENCE_NS + (i as u64 * 37 % 200) * MS };
            if self.now >= since + limit && !self.processes[i].failed {
                self.processes[i].failed = true;
                let blames = Some(Rank(peer as u32));
                let fault = Fault { blames, hearsay: false, text: format!("recv from r{peer}, 8 B left") };
                self.feed(i, Some(Input::Command(Command::Fail(fault))));
            }
        }
        self.at(self.now + 50 * MS, Happens::Engine(i));
    }

    fn kill(&mut self, i: usize) {
        self.processes[i].state = State::Dead;
        let links: Vec<(usize, LinkId)> = self.processes[i].links.values().copied().collect();
        self.processes[i].links.clear();
        for (peer, theirs) in links {
            self.processes[peer].links.remove(&theirs);
            self.pass(i, peer, Input::Closed(theirs, Ended::Gone));
        }
    }

    fn inject(&mut self, fault: SimFault) {
        match fault {
            SimFault::Kill(i) => self.kill(i),
            SimFault::Stop(i) if self.processes[i].state != State::Dead => {
                self.processes[i].state = State::Stopped;
            }
            SimFault::Continue(i) if self.processes[i].state == State::Stopped => {
                self.processes[i].state = State::Up;
                self.processes[i].continued_ns.store(self.now, Ordering::SeqCst);
                let missed = std::mem::take(&mut self.processes[i].missed);
                missed.into_iter().for_each(|what| self.at(self.now, what));
            }
            SimFault::Stop(_) | SimFault::Continue(_) => {}
            SimFault::Break(i, number, how) => self.break_link(i, number, how),
            SimFault::Cut(a, b) => drop(self.cuts.insert((a.min(b), a.max(b)))),
            SimFault::Isolate(host) => {
                let hosts: BTreeSet<usize> = self.processes.iter().map(|p| p.host).collect();
                self.cuts.extend(hosts.iter().filter(|h| **h != host).map(|h| (host.min(*h), host.max(*h))));
            }
        }
    }

    fn break_link(&mut self, i: usize, number: usize, how: Break) {
        let links: Vec<LinkId> = self.processes[i].links.keys().copied().collect();
        if links.is_empty() || self.processes[i].state != State::Up {
            return;
        }
        let link = links[number % links.len()];
        let (peer, theirs) = self.processes[i].links.remove(&link).unwrap();
        self.processes[peer].links.remove(&theirs);
        self.broken = Some((i, peer));
        let (here, there) = match how {
            Break::HalfClosed => (Input::Said(link, Say::HungUp), Input::Closed(theirs, Ended::Gone)),
            Break::NoticedHere => (Input::Closed(link, Ended::Here), Input::Closed(theirs, Ended::Gone)),
            Break::Garbage => {
                (Input::Closed(link, Ended::Gone), Input::Closed(theirs, Ended::Nonsense("ZZZZ".into())))
            }
            Break::Reset => (Input::Closed(link, Ended::Gone), Input::Closed(theirs, Ended::Gone)),
        };
        let here_ns = if how == Break::NoticedHere { 0 } else { 2 * LATENCY_NS };
        self.at(self.now + here_ns, Happens::Input(i, here));
        self.at(self.now + LATENCY_NS, Happens::Input(peer, there));
    }
}
