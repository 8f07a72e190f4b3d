//! `crossmesh bench collective`: all-reduce and the others within a group, with nccl-tests' bandwidths.

use anyhow::{Context, Result, bail};
use crossmesh_core::cluster::{Cluster, Host};
use crossmesh_core::collective::{Collective, Group};
use crossmesh_core::dtype::DType;
use crossmesh_core::id::Rank;
use crossmesh_core::reshard::problem::Hosts;
use crossmesh_core::reshard::{PlanOptions, Problem};
use crossmesh_core::units::{Bytes, Seconds, parse_bytes};
use serde::Serialize;

use super::MeasuredTimes;
use super::measured::{self, measure};
use crate::Answer;
use crate::commands::run::RunArgs;
use crate::input::HostArgs;
use crate::output::{self, Format, Progress, Table};
use crate::predict::Prediction;

/// The most ranks of a group; a process each where it is measured.
const MAX_RANKS: i64 = 4096;

/// Collectives within a group of ranks: measured, with the prediction beside it, or only predicted.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "algbw is the tensor's bytes over the time; busbw is what the links carry, by nccl-tests' formulas.

Examples:
  crossmesh bench collective --predict -n 64 --devices-per-host 8 --nics 8 --nic 400Gbit --bytes 1GiB
  crossmesh bench collective -n 4 --bytes 64MiB                                   # over shared memory
  crossmesh bench collective all-reduce -n 4 --devices-per-host 1 --emulate 400Mbit   # as root"
)]
pub struct CollectiveArgs {
    /// all-reduce, reduce-scatter, all-gather, all-to-all, broadcast, reduce, barrier [default: all]
    collectives: Vec<String>,
    /// Ranks in the group
    #[arg(short = 'n', long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=MAX_RANKS))]
    ranks: u32,
    /// Sizes of the tensor; of an all-to-all, what each rank has
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1MiB,16MiB,64MiB")]
    bytes: Vec<String>,
    /// The elements' type
    #[arg(long, value_name = "D", default_value = "f32")]
    dtype: String,
    /// Simulate instead of running
    #[arg(long)]
    predict: bool,
    #[command(flatten)]
    hosts: HostArgs,
    #[command(flatten)]
    run: RunArgs,
    /// Text for people, or one JSON document
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,
}

/// All results.
#[derive(Debug, Serialize)]
struct Results {
    schema: &'static str,
    ranks: u32,
    hosts: usize,
    results: Vec<Row>,
}

/// One collective at one size. Bandwidths are of the measured time, or of the predicted one where nothing was run.
#[derive(Debug, Serialize)]
struct Row {
    collective: &'static str,
    bytes: u64,
    lower_bound_s: f64,
    predicted_s: f64,
    algbw_bytes_per_s: f64,
    busbw_bytes_per_s: f64,
    measured: Option<MeasuredTimes>,
}

pub fn run(args: &CollectiveArgs) -> Result<Answer> {
    let cluster = cluster(args)?;
    let collectives: Vec<Collective> = match args.collectives.as_slice() {
        [] => Collective::ALL.to_vec(),
        names => names.iter().map(|name| Ok(name.parse()?)).collect::<Result<_>>()?,
    };
    let sizes: Vec<u64> =
        args.bytes.iter().map(|b| Ok(parse_bytes(b)?)).collect::<Result<_>>().context("--bytes")?;
    let known = DType::ALL.map(|d| d.name()).join(" ");
    let dtype: DType = args
        .dtype
        .parse()
        .map_err(|()| anyhow::anyhow!("unknown dtype `{}`\nhint: dtypes are {known}", args.dtype))?;
    let progress = Progress::new();
    let mut results = vec![];
    for &collective in &collectives {
        // A barrier moves nothing: one size is all sizes.
        let sizes = if collective == Collective::Barrier { &[1][..] } else { &sizes[..] };
        for &bytes in sizes {
            progress.say(&format!("{collective} {}", Bytes(bytes)));
            results.push(row(args, &cluster, collective, dtype, bytes, &progress)?);
        }
    }
    let results =
        Results { schema: "crossmesh.collectives/1", ranks: args.ranks, hosts: cluster.hosts.len(), results };
    match args.format {
        Format::Text => output::print(&render(&results))?,
        Format::Json => output::print_json(&results)?,
    }
    let verified = results.results.iter().all(|r| r.measured.as_ref().is_none_or(|m| m.verified));
    Ok(if verified { Answer::Yes } else { Answer::No })
}

