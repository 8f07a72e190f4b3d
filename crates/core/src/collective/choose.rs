//! Which algorithm: the one asked for, or the one that is predicted to be fastest.
//!
//! Candidates are simulated like any other plan, with the cluster's latencies, so that small messages go in few steps
//! and large ones where no link carries more than it must. A cluster that says nothing of latency is taken to have some:
//! without any, nothing would speak for few steps. Beside that, every message takes a rank some time to handle: with
//! many ranks, few messages win over few steps.
//!
//! No plan is faster than its busiest link and its longest chain of messages allow. Whoever cannot be faster than the
//! best so far by that count is not simulated, and what is too large to simulate in passing is judged by it alone.

use super::algorithm::{Algorithm, Blocks, Variant, doubling, exchange};
use super::shape::{Shape, Team};
use super::{Call, Collective, CollectiveError};
use crate::cluster::{Cluster, Topology};
use crate::reshard::problem::Hosts;
use crate::reshard::strategy::MIN_CHUNK_BYTES;
use crate::reshard::{
    Plan, PlanError, PlanOptions, Problem, Strategy, bandwidth_bound, fitting_chunk, lower,
};
use crate::sim::simulate;
use crate::units::Seconds;

/// What an op costs the rank that has it, beside what the simulator knows: to announce, to find its place, to note its
/// end. Between what the engine takes on a fast machine and on one with fewer cores than ranks.
const HANDLING_S: f64 = 3e-6;
/// From host to host over TCP, and from process to process inside one, where the cluster does not say.
const ASSUMED_LATENCY_S: f64 = 30e-6;
const ASSUMED_LOCAL_LATENCY_S: f64 = 10e-6;
/// Plans with more transfers than this are judged without simulating them, or not even made.
const MAX_SIMULATED_TRANSFERS: usize = 20_000;
const MAX_COMPARED_TRANSFERS: usize = 300_000;
/// How much longer than its busiest link and its longest chain a plan takes that was not simulated.
const UNSIMULATED: f64 = 1.1;
/// A plan this close to the bound is not worth a search.
const CLOSE_ENOUGH: f64 = 1.02;
/// With more ranks than this the reshard planner is not asked: it searches for longer than it saves.
const MAX_FLOW_RANKS: usize = 64;

/// What a user may set.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct CollectiveOptions {
    pub algorithm: Algorithm,
    /// Add up in the group's order.
    pub fixed_order: bool,
    /// How much arrives before it is forwarded; chosen from the sizes if not given.
    pub chunk_bytes: Option<u64>,
}

/// Plans calls that run at the same time, all by one algorithm.
pub fn plan(calls: &[Call], cluster: &Cluster, options: &CollectiveOptions) -> Result<Plan, CollectiveError> {
    if let Some(chunk) = options.chunk_bytes.filter(|&c| c < MIN_CHUNK_BYTES) {
        return Err(PlanError::ChunkTooSmall(chunk).into());
    }
    let planner = Planner::new(calls, cluster, options)?;
    match options.algorithm {
        Algorithm::Auto => planner.fastest(),
        forced => planner.forced(forced),
    }
}

struct Planner<'a> {
    calls: &'a [Call],
    options: &'a CollectiveOptions,
    problem: Problem,
    /// By call: its first tensor.
    tensors: Vec<u32>,
    teams: Vec<Team>,
    in_order: bool,
    /// The cluster, with latencies.
    compared_on: Cluster,
}

impl<'a> Planner<'a> {
    fn new(
        calls: &'a [Call],
        cluster: &Cluster,
        options: &'a CollectiveOptions,
    ) -> Result<Self, CollectiveError> {
        let (mut pairs, mut tensors) = (vec![], vec![]);
        for (i, call) in calls.iter().enumerate() {
            tensors.push(pairs.len() as u32);
            let name = if calls.len() == 1 { String::new() } else { i.to_string() };
            let layouts = call.layouts_named(&name)?.into_iter();
            pairs.extend(layouts.map(|(src, dst)| (call.collective.to_string(), src, dst)));
        }
        if calls.is_empty() {
            return Err(CollectiveError::NoCalls);
        }
        let problem = Problem::new(pairs, Hosts::Described(cluster.clone()))?;
        let topology = Topology::new(cluster);
        let teams = calls.iter().map(|c| Team::new(c.group.ranks(), &topology)).collect();
        let in_order = options.fixed_order && calls.iter().any(Call::order_matters);
        let compared_on = with_latencies(cluster);
        Ok(Self { calls, options, problem, tensors, teams, in_order, compared_on })
    }

