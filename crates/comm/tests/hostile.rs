//! A peer that has the job's secret and lies: every field it sends is held against what was agreed, and the lie is refused by
//! a rank that names it, with its counters in order.

mod common;

use std::io::{IoSlice, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use common::planned;
use crossmesh_comm::buffer::{RankBuffers, Sharing};
use crossmesh_comm::clock::Monotonic;
use crossmesh_comm::engine::{Engine, EngineOptions, Handle, JobSpec};
use crossmesh_comm::error::CommError;
use crossmesh_comm::memory::Memory;
use crossmesh_comm::transport::stream::StreamLink;
use crossmesh_comm::wire::{HEADER_BYTES, Header, Kind};
use crossmesh_core::id::Rank;
use crossmesh_core::program::OpKind;
use crossmesh_core::reshard::Strategy;
use crossmesh_core::reshard::lower::Addressing;
use crossmesh_core::verify::Verified;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

const ME: Rank = Rank(0);
const PEER: Rank = Rank(1);
const BYTES: u64 = 40_000;

/// A rank that sends a tensor and receives one, and its peer's end of the connection.
struct Session {
    engine: Engine,
    handle: Handle,
    peer: UnixStream,
    /// The tags of the message that it sends, and of the one that it waits for.
    sends: u32,
    waits: u32,
}

impl Session {
    fn new() -> Self {
        let there = format!("u8[{BYTES}]@A{{x:1}}=0(_)");
        let back = format!("u8[{BYTES}]@B{{x:1}}=1(_)");
        let plan = planned(&[(&there, &back), (&back, &there)], Strategy::SendRecv, None);
        let program = Verified::plan(&plan, Addressing::Apart).unwrap();
        let ops = &program.ranks[0].ops;
        let sends = ops.iter().find_map(|op| match op.kind {
            OpKind::Send { tag, .. } => Some(tag),
            _ => None,
        });
        let waits = ops.iter().find_map(|op| match op.kind {
            OpKind::Recv { tag, .. } => Some(tag),
            _ => None,
        });
        let buffers = RankBuffers::allocate(program.rank(ME), Sharing::Host).unwrap();
        let (mine, peer) = UnixStream::pair().unwrap();
        peer.set_nonblocking(true).unwrap();
        let link = Box::new(StreamLink::local(ME, PEER, mine).unwrap());
        let mut engine =
            Engine::new(ME, vec![(PEER, link)], Box::new(Monotonic), EngineOptions::default()).unwrap();
        let handle = engine.start(JobSpec::new(0, &buffers).unwrap()).unwrap();
        Self { engine, handle, peer, sends: sends.unwrap(), waits: waits.unwrap() }
    }

    fn greeted() -> Self {
        let mut session = Self::new();
        session.send(&Header::bare(Kind::Hello, ME.0, PEER.0), &[]).unwrap();
        session
    }

    fn send(&mut self, header: &Header, payload: &[u8]) -> Result<bool, CommError> {
        self.peer.write_all(&[&header.encode()[..], payload].concat()).unwrap();
        self.engine.test(self.handle)
    }

    /// Says that there is a place for the rank's message, and reads what it offers.
    fn announce(&mut self) -> Vec<Header> {
        let tags = self.sends.to_le_bytes();
        self.send(&Header::of(Kind::Ready, 0, 0, 0, &tags), &tags).unwrap();
        self.engine.test(self.handle).unwrap();
        let (mut bytes, mut headers) = (vec![], vec![]);
        let _all_there_is = self.peer.read_to_end(&mut bytes);
        let mut rest = &bytes[..];
        while let Some((header, behind)) = rest.split_first_chunk::<HEADER_BYTES>() {
            let header = Header::decode(header).unwrap();
            rest = &behind[header.len as usize..];
            headers.push(header);
        }
        headers
    }

    /// Sends a frame, of which the rank has to say that it is nonsense, and why.
    fn refuses(mut self, header: &Header, payload: &[u8], why: &str) {
        // The rank tells us that it ends; nobody may wait for us to read that.
        let result = self.send(header, payload).and_then(|_| self.engine.test(self.handle));
        match result {
            Err(CommError::Protocol { peer: PEER, cause, .. }) => {
                assert!(cause.to_string().contains(why), "{header:?}: {cause}, not {why}");
            }
            other => panic!("{header:?}: {other:?}"),
        }
    }
}

#[test]
fn nothing_counts_before_the_greeting() {
    for kind in Kind::ALL.into_iter().filter(|kind| *kind != Kind::Hello) {
        let session = Session::new();
        let tag = if matches!(kind, Kind::Ready | Kind::Bye | Kind::Maps) { 0 } else { session.waits };
        let payload: &[u8] = if kind == Kind::Data { &[7; 64] } else { &[] };
        session.refuses(&Header::of(kind, 0, tag, 0, payload), payload, "before the greeting");
    }
}

#[test]
fn a_greeting_is_from_the_peer_to_us_and_the_only_one() {
    let hello = |to: u32, from: u32| Header::bare(Kind::Hello, to, from);
    Session::new().refuses(&hello(ME.0, 2), &[], "another rank");
    Session::new().refuses(&hello(5, PEER.0), &[], "another rank");
    Session::greeted().refuses(&hello(ME.0, PEER.0), &[], "greeted already");
}

#[test]
fn what_was_not_offered_cannot_be_taken() {
    let taken = |tag, offset| Header { offset, ..Header::bare(Kind::Taken, 0, tag) };
    let session = Session::greeted();
    let tag = session.sends;
    session.refuses(&taken(tag, BYTES), &[], "was not offered");
    // Offered, but not so much, not so little, not of this message, not of this job.
    let lies = [
        taken(tag, BYTES + 1),
        taken(tag, u64::MAX),
        taken(tag, 0),
        taken(tag, BYTES - 64),
        taken(tag + 1, BYTES),
        Header { job: 1, ..taken(tag, BYTES) },
    ];
    for lie in lies {
        let mut session = Session::greeted();
        let said = session.announce();
        assert!(said.iter().any(|h| h.kind == Kind::Offers), "{said:?}");
        session.refuses(&lie, &[], "was not offered");
    }
    let mut honest = Session::greeted();
    honest.announce();
    assert!(!honest.send(&taken(tag, BYTES), &[]).unwrap(), "it waits for ours");
    honest.refuses(&taken(tag, BYTES), &[], "taken before");
}

/// Of many messages in one frame each is looked at.
#[test]
fn what_is_offered_together_is_awaited_whole_and_lies_in_a_segment() {
    let record = |tag: u32, bytes: u32, start: u64| {
        [&tag.to_le_bytes()[..], &bytes.to_le_bytes(), &start.to_le_bytes()].concat()
    };
    let offers = |segment, records: &[Vec<u8>]| {
        let payload = records.concat();
        (Header::of(Kind::Offers, 0, segment, 0, &payload), payload)
    };
    let with_segment = || {
        let mut session = Session::greeted();
        let memory = Memory::shared(2 * BYTES).unwrap();
        send_segment(&session.peer, memory.segment().unwrap());
        assert!(!session.engine.test(session.handle).unwrap());
        session
    };
    let (tag, all) = (Session::new().waits, BYTES as u32);
    let whole = record(tag, all, 64);
    let lies = [
        (offers(1, std::slice::from_ref(&whole)), "it names no segment"),
        (offers(0, &[]), "no list of offers"),
        (offers(0, &[whole[..15].to_vec()]), "no list of offers"),
        (offers(0, &[record(99, all, 0)]), "nobody waits for it"),
        (offers(0, &[whole.clone(), whole.clone()]), "not the whole message"),
        (offers(0, &[record(tag, all - 64, 0)]), "not the whole message"),
        (offers(0, &[record(tag, all, 2 * BYTES)]), "it names no place"),
        (offers(0, &[record(tag, all, u64::MAX)]), "it names no place"),
        (offers(0, &vec![whole.clone(); 1025]), "longer than such frames"),
    ];
    for ((header, payload), why) in lies {
        with_segment().refuses(&header, &payload, why);
    }
    // In part it has come another way.
    let mut session = with_segment();
    let part = [7; 64];
    session.send(&Header::of(Kind::Data, 0, tag, 0, &part), &part).unwrap();
    let (header, payload) = offers(0, std::slice::from_ref(&whole));
    session.refuses(&header, &payload, "not the whole message");
    let mut session = with_segment();
    let (header, payload) = offers(0, &[whole]);
    assert!(!session.send(&header, &payload).unwrap(), "ours has not been taken");
}

#[test]
fn only_messages_for_a_rank_are_announced_by_it_and_once() {
    let ready = |tags: &[u32]| -> (Header, Vec<u8>) {
        let payload: Vec<u8> = tags.iter().flat_map(|t| t.to_le_bytes()).collect();
        (Header::of(Kind::Ready, 0, 0, 0, &payload), payload)
    };
    let session = Session::greeted();
    let (sends, waits) = (session.sends, session.waits);
    for (tags, why) in [
        (vec![999], "no such message"),
        (vec![waits], "no such message"),
        (vec![sends, sends], "announced before"),
    ] {
        let (header, payload) = ready(&tags);
        Session::greeted().refuses(&header, &payload, why);
    }
    let mut session = Session::greeted();
    session.announce();
    let (header, payload) = ready(&[sends]);
    session.refuses(&header, &payload, "announced before");
}

#[test]
fn nobody_speaks_of_ranks_that_are_not_there() {
    let beat = Header::bare(Kind::Beat, 0, 999_999);
    Session::greeted().refuses(&beat, &[], "no such rank");
    let reason = b"it was r999999";
    Session::greeted().refuses(&Header::of(Kind::Abort, 0, 999_999, 0, reason), reason, "no such rank");
    assert!(!Session::greeted().send(&Header::bare(Kind::Beat, 0, PEER.0), &[]).unwrap());
}

#[test]
fn an_abort_cannot_reach_into_the_terminal() {
    let mut session = Session::greeted();
    let reason = b"\x1b[31mr0 did it\x1b]0;pwned\x07\r\x9b2J";
    match session.send(&Header::of(Kind::Abort, 0, PEER.0, 0, reason), reason) {
        Err(CommError::Aborted { culprit: PEER, reason, .. }) => {
            assert!(reason.contains("r0 did it") && !reason.chars().any(char::is_control), "{reason:?}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn fields_that_say_nothing_are_zero_and_words_are_short() {
    let long = vec![b'x'; 5000];
    Session::greeted().refuses(&Header::of(Kind::Abort, 0, 1, 0, &long), &long, "longer than such frames");
    Session::greeted().refuses(&Header::of(Kind::Beat, 0, 1, 0, &[0]), &[0], "longer than such frames");
    Session::greeted().refuses(&Header::bare(Kind::Beat, 3, 1), &[], "is not zero");
    Session::greeted().refuses(&Header { offset: 1, ..Header::bare(Kind::Bye, 0, 0) }, &[], "is not zero");
}

/// A segment of the peer's, cut short behind our back, would end the process that reads it.
#[test]
fn a_segment_that_may_shrink_is_refused() {
    let mut session = Session::greeted();
    let flags = rustix::fs::MemfdFlags::ALLOW_SEALING;
    let open = rustix::fs::memfd_create("crossmesh.1", flags).unwrap();
    send_segment(&session.peer, open.as_fd());
    match session.engine.test(session.handle) {
        Err(CommError::Protocol { peer: PEER, cause, .. }) => {
            assert!(cause.to_string().contains("may shrink"))
        }
        other => panic!("{other:?}"),
    }
    let mut session = Session::greeted();
    let memory = Memory::shared(BYTES).unwrap();
    send_segment(&session.peer, memory.segment().unwrap());
    assert!(!session.engine.test(session.handle).unwrap());
}

fn send_segment(peer: &UnixStream, descriptor: std::os::fd::BorrowedFd<'_>) {
    let header = Header::bare(Kind::Segment, 0, 0).encode();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(peer, &[IoSlice::new(&header)], &mut ancillary, SendFlags::empty()).unwrap();
}
