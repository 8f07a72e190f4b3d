//! What a rank of a run is there for: a plan, a training step, a sweep of collectives, training, or a model that talks.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use crossmesh_comm::device::VirtualDevice;
use crossmesh_comm::error::CommError;
use crossmesh_comm::lab::execute::{Barrier, ExecuteOptions, Failure, RankReport, execute, peers_of};
use crossmesh_comm::lab::sweep::{Sweep, execute_sweep};
use crossmesh_comm::step::execute_step;
use crossmesh_comm::transport::Link;
use crossmesh_comm::transport::tcp::Shares;
use crossmesh_core::cluster::{Cluster, Host, Topology};
use crossmesh_core::id::Rank;
use crossmesh_core::program::doc::ProgramDoc;
use crossmesh_core::program::{OpKind, Program};
use crossmesh_core::reshard::Plan;
use crossmesh_core::reshard::lower::Addressing;
use crossmesh_core::step::doc::StepDoc;
use crossmesh_core::step::{Step, StepProgram, lower_step};
use crossmesh_core::verify::Verified;

use crate::handed::{self, Handed};
use crate::input::{Document, read_document, read_plan};
use crate::predict::Violation;
use crate::sweep_doc::SweepDoc;
use crate::talk::{self, OnTalked, Talk};
use crate::training::{self, OnStep, Training};

/// A step, a checkpoint, and what a slow disk takes for it.
const TIME_TO_SAVE: Duration = Duration::from_secs(60);

/// See the module.
#[expect(clippy::large_enum_variant, reason = "a process has one of it")]
pub enum Task<'a> {
    Plan {
        plan: Cow<'a, Plan>,
        program: Verified,
    },
    /// A program of its own, from a document.
    Program {
        program: Verified,
        cluster: Cluster,
    },
    /// One rank's part of a plan or a program, by the word of the process that started the rank.
    Handed(Handed),
    Step {
        step: Cow<'a, Step>,
        lowered: Cow<'a, StepProgram>,
    },
    Sweep {
        sweep: Cow<'a, Sweep>,
    },
    Train {
        training: Cow<'a, Training>,
    },
    Generate {
        talk: Cow<'a, Talk>,
    },
}

impl<'a> Task<'a> {
    pub fn of_plan(plan: &'a Plan, program: &Verified) -> Self {
        Task::Plan { program: program.clone(), plan: Cow::Borrowed(plan) }
    }

