//! How long a message takes from one process to another and back, by the calls that a program makes:
//! `crossmesh launch -n 2 -- target/release/examples/ping BYTES ROUNDS`.
//!
//! A send from one rank to the other is a broadcast in a group of two. Ranks of one host talk over shared memory, those
//! of two over TCP; `CROSSMESH_HOST` says where a rank is. The first rank prints one JSON line; `bench/peers/local.py`
//! puts it beside torch gloo's.
#![allow(clippy::print_stdout)]

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use crossmesh_comm::auth::Secret;
use crossmesh_comm::clock::{Clock, Monotonic};
use crossmesh_comm::collectives::{Buffer, CallError, Collectives, GroupId};
use crossmesh_comm::deadline::Deadline;
use crossmesh_comm::engine::{Engine, EngineOptions};
use crossmesh_comm::environment::{Flags, host_name, place, variables};
use crossmesh_comm::rendezvous::{Meeting, News, OverSockets, Patience};
use crossmesh_core::cluster::{Cluster, Host};
use crossmesh_core::collective::CollectiveOptions;
use crossmesh_core::id::Rank;

const WARM_UP: u32 = 20;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [bytes, rounds] = args.as_slice() else { return Err("usage: ping BYTES ROUNDS".into()) };
    let (bytes, rounds): (usize, u32) = (bytes.parse()?, rounds.parse()?);
    let (mut comm, meeting) = join()?;
    let group = comm.world()?;
    let mut data = comm.buffer::<i32>(bytes / 4)?;
    data.fill(1);
    for _ in 0..WARM_UP.min(rounds) {
        data = there_and_back(&mut comm, group, data)?;
    }
    let mut seconds = vec![];
    for _ in 0..rounds {
        let start_ns = Monotonic.now_ns();
        data = there_and_back(&mut comm, group, data)?;
        seconds.push((Monotonic.now_ns() - start_ns) as f64 * 1e-9 / 2.0);
    }
    if data.iter().any(|element| *element != 1) {
        return Err("what came back is not what was sent".into());
    }
    seconds.sort_by(f64::total_cmp);
    if comm.rank() == Rank(0) {
        println!(
            "{{\"bytes\":{bytes},\"median_s\":{:e},\"least_s\":{:e}}}",
            seconds[seconds.len() / 2],
            seconds[0]
        );
    }
    comm.close();
    Box::new(meeting).leave();
    Ok(())
}

fn there_and_back(
    comm: &mut Collectives,
    group: GroupId,
    data: Buffer<i32>,
) -> Result<Buffer<i32>, CallError> {
    let there = comm.start_broadcast(group, data, Rank(0))?;
    let data = comm.wait(there)?;
    let back = comm.start_broadcast(group, data, Rank(1))?;
    comm.wait(back)
}

/// Meets the other rank of the job that `crossmesh launch` started.
fn join() -> Result<(Collectives, OverSockets), Box<dyn Error>> {
    let variables = variables();
    let place = place(&Flags::default(), &variables)?;
    if place.world != 2 {
        return Err("this is for two ranks".into());
    }
    let me = place.rank;
    let secret = Secret::from_variables(&variables)?.ok_or("no secret was given to this rank")?;
    let soon = || Deadline::after(Duration::from_secs(20));
    let (silence, barrier) = (Duration::from_secs(10), Duration::from_secs(20));
    let patience = Patience { arrive: soon(), silence, barrier, late: None, local_world: None };
    let (roster, log) = ([Rank(0), Rank(1)].into(), Arc::new(|line: &str| eprintln!("{line}")));
    let abort = Arc::new(|news: News<'_>| {
        if let News::Abort(abort) = news {
            eprintln!("{abort}");
            std::process::exit(2);
        }
    });
    let mut meeting = OverSockets::meet(place, &host_name(&variables), roster, secret, patience, log, abort)?;
    let links = meeting.connect(&[Rank(1 - me.0)].into(), soon())?;
    let engine = Engine::new(me, links, Box::new(Monotonic), EngineOptions::default())?;
    let hosts = match meeting.hosts() {
        [a, b] if a == b => vec![Host::with_devices(2)],
        _ => vec![Host::with_devices(1), Host::with_devices(1)],
    };
    let (cluster, options) = (Cluster::of_hosts(hosts), CollectiveOptions::default());
    Ok((Collectives::new(me, engine, cluster, meeting.sharing(), options), meeting))
}
