//! A rank of a training job.
//!
//! ```text
//! this thread     engine: crossings between stages, collectives inside them, everything that moves
//! device thread   passes, in the schedule's order; asks the engine for collectives on the way
//! ```
//!
//! A step is one program ([`crate::wiring`]): passes, crossings, and an optimizer pass at the end. The engine starts a pass when
//! what it needs has arrived, and moves what it made while the next one computes.

mod calls;
mod direct;
mod feed;
mod grads;
mod lists;
mod params;
mod passes;
mod runs;
mod threads;
mod times;
mod update;
mod wired;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crossmesh_comm::buffer::{RankBuffers, Sharing};
use crossmesh_comm::clock::Monotonic;
use crossmesh_comm::collectives::{CallError, Collectives, GroupId};
use crossmesh_comm::device::Worker;
use crossmesh_comm::engine::{Engine, EngineOptions, JobReport};
use crossmesh_comm::error::CommError;
use crossmesh_comm::flight::FlightRecord;
use crossmesh_comm::step::StepBuffers;
use crossmesh_comm::transport::Link;
use crossmesh_core::collective::CollectiveOptions;
use crossmesh_core::id::{DeviceId, Rank, StageId};

pub use direct::Direct;
pub use feed::{Ahead, Column, Feed, Samples};
pub use lists::step_lists;
pub use passes::PassFailure;
pub use threads::{in_threads, in_threads_on};

use crate::chain::{Chain, Model, Setup};
use crate::deal::Share;
use crate::graph::Mode;
use crate::group::{Alone, Group};
use crate::job::{Job, JobError};
use crate::kernels::{Buffer as _, Kernels, PartMut};
use crate::optim::Optimizer;
use crate::parameter::Parameter;
use crate::record::{Peak, StepRecord};
use crate::stage::Stage as _;
use crate::stage_rank::G;
use crate::strands::{Baton, Turn};
use crate::tier::{Tier, TierError};
use crate::wiring::{Wiring, setup};
use calls::{Calls, Desk, Urgency};
pub(crate) use calls::{add_waited, take_waited};
use params::Params;
pub use params::most_fetched;
use passes::{Passes, RankStage};
use update::{Groups, Update};
use wired::{Called, Wired};

/// Links to other ranks.
pub type Links = Vec<(Rank, Box<dyn Link>)>;

/// What a rank may be told.
#[derive(Debug, Clone)]
pub struct TrainerOptions {
    pub engine: EngineOptions,
    /// Whether peers on the host can map memory.
    pub sharing: Sharing,
}

/// Training that came to an early end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error(transparent)]
    Call(CallError),
    #[error(transparent)]
    Job(#[from] JobError),
    #[error(transparent)]
    Tier(#[from] TierError),
    #[error("{rank} has no part in the job")]
    NoPart { rank: Rank },
    #[error("a rank's thread panicked")]
    Panicked,
}

impl From<CallError> for TrainError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Comm(error) => TrainError::Comm(error),
            other => TrainError::Call(other),
        }
    }
}

/// See the module. What waits for replies ends when `desk` is dropped, so it comes first.
pub struct Trainer<K: Kernels> {
    desk: Desk,
    comm: Collectives,
    me: Rank,
    wiring: Arc<Wiring>,
    buffers: Arc<StepBuffers>,
    passes: Arc<Mutex<Passes<K>>>,
    step: u64,
    /// How often the program was run.
    turns: u64,
    /// Samples that the steps so far have seen: the next one goes on behind them.
    samples: u64,
}

/// A stage of a rank, between two steps.
pub struct StageState<'a, K: Kernels> {
    pub stage: StageId,
    pub parameters: &'a [Parameter],
    pub coord: &'a [u32],
    kernels: &'a K,
    params: &'a mut Params<K>,
    pub optimizer: &'a mut Optimizer<K::Buf>,
}

