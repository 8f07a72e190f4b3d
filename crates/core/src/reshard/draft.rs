//! A plan in the making, under the execution rules of the baselines.
//!
//! A device has one stream: it takes part in one op at a time, in the order the plan lists them, and an op it cannot
//! start yet holds up the ones behind it. Devices of a host share its NICs equally. So a transfer waits for the last
//! op of its sender and of its receiver:
//!
//! ```text
//! op 0   a0 -> c0
//! op 1   b0 -> c0      waits for op 0: c0 is busy
//! op 2   a0 -> d0      waits for op 0: a0 is busy; runs beside op 1
//! ```
//!
//! An op may be several transfers, as along a chain of forwarders; these wait for the op before, not for each other.

use crate::id::{Rank, RegionId, TransferId};
use crate::region::Region;

use super::plan::Plan;
use super::problem::{PlanError, Problem};
use super::strategy::{PlanOptions, Strategy, default_chunk};

pub(super) struct Draft {
    pub plan: Plan,
    /// For every rank, the transfers of the last op that touched it.
    last: Vec<Vec<TransferId>>,
    /// What the op in the making has touched so far.
    op: Vec<(Rank, TransferId)>,
}

impl Draft {
    /// Refuses partial sums: the baselines only move whole values.
    pub fn new(problem: &Problem, options: &PlanOptions, strategy: Strategy) -> Result<Self, PlanError> {
        if let Some(r) = problem.reshards.iter().find(|r| r.src.layout.num_contributions() > 1) {
            let src = r.src.layout.to_string();
            return Err(PlanError::CannotReduce { strategy: strategy.to_string(), src });
        }
        let chunk_bytes = default_chunk(problem, options)?;
        let plan = Plan::new(problem.clone(), strategy.name(), chunk_bytes);
        Ok(Self { plan, last: vec![vec![]; problem.topology.num_ranks()], op: vec![] })
    }

    pub fn add_regions(&mut self, regions: &[Region]) -> Vec<RegionId> {
        regions.iter().map(|r| self.plan.add_region(r.clone())).collect()
    }

    /// Adds a transfer to the current op. With `upstream` it forwards, chunk by chunk, what that transfer brings; the
    /// sender then already waited for its turn when `upstream` did.
    pub fn send(
        &mut self,
        tensor: u32,
        src: Rank,
        dst: Rank,
        region: RegionId,
        upstream: Option<TransferId>,
    ) -> TransferId {
        let mut after: Vec<TransferId> = upstream.into_iter().collect();
        if upstream.is_none() {
            after.extend(&self.last[src.index()]);
        }
        for id in &self.last[dst.index()] {
            if !after.contains(id) {
                after.push(*id);
            }
        }
        let id = self.forward(tensor, src, dst, region, &after);
        self.op.extend([(src, id), (dst, id)]);
        id
    }

    /// Adds a transfer that is in nobody's stream and waits for `after` alone.
    pub fn forward(
        &mut self,
        tensor: u32,
        src: Rank,
        dst: Rank,
        region: RegionId,
        after: &[TransferId],
    ) -> TransferId {
        let id = self.plan.add(tensor, src, dst, region, after);
        // Equal shares of a contended link, as NCCL's channels get.
        self.plan.transfer_mut(id).weight = 1;
        id
    }

    /// Closes the current op: what follows on its devices waits for it.
    pub fn end_op(&mut self) {
        for (rank, _) in &self.op {
            self.last[rank.index()].clear();
        }
        for (rank, id) in self.op.drain(..) {
            self.last[rank.index()].push(id);
        }
    }

    pub fn finish(self) -> Result<Plan, PlanError> {
        debug_assert!(self.op.is_empty(), "every op was closed");
        self.plan.check_size()?;
        Ok(self.plan)
    }
}
