//! Where every transfer reads and writes, and how much memory that takes beside the tensors.
//!
//! A box that arrives at a rank that does not want it waits in a staging buffer. It lives from its receive to the last
//! send that reads it, and only the plan's own order lets another box have its memory: B takes over from A if B's
//! transfer names, in `after`, every transfer that reads A. Nothing depends on timing.
//!
//! ```text
//! r0 -> r1   box a        r1 stages a in slot 0
//! r1 -> r2   box a        the only reader of a
//! r0 -> r1   box b        after: the line above, so b takes slot 0 too; without it b would need slot 1
//! ```
//!
//! Parts of a sum are added in list order. A small one that has to wait for its turn lands in a buffer of its own, so
//! that the times they all travel do not add up too.

use rustc_hash::FxHashMap;

use crate::id::{Rank, TransferId};
use crate::program::Buffer;
use crate::region::{Region, Span};

use super::super::plan::{Plan, Transfer};
use super::super::shards::AllSides;

/// A box in staging memory.
#[derive(Debug, Clone, Copy)]
pub struct Staged {
    pub bytes: u64,
    /// Index into the rank's staging buffers.
    pub slot: u32,
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
    /// The rank's own part has to be in the buffer first.
    pub copy_own: bool,
    pub reduce: bool,
    /// The rank's own part is added behind it.
    pub then_own: bool,
    /// The staged box that it lands in before its turn comes.
    pub lands_in: Option<u32>,
}

/// A part of a box that has to be put together before it can be sent.
#[derive(Debug, Clone)]
pub struct Part {
    pub region: Region,
    pub from: Buffer,
    /// The transfer that brought it; none for what the rank held from the start.
    pub brought_by: Option<TransferId>,
}

/// The buffers of every transfer. In here, `Buffer::Stage` is an index into `staged`.
pub struct Buffers {
    pub from: Vec<Buffer>,
    pub into: Vec<Buffer>,
    pub staged: Vec<Staged>,
    /// By rank: the sizes of its slots.
    pub slots: Vec<Vec<u64>>,
    /// Boxes that are put together out of several before they are sent; hardly ever any.
    pub assembled: FxHashMap<TransferId, Vec<Part>>,
    /// By rank: how many sends and receives of transfers it has.
    pub num_ends: Vec<u32>,
    /// By transfer; empty if no tensor is a partial sum.
    combining: Vec<Combining>,
}

/// A part of a sum up to this size does not wait for its turn to be sent: it takes less time to send than to call for.
const LANDING_BYTES: u64 = 64 << 10;

/// No transfer yet.
const NOBODY: u32 = u32::MAX;

impl Buffers {
    pub fn assign(plan: &Plan, all_sides: &AllSides) -> Self {
        let n = plan.transfers().len();
        let mut buffers = Buffers {
            from: vec![Buffer::Src; n],
            into: vec![Buffer::Dst; n],
            staged: vec![],
            slots: vec![vec![]; plan.problem.topology.num_ranks()],
            assembled: FxHashMap::default(),
            num_ends: vec![0; plan.problem.topology.num_ranks()],
            combining: vec![],
        };
        if all_sides.any_partial() {
            buffers.combining = vec![Combining::default(); n];
        }
        for id in buffers.assign_shards(plan, all_sides) {
            let source = buffers.source_of(plan, all_sides, id, &plan.transfers()[id.index()]);
            buffers.from[id.index()] = source;
            if let Buffer::Stage(staged) = source {
                buffers.staged[staged as usize].readers += 1;
            }
        }
        if !buffers.staged.is_empty() {
            buffers.assign_slots(plan);
        }
        buffers
    }

    pub fn combining(&self, id: TransferId) -> Combining {
        self.combining.get(id.index()).copied().unwrap_or_default()
    }

    /// The buffer as the program names it: staged boxes by their slot.
    pub fn in_program(&self, buffer: Buffer) -> Buffer {
        match buffer {
            Buffer::Stage(staged) => Buffer::Stage(self.staged[staged as usize].slot),
            other => other,
        }
    }

    fn stage(&mut self, bytes: u64) -> Buffer {
        let staged = Staged { bytes, slot: 0, took_over: None, readers: 0, handed_on: false };
        self.staged.push(staged);
        Buffer::Stage(self.staged.len() as u32 - 1)
    }

    /// A buffer that one box passes through; its memory is never handed on.
    fn land(&mut self, bytes: u64) -> u32 {
        self.stage(bytes);
        self.staged.last_mut().expect("just staged").handed_on = true;
        self.staged.len() as u32 - 1
    }

    /// Finds where transfers arrive, and the source of those who read from a shard. Answers the others, whose source
    /// depends on where something arrived.
    fn assign_shards(&mut self, plan: &Plan, all_sides: &AllSides) -> Vec<TransferId> {
        let mut others = Vec::new();
        // The last receive into each box of a partial sum.
        let mut boxes: FxHashMap<(u32, Rank, &[Span]), TransferId> = FxHashMap::default();
        for (i, t) in plan.transfers().iter().enumerate() {
            let (id, region, sides) = (TransferId::at(i), plan.region(t), all_sides.tensor(t.tensor));
            self.num_ends[t.src.index()] += 1;
            self.num_ends[t.dst.index()] += 1;
            let previous = match sides.src.is_partial() {
                true => boxes.insert((t.tensor, t.dst, region.spans()), id),
                false => None,
            };
            self.into[i] = match previous {
                Some(previous) if t.reduce => self.into[previous.index()],
                _ if sides.dst.contains(t.dst, region) => Buffer::Dst,
                _ => self.stage(t.bytes),
            };
            if sides.src.is_partial() {
                let copy_own = t.reduce && previous.is_none() && sides.src.contains(t.dst, region);
                let reduce = t.reduce && (previous.is_some() || copy_own);
                let previous = previous.filter(|_| t.reduce);
                let then_own = t.then_own && sides.src.contains(t.dst, region);
                let waits = previous.is_some() && t.bytes <= LANDING_BYTES;
                let lands_in = waits.then(|| self.land(t.bytes));
                self.combining[i] = Combining { previous, copy_own, reduce, then_own, lands_in };
                others.push(id);
            } else if !sides.src.contains(t.src, region) {
                match sides.dst.contains(t.src, region) {
                    true => self.from[i] = Buffer::Dst,
                    false => others.push(id),
                }
            }
        }
        others
    }

