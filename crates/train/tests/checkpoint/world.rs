//! Jobs for tests: stages on meshes, with tensors whose every element says which one it is.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use crossmesh_core::id::Rank;
use crossmesh_core::mesh::Mesh;
use crossmesh_train::checkpoint::{
    Checkpoint, CheckpointError, Convert, Draft, Facts, Moments, OptimizerFacts, Restored, Snapshot,
    StageState, StageTarget, Store,
};
use crossmesh_train::deal::{Deal, Share};
use crossmesh_train::kernels::scalar::Scalar;
use crossmesh_train::parameter::{Declaration, Init, Parameter, Parameters, shard_indices};
use crossmesh_train::stage_rank::StageRank;

pub const MOMENTS: &[&str] = &["exp_avg", "exp_avg_sq"];

/// A weight of a model.
#[derive(Debug, Clone)]
pub struct Weight {
    pub name: String,
    pub shape: Vec<usize>,
    /// The dim that `tp` splits.
    pub split: Option<usize>,
}

/// A job: where its stages are, and which weights each has.
#[derive(Debug, Clone)]
pub struct World {
    pub weights: Vec<Weight>,
    /// Meshes of devices; each has ranks of its own.
    pub meshes: Vec<String>,
    /// By stage: its device, and its weights. A weight of several stages is tied.
    pub stages: Vec<(usize, Vec<usize>)>,
    /// ZeRO's stage.
    pub zero: usize,
}

/// A rank's part of a stage.
pub struct Held {
    pub parameters: Vec<Parameter>,
    pub place: StageRank,
    /// Of the weights, and of the moments.
    pub shares: [Share; 2],
    /// Tied weights that an earlier stage saves.
    pub elsewhere: Vec<String>,
}

/// What an element of a weight (or of its moments) is after a step. Exact in f32.
pub fn element(weight: usize, state: usize, step: u64, index: u64) -> f64 {
    (index * 3 + state as u64 + step % 100 * 10_007 + weight as u64 * 101) as f64
}

impl World {
    pub fn num_ranks(&self) -> usize {
        self.meshes.iter().map(|m| m.parse::<Mesh>().unwrap().len()).sum()
    }

    /// What every rank holds.
    pub fn ranks<T: Scalar>(&self) -> Vec<Vec<Held>> {
        let mut ranks = Vec::new();
        for (device, mesh) in self.meshes.iter().enumerate() {
            let mesh: Mesh = mesh.parse().unwrap();
            for position in 0..mesh.len() {
                let place = StageRank::new(mesh.clone(), position).unwrap();
                let stages = (0..self.stages.len()).filter(|&s| self.stages[s].0 == device);
                ranks.push(stages.map(|s| self.held::<T>(s, &place)).collect());
            }
        }
        ranks
    }

    fn held<T: Scalar>(&self, stage: usize, place: &StageRank) -> Held {
        let mut parameters = Parameters::new::<T>(place);
        for &w in &self.stages[stage].1 {
            let Weight { name, shape, split } = &self.weights[w];
            let (name, split) = (name.clone(), *split);
            let (init, decay, summed_over) = (Init::Zeros, true, &[][..]);
            let split: Vec<_> = split.map(|dim| (dim, "tp")).into_iter().collect();
            parameters.declare(Declaration { name, shape, split: &split, init, decay, summed_over });
        }
        let parameters = parameters.into_list();
        let len = parameters.last().map_or(0, |p| p.range.end);
        // Two buckets, of which the first is a third.
        let deal = Deal::new(place.clone(), &[0, len / 3, len]);
        let over = |zero: usize| if self.zero >= zero { place.data_axes() } else { vec![] };
        let shares = [deal.share(&over(3)), deal.share(&over(1))];
        let earlier = |w: &&usize| self.stages[..stage].iter().any(|s| s.1.contains(w));
        let elsewhere = self.stages[stage].1.iter().filter(earlier);
        let elsewhere = elsewhere.map(|&w| self.weights[w].name.clone()).collect();
        Held { parameters, place: place.clone(), shares, elsewhere }
    }

    /// What a rank should keep of a state.
    pub fn kept<T: Scalar>(&self, held: &Held, state: usize, step: u64) -> Vec<T> {
        let flat = self.flat::<T>(held, state, step);
        held.shares[state.min(1)].runs.iter().flat_map(|(run, _)| flat[run].to_vec()).collect()
    }

    /// What the flat buffer of a state should be.
    pub fn flat<T: Scalar>(&self, held: &Held, state: usize, step: u64) -> Vec<T> {
        let of = |p: &Parameter| {
            let weight = self.weights.iter().position(|w| w.name == p.name).unwrap();
            let indices = shard_indices(&p.layout, held.place.coord());
            indices.into_iter().map(move |i| T::from_f64(element(weight, state, step, i)))
        };
        held.parameters.iter().flat_map(of).collect()
    }

