//! A step in broad strokes: every device, a mesh of many ranks, as one rank; every crossing as one message that takes as
//! long as its plan.
//!
//! ```text
//! 64 ranks on 8 hosts, 8 NICs busy alike     ->   1 rank on 1 host, 1 NIC
//! a plan of 512 transfers in 3 ms            ->   1 transfer of 3 ms
//! ```
//!
//! Ranks of a mesh do the same at the same time, and plans load the NICs of a mesh alike or nearly so; then nothing is
//! lost, and a step on thousands of devices is as cheap to simulate as its schedule is long. Meshes that share hosts go on
//! sharing them.

use rustc_hash::FxHashMap;

use super::{Crossing, Direction, Step, StepError};
use crate::cluster::{Cluster, Host, Topology};
use crate::id::{DeviceId, Rank};
use crate::reshard::problem::Hosts;
use crate::reshard::{Plan, PlanOptions, Problem, Strategy, plan};

impl Step {
    /// The same step with one rank per device.
    pub fn coarse(&self) -> Result<Step, StepError> {
        let groups = Groups::of(self);
        let mut predicted = FxHashMap::default();
        let mut crossings = Vec::with_capacity(self.crossings.len());
        for crossing in &self.crossings {
            crossings.push(groups.crossing(self, crossing, &mut predicted)?);
        }
        Ok(Step {
            schedule: self.schedule.clone(),
            ranks: groups.rank.iter().map(|rank| vec![*rank]).collect(),
            cluster: groups.cluster,
            times: self.times.clone(),
            crossings,
            overlap: self.overlap,
            lockstep: self.lockstep,
        })
    }
}

/// Devices that share hosts, and the one host that stands for those.
struct Groups {
    cluster: Cluster,
    /// The rank that stands for each device.
    rank: Vec<Rank>,
}

/// How long a plan takes, by what it moves and how far.
type Predicted = FxHashMap<(Vec<u64>, bool, String), f64>;

impl Groups {
    fn of(step: &Step) -> Self {
        let topology = Topology::new(&step.cluster);
        // Devices with a host in common are in one group; its number is that of its first device.
        let mut group: Vec<usize> = (0..step.ranks.len()).collect();
        let mut first_on_host: FxHashMap<u32, usize> = FxHashMap::default();
        for (device, ranks) in step.ranks.iter().enumerate() {
            for host in ranks.iter().map(|rank| topology.host(*rank).0) {
                let first = *first_on_host.entry(host).or_insert(device);
                let (a, b) = (root(&group, first), root(&group, device));
                group[a.max(b)] = a.min(b);
            }
        }
        let roots: Vec<usize> = (0..group.len()).map(|d| root(&group, d)).collect();
        let mut hosts: Vec<Host> = vec![];
        let mut rank = vec![Rank(0); step.ranks.len()];
        let mut next = 0;
        for first in (0..roots.len()).filter(|d| roots[*d] == *d) {
            let members: Vec<usize> = (0..roots.len()).filter(|d| roots[*d] == first).collect();
            let real = step.ranks[first].first().map(|r| topology.host(*r).index()).unwrap_or(0);
            hosts.push(Host { devices: members.len() as u32, nics: 1, ..step.cluster.hosts[real].clone() });
            for device in members {
                rank[device] = Rank(next);
                next += 1;
            }
        }
        let latencies = &step.cluster;
        let cluster = Cluster {
            latency_s: latencies.latency_s,
            local_latency_s: latencies.local_latency_s,
            message_s: latencies.message_s,
            local_message_s: latencies.local_message_s,
            ..Cluster::of_hosts(hosts)
        };
        Self { cluster, rank }
    }

    fn crossing(&self, step: &Step, c: &Crossing, predicted: &mut Predicted) -> Result<Crossing, StepError> {
        let placement = step.schedule.placement();
        let (from, to) = (placement.device(c.edge.from), placement.device(c.edge.to));
        let forward = self.message(c, Direction::Forward, (from, to), predicted)?;
        let backward = self.message(c, Direction::Backward, (to, from), predicted)?;
        Ok(Crossing { forward, backward, ..c.clone() })
    }

    /// One transfer that takes as long as the plan.
    fn message(
        &self,
        c: &Crossing,
        direction: Direction,
        (from, to): (DeviceId, DeviceId),
        predicted: &mut Predicted,
    ) -> Result<Plan, StepError> {
        let (a, b) = (self.rank[from.index()], self.rank[to.index()]);
        let topology = Topology::new(&self.cluster);
        let near = topology.same_host(a, b);
        let seconds = predicted_s(c.plan(direction), near, predicted);
        let (out, into) =
            (&self.cluster.hosts[topology.host(a).index()], &self.cluster.hosts[topology.host(b).index()]);
        let rate = match near {
            true => out.local_bytes_per_s,
            false => out.nic_out_bytes_per_s.min(into.nic_in_bytes_per_s),
        };
        let bytes = ((seconds - self.cluster.empty_message_s(near)).max(0.0) * rate).round().max(1.0) as u64;
        let layout = |name: &str, rank: Rank| format!("u8[{bytes}]@{name}{{x:1}}={}(_)", rank.0).parse();
        let bad = |what: &str| StepError::Coarse { name: c.name.clone(), what: what.into() };
        let (src, dst) = (layout("A", a), layout("B", b));
        let (src, dst) = src.ok().zip(dst.ok()).ok_or_else(|| bad("its layouts"))?;
        let hosts = Hosts::Described(self.cluster.clone());
        let problem =
            Problem::new(vec![(c.name.clone(), src, dst)], hosts).map_err(|e| bad(&e.to_string()))?;
        let options = PlanOptions { strategy: Strategy::SendRecv, ..PlanOptions::default() };
        plan(&problem, &options).map_err(|e| bad(&e.to_string()))
    }
}

/// The first device of a device's group.
fn root(group: &[usize], mut device: usize) -> usize {
    while group[device] != device {
        device = group[device];
    }
    device
}

/// How long a plan takes alone. Plans of the same transfers, rank by rank, take the same time: pipelines repeat theirs.
fn predicted_s(plan: &Plan, near: bool, known: &mut Predicted) -> f64 {
    let mut relative: FxHashMap<Rank, u64> = FxHashMap::default();
    let mut key = Vec::with_capacity(3 * plan.transfers().len());
    for t in plan.transfers() {
        for rank in [t.src, t.dst] {
            let next = relative.len() as u64;
            key.push(*relative.entry(rank).or_insert(next));
        }
        key.push(t.bytes);
    }
    *known.entry((key, near, plan.strategy.clone())).or_insert_with(|| plan.predicted_s())
}
