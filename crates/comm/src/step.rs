//! One rank's part of a training step: passes on its device, crossings over its links, run after run.
//!
//! Every crossing has a few buffers, used in turn, each with its own shards ([`StepBuffers`]); where a stage's memory is kept for it, it is sent
//! back from where it arrived. A trainer's passes read and
//! write them. Where nothing is computed, they are filled with the pattern that [`crate::pattern`] knows, so that after
//! a run every element that crossed last can be looked at.

#![allow(unsafe_code)]

use std::io;
use std::sync::Arc;

use crossmesh_core::id::{MicrobatchId, Rank};
use crossmesh_core::program::{Op, OpKind};
use crossmesh_core::reshard::Plan;
use crossmesh_core::step::{Carries, Direction, Step, StepProgram};
use rustc_hash::FxHashMap;

use crate::buffer::{OpPlaces, RankBuffers, Sharing};
use crate::clock::Monotonic;
use crate::collectives::Element;
use crate::device::Device;
use crate::engine::{Engine, JobSpec, Tensor};
use crate::error::CommError;
use crate::execute::{Barrier, ExecuteOptions, Failure, Gate, RankReport};
use crate::memory::{Memory, Place};
use crate::pattern;
use crate::transport::Link;
use crate::view::View;

/// A crossing in one direction, on one rank.
struct Lane {
    buffers: Vec<RankBuffers>,
}

/// The memory of all crossings on one rank. Between the compute op that makes a tensor and those that need it, the program
/// says who may touch it: a pass under way writes what it makes and reads what it needs, and the engine has the rest.
pub struct StepBuffers {
    rank: Rank,
    /// By crossing, forwards and backwards.
    lanes: Vec<[Lane; 2]>,
    /// Of every op of the rank.
    places: Vec<OpPlaces>,
    tensors: Vec<Tensor>,
    /// Which buffer a microbatch uses.
    turns: FxHashMap<(usize, Direction, MicrobatchId), usize>,
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
        let system =
            |e: io::Error| CommError::System { me: rank, what: "lay out a step", cause: e.to_string() };
        let mut lanes = vec![];
        let mut planned = vec![];
        for crossing in 0..step.crossings.len() {
            let (forward, there) = lane(step, lowered, rank, sharing, (crossing, Direction::Forward), None)?;
            let kept = step.keeps(crossing, rank).then_some(&forward);
            let (backward, back) = lane(step, lowered, rank, sharing, (crossing, Direction::Backward), kept)?;
            lanes.push([forward, backward]);
            planned.push([there, back]);
        }
        let places = places(step, lowered, rank, &planned).map_err(system)?;
        let turns = lowered.instances.iter().map(|i| {
            let buffer = lowered.buffer_on(step, i, rank) as usize;
            ((i.crossing as usize, i.direction, i.microbatch), buffer)
        });
        Ok(Self { rank, lanes, places, tensors: tensors(step, lowered), turns: turns.collect() })
    }

    /// The rank's part of the step, ready to start.
    pub fn job(&self, id: u32, lowered: &StepProgram) -> Result<JobSpec, CommError> {
        JobSpec::of_step(id, &lowered.program, self.rank, self.places.clone(), self.tensors.clone())
    }

    /// Writes this rank's shard of what crosses.
    ///
    /// # Safety
    /// For the pass that makes it, while it is under way: the program has the engine keep away meanwhile.
    pub unsafe fn write<T: Element>(&self, slot: Slot, shard: &[T]) {
        // SAFETY: the caller says so.
        unsafe { self.buffers(slot).write_source_of_pass(slot.tensor, shard) }
    }

    /// Reads this rank's shard of what crossed.
    ///
    /// # Safety
    /// For a pass that needs it, while it is under way: the program has the engine keep away meanwhile.
    pub unsafe fn read<T: Element>(&self, slot: Slot, shard: &mut [T]) {
        // SAFETY: the caller says so.
        unsafe { self.buffers(slot).read_destination_of_pass(slot.tensor, shard) }
    }

    /// What all crossings hold together.
    pub fn bytes(&self) -> u64 {
        self.lanes.iter().flatten().flat_map(|lane| &lane.buffers).map(|b| b.memory.len()).sum()
    }

    fn buffers(&self, slot: Slot) -> &RankBuffers {
        let turn = self.turns[&(slot.crossing, slot.direction, slot.microbatch)];
        &self.lanes[slot.crossing][slot.direction as usize].buffers[turn]
    }

    /// Every buffer, with the plan whose tensors it holds.
    fn all<'a>(&'a self, step: &'a Step) -> impl Iterator<Item = (&'a Plan, &'a RankBuffers)> {
        let plans = step.crossings.iter().flat_map(|c| [&c.forward, &c.backward]);
        let lanes = self.lanes.iter().flatten().zip(plans);
        lanes.flat_map(|(lane, plan)| lane.buffers.iter().map(move |b| (plan, b)))
    }
}

