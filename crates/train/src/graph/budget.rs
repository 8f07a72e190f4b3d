//! Which values a unit keeps where memory is short: of all that it could compute again, those that cost the least for the bytes they free.
//!
//! Every op of which F can be run again (none that speaks to other ranks: nothing is sent twice) may have its results dropped after F. A choice of such
//! ops has two numbers: what is held until B, and the operations that B and W spend on making dropped values anew. The choices that no other one beats in
//! both are the unit's frontier; up to [`EXHAUSTIVE`] ops it is found by trying all of them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};

use crossmesh_comm::collectives::Element as _;

use crate::kernels::Kernels;

use super::build::{Builder, Keep};
use super::derive::{Passes, What, can_be_dropped};
use super::unit::Elements;

/// Ops up to which all choices are tried, those of which nothing is held left out: a block of a Llama has 15 such ops. Of more, those that free the most for their operations are dropped one after the other.
pub(super) const EXHAUSTIVE: usize = 16;

/// Besides products, an op costs about so many operations for every element it makes.
const OPERATIONS_PER_ELEMENT: f64 = 8.0;

/// A choice of ops whose results are not kept.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Choice {
    /// By op.
    pub dropped: Vec<bool>,
    /// From F to B.
    pub held: Elements,
    /// Operations of B and W that make dropped values anew.
    pub again: f64,
}

/// The frontier of a graph: from the choice that computes nothing again that it need not, to the one that holds the least.
pub(super) fn frontier<K: Kernels>(graph: &Builder<'_, '_, K>) -> Arc<Vec<Choice>> {
    /// Blocks of a model are alike: what was found for one holds for all.
    static KNOWN: Mutex<BTreeMap<String, Arc<Vec<Choice>>>> = Mutex::new(BTreeMap::new());
    let key = format!("{} {} {}", K::Elem::DTYPE, K::Real::DTYPE, signature(graph));
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(choices) = known().get(&key) {
        return Arc::clone(choices);
    }
    let choices = Arc::new(search(graph));
    known().insert(key, Arc::clone(&choices));
    choices
}

/// Everything that a frontier depends on.
fn signature<K: Kernels>(graph: &Builder<'_, '_, K>) -> String {
    let mut text = String::new();
    for input in &graph.inputs {
        let _ = write!(text, "{:?} {} {}; ", input.val, graph.typed(input.val).len(), input.gradient);
    }
    for node in &graph.nodes {
        let (op, len) = (&node.op, graph.typed(node.out).len());
        let about = (op.cost(), op.can_run_again(), op.has_weights(), node.keep, node.same);
        let _ =
            write!(text, "{} {:?} {:?} {len} {:?} {about:?}; ", op.name(), node.ins, node.out, op.extras());
    }
    let _ = write!(text, "{:?}", graph.outputs);
    text
}

/// The ops whose results may be dropped, or not.
pub(super) fn candidates<K: Kernels>(graph: &Builder<'_, '_, K>) -> Vec<usize> {
    let able = |n: &usize| {
        let node = &graph.nodes[*n];
        node.keep != Keep::Never && can_be_dropped(node)
    };
    (0..graph.nodes.len()).filter(able).collect()
}

fn search<K: Kernels>(graph: &Builder<'_, '_, K>) -> Vec<Choice> {
    let base: Vec<bool> = graph.nodes.iter().map(|node| node.keep == Keep::Never).collect();
    let all = candidates(graph);
    let choices = match all.len() <= EXHAUSTIVE {
        true => {
            let mut found = vec![];
            explore(graph, base, &mut all.clone(), &mut found);
            found
        }
        false => greedy(graph, &base, &all),
    };
    undominated::<K>(choices)
}

/// All choices there are: for every op whose results are held, and about which nothing is decided, with and without it. About an op that nothing is held of there is
/// nothing to decide, until something else is dropped that is made from it.
fn explore<K: Kernels>(
    graph: &Builder<'_, '_, K>,
    dropped: Vec<bool>,
    undecided: &mut Vec<usize>,
    found: &mut Vec<Choice>,
) {
    let passes = Passes::dropping(graph, dropped.clone());
    let is_held = |n: usize| {
        let out = passes.value_slot[graph.nodes[n].out.index()];
        let slots = std::iter::once(&out).chain(&passes.extra_slots[n]);
        slots.into_iter().any(|slot| passes.after_forward.contains(slot))
    };
    let held: Vec<usize> = undecided.iter().copied().filter(|&n| is_held(n)).collect();
    // Each of them in turn is the first that is dropped, and those before it are kept.
    found.push(measured(graph, dropped.clone(), &passes));
    let all = undecided.clone();
    for n in held {
        undecided.retain(|&other| other != n);
        let mut dropped = dropped.clone();
        dropped[n] = true;
        explore(graph, dropped, undecided, found);
    }
    *undecided = all;
}

fn choice<K: Kernels>(
    graph: &Builder<'_, '_, K>,
    base: &[bool],
    all: &[usize],
    drops: impl Fn(usize) -> bool,
) -> Choice {
    let mut dropped = base.to_vec();
    for (i, &n) in all.iter().enumerate() {
        dropped[n] |= drops(i);
    }
    let passes = Passes::dropping(graph, dropped.clone());
    measured(graph, dropped, &passes)
}

fn measured<K: Kernels>(graph: &Builder<'_, '_, K>, dropped: Vec<bool>, passes: &Passes) -> Choice {
    let held = passes.after_forward.iter().map(|&slot| passes.slots[slot]).sum();
    Choice { dropped, held, again: again(graph, passes) }
}

