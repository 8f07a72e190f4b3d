//! From gradients to the next step's weights.
//!
//! ```text
//! last W of a stage    runs of gradients become complete -> summed over the data axes, a bucket at a time, beside the rest of W
//! optimizer pass       wait for the sums; add up tied weights; one norm for all ranks; step; gather what was dealt out
//! ```
//!
//! Five kinds of gradients are summed in four ways. Most are the sum over the data axes, of which each rank needs what it keeps states of
//! ([`crate::deal`]). Those of weights that are whole on all ranks along `tp`, each of which saw some rows only, are summed over all
//! ranks of the mesh: they are small, and go together. So do those that all ranks along `tp` have alike, of which one counts: were each of
//! them summed over its own data axes, in an order that depends on where it lies there, replicas would differ in their last bits. Keys and values that
//! some ranks along `tp` share are summed over these and the data axes. Those of tied weights are needed whole, to be added up with the other stages'.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use crossmesh_comm::buffer::RankBuffers;
use crossmesh_comm::collectives::{Buffer, CallError, Collectives, GroupId, Reduction};
use crossmesh_comm::engine::{Handle, JobSpec};
use crossmesh_core::id::StageId;

use super::calls::{Call, Calls, Promise, Running, Urgency, What, add_waited, take_waited};
use super::grads::{Each, Grads};
use super::params::Params;
use super::passes::{PassFailure, Passes};
use super::runs::{copy_all, counts_of, pack};
use crate::deal::{Deal, Runs, Share};
use crate::flat::Buckets;
use crate::job::Update as Rule;
use crate::kernels::scalar::Scalar;
use crate::kernels::{BufSlice, Buffer as _, Kernels, PartMut};
use crate::optim::{Optimizer, StepNumbers, clip_scale, norm_piece};
use crate::parameter::{Parameter, initial_runs};
use crate::stage::Stage as _;
use crate::stage_rank::StageRank;
use crate::sums::{Kind, Sums, Ways, longest_piece};
use crate::wiring::Wiring;

/// The groups a rank is in; none where it would be alone.
#[derive(Debug, Clone, Default)]
pub struct Groups {
    pub tp: Option<GroupId>,
    /// Those along the data axes, and along the part of `tp` that has the same keys and values.
    pub shared: Option<GroupId>,
    pub mesh: Option<GroupId>,
    pub world: Option<GroupId>,
    /// Along some of the data axes, each longer than one.
    pub data: BTreeMap<Vec<usize>, GroupId>,
}

impl Groups {
    /// The ranks that differ from this one along these data axes only.
    fn along(&self, place: &StageRank, axes: &[usize]) -> Option<GroupId> {
        let long = |axis: &&usize| place.mesh().axes()[**axis].len > 1;
        self.data.get(&axes.iter().filter(long).copied().collect::<Vec<_>>()).copied()
    }
}

/// Where a sum goes when it is there.
enum Target {
    Run(Range<usize>),
    /// This rank's part of several runs.
    Own(Vec<Range<usize>>),
    /// Several runs, one behind the other.
    Packed(Vec<Range<usize>>),
}

/// Ranks among which a flat buffer is gathered, or sums of it scattered: what each of them keeps.
struct Between {
    group: GroupId,
    members: Vec<Runs>,
}

/// What becomes of a stage's gradients.
struct StageUpdate<K: Kernels> {
    sums: Sums,
    /// This rank's part over all data axes, which it counts in a norm.
    own: Runs,
    /// From the gradients that are kept to those that states are kept of; and the ranks among which these are summed then.
    scatter: Option<Between>,
    rest: Option<GroupId>,
    /// From the parameters that were updated to those that are kept.
    gather: Option<Between>,
    optimizer: Optimizer<K::Buf>,
    /// Complete, and not yet under way.
    ready: Range<usize>,
    packed: Vec<(Kind, Range<usize>)>,
    under_way: Vec<(Target, Promise<Buffer<K::Real>>)>,
}

