//! Whether a program's tables fit together, each entry looked at on its own. What is checked here, the rest relies on.

use crate::id::Rank;
use crate::program::messages::{Matcher, Messages};
use crate::program::{DepKind, Holds, List, Op, OpKind, Program, RankProgram, Tensor, Tile, TileId};
use crate::region::Region;

use super::error::{OpName, VerifyError};

/// Checks all tables and matches messages: rank by rank, while a rank's ops are at hand.
pub fn check(program: &Program) -> Result<Messages, VerifyError> {
    let mut matcher = Matcher::new(program);
    let wholes = wholes(program)?;
    for (rank, ranked) in (0..).map(Rank).zip(&program.ranks) {
        check_rank(program, rank, ranked, &wholes)?;
        matcher.add(rank)?;
    }
    Ok(matcher.finish()?)
}

/// One rank's tables, with the program's tensors as boxes.
pub fn check_rank(
    program: &Program,
    rank: Rank,
    ranked: &RankProgram,
    wholes: &[Region],
) -> Result<(), VerifyError> {
    let of_rank = OfRank { program, ranked, rank, wholes };
    for (i, tile) in (0..).zip(&ranked.tiles) {
        of_rank.check_tile(i, tile)?;
    }
    (0..).zip(&ranked.ops).try_for_each(|(i, op)| of_rank.check_op(i, op))
}

/// All tensors as boxes.
pub fn wholes(program: &Program) -> Result<Vec<Region>, VerifyError> {
    (0..).zip(&program.tensors).map(|(i, t)| whole(i, t)).collect()
}

/// A tensor as a box; its bytes can be counted.
fn whole(tensor: u32, of: &Tensor) -> Result<Region, VerifyError> {
    let elements = of.shape.iter().try_fold(1u64, |n, len| n.checked_mul(*len));
    let bytes = elements.and_then(|n| n.checked_mul(of.dtype.bytes()));
    if bytes.is_none()
        || of.shape.iter().fold(1u128, |n, len| n.saturating_mul(u128::from((*len).max(1)))) >> 63 > 0
    {
        return Err(VerifyError::TensorTooLarge { tensor });
    }
    match of.partial {
        Some(parts) if parts.count < 2 => Err(VerifyError::TooFewParts { tensor, count: parts.count }),
        _ => Ok(Region::whole(&of.shape)),
    }
}

struct OfRank<'a> {
    program: &'a Program,
    ranked: &'a RankProgram,
    rank: Rank,
    wholes: &'a [Region],
}

