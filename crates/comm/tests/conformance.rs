//! The same programs over every transport: every element is looked at. MPI has a binary of its own, `conformance_mpi`.

mod common;

use common::{KINDS, Kind, options, planned, run_with, suite};
use crossmesh_core::reshard::Strategy;

macro_rules! test_each {
    ($($case:ident)*) => {
        $(
            #[test]
            fn $case() {
                suite::$case(&KINDS);
            }
        )*
    };
}

with_cases!(test_each);

#[test]
fn shared_memory_needs_no_payload_in_the_socket() {
    // What the sockets carried is not counted; that memory is private shows that the other way works as well.
    let plan = planned(&[("u8[1000000]@A{x:1}(_)", "u8[1000000]@B{x:1}(_)")], Strategy::SendRecv, None);
    let private = crossmesh_comm::lab::execute::ExecuteOptions {
        sharing: crossmesh_comm::buffer::Sharing::Private,
        ..options(Kind::Shm)
    };
    run_with(&plan, Kind::Shm, &private);
}
