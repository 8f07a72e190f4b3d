//! What comes from outside: files, notation, rates. Everything here may be wrong, and says how.
//!
//! A file of pairs names one tensor a line; the name is optional, `#` starts a comment:
//!
//! ```text
//! # name       source                              destination
//! wq: bf16[4096,4096]@A{fsdp:16}(fsdp,_) -> bf16[4096,4096]@B{dp:2,tp:8}(_,tp)
//! bf16[4096]@A{fsdp:16}(fsdp) -> bf16[4096]@B{dp:2,tp:8}(_)
//! ```

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use crossmesh_core::cluster::{Cluster, Host, Topology};
use crossmesh_core::layout::Layout;
use crossmesh_core::models::{Model, Parallel};
use crossmesh_core::program::doc::ProgramDoc;
use crossmesh_core::reshard::doc::PlanDoc;
use crossmesh_core::reshard::jobs::offset_destinations;
use crossmesh_core::reshard::problem::{Assumed, Hosts};
use crossmesh_core::reshard::{Plan, PlanOptions, Problem, Strategy};
use crossmesh_core::step::doc::StepDoc;
use crossmesh_core::units::{parse_bytes, parse_rate, parse_seconds};

use crate::files;
use crate::known::{Known, strategies};
use crate::rates::NicRates;

/// What moves where, and on which hosts.
#[derive(Debug, clap::Args)]
pub struct ProblemArgs {
    /// The layout the tensor has, such as `f32[8,6]@A{dp:2,tp:4}(tp,_)`; alone: a file of pairs
    #[arg(value_name = "SRC")]
    pub src: Option<String>,
    /// The layout it should have
    #[arg(value_name = "DST")]
    pub dst: Option<String>,
    /// Plan many tensors together: a file with a line `[NAME:] SRC -> DST` for each; `-` reads stdin
    #[arg(long, value_name = "FILE", conflicts_with_all = ["src", "dst"])]
    pub pairs: Option<PathBuf>,
    /// Plan all weights of a model, from `--src` to `--dst`: a name (`llama3-70b`), a config.json of Hugging Face's,
    /// or a table of tensors (docs/python.md)
    #[arg(long, value_name = "MODEL", conflicts_with_all = ["src", "dst", "pairs", "dst_rank_offset"], requires_all = ["from", "to"])]
    pub model: Option<String>,
    /// With `--model`: how it is cut now, such as `fsdp 64` or `pp 2, tp 4`
    #[arg(long = "src", id = "from", value_name = "AXES", requires = "model")]
    pub from: Option<String>,
    /// With `--model`: how it should be cut, such as `dp 4, tp 8`
    #[arg(long = "dst", id = "to", value_name = "AXES", requires = "model")]
    pub to: Option<String>,
    /// With `--model`: query, key and value are one tensor, and so are gate and up, as serving engines have them
    #[arg(long, requires = "model")]
    pub fused: bool,
    /// With `--model`: they are tensors of their own in the source, and lie inside of one in the destination
    #[arg(long, requires = "model", conflicts_with = "fused")]
    pub dst_fused: bool,
    /// The destinations are another job's, which counts its ranks from 0: here its rank 0 is rank N, and its meshes are
    /// its own
    #[arg(long, value_name = "N")]
    pub dst_rank_offset: Option<u32>,
    #[command(flatten)]
    pub hosts: HostArgs,
}

/// The cluster: described by a file, or assumed.
#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Cluster")]
pub struct HostArgs {
    /// A cluster file (TOML); without one, hosts are assumed from the meshes
    #[arg(long, value_name = "FILE")]
    pub cluster: Option<PathBuf>,
    /// The rate of a NIC, each way; of some hosts: `400Mbit,h1=200Mbit` [default: 10Gbit, or the cluster file's]
    #[arg(long, value_name = "RATE", allow_hyphen_values = true)]
    pub nic: Option<String>,
    /// NICs a host [default: 1, or the cluster file's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub nics: Option<u32>,
    /// The rate of a device's link inside its host, each way [default: 100GB/s, or the cluster file's]
    #[arg(long, value_name = "RATE", allow_hyphen_values = true)]
    pub local: Option<String>,
    /// The time a message takes from host to host [default: 0, or the cluster file's]
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    pub latency: Option<String>,
    /// Devices a host [default: the length of each mesh's last axis; 8 where that is above 16 and hosts have several NICs]
    #[arg(long, value_name = "N", conflicts_with = "cluster", value_parser = clap::value_parser!(u32).range(1..))]
    pub devices_per_host: Option<u32>,
}

