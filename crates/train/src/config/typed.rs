//! The sections of a config as the rest of the program wants them.

use std::path::PathBuf;

use crossmesh_core::dtype::DType;
use crossmesh_core::mesh::Mesh;
use crossmesh_core::reshard::PlanOptions;
use crossmesh_core::schedule::{Backward, Name};
use crossmesh_core::units::{parse_bytes, parse_rate, parse_seconds};

use crate::job::{Dealt, Over, Update};
use crate::kernels::cpu::MOST_THREADS;
use crate::models::gpt::rotary::{Llama3Scaling, RotaryConfig};
use crate::models::gpt::{Family, GptConfig, Residual};
use crate::models::unet::UnetConfig;
use crate::optim::OptimizerConfig;
use crate::optim::schedule::Schedule as Rate;
use crate::stage::Recompute;
use crate::stage_rank::DATA_AXES;

use super::cut::Balance;
use super::error::ConfigError;
use super::keys::keys_of;
use super::value::{Value, parse_mesh};
use super::{Origin, Values};

/// Which model, with its sizes.
#[derive(Debug, Clone, PartialEq)]
pub enum ModelKind {
    /// Without a vocabulary: it has what the data has.
    Gpt {
        config: GptConfig,
        vocab: Option<usize>,
    },
    Unet(UnetConfig),
}

impl ModelKind {
    pub(super) fn of(values: &Values) -> Result<Self, ConfigError> {
        let count = |name: &str| values.count(&format!("model.{name}"));
        let (heads, epsilon) = (count("heads"), values.number("model.epsilon"));
        let kind = values.text("model.kind");
        if kind != "u-transformer" {
            let vocab = values.maybe_count("model.vocab");
            let (context, width) = (count("context"), count("width"));
            let (family, usual) = match kind.as_str() {
                "llama" => {
                    (llama(values, heads)?, (width.saturating_mul(8) / 3).saturating_add(31) / 32 * 32)
                }
                _ => (Family::Gpt2, width.saturating_mul(4)),
            };
            let hidden = values.maybe_count("model.hidden").unwrap_or(usual);
            let tied = values.maybe_flag("model.tied").unwrap_or(family == Family::Gpt2);
            let dropout = values.number("model.dropout");
            let sizes = GptConfig::new(vocab.unwrap_or(1), context, width, count("layers"), heads);
            let residual = Residual::named(&values.text("model.residual")).unwrap_or_default();
            let config = GptConfig { hidden, tied, dropout, epsilon, family, residual, ..sizes };
            return Ok(ModelKind::Gpt { config, vocab });
        }
        let Some(Value::Counts(multipliers)) = values.entry("model.multipliers").map(|e| e.value) else {
            unreachable!("multipliers have a default")
        };
        let levels = multipliers.len();
        let attention = match values.entry("model.attention").map(|e| e.value) {
            Some(Value::Flags(flags)) => flags,
            _ => (0..levels).map(|level| level + 1 < levels).collect(),
        };
        let (image, base) = (count("image"), count("base"));
        Ok(ModelKind::Unet(UnetConfig {
            image_channels: count("image_channels"),
            multipliers: multipliers.iter().map(|&m| m as usize).collect(),
            blocks: count("blocks"),
            attention,
            heads,
            groups: count("groups"),
            context_rows: count("context_rows"),
            context_width: values.maybe_count("model.context_width").unwrap_or(base),
            epsilon,
            ..UnetConfig::new(image, base)
        }))
    }
}

fn llama(values: &Values, heads: usize) -> Result<Family, ConfigError> {
    let kv_heads = values.maybe_count("model.kv_heads").unwrap_or(heads);
    let scaling = match values.entry("model.rope_scaling").map(|e| e.value) {
        Some(Value::Counts(numbers)) => {
            let [factor, low, high, old_context] = numbers[..] else {
                let reason = format!("{} numbers are given", numbers.len());
                let hint = "there are four: factor, low and high number of turns, old context, as in [8, 1, 4, 8192]";
                return Err(values.error("model.rope_scaling", reason, hint));
            };
            let [factor, low, high, old_context] = [factor, low, high, old_context].map(|n| n as f64);
            Some(Llama3Scaling { factor, low, high, old_context })
        }
        _ => None,
    };
    let theta = values.number("model.rope_theta");
    Ok(Family::Llama { kv_heads, rotary: RotaryConfig { theta, scaling } })
}

/// What is trained on; whoever opens it knows files.
#[derive(Debug, Clone, PartialEq)]
pub struct DataSection {
    pub kind: DataKind,
    pub seed: u64,
}

