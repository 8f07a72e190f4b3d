//! A stage made of units, one behind the other.
//!
//! A model is a list of [`Unit`]s (a transformer block, say) through which named tensors flow. A [`Chain`] is some of them in a row, and is a
//! [`Stage`]: it takes from outside what its units need and do not make themselves, hands over what later units will need,
//! keeps what every unit has to remember of a microbatch, and runs units again where it was told to remember less.
//!
//! ```text
//!   stage 0                    stage 1
//!   embed -> block -> block => block -> block -> head
//!                       h ------> h              loss
//! ```

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crossmesh_core::dtype::DType;
use crossmesh_core::layout::Layout;
use crossmesh_core::mesh::Mesh;

use crate::flat::{Buckets, Flat, Gradients, Weights};
use crate::graph::budget::within;
use crate::graph::{Ctx, Elements, Frame, Item, Mode, Remembered, Team, TeamAxis, Unit};
use crate::group::Group;
use crate::kernels::scalar::Scalar;
use crate::kernels::{Buffer, Kernels};
use crate::models::ConfigError;
use crate::parameter::{Parameter, Parameters};
use crate::stage::{
    ActivationBytes, Live, Microbatch, MicrobatchId, Port, Recompute, Role, Stage, StageError, Value,
};
use crate::stage_rank::{StageRank, shard_dims};

/// The shape of a tensor of a microbatch, but for the number of samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Shape {
    /// `[samples * rows, cols]`: may be split along the sequence.
    Rows { rows: usize, cols: usize },
    /// `[samples, dims..]`.
    Samples(Vec<usize>),
    /// Integers below `classes`, `[samples, dims..]`.
    Ids { dims: Vec<usize>, classes: usize },
    /// The loss.
    Number,
}

/// A tensor that units pass on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    pub name: String,
    pub shape: Shape,
    pub role: Role,
}

/// What a unit needs and makes.
#[derive(Debug, Clone, Default)]
pub struct Interface {
    /// Used up.
    pub takes: Vec<Tensor>,
    /// Looked at; units behind may look too.
    pub reads: Vec<Tensor>,
    pub gives: Vec<Tensor>,
}

/// The named tensors between two units, or their gradients.
#[derive(Debug)]
pub struct Flow<B>(BTreeMap<String, Value<B>>);

impl<B> Default for Flow<B> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<B: Buffer> Flow<B> {
    pub fn put(&mut self, name: &str, value: Value<B>) {
        let old = self.0.insert(name.to_string(), value);
        assert!(old.is_none(), "`{name}` flows twice");
    }

    pub fn put_real(&mut self, name: &str, buf: B) {
        self.put(name, Value::Real(buf));
    }

    pub fn take(&mut self, name: &str) -> Option<Value<B>> {
        self.0.remove(name)
    }

    pub fn take_real(&mut self, name: &str) -> B {
        match self.0.remove(name) {
            Some(Value::Real(buf)) => buf,
            other => panic!("`{name}` should flow here, found {other:?}"),
        }
    }

    pub fn real(&self, name: &str) -> &B {
        match self.0.get(name) {
            Some(Value::Real(buf)) => buf,
            other => panic!("`{name}` should flow here, found {other:?}"),
        }
    }

    pub fn ids(&self, name: &str) -> &[i32] {
        match self.0.get(name) {
            Some(Value::Ids(ids)) => ids,
            other => panic!("`{name}` should flow here, found {other:?}"),
        }
    }

    /// Adds to a gradient, which may be the first of its name.
    pub fn add_real<K: Kernels<Buf = B>>(&mut self, kernels: &K, name: &str, grad: B) {
        match self.0.get_mut(name) {
            Some(Value::Real(sum)) => kernels.add(&grad, sum.into()),
            _ => self.put_real(name, grad),
        }
    }
}

