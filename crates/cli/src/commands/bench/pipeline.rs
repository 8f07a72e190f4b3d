//! `crossmesh bench pipeline`: whole training steps, with real bytes beside passes that are timed waits.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use crossmesh_core::cluster::Topology;
use crossmesh_core::step::StepReport;
use crossmesh_core::units::{Bytes, Rate, Seconds, parse_rate};
use serde::Serialize;

use crate::Answer;
use crate::commands::run::RunArgs;
use crate::known::{Known, all_series};
use crate::machine;
use crate::output::{self, Format, FormatArgs, Progress, Table};
use crate::pipeline::{Case, Scale, Series, Specimen, Suite};
use crate::report;
use crate::runner::{RunOptions, Work, run_work};
use crate::task::Task;

/// Without `--time`, time runs so that the shortest step takes about this long.
const STEP_S: f64 = 4.0;
const REPEAT: u32 = 3;

/// Series of a suite of training steps: measured on emulated hosts, with the prediction beside it, or only predicted.
///
/// Bytes, processes and NICs are real; compute is not: every pass is a timed wait on a virtual accelerator.
#[derive(Debug, clap::Args)]
#[command(after_help = "Time dilation keeps ratios: with NICs 25 times slower than the case's and time
10 times faster (--time 0.1), tensors are 250 times smaller, and everything
takes a tenth of what it would.

Examples:
  crossmesh bench pipeline --predict
  # as root
  crossmesh bench pipeline --emulate 400Mbit --html pipeline.html
  crossmesh bench pipeline --predict --case GPT --series eager-1f1b,signal \\
      --format json")]
pub struct PipelineArgs {
    /// Simulate instead of running
    #[arg(long)]
    predict: bool,
    /// paper, or a suite file
    #[arg(long, value_name = "S", default_value = "paper")]
    suite: String,
    /// Only the cases whose name contains this
    #[arg(long, value_name = "TEXT")]
    case: Option<String>,
    /// The series to compare: sendrecv, allgather, broadcast, overlap, eager-1f1b, minimal-window, signal; and gpipe, zb-h1, zb-h2,
    /// search [default: the first seven]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = Known(all_series), hide_possible_values = true)]
    series: Vec<String>,
    /// Seconds here for a second of the case [default: so that the shortest step takes about 4 s; predicted: 1]
    #[arg(long, value_name = "FACTOR")]
    time: Option<f64>,
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    format: FormatArgs,
    /// Also write a report with pictures: one HTML file
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    html: Option<PathBuf>,
    /// Also write every step as a document that `verify` and `simulate` read
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    steps: Option<PathBuf>,
}

/// A suite's results. All times are in the case's own seconds, whatever time was dilated to.
#[derive(Debug, Serialize)]
pub struct Results {
    pub schema: &'static str,
    pub suite: String,
    pub about: String,
    /// Passes are timed waits.
    pub virtual_accelerator: bool,
    /// The machine whose times these are; missing where nothing was run.
    pub machine: Option<String>,
    pub cases: Vec<CaseResult>,
}

#[derive(Debug, Serialize)]
pub struct CaseResult {
    pub name: String,
    pub about: String,
    pub microbatches: u32,
    pub devices: usize,
    pub hosts: usize,
    /// Over all edges, one way, of one microbatch.
    pub edge_bytes: u64,
    /// Seconds here for a second of the case, and bytes for a byte.
    pub time_scale: f64,
    pub byte_scale: f64,
    pub nic_bytes_per_s: f64,
    pub paper: String,
    /// No step of this case is shorter, in whatever order passes run and however tensors travel.
    pub lower_bound_s: f64,
    pub series: Vec<SeriesResult>,
}

#[derive(Debug, Serialize)]
pub struct SeriesResult {
    pub series: &'static str,
    pub about: &'static str,
    pub schedule: String,
    /// Forwards before the first backward, by stage.
    pub windows: Vec<u32>,
    pub predicted_s: f64,
    /// The busiest NIC's own time.
    pub bandwidth_s: f64,
    pub bubble: f64,
    /// Missing where nothing was run.
    pub measured_s: Option<Vec<f64>>,
    pub median_s: Option<f64>,
    pub over_predicted: Option<f64>,
    pub verified: Option<bool>,
    #[serde(skip)]
    pub timeline: Timeline,
    /// Of the last run, where a page will show it.
    #[serde(skip)]
    pub measured: Option<Timeline>,
}

