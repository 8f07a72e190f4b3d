//! Any bytes into a live link: it answers with events or an error, never with a panic, and never takes more memory than
//! its bounds. `tests/fuzz_smoke.rs` runs this for a moment on stable, `fuzz/` for as long as one likes.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crossmesh_core::dtype::DType;
use crossmesh_core::id::Rank;
use crossmesh_core::layout::ReduceOp;
use crossmesh_core::region::{Region, Span};

use crate::combine::Combine;
use crate::memory::place::Lent;
use crate::memory::{Memory, Place};
use crate::transport::outbox::Outbox;
use crate::transport::stream::StreamLink;
use crate::transport::{Expected, Link, Message};
use crate::view::View;
use crate::wire::{Header, Kind};

const SEGMENT_BYTES: u64 = 1 << 16;

/// Raw bytes if the first is even, else a script for well-formed frames that need not make sense.
pub fn frames(data: &[u8]) {
    let Some((first, data)) = data.split_first() else { return };
    let (mine, theirs) = UnixStream::pair().expect("the system has sockets");
    let mut link = StreamLink::local(Rank(0), Rank(1), mine).expect("a fresh socket");
    for tag in 0..4 {
        link.expect(Message { job: 0, tag }, expected(tag));
    }
    let mut outbox = Outbox::default();
    if first % 2 == 0 {
        outbox.push_raw(data.to_vec());
    } else {
        script(data, &mut outbox);
    }
    let mut events = vec![];
    while !outbox.is_empty() {
        let written = outbox.flush(theirs.as_fd(), &mut vec![]);
        if written.is_err() || link.progress(&mut events).is_err() {
            return;
        }
        events.clear();
    }
    // What was offered is copied in steps.
    while link.has_work() && link.progress(&mut events).is_ok() {}
}

/// Places of every sort: contiguous, in small and in large runs, to be added to, and empty.
fn expected(tag: u32) -> Expected {
    let memory = Arc::new(Memory::private(SEGMENT_BYTES).expect("a small mapping"));
    let held = Region::whole(&[64, 256]);
    let columns = |width| Region::new(vec![Span::new(0, 64), Span::new(0, width)]);
    let region = [held.clone(), columns(3), columns(255), columns(0)][tag as usize % 4].clone();
    let view = View::of_box(0, &held, &region, 4).expect("columns lie in the whole");
    let combine = (tag == 1).then(|| Combine::new(DType::F32, ReduceOp::Sum));
    Expected { bytes: view.bytes(), place: lent(&Place { memory, view }), combine }
}

#[expect(unsafe_code, reason = "a link without an engine")]
fn lent(place: &Place) -> Lent {
    // SAFETY: the memory was just made for this link, and nobody else has it.
    unsafe { Lent::of(place) }.clone()
}

/// A greeting, a segment, and then eight bytes a frame: kind, tag, offset, length, and a seed for the payload.
fn script(data: &[u8], outbox: &mut Outbox) {
    outbox.push_control(Header::bare(Kind::Hello, 0, 1), vec![], None);
    let memory = Memory::shared(SEGMENT_BYTES).expect("a small segment");
    let descriptor = memory.segment().and_then(|s| s.try_clone_to_owned().ok());
    outbox.push_control(Header::bare(Kind::Segment, 0, 0), vec![], descriptor);
    for word in data.as_chunks::<8>().0 {
        let kind = Kind::ALL[usize::from(word[0]) % Kind::ALL.len()];
        let offset = u64::from(word[2]) << (word[3] % 64);
        let payload = match kind {
            Kind::Offer => offer(word),
            Kind::Offers => offers(word),
            _ => vec![word[6]; usize::from(word[4]) << (word[5] % 9)],
        };
        let header = Header::of(kind, u32::from(word[1] >> 7), u32::from(word[1] % 5), offset, &payload);
        outbox.push_control(header, payload, None);
    }
}

/// Whole messages, of which the first may be what is expected.
fn offers(word: &[u8; 8]) -> Vec<u8> {
    let record = |tag: u32| {
        let bytes = expected(tag).bytes as u32 + u32::from(word[4] / 128);
        let start = u64::from(word[5]) << (word[6] % 16);
        [tag, bytes].into_iter().flat_map(u32::to_le_bytes).chain(start.to_le_bytes())
    };
    (0..u32::from(word[7] % 5)).flat_map(|i| record((u32::from(word[1]) + i) % 5)).collect()
}

/// The offer of a view that may or may not be what is expected, or fit.
fn offer(word: &[u8; 8]) -> Vec<u8> {
    let mut payload = u32::from(word[7].is_multiple_of(16)).to_le_bytes().to_vec();
    let run = [1024, 12, 1020, 1][usize::from(word[6] % 4)];
    let stride = 1024 << (word[7] / 16 % 4);
    let len = u64::from(word[4]) << (word[5] % 10);
    for value in [len, u64::from(word[6] / 64), run, 64, stride] {
        payload.extend_from_slice(&value.to_le_bytes());
    }
    payload
}
