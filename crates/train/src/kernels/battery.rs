//! Every kernel once, on random inputs of sizes that divide by nothing: for holding one device against another.
//!
//! Two devices get the same numbers, rounded as the narrower one keeps them, so that what differs is what kernels do. Kernels that go on from what another one
//! left get inputs of their own instead: no error is carried on.

use half::bf16;

use super::cpu::Cpu;
use super::random::Stream;
use super::scalar::Scalar;
use super::{
    Activation, AdamW, AdamWState, Attention, AttentionDropout, AttentionSaved, Branch, BufSlice,
    Buffer as _, Classes, Conv, Dropout, Gemm, GroupNorm, Images, Kernels, Lookup, NormGrad, NormSaved,
    NormWeights, Normed, PartMut, Projected, ProjectedMut, Rotary, Rows, Sgd, SgdState,
};

/// What a kernel left.
#[derive(Debug, Clone)]
pub struct Outcome {
    pub name: String,
    pub kind: Kind,
    pub values: Vec<f64>,
}

/// What an outcome is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Elems,
    Reals,
    /// Elements that are sums of many products, or made of such sums that a device may have rounded: attention.
    Product,
}

/// How inputs are rounded: as elements, and as reals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    None,
    F32,
    Bf16,
}

impl Rounding {
    fn elem(self, x: f64) -> f64 {
        match self {
            Rounding::None => x,
            Rounding::F32 => f64::from(x as f32),
            Rounding::Bf16 => f64::from(bf16::from_f64(x).to_f32()),
        }
    }

    fn real(self, x: f64) -> f64 {
        match self {
            Rounding::None => x,
            _ => f64::from(x as f32),
        }
    }
}

/// Which kernels to try.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Models {
    /// Those that decoders need.
    Decoders,
    /// Those of images too.
    All,
}

/// Sizes and numbers of one run.
pub struct Battery<'a, K: Kernels> {
    kernels: &'a K,
    rounding: Rounding,
    seed: u64,
    drawn: u64,
    outcomes: Vec<Outcome>,
}

/// Runs every kernel on inputs that follow from the seed.
pub fn run<K: Kernels>(kernels: &K, rounding: Rounding, models: Models, seed: u64) -> Vec<Outcome> {
    let mut battery = Battery { kernels, rounding, seed, drawn: 0, outcomes: vec![] };
    battery.memory();
    battery.products();
    battery.pointwise();
    battery.norms();
    battery.tables();
    battery.attention();
    battery.losses();
    battery.updates();
    if models == Models::All {
        battery.images();
    }
    battery.outcomes
}

