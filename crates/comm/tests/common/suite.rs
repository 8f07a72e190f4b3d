//! What every transport has to do: the same programs, every element looked at.

use crossmesh_core::reshard::{Scheduler, Strategy};

use super::{Kind, options, planned, run, run_with};

/// Calls `each!` with the name of every case.
#[macro_export]
macro_rules! with_cases {
    ($each:ident) => {
        $each! { point_to_point_of_many_sizes columns_become_rows chains_stream one_holder_feeds_many meshes_overlap fused_parts_move partial_sums_add_up many_small_tensors_move_together a_run_repeats a_sum_of_one_byte_does_not_wait_for_a_heartbeat }
    };
}

/// A reshard by every strategy that can, over every transport.
fn reshard(kinds: &[Kind], src: &str, dst: &str) {
    for strategy in
        [Strategy::SendRecv, Strategy::AllGather, Strategy::Broadcast(Scheduler::Greedy), Strategy::Flow]
    {
        let plan = planned(&[(src, dst)], strategy, None);
        kinds.iter().for_each(|kind| drop(run(&plan, *kind)));
    }
}

pub fn point_to_point_of_many_sizes(kinds: &[Kind]) {
    for bytes in [0, 1, 7, 4095, 8192, 8193, 65_536, 300_001, 3 << 20] {
        let layout = |mesh| format!("u8[{bytes}]@{mesh}{{x:1}}(_)");
        let plan = planned(&[(&layout("A"), &layout("B"))], Strategy::SendRecv, None);
        for &kind in kinds {
            let reports = run(&plan, kind);
            assert_eq!((reports[0].bytes_sent, reports[1].bytes_received), (bytes, bytes));
        }
    }
}

pub fn columns_become_rows(kinds: &[Kind]) {
    reshard(kinds, "f32[96,100]@A{x:4}(_,x)", "f32[96,100]@B{x:3}(x,_)");
}

pub fn chains_stream(kinds: &[Kind]) {
    let plan = planned(
        &[("f64[40000]@A{x:1}(_)", "f64[40000]@B{x:5}(_)")],
        Strategy::Broadcast(Scheduler::Greedy),
        Some(20_000),
    );
    kinds.iter().for_each(|kind| drop(run(&plan, *kind)));
}

pub fn one_holder_feeds_many(kinds: &[Kind]) {
    reshard(kinds, "i64[5000]@A{x:1}(_)", "i64[5000]@B{x:2,y:3}(y)");
}

pub fn meshes_overlap(kinds: &[Kind]) {
    reshard(kinds, "f32[60,50]@A{x:4}=0-3(x,_)", "f32[60,50]@B{x:4}=2-5(_,x)");
}

pub fn fused_parts_move(kinds: &[Kind]) {
    reshard(kinds, "bf16[48,32]@A{tp:2}(tp of 32+8+8,_)", "bf16[48,32]@B{tp:4}(tp of 32+8+8,_)");
}

pub fn partial_sums_add_up(kinds: &[Kind]) {
    for dtype in ["f32", "f64", "i32", "i64", "bf16", "f16"] {
        for op in ["sum", "max", "min"] {
            let src = format!("{dtype}[64,33]@A{{dp:3,tp:2}}(tp,_ | {op} dp)");
            let plan = planned(&[(&src, &format!("{dtype}[64,33]@B{{x:2}}(_,x)"))], Strategy::Flow, None);
            kinds.iter().for_each(|kind| drop(run(&plan, *kind)));
        }
    }
}

pub fn many_small_tensors_move_together(kinds: &[Kind]) {
    let pair = ("f32[16,16]@A{x:2}(x,_)", "f32[16,16]@B{x:2}(_,x)");
    let plan = planned(&vec![pair; 500], Strategy::Flow, None);
    kinds.iter().for_each(|kind| drop(run(&plan, *kind)));
}

pub fn a_run_repeats(kinds: &[Kind]) {
    let plan = planned(&[("f32[300,300]@A{x:2}(x,_)", "f32[300,300]@B{x:3}(x,_)")], Strategy::Flow, None);
    for &kind in kinds {
        let options = crossmesh_comm::lab::execute::ExecuteOptions { repeat: 5, ..options(kind) };
        assert!(run_with(&plan, kind, &options).iter().all(|r| r.seconds.len() == 5));
    }
}

/// Steps that follow from each other within a rank go out at once, not with the next sign of life (200 ms).
pub fn a_sum_of_one_byte_does_not_wait_for_a_heartbeat(kinds: &[Kind]) {
    let plan = planned(&[("u8[1]@A{x:4}(_ | sum x)", "u8[1]@A{x:4}(_)")], Strategy::Flow, None);
    for &kind in kinds {
        let options = crossmesh_comm::lab::execute::ExecuteOptions { repeat: 20, ..options(kind) };
        let reports = run_with(&plan, kind, &options);
        // Without the stall a few tenths of a millisecond; with it no run of two in a row is quicker than 100 ms.
        let mut pairs = reports[0].seconds.windows(2).map(|w| w[0] + w[1]);
        assert!(pairs.any(|s| s < 0.1), "{kind:?}: {:?}", reports[0].seconds);
    }
}
