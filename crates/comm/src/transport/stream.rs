//! Links over sockets: TCP between hosts; inside a host a Unix socket, with the payload in shared memory.
//!
//! The streams come connected and authenticated. The first frame each way says who is there, and is checked.

use std::net::TcpStream;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use crossmesh_core::id::Rank;
use rustix::io::ioctl_fionbio;
use rustix::net::{Shutdown, shutdown, sockopt};

use super::inbox::{Arrivals, Arriving, Inbox, Received};
use super::outbox::Outbox;
use super::shm::Shm;
use super::{Control, Event, Expected, Link, LinkError, Message, tcp};
use crate::memory::Place;
use crate::wire::{Header, Kind, MAX_PAYLOAD, NOBODY, WireError};

/// What the kernel holds of ours: a few milliseconds of a fast NIC, little enough that who is next stays our decision.
const SEND_BUFFER_BYTES: usize = 256 << 10;
/// How many reads in a row before other links get their turn.
const READS_PER_TURN: usize = 16;
/// Frames longer than this gain nothing; shorter ones cost a system call more often.
const MAX_PART_BYTES: u64 = 256 << 10;
const MIN_PART_BYTES: u64 = 16 << 10;
/// Parts in shared memory cost two small frames each, so they are larger.
const MAX_OFFER_BYTES: u64 = 1 << 20;
const MAX_TAGS_PER_FRAME: usize = 4096;
const MAX_REASON_BYTES: usize = 4096;

pub struct StreamLink {
    socket: OwnedFd,
    peer: Rank,
    greeted: bool,
    inbox: Inbox,
    outbox: Outbox,
    arrivals: Arrivals,
    shm: Option<Shm>,
    received: Vec<Received>,
    /// What went wrong in a call that cannot say so.
    failed: Option<LinkError>,
}

impl StreamLink {
    pub fn tcp(me: Rank, peer: Rank, stream: TcpStream) -> Result<Self, LinkError> {
        tcp::tune(&stream)?;
        sockopt::set_socket_send_buffer_size(&stream, SEND_BUFFER_BYTES)?;
        Self::new(me, peer, stream.into(), None)
    }

    /// To a process of the same host. What lies in shared memory is copied from there.
    pub fn local(me: Rank, peer: Rank, stream: UnixStream) -> Result<Self, LinkError> {
        Self::new(me, peer, stream.into(), Some(Shm::default()))
    }

    fn new(me: Rank, peer: Rank, socket: OwnedFd, shm: Option<Shm>) -> Result<Self, LinkError> {
        ioctl_fionbio(&socket, true)?;
        let mut outbox = Outbox::default();
        outbox.push_control(Header::bare(Kind::Hello, peer.0, me.0), vec![], None);
        Ok(Self {
            socket,
            peer,
            greeted: false,
            inbox: Inbox::new(),
            outbox,
            arrivals: Arrivals::default(),
            shm,
            received: vec![],
            failed: None,
        })
    }

    fn take_received(&mut self, events: &mut Vec<Event>) -> Result<(), LinkError> {
        let mut received = std::mem::take(&mut self.received);
        for frame in received.drain(..) {
            match frame {
                Received::Arrived { message, upto } => events.push(Event::Arrived { message, upto }),
                Received::Control { header, payload } => self.on_control(&header, &payload, events)?,
            }
        }
        self.received = received;
        Ok(())
    }

    fn on_control(
        &mut self,
        header: &Header,
        payload: &[u8],
        events: &mut Vec<Event>,
    ) -> Result<(), LinkError> {
        let unexpected =
            |why| WireError::Unexpected { kind: header.kind, job: header.job, tag: header.tag, why };
        if header.kind != Kind::Hello && !self.greeted {
            return Err(unexpected("it comes before the greeting").into());
        }
        match (header.kind, &mut self.shm) {
            (Kind::Hello, _) if header.tag != self.peer.0 || self.greeted => {
                return Err(unexpected("another rank was to be here").into());
            }
            (Kind::Hello, _) => self.greeted = true,
            (Kind::Ready, _) => {
                let (tags, odd) = payload.as_chunks::<4>();
                if !odd.is_empty() {
                    return Err(unexpected("tags are 4 B each").into());
                }
                let tags = tags.iter().map(|t| u32::from_le_bytes(*t)).collect();
                events.push(Event::Ready { job: header.job, tags });
            }
            (Kind::Beat, _) => events.push(Event::Beat { waits_for: rank(header.tag) }),
            (Kind::Abort, _) => {
                let reason = String::from_utf8_lossy(&payload[..payload.len().min(MAX_REASON_BYTES)]).into();
                events.push(Event::Abort { culprit: rank(header.tag).unwrap_or(self.peer), reason });
            }
            (Kind::Bye, _) => events.push(Event::Bye),
            (Kind::Segment, Some(shm)) => shm.on_segment(header, self.inbox.descriptors.pop_front())?,
            (Kind::Offer, Some(shm)) => shm.on_offer(header, payload, &mut self.arrivals)?,
            (Kind::Taken, Some(shm)) => events.push(shm.on_taken(header)?),
            (Kind::Data, _) => unreachable!("the inbox keeps data to itself"),
            (_, None) => return Err(unexpected("there is no shared memory on this connection").into()),
        }
        Ok(())
    }
}

