//! Every training kernel against the reference.

use super::reference as truth;
use super::{Checked, Lab, allowed, rounded};
use crate::CudaError;
use crate::cuda::ops::{
    Activation, AdamState, AdamW, Draws, Norm, NormIn, NormOut, NormSaved, Real, Rotary, Rows, Tables,
    sort_ids,
};

/// All of them, at `sizes` random sizes each.
pub fn all(lab: &mut Lab<'_>, sizes: usize) -> Result<Vec<Checked>, CudaError> {
    let mut checked = vec![];
    for round in 0..sizes {
        for real in Real::ALL {
            for norm in [Norm::Layer, Norm::Rms] {
                for residual in [false, true] {
                    checked.extend(norms(lab, norm, real, residual, round)?);
                }
            }
            checked.push(columns(lab, real, round)?);
            checked.extend(pointwise(lab, real, round)?);
            checked.push(rotary(lab, real, round)?);
            checked.push(classifier(lab, real, round)?);
            checked.extend(embedding(lab, real, round)?);
            checked.push(adamw(lab, real)?);
            checked.push(sums(lab, real)?);
        }
    }
    Ok(checked)
}

/// A size that divides by nothing, or in every third round one that is whole vectors.
fn size(lab: &mut Lab<'_>, round: usize, rows: u64, cols: u64) -> Rows {
    let (rows, cols) = (1 + lab.random.below(rows) as u32, 1 + lab.random.below(cols) as u32);
    Rows { rows, cols: cut(cols as usize, round) as u32 }
}

/// The same for a number of columns.
fn cut(columns: usize, round: usize) -> usize {
    if round.is_multiple_of(3) { columns.next_multiple_of(8) } else { columns | 1 }
}

fn norms(
    lab: &mut Lab<'_>,
    norm: Norm,
    real: Real,
    residual: bool,
    round: usize,
) -> Result<Vec<Checked>, CudaError> {
    // Rows of one, two and four vectors a thread, and of any width.
    let wide = [3000, 9000, 17_000][round % 3];
    let size = size(lab, round, 60, wide);
    let (rows, cols) = (size.rows as usize, size.cols as usize);
    let (len, epsilon) = (rows * cols, 1e-5f32);
    let (a, b) = (lab.random.numbers(real, len, 2.0), lab.random.numbers(real, len, 1.0));
    let gamma = lab.random.numbers(real, cols, 1.5);
    let beta = lab.random.numbers(real, cols, 0.5);
    let input: Vec<f64> = match residual {
        true => a.iter().zip(&b).map(|(a, b)| rounded(real, a + b)).collect(),
        false => a.clone(),
    };
    let layer = norm == Norm::Layer;
    let [y, mean, rstd] = truth::norm(&input, cols, &gamma, layer.then_some(&beta[..]), f64::from(epsilon));
    let name = |pass: &str| {
        let with = if residual { " + residual" } else { "" };
        format!("{norm:?} norm{with} {pass} {} [{rows}, {cols}]", real.name())
    };
    let (x, r, g, bt) =
        (lab.put(real, &a)?, lab.put(real, &b)?, lab.put(real, &gamma)?, lab.put(real, &beta)?);
    let (sum_out, y_out) = (lab.empty(real, len)?, lab.empty(real, len)?);
    // As they lie: mean and rstd of a row one behind the other, or rstd alone.
    let laid = |mean: &[f64], rstd: &[f64]| -> Vec<f64> {
        let rows = mean.iter().zip(rstd);
        rows.flat_map(|(m, r)| if layer { vec![*m, *r] } else { vec![*r] }).collect()
    };
    let stats = laid(&mean, &rstd);
    let stats_out = lab.empty(Real::F32, stats.len())?;
    let from = NormIn {
        x: x.at(),
        residual: if residual { r.at() } else { 0 },
        gamma: g.at(),
        beta: if layer { bt.at() } else { 0 },
    };
    let into = NormOut { sum: sum_out.at(), y: y_out.at(), stats: stats_out.at() };
    let mut outputs = vec![(&y_out, real, &y[..]), (&stats_out, Real::F32, &stats[..])];
    if residual {
        outputs.push((&sum_out, real, &input[..]));
    }
    let poison = || [&y_out, &sum_out, &stats_out].into_iter().try_for_each(|b| b.poison());
    // SAFETY: buffers of these sizes.
    let run = |queue: &crate::cuda::ops::Queue| unsafe {
        queue.norm_forward(norm, real, size, from, epsilon, into)
    };
    // Means of numbers around zero are small: their error is that of the numbers.
    let near = if layer { allowed(real).max(1e-4) } else { allowed(real) };
    let forward = lab.check(name("forward"), near, poison, run, &outputs)?;

    let dy = lab.random.numbers(real, len, 1.0);
    let d_residual = lab.random.numbers(real, len, 1.0);
    let stored = |v: &[f64]| v.iter().map(|x| rounded(Real::F32, *x)).collect::<Vec<_>>();
    let (mean, rstd) = (stored(&mean), stored(&rstd));
    let [mut dx, sums] = truth::norm_grad(&input, cols, &gamma, (&mean, &rstd), &dy, layer);
    if residual {
        dx.iter_mut().zip(&d_residual).for_each(|(d, r)| *d += r);
    }
    let (x, d, dr) = (lab.put(real, &input)?, lab.put(real, &dy)?, lab.put(real, &d_residual)?);
    let given = lab.put(Real::F32, &laid(&mean, &rstd))?;
    let (dx_out, sums_out) = (lab.empty(real, len)?, lab.empty(Real::F32, sums.len())?);
    let saved = NormSaved {
        x: x.at(),
        gamma: g.at(),
        stats: given.at(),
        dy: d.at(),
        residual: if residual { dr.at() } else { 0 },
    };
    let poison = || [&dx_out, &sums_out].into_iter().try_for_each(|b| b.poison());
    // SAFETY: buffers of these sizes.
    let run = |queue: &crate::cuda::ops::Queue| unsafe {
        queue.norm_backward(norm, real, size, saved, dx_out.at(), (sums_out.at(), false))
    };
    let outputs = [(&dx_out, real, &dx[..]), (&sums_out, Real::F32, &sums[..])];
    let backward = lab.check(name("backward"), allowed(real), poison, run, &outputs)?;
    Ok(vec![forward, backward])
}

