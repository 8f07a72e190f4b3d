//! The lower bound: no plan is faster.
//!
//! At every level of the cluster (devices inside a host, hosts, the groups of a tier) a node's links limit what it can
//! take in and send out, and full duplex makes the two independent:
//! - **In.** A node that wants something and cannot make it of what it holds has to take it in, once.
//! - **Out.** What only some nodes hold has to leave one of them, if anybody else wants it. For every set of nodes, what
//!   only they can send takes at least its bytes over their joint rate; [`super::assign`] finds the worst set. Parts of a
//!   sum that different nodes hold leave in different messages, however they are added up.
//! - **Messages.** Adding up and passing on takes a number of messages that no plan goes below ([`messages`]); they share
//!   the links of all nodes, of those too that have nothing to do with the tensor and could help.
//! - **Jointly.** The same for nodes of different levels side by side, and for a device's two ways in ([`joint`]).
//!
//! ```text
//! parts on h0 h1 h2, wanted on all three      in    one for each of them
//!                                             out   one from each of them
//!                                             messages   2 to be added up, 2 to be passed on: 4 over 3 hosts,
//!                                                        or 3 over 3 and 2 over whoever else is in the cluster
//! ```
//!
//! To the bandwidth comes one message: whatever the plan, no byte leaves before its sender has seen to the message it is in, and
//! the last one has its latency and its receiver's time before it ([`crate::cluster::Cluster::empty_message_s`]). Where the cluster says nothing of
//! these they are 0. How many messages a plan takes is its own choice: boxes may travel together. Between hosts and between groups it holds for every plan: any host may
//! forward, add up and help. Inside a host it takes it that the host does not bring in, over its NICs, what it can make
//! of what it holds; a bound that rests on this says so.

mod joint;
mod messages;

use std::collections::{BTreeMap, BTreeSet};

use crate::id::{HostId, Rank};
use crate::units::{Bytes, Rate, Seconds};

use super::assign::{Candidate, Job, least_time};
use super::demand::{Class, Demands, SumSource};
use super::problem::{PlanError, Problem};
use joint::joint_bound;
use messages::{Copies, Need, Parts};

/// The least seconds any plan needs, and what stands in the way of fewer.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Bound {
    pub seconds: f64,
    /// For a reader: which links, which direction, how many bytes, and what is taken for granted.
    pub reason: String,
    /// It rests on bytes that have to go from host to host.
    between_hosts: bool,
}

pub fn lower_bound(problem: &Problem) -> Result<Bound, PlanError> {
    let mut bound = bandwidth_bound(problem)?;
    if bound.seconds > 0.0 {
        let cluster = &problem.cluster;
        let message_s = match bound.between_hosts {
            true => cluster.empty_message_s(false),
            false => cluster.empty_message_s(false).min(cluster.empty_message_s(true)),
        };
        bound.seconds += message_s;
        if message_s > 0.0 {
            bound.reason += &format!(", and {} of a message", Seconds(message_s));
        }
    }
    Ok(bound)
}

/// The bound as if messages took no longer than their bytes.
pub(crate) fn bandwidth_bound(problem: &Problem) -> Result<Bound, PlanError> {
    Ok(bound_of(problem, &Demands::of(problem)?))
}

pub(crate) fn bound_of(problem: &Problem, demands: &Demands) -> Bound {
    let mut worst = Level::hosts(problem).bound(&demands.remote, demands);
    for tier in 0..problem.cluster.tiers.len() {
        let level = Level::groups(problem, tier);
        let classes: Vec<Class> = demands.remote.iter().map(|class| level.lift(class)).collect();
        worst = worst.or_larger(level.bound(&classes, demands));
    }
    worst.between_hosts = true;
    let worst = worst.or_larger(inside_hosts(problem, demands));
    joint_bound(problem, demands, worst.seconds).unwrap_or(worst)
}

