//! Timelines of passes as SVG: a row per device or rank, a bar per pass with its letter and colour, thin lanes below for what is on
//! its way, gaps where nothing is computed.
//!
//! It knows neither schedules nor traces: whoever has something to show says where the bars are.

use std::fmt::Write as _;

use super::{escape, ticks};

const LEFT: f64 = 96.0;
/// What is said behind a row.
const RIGHT: f64 = 150.0;
/// The longest time axis of a page.
pub const WIDTH: f64 = super::MOST_WIDTH - LEFT - RIGHT;
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
        let (whole_width, whole_height) = (LEFT + width + RIGHT, bottom + 26.0);
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
        let places = || {
            self.rows.iter().scan(TOP, |y, row| {
                let at = *y;
                *y += height(row);
                Some((row, at))
            })
        };
        places().for_each(|(row, y)| svg += &render_track(row, y, width));
        // Behind the bars: it would cross their labels.
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
        places().for_each(|(row, y)| svg += &render_row(row, y, &x));
        svg + "</svg>\n"
    }
}

/// A row's name, the stretch of time, and what is said behind it.
fn render_track(row: &Row, y: f64, width: f64) -> String {
    let (text_y, name_x, note_x) = (y + BAR - 7.0, LEFT - 10.0, LEFT + width + 8.0);
    format!(
        "<text x=\"{name_x}\" y=\"{text_y}\" text-anchor=\"end\">{}</text>\n\
         <rect class=\"track\" x=\"{LEFT}\" y=\"{y:.1}\" width=\"{width}\" height=\"{BAR}\"/>\n\
         <text class=\"soft\" x=\"{note_x}\" y=\"{text_y}\">{}</text>\n",
        escape(&row.name),
        escape(&row.note)
    )
}

fn render_row(row: &Row, y: f64, x: &dyn Fn(f64) -> f64) -> String {
    let mut svg = String::from("<g>\n");
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
    let letters: String = bar.label.chars().filter(|c| c.is_alphabetic()).collect();
    let fitting = if width >= label_width(&bar.label) { &bar.label } else { &letters };
    if labelled && width >= label_width(fitting) {
        let _ = writeln!(
            svg,
            "<text class=\"{}\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            if bar.class.ends_with(" odd") { "onodd" } else { "on" },
            (x0 + x1) / 2.0,
            y + height - 7.0,
            escape(fitting)
        );
    }
    svg
}

/// How wide a label may come out in whatever font a browser has: its letters and digits are up to 7.7 units wide, a W 12.
fn label_width(label: &str) -> f64 {
    label.chars().map(|c| if matches!(c, 'W' | 'w') { 12.0 } else { 7.7 }).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_is_behind_the_bars() {
        let bar = Bar { start: 0.0, end: 9.0, class: "pf", label: "F0".into(), title: String::new() };
        let rows = vec![Row { name: "d".into(), bars: vec![bar], lanes: vec![], note: String::new() }];
        let unit = |t: f64| t.to_string();
        let gantt = Gantt { rows, end: 10.0, bound: Some(5.0), unit, about: String::new() };
        let svg = gantt.render(1000.0);
        let at = |what: &str| svg.find(what).unwrap();
        assert!(at("class=\"track\"") < at("boundline") && at("boundline") < at("class=\"pf\""), "{svg}");
    }

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
