//! Kernels that look at one element, or one row, at a time.

use super::simd::vectorized;
use super::tile::{cut, tiles};
use super::{Cpu, HostBuf};
use crate::kernels::random::{Stream, threshold};
use crate::kernels::scalar::{Scalar, sigmoid};
use crate::kernels::{Activation, Branch, Dropout, Rotary, Rows};

impl<T: Scalar> Cpu<T> {
    pub(super) fn add_into(&self, x: &[T], y: &mut [T]) {
        let chunk = self.chunk(x.len());
        self.threads.each(x.chunks(chunk).zip(y.chunks_mut(chunk)), |(x, y)| add(x, y));
    }

    pub(super) fn sum_of_rows(&self, size: Rows, x: &[T], sums: &mut [T]) {
        if size.is_empty() {
            return;
        }
        let cols = cut(size.cols, self.threads.count(), 16);
        let parts = tiles(&mut sums[..size.cols], size.cols, &cut(1, 1, 1), &cols);
        self.threads.each(cols.iter().zip(parts), |(cols, mut part)| {
            let all = 0..part.cols();
            sum_columns(x, size.cols, cols.start, part.row(0, all));
        });
    }

    pub(super) fn join_branch(&self, size: Rows, x: &[T], branch: Branch<'_, HostBuf<T>>, y: &mut [T]) {
        assert_eq!(x.len(), size.len());
        assert_eq!(y.len(), size.len());
        if size.is_empty() {
            return;
        }
        let bias = branch.bias.map(|b| &b.buf[b.start..][..size.cols]);
        let chunk = self.chunk(size.len()).next_multiple_of(size.cols);
        let items = x.chunks(chunk).zip(branch.x.chunks(chunk)).zip(y.chunks_mut(chunk)).enumerate();
        self.threads.each(items, |(i, ((x, branch_x), y))| {
            let mut dropout = branch.dropout;
            if let Some(dropout) = &mut dropout {
                dropout.first += (i * chunk) as u64;
            }
            join_rows(x, branch_x, bias, dropout, size.cols, y);
        });
    }

    pub(super) fn drop_out(&self, dropout: &Dropout, x: &[T], y: &mut [T]) {
        let chunk = self.chunk(x.len());
        self.threads.each(x.chunks(chunk).zip(y.chunks_mut(chunk)).enumerate(), |(i, (x, y))| {
            y.copy_from_slice(x);
            mask(Mask::new(dropout, (i * chunk) as u64), y);
        });
    }

    pub(super) fn activation(&self, activation: Activation, x: &[T], y: &mut [T]) {
        let chunk = self.chunk(x.len());
        self.threads.each(x.chunks(chunk).zip(y.chunks_mut(chunk)), |(x, y)| match activation {
            Activation::Gelu => gelu(x, y),
            Activation::Silu => silu(x, y),
        });
    }

    pub(super) fn activation_grad(&self, activation: Activation, x: &[T], dy: &mut [T]) {
        let chunk = self.chunk(x.len());
        self.threads.each(x.chunks(chunk).zip(dy.chunks_mut(chunk)), |(x, dy)| match activation {
            Activation::Gelu => gelu_grad(x, dy),
            Activation::Silu => silu_grad(x, dy),
        });
    }

    pub(super) fn gated(&self, activation: Activation, gate: &[T], up: &[T], y: &mut [T]) {
        let chunk = self.chunk(gate.len());
        let items = gate.chunks(chunk).zip(up.chunks(chunk)).zip(y.chunks_mut(chunk));
        self.threads.each(items, |((gate, up), y)| {
            match activation {
                Activation::Gelu => gelu(gate, y),
                Activation::Silu => silu(gate, y),
            }
            multiply(up, y);
        });
    }

    pub(super) fn gated_grad(
        &self,
        activation: Activation,
        gate: &[T],
        up: &[T],
        dy: &mut [T],
        d_gate: &mut [T],
    ) {
        let chunk = self.chunk(gate.len());
        let items = gate.chunks(chunk).zip(up.chunks(chunk)).zip(dy.chunks_mut(chunk));
        self.threads.each(items.zip(d_gate.chunks_mut(chunk)), |(((gate, up), dy), d_gate)| {
            d_gate.copy_from_slice(up);
            multiply(dy, d_gate);
            let mut active = [T::ZERO; GATED];
            for ((gate, dy), d_gate) in
                gate.chunks(GATED).zip(dy.chunks_mut(GATED)).zip(d_gate.chunks_mut(GATED))
            {
                let active = &mut active[..gate.len()];
                match activation {
                    Activation::Gelu => (gelu(gate, active), gelu_grad(gate, d_gate)),
                    Activation::Silu => (silu(gate, active), silu_grad(gate, d_gate)),
                };
                multiply(active, dy);
            }
        });
    }

    pub(super) fn rotate_rows(&self, rotary: &Rotary, first: usize, size: Rows, back: bool, x: &mut [T]) {
        let Rotary { head_dim, positions, cosines, sines } = rotary;
        assert_eq!(x.len(), size.len());
        if size.is_empty() {
            return;
        }
        let half = head_dim / 2;
        let sign = if back { -1.0 } else { 1.0 };
        let rows = self.chunk(size.len()).div_ceil(size.cols);
        self.threads.each(x.chunks_mut(rows * size.cols).enumerate(), |(i, x)| {
            let mut turns = vec![[T::ZERO; 2]; half];
            for (r, row) in x.chunks_exact_mut(size.cols).enumerate() {
                let at = (first + i * rows + r) % positions * half;
                let of_row = cosines[at..][..half].iter().zip(&sines[at..][..half]);
                for (turn, (&cos, &sin)) in turns.iter_mut().zip(of_row) {
                    *turn = [T::from_f64(cos), T::from_f64(sign * sin)];
                }
                for head in row.chunks_exact_mut(*head_dim) {
                    let (first, second) = head.split_at_mut(half);
                    turn(&turns, first, second);
                }
            }
        });
    }
}

