//! `crossmesh bench calibrate`: what messages and bytes cost on this machine, measured, as a cluster file.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use crossmesh_core::cluster::{Cluster, Host, Topology};
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
use crate::output::{self, Format, Progress, Table, count};
use crate::predict::Prediction;
use crate::runner::{median, run_plan};
use fit::{Costs, Row, fit};

mod fit;

const SIZES: [u64; 7] = [1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20, 32 << 20, 256 << 20];
const COUNTS: [u64; 5] = [1, 10, 100, 1000, 10_000];
/// The fastest of these counts: what the machine does while nobody else has the processor.
const REPEAT: u32 = 9;

/// Measure what messages and bytes cost on this machine, and write a cluster file that says so.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Two processes send 1 to 10,000 messages of 1 KiB to 256 MiB, one behind the other, over TCP
and over shared memory; the fastest of 9 times (--repeat) counts. Latency, the cost of a
message and the rate are those that explain the times best: the worst error and the mean one,
as shares of the measured times, are made small. Then every row is simulated with them:
predicted beside measured.

Where others use the processor all the time, the numbers are of a machine in use.

Examples:
  crossmesh bench calibrate -o here.toml
  crossmesh bench calibrate --max-bytes 16MiB --repeat 9
  crossmesh bench calibrate --emulate 1Gbit -o emulated.toml      # as root"
)]
pub struct CalibrateArgs {
    /// Rows of more bytes than this are left out
    #[arg(long, value_name = "BYTES", default_value = "256MiB")]
    max_bytes: String,
    /// Write a cluster file of two hosts with two devices each
    #[arg(short = 'o', long = "output", value_name = "FILE", help_heading = "Output")]
    output: Option<PathBuf>,
    #[command(flatten)]
    run: RunArgs,
    /// Text for people, or one JSON document
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,
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
    median_error: f64,
    worst_error: f64,
    rows: Vec<RowResult>,
}

/// Messages one behind the other.
#[derive(Debug, Serialize)]
struct RowResult {
    messages: u64,
    /// Of each.
    bytes: u64,
    measured_s: Vec<f64>,
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
        let ran = measure(way, max_bytes, args, &progress)?;
        verified &= ran.iter().all(|r| r.verified);
        let costs = fit(&ran.iter().map(|r| r.row).collect::<Vec<_>>());
        way.set(&mut cluster, costs);
        ways.push(WayResult::of(way, costs, ran)?);
    }
    progress.say("");
    let errors: Vec<f64> = ways.iter().flat_map(WayResult::errors).collect();
    let results = Results {
        schema: "crossmesh.calibration/1",
        machine: machine(),
        emulated: args.run.emulate.clone(),
        median_error: median(&errors),
        worst_error: worst(&errors),
        ways,
        verified,
    };
    if let Some(path) = &args.output {
        output::write_file(path, &cluster_file(&results, &cluster))?;
    }
    match args.format {
        Format::Text => output::print(&render(&results))?,
        Format::Json => output::print_json(&results)?,
    }
    Ok(if results.verified { Answer::Yes } else { Answer::No })
}

