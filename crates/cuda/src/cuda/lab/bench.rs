//! How fast every kernel is, beside what the card's memory or its matrix units do.
//!
//! Sizes are those of a layer of a GPT with 1.3 billion parameters and 8 samples of 1024 tokens; buffers rotate, so that nothing is read from
//! a cache that a training step would not have it in.

use std::fmt;

use serde::Serialize;

use super::{Buffer, Lab};
use crate::cuda::lt::{Epilogue, Product, Products};
use crate::cuda::ops::{
    Activation, AdamState, AdamW, At, Draws, Norm, NormIn, NormOut, NormSaved, Queue, Real, Rotary, Rows,
    Tables, sort_ids,
};
use crate::driver::{Driver, Way};
use crate::{BoxCopy, CudaError, Side};

const ROWS: u32 = 8192;
const WIDTH: u32 = 2048;
const CLASSES: u32 = 50_257;
const STRIDE: u32 = 50_304;
const CONTEXT: u32 = 1024;
const PARAMETERS: u64 = 50_000_000;
const REPEAT: u32 = 20;

/// A kernel's time, and what it moved or computed.
#[derive(Debug, Clone, Serialize)]
pub struct Timed {
    pub kernel: String,
    pub seconds: f64,
    /// Bytes read and written, or FLOPs.
    pub work: f64,
    pub unit: &'static str,
    /// Of what the card does at best, measured in the same run.
    pub share_of_roof: f64,
}

impl fmt::Display for Timed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = self.work / self.seconds / 1e12;
        let Self { kernel, unit, share_of_roof, .. } = self;
        write!(
            f,
            "{kernel:<44} {:9.1} us  {rate:7.2} T{unit}/s  {:5.1} % of the roof",
            self.seconds * 1e6,
            share_of_roof * 100.0
        )
    }
}

/// What is timed: a closure that is called again and again, each time with the next set of buffers.
struct Bench<'l, 'a> {
    lab: &'l Lab<'a>,
    roof: f64,
    timed: Vec<Timed>,
}

impl<'a> Bench<'_, 'a> {
    /// Buffers with random contents, as many sets as make a few times the cache.
    fn sets(&self, bytes: &[u64]) -> Result<Vec<Vec<Buffer<'a>>>, CudaError> {
        let total: u64 = bytes.iter().sum();
        let count = (256u64 << 20).div_ceil(total).clamp(2, 16);
        let set = |_| bytes.iter().map(|bytes| self.random(*bytes)).collect();
        (0..count).map(set).collect()
    }

    fn random(&self, bytes: u64) -> Result<Buffer<'a>, CudaError> {
        let buffer = self.lab.bytes(bytes)?;
        // Small numbers in either type: exponents near 1, mantissas and signs of any sort.
        let mut random = super::Random(bytes);
        let block: Vec<u8> =
            (0..4096).flat_map(|_| ((random.draw() as u16 & 0x80ff) | 0x3f00).to_le_bytes()).collect();
        let mut filled = (block.len() as u64).min(bytes);
        buffer.write(&block[..filled as usize])?;
        while filled < bytes {
            let len = filled.min(bytes - filled);
            let copy = BoxCopy {
                from: Side::packed(buffer.at(), len),
                into: Side::packed(buffer.at() + filled, len),
                bytes: len,
                combine: None,
            };
            // SAFETY: one half of the buffer to the other.
            let event = unsafe { self.lab.cuda.copy(Way::Local, &copy)? };
            self.lab.cuda.wait(event)?;
            self.lab.cuda.forget(event);
            filled += len;
        }
        Ok(buffer)
    }

    fn time(
        &mut self,
        kernel: String,
        moved: f64,
        sets: usize,
        mut run: impl FnMut(&Queue, usize) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let queue = &self.lab.queue;
        let mut next = 0;
        let mut turn = || {
            next += 1;
            run(queue, next % sets)
        };
        queue.time(3, &mut turn)?;
        let mut times = [0.0; 5];
        for seconds in &mut times {
            *seconds = queue.time(REPEAT, &mut turn)?;
        }
        times.sort_by(f64::total_cmp);
        let seconds = times[2];
        let share_of_roof = moved / seconds / self.roof;
        self.timed.push(Timed { kernel, seconds, work: moved, unit: "B", share_of_roof });
        Ok(())
    }
}