fn columns(lab: &mut Lab<'_>, real: Real, round: usize) -> Result<Checked, CudaError> {
    let size = size(lab, round, 3000, 700);
    let (rows, cols) = (size.rows as usize, size.cols as usize);
    let x = lab.random.numbers(real, rows * cols, 1.0);
    let before = lab.random.numbers(Real::F32, cols, 1.0);
    let mut sums = before.clone();
    x.chunks(cols).for_each(|row| sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x));
    let (x, out) = (lab.put(real, &x)?, lab.put(Real::F32, &before)?);
    let again = super::stored(Real::F32, &before);
    // SAFETY: buffers of these sizes.
    let run =
        |queue: &crate::cuda::ops::Queue| unsafe { queue.column_sums(real, size, x.at(), (out.at(), true)) };
    let what = format!("bias gradient {} [{rows}, {cols}]", real.name());
    lab.check(what, 1e-5, || out.write(&again), run, &[(&out, Real::F32, &sums)])
}

fn pointwise(lab: &mut Lab<'_>, real: Real, round: usize) -> Result<Vec<Checked>, CudaError> {
    let len = 1 + lab.random.below(100_000) as usize;
    let [x, up, dy] = [6.0, 2.0, 1.0].map(|scale| lab.random.numbers(real, len, scale));
    let each = |f: &dyn Fn(usize) -> f64| (0..len).map(f).collect::<Vec<f64>>();
    let (xb, ub, db, out) =
        (lab.put(real, &x)?, lab.put(real, &up)?, lab.put(real, &dy)?, lab.empty(real, len)?);
    let (n, name) = (len as u64, |what: &str| format!("{what} {} [{len}]", real.name()));
    let grads = super::stored(real, &dy);
    let (poison, again) = (|| out.poison(), || db.write(&grads).and_then(|()| out.poison()));
    let mut done = vec![];
    // SAFETY, here and below: buffers of this length.
    done.push(lab.check(
        name("gelu forward"),
        allowed(real),
        poison,
        |q| unsafe { q.activate(Activation::Gelu, real, xb.at(), n, out.at()) },
        &[(&out, real, &each(&|i| truth::gelu(x[i])))],
    )?);
    done.push(lab.check(
        name("gelu backward"),
        allowed(real),
        again,
        |q| unsafe { q.activate_backward(Activation::Gelu, real, xb.at(), n, db.at()) },
        &[(&db, real, &each(&|i| dy[i] * truth::gelu_slope(x[i])))],
    )?);
    done.push(lab.check(
        name("swiglu forward"),
        allowed(real),
        poison,
        |q| unsafe { q.gate(Activation::Silu, real, (xb.at(), ub.at()), n, out.at()) },
        &[(&out, real, &each(&|i| truth::silu(x[i]) * up[i]))],
    )?);
    done.push(lab.check(
        name("swiglu backward"),
        allowed(real),
        again,
        |q| unsafe { q.gate_backward(Activation::Silu, real, (xb.at(), ub.at()), n, (db.at(), out.at())) },
        &[
            (&out, real, &each(&|i| dy[i] * up[i] * truth::silu_slope(x[i]))),
            (&db, real, &each(&|i| dy[i] * truth::silu(x[i]))),
        ],
    )?);
    done.push(lab.check(
        name("add"),
        allowed(real),
        again,
        |q| unsafe { q.add(real, xb.at(), n, db.at()) },
        &[(&db, real, &each(&|i| x[i] + dy[i]))],
    )?);
    // Every other time, the first element is the first of a block of draws.
    let first = lab.random.below(1000);
    let first = if round.is_multiple_of(2) { first.next_multiple_of(4) } else { first };
    let (draws, rate) = (Draws { key: [3, 77], high: [5, 9] }, 0.3);
    let threshold = (rate * 4_294_967_296.0) as u32;
    let kept = |i: usize| truth::draw(first + i as u64, draws.key, draws.high) >= threshold;
    done.push(lab.check(
        name("dropout"),
        allowed(real),
        poison,
        |q| unsafe { q.dropout(real, xb.at(), (draws, first), rate, n, out.at()) },
        &[(&out, real, &each(&|i| if kept(i) { x[i] / (1.0 - rate) } else { 0.0 }))],
    )?);
    if real == Real::F32 {
        let copy = lab.empty(Real::Bf16, len)?;
        done.push(lab.check(
            name("to bf16"),
            0.0,
            || copy.poison(),
            |q| unsafe { q.to_bf16(xb.at(), n, copy.at()) },
            &[(&copy, Real::Bf16, &each(&|i| rounded(Real::Bf16, x[i])))],
        )?);
    }
    Ok(done)
}

