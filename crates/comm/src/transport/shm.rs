//! Shared memory beside a Unix socket: the receiver copies straight out of the sender's segment into its own memory.
//!
//! ```text
//! sender                                      receiver
//! Segment 0, with its descriptor    -->       maps it, to read
//! Offer: message, part, where       -->       copies the part
//! Offer, Offer ...                  -->       copies those, in their order
//!                                   <--       Taken: that part and all before it; the sender may reuse the memory
//! ```
//!
//! Memory of a GPU goes the same way, to a peer that has said that it maps memory of that GPU: its descriptor is the driver's, the receiver maps
//! it, and a kernel copies. To a peer that has not, it goes through the socket.
//!
//! Of many small messages each would cost a frame. Those that are whole and one run of bytes are offered together, as many as come until
//! the socket is written to, and of all that were copied in a row only the last is acknowledged:
//!
//! ```text
//! Offers: [message, bytes, where], ...    -->   16 bytes and one look-up each
//!                                         <--   Taken: the last of them
//! ```

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crossmesh_cuda::Gpu;
use rustc_hash::FxHashSet;

use super::arrivals::{ALL, Arrivals, Slot};
use super::outbox::Outbox;
use super::{Event, Expected, LinkError, Message};
use crate::memory::moving::Moving;
use crate::memory::place::{Lent, SideBySide};
use crate::memory::{Memory, Place};
use crate::view::{Outer, View};
use crate::wake::Waker;
use crate::wire::{Header, Kind, MAX_OFFERS_PER_FRAME, OFFER_RECORD_BYTES, WireError};

/// Messages up to this size travel inside the socket: two copies and two checksums more, a frame less.
const INLINE_BYTES: u64 = 2 << 10;
/// One that is alone does up to this size: nobody waits for it to be taken, which costs two more wakes. Of many together only the last
/// is acknowledged, and copies count.
const INLINE_ALONE_BYTES: u64 = 8 << 10;
/// What may be offered and not yet taken.
const WINDOW_BYTES: u64 = 8 << 20;
const DEVICE_WINDOW_BYTES: u64 = 64 << 20;
/// Parts that a device copies at a time.
const MAX_MOVING: usize = 16;
const WINDOW_OFFERS: usize = MAX_OFFERS_PER_FRAME;
/// What is copied before the link looks at its socket again.
const STEP_BYTES: u64 = 512 << 10;
/// Segments a peer may register; a rank has one for each memory it starts programs with.
const MAX_SEGMENTS: u32 = 4096;

/// Where a part lies.
enum Source {
    Place(Lent),
    /// The whole message is a run of bytes of one of the peer's segments. To know the memory by its number costs nothing; of many small
    /// messages, counting who has it would cost as much as copying them.
    Run {
        segment: u32,
        start: u64,
    },
}

/// A part to be copied.
struct Pull {
    message: Message,
    from: Source,
    /// The message that it is of, which stands there until all of it is copied.
    slot: Slot,
    next: u64,
    end: u64,
    /// Under way, where a device copies it.
    moving: Option<Box<Moving>>,
}

/// A part that the peer may read.
struct Offered {
    message: Message,
    part: Range<u64>,
}

/// Offers that go in one frame: of one job, in one segment.
#[derive(Default)]
struct Together {
    job: u32,
    segment: u32,
    /// As they are written.
    records: Vec<u8>,
}

#[derive(Default)]
pub struct Shm {
    /// Ours that the peer knows, by id.
    shared: Vec<Arc<Memory>>,
    /// The peer's, by id.
    mapped: Vec<Arc<Memory>>,
    pulls: VecDeque<Pull>,
    /// Not handed to the socket yet.
    together: Together,
    /// Offered and not taken, in order; receivers take parts in the order in which they were offered.
    offered: VecDeque<Offered>,
    offered_bytes: u64,
    /// Ours, once a message had a place there.
    gpu: Option<Arc<Gpu>>,
    /// The one that the peer maps memory of.
    peer_maps: Option<[u8; 16]>,
    /// Messages from a device that began to go through the socket, before the peer said what it maps.
    through_socket: FxHashSet<Message>,
    /// What is offered lies on a device.
    offers_device: bool,
}

