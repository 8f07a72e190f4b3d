//! Frames on their way into a socket: few system calls, no copy where runs are long enough.
//!
//! ```text
//! in progress | control frames | data frames          one sendmsg takes as many slices as fit
//! ```

use std::collections::VecDeque;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::sealed::Sealed;
use super::{Event, LinkError, Message};
use crate::checksum;
use crate::memory::moving::Moving;
use crate::memory::place::Lent;
use crate::protect::Sealer;
use crate::wake::Waker;
use crate::wire::{HEADER_BYTES, Header, Kind};

/// Runs shorter than this are packed first: a slice of a system call costs about as much as copying a few hundred bytes.
pub const MIN_DIRECT_RUN: u64 = 1024;
/// The most slices in a system call; the kernel allows 1024.
const MAX_SLICES: usize = 512;
/// Data beyond this waits in the engine.
const ROOM_BYTES: u64 = 256 << 10;
/// The same where it comes from a device: while one part is written, the next ones are staged.
const STAGED_ROOM_BYTES: u64 = 3 << 20;

struct Frame {
    header: [u8; HEADER_BYTES],
    body: Body,
    /// Of the header and the body.
    written: u64,
    /// What its end means to the engine.
    sent: Option<Event>,
    /// A descriptor that travels with the first byte.
    descriptor: Option<OwnedFd>,
    /// The header, while a device writes the bytes that its checksum is of.
    unsettled: Option<Header>,
}

enum Body {
    Bytes(Vec<u8>),
    Place(Lent, Range<u64>),
    /// On its way from a device.
    Staged(Moving, u64),
}

impl Frame {
    fn len(&self) -> u64 {
        let body = match &self.body {
            Body::Bytes(bytes) => bytes.len() as u64,
            Body::Place(_, part) => part.end - part.start,
            Body::Staged(_, len) => *len,
        };
        HEADER_BYTES as u64 + body
    }

    /// What is left of it, as slices. Returns how many bytes they hold.
    fn slices<'a>(&'a self, room: usize, out: &mut Vec<IoSlice<'a>>) -> u64 {
        let header = HEADER_BYTES as u64;
        let skip = self.written.saturating_sub(header);
        let mut bytes = header - self.written.min(header);
        if bytes > 0 {
            out.push(IoSlice::new(&self.header[self.written as usize..]));
        }
        match &self.body {
            Body::Bytes(body) if body.len() as u64 > skip => {
                out.push(IoSlice::new(&body[skip as usize..]));
                bytes += body.len() as u64 - skip;
            }
            Body::Bytes(_) => {}
            Body::Staged(moving, len) if *len > skip => {
                out.push(IoSlice::new(&moving.staged()[skip as usize..]));
                bytes += len - skip;
            }
            Body::Staged(..) => {}
            Body::Place(place, part) => bytes += place.slices(part.start + skip..part.end, room - 1, out),
        }
        bytes
    }

    /// Whether all of it is there to be written; of bytes that a device has just written, the checksum is taken.
    fn settle(&mut self, sealed: bool) -> Result<bool, LinkError> {
        let (Some(header), Body::Staged(moving, _)) = (self.unsettled, &mut self.body) else {
            return Ok(true);
        };
        if !moving.is_done()? {
            return Ok(false);
        }
        let payload_crc = if sealed { 0 } else { checksum::crc32c(moving.staged()) };
        self.header = Header { payload_crc, ..header }.encode();
        self.unsettled = None;
        Ok(true)
    }
}

#[derive(Default)]
pub struct Outbox {
    frames: VecDeque<Frame>,
    /// How many frames at the front go before any data that is not yet under way.
    num_urgent: usize,
    data_bytes: u64,
    /// Data comes from a device.
    stages: bool,
    /// Everything that was written.
    pub bytes: u64,
    sealed: Option<Sealed>,
}

impl Outbox {
    /// From now on frames are protected.
    pub fn protect(&mut self, sealer: Sealer) {
        self.sealed = Some(Sealed::new(sealer));
    }

