//! A step as a document, `crossmesh.step/1`: everything from which its program can be made again.

use serde::{Deserialize, Serialize};

use super::{Carries, Crossing, PassTimes, Step, StepError};
use crate::id::{DeviceId, Rank, StageId};
use crate::layout::Layout;
use crate::reshard::doc::{ClusterDoc, PlanDocError};
use crate::reshard::problem::Hosts;
use crate::reshard::{Plan, PlanError, PlanOptions, Problem, plan};
use crate::schedule::{Edge, Pass, PassError, Placement, Routes, Schedule, ScheduleError};

pub const SCHEMA: &str = "crossmesh.step/1";

/// See the module. Times are nanoseconds on each rank; layouts are in the usual notation, with the ranks of their meshes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepDoc {
    pub schema: String,
    pub schedule: ScheduleDoc,
    pub cluster: ClusterDoc,
    /// The ranks of every device.
    pub ranks: Vec<Vec<u32>>,
    /// By virtual stage.
    pub times: Vec<TimesDoc>,
    pub crossings: Vec<CrossingDoc>,
    pub overlap: bool,
    #[serde(default)]
    pub lockstep: bool,
    pub strategy: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduleDoc {
    pub name: String,
    pub microbatches: u32,
    /// The device of every virtual stage.
    pub device_of: Vec<u32>,
    /// Pairs of stages that a tensor jumps between.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub skips: Vec<[u32; 2]>,
    /// The passes of every device, such as `2F0`.
    pub devices: Vec<Vec<String>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TimesDoc {
    pub f_ns: u64,
    pub b_ns: u64,
    pub w_ns: u64,
    #[serde(default)]
    pub optimizer_ns: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CrossingDoc {
    pub name: String,
    pub from: u32,
    pub to: u32,
    pub src: String,
    pub dst: String,
    #[serde(default = "one")]
    pub made: f64,
    #[serde(default)]
    pub needed: f64,
    /// Whether it is what a stage remembers of a microbatch, which the other one's device keeps.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub memory: bool,
}

fn one() -> f64 {
    1.0
}

/// Why a document is no step.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StepDocError {
    #[error("not a step: {0}")]
    Syntax(String),
    #[error("schema is `{0}`, not {SCHEMA}")]
    Schema(String),
    #[error("crossing `{name}`: {why}")]
    Crossing { name: String, why: String },
    #[error("unknown strategy: {0}")]
    Strategy(String),
    #[error(transparent)]
    Cluster(#[from] PlanDocError),
    #[error(transparent)]
    Pass(#[from] PassError),
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    #[error(transparent)]
    Step(#[from] StepError),
}

impl ScheduleDoc {
    pub fn new(schedule: &Schedule) -> Self {
        let placement = schedule.placement();
        let names = |order: &Vec<Pass>| order.iter().map(ToString::to_string).collect();
        Self {
            name: schedule.name().into(),
            microbatches: schedule.num_microbatches(),
            device_of: placement.stages().map(|s| placement.device(s).0).collect(),
            skips: schedule.routes().skips().iter().map(|e| [e.from.0, e.to.0]).collect(),
            devices: schedule.devices().iter().map(names).collect(),
        }
    }

    pub fn to_schedule(&self) -> Result<Schedule, StepDocError> {
        let placement = Placement::new(self.device_of.iter().copied().map(DeviceId).collect())?;
        let edge = |[from, to]: &[u32; 2]| Edge { from: StageId(*from), to: StageId(*to) };
        let skips = self.skips.iter().map(edge).collect();
        let routes = Routes::model_order(placement.num_stages()).with_skips(skips)?;
        let order = |names: &Vec<String>| names.iter().map(|n| n.parse()).collect::<Result<Vec<Pass>, _>>();
        let devices = self.devices.iter().map(order).collect::<Result<Vec<_>, _>>()?;
        Ok(Schedule::new(self.name.clone(), placement, routes, self.microbatches, devices)?)
    }
}

impl StepDoc {
    /// Reads a document's text.
    pub fn parse(text: &str) -> Result<Self, StepDocError> {
        serde_json::from_str(text).map_err(|error| StepDocError::Syntax(error.to_string()))
    }

    /// Makes the step: plans every crossing, both ways.
    pub fn to_step(&self) -> Result<Step, StepDocError> {
        if self.schema != SCHEMA {
            return Err(StepDocError::Schema(self.schema.clone()));
        }
        let cluster = self.cluster.to_cluster()?;
        let strategy = self.strategy.parse().map_err(|_| StepDocError::Strategy(self.strategy.clone()))?;
        let options = PlanOptions { strategy, ..PlanOptions::default() };
        let crossing = |c: &CrossingDoc| -> Result<Crossing, StepDocError> {
            let hosts = || Hosts::Described(cluster.clone());
            let (src, dst) = (c.layout(&c.src)?, c.layout(&c.dst)?);
            let reshard = |src: Layout, dst: Layout| -> Result<Plan, PlanError> {
                plan(&Problem::new(vec![(c.name.clone(), src, dst)], hosts())?, &options)
            };
            let refused = |e: PlanError| StepDocError::Crossing { name: c.name.clone(), why: e.to_string() };
            Ok(Crossing {
                name: c.name.clone(),
                edge: Edge { from: StageId(c.from), to: StageId(c.to) },
                forward: reshard(src.clone(), dst.clone()).map_err(refused)?,
                backward: reshard(dst, src).map_err(refused)?,
                carries: if c.memory { Carries::Memory } else { Carries::Tensors },
                made: c.made,
                needed: c.needed,
            })
        };
        let times = |t: &TimesDoc| PassTimes {
            f_ns: t.f_ns,
            b_ns: t.b_ns,
            w_ns: t.w_ns,
            optimizer_ns: t.optimizer_ns,
        };
        Ok(Step {
            schedule: self.schedule.to_schedule()?,
            ranks: self.ranks.iter().map(|ranks| ranks.iter().copied().map(Rank).collect()).collect(),
            times: self.times.iter().map(times).collect(),
            crossings: self.crossings.iter().map(crossing).collect::<Result<_, _>>()?,
            overlap: self.overlap,
            lockstep: self.lockstep,
            cluster,
        })
    }
}

impl CrossingDoc {
    fn layout(&self, words: &str) -> Result<Layout, StepDocError> {
        let refused = |e: String| StepDocError::Crossing { name: self.name.clone(), why: e };
        words.parse().map_err(|e: crate::layout::NotationError| refused(e.to_string()))
    }
}
