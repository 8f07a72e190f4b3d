//! The program: for every rank the ops it performs, with buffers, tags and dependencies.
//!
//! Resharding, collectives and pipeline steps all lower to this. It means something by itself, without the plan it came
//! from: it has its own tensors, boxes and buffers. What lies where is said by *tiles*: a tile is a box of a tensor at an
//! offset of a buffer. Ops read and write boxes inside tiles.
//!
//! ```text
//! r2   buffer 0   1 MiB   source          tile 0   tensor 0 [0:512, 0:512]  at 0       its shard, from the start
//!      buffer 1   2 MiB   destination     tile 1   tensor 0 [0:1024, 0:512] at 0       a goal: must hold whole values
//!      buffer 2   256 KiB staging         tile 2   tensor 0 [512:640, 0:512] at 0      one after the other in one
//!                                         tile 3   tensor 0 [640:768, 0:512] at 0      buffer: tiles alias
//!      op 0   copy  [0:512, 0:512]    tile 0 -> tile 1
//!      op 1   recv  [512:640, 0:512]  tag 4 from r0 -> tile 2
//! ```
//!
//! The simulator and the engine interpret it:
//! - an op starts once everything in its `deps` allows it; a rank's ops are otherwise unordered, but for this:
//! - sends to one peer in one lane, and receives from one, take place in program order (a channel is first in, first
//!   out);
//! - a send and the receive of its tag move the same box. Nothing may rest on when a send completes beyond this: its
//!   bytes have been read. An engine may buffer them, or hold the sender until they have arrived.
//!
//! [`crate::verify`] proves programs right; [`doc`] writes and reads them.

pub mod doc;
pub mod messages;
pub mod posting;
mod show;

use std::ops::Range;
use std::sync::Arc;

use crate::dtype::DType;
use crate::id::{Rank, RegionId};
use crate::layout::ReduceOp;
use crate::region::Region;

/// All ranks' programs, by rank.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Program {
    /// How much of a receive has to arrive before a streaming dependent may use it.
    pub chunk_bytes: u64,
    pub tensors: Vec<Tensor>,
    pub boxes: BoxTable,
    pub ranks: Vec<RankProgram>,
}

/// What is moved. Each tensor has one value: where the same activations cross once a microbatch, those are as many tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    pub name: Arc<str>,
    pub dtype: DType,
    pub shape: Arc<[u64]>,
    /// Where sources hold parts that have to be combined.
    pub partial: Option<Parts>,
}

/// How many parts a value is combined from, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Parts {
    pub op: ReduceOp,
    pub count: u32,
}

/// Boxes by id. Those of a plan are shared with it.
#[derive(Debug, Clone, Default)]
pub struct BoxTable {
    shared: Arc<Vec<Region>>,
    own: Vec<Region>,
}

impl BoxTable {
    pub fn sharing(shared: Arc<Vec<Region>>) -> Self {
        Self { shared, own: vec![] }
    }

    pub fn len(&self) -> usize {
        self.shared.len() + self.own.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn push(&mut self, region: Region) -> RegionId {
        self.own.push(region);
        RegionId::at(self.len() - 1)
    }

    /// Forgets all boxes but those that are shared.
    pub(crate) fn forget_own(&mut self) {
        self.own.clear();
    }

    pub fn get(&self, id: RegionId) -> Option<&Region> {
        match self.shared.get(id.index()) {
            Some(region) => Some(region),
            None => self.own.get(id.index() - self.shared.len()),
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = &Region> {
        self.shared.iter().chain(&self.own)
    }
}

impl PartialEq for BoxTable {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl std::ops::Index<RegionId> for BoxTable {
    type Output = Region;

    fn index(&self, id: RegionId) -> &Region {
        self.get(id).expect("the table has this box")
    }
}

/// One rank's ops and memory.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RankProgram {
    pub ops: Vec<Op>,
    /// The dependencies of all ops, one behind the other; see [`RankProgram::deps`].
    pub deps: Vec<Dep>,
    pub buffers: Vec<Buffer>,
    pub tiles: Vec<Tile>,
    /// The tiles that compute ops touch, one list behind the other.
    pub touched: Vec<TileId>,
}

impl RankProgram {
    pub fn deps(&self, op: &Op) -> &[Dep] {
        &self.deps[op.deps.start as usize..op.deps.end as usize]
    }

    /// Has nothing to do and holds nothing.
    pub fn is_idle(&self) -> bool {
        self.ops.is_empty() && self.buffers.is_empty()
    }

    pub fn tile(&self, id: TileId) -> &Tile {
        &self.tiles[id.index()]
    }

    /// The tiles of a list in [`RankProgram::touched`].
    pub fn touched(&self, list: List) -> &[TileId] {
        &self.touched[list.start as usize..][..list.len as usize]
    }

    /// Adds a list of tiles for a compute op.
    pub fn touch(&mut self, tiles: impl IntoIterator<Item = TileId>) -> List {
        let start = self.touched.len() as u32;
        self.touched.extend(tiles);
        List { start, len: self.touched.len() as u32 - start }
    }

    /// Memory beside the tensors.
    pub fn extra_bytes(&self) -> u64 {
        self.buffers.iter().filter(|b| b.role == Role::Staging).map(|b| b.bytes).sum()
    }

    /// Adds a buffer, and returns its place.
    pub fn add_buffer(&mut self, bytes: u64, role: Role) -> u32 {
        self.buffers.push(Buffer { bytes, role, memory: MemoryKind::Host });
        self.buffers.len() as u32 - 1
    }

    pub fn add_tile(&mut self, tile: Tile) -> TileId {
        self.tiles.push(tile);
        TileId::at(self.tiles.len() - 1)
    }

    /// Adds an op behind the others, and returns its place.
    pub fn push(&mut self, kind: OpKind, what: Moved, deps: &[Dep]) -> u32 {
        let first = self.deps.len() as u32;
        self.deps.extend_from_slice(deps);
        let Moved { tensor, region, bytes } = what;
        self.ops.push(Op { kind, tensor, region, bytes, deps: first..first + deps.len() as u32 });
        self.ops.len() as u32 - 1
    }
}

/// What an op moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moved {
    pub tensor: u32,
    pub region: RegionId,
    pub bytes: u64,
}

/// What an op waits for: another op of the same rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dep {
    pub op: u32,
    pub kind: DepKind,
}

impl Dep {
    pub fn done(op: u32) -> Self {
        Self { op, kind: DepKind::Done }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DepKind {
    /// Wait for its end.
    Done,
    /// Follow it, a chunk behind. Both ops move the same box.
    Stream,
}

/// Memory that a rank has while its program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer {
    pub bytes: u64,
    pub role: Role,
    pub memory: MemoryKind,
}

/// Whose memory it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// The caller's, of this tensor's source.
    Source(u32),
    /// The caller's, of this tensor's destination.
    Destination(u32),
    /// The caller's, of this tensor's source and destination: the program runs in place.
    InPlace(u32),
    /// Memory of tensors that passes make and need, used by turns.
    Crossing,
    /// Beside the tensors: what only passes through.
    Staging,
}

/// Where memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum MemoryKind {
    #[default]
    Host,
}

