//! A runtime that is slow and obvious: it gathers every tensor, cuts it again, and runs the ranks of a stage as threads.
//!
//! What it checks on the way: ranks that should hold the same have the same, to the bit; a stage holds as many bytes as it said.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crossmesh_core::layout::Layout;
use crossmesh_core::mesh::Mesh;
use crossmesh_train::chain::{Chain, Model, Setup};
use crossmesh_train::flat::{Buckets, FlatMut, Gradients};
use crossmesh_train::graph::Policies;
use crossmesh_train::group::{Counted, Group, Traffic, in_process};
use crossmesh_train::kernels::cpu::{Cpu, HostBuf};
use crossmesh_train::parameter::{initial, shard_indices};
use crossmesh_train::stage::{
    Microbatch, MicrobatchId, Port, Recompute, Role, Stage, StageError, Value, connect,
};
use crossmesh_train::stage_rank::StageRank;

pub type Buf = HostBuf<f64>;

/// A whole tensor of a microbatch.
#[derive(Debug, Clone)]
pub enum Whole {
    Real(Vec<f64>),
    Ids(Vec<i32>),
}

/// A stage's mesh and units.
#[derive(Debug, Clone)]
pub struct StageSpec {
    pub mesh: String,
    pub units: Range<usize>,
}

/// How a model is run.
#[derive(Debug, Clone)]
pub struct Job {
    pub stages: Vec<StageSpec>,
    /// Samples of a microbatch.
    pub samples: usize,
    pub sequence_parallel: bool,
    pub recompute: Recompute,
    /// Whether all W come after all B.
    pub late_weights: bool,
    pub step: u64,
}

impl Job {
    /// One rank, everything in one stage.
    pub fn alone(units: usize, samples: usize) -> Self {
        Self {
            stages: vec![StageSpec { mesh: "S{dp:1,tp:1}".into(), units: 0..units }],
            samples,
            sequence_parallel: false,
            recompute: Recompute::Nothing,
            late_weights: false,
            step: 3,
        }
    }
}

/// What came of it.
#[derive(Debug, Clone)]
pub struct Outcome {
    pub loss: f64,
    pub grads: BTreeMap<String, Vec<f64>>,
    /// Of every rank of every stage.
    pub traffic: Vec<Vec<Traffic>>,
}

struct RankStage {
    chain: Chain<Cpu<f64>>,
    group: Arc<Counted<Buf>>,
    place: StageRank,
    params: Buf,
    grads: Buf,
}

const SEED: u64 = 11;

/// Runs a batch, given microbatch by microbatch as whole tensors by name.
pub fn run(model: &(dyn Model<Cpu<f64>> + Sync), job: &Job, batch: &[BTreeMap<String, Whole>]) -> Outcome {
    let mut stages: Vec<Vec<RankStage>> = job.stages.iter().map(|spec| ranks(model, job, spec)).collect();
    let ports: Vec<_> = stages.iter().map(|s| (s[0].chain.inputs(), s[0].chain.outputs())).collect();
    connect(&ports).expect("stages fit together");
    let mut loss = 0.0;
    for (i, data) in batch.iter().enumerate() {
        loss += forward(&mut stages, job, i, batch.len(), data);
    }
    for i in 0..batch.len() {
        backward(&mut stages, i);
        if !job.late_weights {
            weights(&mut stages, i);
        }
    }
    if job.late_weights {
        (0..batch.len()).for_each(|i| weights(&mut stages, i));
    }
    check_bytes(&stages, job, batch.len());
    let traffic = stages.iter().map(|s| s.iter().map(|r| r.group.traffic()).collect()).collect();
    Outcome { loss, grads: whole_grads(&stages), traffic }
}

fn ranks(model: &dyn Model<Cpu<f64>>, job: &Job, spec: &StageSpec) -> Vec<RankStage> {
    let mesh: Mesh = model.mesh(&spec.mesh.parse().unwrap());
    let places: Vec<StageRank> = (0..mesh.len()).map(|p| StageRank::new(mesh.clone(), p).unwrap()).collect();
    let rows = places[0].dp().size;
    let groups: Vec<_> = (0..rows).map(|_| in_process::<f64>(places[0].tp().size)).collect();
    let rank = |place: StageRank| {
        let group = Arc::new(Counted::new(Arc::clone(&groups[place.dp().rank][place.tp().rank])));
        let setup = Setup {
            place: place.clone(),
            samples: job.samples,
            sequence_parallel: job.sequence_parallel,
            offloaded: false,
            strands: 1,
            recompute: job.recompute,
            policies: Policies::default(),
            seed: SEED,
        };
        let tp: Arc<dyn Group<Buf>> = group.clone();
        let chain = Chain::new(model, spec.units.clone(), Arc::new(Cpu::new(1)), tp, setup).unwrap();
        let params = initial::<f64>(chain.parameters(), place.coord(), SEED);
        let grads = vec![0.0; params.len()].into();
        RankStage { chain, group, place, params: params.into(), grads }
    };
    places.into_iter().map(rank).collect()
}