/// A model: units in order.
pub trait Model<K: Kernels> {
    fn num_units(&self) -> usize;
    /// The mesh of a stage, with the axes by which the model's layers share out their weights.
    fn mesh(&self, mesh: &Mesh) -> Mesh {
        mesh.clone()
    }
    /// Whether the model can be set up so.
    fn check(&self, _setup: &Setup) -> Result<(), ConfigError> {
        Ok(())
    }
    /// What a unit needs and makes; known without making it.
    fn interface(&self, unit: usize) -> Interface;
    /// Makes a unit, declaring its weights.
    fn unit(&self, unit: usize, setup: &Setup, parameters: &mut Parameters<'_>) -> Unit<K>;
}

/// How a stage is set up on a rank.
#[derive(Debug, Clone)]
pub struct Setup {
    pub place: StageRank,
    /// Samples of a microbatch, over all ranks along `dp`.
    pub samples: usize,
    /// Whether the rows between tensor-parallel regions are split over `tp`.
    pub sequence_parallel: bool,
    pub recompute: Recompute,
    /// Of random numbers during training.
    pub seed: u64,
}

impl Setup {
    /// A stage on one rank that remembers everything.
    pub fn alone(samples: usize, seed: u64) -> Self {
        let (place, recompute) = (StageRank::alone(), Recompute::Nothing);
        Self { place, samples, sequence_parallel: false, recompute, seed }
    }

    /// This rank's samples of a microbatch.
    pub fn own_samples(&self) -> Range<usize> {
        self.place.dp().part(self.samples)
    }

    /// The ranks that compute a pass together: those along `tp`.
    pub fn team(&self) -> Team {
        Team { axes: vec![TeamAxis { name: "tp".into(), along: self.place.tp() }] }
    }

    fn layout(&self, tensor: &Tensor, real: DType) -> Layout {
        let place = &self.place;
        match &tensor.shape {
            Shape::Rows { rows, cols } => {
                place.row_layout(real, self.samples, *rows, *cols, self.sequence_parallel)
            }
            Shape::Samples(dims) => place.sample_layout(real, self.samples, dims),
            Shape::Ids { dims, .. } => place.sample_layout(DType::I32, self.samples, dims),
            Shape::Number => place.loss_layout(),
        }
    }
}

/// What a stage will be, before it has anything to run on.
#[derive(Debug, Clone)]
pub struct Outline {
    pub inputs: Vec<Port>,
    pub outputs: Vec<Port>,
    pub parameters: Vec<Parameter>,
    pub buckets: Buckets,
    pub activations: ActivationBytes,
    /// Operations of a microbatch that B and W spend on values that F had made.
    pub again: f64,
}

impl Outline {
    /// The units `range` of a model, as the rank at the setup's place holds them.
    pub fn new<K: Kernels>(
        model: &dyn Model<K>,
        range: Range<usize>,
        setup: &Setup,
    ) -> Result<Self, ConfigError> {
        let parts = Parts::new(model, range, setup)?;
        let activations = parts.activation_bytes(setup);
        let again = parts.units.iter().map(Unit::again).sum();
        let Parts { inputs, outputs, parameters, buckets, .. } = parts;
        Ok(Self { inputs, outputs, parameters, buckets, activations, again })
    }

