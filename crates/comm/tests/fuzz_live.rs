//! A million frames into a live rank: its engine has a job under way and takes whatever a peer sends. It ends with the job
//! done or with an error that names the peer, never with a panic, and never hangs.
//!
//! ```text
//! r1: frames, sensible and not ──▶ r0 ◀── tensors both ways ──▶ r2: honest, a thread of its own, over shm or TCP
//!          └─ a second reading ──▶ image        = what r0 has in the end, element by element
//! ```
//!
//! `CROSSMESH_FUZZ_FRAMES=100000000 cargo test --release -p crossmesh-comm --test fuzz_live -- --nocapture` goes on for longer.

#![allow(clippy::print_stdout)] // the numbers are part of what this shows

mod common;
#[path = "fuzz_live/image.rs"]
mod image;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use common::{Kind as LinkKind, link_pair, planned, tcp_pair};
use crossmesh_comm::buffer::{RankBuffers, Sharing};
use crossmesh_comm::clock::{Clock, Monotonic};
use crossmesh_comm::engine::{Engine, EngineOptions, Handle, JobSpec};
use crossmesh_comm::error::CommError;
use crossmesh_comm::memory::Memory;
use crossmesh_comm::transport::Link;
use crossmesh_comm::transport::stream::StreamLink;
use crossmesh_comm::wire::{HEADER_BYTES, Header, Kind};
use crossmesh_core::id::Rank;
use crossmesh_core::program::OpKind;
use crossmesh_core::reshard::Strategy;
use crossmesh_core::reshard::lower::Addressing;
use crossmesh_core::verify::Verified;
use crossmesh_testkit::seed::Seed;
use image::{Expected, Image};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

const FRAMES: u64 = 1_000_000;
/// A rank that was told of a culprit elsewhere lingers for a moment; others use it.
const THREADS: u64 = 4;
const ME: Rank = Rank(0);
const PEER: Rank = Rank(1);
const HONEST: Rank = Rank(2);
/// A rank that does not end within so many steps after its peer fell silent hangs.
const MAX_STEPS: u32 = 1000;
/// By how much a step puts the clock forward; more would count as time that the rank slept through.
const STEP_MS: u64 = 400;
/// Long enough that a machine which has no time for the honest rank does not make it look silent.
const DEADLINE_MS: u64 = 20_000;
const SETTLE_NS: u64 = 10_000_000_000;

/// A clock that can be put forward.
#[derive(Debug, Clone, Default)]
struct Fast(Arc<AtomicU64>);

impl Clock for Fast {
    fn now_ns(&self) -> u64 {
        Monotonic.now_ns() + self.0.load(Ordering::Relaxed)
    }
}

impl Fast {
    fn jump(&self, ms: u64) {
        self.0.fetch_add(ms * 1_000_000, Ordering::Relaxed);
    }
}

/// What the rank is there for: tensors both ways, whole and in strips, one to be added to, small and large; maybe some with an honest
/// rank, too.
struct Work {
    program: Verified,
    /// What the rank waits for from the peer.
    expected: Vec<Expected>,
    /// The tags of what it sends there, and how long that is.
    sends: Vec<(u32, u64)>,
    /// What its tensors begin with, by tensor: those that the peer has a part in.
    before: BTreeMap<usize, Vec<u8>>,
    has_honest: bool,
}

const WITH_PEER: [(&str, &str); 5] = [
    ("f32[64,64]@AB{x:2}=0-1(_,x)", "f32[64,64]@A{x:1}=0(_,_)"),
    ("u8[3000]@B{x:1}=1(_)", "u8[3000]@A{x:1}=0(_)"),
    ("f32[500]@AB{x:2}=0-1(_ | sum x)", "f32[500]@A{x:1}=0(_)"),
    ("u8[40000]@A{x:1}=0(_)", "u8[40000]@B{x:1}=1(_)"),
    ("u8[0]@B{x:1}=1(_)", "u8[0]@A{x:1}=0(_)"),
];
/// Large enough to be under way for some frames.
const WITH_HONEST: [(&str, &str); 2] = [
    ("u8[300000]@C{x:1}=2(_)", "u8[300000]@A{x:1}=0(_)"),
    ("u8[70000]@A{x:1}=0(_)", "u8[70000]@C{x:1}=2(_)"),
];
const FROM_HONEST: usize = WITH_PEER.len();
const TO_HONEST: usize = FROM_HONEST + 1;

