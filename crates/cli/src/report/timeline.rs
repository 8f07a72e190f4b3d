//! NIC timelines: a row per NIC and direction, the share of its rate in use as height, time to the right.
//!
//! ```text
//!             bound 0.30 s ¦  | predicted 0.34 s
//! h0 nic out  ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇ |   98 %  1.00 GiB
//! h1 nic in    ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇|   98 %  1.00 GiB
//!             0   0.1 s  0.2 s
//! ```

use std::fmt::Write as _;

use crossmesh_core::trace::Busy;
use crossmesh_core::units::{Bytes, Rate, Seconds};

use crate::links::{self, Kind, Row};
use crate::predict::Prediction;
use crate::summary;

use super::{escape, ticks};

/// More rows than this are left out, the least busy ones.
pub const MAX_ROWS: usize = 48;
/// More stretches than pixels are averaged.
const MAX_STEPS: usize = 800;

const LEFT: f64 = 120.0;
const WIDTH: f64 = super::MOST_WIDTH - LEFT - RIGHT;
/// How much of a NIC was used, and for how many bytes.
const RIGHT: f64 = 126.0;
const ROW: f64 = 24.0;
const TOP: f64 = 40.0;

/// The rows: NICs and tiers in order of host. Where there are too many, the NICs of a host are one row; where there
/// still are, the busiest stay, as many outgoing as incoming.
pub fn rows(prediction: &Prediction) -> Vec<Row> {
    let (problem, trace) = (&prediction.plan.problem, &prediction.trace);
    let network = |rows: Vec<Row>| rows.into_iter().filter(|r| r.kind != Kind::Local).collect::<Vec<_>>();
    let mut rows = network(links::one_by_one(problem, trace));
    if rows.len() > MAX_ROWS {
        rows = network(links::by_host(problem, trace));
    }
    if rows.len() > MAX_ROWS {
        links::sort_busiest(&mut rows);
        let (outs, others): (Vec<Row>, Vec<Row>) = rows.into_iter().partition(|r| r.kind == Kind::Out);
        rows = outs.into_iter().take(MAX_ROWS / 2).chain(others.into_iter().take(MAX_ROWS / 2)).collect();
    }
    links::sort_by_host(&mut rows);
    rows
}

fn class(kind: Kind) -> &'static str {
    match kind {
        Kind::Out => "out",
        Kind::In => "in",
        Kind::Tier => "tier",
        Kind::Local => "local",
    }
}

/// The timelines as SVG.
pub fn render(prediction: &Prediction) -> String {
    let rows = rows(prediction);
    let (end, bound) = (prediction.seconds(), prediction.bound.seconds);
    let span = end.max(bound) * 1.02;
    let x = |seconds: f64| LEFT + if span > 0.0 { WIDTH * (seconds / span).clamp(0.0, 1.0) } else { 0.0 };
    let bottom = TOP + ROW * rows.len() as f64;
    let (width, height) = (LEFT + WIDTH + RIGHT, bottom + 28.0);
    let mut svg = format!(
        "<svg width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" role=\"img\" \
         aria-label=\"use of each NIC over time\">\n"
    );
    for tick in ticks(span, 8) {
        let (x, label) = (x(tick), if tick == 0.0 { "0".to_string() } else { Seconds(tick).to_string() });
        let _ =
            writeln!(svg, "<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{bottom}\"/>");
        let y = bottom + 18.0;
        let _ = writeln!(
            svg,
            "<text class=\"soft\" x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{label}</text>"
        );
    }
    for (i, link) in rows.iter().enumerate() {
        svg += &row(prediction, link, TOP + ROW * i as f64, &x);
    }
    svg += &mark(x(bound), bottom, "bound", &format!("bound {}", Seconds(bound)), -6.0, "end");
    svg += &mark(x(end), bottom, "end", &format!("predicted {}", Seconds(end)), 6.0, "start");
    svg + "</svg>\n"
}

