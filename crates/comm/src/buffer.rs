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
use crossmesh_cuda::Gpu;

use crate::arrays::{ArrayError, Slot, Strided, share_bytes};
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
    /// By tile, where buffers are arrays; else empty.
    slots: Vec<Slot>,
}

/// Why memory does not do for a program.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    #[error("{given} places for {needed} buffers\nhint: one for each of the rank's buffers, in their order")]
    Count { given: usize, needed: usize },
    #[error("buffer {buffer} needs {bytes} B, its place has {room} B")]
    Room { buffer: usize, bytes: u64, room: u64 },
    #[error("buffers {one} and {other} share bytes\nhint: give each its own")]
    Overlap { one: usize, other: usize },
    #[error("buffer {buffer}: {cause}")]
    Array { buffer: usize, cause: ArrayError },
}

/// Where a buffer's bytes are, to see whether two of them meet.
struct Extent {
    start: u64,
    bytes: u64,
    buffer: usize,
    element: u64,
    array: Strided,
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
        Self::allocate_by(program, |bytes| match sharing {
            Sharing::Private => Memory::private(bytes),
            Sharing::Host => Memory::shared(bytes).map_err(|cause| cannot_share(bytes, &cause)),
        })
    }

    /// The same in memory of a GPU.
    pub fn allocate_on(program: VerifiedRank, gpu: &Arc<Gpu>, sharing: Sharing) -> io::Result<Self> {
        Self::allocate_by(program, |bytes| Memory::on_device(gpu, bytes, sharing == Sharing::Host))
    }

    fn allocate_by(
        program: VerifiedRank,
        memory: impl FnOnce(u64) -> io::Result<Memory>,
    ) -> io::Result<Self> {
        let mut next = 0;
        let mut starts = vec![];
        for buffer in &program.buffers {
            starts.push(next);
            next = (next + buffer.bytes).next_multiple_of(ALIGN);
        }
        let memory = Arc::new(memory(next)?);
        let bases = starts.into_iter().map(|at| Base { memory: memory.clone(), at }).collect();
        Ok(Self { program, bases, slots: vec![] })
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
            None => Ok(Self { program, bases, slots: vec![] }),
        }
    }

    /// The same where a buffer may be an array with strides, in which the boxes of a shard lie beside each other.
    pub fn bind_arrays(
        program: VerifiedRank,
        bound: Vec<(Base, Option<Strided>)>,
    ) -> Result<Self, BindError> {
        if bound.len() != program.buffers.len() {
            return Err(BindError::Count { given: bound.len(), needed: program.buffers.len() });
        }
        let mut slots = vec![None; program.tiles.len()];
        let mut extents: Vec<Extent> = vec![];
        for (buffer, ((base, array), needed)) in bound.iter().zip(&program.buffers).enumerate() {
            let room = base.memory.len().saturating_sub(base.at);
            let tiles = || program.tiles.iter().enumerate().filter(|(_, t)| t.buffer as usize == buffer);
            let whole = program.whole();
            let element = tiles().next().map_or(1, |(_, t)| whole.tensors[t.tensor as usize].dtype.bytes());
            let bytes = match array {
                None => needed.bytes,
                Some(array) => {
                    let boxes: Vec<&Region> = tiles().map(|(_, t)| &whole.boxes[t.region]).collect();
                    let at =
                        array.slots(&boxes, element).map_err(|cause| BindError::Array { buffer, cause })?;
                    let strides: Arc<[u64]> = array.strides.clone().into();
                    tiles().zip(at).for_each(|((i, _), at)| slots[i] = Some((at, strides.clone())));
                    array.extent_bytes(element).unwrap_or(u64::MAX)
                }
            };
            if room < bytes {
                return Err(BindError::Room { buffer, bytes, room });
            }
            if bytes > 0 {
                let packed = || Strided::packed(&[needed.bytes], 1);
                let (element, array) = array.clone().map_or_else(|| (1, packed()), |array| (element, array));
                extents.push(Extent {
                    start: base.memory.address() + base.at,
                    bytes,
                    buffer,
                    element,
                    array,
                });
            }
        }
        extents.sort_unstable_by_key(|e| (e.start, e.buffer));
        for (i, one) in extents.iter().enumerate() {
            let near = extents[i + 1..].iter().take_while(|other| other.start < one.start + one.bytes);
            for other in near {
                let elements = (one.element, other.element);
                if share_bytes((one.start, &one.array), (other.start, &other.array), elements) {
                    return Err(BindError::Overlap { one: one.buffer, other: other.buffer });
                }
            }
        }
        let bases = bound.into_iter().map(|(base, _)| base).collect();
        Ok(Self { program, bases, slots })
    }

    /// For a program whose buffers are somebody's: one base for each, with room for all of it.
    pub(crate) fn bound(program: VerifiedRank, bases: Vec<Base>) -> Self {
        let fits = |(base, buffer): (&Base, &crossmesh_core::program::Buffer)| {
            base.at.checked_add(buffer.bytes).is_some_and(|end| end <= base.memory.len())
        };
        assert_eq!(bases.len(), program.buffers.len(), "a base for every buffer");
        assert!(bases.iter().zip(&program.buffers).all(fits), "a buffer has room where it is bound");
        Self { program, bases, slots: vec![] }
    }

    pub fn program(&self) -> &VerifiedRank {
        &self.program
    }

    /// Where a box of a tile is.
    pub fn place(&self, tile: &Tile, region: &Region) -> Place {
        let index = || self.program.tiles.iter().position(|other| std::ptr::eq(other, tile));
        let slot = (!self.slots.is_empty()).then(index).flatten();
        self.place_at(tile, region, slot.and_then(|index| self.slots[index].as_ref()))
    }

    fn place_at(&self, tile: &Tile, region: &Region, slot: Option<&(u64, Arc<[u64]>)>) -> Place {
        let whole = self.program.whole();
        let base = &self.bases[tile.buffer as usize];
        let element = whole.tensors[tile.tensor as usize].dtype.bytes();
        let held = &whole.boxes[tile.region];
        let (offset, strides) = match slot {
            Some((offset, strides)) => (*offset, Some(&**strides)),
            None => (tile.offset, tile.strides.as_deref()),
        };
        let view = View::of_tile(base.at + offset, held, strides, region, element);
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
    pub fn write_source<T: Element>(&self, tensor: usize, mut shard: &[T]) -> io::Result<()> {
        for tile in self.sources(tensor as u32) {
            let Place { memory, view } = self.whole(tile);
            let (head, rest) = shard.split_at((view.bytes() / size_of::<T>() as u64) as usize);
            memory.own().expect(NO_PROGRAM).unpack(&view, 0, bytes_of(head))?;
            shard = rest;
        }
        assert!(shard.is_empty(), "a shard is as large as its boxes");
        Ok(())
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
            tile => {
                let slot = self.slots.get(tile.index()).and_then(Option::as_ref);
                Some(self.place_at(self.program.tile(tile), &whole.boxes[op.region], slot))
            }
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
