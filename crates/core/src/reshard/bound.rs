//! The lower bound: no plan is faster.
//!
//! At every level of the cluster (devices inside a host, hosts, the groups of a tier) a node's links limit what it can
//! take in and send out, and full duplex makes the two independent:
//! - **In.** What a node wants and does not hold has to come in, once.
//! - **Out.** The first copy of a piece leaves one of its holders; further copies leave holders or receivers. For every
//!   set of nodes, what only they can send takes at least its bytes over their joint rate; [`super::assign`] finds the
//!   worst set.
//! - **Jointly.** The same for nodes of different levels side by side, and for a device's two ways in ([`joint`]).
//! - **Sums.** A part that one node alone holds has to leave it. The first node to know a whole sum has heard of every
//!   other part's node, and every further receiver has heard of it afterwards: so many messages at least, over the
//!   joint rate of all nodes involved.
//!
//! The bound counts bandwidth alone, not latency, and covers plans in which no host brings in what it holds already.

mod joint;

use std::collections::BTreeSet;

use crate::id::{HostId, Rank};
use crate::units::{Bytes, Rate};

use super::assign::{Candidate, Job, least_time};
use super::demand::{Class, Demands, SumItem};
use super::problem::{PlanError, Problem};
use joint::joint_bound;

/// The least seconds any plan needs, and what stands in the way of fewer.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Bound {
    pub seconds: f64,
    /// For a reader: which links, which direction, how many bytes.
    pub reason: String,
}

pub fn lower_bound(problem: &Problem) -> Result<Bound, PlanError> {
    Ok(bound_of(problem, &Demands::of(problem)?))
}

pub(crate) fn bound_of(problem: &Problem, demands: &Demands) -> Bound {
    let mut bounds = vec![Level::hosts(problem).bound(&demands.remote, &demands.sums)];
    for tier in 0..problem.cluster.tiers.len() {
        let level = Level::groups(problem, tier);
        let classes: Vec<Class> = demands.remote.iter().map(|class| level.lift(class)).collect();
        bounds.push(level.bound(&classes, &demands.sums));
    }
    let inside_a_host = |sum: &&SumItem| {
        let ranks = sum.parts.iter().flatten().chain(&sum.receivers);
        ranks.map(|&r| problem.topology.host(r)).collect::<BTreeSet<HostId>>().len() == 1
    };
    let local_sums: Vec<SumItem> = demands.sums.iter().filter(inside_a_host).cloned().collect();
    bounds.push(Level::devices(problem).bound(&demands.local, &local_sums));
    let worst = bounds.into_iter().reduce(|a, b| if b.seconds > a.seconds { b } else { a });
    let worst = worst.expect("hosts and devices are always two levels");
    joint_bound(problem, demands, worst.seconds).unwrap_or(worst)
}

/// Nodes with a link each way: the devices of all hosts, the hosts, or the groups of a tier.
struct Level<'a> {
    problem: &'a Problem,
    kind: Kind,
    in_rates: Vec<f64>,
    out_rates: Vec<f64>,
}

#[derive(Clone, Copy)]
enum Kind {
    Devices,
    Hosts,
    /// Hosts outside every group stand beside the groups, with nothing to limit them.
    Groups(usize),
}

impl<'a> Level<'a> {
    fn hosts(problem: &'a Problem) -> Self {
        let hosts = &problem.cluster.hosts;
        let in_rates = hosts.iter().map(|h| h.in_bytes_per_s()).collect();
        let out_rates = hosts.iter().map(|h| h.out_bytes_per_s()).collect();
        Self { problem, kind: Kind::Hosts, in_rates, out_rates }
    }

    fn devices(problem: &'a Problem) -> Self {
        let hosts = problem.cluster.hosts.iter();
        let rates: Vec<f64> = hosts.flat_map(|h| (0..h.devices).map(|_| h.local_bytes_per_s)).collect();
        Self { problem, kind: Kind::Devices, in_rates: rates.clone(), out_rates: rates }
    }

    fn groups(problem: &'a Problem, tier: usize) -> Self {
        let groups = &problem.cluster.tiers[tier].groups;
        let free = problem.cluster.hosts.iter().map(|_| f64::INFINITY);
        let in_rates = groups.iter().map(|g| g.in_bytes_per_s).chain(free.clone()).collect();
        let out_rates = groups.iter().map(|g| g.out_bytes_per_s).chain(free).collect();
        Self { problem, kind: Kind::Groups(tier), in_rates, out_rates }
    }

