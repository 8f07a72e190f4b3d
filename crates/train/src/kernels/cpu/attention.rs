//! Attention without the matrix of scores.
//!
//! A block of queries meets the keys block by block (FlashAttention: Dao et al., 2022). Forward keeps a running maximum and
//! sum for every query, so that a block of scores is forgotten once it has been used; what remains for the gradient is the
//! logarithm of the sum, from which the scores' softmax can be computed again:
//!
//! ```text
//!            keys   0..256   256..512
//! queries 0..48       S         .         S = scale Q K'     P = exp(S - lse)
//!        48..96       S         .         causal: blocks right of the diagonal are never computed
//! ```
//!
//! One job is one head of one sample; the operands of its products are packed once and used for all blocks.

use std::ops::Range;

use super::elementwise::{Mask, mask};
use super::panel::{Geometry, Multiply, Update, View};
use super::simd::{dot, largest, sum, vectorized};
use super::tile::{Tile, cut, tiles};
use super::{Cpu, HostBuf};
use crate::kernels::scalar::Scalar;
use crate::kernels::{Attention, AttentionSaved, Dropout, Projected, ProjectedMut};

/// Queries of a block: a multiple of every tile's height.
const QUERIES: usize = 48;
/// Keys of a block: a multiple of every tile's width.
const KEYS: usize = 256;

/// Queries, keys and values of one head of one sample.
#[derive(Clone, Copy)]
struct Head<'a, T> {
    size: &'a Attention,
    sample: usize,
    head: usize,
    q: View<'a, T>,
    k: View<'a, T>,
    v: View<'a, T>,
}

impl<T: Scalar> Cpu<T> {
    pub(super) fn attend(&self, size: &Attention, x: Projected<'_, HostBuf<T>>, y: &mut [T], lse: &mut [T]) {
        if size.heads == 0 || size.samples == 0 {
            return;
        }
        let outs = head_tiles(size.samples, size.queries, size.heads, 1, size.head_dim, y);
        let items = heads(size, &x).into_iter().zip(outs).zip(lse.chunks_exact_mut(size.queries));
        self.threads.each(items, |((head, mut out), lse)| self.attend_head(head, &mut out[0], lse));
    }

