//! Ranks that share the tensors of a stage, and what they say to each other inside a pass.
//!
//! Tensor parallelism needs three things of its ranks: sums of all, the parts of all, and sums handed out in parts. [`Group`]
//! asks for no more, so that threads of a test and ranks of a job look the same to a layer. [`Alone`] is a group of one,
//! [`in_process`] a group of threads, [`Counted`] counts what a group moves.
//!
//! A pass starts a collective and goes on; what it comes to is [`Coming`], until somebody reads it.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub use crossmesh_core::layout::ReduceOp;

use crate::kernels::cpu::HostBuf;
use crate::kernels::scalar::Scalar;
use crate::kernels::{Buffer, Kernels};

/// A collective that did not happen: a rank died, a link was cut.
#[derive(Debug, thiserror::Error)]
#[error("{operation} of {elements} elements over {size} ranks failed on rank {rank} of the group")]
pub struct GroupError {
    pub operation: &'static str,
    pub elements: usize,
    pub rank: usize,
    pub size: usize,
    #[source]
    pub cause: Box<dyn std::error::Error + Send + Sync>,
}

/// What ranks do together, with a buffer each.
#[derive(Debug, Clone, Copy)]
pub enum Collective<'a> {
    /// Every rank gets the combination of all ranks' buffers.
    AllReduce(ReduceOp),
    /// Every rank brings its own of the parts, in its place in the whole, and gets all of them.
    AllGather(&'a [Range<usize>]),
    /// Every rank brings summands of the whole, and gets its own part of the sum alone.
    ReduceScatter(&'a [Range<usize>]),
}

/// Waits for what a collective comes to.
type Answer<B> = Box<dyn FnOnce() -> Result<B, GroupError> + Send>;

/// What a collective under way comes to. Nobody holds a pass up before [`Coming::wait`].
#[must_use = "a collective ends when it is waited for"]
pub struct Coming<B> {
    answer: Answer<B>,
    /// To be added when it is there.
    plus: Option<B>,
}

impl<B> std::fmt::Debug for Coming<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a collective under way")
    }
}

impl<B> Coming<B> {
    pub fn new(answer: impl FnOnce() -> Result<B, GroupError> + Send + 'static) -> Self {
        Self { answer: Box::new(answer), plus: None }
    }
}

impl<B: Buffer> Coming<B> {
    /// It is there already.
    pub fn there(buf: B) -> Self {
        Self::new(move || Ok(buf))
    }

    /// With something added to it.
    pub fn plus<K: Kernels<Buf = B>>(mut self, kernels: &K, other: B) -> Self {
        match &mut self.plus {
            Some(sum) => kernels.add((&other).into(), sum.into(), other.len()),
            plus => *plus = Some(other),
        }
        self
    }

    pub fn wait<K: Kernels<Buf = B>>(self, kernels: &K) -> Result<B, GroupError> {
        let mut result = (self.answer)()?;
        if let Some(plus) = self.plus {
            kernels.add((&plus).into(), (&mut result).into(), plus.len());
        }
        Ok(result)
    }
}

/// Ranks that meet in collectives. All of them call the same ones in the same order.
pub trait Group<B>: Send + Sync {
    fn rank(&self) -> usize;
    fn size(&self) -> usize;

    /// Starts a collective. Ranks may start others before they wait for it, all of them in the same order.
    fn start(&self, what: Collective<'_>, buf: B) -> Result<Coming<B>, GroupError>;

    /// Every rank gets the combination of all ranks' buffers, and all of them the same bits.
    fn all_reduce(&self, buf: &mut B, op: ReduceOp) -> Result<(), GroupError>;

    /// Every rank brings its own of the `parts` of a tensor (in its place in `whole`) and gets all of them.
    fn all_gather(&self, whole: &mut B, parts: &[Range<usize>]) -> Result<(), GroupError>;

    /// Every rank brings summands of the whole tensor and gets its own part of the sum; the rest of `whole` is unspecified
    /// afterwards.
    fn reduce_scatter(&self, whole: &mut B, parts: &[Range<usize>]) -> Result<(), GroupError>;
}

/// A group of one: everything is there already.
#[derive(Debug, Clone, Copy, Default)]
pub struct Alone;

impl<B: Buffer> Group<B> for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn start(&self, _: Collective<'_>, buf: B) -> Result<Coming<B>, GroupError> {
        Ok(Coming::there(buf))
    }