impl Bound {
    fn or_larger(self, other: Bound) -> Bound {
        if other.seconds > self.seconds { other } else { self }
    }
}

/// The worst host, by the links of its devices.
fn inside_hosts(problem: &Problem, demands: &Demands) -> Bound {
    let topology = &problem.topology;
    let mut classes: BTreeMap<HostId, Vec<Class>> = BTreeMap::new();
    for class in &demands.local {
        classes.entry(topology.host(Rank(class.holders[0]))).or_default().push(class.clone());
    }
    let mut hosts: BTreeSet<HostId> = classes.keys().copied().collect();
    for class in &demands.sum_classes {
        hosts.extend(demands.set(class.receivers).iter().map(|&r| topology.host(r)));
    }
    let mut worst = Bound::default();
    for host in hosts {
        let level = Level::devices(problem, host);
        let first = topology.ranks_of(host).next().map_or(0, |r| r.0);
        let mut classes = classes.remove(&host).unwrap_or_default();
        for class in &mut classes {
            class.holders.iter_mut().chain(&mut class.receivers).for_each(|node| *node -= first);
        }
        worst = worst.or_larger(level.bound(&classes, demands));
    }
    if worst.seconds > 0.0 {
        worst.reason += ", if no host brings in what it can make of what it holds";
    }
    worst
}

/// Nodes with a link each way: the devices of a host, the hosts, or the groups of a tier.
struct Level<'a> {
    problem: &'a Problem,
    kind: Kind,
    in_rates: Vec<f64>,
    out_rates: Vec<f64>,
}

#[derive(Clone, Copy)]
enum Kind {
    /// The devices of one host, from this rank on.
    Devices(HostId, u32),
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

    fn devices(problem: &'a Problem, host: HostId) -> Self {
        let first = problem.topology.ranks_of(host).next().map_or(0, |r| r.0);
        let host_of = &problem.cluster.hosts[host.index()];
        let rates = vec![host_of.local_bytes_per_s; host_of.devices as usize];
        Self { problem, kind: Kind::Devices(host, first), in_rates: rates.clone(), out_rates: rates }
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

    /// The node of a rank; none for ranks beyond the level's host.
    fn node_of(&self, rank: Rank) -> Option<u32> {
        let host = self.problem.topology.host(rank);
        match self.kind {
            Kind::Devices(on, first) => (host == on).then(|| rank.0 - first),
            _ => Some(self.node_of_host(host)),
        }
    }

    fn name(&self, node: u32) -> String {
        match self.kind {
            Kind::Devices(_, first) => format!("r{} local", first + node),
            Kind::Hosts => format!("h{node}"),
            Kind::Groups(tier) => format!("{} {node}", self.problem.cluster.tiers[tier].name),
        }
    }

    fn names(&self, nodes: &[u32]) -> String {
        const MOST: usize = 8;
        let names: Vec<String> = nodes.iter().take(MOST).map(|&n| self.name(n)).collect();
        let more = nodes.len().saturating_sub(MOST);
        if more > 0 { format!("{} and {more} more", names.join(" ")) } else { names.join(" ") }
    }

    /// A class of hosts as a class of this level's nodes; what stays inside a node is gone.
    fn lift(&self, class: &Class) -> Class {
        let lift =
            |hosts: &[u32]| hosts.iter().map(|&h| self.node_of_host(HostId(h))).collect::<BTreeSet<u32>>();
        let holders = lift(&class.holders);
        let receivers: Vec<u32> = lift(&class.receivers).difference(&holders).copied().collect();
        Class { bytes: class.bytes, holders: holders.into_iter().collect(), receivers, items: vec![] }
    }

    fn nodes_of(&self, ranks: &[Rank]) -> Vec<u32> {
        let mut nodes: Vec<u32> = ranks.iter().filter_map(|&r| self.node_of(r)).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    fn parts_of(&self, source: &SumSource) -> Parts {
        Parts::of(source.parts.iter().map(|ranks| self.nodes_of(ranks)).collect())
    }

    /// The sums as this level's nodes see them. A host sees to those it has all parts of.
    fn sum_needs<'p>(&self, parts: &'p [Parts], demands: &Demands) -> Vec<Need<'p>> {
        let mut needs = vec![];
        for class in &demands.sum_classes {
            let parts = &parts[class.source as usize];
            if parts.is_lacking {
                continue;
            }
            let mut receivers = self.nodes_of(demands.set(class.receivers));
            receivers.retain(|n| parts.complete.binary_search(n).is_err());
            if !receivers.is_empty() {
                needs.push(Need::of_sum(class.bytes, parts, receivers));
            }
        }
        needs
    }

