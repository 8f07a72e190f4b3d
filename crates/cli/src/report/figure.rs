//! Figures for papers: one SVG file each, as wide as a column (85 mm), black text on white, no style sheet, no script.
//!
//! A unit is a point, so what is written in 6.5 units is 6.5 pt on paper; nothing is smaller than 6 pt. Colours are given as they are,
//! because not every program that reads SVG knows CSS variables.
//!
//! ```text
//!  0        34                                    241 pt = 85 mm
//!  device 0 |0123....|                             name, then the time axis
//!           0    10    20  ¦ bound 24              ticks, and the bound as a dashed line
//!  [] F  [] B  [] W                                what the colours mean, as far as they occur
//! ```

use std::fmt::Write as _;

use crossmesh_core::units::Seconds;

use crate::links::Kind;
use crate::predict::Prediction;

use super::gantt::{Bar, Gantt, Row};
use super::{escape, ticks, timeline};

/// 85 mm in points.
const WIDTH: f64 = 240.94;
const RIGHT: f64 = WIDTH - 5.0;
/// Points of text. Papers ask for 6 at least.
const TEXT: f64 = 6.5;
const SMALL: f64 = 6.0;
/// A letter's width as a share of its height, generously.
const LETTER: f64 = 0.56;
const TOP: f64 = 11.0;

fn text_width(text: &str, size: f64) -> f64 {
    text.chars().count() as f64 * size * LETTER
}

fn text(x: f64, y: f64, size: f64, anchor: &str, words: &str) -> String {
    format!(
        "<text x=\"{x:.2}\" y=\"{y:.2}\" font-size=\"{size}\" text-anchor=\"{anchor}\">{}</text>\n",
        escape(words)
    )
}

/// The whole file.
fn frame(about: &str, height: f64, body: &str) -> String {
    let mm = height * 85.0 / WIDTH;
    format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
         <svg xmlns=\"http://www.w3.org/2000/svg\" width=\"85mm\" height=\"{mm:.2}mm\" viewBox=\"0 0 {WIDTH} {height:.2}\" \
         font-family=\"Helvetica, Arial, 'Liberation Sans', sans-serif\" fill=\"#000000\">\n<title>{}</title>\n\
         <rect width=\"{WIDTH}\" height=\"{height:.2}\" fill=\"#ffffff\"/>\n{body}</svg>\n",
        escape(about)
    )
}

/// A time axis from `left` to the right end.
struct Axis {
    left: f64,
    end: f64,
}

impl Axis {
    fn x(&self, time: f64) -> f64 {
        let share = if self.end > 0.0 { (time / self.end).clamp(0.0, 1.0) } else { 0.0 };
        self.left + (RIGHT - self.left) * share
    }

    /// Lines and labels; a label that would touch the one before is left out.
    fn ticks(&self, bottom: f64, unit: fn(f64) -> String) -> String {
        let mut svg = String::new();
        let mut free = 0.0;
        for tick in ticks(self.end, 6) {
            let (x, label) = (self.x(tick), if tick == 0.0 { "0".into() } else { unit(tick) });
            let half = text_width(&label, SMALL) / 2.0;
            // At the right end a label stays inside the picture.
            let at = x.min(WIDTH - 1.0 - half);
            let _ = writeln!(
                svg,
                "<line x1=\"{x:.2}\" x2=\"{x:.2}\" y1=\"{TOP}\" y2=\"{bottom:.2}\" stroke=\"#d5d9e0\" stroke-width=\"0.4\"/>"
            );
            if at - half >= free {
                svg += &text(at, bottom + SMALL + 2.0, SMALL, "middle", &label);
                free = at + half + 3.0;
            }
        }
        svg
    }

    /// A dashed line from above, its name beside it, where there is room.
    fn mark(&self, time: f64, bottom: f64, name: &str) -> String {
        let x = self.x(time);
        let fits_left = x - text_width(name, TEXT) - 3.0 >= 0.0;
        let (at, anchor) = if fits_left { (x - 2.0, "end") } else { (x + 2.0, "start") };
        format!(
            "<line x1=\"{x:.2}\" x2=\"{x:.2}\" y1=\"2\" y2=\"{bottom:.2}\" stroke=\"#000000\" stroke-width=\"0.7\" \
             stroke-dasharray=\"2.4 1.4\"/>\n{}",
            text(at, TOP - 3.5, TEXT, anchor, name)
        )
    }
}