/// See the module.
pub struct Update<K: Kernels> {
    place: StageRank,
    rule: Rule,
    calls: Calls,
    groups: Groups,
    stages: BTreeMap<StageId, StageUpdate<K>>,
    exchange: Option<TiedBuffers>,
    /// What the last step came to.
    pub outcome: Outcome,
}

/// The memory of an exchange of tied gradients.
struct TiedBuffers {
    wiring: Arc<Wiring>,
    buffers: RankBuffers,
}

/// What a step came to, the same on all ranks.
#[derive(Debug, Clone, Copy, Default)]
pub struct Outcome {
    pub loss: f64,
    pub grad_norm: f64,
    pub learning_rate: f64,
    /// How long this rank stood still until all others had come as far.
    pub waited_for_all_s: f64,
}

impl Outcome {
    /// Whether weights may be changed by it.
    pub fn is_finite(&self) -> bool {
        self.loss.is_finite() && self.grad_norm.is_finite()
    }
}

/// What other ranks' stages have for tied weights, by weight and stage.
type Theirs<R> = BTreeMap<(usize, StageId), Vec<R>>;

impl<K: Kernels> Update<K> {
    pub fn new(
        rule: Rule,
        place: StageRank,
        calls: Calls,
        groups: Groups,
        exchange: Option<(Arc<Wiring>, RankBuffers)>,
    ) -> Self {
        let exchange = exchange.map(|(wiring, buffers)| TiedBuffers { wiring, buffers });
        let (stages, outcome) = (BTreeMap::new(), Outcome::default());
        Self { place, rule, calls, groups, stages, exchange, outcome }
    }

    /// Adds a stage, with its first weights and an optimizer that starts from nothing.
    pub fn add_stage(
        &mut self,
        kernels: &Arc<K>,
        stage: StageId,
        (parameters, buckets): (&[Parameter], &Buckets),
        tied: &[&str],
        seed: u64,
    ) -> (Params<K>, Grads<K>) {
        let sums = Sums::new(&self.place, parameters, tied);
        let deal = Deal::new(self.place.clone(), &buckets.starts);
        let Ways { parameters: p, gradients: g, states: o, data, summed, scatter, rest, gather } =
            Ways::new(&self.rule, &self.place);
        let between = |axes: Vec<usize>, dealt: &[usize]| {
            let group = self.groups.along(&self.place, &axes)?;
            Some(Between { group, members: deal.shares(&axes, dealt) })
        };
        let states = deal.share(&o);
        let mut optimizer = Optimizer::new(&**kernels, self.rule.optimizer, parameters, states);
        let runs = optimizer.share().runs.clone();
        if let Some(masters) = optimizer.masters_mut() {
            let first = initial_runs::<K::Real>(parameters, self.place.coord(), seed, &runs);
            kernels.put_reals(&first, masters.into());
        }
        let len = parameters.last().map_or(0, |p| p.range.end);
        let update = StageUpdate {
            own: deal.share(&data).runs,
            scatter: between(scatter, &o),
            rest: self.groups.along(&self.place, &rest),
            gather: between(gather, &o),
            sums,
            optimizer,
            ready: len..len,
            packed: vec![],
            under_way: vec![],
        };
        let params = self.params(kernels, &deal, &p, (parameters, buckets), seed);
        let grads = match g.is_empty() && !self.rule.fixed_order {
            true => Grads::whole(kernels, len),
            false => {
                let share = Share { runs: update.sums.kept(&deal.share(&g).runs), axes: g.clone() };
                let group = self.groups.along(&self.place, &summed);
                let group = group.map(|group| (group, deal.shares(&summed, &g)));
                let me = self.rank_along(&summed);
                let plain = (0..buckets.borrowed.len()).map(|unit| update.sums.plain(&buckets.own(unit)));
                let (calls, kernels) = (self.calls.clone(), Arc::clone(kernels));
                let fixed = self.rule.fixed_order;
                Grads::dealt(
                    share,
                    Each::new(kernels, calls, (group, me), fixed, buckets.clone(), plain.collect()),
                )
            }
        };
        self.stages.insert(stage, update);
        (params, grads)
    }

