//! Which way to plan, by name.

use std::fmt;
use std::str::FromStr;

use super::plan::Plan;
use super::problem::{PlanError, Problem};

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

    /// `broadcast` alone is the paper's own choice, `broadcast:greedy`.
    fn from_str(s: &str) -> Result<Self, UnknownStrategy> {
        let mut all = Strategy::CONCRETE.into_iter().chain([Strategy::Auto]);
        match s {
            "broadcast" => Ok(Strategy::Broadcast(Scheduler::Greedy)),
            _ => all.find(|x| x.name() == s).ok_or_else(|| UnknownStrategy(s.into())),
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
    super::flow::plan_flow(problem, options)
}
