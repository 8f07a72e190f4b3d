//! Makes a rank's ops, one transfer after the other.

use crate::id::{Rank, TransferId};
use crate::program::{BoxTable, Dep, DepKind, Holds, Moved, OpKind, RankProgram, TileId};
use crate::region::Region;
use crate::reshard::plan::{Plan, Transfer};
use crate::reshard::shards::AllSides;

use super::Addressing;
use super::homes::{Combining, Home, Homes, Piece, View};
use super::shards::ShardTiles;
use super::touching::{Lookup, Mine, Word, needs_word};

/// One rank's ops and memory.
pub fn lower_rank(
    plan: &Plan,
    sides: &AllSides,
    rank: Rank,
    memory: Addressing,
    mine: Mine<'_>,
    lookup: &Lookup,
    boxes: &mut BoxTable,
) -> RankProgram {
    let mut program = RankProgram::default();
    let shards = ShardTiles::lay_out(plan, sides, rank, memory, &mut program, boxes);
    let view = View { plan, sides, rank, mine: mine.transfers, lookup, shards: &shards };
    let homes = Homes::assign(view, &mut program, boxes);
    let ops = vec![Ops::default(); mine.transfers.len()];
    let mut emitter = Emitter {
        view,
        words: mine.words,
        lane: mine.first_free_lane,
        homes,
        program,
        boxes,
        ops,
        deps: vec![],
    };
    emitter.copy_what_stays();
    emitter.number_ops();
    for at in 0..mine.transfers.len() {
        emitter.emit(at);
    }
    emitter.program
}

/// The places of a transfer's ops on this rank: of its send; and of the op with which all of it is there.
#[derive(Clone, Copy, Default)]
struct Ops {
    send: u32,
    arrived: u32,
}

struct Emitter<'a> {
    view: View<'a>,
    words: &'a [Word],
    /// The first lane for words: each has its own, because none has to wait for another.
    lane: u32,
    homes: Homes,
    program: RankProgram,
    boxes: &'a mut BoxTable,
    /// By place in the rank's list. Known before any op is made: an `after` may point forwards.
    ops: Vec<Ops>,
    /// What the op at hand waits for.
    deps: Vec<Dep>,
}

impl<'a> Emitter<'a> {
    /// Copies of what the rank holds and wants, before anything else.
    fn copy_what_stays(&mut self) {
        let View { plan, sides, rank, shards, .. } = self.view;
        if shards.in_place() {
            return;
        }
        for (tensor, sides) in (0..plan.problem.reshards.len() as u32).zip(sides.iter()) {
            if sides.src.is_partial() || sides.src.tile(rank).is_none() || sides.dst.tile(rank).is_none() {
                continue;
            }
            for held in sides.src.boxes(rank) {
                for region in sides.dst.common(rank, &held) {
                    let from = shards.source(&self.program, self.boxes, tensor, &region);
                    let into = shards.goal(&self.program, self.boxes, tensor, &region);
                    if let (Some(from), Some(into)) = (from, into) {
                        self.copy(tensor, region, from, into);
                    }
                }
            }
        }
    }

    /// Copies a box that the plan has no id for.
    fn copy(&mut self, tensor: u32, region: Region, from: TileId, into: TileId) {
        let bytes = region.volume() * self.program_element(tensor);
        let region = self.boxes.push(region);
        self.push(OpKind::Copy { from, into, reduce: false }, Moved { tensor, region, bytes });
    }

    fn program_element(&self, tensor: u32) -> u64 {
        self.view.plan.problem.reshards[tensor as usize].src.layout.dtype().bytes()
    }

    /// Adds an op that waits for everything in `deps`.
    fn push(&mut self, kind: OpKind, moved: Moved) {
        self.program.push(kind, moved, &self.deps);
        self.deps.clear();
    }

    fn wait_for(&mut self, ops: impl IntoIterator<Item = u32>) {
        self.deps.extend(ops.into_iter().map(Dep::done));
    }

