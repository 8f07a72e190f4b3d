//! Ranks as threads, joined by links of one kind; over MPI, as processes.
#![allow(dead_code)]

#[cfg(feature = "mpi")]
pub mod over_mpi;
pub mod side_by_side;
pub mod suite;

use std::collections::BTreeMap;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Barrier;
use std::time::Duration;

use crossmesh_comm::auth::{Claim, Role, Secret, answer, dial};
use crossmesh_comm::buffer::Sharing;
use crossmesh_comm::deadline::{Deadline, Socket};
use crossmesh_comm::engine::EngineOptions;
use crossmesh_comm::lab::execute::{ExecuteOptions, Failure, Gate, RankReport, execute, peers_of};
use crossmesh_comm::protect::{Protect, Session};
use crossmesh_comm::transport::Link;
use crossmesh_comm::transport::mem::MemLink;
use crossmesh_comm::transport::stream::StreamLink;
use crossmesh_core::id::Rank;
use crossmesh_core::reshard::lower::Addressing;
use crossmesh_core::reshard::{Plan, PlanOptions, Problem, Strategy, lower, plan};
use crossmesh_core::verify::Verified;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Mem,
    Tcp,
    Shm,
    /// Over TCP, every frame protected.
    Signed,
    Encrypted,
    /// Ranks are processes, which mpirun has started.
    #[cfg(feature = "mpi")]
    Mpi,
}

pub const KINDS: [Kind; 5] = [Kind::Mem, Kind::Tcp, Kind::Shm, Kind::Signed, Kind::Encrypted];

pub type Links = Vec<(Rank, Box<dyn Link>)>;

pub fn tcp_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (a, listener.accept().unwrap().0)
}

pub fn link_pair(kind: Kind, a: Rank, b: Rank) -> (Box<dyn Link>, Box<dyn Link>) {
    match kind {
        Kind::Mem => {
            let (x, y) = MemLink::pair().unwrap();
            (Box::new(x), Box::new(y))
        }
        Kind::Tcp => {
            let (x, y) = tcp_pair();
            (Box::new(StreamLink::tcp(a, b, x).unwrap()), Box::new(StreamLink::tcp(b, a, y).unwrap()))
        }
        Kind::Shm => {
            let (x, y) = UnixStream::pair().unwrap();
            (Box::new(StreamLink::local(a, b, x).unwrap()), Box::new(StreamLink::local(b, a, y).unwrap()))
        }
        Kind::Signed => protected_pair(Protect::Sign, a, b),
        Kind::Encrypted => protected_pair(Protect::Encrypt, a, b),
        #[cfg(feature = "mpi")]
        Kind::Mpi => unreachable!("the other end is in another process"),
    }
}

fn protected_pair(protect: Protect, a: Rank, b: Rank) -> (Box<dyn Link>, Box<dyn Link>) {
    let (x, y) = tcp_pair();
    let (x, y, [ours, theirs]) = shake_hands(x, y, protect, a, b);
    (
        Box::new(StreamLink::protected(a, b, x, &ours).unwrap()),
        Box::new(StreamLink::protected(b, a, y, &theirs).unwrap()),
    )
}

/// The handshake of a data connection, from `a` to `b`.
pub fn shake_hands(
    x: TcpStream,
    y: TcpStream,
    protect: Protect,
    a: Rank,
    b: Rank,
) -> (TcpStream, TcpStream, [Session; 2]) {
    let secret = Secret::from_text("a secret of sixteen").unwrap().protecting(protect);
    let soon = || Deadline::after(Duration::from_secs(10));
    let claim = Claim { role: Role::Data, from: a, to: b };
    let (mut x, mut y) = (Socket::Tcp(x), Socket::Tcp(y));
    let (ours, theirs) = std::thread::scope(|scope| {
        let dialed = scope.spawn(|| dial(&mut x, &secret, claim, soon()).unwrap());
        let (_, theirs) = answer(&mut y, &secret, soon(), |_| Ok(())).unwrap();
        (dialed.join().unwrap(), theirs)
    });
    match (x.without_timeouts().unwrap(), y.without_timeouts().unwrap()) {
        (Socket::Tcp(x), Socket::Tcp(y)) => (x, y, [ours, theirs]),
        _ => unreachable!("they are TCP's"),
    }
}

/// The links of every rank of a plan.
pub fn links_of(plan: &Plan, kind: Kind) -> Vec<Links> {
    let program = lower(plan);
    let mut links: Vec<Links> = program.ranks.iter().map(|_| vec![]).collect();
    for a in (0..program.ranks.len() as u32).map(Rank) {
        for b in peers_of(&program, a).into_iter().filter(|b| *b > a) {
            let (x, y) = link_pair(kind, a, b);
            links[a.index()].push((b, x));
            links[b.index()].push((a, y));
        }
    }
    links
}

pub fn options(kind: Kind) -> ExecuteOptions {
    let hosts = (0..64).map(|i| format!("h{i}")).collect();
    ExecuteOptions {
        engine: EngineOptions { deadline_ms: 20_000, hosts, ..Default::default() },
        sharing: if kind == Kind::Shm { Sharing::Host } else { Sharing::Private },
        gpu: None,
        repeat: 1,
        check: true,
        measure_memory: false,
    }
}

pub fn run_all(
    plan: &Plan,
    kind: Kind,
    options: &ExecuteOptions,
) -> BTreeMap<Rank, Result<RankReport, Failure>> {
    #[cfg(feature = "mpi")]
    if kind == Kind::Mpi {
        return over_mpi::run_all(plan, options);
    }
    run_each(plan, kind, |_| options.clone())
}

/// The same with options of each rank's own.
pub fn run_each(
    plan: &Plan,
    kind: Kind,
    options: impl Fn(Rank) -> ExecuteOptions,
) -> BTreeMap<Rank, Result<RankReport, Failure>> {
    let program = &Verified::plan(plan, Addressing::Apart).unwrap();
    let links = links_of(plan, kind);
    let gate = Barrier::new(links.len());
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..)
            .zip(links)
            .map(|(rank, links)| {
                let (gate, options) = (&gate, options(Rank(rank)));
                scope.spawn(move || {
                    let mut barrier = |_: Gate| {
                        gate.wait();
                        Ok(())
                    };
                    (Rank(rank), execute(program.rank(Rank(rank)), links, &options, &mut barrier))
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Runs a plan and insists that every element is right on every rank.
pub fn run(plan: &Plan, kind: Kind) -> Vec<RankReport> {
    run_with(plan, kind, &options(kind))
}

pub fn run_with(plan: &Plan, kind: Kind, options: &ExecuteOptions) -> Vec<RankReport> {
    let reports = run_all(plan, kind, options);
    reports
        .into_values()
        .map(|report| {
            let report = report.unwrap_or_else(|e| panic!("{kind:?}: {e}"));
            assert!(report.verified, "{kind:?} {}: {:?}", report.rank, report.wrong);
            report
        })
        .collect()
}

pub fn planned(pairs: &[(&str, &str)], strategy: Strategy, chunk_bytes: Option<u64>) -> Plan {
    let pairs = pairs.iter().map(|(s, d)| (String::new(), s.parse().unwrap(), d.parse().unwrap())).collect();
    let problem = Problem::new(pairs, Default::default()).unwrap();
    plan(&problem, &PlanOptions { strategy, chunk_bytes, ..Default::default() }).unwrap()
}
