//! The critical path of a plan as reports show it: who keeps whom waiting, from the start of the run to its end.
//!
//! Messages from one device to another that follow each other on the path are one row, so a lane of thousands reads as one line.

use crossmesh_core::critical_path::critical_path;
use crossmesh_core::id::Rank;
use crossmesh_core::units::{Bytes, Seconds};
use serde::Serialize;

use crate::output::{Table, count};
use crate::predict::Prediction;

/// So many of the longest rows are shown.
const SHOWN: usize = 6;

/// Messages from one device to another, and the stretch of time they are the reason for. Without a receiver: what a device did by
/// itself.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PathRow {
    pub start_s: f64,
    pub end_s: f64,
    pub src: Rank,
    pub dst: Option<Rank>,
    pub messages: usize,
    pub bytes: u64,
    /// Whether they pass NICs.
    pub network: bool,
}

impl PathRow {
    pub fn way(&self) -> String {
        self.dst.map_or_else(|| self.src.to_string(), |dst| format!("{} -> {dst}", self.src))
    }

    pub fn what(&self) -> String {
        let kind = if self.network { "nic" } else { "local" };
        format!("{}, {}, {kind}", count(self.messages, "message"), Bytes(self.bytes))
    }

    fn seconds(&self) -> f64 {
        self.end_s - self.start_s
    }
}

/// All rows in order of time.
pub fn rows(prediction: &Prediction) -> Vec<PathRow> {
    let topology = &prediction.plan.problem.topology;
    let mut rows: Vec<PathRow> = vec![];
    for leg in critical_path(&prediction.program, &prediction.trace) {
        let (src, dst) = (leg.op.rank, leg.to);
        let bytes = prediction.program.ranks[src.index()].ops[leg.op.op as usize].bytes;
        match rows.last_mut() {
            Some(row) if (row.src, row.dst) == (src, dst) => {
                row.end_s = leg.end_s;
                row.messages += 1;
                row.bytes += bytes;
            }
            _ => rows.push(PathRow {
                start_s: leg.start_s,
                end_s: leg.end_s,
                src,
                dst,
                messages: 1,
                bytes,
                network: dst.is_some_and(|dst| !topology.same_host(src, dst)),
            }),
        }
    }
    rows
}

/// The longest rows in order of time, and how many others there are with how much time.
pub fn longest(rows: &[PathRow]) -> (Vec<&PathRow>, Option<String>) {
    let mut shown: Vec<&PathRow> = rows.iter().collect();
    shown.sort_by(|a, b| b.seconds().total_cmp(&a.seconds()));
    let rest: f64 = shown.iter().skip(SHOWN).map(|row| row.seconds()).sum();
    let others = rows.len().saturating_sub(SHOWN);
    shown.truncate(SHOWN);
    shown.sort_by(|a, b| a.start_s.total_cmp(&b.start_s));
    (shown, (others > 0).then(|| format!("and {}, {} in all", count(others, "shorter part"), Seconds(rest))))
}

/// As lines of text; nothing where nothing moves.
pub fn render(prediction: &Prediction) -> String {
    let rows = rows(prediction);
    if rows.is_empty() {
        return String::new();
    }
    let (shown, others) = longest(&rows);
    let mut table = Table::new("rrl");
    table.row(["from", "to", "way", "what"]);
    for row in shown {
        let (start, end) = (Seconds(row.start_s).to_string(), Seconds(row.end_s).to_string());
        table.row([start, end, row.way(), row.what()]);
    }
    let others = others.map_or(String::new(), |line| format!("  {line}\n"));
    format!("critical path\n{}{others}", table.render(2))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossmesh_core::reshard::problem::Hosts;
    use crossmesh_core::reshard::{PlanOptions, Problem, Strategy};

    fn predicted(src: &str, dst: &str, strategy: Strategy) -> Prediction {
        let pair = (String::new(), src.parse().unwrap(), dst.parse().unwrap());
        let problem = Problem::new(vec![pair], Hosts::default()).unwrap();
        Prediction::of_problem(&problem, &PlanOptions { strategy, ..Default::default() }).unwrap()
    }

    #[test]
    fn a_row_a_way_and_all_of_the_time() {
        let prediction = predicted("u8[900000]@A{x:1}(_)", "u8[900000]@B{x:12}(_)", Strategy::SendRecv);
        let rows = rows(&prediction);
        assert_eq!(rows.len(), 12, "{rows:?}");
        assert_eq!((rows[0].start_s, rows[11].end_s), (0.0, prediction.seconds()));
        assert!(rows.iter().all(|row| row.bytes == 900_000 && row.network));
        let text = render(&prediction);
        assert_eq!(text.matches(" -> ").count(), SHOWN, "{text}");
        assert!(text.contains("and 6 shorter parts"), "{text}");
    }

    #[test]
    fn what_does_not_move_has_no_path() {
        assert_eq!(render(&predicted("u8[8]@A{x:2}(x)", "u8[8]@A{x:2}(x)", Strategy::Flow)), "");
    }
}
