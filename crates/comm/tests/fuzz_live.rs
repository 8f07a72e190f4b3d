//! A million frames into a live rank: its engine has a job under way and takes whatever a peer sends. It ends with the job
//! done or with an error that names the peer, never with a panic, and never hangs.
//!
//! `CROSSMESH_FUZZ_FRAMES=100000000 cargo test --release -p crossmesh-comm --test fuzz_live -- --nocapture` goes on for longer.

#![allow(clippy::print_stdout)] // the numbers are part of what this shows

mod common;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::{planned, tcp_pair};
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
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

const FRAMES: u64 = 1_000_000;
/// A rank that was told of a culprit elsewhere lingers for a moment; others use it.
const THREADS: u64 = 4;
const ME: Rank = Rank(0);
const PEER: Rank = Rank(1);
/// A rank that does not end within so many steps after its peer fell silent hangs.
const MAX_STEPS: u32 = 1000;

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

/// What the rank is there for: tensors both ways, whole and in strips, one to be added to, small and large.
struct Work {
    program: Verified,
    /// What the rank waits for: tag, bytes, and whether it is added to what is there.
    expected: Vec<(u32, u64, bool)>,
    /// The tags of what it sends.
    sends: Vec<u32>,
}

impl Work {
    fn new() -> Self {
        let pairs = [
            ("f32[64,64]@AB{x:2}=0-1(_,x)", "f32[64,64]@A{x:1}=0(_,_)"),
            ("u8[3000]@B{x:1}=1(_)", "u8[3000]@A{x:1}=0(_)"),
            ("f32[500]@AB{x:2}=0-1(_ | sum x)", "f32[500]@A{x:1}=0(_)"),
            ("u8[40000]@A{x:1}=0(_)", "u8[40000]@B{x:1}=1(_)"),
            ("u8[0]@B{x:1}=1(_)", "u8[0]@A{x:1}=0(_)"),
        ];
        let plan = planned(&pairs, Strategy::Flow, None);
        let program = Verified::plan(&plan, Addressing::Apart).unwrap();
        let ops = &program.ranks[0].ops;
        let recv = |op: &crossmesh_core::program::Op| match op.kind {
            OpKind::Recv { tag, reduce, .. } => Some((tag, op.bytes, reduce)),
            _ => None,
        };
        let expected: Vec<_> = ops.iter().filter_map(recv).collect();
        let send = |op: &crossmesh_core::program::Op| match op.kind {
            OpKind::Send { tag, .. } => Some(tag),
            _ => None,
        };
        let sends: Vec<u32> = ops.iter().filter_map(send).collect();
        assert!(expected.len() >= 3 && !sends.is_empty());
        Self { program, expected, sends }
    }

    fn spec(&self) -> JobSpec {
        JobSpec::new(0, &RankBuffers::allocate(self.program.rank(ME), Sharing::Private).unwrap()).unwrap()
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
    /// By expected message: how much of it was sent.
    sent: Vec<u64>,
    /// How many of the rank's messages were announced.
    announced: usize,
    segments: u32,
}

impl<'a> Session<'a> {
    fn new(work: &'a Work, seed: &mut Seed) -> Self {
        // Ports of closed connections are in use for a minute: most connections are local.
        let (link, peer): (Box<dyn Link>, OwnedFd) = if seed.below(50) == 0 {
            let (mine, theirs) = tcp_pair();
            (Box::new(StreamLink::tcp(ME, PEER, mine).unwrap()), theirs.into())
        } else {
            let (mine, theirs) = UnixStream::pair().unwrap();
            (Box::new(StreamLink::local(ME, PEER, mine).unwrap()), theirs.into())
        };
        let clock = Fast::default();
        let options = EngineOptions { deadline_ms: 2000, ..Default::default() };
        let mut engine = Engine::new(ME, vec![(PEER, link)], Box::new(clock.clone()), options).unwrap();
        let handle = engine.start(work.spec()).unwrap();
        Self {
            engine,
            handle,
            clock,
            peer,
            work,
            sent: vec![0; work.expected.len()],
            announced: 0,
            segments: 0,
        }
    }

