//! The fastest there is, the slow way: every way in which a piece can get where it is wanted, and the best mix of them.
//!
//! Devices tell each other what they know, one message after the other. A message takes the links between the two: local
//! ones inside a host, else ports, and the uplinks of the groups it leaves and enters. Devices with nothing to do with
//! the tensor may take part. A *way* of a piece is a list of messages after which everybody who wants it knows every
//! part of it. The bytes of a piece may be spread over any number of ways; what counts is that no link has more to carry
//! than its rate in the time. That is a linear program over all ways:
//!
//! ```text
//! maximize  pieces a second     where   every piece: its ways add up to it     every link: its messages fit its rate
//! ```
//!
//! There are too many ways to list. At given prices of links the cheapest way is a shortest path over *who knows which
//! parts* ([`cheapest`]), so ways join the program one by one until none is cheap enough to help. Prices also prove the
//! result: whatever the plan, it takes at least the cheapest ways' prices over what all links could earn in a second.
//!
//! A message passes on all that its sender knows. For `max` and `min` that is what a message can do; a sum has to keep
//! from counting parts twice, so its optimum may be above, never below.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use crossmesh_core::cluster::Cluster;
use crossmesh_core::id::Rank;
use crossmesh_core::reshard::{Placed, Problem};

use crate::simplex::{Program, maximize};

/// Bits to say which device knows which part; more take too long.
pub const MOST_BITS: usize = 16;

/// Between which times the optimum lies.
#[derive(Debug, Clone, Copy)]
pub struct Optimum {
    pub at_least_s: f64,
    pub at_most_s: f64,
}

/// Which plans count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allowed {
    All,
    /// No host brings in what it can make of what its devices hold.
    NothingTwice,
}

/// The optimum, or `None` where there are too many devices and parts to look at.
pub fn optimum(problem: &Problem, allowed: Allowed) -> Option<Optimum> {
    let mut kinds = kinds(problem);
    kinds.retain(|kind, _| !is_there(kind));
    if kinds.is_empty() {
        return Some(Optimum { at_least_s: 0.0, at_most_s: 0.0 });
    }
    let num_devices = problem.cluster.num_devices();
    if kinds.keys().any(|k| k.num_parts * num_devices > MOST_BITS) {
        return None;
    }
    let messages = |kind: &Kind| messages(problem, kind, allowed);
    let pieces: Vec<Piece> = kinds
        .iter()
        .map(|(kind, &bytes)| Piece { kind, bytes: bytes as f64, messages: messages(kind) })
        .collect();
    Some(solve(&pieces, &rates(&problem.cluster)))
}

/// Elements that the same devices hold the same parts of, and the same devices want.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Kind {
    num_parts: usize,
    /// By device, a bit for every part.
    holds: Vec<u32>,
    wants: Vec<bool>,
}

struct Piece<'a> {
    kind: &'a Kind,
    bytes: f64,
    messages: Vec<Message>,
}

#[derive(Debug, Clone)]
struct Message {
    from: usize,
    to: usize,
    links: Vec<usize>,
}

/// Goes through every element of every tensor.
fn kinds(problem: &Problem) -> BTreeMap<Kind, u64> {
    let mut kinds = BTreeMap::new();
    let num_devices = problem.cluster.num_devices();
    for reshard in &problem.reshards {
        let shape = reshard.src.layout.shape();
        for linear in 0..shape.iter().product::<u64>() {
            let mut left = linear;
            let mut index: Vec<u64> = vec![];
            for &len in shape.iter().rev() {
                index.insert(0, left % len);
                left /= len;
            }
            let mut kind =
                Kind { num_parts: 1, holds: vec![0; num_devices], wants: vec![false; num_devices] };
            for (rank, part) in holders(&reshard.src, &index) {
                kind.holds[rank.index()] |= 1 << part;
                kind.num_parts = kind.num_parts.max(part + 1);
            }
            holders(&reshard.dst, &index).iter().for_each(|(rank, _)| kind.wants[rank.index()] = true);
            *kinds.entry(kind).or_default() += reshard.src.layout.dtype().bytes();
        }
    }
    kinds
}

/// Who has an element, and which part of it.
fn holders(placed: &Placed, index: &[u64]) -> Vec<(Rank, usize)> {
    let layout = &placed.layout;
    let mesh = layout.mesh();
    let mut found = vec![];
    for (position, &rank) in placed.ranks.iter().enumerate() {
        let coord = mesh.coord(position);
        let boxes = layout.shard_at(&coord);
        let inside =
            boxes.iter().any(|b| b.spans().iter().zip(index).all(|(s, i)| s.start <= *i && *i < s.end));
        let summed = layout.partial().map_or(&[][..], |p| &p.axes);
        let part =
            summed.iter().fold(0, |part, &axis| part * mesh.axes()[axis].len as usize + coord[axis] as usize);
        if inside {
            found.push((rank, part));
        }
    }
    found
}

/// Every link's rate: of each device in and out, of each port, of each group.
fn rates(cluster: &Cluster) -> Vec<f64> {
    let topology = crossmesh_core::cluster::Topology::new(cluster);
    let mut rates = vec![];
    for host in &cluster.hosts {
        (0..2 * host.devices).for_each(|_| rates.push(host.local_bytes_per_s));
    }
    for port in &topology.ports {
        rates.extend([port.out_bytes_per_s, port.in_bytes_per_s]);
    }
    for group in cluster.tiers.iter().flat_map(|t| &t.groups) {
        rates.extend([group.out_bytes_per_s, group.in_bytes_per_s]);
    }
    rates
}

