//! Attention, fused by the library where it takes the size and else with scores in memory; rotary positions.

use crossmesh_cuda::Block;
use crossmesh_cuda::cuda::attend::{self, Heads};
use crossmesh_cuda::cuda::dnn::Dnn;
use crossmesh_cuda::cuda::ops;

use super::buffers::{GpuBuf, GpuElem, elems, reals};
use super::calls::go;
use super::{Gpu, draws, lock, small};
use crate::kernels::{Attention, AttentionSaved, Kernels as _, Projected, ProjectedMut, Rotary, Rows};

/// Cosines and sines of a [`Rotary`], f32.
pub(super) struct Turns {
    from: (*const f64, usize, Vec<f64>),
    cosines: Block,
    sines: Block,
}

// SAFETY: the pointer is compared, never followed.
unsafe impl Send for Turns {}

impl<E: GpuElem> Gpu<E> {
    /// The fused attention with its scratch memory, for sizes that it takes.
    fn fused(
        &self,
        about: &attend::Attention,
        given: [Heads; 3],
        gradients: Option<[Heads; 3]>,
    ) -> Option<(&Dnn, Block)> {
        let dnn = self.dnn.as_ref().ok().filter(|_| Dnn::takes(about))?;
        // A size that the library refuses goes the other way: what it says is no failure of the card.
        let bytes = self.go(|_| Ok(dnn.prepare(about, given, gradients)))?.ok()?;
        Some((dnn, self.block(bytes.max(1))))
    }

    /// Where queries, keys and values lie.
    fn heads(&self, size: &Attention, x: &Projected<'_, GpuBuf>) -> [Heads; 3] {
        let (q, k, v) = match *x {
            Projected::Fused(x) => (x, x, x),
            Projected::Apart { q, kv } => (q, kv, kv),
            Projected::Three { q, k, v } => (q, k, v),
        };
        let parts = match x {
            Projected::Fused(_) => [(0, 3), (1, 3), (2, 3)],
            Projected::Apart { .. } => [(0, 1), (0, 2), (1, 2)],
            Projected::Three { .. } => [(0, 1); 3],
        };
        placed::<E>(size, [q, k, v], parts)
    }

    pub(super) fn attend(
        &self,
        size: &Attention,
        x: Projected<'_, GpuBuf>,
        y: &mut GpuBuf,
        lse: &mut GpuBuf,
    ) {
        if size.heads == 0 || size.samples == 0 {
            return;
        }
        let (from, about) = (self.heads(size, &x), attention(size));
        let width = size.heads * size.head_dim;
        let y = elems::<E>(y).at(0, size.samples * size.queries * width);
        let into = Heads { at: y, apart: width as u64 };
        let lse = reals(lse).at(0, size.samples * size.heads * size.queries);
        if let Some((dnn, scratch)) = self.fused(&about, from, None) {
            // SAFETY: as `go!`.
            self.timed("attention, fused", |_| unsafe {
                dnn.forward(&about, from, scratch.address(), (y, lse))
            });
            return;
        }
        let scratch = about.scratch(E::REAL);
        let (scores, rounded) = (self.block(scratch.scores), self.block(scratch.rounded));
        let scratch = [scores.address(), rounded.address()];
        go!(self, attention((&self.products, E::REAL), &about, from, scratch, (into, lse)));
    }

