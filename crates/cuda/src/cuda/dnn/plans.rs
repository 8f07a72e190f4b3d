//! The two graphs of attention, forward and backward, in the order that the library has kernels for.

use super::super::attend::{Attention, Heads};
use super::graph::{Graph, Place, Plan, Tensor, packed};
use super::library::{Library, data, mode, reduce};
use crate::CudaError;

/// What plans differ in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    size: [u32; 5],
    causal: bool,
    /// How far rows of queries, keys, values and what comes out are apart; of gradients too.
    apart: [u64; 7],
    pub(super) backward: bool,
}

impl Key {
    pub(super) fn new(size: &Attention, given: [Heads; 3], gradients: Option<[Heads; 3]>) -> Self {
        let Attention { samples, heads, kv_heads, head_dim, queries, causal, .. } = *size;
        let width = u64::from(heads * head_dim);
        let [q, k, v] = given.map(|heads| heads.apart);
        let [dq, dk, dv] = gradients.map_or([0; 3], |g| g.map(|heads| heads.apart));
        let size = [samples, heads, kv_heads, head_dim, queries];
        Self { size, causal, apart: [q, k, v, width, dq, dk, dv], backward: gradients.is_some() }
    }
}

/// What graphs take by value.
pub(super) struct Numbers {
    pub(super) scale: f32,
    pub(super) masked: f32,
    pub(super) one: f32,
}

impl Numbers {
    pub(super) fn new(size: &Attention) -> Self {
        let scale = (1.0 / f64::from(size.head_dim).sqrt()) as f32;
        Self { scale, masked: f32::NEG_INFINITY, one: 1.0 }
    }
}

/// Of tensors that lie somewhere; others are numbered behind them.
pub(super) mod ids {
    pub const Q: i64 = 1;
    pub const K: i64 = 2;
    pub const V: i64 = 3;
    pub const Y: i64 = 4;
    pub const LSE: i64 = 5;
    pub const DY: i64 = 6;
    pub const DQ: i64 = 7;
    pub const DK: i64 = 8;
    pub const DV: i64 = 9;
    pub const DELTAS: i64 = 10;
    pub const DQ_SUMS: i64 = 11;
    pub const SCALE: i64 = 12;
    pub const MASKED: i64 = 13;
    pub const ONE: i64 = 14;
    pub const FIRST_OTHER: i64 = 100;
}

pub(super) fn forward(library: &Library, key: &Key) -> Result<Plan, CudaError> {
    let mut g = Graph::new(library);
    let [b, h, kv, d, s] = key.size.map(i64::from);
    let [q, k, v, y, ..] = key.apart.map(|apart| apart as i64);
    let rows = |apart: i64| [s * apart, d, apart, 1];
    let turned = |apart: i64| [s * apart, d, 1, apart];
    let q = g.tensor(Place::At(ids::Q), data::BF16, [b, h, s, d], rows(q))?;
    let k = g.tensor(Place::At(ids::K), data::BF16, [b, kv, d, s], turned(k))?;
    let v = g.tensor(Place::At(ids::V), data::BF16, [b, kv, s, d], rows(v))?;
    let scores = g.inner(data::F32, [b, h, s, s])?;
    g.matmul_to(q, k, scores)?;
    let scale = g.value(ids::SCALE)?;
    let mut scores = g.pointwise(mode::MUL, &[scores, scale])?;
    if key.causal {
        scores = g.mask(scores)?;
    }
    let of_rows = [b, h, s, 1];
    let max = g.inner(data::F32, of_rows)?;
    g.reduce_to(reduce::MAX, scores, max)?;
    let less = g.pointwise(mode::SUB, &[scores, max])?;
    let exps = g.pointwise(mode::EXP, &[less])?;
    let sum = g.inner(data::F32, of_rows)?;
    g.reduce_to(reduce::ADD, exps, sum)?;
    let log = g.pointwise(mode::LOG, &[sum])?;
    let lse = g.tensor(Place::At(ids::LSE), data::F32, of_rows, packed(of_rows))?;
    g.pointwise_to((mode::ADD, data::F32, None), &[max, log], lse)?;
    let p = g.inner(data::BF16, [b, h, s, s])?;
    g.pointwise_to((mode::DIV, data::F32, None), &[exps, sum], p)?;
    let y = g.tensor(Place::At(ids::Y), data::BF16, [b, h, s, d], rows(y))?;
    g.matmul_to(p, v, y)?;
    g.plan()
}

