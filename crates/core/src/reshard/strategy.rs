//! Which way to plan, by name.

use std::fmt;
use std::str::FromStr;

use super::plan::Plan;
use super::problem::{PlanError, Problem};
use super::{allgather, broadcast, flow, lower, sendrecv};
use crate::id::Rank;
use crate::sim::simulate;
use crate::units::{Bytes, Seconds};

/// How transfers are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Strategy {
    /// Every receiver gets every box from a sender of its own.
    SendRecv,
    /// Receivers that want the same get a slice each and gather inside the host (Alpa's baseline).
    AllGather,
    /// Every box travels along a chain of its receivers; the scheduler picks senders and order.
    Broadcast(Scheduler),
    /// Ours: at the bound.
    #[default]
    Flow,
    /// All of the above, by predicted time.
    Auto,
}

/// Who sends which box, and when: the ablation of the paper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scheduler {
    Naive,
    Balance,
    Dfs,
    Greedy,
}

impl Strategy {
    /// Every strategy that makes a plan of its own; `auto` picks among them.
    pub const CONCRETE: [Strategy; 7] = [
        Strategy::SendRecv,
        Strategy::AllGather,
        Strategy::Broadcast(Scheduler::Naive),
        Strategy::Broadcast(Scheduler::Balance),
        Strategy::Broadcast(Scheduler::Dfs),
        Strategy::Broadcast(Scheduler::Greedy),
        Strategy::Flow,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Strategy::SendRecv => "sendrecv",
            Strategy::AllGather => "allgather",
            Strategy::Broadcast(Scheduler::Naive) => "broadcast:naive",
            Strategy::Broadcast(Scheduler::Balance) => "broadcast:balance",
            Strategy::Broadcast(Scheduler::Dfs) => "broadcast:dfs",
            Strategy::Broadcast(Scheduler::Greedy) => "broadcast:greedy",
            Strategy::Flow => "flow",
            Strategy::Auto => "auto",
        }
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A strategy nobody knows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown strategy `{0}`\nhint: strategies are sendrecv, allgather, broadcast:naive, broadcast:balance, broadcast:dfs, broadcast:greedy, flow and auto"
)]
pub struct UnknownStrategy(pub String);

impl FromStr for Strategy {
    type Err = UnknownStrategy;

    /// `broadcast` alone is the paper's own choice, `broadcast:greedy`. What people and papers write is read too: `send/recv`,
    /// `all-gather`, `bc:dfs`.
    fn from_str(s: &str) -> Result<Self, UnknownStrategy> {
        let mut all = Strategy::CONCRETE.into_iter().chain([Strategy::Auto]);
        let plain = s.to_lowercase().replace(['-', '/', '_'], "");
        let plain =
            plain.strip_prefix("bc:").map_or(plain.clone(), |scheduler| format!("broadcast:{scheduler}"));
        match plain.as_str() {
            "broadcast" => Ok(Strategy::Broadcast(Scheduler::Greedy)),
            _ => all.find(|x| x.name() == plain).ok_or_else(|| UnknownStrategy(s.into())),
        }
    }
}

/// What a user may set about planning.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PlanOptions {
    pub strategy: Strategy,
    /// How much arrives before it is forwarded; chosen from the sizes if not given.
    pub chunk_bytes: Option<u64>,
    /// The most memory a rank may need beside its tensors.
    pub max_extra_bytes: Option<u64>,
    /// For the randomized schedulers. Same seed, same plan.
    pub seed: u64,
}

/// Plans a problem.
pub fn plan(problem: &Problem, options: &PlanOptions) -> Result<Plan, PlanError> {
    let plan = match options.strategy {
        Strategy::SendRecv => sendrecv::plan(problem, options),
        Strategy::AllGather => allgather::plan(problem, options),
        Strategy::Broadcast(scheduler) => broadcast::plan(problem, options, scheduler),
        Strategy::Flow => flow::plan(problem, options),
        Strategy::Auto => plan_fastest(problem, options),
    }?;
    // Whoever lowers, verifies or projects it asks who touches what.
    plan.touching();
    Ok(plan)
}

/// Memory beside the tensors that `auto` lets sums have, where nobody said how much: less of it means smaller turns, which can be
/// faster than large ones.
const TRIED_LIMITS: [u64; 2] = [1 << 20, 16 << 20];

