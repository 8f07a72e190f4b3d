//! bf16 on the host: activations and weights take 16 bits, and everything is computed in f32.
//!
//! A kernel widens what it reads, computes as [`Cpu<f32>`] does, and rounds what it writes, once. Only products go their own way, on
//! processors that multiply bf16 ([`super::pairs`]).

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::memory::{HostBuf, Shelf};
use super::panel::Update;
use super::{Cpu, SMALL, operand, pairs};
use crate::kernels::{
    Activation, AdamW, AdamWState, Attention, AttentionSaved, Branch, BufSlice, Buffer, Classes, Conv,
    Dropout, Gemm, GroupNorm, Images, Kernels, Lookup, NormGrad, NormSaved, NormWeights, Normed, PartMut,
    Projected, ProjectedMut, Rotary, Rows, Sgd, SgdState,
};

/// The processor with bf16 for elements and f32 for reals.
pub struct CpuBf16 {
    real: Cpu<f32>,
    shelf: Arc<Shelf<bf16>>,
    multiplies_pairs: bool,
}

/// Numbers of one kind or the other.
#[derive(Debug)]
pub enum MixedBuf {
    Elems(HostBuf<bf16>),
    Reals(HostBuf<f32>),
}

impl Buffer for MixedBuf {
    fn len(&self) -> usize {
        match self {
            Self::Elems(buf) => buf.len(),
            Self::Reals(buf) => buf.len(),
        }
    }

    fn is_wide(&self) -> bool {
        matches!(self, Self::Reals(_))
    }
}

impl MixedBuf {
    fn elems(&self) -> &HostBuf<bf16> {
        match self {
            Self::Elems(buf) => buf,
            Self::Reals(_) => panic!("reals where a kernel wants elements"),
        }
    }

    fn elems_mut(&mut self) -> &mut HostBuf<bf16> {
        match self {
            Self::Elems(buf) => buf,
            Self::Reals(_) => panic!("reals where a kernel wants elements"),
        }
    }

    fn reals(&self) -> &HostBuf<f32> {
        match self {
            Self::Reals(buf) => buf,
            Self::Elems(_) => panic!("elements where a kernel wants reals"),
        }
    }

    fn reals_mut(&mut self) -> &mut HostBuf<f32> {
        match self {
            Self::Reals(buf) => buf,
            Self::Elems(_) => panic!("elements where a kernel wants reals"),
        }
    }
}

impl CpuBf16 {
    /// Kernels that use `threads` threads, the caller's among them.
    pub fn new(threads: usize) -> Self {
        Self { real: Cpu::new(threads), shelf: Arc::default(), multiplies_pairs: pairs::are_native() }
    }

    /// Without instructions of the processor's own for products of bf16.
    #[cfg(test)]
    pub fn without_pairs(threads: usize) -> Self {
        Self { multiplies_pairs: false, ..Self::new(threads) }
    }

    pub fn threads(&self) -> usize {
        self.real.threads()
    }

    /// Gives memory that no buffer uses back to the system.
    pub fn trim(&self) {
        self.shelf.clear();
        self.real.trim();
    }

    fn widened(&self, x: &[bf16]) -> HostBuf<f32> {
        let mut wide = self.real.take(x.len());
        self.widen(x, &mut wide);
        wide
    }

    fn widen(&self, x: &[bf16], wide: &mut [f32]) {
        let chunk = self.chunk(x.len());
        self.real.threads.each(x.chunks(chunk).zip(wide.chunks_mut(chunk)), |(x, wide)| to_f32(x, wide));
    }

    fn round(&self, wide: &[f32], to: &mut [bf16]) {
        let chunk = self.chunk(wide.len());
        self.real.threads.each(wide.chunks(chunk).zip(to.chunks_mut(chunk)), |(wide, to)| to_bf16(wide, to));
    }

    fn chunk(&self, len: usize) -> usize {
        len.div_ceil(2 * self.real.threads.count()).max(SMALL)
    }

    /// What a kernel of f32 makes of elements, rounded.
    fn make(&self, to: &mut MixedBuf, f: impl FnOnce(&mut HostBuf<f32>)) {
        let mut wide = self.real.take(to.len());
        f(&mut wide);
        self.round(&wide, to.elems_mut());
    }

