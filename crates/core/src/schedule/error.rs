//! What can be wrong with a schedule, its inputs or its costs. Every message names the pass, the device and the rule.

use crate::id::{DeviceId, MicrobatchId, StageId};

use super::{Edge, Pass};

/// Why there is no such schedule.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    #[error("a pipeline needs at least one stage and one device")]
    NoStages,
    #[error("a step needs at least one microbatch")]
    NoMicrobatches,
    #[error("{stages} stages are more than the {limit} that a schedule may have")]
    TooManyStages { stages: u64, limit: usize },
    #[error(
        "{stages} stages with {microbatches} microbatches are more than the {limit} passes of a kind that a schedule may have"
    )]
    TooManyPasses { stages: u64, microbatches: u64, limit: u64 },
    #[error("{device} holds no stage, but {last} does\nhint: number the devices from 0 without a hole")]
    EmptyDevice { device: DeviceId, last: DeviceId },
    #[error("{stage} is on no device, although {known} is on one")]
    StageHole { stage: StageId, known: StageId },
    #[error("{stage} is on {first} and on {second}")]
    StageTwice { stage: StageId, first: DeviceId, second: DeviceId },
    #[error("there is no {stage}: the model has {num_stages}")]
    NoSuchStage { stage: StageId, num_stages: usize },
    #[error("{microbatch} visits no stage")]
    EmptyRoute { microbatch: MicrobatchId },
    #[error("{microbatch} visits {stage} twice")]
    RouteTwice { microbatch: MicrobatchId, stage: StageId },
    #[error("the skip from {} to {} is none\nhint: a skip goes forward over at least one of the {num_stages} stages", edge.from, edge.to)]
    BadSkip { edge: Edge, num_stages: usize },
    #[error("there are routes for {routes} {what}, the schedule has {wanted}")]
    RoutesDiffer { routes: usize, wanted: usize, what: &'static str },
    #[error("there are orders for {orders} devices, the stages are on {devices}")]
    DevicesDiffer { orders: usize, devices: usize },

    #[error("{pass} on {device} is of {}: there are {num_microbatches}", pass.microbatch)]
    NoSuchMicrobatch { pass: Pass, device: DeviceId, num_microbatches: u32 },
    #[error("{pass} on {device} is of {}: the model has {num_stages}", pass.stage)]
    PassOfNoStage { pass: Pass, device: DeviceId, num_stages: usize },
    #[error("{pass} is on {device}, but {} is on {home}", pass.stage)]
    WrongDevice { pass: Pass, device: DeviceId, home: DeviceId },
    #[error("{pass} is on {device} twice")]
    PassTwice { pass: Pass, device: DeviceId },
    #[error("{pass} is on {device}, but {} does not visit {}", pass.microbatch, pass.stage)]
    OffRoute { pass: Pass, device: DeviceId },

    #[error(
        "the cost of {what} is {value:?}\nhint: costs are times: finite, and not negative; 0, or from 1e-100 to 1e100"
    )]
    BadCost { what: String, value: f64 },
    #[error("{first} and {second} cannot start together: the second does not follow the first on its device")]
    PairApart { first: Pass, second: Pass },
    #[error("{device} has no pass")]
    IdleDevice { device: DeviceId },
}
