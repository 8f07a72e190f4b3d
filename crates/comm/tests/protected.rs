//! Somebody sits between two ranks whose frames are protected: whatever they do to a frame is refused and named, and nothing
//! of it reaches a tensor.

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;

use common::{planned, shake_hands, tcp_pair};
use crossmesh_comm::buffer::{RankBuffers, Sharing};
use crossmesh_comm::clock::Monotonic;
use crossmesh_comm::engine::{Engine, EngineOptions, JobReport, JobSpec};
use crossmesh_comm::error::CommError;
use crossmesh_comm::lab::pattern;
use crossmesh_comm::protect::Protect;
use crossmesh_comm::transport::stream::StreamLink;
use crossmesh_comm::wire::{Header, Kind};
use crossmesh_core::id::Rank;
use crossmesh_core::reshard::Strategy;
use crossmesh_core::reshard::lower::Addressing;
use crossmesh_core::verify::{Verified, VerifiedRank};

const BYTES: usize = 1_000_000;
const PROTECTIONS: [Protect; 2] = [Protect::Sign, Protect::Encrypt];

fn program() -> Verified {
    let layout = |mesh| format!("u8[{BYTES}]@{mesh}{{x:1}}(_)");
    let plan = planned(&[(&layout("A"), &layout("B"))], Strategy::SendRecv, None);
    Verified::plan(&plan, Addressing::Apart).unwrap()
}

/// A record of a protected connection, whole.
fn read_record(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let mut record = vec![0; 24];
    stream.read_exact(&mut record).ok()?;
    let len = u32::from_le_bytes(record[4..8].try_into().unwrap()) as usize;
    record.resize(24 + len + 16, 0);
    stream.read_exact(&mut record[24..]).ok()?;
    Some(record)
}

/// Passes on what goes from r0 to r1, record by record as `meddle` says, and what comes back as it is. Returns all that r0
/// sent.
fn stand_between(
    mut near: TcpStream,
    mut far: TcpStream,
    mut meddle: impl FnMut(usize, Vec<u8>) -> Vec<Vec<u8>>,
) -> Vec<Vec<u8>> {
    let (mut back_from, mut back_to) = (far.try_clone().unwrap(), near.try_clone().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let _end = std::io::copy(&mut back_from, &mut back_to);
            let _gone = back_to.shutdown(std::net::Shutdown::Write);
        });
        let mut seen = vec![];
        while let Some(record) = read_record(&mut near) {
            seen.push(record.clone());
            for sent in meddle(seen.len() - 1, record) {
                let _refused = far.write_all(&sent);
            }
        }
        let _gone = far.shutdown(std::net::Shutdown::Write);
        seen
    })
}

fn take_part(rank: VerifiedRank, stream: TcpStream, session: &crossmesh_comm::protect::Session) -> Ended {
    let (me, peer) = (rank.id(), Rank(1 - rank.id().0));
    let buffers = RankBuffers::allocate(rank, Sharing::Private).unwrap();
    pattern::fill_sources(&buffers).unwrap();
    pattern::poison_destinations(&buffers).unwrap();
    let link = StreamLink::protected(me, peer, stream, session).unwrap();
    let options = EngineOptions { deadline_ms: 5000, ..Default::default() };
    let mut engine = Engine::new(me, vec![(peer, Box::new(link))], Box::new(Monotonic), options).unwrap();
    let handle = engine.start(JobSpec::new(0, &buffers).unwrap()).unwrap();
    let result = engine.wait(handle);
    engine.close();
    let wrong = if result.is_ok() { pattern::check_destinations(&buffers).unwrap() } else { None };
    assert_eq!(wrong, None);
    result
}

type Ended = Result<JobReport, CommError>;

/// How it ends for r1, and what r0 said.
fn with_somebody_between(
    protect: Protect,
    meddle: impl FnMut(usize, Vec<u8>) -> Vec<Vec<u8>> + Send,
) -> (Ended, Vec<Vec<u8>>) {
    let program = program();
    // The handshake goes through unharmed; who meddles with it is a stranger, which is another test.
    let ((a, near), (far, b)) = (tcp_pair(), tcp_pair());
    let (x, y) = tcp_pair();
    let (_, _, [ours, theirs]) = shake_hands(x, y, protect, Rank(0), Rank(1));
    std::thread::scope(|scope| {
        let seen = scope.spawn(move || stand_between(near, far, meddle));
        let sender = program.rank(Rank(0));
        let sending = scope.spawn(move || take_part(sender, a, &ours));
        let ended = take_part(program.rank(Rank(1)), b, &theirs);
        let _likewise = sending.join().unwrap();
        (ended, seen.join().unwrap())
    })
}

fn is_named(ended: Ended, what: &str) {
    let error = ended.unwrap_err();
    assert_eq!(error.culprit(), Some(Rank(0)), "{error}");
    assert!(matches!(error, CommError::Protocol { .. }), "{error}");
    let text = error.to_string();
    assert!(text.starts_with("r1 cannot make sense of what r0"), "{text}");
    assert!(text.contains(what), "{text}, not {what}");
}

#[test]
fn who_only_looks_sees_frames_go_by() {
    for protect in PROTECTIONS {
        let (ended, seen) = with_somebody_between(protect, |_, record| vec![record]);
        assert_eq!(ended.unwrap().bytes_received, BYTES as u64);
        let readable = |record: &Vec<u8>| Header::decode(record[24..60].try_into().unwrap()).is_ok();
        assert!(seen.iter().all(|record| readable(record) == (protect == Protect::Sign)), "{protect}");
    }
}

#[test]
fn a_flipped_bit_is_refused_and_named() {
    for protect in PROTECTIONS {
        // Somewhere in the second frame: its header, its payload, its tag.
        for at in [30, 100, -1_isize] {
            let (ended, _) = with_somebody_between(protect, |number, mut record| {
                let at = if at < 0 { record.len() - 1 } else { (at as usize).min(record.len() - 1) };
                record[at] ^= u8::from(number == 1) << 3;
                vec![record]
            });
            is_named(ended, "frame 1 was changed on the way");
        }
    }
}

#[test]
fn a_replayed_frame_is_refused_and_named() {
    for protect in PROTECTIONS {
        let (ended, _) = with_somebody_between(protect, |number, record| match number {
            1 => vec![record.clone(), record],
            _ => vec![record],
        });
        is_named(ended, "frame 1 came again, replayed");
    }
}

#[test]
fn a_frame_held_back_is_refused_and_named() {
    for protect in PROTECTIONS {
        let (ended, _) = with_somebody_between(protect, |number, record| match number {
            1 => vec![],
            _ => vec![record],
        });
        is_named(ended, "frame 2 came where frame 1 is next");
    }
}

#[test]
fn a_frame_of_another_session_is_refused_and_named() {
    for protect in PROTECTIONS {
        let (_, earlier) = with_somebody_between(protect, |_, record| vec![record]);
        let (ended, _) = with_somebody_between(protect, |number, record| match number {
            1 => vec![earlier[1].clone()],
            _ => vec![record],
        });
        is_named(ended, "frame 1 is of another session");
    }
}

#[test]
fn a_frame_without_protection_is_refused_and_named() {
    for protect in PROTECTIONS {
        let plain = Header::bare(Kind::Bye, 0, 0).encode().to_vec();
        let (ended, _) = with_somebody_between(protect, |number, record| match number {
            1 => vec![plain.clone()],
            _ => vec![record],
        });
        is_named(ended, "an unprotected frame");
    }
}
