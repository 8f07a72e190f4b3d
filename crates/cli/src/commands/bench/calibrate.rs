//! `crossmesh bench calibrate`: what messages and bytes cost on this machine, measured, as a cluster file.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use crossmesh_core::cluster::{Cache, Cluster, Host, Topology};
use crossmesh_core::id::Rank;
use crossmesh_core::region::{Region, Span};
use crossmesh_core::reshard::problem::Hosts;
use crossmesh_core::reshard::{Plan, PlanOptions, Problem, default_chunk};
use crossmesh_core::sim::simulate;
use crossmesh_core::units::{Bytes, Rate, Seconds, parse_bytes};
use serde::Serialize;

use crate::Answer;
use crate::commands::run::RunArgs;
use crate::input::HostArgs;
use crate::machine::{machine, today};
use crate::output::{self, Format, FormatArgs, Progress, Table, count};
use crate::predict::Prediction;
use crate::runner::{RunOptions, median, run_plan};
use fit::{CACHES, Costs, Row, fit};

mod fit;

const SIZES: [u64; 7] = [1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20, 32 << 20, 256 << 20];
const COUNTS: [u64; 5] = [1, 10, 100, 1000, 10_000];
/// Between those: what is found is held against rows that it was not found from.
const HELD_OUT_SIZES: [u64; 4] = [4 << 10, 128 << 10, 2 << 20, 64 << 20];
const HELD_OUT_COUNTS: [u64; 4] = [3, 30, 300, 3000];
/// The fastest counts: what the machine does while nobody else has the processor.
const REPEAT: u32 = 9;
/// Pairs of processes that share these runs. One pair may lie well or badly on the processors for as long as it lives, so the median of their
/// fastest runs counts.
const PAIRS: u32 = 9;
/// A row that takes less than this is repeated more often, up to so many times: one wake-up more or less is a large part of it.
const SHORT_S: f64 = 5e-3;
const MOST_TIMES_MORE: f64 = 20.0;

/// Measure what messages and bytes cost on this machine, and write a cluster file that says so.
#[derive(Debug, clap::Args)]
#[command(after_help = "Two processes send 1 to 10,000 messages of 1 KiB to 256 MiB, one behind the
other, over TCP and over shared memory, 9 times (--repeat), and up to 20 times
as often where that is short. Nine pairs of processes share these runs; what
counts is the fastest run of a pair, in the median of the pairs. Latency, the
cost of a message and the rate are those that explain the times best: the worst
error and the mean one, as shares of the measured times, are made small; where
small rows of shared memory move faster than large ones, what fits into a cache
has a rate of its own. Then every row is simulated with them: predicted beside
measured; and so are rows of other sizes and counts, which had no part in it.
The last line counts all of them.

Where others use the processor all the time, the numbers are of a machine in
use.

Examples:
  crossmesh bench calibrate -o here.toml
  crossmesh bench calibrate --max-bytes 16MiB --repeat 9
  crossmesh bench calibrate --emulate 1Gbit -o emulated.toml      # as root")]
pub struct CalibrateArgs {
    /// Rows of more bytes than this are left out
    #[arg(long, value_name = "BYTES", default_value = "256MiB")]
    max_bytes: String,
    /// Write a cluster file of two hosts with two devices each
    #[arg(short = 'o', long = "output", value_name = "FILE", help_heading = "Output")]
    output: Option<PathBuf>,
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    format: FormatArgs,
}

/// How two ranks reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Way {
    Tcp,
    SharedMemory,
}

/// All results.
#[derive(Debug, Serialize)]
struct Results {
    schema: &'static str,
    machine: String,
    /// The day of it.
    date: String,
    /// The rate that NICs were shaped to; missing on loopback.
    emulated: Option<String>,
    ways: Vec<WayResult>,
    median_error: f64,
    worst_error: f64,
    verified: bool,
}

/// One way, and what it costs.
#[derive(Debug, Serialize)]
struct WayResult {
    way: Way,
    latency_s: f64,
    message_s: f64,
    bytes_per_s: f64,
    /// Of a row so many bytes move at that rate, where small rows move faster.
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cached_bytes_per_s: Option<f64>,
    median_error: f64,
    worst_error: f64,
    rows: Vec<RowResult>,
    /// Rows that the costs were not found from.
    held_out: Vec<RowResult>,
    held_out_median_error: f64,
    held_out_worst_error: f64,
}

