//! Links over MPI: an existing engine for clusters, whose InfiniBand or Slingshot it knows how to use.
//!
//! Frames are those of the wire format, as messages of MPI between two ranks (docs/wire-format.md):
//!
//! ```text
//! tag 1   | header, payload |      a frame whose payload has up to 16 KiB
//! tag 1   | header |               a longer one: its payload is a message of its own,
//! tag 2   | payload |              sent from the tensor and received into it, where it is one run of bytes there
//! tag 1   | |                      nothing more comes
//! ```
//!
//! MPI keeps messages of one tag between two ranks in order. No call waits, and nothing wakes us, so the engine asks.
//! MPI takes in whatever comes, and keeps what nobody receives yet; so data is sent such that it counts as sent only when
//! its receiver has begun with it, and little is sent before.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use crossmesh_core::id::Rank;

use super::arrivals::Arrivals;
use super::inbox::check_extent;
use super::words::{self, MAX_WORD_BYTES};
use super::{Control, Event, Expected, Link, LinkError, Message};
use crate::checksum;
use crate::deadline::Deadline;
use crate::memory::place::Lent;
use crate::wire::{HEADER_BYTES, Header, Kind};

mod calls;
mod meeting;
mod pool;

use calls::{Bytes, Request};
pub use calls::{Mpi, MpiError};
pub use meeting::OverMpi;
use pool::{Heading, Pool};

/// Headers, with short payloads behind them.
const HEAD_TAG: i32 = 1;
/// Long payloads.
const BODY_TAG: i32 = 2;
/// A longer payload travels by itself.
const INLINE_BYTES: usize = MAX_WORD_BYTES;
/// What MPI may hold of a link's data before the engine keeps the rest: so many bytes, or so many parts. Of a long part
/// only a beginning is there before it is received, in all MPI libraries.
const ROOM_BYTES: u64 = 256 << 10;
const ROOM_PARTS: usize = 4;
const MAX_PART_BYTES: u64 = 512 << 10;
const MIN_PART_BYTES: u64 = 16 << 10;
/// Frames taken in before other links get their turn, and payloads that may be on their way in.
const FRAMES_PER_TURN: usize = 64;
const MAX_BODIES: usize = 64;
/// A link that was closed waits this long for the peer to close it too.
const FAREWELL: Duration = Duration::from_secs(5);
const ASK_AGAIN: Duration = Duration::from_micros(50);

/// A data frame on its way in.
struct Incoming {
    header: Header,
    body: Body,
}

enum Body {
    /// Came with the header.
    Here(Vec<u8>),
    /// To be received, as soon as there is a buffer.
    Due,
    /// Being received; straight into place, or into a buffer of the pool.
    Coming(Request),
}

/// A message of MPI on its way out.
struct Outgoing {
    request: Request,
    /// Bytes of data in it, and whether they are in a buffer of the pool.
    data_bytes: u64,
    packed: bool,
    /// What its end means to the engine.
    sent: Option<Event>,
}

pub struct MpiLink {
    mpi: Arc<Mpi>,
    pool: Arc<Pool>,
    peer: Rank,
    greeted: bool,
    /// The next header, as soon as it comes.
    head: Option<Request>,
    arrivals: Arrivals,
    /// Data frames in the order they came.
    incoming: VecDeque<Incoming>,
    outgoing: VecDeque<Outgoing>,
    /// Data in them.
    data_bytes: u64,
    data_parts: usize,
    /// The peer said that nothing more comes; we did.
    ended: bool,
    shut: bool,
    /// The engine gave up.
    dropped: bool,
    /// What went wrong in a call that cannot say so.
    failed: Option<LinkError>,
}

impl From<MpiError> for LinkError {
    fn from(error: MpiError) -> Self {
        LinkError::Io(io::Error::other(error))
    }
}

