//! Links as reports show them: one by one, or the NICs of a host together.
//!
//! ```text
//! h0 nic 0 out  ▇▇▇▇____
//! h0 nic 1 out  ▇▇▇▇▇▇▇▇      h0 2 nics out  ▇▇▇▇▄▄▄▄   the share of their joint rate
//! ```

use std::collections::BTreeMap;

use crossmesh_core::cluster::Topology;
use crossmesh_core::id::{HostId, PortId};
use crossmesh_core::reshard::Problem;
use crossmesh_core::trace::{Busy, Link, LinkUse, Trace};

/// A link, or several that stand for one.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    pub name: String,
    /// Hosts in order, out before in, tiers after hosts, local links last.
    order: (u8, u32, u32, u8),
    pub kind: Kind,
    pub bytes: u64,
    pub bytes_per_s: f64,
    /// The time of the busiest member's bytes at its full rate.
    pub busy_s: f64,
    pub busy: Vec<Busy>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Out,
    In,
    Tier,
    Local,
}

/// Busiest first; ties in the order of hosts.
pub fn sort_busiest(rows: &mut [Row]) {
    rows.sort_by(|a, b| b.busy_s.total_cmp(&a.busy_s).then(a.order.cmp(&b.order)));
}

/// A NIC's two directions stand together; tiers come after hosts.
pub fn sort_by_host(rows: &mut [Row]) {
    rows.sort_by_key(|r| r.order);
}

/// A row a link.
pub fn one_by_one(problem: &Problem, trace: &Trace) -> Vec<Row> {
    trace.links.iter().map(|link| row(problem, link)).collect()
}

/// A row a link, but one for all NICs of a host.
pub fn by_host(problem: &Problem, trace: &Trace) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut nics: BTreeMap<(HostId, bool), Vec<&LinkUse>> = BTreeMap::new();
    for link in &trace.links {
        match link.link {
            Link::NicOut(port) | Link::NicIn(port) => {
                let out = matches!(link.link, Link::NicOut(_));
                nics.entry((problem.topology.ports[port.index()].host, out)).or_default().push(link);
            }
            _ => rows.push(row(problem, link)),
        }
    }
    for ((host, out), links) in nics {
        match problem.topology.ports_of(host).count() {
            0 | 1 => rows.extend(links.iter().map(|link| row(problem, link))),
            _ => rows.push(joined(problem, host, out, &links)),
        }
    }
    rows
}

fn row(problem: &Problem, link: &LinkUse) -> Row {
    let (kind, order) = match link.link {
        Link::NicOut(p) => (Kind::Out, (0, p.0, 0, 0)),
        Link::NicIn(p) => (Kind::In, (0, p.0, 0, 1)),
        Link::GroupOut(t, g) => (Kind::Tier, (1, t, g, 0)),
        Link::GroupIn(t, g) => (Kind::Tier, (1, t, g, 1)),
        Link::LocalOut(r) => (Kind::Local, (2, r.0, 0, 0)),
        Link::LocalIn(r) => (Kind::Local, (2, r.0, 0, 1)),
    };
    Row {
        name: name(problem, link.link),
        order,
        kind,
        bytes: link.bytes,
        bytes_per_s: link.bytes_per_s,
        busy_s: link.busy_s(),
        busy: link.busy.clone(),
    }
}

/// All NICs of a host in one direction, idle ones too.
fn joined(problem: &Problem, host: HostId, out: bool, links: &[&LinkUse]) -> Row {
    let ports: Vec<PortId> = problem.topology.ports_of(host).collect();
    let rate = |p: &PortId| {
        let port = &problem.topology.ports[p.index()];
        if out { port.out_bytes_per_s } else { port.in_bytes_per_s }
    };
    let bytes_per_s: f64 = ports.iter().map(rate).sum();
    let way = if out { "out" } else { "in" };
    Row {
        name: format!("{host} {} nics {way}", ports.len()),
        order: (0, ports[0].0, 0, u8::from(!out)),
        kind: if out { Kind::Out } else { Kind::In },
        bytes: links.iter().map(|l| l.bytes).sum(),
        bytes_per_s,
        busy_s: links.iter().map(|l| l.busy_s()).fold(0.0, f64::max),
        busy: joint_use(links, bytes_per_s),
    }
}

