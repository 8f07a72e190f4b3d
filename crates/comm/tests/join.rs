//! Processes join a job through the library, by what their environment says.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use crossmesh_comm::environment::{Flags, Variables};
use crossmesh_comm::job::{Job, JoinOptions, Work};
use crossmesh_comm::protect::{PROTECT_VARIABLE, Protect};
use crossmesh_core::id::Rank;
use crossmesh_testkit::sockets::free_port;

/// A rank of two, on a host of its own, with its own idea of how to protect what passes.
fn join(rank: u32, port: u16, asked: Option<Protect>, variable: Option<&str>) -> Result<Job, String> {
    join_as((rank, 2), port, 0, asked, variable)
}

fn join_as(
    (rank, world): (u32, u32),
    port: u16,
    attempt: u32,
    asked: Option<Protect>,
    variable: Option<&str>,
) -> Result<Job, String> {
    let options = JoinOptions {
        flags: Flags { rank: Some(rank), world: Some(world), master: Some(format!("127.0.0.1:{port}")) },
        secret: None,
        protect: asked,
        attempt,
        arrive: Duration::from_secs(20),
        deadline_ms: 10_000,
        log: Arc::new(|_| {}),
    };
    let mut variables: Variables = [
        ("CROSSMESH_SECRET".into(), "a secret of this very test".into()),
        ("CROSSMESH_HOST".into(), format!("h{rank}")),
    ]
    .into();
    variables.extend(variable.map(|way| (PROTECT_VARIABLE.to_string(), way.to_string())));
    Job::join(options, &variables).map_err(|error| error.to_string())
}

type Way = (Option<Protect>, Option<&'static str>);

/// What two such ranks come to; the first goes on waiting for a second that was turned away, and is left to it.
#[expect(clippy::disallowed_methods, reason = "a rank that is left waiting is left to its deadline")]
fn second_of(first: Way, second: Way) -> Result<(), String> {
    let port = free_port();
    let (joined, came) = std::sync::mpsc::channel();
    for (rank, (asked, variable)) in [(0, first), (1, second)] {
        let joined = joined.clone();
        std::thread::spawn(move || {
            let job = join(rank, port, asked, variable);
            let result = job.and_then(|job| job.close().map_err(|error| error.to_string()));
            let _nobody_waits = joined.send((rank, result));
        });
    }
    let all = || came.recv_timeout(Duration::from_secs(30)).expect("both come to an end");
    loop {
        if let (1, result) = all() {
            return result;
        }
    }
}

#[test]
fn ranks_protect_what_passes_as_their_environment_says() {
    for way in ["none", "sign", "encrypt"] {
        assert_eq!(second_of((None, Some(way)), (None, Some(way))), Ok(()));
    }
    let odd = |error: Result<(), String>, words: &str| {
        let error = error.unwrap_err();
        assert!(error.contains(words), "{error}, not {words}");
    };
    let differs = "the other side has --protect encrypt, this one none";
    odd(second_of((None, Some("encrypt")), (None, None)), differs);
    // What the program asks for goes before the environment.
    odd(second_of((Some(Protect::Encrypt), Some("none")), (Some(Protect::None), Some("encrypt"))), differs);
    odd(
        join(1, 1, None, Some("aes")).map(drop),
        "CROSSMESH_PROTECT: `aes` is no way to protect a connection",
    );
}

/// Work that moves nothing: all ranks compare a number, the first time that they hear of it.
fn compared(job: &Job, fingerprint: u64) -> Result<(), String> {
    let work = Work { fingerprint, buffers: None, keep: Box::new(()) };
    match job.start(work, || {}).wait() {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(error) => Err(error.to_string()),
    }
}

/// One of three gives up: the two that are left meet again at the same place, as ranks of a world of two.
#[test]
fn whoever_is_left_meets_again() {
    let port = free_port();
    let all_in = Barrier::new(3);
    let both_left = Barrier::new(2);
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let (all_in, both_left) = (&all_in, &both_left);
            scope.spawn(move || {
                let job = join_as((rank, 3), port, 0, None, None).unwrap();
                compared(&job, 7).unwrap();
                all_in.wait();
                if rank == 1 {
                    return job.abort("it has had enough");
                }
                let error = compared(&job, 8).unwrap_err();
                assert!(error.contains("r1") && error.contains("it has had enough"), "r{rank}: {error}");
                drop(job);
                both_left.wait();
                let job = join_as((rank / 2, 2), port, 1, None, None).unwrap();
                assert_eq!((job.rank(), job.world()), (Rank(rank / 2), 2));
                compared(&job, 7).unwrap();
                job.close().unwrap();
            });
        }
    });
}