/// Calls `f` for every rank of a stage, on a thread each.
fn on_ranks<I: Send, O: Send>(
    stage: &mut [RankStage],
    inputs: Vec<I>,
    f: impl Fn(&mut RankStage, I) -> O + Sync,
) -> Vec<O> {
    std::thread::scope(|scope| {
        let f = &f;
        let threads: Vec<_> =
            stage.iter_mut().zip(inputs).map(|(rank, input)| scope.spawn(move || f(rank, input))).collect();
        threads.into_iter().map(|t| t.join().expect("a rank")).collect()
    })
}

fn forward(
    stages: &mut [Vec<RankStage>],
    job: &Job,
    i: usize,
    count: usize,
    data: &BTreeMap<String, Whole>,
) -> f64 {
    let microbatch = Microbatch {
        id: MicrobatchId(i as u32),
        step: job.step,
        first_sample: (i * job.samples) as u64,
        batch_samples: (count * job.samples) as u64,
    };
    let mut flow = data.clone();
    let mut loss = None;
    for stage in stages {
        let inputs = stage.iter().map(|rank| {
            let cut = |port: &Port| cut(&flow[&port.name], &port.layout, &rank.place);
            rank.chain.inputs().iter().map(cut).collect::<Vec<_>>()
        });
        let inputs = inputs.collect();
        let outputs = on_ranks(stage, inputs, |rank, inputs| {
            rank.chain.forward(microbatch, &mut &rank.params, inputs).unwrap()
        });
        for (p, port) in stage[0].chain.outputs().iter().enumerate() {
            let shards = || outputs.iter().map(|o| &o[p]);
            match port.role {
                Role::Loss => loss = Some(sum_loss(&port.layout, stage, shards())),
                _ => {
                    let shards = shards().map(|v| match v {
                        Value::Real(buf) => &buf[..],
                        other => panic!("{other:?}"),
                    });
                    flow.insert(port.name.clone(), Whole::Real(gather(&port.layout, stage, shards)));
                }
            }
        }
    }
    loss.expect("the last stage gives a loss")
}

fn backward(stages: &mut [Vec<RankStage>], i: usize) {
    let mut flow: BTreeMap<String, Whole> = BTreeMap::new();
    for stage in stages.iter_mut().rev() {
        let grads = stage.iter().map(|rank| {
            let outputs = rank.chain.outputs().iter().filter(|p| p.role == Role::Activation);
            let shard = |port: &Port| match cut(&flow[&port.name], &port.layout, &rank.place) {
                Value::Real(buf) => buf,
                other => panic!("{other:?}"),
            };
            outputs.map(shard).collect::<Vec<_>>()
        });
        let grads = grads.collect();
        let results = on_ranks(stage, grads, |rank, grads| {
            rank.chain.backward_input(MicrobatchId(i as u32), &mut &rank.params, grads).unwrap()
        });
        let ports = stage[0].chain.inputs().iter().filter(|p| p.role == Role::Activation);
        for (p, port) in ports.enumerate() {
            let shards = results.iter().map(|r| &r[p][..]);
            flow.insert(port.name.clone(), Whole::Real(gather(&port.layout, stage, shards)));
        }
    }
}

/// Counts how often each gradient is said to be complete.
struct Closing<'a> {
    grads: &'a mut Buf,
    buckets: Buckets,
    covered: Vec<u32>,
}

impl Gradients<Buf> for Closing<'_> {
    fn open(&mut self, _: usize) -> FlatMut<'_, Buf> {
        FlatMut::Whole(self.grads)
    }

    fn close(&mut self, unit: usize) -> Result<(), StageError> {
        self.covered[self.buckets.own(unit)].iter_mut().for_each(|c| *c += 1);
        Ok(())
    }
}

