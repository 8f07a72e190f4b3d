//! Routes: along which tree of nodes each byte of a class travels.
//!
//! [`super::super::assign`] says how many copies each node sends, in bytes, possibly a fraction of the class. A route
//! needs whole numbers: over a stretch of the class every node sends each byte a fixed number of times. Laying the
//! fractions end to end around a circle as long as the class does it: every point of the circle is covered equally
//! often, and cutting where a fraction begins or ends gives the stretches (McNaughton's wrap-around rule).
//!
//! ```text
//! 2 receivers, copies: holder a 1, holder b ½, receiver x ½       a ================
//!                                                                 b ========
//!                                                                 x         ========
//! first half: a -> x, b -> y;  second half: a -> x -> y
//! ```
//!
//! Holders are laid down first, so that every stretch has a holder to start from.

use super::super::assign::share;
use super::super::bound::out_jobs;
use super::super::demand::Class;

/// A stretch below this fraction of its class has no route of its own.
const SLIVER: u64 = 4096;

/// A node passes what it has to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Edge {
    pub from: u32,
    pub to: u32,
    /// How many edges lie above it.
    pub depth: u32,
}

/// The bytes `start..end` of a class, and their tree; an edge comes after those above it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Route {
    pub start: u64,
    pub end: u64,
    pub edges: Vec<Edge>,
}

/// Routes for every class, such that every node is done sending after `seconds`; `None` if that is too short.
pub(super) fn routes(
    classes: &[Class],
    out_rates: &[f64],
    loads: &[u64],
    seconds: f64,
) -> Option<Vec<Vec<Route>>> {
    let shares = share(&out_jobs(classes), out_rates, loads, seconds)?;
    let routes = classes.iter().zip(shares.chunks(2)).map(|(class, shares)| {
        let mut copies: Vec<(u32, u64)> =
            class.holders.iter().chain(&class.receivers).map(|&n| (n, 0)).collect();
        for &(node, bytes) in shares.iter().flatten() {
            let slot = copies.iter_mut().find(|(n, _)| *n == node).expect("senders are holders or receivers");
            slot.1 += bytes;
        }
        class_routes(class, &copies)
    });
    Some(routes.collect())
}

/// Turns the bytes each node sends (holders first, then receivers) into routes.
fn class_routes(class: &Class, copies: &[(u32, u64)]) -> Vec<Route> {
    let len = class.bytes;
    if len == 0 {
        return vec![];
    }
    // The arc of the circle that each node's fraction covers; it may run over the end.
    let mut at = 0;
    let arcs: Vec<(u64, u64)> = copies
        .iter()
        .map(|&(_, bytes)| {
            let arc = (at, bytes % len);
            at = (at + bytes % len) % len;
            arc
        })
        .collect();
    let mut cuts: Vec<u64> = arcs.iter().map(|&(start, _)| start).chain([0]).collect();
    cuts.sort_unstable();
    // What is left over by rounding, and other slivers, goes the way of its neighbour.
    cuts.dedup_by(|next, cut| *next - *cut <= len / SLIVER);
    cuts.retain(|&cut| cut == 0 || len - cut > len / SLIVER);
    cuts.push(len);
    let covers = |&(start, covered): &(u64, u64), point: u64| (point + len - start) % len < covered;
    cuts.windows(2)
        .map(|w| {
            let middle = w[0] + (w[1] - w[0]) / 2;
            let times = copies.iter().zip(&arcs).map(|(c, arc)| c.1 / len + u64::from(covers(arc, middle)));
            let times: Vec<u64> = times.collect();
            Route { start: w[0], end: w[1], edges: tree(class, &times) }
        })
        .collect()
}

/// A tree in which every node sends its number of copies: breadth first, the busiest receivers nearest to the root.
fn tree(class: &Class, times: &[u64]) -> Vec<Edge> {
    let (holder_times, receiver_times) = times.split_at(class.holders.len());
    let mut receivers: Vec<(u64, u32)> =
        receiver_times.iter().zip(&class.receivers).map(|(&times, &node)| (times, node)).collect();
    receivers.sort_by_key(|&(times, node)| (std::cmp::Reverse(times), node));
    // Those who have it and may still send it: node, copies left, depth.
    let mut senders: Vec<(u32, u64, u32)> =
        class.holders.iter().zip(holder_times).filter(|(_, t)| **t > 0).map(|(&n, &t)| (n, t, 0)).collect();
    let mut next = 0;
    let mut edges = Vec::with_capacity(receivers.len());
    for (times, node) in receivers {
        let (from, left, depth) = &mut senders[next];
        edges.push(Edge { from: *from, to: node, depth: *depth });
        let below = *depth + 1;
        *left -= 1;
        next += usize::from(*left == 0);
        if times > 0 {
            senders.push((node, times, below));
        }
    }
    edges
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reshard::assign::least_time;
    use proptest::prelude::*;

    proptest! {
        /// Every receiver gets every byte once, from somebody who has it, and nobody sends more than its share.
        #[test]
        fn routes_serve_every_receiver_in_the_least_time(
            classes in prop::collection::vec(
                (1u64..50, prop::collection::btree_set(0u32..4, 1..4), prop::collection::btree_set(2u32..8, 1..5)), 1..6),
            rates in prop::collection::vec(1u32..4, 8),
        ) {
            let classes: Vec<Class> = classes.into_iter().filter_map(|(bytes, holders, receivers)| {
                let receivers: Vec<u32> = receivers.difference(&holders).copied().collect();
                let holders = holders.into_iter().collect();
                (!receivers.is_empty()).then(|| Class { bytes: bytes * 10_000, holders, receivers, items: vec![] })
            }).collect();
            let rates: Vec<f64> = rates.into_iter().map(|r| f64::from(r) * 1000.0).collect();
            let loads = [0; 8];
            let (seconds, _) = least_time(&out_jobs(&classes), &rates, &loads, 0.0);
            let routes = routes(&classes, &rates, &loads, seconds).expect("the least time is enough");
            let mut sent = [0u64; 8];
            for (class, routes) in classes.iter().zip(&routes) {
                prop_assert_eq!(routes.iter().map(|r| r.end - r.start).sum::<u64>(), class.bytes);
                for route in routes {
                    let mut has = class.holders.clone();
                    for edge in &route.edges {
                        prop_assert!(has.contains(&edge.from) && !has.contains(&edge.to));
                        has.push(edge.to);
                        sent[edge.from as usize] += route.end - route.start;
                    }
                    prop_assert_eq!(has.len(), class.holders.len() + class.receivers.len());
                }
            }
            for (node, &bytes) in sent.iter().enumerate() {
                // Slivers may go the wrong way: at most one per sender and class.
                prop_assert!(bytes as f64 <= rates[node] * seconds * (1.0 + 8.0 * 12.0 / SLIVER as f64) + 8.0);
            }
        }
    }

    #[test]
    fn a_lone_holder_starts_a_chain() {
        let class = Class { bytes: 100, holders: vec![0], receivers: vec![1, 2, 3], items: vec![] };
        let routes = routes(&[class], &[1.0; 4], &[0; 4], 100.0).unwrap();
        let edges: Vec<(u32, u32)> = routes[0][0].edges.iter().map(|e| (e.from, e.to)).collect();
        assert_eq!(edges, [(0, 1), (1, 2), (2, 3)]);
    }
}