/// Devices of a host of a model's that nobody described.
const MODEL_HOST: u32 = 8;

/// Which sides of a model hold query, key and value, and gate and up, as one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fusing {
    Neither,
    Destination,
    Both,
}

/// How to plan.
#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Planning")]
pub struct PlanArgs {
    /// sendrecv, allgather, broadcast:naive|balance|dfs|greedy, flow, or auto (the fastest of them) [default: flow]
    #[arg(long, value_name = "S", value_parser = Known(strategies), hide_possible_values = true)]
    pub strategy: Option<String>,
    /// How much arrives before it is forwarded [default: chosen from the sizes]
    #[arg(long, value_name = "BYTES", allow_hyphen_values = true)]
    pub chunk: Option<String>,
    /// The most memory a device may need beside its tensors
    #[arg(long, value_name = "BYTES", allow_hyphen_values = true)]
    pub max_extra_bytes: Option<String>,
    /// For the randomized schedulers: same seed, same plan [default: 0]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
}

impl ProblemArgs {
    /// What should be said of hosts that nobody described.
    pub fn assumption(&self, problem: &Problem) -> Option<String> {
        match self.model {
            Some(_) => self.hosts.model_assumption(),
            None => self.hosts.assumption(problem),
        }
    }

    fn fusing(&self) -> Fusing {
        match (self.fused, self.dst_fused) {
            (true, _) => Fusing::Both,
            (_, true) => Fusing::Destination,
            _ => Fusing::Neither,
        }
    }

    pub fn problem(&self) -> Result<Problem> {
        if let (Some(model), Some(from), Some(to)) = (&self.model, &self.from, &self.to) {
            return self.hosts.model(&read_model(model)?, from, to, self.fusing());
        }
        let pairs = match (&self.pairs, &self.src, &self.dst) {
            (Some(file), ..) => read_pairs(file)?,
            (None, Some(src), Some(dst)) => vec![(String::new(), parse_layout(src)?, parse_layout(dst)?)],
            (None, Some(file), None) if looks_like_a_layout(file) => {
                bail!("the destination of {file} is missing\nhint: give SRC and DST, or a file of pairs")
            }
            (None, Some(file), None) => read_pairs(Path::new(file))?,
            (None, None, _) => bail!("nothing to plan\nhint: give SRC and DST, or --pairs FILE"),
        };
        let pairs = match self.dst_rank_offset {
            Some(offset) => offset_destinations(pairs, offset)?,
            None => pairs,
        };
        self.hosts.problem(pairs)
    }
}

impl HostArgs {
    /// What should be said of hosts that nobody described: that one has a great many devices, or that an axis was cut.
    pub fn assumption(&self, problem: &Problem) -> Option<String> {
        const OTHERWISE: &str = "--devices-per-host says otherwise";
        if self.cluster.is_some() || self.devices_per_host.is_some() {
            return None;
        }
        let layouts = problem.reshards.iter().flat_map(|r| [&r.src.layout, &r.dst.layout]);
        let axis = layouts.map(|layout| layout.mesh().last_axis_len()).max()?;
        let most = problem.cluster.hosts.iter().map(|host| host.devices).max()?;
        match (axis > Assumed::MOST_PER_HOST, most < axis) {
            (false, _) => None,
            (true, false) => Some(format!(
                "one host of {most} devices is assumed, the length of a mesh's last axis; {OTHERWISE}"
            )),
            (true, true) => Some(format!(
                "hosts of {most} devices are assumed, since they have several NICs and a mesh's last axis is {axis} long; {OTHERWISE}"
            )),
        }
    }

