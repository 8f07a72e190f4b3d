//! Losses: sums over rows or pixels, each weighted by its share of the batch.

use std::ops::Range;

use crate::graph::build::{Builder, Keep};
use crossmesh_core::step::lists::CallKind;

use crate::graph::op::{Arg, Born, Ctx, Extra, Made, Needs, Op, Reads, Said, Saved, Way};
use crate::graph::{Axis, Elements, Kind, Spread, Typed, Val};
use crate::group::ReduceOp;
use crate::kernels::{Classes, Kernels};
use crate::stage::{StageError, Value};

/// Cross-entropy of logits whose columns are split. What the softmax needs of other ranks are three numbers a row, a maximum and two sums
/// (Megatron-LM's vocabulary-parallel cross-entropy).
struct CrossEntropy {
    axis: Axis,
    rows: usize,
    /// The classes whose logits are here.
    held: Range<usize>,
    per_sample: usize,
}

struct SquaredError {
    len: usize,
    per_sample: usize,
}

impl<K: Kernels> Builder<'_, '_, K> {
    /// The cross-entropy of logits over `classes`, for samples of `per_sample` rows.
    pub fn cross_entropy(&mut self, logits: Val, targets: Val, classes: usize, per_sample: usize) -> Val {
        let typed = self.typed(logits).clone();
        let axis = typed.split(Spread::Columns).expect("logits are split by their columns");
        let held = self.team.along(axis).part(classes);
        let op = CrossEntropy { axis, rows: typed.rows.len(), held, per_sample };
        let out = self.loss();
        self.push(op, &[logits, targets], out, Keep::Always)
    }

    /// The squared difference, for samples of `per_sample` elements.
    pub fn squared_error(&mut self, x: Val, target: Val, per_sample: usize) -> Val {
        let op = SquaredError { len: self.typed(x).len(), per_sample };
        let out = self.loss();
        self.push(op, &[x, target], out, Keep::Always)
    }

    fn loss(&self) -> Typed {
        Typed { kind: Kind::Loss, ..self.matrix(1, 1, self.team.whole()) }
    }
}

impl CrossEntropy {
    fn classes<'a>(&self, targets: &'a [i32]) -> Classes<'a> {
        Classes { rows: self.rows, held: self.held.clone(), targets }
    }
}

impl<K: Kernels> Op<K> for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross-entropy"
    }

    fn needs(&self) -> Needs {
        Needs {
            backward: Reads { ins: vec![1], extras: vec![0, 1], ..Reads::default() },
            forward_takes: Some(0),
            backward_takes_extra: Some(0),
            ..Needs::default()
        }
    }

    /// Exponentials, where logits were; two sums a row.
    fn extras(&self) -> Vec<Extra> {
        vec![
            Extra::elems(self.rows * self.held.len(), Born::Forward),
            Extra::wide(2 * self.rows, Born::Forward),
        ]
    }

    fn is_loss(&self) -> bool {
        true
    }

    /// The largest logit of every row, then two sums of it, over ranks that have a part of the classes each.
    fn says(&self, way: Way) -> Vec<Said> {
        let reals = |reals: usize| Elements { reals, ..Elements::default() };
        let of = |elements| Said { axis: self.axis, kind: CallKind::AllReduce, elements, waits: true };
        match way {
            Way::Forward => vec![of(reals(self.rows)), of(reals(2 * self.rows))],
            Way::Backward => vec![],
        }
    }

    fn forward(
        &self,
        ctx: &Ctx<'_, K>,
        mut ins: Vec<Arg<'_, K::Buf>>,
    ) -> Result<Vec<Value<K::Buf>>, StageError> {
        let mut logits = ins[0].take();
        let classes = self.classes(ins[1].ids());
        let (kernels, group) = (ctx.kernels, ctx.group(self.axis));
        let mut max = kernels.wide(self.rows);
        kernels.row_max(classes.size(), &logits, &mut max);
        group.all_reduce(&mut max, ReduceOp::Max)?;
        let mut sums = kernels.wide(2 * self.rows);
        kernels.exp_sums(&classes, &max, &mut logits, &mut sums);
        group.all_reduce(&mut sums, ReduceOp::Sum)?;
        let loss = kernels.cross_entropy(self.rows, &sums) * ctx.share(self.per_sample);
        Ok(vec![Value::Loss(loss), Value::Real(logits), Value::Real(sums)])
    }

    fn backward(&self, ctx: &Ctx<'_, K>, mut saved: Saved<'_, K::Buf>) -> Result<Made<K::Buf>, StageError> {
        let mut d_logits = saved.extras[0].take();
        let classes = self.classes(saved.ins[1].ids());
        let (sums, share) = (saved.extras[1].real(), ctx.share(self.per_sample));
        ctx.kernels.cross_entropy_grad(&classes, sums, share, &mut d_logits);
        Ok(Made::one(d_logits))
    }
}

impl<K: Kernels> Op<K> for SquaredError {
    fn name(&self) -> &'static str {
        "squared error"
    }

    fn needs(&self) -> Needs {
        Needs {
            backward: Reads { extras: vec![0], ..Reads::default() },
            backward_takes_extra: Some(0),
            ..Needs::default()
        }
    }

    /// The gradient: all that B needs of the two.
    fn extras(&self) -> Vec<Extra> {
        vec![Extra::elems(self.len, Born::Forward)]
    }

    fn is_loss(&self) -> bool {
        true
    }

    fn forward(&self, ctx: &Ctx<'_, K>, ins: Vec<Arg<'_, K::Buf>>) -> Result<Vec<Value<K::Buf>>, StageError> {
        let (x, target, share) = (ins[0].real(), ins[1].real(), ctx.share(self.per_sample));
        let loss = ctx.kernels.squared_error(x, target) * share;
        let mut d = ctx.kernels.buffer(self.len);
        ctx.kernels.squared_error_grad(x, target, share, &mut d);
        Ok(vec![Value::Loss(loss), Value::Real(d)])
    }

    fn backward(&self, _: &Ctx<'_, K>, mut saved: Saved<'_, K::Buf>) -> Result<Made<K::Buf>, StageError> {
        Ok(Made::one(saved.extras[0].take()))
    }
}
