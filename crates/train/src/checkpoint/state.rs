//! What a rank holds of a stage: what is saved, and what is filled again.

use crate::deal::Share;
use crate::parameter::Parameter;
use crate::stage_rank::StageRank;

/// What an optimizer keeps, as slices (to save) or mutable slices (to load).
#[derive(Debug)]
pub struct Moments<S> {
    /// As `Optimizer::moment_names` has them.
    pub names: &'static [&'static str],
    /// One for every name, each as long as the share.
    pub values: Vec<S>,
    /// Of the flat buffer.
    pub share: Share,
}

impl<S> Moments<S> {
    /// None: of a model that was not trained here.
    pub fn none() -> Self {
        Self { names: &[], values: vec![], share: Share::whole(0) }
    }
}

/// One stage on one rank, to be saved.
#[derive(Debug)]
pub struct StageState<'a, T> {
    pub parameters: &'a [Parameter],
    pub place: &'a StageRank,
    /// What this rank keeps of the flat buffer of parameters.
    pub values: &'a [T],
    pub share: Share,
    pub moments: Moments<&'a [T]>,
    /// Tied parameters that another stage saves: of all stages that have one, one does not list it here.
    pub elsewhere: &'a [&'a str],
}

impl<'a, T> StageState<'a, T> {
    /// All of a stage's weights, and nothing else.
    pub fn of_weights(parameters: &'a [Parameter], place: &'a StageRank, values: &'a [T]) -> Self {
        let (share, moments) = (Share::whole(values.len()), Moments::none());
        Self { parameters, place, values, share, moments, elsewhere: &[] }
    }
}

/// One stage on one rank, to be filled.
#[derive(Debug)]
pub struct StageTarget<'a, T> {
    pub parameters: &'a [Parameter],
    pub place: &'a StageRank,
    /// What this rank keeps of the flat buffer of parameters.
    pub values: &'a mut [T],
    pub share: Share,
    /// None to load parameters alone, for evaluation.
    pub moments: Option<Moments<&'a mut [T]>>,
}

impl<'a, T> StageTarget<'a, T> {
    /// All of a stage's weights, and nothing else.
    pub fn of_weights(parameters: &'a [Parameter], place: &'a StageRank, values: &'a mut [T]) -> Self {
        let share = Share::whole(values.len());
        Self { parameters, place, values, share, moments: None }
    }
}

/// Whether numbers may be loaded in another width than they were saved in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Convert {
    No,
    /// f32 from f64 and the other way round, each rounded to the nearest.
    Yes,
}
