//! Ranks die, fall silent or talk nonsense: everybody else ends in time and names them.

mod common;

use std::collections::BTreeMap;
use std::io::Write;
use std::time::Duration;

use common::{Kind, Links, links_of, planned, tcp_pair};
use crossmesh_comm::buffer::{RankBuffers, Sharing};
use crossmesh_comm::clock::{Clock, Monotonic};
use crossmesh_comm::engine::{Engine, EngineOptions, JobSpec};
use crossmesh_comm::error::CommError;
use crossmesh_comm::flight::{OpState, PeerState};
use crossmesh_comm::lab::pattern;
use crossmesh_comm::transport::stream::StreamLink;
use crossmesh_comm::wire::{Header, Kind as FrameKind};
use crossmesh_core::id::Rank;
use crossmesh_core::reshard::lower::Addressing;
use crossmesh_core::reshard::{Plan, Scheduler, Strategy};
use crossmesh_core::verify::Verified;

/// r0 -> r1 -> r2 -> r3, each following the one before.
fn chain(bytes: u64) -> Plan {
    let layout = |mesh, ranks| format!("f64[{}]@{mesh}{{x:{ranks}}}(_)", bytes / 8);
    planned(&[(&layout("A", 1), &layout("B", 3))], Strategy::Broadcast(Scheduler::Greedy), Some(64 << 10))
}

fn engine(rank: Rank, links: Links, deadline_ms: u64) -> Engine {
    let hosts = (0..8).map(|i| format!("host-{i}")).collect();
    Engine::new(rank, links, Box::new(Monotonic), EngineOptions { deadline_ms, hosts, ..Default::default() })
        .unwrap()
}

fn job(program: &Verified, rank: Rank) -> JobSpec {
    let buffers = RankBuffers::allocate(program.rank(rank), Sharing::Host).unwrap();
    pattern::fill_sources(&buffers).unwrap();
    JobSpec::new(0, &buffers).unwrap()
}

/// By rank: its error, if it has one, and how long it took.
type Outcome = BTreeMap<Rank, (Option<CommError>, Duration)>;

/// How a rank misbehaves.
#[derive(Clone, Copy)]
enum Fault {
    /// Gone after that many steps of its engine.
    Dies(usize),
    /// Still there, saying nothing.
    Silent(usize),
}

/// What every other rank says, and how long after the fault.
fn outcome(kind: Kind, culprit: Rank, fault: Fault, deadline_ms: u64) -> Outcome {
    let plan = chain(32 << 20);
    let program = Verified::plan(&plan, Addressing::Apart).unwrap();
    let links = links_of(&plan, kind);
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let mut stopped = Some(stopped);
        let mut others = vec![];
        for (rank, links) in (0..).map(Rank).zip(links) {
            let mut engine = engine(rank, links, deadline_ms);
            let spec = job(&program, rank);
            if rank == culprit {
                let stopped = stopped.take().expect("one culprit");
                scope.spawn(move || {
                    let handle = engine.start(spec).unwrap();
                    let steps = match fault {
                        Fault::Dies(steps) | Fault::Silent(steps) => steps,
                    };
                    for _ in 0..steps {
                        let _unfinished = engine.test(handle);
                    }
                    if let Fault::Silent(_) = fault {
                        let _told = stopped.recv();
                    }
                });
                continue;
            }
            others.push(scope.spawn(move || {
                let handle = engine.start(spec).unwrap();
                let start = Monotonic.now_ns();
                let Err(error) = engine.wait(handle) else {
                    let waited = Duration::from_nanos(Monotonic.now_ns() - start);
                    engine.close();
                    return (rank, (None, waited));
                };
                let waited = Duration::from_nanos(Monotonic.now_ns() - start);
                let record = engine.flight_record().expect("a failed engine keeps a record");
                assert!(record.jobs[0].ops.iter().any(|op| op.state != OpState::Done));
                assert_eq!(record.culprit, Some(culprit));
                assert!(record.peers.iter().any(|p| p.state == PeerState::Connected || p.rank == culprit));
                (rank, (Some(error), waited))
            }));
        }
        let outcome = others.into_iter().map(|t| t.join().unwrap()).collect();
        drop(stop);
        outcome
    })
}

/// A rank that has passed everything on to a healthy one is done before it can know.
fn everybody_names(culprit: Rank, outcome: &Outcome, within: Duration) {
    assert_eq!(outcome.len(), 3);
    for (rank, (error, waited)) in outcome {
        let Some(error) = error else {
            assert!(rank.0 + 1 < culprit.0, "{rank} ended as if nothing had happened to {culprit}");
            continue;
        };
        assert_eq!(error.culprit(), Some(culprit), "{rank}: {error}");
        assert!(error.to_string().contains(&format!("host host-{}", culprit.0)), "{rank}: {error}");
        assert!(*waited < within, "{rank} took {waited:?}: {error}");
    }
}

