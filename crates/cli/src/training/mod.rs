//! Training jobs: from a config to ranks that train, and from what they say to metrics and a report.
//!
//! ```text
//! commands/train ── TrainDoc ──> every rank: Training (config, data, job, wiring) ──> rank: steps, checkpoints
//!       ^                                                                              |
//!       board <──────────────────────────── StepNote, a line a step ──────────────────'
//! ```
//!
//! A rank gets the resolved config as text and works everything else out for itself, as all of them do.

pub mod board;
pub mod device;
pub mod dry;
mod events;
pub mod metrics;
pub mod note;
pub mod overlap;
pub mod rank;
pub mod resume;
pub mod save;
pub mod steps;
mod stop;
pub mod timeline;
pub mod words;

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use crossmesh_core::cluster::Topology;
use crossmesh_core::step::StepError;
use crossmesh_train::by_precision;
use crossmesh_train::config::keys::KEYS;
use crossmesh_train::config::{AnyModel, Config, DataKind, ModelKind, Resolved, resolve, toml_text};
use crossmesh_train::data::images::{Images, ImagesSpec};
use crossmesh_train::data::language::{Language, LanguageSpec};
use crossmesh_train::data::mixture::Mixture;
use crossmesh_train::data::text::{DocumentEnd, Encoder, Text};
use crossmesh_train::data::tokens::{Source, Tokens, WindowSpec};
use crossmesh_train::data::{self, DataError, DataSet, Kind, Split};
use crossmesh_train::job::JobError;
use crossmesh_train::kernels::Kernels;
use crossmesh_train::models::ConfigError as ModelError;
use crossmesh_train::models::gpt::{Family, Residual};
use crossmesh_train::stage_rank::{G, KV};
use crossmesh_train::wiring::Wiring;
use serde::{Deserialize, Serialize};

use crate::input::read_cluster;
use crate::rates::NicRates;

use note::StepNote;

pub const SCHEMA: &str = "crossmesh.train/1";

/// What a rank is told.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TrainDoc {
    pub schema: String,
    pub name: String,
    /// The resolved config, as TOML.
    pub config: String,
    /// NIC rates that were asked for on the command line.
    pub nic: Option<String>,
    /// The checkpoint to go on from.
    pub resume: Option<PathBuf>,
    /// Whether only its weights are taken, for a run of its own.
    #[serde(default)]
    pub weights_only: bool,
    /// Whether only a byte crosses between stages, to measure what compute alone takes.
    #[serde(default)]
    pub signal: bool,
}

/// Who hears of every step.
pub type OnStep = Arc<dyn Fn(StepNote) + Send + Sync>;

/// A job with all that it is made of.
#[derive(Clone)]
pub struct Training {
    pub doc: TrainDoc,
    pub config: Config,
    pub data: Arc<dyn DataSet>,
    pub resolved: Resolved,
    pub wiring: Arc<Wiring>,
    pub topology: Topology,
    pub on_step: OnStep,
}

impl Training {
    pub fn read(text: &str, on_step: OnStep) -> Result<Self> {
        let doc: TrainDoc = serde_json::from_str(text).context("not a training job")?;
        if doc.schema != SCHEMA {
            return Err(anyhow!("the schema is `{}`, not {SCHEMA}", doc.schema));
        }
        let config = Config::read(&format!("{}.toml", doc.name), &doc.config, &[])?;
        let mut training =
            Self::open_as(config, doc.nic.as_deref(), doc.resume.clone(), doc.signal, on_step)?;
        training.doc.weights_only = doc.weights_only;
        Ok(training)
    }

    /// Opens what the config names, and fits it together.
    pub fn open(config: Config, nic: Option<&str>, resume: Option<PathBuf>, on_step: OnStep) -> Result<Self> {
        Self::open_as(config, nic, resume, false, on_step)
    }