    fn bound(&self, classes: &[Class], demands: &Demands) -> Bound {
        let parts: Vec<Parts> = demands.sources.iter().map(|s| self.parts_of(s)).collect();
        let mut needs = self.sum_needs(&parts, demands);
        let has_sums = !needs.is_empty();
        let whole = classes.iter().filter(|c| !c.receivers.is_empty());
        needs.extend(whole.map(|c| Need::of_whole(c.bytes, &c.holders, &c.receivers)));
        let mut bound = self.in_of_each(&needs);
        bound.reason = match bound.seconds > 0.0 {
            true => bound.reason,
            false => "nothing has to cross a link".into(),
        };
        let alone = self.bytes_alone(&needs);
        let (unhelped_s, binding) = self.without_help(&needs, bound.seconds);
        if has_sums || unhelped_s > bound.seconds {
            let floor_s = bound.seconds;
            bound = bound.or_larger(self.out_of_sets(&needs, &alone, floor_s));
            bound = bound.or_larger(self.messages(&needs, &binding));
        }
        bound
    }

    /// What has to come into each node, at least.
    fn in_of_each(&self, needs: &[Need]) -> Bound {
        let mut bytes_in = vec![0u64; self.in_rates.len()];
        for need in needs {
            need.receivers.iter().for_each(|&node| bytes_in[node as usize] += need.bytes);
        }
        let mut bound = Bound::default();
        for (node, &bytes) in bytes_in.iter().enumerate() {
            let seconds = bytes as f64 / self.in_rates[node];
            if seconds > bound.seconds {
                let reason =
                    format!("{} in: {}", self.name(node as u32), at_rate(bytes, self.in_rates[node]));
                bound = Bound { seconds, reason, ..Bound::default() };
            }
        }
        bound
    }

    /// What has to leave each node because nobody else holds it.
    fn bytes_alone(&self, needs: &[Need]) -> Vec<u64> {
        let mut bytes_out = vec![0u64; self.out_rates.len()];
        for need in needs {
            need.leaving_alone().for_each(|node| bytes_out[node as usize] += need.bytes);
        }
        bytes_out
    }

    /// The least time to send copies of whole values if only holders and receivers send. Never below the bound, so a
    /// bound that reaches it needs no further look.
    fn without_help(&self, needs: &[Need], floor_s: f64) -> (f64, Vec<u32>) {
        let class = |copies: Copies| Class {
            bytes: copies.bytes,
            holders: copies.holders.to_vec(),
            receivers: copies.receivers.to_vec(),
            items: vec![],
        };
        let classes: Vec<Class> = needs.iter().filter_map(Need::copies).map(class).collect();
        least_time(&out_jobs(&classes), &self.out_rates, &vec![0; self.out_rates.len()], floor_s)
    }

