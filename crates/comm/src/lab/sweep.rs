//! One rank's part of `crossmesh bench collective`: every case checked, then timed as nccl-tests do.
//!
//! A case is called once with elements that are looked at. Then follow rounds, each of as many calls as fill a while,
//! one right behind the other; a round's time is by call, and the slowest rank's counts.

use crossmesh_core::cluster::Cluster;
use crossmesh_core::collective::{Algorithm, Collective, CollectiveOptions, Counts};
use crossmesh_core::dtype::DType;
use crossmesh_core::id::Rank;
use half::{bf16, f16};

use crate::clock::{Clock, Monotonic};
use crate::collectives::{Buffer, CallError, Collectives, Element, GroupId, Reduction};
use crate::engine::Engine;
use crate::error::CommError;
use crate::lab::execute::{Barrier, ExecuteOptions, Failure, Gate, RankReport};
use crate::transport::Link;

/// How long a round should take.
const ROUND_NS: f64 = 20e6;
const MAX_CALLS: f64 = 1000.0;

/// A collective at one size.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    pub collective: Collective,
    pub dtype: DType,
    pub reduction: Reduction,
    /// Of the whole tensor; of an all-to-all, what each rank has.
    pub elements: u64,
    /// Of an all-to-all: everybody has a different count for everybody.
    pub uneven: bool,
    pub algorithm: Algorithm,
    pub fixed_order: bool,
    pub chunk_bytes: Option<u64>,
}

/// Cases for some groups, which all act at once.
#[derive(Debug, Clone, PartialEq)]
pub struct Sweep {
    pub cluster: Cluster,
    pub groups: Vec<Vec<Rank>>,
    pub cases: Vec<Case>,
}

impl Case {
    pub fn options(&self) -> CollectiveOptions {
        let Self { algorithm, fixed_order, chunk_bytes, .. } = *self;
        CollectiveOptions { algorithm, fixed_order, chunk_bytes }
    }

    /// What each of a group's ranks has for each, where that differs: from nothing to twice the mean.
    pub fn rows(&self, ranks: usize) -> Option<Vec<Vec<u64>>> {
        let mean = self.elements / ranks as u64;
        let count =
            |from: usize, to: usize| mean * ((from + 2 * to) % ranks) as u64 * 2 / (ranks as u64 - 1).max(1);
        let row = |from| (0..ranks).map(|to| count(from, to)).collect();
        self.uneven.then(|| (0..ranks).map(row).collect())
    }
}

impl Sweep {
    /// The other ranks of a rank's group.
    pub fn peers(&self, rank: Rank) -> Vec<Rank> {
        let group = self.groups.iter().find(|g| g.contains(&rank));
        group.into_iter().flatten().copied().filter(|r| *r != rank).collect()
    }
}

/// Runs a sweep on one rank: `options.repeat` rounds a case, their times one behind the other. `links` leads to every
/// rank of [`Sweep::peers`].
pub fn execute_sweep(
    sweep: &Sweep,
    rank: Rank,
    links: Vec<(Rank, Box<dyn Link>)>,
    options: &ExecuteOptions,
    barrier: &mut Barrier<'_>,
) -> Result<RankReport, Failure> {
    let mut report = RankReport { synced: true, ..RankReport::idle(rank) };
    let Some(ranks) = sweep.groups.iter().find(|g| g.contains(&rank)) else { return Ok(report) };
    let engine = Engine::new(rank, links, Box::new(Monotonic), options.engine.clone())?;
    let cluster = sweep.cluster.clone();
    let mut comm = Collectives::new(rank, engine, cluster, options.sharing, CollectiveOptions::default());
    let result = run_cases(&mut comm, sweep, ranks, options, barrier, &mut report);
    match result {
        Ok(()) => {
            comm.close();
            Ok(report)
        }
        Err(error) => {
            let flight = comm.engine().flight_record().cloned().map(Box::new);
            Err(Failure { error: comm_error(rank, error), flight })
        }
    }
}

fn comm_error(me: Rank, error: CallError) -> CommError {
    match error {
        CallError::Comm(error) => error,
        other => CommError::System { me, what: "make a call", cause: other.to_string() },
    }
}

fn run_cases(
    comm: &mut Collectives,
    sweep: &Sweep,
    ranks: &[Rank],
    options: &ExecuteOptions,
    barrier: &mut Barrier<'_>,
    report: &mut RankReport,
) -> Result<(), CallError> {
    let group = comm.group(ranks)?;
    for case in &sweep.cases {
        barrier(Gate::Start)?;
        comm.set_options(case.options());
        match case.dtype {
            DType::F64 => run_case::<f64>(comm, group, ranks, case, options, report)?,
            DType::Bf16 => run_case::<bf16>(comm, group, ranks, case, options, report)?,
            DType::F16 => run_case::<f16>(comm, group, ranks, case, options, report)?,
            DType::I64 => run_case::<i64>(comm, group, ranks, case, options, report)?,
            DType::I32 => run_case::<i32>(comm, group, ranks, case, options, report)?,
            _ => run_case::<f32>(comm, group, ranks, case, options, report)?,
        }
    }
    Ok(())
}

