//! From a config to a job: the model, cut into stages on meshes of ranks, on a cluster, in an order.

use std::ops::Range;
use std::sync::Arc;

use crossmesh_core::cluster::{Cluster, Host};
use crossmesh_core::id::{Rank, StageId};
use crossmesh_core::schedule::memory::peaks;
use crossmesh_core::schedule::{
    Costs, Footprint, GenerateError, Hop, Placement, Schedule, Spec, StageCost, generate, time,
};
use crossmesh_core::step::PassTimes;

use crate::chain::{Limits, Model, Outline, Setup, Shape, Tensor, UnitWork, unit_work};
use crate::deal::Deal;
use crate::job::{Job, JobError, Over, Team};
use crate::kernels::Kernels;
use crate::kernels::cpu::Cpu;
use crate::models;
use crate::models::gpt::{Gpt, GptConfig};
use crate::models::unet::Unet;
use crate::stage::{Recompute, Role};
use crate::stage_rank::{DATA_AXES, StageRank};
use crate::wiring::setup;

use super::cut::{Balance, cut};
use super::error::ConfigError;
use super::typed::{ModelKind, StageSection};
use super::{Config, policy, value};

/// A built-in model, for any kernels.
#[derive(Debug, Clone)]
pub enum AnyModel {
    Gpt(Gpt),
    Unet(Unet),
}

impl AnyModel {
    pub fn with_kernels<K: Kernels>(&self) -> Arc<dyn Model<K> + Send + Sync> {
        match self {
            AnyModel::Gpt(gpt) => Arc::new(gpt.clone()),
            AnyModel::Unet(unet) => Arc::new(unet.clone()),
        }
    }

    fn activations_given<K: Kernels>(&self, unit: usize) -> Vec<Tensor> {
        let gives = self.with_kernels::<K>().interface(unit).gives;
        gives.into_iter().filter(|t| t.role == Role::Activation).collect()
    }
}

/// A config that fits together.
#[derive(Debug, Clone)]
pub struct Resolved {
    pub model: AnyModel,
    pub job: Job,
    /// By unit of the model.
    pub work: Vec<UnitWork>,
}

impl Resolved {
    /// Operations that the model needs for a sample, forward and backward, whatever is computed again: two for every multiplication with a
    /// weight, three times over, and those of attention, of which a causal one has half.
    pub fn operations(&self) -> f64 {
        self.work.iter().flat_map(|unit| unit.forward.passes(0.0)).sum()
    }

    /// Weights of the whole model; tied ones once.
    pub fn parameters(&self) -> u64 {
        let tied = match &self.model {
            AnyModel::Gpt(gpt) if gpt.config().tied => (gpt.config().vocab * gpt.config().width) as u64,
            _ => 0,
        };
        self.work.iter().map(|unit| unit.parameters).sum::<u64>() - tied
    }
}

/// Weight updates move about this many numbers for every parameter, and compute hardly anything.
const UPDATE_OPERATIONS: f64 = 40.0;

/// Makes a job of a config. `classes` is how many tokens the data has, where it has tokens; `described` the cluster of the file that
/// the config names.
pub fn resolve(
    config: &Config,
    classes: Option<usize>,
    described: Option<Cluster>,
) -> Result<Resolved, ConfigError> {
    let model = model(config, classes)?;
    check_batch(config, &model)?;
    let work = unit_work(&*model.with_kernels::<Cpu<f32>>(), config.train.recompute);
    let teams = teams(config)?;
    let schedule = first_schedule(config)?;
    let stages = stages(config, &model, &work, schedule.placement())?;
    let cluster = cluster(config, &teams, described)?;
    let teams = shared_out(config, &model, teams)?;
    let recompute = vec![config.train.recompute; stages.len()];
    let times = vec![PassTimes::default(); stages.len()];
    let policies = policy::policies(config, &model)?;
    let mut job = Job {
        schedule,
        stages,
        teams,
        cluster,
        samples: config.train.samples,
        recompute,
        policies,
        offload: config.train.offload.clone(),
        strands: config.train.strands,
        seed: config.train.seed,
        update: config.optimizer.update.clone(),
        plan: config.pipeline.plan.clone(),
        overlap: config.train.overlap,
        signal: false,
        times,
    };
    check_strands(config, &job)?;
    crate::by_precision!(config.train.precision, K => {
        let units = model.with_kernels::<K>();
        job.times = times_of(config, &*units, &job)?;
        job.schedule = schedule_for(config, &job.times, hop_seconds(config, &model, &job.stages, &job.cluster))?;
        if let Some(budget) = config.train.activation_budget {
            share_budget(config, &*units, &mut job, budget)?;
            job.times = times_of(config, &*units, &job)?;
        }
    });
    Ok(Resolved { model, job, work })
}