impl<K: Kernels> Battery<'_, K> {
    /// A size from 1 to `most`, the same on every device.
    fn size(&mut self, most: usize) -> usize {
        self.drawn += 1;
        Stream::named(self.seed, "size").at(self.drawn) as usize % most + 1
    }

    fn noise(&mut self, len: usize) -> Vec<f64> {
        self.drawn += 1;
        let stream = Stream::named(self.seed, &format!("input {}", self.drawn));
        (0..len as u64).map(|i| stream.normal(i)).collect()
    }

    fn elems_of(&self, values: &[f64]) -> K::Buf {
        let values: Vec<K::Real> = values.iter().map(|&x| K::Real::from_f64(self.rounding.elem(x))).collect();
        self.kernels.upload(&values)
    }

    fn reals_of(&self, values: &[f64]) -> K::Buf {
        let values: Vec<K::Real> = values.iter().map(|&x| K::Real::from_f64(self.rounding.real(x))).collect();
        let mut buf = self.kernels.wide(values.len());
        self.kernels.put_reals(&values, (&mut buf).into());
        buf
    }

    fn rounded(&mut self, len: usize) -> Vec<f64> {
        self.noise(len).into_iter().map(|x| self.rounding.elem(x)).collect()
    }

    fn elems(&mut self, len: usize) -> K::Buf {
        let values = self.noise(len);
        self.elems_of(&values)
    }

    fn reals(&mut self, len: usize) -> K::Buf {
        let values = self.noise(len);
        self.reals_of(&values)
    }

    fn say(&mut self, name: impl Into<String>, buf: &K::Buf) {
        let kind = if buf.is_wide() { Kind::Reals } else { Kind::Elems };
        self.say_as(name, kind, buf);
    }

    fn say_as(&mut self, name: impl Into<String>, kind: Kind, buf: &K::Buf) {
        let values = self.kernels.download(buf).into_iter().map(K::Real::to_f64).collect();
        self.outcomes.push(Outcome { name: name.into(), kind, values });
    }

    fn say_number(&mut self, name: &str, value: f64) {
        self.outcomes.push(Outcome { name: name.into(), kind: Kind::Reals, values: vec![value] });
    }

    fn memory(&mut self) {
        let (len, at) = (self.size(700), self.size(50));
        let (x, wide) = (self.elems(len), self.reals(len));
        let mut y = self.elems(len + at);
        self.kernels.copy((&x).into(), PartMut { buf: &mut y, start: at }, len);
        self.kernels.fill(K::Real::from_f64(0.5), (&mut y).into(), at / 2);
        self.say("copy", &y);
        let mut narrow = self.kernels.buffer(len);
        self.kernels.copy((&wide).into(), (&mut narrow).into(), len);
        self.say("copy to elements", &narrow);
        let mut widened = self.kernels.wide(len);
        self.kernels.copy((&x).into(), (&mut widened).into(), len);
        self.say("copy to reals", &widened);
    }

    fn products(&mut self) {
        for (a_turned, b_turned) in [(false, false), (false, true), (true, false), (true, true)] {
            for (into_reals, added, with_bias) in
                [(false, false, false), (false, false, true), (true, true, false)]
            {
                let (m, n, k) = (self.size(150), self.size(150), self.size(400));
                let gemm = Gemm::new(m, n, k);
                let gemm = if a_turned { gemm.a_transposed() } else { gemm };
                let gemm = if b_turned { gemm.b_transposed() } else { gemm };
                let gemm = if added { gemm.added() } else { gemm };
                let (a, b, bias) = (self.elems(m * k + 3), self.elems(k * n + 7), self.elems(n));
                let mut c = if into_reals { self.reals(m * n + 5) } else { self.elems(m * n + 5) };
                let bias = with_bias.then_some(BufSlice::from(&bias));
                let (a, b) = (BufSlice { buf: &a, start: 3 }, BufSlice { buf: &b, start: 7 });
                self.kernels.gemm(gemm, a, b, bias, PartMut { buf: &mut c, start: 5 });
                let name = format!(
                    "product {m}x{n}x{k}, turned {a_turned} {b_turned}, reals {into_reals}, bias {with_bias}"
                );
                self.say_as(name, Kind::Product, &c);
            }
        }
    }

    fn pointwise(&mut self) {
        let size = Rows { rows: self.size(60), cols: self.size(200) };
        let len = size.len();
        let (x, branch, bias) = (self.elems(len), self.elems(len), self.elems(size.cols));
        let mut y = self.elems(len);
        self.kernels.add((&x).into(), (&mut y).into(), len);
        self.say("add elements", &y);
        let (wide, mut sum) = (self.reals(len), self.reals(len + 1));
        self.kernels.add((&wide).into(), PartMut { buf: &mut sum, start: 1 }, len);
        self.say("add reals", &sum);
        let mut sums = self.reals(size.cols + 2);
        self.kernels.sum_rows(size, &x, PartMut { buf: &mut sums, start: 2 });
        self.say("sum rows", &sums);
        let dropout = Dropout { rate: 0.3, stream: Stream::new(self.seed, 2, 3), first: 77 };
        for (bias, dropout) in [(None, None), (Some(BufSlice::from(&bias)), None), (None, Some(dropout))] {
            let mut y = self.kernels.buffer(len);
            let name = format!("residual, bias {}, dropout {}", bias.is_some(), dropout.is_some());
            self.kernels.residual(size, &x, Branch { x: &branch, bias, dropout }, &mut y);
            self.say(name, &y);
        }
        let mut y = self.kernels.buffer(len);
        self.kernels.dropout(&dropout, &x, &mut y);
        self.say("dropout", &y);
        for activation in [Activation::Gelu, Activation::Silu] {
            let (gate, up) = (self.elems(len), self.elems(len));
            let mut y = self.kernels.buffer(len);
            self.kernels.activate(activation, &gate, &mut y);
            self.say(format!("{activation:?}"), &y);
            let mut dy = self.elems(len);
            self.kernels.activate_grad(activation, &gate, &mut dy);
            self.say(format!("{activation:?}, gradient"), &dy);
            let mut y = self.kernels.buffer(len);
            self.kernels.gate(activation, &gate, &up, &mut y);
            self.say(format!("{activation:?} gate"), &y);
            let (mut dy, mut d_gate) = (self.elems(len), self.kernels.buffer(len));
            self.kernels.gate_grad(activation, &gate, &up, &mut dy, &mut d_gate);
            self.say(format!("{activation:?} gate, gradient of up"), &dy);
            self.say(format!("{activation:?} gate, gradient of gate"), &d_gate);
        }
        let (heads, head_dim, positions) = (self.size(4), 2 * self.size(20), self.size(30));
        let samples = self.size(3);
        let rows = Rows { rows: samples * positions, cols: heads * head_dim };
        let angles = self.noise(positions * head_dim / 2);
        let rotary = Rotary {
            head_dim,
            positions,
            cosines: angles.iter().map(|a| a.cos()).collect(),
            sines: angles.iter().map(|a| a.sin()).collect(),
        };
        for back in [false, true] {
            let mut x = self.elems(rows.len());
            self.kernels.rotate(&rotary, 0, rows, back, &mut x);
            self.say(format!("rotate, back {back}"), &x);
        }
    }

    /// How statistics lie is a device's own business: its gradients tell whether they are right.
    fn norms(&mut self) {
        let size = Rows { rows: self.size(60), cols: 2 + self.size(300) };
        let len = size.len();
        let (x, weights) = (self.elems(len), self.elems(2 * size.cols + 1));
        let gamma = BufSlice { buf: &weights, start: 1 };
        let beta = BufSlice { buf: &weights, start: 1 + size.cols };
        let epsilon = 1e-5;
        let (mut y, mut stats) = (self.kernels.buffer(len), self.kernels.wide(2 * size.rows));
        let out = Normed { y: &mut y, stats: &mut stats };
        self.kernels.layer_norm(size, &x, NormWeights { gamma, beta, epsilon }, out);
        self.say("layer norm", &y);
        let (residual, dy) = (self.elems(len), self.elems(len));
        for residual in [None, Some(&residual)] {
            let (mut dx, mut sums) = (self.kernels.buffer(len), self.kernels.wide(2 * size.cols));
            let saved = NormSaved { x: &x, stats: &stats, gamma };
            self.kernels.layer_norm_grad(
                size,
                saved,
                &dy,
                NormGrad { residual, dx: &mut dx, sums: &mut sums },
            );
            self.say(format!("layer norm, gradient, residual {}", residual.is_some()), &dx);
            self.say("layer norm, gradients of gain and shift", &sums);
        }
        let mut stats = self.kernels.wide(size.rows);
        let out = Normed { y: &mut y, stats: &mut stats };
        self.kernels.rms_norm(size, &x, gamma, epsilon, out);
        self.say("rms norm", &y);
        for residual in [None, Some(&residual)] {
            let (mut dx, mut sums) = (self.kernels.buffer(len), self.kernels.wide(size.cols));
            let saved = NormSaved { x: &x, stats: &stats, gamma };
            self.kernels.rms_norm_grad(size, saved, &dy, NormGrad { residual, dx: &mut dx, sums: &mut sums });
            self.say(format!("rms norm, gradient, residual {}", residual.is_some()), &dx);
            self.say("rms norm, gradient of gain", &sums);
        }
    }

    fn ids(&mut self, len: usize, classes: usize) -> Vec<i32> {
        self.drawn += 1;
        let stream = Stream::named(self.seed, &format!("ids {}", self.drawn));
        (0..len as u64).map(|i| (stream.at(i) as usize % classes) as i32).collect()
    }

    fn tables(&mut self) {
        let (rows, cols, classes) = (self.size(80), self.size(90), 3 + self.size(40));
        let ids = self.ids(rows, classes);
        for held in [0..classes, classes / 3..classes - 1] {
            let (table, here) = (self.elems(held.len() * cols + 4), held.len());
            let lookup = Lookup { ids: &ids, held, cols };
            for add in [false, true] {
                let mut y = self.elems(rows * cols);
                self.kernels.lookup(&lookup, BufSlice { buf: &table, start: 4 }, add, &mut y);
                self.say(format!("lookup, add {add}"), &y);
            }
            let (dy, mut grads) = (self.elems(rows * cols), self.reals(here * cols + 4));
            self.kernels.lookup_grad(&lookup, &dy, PartMut { buf: &mut grads, start: 4 });
            self.say("lookup, gradient", &grads);
        }
    }

    /// What a forward pass leaves, exact and then as rounded as all inputs: what a device's own leaves is another number on each.
    fn forward(&self, size: &Attention, values: &[&[f64]]) -> (K::Buf, K::Buf) {
        let host = Cpu::<f64>::new(1);
        let bufs: Vec<_> = values.iter().map(|values| host.upload(values)).collect();
        let x = match &bufs[..] {
            [q, k, v] => Projected::Three { q, k, v },
            all => Projected::Fused(&all[0]),
        };
        let rows = size.samples * size.heads * size.queries;
        let (mut y, mut lse) = (host.buffer(rows * size.head_dim), host.wide(rows));
        host.attention(size, x, &mut y, &mut lse);
        (self.elems_of(&host.download(&y)), self.reals_of(&host.download(&lse)))
    }

    fn attention(&mut self) {
        for (group, causal, cached, rate) in [
            (1, true, false, 0.0),
            (1, false, false, 0.0),
            (3, true, false, 0.0),
            (2, true, true, 0.0),
            (1, true, false, 0.2),
        ] {
            let (samples, kv_heads, head_dim) = (self.size(3), self.size(3), 8 * self.size(9));
            let (heads, keys) = (kv_heads * group, 1 + self.size(70));
            let queries = if cached { self.size(keys) } else { keys };
            let dropout = (rate > 0.0).then(|| AttentionDropout {
                rate,
                stream: Stream::new(self.seed, 5, 6),
                first_sample: 3,
                first_head: 1,
                all_heads: heads as u64 + 2,
            });
            let size = Attention { samples, heads, kv_heads, head_dim, queries, keys, causal, dropout };
            let (q_len, kv_len) =
                (samples * queries * heads * head_dim, samples * keys * kv_heads * head_dim);
            let values = [q_len, kv_len, kv_len].map(|len| self.rounded(len));
            let [q, k, v] = values.each_ref().map(|values| self.elems_of(values));
            let x = || Projected::Three { q: &q, k: &k, v: &v };
            let (mut y, mut lse) = (self.kernels.buffer(q_len), self.kernels.wide(samples * heads * queries));
            self.kernels.attention(&size, x(), &mut y, &mut lse);
            let about = format!(
                "attention {samples}x{heads}/{kv_heads}x{queries}/{keys}x{head_dim}, causal {causal}, dropped {rate}"
            );
            self.say_as(about.clone(), Kind::Product, &y);
            self.say_as(format!("{about}, lse"), Kind::Reals, &lse);
            let dy = self.elems(q_len);
            let (saved_y, saved_lse) = self.forward(&size, &values.each_ref().map(Vec::as_slice));
            let saved = AttentionSaved { y: &saved_y, lse: &saved_lse };
            let [mut dq, mut dk, mut dv] = [q_len, kv_len, kv_len].map(|len| self.kernels.buffer(len));
            let dx = ProjectedMut::Three { q: &mut dq, k: &mut dk, v: &mut dv };
            self.kernels.attention_grad(&size, x(), saved, &dy, dx);
            self.say_as(format!("{about}, gradient of q"), Kind::Product, &dq);
            self.say_as(format!("{about}, gradient of k"), Kind::Product, &dk);
            self.say_as(format!("{about}, gradient of v"), Kind::Product, &dv);
            if group == 1 && !cached {
                let values = self.rounded(3 * q_len);
                let fused = self.elems_of(&values);
                self.kernels.attention(&size, Projected::Fused(&fused), &mut y, &mut lse);
                self.say_as(format!("{about}, fused"), Kind::Product, &y);
                let (saved_y, saved_lse) = self.forward(&size, &[&values]);
                let saved = AttentionSaved { y: &saved_y, lse: &saved_lse };
                let mut d = self.kernels.buffer(3 * q_len);
                let (x, dx) = (Projected::Fused(&fused), ProjectedMut::Fused(&mut d));
                self.kernels.attention_grad(&size, x, saved, &dy, dx);
                self.say_as(format!("{about}, fused, gradient"), Kind::Product, &d);
            }
        }
    }

    fn losses(&mut self) {
        let (rows, classes) = (self.size(60), 5 + self.size(300));
        let targets = self.ids(rows, classes);
        for held in [0..classes, classes / 4..classes - 2] {
            let classes = Classes { rows, held: held.clone(), targets: &targets };
            let size = classes.size();
            let mut logits = self.elems(size.len());
            let mut max = self.kernels.wide(rows);
            self.kernels.row_max(size, &logits, &mut max);
            self.say("row max", &max);
            let mut sums = self.kernels.wide(2 * rows);
            self.kernels.exp_sums(&classes, &max, &mut logits, &mut sums);
            self.say("exponentials", &logits);
            self.say("exponentials, sums", &sums);
            let loss = self.kernels.cross_entropy(rows, &sums);
            self.say_number("cross-entropy", loss);
            let positive: Vec<f64> = self.noise(size.len()).iter().map(|x| (x - 3.0).exp()).collect();
            let mut exps = self.elems_of(&positive);
            let sums: Vec<f64> = self.noise(2 * rows).iter().map(|x| 4.0 + x.abs()).collect();
            let sums = self.reals_of(&sums);
            self.kernels.cross_entropy_grad(&classes, &sums, 0.125, &mut exps);
            self.say("cross-entropy, gradient", &exps);
        }
        let len = self.size(3000);
        let (x, target) = (self.elems(len), self.elems(len));
        let loss = self.kernels.squared_error(&x, &target);
        self.say_number("squared error", loss);
        let mut dx = self.kernels.buffer(len);
        self.kernels.squared_error_grad(&x, &target, 0.25, &mut dx);
        self.say("squared error, gradient", &dx);
    }

    fn updates(&mut self) {
        let len = 20 + self.size(3000);
        let mut params = self.reals(len + 3);
        let (grads, mut first) = (self.reals(len + 2), self.reals(len + 1));
        let second: Vec<f64> = self.noise(len).iter().map(|x| x.abs()).collect();
        let mut second = self.reals_of(&second);
        let step = AdamW {
            learning_rate: 0.01,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            step: 4,
            grad_scale: 0.7,
        };
        let mut rounded = self.kernels.buffer(len);
        let mut narrow = K::IS_MIXED.then_some(PartMut::from(&mut rounded));
        let state = AdamWState {
            params: PartMut { buf: &mut params, start: 3 },
            rounded: narrow.take(),
            grads: BufSlice { buf: &grads, start: 2 },
            first: PartMut { buf: &mut first, start: 1 },
            second: (&mut second).into(),
        };
        self.kernels.adamw(&step, 0..len, state);
        self.say("adamw", &params);
        self.say("adamw, first moment", &first);
        self.say("adamw, second moment", &second);
        let mut velocity = self.reals(len);
        let step = Sgd { learning_rate: 0.01, momentum: 0.9, weight_decay: 0.1, grad_scale: 0.7 };
        let mut narrow = K::IS_MIXED.then_some(PartMut::from(&mut rounded));
        let state = SgdState {
            params: PartMut { buf: &mut params, start: 3 },
            rounded: narrow.take(),
            grads: (&grads).into(),
            velocity: (&mut velocity).into(),
        };
        self.kernels.sgd(&step, 0..len, state);
        self.say("sgd", &params);
        self.say("sgd, velocity", &velocity);
        if K::IS_MIXED {
            self.say("sgd, weights", &rounded);
        } else {
            // What the others round, this one keeps.
            let copy = self.kernels.download(&params)[3..].to_vec();
            let copy = self.kernels.upload(&copy);
            self.say("sgd, weights", &copy);
        }
        let squares = self.kernels.sum_squares(&grads, &[1..len / 2, len / 2 + 3..len]);
        self.say_number("sum of squares", squares);
    }

    fn images(&mut self) {
        let (samples, channels) = (self.size(3), 4 * self.size(5));
        let (height, width) = (2 + self.size(7), 2 + self.size(7));
        let pixels = height * width;
        let len = samples * pixels * channels;
        let size = GroupNorm { samples, pixels, channels, groups: 4 };
        let (x, weights, dy) = (self.elems(len), self.elems(2 * channels), self.elems(len));
        let (gamma, beta) = (BufSlice::from(&weights), BufSlice { buf: &weights, start: channels });
        let (mut y, mut stats) = (self.kernels.buffer(len), self.kernels.wide(2 * samples * 4));
        let out = Normed { y: &mut y, stats: &mut stats };
        self.kernels.group_norm(size, &x, NormWeights { gamma, beta, epsilon: 1e-5 }, out);
        self.say("group norm", &y);
        let (mut dx, mut sums) = (self.kernels.buffer(len), self.kernels.wide(2 * channels));
        let saved = NormSaved { x: &x, stats: &stats, gamma };
        let out = NormGrad { residual: None, dx: &mut dx, sums: &mut sums };
        self.kernels.group_norm_grad(size, saved, &dy, out);
        self.say("group norm, gradient", &dx);
        self.say("group norm, gradients of gain and shift", &sums);
        let conv = Conv { samples, height, width, channels, kernel: 3, stride: 1, padding: 1 };
        let patches = conv.patches().len();
        let mut y = self.kernels.buffer(patches);
        self.kernels.patches(&conv, 0, &x, &mut y);
        self.say("patches", &y);
        let (dy, mut dx) = (self.elems(patches), self.kernels.buffer(len));
        self.kernels.patches_grad(&conv, 0, &dy, &mut dx);
        self.say("patches, gradient", &dx);
        let from = Images { samples, height, width, channels };
        let mut large = self.kernels.buffer(4 * len);
        self.kernels.upsample(from, &x, &mut large);
        self.say("upsample", &large);
        let dy = self.elems(4 * len);
        self.kernels.upsample_grad(from, &dy, &mut dx);
        self.say("upsample, gradient", &dx);
        let rows = samples * pixels;
        let (other, mut both) = (self.elems(rows * 3), self.kernels.buffer(rows * (channels + 3)));
        self.kernels.concat((&x, channels), (&other, 3), &mut both);
        self.say("concat", &both);
        let (mut a, mut b) = (self.kernels.buffer(len), self.kernels.buffer(rows * 3));
        self.kernels.split(&both, (&mut a, channels), (&mut b, 3));
        self.say("split", &a);
        let size = Rows { rows, cols: channels };
        let (e, mut x) = (self.elems(samples * channels), self.elems(len));
        self.kernels.add_per_sample(pixels, size, &e, &mut x);
        self.say("add per sample", &x);
        let mut de = self.kernels.buffer(samples * channels);
        self.kernels.add_per_sample_grad(pixels, size, &x, &mut de);
        self.say_as("add per sample, gradient", Kind::Product, &de);
        let (steps, dim) = (self.ids(5, 1000), 2 * (1 + self.size(20)));
        let mut waves = self.kernels.buffer(5 * dim);
        self.kernels.time_waves(&steps, dim, &mut waves);
        self.say("time waves", &waves);
    }
}