    /// What is assumed of a model's hosts: whatever was not given.
    fn model_assumption(&self) -> Option<String> {
        if self.cluster.is_some() {
            return None;
        }
        let hosts = match self.devices_per_host {
            None => format!("hosts of {MODEL_HOST} devices"),
            Some(_) => "hosts".into(),
        };
        let nics = match (self.nics, &self.nic) {
            (None, None) => Some("one 10 Gbit/s NIC each"),
            (None, Some(_)) => Some("one NIC each"),
            (Some(_), None) => Some("NICs of 10 Gbit/s"),
            (Some(_), Some(_)) => None,
        };
        let words = match (self.devices_per_host, nics) {
            (Some(_), None) => return None,
            (_, Some(nics)) => format!("{hosts} with {nics} are assumed"),
            (None, None) => format!("{hosts} are assumed"),
        };
        let flags = [
            ("--devices-per-host", self.devices_per_host.is_none()),
            ("--nics", self.nics.is_none()),
            ("--nic", self.nic.is_none()),
        ];
        let flags = flags.iter().filter(|(_, missing)| *missing).map(|(flag, _)| *flag);
        Some(format!("{words}; {} or --cluster say otherwise", flags.collect::<Vec<_>>().join(", ")))
    }

    /// Tensors on these hosts.
    pub fn problem(&self, pairs: Vec<(String, Layout, Layout)>) -> Result<Problem> {
        let mut problem = Problem::new(pairs, self.hosts()?)?;
        // Only now is it known how many hosts there are.
        if self.cluster.is_none() && self.rates()?.differ() {
            self.rates()?.apply(&mut problem.cluster).context("the NIC rate")?;
            problem.topology = Topology::new(&problem.cluster);
        }
        Ok(problem)
    }

    /// All weights of a model. Without a cluster file, hosts have 8 devices, and the destination has hosts of its own.
    fn model(&self, model: &Model, from: &str, to: &str, fusing: Fusing) -> Result<Problem> {
        let (from, to): (Parallel, Parallel) = (from.parse().context("--src")?, to.parse().context("--dst")?);
        let pairs = match fusing {
            Fusing::Destination => model.pairs_into_fused(&from, &to)?,
            Fusing::Neither | Fusing::Both => model.pairs(&from, &to, fusing == Fusing::Both)?,
        };
        if self.cluster.is_some() {
            return self.problem(pairs);
        }
        let per_host = self.devices_per_host.unwrap_or(MODEL_HOST);
        let mut hosts = vec![];
        for ranks in [from.num_ranks(), to.num_ranks()] {
            let counts = (0..ranks).step_by(per_host as usize).map(|first| per_host.min(ranks - first));
            hosts.extend(counts.map(Host::with_devices));
        }
        let mut cluster = Cluster::of_hosts(hosts);
        self.adjust(&mut cluster)?;
        Ok(Problem::new(pairs, Hosts::Described(cluster))?)
    }

    fn rates(&self) -> Result<NicRates> {
        self.nic.as_deref().map_or(Ok(NicRates::default()), NicRates::parse).context("the NIC rate")
    }

    fn hosts(&self) -> Result<Hosts> {
        if let Some(cluster) = self.described()? {
            return Ok(Hosts::Described(cluster));
        }
        let mut assumed = Assumed { devices_per_host: self.devices_per_host, ..Assumed::default() };
        self.adjust_host(&mut assumed.host)?;
        if let Some(rate) = self.rates()?.every {
            (assumed.host.nic_out_bytes_per_s, assumed.host.nic_in_bytes_per_s) = (rate, rate);
        }
        if let Some(text) = &self.latency {
            assumed.latency_s = parse_seconds(text).context("the latency")?;
        }
        Ok(Hosts::Assumed(assumed))
    }

    /// The cluster of the file, if one was named, with the other flags on top.
    pub fn described(&self) -> Result<Option<Cluster>> {
        let Some(path) = &self.cluster else { return Ok(None) };
        let mut cluster = read_cluster(path)?;
        self.adjust(&mut cluster)?;
        Ok(Some(cluster))
    }