fn model(config: &Config, classes: Option<usize>) -> Result<AnyModel, ConfigError> {
    let refused = |models::ConfigError::Value { key, value, reason, hint }: models::ConfigError| {
        config.error(&format!("model.{key}"), format!("{value}: {reason}"), hint)
    };
    match &config.model {
        ModelKind::Unet(sizes) => Ok(AnyModel::Unet(Unet::new(sizes.clone()).map_err(refused)?)),
        ModelKind::Gpt { config: sizes, vocab } => {
            let Some(vocab) = vocab.or(classes) else {
                let reason = "this data has no tokens, so there is nothing to take a vocabulary from";
                return Err(config.error("data.kind", reason, "a GPT learns from language, text or tokens"));
            };
            if let Some(classes) = classes.filter(|classes| *classes > vocab) {
                let reason =
                    format!("the data has {classes} tokens, and a model of {vocab} does not know them all");
                return Err(config.error("model.vocab", reason, "leave it out to take what the data has"));
            }
            Ok(AnyModel::Gpt(Gpt::new(GptConfig { vocab, ..sizes.clone() }).map_err(refused)?))
        }
    }
}

/// Refuses batches of more numbers than any machine holds, whose count would not fit.
fn check_batch(config: &Config, model: &AnyModel) -> Result<(), ConfigError> {
    let each = match model {
        AnyModel::Gpt(gpt) => {
            let c = gpt.config();
            c.context as f64 * c.width.max(c.hidden).max(c.vocab).max(c.context * c.heads) as f64
        }
        AnyModel::Unet(unet) => {
            let c = unet.config();
            let widest = c.multipliers.iter().max().copied().unwrap_or(1) * c.base;
            (c.image * c.image) as f64 * widest as f64
        }
    };
    let (samples, micro) = (config.train.samples as f64, f64::from(config.train.microbatches));
    match samples * micro * each <= (1u64 << 53) as f64 {
        true => Ok(()),
        false => {
            let reason = format!("{} samples of {each} numbers fit no machine", samples * micro);
            Err(config.error("train.batch", reason, "use fewer samples, or a smaller model"))
        }
    }
}

/// Refuses strands that could not take turns.
fn check_strands(config: &Config, job: &Job) -> Result<(), ConfigError> {
    let refused = |reason: String, hint: &str| Err(config.error("train.strands", reason, hint));
    match job.strands {
        1 => return Ok(()),
        2 => {}
        other => {
            return refused(
                format!("a microbatch runs in one strand or in two, not in {other}"),
                "use 1 or 2",
            );
        }
    }
    if job.update.dealt.parameters != Over::Nothing {
        let reason = "strands need all weights of a stage at once, and parameters are dealt out";
        return refused(reason.into(), "use optimizer.zero = 2 at most, or train.strands = 1");
    }
    for (i, team) in job.teams.iter().enumerate() {
        let dp: usize = team
            .mesh
            .axes()
            .iter()
            .filter(|a| DATA_AXES.contains(&a.name.as_str()))
            .map(|a| a.len as usize)
            .product();
        if !job.samples.is_multiple_of(2 * dp) {
            let reason = format!(
                "the {} samples of a microbatch do not halve on each of the {dp} data ranks of stage {i}",
                job.samples
            );
            return refused(reason, "use a multiple of twice as many");
        }
        if team.sequence_parallel && job.stages.len() > 1 {
            let reason =
                format!("what crosses between stages is split by rows in stage {i}, and not by samples");
            return refused(reason, "leave stage.sequence_parallel out, or use one stage");
        }
    }
    Ok(())
}

