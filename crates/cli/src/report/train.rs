//! The report of a training run: how the loss fell, where the time of a step went, and one step's passes, predicted above measured.

use std::fmt::Write as _;

use crossmesh_core::schedule::{Pass, PassKind};
use crossmesh_core::units::{Bytes, Seconds};
use crossmesh_train::record::StepTimes;
use serde::Serialize;

use crate::training::metrics::{StepMetrics, TAIL, final_loss};
use crate::training::steps::StepSpread;

use super::gantt::{self, Bar, Gantt, Row};
use super::{Page, card, escape, ticks};

const LEFT: f64 = 64.0;
const WIDTH: f64 = super::MOST_WIDTH - LEFT - RIGHT;
const RIGHT: f64 = 56.0;
const HEIGHT: f64 = 260.0;
/// Above the curves stands what a line is called: beside the line they would run through it.
const TOP: f64 = 26.0;
/// More points than this are thinned out.
const MAX_POINTS: usize = 1200;
/// More rows than this are left out of a picture.
const MAX_ROWS: usize = 32;

/// What the page is made of.
#[derive(Debug, Serialize)]
pub struct TrainReport {
    pub schema: &'static str,
    pub name: String,
    /// The model, the ranks and the schedule, in a line.
    pub about: String,
    pub data: String,
    pub reachable_loss: Option<f64>,
    pub speed_unit: &'static str,
    pub metrics: Vec<StepMetrics>,
    /// By rank, a mean over steps.
    pub ranks: Vec<RankTimes>,
    /// Of one step.
    pub timeline: Option<Timeline>,
    pub config: String,
}

/// Where a rank's time went in a mean step.
#[derive(Debug, Clone, Serialize)]
pub struct RankTimes {
    pub name: String,
    pub step_s: f64,
    pub compute_s: f64,
    pub exposed_s: f64,
    pub bubble_s: f64,
    pub optimizer_s: f64,
}

impl RankTimes {
    pub fn new(name: String, times: &StepTimes) -> Self {
        Self {
            name,
            step_s: times.step,
            compute_s: times.compute,
            exposed_s: times.exposed,
            bubble_s: times.bubble,
            optimizer_s: times.optimizer,
        }
    }

    fn parts(&self) -> [(&'static str, &'static str, f64); 4] {
        [
            ("compute", "pcompute", self.compute_s),
            ("optimizer", "po", self.optimizer_s),
            ("exposed communication", "pexposed", self.exposed_s),
            ("bubble", "pbubble", self.bubble_s),
        ]
    }
}

/// The passes of one step.
#[derive(Debug, Serialize)]
pub struct Timeline {
    pub step: u64,
    pub rows: Vec<TimelineRow>,
    pub predicted_s: f64,
    pub measured_s: f64,
}

#[derive(Debug, Serialize)]
pub struct TimelineRow {
    pub name: String,
    /// Whether it was simulated.
    pub predicted: bool,
    pub passes: Vec<(String, f64, f64)>,
}

/// The page. `provenance` is the footer: command and version.
pub fn render(report: &TrainReport, provenance: Vec<String>) -> String {
    let mut body = figures(report);
    let _ = write!(
        body,
        "<h2>Loss</h2>\n<p class=\"note\">Every step, and a running mean.{}</p>\n<div class=\"panel\">\n{}</div>\n",
        if report.reachable_loss.is_some() {
            " The dashed line is the best that any model could reach."
        } else {
            ""
        },
        loss_curve(report)
    );
    if !report.ranks.is_empty() {
        let _ = write!(
            body,
            "<h2>Where a step's time goes</h2>\n<p class=\"note\">A mean over all steps but the first, by rank.</p>\n{BREAKDOWN}\
             <div class=\"panel\">\n{}</div>\n",
            breakdown(&report.ranks)
        );
    }
    if let Some(timeline) = &report.timeline {
        body += &passes(timeline);
    }
    let _ = write!(
        body,
        "<h2>Speed</h2>\n<p class=\"note\">{} at every step.</p>\n<div class=\"panel\">\n{}</div>\n",
        escape(report.speed_unit),
        speed_curve(report)
    );
    let _ = write!(
        body,
        "<h2>Config</h2>\n<details><summary>As it was resolved</summary>\n<div class=\"panel\"><pre class=\"mono\">{}</pre></div>\n</details>\n",
        escape(&report.config)
    );
    Page {
        title: format!("Training {}", report.name),
        subtitle: format!("{}<br>{}", escape(&report.about), escape(&report.data)),
        body,
        data: serde_json::to_value(report).unwrap_or_default(),
        footer: provenance,
    }
    .render()
}