    /// Elements of the flat buffers.
    pub fn num_elements(&self) -> usize {
        self.parameters.last().map_or(0, |p| p.range.end)
    }
}

/// The parameters of a whole model, as one rank would hold them; tied ones once.
pub fn parameters<K: Kernels>(model: &dyn Model<K>) -> Vec<Parameter> {
    let setup = Setup::alone(1, 0);
    let mut parameters = Parameters::new::<K::Real>(&setup.place);
    for unit in 0..model.num_units() {
        let _ = model.unit(unit, &setup, &mut parameters);
    }
    parameters.into_list()
}

/// The units of a stage, and what follows from them.
struct Parts<K: Kernels> {
    units: Vec<Unit<K>>,
    buckets: Buckets,
    parameters: Vec<Parameter>,
    inputs: Vec<Port>,
    outputs: Vec<Port>,
    /// How many classes an input of ids has.
    classes: Vec<Option<usize>>,
}

impl<K: Kernels> Parts<K> {
    fn new(model: &dyn Model<K>, range: Range<usize>, setup: &Setup) -> Result<Self, ConfigError> {
        model.check(setup)?;
        assert!(range.end <= model.num_units(), "{range:?} of {} units", model.num_units());
        let mut parameters = Parameters::new::<K::Real>(&setup.place);
        let (mut buckets, mut units) = (Buckets::default(), Vec::new());
        for unit in range.clone() {
            buckets.starts.push(parameters.end());
            units.push(model.unit(unit, setup, &mut parameters));
            let start = buckets.starts[units.len() - 1];
            buckets.borrowed.push(parameters.take_borrowed(start));
        }
        buckets.starts.push(parameters.end());
        if let Recompute::Within(limit) = setup.recompute {
            let width = K::Real::DTYPE.bytes();
            let choices: Vec<Vec<(u64, f64)>> = units
                .iter()
                .map(|unit| unit.choices().iter().map(|(held, again)| (held.bytes(width), *again)).collect())
                .collect();
            let picks = within(&choices, limit);
            units.iter_mut().zip(picks).for_each(|(unit, choice)| unit.choose(choice));
        }
        let (inputs, outputs) = ports(model, range);
        let port =
            |t: &Tensor| Port { name: t.name.clone(), layout: setup.layout(t, K::Real::DTYPE), role: t.role };
        let classes = inputs.iter().map(|t| match &t.shape {
            Shape::Ids { classes, .. } => Some(*classes),
            _ => None,
        });
        Ok(Self {
            units,
            buckets,
            parameters: parameters.into_list(),
            classes: classes.collect(),
            inputs: inputs.iter().map(port).collect(),
            outputs: outputs.iter().map(port).collect(),
        })
    }

    fn activation_bytes(&self, setup: &Setup) -> ActivationBytes {
        let remembered: Remembered = self.units.iter().map(Unit::remembered).sum();
        let coord = setup.place.coord();
        let input = |port: &Port| {
            let len = shard_dims(&port.layout, coord).iter().product();
            match port.layout.dtype() {
                DType::I32 => Elements { real: 0, ids: len },
                _ => Elements::real(len),
            }
        };
        let forward = match setup.recompute {
            Recompute::Everything => self.inputs.iter().map(input).sum(),
            _ => remembered.after_forward,
        };
        let bytes = K::Real::DTYPE.bytes();
        ActivationBytes {
            after_forward: forward.bytes(bytes),
            after_backward_input: remembered.after_backward_input.bytes(bytes),
        }
    }
}

/// A stage of units.
pub struct Chain<K: Kernels> {
    kernels: Arc<K>,
    /// The ranks along every axis of [`Setup::team`].
    groups: Vec<Arc<dyn Group<K::Buf>>>,
    setup: Setup,
    parts: Parts<K>,
    held: BTreeMap<MicrobatchId, Held<K::Buf>>,
    live: Live,
}

/// What a chain remembers of a microbatch.
struct Held<B> {
    microbatch: Microbatch,
    memory: Memory<B>,
    /// While it is elsewhere: how long everything in it was. Nothing is left here but its names.
    away: Option<Vec<usize>>,
}

enum Memory<B> {
    /// The inputs: the rest is computed again.
    Inputs(Flow<B>),
    /// For B: what each unit saved.
    Forward(Vec<Frame<B>>),
    /// For W.
    Backward(Vec<Frame<B>>),
}

impl<K: Kernels> Chain<K> {
    /// The units `range` of a model, on one rank.
    pub fn new(
        model: &dyn Model<K>,
        range: Range<usize>,
        kernels: Arc<K>,
        tp: Arc<dyn Group<K::Buf>>,
        setup: Setup,
    ) -> Result<Self, ConfigError> {
        assert_eq!(tp.size(), setup.place.tp().size, "ranks along tp");
        let parts = Parts::new(model, range, &setup)?;
        Ok(Self { kernels, groups: vec![tp], parts, setup, held: BTreeMap::new(), live: Live::default() })
    }