    /// The first weights that this rank keeps.
    fn params(
        &self,
        kernels: &Arc<K>,
        deal: &Deal,
        axes: &[usize],
        (parameters, buckets): (&[Parameter], &Buckets),
        seed: u64,
    ) -> Params<K> {
        let share = deal.share(axes);
        let kept = initial_runs::<K::Real>(parameters, self.place.coord(), seed, &share.runs);
        let kept = kernels.upload(&kept);
        match self.groups.along(&self.place, axes) {
            None => Params::whole(kept),
            Some(group) => {
                let group = (group, deal.shares(axes, axes), self.rank_along(axes));
                Params::dealt(kept, share, group, buckets.clone(), self.calls.clone(), Arc::clone(kernels))
            }
        }
    }

    /// This rank's place among those along some axes.
    fn rank_along(&self, axes: &[usize]) -> usize {
        let others = self.place.others(axes);
        others.iter().position(|coord| coord == self.place.coord()).expect("it is one of them")
    }

    pub fn optimizer_mut(&mut self, stage: StageId) -> Option<&mut Optimizer<K::Buf>> {
        self.stages.get_mut(&stage).map(|s| &mut s.optimizer)
    }

    /// A run of a stage's gradients is complete; runs come from the last to the first.
    pub fn ready(
        &mut self,
        stage: StageId,
        grads: &mut Grads<K>,
        run: Range<usize>,
    ) -> Result<(), PassFailure> {
        let update = self.stages.get_mut(&stage).ok_or("no such stage here")?;
        update.take_what_is_there(grads);
        update.ready.start = update.ready.start.min(run.start);
        let bytes = (update.ready.len() * size_of::<K::Real>()) as u64;
        match bytes >= self.rule.bucket_bytes {
            true => self.send(stage, grads),
            false => Ok(()),
        }
    }

    /// All of them are.
    pub fn all_ready(&mut self, stage: StageId, grads: &Grads<K>) -> Result<(), PassFailure> {
        let update = self.stages.get_mut(&stage).ok_or("no such stage here")?;
        update.ready.start = 0;
        self.send(stage, grads)?;
        let update = self.stages.get_mut(&stage).ok_or("no such stage here")?;
        let (shared, others) =
            std::mem::take(&mut update.packed).into_iter().partition(|(kind, _)| *kind == Kind::Shared);
        let packs: [(_, Vec<_>); 2] = [(self.groups.mesh, others), (self.groups.shared, shared)];
        for (group, runs) in packs {
            let (Some(group), false) = (group, runs.is_empty()) else { continue };
            let counts = self.place.tp().rank == 0;
            let mut packed: Vec<K::Real> = Vec::new();
            for (kind, run) in &runs {
                match *kind == Kind::Replica && !counts {
                    true => packed.resize(packed.len() + run.len(), K::Real::ZERO),
                    false => packed.extend_from_slice(&grads.read(run)),
                }
            }
            let runs = runs.into_iter().map(|(_, run)| run).collect();
            let promise =
                self.calls.start(group, What::AllReduce(Reduction::Sum), &packed, Urgency::Later)?;
            update.under_way.push((Target::Packed(runs), promise));
        }
        Ok(())
    }

