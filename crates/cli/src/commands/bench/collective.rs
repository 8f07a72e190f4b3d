//! `crossmesh bench collective`: all-reduce and the others within a group, with nccl-tests' bandwidths.

use anyhow::{Context, Result, bail};
use crossmesh_comm::lab::sweep::{Case, Sweep};
use crossmesh_core::cluster::{Cluster, Host, Topology};
use crossmesh_core::collective::{Call, Collective, Counts, Group, plan};
use crossmesh_core::dtype::DType;
use crossmesh_core::id::Rank;
use crossmesh_core::units::{Bytes, Seconds, parse_bytes};
use serde::Serialize;

use super::MeasuredTimes;
use super::measured;
use crate::Answer;
use crate::commands::run::RunArgs;
use crate::input::HostArgs;
use crate::known::{Known, dtypes};
use crate::machine;
use crate::output::{self, Format, FormatArgs, Progress, Table};
use crate::predict::Prediction;
use crate::runner::{Measured, Work, run_work};
use crate::sweep_doc::{SweepDoc, parse_reduction};
use crate::task::Task;

/// The most ranks of a group; a process each where it is measured.
const MAX_RANKS: i64 = 4096;
/// What elements of a bench can be.
pub const DTYPES: [DType; 6] = [DType::F32, DType::F64, DType::Bf16, DType::F16, DType::I32, DType::I64];
/// An all-to-all in which everybody has a different count for everybody.
const UNEVEN: &str = "all-to-all-v";

/// Collectives within a group of ranks: measured, with the prediction beside it, or only predicted.
#[derive(Debug, clap::Args)]
#[command(after_help = "As nccl-tests do, calls follow each other without a pause, the slowest rank
counts, and algbw is the tensor's bytes over the time; busbw is what the links
carry, by its formulas. Every element of a first call is looked at.

With --fixed-order a sum is added up in the group's order, one rank at a time,
whatever the algorithm: bit for bit what a loop would give. Without it the order
is that of the algorithm, and still the same from run to run.

Examples:
  crossmesh bench collective --predict -n 64 --devices-per-host 8 --nics 8 \\
      --nic 400Gbit --bytes 1GiB
  # over shared memory
  crossmesh bench collective -n 4 --bytes 64MiB
  # over TCP
  crossmesh bench collective all-reduce -n 4 --devices-per-host 1 -b 1KiB \\
      -e 64MiB -f 4
  crossmesh bench collective all-reduce -n 8 --groups 2 --algorithm ring \\
      --fixed-order
  # as root
  crossmesh bench collective all-reduce -n 4 --devices-per-host 1 \\
      --emulate 400Mbit")]
pub struct CollectiveArgs {
    /// all-reduce, reduce-scatter, all-gather, all-to-all, all-to-all-v, broadcast, reduce, barrier [default: all]
    collectives: Vec<String>,
    /// Ranks
    #[arg(short = 'n', long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=MAX_RANKS))]
    ranks: u32,
    /// Groups that act at once, of as many ranks each
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=MAX_RANKS))]
    groups: u32,
    /// Sizes of the tensor; of an all-to-all, what each rank has
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1MiB,16MiB,64MiB")]
    bytes: Vec<String>,
    /// Instead of --bytes: sizes from here ...
    #[arg(short = 'b', long, value_name = "BYTES", requires = "max_bytes")]
    min_bytes: Option<String>,
    /// ... up to here ...
    #[arg(short = 'e', long, value_name = "BYTES", requires = "min_bytes")]
    max_bytes: Option<String>,
    /// ... each so many times the one before
    #[arg(short = 'f', long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u64).range(2..))]
    factor: u64,
    /// The elements' type: f32, f64, bf16, f16, i32 or i64
    #[arg(long, value_name = "D", default_value = "f32", value_parser = Known(dtypes), hide_possible_values = true)]
    dtype: String,
    /// What reductions do: sum, max, min or mean
    #[arg(long, value_name = "OP", default_value = "sum")]
    op: String,
    /// direct, pairwise, ring, tree, two-level, flow, or auto (the fastest of them)
    #[arg(long, value_name = "A", default_value = "auto")]
    algorithm: String,
    /// Add up in the group's order: the same bits whatever the algorithm
    #[arg(long)]
    fixed_order: bool,
    /// How much arrives before it is forwarded [default: chosen from the sizes]
    #[arg(long, value_name = "BYTES")]
    chunk: Option<String>,
    /// Simulate instead of running
    #[arg(long)]
    predict: bool,
    #[command(flatten)]
    hosts: HostArgs,
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    format: FormatArgs,
}

/// All results.
#[derive(Debug, Serialize)]
struct Results {
    schema: &'static str,
    ranks: u32,
    groups: u32,
    hosts: usize,
    dtype: String,
    op: String,
    fixed_order: bool,
    /// The machine whose times these are; missing where nothing was run.
    machine: Option<String>,
    /// Where and when the cluster's costs were measured, if they were.
    cluster_measured: Option<String>,
    /// Elements that are not what they should be: the first of each rank that has one.
    wrong: Vec<String>,
    results: Vec<Row>,
}