    /// The worst set of nodes, by what only they hold.
    fn out_of_sets(&self, needs: &[Need], alone: &[u64], floor_s: f64) -> Bound {
        let job = |bytes, nodes: &[u32]| Job {
            bytes,
            candidates: nodes.iter().map(|&node| Candidate { node, preference: 0, most: u64::MAX }).collect(),
        };
        let jobs: Vec<Job> =
            needs.iter().flat_map(|n| n.leaving_groups().map(|group| job(n.bytes, group))).collect();
        let (_, binding) = least_time(&jobs, &self.out_rates, alone, floor_s);
        if binding.is_empty() {
            return Bound::default();
        }
        // The search shares out whole bytes; what its set has to send is exact.
        let within = |job: &&Job| job.candidates.iter().all(|c| binding.binary_search(&c.node).is_ok());
        let bytes = jobs.iter().filter(within).map(|j| j.bytes).sum::<u64>()
            + binding.iter().map(|&n| alone[n as usize]).sum::<u64>();
        let rate: f64 = binding.iter().map(|&n| self.out_rates[n as usize]).sum();
        let reason = format!("{} out: {}", self.names(&binding), at_rate(bytes, rate));
        Bound { seconds: bytes as f64 / rate, reason, ..Bound::default() }
    }

    /// The worst set of nodes, by the messages that cannot be spared.
    fn messages(&self, needs: &[Need], binding: &[u32]) -> Bound {
        let mut worst = Bound::default();
        for busy in messages::busy_sets(needs, binding, self.in_rates.len()) {
            let (seconds, bytes) = messages::into(needs, &busy, &self.in_rates);
            worst = worst.or_larger(self.of_messages(seconds, bytes, &busy, &self.in_rates, "in"));
            let (seconds, bytes) = messages::out_of(needs, &busy, &self.out_rates);
            worst = worst.or_larger(self.of_messages(seconds, bytes, &busy, &self.out_rates, "out"));
            let (seconds, bytes, rate) = messages::across(needs, &busy, &self.out_rates, &self.in_rates);
            if seconds > worst.seconds {
                let nodes: Vec<u32> = (0..busy.len() as u32).filter(|&n| busy[n as usize]).collect();
                let at = at_rate(bytes, rate);
                let reason = format!("{} out and all others in, messages: {at}", self.names(&nodes));
                worst = Bound { seconds, reason, ..Bound::default() };
            }
        }
        worst
    }

    fn of_messages(&self, seconds: f64, bytes: u64, busy: &[bool], rates: &[f64], way: &str) -> Bound {
        let nodes: Vec<u32> = (0..busy.len() as u32).filter(|&n| busy[n as usize]).collect();
        let rate: f64 = nodes.iter().map(|&n| rates[n as usize]).sum();
        let helpers = match seconds * rate < bytes as f64 * (1.0 - 1e-9) {
            true => ", others helping",
            false => "",
        };
        let at = at_rate(bytes, rate);
        let reason = format!("{} {way}, all messages: {at}{helpers}", self.names(&nodes));
        Bound { seconds, reason, ..Bound::default() }
    }
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
    use crate::cluster::{Cluster, Host};
    use crate::reshard::problem::Hosts;

    fn bound(src: &str, dst: &str) -> Bound {
        lower_bound(&Problem::pair(src.parse().unwrap(), dst.parse().unwrap()).unwrap()).unwrap()
    }

    /// On this many hosts with a device each.
    fn bound_among(hosts: usize, src: &str, dst: &str) -> Bound {
        let cluster = Cluster::of_hosts(vec![Host::with_devices(1); hosts]);
        let pair = (String::new(), src.parse().unwrap(), dst.parse().unwrap());
        lower_bound(&Problem::new(vec![pair], Hosts::Described(cluster)).unwrap()).unwrap()
    }

    #[track_caller]
    fn is(bound: Bound, bytes: f64, rate: f64) {
        assert!((bound.seconds - bytes / rate).abs() < 1e-9 * bytes / rate, "{bound:?}");
    }

    #[test]
    fn a_replicated_source_shares_its_nics() {
        let b = bound("f32[6000]@A{h:2,d:4}(_)", "f32[6000]@B{h:3,d:4}(h)");
        assert!(b.reason.starts_with("h0 h1 out"), "{b:?}");
        assert!((b.seconds - 12_000.0 / 1.25e9).abs() < 1e-9, "{b:?}");
    }