/// How two devices differ: for every outcome of the first, the largest error, in units of what it may be. Above one is wrong.
///
/// `exact` is the wide device's. Elements of bf16 may be off by one unit in the last place (and by what f32 loses where numbers cancel), products by 2⁻⁸ norm-wise; all
/// else by 1e-5 of the largest.
pub fn compare(got: &[Outcome], exact: &[Outcome], rounding: Rounding) -> Vec<(String, f64)> {
    assert_eq!(got.len(), exact.len(), "both ran the same kernels");
    got.iter().zip(exact).map(|(got, exact)| (got.name.clone(), worst(got, exact, rounding))).collect()
}

fn worst(got: &Outcome, exact: &Outcome, rounding: Rounding) -> f64 {
    assert_eq!((&got.name, got.values.len()), (&exact.name, exact.values.len()));
    if got.values.iter().any(|x| !x.is_finite()) {
        return f64::INFINITY;
    }
    let share = if rounding == Rounding::Bf16 { 0.5f64.powi(8) } else { 0.5f64.powi(17) };
    let largest = exact.values.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let size = norm(&mut exact.values.iter().copied());
    let pairs = || got.values.iter().zip(&exact.values);
    // A unit in the last place of a number.
    let ulp = |x: f64| if x == 0.0 { 0.0 } else { x.abs().log2().floor().exp2() * 2.0 * share };
    let each = |allowed: &dyn Fn(f64) -> f64| {
        pairs().map(|(got, exact)| (got - exact).abs() / (allowed(*exact) + 1e-30)).fold(0.0, f64::max)
    };
    match (got.kind, rounding) {
        (Kind::Elems, Rounding::Bf16) => each(&|x| ulp(x) + 2e-6 * largest),
        (Kind::Product, _) => {
            // Norm-wise; and none by itself is far off.
            let mean = size / (exact.values.len() as f64).sqrt();
            let off = norm(&mut pairs().map(|(got, exact)| got - exact)) / (share * size + 1e-30);
            off.max(each(&|x| ulp(x) + 16.0 * share * mean))
        }
        _ => each(&|_| 1e-5 * largest),
    }
}
