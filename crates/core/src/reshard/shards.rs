//! A placed layout, looked up: whether a rank holds a box, without listing anybody's boxes.
//!
//! A shard is a product of spans per dim, so a box lies in it exactly if every span of the box lies in one of the
//! shard's spans of that dim:
//!
//! ```text
//! (tp of 4+2, tp), rank 0      dim 0   0:2 and 4:5        [4:5, 0:3] lies in the shard: 4:5 in 4:5 and 0:3 in 0:3
//!                              dim 1   0:3                [1:3, 0:3] does not: 1:3 is in neither span
//! ```
//!
//! Where a layout lists boxes, an index over each rank's says which of them a box meets.

use rustc_hash::FxHashMap;

use crate::box_index::BoxIndex;
use crate::id::Rank;
use crate::layout::{ByAxes, Layout, boxes};
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

    /// What tensors with the same layouts on the same ranks have in common: a number below [`AllSides::num_kinds`].
    pub fn kind(&self, tensor: u32) -> usize {
        self.kind_of[tensor as usize] as usize
    }

    pub fn num_kinds(&self) -> usize {
        self.kinds.len()
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
    held: Held,
    /// By place in the mesh: its part of the partial sum.
    contributions: Vec<u32>,
    num_contributions: usize,
}

/// What the places of the mesh hold.
#[derive(Debug)]
enum Held {
    Spans(SpanShards),
    Boxes(BoxShards),
}

const ABSENT: u32 = u32::MAX;

impl Shards {
    pub fn new(placed: &Placed, num_ranks: usize) -> Self {
        let layout = &placed.layout;
        let mut positions = vec![ABSENT; num_ranks];
        for (position, rank) in placed.ranks.iter().enumerate() {
            positions[rank.index()] = position as u32;
        }
        let contribution = |position| layout.contribution_at(&layout.mesh().coord(position)) as u32;
        let held = match layout.by_axes() {
            Some(split) => Held::Spans(SpanShards::new(layout, split)),
            None => Held::Boxes(BoxShards::new(layout)),
        };
        Self {
            positions,
            held,
            contributions: (0..layout.mesh().len()).map(contribution).collect(),
            num_contributions: layout.num_contributions(),
        }
    }

    /// The rank's place in the mesh.
    pub fn position(&self, rank: Rank) -> Option<usize> {
        let position = *self.positions.get(rank.index())?;
        (position != ABSENT).then_some(position as usize)
    }

    /// Whether the whole box lies in one box of the rank's shard.
    pub fn contains(&self, rank: Rank, region: &Region) -> bool {
        let Some(position) = self.position(rank) else { return false };
        match &self.held {
            Held::Spans(spans) => spans.contains(position, region),
            Held::Boxes(boxes) => boxes.at(position).index.any_contains(region.spans()),
        }
    }

    /// Whether some of the box lies in the rank's shard.
    pub fn overlaps(&self, rank: Rank, region: &Region) -> bool {
        let Some(position) = self.position(rank) else { return false };
        match &self.held {
            Held::Spans(spans) => spans.overlaps(position, region),
            Held::Boxes(boxes) => boxes.at(position).index.any_meets(region.spans()),
        }
    }

    /// What tells shards apart: two ranks with equal tiles hold the same. None outside the mesh.
    pub fn tile(&self, rank: Rank) -> Option<&[u32]> {
        let position = self.position(rank)?;
        Some(match &self.held {
            Held::Spans(spans) => spans.tile(position),
            Held::Boxes(boxes) => &boxes.kind_of[position..=position],
        })
    }

    /// The rank's boxes, none of them overlapping another; none at all where it holds nothing.
    pub fn boxes(&self, rank: Rank) -> Vec<Region> {
        match (self.position(rank), &self.held) {
            (None, _) => vec![],
            (Some(position), Held::Spans(spans)) => spans.boxes(position),
            (Some(position), Held::Boxes(boxes)) => boxes.at(position).apart.clone(),
        }
    }

    /// The parts of the box that lie in the rank's shard, none of them overlapping another.
    pub fn common(&self, rank: Rank, region: &Region) -> Vec<Region> {
        match (self.position(rank), &self.held) {
            (None, _) => vec![],
            (Some(position), Held::Spans(spans)) => spans.common(position, region),
            (Some(position), Held::Boxes(boxes)) => boxes.at(position).common(region),
        }
    }

    /// Which part of a partial sum the rank holds, if it holds anything.
    pub fn contribution(&self, rank: Rank) -> Option<u32> {
        self.position(rank).map(|position| self.contributions[position])
    }

    /// Whether ranks hold parts of a sum rather than values.
    pub fn is_partial(&self) -> bool {
        self.num_contributions > 1
    }

    pub fn num_contributions(&self) -> usize {
        self.num_contributions
    }
}

/// Shards of splits: products of spans.
#[derive(Debug)]
struct SpanShards {
    num_dims: usize,
    /// By place in the mesh and dim: which of `part_starts` it holds.
    parts: Vec<u32>,
    /// Part `p` holds `spans[part_starts[p]..part_starts[p + 1]]`.
    part_starts: Vec<u32>,
    spans: Vec<Span>,
    /// By place in the mesh and dim: its one span. Empty unless every part has exactly one, as all but fused and empty
    /// parts have.
    only: Vec<Span>,
}

