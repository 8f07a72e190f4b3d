//! `crossmesh schedule`: what does every device do when, how long does a step take, and how much does it hold?

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use clap::ValueEnum;
use crossmesh_core::schedule::generate::Spec;
use crossmesh_core::schedule::megatron::{LayerWeights, Layers};
use crossmesh_core::schedule::torch_csv::{self, Cells};
use crossmesh_core::schedule::{
    Backward, Footprint, Hop, Name, Schedule, StageCost, check, generate, memory,
};
use crossmesh_core::units::parse_bytes;

use crate::Answer;
use crate::input::read_text;
use crate::known::{Known, schedules};
use crate::output;
use crate::picture;
use crate::report;
use crate::timetable::{Timetable, causes, chrome, doc, draw, number, percent};

mod compare;
mod grid;

/// Draw, time and check a pipeline schedule: named, searched for, or read from torch's CSV.
#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Schedules: gpipe, 1f1b, eager-1f1b, interleaved-1f1b, zb-h1, zb-h2, zbv, v-half,
v-min, v-zb, bpipe, dualpipev, minimal-window (the fewest microbatches in flight
that hide the communication) and search (the best order found).

Examples:
  crossmesh schedule 1f1b --stages 4 --microbatches 8
  crossmesh schedule minimal-window --stages 4 --microbatches 16 --comm 0.75 \\
      --html schedule.html
  crossmesh schedule search --stages 4 --microbatches 8 --f 1,1,1,2 \\
      --memory-cap 3
  # for torch's _PipelineScheduleRuntime
  crossmesh schedule zbv --stages 4 --microbatches 8 --format csv
  # a slow device
  crossmesh schedule 1f1b --stages 4 --microbatches 8 --speed 1,1,0.5,1
  crossmesh schedule --file mine.csv --comm 0.5
  crossmesh schedule compare --stages 8 --microbatches 32 --comm 0.25"
)]
pub struct Args {
    #[command(subcommand)]
    several: Option<Several>,
    #[command(flatten)]
    one: OneArgs,
}

#[derive(Debug, clap::Subcommand)]
enum Several {
    Compare(Box<compare::CompareArgs>),
    Grid(grid::GridArgs),
}