fn rotary(lab: &mut Lab<'_>, real: Real, round: usize) -> Result<Checked, CudaError> {
    let [rows, heads, half, spare, positions, first] =
        [90, 7, 40, 9, 50, 30].map(|limit| 1 + lab.random.below(limit) as usize);
    let (half, spare) = (cut(half, round), cut(spare, round));
    let stride = heads * 2 * half + spare;
    let angles: Vec<f64> = (0..positions * half).map(|_| f64::from(lab.random.number()) * 3.0).collect();
    let table = |f: fn(f64) -> f64| angles.iter().map(|a| rounded(Real::F32, f(*a))).collect::<Vec<_>>();
    let (cosines, sines) = (table(f64::cos), table(f64::sin));
    let x = lab.random.numbers(real, rows * stride, 1.0);
    let mut y = x.clone();
    for row in 0..rows {
        for head in 0..heads {
            for column in 0..half {
                let at = row * stride + head * 2 * half + column;
                let turn = (first + row) % positions * half + column;
                let (c, s) = (cosines[turn], -sines[turn]);
                (y[at], y[at + half]) = (x[at] * c - x[at + half] * s, x[at + half] * c + x[at] * s);
            }
        }
    }
    let (cb, sb, xb) = (lab.put(Real::F32, &cosines)?, lab.put(Real::F32, &sines)?, lab.put(real, &x)?);
    let rotary = Rotary {
        cosines: cb.at(),
        sines: sb.at(),
        first: first as u32,
        positions: positions as u32,
        rows: rows as u32,
        heads: heads as u32,
        head_dim: 2 * half as u32,
        stride: stride as u32,
        back: true,
    };
    let again = super::stored(real, &x);
    let what = format!("rotary back {} [{rows}, {heads} x {}]", real.name(), 2 * half);
    // SAFETY: buffers of these sizes.
    let run = |q: &crate::cuda::ops::Queue| unsafe { q.rotary(real, &rotary, xb.at()) };
    lab.check(what, allowed(real), || xb.write(&again), run, &[(&xb, real, &y)])
}

