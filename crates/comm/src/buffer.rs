//! A rank's memory: the buffers of its program, in one mapping or wherever their owner has them.
//!
//! ```text
//! | buffer 0: source of tensor 0 | buffer 1: its destination | ... | staging |
//! ```
//!
//! The program says which box lies where in which buffer (its tiles), and was proven: every op has a place for what it reads
//! and writes.

#![allow(unsafe_code)]

use std::io;
use std::sync::Arc;

use crossmesh_core::program::{Holds, Op, OpKind, Role, Tile, TileId};
use crossmesh_core::region::Region;
use crossmesh_core::units::Bytes;
use crossmesh_core::verify::VerifiedRank;

use crate::collectives::Element;
use crate::memory::{Memory, Place, bytes_of, bytes_of_mut};
use crate::view::View;

/// Buffers start at multiples of this: a cache line.
pub(crate) const ALIGN: u64 = 64;

/// Shards are written before a program runs, and read after.
const NO_PROGRAM: &str = "no program runs on the memory";

/// Who may map a rank's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    Private,
    /// The processes of the host that it is handed to.
    Host,
}

/// Where a buffer is.
#[derive(Debug, Clone)]
pub struct Base {
    pub memory: Arc<Memory>,
    pub at: u64,
}

/// See the module.
#[derive(Debug, Clone)]
pub struct RankBuffers {
    program: VerifiedRank,
    /// By buffer of the program.
    bases: Vec<Base>,
}

/// Why memory does not do for a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    #[error("{given} places for {needed} buffers\nhint: one for each of the rank's buffers, in their order")]
    Count { given: usize, needed: usize },
    #[error("buffer {buffer} needs {bytes} B, its place has {room} B")]
    Room { buffer: usize, bytes: u64, room: u64 },
    #[error("buffers {one} and {other} share bytes\nhint: give each its own")]
    Overlap { one: usize, other: usize },
}

/// Where an op reads and writes. A send has no `into`, a receive no `from`.
#[derive(Debug, Clone)]
pub struct OpPlaces {
    pub from: Option<Place>,
    pub into: Option<Place>,
}

impl RankBuffers {
    /// All buffers, one behind the other.
    pub fn allocate(program: VerifiedRank, sharing: Sharing) -> io::Result<Self> {
        let mut next = 0;
        let mut starts = vec![];
        for buffer in &program.buffers {
            starts.push(next);
            next = (next + buffer.bytes).next_multiple_of(ALIGN);
        }
        let memory = match sharing {
            Sharing::Private => Memory::private(next)?,
            Sharing::Host => Memory::shared(next).map_err(|cause| cannot_share(next, &cause))?,
        };
        let memory = Arc::new(memory);
        let bases = starts.into_iter().map(|at| Base { memory: memory.clone(), at }).collect();
        Ok(Self { program, bases })
    }

    /// A program on memory that the caller has: one base for each of its buffers (`buffers` of its program, in order), with
    /// room for all of it, and no two in the same bytes. Nothing is copied on the way to a peer or from one.
    pub fn bind(program: VerifiedRank, bases: Vec<Base>) -> Result<Self, BindError> {
        if bases.len() != program.buffers.len() {
            return Err(BindError::Count { given: bases.len(), needed: program.buffers.len() });
        }
        let mut ranges = vec![];
        for (buffer, (base, needed)) in bases.iter().zip(&program.buffers).enumerate() {
            let (bytes, room) = (needed.bytes, base.memory.len().saturating_sub(base.at));
            if room < bytes {
                return Err(BindError::Room { buffer, bytes, room });
            }
            if bytes > 0 {
                ranges.push((base.memory.address() + base.at, bytes, buffer));
            }
        }
        ranges.sort_unstable();
        match ranges.windows(2).find(|pair| pair[0].0 + pair[0].1 > pair[1].0) {
            Some(pair) => Err(BindError::Overlap { one: pair[0].2, other: pair[1].2 }),
            None => Ok(Self { program, bases }),
        }
    }

    /// For a program whose buffers are somebody's: one base for each, with room for all of it.
    pub(crate) fn bound(program: VerifiedRank, bases: Vec<Base>) -> Self {
        let fits = |(base, buffer): (&Base, &crossmesh_core::program::Buffer)| {
            base.at.checked_add(buffer.bytes).is_some_and(|end| end <= base.memory.len())
        };
        assert_eq!(bases.len(), program.buffers.len(), "a base for every buffer");
        assert!(bases.iter().zip(&program.buffers).all(fits), "a buffer has room where it is bound");
        Self { program, bases }
    }

    pub fn program(&self) -> &VerifiedRank {
        &self.program
    }

    /// Where a box of a tile is.
    pub fn place(&self, tile: &Tile, region: &Region) -> Place {
        let whole = self.program.whole();
        let base = &self.bases[tile.buffer as usize];
        let element = whole.tensors[tile.tensor as usize].dtype.bytes();
        let (at, held) = (base.at + tile.offset, &whole.boxes[tile.region]);
        let view = View::of_tile(at, held, tile.strides.as_deref(), region, element);
        Place {
            memory: base.memory.clone(),
            view: view.expect("the program is proven: its boxes lie in their tiles"),
        }
    }

    /// Where all of a tile is.
    pub fn whole(&self, tile: &Tile) -> Place {
        self.place(tile, &self.program.whole().boxes[tile.region])
    }

    /// The tiles of a tensor that hold it from the start.
    pub fn sources(&self, tensor: u32) -> impl Iterator<Item = &Tile> {
        let of = move |t: &&Tile| t.tensor == tensor && matches!(t.holds, Holds::Source(_));
        self.program.tiles.iter().filter(of)
    }