/// Messages one behind the other.
#[derive(Debug, Serialize)]
struct RowResult {
    messages: u64,
    /// Of each.
    bytes: u64,
    /// Of all pairs of processes, one behind the other.
    measured_s: Vec<f64>,
    /// A pair's fastest, in the median of the pairs.
    fastest_s: f64,
    predicted_s: f64,
    /// Predicted over measured, less one.
    error: f64,
}

/// A row that was measured, and the program that was run.
struct Ran {
    prediction: Prediction,
    row: Row,
    measured_s: Vec<f64>,
    verified: bool,
}

pub fn run(args: &CalibrateArgs) -> Result<Answer> {
    let max_bytes = parse_bytes(&args.max_bytes).context("--max-bytes")?;
    if max_bytes < SIZES[0] {
        bail!(
            "--max-bytes {max_bytes}: the smallest message has {} bytes\nhint: give 1MiB or more",
            SIZES[0]
        );
    }
    let progress = Progress::new();
    let (mut cluster, mut ways, mut verified) =
        (Cluster::of_hosts(vec![Host::with_devices(2); 2]), vec![], true);
    for way in [Way::Tcp, Way::SharedMemory] {
        let fits = |(messages, bytes): &(u64, u64)| messages * bytes <= max_bytes;
        let ran = measure(way, grid(&SIZES, &COUNTS).filter(fits), args, &progress)?;
        let held_out = grid(&HELD_OUT_SIZES, &HELD_OUT_COUNTS).filter(fits);
        let held_out = measure(way, held_out, args, &progress)?;
        verified &= ran.iter().chain(&held_out).all(|r| r.verified);
        let costs = fit(&ran.iter().map(|r| r.row).collect::<Vec<_>>(), way.caches());
        way.set(&mut cluster, costs);
        ways.push(WayResult::of(way, costs, ran, held_out)?);
    }
    progress.say("");
    let errors: Vec<f64> = ways.iter().flat_map(WayResult::errors).collect();
    let results = Results {
        schema: "crossmesh.calibration/1",
        machine: machine(),
        date: today(),
        emulated: args.run.emulate.clone(),
        median_error: median(&errors),
        worst_error: worst(&errors),
        ways,
        verified,
    };
    if let Some(path) = &args.output {
        output::write_file(path, cluster_file(&results, &cluster))?;
    }
    match args.format.get() {
        Format::Text => output::print(&render(&results))?,
        Format::Json => output::print_json(&results)?,
    }
    Ok(if results.verified { Answer::Yes } else { Answer::No })
}

/// So many messages of so many bytes: every count with every size.
fn grid(sizes: &[u64], counts: &[u64]) -> impl Iterator<Item = (u64, u64)> {
    sizes.iter().flat_map(|bytes| counts.iter().map(|messages| (*messages, *bytes)))
}

/// Runs rows of a way.
fn measure(
    way: Way,
    rows: impl Iterator<Item = (u64, u64)>,
    args: &CalibrateArgs,
    progress: &Progress,
) -> Result<Vec<Ran>> {
    let options = args.run.options(REPEAT, None)?;
    let mut ran = vec![];
    for (messages, bytes) in rows {
        let row = format!("{}: {} of {}", way.name(), count(messages as usize, "message"), Bytes(bytes));
        progress.say(&row);
        let prediction = Prediction::of_plan(way.plan(messages, bytes, args.run.nic())?)?;
        let (mut fastest, mut measured_s, mut verified) = (vec![], vec![], true);
        for repeat in shared_out(repeats(options.repeat, messages, bytes), PAIRS.min(options.repeat)) {
            let options = RunOptions { repeat, ..options.clone() };
            let measured = run_plan(&prediction, &options, &Progress::silent())?;
            fastest.push(measured.seconds.iter().copied().fold(f64::INFINITY, f64::min));
            verified &= measured.verified();
            measured_s.extend(measured.seconds);
        }
        let row = Row { messages, bytes, seconds: median(&fastest) };
        ran.push(Ran { prediction, row, verified, measured_s });
    }
    Ok(ran)
}

/// Of so many runs those of each pair of processes.
fn shared_out(runs: u32, pairs: u32) -> impl Iterator<Item = u32> {
    (0..pairs).map(move |pair| (pair + 1) * runs / pairs - pair * runs / pairs)
}

