//! The measured side of a bench: real runs, with the prediction and the bound beside them.

use std::fmt::Write as _;

use anyhow::Result;
use crossmesh_core::reshard::Strategy;
use crossmesh_core::units::{Bytes, Seconds};

use super::{CaseResult, MeasuredTimes, Results, StrategyResult};
use crate::machine;
use crate::output::{self, Progress, Table, count};
use crate::predict::Prediction;
use crate::runner::{RunOptions, median, run_plan};

/// A tensor of this size takes about a second over a slow NIC, and fits on a small machine several times.
pub const TENSOR_BYTES: u64 = 64 << 20;
/// The median of five.
pub const REPEAT: u32 = 5;

pub fn measure(prediction: &Prediction, run: &RunOptions, progress: &Progress) -> Result<MeasuredTimes> {
    let measured = run_plan(prediction, run, progress)?;
    let verified = measured.verified();
    Ok(times(prediction, measured.seconds, verified, run.emulate))
}

/// What runs of a prediction took; beside what it says, where its NICs were there.
pub fn times(prediction: &Prediction, seconds: Vec<f64>, verified: bool, emulated: bool) -> MeasuredTimes {
    let median_s = median(&seconds);
    let comparable = machine::comparable(&prediction.plan.problem.cluster, emulated);
    let over =
        |what: f64| Some(output::ratio(median_s, what)).filter(|ratio| comparable && ratio.is_finite());
    MeasuredTimes {
        median_s,
        over_bound: over(prediction.bound.seconds),
        over_predicted: over(prediction.seconds()),
        verified,
        measured_s: seconds,
    }
}

pub fn all_verified(results: &Results) -> bool {
    all(results).all(|(_, _, measured)| measured.verified)
}

/// Everything that was measured.
fn all(results: &Results) -> impl Iterator<Item = (&CaseResult, &StrategyResult, &MeasuredTimes)> {
    let strategies = results.cases.iter().flat_map(|case| case.strategies.iter().map(move |s| (case, s)));
    strategies.filter_map(|(case, s)| Some((case, s, s.measured.as_ref()?)))
}

pub fn render(results: &Results) -> String {
    let mut text = format!("suite {}: {}\n\n", results.suite, results.about);
    if let Some(machine) = &results.machine {
        let compared = is_compared(results);
        let _ = writeln!(text, "{}", machine::whose(machine, None, compared));
    }
    text += &table(results).render(2);
    text += &super::why_not(results);
    text.push('\n');
    if !all_verified(results) {
        text += "some destinations are wrong\n";
    }
    let flow = || all(results).filter(|(_, s, _)| s.strategy == Strategy::Flow.name());
    let worst = |ratio: fn(&MeasuredTimes) -> Option<f64>| {
        let ratios = flow().filter_map(|(case, _, m)| Some((case.name.as_str(), ratio(m)?)));
        ratios.max_by(|a, b| a.1.total_cmp(&b.1))
    };
    if let (Some(bound), Some(predicted)) = (worst(|m| m.over_bound), worst(|m| m.over_predicted)) {
        let _ = writeln!(
            text,
            "flow over {}: at most {:.3} × the bound ({}), {:.3} × predicted ({})",
            count(flow().count(), "case"),
            bound.1,
            bound.0,
            predicted.1,
            predicted.0,
        );
    }
    text
}

/// Whether any time is held against a prediction.
fn is_compared(results: &Results) -> bool {
    all(results).any(|(_, _, measured)| measured.over_predicted.is_some())
}

fn table(results: &Results) -> Table {
    let compared = is_compared(results);
    let mut table = Table::new("llr");
    let mut head = vec!["case", "strategy", "bytes", "bound", "predicted", "measured"];
    head.extend(["× bound", "× predicted"].iter().filter(|_| compared));
    head.push("elements");
    table.row(head);
    for (case, s, measured) in all(results) {
        let ratio = |ratio: Option<f64>| ratio.map_or("-".into(), |r| format!("{r:.3}"));
        let mut row = vec![
            case.name.clone(),
            s.strategy.to_string(),
            Bytes(case.bytes).to_string(),
            Seconds(case.lower_bound_s).to_string(),
            s.predicted_s.map_or("-".into(), |s| Seconds(s).to_string()),
            Seconds(measured.median_s).to_string(),
        ];
        if compared {
            row.extend([measured.over_bound, measured.over_predicted].map(ratio));
        }
        row.push(if measured.verified { "right" } else { "WRONG" }.to_string());
        table.row(row);
    }
    table
}