fn figures(report: &TrainReport) -> String {
    let mut cards = String::new();
    let last = report.metrics.last();
    if let Some(mean) = final_loss(report.metrics.iter()) {
        cards += &card(&format!("{mean:.4}"), &format!("loss, mean of the last {TAIL} steps"), "");
        if let Some(reachable) = report.reachable_loss.filter(|r| *r > 0.0) {
            let over = 100.0 * (mean / reachable - 1.0);
            let class = if over <= 5.0 { "good" } else { "" };
            cards +=
                &card(&format!("{over:+.1} %"), &format!("above the best possible, {reachable:.4}"), class);
        }
    }
    if let Some(loss) = report.metrics.iter().rev().find_map(|m| m.validation_loss) {
        cards += &card(&format!("{loss:.4}"), "validation loss, the last", "");
    }
    let count = report.metrics.len().max(1) as f64;
    let mean = |of: &dyn Fn(&StepMetrics) -> f64| report.metrics.iter().map(of).sum::<f64>() / count;
    let step_s = mean(&|m| m.step_s);
    let spread = StepSpread::of(&report.metrics);
    if step_s > 0.0 {
        if let Some(steps) = &spread {
            cards += &card(&Seconds(steps.median_s).to_string(), "a step, in the median", "");
            cards += &card(&Seconds(steps.p95_s).to_string(), "19 of 20 steps are within", "");
            cards += &card(&Seconds(steps.longest_s).to_string(), "the longest step", "");
        }
        cards += &card(&short(mean(&|m| m.speed())), report.speed_unit, "");
        let share = |part: f64| format!("{:.1} %", 100.0 * part / step_s);
        cards += &card(&share(mean(&|m| m.exposed_comm_s)), "exposed communication", "");
        cards += &card(&share(mean(&|m| m.bubble_s)), "bubble", "");
    }
    if let Some(last) = last {
        cards += &card(&Bytes(last.bytes_sent).to_string(), "sent in a step, by all ranks", "");
    }
    let outliers = spread.and_then(|steps| steps.outliers());
    let outliers =
        outliers.map_or_else(String::new, |text| format!("<p class=\"note\">{}</p>\n", escape(&text)));
    format!("<div class=\"cards\">\n{cards}</div>\n{outliers}")
}

/// `12.3k`.
fn short(value: f64) -> String {
    match value {
        v if v >= 1e6 => format!("{:.1}M", v / 1e6),
        v if v >= 1e4 => format!("{:.1}k", v / 1e3),
        v => format!("{v:.0}"),
    }
}

/// A picture of lines over steps.
struct Curve {
    points: Vec<(f64, f64)>,
    /// Drawn over the points.
    smooth: Vec<(f64, f64)>,
    ideal: Option<(f64, String)>,
    from_zero: bool,
    about: &'static str,
    label: fn(f64) -> String,
}

impl Curve {
    fn render(&self) -> String {
        let Some(&(last_step, _)) = self.points.last() else {
            return "<p class=\"note\">nothing yet</p>\n".into();
        };
        let first_step = self.points[0].0;
        let values = self.points.iter().map(|p| p.1).chain(self.ideal.as_ref().map(|i| i.0));
        let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
        let low = if self.from_zero { 0.0 } else { low - 0.06 * (high - low).max(1e-9) };
        let span = (high - low).max(1e-12) * 1.04;
        let steps = (last_step - first_step).max(1.0);
        let x = |step: f64| LEFT + WIDTH * (step - first_step) / steps;
        let y = |value: f64| TOP + HEIGHT * (1.0 - (value - low) / span);
        let (bottom, right) = (TOP + HEIGHT, LEFT + WIDTH);
        let (w, h) = (right + RIGHT, bottom + 30.0);
        let mut svg = format!(
            "<svg width=\"{w}\" height=\"{h}\" viewBox=\"0 0 {w} {h}\" role=\"img\" aria-label=\"{}\">\n",
            escape(self.about)
        );
        for tick in ticks(span, 5) {
            // Round values inside the axis, which need not start at zero.
            let step = ticks(span, 5).get(1).copied().unwrap_or(span);
            let value = (low / step).ceil() * step + tick;
            if value > low + span {
                break;
            }
            let at = y(value);
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>"
            );
            let _ = writeln!(
                svg,
                "<text class=\"soft\" x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 8.0,
                at + 4.0,
                (self.label)(value)
            );
        }
        let round = |step: &f64| step.fract() == 0.0 && *step >= first_step;
        for step in ticks(last_step, 8).into_iter().filter(round) {
            let _ = writeln!(
                svg,
                "<text class=\"soft\" x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{step}</text>",
                x(step),
                bottom + 20.0
            );
        }
        svg += &polyline("curve faint", &self.points, &x, &y);
        svg += &polyline("curve", &self.smooth, &x, &y);
        if let Some((value, label)) = &self.ideal {
            let at = y(*value);
            let _ = writeln!(
                svg,
                "<line class=\"boundline\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>"
            );
            let _ = writeln!(
                svg,
                "<text class=\"bound\" x=\"{right}\" y=\"{}\" text-anchor=\"end\">{}</text>",
                TOP - 10.0,
                escape(label)
            );
        }
        svg + "</svg>\n"
    }
}

