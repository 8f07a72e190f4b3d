//! Steps whose stages leave what they remember with other ranks for a while, over the engine.

use std::sync::Barrier;

use crossmesh_comm::buffer::Sharing;
use crossmesh_comm::device::VirtualDevice;
use crossmesh_comm::lab::execute::{ExecuteOptions, RankReport};
use crossmesh_comm::step::{StepBuffers, execute_step};
use crossmesh_comm::transport::mem::mesh;
use crossmesh_core::cluster::{Cluster, Host};
use crossmesh_core::id::{Rank, StageId};
use crossmesh_core::reshard::problem::Hosts;
use crossmesh_core::reshard::{PlanOptions, Problem, plan};
use crossmesh_core::schedule::{Edge, Name, Spec, generate};
use crossmesh_core::step::{Carries, Crossing, Direction, PassTimes, Step, StepProgram, lower_step};

/// What crosses between stages, and what the first remembers: both a multiple of what buffers are aligned to.
const EDGE_BYTES: u64 = 6 * 64;
const MEMORY_BYTES: u64 = 600 * 64;

/// BPipe over meshes of so many ranks each.
fn evicting(sizes: &[u32], overlap: bool) -> Step {
    let ranks: Vec<Vec<Rank>> = sizes
        .iter()
        .scan(0, |next, size| {
            *next += size;
            Some((*next - size..*next).map(Rank).collect())
        })
        .collect();
    let cluster = Cluster::of_hosts(sizes.iter().map(|size| Host::with_devices(*size)).collect());
    let schedule = generate(Name::BPipe, &Spec::even(sizes.len() as u32, 12)).unwrap();
    let crossing = |from: u32, to: u32, bytes: u64, carries| {
        let layout = |stage: u32| {
            let ranks = &ranks[stage as usize];
            let (first, last, len) = (ranks[0].0, ranks[ranks.len() - 1].0, ranks.len());
            let text = format!("u8[{bytes}]@S{stage}{{x:{len}}}={first}-{last}(x)");
            text.parse().unwrap()
        };
        let reshard = |a, b| {
            let pair = vec![("t".to_string(), layout(a), layout(b))];
            plan(&Problem::new(pair, Hosts::Described(cluster.clone())).unwrap(), &PlanOptions::default())
                .unwrap()
        };
        let edge = Edge { from: StageId(from), to: StageId(to) };
        let (forward, backward) = (reshard(from, to), reshard(to, from));
        Crossing { name: format!("{from} to {to}"), edge, carries, forward, backward, made: 1.0, needed: 0.0 }
    };
    let last = sizes.len() as u32 - 1;
    let mut crossings: Vec<Crossing> =
        (0..last).map(|from| crossing(from, from + 1, EDGE_BYTES, Carries::Tensors)).collect();
    let keepers = schedule.placement().devices().filter_map(|d| Some((d.0, schedule.keeper(d)?.0)));
    crossings.extend(keepers.map(|(from, to)| crossing(from, to, MEMORY_BYTES, Carries::Memory)));
    let times = PassTimes { f_ns: 100_000, b_ns: 100_000, w_ns: 100_000, optimizer_ns: 0 };
    Step { times: vec![times; sizes.len()], schedule, cluster, ranks, crossings, overlap, lockstep: false }
}

fn run(step: &Step, lowered: &StepProgram) -> Vec<RankReport> {
    let links = mesh(lowered.program.ranks.len()).unwrap();
    let options = ExecuteOptions { sharing: Sharing::Private, repeat: 3, ..ExecuteOptions::default() };
    let (options, gate) = (&options, &Barrier::new(links.len()));
    std::thread::scope(|scope| {
        let start = |(rank, links)| {
            scope.spawn(move || {
                let mut barrier = |_| {
                    gate.wait();
                    Ok(())
                };
                let device = Box::new(VirtualDevice::new().unwrap());
                execute_step(step, lowered, rank, links, device, options, &mut barrier).unwrap()
            })
        };
        let threads: Vec<_> = (0..).map(Rank).zip(links).map(start).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

#[test]
fn evicted_memory_comes_back_as_it_left() {
    for sizes in [&[1, 1, 1, 1][..], &[2, 1, 1, 3], &[3, 1, 2, 2], &[1, 2, 1, 1, 1, 2]] {
        for overlap in [true, false] {
            let step = evicting(sizes, overlap);
            let lowered = lower_step(&step).unwrap();
            for report in run(&step, &lowered) {
                assert!(report.verified, "{sizes:?}, {overlap}: {} has {:?}", report.rank, report.wrong);
            }
        }
    }
}

/// What is sent back lies where it arrived, and nowhere else.
#[test]
fn keepers_keep_one_copy() {
    let step = evicting(&[2, 1, 1, 1], true);
    let lowered = lower_step(&step).unwrap();
    let bytes = |rank| {
        let buffers = StepBuffers::allocate(&step, &lowered, rank, Sharing::Private).unwrap();
        // A mapping of nothing is a byte, and there are a few.
        buffers.bytes() / 64 * 64
    };
    let both = |crossing: usize| u64::from(lowered.buffers[crossing].iter().sum::<u32>());
    let (memory, keeper) = (3, Rank(4));
    let slots = lowered.slots[memory];
    assert!(slots > 0 && step.keeps(memory, keeper) && !step.keeps(memory, Rank(0)));
    assert_eq!(lowered.buffers_on(&step, memory, Direction::Backward, keeper), slots);
    assert_eq!(bytes(keeper), both(2) * EDGE_BYTES + u64::from(slots) * MEMORY_BYTES);
    // A rank of the stage has only what its memory passes through, half of it each.
    assert_eq!(bytes(Rank(0)), both(0) * EDGE_BYTES / 2 + both(memory) * MEMORY_BYTES / 2);
}