impl Shm {
    pub fn has_room(&self) -> bool {
        let window = if self.offers_device { DEVICE_WINDOW_BYTES } else { WINDOW_BYTES };
        self.offered_bytes < window && self.offered.len() < WINDOW_OFFERS
    }

    pub fn has_work(&self) -> bool {
        self.pulls.front().is_some_and(|pull| pull.moving.is_none())
    }

    /// Whether what is next is being copied by a device.
    pub fn awaits_device(&self) -> bool {
        self.pulls.front().is_some_and(|pull| pull.moving.is_some())
    }

    pub fn offers_device(&self) -> bool {
        self.offers_device
    }

    /// From now on memory of this GPU is mapped, and the peer hears of it.
    pub fn set_gpu(&mut self, gpu: &Arc<Gpu>, outbox: &mut Outbox) {
        let uuid = gpu.card().uuid;
        outbox.push_control(Header::of(Kind::Maps, 0, 0, 0, &uuid), uuid.to_vec(), None);
        self.gpu = Some(gpu.clone());
    }

    pub fn on_maps(&mut self, header: &Header, payload: &[u8]) -> Result<(), LinkError> {
        let uuid = payload.try_into().map_err(|_| unexpected(header, "it names no GPU"))?;
        if self.peer_maps.replace(uuid).is_some() {
            return Err(unexpected(header, "it has said so already").into());
        }
        Ok(())
    }

    /// Whether memory on a device goes to the peer by its descriptor. All parts of a message go one way, whatever the peer says meanwhile.
    fn takes_device(&mut self, message: Message, part: &Range<u64>, from: &Lent) -> bool {
        let maps = |gpu: &Arc<Gpu>| self.peer_maps == Some(gpu.card().uuid);
        let mapped = from.memory().device_handle().is_some() && from.gpu().is_some_and(maps);
        let socket = if part.start == 0 { !mapped } else { self.through_socket.contains(&message) };
        if socket && part.end < from.bytes() {
            self.through_socket.insert(message);
        } else {
            self.through_socket.remove(&message);
        }
        !socket
    }

    /// Whether a part of this place is offered rather than sent, given whether it would be the only one on its way. A small message, or one
    /// of no bytes at all, must not overtake an offered one. All parts of a message go one way: an offer would overtake data.
    pub fn takes(&mut self, message: Message, part: &Range<u64>, from: &Lent, alone: bool) -> bool {
        self.offers_device = from.gpu().is_some() && self.takes_device(message, part, from);
        if from.gpu().is_some() {
            return self.offers_device;
        }
        let inline = if alone { INLINE_ALONE_BYTES } else { INLINE_BYTES };
        let is_whole = *part == (0..from.bytes());
        let small = is_whole && from.bytes() <= inline && self.offered.is_empty();
        from.memory().segment().is_some() && !small
    }

    pub fn offer(
        &mut self,
        message: Message,
        part: Range<u64>,
        from: &Lent,
        outbox: &mut Outbox,
    ) -> Result<(), LinkError> {
        let segment = self.segment_of(from.memory(), outbox)?;
        let (len, view) = (part.end - part.start, from.view());
        let is_whole = part.start == 0 && part.end == view.bytes();
        if is_whole && view.outer().is_empty() && from.gpu().is_none() && len <= u64::from(u32::MAX) {
            self.offer_together(message, segment, len as u32, view.base(), outbox);
        } else {
            self.say_offers(outbox); // parts are offered in their order
            offer_part(message, segment, &part, view, outbox);
        }
        self.offered_bytes += len;
        self.offered.push_back(Offered { message, part });
        Ok(())
    }

