//! A schedule as text: a row per device, time to the right.
//!
//! ```text
//! device 0  F0 F1 ............BW0   BW1
//!   sends     >>>>>>                            activations >, gradients <
//! device 1  ......F0 BW0   F1 BW1   ......      idle .
//! ```

use std::fmt::Write as _;

use crossmesh_core::id::DeviceId;
use crossmesh_core::schedule::{Pass, PassKind, Span, Via};

use super::{Timetable, number, percent};

/// More rows than this are left out.
const MAX_ROWS: usize = 64;
/// Fewer columns than this show nothing.
pub const MIN_WIDTH: usize = 20;

/// Where a time stands on the line.
#[derive(Clone, Copy)]
struct Scale {
    columns_per_unit: f64,
    columns: usize,
}

impl Scale {
    /// Wide enough that every pass shows its number, if that fits into `width`; otherwise as wide as that.
    fn new(table: &Timetable, width: usize) -> Self {
        let mut columns_wanted = 0.0f64;
        let mut shortest = f64::INFINITY;
        for (order, spans) in table.schedule.devices().iter().zip(&table.timed.spans) {
            for (pass, span) in order.iter().zip(spans) {
                let length = span.end - span.start;
                if length > 0.0 {
                    shortest = shortest.min(length);
                    columns_wanted = columns_wanted.max((label(table, *pass).len() + 1) as f64 / length);
                }
            }
        }
        let end = table.makespan();
        let widest = if end > 0.0 { width as f64 / end } else { 1.0 };
        // Whole columns for the shortest pass, where there are any: equal passes then look equal.
        let columns_per_unit = match (shortest.is_finite(), (columns_wanted * shortest - 1e-9).ceil()) {
            (true, wanted) if wanted / shortest <= widest => wanted / shortest,
            (true, _) if widest * shortest >= 1.0 => (widest * shortest).floor() / shortest,
            _ => widest,
        };
        let columns = ((end * columns_per_unit).round() as usize).max(1);
        Self { columns_per_unit, columns }
    }

    fn columns(self, span: Span) -> std::ops::Range<usize> {
        let at = |time: f64| ((time * self.columns_per_unit).round() as usize).min(self.columns);
        at(span.start)..at(span.end)
    }
}

/// `F3`, or `f3` on the second chunk of a device.
fn label(table: &Timetable, pass: Pass) -> String {
    let letters = pass.kind.letters();
    let odd = table.schedule.placement().chunk(pass.stage) % 2 == 1;
    let letters = if odd { letters.to_lowercase() } else { letters.to_string() };
    format!("{letters}{}", pass.microbatch.0)
}

pub fn draw(table: &Timetable, width: usize) -> String {
    let scale = Scale::new(table, width.max(MIN_WIDTH));
    let devices: Vec<DeviceId> = table.schedule.placement().devices().collect();
    let name_width = devices.last().map_or(0, |d| d.to_string().len()).max("  sends".len());
    let mut text = String::new();
    for &device in devices.iter().take(MAX_ROWS) {
        let name = device.to_string();
        let row = passes(table, device, scale);
        let _ = writeln!(
            text,
            "{name:name_width$}  {row}  idle {:>6}  peak {}",
            percent(table.timed.device_bubble(device)),
            number(table.shares[device.index()])
        );
        if let Some(lane) = sends(table, device, scale) {
            let _ = writeln!(text, "{:name_width$}  {}", "  sends", lane.trim_end());
        }
    }
    text + &crate::output::and_more(devices.len(), MAX_ROWS, "device")
}

fn passes(table: &Timetable, device: DeviceId, scale: Scale) -> String {
    let d = device.index();
    let mut cells = vec!['.'; scale.columns];
    for (&pass, &span) in table.schedule.devices()[d].iter().zip(&table.timed.spans[d]) {
        if pass.kind.is_move() {
            continue;
        }
        let (columns, label) = (scale.columns(span), label(table, pass));
        let letter = label.chars().next().unwrap_or('?');
        match columns.len() >= label.len() {
            true => {
                cells[columns.clone()].fill(' ');
                cells[columns].iter_mut().zip(label.chars()).for_each(|(cell, c)| *cell = c);
            }
            false => cells[columns].fill(letter),
        }
    }
    cells.into_iter().collect()
}

/// What leaves the device, and what it moves away and back.
fn sends(table: &Timetable, device: DeviceId, scale: Scale) -> Option<String> {
    let mut cells = vec![' '; scale.columns];
    let mut any = false;
    let mut mark = |span: Span, letter: char| {
        let columns = scale.columns(span);
        any |= !columns.is_empty();
        for cell in &mut cells[columns] {
            *cell = if *cell == ' ' || *cell == letter { letter } else { 'x' };
        }
    };
    for message in table.timed.messages.iter().filter(|m| m.from == device) {
        mark(message.span, if matches!(message.via, Via::Activation(_)) { '>' } else { '<' });
    }
    let d = device.index();
    for (pass, span) in table.schedule.devices()[d].iter().zip(&table.timed.spans[d]) {
        match pass.kind {
            PassKind::Evict | PassKind::Offload => mark(*span, 'v'),
            PassKind::Load => mark(*span, '^'),
            _ => {}
        }
    }
    any.then(|| cells.into_iter().collect())
}

/// What the letters mean, as far as they occur.
pub fn legend(table: &Timetable) -> String {
    let has = |kind| table.schedule.devices().iter().flatten().any(|p| p.kind == kind);
    let mut words = vec!["F forward"];
    for (kind, word) in [
        (PassKind::B, "B backward for inputs"),
        (PassKind::W, "W backward for weights"),
        (PassKind::BW, "BW backward"),
    ] {
        if has(kind) {
            words.push(word);
        }
    }
    if table.schedule.placement().num_chunks() > 1 {
        words.push("small letters: every second chunk");
    }
    if !table.timed.messages.is_empty() {
        words.push("> activations, < gradients on their way, x both");
    }
    words.push(". idle");
    words.join(", ")
}
