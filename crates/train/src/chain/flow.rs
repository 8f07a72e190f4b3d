//! What flows between units: named tensors, what a unit takes and gives of them, and what some units in a row need from outside.

use std::collections::BTreeMap;
use std::ops::Range;

use crossmesh_core::dtype::DType;

use super::Model;
use crate::group::GroupError;
use crate::kernels::{Buffer, Kernels};
use crate::stage::{Port, Role, StageError, Value};
use crate::stage_rank::shard_dims;

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
pub struct Flow<B>(pub(super) BTreeMap<String, Value<B>>);

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
    pub fn add<K: Kernels<Buf = B>>(
        &mut self,
        kernels: &K,
        name: &str,
        gradient: Value<B>,
    ) -> Result<(), GroupError> {
        let sum = match self.take(name) {
            None => gradient,
            Some(sum) => match (sum.there(kernels)?, gradient) {
                (Value::Real(sum), Value::Coming(coming)) => Value::Coming(coming.plus(kernels, sum)),
                (Value::Real(mut sum), Value::Real(gradient)) => {
                    kernels.add((&gradient).into(), (&mut sum).into(), gradient.len());
                    Value::Real(sum)
                }
                (sum, gradient) => panic!("`{name}` has the gradients {sum:?} and {gradient:?}"),
            },
        };
        self.put(name, sum);
        Ok(())
    }

    /// Waits for what is coming.
    pub fn settle<K: Kernels<Buf = B>>(&mut self, kernels: &K) -> Result<(), GroupError> {
        for value in self.0.values_mut().filter(|value| matches!(value, Value::Coming(_))) {
            *value = std::mem::replace(value, Value::Loss(0.0)).there(kernels)?;
        }
        Ok(())
    }
}

/// Whether a value is what a port's layout says, on this rank.
pub(super) fn check<B: Buffer>(
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
        Value::Coming(_) => (false, "what is still coming".to_string()),
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
pub(super) fn ports<K: Kernels>(model: &dyn Model<K>, range: Range<usize>) -> (Vec<Tensor>, Vec<Tensor>) {
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
