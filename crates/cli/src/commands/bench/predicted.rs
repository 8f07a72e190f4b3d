//! `crossmesh bench train --predicted`: steps of jobs whose ranks say much to each other inside passes, on emulated hosts, beside what the simulator says of them.
//!
//! Compute is taken from the step itself, without what its passes waited; what is predicted is how long ranks wait for each other and for what crosses.

use std::fmt::Write as _;

use anyhow::{Context, Result};
use crossmesh_core::units::{Rate, Seconds};
use serde::Serialize;

use super::inside::{config, nic_for, spread};
use super::train::{FAST, TrainArgs};
use crate::Answer;
use crate::machine;
use crate::output::{self, Format, Progress, Table};
use crate::runner::RunOptions;
use crate::training::overlap::{BESIDE, Bench, Ran, predicted_s};

/// Rounds, unless --repeat says otherwise.
const ROUNDS: u32 = 3;
/// How far off a prediction may be.
const NEAR: f64 = 0.05;
/// What a rank of the first job sends in a step takes this share of its compute, unless a rate is given.
const SHARE: f64 = 0.5;

/// A job, by what it has beside the others.
struct Job {
    name: &'static str,
    sets: &'static [&'static str],
}

const DP: &str = "stage.0.mesh=\"dp 2\"";
const TWO_STAGES: &str = "stage.0.repeat=2";

const JOBS: [Job; 12] = [
    Job { name: "tp 2", sets: &[] },
    Job { name: "tp 2, sequence parallel", sets: &["stage.0.sequence_parallel=true"] },
    Job { name: "tp 2, ladder", sets: &["model.residual=\"ladder\""] },
    Job { name: "tp 2, two strands", sets: &["train.strands=2"] },
    Job { name: "tp 2, everything recomputed", sets: &["train.recompute=\"full\""] },
    Job { name: "dp 2", sets: &[DP] },
    Job { name: "dp 2, ZeRO-1", sets: &[DP, "optimizer.zero=1"] },
    Job { name: "dp 2, ZeRO-2", sets: &[DP, "optimizer.zero=2"] },
    Job { name: "dp 2, ZeRO-3", sets: &[DP, "optimizer.zero=3"] },
    Job {
        name: "dp 2, ZeRO-3, everything recomputed",
        sets: &[DP, "optimizer.zero=3", "train.recompute=\"full\""],
    },
    Job { name: "two stages of tp 2", sets: &[TWO_STAGES] },
    Job { name: "two stages of dp 2, ZeRO-1", sets: &[DP, TWO_STAGES, "optimizer.zero=1"] },
];

#[derive(Debug, Serialize)]
struct Results {
    schema: &'static str,
    about: String,
    /// The machine whose times these are.
    machine: String,
    nic_bytes_per_s: f64,
    rounds: u32,
    jobs: Vec<Row>,
    /// How many predictions are within 5 %.
    near: usize,
}

#[derive(Debug, Serialize)]
struct Row {
    job: &'static str,
    /// Of every round, its last step.
    steps_s: Vec<f64>,
    predicted_s: Vec<f64>,
    /// How much longer steps took than was predicted, as a share of that: the median of the rounds, the least and the most.
    over: [f64; 3],
    exposed: f64,
}

pub fn run(args: &TrainArgs, options: &RunOptions) -> Result<Answer> {
    let (name, text) = args.config_or(config)?;
    let progress = Progress::new();
    let rounds = args.run.repeat.unwrap_or(ROUNDS);
    let once = |job: &Job, nic: &str, steps: usize| {
        let sets: Vec<String> =
            args.sets.iter().cloned().chain(job.sets.iter().map(|s| s.to_string())).collect();
        let bench = Bench { name: &name, text: &text, sets: &sets, steps, options };
        bench.run(BESIDE, nic, &progress).with_context(|| format!("as `{}`", job.name))
    };
    let nic = match args.run.nic() {
        Some(rate) => rate.clone(),
        None => nic_for(SHARE, &once(&JOBS[0], FAST, 2)?)?,
    };
    let mut ran: Vec<Vec<Ran>> = JOBS.iter().map(|_| vec![]).collect();
    for round in 0..rounds {
        progress.say(&format!("round {} of {rounds}", round + 1));
        for (job, ran) in JOBS.iter().zip(&mut ran) {
            ran.push(once(job, &nic, usize::from(args.steps))?);
        }
    }
    let results = results(&ran)?;
    match args.format.get() {
        Format::Text => output::print(&render(&results))?,
        Format::Json => output::print_json(&results)?,
    }
    Ok(Answer::Yes)
}

fn results(ran: &[Vec<Ran>]) -> Result<Results> {
    let row = |(job, ran): (&Job, &Vec<Ran>)| -> Result<Row> {
        // The last step is the one whose passes are known.
        let steps_s: Vec<f64> = ran.iter().map(Ran::last_s).collect();
        let predicted = ran.iter().map(|ran| predicted_s(ran, &ran.times()));
        let predicted_s: Vec<f64> = predicted.collect::<Result<_>>()?;
        let over: Vec<f64> = steps_s.iter().zip(&predicted_s).map(|(step, said)| step / said - 1.0).collect();
        let exposed = spread(&ran.iter().map(Ran::exposed).collect::<Vec<_>>())[0];
        Ok(Row { job: job.name, steps_s, predicted_s, over: spread(&over), exposed })
    };
    let jobs = JOBS.iter().zip(ran).map(row).collect::<Result<Vec<_>>>()?;
    let first = &ran[0][0].training;
    Ok(Results {
        schema: "crossmesh.bench-train-predicted/1",
        about: first.about(),
        machine: machine::machine(),
        nic_bytes_per_s: first.resolved.job.cluster.hosts[0].out_bytes_per_s(),
        rounds: ran[0].len() as u32,
        near: jobs.iter().filter(|row| row.over[0].abs() <= NEAR).count(),
        jobs,
    })
}

fn render(results: &Results) -> String {
    let mut text = format!("{}\n{}\n", results.about, machine::whose(&results.machine, None, true));
    let _ = writeln!(
        text,
        "every rank on a host of its own, NICs of {}, emulated\n",
        Rate(results.nic_bytes_per_s)
    );
    let mut table = Table::new("lrrrrr");
    table.row(["job", "step", "predicted", "over", "from – to", "waiting"]);
    for row in &results.jobs {
        let [median, least, most] = row.over.map(|over| format!("{:+.1} %", 100.0 * over));
        table.row([
            row.job.to_string(),
            Seconds(spread(&row.steps_s)[0]).to_string(),
            Seconds(spread(&row.predicted_s)[0]).to_string(),
            median,
            format!("{least} – {most}"),
            format!("{:.0} %", 100.0 * row.exposed),
        ]);
    }
    text += &table.render(0);
    let _ = writeln!(
        text,
        "\nmedians of {} rounds; {} of {} predictions are within {:.0} %",
        results.rounds,
        results.near,
        results.jobs.len(),
        100.0 * NEAR
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_job_is_a_config() {
        for job in JOBS {
            let sets: Vec<String> = job.sets.iter().map(|s| s.to_string()).collect();
            let config = crossmesh_train::config::Config::read("bench", &config(), &sets).unwrap();
            crossmesh_train::config::resolve(&config, Some(64), None)
                .unwrap_or_else(|e| panic!("{}: {e}", job.name));
        }
    }
}