    /// The same where what is there counts.
    fn change(&self, to: &mut MixedBuf, f: impl FnOnce(&mut HostBuf<f32>)) {
        let mut wide = self.widened(to.elems());
        f(&mut wide);
        self.round(&wide, to.elems_mut());
    }

    /// `len` elements of a weight, widened.
    fn weight(&self, from: BufSlice<'_, MixedBuf>, len: usize) -> HostBuf<f32> {
        self.widened(&from.buf.elems()[from.start..][..len])
    }

    fn projected(&self, x: &Projected<'_, MixedBuf>) -> [Option<HostBuf<f32>>; 3] {
        let wide = |buf: &MixedBuf| Some(self.widened(buf.elems()));
        match x {
            Projected::Fused(x) => [wide(x), None, None],
            Projected::Apart { q, kv } => [wide(q), wide(kv), None],
            Projected::Three { q, k, v } => [wide(q), wide(k), wide(v)],
        }
    }

    /// `c = alpha * a * b + beta * c + bias`.
    fn product(&self, gemm: Gemm<f32>, (a, b): (&[bf16], &[bf16]), bias: Option<&[f32]>, c: &mut [f32]) {
        let Gemm { m, n, k, alpha, beta, .. } = gemm;
        if !self.multiplies_pairs {
            let (a, b) = (self.widened(&a[..m * k]), self.widened(&b[..k * n]));
            let (a, b) = (operand(&a, gemm.a, m, k), operand(&b, gemm.b, k, n));
            return self.real.product(a, b, Update { alpha, beta, bias }, c);
        }
        let (a, b) = (operand(a, gemm.a, m, k), operand(b, gemm.b, k, n));
        if (alpha, bias) == (1.0, None) && (beta == 0.0 || beta == 1.0) {
            return pairs::product(&self.real, a, b, beta == 1.0, c);
        }
        let mut sums = self.real.take(m * n);
        pairs::product(&self.real, a, b, false, &mut sums);
        let rows = SMALL.div_ceil(n.max(1));
        let bands = c.chunks_mut(rows * n.max(1)).zip(sums.chunks(rows * n.max(1)));
        self.real.threads.each(bands, |(c, sums)| {
            for (c, sums) in c.chunks_mut(n).zip(sums.chunks(n)) {
                combine(c, sums, alpha, beta, bias);
            }
        });
    }
}

fn combine(c: &mut [f32], sums: &[f32], alpha: f32, beta: f32, bias: Option<&[f32]>) {
    match bias {
        _ if beta != 0.0 => {
            c.iter_mut().zip(sums).for_each(|(c, sum)| *c = alpha * sum + beta * *c);
            if let Some(bias) = bias {
                c.iter_mut().zip(bias).for_each(|(c, bias)| *c += bias);
            }
        }
        Some(bias) => {
            let sums = sums.iter().zip(bias);
            c.iter_mut().zip(sums).for_each(|(c, (sum, bias))| *c = alpha * sum + bias);
        }
        None => c.iter_mut().zip(sums).for_each(|(c, sum)| *c = alpha * sum),
    }
}

struct Widen<'a>(&'a [bf16], &'a mut [f32]);

impl pulp::WithSimd for Widen<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _: S) {
        for (wide, x) in self.1.iter_mut().zip(self.0) {
            *wide = f32::from_bits(u32::from(x.to_bits()) << 16);
        }
    }
}

fn to_f32(x: &[bf16], wide: &mut [f32]) {
    pulp::Arch::new().dispatch(Widen(x, wide));
}

struct Round<'a>(&'a [f32], &'a mut [bf16]);

impl pulp::WithSimd for Round<'_> {
    type Output = ();

    /// To the nearest, ties to even; NaN stays NaN.
    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _: S) {
        for (to, x) in self.1.iter_mut().zip(self.0) {
            let bits = x.to_bits();
            let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
            let quiet = bits >> 16 | 0x40;
            let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
            *to = bf16::from_bits(if is_nan { quiet } else { rounded } as u16);
        }
    }
}

fn to_bf16(wide: &[f32], to: &mut [bf16]) {
    pulp::Arch::new().dispatch(Round(wide, to));
}