    pub fn snapshot<T: Scalar>(&self, rank: usize, stages: &[Held], step: u64) -> Snapshot {
        let buffers: Vec<Vec<Vec<T>>> =
            stages.iter().map(|h| (0..3).map(|state| self.kept(h, state, step)).collect()).collect();
        let names: Vec<Vec<&str>> =
            stages.iter().map(|h| h.elsewhere.iter().map(String::as_str).collect()).collect();
        let mut draft = Draft::new(step, Rank(rank as u32));
        for ((held, buffers), elsewhere) in stages.iter().zip(&buffers).zip(&names) {
            draft.add(&stage_state(held, buffers, elsewhere)).unwrap();
        }
        draft.finish().unwrap()
    }

    /// Saves a step, every rank in turn.
    pub fn save<T: Scalar>(&self, store: &Store, step: u64) -> Result<PathBuf, CheckpointError> {
        let write = |(rank, stages): (usize, Vec<Held>)| store.write(self.snapshot::<T>(rank, &stages, step));
        let writing: Vec<_> = self.ranks::<T>().into_iter().enumerate().map(write).collect();
        let reports: Vec<Vec<u8>> = writing.into_iter().map(|w| w.report()).collect();
        let complete = store.commit(&facts(step), &reports)?;
        store.prune()?;
        Ok(complete)
    }

    /// Loads every rank and compares every element. Returns what each rank read.
    pub fn load<T: Scalar>(&self, path: &Path, convert: Convert) -> Result<Vec<Restored>, CheckpointError> {
        let checkpoint = Checkpoint::open(path)?;
        let step = checkpoint.facts().step;
        let load = |stages: Vec<Held>| {
            let nan = |len: usize| vec![T::NAN; len];
            let mut buffers: Vec<(Vec<T>, Vec<Vec<T>>)> = stages
                .iter()
                .map(|h| {
                    let [values, moments] = [0, 1].map(|i| h.shares[i].runs.len());
                    (nan(values), vec![nan(moments), nan(moments)])
                })
                .collect();
            let mut targets: Vec<StageTarget<'_, T>> = stages
                .iter()
                .zip(&mut buffers)
                .map(|(held, (values, moments))| StageTarget {
                    parameters: &held.parameters,
                    place: &held.place,
                    values,
                    share: held.shares[0].clone(),
                    moments: Some(Moments {
                        names: MOMENTS,
                        values: moments.iter_mut().map(Vec::as_mut_slice).collect(),
                        share: held.shares[1].clone(),
                    }),
                })
                .collect();
            let restored = checkpoint.load(&mut targets, convert)?;
            for (held, (values, moments)) in stages.iter().zip(&buffers) {
                assert_eq!(values, &self.kept::<T>(held, 0, step), "values");
                for (i, moment) in moments.iter().enumerate() {
                    assert_eq!(moment, &self.kept::<T>(held, i + 1, step), "{}", MOMENTS[i]);
                }
            }
            Ok(restored)
        };
        self.ranks::<T>().into_iter().map(load).collect()
    }

    /// Elements of all weights, each once.
    pub fn volume(&self) -> usize {
        let used = |w: &usize| self.stages.iter().any(|s| s.1.contains(w));
        (0..self.weights.len()).filter(used).map(|w| self.weights[w].shape.iter().product::<usize>()).sum()
    }
}

fn stage_state<'a, T>(held: &'a Held, buffers: &'a [Vec<T>], elsewhere: &'a [&'a str]) -> StageState<'a, T> {
    let moments = buffers[1..].iter().map(|m| &m[..]).collect();
    StageState {
        parameters: &held.parameters,
        place: &held.place,
        values: &buffers[0],
        share: held.shares[0].clone(),
        moments: Moments { names: MOMENTS, values: moments, share: held.shares[1].clone() },
        elsewhere,
    }
}

pub fn facts(step: u64) -> Facts {
    let moments = MOMENTS.iter().map(|m| m.to_string()).collect();
    Facts {
        step,
        samples: step * 8,
        seed: 7,
        model: serde_json::json!({"kind": "test", "rate": 0.1}),
        run: serde_json::Value::Null,
        optimizer: Some(OptimizerFacts { kind: "adamw".into(), steps: step, moments }),
    }
}

pub fn store(folder: &Path, keep: usize) -> Store {
    Store::new(folder, NonZeroUsize::new(keep).unwrap())
}

/// A world that is never the same twice: three stages, one weight tied, nothing divides.
pub fn small(meshes: [&str; 3], zero: usize) -> World {
    let weight =
        |name: &str, shape: &[usize], split| Weight { name: name.into(), shape: shape.to_vec(), split };
    World {
        weights: vec![
            weight("wte.weight", &[13, 6], Some(0)),
            weight("h.0.c_attn.weight", &[6, 3, 5, 2], Some(2)),
            weight("h.0.c_attn.bias", &[3, 5, 2], Some(1)),
            weight("h.1.c_proj.weight", &[5, 2, 6], Some(0)),
            weight("ln_f.weight", &[7], None),
            weight("scale", &[], None),
        ],
        meshes: meshes.map(String::from).to_vec(),
        stages: vec![(0, vec![0, 1, 2]), (1, vec![3]), (2, vec![4, 5, 0])],
        zero,
    }
}