    fn node_of_host(&self, host: HostId) -> u32 {
        match self.kind {
            Kind::Groups(tier) => {
                let num_groups = self.problem.cluster.tiers[tier].groups.len() as u32;
                self.problem.topology.group(tier, host).unwrap_or(num_groups + host.0)
            }
            _ => host.0,
        }
    }

    fn node_of(&self, rank: Rank) -> u32 {
        match self.kind {
            Kind::Devices => rank.0,
            _ => self.node_of_host(self.problem.topology.host(rank)),
        }
    }

    fn name(&self, node: u32) -> String {
        match self.kind {
            Kind::Devices => format!("r{node} local"),
            Kind::Hosts => format!("h{node}"),
            Kind::Groups(tier) => format!("{} {node}", self.problem.cluster.tiers[tier].name),
        }
    }

    /// A class of hosts as a class of this level's nodes; what stays inside a node is gone.
    fn lift(&self, class: &Class) -> Class {
        let lift =
            |hosts: &[u32]| hosts.iter().map(|&h| self.node_of_host(HostId(h))).collect::<BTreeSet<u32>>();
        let holders = lift(&class.holders);
        let receivers: Vec<u32> = lift(&class.receivers).difference(&holders).copied().collect();
        Class { bytes: class.bytes, holders: holders.into_iter().collect(), receivers, items: vec![] }
    }

    fn bound(&self, classes: &[Class], sums: &[SumItem]) -> Bound {
        let num_nodes = self.in_rates.len();
        let (mut bytes_in, mut bytes_out) = (vec![0u64; num_nodes], vec![0u64; num_nodes]);
        for class in classes {
            for &node in &class.receivers {
                bytes_in[node as usize] += class.bytes;
            }
        }
        let involved = self.add_sums(sums, &mut bytes_in, &mut bytes_out);
        let mut bound = Bound { seconds: 0.0, reason: "nothing has to cross a link".into() };
        for (node, &bytes) in bytes_in.iter().enumerate() {
            let seconds = bytes as f64 / self.in_rates[node];
            if seconds > bound.seconds {
                let reason =
                    format!("{} in: {}", self.name(node as u32), at_rate(bytes, self.in_rates[node]));
                bound = Bound { seconds, reason };
            }
        }
        let (seconds, binding) = least_time(&out_jobs(classes), &self.out_rates, &bytes_out, bound.seconds);
        if seconds > bound.seconds {
            let rate: f64 = binding.iter().map(|&n| self.out_rates[n as usize]).sum();
            let names: Vec<String> = binding.iter().map(|&n| self.name(n)).collect();
            let reason = format!("{} out: {}", names.join(" "), at_rate((seconds * rate) as u64, rate));
            bound = Bound { seconds, reason };
        }
        let (messages_bytes, nodes) = involved;
        let bytes = messages_bytes + classes_into(classes, &nodes);
        let rate: f64 = nodes.iter().map(|&n| self.in_rates[n as usize]).sum();
        if bytes as f64 / rate > bound.seconds {
            let reason = format!("combining partial sums: {}", at_rate(bytes, rate));
            bound = Bound { seconds: bytes as f64 / rate, reason };
        }
        bound
    }

    /// Adds what sums force in and out of each node; returns the bytes of all their messages and the nodes involved.
    fn add_sums(
        &self,
        sums: &[SumItem],
        bytes_in: &mut [u64],
        bytes_out: &mut [u64],
    ) -> (u64, BTreeSet<u32>) {
        let (mut messages_bytes, mut involved) = (0, BTreeSet::new());
        for sum in sums {
            let nodes = |ranks: &[Rank]| ranks.iter().map(|&r| self.node_of(r)).collect::<BTreeSet<u32>>();
            let parts: Vec<BTreeSet<u32>> = sum.parts.iter().map(|p| nodes(p)).collect();
            let receivers = nodes(&sum.receivers);
            let knows_all = |node: &u32| parts.iter().all(|p| p.contains(node));
            for &node in receivers.iter().filter(|n| !knows_all(n)) {
                bytes_in[node as usize] += sum.bytes;
            }
            let alone: BTreeSet<u32> =
                parts.iter().filter(|p| p.len() == 1).flat_map(|p| p.iter().copied()).collect();
            for &node in alone.iter().filter(|&&n| receivers.iter().any(|&r| r != n)) {
                bytes_out[node as usize] += sum.bytes;
            }
            let holders: BTreeSet<u32> = parts.iter().flatten().copied().collect();
            let most =
                holders.iter().map(|n| parts.iter().filter(|p| p.contains(n)).count()).max().unwrap_or(1);
            let least_holders = parts.len().div_ceil(most).max(alone.len());
            let shared = if holders.is_disjoint(&receivers) { 1 } else { 2 };
            let messages = (least_holders + receivers.len()).saturating_sub(shared);
            messages_bytes += messages as u64 * sum.bytes;
            involved.extend(holders);
            involved.extend(receivers);
        }
        (messages_bytes, involved)
    }
}

