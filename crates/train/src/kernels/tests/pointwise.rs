//! Element by element: activations, dropout, residuals, tables.

use proptest::prelude::*;

use super::{assert_close, assert_gradient, buf, cpu, dot, noise};
use crate::kernels::random::Stream;
use crate::kernels::{Activation, Branch, Dropout, Kernels, Lookup, PartMut, Rotary, Rows};

fn naive_activation(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Gelu => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            0.5 * x * (1.0 + u.tanh())
        }
        Activation::Silu => x / (1.0 + (-x).exp()),
    }
}

#[test]
fn activations_and_their_gradients() {
    let cpu = cpu();
    for activation in [Activation::Gelu, Activation::Silu] {
        let x: Vec<f64> = noise("x", 77).iter().map(|x| 4.0 * x).collect();
        let mut y = cpu.buffer(x.len());
        cpu.activate(activation, &buf(&cpu, &x), &mut y);
        let wanted: Vec<f64> = x.iter().map(|&x| naive_activation(activation, x)).collect();
        assert_close(&y, &wanted, 1e-14);
        let weights = noise("dy", x.len());
        let mut dy = buf(&cpu, &weights);
        cpu.activate_grad(activation, &buf(&cpu, &x), &mut dy);
        assert_gradient(&x, &dy, |x| {
            let y: Vec<f64> = x.iter().map(|&x| naive_activation(activation, x)).collect();
            dot(&y, &weights)
        });
    }
}

#[test]
fn activations_of_huge_numbers() {
    let cpu = cpu();
    for activation in [Activation::Gelu, Activation::Silu] {
        let x = buf(&cpu, &[-1e5, -800.0, 0.0, 800.0, 1e5]);
        let mut y = cpu.buffer(5);
        cpu.activate(activation, &x, &mut y);
        assert_eq!(y[..], [0.0, 0.0, 0.0, 800.0, 1e5]);
        let mut dy = buf(&cpu, &[1.0; 5]);
        cpu.activate_grad(activation, &x, &mut dy);
        assert_eq!(dy[..], [0.0, 0.0, 0.5, 1.0, 1.0]);
    }
}

fn naive_mask(dropout: &Dropout, len: usize) -> Vec<f64> {
    let kept = |i: usize| {
        let draw = dropout.stream.at(dropout.first + i as u64);
        f64::from(draw) / 4_294_967_296.0 >= dropout.rate
    };
    (0..len).map(|i| if kept(i) { 1.0 / (1.0 - dropout.rate) } else { 0.0 }).collect()
}

proptest! {
    #[test]
    fn a_mask_depends_on_the_element_alone(first in 0u64..200, len in 0usize..300, rate in 0.0..0.9f64) {
        let cpu = cpu();
        let dropout = Dropout { rate, stream: Stream::new(3, 4, 5), first };
        let x = noise("x", len);
        let mut y = cpu.buffer(len);
        cpu.dropout(&dropout, &buf(&cpu, &x), &mut y);
        let wanted: Vec<f64> = x.iter().zip(naive_mask(&dropout, len)).map(|(x, m)| x * m).collect();
        assert_close(&y, &wanted, 1e-15);
    }
}

#[test]
fn a_mask_drops_its_share() {
    let cpu = cpu();
    let dropout = Dropout { rate: 0.3, stream: Stream::new(1, 1, 1), first: 7 };
    let mut y = cpu.buffer(100_000);
    cpu.dropout(&dropout, &buf(&cpu, &[1.0; 100_000]), &mut y);
    let dropped = y.iter().filter(|&&y| y == 0.0).count() as f64 / 1e5;
    assert!((dropped - 0.3).abs() < 0.01, "{dropped}");
}

#[test]
fn residuals_take_bias_and_mask() {
    let cpu = cpu();
    let size = Rows { rows: 700, cols: 37 };
    let (x, branch, bias) = (noise("x", size.len()), noise("branch", size.len()), noise("bias", 40));
    let dropout = Dropout { rate: 0.2, stream: Stream::new(1, 2, 3), first: 5 };
    let mask = naive_mask(&dropout, size.len());
    for (with_bias, with_mask) in [(false, false), (true, false), (false, true), (true, true)] {
        let wanted: Vec<f64> = (0..size.len())
            .map(|i| {
                let b = if with_bias { bias[3 + i % size.cols] } else { 0.0 };
                x[i] + (branch[i] + b) * if with_mask { mask[i] } else { 1.0 }
            })
            .collect();
        let (branch, bias) = (buf(&cpu, &branch), buf(&cpu, &bias));
        let bias = with_bias.then_some(crate::kernels::BufSlice { buf: &bias, start: 3 });
        let branch = Branch { x: &branch, bias, dropout: with_mask.then_some(dropout) };
        let mut y = cpu.buffer(size.len());
        cpu.residual(size, &buf(&cpu, &x), branch, &mut y);
        assert_close(&y, &wanted, 1e-15);
    }
}

