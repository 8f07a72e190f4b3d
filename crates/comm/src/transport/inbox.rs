//! Frames on their way out of a socket. Long payloads are read straight into place; short ones come many at a time
//! through a read-ahead buffer, and so does everything that has to be combined or scattered in small runs.
//!
//! ```text
//! socket --readv--> | rest of the payload, in place | read-ahead: the next headers, small frames |
//! ```
//!
//! What goes to a device is read into pinned memory, a frame at a time, and leaves it to whoever asked to take it on from there.
//!
//! Where long payloads come one behind the other, no more is read ahead than the next header and what comes with it: what lies in
//! the buffer has to be copied once more.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use crossmesh_cuda::Staging;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::arrivals::{Arrivals, Arriving, Slot};
use super::outbox::MIN_DIRECT_RUN;
use super::sealed::Records;
use super::{Expected, LinkError, Message};
use crate::checksum;
use crate::memory::moving::failed;
use crate::protect::Opener;
use crate::wire::{HEADER_BYTES, Header, Kind, WireError};

/// What is read at once where much comes; a connection that only hears of beats has room for those.
const AHEAD_BYTES: usize = 64 << 10;
const FEW_BYTES: usize = 4 << 10;
/// Payloads with less than this to come are read through the buffer, along with what follows them.
const MIN_DIRECT: u64 = 16 << 10;
/// What is read ahead behind a long payload: enough for the next header and a few control frames.
const TAIL_BYTES: usize = FEW_BYTES;
const MAX_SLICES: usize = 512;
/// Descriptors that came before their frame was read.
const MAX_DESCRIPTORS: usize = 64;

/// A frame, as it comes out.
pub enum Received {
    Arrived {
        message: Message,
        upto: u64,
    },
    /// In pinned memory, to be put at `offset` of a place on a device.
    Staged {
        message: Message,
        expected: Expected,
        staging: Staging,
        offset: u64,
        upto: u64,
    },
    Control {
        header: Header,
        payload: Vec<u8>,
    },
}

struct Incoming {
    header: Header,
    got: u32,
    crc: u32,
    /// Where a control frame gathers.
    control: Vec<u8>,
    /// Where a payload for a device gathers.
    staging: Option<Staging>,
    /// The message that a payload belongs to.
    slot: Option<Slot>,
}

impl Incoming {
    /// A frame whose header was checked; and the message whose data it is.
    fn new(header: Header, slot: Option<Slot>, arrivals: &Arrivals) -> Result<Self, LinkError> {
        let mut incoming = Self { header, got: 0, crc: 0, control: vec![], staging: None, slot };
        if let Some(gpu) = slot.and_then(|slot| arrivals[slot].expected.place.gpu()) {
            incoming.staging = Some(gpu.stage(header.len as usize).map_err(failed)?);
        }
        Ok(incoming)
    }

    fn left(&self) -> u64 {
        u64::from(self.header.len - self.got)
    }
}

pub struct Inbox {
    /// Empty while nothing has come for long.
    ahead: Vec<u8>,
    start: usize,
    end: usize,
    incoming: Option<Incoming>,
    /// The last frame was data that can be read into place, and long enough for that.
    streams: bool,
    pub descriptors: VecDeque<OwnedFd>,
    /// The first frame was a greeting.
    pub greeted: bool,
    /// Everything that was read.
    pub bytes: u64,
    records: Option<Records>,
}

impl Inbox {
    pub fn new() -> Self {
        Self {
            ahead: vec![],
            start: 0,
            end: 0,
            incoming: None,
            streams: false,
            descriptors: VecDeque::new(),
            greeted: false,
            bytes: 0,
            records: None,
        }
    }

    /// From now on frames are protected.
    pub fn protect(&mut self, opener: Opener) {
        self.ahead = vec![];
        self.records = Some(Records::new(opener));
    }

    /// Nothing has come for long: the room for it is given back, until something does.
    pub fn rest(&mut self) {
        if self.start == self.end && self.incoming.is_none() {
            (self.ahead, self.start, self.end) = (vec![], 0, 0);
        }
        self.records.iter_mut().for_each(Records::rest);
    }

    /// What is kept to read into.
    #[cfg(test)]
    pub fn room_bytes(&self) -> usize {
        self.ahead.capacity() + self.records.as_ref().map_or(0, Records::room_bytes)
    }

    /// How much of a payload is still to come, before anything else can.
    pub fn payload_left(&self) -> u64 {
        if let Some(records) = &self.records {
            return records.bytes_left();
        }
        self.incoming.as_ref().filter(|i| i.slot.is_some()).map_or(0, Incoming::left)
    }