fn classifier(lab: &mut Lab<'_>, real: Real, round: usize) -> Result<Checked, CudaError> {
    let size = size(lab, round + 1, 40, 9000);
    let (rows, classes) = (size.rows as usize, size.cols as usize);
    let stride = if round.is_multiple_of(2) { classes.next_multiple_of(128) } else { classes + 3 };
    let logits = lab.random.numbers(real, rows * stride, 8.0);
    let targets: Vec<i32> = (0..rows)
        .map(|row| if row % 7 == 3 { -1 } else { lab.random.below(classes as u64) as i32 })
        .collect();
    let scale = 1.0 / rows as f32;
    let [losses, grads] = truth::classifier(&logits, stride, classes, &targets, f64::from(scale));
    let (l, t) =
        (lab.put(real, &logits)?, lab.put_words(&targets.iter().map(|t| *t as u32).collect::<Vec<_>>())?);
    let loss = lab.empty(Real::F32, rows)?;
    let again = super::stored(real, &logits);
    let what = format!("classifier {} [{rows}, {classes} of {stride}]", real.name());
    // SAFETY: buffers of these sizes.
    let run = |q: &crate::cuda::ops::Queue| unsafe {
        q.classifier(real, size, (l.at(), stride as u32), t.at(), scale, loss.at())
    };
    let prepare = || l.write(&again).and_then(|()| loss.poison());
    lab.check(what, allowed(real), prepare, run, &[(&l, real, &grads), (&loss, Real::F32, &losses)])
}

fn embedding(lab: &mut Lab<'_>, real: Real, round: usize) -> Result<Vec<Checked>, CudaError> {
    let [samples, context, width, held] = [6, 40, 300, 60].map(|limit| 1 + lab.random.below(limit) as usize);
    let (rows, first, width) = (samples * context, 11, cut(width, round));
    // Every other time, few entries have all the rows.
    let held = if round.is_multiple_of(2) { 1 + held % 4 } else { held };
    let tokens = lab.random.numbers(real, held * width, 1.0);
    let positions = lab.random.numbers(real, context * width, 1.0);
    // Some are held elsewhere.
    let ids: Vec<i32> = (0..rows).map(|_| first + lab.random.below(held as u64 + 5) as i32 - 2).collect();
    let entry = |row: usize| usize::try_from(ids[row] - first).ok().filter(|entry| *entry < held);
    let y: Vec<f64> = (0..rows * width)
        .map(|i| {
            let (row, column) = (i / width, i % width);
            entry(row).map_or(0.0, |e| tokens[e * width + column]) + positions[row % context * width + column]
        })
        .collect();
    let words = |ids: &[i32]| ids.iter().map(|id| *id as u32).collect::<Vec<_>>();
    let (tb, pb, ib) = (lab.put(real, &tokens)?, lab.put(real, &positions)?, lab.put_words(&words(&ids))?);
    let yb = lab.empty(real, rows * width)?;
    let size = Rows { rows: rows as u32, cols: width as u32 };
    let tables = Tables {
        tokens: tb.at(),
        positions: pb.at(),
        first: first as u32,
        held: held as u32,
        context: context as u32,
    };
    let name = |what: &str| format!("{what} {} [{rows}, {width}] of {held}", real.name());
    let forward = lab.check(
        name("embedding forward"),
        allowed(real),
        || yb.poison(),
        // SAFETY: buffers of these sizes.
        |q| unsafe { q.embedding_forward(real, size, &tables, ib.at(), (yb.at(), false)) },
        &[(&yb, real, &y)],
    )?;
    let dy = lab.random.numbers(real, rows * width, 1.0);
    let (mut d_tokens, mut d_positions) = (vec![0.5; held * width], vec![0.25; context * width]);
    for (i, d) in dy.iter().enumerate() {
        let (row, column) = (i / width, i % width);
        if let Some(entry) = entry(row) {
            d_tokens[entry * width + column] += d;
        }
        d_positions[row % context * width + column] += d;
    }
    let sorted = sort_ids(&ids, first as u32, held as u32);
    let [eb, sb, rb] = [&sorted.entries, &sorted.starts, &sorted.rows].map(|words| lab.put_words(words));
    let (eb, sb, rb, dyb) = (eb?, sb?, rb?, lab.put(real, &dy)?);
    let dt = lab.empty(Real::F32, held * width)?;
    let dp = lab.empty(Real::F32, context * width)?;
    let halves = super::stored(Real::F32, &vec![0.5; held * width]);
    let quarters = super::stored(Real::F32, &vec![0.25; context * width]);
    let backward = lab.check(
        name("embedding backward"),
        1e-5,
        || dt.write(&halves).and_then(|()| dp.write(&quarters)),
        // SAFETY: buffers of these sizes.
        |q| unsafe {
            let order = (eb.at(), sb.at(), rb.at(), sorted.entries.len() as u32);
            q.embedding_backward(real, size.cols, dyb.at(), order, dt.at())?;
            q.positions_backward(real, size, context as u32, dyb.at(), dp.at())
        },
        &[(&dt, Real::F32, &d_tokens), (&dp, Real::F32, &d_positions)],
    )?;
    Ok(vec![forward, backward])
}