    /// Adds a whole message to those that are offered together.
    fn offer_together(
        &mut self,
        message: Message,
        segment: u32,
        bytes: u32,
        start: u64,
        outbox: &mut Outbox,
    ) {
        let is_full = self.together.records.len() == MAX_OFFERS_PER_FRAME * OFFER_RECORD_BYTES;
        if is_full || (self.together.job, self.together.segment) != (message.job, segment) {
            self.say_offers(outbox);
            (self.together.job, self.together.segment) = (message.job, segment);
        }
        let mut record = [0; OFFER_RECORD_BYTES];
        record[0..4].copy_from_slice(&message.tag.to_le_bytes());
        record[4..8].copy_from_slice(&bytes.to_le_bytes());
        record[8..16].copy_from_slice(&start.to_le_bytes());
        self.together.records.extend_from_slice(&record);
    }

    /// Whether there are offers that `say_offers` has to hand over.
    pub fn has_unsaid(&self) -> bool {
        !self.together.records.is_empty()
    }

    /// Hands what is offered together to the socket.
    pub fn say_offers(&mut self, outbox: &mut Outbox) {
        if self.has_unsaid() {
            let Together { job, segment, records } = &mut self.together;
            let payload = std::mem::take(records);
            let header = Header::of(Kind::Offers, *job, *segment, 0, &payload);
            outbox.push_control(header, payload, None);
        }
    }

    /// Forgets what was not handed over.
    pub fn drop_unsaid(&mut self) {
        self.together.records.clear();
    }

    /// The id under which the peer knows a memory; the first time, it is handed over.
    fn segment_of(&mut self, memory: &Arc<Memory>, outbox: &mut Outbox) -> Result<u32, LinkError> {
        if let Some(known) = self.shared.iter().position(|m| Arc::ptr_eq(m, memory)) {
            return Ok(known as u32);
        }
        let shared = memory.segment().or_else(|| memory.device_handle());
        let descriptor = shared.expect("only shared memory is offered").try_clone_to_owned()?;
        let id = self.shared.len() as u32;
        self.shared.push(memory.clone());
        let payload = memory.gpu().map_or(vec![], |_| memory.len().to_le_bytes().to_vec());
        outbox.push_control(Header::of(Kind::Segment, 0, id, 0, &payload), payload, Some(descriptor));
        Ok(id)
    }

    pub fn on_segment(
        &mut self,
        header: &Header,
        payload: &[u8],
        descriptor: Option<OwnedFd>,
    ) -> Result<(), LinkError> {
        let descriptor = descriptor.ok_or_else(|| unexpected(header, "no descriptor came with it"))?;
        if header.tag as usize != self.mapped.len() || header.tag >= MAX_SEGMENTS {
            return Err(unexpected(header, "segments are numbered in order").into());
        }
        if !payload.is_empty() {
            let bytes = payload.try_into().map_err(|_| unexpected(header, "it has no length"))?;
            let gpu = self.gpu.as_ref().ok_or_else(|| unexpected(header, "no GPU is mapped here"))?;
            let mapped = Memory::of_peer_on_device(gpu, descriptor, u64::from_le_bytes(bytes))?;
            self.mapped.push(Arc::new(mapped));
            return Ok(());
        }
        let mapped = Memory::of_peer(descriptor).map_err(|error| match error.kind() {
            ErrorKind::InvalidData => unexpected(header, "its segment is none, or may shrink").into(),
            _ => LinkError::Io(error),
        })?;
        self.mapped.push(Arc::new(mapped));
        Ok(())
    }