    pub fn is_empty(&self) -> bool {
        self.frames.is_empty() && self.sealed.as_ref().is_none_or(Sealed::is_empty)
    }

    pub fn has_room(&self) -> bool {
        self.data_bytes < if self.stages { STAGED_ROOM_BYTES } else { ROOM_BYTES }
    }

    /// Whether there is something to write now.
    pub fn wants_write(&self) -> bool {
        !self.is_empty() && !self.awaits_device()
    }

    /// Whether what is next comes from a device that is not done with it.
    pub fn awaits_device(&self) -> bool {
        let waits = self.frames.front().is_some_and(|frame| frame.unsettled.is_some());
        waits && self.sealed.as_ref().is_none_or(Sealed::is_empty)
    }

    /// Whether data comes from a device.
    pub fn stages(&self) -> bool {
        self.stages
    }

    /// Whether data waits to be written.
    pub fn has_data(&self) -> bool {
        self.data_bytes > 0
    }

    /// Words between engines overtake data.
    pub fn push_control(&mut self, header: Header, payload: Vec<u8>, descriptor: Option<OwnedFd>) {
        let frame = Frame {
            header: header.encode(),
            body: Body::Bytes(payload),
            written: 0,
            sent: None,
            descriptor,
            unsettled: None,
        };
        if self.num_urgent == 0 && self.frames.front().is_some_and(|f| f.written > 0) {
            self.num_urgent = 1; // the frame under way ends first
        }
        self.frames.insert(self.num_urgent, frame);
        self.num_urgent += 1;
    }

    /// Bytes that need not be a frame, for tests of the other side.
    pub fn push_raw(&mut self, bytes: Vec<u8>) {
        let frame = Frame {
            header: [0; HEADER_BYTES],
            body: Body::Bytes(bytes),
            written: HEADER_BYTES as u64,
            sent: None,
            descriptor: None,
            unsettled: None,
        };
        if frame.len() > frame.written {
            self.frames.push_back(frame);
        }
    }

    /// A frame behind everything else.
    pub fn push_last(&mut self, header: Header) {
        let body = Body::Bytes(vec![]);
        self.frames.push_back(Frame {
            header: header.encode(),
            body,
            written: 0,
            sent: None,
            descriptor: None,
            unsettled: None,
        });
    }

    pub fn push_data(
        &mut self,
        message: Message,
        part: Range<u64>,
        from: &Lent,
        waker: Option<&Waker>,
    ) -> Result<(), LinkError> {
        let (offset, len) = (part.start, part.end - part.start);
        let sent = Some(Event::Sent { message, upto: part.end });
        self.stages = from.gpu().is_some();
        let (body, payload_crc) = if self.stages {
            (Body::Staged(Moving::pack(from, part, waker)?, len), 0)
        } else if self.sealed.is_some() {
            (Body::Place(from.clone(), part), 0) // its tag says more than a checksum
        } else if from.view().run_bytes() < MIN_DIRECT_RUN {
            let mut packed = Vec::with_capacity(len as usize);
            from.pack(part, &mut packed)?;
            let crc = checksum::crc32c(&packed);
            (Body::Bytes(packed), crc)
        } else {
            let crc = from.checksum(part.clone(), 0);
            (Body::Place(from.clone(), part), crc)
        };
        let header = Header {
            kind: Kind::Data,
            job: message.job,
            tag: message.tag,
            offset,
            len: len as u32,
            payload_crc,
        };
        self.data_bytes += len;
        let unsettled = self.stages.then_some(header);
        let header = header.encode();
        self.frames.push_back(Frame { header, body, written: 0, sent, descriptor: None, unsettled });
        Ok(())
    }

    /// Keeps the frame under way and the control frames.
    pub fn drop_data(&mut self) {
        let mut keep = self.num_urgent;
        if keep == 0 && self.frames.front().is_some_and(|f| f.written > 0) {
            keep = 1;
        }
        self.frames.truncate(keep);
        self.data_bytes = 0;
    }

