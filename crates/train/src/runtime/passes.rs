//! The passes of a rank: from what arrived to what leaves.
//!
//! The device's thread runs one pass at a time, in the schedule's order; when it may start is the program's business. A pass takes its
//! inputs from the data set, from the buffers of a crossing, or from a stage of the same rank, runs the stage, and puts its
//! outputs where the wiring says. Passes that only look (validation) read and hand on the same way; nothing is remembered for a backward pass,
//! which then has nothing to compute: its messages travel with whatever is in them, so one program serves both. What a stage remembers of a microbatch leaves with an Evict, and is put back by the backward pass for which a
//! Load has fetched it.

use std::collections::BTreeMap;
use std::sync::Arc;

use crossmesh_comm::collectives::Element;
use crossmesh_comm::step::{Slot, StepBuffers};
use crossmesh_core::id::{MicrobatchId as Id, StageId};
use crossmesh_core::schedule::{Pass, PassKind};
use crossmesh_core::step::Direction;

use super::calls::take_waited;
use super::feed::{Column, Feed};
use super::grads::Grads;
use super::params::Params;
use super::update::Update;
use crate::chain::{Chain, Setup};
use crate::data::Split;
use crate::flat::{Buckets, FlatMut, Gradients};
use crate::graph::Mode;
use crate::job::Job;
use crate::kernels::scalar::Scalar;
use crate::kernels::{Buffer as _, Kernels};
use crate::stage::{Microbatch, MicrobatchId, Port, Role, Stage, StageError, Value};
use crate::stage_rank::shard_dims;
use crate::wiring::{End, Wiring};

/// A stage of this rank.
pub struct RankStage<K: Kernels> {
    pub id: StageId,
    pub setup: Setup,
    pub chain: Chain<K>,
    pub params: Params<K>,
    pub grads: Grads<K>,
    /// Microbatches whose gradients are complete.
    pub done: u32,
}

/// See the module.
pub struct Passes<K: Kernels> {
    pub job: Arc<Job>,
    pub wiring: Arc<Wiring>,
    pub kernels: Arc<K>,
    /// By stage, in model order.
    pub stages: BTreeMap<StageId, RankStage<K>>,
    pub update: Update<K>,
    buffers: Arc<StepBuffers>,
    feed: Arc<dyn Feed>,
    /// What one stage of this rank made for another, by edge.
    here: BTreeMap<(usize, Direction, Id), K::Buf>,
    /// What stages remember that is kept elsewhere.
    away: BTreeMap<(StageId, Id), Away>,
    /// Whether passes learn, or only look.
    pub mode: Mode,
    /// The step under way.
    pub step: u64,
    /// The number of its first sample.
    pub first_sample: u64,
    /// This rank's summands of the loss, so far.
    pub loss: f64,
    pub waited: Waited,
    /// The most bytes that all stages held at once.
    pub peak_bytes: u64,
}

/// Gradients on their way out of W: those of the last microbatch are complete.
struct Summing<'a, K: Kernels> {
    id: StageId,
    is_last: bool,
    update: &'a mut Update<K>,
    grads: &'a mut Grads<K>,
    buckets: Buckets,
    failure: Option<PassFailure>,
}

impl<K: Kernels> Gradients<K::Buf> for Summing<'_, K> {
    fn open(&mut self, unit: usize) -> FlatMut<'_, K::Buf> {
        self.grads.open(unit)
    }

    fn close(&mut self, unit: usize) -> Result<(), StageError> {
        self.grads.close(unit)?;
        if self.is_last && self.failure.is_none() && !self.grads.are_summed_each() {
            self.failure = self.update.ready(self.id, self.grads, self.buckets.own(unit)).err();
        }
        Ok(())
    }
}

/// A microbatch that was evicted.
#[derive(Debug, Default)]
struct Away {
    /// Whether it was asked for: then there is room for it.
    coming: bool,
    /// Its bytes, where only a byte crosses in their place.
    bytes: Vec<u8>,
}