    /// Puts the flags over what a cluster says.
    pub fn adjust(&self, cluster: &mut Cluster) -> Result<()> {
        self.rates()?.apply(cluster).context("the NIC rate")?;
        if self.nic.is_some() || self.nics.is_some() || self.local.is_some() || self.latency.is_some() {
            // No longer the cluster that somebody measured.
            cluster.measured = None;
        }
        for host in &mut cluster.hosts {
            self.adjust_host(host)?;
        }
        if let Some(text) = &self.latency {
            cluster.latency_s = parse_seconds(text).context("the latency")?;
        }
        Ok(())
    }

    fn adjust_host(&self, host: &mut Host) -> Result<()> {
        if let Some(text) = &self.local {
            (host.local_bytes_per_s, host.cache) = (parse_rate(text).context("the local rate")?, None);
        }
        host.nics = self.nics.unwrap_or(host.nics);
        Ok(())
    }
}

impl PlanArgs {
    pub fn options(&self) -> Result<PlanOptions> {
        let bytes = |text: &Option<String>, flag| match text {
            Some(text) => parse_bytes(text).context(flag).map(Some),
            None => Ok(None),
        };
        Ok(PlanOptions {
            strategy: self.strategy.as_deref().map_or(Ok(Strategy::default()), str::parse)?,
            chunk_bytes: bytes(&self.chunk, "--chunk")?,
            max_extra_bytes: bytes(&self.max_extra_bytes, "--max-extra-bytes")?,
            seed: self.seed.unwrap_or(0),
        })
    }
}

impl PlanArgs {
    /// A flag that says how to plan, for those who have a plan already.
    pub fn first_given(&self) -> Option<&'static str> {
        let given = [
            ("--strategy", self.strategy.is_some()),
            ("--chunk", self.chunk.is_some()),
            ("--max-extra-bytes", self.max_extra_bytes.is_some()),
            ("--seed", self.seed.is_some()),
        ];
        given.into_iter().find(|(_, given)| *given).map(|(flag, _)| flag)
    }
}

/// A layout, or the reason with a caret under it.
pub fn parse_layout(text: &str) -> Result<Layout> {
    Ok(text.parse::<Layout>()?)
}

fn looks_like_a_layout(text: &str) -> bool {
    text.contains('@') && text.contains(['(', '{']) && !Path::new(text).exists()
}

pub fn read_cluster(path: &Path) -> Result<Cluster> {
    let text = read_text(path)?;
    Cluster::from_toml(&text).with_context(|| path.display().to_string())
}

/// A model by name, or from its config.json or a table of its tensors.
pub fn read_model(name: &str) -> Result<Model> {
    if let Some(model) = Model::preset(name) {
        return Ok(model);
    }
    let path = Path::new(name);
    if !path.exists() {
        let known: Vec<&str> = Model::preset_names().collect();
        bail!(
            "no model and no file is called `{name}`\nhint: give a config.json, a table of tensors, or one of {}",
            known.join(", ")
        );
    }
    Model::from_json(&read_text(path)?).with_context(|| name.to_string())
}

/// The text of a file; `-` is stdin.
pub fn read_text(path: &Path) -> Result<String> {
    let name = path.display();
    if path == Path::new("-") {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).context("cannot read stdin")?;
        return Ok(text);
    }
    if path.is_dir() {
        bail!("cannot read {name}: it is a directory\nhint: name a file in it");
    }
    let bytes = files::read(path)?;
    String::from_utf8(bytes).map_err(|e| {
        anyhow!("cannot read {name}: it is not text (byte {} is not UTF-8)", e.utf8_error().valid_up_to())
    })
}

/// A plan document and the plan it says.
pub struct PlanFile {
    pub doc: PlanDoc,
    pub plan: Plan,
}

/// What a file describes.
pub enum Document {
    Plan(Box<PlanDoc>),
    Program(Box<ProgramDoc>),
    Step(Box<StepDoc>),
}

/// Reads a document of a plan, a program or a step; the error names the file.
pub fn read_document(path: &Path) -> Result<Document> {
    let text = read_text(path)?;
    let name = || path.display().to_string();
    if says_schema(&text, "crossmesh.step/") {
        return Ok(Document::Step(Box::new(StepDoc::parse(&text).with_context(name)?)));
    }
    if is_program(&text) {
        return Ok(Document::Program(Box::new(ProgramDoc::parse(&text).with_context(name)?)));
    }
    Ok(Document::Plan(Box::new(PlanDoc::parse(&text).with_context(name)?)))
}

