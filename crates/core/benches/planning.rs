//! How long planning, verifying and simulating take.
//!
//! `cargo bench -p crossmesh-core` runs the sizes that requirements speak of. `cargo test --benches` runs each once, on
//! a sixteenth of the devices or fewer. Either way every answer is checked, so nobody gets faster by computing less.

use std::fmt;

use crossmesh_core::layout::Layout;
use crossmesh_core::reshard::problem::{Assumed, Hosts};
use crossmesh_core::reshard::{Plan, PlanOptions, Problem, Reshard, lower, lower_bound, plan};
use crossmesh_core::sim::simulate;
use crossmesh_core::verify::verify;
use divan::Bencher;
use divan::counter::ItemsCount;

fn main() {
    divan::main();
}

/// What is planned.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Case {
    /// One tensor, 1,024 source chunks, 1,024 destination chunks of the same dim.
    Chunks,
    /// The same number of chunks, of different dims: every one meets every other, a million transfers.
    Crossing,
    /// 4,096 devices to 4,096 others.
    Devices,
    /// 1,000 tensors, 256 devices to 128, planned together.
    Tensors,
    /// From FSDP over 4,096 devices to 512 replicas of 8-way tensor parallelism: 16.8 million transfers. Planned only.
    Fsdp,
}

const CASES: [Case; 4] = [Case::Chunks, Case::Crossing, Case::Devices, Case::Tensors];
const PLANNED: [Case; 5] = [Case::Chunks, Case::Crossing, Case::Devices, Case::Tensors, Case::Fsdp];

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Case::Chunks => "1024 chunks x 1024 chunks",
            Case::Crossing => "1024 chunks x 1024 chunks, crossing",
            Case::Devices => "4096 devices to 4096",
            Case::Tensors => "1000 tensors, 256 to 128",
            Case::Fsdp => "fsdp 4096 to dp 512 x tp 8",
        })
    }
}

/// What a plan of a case must come to.
#[derive(Debug, PartialEq)]
struct Checksum {
    transfers: usize,
    bytes: u64,
}

impl Case {
    fn problem(self) -> Problem {
        let full = is_full();
        let hosts = |full_hosts: u32, small: u32| if full { full_hosts } else { small };
        let pairs: Vec<(String, String)> = match self {
            Case::Chunks => {
                let (h, x) = (hosts(128, 8), hosts(32, 2));
                let shape = "f32[1000003,64]";
                vec![(
                    format!("{shape}@A{{h:{h},d:8}}(h+d,_)"),
                    format!("{shape}@B{{x:{x},y:4,z:8}}(z+x+y,_)"),
                )]
            }
            Case::Crossing => {
                let h = hosts(128, 4);
                let shape = "f32[8192,8192]";
                vec![(format!("{shape}@A{{h:{h},d:8}}(h+d,_)"), format!("{shape}@B{{h:{h},d:8}}(_,h+d)"))]
            }
            Case::Devices => {
                let h = hosts(512, 8);
                let shape = "f32[65536,1024]";
                vec![(format!("{shape}@A{{h:{h},d:8}}(h+d,_)"), format!("{shape}@B{{h:{h},d:8}}(d,_)"))]
            }
            Case::Tensors => {
                let (tensors, h) = if full { (1000, 32) } else { (14, 4) };
                let shape = |i: u32| format!("bf16[{},4096]", 4096 + 128 * (i % 7));
                let src = |i| format!("{}@A{{dp:{h},d:8}}(dp+d,_)", shape(i));
                let dst = |i| format!("{}@B{{r:{},tp:8}}(tp,_)", shape(i), h / 2);
                (0..tensors).map(|i| (src(i), dst(i))).collect()
            }
            Case::Fsdp => {
                let n = hosts(512, 4);
                let shape = "bf16[16384,16384]";
                vec![(
                    format!("{shape}@T{{fsdp:{}}}(fsdp,_)", 8 * n),
                    format!("{shape}@I{{dp:{n},tp:8}}(_,tp)"),
                )]
            }
        };
        let parse = |s: &String| s.parse().expect("the notation is right");
        let pairs = pairs.iter().map(|(src, dst)| (String::new(), parse(src), parse(dst))).collect();
        let per_host = Assumed { devices_per_host: Some(8), ..Assumed::default() };
        Problem::new(pairs, Hosts::Assumed(per_host)).expect("it can be planned")
    }