/// How often a row is run: a short one more often, at what a message and a byte cost on a machine of today, roughly.
fn repeats(repeat: u32, messages: u64, bytes: u64) -> u32 {
    let seconds = 40e-6 + messages as f64 * (1e-6 + bytes as f64 / 4e9);
    (f64::from(repeat) * (SHORT_S / seconds).clamp(1.0, MOST_TIMES_MORE)) as u32
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::Tcp => "TCP",
            Way::SharedMemory => "shared memory",
        }
    }

    fn cluster(self) -> Cluster {
        Cluster::of_hosts(match self {
            Way::Tcp => vec![Host::with_devices(1); 2],
            Way::SharedMemory => vec![Host::with_devices(2)],
        })
    }

    /// Those that may carry what is small.
    fn caches(self) -> &'static [u64] {
        match self {
            Way::Tcp => &[],
            Way::SharedMemory => &CACHES,
        }
    }

    /// Writes what it costs into a cluster.
    fn set(self, cluster: &mut Cluster, costs: Costs) {
        let Costs { latency_s, message_s, bytes_per_s, cache } = costs;
        match self {
            Way::Tcp => {
                (cluster.latency_s, cluster.message_s) = (latency_s, message_s);
                for host in &mut cluster.hosts {
                    (host.nic_out_bytes_per_s, host.nic_in_bytes_per_s) = (bytes_per_s, bytes_per_s);
                }
            }
            Way::SharedMemory => {
                (cluster.local_latency_s, cluster.local_message_s) = (latency_s, message_s);
                for host in &mut cluster.hosts {
                    (host.local_bytes_per_s, host.cache) = (bytes_per_s, cache);
                }
            }
        }
    }

    /// A tensor that goes from one rank to the other in so many messages.
    fn plan(self, messages: u64, bytes: u64, nic: Option<&String>) -> Result<Plan> {
        let layout = |mesh: &str, rank: u32| {
            format!("u8[{}]@{mesh}{{d:1}}={rank}(_)", messages * bytes).parse().context("a layout of ours")
        };
        let mut cluster = self.cluster();
        HostArgs { nic: nic.cloned(), ..HostArgs::default() }.adjust(&mut cluster)?;
        let pair = (String::new(), layout("A", 0)?, layout("B", 1)?);
        let problem = Problem::new(vec![pair], Hosts::Described(cluster))?;
        let chunk = default_chunk(&problem, &PlanOptions::default())?;
        let mut plan = Plan::new(problem, "messages", chunk);
        for at in 0..messages {
            let region = plan.add_region(Region::new(vec![Span::new(at * bytes, (at + 1) * bytes)]));
            plan.add(0, Rank(0), Rank(1), region, &[]);
        }
        Ok(plan)
    }
}

impl WayResult {
    /// Simulates every row with the costs that were found.
    fn of(way: Way, costs: Costs, ran: Vec<Ran>, held_out: Vec<Ran>) -> Result<Self> {
        let mut cluster = way.cluster();
        way.set(&mut cluster, costs);
        debug_assert_eq!(Topology::new(&cluster).num_ranks(), 2);
        let simulated = |ran: Vec<Ran>| -> Result<Vec<RowResult>> {
            ran.into_iter().map(|ran| RowResult::of(ran, &cluster)).collect()
        };
        let (rows, held_out) = (simulated(ran)?, simulated(held_out)?);
        let (median_error, worst_error) = off_by(&rows);
        let (held_out_median_error, held_out_worst_error) = off_by(&held_out);
        let Costs { latency_s, message_s, bytes_per_s, cache } = costs;
        Ok(Self {
            way,
            latency_s,
            message_s,
            bytes_per_s,
            cache_bytes: cache.map(|cache| cache.bytes),
            cached_bytes_per_s: cache.map(|cache| cache.bytes_per_s),
            median_error,
            worst_error,
            rows,
            held_out,
            held_out_median_error,
            held_out_worst_error,
        })
    }

    /// Of all rows, those too that had no part in the fit.
    fn errors(&self) -> impl Iterator<Item = f64> {
        self.rows.iter().chain(&self.held_out).map(|row| row.error.abs())
    }
}

impl RowResult {
    fn of(Ran { prediction, row, measured_s, .. }: Ran, cluster: &Cluster) -> Result<Self> {
        let mut problem = prediction.plan.problem;
        problem.move_to(cluster.clone());
        let predicted_s = simulate(&prediction.program, &problem.cluster)?.makespan_s;
        let Row { messages, bytes, seconds } = row;
        let error = row.error(predicted_s);
        Ok(Self { messages, bytes, measured_s, fastest_s: seconds, predicted_s, error })
    }
}

/// By how much predictions are off, in the median and at worst; nothing of no rows.
fn off_by(rows: &[RowResult]) -> (f64, f64) {
    let errors: Vec<f64> = rows.iter().map(|row| row.error.abs()).collect();
    if errors.is_empty() { (0.0, 0.0) } else { (median(&errors), worst(&errors)) }
}

fn worst(errors: &[f64]) -> f64 {
    errors.iter().copied().fold(0.0, f64::max)
}

