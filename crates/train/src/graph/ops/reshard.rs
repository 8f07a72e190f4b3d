//! A value that lies otherwise afterwards, and its gradient the other way round.
//!
//! From `a` to `b` in F is from the gradient of `b` to the gradient of `a` in B. That one rule is all of the borders of
//! tensor-parallel regions (Megatron-LM; with rows split, Korthikanti et al., 2022):
//!
//! ```text
//!               into a region                        out of it
//!          whole -> whole   rows -> whole     summand -> whole   summand -> rows
//! F             -              gather            all-reduce       reduce-scatter
//! B         all-reduce     reduce-scatter            -                gather
//! ```
//!
//! It starts a collective and does not wait: who reads the result does.

use std::ops::Range;

use crossmesh_core::step::lists::CallKind;

use crate::graph::op::{Arg, Ctx, Made, Needs, Op, Reads, Said, Saved, Way};
use crate::graph::{Axis, Elements, Spread};
use crate::group::{Collective, ReduceOp, chunked};
#[cfg(test)]
use crate::kernels::scalar;
use crate::kernels::{BufSlice, Buffer, Kernels, PartMut};
use crate::stage::{StageError, Value};

/// What has to happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Move {
    Nothing,
    Gather,
    AllReduce,
    ReduceScatter,
    Slice,
    /// A mistake, for tests: a rank's own rows among zeros.
    #[cfg(test)]
    Pad,
}

impl Move {
    fn between(from: Spread, to: Spread, size: usize) -> Self {
        use Spread::{Rows, Summand, Whole};
        match (from, to) {
            _ if size == 1 => Move::Nothing,
            (a, b) if a == b => Move::Nothing,
            (Rows, Whole) => Move::Gather,
            (Summand, Whole) => Move::AllReduce,
            (Summand, Rows) => Move::ReduceScatter,
            (Whole, Rows) => Move::Slice,
            (from, to) => panic!("no op needs a reshard from {from:?} to {to:?}"),
        }
    }

    /// Whether it writes over what it is given.
    fn takes(self) -> bool {
        matches!(self, Move::AllReduce | Move::ReduceScatter)
    }
}

/// See the module.
#[derive(Debug, Clone)]
pub struct Reshard {
    axis: Axis,
    /// The elements of every rank's rows.
    parts: Vec<Range<usize>>,
    /// Of all rows.
    len: usize,
    forward: Move,
    backward: Move,
}

impl Reshard {
    /// From and to are the spreads of the value and of its gradient.
    pub(in crate::graph) fn new(
        axis: Axis,
        size: usize,
        (rows, cols): (usize, usize),
        from: (Spread, Spread),
        to: (Spread, Spread),
    ) -> Self {
        Self {
            axis,
            parts: chunked(rows, cols, size),
            len: rows * cols,
            forward: Move::between(from.0, to.0, size),
            backward: Move::between(to.1, from.1, size),
        }
    }

    /// The same value under another name.
    pub(in crate::graph) fn nothing(axis: Axis) -> Self {
        Self { axis, parts: vec![], len: 0, forward: Move::Nothing, backward: Move::Nothing }
    }

    /// Whether nothing happens in F.
    pub(in crate::graph) fn is_same(&self) -> bool {
        self.forward == Move::Nothing
    }

    /// With another move in B than the rule says, of the same shape.
    #[cfg(test)]
    pub(in crate::graph) fn spoiled(mut self) -> Self {
        self.backward = match self.backward {
            Move::Nothing => Move::AllReduce,
            Move::AllReduce => Move::Nothing,
            Move::ReduceScatter => Move::Slice,
            Move::Slice => Move::ReduceScatter,
            Move::Gather | Move::Pad => Move::Pad,
        };
        self
    }

    fn run<K: Kernels>(
        &self,
        ctx: &Ctx<'_, K>,
        what: Move,
        mut x: Arg<'_, K::Buf>,
    ) -> Result<Value<K::Buf>, StageError> {
        let group = ctx.group(self.axis);
        let own = self.parts[group.rank()].clone();
        let cut = |whole: &K::Buf| {
            let mut rows = ctx.kernels.buffer(own.len());
            ctx.kernels.copy(BufSlice { buf: whole, start: own.start }, (&mut rows).into(), own.len());
            rows
        };
        let start = |what, buf| Ok::<_, StageError>(Value::Coming(group.start(what, buf)?));
        Ok(match what {
            Move::Nothing => unreachable!("nothing is not a step"),
            Move::Gather => {
                let mut whole = ctx.kernels.buffer(self.len);
                let part = x.real();
                ctx.kernels.copy(part.into(), PartMut { buf: &mut whole, start: own.start }, part.len());
                start(Collective::AllGather(&self.parts), whole)?
            }
            Move::AllReduce => start(Collective::AllReduce(ReduceOp::Sum), x.take())?,
            Move::ReduceScatter => start(Collective::ReduceScatter(&self.parts), x.take())?,
            Move::Slice => cut(x.real()).into(),
            #[cfg(test)]
            Move::Pad => {
                let mut whole = ctx.kernels.buffer(self.len);
                ctx.kernels.fill(scalar::Scalar::ZERO, (&mut whole).into(), self.len);
                ctx.kernels.copy(x.real().into(), PartMut { buf: &mut whole, start: own.start }, own.len());
                whole.into()
            }
        })
    }
}

impl<K: Kernels> Op<K> for Reshard {
    fn name(&self) -> &'static str {
        "reshard"
    }

    fn needs(&self) -> Needs {
        Needs {
            backward: Reads { gradient: true, ..Reads::default() },
            forward_takes: self.forward.takes().then_some(0),
            backward_takes_gradient: self.backward.takes(),
            ..Needs::default()
        }
    }

    fn passes_gradient(&self, _: usize) -> bool {
        self.backward == Move::Nothing
    }

    fn can_run_again(&self) -> bool {
        matches!(self.forward, Move::Nothing | Move::Slice)
    }

    fn says(&self, way: Way) -> Vec<Said> {
        let what = if way == Way::Forward { self.forward } else { self.backward };
        let kind = match what {
            Move::Gather => CallKind::AllGather,
            Move::AllReduce => CallKind::AllReduce,
            Move::ReduceScatter => CallKind::ReduceScatter,
            _ => return vec![],
        };
        vec![Said { axis: self.axis, kind, elements: Elements::elems(self.len), waits: false }]
    }

    fn forward(
        &self,
        ctx: &Ctx<'_, K>,
        mut ins: Vec<Arg<'_, K::Buf>>,
    ) -> Result<Vec<Value<K::Buf>>, StageError> {
        Ok(vec![self.run(ctx, self.forward, ins.remove(0))?])
    }

    fn backward(&self, ctx: &Ctx<'_, K>, saved: Saved<'_, K::Buf>) -> Result<Made<K::Buf>, StageError> {
        Ok(Made::one(self.run(ctx, self.backward, saved.gradient)?))
    }
}
