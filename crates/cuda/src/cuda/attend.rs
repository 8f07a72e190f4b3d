//! Attention for every size: scores in memory, a sample at a time, by the library's products and kernels of `attention.cu`. As unsafe as the launch
//! functions of [`super::ops`].
#![allow(clippy::missing_safety_doc, reason = "the module says it for all of them")]

use super::lt::{Lay, Product, Products};
use super::ops::{At, Draws, Queue, Real, arguments, drop_numbers};
use crate::CudaError;

/// Rows of heads: where the first is, elements from row to row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    pub at: At,
    pub apart: u64,
}

/// Sizes of attention. Queries, keys and values are rows of `heads * head_dim`, of which `heads / kv_heads` ask the same keys.
#[derive(Debug, Clone, Copy)]
pub struct Attention {
    pub samples: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub queries: u32,
    pub keys: u32,
    /// The last query sees all keys, and each one before it a key less.
    pub causal: bool,
    pub dropout: Option<AttentionDropout>,
}

/// Sample and head count in the whole model's tensor `[samples, heads, queries, keys]`.
#[derive(Debug, Clone, Copy)]
pub struct AttentionDropout {
    pub rate: f64,
    pub draws: Draws,
    pub first_sample: u64,
    pub first_head: u64,
    pub all_heads: u64,
}

/// What the kernels know of a sample's scores.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Scores {
    heads: u32,
    queries: u32,
    keys: u32,
    causal: u32,
    draws: Draws,
    first_head: u64,
    threshold: u32,
    keep: f32,
}

/// Bytes of scratch memory: scores and their gradients, f32, and both again as elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scratch {
    pub scores: u64,
    pub rounded: u64,
    pub deltas: u64,
}

impl Attention {
    /// Of one sample's scores in f32, of them as elements, and of a number for every query.
    pub fn scratch(&self, real: Real) -> Scratch {
        let scores = u64::from(self.heads) * u64::from(self.queries) * u64::from(self.keys);
        let rows = u64::from(self.samples) * u64::from(self.queries) * u64::from(self.heads);
        Scratch { scores: scores * 4, rounded: scores * real.bytes(), deltas: rows * 4 }
    }

    fn scale(&self) -> f32 {
        (1.0 / f64::from(self.head_dim).sqrt()) as f32
    }

    fn scores(&self, sample: u32) -> Scores {
        let none = Draws { key: [0; 2], high: [0; 2] };
        let (draws, first_head, rate) = match self.dropout {
            Some(d) => (d.draws, (d.first_sample + u64::from(sample)) * d.all_heads + d.first_head, d.rate),
            None => (none, 0, 0.0),
        };
        let (threshold, keep) = drop_numbers(rate);
        let Self { heads, queries, keys, causal, .. } = *self;
        Scores { heads, queries, keys, causal: u32::from(causal), draws, first_head, threshold, keep }
    }
}

/// A matrix of every head of one sample: rows of a head `apart` elements from each other, heads `next` from each other.
#[derive(Clone, Copy)]
struct Matrix {
    at: At,
    apart: u64,
    next: u64,
    real: Real,
    /// Of keys or values, whose heads may be fewer.
    is_asked: bool,
}

/// A product for every head of a sample: its operands' orders, and what is there.
#[derive(Clone, Copy)]
struct Each {
    size: (u32, u32, u32),
    a_transposed: bool,
    b_transposed: bool,
    alpha: f32,
}

impl Queue {
    /// `y`, rows of heads one behind the other, and `lse`, f32 `[samples, heads, queries]`. Scratch: scores, and scores as elements.
    pub unsafe fn attention(
        &self,
        (products, real): (&Products, Real),
        size: &Attention,
        [q, k, v]: [Heads; 3],
        [scores, rounded]: [At; 2],
        (y, lse): (Heads, At),
    ) -> Result<(), CudaError> {
        let Attention { samples, heads, head_dim, queries, keys, .. } = *size;
        let name = format!("softmax_forward_{}", real.name());
        for sample in 0..samples {
            let s = Sample { size, sample, real };
            let (s32, p) = (s.of_scores(scores, Real::F32), s.of_scores(rounded, real));
            let asks = Each {
                size: (queries, keys, head_dim),
                a_transposed: false,
                b_transposed: true,
                alpha: size.scale(),
            };
            let sums = Each { size: (queries, head_dim, keys), b_transposed: false, alpha: 1.0, ..asks };
            let (about, lse) =
                (size.scores(sample), lse + u64::from(sample) * u64::from(heads * queries) * 4);
            // SAFETY: the module's.
            unsafe {
                self.heads(products, s, asks, (s.asking(q), s.asked(k)), s32)?;
                let mut arguments = arguments![scores, about, rounded, lse];
                self.launch(("attention", &name), (queries, heads), (256, 0), &mut arguments)?;
                self.heads(products, s, sums, (p, s.asked(v)), s.asking(y))?;
            }
        }
        Ok(())
    }

