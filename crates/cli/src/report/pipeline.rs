//! The report of whole training steps: a bar per series, and a timeline each.

use std::fmt::Write as _;

use crossmesh_core::units::Seconds;

use crate::commands::bench::pipeline::{Bar, CaseResult, Results, SeriesResult, Timeline};

use super::{Page, card, escape, ticks};

const LEFT: f64 = 120.0;
const WIDTH: f64 = super::MOST_WIDTH;
const BAR: f64 = 17.0;
const ROW: f64 = 18.0;
const LANE: f64 = 15.0;

/// The page. `provenance` is the footer: command and version.
pub fn render(results: &Results, provenance: Vec<String>) -> String {
    let mut body = String::from(
        "<p class=\"note\">Compute is virtual: every pass is a timed wait of a stated length. Where times are measured, \
         processes, bytes and shaped NICs are real. All times are in the case's own seconds.</p>\n",
    );
    for case in &results.cases {
        body += &render_case(case);
    }
    let mut footer = provenance;
    footer.extend(results.machine.as_ref().map(|machine| format!("measured on {machine}")));
    Page {
        title: format!("Training steps, suite {}", results.suite),
        subtitle: escape(&results.about),
        body,
        data: serde_json::to_value(results).unwrap_or_default(),
        footer,
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
    html += super::schedule::LEGEND;
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
        cards += &card(&format!("{over:.3} ×"), "of the bound: minimal-window", "");
    }
    if let (Some(ours), Some(alpa)) = (case.of(Series::MinimalWindow), case.of(Series::AllGather)) {
        let gain = 100.0 * (alpa.seconds() / ours.seconds() - 1.0);
        let paper =
            if case.paper.is_empty() { String::new() } else { format!(" (the paper: {})", case.paper) };
        cards += &card(&format!("{gain:+.0} %"), &format!("over allgather{paper}"), "");
    }
    format!("<div class=\"cards\">\n{cards}</div>\n")
}

/// Predicted above measured, for every series.
fn bars(case: &CaseResult) -> String {
    let longest = case.series.iter().map(|s| s.predicted_s.max(s.seconds())).fold(1e-9, f64::max);
    let any_measured = case.series.iter().any(|s| s.median_s.is_some());
    let per_series = BAR * if any_measured { 2.0 } else { 1.0 } + 8.0;
    let top = 20.0;
    let height = top + per_series * case.series.len() as f64 + 4.0;
    let x = |seconds: f64| LEFT + (WIDTH - LEFT - 140.0) * seconds / longest;
    let mut svg = format!(
        "<svg viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" role=\"img\" aria-label=\"step times by series\">\n"
    );
    for (i, s) in case.series.iter().enumerate() {
        let y = top + i as f64 * per_series;
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>",
            LEFT - 8.0,
            y + (per_series - 8.0) / 2.0 + 3.5,
            escape(s.series)
        );
        // As in all reports: faint is predicted, where something was measured.
        let class = if s.median_s.is_some() { "bar faint" } else { "bar" };
        svg += &bar(s, s.predicted_s, "predicted", y, &x, class);
        if let Some(median) = s.median_s {
            svg += &bar(s, median, "measured", y + BAR, &x, "bar");
        }
    }
    let (at, bottom) = (x(case.lower_bound_s), height - 8.0);
    let _ = writeln!(
        svg,
        "<line class=\"boundline\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"6\" y2=\"{bottom:.1}\"/>\n\
         <text class=\"bound\" x=\"{:.1}\" y=\"14\" text-anchor=\"end\">bound {}</text>",
        at - 5.0,
        Seconds(case.lower_bound_s)
    );
    svg + "</svg>\n"
}

fn bar(s: &SeriesResult, seconds: f64, what: &str, y: f64, x: &dyn Fn(f64) -> f64, class: &str) -> String {
    format!(
        "<rect class=\"{class}\" x=\"{LEFT}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\"><title>{} {what}: {}</title></rect>\
         <text x=\"{:.1}\" y=\"{:.1}\" class=\"soft\">{} {what}</text>\n",
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
        "<svg viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" role=\"img\" aria-label=\"timeline\">\n"
    );
    let mut y = 2.0;
    for (device, passes) in timeline.devices.iter().enumerate() {
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">stage {device}</text>",
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
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>",
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
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" class=\"soft\">{}</text>",
            x(tick).min(WIDTH - 24.0),
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
    if width > 8.0 * letters + 2.0 && height > 13.0 {
        let _ = write!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" class=\"on\">{}{}</text>",
            left + width / 2.0,
            y + height - 4.0,
            bar.kind,
            bar.microbatch
        );
    }
    svg + "\n"
}
