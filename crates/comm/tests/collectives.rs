//! Collectives against loops: random groups, sizes, dtypes and algorithms, over every transport.

mod common;

use std::fmt::Debug;

use common::{KINDS, Kind, link_pair};
use crossmesh_comm::buffer::{RankBuffers, Sharing};
use crossmesh_comm::clock::Monotonic;
use crossmesh_comm::collectives::{CallError, Collectives, Element, GroupId, Reduction};
use crossmesh_comm::engine::{Engine, EngineOptions, JobSpec};
use crossmesh_comm::lab::pattern;
use crossmesh_core::cluster::{Cluster, Host};
use crossmesh_core::collective::{Algorithm, CollectiveOptions, Counts};
use crossmesh_core::id::Rank;
use crossmesh_core::reshard::Strategy;
use crossmesh_core::reshard::lower::Addressing;
use crossmesh_core::verify::Verified;
use crossmesh_testkit::seed::Seed;
use half::{bf16, f16};

/// Runs a program on every rank of a cluster, each a thread, over links of one kind.
fn run<R: Send>(
    kind: Kind,
    cluster: &Cluster,
    program: impl Fn(&mut Collectives) -> Result<R, CallError> + Sync,
) -> Vec<R> {
    let ranks = cluster.num_devices() as u32;
    let mut links: Vec<common::Links> = (0..ranks).map(|_| vec![]).collect();
    for (a, b) in (0..ranks).flat_map(|b| (0..b).map(move |a| (a, b))) {
        let (x, y) = link_pair(kind, Rank(a), Rank(b));
        links[a as usize].push((Rank(b), x));
        links[b as usize].push((Rank(a), y));
    }
    let sharing = if kind == Kind::Shm { Sharing::Host } else { Sharing::Private };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..)
            .map(Rank)
            .zip(links)
            .map(|(me, links)| {
                let program = &program;
                scope.spawn(move || {
                    let options = EngineOptions { deadline_ms: 20_000, ..Default::default() };
                    let engine = Engine::new(me, links, Box::new(Monotonic), options).unwrap();
                    let (cluster, options) = (cluster.clone(), CollectiveOptions::default());
                    let mut comm = Collectives::new(me, engine, cluster, sharing, options);
                    let result = program(&mut comm).unwrap_or_else(|e| panic!("{kind:?} {me}: {e}"));
                    comm.close();
                    result
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn cluster(devices: &[u32]) -> Cluster {
    Cluster::of_hosts(devices.iter().map(|d| Host::with_devices(*d)).collect())
}

/// A number, and the same number as an element.
trait Number: Element + PartialEq + Debug {
    fn of(value: i64) -> Self;
    /// Something whose sums round.
    fn rough(seed: &mut Seed) -> Self;
    fn plus(self, other: Self) -> Self;
    fn bits(self) -> u64;
}

macro_rules! numbers {
    ($($type:ty, $of:expr, $rough:expr, $plus:expr, $bits:expr;)*) => {
        $(impl Number for $type {
            fn of(value: i64) -> Self {
                let of: fn(i64) -> $type = $of;
                of(value)
            }
            fn rough(seed: &mut Seed) -> Self {
                let rough: fn(f64) -> $type = $rough;
                rough((seed.draw() >> 11) as f64 / (1u64 << 50) as f64 - 4.0)
            }
            fn plus(self, other: Self) -> Self {
                let plus: fn($type, $type) -> $type = $plus;
                plus(self, other)
            }
            fn bits(self) -> u64 {
                let bits: fn($type) -> u64 = $bits;
                bits(self)
            }
        })*
    };
}

numbers! {
    f64, |v| v as f64, |x| x / 3.0, |a, b| a + b, |x| x.to_bits();
    f32, |v| v as f32, |x| x as f32 / 3.0, |a, b| a + b, |x| u64::from(x.to_bits());
    bf16, |v| bf16::from_f32(v as f32), |x| bf16::from_f64(x / 3.0),
        |a, b| bf16::from_f32(a.to_f32() + b.to_f32()), |x| u64::from(x.to_bits());
    f16, |v| f16::from_f32(v as f32), |x| f16::from_f64(x / 3.0),
        |a, b| f16::from_f32(a.to_f32() + b.to_f32()), |x| u64::from(x.to_bits());
    i32, |v| v as i32, |x| (x * 1e9) as i32, i32::wrapping_add, |x| x as u64;
    i64, |v| v, |x| (x * 1e18) as i64, i64::wrapping_add, |x| x as u64;
}

/// What a rank brings to a call: small whole numbers, so that every sum is exact.
fn brought(call: u64, rank: Rank, len: usize) -> Vec<i64> {
    let mut seed = Seed(call * 1000 + u64::from(rank.0));
    (0..len).map(|_| seed.below(15) as i64 - 7).collect()
}

fn elements<T: Number>(values: &[i64]) -> Vec<T> {
    values.iter().map(|v| T::of(*v)).collect()
}

/// torch.chunk's rule.
fn chunk(len: usize, parts: usize, part: usize) -> std::ops::Range<usize> {
    let size = len.div_ceil(parts);
    (part * size).min(len)..((part + 1) * size).min(len)
}

/// The reduction of what all bring, element by element; a mean as the sum.
fn reduced(call: u64, ranks: &[Rank], len: usize, reduction: Reduction) -> Vec<i64> {
    let parts: Vec<Vec<i64>> = ranks.iter().map(|r| brought(call, *r, len)).collect();
    let combine = |i: usize| {
        let column = parts.iter().map(|p| p[i]);
        match reduction {
            Reduction::Sum | Reduction::Mean => column.sum::<i64>(),
            Reduction::Max => column.max().unwrap(),
            Reduction::Min => column.min().unwrap(),
        }
    };
    (0..len).map(combine).collect()
}

fn expected<T: Number>(call: u64, ranks: &[Rank], len: usize, reduction: Reduction) -> Vec<T> {
    let sums = elements::<T>(&reduced(call, ranks, len, reduction));
    match reduction {
        Reduction::Mean => sums.into_iter().map(|s| s.part_of(ranks.len() as u32)).collect(),
        _ => sums,
    }
}

/// Every collective once, of one group and one dtype.
fn all_collectives<T: Number>(
    comm: &mut Collectives,
    group: GroupId,
    ranks: &[Rank],
    number: u64,
) -> Result<(), CallError> {
    let mut seed = Seed(number);
    let (me, n) = (comm.rank(), ranks.len());
    let at = ranks.iter().position(|r| *r == me).unwrap();
    let len = seed.below(if seed.clone().one_in(3) { 40_000 } else { 50 });
    let reduction = Reduction::ALL[seed.below(4)];
    let root = ranks[seed.below(n)];
    let context = format!("seed {number}: {} of {} over {ranks:?}, {len}", reduction.name(), T::DTYPE);
    let mine = |call| elements::<T>(&brought(call, me, len));

    let mut data = mine(1);
    comm.all_reduce(group, &mut data, reduction)?;
    assert_eq!(data, expected::<T>(1, ranks, len, reduction), "all-reduce, {context}");

    let mut part = vec![T::default(); chunk(len, n, at).len()];
    comm.reduce_scatter(group, &mine(2), &mut part, reduction)?;
    assert_eq!(part, expected::<T>(2, ranks, len, reduction)[chunk(len, n, at)], "reduce-scatter, {context}");

    let mut whole = vec![T::default(); len];
    comm.all_gather(group, &elements::<T>(&brought(3, Rank(0), len))[chunk(len, n, at)], &mut whole)?;
    assert_eq!(whole, elements::<T>(&brought(3, Rank(0), len)), "all-gather, {context}");

    let mut data = mine(4);
    comm.broadcast(group, &mut data, root)?;
    assert_eq!(data, elements::<T>(&brought(4, root, len)), "broadcast, {context}");

    let mut data = mine(5);
    comm.reduce(group, &mut data, root, reduction)?;
    let sum = if me == root { expected::<T>(5, ranks, len, reduction) } else { mine(5) };
    assert_eq!(data, sum, "reduce, {context}");

    let received = len.div_ceil(n).min(len.saturating_sub(at * len.div_ceil(n)));
    let mut data = vec![T::default(); received * n];
    comm.all_to_all(group, &mine(6), &mut data)?;
    let of = |r: &Rank| brought(6, *r, len)[chunk(len, n, at)].to_vec();
    assert_eq!(
        data,
        elements::<T>(&ranks.iter().flat_map(of).collect::<Vec<i64>>()),
        "all-to-all, {context}"
    );

    all_with_counts::<T>(comm, group, ranks, &mut seed, &context)?;
    comm.barrier(group)
}

fn all_with_counts<T: Number>(
    comm: &mut Collectives,
    group: GroupId,
    ranks: &[Rank],
    seed: &mut Seed,
    context: &str,
) -> Result<(), CallError> {
    let (me, n) = (comm.rank(), ranks.len());
    let at = ranks.iter().position(|r| *r == me).unwrap();
    let rows: Vec<Vec<u64>> = (0..n)
        .map(|_| (0..n).map(|_| if seed.one_in(3) { 0 } else { seed.below(300) as u64 }).collect())
        .collect();
    let row = |i: usize| brought(7, ranks[i], rows[i].iter().sum::<u64>() as usize);
    let data = comm.all_to_all_v(group, &elements::<T>(&row(at)), &rows[at])?;
    let of = |i: usize| {
        let start = rows[i][..at].iter().sum::<u64>() as usize;
        row(i)[start..start + rows[i][at] as usize].to_vec()
    };
    assert_eq!(data, elements::<T>(&(0..n).flat_map(of).collect::<Vec<i64>>()), "all-to-all-v, {context}");

    let counts = rows[0].clone();
    let part = comm.buffer_of(&elements::<T>(&brought(8, me, counts[at] as usize)))?;
    let pending = comm.start_all_gather_v(group, part, Counts::PerRank(counts.clone()))?;
    let of = |(r, count): (&Rank, &u64)| brought(8, *r, *count as usize);
    let all: Vec<i64> = ranks.iter().zip(&counts).flat_map(of).collect();
    assert_eq!(*comm.wait(pending)?, elements::<T>(&all), "all-gather-v, {context}");

    let total = counts.iter().sum::<u64>() as usize;
    let whole = comm.buffer_of(&elements::<T>(&brought(9, me, total)))?;
    let pending =
        comm.start_reduce_scatter_v(group, whole, Counts::PerRank(counts.clone()), Reduction::Sum)?;
    let start = counts[..at].iter().sum::<u64>() as usize;
    let mine = start..start + counts[at] as usize;
    let sums = expected::<T>(9, ranks, total, Reduction::Sum);
    assert_eq!(*comm.wait(pending)?, sums[mine], "reduce-scatter-v, {context}");
    Ok(())
}

/// Some of the ranks, in some order; the same on all ranks.
fn random_group(seed: &mut Seed, ranks: u32) -> Vec<Rank> {
    let mut all: Vec<Rank> = (0..ranks).map(Rank).collect();
    for i in (1..all.len()).rev() {
        all.swap(i, seed.below(i + 1));
    }
    all.truncate(1 + seed.below(ranks as usize));
    all
}

#[test]
fn collectives_do_what_loops_do() {
    let clusters = [cluster(&[4]), cluster(&[2, 3]), cluster(&[1, 1, 1]), cluster(&[2, 1, 2, 1])];
    for (number, kind) in (0..24).flat_map(|n| KINDS.map(|kind| (n, kind))) {
        let cluster = &clusters[number % clusters.len()];
        run(kind, cluster, |comm| {
            let mut seed = Seed(number as u64);
            let ranks = random_group(&mut seed, cluster.num_devices() as u32);
            let algorithm = if seed.one_in(2) { Algorithm::Auto } else { Algorithm::Direct };
            comm.set_options(CollectiveOptions { algorithm, ..Default::default() });
            if !ranks.contains(&comm.rank()) {
                return Ok(());
            }
            let group = comm.group(&ranks)?;
            for round in 0..2 {
                let number = (2 * number + round) as u64;
                match number % 6 {
                    0 => all_collectives::<f32>(comm, group, &ranks, number)?,
                    1 => all_collectives::<f64>(comm, group, &ranks, number)?,
                    2 => all_collectives::<bf16>(comm, group, &ranks, number)?,
                    3 => all_collectives::<f16>(comm, group, &ranks, number)?,
                    4 => all_collectives::<i32>(comm, group, &ranks, number)?,
                    _ => all_collectives::<i64>(comm, group, &ranks, number)?,
                }
            }
            Ok(())
        });
    }
}

/// An all-reduce and a reduce-scatter of numbers that round, by one algorithm, as bits.
fn rough_sums<T: Number>(
    comm: &mut Collectives,
    ranks: &[Rank],
    len: usize,
    options: CollectiveOptions,
) -> Result<Vec<u64>, CallError> {
    let fixed_order = options.fixed_order;
    comm.set_options(options);
    let group = comm.group(ranks)?;
    let mut seed = Seed(u64::from(comm.rank().0));
    let mut data: Vec<T> = (0..len).map(|_| T::rough(&mut seed)).collect();
    let at = ranks.iter().position(|r| *r == comm.rank()).unwrap();
    let mut part = vec![T::default(); chunk(len, ranks.len(), at).len()];
    comm.reduce_scatter(group, &data, &mut part, Reduction::Sum)?;
    comm.all_reduce(group, &mut data, Reduction::Sum)?;
    if fixed_order {
        assert_eq!(data[chunk(len, ranks.len(), at)], part);
    }
    Ok(data.into_iter().map(T::bits).collect())
}

/// One by one, in the group's order.
fn summed_in_order<T: Number>(ranks: &[Rank], len: usize) -> Vec<u64> {
    let parts: Vec<Vec<T>> = ranks
        .iter()
        .map(|r| {
            let mut seed = Seed(u64::from(r.0));
            (0..len).map(|_| T::rough(&mut seed)).collect()
        })
        .collect();
    let sum = |i: usize| parts.iter().map(|p| p[i]).reduce(T::plus).unwrap().bits();
    (0..len).map(sum).collect()
}

fn a_fixed_order_is_kept<T: Number>(ranks: &[Rank], cluster: &Cluster, kind: Kind) {
    let can_order =
        [Algorithm::Auto, Algorithm::Direct, Algorithm::Pairwise, Algorithm::Ring, Algorithm::TwoLevel];
    let options = can_order.iter().flat_map(|algorithm| {
        [None, Some(1 << 10), Some(20 << 10)].map(|chunk_bytes| CollectiveOptions {
            algorithm: *algorithm,
            fixed_order: true,
            chunk_bytes,
        })
    });
    let options: Vec<CollectiveOptions> = options.collect();
    for len in [7, 100_000 / size_of::<T>()] {
        let in_order = summed_in_order::<T>(ranks, len);
        let results = run(kind, cluster, |comm| {
            if !ranks.contains(&comm.rank()) {
                return Ok(vec![]);
            }
            options.iter().map(|o| rough_sums::<T>(comm, ranks, len, o.clone())).collect()
        });
        for (rank, results) in results.into_iter().enumerate() {
            for (options, sums) in options.iter().zip(results) {
                assert!(sums == in_order, "{kind:?} rank {rank}: {options:?}, {len} of {}", T::DTYPE);
            }
        }
    }
}

#[test]
fn sums_in_a_fixed_order_are_the_same_bits_whatever_the_algorithm() {
    let ranks: Vec<Rank> = [4, 0, 2, 1, 5].map(Rank).to_vec();
    for kind in KINDS {
        a_fixed_order_is_kept::<f32>(&ranks, &cluster(&[3, 1, 2]), kind);
    }
    a_fixed_order_is_kept::<f64>(&ranks, &cluster(&[6]), Kind::Mem);
    a_fixed_order_is_kept::<bf16>(&ranks, &cluster(&[2, 2, 2]), Kind::Mem);
    a_fixed_order_is_kept::<f16>(&ranks, &cluster(&[1; 6]), Kind::Mem);
}

#[test]
fn without_a_fixed_order_algorithms_differ_but_not_from_run_to_run() {
    let cluster = cluster(&[5]);
    let ranks: Vec<Rank> = (0..5).map(Rank).collect();
    let sums = |algorithm| {
        let options = CollectiveOptions { algorithm, ..Default::default() };
        run(Kind::Mem, &cluster, |comm| rough_sums::<f32>(comm, &ranks, 4000, options.clone())).swap_remove(0)
    };
    assert!(sums(Algorithm::Ring) != sums(Algorithm::Tree), "the order shows, so the test of it can fail");
    for algorithm in [Algorithm::Ring, Algorithm::Tree, Algorithm::Flow] {
        assert!(sums(algorithm) == sums(algorithm), "{algorithm}");
    }
}

/// Calls of three groups at once, started in an order of each rank's own next to a reshard.
#[test]
fn calls_of_several_groups_are_under_way_at_once() {
    let cluster = cluster(&[2, 2]);
    let reshard = common::planned(
        &[("f32[64,700]@A{x:2}=0-1(x,_)", "f32[64,700]@B{x:2}=2-3(_,x)")],
        Strategy::Flow,
        None,
    );
    for kind in KINDS {
        let sharing = if kind == Kind::Shm { Sharing::Host } else { Sharing::Private };
        run(kind, &cluster, |comm| {
            let me = comm.rank();
            let groups =
                [vec![0, 1, 2, 3], vec![me.0 / 2 * 2, me.0 / 2 * 2 + 1], vec![me.0 % 2, me.0 % 2 + 2]];
            let groups = groups.map(|g| g.into_iter().map(Rank).collect::<Vec<_>>());
            let ids = [comm.group(&groups[0])?, comm.group(&groups[1])?, comm.group(&groups[2])?];
            let program = Verified::plan(&reshard, Addressing::Apart).unwrap();
            let buffers = RankBuffers::allocate(program.rank(me), sharing).unwrap();
            pattern::fill_sources(&buffers).unwrap();
            pattern::poison_destinations(&buffers).unwrap();
            let job = JobSpec::new(7, &buffers).unwrap();
            let moving = comm.engine().start(job).unwrap();
            let mut pending = vec![];
            for turn in 0..12 {
                // Every group's own calls have one order; which group is next, each rank decides.
                let g = (turn + me.index()) % 3;
                let (call, len) = ((turn / 3) as u64, [40_000, 3, 900, 70_000][turn / 3]);
                let data = comm.buffer_of(&elements::<f32>(&brought(call, me, len)))?;
                comm.set_priority(g as u32);
                pending.push((g, call, len, comm.start_all_reduce(ids[g], data, Reduction::Sum)?));
                comm.progress()?;
            }
            for (g, call, len, one) in pending.into_iter().rev() {
                let sum = comm.wait(one)?;
                assert_eq!(*sum, expected::<f32>(call, &groups[g], len, Reduction::Sum), "{kind:?} {me} {g}");
            }
            comm.engine().wait(moving).unwrap();
            assert_eq!(pattern::check_destinations(&buffers).unwrap(), None, "{kind:?} {me}");
            Ok(())
        });
    }
}

#[test]
fn what_cannot_be_done_is_refused() {
    let refused = Collectives::in_threads(2, |comm| {
        let all = comm.world()?;
        let (me, other) = (comm.rank(), Rank(1 - comm.rank().0));
        let outside = comm.group(&[other]).unwrap_err().to_string();
        assert_eq!(outside, format!("{me} is not in the group of ranks {}", other.0));
        let part = comm.buffer::<f32>(3)?;
        let wrong = comm.start_all_gather(all, part, 100).unwrap_err().to_string();
        assert_eq!(wrong, format!("all-gather: {me} brings 3 elements, expected 50"));
        let nobody = comm.start_broadcast(all, comm.buffer::<f32>(1)?, Rank(9)).unwrap_err().to_string();
        assert_eq!(nobody, "the root r9 is not in the group of ranks 0-1");
        Ok(())
    });
    refused.unwrap();
}