/// Plans with every strategy that can, and takes the plan with the least predicted time among those that devices have the room
/// for; the earlier on a tie. Only if none can plan does it fail, with `flow`'s reason.
fn plan_fastest(problem: &Problem, options: &PlanOptions) -> Result<Plan, PlanError> {
    let mut tries: Vec<(String, PlanOptions)> = vec![];
    for strategy in Strategy::CONCRETE.into_iter().rev() {
        tries.push((strategy.to_string(), PlanOptions { strategy, ..options.clone() }));
    }
    if options.max_extra_bytes.is_none() && problem.reshards.iter().any(|r| r.src.layout.partial().is_some())
    {
        for limit in TRIED_LIMITS {
            let strategy = Strategy::Flow;
            let limited = PlanOptions { strategy, max_extra_bytes: Some(limit), ..options.clone() };
            tries.push((format!("{strategy} within {}", Bytes(limit)), limited));
        }
    }
    let (mut candidates, mut failures) = (vec![], vec![]);
    for (name, options) in tries {
        match plan(problem, &options) {
            Ok(plan) => candidates.push(Candidate::of(name, plan)),
            Err(error) => failures.push((name, error)),
        }
    }
    let all: Vec<String> = candidates.iter().map(Candidate::describe).collect();
    let Some(best) = candidates.into_iter().reduce(Candidate::better) else {
        return Err(failures.swap_remove(0).1);
    };
    let mut plan = best.plan;
    plan.reasons.insert(0, format!("auto chose {} by predicted time: {}", best.name, all.join(", ")));
    // That baselines cannot add up goes without saying.
    for (name, error) in failures.iter().filter(|(_, e)| !matches!(e, PlanError::CannotReduce { .. })) {
        let said = error.to_string();
        plan.reasons.insert(1, format!("{name} cannot: {}", said.lines().next().unwrap_or_default()));
    }
    Ok(plan)
}

/// A plan that `auto` looks at.
struct Candidate {
    name: String,
    plan: Plan,
    predicted_s: f64,
    /// Of the rank that needs most.
    extra_bytes: u64,
    fits: bool,
}

impl Candidate {
    fn of(name: String, plan: Plan) -> Self {
        let program = lower(&plan);
        let trace = simulate(&program, &plan.problem.cluster);
        let has_room = |(rank, needed): (usize, u64)| {
            plan.problem.memory_of(Rank::at(rank)).is_none_or(|room| needed <= room)
        };
        let needed = program.ranks.iter().map(|r| r.buffers.iter().map(|b| b.bytes).sum::<u64>());
        Self {
            predicted_s: trace.expect("a planned program runs to its end").makespan_s,
            extra_bytes: program.ranks.iter().map(|r| r.extra_bytes()).max().unwrap_or(0),
            fits: needed.enumerate().all(has_room),
            name,
            plan,
        }
    }

    /// The one that fits, the faster one, the first.
    fn better(self, other: Self) -> Self {
        let is_better = match (self.fits, other.fits) {
            (true, false) => false,
            (false, true) => true,
            _ => other.predicted_s < self.predicted_s * 0.999,
        };
        if is_better { other } else { self }
    }

    fn describe(&self) -> String {
        let memory = match self.extra_bytes {
            0 => String::new(),
            bytes => format!(" with {}", Bytes(bytes)),
        };
        let room = if self.fits { "" } else { ", which does not fit" };
        format!("{} {}{memory}{room}", self.name, Seconds(self.predicted_s))
    }
}

/// The fewest bytes worth a chunk of their own.
pub const MIN_CHUNK_BYTES: u64 = 1 << 10;

