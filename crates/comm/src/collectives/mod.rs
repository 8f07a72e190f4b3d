//! Collectives for a program: all-reduce and the others, on slices or on buffers that peers can read.
//!
//! A call is planned, proven and lowered the first time, and run by the engine like every other program; the plan is
//! kept for the next call of its kind. Calls can be started, left under way next to others and to reshards, and waited
//! for in any order. All members of a group make the same calls on it in the same order; calls on different groups have
//! no order between them.
//!
//! ```
//! use crossmesh_comm::collectives::{Collectives, Reduction};
//!
//! let sums = Collectives::in_threads(4, |comm| {
//!     let all = comm.world()?;
//!     let mine = comm.rank().0 as f32;
//!
//!     // On a slice, at once.
//!     let mut loss = [mine];
//!     comm.all_reduce(all, &mut loss, Reduction::Mean)?;
//!     assert_eq!(loss, [1.5]);
//!
//!     // Started, and waited for later: no copy, the buffer itself is what peers read.
//!     let mut gradients = comm.buffer::<f32>(1000)?;
//!     gradients.fill(mine);
//!     let under_way = comm.start_all_reduce(all, gradients, Reduction::Sum)?;
//!     // ... compute something else, and call `comm.progress()` now and then ...
//!     let gradients = comm.wait(under_way)?;
//!     Ok(gradients[999])
//! })?;
//! assert_eq!(sums, [6.0; 4]);
//! # Ok::<(), crossmesh_comm::collectives::CallError>(())
//! ```
//!
//! The order in which a sum is added up is part of its plan, so a call gives the same bits every time it is made with
//! the same group, sizes and cluster. With `fixed_order` in the options they do not depend on those either: the parts
//! are added one by one in the group's order, in the elements' own type, whatever the algorithm. (Of several NaNs, which
//! one a sum becomes is not promised.)

mod call;
mod element;
mod error;
mod groups;
mod pool;
mod threads;

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::Arc;

use crossmesh_core::cluster::Cluster;
use crossmesh_core::collective::{Call, Collective, CollectiveOptions, Counts};
use crossmesh_core::id::Rank;
use rustc_hash::FxHashMap;

pub use element::{Element, Reduction};
pub use error::CallError;
pub use groups::{FIRST_JOB, GroupId};
pub use pool::Buffer;

use crate::buffer::Sharing;
use crate::engine::{Engine, JobReport};
use call::{Planned, UnderWay};
use groups::Groups;
use pool::Pool;

/// A rank's collectives, over its engine.
pub struct Collectives {
    me: Rank,
    engine: Engine,
    cluster: Cluster,
    options: CollectiveOptions,
    priority: u32,
    pool: Arc<Pool>,
    groups: Groups,
    plans: FxHashMap<(Call, CollectiveOptions), Arc<Planned>>,
    under_way: BTreeMap<u32, UnderWay>,
}

/// Makes buffers that a rank's [`Collectives`] take.
#[derive(Debug, Clone)]
pub struct Allocator {
    me: Rank,
    pool: Arc<Pool>,
}

impl Allocator {
    /// A copy that peers can read.
    pub fn buffer_of<T: Element>(&self, elements: &[T]) -> Result<Buffer<T>, CallError> {
        Buffer::copied_from(&self.pool, elements).map_err(|e| {
            let (me, bytes, cause) = (self.me, size_of_val(elements) as u64, e.to_string());
            CallError::Memory { me, bytes, cause }
        })
    }
}

/// A call that was started. Its buffer comes back with [`Collectives::wait`].
#[derive(Debug)]
#[must_use = "a call ends when it is waited for"]
pub struct Pending<T> {
    job: u32,
    of: PhantomData<T>,
}

impl Collectives {
    /// `cluster` says who is on which host, and how fast links are: algorithms are chosen by it. It, and the options,
    /// are the same on all ranks. `sharing` is [`Sharing::Host`] where peers on the host can map memory.
    pub fn new(
        me: Rank,
        engine: Engine,
        cluster: Cluster,
        sharing: Sharing,
        options: CollectiveOptions,
    ) -> Self {
        Self {
            me,
            engine,
            cluster,
            options,
            priority: 0,
            pool: Pool::new(sharing),
            groups: Groups::default(),
            plans: FxHashMap::default(),
            under_way: BTreeMap::new(),
        }
    }

