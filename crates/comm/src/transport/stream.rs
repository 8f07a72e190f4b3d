//! Links over sockets: TCP between hosts; inside a host a Unix socket, with the payload in shared memory.
//!
//! The streams come connected and authenticated. The first frame each way says who is there, and is checked.

use std::collections::VecDeque;
use std::net::TcpStream;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crossmesh_core::id::Rank;
use crossmesh_cuda::Gpu;
use rustix::io::ioctl_fionbio;
use rustix::net::{Shutdown, shutdown, sockopt};

use super::arrivals::Arrivals;
use super::inbox::{Inbox, Received};
use super::outbox::Outbox;
use super::shm::Shm;
use super::{Control, Event, Expected, Link, LinkError, Message, tcp, words};
use crate::memory::moving::Moving;
use crate::memory::place::Lent;
use crate::protect::Session;
use crate::wake::Waker;
use crate::wire::{Header, Kind, MAX_PAYLOAD};

/// What the kernel holds of ours: a few milliseconds of a fast NIC, little enough that who is next stays our decision.
const SEND_BUFFER_BYTES: usize = 256 << 10;
/// How many reads in a row before other links get their turn.
const READS_PER_TURN: usize = 16;
/// Frames longer than this gain nothing; shorter ones cost a system call more often.
const MAX_PART_BYTES: u64 = 256 << 10;
const MIN_PART_BYTES: u64 = 16 << 10;
/// A frame costs a few microseconds on either side whatever it carries, so it carries at least what a connection delivers in this time. A NIC of
/// 2 Gbit/s gets frames as its plan cuts them; faster ones, and loopback, get larger ones.
const LEAST_PART_S: f64 = 60e-6;
/// How often that is looked at.
const LOOK_BYTES: u64 = 4 << 20;
/// Inside a payload we are woken for so many bytes, or for the rest of it, and not for every packet: nothing can be done with less.
const GATHER_BYTES: u64 = MAX_PART_BYTES;
/// Parts from and to a device cost some calls of its driver each.
const DEVICE_PART_BYTES: u64 = 512 << 10;
/// Parts that lie on a device and are copied there cost a kernel each, and two small frames.
const DEVICE_OFFER_BYTES: u64 = 4 << 20;
/// Parts in shared memory cost two small frames each, so they are larger.
const MAX_OFFER_BYTES: u64 = 1 << 20;

pub struct StreamLink {
    socket: OwnedFd,
    me: Rank,
    peer: Rank,
    greeted: bool,
    inbox: Inbox,
    outbox: Outbox,
    arrivals: Arrivals,
    shm: Option<Shm>,
    received: Vec<Received>,
    /// On their way from pinned memory to a device; and what came behind them, which does not overtake them.
    landing: VecDeque<(Option<Moving>, Message, u64)>,
    /// The device that places of messages are on, once there was one.
    gpu: Option<Arc<Gpu>>,
    /// Whom to wake when a device is done.
    waker: Option<Waker>,
    /// How many bytes wake us; none where the system is not told.
    wakes_at: Option<u64>,
    /// The least that a frame carries where there is more, and how many bytes were sent since that was looked at.
    least_part: u64,
    unlooked: u64,
    /// What went wrong in a call that cannot say so.
    failed: Option<LinkError>,
}

impl StreamLink {
    pub fn tcp(me: Rank, peer: Rank, stream: TcpStream) -> Result<Self, LinkError> {
        tcp::tune(&stream)?;
        sockopt::set_socket_send_buffer_size(&stream, SEND_BUFFER_BYTES)?;
        Ok(Self { wakes_at: Some(1), ..Self::new(me, peer, stream.into(), None)? })
    }