    /// Reads once and takes what came apart. False once the socket has nothing more.
    pub fn read(
        &mut self,
        socket: BorrowedFd<'_>,
        arrivals: &mut Arrivals,
        out: &mut Vec<Received>,
    ) -> Result<bool, LinkError> {
        let direct = self.direct(arrivals);
        let result = match (&mut self.records, direct) {
            (Some(records), _) => records.read(|into| receive(socket, into, &mut self.descriptors)),
            (None, Some(slot)) => self.read_direct(socket, &arrivals[slot]),
            (None, None) => self.read_ahead(socket),
        };
        match result {
            Ok(0) => return Err(LinkError::Closed),
            Ok(bytes) => self.bytes += bytes as u64,
            Err(Errno::AGAIN) => return Ok(false),
            Err(Errno::INTR) => return Ok(true),
            Err(errno) => return Err(errno.into()),
        }
        match self.records.is_some() {
            true => self.open_records(arrivals, out)?,
            false => self.parse(arrivals, out)?,
        }
        // They come with the frames that speak of them.
        match self.descriptors.len() > MAX_DESCRIPTORS {
            true => Err(LinkError::Io(io::Error::new(
                io::ErrorKind::InvalidData,
                "descriptors without a segment",
            ))),
            false => Ok(true),
        }
    }

    /// Takes apart the records that are whole. Nothing of one is used before it is known to be genuine.
    fn open_records(&mut self, arrivals: &mut Arrivals, out: &mut Vec<Received>) -> Result<(), LinkError> {
        let Some(mut records) = self.records.take() else { return Ok(()) };
        let mut take = || -> Result<(), LinkError> {
            while let Some(frame) = records.next()? {
                out.push(self.take_frame(frame, arrivals)?);
            }
            Ok(())
        };
        let taken = take();
        self.records = Some(records);
        taken
    }

    /// A whole frame, which the peer made.
    fn take_frame(&mut self, frame: &[u8], arrivals: &mut Arrivals) -> Result<Received, LinkError> {
        let (head, payload) = frame.split_first_chunk::<HEADER_BYTES>().expect("records hold frames");
        let (header, slot) = self.check_header(head, arrivals)?;
        if header.len as usize != payload.len() {
            return Err(header.unexpected("its record has another length").into());
        }
        let mut incoming = Incoming::new(header, slot, arrivals)?;
        incoming.got = header.len;
        match (slot, &mut incoming.staging) {
            (Some(_), Some(staging)) => staging.bytes_mut().copy_from_slice(payload),
            (Some(slot), None) => {
                let expected = &arrivals[slot].expected;
                expected.place.unpack(header.offset, payload, expected.combine)?;
            }
            _ => incoming.control = payload.to_vec(),
        }
        Ok(finish(incoming, arrivals))
    }

    /// The message whose payload can be read straight into place.
    fn direct(&self, arrivals: &Arrivals) -> Option<Slot> {
        let incoming = self.incoming.as_ref()?;
        let slot = incoming.slot?;
        let in_place = incoming.staging.is_some() || can_be_read_into(&arrivals[slot].expected);
        let least = if self.streams { TAIL_BYTES as u64 } else { MIN_DIRECT };
        (in_place && self.start == self.end && incoming.left() >= least).then_some(slot)
    }

    fn read_direct(&mut self, socket: BorrowedFd<'_>, arriving: &Arriving) -> Result<usize, Errno> {
        let incoming = self.incoming.as_mut().expect("a payload is under way");
        let place = &arriving.expected.place;
        let at = incoming.header.offset + u64::from(incoming.got);
        let mut slices = Vec::with_capacity(16);
        let left = incoming.left();
        let asked = match &mut incoming.staging {
            Some(staging) => {
                slices.push(IoSliceMut::new(&mut staging.bytes_mut()[incoming.got as usize..]));
                left
            }
            None => place.slices_mut(at..at + left, MAX_SLICES - 1, &mut slices),
        };
        if asked == left {
            slices.push(IoSliceMut::new(&mut self.ahead[..TAIL_BYTES]));
        }
        let bytes = receive(socket, &mut slices, &mut self.descriptors)?;
        drop(slices);
        let placed = (bytes as u64).min(asked);
        let got = incoming.got as usize;
        incoming.crc = match &incoming.staging {
            Some(staging) => checksum::append(incoming.crc, &staging.bytes()[got..got + placed as usize]),
            None => place.checksum(at..at + placed, incoming.crc),
        };
        incoming.got += placed as u32;
        (self.start, self.end) = (0, bytes - placed as usize);
        Ok(bytes)
    }

