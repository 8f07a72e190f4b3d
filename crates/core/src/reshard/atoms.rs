//! Atoms: a layout's boxes cut up until no two overlap, each with all its holders.
//!
//! Boxes that only replicas share are atoms as they are. Boxes that overlap otherwise are cut along their edges until
//! every part lies inside or outside of each:
//!
//! ```text
//! r0   |- - - - - -|                 0:4   held by r0
//! r1         |- - - - - -|           4:6   held by r0 and r1
//!      0     4     6     10          6:10  held by r1
//! ```
//!
//! A part is cut where the fewest boxes are cut with it, in the middle if several places are as good.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

use crate::box_index::{BoxIndex, Visit};
use crate::layout::Layout;
use crate::region::{Region, Span};

use super::pieces::MAX_PIECES;
use super::problem::PlanError;

/// Looking at more boxes than this, counted at every cut, is refused: so many overlap that nobody could use the plan.
const MAX_LOOKS: u64 = 1 << 30;

/// A box whose every element the same positions hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Atom {
    pub region: Region,
    /// Rising positions of the mesh.
    pub holders: Vec<u32>,
}

/// The atoms of a layout, by region.
pub(super) fn atoms(layout: &Layout) -> Result<Vec<Atom>, PlanError> {
    atoms_of(layout, |_| true)
}

/// The atoms of what some positions of a layout hold.
pub(super) fn atoms_of(layout: &Layout, takes_part: impl Fn(usize) -> bool) -> Result<Vec<Atom>, PlanError> {
    let (regions, holders) = distinct_boxes(layout, takes_part);
    let index = BoxIndex::new(regions.iter());
    let mut atoms = Vec::with_capacity(regions.len());
    let mut cutter = Cutter { regions: &regions, parts: vec![], looks: 0 };
    for group in overlapping(&regions, &index) {
        match group[..] {
            [only] => atoms.push(Atom {
                region: regions[only as usize].clone(),
                holders: holders[only as usize].clone(),
            }),
            _ => cutter.cut_up(&group)?,
        }
    }
    atoms.extend(cutter.parts.into_iter().map(|(region, boxes)| {
        let all: BTreeSet<u32> = boxes.iter().flat_map(|&b| holders[b as usize].iter().copied()).collect();
        Atom { region, holders: all.into_iter().collect() }
    }));
    atoms.sort_unstable_by(|a, b| a.region.cmp(&b.region));
    Ok(atoms)
}

/// Every box that somebody holds, once, by region; and who does.
fn distinct_boxes(layout: &Layout, takes_part: impl Fn(usize) -> bool) -> (Vec<Region>, Vec<Vec<u32>>) {
    let mut holders: FxHashMap<Region, Vec<u32>> = FxHashMap::default();
    for position in (0..layout.mesh().len()).filter(|p| takes_part(*p)) {
        for region in layout.shard_at(&layout.mesh().coord(position)) {
            let known = holders.entry(region).or_default();
            if known.last() != Some(&(position as u32)) {
                known.push(position as u32);
            }
        }
    }
    let mut all: Vec<(Region, Vec<u32>)> = holders.into_iter().filter(|(r, _)| !r.is_empty()).collect();
    all.sort_unstable();
    all.into_iter().unzip()
}

/// The boxes in groups that no overlap connects, by first box.
fn overlapping(regions: &[Region], index: &BoxIndex) -> Vec<Vec<u32>> {
    let mut group_of = vec![u32::MAX; regions.len()];
    let mut groups: Vec<Vec<u32>> = Vec::new();
    for first in 0..regions.len() as u32 {
        if group_of[first as usize] != u32::MAX {
            continue;
        }
        let number = groups.len() as u32;
        let mut group = vec![first];
        group_of[first as usize] = number;
        let mut next = 0;
        while let Some(&at) = group.get(next) {
            next += 1;
            index.visit_meeting(regions[at as usize].spans(), |other, _| {
                if group_of[other as usize] == u32::MAX {
                    group_of[other as usize] = number;
                    group.push(other);
                }
                Visit::On
            });
        }
        group.sort_unstable();
        groups.push(group);
    }
    groups
}

/// Cuts overlapping boxes apart.
struct Cutter<'a> {
    regions: &'a [Region],
    /// Parts, and the boxes that each lies in.
    parts: Vec<(Region, Vec<u32>)>,
    looks: u64,
}

