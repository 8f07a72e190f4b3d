//! Suites: cases to plan with every strategy, as TOML.
//!
//! ```toml
//! schema = "crossmesh.suite/1"
//! name = "mine"
//! about = "what it is for"           # optional
//!
//! [hosts]                            # optional: the hosts to assume, as the flags of `explain`
//! devices_per_host = 8
//! nics = 8
//! nic = "400Gbit"
//! local = "450GB/s"
//! latency = "5us"
//!
//! [[case]]
//! name = "one tensor"
//! src = "f32[8,6]@A{tp:2}(tp,_)"
//! dst = "f32[8,6]@B{tp:3}(_,tp)"
//! reference = { sendrecv = 1.0 }     # optional: known times, in t = bytes / NIC rate; or [low, high]
//!
//! [[case]]
//! name = "many tensors"
//! tensors = [{ name = "w", src = "f32[8]@A{tp:2}(tp)", dst = "f32[8]@B{tp:3}(_)" }]
//! ```

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use crossmesh_core::layout::Layout;
use crossmesh_core::reshard::Problem;
use serde::Deserialize;

use crate::input::{HostArgs, parse_layout, read_text};

const SCHEMA: &str = "crossmesh.suite/1";
pub const BUILT_IN: [(&str, &str); 3] = [
    ("paper", include_str!("../suites/paper.toml")),
    ("modern", include_str!("../suites/modern.toml")),
    ("uneven", include_str!("../suites/uneven.toml")),
];

/// Cases that belong together.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Suite {
    schema: String,
    pub name: String,
    #[serde(default)]
    pub about: String,
    #[serde(default)]
    hosts: HostTable,
    #[serde(rename = "case")]
    pub cases: Vec<Case>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct HostTable {
    devices_per_host: Option<u32>,
    nics: Option<u32>,
    nic: Option<String>,
    local: Option<String>,
    latency: Option<String>,
}

/// One edge between two meshes: one tensor, or several.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    pub name: String,
    #[serde(default)]
    pub about: String,
    src: Option<String>,
    dst: Option<String>,
    #[serde(default)]
    tensors: Vec<TensorTable>,
    /// Times other people got, by strategy (or `bound`), in t.
    #[serde(default)]
    pub reference: BTreeMap<String, Reference>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TensorTable {
    #[serde(default)]
    name: String,
    src: String,
    dst: String,
}

/// A time in units of the whole tensor over one NIC; a range where it depends.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(untagged)]
pub enum Reference {
    One(f64),
    Range([f64; 2]),
}

impl Reference {
    /// How far a time is off: 0 inside the range, else relative to its nearer end.
    pub fn error(self, t: f64) -> f64 {
        let [low, high] = match self {
            Reference::One(value) => [value, value],
            Reference::Range(range) => range,
        };
        if t < low { 1.0 - t / low } else { (t / high - 1.0).max(0.0) }
    }
}

impl std::fmt::Display for Reference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Reference::One(value) => write!(f, "{value:.2}"),
            Reference::Range([low, high]) => write!(f, "{low:.2}-{high:.2}"),
        }
    }
}

impl Suite {
    /// A built-in suite by name, or a file.
    pub fn open(name: &str) -> Result<Self> {
        if let Some((_, text)) = BUILT_IN.iter().find(|(built_in, _)| *built_in == name) {
            return Self::parse(text).with_context(|| format!("suite {name}"));
        }
        let path = Path::new(name);
        if !path.exists() {
            bail!(
                "there is no suite `{name}`, and no file of that name\nhint: suites are paper, modern and uneven"
            );
        }
        Self::parse(&read_text(path)?).with_context(|| name.to_string())
    }

    pub fn parse(text: &str) -> Result<Self> {
        let suite: Suite = toml::from_str(text).map_err(|e| anyhow!("{}", e.to_string().trim_end()))?;
        if suite.schema != SCHEMA {
            bail!("schema `{}` is not known\nhint: this version reads {SCHEMA}", suite.schema);
        }
        if suite.cases.is_empty() {
            bail!("the suite has no cases\nhint: add a [[case]]");
        }
        Ok(suite)
    }

    /// The problem of one of its cases, as it stands.
    #[cfg(test)]
    pub fn problem(&self, case: &Case) -> Result<Problem> {
        self.fitted_problem(case, &Fit::default())
    }