    /// Gradients of queries, keys and values. Scratch: scores and their gradients, both as elements, and a number for every query.
    pub unsafe fn attention_backward(
        &self,
        (products, real): (&Products, Real),
        size: &Attention,
        [q, k, v]: [Heads; 3],
        (y, dy, lse): (At, At, At),
        [scores, d_p, p, d_scores, deltas]: [At; 5],
        [dq, dk, dv]: [Heads; 3],
    ) -> Result<(), CudaError> {
        let Attention { samples, heads, head_dim, queries, keys, .. } = *size;
        let (name, rows) = (format!("softmax_backward_{}", real.name()), samples * queries);
        let dy_rows = Heads { at: dy, apart: u64::from(heads * head_dim) };
        let of_deltas = format!("deltas_{}", real.name());
        let mut arguments = arguments![y, dy, rows, heads, queries, head_dim, deltas];
        // SAFETY: the module's.
        unsafe {
            let blocks = (u64::from(rows) * u64::from(heads)).div_ceil(8) as u32;
            self.launch(("attention", &of_deltas), (blocks, 1), (256, 0), &mut arguments)?;
        }
        for sample in 0..samples {
            let s = Sample { size, sample, real };
            let (s32, d32) = (s.of_scores(scores, Real::F32), s.of_scores(d_p, Real::F32));
            let (p_rows, ds_rows) = (s.of_scores(p, real), s.of_scores(d_scores, real));
            let asks = Each {
                size: (queries, keys, head_dim),
                a_transposed: false,
                b_transposed: true,
                alpha: size.scale(),
            };
            let values = Each { alpha: 1.0, ..asks };
            let to_queries = Each { size: (queries, head_dim, keys), b_transposed: false, ..values };
            let to_keys = Each { size: (keys, head_dim, queries), a_transposed: true, ..to_queries };
            let at = u64::from(sample) * u64::from(heads * queries) * 4;
            let (about, scale, lse, deltas) = (size.scores(sample), size.scale(), lse + at, deltas + at);
            // SAFETY: the module's.
            unsafe {
                self.heads(products, s, asks, (s.asking(q), s.asked(k)), s32)?;
                self.heads(products, s, values, (s.asking(dy_rows), s.asked(v)), d32)?;
                let mut arguments = arguments![scores, d_p, lse, deltas, about, scale, p, d_scores];
                self.launch(("attention", &name), (queries, heads), (256, 0), &mut arguments)?;
                self.heads(products, s, to_queries, (ds_rows, s.asked(k)), s.asking(dq))?;
                self.heads(products, s, to_keys, (p_rows, s.asking(dy_rows)), s.asked(dv))?;
                self.heads(products, s, to_keys, (ds_rows, s.asking(q)), s.asked(dk))?;
            }
        }
        Ok(())
    }

    /// A product for every head. Heads that ask the same keys go one behind the other: those of them that are first in their group together, then the
    /// second; what they add to the same keys is added.
    unsafe fn heads(
        &self,
        products: &Products,
        sample: Sample<'_>,
        each: Each,
        (a, b): (Matrix, Matrix),
        c: Matrix,
    ) -> Result<(), CudaError> {
        let Attention { heads, kv_heads, .. } = *sample.size;
        let group = u64::from(heads / kv_heads);
        let (rows, cols, inner) = each.size;
        for member in 0..group {
            // Of matrices of queries, this member's; of keys, the group's one.
            let at = |m: Matrix| if m.is_asked { m.at } else { m.at + member * m.next * m.real.bytes() };
            let next = |m: Matrix| if m.is_asked { m.next } else { group * m.next };
            let lay =
                Lay { count: kv_heads, a: (a.apart, next(a)), b: (b.apart, next(b)), c: (c.apart, next(c)) };
            let product = Product {
                a_transposed: each.a_transposed,
                b_transposed: each.b_transposed,
                alpha: each.alpha,
                beta: if c.is_asked && member > 0 { 1.0 } else { 0.0 },
                result: c.real,
                lay: Some(lay),
                ..Product::new(u64::from(rows), u64::from(cols), u64::from(inner), sample.real)
            };
            // SAFETY: the module's.
            unsafe { products.multiply_any(self, &product, (at(a), at(b)), at(c))? };
        }
        Ok(())
    }
}

#[derive(Clone, Copy)]
struct Sample<'a> {
    size: &'a Attention,
    sample: u32,
    real: Real,
}

impl Sample<'_> {
    fn rows(&self, heads: Heads, rows: u32, is_asked: bool) -> Matrix {
        let at = heads.at + u64::from(self.sample) * u64::from(rows) * heads.apart * self.real.bytes();
        Matrix { at, apart: heads.apart, next: u64::from(self.size.head_dim), real: self.real, is_asked }
    }

    fn asking(&self, heads: Heads) -> Matrix {
        self.rows(heads, self.size.queries, false)
    }

    fn asked(&self, heads: Heads) -> Matrix {
        self.rows(heads, self.size.keys, true)
    }

    fn of_scores(&self, at: At, real: Real) -> Matrix {
        let Attention { queries, keys, .. } = *self.size;
        Matrix {
            at,
            apart: u64::from(keys),
            next: u64::from(queries) * u64::from(keys),
            real,
            is_asked: false,
        }
    }
}
