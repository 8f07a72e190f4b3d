//! What the ranks of a job do inside their passes, as lists: the walk of [`super::passes`], [`super::params`], [`super::grads`] and [`super::update`] through a step,
//! without numbers. Where a rank starts a collective this does, and where it waits this does, so that the simulator and the verifier see them all.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;

use crossmesh_comm::collectives::Element as _;
use crossmesh_core::cluster::Cluster;
use crossmesh_core::collective::{self, Collective, CollectiveOptions, Counts, Group};
use crossmesh_core::dtype::DType;
use crossmesh_core::id::{Rank, StageId};
use crossmesh_core::program::Program;
use crossmesh_core::reshard::lower;
use crossmesh_core::schedule::{Pass, PassKind};
use crossmesh_core::sim::simulate;
use crossmesh_core::step::lists::{Call, CallKind, GroupIndex, List, RankList, StepLists};

use super::runs::{counts_of, pieces};
use super::{grads, params};
use crate::chain::{Between, Listed, Model, Outline, Pace};
use crate::deal::{Deal, Runs};
use crate::flat::Buckets;
use crate::graph::Axis;
use crate::job::{Job, JobError, Update};
use crate::kernels::Kernels;
use crate::stage_rank::{G, StageRank};
use crate::sums::{Kind, Sums, Ways, longest_piece};
use crate::wiring::{Wiring, setup};

/// The lists of a job's step. Of what is computed only the shares count that things have in their pass: [`StepLists::retimed`] says how long passes take.
pub fn step_lists<K: Kernels>(
    model: &dyn Model<K>,
    job: &Job,
    wiring: &Wiring,
) -> Result<StepLists, JobError> {
    let books = Books::new(&job.cluster);
    let mut ranks = vec![RankList::default(); job.cluster.num_devices()];
    for (device, team) in job.schedule.placement().devices().zip(&job.teams) {
        for (position, rank) in team.ranks.iter().enumerate() {
            let place = job.place(device, position)?;
            let passes = &wiring.step.schedule.devices()[device.index()];
            let walk = Walk::new(model, job, wiring, &books, (*rank, position, place))?;
            ranks[rank.index()] = walk.through(passes);
        }
    }
    books.into_lists(ranks)
}

/// A program that was made, and how long it takes by itself.
type Planned = (u32, u64);

/// The groups and programs of a step's calls.
struct Books<'a> {
    cluster: &'a Cluster,
    groups: RefCell<BTreeMap<Vec<Rank>, u32>>,
    programs: RefCell<Vec<Program>>,
    planned: RefCell<HashMap<collective::Call, Planned>>,
    exchange: RefCell<Option<u32>>,
    failure: RefCell<Option<JobError>>,
}

impl<'a> Books<'a> {
    fn new(cluster: &'a Cluster) -> Self {
        let (groups, programs, planned) = Default::default();
        Self { cluster, groups, programs, planned, exchange: RefCell::default(), failure: RefCell::default() }
    }

    fn group(&self, ranks: &[Rank]) -> GroupIndex {
        let mut groups = self.groups.borrow_mut();
        let next = groups.len() as u32;
        GroupIndex(*groups.entry(ranks.to_vec()).or_insert(next))
    }

    /// What ranks do together; nothing where one is alone, or nothing is to be moved.
    fn call(&self, ranks: &[Rank], kind: CallKind, dtype: DType, counts: Counts) -> Option<Call> {
        let elements: u64 = match &counts {
            Counts::Even(elements) => *elements,
            Counts::PerRank(counts) => counts.iter().sum(),
            Counts::PerPair(_) => unreachable!("no rank has something else for each"),
        };
        if ranks.len() < 2 || elements == 0 {
            return None;
        }
        let (program, ns) = match self.program(ranks, kind, dtype, elements, counts) {
            Ok(planned) => planned,
            Err(error) => {
                self.failure.borrow_mut().get_or_insert(error);
                return None;
            }
        };
        Some(Call { group: self.group(ranks), kind, bytes: elements * dtype.bytes(), ns, program })
    }

