//! A rank's memory: its shards of every tensor, and the staging buffers of its program, in one mapping.
//!
//! ```text
//! | src of tensor 0: box, box | dst of tensor 0 | src of tensor 1 | ... | stage 0 | stage 1 |
//! ```
//!
//! A shard is the list of its boxes, row-major each, in the order `Layout::shard_at` gives. A staging buffer holds one
//! box at a time: that of the receive that fills it or, where copies fill it, that of the send that reads it.

#![allow(unsafe_code)]

use std::io;
use std::sync::Arc;

use crossmesh_core::id::{Rank, RegionId};
use crossmesh_core::program::{Buffer, Op, OpKind, Program, RankProgram};
use crossmesh_core::region::Region;
use crossmesh_core::reshard::{Placed, Plan};
use crossmesh_core::units::Bytes;

use crate::collectives::Element;
use crate::memory::{Memory, Place};
use crate::view::View;

/// Boxes start at multiples of this: a cache line.
pub(crate) const ALIGN: u64 = 64;

/// Who may map a rank's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    Private,
    /// The processes of the host that it is handed to.
    Host,
}

/// A box of a shard, and where it starts.
#[derive(Debug, Clone)]
pub struct HeldBox {
    pub region: Region,
    pub base: u64,
}

/// See the module. Staging buffers are in `memory`; so are the shards, unless they lie in memory of their own.
#[derive(Debug, Clone)]
pub struct RankBuffers {
    pub memory: Arc<Memory>,
    pub(crate) src_memory: Arc<Memory>,
    pub(crate) dst_memory: Arc<Memory>,
    /// By tensor.
    pub src: Vec<Vec<HeldBox>>,
    pub dst: Vec<Vec<HeldBox>>,
    pub(crate) stages: Vec<u64>,
    pub(crate) tensor_bytes: u64,
}

/// Where an op reads and writes. A send has no `into`, a receive no `from`.
#[derive(Debug, Clone)]
pub struct OpPlaces {
    pub from: Option<Place>,
    pub into: Option<Place>,
}

impl RankBuffers {
    pub fn allocate(plan: &Plan, program: &RankProgram, rank: Rank, sharing: Sharing) -> io::Result<Self> {
        Self::lay_out(plan, program, rank, sharing, None)
    }

    /// For a plan that sends on what `came`: its sources are where that arrived.
    pub fn sending_on(
        came: &Self,
        plan: &Plan,
        program: &RankProgram,
        rank: Rank,
        sharing: Sharing,
    ) -> io::Result<Self> {
        Self::lay_out(plan, program, rank, sharing, Some(came))
    }

    fn lay_out(
        plan: &Plan,
        program: &RankProgram,
        rank: Rank,
        sharing: Sharing,
        came: Option<&Self>,
    ) -> io::Result<Self> {
        let (mut next, mut tensor_bytes) = (0, 0);
        let mut take = |bytes: u64| {
            let base = next;
            next = (base + bytes).next_multiple_of(ALIGN);
            base
        };
        let mut shard = |placed: &Placed| -> Vec<HeldBox> {
            let element = placed.layout.dtype().bytes();
            let boxes = shard_of(placed, rank).into_iter();
            let held = |region: Region| {
                let bytes = region.volume() * element;
                tensor_bytes += bytes;
                HeldBox { base: take(bytes), region }
            };
            boxes.map(held).collect()
        };
        let reshards = &plan.problem.reshards;
        let src = match came {
            Some(came) => came.dst.clone(),
            None => reshards.iter().map(|r| shard(&r.src)).collect(),
        };
        let dst = reshards.iter().map(|r| shard(&r.dst)).collect();
        let stages = program.stages.iter().map(|bytes| take(*bytes)).collect();
        let memory = match sharing {
            Sharing::Private => Memory::private(next)?,
            Sharing::Host => Memory::shared(next).map_err(|cause| cannot_share(next, &cause))?,
        };
        let memory = Arc::new(memory);
        let src_memory = came.map_or(&memory, |came| &came.dst_memory).clone();
        let dst_memory = memory.clone();
        Ok(Self { memory, src_memory, dst_memory, src, dst, stages, tensor_bytes })
    }

    /// Writes this rank's shard of a tensor's source.
    ///
    /// # Panics
    /// While a program runs on it.
    pub fn write_source<T: Element>(&self, tensor: usize, shard: &[T]) {
        let _owned = self.src_memory.own().expect("no program runs on the memory");
        // SAFETY: nobody else has the memory.
        unsafe { self.write_source_of_pass(tensor, shard) }
    }

    /// Reads this rank's shard of a tensor's destination.
    ///
    /// # Panics
    /// While a program runs on it.
    pub fn read_destination<T: Element>(&self, tensor: usize, shard: &mut [T]) {
        let _owned = self.dst_memory.own().expect("no program runs on the memory");
        // SAFETY: nobody else has the memory.
        unsafe { self.read_destination_of_pass(tensor, shard) }
    }

    /// The same beside a program that runs.
    ///
    /// # Safety
    /// Nobody else touches the shard meanwhile, as of a pass that makes it: what sends it waits for the pass.
    pub(crate) unsafe fn write_source_of_pass<T: Element>(&self, tensor: usize, mut shard: &[T]) {
        for held in &self.src[tensor] {
            let (head, rest) = shard.split_at(held.region.volume() as usize);
            // SAFETY: the caller says so.
            unsafe { self.src_memory.elements_mut(held.base, head.len()) }.copy_from_slice(head);
            shard = rest;
        }
        assert!(shard.is_empty(), "a shard is as large as its boxes");
    }

