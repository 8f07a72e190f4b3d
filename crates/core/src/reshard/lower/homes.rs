//! Where every transfer of a rank reads and writes, and how much memory that takes beside the tensors.
//!
//! A box that arrives at a rank that does not want it waits in a staging buffer. It lives from its receive to the last
//! send that reads it, and only the plan's own order lets another box have its memory: B takes over from A if B's
//! transfer names, in `after`, every transfer that reads A. Nothing depends on timing.
//!
//! ```text
//! r0 -> r1   box a        r1 stages a in buffer 0
//! r1 -> r2   box a        the only reader of a
//! r0 -> r1   box b        after: the line above, so b takes buffer 0 too; without it b would need a buffer of its own
//! ```
//!
//! A send reads what the transfers in its `after` brought, wherever that is; a box that lies in several places is put
//! together first. Parts of a sum are added in list order. A small one that has to wait for its turn lands in a buffer of
//! its own, so that the times they all travel do not add up too.

use rustc_hash::FxHashMap;

use crate::id::{Rank, RegionId, TransferId};
use crate::program::{BoxTable, Holds, RankProgram, Role, Tile, TileId};
use crate::region::{Region, Span};
use crate::reshard::plan::{Plan, Transfer};
use crate::reshard::shards::{AllSides, Sides};

use super::shards::ShardTiles;
use super::touching::Lookup;

/// Where a box is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Home {
    Tile(TileId),
    /// Index into [`Homes::staged`].
    Staged(u32),
    /// Of the other end's business.
    Elsewhere,
}

/// A box in staging memory.
#[derive(Debug, Clone, Copy)]
pub struct Staged {
    tensor: u32,
    region: RegionId,
    bytes: u64,
    /// Once it has memory.
    pub tile: TileId,
    /// The staged box whose memory it took over.
    pub took_over: Option<u32>,
    readers: u32,
    handed_on: bool,
}

/// How a receive of a partial sum goes about it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Combining {
    /// The receive into the same box before this one.
    pub previous: Option<TransferId>,
    /// The rank's own part has to be copied into the buffer first.
    pub copy_own: bool,
    pub reduce: bool,
    /// The rank's own part is added behind it.
    pub then_own: bool,
    /// The staged box that it lands in before its turn comes.
    pub lands_in: Option<u32>,
}

/// A part of a box that has to be put together before it can be sent.
#[derive(Debug, Clone)]
pub struct Piece {
    pub region: Region,
    pub from: Home,
    /// The transfer that brought it; none for what the rank held from the start.
    pub brought_by: Option<TransferId>,
}

/// Where each of a rank's transfers reads and writes, by their places in the rank's list.
pub struct Homes {
    pub from: Vec<Home>,
    pub into: Vec<Home>,
    pub staged: Vec<Staged>,
    /// Boxes that are put together out of several before they are sent; hardly ever any.
    pub assembled: FxHashMap<usize, Vec<Piece>>,
    /// By place; empty if no tensor is a partial sum.
    combining: Vec<Combining>,
}

/// Everything the decisions are made from.
#[derive(Clone, Copy)]
pub struct View<'a> {
    pub plan: &'a Plan,
    pub sides: &'a AllSides,
    pub rank: Rank,
    pub mine: &'a [TransferId],
    pub lookup: &'a Lookup,
    pub shards: &'a ShardTiles,
}

/// A part of a sum up to this size does not wait for its turn to be sent: it takes less time to send than to call for.
const LANDING_BYTES: u64 = 64 << 10;

impl Homes {
    pub fn assign(view: View<'_>, program: &mut RankProgram, boxes: &BoxTable) -> Self {
        let n = view.mine.len();
        let combining = if view.sides.any_partial() { vec![Combining::default(); n] } else { vec![] };
        let mut homes = Homes {
            from: vec![Home::Elsewhere; n],
            into: vec![Home::Elsewhere; n],
            staged: vec![],
            assembled: FxHashMap::default(),
            combining,
        };
        homes.assign_arrivals(view, program, boxes);
        for (at, t) in view.transfers().filter(|(_, t)| t.src == view.rank) {
            let source = homes.source_of(view, at, t, program, boxes);
            homes.from[at] = source;
            if let Home::Staged(staged) = source {
                homes.staged[staged as usize].readers += 1;
            }
        }
        if !homes.staged.is_empty() {
            homes.give_memory(view, program);
        }
        homes
    }

    pub fn combining(&self, at: usize) -> Combining {
        self.combining.get(at).copied().unwrap_or_default()
    }

    /// The tile of a box that has its memory.
    pub fn tile(&self, home: Home) -> TileId {
        match home {
            Home::Tile(tile) => tile,
            Home::Staged(staged) => self.staged[staged as usize].tile,
            Home::Elsewhere => TileId::NOWHERE,
        }
    }

