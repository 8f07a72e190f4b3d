//! A stage's parameters on a rank: all of them, or its share, from which those of a unit are put together while a pass needs them.
//!
//! ```text
//! fetch(2, next 3)    gather unit 2 | F of unit 2 .................. | F of unit 3 ......
//!                                   | gather unit 3 beside it ====== |
//! ```

use std::ops::Range;
use std::sync::Arc;

use crossmesh_comm::collectives::{Buffer, Element, GroupId};

use super::calls::{Calls, Promise, Urgency, What};
use super::runs::{copy_all, counts_of, pack};
use crate::deal::{Runs, Share};
use crate::flat::{Buckets, Flat, Part, Weights};
use crate::group::GroupError;
use crate::kernels::Kernels as _;
use crate::kernels::cpu::{Cpu, HostBuf};
use crate::kernels::scalar::Scalar;
use crate::stage::StageError;

/// See the module.
pub struct Params<T: Scalar> {
    /// What this rank keeps.
    pub kept: HostBuf<T>,
    pub share: Share,
    fetching: Option<Fetching<T>>,
}

/// How the rest comes.
struct Fetching<T: Scalar> {
    kernels: Arc<Cpu<T>>,
    calls: Calls,
    group: GroupId,
    /// What each rank of the group keeps, in its order.
    members: Vec<Runs>,
    me: usize,
    buckets: Buckets,
    here: Vec<Part<HostBuf<T>>>,
    coming: Option<(usize, Promise<Buffer<T>>)>,
}

impl<T: Scalar + Element> Params<T> {
    /// All of them are here.
    pub fn whole(kept: HostBuf<T>) -> Self {
        let share = Share::whole(kept.len());
        Self { kept, share, fetching: None }
    }

    /// The ranks of `group` keep `members`, and this one its own of them.
    pub fn dealt(
        kept: HostBuf<T>,
        share: Share,
        (group, members, me): (GroupId, Vec<Runs>, usize),
        buckets: Buckets,
        calls: Calls,
        kernels: Arc<Cpu<T>>,
    ) -> Self {
        let (here, coming) = (vec![], None);
        let fetching = Fetching { kernels, calls, group, members, me, buckets, here, coming };
        Self { kept, share, fetching: Some(fetching) }
    }
}

impl<T: Scalar + Element> Fetching<T> {
    fn start(&self, unit: usize, kept: &[T], own: &Runs) -> Result<Promise<Buffer<T>>, GroupError> {
        let ranges = self.buckets.ranges(unit);
        let mine = pack(kept, own, std::slice::from_ref(own), &ranges);
        let what = What::AllGather(counts_of(&self.members, &ranges));
        let promise = self.calls.start(self.group, what, &mine, Urgency::Now);
        promise.map_err(|e| self.failed(mine.len(), e.into()))
    }

    fn failed(&self, elements: usize, cause: Box<dyn std::error::Error + Send + Sync>) -> GroupError {
        let (rank, size) = (self.me, self.members.len());
        GroupError { operation: "a gather of weights", elements, rank, size, cause }
    }

    /// Waits for a unit's weights, and puts them in their order.
    fn finish(&self, unit: usize, promise: Promise<Buffer<T>>) -> Result<Vec<Part<HostBuf<T>>>, GroupError> {
        let all = promise.wait().map_err(|e| self.failed(0, e.into()))?;
        let ranges = self.buckets.ranges(unit);
        let part =
            |range: &Range<usize>| Part { buf: self.kernels.buffer(range.len()), range: range.clone() };
        let mut parts: Vec<_> = ranges.iter().map(part).collect();
        copy_all(&all, &self.members, &ranges, |at, from| {
            let part = parts.iter_mut().find(|p| p.range.contains(&at.start)).expect("it was asked for");
            part.buf[at.start - part.range.start..][..from.len()].copy_from_slice(from);
        });
        Ok(parts)
    }
}

impl<T: Scalar + Element> Weights<HostBuf<T>> for Params<T> {
    fn fetch(&mut self, unit: usize, next: Option<usize>) -> Result<Flat<'_, HostBuf<T>>, StageError> {
        let Some(fetching) = &mut self.fetching else { return Ok(Flat::Whole(&self.kept)) };
        let own = &self.share.runs;
        let promise = match fetching.coming.take() {
            Some((coming, promise)) => {
                assert_eq!(coming, unit, "the unit that was said to follow");
                promise
            }
            None => fetching.start(unit, &self.kept, own)?,
        };
        // What the last unit had is not needed any more: its memory may serve this one.
        fetching.here.clear();
        fetching.here = fetching.finish(unit, promise)?;
        if let Some(next) = next {
            fetching.coming = Some((next, fetching.start(next, &self.kept, own)?));
        }
        Ok(Flat::Parts(&fetching.here))
    }

    fn done(&mut self) {
        if let Some(fetching) = &mut self.fetching {
            fetching.here.clear();
        }
    }
}
