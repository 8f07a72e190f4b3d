//! Every kernel of [`Kernels`] on the first GPU, held against the host's in f64: the same calls with the same rounded inputs, sizes that divide by nothing, offsets that
//! are aligned to nothing; and twice, for the same bits. `crossmesh bench kernels` looks at single launches; this looks at what models call.
//!
//!     gpu_kernels [rounds] [host]      with `host`, the host's own f32 and bf16 instead of a GPU's: no GPU is needed

use std::sync::Arc;

use crossmesh_cuda::gpu::Gpu as Device;
use crossmesh_train::kernels::battery::{self, Models, Rounding};
use crossmesh_train::kernels::cpu::{Cpu, CpuBf16};
use crossmesh_train::kernels::gpu::{Chosen, Gpu};
use crossmesh_train::kernels::random::Stream;
use crossmesh_train::kernels::scalar::Scalar;
use crossmesh_train::kernels::{
    Activation, AdamW, AdamWState, Attention, AttentionDropout, AttentionSaved, Branch, BufSlice, Classes,
    Dropout, Gemm, Kernels, Lookup, NormGrad, NormSaved, NormWeights, Normed, PartMut, Projected,
    ProjectedMut, Rotary, Rows, Sgd, SgdState,
};
use half::bf16;

type Found = Vec<(String, Vec<f64>)>;

/// A device with numbers to try it on; the same ones for the same seed, whatever the device.
struct Lab<'a, K: Kernels> {
    k: &'a K,
    seed: u64,
    narrow: bool,
    found: Found,
}

