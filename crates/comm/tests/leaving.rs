//! Leaving a job: with everything done, or with a transfer that was only just started.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::Builder;
use std::time::Duration;

use crossmesh_comm::auth::Secret;
use crossmesh_comm::environment::{Flags, Variables};
use crossmesh_comm::job::{Job, JoinOptions, StartError, Work};
use crossmesh_core::id::Rank;

/// Far more than anything here takes; a hang fails the test.
const PATIENCE: Duration = Duration::from_secs(60);

fn join(rank: u32, port: u16) -> Job {
    let options = JoinOptions {
        flags: Flags { rank: Some(rank), world: Some(2), master: Some(format!("127.0.0.1:{port}")) },
        secret: Some(Secret::from_text("a secret of this very test").unwrap()),
        protect: None,
        attempt: 0,
        arrive: PATIENCE,
        deadline_ms: 10_000,
        log: Arc::new(|_| {}),
    };
    Job::join(options, &Variables::new()).unwrap()
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A plan that moves nothing: ranks compare its fingerprint, and are done.
fn plan(fingerprint: u64) -> Work {
    Work { fingerprint, buffers: None, keep: Box::new(()) }
}

/// What both ranks come to, each in a thread.
fn both<R: Send + 'static>(work: impl Fn(Job) -> R + Send + Sync + 'static) -> Vec<R> {
    let (port, work) = (free_port(), Arc::new(work));
    let (done, results) = channel();
    for rank in 0..2 {
        let (done, work) = (done.clone(), work.clone());
        let run = move || done.send((rank, work(join(rank, port))));
        let _waited_for_by_its_result = Builder::new().spawn(run).expect("a thread can be started");
    }
    let mut found: Vec<_> = (0..2).map(|_| results.recv_timeout(PATIENCE).expect("nobody hangs")).collect();
    found.sort_by_key(|(rank, _)| *rank);
    found.into_iter().map(|(_, result)| result).collect()
}

/// Its thread may not even have looked at it yet: who leaves all the same says so, and does not wait for who waits for it.
#[test]
fn a_transfer_that_was_just_started_is_one_under_way() {
    for _ in 0..5 {
        let heard = both(|job| {
            let (rank, started) = (job.rank(), job.start(plan(7), || {}));
            if rank == Rank(0) {
                job.close().unwrap();
                return None;
            }
            match started.wait() {
                Err(error) | Ok(Err(StartError::Comm(error))) => Some(error),
                Ok(other) => panic!("{other:?}"),
            }
        });
        let error = heard[1].as_ref().expect("it hears");
        assert_eq!(error.culprit(), Some(Rank(0)), "{error}");
        assert!(error.to_string().contains("it left with a transfer under way"), "{error}");
    }
}

#[test]
fn what_has_ended_is_not_under_way() {
    let closed = both(|job| {
        job.start(plan(7), || {}).wait().unwrap().unwrap();
        job.close()
    });
    assert!(closed.iter().all(Result::is_ok), "{closed:?}");
}
