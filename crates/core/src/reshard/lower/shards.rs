//! A rank's shards as buffers and tiles.

use std::ops::Range;
use std::sync::Arc;

use crate::id::{Rank, RegionId};
use crate::layout::{HeldBox, Layout};
use crate::program::{BoxTable, Buffer, Holds, RankProgram, Role, Tile, TileId};
use crate::region::Region;
use crate::reshard::plan::Plan;
use crate::reshard::shards::{AllSides, Shards};

use super::Addressing;

/// The tiles of a rank's shards: for every tensor, first those of its source, then those of its destination. Those of a side are
/// one behind the other.
pub struct ShardTiles {
    by_tensor: Vec<[Range<u32>; 2]>,
    in_place: bool,
}

impl ShardTiles {
    pub fn lay_out(
        plan: &Plan,
        sides: &AllSides,
        rank: Rank,
        memory: Addressing,
        program: &mut RankProgram,
        boxes: &mut BoxTable,
    ) -> Self {
        let in_place = memory == Addressing::InPlace(rank);
        let mut tiles = Self { by_tensor: Vec::with_capacity(plan.problem.reshards.len()), in_place };
        // By kind of tensor: the first one. Those after it lie alike and share its boxes.
        let mut laid: Vec<Option<u32>> = vec![None; sides.num_kinds()];
        for (tensor, (reshard, of_tensor)) in (0..).zip(plan.problem.reshards.iter().zip(sides.iter())) {
            let mut layer =
                Layer { rank, program, boxes, tensor, element: reshard.src.layout.dtype().bytes() };
            if let Some(first) = laid[sides.kind(tensor)] {
                let alike = tiles.by_tensor[first as usize].clone().map(|side| layer.like(side));
                tiles.by_tensor.push(alike);
                continue;
            }
            laid[sides.kind(tensor)] = Some(tensor).filter(|_| !in_place);
            let part = of_tensor.src.contribution(rank).unwrap_or(0);
            let (source, goal) = (Holds::Source(part), Holds::Goal);
            tiles.by_tensor.push(match in_place {
                false => [
                    layer.shard(&reshard.src.layout, &of_tensor.src, Role::Source(tensor), source),
                    layer.shard(&reshard.dst.layout, &of_tensor.dst, Role::Destination(tensor), goal),
                ],
                true => layer
                    .in_place([(&of_tensor.src, source), (&of_tensor.dst, goal)], reshard.src.layout.shape()),
            });
        }
        tiles
    }

    /// Whether what a rank holds and wants lies where it belongs from the start.
    pub fn in_place(&self) -> bool {
        self.in_place
    }

    /// The tile of the source that a box lies in.
    pub fn source(
        &self,
        program: &RankProgram,
        boxes: &BoxTable,
        tensor: u32,
        region: &Region,
    ) -> Option<TileId> {
        self.find(program, boxes, tensor, 0, region)
    }

    /// The tile of the destination that a box lies in.
    pub fn goal(
        &self,
        program: &RankProgram,
        boxes: &BoxTable,
        tensor: u32,
        region: &Region,
    ) -> Option<TileId> {
        self.find(program, boxes, tensor, 1, region)
    }

    fn find(
        &self,
        program: &RankProgram,
        boxes: &BoxTable,
        tensor: u32,
        side: usize,
        region: &Region,
    ) -> Option<TileId> {
        let mut tiles = self.by_tensor.get(tensor as usize)?[side].clone().map(TileId);
        tiles.find(|tile| boxes[program.tile(*tile).region].contains(region))
    }
}

/// Lays out one tensor's shards.
struct Layer<'a> {
    rank: Rank,
    program: &'a mut RankProgram,
    boxes: &'a mut BoxTable,
    tensor: u32,
    element: u64,
}

impl Layer<'_> {
    /// A shard like one that has been laid out, of another tensor.
    fn like(&mut self, tiles: Range<u32>) -> Range<u32> {
        let Some(first) = self.program.tiles.get(tiles.start as usize).filter(|_| !tiles.is_empty()) else {
            return 0..0;
        };
        let Buffer { bytes, role, .. } = self.program.buffers[first.buffer as usize];
        let role = match role {
            Role::Source(_) => Role::Source(self.tensor),
            _ => Role::Destination(self.tensor),
        };
        let (buffer, next) = (self.program.add_buffer(bytes, role), self.next());
        for tile in tiles {
            let tile = Tile { tensor: self.tensor, buffer, ..self.program.tile(TileId(tile)).clone() };
            self.program.add_tile(tile);
        }
        next..self.next()
    }

    /// A shard, as its layout has it lie in memory.
    fn shard(&mut self, layout: &Layout, shards: &Shards, role: Role, holds: Holds) -> Range<u32> {
        let position = shards.position(self.rank).filter(|_| layout.by_axes().is_none());
        let Some(position) = position else { return self.packed(shards, role, holds) };
        let coord = layout.mesh().coord(position);
        let held = layout.held_at(&coord);
        if held.is_empty() {
            return 0..0;
        }
        let first = self.next();
        let element = self.element;
        let buffer = self.program.add_buffer(layout.shard_elements(&coord) * element, role);
        let in_bytes = |strides: &[u64]| strides.iter().map(|s| s * element).collect::<Vec<u64>>();
        for held in held {
            let in_a_row = held == HeldBox::packed(held.region.clone(), held.offset_elements);
            let HeldBox { region, offset_elements, strides } = held;
            let strides = (!in_a_row).then(|| in_bytes(&strides).into());
            self.tile(region, buffer, offset_elements * element, strides, holds);
        }
        first..self.next()
    }

    /// Box behind box, in the order of the layout.
    fn packed(&mut self, shards: &Shards, role: Role, holds: Holds) -> Range<u32> {
        let held = shards.boxes(self.rank);
        let bytes = held.iter().map(Region::volume).sum::<u64>() * self.element;
        if held.is_empty() {
            return 0..0;
        }
        let (buffer, first) = (self.program.add_buffer(bytes, role), self.next());
        let mut offset = 0;
        for region in held {
            let bytes = region.volume() * self.element;
            self.tile(region, buffer, offset, None, holds);
            offset += bytes;
        }
        first..self.next()
    }

    /// Every element at its place in the whole tensor, which has one dim.
    fn in_place(&mut self, sides: [(&Shards, Holds); 2], shape: &[u64]) -> [Range<u32>; 2] {
        let held = sides.map(|(shards, holds)| (shards.boxes(self.rank), holds));
        if held.iter().all(|(boxes, _)| boxes.is_empty()) {
            return [0..0, 0..0];
        }
        assert!(shape.len() <= 1, "what runs in place has one dim");
        let bytes = shape.iter().product::<u64>() * self.element;
        let buffer = self.program.add_buffer(bytes, Role::InPlace(self.tensor));
        let element = self.element;
        let start = |region: &Region| region.spans().first().map_or(0, |s| s.start) * element;
        held.map(|(boxes, holds)| {
            let first = self.next();
            for region in boxes {
                self.tile(region.clone(), buffer, start(&region), None, holds);
            }
            first..self.next()
        })
    }

    /// The id of the next tile.
    fn next(&self) -> u32 {
        TileId::at(self.program.tiles.len()).0
    }

    fn tile(&mut self, region: Region, buffer: u32, offset: u64, strides: Option<Arc<[u64]>>, holds: Holds) {
        let region: RegionId = self.boxes.push(region);
        self.program.add_tile(Tile { tensor: self.tensor, region, buffer, offset, strides, holds });
    }
}
