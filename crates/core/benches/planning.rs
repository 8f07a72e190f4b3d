//! How long planning, verifying and simulating take.
//!
//! `cargo bench -p crossmesh-core` runs the sizes that requirements speak of. `cargo test --benches` runs each once, on
//! a sixteenth of the devices or fewer. Either way every answer is checked, so nobody gets faster by computing less.

use std::fmt;

use crossmesh_core::id::Rank;
use crossmesh_core::layout::Layout;
use crossmesh_core::reshard::lower::{Addressing, project};
use crossmesh_core::reshard::problem::{Assumed, Hosts};
use crossmesh_core::reshard::{Plan, PlanOptions, Problem, Reshard, lower, lower_bound, plan};
use crossmesh_core::sim::simulate;
use crossmesh_core::verify::{verify, verify_for};
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
    /// A reduce-scatter over 4,096 devices of one mesh. Planned and verified.
    ReduceScatter,
    /// From FSDP over 4,096 devices to 512 replicas of 8-way tensor parallelism: 16.8 million transfers. Planned and verified.
    Fsdp,
}

const CASES: [Case; 4] = [Case::Chunks, Case::Crossing, Case::Devices, Case::Tensors];
const PLANNED: [Case; 6] =
    [Case::Chunks, Case::Crossing, Case::Devices, Case::Tensors, Case::ReduceScatter, Case::Fsdp];

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Case::Chunks => "1024 chunks x 1024 chunks",
            Case::Crossing => "1024 chunks x 1024 chunks, crossing",
            Case::Devices => "4096 devices to 4096",
            Case::Tensors => "1000 tensors, 256 to 128",
            Case::ReduceScatter => "reduce-scatter over 4096",
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

impl Checksum {
    fn of(plan: &Plan) -> Self {
        Self { transfers: plan.transfers().len(), bytes: plan.bytes_moved() }
    }
}

impl Case {
    fn problem(self) -> Problem {
        problem(self.pairs())
    }

    /// Names, and layouts before and after.
    fn pairs(self) -> Vec<(String, Layout, Layout)> {
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
            Case::ReduceScatter => {
                let n = hosts(512, 4);
                let mesh = format!("f32[16777216]@A{{h:{n},d:8}}");
                vec![(format!("{mesh}(_ | sum h+d)"), format!("{mesh}(h+d)"))]
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
        let named = |(i, (src, dst)): (usize, &(String, String))| (format!("t{i}"), parse(src), parse(dst));
        pairs.iter().enumerate().map(named).collect()
    }

    /// Counted from the layouts, where no device has anything yet: each gets its shard once, in as many boxes as there
    /// are source chunks that meet it. Of a sum only what the planner itself says, in another run.
    fn checksum(self, problem: &Problem) -> Checksum {
        let transfers = match (self, is_full()) {
            (Case::ReduceScatter, _) => return Checksum::of(&self.plan()),
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

fn problem(pairs: Vec<(String, Layout, Layout)>) -> Problem {
    let per_host = Assumed { devices_per_host: Some(8), ..Assumed::default() };
    Problem::new(pairs, Hosts::Assumed(per_host)).expect("it can be planned")
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
        assert_eq!(Checksum::of(&plan), checksum, "{case}");
        plan
    });
}

/// From layouts on, as Python's `cm.plan` has it: bench/python/beside_rust.py holds the two against each other.
#[divan::bench(name = "problem_and_plan", args = CASES, sample_count = 5, sample_size = 1)]
fn bench_problem_and_plan(bencher: Bencher, case: &Case) {
    let pairs = case.pairs();
    let checksum = case.checksum(&problem(pairs.clone()));
    bencher.counter(ItemsCount::new(checksum.transfers)).with_inputs(|| pairs.clone()).bench_local_values(
        |pairs| {
            let plan = plan(&problem(pairs), &PlanOptions::default()).expect("it can be planned");
            assert_eq!(Checksum::of(&plan), checksum, "{case}");
            plan
        },
    );
}

#[divan::bench(name = "verify", args = PLANNED, sample_count = 5, sample_size = 1)]
fn bench_verify(bencher: Bencher, case: &Case) {
    let plan = case.plan();
    let checksum = case.checksum(&plan.problem);
    bencher.counter(ItemsCount::new(checksum.transfers)).bench_local(|| {
        let proof = verify(&plan).expect("the plan is right");
        assert_eq!(Checksum { transfers: proof.transfers, bytes: proof.bytes }, checksum, "{case}");
    });
}

#[divan::bench(name = "lower", args = CASES, sample_count = 5, sample_size = 1)]
fn bench_lower(bencher: Bencher, case: &Case) {
    let plan = case.plan();
    bencher.counter(ItemsCount::new(plan.transfers().len())).bench_local(|| lower(&plan));
}

/// The proof alone, of a program that is there: what `verify` does beside lowering.
#[divan::bench(name = "prove", args = CASES, sample_count = 5, sample_size = 1)]
fn bench_prove(bencher: Bencher, case: &Case) {
    let plan = case.plan();
    let program = lower(&plan);
    bencher.counter(ItemsCount::new(plan.transfers().len())).bench_local(|| {
        verify_for(&program, &plan.problem).expect("the plan is right");
    });
}

/// One rank's part of a plan, all that it takes: one that sends, then one that receives.
#[divan::bench(name = "project", args = [0, 1], sample_count = 9, sample_size = 1)]
fn bench_project(bencher: Bencher, side: usize) {
    let plan = Case::Fsdp.plan();
    let placed = [&plan.problem.reshards[0].src, &plan.problem.reshards[0].dst][side];
    let rank: Rank = placed.ranks[placed.ranks.len() / 2];
    let touches = plan.transfers().iter().filter(|t| t.src == rank || t.dst == rank).count();
    bencher.counter(ItemsCount::new(touches)).bench_local(|| {
        let program = project(&plan, rank, Addressing::Apart);
        assert!(program.ranks[rank.index()].ops.len() >= touches);
        program
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
