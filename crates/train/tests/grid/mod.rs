//! Jobs of many shapes, held against one rank.
//!
//! One rank's first gradients are held against the slow runtime of `common`, which has no engine and no plans; every other job is held
//! against one rank: losses step by step, gradients of the first step, weights of the last.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crossmesh_core::cluster::{Cluster, Host};
use crossmesh_core::id::Rank;
use crossmesh_core::reshard::PlanOptions;
use crossmesh_core::schedule::{Backward, Name, Spec, generate};
use crossmesh_core::step::PassTimes;
use crossmesh_train::chain::Model;
use crossmesh_train::data::Split;
use crossmesh_train::graph::Policies;
use crossmesh_train::job::{Dealt, Job, Team, Update};
use crossmesh_train::kernels::Kernels;
use crossmesh_train::kernels::cpu::Cpu;
use crossmesh_train::kernels::scalar::Scalar;
use crossmesh_train::models::gpt::{Gpt, GptConfig};
use crossmesh_train::models::unet::{TIME_STEPS, Unet, UnetConfig};
use crossmesh_train::optim::OptimizerConfig;
use crossmesh_train::optim::schedule::Schedule as Rate;
use crossmesh_train::parameter::shard_indices;
use crossmesh_train::record::StepRecord;
use crossmesh_train::runtime::{Column, Feed, PassFailure, StageState, TrainError, in_threads_on};
use crossmesh_train::stage::Recompute;

/// A model of some kind.
#[derive(Debug, Clone)]
pub enum Kind {
    Gpt(GptConfig),
    Unet(UnetConfig),
}

impl Kind {
    pub fn model<T: Scalar>(&self) -> Box<dyn Model<Cpu<T>> + Sync> {
        self.model_on()
    }

    pub fn model_on<K: Kernels>(&self) -> Box<dyn Model<K> + Sync> {
        match self {
            Kind::Gpt(config) => Box::new(Gpt::new(config.clone()).unwrap()),
            Kind::Unet(config) => Box::new(Unet::new(config.clone()).unwrap()),
        }
    }
}

/// A job, in the words of a test.
#[derive(Debug, Clone)]
pub struct Case {
    pub kind: Kind,
    pub schedule: &'static str,
    pub backward: Option<Backward>,
    pub chunks: Option<u32>,
    /// A mesh for every device.
    pub meshes: Vec<&'static str>,
    pub microbatches: u32,
    /// Of a microbatch.
    pub samples: usize,
    pub dealt: Dealt,
    pub fixed_order: bool,
    pub clip: Option<f64>,
    pub recompute: Recompute,
    pub policies: Policies,
    pub offload: Option<std::path::PathBuf>,
    pub strands: u32,
    pub sequence_parallel: bool,
    pub overlap: bool,
    pub bucket_bytes: u64,
}

/// Nothing here divides by 2 or 3: heads, vocabulary, hidden columns, tokens.
pub fn gpt_config(tied: bool, dropout: f64) -> GptConfig {
    GptConfig { tied, dropout, hidden: 31, ..GptConfig::new(13, 7, 20, 4, 5) }
}

impl Case {
    pub fn gpt(schedule: &'static str, meshes: &[&'static str]) -> Self {
        Self {
            kind: Kind::Gpt(gpt_config(true, 0.1)),
            schedule,
            backward: None,
            chunks: None,
            meshes: meshes.to_vec(),
            microbatches: 4,
            samples: 4,
            dealt: Dealt::default(),
            fixed_order: false,
            clip: None,
            recompute: Recompute::Nothing,
            policies: Policies::default(),
            offload: None,
            strands: 1,
            sequence_parallel: false,
            overlap: true,
            bucket_bytes: 1 << 10,
        }
    }

    /// The same model and batch on one rank.
    pub fn alone(&self) -> Self {
        Self {
            schedule: "gpipe",
            backward: None,
            chunks: None,
            meshes: vec!["S{dp:1}"],
            dealt: Dealt::default(),
            recompute: Recompute::Nothing,
            policies: Policies::default(),
            offload: None,
            strands: 1,
            sequence_parallel: false,
            overlap: true,
            ..self.clone()
        }
    }

    pub fn job<T: Scalar>(&self, update: Update) -> Job {
        let name: Name = self.schedule.parse().unwrap();
        let (chunks, backward) = (self.chunks, self.backward);
        let spec = Spec { chunks, backward, ..Spec::even(self.meshes.len() as u32, self.microbatches) };
        let schedule = generate(name, &spec).unwrap();
        let model = self.kind.model::<T>();
        let stages = cut(model.num_units(), schedule.placement().num_stages());
        let (mut next, count) = (0, stages.len());
        let team = |text: &&str| {
            let mesh = model.mesh(&text.parse().unwrap());
            let ranks = (next..next + mesh.len()).map(Rank::at).collect();
            next += mesh.len();
            Team { mesh, ranks, sequence_parallel: self.sequence_parallel }
        };
        let teams: Vec<Team> = self.meshes.iter().map(team).collect();
        let hosts = teams.iter().map(|t| Host::with_devices(t.ranks.len() as u32)).collect();
        Job {
            times: vec![PassTimes::default(); stages.len()],
            schedule,
            stages,
            teams,
            cluster: Cluster::of_hosts(hosts),
            samples: self.samples,
            recompute: vec![self.recompute; count],
            policies: self.policies.clone(),
            offload: self.offload.clone(),
            strands: self.strands,
            seed: 11,
            update: Update {
                dealt: self.dealt.clone(),
                fixed_order: self.fixed_order,
                clip: self.clip,
                bucket_bytes: self.bucket_bytes,
                ..update
            },
            plan: PlanOptions::default(),
            overlap: self.overlap,
            signal: false,
        }
    }

    pub fn feed(&self) -> Arc<dyn Feed> {
        Arc::new(Pattern(self.kind.clone()))
    }
}

