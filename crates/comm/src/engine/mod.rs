//! The engine: runs a rank's programs over its links, in one thread, in one loop.
//!
//! ```text
//!        +--> copies and announcements of what became ready
//!        |    sends: whoever is next in line, while its link has room
//! step --+
//!        |    wait on all links (epoll)
//!        +--> what arrived, what was sent -> ops end -> ops become ready
//! ```
//!
//! Nothing is polled in vain: the loop sleeps until a link or another thread has news ([`crate::wake`]), or a heartbeat or
//! deadline is due. Only links that nothing wakes are asked again and again, the less often the longer they are silent.
//! A message starts when its receiver has said that there is a place for it; receivers say so as early as they can,
//! for all receives at once, so that nobody pays a round trip per message.

mod asking;
mod job;
mod sends;
mod tags;
#[cfg(test)]
mod tests;
mod watch;

use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::os::fd::OwnedFd;

use crossmesh_core::id::Rank;
use crossmesh_core::program::OpKind;
use crossmesh_core::trace::OpSpan;
use rustc_hash::FxHashMap;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

pub use job::{JobSpec, Tensor};
pub use watch::Interrupt;

use crate::clock::Clock;
use crate::device::{Device, DeviceError};
use crate::error::CommError;
use crate::flight::FlightRecord;
use crate::memory::lease::{Borrower, Lease};
use crate::transport::{Control, Event, Expected, Link, LinkError, Message};
use crate::wake::{Sleeper, Waker};
use crate::wire::{Kind, WireError};
pub(crate) use job::Job;
use sends::InLine;

/// What is copied before the loop looks at its links again.
const COPY_STEP_BYTES: u64 = 1 << 20;
/// Ops of a new job that are looked at before peers hear of them: whoever sends to us begins while we look at the rest.
const START_STEP: usize = 1024;
/// Messages announced for jobs that have not started here yet; a peer that announces more is out of its mind.
const MAX_EARLY_TAGS: usize = 1 << 22;

/// What the poller calls the device, and what other threads wake us by.
const DEVICE: u64 = u64::MAX;
const WAKER: u64 = u64::MAX - 1;

const NO_EVENT: epoll::Event =
    epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };

/// What a user may set.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// How long nothing may move before the job is given up.
    pub deadline_ms: u64,
    /// By rank: what to call its host in errors.
    pub hosts: Vec<String>,
    /// Whoever holds another copy of it can end the job.
    pub interrupt: Interrupt,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self { deadline_ms: 10_000, hosts: vec![], interrupt: Interrupt::default() }
    }
}

/// A job that was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a job ends when it is waited for"]
pub struct Handle(u32);

/// What a job did on this rank.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct JobReport {
    pub seconds: f64,
    /// When each op ran, in program order.
    pub ops: Vec<OpSpan>,
    pub bytes_sent: u64,
    pub bytes_received: u64,
}

/// How long a step may sleep.
#[derive(Debug, Clone, Copy)]
enum Until {
    Now,
    /// Anything that whoever drives the engine has to look at.
    News,
    /// The job has ended, and everything has been said.
    Over(Handle),
}

struct Peer {
    rank: Rank,
    link: Box<dyn Link>,
    /// Whether the poller watches for room to write.
    watches_write: bool,
    /// Channels that wait for room.
    parked: Vec<(u32, u32)>,
    /// Receives to be announced, by job.
    announce: Vec<(u32, u32)>,
    /// Whether it stands in the list of those that have something to be flushed, and of those that have work.
    touched: bool,
    works: bool,
    heard_ns: u64,
    waits_for: Option<Rank>,
    /// When we last gave a sign of life, how much had gone to it by then, and whom we said we wait for.
    told_ns: u64,
    told_bytes: Option<u64>,
    told_wait: Option<Rank>,
    /// How many messages it has announced for jobs that have not started here.
    early: usize,
    said_bye: bool,
    /// We said that nothing more comes.
    shut: bool,
    lost: bool,
}

