//! A rank among others, without sockets or a clock: what comes in, what goes out. A thread feeds it from real connections
//! ([`super::reactor`]), tests from simulated ones, thousands of ranks at a time.
//!
//! ```text
//!                 r0                 the root: where all of them come first
//!          ┌──────┼──────┐
//!         r1      r2     r3          at most 12 right under it: its deputies
//!       ┌──┼──┐   ...
//!      r4  r5 r6                     and under each of them at most 12
//! ```
//!
//! Words go up and down this tree; whoever loses its parent turns to the root, or the first deputy that is left.

mod ask;
mod join;
mod rounds;
mod silence;
mod trouble;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crossmesh_core::id::Rank;

use super::message::{Notice, Reach, Report, Say};
use super::pulse::{Absence, Pulse, RoundTrip, ping_ns};
use super::{Abort, Entry, Fault};
use crate::auth::{Claim, Refusal, Role};
use crate::clock::ClockOffset;
use join::Root;
use rounds::Barrier;
use silence::Vigil;
use trouble::Trouble;

/// Ranks right under another.
pub const FAN_OUT: usize = 12;
/// How many are looked for, and asked to look.
pub const MAX_SUSPECTS: usize = 8;
const MS: u64 = 1_000_000;
/// While something is wrong, deadlines are looked at this often.
const LOOK_NS: u64 = 20 * MS;
/// And otherwise at least this often.
const LONGEST_SLEEP_NS: u64 = 1_000 * MS;

/// A connection, as the outside calls it. Those that we dial get odd numbers, those that come even ones.
pub type LinkId = u64;

/// What happened.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// Somebody who has proven itself.
    Linked(LinkId, Claim),
    /// How a dial of ours ended.
    Dialed(LinkId, Result<(), Reach>),
    Said(LinkId, Say),
    /// A connection is over, and how it ended.
    Closed(LinkId, Ended),
    Command(Command),
}

/// How a connection ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// The other side closed it.
    Gone,
    /// What was said on it nobody says.
    Nonsense(String),
    /// It takes no more bytes of ours, though the other side has not closed it.
    Here,
}

/// What the rank's program wants.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// It has come to a barrier; they are numbered from 1.
    Ready(u64),
    Tell {
        round: u64,
        text: String,
    },
    Where(Vec<Rank>),
    Fail(Fault),
    Leave,
}

/// What to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    Send(LinkId, Say),
    Close(LinkId),
    Dial {
        link: LinkId,
        to: Entry,
        role: Role,
        by_ns: u64,
    },
    /// For the rank's program.
    Tell(Heard),
}

/// What the rank's program hears.
#[derive(Debug, Clone, PartialEq)]
pub enum Heard {
    /// Everybody is there, on so many hosts.
    AllIn(u32),
    Go {
        round: u64,
        clock: Option<ClockOffset>,
    },
    Told {
        round: u64,
        rank: Rank,
        text: String,
    },
    Entries(Vec<Entry>),
    /// A rank does not answer, and why: who needs it should say so.
    Suspect(Rank, String),
    Abort(Abort),
    /// Nobody under us is left.
    Left,
}

/// How patient a rank is.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// When everybody has to be there, and how long that was.
    pub arrive_ns: u64,
    pub arrive_s: f64,
    /// How long a rank may be silent.
    pub silence_ns: u64,
    /// How long the last may take to a barrier, after the first.
    pub barrier_ns: u64,
    /// By how much this process was started too late to meet the others, if it was.
    pub late_s: Option<f64>,
    /// Ranks on this host, where the launcher says.
    pub local_world: Option<u32>,
}

/// See the module.
#[derive(Debug)]
pub struct Node {
    me: Entry,
    limits: Limits,
    /// What the root alone knows.
    root: Option<Root>,
    up: Option<Up>,
    /// The root has said whom to hang under, which it does once.
    welcomed: bool,
    /// The dial to the parent that the root named.
    moving: Option<(LinkId, Entry)>,
    down: BTreeMap<LinkId, Down>,
    /// The root first, then those right under it.
    deputies: Vec<Entry>,
    /// Everybody whose address we know.
    known: BTreeMap<Rank, Entry>,
    all_in: Option<u32>,
    barrier: Barrier,
    trouble: Trouble,
    verdict: Option<Abort>,
    /// Who asks us something.
    asked: BTreeMap<LinkId, Rank>,
    left: bool,
    /// Somebody under us is gone without a word: no barrier opens any more.
    broken: bool,
    absence: Absence,
    /// When the process was last continued.
    continued_ns: Arc<AtomicU64>,
    next_link: LinkId,
    next_ping_ns: u64,
    wake_ns: u64,
    out: Vec<Action>,
}

