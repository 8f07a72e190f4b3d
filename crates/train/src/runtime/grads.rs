//! A stage's gradients on a rank: of all its parameters, or its share of them, to which every microbatch's sums are added.
//!
//! Where gradients are dealt out, W leaves those of a unit in a buffer of their own, which goes to the ranks that keep them as soon as the unit is
//! through, beside W of the next one:
//!
//! ```text
//! W, unit 3          | W, unit 2                  | W, unit 1
//! buffer of unit 3 = | scatter sums of unit 3 === | add them to what is kept
//! ```

use std::borrow::Cow;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use crossmesh_comm::collectives::{Buffer, GroupId};

use super::calls::{Calls, Promise, Urgency, What};
use super::runs::{UnderWay, copy_all, counts_of, pack, pieces};
use crate::deal::{Runs, Share};
use crate::flat::{Buckets, FlatMut, Part};
use crate::group::GroupError;
use crate::kernels::scalar::Scalar;
use crate::kernels::{BufSlice, Buffer as _, Kernels, PartMut};

/// See the module.
pub struct Grads<K: Kernels> {
    kernels: Arc<K>,
    /// Reals.
    pub kept: K::Buf,
    pub share: Share,
    each: Option<Each<K>>,
}

/// What becomes of every microbatch's gradients.
pub struct Each<K: Kernels> {
    kernels: Arc<K>,
    pub calls: Calls,
    /// The ranks that sum them up, and what each of them keeps; none where this one is alone.
    pub group: Option<(GroupId, Vec<Runs>)>,
    /// This rank's place among them.
    pub me: usize,
    /// Whether sums are taken in the order of the ranks.
    pub fixed_order: bool,
    pub buckets: Buckets,
    /// By unit: runs whose sums are dealt out. All others are kept whole.
    pub plain: Vec<Vec<Range<usize>>>,
    /// Of units that W is at, and what later ones left for an earlier one's weights.
    open: Vec<Part<K::Buf>>,
    /// Runs whose sums are on their way.
    under_way: VecDeque<UnderWay<K::Real>>,
    /// The most elements that units' gradients took at once.
    most: usize,
}

/// Sums that may be under way at once, and how long each is at most: both take memory, on this rank and where others look into it.
pub const UNDER_WAY: usize = 3;
pub const PIECE_BYTES: usize = 2 << 20;

impl<K: Kernels> Grads<K> {
    /// Those of all parameters; they are summed when the last microbatch is through.
    pub fn whole(kernels: &Arc<K>, len: usize) -> Self {
        Self {
            kept: zeros(&**kernels, len),
            kernels: Arc::clone(kernels),
            share: Share::whole(len),
            each: None,
        }
    }

    /// A share of them.
    pub fn dealt(share: Share, each: Each<K>) -> Self {
        let kernels = Arc::clone(&each.kernels);
        Self { kept: zeros(&*kernels, share.runs.len()), kernels, share, each: Some(each) }
    }

    /// Whether each microbatch's are summed by themselves.
    pub fn are_summed_each(&self) -> bool {
        self.each.is_some()
    }

    /// The most elements that units' gradients took beside what is kept.
    pub fn opened(&self) -> usize {
        self.each.as_ref().map_or(0, |each| each.most)
    }

    /// Where a run is kept.
    pub fn at(&self, run: &Range<usize>) -> Range<usize> {
        self.share.runs.at(run)
    }

    /// What is kept of a run that is kept whole.
    pub fn read(&self, run: &Range<usize>) -> Cow<'_, [K::Real]> {
        self.read_at(self.at(run))
    }

    /// What is at a place among what is kept.
    pub fn read_at(&self, at: Range<usize>) -> Cow<'_, [K::Real]> {
        self.kernels.reals(BufSlice { buf: &self.kept, start: at.start }, at.len())
    }

    pub fn write(&mut self, run: &Range<usize>, from: &[K::Real]) {
        let start = self.at(run).start;
        self.kernels.put_reals(from, PartMut { buf: &mut self.kept, start });
    }

    /// To be added to, by a unit's W.
    pub fn open(&mut self, unit: usize) -> FlatMut<'_, K::Buf> {
        match &mut self.each {
            None => FlatMut::Whole(&mut self.kept),
            Some(each) => {
                each.open(unit);
                FlatMut::Parts(&mut each.open)
            }
        }
    }

    /// A unit is through: hands its gradients to those who keep them, where each microbatch's are summed.
    pub fn close(&mut self, unit: usize) -> Result<(), GroupError> {
        let Some(each) = &mut self.each else { return Ok(()) };
        let own = each.buckets.own(unit);
        let at = each.open.iter().position(|p| p.range == own).expect("the unit was opened");
        let part = each.open.swap_remove(at);
        let runs = Runs::one(own.clone());
        let plain = Runs::new(each.plain[unit].iter().cloned());
        let alone = each.group.is_none();
        for (run, _) in self.share.runs.within(&own) {
            let here = if alone { vec![run] } else { outside(&plain, &run) };
            for run in here {
                let from = BufSlice { buf: &part.buf, start: runs.at(&run).start };
                let to = PartMut { start: self.share.runs.at(&run).start, buf: &mut self.kept };
                self.kernels.add(from, to, run.len());
            }
        }
        if alone {
            return Ok(());
        }
        for piece in each.pieces(unit) {
            let Some(each) = &mut self.each else { return Ok(()) };
            let promise = each.start(&piece, &part.buf, &runs)?;
            each.under_way.push_back((piece, promise));
            if each.under_way.len() > UNDER_WAY {
                self.take_first()?;
            }
        }
        Ok(())
    }

    /// Adds the sums that were under way first, so that they are added in the same order always.
    fn take_first(&mut self) -> Result<(), GroupError> {
        let Some(each) = &mut self.each else { return Ok(()) };
        let Some((ranges, promise)) = each.under_way.pop_front() else { return Ok(()) };
        let sums = promise.wait().map_err(|e| each.failed(0, e.into()))?;
        let (ranges, kept, share) = (&ranges, &mut self.kept, &self.share.runs);
        let kernels = &*self.kernels;
        let mut add = |start: usize, from: &[K::Real]| {
            let mut sums = kernels.wide(from.len());
            kernels.put_reals(from, (&mut sums).into());
            kernels.add((&sums).into(), PartMut { buf: &mut *kept, start }, from.len());
        };
        match each.fixed_order {
            false => copy_all(&sums, std::slice::from_ref(share), ranges, |run, from| {
                add(share.at(&run).start, from);
            }),
            true => {
                let len: usize = ranges.iter().map(|r| r.len()).sum();
                let mut summands = sums.chunks_exact(len);
                let mut sum = summands.next().expect("a group has ranks").to_vec();
                summands.for_each(|summand| add_to(&mut sum, summand));
                let whole = [Runs::new(ranges.iter().cloned())];
                copy_all(&sum, &whole, ranges, |run, from| {
                    for (piece, at) in share.within(&run) {
                        add(at, &from[piece.start - run.start..][..piece.len()]);
                    }
                });
            }
        }
        Ok(())
    }

    /// Waits for all sums that are under way.
    pub fn finish(&mut self) -> Result<(), GroupError> {
        while self.each.as_ref().is_some_and(|each| !each.under_way.is_empty()) {
            self.take_first()?;
        }
        Ok(())
    }
}