#[derive(Debug, clap::Args)]
struct OneArgs {
    /// Which schedule
    #[arg(value_name = "NAME", required_unless_present = "file", value_parser = Known(schedules), hide_possible_values = true)]
    name: Option<String>,
    /// Read the schedule from a CSV of torch's pipelining instead; `-` reads stdin
    #[arg(long, value_name = "FILE", conflicts_with_all = ["name", "stages", "microbatches", "chunks", "backward", "layout"])]
    file: Option<PathBuf>,
    #[command(flatten)]
    size: SizeArgs,
    #[command(flatten)]
    costs: CostArgs,
    /// Text for people, one JSON document, or torch's CSV: of passes alone, or with sends and receives
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,
    /// The same as --format json
    #[arg(long, conflicts_with = "format", help_heading = "Output")]
    json: bool,
    #[command(flatten)]
    pictures: PictureArgs,
    /// Also write the timeline as a figure for a paper: an SVG, 85 mm wide, or a PDF where its name ends so
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    svg: Option<PathBuf>,
    /// Also write the step as a Chrome trace, for Perfetto
    #[arg(long, alias = "perfetto", value_name = "FILE", help_heading = "Output")]
    trace: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum Format {
    #[default]
    Text,
    Json,
    Csv,
    CsvComms,
}

#[derive(Debug, Clone, clap::Args)]
struct PictureArgs {
    /// Columns of the drawing
    #[arg(long, value_name = "N", default_value_t = 132, help_heading = "Output", value_parser = clap::value_parser!(u16).range(20..=2000))]
    width: u16,
    /// Also write a report with pictures: one HTML file
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    html: Option<PathBuf>,
}

/// How large the pipeline is.
#[derive(Debug, Clone, clap::Args)]
struct SizeArgs {
    /// Devices of the pipeline, each with its share of the layers
    #[arg(long, value_name = "P")]
    stages: Option<u32>,
    /// Microbatches of a step
    #[arg(long, value_name = "M")]
    microbatches: Option<u32>,
    /// Chunks a device, in schedules that leave it open [default: the schedule's own]
    #[arg(long, value_name = "V")]
    chunks: Option<u32>,
    /// Whether a backward is one pass, or B and W [default: the schedule's own]
    #[arg(long, value_enum, value_name = "HOW")]
    backward: Option<BackwardArg>,
    /// Layers of every stage, as Megatron writes them: `Et*3|(tt|)*29,m|L`
    #[arg(long, value_name = "LAYOUT")]
    layout: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BackwardArg {
    Fused,
    Split,
}

/// What everything costs, in any unit of time.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Costs")]
struct CostArgs {
    /// A forward through a device's share of the layers, a P-th of the model; a chunk costs its part. One for all shares, or one for
    /// each share or each stage, in model order: whichever device gets it. See --speed for slow devices
    #[arg(long, value_name = "T", value_delimiter = ',', default_value = "1", allow_hyphen_values = true)]
    f: Vec<f64>,
    /// A backward for the inputs
    #[arg(long, value_name = "T", value_delimiter = ',', default_value = "1", allow_hyphen_values = true)]
    b: Vec<f64>,
    /// A backward for the weights; a fused backward costs both
    #[arg(long, value_name = "T", value_delimiter = ',', default_value = "1", allow_hyphen_values = true)]
    w: Vec<f64>,
    /// How fast every device is: 0.5 takes twice as long for the same layers. One for each device
    #[arg(long, value_name = "LIST", value_delimiter = ',', allow_hyphen_values = true)]
    speed: Vec<f64>,
    /// A message from device to device
    #[arg(long, value_name = "T", default_value_t = 0.0, allow_hyphen_values = true)]
    comm: f64,
    /// Activations that fit, each of a device's whole share of the layers; one for all, or one for each device
    #[arg(long, value_name = "N", value_delimiter = ',', allow_hyphen_values = true)]
    memory_cap: Vec<f64>,
    /// What an activation weighs, of a device's whole share or one for each device or stage
    #[arg(long, value_name = "BYTES", value_delimiter = ',', allow_hyphen_values = true)]
    activation_bytes: Vec<String>,
}

impl CostArgs {
    /// Slices of the model's work; lists of one stand for all.
    fn work(&self) -> Result<Vec<StageCost>> {
        let slices = [&self.f, &self.b, &self.w].map(Vec::len);
        let most = slices.into_iter().max().unwrap_or(1);
        if let Some(at) = slices.iter().position(|n| *n != 1 && *n != most) {
            let name = ["--f", "--b", "--w"][at];
            bail!(
                "{name} has {} costs, another has {most}\nhint: give each list the same length, or one for all",
                slices[at]
            );
        }
        let of = |list: &[f64], at: usize| *list.get(at).unwrap_or(&list[0]);
        Ok((0..most).map(|i| StageCost::new(of(&self.f, i), of(&self.b, i), of(&self.w, i))).collect())
    }

    fn caps(&self, devices: u32) -> Option<Vec<f64>> {
        match self.memory_cap.len() {
            0 => None,
            1 => Some(vec![self.memory_cap[0]; devices as usize]),
            _ => Some(self.memory_cap.clone()),
        }
    }

