//! `crossmesh diff`: what changed between two plans, or two traces?

mod traces;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use crossmesh_core::cluster::{Cluster, Host};
use crossmesh_core::reshard::{Plan, Reshard, Transfer};
use crossmesh_core::units::{Bytes, Rate, Seconds};
use serde::Serialize;

use crate::Answer;
use crate::input::{PlanFile, read_plan, read_text};
use crate::output::{self, Format, Table, and_more, count};
use crate::summary;
use crate::trace_doc::TraceDoc;

/// Show what changed between two plans (strategy, times, traffic and transfers) or two traces (when every op ran).
#[derive(Debug, clap::Args)]
#[command(after_help = "Exits 0 if they are the same, 1 if they differ.

Examples:
  crossmesh diff before.json after.json
  crossmesh diff predicted.json measured.json --within 10%   # traces of `simulate` and `run`, --trace FILE
  crossmesh diff flow.json greedy.json --format json")]
pub struct Args {
    /// A plan document, or a trace
    #[arg(value_name = "A")]
    a: PathBuf,
    /// Another one
    #[arg(value_name = "B")]
    b: PathBuf,
    /// Of traces: what share of the whole run times may differ by and still be the same
    #[arg(long, value_name = "PERCENT", default_value = "0%", value_parser = parse_percent)]
    within: f64,
    /// Text for people, or one JSON document
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,
}

/// The differences; empty lists where there are none.
#[derive(Debug, PartialEq, Serialize)]
struct Difference {
    schema: &'static str,
    same: bool,
    /// Properties of the plan with different values.
    changed: Vec<Change>,
    /// Host pairs that carry a different number of bytes, the largest difference first.
    traffic: Vec<TrafficChange>,
    /// Of plans for many: tensors that move a different number of bytes, the largest difference first.
    tensors: Vec<TensorChange>,
    /// Transfers, the largest first.
    removed: Vec<String>,
    added: Vec<String>,
}

#[derive(Debug, PartialEq, Serialize)]
struct Change {
    what: &'static str,
    a: String,
    b: String,
}

#[derive(Debug, PartialEq, Serialize)]
struct TrafficChange {
    from_host: u32,
    to_host: u32,
    a_bytes: u64,
    b_bytes: u64,
}

#[derive(Debug, PartialEq, Serialize)]
struct TensorChange {
    name: String,
    a_bytes: u64,
    b_bytes: u64,
}

pub fn run(args: &Args) -> Result<Answer> {
    if let Some((a, b)) = read_traces(args)? {
        let difference = traces::compare(&a, &b, args.within);
        match args.format {
            Format::Text => output::print(&traces::render(&difference))?,
            Format::Json => output::print_json(&difference)?,
        }
        return Ok(if difference.same { Answer::Yes } else { Answer::No });
    }
    let (a, b) = (read_plan(&args.a)?, read_plan(&args.b)?);
    let difference = compare(&a, &b);
    match args.format {
        Format::Text => output::print(&render(&difference))?,
        Format::Json => output::print_json(&difference)?,
    }
    Ok(if difference.same { Answer::Yes } else { Answer::No })
}

/// `10%`, or `10`.
fn parse_percent(text: &str) -> Result<f64, String> {
    let percent = text.strip_suffix('%').unwrap_or(text).trim().parse::<f64>().ok();
    let fits = percent.filter(|p| (0.0..=100.0).contains(p));
    fits.map(|p| p / 100.0).ok_or_else(|| "not a percentage from 0% to 100%".into())
}

/// Both files as traces, if both are.
fn read_traces(args: &Args) -> Result<Option<(TraceDoc, TraceDoc)>> {
    // What comes from stdin can be read once, and is a plan.
    if [&args.a, &args.b].iter().any(|path| path.as_os_str() == "-") {
        return Ok(None);
    }
    let read = |path: &Path| TraceDoc::find(&read_text(path)?).with_context(|| path.display().to_string());
    match (read(&args.a)?, read(&args.b)?) {
        (Some(a), Some(b)) => Ok(Some((a, b))),
        (None, None) => Ok(None),
        (Some(_), None) => bail!("{} is a trace, {} is none", args.a.display(), args.b.display()),
        (None, Some(_)) => bail!("{} is a trace, {} is none", args.b.display(), args.a.display()),
    }
}

fn compare(a: &PlanFile, b: &PlanFile) -> Difference {
    let mut changed: Vec<Change> = properties(a)
        .into_iter()
        .zip(properties(b))
        .filter(|((_, a), (_, b))| a != b)
        .map(|((what, a), (_, b))| Change { what, a, b })
        .collect();
    changed.extend(layout_changes(&a.plan, &b.plan));
    let (traffic, tensors) = (traffic_changes(&a.plan, &b.plan), tensor_changes(&a.plan, &b.plan));
    let (removed, added) = transfer_changes(&a.plan, &b.plan);
    if removed.is_empty() && added.is_empty() {
        let first = first_out_of_order(&a.plan, &b.plan);
        let order =
            |first| Change { what: "order", a: String::new(), b: format!("differs from t{first} on") };
        changed.extend(first.map(order));
    }
    let same = changed.is_empty() && traffic.is_empty() && removed.is_empty() && added.is_empty();
    Difference { schema: "crossmesh.diff/1", same, changed, traffic, tensors, removed, added }
}