/// The rank we hang under.
#[derive(Debug)]
struct Up {
    link: LinkId,
    entry: Entry,
    vigil: Vigil,
    pulse: Pulse,
    /// What it knows of its own clock, and whether it hears the root.
    clock: Option<ClockOffset>,
    hears_root: bool,
}

/// A rank that hangs under us.
#[derive(Debug)]
struct Down {
    entry: Entry,
    vigil: Vigil,
    /// The last barrier that its subtree came to, wholly and in part.
    ready: u64,
    waiting: u64,
    bye: bool,
}

impl Node {
    /// The first rank of `roster`, where all others come.
    pub fn root(me: Entry, roster: BTreeSet<Rank>, limits: Limits, now_ns: u64) -> Self {
        let mut node = Self::new(me.clone(), limits, now_ns);
        node.deputies = vec![me.clone()];
        node.root = Some(Root::new(me, roster));
        node.lead(now_ns);
        node.settle(now_ns);
        node
    }

    /// Another rank, which has proven itself to the root on `link` and now reports.
    pub fn member(me: Entry, root: Entry, link: LinkId, limits: Limits, now_ns: u64) -> Self {
        let mut node = Self::new(me.clone(), limits, now_ns);
        node.deputies = vec![root.clone()];
        node.hang_under(link, root, now_ns);
        node.send(link, Say::Report(me));
        node
    }

    fn new(me: Entry, limits: Limits, now_ns: u64) -> Self {
        let known = BTreeMap::from([(me.rank, me.clone())]);
        Self {
            me,
            limits,
            root: None,
            up: None,
            welcomed: false,
            moving: None,
            down: BTreeMap::new(),
            deputies: vec![],
            known,
            all_in: None,
            barrier: Barrier::default(),
            trouble: Trouble::default(),
            verdict: None,
            asked: BTreeMap::new(),
            left: false,
            broken: false,
            absence: Absence::new(),
            continued_ns: Arc::default(),
            next_link: 1,
            next_ping_ns: now_ns,
            wake_ns: now_ns,
            out: vec![],
        }
    }

    /// Says where it stands when this process was last continued.
    pub fn watch_stops(&mut self, continued_ns: Arc<AtomicU64>) {
        self.continued_ns = continued_ns;
    }