/// A crossing's buffers, and for each the places of the ops of its plan. What is `kept` leaves from where it is.
fn lane(
    step: &Step,
    lowered: &StepProgram,
    rank: Rank,
    sharing: Sharing,
    (crossing, direction): (usize, Direction),
    kept: Option<&Lane>,
) -> Result<(Lane, Vec<Vec<OpPlaces>>), CommError> {
    let plan = step.crossings[crossing].plan(direction);
    let program = &lowered.lowered[crossing][direction as usize];
    let (mut lane, mut planned) = (Lane { buffers: vec![] }, vec![]);
    let ranked = &program.ranks[rank.index()];
    for buffer in 0..lowered.buffers_on(step, crossing, direction, rank) as usize {
        let allocated = match kept {
            Some(kept) => RankBuffers::sending_on(&kept.buffers[buffer], plan, ranked, rank, sharing),
            None => RankBuffers::allocate(plan, ranked, rank, sharing),
        };
        let buffers = allocated.map_err(|e| CommError::System {
            me: rank,
            what: "allocate the buffers of a crossing",
            cause: e.to_string(),
        })?;
        let places = buffers.places(plan, program, rank);
        planned.push(places.map_err(|(op, why)| CommError::BadProgram { me: rank, op, why })?);
        lane.buffers.push(buffers);
    }
    Ok((lane, planned))
}

/// The places of all ops of the rank: those of the plans, by buffer; words of no bytes are nowhere.
fn places(
    step: &Step,
    lowered: &StepProgram,
    rank: Rank,
    planned: &[[Vec<Vec<OpPlaces>>; 2]],
) -> io::Result<Vec<OpPlaces>> {
    let ops = &lowered.program.ranks[rank.index()].ops;
    let nothing = Place { memory: Arc::new(Memory::private(0)?), view: View::empty() };
    let of = |op: &Op| match op.kind {
        OpKind::Send { .. } => OpPlaces { from: Some(nothing.clone()), into: None },
        OpKind::Recv { .. } => OpPlaces { from: None, into: Some(nothing.clone()) },
        OpKind::Copy { .. } | OpKind::Compute { .. } => OpPlaces { from: None, into: None },
    };
    let mut places: Vec<OpPlaces> = ops.iter().map(of).collect();
    for instance in &lowered.instances {
        let lane = &planned[instance.crossing as usize][instance.direction as usize];
        for (_, range) in instance.ops.iter().filter(|(r, _)| *r == rank) {
            let of_plan = &lane[lowered.buffer_on(step, instance, rank) as usize];
            places[range.start as usize..range.end as usize].clone_from_slice(of_plan);
        }
    }
    Ok(places)
}

fn tensors(step: &Step, lowered: &StepProgram) -> Vec<Tensor> {
    let name = |i: &crossmesh_core::step::Instance| {
        let crossing = &step.crossings[i.crossing as usize];
        let what = match (crossing.carries, i.direction) {
            (_, Direction::Forward) => "",
            (Carries::Tensors, Direction::Backward) => "gradient of ",
            (Carries::Memory, Direction::Backward) => "evicted ",
        };
        format!("{what}{} of microbatch {}", crossing.name, i.microbatch.0)
    };
    let crossings = lowered.instances.iter().map(name);
    crossings.chain(["the start of a pass".into()]).map(|name| Tensor { name, combine: None }).collect()
}

/// Runs a lowered step on one rank. `links` leads to every rank of [`crate::execute::peers_of`].
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
    buffers.all(step).for_each(|(plan, b)| pattern::fill_sources(plan, rank, b));
    let mut engine = Engine::new(rank, links, Box::new(Monotonic), options.engine.clone())?;
    engine.set_device(device)?;
    let result = repeat(&mut engine, step, lowered, &buffers, options, barrier);
    engine.close();
    result.map_err(|error| Failure { error, flight: engine.flight_record().cloned().map(Box::new) })
}

fn repeat(
    engine: &mut Engine,
    step: &Step,
    lowered: &StepProgram,
    buffers: &StepBuffers,
    options: &ExecuteOptions,
    barrier: &mut Barrier<'_>,
) -> Result<RankReport, CommError> {
    let mut report = RankReport { verified: options.check, ..RankReport::idle(buffers.rank) };
    for run in 0..options.repeat {
        buffers.all(step).for_each(|(plan, b)| pattern::poison_destinations(plan, b));
        let spec = buffers.job(run, lowered)?;
        barrier(Gate::Start)?;
        let handle = engine.start(spec)?;
        let done = engine.wait(handle)?;
        report.note(&done);
        if !options.check {
            continue;
        }
        barrier(Gate::Look)?;
        if let Some(wrong) = first_wrong(step, buffers) {
            report.verified = false;
            report.wrong.get_or_insert(wrong);
        }
    }
    Ok(report)
}

fn first_wrong(step: &Step, buffers: &StepBuffers) -> Option<String> {
    let mut checks = buffers.all(step).map(|(plan, b)| pattern::check_destinations(plan, b));
    checks.find_map(|wrong| wrong).map(|wrong| wrong.to_string())
}
