//! From a step to the program of every rank.
//!
//! Passes are taken in an order in which they could run. Each becomes a compute op on every rank of its device (several,
//! where tensors are made or needed on the way), and right behind it come the ops of every crossing that carries what
//! it made, on all ranks that have a part in it. So both ends of a channel see its messages in the same order.
//!
//! Where communication blocks, every rank does one thing after the other, in one order over all of them ([`super::blocking`]),
//! as workers do that are sent a list of instructions each.

mod cross;
mod inside;
mod rank_ops;

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use super::blocking::{Item, blocking_order};
use super::check::check;
use super::error::StepError;
use super::slots::Slots;
use super::{Carries, Crossing, Direction, PassTimes, Step};
use crate::dtype::DType;
use crate::id::{MicrobatchId, Rank, RegionId, StageId};
use crate::program::{BoxTable, OpKind, Program, Tensor, TileId};
use crate::reshard::lower;
use crate::schedule::{Costs, Hop, Pass, PassKind, Schedule, StageCost, time};
use crate::verify::{Law, Verified, VerifyError, check_step};
use rank_ops::{RankOps, done};

pub use inside::lower_lists;

/// A part of a pass; `OpKind::Compute { pass, .. }` is an index into [`StepProgram::parts`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PassPart {
    pub pass: Pass,
    pub part: u32,
    pub of: u32,
}

/// A crossing crossed once. Its tensors are its own; those of a stage's memory that comes back are those that left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    pub crossing: u32,
    pub direction: Direction,
    pub microbatch: MicrobatchId,
    /// Which of the crossing's buffers it uses.
    pub buffer: u32,
    /// Of a stage's memory: the slot in which its keeper has it.
    pub slot: Option<u32>,
    /// The first of its tensors among the program's; they stand in the order of its plan's.
    pub first_tensor: u32,
    /// The ranks with a part in it, and where their ops and tiles of it are.
    pub ops: Vec<(Rank, std::ops::Range<u32>)>,
    pub tiles: Vec<(Rank, std::ops::Range<u32>)>,
}

/// A step, lowered.
#[derive(Debug, Clone, PartialEq)]
pub struct StepProgram {
    pub program: Verified,
    pub parts: Vec<PassPart>,
    pub instances: Vec<Instance>,
    /// By tensor of the program: the instance that it crosses in first. The last tensor, of passes and of the words with which
    /// ranks begin them together, crosses in none.
    pub instance_of: Vec<u32>,
    /// How many buffers every crossing has, forwards and backwards.
    pub buffers: Vec<[u32; 2]>,
    /// How many slots the keeper of what a crossing carries has; 0 of crossings that carry tensors.
    pub slots: Vec<u32>,
    /// The programs of the plans, which the instances are copies of, forwards and backwards.
    pub lowered: Vec<[Program; 2]>,
}

impl StepProgram {
    /// How many buffers of a crossing a rank has, in one direction. A keeper's are the same in both.
    pub fn buffers_on(&self, step: &Step, crossing: usize, direction: Direction, rank: Rank) -> u32 {
        match step.keeps(crossing, rank) {
            true => self.slots[crossing],
            false => self.buffers[crossing][direction as usize],
        }
    }

    /// Which of those an instance uses.
    pub fn buffer_on(&self, step: &Step, instance: &Instance, rank: Rank) -> u32 {
        let keeps = step.keeps(instance.crossing as usize, rank);
        instance.slot.filter(|_| keeps).unwrap_or(instance.buffer)
    }
}

/// Stands for the tensor of ops that move none, until its number is known: the last.
const OF_NO_TENSOR: u32 = u32::MAX;
/// Staging memory of a crossing is used by turns, so that one message can arrive while the last one leaves.
const STAGING_TURNS: u32 = 2;
/// Buffers that a crossing has beyond what its stages keep: one that fills and one that empties.
const SPARE_BUFFERS: u32 = 2;

/// Lowers a step, and proves its program: every pass begins with what it needs, and nothing gets stuck.
pub fn lower_step(step: &Step) -> Result<StepProgram, StepError> {
    check(step)?;
    let order: Vec<Item> = match step.overlap {
        true => by_start(step)?.into_iter().map(Item::Pass).collect(),
        false => blocking_order(step)?,
    };
    let lowered: Vec<[Program; 2]> =
        step.crossings.iter().map(|c| [lower(&c.forward), lower(&c.backward)]).collect();
    let microbatches = step.schedule.num_microbatches();
    let mut spare = SPARE_BUFFERS;
    loop {
        let buffers = step.crossings.iter().map(|c| [num_buffers(step, c, spare); 2]).collect();
        let built = Builder::new(step, &lowered, buffers).build(&order)?;
        match built.verified(step) {
            Ok(step) => return Ok(step),
            // Passes that free buffers out of turn need more of them.
            Err(error) if error.law() == Law::Deadlock && spare < microbatches => spare *= 2,
            Err(error) => return Err(error.into()),
        }
    }
}