    /// The tiles of a tensor that hold it in the end.
    pub fn goals(&self, tensor: u32) -> impl Iterator<Item = &Tile> {
        self.program.tiles.iter().filter(move |t| t.tensor == tensor && t.holds == Holds::Goal)
    }

    /// Writes this rank's shard of a tensor's source.
    ///
    /// # Panics
    /// While a program runs on it.
    pub fn write_source<T: Element>(&self, tensor: usize, mut shard: &[T]) {
        for tile in self.sources(tensor as u32) {
            let Place { memory, view } = self.whole(tile);
            let (head, rest) = shard.split_at((view.bytes() / size_of::<T>() as u64) as usize);
            memory.own().expect(NO_PROGRAM).unpack(&view, 0, bytes_of(head));
            shard = rest;
        }
        assert!(shard.is_empty(), "a shard is as large as its boxes");
    }

    /// Reads this rank's shard of a tensor's destination.
    ///
    /// # Panics
    /// While a program runs on it.
    pub fn read_destination<T: Element>(&self, tensor: usize, shard: &mut [T]) {
        let owned: Vec<Arc<Memory>> = self.goals(tensor as u32).map(|tile| self.whole(tile).memory).collect();
        let _owned = owned.first().map(|memory| memory.own().expect(NO_PROGRAM));
        // SAFETY: nobody else has the memory; what a rank allocates is one mapping.
        unsafe { self.read_tiles_of_pass(self.goals(tensor as u32), shard) }
    }

    /// Fills tiles with a shard, box behind box, beside a program that runs.
    ///
    /// # Safety
    /// Nobody else touches the tiles meanwhile, as of a pass that makes them: what sends them waits for the pass.
    pub(crate) unsafe fn write_tiles_of_pass<'a, T: Element>(
        &'a self,
        tiles: impl Iterator<Item = &'a Tile>,
        shard: &[T],
    ) {
        let mut bytes = bytes_of(shard);
        for tile in tiles {
            let place = self.whole(tile);
            for (at, len) in place.view.runs(0..place.bytes()) {
                let (head, rest) = bytes.split_at(len as usize);
                // SAFETY: the caller says so.
                unsafe { place.memory.elements_mut::<u8>(at, head.len()) }.copy_from_slice(head);
                bytes = rest;
            }
        }
        assert!(bytes.is_empty(), "a shard is as large as its boxes");
    }

    /// Fills a shard from tiles, box behind box, beside a program that runs.
    ///
    /// # Safety
    /// Nobody writes to the tiles meanwhile, as of a pass that needs them: what overwrites them waits for the pass.
    pub(crate) unsafe fn read_tiles_of_pass<'a, T: Element>(
        &'a self,
        tiles: impl Iterator<Item = &'a Tile>,
        shard: &mut [T],
    ) {
        let mut bytes = bytes_of_mut(shard);
        for tile in tiles {
            let place = self.whole(tile);
            for (at, len) in place.view.runs(0..place.bytes()) {
                let (head, rest) = bytes.split_at_mut(len as usize);
                // SAFETY: the caller says so.
                head.copy_from_slice(unsafe { place.memory.elements::<u8>(at, head.len()) });
                bytes = rest;
            }
        }
        assert!(bytes.is_empty(), "a shard is as large as its boxes");
    }

    /// What its tensors take, without staging.
    pub fn tensor_bytes(&self) -> u64 {
        self.program.buffers.iter().filter(|b| b.role != Role::Staging).map(|b| b.bytes).sum()
    }

    /// All that is allocated for it.
    pub fn bytes(&self) -> u64 {
        self.program.buffers.iter().map(|b| b.bytes).sum()
    }

    /// The places of every op.
    pub fn places(&self) -> io::Result<Vec<OpPlaces>> {
        let whole = self.program.whole();
        let is_nowhere = |op: &Op| match op.kind {
            OpKind::Send { from, .. } => from == TileId::NOWHERE,
            OpKind::Recv { into, .. } => into == TileId::NOWHERE,
            OpKind::Copy { from, into, .. } => from == TileId::NOWHERE || into == TileId::NOWHERE,
            OpKind::Compute { .. } => false,
        };
        // Signals alone have nothing to be somewhere; a mapping for it would be a good part of what a small call costs.
        let nothing = self.program.ops.iter().any(is_nowhere).then(|| Memory::private(0)).transpose()?;
        let nothing = nothing.map(|memory| Place { memory: Arc::new(memory), view: View::empty() });
        let place = |tile: TileId, op: &Op| match tile {
            TileId::NOWHERE => nothing.clone(),
            tile => Some(self.place(self.program.tile(tile), &whole.boxes[op.region])),
        };
        let places = self.program.ops.iter().map(|op| match op.kind {
            OpKind::Send { from, .. } => OpPlaces { from: place(from, op), into: None },
            OpKind::Recv { into, .. } => OpPlaces { from: None, into: place(into, op) },
            OpKind::Copy { from, into, .. } => OpPlaces { from: place(from, op), into: place(into, op) },
            OpKind::Compute { .. } => OpPlaces { from: None, into: None },
        });
        Ok(places.collect())
    }
}

fn cannot_share(bytes: u64, cause: &io::Error) -> io::Error {
    let hint = "its tensors and staging buffers lie there; run fewer ranks on the host, or raise its limits";
    io::Error::new(cause.kind(), format!("no {} of shared memory: {cause}\nhint: {hint}", Bytes(bytes)))
}
