//! An order over all devices in which the passes of a step could run.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::{Step, StepError};
use crate::schedule::Pass;

/// Every pass behind everything it needs and behind the pass before it on its device; by the time at which it could
/// start if nothing had to move.
pub(super) fn runnable_order(step: &Step) -> Result<Vec<Pass>, StepError> {
    let schedule = &step.schedule;
    let passes: Vec<Pass> = schedule.devices().iter().flatten().copied().collect();
    let mut waits = vec![0u32; passes.len()];
    let mut dependents: Vec<Vec<u32>> = vec![vec![]; passes.len()];
    for (node, pass) in (0u32..).zip(&passes) {
        let mut wait_for = |other: u32| {
            waits[node as usize] += 1;
            dependents[other as usize].push(node);
        };
        schedule.each_need(*pass, |need| {
            if let Some(other) = schedule.node(need.pass) {
                wait_for(other);
            }
        });
        let place = schedule.place(*pass).expect("the pass is of this schedule").1;
        if place > 0 {
            wait_for(node - 1);
        }
    }
    let mut start_ns = vec![0u64; passes.len()];
    let free = (0..passes.len() as u32).filter(|n| waits[*n as usize] == 0);
    let mut ready: BinaryHeap<Reverse<(u64, u32)>> = free.map(|n| Reverse((0, n))).collect();
    let mut order = Vec::with_capacity(passes.len());
    while let Some(Reverse((start, node))) = ready.pop() {
        let pass = passes[node as usize];
        order.push(pass);
        let end = start + step.times[pass.stage.index()].of(pass).unwrap_or(0);
        for &next in &dependents[node as usize] {
            let waiting = &mut start_ns[next as usize];
            *waiting = (*waiting).max(end);
            waits[next as usize] -= 1;
            if waits[next as usize] == 0 {
                ready.push(Reverse((start_ns[next as usize], next)));
            }
        }
    }
    match order.len() == passes.len() {
        true => Ok(order),
        false => {
            let stuck = waits.iter().position(|w| *w > 0).expect("some pass was not reached");
            Err(StepError::Cycle { first: passes[stuck] })
        }
    }
}