    pub fn on_offer(
        &mut self,
        header: &Header,
        payload: &[u8],
        arrivals: &mut Arrivals,
    ) -> Result<(), LinkError> {
        let message = Message { job: header.job, tag: header.tag };
        let slot = arrivals.find(&message).ok_or_else(|| unexpected(header, "nobody waits for it"))?;
        let arriving = &mut arrivals[slot];
        let (segment, len, view) = self.parse_offer(header, payload)?;
        let end = header.offset.checked_add(len).filter(|end| *end <= arriving.expected.bytes);
        let end = end.ok_or_else(|| unexpected(header, "it is longer than the message"))?;
        if header.offset != arriving.promised || view.bytes() != arriving.expected.bytes {
            return Err(unexpected(header, "it is not the next part").into());
        }
        if len == 0 && arriving.expected.bytes > 0 {
            return Err(unexpected(header, "it offers nothing").into());
        }
        let element = arriving.expected.combine.map_or(1, |c| c.element_bytes() as u64);
        if len % element != 0 || view.run_bytes() % element != 0 {
            return Err(unexpected(header, "it ends inside an element").into());
        }
        let whole = header.offset == 0 && end == arriving.expected.bytes;
        arriving.promised = if whole { ALL } else { end };
        let from = Source::Place(lent_by_peer(&Place { memory: segment, view }));
        self.pulls.push_back(Pull { message, from, slot, next: header.offset, end, moving: None });
        Ok(())
    }

    fn parse_offer(&self, header: &Header, payload: &[u8]) -> Result<(Arc<Memory>, u64, View), WireError> {
        let bad = || unexpected(header, "it names no place");
        let (segment, rest) = payload.split_first_chunk::<4>().ok_or_else(bad)?;
        let segment = self.mapped.get(u32::from_le_bytes(*segment) as usize).ok_or_else(bad)?;
        let (words, odd) = rest.as_chunks::<8>();
        let [len, base, run, outer @ ..] = words else { return Err(bad()) };
        let [len, base, run] = [len, base, run].map(|word| u64::from_le_bytes(*word));
        let (pairs, single) = outer.as_chunks::<2>();
        let of_pair = |[count, stride]: &[[u8; 8]; 2]| Outer {
            count: u64::from_le_bytes(*count),
            stride: u64::from_le_bytes(*stride),
        };
        let outer: Vec<Outer> = pairs.iter().map(of_pair).collect();
        let view =
            View::from_parts(base, run, &outer, segment.len()).filter(|v| v.run_bytes() > 0 || len == 0);
        match (view, odd.is_empty() && single.is_empty()) {
            (Some(view), true) => Ok((segment.clone(), len, view)),
            _ => Err(bad()),
        }
    }

    /// Whole messages, each in one run.
    pub fn on_offers(
        &mut self,
        header: &Header,
        payload: &[u8],
        arrivals: &mut Arrivals,
    ) -> Result<(), LinkError> {
        let segment = self.mapped.get(header.tag as usize).filter(|segment| segment.gpu().is_none());
        let segment = segment.ok_or_else(|| unexpected(header, "it names no segment of the host"))?;
        let (records, odd) = payload.as_chunks::<OFFER_RECORD_BYTES>();
        if records.is_empty() || !odd.is_empty() {
            return Err(unexpected(header, "it is no list of offers").into());
        }
        for record in records {
            let word = |at: usize| u32::from_le_bytes(record[at..at + 4].try_into().expect("four bytes"));
            let (tag, bytes) = (word(0), u64::from(word(4)));
            let start = u64::from_le_bytes(record[8..16].try_into().expect("eight bytes"));
            let message = Message { job: header.job, tag };
            let bad = |why| WireError::Unexpected { kind: header.kind, job: header.job, tag, why };
            let slot = arrivals.find(&message).ok_or_else(|| bad("nobody waits for it"))?;
            let arriving = &mut arrivals[slot];
            if arriving.promised != 0 || arriving.expected.bytes != bytes {
                return Err(bad("it is not the whole message").into());
            }
            let view = View::from_parts(start, bytes, &[], segment.len());
            let view = view.ok_or_else(|| bad("it names no place"))?;
            arriving.promised = ALL;
            let from = match arriving.expected.place.gpu() {
                None => Source::Run { segment: header.tag, start },
                Some(_) => Source::Place(lent_by_peer(&Place { memory: segment.clone(), view })),
            };
            self.pulls.push_back(Pull { message, from, slot, next: 0, end: bytes, moving: None });
        }
        Ok(())
    }

