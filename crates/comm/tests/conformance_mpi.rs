//! The conformance suite over MPI. Without mpirun around it, this starts itself with it.
#![expect(clippy::print_stdout, reason = "it has no harness that would")]

#[cfg(feature = "mpi")]
mod common;

#[cfg(not(feature = "mpi"))]
fn main() {}

#[cfg(feature = "mpi")]
fn main() {
    match std::env::var_os("OMPI_COMM_WORLD_RANK") {
        Some(rank) => as_a_rank(rank == "0"),
        None => under_mpirun(),
    }
}

/// As many ranks as the largest case needs.
#[cfg(feature = "mpi")]
const RANKS: u32 = 8;

#[cfg(feature = "mpi")]
fn under_mpirun() {
    use crossmesh_testkit::machine::{mpirun, output_within};
    // `cargo test -- --list` and the like are for other binaries.
    if std::env::args().any(|arg| arg == "--list") {
        return;
    }
    let program = std::env::current_exe().unwrap();
    let limit = std::time::Duration::from_secs(300);
    let out = output_within(mpirun(RANKS).arg(program), limit);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    println!("{}{}", text(&out.stdout), text(&out.stderr));
    assert!(out.status.success(), "{}", out.status);
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