fn polyline(class: &str, points: &[(f64, f64)], x: &dyn Fn(f64) -> f64, y: &dyn Fn(f64) -> f64) -> String {
    let every = points.len().div_ceil(MAX_POINTS).max(1);
    let last = points.len().saturating_sub(1);
    let shown = points.iter().enumerate().filter(|(i, _)| i % every == 0 || *i == last);
    let text: Vec<String> = shown.map(|(_, p)| format!("{:.1},{:.1}", x(p.0), y(p.1))).collect();
    format!("<polyline class=\"{class}\" points=\"{}\"/>\n", text.join(" "))
}

/// A mean over about a fiftieth of the run before each point.
fn smoothed(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let window = (points.len() / 50).clamp(3, 100);
    let mean = |i: usize| {
        let part = &points[(i + 1).saturating_sub(window)..=i];
        (points[i].0, part.iter().map(|p| p.1).sum::<f64>() / part.len() as f64)
    };
    (0..points.len()).map(mean).collect()
}

/// The loss as a figure for a paper.
pub fn figure(report: &TrainReport) -> String {
    let points = losses(report);
    let floor = report.reachable_loss.map(|loss| (loss, format!("best possible {loss:.4}")));
    let floor = floor.as_ref().map(|(loss, words)| (*loss, words.as_str()));
    super::figure::curve(&points, &smoothed(&points), floor, "loss")
}

fn losses(report: &TrainReport) -> Vec<(f64, f64)> {
    report.metrics.iter().filter_map(|m: &StepMetrics| Some((m.step as f64, m.loss?))).collect()
}

fn loss_curve(report: &TrainReport) -> String {
    let points = losses(report);
    let ideal = report.reachable_loss.map(|loss| (loss, format!("best possible {loss:.4}")));
    let label = |value: f64| format!("{value:.2}");
    Curve { smooth: smoothed(&points), points, ideal, from_zero: false, about: "loss over steps", label }
        .render()
}

fn speed_curve(report: &TrainReport) -> String {
    let points: Vec<(f64, f64)> = report.metrics.iter().map(|m| (m.step as f64, m.speed())).collect();
    Curve {
        smooth: smoothed(&points),
        points,
        ideal: None,
        from_zero: true,
        about: "speed over steps",
        label: short,
    }
    .render()
}

const BREAKDOWN: &str = "<div class=\"legend\"><span><i class=\"kcompute\"></i>compute</span>\
<span><i class=\"kopt\"></i>optimizer</span><span><i class=\"kexposed\"></i>exposed communication</span>\
<span><i class=\"kbubble\"></i>bubble</span></div>\n";