    fn transfer(&self, id: TransferId) -> &'a Transfer {
        &self.view.plan.transfers()[id.index()]
    }

    fn num_ops(&self) -> u32 {
        self.program.ops.len() as u32
    }

    /// Fixes the place of every op.
    fn number_ops(&mut self) {
        let mut next = self.num_ops();
        let mut num_deps = 0;
        for at in 0..self.view.mine.len() {
            let t = self.transfer(self.view.mine[at]);
            num_deps += self.view.plan.after(t).len();
            if t.src == self.view.rank {
                let words =
                    self.view.plan.after(t).iter().filter(|a| needs_word(self.transfer(**a), t)).count();
                let pieces = self.homes.assembled.get(&at).map_or(0, Vec::len);
                self.ops[at].send = next + (words + pieces) as u32;
                next = self.ops[at].send + 1;
            }
            if t.dst == self.view.rank {
                let Combining { copy_own, lands_in, then_own, .. } = self.homes.combining(at);
                let before = u32::from(copy_own);
                self.ops[at].arrived = next + before + u32::from(lands_in.is_some()) + u32::from(then_own);
                next = self.ops[at].arrived + 1 + self.words_of(at).len() as u32;
            }
        }
        self.program.ops.reserve_exact((next - self.num_ops()) as usize);
        self.program.deps.reserve(num_deps);
    }

    /// The words that tell of a transfer.
    fn words_of(&self, at: usize) -> &'a [Word] {
        let told = self.view.mine[at];
        let first = self.words.partition_point(|w| w.told < told);
        let len = self.words[first..].partition_point(|w| w.told == told);
        &self.words[first..first + len]
    }

    fn emit(&mut self, at: usize) {
        let t = *self.transfer(self.view.mine[at]);
        if t.src == self.view.rank {
            self.emit_send(at, &t);
        }
        if t.dst == self.view.rank {
            self.emit_recv(at, &t);
            for word in self.words_of(at) {
                self.send_word(at, word);
            }
        }
    }

    fn emit_send(&mut self, at: usize, t: &Transfer) {
        let plan = self.view.plan;
        let first_word = self.num_ops();
        for (place, a) in plan.after_range(t).zip(plan.after(t)) {
            if needs_word(&plan.transfers()[a.index()], t) {
                self.recv_word(plan.transfers()[a.index()].dst, t, place);
            }
        }
        let first_piece = self.num_ops();
        let from = self.homes.tile(self.homes.from[at]);
        for piece in self.homes.assembled.remove(&at).unwrap_or_default() {
            self.emit_piece(t, piece, from);
        }
        self.wait_for(first_word..first_piece);
        self.wait_for(first_piece..self.num_ops());
        self.wait_before_send(at, t);
        self.wait_for_copies(t, from);
        let id = self.view.mine[at];
        let kind = OpKind::Send { to: t.dst, lane: t.lane, tag: id.0, weight: t.weight, from };
        debug_assert_eq!(self.num_ops(), self.ops[at].send);
        self.push(kind, Moved::of(t));
    }

    /// What is in `after` and touches the sender: it follows what brings the very box, and waits for the end of everything else.
    fn wait_before_send(&mut self, at: usize, t: &Transfer) {
        let (plan, rank) = (self.view.plan, self.view.rank);
        if plan.after(t).is_empty() {
            return;
        }
        let followed = self.followed(at, t);
        for &a in plan.after(t) {
            let named = &plan.transfers()[a.index()];
            if named.dst != rank && named.src != rank {
                continue;
            }
            let ops = self.ops[self.view.lookup.place(a)];
            let kind = if followed == Some(a) { DepKind::Stream } else { DepKind::Done };
            let op = if named.dst == rank { ops.arrived } else { ops.send };
            self.deps.push(Dep { op, kind });
        }
    }

    /// The transfer in `after` that brings the very box to where it is sent from, and the last one where several add up to it;
    /// none if that is not all yet.
    fn followed(&self, at: usize, t: &Transfer) -> Option<TransferId> {
        let plan = self.view.plan;
        let brings = |a: &TransferId| {
            let named = &plan.transfers()[a.index()];
            let same = || named.region == t.region || plan.region(named) == plan.region(t);
            named.dst == t.src && named.tensor == t.tensor && same()
        };
        let last = plan.after(t).iter().copied().filter(brings).max()?;
        let place = self.view.lookup.place(last);
        let combining = self.homes.combining(place);
        let passes_through = !combining.then_own && combining.lands_in.is_none();
        (passes_through && self.homes.into[place] == self.homes.from[at]).then_some(last)
    }

    /// A box sent out of the destination shard may in part have been copied there.
    fn wait_for_copies(&mut self, t: &Transfer, from: TileId) {
        let sides = self.view.sides.tensor(t.tensor);
        let region = self.view.plan.region(t);
        let in_goal = from != TileId::NOWHERE && self.program.tile(from).holds == Holds::Goal;
        if !in_goal || sides.src.is_partial() || !sides.src.overlaps(t.src, region) {
            return;
        }
        let copies = self.program.ops.iter().take_while(|op| matches!(op.kind, OpKind::Copy { .. }));
        let overlapping = (0..).zip(copies).filter(|(_, op)| {
            op.ends().1 == Some(from) && op.tensor == t.tensor && self.boxes[op.region].overlaps(region)
        });
        let copies: Vec<u32> = overlapping.map(|(place, _)| place).collect();
        self.wait_for(copies);
    }

    fn recv_word(&mut self, from: Rank, t: &Transfer, place: u32) {
        let (lane, tag) = self.word_channel(place);
        self.push(OpKind::Recv { from, lane, tag, into: TileId::NOWHERE, reduce: false }, Moved::word(t));
    }

    fn send_word(&mut self, at: usize, word: &Word) {
        let (lane, tag) = self.word_channel(word.place);
        let t = *self.transfer(word.waits);
        self.wait_for([self.ops[at].arrived]);
        let kind = OpKind::Send { to: t.src, lane, tag, weight: 1, from: TileId::NOWHERE };
        self.push(kind, Moved::word(&t));
    }

    fn word_channel(&self, place: u32) -> (u32, u32) {
        (self.lane.wrapping_add(place), (self.view.plan.transfers().len() as u32).wrapping_add(place))
    }

    fn emit_piece(&mut self, t: &Transfer, piece: Piece, into: TileId) {
        self.wait_for(piece.brought_by.map(|a| self.ops[self.view.lookup.place(a)].arrived));
        let from = self.homes.tile(piece.from);
        self.copy(t.tensor, piece.region, from, into);
    }

    fn emit_recv(&mut self, at: usize, t: &Transfer) {
        let combining = self.homes.combining(at);
        let into = self.homes.tile(self.homes.into[at]);
        if combining.copy_own {
            self.emit_own_part(at, t, into);
        }
        self.wait_before_recv(t);
        self.wait_for(combining.copy_own.then(|| self.program.ops.len() as u32 - 1));
        let previous = combining.previous.map(|p| self.ops[self.view.lookup.place(p)].arrived);
        let tag = self.view.mine[at].0;
        let recv = |into, reduce| OpKind::Recv { from: t.src, lane: t.lane, tag, into, reduce };
        match combining.lands_in.map(|staged| self.homes.tile(Home::Staged(staged))) {
            None => {
                self.wait_for(previous);
                self.push(recv(into, combining.reduce), Moved::of(t));
            }
            Some(landing) => {
                self.push(recv(landing, false), Moved::of(t));
                self.wait_for(previous);
                self.add_behind(t, landing, into);
            }
        }
        if combining.then_own {
            let own = self.view.shards.source(&self.program, self.boxes, t.tensor, self.view.plan.region(t));
            self.add_behind(t, own.unwrap_or(TileId::NOWHERE), into);
        }
        debug_assert_eq!(self.num_ops(), self.ops[at].arrived + 1);
    }

    /// What is in `after`, touches the receiver, and is not seen by the sender.
    fn wait_before_recv(&mut self, t: &Transfer) {
        let (plan, rank) = (self.view.plan, self.view.rank);
        for &a in plan.after(t) {
            let named = &plan.transfers()[a.index()];
            if named.src == t.src || named.dst == t.src || (named.src != rank && named.dst != rank) {
                continue;
            }
            let ops = self.ops[self.view.lookup.place(a)];
            self.wait_for([if named.dst == rank { ops.arrived } else { ops.send }]);
        }
    }

    /// Adds what is in a tile of the receiver behind the op before.
    fn add_behind(&mut self, t: &Transfer, from: TileId, into: TileId) {
        self.wait_for([self.num_ops() - 1]);
        self.push(OpKind::Copy { from, into, reduce: true }, Moved::of(t));
    }

    /// Puts the receiver's own part of a sum where the others will be added, once the memory is free.
    fn emit_own_part(&mut self, at: usize, t: &Transfer, into: TileId) {
        let plan = self.view.plan;
        let took_over = match self.homes.into[at] {
            Home::Staged(staged) => self.homes.staged[staged as usize].took_over,
            _ => None,
        };
        for &a in plan.after(t).iter().filter(|_| took_over.is_some()) {
            let reads = plan.transfers()[a.index()].src == t.dst
                && self.homes.from[self.view.lookup.place(a)] == Home::Staged(took_over.unwrap_or_default());
            self.wait_for(reads.then(|| self.ops[self.view.lookup.place(a)].send));
        }
        let own = self.view.shards.source(&self.program, self.boxes, t.tensor, plan.region(t));
        let from = own.unwrap_or(TileId::NOWHERE);
        self.push(OpKind::Copy { from, into, reduce: false }, Moved::of(t));
    }
}

impl Moved {
    /// Of a word for a transfer.
    fn word(t: &Transfer) -> Self {
        Self { bytes: 0, ..Self::of(t) }
    }

    fn of(t: &Transfer) -> Self {
        Self { tensor: t.tensor, region: t.region, bytes: t.bytes }
    }
}
