//! Peers and their links: who has something to be written, who has work, whose connection has ended.

use crossmesh_core::id::Rank;
use rustix::event::epoll;

use super::Engine;
use crate::error::CommError;
use crate::transport::{Control, Link, LinkError};

pub(super) struct Peer {
    pub rank: Rank,
    pub link: Box<dyn Link>,
    /// Whether the poller watches for room to write.
    pub watches_write: bool,
    /// Channels that wait for room.
    pub parked: Vec<(u32, u32)>,
    /// Receives to be announced, by job.
    pub announce: Vec<(u32, u32)>,
    /// Whether it stands in the list of those that have something to be flushed, and of those that have work.
    pub touched: bool,
    pub works: bool,
    /// Whether it stands in the list of those that a device has to finish something for.
    pub awaits: bool,
    pub heard_ns: u64,
    pub waits_for: Option<Rank>,
    /// When we last gave a sign of life, how much had gone to it by then, and whom we said we wait for.
    pub told_ns: u64,
    pub told_bytes: Option<u64>,
    pub told_wait: Option<Rank>,
    /// How many messages it has announced for jobs that have not started here.
    pub early: usize,
    pub said_bye: bool,
    /// We said that nothing more comes.
    pub shut: bool,
    pub lost: bool,
    /// How its connection ended.
    pub ended: Option<String>,
}

impl Peer {
    pub fn new(rank: Rank, link: Box<dyn Link>, now_ns: u64) -> Self {
        Self {
            rank,
            link,
            watches_write: false,
            parked: vec![],
            announce: vec![],
            // A new link has a greeting to send.
            touched: true,
            works: false,
            awaits: false,
            heard_ns: now_ns,
            waits_for: None,
            told_ns: now_ns,
            told_bytes: None,
            told_wait: None,
            early: 0,
            said_bye: false,
            shut: false,
            lost: false,
            ended: None,
        }
    }
}

impl Engine {
    /// Whether peers may still wait for words of ours.
    pub(super) fn has_unsaid(&self) -> bool {
        let wants = |peer: &usize| !self.peers[*peer].lost && self.peers[*peer].link.wants_write();
        self.unwritten > 0 || self.touched.iter().chain(&self.asked).any(wants)
    }

    /// The peer's link has something to be flushed.
    pub(super) fn touch(&mut self, peer: usize) {
        if !std::mem::replace(&mut self.peers[peer].touched, true) {
            self.touched.push(peer);
        }
    }

    /// After anything was done with a link: whether it goes on without waiting, or once a device is done.
    pub(super) fn note_work(&mut self, peer: usize) {
        let p = &mut self.peers[peer];
        if !p.lost && p.link.has_work() && !std::mem::replace(&mut p.works, true) {
            self.working.push(peer);
        }
        let p = &mut self.peers[peer];
        if !p.lost && p.link.awaits_device() && !std::mem::replace(&mut p.awaits, true) {
            self.awaiting.push(peer);
        }
    }

    /// Lets the poller watch for room exactly while there is something to write.
    pub(super) fn watch_write(&mut self, peer: usize) -> Result<(), CommError> {
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

    pub(super) fn flush(&mut self, peer: usize) -> Result<(), CommError> {
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
        let Err(error) = result else { return self.watch_write(peer) };
        // Who hung up may have said why before, and that it was somebody else.
        self.progress(peer)?;
        if self.peers[peer].lost { Ok(()) } else { self.on_lost(peer, error) }
    }

    pub(super) fn on_lost(&mut self, peer: usize, error: LinkError) -> Result<(), CommError> {
        // One that talks nonsense can still be told so.
        if !matches!(error, LinkError::Wire(_)) {
            self.peers[peer].ended = Some(error.to_string());
            self.forget(peer);
        }
        self.suspect(peer, error)
    }

    /// The connection is of no more use. A peer that took its leave may still wait for ours.
    pub(super) fn forget(&mut self, peer: usize) {
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