impl Cutter<'_> {
    fn cut_up(&mut self, group: &[u32]) -> Result<(), PlanError> {
        let mut todo = vec![(self.bounds(group), group.to_vec())];
        while let Some((part, boxes)) = todo.pop() {
            self.looks += boxes.len() as u64;
            if self.parts.len() as u64 >= MAX_PIECES || self.looks > MAX_LOOKS {
                return Err(PlanError::TooLarge { what: "overlapping boxes", limit: MAX_PIECES });
            }
            match self.best_cut(&part, &boxes) {
                None if boxes.is_empty() => {}
                None => self.parts.push((part, boxes)),
                Some((dim, at)) => {
                    let span = part.spans()[dim];
                    for half in [Span::new(at, span.end), Span::new(span.start, at)] {
                        let half = part.with_span(dim, half);
                        let inside =
                            boxes.iter().copied().filter(|&b| self.regions[b as usize].overlaps(&half));
                        let inside = inside.collect();
                        todo.push((half, inside));
                    }
                }
            }
        }
        Ok(())
    }

    fn bounds(&self, group: &[u32]) -> Region {
        let spans = |dim: usize| {
            let spans = group.iter().map(|&b| self.regions[b as usize].spans()[dim]);
            let start = spans.clone().map(|s| s.start).min().unwrap_or(0);
            Span::new(start, spans.map(|s| s.end).max().unwrap_or(start))
        };
        Region::new((0..self.regions[group[0] as usize].num_dims()).map(spans).collect())
    }

    /// Where to cut a part: at the edge of a box that lies inside it, if there is one.
    fn best_cut(&self, part: &Region, boxes: &[u32]) -> Option<(usize, u64)> {
        let mut best: Option<((u64, u64), (usize, u64))> = None;
        for (dim, span) in part.spans().iter().enumerate() {
            let (mut starts, mut ends) = (Vec::new(), Vec::new());
            for spans in boxes.iter().map(|&b| self.regions[b as usize].spans()[dim]) {
                starts.push(spans.start);
                ends.push(spans.end);
            }
            starts.sort_unstable();
            ends.sort_unstable();
            let inside = |at: &&u64| span.start < **at && **at < span.end;
            let mut edges: Vec<u64> = starts.iter().chain(&ends).filter(inside).copied().collect();
            edges.sort_unstable();
            edges.dedup();
            for at in edges {
                // Boxes before, behind, and cut in two by a cut at `at`.
                let before = ends.partition_point(|end| *end <= at) as u64;
                let begun = starts.partition_point(|start| *start < at) as u64;
                let behind = boxes.len() as u64 - begun;
                let score = (begun - before, before.abs_diff(behind));
                if best.is_none_or(|(known, _)| score < known) {
                    best = Some((score, (dim, at)));
                }
            }
        }
        best.map(|(_, cut)| cut)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn atoms_of_text(text: &str) -> Vec<String> {
        let layout: Layout = text.parse().unwrap();
        atoms(&layout).unwrap().iter().map(|a| format!("{} {:?}", a.region, a.holders)).collect()
    }

    #[test]
    fn boxes_are_cut_where_others_begin_and_end() {
        let atoms = atoms_of_text("f32[10]@A{x:3}{0: [0:6]; 1: [4:10]; 2: [0:6]}");
        assert_eq!(atoms, ["[0:4] [0, 2]", "[4:6] [0, 1, 2]", "[6:10] [1]"]);
    }

    #[test]
    fn boxes_that_nobody_cuts_stay_whole() {
        // A pinwheel: no straight cut leaves all five whole, and none is needed.
        let boxes = "0: [0:1, 0:2]; 1: [0:2, 2:3]; 2: [2:3, 1:3]; 3: [1:3, 0:1]; 4: [1:2, 1:2]";
        assert_eq!(atoms_of_text(&format!("f32[3,3]@A{{x:5}}{{{boxes}}}")).len(), 5);
        // What one rank holds twice is held by it once.
        assert_eq!(atoms_of_text("f32[4]@A{x:1}{0: [0:3] [1:4]}").len(), 3);
    }

    /// Where a span starts and ends.
    type Ends = (u64, u64);

    fn arb_boxes() -> impl Strategy<Value = String> {
        let span = (0u64..8, 1u64..5).prop_map(|(start, len)| (start, (start + len).min(8)));
        prop::collection::vec(prop::collection::vec((span.clone(), span), 0..4), 1..6).prop_map(|ranks| {
            let boxes = |b: &[(Ends, Ends)]| {
                b.iter().map(|(x, y)| format!(" [{}:{}, {}:{}]", x.0, x.1, y.0, y.1)).collect::<String>()
            };
            let lists: Vec<String> =
                ranks.iter().enumerate().map(|(i, b)| format!("{i}:{}", boxes(b))).collect();
            format!("u8[8,8]@A{{x:{}}}{{{}}}", ranks.len(), lists.join("; "))
        })
    }

    proptest! {
        #[test]
        fn every_element_has_its_holders_in_one_atom(text in arb_boxes()) {
            let layout: Layout = text.parse().unwrap();
            let atoms = atoms(&layout).unwrap();
            for (x, y) in (0..64).map(|i| (i / 8, i % 8)) {
                let element = Region::new(vec![Span::new(x, x + 1), Span::new(y, y + 1)]);
                let held = |p: &u32| layout.shard_at(&[*p]).iter().any(|r| r.contains(&element));
                let holders: Vec<u32> = (0..layout.mesh().len() as u32).filter(held).collect();
                let found: Vec<&Atom> = atoms.iter().filter(|a| a.region.contains(&element)).collect();
                prop_assert_eq!(found.len(), usize::from(!holders.is_empty()));
                prop_assert!(found.iter().all(|a| a.holders == holders));
            }
            for position in 0..layout.mesh().len() as u32 {
                let held = layout.shard_at(&[position]);
                for atom in atoms.iter().filter(|a| a.holders.contains(&position)) {
                    prop_assert!(held.iter().any(|r| r.contains(&atom.region)), "{} lies in no box", atom.region);
                }
            }
        }
    }
}