    pub(super) fn attend_grad(
        &self,
        size: &Attention,
        x: Projected<'_, HostBuf<T>>,
        saved: AttentionSaved<'_, HostBuf<T>>,
        dy: &[T],
        dx: ProjectedMut<'_, HostBuf<T>>,
    ) {
        if size.heads == 0 || size.samples == 0 {
            // Nobody asks these keys.
            let all = match dx {
                ProjectedMut::Fused(dx) => vec![dx],
                ProjectedMut::Apart { q, kv } => vec![q, kv],
                ProjectedMut::Three { q, k, v } => vec![q, k, v],
            };
            all.into_iter().for_each(|dx| dx.fill(T::ZERO));
            return;
        }
        let Attention { samples, heads: all, kv_heads, head_dim, queries, keys, .. } = *size;
        let tiles = |rows, heads, parts, data| head_tiles(samples, rows, heads, parts, head_dim, data);
        // Of every head, of queries or of keys and values, its tiles.
        let (dq, dkv): (Vec<Tile<'_, T>>, Vec<[Tile<'_, T>; 2]>) = match dx {
            ProjectedMut::Fused(dx) => {
                let three = tiles(queries, all, 3, dx).into_iter().map(exactly::<3, _>);
                three.map(|[q, k, v]| (q, [k, v])).unzip()
            }
            ProjectedMut::Apart { q, kv } => {
                let q = tiles(queries, all, 1, q).into_iter().flatten().collect();
                (q, tiles(keys, kv_heads, 2, kv).into_iter().map(exactly).collect())
            }
            ProjectedMut::Three { q, k, v } => {
                let one = |rows, heads, data| tiles(rows, heads, 1, data).into_iter().flatten();
                let kv = one(keys, kv_heads, k).zip(one(keys, kv_heads, v)).map(|(k, v)| [k, v]).collect();
                (one(queries, all, q).collect(), kv)
            }
        };
        let width = all * head_dim;
        let group = all / kv_heads;
        let mut asking = heads(size, &x).into_iter().zip(saved.lse.chunks_exact(queries)).zip(dq);
        // Heads that ask the same keys add to the same gradients, one after the other.
        let items: Vec<_> =
            dkv.into_iter().map(|kv| (kv, asking.by_ref().take(group).collect::<Vec<_>>())).collect();
        self.threads.each(items, |([mut dk, mut dv], asking)| {
            clear(&mut dk);
            clear(&mut dv);
            for ((head, lse), mut dq) in asking {
                let at = head.sample * queries * width + head.head * head_dim;
                let rows = |data| View::rows_of(data, queries, head_dim, width);
                let given = Given { y: rows(&saved.y[at..]), dy: rows(&dy[at..]), lse };
                clear(&mut dq);
                self.attend_head_grad(head, given, [&mut dq, &mut dk, &mut dv]);
            }
        });
    }

    fn attend_head(&self, head: Head<'_, T>, out: &mut Tile<'_, T>, lse: &mut [T]) {
        let (g, d) = (Geometry::of::<T>(), head.size.head_dim);
        let keys = self.pack(g, head.k.transposed());
        let values = self.pack_blocks(g, head.v);
        let mut left = self.take(QUERIES * d);
        let mut scores = self.take(QUERIES * KEYS);
        let mut left_scores = self.take(QUERIES * KEYS);
        for queries in blocks(head.size.queries, QUERIES) {
            g.pack_left(head.q.row_range(queries.start, queries.len()), &mut left);
            let mut running = [[T::LOWEST, T::ZERO]; QUERIES];
            let mut out = out.row_range(queries.clone());
            for seen in blocks(head.size.keys, KEYS).take_while(|keys| head.sees(&queries, keys)) {
                let scores = &mut scores[..queries.len() * seen.len()];
                head.scores(&left, &keys, &seen, scores);
                let factors = online_softmax(head.block(&queries, &seen), scores, &mut running);
                head.drop_out(&queries, &seen, scores);
                if seen.start > 0 {
                    rescale(&mut out, &factors);
                }
                let probabilities = View::rows_of(scores, queries.len(), seen.len(), seen.len());
                g.pack_left(probabilities, &mut left_scores);
                Multiply {
                    left: &left_scores,
                    right: &values[g.right_len(d, seen.start)..],
                    k: seen.len(),
                    update: if seen.start == 0 { Update::WRITE } else { Update::ADD },
                    out: &mut out,
                    first_col: 0,
                    cols: d,
                }
                .run();
            }
            rescale(&mut out, &running.map(|[_, total]| T::ONE / total));
            for (lse, [max, total]) in lse[queries].iter_mut().zip(running) {
                *lse = max + total.ln();
            }
        }
    }

    fn attend_head_grad(&self, head: Head<'_, T>, given: Given<'_, T>, [dq, dk, dv]: [&mut Tile<'_, T>; 3]) {
        let (g, d) = (Geometry::of::<T>(), head.size.head_dim);
        let keys = self.pack(g, head.k.transposed());
        let values = self.pack(g, head.v.transposed());
        let key_rows = self.pack_blocks(g, head.k);
        let mut left = self.take(QUERIES * d);
        let mut left_dy = self.take(QUERIES * d);
        let mut right = self.take(g.right_len(d, QUERIES));
        let mut right_dy = self.take(g.right_len(d, QUERIES));
        let mut packed = self.take(g.left_len(KEYS, QUERIES).max(g.left_len(QUERIES, KEYS)));
        let (mut scores, mut dscores) = (self.take(QUERIES * KEYS), self.take(QUERIES * KEYS));
        for queries in blocks(head.size.queries, QUERIES) {
            let q = head.q.row_range(queries.start, queries.len());
            let dy = given.dy.row_range(queries.start, queries.len());
            g.pack_left(q, &mut left);
            g.pack_left(dy, &mut left_dy);
            g.pack_right(q, &mut right);
            g.pack_right(dy, &mut right_dy);
            let deltas = given.deltas(&queries);
            for seen in blocks(head.size.keys, KEYS).take_while(|keys| head.sees(&queries, keys)) {
                let len = queries.len() * seen.len();
                let (p, ds) = (&mut scores[..len], &mut dscores[..len]);
                head.scores(&left, &keys, &seen, p);
                let block = head.block(&queries, &seen);
                softmax_again(block, &given.lse[queries.clone()], p);
                block_product(&left_dy, &values, d, &seen, T::ONE, ds);
                head.drop_out(&queries, &seen, ds);
                scores_grad(block, p, &deltas, head.scale(), ds);
                head.drop_out(&queries, &seen, p);
                let rows = |data| View::rows_of(data, queries.len(), seen.len(), seen.len());
                let mut add = |from: View<'_, T>, right: &[T], out: &mut Tile<'_, T>| {
                    g.pack_left(from, &mut packed);
                    let (left, k, update) = (&packed[..], from.cols, Update::ADD);
                    Multiply { left, right, k, update, out, first_col: 0, cols: d }.run();
                };
                add(rows(p).transposed(), &right_dy, &mut dv.row_range(seen.clone()));
                add(rows(ds).transposed(), &right, &mut dk.row_range(seen.clone()));
                add(rows(ds), &key_rows[g.right_len(d, seen.start)..], &mut dq.row_range(queries.clone()));
            }
        }
    }

    /// A right operand in one piece.
    fn pack(&self, g: Geometry, from: View<'_, T>) -> HostBuf<T> {
        let mut packed = self.take(g.right_len(from.cols, from.rows));
        g.pack_right(from, &mut packed);
        packed
    }

    /// A right operand whose depth, the keys, is used block by block.
    fn pack_blocks(&self, g: Geometry, from: View<'_, T>) -> HostBuf<T> {
        let mut packed = self.take(g.right_len(from.cols, from.rows));
        for keys in blocks(from.rows, KEYS) {
            let to = &mut packed[g.right_len(from.cols, keys.start)..][..g.right_len(from.cols, keys.len())];
            g.pack_right(from.row_range(keys.start, keys.len()), to);
        }
        packed
    }
}