/// All passes, by the time at which they could start if nothing had to move.
fn by_start(step: &Step) -> Result<Vec<Pass>, StepError> {
    let cost = |t: &PassTimes| StageCost {
        optimizer: t.optimizer_ns as f64,
        ..StageCost::new(t.f_ns as f64, t.b_ns as f64, t.w_ns as f64)
    };
    let costs = Costs::new(step.times.iter().map(cost).collect(), Hop::default())
        .expect("times in nanoseconds are finite and not negative");
    Ok(time(&step.schedule, &costs)?.order)
}

/// As many as the stages at its ends keep, and a few to spare. Memory that comes and goes only passes through them.
fn num_buffers(step: &Step, crossing: &Crossing, spare: u32) -> u32 {
    if crossing.carries == Carries::Memory {
        let passes = step.schedule.devices().iter().flatten();
        let evicted = passes.filter(|p| (p.kind, p.stage) == (PassKind::Evict, crossing.edge.from));
        return (evicted.count() as u32).min(spare);
    }
    let kept = kept(&step.schedule, crossing.edge.from).max(kept(&step.schedule, crossing.edge.to));
    (kept + spare).min(step.schedule.num_microbatches())
}

/// The most microbatches that a stage keeps at a time.
fn kept(schedule: &Schedule, stage: StageId) -> u32 {
    let device = schedule.placement().device(stage);
    let (mut live, mut most) = (0u32, 0u32);
    for pass in schedule.devices()[device.index()].iter().filter(|p| p.stage == stage) {
        match pass.kind {
            PassKind::F => live += 1,
            kind if kind.frees_activation() => live = live.saturating_sub(1),
            _ => {}
        }
        most = most.max(live);
    }
    most
}

/// A step whose program is yet to be proven.
struct Built {
    program: Program,
    parts: Vec<PassPart>,
    instances: Vec<Instance>,
    instance_of: Vec<u32>,
    buffers: Vec<[u32; 2]>,
    slots: Vec<u32>,
    lowered: Vec<[Program; 2]>,
}

impl Built {
    fn verified(self, step: &Step) -> Result<StepProgram, VerifyError> {
        let Self { program, parts, instances, instance_of, buffers, slots, lowered } = self;
        let program = Verified::program(program)?;
        check_step(step, &program, &parts, &instances)?;
        Ok(StepProgram { program, parts, instances, instance_of, buffers, slots, lowered })
    }
}

/// What the ops of an instance do on one rank, for those who wait for them.
#[derive(Debug, Clone, Default)]
struct Ends {
    /// They bring what the consumer needs.
    arrive: Vec<u32>,
    /// They read what the producer made.
    depart: Vec<u32>,
    /// They pass on what arrived.
    forward: Vec<u32>,
    all: Vec<u32>,
    /// Where what the producer makes lies, and what the consumer needs.
    made: Vec<TileId>,
    needed: Vec<TileId>,
}

/// Memory of a crossing on a rank: for which of its turns, and which buffer of its plan.
type BufferKey = (u32, Direction, Rank, u32, u32);

struct Builder<'a> {
    step: &'a Step,
    lowered: &'a [[Program; 2]],
    buffers: Vec<[u32; 2]>,
    ranks: Vec<RankOps>,
    parts: Vec<PassPart>,
    instances: Vec<Instance>,
    /// By instance, then rank.
    ends: Vec<BTreeMap<Rank, Ends>>,
    /// The instances of every crossing and direction, in the order in which they are produced.
    produced: Vec<[Vec<u32>; 2]>,
    /// The instance that brings a crossing's tensors of a microbatch.
    brings: FxHashMap<(u32, Direction, MicrobatchId), u32>,
    /// The compute ops of a pass, part by part. Others may stand between them: words by which ranks begin together.
    part_ops: FxHashMap<(Pass, Rank), Vec<u32>>,
    /// Ops that wait for the last part of a pass that may come later: rank, op, pass.
    after_pass: Vec<(Rank, u32, Pass)>,
    next_tag: u32,
    next_lane: Vec<[u32; 2]>,
    /// The lane of words between the ranks of a device.
    word_lane: u32,
    /// By stage: the crossings that start there, and those that end there.
    starting: Vec<Vec<usize>>,
    ending: Vec<Vec<usize>>,
    /// By stage: the crossings of its memory.
    memories: Vec<Vec<usize>>,
    /// By crossing.
    slots: Vec<Slots>,
    /// By stage, forwards and backwards: where its passes are cut.
    cuts: Vec<[Vec<f64>; 2]>,
    /// The ops that used a crossing's staging buffers on a rank last, for each turn.
    staging: FxHashMap<(u32, Direction, Rank, u32), Vec<u32>>,
    /// The step's buffer for one of a plan's.
    buffer_of: FxHashMap<BufferKey, u32>,
    tensors: Vec<Tensor>,
    instance_of: Vec<u32>,
    boxes: BoxTable,
    /// By crossing and direction: where its plan's boxes begin.
    first_box: Vec<[u32; 2]>,
}