fn weights(stages: &mut [Vec<RankStage>], i: usize) {
    for stage in stages {
        let none = vec![(); stage.len()];
        on_ranks(stage, none, |rank, ()| {
            let covered = vec![0; rank.grads.len()];
            let RankStage { chain, grads, .. } = rank;
            let buckets = chain.buckets().clone();
            let mut closing = Closing { grads, buckets, covered };
            chain.backward_weight(MicrobatchId(i as u32), &mut closing).unwrap();
            assert!(closing.covered.iter().all(|&c| c == 1), "every gradient is ready once");
        });
    }
}

/// What was held is what was announced.
fn check_bytes(stages: &[Vec<RankStage>], job: &Job, microbatches: usize) {
    for rank in stages.iter().flatten() {
        let (live, bytes) = (rank.chain.live(), rank.chain.activation_bytes());
        assert_eq!((live.microbatches, live.bytes), (0, 0));
        assert_eq!(live.peak_microbatches, microbatches);
        let all_forward = microbatches as u64 * bytes.after_forward;
        let mut peak = all_forward;
        for done in 1..=microbatches as u64 {
            let waiting = if job.late_weights { done } else { 1 };
            let forward = (microbatches as u64 - done) * bytes.after_forward;
            peak = peak.max(forward + waiting * bytes.after_backward_input);
        }
        assert_eq!(live.peak_bytes, peak, "{bytes:?}");
    }
}

/// A rank's shard of a whole tensor.
fn cut(whole: &Whole, layout: &Layout, place: &StageRank) -> Value<Buf> {
    let indices = shard_indices(layout, place.coord());
    match whole {
        Whole::Real(x) => Value::Real(indices.iter().map(|&i| x[i as usize]).collect::<Vec<_>>().into()),
        Whole::Ids(x) => Value::Ids(indices.iter().map(|&i| x[i as usize]).collect()),
    }
}

/// A whole tensor from its shards; replicas have to agree.
fn gather<'a>(layout: &Layout, stage: &[RankStage], shards: impl Iterator<Item = &'a [f64]>) -> Vec<f64> {
    let mut whole: Vec<Option<f64>> = vec![None; layout.volume() as usize];
    for (rank, shard) in stage.iter().zip(shards) {
        let indices = shard_indices(layout, rank.place.coord());
        assert_eq!(indices.len(), shard.len(), "{layout}");
        for (i, &x) in indices.iter().zip(shard) {
            let old = whole[*i as usize].replace(x);
            assert!(old.is_none_or(|old| old == x), "replicas of {layout} differ: {old:?} and {x}");
        }
    }
    whole.into_iter().map(|x| x.expect("shards cover the tensor")).collect()
}

/// The sum over contributions; ranks with the same contribution have to agree.
fn sum_loss<'a>(layout: &Layout, stage: &[RankStage], shards: impl Iterator<Item = &'a Value<Buf>>) -> f64 {
    let mut parts: BTreeMap<usize, f64> = BTreeMap::new();
    for (rank, value) in stage.iter().zip(shards) {
        let Value::Loss(loss) = value else { panic!("{value:?} is no loss") };
        let old = parts.insert(layout.contribution_at(rank.place.coord()), *loss);
        assert!(old.is_none_or(|old| old == *loss), "losses differ: {old:?} and {loss}");
    }
    parts.values().sum()
}

/// Gradients by name, summed over whatever their layouts say, and over stages that share a name.
fn whole_grads(stages: &[Vec<RankStage>]) -> BTreeMap<String, Vec<f64>> {
    let mut all: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for stage in stages {
        for (p, parameter) in stage[0].chain.parameters().iter().enumerate() {
            // Replicas of a contribution count once.
            let mut parts: BTreeMap<(u64, usize), f64> = BTreeMap::new();
            for rank in stage {
                let own = &rank.chain.parameters()[p];
                assert_eq!(own.name, parameter.name);
                let part = own.grad.contribution_at(rank.place.coord());
                let indices = shard_indices(&own.grad, rank.place.coord());
                for (i, &x) in indices.iter().zip(&rank.grads[own.range.clone()]) {
                    let old = parts.insert((*i, part), x);
                    let close = |old: f64| (old - x).abs() <= 1e-12 * (1.0 + x.abs());
                    assert!(old.is_none_or(close), "{}: {old:?} and {x}", own.name);
                }
            }
            let volume = parameter.layout.volume() as usize;
            let sums = all.entry(parameter.name.clone()).or_insert_with(|| vec![0.0; volume]);
            parts.into_iter().for_each(|((i, _), x)| sums[i as usize] += x);
        }
    }
    all
}