/// What the gradient of one head starts from.
struct Given<'a, T> {
    y: View<'a, T>,
    dy: View<'a, T>,
    lse: &'a [T],
}

impl<T: Scalar> Given<'_, T> {
    /// The sum over keys of P dP, for every query: it equals y dy.
    fn deltas(&self, queries: &Range<usize>) -> [T; QUERIES] {
        let mut deltas = [T::ZERO; QUERIES];
        for (delta, i) in deltas.iter_mut().zip(queries.clone()) {
            let row = |view: View<'_, T>| i * view.row_stride..i * view.row_stride + view.cols;
            *delta = product_sum(&self.y.data[row(self.y)], &self.dy.data[row(self.dy)]);
        }
        deltas
    }
}

impl<T: Scalar> Head<'_, T> {
    fn scale(&self) -> T {
        T::from_f64(1.0 / (self.size.head_dim as f64).sqrt())
    }

    /// Keys before the first query's own.
    fn earlier(&self) -> usize {
        self.size.keys.saturating_sub(self.size.queries)
    }

    /// Whether a query of the block sees a key of the block.
    fn sees(&self, queries: &Range<usize>, keys: &Range<usize>) -> bool {
        !self.size.causal || keys.start < self.earlier() + queries.end
    }

    fn block(&self, queries: &Range<usize>, keys: &Range<usize>) -> Block {
        let query = self.earlier() + queries.start;
        Block { keys: keys.len(), causal: self.size.causal, query, key: keys.start }
    }

    fn scores(&self, left: &[T], keys: &[T], seen: &Range<usize>, scores: &mut [T]) {
        block_product(left, keys, self.size.head_dim, seen, self.scale(), scores);
    }

    /// Drops scores of a block by their place in the whole model's tensor.
    fn drop_out(&self, queries: &Range<usize>, keys: &Range<usize>, scores: &mut [T]) {
        let Some(dropout) = self.size.dropout else { return };
        let sample = dropout.first_sample + self.sample as u64;
        let head = sample * dropout.all_heads + dropout.first_head + self.head as u64;
        for (i, row) in queries.clone().zip(scores.chunks_exact_mut(keys.len())) {
            let at = (head * self.size.queries as u64 + i as u64) * self.size.keys as u64;
            let of_row =
                Dropout { rate: dropout.rate, stream: dropout.stream, first: at + keys.start as u64 };
            mask(Mask::new(&of_row, 0), row);
        }
    }
}

/// `out = alpha * left * right[keys]`, for a block of queries and all of a head's keys.
fn block_product<T: Scalar>(left: &[T], right: &[T], d: usize, keys: &Range<usize>, alpha: T, out: &mut [T]) {
    let right = &right[keys.start * d..];
    let (update, cols) = (Update { alpha, ..Update::WRITE }, keys.len());
    let out = &mut Tile::whole(out, cols);
    Multiply { left, right, k: d, update, out, first_col: 0, cols }.run();
}

fn blocks(len: usize, block: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(block).map(move |start| start..(start + block).min(len))
}

/// Every head of queries of every sample, with the keys and values it asks.
fn heads<'a, T>(size: &'a Attention, x: &Projected<'a, HostBuf<T>>) -> Vec<Head<'a, T>> {
    let Attention { samples, heads, kv_heads, head_dim, queries, keys, .. } = *size;
    let pairs = (0..samples).flat_map(|sample| (0..heads).map(move |head| (sample, head)));
    pairs
        .map(|(sample, head)| {
            // The columns of one head, where rows have `parts` times `all` of them.
            let view =
                |data: &'a [T], rows: usize, (part, parts): (usize, usize), (head, all): (usize, usize)| {
                    let width = all * head_dim;
                    let at = sample * rows * parts * width + part * width + head * head_dim;
                    View::rows_of(&data[at..], rows, head_dim, parts * width)
                };
            let (asks, asked) = ((head, heads), (head * kv_heads / heads, kv_heads));
            let (q, k, v) = match *x {
                Projected::Fused(x) => {
                    let part = |part| view(x, queries, (part, 3), asks);
                    (part(0), part(1), part(2))
                }
                Projected::Apart { q, kv } => {
                    let part = |part| view(kv, keys, (part, 2), asked);
                    (view(q, queries, (0, 1), asks), part(0), part(1))
                }
                Projected::Three { q, k, v } => {
                    let one = |data| view(data, keys, (0, 1), asked);
                    (view(q, queries, (0, 1), asks), one(k), one(v))
                }
            };
            Head { size, sample, head, q, k, v }
        })
        .collect()
}