/// Operations that passes spend on values that F had made.
pub(super) fn again<K: Kernels>(graph: &Builder<'_, '_, K>, passes: &Passes) -> f64 {
    let steps = passes.backward.iter().chain(&passes.weights);
    let work = steps.map(|step| match step.what {
        What::Forward { node } => {
            let (cost, out) = (graph.nodes[node].op.cost(), graph.typed(graph.nodes[node].out).len());
            cost.matrix + cost.attention + OPERATIONS_PER_ELEMENT * out as f64
        }
        _ => 0.0,
    });
    work.sum()
}

/// Drops one op after the other, each time that which frees the most bytes for its operations; none where nothing is freed any more.
fn greedy<K: Kernels>(graph: &Builder<'_, '_, K>, base: &[bool], all: &[usize]) -> Vec<Choice> {
    let mut choices = vec![choice(graph, base, all, |_| false)];
    let mut rest: Vec<usize> = all.to_vec();
    while !rest.is_empty() {
        let now = choices.last().expect("it starts with one").clone();
        // An op may free nothing before one that it makes values for is dropped too.
        let next = |n: usize| choice(graph, &now.dropped, &[n], |_| true);
        let gain = |c: &Choice| {
            let freed = now.held.bytes::<K>() as f64 - c.held.bytes::<K>() as f64;
            freed / (c.again - now.again).max(1.0)
        };
        let tried = rest.iter().map(|&n| (n, next(n)));
        let best = tried.max_by(|a, b| gain(&a.1).total_cmp(&gain(&b.1)).then(b.0.cmp(&a.0)));
        let Some((n, best)) = best else { break };
        rest.retain(|&other| other != n);
        choices.push(best);
    }
    choices
}

/// Those that no other one beats in bytes and operations, from the most bytes to the least.
fn undominated<K: Kernels>(mut choices: Vec<Choice>) -> Vec<Choice> {
    let held = |c: &Choice| c.held.bytes::<K>();
    choices.sort_by(|a, b| a.again.total_cmp(&b.again).then(held(a).cmp(&held(b))));
    let mut least = u64::MAX;
    choices.retain(|c| {
        let better = held(c) < least;
        least = least.min(held(c));
        better
    });
    choices
}

/// Points of the units of a stage that are kept while they are put together.
const POINTS: usize = 512;

/// For every unit, which of its choices (bytes and operations, from the most bytes to the least) to take, so that all of them together hold `limit` bytes at most
/// and compute the least again; where that cannot be, the least bytes there are.
pub(crate) fn within(units: &[Vec<(u64, f64)>], limit: u64) -> Vec<usize> {
    // By unit: points of all units so far, each with the point it goes on from and the choice it makes.
    let mut levels: Vec<Vec<(u64, f64, usize, usize)>> = vec![vec![(0, 0.0, 0, 0)]];
    for choices in units {
        let last = levels.last().expect("it starts with one");
        let mut points: Vec<(u64, f64, usize, usize)> = Vec::with_capacity(last.len() * choices.len());
        for (from, &(bytes, again, ..)) in last.iter().enumerate() {
            points.extend(choices.iter().enumerate().map(|(i, c)| (bytes + c.0, again + c.1, from, i)));
        }
        points.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let mut least = f64::INFINITY;
        points.retain(|p| {
            let better = p.1 < least;
            least = least.min(p.1);
            better
        });
        levels.push(thinned(points));
    }
    let last = levels.last().expect("it starts with one");
    // Ascending in bytes, so descending in operations: the last that fits.
    let mut at = last.partition_point(|p| p.0 <= limit).saturating_sub(1);
    let mut picks = vec![0; units.len()];
    for (level, points) in levels.iter().enumerate().skip(1).rev() {
        let (_, _, from, choice) = points[at];
        picks[level - 1] = choice;
        at = from;
    }
    picks
}

/// At most [`POINTS`] of them, evenly, both ends among them.
fn thinned<P: Copy>(points: Vec<P>) -> Vec<P> {
    let last = points.len() - 1;
    match points.len() <= POINTS {
        true => points,
        false => (0..POINTS).map(|i| points[i * last / (POINTS - 1)]).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Units put together are the best of all combinations, where few enough are kept that none is thinned out.
        #[test]
        fn units_together_are_the_best_combination(
            units in prop::collection::vec(prop::collection::vec((0u64..50, 0u32..50), 1..4), 1..5),
            limit in 0u64..200,
        ) {
            let units: Vec<Vec<(u64, f64)>> =
                units.iter().map(|u| u.iter().map(|&(b, a)| (b, f64::from(a))).collect()).collect();
            let cost = |picks: &[usize]| {
                let chosen = picks.iter().zip(&units).map(|(&i, u)| u[i]);
                chosen.fold((0, 0.0), |sum, c| (sum.0 + c.0, sum.1 + c.1))
            };
            let mut all = vec![vec![]];
            for unit in &units {
                let longer = |p: &Vec<usize>| {
                    let p = p.clone();
                    (0..unit.len()).map(move |i| [&p[..], &[i]].concat())
                };
                all = all.iter().flat_map(longer).collect::<Vec<_>>();
            }
            let fits = |p: &&Vec<usize>| cost(p).0 <= limit;
            let best = all.iter().filter(fits).map(|p| cost(p).1).fold(f64::INFINITY, f64::min);
            let (bytes, again) = cost(&within(&units, limit));
            if best.is_finite() {
                prop_assert!(bytes <= limit && again == best, "{again} for {best}, {bytes} of {limit}");
            } else {
                prop_assert_eq!(bytes, all.iter().map(|p| cost(p).0).min().unwrap_or(0));
            }
        }
    }
}
