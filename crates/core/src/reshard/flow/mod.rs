//! `flow`: plans at the bound.
//!
//! Four steps, each a module: what has to move ([`super::demand`]); how fast it can be done at all
//! ([`super::bound`]); who sends what, along which trees of hosts ([`routes`]) and through which ports ([`ports`]);
//! and the transfers that do it ([`emit`]).
//!
//! Why this meets the bound: at the bound's time every node can send its share and take in its share, and every
//! channel weighs as much as it has bytes. So a link with load `L` gives each of its channels `bytes / L` of its rate,
//! no link is asked for more than it has until the bound's time, and by then every channel is through. What comes on
//! top is the fill of chains, a chunk per hop; holders send as many copies themselves as their time allows, because a
//! chain that is not there needs no filling.

mod boxes;
mod emit;
mod ports;
mod routes;

use rustc_hash::{FxHashMap, FxHashSet};

use super::assign::least_time;
use super::bound::{bound_of, out_jobs};
use super::demand::Demands;
use super::plan::Plan;
use super::problem::{PlanError, Problem};
use super::strategy::{MIN_CHUNK_BYTES, PlanOptions};
use crate::units::{Bytes, Seconds};
use emit::Emitter;
use routes::{Route, routes};

/// Alternatives are compared by simulating them while they are no larger than this; beyond, the first is taken.
const MAX_COMPARED_TRANSFERS: usize = 20_000;
/// Chunks are small enough for a chain to fill in this share of the busiest link's time, within limits.
const FILL_SHARE: u64 = 512;
const MIN_CHUNK: u64 = 32 << 10;
const MAX_CHUNK: u64 = 4 << 20;
/// How much longer than the bound the ports beside the right devices may take before others relay.
const RELAY_GAIN: f64 = 1.01;

pub(crate) fn plan(problem: &Problem, options: &PlanOptions) -> Result<Plan, PlanError> {
    if let Some(chunk) = options.chunk_bytes.filter(|&c| c < MIN_CHUNK_BYTES) {
        return Err(PlanError::ChunkTooSmall(chunk));
    }
    let demands = Demands::of(problem)?;
    let bound = bound_of(problem, &demands);
    let flow = Flow::new(problem, options, &demands, bound.seconds);
    let mut best = flow.build(1.0, false);
    if best.plan.transfers().len() <= MAX_COMPARED_TRANSFERS {
        let mut stretch = 2.0;
        let mut rival = Some(&best).filter(|b| b.depth > 0).map(|_| flow.build(stretch, false));
        let mut chosen = None;
        while let Some(built) = rival.take() {
            let current = chosen.as_ref().unwrap_or(&best);
            let (depth, transfers) = (built.depth, built.plan.transfers().len());
            if built.plan.predicted_s() < current.plan.predicted_s() * 0.999 {
                chosen = Some(built);
            }
            stretch *= 2.0;
            if depth > 0 && stretch <= 64.0 && transfers <= MAX_COMPARED_TRANSFERS {
                rival = Some(flow.build(stretch, false));
            }
        }
        best = chosen.unwrap_or(best);
    }
    if best.port_seconds > RELAY_GAIN * best.seconds {
        let relayed = flow.build(best.stretch, true);
        let small = relayed.plan.transfers().len() <= MAX_COMPARED_TRANSFERS;
        if relayed.port_seconds < best.port_seconds
            && (!small || relayed.plan.predicted_s() < best.plan.predicted_s())
        {
            best = relayed;
        }
    }
    let mut plan = best.explain(bound.seconds);
    plan.check_size()?;
    plan.strategy = "flow".into();
    Ok(plan)
}

/// Everything alternatives have in common.
struct Flow<'a> {
    problem: &'a Problem,
    options: &'a PlanOptions,
    demands: &'a Demands,
    remote_s: f64,
    local_s: f64,
}

/// One alternative.
struct Built {
    plan: Plan,
    /// How much longer than the least time holders were given.
    stretch: f64,
    seconds: f64,
    port_seconds: f64,
    relayed_bytes: u64,
    /// Forwarding hops between hosts of the deepest route.
    depth: u32,
}