    /// The same, for frames that are protected as both sides agreed in their handshake.
    pub fn protected(me: Rank, peer: Rank, stream: TcpStream, session: &Session) -> Result<Self, LinkError> {
        let mut link = Self::tcp(me, peer, stream)?;
        if let Some((sealer, opener)) = session.ends() {
            link.outbox.protect(sealer);
            link.inbox.protect(opener);
        }
        Ok(link)
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
            me,
            peer,
            greeted: false,
            inbox: Inbox::new(),
            outbox,
            arrivals: Arrivals::default(),
            shm,
            received: vec![],
            landing: VecDeque::new(),
            gpu: None,
            waker: None,
            wakes_at: None,
            least_part: MIN_PART_BYTES,
            unlooked: 0,
            failed: None,
        })
    }

    /// Nothing can be done with a payload before it is whole; but behind it there may be a word.
    fn gather(&mut self) {
        let wanted = self.inbox.payload_left().clamp(1, GATHER_BYTES);
        if self.wakes_at.is_some_and(|now| now != wanted) && tcp::set_wake_bytes(self.socket.as_fd(), wanted)
        {
            self.wakes_at = Some(wanted);
        }
    }

    /// Looks now and then at how fast the connection is.
    fn look_at_rate(&mut self, sent: u64) {
        self.unlooked += sent;
        if self.unlooked >= LOOK_BYTES && self.wakes_at.is_some() {
            self.unlooked = 0;
            let rate = tcp::delivery_rate(self.socket.as_fd()).unwrap_or(0);
            self.least_part = least_part(rate);
        }
    }

    fn take_received(&mut self, events: &mut Vec<Event>) -> Result<(), LinkError> {
        let mut received = std::mem::take(&mut self.received);
        for frame in received.drain(..) {
            match frame {
                Received::Arrived { message, upto } if self.landing.is_empty() => {
                    events.push(Event::Arrived { message, upto });
                }
                Received::Arrived { message, upto } => self.landing.push_back((None, message, upto)),
                Received::Staged { message, expected, staging, offset, upto } => {
                    let waker = self.waker.as_ref();
                    let moving = Moving::unpack(&expected.place, offset, staging, expected.combine, waker)?;
                    self.landing.push_back((Some(moving), message, upto));
                }
                Received::Control { header, payload } => self.on_control(&header, &payload, events)?,
            }
        }
        self.received = received;
        Ok(())
    }

    /// What a device has put into place.
    fn take_landed(&mut self, events: &mut Vec<Event>) -> Result<(), LinkError> {
        while let Some((moving, message, upto)) = self.landing.front_mut() {
            if let Some(moving) = moving
                && !moving.is_done()?
            {
                break;
            }
            events.push(Event::Arrived { message: *message, upto: *upto });
            self.landing.pop_front();
        }
        Ok(())
    }

    /// The first time that a message has a place on a device, a peer of the same host hears that we map what it has there.
    fn note_gpu(&mut self, place: &Lent) {
        let (Some(gpu), None, Some(shm)) = (place.gpu(), &self.gpu, &mut self.shm) else { return };
        shm.set_gpu(gpu, &mut self.outbox);
        self.gpu = Some(gpu.clone());
    }

    fn on_control(
        &mut self,
        header: &Header,
        payload: &[u8],
        events: &mut Vec<Event>,
    ) -> Result<(), LinkError> {
        let unexpected = |why| header.unexpected(why);
        match (header.kind, &mut self.shm) {
            (Kind::Hello, _) if self.greeted => {
                return Err(unexpected("it has greeted already").into());
            }
            (Kind::Hello, _) if (header.tag, header.job) != (self.peer.0, self.me.0) => {
                return Err(unexpected("another rank was to be here").into());
            }
            (Kind::Hello, _) => self.greeted = true,
            (Kind::Ready | Kind::Beat | Kind::Abort | Kind::Bye, _) => {
                events.extend(words::event_of(header, payload, self.peer)?);
            }
            (Kind::Segment, Some(shm)) => {
                shm.on_segment(header, payload, self.inbox.descriptors.pop_front())?;
            }
            (Kind::Maps, Some(shm)) => shm.on_maps(header, payload)?,
            (Kind::Offer, Some(shm)) => shm.on_offer(header, payload, &mut self.arrivals)?,
            (Kind::Offers, Some(shm)) => shm.on_offers(header, payload, &mut self.arrivals)?,
            (Kind::Taken, Some(shm)) => shm.on_taken(header, events)?,
            (Kind::Data, _) => unreachable!("the inbox keeps data to itself"),
            (_, None) => return Err(unexpected("there is no shared memory on this connection").into()),
        }
        Ok(())
    }
}

/// The least that a frame carries on a connection of this rate.
fn least_part(bytes_per_s: u64) -> u64 {
    let bytes = (bytes_per_s as f64 * LEAST_PART_S) as u64;
    (bytes / 64 * 64).clamp(MIN_PART_BYTES, MAX_PART_BYTES)
}