/// The share of the joint rate in use: a sweep over the ends of all stretches.
fn joint_use(links: &[&LinkUse], bytes_per_s: f64) -> Vec<Busy> {
    let mut changes: Vec<(f64, f64)> = links
        .iter()
        .flat_map(|l| l.busy.iter().map(|b| (b, b.share * l.bytes_per_s)))
        .flat_map(|(b, rate)| [(b.start_s, rate), (b.end_s, -rate)])
        .collect();
    changes.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut busy: Vec<Busy> = Vec::new();
    let (mut rate, mut since) = (0.0, 0.0);
    for (time, change) in changes {
        let share = rate / bytes_per_s;
        // What is left of adding and taking away is no traffic.
        if time > since && share > 1e-9 {
            busy.push(Busy { start_s: since, end_s: time, share });
        }
        since = time;
        rate += change;
    }
    busy
}

/// A link as people speak of it: `h0 nic out`, `h3 nic 2 in`, `r5 local out`, `leaf 1 out` (tier and group).
pub fn name(problem: &Problem, link: Link) -> String {
    let tier = |tier: u32, group: u32, way| {
        let name = problem.cluster.tiers.get(tier as usize).map_or("", |t| t.name.as_str());
        format!("{name} {group} {way}")
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
        Some(first) if ports.next().is_some() => format!("{host} nic {}", port.0 - first.0),
        _ => format!("{host} nic"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossmesh_core::cluster::{Cluster, Host};
    use crossmesh_core::id::Rank;
    use crossmesh_core::reshard::problem::Hosts;

    /// Two hosts of two devices; the first has two NICs.
    fn problem() -> Problem {
        let hosts = vec![Host { nics: 2, ..Host::with_devices(2) }, Host::with_devices(2)];
        let layout = |text: &str| text.parse().unwrap();
        let pair = (String::new(), layout("f32[8]@A{tp:2}(tp)"), layout("f32[8]@B{tp:2}(_)"));
        Problem::new(vec![pair], Hosts::Described(Cluster::of_hosts(hosts))).unwrap()
    }

    fn used(link: Link, busy: &[(f64, f64, f64)]) -> LinkUse {
        let busy: Vec<Busy> =
            busy.iter().map(|&(start_s, end_s, share)| Busy { start_s, end_s, share }).collect();
        let seconds: f64 = busy.iter().map(|b| (b.end_s - b.start_s) * b.share).sum();
        LinkUse { link, bytes: (seconds * 1.25e9) as u64, bytes_per_s: 1.25e9, busy }
    }

    #[test]
    fn links_are_named_after_hosts() {
        let problem = problem();
        assert_eq!(name(&problem, Link::NicOut(PortId(1))), "h0 nic 1 out");
        assert_eq!(name(&problem, Link::NicIn(PortId(2))), "h1 nic in");
        assert_eq!(name(&problem, Link::LocalIn(Rank(3))), "r3 local in");
    }

    #[test]
    fn the_nics_of_a_host_are_one_row() {
        let links = vec![
            used(Link::NicOut(PortId(0)), &[(0.0, 1.0, 1.0)]),
            used(Link::NicOut(PortId(1)), &[(0.0, 2.0, 1.0)]),
            used(Link::NicIn(PortId(2)), &[(0.0, 2.0, 0.5)]),
        ];
        let trace = Trace { makespan_s: 2.0, ops: vec![], links };
        let mut rows = by_host(&problem(), &trace);
        sort_by_host(&mut rows);
        assert_eq!(rows.iter().map(|r| r.name.as_str()).collect::<Vec<_>>(), ["h0 2 nics out", "h1 nic in"]);
        let shares: Vec<(f64, f64, f64)> =
            rows[0].busy.iter().map(|b| (b.start_s, b.end_s, b.share)).collect();
        assert_eq!(shares, [(0.0, 1.0, 1.0), (1.0, 2.0, 0.5)]);
        assert_eq!(rows[0].bytes, 3 * 1_250_000_000);
        assert_eq!(rows[0].busy_s, 2.0);
    }

    #[test]
    fn a_nics_directions_stand_together() {
        let links = [
            Link::LocalOut(Rank(0)),
            Link::NicIn(PortId(0)),
            Link::NicOut(PortId(1)),
            Link::NicOut(PortId(0)),
        ];
        let links = links.map(|l| used(l, &[(0.0, 1.0, 1.0)])).to_vec();
        let mut rows = one_by_one(&problem(), &Trace { makespan_s: 1.0, ops: vec![], links });
        sort_by_host(&mut rows);
        let names: Vec<&str> = rows.iter().map(|r| r.name.as_str()).collect();
        assert_eq!(names, ["h0 nic 0 out", "h0 nic 0 in", "h0 nic 1 out", "r0 local out"]);
    }
}