    #[test]
    fn forwarding_makes_replicas_free() {
        is(bound("f32[1000]@A{d:1}(_)", "f32[1000]@B{h:4,d:2}(_)"), 4000.0, 1.25e9);
    }

    #[test]
    fn summing_on_every_host_costs_both_ways() {
        // All-reduce over three hosts: 2 (n - 1) / n of the tensor through every NIC.
        let all = bound("f32[900]@A{h:3,d:1}(_ | sum h)", "f32[900]@A{h:3,d:1}(_)");
        is(all, 2.0 * 2.0 / 3.0 * 3600.0, 1.25e9);
        is(bound("f32[900]@A{h:3,d:1}(_ | sum h)", "f32[900]@B{d:1}(_)"), 3600.0, 1.25e9);
    }

    #[test]
    fn a_host_with_every_part_adds_up_by_itself() {
        let b = bound("f32[1048576]@A{h:2,d:2}(_ | sum d)", "f32[1048576]@A{h:2,d:2}(_)");
        assert!(b.reason.ends_with("if no host brings in what it can make of what it holds"), "{b:?}");
        // Two devices, two messages, a link each.
        is(b, 4.0 * 1048576.0, 100e9);
    }

    #[test]
    fn a_host_with_every_part_needs_nothing_while_others_do() {
        // h0 has both parts, h1 has none and wants the sum: one message from h0.
        let b = bound("f32[1000]@A{d:2}(_ | sum d)", "f32[1000]@B{h:2,d:2}=0-3(_)");
        is(b.clone(), 4000.0, 1.25e9);
        assert!(b.reason.starts_with("h1 in"), "{b:?}");
    }

    #[test]
    fn idle_hosts_could_help_to_add_up() {
        let all_reduce = |hosts| bound_among(hosts, "f32[900]@A{h:3}(_ | sum h)", "f32[900]@A{h:3}(_)");
        is(all_reduce(3), 4.0 / 3.0 * 3600.0, 1.25e9);
        // One helper takes in two parts and sends one sum: 4 = (3 + 1/2) T.
        is(all_reduce(4), 4.0 / 3.5 * 3600.0, 1.25e9);
        assert!(all_reduce(4).reason.ends_with("others helping"), "{:?}", all_reduce(4));
        // Two of them, and every host sends and receives once.
        is(all_reduce(5), 3600.0, 1.25e9);
    }

    #[test]
    fn hosts_that_take_in_enough_do_not_help_those_that_send() {
        // Rows are whole on h0 to h3, columns wanted on h2 and h3 (the first quarter), h4, h5 and h6. A sixteenth is 1. Nobody takes in
        // more than 4 or is alone with more than 4 to send. But h0 to h3 send 18, unless others forward for them, who take in
        // 12 for themselves: 18 + 12 over seven NICs, 30/7.
        let (shape, sixteenth) = ("f32[4096,4096]", 4.0 * 1024.0 * 1024.0);
        let b =
            bound(&format!("{shape}@A{{a:4,b:2}}(a,_ | sum b)"), &format!("{shape}@B{{a:4,b:4}}=4-19(_,a)"));
        is(b.clone(), 30.0 / 7.0 * sixteenth, 1.25e9);
        assert!(b.reason.starts_with("h0 h1 h2 h3 out and all others in, messages"), "{b:?}");
    }

    #[test]
    fn what_stays_inside_a_host_takes_its_local_links() {
        is(bound("f32[8000]@A{d:4}(d)", "f32[8000]@A{d:4}(_)"), 24_000.0, 100e9);
        assert_eq!(bound("f32[8]@A{d:4}(d)", "f32[8]@A{d:4}(d)").seconds, 0.0);
    }
}
