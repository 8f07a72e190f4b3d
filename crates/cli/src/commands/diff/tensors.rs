//! Of plans for many: what each tensor costs in one and in the other.

use std::collections::BTreeMap;

use crossmesh_core::reshard::Plan;
use crossmesh_core::reshard::lower::Addressing;
use crossmesh_core::sim::simulate;
use crossmesh_core::units::{Bytes, Seconds};
use crossmesh_core::verify::Verified;
use serde::Serialize;

use crate::output::{Table, and_more};
use crate::tensors::{TensorRow, in_order, name_of};

/// A tensor that costs something else; nothing, where it is in one plan alone.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TensorChange {
    pub name: String,
    pub a_bytes: u64,
    pub b_bytes: u64,
    pub a_transfers: usize,
    pub b_transfers: usize,
    /// From its first byte's start to its last one's arrival; missing of a plan that breaks a law, and so takes no time.
    pub a_s: Option<f64>,
    pub b_s: Option<f64>,
}

/// All that differ: the largest difference in time first, then in bytes. Of one tensor the whole plan says it.
pub fn changes(a: &Plan, b: &Plan) -> Vec<TensorChange> {
    if a.problem.reshards.len().max(b.problem.reshards.len()) < 2 {
        return vec![];
    }
    let (a, b) = (costs(a), costs(b));
    let names = a.keys().chain(b.keys().filter(|name| !a.contains_key(*name)));
    let none = Cost::default();
    let mut changes: Vec<TensorChange> = names
        .filter_map(|name| {
            let (a, b) = (a.get(name).unwrap_or(&none), b.get(name).unwrap_or(&none));
            a.differs(b).then(|| TensorChange {
                name: name.clone(),
                a_bytes: a.bytes,
                b_bytes: b.bytes,
                a_transfers: a.transfers,
                b_transfers: b.transfers,
                a_s: a.seconds,
                b_s: b.seconds,
            })
        })
        .collect();
    let seconds = |c: &TensorChange| c.a_s.zip(c.b_s).map_or(0.0, |(a, b)| (a - b).abs());
    changes.sort_by(|x, y| {
        let bytes = |c: &TensorChange| c.a_bytes.abs_diff(c.b_bytes);
        seconds(y).total_cmp(&seconds(x)).then(bytes(y).cmp(&bytes(x)))
    });
    changes
}

/// What one tensor costs in one plan.
#[derive(Default)]
struct Cost {
    bytes: u64,
    transfers: usize,
    seconds: Option<f64>,
}

impl Cost {
    /// Whether it would be seen: times are told to three digits.
    fn differs(&self, other: &Cost) -> bool {
        let said = |cost: &Cost| cost.seconds.map(|s| Seconds(s).to_string());
        (self.bytes, self.transfers) != (other.bytes, other.transfers) || said(self) != said(other)
    }
}

/// By name; a tensor without one has its number.
fn costs(plan: &Plan) -> BTreeMap<String, Cost> {
    let mut costs: BTreeMap<String, Cost> = BTreeMap::new();
    for tensor in 0..plan.problem.reshards.len() {
        costs.insert(name_of(plan, tensor), Cost::default());
    }
    for t in plan.transfers() {
        let cost = costs.entry(name_of(plan, t.tensor as usize)).or_default();
        cost.transfers += 1;
        cost.bytes += t.bytes;
    }
    for (tensor, row) in timed(plan).into_iter().flatten().enumerate() {
        let seconds = (row.transfers > 0).then_some(row.seconds());
        costs.entry(name_of(plan, tensor)).or_default().seconds = seconds;
    }
    costs
}

/// When its tensors are under way, in the plan's order, if it is lawful.
fn timed(plan: &Plan) -> Option<Vec<TensorRow>> {
    let program = Verified::plan(plan, Addressing::Apart).ok()?;
    let trace = simulate(&program, &plan.problem.cluster).ok()?;
    Some(in_order(plan, &program, &trace).0)
}

/// A table, or nothing where no tensor changed.
pub fn render(changes: &[TensorChange], shown: usize) -> String {
    if changes.is_empty() {
        return String::new();
    }
    let mut table = Table::new("lr");
    table.row(["name", "bytes moved", "", "transfers", "", "under way", ""]);
    let pair = |a: String, b: String| if a == b { [a, String::new()] } else { [a, format!("-> {b}")] };
    let seconds = |s: Option<f64>| s.map_or("-".into(), |s| Seconds(s).to_string());
    for c in changes.iter().take(shown) {
        let cells = [
            pair(Bytes(c.a_bytes).to_string(), Bytes(c.b_bytes).to_string()),
            pair(c.a_transfers.to_string(), c.b_transfers.to_string()),
            pair(seconds(c.a_s), seconds(c.b_s)),
        ];
        table.row(std::iter::once(c.name.clone()).chain(cells.into_iter().flatten()));
    }
    format!("tensors\n{}{}", table.render(2), and_more(changes.len(), shown, "tensor"))
}