/// Ranks, numbered stage by stage.
fn teams(config: &Config) -> Result<Vec<Team>, ConfigError> {
    check_dealt(config)?;
    let mut next = 0u32;
    let mut teams = vec![];
    for (i, stage) in config.stages.iter().enumerate() {
        let data = stage.mesh.axes().iter().filter(|a| DATA_AXES.contains(&a.name.as_str()));
        let dp: usize = data.map(|a| a.len as usize).product();
        if config.train.samples < dp {
            let samples = config.train.samples;
            let reason = format!(
                "stage {i} splits the {samples} samples of a microbatch over {dp} ranks, and some would have none"
            );
            let hint =
                format!("train.batch = {} gives every rank one", dp * config.train.microbatches as usize);
            return Err(config.stage_error(stage.table, "mesh", reason, &hint));
        }
        let ranks = (next..).map(Rank).take(stage.mesh.len()).collect();
        next += stage.mesh.len() as u32;
        teams.push(Team { mesh: stage.mesh.clone(), ranks, sequence_parallel: stage.sequence_parallel });
    }
    Ok(teams)
}

/// Refuses to deal parameters or gradients out over an axis that states are not dealt out over, or anything over one that no stage has.
fn check_dealt(config: &Config) -> Result<(), ConfigError> {
    let dealt = &config.optimizer.update.dealt;
    let key = |name: &str| format!("optimizer.{name}_over");
    let all = [("parameters", &dealt.parameters), ("gradients", &dealt.gradients), ("states", &dealt.states)];
    for (name, over) in all {
        let Over::Axes(names) = over else { continue };
        let is_there = |axis: &&String| config.stages.iter().any(|s| s.mesh.axis_index(axis).is_some());
        if let Some(axis) = names.iter().find(|axis| !is_there(axis)) {
            let reason = format!("no stage's mesh has the axis `{axis}`");
            return Err(config.error(&key(name), reason, "give one that axis: mesh = \"dpo 2, dpi 2\", say"));
        }
    }
    for (stage, section) in config.stages.iter().enumerate() {
        let Ok(place) = StageRank::new(section.mesh.clone(), 0) else { continue };
        let states = dealt.states.axes(&place);
        for (name, over) in &all[..2] {
            if let Some(&lacking) = over.axes(&place).iter().find(|axis| !states.contains(axis)) {
                let axis = &section.mesh.axes()[lacking].name;
                let reason =
                    format!("{name} would be dealt out over `{axis}` of stage {stage}, and states are not");
                let hint =
                    "a rank updates what it keeps states of: states_over = \"all\" deals these out too";
                return Err(config.error(&key(name), reason, hint));
            }
        }
    }
    Ok(())
}

/// With the meshes that the model's layers share their weights out over.
fn shared_out(config: &Config, model: &AnyModel, teams: Vec<Team>) -> Result<Vec<Team>, ConfigError> {
    let model = model.with_kernels::<Cpu<f32>>();
    let shared_out = |(team, stage): (Team, &StageSection)| {
        let mesh = model.mesh(&team.mesh);
        let refused = |reason: String, hint: &str| config.stage_error(stage.table, "mesh", reason, hint);
        let place = StageRank::new(mesh.clone(), 0).map_err(|error| refused(error.to_string(), ""))?;
        let setup = Setup { place, ..Setup::alone(1, 0) };
        model.check(&setup).map_err(|models::ConfigError::Value { key, value, reason, hint }| {
            refused(format!("model.{key} = {value}: {reason}"), &hint)
        })?;
        Ok(Team { mesh, ..team })
    };
    teams.into_iter().zip(&config.stages).map(shared_out).collect()
}

fn spec(config: &Config) -> Spec {
    Spec {
        // A search would try several numbers of chunks by itself, and the model may not have as many units.
        chunks: config.pipeline.schedule.chunks(config.pipeline.chunks).ok().or(config.pipeline.chunks),
        backward: config.pipeline.backward,
        ..Spec::even(config.stages.len() as u32, config.train.microbatches)
    }
}