/// The first place where two plans with the same transfers put them, or order them, differently.
fn first_out_of_order(a: &Plan, b: &Plan) -> Option<usize> {
    let same = |(x, y): (&Transfer, &Transfer)| {
        let said = |t: &Transfer| (t.tensor, t.src, t.dst, t.weight, t.reduce, t.then_own);
        said(x) == said(y) && a.region(x) == b.region(y) && a.after(x) == b.after(y)
    };
    a.transfers().iter().zip(b.transfers()).position(|pair| !same(pair))
}

fn properties(file: &PlanFile) -> Vec<(&'static str, String)> {
    let (plan, doc) = (&file.plan, &file.doc);
    vec![
        ("cluster", describe(&plan.problem.cluster)),
        ("strategy", plan.strategy.clone()),
        ("chunk", Bytes(plan.chunk_bytes).to_string()),
        ("transfers", plan.transfers().len().to_string()),
        ("bytes moved", Bytes(plan.bytes_moved()).to_string()),
        ("lower bound", Seconds(doc.lower_bound_s).to_string()),
        ("predicted", Seconds(doc.predicted_s).to_string()),
        ("peak extra", Bytes(doc.peak_extra_bytes).to_string()),
    ]
}

/// `2 hosts of 8 devices, 1 NIC of 10 Gbit/s, local 100 GB/s`: all that times depend on.
fn describe(cluster: &Cluster) -> String {
    let mut kinds: Vec<(&Host, usize)> = vec![];
    for host in &cluster.hosts {
        match kinds.last_mut().filter(|(last, _)| *last == host) {
            Some((_, n)) => *n += 1,
            None => kinds.push((host, 1)),
        }
    }
    let kind = |(host, n): &(&Host, usize)| {
        let (out, into) =
            (Rate(host.nic_out_bytes_per_s).to_string(), Rate(host.nic_in_bytes_per_s).to_string());
        let nic = if out == into { out } else { format!("{out} out, {into} in") };
        let memory = host.memory_bytes.map_or(String::new(), |bytes| format!(", {} each", Bytes(bytes)));
        format!(
            "{} of {}{memory}, {} of {nic}, local {}",
            count(*n, "host"),
            count(host.devices as usize, "device"),
            count(host.nics as usize, "NIC"),
            Rate(host.local_bytes_per_s)
        )
    };
    let mut words: Vec<String> = kinds.iter().map(kind).collect();
    if cluster.latency_s > 0.0 {
        words.push(format!("latency {}", Seconds(cluster.latency_s)));
    }
    if !cluster.messages_are_free() {
        words.push(format!("{} a message", Seconds(cluster.message_s)));
    }
    if !cluster.tiers.is_empty() {
        words.push(count(cluster.tiers.len(), "tier"));
    }
    words.join("; ")
}

/// A tensor's name, or its number where it has none.
fn name_of(plan: &Plan, tensor: usize) -> String {
    let name = &plan.problem.reshards[tensor].name;
    if name.is_empty() { format!("#{tensor}") } else { name.clone() }
}

type Side = fn(&Reshard) -> String;