impl<K: Kernels> Each<K> {
    pub fn new(
        kernels: Arc<K>,
        calls: Calls,
        (group, me): (Option<(GroupId, Vec<Runs>)>, usize),
        fixed_order: bool,
        buckets: Buckets,
        plain: Vec<Vec<Range<usize>>>,
    ) -> Self {
        let (open, under_way) = (vec![], VecDeque::new());
        Self { kernels, calls, group, me, fixed_order, buckets, plain, open, under_way, most: 0 }
    }

    /// Makes room for a unit's gradients, with what later units have left for them.
    fn open(&mut self, unit: usize) {
        for range in self.buckets.ranges(unit) {
            if self.open.iter().any(|p| p.range == range) {
                continue;
            }
            let mut buf = zeros(&*self.kernels, range.len());
            let inside = |p: &Part<_>| range.start <= p.range.start && p.range.end <= range.end;
            for part in self.open.extract_if(.., |p| inside(p)) {
                let to = PartMut { buf: &mut buf, start: part.range.start - range.start };
                self.kernels.copy((&part.buf).into(), to, part.buf.len());
            }
            self.open.push(Part { range, buf });
            self.most = self.most.max(self.open.iter().map(|p| p.range.len()).sum());
        }
    }

    /// What is dealt out of a unit, in pieces that are not too long.
    fn pieces(&self, unit: usize) -> Vec<Vec<Range<usize>>> {
        let Some((_, members)) = &self.group else { return vec![] };
        pieces(members, &self.plain[unit], PIECE_BYTES / size_of::<K::Real>())
    }

    fn start(
        &self,
        ranges: &[Range<usize>],
        buf: &K::Buf,
        at: &Runs,
    ) -> Result<Promise<Buffer<K::Real>>, GroupError> {
        let (group, members) = self.group.as_ref().expect("who is alone sums nothing up");
        let read = |at: Range<usize>| self.kernels.reals(BufSlice { buf, start: at.start }, at.len());
        let (what, packed) = match self.fixed_order {
            false => (What::ReduceScatter(counts_of(members, ranges)), pack(read, at, members, ranges)),
            true => {
                let all = [Runs::new(ranges.iter().cloned())];
                let counts = vec![all[0].len() as u64; members.len()];
                (What::AllGather(counts), pack(read, at, &all, ranges))
            }
        };
        let promise = self.calls.start(*group, what, &packed, Urgency::Later);
        promise.map_err(|e| self.failed(packed.len(), e.into()))
    }

    fn failed(&self, elements: usize, cause: Box<dyn std::error::Error + Send + Sync>) -> GroupError {
        let size = self.group.as_ref().map_or(1, |(_, members)| members.len());
        GroupError { operation: "a sum of gradients", elements, rank: self.me, size, cause }
    }
}

/// What of a run is in none of these.
fn outside(runs: &Runs, run: &Range<usize>) -> Vec<Range<usize>> {
    let mut rest = vec![];
    let mut at = run.start;
    for (inside, _) in runs.within(run) {
        rest.push(at..inside.start);
        at = inside.end;
    }
    rest.push(at..run.end);
    rest.retain(|r| !r.is_empty());
    rest
}

fn zeros<K: Kernels>(kernels: &K, len: usize) -> K::Buf {
    let mut buf = kernels.wide(len);
    kernels.fill(K::Real::ZERO, (&mut buf).into(), len);
    buf
}

fn add_to<T: Scalar>(to: &mut [T], from: &[T]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += *from);
}
