//! One rank's part of a training step: passes on its device, crossings over its links, run after run.
//!
//! Every crossing has a few buffers, used in turn, each with its own shards. They are filled with the pattern that
//! [`crate::pattern`] knows, so that after a run every element that crossed last can be looked at.

use std::sync::Arc;

use crossmesh_core::id::Rank;
use crossmesh_core::program::{Op, OpKind};
use crossmesh_core::reshard::Plan;
use crossmesh_core::step::{Direction, Step, StepProgram};

use crate::buffer::{OpPlaces, RankBuffers, Sharing};
use crate::clock::Monotonic;
use crate::device::Device;
use crate::engine::{Engine, JobSpec, Tensor};
use crate::error::CommError;
use crate::execute::{Barrier, ExecuteOptions, Failure, Gate, RankReport};
use crate::memory::{Memory, Place};
use crate::pattern;
use crate::transport::Link;
use crate::view::View;

/// The buffers of a crossing in one direction, on one rank.
struct Lane<'a> {
    plan: &'a Plan,
    buffers: Vec<RankBuffers>,
    /// By buffer, then by op of the plan's program.
    places: Vec<Vec<OpPlaces>>,
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
    let lanes = allocate(step, lowered, rank, options.sharing)?;
    let mut engine = Engine::new(rank, links, Box::new(Monotonic), options.engine.clone())?;
    engine.set_device(device)?;
    let result = repeat(&mut engine, step, lowered, rank, &lanes, options, barrier);
    engine.close();
    result.map_err(|error| Failure { error, flight: engine.flight_record().cloned().map(Box::new) })
}

fn allocate<'a>(
    step: &'a Step,
    lowered: &StepProgram,
    rank: Rank,
    sharing: Sharing,
) -> Result<Vec<[Lane<'a>; 2]>, CommError> {
    let lane = |crossing: usize, direction: Direction| -> Result<Lane<'a>, CommError> {
        let plan = step.crossings[crossing].plan(direction);
        let program = &lowered.lowered[crossing][direction as usize];
        let mut lane = Lane { plan, buffers: vec![], places: vec![] };
        for _ in 0..lowered.buffers[crossing][direction as usize] {
            let allocated = RankBuffers::allocate(plan, &program.ranks[rank.index()], rank, sharing);
            let buffers = allocated.map_err(|e| CommError::System {
                me: rank,
                what: "allocate the buffers of a crossing",
                cause: e.to_string(),
            })?;
            pattern::fill_sources(plan, rank, &buffers);
            let places = buffers.places(plan, program, rank);
            lane.places.push(places.map_err(|(op, why)| CommError::BadProgram { me: rank, op, why })?);
            lane.buffers.push(buffers);
        }
        Ok(lane)
    };
    (0..step.crossings.len())
        .map(|c| Ok([lane(c, Direction::Forward)?, lane(c, Direction::Backward)?]))
        .collect()
}

/// The places of all ops of the rank: those of the plans, by buffer; words of no bytes are nowhere.
fn places(lowered: &StepProgram, rank: Rank, lanes: &[[Lane<'_>; 2]]) -> std::io::Result<Vec<OpPlaces>> {
    let ops = &lowered.program.ranks[rank.index()].ops;
    let nothing = Place { memory: Arc::new(Memory::private(0)?), view: View::empty() };
    let of = |op: &Op| match op.kind {
        OpKind::Send { .. } => OpPlaces { from: Some(nothing.clone()), into: None },
        OpKind::Recv { .. } => OpPlaces { from: None, into: Some(nothing.clone()) },
        OpKind::Copy { .. } | OpKind::Compute { .. } => OpPlaces { from: None, into: None },
    };
    let mut places: Vec<OpPlaces> = ops.iter().map(of).collect();
    for instance in &lowered.instances {
        let lane = &lanes[instance.crossing as usize][instance.direction as usize];
        for (_, range) in instance.ops.iter().filter(|(r, _)| *r == rank) {
            let of_plan = &lane.places[instance.buffer as usize];
            places[range.start as usize..range.end as usize].clone_from_slice(of_plan);
        }
    }
    Ok(places)
}

fn tensors(step: &Step, lowered: &StepProgram) -> Vec<Tensor> {
    let name = |i: &crossmesh_core::step::Instance| {
        let what = match i.direction {
            Direction::Forward => "",
            Direction::Backward => "gradient of ",
        };
        format!("{what}{} of microbatch {}", step.crossings[i.crossing as usize].name, i.microbatch.0)
    };
    let crossings = lowered.instances.iter().map(name);
    crossings.chain(["the start of a pass".into()]).map(|name| Tensor { name, combine: None }).collect()
}

fn repeat(
    engine: &mut Engine,
    step: &Step,
    lowered: &StepProgram,
    rank: Rank,
    lanes: &[[Lane<'_>; 2]],
    options: &ExecuteOptions,
    barrier: &mut Barrier<'_>,
) -> Result<RankReport, CommError> {
    let mut report = RankReport { verified: options.check, ..RankReport::idle(rank) };
    let system =
        |e: std::io::Error| CommError::System { me: rank, what: "lay out a step", cause: e.to_string() };
    let (places, tensors) = (places(lowered, rank, lanes).map_err(system)?, tensors(step, lowered));
    for run in 0..options.repeat {
        for lane in lanes.iter().flatten() {
            lane.buffers.iter().for_each(|b| pattern::poison_destinations(lane.plan, b));
        }
        let spec = JobSpec::of_step(run, &lowered.program, rank, places.clone(), tensors.clone())?;
        barrier(Gate::Start)?;
        let handle = engine.start(spec)?;
        let done = engine.wait(handle)?;
        report.note(&done);
        if !options.check {
            continue;
        }
        barrier(Gate::Look)?;
        if let Some(wrong) = first_wrong(lanes) {
            report.verified = false;
            report.wrong.get_or_insert(wrong);
        }
    }
    Ok(report)
}

fn first_wrong(lanes: &[[Lane<'_>; 2]]) -> Option<String> {
    let mut all = lanes.iter().flatten().flat_map(|lane| lane.buffers.iter().map(move |b| (lane.plan, b)));
    all.find_map(|(plan, buffers)| pattern::check_destinations(plan, buffers)).map(|wrong| wrong.to_string())
}
