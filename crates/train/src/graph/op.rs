//! What an op is: a step of a model that knows its forward pass and its gradients, and what they read.

use std::cell::RefCell;
use std::sync::Arc;

use crossmesh_core::step::lists::CallKind;

use crate::flat::{Flat, FlatMut};
use crate::group::Group;
use crate::kernels::random::Stream;
use crate::kernels::{BufSlice, Buffer, Dropout, Kernels};
use crate::stage::{Microbatch, StageError, Value};

use super::{Axis, Elements};

/// Whether a pass learns or only looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Train,
    Evaluate,
}

/// Everything around a pass.
pub struct Ctx<'a, K: Kernels> {
    pub kernels: &'a K,
    /// The ranks along every axis.
    pub groups: &'a [Arc<dyn Group<K::Buf>>],
    /// The parameters; W computes nothing again that needs them.
    pub params: Option<Flat<'a, K::Buf>>,
    pub microbatch: Microbatch,
    /// The place in the step's batch of this rank's first sample.
    pub first_sample: u64,
    pub seed: u64,
    pub mode: Mode,
    /// Where a sample is read a piece at a time: what its earlier rows left behind.
    pub cache: Option<&'a RefCell<Cache<K::Buf>>>,
}

/// Keys and values of the rows of a sample that were read before.
#[derive(Debug)]
pub struct Cache<B> {
    /// Of every layer that attends, with room for a whole context.
    pub layers: Vec<[B; 2]>,
    /// How many rows there are.
    pub rows: usize,
}

impl<'a, K: Kernels> Ctx<'a, K> {
    pub fn weight(&self, start: usize) -> BufSlice<'a, K::Buf> {
        self.params.expect("F and B have the parameters").at(start)
    }

    pub fn group(&self, axis: Axis) -> &'a dyn Group<K::Buf> {
        &*self.groups[axis.0]
    }

    /// A mask for rows of `cols` elements, of which the first is row `row` of this rank's samples; none where nothing is dropped.
    pub fn dropout(&self, site: Site, row: u64, cols: usize) -> Option<Dropout> {
        let stream = Stream::new(self.seed, self.microbatch.step, site.id);
        let row = self.first_sample * site.rows as u64 + row;
        self.dropping(site.rate).then_some(Dropout { rate: site.rate, stream, first: row * cols as u64 })
    }

    /// The place in its sample of the first row.
    pub fn first_position(&self) -> usize {
        self.cache.map_or(0, |cache| cache.borrow().rows)
    }

    pub fn dropping(&self, rate: f64) -> bool {
        self.mode == Mode::Train && rate > 0.0
    }

    /// What one of `per_sample` terms of a sample's loss counts in the batch's mean.
    pub fn share(&self, per_sample: usize) -> f64 {
        1.0 / (self.microbatch.batch_samples as f64 * per_sample as f64)
    }
}

/// A place in a model where elements are dropped.
#[derive(Debug, Clone, Copy)]
pub struct Site {
    /// Unique in the model.
    pub id: u32,
    pub rate: f64,
    /// Rows of a sample.
    pub rows: usize,
}

/// What a pass reads of an op's values, by their places.
#[derive(Debug, Clone, Default)]
pub(super) struct Reads {
    pub ins: Vec<usize>,
    /// The output.
    pub out: bool,
    pub extras: Vec<usize>,
    /// The gradient of its output.
    pub gradient: bool,
}

/// What an op's passes read and what they may overwrite.
#[derive(Debug, Clone, Default)]
pub(super) struct Needs {
    pub backward: Reads,
    pub weights: Reads,
    /// The input that F makes its output of.
    pub forward_takes: Option<usize>,
    /// Whether B makes its result of the gradient that comes in.
    pub backward_takes_gradient: bool,
    /// The extra that B makes its result of.
    pub backward_takes_extra: Option<usize>,
    /// The input whose gradient B can add to what there is already.
    pub adds_to: Option<usize>,
}

/// When an extra comes into being.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Born {
    Forward,
    Backward,
}

/// Something that an op leaves for its later passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extra {
    pub elements: Elements,
    pub born: Born,
}

impl Extra {
    pub(super) fn elems(len: usize, born: Born) -> Self {
        Self { elements: Elements::elems(len), born }
    }

    /// Of reals.
    pub(super) fn wide(len: usize, born: Born) -> Self {
        Self { elements: Elements { reals: len, ..Elements::default() }, born }
    }
}

/// Multiplications and additions of a forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Cost {
    /// Products with weights: as many again in B, and in W.
    pub matrix: f64,
    /// Products of activations with each other: twice as many in B, none in W.
    pub attention: f64,
}