impl Kernels for CpuBf16 {
    type Real = f32;
    type Elem = bf16;
    type Buf = MixedBuf;

    const IS_MIXED: bool = true;

    fn buffer(&self, len: usize) -> MixedBuf {
        MixedBuf::Elems(self.shelf.take(len))
    }

    fn wide(&self, len: usize) -> MixedBuf {
        MixedBuf::Reals(self.real.take(len).wide())
    }

    fn upload(&self, values: &[f32]) -> MixedBuf {
        let mut buf = self.shelf.take(values.len());
        self.round(values, &mut buf);
        MixedBuf::Elems(buf)
    }

    fn download(&self, buf: &MixedBuf) -> Vec<f32> {
        match buf {
            MixedBuf::Elems(buf) => buf.iter().map(|x| x.to_f32()).collect(),
            MixedBuf::Reals(buf) => buf.to_vec(),
        }
    }

    fn elems<'a>(&self, from: BufSlice<'a, MixedBuf>, len: usize) -> Cow<'a, [bf16]> {
        from.buf.elems()[from.start..][..len].into()
    }

    fn reals<'a>(&self, from: BufSlice<'a, MixedBuf>, len: usize) -> Cow<'a, [f32]> {
        from.buf.reals()[from.start..][..len].into()
    }

    fn put_elems(&self, from: &[bf16], to: PartMut<'_, MixedBuf>) {
        to.buf.elems_mut()[to.start..][..from.len()].copy_from_slice(from);
    }

    fn put_reals(&self, from: &[f32], to: PartMut<'_, MixedBuf>) {
        to.buf.reals_mut()[to.start..][..from.len()].copy_from_slice(from);
    }

    fn copy(&self, from: BufSlice<'_, MixedBuf>, to: PartMut<'_, MixedBuf>, len: usize) {
        let (a, b) = (from.start..from.start + len, to.start..to.start + len);
        match (from.buf, to.buf) {
            (MixedBuf::Elems(from), MixedBuf::Elems(to)) => to[b].copy_from_slice(&from[a]),
            (MixedBuf::Reals(from), MixedBuf::Reals(to)) => to[b].copy_from_slice(&from[a]),
            (MixedBuf::Elems(from), MixedBuf::Reals(to)) => self.widen(&from[a], &mut to[b]),
            (MixedBuf::Reals(from), MixedBuf::Elems(to)) => self.round(&from[a], &mut to[b]),
        }
    }

    fn fill(&self, value: f32, to: PartMut<'_, MixedBuf>, len: usize) {
        match to.buf {
            MixedBuf::Elems(buf) => buf[to.start..][..len].fill(bf16::from_f32(value)),
            MixedBuf::Reals(buf) => buf[to.start..][..len].fill(value),
        }
    }

    fn gemm(
        &self,
        gemm: Gemm<f32>,
        a: BufSlice<'_, MixedBuf>,
        b: BufSlice<'_, MixedBuf>,
        bias: Option<BufSlice<'_, MixedBuf>>,
        c: PartMut<'_, MixedBuf>,
    ) {
        let Gemm { m, n, beta, .. } = gemm;
        let operands = (&a.buf.elems()[a.start..], &b.buf.elems()[b.start..]);
        let bias = bias.map(|bias| self.weight(bias, n));
        let bias = bias.as_deref();
        match c.buf {
            MixedBuf::Reals(buf) => self.product(gemm, operands, bias, &mut buf[c.start..][..m * n]),
            MixedBuf::Elems(buf) => {
                let c = &mut buf[c.start..][..m * n];
                let mut wide = if beta == 0.0 { self.real.take(m * n) } else { self.widened(c) };
                self.product(gemm, operands, bias, &mut wide);
                self.round(&wide, c);
            }
        }
    }

    fn add(&self, x: BufSlice<'_, MixedBuf>, y: PartMut<'_, MixedBuf>, len: usize) {
        let (a, b) = (x.start..x.start + len, y.start..y.start + len);
        match (x.buf, y.buf) {
            (MixedBuf::Reals(x), MixedBuf::Reals(y)) => self.real.add_into(&x[a], &mut y[b]),
            (MixedBuf::Elems(x), MixedBuf::Elems(y)) => {
                let chunk = self.chunk(len);
                self.real.threads.each(x[a].chunks(chunk).zip(y[b].chunks_mut(chunk)), |(x, y)| {
                    for (x, y) in x.chunks(PIECE).zip(y.chunks_mut(PIECE)) {
                        let (mut wide, mut sum) = ([0.0; PIECE], [0.0; PIECE]);
                        let (wide, sum) = (&mut wide[..x.len()], &mut sum[..x.len()]);
                        to_f32(x, wide);
                        to_f32(y, sum);
                        sum.iter_mut().zip(wide).for_each(|(sum, x)| *sum += *x);
                        to_bf16(sum, y);
                    }
                });
            }
            (x, y) => panic!("{x:?} is added to {y:?}"),
        }
    }

    fn sum_rows(&self, size: Rows, x: &MixedBuf, sums: PartMut<'_, MixedBuf>) {
        let x = self.widened(x.elems());
        self.real.sum_of_rows(size, &x, &mut sums.buf.reals_mut()[sums.start..]);
    }

    fn residual(&self, size: Rows, x: &MixedBuf, branch: Branch<'_, MixedBuf>, y: &mut MixedBuf) {
        let (x, of_branch) = (self.widened(x.elems()), self.widened(branch.x.elems()));
        let bias = branch.bias.map(|bias| self.weight(bias, size.cols));
        let bias = bias.as_ref().map(BufSlice::from);
        let branch = Branch { x: &of_branch, bias, dropout: branch.dropout };
        self.make(y, |y| self.real.residual(size, &x, branch, y));
    }

    fn dropout(&self, dropout: &Dropout, x: &MixedBuf, y: &mut MixedBuf) {
        let x = self.widened(x.elems());
        self.make(y, |y| self.real.dropout(dropout, &x, y));
    }

    fn activate(&self, activation: Activation, x: &MixedBuf, y: &mut MixedBuf) {
        let x = self.widened(x.elems());
        self.make(y, |y| self.real.activate(activation, &x, y));
    }

    fn activate_grad(&self, activation: Activation, x: &MixedBuf, dy: &mut MixedBuf) {
        let x = self.widened(x.elems());
        self.change(dy, |dy| self.real.activate_grad(activation, &x, dy));
    }

    fn gate(&self, activation: Activation, gate: &MixedBuf, up: &MixedBuf, y: &mut MixedBuf) {
        let (gate, up) = (self.widened(gate.elems()), self.widened(up.elems()));
        self.make(y, |y| self.real.gate(activation, &gate, &up, y));
    }

    fn gate_grad(
        &self,
        activation: Activation,
        gate: &MixedBuf,
        up: &MixedBuf,
        dy: &mut MixedBuf,
        d_gate: &mut MixedBuf,
    ) {
        let (gate, up) = (self.widened(gate.elems()), self.widened(up.elems()));
        self.change(dy, |dy| {
            self.make(d_gate, |d_gate| self.real.gate_grad(activation, &gate, &up, dy, d_gate));
        });
    }

    fn layer_norm(
        &self,
        size: Rows,
        x: &MixedBuf,
        weights: NormWeights<'_, MixedBuf>,
        out: Normed<'_, MixedBuf>,
    ) {
        let x = self.widened(x.elems());
        let [gamma, beta] = [weights.gamma, weights.beta].map(|w| self.weight(w, size.cols));
        let weights = NormWeights { gamma: (&gamma).into(), beta: (&beta).into(), epsilon: weights.epsilon };
        let stats = out.stats.reals_mut();
        self.make(out.y, |y| self.real.layer_norm(size, &x, weights, Normed { y, stats }));
    }

    fn layer_norm_grad(
        &self,
        size: Rows,
        saved: NormSaved<'_, MixedBuf>,
        dy: &MixedBuf,
        out: NormGrad<'_, MixedBuf>,
    ) {
        self.norm_grad(size.cols, saved, dy, out, |saved, dy, out| {
            self.real.layer_norm_grad(size, saved, dy, out);
        });
    }

    fn group_norm(
        &self,
        size: GroupNorm,
        x: &MixedBuf,
        weights: NormWeights<'_, MixedBuf>,
        out: Normed<'_, MixedBuf>,
    ) {
        let x = self.widened(x.elems());
        let [gamma, beta] = [weights.gamma, weights.beta].map(|w| self.weight(w, size.channels));
        let weights = NormWeights { gamma: (&gamma).into(), beta: (&beta).into(), epsilon: weights.epsilon };
        let stats = out.stats.reals_mut();
        self.make(out.y, |y| self.real.group_norm(size, &x, weights, Normed { y, stats }));
    }

    fn group_norm_grad(
        &self,
        size: GroupNorm,
        saved: NormSaved<'_, MixedBuf>,
        dy: &MixedBuf,
        out: NormGrad<'_, MixedBuf>,
    ) {
        self.norm_grad(size.channels, saved, dy, out, |saved, dy, out| {
            self.real.group_norm_grad(size, saved, dy, out);
        });
    }

    fn rms_norm(
        &self,
        size: Rows,
        x: &MixedBuf,
        gamma: BufSlice<'_, MixedBuf>,
        epsilon: f64,
        out: Normed<'_, MixedBuf>,
    ) {
        let (x, gamma) = (self.widened(x.elems()), self.weight(gamma, size.cols));
        let stats = out.stats.reals_mut();
        self.make(out.y, |y| {
            self.real.rms_norm(size, &x, (&gamma).into(), epsilon, Normed { y, stats });
        });
    }

    fn rms_norm_grad(
        &self,
        size: Rows,
        saved: NormSaved<'_, MixedBuf>,
        dy: &MixedBuf,
        out: NormGrad<'_, MixedBuf>,
    ) {
        self.norm_grad(size.cols, saved, dy, out, |saved, dy, out| {
            self.real.rms_norm_grad(size, saved, dy, out);
        });
    }

    fn lookup(&self, lookup: &Lookup<'_>, table: BufSlice<'_, MixedBuf>, add: bool, y: &mut MixedBuf) {
        let (table, cols) = (&table.buf.elems()[table.start..], lookup.cols);
        let chunk = SMALL.div_ceil(cols.max(1)) * cols.max(1);
        let rows = y.elems_mut().chunks_mut(chunk).zip(lookup.ids.chunks(chunk / cols.max(1)));
        self.real.threads.each(rows, |(y, ids)| {
            for (y, &id) in y.chunks_exact_mut(cols).zip(ids) {
                let row = usize::try_from(id).ok().filter(|id| lookup.held.contains(id));
                let row = row.map(|id| &table[(id - lookup.held.start) * cols..][..cols]);
                match (row, add) {
                    (Some(row), false) => y.copy_from_slice(row),
                    (None, false) => y.fill(bf16::ZERO),
                    (Some(row), true) => {
                        let sum = |y: &bf16, x: &bf16| bf16::from_f32(y.to_f32() + x.to_f32());
                        y.iter_mut().zip(row).for_each(|(y, x)| *y = sum(y, x));
                    }
                    (None, true) => {}
                }
            }
        });
    }

    fn lookup_grad(&self, lookup: &Lookup<'_>, dy: &MixedBuf, table: PartMut<'_, MixedBuf>) {
        let dy = self.widened(dy.elems());
        self.real.look_up_grad(lookup, &dy, &mut table.buf.reals_mut()[table.start..]);
    }

    fn attention(&self, size: &Attention, x: Projected<'_, MixedBuf>, y: &mut MixedBuf, lse: &mut MixedBuf) {
        let wide = self.projected(&x);
        self.make(y, |y| self.real.attention(size, borrowed(&wide), y, lse.reals_mut()));
    }

    fn attention_grad(
        &self,
        size: &Attention,
        x: Projected<'_, MixedBuf>,
        saved: AttentionSaved<'_, MixedBuf>,
        dy: &MixedBuf,
        dx: ProjectedMut<'_, MixedBuf>,
    ) {
        let wide = self.projected(&x);
        let (y, dy) = (self.widened(saved.y.elems()), self.widened(dy.elems()));
        let saved = AttentionSaved { y: &y, lse: saved.lse.reals() };
        let room = |buf: &MixedBuf| self.real.take(buf.len());
        match dx {
            ProjectedMut::Fused(to) => {
                self.make(to, |d| {
                    self.real.attention_grad(size, borrowed(&wide), saved, &dy, ProjectedMut::Fused(d));
                });
            }
            ProjectedMut::Apart { q, kv } => {
                let (mut dq, mut dkv) = (room(q), room(kv));
                let d = ProjectedMut::Apart { q: &mut dq, kv: &mut dkv };
                self.real.attention_grad(size, borrowed(&wide), saved, &dy, d);
                self.round(&dq, q.elems_mut());
                self.round(&dkv, kv.elems_mut());
            }
            ProjectedMut::Three { q, k, v } => {
                let (mut dq, mut dk, mut dv) = (room(q), room(k), room(v));
                let d = ProjectedMut::Three { q: &mut dq, k: &mut dk, v: &mut dv };
                self.real.attention_grad(size, borrowed(&wide), saved, &dy, d);
                self.round(&dq, q.elems_mut());
                self.round(&dk, k.elems_mut());
                self.round(&dv, v.elems_mut());
            }
        }
    }

    fn rotate(&self, rotary: &Rotary, first: usize, size: Rows, back: bool, x: &mut MixedBuf) {
        self.change(x, |x| self.real.rotate(rotary, first, size, back, x));
    }

    fn row_max(&self, size: Rows, x: &MixedBuf, max: &mut MixedBuf) {
        let x = self.widened(x.elems());
        self.real.row_max(size, &x, max.reals_mut());
    }

    fn exp_sums(&self, classes: &Classes<'_>, max: &MixedBuf, logits: &mut MixedBuf, sums: &mut MixedBuf) {
        self.change(logits, |logits| {
            self.real.exp_sums(classes, max.reals(), logits, sums.reals_mut());
        });
    }

    fn cross_entropy(&self, rows: usize, sums: &MixedBuf) -> f64 {
        self.real.cross_entropy(rows, sums.reals())
    }

    fn cross_entropy_grad(&self, classes: &Classes<'_>, sums: &MixedBuf, scale: f64, exps: &mut MixedBuf) {
        self.change(exps, |exps| self.real.cross_entropy_grad(classes, sums.reals(), scale, exps));
    }

    fn squared_error(&self, x: &MixedBuf, target: &MixedBuf) -> f64 {
        let [x, target] = [x, target].map(|buf| self.widened(buf.elems()));
        self.real.squared_error(&x, &target)
    }

    fn squared_error_grad(&self, x: &MixedBuf, target: &MixedBuf, scale: f64, dx: &mut MixedBuf) {
        let [x, target] = [x, target].map(|buf| self.widened(buf.elems()));
        self.make(dx, |dx| self.real.squared_error_grad(&x, &target, scale, dx));
    }

    fn patches(&self, conv: &Conv, first: usize, x: &MixedBuf, y: &mut MixedBuf) {
        let x = self.widened(x.elems());
        self.make(y, |y| self.real.patches(conv, first, &x, y));
    }

    fn patches_grad(&self, conv: &Conv, first: usize, dy: &MixedBuf, dx: &mut MixedBuf) {
        let dy = self.widened(dy.elems());
        self.change(dx, |dx| self.real.patches_grad(conv, first, &dy, dx));
    }

    fn upsample(&self, from: Images, x: &MixedBuf, y: &mut MixedBuf) {
        let x = self.widened(x.elems());
        self.make(y, |y| self.real.upsample(from, &x, y));
    }

    fn upsample_grad(&self, from: Images, dy: &MixedBuf, dx: &mut MixedBuf) {
        let dy = self.widened(dy.elems());
        self.make(dx, |dx| self.real.upsample_grad(from, &dy, dx));
    }

    fn concat(&self, a: (&MixedBuf, usize), b: (&MixedBuf, usize), y: &mut MixedBuf) {
        let [left, right] = [a.0, b.0].map(|buf| self.widened(buf.elems()));
        self.make(y, |y| self.real.concat((&left, a.1), (&right, b.1), y));
    }

    fn split(&self, y: &MixedBuf, a: (&mut MixedBuf, usize), b: (&mut MixedBuf, usize)) {
        let y = self.widened(y.elems());
        self.make(a.0, |left| self.make(b.0, |right| self.real.split(&y, (left, a.1), (right, b.1))));
    }

    fn add_per_sample(&self, pixels: usize, size: Rows, e: &MixedBuf, x: &mut MixedBuf) {
        let e = self.widened(e.elems());
        self.change(x, |x| self.real.add_per_sample(pixels, size, &e, x));
    }

    fn add_per_sample_grad(&self, pixels: usize, size: Rows, dx: &MixedBuf, de: &mut MixedBuf) {
        let dx = self.widened(dx.elems());
        self.make(de, |de| self.real.add_per_sample_grad(pixels, size, &dx, de));
    }

    fn time_waves(&self, steps: &[i32], dim: usize, y: &mut MixedBuf) {
        self.make(y, |y| self.real.time_waves(steps, dim, y));
    }

    fn adamw(&self, step: &AdamW, run: Range<usize>, state: AdamWState<'_, MixedBuf>) {
        let AdamWState { params, rounded, grads, first, second } = state;
        let start = params.start;
        let masters = params.buf.reals_mut();
        let state = AdamWState {
            params: PartMut { buf: masters, start },
            rounded: None,
            grads: BufSlice { buf: grads.buf.reals(), start: grads.start },
            first: PartMut { buf: first.buf.reals_mut(), start: first.start },
            second: PartMut { buf: second.buf.reals_mut(), start: second.start },
        };
        self.real.adamw(step, run.clone(), state);
        self.copy_back(&masters[start..][run.clone()], rounded, run);
    }

    fn sgd(&self, step: &Sgd, run: Range<usize>, state: SgdState<'_, MixedBuf>) {
        let SgdState { params, rounded, grads, velocity } = state;
        let start = params.start;
        let masters = params.buf.reals_mut();
        let state = SgdState {
            params: PartMut { buf: masters, start },
            rounded: None,
            grads: BufSlice { buf: grads.buf.reals(), start: grads.start },
            velocity: PartMut { buf: velocity.buf.reals_mut(), start: velocity.start },
        };
        self.real.sgd(step, run.clone(), state);
        self.copy_back(&masters[start..][run.clone()], rounded, run);
    }

    fn sum_squares(&self, x: &MixedBuf, runs: &[Range<usize>]) -> f64 {
        self.real.sum_squares(x.reals(), runs)
    }
}

