//! One rank's part of a training step: passes on its device, crossings over its links, run after run.
//!
//! Every crossing has a few buffers, used in turn ([`StepBuffers`]); where a stage's memory is kept for it, it is sent back from
//! where it arrived. A trainer's passes read and write them. Where nothing is computed, they are filled with the pattern that [`crate::lab::pattern`] knows, so that after
//! a run every element that crossed last can be looked at.

#![allow(unsafe_code)]

use std::io;

use crossmesh_core::id::{MicrobatchId, Rank};
use crossmesh_core::program::{Holds, Role, Tile};
use crossmesh_core::step::{Carries, Direction, Instance, Step, StepProgram};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::buffer::{RankBuffers, Sharing};
use crate::clock::Monotonic;
use crate::collectives::Element;
use crate::device::Device;
use crate::engine::{Engine, JobSpec};
use crate::error::CommError;
use crate::lab::execute::{Barrier, ExecuteOptions, Failure, Gate, RankReport, unreachable_memory};
use crate::lab::pattern::{self, Patterned};
use crate::memory::Place;
use crate::transport::Link;

/// The memory of all crossings on one rank. Between the compute op that makes a tensor and those that need it, the program
/// says who may touch it: a pass under way writes what it makes and reads what it needs, and the engine has the rest.
pub struct StepBuffers {
    rank: Rank,
    buffers: RankBuffers,
    /// By tensor of the program.
    names: Vec<String>,
    /// What crosses here: its first tensor, and its tiles on this rank.
    crossings: FxHashMap<(usize, Direction, MicrobatchId), (u32, std::ops::Range<u32>)>,
}

/// A tensor of a crossing, for one microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    pub crossing: usize,
    pub direction: Direction,
    /// Its place among the plan's reshards.
    pub tensor: usize,
    pub microbatch: MicrobatchId,
}

impl StepBuffers {
    pub fn allocate(
        step: &Step,
        lowered: &StepProgram,
        rank: Rank,
        sharing: Sharing,
    ) -> Result<Self, CommError> {
        let buffers = RankBuffers::allocate(lowered.program.rank(rank), sharing);
        let buffers = buffers.map_err(|e| CommError::System {
            me: rank,
            what: "allocate the buffers of its crossings",
            cause: e.to_string(),
        })?;
        let here = |i: &Instance| {
            let (_, tiles) = i.tiles.iter().find(|(r, _)| *r == rank)?;
            Some(((i.crossing as usize, i.direction, i.microbatch), (i.first_tensor, tiles.clone())))
        };
        let crossings = lowered.instances.iter().filter_map(here).collect();
        Ok(Self { rank, buffers, names: names(step, lowered), crossings })
    }

    /// The rank's part of the step, ready to start.
    pub fn job(&self, id: u32) -> Result<JobSpec, CommError> {
        let mut spec = JobSpec::new(id, &self.buffers)?;
        for (tensor, name) in spec.tensors.iter_mut().zip(&self.names) {
            tensor.name.clone_from(name);
        }
        Ok(spec)
    }

    /// Writes this rank's shard of what crosses.
    ///
    /// # Safety
    /// For the pass that makes it, while it is under way: the program has the engine keep away meanwhile.
    pub unsafe fn write<T: Element>(&self, slot: Slot, shard: &[T]) {
        let made = self.tiles(slot).filter(|tile| is_made(tile));
        // SAFETY: the caller says so.
        unsafe { self.buffers.write_tiles_of_pass(made, shard) }
    }

    /// Reads this rank's shard of what crossed.
    ///
    /// # Safety
    /// For a pass that needs it, while it is under way: the program has the engine keep away meanwhile.
    pub unsafe fn read<T: Element>(&self, slot: Slot, shard: &mut [T]) {
        let needed = self.tiles(slot).filter(|tile| self.is_needed(tile));
        // SAFETY: the caller says so.
        unsafe { self.buffers.read_tiles_of_pass(needed, shard) }
    }

    /// What all crossings hold together.
    pub fn bytes(&self) -> u64 {
        self.buffers.bytes()
    }

    fn tiles(&self, slot: Slot) -> impl Iterator<Item = &Tile> {
        // A rank whose shard is empty has no part in it.
        let here = self.crossings.get(&(slot.crossing, slot.direction, slot.microbatch));
        let (first, tiles) = here.cloned().unwrap_or((0, 0..0));
        let of_tensor = move |tile: &&Tile| tile.tensor == first + slot.tensor as u32;
        self.buffers.program().tiles[tiles.start as usize..tiles.end as usize].iter().filter(of_tensor)
    }