impl OfRank<'_> {
    fn there_is(&self, what: &'static str, index: u32, len: usize) -> Result<(), VerifyError> {
        match (index as usize) < len {
            true => Ok(()),
            false => Err(VerifyError::NoSuch { rank: self.rank, what, index, len }),
        }
    }

    fn check_tile(&self, index: u32, tile: &Tile) -> Result<(), VerifyError> {
        let rank = self.rank;
        self.there_is("buffer", tile.buffer, self.ranked.buffers.len())?;
        self.there_is("tensor", tile.tensor, self.wholes.len())?;
        self.there_is("box", tile.region.0, self.program.boxes.len())?;
        let (region, whole) = (&self.program.boxes[tile.region], &self.wholes[tile.tensor as usize]);
        if region.num_dims() != whole.num_dims() || !whole.contains(region) || region.is_empty() {
            let (region, whole) = (region.clone(), whole.clone());
            return Err(VerifyError::TileOutside { rank, tile: index, tensor: tile.tensor, region, whole });
        }
        let tensor = &self.program.tensors[tile.tensor as usize];
        if let Holds::Source(part) | Holds::Made(part) = tile.holds {
            let parts = tensor.partial.map_or(1, |p| p.count);
            if part >= parts {
                return Err(VerifyError::NoSuchPart { rank, tile: index, part, parts });
            }
        }
        let end = end_of(region, tile, tensor.dtype.bytes())
            .ok_or(VerifyError::TileOnItself { rank, tile: index })?;
        let bytes = self.ranked.buffers[tile.buffer as usize].bytes;
        match end > u128::from(bytes) {
            true => {
                let (buffer, end) = (tile.buffer, u64::try_from(end).unwrap_or(u64::MAX));
                Err(VerifyError::TileBeyondBuffer { rank, tile: index, buffer, end, bytes })
            }
            false => Ok(()),
        }
    }

    fn check_op(&self, index: u32, op: &Op) -> Result<(), VerifyError> {
        self.check_deps(index, op)?;
        if let OpKind::Compute { needs, makes, .. } = op.kind {
            return self.check_lists(index, needs, makes);
        }
        self.there_is("tensor", op.tensor, self.wholes.len())?;
        let name = || OpName::of(self.rank, index, self.ranked);
        let (from, into) = op.ends();
        let copies = matches!(op.kind, OpKind::Copy { .. });
        let places = usize::from(from.is_some()) + usize::from(into.is_some());
        let wanted = if op.bytes == 0 { 0 } else { 1 + usize::from(copies) };
        if places != wanted {
            return Err(VerifyError::NoPlace { op: name(), bytes: op.bytes });
        }
        for tile in [from, into].into_iter().flatten() {
            self.check_place(index, op, tile)?;
        }
        let reduces =
            matches!(op.kind, OpKind::Recv { reduce: true, .. } | OpKind::Copy { reduce: true, .. });
        if reduces && self.program.tensors[op.tensor as usize].partial.is_none() {
            return Err(VerifyError::CannotCombine { op: name(), tensor: op.tensor });
        }
        Ok(())
    }

    fn check_place(&self, index: u32, op: &Op, id: TileId) -> Result<(), VerifyError> {
        let name = || OpName::of(self.rank, index, self.ranked);
        self.there_is("tile", id.0, self.ranked.tiles.len())?;
        self.there_is("box", op.region.0, self.program.boxes.len())?;
        let tile = self.ranked.tile(id);
        let (region, held) = (&self.program.boxes[op.region], &self.program.boxes[tile.region]);
        let inside = region.num_dims() == held.num_dims() && held.contains(region) && !region.is_empty();
        if tile.tensor != op.tensor || !inside {
            let (region, tile_region, tensor) = (region.clone(), held.clone(), tile.tensor);
            return Err(VerifyError::OutsideTile { op: name(), region, tile: id.0, tile_region, tensor });
        }
        let bytes = region.volume() * self.program.tensors[op.tensor as usize].dtype.bytes();
        match bytes == op.bytes {
            true => Ok(()),
            false => {
                let region = region.clone();
                Err(VerifyError::BytesDiffer { op: name(), region, stated: op.bytes, bytes })
            }
        }
    }

    fn check_deps(&self, index: u32, op: &Op) -> Result<(), VerifyError> {
        let rank = self.rank;
        let (start, end, len) = (op.deps.start, op.deps.end, self.ranked.deps.len());
        if start > end || end as usize > len {
            return Err(VerifyError::NoSuch { rank, what: "dependency", index: end, len });
        }
        for dep in self.ranked.deps(op) {
            let bad = |why| Err(VerifyError::BadDependency { rank, op: index, dep: dep.op, why });
            let Some(on) = self.ranked.ops.get(dep.op as usize) else { return bad("does not exist") };
            if dep.kind == DepKind::Done {
                continue;
            }
            let ends = matches!((&on.kind, &op.kind), (OpKind::Recv { .. }, OpKind::Send { .. }));
            if op.bytes == 0 {
                // It would be over before the one that it follows: there is no element to wait for.
                return bad("is followed as it moves, by what moves nothing");
            }
            let boxes = &self.program.boxes;
            let same = on.region == op.region || boxes.get(on.region) == boxes.get(op.region);
            if !ends || on.tensor != op.tensor || on.bytes != op.bytes || !same {
                return bad("moves another box and cannot be streamed");
            }
        }
        Ok(())
    }

    fn check_lists(&self, index: u32, needs: List, makes: List) -> Result<(), VerifyError> {
        let len = self.ranked.touched.len();
        for list in [needs, makes] {
            let end = u64::from(list.start) + u64::from(list.len);
            if end > len as u64 {
                let index = end.min(u64::from(u32::MAX)) as u32;
                return Err(VerifyError::NoSuch { rank: self.rank, what: "touched tile", index, len });
            }
            for tile in self.ranked.touched(list) {
                self.there_is("tile", tile.0, self.ranked.tiles.len())?;
            }
        }
        for tile in self.ranked.touched(makes) {
            if !matches!(self.ranked.tile(*tile).holds, Holds::Made(_)) {
                let op = OpName::of(self.rank, index, self.ranked);
                return Err(VerifyError::NoPlace { op, bytes: 0 });
            }
        }
        Ok(())
    }
}

/// The byte after a tile's last one; none if its strides put two elements in one place.
fn end_of(region: &Region, tile: &Tile, element: u64) -> Option<u128> {
    let offset = u128::from(tile.offset);
    let Some(strides) = &tile.strides else {
        return Some(offset + u128::from(region.volume()) * u128::from(element));
    };
    if strides.len() != region.num_dims() {
        return None;
    }
    let mut dims: Vec<(u64, u64)> = strides
        .iter()
        .zip(region.spans())
        .map(|(stride, span)| (*stride, span.len()))
        .filter(|d| d.1 > 1)
        .collect();
    dims.sort_unstable();
    let mut reach = u128::from(element);
    for (stride, len) in dims {
        if u128::from(stride) < reach {
            return None;
        }
        reach = reach.checked_add(u128::from(stride).checked_mul(u128::from(len - 1))?)?;
    }
    offset.checked_add(reach)
}