#[derive(Debug, Clone, PartialEq)]
pub enum DataKind {
    Language { vocab: usize, groups: usize, branching: usize },
    Text { paths: Vec<String>, tokenizer: Option<String>, end: Option<String>, validation: f64 },
    Tokens { paths: Vec<String>, weights: Vec<u64>, validation: f64 },
    Images { waves: usize, classes: usize },
}

impl DataKind {
    /// As a config has it.
    pub fn name(&self) -> &'static str {
        match self {
            DataKind::Language { .. } => "language",
            DataKind::Text { .. } => "text",
            DataKind::Tokens { .. } => "tokens",
            DataKind::Images { .. } => "images",
        }
    }
}

impl DataSection {
    pub(super) fn of(values: &Values) -> Result<Self, ConfigError> {
        let count = |name: &str| values.count(&format!("data.{name}"));
        let kind = values.kind_of("data").unwrap_or_default();
        let paths = || match values.entry("data.path").map(|e| e.value) {
            Some(Value::Texts(paths)) => Ok(paths),
            _ => {
                let reason = format!("data of kind \"{kind}\" comes from files, and none is named");
                Err(values.error("data.path", reason, "path = \"my.txt\""))
            }
        };
        let kind = match kind.as_str() {
            "language" => DataKind::Language {
                vocab: count("vocab"),
                groups: count("groups"),
                branching: count("branching"),
            },
            "text" => DataKind::Text {
                paths: paths()?,
                tokenizer: Some(values.text("data.tokenizer")).filter(|name| name != "bytes"),
                end: values.maybe_text("data.end"),
                validation: values.number("data.validation_share"),
            },
            "tokens" => DataKind::Tokens {
                weights: weights(values, paths()?.len())?,
                paths: paths()?,
                validation: values.number("data.validation_share"),
            },
            _ => DataKind::Images { waves: count("waves"), classes: count("classes") },
        };
        Ok(Self { kind, seed: count("seed") as u64 })
    }
}

/// How often each of several files is drawn from.
fn weights(values: &Values, files: usize) -> Result<Vec<u64>, ConfigError> {
    let given = match values.entry("data.weights").map(|e| e.value) {
        Some(Value::Counts(weights)) => weights,
        _ if files == 1 => vec![1],
        _ => {
            let reason =
                format!("these are {files} token files, and nobody says how often each is drawn from");
            return Err(values.error("data.path", reason, "weights = [7, 3], or pack them into one"));
        }
    };
    match given.len() == files {
        true => Ok(given),
        false => {
            let reason = format!("these are {} weights, and there are {files} files", given.len());
            Err(values.error("data.weights", reason, "give one for every file"))
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    F32,
    F64,
    /// Activations and weights in bf16; masters, gradients of weights, moments and statistics in f32.
    Bf16,
}

impl Precision {
    /// Of activations and weights.
    pub fn dtype(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::F64 => DType::F64,
            Precision::Bf16 => DType::Bf16,
        }
    }
}

/// Runs an expression with the host's kernels of a precision, which a type of this name stands for.
#[macro_export]
macro_rules! by_precision {
    ($precision:expr, $kernels:ident => $body:expr) => {
        match $precision {
            $crate::config::Precision::F32 => {
                type $kernels = $crate::kernels::cpu::Cpu<f32>;
                $body
            }
            $crate::config::Precision::F64 => {
                type $kernels = $crate::kernels::cpu::Cpu<f64>;
                $body
            }
            $crate::config::Precision::Bf16 => {
                type $kernels = $crate::kernels::cpu::CpuBf16;
                $body
            }
        }
    };
}

/// What ranks compute with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    Cpu,
    Cuda,
    /// A GPU, where there is one for every rank and it can do what is asked for.
    Auto,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Train {
    pub steps: u64,
    pub microbatches: u32,
    /// Of a microbatch.
    pub samples: usize,
    pub precision: Precision,
    pub device: Device,
    /// Whether a GPU takes the same algorithms in every run.
    pub deterministic: bool,
    pub seed: u64,
    pub threads: usize,
    pub recompute: Recompute,
    /// Bytes of activations of a rank at most, in place of it.
    pub activation_budget: Option<u64>,
    /// Where activations wait for their backward pass, if not in memory.
    pub offload: Option<PathBuf>,
    /// Two halves of a microbatch that take turns, or one.
    pub strands: u32,
    pub overlap: bool,
    pub nonfinite: NonFinite,
}

/// What to do about a step whose loss or norm is not finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NonFinite {
    Stop,
    Skip,
}