impl<K: Kernels> StageState<'_, K> {
    /// What this rank keeps of the weights that passes use.
    pub fn params(&self) -> Vec<K::Real> {
        self.kernels.download(&self.params.kept)
    }

    /// Of which part of the flat buffer that is.
    pub fn share(&self) -> &Share {
        &self.params.share
    }

    /// The weights that are worth saving, and of which part of the flat buffer they are: what others are rounded from, where they are.
    pub fn weights(&self) -> (Cow<'_, [K::Real]>, &Share) {
        let (buf, share) = match self.optimizer.masters() {
            Some(masters) => (masters, self.optimizer.share()),
            None => (&self.params.kept, &self.params.share),
        };
        (self.kernels.reals(buf.into(), buf.len()), share)
    }

    /// What the optimizer remembers, in the order of its names.
    pub fn moments(&self) -> Vec<Cow<'_, [K::Real]>> {
        let moments = self.optimizer.moments().iter();
        moments.map(|buf| self.kernels.reals(buf.into(), buf.len())).collect()
    }

    /// Goes on from other weights, all of [`StageState::share`], as if this many steps had been done; and from other moments, if they are known.
    pub fn replace(&mut self, weights: &[K::Real], steps: u64, moments: Option<&[Vec<K::Real>]>) {
        self.params.kept = self.kernels.upload(weights);
        let (kept, runs) = (&self.params.share.runs, self.optimizer.share().runs.clone());
        if let Some(masters) = self.optimizer.masters_mut() {
            for (run, start) in runs.iter() {
                self.kernels.put_reals(&weights[kept.at(&run)], PartMut { buf: &mut *masters, start });
            }
        }
        let to = self.optimizer.resume(steps);
        for (to, from) in to.iter_mut().zip(moments.unwrap_or_default()) {
            self.kernels.put_reals(from, to.into());
        }
    }
}

/// Elements that a rank keeps between two steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Kept {
    pub parameters: usize,
    pub gradients: usize,
    /// All moments of the optimizer.
    pub states: usize,
    /// What parameters are rounded from, where they are.
    pub masters: usize,
    /// The most that passes held beside it so far: weights that were fetched, and gradients on their way out, of a stage.
    pub fetched: usize,
    pub opened: usize,
}

impl Kept {
    /// With these kernels.
    pub fn bytes<K: Kernels>(&self) -> usize {
        let reals = self.gradients + self.states + self.masters;
        self.parameters * size_of::<K::Elem>() + reals * size_of::<K::Real>()
    }
}

impl<K: Kernels> Trainer<K> {
    /// Sets a rank up, with the weights of the first step. `links` leads to all other ranks of the job.
    #[expect(clippy::too_many_arguments, reason = "what every rank shares, and what makes it this one")]
    pub fn new(
        kernels: Arc<K>,
        model: &dyn Model<K>,
        job: &Arc<Job>,
        wiring: &Arc<Wiring>,
        feed: Arc<dyn Feed>,
        me: Rank,
        links: Links,
        options: &TrainerOptions,
    ) -> Result<Self, TrainError> {
        let (device, position) = job.home(me).ok_or(TrainError::NoPart { rank: me })?;
        let engine = Engine::new(me, links, Box::new(Monotonic), options.engine.clone())?;
        let collectives = CollectiveOptions::default();
        let mut comm = Collectives::new(me, engine, job.cluster.clone(), options.sharing, collectives);
        let groups = groups(&mut comm, job, device, position)?;
        let (step, lowered) = (&wiring.step, &wiring.lowered);
        let buffers = Arc::new(StepBuffers::allocate(step, lowered, me, options.sharing)?);
        let tied = tied_buffers(wiring, me, options.sharing)?;
        let (waker, allocator) = (comm.engine_ref().waker(), comm.allocator());
        let (calls, desk) = Calls::new(waker.clone(), allocator);
        let tier = job.offload.as_deref().map(Tier::open).transpose()?.map(Arc::new);
        let seat = Seat { model, job, wiring, device, position, calls, groups, kernels, tier };
        let passes = Arc::new(Mutex::new(seat.passes(feed, &buffers, tied)?));
        let (shared, parts) = (Arc::clone(&passes), wiring.lowered.parts.clone());
        let compute =
            move |pass: u32| lock(&shared).run(parts[pass as usize].pass).map_err(|e| whole_story(&*e));
        let worker = Worker::new(waker, Box::new(compute));
        let worker =
            worker.map_err(|e| CommError::System { me, what: "start its device", cause: e.to_string() })?;
        comm.engine().set_device(Box::new(worker))?;
        Ok(Self {
            desk,
            comm,
            me,
            wiring: Arc::clone(wiring),
            buffers,
            passes,
            step: 0,
            turns: 0,
            samples: 0,
        })
    }

    pub fn rank(&self) -> Rank {
        self.me
    }

    /// Steps done.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Samples that they have seen.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// The next step, from its data to its update.
    pub fn step(&mut self) -> Result<StepRecord, TrainError> {
        let sent = self.comm.engine_ref().traffic();
        let report = self.turn(Mode::Train, self.samples)?;
        let now = self.comm.engine_ref().traffic();
        let mut passes = lock(&self.passes);
        let waited = std::mem::take(&mut passes.waited);
        let outcome = passes.update.outcome;
        let peak = |stage: &RankStage<K>| {
            let live = stage.chain.live();
            Peak { stage: stage.id.0, microbatches: live.peak_microbatches, bytes: live.peak_bytes }
        };
        let record = StepRecord {
            step: self.step,
            loss: outcome.loss,
            grad_norm: outcome.grad_norm,
            learning_rate: outcome.learning_rate,
            skipped: !outcome.is_finite(),
            times: times::of(&self.wiring.lowered, self.me, &report, &waited, outcome.waited_for_all_s),
            bytes_sent: now.0 - sent.0,
            bytes_received: now.1 - sent.1,
            activation_bytes: std::mem::take(&mut passes.peak_bytes),
            peaks: passes.stages.values().map(peak).collect(),
            passes: times::spans(&self.wiring.lowered, self.me, &report, &waited),
        };
        self.step += 1;
        self.samples += passes.job.batch();
        Ok(record)
    }

