//! How a box of the target is cut into slabs that fit into a buffer.
//!
//! Rows, where the source lies in the same order: each is read and written in one stretch. Of a box that lies transposed in its source, a slab of
//! rows is a few columns there, and to read those is to read nearly all of it, for every slab again. A tile has its share of both:
//!
//! ```text
//! target, row-major      rows: the source is read     tiles: read once,
//! of a transposed box    once for every slab          in shorter pieces
//!
//!   0 1 2 3 4 5            a a a a a a                  a a a b b b
//!   6 7 8 9 . .            b b b b b b                  a a a b b b
//!   . . . . . .            c c c c c c                  c c c d d d
//! ```

use crossmesh_core::region::{Region, Span};

use crate::catalog::StoredBox;

/// Cuts a box into boxes of at most so many elements that follow each other row-major, in their order.
pub(crate) fn cut(region: &Region, limit: u64, each: &mut impl FnMut(Region)) {
    blocks(region, &rows(region, limit), each);
}

fn lens_of(region: &Region) -> Vec<u64> {
    region.spans().iter().map(|s| s.len()).collect()
}

/// The lengths of a slab of rows: the first dim whose rows fit is cut into so many rows, the dims before it one by one.
pub(super) fn rows(region: &Region, limit: u64) -> Vec<u64> {
    let mut lens = lens_of(region);
    let row = |lens: &[u64], dim: usize| lens[dim + 1..].iter().product::<u64>();
    let Some(dim) = (0..lens.len()).find(|&dim| row(&lens, dim) <= limit) else { return lens };
    lens[dim] = lens[dim].min((limit / row(&lens, dim).max(1)).max(1));
    lens[..dim].fill(1);
    lens
}

/// Cuts a box into boxes of these lengths, the last of a dim shorter, in row-major order.
pub(super) fn blocks(region: &Region, lens: &[u64], each: &mut impl FnMut(Region)) {
    if region.is_empty() {
        return;
    }
    let block = |start: u64, dim: usize| Span::new(start, region.spans()[dim].end.min(start + lens[dim]));
    let mut spans: Vec<Span> =
        region.spans().iter().enumerate().map(|(dim, whole)| block(whole.start, dim)).collect();
    loop {
        each(Region::new(spans.clone()));
        // The next one, like the hands of a clock.
        let Some(dim) = (0..spans.len()).rev().find(|&d| spans[d].end < region.spans()[d].end) else {
            return;
        };
        spans[dim] = block(spans[dim].end, dim);
        let behind = spans.iter_mut().enumerate().skip(dim + 1);
        behind.for_each(|(later, span)| *span = block(region.spans()[later].start, later));
    }
}

/// Whether a box of the source lies in another order than row-major.
pub(super) fn is_turned(stored: &StoredBox, region: &Region) -> bool {
    let long = region.spans().iter().zip(stored.region.spans()).zip(&stored.strides);
    let strides: Vec<u64> =
        long.filter(|((a, b), _)| a.len() > 1 && b.len() > 1).map(|(_, stride)| *stride).collect();
    !strides.is_sorted_by(|a, b| a >= b)
}

/// The lengths of a tile of at most so many elements whose runs are about as long in the source as in the target: whichever is shorter is doubled.
pub(super) fn tile(region: &Region, stored: &StoredBox, limit: u64) -> Vec<u64> {
    let lens = lens_of(region);
    let held = stored.region.spans().iter().zip(&lens).map(|(span, &len)| span.len().min(len));
    let held: Vec<u64> = held.collect();
    // Innermost first.
    let target: Vec<usize> = (0..lens.len()).rev().collect();
    let mut source = target.clone();
    source.sort_by_key(|&dim| stored.strides[dim]);
    let mut tile = vec![1; lens.len()];
    loop {
        let (in_target, in_source) = (run(&tile, &target, &lens), run(&tile, &source, &held));
        let longer_target = || target.iter().find(|&&dim| tile[dim] < lens[dim]);
        let longer_source = || source.iter().find(|&&dim| tile[dim] < held[dim]);
        let next = match in_source < in_target {
            true => longer_source().or_else(longer_target),
            false => longer_target(),
        };
        let Some(&dim) = next else { return tile };
        let others = tile.iter().product::<u64>() / tile[dim];
        let most = limit / others;
        if 2 * tile[dim] >= most {
            tile[dim] = most.clamp(tile[dim], lens[dim]);
            return tile;
        }
        tile[dim] = lens[dim].min(2 * tile[dim]);
    }
}