    fn read_ahead(&mut self, socket: BorrowedFd<'_>) -> Result<usize, Errno> {
        self.ahead.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        if self.ahead.is_empty() {
            self.ahead.resize(FEW_BYTES, 0);
        }
        let left = self.incoming.as_ref().map_or(0, Incoming::left) as usize;
        let wanted = if self.streams { left + TAIL_BYTES } else { AHEAD_BYTES };
        // Full of what makes no sense, it has no room: then nothing is read, which is taken for the end.
        let room = wanted.min(self.ahead.len() - self.end);
        let into = &mut self.ahead[self.end..self.end + room];
        let bytes = receive(socket, &mut [IoSliceMut::new(into)], &mut self.descriptors)?;
        self.end += bytes;
        if self.end == self.ahead.len() {
            // There is more than that: the next read takes it at once.
            self.ahead.resize(AHEAD_BYTES, 0);
        }
        Ok(bytes)
    }

    /// Takes apart what was read.
    fn parse(&mut self, arrivals: &mut Arrivals, out: &mut Vec<Received>) -> Result<(), LinkError> {
        loop {
            if self.incoming.is_none() && !self.parse_header(arrivals)? {
                return Ok(());
            }
            self.parse_payload(arrivals)?;
            let Some(incoming) = self.incoming.take_if(|i| i.left() == 0) else { return Ok(()) };
            incoming.header.check_payload(incoming.crc)?;
            out.push(finish(incoming, arrivals));
        }
    }

    fn parse_header(&mut self, arrivals: &Arrivals) -> Result<bool, LinkError> {
        let Some(bytes) = self.ahead[self.start..self.end].first_chunk::<HEADER_BYTES>() else {
            return Ok(false);
        };
        let (header, slot) = self.check_header(&bytes.clone(), arrivals)?;
        self.start += HEADER_BYTES;
        if let Some(slot) = slot {
            let long = u64::from(header.len) >= MIN_DIRECT;
            let expected = &arrivals[slot].expected;
            self.streams = long && (expected.place.gpu().is_some() || can_be_read_into(expected));
        }
        self.incoming = Some(Incoming::new(header, slot, arrivals)?);
        Ok(true)
    }

    /// A header that has its place here; and, of data, the message that it belongs to.
    fn check_header(
        &mut self,
        bytes: &[u8; HEADER_BYTES],
        arrivals: &Arrivals,
    ) -> Result<(Header, Option<Slot>), LinkError> {
        let header = Header::decode(bytes)?;
        header.check_fields()?;
        match header.kind {
            Kind::Hello => self.greeted = true,
            _ if !self.greeted => return Err(header.unexpected("it comes before the greeting").into()),
            Kind::Data => return Ok((header, Some(check_data(&header, arrivals)?))),
            _ => {}
        }
        Ok((header, None))
    }

    /// Moves what the buffer has of the payload to where it belongs.
    fn parse_payload(&mut self, arrivals: &Arrivals) -> Result<(), LinkError> {
        let incoming = self.incoming.as_mut().expect("a header was parsed");
        let mut len = incoming.left().min((self.end - self.start) as u64) as usize;
        if let Some(staging) = &mut incoming.staging {
            let got = incoming.got as usize;
            staging.bytes_mut()[got..got + len].copy_from_slice(&self.ahead[self.start..self.start + len]);
        } else if let Some(slot) = incoming.slot {
            let expected = &arrivals[slot].expected;
            if let Some(combine) = expected.combine {
                len -= len % combine.element_bytes();
            }
            let bytes = &self.ahead[self.start..self.start + len];
            let at = incoming.header.offset + u64::from(incoming.got);
            expected.place.unpack(at, bytes, expected.combine)?;
        } else {
            incoming.control.extend_from_slice(&self.ahead[self.start..self.start + len]);
        }
        incoming.crc = checksum::append(incoming.crc, &self.ahead[self.start..self.start + len]);
        incoming.got += len as u32;
        self.start += len;
        Ok(())
    }
}

/// Whether a message replaces what is there, in runs that are worth a slice of a system call.
fn can_be_read_into(expected: &Expected) -> bool {
    expected.combine.is_none() && expected.place.view().run_bytes() >= MIN_DIRECT_RUN
}

/// A part has to be the next one of a message that was announced.
fn check_data(header: &Header, arrivals: &Arrivals) -> Result<Slot, WireError> {
    let message = Message { job: header.job, tag: header.tag };
    let slot = arrivals.find(&message).ok_or_else(|| header.unexpected("nobody waits for it"))?;
    let arriving = &arrivals[slot];
    if header.offset != arriving.arrived || arriving.promised != arriving.arrived {
        return Err(header.unexpected("it is not the next part"));
    }
    check_extent(header, arriving)?;
    Ok(slot)
}