impl Train {
    pub(super) fn of(values: &Values) -> Result<Self, ConfigError> {
        let count = |name: &str| values.count(&format!("train.{name}"));
        let (batch, microbatches) = (count("batch"), count("microbatches"));
        if !batch.is_multiple_of(microbatches) {
            let reason = format!("{batch} samples do not divide among {microbatches} microbatches");
            let (below, above) = (batch / microbatches * microbatches, batch.next_multiple_of(microbatches));
            let hint = if below == 0 { format!("use {above}") } else { format!("use {below} or {above}") };
            return Err(values.error("train.batch", reason, hint));
        }
        let Ok(few) = u32::try_from(microbatches) else {
            return Err(values.error("train.microbatches", "this is more than 2^32", "use fewer"));
        };
        let activation_budget = match values.maybe_text("train.activation_budget") {
            None => None,
            Some(_) => Some(checked(values, "train.activation_budget", parse_bytes)?),
        };
        if activation_budget.is_some() && values.text("train.recompute") != "none" {
            let hint = "leave one of them out";
            let reason =
                "what is computed again follows from the budget, and `train.recompute` says otherwise";
            return Err(values.error("train.activation_budget", reason, hint));
        }
        let device = match values.text("train.device").as_str() {
            "cuda" => Device::Cuda,
            "auto" => Device::Auto,
            _ => Device::Cpu,
        };
        if device == Device::Cuda {
            check_gpu(values)?;
        }
        if count("threads") > MOST_THREADS {
            let reason = format!("{} threads are more than any machine has cores", count("threads"));
            return Err(values.error("train.threads", reason, format!("use {MOST_THREADS} at most")));
        }
        let offload = values.maybe_text("train.offload").map(PathBuf::from);
        if offload.is_some() && values.text("train.recompute") == "full" {
            let reason = "with `train.recompute = \"full\"` only a stage's inputs are kept, which is little";
            return Err(values.error("train.offload", reason, "leave one of them out"));
        }
        Ok(Self {
            offload,
            strands: u32::try_from(count("strands")).unwrap_or(u32::MAX),
            steps: count("steps") as u64,
            microbatches: few,
            activation_budget,
            samples: batch / microbatches,
            precision: match values.text("train.dtype").as_str() {
                "f64" => Precision::F64,
                "bf16" => Precision::Bf16,
                _ => Precision::F32,
            },
            device,
            deterministic: values.flag("train.deterministic"),
            seed: count("seed") as u64,
            threads: count("threads"),
            recompute: match values.text("train.recompute").as_str() {
                "attention" => Recompute::Attention,
                "full" => Recompute::Everything,
                _ => Recompute::Nothing,
            },
            overlap: values.flag("train.overlap"),
            nonfinite: match values.text("train.nonfinite").as_str() {
                "skip" => NonFinite::Skip,
                _ => NonFinite::Stop,
            },
        })
    }
}

/// Refuses what a GPU cannot do.
pub(super) fn check_gpu(values: &Values) -> Result<(), ConfigError> {
    if values.text("train.dtype") == "f64" {
        let hint = "use f32 or bf16, or train.device = \"cpu\"";
        return Err(values.error("train.dtype", "GPUs compute in f32 and bf16 here, not in f64", hint));
    }
    if values.text("model.kind") == "u-transformer" {
        let reason = "GPUs have no kernels for images yet: convolutions and group norms are the host's";
        return Err(values.error("train.device", reason, "use train.device = \"cpu\" for a u-transformer"));
    }
    Ok(())
}

#[derive(Debug, Clone, PartialEq)]
pub struct OptimizerSection {
    pub update: Update,
}

