//! The pages of schedules: one, or several one below the other.

use std::fmt::Write as _;

use crossmesh_core::id::DeviceId;
use crossmesh_core::schedule::{PassKind, Via};

use crate::timetable::{Timetable, causes, doc, number, percent};

use super::gantt::{self, Bar, Gantt, Row};
use super::{Page, card, escape};

/// More rows than this are left out.
const MAX_ROWS: usize = 64;

fn class(kind: PassKind) -> &'static str {
    match kind {
        PassKind::F => "pf",
        PassKind::B => "pb",
        PassKind::W => "pw",
        PassKind::BW => "pbw",
        _ => "po",
    }
}

/// The timeline of a schedule, on an axis that ends at `end`.
pub fn timeline(table: &Timetable, end: f64) -> String {
    picture(table, end).render(gantt::WIDTH)
}

/// The same as a figure for a paper.
pub fn figure(table: &Timetable) -> String {
    super::figure::gantt(&picture(table, table.makespan()))
}

fn picture(table: &Timetable, end: f64) -> Gantt {
    let devices = table.schedule.placement().devices().take(MAX_ROWS);
    Gantt {
        rows: devices.map(|device| row(table, device)).collect(),
        end: end.max(table.makespan()),
        bound: Some(table.bound),
        unit: number,
        about: format!("{}: every pass of every device over time", table.schedule.name()),
    }
}

fn row(table: &Timetable, device: DeviceId) -> Row {
    let d = device.index();
    let placement = table.schedule.placement();
    let mut bars = Vec::new();
    let mut moves = Vec::new();
    for (pass, span) in table.schedule.devices()[d].iter().zip(&table.timed.spans[d]) {
        let chunk = placement.chunk(pass.stage);
        let letters = pass.kind.letters();
        let letters = if chunk % 2 == 1 { letters.to_lowercase() } else { letters.to_string() };
        let title = format!("{pass}: {} to {}", number(span.start), number(span.end));
        let label = format!("{letters}{}", pass.microbatch.0);
        let class = match (pass.kind, chunk % 2) {
            (PassKind::F, 1) => "pf odd",
            (PassKind::B, 1) => "pb odd",
            (PassKind::W, 1) => "pw odd",
            (PassKind::BW, 1) => "pbw odd",
            (kind, _) => class(kind),
        };
        let bar = Bar { start: span.start, end: span.end, class, label, title };
        if pass.kind.is_move() { moves.push(bar) } else { bars.push(bar) }
    }
    let lanes = [lane(table, device, true), lane(table, device, false), moves];
    let note =
        format!("idle {}, peak {}", percent(table.timed.device_bubble(device)), number(table.shares[d]));
    Row { name: device.to_string(), bars, lanes: lanes.into_iter().filter(|l| !l.is_empty()).collect(), note }
}

/// What a device sends: activations, or gradients.
fn lane(table: &Timetable, device: DeviceId, activations: bool) -> Vec<Bar> {
    let of = |message: &&crossmesh_core::schedule::Message| {
        message.from == device && matches!(message.via, Via::Activation(_)) == activations
    };
    let (what, class) = if activations { ("activation", "act") } else { ("gradient", "grad") };
    let bar = |m: &crossmesh_core::schedule::Message| Bar {
        start: m.span.start,
        end: m.span.end,
        class,
        label: String::new(),
        title: format!(
            "{what} of {} to {}: {} to {}",
            m.microbatch,
            m.to,
            number(m.span.start),
            number(m.span.end)
        ),
    };
    table.timed.messages.iter().filter(of).map(bar).collect()
}

pub const LEGEND: &str = "<div class=\"legend\">\
<span><i class=\"kf\"></i>F forward</span><span><i class=\"kb\"></i>B backward for inputs</span>\
<span><i class=\"kw\"></i>W backward for weights</span><span><i class=\"kbw\"></i>BW both in one</span>\
<span>small letters: every second chunk</span>\
<span><i style=\"background:var(--act)\"></i>activations on their way</span>\
<span><i style=\"background:var(--grad)\"></i>gradients on their way</span></div>\n";

/// The page of one schedule.
pub fn render(table: &Timetable, provenance: Vec<String>) -> String {
    let (highest, device) = table.highest();
    let mut body = String::from("<div class=\"cards\">\n");
    body += &card(&number(table.makespan()), "makespan", "");
    body += &card(&percent(table.timed.bubble()), "bubble", "");
    body += &card(&percent(table.timed.inner_bubble()), "bubble inside a step", "");
    body += &card(&number(table.bound), "the bound: no schedule is shorter", "bound");
    body += &card(&number(highest), &format!("activations of its layers at most, {device}"), "");
    let _ = write!(
        body,
        "</div>\n<h2>Timeline</h2>\n{LEGEND}<p class=\"note\">Idle: {}.<br>Busiest: {}.<br>Critical path: {}.</p>\n<div class=\"panel\">\n{}</div>\n",
        escape(&causes(&table.causes())),
        table.busiest_in_words(),
        escape(&table.path_in_words()),
        timeline(table, table.makespan())
    );
    Page {
        title: format!("Schedule {}", table.schedule.name()),
        subtitle: escape(&table.size()),
        body,
        data: serde_json::to_value(doc::document(table)).unwrap_or_default(),
        footer: provenance,
    }
    .render()
}

/// The page of several, with a table above their timelines. `rows` are the cells of the table.
pub fn render_all(
    title: &str,
    subtitle: &str,
    header: &[String],
    rows: &[Vec<String>],
    tables: &[&Timetable],
    provenance: Vec<String>,
) -> String {
    let mut body = String::from("<div class=\"panel\">\n<table class=\"tight\">\n<tr>");
    let cell = |tag: &str, at: usize, text: &String| {
        let words = at == 0 || at + 1 == header.len();
        let class = if words { "" } else { " class=\"num\"" };
        format!("<{tag}{class}>{}</{tag}>", escape(text))
    };
    body.extend(header.iter().enumerate().map(|(at, text)| cell("th", at, text)));
    body += "</tr>\n";
    for row in rows {
        let cells: String = row.iter().enumerate().map(|(at, text)| cell("td", at, text)).collect();
        let _ = writeln!(body, "<tr>{cells}</tr>");
    }
    let _ = write!(body, "</table>\n</div>\n<h2>Timelines</h2>\n{LEGEND}");
    let longest = tables.iter().map(|table| table.makespan()).fold(0.0, f64::max);
    for table in tables {
        let _ = write!(
            body,
            "<div class=\"panel\"><h3>{}<span class=\"over\">makespan {}, bubble {} ({})</span></h3>\n{}</div>\n<p></p>\n",
            escape(table.schedule.name()),
            number(table.makespan()),
            percent(table.timed.bubble()),
            escape(&causes(&table.causes())),
            timeline(table, longest)
        );
    }
    let data: Vec<_> = tables.iter().map(|table| doc::document(table)).collect();
    Page {
        title: title.into(),
        subtitle: escape(subtitle),
        body,
        data: serde_json::to_value(data).unwrap_or_default(),
        footer: provenance,
    }
    .render()
}