/// What the honest rank and this one have for each other.
fn honest_bytes(tensor: usize) -> Vec<u8> {
    let bytes = if tensor == FROM_HONEST { 300_000 } else { 70_000 };
    (0..bytes).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

/// Shards of f32 that this rank holds of the first and the third tensor: whole numbers, whose sums are exact.
fn own_shard(tensor: usize) -> Vec<u8> {
    let len = if tensor == 0 { 64 * 32 } else { 500 };
    (0..len).flat_map(|i: u32| (i as f32 + tensor as f32).to_le_bytes()).collect()
}

impl Work {
    fn new(has_honest: bool) -> Self {
        let also = if has_honest { &WITH_HONEST[..] } else { &[] };
        let plan = planned(&[&WITH_PEER, also].concat(), Strategy::Flow, None);
        let program = Verified::plan(&plan, Addressing::Apart).unwrap();
        let ops = &program.ranks[0].ops;
        let with_peer = |op: &&crossmesh_core::program::Op| (op.tensor as usize) < WITH_PEER.len();
        let expected: Vec<_> =
            ops.iter().filter(with_peer).filter_map(|op| Expected::of(&program, op)).collect();
        let send = |op: &crossmesh_core::program::Op| match op.kind {
            OpKind::Send { tag, .. } => Some((tag, op.bytes)),
            _ => None,
        };
        let sends: Vec<_> = ops.iter().filter(with_peer).filter_map(send).collect();
        assert!(expected.len() >= 3 && !sends.is_empty());
        // The left half of the first tensor is the rank's own, and its part of the sum.
        let mut first = vec![0; 64 * 64 * 4];
        let rows = own_shard(0);
        for (row, own) in first.chunks_exact_mut(64 * 4).zip(rows.chunks_exact(32 * 4)) {
            row[..32 * 4].copy_from_slice(own);
        }
        let before = [(0, first), (1, vec![0; 3000]), (2, own_shard(2))].into();
        Self { program, expected, sends, before, has_honest }
    }

    fn buffers(&self, rank: Rank) -> RankBuffers {
        // Others read them where they are.
        let sharing = if self.has_honest { Sharing::Host } else { Sharing::Private };
        let buffers = RankBuffers::allocate(self.program.rank(rank), sharing).unwrap();
        let mine: &[usize] = if rank == ME { &[0, 2] } else { &[] };
        mine.iter().for_each(|tensor| buffers.write_source(*tensor, &own_shard(*tensor)).unwrap());
        let shared = match (self.has_honest, rank) {
            (true, ME) => Some(TO_HONEST),
            (true, HONEST) => Some(FROM_HONEST),
            _ => None,
        };
        shared.iter().for_each(|tensor| buffers.write_source(*tensor, &honest_bytes(*tensor)).unwrap());
        buffers
    }
}

/// A third rank, which does what ranks do, in a thread. It ends with its part done and right, or as it was told.
struct Honest(JoinHandle<Result<(), CommError>>);

impl Honest {
    #[expect(clippy::disallowed_methods, reason = "it is joined when its session ends")]
    fn start(work: &Work, link: Box<dyn Link>, clock: Fast) -> Self {
        let buffers = work.buffers(HONEST);
        let options = EngineOptions { deadline_ms: DEADLINE_MS, ..Default::default() };
        let mut engine = Engine::new(HONEST, vec![(ME, link)], Box::new(clock), options).unwrap();
        Self(std::thread::spawn(move || {
            let handle = engine.start(JobSpec::new(0, &buffers)?)?;
            engine.wait(handle)?;
            let mut found = vec![0; honest_bytes(TO_HONEST).len()];
            buffers.read_destination(TO_HONEST, &mut found);
            assert!(found == honest_bytes(TO_HONEST), "what the honest rank has is wrong");
            engine.close();
            Ok(())
        }))
    }
}

/// One connection, from its greeting to its end.
struct Session<'a> {
    engine: Engine,
    handle: Handle,
    clock: Fast,
    /// Our end.
    peer: OwnedFd,
    work: &'a Work,
    buffers: RankBuffers,
    honest: Option<Honest>,
    /// Whether the rank offers what it sends, in memory that the peer may map.
    offers: bool,
    /// What was sent, by a second reading.
    image: Image,
    segments: u32,
}

