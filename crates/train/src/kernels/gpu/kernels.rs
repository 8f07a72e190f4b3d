//! What models call: sizes and buffers are checked here, and become addresses.

use std::borrow::Cow;
use std::ops::Range;

use crossmesh_cuda::cuda::lt::{Epilogue, Product};
use crossmesh_cuda::cuda::ops::{self, Norm, Real, Tables, sort_ids};
use half::bf16;

use super::buffers::{GpuBuf, GpuElem, elems, reals};
use super::calls::{go, of_product};
use super::fuse::Waiting;
use super::{Gpu, activation, draws, rows, small};
use crate::kernels::{
    Activation, AdamW, AdamWState, Attention, AttentionSaved, Branch, BufSlice, Classes, Conv, DeviceError,
    Dropout, Gemm, GroupNorm, Images, Kernels, Lookup, NormGrad, NormSaved, NormWeights, Normed, Order,
    PartMut, Projected, ProjectedMut, Rotary, Rows, Sgd, SgdState,
};

impl<E: GpuElem> Kernels for Gpu<E> {
    type Real = f32;
    type Elem = E;
    type Buf = GpuBuf;

    const IS_MIXED: bool = size_of::<E>() < size_of::<f32>();

    fn buffer(&self, len: usize) -> GpuBuf {
        self.take(len, E::REAL, false)
    }

    fn wide(&self, len: usize) -> GpuBuf {
        self.take(len, Real::F32, true)
    }

    fn upload(&self, values: &[f32]) -> GpuBuf {
        let buf = self.buffer(values.len());
        let rounded: Vec<E> = values.iter().map(|x| E::of(*x)).collect();
        self.write(bytemuck::cast_slice(&rounded), buf.all());
        buf
    }

    fn download(&self, buf: &GpuBuf) -> Vec<f32> {
        match buf.real {
            Real::F32 => self.read(buf.all(), buf.len),
            Real::Bf16 => self.read::<E>(elems::<E>(buf).all(), buf.len).into_iter().map(E::value).collect(),
        }
    }