    fn all_reduce(&self, _: &mut B, _: ReduceOp) -> Result<(), GroupError> {
        Ok(())
    }

    fn all_gather(&self, _: &mut B, _: &[Range<usize>]) -> Result<(), GroupError> {
        Ok(())
    }

    fn reduce_scatter(&self, _: &mut B, _: &[Range<usize>]) -> Result<(), GroupError> {
        Ok(())
    }
}

/// The parts of `len` rows of `width` elements over the ranks of a group, by torch.chunk's rule.
pub fn chunked(rows: usize, width: usize, size: usize) -> Vec<Range<usize>> {
    let each = rows.div_ceil(size.max(1));
    let at = |i: usize| (i * each).min(rows) * width;
    (0..size).map(|i| at(i)..at(i + 1)).collect()
}

/// What a rank's group has moved so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    pub all_reduces: u64,
    pub all_gathers: u64,
    pub reduce_scatters: u64,
    /// Elements this rank had to send, as a ring sends them: all of a tensor but its own part to scatter a sum, the same
    /// to gather, twice that to reduce.
    pub elements: u64,
}

/// Counts the traffic of a group.
pub struct Counted<B> {
    group: Arc<dyn Group<B>>,
    traffic: Mutex<Traffic>,
}

impl<B> Counted<B> {
    pub fn new(group: Arc<dyn Group<B>>) -> Self {
        Self { group, traffic: Mutex::default() }
    }

    pub fn traffic(&self) -> Traffic {
        *lock(&self.traffic)
    }

    fn count(&self, what: Collective<'_>, all: usize)
    where
        B: Buffer,
    {
        let mut traffic = lock(&self.traffic);
        let (calls, times, own) = match what {
            Collective::AllReduce(_) => {
                (&mut traffic.all_reduces, 2, chunked(all, 1, self.size())[self.rank()].clone())
            }
            Collective::AllGather(parts) => (&mut traffic.all_gathers, 1, parts[self.rank()].clone()),
            Collective::ReduceScatter(parts) => (&mut traffic.reduce_scatters, 1, parts[self.rank()].clone()),
        };
        *calls += 1;
        traffic.elements += times * (all - own.len()) as u64;
    }
}

impl<B: Buffer> Group<B> for Counted<B> {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn start(&self, what: Collective<'_>, buf: B) -> Result<Coming<B>, GroupError> {
        self.count(what, buf.len());
        self.group.start(what, buf)
    }

    fn all_reduce(&self, buf: &mut B, op: ReduceOp) -> Result<(), GroupError> {
        self.count(Collective::AllReduce(op), buf.len());
        self.group.all_reduce(buf, op)
    }

    fn all_gather(&self, whole: &mut B, parts: &[Range<usize>]) -> Result<(), GroupError> {
        self.count(Collective::AllGather(parts), whole.len());
        self.group.all_gather(whole, parts)
    }