/// Elements of an activation that is computed again for a gradient.
const GATED: usize = 1024;

vectorized! {
    fn multiply<T>(x: &'a [T], y: &'a mut [T]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y *= x;
        }
    }
}

vectorized! {
    fn turn<T>(turns: &'a [[T; 2]], first: &'a mut [T], second: &'a mut [T]) {
        for ((a, b), &[cos, sin]) in first.iter_mut().zip(second).zip(turns) {
            let (x, y) = (*a, *b);
            *a = x * cos - y * sin;
            *b = y * cos + x * sin;
        }
    }
}

vectorized! {
    fn add<T>(x: &'a [T], y: &'a mut [T]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y += x;
        }
    }
}

vectorized! {
    /// Adds columns from `first` on, row after row.
    fn sum_columns<T>(x: &'a [T], cols: usize, first: usize, sums: &'a mut [T]) {
        for row in x.chunks_exact(cols) {
            for (sum, &x) in sums.iter_mut().zip(&row[first..]) {
                *sum += x;
            }
        }
    }
}

fn join_rows<T: Scalar>(
    x: &[T],
    branch: &[T],
    bias: Option<&[T]>,
    dropout: Option<Dropout>,
    cols: usize,
    y: &mut [T],
) {
    match bias {
        Some(bias) => {
            for (branch, y) in branch.chunks_exact(cols).zip(y.chunks_exact_mut(cols)) {
                set_sum(branch, bias, y);
            }
        }
        None => y.copy_from_slice(branch),
    }
    if let Some(dropout) = dropout {
        mask(Mask::new(&dropout, 0), y);
    }
    add(x, y);
}

vectorized! {
    fn set_sum<T>(a: &'a [T], b: &'a [T], y: &'a mut [T]) {
        for (y, (&a, &b)) in y.iter_mut().zip(a.iter().zip(b)) {
            *y = a + b;
        }
    }
}

/// Blocks of four draws that are drawn at once.
const BLOCKS: usize = 16;

/// A mask from an element of the whole tensor on.
#[derive(Clone, Copy)]
pub(super) struct Mask {
    stream: Stream,
    below: u32,
    keep: f64,
    first: u64,
}

impl Mask {
    pub(super) fn new(dropout: &Dropout, offset: u64) -> Self {
        Self {
            stream: dropout.stream,
            below: threshold(dropout.rate),
            keep: 1.0 / (1.0 - dropout.rate),
            first: dropout.first + offset,
        }
    }
}

vectorized! {
    /// Drops elements and scales those that stay.
    pub(super) fn mask<T>(mask: Mask, y: &'a mut [T]) {
        let keep = T::from_f64(mask.keep);
        // Up to the next block the draws come one by one.
        let head = y.len().min((4 - (mask.first % 4) as usize) % 4);
        let (head, rest) = y.split_at_mut(head);
        let aligned = mask.first + head.len() as u64;
        for (i, y) in head.iter_mut().enumerate() {
            *y *= if mask.stream.at(mask.first + i as u64) < mask.below { T::ZERO } else { keep };
        }
        for (i, chunk) in rest.chunks_mut(4 * BLOCKS).enumerate() {
            let draws = mask.stream.blocks::<BLOCKS>(aligned / 4 + (i * BLOCKS) as u64);
            for (j, y) in chunk.iter_mut().enumerate() {
                *y *= if draws[j % 4][j / 4] < mask.below { T::ZERO } else { keep };
            }
        }
    }
}

/// gelu(x) = x / 2 (1 + tanh u) = x sigmoid(2u), with u = sqrt(2/pi) (x + 0.044715 x^3).
const GELU_SCALE: f64 = 1.595_769_121_605_731;
const GELU_CUBE: f64 = 0.044_715;

vectorized! {
    fn gelu<T>(x: &'a [T], y: &'a mut [T]) {
        let (scale, cube) = (T::from_f64(GELU_SCALE), T::from_f64(GELU_CUBE));
        for (y, &x) in y.iter_mut().zip(x) {
            *y = x * sigmoid(scale * (x + cube * x * x * x));
        }
    }
}

vectorized! {
    fn gelu_grad<T>(x: &'a [T], dy: &'a mut [T]) {
        let (scale, cube, three) = (T::from_f64(GELU_SCALE), T::from_f64(GELU_CUBE), T::from_f64(3.0));
        for (dy, &x) in dy.iter_mut().zip(x) {
            let s = sigmoid(scale * (x + cube * x * x * x));
            let slope = scale * (T::ONE + three * cube * x * x);
            *dy *= s + x * s * (T::ONE - s) * slope;
        }
    }
}

vectorized! {
    fn silu<T>(x: &'a [T], y: &'a mut [T]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = x * sigmoid(x);
        }
    }
}

vectorized! {
    fn silu_grad<T>(x: &'a [T], dy: &'a mut [T]) {
        for (dy, &x) in dy.iter_mut().zip(x) {
            let s = sigmoid(x);
            *dy *= s + x * s * (T::ONE - s);
        }
    }
}
