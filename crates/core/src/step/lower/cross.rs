//! The ops of a crossing, once for every microbatch that crosses: copies of its plan's, with what they wait for beyond it.

use std::collections::BTreeMap;

use super::rank_ops::done;
use super::{Builder, Ends, Instance, STAGING_TURNS};
use crate::id::{MicrobatchId, Rank, RegionId};
use crate::program::{Dep, Holds, OpKind, RankProgram, Role, Tile, TileId};
use crate::schedule::{Pass, PassKind};
use crate::step::{Carries, Crossing, Direction};

impl Builder<'_> {
    /// Emits the ops of a crossing for a microbatch.
    pub(super) fn cross(&mut self, crossing: usize, direction: Direction, microbatch: MicrobatchId) {
        let plan = &self.lowered[crossing][direction as usize];
        let old = self.last_in_buffer(crossing, direction);
        let count = self.produced[crossing][direction as usize].len() as u32;
        let id = self.instances.len() as u32;
        let buffer = count % self.buffers[crossing][direction as usize];
        let (slot, before) = self.slot(crossing, direction, microbatch);
        let first_tensor = self.tensors_of(crossing, direction, microbatch, id);
        let mut instance = Instance {
            crossing: crossing as u32,
            direction,
            microbatch,
            buffer,
            slot,
            first_tensor,
            ops: vec![],
            tiles: vec![],
        };
        if !self.step.overlap && self.step.lockstep {
            self.cross_together(crossing);
        }
        let mut ends = BTreeMap::new();
        for (rank, ranked) in (0..).map(Rank).zip(&plan.ranks).filter(|(_, r)| !r.is_idle()) {
            let first = self.ranks[rank.index()].len();
            let room = match self.step.keeps(crossing, rank) {
                true => self.room_in_slot(crossing, before, rank),
                false => self.room(crossing, direction, microbatch, rank, old),
            };
            let first_tile = self.lay_tiles(rank, ranked, &instance, count % STAGING_TURNS);
            let copied = self.copy_ops(rank, ranked, &instance, count, first_tile, room);
            if !ranked.ops.is_empty() {
                instance.ops.push((rank, first..first + ranked.ops.len() as u32));
            }
            instance.tiles.push((rank, first_tile..first_tile + ranked.tiles.len() as u32));
            ends.insert(rank, copied);
        }
        let tags = plan.ranks.iter().flat_map(|r| &r.ops).filter_map(|op| match op.kind {
            OpKind::Send { tag, .. } => Some(tag + 1),
            _ => None,
        });
        self.next_tag += tags.max().unwrap_or(0);
        if !self.step.overlap {
            self.confirm(&instance);
        }
        self.instances.push(instance);
        self.ends.push(ends);
        self.produced[crossing][direction as usize].push(id);
        self.brings.insert((crossing as u32, direction, microbatch), id);
    }

    /// The tensors that cross: new ones, but for memory that comes back.
    fn tensors_of(&mut self, crossing: usize, direction: Direction, m: MicrobatchId, instance: u32) -> u32 {
        let memory = self.step.crossings[crossing].carries == Carries::Memory;
        if memory && direction == Direction::Backward {
            let left = self.brings.get(&(crossing as u32, Direction::Forward, m));
            if let Some(left) = left {
                return self.instances[*left as usize].first_tensor;
            }
        }
        let first = self.tensors.len() as u32;
        let tensors = &self.lowered[crossing][direction as usize].tensors;
        self.tensors.extend(tensors.iter().cloned());
        self.instance_of.resize(self.tensors.len(), instance);
        first
    }

    /// Lays a rank's tiles of a plan out in the memory that an instance has, and returns the first of them.
    fn lay_tiles(&mut self, rank: Rank, ranked: &RankProgram, instance: &Instance, staging_turn: u32) -> u32 {
        let (crossing, direction) = (instance.crossing as usize, instance.direction);
        let first = self.ranks[rank.index()].program.tiles.len() as u32;
        let keeps = self.step.keeps(crossing, rank);
        let turn = instance.slot.filter(|_| keeps).unwrap_or(instance.buffer);
        for tile in &ranked.tiles {
            let role = ranked.buffers[tile.buffer as usize].role;
            let (of, turn) = match role {
                Role::Staging => (direction, staging_turn),
                // What was kept leaves from where it arrived.
                Role::Source(_) if keeps && direction == Direction::Backward => (Direction::Forward, turn),
                _ => (direction, turn),
            };
            let buffer = match of == direction {
                true => tile.buffer,
                false => self.kept_in(instance, rank, tile.tensor).unwrap_or(tile.buffer),
            };
            let key = (instance.crossing, of, rank, turn, buffer);
            let new = self.ranks[rank.index()].program.buffers.len() as u32;
            let buffer = *self.buffer_of.entry(key).or_insert(new);
            if buffer == new {
                let role = if role == Role::Staging { role } else { Role::Crossing };
                self.ranks[rank.index()].program.add_buffer(ranked.buffers[tile.buffer as usize].bytes, role);
            }
            let holds = match tile.holds {
                Holds::Source(part) if of == direction => Holds::Made(part),
                _ => Holds::Transit,
            };
            let tensor = instance.first_tensor + tile.tensor;
            let region = RegionId(self.first_box[crossing][direction as usize] + tile.region.0);
            let tile = Tile { tensor, region, buffer, holds, ..tile.clone() };
            self.ranks[rank.index()].program.add_tile(tile);
        }
        first
    }

    /// The buffer of the plan that brought what a rank keeps.
    fn kept_in(&self, instance: &Instance, rank: Rank, tensor: u32) -> Option<u32> {
        let brought = &self.lowered[instance.crossing as usize][Direction::Forward as usize];
        let buffers = &brought.ranks[rank.index()].buffers;
        buffers.iter().position(|b| b.role == Role::Destination(tensor)).map(|b| b as u32)
    }

    /// Lets the ranks of both ends start a blocking crossing together.
    fn cross_together(&mut self, crossing: usize) {
        let (edge, placement) = (self.step.crossings[crossing].edge, self.step.schedule.placement());
        let ends = [edge.from, edge.to].map(|stage| self.step.ranks_of(placement.device(stage)));
        let ranks = ends.concat();
        let mut needs: Vec<(Vec<u32>, Vec<u32>)> =
            ranks.iter().map(|r| (vec![], std::mem::take(&mut self.ranks[r.index()].before))).collect();
        self.begin_together(&ranks, &mut needs);
        for (rank, (_, before)) in ranks.iter().zip(needs) {
            self.ranks[rank.index()].before = before;
        }
    }

    /// Where communication blocks, a sender stands still until its message has arrived, not only until it has left: every
    /// receiver says so.
    fn confirm(&mut self, instance: &Instance) {
        let mut arrived: BTreeMap<(Rank, Rank), Vec<u32>> = BTreeMap::new();
        for (rank, range) in &instance.ops {
            for op in range.clone() {
                if let OpKind::Recv { from, .. } = *self.ranks[rank.index()].kind(op) {
                    arrived.entry((*rank, from)).or_default().push(op);
                }
            }
        }
        for ((receiver, sender), ops) in arrived {
            let told = self.word(receiver, sender, ops);
            self.ranks[sender.index()].before.push(told);
        }
    }

    /// Copies a rank's ops of a plan, as the `count`th instance of a crossing.
    fn copy_ops(
        &mut self,
        rank: Rank,
        ranked: &RankProgram,
        instance: &Instance,
        count: u32,
        first_tile: u32,
        (room, freed_by): (Vec<u32>, Option<Pass>),
    ) -> Ends {
        let Instance { direction, microbatch, first_tensor, .. } = *instance;
        let crossing = instance.crossing as usize;
        let base = self.ranks[rank.index()].len();
        let lane = self.next_lane[crossing][direction as usize];
        let first_box = self.first_box[crossing][direction as usize];
        let key = (crossing as u32, direction, rank, count % STAGING_TURNS);
        let last_users = self.staging.remove(&key).unwrap_or_default();
        let made = self.made_by(crossing, direction, microbatch, rank);
        let before = std::mem::take(&mut self.ranks[rank.index()].before);
        let role = |tile: Option<TileId>| tile.map(|t| ranked.buffers[ranked.tile(t).buffer as usize].role);
        let mut ends = self.tiles_of(rank, ranked, first_tile);
        let mut staged = vec![];
        for op in &ranked.ops {
            let mut deps: Vec<Dep> = ranked.deps(op).iter().map(|d| Dep { op: d.op + base, ..*d }).collect();
            let (from, into) = op.ends();
            let (from, into) = (role(from), role(into));
            if matches!(from, Some(Role::Source(_))) {
                deps.extend(made.iter().copied().map(done));
            }
            if into == Some(Role::Staging) {
                deps.extend(last_users.iter().copied().map(done));
            }
            let here = self.ranks[rank.index()].len();
            if matches!(into, Some(Role::Destination(_))) {
                deps.extend(room.iter().copied().map(done));
                self.after_pass.extend(freed_by.map(|pass| (rank, here, pass)));
                ends.arrive.push(here);
            }
            if !self.step.overlap {
                deps.extend(before.iter().copied().map(done));
            }
            match from {
                Some(Role::Source(_)) => ends.depart.push(here),
                Some(Role::Destination(_)) => ends.forward.push(here),
                _ => {}
            }
            if [from, into].contains(&Some(Role::Staging)) {
                staged.push(here);
            }
            ends.all.push(here);
            let kind = shift(op.kind, self.next_tag, lane, first_tile);
            let (tensor, region) = (first_tensor + op.tensor, RegionId(first_box + op.region.0));
            self.ranks[rank.index()].push(kind, tensor, region, op.bytes, deps);
        }
        // What the producer makes is written by the op that its sends wait for.
        if let [maker] = made[..] {
            let makes = ends.made.iter().map(|tile| (maker, *tile));
            self.ranks[rank.index()].makes.extend(makes);
        }
        self.staging.insert(key, staged);
        self.ranks[rank.index()].before = if ranked.ops.is_empty() { before } else { ends.all.clone() };
        ends
    }

    /// The tiles of an instance on a rank that passes write and read.
    fn tiles_of(&self, rank: Rank, ranked: &RankProgram, first_tile: u32) -> Ends {
        let mut ends = Ends::default();
        for (i, tile) in (first_tile..).zip(&ranked.tiles) {
            let laid = self.ranks[rank.index()].program.tile(TileId(i));
            match (laid.holds, ranked.buffers[tile.buffer as usize].role) {
                (Holds::Made(_), _) => ends.made.push(TileId(i)),
                (_, Role::Destination(_)) => ends.needed.push(TileId(i)),
                _ => {}
            }
        }
        ends
    }

    /// The ops after which a rank has what it sends: the compute op at whose end a crossing's tensors are made; on a rank that keeps
    /// a stage's memory, those that brought it.
    fn made_by(&self, crossing: usize, direction: Direction, m: MicrobatchId, rank: Rank) -> Vec<u32> {
        let Crossing { edge, carries, .. } = &self.step.crossings[crossing];
        let pass = match (carries, direction) {
            (Carries::Tensors, Direction::Forward) => Pass::new(PassKind::F, edge.from, m),
            (Carries::Tensors, Direction::Backward) => self.step.schedule.backward(edge.to, m),
            (Carries::Memory, Direction::Forward) => Pass::new(PassKind::Evict, edge.from, m),
            (Carries::Memory, Direction::Backward) => {
                let kept = self.ends_of(crossing, Direction::Forward, m, rank);
                return kept.map(|ends| ends.arrive.clone()).unwrap_or_default();
            }
        };
        let Some(parts) = self.part_ops.get(&(pass, rank)) else { return vec![] };
        let at = self.step.crossings[crossing].made_at(direction);
        let cuts = self.cuts(pass);
        let part = cuts.iter().position(|cut| *cut >= at).expect("every moment is a cut").saturating_sub(1);
        vec![parts[part]]
    }

    /// Where a stage's memory is kept, and whose was there before.
    fn slot(
        &mut self,
        crossing: usize,
        direction: Direction,
        m: MicrobatchId,
    ) -> (Option<u32>, Option<MicrobatchId>) {
        match (self.step.crossings[crossing].carries, direction) {
            (Carries::Tensors, _) => (None, None),
            (Carries::Memory, Direction::Backward) => (self.slots[crossing].free(m), None),
            (Carries::Memory, Direction::Forward) => {
                let (slot, before) = self.slots[crossing].take(m);
                (Some(slot), before)
            }
        }
    }

    /// When there is room for what an instance brings to a rank: after these ops, and after this pass, which may be emitted later. What a
    /// stage asked for does not come before.
    fn room(
        &self,
        crossing: usize,
        direction: Direction,
        m: MicrobatchId,
        rank: Rank,
        old: Option<u32>,
    ) -> (Vec<u32>, Option<Pass>) {
        let mut room: Vec<u32> = self.readers_of(old, rank).collect();
        let Crossing { edge, carries, .. } = &self.step.crossings[crossing];
        if (*carries, direction) == (Carries::Memory, Direction::Backward) {
            let load = self.part_ops.get(&(Pass::new(PassKind::Load, edge.from, m), rank));
            room.extend(load.and_then(|parts| parts.first()));
        }
        (room, old.map(|old| self.frees(old)))
    }

    /// The same in a keeper's slot: when what was there before has been passed on, and has left.
    fn room_in_slot(
        &self,
        crossing: usize,
        before: Option<MicrobatchId>,
        rank: Rank,
    ) -> (Vec<u32>, Option<Pass>) {
        let Some(m) = before else { return (vec![], None) };
        let came = self.ends_of(crossing, Direction::Forward, m, rank).map(|ends| &ends.forward);
        let left = self.ends_of(crossing, Direction::Backward, m, rank).map(|ends| &ends.depart);
        (came.into_iter().chain(left).flatten().copied().collect(), None)
    }

    /// A microbatch's ops of a crossing on a rank.
    fn ends_of(&self, crossing: usize, direction: Direction, m: MicrobatchId, rank: Rank) -> Option<&Ends> {
        let instance = self.brings.get(&(crossing as u32, direction, m))?;
        self.ends[*instance as usize].get(&rank)
    }

    /// The pass after which nobody needs what an instance brought.
    fn frees(&self, instance: u32) -> Pass {
        let i = &self.instances[instance as usize];
        let Crossing { edge, carries, .. } = &self.step.crossings[i.crossing as usize];
        let stage = match i.direction {
            Direction::Forward => edge.to,
            Direction::Backward => edge.from,
        };
        if *carries == Carries::Memory {
            return self.step.schedule.backward(stage, i.microbatch);
        }
        let fused = Pass::new(PassKind::BW, stage, i.microbatch);
        if self.step.schedule.has(fused) { fused } else { fused.with_kind(PassKind::W) }
    }

    /// Ops that pass on what an instance brought.
    fn readers_of(&self, instance: Option<u32>, rank: Rank) -> impl Iterator<Item = u32> + use<> {
        let ends = instance.and_then(|i| self.ends[i as usize].get(&rank));
        ends.map(|e| e.forward.clone()).unwrap_or_default().into_iter()
    }

    /// Fills in the waits for passes that were emitted later than those who wait.
    pub(super) fn patch(&mut self) {
        for (rank, op, pass) in std::mem::take(&mut self.after_pass) {
            if let Some(&last) = self.part_ops.get(&(pass, rank)).and_then(|parts| parts.last()) {
                self.ranks[rank.index()].deps[op as usize].push(done(last));
            }
        }
    }
}

/// The op of a plan as one of many in a step.
pub(super) fn shift(kind: OpKind, tags: u32, lanes: u32, tiles: u32) -> OpKind {
    let tile = |tile| match tile {
        TileId::NOWHERE => TileId::NOWHERE,
        TileId(place) => TileId(place + tiles),
    };
    match kind {
        OpKind::Send { to, lane, tag, weight, from } => {
            OpKind::Send { to, lane: lane + lanes, tag: tag + tags, weight, from: tile(from) }
        }
        OpKind::Recv { from, lane, tag, into, reduce } => {
            OpKind::Recv { from, lane: lane + lanes, tag: tag + tags, into: tile(into), reduce }
        }
        OpKind::Copy { from, into, reduce } => OpKind::Copy { from: tile(from), into: tile(into), reduce },
        OpKind::Compute { .. } => unreachable!("a plan computes nothing"),
    }
}
