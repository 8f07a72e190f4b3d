//! A turn of the loop: do what can be done, wait for news, take it in.

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

use crossmesh_core::id::Rank;

use super::spin::{LOST_NS, Looked};
use super::{Engine, Handle, NO_EVENT, WAKER, asking};
use crate::error::CommError;
use crate::transport::Event;
use crate::wire::{Kind, WireError};

/// How long a step may sleep.
#[derive(Debug, Clone, Copy)]
pub(super) enum Until {
    Now,
    /// Anything that whoever drives the engine has to look at.
    News,
    /// The job has ended, and everything has been said.
    Over(Handle),
}

impl Engine {
    pub(super) fn step(&mut self, until: Until) -> Result<(), CommError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let result = self.try_step(until);
        result.map_err(|error| self.give_up(error))
    }

    pub(super) fn try_step(&mut self, until: Until) -> Result<(), CommError> {
        self.compute()?;
        self.copy_some()?;
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
    pub(super) fn poll(&mut self, may_wait: bool) -> Result<(), CommError> {
        let wait_ns = if may_wait { self.watch.until_next(self.clock.now_ns()) } else { 0 };
        let wait_ns = self.asking.pause_ns().map_or(wait_ns, |pause| wait_ns.min(pause));
        let mut buffer = [NO_EVENT; 64];
        let woken: Vec<u64> = match self.await_news(wait_ns, &mut buffer) {
            Ok(count) => buffer[..count].iter().map(|e| e.data.u64()).collect(),
            Err(Errno::INTR) => vec![],
            Err(e) => {
                return Err(CommError::System { me: self.me, what: "wait", cause: e.to_string() });
            }
        };
        let counted = woken.contains(&WAKER);
        if counted {
            self.sleeper.woke();
        }
        // The device's descriptor says what the next step looks at anyway.
        let links = woken.into_iter().filter(|who| *who < WAKER).map(|peer| peer as usize);
        let working = std::mem::take(&mut self.working);
        working.iter().for_each(|peer| self.peers[*peer].works = false);
        // A device may be done with something of a link's: it is not said of which.
        let landed = if counted { std::mem::take(&mut self.awaiting) } else { vec![] };
        landed.iter().for_each(|peer| self.peers[*peer].awaits = false);
        let mut turn: Vec<usize> =
            links.chain(landed).chain(working).chain(self.asked.iter().copied()).collect();
        turn.sort_unstable();
        turn.dedup();
        for peer in turn {
            self.progress(peer)?;
        }
        Ok(())
    }

    /// Looks for news, and sleeps where there are none: how many came.
    fn await_news(&mut self, wait_ns: u64, into: &mut [epoll::Event]) -> Result<usize, Errno> {
        // Links that nothing wakes have pauses of their own.
        if wait_ns > 0 && !self.asking.is_needed() {
            let found = self.look_for_news(into)?;
            if found > 0 {
                return Ok(found);
            }
        }
        let timeout =
            Timespec { tv_sec: (wait_ns / 1_000_000_000) as i64, tv_nsec: (wait_ns % 1_000_000_000) as i64 };
        epoll::wait(&self.poller, into, Some(&timeout))
    }

    /// Looks again and again, as often as it is worth.
    fn look_for_news(&mut self, into: &mut [epoll::Event]) -> Result<usize, Errno> {
        let (looks, now) = (self.spin.looks(), Timespec { tv_sec: 0, tv_nsec: 0 });
        let mut looked_ns = self.clock.now_ns();
        for look in 0..looks {
            let found = epoll::wait(&self.poller, &mut *into, Some(&now))?;
            if found > 0 {
                // What was there already says nothing about looking.
                if look > 0 {
                    self.spin.note(Looked::Found);
                }
                return Ok(found);
            }
            let now_ns = self.clock.now_ns();
            if now_ns.saturating_sub(looked_ns) > LOST_NS {
                self.spin.note(Looked::LostCore);
                return Ok(0);
            }
            looked_ns = now_ns;
        }
        if looks > 0 {
            self.spin.note(Looked::InVain);
        }
        Ok(0)
    }

    pub(super) fn progress(&mut self, peer: usize) -> Result<(), CommError> {
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

    pub(super) fn take_events(&mut self, peer: usize, events: &mut Vec<Event>) -> Result<(), CommError> {
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
    pub(super) fn check_rank(&self, peer: usize, kind: Kind, rank: Option<Rank>) -> Result<(), CommError> {
        let Some(rank) = rank.filter(|rank| rank.0 >= self.world) else { return Ok(()) };
        let cause = WireError::Unexpected { kind, job: 0, tag: rank.0, why: "there is no such rank" };
        Err(self.nonsense(self.peers[peer].rank, cause))
    }
}
