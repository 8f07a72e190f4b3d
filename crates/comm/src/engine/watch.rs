//! Who is alive, who is to blame.
//!
//! Every rank tells its peers a few times a second that it lives, and for whom it waits; following those words leads to
//! the rank that keeps everybody waiting. Bytes that flow say as much as such a beat, and peers that have nothing to do with
//! each other, while nobody waits, hear of each other every two seconds only:
//!
//! ```text
//! r3 waits for r2, r2 waits for r1, r1 is silent          all of them name r1
//! ```
//!
//! The first to find out tells its peers, they tell theirs, and all end with the same name. Whoever knows more than the
//! links tell, such as the rendezvous, ends the job by an [`Interrupt`].

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crossmesh_core::id::Rank;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};

use super::{Engine, NO_EVENT};
use crate::error::CommError;
use crate::flight::{FlightRecord, JobRecord, PeerRecord, PeerState, Wait};
use crate::transport::{Control, Event, LinkError};
use crate::wake::Waker;
use crate::wire::WireError;

/// Between two signs of life.
const BEAT_NS: u64 = 200_000_000;
/// The same to a peer that neither of us waits for.
const IDLE_BEAT_NS: u64 = 10 * BEAT_NS;
/// A lost peer may have been the victim of another: news of that gets this long to come.
const GRACE_NS: u64 = 250_000_000;
/// How long a rank that gave up goes on telling the others; less where they have been told.
const LINGER_NS: u64 = 600_000_000;
const TOLD_LINGER_NS: u64 = 50_000_000;
/// Without a look for so long, this rank was stopped or had other things to do: it cannot judge the silence of others.
const AWAY_NS: u64 = 500_000_000;
/// A peer that has said nothing for so long is silent.
const SILENT_NS: u64 = 3 * BEAT_NS;
/// A link that has brought nothing for so long gives its room back: beats come more often, where somebody waits.
const REST_NS: u64 = 5 * BEAT_NS;
const LINGER_STEP_NS: u64 = 20_000_000;
/// The same where nothing wakes us.
const LINGER_ASK_NS: u64 = 200_000;
const MS: u64 = 1_000_000;
/// How much longer a peer may keep us waiting that is alive and at work.
const BUSY_PATIENCE: u64 = 10;

/// Ends the jobs of an engine from elsewhere. Of each kind the first word counts.
#[derive(Debug, Clone, Default)]
pub struct Interrupt(Arc<Words>);

#[derive(Debug, Default)]
struct Words {
    culprit: OnceLock<(Rank, String, String)>,
    suspect: OnceLock<(Rank, String)>,
    /// Of the engines that listen.
    wakers: Mutex<Vec<Waker>>,
}

impl Interrupt {
    /// Everybody has been told: the culprit, its host, and what it did.
    pub fn raise(&self, culprit: Rank, host: &str, reason: &str) {
        let _earlier = self.0.culprit.set((culprit, host.into(), reason.into()));
        self.wake_all();
    }

    /// A rank seems to be gone, and why. Whoever still needs it gives up.
    pub fn suspect(&self, rank: Rank, why: &str) {
        let _earlier = self.0.suspect.set((rank, why.into()));
        self.wake_all();
    }

    /// Words that come from now on wake this engine.
    pub(super) fn wakes(&self, waker: Waker) {
        self.0.wakers.lock().unwrap_or_else(PoisonError::into_inner).push(waker);
    }

    fn wake_all(&self) {
        self.0.wakers.lock().unwrap_or_else(PoisonError::into_inner).iter().for_each(Waker::wake);
    }
}

pub(super) struct Watch {
    next_beat_ns: u64,
    looked_ns: u64,
    /// What to say if nobody knows better in time, and when that is.
    suspicion: Option<(CommError, u64)>,
}

impl Watch {
    pub fn new(now_ns: u64) -> Self {
        Self { next_beat_ns: now_ns + BEAT_NS, looked_ns: now_ns, suspicion: None }
    }

    pub fn until_next(&self, now_ns: u64) -> u64 {
        let due = self.suspicion.as_ref().map_or(self.next_beat_ns, |(_, at)| self.next_beat_ns.min(*at));
        due.saturating_sub(now_ns)
    }
}

impl Engine {
    pub(super) fn host(&self, rank: Rank) -> String {
        self.options.hosts.get(rank.index()).cloned().unwrap_or_else(|| "unknown".into())
    }

