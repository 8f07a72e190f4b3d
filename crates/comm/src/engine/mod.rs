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
//! The loop sleeps until a link or another thread has news ([`crate::wake`]), or a heartbeat or deadline is due. Where that has paid and
//! nobody else needs the core, it looks for news for a moment before (`spin`). Only links that nothing wakes are asked again and again,
//! the less often the longer they are silent.
//! A message starts when its receiver has said that there is a place for it; receivers say so as early as they can,
//! for all receives at once, so that nobody pays a round trip per message.
//!
//! Here is what a caller does with an engine. A turn of the loop is in `turn`, what ops do when something has happened in `ops`,
//! copies and passes in `local`, who sends next in `sends`, links and their ends in `links`, silence and blame in `watch`.

mod asking;
mod job;
mod links;
mod local;
mod ops;
mod sends;
mod spin;
mod tags;
#[cfg(test)]
mod tests;
mod turn;
mod watch;

use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::os::fd::OwnedFd;

use crossmesh_core::id::Rank;
use crossmesh_core::trace::OpSpan;
use rustc_hash::FxHashMap;
use rustix::event::epoll;
use rustix::io::Errno;

pub use job::{JobSpec, Tensor};
pub use watch::Interrupt;

use crate::clock::Clock;
use crate::device::Device;
use crate::error::CommError;
use crate::flight::FlightRecord;
use crate::memory::lease::{Borrower, Lease};
use crate::memory::moving::Moving;
use crate::transport::{Event, Link};
use crate::wake::{Sleeper, Waker};
use crate::wire::{Kind, WireError};
pub(crate) use job::Job;
use links::Peer;
use sends::InLine;
use turn::Until;

/// Ops of a new job that are looked at before peers hear of them: whoever sends to us begins while we look at the rest.
const START_STEP: usize = 1024;

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
    /// How many threads of a rank want a core: who drives the engine, and who has other things to do meanwhile. An engine that looks for news
    /// instead of sleeping must not have the core of whoever asks it.
    pub threads: usize,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self { deadline_ms: 10_000, hosts: vec![], interrupt: Interrupt::default(), threads: 1 }
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

pub struct Engine {
    me: Rank,
    /// How many ranks there are, as far as is known.
    world: u32,
    peers: Vec<Peer>,
    index_of: FxHashMap<Rank, usize>,
    /// Peers with something to say that was not flushed, with work that needs no waiting, with something that a device has to finish,
    /// and those that nothing wakes: a step looks at these, and at whoever woke it, however many peers there are.
    touched: Vec<usize>,
    working: Vec<usize>,
    awaiting: Vec<usize>,
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
    /// Copies that a device does, in order.
    moving: VecDeque<(u32, u32, Moving)>,
    device: Option<Box<dyn Device>>,
    /// Passes that can be computed; the first one is under way if `computing`.
    passes: VecDeque<(u32, u32)>,
    computing: bool,
    sleeper: Sleeper,
    events: Vec<Event>,
    /// Bytes sent and received by jobs that are over.
    traffic: (u64, u64),
    asking: asking::Asking,
    spin: spin::Spin,
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
        // Of whom nothing is known may be here.
        let ranks_here = match options.hosts.get(me.index()) {
            Some(here) => options.hosts.iter().filter(|host| *host == here).count(),
            None => links.len() + 1,
        };
        let busy = ranks_here * options.threads;
        let spin = spin::Spin::new(busy, std::thread::available_parallelism().map_or(1, |n| n.get()));
        let mut peers = vec![];
        for (i, (rank, mut link)) in links.into_iter().enumerate() {
            link.set_waker(&sleeper.waker());
            let data = epoll::EventData::new_u64(i as u64);
            if let Some(fd) = link.fd() {
                epoll::add(&poller, fd, data, epoll::EventFlags::IN).map_err(system("watch a link"))?;
            }
            peers.push(Peer::new(rank, link, now));
        }
        let ranks = peers.iter().map(|p| p.rank.0 + 1).chain([me.0 + 1, options.hosts.len() as u32]);
        Ok(Self {
            me,
            world: ranks.max().unwrap_or(0),
            index_of: peers.iter().enumerate().map(|(i, p)| (p.rank, i)).collect(),
            touched: (0..peers.len()).collect(),
            working: vec![],
            awaiting: vec![],
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
            moving: VecDeque::new(),
            device: None,
            passes: VecDeque::new(),
            computing: false,
            sleeper,
            events: vec![],
            traffic: (0, 0),
            asking,
            spin,
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
        let link_of = |rank: Rank| self.index_of.get(&rank).copied();
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
        self.miss_the_lost(id);
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

    /// Whether a job of this id is here.
    pub fn has_job(&self, id: u32) -> bool {
        self.jobs.contains_key(&id)
    }

    /// Whether any job has not ended.
    pub fn is_busy(&self) -> bool {
        self.jobs.values().any(|job| job.left > 0)
    }

    /// Gives up all jobs, and tells the peers who is to blame.
    pub fn abandon(&mut self, culprit: Rank, reason: &str) {
        if self.failed.is_none() {
            let error = self.aborted(culprit, reason.into());
            self.give_up(error);
        }
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
