//! A rank's shards as buffers and tiles.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::id::{Rank, RegionId};
use crate::layout::{HeldBox, Layout};
use crate::program::{BoxTable, Holds, RankProgram, Role, Tile, TileId};
use crate::region::Region;
use crate::reshard::plan::Plan;
use crate::reshard::shards::{AllSides, Shards};

use super::Addressing;

/// The tiles of a rank's shards: for every tensor, first those of its source, then those of its destination.
pub struct ShardTiles {
    by_tensor: FxHashMap<u32, [Vec<TileId>; 2]>,
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
        let mut tiles =
            Self { by_tensor: FxHashMap::default(), in_place: memory == Addressing::InPlace(rank) };
        for (tensor, (reshard, sides)) in (0..).zip(plan.problem.reshards.iter().zip(sides.iter())) {
            let mut layer =
                Layer { rank, program, boxes, tensor, element: reshard.src.layout.dtype().bytes() };
            let part = sides.src.contribution(rank).unwrap_or(0);
            let (source, goal) = (Holds::Source(part), Holds::Goal);
            let of_tensor = match tiles.in_place {
                false => [
                    layer.shard(&reshard.src.layout, &sides.src, Role::Source(tensor), source),
                    layer.shard(&reshard.dst.layout, &sides.dst, Role::Destination(tensor), goal),
                ],
                true => {
                    layer.in_place([(&sides.src, source), (&sides.dst, goal)], reshard.src.layout.shape())
                }
            };
            if of_tensor.iter().any(|t| !t.is_empty()) {
                tiles.by_tensor.insert(tensor, of_tensor);
            }
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
        let tiles = &self.by_tensor.get(&tensor)?[side];
        tiles.iter().copied().find(|tile| boxes[program.tile(*tile).region].contains(region))
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
    /// A shard, as its layout has it lie in memory.
    fn shard(&mut self, layout: &Layout, shards: &Shards, role: Role, holds: Holds) -> Vec<TileId> {
        let position = shards.position(self.rank).filter(|_| layout.by_axes().is_none());
        let Some(position) = position else { return self.packed(shards, role, holds) };
        let coord = layout.mesh().coord(position);
        let held = layout.held_at(&coord);
        if held.is_empty() {
            return vec![];
        }
        let element = self.element;
        let buffer = self.program.add_buffer(layout.shard_elements(&coord) * element, role);
        let in_bytes = |strides: &[u64]| strides.iter().map(|s| s * element).collect::<Vec<u64>>();
        held.into_iter()
            .map(|held| {
                let in_a_row = held == HeldBox::packed(held.region.clone(), held.offset_elements);
                let HeldBox { region, offset_elements, strides } = held;
                let strides = (!in_a_row).then(|| in_bytes(&strides).into());
                self.tile(region, buffer, offset_elements * element, strides, holds)
            })
            .collect()
    }

    /// Box behind box, in the order of the layout.
    fn packed(&mut self, shards: &Shards, role: Role, holds: Holds) -> Vec<TileId> {
        let held = shards.boxes(self.rank);
        let bytes = held.iter().map(Region::volume).sum::<u64>() * self.element;
        if held.is_empty() {
            return vec![];
        }
        let buffer = self.program.add_buffer(bytes, role);
        let mut offset = 0;
        let mut tiles = vec![];
        for region in held {
            let bytes = region.volume() * self.element;
            tiles.push(self.tile(region, buffer, offset, None, holds));
            offset += bytes;
        }
        tiles
    }

    /// Every element at its place in the whole tensor, which has one dim.
    fn in_place(&mut self, sides: [(&Shards, Holds); 2], shape: &[u64]) -> [Vec<TileId>; 2] {
        let held = sides.map(|(shards, holds)| (shards.boxes(self.rank), holds));
        if held.iter().all(|(boxes, _)| boxes.is_empty()) {
            return [vec![], vec![]];
        }
        assert!(shape.len() <= 1, "what runs in place has one dim");
        let bytes = shape.iter().product::<u64>() * self.element;
        let buffer = self.program.add_buffer(bytes, Role::InPlace(self.tensor));
        let element = self.element;
        let start = |region: &Region| region.spans().first().map_or(0, |s| s.start) * element;
        held.map(|(boxes, holds)| {
            boxes
                .into_iter()
                .map(|b| (start(&b), b))
                .map(|(at, b)| self.tile(b, buffer, at, None, holds))
                .collect()
        })
    }

    fn tile(
        &mut self,
        region: Region,
        buffer: u32,
        offset: u64,
        strides: Option<Arc<[u64]>>,
        holds: Holds,
    ) -> TileId {
        let region: RegionId = self.boxes.push(region);
        self.program.add_tile(Tile { tensor: self.tensor, region, buffer, offset, strides, holds })
    }
}
