//! What a report says about a plan, as data: text and HTML print the same figures.

use std::collections::BTreeMap;

use crossmesh_core::cluster::Topology;
use crossmesh_core::id::{HostId, PortId};
use crossmesh_core::reshard::{Plan, Problem};
use crossmesh_core::trace::{Link, LinkUse, Trace};
use crossmesh_core::units::Bytes;

use crate::output::count;

/// Plans up to this many transfers are printed transfer by transfer.
pub const SMALL_PLAN: usize = 40;

/// What one host sends to another, or what moves inside one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Traffic {
    pub bytes: u64,
    pub transfers: usize,
}

/// Traffic by source and destination host; pairs without any are left out.
pub fn host_traffic(plan: &Plan) -> BTreeMap<(HostId, HostId), Traffic> {
    let topology = &plan.problem.topology;
    let mut pairs: BTreeMap<(HostId, HostId), Traffic> = BTreeMap::new();
    for t in plan.transfers() {
        let entry = pairs.entry((topology.host(t.src), topology.host(t.dst))).or_default();
        entry.bytes += t.bytes;
        entry.transfers += 1;
    }
    pairs
}

/// Links by the time their bytes take at full rate, busiest first; ties in link order.
pub fn busiest_links(trace: &Trace) -> Vec<&LinkUse> {
    let mut links: Vec<&LinkUse> = trace.links.iter().collect();
    links.sort_by(|a, b| b.busy_s().total_cmp(&a.busy_s()).then(a.link.cmp(&b.link)));
    links
}

/// A link as people speak of it: `h0 nic out`, `h3 nic 2 in`, `r5 local out`, `tier pod 1 out`.
pub fn link_name(problem: &Problem, link: Link) -> String {
    let tier = |tier: u32, group: u32, way| {
        let name = problem.cluster.tiers.get(tier as usize).map_or("", |t| t.name.as_str());
        format!("tier {name} group {group} {way}")
    };
    match link {
        Link::NicOut(port) => format!("{} out", port_name(&problem.topology, port)),
        Link::NicIn(port) => format!("{} in", port_name(&problem.topology, port)),
        Link::LocalOut(rank) => format!("{rank} local out"),
        Link::LocalIn(rank) => format!("{rank} local in"),
        Link::GroupOut(t, group) => tier(t, group, "out"),
        Link::GroupIn(t, group) => tier(t, group, "in"),
    }
}

fn port_name(topology: &Topology, port: PortId) -> String {
    let host = topology.ports[port.index()].host;
    let mut ports = topology.ports_of(host);
    match ports.next() {
        Some(first) if topology.ports_of(host).count() > 1 => format!("{host} nic {}", port.0 - first.0),
        _ => format!("{host} nic"),
    }
}

/// The first line of every report: `f32[8,6]  A{tp:2}(tp,_) -> B{tp:3}(_,tp)   192 B in 6 transfers`.
pub fn headline(plan: &Plan) -> String {
    let moved = format!("{} in {}", Bytes(plan.bytes_moved()), count(plan.transfers().len(), "transfer"));
    let what = match plan.problem.reshards.as_slice() {
        [one] => {
            let (src, dst) = (one.src.layout.to_string(), one.dst.layout.to_string());
            let (tensor, src) = src.split_once('@').unwrap_or(("", &src));
            let dst = dst.split_once('@').map_or(dst.as_str(), |(_, dst)| dst);
            let name = if one.name.is_empty() { String::new() } else { format!("{} ", one.name) };
            format!("{name}{tensor}  {src} -> {dst}")
        }
        many => {
            let bytes: u64 = many.iter().map(|r| r.src.layout.bytes()).sum();
            format!("{}, {}", count(many.len(), "tensor"), Bytes(bytes))
        }
    };
    format!("{what}   {moved}")
}

/// `5 devices on 2 hosts`, counting those that hold or receive something.
pub fn place(problem: &Problem) -> String {
    let ranks = problem.meshes_of_ranks();
    let mut hosts: Vec<HostId> = ranks.keys().map(|r| problem.topology.host(*r)).collect();
    hosts.dedup();
    format!("{} on {}", count(ranks.len(), "device"), count(hosts.len(), "host"))
}

/// A share of the whole time, in percent.
pub fn busy_percent(link: &LinkUse, makespan_s: f64) -> f64 {
    if makespan_s > 0.0 { 100.0 * link.busy_s() / makespan_s } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossmesh_core::cluster::{Cluster, Host};
    use crossmesh_core::id::Rank;
    use crossmesh_core::region::{Region, Span};
    use crossmesh_core::reshard::problem::Hosts;

    fn two_rank_plan(hosts: Hosts) -> Plan {
        let layout = |text: &str| text.parse().unwrap();
        let pair = (String::new(), layout("f32[8]@A{tp:2}(tp)"), layout("f32[8]@B{tp:2}(_)"));
        let mut plan = Plan::new(Problem::new(vec![pair], hosts).unwrap(), "flow", 1024);
        let region = plan.add_region(Region::new(vec![Span::new(0, 4)]));
        plan.add(0, Rank(0), Rank(2), region, &[]);
        plan.add(0, Rank(0), Rank(3), region, &[]);
        plan
    }

    #[test]
    fn traffic_adds_up_by_host_pair() {
        let plan = two_rank_plan(Hosts::default());
        let traffic = host_traffic(&plan);
        assert_eq!(traffic[&(HostId(0), HostId(1))], Traffic { bytes: 32, transfers: 2 });
        assert_eq!(traffic.len(), 1);
        assert_eq!(headline(&plan), "f32[8]  A{tp:2}(tp) -> B{tp:2}(_)   32 B in 2 transfers");
        assert_eq!(place(&plan.problem), "4 devices on 2 hosts");
    }

    #[test]
    fn links_are_named_after_hosts() {
        let hosts = vec![Host { nics: 2, ..Host::with_devices(2) }, Host::with_devices(2)];
        let plan = two_rank_plan(Hosts::Described(Cluster::of_hosts(hosts)));
        let name = |link| link_name(&plan.problem, link);
        assert_eq!(name(Link::NicOut(PortId(1))), "h0 nic 1 out");
        assert_eq!(name(Link::NicIn(PortId(2))), "h1 nic in");
        assert_eq!(name(Link::LocalIn(Rank(3))), "r3 local in");
    }
}
