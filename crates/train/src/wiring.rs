//! A job as a training step: where every tensor of every stage comes from and goes to, with a reshard plan on every edge.
//!
//! ```text
//! stage 0                         stage 1
//! outputs: h ---- crossing 0 ---> inputs: h         other ranks: a plan there, and one back for the gradient
//! outputs: s -----------------.   inputs: targets   from the data set
//!                              \
//!                   stage 2     '-> inputs: s       the same ranks: handed over in memory
//! ```
//!
//! Where the schedule evicts, what a stage remembers of a microbatch crosses as well, as bytes, to the mesh that keeps it and back.
//!
//! Every rank works the wiring out for itself, and all come to the same.

use std::collections::{BTreeMap, BTreeSet};

use crossmesh_core::cluster::Topology;
use crossmesh_core::id::{DeviceId, Rank, StageId};
use crossmesh_core::layout::Layout;
use crossmesh_core::reshard::lower::Addressing;
use crossmesh_core::reshard::{Placed, Plan, Problem, Reshard, plan};
use crossmesh_core::schedule::Edge as StageEdge;
use crossmesh_core::schedule::PassKind;
use crossmesh_core::step::{Carries, Crossing, Step, StepProgram, lower_step};
use crossmesh_core::verify::Verified;

use crate::chain::{Model, Outline, Setup};
use crate::job::{Job, JobError};
use crate::kernels::Kernels;
use crate::stage::{Edge, Port, Role, connect};

/// The other end of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The data set gives it.
    Data,
    /// It is a summand of the loss.
    Loss,
    /// A stage on the same ranks: an index into [`Wiring::edges`].
    Here { edge: usize },
    /// A stage on other ranks.
    Crossing { crossing: usize, tensor: usize },
}

/// A weight that several stages use: one parameter, whose gradients are added up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tied {
    pub name: String,
    /// In model order.
    pub stages: Vec<StageId>,
}

/// The gradients of tied weights, from every stage that has one to every other on other ranks.
#[derive(Debug, Clone)]
pub struct Exchange {
    pub program: Verified,
    /// By reshard of the plan: the weight (an index into [`Wiring::tied`]), from where to where.
    pub ways: Vec<(usize, StageId, StageId)>,
}

/// How what a stage remembers of a microbatch gets to its keeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kept {
    pub crossing: usize,
    /// Of every rank's part.
    pub bytes: usize,
}

/// See the module.
#[derive(Debug, Clone)]
pub struct Wiring {
    pub step: Step,
    pub lowered: StepProgram,
    /// By stage, as the first rank of its mesh has it.
    pub outlines: Vec<Outline>,
    pub edges: Vec<Edge>,
    /// By stage, in the order of its ports.
    pub inputs: Vec<Vec<End>>,
    pub outputs: Vec<Vec<End>>,
    /// Of every stage that evicts.
    pub kept: BTreeMap<StageId, Kept>,
    pub tied: Vec<Tied>,
    pub exchange: Option<Exchange>,
}

/// How a stage is set up at a position of its mesh.
pub fn setup(job: &Job, stage: StageId, position: usize) -> Result<Setup, JobError> {
    let device = job.schedule.placement().device(stage);
    Ok(Setup {
        place: job.place(device, position)?,
        samples: job.samples,
        sequence_parallel: job.teams[device.index()].sequence_parallel,
        recompute: job.recompute[stage.index()],
        policies: job.policies.clone(),
        offloaded: job.offload.is_some(),
        strands: job.strands,
        seed: job.seed,
    })
}

impl Wiring {
    pub fn new<K: Kernels>(model: &dyn Model<K>, job: &Job) -> Result<Self, JobError> {
        job.check(model.num_units())?;
        let outline = |(stage, units): (StageId, &std::ops::Range<usize>)| {
            Ok(Outline::new(model, units.clone(), &setup(job, stage, 0)?)?)
        };
        let stages = job.schedule.placement().stages();
        let outlines = stages.zip(&job.stages).map(outline).collect::<Result<Vec<_>, JobError>>()?;
        let ports: Vec<(&[Port], &[Port])> =
            outlines.iter().map(|o| (&o.inputs[..], &o.outputs[..])).collect();
        let edges = connect(&ports)?;
        let (mut crossings, ends) = crossings(job, &edges, &outlines)?;
        let kept = memories(model, job, &mut crossings)?;
        let step = Step {
            schedule: job.schedule.clone().with_updates()?,
            cluster: job.cluster.clone(),
            ranks: job.teams.iter().map(|t| t.ranks.clone()).collect(),
            times: job.times.clone(),
            crossings,
            overlap: job.overlap,
            lockstep: false,
        };
        let lowered = lower_step(&step)?;
        let tied = tied(&outlines);
        let exchange = exchange(job, &outlines, &tied)?;
        let inputs = port_ends(&outlines, &edges, &ends, Side::Input);
        let outputs = port_ends(&outlines, &edges, &ends, Side::Output);
        Ok(Self { step, lowered, outlines, edges, inputs, outputs, kept, tied, exchange })
    }

