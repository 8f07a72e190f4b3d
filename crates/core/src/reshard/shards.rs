//! A placed layout, looked up: whether a rank holds a box, without listing anybody's boxes.
//!
//! A shard is a product of spans per dim, so a box lies in it exactly if every span of the box lies in one of the
//! shard's spans of that dim:
//!
//! ```text
//! (tp of 4+2, tp), rank 0      dim 0   0:2 and 4:5        [4:5, 0:3] lies in the shard: 4:5 in 4:5 and 0:3 in 0:3
//!                              dim 1   0:3                [1:3, 0:3] does not: 1:3 is in neither span
//! ```

use rustc_hash::FxHashMap;

use crate::id::Rank;
use crate::layout::{Layout, boxes};
use crate::region::{Region, Span};

use super::problem::{Placed, Problem, Reshard};

/// Both layouts of a tensor, looked up.
#[derive(Debug)]
pub struct Sides {
    pub src: Shards,
    pub dst: Shards,
}

/// Both layouts of every tensor. A model has few layouts and many tensors: those alike share one look-up.
#[derive(Debug, Default)]
pub struct AllSides {
    kinds: Vec<Sides>,
    /// By tensor.
    kind_of: Vec<u32>,
}

impl AllSides {
    pub fn of(problem: &Problem) -> Self {
        type Key<'a> = (&'a Layout, &'a [Rank], &'a Layout, &'a [Rank]);
        let num_ranks = problem.topology.num_ranks();
        let mut known: FxHashMap<Key, u32> = FxHashMap::default();
        let mut all = Self::default();
        for Reshard { src, dst, .. } in &problem.reshards {
            let kind =
                *known.entry((&src.layout, &src.ranks, &dst.layout, &dst.ranks)).or_insert_with(|| {
                    all.kinds
                        .push(Sides { src: Shards::new(src, num_ranks), dst: Shards::new(dst, num_ranks) });
                    all.kinds.len() as u32 - 1
                });
            all.kind_of.push(kind);
        }
        all
    }

    pub fn tensor(&self, tensor: u32) -> &Sides {
        &self.kinds[self.kind_of[tensor as usize] as usize]
    }

    /// Of every tensor, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Sides> {
        self.kind_of.iter().map(|&kind| &self.kinds[kind as usize])
    }

    /// Whether some tensor is a partial sum.
    pub fn any_partial(&self) -> bool {
        self.kinds.iter().any(|s| s.src.is_partial())
    }
}

/// The shard of every rank under one placed layout.
#[derive(Debug)]
pub struct Shards {
    /// By rank: its place in the mesh, or `ABSENT`.
    positions: Vec<u32>,
    num_dims: usize,
    /// By place in the mesh and dim: which of `part_starts` it holds.
    parts: Vec<u32>,
    /// Part `p` holds `spans[part_starts[p]..part_starts[p + 1]]`.
    part_starts: Vec<u32>,
    spans: Vec<Span>,
    /// By place in the mesh and dim: its one span. Empty unless every part has exactly one, as all but fused and empty
    /// parts have.
    only: Vec<Span>,
    /// By place in the mesh: its part of the partial sum.
    contributions: Vec<u32>,
    num_contributions: usize,
}

const ABSENT: u32 = u32::MAX;

impl Shards {
    pub fn new(placed: &Placed, num_ranks: usize) -> Self {
        let layout = &placed.layout;
        let num_dims = layout.shape().len();
        let mut shards = Self {
            positions: vec![ABSENT; num_ranks],
            num_dims,
            parts: Vec::with_capacity(placed.ranks.len() * num_dims),
            part_starts: vec![0],
            spans: vec![],
            only: vec![],
            contributions: Vec::with_capacity(placed.ranks.len()),
            num_contributions: layout.num_contributions(),
        };
        let first_parts: Vec<u32> =
            (0..num_dims).map(|dim| shards.add_dim(&layout.part_spans(dim))).collect();
        for (position, rank) in placed.ranks.iter().enumerate() {
            let coord = layout.mesh().coord(position);
            shards.positions[rank.index()] = position as u32;
            let parts = (0..num_dims).map(|dim| first_parts[dim] + layout.part_at(dim, &coord) as u32);
            shards.parts.extend(parts);
            shards.contributions.push(layout.contribution_at(&coord) as u32);
        }
        if shards.spans.len() + 1 == shards.part_starts.len() && shards.part_starts.is_sorted_by(|a, b| a < b)
        {
            shards.only = shards.parts.iter().map(|&part| shards.spans[part as usize]).collect();
        }
        shards
    }

