//! The report of a suite: a table, and for every case a bar per strategy over the bound.

use std::fmt::Write as _;

use crossmesh_core::units::{Bytes, Seconds};

use crate::commands::bench::{CaseResult, Results, StrategyResult};
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
    body += "<h2>Predicted time</h2>\n<p class=\"note\">Seconds, and how many times the lower bound. The fastest of a \
             row is bold.</p>\n<div class=\"panel\">\n";
    body += &table(results);
    body += "</div>\n<h2>Over the bound</h2>\n<p class=\"note\">A bar per strategy, in multiples of the case's lower \
             bound (the dashed line, 1 ×). Shorter is better; bars beyond 8 × are cut.</p>\n<div class=\"bars\">\n";
    for case in &results.cases {
        body += &bars(case);
    }
    body += "</div>\n";
    let mut footer = provenance;
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
    if let Some((name, over)) = furthest(results) {
        cards += &card(&format!("{over:.1} ×"), &format!("of the bound: the furthest, {name}"), "");
    }
    format!("<div class=\"cards\">\n{cards}</div>\n")
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
    let over = s.over_bound.map_or(String::new(), |o| format!("<span class=\"over\">×{o:.2}</span>"));
    format!("<td class=\"{class}\">{}{over}</td>", Seconds(seconds))
}

fn bars(case: &CaseResult) -> String {
    let reach = case.strategies.iter().filter_map(|s| s.over_bound).fold(1.0, f64::max).min(CLIP) * 1.02;
    let x = |over: f64| LEFT + WIDTH * (over.min(reach) / reach);
    let (top, height) = (26.0, 30.0 + BAR * case.strategies.len() as f64);
    let width = LEFT + WIDTH + 60.0;
    let mut svg = format!(
        "<svg width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{}\">\n",
        escape(&case.name)
    );
    for (i, s) in case.strategies.iter().enumerate() {
        let y = top + BAR * i as f64;
        let text_y = y + BAR - 5.0;
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{text_y}\" text-anchor=\"end\">{}</text>",
            LEFT - 8.0,
            s.strategy
        );
        let Some(over) = s.over_bound else {
            let _ = writeln!(svg, "<text class=\"soft\" x=\"{}\" y=\"{text_y}\">no plan</text>", LEFT + 4.0);
            continue;
        };
        let class = if s.strategy == "flow" { "ours" } else { "bar" };
        let _ = writeln!(
            svg,
            "<rect class=\"{class}\" x=\"{LEFT}\" y=\"{}\" width=\"{:.1}\" height=\"{}\" rx=\"2\"/>",
            y + 2.0,
            x(over) - LEFT,
            BAR - 4.0
        );
        if over > reach {
            let _ = writeln!(
                svg,
                "<path class=\"clip\" d=\"M{:.1} {y}l-5 {BAR}m4 0l5 -{BAR}\"/>",
                x(over) - 12.0
            );
        }
        let _ =
            writeln!(svg, "<text class=\"soft\" x=\"{:.1}\" y=\"{text_y}\">×{over:.2}</text>", x(over) + 6.0);
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
        Results { schema: "crossmesh.bench/1", suite, about, seed: 0, cases: vec![case], worst_flow }
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
}