fn run_case<T: Sample>(
    comm: &mut Collectives,
    group: GroupId,
    ranks: &[Rank],
    case: &Case,
    options: &ExecuteOptions,
    report: &mut RankReport,
) -> Result<(), CallError> {
    let at = ranks.iter().position(|r| *r == comm.rank()).expect("the rank is in its group");
    let bench = Bench::<T> { group, ranks: ranks.len(), at, root: ranks[0], case, of: Default::default() };
    let mut data = comm.buffer_of(&bench.brought(at))?;
    data = bench.call(comm, data)?;
    if let Some(wrong) = bench.wrong(&data)
        && options.check
    {
        report.verified = false;
        report.wrong.get_or_insert(wrong);
    }
    let mut data = comm.buffer::<T>(bench.brought_len(at))?;
    data.fill(T::default());
    let once_ns = bench.timed(comm, &mut data, 2)?;
    let mut slowest = [once_ns];
    comm.set_options(CollectiveOptions::default());
    comm.all_reduce(group, &mut slowest, Reduction::Max)?;
    comm.set_options(case.options());
    let calls = (ROUND_NS / slowest[0].max(1.0)).clamp(1.0, MAX_CALLS) as u32;
    for _ in 0..options.repeat {
        report.seconds.push(bench.timed(comm, &mut data, calls)? * 1e-9);
    }
    Ok(())
}

/// Elements that a case is checked with.
trait Sample: Element + PartialEq + std::fmt::Debug {
    /// Whole numbers up to this many are exact.
    const EXACT: u64;
    fn of(value: u64) -> Self;
    /// Something that rounds, for sums whose order is fixed.
    fn rough(value: u64) -> Self;
    fn plus(self, other: Self) -> Self;
}

macro_rules! samples {
    ($($type:ty, $exact:expr, $of:expr, $rough:expr, $plus:expr;)*) => {
        $(impl Sample for $type {
            const EXACT: u64 = $exact;
            fn of(value: u64) -> Self {
                let of: fn(u64) -> $type = $of;
                of(value)
            }
            fn rough(value: u64) -> Self {
                let rough: fn(u64) -> $type = $rough;
                rough(value)
            }
            fn plus(self, other: Self) -> Self {
                let plus: fn($type, $type) -> $type = $plus;
                plus(self, other)
            }
        })*
    };
}

samples! {
    f64, 1 << 53, |v| v as f64, |v| v as f64 / 3.0, |a, b| a + b;
    f32, 1 << 24, |v| v as f32, |v| v as f32 / 3.0, |a, b| a + b;
    bf16, 1 << 8, |v| bf16::from_f32(v as f32), |v| bf16::from_f32(v as f32 / 3.0), |a, b| a + b;
    f16, 1 << 11, |v| f16::from_f32(v as f32), |v| f16::from_f32(v as f32 / 3.0), |a, b| a + b;
    i64, 1 << 62, |v| v as i64, |v| v as i64, i64::wrapping_add;
    i32, 1 << 30, |v| v as i32, |v| v as i32, i32::wrapping_add;
}

/// A case on this rank.
struct Bench<'a, T> {
    group: GroupId,
    ranks: usize,
    /// This rank's place in the group.
    at: usize,
    root: Rank,
    case: &'a Case,
    of: std::marker::PhantomData<T>,
}