pub struct Engine {
    me: Rank,
    /// How many ranks there are, as far as is known.
    world: u32,
    peers: Vec<Peer>,
    index_of: FxHashMap<Rank, usize>,
    /// Peers with something to say that was not flushed, with work that needs no waiting, and those that nothing wakes: a
    /// step looks at these, and at whoever woke it, however many peers there are.
    touched: Vec<usize>,
    working: Vec<usize>,
    asked: Vec<usize>,
    /// Peers whose links wait for room to write.
    unwritten: usize,
    poller: OwnedFd,
    clock: Box<dyn Clock>,
    options: EngineOptions,
    /// As the memories of its jobs know it.
    borrower: Borrower,
    jobs: BTreeMap<u32, Job>,
    /// Memory of jobs that failed: their links may still have it.
    unsettled: Vec<Lease>,
    /// Announcements for jobs that have not started here.
    early: FxHashMap<u32, Vec<(Rank, u32)>>,
    early_tags: usize,
    line: BinaryHeap<InLine>,
    virtual_time: f64,
    copies: VecDeque<(u32, u32)>,
    /// How much of the first copy is done.
    copied: u64,
    device: Option<Box<dyn Device>>,
    /// Passes that can be computed; the first one is under way if `computing`.
    passes: VecDeque<(u32, u32)>,
    computing: bool,
    sleeper: Sleeper,
    events: Vec<Event>,
    /// Bytes sent and received by jobs that are over.
    traffic: (u64, u64),
    asking: asking::Asking,
    watch: watch::Watch,
    failed: Option<CommError>,
    last_flight: Option<FlightRecord>,
}

