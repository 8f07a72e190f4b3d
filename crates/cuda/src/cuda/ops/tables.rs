//! Tables of vectors, of tokens and of positions, and their gradients in a fixed order.
#![allow(clippy::missing_safety_doc, reason = "the module above says it for all of them")]

use super::{At, Queue, Real, Rows, THREADS, arguments};
use crate::CudaError;

/// A table of token vectors, of which the rows `first..first + held` are here, and one of positions (or none) of `context` rows.
#[derive(Debug, Clone, Copy)]
pub struct Tables {
    pub tokens: At,
    pub positions: At,
    pub first: u32,
    pub held: u32,
    pub context: u32,
}

/// The rows of a batch by the table's entries that they name: see [`sort_ids`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SortedIds {
    pub entries: Vec<u32>,
    pub starts: Vec<u32>,
    pub rows: Vec<u32>,
}

/// Sorts a batch's ids, so that gradients of a table are added up in the order of the rows. Entries count from the first that is held; ids of
/// others are left out.
pub fn sort_ids(ids: &[i32], first: u32, held: u32) -> SortedIds {
    let entry = |id: i32| u32::try_from(i64::from(id) - i64::from(first)).ok().filter(|entry| *entry < held);
    let mut pairs: Vec<(u32, u32)> =
        (0..).zip(ids).filter_map(|(row, id)| Some((entry(*id)?, row))).collect();
    pairs.sort_unstable();
    let mut sorted = SortedIds { rows: pairs.iter().map(|(_, row)| *row).collect(), ..SortedIds::default() };
    for (at, (entry, _)) in (0..).zip(&pairs) {
        if sorted.entries.last() != Some(entry) {
            sorted.entries.push(*entry);
            sorted.starts.push(at);
        }
    }
    sorted.starts.push(pairs.len() as u32);
    sorted
}

impl Queue {
    /// `y[row] = tokens[ids[row]] + positions[row % context]`; or `y[row] += tokens[ids[row]]`.
    pub unsafe fn embedding_forward(
        &self,
        real: Real,
        size: Rows,
        tables: &Tables,
        ids: At,
        (y, add): (At, bool),
    ) -> Result<(), CudaError> {
        let Tables { tokens, positions, first, held, context } = *tables;
        let (name, width, add) = (format!("embedding_forward_{}", real.name()), size.cols, u32::from(add));
        let mut arguments = arguments![tokens, positions, ids, first, held, context, width, add, y];
        // SAFETY: the module's.
        unsafe { self.launch(("embedding", &name), (size.rows, 1), (THREADS, 0), &mut arguments) }
    }

    /// Adds to an f32 table the rows of `dy`, in the order of [`sort_ids`], whose parts are on the card.
    pub unsafe fn embedding_backward(
        &self,
        real: Real,
        width: u32,
        dy: At,
        (entries, starts, rows, count): (At, At, At, u32),
        table: At,
    ) -> Result<(), CudaError> {
        let name = format!("embedding_backward_{}", real.name());
        let mut arguments = arguments![dy, entries, starts, rows, width, table];
        let grid = (count, width.div_ceil(THREADS * (16 / real.bytes() as u32)).min(64));
        // SAFETY: the module's.
        unsafe { self.launch(("embedding", &name), grid, (THREADS, 0), &mut arguments) }
    }

    /// Adds to an f32 table of positions the rows of every sample, in their order.
    pub unsafe fn positions_backward(
        &self,
        real: Real,
        size: Rows,
        context: u32,
        dy: At,
        table: At,
    ) -> Result<(), CudaError> {
        let name = format!("positions_backward_{}", real.name());
        let Rows { rows, cols } = size;
        let blocks = self.blocks(u64::from(context) * u64::from(cols), 1);
        let mut arguments = arguments![dy, rows, context, cols, table];
        // SAFETY: the module's.
        unsafe { self.launch(("embedding", &name), (blocks, 1), (THREADS, 0), &mut arguments) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_sorted_by_entry_and_then_by_row() {
        let sorted = sort_ids(&[7, 3, 7, -1, 9, 3, 2], 3, 5);
        assert_eq!(sorted.entries, [0, 4]);
        assert_eq!(sorted.starts, [0, 2, 4]);
        assert_eq!(sorted.rows, [1, 5, 0, 2]);
        assert_eq!(sort_ids(&[], 0, 5), SortedIds { starts: vec![0], ..SortedIds::default() });
    }
}
