//! torch's pipelining CSV: a line per device, a cell per action, as `_PipelineScheduleRuntime._load_csv` reads it.
//!
//! ```text
//! ours   2F0  2B0  2W0  2BW0                       both   (0F5;7B3)OVERLAP_F_B, a pair that starts together
//! torch  2F0  2I0  2W0  2B0
//! ```
//! A file with communication (`compute_comms`) has cells such as `2SEND_F0` too. They are written where this schedule's
//! times put them, and skipped when read: what a pass waits for is known without.

use std::fmt::Write as _;

use crate::id::{DeviceId, MicrobatchId};

use super::{CheckError, Costs, Pass, PassKind, Placement, Routes, Schedule, ScheduleError, Via, time};

/// Which of torch's two formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cells {
    /// `compute_only`: torch adds the communication.
    Compute,
    /// `compute_comms`: with sends, receives and the waits for sends.
    WithCommunication,
}

/// Why a CSV cannot be read or written.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CsvError {
    #[error(
        "line {line}, cell {cell}: `{text}` is no action of torch's pipelining\nhint: actions are such as 2F0, 2I0, 2W0 and 2B0: stage, kind, microbatch"
    )]
    NoAction { line: usize, cell: usize, text: String },
    #[error("the file has no action")]
    Empty,
    #[error("{microbatch} is in a file of {passes} passes: those of others are missing")]
    Sparse { microbatch: MicrobatchId, passes: usize },
    #[error(
        "torch's pipelining has no action for {pass}\nhint: schedules of F, B, W and BW can be written as CSV"
    )]
    CannotWrite { pass: Pass },
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    #[error(transparent)]
    Check(#[from] CheckError),
}

/// torch's letters for a kind.
fn letters(kind: PassKind) -> Option<&'static str> {
    match kind {
        PassKind::F => Some("F"),
        PassKind::B => Some("I"),
        PassKind::W => Some("W"),
        PassKind::BW => Some("B"),
        _ => None,
    }
}

fn kind(letters: &str) -> Option<PassKind> {
    match letters {
        "F" => Some(PassKind::F),
        "I" => Some(PassKind::B),
        "W" => Some(PassKind::W),
        "B" => Some(PassKind::BW),
        _ => None,
    }
}

/// Actions that are not passes; torch derives them from the passes.
const SKIPPED: [&str; 10] = [
    "SEND_F",
    "RECV_F",
    "SEND_B",
    "RECV_B",
    "WAIT_SEND_F",
    "WAIT_SEND_B",
    "UNSHARD",
    "RESHARD",
    "REDUCE_GRAD",
    "WAIT_REDUCE_GRAD",
];

/// Reads either format. Whether the schedule is complete and can be run is for [`check()`](super::check()) to say.
pub fn read(name: &str, text: &str) -> Result<Schedule, CsvError> {
    let mut lines: Vec<&str> = text.lines().map(|line| line.trim_end_matches('\r')).collect();
    while lines.last().is_some_and(|line| line.trim().is_empty()) {
        lines.pop();
    }
    let mut orders = Vec::new();
    let mut pairs = Vec::new();
    for (line, row) in lines.iter().enumerate() {
        let mut order = Vec::new();
        for (cell, text) in row.split(',').enumerate() {
            let text = text.trim().trim_matches('"').trim();
            let action = parse(text).ok_or_else(|| CsvError::NoAction {
                line: line + 1,
                cell: cell + 1,
                text: text.into(),
            })?;
            if let Action::Both(first, second) = action {
                pairs.push((first, second));
            }
            order.extend(action.passes());
        }
        orders.push(order);
    }
    let on = |(device, order): (usize, &Vec<Pass>)| {
        order.iter().map(move |pass| (pass.stage, DeviceId::at(device))).collect::<Vec<_>>()
    };
    let places: Vec<_> = orders.iter().enumerate().flat_map(on).collect();
    if places.is_empty() {
        return Err(CsvError::Empty);
    }
    let placement = Placement::from_pairs(places)?;
    if orders.len() != placement.num_devices() {
        let device = DeviceId::at(orders.len() - 1);
        return Err(ScheduleError::IdleDevice { device }.into());
    }
    let microbatches = orders.iter().flatten().map(|p| p.microbatch.0.saturating_add(1)).max().unwrap_or(0);
    let passes = orders.iter().map(Vec::len).sum();
    if microbatches as usize > passes {
        return Err(CsvError::Sparse { microbatch: MicrobatchId(microbatches - 1), passes });
    }
    let routes = Routes::model_order(placement.num_stages());
    Ok(Schedule::new(name, placement, routes, microbatches, orders)?.with_pairs(pairs)?)
}