    pub(super) fn attend_grad(
        &self,
        size: &Attention,
        x: Projected<'_, GpuBuf>,
        saved: AttentionSaved<'_, GpuBuf>,
        dy: &GpuBuf,
        dx: ProjectedMut<'_, GpuBuf>,
    ) {
        let into = match &dx {
            ProjectedMut::Fused(x) => Projected::Fused(&**x),
            ProjectedMut::Apart { q, kv } => Projected::Apart { q: &**q, kv: &**kv },
            ProjectedMut::Three { q, k, v } => Projected::Three { q: &**q, k: &**k, v: &**v },
        };
        if size.heads == 0 || size.samples == 0 {
            // Nobody asks these keys.
            let all = match dx {
                ProjectedMut::Fused(dx) => vec![dx],
                ProjectedMut::Apart { q, kv } => vec![q, kv],
                ProjectedMut::Three { q, k, v } => vec![q, k, v],
            };
            for buf in all {
                let len = buf.len;
                self.fill(0.0, buf.into(), len);
            }
            return;
        }
        let (from, into, about) = (self.heads(size, &x), self.heads(size, &into), attention(size));
        let len = size.samples * size.queries * size.heads * size.head_dim;
        let [y, dy] = [saved.y, dy].map(|buf| elems::<E>(buf).at(0, len));
        let lse = reals(saved.lse).at(0, size.samples * size.heads * size.queries);
        if let Some((dnn, scratch)) = self.fused(&about, from, Some(into)) {
            // SAFETY: as `go!`.
            self.timed("attention_backward, fused", |_| unsafe {
                dnn.backward(&about, from, (y, dy, lse), scratch.address(), into)
            });
            return;
        }
        let need = about.scratch(E::REAL);
        let scratch = [need.scores, need.scores, need.rounded, need.rounded, need.deltas];
        let scratch = scratch.map(|bytes| self.block(bytes));
        let at = scratch.each_ref().map(Block::address);
        go!(self, attention_backward((&self.products, E::REAL), &about, from, (y, dy, lse), at, into));
    }

    pub(super) fn turn(&self, rotary: &Rotary, first: usize, size: Rows, back: bool, x: &mut GpuBuf) {
        if size.is_empty() {
            return;
        }
        let half = rotary.head_dim / 2;
        // Angles grow with the position: the last row tells tables from each other that lie at the same place one after the other.
        let last = rotary.positions.saturating_sub(1) * half;
        let from = (rotary.cosines.as_ptr(), rotary.cosines.len(), rotary.cosines[last..].to_vec());
        let mut turns = lock(&self.turns);
        if !turns.iter().any(|known| known.from == from) {
            let narrow = |table: &[f64]| table.iter().map(|x| *x as f32).collect::<Vec<_>>();
            let [cosines, sines] = [&rotary.cosines, &rotary.sines].map(|table| self.words(&narrow(table)));
            turns.push(Turns { from: from.clone(), cosines, sines });
        }
        let known = turns.iter().find(|known| known.from == from).expect("it was just put there");
        let about = ops::Rotary {
            cosines: known.cosines.address(),
            sines: known.sines.address(),
            first: small(first % rotary.positions),
            positions: small(rotary.positions),
            rows: small(size.rows),
            heads: small(size.cols / rotary.head_dim),
            head_dim: small(rotary.head_dim),
            stride: small(size.cols),
            back,
        };
        let x = elems::<E>(x).at(0, size.len());
        go!(self, rotary(E::REAL, &about, x));
    }
}

/// Heads in rows of so many parts, of which each has one: of queries, keys and values.
fn placed<E: GpuElem>(size: &Attention, bufs: [&GpuBuf; 3], parts: [(usize, usize); 3]) -> [Heads; 3] {
    let Attention { samples, heads, kv_heads, head_dim, queries, keys, .. } = *size;
    let sizes = [(queries, heads), (keys, kv_heads), (keys, kv_heads)];
    std::array::from_fn(|i| {
        let ((rows, heads), (part, of)) = (sizes[i], parts[i]);
        let width = heads * head_dim;
        let buf = elems::<E>(bufs[i]);
        assert!(samples * rows * of * width <= buf.len, "{size:?} in {buf:?}");
        Heads { at: buf.at(part * width, 0), apart: (of * width) as u64 }
    })
}

fn attention(size: &Attention) -> attend::Attention {
    let dropout = size.dropout.map(|d| attend::AttentionDropout {
        rate: d.rate,
        draws: draws(d.stream),
        first_sample: d.first_sample,
        first_head: d.first_head,
        all_heads: d.all_heads,
    });
    let Attention { samples, heads, kv_heads, head_dim, queries, keys, causal, .. } = *size;
    let [samples, heads, kv_heads, head_dim, queries, keys] =
        [samples, heads, kv_heads, head_dim, queries, keys].map(small);
    attend::Attention { samples, heads, kv_heads, head_dim, queries, keys, causal, dropout }
}
