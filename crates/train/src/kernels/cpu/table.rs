//! Tables looked up by id, and the softmax over a vocabulary.

use super::simd::{largest, sum, vectorized};
use super::tile::{cut, tiles};
use super::{Cpu, HostBuf};
use crate::kernels::scalar::Scalar;
use crate::kernels::{Classes, Lookup, Rows};

impl<T: Scalar> Cpu<T> {
    pub(super) fn look_up(&self, lookup: &Lookup<'_>, table: &[T], add: bool, y: &mut [T]) {
        assert_eq!(y.len(), lookup.ids.len() * lookup.cols);
        if y.is_empty() {
            return;
        }
        let rows = self.chunk(y.len()).div_ceil(lookup.cols);
        let items = lookup.ids.chunks(rows).zip(y.chunks_mut(rows * lookup.cols));
        self.threads.each(items, |(ids, y)| {
            for (&id, y) in ids.iter().zip(y.chunks_exact_mut(lookup.cols)) {
                let row = held_row(lookup, id).map(|row| &table[row * lookup.cols..][..lookup.cols]);
                match (row, add) {
                    (Some(row), true) => y.iter_mut().zip(row).for_each(|(y, &x)| *y += x),
                    (Some(row), false) => y.copy_from_slice(row),
                    (None, true) => {}
                    (None, false) => y.fill(T::ZERO),
                }
            }
        });
    }

    /// Every thread takes some columns, so that rows looked up twice are added in order.
    pub(super) fn look_up_grad(&self, lookup: &Lookup<'_>, dy: &[T], table: &mut [T]) {
        assert_eq!(dy.len(), lookup.ids.len() * lookup.cols);
        let held = lookup.held.len();
        if held * lookup.cols == 0 {
            return;
        }
        let cols = cut(lookup.cols, self.threads.count(), 16);
        let parts = tiles(&mut table[..held * lookup.cols], lookup.cols, &cut(held, 1, 1), &cols);
        self.threads.each(cols.iter().zip(parts), |(cols, mut part)| {
            for (&id, dy) in lookup.ids.iter().zip(dy.chunks_exact(lookup.cols)) {
                if let Some(row) = held_row(lookup, id) {
                    let all = 0..part.cols();
                    let row = part.row(row, all);
                    row.iter_mut().zip(&dy[cols.clone()]).for_each(|(t, &dy)| *t += dy);
                }
            }
        });
    }

    pub(super) fn max_of_rows(&self, size: Rows, x: &[T], max: &mut [T]) {
        if size.cols == 0 {
            return max.fill(T::LOWEST);
        }
        let rows = self.chunk(size.len()).div_ceil(size.cols);
        self.threads.each(x.chunks(rows * size.cols).zip(max.chunks_mut(rows)), |(x, max)| {
            for (x, max) in x.chunks_exact(size.cols).zip(max) {
                *max = max_of_row(x);
            }
        });
    }

    pub(super) fn exponentials(
        &self,
        classes: &Classes<'_>,
        max: &[T],
        logits: &mut [T],
        sums: &mut HostBuf<T>,
    ) {
        let size = classes.size();
        let (totals, targets) = sums.split_at_mut(size.rows);
        if size.cols == 0 {
            totals.fill(T::ZERO);
            return targets.fill(T::ZERO);
        }
        let rows = self.chunk(size.len()).div_ceil(size.cols);
        let items = logits.chunks_mut(rows * size.cols).zip(max.chunks(rows));
        let items = items.zip(totals.chunks_mut(rows).zip(targets.chunks_mut(rows)));
        let items = items.zip(classes.targets.chunks(rows));
        self.threads.each(items, |(((logits, max), (totals, targets)), ids)| {
            let rows = logits.chunks_exact_mut(size.cols).zip(max).zip(totals.iter_mut().zip(targets));
            for (((logits, &max), (total, target)), &id) in rows.zip(ids) {
                *target = held_class(classes, id).map_or(T::ZERO, |class| logits[class] - max);
                *total = exp_row(logits, max);
            }
        });
    }

    pub(super) fn exponentials_grad(&self, classes: &Classes<'_>, sums: &[T], scale: f64, exps: &mut [T]) {
        let size = classes.size();
        if size.is_empty() {
            return;
        }
        let scale = T::from_f64(scale);
        let rows = self.chunk(size.len()).div_ceil(size.cols);
        let items = exps.chunks_mut(rows * size.cols).zip(sums[..size.rows].chunks(rows));
        self.threads.each(items.zip(classes.targets.chunks(rows)), |((exps, sums), ids)| {
            for ((exps, &sum), &id) in exps.chunks_exact_mut(size.cols).zip(sums).zip(ids) {
                scale_row(exps, scale / sum);
                if let Some(class) = held_class(classes, id) {
                    exps[class] -= scale;
                }
            }
        });
    }
}

/// The place of a row in the part of the table that is here.
fn held_row(lookup: &Lookup<'_>, id: i32) -> Option<usize> {
    let id = usize::try_from(id).ok().filter(|id| lookup.held.contains(id))?;
    Some(id - lookup.held.start)
}

fn held_class(classes: &Classes<'_>, id: i32) -> Option<usize> {
    let id = usize::try_from(id).ok().filter(|id| classes.held.contains(id))?;
    Some(id - classes.held.start)
}

vectorized! {
    fn max_of_row<T>(x: &'a [T]) -> T {
        largest(x)
    }
}

vectorized! {
    /// Exponentials in place, and their sum.
    fn exp_row<T>(x: &'a mut [T], max: T) -> T {
        for x in x.iter_mut() {
            *x = (*x - max).exp();
        }
        sum(x, |x| x)
    }
}

vectorized! {
    fn scale_row<T>(x: &'a mut [T], factor: T) {
        for x in x {
            *x *= factor;
        }
    }
}