    /// Whether what crossed arrives here, or, where it is kept, is here.
    fn is_needed(&self, tile: &Tile) -> bool {
        self.buffers.program().buffers[tile.buffer as usize].role == Role::Crossing && !is_made(tile)
    }

    /// Every tile of a crossing, once for all that use the same memory, with the pattern of what it holds.
    fn all(&self) -> Vec<(Patterned<'_>, &Tile)> {
        let mut seen = FxHashSet::default();
        let mut keys: Vec<_> = self.crossings.keys().copied().collect();
        keys.sort_unstable();
        let mut all = vec![];
        for key in keys {
            let (first, tiles) = &self.crossings[&key];
            for tile in &self.buffers.program().tiles[tiles.start as usize..tiles.end as usize] {
                let role = self.buffers.program().buffers[tile.buffer as usize].role;
                if role == Role::Crossing && seen.insert((tile.buffer, tile.offset)) {
                    let tensor = &self.buffers.program().whole().tensors[tile.tensor as usize];
                    all.push((Patterned { number: (tile.tensor - first) as usize, tensor }, tile));
                }
            }
        }
        all
    }

    fn place(&self, tile: &Tile) -> Place {
        self.buffers.whole(tile)
    }

    fn fill_sources(&self) -> io::Result<()> {
        for (pattern, tile) in self.all() {
            if let Holds::Made(part) = tile.holds {
                let region = &self.buffers.program().whole().boxes[tile.region];
                pattern.fill(region, part, &self.place(tile))?;
            }
        }
        Ok(())
    }

    fn poison_destinations(&self) -> io::Result<()> {
        let mut all = self.all().into_iter().filter(|(_, tile)| !is_made(tile));
        all.try_for_each(|(_, tile)| pattern::poison(&self.place(tile)))
    }

    fn first_wrong(&self) -> io::Result<Option<String>> {
        let mut arrived = self.all().into_iter().filter(|(_, tile)| !is_made(tile));
        let wrong = arrived.find_map(|(pattern, tile)| {
            let region = &self.buffers.program().whole().boxes[tile.region];
            pattern.check(region, &self.place(tile)).transpose()
        });
        Ok(wrong.transpose()?.map(|wrong| wrong.to_string()))
    }
}

fn is_made(tile: &Tile) -> bool {
    matches!(tile.holds, Holds::Made(_))
}

/// What the tensors of a step are called in messages.
fn names(step: &Step, lowered: &StepProgram) -> Vec<String> {
    let name = |i: &u32| {
        let instance = &lowered.instances[*i as usize];
        let crossing = &step.crossings[instance.crossing as usize];
        let what = match (crossing.carries, instance.direction) {
            (Carries::Tensors, Direction::Backward) => "gradient of ",
            _ => "",
        };
        format!("{what}{} of microbatch {}", crossing.name, instance.microbatch.0)
    };
    let crossings = lowered.instance_of.iter().map(name);
    crossings.chain(["the start of a pass".into()]).collect()
}

/// Runs a lowered step on one rank. `links` leads to every rank of [`crate::lab::execute::peers_of`].
pub fn execute_step(
    step: &Step,
    lowered: &StepProgram,
    rank: Rank,
    links: Vec<(Rank, Box<dyn Link>)>,
    device: Box<dyn Device>,
    options: &ExecuteOptions,
    barrier: &mut Barrier<'_>,
) -> Result<RankReport, Failure> {
    let buffers = StepBuffers::allocate(step, lowered, rank, options.sharing)?;
    buffers.fill_sources().map_err(unreachable_memory(rank))?;
    let mut engine = Engine::new(rank, links, Box::new(Monotonic), options.engine.clone())?;
    engine.set_device(device)?;
    let result = repeat(&mut engine, &buffers, options, barrier);
    engine.close();
    result.map_err(|error| Failure { error, flight: engine.flight_record().cloned().map(Box::new) })
}

fn repeat(
    engine: &mut Engine,
    buffers: &StepBuffers,
    options: &ExecuteOptions,
    barrier: &mut Barrier<'_>,
) -> Result<RankReport, CommError> {
    let mut report = RankReport { verified: options.check, ..RankReport::idle(buffers.rank) };
    for run in 0..options.repeat {
        buffers.poison_destinations().map_err(unreachable_memory(buffers.rank))?;
        let spec = buffers.job(run)?;
        barrier(Gate::Start)?;
        let handle = engine.start(spec)?;
        let done = engine.wait(handle)?;
        report.note(&done);
        if !options.check {
            continue;
        }
        barrier(Gate::Look)?;
        if let Some(wrong) = buffers.first_wrong().map_err(unreachable_memory(buffers.rank))? {
            report.verified = false;
            report.wrong.get_or_insert(wrong);
        }
    }
    Ok(report)
}
