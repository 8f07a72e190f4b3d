//! Optimizers on flat shards.
//!
//! A rank's parameters are one flat buffer, so an optimizer is a loop over runs of it. It owns the moments of a `shard` of the buffer: all of
//! it, or with ZeRO-1 this rank's part along `dp`. Where runs begin and end comes from the parameters' table: weight decay is for matrices
//! only, and a norm counts every element once, however many ranks hold it.

pub mod schedule;

use std::ops::Range;

use crate::kernels::{AdamW, AdamWState, BufSlice, Buffer, Kernels, PartMut, Sgd, SgdState};
use crate::parameter::Parameter;
use crate::stage_rank::StageRank;

/// Which optimizer, with its constants.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum OptimizerConfig {
    /// Adam with decoupled weight decay (Loshchilov & Hutter, 2019).
    AdamW {
        beta1: f64,
        beta2: f64,
        epsilon: f64,
        weight_decay: f64,
    },
    Sgd {
        momentum: f64,
        weight_decay: f64,
    },
}

impl OptimizerConfig {
    /// The constants that GPT-3 and most after it were trained with.
    pub const ADAMW: Self = Self::AdamW { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1 };
}

/// What an optimizer keeps for a shard of the parameters.
#[derive(Debug)]
pub struct Optimizer<B> {
    config: OptimizerConfig,
    shard: Range<usize>,
    /// Runs of the shard, counted from its start, and whether they decay.
    runs: Vec<(Range<usize>, bool)>,
    /// Two moments, or one velocity.
    moments: Vec<B>,
    steps: u64,
}

/// A step's numbers that change from step to step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepNumbers {
    pub learning_rate: f64,
    /// Gradients count this much: see [`clip_scale`].
    pub grad_scale: f64,
}

impl<B: Buffer> Optimizer<B> {
    /// For the elements `shard` of the flat buffer that `parameters` describe; moments start at zero.
    pub fn new<K: Kernels<Buf = B>>(
        kernels: &K,
        config: OptimizerConfig,
        parameters: &[Parameter],
        shard: Range<usize>,
    ) -> Self {
        let moments = match config {
            OptimizerConfig::AdamW { .. } => 2,
            OptimizerConfig::Sgd { .. } => 1,
        };
        let zeros = |_| {
            let mut buf = kernels.buffer(shard.len());
            kernels.fill(crate::kernels::scalar::Scalar::ZERO, (&mut buf).into(), shard.len());
            buf
        };
        let (moments, runs) = ((0..moments).map(zeros).collect(), decay_runs(parameters, &shard));
        Self { config, shard, runs, moments, steps: 0 }
    }

    /// One step. `params` and `grads` begin with the shard's first element.
    pub fn step<K: Kernels<Buf = B>>(
        &mut self,
        kernels: &K,
        numbers: StepNumbers,
        params: PartMut<'_, B>,
        grads: BufSlice<'_, B>,
    ) {
        for (run, decays) in &self.runs {
            let params = PartMut { buf: params.buf, start: params.start };
            self.config.run(
                kernels,
                (numbers, self.steps, *decays),
                run.clone(),
                params,
                grads,
                &mut self.moments,
            );
        }
        self.steps += 1;
    }

    /// Steps done.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    pub fn shard(&self) -> Range<usize> {
        self.shard.clone()
    }

    /// Names of what a checkpoint has to keep beside the parameters, each of the shard's length.
    pub fn moment_names(&self) -> &'static [&'static str] {
        match self.config {
            OptimizerConfig::AdamW { .. } => &["exp_avg", "exp_avg_sq"],
            OptimizerConfig::Sgd { .. } => &["momentum"],
        }
    }

    /// In the order of their names.
    pub fn moments(&self) -> &[B] {
        &self.moments
    }

    /// To go on from a checkpoint: the moments to be filled, and the steps that had been done.
    pub fn resume(&mut self, steps: u64) -> &mut [B] {
        self.steps = steps;
        &mut self.moments
    }
}

