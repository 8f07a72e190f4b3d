//! The seam: a pipeline stage as a runtime sees it.
//!
//! A runtime knows passes, buffers and layouts; a stage knows a model. Between them are these calls for every microbatch:
//!
//! ```text
//!              forward(mb, params, inputs)         -> outputs
//!              backward_input(mb, params, d outputs) -> d inputs          the pass B
//!              backward_weight(mb, grads += ..)                          the pass W, at any time after B
//!              evict(mb) -> bytes, load(mb, bytes)                       where memory is kept elsewhere between forward and B
//! ```
//!
//! Inputs and outputs are [`Port`]s: tensors with names and layouts over the stage's mesh. [`connect`] finds out which output feeds
//! which input, skip tensors across several stages included, so that a runtime can put a reshard plan on every edge without
//! knowing what flows there. The runtime owns parameters and gradients (flat buffers, of which [`Parameter`] says what lies
//! where; how much of them is there, [`Weights`] and [`Gradients`] know); the stage owns what it has to remember of a microbatch, and says beforehand how many bytes that will be.

use std::fmt;

use crossmesh_core::layout::Layout;

use crate::flat::{Buckets, Gradients, Weights};
use crate::group::{Coming, GroupError};
use crate::kernels::{Buffer, Kernels};
use crate::parameter::Parameter;
use crate::tier::TierError;

/// A microbatch's number within its step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MicrobatchId(pub u32);

impl fmt::Display for MicrobatchId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "microbatch {}", self.0)
    }
}

/// What a pass has to know about its microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Microbatch {
    pub id: MicrobatchId,
    /// The step, for random numbers.
    pub step: u64,
    /// The place in the step's batch of the microbatch's first sample (over all ranks along `dp`).
    pub first_sample: u64,
    /// Samples of the step's whole batch: losses and gradients are means over it, so that those of its microbatches add up.
    pub batch_samples: u64,
}

/// What flows through a port.
#[derive(Debug)]
pub enum Value<B> {
    /// A rank's shard, row-major.
    Real(B),
    /// Token ids, classes, time steps.
    Ids(Vec<i32>),
    /// This rank's summand of the loss.
    Loss(f64),
    /// A shard on its way from a collective, inside a pass.
    Coming(Coming<B>),
}

impl<B> From<B> for Value<B> {
    fn from(buf: B) -> Self {
        Value::Real(buf)
    }
}

impl<B: Buffer> Value<B> {
    /// Itself, when it is there.
    pub fn there<K: Kernels<Buf = B>>(self, kernels: &K) -> Result<Self, GroupError> {
        match self {
            Value::Coming(coming) => coming.wait(kernels).map(Value::Real),
            there => Ok(there),
        }
    }
}

/// What a port is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Comes from, or goes to, another stage; its gradient goes the other way.
    Activation,
    /// Comes from the data set.
    Data,
    /// The summand of the loss that leaves the last stage.
    Loss,
}

/// A tensor that enters or leaves a stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    pub name: String,
    /// Of a whole microbatch, over the stage's mesh.
    pub layout: Layout,
    pub role: Role,
}

/// How a stage trades memory for time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Recompute {
    /// Remembers everything.
    #[default]
    Nothing,
    /// Remembers all but the insides of attention, which B computes again.
    Attention,
    /// Remembers the stage's inputs; B runs the forward pass again.
    Everything,
    /// Remembers so many bytes of a microbatch at most, computing as little again as that allows, and sends nothing twice.
    Within(u64),
}

/// Bytes a stage holds for one microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ActivationBytes {
    /// From forward to B.
    pub after_forward: u64,
    /// From B to W.
    pub after_backward_input: u64,
}

impl ActivationBytes {
    /// Of two strands.
    pub fn twice(self) -> Self {
        Self { after_forward: 2 * self.after_forward, after_backward_input: 2 * self.after_backward_input }
    }
}

/// What a stage holds now, and the most it held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Live {
    /// Microbatches that went forward and did not finish W.
    pub microbatches: usize,
    pub bytes: u64,
    /// The most microbatches that waited for their B at once.
    pub peak_microbatches: usize,
    pub peak_bytes: u64,
}