fn rank(word: u32) -> Option<Rank> {
    (word != NOBODY).then_some(Rank(word))
}

impl Link for StreamLink {
    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn wants_write(&self) -> bool {
        !self.outbox.is_empty()
    }

    fn has_work(&self) -> bool {
        self.shm.as_ref().is_some_and(Shm::has_work)
    }

    fn expect(&mut self, message: Message, expected: Expected) {
        self.arrivals.insert(message, Arriving { expected, arrived: 0, promised: 0 });
    }

    fn announce(&mut self, job: u32, tags: &[u32]) {
        for tags in tags.chunks(MAX_TAGS_PER_FRAME) {
            let payload: Vec<u8> = tags.iter().flat_map(|t| t.to_le_bytes()).collect();
            self.outbox.push_control(Header::of(Kind::Ready, job, 0, 0, &payload), payload, None);
        }
    }

    fn has_room(&self) -> bool {
        self.outbox.has_room() && self.shm.as_ref().is_none_or(Shm::has_room)
    }

    fn part_bytes(&self, chunk_bytes: u64) -> u64 {
        let max = if self.shm.is_some() { MAX_OFFER_BYTES } else { MAX_PART_BYTES };
        (chunk_bytes / 64 * 64).clamp(MIN_PART_BYTES, max.min(u64::from(MAX_PAYLOAD)))
    }

    fn send(&mut self, message: Message, part: Range<u64>, from: &Place) {
        match self.shm.as_mut().filter(|shm| shm.takes(from)) {
            Some(shm) => {
                let offered = shm.offer(message, part, from, &mut self.outbox);
                self.failed = self.failed.take().or(offered.err());
            }
            None => self.outbox.push_data(message, part, from),
        }
    }

    fn control(&mut self, control: Control) {
        match control {
            Control::Beat { waits_for } => {
                let header = Header::bare(Kind::Beat, 0, waits_for.map_or(NOBODY, |r| r.0));
                self.outbox.push_control(header, vec![], None);
            }
            Control::Abort { culprit, reason } => {
                let mut payload = reason.into_bytes();
                payload.truncate(MAX_REASON_BYTES);
                let header = Header::of(Kind::Abort, 0, culprit.0, 0, &payload);
                self.outbox.push_control(header, payload, None);
            }
            Control::Bye => self.outbox.push_last(Header::bare(Kind::Bye, 0, 0)),
        }
    }

    fn drop_data(&mut self) {
        self.outbox.drop_data();
    }

    fn progress(&mut self, events: &mut Vec<Event>) -> Result<(), LinkError> {
        for _ in 0..READS_PER_TURN {
            let more = self.inbox.read(self.socket.as_fd(), &mut self.arrivals, &mut self.received);
            // What came before the end of the connection still counts.
            self.take_received(events)?;
            if !more? {
                break;
            }
        }
        if let Some(shm) = &mut self.shm {
            shm.pull(&mut self.arrivals, &mut self.outbox, events);
        }
        self.flush(events)
    }

    fn flush(&mut self, events: &mut Vec<Event>) -> Result<(), LinkError> {
        match self.failed.take() {
            Some(error) => Err(error),
            None => self.outbox.flush(self.socket.as_fd(), events),
        }
    }

    fn shutdown(&mut self) {
        // A connection that is gone already needs no shutting down.
        let _gone = shutdown(&self.socket, Shutdown::Write);
    }
}