    fn ctx<'a>(&'a self, microbatch: Microbatch, params: Option<Flat<'a, K::Buf>>, mode: Mode) -> Ctx<'a, K> {
        let first_sample = microbatch.first_sample + self.setup.own_samples().start as u64;
        Ctx {
            kernels: &self.kernels,
            groups: &self.groups,
            params,
            microbatch,
            first_sample,
            seed: self.setup.seed,
            mode,
            cache: None,
        }
    }

    /// Inputs by name, checked against their ports.
    fn flow(&self, inputs: Vec<Value<K::Buf>>) -> Result<Flow<K::Buf>, StageError> {
        if inputs.len() != self.parts.inputs.len() {
            let (given, wanted) = (inputs.len(), self.parts.inputs.len());
            return Err(StageError::Count { what: "inputs", given, wanted });
        }
        let mut flow = Flow::default();
        for ((port, classes), value) in self.parts.inputs.iter().zip(&self.parts.classes).zip(inputs) {
            check(port, *classes, &value, self.setup.place.coord())?;
            flow.put(&port.name, value);
        }
        Ok(flow)
    }

    fn run(
        &self,
        microbatch: Microbatch,
        weights: &mut dyn Weights<K::Buf>,
        mode: Mode,
        flow: &mut Flow<K::Buf>,
    ) -> Result<Vec<Frame<K::Buf>>, StageError> {
        let units = &self.parts.units;
        let mut saved = Vec::with_capacity(units.len());
        for (i, unit) in units.iter().enumerate() {
            let params = weights.fetch(i, (i + 1 < units.len()).then_some(i + 1))?;
            let frame = unit.forward(&self.ctx(microbatch, Some(params), mode), flow)?;
            if mode == Mode::Train {
                saved.push(frame);
            }
        }
        weights.done();
        Ok(saved)
    }

    fn outputs_of(&self, flow: &mut Flow<K::Buf>) -> Vec<Value<K::Buf>> {
        let take =
            |port: &Port| flow.take(&port.name).unwrap_or_else(|| panic!("no unit gives `{}`", port.name));
        self.parts.outputs.iter().map(take).collect()
    }

    /// A second set of inputs, to start from again.
    fn copy(&self, flow: &Flow<K::Buf>) -> Flow<K::Buf> {
        let copy = |value: &Value<K::Buf>| match value {
            Value::Real(buf) => {
                let mut second = self.kernels.buffer(buf.len());
                self.kernels.copy(buf.into(), (&mut second).into(), buf.len());
                Value::Real(second)
            }
            Value::Ids(ids) => Value::Ids(ids.clone()),
            Value::Loss(loss) => Value::Loss(*loss),
        };
        Flow(flow.0.iter().map(|(name, value)| (name.clone(), copy(value))).collect())
    }

    fn hold(&mut self, id: MicrobatchId, held: Held<K::Buf>) {
        self.held.insert(id, held);
        self.look();
    }

    /// Counts what is held now.
    fn look(&mut self) {
        let bytes = K::Real::DTYPE.bytes();
        let here = self.held.values().filter(|h| h.away.is_none());
        let waiting = here.filter(|h| !matches!(h.memory, Memory::Backward(_))).count();
        let live = &mut self.live;
        live.microbatches = self.held.len();
        live.bytes = self.held.values().map(|h| h.memory.elements().bytes(bytes)).sum();
        live.peak_microbatches = live.peak_microbatches.max(waiting);
        live.peak_bytes = live.peak_bytes.max(live.bytes);
    }