impl Engine {
    pub fn new(
        me: Rank,
        links: Vec<(Rank, Box<dyn Link>)>,
        clock: Box<dyn Clock>,
        options: EngineOptions,
    ) -> Result<Self, CommError> {
        let system = |what| move |e: Errno| CommError::System { me, what, cause: e.to_string() };
        let poller = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("create a poller"))?;
        let sleeper = Sleeper::new().map_err(system("make an event counter"))?;
        let data = epoll::EventData::new_u64(WAKER);
        let woken = epoll::add(&poller, sleeper.fd(), data, epoll::EventFlags::IN);
        woken.map_err(system("watch its event counter"))?;
        options.interrupt.wakes(sleeper.waker());
        let now = clock.now_ns();
        let asking = asking::Asking::new(links.iter().any(|(_, link)| link.fd().is_none()));
        let mut peers = vec![];
        for (i, (rank, link)) in links.into_iter().enumerate() {
            let data = epoll::EventData::new_u64(i as u64);
            if let Some(fd) = link.fd() {
                epoll::add(&poller, fd, data, epoll::EventFlags::IN).map_err(system("watch a link"))?;
            }
            peers.push(Peer {
                rank,
                link,
                watches_write: false,
                parked: vec![],
                announce: vec![],
                // A new link has a greeting to send.
                touched: true,
                works: false,
                heard_ns: now,
                waits_for: None,
                told_ns: now,
                told_bytes: None,
                told_wait: None,
                early: 0,
                said_bye: false,
                shut: false,
                lost: false,
            });
        }
        let ranks = peers.iter().map(|p| p.rank.0 + 1).chain([me.0 + 1, options.hosts.len() as u32]);
        Ok(Self {
            me,
            world: ranks.max().unwrap_or(0),
            index_of: peers.iter().enumerate().map(|(i, p)| (p.rank, i)).collect(),
            touched: (0..peers.len()).collect(),
            working: vec![],
            asked: (0..peers.len()).filter(|i| peers[*i].link.fd().is_none()).collect(),
            unwritten: 0,
            peers,
            poller,
            clock,
            options,
            borrower: Borrower::new(),
            jobs: BTreeMap::new(),
            unsettled: vec![],
            early: FxHashMap::default(),
            early_tags: 0,
            line: BinaryHeap::new(),
            virtual_time: 0.0,
            copies: VecDeque::new(),
            copied: 0,
            device: None,
            passes: VecDeque::new(),
            computing: false,
            sleeper,
            events: vec![],
            traffic: (0, 0),
            asking,
            watch: watch::Watch::new(now),
            failed: None,
            last_flight: None,
        })
    }

    /// Gives the rank something to compute with. Without it, a program with passes fails.
    pub fn set_device(&mut self, device: Box<dyn Device>) -> Result<(), CommError> {
        let data = epoll::EventData::new_u64(DEVICE);
        let watch = |fd| epoll::add(&self.poller, fd, data, epoll::EventFlags::IN);
        device.fd().map_or(Ok(()), watch).map_err(|e| CommError::System {
            me: self.me,
            what: "watch its device",
            cause: e.to_string(),
        })?;
        self.device = Some(device);
        Ok(())
    }

    pub fn rank(&self) -> Rank {
        self.me
    }

    /// Wakes the engine from other threads: its device's, and those that have calls for whoever drives it.
    pub fn waker(&self) -> Waker {
        self.sleeper.waker()
    }

    /// Starts a program. It moves on whenever a job is tested or waited for.
    pub fn start(&mut self, spec: JobSpec) -> Result<Handle, CommError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let (id, now) = (spec.id, self.clock.now_ns());
        let link_of = |rank: Rank| self.index_of.get(&rank).copied().filter(|i| !self.peers[*i].lost);
        let mut job = Job::new(spec, now, link_of, self.me, self.borrower)?;
        // Nobody who had nothing to do with us was silent.
        for peer in job.peers().filter(|peer| !self.jobs.values().any(|other| other.goes_on_with(*peer))) {
            self.peers[self.index_of[&peer]].heard_ns = now;
        }
        let early = self.early.remove(&id).unwrap_or_default();
        self.early_tags -= early.len();
        for (peer, tag) in early {
            self.peers[self.index_of[&peer]].early -= 1;
            if let Err(why) = job.note_ready(peer, tag) {
                let cause = WireError::Unexpected { kind: Kind::Ready, job: id, tag, why };
                let error = self.nonsense(peer, cause);
                return Err(self.give_up(error));
            }
        }
        let ready: Vec<u32> = (0..).zip(&job.ops).filter(|(_, p)| p.waits == 0).map(|(i, _)| i).collect();
        self.jobs.insert(id, job);
        for ops in ready.chunks(START_STEP) {
            ops.iter().for_each(|op| self.activate(id, *op, now));
            self.pump_sends().map_err(|error| self.give_up(error))?;
        }
        Ok(Handle(id))
    }

    /// Moves what can be moved without waiting, and says whether the job has ended.
    pub fn test(&mut self, handle: Handle) -> Result<bool, CommError> {
        self.step(Until::Now)?;
        Ok(self.has_ended(handle))
    }

    /// Bytes sent and received so far, of all jobs.
    pub fn traffic(&self) -> (u64, u64) {
        let jobs = self.jobs.values();
        jobs.fold(self.traffic, |(out, into), job| (out + job.bytes_sent, into + job.bytes_received))
    }

    /// Waits until something has happened, at most for a heartbeat, and moves what can be moved. Whoever calls this again and
    /// again looks in between at what [`Engine::waker`] may have woken it for, and at jobs that may have ended.
    pub fn turn(&mut self) -> Result<(), CommError> {
        let result = self.step(Until::News);
        self.sleeper.tell();
        result
    }

    /// Whether the job has ended, without moving anything.
    pub fn has_ended(&self, handle: Handle) -> bool {
        self.jobs.get(&handle.0).is_none_or(|job| job.left == 0)
    }

    /// Runs until the job has ended, and everything that peers wait for has been said.
    pub fn wait(&mut self, handle: Handle) -> Result<JobReport, CommError> {
        while !self.is_over(handle) {
            self.step(Until::Over(handle))?;
        }
        Ok(self.remove(handle))
    }

    /// The report of a job that has ended, at once; for whoever goes on to drive the engine.
    pub fn finish(&mut self, handle: Handle) -> Option<JobReport> {
        self.has_ended(handle).then(|| self.remove(handle))
    }

    fn is_over(&self, handle: Handle) -> bool {
        self.has_ended(handle) && !self.has_unsaid()
    }

    /// Whether peers may still wait for words of ours.
    fn has_unsaid(&self) -> bool {
        let wants = |peer: &usize| !self.peers[*peer].lost && self.peers[*peer].link.wants_write();
        self.unwritten > 0 || self.touched.iter().chain(&self.asked).any(wants)
    }

    /// The peer's link has something to be flushed.
    fn touch(&mut self, peer: usize) {
        if !std::mem::replace(&mut self.peers[peer].touched, true) {
            self.touched.push(peer);
        }
    }

    /// After anything was done with a link: whether it goes on without waiting.
    fn note_work(&mut self, peer: usize) {
        let p = &mut self.peers[peer];
        if !p.lost && p.link.has_work() && !std::mem::replace(&mut p.works, true) {
            self.working.push(peer);
        }
    }

    fn remove(&mut self, handle: Handle) -> JobReport {
        let report = self.jobs.remove(&handle.0).map(|job| report(&job)).unwrap_or_default();
        self.traffic.0 += report.bytes_sent;
        self.traffic.1 += report.bytes_received;
        report
    }

    /// The most that the kernel may hold for us in connections.
    pub fn kernel_bytes(&self) -> u64 {
        self.peers.iter().map(|p| p.link.kernel_bytes()).sum()
    }

    /// What this rank was doing when it failed.
    pub fn flight_record(&self) -> Option<&FlightRecord> {
        self.last_flight.as_ref()
    }

    fn step(&mut self, until: Until) -> Result<(), CommError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let result = self.try_step(until);
        result.map_err(|error| self.give_up(error))
    }

    fn try_step(&mut self, until: Until) -> Result<(), CommError> {
        self.compute()?;
        self.copy_some();
        self.pump_sends()?;
        let can_compute = !self.computing && !self.passes.is_empty();
        let busy = !self.working.is_empty() || !self.copies.is_empty() || can_compute;
        let may_wait = match until {
            Until::Now => false,
            Until::News => self.sleeper.may_sleep(),
            Until::Over(handle) => !self.is_over(handle),
        };
        self.poll(may_wait && !busy)?;
        self.watch_peers()
    }

    /// Waits for news, at most until a heartbeat is due, and takes it in.
    fn poll(&mut self, may_wait: bool) -> Result<(), CommError> {
        let wait_ns = if may_wait { self.watch.until_next(self.clock.now_ns()) } else { 0 };
        let wait_ns = self.asking.pause_ns().map_or(wait_ns, |pause| wait_ns.min(pause));
        let timeout =
            Timespec { tv_sec: (wait_ns / 1_000_000_000) as i64, tv_nsec: (wait_ns % 1_000_000_000) as i64 };
        let mut buffer = [NO_EVENT; 64];
        let woken: Vec<u64> = match epoll::wait(&self.poller, &mut buffer, Some(&timeout)) {
            Ok(count) => buffer[..count].iter().map(|e| e.data.u64()).collect(),
            Err(Errno::INTR) => vec![],
            Err(e) => {
                return Err(CommError::System { me: self.me, what: "wait", cause: e.to_string() });
            }
        };
        if woken.contains(&WAKER) {
            self.sleeper.woke();
        }
        // The device's descriptor says what the next step looks at anyway.
        let links = woken.into_iter().filter(|who| *who < WAKER).map(|peer| peer as usize);
        let working = std::mem::take(&mut self.working);
        working.iter().for_each(|peer| self.peers[*peer].works = false);
        let mut turn: Vec<usize> = links.chain(working).chain(self.asked.iter().copied()).collect();
        turn.sort_unstable();
        turn.dedup();
        for peer in turn {
            self.progress(peer)?;
        }
        Ok(())
    }

    fn progress(&mut self, peer: usize) -> Result<(), CommError> {
        if self.peers[peer].lost {
            return Ok(());
        }
        let mut events = std::mem::take(&mut self.events);
        let before = self.peers[peer].link.heard();
        let result = self.peers[peer].link.progress(&mut events);
        if !events.is_empty() {
            self.asking.heard();
        }
        let p = &mut self.peers[peer];
        // That our own bytes go out says nothing about the peer: its system takes them while it is stopped. Where the link
        // cannot tell, one with a descriptor was called because there was something.
        let is_heard = match before {
            Some(_) => p.link.heard() != before,
            None => p.link.fd().is_some() || asking::is_sign_of_life(&events),
        };
        if is_heard {
            p.heard_ns = self.clock.now_ns();
        }
        let taken = self.take_events(peer, &mut events);
        self.events = events;
        taken?;
        self.wake_parked(peer);
        self.note_work(peer);
        match result {
            Ok(()) => self.watch_write(peer),
            Err(error) => self.on_lost(peer, error),
        }
    }

    fn take_events(&mut self, peer: usize, events: &mut Vec<Event>) -> Result<(), CommError> {
        if events.is_empty() {
            return Ok(());
        }
        // They all came just now; a clock for each would cost as much as taking it.
        let now = self.clock.now_ns();
        for event in events.drain(..) {
            match event {
                Event::Ready { job, tags } => self.on_ready(self.peers[peer].rank, job, &tags)?,
                Event::Arrived { message, upto } => self.on_arrived(message, upto, now),
                Event::Sent { message, upto } => self.on_sent(message, upto, now),
                Event::Beat { waits_for } => {
                    self.check_rank(peer, Kind::Beat, waits_for)?;
                    self.peers[peer].waits_for = waits_for;
                }
                Event::Bye => self.peers[peer].said_bye = true,
                Event::Abort { culprit, reason } => {
                    self.check_rank(peer, Kind::Abort, Some(culprit))?;
                    return Err(self.aborted(culprit, reason));
                }
            }
        }
        Ok(())
    }

    /// A rank that a peer speaks of has to be one.
    fn check_rank(&self, peer: usize, kind: Kind, rank: Option<Rank>) -> Result<(), CommError> {
        let Some(rank) = rank.filter(|rank| rank.0 >= self.world) else { return Ok(()) };
        let cause = WireError::Unexpected { kind, job: 0, tag: rank.0, why: "there is no such rank" };
        Err(self.nonsense(self.peers[peer].rank, cause))
    }

    fn on_ready(&mut self, peer: Rank, id: u32, tags: &[u32]) -> Result<(), CommError> {
        let Some(job) = self.jobs.get_mut(&id) else {
            self.early_tags += tags.len();
            if self.early_tags > MAX_EARLY_TAGS {
                let cause = "peers announce more messages than any program has".into();
                return Err(CommError::System { me: self.me, what: "keep announcements", cause });
            }
            self.early.entry(id).or_default().extend(tags.iter().map(|tag| (peer, *tag)));
            self.peers[self.index_of[&peer]].early += tags.len();
            return Ok(());
        };
        let mut ops = Vec::with_capacity(tags.len());
        for tag in tags {
            match job.note_ready(peer, *tag) {
                Ok(op) => ops.push(op),
                Err(why) => {
                    let cause = WireError::Unexpected { kind: Kind::Ready, job: id, tag: *tag, why };
                    return Err(self.nonsense(peer, cause));
                }
            }
        }
        for op in ops {
            self.wake_sender(id, op);
        }
        Ok(())
    }

    fn on_arrived(&mut self, message: Message, upto: u64, now: u64) {
        let Some(job) = self.jobs.get_mut(&message.job) else { return };
        let Some(op) = job.recv_by_tag.get(message.tag) else { return };
        job.bytes_received += upto - job.ops[op as usize].moved;
        let done = note_progress(job, op, upto, now);
        let followers = job.followers.get(&op).cloned().unwrap_or_default();
        for follower in followers {
            self.wake_sender(message.job, follower);
        }
        if done {
            self.end(message.job, op, now);
        }
    }

    fn on_sent(&mut self, message: Message, upto: u64, now: u64) {
        let Some(job) = self.jobs.get_mut(&message.job) else { return };
        let Some(op) = job.send_by_tag.get(message.tag) else { return };
        job.bytes_sent += upto - job.ops[op as usize].moved;
        if note_progress(job, op, upto, now) {
            self.end(message.job, op, now);
        }
    }

    /// An op has ended: whoever waited for the last of its dependencies becomes ready.
    fn end(&mut self, id: u32, op: u32, now: u64) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        job.count_down(op);
        if job.left == 0 {
            self.sleeper.note();
        }
        let mut ready = vec![];
        for place in job.dependents(op) {
            let dependent = job.dependent(place);
            job.ops[dependent as usize].waits -= 1;
            if job.ops[dependent as usize].waits == 0 {
                ready.push(dependent);
            }
        }
        let followers = job.followers.get(&op).cloned().unwrap_or_default();
        for follower in followers {
            self.wake_sender(id, follower);
        }
        for op in ready {
            self.activate(id, op, now);
        }
    }

    /// Nothing keeps the op from running any more.
    fn activate(&mut self, id: u32, op: u32, now: u64) {
        let job = self.jobs.get_mut(&id).expect("ops belong to jobs under way");
        job.ops[op as usize].ready_ns = now;
        match job.op(op).kind {
            OpKind::Send { .. } => self.wake_sender(id, op),
            OpKind::Copy { .. } => self.copies.push_back((id, op)),
            OpKind::Compute { .. } => self.passes.push_back((id, op)),
            OpKind::Recv { from, tag, reduce, .. } => {
                let place = job.target(op).cloned().expect("receives have a place");
                let tensor = &job.spec.tensors[job.op(op).tensor as usize];
                let combine = tensor.combine.filter(|_| reduce);
                let expected = Expected { place, bytes: job.op(op).bytes, combine };
                let peer = self.index_of[&from];
                self.peers[peer].link.expect(Message { job: id, tag }, expected);
                self.peers[peer].announce.push((id, tag));
                self.touch(peer);
            }
        }
    }

    /// Tells a peer what there is a place for.
    fn announce(&mut self, peer: usize) {
        let peer = &mut self.peers[peer];
        for same_job in peer.announce.chunk_by(|a, b| a.0 == b.0) {
            let tags: Vec<u32> = same_job.iter().map(|(_, tag)| *tag).collect();
            peer.link.announce(same_job[0].0, &tags);
        }
        peer.announce.clear();
    }

    /// Takes note of a pass that has ended, and starts the next.
    fn compute(&mut self) -> Result<(), CommError> {
        while let Some(&(id, op)) = self.passes.front() {
            let Some(device) = &mut self.device else { return Err(self.cannot_compute(DeviceError::None)) };
            let now = self.clock.now_ns();
            let Some(job) = self.jobs.get_mut(&id) else {
                self.passes.pop_front();
                continue;
            };
            if self.computing {
                let ended = device.ended();
                match ended {
                    Ok(true) => {}
                    Ok(false) => return Ok(()),
                    Err(error) => return Err(self.cannot_compute(error)),
                }
                self.computing = false;
                self.passes.pop_front();
                note_progress(job, op, 0, now);
                self.end(id, op, now);
            } else if let OpKind::Compute { pass, nanos, .. } = job.op(op).kind {
                job.ops[op as usize].started_ns = now;
                self.computing = true;
                let begun = device.begin(pass, nanos);
                begun.map_err(|error| self.cannot_compute(error))?;
            }
        }
        Ok(())
    }

    fn cannot_compute(&self, error: DeviceError) -> CommError {
        CommError::System { me: self.me, what: "compute", cause: error.to_string() }
    }

    /// Copies for a while.
    fn copy_some(&mut self) {
        let mut budget = COPY_STEP_BYTES;
        while budget > 0
            && let Some(&(id, op)) = self.copies.front()
        {
            let now = self.clock.now_ns();
            let Some(job) = self.jobs.get_mut(&id) else {
                self.copies.pop_front();
                continue;
            };
            let bytes = job.op(op).bytes;
            // Never half an element.
            let part = self.copied..(self.copied + budget).next_multiple_of(64).min(bytes);
            if let (Some(from), Some(into)) = (job.source(op), job.target(op)) {
                let adds = matches!(job.op(op).kind, OpKind::Copy { reduce: true, .. });
                let combine = job.spec.tensors[job.op(op).tensor as usize].combine.filter(|_| adds);
                into.copy_from(from, part.clone(), combine);
            }
            budget = budget.saturating_sub(part.end - part.start);
            self.copied = part.end;
            if note_progress(job, op, part.end, now) {
                job.ops[op as usize].ended_ns = self.clock.now_ns();
                self.copies.pop_front();
                self.copied = 0;
                self.end(id, op, now);
            }
        }
    }
}

