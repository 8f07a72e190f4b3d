//! What ranks do inside their passes, put into a step's program: a pass becomes what is computed between its calls, and every call the ops of its
//! own program.
//!
//! ```text
//! before    | pass ------------------------------------ |
//! after     | compute |             | compute | compute |      a call's ops wait for the compute before its start,
//!                      '- call's ops -----------'              and the compute behind its wait waits for them
//! ```
//!
//! All else stays as it was: what waited for the pass waits for the last of its parts, and its first one waits for what it waited for. The program is
//! proven like any other: that it comes to its end, and that each part begins with the sums that were waited for.

use std::collections::BTreeMap;
use std::ops::Range;

use rustc_hash::FxHashMap;

use super::cross::shift;
use super::{Instance, PassPart, StepProgram};
use crate::id::{Rank, RegionId};
use crate::program::{
    BoxTable, Dep, DepKind, Holds, Moved, Op, OpKind, Program, RankProgram, Role, Tensor, Tile, TileId,
};
use crate::step::StepError;
use crate::step::lists::{Item, RankList, StepLists};
use crate::verify::Verified;

/// Stands for the instance of tensors that cross in none.
const OF_NO_INSTANCE: u32 = u32::MAX;

/// Puts lists into a step's program, and proves what comes of it. An engine runs the program without them: there, calls begin when passes ask for them.
pub fn lower_lists(step: &StepProgram, lists: &StepLists) -> Result<StepProgram, StepError> {
    lists.check()?;
    let mut shared = Shared::new(step, lists);
    let (mut ranks, mut parts) = (vec![], vec![]);
    let mut instances = step.instances.clone();
    let no_list = RankList::default();
    for (rank, old) in (0..).map(Rank).zip(&step.program.ranks) {
        let list = lists.ranks.get(rank.index()).unwrap_or(&no_list);
        let cut = segments_of(step, old, rank, list)?;
        let places = Places::new(old, &cut, lists, rank);
        places.move_instances(rank, &mut instances);
        let writer = Writer { rank, old, list, cut, places, new: copied(old), open: BTreeMap::new() };
        ranks.push(writer.write(&mut shared, &mut parts));
    }
    let Shared { tensors, boxes, instance_of, .. } = shared;
    let chunks = lists.programs.iter().map(|p| p.chunk_bytes).filter(|chunk| *chunk < u64::MAX);
    let own = Some(step.program.chunk_bytes).filter(|chunk| *chunk < u64::MAX);
    let chunk_bytes = chunks.chain(own).max().unwrap_or(u64::MAX);
    let program = Verified::program(Program { chunk_bytes, tensors, boxes, ranks })?;
    let (buffers, slots, lowered) = (step.buffers.clone(), step.slots.clone(), step.lowered.clone());
    Ok(StepProgram { program, parts, instances, instance_of, buffers, slots, lowered })
}

/// A rank's memory, without ops.
fn copied(old: &RankProgram) -> RankProgram {
    RankProgram { ops: vec![], deps: vec![], touched: vec![], ..old.clone() }
}

/// A part of a pass: it waits for calls, computes, and starts others.
#[derive(Debug, Clone, Default)]
struct Segment {
    waits: Vec<usize>,
    ns: u64,
    starts: Vec<usize>,
}

/// The items of a pass, cut where calls are started and waited for.
fn segments(list: &RankList, items: Range<usize>) -> Vec<Segment> {
    let mut all = vec![Segment::default()];
    for item in &list.list.items()[items] {
        let last = all.last_mut().expect("there is one");
        match *item {
            Item::Compute { ns } if last.starts.is_empty() => last.ns += ns,
            Item::Compute { ns } => all.push(Segment { ns, ..Segment::default() }),
            Item::Start(call) => last.starts.push(call),
            Item::Wait(call) if last.ns == 0 && last.starts.is_empty() => last.waits.push(call),
            Item::Wait(call) => all.push(Segment { waits: vec![call], ..Segment::default() }),
        }
    }
    all
}

/// By compute op of a rank's program: its parts.
type Cut = FxHashMap<u32, (PassPart, Vec<Segment>)>;

fn segments_of(step: &StepProgram, old: &RankProgram, rank: Rank, list: &RankList) -> Result<Cut, StepError> {
    let mut passes = list.passes.iter();
    let mut cut = Cut::default();
    for (i, op) in (0..).zip(&old.ops) {
        let OpKind::Compute { pass, .. } = op.kind else { continue };
        let part = step.parts[pass as usize];
        match passes.next() {
            Some((pass, items)) if part.of == 1 && *pass == part.pass => {
                cut.insert(i, (part, segments(list, items.clone())));
            }
            _ => return Err(StepError::NoList { rank, pass: part.pass }),
        }
    }
    match passes.next() {
        Some((pass, _)) => Err(StepError::NoList { rank, pass: *pass }),
        None => Ok(cut),
    }
}

