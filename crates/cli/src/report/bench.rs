//! The report of a suite: a table, and for every case a bar per strategy over the bound.

use std::fmt::Write as _;

use crossmesh_core::units::{Bytes, Seconds};

use crate::commands::bench::{CaseResult, MeasuredTimes, Results, StrategyResult};
use crate::machine;
use crate::output::count;

use super::{Page, card, escape};

const LEFT: f64 = 130.0;
const WIDTH: f64 = 310.0;
const BAR: f64 = 17.0;
/// Bars longer than this many bounds are cut off, and say so.
const CLIP: f64 = 8.0;

/// The page. `provenance` is the footer: command and version.
pub fn render(results: &Results, provenance: Vec<String>) -> String {
    let mut body = figures(results);
    let (head, below) = match measured(results).next().is_some() {
        true => ("Predicted and measured time", " Below it what was measured: the median of all runs."),
        false => ("Predicted time", ""),
    };
    let compared = measured(results).any(|(_, _, times)| times.over_predicted.is_some());
    let whose = results
        .machine
        .as_ref()
        .map_or(String::new(), |machine| format!(" {}.", escape(&machine::whose(machine, None, compared))));
    let _ = write!(
        body,
        "<h2>{head}</h2>\n<p class=\"note\">Seconds, and how many times the lower bound. The fastest prediction of a row is \
         bold.{below}{whose}</p>\n<div class=\"panel\">\n"
    );
    body += &table(results);
    body += "</div>\n<h2>Over the bound</h2>\n<p class=\"note\">A bar per strategy, in multiples of the case's lower \
             bound (the dashed line, 1 ×). Shorter is better; bars beyond 8 × are cut.</p>\n<div class=\"bars\">\n";
    for case in &results.cases {
        body += &bars(case);
    }
    body += "</div>\n";
    let mut footer = provenance;
    footer.extend(results.machine.as_ref().map(|machine| format!("measured on {machine}")));
    footer.push(format!("suite {}, seed {}", results.suite, results.seed));
    Page {
        title: format!("Reshard strategies, suite {}", results.suite),
        subtitle: escape(&results.about),
        body,
        data: serde_json::to_value(results).unwrap_or_default(),
        footer,
    }
    .render()
}

fn figures(results: &Results) -> String {
    let mut cards = card(&results.cases.len().to_string(), "cases", "");
    if let Some(worst) = &results.worst_flow {
        let near = if worst.over_bound <= 1.02 { "good" } else { "" };
        cards += &card(
            &format!("{:.3} ×", worst.over_bound),
            &format!("of the bound: flow's worst, {}", worst.case),
            near,
        );
    }
    let flow = measured(results).filter(|(_, s, _)| s.strategy == "flow");
    let worst = flow.filter_map(|(case, _, m)| Some((case, m.over_bound?, m.over_predicted?)));
    if let Some((case, over, of_predicted)) = worst.max_by(|a, b| a.1.total_cmp(&b.1)) {
        let near = if over <= 1.1 { "good" } else { "" };
        let what =
            format!("of the bound, measured: flow's worst, {}; {of_predicted:.3} × predicted", case.name);
        cards += &card(&format!("{over:.3} ×"), &what, near);
    }
    if let Some((name, over)) = furthest(results) {
        cards += &card(&format!("{over:.1} ×"), &format!("of the bound: the furthest, {name}"), "");
    }
    format!("<div class=\"cards\">\n{cards}</div>\n")
}

/// Everything that was run.
fn measured(results: &Results) -> impl Iterator<Item = (&CaseResult, &StrategyResult, &MeasuredTimes)> {
    let all = results.cases.iter().flat_map(|case| case.strategies.iter().map(move |s| (case, s)));
    all.filter_map(|(case, s)| Some((case, s, s.measured.as_ref()?)))
}

/// The strategy and case furthest from the bound.
fn furthest(results: &Results) -> Option<(String, f64)> {
    let all = results.cases.iter().flat_map(|case| {
        case.strategies
            .iter()
            .filter_map(move |s| Some((format!("{} in {}", s.strategy, case.name), s.over_bound?)))
    });
    all.max_by(|a, b| a.1.total_cmp(&b.1))
}

