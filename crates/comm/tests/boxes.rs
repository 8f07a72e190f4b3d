//! Layouts by boxes, run on real buffers by ranks that are threads: every element of every destination is checked.
//!
//! `CROSSMESH_SWEEP=2000 cargo test -p crossmesh-comm --test boxes` runs so many.

mod common;

use std::sync::Arc;

use common::{KINDS, Kind, Links, links_of, options, run};
use crossmesh_comm::buffer::{RankBuffers, Sharing};
use crossmesh_comm::clock::Monotonic;
use crossmesh_comm::engine::{Engine, JobSpec};
use crossmesh_comm::memory::Memory;
use crossmesh_core::id::Rank;
use crossmesh_core::layout::{HeldBox, Layout};
use crossmesh_core::program::Tile;
use crossmesh_core::reshard::lower::Addressing;
use crossmesh_core::reshard::{Placed, Plan, PlanOptions, Reshard, plan};
use crossmesh_core::verify::{Verified, VerifiedRank};
use crossmesh_testkit::boxes;
use crossmesh_testkit::sweep;

#[test]
fn random_boxes_arrive() {
    for seed in 0..sweep::count(60) as u64 {
        let problem = boxes::problem(seed);
        let plan = plan(&problem, &PlanOptions::default()).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        run(&plan, KINDS[seed as usize % KINDS.len()]);
    }
}

/// An element's value: two bytes of a hash of its place in the tensor, never the poison.
fn value(index: u64, width: usize) -> Vec<u8> {
    let hash = (index + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (0..width).map(|i| ((hash >> (8 + 8 * i)) & 0x7F) as u8).collect()
}

const POISON: u8 = 0xEE;

/// The bytes of a shard as its layout has them lie: every element at its address, poison between them.
fn shard(layout: &Layout, position: usize) -> Vec<u8> {
    let (coord, width) = (layout.mesh().coord(position), layout.dtype().bytes() as usize);
    let mut bytes = vec![POISON; layout.shard_elements(&coord) as usize * width];
    for held in layout.held_at(&coord) {
        let starts: Vec<u64> = held.region.spans().iter().map(|s| s.start).collect();
        let mut element = starts.clone();
        for _ in 0..held.region.volume() {
            let steps =
                element.iter().zip(&starts).zip(&held.strides).map(|((at, start), s)| (at - start) * s);
            let address = (held.offset_elements + steps.sum::<u64>()) as usize * width;
            let index = element.iter().zip(layout.shape()).fold(0, |index, (at, len)| index * len + at);
            bytes[address..address + width].copy_from_slice(&value(index, width));
            for (at, span) in element.iter_mut().zip(held.region.spans()).rev() {
                *at += 1;
                if *at < span.end {
                    break;
                }
                *at = span.start;
            }
        }
    }
    bytes
}

/// A rank's whole buffer of one side, with the bytes that its layout asks for.
fn side<'a>(
    buffers: &'a RankBuffers,
    mut tiles: impl Iterator<Item = &'a Tile>,
    placed: &Placed,
    rank: Rank,
) -> Option<(Arc<Memory>, u64, Vec<u8>)> {
    let position = placed.ranks.iter().position(|r| *r == rank)?;
    let tile = tiles.next()?;
    let place = buffers.whole(tile);
    Some((place.memory, place.view.base() - tile.offset, shard(&placed.layout, position)))
}

/// Runs one rank on memory that is filled and looked at by address.
fn run_by_address(plan: &Plan, program: VerifiedRank, links: Links) {
    let (rank, reshard) = (program.id(), &plan.problem.reshards[0]);
    let buffers = RankBuffers::allocate(program, Sharing::Private).unwrap();
    let goal = side(&buffers, buffers.goals(0), &reshard.dst, rank);
    if let Some((memory, at, wanted)) = &goal {
        memory.own().unwrap().elements_mut::<u8>(*at, wanted.len()).fill(POISON);
    }
    if let Some((memory, at, bytes)) = side(&buffers, buffers.sources(0), &reshard.src, rank) {
        memory.own().unwrap().elements_mut::<u8>(at, bytes.len()).copy_from_slice(&bytes);
    }
    let options = options(Kind::Mem).engine;
    let mut engine = Engine::new(rank, links, Box::new(Monotonic), options).unwrap();
    let handle = engine.start(JobSpec::new(0, &buffers).unwrap()).unwrap();
    engine.wait(handle).unwrap();
    engine.close();
    if let Some((memory, at, wanted)) = goal {
        let found = memory.own().unwrap().elements::<u8>(at, wanted.len()).to_vec();
        assert_eq!(found, wanted, "{rank}: {}", reshard.dst.layout);
    }
}

/// Addresses, strides and the bytes between boxes are taken from the layouts, not from the program.
#[test]
fn every_element_lies_where_its_layout_says() {
    let (mut strided, mut runs) = (0, 0);
    for seed in 0.. {
        let problem = boxes::problem(seed);
        let Reshard { src, dst, .. } = &problem.reshards[0];
        if src.layout.num_contributions() > 1 {
            continue;
        }
        let plan = plan(&problem, &PlanOptions::default()).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        let program = &Verified::plan(&plan, Addressing::Apart).unwrap();
        std::thread::scope(|scope| {
            for (rank, links) in (0..).map(Rank).zip(links_of(&plan, Kind::Mem)) {
                let plan = &plan;
                scope.spawn(move || run_by_address(plan, program.rank(rank), links));
            }
        });
        let packed = |held: &HeldBox| *held == HeldBox::packed(held.region.clone(), held.offset_elements);
        let all_packed = |placed: &Placed| {
            let mesh = placed.layout.mesh();
            (0..mesh.len()).all(|position| placed.layout.held_at(&mesh.coord(position)).iter().all(packed))
        };
        strided += usize::from(!all_packed(src) || !all_packed(dst));
        runs += 1;
        if runs >= sweep::count(60) {
            break;
        }
    }
    assert!(strided > runs / 10, "{strided} of {runs} have strides");
}
