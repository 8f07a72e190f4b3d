//! What a report says about a plan, as data: text and HTML print the same figures.

use std::collections::BTreeMap;

use crossmesh_core::id::HostId;
use crossmesh_core::reshard::{Plan, Problem};
use crossmesh_core::units::{Bytes, Rate, Seconds};

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

/// Why the plan takes as long as it does: what its strategy says, and what can be seen of any plan.
pub fn reasons(prediction: &Prediction) -> Vec<String> {
    let mut reasons = prediction.plan.reasons.clone();
    if let Some((host, bytes)) = brought_again(&prediction.plan) {
        reasons.push(format!(
            "{host} is sent {} that another of its devices is sent as well: a copy for each",
            Bytes(bytes)
        ));
    }
    let mut rows = links::by_host(&prediction.plan.problem, &prediction.trace);
    links::sort_busiest(&mut rows);
    let bound_s = prediction.bound.seconds;
    if let Some(row) = rows.first().filter(|row| row.busy_s > 1.02 * bound_s) {
        reasons.push(format!(
            "{}, the busiest link, carries {}: {} at its full rate, {:.2} × the bound",
            row.name,
            Bytes(row.bytes),
            Seconds(row.busy_s),
            row.busy_s / bound_s
        ));
    }
    let idle = |row: &links::Row| 100.0 - percent(row.busy_s, prediction.seconds());
    if let Some(row) = rows.first().filter(|row| idle(row) >= 2.0) {
        reasons.push(format!(
            "{}, the busiest link, is idle {:.1} % of the time: what it carries waits for other devices, as the critical path shows",
            row.name,
            idle(row)
        ));
    }
    reasons
}

/// The host that gets most bytes over its NICs more than once, and how many. Parts of a sum are all different.
fn brought_again(plan: &Plan) -> Option<(HostId, u64)> {
    let topology = &plan.problem.topology;
    let over_nics = plan.transfers().iter().filter(|t| !t.reduce && plan.crosses_hosts(t));
    let mut arrivals: Vec<_> =
        over_nics.map(|t| (topology.host(t.dst), t.tensor, t.region, t.bytes)).collect();
    arrivals.sort_unstable();
    let mut again: BTreeMap<HostId, u64> = BTreeMap::new();
    for same in arrivals.chunk_by(|a, b| (a.0, a.1, a.2) == (b.0, b.1, b.2)) {
        let more: u64 = same.iter().skip(1).map(|(.., bytes)| bytes).sum();
        *again.entry(same[0].0).or_default() += more;
    }
    again.into_iter().rev().filter(|(_, bytes)| *bytes > 0).max_by_key(|(_, bytes)| *bytes)
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
    use crossmesh_core::reshard::{PlanOptions, Strategy};

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
        // The second device of the host could have had it from the first.
        assert_eq!(brought_again(&plan), Some((HostId(1), 16)));
        let prediction = Prediction::of_plan(two_rank_plan(Hosts::default()));
        assert!(prediction.is_err(), "half of the tensor is missing, and nothing is said of it");
    }

    /// Whatever a strategy does, it says what; what keeps it from the bound is said, with a number; and there is a path.
    #[test]
    fn every_strategy_is_explained() {
        let problems = [
            ("f32[4096]@A{tp:1}(_)", "f32[4096]@B{tp:3}(_)"),
            ("f32[64,64]@A{h:2,g:2}(h,g)", "f32[64,64]@B{h:2,g:2}(_,_)"),
            ("f32[64,96]@A{h:3,g:2}(_,h+g)", "f32[64,96]@B{h:2,g:2}(h,_)"),
            ("f32[64,64]@A{g:4}(g,_)", "f32[64,64]@A{g:4}(_,g)"),
        ];
        let mut far = 0;
        for (src, dst) in problems {
            let problem = Problem::pair(src.parse().unwrap(), dst.parse().unwrap()).unwrap();
            for strategy in Strategy::CONCRETE.into_iter().chain([Strategy::Auto]) {
                let options = PlanOptions { strategy, ..PlanOptions::default() };
                let Ok(prediction) = Prediction::of_problem(&problem, &options) else { continue };
                let (why, ratio) = (reasons(&prediction), prediction.ratio());
                assert!(!prediction.plan.reasons.is_empty(), "{strategy} does not say what it does: {dst}");
                let kept = why.iter().find(|reason| reason.contains("the busiest link"));
                if ratio >= 1.05 {
                    far += 1;
                    let kept = kept.unwrap_or_else(|| panic!("{strategy}, {ratio:.2} × the bound: {why:?}"));
                    assert!(kept.contains(char::is_numeric), "{kept}");
                }
                let path = crate::path::rows(&prediction);
                let end = path.iter().map(|row| row.end_s).fold(0.0, f64::max);
                assert!(
                    (end / prediction.seconds() - 1.0).abs() < 1e-6,
                    "{strategy}: its path ends at {end}"
                );
            }
        }
        assert!(far >= 8, "{far} plans far from the bound are not enough to tell");
    }
}