#[test]
fn sums_are_added() {
    let cpu = cpu();
    let size = Rows { rows: 123, cols: 45 };
    let (x, start) = (noise("x", size.len()), noise("start", 50));
    let mut sums = buf(&cpu, &start);
    cpu.sum_rows(size, &buf(&cpu, &x), PartMut { buf: &mut sums, start: 5 });
    let mut wanted = start.clone();
    x.iter().enumerate().for_each(|(i, x)| wanted[5 + i % size.cols] += x);
    assert_close(&sums, &wanted, 1e-14);
    let mut y = buf(&cpu, &start);
    cpu.add((&buf(&cpu, &x[..40])).into(), PartMut { buf: &mut y, start: 10 }, 40);
    let mut wanted = start;
    wanted[10..].iter_mut().zip(&x).for_each(|(y, x)| *y += x);
    assert_eq!(y[..], wanted);
}

proptest! {
    #[test]
    fn tables_are_looked_up_and_added_to(
        ids in prop::collection::vec(0i32..9, 0..60),
        (start, end) in (0usize..9, 0usize..9),
        cols in 1usize..40,
        add: bool,
    ) {
        let cpu = cpu();
        let held = start.min(end)..start.max(end);
        let lookup = Lookup { ids: &ids, held: held.clone(), cols };
        let table = noise("table", held.len() * cols);
        let old = noise("old", ids.len() * cols);
        let mut y = buf(&cpu, &old);
        cpu.lookup(&lookup, (&buf(&cpu, &table)).into(), add, &mut y);
        let mut sums = buf(&cpu, &table);
        cpu.lookup_grad(&lookup, &buf(&cpu, &old), (&mut sums).into());
        let (mut wanted, mut wanted_sums) = (if add { old.clone() } else { vec![0.0; old.len()] }, table.clone());
        for (i, &id) in ids.iter().enumerate().filter(|(_, id)| held.contains(&(**id as usize))) {
            for c in 0..cols {
                let at = (id as usize - held.start) * cols + c;
                wanted[i * cols + c] += table[at];
                wanted_sums[at] += old[i * cols + c];
            }
        }
        assert_close(&y, &wanted, 1e-15);
        assert_close(&sums, &wanted_sums, 1e-15);
    }
}

#[test]
fn gates_and_their_gradients() {
    let cpu = cpu();
    for activation in [Activation::Gelu, Activation::Silu] {
        let (gate, up, dy) = (noise("gate", 2077), noise("up", 2077), noise("dy", 2077));
        let naive = |gate: &[f64], up: &[f64]| -> Vec<f64> {
            gate.iter().zip(up).map(|(gate, up)| naive_activation(activation, *gate) * up).collect()
        };
        let mut y = cpu.buffer(gate.len());
        cpu.gate(activation, &buf(&cpu, &gate), &buf(&cpu, &up), &mut y);
        assert_close(&y, &naive(&gate, &up), 1e-12);
        let (mut d_up, mut d_gate) = (buf(&cpu, &dy), cpu.buffer(gate.len()));
        cpu.gate_grad(activation, &buf(&cpu, &gate), &buf(&cpu, &up), &mut d_up, &mut d_gate);
        // Element by element, so a few will do.
        let few = 40;
        let loss = |gate: &[f64], up: &[f64]| dot(&naive(gate, up), &dy[..few]);
        assert_gradient(&gate[..few], &d_gate[..few], |gate| loss(gate, &up[..few]));
        assert_gradient(&up[..few], &d_up[..few], |up| loss(&gate[..few], up));
    }
}

/// Turning keeps lengths, and turning back gives what was there; heads of one row turn alike.
#[test]
fn rows_turn_by_their_position() {
    let cpu = cpu();
    let (head_dim, positions, heads) = (6, 5, 3);
    let angle = |p: usize, i: usize| p as f64 * 0.3_f64.powi(i as i32);
    let of = |f: fn(f64) -> f64| -> Vec<f64> {
        (0..positions).flat_map(|p| (0..head_dim / 2).map(move |i| f(angle(p, i)))).collect()
    };
    let rotary = Rotary { head_dim, positions, cosines: of(f64::cos), sines: of(f64::sin) };
    let size = Rows { rows: 4 * positions, cols: heads * head_dim };
    let x = noise("x", size.len());
    let mut wanted = x.clone();
    for (row, values) in wanted.chunks_exact_mut(size.cols).enumerate() {
        for head in values.chunks_exact_mut(head_dim) {
            for i in 0..head_dim / 2 {
                let (sin, cos) = angle((2 + row) % positions, i).sin_cos();
                let (a, b) = (head[i], head[i + head_dim / 2]);
                (head[i], head[i + head_dim / 2]) = (a * cos - b * sin, b * cos + a * sin);
            }
        }
    }
    let mut turned = buf(&cpu, &x);
    cpu.rotate(&rotary, 2, size, false, &mut turned);
    assert_close(&turned, &wanted, 1e-12);
    cpu.rotate(&rotary, 2, size, true, &mut turned);
    assert_close(&turned, &x, 1e-12);
}
