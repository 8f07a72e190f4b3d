//! The same programs over every transport: every element is looked at.

mod common;

use common::{KINDS, Kind, options, planned, run, run_with};
use crossmesh_core::reshard::{Scheduler, Strategy};

/// A reshard by every strategy that can, over every transport.
fn reshard(src: &str, dst: &str) {
    for strategy in
        [Strategy::SendRecv, Strategy::AllGather, Strategy::Broadcast(Scheduler::Greedy), Strategy::Flow]
    {
        let plan = planned(&[(src, dst)], strategy, None);
        KINDS.into_iter().for_each(|kind| drop(run(&plan, kind)));
    }
}

#[test]
fn point_to_point_of_many_sizes() {
    for bytes in [0, 1, 7, 4095, 8192, 8193, 65_536, 300_001, 3 << 20] {
        let layout = |mesh| format!("u8[{bytes}]@{mesh}{{x:1}}(_)");
        let plan = planned(&[(&layout("A"), &layout("B"))], Strategy::SendRecv, None);
        for kind in KINDS {
            let reports = run(&plan, kind);
            assert_eq!((reports[0].bytes_sent, reports[1].bytes_received), (bytes, bytes));
        }
    }
}

#[test]
fn columns_become_rows() {
    reshard("f32[96,100]@A{x:4}(_,x)", "f32[96,100]@B{x:3}(x,_)");
}

#[test]
fn chains_stream() {
    let plan = planned(
        &[("f64[40000]@A{x:1}(_)", "f64[40000]@B{x:5}(_)")],
        Strategy::Broadcast(Scheduler::Greedy),
        Some(20_000),
    );
    KINDS.into_iter().for_each(|kind| drop(run(&plan, kind)));
}

#[test]
fn one_holder_feeds_many() {
    reshard("i64[5000]@A{x:1}(_)", "i64[5000]@B{x:2,y:3}(y)");
}

#[test]
fn meshes_overlap() {
    reshard("f32[60,50]@A{x:4}=0-3(x,_)", "f32[60,50]@B{x:4}=2-5(_,x)");
}

#[test]
fn fused_parts_move() {
    reshard("bf16[48,32]@A{tp:2}(tp of 32+8+8,_)", "bf16[48,32]@B{tp:4}(tp of 32+8+8,_)");
}

#[test]
fn partial_sums_add_up() {
    for dtype in ["f32", "f64", "i32", "i64", "bf16", "f16"] {
        for op in ["sum", "max", "min"] {
            let src = format!("{dtype}[64,33]@A{{dp:3,tp:2}}(tp,_ | {op} dp)");
            let plan = planned(&[(&src, &format!("{dtype}[64,33]@B{{x:2}}(_,x)"))], Strategy::Flow, None);
            KINDS.into_iter().for_each(|kind| drop(run(&plan, kind)));
        }
    }
}

#[test]
fn many_small_tensors_move_together() {
    let pair = ("f32[16,16]@A{x:2}(x,_)", "f32[16,16]@B{x:2}(_,x)");
    let plan = planned(&vec![pair; 500], Strategy::Flow, None);
    KINDS.into_iter().for_each(|kind| drop(run(&plan, kind)));
}

#[test]
fn a_run_repeats() {
    let plan = planned(&[("f32[300,300]@A{x:2}(x,_)", "f32[300,300]@B{x:3}(x,_)")], Strategy::Flow, None);
    for kind in KINDS {
        let options = crossmesh_comm::execute::ExecuteOptions { repeat: 5, ..options(kind) };
        assert!(run_with(&plan, kind, &options).iter().all(|r| r.seconds.len() == 5));
    }
}

#[test]
fn shared_memory_needs_no_payload_in_the_socket() {
    // What the sockets carried is not counted; that memory is private shows that the other way works as well.
    let plan = planned(&[("u8[1000000]@A{x:1}(_)", "u8[1000000]@B{x:1}(_)")], Strategy::SendRecv, None);
    let private = crossmesh_comm::execute::ExecuteOptions {
        sharing: crossmesh_comm::buffer::Sharing::Private,
        ..options(Kind::Shm)
    };
    run_with(&plan, Kind::Shm, &private);
}

/// Steps that follow from each other within a rank go out at once, not with the next sign of life (200 ms).
#[test]
fn a_sum_of_one_byte_does_not_wait_for_a_heartbeat() {
    let plan = planned(&[("u8[1]@A{x:4}(_ | sum x)", "u8[1]@A{x:4}(_)")], Strategy::Flow, None);
    for kind in KINDS {
        let options = crossmesh_comm::execute::ExecuteOptions { repeat: 20, ..options(kind) };
        let reports = run_with(&plan, kind, &options);
        // Without the stall a few tenths of a millisecond; with it no run of two in a row is quicker than 100 ms.
        let mut pairs = reports[0].seconds.windows(2).map(|w| w[0] + w[1]);
        assert!(pairs.any(|s| s < 0.1), "{kind:?}: {:?}", reports[0].seconds);
    }
}