impl MpiLink {
    fn new(mpi: Arc<Mpi>, pool: Arc<Pool>, peer: Rank) -> Result<Self, LinkError> {
        let head = mpi.receive(peer, HEAD_TAG, Bytes::Owned(vec![0; HEADER_BYTES + INLINE_BYTES]))?;
        let hello = Header::bare(Kind::Hello, peer.0, mpi.me().0);
        let mut link = Self {
            mpi,
            pool,
            peer,
            greeted: false,
            head: Some(head),
            arrivals: Arrivals::default(),
            incoming: VecDeque::new(),
            outgoing: VecDeque::new(),
            data_bytes: 0,
            data_parts: 0,
            ended: false,
            shut: false,
            dropped: false,
            failed: None,
        };
        link.send_frame(hello, &[], None)?;
        Ok(link)
    }

    /// Sends a frame whose payload is short.
    fn send_frame(&mut self, header: Header, payload: &[u8], sent: Option<Event>) -> Result<(), LinkError> {
        let bytes = Bytes::Owned([&header.encode()[..], payload].concat());
        let data_bytes = if header.kind == Kind::Data { payload.len() as u64 } else { 0 };
        self.put(HEAD_TAG, bytes, data_bytes, false, sent)
    }

    fn put(
        &mut self,
        tag: i32,
        bytes: Bytes,
        data_bytes: u64,
        packed: bool,
        sent: Option<Event>,
    ) -> Result<(), LinkError> {
        let request = match data_bytes {
            0 => self.mpi.send(self.peer, tag, bytes)?,
            _ => self.mpi.send_data(self.peer, tag, bytes)?,
        };
        self.outgoing.push_back(Outgoing { request, data_bytes, packed, sent });
        self.data_bytes += data_bytes;
        self.data_parts += usize::from(data_bytes > 0);
        Ok(())
    }

    fn send_part(&mut self, message: Message, part: Range<u64>, from: &Lent) -> Result<(), LinkError> {
        let len = part.end - part.start;
        let sent = Some(Event::Sent { message, upto: part.end });
        let header = |payload_crc| Header {
            kind: Kind::Data,
            job: message.job,
            tag: message.tag,
            offset: part.start,
            len: len as u32,
            payload_crc,
        };
        if len <= INLINE_BYTES as u64 {
            let mut payload = Vec::with_capacity(len as usize);
            from.pack(part.clone(), &mut payload)?;
            return self.send_frame(header(checksum::crc32c(&payload)), &payload, sent);
        }
        let (bytes, crc, packed) = match Bytes::in_place(from, part.clone()) {
            Some(bytes) => (bytes, from.checksum(part.clone(), 0), false),
            None => {
                let mut buffer = self.pool.take(Heading::Out, len);
                from.pack(part.clone(), &mut buffer)?;
                let crc = checksum::crc32c(&buffer);
                (Bytes::Owned(buffer), crc, true)
            }
        };
        self.send_frame(header(crc), &[], None)?;
        self.put(BODY_TAG, bytes, len, packed, sent)
    }

    /// Takes in headers that have come.
    fn take_heads(&mut self, events: &mut Vec<Event>) -> Result<(), LinkError> {
        for _ in 0..FRAMES_PER_TURN {
            if self.incoming.len() >= MAX_BODIES {
                break;
            }
            let Some(request) = &mut self.head else { break };
            let Some((Bytes::Owned(bytes), len)) = request.test()? else { break };
            self.head = None;
            if len == 0 {
                self.ended = true;
                break;
            }
            self.on_frame(&bytes[..len], events)?;
            self.head = Some(self.mpi.receive(self.peer, HEAD_TAG, Bytes::Owned(bytes))?);
        }
        Ok(())
    }