impl<K: Kernels> Lab<'_, K> {
    fn draw(&mut self) -> u64 {
        self.seed = self.seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.seed ^ (self.seed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    /// At least one, and at most this.
    fn below(&mut self, most: usize) -> usize {
        1 + (self.draw() % most as u64) as usize
    }

    fn numbers(&mut self, len: usize, scale: f64, narrow: bool) -> Vec<K::Real> {
        let number = |x: u64| ((x >> 40) as f64 / f64::from(1 << 23) - 1.0) * scale;
        let round = |x: f64| if narrow { bf16::from_f64(x).to_f64() } else { f64::from(x as f32) };
        (0..len).map(|_| K::Real::from_f64(round(number(self.draw())))).collect()
    }

    fn elems(&mut self, len: usize, scale: f64) -> K::Buf {
        let numbers = self.numbers(len, scale, self.narrow);
        self.k.upload(&numbers)
    }

    fn reals(&mut self, len: usize, scale: f64) -> K::Buf {
        let numbers = self.numbers(len, scale, false);
        let mut buf = self.k.wide(len);
        self.k.put_reals(&numbers, (&mut buf).into());
        buf
    }

    fn keep(&mut self, name: &str, buf: &K::Buf) {
        let numbers = self.k.download(buf).into_iter().map(Scalar::to_f64).collect();
        self.found.push((name.into(), numbers));
    }

    fn number(&mut self, name: &str, x: f64) {
        self.found.push((name.into(), vec![x]));
    }

    fn size(&mut self, rows: usize, cols: usize, round: usize) -> Rows {
        let cols = self.below(cols);
        Rows {
            rows: self.below(rows),
            cols: if round.is_multiple_of(3) { cols.next_multiple_of(8) } else { cols | 1 },
        }
    }

    fn moves(&mut self, round: usize) {
        let len = self.below(5000);
        let start = if round.is_multiple_of(2) { self.below(7) } else { 0 };
        let (x, w) = (self.elems(len + start, 1.0), self.reals(len + start, 1.0));
        let (mut e, mut r) = (self.elems(len, 1.0), self.reals(len + 3, 1.0));
        self.k.copy(BufSlice { buf: &x, start }, PartMut { buf: &mut r, start: 3 }, len);
        self.keep("copy to reals", &r);
        self.k.copy(BufSlice { buf: &w, start }, (&mut e).into(), len);
        self.keep("copy to elements", &e);
        self.k.fill(K::Real::from_f64(0.75), PartMut { buf: &mut r, start: 1 }, 2);
        self.k.fill(K::Real::from_f64(-0.5), PartMut { buf: &mut e, start: len / 2 }, len - len / 2);
        self.k.add(BufSlice { buf: &x, start }, (&mut e).into(), len);
        self.k.add((&w).into(), (&mut r).into(), len);
        self.keep("fill and add, elements", &e);
        self.keep("fill and add, reals", &r);
        let size = self.size(3000, 300, round);
        let (x, mut sums) = (self.elems(size.len(), 1.0), self.reals(size.cols + 5, 1.0));
        self.k.sum_rows(size, &x, PartMut { buf: &mut sums, start: 5 });
        self.keep("sum of rows", &sums);
        let squares = self.k.sum_squares(&sums, &[0..3, 3..size.cols, size.cols + 1..size.cols + 5]);
        self.number("sum of squares", squares);
        let again = self.k.clone_of(&x);
        self.keep("clone", &again);
    }

    fn pointwise(&mut self, round: usize) {
        let size = self.size(60, 900, round);
        let len = size.len();
        let dropout = Dropout { rate: 0.3, stream: Stream::new(5, 6, 7), first: round as u64 * 3 };
        let (x, branch, bias) = (self.elems(len, 1.0), self.elems(len, 1.0), self.elems(size.cols + 3, 1.0));
        for with_bias in [false, true] {
            for dropout in [None, Some(dropout)] {
                let mut y = self.k.buffer(len);
                let bias = with_bias.then_some(BufSlice { buf: &bias, start: 3 });
                self.k.residual(size, &x, Branch { x: &branch, bias, dropout }, &mut y);
                self.keep(&format!("residual, bias {with_bias}, dropped {}", dropout.is_some()), &y);
            }
        }
        let mut y = self.k.buffer(len);
        self.k.dropout(&dropout, &x, &mut y);
        self.keep("dropout", &y);
        for which in [Activation::Gelu, Activation::Silu] {
            let (x, mut dy, up) = (self.elems(len, 4.0), self.elems(len, 1.0), self.elems(len, 1.0));
            let (mut y, mut d_gate) = (self.k.buffer(len), self.k.buffer(len));
            self.k.activate(which, &x, &mut y);
            self.keep(&format!("{which:?}"), &y);
            self.k.gate(which, &x, &up, &mut y);
            self.keep(&format!("{which:?} gate"), &y);
            let mut d_up = self.k.clone_of(&dy);
            self.k.gate_grad(which, &x, &up, &mut d_up, &mut d_gate);
            self.keep(&format!("{which:?} gate's gradient of up"), &d_up);
            self.keep(&format!("{which:?} gate's gradient of gate"), &d_gate);
            self.k.activate_grad(which, &x, &mut dy);
            self.keep(&format!("{which:?} gradient"), &dy);
        }
        let (target, mut d) = (self.elems(len, 1.0), self.k.buffer(len));
        let error = self.k.squared_error(&x, &target);
        self.number("squared error", error);
        self.k.squared_error_grad(&x, &target, 0.37, &mut d);
        self.keep("squared error's gradient", &d);
    }

    fn norms(&mut self, round: usize) {
        let size = self.size(80, [900, 3000, 9000][round % 3], round);
        let (x, gamma) = (self.elems(size.len(), 2.0), self.elems(size.cols + 8, 1.5));
        let beta = self.elems(size.cols, 0.5);
        let start = if round.is_multiple_of(3) { 8 } else { 1 };
        let gamma = BufSlice { buf: &gamma, start };
        for rms in [false, true] {
            let name = if rms { "rms norm" } else { "layer norm" };
            let (mut y, dy) = (self.k.buffer(size.len()), self.elems(size.len(), 1.0));
            let mut stats = self.k.wide(if rms { 1 } else { 2 } * size.rows);
            let out = Normed { y: &mut y, stats: &mut stats };
            match rms {
                true => self.k.rms_norm(size, &x, gamma, 1e-5, out),
                false => {
                    let weights = NormWeights { gamma, beta: (&beta).into(), epsilon: 1e-5 };
                    self.k.layer_norm(size, &x, weights, out);
                }
            }
            self.keep(name, &y);
            let added = self.elems(size.len(), 1.0);
            for residual in [None, Some(&added)] {
                let mut dx = self.k.buffer(size.len());
                let mut sums = self.k.wide(if rms { 1 } else { 2 } * size.cols);
                let saved = NormSaved { x: &x, stats: &stats, gamma };
                let out = NormGrad { residual, dx: &mut dx, sums: &mut sums };
                match rms {
                    true => self.k.rms_norm_grad(size, saved, &dy, out),
                    false => self.k.layer_norm_grad(size, saved, &dy, out),
                }
                let with = if residual.is_some() { " + residual" } else { "" };
                self.keep(&format!("{name}'s gradient{with}"), &dx);
                self.keep(&format!("{name}'s gradients of weights{with}"), &sums);
            }
        }
    }

    fn tables(&mut self, round: usize) {
        let cols = self.size(1, 500, round).cols;
        let (rows, held) = (self.below(900), 11..11 + self.below(60));
        let ids: Vec<i32> = (0..rows).map(|_| (self.draw() % 90) as i32 - 3).collect();
        let lookup = Lookup { ids: &ids, held: held.clone(), cols };
        let (table, mut y) = (self.elems(held.len() * cols + 8, 1.0), self.k.buffer(rows * cols));
        let table = BufSlice { buf: &table, start: 8 };
        self.k.lookup(&lookup, table, false, &mut y);
        self.keep("lookup", &y);
        self.k.lookup(&lookup, table, true, &mut y);
        self.keep("lookup, added", &y);
        let (dy, mut grads) = (self.elems(rows * cols, 1.0), self.reals(held.len() * cols + 4, 1.0));
        self.k.lookup_grad(&lookup, &dy, PartMut { buf: &mut grads, start: 4 });
        self.keep("lookup's gradient", &grads);
    }

    fn losses(&mut self, round: usize) {
        let size = self.size(90, [400, 3000, 50_000][round % 3], round);
        let held = 5..5 + size.cols;
        let targets: Vec<i32> =
            (0..size.rows).map(|_| (self.draw() % (size.cols as u64 + 10)) as i32).collect();
        let classes = Classes { rows: size.rows, held, targets: &targets };
        let (mut logits, mut max) = (self.elems(size.len(), 6.0), self.k.wide(size.rows));
        self.k.row_max(size, &logits, &mut max);
        self.keep("row max", &max);
        let mut sums = self.k.wide(2 * size.rows);
        self.k.exp_sums(&classes, &max, &mut logits, &mut sums);
        self.keep("exponentials", &logits);
        self.keep("sums of exponentials", &sums);
        let loss = self.k.cross_entropy(size.rows, &sums);
        self.number("cross-entropy", loss);
        self.k.cross_entropy_grad(&classes, &sums, 0.01, &mut logits);
        self.keep("cross-entropy's gradient", &logits);
    }

    fn products(&mut self, round: usize) {
        for i in 0..8 {
            let whole = (round + i).is_multiple_of(3);
            let [m, n, k] =
                [(); 3].map(|()| self.below(300)).map(|x| if whole { x.next_multiple_of(8) } else { x });
            let (start, wide) = (if whole { 0 } else { i }, i % 4 == 3);
            let (a, b) = (self.elems(m * k + start, 1.0), self.elems(k * n + start, 0.3));
            let bias = self.elems(n + start, 1.0);
            let mut c = if wide { self.reals(m * n + start, 1.0) } else { self.elems(m * n + start, 1.0) };
            let mut gemm = Gemm::new(m, n, k);
            gemm = if i & 1 == 1 { gemm.a_transposed() } else { gemm };
            gemm = if i & 2 == 2 { gemm.b_transposed() } else { gemm };
            gemm = if i & 4 == 4 { gemm.added() } else { gemm };
            gemm.alpha = K::Real::from_f64([1.0, 0.5][round % 2]);
            let bias = (!wide && i % 2 == 0).then_some(BufSlice { buf: &bias, start });
            let [a, b] = [&a, &b].map(|buf| BufSlice { buf, start });
            self.k.gemm(gemm, a, b, bias, PartMut { buf: &mut c, start });
            self.keep(
                &format!(
                    "product {m}x{n}x{k} {:?} {:?} + {} bias {} from {start}",
                    gemm.a,
                    gemm.b,
                    gemm.beta,
                    bias.is_some()
                ),
                &c,
            );
        }
        let (a, b, mut c) = (self.elems(1, 1.0), self.elems(1, 1.0), self.elems(12, 1.0));
        self.k.gemm(Gemm::new(3, 4, 0), (&a).into(), (&b).into(), None, (&mut c).into());
        self.keep("product of no depth", &c);
    }

    fn attention(&mut self, round: usize) {
        for kind in 0..3 {
            let group = if kind == 2 { self.below(3) } else { 1 };
            let kv_heads = self.below(3);
            let (heads, head_dim) = (kv_heads * group, [64, 16, 80, 128, 7][(round + kind) % 5]);
            let queries = self.below([150, 257, 40][round % 3]);
            let keys = if kind == 0 { queries } else { queries + self.below(40) };
            let samples = self.below(3);
            let stream = Stream::new(3, 4, 5);
            let dropout =
                AttentionDropout { rate: 0.2, stream, first_sample: 2, first_head: 1, all_heads: 11 };
            let dropout = (round % 4 == 3).then_some(dropout);
            let causal = !(round + kind).is_multiple_of(3);
            let size = Attention { samples, heads, kv_heads, head_dim, queries, keys, causal, dropout };
            let (wide, narrow) = (samples * queries * heads * head_dim, samples * keys * kv_heads * head_dim);
            let lens = match kind {
                0 => vec![3 * wide],
                1 => vec![wide, 2 * narrow],
                _ => vec![wide, narrow, narrow],
            };
            let x: Vec<K::Buf> = lens.iter().map(|len| self.elems(*len, 1.5)).collect();
            let projected = || match &x[..] {
                [x] => Projected::Fused(x),
                [q, kv] => Projected::Apart { q, kv },
                [q, k, v] => Projected::Three { q, k, v },
                _ => unreachable!(),
            };
            let (mut y, mut lse) = (self.k.buffer(wide), self.k.wide(samples * heads * queries));
            self.k.attention(&size, projected(), &mut y, &mut lse);
            let name = format!(
                "attention {samples}x{heads}/{kv_heads}x{queries}/{keys}x{head_dim} causal {causal} dropped {}",
                dropout.is_some()
            );
            self.keep(&name, &y);
            self.keep(&format!("{name}: lse"), &lse);
            let dy = self.elems(wide, 1.0);
            let mut d: Vec<K::Buf> = lens.iter().map(|len| self.k.buffer(*len)).collect();
            let saved = AttentionSaved { y: &y, lse: &lse };
            let dx = match &mut d[..] {
                [x] => ProjectedMut::Fused(x),
                [q, kv] => ProjectedMut::Apart { q, kv },
                [q, k, v] => ProjectedMut::Three { q, k, v },
                _ => unreachable!(),
            };
            self.k.attention_grad(&size, projected(), saved, &dy, dx);
            for (i, d) in d.iter().enumerate() {
                self.keep(&format!("{name}: gradient {i}"), d);
            }
        }
        let (heads, half, positions) = (self.below(4), [32, 5, 40][round % 3], self.below(70));
        let angles: Vec<f64> =
            (0..positions * half).map(|i| (i / half) as f64 * 0.9f64.powi((i % half) as i32)).collect();
        let rotary = Rotary {
            head_dim: 2 * half,
            positions,
            cosines: angles.iter().map(|a| a.cos()).collect(),
            sines: angles.iter().map(|a| a.sin()).collect(),
        };
        let size = Rows { rows: self.below(3) * positions, cols: heads * 2 * half };
        for (first, back) in [(0, false), (0, true), (positions / 2, false)] {
            let mut x = self.elems(size.len(), 1.0);
            self.k.rotate(&rotary, first, size, back, &mut x);
            self.keep(&format!("rotary from {first}, back {back}"), &x);
        }
    }

    fn updates(&mut self) {
        let len = self.below(9000);
        let run = 3..3 + len;
        for rounded in [false, true] {
            let (mut p, g) = (self.reals(len + 5, 1.0), self.reals(len + 4, 1.0));
            let (mut m, mut v) = (self.reals(len + 3, 0.1), self.reals(len + 3, 0.1));
            let squared: Vec<K::Real> = self.k.download(&v).iter().map(|x| *x * *x).collect();
            self.k.put_reals(&squared, (&mut v).into());
            let mut copy = self.elems(len + 3, 1.0);
            let (learning_rate, weight_decay, grad_scale) = (1e-2, 0.1, 0.7);
            let step = AdamW {
                learning_rate,
                beta1: 0.9,
                beta2: 0.95,
                epsilon: 1e-8,
                weight_decay,
                step: 4,
                grad_scale,
            };
            let state = AdamWState {
                params: PartMut { buf: &mut p, start: 2 },
                rounded: (rounded && K::IS_MIXED).then_some((&mut copy).into()),
                grads: BufSlice { buf: &g, start: 1 },
                first: (&mut m).into(),
                second: (&mut v).into(),
            };
            self.k.adamw(&step, run.clone(), state);
            for (what, buf) in [("parameters", &p), ("first", &m), ("second", &v)] {
                self.keep(&format!("adamw {what}"), buf);
            }
            let step = Sgd { learning_rate, momentum: 0.9, weight_decay, grad_scale };
            let state = SgdState {
                params: PartMut { buf: &mut p, start: 2 },
                rounded: (rounded && K::IS_MIXED).then_some((&mut copy).into()),
                grads: BufSlice { buf: &g, start: 1 },
                velocity: (&mut m).into(),
            };
            self.k.sgd(&step, run.clone(), state);
            for (what, buf) in [("parameters", &p), ("velocity", &m)] {
                self.keep(&format!("sgd {what}"), buf);
            }
            if rounded {
                // The copy is what the parameters are, rounded: elsewhere nobody writes one.
                let mut expected = self.k.clone_of(&copy);
                self.k.copy(BufSlice { buf: &p, start: 5 }, PartMut { buf: &mut expected, start: 3 }, len);
                self.keep("the copy that an update writes", if K::IS_MIXED { &copy } else { &expected });
            }
        }
    }
}

fn all<K: Kernels>(k: &K, narrow: bool, rounds: usize) -> Result<Found, String> {
    let mut lab = Lab { k, seed: 1, narrow, found: vec![] };
    for round in 0..rounds {
        lab.moves(round);
        lab.pointwise(round);
        lab.norms(round);
        lab.tables(round);
        lab.losses(round);
        lab.products(round);
        lab.attention(round);
        lab.updates();
        k.finish().map_err(|e| format!("round {round}, behind {:?}: {e}", lab.found.last().map(|f| &f.0)))?;
    }
    Ok(lab.found)
}

#[expect(clippy::print_stdout, reason = "its answer")]
fn compare<K: Kernels>(name: &str, make: impl Fn() -> K, narrow: bool, allowed: f64, rounds: usize) -> usize {
    let kernels = make();
    let found =
        match all(&kernels, narrow, rounds).and_then(|found| Ok((all(&kernels, narrow, rounds)?, found))) {
            Ok((again, found)) => {
                let differ = found
                    .iter()
                    .zip(&again)
                    .filter(|(a, b)| a.1.iter().map(|x| x.to_bits()).ne(b.1.iter().map(|x| x.to_bits())));
                let differ: Vec<&str> = differ.map(|(a, _)| a.0.as_str()).collect();
                println!(
                    "{name}: {} results, {} with other bits the second time {differ:?}",
                    found.len(),
                    differ.len()
                );
                found
            }
            Err(error) => {
                println!("{name}: WRONG, {error}");
                return 1;
            }
        };
    let truth = all(&Cpu::<f64>::new(8), narrow, rounds).expect("the host never fails");
    let (mut wrong, mut worst) = (0, std::collections::BTreeMap::<String, f64>::new());
    for ((what, is), (_, should)) in found.iter().zip(&truth) {
        let off: f64 = is.iter().zip(should).map(|(a, b)| (a - b) * (a - b)).sum();
        let size: f64 = should.iter().map(|x| x * x).sum();
        let error = (off / size.max(1e-30)).sqrt();
        let kind = what.split([' ', ',']).next().unwrap_or_default().to_string();
        let so_far = worst.entry(kind).or_default();
        *so_far = if error.is_nan() { error } else { so_far.max(error) };
        if error.is_nan() || error > allowed || is.len() != should.len() {
            wrong += 1;
            if wrong <= 40 {
                println!(
                    "{name}: WRONG {error:9.2e} of {allowed:.1e}  {what} ({} numbers, first {:?} should be {:?})",
                    is.len(),
                    &is[..is.len().min(3)],
                    &should[..should.len().min(3)]
                );
            }
        }
    }
    let worst: Vec<String> = worst.iter().map(|(kind, error)| format!("{kind} {error:.1e}")).collect();
    println!("{name}: {wrong} of {} wrong; the worst: {}", found.len(), worst.join(", "));
    wrong
}

/// The battery of every kernel, which all devices are held against.
#[expect(clippy::print_stdout, reason = "its answer")]
fn battery<K: Kernels>(name: &str, kernels: &K, rounding: Rounding, rounds: usize) -> usize {
    let mut wrong = 0;
    for seed in 0..rounds as u64 {
        let found = battery::run(kernels, rounding, Models::Decoders, seed);
        if let Err(error) = kernels.finish() {
            println!("{name}: WRONG, battery {seed}: {error}");
            return wrong + 1;
        }
        let exact = battery::run(&Cpu::<f64>::new(8), rounding, Models::Decoders, seed);
        for (what, error) in battery::compare(&found, &exact, rounding) {
            if error.is_nan() || error > 1.0 {
                wrong += 1;
                println!("{name}: WRONG battery {seed} {what}: {error:.2} of what it may be off");
            }
        }
    }
    println!("{name}: {wrong} of {rounds} batteries' results are wrong");
    wrong
}

fn main() -> std::process::ExitCode {
    let rounds = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(6);
    if std::env::args().nth(2).is_some_and(|what| what == "host") {
        let wrong = compare("host f32", || Cpu::<f32>::new(2), false, 1e-5, rounds)
            + compare("host bf16", || CpuBf16::new(2), true, 1.0 / 256.0, rounds);
        return std::process::ExitCode::from(u8::from(wrong > 0));
    }
    let device: Arc<Device> = match Device::open(0) {
        Ok(device) => device,
        Err(error) => {
            eprintln!("error: {error}");
            return std::process::ExitCode::from(2);
        }
    };
    let mut wrong = 0;
    for chosen in [Chosen::Same, Chosen::Fastest(None)] {
        let f32 = || Gpu::<f32>::new(&device, &chosen).expect("kernels");
        let bf16 = || Gpu::<bf16>::new(&device, &chosen).expect("kernels");
        wrong += battery(&format!("f32 {chosen:?}"), &f32(), Rounding::F32, rounds);
        wrong += battery(&format!("bf16 {chosen:?}"), &bf16(), Rounding::Bf16, rounds);
        wrong += compare(&format!("f32 {chosen:?}"), f32, false, 1e-5, rounds);
        wrong += compare(&format!("bf16 {chosen:?}"), bf16, true, 1.0 / 256.0, rounds);
    }
    std::process::ExitCode::from(u8::from(wrong > 0))
}