    /// Counted from the layouts, where no device has anything yet: each gets its shard once, in as many boxes as there
    /// are source chunks that meet it.
    fn checksum(self, problem: &Problem) -> Checksum {
        let transfers = match (self, is_full()) {
            (Case::Chunks, _) => meetings(&problem.reshards[0]),
            (Case::Crossing, true) => 1024 * 1024,
            (Case::Crossing, false) => 32 * 32,
            (Case::Devices, true) => 4096 * 512,
            (Case::Devices, false) => 64 * 8,
            (Case::Tensors, true) => 1000 * 128 * 32,
            (Case::Tensors, false) => 14 * 16 * 4,
            (Case::Fsdp, true) => 4096 * 512 * 8,
            (Case::Fsdp, false) => 32 * 4 * 8,
        };
        let bytes_of = |tensor: &Reshard| {
            let layout = &tensor.dst.layout;
            u64::try_from(layout.bytes_on_devices()).expect("cases fit")
        };
        Checksum { transfers, bytes: problem.reshards.iter().map(bytes_of).sum() }
    }

    fn plan(self) -> Plan {
        plan(&self.problem(), &PlanOptions::default()).expect("it can be planned")
    }
}

/// How many pairs of a source and a destination part of dim 0 have elements in common.
fn meetings(tensor: &Reshard) -> usize {
    let parts = |layout: &Layout| layout.by_axes().expect("cases are split by axes").part_spans(0).concat();
    let (src, dst) = (parts(&tensor.src.layout), parts(&tensor.dst.layout));
    src.iter().map(|s| dst.iter().filter(|d| s.intersect(**d).is_some()).count()).sum()
}

/// Whether this is a benchmark and not a test: `cargo bench` says `--bench`.
fn is_full() -> bool {
    let has = |flag: &str| std::env::args().any(|arg| arg == flag);
    has("--bench") && !has("--test")
}

#[divan::bench(name = "plan", args = PLANNED, sample_count = 5, sample_size = 1)]
fn bench_plan(bencher: Bencher, case: &Case) {
    let problem = case.problem();
    let checksum = case.checksum(&problem);
    bencher.counter(ItemsCount::new(checksum.transfers)).bench_local(|| {
        let plan = plan(&problem, &PlanOptions::default()).expect("it can be planned");
        let found = Checksum { transfers: plan.transfers().len(), bytes: plan.bytes_moved() };
        assert_eq!(found, checksum, "{case}");
        plan
    });
}

#[divan::bench(name = "verify", args = CASES, sample_count = 5, sample_size = 1)]
fn bench_verify(bencher: Bencher, case: &Case) {
    let plan = case.plan();
    let checksum = case.checksum(&plan.problem);
    bencher.counter(ItemsCount::new(checksum.transfers)).bench_local(|| {
        let proof = verify(&plan).expect("the plan is right");
        assert_eq!(Checksum { transfers: proof.transfers, bytes: proof.bytes }, checksum, "{case}");
    });
}

#[divan::bench(name = "simulate", args = CASES, sample_count = 3, sample_size = 1)]
fn bench_simulate(bencher: Bencher, case: &Case) {
    let plan = case.plan();
    let program = lower(&plan);
    let bound = lower_bound(&plan.problem).expect("it can be planned");
    let transfers = plan.transfers().len();
    bencher.counter(ItemsCount::new(transfers)).bench_local(|| {
        let trace = simulate(&program, &plan.problem.cluster).expect("it runs to its end");
        let over_bound = trace.makespan_s / bound.seconds;
        assert!((0.999_999..1.1).contains(&over_bound), "{case}: {over_bound} of the bound");
        trace
    });
}