/// A pipeline stage on one rank.
pub trait Stage: Send {
    type Buf: Buffer;

    /// What [`Stage::forward`] takes, in order.
    fn inputs(&self) -> &[Port];
    /// What it gives, in order.
    fn outputs(&self) -> &[Port];
    /// What lies where in the flat buffers of parameters and gradients, in ascending order.
    fn parameters(&self) -> &[Parameter];
    /// Which of them each unit uses.
    fn buckets(&self) -> &Buckets;

    /// Runs a microbatch forward, and remembers it.
    fn forward(
        &mut self,
        microbatch: Microbatch,
        weights: &mut dyn Weights<Self::Buf>,
        inputs: Vec<Value<Self::Buf>>,
    ) -> Result<Vec<Value<Self::Buf>>, StageError>;

    /// Runs a microbatch forward without dropout, and remembers nothing.
    fn evaluate(
        &mut self,
        microbatch: Microbatch,
        weights: &mut dyn Weights<Self::Buf>,
        inputs: Vec<Value<Self::Buf>>,
    ) -> Result<Vec<Value<Self::Buf>>, StageError>;

    /// B: from the gradients of the outputs that are activations, in order, those of the inputs that are.
    fn backward_input(
        &mut self,
        id: MicrobatchId,
        weights: &mut dyn Weights<Self::Buf>,
        grads: Vec<Self::Buf>,
    ) -> Result<Vec<Self::Buf>, StageError>;

    /// W: adds a microbatch's gradients of the weights to `grads`, then forgets it. Closes every unit's as soon as nothing more is added to
    /// them, so that they can be sent while the rest is computed.
    fn backward_weight(
        &mut self,
        id: MicrobatchId,
        grads: &mut dyn Gradients<Self::Buf>,
    ) -> Result<(), StageError>;

    /// Evict: puts what it remembers of a microbatch into bytes, [`ActivationBytes::after_forward`] of them, and forgets all but that they
    /// are elsewhere.
    fn evict(&mut self, id: MicrobatchId) -> Result<Vec<u8>, StageError>;

    /// Remembers a microbatch again, from the same bytes. More may follow behind them.
    fn load(&mut self, id: MicrobatchId, bytes: &[u8]) -> Result<(), StageError>;

    /// Forgets a microbatch, whatever passes it has still to make.
    fn forget(&mut self, id: MicrobatchId);

    /// Bytes for one microbatch, known before there is one.
    fn activation_bytes(&self) -> ActivationBytes;
    fn live(&self) -> Live;
}

/// A pass that could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StageError {
    #[error("{id} has not been {wanted}, so there is nothing to {pass}")]
    NotThere { id: MicrobatchId, wanted: &'static str, pass: &'static str },
    #[error("{given} bytes do not hold what was evicted of {id}")]
    Evicted { id: MicrobatchId, given: usize },
    #[error("{id} was passed forward twice")]
    Twice { id: MicrobatchId },
    #[error("{given} {what} for {wanted} ports")]
    Count { what: &'static str, given: usize, wanted: usize },
    #[error("`{port}` has {given} where {layout} has {wanted} on this rank")]
    Value { port: String, layout: Box<Layout>, given: String, wanted: String },
    #[error("`{port}` has the id {id}, but ids go from 0 to {last}")]
    Id { port: String, id: i32, last: usize },
    #[error(transparent)]
    Group(#[from] GroupError),
    #[error(transparent)]
    Tier(#[from] TierError),
    #[error("strands need all weights of a stage at once, and here they come unit by unit")]
    Strands,
}

/// An output that feeds an input: ports by their place in `outputs()` and `inputs()`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Edge {
    pub name: String,
    pub from_stage: usize,
    pub output: usize,
    pub to_stage: usize,
    pub input: usize,
}

/// Ports that do not fit together.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("stage {stage} needs `{name}`, which no stage before it gives")]
    NoSource { stage: usize, name: String },
    #[error("stage {stage} gives `{name}`, which no stage after it takes")]
    NoTarget { stage: usize, name: String },
    #[error("`{name}` leaves stage {from_stage} as {from} and enters stage {to_stage} as {to}")]
    Shape { name: String, from_stage: usize, from: Box<Layout>, to_stage: usize, to: Box<Layout> },
}

