//! Optimizers on flat shards.
//!
//! A rank's parameters are one flat buffer, so an optimizer is a loop over runs of it. It owns the moments of some runs of the buffer: all of
//! it, or what falls to this rank where states are dealt out ([`crate::deal`]). Where runs begin and end comes from the parameters' table: weight decay is for matrices
//! only, and a norm counts every element once, however many ranks hold it.

pub mod schedule;

use std::ops::Range;

use crate::deal::{Runs, Share};
use crate::kernels::{AdamW, AdamWState, BufSlice, Buffer, Kernels, PartMut, Sgd, SgdState};
use crate::parameter::Parameter;
use crate::stage_rank::{DATA_AXES, StageRank};

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
    /// Names of what it remembers of every parameter.
    pub fn moment_names(&self) -> &'static [&'static str] {
        match self {
            Self::AdamW { .. } => &["exp_avg", "exp_avg_sq"],
            Self::Sgd { .. } => &["momentum"],
        }
    }
}

impl OptimizerConfig {
    /// The constants that GPT-3 and most after it were trained with.
    pub const ADAMW: Self = Self::AdamW { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1 };
}

/// What an optimizer keeps for a shard of the parameters.
#[derive(Debug)]
pub struct Optimizer<B> {
    config: OptimizerConfig,
    share: Share,
    /// Runs of the flat buffer, where their moments are kept, and whether they decay.
    runs: Vec<(Range<usize>, usize, bool)>,
    /// Two moments, or one velocity.
    moments: Vec<B>,
    /// Of parameters that passes use in narrower numbers: what these are rounded from.
    masters: Option<B>,
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
    /// For what this rank keeps of the flat buffer that `parameters` describe; moments start at zero.
    pub fn new<K: Kernels<Buf = B>>(
        kernels: &K,
        config: OptimizerConfig,
        parameters: &[Parameter],
        share: Share,
    ) -> Self {
        let moments = match config {
            OptimizerConfig::AdamW { .. } => 2,
            OptimizerConfig::Sgd { .. } => 1,
        };
        let zeros = |_| {
            let len = share.runs.len();
            let mut buf = kernels.wide(len);
            kernels.fill(crate::kernels::scalar::Scalar::ZERO, (&mut buf).into(), len);
            buf
        };
        let (moments, runs) = ((0..moments).map(zeros).collect(), decay_runs(parameters, &share.runs));
        let masters = K::IS_MIXED.then(|| kernels.wide(share.runs.len()));
        Self { config, share, runs, moments, masters, steps: 0 }
    }

    /// One step, on parameters and gradients of which at least the moments' share is kept.
    pub fn step<K: Kernels<Buf = B>>(
        &mut self,
        kernels: &K,
        numbers: StepNumbers,
        (params, kept): (&mut B, &Runs),
        (grads, summed): (&B, &Runs),
    ) {
        for (run, at, decays) in &self.runs {
            let params = PartMut { buf: &mut *params, start: kept.at(run).start };
            let (params, rounded) = match &mut self.masters {
                None => (params, None),
                Some(masters) => (PartMut { buf: masters, start: *at }, Some(params)),
            };
            let grads = BufSlice { buf: grads, start: summed.at(run).start };
            let about = (numbers, self.steps, *decays);
            self.config.run(kernels, about, run.len(), (params, rounded), grads, (&mut self.moments, *at));
        }
        self.steps += 1;
    }

    /// Steps done.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// What it keeps moments of.
    pub fn share(&self) -> &Share {
        &self.share
    }

    /// Names of what a checkpoint has to keep beside the parameters, each of the share's length.
    pub fn moment_names(&self) -> &'static [&'static str] {
        self.config.moment_names()
    }

    /// In the order of their names.
    pub fn moments(&self) -> &[B] {
        &self.moments
    }

    /// What the parameters that it keeps moments of are rounded from, where they are.
    pub fn masters(&self) -> Option<&B> {
        self.masters.as_ref()
    }

    pub fn masters_mut(&mut self) -> Option<&mut B> {
        self.masters.as_mut()
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
        len: usize,
        (params, rounded): (PartMut<'_, K::Buf>, Option<PartMut<'_, K::Buf>>),
        grads: BufSlice<'_, K::Buf>,
        (moments, at): (&mut [K::Buf], usize),
    ) {
        let StepNumbers { learning_rate, grad_scale } = numbers;
        let decay = |weight_decay: f64| if decays { weight_decay } else { 0.0 };
        match (self, moments) {
            (&Self::AdamW { beta1, beta2, epsilon, weight_decay }, [first, second]) => {
                let weight_decay = decay(weight_decay);
                let step = AdamW { learning_rate, beta1, beta2, epsilon, weight_decay, step, grad_scale };
                let [first, second] = [first, second].map(|buf| PartMut { buf, start: at });
                kernels.adamw(&step, 0..len, AdamWState { params, rounded, grads, first, second });
            }
            (&Self::Sgd { momentum, weight_decay }, [velocity]) => {
                let weight_decay = decay(weight_decay);
                let step = Sgd { learning_rate, momentum, weight_decay, grad_scale };
                let velocity = PartMut { buf: velocity, start: at };
                kernels.sgd(&step, 0..len, SgdState { params, rounded, grads, velocity });
            }
            (_, moments) => unreachable!("{} moments", moments.len()),
        }
    }
}

/// Neighbouring parameters that decay alike, cut to what is kept.
fn decay_runs(parameters: &[Parameter], kept: &Runs) -> Vec<(Range<usize>, usize, bool)> {
    let mut runs: Vec<(Range<usize>, usize, bool)> = Vec::new();
    for parameter in parameters {
        for (range, at) in kept.within(&parameter.range) {
            match runs.last_mut() {
                Some((last, _, decay)) if *decay == parameter.decay && last.end == range.start => {
                    last.end = range.end
                }
                _ => runs.push((range, at, parameter.decay)),
            }
        }
    }
    runs
}

/// This rank's piece of the squared norm of all gradients: the sum over its own part of the flat buffer of what no other rank along `tp` counts.
/// Summed over the ranks of all stages the pieces are the squared norm. Parameters that another stage counts (tied ones) are named in `elsewhere`.
pub fn norm_piece<K: Kernels>(
    kernels: &K,
    parameters: &[Parameter],
    place: &StageRank,
    own: &Runs,
    (grads, summed): (&K::Buf, &Runs),
    elsewhere: &[&str],
) -> f64 {
    let counts = |p: &&Parameter| is_first_along_tp(p, place) && !elsewhere.contains(&p.name.as_str());
    let runs = parameters.iter().filter(counts).flat_map(|p| own.within(&p.range));
    let runs: Vec<Range<usize>> = runs.map(|(run, _)| summed.at(&run)).collect();
    kernels.sum_squares(grads, &runs)
}

/// Whether ranks along `tp` have different parts of a parameter; else all of them have all of it.
pub fn is_split_over_tp(parameter: &Parameter) -> bool {
    let axes = parameter.layout.mesh().axes();
    splitting(parameter).any(|axis| !DATA_AXES.contains(&axes[axis].name.as_str()))
}

/// Whether a rank is the first of those along `tp`, or along a part of it, that have the same of a parameter.
fn is_first_along_tp(parameter: &Parameter, place: &StageRank) -> bool {
    let axes = parameter.layout.mesh().axes().iter().zip(place.coord()).enumerate();
    axes.into_iter().all(|(i, (axis, at))| {
        DATA_AXES.contains(&axis.name.as_str()) || *at == 0 || splitting(parameter).any(|axis| axis == i)
    })
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
