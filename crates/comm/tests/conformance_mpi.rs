//! The conformance suite over MPI, and ranks that stop. Without mpirun around it, this starts itself with it.
#![expect(clippy::print_stdout, reason = "it has no harness that would")]

#[cfg(feature = "mpi")]
mod common;

#[cfg(not(feature = "mpi"))]
fn main() {
    println!("built without the feature `mpi`: nothing to test");
}

#[cfg(feature = "mpi")]
fn main() {
    let argument = std::env::args().nth(1);
    // Cargo passes on what is meant for other binaries.
    let victim = argument.as_deref().and_then(|arg| arg.strip_prefix("victim=")?.parse().ok());
    match (std::env::var_os("OMPI_COMM_WORLD_RANK"), victim) {
        (Some(rank), None) => as_a_rank(rank == "0"),
        (Some(_), Some(victim)) => stops::as_a_rank(victim),
        (None, _) if argument.is_some_and(|arg| arg == "--list") => {}
        (None, _) => {
            the_suite_passes();
            stops::a_stopped_rank_is_named_by_the_others();
        }
    }
}

/// As many ranks as the largest case needs.
#[cfg(feature = "mpi")]
const RANKS: u32 = 8;

#[cfg(feature = "mpi")]
fn under_mpirun(ranks: u32, argument: Option<String>) -> (bool, String) {
    use crossmesh_testkit::machine::{mpirun, output_within};
    let program = std::env::current_exe().unwrap();
    let limit = std::time::Duration::from_secs(300);
    let out = output_within(mpirun(ranks).arg(program).args(argument), limit);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (out.status.success(), text(&out.stdout) + &text(&out.stderr))
}

#[cfg(feature = "mpi")]
fn the_suite_passes() {
    let (passed, said) = under_mpirun(RANKS, None);
    println!("{said}");
    assert!(passed);
}

#[cfg(feature = "mpi")]
fn as_a_rank(speaks: bool) {
    use common::{Kind, over_mpi, suite};
    over_mpi::meet();
    let tell = |case: &str| {
        if speaks {
            println!("over MPI: {case} ... ok");
        }
    };
    macro_rules! run_each {
        ($($case:ident)*) => {
            $(
                suite::$case(&[Kind::Mpi]);
                tell(stringify!($case));
            )*
        };
    }
    with_cases!(run_each);
    over_mpi::side_by_side();
    tell("programs_run_side_by_side");
    over_mpi::leave();
}

/// A rank that stops when the others have begun: r0 to r1 to r2.
#[cfg(feature = "mpi")]
mod stops {
    use std::time::{Duration, Instant};

    use crossmesh_comm::engine::EngineOptions;
    use crossmesh_comm::error::CommError;
    use crossmesh_comm::lab::execute::{ExecuteOptions, Gate, execute, peers_of};
    use crossmesh_comm::rendezvous::{Abort, Fault, Meeting, RendezvousError};
    use crossmesh_comm::transport::mpi::OverMpi;
    use crossmesh_core::id::Rank;
    use crossmesh_core::reshard::lower::Addressing;
    use crossmesh_core::reshard::{Scheduler, Strategy};
    use crossmesh_core::verify::Verified;
    use rustix::process::{Signal, getpid, kill_process};

    use super::common::over_mpi::soon;
    use super::common::{Kind, options, planned};

    #[expect(clippy::disallowed_methods, reason = "a test of real time")]
    pub fn a_stopped_rank_is_named_by_the_others() {
        for victim in 0..3 {
            let start = Instant::now();
            let (passed, said) = super::under_mpirun(3, Some(format!("victim={victim}")));
            let took = start.elapsed();
            assert!(!passed, "{said}");
            let names = |line: &str| line.contains(&format!("stops because of r{victim} on "));
            // mpirun wakes the victim to end it; it may say so as well.
            let others = (0..3).filter(|r| *r != victim);
            let all = others
                .into_iter()
                .all(|r| said.lines().any(|l| l.starts_with(&format!("r{r} ")) && names(l)));
            assert!(all, "{said}");
            // A second for the deadline, two for the end, the rest for MPI's start and end on a busy machine; MPI itself waits for minutes.
            assert!(took < Duration::from_secs(30), "{took:?}: {said}");
            println!("over MPI: r{victim} stops, and the others name it ... ok");
        }
    }

    pub fn as_a_rank(victim: u32) {
        let plan = planned(
            &[("u8[300000]@A{x:1}(_)", "u8[300000]@B{x:2}(_)")],
            Strategy::Broadcast(Scheduler::Greedy),
            None,
        );
        let mut meeting = OverMpi::meet(soon()).unwrap();
        let me = meeting.rank();
        let program = Verified::plan(&plan, Addressing::Apart).unwrap();
        let peers = peers_of(&program, me).into_iter().collect();
        let links = meeting.connect(&peers, soon()).unwrap();
        let engine =
            EngineOptions { deadline_ms: 1000, hosts: meeting.hosts().to_vec(), ..Default::default() };
        // The first of the chain may be done before it is missed, and waits for the others then.
        let options = ExecuteOptions { engine, repeat: 2, ..options(Kind::Mpi) };
        let mut barrier = |_: Gate| {
            let aborted = |error| match error {
                RendezvousError::Aborted(Abort { culprit, host, text, .. }) => {
                    CommError::Aborted { me, culprit, host, reason: text }
                }
                other => panic!("{other}"),
            };
            meeting.barrier(soon()).map_err(aborted)?;
            if me == Rank(victim) {
                kill_process(getpid(), Signal::STOP).unwrap();
            }
            Ok(())
        };
        let failure = execute(program.rank(me), links, &options, &mut barrier).unwrap_err();
        let text = match &failure.error {
            CommError::Aborted { reason, .. } => reason.clone(),
            other => other.to_string(),
        };
        let abort = meeting.fail(Fault { blames: failure.error.culprit(), hearsay: false, text });
        println!("{me} stops because of {abort}");
        drop(meeting);
    }
}