    fn program(
        &self,
        ranks: &[Rank],
        kind: CallKind,
        dtype: DType,
        elements: u64,
        counts: Counts,
    ) -> Result<Planned, JobError> {
        let what = match kind {
            CallKind::AllReduce => Collective::AllReduce,
            CallKind::AllGather => Collective::AllGather,
            CallKind::ReduceScatter => Collective::ReduceScatter,
            CallKind::Exchange => unreachable!("an exchange has a program of its own"),
        };
        let group = Group::new(ranks.to_vec())?;
        let call = collective::Call::new(what, &group, dtype, elements).with_counts(counts);
        if let Some(planned) = self.planned.borrow().get(&call) {
            return Ok(*planned);
        }
        // As ranks choose it (`super::Trainer::new`).
        let options = CollectiveOptions::default();
        let plan = collective::plan(std::slice::from_ref(&call), self.cluster, &options)?;
        let mut programs = self.programs.borrow_mut();
        let program = lower(&plan);
        let alone = simulate(&program, self.cluster).expect("a planned program runs to its end");
        let planned = (programs.len() as u32, (alone.makespan_s * 1e9) as u64);
        programs.push(program);
        self.planned.borrow_mut().insert(call, planned);
        Ok(planned)
    }

    /// The exchange of tied gradients, for a rank that has a part in it.
    fn exchange(&self, wiring: &Wiring, rank: Rank) -> Option<Call> {
        let program = &wiring.exchange.as_ref()?.program;
        let has_part = |rank: &Rank| program.ranks.get(rank.index()).is_some_and(|p| !p.ops.is_empty());
        if !has_part(&rank) {
            return None;
        }
        let ranks: Vec<Rank> = (0..program.ranks.len()).map(Rank::at).filter(has_part).collect();
        let index = *self.exchange.borrow_mut().get_or_insert_with(|| {
            let mut programs = self.programs.borrow_mut();
            programs.push(Program::clone(program));
            programs.len() as u32 - 1
        });
        let bytes = program.tensors.iter().map(|t| t.shape.iter().product::<u64>() * t.dtype.bytes()).sum();
        Some(Call { group: self.group(&ranks), kind: CallKind::Exchange, bytes, ns: 0, program: index })
    }

    fn into_lists(self, ranks: Vec<RankList>) -> Result<StepLists, JobError> {
        if let Some(error) = self.failure.into_inner() {
            return Err(error);
        }
        let mut groups = vec![vec![]; self.groups.borrow().len()];
        for (ranks, index) in self.groups.into_inner() {
            groups[index as usize] = ranks.iter().map(|rank| rank.index()).collect();
        }
        Ok(StepLists { groups, programs: self.programs.into_inner(), ranks })
    }
}

/// A rank, and the groups that it is in.
struct Seat<'a> {
    books: &'a Books<'a>,
    rule: &'a Update,
    place: StageRank,
    ranks: &'a [Rank],
    elem: DType,
    real: DType,
}

impl Seat<'_> {
    /// The ranks that differ from this one along some axes only.
    fn along(&self, axes: &[usize]) -> Vec<Rank> {
        let place = |coord: &Vec<u32>| self.ranks[self.place.mesh().position(coord)];
        self.place.others(axes).iter().map(place).collect()
    }

    /// A collective along some axes, started; nothing where this rank is alone along them.
    fn start(
        &self,
        list: &mut List,
        axes: &[usize],
        kind: CallKind,
        (dtype, counts): (DType, Counts),
    ) -> Option<usize> {
        Some(list.start(self.books.call(&self.along(axes), kind, dtype, counts)?))
    }

    fn tp_call(&self, axis: &str, kind: CallKind, bytes: u64) -> Option<Call> {
        // How wide a number is does not matter to who sends how much.
        let (dtype, elements) = match bytes % 4 {
            0 => (DType::F32, bytes / 4),
            _ => (DType::U8, bytes),
        };
        self.books.call(&self.along(&self.place.meant(axis)), kind, dtype, Counts::Even(elements))
    }
}

/// A stage of a rank.
struct StageWalk<K: Kernels> {
    listed: Listed<K>,
    /// What its axes of a pass are called.
    axes: Vec<String>,
    moving: Moving,
    microbatches: u32,
}