/// One collective at one size. Bandwidths are of the measured time, or of the predicted one where nothing was run.
#[derive(Debug, Serialize)]
struct Row {
    collective: String,
    bytes: u64,
    /// The one that was chosen.
    algorithm: String,
    lower_bound_s: f64,
    predicted_s: f64,
    algbw_bytes_per_s: f64,
    busbw_bytes_per_s: f64,
    measured: Option<MeasuredTimes>,
}

pub fn run(args: &CollectiveArgs) -> Result<Answer> {
    let sweep = sweep(args)?;
    let progress = Progress::new();
    let mut predictions = vec![];
    for case in &sweep.cases {
        progress.say(&format!("planning {} of {}", name(case), Bytes(case.elements * case.dtype.bytes())));
        predictions.push(predict(&sweep, case)?);
    }
    progress.say("");
    let measured = match args.predict {
        true => None,
        false => Some(measure(args, &sweep, &predictions, &progress)?),
    };
    let emulated = args.run.emulate.is_some();
    let rows = sweep.cases.iter().zip(&predictions).enumerate();
    let results = rows.map(|(i, (case, prediction))| {
        row(&sweep, case, prediction, measured.as_ref().map(|measured| (measured, i, emulated)))
    });
    let results = Results {
        schema: "crossmesh.collectives/1",
        ranks: args.ranks,
        groups: args.groups,
        hosts: sweep.cluster.hosts.len(),
        dtype: args.dtype.clone(),
        op: args.op.clone(),
        fixed_order: args.fixed_order,
        machine: measured.as_ref().map(|_| machine::machine()),
        cluster_measured: sweep.cluster.measured.clone(),
        wrong: measured.as_ref().map_or(vec![], |m| m.wrong.clone()),
        results: results.collect(),
    };
    match args.format.get() {
        Format::Text => output::print(&render(&results))?,
        Format::Json => output::print_json(&results)?,
    }
    Ok(if results.wrong.is_empty() { Answer::Yes } else { Answer::No })
}

fn sweep(args: &CollectiveArgs) -> Result<Sweep> {
    let known = DTYPES.map(|d| d.name()).join(" ");
    let dtype = DTYPES.into_iter().find(|d| d.name() == args.dtype);
    let dtype = dtype.with_context(|| format!("unknown dtype `{}`\nhint: dtypes are {known}", args.dtype))?;
    if !args.ranks.is_multiple_of(args.groups) {
        bail!("{} ranks do not make {} groups of one size\nhint: give a multiple", args.ranks, args.groups);
    }
    let size = args.ranks / args.groups;
    let groups = (0..args.groups).map(|g| (g * size..(g + 1) * size).map(Rank).collect()).collect();
    let mut sweep = Sweep { cluster: cluster(args)?, groups, cases: vec![] };
    let names: Vec<&str> = match args.collectives.as_slice() {
        [] => Collective::ALL.map(|c| c.name()).into_iter().chain([UNEVEN]).collect(),
        names => names.iter().map(String::as_str).collect(),
    };
    let sizes = sizes(args)?;
    for name in names {
        let uneven = name.replace('_', "-").to_lowercase() == UNEVEN;
        let collective = if uneven { Collective::AllToAll } else { name.parse()? };
        // A barrier moves nothing: one size is all sizes.
        let sizes = if collective == Collective::Barrier { &[dtype.bytes()][..] } else { &sizes[..] };
        for bytes in sizes {
            sweep.cases.push(Case {
                collective,
                dtype,
                reduction: parse_reduction(&args.op)?,
                elements: (bytes / dtype.bytes()).max(1),
                uneven,
                algorithm: args.algorithm.parse()?,
                fixed_order: args.fixed_order,
                chunk_bytes: args.chunk.as_deref().map(parse_bytes).transpose().context("--chunk")?,
            });
        }
    }
    Ok(sweep)
}

/// The list that was given, or from the smallest to the largest by the factor.
fn sizes(args: &CollectiveArgs) -> Result<Vec<u64>> {
    let parse = |text: &String, flag| parse_bytes(text).context(flag);
    let (Some(min), Some(max)) = (&args.min_bytes, &args.max_bytes) else {
        return args.bytes.iter().map(|b| parse(b, "--bytes")).collect();
    };
    let (min, max) = (parse(min, "--min-bytes")?, parse(max, "--max-bytes")?);
    if min == 0 || max < min {
        bail!("there are no sizes from {min} to {max} bytes");
    }
    let next = |size: &u64| size.checked_mul(args.factor).filter(|next| *next <= max);
    Ok(std::iter::successors(Some(min), next).collect())
}

