//! A training job, as every rank knows it: which stage runs on which mesh, in which order, and how weights are updated.
//!
//! ```text
//! model, cut into stages   0 embed, block 0 | 1 block 1, block 2 | 2 block 3, head
//! schedule                 which device runs which stages, and in what order
//! devices                  a mesh of ranks for every device: (dp 2, tp 2), (dp 4), (tp 3)
//! ```
//!
//! A job says nothing about where its data comes from or who starts its ranks. [`crate::wiring`] makes a step of it.

use std::ops::Range;
use std::path::PathBuf;

use crossmesh_core::cluster::Cluster;
use crossmesh_core::id::{DeviceId, Rank, StageId};
use crossmesh_core::mesh::Mesh;
use crossmesh_core::reshard::PlanOptions;
use crossmesh_core::schedule::Schedule;
use crossmesh_core::step::PassTimes;

use crate::graph::Policies;
use crate::optim::OptimizerConfig;
use crate::optim::schedule::Schedule as Rate;
use crate::stage::Recompute;
use crate::stage_rank::{StageRank, StageRankError};

/// The ranks that run a device's stages together.
#[derive(Debug, Clone, PartialEq)]
pub struct Team {
    /// Data axes and `tp`.
    pub mesh: Mesh,
    /// By position in the mesh, row-major.
    pub ranks: Vec<Rank>,
    /// Whether the rows between tensor-parallel regions are split over `tp`.
    pub sequence_parallel: bool,
}

/// How weights become the next step's.
#[derive(Debug, Clone, PartialEq)]
pub struct Update {
    pub optimizer: OptimizerConfig,
    pub rate: Rate,
    /// The largest norm of all gradients together.
    pub clip: Option<f64>,
    pub dealt: Dealt,
    /// Whether every microbatch's gradients are summed over the data axes in the order of the ranks, wherever the sums go: then no bit of a
    /// result depends on what is dealt out. For comparing; it sends all summands to everybody.
    pub fixed_order: bool,
    /// Gradients are summed over `dp` in pieces of about so many bytes, as soon as they are complete.
    pub bucket_bytes: u64,
}

impl Update {
    pub const BUCKET_BYTES: u64 = 1 << 20;

    pub fn new(optimizer: OptimizerConfig, rate: Rate) -> Self {
        Self {
            optimizer,
            rate,
            clip: None,
            dealt: Dealt::default(),
            fixed_order: false,
            bucket_bytes: Self::BUCKET_BYTES,
        }
    }
}

/// What ranks along the data axes keep parts of, and over which of them (see [`crate::deal`]).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Dealt {
    /// P.
    pub parameters: Over,
    /// G: where it is dealt out, every microbatch's gradients are summed as soon as they are there.
    pub gradients: Over,
    /// O: the optimizer's moments.
    pub states: Over,
}

impl Dealt {
    /// ZeRO's stages: states, gradients too, parameters too.
    pub fn zero(stage: usize) -> Self {
        let over = |least: usize| if stage >= least { Over::All } else { Over::Nothing };
        Self { states: over(1), gradients: over(2), parameters: over(3) }
    }

    /// Whether a rank has what its step needs: of parameters and gradients, at least what it keeps states of.
    pub fn check(&self, place: &StageRank) -> Result<(), JobError> {
        let states = self.states.axes(place);
        for (what, over) in [("parameters", &self.parameters), ("gradients", &self.gradients)] {
            if let Some(&lacking) = over.axes(place).iter().find(|axis| !states.contains(axis)) {
                let (mesh, axis) =
                    (Box::new(place.mesh().clone()), place.mesh().axes()[lacking].name.clone());
                return Err(JobError::Dealt { what, axis, mesh });
            }
        }
        Ok(())
    }
}

/// Some of a mesh's data axes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Over {
    #[default]
    Nothing,
    All,
    Axes(Vec<String>),
}

impl Over {
    /// By their places in a rank's mesh, which need not have all of them: over an axis that is not there nothing is dealt out.
    pub fn axes(&self, place: &StageRank) -> Vec<usize> {
        let data = place.data_axes();
        match self {
            Over::Nothing => vec![],
            Over::All => data,
            Over::Axes(names) => {
                data.into_iter().filter(|&i| names.contains(&place.mesh().axes()[i].name)).collect()
            }
        }
    }
}

/// See the module.
#[derive(Debug, Clone)]
pub struct Job {
    pub schedule: Schedule,
    /// By stage: its units of the model.
    pub stages: Vec<Range<usize>>,
    /// By device of the schedule.
    pub teams: Vec<Team>,
    pub cluster: Cluster,
    /// Samples of a microbatch, over all ranks along `dp`.
    pub samples: usize,
    /// By stage.
    pub recompute: Vec<Recompute>,
    /// What goes before `recompute` and `offload`, by unit and op.
    pub policies: Policies,
    /// The folder where what units keep from F to B waits, if not in memory.
    pub offload: Option<PathBuf>,
    /// Two halves of a microbatch that take turns, or one.
    pub strands: u32,
    /// Of the initial weights, and of random numbers during training.
    pub seed: u64,
    pub update: Update,
    /// How activations and gradients cross between stages.
    pub plan: PlanOptions,
    /// Whether they do beside compute.
    pub overlap: bool,
    /// Whether only a byte crosses in their place, and stages compute with synthetic numbers: for measuring what communication costs.
    pub signal: bool,
    /// By stage: how long passes are thought to take, for predictions.
    pub times: Vec<PassTimes>,
}