impl SpanShards {
    fn new(layout: &Layout, split: ByAxes) -> Self {
        let (num_dims, devices) = (layout.shape().len(), layout.mesh().len());
        let parts = Vec::with_capacity(devices * num_dims);
        let mut shards = Self { num_dims, parts, part_starts: vec![0], spans: vec![], only: vec![] };
        let first_parts: Vec<u32> = (0..num_dims).map(|dim| shards.add_dim(&split.part_spans(dim))).collect();
        for position in 0..devices {
            let coord = layout.mesh().coord(position);
            let parts = (0..num_dims).map(|dim| first_parts[dim] + split.part_at(dim, &coord) as u32);
            shards.parts.extend(parts);
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

    fn tile(&self, position: usize) -> &[u32] {
        &self.parts[position * self.num_dims..][..self.num_dims]
    }

    fn dims(&self, position: usize) -> impl Iterator<Item = &[Span]> {
        self.tile(position).iter().map(|&part| {
            let (start, end) = (self.part_starts[part as usize], self.part_starts[part as usize + 1]);
            &self.spans[start as usize..end as usize]
        })
    }

    fn contains(&self, position: usize, region: &Region) -> bool {
        if !self.only.is_empty() {
            let held = &self.only[position * self.num_dims..][..self.num_dims];
            return held.iter().zip(region.spans()).all(|(h, span)| h.contains(*span));
        }
        self.dims(position).zip(region.spans()).all(|(held, span)| held.iter().any(|h| h.contains(*span)))
    }

    fn overlaps(&self, position: usize, region: &Region) -> bool {
        let mut dims = self.dims(position).zip(region.spans());
        dims.all(|(held, span)| held.iter().any(|h| h.intersect(*span).is_some()))
    }

    fn boxes(&self, position: usize) -> Vec<Region> {
        boxes(&self.dims(position).collect::<Vec<_>>()).into_iter().filter(|b| !b.is_empty()).collect()
    }

    fn common(&self, position: usize, region: &Region) -> Vec<Region> {
        let common: Vec<Vec<Span>> = self
            .dims(position)
            .zip(region.spans())
            .map(|(held, span)| held.iter().filter_map(|h| h.intersect(*span)).collect())
            .collect();
        boxes(&common.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }
}

/// Shards that are listed, box by box.
#[derive(Debug)]
struct BoxShards {
    kinds: Vec<BoxShard>,
    /// By place in the mesh.
    kind_of: Vec<u32>,
}

#[derive(Debug)]
struct BoxShard {
    /// The boxes as they are listed.
    index: BoxIndex,
    /// The same elements, each in one box. As listed, unless a rank lists some elements twice.
    apart: Vec<Region>,
    apart_index: BoxIndex,
}

impl BoxShards {
    fn new(layout: &Layout) -> Self {
        let table = layout.by_boxes().expect("what is not split by axes is listed by boxes");
        let kinds = table.kinds().iter().map(|held| BoxShard::new(held.iter().map(|h| &h.region)));
        Self {
            kinds: kinds.collect(),
            kind_of: (0..layout.mesh().len()).map(|position| table.kind(position) as u32).collect(),
        }
    }

    fn at(&self, position: usize) -> &BoxShard {
        &self.kinds[self.kind_of[position] as usize]
    }
}

impl BoxShard {
    fn new<'a>(regions: impl ExactSizeIterator<Item = &'a Region> + Clone) -> Self {
        let index = BoxIndex::new(regions.clone());
        if index.first_overlap().is_none() {
            let apart: Vec<Region> = regions.cloned().collect();
            return Self { apart_index: index.clone(), index, apart };
        }
        let mut apart: Vec<Region> = Vec::new();
        for region in regions {
            let mut left = vec![region.clone()];
            for known in apart.iter().filter(|known| known.overlaps(region)) {
                left = left.iter().flat_map(|part| part.subtract(known)).collect();
            }
            apart.extend(left);
        }
        Self { index, apart_index: BoxIndex::new(apart.iter()), apart }
    }

    fn common(&self, region: &Region) -> Vec<Region> {
        let meeting = self.apart_index.meeting(region.spans()).into_iter();
        meeting.filter_map(|i| self.apart[i as usize].intersect(region)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reshard::Problem;

    #[test]
    fn agrees_with_the_layout_on_every_box() {
        agree("f32[6,5]@A{tp:2,dp:2}(tp of 4+2,dp)", "f32[6,5]@B{tp:3}(tp,_)");
        let boxes = "{0: [0:4, 1:3] [4:6, 0:5]; 2: [0:1, 0:1]; 3: [0:6, 0:5]}";
        agree(&format!("f32[6,5]@A{{x:4}}{boxes}"), "f32[6,5]@B{x:3}{1: [0:6, 0:2] [2:6, 2:5]}");
    }

    #[test]
    fn what_a_rank_lists_twice_it_has_once() {
        let src = "f32[6]@A{x:1}{0: [0:4] [2:6]}".parse().unwrap();
        let problem = Problem::pair(src, "f32[6]@B{x:1}(_)".parse().unwrap()).unwrap();
        let shards = Shards::new(&problem.reshards[0].src, 2);
        let (whole, middle) = (Region::whole(&[6]), Region::new(vec![Span::new(2, 5)]));
        assert_eq!(shards.common(Rank(0), &whole).iter().map(Region::volume).sum::<u64>(), 6);
        assert_eq!(shards.boxes(Rank(0)).iter().map(Region::volume).sum::<u64>(), 6);
        assert!(shards.contains(Rank(0), &middle) && !shards.contains(Rank(0), &whole));
    }

    fn agree(src: &str, dst: &str) {
        let problem = Problem::pair(src.parse().unwrap(), dst.parse().unwrap()).unwrap();
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
                    let contains = held.iter().any(|h| h.contains(&asked));
                    assert_eq!(shards.contains(rank, &asked), contains);
                    assert_eq!(shards.overlaps(rank, &asked), common > 0);
                    assert_eq!(shards.common(rank, &asked).iter().map(Region::volume).sum::<u64>(), common);
                }
            }
        }
    }
}