/// The group's hosts: those of the cluster file, or as many as it takes with the same number of devices each.
fn cluster(args: &CollectiveArgs) -> Result<Cluster> {
    if let Some(cluster) = args.hosts.described()? {
        if cluster.num_devices() < args.ranks as usize {
            bail!(
                "the cluster has {} devices, the group {} ranks\nhint: lower -n, or describe a larger cluster",
                cluster.num_devices(),
                args.ranks
            );
        }
        return Ok(cluster);
    }
    let per_host = args.hosts.devices_per_host.unwrap_or(args.ranks).min(args.ranks);
    let hosts = (0..args.ranks.div_ceil(per_host))
        .map(|h| Host::with_devices(per_host.min(args.ranks - h * per_host)));
    let mut cluster = Cluster::of_hosts(hosts.collect());
    args.hosts.adjust(&mut cluster)?;
    if let Some(rate) = args.run.nic() {
        HostArgs { nic: Some(rate.clone()), ..HostArgs::default() }.adjust(&mut cluster)?;
    }
    Ok(cluster)
}

fn row(
    args: &CollectiveArgs,
    cluster: &Cluster,
    collective: Collective,
    dtype: DType,
    bytes: u64,
    progress: &Progress,
) -> Result<Row> {
    let group = Group::new((0..args.ranks).map(Rank).collect())?;
    let call =
        crossmesh_core::collective::Call::new(collective, &group, dtype, (bytes / dtype.bytes()).max(1));
    let (src, dst) = call.layouts()?.remove(0);
    let pair = (collective.name().to_string(), src, dst);
    let problem = Problem::new(vec![pair], Hosts::Described(cluster.clone()))?;
    let prediction = Prediction::of_problem(&problem, &PlanOptions::default())?;
    let measured = match args.predict {
        true => None,
        false => Some(measure(&prediction, &args.run.options(measured::REPEAT, None)?, progress)?),
    };
    let seconds = measured.as_ref().map_or(prediction.seconds(), |m| m.median_s);
    let algbw = if seconds > 0.0 && collective != Collective::Barrier { bytes as f64 / seconds } else { 0.0 };
    Ok(Row {
        collective: collective.name(),
        bytes,
        lower_bound_s: prediction.bound.seconds,
        predicted_s: prediction.seconds(),
        algbw_bytes_per_s: algbw,
        busbw_bytes_per_s: algbw * collective.bus_factor(args.ranks as usize),
        measured,
    })
}

fn render(results: &Results) -> String {
    let measured = results.results.iter().any(|r| r.measured.is_some());
    let mut table = Table::new("lr");
    let heads = ["collective", "bytes", "bound", "predicted", "measured", "algbw", "busbw"];
    table.row(heads.into_iter().filter(|h| measured || *h != "measured"));
    let gigabytes = |rate: f64| format!("{:.3} GB/s", rate / 1e9);
    for row in &results.results {
        let mut cells = vec![row.collective.to_string(), Bytes(row.bytes).to_string()];
        cells.extend([row.lower_bound_s, row.predicted_s].map(|s| Seconds(s).to_string()));
        cells.extend(row.measured.as_ref().map(|m| Seconds(m.median_s).to_string()));
        cells.extend([row.algbw_bytes_per_s, row.busbw_bytes_per_s].map(gigabytes));
        table.row(cells);
    }
    let hosts = output::count(results.hosts, "host");
    let kind = if measured { "measured, every element checked" } else { "predicted" };
    format!("collectives over {} ranks on {hosts}, {kind}\n{}", results.ranks, table.render(2))
}