fn table(results: &Results) -> String {
    let mut html = String::from(
        "<table class=\"tight\">\n<tr><th>case</th><th class=\"num\">bytes</th><th class=\"num\">bound</th>",
    );
    for s in results.cases.first().map_or(&[][..], |c| &c.strategies) {
        let _ = write!(html, "<th class=\"num\">{}</th>", s.strategy.replace("broadcast:", "bc:"));
    }
    html += "</tr>\n";
    for case in &results.cases {
        let _ = write!(
            html,
            "<tr><td title=\"{}\">{}</td><td class=\"num\">{}</td><td class=\"num\">{}</td>",
            escape(&case.about),
            escape(&case.name),
            Bytes(case.bytes),
            Seconds(case.lower_bound_s)
        );
        let best = case.strategies.iter().filter_map(|s| s.predicted_s).fold(f64::INFINITY, f64::min);
        for s in &case.strategies {
            html += &cell(s, best);
        }
        html += "</tr>\n";
    }
    html + "</table>\n"
}

fn cell(s: &StrategyResult, best: f64) -> String {
    let Some(seconds) = s.predicted_s else {
        let why = s.why_not.as_deref().unwrap_or("");
        return format!("<td class=\"num\" title=\"{}\">–</td>", escape(why));
    };
    let class = if seconds <= best * 1.0005 { "num best" } else { "num" };
    let over =
        |over: Option<f64>| over.map_or(String::new(), |o| format!("<span class=\"over\">×{o:.2}</span>"));
    let measured = s.measured.as_ref().map_or(String::new(), |m| {
        let (time, wrong) = (Seconds(m.median_s), if m.verified { "" } else { " WRONG" });
        format!("<br><span class=\"plain\">{time}{}{wrong}</span>", over(m.over_bound))
    });
    format!("<td class=\"{class}\">{}{}{measured}</td>", Seconds(seconds), over(s.over_bound))
}

/// One bar: what it says, how long it is in bounds, how it looks.
struct Bar<'a> {
    strategy: &'a str,
    over_bound: Option<f64>,
    class: &'a str,
    word: &'a str,
}

/// A bar per strategy; where it was run, the measured one below the predicted.
fn bars_of(case: &CaseResult) -> Vec<Bar<'_>> {
    let bars = case.strategies.iter().flat_map(|s| {
        let ours = s.strategy == "flow";
        let (plain, faint) = if ours { ("ours", "ours faint") } else { ("bar", "bar faint") };
        // A time that is compared with no bound has no place on its scale.
        let compared = s.measured.as_ref().filter(|m| m.over_bound.is_some());
        let (class, word) = if compared.is_some() { (faint, " predicted") } else { (plain, "") };
        let predicted = Bar { strategy: s.strategy, over_bound: s.over_bound, class, word };
        let measured = compared.map(|m| {
            let word = if m.verified { " measured" } else { " measured, and WRONG" };
            Bar { strategy: "", over_bound: m.over_bound, class: plain, word }
        });
        std::iter::once(predicted).chain(measured)
    });
    bars.collect()
}

fn bars(case: &CaseResult) -> String {
    let all = bars_of(case);
    let reach = all.iter().filter_map(|bar| bar.over_bound).fold(1.0, f64::max).min(CLIP) * 1.02;
    // Words behind the bars take their room from them.
    let words = if all.iter().any(|bar| !bar.word.is_empty()) { 70.0 } else { 0.0 };
    let x = |over: f64| LEFT + (WIDTH - words) * (over.min(reach) / reach);
    let (top, height) = (26.0, 30.0 + BAR * all.len() as f64);
    let width = LEFT + WIDTH + 60.0;
    let mut svg = format!(
        "<svg width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{}\">\n",
        escape(&case.name)
    );
    for (i, bar) in all.iter().enumerate() {
        svg += &draw(bar, top + BAR * i as f64, reach, &x);
    }
    let (x1, bottom) = (x(1.0), height - 2.0);
    let _ = writeln!(
        svg,
        "<line class=\"boundline\" x1=\"{x1:.1}\" x2=\"{x1:.1}\" y1=\"{}\" y2=\"{bottom}\"/>\n\
         <text class=\"bound\" x=\"{x1:.1}\" y=\"14\" text-anchor=\"middle\">{}</text>\n</svg>",
        top - 6.0,
        Seconds(case.lower_bound_s)
    );
    let what = format!("{}, {}", Bytes(case.bytes), count(case.hosts, "host"));
    format!(
        "<div class=\"panel\"><h3>{} <span class=\"over\">{what}</span></h3>\n{svg}</div>\n",
        escape(&case.name)
    )
}