/// Losses and every gradient equal to within 1e-10 of the largest.
#[track_caller]
pub fn assert_same(got: &Outcome, wanted: &Outcome, what: &str) {
    let difference = (got.loss - wanted.loss).abs();
    assert!(difference <= 1e-10 * wanted.loss.abs(), "{what}: loss {} and {}", got.loss, wanted.loss);
    let names = |o: &Outcome| o.grads.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(got), names(wanted), "{what}");
    for (name, wanted) in &wanted.grads {
        let scale = wanted.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
        assert!(scale > 0.0, "{what}: {name} has no gradient");
        for (i, (got, wanted)) in got.grads[name].iter().zip(wanted).enumerate() {
            assert!(
                (got - wanted).abs() <= 1e-10 * scale,
                "{what}: {name}[{i}] is {got} instead of {wanted}"
            );
        }
    }
}

/// A rank of its own with all units, to look at closely.
pub struct Single {
    pub chain: Chain<Cpu<f64>>,
    pub params: Buf,
}

impl Single {
    pub fn new(model: &dyn Model<Cpu<f64>>, samples: usize) -> Self {
        Self::with_threads(model, samples, 1)
    }

    pub fn with_threads(model: &dyn Model<Cpu<f64>>, samples: usize, threads: usize) -> Self {
        let group = in_process::<f64>(1).remove(0);
        let setup = Setup::alone(samples, SEED);
        let chain =
            Chain::new(model, 0..model.num_units(), Arc::new(Cpu::new(threads)), group, setup).unwrap();
        let params = initial::<f64>(chain.parameters(), &[0, 0], SEED);
        Self { chain, params: params.into() }
    }

    pub fn microbatch(samples: usize) -> Microbatch {
        let batch_samples = samples as u64;
        Microbatch { id: MicrobatchId(0), step: 3, first_sample: 0, batch_samples }
    }

    pub fn inputs(&self, data: &BTreeMap<String, Whole>) -> Vec<Value<Buf>> {
        let value = |port: &Port| match &data[&port.name] {
            Whole::Real(x) => Value::Real(x.clone().into()),
            Whole::Ids(x) => Value::Ids(x.clone()),
        };
        self.chain.inputs().iter().map(value).collect()
    }

    /// The loss in training, with its masks.
    pub fn loss(&mut self, samples: usize, data: &BTreeMap<String, Whole>) -> f64 {
        let inputs = self.inputs(data);
        let outputs = self.chain.forward(Self::microbatch(samples), &mut &self.params, inputs).unwrap();
        let Value::Loss(loss) = outputs[0] else { panic!("{outputs:?}") };
        loss
    }

    /// Gradients of all parameters.
    pub fn gradients(&mut self, samples: usize, data: &BTreeMap<String, Whole>) -> Vec<f64> {
        self.loss(samples, data);
        let mut grads: Buf = vec![0.0; self.params.len()].into();
        self.chain.backward_input(MicrobatchId(0), &mut &self.params, vec![]).unwrap();
        self.chain.backward_weight(MicrobatchId(0), &mut &mut grads).unwrap();
        grads.to_vec()
    }

    /// Compares gradients with central differences at some places of every parameter.
    pub fn check_gradients(&mut self, samples: usize, data: &BTreeMap<String, Whole>, tolerance: f64) {
        let grads = self.gradients(samples, data);
        let parameters = self.chain.parameters().to_vec();
        for parameter in parameters {
            let range = parameter.range;
            let scale = grads[range.clone()].iter().fold(0.0, |m: f64, x| m.max(x.abs()));
            for i in [0, range.len() / 3, range.len() - 1].map(|i| range.start + i) {
                let step = 1e-5;
                let old = self.params[i];
                self.params[i] = old + step;
                let above = self.loss(samples, data);
                self.chain.forget(MicrobatchId(0));
                self.params[i] = old - step;
                let below = self.loss(samples, data);
                self.chain.forget(MicrobatchId(0));
                self.params[i] = old;
                let difference = (above - below) / (2.0 * step);
                let error = (grads[i] - difference).abs();
                assert!(
                    error <= tolerance * (scale + 1e-3),
                    "{}[{}]: {} instead of {difference}",
                    parameter.name,
                    i - range.start,
                    grads[i]
                );
            }
        }
    }
}