    fn stage(&mut self, t: &Transfer) -> u32 {
        self.staged.push(Staged {
            tensor: t.tensor,
            region: t.region,
            bytes: t.bytes,
            tile: TileId::NOWHERE,
            took_over: None,
            readers: 0,
            handed_on: false,
        });
        self.staged.len() as u32 - 1
    }

    /// Memory that one box passes through; it is never handed on.
    fn stage_for_good(&mut self, t: &Transfer) -> u32 {
        let staged = self.stage(t);
        self.staged[staged as usize].handed_on = true;
        staged
    }

    /// Finds where transfers arrive.
    fn assign_arrivals(&mut self, view: View<'_>, program: &RankProgram, boxes: &BoxTable) {
        // The last receive into each box of a partial sum.
        let mut last: FxHashMap<(u32, &[Span]), TransferId> = FxHashMap::default();
        for (at, t) in view.transfers().filter(|(_, t)| t.dst == view.rank) {
            let (region, sides) = (view.plan.region(t), view.sides.tensor(t.tensor));
            let previous = match sides.src.is_partial() {
                true => last.insert((t.tensor, region.spans()), view.mine[at]),
                false => None,
            };
            self.into[at] = match previous {
                Some(previous) if t.reduce => self.into[view.lookup.place(previous)],
                _ => match view.shards.goal(program, boxes, t.tensor, region) {
                    Some(tile) => Home::Tile(tile),
                    None => Home::Staged(self.stage(t)),
                },
            };
            if sides.src.is_partial() {
                self.combining[at] = self.combine(view, at, t, sides, previous.filter(|_| t.reduce));
            }
        }
    }

    fn combine(
        &mut self,
        view: View<'_>,
        at: usize,
        t: &Transfer,
        sides: &Sides,
        previous: Option<TransferId>,
    ) -> Combining {
        let has_own = sides.src.contains(t.dst, view.plan.region(t));
        let adds_to_own = t.reduce && previous.is_none() && has_own;
        let reduce = t.reduce && (previous.is_some() || has_own);
        // In place, the own part is in the destination already.
        let there = view.shards.in_place() && matches!(self.into[at], Home::Tile(_));
        let waits = previous.is_some() && t.bytes <= LANDING_BYTES;
        let lands_in = waits.then(|| self.stage_for_good(t));
        let (copy_own, then_own) = (adds_to_own && !there, t.then_own && has_own);
        Combining { previous, copy_own, reduce, then_own, lands_in }
    }

    /// Where a send reads: what its `after` brought, or what the rank held from the start.
    fn source_of(
        &mut self,
        view: View<'_>,
        at: usize,
        t: &Transfer,
        program: &RankProgram,
        boxes: &BoxTable,
    ) -> Home {
        let (plan, region) = (view.plan, view.plan.region(t));
        let sides = view.sides.tensor(t.tensor);
        let partial = sides.src.is_partial();
        let brought: Vec<TransferId> =
            plan.after(t).iter().copied().filter(|a| brings(plan, *a, t)).collect();
        let own = view.shards.source(program, boxes, t.tensor, region);
        if let Some(tile) = own.filter(|_| !partial || brought.is_empty()) {
            return Home::Tile(tile);
        }
        let home = |a: TransferId| self.into[view.lookup.place(a)];
        let of = |a: TransferId| plan.region(&plan.transfers()[a.index()]);
        let whole = brought.iter().copied().filter(|a| of(*a).contains(region));
        // Best the very box, which can be followed as it arrives; else the last that has all of it.
        if let Some(a) = whole.max_by_key(|a| (of(*a) == region, *a)) {
            return home(a);
        }
        let in_goal = brought.iter().all(|a| matches!(home(*a), Home::Tile(_)));
        if let Some(tile) = view.shards.goal(program, boxes, t.tensor, region).filter(|_| in_goal) {
            return Home::Tile(tile);
        }
        let pieces = self.pieces(view, t, &brought, program, boxes);
        self.assemble(at, t, pieces)
    }

