//! `crossmesh schedule compare`: every schedule for the same pipeline, in one table.

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, bail};
use crossmesh_core::schedule::generate::{GenerateError, Spec};
use crossmesh_core::schedule::{Footprint, Name, Schedule, generate, memory};
use serde::Serialize;

use crate::Answer;
use crate::output::{self, Format, FormatArgs, Table};
use crate::picture;
use crate::report;
use crate::report::figure::Length;
use crate::timetable::{Timetable, doc::Causes, number, over, percent};

use super::{CostArgs, PictureArgs, SizeArgs, place_of, read_csv, spec};

/// Compare all schedules for one pipeline: time, bubble and memory.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  crossmesh schedule compare --stages 8 --microbatches 32
  crossmesh schedule compare --stages 8 --microbatches 32 \\
      --speed 1,1,1,1,1,1,1,0.8
  crossmesh schedule compare --file mine.csv --comm 0.25
  crossmesh schedule compare --stages 4 --microbatches 16 --f 1 --b 1.2 \\
      --w 0.8 --comm 0.5 --memory-cap 4 --html compare.html")]
pub struct CompareArgs {
    /// Schedules of your own beside the named ones: CSVs of torch's pipelining. Say --stages and --microbatches, or the file does
    #[arg(long, value_name = "FILE")]
    file: Vec<PathBuf>,
    #[command(flatten)]
    size: SizeArgs,
    #[command(flatten)]
    costs: CostArgs,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    pictures: PictureArgs,
    /// Also write how long each takes as a figure for a paper: an SVG, 85 mm wide, or a PDF where its name ends so
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    svg: Option<PathBuf>,
}

