//! Attention, against the whole matrix of scores.

use proptest::prelude::*;

use super::{assert_close, assert_gradient, buf, cpu, dot, noise};
use crate::kernels::cpu::Cpu;
use crate::kernels::random::Stream;
use crate::kernels::{Attention, AttentionDropout, AttentionSaved, Kernels, Projected, ProjectedMut};

/// Queries, keys and values as `[sample, token, head, i]`.
struct Inputs {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
}

impl Inputs {
    fn new(size: &Attention) -> Self {
        let (width, kv_width) = (size.heads * size.head_dim, size.kv_heads * size.head_dim);
        Self {
            q: noise("q", size.samples * size.queries * width),
            k: noise("k", size.samples * size.keys * kv_width),
            v: noise("v", size.samples * size.keys * kv_width),
        }
    }

    /// Rows of the given tensors, one behind the other.
    fn interleave(parts: &[&[f64]], width: usize) -> Vec<f64> {
        let rows = parts[0].len().checked_div(width).unwrap_or(0);
        let part_rows = |r: usize| parts.iter().flat_map(move |p| &p[r * width..(r + 1) * width]);
        (0..rows).flat_map(part_rows).copied().collect()
    }
}

struct Naive {
    y: Vec<f64>,
    lse: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
}

/// Every score of every head, and the chain rule by hand.
fn naive(size: &Attention, x: &Inputs, dy: &[f64]) -> Naive {
    let (heads, d) = (size.heads, size.head_dim);
    let scale = 1.0 / (d as f64).sqrt();
    let zeros = |like: &[f64]| vec![0.0; like.len()];
    let mut out = Naive { y: zeros(&x.q), lse: vec![], dq: zeros(&x.q), dk: zeros(&x.k), dv: zeros(&x.v) };
    for (s, h, i) in (0..size.samples)
        .flat_map(|s| (0..heads).flat_map(move |h| (0..size.queries).map(move |i| (s, h, i))))
    {
        let q_at = ((s * size.queries + i) * heads + h) * d;
        let asked = h / (heads / size.kv_heads);
        let k_at = |j: usize| ((s * size.keys + j) * size.kv_heads + asked) * d;
        let seen = if size.causal { size.keys + i + 1 - size.queries } else { size.keys };
        let scores: Vec<f64> =
            (0..seen).map(|j| scale * dot(&x.q[q_at..][..d], &x.k[k_at(j)..][..d])).collect();
        let max = scores.iter().copied().fold(f64::MIN, f64::max);
        let lse = max + scores.iter().map(|s| (s - max).exp()).sum::<f64>().ln();
        out.lse.push(lse);
        let p: Vec<f64> = scores.iter().map(|s| (s - lse).exp()).collect();
        let mask: Vec<f64> = (0..seen).map(|j| mask(size, s, h, i, j)).collect();
        let dp: Vec<f64> = (0..seen).map(|j| mask[j] * dot(&dy[q_at..][..d], &x.v[k_at(j)..][..d])).collect();
        let delta = dot(&p, &dp);
        for j in 0..seen {
            let ds = p[j] * (dp[j] - delta) * scale;
            for c in 0..d {
                out.y[q_at + c] += p[j] * mask[j] * x.v[k_at(j) + c];
                out.dv[k_at(j) + c] += p[j] * mask[j] * dy[q_at + c];
                out.dq[q_at + c] += ds * x.k[k_at(j) + c];
                out.dk[k_at(j) + c] += ds * x.q[q_at + c];
            }
        }
    }
    out
}

fn mask(size: &Attention, s: usize, h: usize, i: usize, j: usize) -> f64 {
    let Some(drop) = size.dropout else { return 1.0 };
    let head = (drop.first_sample + s as u64) * drop.all_heads + drop.first_head + h as u64;
    let at = (head * size.queries as u64 + i as u64) * size.keys as u64 + j as u64;
    let kept = f64::from(drop.stream.at(at)) / 4_294_967_296.0 >= drop.rate;
    if kept { 1.0 / (1.0 - drop.rate) } else { 0.0 }
}

/// Where queries, keys and values lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lie {
    Fused,
    Apart,
    Three,
}