    /// What of a box is where: each element once.
    fn pieces(
        &self,
        view: View<'_>,
        t: &Transfer,
        brought: &[TransferId],
        program: &RankProgram,
        boxes: &BoxTable,
    ) -> Vec<Piece> {
        let (plan, region) = (view.plan, view.plan.region(t));
        let shards = &view.sides.tensor(t.tensor).src;
        let own = if shards.is_partial() { vec![] } else { shards.common(view.rank, region) };
        let own = own.into_iter().filter_map(|region| {
            let tile = view.shards.source(program, boxes, t.tensor, &region)?;
            Some(Piece { region, from: Home::Tile(tile), brought_by: None })
        });
        // What came last was added up last.
        let brought = brought.iter().rev().filter_map(|&a| {
            let common = plan.region(&plan.transfers()[a.index()]).intersect(region)?;
            Some(Piece { region: common, from: self.into[view.lookup.place(a)], brought_by: Some(a) })
        });
        let mut left = vec![region.clone()];
        let mut pieces = vec![];
        for piece in own.chain(brought) {
            let taken: Vec<Region> = left.iter().filter_map(|l| l.intersect(&piece.region)).collect();
            left = left.iter().flat_map(|l| l.subtract(&piece.region)).collect();
            pieces.extend(taken.into_iter().map(|region| Piece { region, ..piece.clone() }));
        }
        pieces
    }

    fn assemble(&mut self, at: usize, t: &Transfer, pieces: Vec<Piece>) -> Home {
        for piece in &pieces {
            if let Home::Staged(staged) = piece.from {
                // Read by a copy, which no `after` can name: its memory is never handed on.
                self.staged[staged as usize].handed_on = true;
            }
        }
        self.assembled.insert(at, pieces);
        Home::Staged(self.stage_for_good(t))
    }

    /// Gives every staged box memory, in list order: that of a box it may take over from, or new.
    fn give_memory(&mut self, view: View<'_>, program: &mut RankProgram) {
        // How many readers of each staged box the transfer at hand names, and which transfer that was.
        let mut named: Vec<(usize, u32)> = vec![(usize::MAX, 0); self.staged.len()];
        for (at, t) in view.transfers() {
            if self.assembled.contains_key(&at) {
                self.give(self.from[at], None, program);
            }
            if t.dst != view.rank {
                continue;
            }
            if let Some(landing) = self.combining(at).lands_in {
                self.give(Home::Staged(landing), None, program);
            }
            let Home::Staged(staged) = self.into[at] else { continue };
            if self.staged[staged as usize].tile == TileId::NOWHERE {
                let old = self.successor_of(view, at, t, &mut named, program);
                self.give(self.into[at], old, program);
            }
        }
    }

    /// The staged box whose memory fits best among those that the transfer may take over from.
    fn successor_of(
        &self,
        view: View<'_>,
        at: usize,
        t: &Transfer,
        named: &mut [(usize, u32)],
        program: &RankProgram,
    ) -> Option<u32> {
        let mut best: Option<(bool, u64, u32)> = None;
        for a in view.plan.after(t) {
            if view.plan.transfers()[a.index()].src != view.rank {
                continue;
            }
            let Home::Staged(old) = self.from[view.lookup.place(*a)] else { continue };
            let candidate = &self.staged[old as usize];
            if candidate.tile == TileId::NOWHERE {
                continue;
            }
            let count = &mut named[old as usize];
            *count = if count.0 == at { (at, count.1 + 1) } else { (at, 1) };
            if candidate.handed_on || count.1 != candidate.readers {
                continue;
            }
            let size = program.buffers[program.tile(candidate.tile).buffer as usize].bytes;
            // Just large enough, else the largest there is.
            let enough = size >= t.bytes;
            best = best.max(Some((enough, if enough { u64::MAX - size } else { size }, old)));
        }
        best.map(|(_, _, old)| old)
    }

    fn give(&mut self, home: Home, old: Option<u32>, program: &mut RankProgram) {
        let Home::Staged(index) = home else { return };
        let buffer = match old {
            Some(old) => {
                self.staged[old as usize].handed_on = true;
                program.tile(self.staged[old as usize].tile).buffer
            }
            None => program.add_buffer(0, Role::Staging),
        };
        let staged = &mut self.staged[index as usize];
        let bytes = &mut program.buffers[buffer as usize].bytes;
        *bytes = (*bytes).max(staged.bytes);
        let Staged { tensor, region, .. } = *staged;
        let tile = Tile { tensor, region, buffer, offset: 0, strides: None, holds: Holds::Transit };
        staged.tile = program.add_tile(tile);
        staged.took_over = old;
    }
}

impl<'a> View<'a> {
    /// The rank's transfers with their places in its list.
    pub fn transfers(self) -> impl Iterator<Item = (usize, &'a Transfer)> {
        self.mine.iter().map(move |id| &self.plan.transfers()[id.index()]).enumerate()
    }
}

/// Whether `a` brought the sender some of what `t` sends.
fn brings(plan: &Plan, a: TransferId, t: &Transfer) -> bool {
    let a = &plan.transfers()[a.index()];
    a.dst == t.src && a.tensor == t.tensor && plan.region(a).overlaps(plan.region(t))
}