    fn elems<'a>(&self, from: BufSlice<'a, GpuBuf>, len: usize) -> Cow<'a, [E]> {
        self.read(elems::<E>(from.buf).at(from.start, len), len).into()
    }

    fn reals<'a>(&self, from: BufSlice<'a, GpuBuf>, len: usize) -> Cow<'a, [f32]> {
        self.read(reals(from.buf).at(from.start, len), len).into()
    }

    fn put_elems(&self, from: &[E], to: PartMut<'_, GpuBuf>) {
        self.write(bytemuck::cast_slice(from), elems::<E>(to.buf).at(to.start, from.len()));
    }

    fn put_reals(&self, from: &[f32], to: PartMut<'_, GpuBuf>) {
        self.write(bytemuck::cast_slice(from), reals(to.buf).at(to.start, from.len()));
    }

    fn copy(&self, from: BufSlice<'_, GpuBuf>, to: PartMut<'_, GpuBuf>, len: usize) {
        if len == 0 {
            return;
        }
        let (a, b, n) = (from.buf.at(from.start, len), to.buf.at(to.start, len), len as u64);
        match (from.buf.real, to.buf.real) {
            (Real::F32, Real::Bf16) => go!(self, to_bf16(a, n, b)),
            (Real::Bf16, Real::F32) => go!(self, to_f32(a, n, b)),
            (real, _) => go!(self, copy(a, n * real.bytes(), b)),
        };
    }

    fn fill(&self, value: f32, to: PartMut<'_, GpuBuf>, len: usize) {
        if len == 0 {
            return;
        }
        let at = to.buf.at(to.start, len);
        match to.buf.real {
            Real::F32 => go!(self, fill_32(value.to_bits(), len as u64, at)),
            Real::Bf16 => go!(self, fill_16(bf16::from_f32(value).to_bits(), len as u64, at)),
        };
    }

    fn finish(&self) -> Result<(), DeviceError> {
        self.settle();
        Ok(self.failure.check()?)
    }

    fn gemm(
        &self,
        gemm: Gemm<f32>,
        a: BufSlice<'_, GpuBuf>,
        b: BufSlice<'_, GpuBuf>,
        bias: Option<BufSlice<'_, GpuBuf>>,
        c: PartMut<'_, GpuBuf>,
    ) {
        let Gemm { m, n, k, alpha, beta, .. } = gemm;
        let (a, b, into) = (self.weight(a, m * k), self.weight(b, k * n), c.buf.at(c.start, m * n));
        let result = c.buf.real;
        assert!(bias.is_none() || result == E::REAL, "a bias of elements on a result of reals");
        let bias = bias.map(|bias| self.weight(bias, n));
        // The library reads biases in vectors.
        let (inside, behind) = match bias {
            Some(bias) if bias.is_multiple_of(16) => (Epilogue::Bias { bias }, None),
            other => (Epilogue::None, other),
        };
        let product = Product {
            a_transposed: gemm.a == Order::Transposed,
            b_transposed: gemm.b == Order::Transposed,
            alpha,
            beta,
            result,
            epilogue: inside,
            ..Product::new(m as u64, n as u64, k as u64, E::REAL)
        };
        if let Some(call) = Waiting::product(product, (a, b), into).filter(|_| behind.is_none()) {
            return self.wait(call);
        }
        // SAFETY: operands as large as the sizes say; as `go!`.
        self.timed(of_product(&product), |queue| unsafe {
            self.products.multiply_any(queue, &product, (a, b), into)
        });
        if let Some(bias) = behind {
            go!(self, add_bias(result, rows(Rows { rows: m, cols: n }), bias, into));
        }
    }

    fn add(&self, x: BufSlice<'_, GpuBuf>, y: PartMut<'_, GpuBuf>, len: usize) {
        assert_eq!(x.buf.real, y.buf.real, "{:?} is added to {:?}", x.buf, y.buf);
        go!(self, add(x.buf.real, x.buf.at(x.start, len), len as u64, y.buf.at(y.start, len)));
    }

    fn sum_rows(&self, size: Rows, x: &GpuBuf, sums: PartMut<'_, GpuBuf>) {
        let (x, sums) = (elems::<E>(x).at(0, size.len()), reals(sums.buf).at(sums.start, size.cols));
        go!(self, column_sums(E::REAL, rows(size), x, (sums, true)));
    }

    fn residual(&self, size: Rows, x: &GpuBuf, branch: Branch<'_, GpuBuf>, y: &mut GpuBuf) {
        let [x, of_branch, y] = [x, branch.x, y].map(|buf| elems::<E>(buf).at(0, size.len()));
        let bias = branch.bias.map_or(0, |bias| self.weight(bias, size.cols));
        let dropped = branch.dropout.map(|d| (draws(d.stream), d.first, d.rate));
        if bias == 0 && dropped.is_none() && !size.is_empty() {
            let size = rows(size);
            return self.wait(Waiting::Residual { size, x, branch: of_branch, y, real: E::REAL });
        }
        go!(self, join(E::REAL, rows(size), (x, of_branch, bias), dropped, y));
    }

    fn dropout(&self, dropout: &Dropout, x: &GpuBuf, y: &mut GpuBuf) {
        let (len, drawn) = (x.len, (draws(dropout.stream), dropout.first));
        let (x, y) = (elems::<E>(x).all(), elems::<E>(y).at(0, len));
        go!(self, dropout(E::REAL, x, drawn, dropout.rate, len as u64, y));
    }

    fn activate(&self, which: Activation, x: &GpuBuf, y: &mut GpuBuf) {
        let len = x.len;
        let (x, y) = (elems::<E>(x).all(), elems::<E>(y).at(0, len));
        if which == Activation::Gelu
            && self.with_gelu(|call| call.with_gelu(x, len as u64, y), "product, then gelu")
        {
            return;
        }
        go!(self, activate(activation(which), E::REAL, x, len as u64, y));
    }

    fn activate_grad(&self, which: Activation, x: &GpuBuf, dy: &mut GpuBuf) {
        let len = x.len;
        let (x, dy) = (elems::<E>(x).all(), elems::<E>(dy).at(0, len));
        if which == Activation::Gelu
            && self.with_gelu(|call| call.with_slope(x, len as u64, dy), "product, then gelu's slope")
        {
            return;
        }
        go!(self, activate_backward(activation(which), E::REAL, x, len as u64, dy));
    }

    fn gate(&self, which: Activation, gate: &GpuBuf, up: &GpuBuf, y: &mut GpuBuf) {
        let len = gate.len;
        let [gate, up, y] = [gate, up, y].map(|buf| elems::<E>(buf).at(0, len));
        go!(self, gate(activation(which), E::REAL, (gate, up), len as u64, y));
    }

    fn gate_grad(&self, which: Activation, gate: &GpuBuf, up: &GpuBuf, dy: &mut GpuBuf, d_gate: &mut GpuBuf) {
        let len = gate.len;
        let [gate, up, dy, d_gate] = [gate, up, dy, d_gate].map(|buf| elems::<E>(buf).at(0, len));
        go!(self, gate_backward(activation(which), E::REAL, (gate, up), len as u64, (dy, d_gate)));
    }

    fn layer_norm(&self, size: Rows, x: &GpuBuf, weights: NormWeights<'_, GpuBuf>, out: Normed<'_, GpuBuf>) {
        let scale = (self.weight(weights.gamma, size.cols), self.weight(weights.beta, size.cols));
        self.norm(Norm::Layer, size, x, scale, weights.epsilon, out);
    }

    fn layer_norm_grad(
        &self,
        size: Rows,
        saved: NormSaved<'_, GpuBuf>,
        dy: &GpuBuf,
        out: NormGrad<'_, GpuBuf>,
    ) {
        self.norm_grad(Norm::Layer, size, saved, dy, out);
    }

    fn group_norm(&self, _: GroupNorm, _: &GpuBuf, _: NormWeights<'_, GpuBuf>, _: Normed<'_, GpuBuf>) {
        self.missing("group norm");
    }

    fn group_norm_grad(&self, _: GroupNorm, _: NormSaved<'_, GpuBuf>, _: &GpuBuf, _: NormGrad<'_, GpuBuf>) {
        self.missing("group norm");
    }

    fn rms_norm(
        &self,
        size: Rows,
        x: &GpuBuf,
        gamma: BufSlice<'_, GpuBuf>,
        epsilon: f64,
        out: Normed<'_, GpuBuf>,
    ) {
        self.norm(Norm::Rms, size, x, (self.weight(gamma, size.cols), 0), epsilon, out);
    }

    fn rms_norm_grad(
        &self,
        size: Rows,
        saved: NormSaved<'_, GpuBuf>,
        dy: &GpuBuf,
        out: NormGrad<'_, GpuBuf>,
    ) {
        self.norm_grad(Norm::Rms, size, saved, dy, out);
    }

    fn lookup(&self, lookup: &Lookup<'_>, table: BufSlice<'_, GpuBuf>, add: bool, y: &mut GpuBuf) {
        let Lookup { ids, ref held, cols } = *lookup;
        let tables = Tables {
            tokens: self.weight(table, held.len() * cols),
            positions: 0,
            first: small(held.start),
            held: small(held.len()),
            context: 1,
        };
        let (size, y) = (Rows { rows: ids.len(), cols }, elems::<E>(y).at(0, ids.len() * cols));
        let ids = self.words(ids);
        go!(self, embedding_forward(E::REAL, rows(size), &tables, ids.address(), (y, add)));
    }

    fn lookup_grad(&self, lookup: &Lookup<'_>, dy: &GpuBuf, table: PartMut<'_, GpuBuf>) {
        let Lookup { ids, ref held, cols } = *lookup;
        let sorted = sort_ids(ids, small(held.start), small(held.len()));
        let dy = elems::<E>(dy).at(0, ids.len() * cols);
        let table = reals(table.buf).at(table.start, held.len() * cols);
        let count = small(sorted.entries.len());
        let [entries, starts, of_entries] =
            [&sorted.entries, &sorted.starts, &sorted.rows].map(|words| self.words(words));
        let order = (entries.address(), starts.address(), of_entries.address(), count);
        go!(self, embedding_backward(E::REAL, small(cols), dy, order, table));
    }

    fn attention(&self, size: &Attention, x: Projected<'_, GpuBuf>, y: &mut GpuBuf, lse: &mut GpuBuf) {
        self.attend(size, x, y, lse);
    }

    fn attention_grad(
        &self,
        size: &Attention,
        x: Projected<'_, GpuBuf>,
        saved: AttentionSaved<'_, GpuBuf>,
        dy: &GpuBuf,
        dx: ProjectedMut<'_, GpuBuf>,
    ) {
        self.attend_grad(size, x, saved, dy, dx);
    }

    fn rotate(&self, rotary: &Rotary, first: usize, size: Rows, back: bool, x: &mut GpuBuf) {
        self.turn(rotary, first, size, back, x);
    }

    fn row_max(&self, size: Rows, x: &GpuBuf, max: &mut GpuBuf) {
        if size.cols == 0 {
            return self.fill(f32::MIN, max.into(), size.rows);
        }
        let (x, max) = (elems::<E>(x).at(0, size.len()), reals(max).at(0, size.rows));
        go!(self, row_max(E::REAL, rows(size), x, max));
    }

    fn exp_sums(&self, classes: &Classes<'_>, max: &GpuBuf, logits: &mut GpuBuf, sums: &mut GpuBuf) {
        let size = classes.size();
        if size.cols == 0 {
            return self.fill(0.0, sums.into(), 2 * size.rows);
        }
        let targets = self.words(classes.targets);
        let of_targets = (targets.address(), small(classes.held.start));
        let logits = elems::<E>(logits).at(0, size.len());
        let into = (reals(max).at(0, size.rows), reals(sums).at(0, 2 * size.rows));
        go!(self, exp_sums(E::REAL, rows(size), logits, of_targets, into));
    }

    fn cross_entropy(&self, count: usize, sums: &GpuBuf) -> f64 {
        let (loss, sums) = (self.block(count as u64 * 4), reals(sums).at(0, 2 * count));
        go!(self, entropy(small(count), sums, loss.address()));
        self.number(|total| {
            go!(self, sum(loss.address(), count as u64, (total, false)));
        })
    }

    fn cross_entropy_grad(&self, classes: &Classes<'_>, sums: &GpuBuf, scale: f64, exps: &mut GpuBuf) {
        let size = classes.size();
        if size.is_empty() {
            return;
        }
        let targets = self.words(classes.targets);
        let of_targets = (targets.address(), small(classes.held.start));
        let (exps, sums) = (elems::<E>(exps).at(0, size.len()), reals(sums).at(0, 2 * size.rows));
        go!(self, exps_grad(E::REAL, rows(size), exps, of_targets, sums, scale as f32));
    }

    fn squared_error(&self, x: &GpuBuf, target: &GpuBuf) -> f64 {
        let len = x.len;
        let [x, target] = [x, target].map(|buf| elems::<E>(buf).at(0, len));
        self.number(|total| {
            go!(self, squared_distance(E::REAL, (x, target), len as u64, total));
        })
    }

    fn squared_error_grad(&self, x: &GpuBuf, target: &GpuBuf, scale: f64, dx: &mut GpuBuf) {
        let len = x.len;
        let [x, target, dx] = [x, target, dx].map(|buf| elems::<E>(buf).at(0, len));
        go!(self, difference(E::REAL, (x, target), (2.0 * scale) as f32, len as u64, dx));
    }

    fn patches(&self, _: &Conv, _: usize, _: &GpuBuf, _: &mut GpuBuf) {
        self.missing("patches of images");
    }

    fn patches_grad(&self, _: &Conv, _: usize, _: &GpuBuf, _: &mut GpuBuf) {
        self.missing("patches of images");
    }

    fn upsample(&self, _: Images, _: &GpuBuf, _: &mut GpuBuf) {
        self.missing("larger images");
    }

    fn upsample_grad(&self, _: Images, _: &GpuBuf, _: &mut GpuBuf) {
        self.missing("larger images");
    }

    fn concat(&self, _: (&GpuBuf, usize), _: (&GpuBuf, usize), _: &mut GpuBuf) {
        self.missing("rows beside each other");
    }

    fn split(&self, _: &GpuBuf, _: (&mut GpuBuf, usize), _: (&mut GpuBuf, usize)) {
        self.missing("rows beside each other");
    }

    fn add_per_sample(&self, _: usize, _: Rows, _: &GpuBuf, _: &mut GpuBuf) {
        self.missing("a row for every image");
    }

    fn add_per_sample_grad(&self, _: usize, _: Rows, _: &GpuBuf, _: &mut GpuBuf) {
        self.missing("a row for every image");
    }

    fn time_waves(&self, _: &[i32], _: usize, _: &mut GpuBuf) {
        self.missing("waves of time");
    }

    fn adamw(&self, step: &AdamW, run: Range<usize>, state: AdamWState<'_, GpuBuf>) {
        let len = run.len();
        let at = |part: PartMut<'_, GpuBuf>| reals(part.buf).at(part.start + run.start, len);
        let copy = state.rounded.map(|part| elems::<E>(part.buf).at(part.start + run.start, len));
        let numbers = ops::AdamW {
            learning_rate: step.learning_rate,
            beta1: step.beta1,
            beta2: step.beta2,
            epsilon: step.epsilon,
            weight_decay: step.weight_decay,
            step: step.step,
            grad_scale: step.grad_scale,
        };
        let grads = reals(state.grads.buf).at(state.grads.start + run.start, len);
        let into = ops::AdamState {
            params: at(state.params),
            first: at(state.first),
            second: at(state.second),
            copy: copy.unwrap_or(0),
        };
        go!(self, adamw(Real::F32, grads, &numbers, 0, len as u64, into));
    }

    fn sgd(&self, step: &Sgd, run: Range<usize>, state: SgdState<'_, GpuBuf>) {
        let len = run.len();
        let at = |part: PartMut<'_, GpuBuf>| reals(part.buf).at(part.start + run.start, len);
        let copy = state.rounded.map(|part| elems::<E>(part.buf).at(part.start + run.start, len));
        let numbers = ops::Sgd {
            learning_rate: step.learning_rate,
            momentum: step.momentum,
            weight_decay: step.weight_decay,
            grad_scale: step.grad_scale,
        };
        let grads = reals(state.grads.buf).at(state.grads.start + run.start, len);
        let (params, velocity) = (at(state.params), at(state.velocity));
        let into = ops::SgdState { params, velocity, copy: copy.unwrap_or(0) };
        go!(self, sgd(grads, &numbers, len as u64, into));
    }

    fn sum_squares(&self, x: &GpuBuf, runs: &[Range<usize>]) -> f64 {
        // Runs that touch are one.
        let mut joined: Vec<Range<usize>> = vec![];
        for run in runs.iter().filter(|run| !run.is_empty()) {
            match joined.last_mut().filter(|last| last.end == run.start) {
                Some(last) => last.end = run.end,
                None => joined.push(run.clone()),
            }
        }
        if joined.is_empty() {
            return 0.0;
        }
        self.number(|total| {
            for (i, run) in joined.iter().enumerate() {
                let (at, len) = (reals(x).at(run.start, run.len()), run.len() as u64);
                go!(self, sum_squares(Real::F32, at, len, (total, i > 0)));
            }
        })
    }
}