/// Joins stages, in model order: an input takes what the nearest stage before it gives under its name. Every activation has
/// one source and one target.
pub fn connect(stages: &[(&[Port], &[Port])]) -> Result<Vec<Edge>, ConnectError> {
    let mut edges: Vec<Edge> = Vec::new();
    for (to_stage, (inputs, _)) in stages.iter().enumerate() {
        for (input, port) in inputs.iter().enumerate().filter(|(_, p)| p.role == Role::Activation) {
            let named = |(i, (_, outputs)): (usize, &(&[Port], &[Port]))| {
                Some((i, outputs.iter().position(|o| o.name == port.name)?))
            };
            let source = stages[..to_stage].iter().enumerate().rev().find_map(named);
            let name = port.name.clone();
            let Some((from_stage, output)) = source else {
                return Err(ConnectError::NoSource { stage: to_stage, name });
            };
            let from = &stages[from_stage].1[output];
            if (from.layout.shape(), from.layout.dtype()) != (port.layout.shape(), port.layout.dtype()) {
                let (from, to) = (Box::new(from.layout.clone()), Box::new(port.layout.clone()));
                return Err(ConnectError::Shape { name, from_stage, from, to_stage, to });
            }
            edges.push(Edge { name, from_stage, output, to_stage, input });
        }
    }
    for (stage, (_, outputs)) in stages.iter().enumerate() {
        for (output, port) in outputs.iter().enumerate().filter(|(_, p)| p.role == Role::Activation) {
            let targets = edges.iter().filter(|e| (e.from_stage, e.output) == (stage, output)).count();
            if targets != 1 {
                return Err(ConnectError::NoTarget { stage, name: port.name.clone() });
            }
        }
    }
    Ok(edges)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ports(names: &[&str]) -> Vec<Port> {
        let layout: Layout = "f32[4,2]@A{dp:2}(dp,_)".parse().unwrap();
        let port =
            |name: &&str| Port { name: name.to_string(), layout: layout.clone(), role: Role::Activation };
        names.iter().map(port).collect()
    }

    fn joined(stages: &[(Vec<Port>, Vec<Port>)]) -> Result<Vec<Edge>, ConnectError> {
        let borrowed: Vec<_> = stages.iter().map(|(i, o)| (&i[..], &o[..])).collect();
        connect(&borrowed)
    }

    #[test]
    fn the_nearest_source_feeds_an_input() {
        let stages = [
            (ports(&[]), ports(&["h", "skip"])),
            (ports(&["h"]), ports(&["h"])),
            (ports(&["h", "skip"]), ports(&[])),
        ];
        let edges: Vec<_> = joined(&stages)
            .unwrap()
            .into_iter()
            .map(|e| (e.name, e.from_stage, e.output, e.to_stage, e.input))
            .collect();
        let wanted = [("h", 0, 0, 1, 0), ("h", 1, 0, 2, 0), ("skip", 0, 1, 2, 1)];
        assert_eq!(edges, wanted.map(|(n, a, b, c, d)| (n.to_string(), a, b, c, d)));
    }

    #[test]
    fn loose_ends_are_named() {
        let error = joined(&[(ports(&[]), ports(&[])), (ports(&["h"]), ports(&[]))]).unwrap_err();
        assert_eq!(error.to_string(), "stage 1 needs `h`, which no stage before it gives");
        let error = joined(&[(ports(&[]), ports(&["h"])), (ports(&[]), ports(&[]))]).unwrap_err();
        assert_eq!(error.to_string(), "stage 0 gives `h`, which no stage after it takes");
        let mut other = ports(&["h"]);
        other[0].layout = "f32[4,3]@B{dp:2}(dp,_)".parse().unwrap();
        let error = joined(&[(vec![], ports(&["h"])), (other, vec![])]).unwrap_err();
        assert!(error.to_string().contains("leaves stage 0 as f32[4,2]@A{dp:2}(dp,_)"), "{error}");
    }
}