    fn source_of(&mut self, plan: &Plan, all_sides: &AllSides, id: TransferId, t: &Transfer) -> Buffer {
        let (region, sides) = (plan.region(t), all_sides.tensor(t.tensor));
        let mut brought = plan.after(t).iter().filter(|a| {
            let a = &plan.transfers()[a.index()];
            a.dst == t.src && a.tensor == t.tensor && plan.region(a).overlaps(region)
        });
        let bare = !sides.src.is_partial() || brought.clone().next().is_none();
        if bare && sides.src.contains(t.src, region) {
            return Buffer::Src;
        }
        if sides.dst.contains(t.src, region) {
            return Buffer::Dst;
        }
        let brings_all = |a: &&TransferId| plan.region(&plan.transfers()[a.index()]).contains(region);
        match brought.clone().filter(brings_all).max() {
            Some(whole) => self.into[whole.index()],
            None => {
                let mut parts = Vec::new();
                if !sides.src.is_partial() {
                    let own = sides.src.common(t.src, region).into_iter();
                    parts.extend(own.map(|region| Part { region, from: Buffer::Src, brought_by: None }));
                }
                for a in brought.by_ref() {
                    let common = plan.region(&plan.transfers()[a.index()]).intersect(region);
                    let from = self.into[a.index()];
                    parts.extend(common.map(|region| Part { region, from, brought_by: Some(*a) }));
                }
                self.assemble(id, t.bytes, parts)
            }
        }
    }

    fn assemble(&mut self, id: TransferId, bytes: u64, parts: Vec<Part>) -> Buffer {
        for part in &parts {
            if let Buffer::Stage(staged) = part.from {
                // Read by a copy, which no `after` can name: its memory is never handed on.
                self.staged[staged as usize].handed_on = true;
            }
        }
        self.assembled.insert(id, parts);
        let buffer = self.stage(bytes);
        self.staged.last_mut().expect("just staged").handed_on = true;
        buffer
    }

    /// Gives every staged box a slot, in list order: that of a box it may take over from, or a new one.
    fn assign_slots(&mut self, plan: &Plan) {
        let mut has_slot = vec![false; self.staged.len()];
        // How many readers of each staged box the transfer at hand names, and which transfer that was.
        let mut named: Vec<(u32, u32)> = vec![(NOBODY, 0); self.staged.len()];
        for (i, t) in plan.transfers().iter().enumerate() {
            if self.assembled.contains_key(&TransferId::at(i)) {
                self.give_slot(t.src, self.from[i], None, &mut has_slot);
            }
            if let Some(landing) = self.combining(TransferId::at(i)).lands_in {
                self.give_slot(t.dst, Buffer::Stage(landing), None, &mut has_slot);
            }
            let Buffer::Stage(staged) = self.into[i] else { continue };
            if has_slot[staged as usize] {
                continue;
            }
            let mut best: Option<(bool, u64, u32)> = None;
            for a in plan.after(t) {
                let Buffer::Stage(old) = self.from[a.index()] else { continue };
                if plan.transfers()[a.index()].src != t.dst || !has_slot[old as usize] {
                    continue;
                }
                let count = &mut named[old as usize];
                *count = if count.0 == i as u32 { (count.0, count.1 + 1) } else { (i as u32, 1) };
                let candidate = self.staged[old as usize];
                if candidate.handed_on || count.1 != candidate.readers {
                    continue;
                }
                best = best.max(Some(self.fit(t, old)));
            }
            self.give_slot(t.dst, self.into[i], best.map(|(_, _, old)| old), &mut has_slot);
        }
    }

    /// How well a box fits into the memory of another, the best the largest: a slot just large enough, else the
    /// largest there is.
    fn fit(&self, t: &Transfer, old: u32) -> (bool, u64, u32) {
        let size = self.slots[t.dst.index()][self.staged[old as usize].slot as usize];
        let enough = size >= t.bytes;
        (enough, if enough { u64::MAX - size } else { size }, old)
    }

    fn give_slot(&mut self, rank: Rank, buffer: Buffer, old: Option<u32>, has_slot: &mut [bool]) {
        let Buffer::Stage(staged) = buffer else { return };
        let slots = &mut self.slots[rank.index()];
        let bytes = self.staged[staged as usize].bytes;
        let slot = match old {
            Some(old) => {
                self.staged[old as usize].handed_on = true;
                self.staged[old as usize].slot
            }
            None => {
                slots.push(0);
                slots.len() as u32 - 1
            }
        };
        slots[slot as usize] = slots[slot as usize].max(bytes);
        self.staged[staged as usize].slot = slot;
        self.staged[staged as usize].took_over = old;
        has_slot[staged as usize] = true;
    }
}