    fn on_frame(&mut self, bytes: &[u8], events: &mut Vec<Event>) -> Result<(), LinkError> {
        let short = || io::Error::from(io::ErrorKind::UnexpectedEof);
        let (header, payload) = bytes.split_first_chunk::<HEADER_BYTES>().ok_or_else(short)?;
        let header = Header::decode(header)?;
        header.check_fields()?;
        let follows = header.kind == Kind::Data && header.len as usize > INLINE_BYTES;
        if payload.len() != if follows { 0 } else { header.len as usize } {
            return Err(header.unexpected("its payload has another length").into());
        }
        if !follows {
            header.check_payload(checksum::crc32c(payload))?;
        }
        match header.kind {
            Kind::Hello if header.tag != self.peer.0 || self.greeted => {
                return Err(header.unexpected("another rank was to be here").into());
            }
            Kind::Hello => self.greeted = true,
            _ if !self.greeted => return Err(header.unexpected("it comes before the greeting").into()),
            Kind::Data => self.on_data(header, payload, follows)?,
            Kind::Ready | Kind::Beat | Kind::Abort | Kind::Bye => {
                events.extend(words::event_of(&header, payload, self.peer)?);
            }
            _ => return Err(header.unexpected("there is no shared memory on this connection").into()),
        }
        Ok(())
    }

    fn on_data(&mut self, header: Header, payload: &[u8], follows: bool) -> Result<(), LinkError> {
        let message = Message { job: header.job, tag: header.tag };
        let slot = self.arrivals.find(&message).ok_or_else(|| header.unexpected("nobody waits for it"))?;
        let arriving = &mut self.arrivals[slot];
        if header.offset != arriving.promised {
            return Err(header.unexpected("it is not the next part").into());
        }
        check_extent(&header, arriving)?;
        arriving.promised += u64::from(header.len);
        let body = if follows { Body::Due } else { Body::Here(payload.to_vec()) };
        self.incoming.push_back(Incoming { header, body });
        Ok(())
    }

    /// Asks MPI for the payloads that follow their headers, in their order.
    fn ask_for_bodies(&mut self) -> Result<(), LinkError> {
        for incoming in self.incoming.iter_mut().filter(|i| matches!(i.body, Body::Due)) {
            let header = &incoming.header;
            let len = u64::from(header.len);
            let message = Message { job: header.job, tag: header.tag };
            let arriving = self.arrivals.get(&message).expect("a message stays until it is whole");
            let part = header.offset..header.offset + len;
            let straight = match arriving.expected.combine {
                None => Bytes::in_place(&arriving.expected.place, part),
                Some(_) => None,
            };
            let bytes = match straight {
                Some(bytes) => bytes,
                None if self.pool.has_room(Heading::In) => {
                    let mut buffer = self.pool.take(Heading::In, len);
                    buffer.resize(len as usize, 0);
                    Bytes::Owned(buffer)
                }
                None => break,
            };
            incoming.body = Body::Coming(self.mpi.receive(self.peer, BODY_TAG, bytes)?);
        }
        Ok(())
    }

    /// Puts the payloads that have come where they belong, in order.
    fn take_bodies(&mut self, events: &mut Vec<Event>) -> Result<(), LinkError> {
        while let Some(Incoming { header, body }) = self.incoming.front_mut() {
            let message = Message { job: header.job, tag: header.tag };
            let slot = self.arrivals.find(&message).expect("a message stays until it is whole");
            let arriving = &mut self.arrivals[slot];
            let place = &arriving.expected.place;
            match body {
                Body::Here(payload) => place.unpack(header.offset, payload, arriving.expected.combine)?,
                Body::Due => return Ok(()),
                Body::Coming(request) => {
                    let Some((bytes, len)) = request.test()? else { return Ok(()) };
                    if len != header.len as usize {
                        return Err(header.unexpected("its payload has another length").into());
                    }
                    match bytes {
                        Bytes::InPlace(_, part) => header.check_payload(place.checksum(part, 0))?,
                        Bytes::Owned(buffer) => {
                            header.check_payload(checksum::crc32c(&buffer))?;
                            place.unpack(header.offset, &buffer, arriving.expected.combine)?;
                            self.pool.give_back(Heading::In, u64::from(header.len), buffer);
                        }
                    }
                }
            }
            arriving.arrived = header.offset + u64::from(header.len);
            events.push(Event::Arrived { message, upto: arriving.arrived });
            if arriving.arrived == arriving.expected.bytes {
                self.arrivals.remove(slot);
            }
            self.incoming.pop_front();
        }
        Ok(())
    }