fn adamw(lab: &mut Lab<'_>, real: Real) -> Result<Checked, CudaError> {
    let len = 1 + lab.random.below(50_000) as usize;
    let f32 = Real::F32;
    let grads = lab.random.numbers(real, len, 1.0);
    let [params, first] = [1.0, 0.1].map(|scale| lab.random.numbers(f32, len, scale));
    let second: Vec<f64> = lab.random.numbers(f32, len, 0.1).iter().map(|v| v.abs()).collect();
    let n = AdamW {
        learning_rate: 1e-2,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        step: 4,
        grad_scale: 1.0,
    };
    let factor = 0.5f64;
    let (one, two) = (1.0 - n.beta1.powi(5), 1.0 - n.beta2.powi(5));
    let (mut p, mut m, mut v) = (vec![], vec![], vec![]);
    for i in 0..len {
        let g = grads[i] * factor;
        m.push(n.beta1 * first[i] + (1.0 - n.beta1) * g);
        v.push(n.beta2 * second[i] + (1.0 - n.beta2) * g * g);
        let step = n.learning_rate * (m[i] / one) / ((v[i] / two).sqrt() + n.epsilon);
        p.push(params[i] * (1.0 - n.learning_rate * n.weight_decay) - step);
    }
    let copy: Vec<f64> = p.iter().map(|p| rounded(Real::Bf16, *p)).collect();
    let (gb, sb) = (lab.put(real, &grads)?, lab.put(f32, &[factor])?);
    let [pb, mb, vb] = [&params, &first, &second].map(|numbers| lab.put(f32, numbers));
    let (pb, mb, vb, cb) = (pb?, mb?, vb?, lab.empty(Real::Bf16, len)?);
    let again = [(&pb, &params), (&mb, &first), (&vb, &second)].map(|(b, n)| (b, super::stored(f32, n)));
    let state = AdamState { params: pb.at(), first: mb.at(), second: vb.at(), copy: cb.at() };
    let prepare = || again.iter().try_for_each(|(b, bytes)| b.write(bytes)).and_then(|()| cb.poison());
    // SAFETY: buffers of these sizes.
    let run = |q: &crate::cuda::ops::Queue| unsafe { q.adamw(real, gb.at(), &n, sb.at(), len as u64, state) };
    let what = format!("adamw, gradients in {} [{len}]", real.name());
    // A copy may round the other way where the f32 is off by its last bit.
    let checked =
        lab.check(what.clone(), 1e-5, prepare, run, &[(&pb, f32, &p), (&mb, f32, &m), (&vb, f32, &v)])?;
    let copied = lab.check(what, 1e-3, prepare, run, &[(&cb, Real::Bf16, &copy)])?;
    Ok(if copied.is_right() { checked } else { copied })
}

fn sums(lab: &mut Lab<'_>, real: Real) -> Result<Checked, CudaError> {
    let len = 1 + lab.random.below(300_000) as usize;
    let x = lab.random.numbers(real, len, 1.0);
    let squares: f64 = x.iter().map(|x| x * x).sum();
    let limit = squares.sqrt() * 0.37;
    let (xb, total, scale) = (lab.put(real, &x)?, lab.bytes(8)?, lab.empty(Real::F32, 1)?);
    let what = format!("norm and clipping {} [{len}]", real.name());
    // SAFETY: buffers of these sizes.
    let run = |q: &crate::cuda::ops::Queue| unsafe {
        q.sum_squares(real, xb.at(), len as u64, (total.at(), false))?;
        q.clip_scale(total.at(), limit, scale.at())
    };
    lab.check(what, 1e-6, || scale.poison(), run, &[(&scale, Real::F32, &[0.37])])
}
