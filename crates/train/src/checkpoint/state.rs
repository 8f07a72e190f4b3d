//! What a rank holds of a stage: what is saved, and what is filled again.

use std::ops::Range;

use crate::parameter::Parameter;
use crate::stage_rank::StageRank;

/// Whether ranks along `dp` hold the same moments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharding {
    /// Each holds those of all its parameters.
    Replicated,
    /// ZeRO-1: each holds a run of the flat buffer, and together they hold all of it.
    AlongDp,
}

/// What an optimizer keeps, as slices (to save) or mutable slices (to load).
#[derive(Debug)]
pub struct Moments<S> {
    /// As `Optimizer::moment_names` has them.
    pub names: &'static [&'static str],
    /// One for every name, each as long as the shard.
    pub values: Vec<S>,
    /// Of the flat buffer.
    pub shard: Range<usize>,
    pub sharding: Sharding,
}

/// One stage on one rank, to be saved.
#[derive(Debug)]
pub struct StageState<'a, T> {
    pub parameters: &'a [Parameter],
    pub place: &'a StageRank,
    /// The flat buffer of parameters.
    pub values: &'a [T],
    pub moments: Moments<&'a [T]>,
    /// Tied parameters that another stage saves: of all stages that have one, one does not list it here.
    pub elsewhere: &'a [&'a str],
}

/// One stage on one rank, to be filled.
#[derive(Debug)]
pub struct StageTarget<'a, T> {
    pub parameters: &'a [Parameter],
    pub place: &'a StageRank,
    /// The flat buffer of parameters.
    pub values: &'a mut [T],
    /// None to load parameters alone, for evaluation.
    pub moments: Option<Moments<&'a mut [T]>>,
}

/// Whether numbers may be loaded in another width than they were saved in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Convert {
    No,
    /// f32 from f64 and the other way round, each rounded to the nearest.
    Yes,
}
