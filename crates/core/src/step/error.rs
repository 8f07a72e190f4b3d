//! Why a step has no program.

use super::lists::ListError;
use crate::id::{DeviceId, Rank, StageId};
use crate::schedule::{CheckError, Edge, Pass};
use crate::verify::VerifyError;

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    #[error("the schedule has {schedule} {what}, the step gives {given}")]
    CountDiffers { what: &'static str, schedule: usize, given: usize },
    #[error("{rank} is on device {} and on device {}\nhint: devices are meshes without a rank in common", first.0, second.0)]
    RankTwice { rank: Rank, first: DeviceId, second: DeviceId },
    #[error(
        "{pass} moves to the host or is part of a shared vocabulary: a step cannot run it yet\nhint: use a schedule of F, B, W, BW, EVICT and LOAD passes"
    )]
    Unsupported { pass: Pass },
    #[error("{pass} sends away what stage {} remembers, and nothing carries it\nhint: give the stage a crossing of its memory", pass.stage.0)]
    NothingKeeps { pass: Pass },
    #[error("crossing `{name}` is between stages {} and {}, the schedule has no such edge", edge.from.0, edge.to.0)]
    NoSuchEdge { name: String, edge: Edge },
    #[error("nothing crosses from stage {} to stage {}, which are on different devices\nhint: give the edge a tensor", from.0, to.0)]
    NothingCrosses { from: StageId, to: StageId },
    #[error("crossing `{name}`: {what} is {value}, not between 0 and 1")]
    BadFraction { name: String, what: &'static str, value: f64 },
    #[error("crossing `{name}` moves {what} at {rank}, which is not on device {}", device.0)]
    WrongMesh { name: String, what: &'static str, rank: Rank, device: DeviceId },
    #[error(
        "the passes of the schedule wait for each other in a cycle, the first is {first}\nhint: check the schedule"
    )]
    Cycle { first: Pass },
    #[error("the schedule cannot be run: {0}")]
    Schedule(Box<CheckError>),
    #[error("crossing `{name}` cannot be drawn in broad strokes: {what}")]
    Coarse { name: String, what: String },
    #[error(
        "{rank} has no list of what it does inside {pass}\nhint: a list has the passes of its rank's device, in their order, and none that is cut"
    )]
    NoList { rank: Rank, pass: Pass },
    #[error("what ranks do inside their passes would never end: {0}")]
    Lists(#[from] ListError),
    #[error(transparent)]
    Verify(Box<VerifyError>),
}

impl From<VerifyError> for StepError {
    fn from(error: VerifyError) -> Self {
        Self::Verify(Box::new(error))
    }
}

impl From<CheckError> for StepError {
    fn from(error: CheckError) -> Self {
        Self::Schedule(Box::new(error))
    }
}
