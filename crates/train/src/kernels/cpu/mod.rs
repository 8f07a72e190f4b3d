//! The host's processor.
//!
//! [`Cpu`] has a given number of threads and a [`memory::Shelf`] of buffers. The matrix product is our own ([`gemm`], [`panel`]): packed
//! panels and a tile of sums in registers, in safe code on vector lanes. Everything else is plain loops that the compiler turns into vector instructions
//! of the machine it finds itself on ([`simd`]). Results do not depend on the number of threads.

mod attention;
mod elementwise;
mod gemm;
mod image;
pub mod memory;
mod mixed;
mod norm;
mod pairs;
mod panel;
mod simd;
mod table;
mod threads;
mod tile;
mod update;

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

pub use memory::HostBuf;
use memory::Shelf;
pub use mixed::{CpuBf16, MixedBuf};
use panel::{Update, View};
pub use threads::MOST_THREADS;
use threads::Threads;

use super::scalar::Scalar;
use super::{
    Activation, AdamW, AdamWState, Attention, AttentionSaved, Branch, BufSlice, Classes, Conv, Dropout, Gemm,
    GroupNorm, Images, Kernels, Lookup, NormGrad, NormSaved, NormWeights, Normed, Order, PartMut, Projected,
    ProjectedMut, Rotary, Rows, Sgd, SgdState,
};

/// The processor, with a number of threads and buffers to use again.
pub struct Cpu<T: Scalar> {
    threads: Threads,
    shelf: Arc<Shelf<T>>,
}

/// Fewer elements than this are not worth another thread.
const SMALL: usize = 1 << 13;

impl<T: Scalar> Cpu<T> {
    /// Kernels that use `threads` threads, the caller's among them.
    pub fn new(threads: usize) -> Self {
        Self { threads: Threads::new(threads), shelf: Arc::default() }
    }

    pub fn threads(&self) -> usize {
        self.threads.count()
    }

    /// Gives memory that no buffer uses back to the system.
    pub fn trim(&self) {
        self.shelf.clear();
    }

    /// Bytes that wait for their next user.
    pub fn idle_bytes(&self) -> u64 {
        (self.shelf.free_elements() * size_of::<T>()) as u64
    }

    fn take(&self, len: usize) -> HostBuf<T> {
        self.shelf.take(len)
    }

    /// How many elements of `len` make one job.
    fn chunk(&self, len: usize) -> usize {
        len.div_ceil(2 * self.threads.count()).max(SMALL)
    }
}

fn at<'a, T>(part: BufSlice<'a, HostBuf<T>>) -> &'a [T] {
    &part.buf[part.start..]
}

fn at_mut<'a, T>(part: PartMut<'a, HostBuf<T>>) -> &'a mut [T] {
    &mut part.buf[part.start..]
}

/// An operand as the product sees it.
fn operand<T>(data: &[T], order: Order, rows: usize, cols: usize) -> View<'_, T> {
    match order {
        Order::Plain => View::rows_of(&data[..rows * cols], rows, cols, cols),
        Order::Transposed => View::rows_of(&data[..rows * cols], cols, rows, rows).transposed(),
    }
}

impl<T: Scalar> Kernels for Cpu<T> {
    type Real = T;
    type Elem = T;
    type Buf = HostBuf<T>;

    const IS_MIXED: bool = false;

    fn buffer(&self, len: usize) -> HostBuf<T> {
        self.take(len)
    }

    fn wide(&self, len: usize) -> HostBuf<T> {
        self.take(len).wide()
    }

    fn upload(&self, values: &[T]) -> HostBuf<T> {
        let mut buf = self.take(values.len());
        buf.copy_from_slice(values);
        buf
    }

    fn download(&self, buf: &HostBuf<T>) -> Vec<T> {
        buf.to_vec()
    }

