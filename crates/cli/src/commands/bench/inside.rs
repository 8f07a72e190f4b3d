//! `crossmesh bench train --all-reduce`: what hides the all-reduces inside a stage whose ranks are on several hosts.
//!
//! The series take turns, round after round, so that whatever else the machine does meets all of them; a series is compared with the plain step of its own round.

use std::fmt::Write as _;

use anyhow::{Context, Result, bail};
use crossmesh_core::units::{Rate, Seconds};
use serde::Serialize;

use super::train::{FAST, TrainArgs};
use crate::Answer;
use crate::machine;
use crate::output::{self, Format, Progress, Table};
use crate::runner::RunOptions;
use crate::training::overlap::{BESIDE, Bench, Ran};

/// Rounds, unless --repeat says otherwise.
const ROUNDS: u32 = 3;

/// A way to run the same layers.
#[derive(Debug, Clone, Copy)]
struct Way {
    name: &'static str,
    about: &'static str,
    sets: &'static [&'static str],
}

const WAYS: [Way; 3] = [
    Way { name: "plain", about: "who needs a sum waits for it", sets: &[] },
    Way { name: "strands", about: "two halves of a microbatch take turns", sets: &["train.strands=2"] },
    Way {
        name: "ladder",
        about: "a branch reads the stream without the one before: another model",
        sets: &["model.residual=\"ladder\""],
    },
];

#[derive(Debug, Serialize)]
struct Results {
    schema: &'static str,
    about: String,
    /// The machine whose times these are.
    machine: String,
    nic_bytes_per_s: f64,
    /// What was asked for, and what the plain step's waiting was of its compute.
    all_reduce: f64,
    all_reduce_measured: f64,
    rounds: u32,
    series: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    series: &'static str,
    about: &'static str,
    /// Of every round, the median of its steps.
    steps_s: Vec<f64>,
    median_s: f64,
    /// How many times as fast as the plain step of the same round: the median, the least and the most.
    over_plain: [f64; 3],
    exposed: f64,
}

/// Decoder layers shared out over two hosts.
pub fn config() -> String {
    "[model]\nkind = \"llama\"\ncontext = 128\nwidth = 256\nlayers = 4\nheads = 4\n\n\
     [data]\nkind = \"language\"\n\n\
     [train]\nbatch = 16\nmicrobatches = 2\nthreads = 1\n\n\
     [cluster]\ndevices_per_host = 1\n\n\
     [[stage]]\nmesh = \"tp 2\"\n"
        .to_string()
}

/// The rate at which what a rank sends in a step takes this share of its compute.
pub fn nic_for(share: f64, ran: &Ran) -> Result<String> {
    let (compute_s, sent) = (ran.mean(|r| r.times.compute), ran.mean(|r| r.bytes_sent as f64));
    if compute_s <= 0.0 || sent <= 0.0 {
        bail!(
            "no rank of this job sends anything inside a stage\nhint: give a stage ranks along tp: mesh = \"tp 2\""
        );
    }
    Ok(format!("{:.0}B/s", sent / (share * compute_s)))
}

pub fn run(args: &TrainArgs, share: f64, options: &RunOptions) -> Result<Answer> {
    if !(share.is_finite() && share > 0.0) {
        bail!("--all-reduce {share}: it takes some time\nhint: 0.5 is half of the compute beside it");
    }
    let (name, text) = args.config_or(config)?;
    let progress = Progress::new();
    let rounds = args.run.repeat.unwrap_or(ROUNDS);
    let once = |way: &Way, nic: &str, steps: usize| {
        let sets: Vec<String> =
            args.sets.iter().cloned().chain(way.sets.iter().map(|s| s.to_string())).collect();
        let bench = Bench { name: &name, text: &text, sets: &sets, steps, options };
        bench.run(BESIDE, nic, &progress).with_context(|| format!("as `{}`", way.name))
    };
    let nic = match args.run.nic() {
        Some(rate) => rate.clone(),
        None => nic_for(share, &once(&WAYS[0], FAST, 2)?)?,
    };
    let mut ran: Vec<Vec<Ran>> = WAYS.iter().map(|_| vec![]).collect();
    for round in 0..rounds {
        progress.say(&format!("round {} of {rounds}", round + 1));
        for (way, ran) in WAYS.iter().zip(&mut ran) {
            ran.push(once(way, &nic, usize::from(args.steps))?);
        }
    }
    let results = results(share, &ran);
    match args.format.get() {
        Format::Text => output::print(&render(&results))?,
        Format::Json => output::print_json(&results)?,
    }
    Ok(Answer::Yes)
}

fn results(share: f64, ran: &[Vec<Ran>]) -> Results {
    let plain = &ran[0];
    let row = |(way, ran): (&Way, &Vec<Ran>)| {
        let steps_s: Vec<f64> = ran.iter().map(Ran::median_s).collect();
        let ratios: Vec<f64> = plain.iter().zip(&steps_s).map(|(plain, s)| plain.median_s() / s).collect();
        Row {
            series: way.name,
            about: way.about,
            median_s: spread(&steps_s)[0],
            over_plain: spread(&ratios),
            steps_s,
            exposed: spread(&ran.iter().map(Ran::exposed).collect::<Vec<_>>())[0],
        }
    };
    let waited = |ran: &Ran| ran.mean(|r| r.times.exposed) / ran.mean(|r| r.times.compute);
    Results {
        schema: "crossmesh.bench-train-inside/1",
        about: plain[0].training.about(),
        machine: machine::machine(),
        nic_bytes_per_s: plain[0].training.resolved.job.cluster.hosts[0].out_bytes_per_s(),
        all_reduce: share,
        all_reduce_measured: spread(&plain.iter().map(waited).collect::<Vec<_>>())[0],
        rounds: plain.len() as u32,
        series: WAYS.iter().zip(ran).map(row).collect(),
    }
}

/// The median, the least and the most.
pub fn spread(values: &[f64]) -> [f64; 3] {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = |i: usize| sorted.get(i).copied().unwrap_or(f64::NAN);
    [at(sorted.len() / 2), at(0), at(sorted.len().saturating_sub(1))]
}

fn render(results: &Results) -> String {
    let mut text = format!("{}\n{}\n", results.about, machine::whose(&results.machine, None, true));
    let _ = writeln!(
        text,
        "NICs of {}, emulated; the plain step waits {:.2} of its compute for all-reduces\n",
        Rate(results.nic_bytes_per_s),
        results.all_reduce_measured
    );
    let mut table = Table::new("lrrrrl");
    table.row(["series", "step", "× plain", "from – to", "exposed", ""]);
    for row in &results.series {
        let [median, least, most] = row.over_plain;
        table.row([
            row.series.to_string(),
            Seconds(row.median_s).to_string(),
            format!("{median:.2}"),
            format!("{least:.2} – {most:.2}"),
            format!("{:.0} %", 100.0 * row.exposed),
            row.about.to_string(),
        ]);
    }
    text += &table.render(0);
    let _ = writeln!(text, "\nmedians of {} rounds, in which the series took turns", results.rounds);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads_are_medians_and_ends() {
        assert_eq!(spread(&[3.0, 1.0, 2.0]), [2.0, 1.0, 3.0]);
        assert_eq!(spread(&[4.0]), [4.0, 4.0, 4.0]);
    }

    #[test]
    fn every_way_is_a_config() {
        for way in WAYS {
            let sets: Vec<String> = way.sets.iter().map(|s| s.to_string()).collect();
            crossmesh_train::config::Config::read("bench", &config(), &sets).unwrap();
        }
    }
}