    /// Proves the plan: nothing that breaks a law is run.
    pub fn of_owned_plan(plan: Plan) -> Result<Task<'static>> {
        let program = Verified::plan(&plan, Addressing::Apart)
            .map_err(|error| anyhow!("the plan breaks a law: {}", Violation::from(error)))?;
        Ok(Task::Plan { program, plan: Cow::Owned(plan) })
    }

    /// The program that a document describes, proven.
    pub fn of_program_doc(doc: &ProgramDoc) -> Result<Task<'static>> {
        let program = doc.to_program()?;
        if program.ranks.iter().flat_map(|r| &r.ops).any(|op| matches!(op.kind, OpKind::Compute { .. })) {
            bail!(
                "the program computes, and nobody here knows what\nhint: `crossmesh bench pipeline` runs steps"
            );
        }
        let alone = || Cluster::of_hosts(vec![Host::with_devices(doc.num_ranks.max(1))]);
        let cluster = doc.to_cluster()?.unwrap_or_else(alone);
        let program = Verified::program(program)
            .map_err(|error| anyhow!("the program breaks a law: {}", Violation::from(error)))?;
        Ok(Task::Program { program, cluster })
    }

    /// The step that a document describes.
    pub fn of_step_doc(text: &str) -> Result<Task<'static>> {
        let step = StepDoc::parse(text)?.to_step()?;
        let lowered = lower_step(&step)?;
        Ok(Task::Step { step: Cow::Owned(step), lowered: Cow::Owned(lowered) })
    }

    pub fn of_step(step: &'a Step, lowered: &'a StepProgram) -> Self {
        Task::Step { step: Cow::Borrowed(step), lowered: Cow::Borrowed(lowered) }
    }

    pub fn of_sweep(sweep: &'a Sweep) -> Self {
        Task::Sweep { sweep: Cow::Borrowed(sweep) }
    }

    pub fn of_training(training: &'a Training) -> Self {
        Task::Train { training: Cow::Borrowed(training) }
    }

    /// Reads a document of training; `on_step` hears of every step.
    pub fn read_training(path: &Path, on_step: OnStep) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the training job {}", path.display()))?;
        Ok(Task::Train { training: Cow::Owned(Training::read(&text, on_step)?) })
    }

    pub fn of_talk(talk: &'a Talk) -> Self {
        Task::Generate { talk: Cow::Borrowed(talk) }
    }

    /// Reads what to generate; `on_talked` hears what was said.
    pub fn read_talk(path: &Path, on_talked: OnTalked) -> Result<Self> {
        Ok(Task::Generate { talk: Cow::Owned(Talk::read(path, on_talked)?) })
    }

    /// Reads the part that this rank was handed.
    pub fn read_handed(path: &Path) -> Result<Self> {
        Ok(Task::Handed(handed::read(path)?))
    }

    /// What each rank is handed, where it need not read and prove all of it.
    pub fn hand(&self, rank: Rank, ranks: &[Rank], shares: &Shares) -> Option<Result<String>> {
        match self {
            Task::Plan { program, .. } | Task::Program { program, .. } => {
                Some(handed::write(program, rank, ranks, shares))
            }
            _ => None,
        }
    }

    /// Reads the one document that is given.
    pub fn read(plan: Option<&Path>, step: Option<&Path>, sweep: Option<&Path>) -> Result<Self> {
        match (plan, step, sweep) {
            (Some(path), None, None) => match read_document(path)? {
                Document::Plan(_) => Self::of_owned_plan(read_plan(path)?.plan),
                Document::Program(doc) => Self::of_program_doc(&doc),
                Document::Step(_) => bail!("{} is a step, where a plan or a program is run", path.display()),
            },
            (None, Some(path), None) => {
                let text = std::fs::read_to_string(path)
                    .with_context(|| format!("cannot read the step {}", path.display()))?;
                Self::of_step_doc(&text).with_context(|| path.display().to_string())
            }
            (None, None, Some(path)) => Ok(Task::Sweep { sweep: Cow::Owned(SweepDoc::read(path)?) }),
            _ => bail!("a rank runs either a plan, a step or a sweep"),
        }
    }

    /// How a rank is told which kind of document to read.
    pub fn flag(&self) -> &'static str {
        match self {
            Task::Plan { .. } | Task::Program { .. } | Task::Handed(_) => "--handed",
            Task::Step { .. } => "--step",
            Task::Sweep { .. } => "--sweep",
            Task::Train { .. } => "--train",
            Task::Generate { .. } => "--generate",
        }
    }

    /// The ranks that take part, in order.
    pub fn ranks(&self) -> Vec<Rank> {
        match self {
            Task::Plan { plan, program } => {
                // Ranks of no mesh may pass something on.
                let busy = (0..).map(Rank).zip(&program.ranks).filter(|(_, r)| !r.ops.is_empty());
                let mut ranks: BTreeSet<Rank> = plan.problem.meshes_of_ranks().into_keys().collect();
                ranks.extend(busy.map(|(rank, _)| rank));
                ranks.into_iter().collect()
            }
            Task::Program { program, .. } => {
                let busy = (0..).map(Rank).zip(&program.ranks).filter(|(_, r)| !r.is_idle());
                busy.map(|(rank, _)| rank).collect()
            }
            Task::Handed(handed) => handed.ranks.clone(),
            Task::Step { step, .. } => {
                let mut ranks: Vec<Rank> = step.ranks.iter().flatten().copied().collect();
                ranks.sort_unstable();
                ranks
            }
            Task::Sweep { sweep } => {
                let mut ranks = sweep.groups.concat();
                ranks.sort_unstable();
                ranks
            }
            Task::Train { training } => training.resolved.job.ranks(),
            Task::Generate { talk } => talk.ranks(),
        }
    }

    /// The ranks that a rank talks to.
    pub fn peers(&self, rank: Rank) -> Vec<Rank> {
        match self {
            Task::Plan { program, .. } | Task::Program { program, .. } => peers_of(program, rank),
            Task::Handed(handed) => peers_of(handed.program.whole(), rank),
            Task::Step { lowered, .. } => peers_of(&lowered.program, rank),
            Task::Sweep { sweep } => sweep.peers(rank),
            Task::Train { training } => training.wiring.peers(rank),
            Task::Generate { talk } => talk.ranks().into_iter().filter(|other| *other != rank).collect(),
        }
    }

    /// What ranks begin together: every run, or every case of a sweep.
    pub fn num_rounds(&self, repeat: u32) -> u32 {
        match self {
            Task::Plan { .. } | Task::Program { .. } | Task::Handed(_) | Task::Step { .. } => repeat,
            Task::Sweep { sweep } => sweep.cases.len() as u32,
            Task::Train { .. } | Task::Generate { .. } => 1,
        }
    }

    /// How often the ranks wait for each other until all rounds are over. Those of a run do twice in a round: before it
    /// starts, and before they look at what arrived.
    pub fn num_barriers(&self, repeat: u32) -> u32 {
        match self {
            Task::Plan { .. } | Task::Program { .. } | Task::Handed(_) | Task::Step { .. } => {
                2 * self.num_rounds(repeat)
            }
            Task::Sweep { .. } | Task::Train { .. } | Task::Generate { .. } => self.num_rounds(repeat),
        }
    }

    /// How many times a rank takes down.
    pub fn num_times(&self, repeat: u32) -> u32 {
        match self {
            Task::Plan { .. } | Task::Program { .. } | Task::Handed(_) | Task::Step { .. } => repeat,
            Task::Sweep { sweep } => sweep.cases.len() as u32 * repeat,
            Task::Train { .. } | Task::Generate { .. } => 1,
        }
    }

    /// What each connection has of the NICs to itself.
    pub fn shares(&self) -> Shares {
        match self {
            Task::Plan { plan, program } => {
                Shares::of(&plan.problem.cluster, &plan.problem.topology, program)
            }
            Task::Program { program, cluster } => Shares::of(cluster, &Topology::new(cluster), program),
            Task::Handed(handed) => handed.shares.clone(),
            Task::Step { step, lowered } => {
                Shares::of(&step.cluster, &Topology::new(&step.cluster), &lowered.program)
            }
            // Which ranks talk changes from one collective to the next.
            Task::Sweep { .. } | Task::Train { .. } | Task::Generate { .. } => Shares::default(),
        }
    }

    /// How long ranks may take to come to a good end when they are asked to; none where they have none.
    pub fn time_to_finish(&self) -> Option<Duration> {
        match self {
            Task::Train { training } => training.config.saving.is_on().then_some(TIME_TO_SAVE),
            _ => None,
        }
    }

    /// Who hears of every step of training.
    pub fn on_step(&self) -> Option<OnStep> {
        match self {
            Task::Train { training } => Some(training.on_step.clone()),
            _ => None,
        }
    }

    /// Who hears what was generated.
    pub fn on_talked(&self) -> Option<OnTalked> {
        match self {
            Task::Generate { talk } => Some(talk.on_talked.clone()),
            _ => None,
        }
    }

    /// What runs, where it is one program: a sweep has many.
    pub fn program(&self) -> Option<&Program> {
        match self {
            Task::Plan { program, .. } | Task::Program { program, .. } => Some(program),
            Task::Handed(handed) => Some(handed.program.whole()),
            Task::Step { lowered, .. } => Some(&lowered.program),
            Task::Sweep { .. } | Task::Train { .. } | Task::Generate { .. } => None,
        }
    }

    /// What an op's tensor is called; nothing where it has no name.
    pub fn tensor_name(&self, tensor: u32) -> String {
        let name = match self {
            Task::Plan { plan, .. } => plan.problem.reshards.get(tensor as usize).map(|r| &r.name),
            Task::Program { .. } | Task::Handed(_) => {
                let tensor = self.program().and_then(|program| program.tensors.get(tensor as usize));
                return tensor.map(|t| t.name.to_string()).unwrap_or_default();
            }
            Task::Step { step, lowered } => {
                let instance = lowered.instance_of.get(tensor as usize);
                let crossing = instance.map(|i| lowered.instances[*i as usize].crossing as usize);
                crossing.and_then(|c| step.crossings.get(c)).map(|c| &c.name)
            }
            Task::Sweep { .. } | Task::Train { .. } | Task::Generate { .. } => None,
        };
        name.cloned().unwrap_or_default()
    }

    pub fn execute(
        &self,
        rank: Rank,
        links: Vec<(Rank, Box<dyn Link>)>,
        options: &ExecuteOptions,
        barrier: &mut Barrier<'_>,
    ) -> Result<RankReport, Failure> {
        match self {
            Task::Plan { program, .. } | Task::Program { program, .. } => {
                execute(program.rank(rank), links, options, barrier)
            }
            Task::Handed(handed) => execute(handed.program.clone(), links, options, barrier),
            Task::Step { step, lowered } => {
                let device = VirtualDevice::new().map_err(|e| CommError::System {
                    me: rank,
                    what: "make a virtual device",
                    cause: e.to_string(),
                })?;
                execute_step(step, lowered, rank, links, Box::new(device), options, barrier)
            }
            Task::Sweep { sweep } => execute_sweep(sweep, rank, links, options, barrier),
            Task::Train { training } => training::rank::execute(training, rank, links, options, barrier),
            Task::Generate { talk } => talk::execute(talk, rank, links, options, barrier),
        }
    }
}