    /// The same; as a job that only signals, where that is asked for.
    pub fn open_as(
        config: Config,
        nic: Option<&str>,
        resume: Option<PathBuf>,
        signal: bool,
        on_step: OnStep,
    ) -> Result<Self> {
        let data = open_data(&config).map_err(|error| placed(&config, error))?;
        let described = match &config.cluster.file {
            Some(file) => Some(read_cluster(file.as_ref()).context("cluster.file")?),
            None => None,
        };
        let mut resolved = resolve(&config, classes(&*data), described)?;
        resolved.job.signal = signal;
        if let Some(nic) = nic {
            NicRates::parse(nic)?.apply(&mut resolved.job.cluster).context("the NIC rate")?;
        }
        let wiring = by_precision!(config.train.precision, K => wire::<K>(&resolved, &*data));
        let wiring = wiring.map_err(|error| placed(&config, error))?;
        if config.evaluate.every > 0 && data.num_samples(Split::Validation) == Some(0) {
            let hint = "data.validation_share = 0.05 holds some out; evaluate.every = 0 does without";
            return Err(config.error("evaluate.every", "nothing is held out to judge by", hint).into());
        }
        let found = found(&config, &resolved);
        let doc = TrainDoc {
            schema: SCHEMA.into(),
            name: config.name.clone(),
            config: config.to_toml(&found),
            nic: nic.map(String::from),
            resume,
            weights_only: false,
            signal,
        };
        let topology = Topology::new(&resolved.job.cluster);
        Ok(Self { doc, config, data, resolved, wiring: Arc::new(wiring), topology, on_step })
    }

    pub fn document(&self) -> String {
        serde_json::to_string(&self.doc).expect("a job is made of text")
    }

    /// Of a sample, where it is made of tokens.
    pub fn tokens(&self) -> Option<usize> {
        match &self.config.model {
            ModelKind::Gpt { config, .. } => Some(config.context),
            ModelKind::Unet(_) => None,
        }
    }

    /// Whether the run is judged behind so many steps.
    pub fn is_evaluated_behind(&self, steps: u64) -> bool {
        let every = self.config.evaluate.every;
        every > 0 && (steps.is_multiple_of(every) || steps == self.config.train.steps)
    }

    /// Batches of a validation: as many as asked for, and no sample twice.
    pub fn validation_batches(&self) -> u64 {
        let all = self.data.num_samples(Split::Validation).unwrap_or(u64::MAX);
        self.config.evaluate.batches.min(all / self.resolved.job.batch()).max(1)
    }

    /// The model, the ranks and the schedule, in a line.
    pub fn about(&self) -> String {
        let job = &self.resolved.job;
        let parameters: u64 = self.resolved.parameters();
        let meshes: Vec<String> = job.teams.iter().map(|team| mesh_text(&team.mesh)).collect();
        format!(
            "{}, {} parameters in {}, {} on {} ({}), {} microbatches of {}",
            model_text(&self.config.model),
            count_text(parameters),
            self.config.train.precision.dtype(),
            job.schedule.name(),
            crate::output::count(job.ranks().len(), "rank"),
            meshes.join(" → "),
            job.schedule.num_microbatches(),
            crate::output::count(job.samples, "sample"),
        )
    }
}

/// An error about a value, with the line of the config that gives it.
fn placed(config: &Config, error: anyhow::Error) -> anyhow::Error {
    let of_model = |error: &ModelError| {
        let ModelError::Value { key, value, reason, hint } = error;
        (*key, value.clone(), reason.clone(), hint.clone())
    };
    if let Some(JobError::Step(StepError::Cycle { first })) = error.downcast_ref::<JobError>()
        && !config.train.overlap
    {
        let reason = format!(
            "where a device stands still until its message has arrived, the passes of {} wait for each other in a cycle, from {first} on",
            config.pipeline.schedule.name()
        );
        return config.error("train.overlap", reason, "leave it on, or take a schedule such as 1f1b").into();
    }
    let found = match (error.downcast_ref::<DataError>(), error.downcast_ref::<JobError>()) {
        (Some(DataError::Value { key, value, reason, hint }), _) => {
            Some((*key, value.clone(), reason.clone(), hint.to_string()))
        }
        (_, Some(JobError::Model(error))) => Some(of_model(error)),
        _ => None,
    };
    let Some((key, value, reason, hint)) = found else { return error };
    let known = ["data", "model", "stage"].map(|section| format!("{section}.{key}"));
    match known.iter().find(|path| KEYS.iter().any(|key| key.path() == **path)) {
        Some(path) => config.error(path, format!("{value}: {reason}"), hint).into(),
        None => error,
    }
}

fn wire<K: Kernels>(resolved: &Resolved, data: &dyn DataSet) -> Result<Wiring> {
    let model = resolved.model.with_kernels::<K>();
    data::check_model(data, &*model)?;
    Ok(Wiring::new(&*model, &resolved.job)?)
}

/// What follows from other keys, from the data, or from the config's name.
fn found(config: &Config, resolved: &Resolved) -> Vec<(&'static str, String)> {
    let mut found = vec![
        ("data.kind", toml_text(config.data.kind.name())),
        ("optimizer.floor", format!("{:e}", config.optimizer.update.rate.floor)),
        ("checkpoint.folder", toml_text(&config.saving.folder)),
        ("log.folder", toml_text(&config.log.folder)),
    ];
    if let AnyModel::Gpt(gpt) = &resolved.model {
        let sizes = gpt.config();
        found.extend([("model.vocab", sizes.vocab.to_string()), ("model.hidden", sizes.hidden.to_string())]);
    }
    found
}