impl<'a> Session<'a> {
    fn new(work: &'a Work, seed: &mut Seed) -> Self {
        // Ports of closed connections are in use for a minute: most connections are local.
        let by_tcp = seed.below(50) == 0;
        let (link, peer): (Box<dyn Link>, OwnedFd) = if by_tcp {
            let (mine, theirs) = tcp_pair();
            (Box::new(StreamLink::tcp(ME, PEER, mine).unwrap()), theirs.into())
        } else {
            let (mine, theirs) = UnixStream::pair().unwrap();
            (Box::new(StreamLink::local(ME, PEER, mine).unwrap()), theirs.into())
        };
        let clock = Fast::default();
        let options = EngineOptions { deadline_ms: DEADLINE_MS, ..Default::default() };
        let mut links = vec![(PEER, link)];
        let honest = work.has_honest.then(|| {
            let kind = if seed.below(20) == 0 { LinkKind::Tcp } else { LinkKind::Shm };
            let (mine, theirs) = link_pair(kind, ME, HONEST);
            links.push((HONEST, mine));
            Honest::start(work, theirs, clock.clone())
        });
        let mut engine = Engine::new(ME, links, Box::new(clock.clone()), options).unwrap();
        let buffers = work.buffers(ME);
        let handle = engine.start(JobSpec::new(0, &buffers).unwrap()).unwrap();
        let offers = work.has_honest && !by_tcp;
        let (image, segments) = Default::default();
        Self { engine, handle, clock, peer, work, buffers, honest, offers, image, segments }
    }

    /// A frame that a rank could send now.
    fn sensible(&mut self, seed: &mut Seed) -> (Header, Vec<u8>) {
        let expected = &self.work.expected;
        let open: Vec<usize> =
            (0..expected.len()).filter(|i| self.image.len(expected[*i].tag) < expected[*i].bytes).collect();
        let which = open.get(seed.below(open.len())).copied().unwrap_or(0);
        let Expected { tag, bytes, .. } = expected[which];
        let sent = self.image.len(tag);
        match seed.below(if open.is_empty() { 2 } else { 8 }) {
            0 => (Header::bare(Kind::Beat, 0, [0, 1, u32::MAX][seed.below(3)]), vec![]),
            1 => {
                // Of this job the next message, if there is one; of jobs to come, anything.
                let job = seed.below(3) as u32;
                let next = self.work.sends.get(self.image.announced).filter(|_| job == 0);
                if let (None, 0, Some(taken)) = (next, job, self.to_take()) {
                    return (taken, vec![]);
                }
                let early = |_| seed.below(8) as u32;
                let tags: Vec<u32> = match job {
                    0 => next.map(|(tag, _)| *tag).into_iter().collect(),
                    _ => (0..3).map(early).collect(),
                };
                let tags: Vec<u8> = tags.into_iter().flat_map(u32::to_le_bytes).collect();
                (Header::of(Kind::Ready, job, 0, 0, &tags), tags)
            }
            _ => {
                let left = bytes - sent;
                let len = (left.min(1 + seed.below(3000) as u64)) / 4 * 4;
                let len = if left < 4 { left } else { len };
                // Every element another, so that one in another's place is noticed.
                let (first, step) = (seed.below(256), 1 + seed.below(255));
                let payload: Vec<u8> = (0..len as usize).map(|i| (first + i * step) as u8).collect();
                (Header::of(Kind::Data, 0, tag, sent, &payload), payload)
            }
        }
    }

    /// What was offered in the rank's memory, and not taken yet.
    fn to_take(&self) -> Option<Header> {
        let (tag, bytes) = *self.work.sends.get(self.image.taken).filter(|_| self.offers)?;
        Some(Header { offset: bytes, ..Header::bare(Kind::Taken, 0, tag) })
    }