/// Elements that are widened together on a thread's stack.
const PIECE: usize = 1 << 10;

/// As many as there are, in the order that [`CpuBf16::projected`] has them in.
fn borrowed(wide: &[Option<HostBuf<f32>>; 3]) -> Projected<'_, HostBuf<f32>> {
    match wide {
        [Some(q), Some(k), Some(v)] => Projected::Three { q, k, v },
        [Some(q), Some(kv), None] => Projected::Apart { q, kv },
        [Some(x), ..] => Projected::Fused(x),
        [None, ..] => unreachable!("queries are somewhere"),
    }
}

impl CpuBf16 {
    fn norm_grad(
        &self,
        cols: usize,
        saved: NormSaved<'_, MixedBuf>,
        dy: &MixedBuf,
        out: NormGrad<'_, MixedBuf>,
        f: impl FnOnce(NormSaved<'_, HostBuf<f32>>, &HostBuf<f32>, NormGrad<'_, HostBuf<f32>>),
    ) {
        let (x, dy, gamma) =
            (self.widened(saved.x.elems()), self.widened(dy.elems()), self.weight(saved.gamma, cols));
        let residual = out.residual.map(|residual| self.widened(residual.elems()));
        let saved = NormSaved { x: &x, stats: saved.stats.reals(), gamma: (&gamma).into() };
        let sums = out.sums.reals_mut();
        self.make(out.dx, |dx| f(saved, &dy, NormGrad { residual: residual.as_ref(), dx, sums }));
    }

    /// Weights from their masters.
    fn copy_back(&self, masters: &[f32], rounded: Option<PartMut<'_, MixedBuf>>, run: Range<usize>) {
        if let Some(to) = rounded {
            self.round(masters, &mut to.buf.elems_mut()[to.start..][run]);
        }
    }
}