/// How long a rank stood still inside its passes, in seconds.
#[derive(Debug, Clone, Default)]
pub struct Waited {
    pub passes: f64,
    /// In the optimizer's.
    pub update: f64,
    /// In each.
    pub by_pass: Vec<(Pass, f64)>,
}

/// Why a pass ended early.
pub type PassFailure = Box<dyn std::error::Error + Send + Sync>;

impl<K: Kernels> Passes<K> {
    pub fn new(
        job: Arc<Job>,
        wiring: Arc<Wiring>,
        kernels: Arc<K>,
        stages: Vec<RankStage<K>>,
        update: Update<K>,
        buffers: Arc<StepBuffers>,
        feed: Arc<dyn Feed>,
    ) -> Self {
        let stages = stages.into_iter().map(|stage| (stage.id, stage)).collect();
        Self {
            job,
            wiring,
            kernels,
            stages,
            update,
            buffers,
            feed,
            here: BTreeMap::new(),
            away: BTreeMap::new(),
            mode: Mode::Train,
            step: 0,
            first_sample: 0,
            loss: 0.0,
            waited: Waited::default(),
            peak_bytes: 0,
        }
    }

    pub fn run(&mut self, pass: Pass) -> Result<(), PassFailure> {
        let result = self.compute(pass).and_then(|()| self.kernels.finish());
        self.look();
        let waited = take_waited().as_secs_f64();
        self.waited.by_pass.push((pass, waited));
        match pass.kind {
            PassKind::Optimizer => self.waited.update += waited,
            _ => self.waited.passes += waited,
        }
        result
    }

    fn compute(&mut self, pass: Pass) -> Result<(), PassFailure> {
        let Pass { kind, stage, microbatch } = pass;
        match kind {
            PassKind::F => self.forward(stage, microbatch),
            PassKind::Optimizer if self.mode == Mode::Evaluate => self.agree(),
            PassKind::B | PassKind::W | PassKind::BW | PassKind::Evict | PassKind::Load
                if self.mode == Mode::Evaluate =>
            {
                Ok(())
            }
            PassKind::B => self.backward_input(stage, microbatch),
            PassKind::W => self.backward_weight(stage, microbatch),
            PassKind::BW => {
                self.backward_input(stage, microbatch)?;
                self.look();
                self.backward_weight(stage, microbatch)
            }
            PassKind::Optimizer => self.update_weights(),
            PassKind::Evict => self.evict(stage, microbatch),
            PassKind::Load => {
                let away = self.away.get_mut(&(stage, microbatch)).ok_or("it was not evicted")?;
                away.coming = true;
                Ok(())
            }
            PassKind::S | PassKind::T | PassKind::Offload => {
                Err(format!("{pass} is not a pass that a stage can make").into())
            }
        }
    }

    /// Counts what is held now, and what there is room for.
    fn look(&mut self) {
        let held: u64 = self.stages.values().map(|stage| stage.chain.live().bytes).sum();
        let coming = self.away.iter().filter(|(_, away)| away.coming);
        let coming = coming.filter_map(|((stage, _), _)| self.stages.get(stage));
        let coming: u64 = coming.map(|stage| stage.chain.activation_bytes().after_forward).sum();
        self.peak_bytes = self.peak_bytes.max(held + coming);
    }

    fn evict(&mut self, id: StageId, microbatch: Id) -> Result<(), PassFailure> {
        let kept = *self.wiring.kept.get(&id).ok_or("nobody keeps what it remembers")?;
        let stage = self.stages.get_mut(&id).ok_or("no such stage here")?;
        let mut bytes = stage.chain.evict(MicrobatchId(microbatch.0))?;
        let mut away = Away::default();
        if self.job.signal {
            away.bytes = std::mem::replace(&mut bytes, vec![1]);
        }
        bytes.resize(kept.bytes, 0);
        let slot = Slot { crossing: kept.crossing, direction: Direction::Forward, tensor: 0, microbatch };
        self.send(slot, &bytes);
        self.away.insert((id, microbatch), away);
        Ok(())
    }

