//! Pieces: the finest boxes with one set of holders at the source and one set of receivers at the destination.
//!
//! A dim cut one way at the source and another way at the destination falls into segments; a piece takes one segment
//! of every dim:
//!
//! ```text
//! source, 2 parts       |     0     |     1     |
//! destination, 3 parts  |   0   |   1   |   2   |
//! segments              |  0,0  |0,1|1,1|  1,2  |
//! ```
//!
//! Walking both lists of cuts side by side costs their sum, not their product. Where a side lists boxes, its atoms
//! ([`super::atoms`]) are met with those of the other side instead; a piece lies in one box of every rank that has it.

use rustc_hash::FxHashMap;

use crate::box_index::BoxIndex;
use crate::id::Rank;
use crate::layout::ByAxes;
use crate::region::{Region, Span};

use super::atoms::atoms;
use super::problem::{Placed, PlanError, Reshard};

/// The devices that hold one and the same part of a tensor. With boxes, a device may be in several tiles.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Tile {
    /// In mesh order.
    pub ranks: Vec<Rank>,
    /// For each rank, which part of a partial sum it holds; all 0 where values are whole.
    pub contributions: Vec<u32>,
}

/// A box that one source tile holds and one destination tile wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    pub region: Region,
    pub src_tile: u32,
    pub dst_tile: u32,
}

/// A reshard, taken apart. Pieces are in row-major order; tiles are numbered as pieces come to name them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pieces {
    pub src_tiles: Vec<Tile>,
    pub dst_tiles: Vec<Tile>,
    pub pieces: Vec<Piece>,
}

/// More pieces than this in one tensor is refused rather than planned.
pub const MAX_PIECES: u64 = 1 << 26;

impl Pieces {
    pub fn of(reshard: &Reshard) -> Result<Self, PlanError> {
        let (src, dst) = (&reshard.src, &reshard.dst);
        let mut pieces = match (src.layout.by_axes(), dst.layout.by_axes()) {
            (Some(by_src), Some(by_dst)) => Self::of_splits((src, by_src), (dst, by_dst))?,
            _ => Self::of_atoms(src, dst)?,
        };
        pieces.number_tiles();
        Ok(pieces)
    }

    fn of_splits(src: (&Placed, ByAxes), dst: (&Placed, ByAxes)) -> Result<Self, PlanError> {
        let num_dims = src.1.splits().len();
        let dims: Vec<Vec<Segment>> = (0..num_dims).map(|dim| segments(src.1, dst.1, dim)).collect();
        let count = dims.iter().try_fold(1u64, |n, d| n.checked_mul(d.len() as u64));
        if count.is_none_or(|n| n > MAX_PIECES) {
            return Err(PlanError::TooLarge { what: "pieces in one tensor", limit: MAX_PIECES });
        }
        let mut pieces = Vec::with_capacity(count.unwrap_or(0) as usize);
        let mut spans = Vec::with_capacity(dims.len());
        product(&dims, &mut spans, 0, 0, &mut pieces);
        Ok(Self { src_tiles: tiles(src.0, src.1), dst_tiles: tiles(dst.0, dst.1), pieces })
    }

    /// Where atoms of both sides meet.
    fn of_atoms(src: &Placed, dst: &Placed) -> Result<Self, PlanError> {
        let (src_atoms, dst_atoms) = (atoms(&src.layout)?, atoms(&dst.layout)?);
        let index = BoxIndex::new(dst_atoms.iter().map(|a| &a.region));
        let (mut src_tiles, mut dst_tiles) = (TileTable::new(src), TileTable::new(dst));
        let wanted_by: Vec<u32> = dst_atoms.iter().map(|a| dst_tiles.number(&a.holders)).collect();
        let mut pieces = Vec::new();
        for atom in src_atoms {
            let src_tile = src_tiles.number(&atom.holders);
            for meeting in index.meeting(atom.region.spans()) {
                let region = atom.region.intersect(&dst_atoms[meeting as usize].region);
                let region = region.expect("the index finds what meets");
                pieces.push(Piece { region, src_tile, dst_tile: wanted_by[meeting as usize] });
            }
            if pieces.len() as u64 > MAX_PIECES {
                return Err(PlanError::TooLarge { what: "pieces in one tensor", limit: MAX_PIECES });
            }
        }
        pieces.sort_unstable_by(|a, b| a.region.cmp(&b.region));
        Ok(Self { src_tiles: src_tiles.tiles, dst_tiles: dst_tiles.tiles, pieces })
    }

    /// Numbers tiles in the order that pieces name them, and drops those that no piece names.
    fn number_tiles(&mut self) {
        let Self { src_tiles, dst_tiles, pieces } = self;
        let (mut src, mut dst) = (Numbers::new(src_tiles.len()), Numbers::new(dst_tiles.len()));
        for piece in pieces {
            piece.src_tile = src.of(piece.src_tile);
            piece.dst_tile = dst.of(piece.dst_tile);
        }
        src.reorder(src_tiles);
        dst.reorder(dst_tiles);
    }
}

/// New numbers for old ones, in the order they are asked for.
struct Numbers {
    new: Vec<Option<u32>>,
    old: Vec<u32>,
}

impl Numbers {
    fn new(len: usize) -> Self {
        Self { new: vec![None; len], old: Vec::with_capacity(len) }
    }

    fn of(&mut self, old: u32) -> u32 {
        *self.new[old as usize].get_or_insert_with(|| {
            self.old.push(old);
            self.old.len() as u32 - 1
        })
    }