fn render(results: &Results) -> String {
    let mut text = format!("calibrated on {}{}, {}\n", results.machine, emulated(results), results.date);
    for way in &results.ways {
        let _ = writeln!(
            text,
            "\n{}: latency {}, {} a message at each end, {}{}",
            way.way.name(),
            Seconds(way.latency_s),
            Seconds(way.message_s),
            Rate(way.bytes_per_s),
            cached(way)
        );
        let mut table = Table::new("r");
        table.row(["messages", "bytes each", "measured", "predicted", "error"]);
        let rows =
            way.rows.iter().map(|row| (row, "")).chain(way.held_out.iter().map(|row| (row, "held out")));
        for (row, note) in rows {
            table.row([
                row.messages.to_string(),
                Bytes(row.bytes).to_string(),
                Seconds(row.fastest_s).to_string(),
                Seconds(row.predicted_s).to_string(),
                format!("{:+.1} %", 100.0 * row.error),
                note.to_string(),
            ]);
        }
        text += &table.render(2);
        let _ = writeln!(
            text,
            "  off by {}; {} held out, by {}",
            told((way.median_error, way.worst_error)),
            count(way.held_out.len(), "row"),
            told((way.held_out_median_error, way.held_out_worst_error))
        );
    }
    if !results.verified {
        text += "\nsome elements did not arrive as they were sent\n";
    }
    let rows = results.ways.iter().map(|way| way.rows.len() + way.held_out.len()).sum();
    let (median, worst) = (100.0 * results.median_error, 100.0 * results.worst_error);
    let _ =
        writeln!(text, "\n{}: off by {median:.1} % in the median, {worst:.1} % at worst", count(rows, "row"));
    text
}

/// `, 39.8 GB/s up to 4 MiB`, where a cache has a rate of its own.
fn cached(way: &WayResult) -> String {
    let cache = way.cached_bytes_per_s.zip(way.cache_bytes);
    cache.map_or(String::new(), |(rate, bytes)| format!(", {} up to {}", Rate(rate), Bytes(bytes)))
}

/// `3.1 % in the median, 12.0 % at worst`.
fn told((median, worst): (f64, f64)) -> String {
    format!("{:.1} % in the median, {:.1} % at worst", 100.0 * median, 100.0 * worst)
}

fn emulated(results: &Results) -> String {
    results.emulated.as_ref().map_or(String::new(), |rate| format!(", NICs emulated at {rate}"))
}