/// Runs every row of a way that is not too large.
fn measure(way: Way, max_bytes: u64, args: &CalibrateArgs, progress: &Progress) -> Result<Vec<Ran>> {
    let options = args.run.options(REPEAT, None)?;
    let rows = SIZES.iter().flat_map(|bytes| COUNTS.map(|messages| (messages, *bytes)));
    let mut ran = vec![];
    for (messages, bytes) in rows.filter(|(messages, bytes)| messages * bytes <= max_bytes) {
        progress.say(&format!("{}: {} of {}", way.name(), count(messages as usize, "message"), Bytes(bytes)));
        let prediction = Prediction::of_plan(way.plan(messages, bytes, args.run.nic())?)?;
        let measured = run_plan(&prediction, &options, &Progress::silent())?;
        let row =
            Row { messages, bytes, seconds: measured.seconds.iter().copied().fold(f64::INFINITY, f64::min) };
        ran.push(Ran { prediction, row, verified: measured.verified(), measured_s: measured.seconds });
    }
    Ok(ran)
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

    /// Writes what it costs into a cluster.
    fn set(self, cluster: &mut Cluster, costs: Costs) {
        let Costs { latency_s, message_s, bytes_per_s } = costs;
        match self {
            Way::Tcp => {
                (cluster.latency_s, cluster.message_s) = (latency_s, message_s);
                for host in &mut cluster.hosts {
                    (host.nic_out_bytes_per_s, host.nic_in_bytes_per_s) = (bytes_per_s, bytes_per_s);
                }
            }
            Way::SharedMemory => {
                (cluster.local_latency_s, cluster.local_message_s) = (latency_s, message_s);
                cluster.hosts.iter_mut().for_each(|host| host.local_bytes_per_s = bytes_per_s);
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
    fn of(way: Way, costs: Costs, ran: Vec<Ran>) -> Result<Self> {
        let mut cluster = way.cluster();
        way.set(&mut cluster, costs);
        debug_assert_eq!(Topology::new(&cluster).num_ranks(), 2);
        let mut rows = vec![];
        for Ran { prediction, row, measured_s, .. } in ran {
            let predicted_s = simulate(&prediction.program, &cluster)?.makespan_s;
            let Row { messages, bytes, seconds } = row;
            let error = row.error(predicted_s);
            rows.push(RowResult { messages, bytes, measured_s, fastest_s: seconds, predicted_s, error });
        }
        let errors: Vec<f64> = rows.iter().map(|row| row.error.abs()).collect();
        let Costs { latency_s, message_s, bytes_per_s } = costs;
        let (median_error, worst_error) = (median(&errors), worst(&errors));
        Ok(Self { way, latency_s, message_s, bytes_per_s, median_error, worst_error, rows })
    }

    fn errors(&self) -> impl Iterator<Item = f64> {
        self.rows.iter().map(|row| row.error.abs())
    }
}

fn worst(errors: &[f64]) -> f64 {
    errors.iter().copied().fold(0.0, f64::max)
}

/// Whose numbers these are, as far as the system tells.
fn machine() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let info = read("/proc/cpuinfo");
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let model = model.map_or("unknown processor", |(_, name)| name.trim());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let release = read("/proc/sys/kernel/osrelease");
    format!("{model}, {}, Linux {}", count(threads, "thread"), release.trim())
}

fn render(results: &Results) -> String {
    let mut text = format!("calibrated on {}{}\n", results.machine, emulated(results));
    for way in &results.ways {
        let _ = writeln!(
            text,
            "\n{}: latency {}, {} a message at each end, {}",
            way.way.name(),
            Seconds(way.latency_s),
            Seconds(way.message_s),
            Rate(way.bytes_per_s)
        );
        let mut table = Table::new("r");
        table.row(["messages", "bytes each", "measured", "predicted", "error"]);
        for row in &way.rows {
            table.row([
                row.messages.to_string(),
                Bytes(row.bytes).to_string(),
                Seconds(row.fastest_s).to_string(),
                Seconds(row.predicted_s).to_string(),
                format!("{:+.1} %", 100.0 * row.error),
            ]);
        }
        text += &table.render(2);
        let (median, worst) = (100.0 * way.median_error, 100.0 * way.worst_error);
        let _ = writeln!(text, "  off by {median:.1} % in the median, {worst:.1} % at worst");
    }
    if !results.verified {
        text += "\nsome elements did not arrive as they were sent\n";
    }
    let rows = results.ways.iter().map(|way| way.rows.len()).sum();
    let (median, worst) = (100.0 * results.median_error, 100.0 * results.worst_error);
    let _ =
        writeln!(text, "\n{}: off by {median:.1} % in the median, {worst:.1} % at worst", count(rows, "row"));
    text
}

fn emulated(results: &Results) -> String {
    results.emulated.as_ref().map_or(String::new(), |rate| format!(", NICs emulated at {rate}"))
}

fn cluster_file(results: &Results, cluster: &Cluster) -> String {
    let mut text =
        format!("# Measured by `crossmesh bench calibrate` on {}{}.\n", results.machine, emulated(results));
    for way in &results.ways {
        let (median, worst) = (100.0 * way.median_error, 100.0 * way.worst_error);
        let rows = count(way.rows.len(), "row");
        let name = way.way.name();
        let _ = writeln!(text, "# {name}: {rows} off by {median:.1} % in the median, {worst:.1} % at worst.");
    }
    let us = |seconds: f64| format!("{:.4}us", seconds * 1e6);
    let host = &cluster.hosts[0];
    let gigabytes = |rate: f64| format!("{:.4}GB/s", rate / 1e9);
    let _ = write!(
        text,
        "latency = \"{}\"\nlocal_latency = \"{}\"\nmessage = \"{}\"\nlocal_message = \"{}\"\n\n\
         [[host]]\ncount = {}\ndevices = {}\nnic = \"{}\"\nlocal = \"{}\"\n",
        us(cluster.latency_s),
        us(cluster.local_latency_s),
        us(cluster.message_s),
        us(cluster.local_message_s),
        cluster.hosts.len(),
        host.devices,
        gigabytes(host.nic_out_bytes_per_s),
        gigabytes(host.local_bytes_per_s),
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_says_what_was_found() {
        let mut cluster = Cluster::of_hosts(vec![Host::with_devices(2); 2]);
        Way::Tcp.set(&mut cluster, Costs { latency_s: 61.5e-6, message_s: 4.25e-6, bytes_per_s: 2.5e9 });
        let local = Costs { latency_s: 12e-6, message_s: 1.5e-6, bytes_per_s: 8e9 };
        Way::SharedMemory.set(&mut cluster, local);
        let results = Results {
            schema: "crossmesh.calibration/1",
            machine: "a machine".into(),
            emulated: None,
            ways: vec![],
            median_error: 0.0,
            worst_error: 0.0,
            verified: true,
        };
        let text = cluster_file(&results, &cluster);
        assert_eq!(Cluster::from_toml(&text).unwrap(), cluster, "{text}");
    }

    #[test]
    fn the_simulator_agrees_with_what_is_fitted() {
        let costs = Costs { latency_s: 61.5e-6, message_s: 4.25e-6, bytes_per_s: 2.5e9 };
        for way in [Way::Tcp, Way::SharedMemory] {
            for (messages, bytes) in [(1, 1 << 10), (300, 4 << 10), (7, 1 << 20)] {
                let prediction = Prediction::of_plan(way.plan(messages, bytes, None).unwrap()).unwrap();
                let n = messages as f64;
                let seconds =
                    costs.latency_s + (n + 1.0) * costs.message_s + n * bytes as f64 / costs.bytes_per_s;
                let row = Row { messages, bytes, seconds };
                let ran = Ran { prediction, row, measured_s: vec![seconds], verified: true };
                let result = WayResult::of(way, costs, vec![ran]).unwrap();
                assert!(result.worst_error < 1e-9, "{result:?}");
            }
        }
    }
}