impl<'a> Builder<'a> {
    fn new(step: &'a Step, lowered: &'a [[Program; 2]], buffers: Vec<[u32; 2]>) -> Self {
        let mut next = 0;
        let mut lanes = |program: &Program| {
            let first = next;
            next += num_lanes(program);
            first
        };
        let next_lane = lowered.iter().map(|[f, b]| [lanes(f), lanes(b)]).collect();
        let word_lane = next;
        let num_ranks = step.cluster.num_devices();
        let stages = step.schedule.placement().num_stages();
        let (mut starting, mut ending) = (vec![vec![]; stages], vec![vec![]; stages]);
        let mut memories = vec![vec![]; stages];
        for (i, c) in step.crossings.iter().enumerate() {
            match c.carries {
                Carries::Memory => memories[c.edge.from.index()].push(i),
                Carries::Tensors => {
                    starting[c.edge.from.index()].push(i);
                    ending[c.edge.to.index()].push(i);
                }
            }
        }
        let mut boxes = BoxTable::default();
        let mut all_of = |program: &Program| {
            let first = boxes.len() as u32;
            program.boxes.iter().for_each(|region| {
                boxes.push(region.clone());
            });
            first
        };
        let first_box = lowered.iter().map(|[f, b]| [all_of(f), all_of(b)]).collect();
        Self {
            cuts: cuts(step, &starting, &ending),
            starting,
            ending,
            memories,
            slots: step.crossings.iter().map(|_| Slots::default()).collect(),
            step,
            lowered,
            buffers,
            ranks: (0..num_ranks).map(|_| RankOps::default()).collect(),
            parts: vec![],
            instances: vec![],
            ends: vec![],
            produced: vec![[vec![], vec![]]; step.crossings.len()],
            brings: FxHashMap::default(),
            part_ops: FxHashMap::default(),
            after_pass: vec![],
            next_tag: 0,
            next_lane,
            word_lane,
            staging: FxHashMap::default(),
            buffer_of: FxHashMap::default(),
            tensors: vec![],
            instance_of: vec![],
            boxes,
            first_box,
        }
    }

    fn build(mut self, order: &[Item]) -> Result<Built, StepError> {
        for item in order {
            match *item {
                Item::Cross { crossing, direction, microbatch } => {
                    self.cross(crossing, direction, microbatch);
                }
                Item::Pass(pass) => {
                    self.compute(pass)?;
                    if self.step.overlap {
                        self.cross_all(self.crossings_from(pass), pass);
                    }
                }
            }
        }
        self.patch();
        // Plans in which nobody follows anybody have no chunks.
        let chunks = self.lowered.iter().flatten().map(|p| p.chunk_bytes).filter(|chunk| *chunk < u64::MAX);
        let chunk_bytes = chunks.max().unwrap_or(u64::MAX);
        let no_tensor = self.tensors.len() as u32;
        self.tensors.push(Tensor {
            name: "the start of a pass".into(),
            dtype: DType::U8,
            shape: [0].into(),
            partial: None,
        });
        let ranks = self.ranks.into_iter().map(|ops| ops.finish(no_tensor)).collect();
        Ok(Built {
            program: Program { chunk_bytes, tensors: self.tensors, boxes: self.boxes, ranks },
            parts: self.parts,
            instances: self.instances,
            instance_of: self.instance_of,
            buffers: self.buffers,
            slots: self.slots.iter().map(Slots::len).collect(),
            lowered: self.lowered.to_vec(),
        })
    }

