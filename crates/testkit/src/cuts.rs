//! The bound, the slow way: every element's holders and receivers, every set of nodes.
//!
//! For whole values on a cluster without tiers. A node's way in carries what it wants and does not hold. For every set
//! of nodes, their ways out carry each first copy that only they hold; any node could send the further ones, so those
//! count for the set of all nodes.

use std::collections::{BTreeMap, BTreeSet};

use crossmesh_core::id::Rank;
use crossmesh_core::reshard::{Placed, Problem};

/// The least seconds, by enumeration. At most 16 nodes take part on a level.
pub fn bound_s(problem: &Problem) -> f64 {
    let hosts = &problem.cluster.hosts;
    let rates: Vec<(f64, f64)> = hosts.iter().map(|h| (h.in_bytes_per_s(), h.out_bytes_per_s())).collect();
    let between_hosts = level_s(&copies(problem, |rank| problem.topology.host(rank).0, |_| true), &rates);
    let inside = (0..hosts.len() as u32).map(|host| {
        let ranks: Vec<Rank> = problem.topology.ranks_of(crossmesh_core::id::HostId(host)).collect();
        let rates = vec![
            (hosts[host as usize].local_bytes_per_s, hosts[host as usize].local_bytes_per_s);
            ranks.len()
        ];
        let first = ranks[0].0;
        level_s(&copies(problem, |rank| rank.0 - first, |rank| ranks.contains(&rank)), &rates)
    });
    inside.fold(between_hosts, f64::max)
}

/// Bytes by their holders and the receivers among the nodes that still need them.
type Copies = BTreeMap<(BTreeSet<u32>, BTreeSet<u32>), u64>;

/// Goes through every element of every tensor.
fn copies(problem: &Problem, node_of: impl Fn(Rank) -> u32, counts: impl Fn(Rank) -> bool) -> Copies {
    let mut copies = Copies::new();
    for reshard in &problem.reshards {
        let shape = reshard.src.layout.shape();
        let bytes = reshard.src.layout.dtype().bytes();
        for_each_index(shape, |index| {
            let nodes = |placed: &Placed| -> BTreeSet<u32> {
                ranks_with(placed, index).into_iter().filter(|&r| counts(r)).map(&node_of).collect()
            };
            let (holders, wanted) = (nodes(&reshard.src), nodes(&reshard.dst));
            let receivers: BTreeSet<u32> = wanted.difference(&holders).copied().collect();
            // What no node of the level holds comes from outside it, which is another level's business.
            if !receivers.is_empty() && !holders.is_empty() {
                *copies.entry((holders, receivers)).or_default() += bytes;
            }
        });
    }
    copies
}

fn ranks_with(placed: &Placed, index: &[u64]) -> Vec<Rank> {
    let layout = &placed.layout;
    let holds = |position: &usize| {
        let boxes = layout.shard_at(&layout.mesh().coord(*position));
        boxes.iter().any(|b| b.spans().iter().zip(index).all(|(s, &i)| s.start <= i && i < s.end))
    };
    (0..placed.ranks.len()).filter(holds).map(|p| placed.ranks[p]).collect()
}

fn for_each_index(shape: &[u64], mut visit: impl FnMut(&[u64])) {
    let mut index = vec![0; shape.len()];
    for mut linear in 0..shape.iter().product::<u64>() {
        for (i, &len) in index.iter_mut().zip(shape).rev() {
            *i = linear % len;
            linear /= len;
        }
        visit(&index);
    }
}

fn level_s(copies: &Copies, rates: &[(f64, f64)]) -> f64 {
    assert!(rates.len() <= 16, "too many nodes to enumerate their sets");
    let mut worst = 0.0f64;
    for (node, (in_rate, _)) in rates.iter().enumerate() {
        let into = copies.iter().filter(|((_, receivers), _)| receivers.contains(&(node as u32)));
        worst = worst.max(into.map(|(_, bytes)| *bytes).sum::<u64>() as f64 / in_rate);
    }
    let everybody = (1u32 << rates.len()) - 1;
    for set in 1..=everybody {
        let inside = |nodes: &BTreeSet<u32>| nodes.iter().all(|n| set >> n & 1 == 1);
        let must_send = copies.iter().map(|((holders, receivers), bytes)| {
            let copies = if set == everybody { receivers.len() as u64 } else { u64::from(inside(holders)) };
            copies * bytes
        });
        let rate: f64 = (0..rates.len()).filter(|n| set >> n & 1 == 1).map(|n| rates[n].1).sum();
        worst = worst.max(must_send.sum::<u64>() as f64 / rate);
    }
    worst
}