    /// The problem of one of its cases, made to fit where it will run.
    pub fn fitted_problem(&self, case: &Case, fit: &Fit) -> Result<Problem> {
        let hosts = HostArgs {
            devices_per_host: self.hosts.devices_per_host,
            nics: self.hosts.nics,
            nic: fit.nic.clone().or_else(|| self.hosts.nic.clone()),
            local: self.hosts.local.clone(),
            latency: self.hosts.latency.clone(),
            cluster: None,
        };
        let build = || hosts.problem(case.pairs(fit.tensor_bytes)?);
        build().with_context(|| format!("case `{}`", case.name))
    }
}

/// What a case is changed to, so that it runs on a small machine.
#[derive(Debug, Default)]
pub struct Fit {
    /// Instead of the suite's NICs.
    pub nic: Option<String>,
    /// The most that a tensor may have; its last dim gives way.
    pub tensor_bytes: Option<u64>,
}

impl Case {
    fn pairs(&self, tensor_bytes: Option<u64>) -> Result<Vec<(String, Layout, Layout)>> {
        let layout = |text: &str| match (parse_layout(text)?, tensor_bytes) {
            (layout, Some(limit)) if layout.bytes() > limit => parse_layout(&shrunk(text, &layout, limit)?),
            (layout, _) => Ok(layout),
        };
        match (&self.src, &self.dst, self.tensors.as_slice()) {
            (Some(src), Some(dst), []) => Ok(vec![(String::new(), layout(src)?, layout(dst)?)]),
            (None, None, [_, ..]) => {
                self.tensors.iter().map(|t| Ok((t.name.clone(), layout(&t.src)?, layout(&t.dst)?))).collect()
            }
            _ => bail!("it needs either `src` and `dst`, or `tensors`"),
        }
    }
}

/// The layout with a last dim so short that the tensor has at most `limit` bytes, in the words of its author.
fn shrunk(text: &str, layout: &Layout, limit: u64) -> Result<String> {
    let last = *layout.shape().last().context("a tensor without dims cannot be shrunk")?;
    let row_bytes = layout.bytes() / last;
    let short = limit / row_bytes;
    if short == 0 {
        bail!("{layout} cannot be shrunk to {limit} B: one step of its last dim has {row_bytes} B");
    }
    let open = text.find('[').context("a layout has a shape")?;
    let close = open + text[open..].find(']').context("a layout's shape ends")?;
    let start = text[..close].rfind(',').filter(|comma| *comma > open).unwrap_or(open) + 1;
    Ok(format!("{}{short}{}", &text[..start], &text[close..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_suites_are_in_order() {
        for (name, _) in BUILT_IN {
            let suite = Suite::open(name).unwrap();
            assert_eq!(suite.name, name);
            for case in &suite.cases {
                suite.problem(case).unwrap();
            }
        }
        assert_eq!(Suite::open("paper").unwrap().cases.len(), 16);
    }

    #[test]
    fn tensors_shrink_in_their_last_dim() {
        let suite = Suite::open("paper").unwrap();
        let fit = Fit { nic: Some("400Mbit".into()), tensor_bytes: Some(64 << 20) };
        let shapes: Vec<Vec<u64>> = suite
            .cases
            .iter()
            .map(|case| suite.fitted_problem(case, &fit).unwrap().reshards[0].src.layout.shape().to_vec())
            .collect();
        assert_eq!(shapes[0], [16777216]);
        assert_eq!(shapes[7], [1024, 1024, 16]);
        assert_eq!(shapes[12], [3072, 1024, 5]);
        let problem = suite.fitted_problem(&suite.cases[0], &fit).unwrap();
        assert_eq!(problem.cluster.hosts[0].nic_out_bytes_per_s, 50e6);
        let error = suite.fitted_problem(&suite.cases[7], &Fit { tensor_bytes: Some(1000), nic: None });
        assert!(format!("{:#}", error.unwrap_err()).contains("cannot be shrunk to 1000 B"));
    }

    #[test]
    fn bad_suites_say_why() {
        let message = |text: &str| format!("{:#}", Suite::parse(text).unwrap_err());
        assert!(message("schema = 'crossmesh.suite/9'\nname = 'x'\ncase = []").contains("suite/9"));
        assert!(message("schema = 'crossmesh.suite/1'\nname = 'x'\ncase = []").contains("no cases"));
        assert!(message("nonsense").contains("line 1"));
        assert!(message("schema = 'crossmesh.suite/1'\nname = 'x'\nwhat = 3\ncase = []").contains("what"));
    }

    #[test]
    fn a_range_is_met_inside() {
        assert_eq!(Reference::Range([0.5, 0.65]).error(0.6), 0.0);
        assert_eq!(Reference::One(2.0).error(2.5), 0.25);
        assert_eq!(Reference::One(2.0).error(1.0), 0.5);
    }
}