fn breakdown(ranks: &[RankTimes]) -> String {
    let longest = ranks.iter().map(|r| r.step_s).fold(1e-12, f64::max);
    let shown = &ranks[..ranks.len().min(MAX_ROWS)];
    let (row, width) = (24.0, WIDTH - 60.0);
    let height = row * shown.len() as f64 + 30.0;
    let whole = LEFT + width + 110.0;
    let mut svg = format!(
        "<svg width=\"{whole}\" height=\"{height}\" viewBox=\"0 0 {whole} {height}\" role=\"img\" aria-label=\"step breakdown by rank\">\n"
    );
    for (i, rank) in shown.iter().enumerate() {
        let y = 4.0 + row * i as f64;
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>",
            LEFT - 8.0,
            y + 14.0,
            escape(&rank.name)
        );
        let mut at = LEFT;
        for (what, class, seconds) in rank.parts() {
            let long = width * seconds / longest;
            let _ = writeln!(
                svg,
                "<rect class=\"{class}\" x=\"{at:.1}\" y=\"{y}\" width=\"{:.1}\" height=\"{}\"><title>{}: {what} {}, {:.1} %</title></rect>",
                (long - 0.5).max(0.0),
                row - 6.0,
                escape(&rank.name),
                Seconds(seconds),
                100.0 * seconds / rank.step_s.max(1e-12)
            );
            at += long;
        }
        let compute = 100.0 * rank.compute_s / rank.step_s.max(1e-12);
        let _ = writeln!(
            svg,
            "<text class=\"soft\" x=\"{:.1}\" y=\"{}\">{} · {compute:.0} %</text>",
            at + 8.0,
            y + 14.0,
            Seconds(rank.step_s)
        );
    }
    let _ = writeln!(
        svg,
        "<text class=\"soft\" x=\"{LEFT}\" y=\"{}\">mean step of every rank, and how much of it was compute</text>",
        height - 6.0
    );
    svg + "</svg>\n"
}

const LEGEND: &str = "<div class=\"legend\">\
<span><i class=\"kf\"></i>F forward</span><span><i class=\"kb\"></i>B backward for inputs</span>\
<span><i class=\"kw\"></i>W backward for weights</span><span><i class=\"kbw\"></i>BW both in one</span>\
<span><i class=\"kopt\"></i>OPT update of weights</span></div>\n";

fn passes(timeline: &Timeline) -> String {
    let row = |row: &TimelineRow| {
        let busy: f64 = row.passes.iter().map(|p| p.2 - p.1).sum();
        let end = row.passes.iter().map(|p| p.2).fold(0.0, f64::max);
        let idle = if end > 0.0 { 100.0 * (1.0 - busy / end) } else { 0.0 };
        Row {
            name: row.name.clone(),
            bars: row.passes.iter().map(|p| bar(p, row.predicted)).collect(),
            lanes: vec![],
            note: format!("idle {idle:.0} %"),
        }
    };
    let picture = Gantt {
        rows: timeline.rows.iter().take(2 * MAX_ROWS).map(row).collect(),
        end: timeline.predicted_s.max(timeline.measured_s),
        bound: None,
        unit: |t| Seconds(t).to_string(),
        about: "the passes of one step, predicted and measured".into(),
    };
    format!(
        "<h2>Step {}, pass by pass</h2>\n<p class=\"note\">For every device what was predicted (from how long its own passes took in this \
         step, the schedule and the cluster's links: {}), then what each rank measured ({}).</p>\n{LEGEND}<div class=\"panel\">\n{}</div>\n",
        timeline.step,
        Seconds(timeline.predicted_s),
        Seconds(timeline.measured_s),
        picture.render(gantt::WIDTH)
    )
}