    /// Takes what a microbatch left for a pass, or says what is missing.
    fn held_for(&mut self, id: MicrobatchId, pass: &'static str) -> Result<Held<K::Buf>, StageError> {
        let held = self.held.remove(&id);
        let wanted = match (&held, pass) {
            (Some(held), "LOAD") if held.away.is_none() => "evicted",
            (Some(held), "B" | "W" | "EVICT") if held.away.is_some() => "loaded",
            (_, "W") => "through B",
            _ => "forward",
        };
        let ready = |held: &Held<K::Buf>| {
            let made_b = matches!(held.memory, Memory::Backward(_));
            made_b == (pass == "W") && held.away.is_some() == (pass == "LOAD")
        };
        match held {
            Some(held) if ready(&held) => Ok(held),
            Some(held) => {
                self.held.insert(id, held);
                Err(StageError::NotThere { id, wanted, pass })
            }
            None => Err(StageError::NotThere { id, wanted, pass }),
        }
    }

    /// Moves what is remembered into bytes; and how long everything in it was.
    fn pack(&self, memory: &mut Memory<K::Buf>) -> (Vec<u8>, Vec<usize>) {
        let (mut bytes, mut lens) = (vec![], vec![]);
        memory.each_mut(&mut |item| match item {
            Item::Real(buf) => {
                lens.push(buf.len());
                bytes.extend_from_slice(bytemuck::cast_slice(&self.kernels.download(buf)));
                *buf = self.kernels.buffer(0);
            }
            Item::Ids(ids) => {
                lens.push(ids.len());
                bytes.extend_from_slice(bytemuck::cast_slice(&std::mem::take(ids)));
            }
        });
        (bytes, lens)
    }

    /// Puts everything back into a memory from which it was moved.
    fn unpack(&self, memory: &mut Memory<K::Buf>, mut bytes: &[u8], lens: &[usize]) {
        let mut lens = lens.iter().copied();
        let mut take = |element: usize| {
            let (head, rest) = bytes.split_at(lens.next().expect("a length for every item") * element);
            bytes = rest;
            head
        };
        memory.each_mut(&mut |item| match item {
            Item::Real(buf) => {
                *buf = self.kernels.upload(&values::<K::Real>(take(size_of::<K::Real>())));
            }
            Item::Ids(ids) => *ids = values(take(size_of::<i32>())),
        });
    }
}

impl<K: Kernels> Stage for Chain<K> {
    type Buf = K::Buf;

    fn inputs(&self) -> &[Port] {
        &self.parts.inputs
    }

    fn outputs(&self) -> &[Port] {
        &self.parts.outputs
    }

    fn parameters(&self) -> &[Parameter] {
        &self.parts.parameters
    }

    fn buckets(&self) -> &Buckets {
        &self.parts.buckets
    }

    fn forward(
        &mut self,
        microbatch: Microbatch,
        weights: &mut dyn Weights<K::Buf>,
        inputs: Vec<Value<K::Buf>>,
    ) -> Result<Vec<Value<K::Buf>>, StageError> {
        if self.held.contains_key(&microbatch.id) {
            return Err(StageError::Twice { id: microbatch.id });
        }
        let mut flow = self.flow(inputs)?;
        let again = self.setup.recompute == Recompute::Everything;
        let kept = again.then(|| self.copy(&flow));
        let saved = self.run(microbatch, weights, Mode::Train, &mut flow)?;
        let memory = kept.map_or(Memory::Forward(saved), Memory::Inputs);
        let outputs = self.outputs_of(&mut flow);
        self.hold(microbatch.id, Held { microbatch, memory, away: None });
        Ok(outputs)
    }

    fn evaluate(
        &mut self,
        microbatch: Microbatch,
        weights: &mut dyn Weights<K::Buf>,
        inputs: Vec<Value<K::Buf>>,
    ) -> Result<Vec<Value<K::Buf>>, StageError> {
        let mut flow = self.flow(inputs)?;
        self.run(microbatch, weights, Mode::Evaluate, &mut flow)?;
        Ok(self.outputs_of(&mut flow))
    }

