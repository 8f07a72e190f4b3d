//! How answers leave: once, whole, and to stdout; errors to stderr.
//!
//! A reader that has seen enough (`| head`) is no error, so a closed pipe is ignored. Anything else that keeps an
//! answer from being written is.

use std::fmt::Write as _;
use std::io::{ErrorKind, IsTerminal, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use clap::ValueEnum;
use crossmesh_core::printable::printable;

use crate::files;

/// What an answer looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Format {
    #[default]
    Text,
    Json,
}

/// How a command is asked for a document; the same everywhere.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct FormatArgs {
    /// Text for people, or one JSON document
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,
    /// The same as --format json
    #[arg(long, conflicts_with = "format", help_heading = "Output")]
    json: bool,
}

impl FormatArgs {
    pub fn get(self) -> Format {
        if self.json { Format::Json } else { self.format }
    }
}

/// Whether this process answers. Of a job that was started by somebody else, only the first rank does.
static ANSWERS: AtomicBool = AtomicBool::new(true);

/// From now on somebody else answers.
pub fn leave_answers_to_the_first_rank() {
    ANSWERS.store(false, Ordering::Relaxed);
}

fn answers() -> bool {
    ANSWERS.load(Ordering::Relaxed)
}

/// Writes an answer to stdout.
pub fn print(text: &str) -> Result<()> {
    if !answers() {
        return Ok(());
    }
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(files::with_hint(error)).context("cannot write to stdout")
        }
        _ => Ok(()),
    }
}

/// Writes a JSON document to stdout.
pub fn print_json(value: &impl serde::Serialize) -> Result<()> {
    print(&to_json(value)?)
}

pub fn to_json(value: &impl serde::Serialize) -> Result<String> {
    Ok(serde_json::to_string_pretty(value).context("cannot write JSON")? + "\n")
}

/// Writes a file, or names it and the reason.
pub fn write_file(path: &Path, text: impl AsRef<[u8]>) -> Result<()> {
    if !answers() {
        return Ok(());
    }
    files::write(path, text)
}

/// An error that was told already.
#[derive(Debug)]
pub struct Told;

impl std::error::Error for Told {}

impl std::fmt::Display for Told {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("it was told already")
    }
}

/// `error: what: why`, then the lines that point and the hints as they are.
pub fn print_error(error: &anyhow::Error) {
    if error.is::<Told>() {
        return;
    }
    // stderr may be closed too; there is nobody left to tell.
    let _ = std::io::stderr().write_all(error_text(error).as_bytes());
}

fn error_text(error: &anyhow::Error) -> String {
    let mut text = String::from("error: ");
    for (i, cause) in error.chain().enumerate() {
        let _ = write!(text, "{}{cause}", if i == 0 { "" } else { ": " });
    }
    text.push('\n');
    // A tensor's name, a file's: nothing in it reaches into the terminal.
    printable(&text)
}

/// A line on stderr, beside the answer.
pub fn remark(line: &str) {
    if answers() {
        let _ = writeln!(std::io::stderr(), "{}", printable(line));
    }
}

/// A line on stderr that tells a person at a terminal what takes so long; nobody else sees it.
pub struct Progress {
    shown: bool,
}

impl Progress {
    pub fn new() -> Self {
        Self { shown: std::io::stderr().is_terminal() }
    }

    /// Says nothing, where another says more.
    pub fn silent() -> Self {
        Self { shown: false }
    }

    /// Whether there is somebody to see it.
    pub fn is_shown(&self) -> bool {
        self.shown && answers()
    }

    pub fn say(&self, what: &str) {
        if self.is_shown() {
            let _ = write!(std::io::stderr(), "\r\x1b[2K{what}");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.say("");
    }
}

/// Columns that line up.
pub struct Table {
    rows: Vec<Vec<String>>,
    align: &'static str,
}

impl Table {
    /// `l` and `r` for every column: aligned to the left or to the right; the last letter goes on.
    pub fn new(align: &'static str) -> Self {
        Self { rows: vec![], align }
    }

    fn is_left(&self, column: usize) -> bool {
        self.align.chars().nth(column).or(self.align.chars().last()) == Some('l')
    }

    pub fn row<S: AsRef<str>>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.rows.push(cells.into_iter().map(|cell| printable(cell.as_ref())).collect());
    }

    /// Two blanks between columns, `indent` blanks before the first, none at the end of a line.
    pub fn render(&self, indent: usize) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |c: usize| self.rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max();
        let widths: Vec<usize> = (0..columns).map(|c| width(c).unwrap_or(0)).collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = " ".repeat(indent);
            for (c, cell) in row.iter().enumerate() {
                let gap = if c == 0 { "" } else { "  " };
                let pad = " ".repeat(widths[c] - cell.chars().count());
                let (before, behind) = if self.is_left(c) { ("", pad.as_str()) } else { (pad.as_str(), "") };
                let _ = write!(line, "{gap}{before}{cell}{behind}");
            }
            let _ = writeln!(text, "{}", line.trim_end());
        }
        text
    }
}

/// `  and 3 more transfers`, where not all were shown.
pub fn and_more(all: usize, shown: usize, noun: &str) -> String {
    match all.saturating_sub(shown) {
        0 => String::new(),
        1 => format!("  and 1 more {noun}\n"),
        more => format!("  and {more} more {noun}s\n"),
    }
}

/// `1 transfer`, `2 transfers`.
pub fn count(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

/// A time over the bound: `1.003`; the bound of nothing is met by nothing.
pub fn ratio(seconds: f64, bound: f64) -> f64 {
    if bound > 0.0 {
        seconds / bound
    } else if seconds > 0.0 {
        f64::INFINITY
    } else {
        1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new("lr");
        table.row(["link", "bytes"]);
        table.row(["h0 out", "7"]);
        assert_eq!(table.render(2), "  link    bytes\n  h0 out      7\n");
    }

    #[test]
    fn an_error_tells_its_causes_and_hints() {
        let error = anyhow::anyhow!("no such mesh\nhint: name one").context("cannot read x.json");
        assert_eq!(error_text(&error), "error: cannot read x.json: no such mesh\nhint: name one\n");
    }

    #[test]
    fn nothing_meets_the_bound_of_nothing() {
        assert_eq!(ratio(0.0, 0.0), 1.0);
        assert_eq!(ratio(3.0, 2.0), 1.5);
        assert_eq!(ratio(1.0, 0.0), f64::INFINITY);
    }
}
