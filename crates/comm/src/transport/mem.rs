//! Links between threads of one process, for tests and small runs: a queue each way, and an event descriptor to wait on.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crossmesh_core::id::Rank;
use rustix::event::{EventfdFlags, eventfd};

use super::arrivals::Arrivals;
use super::{Control, Event, Expected, Link, LinkError, Message};
use crate::memory::place::Lent;
use crate::wire::{Kind, WireError};

/// Bytes that may wait in a queue.
const ROOM_BYTES: usize = 1 << 20;
const MAX_PART_BYTES: u64 = 256 << 10;

enum Packet {
    Part { message: Message, offset: u64, bytes: Vec<u8> },
    Ready { job: u32, tags: Vec<u32> },
    Control(Control),
}

/// One direction.
#[derive(Default)]
struct Queue {
    packets: VecDeque<Packet>,
    bytes: usize,
    /// The sender is gone, or will send no more.
    closed: bool,
}

struct End {
    queue: Mutex<Queue>,
    /// Signalled when the queue of this end has something, or the other's has room.
    signal: OwnedFd,
}

impl End {
    fn new() -> Result<Arc<Self>, LinkError> {
        let signal = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Arc::new(Self { queue: Mutex::default(), signal }))
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // A full counter is a signal already.
        let _already = rustix::io::write(&self.signal, &1u64.to_ne_bytes());
    }

    fn rest(&self) {
        let _nothing = rustix::io::read(&self.signal, &mut [0u8; 8]);
    }
}

/// A rank's links to others.
pub type Links = Vec<(Rank, Box<dyn Link>)>;

/// For so many ranks, the links of each to all others.
pub fn mesh(ranks: usize) -> Result<Vec<Links>, LinkError> {
    let mut links: Vec<Links> = (0..ranks).map(|_| vec![]).collect();
    for (a, b) in (0..ranks).flat_map(|b| (0..b).map(move |a| (a, b))) {
        let (here, there) = MemLink::pair()?;
        links[a].push((Rank::at(b), Box::new(here)));
        links[b].push((Rank::at(a), Box::new(there)));
    }
    Ok(links)
}

pub struct MemLink {
    /// What comes in waits at `mine`, what goes out at `theirs`.
    mine: Arc<End>,
    theirs: Arc<End>,
    arrivals: Arrivals,
    sent: Vec<Event>,
    /// Packets that came.
    heard: u64,
    /// What went wrong in a call that cannot say so.
    failed: Option<LinkError>,
}

impl MemLink {
    /// Both ends of a connection.
    pub fn pair() -> Result<(Self, Self), LinkError> {
        let (a, b) = (End::new()?, End::new()?);
        let link = |mine, theirs| Self {
            mine,
            theirs,
            arrivals: Arrivals::default(),
            sent: vec![],
            heard: 0,
            failed: None,
        };
        Ok((link(a.clone(), b.clone()), link(b, a)))
    }

    fn push(&self, packet: Packet) {
        let mut queue = self.theirs.lock();
        if let Packet::Part { bytes, .. } = &packet {
            queue.bytes += bytes.len();
        }
        queue.packets.push_back(packet);
        drop(queue);
        self.theirs.wake();
    }

    fn take_part(&mut self, message: Message, offset: u64, bytes: &[u8]) -> Result<Event, LinkError> {
        let unexpected = WireError::Unexpected {
            kind: Kind::Data,
            job: message.job,
            tag: message.tag,
            why: "it is not the next part of a message that somebody waits for",
        };
        let upto = offset + bytes.len() as u64;
        let Some(slot) = self.arrivals.find(&message) else { return Err(unexpected.into()) };
        let arriving = &mut self.arrivals[slot];
        if arriving.arrived != offset || upto > arriving.expected.bytes {
            return Err(unexpected.into());
        }
        arriving.expected.place.unpack(offset, bytes, arriving.expected.combine)?;
        arriving.arrived = upto;
        if upto == arriving.expected.bytes {
            self.arrivals.remove(slot);
        }
        Ok(Event::Arrived { message, upto })
    }
}

impl Drop for MemLink {
    fn drop(&mut self) {
        self.theirs.lock().closed = true;
        self.theirs.wake();
    }
}

impl Link for MemLink {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.mine.signal.as_fd())
    }

    fn wants_write(&self) -> bool {
        false
    }

    fn heard(&self) -> Option<u64> {
        Some(self.heard)
    }

    fn has_work(&self) -> bool {
        !self.sent.is_empty() || self.failed.is_some()
    }

    fn expect(&mut self, message: Message, expected: Expected) {
        self.arrivals.insert(message, expected);
    }

    fn announce(&mut self, job: u32, tags: &[u32]) {
        self.push(Packet::Ready { job, tags: tags.to_vec() });
    }

    fn has_room(&self) -> bool {
        self.theirs.lock().bytes < ROOM_BYTES
    }

    fn part_bytes(&self, chunk_bytes: u64) -> u64 {
        (chunk_bytes / 64 * 64).clamp(64, MAX_PART_BYTES)
    }

    fn send(&mut self, message: Message, part: Range<u64>, from: &Lent) {
        let mut bytes = Vec::with_capacity((part.end - part.start) as usize);
        if let Err(error) = from.pack(part.clone(), &mut bytes) {
            self.failed = Some(error.into());
            return;
        }
        self.push(Packet::Part { message, offset: part.start, bytes });
        self.sent.push(Event::Sent { message, upto: part.end });
    }

    fn control(&mut self, control: Control) {
        self.push(Packet::Control(control));
    }

    fn drop_data(&mut self) {}

    fn progress(&mut self, events: &mut Vec<Event>) -> Result<(), LinkError> {
        self.flush(events)?;
        self.mine.rest();
        let (packets, closed) = {
            let mut queue = self.mine.lock();
            queue.bytes = 0;
            (std::mem::take(&mut queue.packets), queue.closed)
        };
        self.heard += packets.len() as u64;
        let freed = packets.iter().any(|p| matches!(p, Packet::Part { .. }));
        for packet in packets {
            events.push(match packet {
                Packet::Part { message, offset, bytes } => self.take_part(message, offset, &bytes)?,
                Packet::Ready { job, tags } => Event::Ready { job, tags },
                Packet::Control(Control::Beat { waits_for }) => Event::Beat { waits_for },
                Packet::Control(Control::Abort { culprit, reason }) => Event::Abort { culprit, reason },
                Packet::Control(Control::Bye) => Event::Bye,
            });
        }
        if freed {
            self.theirs.wake();
        }
        if closed { Err(LinkError::Closed) } else { Ok(()) }
    }

    fn flush(&mut self, events: &mut Vec<Event>) -> Result<(), LinkError> {
        events.append(&mut self.sent);
        self.failed.take().map_or(Ok(()), Err)
    }

    fn shutdown(&mut self) {
        self.theirs.lock().closed = true;
        self.theirs.wake();
    }
}