/// A job that does not fit together.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    #[error("{given} {what} are given, and the schedule has {wanted}")]
    Count { what: &'static str, given: usize, wanted: usize },
    #[error("the mesh {mesh} of {device} has {len} positions and {ranks} ranks")]
    Ranks { device: DeviceId, mesh: Box<Mesh>, len: usize, ranks: usize },
    #[error(
        "{what} are dealt out over `{axis}` of {mesh}, and the optimizer's states are not\nhint: a rank updates what it keeps states of, so deal states out over `{axis}` too"
    )]
    Dealt { what: &'static str, axis: String, mesh: Box<Mesh> },
    #[error("{stage} has the units {units:?}, and the one before it ends at {wanted}")]
    Gap { stage: StageId, units: Range<usize>, wanted: usize },
    #[error(
        "{stage} has no units: the schedule has {stages} stages, and the model {units} units\nhint: use fewer chunks, or a deeper model"
    )]
    Empty { stage: StageId, stages: usize, units: usize },
    #[error("the stages end at unit {end} of {units}")]
    Short { end: usize, units: usize },
    #[error(transparent)]
    StageRank(#[from] StageRankError),
    #[error(transparent)]
    Model(#[from] crate::models::ConfigError),
    #[error(transparent)]
    Connect(#[from] crate::stage::ConnectError),
    #[error("{stage} evicts what it remembers, and the schedule has no device that keeps it")]
    NoKeeper { stage: StageId },
    #[error("no plan for `{name}`")]
    Plan { name: String, source: crossmesh_core::reshard::PlanError },
    #[error(transparent)]
    Schedule(#[from] crossmesh_core::schedule::ScheduleError),
    #[error(transparent)]
    Step(#[from] crossmesh_core::step::StepError),
    #[error("no plan for what ranks say to each other inside a pass: {0}")]
    Collective(#[from] crossmesh_core::collective::CollectiveError),
}

impl Job {
    /// Samples of a step.
    pub fn batch(&self) -> u64 {
        self.samples as u64 * u64::from(self.schedule.num_microbatches())
    }

    /// All ranks, in order.
    pub fn ranks(&self) -> Vec<Rank> {
        let mut ranks: Vec<Rank> = self.teams.iter().flat_map(|t| &t.ranks).copied().collect();
        ranks.sort_unstable();
        ranks
    }

    /// A rank's device and position in its mesh.
    pub fn home(&self, rank: Rank) -> Option<(DeviceId, usize)> {
        let at =
            |(i, team): (usize, &Team)| Some((DeviceId::at(i), team.ranks.iter().position(|r| *r == rank)?));
        self.teams.iter().enumerate().find_map(at)
    }

    pub fn team_of(&self, stage: StageId) -> &Team {
        &self.teams[self.schedule.placement().device(stage).index()]
    }

    /// Where a position of a device's mesh is.
    pub fn place(&self, device: DeviceId, position: usize) -> Result<StageRank, StageRankError> {
        StageRank::new(self.teams[device.index()].mesh.clone(), position)
    }

    /// Refuses what does not fit together.
    pub fn check(&self, num_units: usize) -> Result<(), JobError> {
        let placement = self.schedule.placement();
        let count = |what, given, wanted| match given == wanted {
            true => Ok(()),
            false => Err(JobError::Count { what, given, wanted }),
        };
        count("meshes", self.teams.len(), placement.num_devices())?;
        count("stages", self.stages.len(), placement.num_stages())?;
        count("times", self.times.len(), placement.num_stages())?;
        count("rules for recomputation", self.recompute.len(), placement.num_stages())?;
        for (device, team) in placement.devices().zip(&self.teams) {
            let (len, ranks) = (team.mesh.len(), team.ranks.len());
            if len != ranks {
                return Err(JobError::Ranks { device, mesh: Box::new(team.mesh.clone()), len, ranks });
            }
            self.update.dealt.check(&self.place(device, 0)?)?;
        }
        let mut next = 0;
        for (stage, units) in placement.stages().zip(&self.stages) {
            if units.start != next || units.end < units.start {
                return Err(JobError::Gap { stage, units: units.clone(), wanted: next });
            }
            if units.is_empty() {
                return Err(JobError::Empty { stage, stages: self.stages.len(), units: num_units });
            }
            next = units.end;
        }
        match next == num_units {
            true => Ok(()),
            false => Err(JobError::Short { end: next, units: num_units }),
        }
    }
}