/// How many elements of a tile follow each other where dims lie in this order, innermost first.
fn run(tile: &[u64], order: &[usize], lens: &[u64]) -> u64 {
    let mut run = 1;
    for &dim in order {
        run *= tile[dim];
        if tile[dim] < lens[dim] {
            break;
        }
    }
    run
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::row_major;
    use crate::element::Element;
    use crossmesh_testkit::seed::Seed;

    fn random_region(seed: &mut Seed, dims: usize, most: usize) -> Region {
        let span = |seed: &mut Seed| {
            let start = seed.below(5) as u64;
            Span::new(start, start + 1 + seed.below(most) as u64)
        };
        Region::new((0..dims).map(|_| span(seed)).collect())
    }

    #[test]
    fn slabs_follow_each_other_and_are_the_box() {
        let mut seed = Seed(3);
        for _ in 0..500 {
            let dims = seed.below(4);
            let region = random_region(&mut seed, dims, 6);
            let limit = 1 + seed.below(40) as u64;
            let strides = row_major(region.spans().iter().map(|s| s.len()), 1);
            let mut next = 0;
            cut(&region, limit, &mut |slab| {
                assert!(slab.volume() <= limit && region.contains(&slab));
                let starts = slab.spans().iter().zip(region.spans()).map(|(s, r)| s.start - r.start);
                assert_eq!(starts.zip(&strides).map(|(x, s)| x * s).sum::<u64>(), next);
                // In one stretch: all dims behind the first that is longer than one are whole.
                let first = slab.spans().iter().position(|s| s.len() > 1).unwrap_or(dims);
                let whole = |d: usize| slab.spans()[d] == region.spans()[d];
                assert!((first + 1..dims).all(whole), "{slab} of {region}");
                next += slab.volume();
            });
            assert_eq!(next, region.volume());
        }
    }

    #[test]
    fn tiles_are_the_box_each_element_once() {
        let mut seed = Seed(4);
        for _ in 0..500 {
            let dims = 1 + seed.below(4);
            let region = random_region(&mut seed, dims, 9);
            let mut order: Vec<usize> = (0..dims).collect();
            (1..dims).for_each(|i| order.swap(i, seed.below(i + 1)));
            let mut stored = StoredBox::packed(region.clone(), 0, 0, Element::U8);
            let mut next = 1;
            for &dim in &order {
                stored.strides[dim] = next;
                next *= region.spans()[dim].len();
            }
            let limit = 1 + seed.below(60) as u64;
            let lens = tile(&region, &stored, limit);
            let (mut volume, mut tiles) = (0, vec![]);
            blocks(&region, &lens, &mut |slab| {
                assert!(slab.volume() <= limit && region.contains(&slab));
                volume += slab.volume();
                tiles.push(slab);
            });
            assert_eq!(volume, region.volume());
            assert!(tiles.iter().enumerate().all(|(i, a)| tiles[..i].iter().all(|b| !a.overlaps(b))));
        }
    }

    #[test]
    fn a_tile_of_a_transpose_is_about_square() {
        let whole = Region::whole(&[3000, 5000]);
        let mut stored = StoredBox::packed(whole.clone(), 0, 0, Element::BF16);
        assert!(!is_turned(&stored, &whole));
        stored.strides = vec![2, 6000];
        assert!(is_turned(&stored, &whole));
        let lens = tile(&whole, &stored, 1 << 15);
        assert!(lens.iter().all(|len| (128..=256).contains(len)), "{lens:?}");
        // A box of one column is in any order.
        assert!(!is_turned(&stored, &Region::whole(&[3000, 1])));
    }
}
