//! Whether boxes fill a box, each element once.
//!
//! Planners cut along lines, so the boxes usually fall apart along straight cuts, again and again, down to single
//! boxes. That takes a sort per cut direction and no look at any element:
//!
//! ```text
//! a a b        cut below the first row: | a a b |, then left and right of its boxes: | a a | b |
//! c d d                                 | c d d |                                    | c | d d |
//! ```
//!
//! What does not fall apart (a pinwheel, or boxes that overlap) is checked pair by pair, exactly.

use crate::region::{Region, Span};

/// One of the boxes: its spans, and what the caller knows it by.
#[derive(Debug, Clone, Copy)]
pub struct Tile<'a, T> {
    pub spans: &'a [Span],
    pub by: T,
}

/// Why boxes do not fill a box.
#[derive(Debug, Clone, PartialEq)]
pub enum Flaw<T> {
    Missing(Region),
    Overlap { region: Region, first: T, second: T },
}

/// Deeper than this, cutting gives up and pairs are compared: no recursion as deep as a plan is long.
const MAX_DEPTH: u32 = 64;

/// Checks that the tiles, all inside `container`, fill it and do not overlap. Reorders them.
pub fn check_tiling<T: Copy>(container: &Region, tiles: &mut [Tile<T>]) -> Result<(), Flaw<T>> {
    Cutter { gaps_allowed: false }.check(&mut container.spans().to_vec(), tiles, 0)
}

/// Checks that the tiles do not overlap. Reorders them.
pub fn check_disjoint<T: Copy>(container: &Region, tiles: &mut [Tile<T>]) -> Result<(), Flaw<T>> {
    Cutter { gaps_allowed: true }.check(&mut container.spans().to_vec(), tiles, 0)
}

struct Cutter {
    gaps_allowed: bool,
}

impl Cutter {
    fn check<T: Copy>(
        &self,
        container: &mut Vec<Span>,
        tiles: &mut [Tile<T>],
        depth: u32,
    ) -> Result<(), Flaw<T>> {
        if let [only] = tiles
            && only.spans == container.as_slice()
        {
            return Ok(());
        }
        if tiles.is_empty() {
            let missing = || Flaw::Missing(Region::new(container.clone()));
            return if self.gaps_allowed { Ok(()) } else { Err(missing()) };
        }
        let dims = container.len();
        for dim in (0..dims).map(|d| (d + depth as usize) % dims) {
            let cuts = self.cuts(container, tiles, dim)?;
            if cuts.len() > 1 && depth < MAX_DEPTH {
                return self.check_parts(container, tiles, dim, &cuts, depth);
            }
        }
        self.check_pairs(container, tiles)
    }

    /// Sorts the tiles along a dim and finds where no tile is in the way of a cut: the index of the first tile behind
    /// each. A stretch without a tile is missing.
    fn cuts<T: Copy>(
        &self,
        container: &[Span],
        tiles: &mut [Tile<T>],
        dim: usize,
    ) -> Result<Vec<usize>, Flaw<T>> {
        tiles.sort_unstable_by_key(|t| t.spans[dim].start);
        let gap = |from: u64, to: u64| {
            let mut spans = container.to_vec();
            spans[dim] = Span::new(from, to);
            Err(Flaw::Missing(Region::new(spans)))
        };
        let mut cuts = Vec::new();
        let mut reach = container[dim].start;
        for (i, tile) in tiles.iter().enumerate() {
            let span = tile.spans[dim];
            if span.start > reach && !self.gaps_allowed {
                return gap(reach, span.start);
            }
            if span.start >= reach {
                cuts.push(i);
            }
            reach = reach.max(span.end);
        }
        if reach < container[dim].end && !self.gaps_allowed {
            return gap(reach, container[dim].end);
        }
        Ok(cuts)
    }

    fn check_parts<T: Copy>(
        &self,
        container: &mut Vec<Span>,
        tiles: &mut [Tile<T>],
        dim: usize,
        cuts: &[usize],
        depth: u32,
    ) -> Result<(), Flaw<T>> {
        let whole = container[dim];
        for (i, &first) in cuts.iter().enumerate() {
            let last = cuts.get(i + 1).copied().unwrap_or(tiles.len());
            let start = tiles[first].spans[dim].start;
            let end = tiles[first..last].iter().map(|t| t.spans[dim].end).max().unwrap_or(start);
            container[dim] = Span::new(start, end);
            self.check(container, &mut tiles[first..last], depth + 1)?;
        }
        container[dim] = whole;
        Ok(())
    }