/// What colours mean, from left to right and further below where a line is full. Returns the height too.
fn legend(top: f64, entries: &[(&str, &str)]) -> (String, f64) {
    let (mut svg, mut x, mut y) = (String::new(), 4.0, top + TEXT + 3.0);
    for (colour, words) in entries {
        let width = 9.0 + text_width(words, TEXT) + 6.0;
        if x > 4.0 && x + width > WIDTH {
            (x, y) = (4.0, y + TEXT + 2.5);
        }
        let _ = writeln!(
            svg,
            "<rect x=\"{x:.2}\" y=\"{:.2}\" width=\"6\" height=\"6\" fill=\"{colour}\"/>",
            y - 5.5
        );
        svg += &text(x + 8.0, y, TEXT, "start", words);
        x += width;
    }
    (svg, if entries.is_empty() { 0.0 } else { y - top + 4.0 })
}

/// A class of the reports' style sheet as a colour on white, the colour of text on it, and what it means.
fn meaning(class: &str) -> (&'static str, &'static str, &'static str) {
    match class {
        "pf" => ("#2f6fd0", "#ffffff", "F"),
        "pf odd" => ("#8fb3ea", "#000000", "F, every second chunk"),
        "pb" => ("#0f8a7e", "#ffffff", "B (inputs)"),
        "pb odd" => ("#7cc7bf", "#000000", "B, every second chunk"),
        "pw" => ("#a8730c", "#ffffff", "W (weights)"),
        "pw odd" => ("#dcb874", "#000000", "W, every second chunk"),
        "pbw" => ("#6b5bb5", "#ffffff", "BW (both)"),
        "pbw odd" => ("#b3a9e0", "#000000", "BW, every second chunk"),
        "act" => ("#b53b9d", "#ffffff", "activations sent"),
        "grad" => ("#6a8526", "#ffffff", "gradients sent"),
        _ => ("#5d6678", "#ffffff", "other"),
    }
}

/// The rows of passes, with the microbatch on every pass that has room for it.
pub fn gantt(gantt: &Gantt) -> String {
    const BAR: f64 = 10.0;
    const LANE: f64 = 2.2;
    let names = gantt.rows.iter().map(|row| text_width(&row.name, TEXT)).fold(0.0, f64::max);
    let axis = Axis { left: names + 5.0, end: gantt.end };
    let mut body = String::new();
    let mut y = TOP;
    for row in &gantt.rows {
        body += &text(axis.left - 3.0, y + BAR - 2.6, TEXT, "end", &row.name);
        row.bars.iter().for_each(|bar| body += &block(bar, &axis, y, BAR));
        for (lane, bars) in row.lanes.iter().enumerate() {
            let top = y + BAR + 0.4 + LANE * lane as f64;
            bars.iter().for_each(|bar| body += &block(bar, &axis, top, LANE - 0.4));
        }
        y += BAR + LANE * row.lanes.len() as f64 + 2.0;
    }
    let mark = gantt.bound.filter(|b| *b > 0.0 && *b <= gantt.end);
    let mark = mark.map(|bound| axis.mark(bound, y, &format!("bound {}", (gantt.unit)(bound))));
    let (key, key_height) = legend(y + SMALL + 3.0, &entries(&gantt.rows));
    // The bound is behind the bars: it would cross their numbers.
    let svg = axis.ticks(y, gantt.unit) + &mark.unwrap_or_default() + &body + &key;
    frame(&gantt.about, y + SMALL + 3.0 + key_height, &svg)
}

/// What occurs, in the order of first sight.
fn entries(rows: &[Row]) -> Vec<(&'static str, &'static str)> {
    let mut seen = Vec::new();
    let bars = rows.iter().flat_map(|row| row.bars.iter().chain(row.lanes.iter().flatten()));
    for (colour, _, words) in bars.map(|bar| meaning(bar.class)) {
        if !seen.contains(&(colour, words)) {
            seen.push((colour, words));
        }
    }
    seen.sort_by_key(|(_, words)| words.len() > 12);
    seen
}

fn block(bar: &Bar, axis: &Axis, y: f64, height: f64) -> String {
    let (x0, x1) = (axis.x(bar.start), axis.x(bar.end));
    let (colour, ink, _) = meaning(bar.class);
    let mut svg = format!(
        "<rect x=\"{x0:.2}\" y=\"{y:.2}\" width=\"{:.2}\" height=\"{height:.2}\" fill=\"{colour}\"/>\n",
        (x1 - x0 - 0.25).max(0.15)
    );
    let number: String = bar.label.chars().filter(char::is_ascii_digit).collect();
    if height > SMALL && !number.is_empty() && text_width(&number, SMALL) <= x1 - x0 - 0.3 {
        let _ = writeln!(
            svg,
            "<text x=\"{:.2}\" y=\"{:.2}\" font-size=\"{SMALL}\" text-anchor=\"middle\" fill=\"{ink}\">{number}</text>",
            (x0 + x1) / 2.0,
            y + height / 2.0 + 2.1
        );
    }
    svg
}