impl OptimizerConfig {
    fn run<K: Kernels>(
        &self,
        kernels: &K,
        (numbers, step, decays): (StepNumbers, u64, bool),
        run: Range<usize>,
        params: PartMut<'_, K::Buf>,
        grads: BufSlice<'_, K::Buf>,
        moments: &mut [K::Buf],
    ) {
        let StepNumbers { learning_rate, grad_scale } = numbers;
        let decay = |weight_decay: f64| if decays { weight_decay } else { 0.0 };
        match (self, moments) {
            (&Self::AdamW { beta1, beta2, epsilon, weight_decay }, [first, second]) => {
                let weight_decay = decay(weight_decay);
                let step = AdamW { learning_rate, beta1, beta2, epsilon, weight_decay, step, grad_scale };
                let state = AdamWState { params, grads, first: first.into(), second: second.into() };
                kernels.adamw(&step, run, state);
            }
            (&Self::Sgd { momentum, weight_decay }, [velocity]) => {
                let weight_decay = decay(weight_decay);
                let step = Sgd { learning_rate, momentum, weight_decay, grad_scale };
                kernels.sgd(&step, run, SgdState { params, grads, velocity: velocity.into() });
            }
            (_, moments) => unreachable!("{} moments", moments.len()),
        }
    }
}

/// Neighbouring parameters that decay alike, cut to a shard and counted from its start.
fn decay_runs(parameters: &[Parameter], shard: &Range<usize>) -> Vec<(Range<usize>, bool)> {
    let mut runs: Vec<(Range<usize>, bool)> = Vec::new();
    for parameter in parameters {
        let range = intersect(&parameter.range, shard);
        match runs.last_mut() {
            _ if range.is_empty() => {}
            Some((last, decay)) if *decay == parameter.decay && last.end == range.start => {
                last.end = range.end
            }
            _ => runs.push((range, parameter.decay)),
        }
    }
    let from_shard = |(r, decay): (Range<usize>, bool)| (r.start - shard.start..r.end - shard.start, decay);
    runs.into_iter().map(from_shard).collect()
}

fn intersect(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

/// This rank's piece of the squared norm of all gradients: the sum over a shard of what no other rank along `tp` counts. Summed over
/// the ranks of all stages (and, where gradients are whole along `dp`, over one of them), the pieces are the squared norm. Parameters that
/// another stage counts (tied ones) are named in `elsewhere`.
pub fn norm_piece<K: Kernels>(
    kernels: &K,
    parameters: &[Parameter],
    place: &StageRank,
    shard: &Range<usize>,
    grads: &K::Buf,
    elsewhere: &[&str],
) -> f64 {
    let counts = |p: &&Parameter| is_first_along_tp(p, place) && !elsewhere.contains(&p.name.as_str());
    let runs = parameters.iter().filter(counts).map(|p| intersect(&p.range, shard));
    runs.map(|run| kernels.sum_squares(grads, run)).sum()
}

/// Whether ranks along `tp` have different parts of a parameter; else all of them have all of it.
pub fn is_split_over_tp(parameter: &Parameter) -> bool {
    let axes = parameter.layout.mesh().axes();
    splitting(parameter).any(|axis| axes[axis].name != "dp")
}

/// Whether a rank is the first of those along `tp`, or along a part of it, that have the same of a parameter.
fn is_first_along_tp(parameter: &Parameter, place: &StageRank) -> bool {
    let axes = parameter.layout.mesh().axes().iter().zip(place.coord()).enumerate();
    axes.into_iter()
        .all(|(i, (axis, at))| axis.name == "dp" || *at == 0 || splitting(parameter).any(|axis| axis == i))
}

/// The axes that split a parameter.
fn splitting(parameter: &Parameter) -> impl Iterator<Item = usize> {
    let splits = parameter.layout.by_axes().expect("parameters are split by axes").splits();
    splits.iter().flat_map(|s| s.axes.iter().copied())
}

/// By how much to scale gradients so that their norm is `max_norm` at most.
pub fn clip_scale(squared_norm: f64, max_norm: f64) -> f64 {
    let norm = squared_norm.sqrt();
    if norm > max_norm { max_norm / norm } else { 1.0 }
}

#[cfg(test)]
mod tests;