/// What of a stage's weights and gradients is on its way.
struct Moving {
    sums: Sums,
    ways: Ways,
    deal: Deal,
    buckets: Buckets,
    /// The next unit's weights.
    coming: Option<Fetched>,
    /// Sums of single microbatches.
    each: VecDeque<usize>,
    /// Complete, and not yet under way.
    ready: Range<usize>,
    packed: Vec<(Kind, Range<usize>)>,
    /// Sums of all microbatches.
    summing: Vec<usize>,
}

/// A unit's weights on their way: the calls that are under way, and the pieces still to be asked for.
struct Fetched {
    under_way: VecDeque<usize>,
    rest: VecDeque<Vec<Range<usize>>>,
}

/// A walk through a rank's passes.
struct Walk<'a, K: Kernels> {
    seat: Seat<'a>,
    rank: Rank,
    wiring: &'a Wiring,
    stages: BTreeMap<StageId, StageWalk<K>>,
    last: u32,
    of: RankList,
}

impl<'a, K: Kernels> Walk<'a, K> {
    fn new(
        model: &dyn Model<K>,
        job: &'a Job,
        wiring: &'a Wiring,
        books: &'a Books<'a>,
        (rank, position, place): (Rank, usize, StageRank),
    ) -> Result<Self, JobError> {
        let (device, _) = job.home(rank).expect("a rank of the job");
        let tied: Vec<&str> = wiring.tied.iter().map(|t| t.name.as_str()).collect();
        let mut stages = BTreeMap::new();
        for &id in wiring.stages_on(device) {
            let (units, setup) = (job.stages[id.index()].clone(), setup(job, id, position)?);
            let Outline { parameters, buckets, .. } = Outline::new(model, units.clone(), &setup)?;
            let sums = Sums::new(&place, &parameters, &tied);
            let end = sums.end();
            let moving = Moving {
                ways: Ways::new(&job.update, &place),
                deal: Deal::new(place.clone(), &buckets.starts),
                ready: end..end,
                sums,
                buckets,
                coming: None,
                each: VecDeque::new(),
                packed: vec![],
                summing: vec![],
            };
            let axes = setup.team().axes.iter().map(|axis| axis.name.clone()).collect();
            let listed = Listed::new(model, units, &setup)?;
            stages.insert(id, StageWalk { listed, axes, moving, microbatches: 0 });
        }
        let ranks = &job.teams[device.index()].ranks;
        let (elem, real) = (K::Elem::DTYPE, K::Real::DTYPE);
        let seat = Seat { books, rule: &job.update, place, ranks, elem, real };
        Ok(Self {
            seat,
            rank,
            wiring,
            stages,
            last: job.schedule.num_microbatches(),
            of: RankList::default(),
        })
    }

    fn through(mut self, passes: &[Pass]) -> RankList {
        for pass in passes {
            match pass.kind {
                PassKind::Optimizer => self.update(),
                PassKind::F | PassKind::B | PassKind::W | PassKind::BW => self.stage(*pass),
                // Bytes leave and come back beside the passes.
                _ => {}
            }
            self.of.end_pass(*pass);
        }
        self.of
    }

    fn stage(&mut self, pass: Pass) {
        let StageWalk { listed, axes, moving, microbatches } =
            self.stages.get_mut(&pass.stage).expect("a pass of a stage that is here");
        let (seat, list) = (&self.seat, &mut self.of.list);
        let call = |axis: Axis, kind, bytes| seat.tp_call(&axes[axis.0], kind, bytes);
        let pace = Pace { operations_per_s: 1e9, call: &call };
        let weighs = matches!(pass.kind, PassKind::W | PassKind::BW);
        *microbatches += u32::from(weighs);
        let is_last = *microbatches == self.last;
        let mut here = Here { seat, moving, is_last };
        match pass.kind {
            PassKind::F => listed.forward(&pace, &mut here, list),
            PassKind::W => {}
            _ => listed.backward(&pace, &mut here, list),
        }
        if weighs {
            listed.weights(&pace, &mut here, list);
        }
        if weighs && is_last {
            moving.all_ready(seat, list);
        }
    }