    pub fn rank(&self) -> Rank {
        self.me
    }

    /// How the calls that follow are planned; the same on all their ranks.
    pub fn set_options(&mut self, options: CollectiveOptions) {
        self.options = options;
    }

    /// The calls that follow send before those of a lower priority.
    pub fn set_priority(&mut self, priority: u32) {
        self.priority = priority;
    }

    /// The engine, to run other programs beside the collectives. Their ids are below [`FIRST_JOB`].
    pub fn engine(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// The same to look at.
    pub fn engine_ref(&self) -> &Engine {
        &self.engine
    }

    /// Says farewell to the peers, so that the end of the connections is no accident.
    pub fn close(mut self) {
        self.engine.close();
    }

    /// Elements that peers can read, zero or left over from an earlier buffer.
    pub fn buffer<T: Element>(&self, len: usize) -> Result<Buffer<T>, CallError> {
        Buffer::new(&self.pool, len).map_err(|e| self.no_memory(len * size_of::<T>(), &e))
    }

    /// A copy that peers can read.
    pub fn buffer_of<T: Element>(&self, elements: &[T]) -> Result<Buffer<T>, CallError> {
        Buffer::copied_from(&self.pool, elements).map_err(|e| self.no_memory(size_of_val(elements), &e))
    }

    /// Makes buffers elsewhere, in another thread for instance.
    pub fn allocator(&self) -> Allocator {
        Allocator { me: self.me, pool: self.pool.clone() }
    }

    fn no_memory(&self, bytes: usize, cause: &std::io::Error) -> CallError {
        CallError::Memory { me: self.me, bytes: bytes as u64, cause: cause.to_string() }
    }

    /// Moves what can be moved without waiting.
    pub fn progress(&mut self) -> Result<(), CallError> {
        if let Some(any) = self.under_way.values().next() {
            self.engine.test(any.handle)?;
        }
        Ok(())
    }

    /// Moves what can be moved without waiting, and says whether a call has ended.
    pub fn test<T>(&mut self, pending: &Pending<T>) -> Result<bool, CallError> {
        match self.under_way.get(&pending.job) {
            Some(under_way) => Ok(self.engine.test(under_way.handle)?),
            None => Ok(true),
        }
    }

    /// Whether a call has ended, without moving anything.
    pub fn has_ended<T>(&self, pending: &Pending<T>) -> bool {
        self.under_way.get(&pending.job).is_none_or(|u| self.engine.has_ended(u.handle))
    }

    /// Waits for a call's end, and hands out its result.
    pub fn wait<T: Element>(&mut self, pending: Pending<T>) -> Result<Buffer<T>, CallError> {
        self.wait_and_report(pending).map(|(buffer, _)| buffer)
    }
}

/// Calls that are started. Buffers are taken and given back: nobody touches them meanwhile.
impl Collectives {
    /// Everybody's elements become one for all.
    pub fn start_all_reduce<T: Element>(
        &mut self,
        group: GroupId,
        elements: Buffer<T>,
        reduction: Reduction,
    ) -> Result<Pending<T>, CallError> {
        let call = self.call::<T>(Collective::AllReduce, group, Counts::Even(elements.len() as u64))?;
        self.start(group, call.with_op(reduction.op()), elements, reduction)
    }

    /// Everybody's elements become one, and each keeps a part: by torch.chunk's rule, in the group's order.
    pub fn start_reduce_scatter<T: Element>(
        &mut self,
        group: GroupId,
        elements: Buffer<T>,
        reduction: Reduction,
    ) -> Result<Pending<T>, CallError> {
        let counts = Counts::Even(elements.len() as u64);
        self.start_reduce_scatter_v(group, elements, counts, reduction)
    }

    /// The same with a count for every rank.
    pub fn start_reduce_scatter_v<T: Element>(
        &mut self,
        group: GroupId,
        elements: Buffer<T>,
        counts: Counts,
        reduction: Reduction,
    ) -> Result<Pending<T>, CallError> {
        let call = self.call::<T>(Collective::ReduceScatter, group, counts)?;
        self.start(group, call.with_op(reduction.op()), elements, reduction)
    }

