//! Engines that a thread drives: jobs end while nobody waits for them, and an idle rank still lives.

mod common;

use std::time::Duration;

use crossmesh_comm::buffer::Sharing;
use crossmesh_comm::clock::{Clock, Monotonic};
use crossmesh_comm::collectives::{Buffer, Collectives, Reduction};
use crossmesh_comm::driver::{Driver, Promise};
use crossmesh_comm::engine::{Engine, EngineOptions};
use crossmesh_comm::error::CommError;
use crossmesh_comm::transport::mem::mesh;
use crossmesh_core::cluster::{Cluster, Host};
use crossmesh_core::collective::CollectiveOptions;
use crossmesh_core::id::Rank;

/// The collectives of so many ranks, which have agreed on a group of all.
fn ranks(count: u32, deadline_ms: u64) -> Vec<Collectives> {
    let cluster = Cluster::of_hosts(vec![Host::with_devices(count)]);
    let options = EngineOptions { deadline_ms, ..EngineOptions::default() };
    let rank = |(me, links)| {
        let engine = Engine::new(me, links, Box::new(Monotonic), options.clone()).unwrap();
        Collectives::new(me, engine, cluster.clone(), Sharing::Private, CollectiveOptions::default())
    };
    let mut ranks: Vec<Collectives> = (0..).map(Rank).zip(mesh(count as usize).unwrap()).map(rank).collect();
    std::thread::scope(|scope| {
        ranks.iter_mut().for_each(|comm| drop(scope.spawn(|| comm.world().unwrap())));
    });
    ranks
}

type Sum = Promise<Buffer<f32>>;

/// Starts an all-reduce; the driver says when it has ended.
fn all_reduce(driver: &Driver<Collectives>, of: f32) -> Sum {
    let mut pending = None;
    let mut started = false;
    driver.when(move |comm| {
        if !started {
            started = true;
            let all = comm.world().unwrap();
            let elements = comm.buffer_of(&[of; 1000]).unwrap();
            pending = Some(comm.start_all_reduce(all, elements, Reduction::Sum).unwrap());
        }
        comm.finish(pending.take()?).map_err(|still| pending = Some(still)).ok()
    })
}

#[test]
fn jobs_end_while_nobody_waits_for_them() {
    let drivers: Vec<Driver<Collectives>> =
        ranks(3, 10_000).into_iter().map(|c| Driver::start(c).unwrap()).collect();
    for round in 0..20 {
        let sums: Vec<Sum> =
            drivers.iter().zip(1..).map(|(driver, rank)| all_reduce(driver, (rank * round) as f32)).collect();
        // One thread holds all of them, and asks for the last first.
        for sum in sums.into_iter().rev() {
            let sum = sum.wait().unwrap();
            assert!(sum.iter().all(|x| *x == (6 * round) as f32));
        }
    }
    let mut stopped: Vec<Collectives> = drivers.into_iter().map(|driver| driver.stop().unwrap()).collect();
    assert_eq!(stopped.iter_mut().map(|c| c.rank().0).collect::<Vec<_>>(), [0, 1, 2]);
}

/// r1 has nothing to do for longer than the deadline; it is not taken for dead.
#[test]
fn a_rank_that_is_driven_is_alive() {
    let mut comms = ranks(2, 2000).into_iter();
    let (first, second) = (comms.next().unwrap(), comms.next().unwrap());
    let (first, second) = (Driver::start(first).unwrap(), Driver::start(second).unwrap());
    let sum = all_reduce(&first, 1.0);
    let start = Monotonic.now_ns();
    while Monotonic.now_ns() - start < 4_500_000_000 {
        assert!(sum.now().is_none_or(|result| result.is_ok()), "r0 gave up on r1");
        std::thread::sleep(Duration::from_millis(50));
    }
    let other = all_reduce(&second, 2.0);
    assert!(sum.wait().unwrap().iter().all(|x| *x == 3.0));
    assert!(other.wait().unwrap().iter().all(|x| *x == 3.0));
}

#[test]
fn whoever_waits_for_a_failed_engine_is_told_why() {
    let mut comms = ranks(2, 10_000).into_iter();
    let (first, second) = (comms.next().unwrap(), comms.next().unwrap());
    let driver = Driver::start(first).unwrap();
    let sum = all_reduce(&driver, 1.0);
    drop(second);
    assert!(matches!(sum.wait(), Err(CommError::PeerLost { peer: Rank(1), .. })));
    let later = driver.call(|comm| comm.rank());
    assert!(matches!(later, Err(CommError::PeerLost { peer: Rank(1), .. })), "{later:?}");
}
