//! `crossmesh diff`: what changed between two plans, or two traces?

mod changes;
mod clusters;
mod tensors;
mod traces;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use crossmesh_core::reshard::{Plan, Reshard, Transfer};
use crossmesh_core::units::{Bytes, Seconds};
use serde::Serialize;

use crate::Answer;
use crate::input::{PlanFile, read_plan, read_text};
use crate::output::{self, Format, FormatArgs, Table, and_more, count};
use crate::summary;
use crate::tensors::name_of;
use crate::trace_doc::TraceDoc;
use changes::{Change, Number, by_size};
use tensors::TensorChange;

/// Show what changed between two plans (strategy, times, traffic and transfers) or two traces (when every op ran).
#[derive(Debug, clap::Args)]
#[command(after_help = "Exits 0 if they are the same, 1 if they differ.

Examples:
  crossmesh diff before.json after.json
  # traces that `simulate --trace` and `run --trace` wrote
  crossmesh diff predicted.json measured.json --within 10%
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
    #[command(flatten)]
    format: FormatArgs,
}

/// The differences; empty lists where there are none.
#[derive(Debug, PartialEq, Serialize)]
struct Difference {
    schema: &'static str,
    same: bool,
    /// Properties of the plan and of its cluster with different values, the largest difference first.
    changed: Vec<Change>,
    /// Whether times are of different machines.
    clusters_differ: bool,
    /// Host pairs that carry a different number of bytes, the largest difference first.
    traffic: Vec<TrafficChange>,
    /// Of plans for many: tensors that cost something else, the largest difference first.
    tensors: Vec<TensorChange>,
    /// Transfers, the largest first.
    removed: Vec<String>,
    added: Vec<String>,
}

#[derive(Debug, PartialEq, Serialize)]
struct TrafficChange {
    from_host: u32,
    to_host: u32,
    a_bytes: u64,
    b_bytes: u64,
}

pub fn run(args: &Args) -> Result<Answer> {
    if let Some((a, b)) = read_traces(args)? {
        let difference = traces::compare(&a, &b, args.within);
        match args.format.get() {
            Format::Text => output::print(&traces::render(&difference))?,
            Format::Json => output::print_json(&difference)?,
        }
        return Ok(if difference.same { Answer::Yes } else { Answer::No });
    }
    let (a, b) = (read_plan(&args.a)?, read_plan(&args.b)?);
    let difference = compare(&a, &b);
    match args.format.get() {
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
    let clusters = clusters::changes(&a.plan.problem.cluster, &b.plan.problem.cluster);
    let clusters_differ = !clusters.is_empty();
    let mut changed = properties(a, b);
    changed.extend(layout_changes(&a.plan, &b.plan));
    changed.extend(clusters);
    by_size(&mut changed);
    let (traffic, tensors) = (traffic_changes(&a.plan, &b.plan), tensors::changes(&a.plan, &b.plan));
    let (removed, added) = transfer_changes(&a.plan, &b.plan);
    if removed.is_empty() && added.is_empty() {
        let first = first_out_of_order(&a.plan, &b.plan);
        let order = |first| Change::words("order", String::new(), format!("differs from t{first} on"));
        changed.extend(first.and_then(order));
    }
    let same = changed.is_empty() && traffic.is_empty() && removed.is_empty() && added.is_empty();
    Difference {
        schema: "crossmesh.diff/1",
        same,
        changed,
        clusters_differ,
        traffic,
        tensors,
        removed,
        added,
    }
}

/// The first place where two plans with the same transfers put them, or order them, differently.
fn first_out_of_order(a: &Plan, b: &Plan) -> Option<usize> {
    let same = |(x, y): (&Transfer, &Transfer)| {
        let said = |t: &Transfer| (t.tensor, t.src, t.dst, t.weight, t.reduce, t.then_own);
        said(x) == said(y) && a.region(x) == b.region(y) && a.after(x) == b.after(y)
    };
    a.transfers().iter().zip(b.transfers()).position(|pair| !same(pair))
}

/// What documents say of two plans, where that differs.
fn properties(a: &PlanFile, b: &PlanFile) -> Vec<Change> {
    let bytes = |n: f64| Bytes(n as u64).to_string();
    let seconds = |s: f64| Seconds(s).to_string();
    let whole = |n: f64| n.to_string();
    let both = |of: &dyn Fn(&PlanFile) -> f64| [of(a), of(b)];
    let numbers: [(&str, [f64; 2], Number<'_>); 6] = [
        ("chunk", both(&|f| f.plan.chunk_bytes as f64), &bytes),
        ("transfers", both(&|f| f.plan.transfers().len() as f64), &whole),
        ("bytes moved", both(&|f| f.plan.bytes_moved() as f64), &bytes),
        ("lower bound", both(&|f| f.doc.lower_bound_s), &seconds),
        ("predicted", both(&|f| f.doc.predicted_s), &seconds),
        ("peak extra", both(&|f| f.doc.peak_extra_bytes as f64), &bytes),
    ];
    let strategy = Change::words("strategy", a.plan.strategy.clone(), b.plan.strategy.clone());
    let numbers = numbers.into_iter().filter_map(|(what, values, show)| Change::number(what, values, show));
    strategy.into_iter().chain(numbers).collect()
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
        changes.extend(Change::words(what, ours, theirs));
    }
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
        table.row([c.what.clone(), c.a.clone(), "->".into(), c.b.clone(), c.percent()]);
    }
    for c in difference.traffic.iter().take(SHOWN) {
        let pair = format!("h{} to h{}", c.from_host, c.to_host);
        table.row([pair, Bytes(c.a_bytes).to_string(), "->".into(), Bytes(c.b_bytes).to_string()]);
    }
    text += &table.render(0);
    text += &and_more(difference.traffic.len(), SHOWN, "host pair");
    text += &tensors::render(&difference.tensors, SHOWN);
    if difference.clusters_differ {
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