    /// Puts back what was evicted, if it was.
    fn put_back(&mut self, id: StageId, microbatch: Id) -> Result<(), PassFailure> {
        let Some(Away { mut bytes, .. }) = self.away.remove(&(id, microbatch)) else { return Ok(()) };
        if !self.job.signal {
            let kept = *self.wiring.kept.get(&id).ok_or("nobody keeps what it remembers")?;
            bytes.resize(kept.bytes, 0);
            let slot =
                Slot { crossing: kept.crossing, direction: Direction::Backward, tensor: 0, microbatch };
            self.receive(slot, &mut bytes);
        }
        let stage = self.stages.get_mut(&id).ok_or("no such stage here")?;
        Ok(stage.chain.load(MicrobatchId(microbatch.0), &bytes)?)
    }

    fn microbatch(&self, id: Id) -> Microbatch {
        Microbatch {
            id: MicrobatchId(id.0),
            step: self.step,
            first_sample: u64::from(id.0) * self.job.samples as u64,
            batch_samples: self.job.batch(),
        }
    }

    fn forward(&mut self, id: StageId, microbatch: Id) -> Result<(), PassFailure> {
        let wiring = Arc::clone(&self.wiring);
        let ends = wiring.inputs[id.index()].iter().enumerate();
        let inputs = ends.map(|(port, end)| self.input(id, port, *end, microbatch));
        let inputs = inputs.collect::<Result<Vec<_>, PassFailure>>()?;
        let about = self.microbatch(microbatch);
        let stage = self.stages.get_mut(&id).ok_or("no such stage here")?;
        let outputs = match self.mode {
            Mode::Train => stage.chain.forward(about, &mut stage.params, inputs)?,
            Mode::Evaluate => stage.chain.evaluate(about, &mut stage.params, inputs)?,
        };
        for (end, value) in wiring.outputs[id.index()].iter().zip(outputs) {
            match value {
                Value::Real(buf) => self.hand_over(*end, Direction::Forward, microbatch, buf),
                Value::Loss(loss) => self.loss += loss,
                Value::Ids(_) | Value::Coming(_) => {
                    return Err("only numbers that are there leave a stage".into());
                }
            }
        }
        Ok(())
    }

    fn input(
        &mut self,
        stage: StageId,
        port: usize,
        end: End,
        microbatch: Id,
    ) -> Result<Value<K::Buf>, PassFailure> {
        match end {
            End::Data => self.data(stage, port, microbatch),
            _ => {
                let RankStage { chain, setup, .. } = &self.stages[&stage];
                let (port, place) = (&chain.inputs()[port], &setup.place);
                let len = shard_dims(&port.layout, place.coord()).iter().product();
                self.arrived(end, Direction::Forward, microbatch, len).map(Value::Real)
            }
        }
    }

    fn data(&self, stage: StageId, port: usize, microbatch: Id) -> Result<Value<K::Buf>, PassFailure> {
        let RankStage { chain, setup, .. } = &self.stages[&stage];
        let (port, own) = (&chain.inputs()[port], setup.own_samples());
        let first = self.first_sample + u64::from(microbatch.0) * self.job.samples as u64;
        let samples = first + own.start as u64..first + own.end as u64;
        let split = match self.mode {
            Mode::Train => Split::Training,
            Mode::Evaluate => Split::Validation,
        };
        Ok(match self.feed.read(&port.name, samples, split)? {
            Column::Ids(ids) => Value::Ids(ids),
            Column::Real(values) => {
                let values: Vec<K::Real> = values.into_iter().map(K::Real::from_f64).collect();
                Value::Real(self.kernels.upload(&values))
            }
        })
    }

