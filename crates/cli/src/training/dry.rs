//! What would run: stages on meshes, what crosses between them, memory of every rank, and how long a step is thought to take.

use std::fmt::Write as _;

use anyhow::Result;
use crossmesh_core::id::{DeviceId, Rank, StageId};
use crossmesh_core::reshard::{Placed, Plan, lower_bound};
use crossmesh_core::schedule::memory::peaks;
use crossmesh_core::schedule::{Costs, Footprint, time};
use crossmesh_core::sim::simulate;
use crossmesh_core::step::Direction;
use crossmesh_core::units::{Bytes, Seconds};
use crossmesh_train::by_precision;
use crossmesh_train::chain::Outline;
use crossmesh_train::deal::Deal;
use crossmesh_train::job::Over;
use crossmesh_train::kernels::Kernels;
use crossmesh_train::optim::OptimizerConfig;
use crossmesh_train::runtime::most_fetched;
use crossmesh_train::sums::Ways;
use crossmesh_train::wiring::setup;
use serde::Serialize;

use super::timeline::predict;
use super::{Training, count_text, mesh_text};
use crate::output::Table;

/// See the module.
#[derive(Debug, Serialize)]
pub struct DryRun {
    schema: &'static str,
    name: String,
    about: String,
    data: String,
    reachable_loss: Option<f64>,
    parameters: u64,
    schedule: String,
    steps: u64,
    batch: u64,
    hosts: usize,
    stages: Vec<StageDoc>,
    edges: Vec<EdgeDoc>,
    ranks: Vec<RankMemory>,
    predicted_step_s: f64,
    /// Ranks had no pass to run.
    predicted_bubble: f64,
    /// They waited for each other inside passes.
    predicted_inside: f64,
    /// Ops of collectives inside stages that were too many to simulate.
    #[serde(skip_serializing_if = "is_none")]
    left_out: usize,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
fn is_none(ops: &usize) -> bool {
    *ops == 0
}

#[derive(Debug, Serialize)]
struct StageDoc {
    stage: u32,
    device: u32,
    mesh: String,
    ranks: Vec<u32>,
    sequence_parallel: bool,
    units: [usize; 2],
    /// Of the whole stage.
    parameters: u64,
    f_s: f64,
    b_s: f64,
    w_s: f64,
}

#[derive(Debug, Serialize)]
struct EdgeDoc {
    name: String,
    from: u32,
    to: u32,
    tensors: Vec<[String; 2]>,
    forward: WayDoc,
    backward: WayDoc,
}

/// One direction of an edge, for one microbatch.
#[derive(Debug, Serialize)]
struct WayDoc {
    strategy: String,
    transfers: usize,
    bytes: u64,
    predicted_s: f64,
    lower_bound_s: f64,
    /// Microbatches that may be on their way at once.
    buffers: u32,
}

/// What a rank holds, in bytes.
#[derive(Debug, Clone, Serialize)]
pub struct RankMemory {
    pub rank: u32,
    pub host: u32,
    pub stages: Vec<u32>,
    pub weights: u64,
    pub gradients: u64,
    pub optimizer: u64,
    /// The most at any time, as the schedule goes.
    pub activations: u64,
    pub crossings: u64,
}

impl RankMemory {
    pub fn sum(&self) -> u64 {
        self.weights + self.gradients + self.optimizer + self.activations + self.crossings
    }
}

impl DryRun {
    pub fn of(training: &Training) -> Result<Self> {
        let (job, wiring) = (&training.resolved.job, &training.wiring);
        let predicted = predict(training, job.times.clone())?;
        let report = &predicted.report;
        let edges = (0..wiring.step.crossings.len()).map(|crossing| edge(training, crossing));
        Ok(Self {
            schema: "crossmesh.dry-run/1",
            name: training.doc.name.clone(),
            about: training.about(),
            data: training.data.describe(),
            reachable_loss: training.data.reachable_loss(),
            parameters: training.resolved.parameters(),
            schedule: job.schedule.name().into(),
            steps: training.config.train.steps,
            batch: job.batch(),
            hosts: job.cluster.hosts.len(),
            stages: job.schedule.placement().stages().map(|stage| stage_doc(training, stage)).collect(),
            edges: edges.collect::<Result<_>>()?,
            ranks: job.ranks().into_iter().map(|rank| memory(training, rank)).collect::<Result<_>>()?,
            predicted_step_s: report.step_s,
            predicted_bubble: report.bubble() - report.waited(),
            predicted_inside: report.waited(),
            left_out: predicted.left_out,
        })
    }
}

fn stage_doc(training: &Training, stage: StageId) -> StageDoc {
    let (job, at) = (&training.resolved.job, stage.index());
    let (team, times) = (job.team_of(stage), &job.times[at]);
    let units = job.stages[at].clone();
    let seconds = |ns: u64| ns as f64 * 1e-9;
    StageDoc {
        stage: stage.0,
        device: job.schedule.placement().device(stage).0,
        mesh: mesh_text(&team.mesh),
        ranks: team.ranks.iter().map(|r| r.0).collect(),
        sequence_parallel: team.sequence_parallel,
        parameters: training.resolved.work[units.clone()].iter().map(|unit| unit.parameters).sum(),
        units: [units.start, units.end],
        f_s: seconds(times.f_ns),
        b_s: seconds(times.b_ns),
        w_s: seconds(times.w_ns),
    }
}

fn edge(training: &Training, at: usize) -> Result<EdgeDoc> {
    let wiring = &training.wiring;
    let crossing = &wiring.step.crossings[at];
    let tensor = |r: &crossmesh_core::reshard::Reshard| [r.src.layout.to_string(), r.dst.layout.to_string()];
    let way = |direction: Direction| -> Result<WayDoc> {
        let plan = crossing.plan(direction);
        let trace = simulate(&wiring.lowered.lowered[at][direction as usize], &wiring.step.cluster)?;
        Ok(WayDoc {
            strategy: plan.strategy.clone(),
            transfers: plan.transfers().len(),
            bytes: plan.bytes_moved(),
            predicted_s: trace.makespan_s,
            lower_bound_s: lower_bound(&plan.problem)?.seconds,
            buffers: wiring.lowered.buffers[at][direction as usize],
        })
    };
    Ok(EdgeDoc {
        name: crossing.name.clone(),
        from: crossing.edge.from.0,
        to: crossing.edge.to.0,
        tensors: crossing.forward.problem.reshards.iter().map(tensor).collect(),
        forward: way(Direction::Forward)?,
        backward: way(Direction::Backward)?,
    })
}

/// What a rank will hold.
pub fn memory(training: &Training, rank: Rank) -> Result<RankMemory> {
    by_precision!(training.config.train.precision, K => memory_in::<K>(training, rank))
}

fn memory_in<K: Kernels>(training: &Training, rank: Rank) -> Result<RankMemory> {
    let (job, wiring) = (&training.resolved.job, &training.wiring);
    let (device, position) = job.home(rank).expect("a rank of the job");
    let model = training.resolved.model.with_kernels::<K>();
    let (elem, real) = (size_of::<K::Elem>() as u64, size_of::<K::Real>() as u64);
    let stages = wiring.stages_on(device);
    let outline = |stage: &StageId| -> Result<Outline> {
        Ok(Outline::new(&*model, job.stages[stage.index()].clone(), &setup(job, *stage, position)?)?)
    };
    let outlines = stages.iter().map(outline).collect::<Result<Vec<_>>>()?;
    let moments = match job.update.optimizer {
        OptimizerConfig::AdamW { .. } => 2,
        OptimizerConfig::Sgd { .. } => 1,
    };
    // What weights are rounded from.
    let masters = u64::from(K::IS_MIXED);
    let place = job.place(device, position)?;
    let kept = |over: &Over| -> u64 {
        let axes = over.axes(&place);
        let of = |o: &Outline| Deal::new(place.clone(), &o.buckets.starts).share(&axes).runs.len() as u64;
        outlines.iter().map(of).sum()
    };
    let dealt = &job.update.dealt;
    let alone = |over: &Over| place.others(&over.axes(&place)).len() == 1;
    // Passes fetch weights a unit at a time, and hand each unit's gradients over before those of the one before.
    let largest = outlines.iter().map(Outline::largest_unit).max().unwrap_or(0);
    let fetched = if alone(&dealt.parameters) { 0 } else { most_fetched::<K>(largest) as u64 };
    let opened = match Ways::new(&job.update, &place).sums_each(&job.update) {
        true => outlines.iter().map(Outline::most_opened).max().unwrap_or(0) as u64,
        false => 0,
    };
    Ok(RankMemory {
        rank: rank.0,
        host: training.topology.host(rank).0,
        stages: stages.iter().map(|s| s.0).collect(),
        weights: (kept(&dealt.parameters) + fetched) * elem,
        gradients: (kept(&dealt.gradients) + opened) * real,
        optimizer: (moments + masters) * kept(&dealt.states) * real,
        activations: activations::<K>(training, device, position)?
            + outlines.iter().map(|o| o.in_flight).max().unwrap_or(0),
        crossings: crossings(training, rank),
    })
}

/// The most bytes of activations at any time, by the schedule's checker. A device's own passes are in order, whatever they take.
fn activations<K: Kernels>(training: &Training, device: DeviceId, position: usize) -> Result<u64> {
    let job = &training.resolved.job;
    let model = training.resolved.model.with_kernels::<K>();
    let placement = job.schedule.placement();
    let held = |(stage, units): (StageId, &std::ops::Range<usize>)| -> Result<(u64, u64)> {
        let position = if placement.device(stage) == device { position } else { 0 };
        let held = Outline::new(&*model, units.clone(), &setup(job, stage, position)?)?.activations;
        Ok((held.after_forward, held.after_backward_input))
    };
    let held = placement.stages().zip(&job.stages).map(held).collect::<Result<Vec<_>>>()?;
    let timed = time(&job.schedule, &Costs::even(placement.num_stages(), 1.0, 1.0, 1.0, 0.0)?)?;
    Ok(peaks(&job.schedule, &timed, &Footprint::exact(&held))[device.index()].amount as u64)
}

/// Buffers of what crosses between stages.
fn crossings(training: &Training, rank: Rank) -> u64 {
    let wiring = &training.wiring;
    let mut bytes = 0;
    for (at, crossing) in wiring.step.crossings.iter().enumerate() {
        for direction in [Direction::Forward, Direction::Backward] {
            let extra = wiring.lowered.lowered[at][direction as usize].ranks.get(rank.index());
            // What a rank keeps for another leaves from where it arrived.
            let again = direction == Direction::Backward && wiring.step.keeps(at, rank);
            let shards = if again { 0 } else { held(crossing.plan(direction), rank) };
            let each = shards + extra.map_or(0, |program| program.extra_bytes());
            bytes += each * u64::from(wiring.lowered.buffers_on(&wiring.step, at, direction, rank));
        }
    }
    bytes
}

/// A rank's shards of a plan's tensors.
fn held(plan: &Plan, rank: Rank) -> u64 {
    let shard = |placed: &Placed| {
        let position = placed.ranks.iter().position(|r| *r == rank)?;
        let coord = placed.layout.mesh().coord(position);
        let elements: u64 = placed.layout.shard_at(&coord).iter().map(|region| region.volume()).sum();
        Some(elements * placed.layout.dtype().bytes())
    };
    let ends = plan.problem.reshards.iter().flat_map(|r| [shard(&r.src), shard(&r.dst)]);
    ends.flatten().sum()
}

/// For people.
pub fn render(dry: &DryRun) -> String {
    let mut text = format!("train {}: {}\n", dry.name, dry.about);
    let reachable = dry.reachable_loss.map_or(String::new(), |loss| format!("; no loss is below {loss:.4}"));
    let _ = writeln!(text, "  data {}{reachable}", dry.data);
    let _ = writeln!(
        text,
        "  {} steps of {} samples, {}\n",
        dry.steps,
        dry.batch,
        crate::output::count(dry.hosts, "host")
    );
    text += &stage_table(dry).render(2);
    if !dry.edges.is_empty() {
        text += "\n";
        text += &edge_table(dry).render(2);
    }
    text += "\n";
    text += &memory_table(dry).render(2);
    let _ = write!(
        text,
        "\npredicted  a step takes {}, {:.1} % of it bubble",
        Seconds(dry.predicted_step_s),
        100.0 * dry.predicted_bubble
    );
    if dry.left_out > 0 {
        let _ = write!(
            text,
            "; collectives inside stages are not counted: their {} ops are too many",
            dry.left_out
        );
    } else if dry.predicted_inside > 0.0 {
        let _ =
            write!(text, " and {:.1} % waits for collectives inside stages", 100.0 * dry.predicted_inside);
    }
    text.push('\n');
    text
}

fn stage_table(dry: &DryRun) -> Table {
    let mut table = Table::new("lllllrrrr");
    table.row(["stage", "device", "mesh", "ranks", "units", "parameters", "F", "B", "W"]);
    for s in &dry.stages {
        let ranks = match s.ranks[..] {
            [only] => only.to_string(),
            _ => format!("{}-{}", s.ranks[0], s.ranks[s.ranks.len() - 1]),
        };
        let mesh = if s.sequence_parallel { format!("{} sp", s.mesh) } else { s.mesh.clone() };
        let units = format!("{}-{}", s.units[0], s.units[1] - 1);
        let [f, b, w] = [s.f_s, s.b_s, s.w_s].map(|t| Seconds(t).to_string());
        table.row([
            s.stage.to_string(),
            s.device.to_string(),
            mesh,
            ranks,
            units,
            count_text(s.parameters),
            f,
            b,
            w,
        ]);
    }
    table
}

fn edge_table(dry: &DryRun) -> Table {
    let mut table = Table::new("lllrrrrl");
    table.row(["edge", "tensor", "by", "transfers", "bytes", "predicted", "bound", "layouts"]);
    for edge in &dry.edges {
        let ways = [(edge.from, edge.to, &edge.forward, false), (edge.to, edge.from, &edge.backward, true)];
        for (from, to, way, back) in ways {
            let name = if back { format!("d {}", edge.name) } else { edge.name.clone() };
            let layouts = match &edge.tensors[..] {
                [[src, dst]] if !back => format!("{src} -> {dst}"),
                _ => String::new(),
            };
            table.row([
                format!("{from} → {to}"),
                name,
                way.strategy.clone(),
                way.transfers.to_string(),
                Bytes(way.bytes).to_string(),
                Seconds(way.predicted_s).to_string(),
                Seconds(way.lower_bound_s).to_string(),
                layouts,
            ]);
        }
    }
    table
}

fn memory_table(dry: &DryRun) -> Table {
    let mut table = Table::new("lllrrrrrr");
    table.row([
        "rank",
        "host",
        "stages",
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "crossings",
        "sum",
    ]);
    for m in &dry.ranks {
        let stages: Vec<String> = m.stages.iter().map(u32::to_string).collect();
        let bytes = |bytes: u64| Bytes(bytes).to_string();
        table.row([
            format!("r{}", m.rank),
            format!("h{}", m.host),
            stages.join(", "),
            bytes(m.weights),
            bytes(m.gradients),
            bytes(m.optimizer),
            bytes(m.activations),
            bytes(m.crossings),
            bytes(m.sum()),
        ]);
    }
    table
}