fn draw(bar: &Bar<'_>, y: f64, reach: f64, x: &impl Fn(f64) -> f64) -> String {
    let text_y = y + BAR - 5.0;
    let name_x = LEFT - 8.0;
    let mut svg =
        format!("<text x=\"{name_x}\" y=\"{text_y}\" text-anchor=\"end\">{}</text>\n", bar.strategy);
    let Some(over) = bar.over_bound else {
        let _ = writeln!(svg, "<text class=\"soft\" x=\"{}\" y=\"{text_y}\">no plan</text>", LEFT + 4.0);
        return svg;
    };
    let _ = writeln!(
        svg,
        "<rect class=\"{}\" x=\"{LEFT}\" y=\"{}\" width=\"{:.1}\" height=\"{}\" rx=\"2\"/>",
        bar.class,
        y + 2.0,
        x(over) - LEFT,
        BAR - 4.0
    );
    if over > reach {
        let clip_x = x(over) - 12.0;
        let _ = writeln!(svg, "<path class=\"clip\" d=\"M{clip_x:.1} {y}l-5 {BAR}m4 0l5 -{BAR}\"/>");
    }
    let (at, word) = (x(over) + 6.0, bar.word);
    let _ = writeln!(svg, "<text class=\"soft\" x=\"{at:.1}\" y=\"{text_y}\">×{over:.2}{word}</text>");
    svg
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::bench::Worst;

    fn strategy(strategy: &'static str, over_bound: Option<f64>) -> StrategyResult {
        StrategyResult {
            strategy,
            predicted_s: over_bound.map(|o| o * 0.5),
            over_bound,
            peak_extra_bytes: Some(0),
            t: None,
            reference_t: None,
            measured: None,
            why_not: over_bound.is_none().then(|| "cannot".to_string()),
        }
    }

    fn results() -> Results {
        let case = CaseResult {
            name: "a <case>".into(),
            about: String::new(),
            bytes: 1024,
            devices: 4,
            hosts: 2,
            lower_bound_s: 0.5,
            bound_reason: String::new(),
            strategies: vec![
                strategy("sendrecv", Some(15.0)),
                strategy("allgather", None),
                strategy("flow", Some(1.0)),
            ],
        };
        let worst_flow = Some(Worst { case: "a <case>".into(), over_bound: 1.0 });
        let (suite, about) = ("mine".into(), String::new());
        Results {
            schema: "crossmesh.bench/1",
            suite,
            about,
            seed: 0,
            machine: None,
            cases: vec![case],
            worst_flow,
        }
    }

    #[test]
    fn a_bar_a_strategy_and_the_bound_as_a_line() {
        let html = render(&results(), vec![]);
        assert_eq!(html.matches("class=\"bar\"").count(), 1);
        assert_eq!(html.matches("class=\"ours\"").count(), 1);
        assert_eq!(html.matches("class=\"boundline\"").count(), 1);
        assert_eq!(html.matches("class=\"clip\"").count(), 1, "15 times the bound is cut");
        assert!(html.contains("no plan") && html.contains("title=\"cannot\""));
        assert!(html.contains("a &lt;case&gt;") && !html.contains("<case>"));
    }

    #[test]
    fn what_was_measured_is_below_what_was_predicted() {
        let mut results = results();
        let times = |verified| MeasuredTimes {
            measured_s: vec![0.6],
            median_s: 0.6,
            over_bound: Some(1.2),
            over_predicted: Some(1.15),
            verified,
        };
        results.cases[0].strategies[2].measured = Some(times(true));
        let html = render(&results, vec![]);
        let (predicted, measured) = (html.find("×1.00 predicted"), html.find("×1.20 measured"));
        assert!(predicted.is_some() && predicted < measured, "{predicted:?} {measured:?}");
        assert_eq!(html.matches("class=\"ours faint\"").count(), 1);
        assert_eq!(html.matches("class=\"ours\"").count(), 1);
        assert!(html.contains("1.200 ×") && html.contains("1.150 × predicted"));
        assert!(!html.contains("WRONG"));
        results.cases[0].strategies[2].measured = Some(times(false));
        assert!(render(&results, vec![]).contains("WRONG"));
    }

    #[test]
    fn loopback_is_not_compared_with_nics_that_were_not_there() {
        let mut results = results();
        results.machine = Some("a machine".into());
        results.cases[0].strategies[2].measured = Some(MeasuredTimes {
            measured_s: vec![0.015],
            median_s: 0.015,
            over_bound: None,
            over_predicted: None,
            verified: true,
        });
        let html = render(&results, vec![]);
        assert!(html.contains("measured on a machine; the NICs of the prediction are others"));
        assert!(html.contains("15.0 ms") && !html.contains("0.030"), "the time is there, no ratio");
        assert_eq!(html.matches("class=\"ours\"").count(), 1, "a bar of the prediction alone");
        assert!(!html.contains("×0.03") && !html.contains(" measured</text>"));
    }
}