    fn cross_all(&mut self, crossings: Vec<(usize, Direction)>, pass: Pass) {
        for (crossing, direction) in crossings {
            if self.step.crosses(crossing, pass.microbatch) {
                self.cross(crossing, direction, pass.microbatch);
            }
        }
    }

    /// Where a pass is cut: at 0, at 1, and wherever tensors are made or needed on the way.
    fn cuts(&self, pass: Pass) -> &[f64] {
        match pass.kind {
            PassKind::F => &self.cuts[pass.stage.index()][0],
            PassKind::B | PassKind::BW => &self.cuts[pass.stage.index()][1],
            _ => &[0.0, 1.0],
        }
    }

    /// The crossings that carry what a pass makes, or that it asks for.
    fn crossings_from(&self, pass: Pass) -> Vec<(usize, Direction)> {
        let stage = pass.stage.index();
        match pass.kind {
            PassKind::F => forwards(&self.starting[stage]),
            PassKind::B | PassKind::BW => backwards(&self.ending[stage]),
            PassKind::Evict => forwards(&self.memories[stage]),
            PassKind::Load => backwards(&self.memories[stage]),
            _ => vec![],
        }
    }

    /// The crossings that bring what a pass needs.
    fn crossings_into(&self, pass: Pass) -> Vec<(usize, Direction)> {
        match pass.kind {
            PassKind::F => forwards(&self.ending[pass.stage.index()]),
            PassKind::B | PassKind::BW => {
                let mut into = backwards(&self.starting[pass.stage.index()]);
                into.extend(backwards(&self.memories[pass.stage.index()]));
                into
            }
            _ => vec![],
        }
    }

    /// Emits a pass on every rank of its device.
    fn compute(&mut self, pass: Pass) -> Result<(), StepError> {
        let step = self.step;
        let total = step.times[pass.stage.index()].of(pass).ok_or(StepError::Unsupported { pass })?;
        let cuts = self.cuts(pass).to_vec();
        let of = cuts.len() as u32 - 1;
        let device = step.schedule.placement().device(pass.stage);
        for (part, cut) in (0..of).zip(cuts.windows(2)) {
            let until = |share: f64| (share * total as f64).round() as u64;
            let nanos = until(cut[1]) - until(cut[0]);
            let id = self.parts.len() as u32;
            self.parts.push(PassPart { pass, part, of });
            let ranks = step.ranks_of(device);
            let mut needs: Vec<(Vec<u32>, Vec<u32>)> =
                ranks.iter().map(|r| self.needs_of_part(pass, *r, cut, part + 1 == of)).collect();
            if step.lockstep && ranks.len() > 1 && needs.iter().any(|(_, arrive)| !arrive.is_empty()) {
                self.begin_together(ranks, &mut needs);
            }
            for (&rank, (own, arrive)) in ranks.iter().zip(needs) {
                let deps = own.into_iter().chain(arrive).map(done).collect();
                let (needs, makes) = Default::default();
                let kind = OpKind::Compute { pass: id, nanos, needs, makes };
                let tiles = self.tiles_of_part(pass, rank, cut, part + 1 == of);
                let ops = &mut self.ranks[rank.index()];
                let op = ops.push(kind, OF_NO_TENSOR, RegionId(0), 0, deps);
                ops.needs.extend(tiles.into_iter().map(|tile| (op, tile)));
                ops.computed = Some(op);
                ops.before = vec![op];
                self.part_ops.entry((pass, rank)).or_default().push(op);
            }
        }
        Ok(())
    }

    /// Lets ranks wait until each of them has what it needs: every one tells the first, and the first tells all.
    fn begin_together(&mut self, ranks: &[Rank], needs: &mut [(Vec<u32>, Vec<u32>)]) {
        for i in 1..ranks.len() {
            let told = self.word(ranks[i], ranks[0], std::mem::take(&mut needs[i].1));
            needs[0].1.push(told);
        }
        for i in 1..ranks.len() {
            let told = self.word(ranks[0], ranks[i], needs[0].1.clone());
            needs[i].1.push(told);
        }
    }

    /// A message of no bytes. Answers the op that receives it.
    fn word(&mut self, from: Rank, to: Rank, after: Vec<u32>) -> u32 {
        let (tag, lane) = (self.next_tag, self.word_lane);
        self.next_tag += 1;
        let send = OpKind::Send { to, lane, tag, weight: 1, from: TileId::NOWHERE };
        let deps = after.into_iter().map(done).collect();
        self.ranks[from.index()].push(send, OF_NO_TENSOR, RegionId(0), 0, deps);
        let recv = OpKind::Recv { from, lane, tag, into: TileId::NOWHERE, reduce: false };
        self.ranks[to.index()].push(recv, OF_NO_TENSOR, RegionId(0), 0, vec![])
    }