    fn activation_bytes(&self) -> Result<Vec<u64>> {
        let parse = |text: &String| parse_bytes(text).context("--activation-bytes");
        self.activation_bytes.iter().map(parse).collect()
    }
}

/// What is wanted, from the arguments.
fn spec(size: &SizeArgs, costs: &CostArgs) -> Result<Spec> {
    let devices = size.stages.context("--stages is missing\nhint: say how many devices the pipeline has")?;
    let mut spec = Spec {
        devices,
        microbatches: size
            .microbatches
            .context("--microbatches is missing\nhint: say how many microbatches a step has")?,
        chunks: size.chunks,
        backward: size.backward.map(|backward| match backward {
            BackwardArg::Fused => Backward::Fused,
            BackwardArg::Split => Backward::Split,
        }),
        work: costs.work()?,
        speeds: costs.speed.clone(),
        hop: Hop::both(costs.comm),
        // More devices than a schedule may have are refused by their number.
        caps: costs.caps(devices.min(1 << 16)),
    };
    if let Some(layout) = &size.layout {
        let layers: Layers = layout.parse().with_context(|| format!("--layout `{layout}`"))?;
        if spec.work.len() != 1 {
            bail!(
                "--layout and a list of costs both say what each stage costs\nhint: give one cost each with --layout"
            );
        }
        spec.chunks = Some(layers.chunks(devices).with_context(|| format!("--layout `{layout}`"))?);
        spec.work = layers.work(devices, spec.work[0], LayerWeights::default());
    }
    Ok(spec)
}

pub fn run(args: &Args) -> Result<Answer> {
    match &args.several {
        Some(Several::Compare(args)) => compare::run(args),
        Some(Several::Grid(args)) => grid::run(args),
        None => run_one(&args.one),
    }
}

fn run_one(args: &OneArgs) -> Result<Answer> {
    let table = timetable(args)?;
    if let Some(path) = &args.pictures.html {
        output::write_file(path, report::schedule::render(&table, report::provenance()))?;
    }
    if let Some(path) = &args.svg {
        picture::write(path, &report::schedule::figure(&table))?;
    }
    if let Some(path) = &args.trace {
        output::write_file(path, &chrome::render(&table).context("cannot write the trace")?)?;
    }
    let format = if args.json { Format::Json } else { args.format };
    match format {
        Format::Text => output::print(&render(&table, usize::from(args.pictures.width)))?,
        Format::Json => output::print_json(&doc::document(&table))?,
        Format::Csv => output::print(&torch_csv::write(&table.schedule, Cells::Compute)?)?,
        Format::CsvComms => output::print(&torch_csv::write(&table.schedule, Cells::WithCommunication)?)?,
    }
    Ok(Answer::Yes)
}

fn timetable(args: &OneArgs) -> Result<Timetable> {
    let bytes = args.costs.activation_bytes()?;
    let Some(path) = &args.file else {
        let name: Name = args.name.as_deref().unwrap_or_default().parse()?;
        let spec = spec(&args.size, &args.costs)?;
        let schedule = generate(name, &spec)?;
        return Timetable::new(schedule, &spec, &bytes);
    };
    let place = place_of(path);
    let schedule = read_csv(path)?;
    let table = timed_file(schedule, &args.costs, &bytes).context(place.clone())?;
    if let Some(caps) = args.costs.caps(table.schedule.devices().len() as u32) {
        let footprint = Footprint::shares(table.schedule.placement());
        memory::within(&table.schedule, &table.timed, &footprint, &caps).context(place)?;
    }
    Ok(table)
}

fn place_of(path: &Path) -> String {
    if path.as_os_str() == "-" { "stdin".into() } else { path.display().to_string() }
}

/// A schedule from torch's CSV, checked.
fn read_csv(path: &Path) -> Result<Schedule> {
    let (text, place) = (read_text(path)?, place_of(path));
    let stem = path.file_stem().filter(|_| place != "stdin").map(|stem| stem.to_string_lossy().into_owned());
    let schedule = torch_csv::read(stem.as_deref().unwrap_or("stdin"), &text).context(place.clone())?;
    check(&schedule).map_err(|error| {
        anyhow!("{error}\nhint: of a pass such as 2BW0, torch's CSV says 2B0; and 2I0 for 2B0").context(place)
    })?;
    Ok(schedule)
}

fn timed_file(schedule: Schedule, args: &CostArgs, bytes: &[u64]) -> Result<Timetable> {
    let devices = schedule.devices().len() as u32;
    let spec = Spec {
        work: args.work()?,
        speeds: args.speed.clone(),
        hop: Hop::both(args.comm),
        ..Spec::even(devices, schedule.num_microbatches())
    };
    Timetable::new(schedule, &spec, bytes)
}

/// The text report.
fn render(table: &Timetable, width: usize) -> String {
    let mut text = format!("schedule {}   {}\n\n", table.schedule.name(), table.size());
    text += &draw::draw(table, width);
    let _ = writeln!(text, "\n{}", draw::legend(table));
    if let Some(bytes) = &table.bytes {
        let most = bytes.iter().copied().fold(0.0, f64::max);
        let _ = writeln!(text, "activations weigh {} at most", crossmesh_core::units::Bytes(most as u64));
    }
    let parts = causes(&table.causes());
    if !parts.is_empty() {
        let _ = writeln!(text, "bubble: {parts}; inside a step {}", percent(table.timed.inner_bubble()));
    }
    let _ = writeln!(text, "busiest: {}", table.busiest_in_words());
    let _ = writeln!(text, "critical path: {}", table.path_in_words());
    if table.bound > 0.0 {
        let _ = writeln!(
            text,
            "{} {}, which no schedule of these layers on these devices beats",
            table.over_bound(),
            number(table.bound)
        );
    }
    let (highest, device) = table.highest();
    let _ = writeln!(
        text,
        "makespan {}, bubble {}, {} activations of its layers at most on {device}",
        number(table.makespan()),
        percent(table.timed.bubble()),
        number(highest)
    );
    text
}