    /// Heartbeats, suspicions and deadlines.
    pub(super) fn watch_peers(&mut self) -> Result<(), CommError> {
        let now = self.clock.now_ns();
        self.note_absence(now);
        self.heed_interrupts()?;
        if let Some((error, _)) = self.watch.suspicion.take_if(|(_, at)| *at <= now) {
            return Err(error);
        }
        if now < self.watch.next_beat_ns {
            return Ok(());
        }
        self.watch.next_beat_ns = now + BEAT_NS;
        if self.computing {
            // A rank that computes is at work, however long it takes.
            self.jobs.values_mut().for_each(|job| job.moved_ns = now);
        }
        // What trickles in is a sign of life, too.
        for peer in 0..self.peers.len() {
            if self.peers[peer].link.gathers() {
                self.progress(peer)?;
            }
        }
        let waits_for = self.blamed(now, 2 * BEAT_NS).map(|(_, culprit)| culprit);
        for p in self.peers.iter_mut().filter(|p| now.saturating_sub(p.heard_ns) > REST_NS) {
            p.link.rest();
        }
        for peer in 0..self.peers.len() {
            if self.owes_beat(peer, waits_for, now) {
                let p = &mut self.peers[peer];
                p.link.control(Control::Beat { waits_for });
                (p.told_ns, p.told_wait) = (now, waits_for);
                self.flush(peer)?;
                self.peers[peer].told_bytes = self.peers[peer].link.said();
            }
        }
        self.check_deadlines(now)
    }

    /// Whether a peer has to be told that we live. Bytes that went to it tell it too, and those that are on their way will.
    fn owes_beat(&mut self, peer: usize, waits_for: Option<Rank>, now: u64) -> bool {
        let p = &mut self.peers[peer];
        if p.lost || p.link.wants_write() {
            return false;
        }
        let said = p.link.said();
        if said.is_some() && said != p.told_bytes && waits_for == p.told_wait {
            (p.told_ns, p.told_bytes) = (now, said);
            return false;
        }
        // Who waits, for whomever, wants to know who lives.
        let eager = waits_for.is_some() || waits_for != p.told_wait || p.waits_for.is_some() || p.early > 0;
        let (rank, idle_ns) = (p.rank, now.saturating_sub(p.told_ns));
        eager || idle_ns + BEAT_NS > IDLE_BEAT_NS || self.jobs.values().any(|job| job.goes_on_with(rank))
    }

    fn heed_interrupts(&self) -> Result<(), CommError> {
        let (me, words) = (self.me, &self.options.interrupt.0);
        if let Some((culprit, host, reason)) = words.culprit.get() {
            let (host, reason) = (host.clone(), reason.clone());
            return Err(CommError::Interrupted { me, culprit: *culprit, host, reason });
        }
        let Some((suspect, why)) = words.suspect.get() else { return Ok(()) };
        if !self.jobs.values().any(|job| job.goes_on_with(*suspect)) {
            return Ok(());
        }
        let (op, tensor, bytes) = self.outstanding(*suspect);
        let (peer, host, cause) = (*suspect, self.host(*suspect), why.clone());
        Err(CommError::PeerLost { me, peer, host, op, tensor, bytes, cause })
    }

    /// Time that passed without us is nobody's silence.
    fn note_absence(&mut self, now: u64) {
        let away = now.saturating_sub(self.watch.looked_ns);
        if away > AWAY_NS {
            self.peers.iter_mut().for_each(|p| p.heard_ns = (p.heard_ns + away).min(now));
            self.jobs.values_mut().for_each(|j| j.moved_ns = (j.moved_ns + away).min(now));
        }
        self.watch.looked_ns = now;
    }

    fn check_deadlines(&mut self, now: u64) -> Result<(), CommError> {
        let deadline = self.options.deadline_ms * MS;
        let silent = |p: &&super::Peer| !p.lost && now.saturating_sub(p.heard_ns) > deadline;
        for peer in self.peers.iter().filter(silent) {
            let job = self.jobs.values().find(|j| j.oldest_wait(Some(peer.rank)).is_some());
            if job.is_some() {
                return Err(self.timeout(peer.rank, peer.rank, now - peer.heard_ns));
            }
        }
        if let Some((peer, culprit)) = self.blamed(now, deadline + 2 * BEAT_NS) {
            let waited = self.jobs.values().map(|j| now.saturating_sub(j.moved_ns)).max().unwrap_or(0);
            return Err(self.timeout(peer, culprit, waited));
        }
        Ok(())
    }