/// A tile's place among its rank's tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TileId(pub u32);

impl TileId {
    /// Of an op that moves no bytes.
    pub const NOWHERE: TileId = TileId(u32::MAX);

    pub fn at(index: usize) -> Self {
        Self(u32::try_from(index).expect("a rank has fewer than 2^32 tiles"))
    }

    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A box of a tensor, and where it lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tile {
    pub tensor: u32,
    pub region: RegionId,
    pub buffer: u32,
    /// Bytes from the buffer's start to the box's first element.
    pub offset: u64,
    /// Bytes from an element to the next in each dim; none where the box lies row by row without gaps.
    pub strides: Option<Arc<[u64]>>,
    pub holds: Holds,
}

/// What a tile holds before any op has run, and after all have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Holds {
    /// Nothing, and whatever.
    Transit,
    /// From the start, this part of the tensor; part 0 where values are whole.
    Source(u32),
    /// At the end, whole values.
    Goal,
    /// Once a compute op has made it, this part of the tensor.
    Made(u32),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Op {
    pub kind: OpKind,
    /// Index into [`Program::tensors`].
    pub tensor: u32,
    pub region: RegionId,
    pub bytes: u64,
    pub deps: Range<u32>,
}

impl Op {
    /// The tiles that it reads from and writes to, if it moves bytes. Those of compute ops are in their lists.
    pub fn ends(&self) -> (Option<TileId>, Option<TileId>) {
        let (from, into) = match self.kind {
            OpKind::Send { from, .. } => (Some(from), None),
            OpKind::Recv { into, .. } => (None, Some(into)),
            OpKind::Copy { from, into, .. } => (Some(from), Some(into)),
            OpKind::Compute { .. } => (None, None),
        };
        let somewhere = |tile: &TileId| *tile != TileId::NOWHERE;
        (from.filter(somewhere), into.filter(somewhere))
    }

    /// The message it is an end of.
    pub fn tag(&self) -> Option<u32> {
        match self.kind {
            OpKind::Send { tag, .. } | OpKind::Recv { tag, .. } => Some(tag),
            OpKind::Copy { .. } | OpKind::Compute { .. } => None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpKind {
    Send {
        to: Rank,
        lane: u32,
        tag: u32,
        weight: u64,
        from: TileId,
    },
    /// With `reduce`, what arrives is combined with what is there.
    Recv {
        from: Rank,
        lane: u32,
        tag: u32,
        into: TileId,
        reduce: bool,
    },
    /// Inside the rank's own memory. With `reduce`, combined with what is there.
    Copy {
        from: TileId,
        into: TileId,
        reduce: bool,
    },
    /// A part of a pass on the rank's device: `pass` is for whoever computes to know, `nanos` is how long it is
    /// thought to take. A device does one thing at a time, so each waits for the one before it. It reads the tiles
    /// `needs` and writes the tiles `makes`, lists in [`RankProgram::touched`].
    Compute {
        pass: u32,
        nanos: u64,
        needs: List,
        makes: List,
    },
}

/// A part of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct List {
    pub start: u32,
    pub len: u32,
}