    fn elems<'a>(&self, from: BufSlice<'a, HostBuf<T>>, len: usize) -> Cow<'a, [T]> {
        at(from)[..len].into()
    }

    fn reals<'a>(&self, from: BufSlice<'a, HostBuf<T>>, len: usize) -> Cow<'a, [T]> {
        at(from)[..len].into()
    }

    fn put_elems(&self, from: &[T], to: PartMut<'_, HostBuf<T>>) {
        at_mut(to)[..from.len()].copy_from_slice(from);
    }

    fn put_reals(&self, from: &[T], to: PartMut<'_, HostBuf<T>>) {
        at_mut(to)[..from.len()].copy_from_slice(from);
    }

    fn copy(&self, from: BufSlice<'_, HostBuf<T>>, to: PartMut<'_, HostBuf<T>>, len: usize) {
        at_mut(to)[..len].copy_from_slice(&at(from)[..len]);
    }

    fn fill(&self, value: T, to: PartMut<'_, HostBuf<T>>, len: usize) {
        at_mut(to)[..len].fill(value);
    }

    fn gemm(
        &self,
        gemm: Gemm<T>,
        a: BufSlice<'_, HostBuf<T>>,
        b: BufSlice<'_, HostBuf<T>>,
        bias: Option<BufSlice<'_, HostBuf<T>>>,
        c: PartMut<'_, HostBuf<T>>,
    ) {
        let Gemm { m, n, k, alpha, beta, .. } = gemm;
        let bias = bias.map(|bias| &at(bias)[..n]);
        let (a, b) = (operand(at(a), gemm.a, m, k), operand(at(b), gemm.b, k, n));
        self.product(a, b, Update { alpha, beta, bias }, &mut at_mut(c)[..m * n]);
    }

    fn add(&self, x: BufSlice<'_, HostBuf<T>>, y: PartMut<'_, HostBuf<T>>, len: usize) {
        self.add_into(&at(x)[..len], &mut at_mut(y)[..len]);
    }

    fn sum_rows(&self, size: Rows, x: &HostBuf<T>, sums: PartMut<'_, HostBuf<T>>) {
        self.sum_of_rows(size, x, at_mut(sums));
    }

    fn residual(&self, size: Rows, x: &HostBuf<T>, branch: Branch<'_, HostBuf<T>>, y: &mut HostBuf<T>) {
        self.join_branch(size, x, branch, y);
    }

    fn dropout(&self, dropout: &Dropout, x: &HostBuf<T>, y: &mut HostBuf<T>) {
        self.drop_out(dropout, x, y);
    }

    fn activate(&self, activation: Activation, x: &HostBuf<T>, y: &mut HostBuf<T>) {
        self.activation(activation, x, y);
    }

    fn activate_grad(&self, activation: Activation, x: &HostBuf<T>, dy: &mut HostBuf<T>) {
        self.activation_grad(activation, x, dy);
    }

    fn gate(&self, activation: Activation, gate: &HostBuf<T>, up: &HostBuf<T>, y: &mut HostBuf<T>) {
        self.gated(activation, gate, up, y);
    }

    fn gate_grad(
        &self,
        activation: Activation,
        gate: &HostBuf<T>,
        up: &HostBuf<T>,
        dy: &mut HostBuf<T>,
        d_gate: &mut HostBuf<T>,
    ) {
        self.gated_grad(activation, gate, up, dy, d_gate);
    }

    fn rms_norm(
        &self,
        size: Rows,
        x: &HostBuf<T>,
        gamma: BufSlice<'_, HostBuf<T>>,
        epsilon: f64,
        out: Normed<'_, HostBuf<T>>,
    ) {
        self.rms_rows(size, x, &at(gamma)[..size.cols], epsilon, out);
    }

    fn rms_norm_grad(
        &self,
        size: Rows,
        saved: NormSaved<'_, HostBuf<T>>,
        dy: &HostBuf<T>,
        out: NormGrad<'_, HostBuf<T>>,
    ) {
        self.rms_rows_grad(size, saved, dy, out);
    }

    fn layer_norm(
        &self,
        size: Rows,
        x: &HostBuf<T>,
        weights: NormWeights<'_, HostBuf<T>>,
        out: Normed<'_, HostBuf<T>>,
    ) {
        self.norm_rows(size, x, weights, out);
    }

    fn layer_norm_grad(
        &self,
        size: Rows,
        saved: NormSaved<'_, HostBuf<T>>,
        dy: &HostBuf<T>,
        out: NormGrad<'_, HostBuf<T>>,
    ) {
        self.norm_rows_grad(size, saved, dy, out);
    }

    fn group_norm(
        &self,
        size: GroupNorm,
        x: &HostBuf<T>,
        weights: NormWeights<'_, HostBuf<T>>,
        out: Normed<'_, HostBuf<T>>,
    ) {
        self.norm_groups(size, x, weights, out);
    }

    fn group_norm_grad(
        &self,
        size: GroupNorm,
        saved: NormSaved<'_, HostBuf<T>>,
        dy: &HostBuf<T>,
        out: NormGrad<'_, HostBuf<T>>,
    ) {
        self.norm_groups_grad(size, saved, dy, out);
    }

    fn lookup(&self, lookup: &Lookup<'_>, table: BufSlice<'_, HostBuf<T>>, add: bool, y: &mut HostBuf<T>) {
        self.look_up(lookup, at(table), add, y);
    }

    fn lookup_grad(&self, lookup: &Lookup<'_>, dy: &HostBuf<T>, table: PartMut<'_, HostBuf<T>>) {
        self.look_up_grad(lookup, dy, at_mut(table));
    }

    fn attention(
        &self,
        size: &Attention,
        x: Projected<'_, HostBuf<T>>,
        y: &mut HostBuf<T>,
        lse: &mut HostBuf<T>,
    ) {
        self.attend(size, x, y, lse);
    }

    fn attention_grad(
        &self,
        size: &Attention,
        x: Projected<'_, HostBuf<T>>,
        saved: AttentionSaved<'_, HostBuf<T>>,
        dy: &HostBuf<T>,
        dx: ProjectedMut<'_, HostBuf<T>>,
    ) {
        self.attend_grad(size, x, saved, dy, dx);
    }

    fn rotate(&self, rotary: &Rotary, first: usize, size: Rows, back: bool, x: &mut HostBuf<T>) {
        self.rotate_rows(rotary, first, size, back, x);
    }

    fn row_max(&self, size: Rows, x: &HostBuf<T>, max: &mut HostBuf<T>) {
        self.max_of_rows(size, x, max);
    }

    fn exp_sums(
        &self,
        classes: &Classes<'_>,
        max: &HostBuf<T>,
        logits: &mut HostBuf<T>,
        sums: &mut HostBuf<T>,
    ) {
        self.exponentials(classes, max, logits, sums);
    }

    fn cross_entropy(&self, rows: usize, sums: &HostBuf<T>) -> f64 {
        let (totals, targets) = sums.split_at(rows);
        totals.iter().zip(targets).map(|(&total, &target)| (total.ln() - target).to_f64()).sum()
    }

    fn cross_entropy_grad(
        &self,
        classes: &Classes<'_>,
        sums: &HostBuf<T>,
        scale: f64,
        exps: &mut HostBuf<T>,
    ) {
        self.exponentials_grad(classes, sums, scale, exps);
    }

    fn squared_error(&self, x: &HostBuf<T>, target: &HostBuf<T>) -> f64 {
        self.squared_differences(x, target)
    }

    fn squared_error_grad(&self, x: &HostBuf<T>, target: &HostBuf<T>, scale: f64, dx: &mut HostBuf<T>) {
        self.differences(x, target, scale, dx);
    }

    fn patches(&self, conv: &Conv, first: usize, x: &HostBuf<T>, y: &mut HostBuf<T>) {
        self.gather_patches(conv, first, x, y);
    }

    fn patches_grad(&self, conv: &Conv, first: usize, dy: &HostBuf<T>, dx: &mut HostBuf<T>) {
        self.scatter_patches(conv, first, dy, dx);
    }

    fn upsample(&self, from: Images, x: &HostBuf<T>, y: &mut HostBuf<T>) {
        self.double_pixels(from, x, y);
    }

    fn upsample_grad(&self, from: Images, dy: &HostBuf<T>, dx: &mut HostBuf<T>) {
        self.sum_pixels(from, dy, dx);
    }

    fn concat(&self, a: (&HostBuf<T>, usize), b: (&HostBuf<T>, usize), y: &mut HostBuf<T>) {
        self.join_columns((a.0, a.1), (b.0, b.1), y);
    }

    fn split(&self, y: &HostBuf<T>, a: (&mut HostBuf<T>, usize), b: (&mut HostBuf<T>, usize)) {
        self.split_columns(y, (a.0, a.1), (b.0, b.1));
    }

    fn add_per_sample(&self, pixels: usize, size: Rows, e: &HostBuf<T>, x: &mut HostBuf<T>) {
        self.add_to_samples(pixels, size, e, x);
    }

    fn add_per_sample_grad(&self, pixels: usize, size: Rows, dx: &HostBuf<T>, de: &mut HostBuf<T>) {
        self.sum_samples(pixels, size, dx, de);
    }

    fn time_waves(&self, steps: &[i32], dim: usize, y: &mut HostBuf<T>) {
        image::time_waves(steps, dim, y);
    }

    fn adamw(&self, step: &AdamW, run: Range<usize>, state: AdamWState<'_, HostBuf<T>>) {
        self.adamw_run(step, run, state);
    }

    fn sgd(&self, step: &Sgd, run: Range<usize>, state: SgdState<'_, HostBuf<T>>) {
        self.sgd_run(step, run, state);
    }

    fn sum_squares(&self, x: &HostBuf<T>, runs: &[Range<usize>]) -> f64 {
        runs.iter().map(|run| self.squares(&x[run.clone()])).sum()
    }
}
