//! Which tiles of a rank share memory, and how.
//!
//! Tiles of one tensor that give every element the same address are one *space*: there, boxes tell what meets what. Two
//! spaces of one buffer either have no byte in common, or what is written in one is lost in the other.
//!
//! ```text
//! buffer 0, in place    tile 0 (source) [0:8] at 0, tile 1 (goal) [2:4] at 8       one space
//! buffer 1, staging     tile 2 [0:4] at 0, then tile 3 [4:6] at 0                  two spaces that share bytes
//! buffer 2, a shard     tile 4 [0:2, 0:9] at 0, tile 5 [4:6, 0:9] at 72            two spaces, apart
//! ```

use rustc_hash::FxHashMap;

use crate::layout::{HeldBox, share_a_place};
use crate::program::{Program, RankProgram, Tile};
use crate::region::{Region, Span};

/// Tiles that give every element the same address.
#[derive(Debug, Default)]
pub struct Space {
    pub tensor: u32,
    pub buffer: u32,
    pub tiles: Vec<u32>,
    /// The smallest box around them.
    bounds: Vec<Span>,
    /// From the first byte of any of them to behind the last.
    pub extent: (u64, u64),
    /// Whether another space has some of its bytes.
    pub shares: bool,
}

pub struct Spaces {
    pub spaces: Vec<Space>,
    /// By tile.
    pub of_tile: Vec<u32>,
}

impl Spaces {
    pub fn of(program: &Program, ranked: &RankProgram) -> Self {
        let mut spaces = Self { spaces: vec![], of_tile: Vec::with_capacity(ranked.tiles.len()) };
        let mut known: FxHashMap<(u32, u32, Map), u32> = FxHashMap::default();
        for (i, tile) in (0..).zip(&ranked.tiles) {
            let map = Map::of(program, tile);
            let element = program.tensors[tile.tensor as usize].dtype.bytes();
            let spans = program.boxes[tile.region].spans();
            let next = spaces.spaces.len() as u32;
            let keeps_apart = |space: &u32| {
                let bounds = hull(&spaces.spaces[*space as usize].bounds, spans);
                map.keeps_apart(&bounds, element).then_some(*space)
            };
            let joined = known.get(&(tile.buffer, tile.tensor, map.clone())).and_then(keeps_apart);
            let space = joined.unwrap_or(next);
            if space == next {
                known.insert((tile.buffer, tile.tensor, map), next);
                let (tensor, buffer, bounds) = (tile.tensor, tile.buffer, spans.to_vec());
                spaces.spaces.push(Space {
                    tensor,
                    buffer,
                    bounds,
                    extent: (u64::MAX, 0),
                    ..Space::default()
                });
            }
            let bounds = hull(&spaces.spaces[space as usize].bounds, spans);
            spaces.spaces[space as usize].bounds = bounds;
            let (start, end) = extent(program, tile);
            let space_of = &mut spaces.spaces[space as usize];
            space_of.tiles.push(i);
            space_of.extent = (space_of.extent.0.min(start), space_of.extent.1.max(end));
            spaces.of_tile.push(space);
        }
        spaces.find_sharing(program, ranked);
        spaces
    }

    /// Marks spaces that have bytes in common with others. Mostly none have, which is seen at a glance.
    fn find_sharing(&mut self, program: &Program, ranked: &RankProgram) {
        let mut by_place: Vec<(u32, (u64, u64))> =
            ranked.tiles.iter().map(|tile| (tile.buffer, extent(program, tile))).collect();
        by_place.sort_unstable();
        if by_place.windows(2).all(|w| w[0].0 != w[1].0 || w[0].1.1 <= w[1].1.0) {
            return;
        }
        let mut by_place: Vec<u32> = (0..self.spaces.len() as u32).collect();
        by_place.sort_by_key(|s| (self.spaces[*s as usize].buffer, self.spaces[*s as usize].extent));
        let mut reaching: Vec<u32> = vec![];
        for space in by_place {
            let Space { buffer, extent, .. } = self.spaces[space as usize];
            reaching.retain(|other| {
                let other = &self.spaces[*other as usize];
                other.buffer == buffer && other.extent.1 > extent.0
            });
            // One that shares is enough: who shares with whom is asked again when something is written.
            for other in reaching.clone() {
                let known = self.spaces[space as usize].shares && self.spaces[other as usize].shares;
                if !known && self.meet(program, ranked, space, other) {
                    self.spaces[space as usize].shares = true;
                    self.spaces[other as usize].shares = true;
                }
            }
            reaching.push(space);
        }
    }