fn cluster_file(results: &Results, cluster: &Cluster) -> String {
    let measured = format!("{}{}, {}", results.machine, emulated(results), results.date);
    let mut text = format!("# Measured by `crossmesh bench calibrate` on {measured}.\n");
    for way in &results.ways {
        let (rows, held_out) = (count(way.rows.len(), "row"), count(way.held_out.len(), "row"));
        let name = way.way.name();
        let _ = writeln!(
            text,
            "# {name}: {rows} off by {}; {held_out} held out, by {}.",
            told((way.median_error, way.worst_error)),
            told((way.held_out_median_error, way.held_out_worst_error))
        );
    }
    let us = |seconds: f64| format!("{:.4}us", seconds * 1e6);
    let host = &cluster.hosts[0];
    let gigabytes = |rate: f64| format!("{:.4}GB/s", rate / 1e9);
    let _ = write!(
        text,
        "measured = {}\nlatency = \"{}\"\nlocal_latency = \"{}\"\nmessage = \"{}\"\nlocal_message = \"{}\"\n\n\
         [[host]]\ncount = {}\ndevices = {}\nnic = \"{}\"\nlocal = \"{}\"\n",
        // A string of JSON is one of TOML.
        serde_json::Value::from(measured),
        us(cluster.latency_s),
        us(cluster.local_latency_s),
        us(cluster.message_s),
        us(cluster.local_message_s),
        cluster.hosts.len(),
        host.devices,
        gigabytes(host.nic_out_bytes_per_s),
        gigabytes(host.local_bytes_per_s),
    );
    if let Some(Cache { bytes, bytes_per_s }) = host.cache {
        let _ = write!(text, "cache = \"{bytes}B\"\ncached = \"{}\"\n", gigabytes(bytes_per_s));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_out_has_no_part_in_the_fit() {
        let fitted: Vec<(u64, u64)> = grid(&SIZES, &COUNTS).collect();
        assert_eq!(fitted.len(), 35);
        let held_out = grid(&HELD_OUT_SIZES, &HELD_OUT_COUNTS);
        for (messages, bytes) in held_out {
            assert!(!SIZES.contains(&bytes) && !COUNTS.contains(&messages));
            let inside =
                (SIZES[0]..=SIZES[6]).contains(&bytes) && (COUNTS[0]..=COUNTS[4]).contains(&messages);
            assert!(inside, "{messages} of {bytes} B is outside of what was fitted");
        }
    }

    #[test]
    fn the_headline_counts_what_was_held_out() {
        let row = |error: f64| RowResult {
            messages: 1,
            bytes: 1024,
            measured_s: vec![1e-5],
            fastest_s: 1e-5,
            predicted_s: 1e-5 * (1.0 + error),
            error,
        };
        let way = WayResult {
            way: Way::Tcp,
            latency_s: 1e-5,
            message_s: 0.0,
            bytes_per_s: 1e9,
            cache_bytes: None,
            cached_bytes_per_s: None,
            median_error: 0.01,
            worst_error: 0.01,
            rows: vec![row(0.01)],
            held_out: vec![row(-0.4), row(0.02)],
            held_out_median_error: 0.21,
            held_out_worst_error: 0.4,
        };
        let errors: Vec<f64> = way.errors().collect();
        assert_eq!((errors.len(), worst(&errors), median(&errors)), (3, 0.4, 0.02));
    }

    #[test]
    fn short_rows_are_repeated_more_often() {
        assert_eq!((repeats(15, 1, 1 << 10), repeats(15, 1, 256 << 20)), (300, 15));
        assert_eq!(repeats(1, 10_000, 1 << 10), 1);
        for (runs, pairs) in [(20, 1), (3, 3), (9, 5), (300, 5)] {
            let shared: Vec<u32> = shared_out(runs, pairs).collect();
            assert_eq!((shared.len(), shared.iter().sum()), (pairs as usize, runs), "{shared:?}");
            assert!(shared.iter().all(|runs| *runs > 0), "{shared:?}");
        }
        let middle = repeats(15, 100, 64 << 10);
        assert!((15..300).contains(&middle), "{middle}");
    }

    #[test]
    fn the_file_says_what_was_found() {
        let mut cluster = Cluster::of_hosts(vec![Host::with_devices(2); 2]);
        let costs =
            |latency_s, message_s, bytes_per_s| Costs { latency_s, message_s, bytes_per_s, cache: None };
        Way::Tcp.set(&mut cluster, costs(61.5e-6, 4.25e-6, 2.5e9));
        let cache = Some(Cache { bytes: 4 << 20, bytes_per_s: 16e9 });
        let local = Costs { cache, ..costs(12e-6, 1.5e-6, 8e9) };
        Way::SharedMemory.set(&mut cluster, local);
        let results = Results {
            schema: "crossmesh.calibration/1",
            machine: "a \"machine\"".into(),
            date: "2026-11-19".into(),
            emulated: None,
            ways: vec![],
            median_error: 0.0,
            worst_error: 0.0,
            verified: true,
        };
        let text = cluster_file(&results, &cluster);
        cluster.measured = Some("a \"machine\", 2026-11-19".into());
        assert_eq!(Cluster::from_toml(&text).unwrap(), cluster, "{text}");
    }

    #[test]
    fn the_simulator_agrees_with_what_is_fitted() {
        let costs = Costs { latency_s: 61.5e-6, message_s: 4.25e-6, bytes_per_s: 2.5e9, cache: None };
        let cache = Cache { bytes: 1 << 20, bytes_per_s: 5e9 };
        let near = Costs { cache: Some(cache), ..costs };
        for (way, costs) in [(Way::Tcp, costs), (Way::SharedMemory, costs), (Way::SharedMemory, near)] {
            for (messages, bytes) in [(1, 1 << 10), (300, 4 << 10), (7, 1 << 20)] {
                let prediction = Prediction::of_plan(way.plan(messages, bytes, None).unwrap()).unwrap();
                let n = messages as f64;
                let (all, most) = (n * bytes as f64, costs.cache.map_or(0.0, |cache| cache.bytes as f64));
                let of_cache = all.min(most) / cache.bytes_per_s;
                let seconds = costs.latency_s
                    + (n + 1.0) * costs.message_s
                    + of_cache
                    + (all - all.min(most)) / costs.bytes_per_s;
                let row = Row { messages, bytes, seconds };
                let ran = Ran { prediction, row, measured_s: vec![seconds], verified: true };
                let result = WayResult::of(way, costs, vec![ran], vec![]).unwrap();
                assert!(result.worst_error < 1e-9, "{result:?}");
                assert_eq!(result.held_out_worst_error, 0.0);
            }
        }
    }
}