/// What may be said, and over which links; links are numbered as in [`rates`].
fn messages(problem: &Problem, kind: &Kind, allowed: Allowed) -> Vec<Message> {
    let topology = &problem.topology;
    let (num_devices, num_ports) = (topology.num_ranks(), topology.ports.len());
    let all = (1u32 << kind.num_parts) - 1;
    let host_of = |device: usize| topology.host(Rank::at(device));
    let knows_all = |to: usize| {
        let on_host = (0..num_devices).filter(|&d| host_of(d) == host_of(to));
        on_host.fold(0, |known, d| known | kind.holds[d]) == all
    };
    let mut messages = vec![];
    for (from, to) in (0..num_devices).flat_map(|a| (0..num_devices).map(move |b| (a, b))) {
        let same_host = host_of(from) == host_of(to);
        if from == to || (!same_host && allowed == Allowed::NothingTwice && knows_all(to)) {
            continue;
        }
        let links = match same_host {
            true => vec![2 * from, 2 * to + 1],
            false => {
                let port = |device: usize| 2 * (num_devices + topology.port(Rank::at(device)).index());
                let mut links = vec![port(from), port(to) + 1];
                let mut first_group = num_devices + num_ports;
                for (t, tier) in problem.cluster.tiers.iter().enumerate() {
                    let (out_of, into) = (topology.group(t, host_of(from)), topology.group(t, host_of(to)));
                    if out_of != into {
                        links.extend(out_of.map(|g| 2 * (first_group + g as usize)));
                        links.extend(into.map(|g| 2 * (first_group + g as usize) + 1));
                    }
                    first_group += tier.groups.len();
                }
                links
            }
        };
        messages.push(Message { from, to, links });
    }
    messages
}

/// Ways join until none is cheap enough to gain anything.
fn solve(pieces: &[Piece], rates: &[f64]) -> Optimum {
    let total: f64 = pieces.iter().map(|p| p.bytes).sum();
    let fastest = rates.iter().copied().fold(0.0, f64::max);
    // Rows: links, then pieces. Column 0 is how much of everything is moved a second. In units near 1.
    let mut first = vec![0.0; rates.len()];
    first.extend(pieces.iter().map(|p| p.bytes / total));
    let mut limits: Vec<f64> = rates.iter().map(|r| r / fastest).collect();
    limits.extend(pieces.iter().map(|_| 0.0));
    let mut program = Program { limits, columns: vec![first], gains: vec![1.0] };
    let seconds = |pieces_per_s: f64| total / fastest / pieces_per_s;
    loop {
        let solution = maximize(&program).expect("links end");
        let (link_prices, worth) = solution.prices.split_at(rates.len());
        let earned: f64 = rates.iter().zip(link_prices).map(|(r, p)| r / fastest * p).sum();
        let (mut cost, mut joined) = (0.0, false);
        for (p, piece) in pieces.iter().enumerate() {
            let (least, used) = cheapest(piece, link_prices);
            cost += least * piece.bytes / total;
            if worth[p] - least > 1e-9 {
                let mut column = vec![0.0; rates.len() + pieces.len()];
                used.iter().for_each(|&link| column[link] += 1.0);
                column[rates.len() + p] = -1.0;
                program.columns.push(column);
                program.gains.push(0.0);
                joined = true;
            }
        }
        if !joined {
            return Optimum { at_least_s: seconds(earned / cost), at_most_s: seconds(solution.value) };
        }
    }
}

/// Whoever wants it has it from the start.
fn is_there(kind: &Kind) -> bool {
    let all = (1u32 << kind.num_parts) - 1;
    kind.wants.iter().zip(&kind.holds).all(|(wants, holds)| !wants || *holds == all)
}

/// The cheapest way of a piece, and the links that its messages take: Dijkstra over who knows what.
fn cheapest(piece: &Piece, prices: &[f64]) -> (f64, Vec<usize>) {
    let kind = piece.kind;
    let width = kind.num_parts;
    let pack = |known: &[u32]| known.iter().enumerate().fold(0u32, |s, (d, k)| s | k << (d * width));
    let mask = (1u32 << width) - 1;
    let wanted: u32 = pack(&kind.wants.iter().map(|&w| if w { mask } else { 0 }).collect::<Vec<_>>());
    let start = pack(&kind.holds);
    // A hair's price keeps free messages that nobody needs out of the way.
    let cost_of: Vec<f64> =
        piece.messages.iter().map(|m| m.links.iter().map(|&l| prices[l]).sum::<f64>() + 1e-12).collect();
    let mut best: Vec<f64> = vec![f64::INFINITY; 1 << (kind.holds.len() * width)];
    let mut came: Vec<u32> = vec![u32::MAX; best.len()];
    let mut last: Vec<u8> = vec![0; best.len()];
    let mut open = BinaryHeap::from([Reverse((0u64, start))]);
    best[start as usize] = 0.0;
    while let Some(Reverse((bits, state))) = open.pop() {
        // Costs are not negative, so their bits are in their order.
        let cost = f64::from_bits(bits);
        if cost > best[state as usize] {
            continue;
        }
        if state & wanted == wanted {
            let mut links = vec![];
            let mut at = state;
            while at != start {
                links.extend(&piece.messages[last[at as usize] as usize].links);
                at = came[at as usize];
            }
            return (cost, links);
        }
        for (m, message) in piece.messages.iter().enumerate() {
            let next = state | (state >> (message.from * width) & mask) << (message.to * width);
            let total = cost + cost_of[m];
            if next != state && total < best[next as usize] {
                best[next as usize] = total;
                (came[next as usize], last[next as usize]) = (state, m as u8);
                open.push(Reverse((total.to_bits(), next)));
            }
        }
    }
    unreachable!("somebody holds every part")
}