/// The group's hosts: those of the cluster file, or as many as it takes with the same number of devices each.
fn cluster(args: &CollectiveArgs) -> Result<Cluster> {
    if let Some(cluster) = args.hosts.described()? {
        if cluster.num_devices() < args.ranks as usize {
            bail!(
                "the cluster has {} devices, the groups {} ranks\nhint: lower -n, or describe a larger cluster",
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

fn name(case: &Case) -> &'static str {
    if case.uneven { UNEVEN } else { case.collective.name() }
}

/// The plan of a case for all groups at once, proven and simulated.
fn predict(sweep: &Sweep, case: &Case) -> Result<Prediction> {
    let mut calls = vec![];
    for ranks in &sweep.groups {
        let group = Group::new(ranks.clone())?;
        let call = Call::new(case.collective, &group, case.dtype, case.elements).with_op(case.reduction.op());
        calls.push(match case.rows(ranks.len()) {
            Some(rows) => call.with_counts(Counts::PerPair(rows)),
            None => call,
        });
    }
    let plan = plan(&calls, &sweep.cluster, &case.options())?;
    Prediction::of_plan(plan).with_context(|| format!("the plan of {}", name(case)))
}

/// Runs all cases with one set of processes.
fn measure(
    args: &CollectiveArgs,
    sweep: &Sweep,
    predictions: &[Prediction],
    progress: &Progress,
) -> Result<Measured> {
    let work = Work {
        task: &Task::of_sweep(sweep),
        document: SweepDoc::write(sweep),
        cluster: &sweep.cluster,
        topology: &Topology::new(&sweep.cluster),
        predicted_s: predictions.iter().map(Prediction::seconds).fold(0.0, f64::max),
    };
    run_work(&work, &args.run.options(measured::REPEAT, None)?, progress)
}

fn row(
    sweep: &Sweep,
    case: &Case,
    prediction: &Prediction,
    measured: Option<(&Measured, usize, bool)>,
) -> Row {
    let times = measured.map(|(measured, index, emulated)| {
        let rounds = measured.seconds.len() / sweep.cases.len();
        let seconds = measured.seconds[index * rounds..(index + 1) * rounds].to_vec();
        measured::times(prediction, seconds, measured.verified(), emulated)
    });
    let seconds = times.as_ref().map_or(prediction.seconds(), |m| m.median_s);
    let ranks = sweep.groups[0].len();
    let bytes = match case.rows(ranks) {
        // By nccl-tests' rule what each rank has; here, what they have on average.
        Some(rows) => rows.iter().flatten().sum::<u64>() * case.dtype.bytes() / ranks as u64,
        None => case.elements * case.dtype.bytes(),
    };
    let moves = case.collective != Collective::Barrier && seconds > 0.0;
    let algbw = if moves { bytes as f64 / seconds } else { 0.0 };
    Row {
        collective: name(case).into(),
        bytes,
        algorithm: prediction.plan.strategy.clone(),
        lower_bound_s: prediction.bound.seconds,
        predicted_s: prediction.seconds(),
        algbw_bytes_per_s: algbw,
        busbw_bytes_per_s: algbw * case.collective.bus_factor(ranks),
        measured: times,
    }
}

fn render(results: &Results) -> String {
    let measured = results.results.iter().any(|r| r.measured.is_some());
    let mut table = Table::new("lrlr");
    let heads = ["collective", "bytes", "algorithm", "bound", "predicted", "measured", "algbw", "busbw"];
    table.row(heads.into_iter().filter(|h| measured || *h != "measured"));
    let gigabytes = |rate: f64| format!("{:.3} GB/s", rate / 1e9);
    for row in &results.results {
        let mut cells = vec![row.collective.clone(), Bytes(row.bytes).to_string(), row.algorithm.clone()];
        cells.extend([row.lower_bound_s, row.predicted_s].map(|s| Seconds(s).to_string()));
        cells.extend(row.measured.as_ref().map(|m| Seconds(m.median_s).to_string()));
        cells.extend([row.algbw_bytes_per_s, row.busbw_bytes_per_s].map(gigabytes));
        table.row(cells);
    }
    let hosts = output::count(results.hosts, "host");
    let kind = match (measured, results.wrong.is_empty()) {
        (false, _) => "predicted",
        (true, true) => "measured, every element checked",
        (true, false) => "measured, with wrong results",
    };
    let wrong: String = results.wrong.iter().map(|w| format!("wrong  {w}\n")).collect();
    let groups = match results.groups {
        1 => String::new(),
        groups => format!(", {groups} groups at once"),
    };
    let order = if results.fixed_order { ", in a fixed order" } else { "" };
    let Results { ranks, op, dtype, .. } = results;
    let table = table.render(2);
    let compared =
        results.results.iter().filter_map(|r| r.measured.as_ref()).any(|m| m.over_predicted.is_some());
    let whose = results.machine.as_ref().map_or(String::new(), |machine| {
        format!("{}\n", machine::whose(machine, results.cluster_measured.as_deref(), compared))
    });
    format!(
        "collectives over {ranks} ranks on {hosts}{groups}: {op} of {dtype}{order}, {kind}\n{whose}{table}{wrong}"
    )
}