/// What a large copy moves, bytes read and written a second.
#[expect(unsafe_code, reason = "buffers of this function's own")]
fn copy_roof(lab: &Lab<'_>) -> Result<f64, CudaError> {
    let bytes = 1u64 << 30;
    let (from, into) = (lab.bytes(bytes)?, lab.bytes(bytes)?);
    // SAFETY: two buffers of this length.
    let copy = || unsafe {
        match cudarc::driver::sys::cuMemcpyDtoDAsync_v2(
            into.at(),
            from.at(),
            bytes as usize,
            lab.queue.stream(),
        ) {
            cudarc::driver::sys::CUresult::CUDA_SUCCESS => Ok(()),
            code => Err(lab.cuda.failed("cuMemcpyDtoDAsync", code)),
        }
    };
    lab.queue.time(2, copy)?;
    Ok(2.0 * bytes as f64 / lab.queue.time(10, copy)?)
}

/// Every kernel.
#[expect(unsafe_code, reason = "buffers of this function's own, as large as the sizes say")]
pub fn kernels(lab: &Lab<'_>) -> Result<Vec<Timed>, CudaError> {
    let roof = copy_roof(lab)?;
    let mut bench = Bench { lab, roof, timed: vec![] };
    bench.timed.push(Timed {
        kernel: "copy of 1 GiB".into(),
        seconds: 2.0 * f64::from(1 << 30) / roof,
        work: 2.0 * f64::from(1 << 30),
        unit: "B",
        share_of_roof: 1.0,
    });
    for real in Real::ALL {
        let len = u64::from(ROWS) * u64::from(WIDTH);
        let (n, row) = (len * real.bytes(), u64::from(WIDTH) * real.bytes());
        let stats = u64::from(ROWS) * 8;
        let size = Rows { rows: ROWS, cols: WIDTH };
        let name = |what: &str| format!("{what} {} [{ROWS}, {WIDTH}]", real.name());
        for norm in [Norm::Layer, Norm::Rms] {
            let sets = bench.sets(&[n, n, n, n, row, row, stats])?;
            let what = name(&format!("{norm:?} norm + residual forward"));
            bench.time(what, 4.0 * n as f64, sets.len(), |q, i| unsafe {
                let [x, r, s, y, g, b, stats] = at(&sets[i]);
                let from = NormIn { x, residual: r, gamma: g, beta: b };
                q.norm_forward(norm, real, size, from, 1e-5, NormOut { sum: s, y, stats })
            })?;
            let sums = bench.lab.bytes(u64::from(WIDTH) * 8)?;
            let what = name(&format!("{norm:?} norm + residual backward"));
            bench.time(what, 4.0 * n as f64, sets.len(), |q, i| unsafe {
                let [x, dy, r, dx, g, _, stats] = at(&sets[i]);
                let saved = NormSaved { x, gamma: g, stats, dy, residual: r };
                q.norm_backward(norm, real, size, saved, dx, (sums.at(), true))
            })?;
        }
        let wide = 4 * len;
        let w = wide * real.bytes();
        let name4 = |what: &str| format!("{what} {} [{ROWS}, {}]", real.name(), 4 * WIDTH);
        let sets = bench.sets(&[w, w, w, w])?;
        bench.time(name4("gelu forward"), 2.0 * w as f64, sets.len(), |q, i| unsafe {
            q.activate(Activation::Gelu, real, sets[i][0].at(), wide, sets[i][1].at())
        })?;
        bench.time(name4("gelu backward"), 3.0 * w as f64, sets.len(), |q, i| unsafe {
            q.activate_backward(Activation::Gelu, real, sets[i][0].at(), wide, sets[i][1].at())
        })?;
        bench.time(name4("swiglu forward"), 3.0 * w as f64, sets.len(), |q, i| unsafe {
            q.gate(Activation::Silu, real, (sets[i][0].at(), sets[i][1].at()), wide, sets[i][2].at())
        })?;
        bench.time(name4("swiglu backward"), 5.0 * w as f64, sets.len(), |q, i| unsafe {
            let [gate, up, dy, dg] = at(&sets[i]);
            q.gate_backward(Activation::Silu, real, (gate, up), wide, (dy, dg))
        })?;
        bench.time(name4("dropout"), 2.0 * w as f64, sets.len(), |q, i| unsafe {
            let draws = (Draws { key: [1, 2], high: [3, 4] }, 0);
            q.dropout(real, sets[i][0].at(), draws, 0.1, wide, sets[i][1].at())
        })?;
        let sums = bench.lab.bytes(u64::from(WIDTH) * 16)?;
        bench.time(name4("bias gradient"), w as f64, sets.len(), |q, i| unsafe {
            let size = Rows { rows: ROWS, cols: 4 * WIDTH };
            q.column_sums(real, size, sets[i][0].at(), (sums.at(), true))
        })?;
        drop(sets);
        let table = bench.random(u64::from(CONTEXT) * 64 * 4)?;
        let sets = bench.sets(&[n, n])?;
        bench.time(name("rotary, heads of 128"), 2.0 * n as f64, sets.len(), |q, i| unsafe {
            let rotary = Rotary {
                cosines: table.at(),
                sines: table.at(),
                first: 0,
                positions: CONTEXT,
                rows: ROWS,
                heads: WIDTH / 128,
                head_dim: 128,
                stride: WIDTH,
                back: false,
            };
            q.rotary(real, &rotary, sets[i][0].at())
        })?;
        embedding(&mut bench, real, &sets)?;
        drop(sets);
        let logits = u64::from(ROWS) * u64::from(STRIDE) * real.bytes();
        let sets = bench.sets(&[logits, stats])?;
        let targets = bench.lab.put_words(&(0..ROWS).map(|i| i * 7919 % CLASSES).collect::<Vec<_>>())?;
        let what = format!("classifier {} [{ROWS}, {CLASSES}]", real.name());
        bench.time(what, 2.0 * logits as f64, sets.len(), |q, i| unsafe {
            let size = Rows { rows: ROWS, cols: CLASSES };
            q.classifier(real, size, (sets[i][0].at(), STRIDE), targets.at(), 1e-4, sets[i][1].at())
        })?;
        drop(sets);
        update(&mut bench, real)?;
    }
    boxes(&mut bench)?;
    Ok(bench.timed)
}

