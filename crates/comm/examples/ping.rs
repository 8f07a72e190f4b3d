//! How long a message takes from one process to another and back, by the calls that a program makes:
//! `crossmesh launch -n 2 -- target/release/examples/ping BYTES ROUNDS`; or a sum over all ranks:
//! `crossmesh launch -n 4 -- target/release/examples/ping BYTES ROUNDS all-reduce`.
//!
//! A send from one rank to the other is a broadcast in a group of two. Ranks of one host talk over shared memory, those
//! of two over TCP; `CROSSMESH_HOST` says where a rank is. Every rank prints one JSON line, with the processor time that its
//! rounds took; `bench/peers/local.py` puts it beside torch gloo's.
#![allow(clippy::print_stdout)]

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use crossmesh_comm::auth::Secret;
use crossmesh_comm::clock::{Clock, Monotonic};
use crossmesh_comm::collectives::{Buffer, CallError, Collectives, GroupId, Reduction};
use crossmesh_comm::deadline::Deadline;
use crossmesh_comm::engine::{Engine, EngineOptions};
use crossmesh_comm::environment::{Flags, host_name, place, variables};
use crossmesh_comm::protect::Protect;
use crossmesh_comm::rendezvous::{Meeting, News, OverSockets, Patience};
use crossmesh_core::cluster::{Cluster, Host};
use crossmesh_core::collective::CollectiveOptions;
use crossmesh_core::id::Rank;

const WARM_UP: u32 = 20;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (bytes, rounds, round): (&str, &str, Round) = match args.as_slice() {
        [bytes, rounds] => (bytes, rounds, there_and_back),
        [bytes, rounds, what] if what == "all-reduce" => (bytes, rounds, sum),
        _ => return Err("usage: ping BYTES ROUNDS [all-reduce]".into()),
    };
    let (bytes, rounds): (usize, u32) = (bytes.parse()?, rounds.parse()?);
    let (mut comm, meeting) = join()?;
    let group = comm.world()?;
    let mut data = comm.buffer::<f32>(bytes / 4)?;
    data.fill(0.0);
    for _ in 0..WARM_UP.min(rounds) {
        data = round(&mut comm, group, data)?;
    }
    let (mut seconds, processor_s) = (vec![], processor_s());
    for _ in 0..rounds {
        let start_ns = Monotonic.now_ns();
        data = round(&mut comm, group, data)?;
        let halves = if args.len() == 2 { 2.0 } else { 1.0 };
        seconds.push((Monotonic.now_ns() - start_ns) as f64 * 1e-9 / halves);
    }
    let processor_s = (self::processor_s() - processor_s) / f64::from(rounds);
    // What everybody has as 0 stays 0; what a rank alone has as 1 arrives once.
    if comm.rank() == Rank(0) && bytes >= 4 {
        data[bytes / 4 - 1] = 1.0;
    }
    data = round(&mut comm, group, data)?;
    if data.iter().rev().skip(1).any(|element| *element != 0.0) || data.last().is_some_and(|x| *x != 1.0) {
        return Err("what came back is not what was sent".into());
    }
    seconds.sort_by(f64::total_cmp);
    println!(
        "{{\"bytes\":{bytes},\"median_s\":{:e},\"least_s\":{:e},\"processor_s\":{processor_s:e}}}",
        seconds[seconds.len() / 2],
        seconds[0]
    );
    comm.close();
    Box::new(meeting).leave();
    Ok(())
}

/// What is timed.
type Round = fn(&mut Collectives, GroupId, Buffer<f32>) -> Result<Buffer<f32>, CallError>;

/// What this process has had of a processor.
fn processor_s() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

fn sum(comm: &mut Collectives, group: GroupId, data: Buffer<f32>) -> Result<Buffer<f32>, CallError> {
    let pending = comm.start_all_reduce(group, data, Reduction::Sum)?;
    comm.wait(pending)
}

fn there_and_back(
    comm: &mut Collectives,
    group: GroupId,
    data: Buffer<f32>,
) -> Result<Buffer<f32>, CallError> {
    let there = comm.start_broadcast(group, data, Rank(0))?;
    let data = comm.wait(there)?;
    let back = comm.start_broadcast(group, data, Rank(1))?;
    comm.wait(back)
}

/// Meets the other ranks of the job that `crossmesh launch` started.
fn join() -> Result<(Collectives, OverSockets), Box<dyn Error>> {
    let variables = variables();
    let place = place(&Flags::default(), &variables)?;
    let (me, world) = (place.rank, place.world);
    let secret = Secret::from_variables(&variables)?.ok_or("no secret was given to this rank")?;
    let secret = secret.protecting(Protect::from_variables(&variables)?);
    let soon = || Deadline::after(Duration::from_secs(20));
    let (silence, barrier) = (Duration::from_secs(10), Duration::from_secs(20));
    let patience = Patience { arrive: soon(), silence, barrier, late: None, local_world: None };
    let (roster, log) = ((0..world).map(Rank).collect(), Arc::new(|line: &str| eprintln!("{line}")));
    let abort = Arc::new(|news: News<'_>| {
        if let News::Abort(abort) = news {
            eprintln!("{abort}");
            std::process::exit(2);
        }
    });
    let mut meeting = OverSockets::meet(place, &host_name(&variables), roster, secret, patience, log, abort)?;
    let links = meeting.connect(&(0..world).map(Rank).filter(|rank| *rank != me).collect(), soon())?;
    let engine = Engine::new(me, links, Box::new(Monotonic), EngineOptions::default())?;
    let hosts = match meeting.hosts() {
        [first, others @ ..] if others.iter().all(|host| host == first) => vec![Host::with_devices(world)],
        _ => vec![Host::with_devices(1); world as usize],
    };
    let (cluster, options) = (Cluster::of_hosts(hosts), CollectiveOptions::default());
    Ok((Collectives::new(me, engine, cluster, meeting.sharing(), options), meeting))
}
