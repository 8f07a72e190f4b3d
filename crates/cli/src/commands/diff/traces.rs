//! What differs between two traces of one program: a prediction and a measurement, or two of either.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crossmesh_core::units::Seconds;
use serde::Serialize;

use crate::output::{Table, and_more, count};
use crate::trace_doc::{OpDoc, TraceDoc};

/// More ops than this are counted, not shown.
const SHOWN: usize = 20;

/// The differences; empty lists where there are none.
#[derive(Debug, PartialEq, Serialize)]
pub struct Difference {
    schema: &'static str,
    pub same: bool,
    a: Side,
    b: Side,
    /// Of the longer of the two runs: what times may differ by and still count as the same.
    within: f64,
    /// By how much the clocks of two ranks may differ in either; missing where it is not known of one.
    clock_error_s: Option<f64>,
    /// Ops that start or end at another time, those that differ most first.
    moved: Vec<Moved>,
    /// Ops that only one of them has.
    removed: Vec<String>,
    added: Vec<String>,
}

#[derive(Debug, PartialEq, Serialize)]
struct Side {
    source: &'static str,
    strategy: String,
    makespan_s: f64,
}

/// An op at two times.
#[derive(Debug, PartialEq, Serialize)]
struct Moved {
    rank: u32,
    op: u32,
    what: String,
    a_start_s: f64,
    a_end_s: f64,
    b_start_s: f64,
    b_end_s: f64,
}

impl Moved {
    fn by_s(&self) -> f64 {
        (self.a_start_s - self.b_start_s).abs().max((self.a_end_s - self.b_end_s).abs())
    }
}

/// By rank, place, words and bytes.
type Ops = BTreeMap<(u32, u32, String, u64), OpDoc>;

pub fn compare(a: &TraceDoc, b: &TraceDoc, within: f64) -> Difference {
    let key = |op: &OpDoc| (op.rank, op.op, op.what.clone(), op.bytes);
    let of = |doc: &TraceDoc| doc.ops.iter().map(|op| (key(op), op.clone())).collect::<Ops>();
    let (of_a, of_b) = (of(a), of(b));
    let names = |has: &Ops, not: &Ops| {
        let only = has.iter().filter(|(key, _)| !not.contains_key(*key));
        only.map(|(_, op)| format!("r{} op {}  {}", op.rank, op.op, op.what)).collect::<Vec<_>>()
    };
    let allowed_s = within * a.makespan_s.max(b.makespan_s);
    let moved = |(key, x): (&_, &OpDoc)| {
        let y = of_b.get(key)?;
        let moved = Moved {
            rank: x.rank,
            op: x.op,
            what: x.what.clone(),
            a_start_s: x.start_s,
            a_end_s: x.end_s,
            b_start_s: y.start_s,
            b_end_s: y.end_s,
        };
        (moved.by_s() > allowed_s).then_some(moved)
    };
    let mut moved: Vec<Moved> = of_a.iter().filter_map(moved).collect();
    moved.sort_by(|x, y| y.by_s().total_cmp(&x.by_s()).then((x.rank, x.op).cmp(&(y.rank, y.op))));
    let (removed, added) = (names(&of_a, &of_b), names(&of_b, &of_a));
    let length = (a.makespan_s - b.makespan_s).abs() <= allowed_s;
    let side = |doc: &TraceDoc| Side {
        source: doc.source.name(),
        strategy: doc.strategy.clone(),
        makespan_s: doc.makespan_s,
    };
    Difference {
        schema: "crossmesh.trace-diff/1",
        same: length && moved.is_empty() && removed.is_empty() && added.is_empty(),
        a: side(a),
        b: side(b),
        within,
        clock_error_s: a.clock_error_s.zip(b.clock_error_s).map(|(a, b)| a.max(b)),
        moved,
        removed,
        added,
    }
}