    /// If a job has not moved for `patience_ns`: the peer that keeps it waiting, and whom that one waits for. A silent
    /// peer comes first; else the one its oldest op waits for. One that lives and waits for nobody is busy
    /// with others, and our turn will come: it is given a long time.
    fn blamed(&self, now: u64, patience_ns: u64) -> Option<(Rank, Rank)> {
        let still = |j: &super::Job| now.saturating_sub(j.moved_ns);
        let job = self.jobs.values().find(|j| j.left > 0 && still(j) > patience_ns)?;
        let is_silent = |p: &super::Peer| now.saturating_sub(p.heard_ns) > SILENT_NS;
        let awaited = |p: &&super::Peer| !p.lost && job.oldest_wait(Some(p.rank)).is_some();
        if let Some(silent) = self.peers.iter().filter(awaited).find(|p| is_silent(p)) {
            return Some((silent.rank, silent.rank));
        }
        let peer = job.peer_of(job.oldest_wait(None)?)?;
        let known = &self.peers[*self.index_of.get(&peer)?];
        let further = known.waits_for.filter(|r| *r != self.me);
        match further {
            None if still(job) <= BUSY_PATIENCE * patience_ns => None,
            further => Some((peer, further.unwrap_or(peer))),
        }
    }

    fn timeout(&self, peer: Rank, culprit: Rank, waited_ns: u64) -> CommError {
        let (op, tensor, bytes) = self.outstanding(peer);
        let (me, waited_ms) = (self.me, waited_ns / MS);
        CommError::Timeout { me, peer: culprit, host: self.host(culprit), op, tensor, bytes, waited_ms }
    }

    /// What this rank still expects of a peer: the oldest op, or else the next, its tensor, and its bytes.
    fn outstanding(&self, peer: Rank) -> (String, String, u64) {
        let oldest = |job: &super::Job| {
            let op = job.oldest_wait(Some(peer)).or_else(|| job.next_with(peer))?;
            let tensor = job.spec.tensors[job.op(op).tensor as usize].name.clone();
            Some((job.describe(op), tensor, job.op(op).bytes - job.ops[op as usize].moved))
        };
        self.jobs.values().find_map(oldest).unwrap_or_else(|| ("nothing in particular".into(), "-".into(), 0))
    }

    /// A connection ended. Unless the peer said farewell, it is under suspicion.
    pub(super) fn suspect(&mut self, peer: usize, error: LinkError) -> Result<(), CommError> {
        let rank = self.peers[peer].rank;
        let needed = self.jobs.values().any(|j| j.oldest_wait(Some(rank)).is_some());
        if self.jobs.is_empty() || (self.peers[peer].said_bye && !needed) {
            return Ok(());
        }
        let (me, host) = (self.me, self.host(rank));
        let (op, tensor, bytes) = self.outstanding(rank);
        let error = match error {
            LinkError::Wire(cause) => return Err(self.nonsense(rank, cause)),
            LinkError::Io(error) if is_broken_here(&error, self.peers[peer].link.fd()) => {
                return Err(CommError::BrokenHere { me, peer: rank, op, tensor, bytes });
            }
            other => {
                CommError::PeerLost { me, peer: rank, host, op, tensor, bytes, cause: other.to_string() }
            }
        };
        let at = self.clock.now_ns() + GRACE_NS;
        self.watch.suspicion.get_or_insert((error, at));
        Ok(())
    }

    /// A peer whose connection ended while nothing needed it is needed now. News of who was to blame gets the same time as ever.
    pub(super) fn miss_the_lost(&mut self, job: u32) {
        let known = |rank: &Rank| &self.peers[self.index_of[rank]];
        let Some(peer) = self.jobs[&job].peers().filter(|rank| known(rank).lost).min() else { return };
        let cause = match &known(&peer).ended {
            Some(why) if !known(&peer).said_bye => format!("before this began: {why}"),
            _ => "it left before this began".into(),
        };
        let (me, host) = (self.me, self.host(peer));
        let (op, tensor, bytes) = self.outstanding(peer);
        let error = CommError::PeerLost { me, peer, host, op, tensor, bytes, cause };
        let at = self.clock.now_ns() + GRACE_NS;
        self.watch.suspicion.get_or_insert((error, at));
    }

    /// What a peer said cannot be.
    pub(super) fn nonsense(&self, peer: Rank, cause: WireError) -> CommError {
        let (op, tensor, bytes) = self.outstanding(peer);
        let (me, host, cause) = (self.me, self.host(peer), Box::new(cause));
        CommError::Protocol { me, peer, host, op, tensor, bytes, cause }
    }

    pub(super) fn aborted(&self, culprit: Rank, reason: String) -> CommError {
        CommError::Aborted { me: self.me, culprit, host: self.host(culprit), reason }
    }

