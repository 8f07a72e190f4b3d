//! From gradients to the next step's weights.
//!
//! ```text
//! last W of a stage    runs of gradients become complete -> summed over dp, a bucket at a time, beside the rest of W
//! optimizer pass       wait for the sums; add up tied weights; one norm for all ranks; step; gather what ZeRO dealt out
//! ```
//!
//! Five kinds of gradients are summed in four ways. Most are the sum over `dp`, which with ZeRO-1 each rank needs its own part of
//! alone. Those of weights that are whole on all ranks along `tp`, each of which saw some rows only, are summed over all
//! ranks of the mesh: they are small, and go together. So do those that all ranks along `tp` have alike, of which one counts: were each of
//! them summed over its own `dp`, in an order that depends on where it lies there, replicas would differ in their last bits. Keys and values that some ranks along `tp` share are
//! summed over these and `dp`. Those of tied weights are needed whole, to be added up with the other stages'.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use crossmesh_comm::buffer::RankBuffers;
use crossmesh_comm::collectives::{Buffer, CallError, Collectives, Element, GroupId, Reduction};
use crossmesh_comm::engine::{Handle, JobSpec};
use crossmesh_core::id::StageId;

use super::calls::{Call, Calls, Promise, Running, Urgency, What, add_waited, take_waited};
use super::passes::{PassFailure, Passes};
use super::wired::counts;
use crate::group::chunked;
use crate::job::Update as Rule;
use crate::kernels::cpu::HostBuf;
use crate::kernels::scalar::Scalar;
use crate::kernels::{BufSlice, Kernels as _, PartMut};
use crate::optim::{Optimizer, StepNumbers, clip_scale, is_split_over_tp, norm_piece};
use crate::parameter::Parameter;
use crate::stage::Stage as _;
use crate::stage_rank::StageRank;
use crate::wiring::Wiring;

/// The groups a rank is in; none where it would be alone.
#[derive(Debug, Clone, Copy, Default)]
pub struct Groups {
    pub tp: Option<GroupId>,
    pub dp: Option<GroupId>,
    /// Those along `dp`, and along the part of `tp` that has the same keys and values.
    pub shared: Option<GroupId>,
    pub mesh: Option<GroupId>,
    pub world: Option<GroupId>,
}

/// How a parameter's gradient is summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Over `dp`; a part is enough with ZeRO-1.
    Plain,
    /// Over `dp`, and all of it is needed.
    Tied,
    /// Over all ranks of the mesh.
    Partial,
    /// Over `dp` and the ranks along `tp` that share it.
    Shared,
    /// The same on all ranks along `tp`: over the mesh, where the first one's counts.
    Replica,
}

/// Where a sum goes when it is there.
enum Target {
    Run(Range<usize>),
    /// Several runs, one behind the other.
    Packed(Vec<Range<usize>>),
}

/// What becomes of a stage's gradients.
struct StageUpdate<T> {
    parameters: Vec<Parameter>,
    kinds: Vec<Kind>,
    /// The flat buffer, dealt out over `dp`.
    shards: Vec<Range<usize>>,
    optimizer: Optimizer<HostBuf<T>>,
    /// Complete, and not yet under way.
    ready: Range<usize>,
    packed: Vec<(Kind, Range<usize>)>,
    under_way: Vec<(Target, Promise<Buffer<T>>)>,
}

/// See the module.
pub struct Update<T> {
    place: StageRank,
    rule: Rule,
    calls: Calls,
    groups: Groups,
    stages: BTreeMap<StageId, StageUpdate<T>>,
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

impl<T: Scalar + Element> Update<T> {
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

    /// Adds a stage, whose optimizer starts from nothing.
    pub fn add_stage(
        &mut self,
        kernels: &crate::kernels::cpu::Cpu<T>,
        stage: StageId,
        parameters: &[Parameter],
        tied: &[&str],
    ) {
        let several = self.place.tp().size > 1 && self.place.dp().size > 1;
        let kind = |p: &Parameter| {
            let partial = p.grad.partial().map(|partial| partial.axes.clone()).unwrap_or_default();
            let over_tp = partial.iter().any(|axis| p.grad.mesh().axes()[*axis].name != "dp");
            match (over_tp, tied.contains(&p.name.as_str())) {
                (true, _) if is_split_over_tp(p) => Kind::Shared,
                (true, _) => Kind::Partial,
                (false, true) => Kind::Tied,
                (false, false) if several && !is_split_over_tp(p) => Kind::Replica,
                (false, false) => Kind::Plain,
            }
        };
        let len = parameters.last().map_or(0, |p| p.range.end);
        let shards = chunked(len, 1, self.place.dp().size);
        let shard = if self.rule.zero { shards[self.place.dp().rank].clone() } else { 0..len };
        let optimizer = Optimizer::new(kernels, self.rule.optimizer, parameters, shard);
        let update = StageUpdate {
            kinds: parameters.iter().map(kind).collect(),
            parameters: parameters.to_vec(),
            shards,
            optimizer,
            ready: len..len,
            packed: vec![],
            under_way: vec![],
        };
        self.stages.insert(stage, update);
    }