/// How much arrives before it is forwarded: what the user said, else the power of two that cuts all bytes into some
/// two thousand chunks. A chain of eight hosts then fills within half a percent of the whole; below 64 KiB a chunk
/// costs more to announce than to send, and above 4 MiB it no longer fits a cache.
pub fn default_chunk(problem: &Problem, options: &PlanOptions) -> Result<u64, PlanError> {
    if let Some(chunk) = options.chunk_bytes {
        return if chunk < MIN_CHUNK_BYTES { Err(PlanError::ChunkTooSmall(chunk)) } else { Ok(chunk) };
    }
    let total = problem.reshards.iter().fold(0u64, |n, r| n.saturating_add(r.src.layout.bytes()));
    let chunk = 1u64 << (total / 2048).max(1).ilog2();
    Ok(chunk.clamp(64 << 10, 4 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reshard::testing::problem;

    #[test]
    fn a_chunk_is_a_two_thousandth_within_limits() {
        let chunk = |elems: u64| {
            let p = problem(&[(&format!("u8[{elems}]@A{{y:1}}(_)"), &format!("u8[{elems}]@B{{y:1}}(_)"))]);
            default_chunk(&p, &PlanOptions::default()).unwrap()
        };
        assert_eq!(chunk(0), 64 << 10);
        assert_eq!(chunk(1 << 30), 512 << 10);
        assert_eq!(chunk((1 << 30) + (1 << 29)), 512 << 10);
        assert_eq!(chunk(1 << 40), 4 << 20);
    }

    #[test]
    fn strategies_are_read_as_people_and_papers_write_them() {
        for strategy in Strategy::CONCRETE.into_iter().chain([Strategy::Auto]) {
            assert_eq!(strategy.name().parse(), Ok(strategy));
        }
        for (text, strategy) in [
            ("send/recv", Strategy::SendRecv),
            ("send-recv", Strategy::SendRecv),
            ("All-Gather", Strategy::AllGather),
            ("broadcast", Strategy::Broadcast(Scheduler::Greedy)),
            ("bc:dfs", Strategy::Broadcast(Scheduler::Dfs)),
        ] {
            assert_eq!(text.parse(), Ok(strategy), "{text}");
        }
        assert!("bc:fastest".parse::<Strategy>().is_err() && "".parse::<Strategy>().is_err());
    }

    #[test]
    fn auto_does_without_strategies_that_fail() {
        // Flow's way to many NICs is not the baselines'; whichever can, does.
        let options = |limit| PlanOptions {
            strategy: Strategy::Auto,
            max_extra_bytes: Some(limit),
            ..PlanOptions::default()
        };
        let sum = problem(&[("f32[64,64]@A{h:4}(_,_ | sum h)", "f32[64,64]@B{x:2}(x,_)")]);
        assert_eq!(plan(&sum, &options(4096)).unwrap().strategy, "flow");
        let flow = PlanOptions { strategy: Strategy::Flow, ..options(1) };
        // Nobody can: flow's reason, which says how much would do.
        assert_eq!(plan(&sum, &options(1)).unwrap_err(), plan(&sum, &flow).unwrap_err());
        let copies = problem(&[("f32[64,64]@A{h:4}(h,_)", "f32[64,64]@B{x:2}(_,_)")]);
        assert!(plan(&copies, &options(0)).is_ok());
    }

    #[test]
    fn auto_tries_less_memory_for_sums_and_takes_what_fits() {
        let auto = PlanOptions { strategy: Strategy::Auto, ..PlanOptions::default() };
        let mut sum = problem(&[("f32[4096,512]@A{h:8}(_,_ | sum h)", "f32[4096,512]@B{x:4}(x,_)")]);
        let chosen = plan(&sum, &auto).unwrap();
        assert!(chosen.reasons[0].contains("flow within 1.00 MiB"), "{:?}", chosen.reasons);
        let least = |max_extra_bytes| {
            let flow = PlanOptions { strategy: Strategy::Flow, max_extra_bytes, ..PlanOptions::default() };
            plan(&sum, &flow).map_or(f64::INFINITY, |plan| plan.predicted_s())
        };
        let best = [None, Some(1 << 20), Some(16 << 20)].map(least).into_iter().fold(f64::INFINITY, f64::min);
        assert!(chosen.predicted_s() <= best * 1.002, "{} s, {best} s were there", chosen.predicted_s());
        // With room for the shards and a little more, only a plan that needs little fits.
        let shards = 4096 * 512 * 4;
        sum.cluster.hosts.iter_mut().for_each(|host| host.memory_bytes = Some(shards + (2 << 20)));
        let chosen = plan(&sum, &auto).unwrap();
        let extra = lower(&chosen).ranks.iter().map(|r| r.extra_bytes()).max();
        assert!(extra <= Some(2 << 20), "{extra:?}: {:?}", chosen.reasons);
    }

    #[test]
    fn a_chunk_of_nothing_is_refused() {
        let p = problem(&[("u8[4]@A{y:1}(_)", "u8[4]@B{y:1}(_)")]);
        let options = PlanOptions { chunk_bytes: Some(0), ..PlanOptions::default() };
        assert_eq!(default_chunk(&p, &options), Err(PlanError::ChunkTooSmall(0)));
    }
}
