//! `crossmesh schedule grid`: minimal-window against eager-1F1B over pipelines and hops.

use std::fmt::Write as _;

use anyhow::{Result, bail};
use crossmesh_core::schedule::generate::Spec;
use crossmesh_core::schedule::{Backward, Name, generate};
use serde::Serialize;

use crate::Answer;
use crate::output::{self, Format, FormatArgs, Table};
use crate::timetable::{Timetable, number};

/// Compare minimal-window with eager-1F1B over a grid: capped at eager's memory, and without a cap.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  crossmesh schedule grid
  crossmesh schedule grid --stages 4,8 --comm 0.1,1 --microbatches 64")]
pub struct GridArgs {
    /// Pipelines of so many stages
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "2,3,4,6,8,12,16")]
    stages: Vec<u32>,
    /// Hops, as multiples of a forward
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "0.1,0.25,0.5,0.75,1,1.5,2",
        allow_hyphen_values = true
    )]
    comm: Vec<f64>,
    /// Microbatches [default: four times the stages]
    #[arg(long, value_name = "M")]
    microbatches: Option<u32>,
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Debug, Serialize)]
struct Grid {
    schema: &'static str,
    settings: Vec<Setting>,
}

/// f = b = w = 1.
#[derive(Debug, Serialize)]
struct Setting {
    /// Whether W is delayed, in both.
    split: bool,
    comm: f64,
    stages: u32,
    microbatches: u32,
    eager: Figures,
    /// minimal-window, each device capped at what eager holds there.
    capped: Figures,
    uncapped: Figures,
    /// With all communication hidden but that of the first microbatch there and of the last one back.
    hidden: f64,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct Figures {
    makespan: f64,
    /// Of the first device, which holds most.
    peak: f64,
    /// Of all devices together.
    sum: f64,
}

impl Setting {
    fn is_slower(&self) -> bool {
        self.capped.makespan > self.eager.makespan * (1.0 + 1e-9)
    }

    fn holds_less(&self) -> bool {
        self.capped.peak < self.eager.peak - 1e-9
    }

    fn is_hidden(&self) -> bool {
        self.uncapped.makespan <= self.hidden * (1.0 + 1e-9)
    }
}

pub fn run(args: &GridArgs) -> Result<Answer> {
    let mut settings = Vec::new();
    for split in [true, false] {
        for &comm in &args.comm {
            for &stages in &args.stages {
                let microbatches = args.microbatches.unwrap_or(stages.saturating_mul(4));
                settings.push(setting(split, comm, stages, microbatches)?);
            }
        }
    }
    if settings.is_empty() {
        bail!("the grid has no setting\nhint: give --stages and --comm a value each");
    }
    match args.format.get() {
        Format::Text => output::print(&render(&settings))?,
        Format::Json => output::print_json(&Grid { schema: "crossmesh.schedule-grid/1", settings })?,
    }
    Ok(Answer::Yes)
}

fn setting(split: bool, comm: f64, stages: u32, microbatches: u32) -> Result<Setting> {
    let backward = Some(if split { Backward::Split } else { Backward::Fused });
    let spec = Spec { backward, ..Spec::even(stages, microbatches).with_hop(comm) };
    let eager = timetable(Name::Eager1F1B, &spec)?;
    let capped = Spec { caps: Some(eager.shares.clone()), ..spec.clone() };
    let (p, m) = (f64::from(stages), f64::from(microbatches));
    let period = comm.max(3.0);
    Ok(Setting {
        split,
        comm,
        stages,
        microbatches,
        eager: figures(&eager),
        capped: figures(&timetable(Name::MinimalWindow, &capped)?),
        uncapped: figures(&timetable(Name::MinimalWindow, &spec)?),
        hidden: (m - 1.0) * period + p * 3.0 + 2.0 * (p - 1.0) * comm,
    })
}

fn timetable(name: Name, spec: &Spec) -> Result<Timetable> {
    let schedule = generate(name, spec)?;
    Timetable::new(schedule, spec, &[])
}

fn figures(table: &Timetable) -> Figures {
    Figures { makespan: table.makespan(), peak: table.highest().0, sum: table.shares.iter().sum() }
}

fn render(settings: &[Setting]) -> String {
    let mut table = Table::new("lrrrrrrrrrrl");
    table.row(["", "", "", "", "eager", "", "capped", "", "uncapped", ""]);
    table.row(["W", "c/F", "p", "m", "time", "peak", "time", "peak", "time", "peak", "hidden", ""]);
    for s in settings {
        let remark = match (s.is_slower(), s.holds_less()) {
            (true, _) => "slower",
            (false, true) => "less memory",
            (false, false) => "",
        };
        table.row([
            if s.split { "on" } else { "off" }.to_string(),
            number(s.comm),
            s.stages.to_string(),
            s.microbatches.to_string(),
            number(s.eager.makespan),
            number(s.eager.peak),
            number(s.capped.makespan),
            number(s.capped.peak),
            number(s.uncapped.makespan),
            number(s.uncapped.peak),
            if s.is_hidden() { "yes" } else { "no" }.to_string(),
            remark.to_string(),
        ]);
    }
    let mut text =
        String::from("minimal-window and eager-1f1b, f = b = w = 1; W on: backwards are split in both\n\n");
    text += &table.render(2);
    text.push('\n');
    for (what, split) in [("on", true), ("off", false)] {
        let of: Vec<&Setting> = settings.iter().filter(|s| s.split == split).collect();
        let count = |holds: fn(&Setting) -> bool| of.iter().filter(|s| holds(s)).count();
        let _ = writeln!(
            text,
            "W {what}: within eager's memory slower in {}, less memory in {} of {}; without a cap hidden in {}",
            count(Setting::is_slower),
            count(Setting::holds_less),
            of.len(),
            count(Setting::is_hidden)
        );
    }
    let all = settings.iter().filter(|s| s.holds_less()).count();
    let _ =
        writeln!(text, "minimal-window holds less than eager-1f1b in {all} of {} settings", settings.len());
    text
}