    /// The exact way for everything else: any two that overlap, else whether the volumes add up.
    fn check_pairs<T: Copy>(&self, container: &[Span], tiles: &mut [Tile<T>]) -> Result<(), Flaw<T>> {
        let container = Region::new(container.to_vec());
        tiles.sort_unstable_by_key(|t| t.spans.first().map_or(0, |s| s.start));
        let mut active: Vec<Tile<T>> = Vec::new();
        for tile in tiles.iter() {
            active.retain(|a| a.spans.first().is_none_or(|s| s.end > tile.spans[0].start));
            for other in &active {
                if let Some(region) = common(tile.spans, other.spans) {
                    return Err(Flaw::Overlap { region, first: other.by, second: tile.by });
                }
            }
            active.push(*tile);
        }
        let volume = |spans: &[Span]| spans.iter().map(|s| s.len()).product::<u64>();
        let filled: u64 = tiles.iter().map(|t| volume(t.spans)).sum();
        if filled == container.volume() || self.gaps_allowed {
            return Ok(());
        }
        let rest = uncovered(&container, tiles.iter().map(|t| t.spans));
        Err(Flaw::Missing(rest.into_iter().next().expect("the volumes do not add up")))
    }
}

fn common(a: &[Span], b: &[Span]) -> Option<Region> {
    let spans: Option<Vec<Span>> = a.iter().zip(b).map(|(a, b)| a.intersect(*b)).collect();
    spans.map(Region::new)
}

/// What of a box some others leave, as disjoint boxes.
pub fn uncovered<'a>(region: &Region, others: impl IntoIterator<Item = &'a [Span]>) -> Vec<Region> {
    let mut left = vec![region.clone()];
    for other in others {
        if left.is_empty() {
            break;
        }
        let other = Region::new(other.to_vec());
        left = left.iter().flat_map(|l| l.subtract(&other)).collect();
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn boxes(list: &[[u64; 4]]) -> Vec<Region> {
        list.iter().map(|b| Region::new(vec![Span::new(b[0], b[1]), Span::new(b[2], b[3])])).collect()
    }

    fn check(container: [u64; 2], list: &[Region], gaps: bool) -> Result<(), Flaw<usize>> {
        let container = Region::whole(&container);
        let mut tiles: Vec<Tile<usize>> =
            list.iter().enumerate().map(|(by, r)| Tile { spans: r.spans(), by }).collect();
        if gaps { check_disjoint(&container, &mut tiles) } else { check_tiling(&container, &mut tiles) }
    }

    #[test]
    fn a_pinwheel_is_a_tiling_that_no_straight_cut_divides() {
        let mut pinwheel = boxes(&[[0, 1, 0, 2], [0, 2, 2, 3], [2, 3, 1, 3], [1, 3, 0, 1], [1, 2, 1, 2]]);
        assert_eq!(check([3, 3], &pinwheel, false), Ok(()));
        let middle = pinwheel.pop().unwrap();
        assert_eq!(check([3, 3], &pinwheel, false), Err(Flaw::Missing(middle)));
        assert_eq!(check([3, 3], &pinwheel, true), Ok(()));
    }

    #[test]
    fn a_scalar_is_filled_by_one_box() {
        let scalar = Region::whole(&[]);
        let tile = |by| Tile { spans: &[], by };
        assert_eq!(check_tiling(&scalar, &mut [tile(0)]), Ok(()));
        assert!(matches!(check_tiling::<u8>(&scalar, &mut []), Err(Flaw::Missing(_))));
        assert!(matches!(check_tiling(&scalar, &mut [tile(0), tile(1)]), Err(Flaw::Overlap { .. })));
    }

    proptest! {
        #[test]
        fn agrees_with_counting_elements(list in prop::collection::vec((0u64..4, 1u64..4, 0u64..4, 1u64..4), 0..7)) {
            let list: Vec<Region> = boxes(&list.iter().map(|&(a, n, c, m)| [a, (a + n).min(4), c, (c + m).min(4)]).collect::<Vec<_>>());
            let count = |x: u64, y: u64| {
                let point = Region::new(vec![Span::new(x, x + 1), Span::new(y, y + 1)]);
                list.iter().filter(|b| b.contains(&point)).count()
            };
            let counts: Vec<usize> = (0..16).map(|i| count(i / 4, i % 4)).collect();
            let (missing, twice) = (counts.contains(&0), counts.iter().any(|c| *c > 1));
            match check([4, 4], &list, false) {
                Ok(()) => prop_assert!(!missing && !twice),
                Err(Flaw::Missing(r)) => prop_assert!(!r.is_empty() && list.iter().all(|b| !b.overlaps(&r))),
                Err(Flaw::Overlap { region, first, second }) => {
                    prop_assert!(first != second && !region.is_empty());
                    prop_assert!(list[first].contains(&region) && list[second].contains(&region));
                }
            }
            prop_assert_eq!(check([4, 4], &list, true).is_err(), twice);
        }

        #[test]
        fn accepts_every_grid(xs in prop::collection::btree_set(1u64..12, 0..5), ys in prop::collection::btree_set(1u64..12, 0..5)) {
            let spans = |cuts: &std::collections::BTreeSet<u64>| {
                let ends: Vec<u64> = [0].into_iter().chain(cuts.iter().copied()).chain([12]).collect();
                ends.windows(2).map(|w| Span::new(w[0], w[1])).collect::<Vec<_>>()
            };
            let mut list = crate::layout::boxes(&[&spans(&xs), &spans(&ys)]);
            list.reverse();
            prop_assert_eq!(check([12, 12], &list, false), Ok(()));
        }
    }
}