/// A vertical line with its name above; the bound's to the left of the line, the end's to the right.
fn mark(x: f64, bottom: f64, class: &str, label: &str, dx: f64, anchor: &str) -> String {
    let (label_x, above) = (x + dx, TOP - 10.0);
    format!(
        "<line class=\"{class}line\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{above}\" y2=\"{bottom}\"/>\n\
         <text class=\"{class}\" x=\"{label_x:.1}\" y=\"{}\" text-anchor=\"{anchor}\">{label}</text>\n",
        TOP - 16.0
    )
}

fn row(prediction: &Prediction, row: &Row, y: f64, x: &dyn Fn(f64) -> f64) -> String {
    let (name, label) = (escape(&row.name), escape(&shortened(&row.name)));
    let percent = summary::percent(row.bytes as f64 / row.bytes_per_s, prediction.seconds());
    let (base, full) = (y + ROW - 3.0, ROW - 6.0);
    let mut path = String::new();
    for busy in resampled(&row.busy, prediction.seconds()) {
        let top = base - full * busy.share.clamp(0.0, 1.0);
        let (x0, x1) = (x(busy.start_s), x(busy.end_s));
        let _ = write!(path, "M{x0:.2} {base:.1}V{top:.1}H{x1:.2}V{base:.1}Z");
    }
    format!(
        "<g><title>{name}: {} at {}, busy {percent:.1} % of the time</title>\n\
         <text x=\"{}\" y=\"{}\" text-anchor=\"end\">{label}</text>\n\
         <rect class=\"track\" x=\"{LEFT}\" y=\"{:.1}\" width=\"{WIDTH}\" height=\"{full:.1}\"/>\n\
         <path class=\"{}\" d=\"{path}\"/>\n\
         <text class=\"soft\" x=\"{}\" y=\"{}\">{percent:.0} %  {}</text></g>\n",
        Bytes(row.bytes),
        Rate(row.bytes_per_s),
        LEFT - 10.0,
        base - 4.0,
        y + 3.0,
        class(row.kind),
        LEFT + WIDTH + 8.0,
        base - 4.0,
        Bytes(row.bytes),
    )
}

/// What fits to the left of a row; tiers may have long names.
pub fn shortened(name: &str) -> String {
    const CHARS: usize = 18;
    match name.chars().count() > CHARS {
        true => name.chars().take(CHARS - 1).chain(['…']).collect(),
        false => name.to_string(),
    }
}

/// The stretches themselves, or their average over buckets where there are more than pixels.
pub fn resampled(busy: &[Busy], end_s: f64) -> Vec<Busy> {
    if busy.len() <= MAX_STEPS || end_s <= 0.0 {
        return busy.to_vec();
    }
    let step = end_s / MAX_STEPS as f64;
    let mut used = vec![0.0; MAX_STEPS];
    for b in busy {
        let (first, last) = ((b.start_s / step) as usize, (b.end_s / step) as usize);
        for (i, used) in used.iter_mut().enumerate().take(last + 1).skip(first) {
            let (start, end) = (i as f64 * step, (i + 1) as f64 * step);
            *used += b.share * (b.end_s.min(end) - b.start_s.max(start)).max(0.0);
        }
    }
    let bucket = |(i, used): (usize, f64)| Busy {
        start_s: i as f64 * step,
        end_s: (i + 1) as f64 * step,
        share: used / step,
    };
    used.into_iter().enumerate().map(bucket).filter(|b| b.share > 0.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_are_cut() {
        assert_eq!(shortened("h0 nic out"), "h0 nic out");
        assert_eq!(shortened("a very long tier 12 out"), "a very long tier …");
    }

    #[test]
    fn averaging_keeps_the_area() {
        let n = 5000;
        let busy: Vec<Busy> = (0..n)
            .map(|i| Busy {
                start_s: i as f64,
                end_s: i as f64 + 0.5,
                share: if i % 3 == 0 { 1.0 } else { 0.25 },
            })
            .collect();
        let area = |busy: &[Busy]| busy.iter().map(|b| (b.end_s - b.start_s) * b.share).sum::<f64>();
        let coarse = resampled(&busy, n as f64);
        assert_eq!(coarse.len(), MAX_STEPS);
        assert!((area(&coarse) / area(&busy) - 1.0).abs() < 1e-9);
        assert_eq!(resampled(&busy[..10], n as f64), &busy[..10]);
    }
}
