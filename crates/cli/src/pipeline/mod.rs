//! Training steps to compare: models cut into stages, as cases of a suite, and the ways to run them, as series.
//!
//! A suite file is TOML. Times are a device's; layouts name their meshes' ranks; `made` and `needed` say how far into its
//! forward pass a stage makes a tensor, and how far into its own the other one needs it.
//!
//! ```toml
//! schema = "crossmesh.pipeline/1"
//! name = "mine"
//!
//! [[case]]
//! name = "two stages"
//! microbatches = 8
//! nic = "10Gbit"
//! hosts = [2, 2]                     # devices of each host
//! stages = [
//!   { ranks = [0, 1], f = "20ms", b = "20ms", w = "20ms" },
//!   { ranks = [2, 3], f = "20ms", b = "20ms", w = "20ms" },
//! ]
//! crossings = [
//!   { name = "act", from = 0, to = 1, src = "f16[8,1024]@A{dp:2}=0-1(dp,_)", dst = "f16[8,1024]@B{dp:2}=2-3(dp,_)" },
//! ]
//! ```

mod models;
mod paper;
mod series;

use anyhow::{Context, Result, anyhow, bail};
use crossmesh_core::units::{parse_rate, parse_seconds};
use serde::Deserialize;

use crate::input::read_text;

pub use series::{Scale, Series, Specimen};

const SCHEMA: &str = "crossmesh.pipeline/1";

/// Cases that belong together.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Suite {
    schema: String,
    pub name: String,
    #[serde(default)]
    pub about: String,
    #[serde(rename = "case")]
    pub cases: Vec<Case>,
}

/// A model cut into stages, on hosts.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    pub name: String,
    #[serde(default)]
    pub about: String,
    pub microbatches: u32,
    pub nic: String,
    /// Devices of each host.
    pub hosts: Vec<u32>,
    pub stages: Vec<Stage>,
    pub crossings: Vec<Crossing>,
    /// What the paper says of it, in words.
    #[serde(default)]
    pub paper: String,
}

/// A stage on its ranks; how long its passes take there.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    pub ranks: Vec<u32>,
    pub f: String,
    pub b: String,
    pub w: String,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Crossing {
    pub name: String,
    pub from: u32,
    pub to: u32,
    pub src: String,
    pub dst: String,
    #[serde(default = "one")]
    pub made: f64,
    #[serde(default)]
    pub needed: f64,
}

fn one() -> f64 {
    1.0
}

impl Suite {
    /// The built-in suite, or a file.
    pub fn open(name: &str) -> Result<Self> {
        if name == "paper" {
            return Ok(paper::suite());
        }
        let path = std::path::Path::new(name);
        if !path.exists() {
            bail!("no suite `{name}`\nhint: the built-in suite is `paper`; a file of your own is read too");
        }
        let text = read_text(path)?;
        let suite: Suite = toml::from_str(&text).map_err(|e| anyhow!("{name}: {e}"))?;
        if suite.schema != SCHEMA {
            bail!("{name}: schema is `{}`, not {SCHEMA}", suite.schema);
        }
        suite
            .cases
            .iter()
            .try_for_each(|case| case.check().with_context(|| format!("{name}: case `{}`", case.name)))?;
        Ok(suite)
    }
}

impl Case {
    /// Refuses what no later step would name as well.
    fn check(&self) -> Result<()> {
        self.nic_bytes_per_s()?;
        if self.stages.is_empty() {
            bail!("a pipeline has at least one stage");
        }
        if self.hosts.contains(&0) {
            bail!("a host without devices");
        }
        for (i, stage) in self.stages.iter().enumerate() {
            stage.seconds().with_context(|| format!("stage {i}"))?;
            if stage.ranks.is_empty() {
                bail!("stage {i} is on no rank");
            }
        }
        Ok(())
    }

    pub fn nic_bytes_per_s(&self) -> Result<f64> {
        parse_rate(&self.nic).context("nic")
    }
}

impl Stage {
    /// The times of its F, B and W.
    pub fn seconds(&self) -> Result<[f64; 3]> {
        Ok([
            parse_seconds(&self.f).context("f")?,
            parse_seconds(&self.b).context("b")?,
            parse_seconds(&self.w).context("w")?,
        ])
    }
}