/// Units, dealt out as evenly as can be.
fn cut(units: usize, stages: usize) -> Vec<Range<usize>> {
    let at = |i: usize| i * units / stages;
    (0..stages).map(|i| at(i)..at(i + 1)).collect()
}

/// Samples made from their numbers.
struct Pattern(Kind);

fn mixed(a: u64, b: u64) -> u64 {
    let x = (a.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ b).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (x ^ (x >> 29)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 33
}

impl Feed for Pattern {
    fn read(&self, port: &str, samples: Range<u64>, split: Split) -> Result<Column, PassFailure> {
        let salt = port.bytes().map(u64::from).sum::<u64>() + 31 * u64::from(split == Split::Validation);
        let number = |sample: u64, i: usize| mixed(sample * 7919 + salt, i as u64);
        let ids = |dims: usize, classes: usize| {
            let of = |sample| (0..dims).map(move |i| (number(sample, i) % classes as u64) as i32);
            Ok(Column::Ids(samples.clone().flat_map(of).collect()))
        };
        let reals = |dims: usize| {
            let of = |sample| (0..dims).map(move |i| (number(sample, i) % 2000) as f64 / 1000.0 - 1.0);
            Ok(Column::Real(samples.clone().flat_map(of).collect()))
        };
        match (&self.0, port) {
            (Kind::Gpt(config), _) => ids(config.context, config.vocab),
            (Kind::Unet(_), "time") => ids(1, TIME_STEPS),
            (Kind::Unet(config), "context") => reals(config.context_rows * config.context_width),
            (Kind::Unet(config), _) => reals(config.image * config.image * config.image_channels),
        }
    }
}

/// What a job came to.
pub struct Outcome {
    /// Of every step, of every rank.
    pub records: Vec<Vec<StepRecord>>,
    /// Whole weights by name.
    pub weights: BTreeMap<String, Vec<f64>>,
}

/// Runs some steps, and puts the weights together. Ranks that hold the same have the same, to the bit.
pub fn run<T: Scalar>(case: &Case, update: Update, steps: u64) -> Outcome {
    run_on(|| Cpu::<T>::new(1), case, update, steps, |_| {})
}

/// The same on other kernels; `look` sees every rank's stages after every step.
pub fn run_on<K: Kernels>(
    kernels: impl Fn() -> K + Sync,
    case: &Case,
    update: Update,
    steps: u64,
    look: impl Fn(&StageState<'_, K>) + Sync,
) -> Outcome {
    let (model, job) = (case.kind.model_on::<K>(), case.job::<f32>(update));
    let ranks = in_threads_on(kernels, &*model, &job, &case.feed(), |trainer| {
        let mut records = vec![];
        for _ in 0..steps {
            records.push(trainer.step()?);
            trainer.each_stage::<TrainError>(|stage| {
                look(&stage);
                Ok(())
            })?;
        }
        let mut shards = vec![];
        trainer.each_stage::<TrainError>(|stage| {
            let params = stage.params();
            for p in stage.parameters {
                let size = p.layout.shape().iter().product::<u64>() as usize;
                let indices = shard_indices(&p.layout, stage.coord);
                for (run, at) in stage.share().runs.within(&p.range) {
                    let values = params[at..at + run.len()].iter().map(|x| x.to_f64()).collect::<Vec<_>>();
                    let of_shard = run.start - p.range.start..run.end - p.range.start;
                    shards.push((p.name.clone(), size, indices[of_shard].to_vec(), values));
                }
            }
            Ok(())
        })?;
        Ok((records, shards))
    });
    let ranks = ranks.unwrap_or_else(|error| panic!("{case:?}: {error}"));
    let mut weights: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    let mut records = vec![];
    for (seen, shards) in ranks {
        records.push(seen);
        for (name, size, indices, values) in shards {
            let whole = weights.entry(name.clone()).or_insert_with(|| vec![f64::NAN; size]);
            for (index, value) in indices.into_iter().zip(values) {
                let known = &mut whole[index as usize];
                assert!(known.is_nan() || *known == value, "{case:?}: replicas of {name} differ");
                *known = value;
            }
        }
    }
    assert!(weights.values().flatten().all(|x| x.is_finite()), "{case:?}: weights are missing");
    Outcome { records, weights }
}

/// Steps of the learning rate 1 without momentum: what weights lose is the gradient.
pub fn plain() -> Update {
    let optimizer = OptimizerConfig::Sgd { momentum: 0.0, weight_decay: 0.0 };
    Update::new(optimizer, Rate::constant(1.0))
}

pub fn adamw() -> Update {
    let rate = Rate { peak: 1e-2, warmup_steps: 3, total_steps: 30, floor: 1e-3, decay_steps: None };
    Update::new(OptimizerConfig::ADAMW, rate)
}

/// The first step's gradients, from what a step of [`plain`] changes.
pub fn gradients<T: Scalar>(case: &Case) -> (f64, BTreeMap<String, Vec<f64>>) {
    let (before, after) = (run::<T>(case, plain(), 0), run::<T>(case, plain(), 1));
    let lost = |(name, after): (String, Vec<f64>)| {
        let before = &before.weights[&name];
        (name, before.iter().zip(after).map(|(a, b)| a - b).collect())
    };
    (after.records[0][0].loss, after.weights.into_iter().map(lost).collect())
}

/// The largest difference, relative to the largest value of the tensor.
pub fn difference(got: &BTreeMap<String, Vec<f64>>, wanted: &BTreeMap<String, Vec<f64>>) -> (f64, String) {
    assert_eq!(got.keys().collect::<Vec<_>>(), wanted.keys().collect::<Vec<_>>());
    let largest = |values: &[f64]| values.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    let overall = wanted.values().map(|v| largest(v)).fold(0.0f64, f64::max);
    let of = |(name, wanted): (&String, &Vec<f64>)| {
        let apart = got[name].iter().zip(wanted).fold(0.0f64, |m, (a, b)| m.max((a - b).abs()));
        // What is zero but for rounding has no relative error of its own.
        (apart / largest(wanted).max(1e-6 * overall), name.clone())
    };
    wanted.iter().map(of).fold((0.0, String::new()), |a, b| if b.0 > a.0 { b } else { a })
}

/// Holds a job against one rank: gradients, and the losses of `steps` steps.
pub fn compare_with<T: Scalar>(case: &Case, steps: u64, tolerance: f64) {
    let alone = case.alone();
    let ((loss, grads), (wanted_loss, wanted)) = (gradients::<T>(case), gradients::<T>(&alone));
    assert!(
        (loss - wanted_loss).abs() <= tolerance * wanted_loss.abs(),
        "{case:?}: {loss} for {wanted_loss}"
    );
    let (apart, name) = difference(&grads, &wanted);
    assert!(apart <= tolerance, "{case:?}: the gradient of {name} is {apart:e} off");
    let (got, wanted) = (run::<T>(case, adamw(), steps), run::<T>(&alone, adamw(), steps));
    for rank in &got.records {
        for (a, b) in rank.iter().zip(&wanted.records[0]) {
            let step = b.step;
            let close = |a: f64, b: f64| (a - b).abs() <= tolerance * b.abs();
            assert!(close(a.loss, b.loss), "{case:?}: step {step} has loss {} for {}", a.loss, b.loss);
            assert!(
                close(a.grad_norm, b.grad_norm),
                "{case:?}: step {step}: {} {}",
                a.grad_norm,
                b.grad_norm
            );
        }
    }
}

/// In f64, for three steps.
pub fn compare(case: &Case) {
    compare_with::<f64>(case, 3, 1e-10);
}
