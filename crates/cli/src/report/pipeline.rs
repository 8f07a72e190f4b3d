//! The report of whole training steps: a bar per series, and a timeline each.

use std::fmt::Write as _;

use crossmesh_core::units::Seconds;

use crate::commands::bench::pipeline::{Bar, CaseResult, Results, SeriesResult, Timeline};

use super::{Page, card, escape, ticks};

const LEFT: f64 = 120.0;
const WIDTH: f64 = 860.0;
const BAR: f64 = 17.0;
const ROW: f64 = 16.0;
const LANE: f64 = 12.0;

/// The page. `provenance` is the footer: command and version.
pub fn render(results: &Results, provenance: Vec<String>) -> String {
    let mut body = String::from(
        "<p class=\"note\">Compute is virtual: every pass is a timed wait of a stated length. Where times are measured, \
         processes, bytes and shaped NICs are real. All times are in the case's own seconds.</p>\n",
    );
    for case in &results.cases {
        body += &render_case(case);
    }
    Page {
        title: format!("Training steps, suite {}", results.suite),
        subtitle: escape(&results.about),
        body,
        data: serde_json::to_value(results).unwrap_or_default(),
        footer: provenance,
    }
    .render()
}

fn render_case(case: &CaseResult) -> String {
    let mut html =
        format!("<h2>{}</h2>\n<p class=\"note\">{}</p>\n", escape(&case.name), escape(&case.about));
    html += &figures(case);
    let _ = writeln!(html, "<div class=\"panel\">\n{}</div>", bars(case));
    html += "<p class=\"note\">Timelines, predicted above measured: a row per device, the bubble left \
             empty; below it what was under way between stages, activations and gradients.</p>\n";
    for series in &case.series {
        let _ = writeln!(
            html,
            "<h3>{}</h3>\n<p class=\"note\">{}</p>\n<div class=\"panel\">\n{}</div>",
            escape(series.series),
            escape(series.about),
            timelines(series)
        );
    }
    html
}

fn figures(case: &CaseResult) -> String {
    use crate::pipeline::Series;
    let mut cards = String::new();
    cards += &card(
        &Seconds(case.lower_bound_s).to_string(),
        "the bound: no step of this case is shorter",
        "bound",
    );
    if let Some(ours) = case.of(Series::MinimalWindow) {
        let over = ours.seconds() / case.lower_bound_s;
        cards += &card(&format!("{over:.3} ×"), "the bound: minimal-window", "");
    }
    if let (Some(ours), Some(alpa)) = (case.of(Series::MinimalWindow), case.of(Series::AllGather)) {
        let gain = 100.0 * (alpa.seconds() / ours.seconds() - 1.0);
        let paper =
            if case.paper.is_empty() { String::new() } else { format!(" (the paper: {})", case.paper) };
        cards += &card(&format!("{gain:+.0} %"), &format!("over all-gather{paper}"), "");
    }
    format!("<div class=\"cards\">\n{cards}</div>\n")
}

/// Predicted above measured, for every series.
fn bars(case: &CaseResult) -> String {
    let longest = case.series.iter().map(|s| s.predicted_s.max(s.seconds())).fold(1e-9, f64::max);
    let per_series = 2.0 * BAR + 8.0;
    let height = per_series * case.series.len() as f64 + 24.0;
    let x = |seconds: f64| LEFT + (WIDTH - LEFT - 140.0) * seconds / longest;
    let mut svg = format!(
        "<svg viewBox=\"0 0 {WIDTH} {height}\" width=\"100%\" role=\"img\" aria-label=\"step times by series\">\n"
    );
    for (i, s) in case.series.iter().enumerate() {
        let y = i as f64 * per_series + 4.0;
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\" class=\"label\">{}</text>",
            LEFT - 8.0,
            y + BAR,
            escape(s.series)
        );
        svg += &bar(s, s.predicted_s, "predicted", y, &x, "var(--bar)");
        if let Some(median) = s.median_s {
            svg += &bar(s, median, "measured", y + BAR, &x, "var(--ours)");
        }
    }
    svg + "</svg>\n"
}