impl OptimizerSection {
    pub(super) fn of(values: &Values) -> Result<Self, ConfigError> {
        let number = |name: &str| values.number(&format!("optimizer.{name}"));
        let weight_decay = number("weight_decay");
        let optimizer = match values.text("optimizer.kind").as_str() {
            "sgd" => OptimizerConfig::Sgd { momentum: number("momentum"), weight_decay },
            _ => OptimizerConfig::AdamW {
                beta1: number("beta1"),
                beta2: number("beta2"),
                epsilon: number("epsilon"),
                weight_decay,
            },
        };
        let (peak, steps) = (number("learning_rate"), values.count("train.steps") as u64);
        let warmup_steps = values.count("optimizer.warmup") as u64;
        let shape = values.text("optimizer.schedule");
        let constant = shape == "constant";
        let decay = values.maybe_count("optimizer.decay").map(|n| n as u64);
        if decay.is_some() && shape != "wsd" {
            let hint = "leave it out, or take the schedule \"wsd\"";
            return Err(values.error(
                "optimizer.decay",
                format!("the schedule \"{shape}\" has no decay of its own"),
                hint,
            ));
        }
        let decay_steps = (shape == "wsd").then(|| decay.unwrap_or((steps / 5).max(1)));
        if let Some(decay) = decay_steps.filter(|decay| warmup_steps + decay > steps) {
            let reason =
                format!("{warmup_steps} steps of warm-up and {decay} of decay are more than {steps}");
            return Err(values.error("optimizer.decay", reason, "use fewer, or train for more steps"));
        }
        let floor = values.maybe_number("optimizer.floor");
        if warmup_steps > steps {
            let reason = format!("the rate would still rise after {steps} steps");
            return Err(values.error("optimizer.warmup", reason, format!("use {steps} at most")));
        }
        if constant && floor.is_some_and(|floor| floor != peak) {
            let hint = "leave `floor` out, or take the schedule \"cosine\"";
            return Err(values.error("optimizer.floor", "a constant rate does not fall", hint));
        }
        let floor = floor.unwrap_or(if constant { peak } else { peak / 10.0 });
        // After warm-up a constant rate is at its floor, which is its peak.
        let total_steps = if constant { warmup_steps } else { steps };
        let clip = number("clip");
        Ok(Self {
            update: Update {
                optimizer,
                rate: Rate { peak, warmup_steps, total_steps, floor, decay_steps },
                clip: (clip > 0.0).then_some(clip),
                dealt: dealt(values)?,
                fixed_order: values.flag("optimizer.fixed_order"),
                bucket_bytes: checked(values, "optimizer.bucket", parse_bytes)?,
            },
        })
    }
}

/// What ranks along the data axes keep parts of: by ZeRO's stage, and each by itself where that is said.
fn dealt(values: &Values) -> Result<Dealt, ConfigError> {
    let mut dealt = Dealt::zero(values.count("optimizer.zero"));
    let each = [
        ("optimizer.parameters_over", &mut dealt.parameters),
        ("optimizer.gradients_over", &mut dealt.gradients),
        ("optimizer.states_over", &mut dealt.states),
    ];
    for (path, over) in each {
        let Some(text) = values.maybe_text(path) else { continue };
        let axes: Vec<String> = text.split(['+', ',']).map(|axis| axis.trim().to_string()).collect();
        *over = match text.trim() {
            "none" => Over::Nothing,
            "all" => Over::All,
            _ => match axes.iter().find(|axis| !DATA_AXES.contains(&axis.as_str())) {
                None => Over::Axes(axes),
                Some(axis) => {
                    let reason = format!("`{axis}` is no data axis");
                    let hint = "write \"all\", \"none\", or some of the mesh's `dp`, `dpo` and `dpi`, such as \"dpi\"";
                    return Err(values.error(path, reason, hint));
                }
            },
        };
    }
    Ok(dealt)
}

/// A quantity that was checked when it was read.
fn checked<T, E: std::fmt::Display>(
    values: &Values,
    path: &str,
    parse: impl Fn(&str) -> Result<T, E>,
) -> Result<T, ConfigError> {
    parse(&values.text(path)).map_err(|e| values.error(path, e.to_string(), ""))
}

#[derive(Debug, Clone, PartialEq)]
pub struct Pipeline {
    pub schedule: Name,
    pub chunks: Option<u32>,
    pub backward: Option<Backward>,
    pub balance: Balance,
    /// How activations and gradients cross between stages.
    pub plan: PlanOptions,
}

impl Pipeline {
    pub(super) fn of(values: &Values) -> Self {
        Self {
            schedule: values.text("pipeline.schedule").parse().expect("checked when it was read"),
            chunks: values.maybe_count("pipeline.chunks").map(|n| n.min(u32::MAX as usize) as u32),
            backward: values.maybe_text("pipeline.backward").map(|word| match word.as_str() {
                "fused" => Backward::Fused,
                _ => Backward::Split,
            }),
            balance: match values.text("pipeline.balance").as_str() {
                "parameters" => Balance::Parameters,
                _ => Balance::Work,
            },
            plan: PlanOptions {
                strategy: values.text("pipeline.strategy").parse().expect("checked when it was read"),
                ..PlanOptions::default()
            },
        }
    }
}

/// A device of the pipeline.
#[derive(Debug, Clone, PartialEq)]
pub struct StageSection {
    pub mesh: Mesh,
    /// Given: blocks or pieces, one number or one a chunk.
    pub layers: Option<Vec<usize>>,
    pub sequence_parallel: bool,
    /// Which `[[stage]]` of the file says so.
    pub table: usize,
}