/// All schedules.
#[derive(Debug, Serialize)]
struct Comparison {
    schema: &'static str,
    stages: u32,
    microbatches: u32,
    /// The same for all of them: none is shorter.
    lower_bound: f64,
    schedules: Vec<Entry>,
    /// The shortest; of equals the one that holds least.
    best: Option<String>,
    /// Those that none beats in both time and memory, shortest first.
    pareto: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Entry {
    name: String,
    about: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    figures: Option<Figures>,
    /// Why there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    why_not: Option<String>,
}

#[derive(Debug, Serialize)]
struct Figures {
    chunks: usize,
    makespan: f64,
    bubble: f64,
    /// As the zero-bubble papers count it: within the longest time from a device's first pass to its last.
    bubble_inside: f64,
    /// Shares that add up to the bubble.
    bubble_causes: Causes,
    /// The most any device holds, in activations of its whole share of the layers.
    peak_memory: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_bytes: Option<f64>,
    /// The least and the most, by device.
    peak_by_device: Vec<f64>,
    /// Whether no other is as short with less memory, or shorter with as much.
    pareto: bool,
}

/// A schedule, or why there is none.
struct Row {
    name: String,
    about: String,
    made: Result<Timetable, String>,
}

pub fn run(args: &CompareArgs) -> Result<Answer> {
    let files = args.file.iter().map(|path| read_csv(path)).collect::<Result<Vec<_>>>()?;
    let spec = spec(&size(args, &files), &args.costs)?;
    let bytes = args.costs.activation_bytes()?;
    let mut rows = Vec::new();
    for (path, schedule) in args.file.iter().zip(files) {
        rows.push(own(&place_of(path), schedule, &spec, &bytes)?);
    }
    let mut refused = None;
    for name in Name::ALL {
        let made = named(name, &spec, &bytes)?;
        refused = made.as_ref().err().cloned();
        let made = made.map_err(|error| error.to_string());
        rows.push(Row { name: name.name().into(), about: name.about().into(), made });
    }
    if let Some(error) = refused.filter(|_| rows.iter().all(|row| row.made.is_err())) {
        // What keeps even a search from finding one is wrong with the input.
        return Err(error.into());
    }
    level(&mut rows);
    let comparison = comparison(&spec, &rows);
    if let Some(path) = &args.pictures.html {
        output::write_file(path, html(&spec, &comparison, &rows))?;
    }
    if let Some(path) = &args.svg {
        picture::write(path, &svg(&comparison))?;
    }
    match args.format.get() {
        Format::Text => output::print(&render(&comparison))?,
        Format::Json => output::print_json(&comparison)?,
    }
    Ok(Answer::Yes)
}

/// What was said of the pipeline's size, or else what the first file has.
fn size(args: &CompareArgs, files: &[Schedule]) -> SizeArgs {
    let mut size = args.size.clone();
    if let Some(first) = files.first() {
        size.stages = size.stages.or(Some(first.devices().len() as u32));
        size.microbatches = size.microbatches.or(Some(first.num_microbatches()));
    }
    size
}

fn named(name: Name, spec: &Spec, bytes: &[u64]) -> Result<Result<Timetable, GenerateError>> {
    Ok(match generate(name, spec) {
        Err(error) => Err(error),
        Ok(schedule) => Ok(Timetable::new(schedule, spec, bytes)?),
    })
}

/// A schedule from a file: for as many devices and microbatches as the others, and within the caps as they are.
fn own(place: &str, schedule: Schedule, spec: &Spec, bytes: &[u64]) -> Result<Row> {
    let (devices, microbatches) = (schedule.devices().len() as u32, schedule.num_microbatches());
    if (devices, microbatches) != (spec.devices, spec.microbatches) {
        bail!(
            "{place} has {devices} devices and {microbatches} microbatches, the others {} and {}\nhint: compare with --stages {devices} --microbatches {microbatches}",
            spec.devices,
            spec.microbatches
        );
    }
    let table = Timetable::new(schedule, spec, bytes).with_context(|| place.to_string())?;
    let footprint = Footprint::shares(table.schedule.placement());
    let fits = match &spec.caps {
        None => Ok(()),
        Some(caps) => memory::within(&table.schedule, &table.timed, &footprint, caps),
    };
    let name = table.schedule.name().to_string();
    let made = fits.map(|()| table).map_err(|error| anyhow!(error).to_string());
    Ok(Row { name, about: format!("from {place}"), made })
}

/// One bound for all: the lowest, where a file gives devices different numbers of layers.
fn level(rows: &mut [Row]) {
    let least =
        rows.iter().filter_map(|r| r.made.as_ref().ok()).map(|t| t.bound).fold(f64::INFINITY, f64::min);
    rows.iter_mut().filter_map(|row| row.made.as_mut().ok()).for_each(|table| table.bound = least);
}

fn comparison(spec: &Spec, rows: &[Row]) -> Comparison {
    let tables: Vec<&Timetable> = rows.iter().filter_map(|row| row.made.as_ref().ok()).collect();
    let entry = |row: &Row| Entry {
        name: row.name.clone(),
        about: row.about.clone(),
        figures: row.made.as_ref().ok().map(|table| figures(table, &tables)),
        why_not: row.made.as_ref().err().cloned(),
    };
    let schedules: Vec<Entry> = rows.iter().map(entry).collect();
    let mut made: Vec<(&str, &Figures)> =
        schedules.iter().filter_map(|e| e.figures.as_ref().map(|f| (e.name.as_str(), f))).collect();
    made.sort_by(|a, b| {
        let rounded = |f: &Figures| (f.makespan * 1e9).round();
        rounded(a.1).total_cmp(&rounded(b.1)).then(a.1.peak_memory.total_cmp(&b.1.peak_memory))
    });
    Comparison {
        schema: "crossmesh.schedule-comparison/1",
        stages: spec.devices,
        microbatches: spec.microbatches,
        lower_bound: tables.first().map_or(0.0, |table| table.bound),
        best: made.first().map(|(name, _)| name.to_string()),
        pareto: made.iter().filter(|(_, f)| f.pareto).map(|(name, _)| name.to_string()).collect(),
        schedules,
    }
}

fn figures(table: &Timetable, all: &[&Timetable]) -> Figures {
    Figures {
        chunks: table.schedule.placement().num_chunks(),
        makespan: table.makespan(),
        bubble: table.timed.bubble(),
        bubble_inside: table.timed.inner_bubble(),
        bubble_causes: table.causes().into(),
        peak_memory: table.highest().0,
        peak_bytes: table.bytes.as_ref().map(|bytes| bytes.iter().copied().fold(0.0, f64::max)),
        peak_by_device: table.shares.clone(),
        pareto: !all.iter().any(|other| beats(other, table)),
    }
}

/// Whether it is better in one of time and memory, and in neither worse.
fn beats(one: &Timetable, other: &Timetable) -> bool {
    let slack = 1.0 + 1e-9;
    let less = |a: f64, b: f64| a * slack < b;
    let (a, b) = ((one.makespan(), one.highest().0), (other.makespan(), other.highest().0));
    !less(b.0, a.0) && !less(b.1, a.1) && (less(a.0, b.0) || less(a.1, b.1))
}

fn header() -> Vec<String> {
    let names = ["schedule", "chunks", "makespan", "× bound", "bubble", "inside", "peak", "front", ""];
    names.map(String::from).to_vec()
}

fn cells(entry: &Entry, bound: f64) -> Vec<String> {
    let first_line = |text: &str| text.lines().next().unwrap_or("").to_string();
    match (&entry.figures, &entry.why_not) {
        (Some(f), _) => vec![
            entry.name.clone(),
            f.chunks.to_string(),
            number(f.makespan),
            over(f.makespan, bound).trim_end_matches(" ×").into(),
            percent(f.bubble),
            percent(f.bubble_inside),
            number(f.peak_memory),
            if f.pareto { "*" } else { "" }.into(),
            entry.about.clone(),
        ],
        (None, why) => {
            let mut cells = vec!["–".to_string(); 7];
            cells[6].clear();
            cells.insert(0, entry.name.clone());
            cells.push(first_line(why.as_deref().unwrap_or("")));
            cells
        }
    }
}

fn render(comparison: &Comparison) -> String {
    let mut table = Table::new("lrrrrrrll");
    table.row(header());
    for entry in &comparison.schedules {
        table.row(cells(entry, comparison.lower_bound));
    }
    let stages = output::count(comparison.stages as usize, "stage");
    let mut text = format!("schedules for {stages}, {} microbatches\n\n", comparison.microbatches);
    text += &table.render(2);
    text += &format!(
        "\nbound: {}, which no schedule beats, whatever its chunks\n",
        number(comparison.lower_bound)
    );
    text += "bubble: idle share of the step; inside: of a device's time from its first pass to its last, steps back to back\n";
    text += "peak: activations at most on any device, each of the device's whole share of the layers\n";
    text += &format!("front: no other has less of both time and memory: {}\n", comparison.pareto.join(", "));
    if let Some(best) = &comparison.best {
        text += &format!("shortest: {best}\n");
    }
    text
}

/// How long each takes, and what it holds.
fn svg(comparison: &Comparison) -> String {
    let made = comparison.schedules.iter().filter_map(|entry| Some((entry, entry.figures.as_ref()?)));
    let rows: Vec<Length<'_>> = made
        .map(|(entry, figures)| Length {
            name: &entry.name,
            length: figures.makespan,
            note: format!("{}, peak {}", number(figures.makespan), number(figures.peak_memory)),
            marked: figures.pareto,
        })
        .collect();
    let about =
        format!("schedules for {} stages, {} microbatches", comparison.stages, comparison.microbatches);
    report::figure::lengths(
        &rows,
        comparison.lower_bound,
        "no other has less of both time and memory",
        &about,
    )
}

fn html(spec: &Spec, comparison: &Comparison, rows: &[Row]) -> String {
    let cells: Vec<Vec<String>> =
        comparison.schedules.iter().map(|entry| cells(entry, comparison.lower_bound)).collect();
    let made: Vec<&Timetable> = rows.iter().filter_map(|row| row.made.as_ref().ok()).collect();
    let subtitle = format!("{} stages, {} microbatches", spec.devices, spec.microbatches);
    report::schedule::render_all(
        "Pipeline schedules",
        &subtitle,
        &header(),
        &cells,
        &made,
        report::provenance(),
    )
}