fn bar(s: &SeriesResult, seconds: f64, what: &str, y: f64, x: &dyn Fn(f64) -> f64, colour: &str) -> String {
    format!(
        "<rect x=\"{LEFT}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\" style=\"fill:{colour}\"><title>{} {what}: {}</title></rect>\
         <text x=\"{:.1}\" y=\"{:.1}\" class=\"value\">{} {what}</text>\n",
        x(seconds) - LEFT,
        BAR - 2.0,
        escape(s.series),
        Seconds(seconds),
        x(seconds) + 5.0,
        y + BAR - 5.0,
        Seconds(seconds)
    )
}

fn colour(kind: &str) -> &'static str {
    match kind {
        "F" => "var(--pf)",
        "B" => "var(--pb)",
        "W" => "var(--pw)",
        "BW" => "var(--pbw)",
        "act" => "var(--act)",
        "grad" => "var(--grad)",
        _ => "var(--po)",
    }
}

/// Both on one scale, so that what differs is to be seen.
fn timelines(series: &SeriesResult) -> String {
    let measured_s = series.measured.as_ref().map_or(0.0, |m| m.step_s);
    let end = series.timeline.step_s.max(measured_s).max(1e-12);
    let named = |what: &str, t: &Timeline| {
        format!("<p class=\"note\">{what}: {}</p>\n{}", Seconds(t.step_s), timeline(t, end))
    };
    let measured = series.measured.as_ref().map(|m| named("measured, the last run", m));
    named("predicted", &series.timeline) + &measured.unwrap_or_default()
}

fn timeline(timeline: &Timeline, end: f64) -> String {
    let x = |seconds: f64| LEFT + (WIDTH - LEFT - 10.0) * seconds / end;
    let height = ROW * timeline.devices.len() as f64 + LANE * timeline.crossings.len() as f64 + 26.0;
    let mut svg = format!(
        "<svg viewBox=\"0 0 {WIDTH} {height}\" width=\"100%\" role=\"img\" aria-label=\"timeline\">\n"
    );
    let mut y = 2.0;
    for (device, passes) in timeline.devices.iter().enumerate() {
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\" class=\"label\">stage {device}</text>",
            LEFT - 8.0,
            y + ROW - 4.0
        );
        for pass in passes {
            svg += &block(pass, y, ROW - 2.0, &x);
        }
        y += ROW;
    }
    for (name, bars) in &timeline.crossings {
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\" class=\"label\" style=\"font-size:9px\">{}</text>",
            LEFT - 8.0,
            y + LANE - 1.0,
            escape(name)
        );
        for bar in bars {
            svg += &block(bar, y, LANE - 2.0, &x);
        }
        y += LANE;
    }
    for tick in ticks(end, 8) {
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" class=\"label\">{}</text>",
            x(tick),
            y + 14.0,
            Seconds(tick)
        );
    }
    svg + "</svg>\n"
}

fn block(bar: &Bar, y: f64, height: f64, x: &dyn Fn(f64) -> f64) -> String {
    let (left, right) = (x(bar.start_s), x(bar.end_s));
    let width = (right - left).max(0.2);
    let mut svg = format!(
        "<rect x=\"{left:.2}\" y=\"{y:.1}\" width=\"{:.2}\" height=\"{height:.1}\" style=\"fill:{}\"><title>{} {} from {} to {}</title></rect>",
        (width - 0.15).max(0.15),
        colour(bar.kind),
        bar.kind,
        bar.microbatch,
        Seconds(bar.start_s),
        Seconds(bar.end_s)
    );
    let letters = bar.kind.len() as f64 + f64::from(bar.microbatch).log10().max(0.0).floor() + 1.0;
    if width > 5.5 * letters + 2.0 && height > 10.0 {
        let _ = write!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" class=\"on\" style=\"font-size:8px\">{}{}</text>",
            left + width / 2.0,
            y + height - 4.0,
            bar.kind,
            bar.microbatch
        );
    }
    svg + "\n"
}
