//! Packs runs of flat buffers for collectives, in which every rank's part is in one piece.

use std::ops::Range;

use crate::deal::Runs;

/// The runs of `ranges` that every member keeps, one member behind the other; `at` says where they lie in `from`.
pub fn pack<T: Copy>(from: &[T], at: &Runs, members: &[Runs], ranges: &[Range<usize>]) -> Vec<T> {
    let mut packed = Vec::with_capacity(counts_of(members, ranges).iter().sum::<u64>() as usize);
    for run in runs_of(members, ranges) {
        packed.extend_from_slice(&from[at.at(&run)]);
    }
    packed
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