    /// What a part of a pass waits for: the part before it and room for what it makes; and what arrives for it.
    fn needs_of_part(&mut self, pass: Pass, rank: Rank, cut: &[f64], last: bool) -> (Vec<u32>, Vec<u32>) {
        let ops = &self.ranks[rank.index()];
        let mut deps: Vec<u32> = if self.step.overlap { vec![] } else { ops.before.clone() };
        deps.extend(ops.computed);
        let mut arrive = vec![];
        for (crossing, direction) in self.crossings_into(pass) {
            let at = self.step.crossings[crossing].needed_at(direction);
            let here = at == cut[0] || (last && at >= 1.0);
            let brings = self.brings.get(&(crossing as u32, direction, pass.microbatch));
            if let Some(ends) = brings.filter(|_| here).and_then(|i| self.ends[*i as usize].get(&rank)) {
                arrive.extend(&ends.arrive);
            }
        }
        for (crossing, direction) in self.crossings_from(pass) {
            let at = self.step.crossings[crossing].made_at(direction);
            let here = at == cut[1] || (cut[0] == 0.0 && at <= 0.0);
            let old = self.last_in_buffer(crossing, direction);
            if let Some(ends) = old.filter(|_| here).and_then(|i| self.ends[i as usize].get(&rank)) {
                deps.extend(&ends.depart);
            }
        }
        (deps, arrive)
    }

    /// What a part of a pass reads: what it needs from its moment on, and, until the last pass that keeps it, what the stage got for the
    /// microbatch.
    fn tiles_of_part(&self, pass: Pass, rank: Rank, cut: &[f64], last: bool) -> Vec<TileId> {
        let stage = pass.stage.index();
        let mut read = vec![];
        for (crossing, direction) in self.crossings_into(pass) {
            if last || self.step.crossings[crossing].needed_at(direction) <= cut[0] {
                read.push((crossing, direction));
            }
        }
        if last && matches!(pass.kind, PassKind::B | PassKind::W | PassKind::BW) {
            read.extend(forwards(&self.ending[stage]));
        }
        if last && pass.kind == PassKind::W {
            read.extend(backwards(&self.starting[stage]));
        }
        let ends = |(crossing, direction): (usize, Direction)| {
            let instance = self.brings.get(&(crossing as u32, direction, pass.microbatch))?;
            self.ends[*instance as usize].get(&rank)
        };
        read.into_iter().filter_map(ends).flat_map(|ends| &ends.needed).copied().collect()
    }

    /// The instance that last used the buffer which the next one of a crossing will use.
    fn last_in_buffer(&self, crossing: usize, direction: Direction) -> Option<u32> {
        let produced = &self.produced[crossing][direction as usize];
        let buffers = self.buffers[crossing][direction as usize] as usize;
        produced.len().checked_sub(buffers).map(|k| produced[k])
    }
}

fn forwards(crossings: &[usize]) -> Vec<(usize, Direction)> {
    crossings.iter().map(|c| (*c, Direction::Forward)).collect()
}

fn backwards(crossings: &[usize]) -> Vec<(usize, Direction)> {
    crossings.iter().map(|c| (*c, Direction::Backward)).collect()
}

/// By stage: where its forward and its backward pass are cut.
fn cuts(step: &Step, starting: &[Vec<usize>], ending: &[Vec<usize>]) -> Vec<[Vec<f64>; 2]> {
    let cut = |starts: &Vec<usize>, ends: &Vec<usize>, direction: Direction| {
        let (makes, needs) = match direction {
            Direction::Forward => (starts, ends),
            Direction::Backward => (ends, starts),
        };
        let mut cuts = vec![0.0, 1.0];
        cuts.extend(makes.iter().map(|c| step.crossings[*c].made_at(direction)));
        cuts.extend(needs.iter().map(|c| step.crossings[*c].needed_at(direction)));
        cuts.sort_by(f64::total_cmp);
        cuts.dedup();
        cuts
    };
    let both = |(s, e)| [cut(s, e, Direction::Forward), cut(s, e, Direction::Backward)];
    starting.iter().zip(ending).map(both).collect()
}

fn num_lanes(program: &Program) -> u32 {
    let lanes = program.ranks.iter().flat_map(|r| &r.ops).filter_map(|op| match op.kind {
        OpKind::Send { lane, .. } => Some(lane + 1),
        _ => None,
    });
    lanes.max().unwrap_or(0)
}