/// Whether a text says of itself that it is a program.
pub fn is_program(text: &str) -> bool {
    says_schema(text, "crossmesh.program/")
}

/// Whether a text says of itself that it has this schema. One that was cut short may still say so.
fn says_schema(text: &str, schema: &str) -> bool {
    text.split("\"schema\"").skip(1).any(|rest| {
        let value = rest.trim_start().strip_prefix(':').map(str::trim_start);
        value.and_then(|value| value.strip_prefix('"')).is_some_and(|value| value.starts_with(schema))
    })
}

/// Reads a plan document; the error names the file.
pub fn read_plan_doc(path: &Path) -> Result<PlanDoc> {
    PlanDoc::parse(&read_text(path)?).with_context(|| path.display().to_string())
}

/// Reads a plan.
pub fn read_plan(path: &Path) -> Result<PlanFile> {
    let doc = read_plan_doc(path)?;
    let plan = doc.to_plan().with_context(|| path.display().to_string())?;
    Ok(PlanFile { doc, plan })
}

/// The named pairs of a file.
pub fn read_pairs(path: &Path) -> Result<Vec<(String, Layout, Layout)>> {
    let text = read_text(path)?;
    let pairs = parse_pairs(&text).with_context(|| path.display().to_string())?;
    let mut names = BTreeSet::new();
    if let Some((twice, ..)) = pairs.iter().find(|(name, ..)| !name.is_empty() && !names.insert(name)) {
        bail!("{} names `{twice}` twice\nhint: a tensor has a name of its own", path.display());
    }
    if pairs.is_empty() {
        bail!("{} names no tensor\nhint: {PAIR_HINT}", path.display());
    }
    Ok(pairs)
}

const PAIR_HINT: &str = "a line reads `NAME: SRC -> DST`; the name may be left out";

fn parse_pairs(text: &str) -> Result<Vec<(String, Layout, Layout)>> {
    let lines = text.lines().enumerate();
    let lines = lines.map(|(i, line)| (i + 1, line.split('#').next().unwrap_or("").trim()));
    lines
        .filter(|(_, line)| !line.is_empty())
        .map(|(number, line)| parse_pair(line).with_context(|| format!("line {number}")))
        .collect()
}

fn parse_pair(line: &str) -> Result<(String, Layout, Layout)> {
    let (name, rest) = match line.split_once(':') {
        // A colon behind a bracket is the first axis's, as in `f32[8]@A{tp:2}(tp)`.
        Some((name, rest)) if !name.contains(['[', '{', '@', '(']) => (name.trim(), rest),
        _ => ("", line),
    };
    let Some((src, dst)) = rest.split_once("->") else {
        bail!("no `->` between source and destination\nhint: {PAIR_HINT}");
    };
    Ok((name.to_string(), parse_layout(src.trim())?, parse_layout(dst.trim())?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_may_have_names_and_comments() {
        let text = "# a model\n\nwq.0: f32[8]@A{tp:2}(tp) -> f32[8]@B{tp:2}(_)  # q\nf32[]@A{tp:2}() -> f32[]@B{tp:2}()\n";
        let pairs = parse_pairs(text).unwrap();
        assert_eq!(pairs.iter().map(|p| p.0.as_str()).collect::<Vec<_>>(), ["wq.0", ""]);
        assert_eq!(pairs[0].2.to_string(), "f32[8]@B{tp:2}(_)");
    }

    #[test]
    fn a_bad_pair_names_its_line() {
        let message = |text| format!("{:#}", parse_pairs(text).unwrap_err());
        assert!(message("\nf32[8]@A{tp:2}(tp)\n").starts_with("line 2: no `->`"));
        assert!(
            message("f32[8]@A{tp:2}(dp) -> f32[8]@B{tp:2}(_)").contains("line 1: mesh `A` has no axis `dp`")
        );
    }
}
