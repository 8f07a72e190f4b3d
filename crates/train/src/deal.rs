//! Flat buffers, dealt out over the ranks that hold the same: ZeRO.
//!
//! A stage's weights lie in one flat buffer, unit behind unit. Each unit's run of it is a bucket, cut into as many parts as there are ranks
//! along the data axes. Dealt out over some of those axes, a rank keeps the parts of all ranks that stand where it does along them:
//!
//! ```text
//! mesh dpo 2, dpi 2          bucket   | 00 | 01 | 10 | 11 |
//! over nothing     rank 01 keeps      | xx | xx | xx | xx |
//! over dpo                            | xx | xx |    |    |
//! over dpi                            |    | xx |    | xx |
//! over dpo + dpi                      |    | xx |    |    |
//! ```
//!
//! Parameters (P), gradients (G) and the optimizer's states (O) are dealt out each over its own axes, so that ZeRO's stages are the choices
//! `(_, _, dp)`, `(_, dp, dp)` and `(dp, dp, dp)`, and whatever lies between them is one too. From one deal to another ranks gather, or scatter sums,
//! along the axes in which the two differ.

use std::ops::Range;

use crate::group::chunked;
use crate::stage_rank::StageRank;

/// Runs of a flat buffer in ascending order, kept one behind the other.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Runs {
    /// Each with the place where its first element is kept.
    list: Vec<(Range<usize>, usize)>,
    len: usize,
}

impl Runs {
    /// All of a buffer.
    pub fn whole(len: usize) -> Self {
        Self::one(0..len)
    }

    /// A single run.
    pub fn one(run: Range<usize>) -> Self {
        Self::new(std::iter::once(run))
    }

    /// Runs that follow each other; neighbours become one.
    pub fn new(runs: impl IntoIterator<Item = Range<usize>>) -> Self {
        let mut all = Self::default();
        for run in runs.into_iter().filter(|run| !run.is_empty()) {
            let at = all.len;
            all.len += run.len();
            match all.list.last_mut() {
                Some((last, _)) if last.end == run.start => last.end = run.end,
                last => {
                    assert!(last.is_none_or(|(last, _)| last.end < run.start), "runs ascend");
                    all.list.push((run, at));
                }
            }
        }
        all
    }

    /// Elements that are kept.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What is kept of a part of the buffer: runs of the buffer, and where each one is kept.
    pub fn within(&self, part: &Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> {
        let (start, end) = (part.start, part.end);
        let first = self.list.partition_point(|(run, _)| run.end <= start);
        let here = self.list[first..].iter().take_while(move |(run, _)| run.start < end && start < end);
        here.map(move |(run, at)| {
            let from = run.start.max(start);
            (from..run.end.min(end), at + (from - run.start))
        })
    }

    /// All of them, and where each is kept.
    pub fn iter(&self) -> impl Iterator<Item = (Range<usize>, usize)> {
        self.list.iter().cloned()
    }

    /// Where a run is kept that is kept in one piece.
    pub fn at(&self, run: &Range<usize>) -> Range<usize> {
        let mut pieces = self.within(run);
        match (pieces.next(), pieces.next()) {
            (None, _) if run.is_empty() => 0..0,
            (Some((piece, at)), None) if piece == *run => at..at + run.len(),
            _ => panic!("{run:?} is not kept in one piece"),
        }
    }
}

/// What a rank keeps of a flat buffer, and the axes of its mesh over which it is dealt out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    pub runs: Runs,
    /// By their places in the mesh: along all others ranks keep the same.
    pub axes: Vec<usize>,
}

impl Share {
    /// Nothing is dealt out: everybody keeps all of it.
    pub fn whole(len: usize) -> Self {
        Self { runs: Runs::whole(len), axes: vec![] }
    }
}

/// How a stage's flat buffer is cut.
#[derive(Debug, Clone)]
pub struct Deal {
    place: StageRank,
    /// The parts of all buckets: by bucket, in order of the ranks along the data axes.
    parts: Vec<Vec<Range<usize>>>,
}