fn bar((name, start, end): &(String, f64, f64), predicted: bool) -> Bar {
    let pass: Option<Pass> = name.parse().ok();
    let class = match (pass.map(|p| p.kind), predicted) {
        (Some(PassKind::F), false) => "pf",
        (Some(PassKind::B), false) => "pb",
        (Some(PassKind::W), false) => "pw",
        (Some(PassKind::BW), false) => "pbw",
        (Some(PassKind::F), true) => "pf odd",
        (Some(PassKind::B), true) => "pb odd",
        (Some(PassKind::W), true) => "pw odd",
        (Some(PassKind::BW), true) => "pbw odd",
        _ => "po",
    };
    let label = pass.map_or(name.clone(), |p| match p.kind {
        PassKind::F | PassKind::B | PassKind::W | PassKind::BW => {
            format!("{}{}", p.kind.letters(), p.microbatch.0)
        }
        other => other.letters().to_string(),
    });
    Bar {
        start: *start,
        end: *end,
        class,
        label,
        title: format!("{name}: {} to {}", Seconds(*start), Seconds(*end)),
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn report() -> TrainReport {
        let metric = |step: u64| StepMetrics {
            step,
            loss: Some(2.0 + 3.0 / step as f64),
            validation_loss: None,
            grad_norm: Some(1.0),
            learning_rate: 1e-3,
            not_finite: None,
            samples_per_s: 100.0,
            tokens_per_s: Some(6400.0),
            mfu: 0.25,
            step_s: 0.1,
            compute_s: 0.07,
            exposed_comm_s: 0.01,
            bubble_s: 0.015,
            optimizer_s: 0.005,
            bytes_sent: 1 << 20,
            activation_bytes: 1 << 20,
        };
        let times = StepTimes { step: 0.1, compute: 0.07, exposed: 0.01, bubble: 0.015, optimizer: 0.005 };
        let pass = |name: &str, start: f64| (name.to_string(), start, start + 0.02);
        let passes = || vec![pass("0F0", 0.0), pass("0F1", 0.02), pass("0BW0", 0.05), pass("0BW1", 0.07)];
        let row = |name: &str, predicted| TimelineRow { name: name.into(), predicted, passes: passes() };
        TrainReport {
            schema: "crossmesh.train-report/1",
            name: "a <run>".into(),
            about: "gpt".into(),
            data: "language".into(),
            reachable_loss: Some(1.9),
            speed_unit: "tokens/s",
            metrics: (1..=40).map(metric).collect(),
            ranks: vec![RankTimes::new("r0".into(), &times), RankTimes::new("r1".into(), &times)],
            timeline: Some(Timeline {
                step: 40,
                rows: vec![row("d0", true), row("r0", false)],
                predicted_s: 0.09,
                measured_s: 0.1,
            }),
            config: "[train]\nsteps = 40\n".into(),
        }
    }

    #[test]
    fn a_page_has_its_curve_its_line_and_its_bars() {
        let html = render(&report(), vec![]);
        assert_eq!(html.matches("class=\"curve\"").count(), 2, "loss and speed");
        assert_eq!(html.matches("class=\"boundline\"").count(), 1);
        assert!(html.contains("best possible 1.9000") && html.contains("a &lt;run&gt;"));
        assert_eq!(html.matches("class=\"pexposed\"").count(), 2, "one for every rank");
        // Of all passes, of updates, of waiting: compute is not forwards alone, nor is an update a W.
        for (class, times) in [("pcompute", 2), ("po", 2), ("pbubble", 2), ("pw", 0)] {
            assert_eq!(html.matches(&format!("class=\"{class}\"")).count(), times, "{class}");
        }
        assert!(html.contains(">F0</text>") && html.contains(">BW1</text>"));
        assert!(!html.contains("<script src") && !html.contains("http"), "it loads nothing");
    }

    /// A loss that has come down to what is possible runs along the line: its name is elsewhere.
    #[test]
    fn no_curve_runs_through_the_name_of_its_line() {
        let mut report = report();
        for (at, metric) in report.metrics.iter_mut().enumerate() {
            metric.loss = Some(1.9 + 3.0 * (-(at as f64) / 5.0).exp() + 0.02 * (at as f64 * 2.4).sin());
        }
        let svg = loss_curve(&report);
        let label = svg.lines().find(|line| line.contains("class=\"bound\"")).unwrap();
        let base: f64 = label.split(" y=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap();
        assert!(label.contains("best possible 1.9000") && base >= 12.0, "{label}");
        let lines = svg.lines().filter_map(|line| line.split("points=\"").nth(1));
        let points = lines.flat_map(|points| points.split('"').next().unwrap().split(' '));
        let heights: Vec<f64> =
            points.map(|point| point.split_once(',').unwrap().1.parse().unwrap()).collect();
        // A letter reaches a quarter of its height below the line it stands on.
        assert!(heights.len() == 80 && heights.iter().all(|y| *y > base + 3.0), "{label}\n{heights:?}");
    }

    #[test]
    fn a_step_that_stood_still_is_pointed_out() {
        assert!(!render(&report(), vec![]).contains("× the median"));
        let mut slow = report();
        slow.metrics[6].step_s = 1.0;
        let html = render(&slow, vec![]);
        assert!(html.contains("1 step took 4 × the median or more; the longest, step 7, 10.0 × (1.00 s)"));
    }

    #[test]
    fn a_run_without_steps_is_a_page_too() {
        let empty = TrainReport { metrics: vec![], ranks: vec![], timeline: None, ..report() };
        assert!(render(&empty, vec![]).contains("nothing yet"));
        let mut one = report();
        one.metrics.truncate(1);
        one.metrics[0].loss = None;
        assert!(render(&one, vec![]).contains("Training a"));
    }
}