/// A part has to lie within its message, and hold whole elements where they are combined.
pub fn check_extent(header: &Header, arriving: &Arriving) -> Result<(), WireError> {
    let end = header.offset.checked_add(u64::from(header.len));
    if end.is_none_or(|end| end > arriving.expected.bytes) {
        return Err(header.unexpected("it is longer than the message"));
    }
    let element = arriving.expected.combine.map_or(1, |c| c.element_bytes() as u32);
    if !header.len.is_multiple_of(element) {
        return Err(header.unexpected("it ends inside an element"));
    }
    Ok(())
}

fn finish(incoming: Incoming, arrivals: &mut Arrivals) -> Received {
    let Some(slot) = incoming.slot else {
        return Received::Control { header: incoming.header, payload: incoming.control };
    };
    let arriving = &mut arrivals[slot];
    let message = arriving.message;
    arriving.arrived += u64::from(incoming.header.len);
    arriving.promised = arriving.arrived;
    let upto = arriving.arrived;
    let received = match incoming.staging {
        None => Received::Arrived { message, upto },
        Some(staging) => {
            let (expected, offset) = (arriving.expected.clone(), incoming.header.offset);
            Received::Staged { message, expected, staging, offset, upto }
        }
    };
    if upto == arriving.expected.bytes {
        arrivals.remove(slot);
    }
    received
}

fn receive(
    socket: BorrowedFd<'_>,
    slices: &mut [IoSliceMut<'_>],
    descriptors: &mut VecDeque<OwnedFd>,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, slices, &mut ancillary, flags)?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(found) = message {
            descriptors.extend(found);
        }
    }
    Ok(received.bytes)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::protect::{PREFIX_BYTES, Protect, Session, Side};

    /// What an inbox makes of so many beats that were written at once.
    fn read_beats(inbox: &mut Inbox, ends: &mut (UnixStream, UnixStream), beats: &[Vec<u8>]) {
        ends.0.write_all(&beats.concat()).unwrap();
        let (mut arrivals, mut out) = (Arrivals::default(), vec![]);
        while inbox.read(ends.1.as_fd(), &mut arrivals, &mut out).unwrap() {}
        assert_eq!(out.len(), beats.len());
    }

    fn beat() -> Vec<u8> {
        Header::bare(Kind::Beat, 0, 1).encode().to_vec()
    }

    /// Room grows with what comes, and goes when nothing does.
    fn makes_room_as_needed(inbox: &mut Inbox, mut made: impl FnMut() -> Vec<u8>) {
        inbox.greeted = true;
        let mut ends = UnixStream::pair().unwrap();
        ends.1.set_nonblocking(true).unwrap();
        assert_eq!(inbox.room_bytes(), 0, "nothing has come");
        for _ in 0..3 {
            read_beats(inbox, &mut ends, &[made(), made()]);
            assert!(inbox.room_bytes() <= 2 * FEW_BYTES, "{} B for two beats", inbox.room_bytes());
            let many: Vec<Vec<u8>> = (0..2000).map(|_| made()).collect();
            read_beats(inbox, &mut ends, &many);
            assert!(inbox.room_bytes() >= AHEAD_BYTES, "{} B where much comes", inbox.room_bytes());
            inbox.rest();
            assert_eq!(inbox.room_bytes(), 0, "it rests");
        }
        // Not in the middle of a frame, or of a record.
        let frame = made();
        ends.0.write_all(&frame[..10]).unwrap();
        let (mut arrivals, mut out) = (Arrivals::default(), vec![]);
        while inbox.read(ends.1.as_fd(), &mut arrivals, &mut out).unwrap() {}
        inbox.rest();
        ends.0.write_all(&frame[10..]).unwrap();
        while inbox.read(ends.1.as_fd(), &mut arrivals, &mut out).unwrap() {}
        assert_eq!(out.len(), 1);
    }

    #[test]
    fn idle_connections_keep_no_room() {
        makes_room_as_needed(&mut Inbox::new(), beat);
        let end = |side| Session::new(Protect::Encrypt, [1; 32], side).ends().unwrap();
        let (mut sealer, _) = end(Side::Dialer);
        let mut protected = Inbox::new();
        protected.protect(end(Side::Listener).1);
        makes_room_as_needed(&mut protected, || {
            let mut record = [&[0; PREFIX_BYTES][..], &beat()].concat();
            sealer.seal(&mut record);
            record
        });
    }
}