    fn reduce_scatter(&self, whole: &mut B, parts: &[Range<usize>]) -> Result<(), GroupError> {
        self.count(Collective::ReduceScatter(parts), whole.len());
        self.group.reduce_scatter(whole, parts)
    }
}

/// How long threads wait for each other.
const PATIENCE: Duration = Duration::from_secs(60);

/// A group of `size` threads of this process, one member for each.
pub fn in_process<T: Scalar>(size: usize) -> Vec<Arc<dyn Group<HostBuf<T>>>> {
    let table = Arc::new(Table {
        state: Mutex::new(Seats { brought: vec![Vec::new(); size], arrived: 0, round: 0 }),
        changed: Condvar::new(),
    });
    let member = |rank| Arc::new(Member { table: Arc::clone(&table), rank, size }) as _;
    (0..size).map(member).collect()
}

struct Member<T> {
    table: Arc<Table<T>>,
    rank: usize,
    size: usize,
}

/// Where threads lay down what they bring.
struct Table<T> {
    state: Mutex<Seats<T>>,
    changed: Condvar,
}

struct Seats<T> {
    brought: Vec<Vec<T>>,
    arrived: usize,
    round: u64,
}

/// A rank that did not come to a collective in time.
#[derive(Debug, thiserror::Error)]
#[error("only {arrived} of {size} threads came within {} s", PATIENCE.as_secs())]
struct Missing {
    arrived: usize,
    size: usize,
}

impl<T: Scalar> Member<T> {
    /// Lays `mine` down, waits for all, and looks at what everybody brought. Nobody leaves before all have looked.
    fn meet(
        &self,
        operation: &'static str,
        mine: &[T],
        look: impl FnOnce(&[Vec<T>]),
    ) -> Result<(), GroupError> {
        let fail = |missing: Missing| GroupError {
            operation,
            elements: mine.len(),
            rank: self.rank,
            size: self.size,
            cause: Box::new(missing),
        };
        lock(&self.table.state).brought[self.rank] = mine.to_vec();
        self.wait_for_all().map_err(fail)?;
        look(&lock(&self.table.state).brought);
        self.wait_for_all().map_err(fail)
    }

    fn wait_for_all(&self) -> Result<(), Missing> {
        let mut seats = lock(&self.table.state);
        let round = seats.round;
        seats.arrived += 1;
        if seats.arrived == self.size {
            seats.arrived = 0;
            seats.round += 1;
            self.table.changed.notify_all();
            return Ok(());
        }
        let waited = self.table.changed.wait_timeout_while(seats, PATIENCE, |s| s.round == round);
        let (seats, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        match timeout.timed_out() {
            true => Err(Missing { arrived: seats.arrived, size: self.size }),
            false => Ok(()),
        }
    }
}

impl<T: Scalar> Group<HostBuf<T>> for Member<T> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    /// Threads meet here and now: they have nothing to gain by not waiting.
    fn start(&self, what: Collective<'_>, mut buf: HostBuf<T>) -> Result<Coming<HostBuf<T>>, GroupError> {
        match what {
            Collective::AllReduce(op) => self.all_reduce(&mut buf, op)?,
            Collective::AllGather(parts) => self.all_gather(&mut buf, parts)?,
            Collective::ReduceScatter(parts) => {
                self.reduce_scatter(&mut buf, parts)?;
                buf = buf[parts[self.rank].clone()].to_vec().into();
            }
        }
        Ok(Coming::there(buf))
    }

    fn all_reduce(&self, buf: &mut HostBuf<T>, op: ReduceOp) -> Result<(), GroupError> {
        let mine = buf.to_vec();
        self.meet("all-reduce", &mine, |all| combine(all, op, 0..mine.len(), buf))
    }

    fn all_gather(&self, whole: &mut HostBuf<T>, parts: &[Range<usize>]) -> Result<(), GroupError> {
        let mine = whole[parts[self.rank].clone()].to_vec();
        self.meet("all-gather", &mine, |all| {
            for (part, from) in parts.iter().zip(all) {
                whole[part.clone()].copy_from_slice(from);
            }
        })
    }

