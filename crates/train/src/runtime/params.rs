//! A stage's parameters on a rank: all of them, or its share, from which those of a unit are put together while a pass needs them.
//!
//! ```text
//! fetch(2, next 3)    gather unit 2 | F of unit 2 .................. | F of unit 3 ......
//!                                   | gather unit 3 beside it ====== |
//! ```

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use crossmesh_comm::collectives::{Buffer, GroupId};

use super::calls::{Calls, Promise, Urgency, What};
use super::runs::{UnderWay, copy_all, counts_of, pack, pieces};
use crate::deal::{Runs, Share};
use crate::flat::{Buckets, Flat, Part, Weights};
use crate::group::GroupError;
use crate::kernels::{BufSlice, Buffer as _, Kernels, PartMut};
use crate::stage::StageError;

/// See the module.
pub struct Params<K: Kernels> {
    /// What this rank keeps.
    pub kept: K::Buf,
    pub share: Share,
    fetching: Option<Fetching<K>>,
}

/// How the rest comes.
struct Fetching<K: Kernels> {
    kernels: Arc<K>,
    calls: Calls,
    group: GroupId,
    /// What each rank of the group keeps, in its order.
    members: Vec<Runs>,
    me: usize,
    buckets: Buckets,
    here: Vec<Part<K::Buf>>,
    coming: Option<Coming<K>>,
    /// The most elements that were here at once.
    most: usize,
}

/// A unit's weights on their way, piece by piece.
struct Coming<K: Kernels> {
    unit: usize,
    under_way: VecDeque<UnderWay<K::Elem>>,
    /// Not asked for yet.
    rest: VecDeque<Vec<Range<usize>>>,
}

/// How long a piece is at most, and how many are under way at once: both take memory, here and where others look into it. Pieces of 16 MiB
/// took 100 MB more of a rank of 124 M parameters on four; its steps took 1.12 and 1.17 s then, and 1.17 and 1.34 s with these (a busy machine).
pub const PIECE_BYTES: usize = 2 << 20;
pub const UNDER_WAY: usize = 2;

/// The most elements that fetching holds at once, where the largest unit has so many: the unit, and pieces of it that have arrived or are on their way.
pub fn most_fetched<K: Kernels>(largest: usize) -> usize {
    largest + largest.min((UNDER_WAY + 1) * (PIECE_BYTES / size_of::<K::Elem>()))
}

impl<K: Kernels> Params<K> {
    /// The most elements that were fetched and held at once.
    pub fn fetched(&self) -> usize {
        self.fetching.as_ref().map_or(0, |fetching| fetching.most)
    }

    /// All of them are here.
    pub fn whole(kept: K::Buf) -> Self {
        let share = Share::whole(kept.len());
        Self { kept, share, fetching: None }
    }

    /// The ranks of `group` keep `members`, and this one its own of them.
    pub fn dealt(
        kept: K::Buf,
        share: Share,
        (group, members, me): (GroupId, Vec<Runs>, usize),
        buckets: Buckets,
        calls: Calls,
        kernels: Arc<K>,
    ) -> Self {
        let (here, coming) = (vec![], None);
        let fetching = Fetching { kernels, calls, group, members, me, buckets, here, coming, most: 0 };
        Self { kept, share, fetching: Some(fetching) }
    }
}

impl<K: Kernels> Fetching<K> {
    fn start(&self, unit: usize, kept: &K::Buf, own: &Runs) -> Result<Coming<K>, GroupError> {
        let longest = PIECE_BYTES / size_of::<K::Elem>();
        let rest = pieces(&self.members, &self.buckets.ranges(unit), longest).into();
        let mut coming = Coming { unit, under_way: VecDeque::new(), rest };
        self.ask(&mut coming, kept, own)?;
        Ok(coming)
    }

    /// Asks for as many pieces as may be under way.
    fn ask(&self, coming: &mut Coming<K>, kept: &K::Buf, own: &Runs) -> Result<(), GroupError> {
        while coming.under_way.len() < UNDER_WAY {
            let Some(piece) = coming.rest.pop_front() else { return Ok(()) };
            let promise = self.start_piece(&piece, kept, own)?;
            coming.under_way.push_back((piece, promise));
        }
        Ok(())
    }

    fn start_piece(
        &self,
        ranges: &[Range<usize>],
        kept: &K::Buf,
        own: &Runs,
    ) -> Result<Promise<Buffer<K::Elem>>, GroupError> {
        let read = |at: Range<usize>| self.kernels.elems(BufSlice { buf: kept, start: at.start }, at.len());
        let mine = pack(read, own, std::slice::from_ref(own), ranges);
        let what = What::AllGather(counts_of(&self.members, ranges));
        let promise = self.calls.start(self.group, what, &mine, Urgency::Now);
        promise.map_err(|e| self.failed(mine.len(), e.into()))
    }

    fn failed(&self, elements: usize, cause: Box<dyn std::error::Error + Send + Sync>) -> GroupError {
        let (rank, size) = (self.me, self.members.len());
        GroupError { operation: "a gather of weights", elements, rank, size, cause }
    }

    /// Waits for a unit's weights, and puts them in their order.
    fn finish(
        &mut self,
        mut coming: Coming<K>,
        kept: &K::Buf,
        own: &Runs,
    ) -> Result<Vec<Part<K::Buf>>, GroupError> {
        let part =
            |range: &Range<usize>| Part { buf: self.kernels.buffer(range.len()), range: range.clone() };
        let mut parts: Vec<_> = self.buckets.ranges(coming.unit).iter().map(part).collect();
        while let Some((ranges, promise)) = coming.under_way.pop_front() {
            let all = promise.wait().map_err(|e| self.failed(0, e.into()))?;
            self.ask(&mut coming, kept, own)?;
            let len = |ranges: &Vec<Range<usize>>| ranges.iter().map(|r| r.len()).sum::<usize>();
            let on_their_way: usize = coming.under_way.iter().map(|(ranges, _)| len(ranges)).sum();
            let there: usize = parts.iter().map(|p| p.range.len()).sum();
            self.most = self.most.max(there + all.len() + on_their_way);
            copy_all(&all, &self.members, &ranges, |at, from| {
                let part = parts.iter_mut().find(|p| p.range.contains(&at.start)).expect("it was asked for");
                let start = at.start - part.range.start;
                self.kernels.put_elems(from, PartMut { buf: &mut part.buf, start });
            });
        }
        Ok(parts)
    }
}

impl<K: Kernels> Weights<K::Buf> for Params<K> {
    fn fetch(&mut self, unit: usize, next: Option<usize>) -> Result<Flat<'_, K::Buf>, StageError> {
        let Some(fetching) = &mut self.fetching else { return Ok(Flat::Whole(&self.kept)) };
        let own = &self.share.runs;
        let coming = match fetching.coming.take() {
            Some(coming) => {
                assert_eq!(coming.unit, unit, "the unit that was said to follow");
                coming
            }
            None => fetching.start(unit, &self.kept, own)?,
        };
        // What the last unit had is not needed any more: its memory may serve this one.
        fetching.here.clear();
        fetching.here = fetching.finish(coming, &self.kept, own)?;
        if let Some(next) = next {
            fetching.coming = Some(fetching.start(next, &self.kept, own)?);
        }
        Ok(Flat::Parts(&fetching.here))
    }

    fn done(&mut self) {
        if let Some(fetching) = &mut self.fetching {
            fetching.here.clear();
        }
    }
}