/// NICs over time: the share of its rate that each carries, as height.
pub fn links(prediction: &Prediction) -> String {
    const ROW: f64 = 12.0;
    let rows = timeline::rows(prediction);
    let names = rows.iter().map(|row| text_width(&timeline::shortened(&row.name), TEXT)).fold(0.0, f64::max);
    let (end, bound) = (prediction.seconds(), prediction.bound.seconds);
    let axis = Axis { left: names + 5.0, end: end.max(bound) };
    let mut body = String::new();
    for (at, row) in rows.iter().enumerate() {
        let base = TOP + ROW * (at + 1) as f64 - 1.5;
        body += &text(axis.left - 3.0, base - 2.0, TEXT, "end", &timeline::shortened(&row.name));
        let (x, width, full) = (axis.left, RIGHT - axis.left, ROW - 3.0);
        let _ = writeln!(
            body,
            "<rect x=\"{x:.2}\" y=\"{:.2}\" width=\"{width:.2}\" height=\"{full}\" fill=\"#eef1f5\"/>",
            base - full
        );
        let mut path = String::new();
        for busy in timeline::resampled(&row.busy, end) {
            let top = base - full * busy.share.clamp(0.0, 1.0);
            let (x0, x1) = (axis.x(busy.start_s), axis.x(busy.end_s));
            let _ = write!(path, "M{x0:.2} {base:.2}V{top:.2}H{x1:.2}V{base:.2}Z");
        }
        let _ = writeln!(body, "<path d=\"{path}\" fill=\"{}\"/>", link_colour(row.kind).0);
    }
    let bottom = TOP + ROW * rows.len() as f64;
    let mut key: Vec<(&str, &str)> = vec![];
    for kind in rows.iter().map(|row| link_colour(row.kind)) {
        if !key.contains(&kind) {
            key.push(kind);
        }
    }
    let (key, key_height) = legend(bottom + SMALL + 3.0, &key);
    let mark = axis.mark(bound, bottom, &format!("bound {}, takes {}", Seconds(bound), Seconds(end)));
    let svg = axis.ticks(bottom, |t| Seconds(t).to_string()) + &body + &mark + &key;
    frame("the use of each NIC over time", bottom + SMALL + 3.0 + key_height, &svg)
}

fn link_colour(kind: Kind) -> (&'static str, &'static str) {
    match kind {
        Kind::Out => ("#2f6fd0", "out of a NIC"),
        Kind::In => ("#0f8a7e", "into a NIC"),
        Kind::Tier => ("#8a4fb3", "a tier of switches"),
        Kind::Local => ("#a8730c", "inside a host"),
    }
}

/// One thing among others that took so long.
pub struct Length<'a> {
    pub name: &'a str,
    pub length: f64,
    /// Said at the end of its bar.
    pub note: String,
    pub marked: bool,
}

