//! Whether a program starts from a problem's sources and ends in its destinations. Read from the layouts alone.

use rustc_hash::FxHashMap;

use crate::id::Rank;
use crate::program::{Holds, Program, Tile};
use crate::region::Region;
use crate::reshard::{Placed, Problem};

use super::error::VerifyError;

pub fn check(program: &Program, problem: &Problem) -> Result<(), VerifyError> {
    let mut found = FxHashMap::<(u32, u32, bool), Vec<&Tile>>::default();
    for (rank, ranked) in (0..).zip(&program.ranks) {
        for tile in &ranked.tiles {
            match tile.holds {
                Holds::Source(_) => found.entry((rank, tile.tensor, false)).or_default().push(tile),
                Holds::Goal => found.entry((rank, tile.tensor, true)).or_default().push(tile),
                Holds::Transit | Holds::Made(_) => {}
            }
        }
    }
    for (tensor, reshard) in (0..).zip(&problem.reshards) {
        for (placed, goal) in [(&reshard.src, false), (&reshard.dst, true)] {
            check_side(program, tensor, placed, goal, &mut found)?;
        }
    }
    match found.keys().min() {
        None => Ok(()),
        Some(&(rank, tensor, goal)) => Err(other_layout(Rank(rank), tensor, goal)),
    }
}

/// Takes what a layout asks for out of what was found.
fn check_side(
    program: &Program,
    tensor: u32,
    placed: &Placed,
    goal: bool,
    found: &mut FxHashMap<(u32, u32, bool), Vec<&Tile>>,
) -> Result<(), VerifyError> {
    for (position, &rank) in placed.ranks.iter().enumerate() {
        let coord = placed.layout.mesh().coord(position);
        let mut wanted: Vec<Region> =
            placed.layout.shard_at(&coord).into_iter().filter(|b| !b.is_empty()).collect();
        let mut tiles = found.remove(&(rank.0, tensor, goal)).unwrap_or_default();
        wanted.sort_unstable();
        tiles.sort_by_key(|t| &program.boxes[t.region]);
        let part = placed.layout.contribution_at(&coord) as u32;
        let right = |(tile, wanted): (&&Tile, &Region)| {
            program.boxes[tile.region] == *wanted && (goal || tile.holds == Holds::Source(part))
        };
        if tiles.len() != wanted.len() || !tiles.iter().zip(&wanted).all(right) {
            return Err(other_layout(rank, tensor, goal));
        }
    }
    Ok(())
}

fn other_layout(rank: Rank, tensor: u32, goal: bool) -> VerifyError {
    VerifyError::OtherLayout { rank, tensor, side: if goal { "destination" } else { "source" } }
}