impl Deal {
    /// Buckets lie from each of `starts` to the next.
    pub fn new(place: StageRank, starts: &[usize]) -> Self {
        let ranks = place.dp().size;
        let cut = |bucket: &[usize]| {
            let parts = chunked(bucket[1] - bucket[0], 1, ranks);
            parts.into_iter().map(|part| bucket[0] + part.start..bucket[0] + part.end).collect()
        };
        Self { parts: starts.windows(2).map(cut).collect(), place }
    }

    /// What this rank keeps, dealt out over some of the data axes.
    pub fn share(&self, axes: &[usize]) -> Share {
        Share { runs: self.runs(self.place.coord(), axes), axes: axes.to_vec() }
    }

    /// What each of the ranks keeps that differ from this one along `group` alone, in their order.
    pub fn shares(&self, group: &[usize], axes: &[usize]) -> Vec<Runs> {
        self.place.others(group).iter().map(|coord| self.runs(coord, axes)).collect()
    }

    fn runs(&self, coord: &[u32], axes: &[usize]) -> Runs {
        let data = self.place.data_axes();
        let all = self.place.others(&data);
        let kept: Vec<bool> = all.iter().map(|other| axes.iter().all(|&a| other[a] == coord[a])).collect();
        let parts = self.parts.iter().flat_map(|bucket| bucket.iter().zip(&kept));
        Runs::new(parts.filter(|(_, kept)| **kept).map(|(part, _)| part.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn place(mesh: &str, position: usize) -> StageRank {
        StageRank::new(mesh.parse().unwrap(), position).unwrap()
    }

    #[test]
    fn parts_are_those_of_the_ranks_that_stand_alike() {
        let deal = Deal::new(place("A{dpo:2,dpi:2}", 1), &[0, 8, 11]);
        let runs = |axes: &[usize]| deal.share(axes).runs.iter().map(|(run, _)| run).collect::<Vec<_>>();
        assert_eq!(deal.share(&[]), Share::whole(11));
        assert_eq!(runs(&[0]), [0..4, 8..10]);
        assert_eq!(runs(&[1]), [2..4, 6..8, 9..10]);
        assert_eq!(runs(&[0, 1]), [2..4, 9..10]);
    }

    #[test]
    fn runs_know_where_they_are_kept() {
        let runs = Runs::new([2..4, 4..5, 7..7, 9..12]);
        assert_eq!(runs.len(), 6);
        assert_eq!(runs.iter().collect::<Vec<_>>(), [(2..5, 0), (9..12, 3)]);
        assert_eq!(runs.within(&(3..11)).collect::<Vec<_>>(), [(3..5, 1), (9..11, 3)]);
        assert_eq!(runs.within(&(3..3)).count(), 0);
        assert_eq!((runs.at(&(10..12)), runs.at(&(6..6))), (4..6, 0..0));
    }

    proptest! {
        /// Over any axes every element is kept by as many ranks as stand alike, and all parts of a group make up what it had.
        #[test]
        fn every_element_is_somewhere(dpo in 1u32..4, dpi in 1u32..4, tp in 1u32..3, lens in prop::collection::vec(0usize..9, 1..4), axes in 0usize..4) {
            let mesh = format!("A{{dpo:{dpo},tp:{tp},dpi:{dpi}}}");
            let axes: Vec<usize> = [0, 2].into_iter().enumerate().filter(|(i, _)| axes >> i & 1 == 1).map(|(_, a)| a).collect();
            let starts: Vec<usize> = std::iter::once(0).chain(lens.iter().scan(0, |s, l| { *s += l; Some(*s) })).collect();
            let all = *starts.last().unwrap();
            for position in 0..(dpo * dpi * tp) as usize {
                let place = place(&mesh, position);
                let deal = Deal::new(place.clone(), &starts);
                let mut count = vec![0; all];
                for runs in deal.shares(&axes, &axes) {
                    for (run, _) in runs.iter() {
                        run.for_each(|i| count[i] += 1);
                    }
                }
                prop_assert!(count.iter().all(|c| *c == 1), "{count:?}");
                let own = place.others(&axes).iter().position(|c| c == place.coord()).unwrap();
                prop_assert_eq!(&deal.shares(&axes, &axes)[own], &deal.share(&axes).runs);
            }
        }
    }
}
