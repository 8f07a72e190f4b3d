//! Whether the passes of a step begin with what the schedule says they need, and whether what they make arrives.
//!
//! A program says which tiles its compute ops read and write, and its labels say what those are: this op is a part of that pass,
//! these tiles are that crossing's for that microbatch. A trainer goes by the labels. [`super::verify_program`] proves that
//! every tile that is read holds the whole tensor it is labelled with. What is left, read from the schedule and the layouts
//! alone:
//!
//! ```text
//! device 1, stage 1    1F0  1F1  1B0 ...    every rank runs these parts of passes, in this order, one after the other
//!
//! 1F1    makes   what goes from stage 1 to others, of microbatch 1: the boxes and the part of its rank in the source layouts
//!        needs   what comes from stage 0, of microbatch 1: the boxes of its rank in the destination layouts
//! 1B1    needs   gradients from stage 2, and still what 1F1 needed; 1W1 both
//! ```
//!
//! Tensors of one crossing, direction and microbatch are nobody else's, but for memory that leaves and comes back: so a
//! tensor that arrives whole is the right one.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use super::error::{OpName, VerifyError};
use super::goals::{Held, Sides};
use crate::id::{MicrobatchId, Rank, StageId};
use crate::program::{DepKind, Holds, OpKind, Program, RankProgram, Role, TileId};
use crate::reshard::Reshard;
use crate::schedule::{Pass, PassKind};
use crate::step::{Carries, Crossing, Direction, Instance, PassPart, Step};

/// Something that crosses: which crossing, which way, of which microbatch.
type Slot = (u32, Direction, MicrobatchId);

/// Checks a step's program and its labels against the step.
pub fn check(
    step: &Step,
    program: &Program,
    parts: &[PassPart],
    instances: &[Instance],
) -> Result<(), VerifyError> {
    let sides =
        step.crossings.iter().map(|c| [&c.forward, &c.backward].map(|p| Sides::of(&p.problem))).collect();
    let mut goals = Goals { step, program, parts, instances, sides, of_slot: BTreeMap::new() };
    goals.check_instances()?;
    let device_of: FxHashMap<Rank, usize> =
        step.ranks.iter().enumerate().flat_map(|(d, ranks)| ranks.iter().map(move |r| (*r, d))).collect();
    for (rank, ranked) in (0..).map(Rank).zip(&program.ranks) {
        let passes = device_of.get(&rank).map_or(&[][..], |device| &step.schedule.devices()[*device]);
        goals.check_rank(rank, ranked, passes)?;
    }
    Ok(())
}

struct Goals<'a> {
    step: &'a Step,
    program: &'a Program,
    parts: &'a [PassPart],
    instances: &'a [Instance],
    /// By crossing, forwards and backwards.
    sides: Vec<[Sides<'a>; 2]>,
    of_slot: BTreeMap<Slot, &'a Instance>,
}

/// A rank's tiles of something that crosses, as the labels say.
#[derive(Default)]
struct Labelled {
    made: Vec<TileId>,
    needed: Vec<TileId>,
}

impl<'a> Goals<'a> {
    /// Everything that crosses is there once, with tensors of its own.
    fn check_instances(&mut self) -> Result<(), VerifyError> {
        let mut owner: FxHashMap<u32, (u32, MicrobatchId, Option<Direction>)> = FxHashMap::default();
        for instance in self.instances {
            let Instance { crossing, direction, microbatch, first_tensor, .. } = *instance;
            let slot = (crossing, direction, microbatch);
            let Some(of) = self.step.crossings.get(crossing as usize) else {
                return Err(other_crossing(slot, "is none of the step's"));
            };
            if self.of_slot.insert(slot, instance).is_some() {
                return Err(other_crossing(slot, "is in the program twice"));
            }
            let way = (of.carries == Carries::Tensors).then_some(direction);
            for (i, reshard) in (0..).zip(&of.plan(direction).problem.reshards) {
                let tensor = first_tensor.saturating_add(i);
                if *owner.entry(tensor).or_insert((crossing, microbatch, way)) != (crossing, microbatch, way)
                {
                    return Err(other_crossing(slot, "shares a tensor with another"));
                }
                if !self.is_tensor_of(tensor, reshard) {
                    return Err(other_crossing(slot, "moves other tensors than its plan"));
                }
            }
            self.check_way_back(slot, instance)?;
        }
        let passes = self.step.schedule.devices().iter().flatten();
        let mut made: Vec<Slot> = passes.flat_map(|pass| self.made_by(*pass)).map(|(slot, _)| slot).collect();
        made.sort_unstable();
        if let Some(slot) = made.iter().find(|slot| !self.of_slot.contains_key(slot)) {
            return Err(other_crossing(*slot, "is made, and never crosses"));
        }
        match self.of_slot.keys().find(|slot| made.binary_search(slot).is_err()) {
            Some(slot) => Err(other_crossing(*slot, "crosses, and no pass of the schedule makes it")),
            None => Ok(()),
        }
    }