    /// Starts the sums of what is ready. Where each microbatch's are summed by themselves, only of what is kept whole.
    fn send(&mut self, stage: StageId, grads: &Grads<K>) -> Result<(), PassFailure> {
        let update = self.stages.get_mut(&stage).ok_or("no such stage here")?;
        let ready = std::mem::replace(&mut update.ready, 0..0);
        update.ready = ready.start..ready.start;
        let dp = self.groups.along(&self.place, &self.place.data_axes());
        let longest = longest_piece(&self.rule, size_of::<K::Real>());
        for (kind, run) in update.sums.pieces(&ready, longest) {
            let (group, what, target) = match (kind, &update.scatter, dp) {
                (Kind::Partial | Kind::Replica | Kind::Shared, ..) => {
                    update.packed.push((kind, run));
                    continue;
                }
                (_, _, None) => continue,
                (Kind::Plain, ..) if grads.are_summed_each() => continue,
                (Kind::Plain, Some(Between { group, members }), _) => {
                    let ranges = std::slice::from_ref(&run);
                    let packed = pack(|at| grads.read_at(at), &grads.share.runs, members, ranges);
                    let what = What::ReduceScatter(counts_of(members, ranges));
                    let promise = self.calls.start(*group, what, &packed, Urgency::Later)?;
                    update.under_way.push((Target::Own(vec![run]), promise));
                    continue;
                }
                (_, _, Some(dp)) => (dp, What::AllReduce(Reduction::Sum), Target::Run(run.clone())),
            };
            let promise = self.calls.start(group, what, &grads.read(&run), Urgency::Later)?;
            update.under_way.push((target, promise));
        }
        Ok(())
    }
}

impl<K: Kernels> StageUpdate<K> {
    /// Puts the sums that have arrived where their summands were, which lets go of the memory they came in.
    fn take_what_is_there(&mut self, grads: &mut Grads<K>) {
        for (target, promise) in std::mem::take(&mut self.under_way) {
            match promise.now() {
                Ok(sums) => target.put(&sums, grads, &self.optimizer.share().runs),
                Err(promise) => self.under_way.push((target, promise)),
            }
        }
    }

    /// The sums of what this rank keeps states of, where ranks that keep the same have summands of them still.
    fn sum_rest(&self, calls: &Calls, grads: &mut Grads<K>) -> Result<(), PassFailure> {
        let Some(rest) = self.rest.filter(|_| self.scatter.is_some() || grads.are_summed_each()) else {
            return Ok(());
        };
        let own = [self.optimizer.share().runs.clone()];
        let ranges = self.sums.plain(&(0..self.sums.end()));
        let packed = pack(|at| grads.read_at(at), &grads.share.runs, &own, &ranges);
        let sums = calls.start(rest, What::AllReduce(Reduction::Sum), &packed, Urgency::Now)?.wait()?;
        copy_all(&sums, &own, &ranges, |run, from| grads.write(&run, from));
        Ok(())
    }
}

impl Target {
    /// `own` is what this rank gets of sums that are dealt out.
    fn put<K: Kernels>(self, sums: &[K::Real], grads: &mut Grads<K>, own: &Runs) {
        let (members, runs) = match self {
            Target::Run(run) => (Runs::one(run.clone()), vec![run]),
            Target::Own(runs) => (own.clone(), runs),
            Target::Packed(runs) => (Runs::whole(usize::MAX), runs),
        };
        copy_all(sums, &[members], &runs, |run, from| grads.write(&run, from));
    }
}

impl<K: Kernels> Passes<K> {
    /// The optimizer pass, of all stages of this rank. A step whose loss or norm is not finite changes no weight: all ranks have the same
    /// two numbers, so all of them leave it out.
    pub fn update_weights(&mut self) -> Result<(), PassFailure> {
        self.take_sums()?;
        self.add_tied()?;
        self.agree()?;
        let clip = self.job.update.clip;
        let norm = self.update.outcome.grad_norm;
        let grad_scale = clip.map_or(1.0, |max| clip_scale(norm * norm, max));
        let is_finite = self.update.outcome.is_finite();
        let numbers = StepNumbers { learning_rate: self.update.outcome.learning_rate, grad_scale };
        for (id, stage) in &mut self.stages {
            let update = self.update.stages.get_mut(id).ok_or("no such stage here")?;
            let (params, grads) = (&mut stage.params, &mut stage.grads);
            if is_finite {
                let to = (&mut params.kept, &params.share.runs);
                update.optimizer.step(&*self.kernels, numbers, to, (&grads.kept, &grads.share.runs));
            }
            let len = grads.kept.len();
            self.kernels.fill(K::Real::ZERO, (&mut grads.kept).into(), len);
            stage.done = 0;
            update.ready = update.sums.end()..update.sums.end();
        }
        if is_finite { self.gather_weights() } else { Ok(()) }
    }