    pub fn on_taken(&mut self, header: &Header, events: &mut Vec<Event>) -> Result<(), LinkError> {
        let said = (Message { job: header.job, tag: header.tag }, header.offset);
        let last = self.offered.iter().position(|offered| (offered.message, offered.part.end) == said);
        let last = last.ok_or_else(|| unexpected(header, "it was not offered, or taken before"))?;
        for Offered { message, part } in self.offered.drain(..=last) {
            self.offered_bytes -= part.end - part.start;
            events.push(Event::Sent { message, upto: part.end });
        }
        Ok(())
    }

    /// Copies a step's worth of what was offered.
    pub fn pull(
        &mut self,
        arrivals: &mut Arrivals,
        outbox: &mut Outbox,
        waker: Option<&Waker>,
        events: &mut Vec<Event>,
    ) -> Result<(), LinkError> {
        self.start_moving(arrivals, waker)?;
        let (mut done, mut budget) = self.pull_whole(arrivals, events);
        let mut taken = done.checked_sub(1).map(|last| taken_of(&self.pulls[last]));
        let mut result: Result<(), LinkError> = Ok(());
        for pull in self.pulls.iter_mut().skip(done) {
            if budget == 0 {
                break;
            }
            let expected = &arrivals[pull.slot].expected;
            let mut part = pull.next..pull.next + (pull.end - pull.next).min(budget.next_multiple_of(64));
            match (&mut pull.moving, &pull.from) {
                (Some(moving), _) => {
                    match moving.is_done() {
                        Ok(true) => part.end = pull.end,
                        Ok(false) => break,
                        Err(error) => {
                            result = Err(error.into());
                            break;
                        }
                    };
                }
                (None, from) if is_on_device(from, expected) => break, // as many as may are under way
                (None, from) => {
                    match from {
                        Source::Place(from) => expected.place.copy_from(from, part.clone(), expected.combine),
                        Source::Run { segment, start } => {
                            let segment = &self.mapped[*segment as usize];
                            expected.place.copy_from_peer(segment, *start, part.clone(), expected.combine);
                        }
                    }
                    budget = budget.saturating_sub(part.end - part.start);
                }
            }
            let upto = part.end;
            pull.next = upto;
            arrivals[pull.slot].arrived = upto;
            events.push(Event::Arrived { message: pull.message, upto });
            if upto == pull.end {
                taken = Some(taken_of(pull));
                done += 1;
            }
        }
        // To let go of a place is an atomic operation, which waits for all that was copied before to be written. So they go together.
        for pull in self.pulls.drain(..done) {
            if pull.end == arrivals[pull.slot].expected.bytes {
                arrivals.remove(pull.slot);
            }
        }
        result?;
        if let Some(last) = taken {
            outbox.push_control(last, vec![], None);
        }
        self.start_moving(arrivals, waker)
    }

    /// Copies the first messages, as long as they are whole and no more than runs of bytes: how many, and what is left of the step.
    fn pull_whole(&self, arrivals: &Arrivals, events: &mut Vec<Event>) -> (usize, u64) {
        let (mut done, mut budget, mut copies) = (0, STEP_BYTES, SideBySide::new());
        for pull in &self.pulls {
            let Source::Run { segment, start } = &pull.from else { break };
            let expected = &arrivals[pull.slot].expected;
            let is_plain = expected.combine.is_none() && expected.place.view().outer().is_empty();
            if !is_plain || pull.next > 0 || pull.end > budget || budget == 0 {
                break;
            }
            copies.add(&expected.place, &self.mapped[*segment as usize], *start);
            events.push(Event::Arrived { message: pull.message, upto: pull.end });
            (done, budget) = (done + 1, budget - pull.end);
        }
        copies.finish();
        (done, budget)
    }