    /// Ends everything: tells the peers, keeps the record, and goes on reading for a moment, since closing a socket
    /// with unread bytes would take the farewell from the peer.
    pub(super) fn give_up(&mut self, error: CommError) -> CommError {
        self.last_flight = Some(self.record(&error));
        let (reason, linger_ns) = match &error {
            CommError::Aborted { reason, .. } => (reason.clone(), LINGER_NS),
            CommError::Interrupted { reason, .. } => (reason.clone(), TOLD_LINGER_NS),
            other => (other.to_string(), LINGER_NS),
        };
        let culprit = error.culprit().unwrap_or(self.me);
        for peer in self.peers.iter_mut().filter(|p| !p.lost) {
            peer.link.drop_data();
            peer.link.control(Control::Abort { culprit, reason: reason.clone() });
            // Before anything more is read: what comes from a peer that talks nonsense ends its connection.
            let _unheard = peer.link.flush(&mut vec![]);
        }
        let jobs = std::mem::take(&mut self.jobs);
        self.unsettled.extend(jobs.into_values().flat_map(|job| job.leases));
        self.linger(linger_ns, |p| p.rank == culprit);
        self.failed = Some(error.clone());
        error
    }

    /// Writes what is left, then reads on until every peer is done or the time is up.
    fn linger(&mut self, limit_ns: u64, done: impl Fn(&super::Peer) -> bool) {
        let end = self.clock.now_ns() + limit_ns;
        loop {
            for peer in 0..self.peers.len() {
                self.let_go(peer);
            }
            let open = self.peers.iter().any(|p| !p.lost && !done(p));
            let now = self.clock.now_ns();
            if !open || now >= end {
                return;
            }
            let step = if self.asking.is_needed() { LINGER_ASK_NS } else { LINGER_STEP_NS };
            let wait = Timespec { tv_sec: 0, tv_nsec: (end - now).min(step) as i64 };
            let _any = epoll::wait(&self.poller, &mut [NO_EVENT; 64], Some(&wait));
        }
    }

    /// Moves a connection towards its end.
    fn let_go(&mut self, peer: usize) {
        let p = &mut self.peers[peer];
        if p.lost {
            return;
        }
        let mut events = vec![];
        let over = p.link.progress(&mut events).is_err() || p.link.flush(&mut events).is_err();
        p.said_bye |= events.contains(&Event::Bye);
        if !p.link.wants_write() && !p.shut {
            p.shut = true;
            p.link.shutdown();
        }
        if over || self.watch_write(peer).is_err() {
            self.forget(peer);
        }
    }

    fn record(&self, error: &CommError) -> FlightRecord {
        let now = self.clock.now_ns();
        let peer = |p: &super::Peer| PeerRecord {
            rank: p.rank,
            silent_s: now.saturating_sub(p.heard_ns) as f64 * 1e-9,
            waits_for: p.waits_for,
            state: match (p.said_bye, p.lost) {
                (true, _) => PeerState::Done,
                (false, true) => PeerState::Lost,
                (false, false) => PeerState::Connected,
            },
        };
        FlightRecord {
            waits_for: self.jobs.values().find_map(|job| self.wait_of(job)),
            peers: self.peers.iter().map(peer).collect(),
            jobs: self.jobs.values().map(|job| JobRecord::of(job, now)).collect(),
            ..FlightRecord::idle(self.me, Some(error))
        }
    }

    /// What a job waits for longest.
    fn wait_of(&self, job: &super::Job) -> Option<Wait> {
        let op = job.oldest_wait(None)?;
        let peer = job.peer_of(op)?;
        let further = self.peers.iter().find(|p| p.rank == peer).and_then(|p| p.waits_for);
        Some(Wait { peer, further: further.filter(|r| *r != self.me), job: job.spec.id, op })
    }

    /// Says farewell, so that the end of the connections is no accident.
    pub fn close(&mut self) {
        if self.failed.is_some() {
            return;
        }
        for peer in self.peers.iter_mut().filter(|p| !p.lost) {
            peer.link.control(Control::Bye);
        }
        // Closing earlier could take bytes from a peer that has not read them yet.
        self.linger(self.options.deadline_ms * MS, |p| p.said_bye);
    }
}

/// Whether a connection that takes no more bytes was closed on this side: the peer still has its end open.
fn is_broken_here(error: &std::io::Error, fd: Option<BorrowedFd<'_>>) -> bool {
    let Some(fd) = fd else { return false };
    let ends = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    let mut state = [PollFd::from_borrowed_fd(fd, ends)];
    let looked = poll(&mut state, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    error.kind() == std::io::ErrorKind::BrokenPipe && looked.is_ok() && !state[0].revents().intersects(ends)
}