impl Cost {
    /// Operations of F, B and W, where B and W spend so many on values that F had made.
    pub fn passes(self, again: f64) -> [f64; 3] {
        let Self { matrix, attention } = self;
        [matrix + attention, matrix + 2.0 * attention + again, matrix]
    }
}

impl std::ops::Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { matrix: self.matrix + other.matrix, attention: self.attention + other.attention }
    }
}

impl std::iter::Sum for Cost {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::default(), |a, b| a + b)
    }
}

/// Which of an op's passes is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Forward,
    Backward,
}

/// A collective of an op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Said {
    pub axis: Axis,
    pub kind: CallKind,
    /// Of the whole tensor.
    pub elements: Elements,
    /// Whether the op itself waits for it, not who reads its result.
    pub waits: bool,
}

/// A value for an op to look at, or to keep.
#[derive(Debug)]
pub(super) enum Arg<'a, B> {
    Absent,
    Seen(&'a Value<B>),
    Owned(Option<Value<B>>),
}

impl<B: Buffer> Arg<'_, B> {
    pub(super) fn real(&self) -> &B {
        match self {
            Arg::Seen(Value::Real(buf)) | Arg::Owned(Some(Value::Real(buf))) => buf,
            other => panic!("an op found {other:?} where it wants numbers"),
        }
    }

    pub(super) fn ids(&self) -> &[i32] {
        match self {
            Arg::Seen(Value::Ids(ids)) | Arg::Owned(Some(Value::Ids(ids))) => ids,
            other => panic!("an op found {other:?} where it wants ids"),
        }
    }

    pub(super) fn take(&mut self) -> B {
        match self {
            Arg::Owned(value @ Some(Value::Real(_))) => match value.take() {
                Some(Value::Real(buf)) => buf,
                _ => unreachable!("it was just looked at"),
            },
            other => panic!("an op takes {other:?}, which it did not ask for"),
        }
    }
}

/// What a gradient pass of an op works on.
pub(super) struct Saved<'a, B> {
    pub ins: Vec<Arg<'a, B>>,
    pub out: Arg<'a, B>,
    pub extras: Vec<Arg<'a, B>>,
    pub gradient: Arg<'a, B>,
    /// To be added to the gradient of [`Needs::adds_to`].
    pub residual: Option<&'a B>,
}

/// What B makes.
pub(super) struct Made<B> {
    /// The gradient of every input that has one of its own.
    pub gradients: Vec<Option<Value<B>>>,
    /// Extras that are born in B, in order.
    pub extras: Vec<Value<B>>,
}

impl<B> Made<B> {
    pub(super) fn one(gradient: impl Into<Value<B>>) -> Self {
        Self { gradients: vec![Some(gradient.into())], extras: vec![] }
    }

    /// Of several inputs, in order.
    pub(super) fn several(gradients: impl IntoIterator<Item = B>) -> Self {
        Self { gradients: gradients.into_iter().map(|g| Some(g.into())).collect(), extras: vec![] }
    }

    /// Of the second input alone.
    pub(super) fn second(gradient: B) -> Self {
        Self { gradients: vec![None, Some(gradient.into())], extras: vec![] }
    }
}

/// A step of a model.
pub(super) trait Op<K: Kernels>: Send {
    /// What it is, for messages.
    fn name(&self) -> &'static str;

    fn needs(&self) -> Needs;

    fn extras(&self) -> Vec<Extra> {
        vec![]
    }

    /// The operations of its forward pass on this rank.
    fn cost(&self) -> Cost {
        Cost::default()
    }

    fn has_weights(&self) -> bool {
        false
    }

    /// What ranks say to each other in its F, or in its B.
    fn says(&self, _: Way) -> Vec<Said> {
        vec![]
    }

    /// Whether F may be run a second time: not where ranks speak to each other.
    fn can_run_again(&self) -> bool {
        true
    }

    /// Whether its output is a loss, whose gradient is one.
    fn is_loss(&self) -> bool {
        false
    }

    /// Whether the gradient of an input is just that of the output.
    fn passes_gradient(&self, _input: usize) -> bool {
        false
    }

    /// F: the output, then the extras that are born here.
    fn forward(&self, ctx: &Ctx<'_, K>, ins: Vec<Arg<'_, K::Buf>>) -> Result<Vec<Value<K::Buf>>, StageError>;

    /// B.
    fn backward(&self, _: &Ctx<'_, K>, _: Saved<'_, K::Buf>) -> Result<Made<K::Buf>, StageError> {
        panic!("`{}` has no gradients of inputs", self.name())
    }

    /// W: adds to the gradients of its weights.
    fn weights(&self, _: &K, _: Saved<'_, K::Buf>, _: &mut FlatMut<'_, K::Buf>) {
        panic!("`{}` has no weights", self.name())
    }
}
