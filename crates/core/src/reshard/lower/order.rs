//! The order in which transfers are lowered.
//!
//! List order, where every `after` points backwards. A plan may also point forwards; then tokens, placed in list order,
//! could wait for each other where the transfers do not, so the order is one in which the plan could run.

use rustc_hash::FxHashMap;

use crate::id::{Rank, TransferId};

use super::super::plan::{Plan, Transfer};
use super::buffers::Buffers;

/// An order for all transfers in which each channel's transfers keep their list order; none if the list itself will do.
pub fn lowering_order(plan: &Plan, buffers: &Buffers) -> Option<Vec<TransferId>> {
    let in_order = |(i, t): (u32, &Transfer)| plan.after(t).iter().all(|a| a.0 < i);
    if (0..).zip(plan.transfers()).all(in_order) {
        return None;
    }
    let list = || (0..plan.transfers().len()).map(TransferId::at).collect();
    Some(runnable(plan, buffers).unwrap_or_else(list))
}

/// None if transfers wait for each other in a circle.
fn runnable(plan: &Plan, buffers: &Buffers) -> Option<Vec<TransferId>> {
    #[derive(Clone, Copy, PartialEq)]
    enum Mark {
        New,
        Open,
        Done,
    }
    let waits = waits(plan, buffers);
    let mut marks = vec![Mark::New; waits.len()];
    let mut order = Vec::with_capacity(waits.len());
    let mut path: Vec<(TransferId, usize)> = Vec::new();
    for start in (0..waits.len()).map(TransferId::at) {
        path.push((start, 0));
        while let Some((id, i)) = path.last_mut() {
            let id = *id;
            if *i == 0 && marks[id.index()] != Mark::New {
                path.pop();
                continue;
            }
            marks[id.index()] = Mark::Open;
            match waits[id.index()].get(*i) {
                Some(next) if marks[next.index()] == Mark::Open => return None,
                Some(next) => {
                    *i += 1;
                    path.push((*next, 0));
                }
                None => {
                    marks[id.index()] = Mark::Done;
                    order.push(id);
                    path.pop();
                }
            }
        }
    }
    Some(order)
}

/// Everything each transfer waits for: its `after`, the one before on its channel, the one before into the same sum.
fn waits(plan: &Plan, buffers: &Buffers) -> Vec<Vec<TransferId>> {
    let mut last: FxHashMap<(Rank, Rank, u32), TransferId> = FxHashMap::default();
    let mut waits = Vec::with_capacity(plan.transfers().len());
    for (i, t) in plan.transfers().iter().enumerate() {
        let id = TransferId::at(i);
        let before = last.insert((t.src, t.dst, t.lane), id);
        let added = buffers.combining(id).previous;
        waits.push(plan.after(t).iter().copied().chain(before).chain(added).collect());
    }
    waits
}