    fn backward_input(
        &mut self,
        id: MicrobatchId,
        weights: &mut dyn Weights<K::Buf>,
        grads: Vec<K::Buf>,
    ) -> Result<Vec<K::Buf>, StageError> {
        let Held { microbatch, memory, .. } = self.held_for(id, "B")?;
        let mut saved = match memory {
            Memory::Inputs(mut flow) => self.run(microbatch, weights, Mode::Train, &mut flow)?,
            Memory::Forward(saved) | Memory::Backward(saved) => saved,
        };
        let mut flow = self.grads_flow(grads)?;
        for (i, (unit, saved)) in self.parts.units.iter().zip(&mut saved).enumerate().rev() {
            let params = weights.fetch(i, i.checked_sub(1))?;
            unit.backward_input(&self.ctx(microbatch, Some(params), Mode::Train), &mut flow, saved)?;
        }
        weights.done();
        let activations = self.parts.inputs.iter().filter(|p| p.role == Role::Activation);
        let grads = activations.map(|p| flow.take_real(&p.name)).collect();
        self.hold(id, Held { microbatch, memory: Memory::Backward(saved), away: None });
        Ok(grads)
    }

    fn backward_weight(
        &mut self,
        id: MicrobatchId,
        grads: &mut dyn Gradients<K::Buf>,
    ) -> Result<(), StageError> {
        let Held { microbatch, memory, .. } = self.held_for(id, "W")?;
        let Memory::Backward(mut saved) = memory else { unreachable!("held_for checked it") };
        let ctx = self.ctx(microbatch, None, Mode::Train);
        for (i, unit) in self.parts.units.iter().enumerate().rev() {
            unit.backward_weight(&ctx, &mut saved[i], &mut grads.open(i))?;
            // A tied weight belongs to the first unit that uses it, and that one comes last.
            grads.close(i)?;
        }
        self.look();
        Ok(())
    }

    fn evict(&mut self, id: MicrobatchId) -> Result<Vec<u8>, StageError> {
        let Held { microbatch, mut memory, .. } = self.held_for(id, "EVICT")?;
        let (bytes, lens) = self.pack(&mut memory);
        self.hold(id, Held { microbatch, memory, away: Some(lens) });
        Ok(bytes)
    }

    fn load(&mut self, id: MicrobatchId, bytes: &[u8]) -> Result<(), StageError> {
        let mut held = self.held_for(id, "LOAD")?;
        let wanted = self.activation_bytes().after_forward as usize;
        if bytes.len() < wanted {
            self.hold(id, held);
            return Err(StageError::Evicted { id, given: bytes.len() });
        }
        let lens = held.away.take().unwrap_or_default();
        self.unpack(&mut held.memory, bytes, &lens);
        self.hold(id, held);
        Ok(())
    }

    fn forget(&mut self, id: MicrobatchId) {
        self.held.remove(&id);
        self.look();
    }

    fn activation_bytes(&self) -> ActivationBytes {
        self.parts.activation_bytes(&self.setup)
    }

