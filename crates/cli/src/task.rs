//! What a rank of a run is there for: a plan, or a training step.

use std::borrow::Cow;
use std::path::Path;

use anyhow::{Context, Result, bail};
use crossmesh_comm::device::VirtualDevice;
use crossmesh_comm::error::CommError;
use crossmesh_comm::execute::{Barrier, ExecuteOptions, Failure, RankReport, execute};
use crossmesh_comm::step::execute_step;
use crossmesh_comm::transport::Link;
use crossmesh_core::id::Rank;
use crossmesh_core::program::Program;
use crossmesh_core::reshard::{Plan, lower};
use crossmesh_core::step::doc::StepDoc;
use crossmesh_core::step::{Step, StepProgram, lower_step};

use crate::input::{PlanFile, read_plan};

/// See the module.
#[expect(clippy::large_enum_variant, reason = "a process has one of it")]
pub enum Task<'a> {
    Plan { plan: Cow<'a, Plan>, program: Program },
    Step { step: Cow<'a, Step>, lowered: Cow<'a, StepProgram> },
}

impl<'a> Task<'a> {
    pub fn of_plan(plan: &'a Plan) -> Self {
        Task::Plan { program: lower(plan), plan: Cow::Borrowed(plan) }
    }

    /// Reads the one document that is given.
    pub fn read(plan: Option<&Path>, step: Option<&Path>) -> Result<Self> {
        match (plan, step) {
            (Some(path), None) => {
                let PlanFile { plan, .. } = read_plan(path)?;
                Ok(Task::Plan { program: lower(&plan), plan: Cow::Owned(plan) })
            }
            (None, Some(path)) => {
                let text = std::fs::read_to_string(path)
                    .with_context(|| format!("cannot read the step {}", path.display()))?;
                let doc: StepDoc = serde_json::from_str(&text)
                    .with_context(|| format!("{} is not a step", path.display()))?;
                let step = doc.to_step()?;
                let lowered = lower_step(&step)?;
                Ok(Task::Step { step: Cow::Owned(step), lowered: Cow::Owned(lowered) })
            }
            _ => bail!("a rank runs either a plan or a step"),
        }
    }

    /// How a rank is told which kind of document to read.
    pub fn flag(&self) -> &'static str {
        match self {
            Task::Plan { .. } => "--plan",
            Task::Step { .. } => "--step",
        }
    }

    /// The ranks that take part, in order.
    pub fn ranks(&self) -> Vec<Rank> {
        match self {
            Task::Plan { plan, .. } => plan.problem.meshes_of_ranks().into_keys().collect(),
            Task::Step { step, .. } => {
                let mut ranks: Vec<Rank> = step.ranks.iter().flatten().copied().collect();
                ranks.sort_unstable();
                ranks
            }
        }
    }

    pub fn program(&self) -> &Program {
        match self {
            Task::Plan { program, .. } => program,
            Task::Step { lowered, .. } => &lowered.program,
        }
    }

    pub fn execute(
        &self,
        rank: Rank,
        links: Vec<(Rank, Box<dyn Link>)>,
        options: &ExecuteOptions,
        barrier: &mut Barrier<'_>,
    ) -> Result<RankReport, Failure> {
        match self {
            Task::Plan { plan, .. } => execute(plan, rank, links, options, barrier),
            Task::Step { step, lowered } => {
                let device = VirtualDevice::new().map_err(|e| CommError::System {
                    me: rank,
                    what: "make a virtual device",
                    cause: e.to_string(),
                })?;
                execute_step(step, lowered, rank, links, Box::new(device), options, barrier)
            }
        }
    }
}
