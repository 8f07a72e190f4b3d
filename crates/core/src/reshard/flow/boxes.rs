//! A class as a row of bytes: its items one behind the other, and boxes cut out of them.

use crate::region::{Region, Span};

/// A box is cut along the first of its dims that is at least this long, or along its longest: outer dims keep what is
/// contiguous together, and this many steps are fine enough to share it out.
const FINE_ENOUGH: u64 = 256;

/// The part of a box between two byte offsets in its row, rounded to whole steps along one dim. Parts that meet at an
/// offset meet in the box.
pub(super) fn part(region: &Region, bytes: u64, start: u64, end: u64) -> Option<Region> {
    if start == 0 && end >= bytes {
        return Some(region.clone());
    }
    let dim = cut_dim(region);
    let span = dim.map_or(Span::new(0, 1), |dim| region.spans()[dim]);
    let step = |offset: u64| {
        let offset = offset.min(bytes);
        let rounded =
            (u128::from(offset) * u128::from(span.len()) + u128::from(bytes / 2)) / u128::from(bytes);
        span.start + rounded as u64
    };
    let cut = Span::new(step(start), step(end));
    (!cut.is_empty()).then(|| dim.map_or(region.clone(), |dim| region.with_span(dim, cut)))
}

/// The dim to cut a box along; a scalar has none.
pub(super) fn cut_dim(region: &Region) -> Option<usize> {
    let longest = region.spans().iter().map(|s| s.len()).max()?;
    region.spans().iter().position(|s| s.len() >= longest.min(FINE_ENOUGH))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_tile_the_box(lens in prop::collection::vec(1u64..20, 0..4), mut cuts in prop::collection::vec(0u64..10_000, 0..6)) {
            let region = Region::whole(&lens);
            let bytes = region.volume() * 4;
            cuts.iter_mut().for_each(|c| *c %= bytes + 1);
            cuts.extend([0, bytes]);
            cuts.sort_unstable();
            let parts: Vec<Region> = cuts.windows(2).filter_map(|w| part(&region, bytes, w[0], w[1])).collect();
            // Cuts that fall on both ends give the whole box once; an empty stretch gives nothing.
            let parts: Vec<Region> = parts.into_iter().filter(|p| !p.is_empty()).collect();
            prop_assert_eq!(parts.iter().map(Region::volume).sum::<u64>(), region.volume());
            for (i, a) in parts.iter().enumerate() {
                prop_assert!(parts[..i].iter().all(|b| !b.overlaps(a)));
            }
        }
    }
}