/// Where a rank's ops come to stand: the first and the last op of each, which only differ where it is cut.
struct Places(Vec<[u32; 2]>);

impl Places {
    fn new(old: &RankProgram, cut: &Cut, lists: &StepLists, rank: Rank) -> Self {
        let calls = lists.ranks.get(rank.index()).map_or(&[][..], |list| list.list.calls());
        let ops =
            |call: &usize| lists.programs[calls[*call].program as usize].ranks[rank.index()].ops.len() as u32;
        let mut next = 0;
        let place = |i: u32| {
            let first = next;
            let mut last = next;
            match cut.get(&i) {
                None => next += 1,
                Some((_, segments)) => {
                    for segment in segments {
                        last = next;
                        next += 1 + segment.starts.iter().map(ops).sum::<u32>();
                    }
                }
            }
            [first, last]
        };
        Self((0..old.ops.len() as u32).map(place).collect())
    }

    /// What waited for an op.
    fn dep(&self, dep: Dep) -> Dep {
        Dep { op: self.0[dep.op as usize][1], ..dep }
    }

    fn move_instances(&self, rank: Rank, instances: &mut [Instance]) {
        let ops =
            instances.iter_mut().flat_map(|i| &mut i.ops).filter(|(of, ops)| *of == rank && !ops.is_empty());
        for (_, ops) in ops {
            *ops = self.0[ops.start as usize][0]..self.0[ops.end as usize - 1][1] + 1;
        }
    }
}

/// What all ranks' programs share.
struct Shared<'a> {
    lists: &'a StepLists,
    tensors: Vec<Tensor>,
    boxes: BoxTable,
    instance_of: Vec<u32>,
    /// By program of a call: its boxes, and its lanes.
    first_box: Vec<u32>,
    first_lane: Vec<u32>,
    /// By group and place among its calls: the first of its tensors, and of its tags.
    met: BTreeMap<(u32, usize), (u32, u32)>,
    next_tag: u32,
}

impl<'a> Shared<'a> {
    fn new(step: &'a StepProgram, lists: &'a StepLists) -> Self {
        let mut instance_of = step.instance_of.clone();
        let step: &Program = &step.program;
        instance_of.resize(step.tensors.len(), OF_NO_INSTANCE);
        let mut boxes = BoxTable::default();
        let mut all_of = |program: &Program| {
            let first = boxes.len() as u32;
            program.boxes.iter().for_each(|region| {
                boxes.push(region.clone());
            });
            first
        };
        all_of(step);
        let first_box = lists.programs.iter().map(all_of).collect();
        let mut next_lane = lanes_of(step);
        let first_lane = lists.programs.iter().map(|program| {
            let first = next_lane;
            next_lane += lanes_of(program);
            first
        });
        Self {
            lists,
            tensors: step.tensors.clone(),
            boxes,
            instance_of,
            first_box,
            first_lane: first_lane.collect(),
            met: BTreeMap::new(),
            next_tag: tags_of(step),
        }
    }

    /// The tensors and tags of a group's call, which its first member makes.
    fn meet(&mut self, group: u32, place: usize, program: u32) -> (u32, u32) {
        if let Some(&met) = self.met.get(&(group, place)) {
            return met;
        }
        let of = &self.lists.programs[program as usize];
        let met = (self.tensors.len() as u32, self.next_tag);
        self.tensors.extend(of.tensors.iter().cloned());
        self.next_tag += tags_of(of);
        self.instance_of.resize(self.tensors.len(), OF_NO_INSTANCE);
        self.met.insert((group, place), met);
        met
    }
}

fn tags_of(program: &Program) -> u32 {
    let tags = program.ranks.iter().flat_map(|r| &r.ops).filter_map(Op::tag);
    tags.max().map_or(0, |tag| tag + 1)
}

fn lanes_of(program: &Program) -> u32 {
    super::num_lanes(program)
}

/// Writes a rank's program.
struct Writer<'a> {
    rank: Rank,
    old: &'a RankProgram,
    list: &'a RankList,
    cut: Cut,
    places: Places,
    new: RankProgram,
    /// Calls under way: the ops that end them, and the tiles that they fill.
    open: BTreeMap<usize, (Vec<u32>, Vec<TileId>)>,
}