    /// A frame that is well formed and makes no sense, or a little of it.
    fn odd(&mut self, seed: &mut Seed) -> (Header, Vec<u8>) {
        let kind = Kind::ALL[seed.below(Kind::ALL.len())];
        let len = [0, 1, 4, 36, 44, 60, 4096, 70_000][seed.below(8)];
        let mut payload: Vec<u8> = (0..len).map(|_| seed.below(256) as u8).collect();
        if kind == Kind::Offer {
            payload = offer(seed);
        } else if kind == Kind::Offers && seed.below(4) > 0 {
            payload = offers(&self.work.expected, seed);
        }
        let job = [0, 0, 0, 1, u32::MAX][seed.below(5)];
        let tag = [0, 1, 2, 3, 99, u32::MAX][seed.below(6)];
        let offset = [0, 1, 4096, u64::MAX, 1 << 40][seed.below(5)];
        (Header::of(kind, job, tag, offset, &payload), payload)
    }

    /// Sends a frame, or what is left of one, maybe in two parts; steps the rank after each.
    fn send(&mut self, bytes: &[u8], seed: &mut Seed) -> Result<bool, CommError> {
        self.image.note(bytes, &self.work.expected);
        let cut = if seed.below(4) == 0 { seed.below(bytes.len() + 1) } else { bytes.len() };
        for part in [&bytes[..cut], &bytes[cut..]].into_iter().filter(|p| !p.is_empty()) {
            let mut rest = part;
            while !rest.is_empty() {
                match self.write(rest) {
                    Ok(written) => rest = &rest[written..],
                    // It reads no more, and is about to say why.
                    Err(error) if error.kind() == ErrorKind::WouldBlock => self.clock.jump(50),
                    // It hung up; what it says about that comes with the next step.
                    Err(_) => rest = &[],
                }
                if self.step()? {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    fn write(&self, bytes: &[u8]) -> std::io::Result<usize> {
        Ok(rustix::net::send(&self.peer, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
    }

    /// One step of the rank; what it says is thrown away, so that it never waits for us.
    fn step(&mut self) -> Result<bool, CommError> {
        let mut void = [0; 16 << 10];
        while let Ok((1.., _)) = rustix::net::recv(&self.peer, &mut void, rustix::net::RecvFlags::DONTWAIT) {}
        self.engine.test(self.handle)
    }

    /// A segment of our own, of a size that may or may not be what we say, sealed or not.
    fn send_segment(&mut self, seed: &mut Seed) -> Result<bool, CommError> {
        let memory = Memory::shared([1, 4096, 1 << 16][seed.below(3)]).unwrap();
        let header = Header::bare(Kind::Segment, 0, self.segments + u32::from(seed.below(10) == 0)).encode();
        self.segments += 1;
        let unsealed = std::fs::File::open("/dev/null").unwrap();
        let fd = if seed.below(10) == 0 { unsealed.as_fd() } else { memory.segment().unwrap() };
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let fds = [fd];
        if seed.below(10) > 0 {
            ancillary.push(SendAncillaryMessage::ScmRights(&fds));
        }
        let slices = [std::io::IoSlice::new(&header)];
        let _full = sendmsg(&self.peer, &slices, &mut ancillary, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        self.step()
    }

    /// Whether the peer has done its part, and only the honest rank may have something to do.
    fn has_said_all(&self) -> bool {
        let came = |e: &Expected| self.image.len(e.tag) == e.bytes;
        let sends = self.work.sends.len();
        !self.image.out_of_step
            && self.image.announced == sends
            && (!self.offers || self.image.taken == sends)
            && self.work.expected.iter().all(came)
    }

    /// Goes on until the honest rank is done, too.
    fn settle(&mut self) -> Result<bool, CommError> {
        let begun = Monotonic.now_ns();
        while !self.step()? {
            if Monotonic.now_ns() - begun > SETTLE_NS {
                return Ok(false);
            }
            std::thread::yield_now();
        }
        Ok(true)
    }

    /// The job is done: every element that the peer had a part in is what came, and what the honest rank sent is whole, too. How much was
    /// compared.
    fn check(mut self) -> u64 {
        self.engine.finish(self.handle).expect("it is done");
        let Work { program, expected, before, .. } = self.work;
        let mut compared = self.image.compare(&self.buffers, program, expected, before);
        if self.honest.is_some() {
            let mut found = vec![0; honest_bytes(FROM_HONEST).len()];
            self.buffers.read_destination(FROM_HONEST, &mut found);
            assert!(found == honest_bytes(FROM_HONEST), "what came from the honest rank is wrong");
            compared += found.len();
        }
        let Self { mut engine, honest, peer, .. } = self;
        // Of the two only the honest one waits for a farewell, and says one.
        drop(peer);
        engine.close();
        drop(engine);
        honest.into_iter().for_each(|Honest(thread)| {
            thread.join().unwrap().expect("the honest rank is done, too");
        });
        compared as u64
    }

    /// The job is not done: the honest rank is told so, and ends.
    fn give_up(self, end: &str) {
        let Self { engine, honest, peer, .. } = self;
        drop((engine, peer));
        let told = honest.map(|Honest(thread)| thread.join().expect("it does not panic"));
        if let (Some(Err(error)), "nonsense" | "lost") = (told, end) {
            assert_eq!(error.culprit(), Some(PEER), "{error}");
        }
    }

    /// The peer falls silent, or is gone: the rank has to end.
    fn end(&mut self, seed: &mut Seed) {
        if seed.below(2) == 0 {
            let _gone = rustix::net::shutdown(&self.peer, rustix::net::Shutdown::Both);
        }
        for _ in 0..MAX_STEPS {
            self.clock.jump(STEP_MS);
            match self.step() {
                Ok(false) => {}
                Ok(true) | Err(_) => return,
            }
        }
        panic!("the rank hangs");
    }
}

/// An offer of memory: mostly of something that lies in a segment.
fn offer(seed: &mut Seed) -> Vec<u8> {
    let mut payload = (seed.below(3) as u32).to_le_bytes().to_vec();
    let word = |seed: &mut Seed| [0, 1, 3, 4, 64, 2000, 3000, 8192, 1 << 20, u64::MAX][seed.below(10)];
    for _ in 0..3 + seed.below(6) {
        payload.extend_from_slice(&word(seed).to_le_bytes());
    }
    payload
}

/// Whole messages in one frame, some of them such as are waited for.
fn offers(expected: &[Expected], seed: &mut Seed) -> Vec<u8> {
    let mut payload = vec![];
    for _ in 0..1 + seed.below(4) {
        let (tag, bytes) = match expected.get(seed.below(expected.len() + 1)) {
            Some(expected) => (expected.tag, expected.bytes as u32),
            None => (seed.below(5) as u32, [0, 64, u32::MAX][seed.below(3)]),
        };
        let start = [0u64, 64, 1 << 15, u64::MAX][seed.below(4)];
        payload.extend([tag, bytes].into_iter().flat_map(u32::to_le_bytes).chain(start.to_le_bytes()));
    }
    payload
}

/// Bytes of a frame, some of them changed; where the header's checksum is made right again, more of it is believed.
fn spoil(header: &Header, payload: &[u8], seed: &mut Seed) -> Vec<u8> {
    let mut bytes = [&header.encode()[..], payload].concat();
    for _ in 0..1 + seed.below(3) {
        let at = seed.below(bytes.len());
        bytes[at] ^= 1 << seed.below(8);
    }
    if seed.below(2) == 0 {
        let crc = crc32c::crc32c(&bytes[..32]);
        bytes[32..HEADER_BYTES].copy_from_slice(&crc.to_le_bytes());
    }
    if seed.below(8) == 0 {
        bytes.truncate(1 + seed.below(bytes.len()));
    }
    bytes
}

/// A session of some frames; how it ended, and how many bytes of tensors were compared in the end.
fn session(work: &Work, seed: &mut Seed, frames: &Cell<u64>) -> (&'static str, u64) {
    let mut session = Session::new(work, seed);
    match frames_of(&mut session, seed, frames) {
        "done" => ("done", session.check()),
        end => {
            session.give_up(end);
            (end, 0)
        }
    }
}

fn frames_of(session: &mut Session<'_>, seed: &mut Seed, frames: &Cell<u64>) -> &'static str {
    let greeting = Header::bare(Kind::Hello, 0, if seed.below(200) == 0 { 7 } else { PEER.0 });
    let mut next = greeting.encode().to_vec();
    loop {
        frames.set(frames.get() + 1);
        let sent = session.send(&next, seed);
        let settled = match sent {
            Ok(false) if session.work.has_honest && session.has_said_all() => session.settle(),
            sent => sent,
        };
        match settled {
            Ok(false) => {}
            Ok(true) => return "done",
            Err(CommError::Protocol { peer: PEER, .. }) => return "nonsense",
            Err(CommError::Aborted { .. }) => return "aborted",
            Err(CommError::PeerLost { peer: PEER, .. }) => return "lost",
            Err(CommError::System { .. }) => return "refused",
            Err(other) => panic!("{other}"),
        }
        next = match seed.below(100) {
            0..88 => {
                let (header, payload) = session.sensible(seed);
                [&header.encode()[..], &payload].concat()
            }
            88..91 => match session.send_segment(seed) {
                Ok(false) => continue,
                Ok(true) | Err(_) => return "segment",
            },
            91..97 => {
                let (header, payload) = session.odd(seed);
                if header.kind == Kind::Abort || header.kind == Kind::Bye {
                    // Who says so also leaves, or the rank would wait for a while, in real time.
                    let bytes = [&header.encode()[..], &payload].concat();
                    let _full = session.write(&bytes);
                    let _gone = rustix::net::shutdown(&session.peer, rustix::net::Shutdown::Write);
                    session.end(seed);
                    return "farewell";
                }
                [&header.encode()[..], &payload].concat()
            }
            97..99 => {
                let (header, payload) = session.sensible(seed);
                spoil(&header, &payload, seed)
            }
            _ => {
                session.end(seed);
                return "silence";
            }
        };
    }
}

/// How often sessions ended in which way.
type Ends = BTreeMap<&'static str, u64>;

const FRAMES_SENT: &str = "frames";
const COMPARED: &str = "bytes compared";
/// Ends with an honest rank beside.
const AMONG: &str = "done among three";

/// Every so many sessions there is an honest rank.
const ALONE: usize = 12;

fn fuzz(works: [&Work; 2], number: u64, frames: u64) -> Ends {
    let mut seed = Seed(0x0DDB_1A5E_5BAD_5EED ^ number);
    let (sent, mut ends) = (Cell::new(0), Ends::default());
    while sent.get() < frames {
        let work = works[usize::from(seed.below(ALONE) == 0)];
        let (end, compared) = session(work, &mut seed, &sent);
        *ends.entry(end).or_default() += 1;
        *ends.entry(COMPARED).or_default() += compared;
        *ends.entry(AMONG).or_default() += u64::from(work.has_honest && end == "done");
    }
    ends.insert(FRAMES_SENT, sent.get());
    ends
}

#[test]
#[expect(clippy::disallowed_methods, reason = "how long to test is no part of a plan")]
fn a_million_frames_into_a_live_rank() {
    let total: u64 = std::env::var("CROSSMESH_FUZZ_FRAMES").map_or(FRAMES, |n| n.parse().unwrap());
    let (alone, among) = (Work::new(false), Work::new(true));
    let works = [&alone, &among];
    let parts: Vec<Ends> = std::thread::scope(|scope| {
        let part = |number| scope.spawn(move || fuzz(works, number, total.div_ceil(THREADS)));
        let threads: Vec<_> = (0..THREADS).map(part).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let mut ends = Ends::default();
    for (end, count) in parts.into_iter().flatten() {
        *ends.entry(end).or_default() += count;
    }
    let mut take = |what| ends.remove(what).unwrap_or(0);
    let (frames, compared, among) = (take(FRAMES_SENT), take(COMPARED), take(AMONG));
    println!(
        "{frames} frames, {} connections: {ends:?}; {compared} B of tensors compared, {among} jobs of three ranks done",
        ends.values().sum::<u64>()
    );
    assert!(frames >= total);
    // Every way to end was gone, so that none of them went untested.
    for end in ["done", "nonsense", "farewell", "silence", "segment"] {
        assert!(ends.contains_key(end) || total < FRAMES, "nothing ended by `{end}`: {ends:?}");
    }
    assert!(compared > 0 && among > 0 || total < FRAMES, "no job was done among three");
}