fn deaths(kind: Kind) {
    for culprit in 0..4 {
        for steps in [0, 3] {
            let outcome = outcome(kind, Rank(culprit), Fault::Dies(steps), 10_000);
            // Well before the deadline: nobody waited for that.
            everybody_names(Rank(culprit), &outcome, Duration::from_secs(8));
        }
    }
}

fn silence(kind: Kind) {
    for culprit in 0..4 {
        let outcome = outcome(kind, Rank(culprit), Fault::Silent(2), 2000);
        everybody_names(Rank(culprit), &outcome, Duration::from_secs(12));
    }
}

#[test]
fn a_death_is_named_by_everybody_mem() {
    deaths(Kind::Mem);
}

#[test]
fn a_death_is_named_by_everybody_tcp() {
    deaths(Kind::Tcp);
}

#[test]
fn a_death_is_named_by_everybody_shm() {
    deaths(Kind::Shm);
}

#[test]
fn silence_is_named_by_everybody_mem() {
    silence(Kind::Mem);
}

#[test]
fn silence_is_named_by_everybody_tcp() {
    silence(Kind::Tcp);
}

#[test]
fn silence_is_named_by_everybody_shm() {
    silence(Kind::Shm);
}

/// r0 sends to r1, whose place is taken by what the test writes.
fn talk_to(bytes: &[u8]) -> CommError {
    let plan = planned(&[("u8[1000000]@A{x:1}(_)", "u8[1000000]@B{x:1}(_)")], Strategy::SendRecv, None);
    let program = Verified::plan(&plan, Addressing::Apart).unwrap();
    let (mine, mut theirs) = tcp_pair();
    theirs.write_all(bytes).unwrap();
    let link = StreamLink::tcp(Rank(0), Rank(1), mine).unwrap();
    let mut engine = engine(Rank(0), vec![(Rank(1), Box::new(link))], 500);
    let handle = engine.start(job(&program, Rank(0))).unwrap();
    engine.wait(handle).unwrap_err()
}

#[test]
fn nonsense_is_named() {
    let hello = Header::bare(FrameKind::Hello, 0, 1).encode().to_vec();
    let with = |more: &[u8]| [&hello, more].concat();
    let starts = "r0 cannot make sense of what r1 (host host-1) sends during send t0 to r1 of tensor 0 \
                  (u8[1000000]), 1000000 B outstanding: ";
    let says = |bytes: &[u8], what: &str| {
        let error = talk_to(bytes);
        assert_eq!(error.culprit(), Some(Rank(1)));
        assert!(error.to_string().starts_with(&format!("{starts}{what}")), "{error}");
    };
    says(&[0x5a; 4096], "a frame starts with 0x5a5a5a5a, not with the magic number\nhint:");
    let stranger = Header::bare(FrameKind::Hello, 0, 7).encode();
    says(&stranger, "Hello with tag 7 of job 0 has no place here: another rank was to be here");
    let unasked = Header::of(FrameKind::Data, 0, 0, 0, b"hi").encode();
    says(&with(&unasked), "Data with tag 0 of job 0 has no place here: nobody waits for it");
    let mut broken = Header::of(FrameKind::Ready, 0, 0, 0, &[0; 4]).encode().to_vec();
    broken.extend_from_slice(&[1, 0, 0, 0]);
    says(&with(&broken), "a frame's payload has checksum 0x9522e17f, its sender computed 0x48674bc7");
}

#[test]
fn a_peer_that_never_answers_is_named() {
    let error = talk_to(&Header::bare(FrameKind::Hello, 0, 1).encode());
    assert!(matches!(error, CommError::Timeout { peer: Rank(1), bytes: 1_000_000, .. }), "{error}");
}

/// A peer that dies, or leaves, while nobody needs it is missed by the next job that does.
#[test]
fn a_peer_lost_between_jobs_is_named_by_the_next_one() {
    for (kind, leaves) in [Kind::Mem, Kind::Tcp, Kind::Shm].into_iter().flat_map(|k| [(k, false), (k, true)])
    {
        let plan = chain(1 << 20);
        let program = Verified::plan(&plan, Addressing::Apart).unwrap();
        let mut engines: Vec<Engine> = (0..)
            .map(Rank)
            .zip(links_of(&plan, kind))
            .map(|(rank, links)| engine(rank, links, 300))
            .collect();
        let mut gone = engines.remove(1);
        if leaves {
            // For its deadline: it waits for the farewell of ranks that nobody drives here.
            gone.close();
        }
        drop(gone);
        for _ in 0..3 {
            engines[0].turn().unwrap();
        }
        let handle = engines[0].start(job(&program, Rank(0))).unwrap();
        let error = engines[0].wait(handle).unwrap_err();
        assert_eq!(error.culprit(), Some(Rank(1)), "{error}");
        assert!(error.to_string().contains("before this began"), "{error}");
    }
}