    /// Puts the sums where the summands were.
    fn take_sums(&mut self) -> Result<(), PassFailure> {
        for (id, stage) in &mut self.stages {
            let update = self.update.stages.get_mut(id).ok_or("no such stage here")?;
            stage.grads.finish()?;
            if let (true, Some(Between { group, members })) = (stage.grads.are_summed_each(), &update.scatter)
            {
                let (grads, ranges) = (&stage.grads, update.sums.plain(&(0..update.sums.end())));
                let packed = pack(|at| grads.read_at(at), &grads.share.runs, members, &ranges);
                let what = What::ReduceScatter(counts_of(members, &ranges));
                let promise = self.update.calls.start(*group, what, &packed, Urgency::Now)?;
                update.under_way.push((Target::Own(ranges), promise));
            }
            for (target, promise) in std::mem::take(&mut update.under_way) {
                target.put(&promise.wait()?, &mut stage.grads, &update.optimizer.share().runs);
            }
            update.sum_rest(&self.update.calls, &mut stage.grads)?;
        }
        Ok(())
    }

    /// Adds up the gradients of tied weights over the stages that use them, in model order on every rank.
    fn add_tied(&mut self) -> Result<(), PassFailure> {
        let wiring = Arc::clone(&self.wiring);
        let theirs = self.exchange_tied()?;
        for (i, tied) in wiring.tied.iter().enumerate() {
            let mut sum: Option<Vec<K::Real>> = None;
            let mut add = |summand: &[K::Real]| match &mut sum {
                None => sum = Some(summand.to_vec()),
                Some(sum) => sum.iter_mut().zip(summand).for_each(|(to, from)| *to += *from),
            };
            for stage in &tied.stages {
                match (self.stages.get(stage), theirs.get(&(i, *stage))) {
                    (Some(own), _) => {
                        add(&own.grads.read(&range_of(own.chain.parameters(), &tied.name)));
                    }
                    (None, Some(theirs)) => add(theirs),
                    (None, None) => {}
                }
            }
            let Some(sum) = sum else { continue };
            for (_, stage) in self.stages.iter_mut().filter(|(id, _)| tied.stages.contains(id)) {
                stage.grads.write(&range_of(stage.chain.parameters(), &tied.name), &sum);
            }
        }
        Ok(())
    }

    /// What stages of other ranks have for the tied weights of ours, by weight and stage.
    fn exchange_tied(&mut self) -> Result<Theirs<K::Real>, PassFailure> {
        let Some(tied) = &self.update.exchange else { return Ok(BTreeMap::new()) };
        let Some(exchange) = &tied.wiring.exchange else { return Ok(BTreeMap::new()) };
        let names = &tied.wiring.tied;
        for (way, (weight, from, _)) in exchange.ways.iter().enumerate() {
            if let Some(stage) = self.stages.get(from) {
                let range = range_of(stage.chain.parameters(), &names[*weight].name);
                tied.buffers.write_source(way, &stage.grads.read(&range))?;
            }
        }
        let id = 2 * (self.step % 2) as u32 + 1;
        let call =
            |reply| -> Box<dyn Call> { Box::new(TiedCall { id, buffers: tied.buffers.clone(), reply }) };
        self.update.calls.hand_over(call).wait()?;
        let mut theirs = BTreeMap::new();
        for (way, (weight, from, to)) in exchange.ways.iter().enumerate() {
            if let Some(stage) = self.stages.get(to) {
                let range = range_of(stage.chain.parameters(), &names[*weight].name);
                let mut shard = vec![K::Real::ZERO; range.len()];
                tied.buffers.read_destination(way, &mut shard);
                theirs.insert((*weight, *from), shard);
            }
        }
        Ok(theirs)
    }