fn at<const N: usize>(set: &[Buffer<'_>]) -> [At; N] {
    std::array::from_fn(|i| set[i].at())
}

#[expect(unsafe_code, reason = "buffers as large as the sizes say")]
fn embedding(bench: &mut Bench<'_, '_>, real: Real, sets: &[Vec<Buffer<'_>>]) -> Result<(), CudaError> {
    let width = u64::from(WIDTH) * real.bytes();
    let (tokens, positions) =
        (bench.random(u64::from(CLASSES) * width)?, bench.random(u64::from(CONTEXT) * width)?);
    let mut random = super::Random(5);
    // Few tokens are frequent, most are rare, as in text.
    let ids: Vec<i32> = (0..ROWS)
        .map(|_| {
            let u = random.below(1 << 20) as f64 / f64::from(1 << 20);
            ((u * f64::from(CLASSES).ln()).exp() as i32).min(CLASSES as i32) - 1
        })
        .collect();
    let words = bench.lab.put_words(&ids.iter().map(|id| *id as u32).collect::<Vec<_>>())?;
    let size = Rows { rows: ROWS, cols: WIDTH };
    let moved = f64::from(ROWS) * f64::from(WIDTH) * real.bytes() as f64;
    let tables =
        Tables { tokens: tokens.at(), positions: positions.at(), first: 0, held: CLASSES, context: CONTEXT };
    let what = |what: &str| format!("embedding {what} {} [{ROWS}, {WIDTH}]", real.name());
    bench.time(what("forward"), 3.0 * moved, sets.len(), |q, i| unsafe {
        q.embedding_forward(real, size, &tables, words.at(), (sets[i][0].at(), false))
    })?;
    let sorted = sort_ids(&ids, 0, CLASSES);
    let [entries, starts, rows] =
        [&sorted.entries, &sorted.starts, &sorted.rows].map(|w| bench.lab.put_words(w));
    let (entries, starts, rows) = (entries?, starts?, rows?);
    let table = bench.random(u64::from(CLASSES) * u64::from(WIDTH) * 4)?;
    let touched = sorted.entries.len() as f64 * f64::from(WIDTH) * 8.0;
    bench.time(what("backward"), moved + touched, sets.len(), |q, i| unsafe {
        let order = (entries.at(), starts.at(), rows.at(), sorted.entries.len() as u32);
        q.embedding_backward(real, WIDTH, sets[i][0].at(), order, table.at())
    })
}

#[expect(unsafe_code, reason = "buffers as large as the sizes say")]
fn update(bench: &mut Bench<'_, '_>, real: Real) -> Result<(), CudaError> {
    let n = PARAMETERS;
    let sets = bench.sets(&[n * real.bytes(), n * 4, n * 4, n * 4, n * 2])?;
    let numbers = AdamW {
        learning_rate: 1e-4,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        step: 10,
        grad_scale: 1.0,
    };
    let what = format!("adamw, gradients in {} [{n}]", real.name());
    bench.time(what, n as f64 * (26 + real.bytes()) as f64, sets.len(), |q, i| unsafe {
        let [grads, params, first, second, copy] = at(&sets[i]);
        q.adamw(real, grads, &numbers, 0, n, AdamState { params, first, second, copy })
    })?;
    let total = bench.lab.bytes(8)?;
    let what = format!("sum of squares {} [{n}]", real.name());
    bench.time(what, (n * real.bytes()) as f64, sets.len(), |q, i| unsafe {
        q.sum_squares(real, sets[i][0].at(), n, (total.at(), false))
    })
}

/// Packing of boxes whose runs are so long, from rows twice as wide, and the way back.
#[expect(unsafe_code, reason = "buffers as large as the sizes say")]
fn boxes(bench: &mut Bench<'_, '_>) -> Result<(), CudaError> {
    let bytes = 256u64 << 20;
    let (wide, packed) = (bench.random(2 * bytes)?, bench.random(bytes)?);
    for run in [4u64, 16, 64, 256, 1024, 4096, 65_536] {
        let strided = Side { base: wide.at(), run, outer: vec![(bytes / run, 2 * run)], start: 0 };
        let packed = Side::packed(packed.at(), bytes);
        for (what, from, into) in [("pack", &strided, &packed), ("unpack", &packed, &strided)] {
            let copy = BoxCopy { from: from.clone(), into: into.clone(), bytes, combine: None };
            let kernel = format!("{what}, runs of {run} B");
            bench.time(kernel, 2.0 * bytes as f64, 1, |q, _| unsafe { q.cuda().queue(&copy, q.stream()) })?;
        }
    }
    Ok(())
}

/// A layer's products, forward, of activations' and of weights' gradients; and the head's.
#[expect(unsafe_code, reason = "buffers as large as the sizes say")]
pub fn products(lab: &Lab<'_>, products: &Products) -> Result<Vec<Timed>, CudaError> {
    let bench = Bench { lab, roof: 989e12, timed: vec![] };
    let mut timed = vec![];
    let (tokens, width) = (u64::from(ROWS), u64::from(WIDTH));
    let layers = [
        ("qkv", width, 3 * width),
        ("proj", width, width),
        ("up", width, 4 * width),
        ("down", 4 * width, width),
        ("head", width, u64::from(STRIDE)),
    ];
    for (name, from, to) in layers {
        // y = x w, dx = dy w', dw += x' dy.
        let shapes = [
            ("forward", tokens, to, from, false, false, 0.0, Real::Bf16),
            ("dgrad", tokens, from, to, false, true, 0.0, Real::Bf16),
            ("wgrad", from, to, tokens, true, false, 1.0, Real::F32),
        ];
        for (pass, rows, cols, inner, a_transposed, b_transposed, beta, result) in shapes {
            let (a, b) = (bench.random(rows * inner * 2)?, bench.random(inner * cols * 2)?);
            let (bias, c) = (bench.random(cols * 2)?, bench.random(rows * cols * result.bytes())?);
            let aux = bench.random(if name == "up" { rows * cols * 2 } else { 16 })?;
            let epilogue = match (name, pass) {
                ("up", "forward") => Epilogue::GeluBias { bias: bias.at(), before: aux.at() },
                ("head", _) | (_, "dgrad" | "wgrad") => Epilogue::None,
                _ => Epilogue::Bias { bias: bias.at() },
            };
            let real = Real::Bf16;
            let product = Product {
                a_transposed,
                b_transposed,
                result,
                beta,
                epilogue,
                ..Product::new(rows, cols, inner, real)
            };
            // SAFETY: buffers of these sizes.
            let run = || unsafe { products.multiply(&lab.queue, &product, (a.at(), b.at()), c.at()) };
            run()?;
            let mut times = [0.0; 5];
            for seconds in &mut times {
                *seconds = lab.queue.time(10, run)?;
            }
            times.sort_by(f64::total_cmp);
            let (seconds, work) = (times[2], product.flops());
            let kernel = format!("{name} {pass} {rows}x{cols}x{inner}");
            timed.push(Timed {
                kernel,
                seconds,
                work,
                unit: "FLOP",
                share_of_roof: work / seconds / bench.roof,
            });
        }
    }
    Ok(timed)
}
