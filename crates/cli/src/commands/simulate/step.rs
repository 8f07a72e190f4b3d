//! How long a training step takes, and what its devices do meanwhile.

use std::fmt::Write as _;

use anyhow::{Context, Result, bail};
use crossmesh_core::sim::simulate;
use crossmesh_core::step::doc::StepDoc;
use crossmesh_core::step::{Step, StepReport, lower_step};
use crossmesh_core::units::Seconds;
use serde::Serialize;

use crate::Answer;
use crate::output::{self, Format, Table, count};

use super::Args;

/// The answer as JSON.
#[derive(Debug, Serialize)]
struct StepSimulation {
    schema: &'static str,
    schedule: String,
    /// Whether one rank stood for the mesh of every stage.
    coarse: bool,
    predicted_s: f64,
    /// The share of time, over all devices, in which nothing is computed.
    bubble: f64,
    devices: Vec<DeviceTimes>,
}

#[derive(Debug, Serialize)]
struct DeviceTimes {
    device: u32,
    ranks: usize,
    passes: usize,
    busy_s: f64,
    idle_s: f64,
}

pub fn simulate_step(args: &Args, doc: &StepDoc) -> Result<Answer> {
    let name = || args.plan.display().to_string();
    if args.hosts.described()?.is_some() {
        bail!("{}: a step is planned for its own cluster\nhint: change `cluster` in the document", name());
    }
    if args.trace.is_some() {
        bail!(
            "a trace of a step is not drawn\nhint: `crossmesh bench pipeline --predict --html FILE` draws it"
        );
    }
    let mut step = doc.to_step().with_context(name)?;
    args.hosts.adjust(&mut step.cluster)?;
    let simulated = if args.coarse { step.coarse().with_context(name)? } else { step.clone() };
    let lowered = lower_step(&simulated).with_context(name)?;
    let trace = simulate(&lowered.program, &simulated.cluster).context("the step cannot be simulated")?;
    let report = StepReport::of(&simulated, &lowered, &trace);
    let answer = answer(&step, &report, args.coarse);
    match args.format.get() {
        Format::Text => output::print(&render(&name(), &answer))?,
        Format::Json => output::print_json(&answer)?,
    }
    Ok(Answer::Yes)
}

fn answer(step: &Step, report: &StepReport, coarse: bool) -> StepSimulation {
    let devices = report.devices.iter().map(|device| DeviceTimes {
        device: device.device.0,
        ranks: step.ranks_of(device.device).len(),
        passes: device.passes.len(),
        busy_s: device.busy_s,
        idle_s: report.step_s - device.busy_s,
    });
    StepSimulation {
        schema: "crossmesh.step-simulation/1",
        schedule: step.schedule.name().into(),
        coarse,
        predicted_s: report.step_s,
        bubble: report.bubble(),
        devices: devices.collect(),
    }
}

fn render(name: &str, answer: &StepSimulation) -> String {
    let ranks: usize = answer.devices.iter().map(|device| device.ranks).sum();
    let mut text = format!(
        "simulate step {name}: {}, {} on {}\n",
        answer.schedule,
        count(answer.devices.len(), "device"),
        count(ranks, "rank")
    );
    if answer.coarse {
        text += "  coarse: one rank stands for the mesh of every device, one message for every plan\n";
    }
    let mut table = Table::new("lr");
    table.row(["device", "ranks", "passes", "busy", "idle"]);
    for device in &answer.devices {
        let times = [device.busy_s, device.idle_s].map(|s| Seconds(s).to_string());
        let [busy, idle] = times;
        let (ranks, passes) = (device.ranks.to_string(), device.passes.to_string());
        table.row([format!("d{}", device.device), ranks, passes, busy, idle]);
    }
    text += &table.render(2);
    let bubble = 100.0 * answer.bubble;
    let _ = writeln!(text, "predicted    {}, {bubble:.1} % of it bubble", Seconds(answer.predicted_s));
    text
}