enum Action {
    Nothing,
    One(Pass),
    Both(Pass, Pass),
}

impl Action {
    fn passes(self) -> impl Iterator<Item = Pass> {
        let passes = match self {
            Action::Nothing => [None, None],
            Action::One(pass) => [Some(pass), None],
            Action::Both(first, second) => [Some(first), Some(second)],
        };
        passes.into_iter().flatten()
    }
}

fn parse(cell: &str) -> Option<Action> {
    if cell.is_empty() || cell == "None" {
        return Some(Action::Nothing);
    }
    if let Some(both) = cell.strip_prefix('(') {
        let (first, second) = both.strip_suffix(")OVERLAP_F_B")?.split_once(';')?;
        return match (parse(first.trim())?, parse(second.trim())?) {
            (Action::One(first), Action::One(second)) => Some(Action::Both(first, second)),
            _ => None,
        };
    }
    let letters = cell.find(|c: char| !c.is_ascii_digit())?;
    let digits = cell.rfind(|c: char| !c.is_ascii_digit()).map_or(cell.len(), |at| at + 1);
    let middle = cell.get(letters..digits)?;
    let stage = cell[..letters].parse().ok()?;
    if SKIPPED.contains(&middle) {
        return Some(Action::Nothing);
    }
    let microbatch = cell[digits..].parse().ok()?;
    Some(Action::One(Pass::new(kind(middle)?, crate::id::StageId(stage), MicrobatchId(microbatch))))
}

/// Writes a schedule. With communication, it has to be one that can be run.
pub fn write(schedule: &Schedule, cells: Cells) -> Result<String, CsvError> {
    let rows = match cells {
        Cells::Compute => compute_rows(schedule)?,
        Cells::WithCommunication => communication_rows(schedule)?,
    };
    let mut text = String::new();
    for row in rows {
        let _ = writeln!(text, "{}", row.join(","));
    }
    Ok(text)
}

fn cell(pass: Pass) -> Result<String, CsvError> {
    let letters = letters(pass.kind).ok_or(CsvError::CannotWrite { pass })?;
    Ok(format!("{}{letters}{}", pass.stage.0, pass.microbatch.0))
}

fn compute_rows(schedule: &Schedule) -> Result<Vec<Vec<String>>, CsvError> {
    let row = |order: &Vec<Pass>| {
        let mut cells = Vec::with_capacity(order.len());
        let mut passes = order.iter();
        while let Some(&pass) = passes.next() {
            let second = if schedule.is_paired(pass) { passes.next() } else { None };
            cells.push(match second {
                None => cell(pass)?,
                Some(&second) => format!("({};{})OVERLAP_F_B", cell(pass)?, cell(second)?),
            });
        }
        Ok(cells)
    };
    schedule.devices().iter().map(row).collect()
}

/// Passes in the order of their times; a pass's sends stand behind it, and at that moment the receives on the other side. At the
/// end each device waits for its sends.
fn communication_rows(schedule: &Schedule) -> Result<Vec<Vec<String>>, CsvError> {
    let stages = schedule.placement().num_stages();
    let timed = time(schedule, &Costs::even(stages, 1.0, 1.0, 1.0, 0.0).map_err(CsvError::Schedule)?)?;
    let mut starts: Vec<(f64, DeviceId, usize)> = Vec::with_capacity(schedule.num_passes());
    for (device, spans) in schedule.placement().devices().zip(&timed.spans) {
        starts.extend(spans.iter().enumerate().map(|(place, span)| (span.start, device, place)));
    }
    starts.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)));
    let mut rows = vec![vec![]; schedule.devices().len()];
    let mut waits: Vec<Vec<String>> = rows.clone();
    for (_, device, place) in starts {
        let pass = schedule.devices()[device.index()][place];
        rows[device.index()].push(cell(pass)?);
        for (via, to) in sends(schedule, pass) {
            let letter = if matches!(via, Via::Activation(_)) { 'F' } else { 'B' };
            let (from, m) = (pass.stage.0, pass.microbatch.0);
            rows[device.index()].push(format!("{from}SEND_{letter}{m}"));
            waits[device.index()].push(format!("{from}WAIT_SEND_{letter}{m}"));
            let receiver = schedule.placement().device(to);
            rows[receiver.index()].push(format!("{}RECV_{letter}{m}", to.0));
        }
    }
    for (row, waits) in rows.iter_mut().zip(waits) {
        row.extend(waits);
    }
    Ok(rows)
}