    /// One loss and one norm for all ranks.
    pub(super) fn agree(&mut self) -> Result<(), PassFailure> {
        let mut sums = [0.0; 2];
        let is_first = self.update.place.tp().rank == 0;
        sums[0] = if is_first { self.loss } else { 0.0 };
        for (id, stage) in &self.stages {
            let counted_elsewhere: Vec<&str> = self
                .wiring
                .tied
                .iter()
                .filter(|tied| tied.stages.first() != Some(id))
                .map(|tied| tied.name.as_str())
                .collect();
            let (place, own) = (&self.update.place, &self.update.stages[id].own);
            let (parameters, grads) = (stage.chain.parameters(), &stage.grads);
            let grads = (&grads.kept, &grads.share.runs);
            sums[1] += norm_piece(&*self.kernels, parameters, place, own, grads, &counted_elsewhere);
        }
        let before = take_waited();
        if let Some(world) = self.update.groups.world {
            let what = What::AllReduce(Reduction::Sum);
            let all = self.update.calls.start(world, what, &sums, Urgency::Now)?.wait()?;
            sums.copy_from_slice(&all);
        }
        let waited = take_waited();
        add_waited(before + waited);
        self.update.outcome = Outcome {
            loss: sums[0],
            grad_norm: sums[1].sqrt(),
            learning_rate: self.job.update.rate.at(self.step),
            waited_for_all_s: waited.as_secs_f64(),
        };
        self.loss = 0.0;
        Ok(())
    }

    /// Every rank has updated what it keeps states of: those that keep more of the parameters get the rest.
    fn gather_weights(&mut self) -> Result<(), PassFailure> {
        let mut under_way = vec![];
        for (id, stage) in &self.stages {
            let update = &self.update.stages[id];
            let Some(Between { group, members }) = &update.gather else { continue };
            let (all, params) = (0..update.sums.end(), &stage.params);
            let ranges = std::slice::from_ref(&all);
            let own = [update.optimizer.share().runs.clone()];
            let read = |at: Range<usize>| {
                self.kernels.elems(BufSlice { buf: &params.kept, start: at.start }, at.len())
            };
            let packed = pack(read, &params.share.runs, &own, ranges);
            let what = What::AllGather(counts_of(members, ranges));
            under_way.push((*id, self.update.calls.start(*group, what, &packed, Urgency::Now)?));
        }
        for (id, promise) in under_way {
            let all = promise.wait()?;
            let update = &self.update.stages[&id];
            let Some(Between { members, .. }) = &update.gather else { continue };
            let params = &mut self.stages.get_mut(&id).ok_or("no such stage here")?.params;
            let whole = 0..update.sums.end();
            copy_all(&all, members, std::slice::from_ref(&whole), |run, from| {
                let start = params.share.runs.at(&run).start;
                self.kernels.put_elems(from, PartMut { buf: &mut params.kept, start });
            });
        }
        Ok(())
    }
}

fn range_of(parameters: &[Parameter], name: &str) -> Range<usize> {
    parameters.iter().find(|p| p.name == name).map_or(0..0, |p| p.range.clone())
}

/// The exchange of tied gradients, as a job of the engine.
struct TiedCall {
    id: u32,
    buffers: RankBuffers,
    reply: Sender<()>,
}

impl Call for TiedCall {
    fn start(self: Box<Self>, comm: &mut Collectives) -> Result<Box<dyn Running>, CallError> {
        let mut spec = JobSpec::new(self.id, &self.buffers)?;
        spec.priority = Urgency::Now as u32;
        let handle = comm.engine().start(spec)?;
        Ok(Box::new(TiedRunning { handle, reply: self.reply }))
    }
}

struct TiedRunning {
    handle: Handle,
    reply: Sender<()>,
}

impl Running for TiedRunning {
    fn finish(self: Box<Self>, comm: &mut Collectives) -> Option<Box<dyn Running>> {
        if comm.engine().finish(self.handle).is_none() {
            return Some(self);
        }
        let _gone = self.reply.send(());
        None
    }
}
