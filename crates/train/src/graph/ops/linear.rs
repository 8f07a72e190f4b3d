//! A linear map of rows: `y = x W + b`, with W `[in, out]` as GPT-2 stores it, or `[out, in]`.

use crate::flat::FlatMut;
use crate::graph::build::{Builder, Keep};
use crate::graph::op::{Arg, Cost, Ctx, Made, Needs, Op, Reads, Saved};
use crate::graph::{Axis, Lie, Spread, Typed, Val};
use crate::kernels::{Gemm, Kernels, Rows};
use crate::parameter::Init;
use crate::stage::{StageError, Value};

/// How ranks share a map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parallel<'a> {
    /// Everybody computes it.
    None,
    /// Each has some columns of the result: the dims of `outs` that axes split.
    Columns(&'a [(Axis, usize)]),
    /// Each has some columns of `x`, and a summand of the result: the dims of `ins` that axes split.
    Summands(&'a [(Axis, usize)]),
}

/// A linear map to be declared: its dims in as many as it takes to say what is split.
#[derive(Debug, Clone)]
pub struct LinearSpec<'a> {
    /// `name.weight` and `name.bias`.
    pub name: &'a str,
    pub ins: &'a [usize],
    pub outs: &'a [usize],
    pub parallel: Parallel<'a>,
    pub init: Init,
    pub bias: bool,
    /// Whether the matrix lies as `[outs.., ins..]`.
    pub transposed: bool,
    /// Part of the insides of attention, which may be computed again.
    pub in_attention: bool,
}

/// A matrix that is there already, as `[out, in]`.
#[derive(Debug, Clone)]
pub struct TableSpec {
    pub name: String,
    pub rows: usize,
    pub cols: usize,
    pub init: Init,
    /// The axis that splits its rows.
    pub axis: Axis,
}

struct Linear {
    rows: usize,
    ins: usize,
    outs: usize,
    weight: usize,
    /// Where the bias lies, and whether this rank adds it.
    bias: Option<(usize, bool)>,
    /// Whether the matrix lies as `[out, in]`.
    transposed: bool,
}

impl<K: Kernels> Builder<'_, '_, K> {
    /// `x W + b`.
    pub fn linear(&mut self, x: Val, spec: &LinearSpec<'_>) -> Val {
        let (x, lie, split) = self.shared(x, spec.parallel, spec.ins.len());
        let typed = self.typed(x).clone();
        // `split` counts dims of `[ins.., outs..]`.
        let (shape, of_weight, first_out) = if spec.transposed {
            let turned = |dim: usize| match dim.checked_sub(spec.ins.len()) {
                Some(out) => out,
                None => spec.outs.len() + dim,
            };
            let of_weight = split.iter().map(|(dim, axis)| (turned(*dim), *axis)).collect();
            ([spec.outs, spec.ins].concat(), of_weight, 0)
        } else {
            ([spec.ins, spec.outs].concat(), split.clone(), spec.ins.len())
        };
        let weight = self.weight(x, format!("{}.weight", spec.name), &shape, &of_weight, (spec.init, true));
        let bias = spec.bias.then(|| {
            let split = of_outs(&split, spec.ins.len());
            self.weight(x, format!("{}.bias", spec.name), spec.outs, &split, (Init::Zeros, false)).start
        });
        let outs = weight.dims[first_out..][..spec.outs.len()].iter().product();
        let op = Linear {
            rows: typed.rows.len(),
            ins: typed.cols,
            outs,
            weight: weight.start,
            bias: bias.map(|start| (start, self.adds_bias(spec.parallel))),
            transposed: spec.transposed,
        };
        let out = Typed { lie, cols: outs, ..typed };
        self.push(op, &[x], out, if spec.in_attention { Keep::Attention } else { Keep::Always })
    }

    /// `x T'`, with a table `T` whose rows are split: logits.
    pub fn times_table(&mut self, x: Val, spec: &TableSpec) -> Val {
        let (x, lie, _) = self.shared(x, Parallel::Columns(&[(spec.axis, 0)]), 1);
        let typed = self.typed(x).clone();
        let (weight, outs) = self.table(x, spec);
        let (rows, ins) = (typed.rows.len(), typed.cols);
        let op = Linear { rows, ins, outs, weight, bias: None, transposed: true };
        self.push(op, &[x], Typed { lie, cols: outs, ..typed }, Keep::Always)
    }