    fn reduce_scatter(&self, whole: &mut HostBuf<T>, parts: &[Range<usize>]) -> Result<(), GroupError> {
        let mine = whole.to_vec();
        self.meet("reduce-scatter", &mine, |all| {
            combine(all, ReduceOp::Sum, parts[self.rank].clone(), whole);
        })
    }
}

/// Combines a range of all ranks' buffers, in the order of the ranks.
fn combine<T: Scalar>(all: &[Vec<T>], op: ReduceOp, range: Range<usize>, out: &mut [T]) {
    for i in range {
        let values = all.iter().map(|from| from[i]);
        let combined = match op {
            ReduceOp::Sum => values.reduce(|a, b| a + b),
            ReduceOp::Max => values.reduce(T::larger),
            ReduceOp::Min => values.reduce(|a, b| if b < a { b } else { a }),
        };
        out[i] = combined.expect("a group has ranks");
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every rank's result of a collective over `[rank * 10, rank * 10 + 1, ..]`.
    fn collect(
        size: usize,
        len: usize,
        f: impl Fn(&dyn Group<HostBuf<f64>>, &mut HostBuf<f64>) + Sync,
    ) -> Vec<Vec<f64>> {
        let members = in_process::<f64>(size);
        let run = |member: &Arc<dyn Group<HostBuf<f64>>>| {
            let values: Vec<f64> = (0..len).map(|i| (member.rank() * 10 + i) as f64).collect();
            let mut buf = HostBuf::from(values);
            f(&**member, &mut buf);
            buf.to_vec()
        };
        std::thread::scope(|scope| {
            let run = &run;
            let threads: Vec<_> = members.iter().map(|m| scope.spawn(move || run(m))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    #[test]
    fn reductions_reach_every_rank() {
        let maxima = collect(3, 2, |group, buf| group.all_reduce(buf, ReduceOp::Max).unwrap());
        assert_eq!(maxima, vec![vec![20.0, 21.0]; 3]);
        let sums = collect(2, 2, |group, buf| group.all_reduce(buf, ReduceOp::Sum).unwrap());
        assert_eq!(sums, vec![vec![10.0, 12.0]; 2]);
    }

    #[test]
    fn parts_are_gathered_and_sums_scattered() {
        let parts = chunked(5, 1, 3);
        assert_eq!(parts, [0..2, 2..4, 4..5]);
        let gathered = collect(3, 5, |group, buf| group.all_gather(buf, &parts).unwrap());
        assert_eq!(gathered, vec![vec![0.0, 1.0, 12.0, 13.0, 24.0]; 3]);
        let members = in_process::<f64>(2);
        std::thread::scope(|scope| {
            for (rank, member) in members.iter().enumerate() {
                scope.spawn(move || {
                    let mut buf = HostBuf::from(vec![1.0, 2.0, 3.0]);
                    member.reduce_scatter(&mut buf, &chunked(3, 1, 2)).unwrap();
                    assert_eq!(buf[chunked(3, 1, 2)[rank].clone()], [vec![2.0, 4.0], vec![6.0]][rank][..]);
                });
            }
        });
    }

    #[test]
    fn traffic_is_what_a_ring_sends() {
        let counted = Counted::new(Arc::new(Alone) as Arc<dyn Group<HostBuf<f64>>>);
        counted.all_reduce(&mut HostBuf::from(vec![0.0; 6]), ReduceOp::Sum).unwrap();
        assert_eq!(counted.traffic().elements, 0);
        let members = in_process::<f64>(3);
        std::thread::scope(|scope| {
            for member in &members {
                scope.spawn(|| {
                    let counted = Counted::new(Arc::clone(member));
                    let mut buf = HostBuf::from(vec![0.0; 6]);
                    counted.all_reduce(&mut buf, ReduceOp::Sum).unwrap();
                    counted.all_gather(&mut buf, &chunked(6, 1, 3)).unwrap();
                    counted.reduce_scatter(&mut buf, &chunked(6, 1, 3)).unwrap();
                    let wanted =
                        Traffic { all_reduces: 1, all_gathers: 1, reduce_scatters: 1, elements: 8 + 4 + 4 };
                    assert_eq!(counted.traffic(), wanted);
                });
            }
        });
    }
}