    /// Whether it can do it, and in a way of its own.
    fn is_worth_a_try(&self, algorithm: Algorithm) -> bool {
        let all_sum = |c: &Call| matches!(c.collective, Collective::AllReduce | Collective::Barrier);
        let differs = algorithm != Algorithm::Pairwise || self.calls.iter().any(all_sum);
        differs && self.calls.iter().all(|call| algorithm.can(call.collective, self.in_order))
    }

    fn forced(&self, algorithm: Algorithm) -> Result<Plan, CollectiveError> {
        if let Some(call) = self.calls.iter().find(|c| !algorithm.can(c.collective, self.in_order)) {
            let (collective, in_order) = (call.collective, self.in_order);
            let can = Algorithm::CONCRETE.into_iter().filter(|a| a.can(collective, in_order));
            let choices = can.map(Algorithm::name).collect::<Vec<_>>().join(", ");
            return Err(CollectiveError::NoSuchWay { algorithm, collective, in_order, choices });
        }
        match algorithm.variants().as_slice() {
            [] => self.flow(),
            [only] => Ok(self.build(*only)),
            several => {
                let plans = several.iter().map(|variant| self.candidate(self.build(*variant)));
                Ok(best(plans.collect()).expect("there are several").plan)
            }
        }
    }

    fn fastest(&self) -> Result<Plan, CollectiveError> {
        // Counts of their own differ from call to call: what is not planned again and again is not worth a search.
        if self.calls.iter().any(Call::has_rows) {
            return self.forced(Algorithm::Direct);
        }
        let able = Algorithm::CONCRETE.into_iter().filter(|a| self.is_worth_a_try(*a));
        let small = |variant: &Variant| self.num_transfers(*variant) <= MAX_COMPARED_TRANSFERS;
        let variants = able.flat_map(Algorithm::variants).filter(small);
        let mut plans: Vec<(f64, Plan)> =
            variants.map(|v| self.build(v)).map(|plan| (self.least_s(&plan), plan)).collect();
        plans.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut compared: Vec<Candidate> = vec![];
        for (least_s, plan) in plans {
            if compared.iter().all(|c| least_s < c.seconds()) {
                compared.push(self.candidate(plan));
            }
        }
        if self.flow_may_win(&compared)? {
            compared.push(self.candidate(self.flow()?));
        }
        let times: Vec<String> = compared.iter().map(Candidate::describe).collect();
        let Some(best) = best(compared) else { return self.forced(Algorithm::Ring) };
        let mut plan = best.plan;
        plan.reasons.insert(0, format!("{} is predicted to be fastest: {}", plan.strategy, times.join(", ")));
        Ok(plan)
    }

    /// Whether the reshard planner could find something faster, and can be asked.
    fn flow_may_win(&self, compared: &[Candidate]) -> Result<bool, CollectiveError> {
        let ranks: usize = self.calls.iter().map(|c| c.group.len()).sum();
        if ranks > MAX_FLOW_RANKS || !self.is_worth_a_try(Algorithm::Flow) {
            return Ok(false);
        }
        let bound_s = bandwidth_bound(&self.problem)?.seconds;
        let cluster = &self.compared_on;
        let least_s = bound_s + cluster.empty_message_s(true).min(cluster.empty_message_s(false));
        Ok(compared.iter().all(|c| c.seconds() > CLOSE_ENOUGH * least_s))
    }