    /// Whether nothing of this link is under way in MPI.
    fn is_over(&self) -> bool {
        self.ended && self.shut && self.outgoing.is_empty() && self.incoming.is_empty()
    }
}

impl Link for MpiLink {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn wants_write(&self) -> bool {
        !self.outgoing.is_empty()
    }

    fn has_work(&self) -> bool {
        false
    }

    fn expect(&mut self, message: Message, expected: Expected) {
        self.arrivals.insert(message, expected);
    }

    fn announce(&mut self, job: u32, tags: &[u32]) {
        for (header, payload) in words::ready_frames(job, tags) {
            let sent = self.send_frame(header, &payload, None);
            self.failed = self.failed.take().or(sent.err());
        }
    }

    fn has_room(&self) -> bool {
        let few = self.data_bytes < ROOM_BYTES || self.data_parts < ROOM_PARTS;
        few && self.pool.has_room(Heading::Out)
    }

    fn part_bytes(&self, chunk_bytes: u64) -> u64 {
        (chunk_bytes / 64 * 64).clamp(MIN_PART_BYTES, MAX_PART_BYTES)
    }

    fn send(&mut self, message: Message, part: Range<u64>, from: &Lent) {
        let sent = self.send_part(message, part, from);
        self.failed = self.failed.take().or(sent.err());
    }

    fn control(&mut self, control: Control) {
        if self.shut {
            return;
        }
        let (header, payload) = words::control_frame(control);
        let sent = self.send_frame(header, &payload, None);
        self.failed = self.failed.take().or(sent.err());
    }

    fn drop_data(&mut self) {
        self.dropped = true;
    }

    fn progress(&mut self, events: &mut Vec<Event>) -> Result<(), LinkError> {
        self.take_heads(events)?;
        self.ask_for_bodies()?;
        self.take_bodies(events)?;
        self.flush(events)?;
        if self.ended && self.incoming.is_empty() { Err(LinkError::Closed) } else { Ok(()) }
    }

    fn flush(&mut self, events: &mut Vec<Event>) -> Result<(), LinkError> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        while let Some(first) = self.outgoing.front_mut() {
            let Some((bytes, _)) = first.request.test()? else { break };
            let done = self.outgoing.pop_front().expect("just looked at it");
            self.data_bytes -= done.data_bytes;
            self.data_parts -= usize::from(done.data_bytes > 0);
            if let (Bytes::Owned(buffer), true) = (bytes, done.packed) {
                self.pool.give_back(Heading::Out, done.data_bytes, buffer);
            }
            events.extend(done.sent);
        }
        Ok(())
    }

    fn shutdown(&mut self) {
        if !self.shut {
            self.shut = true;
            // A peer that is gone needs no farewell.
            let _gone = self.put(HEAD_TAG, Bytes::Owned(vec![]), 0, false, None);
        }
    }
}

impl Drop for MpiLink {
    /// The next link to this peer must find nothing of this one.
    fn drop(&mut self) {
        let deadline = Deadline::after(FAREWELL);
        while !self.is_over() && !self.dropped && !deadline.passed() {
            let over = matches!(self.progress(&mut vec![]), Err(e) if !matches!(e, LinkError::Closed));
            if over {
                break;
            }
            self.shutdown();
            std::thread::sleep(ASK_AGAIN);
        }
        if !self.is_over() {
            self.mpi.leave_unclean();
        }
    }
}