/// For every head of every sample its tiles of a matrix whose rows hold `parts` times all heads.
fn head_tiles<'a, T>(
    samples: usize,
    rows: usize,
    heads: usize,
    parts: usize,
    head_dim: usize,
    data: &'a mut [T],
) -> Vec<Vec<Tile<'a, T>>> {
    let cols = cut(parts * heads * head_dim, parts * heads, head_dim);
    let row_runs = cut(samples * rows, samples, rows);
    let mut by_head: Vec<Vec<Tile<'a, T>>> = (0..samples * heads).map(|_| Vec::new()).collect();
    for (i, tile) in tiles(data, parts * heads * head_dim, &row_runs, &cols).into_iter().enumerate() {
        let (sample, head) = (i / cols.len(), i % cols.len() % heads);
        by_head[sample * heads + head].push(tile);
    }
    by_head
}

fn exactly<const N: usize, T>(tiles: Vec<Tile<'_, T>>) -> [Tile<'_, T>; N] {
    tiles.try_into().unwrap_or_else(|_| unreachable!("a tile for each part"))
}

/// A block of scores: `keys` to a row, the first one of query `query` and key `key`.
#[derive(Clone, Copy)]
struct Block {
    keys: usize,
    causal: bool,
    query: usize,
    key: usize,
}

impl Block {
    /// How many of its keys a row sees.
    #[inline(always)]
    fn seen(&self, row: usize) -> usize {
        if self.causal { (self.query + row + 1).saturating_sub(self.key).min(self.keys) } else { self.keys }
    }
}

vectorized! {
    /// Turns scores into exponentials under the running maximum and adds them to the running sum. Gives back how much less
    /// what was summed up so far now counts.
    fn online_softmax<T>(block: Block, scores: &'a mut [T], running: &'a mut [[T; 2]; QUERIES]) -> [T; QUERIES] {
        let mut factors = [T::ONE; QUERIES];
        for (i, row) in scores.chunks_exact_mut(block.keys).enumerate() {
            let (seen, unseen) = row.split_at_mut(block.seen(i));
            unseen.fill(T::ZERO);
            let [max, total] = running[i];
            let new_max = max.larger(largest(seen));
            for x in seen.iter_mut() {
                *x = (*x - new_max).exp();
            }
            factors[i] = (max - new_max).exp();
            running[i] = [new_max, total * factors[i] + sum(seen, |x| x)];
        }
        factors
    }
}

vectorized! {
    /// The softmax of scores whose logarithm of the sum is known.
    fn softmax_again<T>(block: Block, lse: &'a [T], scores: &'a mut [T]) {
        for (i, (row, &lse)) in scores.chunks_exact_mut(block.keys).zip(lse).enumerate() {
            let (seen, unseen) = row.split_at_mut(block.seen(i));
            unseen.fill(T::ZERO);
            for x in seen {
                *x = (*x - lse).exp();
            }
        }
    }
}

vectorized! {
    /// dS = P (dP - delta) scale, in place of dP.
    fn scores_grad<T>(block: Block, p: &'a [T], deltas: &'a [T], scale: T, ds: &'a mut [T]) {
        let rows = ds.chunks_exact_mut(block.keys).zip(p.chunks_exact(block.keys));
        for ((ds, p), &delta) in rows.zip(deltas) {
            for (ds, &p) in ds.iter_mut().zip(p) {
                *ds = p * (*ds - delta) * scale;
            }
        }
    }
}

vectorized! {
    fn product_sum<T>(x: &'a [T], y: &'a [T]) -> T {
        dot(x, y, |x, y| x * y)
    }
}

/// Multiplies every row by its factor.
fn rescale<T: Scalar>(out: &mut Tile<'_, T>, factors: &[T]) {
    let all = 0..out.cols();
    for (i, &factor) in factors.iter().enumerate().take(out.rows()) {
        out.row(i, all.clone()).iter_mut().for_each(|x| *x *= factor);
    }
}

fn clear<T: Scalar>(out: &mut Tile<'_, T>) {
    let all = 0..out.cols();
    for i in 0..out.rows() {
        out.row(i, all.clone()).fill(T::ZERO);
    }
}