    /// Declares a table; where it lies, and its rows here.
    pub(super) fn table(&mut self, x: Val, spec: &TableSpec) -> (usize, usize) {
        let (shape, split) = ([spec.rows, spec.cols], [(0, spec.axis)]);
        let weight = self.weight(x, spec.name.clone(), &shape, &split, (spec.init, true));
        (weight.start, weight.dims[0])
    }

    /// `x` as a map wants it to lie, how its result lies, and which dims of `[ins.., outs..]` are split.
    pub(super) fn shared(
        &mut self,
        x: Val,
        parallel: Parallel<'_>,
        ins: usize,
    ) -> (Val, Lie, Vec<(usize, Axis)>) {
        let (mut wanted, mut lie) = (self.typed(x).lie.clone(), self.typed(x).lie.clone());
        let mut split = vec![];
        match parallel {
            Parallel::None => {}
            Parallel::Columns(dims) => {
                for &(axis, dim) in dims {
                    (wanted, lie) = (wanted.entering(axis), lie.along(axis, Spread::Columns));
                    split.push((ins + dim, axis));
                }
            }
            Parallel::Summands(dims) => {
                for &(axis, dim) in dims {
                    (wanted, lie) = (wanted.along(axis, Spread::Columns), lie.along(axis, Spread::Summand));
                    split.push((dim, axis));
                }
            }
        }
        (self.want(x, &wanted), lie, split)
    }

    /// Of the summands of a result, the first rank's has the bias in it.
    pub(super) fn adds_bias(&self, parallel: Parallel<'_>) -> bool {
        match parallel {
            Parallel::Summands(dims) => dims.iter().all(|(axis, _)| self.team.along(*axis).rank == 0),
            _ => true,
        }
    }
}

/// Of the split dims of `[ins.., outs..]`, those of `outs`.
pub(super) fn of_outs(split: &[(usize, Axis)], ins: usize) -> Vec<(usize, Axis)> {
    split.iter().filter_map(|(dim, axis)| Some((dim.checked_sub(ins)?, *axis))).collect()
}

impl<K: Kernels> Op<K> for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn needs(&self) -> Needs {
        Needs {
            backward: Reads { gradient: true, ..Reads::default() },
            weights: Reads { ins: vec![0], gradient: true, ..Reads::default() },
            ..Needs::default()
        }
    }

    fn has_weights(&self) -> bool {
        true
    }

    fn cost(&self) -> Cost {
        Cost { matrix: 2.0 * self.rows as f64 * self.ins as f64 * self.outs as f64, attention: 0.0 }
    }

    fn forward(&self, ctx: &Ctx<'_, K>, ins: Vec<Arg<'_, K::Buf>>) -> Result<Vec<Value<K::Buf>>, StageError> {
        let mut y = ctx.kernels.buffer(self.rows * self.outs);
        let bias = self.bias.filter(|(_, adds)| *adds).map(|(start, _)| ctx.weight(start));
        let gemm = Gemm::new(self.rows, self.outs, self.ins);
        let gemm = if self.transposed { gemm.b_transposed() } else { gemm };
        ctx.kernels.gemm(gemm, ins[0].real().into(), ctx.weight(self.weight), bias, (&mut y).into());
        Ok(vec![Value::Real(y)])
    }

    fn backward(&self, ctx: &Ctx<'_, K>, saved: Saved<'_, K::Buf>) -> Result<Made<K::Buf>, StageError> {
        let mut dx = ctx.kernels.buffer(self.rows * self.ins);
        let gemm = Gemm::new(self.rows, self.ins, self.outs);
        let gemm = if self.transposed { gemm } else { gemm.b_transposed() };
        ctx.kernels.gemm(gemm, saved.gradient.real().into(), ctx.weight(self.weight), None, (&mut dx).into());
        Ok(Made::one(dx))
    }

    fn weights(&self, kernels: &K, saved: Saved<'_, K::Buf>, grads: &mut FlatMut<'_, K::Buf>) {
        let (x, dy) = (saved.ins[0].real(), saved.gradient.real());
        let start = self.weight;
        if self.transposed {
            let gemm = Gemm::new(self.outs, self.ins, self.rows).a_transposed().added();
            kernels.gemm(gemm, dy.into(), x.into(), None, grads.at(start));
        } else {
            let gemm = Gemm::new(self.ins, self.outs, self.rows).a_transposed().added();
            kernels.gemm(gemm, x.into(), dy.into(), None, grads.at(start));
        }
        if let Some((start, _)) = self.bias {
            let size = Rows { rows: self.rows, cols: self.outs };
            kernels.sum_rows(size, dy, grads.at(start));
        }
    }
}
