//! Whether a program starts from a problem's sources and ends in its destinations. Read from the layouts alone.

use std::cmp::Ordering;

use crate::id::Rank;
use crate::program::{Holds, Program, RankProgram};
use crate::region::Region;
use crate::reshard::{Placed, Problem};

use super::error::VerifyError;

/// A box that a rank is to hold at the start or at the end, or that its program says it holds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Held<'a> {
    pub tensor: u32,
    pub goal: bool,
    pub region: &'a Region,
    /// Of a source: which part of the tensor.
    pub part: u32,
}

pub fn check(program: &Program, problem: &Problem) -> Result<(), VerifyError> {
    let sides = Sides::of(problem);
    let num_ranks = sides.num_ranks.max(program.ranks.len() as u32);
    let nothing = RankProgram::default();
    let of = |rank: Rank| program.ranks.get(rank.index()).unwrap_or(&nothing);
    (0..num_ranks).map(Rank).try_for_each(|rank| check_rank(&sides, program, rank, of(rank)))
}

/// The same of one rank's part of a program.
pub fn check_rank(
    sides: &Sides,
    program: &Program,
    rank: Rank,
    ranked: &RankProgram,
) -> Result<(), VerifyError> {
    let (wanted, found) = (sides.wanted(rank), found(program, ranked));
    if found == wanted {
        return Ok(());
    }
    let differs = found.iter().zip(&wanted).find(|(found, wanted)| found != wanted);
    let held = match (differs, found.len().cmp(&wanted.len())) {
        (Some((found, wanted)), _) => found.min(wanted),
        (None, Ordering::Less) => &wanted[found.len()],
        (None, _) => &found[wanted.len()],
    };
    let side = if held.goal { "destination" } else { "source" };
    Err(VerifyError::OtherLayout { rank, tensor: held.tensor, side })
}

/// What a rank's tiles say, in order.
fn found<'a>(program: &'a Program, ranked: &RankProgram) -> Vec<Held<'a>> {
    let held = ranked.tiles.iter().filter_map(|tile| {
        let (goal, part) = match tile.holds {
            Holds::Source(part) => (false, part),
            Holds::Goal => (true, 0),
            Holds::Transit | Holds::Made(_) => return None,
        };
        Some(Held { tensor: tile.tensor, goal, region: &program.boxes[tile.region], part })
    });
    let mut held: Vec<Held> = held.collect();
    if !held.is_sorted() {
        held.sort_unstable();
    }
    held
}

/// All sides of all tensors. Tensors that are laid out alike share one list of boxes: a model has many of a kind.
pub struct Sides<'a> {
    kinds: Vec<Kind<'a>>,
    /// By tensor: the kinds of its source and of its destination.
    of_tensor: Vec<[usize; 2]>,
    /// No layout names a rank beyond.
    pub num_ranks: u32,
}

struct Kind<'a> {
    placed: &'a Placed,
    /// By rank, as far as they go: its position, or [`NOT_THERE`].
    positions: Vec<u32>,
    /// By position: its boxes, sorted, and its part.
    held: Vec<(Vec<Region>, u32)>,
}

const NOT_THERE: u32 = u32::MAX;

impl<'a> Sides<'a> {
    pub fn of(problem: &'a Problem) -> Self {
        let mut sides = Self { kinds: vec![], of_tensor: vec![], num_ranks: 0 };
        for reshard in &problem.reshards {
            let kinds = [&reshard.src, &reshard.dst].map(|placed| sides.kind(placed));
            sides.of_tensor.push(kinds);
        }
        sides.num_ranks = sides.kinds.iter().map(|kind| kind.positions.len() as u32).max().unwrap_or(0);
        sides
    }

    fn kind(&mut self, placed: &'a Placed) -> usize {
        let alike = |kind: &Kind| kind.placed.ranks == placed.ranks && kind.placed.layout == placed.layout;
        self.kinds.iter().position(alike).unwrap_or_else(|| {
            self.kinds.push(Kind::of(placed));
            self.kinds.len() - 1
        })
    }

    /// What the layouts ask of a rank, in order.
    pub fn wanted(&self, rank: Rank) -> Vec<Held<'_>> {
        let mut wanted = vec![];
        for (tensor, kinds) in (0..).zip(&self.of_tensor) {
            for (kind, goal) in kinds.iter().zip([false, true]) {
                let kind = &self.kinds[*kind];
                let Some(&position) = kind.positions.get(rank.index()) else { continue };
                let Some((boxes, part)) = kind.held.get(position as usize) else { continue };
                let part = if goal { 0 } else { *part };
                wanted.extend(boxes.iter().map(|region| Held { tensor, goal, region, part }));
            }
        }
        wanted
    }
}

impl<'a> Kind<'a> {
    fn of(placed: &'a Placed) -> Self {
        let layout = &placed.layout;
        let num_ranks = placed.ranks.iter().map(|rank| rank.index() + 1).max().unwrap_or(0);
        let mut positions = vec![NOT_THERE; num_ranks];
        let mut held = Vec::with_capacity(placed.ranks.len());
        for (position, &rank) in (0..).zip(&placed.ranks) {
            let coord = layout.mesh().coord(position as usize);
            let mut boxes: Vec<Region> =
                layout.shard_at(&coord).into_iter().filter(|b| !b.is_empty()).collect();
            boxes.sort_unstable();
            held.push((boxes, layout.contribution_at(&coord) as u32));
            positions[rank.index()] = position;
        }
        Self { placed, positions, held }
    }
}