fn check(size: &Attention, lie: Lie) {
    let cpu = cpu();
    let (width, kv_width) = (size.heads * size.head_dim, size.kv_heads * size.head_dim);
    let x = Inputs::new(size);
    let dy = noise("dy", x.q.len());
    let wanted = naive(size, &x, &dy);
    let (mut y, mut lse) = (cpu.buffer(x.q.len()), cpu.buffer(size.samples * size.heads * size.queries));
    let fused = lie == Lie::Fused;
    let qkv = buf(&cpu, &if fused { Inputs::interleave(&[&x.q, &x.k, &x.v], width) } else { vec![] });
    let (q, kv) = (buf(&cpu, &x.q), buf(&cpu, &Inputs::interleave(&[&x.k, &x.v], kv_width)));
    let (k, v) = (buf(&cpu, &x.k), buf(&cpu, &x.v));
    let projected = || match lie {
        Lie::Fused => Projected::Fused(&qkv),
        Lie::Apart => Projected::Apart { q: &q, kv: &kv },
        Lie::Three => Projected::Three { q: &q, k: &k, v: &v },
    };
    cpu.attention(size, projected(), &mut y, &mut lse);
    assert_close(&y, &wanted.y, 1e-12);
    assert_close(&lse, &wanted.lse, 1e-12);
    let (mut dqkv, mut dq, mut dkv) = (cpu.buffer(qkv.len()), cpu.buffer(q.len()), cpu.buffer(kv.len()));
    let (mut dk, mut dv) = (cpu.buffer(k.len()), cpu.buffer(v.len()));
    let saved = AttentionSaved { y: &y, lse: &lse };
    let dx = match lie {
        Lie::Fused => ProjectedMut::Fused(&mut dqkv),
        Lie::Apart => ProjectedMut::Apart { q: &mut dq, kv: &mut dkv },
        Lie::Three => ProjectedMut::Three { q: &mut dq, k: &mut dk, v: &mut dv },
    };
    cpu.attention_grad(size, projected(), saved, &buf(&cpu, &dy), dx);
    match lie {
        Lie::Fused => {
            let wanted = Inputs::interleave(&[&wanted.dq, &wanted.dk, &wanted.dv], width);
            assert_close(&dqkv, &wanted, 1e-12);
        }
        Lie::Apart => {
            assert_close(&dq, &wanted.dq, 1e-12);
            assert_close(&dkv, &Inputs::interleave(&[&wanted.dk, &wanted.dv], kv_width), 1e-12);
        }
        Lie::Three => {
            assert_close(&dq, &wanted.dq, 1e-12);
            assert_close(&dk, &wanted.dk, 1e-12);
            assert_close(&dv, &wanted.dv, 1e-12);
        }
    }
}

fn dropout(on: bool) -> Option<AttentionDropout> {
    let stream = Stream::new(1, 2, 3);
    on.then_some(AttentionDropout { rate: 0.25, stream, first_sample: 5, first_head: 2, all_heads: 9 })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn equals_the_whole_matrix(
        samples in 0usize..3, kv_heads in 0usize..4, group in 1usize..4, head_dim in 1usize..20,
        queries in 1usize..110, causal: bool, drop: bool, lie in 0usize..3, keys in 1usize..300,
    ) {
        let lie = [Lie::Fused, Lie::Apart, Lie::Three][lie];
        let keys = match (lie, causal) {
            (Lie::Fused, _) => queries,
            (_, true) => keys.max(queries),
            (_, false) => keys,
        };
        let heads = if lie == Lie::Fused { kv_heads } else { kv_heads * group };
        let dropout = dropout(drop);
        check(&Attention { samples, heads, kv_heads, head_dim, queries, keys, causal, dropout }, lie);
    }
}

/// Several blocks of keys, with and without a diagonal in them.
#[test]
fn long_sequences() {
    for causal in [false, true] {
        check(
            &Attention {
                samples: 1,
                heads: 2,
                kv_heads: 1,
                head_dim: 8,
                queries: 600,
                keys: 600,
                causal,
                dropout: dropout(true),
            },
            Lie::Three,
        );
    }
}

/// The naive gradient is the derivative of the naive result.
#[test]
fn the_oracle_is_right() {
    for (causal, drop) in [(false, false), (true, false), (true, true)] {
        let size = Attention {
            samples: 2,
            heads: 2,
            kv_heads: 1,
            head_dim: 3,
            queries: 4,
            keys: 4,
            causal,
            dropout: dropout(drop),
        };
        let x = Inputs::new(&size);
        let dy = noise("dy", x.q.len());
        let wanted = naive(&size, &x, &dy);
        let with = |q: &[f64], k: &[f64], v: &[f64]| {
            let x = Inputs { q: q.to_vec(), k: k.to_vec(), v: v.to_vec() };
            dot(&naive(&size, &x, &dy).y, &dy)
        };
        assert_gradient(&x.q, &wanted.dq, |q| with(q, &x.k, &x.v));
        assert_gradient(&x.k, &wanted.dk, |k| with(&x.q, k, &x.v));
        assert_gradient(&x.v, &wanted.dv, |v| with(&x.q, &x.k, v));
    }
}

/// Scores far from zero, as untrained and overtrained models have them, in f32.
#[test]
fn large_scores_do_not_overflow() {
    let cpu = Cpu::<f32>::new(1);
    let size = Attention {
        samples: 1,
        heads: 1,
        kv_heads: 1,
        head_dim: 4,
        queries: 3,
        keys: 3,
        causal: true,
        dropout: None,
    };
    let qkv = cpu.upload(&noise("x", 36).iter().map(|&x| 100.0 * x as f32).collect::<Vec<_>>());
    let (mut y, mut lse, mut dx) = (cpu.buffer(12), cpu.buffer(3), cpu.buffer(36));
    cpu.attention(&size, Projected::Fused(&qkv), &mut y, &mut lse);
    let saved = AttentionSaved { y: &y, lse: &lse };
    let dy = cpu.upload(&[1.0; 12]);
    cpu.attention_grad(&size, Projected::Fused(&qkv), saved, &dy, ProjectedMut::Fused(&mut dx));
    assert!(y.iter().chain(&lse[..]).chain(&dx[..]).all(|x| x.is_finite()));
}