/// One for equal stages: it tells which device has which stages.
fn first_schedule(config: &Config) -> Result<Schedule, ConfigError> {
    let refused = |error: GenerateError| {
        let key = match error {
            GenerateError::NotAMultiple { .. } | GenerateError::TooFew { .. } => "train.microbatches",
            GenerateError::Chunks { .. } => "pipeline.chunks",
            GenerateError::Backward { .. } => "pipeline.backward",
            _ => "pipeline.schedule",
        };
        let value::BadValue { reason, hint } = value::split_hint(&error.to_string());
        config.error(key, reason, hint)
    };
    generate(config.pipeline.schedule, &spec(config)).map_err(refused)
}

/// The schedule for the stages as they are.
fn schedule_for(config: &Config, times: &[PassTimes], hop: f64) -> Result<Schedule, ConfigError> {
    let seconds = |ns: u64| ns as f64 * 1e-9;
    let cost = |t: &PassTimes| StageCost::new(seconds(t.f_ns), seconds(t.b_ns), seconds(t.w_ns));
    let spec = Spec { work: times.iter().map(cost).collect(), hop: Hop::both(hop), ..spec(config) };
    generate(config.pipeline.schedule, &spec).map_err(|error| {
        let value::BadValue { reason, hint } = value::split_hint(&error.to_string());
        config.error("pipeline.schedule", reason, hint)
    })
}

/// The units of every stage.
fn stages(
    config: &Config,
    model: &AnyModel,
    work: &[UnitWork],
    placement: &Placement,
) -> Result<Vec<Range<usize>>, ConfigError> {
    let given = config.stages.iter().filter(|stage| stage.layers.is_some()).count();
    if given == 0 {
        return balanced(config, work, placement);
    }
    if let Some(without) = config.stages.iter().find(|stage| stage.layers.is_none()) {
        let reason = format!("{given} of {} stages say how many layers they have", config.stages.len());
        let hint = "say it for all of them, or for none";
        return Err(config.stage_error(without.table, "layers", reason, hint));
    }
    let layers = layers_by_stage(config, placement)?;
    let (all, what) = match model {
        AnyModel::Gpt(gpt) => (gpt.config().layers, "blocks"),
        AnyModel::Unet(unet) => (unet.len(), "pieces"),
    };
    let sum: usize = layers.iter().sum();
    if sum != all {
        let last = config.stages.last().expect("there is a stage").table;
        let reason = format!("the stages have {sum} {what} together, and the model has {all}");
        return Err(config.stage_error(last, "layers", reason, "every one has to be on one stage"));
    }
    let gpt = matches!(model, AnyModel::Gpt(_));
    let ends = |stage: usize| usize::from(gpt && stage == 0) + usize::from(gpt && stage + 1 == layers.len());
    let mut next = 0;
    let mut cuts = vec![];
    for (stage, layers) in layers.iter().enumerate() {
        let start = next;
        next += layers + ends(stage);
        if start == next {
            let reason = format!("stage {stage} of the model would have nothing to compute");
            let table = config.stages[placement.device(crossmesh_core::id::StageId::at(stage)).index()].table;
            return Err(config.stage_error(
                table,
                "layers",
                reason,
                "give it a layer, or leave the stage out",
            ));
        }
        cuts.push(start..next);
    }
    Ok(cuts)
}

/// What every stage was given; a single number is split evenly over a device's chunks.
fn layers_by_stage(config: &Config, placement: &Placement) -> Result<Vec<usize>, ConfigError> {
    let mut layers = vec![0; placement.num_stages()];
    for (device, section) in placement.devices().zip(&config.stages) {
        let own = placement.stages_on(device);
        let counts = section.layers.as_deref().unwrap_or(&[]);
        match counts {
            [all] => {
                for (i, stage) in own.iter().enumerate() {
                    layers[stage.index()] = all / own.len() + usize::from(i < all % own.len());
                }
            }
            counts if counts.len() == own.len() => {
                own.iter().zip(counts).for_each(|(stage, count)| layers[stage.index()] = *count);
            }
            counts => {
                let reason =
                    format!("these are {} numbers, and the device has {} chunks", counts.len(), own.len());
                let hint = "one number for the whole device, or one for each chunk, in model order";
                return Err(config.stage_error(section.table, "layers", reason, hint));
            }
        }
    }
    Ok(layers)
}

