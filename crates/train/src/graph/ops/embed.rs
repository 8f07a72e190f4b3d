//! Rows looked up in tables.

use std::ops::Range;

use crate::flat::FlatMut;
use crate::graph::build::{Builder, Keep};
use crate::graph::op::{Arg, Cost, Ctx, Made, Needs, Op, Reads, Saved};
use crate::graph::ops::linear::TableSpec;
use crate::graph::{Kind, Spread, Typed, Val};
use crate::kernels::{Kernels, Lookup};
use crate::parameter::Init;
use crate::stage::{StageError, Value};

/// Rows of a table that is split: each rank has a summand of the result, zero where another has the row.
struct Embed {
    table: usize,
    /// The rows of the table that are here.
    held: Range<usize>,
    rows: usize,
    cols: usize,
}

/// A learned vector for every position of a sample, added to the rows. Where these are summands, the first rank adds it.
struct Positions {
    table: usize,
    context: usize,
    rows: usize,
    cols: usize,
    adds: bool,
}

impl<K: Kernels> Builder<'_, '_, K> {
    /// The rows of a table that ids name.
    pub fn embed(&mut self, ids: Val, spec: &TableSpec) -> Val {
        let typed = self.typed(ids).clone();
        let (table, _) = self.table(ids, spec);
        let held = self.team.along(spec.axis).part(spec.rows);
        let op = Embed { table, held, rows: typed.rows.len(), cols: spec.cols };
        let lie = typed.lie.along(spec.axis, Spread::Summand);
        let out = Typed { kind: Kind::Real, cols: spec.cols, lie, ..typed };
        self.push(op, &[ids], out, Keep::Always)
    }

    /// Adds a learned vector for every one of a sample's `context` rows.
    pub fn positions(&mut self, x: Val, name: &str, context: usize, init: Init) -> Val {
        let out = self.typed(x).clone();
        let table = self.weight(x, name.into(), &[context, out.cols], &[], (init, true));
        let first = |axis| self.team.along(axis).rank == 0;
        let adds = out.split(Spread::Summand).is_none_or(first);
        let op = Positions { table: table.start, context, rows: out.rows.len(), cols: out.cols, adds };
        self.push(op, &[x], out, Keep::Always)
    }
}

impl Embed {
    fn lookup<'a>(&self, ids: &'a [i32]) -> Lookup<'a> {
        Lookup { ids, held: self.held.clone(), cols: self.cols }
    }
}

impl<K: Kernels> Op<K> for Embed {
    fn name(&self) -> &'static str {
        "embed"
    }

    fn needs(&self) -> Needs {
        let weights = Reads { ins: vec![0], gradient: true, ..Reads::default() };
        Needs { weights, ..Needs::default() }
    }

    fn has_weights(&self) -> bool {
        true
    }

    fn cost(&self) -> Cost {
        Cost { matrix: self.rows as f64 * self.cols as f64, attention: 0.0 }
    }

    fn forward(&self, ctx: &Ctx<'_, K>, ins: Vec<Arg<'_, K::Buf>>) -> Result<Vec<Value<K::Buf>>, StageError> {
        let mut x = ctx.kernels.buffer(self.rows * self.cols);
        ctx.kernels.lookup(&self.lookup(ins[0].ids()), ctx.weight(self.table), false, &mut x);
        Ok(vec![Value::Real(x)])
    }

    fn weights(&self, kernels: &K, saved: Saved<'_, K::Buf>, grads: &mut FlatMut<'_, K::Buf>) {
        let lookup = self.lookup(saved.ins[0].ids());
        kernels.lookup_grad(&lookup, saved.gradient.real(), grads.at(self.table));
    }
}

impl Positions {
    fn ids(&self, first: usize) -> Vec<i32> {
        (first..first + self.rows).map(|row| (row % self.context) as i32).collect()
    }

    fn lookup<'a>(&self, ids: &'a [i32]) -> Lookup<'a> {
        Lookup { ids, held: 0..self.context, cols: self.cols }
    }
}

impl<K: Kernels> Op<K> for Positions {
    fn name(&self) -> &'static str {
        "positions"
    }

    fn needs(&self) -> Needs {
        Needs {
            weights: Reads { gradient: true, ..Reads::default() },
            forward_takes: Some(0),
            ..Needs::default()
        }
    }

    fn has_weights(&self) -> bool {
        true
    }

    fn passes_gradient(&self, _: usize) -> bool {
        true
    }

    fn forward(
        &self,
        ctx: &Ctx<'_, K>,
        mut ins: Vec<Arg<'_, K::Buf>>,
    ) -> Result<Vec<Value<K::Buf>>, StageError> {
        let mut x = ins[0].take();
        if self.adds {
            ctx.kernels.lookup(
                &self.lookup(&self.ids(ctx.first_position())),
                ctx.weight(self.table),
                true,
                &mut x,
            );
        }
        Ok(vec![Value::Real(x)])
    }

    fn backward(&self, _: &Ctx<'_, K>, _: Saved<'_, K::Buf>) -> Result<Made<K::Buf>, StageError> {
        unreachable!("its gradient is that of its result")
    }

    fn weights(&self, kernels: &K, saved: Saved<'_, K::Buf>, grads: &mut FlatMut<'_, K::Buf>) {
        let ids = self.ids(0);
        let target = grads.at(self.table);
        kernels.lookup_grad(&self.lookup(&ids), saved.gradient.real(), target);
    }
}
