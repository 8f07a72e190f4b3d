//! Records on their way into a protected connection and out of it.
//!
//! ```text
//! outbox: frames, words before data --seal, in the order of their numbers--> records --writev--> socket
//! socket --read--> buffer: records, whole ones --open--> frames --> in place
//! ```
//!
//! A frame gets its number, and is copied, when it is next in line for the socket: up to then words may overtake data. On the
//! other side nothing reaches a tensor before its record is known to be genuine. The copy on both sides stays in a cache.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use super::Event;
use crate::protect::{Opener, PREFIX_BYTES, Prefix, Sealer};
use crate::wire::WireError;

/// Sealed and not yet written: enough for one system call to fill a socket's buffer.
const SEALED_BYTES: usize = 256 << 10;
const MAX_SLICES: usize = 64;
/// Buffers that are kept for the next records.
const MAX_SPARE: usize = 4;
/// What is read at once while no longer record is under way: where much comes, and where little does.
const READ_BYTES: usize = 64 << 10;
const FEW_BYTES: usize = 4 << 10;

struct Record {
    bytes: Vec<u8>,
    sent: Option<Event>,
    /// Of its payload, where it counts as data.
    data_bytes: u64,
}

/// What was protected and is not written yet.
pub struct Sealed {
    sealer: Sealer,
    records: VecDeque<Record>,
    /// Of the first record.
    written: usize,
    bytes: usize,
    spare: Vec<Vec<u8>>,
}

impl Sealed {
    pub fn new(sealer: Sealer) -> Self {
        Self { sealer, records: VecDeque::new(), written: 0, bytes: 0, spare: vec![] }
    }

    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    pub fn has_room(&self) -> bool {
        self.bytes < SEALED_BYTES
    }

    /// Protects what `fill` appends, a frame.
    pub fn push(&mut self, sent: Option<Event>, payload_bytes: u64, fill: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = self.spare.pop().unwrap_or_default();
        bytes.resize(PREFIX_BYTES, 0);
        fill(&mut bytes);
        self.sealer.seal(&mut bytes);
        self.bytes += bytes.len();
        let data_bytes = if sent.is_some() { payload_bytes } else { 0 };
        self.records.push_back(Record { bytes, sent, data_bytes });
    }

    pub fn write_once(&self, socket: BorrowedFd<'_>) -> Result<usize, Errno> {
        let skip = |i: usize| if i == 0 { self.written } else { 0 };
        let parts = self.records.iter().take(MAX_SLICES).enumerate();
        let slices: Vec<IoSlice<'_>> = parts.map(|(i, r)| IoSlice::new(&r.bytes[skip(i)..])).collect();
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(socket, &slices, &mut SendAncillaryBuffer::default(), flags)
    }

    /// Notes what was written. Returns how much data that ended.
    pub fn advance(&mut self, mut bytes: usize, events: &mut Vec<Event>) -> u64 {
        let mut data_bytes = 0;
        self.bytes -= bytes;
        while let Some(first) = self.records.front()
            && bytes >= first.bytes.len() - self.written
        {
            bytes -= first.bytes.len() - self.written;
            self.written = 0;
            let Some(Record { bytes: mut buffer, sent, data_bytes: data }) = self.records.pop_front() else {
                break;
            };
            data_bytes += data;
            events.extend(sent);
            if self.spare.len() < MAX_SPARE {
                buffer.clear();
                self.spare.push(buffer);
            }
        }
        self.written += bytes;
        data_bytes
    }
}

/// What was read of a protected connection.
pub struct Records {
    opener: Opener,
    /// Empty while nothing has come for long.
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// How long the record is that comes next, once its prefix is there.
    wanted: Option<usize>,
}

impl Records {
    pub fn new(opener: Opener) -> Self {
        Self { opener, buffer: vec![], start: 0, end: 0, wanted: None }
    }

    /// Nothing has come for long: the room for it is given back.
    pub fn rest(&mut self) {
        if self.start == self.end {
            (self.buffer, self.start, self.end) = (vec![], 0, 0);
        }
    }

    #[cfg(test)]
    pub fn room_bytes(&self) -> usize {
        self.buffer.capacity()
    }

    /// How much is missing of the record under way.
    pub fn bytes_left(&self) -> u64 {
        self.wanted.map_or(0, |wanted| (wanted - (self.end - self.start)) as u64)
    }

    /// Reads once, with room for the record under way.
    pub fn read(
        &mut self,
        receive: impl FnOnce(&mut [IoSliceMut<'_>]) -> Result<usize, Errno>,
    ) -> Result<usize, Errno> {
        // What filled the room there was may be followed by more.
        let usual = match self.buffer.len() {
            0 => FEW_BYTES,
            len if self.end == len => READ_BYTES,
            len => len,
        };
        self.buffer.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let room = self.wanted.map_or(0, |wanted| wanted + PREFIX_BYTES).max(usual);
        if self.buffer.len() < room {
            self.buffer.resize(room, 0);
        }
        let bytes = receive(&mut [IoSliceMut::new(&mut self.buffer[self.end..])])?;
        self.end += bytes;
        Ok(bytes)
    }

    /// The frame of the next record, if all of it is there.
    pub fn next(&mut self) -> Result<Option<&[u8]>, WireError> {
        let Some(prefix) = Prefix::parse(&self.buffer[self.start..self.end])? else {
            self.wanted = None;
            return Ok(None);
        };
        let (len, start) = (prefix.record_bytes(), self.start);
        if self.end - start < len {
            self.wanted = Some(len);
            return Ok(None);
        }
        let frame = self.opener.open(&prefix, &mut self.buffer[start..start + len])?;
        self.start += len;
        self.wanted = None;
        Ok(Some(frame))
    }
}