    /// Everybody gets everybody's part: `total` elements, dealt out by torch.chunk's rule.
    pub fn start_all_gather<T: Element>(
        &mut self,
        group: GroupId,
        part: Buffer<T>,
        total: u64,
    ) -> Result<Pending<T>, CallError> {
        self.start_all_gather_v(group, part, Counts::Even(total))
    }

    /// The same with a count for every rank.
    pub fn start_all_gather_v<T: Element>(
        &mut self,
        group: GroupId,
        part: Buffer<T>,
        counts: Counts,
    ) -> Result<Pending<T>, CallError> {
        let call = self.call::<T>(Collective::AllGather, group, counts)?;
        self.start(group, call, part, Reduction::Sum)
    }

    /// Each has something for each, in the group's order, and gets something of each.
    pub fn start_all_to_all<T: Element>(
        &mut self,
        group: GroupId,
        elements: Buffer<T>,
    ) -> Result<Pending<T>, CallError> {
        let call = self.call::<T>(Collective::AllToAll, group, Counts::Even(elements.len() as u64))?;
        self.start(group, call, elements, Reduction::Sum)
    }

    /// The same with counts: a row for every sender, the same matrix on all ranks.
    pub fn start_all_to_all_v<T: Element>(
        &mut self,
        group: GroupId,
        elements: Buffer<T>,
        counts: Vec<Vec<u64>>,
    ) -> Result<Pending<T>, CallError> {
        let call = self.call::<T>(Collective::AllToAll, group, Counts::PerPair(counts))?;
        self.start(group, call, elements, Reduction::Sum)
    }

    /// The root's elements for all; the buffers of the others are overwritten.
    pub fn start_broadcast<T: Element>(
        &mut self,
        group: GroupId,
        elements: Buffer<T>,
        root: Rank,
    ) -> Result<Pending<T>, CallError> {
        let call = self.call::<T>(Collective::Broadcast, group, Counts::Even(elements.len() as u64))?;
        self.start(group, call.with_root(root), elements, Reduction::Sum)
    }

    /// Everybody's elements become one for the root; the others get theirs back.
    pub fn start_reduce<T: Element>(
        &mut self,
        group: GroupId,
        elements: Buffer<T>,
        root: Rank,
        reduction: Reduction,
    ) -> Result<Pending<T>, CallError> {
        let call = self.call::<T>(Collective::Reduce, group, Counts::Even(elements.len() as u64))?;
        self.start(group, call.with_op(reduction.op()).with_root(root), elements, reduction)
    }

    /// Ends when everybody has come so far.
    pub fn start_barrier(&mut self, group: GroupId) -> Result<Pending<u8>, CallError> {
        let call = self.call::<u8>(Collective::Barrier, group, Counts::Even(1))?;
        let nothing = self.buffer(1)?;
        self.start(group, call, nothing, Reduction::Sum)
    }
}

/// Calls on slices, done when they return.
impl Collectives {
    pub fn all_reduce<T: Element>(
        &mut self,
        group: GroupId,
        elements: &mut [T],
        reduction: Reduction,
    ) -> Result<(), CallError> {
        let pending = self.start_all_reduce(group, self.buffer_of(elements)?, reduction)?;
        elements.copy_from_slice(&self.wait(pending)?);
        Ok(())
    }

    pub fn reduce_scatter<T: Element>(
        &mut self,
        group: GroupId,
        elements: &[T],
        part: &mut [T],
        reduction: Reduction,
    ) -> Result<(), CallError> {
        let pending = self.start_reduce_scatter(group, self.buffer_of(elements)?, reduction)?;
        let mine = self.wait(pending)?;
        self.copy_out(Collective::ReduceScatter, &mine, part)
    }

    pub fn all_gather<T: Element>(
        &mut self,
        group: GroupId,
        part: &[T],
        elements: &mut [T],
    ) -> Result<(), CallError> {
        let pending = self.start_all_gather(group, self.buffer_of(part)?, elements.len() as u64)?;
        elements.copy_from_slice(&self.wait(pending)?);
        Ok(())
    }