    /// Memory comes back as the tensors that left.
    fn check_way_back(&self, slot: Slot, instance: &Instance) -> Result<(), VerifyError> {
        let (crossing, direction, microbatch) = slot;
        let memory = self.step.crossings[crossing as usize].carries == Carries::Memory;
        let other = match direction {
            Direction::Forward => Direction::Backward,
            Direction::Backward => Direction::Forward,
        };
        match self.of_slot.get(&(crossing, other, microbatch)) {
            Some(other) if memory && other.first_tensor != instance.first_tensor => {
                Err(other_crossing(slot, "comes back as other tensors than left"))
            }
            _ => Ok(()),
        }
    }

    fn is_tensor_of(&self, tensor: u32, reshard: &Reshard) -> bool {
        let layout = &reshard.src.layout;
        let count = layout.num_contributions();
        let op = layout.partial().map(|partial| partial.op).filter(|_| count > 1);
        self.program.tensors.get(tensor as usize).is_some_and(|found| {
            let parts = found.partial.map(|p| (p.op, p.count as usize));
            found.dtype == layout.dtype()
                && *found.shape == *layout.shape()
                && parts == op.map(|op| (op, count))
        })
    }

    /// A rank runs its device's passes, part by part, and each touches what it should.
    fn check_rank(&self, rank: Rank, ranked: &RankProgram, passes: &[Pass]) -> Result<(), VerifyError> {
        let labelled = self.labelled(rank, ranked)?;
        let ops = (0..).zip(&ranked.ops).filter_map(|(i, op)| match op.kind {
            OpKind::Compute { pass, needs, makes, .. } => Some((i, pass, needs, makes)),
            _ => None,
        });
        let mut ops = ops.peekable();
        let mut before: Option<u32> = None;
        for &pass in passes {
            let moments = self.moments(pass);
            for part in 0..moments.len() - 1 {
                let wanted = PassPart { pass, part: part as u32, of: moments.len() as u32 - 1 };
                let next = ops.next().filter(|(_, id, ..)| self.parts.get(*id as usize) == Some(&wanted));
                let Some((i, _, needs, makes)) = next else {
                    return Err(VerifyError::OtherPass { rank, pass, part: wanted.part });
                };
                let deps = ranked.deps(&ranked.ops[i as usize]);
                let waits = |on: u32| deps.iter().any(|dep| dep.op == on && dep.kind == DepKind::Done);
                if let Some(first) = before.filter(|on| !waits(*on)) {
                    let (first, second) = (OpName::of(rank, first, ranked), OpName::of(rank, i, ranked));
                    return Err(VerifyError::NotOneByOne { first, second });
                }
                before = Some(i);
                let [wants, leaves] = self.touched_by(pass, &moments, part, &labelled);
                let differs =
                    |(tile, found): (TileId, bool),
                     [does, does_not, should, should_not]: [&'static str; 4]| {
                        let op = OpName::of(rank, i, ranked);
                        let (does, should) = if found { (does, should_not) } else { (does_not, should) };
                        VerifyError::OtherNeeds { op, pass, tile, does, should }
                    };
                same(ranked.touched(needs), wants)
                    .map_err(|at| differs(at, ["reads", "does not read", "needs it", "does not need it"]))?;
                same(ranked.touched(makes), leaves).map_err(|at| {
                    differs(at, ["writes", "does not write", "makes it", "does not make it"])
                })?;
            }
        }
        match ops.next() {
            None => Ok(()),
            Some((i, ..)) => Err(VerifyError::NoSuchPass { op: OpName::of(rank, i, ranked) }),
        }
    }

