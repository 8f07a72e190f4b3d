//! One step of 64 devices' worth of pipeline, 512 microbatches, 4 chunks, on 4,096 ranks: what its prediction costs.

use crossmesh_core::cluster::{Cluster, Host};
use crossmesh_core::id::{Rank, StageId};
use crossmesh_core::reshard::problem::Hosts;
use crossmesh_core::reshard::{PlanOptions, Problem, plan};
use crossmesh_core::schedule::{Edge, Name, Spec, generate};
use crossmesh_core::sim::simulate;
use crossmesh_core::step::{Carries, Crossing, PassTimes, Step, lower_step};

fn main() {
    divan::main();
}

const DEVICES: u32 = 64;
const RANKS: u32 = 64;
const CHUNKS: u32 = 4;
const MICROBATCHES: u32 = 512;

/// 512 hosts of 8 devices and 8 NICs; activations split by `dp`, whole along `tp`.
fn step() -> Step {
    let spec = Spec { chunks: Some(CHUNKS), ..Spec::even(DEVICES, MICROBATCHES) };
    let schedule = generate(Name::Interleaved1F1B, &spec).unwrap();
    let host = Host { nics: 8, nic_out_bytes_per_s: 50e9, nic_in_bytes_per_s: 50e9, ..Host::with_devices(8) };
    let cluster = Cluster::of_hosts(vec![host; (DEVICES * RANKS / 8) as usize]);
    let reshard = |a: u32, b: u32| {
        let layout = |device: u32| {
            let (first, last) = (device * RANKS, (device + 1) * RANKS - 1);
            format!("bf16[8,4096,8192]@D{device}{{dp:8,tp:8}}={first}-{last}(dp,_,_)").parse().unwrap()
        };
        let pair = vec![("act".to_string(), layout(a), layout(b))];
        let problem = Problem::new(pair, Hosts::Described(cluster.clone())).unwrap();
        plan(&problem, &PlanOptions::default()).unwrap()
    };
    let between: Vec<_> =
        (0..DEVICES).map(|d| (reshard(d, (d + 1) % DEVICES), reshard((d + 1) % DEVICES, d))).collect();
    let crossing = |from: u32| {
        let (forward, backward) = between[(from % DEVICES) as usize].clone();
        let edge = Edge { from: StageId(from), to: StageId(from + 1) };
        Crossing {
            name: format!("act {from}"),
            edge,
            forward,
            backward,
            carries: Carries::Tensors,
            made: 1.0,
            needed: 0.0,
        }
    };
    let times = PassTimes { f_ns: 10_000_000, b_ns: 10_000_000, w_ns: 10_000_000, optimizer_ns: 0 };
    Step {
        crossings: (0..DEVICES * CHUNKS - 1).map(crossing).collect(),
        ranks: (0..DEVICES).map(|d| (d * RANKS..(d + 1) * RANKS).map(Rank).collect()).collect(),
        times: vec![times; (DEVICES * CHUNKS) as usize],
        cluster,
        schedule,
        overlap: true,
        lockstep: true,
    }
}

/// From the planned step to its trace.
#[divan::bench(sample_count = 3, sample_size = 1)]
fn simulate_4096_devices(bencher: divan::Bencher) {
    let step = step();
    bencher.bench_local(|| {
        let coarse = step.coarse().unwrap();
        let lowered = lower_step(&coarse).unwrap();
        simulate(&lowered.program, &coarse.cluster).unwrap().makespan_s
    });
}

/// Planning all edges, and the schedule.
#[divan::bench(sample_count = 1, sample_size = 1)]
fn plan_4096_devices(bencher: divan::Bencher) {
    bencher.bench_local(step);
}