    /// The stages of a device, in model order.
    pub fn stages_on(&self, device: DeviceId) -> &[StageId] {
        self.step.schedule.placement().stages_on(device)
    }

    /// Ranks that a rank exchanges anything with: all of them, since norms and losses are everybody's.
    pub fn peers(&self, rank: Rank) -> Vec<Rank> {
        let mut peers: Vec<Rank> = self.step.ranks.iter().flatten().copied().filter(|r| *r != rank).collect();
        peers.sort_unstable();
        peers
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Input,
    Output,
}

/// By stage and port, the other end.
fn port_ends(outlines: &[Outline], edges: &[Edge], ends: &[End], side: Side) -> Vec<Vec<End>> {
    let end = |stage: usize, place: usize, port: &Port| match port.role {
        Role::Data => End::Data,
        Role::Loss => End::Loss,
        Role::Activation => {
            let here = |e: &Edge| match side {
                Side::Input => (e.to_stage, e.input) == (stage, place),
                Side::Output => (e.from_stage, e.output) == (stage, place),
            };
            ends[edges.iter().position(here).expect("every activation has an edge")]
        }
    };
    let of_stage = |(stage, outline): (usize, &Outline)| {
        let ports = if side == Side::Input { &outline.inputs } else { &outline.outputs };
        ports.iter().enumerate().map(|(place, port)| end(stage, place, port)).collect()
    };
    outlines.iter().enumerate().map(of_stage).collect()
}

/// A crossing for every two stages on different ranks with edges between them; and the end of every edge.
fn crossings(job: &Job, edges: &[Edge], outlines: &[Outline]) -> Result<(Vec<Crossing>, Vec<End>), JobError> {
    let placement = job.schedule.placement();
    let mut ends: Vec<End> = (0..edges.len()).map(|edge| End::Here { edge }).collect();
    let mut between: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
    for (i, edge) in edges.iter().enumerate() {
        let devices = [edge.from_stage, edge.to_stage].map(|s| placement.device(StageId::at(s)));
        if devices[0] != devices[1] {
            between.entry((edge.from_stage, edge.to_stage)).or_default().push(i);
        }
    }
    let mut crossings = vec![];
    for ((from, to), crossed) in between {
        if job.signal {
            for edge in crossed {
                ends[edge] = End::Crossing { crossing: crossings.len(), tensor: 0 };
            }
            crossings.push(signal(job, StageEdge { from: StageId::at(from), to: StageId::at(to) })?);
            continue;
        }
        let layouts = |i: &usize| {
            let (e, outline) = (&edges[*i], outlines);
            (&outline[from].outputs[e.output].layout, &outline[to].inputs[e.input].layout)
        };
        let names: Vec<&str> = crossed.iter().map(|i| edges[*i].name.as_str()).collect();
        let edge = StageEdge { from: StageId::at(from), to: StageId::at(to) };
        let there = crossed.iter().map(|i| reshard(job, &edges[*i].name, layouts(i), (edge.from, edge.to)));
        let back = crossed.iter().map(|i| {
            let (src, dst) = layouts(i);
            reshard(job, &edges[*i].name, (dst, src), (edge.to, edge.from))
        });
        for (tensor, i) in crossed.iter().enumerate() {
            ends[*i] = End::Crossing { crossing: crossings.len(), tensor };
        }
        crossings.push(Crossing {
            name: names.join(", "),
            edge,
            carries: Carries::Tensors,
            forward: planned(job, there.collect())?,
            backward: planned(job, back.collect())?,
            made: 1.0,
            needed: 0.0,
        });
    }
    Ok((crossings, ends))
}

/// Adds a crossing for the memory of every stage that evicts: as many bytes of each of its ranks as the most that one of them
/// remembers, dealt out over the ranks of the keeper.
fn memories<K: Kernels>(
    model: &dyn Model<K>,
    job: &Job,
    crossings: &mut Vec<Crossing>,
) -> Result<BTreeMap<StageId, Kept>, JobError> {
    let (schedule, placement) = (&job.schedule, job.schedule.placement());
    let evicted = schedule.devices().iter().flatten().filter(|p| p.kind == PassKind::Evict);
    let mut kept = BTreeMap::new();
    for from in evicted.map(|pass| pass.stage).collect::<BTreeSet<StageId>>() {
        let keeper = schedule.keeper(placement.device(from));
        let to = keeper.and_then(|device| placement.stages_on(device).first().copied());
        let to = to.ok_or(JobError::NoKeeper { stage: from })?;
        let (ranks, units) = (job.team_of(from).ranks.len(), &job.stages[from.index()]);
        let mut bytes = 1;
        for position in (0..ranks).filter(|_| !job.signal) {
            let outline = Outline::new(model, units.clone(), &setup(job, from, position)?)?;
            bytes = bytes.max(outline.activations.after_forward);
        }
        let name = format!("memory of {from}");
        let layout = |stage| dealt_out(job, stage, bytes * ranks as u64);
        let (src, dst) = (layout(from), layout(to));
        kept.insert(from, Kept { crossing: crossings.len(), bytes: bytes as usize });
        crossings.push(Crossing {
            edge: StageEdge { from, to },
            carries: Carries::Memory,
            forward: planned(job, vec![reshard(job, &name, (&src, &dst), (from, to))])?,
            backward: planned(job, vec![reshard(job, &name, (&dst, &src), (to, from))])?,
            name,
            made: 1.0,
            needed: 0.0,
        });
    }
    Ok(kept)
}

/// Bytes, in equal parts over all ranks of a stage's mesh.
fn dealt_out(job: &Job, stage: StageId, bytes: u64) -> Layout {
    let mesh = &job.team_of(stage).mesh;
    let axes: Vec<&str> = mesh.axes().iter().map(|a| a.name.as_str()).collect();
    format!("u8[{bytes}]@{mesh}({})", axes.join("+")).parse().expect("bytes over all axes are a layout")
}

/// A crossing that only says that the pass before it is over.
fn signal(job: &Job, edge: StageEdge) -> Result<Crossing, JobError> {
    let byte = |stage| -> Layout {
        format!("u8[1]@{}(_)", job.team_of(stage).mesh).parse().expect("one byte for every rank is a layout")
    };
    let (from, to) = (byte(edge.from), byte(edge.to));
    Ok(Crossing {
        name: "signal".into(),
        edge,
        carries: Carries::Tensors,
        forward: planned(job, vec![reshard(job, "signal", (&from, &to), (edge.from, edge.to))])?,
        backward: planned(job, vec![reshard(job, "signal", (&to, &from), (edge.to, edge.from))])?,
        made: 1.0,
        needed: 0.0,
    })
}

fn reshard(job: &Job, name: &str, (src, dst): (&Layout, &Layout), (from, to): (StageId, StageId)) -> Reshard {
    let placed =
        |layout: &Layout, stage| Placed { layout: layout.clone(), ranks: job.team_of(stage).ranks.clone() };
    Reshard { name: name.into(), src: placed(src, from), dst: placed(dst, to) }
}

fn planned(job: &Job, reshards: Vec<Reshard>) -> Result<Plan, JobError> {
    let name = reshards.iter().map(|r| r.name.as_str()).collect::<Vec<_>>().join(", ");
    let topology = Topology::new(&job.cluster);
    let problem = Problem { cluster: job.cluster.clone(), topology, reshards };
    plan(&problem, &job.plan).map_err(|source| JobError::Plan { name, source })
}

/// Weights that occur in several stages.
fn tied(outlines: &[Outline]) -> Vec<Tied> {
    let mut stages: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
    for (stage, outline) in outlines.iter().enumerate() {
        for parameter in &outline.parameters {
            stages.entry(&parameter.name).or_default().insert(stage);
        }
    }
    let several = stages.into_iter().filter(|(_, stages)| stages.len() > 1);
    let tied = |(name, stages): (&str, BTreeSet<usize>)| Tied {
        name: name.into(),
        stages: stages.into_iter().map(StageId::at).collect(),
    };
    several.map(tied).collect()
}

fn exchange(job: &Job, outlines: &[Outline], tied: &[Tied]) -> Result<Option<Exchange>, JobError> {
    let placement = job.schedule.placement();
    let layout = |stage: StageId, name: &str| {
        let parameters = &outlines[stage.index()].parameters;
        &parameters.iter().find(|p| p.name == name).expect("a tied weight is there").layout
    };
    let (mut reshards, mut ways) = (vec![], vec![]);
    for (i, Tied { name, stages }) in tied.iter().enumerate() {
        let pairs = stages.iter().flat_map(|a| stages.iter().map(move |b| (*a, *b)));
        for (from, to) in pairs.filter(|(a, b)| placement.device(*a) != placement.device(*b)) {
            reshards.push(reshard(job, name, (layout(from, name), layout(to, name)), (from, to)));
            ways.push((i, from, to));
        }
    }
    if reshards.is_empty() {
        return Ok(None);
    }
    let plan = planned(job, reshards)?;
    let program = Verified::plan(&plan, Addressing::Apart).map_err(|e| JobError::Step(e.into()))?;
    Ok(Some(Exchange { program, ways }))
}