    /// The mean loss over `batches` batches of what is held out, from its first sample on. Nothing is learnt, nothing dropped, and no
    /// step counted.
    pub fn evaluate(&mut self, batches: u64) -> Result<f64, TrainError> {
        let batch = lock(&self.passes).job.batch();
        let mut sum = 0.0;
        for at in 0..batches {
            self.turn(Mode::Evaluate, at * batch)?;
            let mut passes = lock(&self.passes);
            passes.waited = passes::Waited::default();
            sum += passes.update.outcome.loss;
        }
        Ok(sum / batches.max(1) as f64)
    }

    /// Runs the step's program once, over a batch from this sample on.
    fn turn(&mut self, mode: Mode, first_sample: u64) -> Result<JobReport, TrainError> {
        {
            let mut passes = lock(&self.passes);
            (passes.mode, passes.step, passes.first_sample) = (mode, self.step, first_sample);
        }
        let mut spec = self.buffers.job(2 * (self.turns % 2) as u32)?;
        self.turns += 1;
        spec.priority = Urgency::Edges as u32;
        let handle = self.comm.engine().start(spec)?;
        while !self.comm.engine_ref().has_ended(handle) || !self.desk.is_idle() {
            self.comm.engine().turn()?;
            self.desk.serve(&mut self.comm)?;
        }
        Ok(self.comm.engine().wait(handle)?)
    }

    /// Calls `f` with every stage of this rank, in model order: to save it, or to go on from what was saved.
    pub fn each_stage<E>(&mut self, mut f: impl FnMut(StageState<'_, K>) -> Result<(), E>) -> Result<(), E> {
        let mut passes = lock(&self.passes);
        let Passes { stages, update, kernels, .. } = &mut *passes;
        for (id, RankStage { setup, chain, params, .. }) in stages {
            let optimizer = update.optimizer_mut(*id).expect("every stage has an optimizer");
            let (parameters, coord) = (chain.parameters(), setup.place.coord());
            f(StageState { stage: *id, parameters, coord, kernels: &**kernels, params, optimizer })?;
        }
        Ok(())
    }

    /// How much it keeps between two steps.
    pub fn kept(&mut self) -> Kept {
        let mut passes = lock(&self.passes);
        let Passes { stages, update, .. } = &mut *passes;
        let mut kept = Kept::default();
        for (id, stage) in stages {
            let optimizer = update.optimizer_mut(*id).expect("every stage has an optimizer");
            kept.parameters += stage.params.kept.len();
            kept.gradients += stage.grads.kept.len();
            kept.fetched = kept.fetched.max(stage.params.fetched());
            kept.opened = kept.opened.max(stage.grads.opened());
            kept.states += optimizer.moments().iter().map(|m| m.len()).sum::<usize>();
            kept.masters += optimizer.masters().map_or(0, |m| m.len());
        }
        kept
    }

    /// Goes on as if so many steps had been done, over so many samples.
    pub fn resume_at(&mut self, step: u64, samples: u64) {
        (self.step, self.samples) = (step, samples);
    }

    /// Collectives of the job's own, between two steps.
    pub fn collectives(&mut self) -> &mut Collectives {
        &mut self.comm
    }

    /// What this rank was doing when it failed.
    pub fn flight_record(&self) -> Option<&FlightRecord> {
        self.comm.engine_ref().flight_record()
    }

    /// Says farewell to the peers.
    pub fn close(self) {
        let Self { desk, comm, .. } = self;
        drop(desk);
        comm.close();
    }
}

/// Where a rank sits, while its stages are made.
struct Seat<'a, K: Kernels> {
    model: &'a dyn Model<K>,
    job: &'a Arc<Job>,
    wiring: &'a Arc<Wiring>,
    device: DeviceId,
    position: usize,
    calls: Calls,
    groups: Groups,
    kernels: Arc<K>,
    tier: Option<Arc<Tier>>,
}