    fn live(&self) -> Live {
        self.live
    }
}

impl<K: Kernels> Chain<K> {
    /// Gradients of the outputs by name, checked against their ports.
    fn grads_flow(&self, grads: Vec<K::Buf>) -> Result<Flow<K::Buf>, StageError> {
        let ports: Vec<&Port> = self.parts.outputs.iter().filter(|p| p.role == Role::Activation).collect();
        if grads.len() != ports.len() {
            let (given, wanted) = (grads.len(), ports.len());
            return Err(StageError::Count { what: "gradients", given, wanted });
        }
        let mut flow = Flow::default();
        for (port, grad) in ports.into_iter().zip(grads) {
            let value = Value::Real(grad);
            check(port, None, &value, self.setup.place.coord())?;
            flow.put(&port.name, value);
        }
        Ok(flow)
    }
}

impl<B: Buffer> Memory<B> {
    /// Calls `f` with everything in it, always in the same order.
    fn each_mut(&mut self, f: &mut dyn FnMut(Item<'_, B>)) {
        match self {
            Memory::Inputs(flow) => flow.0.values_mut().for_each(|value| match value {
                Value::Real(buf) => f(Item::Real(buf)),
                Value::Ids(ids) => f(Item::Ids(ids)),
                Value::Loss(_) => {}
            }),
            Memory::Forward(saved) | Memory::Backward(saved) => saved.iter_mut().for_each(|s| s.each_mut(f)),
        }
    }

    fn elements(&self) -> Elements {
        match self {
            Memory::Inputs(flow) => flow.0.values().map(Elements::of).sum(),
            Memory::Forward(saved) | Memory::Backward(saved) => saved.iter().map(Frame::elements).sum(),
        }
    }
}

/// Numbers from their bytes, which may lie anywhere.
fn values<P: bytemuck::Pod + Default>(bytes: &[u8]) -> Vec<P> {
    let mut values = vec![P::default(); bytes.len() / size_of::<P>()];
    bytemuck::cast_slice_mut(&mut values).copy_from_slice(bytes);
    values
}

/// Whether a value is what a port's layout says, on this rank.
fn check<B: Buffer>(
    port: &Port,
    classes: Option<usize>,
    value: &Value<B>,
    coord: &[u32],
) -> Result<(), StageError> {
    let wanted: usize = shard_dims(&port.layout, coord).iter().product();
    let ids = port.layout.dtype() == DType::I32;
    let (fits, given) = match value {
        Value::Real(buf) => (!ids && buf.len() == wanted, format!("{} numbers", buf.len())),
        Value::Ids(values) => (ids && values.len() == wanted, format!("{} ids", values.len())),
        Value::Loss(_) => (false, "a loss".to_string()),
    };
    if !fits {
        let wanted = format!("{wanted} {}", if ids { "ids" } else { "numbers" });
        let (port, layout) = (port.name.clone(), Box::new(port.layout.clone()));
        return Err(StageError::Value { port, layout, given, wanted });
    }
    if let (Value::Ids(values), Some(classes)) = (value, classes) {
        let outside = |id: &&i32| usize::try_from(**id).map_or(true, |id| id >= classes);
        if let Some(&id) = values.iter().find(outside) {
            return Err(StageError::Id { port: port.name.clone(), id, last: classes.saturating_sub(1) });
        }
    }
    Ok(())
}

/// What some units of a model need from outside, and what units behind them need of theirs.
fn ports<K: Kernels>(model: &dyn Model<K>, range: Range<usize>) -> (Vec<Tensor>, Vec<Tensor>) {
    let mut inputs: Vec<Tensor> = Vec::new();
    // What is there to be handed over, in the order in which it came to be.
    let mut there: Vec<Tensor> = Vec::new();
    for interface in range.clone().map(|unit| model.interface(unit)) {
        for tensor in interface.takes.iter().chain(&interface.reads) {
            if !there.iter().any(|t| t.name == tensor.name) {
                inputs.push(tensor.clone());
                there.push(tensor.clone());
            }
        }
        there.retain(|t| !interface.takes.iter().any(|taken| taken.name == t.name));
        there.extend(interface.gives);
    }
    let leaves = |tensor: &Tensor| match tensor.role {
        Role::Data => false,
        Role::Loss => true,
        Role::Activation => needed_behind(model, range.end, &tensor.name),
    };
    (inputs, there.into_iter().filter(leaves).collect())
}

/// Whether a unit from `first` on needs what flows under this name there.
fn needed_behind<K: Kernels>(model: &dyn Model<K>, first: usize, name: &str) -> bool {
    for interface in (first..model.num_units()).map(|unit| model.interface(unit)) {
        let named = |tensors: &[Tensor]| tensors.iter().any(|t| t.name == name);
        if named(&interface.takes) || named(&interface.reads) {
            return true;
        }
        if named(&interface.gives) {
            return false;
        }
    }
    false
}