    /// What a plan takes at least: its busiest link or its longest chain of messages, and its busiest rank's ops.
    fn least_s(&self, plan: &Plan) -> f64 {
        let (topology, cluster) = (&plan.problem.topology, &self.compared_on);
        let (ports, ranks) = (topology.ports.len(), topology.num_ranks());
        let mut busy_s = vec![0.0f64; 2 * (ports + ranks)];
        let mut arrives_s = Vec::with_capacity(plan.transfers().len());
        let mut ops = vec![0u32; ranks];
        for t in plan.transfers() {
            let start = plan.after(t).iter().map(|a| arrives_s[a.index()]).fold(0.0, f64::max);
            let bytes = t.bytes as f64;
            if topology.same_host(t.src, t.dst) {
                let rate = cluster.hosts[topology.host(t.src).index()].local_bytes_per_s;
                busy_s[2 * (ports + t.src.index())] += bytes / rate;
                busy_s[2 * (ports + t.dst.index()) + 1] += bytes / rate;
                arrives_s.push(start + cluster.local_latency_s);
            } else {
                let (from, to) = (topology.port(t.src).index(), topology.port(t.dst).index());
                busy_s[2 * from] += bytes / topology.ports[from].out_bytes_per_s;
                busy_s[2 * to + 1] += bytes / topology.ports[to].in_bytes_per_s;
                arrives_s.push(start + cluster.latency_s);
            }
            ops[t.src.index()] += 1;
            ops[t.dst.index()] += 1;
        }
        let longest = busy_s.into_iter().chain(arrives_s).fold(0.0, f64::max);
        longest + f64::from(ops.into_iter().max().unwrap_or(0)) * HANDLING_S
    }

    /// About how many transfers a variant has.
    fn num_transfers(&self, variant: Variant) -> usize {
        let of = |call: &Call| {
            let n = call.group.len();
            match (variant.algorithm, call.collective) {
                (_, Collective::ReduceScatter | Collective::AllGather | Collective::AllToAll) => n * n,
                (Algorithm::Direct, Collective::AllReduce | Collective::Barrier) => n * n,
                (Algorithm::Pairwise, _) => 2 * n * n,
                (Algorithm::TwoLevel, _) => 128 * n,
                _ => 32 * n,
            }
        };
        self.calls.iter().map(of).sum()
    }

    fn flow(&self) -> Result<Plan, CollectiveError> {
        let options = PlanOptions {
            strategy: Strategy::Flow,
            chunk_bytes: self.options.chunk_bytes,
            ..PlanOptions::default()
        };
        Ok(crate::reshard::plan(&self.problem, &options)?)
    }

    fn candidate(&self, plan: Plan) -> Candidate {
        if plan.transfers().len() > MAX_SIMULATED_TRANSFERS {
            return Candidate { predicted_s: UNSIMULATED * self.least_s(&plan), handling_s: 0.0, plan };
        }
        let program = lower(&plan);
        let trace = simulate(&program, &self.compared_on);
        let ops = program.ranks.iter().map(|r| r.ops.len()).max().unwrap_or(0);
        Candidate {
            // Where the cluster says what a message costs, the simulator has counted it.
            predicted_s: trace.expect("a planned program runs to its end").makespan_s,
            handling_s: if self.compared_on.messages_are_free() { ops as f64 * HANDLING_S } else { 0.0 },
            plan,
        }
    }

    fn build(&self, variant: Variant) -> Plan {
        let mut plan = Plan::new(self.problem.clone(), variant.algorithm.name(), 0);
        for ((call, team), &tensor) in self.calls.iter().zip(&self.teams).zip(&self.tensors) {
            match (call.collective, variant.shape) {
                (Collective::AllToAll, _) => exchange(&mut plan, tensor, call),
                (Collective::AllGather, Shape::Tree) => doubling(&mut plan, tensor, call.group.ranks()),
                _ => Blocks { call, team, variant, in_order: self.in_order }.write(&mut plan, tensor),
            }
        }
        plan.chunk_bytes = self.options.chunk_bytes.unwrap_or_else(|| fitting_chunk(&plan));
        if self.in_order {
            plan.reasons.push("sums are added up in the group's order".into());
        }
        plan
    }
}

fn with_latencies(cluster: &Cluster) -> Cluster {
    let or = |said: f64, assumed: f64| if said > 0.0 { said } else { assumed };
    Cluster {
        latency_s: or(cluster.latency_s, ASSUMED_LATENCY_S),
        local_latency_s: or(cluster.local_latency_s, ASSUMED_LOCAL_LATENCY_S),
        ..cluster.clone()
    }
}

/// A plan with what it is predicted to take.
struct Candidate {
    plan: Plan,
    predicted_s: f64,
    handling_s: f64,
}

impl Candidate {
    fn seconds(&self) -> f64 {
        self.predicted_s + self.handling_s
    }

    fn describe(&self) -> String {
        format!("{} {}", self.plan.strategy, Seconds(self.seconds()))
    }
}

/// The fastest; the first of those that are about as fast.
fn best(candidates: Vec<Candidate>) -> Option<Candidate> {
    candidates.into_iter().reduce(|a, b| if b.seconds() < a.seconds() * 0.999 { b } else { a })
}
