//! Unit tasks: all that one source tile has for one destination tile.
//!
//! ```text
//! source tiles   | s0 | s1 |        tasks, destination tile major:
//! dest. tiles    |d0|d1 |d2|        (d0,s0) (d1,s0) (d1,s1) (d2,s1)
//! ```
//!
//! A task is one box, or several where parts are fused or listed. Any device of the source tile may send it, and every device of
//! the destination tile that does not hold it already has to get it. The baselines plan whole tasks; only `flow` cuts
//! them up.

use std::ops::Range;

use crate::id::Rank;
use crate::region::Region;

use super::pieces::{Pieces, Tile};
use super::problem::{PlanError, Problem};

/// Every box that source tile `src_tile` has for destination tile `dst_tile`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct UnitTask {
    pub src_tile: u32,
    pub dst_tile: u32,
    /// Byte-exact: what moves, not the size of the source tile it is cut from.
    pub bytes: u64,
    boxes: Range<usize>,
}

/// One tensor's unit tasks, destination tile major, source tile minor.
#[derive(Debug)]
pub(super) struct UnitTasks {
    pub tensor: u32,
    pub src_tiles: Vec<Tile>,
    pub dst_tiles: Vec<Tile>,
    pub tasks: Vec<UnitTask>,
    pub elem_bytes: u64,
    boxes: Vec<Region>,
    /// The source tiles of every rank of the cluster, rising.
    tiles_held: Vec<Vec<u32>>,
}

impl UnitTasks {
    pub fn of(problem: &Problem, tensor: u32) -> Result<Self, PlanError> {
        let reshard = &problem.reshards[tensor as usize];
        let Pieces { src_tiles, dst_tiles, mut pieces } = Pieces::of(reshard)?;
        pieces.sort_by_key(|p| (p.dst_tile, p.src_tile));
        let mut tiles_held = vec![vec![]; problem.topology.num_ranks()];
        for (tile, holders) in src_tiles.iter().enumerate() {
            for rank in &holders.ranks {
                tiles_held[rank.index()].push(tile as u32);
            }
        }
        let elem_bytes = reshard.src.layout.dtype().bytes();
        let mut tasks: Vec<UnitTask> = Vec::new();
        for (i, piece) in pieces.iter().enumerate() {
            let bytes = piece.region.volume() * elem_bytes;
            match tasks.last_mut() {
                Some(t) if (t.dst_tile, t.src_tile) == (piece.dst_tile, piece.src_tile) => {
                    t.boxes.end = i + 1;
                    t.bytes += bytes;
                }
                _ => tasks.push(UnitTask {
                    src_tile: piece.src_tile,
                    dst_tile: piece.dst_tile,
                    bytes,
                    boxes: i..i + 1,
                }),
            }
        }
        let boxes = pieces.into_iter().map(|p| p.region).collect();
        Ok(Self { tensor, src_tiles, dst_tiles, tasks, elem_bytes, boxes, tiles_held })
    }

    /// The tasks of every tensor of a problem, refused where they would make more than [`MAX_TRANSFERS`].
    pub fn of_all(problem: &Problem) -> Result<Vec<Self>, PlanError> {
        let all: Vec<Self> = (0..problem.reshards.len())
            .map(|tensor| Self::of(problem, tensor as u32))
            .collect::<Result<_, _>>()?;
        let deliveries = |units: &Self, task: &UnitTask| units.boxes(task).len() * units.wanters(task).len();
        let count: usize =
            all.iter().map(|units| units.tasks.iter().map(|t| deliveries(units, t)).sum::<usize>()).sum();
        if count > MAX_TRANSFERS {
            return Err(PlanError::TooLarge { what: "transfers", limit: MAX_TRANSFERS as u64 });
        }
        Ok(all)
    }

    /// The tasks of one destination tile.
    pub fn tasks_of(&self, dst_tile: usize) -> &[UnitTask] {
        let start = self.tasks.partition_point(|t| (t.dst_tile as usize) < dst_tile);
        let len = self.tasks[start..].partition_point(|t| t.dst_tile as usize == dst_tile);
        &self.tasks[start..][..len]
    }

    pub fn boxes(&self, task: &UnitTask) -> &[Region] {
        &self.boxes[task.boxes.clone()]
    }

    /// Who may send, in mesh order.
    pub fn holders(&self, task: &UnitTask) -> &[Rank] {
        &self.src_tiles[task.src_tile as usize].ranks
    }

    fn wanters(&self, task: &UnitTask) -> &[Rank] {
        &self.dst_tiles[task.dst_tile as usize].ranks
    }

    /// Who has to receive, in mesh order: what a device holds never moves.
    pub fn receivers<'a>(&'a self, task: &'a UnitTask) -> impl Iterator<Item = Rank> + 'a {
        self.wanters(task).iter().copied().filter(|r| !self.holds(*r, task.src_tile))
    }

    pub fn holds(&self, rank: Rank, src_tile: u32) -> bool {
        self.tiles_held[rank.index()].binary_search(&src_tile).is_ok()
    }
}

/// A baseline plan with more transfers than this (some gigabytes of plan) is refused rather than made.
const MAX_TRANSFERS: usize = 1 << 26;

#[cfg(test)]
mod tests {
    use super::*;

    fn units(src: &str, dst: &str) -> UnitTasks {
        let problem = Problem::pair(src.parse().unwrap(), dst.parse().unwrap()).unwrap();
        UnitTasks::of(&problem, 0).unwrap()
    }

    #[test]
    fn tasks_run_destination_major_with_exact_bytes() {
        let u = units("f32[6,2]@A{tp:2}(tp,_)", "f32[6,2]@B{tp:3}(tp,_)");
        let found: Vec<_> = u.tasks.iter().map(|t| (t.dst_tile, t.src_tile, t.bytes)).collect();
        // A source tile is 24 B; none of these is.
        assert_eq!(found, [(0, 0, 16), (1, 0, 8), (1, 1, 8), (2, 1, 16)]);
    }

    #[test]
    fn fused_parts_make_one_task_of_several_boxes() {
        let u = units("f32[12]@A{tp:2}(tp of 8+4)", "f32[12]@B{tp:1}(_)");
        assert_eq!(u.tasks.len(), 2);
        let boxes: Vec<String> = u.boxes(&u.tasks[0]).iter().map(Region::to_string).collect();
        assert_eq!(boxes, ["[0:4]", "[8:10]"]);
        assert_eq!(u.tasks[0].bytes, 24);
    }

    #[test]
    fn a_holder_does_not_receive() {
        let u = units("f32[4]@A{tp:2}(tp)", "f32[4]@A{tp:2}(_)");
        let receivers: Vec<Vec<Rank>> = u.tasks.iter().map(|t| u.receivers(t).collect()).collect();
        assert_eq!(receivers, [[Rank(1)], [Rank(0)]]);
    }
}