    /// Whether two spaces have a byte in common.
    pub fn meet(&self, program: &Program, ranked: &RankProgram, a: u32, b: u32) -> bool {
        let (a, b) = (&self.spaces[a as usize], &self.spaces[b as usize]);
        let tile = |t: &u32| &ranked.tiles[*t as usize];
        a.buffer == b.buffer
            && a.tiles.iter().any(|x| b.tiles.iter().any(|y| tiles_meet(program, tile(x), tile(y))))
    }
}

/// Where a tensor's elements would lie if there were all of them: the address of the first one, and the strides. Dims of one
/// element have none.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Map {
    origin: i128,
    strides: Vec<u64>,
}

impl Map {
    fn of(program: &Program, tile: &Tile) -> Self {
        let region = &program.boxes[tile.region];
        let strides = strides(program, tile);
        let steps =
            region.spans().iter().zip(&strides).map(|(s, stride)| i128::from(s.start) * i128::from(*stride));
        Self { origin: i128::from(tile.offset) - steps.sum::<i128>(), strides }
    }
}

impl Map {
    /// Whether no two elements of a box have an address in common: a stride leads beyond all that smaller ones reach.
    fn keeps_apart(&self, bounds: &[Span], element: u64) -> bool {
        let dims = self.strides.iter().zip(bounds).map(|(stride, span)| (*stride, span.len()));
        let mut dims: Vec<(u64, u64)> = dims.filter(|(_, len)| *len > 1).collect();
        dims.sort_unstable();
        let mut reach = u128::from(element);
        dims.into_iter().all(|(stride, len)| {
            let apart = u128::from(stride) >= reach;
            reach += u128::from(stride) * u128::from(len - 1);
            apart
        })
    }
}

/// The smallest box around two.
fn hull(a: &[Span], b: &[Span]) -> Vec<Span> {
    a.iter().zip(b).map(|(a, b)| Span::new(a.start.min(b.start), a.end.max(b.end))).collect()
}

fn strides(program: &Program, tile: &Tile) -> Vec<u64> {
    if let Some(strides) = &tile.strides {
        return strides.to_vec();
    }
    let spans = program.boxes[tile.region].spans();
    let mut stride = program.tensors[tile.tensor as usize].dtype.bytes();
    let mut strides = vec![0; spans.len()];
    for (span, of_dim) in spans.iter().zip(&mut strides).rev() {
        *of_dim = stride;
        stride *= span.len();
    }
    strides
}

/// A tile's first byte, and the one behind its last.
pub fn extent(program: &Program, tile: &Tile) -> (u64, u64) {
    let region = &program.boxes[tile.region];
    let element = program.tensors[tile.tensor as usize].dtype.bytes();
    let len = match &tile.strides {
        None => region.volume() * element,
        Some(strides) => {
            let steps = strides.iter().zip(region.spans()).map(|(stride, span)| stride * (span.len() - 1));
            steps.sum::<u64>() + element
        }
    };
    (tile.offset, tile.offset + len)
}

fn tiles_meet(program: &Program, a: &Tile, b: &Tile) -> bool {
    let ((a_start, a_end), (b_start, b_end)) = (extent(program, a), extent(program, b));
    if a_start >= b_end || b_start >= a_end {
        return false;
    }
    // A row without gaps has no holes for another to be in.
    (a.strides.is_none() && b.strides.is_none())
        || share_a_place(&bytes_of(program, a), &bytes_of(program, b))
}

/// A tile as a box of bytes: the bytes of an element are its innermost dim.
fn bytes_of(program: &Program, tile: &Tile) -> HeldBox {
    let element = program.tensors[tile.tensor as usize].dtype.bytes();
    let mut spans = program.boxes[tile.region].spans().to_vec();
    spans.push(Span::new(0, element));
    let mut strides = strides(program, tile);
    strides.push(1);
    HeldBox { region: Region::new(spans), offset_elements: tile.offset, strides }
}