    pub fn optimizer_mut(&mut self, stage: StageId) -> Option<&mut Optimizer<HostBuf<T>>> {
        self.stages.get_mut(&stage).map(|s| &mut s.optimizer)
    }

    /// A run of a stage's gradients is complete; runs come from the last to the first.
    pub fn ready(&mut self, stage: StageId, grads: &mut [T], run: Range<usize>) -> Result<(), PassFailure> {
        let update = self.stages.get_mut(&stage).ok_or("no such stage here")?;
        update.take_what_is_there(grads);
        update.ready.start = update.ready.start.min(run.start);
        let bytes = (update.ready.len() * size_of::<T>()) as u64;
        match bytes >= self.rule.bucket_bytes {
            true => self.send(stage, grads),
            false => Ok(()),
        }
    }

    /// All of them are.
    pub fn all_ready(&mut self, stage: StageId, grads: &[T]) -> Result<(), PassFailure> {
        self.send(stage, grads)?;
        let update = self.stages.get_mut(&stage).ok_or("no such stage here")?;
        let (shared, others) =
            std::mem::take(&mut update.packed).into_iter().partition(|(kind, _)| *kind == Kind::Shared);
        let packs: [(_, Vec<_>); 2] = [(self.groups.mesh, others), (self.groups.shared, shared)];
        for (group, runs) in packs {
            let (Some(group), false) = (group, runs.is_empty()) else { continue };
            let counts = self.place.tp().rank == 0;
            let mut packed: Vec<T> = Vec::new();
            for (kind, run) in &runs {
                match *kind == Kind::Replica && !counts {
                    true => packed.resize(packed.len() + run.len(), T::ZERO),
                    false => packed.extend_from_slice(&grads[run.clone()]),
                }
            }
            let runs = runs.into_iter().map(|(_, run)| run).collect();
            let promise =
                self.calls.start(group, What::AllReduce(Reduction::Sum), &packed, Urgency::Later)?;
            update.under_way.push((Target::Packed(runs), promise));
        }
        Ok(())
    }

    /// Starts the sums of what is ready.
    fn send(&mut self, stage: StageId, grads: &[T]) -> Result<(), PassFailure> {
        let update = self.stages.get_mut(&stage).ok_or("no such stage here")?;
        let ready = std::mem::replace(&mut update.ready, 0..0);
        update.ready = ready.start..ready.start;
        let longest = (self.rule.bucket_bytes.max(1) as usize).saturating_mul(MAX_BUCKETS) / size_of::<T>();
        for (kind, run) in update.runs(&ready).into_iter().flat_map(|(kind, run)| pieces(kind, run, longest))
        {
            let (group, what) = match (kind, self.groups.dp) {
                (Kind::Partial | Kind::Replica | Kind::Shared, _) => {
                    update.packed.push((kind, run));
                    continue;
                }
                (_, None) => continue,
                (Kind::Plain, Some(dp)) if self.rule.zero => {
                    let parts: Vec<Range<usize>> = update.shards.iter().map(|s| overlap(s, &run)).collect();
                    (dp, What::ReduceScatter(counts(&parts)))
                }
                (_, Some(dp)) => (dp, What::AllReduce(Reduction::Sum)),
            };
            let target = match &what {
                What::ReduceScatter(_) => overlap(&update.shards[self.place.dp().rank], &run),
                _ => run.clone(),
            };
            let promise = self.calls.start(group, what, &grads[run], Urgency::Later)?;
            update.under_way.push((Target::Run(target), promise));
        }
        Ok(())
    }