    /// Writes until the socket is full.
    pub fn flush(&mut self, socket: BorrowedFd<'_>, events: &mut Vec<Event>) -> Result<(), LinkError> {
        while !self.is_empty() {
            let settled = self.settle()?;
            self.seal_some(settled)?;
            let written = match &self.sealed {
                Some(sealed) if sealed.is_empty() => return Ok(()), // a device is not done
                Some(sealed) => sealed.write_once(socket),
                None if settled == 0 => return Ok(()),
                None => self.write_once(socket, settled),
            };
            match written {
                Ok(bytes) if self.sealed.is_some() => self.advance_sealed(bytes, events),
                Ok(bytes) => self.advance(bytes as u64, events),
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// How many frames at the front can be written.
    fn settle(&mut self) -> Result<usize, LinkError> {
        let (mut settled, sealed) = (0, self.sealed.is_some());
        for frame in self.frames.iter_mut().take(MAX_SLICES) {
            if !frame.settle(sealed)? {
                break;
            }
            settled += 1;
        }
        Ok(settled)
    }

    fn write_once(&self, socket: BorrowedFd<'_>, settled: usize) -> Result<usize, Errno> {
        let mut slices = Vec::with_capacity(16);
        for (i, frame) in self.frames.iter().take(settled).enumerate() {
            let alone = frame.descriptor.is_some() && frame.written == 0;
            if i > 0 && (alone || slices.len() + 2 > MAX_SLICES) {
                break;
            }
            let left = frame.len() - frame.written;
            if frame.slices(MAX_SLICES - slices.len(), &mut slices) < left || alone {
                break;
            }
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let front = self.frames.front().filter(|f| f.written == 0);
        let descriptor = front.and_then(|f| f.descriptor.as_ref()).map(|d| [std::os::fd::AsFd::as_fd(d)]);
        if let Some(descriptor) = &descriptor {
            ancillary.push(SendAncillaryMessage::ScmRights(descriptor));
        }
        sendmsg(socket, &slices, &mut ancillary, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
    }

    /// Numbers and protects what is next; from then on nothing overtakes it.
    fn seal_some(&mut self, mut settled: usize) -> Result<(), LinkError> {
        let Some(sealed) = &mut self.sealed else { return Ok(()) };
        let mut packed = None;
        while sealed.has_room()
            && settled > 0
            && let Some(frame) = self.frames.pop_front()
        {
            settled -= 1;
            self.num_urgent = self.num_urgent.saturating_sub(1);
            let bytes = frame.len() - HEADER_BYTES as u64;
            sealed.push(frame.sent, bytes, |record| {
                record.extend_from_slice(&frame.header);
                match &frame.body {
                    Body::Bytes(bytes) => record.extend_from_slice(bytes),
                    Body::Staged(moving, _) => record.extend_from_slice(moving.staged()),
                    Body::Place(place, part) => {
                        packed = packed.take().or(place.pack(part.clone(), record).err())
                    }
                }
            });
        }
        packed.map_or(Ok(()), |error| Err(error.into()))
    }

    fn advance_sealed(&mut self, bytes: usize, events: &mut Vec<Event>) {
        self.bytes += bytes as u64;
        let Some(sealed) = &mut self.sealed else { return };
        let data_bytes = sealed.advance(bytes, events);
        self.data_bytes = self.data_bytes.saturating_sub(data_bytes);
    }

    fn advance(&mut self, mut bytes: u64, events: &mut Vec<Event>) {
        self.bytes += bytes;
        while bytes > 0 {
            let front = self.frames.front_mut().expect("bytes written belong to a frame");
            let step = bytes.min(front.len() - front.written);
            front.written += step;
            bytes -= step;
            if front.written < front.len() {
                return;
            }
            let done = self.frames.pop_front().expect("just looked at it");
            self.num_urgent = self.num_urgent.saturating_sub(1);
            if done.sent.is_some() {
                self.data_bytes = self.data_bytes.saturating_sub(done.len() - HEADER_BYTES as u64);
            }
            events.extend(done.sent);
        }
    }
}