fn balanced(
    config: &Config,
    work: &[UnitWork],
    placement: &Placement,
) -> Result<Vec<Range<usize>>, ConfigError> {
    let weight = |unit: &UnitWork| match config.pipeline.balance {
        Balance::Work => unit.passes().iter().sum(),
        Balance::Parameters => unit.parameters as f64,
    };
    let weights: Vec<f64> = work.iter().map(weight).collect();
    let share = |stage| config.stages[placement.device(stage).index()].mesh.len() as f64;
    let shares: Vec<f64> = placement.stages().map(share).collect();
    cut(&weights, &shares).ok_or_else(|| {
        let reason = format!("the model has {} units, too few for {} stages", weights.len(), shares.len());
        config.stage_error(
            config.stages.last().map_or(0, |s| s.table),
            "mesh",
            reason,
            "use fewer stages, or more layers",
        )
    })
}

fn cluster(config: &Config, teams: &[Team], described: Option<Cluster>) -> Result<Cluster, ConfigError> {
    let ranks: usize = teams.iter().map(|t| t.ranks.len()).sum();
    if let Some(cluster) = described {
        let devices = cluster.num_devices();
        if devices < ranks {
            let reason = format!("the cluster has {devices} devices, and the stages have {ranks} ranks");
            return Err(config.error(
                "cluster.file",
                reason,
                "describe more hosts, or make the meshes smaller",
            ));
        }
        return Ok(cluster);
    }
    let section = &config.cluster;
    let host = |devices: usize| Host {
        nic_out_bytes_per_s: section.nic_bytes_per_s,
        nic_in_bytes_per_s: section.nic_bytes_per_s,
        local_bytes_per_s: section.local_bytes_per_s,
        ..Host::with_devices(devices as u32)
    };
    let runs: Vec<(usize, usize)> = match section.devices_per_host {
        Some(each) => vec![(ranks, each as usize)],
        None => teams.iter().map(|t| (t.ranks.len(), t.mesh.last_axis_len() as usize)).collect(),
    };
    let mut hosts = vec![];
    for (mut left, each) in runs {
        while left > 0 {
            hosts.push(host(left.min(each)));
            left -= left.min(each);
        }
    }
    Ok(Cluster { latency_s: section.latency_s, ..Cluster::of_hosts(hosts) })
}

/// What every stage comes to on the first rank of its mesh, on which nobody has more.
fn outlines<K: Kernels>(
    config: &Config,
    model: &dyn Model<K>,
    job: &Job,
) -> Result<Vec<Outline>, ConfigError> {
    let stages = job.schedule.placement().stages().zip(&job.stages);
    let outline = |(stage, units): (StageId, &Range<usize>)| -> Result<Outline, JobError> {
        Ok(Outline::new(model, units.clone(), &setup(job, stage, 0)?)?)
    };
    let outlines = stages.map(outline).collect::<Result<Vec<_>, _>>();
    outlines.map_err(|e| config.error("model.kind", e.to_string(), ""))
}

/// How long the passes of every stage are thought to take.
fn times_of<K: Kernels>(
    config: &Config,
    model: &dyn Model<K>,
    job: &Job,
) -> Result<Vec<PassTimes>, ConfigError> {
    let rate = config.operations_per_s();
    let ns = |operations: f64| ((operations / rate * 1e9).round() as u64).max(1);
    let placement = job.schedule.placement();
    let times = |(stage, outline): (StageId, &Outline)| {
        let [f_ns, b_ns, w_ns] = outline.passes().map(ns);
        let place = StageRank::new(job.team_of(stage).mesh.clone(), 0)
            .map_err(|e| config.error("stage", e.to_string(), ""))?;
        let states = job.update.dealt.states.axes(&place);
        let updated = Deal::new(place, &outline.buckets.starts).share(&states).runs.len();
        Ok(PassTimes { f_ns, b_ns, w_ns, optimizer_ns: ns(UPDATE_OPERATIONS * updated as f64) })
    };
    placement.stages().zip(&outlines(config, model, job)?).map(times).collect()
}

/// From the least to the most that a stage could remember; and how many limits between them are looked at before the one that fits is searched for beside the best.
const STEPS: u64 = 1 << 16;
const TRIED: u64 = 1 << 6;