    /// A rank's tiles of all that crosses. They are its shards of the layouts, no more and no less.
    fn labelled(&self, rank: Rank, ranked: &RankProgram) -> Result<FxHashMap<Slot, Labelled>, VerifyError> {
        let mut all = FxHashMap::default();
        let mut shards: FxHashMap<(u32, Direction), Vec<Held>> = FxHashMap::default();
        for (&slot, instance) in &self.of_slot {
            let (_, reader) = ends(&self.step.crossings[slot.0 as usize], slot.1);
            let wanted = shards.entry((slot.0, slot.1)).or_insert_with(|| self.shards(slot, rank));
            let mut labelled = Labelled::default();
            let mut found: Vec<Held> = vec![];
            let tiles = instance.tiles.iter().find(|(r, _)| *r == rank).map(|(_, tiles)| tiles.clone());
            for id in tiles.unwrap_or_default() {
                let Some(tile) = ranked.tiles.get(id as usize) else {
                    return Err(other_crossing(slot, "names tiles that are not there"));
                };
                let tensor = tile.tensor.wrapping_sub(instance.first_tensor);
                let region = &self.program.boxes[tile.region];
                let role = ranked.buffers[tile.buffer as usize].role;
                match tile.holds {
                    Holds::Made(part) => {
                        labelled.made.push(TileId(id));
                        found.push(Held { tensor, goal: false, region, part });
                    }
                    Holds::Transit if role == Role::Crossing && self.is_on(reader, rank) => {
                        labelled.needed.push(TileId(id));
                        found.push(Held { tensor, goal: true, region, part: 0 });
                    }
                    _ => {}
                }
            }
            found.sort_unstable();
            if found != *wanted {
                return Err(other_crossing(slot, "lies on some rank otherwise than its layouts say"));
            }
            all.insert(slot, labelled);
        }
        Ok(all)
    }

