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
//! Of many small messages only the last is acknowledged, so that they cost a frame each and not two.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::io::ErrorKind;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crossmesh_cuda::Gpu;
use rustc_hash::FxHashSet;

use super::inbox::Arrivals;
use super::outbox::Outbox;
use super::{Event, Expected, LinkError, Message};
use crate::memory::moving::Moving;
use crate::memory::place::Lent;
use crate::memory::{Memory, Place};
use crate::view::{Outer, View};
use crate::wake::Waker;
use crate::wire::{Header, Kind, WireError};

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
const WINDOW_OFFERS: usize = 1024;
/// What is copied before the link looks at its socket again.
const STEP_BYTES: u64 = 512 << 10;
/// Segments a peer may register; a rank has one for each memory it starts programs with.
const MAX_SEGMENTS: u32 = 4096;

/// A part to be copied.
struct Pull {
    message: Message,
    from: Lent,
    next: u64,
    end: u64,
    /// Where a message goes that was offered in one part. Of others, the arrivals know.
    whole: Option<Expected>,
    /// Under way, where a device copies it.
    moving: Option<Moving>,
}

/// A part that the peer may read.
struct Offered {
    message: Message,
    part: Range<u64>,
}

#[derive(Default)]
pub struct Shm {
    /// Ours that the peer knows, by id.
    shared: Vec<Arc<Memory>>,
    /// The peer's, by id.
    mapped: Vec<Arc<Memory>>,
    pulls: VecDeque<Pull>,
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
        // One allocation: of many small messages this is a good part of what they cost.
        let mut payload = Vec::with_capacity(4 + 8 * (3 + 2 * from.view().outer().len()));
        payload.extend_from_slice(&segment.to_le_bytes());
        let mut push = |value: u64| payload.extend_from_slice(&value.to_le_bytes());
        push(part.end - part.start);
        push(from.view().base());
        push(from.view().run_bytes());
        for outer in from.view().outer() {
            push(outer.count);
            push(outer.stride);
        }
        let header = Header::of(Kind::Offer, message.job, message.tag, part.start, &payload);
        outbox.push_control(header, payload, None);
        self.offered_bytes += part.end - part.start;
        self.offered.push_back(Offered { message, part });
        Ok(())
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
        // Looked up once: with many small messages the table is larger than a cache.
        let Entry::Occupied(mut entry) = arrivals.entry(message) else {
            return Err(unexpected(header, "nobody waits for it").into());
        };
        let arriving = entry.get_mut();
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
        arriving.promised = end;
        let whole = header.offset == 0 && end == arriving.expected.bytes;
        let whole = whole.then(|| entry.remove().expected);
        let from = lent_by_peer(&Place { memory: segment, view });
        self.pulls.push_back(Pull { message, from, next: header.offset, end, whole, moving: None });
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
        let (mut budget, mut taken) = (STEP_BYTES, None);
        while budget > 0
            && let Some(pull) = self.pulls.front_mut()
        {
            let message = pull.message;
            let parts = || arrivals.get(&message).map(|arriving| &arriving.expected);
            let expected = match pull.whole.as_ref().or_else(parts) {
                Some(expected) => expected,
                None => {
                    self.pulls.pop_front(); // its job was given up
                    continue;
                }
            };
            let mut step = (pull.end - pull.next).min(budget.next_multiple_of(64));
            match &mut pull.moving {
                Some(moving) => {
                    if !moving.is_done()? {
                        break;
                    }
                    step = pull.end - pull.next;
                }
                None if is_on_device(&pull.from, expected) => break, // as many as may are under way
                None => {
                    let part = pull.next..pull.next + step;
                    expected.place.copy_from(&pull.from, part, expected.combine);
                    budget = budget.saturating_sub(step);
                }
            }
            pull.next += step;
            let (upto, done) = (pull.next, pull.next == pull.end);
            if pull.whole.is_none() {
                note_arrived(arrivals, message, upto);
            }
            events.push(Event::Arrived { message, upto });
            if done {
                taken = Some(Header { offset: upto, ..Header::bare(Kind::Taken, message.job, message.tag) });
                self.pulls.pop_front();
            }
        }
        if let Some(last) = taken {
            outbox.push_control(last, vec![], None);
        }
        self.start_moving(arrivals, waker)
    }

    /// Lets devices begin with what they copy, several parts at a time.
    fn start_moving(&mut self, arrivals: &Arrivals, waker: Option<&Waker>) -> Result<(), LinkError> {
        for pull in self.pulls.iter_mut().take(MAX_MOVING).filter(|pull| pull.moving.is_none()) {
            let parts = || arrivals.get(&pull.message).map(|arriving| &arriving.expected);
            let Some(expected) = pull.whole.as_ref().or_else(parts) else { continue };
            if is_on_device(&pull.from, expected) {
                let part = pull.next..pull.end;
                pull.moving = Some(Moving::copy(&pull.from, &expected.place, part, expected.combine, waker)?);
            }
        }
        Ok(())
    }
}

/// Whether a device has to copy it.
fn is_on_device(from: &Lent, expected: &Expected) -> bool {
    from.gpu().is_some() || expected.place.gpu().is_some()
}

#[expect(unsafe_code, reason = "nobody in this process can write to a peer's segment")]
fn lent_by_peer(place: &Place) -> Lent {
    // SAFETY: a peer's segment is mapped to read, by this link alone.
    unsafe { Lent::of(place) }.clone()
}

fn note_arrived(arrivals: &mut Arrivals, message: Message, upto: u64) {
    let Some(arriving) = arrivals.get_mut(&message) else { return };
    arriving.arrived = upto;
    if upto == arriving.expected.bytes {
        arrivals.remove(&message);
    }
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