    /// The optimizer's pass.
    fn update(&mut self) {
        let Self { seat, stages, .. } = self;
        let list = &mut self.of.list;
        for stage in stages.values_mut() {
            stage.moving.take_sums(seat, list);
        }
        if let Some(exchange) = seat.books.exchange(self.wiring, self.rank) {
            let exchange = list.start(exchange);
            list.wait(exchange);
        }
        let mut world: Vec<Rank> = self.wiring.step.ranks.iter().flatten().copied().collect();
        world.sort_unstable();
        // The loss, and the norm.
        if let Some(all) = seat.books.call(&world, CallKind::AllReduce, DType::F64, Counts::Even(2)) {
            let all = list.start(all);
            list.wait(all);
        }
        list.compute(1);
        let gathers: Vec<usize> = stages.values().filter_map(|s| s.moving.gather(seat, list)).collect();
        gathers.into_iter().for_each(|call| list.wait(call));
    }
}

/// A stage's weights and gradients, where a pass is.
struct Here<'a, 'b> {
    seat: &'a Seat<'a>,
    moving: &'b mut Moving,
    /// Whether gradients are complete behind this pass.
    is_last: bool,
}

impl Between for Here<'_, '_> {
    fn fetch(&mut self, unit: usize, next: Option<usize>, list: &mut List) {
        self.moving.fetch(self.seat, unit, next, list);
    }

    fn close(&mut self, unit: usize, list: &mut List) {
        if self.moving.ways.sums_each(self.seat.rule) {
            self.moving.sum_each(self.seat, unit, list);
        } else if self.is_last {
            self.moving.ready(self.seat, unit, list);
        }
    }
}

impl Moving {
    fn fetch(&mut self, seat: &Seat<'_>, unit: usize, next: Option<usize>, list: &mut List) {
        if self.ways.parameters.is_empty() {
            return;
        }
        let mut coming = match self.coming.take() {
            Some(coming) => coming,
            None => self.fetched(seat, unit, list),
        };
        while let Some(call) = coming.under_way.pop_front() {
            list.wait(call);
            self.ask(seat, &mut coming, list);
        }
        if let Some(next) = next {
            self.coming = Some(self.fetched(seat, next, list));
        }
    }

    fn fetched(&self, seat: &Seat<'_>, unit: usize, list: &mut List) -> Fetched {
        let axes = &self.ways.parameters;
        let longest = params::PIECE_BYTES / seat.elem.bytes() as usize;
        let rest = pieces(&self.deal.shares(axes, axes), &self.buckets.ranges(unit), longest).into();
        let mut coming = Fetched { under_way: VecDeque::new(), rest };
        self.ask(seat, &mut coming, list);
        coming
    }

    fn ask(&self, seat: &Seat<'_>, coming: &mut Fetched, list: &mut List) {
        let axes = &self.ways.parameters;
        while coming.under_way.len() < params::UNDER_WAY {
            let Some(piece) = coming.rest.pop_front() else { return };
            let counts = Counts::PerRank(counts_of(&self.deal.shares(axes, axes), &piece));
            coming.under_way.extend(seat.start(list, axes, CallKind::AllGather, (seat.elem, counts)));
        }
    }

    /// Hands a unit's gradients of one microbatch to those who keep them.
    fn sum_each(&mut self, seat: &Seat<'_>, unit: usize, list: &mut List) {
        let (summed, fixed) = (&self.ways.summed, seat.rule.fixed_order);
        let members = self.deal.shares(summed, &self.ways.gradients);
        let longest = grads::PIECE_BYTES / seat.real.bytes() as usize;
        for piece in pieces(&members, &self.sums.plain(&self.buckets.own(unit)), longest) {
            let (kind, counts) = match fixed {
                false => (CallKind::ReduceScatter, counts_of(&members, &piece)),
                true => {
                    let len: usize = piece.iter().map(|run| run.len()).sum();
                    (CallKind::AllGather, vec![len as u64; members.len()])
                }
            };
            let call = seat.start(list, summed, kind, (seat.real, Counts::PerRank(counts)));
            self.each.extend(call);
            if self.each.len() > grads::UNDER_WAY {
                self.each.pop_front().into_iter().for_each(|call| list.wait(call));
            }
        }
    }