    fn reorder(&self, tiles: &mut Vec<Tile>) {
        let rising = self.old.iter().copied().eq(0..tiles.len() as u32);
        if !rising {
            *tiles = self.old.iter().map(|&old| std::mem::take(&mut tiles[old as usize])).collect();
        }
    }
}

/// The tiles of a layout that lists boxes: one for each set of holders.
struct TileTable<'a> {
    placed: &'a Placed,
    numbers: FxHashMap<Vec<u32>, u32>,
    tiles: Vec<Tile>,
}

impl<'a> TileTable<'a> {
    fn new(placed: &'a Placed) -> Self {
        Self { placed, numbers: FxHashMap::default(), tiles: vec![] }
    }

    fn number(&mut self, holders: &[u32]) -> u32 {
        if let Some(&number) = self.numbers.get(holders) {
            return number;
        }
        let Placed { layout, ranks } = self.placed;
        let contribution = |&p: &u32| layout.contribution_at(&layout.mesh().coord(p as usize)) as u32;
        self.tiles.push(Tile {
            ranks: holders.iter().map(|&p| ranks[p as usize]).collect(),
            contributions: holders.iter().map(contribution).collect(),
        });
        let number = self.tiles.len() as u32 - 1;
        self.numbers.insert(holders.to_vec(), number);
        number
    }
}

/// A stretch of one dim inside one source part and one destination part. The part numbers are already multiplied by
/// the tile count of the later dims, so that a tile's number is the sum over its dims.
struct Segment {
    span: Span,
    src_tile_step: u32,
    dst_tile_step: u32,
}

fn segments(src: ByAxes, dst: ByAxes, dim: usize) -> Vec<Segment> {
    let (src_spans, dst_spans) = (stepped_spans(src, dim), stepped_spans(dst, dim));
    let mut out = Vec::with_capacity(src_spans.len() + dst_spans.len());
    let (mut i, mut j) = (0, 0);
    while i < src_spans.len() && j < dst_spans.len() {
        let ((a, src_tile_step), (b, dst_tile_step)) = (src_spans[i], dst_spans[j]);
        if let Some(span) = a.intersect(b) {
            out.push(Segment { span, src_tile_step, dst_tile_step });
        }
        i += usize::from(a.end <= b.end);
        j += usize::from(b.end <= a.end);
    }
    out
}

/// The spans of a dim in rising order, each with its part's contribution to the tile number.
fn stepped_spans(split: ByAxes, dim: usize) -> Vec<(Span, u32)> {
    let step: usize = (dim + 1..split.splits().len()).map(|d| split.num_parts(d)).product();
    let parts = split.part_spans(dim).into_iter().enumerate();
    let mut spans: Vec<(Span, u32)> =
        parts.flat_map(|(part, spans)| spans.into_iter().map(move |s| (s, (part * step) as u32))).collect();
    spans.sort_unstable();
    spans
}

fn product(dims: &[Vec<Segment>], spans: &mut Vec<Span>, src_tile: u32, dst_tile: u32, out: &mut Vec<Piece>) {
    let Some(segments) = dims.get(spans.len()) else {
        out.push(Piece { region: Region::new(spans.clone()), src_tile, dst_tile });
        return;
    };
    for segment in segments {
        spans.push(segment.span);
        product(dims, spans, src_tile + segment.src_tile_step, dst_tile + segment.dst_tile_step, out);
        spans.pop();
    }
}

/// The devices of every tile.
fn tiles(placed: &Placed, split: ByAxes) -> Vec<Tile> {
    let layout = &placed.layout;
    let dims = 0..split.splits().len();
    let mut tiles = vec![Tile::default(); dims.clone().map(|d| split.num_parts(d)).product()];
    for (position, rank) in placed.ranks.iter().enumerate() {
        let coord = layout.mesh().coord(position);
        let tile = dims.clone().fold(0, |tile, d| tile * split.num_parts(d) + split.part_at(d, &coord));
        tiles[tile].ranks.push(*rank);
        tiles[tile].contributions.push(layout.contribution_at(&coord) as u32);
    }
    tiles
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reshard::Problem;

    fn pieces(src: &str, dst: &str) -> Pieces {
        let problem = Problem::pair(src.parse().unwrap(), dst.parse().unwrap()).unwrap();
        Pieces::of(&problem.reshards[0]).unwrap()
    }

    #[test]
    fn cuts_fall_where_either_side_cuts() {
        let p = pieces("f32[6]@A{tp:2}(tp)", "f32[6]@B{tp:3}(tp)");
        let found: Vec<String> =
            p.pieces.iter().map(|p| format!("{} {}->{}", p.region, p.src_tile, p.dst_tile)).collect();
        assert_eq!(found, ["[0:2] 0->0", "[2:3] 0->1", "[3:4] 1->1", "[4:6] 1->2"]);
    }

    #[test]
    fn replicas_share_a_tile() {
        let p = pieces("f32[8,6]@A{dp:2,tp:2}(tp,_)", "f32[8,6]@B{tp:2}(_,_)");
        assert_eq!(p.src_tiles[1].ranks, [Rank(1), Rank(3)]);
        assert_eq!(p.dst_tiles[0].ranks, [Rank(4), Rank(5)]);
        assert_eq!(p.pieces.len(), 2);
    }

    #[test]
    fn a_scalar_is_one_piece_and_nothing_is_none() {
        assert_eq!(pieces("f32[]@A{tp:2}()", "f32[]@B{tp:2}()").pieces.len(), 1);
        assert_eq!(pieces("f32[4,0]@A{tp:2}(tp,_)", "f32[4,0]@B{tp:2}(_,tp)").pieces.len(), 0);
    }
}