/// How many different tokens the data has.
fn classes(data: &dyn DataSet) -> Option<usize> {
    let of = |kind: &Kind| match kind {
        Kind::Ids { classes } => Some(*classes),
        Kind::Real => None,
    };
    data.features().iter().filter(|f| f.port == "tokens").find_map(|f| of(&f.kind))
}

fn open_data(config: &Config) -> Result<Arc<dyn DataSet>> {
    let seed = config.data.seed;
    let context = match &config.model {
        ModelKind::Gpt { config, .. } => config.context,
        ModelKind::Unet(_) => 1,
    };
    Ok(match &config.data.kind {
        DataKind::Language { vocab, groups, branching } => {
            let spec = LanguageSpec { vocab: *vocab, groups: *groups, branching: *branching, seed };
            Arc::new(Language::new(spec, context)?)
        }
        DataKind::Images { waves, classes } => {
            let ModelKind::Unet(unet) = &config.model else {
                return Err(config
                    .error("data.kind", "a decoder has no use for images", "take language, text or tokens")
                    .into());
            };
            let spec =
                ImagesSpec::new(unet.image, unet.image_channels, unet.context_rows, unet.context_width);
            Arc::new(Images::new(ImagesSpec { waves: *waves, classes: *classes, seed, ..spec })?)
        }
        DataKind::Text { paths, tokenizer, end, validation } => {
            let end = end.as_deref().map_or(DocumentEnd::Usual, |end| match end.parse() {
                Ok(end) => end,
            });
            let encoder = match tokenizer {
                None => Encoder::bytes(&end)?,
                Some(file) => Encoder::tokenizer(file.as_ref(), &end)?,
            };
            let paths: Vec<PathBuf> = paths.iter().map(PathBuf::from).collect();
            let text = Text::read(&paths, &encoder, config.train.threads)?;
            let spec = WindowSpec { context, validation_share: *validation, seed };
            Arc::new(Tokens::new(Source::Text(text), spec)?)
        }
        DataKind::Tokens { paths, weights, validation } => {
            let spec = WindowSpec { context, validation_share: *validation, seed };
            let open = |path: &String| Ok(Tokens::new(Source::open(path.as_ref())?, spec)?);
            let mut parts = paths.iter().map(open).collect::<Result<Vec<_>>>()?;
            match parts.len() {
                1 => Arc::new(parts.remove(0)),
                _ => Arc::new(Mixture::new(parts.into_iter().zip(weights.iter().copied()).collect(), seed)?),
            }
        }
    })
}

pub fn model_text(model: &ModelKind) -> String {
    match model {
        ModelKind::Gpt { config: c, .. } => {
            let family = if c.family == Family::Gpt2 { "GPT" } else { "Llama" };
            let ladder = if c.residual == Residual::Ladder { ", on a ladder" } else { "" };
            format!("{family} of {} layers, width {}, context {}{ladder}", c.layers, c.width, c.context)
        }
        ModelKind::Unet(c) => {
            format!(
                "U-Transformer of {} levels from {} channels, images of {}²",
                c.multipliers.len(),
                c.base,
                c.image
            )
        }
    }
}

/// `dp 2 × tp 2`.
pub fn mesh_text(mesh: &crossmesh_core::mesh::Mesh) -> String {
    // As it was written: a model may have cut `tp` into parts.
    let mut lens: Vec<(&str, u32)> = vec![];
    for axis in mesh.axes() {
        let name = if [KV, G].contains(&axis.name.as_str()) { "tp" } else { &axis.name };
        match lens.last_mut() {
            Some((last, len)) if *last == name => *len *= axis.len,
            _ => lens.push((name, axis.len)),
        }
    }
    let long = lens.into_iter().filter(|(_, len)| *len > 1);
    let axes: Vec<String> = long.map(|(name, len)| format!("{name} {len}")).collect();
    if axes.is_empty() { "1".into() } else { axes.join(" × ") }
}

/// `1.23 M`.
pub fn count_text(count: u64) -> String {
    match count as f64 {
        n if n >= 1e9 => format!("{:.2} G", n / 1e9),
        n if n >= 1e6 => format!("{:.2} M", n / 1e6),
        n if n >= 1e3 => format!("{:.1} k", n / 1e3),
        n => format!("{n}"),
    }
}