/// Notes how far an op is; true once it has ended.
fn note_progress(job: &mut Job, op: u32, upto: u64, now: u64) -> bool {
    let bytes = job.op(op).bytes;
    let progress = &mut job.ops[op as usize];
    if progress.started_ns == 0 {
        progress.started_ns = now;
    }
    progress.moved = upto;
    job.moved_ns = now;
    if upto < bytes {
        return false;
    }
    progress.done = true;
    progress.ended_ns = now;
    true
}

fn report(job: &Job) -> JobReport {
    let ended = job.ops.iter().map(|p| p.ended_ns).max().unwrap_or(job.started_ns);
    JobReport {
        seconds: ended.saturating_sub(job.started_ns) as f64 * 1e-9,
        ops: job.spans(),
        bytes_sent: job.bytes_sent,
        bytes_received: job.bytes_received,
    }
}

impl Engine {
    /// Lets the poller watch for room exactly while there is something to write.
    fn watch_write(&mut self, peer: usize) -> Result<(), CommError> {
        let p = &mut self.peers[peer];
        let wants = p.link.wants_write();
        if wants == p.watches_write || p.lost {
            return Ok(());
        }
        let Some(fd) = p.link.fd() else { return Ok(()) };
        p.watches_write = wants;
        if wants {
            self.unwritten += 1
        } else {
            self.unwritten -= 1
        }
        let flags =
            if wants { epoll::EventFlags::IN | epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
        let data = epoll::EventData::new_u64(peer as u64);
        let modified = epoll::modify(&self.poller, fd, data, flags);
        modified.map_err(|e| CommError::System { me: self.me, what: "watch a link", cause: e.to_string() })
    }

    fn flush(&mut self, peer: usize) -> Result<(), CommError> {
        if self.peers[peer].lost {
            return Ok(());
        }
        let mut events = std::mem::take(&mut self.events);
        let result = self.peers[peer].link.flush(&mut events);
        let taken = self.take_events(peer, &mut events);
        self.events = events;
        taken?;
        // Whoever waits for room has to hear of it here: if nothing is left to write, no event will tell.
        self.wake_parked(peer);
        self.note_work(peer);
        match result {
            Ok(()) => self.watch_write(peer),
            Err(error) => self.on_lost(peer, error),
        }
    }

    fn on_lost(&mut self, peer: usize, error: LinkError) -> Result<(), CommError> {
        // One that talks nonsense can still be told so.
        if !matches!(error, LinkError::Wire(_)) {
            self.forget(peer);
        }
        self.suspect(peer, error)
    }

    /// The connection is of no more use. A peer that took its leave may still wait for ours.
    fn forget(&mut self, peer: usize) {
        let p = &mut self.peers[peer];
        p.lost = true;
        if std::mem::replace(&mut p.watches_write, false) {
            self.unwritten -= 1;
        }
        if p.said_bye {
            p.link.control(Control::Bye);
            let _gone = p.link.flush(&mut vec![]);
            p.link.shutdown();
        }
        if let Some(fd) = p.link.fd() {
            let unwatched = epoll::delete(&self.poller, fd);
            debug_assert!(unwatched.is_ok());
        }
    }
}