impl<'a> Flow<'a> {
    fn new(problem: &'a Problem, options: &'a PlanOptions, demands: &'a Demands, bound_s: f64) -> Self {
        let (host_rates, local_rates) = out_rates(problem);
        let no_loads = |rates: &[f64]| vec![0; rates.len()];
        let (remote_s, _) =
            least_time(&out_jobs(&demands.remote), &host_rates, &no_loads(&host_rates), bound_s);
        let (local_s, _) =
            least_time(&out_jobs(&demands.local), &local_rates, &no_loads(&local_rates), bound_s);
        Self { problem, options, demands, remote_s, local_s }
    }

    fn build(&self, stretch: f64, relay: bool) -> Built {
        let (host_rates, local_rates) = out_rates(self.problem);
        let seconds = self.remote_s * stretch;
        let remote = routes(&self.demands.remote, &host_rates, &vec![0; host_rates.len()], seconds)
            .expect("the least time is enough");
        let local = routes(&self.demands.local, &local_rates, &vec![0; local_rates.len()], self.local_s)
            .expect("the least time is enough");
        let plan = Plan::new(self.problem.clone(), "flow", 0);
        let mut emitter = Emitter::new(self.problem, self.demands, plan);
        let (port_seconds, relayed_bytes) = emitter.choose_ports(&remote, relay);
        emitter.remote(&remote);
        emitter.local(&local);
        let mut plan = emitter.into_plan();
        let depth = deepest(&remote);
        plan.chunk_bytes = self.options.chunk_bytes.unwrap_or_else(|| fitting_chunk(&plan, depth));
        Built { plan, stretch, seconds: self.remote_s, port_seconds, relayed_bytes, depth }
    }
}

impl Built {
    fn explain(mut self, bound_s: f64) -> Plan {
        let reasons = &mut self.plan.reasons;
        reasons.push(match self.depth {
            0 => "holders can send every copy themselves in time: nothing is forwarded between hosts"
                .to_string(),
            d => format!("holders are short of time: receivers forward, over up to {d} further hosts"),
        });
        if self.stretch > 1.0 {
            reasons.push(format!(
                "shallower trees are predicted faster than the least traffic, which would allow {}",
                Seconds(bound_s)
            ));
        }
        if self.relayed_bytes > 0 {
            let bytes = Bytes(self.relayed_bytes);
            reasons.push(format!("{bytes} take a detour over a neighbouring device, whose NIC is free"));
        }
        self.plan
    }
}

/// What hosts can send to each other, and devices inside their host.
fn out_rates(problem: &Problem) -> (Vec<f64>, Vec<f64>) {
    let hosts = &problem.cluster.hosts;
    let local = hosts.iter().flat_map(|h| (0..h.devices).map(|_| h.local_bytes_per_s)).collect();
    (hosts.iter().map(|h| h.out_bytes_per_s()).collect(), local)
}

fn deepest(routes: &[Vec<Route>]) -> u32 {
    routes.iter().flatten().flat_map(|r| &r.edges).map(|e| e.depth).max().unwrap_or(0)
}

/// A chunk that lets the deepest chain fill in a small share of the time: with `n` lanes side by side on a port, a hop's
/// first chunk takes `n` chunks' time.
fn fitting_chunk(plan: &Plan, depth: u32) -> u64 {
    let topology = &plan.problem.topology;
    let mut port_bytes = vec![0u64; topology.ports.len()];
    let mut side_by_side: FxHashMap<u32, FxHashSet<(u32, u32)>> = FxHashMap::default();
    for transfer in plan.transfers().iter().filter(|t| plan.crosses_hosts(t)) {
        port_bytes[topology.port(transfer.src).index()] += transfer.bytes;
        if depth > 0 {
            side_by_side
                .entry(topology.port(transfer.src).0)
                .or_default()
                .insert((transfer.src.0, transfer.lane));
        }
    }
    let channels = side_by_side.values().map(|c| c.len() as u64).max().unwrap_or(1);
    let busiest = port_bytes.into_iter().max().unwrap_or(0);
    let chunk = busiest / (FILL_SHARE * u64::from(depth + 1) * channels);
    let power_of_two = 1 << chunk.max(1).ilog2();
    chunk.min(power_of_two).clamp(MIN_CHUNK, MAX_CHUNK)
}