    /// This rank's part of everything that a norm counts.
    fn shard(&self, stage: StageId) -> Range<usize> {
        self.stages[&stage].shards[self.place.dp().rank].clone()
    }
}

/// A run is summed in pieces of at most so many buckets, so that what is sent is never much of what there is.
const MAX_BUCKETS: usize = 4;

/// A run in pieces of `longest` elements at most, from the last to the first. What is needed whole stays whole.
fn pieces(kind: Kind, run: Range<usize>, longest: usize) -> Vec<(Kind, Range<usize>)> {
    if kind != Kind::Plain || run.len() <= longest {
        return vec![(kind, run)];
    }
    let count = run.len().div_ceil(longest.max(1));
    let at = |i: usize| run.start + run.len() * i / count;
    (0..count).rev().map(|i| (kind, at(i)..at(i + 1))).collect()
}

impl<T: Scalar + Element> StageUpdate<T> {
    /// Puts the sums that have arrived where their summands were, which lets go of the memory they came in.
    fn take_what_is_there(&mut self, grads: &mut [T]) {
        for (target, promise) in std::mem::take(&mut self.under_way) {
            match promise.now() {
                Ok(sums) => target.put(&sums, grads),
                Err(promise) => self.under_way.push((target, promise)),
            }
        }
    }
}

impl Target {
    fn put<T: Copy>(self, sums: &[T], grads: &mut [T]) {
        let runs = match self {
            Target::Run(run) => vec![run],
            Target::Packed(runs) => runs,
        };
        let mut at = 0;
        for run in runs {
            let len = run.len();
            grads[run].copy_from_slice(&sums[at..at + len]);
            at += len;
        }
    }
}

impl<T> StageUpdate<T> {
    /// Neighbours of one kind within a run of whole parameters, from the last to the first.
    fn runs(&self, run: &Range<usize>) -> Vec<(Kind, Range<usize>)> {
        let mut runs: Vec<(Kind, Range<usize>)> = vec![];
        let inside = self.parameters.iter().zip(&self.kinds).rev();
        for (p, kind) in inside.filter(|(p, _)| run.start <= p.range.start && p.range.end <= run.end) {
            match runs.last_mut() {
                Some((last, run)) if last == kind && *kind == Kind::Plain && run.start == p.range.end => {
                    run.start = p.range.start;
                }
                _ => runs.push((*kind, p.range.clone())),
            }
        }
        runs
    }
}

/// What two ranges have in common; where they have nothing, an empty range.
fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

impl<T: Scalar + Element> Passes<T> {
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
            if is_finite {
                let start = update.optimizer.shard().start;
                let params = PartMut { buf: &mut stage.params, start };
                update.optimizer.step(&*self.kernels, numbers, params, BufSlice { buf: &stage.grads, start });
            }
            let len = stage.grads.len();
            self.kernels.fill(T::ZERO, (&mut stage.grads).into(), len);
            stage.done = 0;
            update.ready = len..len;
        }
        if is_finite { self.gather_weights() } else { Ok(()) }
    }

    /// Puts the sums where the summands were.
    fn take_sums(&mut self) -> Result<(), PassFailure> {
        for (id, stage) in &mut self.stages {
            let update = self.update.stages.get_mut(id).ok_or("no such stage here")?;
            for (target, promise) in std::mem::take(&mut update.under_way) {
                target.put(&promise.wait()?, &mut stage.grads);
            }
        }
        Ok(())
    }

    /// Adds up the gradients of tied weights over the stages that use them, in model order on every rank.
    fn add_tied(&mut self) -> Result<(), PassFailure> {
        let wiring = Arc::clone(&self.wiring);
        let theirs = self.exchange_tied()?;
        for (i, tied) in wiring.tied.iter().enumerate() {
            let mut sum: Option<Vec<T>> = None;
            let mut add = |summand: &[T]| match &mut sum {
                None => sum = Some(summand.to_vec()),
                Some(sum) => sum.iter_mut().zip(summand).for_each(|(to, from)| *to += *from),
            };
            for stage in &tied.stages {
                match (self.stages.get(stage), theirs.get(&(i, *stage))) {
                    (Some(own), _) => add(&own.grads[range_of(own.chain.parameters(), &tied.name)]),
                    (None, Some(theirs)) => add(theirs),
                    (None, None) => {}
                }
            }
            let Some(sum) = sum else { continue };
            for (_, stage) in self.stages.iter_mut().filter(|(id, _)| tied.stages.contains(id)) {
                let range = range_of(stage.chain.parameters(), &tied.name);
                stage.grads[range].copy_from_slice(&sum);
            }
        }
        Ok(())
    }

    /// What stages of other ranks have for the tied weights of ours, by weight and stage.
    fn exchange_tied(&mut self) -> Result<BTreeMap<(usize, StageId), Vec<T>>, PassFailure> {
        let Some(tied) = &self.update.exchange else { return Ok(BTreeMap::new()) };
        let Some(exchange) = &tied.wiring.exchange else { return Ok(BTreeMap::new()) };
        let names = &tied.wiring.tied;
        for (way, (weight, from, _)) in exchange.ways.iter().enumerate() {
            if let Some(stage) = self.stages.get(from) {
                let range = range_of(stage.chain.parameters(), &names[*weight].name);
                tied.buffers.write_source(way, &stage.grads[range]);
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
                let mut shard = vec![T::ZERO; range.len()];
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
            let (place, shard) = (&self.update.place, self.update.shard(*id));
            let parameters = stage.chain.parameters();
            sums[1] +=
                norm_piece(&*self.kernels, parameters, place, &shard, &stage.grads, &counted_elsewhere);
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

    /// With ZeRO-1, every rank along `dp` has updated its part.
    fn gather_weights(&mut self) -> Result<(), PassFailure> {
        let Some(dp) = self.update.groups.dp.filter(|_| self.job.update.zero) else { return Ok(()) };
        let mut under_way = vec![];
        for (id, stage) in &self.stages {
            let what = What::AllGather(counts(&self.update.stages[id].shards));
            let own = &stage.params[self.update.shard(*id)];
            under_way.push((*id, self.update.calls.start(dp, what, own, Urgency::Now)?));
        }
        for (id, promise) in under_way {
            let whole = promise.wait()?;
            self.stages.get_mut(&id).ok_or("no such stage here")?.params.copy_from_slice(&whole);
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