    /// What the layouts say that passes of a rank make, and what passes of a rank read.
    fn shards(&self, slot: Slot, rank: Rank) -> Vec<Held<'_>> {
        let (maker, reader) = ends(&self.step.crossings[slot.0 as usize], slot.1);
        let (makes, reads) = (maker.is_some_and(|maker| self.is_on(maker, rank)), self.is_on(reader, rank));
        let mut held = self.sides[slot.0 as usize][slot.1 as usize].wanted(rank);
        held.retain(|held| if held.goal { reads } else { makes });
        held
    }

    fn is_on(&self, stage: StageId, rank: Rank) -> bool {
        self.step.ranks_of(self.step.schedule.placement().device(stage)).contains(&rank)
    }

    /// What a part of a pass reads and what it writes, of these tiles.
    fn touched_by(
        &self,
        pass: Pass,
        moments: &[f64],
        part: usize,
        labelled: &FxHashMap<Slot, Labelled>,
    ) -> [Vec<TileId>; 2] {
        let (starts, ends, last) = (moments[part], moments[part + 1], part + 2 == moments.len());
        let (mut needs, mut makes) = (vec![], vec![]);
        for (slot, at) in self.needed_by(pass) {
            if last || at <= starts {
                needs.extend(labelled.get(&slot).into_iter().flat_map(|l| &l.needed));
            }
        }
        for (slot, at) in self.made_by(pass) {
            if at == ends || (part == 0 && at <= starts) {
                makes.extend(labelled.get(&slot).into_iter().flat_map(|l| &l.made));
            }
        }
        [needs, makes]
    }

    /// Where a pass is cut: wherever something is made or begins to be needed.
    fn moments(&self, pass: Pass) -> Vec<f64> {
        let mut moments: Vec<f64> = match pass.kind {
            PassKind::F | PassKind::B | PassKind::BW => self.cuts_of(pass),
            _ => vec![],
        };
        moments.extend([0.0, 1.0]);
        moments.sort_unstable_by(f64::total_cmp);
        moments.dedup();
        moments
    }

    /// Passes of one stage are cut alike, whether a microbatch crosses or not.
    fn cuts_of(&self, pass: Pass) -> Vec<f64> {
        let tensors = self.step.crossings.iter().filter(|c| c.carries == Carries::Tensors);
        let backwards = pass.kind.is_backward();
        let moment = |c: &Crossing| match (c.edge.from == pass.stage, c.edge.to == pass.stage, backwards) {
            (true, _, false) => Some(c.made),
            (_, true, false) => Some(c.needed),
            (true, _, true) => Some(1.0 - c.made),
            (_, true, true) => Some(1.0 - c.needed),
            _ => None,
        };
        tensors.filter_map(moment).collect()
    }

    /// What a pass makes for others, and when.
    fn made_by(&self, pass: Pass) -> Vec<(Slot, f64)> {
        let made = |(i, c): (usize, &Crossing)| {
            let (direction, at) = match (c.carries, pass.kind) {
                (Carries::Tensors, PassKind::F) if c.edge.from == pass.stage => (Direction::Forward, c.made),
                (Carries::Tensors, kind) if kind.is_backward() && c.edge.to == pass.stage => {
                    (Direction::Backward, 1.0 - c.needed)
                }
                (Carries::Memory, PassKind::Evict) if c.edge.from == pass.stage => (Direction::Forward, 1.0),
                (Carries::Memory, PassKind::Load) if c.edge.from == pass.stage => (Direction::Backward, 1.0),
                _ => return None,
            };
            self.crosses(c, pass.microbatch).then_some(((i as u32, direction, pass.microbatch), at))
        };
        self.step.crossings.iter().enumerate().filter_map(made).collect()
    }

    /// What a pass needs of others, and from when on. What came for a microbatch stays until its last backward.
    fn needed_by(&self, pass: Pass) -> Vec<(Slot, f64)> {
        let Pass { kind, stage, microbatch } = pass;
        let mut needed = vec![];
        for (i, c) in (0..).zip(&self.step.crossings).filter(|(_, c)| self.crosses(c, microbatch)) {
            let mut need = |direction, at| needed.push(((i, direction, microbatch), at));
            let (starts, ends) = (c.edge.from == stage, c.edge.to == stage);
            match (c.carries, kind) {
                (Carries::Tensors, PassKind::F) if ends => need(Direction::Forward, c.needed),
                (Carries::Tensors, PassKind::B | PassKind::BW) if starts => {
                    need(Direction::Backward, 1.0 - c.made);
                }
                (Carries::Tensors, PassKind::W) if starts => need(Direction::Backward, 1.0),
                (Carries::Tensors, PassKind::B | PassKind::BW | PassKind::W) if ends => {
                    need(Direction::Forward, 1.0);
                }
                (Carries::Memory, PassKind::B | PassKind::BW)
                    if starts && self.step.schedule.has(pass.with_kind(PassKind::Load)) =>
                {
                    need(Direction::Backward, 0.0);
                }
                _ => {}
            }
        }
        needed
    }

    fn crosses(&self, c: &Crossing, microbatch: MicrobatchId) -> bool {
        let routes = self.step.schedule.routes();
        let visits = |stage| routes.visits(microbatch, stage);
        visits(c.edge.from) && (c.carries == Carries::Memory || visits(c.edge.to))
    }
}

/// The stage whose pass makes what crosses, if one does, and the stage whose passes read it.
fn ends(crossing: &Crossing, direction: Direction) -> (Option<StageId>, StageId) {
    let edge = crossing.edge;
    match (crossing.carries, direction) {
        (_, Direction::Forward) => (Some(edge.from), edge.to),
        (Carries::Tensors, Direction::Backward) => (Some(edge.to), edge.from),
        (Carries::Memory, Direction::Backward) => (None, edge.from),
    }
}

/// The first tile that one list has and the other has not; true if it is what was found.
fn same(found: &[TileId], mut wanted: Vec<TileId>) -> Result<(), (TileId, bool)> {
    let mut found = found.to_vec();
    found.sort_unstable();
    wanted.sort_unstable();
    match found.iter().zip(&wanted).find(|(f, w)| f != w) {
        Some((f, w)) => Err((*f.min(w), f < w)),
        None => match found.len().cmp(&wanted.len()) {
            std::cmp::Ordering::Equal => Ok(()),
            std::cmp::Ordering::Less => Err((wanted[found.len()], false)),
            std::cmp::Ordering::Greater => Err((found[wanted.len()], true)),
        },
    }
}

fn other_crossing((crossing, direction, microbatch): Slot, what: &'static str) -> VerifyError {
    VerifyError::OtherCrossing { crossing, forward: direction == Direction::Forward, microbatch, what }
}
