//! What a report says about a plan, as data: text and HTML print the same figures.

use std::collections::BTreeMap;

use crossmesh_core::id::HostId;
use crossmesh_core::reshard::{Plan, Problem};
use crossmesh_core::units::{Bytes, Rate};

use crate::links;
use crate::output::{Table, and_more, count};
use crate::predict::Prediction;

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

/// The first line of every report: `f32[8,6]  A{tp:2}(tp,_) -> B{tp:3}(_,tp)   192 B in 6 transfers`.
pub fn headline(plan: &Plan) -> String {
    let moved = format!("{} in {}", Bytes(plan.bytes_moved()), count(plan.transfers().len(), "transfer"));
    let what = match plan.problem.reshards.as_slice() {
        [one] => {
            let (src, dst) = (one.src.layout.summary(), one.dst.layout.summary());
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

/// The busiest links, the NICs of a host together, as lines of text.
pub fn busiest_links(prediction: &Prediction, shown: usize) -> String {
    let mut rows = links::by_host(&prediction.plan.problem, &prediction.trace);
    if rows.is_empty() {
        return String::new();
    }
    links::sort_busiest(&mut rows);
    let mut table = Table::new("lr");
    for row in rows.iter().take(shown) {
        table.row([
            row.name.clone(),
            Bytes(row.bytes).to_string(),
            format!("at {}", Rate(row.bytes_per_s)),
            format!("busy {:.1} % of the time", percent(row.busy_s, prediction.seconds())),
        ]);
    }
    format!("busiest links\n{}{}", table.render(2), and_more(rows.len(), shown, "link"))
}

/// A share of the whole, in percent.
pub fn percent(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { 100.0 * part / whole } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
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
}
