//! Random training steps, by seed, small enough to be carried out byte by byte: every schedule that can be lowered, stages
//! of one or two ranks, tensors whole, split, copied or in parts, made and needed somewhere on the way through a pass;
//! with and without overlap and lockstep; stages whose memory another device keeps.

use crossmesh_core::cluster::{Cluster, Host};
use crossmesh_core::id::{DeviceId, Rank, StageId};
use crossmesh_core::reshard::problem::Hosts;
use crossmesh_core::reshard::{Plan, PlanOptions, Problem, plan};
use crossmesh_core::schedule::{Edge, Name, Schedule, Spec, generate};
use crossmesh_core::step::{Carries, Crossing, PassTimes, Step};

use crate::seed::Seed;

/// A step of a few passes.
pub fn step(seed: u64) -> Step {
    let mut seed = Seed(seed);
    let schedule = schedule(&mut seed);
    let devices = schedule.placement().num_devices();
    let mut next = 0;
    let ranks: Vec<Vec<Rank>> = (0..devices)
        .map(|_| {
            let first = next;
            next += 1 + seed.below(2) as u32;
            (first..next).map(Rank).collect()
        })
        .collect();
    let cluster = Cluster::of_hosts(ranks.iter().map(|r| Host::with_devices(r.len() as u32)).collect());
    let mut draft = Draft { seed, cluster, ranks, schedule, crossings: vec![] };
    draft.cross_edges();
    draft.keep_memories();
    let Draft { mut seed, cluster, ranks, schedule, crossings } = draft;
    let times = (0..schedule.placement().num_stages()).map(|_| PassTimes {
        f_ns: 1 + seed.below(9) as u64,
        b_ns: 1 + seed.below(9) as u64,
        w_ns: seed.below(9) as u64,
        optimizer_ns: 1,
    });
    let times = times.collect();
    // Pairs of passes wait for each other's messages, which devices that stand still meanwhile do not send.
    let pairs = schedule.name() == Name::DualPipeV.name();
    let (overlap, lockstep) = (pairs || !seed.one_in(3), seed.one_in(4));
    Step { schedule, cluster, ranks, times, crossings, overlap, lockstep }
}

/// Of two or three devices; those that keep memory for each other are four.
fn schedule(seed: &mut Seed) -> Schedule {
    loop {
        let name = seed.pick(&Name::ALL);
        let devices = if name == Name::BPipe { 4 } else { 2 + seed.below(2) as u32 };
        let microbatches = if name == Name::BPipe { 4 } else { 1 + seed.below(4) as u32 };
        if let Ok(schedule) = generate(name, &Spec::even(devices, microbatches)) {
            return schedule; // some want another number of microbatches
        }
    }
}

struct Draft {
    seed: Seed,
    cluster: Cluster,
    ranks: Vec<Vec<Rank>>,
    schedule: Schedule,
    crossings: Vec<Crossing>,
}

impl Draft {
    /// A crossing for every edge between devices; sometimes two, or one that skips a stage.
    fn cross_edges(&mut self) {
        let placement = self.schedule.placement().clone();
        let stages = placement.num_stages();
        let apart = |a: usize, b: usize| placement.device(StageId::at(a)) != placement.device(StageId::at(b));
        for from in 0..stages - 1 {
            if apart(from, from + 1) {
                let times = 1 + usize::from(self.seed.one_in(5));
                (0..times).for_each(|_| self.cross(from, from + 1, Carries::Tensors));
            }
            if from + 2 < stages && apart(from, from + 2) && self.seed.one_in(4) {
                self.cross(from, from + 2, Carries::Tensors);
            }
        }
    }

    /// What evicting stages leave with their keepers.
    fn keep_memories(&mut self) {
        let devices: Vec<DeviceId> = self.schedule.placement().devices().collect();
        for device in devices {
            if let Some(keeper) = self.schedule.keeper(device) {
                self.cross(device.index(), keeper.index(), Carries::Memory);
            }
        }
    }

    fn cross(&mut self, from: usize, to: usize, carries: Carries) {
        let elements = 1 + self.seed.below(4);
        // What was put together cannot come back in parts: memory is kept as it is.
        let partial = carries == Carries::Tensors;
        let forward = self.plan(from, to, elements, partial);
        let backward = match carries {
            Carries::Tensors => self.plan(to, from, elements, partial),
            Carries::Memory => self.back(&forward),
        };
        let moment =
            |seed: &mut Seed, usual: f64| if seed.one_in(4) { 0.25 * seed.below(5) as f64 } else { usual };
        let (made, needed) = match carries {
            Carries::Tensors => (moment(&mut self.seed, 1.0), moment(&mut self.seed, 0.0)),
            Carries::Memory => (1.0, 0.0),
        };
        let edge = Edge { from: StageId::at(from), to: StageId::at(to) };
        let name = format!("{from} to {to}");
        self.crossings.push(Crossing { name, edge, carries, forward, backward, made, needed });
    }

    /// One or two tensors from a stage's ranks to another's.
    fn plan(&mut self, from: usize, to: usize, elements: usize, partial: bool) -> Plan {
        let tensors = 1 + usize::from(self.seed.one_in(5));
        let pairs = (0..tensors).map(|i| {
            let dtype = self.seed.pick(&["u8", "bf16"]);
            let layout = |draft: &mut Self, stage: usize, partial: bool| {
                let way = draft.seed.below(4);
                let ranks = draft.ranks_of(stage);
                let how = match way {
                    0 => "(x)",
                    1 if partial && ranks.len() > 1 => "(_ | sum x)",
                    _ => "(_)",
                };
                let (first, last, len) = (ranks[0].0, ranks[ranks.len() - 1].0, ranks.len());
                let text = format!("{dtype}[{elements}]@S{stage}{{x:{len}}}={first}-{last}{how}");
                text.parse().expect("the seed makes good layouts")
            };
            (format!("t{i}"), layout(self, from, partial), layout(self, to, false))
        });
        let pairs = pairs.collect();
        self.planned(pairs)
    }

    /// The way back of what a plan brought.
    fn back(&self, forward: &Plan) -> Plan {
        let back = forward.problem.reshards.iter();
        self.planned(back.map(|r| (r.name.clone(), r.dst.layout.clone(), r.src.layout.clone())).collect())
    }

    fn planned(
        &self,
        pairs: Vec<(String, crossmesh_core::layout::Layout, crossmesh_core::layout::Layout)>,
    ) -> Plan {
        let problem = Problem::new(pairs, Hosts::Described(self.cluster.clone()))
            .expect("the seed makes good problems");
        plan(&problem, &PlanOptions::default()).expect("ours plans everything")
    }

    fn ranks_of(&self, stage: usize) -> &[Rank] {
        &self.ranks[self.schedule.placement().device(StageId::at(stage)).index()]
    }
}