    /// What is to be done since the last call.
    pub fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.out)
    }

    /// Whether somebody who has proven to know the secret may come in.
    pub fn admit(&self, claim: Claim) -> Result<(), Refusal> {
        match claim.role {
            Role::Rendezvous => self.root.as_ref().ok_or(Refusal::WrongDoor)?.admit(claim.from),
            Role::Tree | Role::Data | Role::Ask if claim.to != self.me.rank => Err(Refusal::WrongDoor),
            Role::Tree if self.down.values().any(|d| d.entry.rank == claim.from) => {
                Err(Refusal::DuplicateRank)
            }
            Role::Tree | Role::Data | Role::Ask => Ok(()),
        }
    }

    /// To be called whenever the thread wakes, before anything is taken in.
    pub fn look(&mut self, now: u64) {
        let Some(away) = self.absence.look(self.wake_ns, now) else { return };
        self.wake_ns = now;
        // Time that passed without us is nobody's silence.
        self.up.iter_mut().for_each(|up| up.vigil.shift(away, now));
        self.down.values_mut().for_each(|down| down.vigil.shift(away, now));
        self.barrier.shift(away, now);
    }

    /// Takes in what happened.
    pub fn take(&mut self, now: u64, input: Input) {
        match input {
            Input::Linked(link, claim) => self.on_linked(now, link, claim),
            Input::Dialed(link, result) => self.on_dialed(now, link, result),
            Input::Said(link, say) => self.on_said(now, link, say),
            Input::Closed(link, how) => self.on_closed(now, link, how),
            Input::Command(command) => self.on_command(now, command),
        }
    }

    /// Looks at the deadlines; when to do so next.
    pub fn tick(&mut self, now: u64) -> u64 {
        if self.verdict.is_none() {
            self.beat(now);
            self.look_for_silence(now);
            self.look_at_arrivals(now);
            self.look_at_barrier(now);
            self.look_into_trouble(now);
        }
        let busy = self.trouble.is_active() || self.verdict.is_some();
        let next = if busy { now + LOOK_NS } else { now + LONGEST_SLEEP_NS };
        let due = [Some(self.next_ping_ns), self.arrival_due(), self.barrier_due(), self.silence_due()];
        self.wake_ns = due.into_iter().flatten().filter(|at| *at > now).fold(next, u64::min);
        self.wake_ns
    }

    fn send(&mut self, link: LinkId, say: Say) {
        self.out.push(Action::Send(link, say));
    }

    fn send_up(&mut self, say: Say) {
        if let Some(up) = &self.up {
            let link = up.link;
            self.send(link, say);
        }
    }

    fn send_down(&mut self, say: &Say) {
        let links: Vec<LinkId> = self.down.keys().copied().collect();
        links.into_iter().for_each(|link| self.send(link, say.clone()));
    }

    fn tell(&mut self, heard: Heard) {
        self.out.push(Action::Tell(heard));
    }

    fn dial(&mut self, to: &Entry, role: Role, by_ns: u64) -> LinkId {
        let link = self.next_link;
        self.next_link += 2;
        self.out.push(Action::Dial { link, to: to.clone(), role, by_ns });
        link
    }

    fn ping_ns(&self) -> u64 {
        ping_ns(self.limits.silence_ns)
    }

    /// Whether the parent was heard a moment ago.
    fn up_is_well(&self, now: u64) -> bool {
        let recent = |up: &Up| now.saturating_sub(up.vigil.heard_ns) <= 3 * self.ping_ns();
        self.up.as_ref().is_some_and(|up| !up.vigil.given_up && recent(up))
    }

    /// Whether words of ours get to the root.
    fn hears_root(&self, now: u64) -> bool {
        self.root.is_some() || (self.up_is_well(now) && self.up.as_ref().is_some_and(|up| up.hears_root))
    }

    fn on_linked(&mut self, now: u64, link: LinkId, claim: Claim) {
        match claim.role {
            Role::Rendezvous => self.root.iter_mut().for_each(|root| root.came(link, claim.from)),
            Role::Tree => self.take_under(now, link, claim.from),
            Role::Ask => {
                self.asked.insert(link, claim.from);
            }
            Role::Data => {}
        }
        if let Some(abort) = self.verdict.clone() {
            self.send(link, Say::Abort(abort));
        }
    }

    fn on_dialed(&mut self, now: u64, link: LinkId, result: Result<(), Reach>) {
        match self.moving.take_if(|(moving, _)| *moving == link) {
            Some((_, entry)) => self.on_moved(now, link, entry, result),
            None => self.on_asking(now, link, result),
        }
    }

    fn on_said(&mut self, now: u64, link: LinkId, say: Say) {
        self.note_heard(now, link);
        match say {
            Say::Abort(abort) => self.conclude(now, abort, Some(link)),
            Say::Report(entry) => self.on_report(now, link, entry),
            Say::Welcome { parent } => self.on_welcome(now, link, parent),
            Say::Settled => self.on_settled(now, link),
            Say::Deputies(deputies) => self.on_deputies(link, deputies),
            Say::AllIn { hosts } => self.on_all_in(now, link, hosts),
            Say::Ready { .. } | Say::Waiting { .. } | Say::Go { .. } | Say::Overdue { .. } => {
                self.on_round(now, link, say);
            }
            Say::Late { rank } | Say::Tell { rank, .. } if !self.is_under(link, rank) => {}
            Say::Late { .. } | Say::Tell { .. } => self.on_words(now, say),
            Say::Bye => self.on_bye(now, link),
            Say::HungUp => self.on_closed(now, link, Ended::Here),
            Say::Ping { sent_ns } => self.on_ping(now, link, sent_ns),
            Say::Pong { .. } => self.on_pong(now, link, &say),
            Say::Trouble(report) => self.on_trouble(now, link, report),
            Say::Look { at } => self.on_look(now, link, at),
            Say::Where(ranks) => self.on_where(link, &ranks),
            Say::Alive { .. } | Say::Seen { .. } | Say::Entries(_) => self.on_answer(now, link, say),
        }
    }

    fn on_closed(&mut self, now: u64, link: LinkId, how: Ended) {
        let asker = self.asked.remove(&link);
        if self.verdict.is_some() {
            return;
        }
        if let Some(up) = self.up.take_if(|up| up.link == link) {
            self.lose_the_root();
            return self.lose(now, up.entry, how);
        }
        if let Some(down) = self.down.remove(&link) {
            match down.bye {
                true => self.check_round(now),
                false => {
                    self.broken = true;
                    self.lose(now, down.entry, how);
                }
            }
            return;
        }
        if let Some(entry) = self.root.as_mut().and_then(|root| root.went(link)) {
            return self.lose(now, entry, how);
        }
        let asked = asker.or_else(|| self.trouble.asking.get(&link).map(|asking| asking.rank));
        self.on_asking_closed(now, link);
        if let (Some(rank), Ended::Nonsense(_)) = (asked, &how) {
            let entry = self.known.get(&rank).cloned().unwrap_or(Entry { rank, ..Entry::unknown() });
            self.lose(now, entry, how);
        }
    }

    /// What was said there nobody says: the connection is over, and whoever said it is named.
    fn refuse(&mut self, now: u64, link: LinkId, why: String) {
        self.out.push(Action::Close(link));
        self.on_closed(now, link, Ended::Nonsense(why));
    }

    /// A connection of the tree has ended without a word: the other side's fault, or ours.
    fn lose(&mut self, now: u64, other: Entry, how: Ended) {
        if self.left && self.root.is_none() {
            return self.check_left(now);
        }
        let gone = "is gone: its process died or its host was cut off";
        let babble = "says what no rank says to the rendezvous";
        match how {
            Ended::Gone => self.report(now, Some(other), Notice::Lost(gone.into())),
            Ended::Nonsense(text) => {
                self.report(now, Some(other), Notice::Nonsense(format!("{babble}: {text}")));
            }
            Ended::Here => {
                let text = format!("its connection with {} was closed at its own end", other.rank);
                self.report(now, None, Notice::Fault(Fault { blames: None, hearsay: false, text }));
            }
        }
    }

    fn on_command(&mut self, now: u64, command: Command) {
        match command {
            Command::Ready(round) => {
                self.barrier.mine = round;
                self.check_round(now);
            }
            Command::Tell { round, text } => {
                let rank = self.me.rank;
                self.on_words(now, Say::Tell { round, rank, text });
            }
            Command::Where(ranks) => self.look_up(now, ranks),
            Command::Fail(fault) => self.fail(now, fault),
            Command::Leave => {
                self.left = true;
                self.check_left(now);
            }
        }
    }

    /// Asks the parent for a sign of life.
    fn beat(&mut self, now: u64) {
        if now >= self.next_ping_ns {
            self.next_ping_ns = now + self.ping_ns();
            self.send_up(Say::Ping { sent_ns: now });
        }
    }

    fn on_ping(&mut self, now: u64, link: LinkId, sent_ns: u64) {
        let (clock, root) = (self.clock(now), self.hears_root(now));
        self.send(link, Say::Pong { sent_ns, there_ns: now, answered_ns: now, clock, root });
    }

    fn on_pong(&mut self, now: u64, link: LinkId, pong: &Say) {
        let &Say::Pong { sent_ns, there_ns, answered_ns, clock, root } = pong else { return };
        if sent_ns > now || there_ns > answered_ns {
            let why = format!("an answer to a ping of {sent_ns} ns from {there_ns} to {answered_ns} ns");
            return self.refuse(now, link, why);
        }
        let Some(up) = self.up.as_mut().filter(|up| up.link == link) else { return };
        up.clock = clock;
        up.hears_root = root;
        let trip = RoundTrip { sent_ns, there_ns, answered_ns, back_ns: now };
        let first = up.pulse.answered(trip);
        // Until there is something to compare with, and a few times more.
        if (first || self.clock(now).is_none()) && self.all_in.is_some() {
            self.send(link, Say::Ping { sent_ns: now });
        }
    }

    /// By how much our clock is ahead of the root's.
    fn clock(&self, now: u64) -> Option<ClockOffset> {
        match (&self.up, &self.root) {
            (None, Some(_)) => Some(ClockOffset::default()),
            (Some(up), _) => up.pulse.ahead_of(up.clock?, now),
            (None, None) => None,
        }
    }

    fn report(&mut self, now: u64, about: Option<Entry>, what: Notice) {
        let by = self.me.clone();
        self.consider(now, Report { by, about, what });
    }
}
