//! What every tensor of a plan costs: which of them to look at first.
//!
//! A tensor is under way from its first op's start to its last one's end, beside others. What it takes from the others is its
//! share of the busiest link's bytes; these shares add up to 1.

use std::cmp::Reverse;

use crossmesh_core::program::{OpKind, Program};
use crossmesh_core::reshard::{Plan, Transfer};
use crossmesh_core::trace::{Link, Trace};
use crossmesh_core::units::Seconds;
use serde::Serialize;

use crate::links;
use crate::predict::Prediction;

/// A tensor of a plan.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TensorRow {
    pub name: String,
    pub src: String,
    pub dst: String,
    /// Of the tensor, once.
    pub bytes: u64,
    /// Over all of its transfers.
    pub bytes_moved: u64,
    pub transfers: usize,
    /// When its first byte leaves and its last arrives.
    pub start_s: f64,
    pub end_s: f64,
    /// Of the bytes that the busiest link carries.
    pub share_of_busiest_link: f64,
}

/// All of them, the largest first, and the name of the busiest link.
pub fn rows(prediction: &Prediction) -> (Vec<TensorRow>, String) {
    let (mut rows, busiest) = in_order(&prediction.plan, &prediction.program, &prediction.trace);
    // Stable: those of one size stay in the order in which they were given.
    rows.sort_by_key(|row| Reverse(row.bytes));
    (rows, busiest)
}

/// The same of a plan, the program it comes to, and when that runs, in the order of the plan.
pub fn in_order(plan: &Plan, program: &Program, trace: &Trace) -> (Vec<TensorRow>, String) {
    let busiest = trace.links.iter().max_by(|a, b| a.busy_s().total_cmp(&b.busy_s()));
    let mut rows: Vec<TensorRow> = (0..plan.problem.reshards.len()).map(|tensor| row(plan, tensor)).collect();
    for t in plan.transfers() {
        let row = &mut rows[t.tensor as usize];
        row.transfers += 1;
        row.bytes_moved += t.bytes;
        if let Some(link) = busiest.filter(|link| crosses(plan, t, link.link)) {
            row.share_of_busiest_link += t.bytes as f64 / link.bytes.max(1) as f64;
        }
    }
    for (ranked, spans) in program.ranks.iter().zip(&trace.ops) {
        for (op, span) in ranked.ops.iter().zip(spans).filter(|(op, _)| op.bytes > 0) {
            if matches!(op.kind, OpKind::Send { .. } | OpKind::Recv { .. }) {
                let row = &mut rows[op.tensor as usize];
                (row.start_s, row.end_s) = (row.start_s.min(span.start_s), row.end_s.max(span.end_s));
            }
        }
    }
    for row in &mut rows {
        row.start_s = row.start_s.min(row.end_s);
    }
    (rows, busiest.map_or(String::new(), |link| links::name(&plan.problem, link.link)))
}

impl TensorRow {
    /// How long it is under way.
    pub fn seconds(&self) -> f64 {
        self.end_s - self.start_s
    }
}

/// The tensor that is under way for longest; of equals the first.
pub fn slowest(rows: &[TensorRow]) -> Option<&TensorRow> {
    let most = rows.iter().map(TensorRow::seconds).fold(0.0, f64::max);
    rows.iter().find(|row| row.seconds() == most && most > 0.0)
}

/// The same in words.
pub fn slowest_in_words(rows: &[TensorRow]) -> Option<String> {
    let row = slowest(rows)?;
    let (start, end) = (Seconds(row.start_s), Seconds(row.end_s));
    Some(format!("{} takes longest: {}, from {start} to {end}", row.name, Seconds(row.seconds())))
}

/// The first rows of a long table, and behind them the one that takes longest, if it is not among them.
pub fn shown(rows: &[TensorRow], most: usize) -> Vec<&TensorRow> {
    let mut shown: Vec<&TensorRow> = rows.iter().take(most).collect();
    let late = slowest(rows).filter(|slowest| !shown.iter().any(|row| std::ptr::eq(*row, *slowest)));
    shown.extend(late);
    shown
}

/// A tensor's name, or its number where it has none.
pub fn name_of(plan: &Plan, tensor: usize) -> String {
    match plan.problem.reshards[tensor].name.as_str() {
        "" => format!("#{tensor}"),
        name => name.to_string(),
    }
}