    /// A unit's gradients are complete; units come from the last to the first.
    fn ready(&mut self, seat: &Seat<'_>, unit: usize, list: &mut List) {
        self.ready.start = self.ready.start.min(self.buckets.own(unit).start);
        if self.ready.len() as u64 * seat.real.bytes() >= seat.rule.bucket_bytes {
            self.send(seat, list);
        }
    }

    fn all_ready(&mut self, seat: &Seat<'_>, list: &mut List) {
        self.ready.start = 0;
        self.send(seat, list);
        let (shared, others): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.packed).into_iter().partition(|(kind, _)| *kind == Kind::Shared);
        let all: Vec<usize> = (0..seat.place.mesh().axes().len()).collect();
        let sharing = [seat.place.data_axes(), seat.place.meant(G)].concat();
        for (axes, runs) in [(all, others), (sharing, shared)] {
            let elements: usize = runs.iter().map(|(_, run)| run.len()).sum();
            let counts = Counts::Even(elements as u64);
            self.summing.extend(seat.start(list, &axes, CallKind::AllReduce, (seat.real, counts)));
        }
    }

    /// Starts the sums of what is ready. Where each microbatch's are summed by themselves, only of what is kept whole.
    fn send(&mut self, seat: &Seat<'_>, list: &mut List) {
        let ready = std::mem::replace(&mut self.ready, 0..0);
        self.ready = ready.start..ready.start;
        let each = self.ways.sums_each(seat.rule);
        let scatters = seat.along(&self.ways.scatter).len() > 1;
        let longest = longest_piece(seat.rule, seat.real.bytes() as usize);
        for (kind, run) in self.sums.pieces(&ready, longest) {
            let (axes, kind, counts) = match kind {
                Kind::Partial | Kind::Replica | Kind::Shared => {
                    self.packed.push((kind, run));
                    continue;
                }
                Kind::Plain if each => continue,
                Kind::Plain if scatters => {
                    let axes = &self.ways.scatter;
                    let members = self.deal.shares(axes, &self.ways.states);
                    let counts = counts_of(&members, std::slice::from_ref(&run));
                    (axes, CallKind::ReduceScatter, Counts::PerRank(counts))
                }
                _ => (&self.ways.data, CallKind::AllReduce, Counts::Even(run.len() as u64)),
            };
            self.summing.extend(seat.start(list, axes, kind, (seat.real, counts)));
        }
    }

    fn take_sums(&mut self, seat: &Seat<'_>, list: &mut List) {
        self.each.drain(..).for_each(|call| list.wait(call));
        let each = self.ways.sums_each(seat.rule);
        let (scatter, states) = (&self.ways.scatter, &self.ways.states);
        let scatters = seat.along(scatter).len() > 1;
        let plain = self.sums.plain(&(0..self.sums.end()));
        if each && scatters {
            let counts = Counts::PerRank(counts_of(&self.deal.shares(scatter, states), &plain));
            self.summing.extend(seat.start(list, scatter, CallKind::ReduceScatter, (seat.real, counts)));
        }
        self.summing.drain(..).for_each(|call| list.wait(call));
        if each || scatters {
            let own: u64 = counts_of(&[self.deal.share(states).runs], &plain).iter().sum();
            let rest = &self.ways.rest;
            let sum = seat.start(list, rest, CallKind::AllReduce, (seat.real, Counts::Even(own)));
            sum.into_iter().for_each(|call| list.wait(call));
        }
    }

    /// Those who updated a part each bring it to those who keep more.
    fn gather(&self, seat: &Seat<'_>, list: &mut List) -> Option<usize> {
        let axes = &self.ways.gather;
        let all = 0..self.sums.end();
        let members: Vec<Runs> = self.deal.shares(axes, &self.ways.states);
        let counts = Counts::PerRank(counts_of(&members, std::slice::from_ref(&all)));
        seat.start(list, axes, CallKind::AllGather, (seat.elem, counts))
    }
}