impl<T: Sample> Bench<'_, T> {
    /// What torch.chunk gives a rank of the whole.
    fn part(&self, at: usize) -> std::ops::Range<usize> {
        let (len, size) = (self.case.elements as usize, (self.case.elements as usize).div_ceil(self.ranks));
        (at * size).min(len)..((at + 1) * size).min(len)
    }

    fn brought_len(&self, at: usize) -> usize {
        match self.case.collective {
            Collective::AllGather => self.part(at).len(),
            Collective::Barrier => 0,
            _ => match self.case.rows(self.ranks) {
                Some(rows) => rows[at].iter().sum::<u64>() as usize,
                None => self.case.elements as usize,
            },
        }
    }

    /// A number that tells a rank's element from others, small enough for exact sums.
    fn number(&self, at: usize, index: usize) -> u64 {
        let mixed = ((index as u64) << 12 ^ at as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33;
        mixed % (T::EXACT / self.ranks as u64).clamp(2, 1 << 10)
    }

    fn value(&self, at: usize, index: usize) -> T {
        match self.case.fixed_order {
            true => T::rough(self.number(at, index)),
            false => T::of(self.number(at, index)),
        }
    }

    fn brought(&self, at: usize) -> Vec<T> {
        (0..self.brought_len(at)).map(|i| self.value(at, i)).collect()
    }

    fn call(&self, comm: &mut Collectives, data: Buffer<T>) -> Result<Buffer<T>, CallError> {
        let (group, reduction, elements) = (self.group, self.case.reduction, self.case.elements);
        let pending = match self.case.collective {
            Collective::AllReduce => comm.start_all_reduce(group, data, reduction)?,
            Collective::ReduceScatter => comm.start_reduce_scatter(group, data, reduction)?,
            Collective::AllGather => comm.start_all_gather_v(group, data, Counts::Even(elements))?,
            Collective::AllToAll => match self.case.rows(self.ranks) {
                Some(rows) => comm.start_all_to_all_v(group, data, rows)?,
                None => comm.start_all_to_all(group, data)?,
            },
            Collective::Broadcast => comm.start_broadcast(group, data, self.root)?,
            Collective::Reduce => comm.start_reduce(group, data, self.root, reduction)?,
            Collective::Barrier => {
                comm.barrier(group)?;
                return Ok(data);
            }
        };
        comm.wait(pending)
    }

    /// Nanoseconds a call, of so many in a row.
    fn timed(&self, comm: &mut Collectives, data: &mut Buffer<T>, calls: u32) -> Result<f64, CallError> {
        comm.barrier(self.group)?;
        let start = Monotonic.now_ns();
        for _ in 0..calls {
            let nothing = comm.buffer::<T>(0)?;
            let brought = std::mem::replace(data, nothing);
            let result = self.call(comm, brought)?;
            // In place, or the next call brings something else of the same length; what it says does not matter.
            *data = match result.len() == self.brought_len(self.at) {
                true => result,
                false => {
                    drop(result);
                    comm.buffer::<T>(self.brought_len(self.at))?
                }
            };
        }
        Ok((Monotonic.now_ns() - start) as f64 / f64::from(calls))
    }

    /// The first element that is not what a loop over all ranks says.
    fn wrong(&self, found: &[T]) -> Option<String> {
        let expected = self.expected();
        let differs = |(f, e): (&T, &T)| f != e;
        let at = found.iter().zip(&expected).position(differs);
        match at {
            _ if found.len() != expected.len() => Some(format!(
                "{}: {} elements, expected {}",
                self.case.collective,
                found.len(),
                expected.len()
            )),
            None => None,
            Some(i) => {
                let (name, found, expected) = (self.case.collective, found[i], expected[i]);
                Some(format!("{name}: element {i} is {found:?}, expected {expected:?}"))
            }
        }
    }

    fn expected(&self) -> Vec<T> {
        let whole = 0..self.case.elements as usize;
        match self.case.collective {
            Collective::Barrier => vec![],
            Collective::AllReduce => whole.map(|i| self.combined(i)).collect(),
            Collective::ReduceScatter => self.part(self.at).map(|i| self.combined(i)).collect(),
            Collective::Reduce if self.at == 0 => whole.map(|i| self.combined(i)).collect(),
            Collective::Reduce => self.brought(self.at),
            Collective::Broadcast => whole.map(|i| self.value(0, i)).collect(),
            Collective::AllGather => (0..self.ranks)
                .flat_map(|at| (0..self.part(at).len()).map(move |i| self.value(at, i)))
                .collect(),
            Collective::AllToAll => (0..self.ranks).flat_map(|from| self.row(from)).collect(),
        }
    }

    /// What a rank has for this one.
    fn row(&self, from: usize) -> Vec<T> {
        let range = match self.case.rows(self.ranks) {
            None => self.part(self.at),
            Some(rows) => {
                let start = rows[from][..self.at].iter().sum::<u64>() as usize;
                start..start + rows[from][self.at] as usize
            }
        };
        range.map(|i| self.value(from, i)).collect()
    }

    /// All ranks' parts of an element as one, in the group's order.
    fn combined(&self, index: usize) -> T {
        let all = 0..self.ranks;
        let sum = || all.clone().map(|at| self.value(at, index)).reduce(T::plus).unwrap_or_default();
        let value = |at: Option<usize>| self.value(at.unwrap_or(0), index);
        match self.case.reduction {
            Reduction::Sum => sum(),
            Reduction::Mean => sum().part_of(self.ranks as u32),
            Reduction::Max => value(all.max_by_key(|at| self.number(*at, index))),
            Reduction::Min => value(all.min_by_key(|at| self.number(*at, index))),
        }
    }
}
