//! How much memory planning, verifying and lowering take at their peak, a transfer: the same for few and for many.
//!
//! `cargo bench -p crossmesh-core --bench memory` goes up to four million transfers, `cargo test --benches` to a few
//! thousand. Either way the growth is checked.

#![allow(unsafe_code, reason = "counting bytes takes a global allocator, which is an unsafe trait")]
#![allow(clippy::print_stdout, reason = "a benchmark prints its table")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crossmesh_core::reshard::lower::{Addressing, project};
use crossmesh_core::reshard::problem::{Assumed, Hosts};
use crossmesh_core::reshard::{PlanOptions, Problem, lower, plan};
use crossmesh_core::verify::verify;

/// The system's allocator, and how many bytes are in use.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn add(bytes: usize) {
    let now = IN_USE.fetch_add(bytes, Relaxed) + bytes;
    PEAK.fetch_max(now, Relaxed);
}

// SAFETY: every call goes to the system's allocator unchanged; the counters touch no memory of the caller's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller keeps the contract of `alloc`, which is that of the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: `ptr` came from `alloc` above, so from the system's allocator.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// The answer, and the most bytes that were in use on the way beyond those before.
fn peak_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = IN_USE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let answer = work();
    (answer, PEAK.load(Relaxed) - before)
}

/// So many tensors from 256 devices to 128: 4,096 transfers each.
fn problem(tensors: usize) -> Problem {
    let pair = |i: usize| {
        let shape = format!("bf16[{},4096]", 4096 + 128 * (i % 7));
        let (src, dst) = (format!("{shape}@A{{dp:32,d:8}}(dp+d,_)"), format!("{shape}@B{{r:16,tp:8}}(tp,_)"));
        (
            String::new(),
            src.parse().expect("the notation is right"),
            dst.parse().expect("the notation is right"),
        )
    };
    Problem::new((0..tensors).map(pair).collect(), Hosts::default()).expect("it can be planned")
}

/// FSDP over 8 devices a host to as many replicas of 8-way tensor parallelism: what planning and verifying take at their peak, and
/// one rank's part beyond the plan.
fn fsdp(hosts: usize) {
    let (src, dst) = (
        format!("bf16[16384,16384]@T{{fsdp:{}}}(fsdp,_)", 8 * hosts),
        format!("bf16[16384,16384]@I{{dp:{hosts},tp:8}}(_,tp)"),
    );
    let parse = |layout: &str| layout.parse().expect("the notation is right");
    let per_host = Assumed { devices_per_host: Some(8), ..Assumed::default() };
    let problem = Problem::new(vec![(String::new(), parse(&src), parse(&dst))], Hosts::Assumed(per_host));
    let problem = problem.expect("it can be planned");
    let (plan, planning) = peak_of(|| plan(&problem, &PlanOptions::default()).expect("it can be planned"));
    let (_, verifying) = peak_of(|| verify(&plan).expect("the plan is right"));
    let [planning, verifying] = [planning, verifying].map(|bytes| bytes as f64 / f64::from(1 << 20));
    let transfers = plan.transfers().len();
    println!(
        "{transfers:>9} transfers   planning {planning:.0} MiB, verifying {verifying:.0} MiB beside the plan"
    );
    assert!(planning <= 4096.0 && verifying <= 4096.0, "more than 4 GiB");
    for rank in [problem.reshards[0].src.ranks[1], problem.reshards[0].dst.ranks[1]] {
        let (program, bytes) = peak_of(|| project(&plan, rank, Addressing::Apart));
        let (ops, mib) = (program.ranks[rank.index()].ops.len(), bytes as f64 / f64::from(1 << 20));
        println!("{transfers:>9} transfers   {rank} alone, {ops} ops: {mib:.2} MiB");
        assert!(mib <= 10.0, "{mib} MiB for one rank's part");
    }
}

fn main() {
    let has = |flag: &str| std::env::args().any(|arg| arg == flag);
    let full = has("--bench") && !has("--test");
    fsdp(if full { 512 } else { 4 });
    let smallest = if full { 125 } else { 2 };
    println!("{:>9} transfers   bytes a transfer at the peak: plan, verify, lower", "");
    let mut first: Option<[f64; 3]> = None;
    for tensors in [smallest, 2 * smallest, 4 * smallest, 8 * smallest] {
        let problem = problem(tensors);
        let (plan, planning) =
            peak_of(|| plan(&problem, &PlanOptions::default()).expect("it can be planned"));
        let (proof, verifying) = peak_of(|| verify(&plan).expect("the plan is right"));
        let (_, lowering) = peak_of(|| lower(&plan));
        assert_eq!(proof.transfers, tensors * 4096);
        let each = [planning, verifying, lowering].map(|bytes| bytes as f64 / proof.transfers as f64);
        println!("{:>9}            {:>8.1} {:>8.1} {:>8.1}", proof.transfers, each[0], each[1], each[2]);
        for (few, many) in first.get_or_insert(each).iter().zip(each) {
            assert!(many <= 1.1 * few, "memory grows faster than transfers: {few:.1} to {many:.1} B each");
        }
    }
}
