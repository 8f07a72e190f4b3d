//! Timelines of passes as SVG: a row per device or rank, a bar per pass with its letter and colour, thin lanes below for what is on
//! its way, gaps where nothing is computed.
//!
//! It knows neither schedules nor traces: whoever has something to show says where the bars are.

use std::fmt::Write as _;

use super::{escape, ticks};

const LEFT: f64 = 96.0;
const BAR: f64 = 22.0;
const LANE: f64 = 5.0;
const GAP: f64 = 6.0;
const TOP: f64 = 22.0;

/// A bar: from when to when, which class of the style sheet, what is written on it if there is room, and what it is.
pub struct Bar {
    pub start: f64,
    pub end: f64,
    pub class: &'static str,
    pub label: String,
    pub title: String,
}

/// A row: its name, its bars, lanes of thinner bars below, and what is said behind it.
pub struct Row {
    pub name: String,
    pub bars: Vec<Bar>,
    pub lanes: Vec<Vec<Bar>>,
    pub note: String,
}

/// A whole picture.
pub struct Gantt {
    pub rows: Vec<Row>,
    pub end: f64,
    /// Drawn as a line: nothing could end before it.
    pub bound: Option<f64>,
    /// How a time is written.
    pub unit: fn(f64) -> String,
    pub about: String,
}

impl Gantt {
    /// As SVG, the time axis `width` wide.
    pub fn render(&self, width: f64) -> String {
        let span = if self.end > 0.0 { self.end } else { 1.0 };
        let x = |time: f64| LEFT + width * (time / span).clamp(0.0, 1.0);
        let height = |row: &Row| BAR + LANE * row.lanes.len() as f64 + GAP;
        let bottom = TOP + self.rows.iter().map(height).sum::<f64>();
        let (whole_width, whole_height) = (LEFT + width + 150.0, bottom + 26.0);
        let mut svg = format!(
            "<svg width=\"{whole_width}\" height=\"{whole_height}\" viewBox=\"0 0 {whole_width} {whole_height}\" role=\"img\" \
             aria-label=\"{}\">\n",
            escape(&self.about)
        );
        for tick in ticks(span, 10) {
            let (at, y, label) = (x(tick), bottom + 16.0, (self.unit)(tick));
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{bottom}\"/>"
            );
            let _ = writeln!(
                svg,
                "<text class=\"soft\" x=\"{at:.1}\" y=\"{y}\" text-anchor=\"middle\">{label}</text>"
            );
        }
        let mut y = TOP;
        for row in &self.rows {
            svg += &render_row(row, y, width, &x);
            y += height(row);
        }
        if let Some(bound) = self.bound.filter(|bound| *bound > 0.0 && *bound <= self.end) {
            let (at, label) = (x(bound), (self.unit)(bound));
            let _ = writeln!(
                svg,
                "<line class=\"boundline\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{}\" y2=\"{bottom}\"/>",
                TOP - 6.0
            );
            let _ = writeln!(
                svg,
                "<text class=\"bound\" x=\"{:.1}\" y=\"{}\" text-anchor=\"end\">bound {label}</text>",
                at - 5.0,
                TOP - 9.0
            );
        }
        svg + "</svg>\n"
    }
}

fn render_row(row: &Row, y: f64, width: f64, x: &dyn Fn(f64) -> f64) -> String {
    let (text_y, name_x, note_x) = (y + BAR - 7.0, LEFT - 10.0, LEFT + width + 8.0);
    let mut svg = format!(
        "<g><text x=\"{name_x}\" y=\"{text_y}\" text-anchor=\"end\">{}</text>\n\
         <rect class=\"track\" x=\"{LEFT}\" y=\"{y:.1}\" width=\"{width}\" height=\"{BAR}\"/>\n\
         <text class=\"soft\" x=\"{note_x}\" y=\"{text_y}\">{}</text>\n",
        escape(&row.name),
        escape(&row.note)
    );
    for bar in &row.bars {
        svg += &render_bar(bar, y, BAR, x, true);
    }
    for (lane, bars) in row.lanes.iter().enumerate() {
        let lane_y = y + BAR + LANE * lane as f64 + 1.0;
        for bar in bars {
            svg += &render_bar(bar, lane_y, LANE - 1.0, x, false);
        }
    }
    svg + "</g>\n"
}

fn render_bar(bar: &Bar, y: f64, height: f64, x: &dyn Fn(f64) -> f64, labelled: bool) -> String {
    let (x0, x1) = (x(bar.start), x(bar.end));
    // A hair of the background between neighbours.
    let width = (x1 - x0 - 0.6).max(0.4);
    let mut svg = format!(
        "<rect class=\"{}\" x=\"{x0:.2}\" y=\"{y:.1}\" width=\"{width:.2}\" height=\"{height:.1}\" rx=\"2\"><title>{}</title></rect>\n",
        bar.class,
        escape(&bar.title)
    );
    let letter_width = 6.5;
    let fitting: String = match width >= letter_width * bar.label.chars().count() as f64 + 2.0 {
        true => bar.label.clone(),
        false => bar.label.chars().filter(|c| c.is_alphabetic()).collect(),
    };
    if labelled && width >= letter_width * fitting.chars().count() as f64 + 1.0 {
        let _ = writeln!(
            svg,
            "<text class=\"on\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            (x0 + x1) / 2.0,
            y + height - 7.0,
            escape(&fitting)
        );
    }
    svg
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_shows_what_fits() {
        let bar = |end: f64| Bar { start: 0.0, end, class: "pf", label: "F12".into(), title: "a & b".into() };
        let rows =
            |end| vec![Row { name: "d".into(), bars: vec![bar(end)], lanes: vec![], note: String::new() }];
        let svg = |end| {
            let gantt = Gantt {
                rows: rows(end),
                end: 100.0,
                bound: Some(50.0),
                unit: |t| t.to_string(),
                about: String::new(),
            };
            gantt.render(1000.0)
        };
        assert!(svg(10.0).contains(">F12</text>") && svg(1.5).contains(">F</text>"));
        assert!(!svg(0.1).contains("class=\"on\""));
        assert!(svg(10.0).contains("a &amp; b") && svg(10.0).contains("bound 50"));
    }
}