impl<K: Kernels> Seat<'_, K> {
    fn passes(
        self,
        feed: Arc<dyn Feed>,
        buffers: &Arc<StepBuffers>,
        tied: Option<(Arc<Wiring>, RankBuffers)>,
    ) -> Result<Passes<K>, TrainError> {
        let place = self.job.place(self.device, self.position).map_err(JobError::from)?;
        let names: Vec<&str> = self.wiring.tied.iter().map(|t| t.name.as_str()).collect();
        let calls = self.calls.clone();
        let mut update = Update::new(self.job.update.clone(), place, calls, self.groups.clone(), tied);
        let mut stages = vec![];
        for &id in self.wiring.stages_on(self.device) {
            let (setup, chain) = self.stage(id)?;
            let weights = (chain.parameters(), chain.buckets());
            let (params, grads) = update.add_stage(&self.kernels, id, weights, &names, self.job.seed);
            stages.push(RankStage { id, setup, chain, params, grads, done: 0 });
        }
        let (job, wiring) = (Arc::clone(self.job), Arc::clone(self.wiring));
        Ok(Passes::new(job, wiring, self.kernels, stages, update, Arc::clone(buffers), feed))
    }

    fn stage(&self, id: StageId) -> Result<(Setup, Chain<K>), TrainError> {
        let setup = setup(self.job, id, self.position)?;
        let tp = setup.place.tp();
        let group = |turn: Option<Turn>| -> Arc<dyn Group<K::Buf>> {
            let Some(group) = self.groups.tp else { return Arc::new(Alone) };
            let channel = Called { calls: self.calls.clone(), group, rank: tp.rank, size: tp.size, turn };
            Arc::new(Wired { kernels: Arc::clone(&self.kernels), channel })
        };
        let units = self.job.stages[id.index()].clone();
        let kernels = Arc::clone(&self.kernels);
        let chain = Chain::new(self.model, units.clone(), kernels, group(None), setup.clone());
        let chain = chain.map_err(JobError::from)?;
        let chain = match &self.tier {
            Some(tier) => chain.offloaded_to(Arc::clone(tier)),
            None => chain,
        };
        let chain = match setup.strands {
            2 => {
                let strands = Baton::pair().map(|turn| (group(Some(turn.clone())), turn));
                chain.in_strands(self.model, units, strands).map_err(JobError::from)?
            }
            _ => chain,
        };
        Ok((setup, chain))
    }
}

/// The groups of a rank. All ranks make theirs in the same order.
fn groups(
    comm: &mut Collectives,
    job: &Job,
    device: DeviceId,
    position: usize,
) -> Result<Groups, TrainError> {
    let team = &job.teams[device.index()];
    let mut group = |ranks: &[Rank]| -> Result<Option<GroupId>, TrainError> {
        match ranks.len() {
            0 | 1 => Ok(None),
            _ => Ok(Some(comm.group(ranks)?)),
        }
    };
    let place = job.place(device, position).map_err(JobError::from)?;
    let along = |axes: &[usize]| -> Vec<Rank> {
        place.others(axes).iter().map(|coord| team.ranks[team.mesh.position(coord)]).collect()
    };
    let tp = group(&along(&place.meant("tp")))?;
    let shared = group(&along(&[place.data_axes(), place.meant(G)].concat()))?;
    let long: Vec<usize> =
        place.data_axes().into_iter().filter(|&axis| team.mesh.axes()[axis].len > 1).collect();
    let mut data = BTreeMap::new();
    for set in 1..1usize << long.len() {
        let axes: Vec<usize> = (0..long.len()).filter(|i| set >> i & 1 == 1).map(|i| long[i]).collect();
        if let Some(group) = group(&along(&axes))? {
            data.insert(axes, group);
        }
    }
    let (mesh, world) = (group(&team.ranks)?, group(&job.ranks())?);
    Ok(Groups { tp, shared, mesh, world, data })
}

fn tied_buffers(
    wiring: &Arc<Wiring>,
    me: Rank,
    sharing: Sharing,
) -> Result<Option<(Arc<Wiring>, RankBuffers)>, TrainError> {
    let Some(exchange) = &wiring.exchange else { return Ok(None) };
    if exchange.program.ranks.get(me.index()).is_none_or(|p| p.ops.is_empty()) {
        return Ok(None);
    }
    let buffers = RankBuffers::allocate(exchange.program.rank(me), sharing);
    let what = "allocate the buffers of tied weights";
    let buffers = buffers.map_err(|e| CommError::System { me, what, cause: e.to_string() })?;
    Ok(Some((Arc::clone(wiring), buffers)))
}

fn lock<P>(passes: &Mutex<P>) -> MutexGuard<'_, P> {
    passes.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An error with its causes, in one line.
fn whole_story(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(error.source(), |e| e.source());
    causes.fold(error.to_string(), |story, cause| format!("{story}: {cause}"))
}