impl Link for StreamLink {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn wants_write(&self) -> bool {
        self.outbox.wants_write() || self.shm.as_ref().is_some_and(Shm::has_unsaid)
    }

    fn heard(&self) -> Option<u64> {
        Some(self.inbox.bytes)
    }

    fn gathers(&self) -> bool {
        self.wakes_at.is_some_and(|bytes| bytes > 1)
    }

    fn said(&self) -> Option<u64> {
        Some(self.outbox.bytes)
    }

    fn has_work(&self) -> bool {
        self.shm.as_ref().is_some_and(Shm::has_work)
    }

    fn set_waker(&mut self, waker: &Waker) {
        self.waker = Some(waker.clone());
    }

    fn awaits_device(&self) -> bool {
        let pulls = self.shm.as_ref().is_some_and(Shm::awaits_device);
        !self.landing.is_empty() || self.outbox.awaits_device() || pulls
    }

    fn expect(&mut self, message: Message, expected: Expected) {
        self.note_gpu(&expected.place);
        self.arrivals.insert(message, expected);
    }

    fn announce(&mut self, job: u32, tags: &[u32]) {
        for (header, payload) in words::ready_frames(job, tags) {
            self.outbox.push_control(header, payload, None);
        }
    }

    fn has_room(&self) -> bool {
        self.outbox.has_room() && self.shm.as_ref().is_none_or(Shm::has_room)
    }

    fn part_bytes(&self, chunk_bytes: u64) -> u64 {
        if self.shm.as_ref().is_some_and(Shm::offers_device) {
            return DEVICE_OFFER_BYTES;
        }
        if self.outbox.stages() {
            return DEVICE_PART_BYTES;
        }
        let max = if self.shm.is_some() { MAX_OFFER_BYTES } else { MAX_PART_BYTES };
        (chunk_bytes / 64 * 64).clamp(self.least_part, max.min(u64::from(MAX_PAYLOAD)))
    }

    fn send(&mut self, message: Message, part: Range<u64>, from: &Lent) {
        self.look_at_rate(part.end - part.start);
        let alone = !self.outbox.has_data();
        self.note_gpu(from);
        let waker = self.waker.as_ref();
        match self.shm.as_mut().and_then(|shm| shm.takes(message, &part, from, alone).then_some(shm)) {
            Some(shm) => {
                let offered = shm.offer(message, part, from, &mut self.outbox);
                self.failed = self.failed.take().or(offered.err());
            }
            None => {
                let pushed = self.outbox.push_data(message, part, from, waker);
                self.failed = self.failed.take().or(pushed.err());
            }
        }
    }

    fn control(&mut self, control: Control) {
        match words::control_frame(control) {
            (header, _) if header.kind == Kind::Bye => self.outbox.push_last(header),
            (header, payload) => self.outbox.push_control(header, payload, None),
        }
    }

    fn drop_data(&mut self) {
        self.shm.iter_mut().for_each(Shm::drop_unsaid);
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
        self.gather();
        self.take_landed(events)?;
        if let Some(shm) = &mut self.shm {
            shm.pull(&mut self.arrivals, &mut self.outbox, self.waker.as_ref(), events)?;
        }
        self.flush(events)
    }

    fn flush(&mut self, events: &mut Vec<Event>) -> Result<(), LinkError> {
        if let Some(shm) = &mut self.shm {
            shm.say_offers(&mut self.outbox);
        }
        match self.failed.take() {
            Some(error) => Err(error),
            None => self.outbox.flush(self.socket.as_fd(), events),
        }
    }

    fn rest(&mut self) {
        self.inbox.rest();
    }

    fn shutdown(&mut self) {
        // A connection that is gone already needs no shutting down.
        let _gone = shutdown(&self.socket, Shutdown::Write);
    }

    fn kernel_bytes(&self) -> u64 {
        let sizes =
            [sockopt::socket_send_buffer_size(&self.socket), sockopt::socket_recv_buffer_size(&self.socket)];
        sizes.into_iter().flatten().sum::<usize>() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_grow_with_the_rate_of_a_connection() {
        assert_eq!(least_part(0), MIN_PART_BYTES, "the kernel does not say");
        assert_eq!(least_part(250_000_000), MIN_PART_BYTES);
        assert_eq!(least_part(1_250_000_000), 74_944);
        assert_eq!(least_part(20_000_000_000), MAX_PART_BYTES);
    }
}