    /// Adds a dim's parts and says where they start.
    fn add_dim(&mut self, parts: &[Vec<Span>]) -> u32 {
        let first = self.part_starts.len() as u32 - 1;
        for spans in parts {
            self.spans.extend_from_slice(spans);
            self.part_starts.push(self.spans.len() as u32);
        }
        first
    }

    fn dims(&self, rank: Rank) -> Option<impl Iterator<Item = &[Span]>> {
        Some(self.tile(rank)?.iter().map(|&part| {
            let (start, end) = (self.part_starts[part as usize], self.part_starts[part as usize + 1]);
            &self.spans[start as usize..end as usize]
        }))
    }

    /// Whether the whole box lies in the rank's shard.
    pub fn contains(&self, rank: Rank, region: &Region) -> bool {
        let Some(&position) = self.positions.get(rank.index()) else { return false };
        if !self.only.is_empty() && position != ABSENT {
            let held = &self.only[position as usize * self.num_dims..][..self.num_dims];
            return held.iter().zip(region.spans()).all(|(h, span)| h.contains(*span));
        }
        let Some(dims) = self.dims(rank) else { return false };
        dims.zip(region.spans()).all(|(held, span)| held.iter().any(|h| h.contains(*span)))
    }

    /// Whether some of the box lies in the rank's shard.
    pub fn overlaps(&self, rank: Rank, region: &Region) -> bool {
        let Some(dims) = self.dims(rank) else { return false };
        dims.zip(region.spans()).all(|(held, span)| held.iter().any(|h| h.intersect(*span).is_some()))
    }

    /// What tells shards apart: two ranks with equal tiles hold the same. None outside the mesh.
    pub fn tile(&self, rank: Rank) -> Option<&[u32]> {
        let position = *self.positions.get(rank.index())?;
        (position != ABSENT).then(|| &self.parts[position as usize * self.num_dims..][..self.num_dims])
    }

    /// The rank's boxes; none where it holds nothing.
    pub fn boxes(&self, rank: Rank) -> Vec<Region> {
        match self.dims(rank) {
            Some(dims) => boxes(&dims.collect::<Vec<_>>()).into_iter().filter(|b| !b.is_empty()).collect(),
            None => vec![],
        }
    }

    /// The parts of the box that lie in the rank's shard.
    pub fn common(&self, rank: Rank, region: &Region) -> Vec<Region> {
        let Some(dims) = self.dims(rank) else { return vec![] };
        let common: Vec<Vec<Span>> = dims
            .zip(region.spans())
            .map(|(held, span)| held.iter().filter_map(|h| h.intersect(*span)).collect())
            .collect();
        boxes(&common.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }

    /// Which part of a partial sum the rank holds, if it holds anything.
    pub fn contribution(&self, rank: Rank) -> Option<u32> {
        let position = *self.positions.get(rank.index())?;
        (position != ABSENT).then(|| self.contributions[position as usize])
    }

    /// Whether ranks hold parts of a sum rather than values.
    pub fn is_partial(&self) -> bool {
        self.num_contributions > 1
    }

    pub fn num_contributions(&self) -> usize {
        self.num_contributions
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reshard::Problem;

    #[test]
    fn agrees_with_the_layout_on_every_box() {
        let src = "f32[6,5]@A{tp:2,dp:2}(tp of 4+2,dp)".parse().unwrap();
        let problem = Problem::pair(src, "f32[6,5]@B{tp:3}(tp,_)".parse().unwrap()).unwrap();
        for placed in [&problem.reshards[0].src, &problem.reshards[0].dst] {
            let shards = Shards::new(placed, problem.topology.num_ranks());
            for rank in (0..7).map(Rank) {
                let held = placed.ranks.iter().position(|r| *r == rank);
                let held = held.map_or(vec![], |p| placed.layout.shard_at(&placed.layout.mesh().coord(p)));
                assert_eq!(shards.boxes(rank), held);
                for (a, b, c, d) in (0..6 * 6 * 5 * 5).map(|i| (i % 6, i / 6 % 6, i / 36 % 5, i / 180)) {
                    if b < a || d < c {
                        continue;
                    }
                    let asked = Region::new(vec![Span::new(a, b + 1), Span::new(c, d + 1)]);
                    let common: u64 =
                        held.iter().filter_map(|h| h.intersect(&asked)).map(|r| r.volume()).sum();
                    assert_eq!(shards.contains(rank, &asked), common == asked.volume());
                    assert_eq!(shards.overlaps(rank, &asked), common > 0);
                    assert_eq!(shards.common(rank, &asked).iter().map(Region::volume).sum::<u64>(), common);
                }
            }
        }
    }
}
