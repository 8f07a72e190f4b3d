//! Whether the parts of a step fit together.

use std::collections::{BTreeMap, BTreeSet};

use super::error::StepError;
use super::{Carries, Crossing, Direction, Step};
use crate::id::{DeviceId, Rank, StageId};
use crate::schedule::{Edge, PassKind};

/// Refuses what has no program.
pub(super) fn check(step: &Step) -> Result<(), StepError> {
    let placement = step.schedule.placement();
    let count = |what, schedule, given| match schedule == given {
        true => Ok(()),
        false => Err(StepError::CountDiffers { what, schedule, given }),
    };
    crate::schedule::check(&step.schedule)?;
    count("devices", placement.num_devices(), step.ranks.len())?;
    count("stages", placement.num_stages(), step.times.len())?;
    let mut home: BTreeMap<Rank, DeviceId> = BTreeMap::new();
    for device in placement.devices() {
        for &rank in step.ranks_of(device) {
            if let Some(first) = home.insert(rank, device) {
                return Err(StepError::RankTwice { rank, first, second: device });
            }
        }
    }
    for (name, what, value) in
        step.crossings.iter().flat_map(|c| [(&c.name, "made", c.made), (&c.name, "needed", c.needed)])
    {
        if !(0.0..=1.0).contains(&value) {
            return Err(StepError::BadFraction { name: name.clone(), what, value });
        }
    }
    step.crossings.iter().try_for_each(|c| check_crossing(step, c, &home))?;
    check_chain(step)?;
    check_keepers(step)
}

fn check_crossing(step: &Step, c: &Crossing, home: &BTreeMap<Rank, DeviceId>) -> Result<(), StepError> {
    let placement = step.schedule.placement();
    let known = |stage: StageId| stage.index() < placement.num_stages();
    let apart = |edge: Edge| match c.carries {
        Carries::Tensors => edge.from < edge.to,
        Carries::Memory => placement.device(edge.from) != placement.device(edge.to),
    };
    if !known(c.edge.from) || !known(c.edge.to) || !apart(c.edge) {
        return Err(StepError::NoSuchEdge { name: c.name.clone(), edge: c.edge });
    }
    for (direction, from, to) in
        [(Direction::Forward, c.edge.from, c.edge.to), (Direction::Backward, c.edge.to, c.edge.from)]
    {
        for reshard in &c.plan(direction).problem.reshards {
            let ends = [("a source", from, &reshard.src.ranks), ("a destination", to, &reshard.dst.ranks)];
            for (what, stage, ranks) in ends {
                let device = placement.device(stage);
                if let Some(&rank) = ranks.iter().find(|rank| home.get(rank) != Some(&device)) {
                    return Err(StepError::WrongMesh { name: c.name.clone(), what, rank, device });
                }
            }
        }
    }
    Ok(())
}

/// Neighbours on the chain that are on different devices have to hear of each other.
fn check_chain(step: &Step) -> Result<(), StepError> {
    let placement = step.schedule.placement();
    for (from, to) in placement.stages().zip(placement.stages().skip(1)) {
        let mut tensors = step.crossings.iter().filter(|c| c.carries == Carries::Tensors);
        let crossed = tensors.any(|c| (c.edge.from, c.edge.to) == (from, to));
        if placement.device(from) != placement.device(to) && !crossed {
            return Err(StepError::NothingCrosses { from, to });
        }
    }
    Ok(())
}

/// What is evicted has to get somewhere.
fn check_keepers(step: &Step) -> Result<(), StepError> {
    let memories = step.crossings.iter().filter(|c| c.carries == Carries::Memory);
    let kept: BTreeSet<StageId> = memories.map(|c| c.edge.from).collect();
    let mut evicted = step.schedule.devices().iter().flatten().filter(|p| p.kind == PassKind::Evict);
    match evicted.find(|pass| !kept.contains(&pass.stage)) {
        Some(&pass) => Err(StepError::NothingKeeps { pass }),
        None => Ok(()),
    }
}