pub fn render(difference: &Difference) -> String {
    let (a, b) = (&difference.a, &difference.b);
    let mut table = Table::new("l");
    table.row(["", a.source, "->", b.source]);
    if a.strategy != b.strategy {
        table.row(["strategy", a.strategy.as_str(), "->", b.strategy.as_str()]);
    }
    let over = match a.makespan_s > 0.0 {
        true => format!("{:.3} ×", b.makespan_s / a.makespan_s),
        false => String::new(),
    };
    let seconds = |s: f64| Seconds(s).to_string();
    table.row(["all of it", &seconds(a.makespan_s), "->", &seconds(b.makespan_s), &over]);
    let span = |start, end| format!("{} to {}", Seconds(start), Seconds(end));
    for op in difference.moved.iter().take(SHOWN) {
        let name = format!("r{} {}", op.rank, op.what);
        let by = format!("by {}", Seconds(op.by_s()));
        table.row([
            name.as_str(),
            &span(op.a_start_s, op.a_end_s),
            "->",
            &span(op.b_start_s, op.b_end_s),
            &by,
        ]);
    }
    let mut text = table.render(0);
    text += &and_more(difference.moved.len(), SHOWN, "op");
    for (sign, lines) in [("-", &difference.removed), ("+", &difference.added)] {
        for line in lines.iter().take(SHOWN) {
            let _ = writeln!(text, "{sign} {line}");
        }
        text += &and_more(lines.len(), SHOWN, "op");
    }
    text += &match difference.clock_error_s {
        None => "the clocks of the ranks were not compared: times of two ranks say little\n".to_string(),
        Some(error) if error > 0.0 => format!("the clocks of two ranks agree to {}\n", Seconds(error)),
        Some(_) => String::new(),
    };
    let within = match difference.within {
        0.0 => String::new(),
        share => format!(" by more than {} %", share * 100.0),
    };
    text += &match difference.same {
        true => format!("the traces do not differ{within}\n"),
        false => {
            format!("the traces differ: {} at another time{within}\n", count(difference.moved.len(), "op"))
        }
    };
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace_doc::Source;

    fn doc(source: Source, ops: &[(u32, f64, f64)]) -> TraceDoc {
        let op = |&(op, start_s, end_s): &(u32, f64, f64)| OpDoc {
            rank: 1,
            op,
            what: format!("send t{op} to r2"),
            bytes: 8,
            start_s,
            end_s,
        };
        TraceDoc {
            schema: crate::trace_doc::SCHEMA.into(),
            source,
            strategy: "flow".into(),
            makespan_s: ops.iter().map(|o| o.2).fold(0.0, f64::max),
            clock_error_s: Some(if source == Source::Measured { 4e-5 } else { 0.0 }),
            ops: ops.iter().map(op).collect(),
        }
    }

    #[test]
    fn ops_that_run_at_another_time_are_shown_by_how_much() {
        let predicted = doc(Source::Predicted, &[(0, 0.0, 1.0), (1, 1.0, 2.0)]);
        let measured = doc(Source::Measured, &[(0, 0.0, 1.01), (1, 1.5, 2.2)]);
        let difference = compare(&predicted, &measured, 0.05);
        let text = render(&difference);
        let lines: Vec<String> =
            text.lines().map(|l| l.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(
            lines,
            [
                "predicted -> measured",
                "all of it 2.00 s -> 2.20 s 1.100 ×",
                "r1 send t1 to r2 1.00 s to 2.00 s -> 1.50 s to 2.20 s by 500 ms",
                "the clocks of two ranks agree to 40.0 us",
                "the traces differ: 1 op at another time by more than 5 %",
            ]
        );
        assert!(compare(&predicted, &measured, 0.5).same);
        assert!(compare(&predicted, &predicted, 0.0).same);
    }

    #[test]
    fn ops_of_one_trace_only_are_listed() {
        let (a, b) = (doc(Source::Predicted, &[(0, 0.0, 1.0)]), doc(Source::Predicted, &[(7, 0.0, 1.0)]));
        let difference = compare(&a, &b, 0.0);
        assert_eq!(difference.removed, ["r1 op 0  send t0 to r2"]);
        assert_eq!(difference.added, ["r1 op 7  send t7 to r2"]);
    }
}