fn row(plan: &Plan, tensor: usize) -> TensorRow {
    let reshard = &plan.problem.reshards[tensor];
    TensorRow {
        name: name_of(plan, tensor),
        src: reshard.src.layout.summary(),
        dst: reshard.dst.layout.summary(),
        bytes: reshard.src.layout.bytes(),
        bytes_moved: 0,
        transfers: 0,
        start_s: f64::INFINITY,
        end_s: 0.0,
        share_of_busiest_link: 0.0,
    }
}

/// Whether a transfer goes over a link.
fn crosses(plan: &Plan, t: &Transfer, link: Link) -> bool {
    let topology = &plan.problem.topology;
    let remote = plan.crosses_hosts(t);
    let group = |tier: u32, rank| topology.group(tier as usize, topology.host(rank));
    match link {
        Link::NicOut(port) => remote && topology.port(t.src) == port,
        Link::NicIn(port) => remote && topology.port(t.dst) == port,
        Link::LocalOut(rank) => !remote && t.src == rank,
        Link::LocalIn(rank) => !remote && t.dst == rank,
        Link::GroupOut(tier, of) => group(tier, t.src) == Some(of) && group(tier, t.dst) != Some(of),
        Link::GroupIn(tier, of) => group(tier, t.dst) == Some(of) && group(tier, t.src) != Some(of),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossmesh_core::reshard::problem::Hosts;
    use crossmesh_core::reshard::{PlanOptions, Problem};

    #[test]
    fn rows_add_up_to_the_plan() {
        let layout = |text: &str| text.parse().unwrap();
        let pair = |name: &str, len: u32, dst: &str| {
            let shape = format!("f32[{len},64]");
            (
                name.to_string(),
                layout(&format!("{shape}@A{{h:2,d:2}}(h+d,_)")),
                layout(&format!("{shape}@B{{h:2,d:2}}{dst}")),
            )
        };
        let pairs = vec![pair("small", 256, "(_,_)"), pair("", 4096, "(h,d)"), pair("wide", 1024, "(_,d)")];
        let problem = Problem::new(pairs, Hosts::default()).unwrap();
        let prediction = Prediction::of_problem(&problem, &PlanOptions::default()).unwrap();
        let (rows, busiest) = rows(&prediction);
        assert_eq!(rows.iter().map(|r| r.name.as_str()).collect::<Vec<_>>(), ["#1", "wide", "small"]);
        assert_eq!(rows.iter().map(|r| r.bytes_moved).sum::<u64>(), prediction.plan.bytes_moved());
        assert_eq!(rows.iter().map(|r| r.transfers).sum::<usize>(), prediction.plan.transfers().len());
        let shares: f64 = rows.iter().map(|r| r.share_of_busiest_link).sum();
        assert!((shares - 1.0).abs() < 1e-9, "{shares} of {busiest}");
        let last = rows.iter().map(|r| r.end_s).fold(0.0, f64::max);
        assert!((last / prediction.seconds() - 1.0).abs() < 1e-9);
        let longest = rows.iter().max_by(|a, b| a.seconds().total_cmp(&b.seconds()));
        let words = slowest_in_words(&rows).unwrap();
        assert!(words.starts_with(&format!("{} takes longest: ", longest.unwrap().name)), "{words}");
        assert_eq!(slowest_in_words(&[]), None);
        let doc = prediction.plan_doc();
        assert_eq!(doc.busiest_link, Some(busiest));
        let costs = doc.tensors.iter().map(|t| t.cost.as_ref().unwrap());
        assert_eq!(costs.clone().map(|c| c.bytes_moved).sum::<u64>(), prediction.plan.bytes_moved());
        assert_eq!(costs.map(|c| c.transfers).sum::<u64>(), prediction.plan.transfers().len() as u64);
    }

    #[test]
    fn what_takes_longest_is_shown_wherever_it_stands() {
        let row = |name: &str, end_s: f64| TensorRow {
            name: name.into(),
            src: String::new(),
            dst: String::new(),
            bytes: 1,
            bytes_moved: 1,
            transfers: 1,
            start_s: 0.0,
            end_s,
            share_of_busiest_link: 0.0,
        };
        let names = |rows: &[TensorRow]| shown(rows, 2).iter().map(|r| r.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&[row("a", 1.0), row("b", 1.0), row("c", 1.0), row("d", 2.0)]), ["a", "b", "d"]);
        assert_eq!(names(&[row("a", 1.0), row("b", 3.0), row("c", 1.0)]), ["a", "b"]);
        assert_eq!(names(&[row("a", 0.0)]), ["a"]);
    }
}