/// Gives every stage a limit of what it remembers of a microbatch, so that its rank stays within the budget at any time: as far from the least to the most that
/// each could remember as fits.
fn share_budget<K: Kernels>(
    config: &Config,
    model: &dyn Model<K>,
    job: &mut Job,
    budget: u64,
) -> Result<(), ConfigError> {
    let refused = |e: JobError| config.error("train.activation_budget", e.to_string(), "");
    let count = job.stages.len();
    let stages = job.schedule.placement().stages().zip(&job.stages);
    let limits = |(stage, units): (StageId, &Range<usize>)| -> Result<Limits, JobError> {
        Ok(Limits::new(model, units.clone(), &setup(job, stage, 0)?)?)
    };
    let limits = stages.map(limits).collect::<Result<Vec<_>, _>>().map_err(refused)?;
    let held = |stage: usize, limit: u64| {
        let of = limits[stage].held::<K>(limit);
        (of.after_forward, of.after_backward_input)
    };
    let ends: Vec<[u64; 2]> =
        (0..count).map(|stage| [0, u64::MAX].map(|limit| held(stage, limit).0)).collect();
    // So many steps from the least to the most.
    let limit = |stage: usize, step: u64| {
        let [least, most] = ends[stage];
        least + (u128::from(most - least) * u128::from(step) / u128::from(STEPS)) as u64
    };
    let costs = Costs::even(count, 1.0, 1.0, 1.0, 0.0).map_err(|e| refused(JobError::from(e)))?;
    let timed = time(&job.schedule, &costs);
    let timed = timed.map_err(|e| config.error("pipeline.schedule", e.to_string(), ""))?;
    for device in job.schedule.placement().devices() {
        let here = job.schedule.placement().stages_on(device);
        let peak = |step: u64| -> u64 {
            let mut all = vec![(0, 0); count];
            here.iter().for_each(|s| all[s.index()] = held(s.index(), limit(s.index(), step)));
            peaks(&job.schedule, &timed, &Footprint::exact(&all))[device.index()].amount as u64
        };
        // What waits for W may be more where less waits for B, so the least limit is not always the one with which the least is held.
        let tried: Vec<(u64, u64)> = (0..=TRIED).map(|i| i * STEPS / TRIED).map(|s| (s, peak(s))).collect();
        let Some(&(mut fits, _)) = tried.iter().rev().find(|(_, peak)| *peak <= budget) else {
            let least = tried.iter().map(|(_, peak)| *peak).min().unwrap_or(0);
            let reason = format!("a rank of stage {} remembers {least} B at least", device.0);
            let hint = format!("use \"{least}B\" or more, or smaller microbatches");
            return Err(config.error("train.activation_budget", reason, hint));
        };
        let mut above = fits + STEPS / TRIED;
        while fits < STEPS && above - fits > 1 {
            let middle = (fits + above) / 2;
            if peak(middle) <= budget { fits = middle } else { above = middle }
        }
        for stage in here {
            let (bytes, _) = held(stage.index(), limit(stage.index(), fits));
            job.recompute[stage.index()] = Recompute::Within(bytes);
        }
    }
    Ok(())
}

/// The longest of what activations take from a stage to the next, over the narrowest NIC.
fn hop_seconds(config: &Config, model: &AnyModel, stages: &[Range<usize>], cluster: &Cluster) -> f64 {
    let width = config.train.precision.dtype().bytes() as f64;
    let elements = |tensor: &Tensor| match &tensor.shape {
        Shape::Rows { rows, cols } => rows * cols,
        Shape::Samples(dims) => dims.iter().product(),
        Shape::Ids { .. } | Shape::Number => 0,
    };
    let crossing = |units: &Range<usize>| {
        let given = model.activations_given::<crate::kernels::cpu::Cpu<f32>>(units.end.saturating_sub(1));
        given.iter().map(|t| elements(t) as f64).sum::<f64>() * config.train.samples as f64 * width
    };
    let bytes = stages[..stages.len() - 1].iter().map(crossing).fold(0.0, f64::max);
    let nic = cluster.hosts.iter().map(Host::out_bytes_per_s).fold(f64::INFINITY, f64::min);
    bytes / nic + cluster.latency_s
}
