//! Matrix products against the obvious way.

use super::reference as truth;
use super::{Checked, Lab, allowed, rounded};
use crate::CudaError;
use crate::cuda::lt::{Epilogue, Product, Products};
use crate::cuda::ops::Real;

/// Both orders of both operands, with every epilogue.
pub fn all(lab: &mut Lab<'_>, products: &Products) -> Vec<Checked> {
    let reals = Real::ALL.into_iter().cycle().take(16).enumerate();
    // A product that the library refuses is a wrong one.
    let refused = |error: CudaError| Checked {
        what: error.to_string(),
        error: f64::NAN,
        allowed: 0.0,
        same_bits: true,
    };
    reals.map(|(i, real)| one(lab, products, i, real).unwrap_or_else(refused)).collect()
}

#[expect(unsafe_code, reason = "buffers of this function's own")]
fn one(lab: &mut Lab<'_>, products: &Products, i: usize, real: Real) -> Result<Checked, CudaError> {
    // Whole vectors: what cuBLASLt asks for.
    let [rows, cols, inner] = [20, 30, 25].map(|limit| 8 * (1 + lab.random.below(limit)));
    let (a_transposed, b_transposed) = (i / 2 % 2 == 1, i / 4 % 2 == 1);
    let a = lab.random.numbers(real, (rows * inner) as usize, 1.0);
    let b = lab.random.numbers(real, (inner * cols) as usize, 0.3);
    let bias = lab.random.numbers(real, cols as usize, 1.0);
    let before = lab.random.numbers(real, (rows * cols) as usize, 1.0);
    let at = |m: &[f64], transposed: bool, (r, c): (u64, u64), (rows, cols): (u64, u64)| {
        m[if transposed { c * rows + r } else { r * cols + c } as usize]
    };
    let product_of = |r: u64, c: u64| -> f64 {
        let term =
            |k| at(&a, a_transposed, (r, k), (rows, inner)) * at(&b, b_transposed, (k, c), (inner, cols));
        (0..inner).map(term).sum()
    };
    let (ab, bb, bias_b) = (lab.put(real, &a)?, lab.put(real, &b)?, lab.put(real, &bias)?);
    let (aux, out) = (lab.put(real, &before)?, lab.empty(real, (rows * cols) as usize)?);
    // Gelu's epilogues are for bf16 alone.
    let kinds = if real == Real::Bf16 { 5 } else { 3 };
    let (epilogue, beta) = match i / 2 % kinds {
        0 => (Epilogue::None, 0.0),
        1 => (Epilogue::None, 1.0),
        2 => (Epilogue::Bias { bias: bias_b.at() }, 0.0),
        3 => (Epilogue::GeluBias { bias: bias_b.at(), before: aux.at() }, 0.0),
        _ => (Epilogue::GeluSlope { before: aux.at() }, 0.0),
    };
    let each = |f: &dyn Fn(usize, f64) -> f64| -> Vec<f64> {
        (0..rows * cols).map(|i| f(i as usize, product_of(i / cols, i % cols))).collect()
    };
    let column = |i: usize| i % cols as usize;
    let expected = match epilogue {
        Epilogue::None => each(&|i, x| x + f64::from(beta) * before[i]),
        Epilogue::Bias { .. } => each(&|i, x| x + bias[column(i)]),
        Epilogue::GeluBias { .. } => each(&|i, x| truth::gelu(rounded(real, x + bias[column(i)]))),
        Epilogue::GeluSlope { .. } => each(&|i, x| x * truth::gelu_slope(before[i])),
    };
    let product =
        Product { a_transposed, b_transposed, beta, epilogue, ..Product::new(rows, cols, inner, real) };
    let (start, saved) = (super::stored(real, &before), super::stored(real, &before));
    let prepare = || {
        aux.write(&saved)?;
        if beta == 0.0 { out.poison() } else { out.write(&start) }
    };
    let what = format!(
        "product {} {rows}x{cols}x{inner} {}{} {epilogue:?}",
        real.name(),
        if a_transposed { 't' } else { 'n' },
        if b_transposed { 't' } else { 'n' }
    );
    let what = what.split(" {").next().unwrap_or_default().to_string() + if beta == 0.0 { "" } else { " +=" };
    // SAFETY: buffers of these sizes.
    let run =
        |q: &crate::cuda::ops::Queue| unsafe { products.multiply(q, &product, (ab.at(), bb.at()), out.at()) };
    lab.check(what, allowed(real), prepare, run, &[(&out, real, &expected)])
}