pub(super) fn backward(library: &Library, key: &Key, deterministic: bool) -> Result<Plan, CudaError> {
    let mut g = Graph::new(library);
    let [b, h, kv, d, s] = key.size.map(i64::from);
    let [q, k, v, y, dq, dk, dv] = key.apart.map(|apart| apart as i64);
    let rows = |apart: i64| [s * apart, d, apart, 1];
    let turned = |apart: i64| [s * apart, d, 1, apart];
    let (of_heads, of_rows, of_scores) = ([b, h, s, d], [b, h, s, 1], [b, h, s, s]);
    let of_keys = [b, kv, s, d];
    let q = g.tensor(Place::At(ids::Q), data::BF16, of_heads, rows(q))?;
    let k_turned = g.tensor(Place::At(ids::K), data::BF16, [b, kv, d, s], turned(k))?;
    let v_turned = g.tensor(Place::At(ids::V), data::BF16, [b, kv, d, s], turned(v))?;
    let dy = g.tensor(Place::At(ids::DY), data::BF16, of_heads, rows(y))?;
    let y = g.tensor(Place::At(ids::Y), data::BF16, of_heads, rows(y))?;
    let lse = g.tensor(Place::At(ids::LSE), data::F32, of_rows, packed(of_rows))?;
    let (one, scale) = (g.value(ids::ONE)?, g.value(ids::SCALE)?);

    // D = sum(dY Y). The steps are the frontend's.
    let product = g.tensor(Place::Nowhere, data::F32, of_heads, [h * s * d, s * d, h * d, 1])?;
    g.pointwise_to((mode::MUL, data::F32, None), &[dy, y], product)?;
    let sum = g.inner(data::F32, of_rows)?;
    g.reduce_to(reduce::ADD, product, sum)?;
    let deltas = g.tensor(Place::At(ids::DELTAS), data::F32, of_rows, packed(of_rows))?;
    g.pointwise_to((mode::MUL, data::F32, None), &[sum, one], deltas)?;

    // P = exp(S - lse), dV = P' dY.
    let scores = g.inner(data::F32, of_scores)?;
    g.matmul_to(q, k_turned, scores)?;
    let scores = g.pointwise(mode::MUL, &[scores, scale])?;
    let mut scores = g.pointwise(mode::SUB, &[scores, lse])?;
    if key.causal {
        scores = g.mask(scores)?;
    }
    let p = g.pointwise(mode::EXP, &[scores])?;
    let turned_scores = [h * s * s, s * s, 1, s];
    let p_turned = g.tensor(Place::Nowhere, data::BF16, of_scores, turned_scores)?;
    g.reshape_to(p, p_turned)?;
    let dv = g.tensor(Place::At(ids::DV), data::BF16, of_keys, rows(dv))?;
    g.grouped(p_turned, dy, dv, h == kv)?;

    // dS = scale P (dY V' - D), dK = dS' Q.
    let d_p = g.inner(data::F32, of_scores)?;
    g.matmul_to(dy, v_turned, d_p)?;
    let less = g.pointwise(mode::SUB, &[d_p, deltas])?;
    let weighted = g.pointwise(mode::MUL, &[less, p])?;
    let d_scores = g.pointwise(mode::MUL, &[weighted, scale])?;
    let ds_turned = g.tensor(Place::Nowhere, data::BF16, of_scores, turned_scores)?;
    g.reshape_to(d_scores, ds_turned)?;
    let dk = g.tensor(Place::At(ids::DK), data::BF16, of_keys, rows(dk))?;
    g.grouped(ds_turned, q, dk, h == kv)?;

    // dQ = dS K.
    let k_rows = g.tensor(Place::Nowhere, data::BF16, of_keys, rows(k))?;
    g.reshape_to(k_turned, k_rows)?;
    let dq = g.tensor(Place::At(ids::DQ), data::BF16, of_heads, rows(dq))?;
    if deterministic {
        g.matmul_to(d_scores, k_rows, dq)?;
    } else {
        let sums = g.tensor(Place::At(ids::DQ_SUMS), data::F32, of_heads, packed(of_heads))?;
        g.matmul_to(d_scores, k_rows, sums)?;
        g.pointwise_to((mode::IDENTITY, data::F32, None), &[sums], dq)?;
    }
    g.plan()
}

impl Graph<'_> {
    /// `c = a b`; where several heads ask the same keys, the sum of theirs.
    fn grouped(&mut self, a: Tensor, b: Tensor, c: Tensor, is_plain: bool) -> Result<(), CudaError> {
        if is_plain {
            return self.matmul_to(a, b, c);
        }
        let [batch, _, rows, cols] = c.dims;
        let each = self.inner(data::BF16, [batch, a.dims[1], rows, cols])?;
        self.matmul_to(a, b, each)?;
        self.reduce_to(reduce::ADD, each, c)
    }
}
