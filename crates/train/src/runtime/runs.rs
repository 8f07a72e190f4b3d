//! Packs runs of flat buffers for collectives, in which every rank's part is in one piece.

use std::borrow::Cow;
use std::ops::Range;

use crossmesh_comm::collectives::Buffer;

use super::calls::Promise;
use crate::deal::Runs;

/// Ranges whose elements are on their way.
pub type UnderWay<T> = (Vec<Range<usize>>, Promise<Buffer<T>>);

/// The runs of `ranges` that every member keeps, one member behind the other; `at` says where they lie in what `read` reads.
pub fn pack<'a, T: Copy + 'a>(
    read: impl Fn(Range<usize>) -> Cow<'a, [T]>,
    at: &Runs,
    members: &[Runs],
    ranges: &[Range<usize>],
) -> Vec<T> {
    let mut packed = Vec::with_capacity(counts_of(members, ranges).iter().sum::<u64>() as usize);
    for run in runs_of(members, ranges) {
        packed.extend_from_slice(&read(at.at(&run)));
    }
    packed
}

/// Ranges in pieces of about `longest` elements; each has as much as can be of what every member keeps, so that all of them are busy with it.
pub fn pieces(members: &[Runs], ranges: &[Range<usize>], longest: usize) -> Vec<Vec<Range<usize>>> {
    let len: usize = ranges.iter().map(|range| range.len()).sum();
    let count = len.div_ceil(longest.max(1));
    let of_member = |member: &Runs, i: usize| -> Vec<Range<usize>> {
        let runs = ranges.iter().flat_map(|range| member.within(range)).map(|(run, _)| run);
        let part =
            |run: Range<usize>| run.start + run.len() * i / count..run.start + run.len() * (i + 1) / count;
        runs.map(part).filter(|run| !run.is_empty()).collect()
    };
    let piece = |i: usize| {
        let mut piece: Vec<_> = members.iter().flat_map(|m| of_member(m, i)).collect();
        piece.sort_by_key(|run| run.start);
        // Some members may keep the same.
        piece.dedup();
        piece
    };
    (0..count).map(piece).filter(|piece| !piece.is_empty()).collect()
}

/// How many elements each member has of them.
pub fn counts_of(members: &[Runs], ranges: &[Range<usize>]) -> Vec<u64> {
    let of = |runs: &Runs| ranges.iter().flat_map(|r| runs.within(r)).map(|(run, _)| run.len() as u64).sum();
    members.iter().map(of).collect()
}

/// Calls `f` with every run of the flat buffer that lies in `packed`, and its elements.
pub fn copy_all<T>(
    packed: &[T],
    members: &[Runs],
    ranges: &[Range<usize>],
    mut f: impl FnMut(Range<usize>, &[T]),
) {
    let mut at = 0;
    for run in runs_of(members, ranges) {
        let len = run.len();
        f(run, &packed[at..at + len]);
        at += len;
    }
}

fn runs_of(members: &[Runs], ranges: &[Range<usize>]) -> impl Iterator<Item = Range<usize>> {
    members.iter().flat_map(|m| ranges.iter().flat_map(|r| m.within(r))).map(|(run, _)| run)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Pieces are the ranges, each element once, and none is much longer than it may be.
        #[test]
        fn pieces_are_the_ranges(lens in prop::collection::vec(0usize..40, 1..5), members in 1usize..5, longest in 1usize..30) {
            let (mut at, mut ranges) = (3, vec![]);
            for len in lens {
                ranges.push(at..at + len);
                at += len + 2;
            }
            ranges.retain(|range| !range.is_empty());
            let cut = |member: usize| {
                let part = |r: &Range<usize>| r.start + r.len() * member / members..r.start + r.len() * (member + 1) / members;
                Runs::new(ranges.iter().map(part).filter(|r| !r.is_empty()))
            };
            let members: Vec<Runs> = (0..members).map(cut).collect();
            let pieces = pieces(&members, &ranges, longest);
            let mut seen: Vec<usize> = pieces.iter().flatten().flat_map(Clone::clone).collect();
            seen.sort_unstable();
            let wanted: Vec<usize> = ranges.iter().flat_map(Clone::clone).collect();
            prop_assert_eq!(seen, wanted);
            for piece in &pieces {
                let len: usize = piece.iter().map(|run| run.len()).sum();
                prop_assert!(len <= longest + members.len() * ranges.len(), "{} of {}", len, longest);
            }
        }
    }
}