    /// The same beside a program that runs.
    ///
    /// # Safety
    /// Nobody writes to the shard meanwhile, as of a pass that needs it: what overwrites it waits for the pass.
    pub(crate) unsafe fn read_destination_of_pass<T: Element>(&self, tensor: usize, mut shard: &mut [T]) {
        for held in &self.dst[tensor] {
            let (head, rest) = shard.split_at_mut(held.region.volume() as usize);
            // SAFETY: the caller says so.
            head.copy_from_slice(unsafe { self.dst_memory.elements(held.base, head.len()) });
            shard = rest;
        }
        assert!(shard.is_empty(), "a shard is as large as its boxes");
    }

    /// What its shards hold, without staging buffers.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensor_bytes
    }

    /// The places of every op, or the op that has none and why.
    pub fn places(
        &self,
        plan: &Plan,
        program: &Program,
        rank: Rank,
    ) -> Result<Vec<OpPlaces>, (u32, &'static str)> {
        let boxes = Boxes { plan, program };
        let ops = &program.ranks[rank.index()];
        let staged = boxes.staged(ops);
        let resolve = |(i, op): (u32, &Op)| {
            let (from, into) = ends(op);
            let place = |buffer: Option<Buffer>| {
                buffer.map(|b| self.place(&boxes, op, b, staged[i as usize])).transpose()
            };
            Ok(OpPlaces { from: place(from).map_err(|e| (i, e))?, into: place(into).map_err(|e| (i, e))? })
        };
        let mut places = Vec::with_capacity(ops.ops.len());
        for op in (0..).zip(&ops.ops) {
            places.push(resolve(op)?);
        }
        Ok(places)
    }

    fn place(
        &self,
        boxes: &Boxes<'_>,
        op: &Op,
        buffer: Buffer,
        staged: Option<RegionId>,
    ) -> Result<Place, &'static str> {
        let memory = match buffer {
            Buffer::Src => &self.src_memory,
            Buffer::Dst => &self.dst_memory,
            Buffer::Stage(_) => &self.memory,
        };
        let memory = memory.clone();
        if op.bytes == 0 {
            return Ok(Place { memory, view: View::empty() });
        }
        let region = boxes.region(op.region);
        let element = boxes.plan.problem.reshards[op.tensor as usize].src.layout.dtype().bytes();
        let shard =
            |held: &[HeldBox]| held.iter().find_map(|b| View::of_box(b.base, &b.region, region, element));
        let view = match buffer {
            Buffer::Src => shard(&self.src[op.tensor as usize]),
            Buffer::Dst => shard(&self.dst[op.tensor as usize]),
            Buffer::Stage(slot) => {
                let held = boxes.region(staged.ok_or("nothing says what its staging buffer holds")?);
                View::of_box(self.stages[slot as usize], held, region, element)
            }
        };
        let view = view.ok_or("its box does not lie in its buffer")?;
        match view.bytes() == op.bytes && view.end() <= memory.len() {
            true => Ok(Place { memory, view }),
            false => Err("its bytes are not those of its box"),
        }
    }
}

fn cannot_share(bytes: u64, cause: &io::Error) -> io::Error {
    let hint = "its tensors and staging buffers lie there; run fewer ranks on the host, or raise its limits";
    io::Error::new(cause.kind(), format!("no {} of shared memory: {cause}\nhint: {hint}", Bytes(bytes)))
}

/// The boxes that a rank holds under a layout.
pub fn shard_of(placed: &Placed, rank: Rank) -> Vec<Region> {
    match placed.ranks.iter().position(|r| *r == rank) {
        Some(position) => {
            let boxes = placed.layout.shard_at(&placed.layout.mesh().coord(position));
            boxes.into_iter().filter(|b| !b.is_empty()).collect()
        }
        None => vec![],
    }
}

/// What an op reads and what it writes.
fn ends(op: &Op) -> (Option<Buffer>, Option<Buffer>) {
    match op.kind {
        OpKind::Send { from, .. } => (Some(from), None),
        OpKind::Recv { into, .. } => (None, Some(into)),
        OpKind::Copy { from, into, .. } => (Some(from), Some(into)),
        OpKind::Compute { .. } => (None, None),
    }
}

struct Boxes<'a> {
    plan: &'a Plan,
    program: &'a Program,
}

impl Boxes<'_> {
    fn region(&self, id: RegionId) -> &Region {
        let regions = self.plan.regions();
        regions.get(id.index()).unwrap_or_else(|| &self.program.copied[id.index() - regions.len()])
    }

    /// For every op that touches a staging buffer, the box that the buffer holds then.
    ///
    /// A reader waits for what fills the buffer. A copy that fills one is waited for by the send of the whole box, or
    /// by the receive that adds to it.
    fn staged(&self, ops: &RankProgram) -> Vec<Option<RegionId>> {
        let mut held: Vec<Option<RegionId>> = vec![None; ops.ops.len()];
        for (i, op) in ops.ops.iter().enumerate() {
            let (from, into) = ends(op);
            let staged = [from, into].into_iter().flatten().find(|b| matches!(b, Buffer::Stage(_)));
            let Some(buffer) = staged else { continue };
            if matches!(op.kind, OpKind::Recv { .. } | OpKind::Copy { reduce: true, .. }) {
                held[i] = Some(op.region);
            }
            for dep in ops.deps(op) {
                let filler = &ops.ops[dep.op as usize];
                let fills = ends(filler).1 == Some(buffer) && filler.tensor == op.tensor && filler.bytes > 0;
                let brings = matches!(filler.kind, OpKind::Recv { .. } | OpKind::Copy { reduce: true, .. });
                if fills && brings && from == Some(buffer) {
                    held[i] = Some(filler.region);
                } else if fills && !brings {
                    held[i] = held[i].or(Some(op.region));
                    held[dep.op as usize] = Some(op.region);
                }
            }
        }
        held
    }
}