    pub fn all_to_all<T: Element>(
        &mut self,
        group: GroupId,
        elements: &[T],
        received: &mut [T],
    ) -> Result<(), CallError> {
        let pending = self.start_all_to_all(group, self.buffer_of(elements)?)?;
        let mine = self.wait(pending)?;
        self.copy_out(Collective::AllToAll, &mine, received)
    }

    /// `counts[i]` of the elements, in order, go to the group's rank `i`. The ranks tell each other how many first.
    pub fn all_to_all_v<T: Element>(
        &mut self,
        group: GroupId,
        elements: &[T],
        counts: &[u64],
    ) -> Result<Vec<T>, CallError> {
        let rows = self.exchange_counts(group, counts)?;
        let pending = self.start_all_to_all_v(group, self.buffer_of(elements)?, rows)?;
        Ok(self.wait(pending)?.to_vec())
    }

    /// Everybody's counts for everybody, from each one's own.
    pub fn exchange_counts(&mut self, group: GroupId, counts: &[u64]) -> Result<Vec<Vec<u64>>, CallError> {
        let ranks = self.groups.get(group)?.group.len();
        let mine: Vec<i64> = counts.iter().map(|count| *count as i64).collect();
        let mut all = vec![0i64; ranks * ranks];
        self.all_gather(group, &mine, &mut all)?;
        Ok(all.chunks(ranks).map(|row| row.iter().map(|count| *count as u64).collect()).collect())
    }

    pub fn broadcast<T: Element>(
        &mut self,
        group: GroupId,
        elements: &mut [T],
        root: Rank,
    ) -> Result<(), CallError> {
        let pending = self.start_broadcast(group, self.buffer_of(elements)?, root)?;
        elements.copy_from_slice(&self.wait(pending)?);
        Ok(())
    }

    pub fn reduce<T: Element>(
        &mut self,
        group: GroupId,
        elements: &mut [T],
        root: Rank,
        reduction: Reduction,
    ) -> Result<(), CallError> {
        let pending = self.start_reduce(group, self.buffer_of(elements)?, root, reduction)?;
        elements.copy_from_slice(&self.wait(pending)?);
        Ok(())
    }

    pub fn barrier(&mut self, group: GroupId) -> Result<(), CallError> {
        let pending = self.start_barrier(group)?;
        self.wait(pending).map(|_| ())
    }

    fn copy_out<T: Element>(
        &self,
        collective: Collective,
        from: &[T],
        into: &mut [T],
    ) -> Result<(), CallError> {
        if from.len() != into.len() {
            let (me, found, expected) = (self.me, into.len(), from.len() as u64);
            return Err(CallError::Length { collective, me, what: "has room for", found, expected });
        }
        into.copy_from_slice(from);
        Ok(())
    }
}

impl Collectives {
    /// As [`Collectives::wait`], with what the engine has to say of it.
    pub fn wait_and_report<T: Element>(
        &mut self,
        pending: Pending<T>,
    ) -> Result<(Buffer<T>, JobReport), CallError> {
        let handle = self.under_way.get(&pending.job).expect("a pending call is under way").handle;
        let report = self.engine.wait(handle)?;
        Ok((self.take_result(&pending), report))
    }

    /// The result of a call that has ended, at once; else the call again. For whoever goes on to drive the engine: what peers
    /// wait for may still have to be sent.
    pub fn finish<T: Element>(&mut self, pending: Pending<T>) -> Result<Buffer<T>, Pending<T>> {
        let handle = self.under_way.get(&pending.job).expect("a pending call is under way").handle;
        match self.engine.finish(handle) {
            Some(_) => Ok(self.take_result(&pending)),
            None => Err(pending),
        }
    }

    fn take_result<T: Element>(&mut self, pending: &Pending<T>) -> Buffer<T> {
        let under_way = self.under_way.remove(&pending.job).expect("a pending call is under way");
        let mut buffer = Buffer { raw: under_way.result, of: PhantomData };
        if let Some(parts) = under_way.divide_by {
            buffer.iter_mut().for_each(|e: &mut T| *e = e.part_of(parts));
        }
        buffer
    }
}