/// More devices than this are taken for a typing mistake.
const MAX_STAGES: usize = 4096;

pub(super) fn stages(values: &Values) -> Result<Vec<StageSection>, ConfigError> {
    let tables = values.document.tables("stage");
    let mut stages: Vec<StageSection> = vec![];
    for table in 0..tables.len().max(1) {
        let given = tables.get(table);
        let entry = |name: &str| {
            let key = keys_of("stage").find(|key| key.name == name).expect("a key of a stage");
            values.entry_in(given, key)
        };
        let text = match entry("mesh").map(|e| e.value) {
            Some(Value::Text(text)) => text,
            _ => "1".into(),
        };
        let layers = match entry("layers").map(|e| e.value) {
            Some(Value::Counts(counts)) => Some(counts.iter().map(|&n| n as usize).collect()),
            _ => None,
        };
        let repeat =
            entry("repeat").map_or(1, |e| if let Value::Count(n) = e.value { n as usize } else { 1 });
        if stages.len() + repeat > MAX_STAGES {
            let origin = entry("repeat").map_or(Origin::Default, |e| e.origin);
            let reason = format!("these are more than {MAX_STAGES} stages");
            return Err(super::error(&origin, &format!("stage.{table}.repeat"), reason, "use fewer"));
        }
        for _ in 0..repeat {
            let mesh = parse_mesh(&format!("S{}", stages.len()), &text).expect("checked when it was read");
            let sequence_parallel = entry("sequence_parallel").map(|e| e.value) == Some(Value::Flag(true));
            stages.push(StageSection { mesh, layers: layers.clone(), sequence_parallel, table });
        }
    }
    Ok(stages)
}

#[derive(Debug, Clone, PartialEq)]
pub struct ClusterSection {
    pub file: Option<String>,
    pub devices_per_host: Option<u32>,
    pub nic_bytes_per_s: f64,
    pub local_bytes_per_s: f64,
    pub latency_s: f64,
    /// Of a thread, in f32.
    pub flops: f64,
}

impl ClusterSection {
    pub(super) fn of(values: &Values) -> Result<Self, ConfigError> {
        let flops = values.number("cluster.flops");
        if flops < 1.0 {
            let reason = format!("{flops} operations a second compute nothing");
            return Err(values.error("cluster.flops", reason, "3e10 is a core of a laptop"));
        }
        let devices_per_host = values.maybe_count("cluster.devices_per_host").map(u32::try_from).transpose();
        let devices_per_host = devices_per_host.map_err(|_| {
            let reason = format!("no host has more than {} devices", u32::MAX);
            values.error("cluster.devices_per_host", reason, "use fewer, or leave it out")
        })?;
        Ok(Self {
            file: values.maybe_text("cluster.file"),
            devices_per_host,
            nic_bytes_per_s: checked(values, "cluster.nic", parse_rate)?,
            local_bytes_per_s: checked(values, "cluster.local", parse_rate)?,
            latency_s: checked(values, "cluster.latency", parse_seconds)?,
            flops,
        })
    }
}

/// Validation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Evaluate {
    /// Steps; 0: never.
    pub every: u64,
    pub batches: u64,
}

impl Evaluate {
    pub(super) fn of(values: &Values) -> Self {
        let count = |name: &str| values.count(&format!("evaluate.{name}")) as u64;
        Self { every: count("every"), batches: count("batches") }
    }
}

/// Checkpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saving {
    pub folder: String,
    /// Steps; 0: none on the way.
    pub every: u64,
    /// Whether the last step is saved.
    pub last: bool,
    pub keep: usize,
}

impl Saving {
    /// Whether there are checkpoints at all.
    pub fn is_on(&self) -> bool {
        self.every > 0 || self.last
    }

    pub(super) fn of(values: &Values, name: &str) -> Self {
        let folder = values.maybe_text("checkpoint.folder");
        Self {
            folder: folder.unwrap_or_else(|| format!("{}/checkpoints", Log::of(values, name).folder)),
            every: values.count("checkpoint.every") as u64,
            last: values.flag("checkpoint.last"),
            keep: values.count("checkpoint.keep"),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Log {
    pub folder: String,
    pub every: u64,
}

impl Log {
    pub(super) fn of(values: &Values, name: &str) -> Self {
        let folder = values.maybe_text("log.folder").unwrap_or_else(|| format!("runs/{name}"));
        Self { folder, every: values.count("log.every") as u64 }
    }
}
