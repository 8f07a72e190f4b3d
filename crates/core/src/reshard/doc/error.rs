//! Why a document is not a plan.

use crate::layout::NotationError;
use crate::reshard::problem::PlanError;

/// What is wrong with a plan document, with the transfer and the field.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanDocError {
    #[error("not a plan document: {message} (line {line}, column {column})")]
    Json { line: usize, column: usize, message: String },
    #[error(
        "the plan has schema `{schema}`, newer than this program's `crossmesh.plan/1`\nhint: use the version of crossmesh that wrote it, or plan again"
    )]
    NewerSchema { schema: String },
    #[error("unknown schema `{schema}`\nhint: a plan document starts with \"schema\": \"crossmesh.plan/1\"")]
    UnknownSchema { schema: String },
    #[error("the document names no tensor\nhint: give `src` and `dst`, or `tensors`")]
    NoTensors,
    #[error("`src` and `dst` contradict `tensors`: {top} and {listed}")]
    TensorsContradict { top: String, listed: String },
    #[error("tensor {tensor}, `{side}`: {source}")]
    Layout { tensor: usize, side: &'static str, source: Box<NotationError> },
    #[error(transparent)]
    Problem(#[from] PlanError),
    #[error("cluster: `{field}` cannot be {value}")]
    Cluster { field: &'static str, value: String },
    #[error("`devices` lists rank {found} where rank {expected} belongs\nhint: ranks count up from 0")]
    DeviceOrder { expected: u32, found: u32 },
    #[error("`devices` puts rank {rank} on host {host}, {why}")]
    DeviceHost { rank: u32, host: u32, why: String },
    #[error("`devices` lists {listed} devices, the cluster has {devices}")]
    DeviceCount { listed: usize, devices: usize },
    #[error("`devices` says rank {rank} is in {listed:?}, the layouts say {meshes:?}")]
    DeviceMeshes { rank: u32, listed: Vec<String>, meshes: Vec<String> },
    #[error("`{field}` cannot be {value}")]
    Figure { field: &'static str, value: String },
    #[error("the document has more than 2^32 transfers or `after` entries")]
    TooLarge,
    #[error("transfer {id} is listed twice, and would deliver its box twice")]
    IdTwice { id: u32 },
    #[error("transfer {id}: `id` follows id {previous}\nhint: ids rise along the list")]
    IdOrder { id: u32, previous: u32 },
    #[error("transfer {id}: `tensor` is {tensor}, the document has {tensors}")]
    Tensor { id: u32, tensor: u32, tensors: usize },
    #[error("transfer {id}: `{field}` is rank {rank}, the cluster has {devices} devices")]
    Rank { id: u32, field: &'static str, rank: u32, devices: usize },
    #[error("transfer {id}: `region` has {found} dims, the tensor has {dims}")]
    RegionDims { id: u32, found: usize, dims: usize },
    #[error("transfer {id}: `region` runs backwards in dim {dim}: [{start}, {end}]")]
    RegionBackwards { id: u32, dim: usize, start: u64, end: u64 },
    #[error("transfer {id}: `region` ends at {end} in dim {dim}, the tensor at {dim_len}")]
    RegionOutside { id: u32, dim: usize, end: u64, dim_len: u64 },
    #[error("transfer {id}: `bytes` is {stated}, its region has {region_bytes}")]
    Bytes { id: u32, stated: u64, region_bytes: u64 },
    #[error("transfer {id}: `weight` is 0\nhint: leave it out to share links by size")]
    WeightZero { id: u32 },
    #[error("transfer {id}: `reduce` is `{found}`, the source layout says {expected}")]
    Reduce { id: u32, found: String, expected: String },
    #[error(
        "transfer {id}: `link` is `{stated}`, but r{src} is on host {src_host} and r{dst} on host {dst_host}"
    )]
    Link { id: u32, stated: &'static str, src: u32, dst: u32, src_host: u32, dst_host: u32 },
    #[error("transfer {id}: `after` names transfer {after}, which is not in the list")]
    UnknownAfter { id: u32, after: u32 },
}

impl PlanDocError {
    /// The law that a plan breaks if the document is readable and only what it says is wrong; none where it cannot be
    /// read as a plan at all.
    pub fn law(&self) -> Option<&'static str> {
        use PlanDocError::*;
        match self {
            UnknownAfter { .. } => Some("causality"),
            IdTwice { .. } => Some("coverage"),
            IdOrder { .. } | Tensor { .. } | Rank { .. } | RegionDims { .. } => Some("malformed"),
            RegionBackwards { .. } | RegionOutside { .. } | Bytes { .. } | WeightZero { .. } => {
                Some("malformed")
            }
            Reduce { .. } | Link { .. } => Some("malformed"),
            _ => None,
        }
    }
}

impl From<serde_json::Error> for PlanDocError {
    fn from(error: serde_json::Error) -> Self {
        let (line, column) = (error.line(), error.column());
        let text = error.to_string();
        let message = text.split(" at line ").next().unwrap_or(&text).into();
        PlanDocError::Json { line, column, message }
    }
}