    /// A frame that a rank could send now.
    fn sensible(&mut self, seed: &mut Seed) -> (Header, Vec<u8>) {
        let open: Vec<usize> =
            (0..self.sent.len()).filter(|i| self.sent[*i] < self.work.expected[*i].1).collect();
        let which = open.get(seed.below(open.len())).copied().unwrap_or(0);
        let (tag, bytes, _) = self.work.expected[which];
        match seed.below(if open.is_empty() { 2 } else { 8 }) {
            0 => (Header::bare(Kind::Beat, 0, [0, 1, u32::MAX][seed.below(3)]), vec![]),
            1 => {
                // Of this job the next message, if there is one; of jobs to come, anything.
                let job = seed.below(3) as u32;
                let next = self.work.sends.get(self.announced).filter(|_| job == 0);
                self.announced += usize::from(next.is_some());
                let early = |_| seed.below(8) as u32;
                let tags: Vec<u32> = match job {
                    0 => next.copied().into_iter().collect(),
                    _ => (0..3).map(early).collect(),
                };
                let tags: Vec<u8> = tags.into_iter().flat_map(u32::to_le_bytes).collect();
                (Header::of(Kind::Ready, job, 0, 0, &tags), tags)
            }
            _ => {
                let left = bytes - self.sent[which];
                let len = (left.min(1 + seed.below(3000) as u64)) / 4 * 4;
                let len = if left < 4 { left } else { len };
                let payload = vec![seed.below(256) as u8; len as usize];
                let header = Header::of(Kind::Data, 0, tag, self.sent[which], &payload);
                self.sent[which] += len;
                (header, payload)
            }
        }
    }

    /// A frame that is well formed and makes no sense, or a little of it.
    fn odd(&mut self, seed: &mut Seed) -> (Header, Vec<u8>) {
        let kind = Kind::ALL[seed.below(Kind::ALL.len())];
        let len = [0, 1, 4, 36, 44, 60, 4096, 70_000][seed.below(8)];
        let mut payload: Vec<u8> = (0..len).map(|_| seed.below(256) as u8).collect();
        if kind == Kind::Offer {
            payload = offer(seed);
        }
        let job = [0, 0, 0, 1, u32::MAX][seed.below(5)];
        let tag = [0, 1, 2, 3, 99, u32::MAX][seed.below(6)];
        let offset = [0, 1, 4096, u64::MAX, 1 << 40][seed.below(5)];
        (Header::of(kind, job, tag, offset, &payload), payload)
    }

    /// Sends bytes, maybe in two parts; steps the rank after each.
    fn send(&mut self, bytes: &[u8], seed: &mut Seed) -> Result<bool, CommError> {
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

    /// The peer falls silent, or is gone: the rank has to end.
    fn end(mut self, seed: &mut Seed) {
        if seed.below(2) == 0 {
            let _gone = rustix::net::shutdown(&self.peer, rustix::net::Shutdown::Both);
        }
        for _ in 0..MAX_STEPS {
            self.clock.jump(50);
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

/// A session of some frames; how many, and whether the job was done.
fn session(work: &Work, seed: &mut Seed, frames: &Cell<u64>) -> &'static str {
    let mut session = Session::new(work, seed);
    let greeting = Header::bare(Kind::Hello, 0, if seed.below(200) == 0 { 7 } else { PEER.0 });
    let mut next = greeting.encode().to_vec();
    loop {
        frames.set(frames.get() + 1);
        match session.send(&next, seed) {
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

fn fuzz(work: &Work, number: u64, frames: u64) -> Ends {
    let mut seed = Seed(0x0DDB_1A5E_5BAD_5EED ^ number);
    let (sent, mut ends) = (Cell::new(0), Ends::default());
    while sent.get() < frames {
        *ends.entry(session(work, &mut seed, &sent)).or_default() += 1;
    }
    ends.insert(FRAMES_SENT, sent.get());
    ends
}

#[test]
#[expect(clippy::disallowed_methods, reason = "how long to test is no part of a plan")]
fn a_million_frames_into_a_live_rank() {
    let total: u64 = std::env::var("CROSSMESH_FUZZ_FRAMES").map_or(FRAMES, |n| n.parse().unwrap());
    let work = &Work::new();
    let parts: Vec<Ends> = std::thread::scope(|scope| {
        let part = |number| scope.spawn(move || fuzz(work, number, total.div_ceil(THREADS)));
        let threads: Vec<_> = (0..THREADS).map(part).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let mut ends = Ends::default();
    for (end, count) in parts.into_iter().flatten() {
        *ends.entry(end).or_default() += count;
    }
    let frames = ends.remove(FRAMES_SENT).unwrap_or(0);
    println!("{frames} frames, {} connections: {ends:?}", ends.values().sum::<u64>());
    assert!(frames >= total);
    // Every way to end was gone, so that none of them went untested.
    for end in ["done", "nonsense", "farewell", "silence", "segment"] {
        assert!(ends.contains_key(end) || total < FRAMES, "nothing ended by `{end}`: {ends:?}");
    }
}