    fn backward_input(&mut self, id: StageId, microbatch: Id) -> Result<(), PassFailure> {
        self.put_back(id, microbatch)?;
        let wiring = Arc::clone(&self.wiring);
        let RankStage { chain, setup, .. } = self.stages.get(&id).ok_or("no such stage here")?;
        let outputs = chain.outputs().iter().zip(&wiring.outputs[id.index()]);
        let activations = outputs.filter(|(port, _)| port.role == Role::Activation);
        let elements = |port: &Port| shard_dims(&port.layout, setup.place.coord()).iter().product();
        let wanted: Vec<(End, usize)> = activations.map(|(port, end)| (*end, elements(port))).collect();
        let mut grads = vec![];
        for (end, len) in wanted {
            grads.push(self.arrived(end, Direction::Backward, microbatch, len)?);
        }
        let stage = self.stages.get_mut(&id).ok_or("no such stage here")?;
        let grads = stage.chain.backward_input(MicrobatchId(microbatch.0), &mut stage.params, grads)?;
        let ends = wiring.inputs[id.index()].iter().filter(|end| **end != End::Data);
        for (end, grad) in ends.zip(grads) {
            self.hand_over(*end, Direction::Backward, microbatch, grad);
        }
        Ok(())
    }

    fn backward_weight(&mut self, id: StageId, microbatch: Id) -> Result<(), PassFailure> {
        let last = self.job.schedule.num_microbatches();
        let stage = self.stages.get_mut(&id).ok_or("no such stage here")?;
        stage.done += 1;
        let is_last = stage.done == last;
        let (update, failure) = (&mut self.update, None);
        let (buckets, grads) = (stage.chain.buckets().clone(), &mut stage.grads);
        let mut summing = Summing { id, is_last, update, grads, buckets, failure };
        stage.chain.backward_weight(MicrobatchId(microbatch.0), &mut summing)?;
        match summing.failure {
            Some(failure) => Err(failure),
            None if is_last => self.update.all_ready(id, &stage.grads),
            None => Ok(()),
        }
    }

    /// A shard that another stage made.
    fn arrived(
        &mut self,
        end: End,
        direction: Direction,
        microbatch: Id,
        len: usize,
    ) -> Result<K::Buf, PassFailure> {
        match end {
            End::Here { edge } => {
                let key = (edge, direction, microbatch);
                Ok(self.here.remove(&key).ok_or("a stage of this rank has not made its tensor yet")?)
            }
            End::Crossing { .. } if self.job.signal => {
                let some = |i: usize| K::Real::from_f64((i % 7) as f64 * 0.1 - 0.3);
                Ok(self.kernels.upload(&(0..len).map(some).collect::<Vec<_>>()))
            }
            End::Crossing { crossing, tensor } => {
                let mut shard = vec![K::Elem::default(); len];
                self.receive(Slot { crossing, direction, tensor, microbatch }, &mut shard);
                let mut buf = self.kernels.buffer(len);
                self.kernels.put_elems(&shard, (&mut buf).into());
                Ok(buf)
            }
            End::Data | End::Loss => Err("nobody makes data and losses".into()),
        }
    }

    /// What the pass under way makes.
    #[expect(unsafe_code, reason = "a pass writes beside the program that it is part of")]
    fn send<E: Element>(&self, slot: Slot, shard: &[E]) {
        // SAFETY: this runs in the pass that makes the slot's tensor, and all ops that read it wait for the pass.
        unsafe { self.buffers.write(slot, shard) }
    }

    /// What the pass under way needs.
    #[expect(unsafe_code, reason = "a pass reads beside the program that it is part of")]
    fn receive<E: Element>(&self, slot: Slot, shard: &mut [E]) {
        // SAFETY: this runs in a pass that waited for the slot's tensor, and whatever overwrites it waits for the pass.
        unsafe { self.buffers.read(slot, shard) }
    }

    fn hand_over(&mut self, end: End, direction: Direction, microbatch: Id, buf: K::Buf) {
        match end {
            End::Here { edge } => drop(self.here.insert((edge, direction, microbatch), buf)),
            End::Crossing { crossing, tensor } if self.job.signal => {
                self.send(Slot { crossing, direction, tensor, microbatch }, &[1u8]);
            }
            End::Crossing { crossing, tensor } => {
                let shard = self.kernels.elems((&buf).into(), buf.len());
                self.send(Slot { crossing, direction, tensor, microbatch }, &shard);
            }
            End::Data | End::Loss => {}
        }
    }
}
