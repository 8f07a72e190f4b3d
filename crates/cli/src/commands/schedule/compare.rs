//! `crossmesh schedule compare`: every schedule for the same pipeline, in one table.

use anyhow::Result;
use crossmesh_core::schedule::generate::{GenerateError, Spec};
use crossmesh_core::schedule::{Name, generate};
use serde::Serialize;

use crate::Answer;
use crate::output::{self, Format, Table};
use crate::report;
use crate::timetable::{Timetable, number, percent};

use super::{CostArgs, PictureArgs, SizeArgs, spec};

/// Compare all schedules for one pipeline: time, bubble and memory.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  crossmesh schedule compare --stages 8 --microbatches 32
  crossmesh schedule compare --stages 4 --microbatches 16 --f 1 --b 1.2 --w 0.8 --comm 0.5 --memory-cap 4 --html compare.html")]
pub struct CompareArgs {
    #[command(flatten)]
    size: SizeArgs,
    #[command(flatten)]
    costs: CostArgs,
    /// Text for people, or one JSON document
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,
    #[command(flatten)]
    pictures: PictureArgs,
}

/// All schedules.
#[derive(Debug, Serialize)]
struct Comparison {
    schema: &'static str,
    stages: u32,
    microbatches: u32,
    schedules: Vec<Entry>,
    /// The shortest; of equals the one that holds least.
    best: Option<&'static str>,
}

#[derive(Debug, Serialize)]
struct Entry {
    name: &'static str,
    about: &'static str,
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
    /// The most any device holds, in activations of its whole share of the layers.
    peak_memory: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_bytes: Option<f64>,
    /// The least and the most, by device.
    peak_by_device: Vec<f64>,
}

pub fn run(args: &CompareArgs) -> Result<Answer> {
    let spec = spec(&args.size, &args.costs)?;
    let bytes = args.costs.activation_bytes()?;
    let mut tables = Vec::new();
    for name in Name::ALL {
        tables.push((name, timetable(name, &spec, &bytes)?));
    }
    if tables.iter().all(|(_, table)| table.is_err())
        && let Some((_, Err(error))) = tables.pop()
    {
        // What keeps even a search from finding one is wrong with the input.
        return Err(error.into());
    }
    let comparison = comparison(&spec, &tables);
    if let Some(path) = &args.pictures.html {
        output::write_file(path, &html(&spec, &comparison, &tables))?;
    }
    match args.format {
        Format::Text => output::print(&render(&comparison))?,
        Format::Json => output::print_json(&comparison)?,
    }
    Ok(Answer::Yes)
}

type Made = Result<Timetable, GenerateError>;

fn timetable(name: Name, spec: &Spec, bytes: &[u64]) -> Result<Made> {
    Ok(match generate(name, spec) {
        Err(error) => Err(error),
        Ok(schedule) => {
            let costs = spec.costs(schedule.placement())?;
            Ok(Timetable::new(schedule, &costs, bytes)?)
        }
    })
}

fn comparison(spec: &Spec, tables: &[(Name, Made)]) -> Comparison {
    let entry = |(name, made): &(Name, Made)| Entry {
        name: name.name(),
        about: name.about(),
        figures: made.as_ref().ok().map(figures),
        why_not: made.as_ref().err().map(|error| error.to_string()),
    };
    let schedules: Vec<Entry> = tables.iter().map(entry).collect();
    let best = schedules
        .iter()
        .filter_map(|entry| entry.figures.as_ref().map(|figures| (entry.name, figures)))
        .min_by(|a, b| {
            let rounded = |f: &Figures| (f.makespan * 1e9).round();
            rounded(a.1).total_cmp(&rounded(b.1)).then(a.1.peak_memory.total_cmp(&b.1.peak_memory))
        });
    Comparison {
        schema: "crossmesh.schedule-comparison/1",
        stages: spec.devices,
        microbatches: spec.microbatches,
        best: best.map(|(name, _)| name),
        schedules,
    }
}

fn figures(table: &Timetable) -> Figures {
    Figures {
        chunks: table.schedule.placement().num_chunks(),
        makespan: table.makespan(),
        bubble: table.timed.bubble(),
        peak_memory: table.highest().0,
        peak_bytes: table.bytes.as_ref().map(|bytes| bytes.iter().copied().fold(0.0, f64::max)),
        peak_by_device: table.shares.clone(),
    }
}

fn header() -> Vec<String> {
    ["schedule", "chunks", "makespan", "bubble", "peak", ""].map(String::from).to_vec()
}

fn cells(entry: &Entry) -> Vec<String> {
    let first_line = |text: &str| text.lines().next().unwrap_or("").to_string();
    match (&entry.figures, &entry.why_not) {
        (Some(f), _) => vec![
            entry.name.into(),
            f.chunks.to_string(),
            number(f.makespan),
            percent(f.bubble),
            number(f.peak_memory),
            entry.about.into(),
        ],
        (None, why) => {
            let dash = || "–".to_string();
            vec![entry.name.into(), dash(), dash(), dash(), dash(), first_line(why.as_deref().unwrap_or(""))]
        }
    }
}

fn render(comparison: &Comparison) -> String {
    let mut table = Table::new("lrrrrl");
    table.row(header());
    for entry in &comparison.schedules {
        table.row(cells(entry));
    }
    let stages = output::count(comparison.stages as usize, "stage");
    let mut text = format!("schedules for {stages}, {} microbatches\n\n", comparison.microbatches);
    text += &table.render(2);
    text += "\npeak: activations at most on any device, each of the device's whole share of the layers\n";
    if let Some(best) = comparison.best {
        text += &format!("shortest: {best}\n");
    }
    text
}

fn html(spec: &Spec, comparison: &Comparison, tables: &[(Name, Made)]) -> String {
    let rows: Vec<Vec<String>> = comparison.schedules.iter().map(cells).collect();
    let made: Vec<&Timetable> = tables.iter().filter_map(|(_, made)| made.as_ref().ok()).collect();
    let subtitle = format!("{} stages, {} microbatches", spec.devices, spec.microbatches);
    report::schedule::render_all(
        "Pipeline schedules",
        &subtitle,
        &header(),
        &rows,
        &made,
        report::provenance(),
    )
}