/// A bar for each, and a bound that none is below; `marked` says what the dark ones are.
pub fn lengths(rows: &[Length<'_>], bound: f64, marked: &str, about: &str) -> String {
    const ROW: f64 = 10.0;
    let left = 6.0 + rows.iter().map(|row| text_width(row.name, TEXT)).fold(0.0, f64::max);
    // The longest bar leaves room for what is said at its end.
    let room = |row: &Length<'_>| RIGHT - left - text_width(&row.note, SMALL) - 4.0;
    let end = rows.iter().map(|row| row.length * (RIGHT - left) / room(row).max(1.0)).fold(bound, f64::max);
    let (axis, bottom) = (Axis { left, end }, TOP + ROW * rows.len() as f64);
    let (dark, light) = ("#2c3442", "#a9b6c9");
    let mut body = axis.ticks(bottom, crate::timetable::number);
    for (at, row) in rows.iter().enumerate() {
        let y = TOP + ROW * at as f64;
        let (x, fill) = (axis.x(row.length), if row.marked { dark } else { light });
        body += &text(left - 3.0, y + 7.0, TEXT, "end", row.name);
        let width = x - left;
        let _ = writeln!(
            body,
            "<rect x=\"{left:.2}\" y=\"{:.2}\" width=\"{width:.2}\" height=\"{:.2}\" fill=\"{fill}\"/>",
            y + 1.0,
            ROW - 2.0
        );
        // No line of the grid goes through what is said.
        let _ = writeln!(
            body,
            "<rect x=\"{:.2}\" y=\"{:.2}\" width=\"{:.2}\" height=\"{:.2}\" fill=\"#ffffff\"/>",
            x + 1.0,
            y + 1.0,
            text_width(&row.note, SMALL) + 2.0,
            ROW - 2.0
        );
        body += &text(x + 2.0, y + 7.0, SMALL, "start", &row.note);
    }
    body += &axis.mark(bound, bottom, &format!("bound {}", crate::timetable::number(bound)));
    let below = bottom + SMALL + 3.0;
    let (key, key_height) = legend(below, &[(dark, marked)]);
    frame(about, below + key_height, &(body + &key))
}

/// A curve over steps: every point faintly, their mean on top, and a value that cannot be beaten.
pub fn curve(
    points: &[(f64, f64)],
    smooth: &[(f64, f64)],
    floor: Option<(f64, &str)>,
    about: &str,
) -> String {
    const HEIGHT: f64 = 120.0;
    let Some((&(first, _), &(last, _))) = points.first().zip(points.last()) else {
        return frame(about, 20.0, &text(4.0, 12.0, TEXT, "start", "no step was recorded"));
    };
    let values = points.iter().map(|p| p.1).chain(floor.map(|f| f.0));
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
    let pad = 0.05 * (high - low).max(1e-9);
    let (low, span) = (low - pad, high - low + 2.0 * pad);
    let left = 4.0 + TEXT + text_width(&format!("{high:.2}"), SMALL);
    let bottom = TOP + HEIGHT;
    let x = |step: f64| left + (RIGHT - left) * (step - first) / (last - first).max(1.0);
    let y = |value: f64| TOP + HEIGHT * (1.0 - (value - low) / span);
    let mut svg = String::new();
    let step = ticks(span, 5).get(1).copied().unwrap_or(span);
    for value in (0..).map(|i| ((low / step).ceil() + f64::from(i)) * step).take_while(|v| *v <= low + span) {
        let at = y(value);
        let _ = writeln!(
            svg,
            "<line x1=\"{left:.2}\" x2=\"{RIGHT:.2}\" y1=\"{at:.2}\" y2=\"{at:.2}\" stroke=\"#d5d9e0\" stroke-width=\"0.4\"/>"
        );
        svg += &text(left - 2.5, at + 2.1, SMALL, "end", &format!("{value:.2}"));
    }
    for tick in ticks(last, 6).into_iter().filter(|t| *t >= first && t.fract() == 0.0) {
        let at = x(tick).min(WIDTH - 1.0 - text_width(&tick.to_string(), SMALL) / 2.0);
        svg += &text(at, bottom + SMALL + 2.0, SMALL, "middle", &tick.to_string());
    }
    svg += &text((left + RIGHT) / 2.0, bottom + 2.0 * SMALL + 5.0, TEXT, "middle", "step");
    let (middle, about_text) = (TOP + HEIGHT / 2.0, escape(about));
    let _ = writeln!(
        svg,
        "<text x=\"{TEXT}\" y=\"{middle}\" font-size=\"{TEXT}\" text-anchor=\"middle\" transform=\"rotate(-90 {TEXT} {middle})\">{about_text}</text>"
    );
    for (line, width, opacity) in [(points, 0.4, 0.4), (smooth, 1.0, 1.0)] {
        let every = line.len().div_ceil(1200).max(1);
        let shown = line.iter().step_by(every).chain(line.last());
        let path: Vec<String> = shown.map(|p| format!("{:.2},{:.2}", x(p.0), y(p.1))).collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"#2c3442\" stroke-width=\"{width}\" stroke-opacity=\"{opacity}\"/>",
            path.join(" ")
        );
    }
    if let Some((value, words)) = floor {
        let at = y(value);
        let _ = writeln!(
            svg,
            "<line x1=\"{left:.2}\" x2=\"{RIGHT:.2}\" y1=\"{at:.2}\" y2=\"{at:.2}\" stroke=\"#000000\" stroke-width=\"0.7\" stroke-dasharray=\"2.4 1.4\"/>"
        );
        // Above the picture: a curve that has come near the line would run through what stands beside it.
        svg += &text(RIGHT, TOP - 3.5, TEXT, "end", words);
        let key = RIGHT - text_width(words, TEXT) - 3.0;
        let _ = writeln!(
            svg,
            "<line x1=\"{:.2}\" x2=\"{key:.2}\" y1=\"{y:.2}\" y2=\"{y:.2}\" stroke=\"#000000\" stroke-width=\"0.7\" stroke-dasharray=\"2.4 1.4\"/>",
            key - 12.0,
            y = TOP - 5.5
        );
    }
    frame(about, bottom + 2.0 * SMALL + 8.0, &svg)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_and_what_is_said_of_them_stay_inside() {
        let row = |name, length, marked| Length { name, length, note: format!("peak {length}"), marked };
        let rows = [row("gpipe", 40.0, false), row("interleaved-1f1b", 1234.5, true)];
        let svg = lengths(&rows, 30.0, "on the front", "schedules");
        assert!(svg.contains("width=\"85mm\"") && sizes(&svg).iter().all(|size| *size >= 6.0), "{svg}");
        for line in svg.lines().filter(|line| line.contains("peak")) {
            let x: f64 = line.split("x=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap();
            let note = line.split('>').nth(1).unwrap().split('<').next().unwrap();
            assert!(x + text_width(note, SMALL) <= WIDTH, "{line}");
        }
        assert!(svg.contains("bound 30") && svg.contains("on the front"));
    }

    /// Every size of text in a file.
    fn sizes(svg: &str) -> Vec<f64> {
        let after = svg.split("font-size=\"").skip(1);
        after.map(|rest| rest.split('"').next().unwrap().parse().unwrap()).collect()
    }

    fn sample(microbatches: u32) -> Gantt {
        let bar = |m: u32| Bar {
            start: f64::from(m),
            end: f64::from(m + 1),
            class: if m.is_multiple_of(2) { "pf" } else { "pb odd" },
            label: format!("F{m}"),
            title: String::new(),
        };
        let row = |d: u32| Row {
            name: format!("device {d}"),
            bars: (0..microbatches).map(bar).collect(),
            lanes: vec![vec![bar(0)]],
            note: String::new(),
        };
        let (end, bound) = (f64::from(microbatches), Some(1.0));
        Gantt { rows: (0..4).map(row).collect(), end, bound, unit: |t| t.to_string(), about: "a < b".into() }
    }

    #[test]
    fn text_is_legible_at_column_width_and_numbers_only_stand_where_they_fit() {
        for microbatches in [4, 40, 400] {
            let svg = gantt(&sample(microbatches));
            assert!(svg.contains("width=\"85mm\"") && sizes(&svg).iter().all(|size| *size >= 6.0));
            assert!(
                !svg.contains("var(") && !svg.contains("class="),
                "other programs know no style sheet of ours"
            );
            assert!(svg.contains("a &lt; b"));
        }
        assert!(
            gantt(&sample(4)).contains(">3</text>") && !gantt(&sample(400)).contains("fill=\"#ffffff\">")
        );
    }

    /// The loss of a run that has come down to what is possible, and is now above, now below it.
    fn converged(floor: f64) -> Vec<(f64, f64)> {
        let loss = |step: f64| floor + 2.0 * (-step / 40.0).exp() + 0.03 * (step * 2.4).sin();
        (0..300).map(|step| (f64::from(step), loss(f64::from(step)))).collect()
    }

    #[test]
    fn no_curve_runs_through_the_name_of_its_line() {
        for floor in [0.5, 1.1453, 10.0] {
            let (points, words) = (converged(floor), format!("best possible {floor:.4}"));
            let svg = curve(&points, &points, Some((floor, &words)), "loss");
            let number = |line: &str, name: &str| -> f64 {
                let said = line.split(&format!(" {name}=\"")).nth(1).unwrap();
                said.split('"').next().unwrap().parse().unwrap()
            };
            let label = svg.lines().find(|line| line.contains(&words)).unwrap();
            let (right, base) = (number(label, "x"), number(label, "y"));
            let (left, top) = (right - text_width(&words, TEXT), base - TEXT);
            let lines = svg.lines().filter_map(|line| line.split("points=\"").nth(1));
            let points: Vec<(f64, f64)> = lines
                .flat_map(|points| points.split('"').next().unwrap().split(' '))
                .map(|point| point.split_once(',').unwrap())
                .map(|(x, y)| (x.parse().unwrap(), y.parse().unwrap()))
                .collect();
            assert!(points.len() > 200 && top >= 0.0 && right <= WIDTH, "{label}");
            for (x, y) in points {
                let inside = (left..=right).contains(&x) && (top..=base + 0.25 * TEXT).contains(&y);
                assert!(!inside, "the curve is at {x}, {y}, inside of {label}");
            }
        }
    }

    #[test]
    fn curves_may_be_empty_or_a_point() {
        assert!(curve(&[], &[], None, "loss").contains("no step was recorded"));
        let one = curve(&[(1.0, 2.0)], &[(1.0, 2.0)], Some((1.5, "best possible")), "loss");
        assert!(one.contains("best possible") && !one.contains("NaN"), "{one}");
        assert!(sizes(&one).iter().all(|size| *size >= 6.0));
    }
}