impl Writer<'_> {
    fn write(mut self, shared: &mut Shared<'_>, parts: &mut Vec<PassPart>) -> RankProgram {
        let mut started: FxHashMap<u32, usize> = FxHashMap::default();
        for (i, op) in (0..).zip(&self.old.ops) {
            let deps: Vec<Dep> = self.old.deps(op).iter().map(|dep| self.places.dep(*dep)).collect();
            match self.cut.remove(&i) {
                None => {
                    self.new.push(op.kind, moved(op), &deps);
                }
                Some((part, segments)) => {
                    self.pass(op, deps, (part, segments), (shared, parts, &mut started));
                }
            }
        }
        self.new
    }

    /// The parts of a pass, each with the calls that it starts behind it.
    fn pass(
        &mut self,
        op: &Op,
        mut deps: Vec<Dep>,
        (part, segments): (PassPart, Vec<Segment>),
        (shared, parts, started): (&mut Shared<'_>, &mut Vec<PassPart>, &mut FxHashMap<u32, usize>),
    ) {
        let OpKind::Compute { needs, makes, .. } = op.kind else { unreachable!("only passes are cut") };
        let (needs, makes) = (self.old.touched(needs).to_vec(), self.old.touched(makes).to_vec());
        let of = segments.len() as u32;
        for (k, segment) in (0..).zip(segments) {
            let (first, last) = (k == 0, k + 1 == of);
            let mut reads = if first || last { needs.clone() } else { vec![] };
            for call in segment.waits {
                let (ends, tiles) = self.open.remove(&call).unwrap_or_default();
                deps.extend(ends.into_iter().map(Dep::done));
                reads.extend(tiles);
            }
            let at = self.new.ops.len() as u32;
            let calls: Vec<_> = segment.starts.iter().map(|call| self.lay(*call, shared, started)).collect();
            let mut writes = if last { makes.clone() } else { vec![] };
            writes.extend(calls.iter().flat_map(|call| &call.made));
            writes.sort_unstable();
            reads.sort_unstable();
            reads.dedup();
            deps.sort_unstable_by_key(|dep| (dep.op, dep.kind == DepKind::Done));
            deps.dedup();
            let (needs, makes) = (self.new.touch(reads), self.new.touch(writes));
            let kind = OpKind::Compute { pass: parts.len() as u32, nanos: segment.ns, needs, makes };
            parts.push(PassPart { part: k, of, ..part });
            self.new.push(kind, moved(op), &deps);
            calls.into_iter().for_each(|call| self.copy_ops(call, at, shared));
            deps = vec![Dep::done(at)];
        }
    }

    /// Lays a call's tiles out, in memory of its own.
    fn lay<'s>(
        &mut self,
        number: usize,
        shared: &mut Shared<'s>,
        started: &mut FxHashMap<u32, usize>,
    ) -> Laid<'s> {
        let call = self.list.list.calls()[number];
        let place = started.entry(call.group.0).or_default();
        let (first_tensor, first_tag) = shared.meet(call.group.0, *place, call.program);
        *place += 1;
        let ranked = &shared.lists.programs[call.program as usize].ranks[self.rank.index()];
        let (first_tile, first_box) = (self.new.tiles.len() as u32, shared.first_box[call.program as usize]);
        let first_buffer = self.new.buffers.len() as u32;
        for buffer in &ranked.buffers {
            let role = if buffer.role == Role::Staging { Role::Staging } else { Role::Crossing };
            self.new.add_buffer(buffer.bytes, role);
        }
        let (mut made, mut filled) = (vec![], vec![]);
        for tile in &ranked.tiles {
            let holds = match tile.holds {
                Holds::Source(part) => Holds::Made(part),
                _ => Holds::Transit,
            };
            let id = self.new.add_tile(Tile {
                tensor: first_tensor + tile.tensor,
                region: RegionId(first_box + tile.region.0),
                buffer: first_buffer + tile.buffer,
                holds,
                ..tile.clone()
            });
            match (tile.holds, ranked.buffers[tile.buffer as usize].role) {
                (Holds::Source(_), _) => made.push(id),
                (_, Role::Destination(_)) => filled.push(id),
                _ => {}
            }
        }
        Laid { number, program: call.program, ranked, first_tile, first_tensor, first_tag, made, filled }
    }

    /// A call's ops. None begins before the call has been started here; whoever waits for it waits for all of them.
    fn copy_ops(&mut self, call: Laid<'_>, after: u32, shared: &Shared<'_>) {
        let base = self.new.ops.len() as u32;
        let program = call.program as usize;
        for op in &call.ranked.ops {
            let mut deps: Vec<Dep> =
                call.ranked.deps(op).iter().map(|d| Dep { op: d.op + base, ..*d }).collect();
            deps.insert(0, Dep::done(after));
            let kind = shift(op.kind, call.first_tag, shared.first_lane[program], call.first_tile);
            let region = RegionId(shared.first_box[program] + op.region.0);
            self.new.push(
                kind,
                Moved { tensor: call.first_tensor + op.tensor, region, bytes: op.bytes },
                &deps,
            );
        }
        let ends = (base..self.new.ops.len() as u32).collect();
        self.open.insert(call.number, (ends, call.filled));
    }
}

/// A call on a rank, whose tiles are laid out.
struct Laid<'a> {
    number: usize,
    program: u32,
    ranked: &'a RankProgram,
    first_tile: u32,
    first_tensor: u32,
    first_tag: u32,
    made: Vec<TileId>,
    filled: Vec<TileId>,
}

fn moved(op: &Op) -> Moved {
    Moved { tensor: op.tensor, region: op.region, bytes: op.bytes }
}