    /// Lets devices begin with what they copy, several parts at a time.
    fn start_moving(&mut self, arrivals: &Arrivals, waker: Option<&Waker>) -> Result<(), LinkError> {
        for pull in self.pulls.iter_mut().take(MAX_MOVING).filter(|pull| pull.moving.is_none()) {
            let expected = &arrivals[pull.slot].expected;
            if let Source::Place(from) = &pull.from
                && is_on_device(&pull.from, expected)
            {
                let part = pull.next..pull.end;
                let moving = Moving::copy(from, &expected.place, part, expected.combine, waker)?;
                pull.moving = Some(Box::new(moving));
            }
        }
        Ok(())
    }
}

/// Offers a part, of a place of any form, by a frame of its own.
fn offer_part(message: Message, segment: u32, part: &Range<u64>, view: &View, outbox: &mut Outbox) {
    let mut payload = Vec::with_capacity(4 + 8 * (3 + 2 * view.outer().len()));
    payload.extend_from_slice(&segment.to_le_bytes());
    let mut push = |value: u64| payload.extend_from_slice(&value.to_le_bytes());
    push(part.end - part.start);
    push(view.base());
    push(view.run_bytes());
    for outer in view.outer() {
        push(outer.count);
        push(outer.stride);
    }
    let header = Header::of(Kind::Offer, message.job, message.tag, part.start, &payload);
    outbox.push_control(header, payload, None);
}

/// That a part has been copied, and all before it.
fn taken_of(pull: &Pull) -> Header {
    Header { offset: pull.end, ..Header::bare(Kind::Taken, pull.message.job, pull.message.tag) }
}

/// Whether a device has to copy it.
fn is_on_device(from: &Source, expected: &Expected) -> bool {
    expected.place.gpu().is_some() || matches!(from, Source::Place(from) if from.gpu().is_some())
}

#[expect(unsafe_code, reason = "nobody in this process can write to a peer's segment")]
fn lent_by_peer(place: &Place) -> Lent {
    // SAFETY: a peer's segment is mapped to read, by this link alone.
    unsafe { Lent::of(place) }.clone()
}

fn unexpected(header: &Header, why: &'static str) -> WireError {
    WireError::Unexpected { kind: header.kind, job: header.job, tag: header.tag, why }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lent(memory: &Arc<Memory>, bytes: u64) -> Lent {
        let view = View::from_parts(0, bytes, &[], memory.len()).expect("it lies in the memory");
        lent_by_peer(&Place { memory: memory.clone(), view })
    }

    #[test]
    fn only_whole_small_messages_travel_inside_the_socket() {
        let memory = Arc::new(Memory::shared(64 << 10).unwrap());
        let mut shm = Shm::default();
        let message = Message { job: 0, tag: 0 };
        let offers = |shm: &mut Shm, part: Range<u64>, bytes: u64, alone: bool| {
            shm.takes(message, &part, &lent(&memory, bytes), alone)
        };
        assert!(!offers(&mut shm, 0..2048, 2048, false) && offers(&mut shm, 0..2049, 2049, false));
        assert!(!offers(&mut shm, 0..8192, 8192, true) && offers(&mut shm, 0..8193, 8193, true));
        // The second part might go the other way, and an offer overtakes data.
        assert!(offers(&mut shm, 0..4096, 8192, true) && offers(&mut shm, 4096..8192, 8192, true));
        // Behind an offer everything is offered, until it is taken.
        shm.offer(message, 0..9000, &lent(&memory, 9000), &mut Outbox::default()).unwrap();
        assert!(offers(&mut shm, 0..64, 64, true));
        let taken = Header { offset: 9000, ..Header::bare(Kind::Taken, 0, 0) };
        shm.on_taken(&taken, &mut vec![]).unwrap();
        assert!(!offers(&mut shm, 0..64, 64, true));
        // What no peer can map is sent as it is.
        let private = Arc::new(Memory::private(64 << 10).unwrap());
        assert!(!shm.takes(message, &(0..9000), &lent(&private, 9000), false));
    }
}