/// What the classes bring into these nodes besides.
fn classes_into(classes: &[Class], nodes: &BTreeSet<u32>) -> u64 {
    let into =
        |class: &Class| class.receivers.iter().filter(|n| nodes.contains(n)).count() as u64 * class.bytes;
    classes.iter().map(into).sum()
}

/// The copies of every class, as jobs: the first leaves a holder, the others a holder or a receiver. A receiver
/// forwards a piece once before anybody forwards it twice.
pub(crate) fn out_jobs(classes: &[Class]) -> Vec<Job> {
    let mut jobs = Vec::with_capacity(2 * classes.len());
    for class in classes {
        let candidates = |nodes: &[u32], preference, most| {
            nodes.iter().map(move |&node| Candidate { node, preference, most }).collect::<Vec<_>>()
        };
        let copies = class.receivers.len() as u64;
        let first = candidates(&class.holders, 0, u64::MAX);
        if copies > 1 {
            let rest = [
                first.clone(),
                candidates(&class.receivers, 1, class.bytes),
                candidates(&class.receivers, 2, u64::MAX),
            ];
            jobs.push(Job { bytes: class.bytes, candidates: first });
            jobs.push(Job { bytes: class.bytes * (copies - 1), candidates: rest.concat() });
        } else {
            jobs.push(Job { bytes: class.bytes * copies, candidates: first });
            jobs.push(Job::default());
        }
    }
    jobs
}

fn at_rate(bytes: u64, rate: f64) -> String {
    format!("{} at {}", Bytes(bytes), Rate(rate))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound(src: &str, dst: &str) -> Bound {
        lower_bound(&Problem::pair(src.parse().unwrap(), dst.parse().unwrap()).unwrap()).unwrap()
    }

    #[test]
    fn a_replicated_source_shares_its_nics() {
        let b = bound("f32[6000]@A{h:2,d:4}(_)", "f32[6000]@B{h:3,d:4}(h)");
        assert!((b.seconds - 12_000.0 / 1.25e9).abs() < 1e-9, "{b:?}");
        assert!(b.reason.starts_with("h0 h1 out"), "{b:?}");
    }

    #[test]
    fn forwarding_makes_replicas_free() {
        let b = bound("f32[1000]@A{d:1}(_)", "f32[1000]@B{h:4,d:2}(_)");
        assert!((b.seconds - 4000.0 / 1.25e9).abs() < 1e-12, "{b:?}");
    }

    #[test]
    fn summing_on_every_host_costs_both_ways() {
        // All-reduce over three hosts: 2 (n - 1) / n of the tensor through every NIC.
        let b = bound("f32[900]@A{h:3,d:1}(_ | sum h)", "f32[900]@A{h:3,d:1}(_)");
        assert!((b.seconds - 2.0 * 2.0 / 3.0 * 3600.0 / 1.25e9).abs() < 1e-12, "{b:?}");
        let b = bound("f32[900]@A{h:3,d:1}(_ | sum h)", "f32[900]@B{d:1}(_)");
        assert!((b.seconds - 3600.0 / 1.25e9).abs() < 1e-12, "{b:?}");
    }

    #[test]
    fn what_stays_inside_a_host_takes_its_local_links() {
        let b = bound("f32[8000]@A{d:4}(d)", "f32[8000]@A{d:4}(_)");
        assert!((b.seconds - 24_000.0 / 100e9).abs() < 1e-12, "{b:?}");
        assert_eq!(bound("f32[8]@A{d:4}(d)", "f32[8]@A{d:4}(d)").seconds, 0.0);
    }
}