/// When what ran, for drawing.
#[derive(Debug, Default)]
pub struct Timeline {
    pub step_s: f64,
    /// By device: letters and times of its passes.
    pub devices: Vec<Vec<Bar>>,
    /// By crossing and direction: when it was under way.
    pub crossings: Vec<(String, Vec<Bar>)>,
}

#[derive(Debug, Clone)]
pub struct Bar {
    pub kind: &'static str,
    pub microbatch: u32,
    pub start_s: f64,
    pub end_s: f64,
}

impl SeriesResult {
    /// What it took, or would take.
    pub fn seconds(&self) -> f64 {
        self.median_s.unwrap_or(self.predicted_s)
    }
}

impl CaseResult {
    pub fn of(&self, series: Series) -> Option<&SeriesResult> {
        self.series.iter().find(|s| s.series == series.name())
    }
}

pub fn run(args: &PipelineArgs) -> Result<Answer> {
    if !args.predict && args.run.emulate.is_none() {
        bail!(
            "steps are measured on emulated hosts\nhint: --emulate 400Mbit (as root), or --predict to simulate them"
        );
    }
    if let Some(time) = args.time.filter(|t| !(*t > 0.0 && t.is_finite())) {
        bail!(
            "--time {time}: time runs neither backwards nor not at all\nhint: --time 0.1 is ten times faster"
        );
    }
    let suite = Suite::open(&args.suite)?;
    let bench = Bench::of(args)?;
    let only = args.case.as_deref();
    let cases: Vec<&Case> = suite.cases.iter().filter(|c| only.is_none_or(|o| c.name.contains(o))).collect();
    if cases.is_empty() {
        bail!("no case of suite {} has `{}` in its name", suite.name, only.unwrap_or(""));
    }
    if let Some(folder) = &args.steps {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let results = Results {
        schema: "crossmesh.bench-pipeline/1",
        suite: suite.name.clone(),
        about: suite.about.clone(),
        virtual_accelerator: true,
        machine: (!args.predict).then(machine::machine),
        cases: cases.into_iter().map(|case| bench.case(case)).collect::<Result<_>>()?,
    };
    if let Some(path) = &args.html {
        output::write_file(path, report::pipeline::render(&results, report::provenance()))?;
    }
    match args.format.get() {
        Format::Text => output::print(&render(&results))?,
        Format::Json => output::print_json(&results)?,
    }
    let wrong = results.cases.iter().flat_map(|c| &c.series).any(|s| s.verified == Some(false));
    Ok(if wrong { Answer::No } else { Answer::Yes })
}

struct Bench {
    series: Vec<Series>,
    nic_bytes_per_s: Option<f64>,
    time: Option<f64>,
    /// Missing where nothing is run.
    run: Option<RunOptions>,
    /// Where steps are written.
    steps: Option<PathBuf>,
    progress: Progress,
}

impl Bench {
    fn of(args: &PipelineArgs) -> Result<Self> {
        let series = match args.series.is_empty() {
            true => Series::ALL.to_vec(),
            false => args.series.iter().map(|s| Series::parse(s)).collect::<Result<_>>()?,
        };
        let nic = args.run.nic().map(|rate| parse_rate(rate)).transpose().context("--emulate")?;
        let trace = args.html.is_some();
        let options = || Ok::<_, anyhow::Error>(RunOptions { trace, ..args.run.options(REPEAT, None)? });
        let run = if args.predict { None } else { Some(options()?) };
        Ok(Self {
            series,
            nic_bytes_per_s: nic,
            time: args.time,
            run,
            steps: args.steps.clone(),
            progress: Progress::new(),
        })
    }

    fn scale(&self, case: &Case) -> Result<Scale> {
        let time = match (self.time, &self.run) {
            (Some(time), _) => time,
            (None, None) => 1.0,
            (None, Some(_)) => {
                STEP_S / Specimen::new(case, Series::Signal, &Scale::FULL)?.predicted.step_s.max(1e-9)
            }
        };
        Ok(Scale { nic_bytes_per_s: self.nic_bytes_per_s, time })
    }

    fn case(&self, case: &Case) -> Result<CaseResult> {
        let scale = self.scale(case).with_context(|| format!("case `{}`", case.name))?;
        let full = Specimen::new(case, Series::Overlap, &Scale::FULL)?;
        let bytes = |c: &crossmesh_core::step::Crossing| -> u64 {
            c.forward.problem.reshards.iter().map(|r| r.src.layout.bytes()).sum()
        };
        let series = self.series.iter().map(|s| self.series(case, *s, &scale));
        Ok(CaseResult {
            name: case.name.clone(),
            about: case.about.clone(),
            microbatches: case.microbatches,
            devices: case.hosts.iter().sum::<u32>() as usize,
            hosts: case.hosts.len(),
            edge_bytes: full.step.crossings.iter().map(bytes).sum(),
            time_scale: scale.time,
            byte_scale: scale.bytes(case)?,
            nic_bytes_per_s: scale.nic_bytes_per_s.unwrap_or(case.nic_bytes_per_s()?),
            paper: case.paper.clone(),
            lower_bound_s: full.bound_s,
            series: series.collect::<Result<_>>().with_context(|| format!("case `{}`", case.name))?,
        })
    }

    fn series(&self, case: &Case, series: Series, scale: &Scale) -> Result<SeriesResult> {
        self.progress.say(&format!("{}: {}", case.name, series.name()));
        let specimen = Specimen::new(case, series, scale)?;
        if let Some(folder) = &self.steps {
            let path = folder.join(file_name(&case.name, series.name()));
            output::write_file(&path, &output::to_json(&specimen.doc)?)?;
        }
        let own = |seconds: f64| seconds / scale.time;
        let predicted_s = own(specimen.predicted.step_s);
        let measured = self.run.as_ref().map(|options| self.measure(&specimen, options)).transpose()?;
        self.progress.say("");
        let times: Option<Vec<f64>> = measured.as_ref().map(|m| m.seconds.iter().copied().map(own).collect());
        let median_s = measured.as_ref().map(|m| own(m.median_s()));
        Ok(SeriesResult {
            series: series.name(),
            about: series.about(),
            schedule: specimen.step.schedule.name().into(),
            windows: windows(&specimen),
            predicted_s,
            bandwidth_s: own(specimen.bandwidth_s),
            bubble: specimen.predicted.bubble(),
            measured_s: times,
            median_s,
            over_predicted: median_s.map(|m| m / predicted_s),
            verified: measured.as_ref().map(|m| m.verified()),
            timeline: timeline(&specimen, &specimen.predicted, scale),
            measured: measured.and_then(|m| m.trace).map(|traced| {
                timeline(&specimen, &StepReport::of(&specimen.step, &specimen.lowered, &traced.trace), scale)
            }),
        })
    }

    fn measure(&self, specimen: &Specimen, options: &RunOptions) -> Result<crate::runner::Measured> {
        let work = Work {
            task: &Task::of_step(&specimen.step, &specimen.lowered),
            document: output::to_json(&specimen.doc)?,
            cluster: &specimen.step.cluster,
            topology: &Topology::new(&specimen.step.cluster),
            predicted_s: specimen.predicted.step_s,
        };
        run_work(&work, options, &self.progress)
    }
}

/// What a step's document is called: the words of its case and its series.
fn file_name(case: &str, series: &str) -> String {
    let whole = format!("{case} {series}").to_ascii_lowercase();
    let words = whole.split(|c: char| !c.is_ascii_alphanumeric() && c != '.').filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join("-") + ".json"
}

/// Forwards before the first backward, by stage.
fn windows(specimen: &Specimen) -> Vec<u32> {
    let order = |passes: &Vec<crossmesh_core::schedule::Pass>| {
        passes.iter().take_while(|p| !p.kind.is_backward()).count() as u32
    };
    specimen.step.schedule.devices().iter().map(order).collect()
}

fn timeline(specimen: &Specimen, report: &StepReport, scale: &Scale) -> Timeline {
    let own = |seconds: f64| seconds / scale.time;
    let devices = report.devices.iter().map(|device| {
        let bar = |(pass, span): &(crossmesh_core::schedule::Pass, crossmesh_core::trace::OpSpan)| Bar {
            kind: pass.kind.letters(),
            microbatch: pass.microbatch.0,
            start_s: own(span.start_s),
            end_s: own(span.end_s),
        };
        device.passes.iter().map(bar).collect()
    });
    let mut crossings: Vec<(String, Vec<Bar>)> = vec![];
    for (instance, span) in specimen.lowered.instances.iter().zip(&report.crossings) {
        let edge = specimen.step.crossings[instance.crossing as usize].edge;
        let forward = instance.direction == crossmesh_core::step::Direction::Forward;
        let (from, to) = if forward { (edge.from, edge.to) } else { (edge.to, edge.from) };
        let name = format!("{} → {}", from.0, to.0);
        let bar = Bar {
            kind: if forward { "act" } else { "grad" },
            microbatch: instance.microbatch.0,
            start_s: own(span.start_s),
            end_s: own(span.end_s),
        };
        match crossings.iter_mut().find(|(n, _)| *n == name) {
            Some((_, bars)) => bars.push(bar),
            None => crossings.push((name, vec![bar])),
        }
    }
    Timeline { step_s: own(report.step_s), devices: devices.collect(), crossings }
}

fn render(results: &Results) -> String {
    let measured = results.cases.iter().flat_map(|c| &c.series).any(|s| s.median_s.is_some());
    let mut text = format!("suite {}: {}\n", results.suite, results.about);
    text += "compute is virtual: every pass is a timed wait; ";
    text += match measured {
        true => "processes, bytes and shaped NICs are real\n",
        false => "everything here is simulated\n",
    };
    if let Some(machine) = &results.machine {
        let _ = writeln!(text, "{}", machine::whose(machine, None, true));
    }
    for case in &results.cases {
        text += &render_case(case, measured);
    }
    text
}

fn render_case(case: &CaseResult, measured: bool) -> String {
    let mut text = format!("\n{}: {}\n", case.name, case.about);
    let _ = writeln!(
        text,
        "  {} on {} hosts, {} a microbatch crosses each way; run with NICs of {}, time × {:.4}, bytes × {:.5}",
        output::count(case.devices, "device"),
        case.hosts,
        Bytes(case.edge_bytes),
        Rate(case.nic_bytes_per_s),
        case.time_scale,
        case.byte_scale
    );
    let mut columns = vec!["series", "windows", "predicted"];
    if measured {
        columns.extend(["measured", "× predicted"]);
    }
    columns.extend(["× bound", "× signal", "× allgather's speed"]);
    let mut table = Table::new("llr");
    table.row(columns);
    let signal = case.of(Series::Signal).map(SeriesResult::seconds);
    let alpa = case.of(Series::AllGather).map(SeriesResult::seconds);
    for s in &case.series {
        let ratio = |other: Option<f64>| other.map_or("-".into(), |o| format!("{o:.3}"));
        let mut row = vec![s.series.to_string(), join(&s.windows), Seconds(s.predicted_s).to_string()];
        if measured {
            row.push(s.median_s.map_or("-".into(), |m| Seconds(m).to_string()));
            row.push(ratio(s.over_predicted));
        }
        row.push(format!("{:.3}", s.seconds() / case.lower_bound_s));
        row.push(ratio(signal.map(|o| s.seconds() / o)));
        row.push(ratio(alpa.map(|o| o / s.seconds())));
        table.row(row);
    }
    text += &table.render(2);
    text += &verdict(case);
    text
}

/// Ours against what nothing beats, and against the paper's figure.
fn verdict(case: &CaseResult) -> String {
    let Some(ours) = case.of(Series::MinimalWindow) else { return String::new() };
    let mut text = format!(
        "  minimal-window: {:.3} × the bound {} (no order of passes and no way to send is shorter)",
        ours.seconds() / case.lower_bound_s,
        Seconds(case.lower_bound_s)
    );
    if let (Some(alpa), false) = (case.of(Series::AllGather), case.paper.is_empty()) {
        let gain = 100.0 * (alpa.seconds() / ours.seconds() - 1.0);
        let _ = write!(text, "; {gain:+.0} % over allgather (the paper: {})", case.paper);
    }
    text + "\n"
}

fn join(windows: &[u32]) -> String {
    windows.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}