/// Tensors that are there in one plan only, or lie differently.
fn layout_changes(a: &Plan, b: &Plan) -> Vec<Change> {
    let sides: [(&'static str, Side); 2] =
        [("source", |r| r.src.layout.to_string()), ("destination", |r| r.dst.layout.to_string())];
    let mut changes = vec![];
    for (what, side) in sides {
        let named = |plan: &Plan| -> BTreeMap<String, String> {
            plan.problem.reshards.iter().enumerate().map(|(i, r)| (name_of(plan, i), side(r))).collect()
        };
        let (ours, theirs) = (named(a), named(b));
        let names: BTreeSet<&String> = ours.keys().chain(theirs.keys()).collect();
        let differing: Vec<&String> = names.into_iter().filter(|n| ours.get(*n) != theirs.get(*n)).collect();
        let Some(first) = differing.first().copied() else { continue };
        let of = |map: &BTreeMap<String, String>| map.get(first).cloned().unwrap_or_else(|| "absent".into());
        let (mut ours, theirs) = (of(&ours), of(&theirs));
        if a.problem.reshards.len().max(b.problem.reshards.len()) > 1 {
            ours = format!("{} differ, such as {first}: {ours}", count(differing.len(), "tensor"));
        }
        changes.push(Change { what, a: ours, b: theirs });
    }
    changes
}

/// What every tensor moves, where that differs. Of one tensor the whole plan says it.
fn tensor_changes(a: &Plan, b: &Plan) -> Vec<TensorChange> {
    if a.problem.reshards.len().max(b.problem.reshards.len()) < 2 {
        return vec![];
    }
    let mut moved: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for (plan, first) in [(a, true), (b, false)] {
        for t in plan.transfers() {
            let entry = moved.entry(name_of(plan, t.tensor as usize)).or_default();
            *(if first { &mut entry.0 } else { &mut entry.1 }) += t.bytes;
        }
    }
    let changed = moved.into_iter().filter(|(_, (a, b))| a != b);
    let mut changes: Vec<TensorChange> =
        changed.map(|(name, (a_bytes, b_bytes))| TensorChange { name, a_bytes, b_bytes }).collect();
    changes.sort_by_key(|c| Reverse(c.a_bytes.abs_diff(c.b_bytes)));
    changes
}

fn traffic_changes(a: &Plan, b: &Plan) -> Vec<TrafficChange> {
    let (a, b) = (summary::host_traffic(a), summary::host_traffic(b));
    let mut pairs: Vec<_> = a.keys().chain(b.keys()).copied().collect();
    pairs.sort_unstable();
    pairs.dedup();
    let bytes = |of: &BTreeMap<_, summary::Traffic>, pair| of.get(&pair).map_or(0, |t| t.bytes);
    let mut changes: Vec<TrafficChange> = pairs
        .into_iter()
        .map(|pair| TrafficChange {
            from_host: pair.0.0,
            to_host: pair.1.0,
            a_bytes: bytes(&a, pair),
            b_bytes: bytes(&b, pair),
        })
        .filter(|c| c.a_bytes != c.b_bytes)
        .collect();
    changes.sort_by_key(|c| Reverse(c.a_bytes.abs_diff(c.b_bytes)));
    changes
}

/// Transfers of one plan that the other has not, as often as they are more; the largest first.
fn transfer_changes(a: &Plan, b: &Plan) -> (Vec<String>, Vec<String>) {
    let mut balance: BTreeMap<(String, u32, u32, String), (i64, u64)> = BTreeMap::new();
    for (plan, step) in [(a, 1), (b, -1)] {
        for t in plan.transfers() {
            let key = (name_of(plan, t.tensor as usize), t.src.0, t.dst.0, plan.region(t).to_string());
            let entry = balance.entry(key).or_default();
            *entry = (entry.0 + step, t.bytes);
        }
    }
    let many = a.problem.reshards.len() > 1 || b.problem.reshards.len() > 1;
    let mut unequal: Vec<_> = balance.into_iter().filter(|(_, (n, _))| *n != 0).collect();
    unequal.sort_by_key(|(_, (_, bytes))| Reverse(*bytes));
    let (mut removed, mut added) = (vec![], vec![]);
    for ((tensor, src, dst, region), (n, bytes)) in unequal {
        let tensor = if many { format!("{tensor} ") } else { String::new() };
        let line = format!("r{src} -> r{dst}  {tensor}{region}  {}", Bytes(bytes));
        let side = if n > 0 { &mut removed } else { &mut added };
        side.extend((0..n.unsigned_abs()).map(|_| line.clone()));
    }
    (removed, added)
}

fn render(difference: &Difference) -> String {
    const SHOWN: usize = 20;
    if difference.same {
        return "the plans are the same\n".into();
    }
    let mut text = String::new();
    let mut table = Table::new("l");
    for c in &difference.changed {
        table.row([c.what, c.a.as_str(), "->", c.b.as_str()]);
    }
    for c in difference.traffic.iter().take(SHOWN) {
        let pair = format!("h{} to h{}", c.from_host, c.to_host);
        table.row([pair, Bytes(c.a_bytes).to_string(), "->".into(), Bytes(c.b_bytes).to_string()]);
    }
    for c in difference.tensors.iter().take(SHOWN) {
        let name = format!("tensor {}", c.name);
        table.row([name, Bytes(c.a_bytes).to_string(), "->".into(), Bytes(c.b_bytes).to_string()]);
    }
    text += &table.render(0);
    text += &and_more(difference.traffic.len(), SHOWN, "host pair");
    text += &and_more(difference.tensors.len(), SHOWN, "tensor");
    if difference.changed.iter().any(|c| c.what == "cluster") {
        text += "the clusters differ: times are not of the same machines\n";
    }
    for (sign, lines) in [("-", &difference.removed), ("+", &difference.added)] {
        for line in lines.iter().take(SHOWN) {
            let _ = writeln!(text, "{sign} {line}");
        }
        text += &and_more(lines.len(), SHOWN, "transfer");
    }
    let _ = writeln!(
        text,
        "the plans differ: {} removed, {} added",
        count(difference.removed.len(), "transfer"),
        count(difference.added.len(), "transfer")
    );
    text
}