/// What a pass sends to another device, and to which stage.
fn sends(schedule: &Schedule, pass: Pass) -> Vec<(Via, crate::id::StageId)> {
    let mut sends = Vec::new();
    schedule.each_message(pass, |via, to| {
        if schedule.placement().device(to) != schedule.placement().device(pass.stage) {
            sends.push((via, to));
        }
    });
    sends
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{Name, Spec, check, generate};

    #[test]
    fn what_is_written_is_read_back() {
        for name in Name::ALL.into_iter().filter(|name| !matches!(name, Name::BPipe | Name::Search)) {
            let schedule = generate(name, &Spec::even(4, 8)).unwrap();
            for cells in [Cells::Compute, Cells::WithCommunication] {
                let text = write(&schedule, cells).unwrap();
                let read = read(name.name(), &text).unwrap_or_else(|e| panic!("{name}: {e}\n{text}"));
                assert_eq!(read.devices(), schedule.devices(), "{name}");
                assert_eq!(read.placement(), schedule.placement(), "{name}");
                check(&read).unwrap();
                if cells == Cells::Compute {
                    assert_eq!(read, schedule, "{name}");
                }
            }
        }
        let bpipe = generate(Name::BPipe, &Spec::even(6, 8)).unwrap();
        assert!(matches!(write(&bpipe, Cells::Compute), Err(CsvError::CannotWrite { .. })));
    }

    #[test]
    fn communication_stands_between_the_passes_it_joins() {
        let schedule = generate(Name::OneF1B, &Spec::even(2, 2)).unwrap();
        assert_eq!(
            write(&schedule, Cells::WithCommunication).unwrap(),
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0WAIT_SEND_F0,0WAIT_SEND_F1\n\
             1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1WAIT_SEND_B0,1WAIT_SEND_B1\n"
        );
    }

    #[test]
    fn bad_files_are_named_by_line_and_cell() {
        let error = |text: &str| read("file", text).unwrap_err().to_string();
        assert!(error("0F0,0B0\n1F0,1X0\n").starts_with("line 2, cell 2: `1X0` is no action"));
        assert!(
            error("0F0,(0F1;0B0)OVERLAP\n").starts_with("line 1, cell 2: `(0F1;0B0)OVERLAP` is no action")
        );
        assert_eq!(error("\n\n"), "the file has no action");
        assert_eq!(error("0F0,0B0\n2F0,2B0\n"), "stage 1 is on no device, although stage 2 is on one");
        assert_eq!(error("0F0,0B0\n0F1,0B1\n"), "stage 0 is on device 0 and on device 1");
        assert_eq!(error("0F0,0F0\n"), "0F0 is on device 0 twice");
        assert!(error("0F0,0B0\n\n1F0,1B0\n").starts_with("device 1 holds no stage"));
        assert!(error("é").starts_with("line 1, cell 1"));
        assert!(error("0F0,0é0").starts_with("line 1, cell 2"));
        assert_eq!(
            error("0F99999,0B99999"),
            "microbatch 99999 is in a file of 2 passes: those of others are missing"
        );
    }

    #[test]
    fn a_file_with_a_missing_pass_or_a_cycle_fails_its_check() {
        let missing = read("file", "0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n").unwrap();
        assert_eq!(check(&missing).unwrap_err().to_string(), "1BW1 is missing: device 1 never runs it");
        let cycle = read("file", "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n").unwrap();
        assert!(check(&cycle).unwrap_err().to_string().starts_with("deadlock: "));
    }
}
