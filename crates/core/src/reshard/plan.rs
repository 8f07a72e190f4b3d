//! A plan: transfers of boxes, with the order they need.
//!
//! Three rules give a plan its meaning; the verifier, the simulator and the engine all follow them:
//! - **Holding.** A rank may send what it holds from the start, or what a transfer named in `after` brought it.
//! - **Forwarding streams.** A transfer whose box arrives by a transfer in `after` follows it chunk by chunk, and
//!   belongs to the same lane. Any other entry of `after` is plain order: it is waited for at the rank that both have in
//!   common, until it has left or arrived there; or where they have none in common, until it has arrived.
//! - **Channels are first in, first out.** Transfers of one lane from one rank to another travel in list order; other
//!   channels run side by side. Where they share a link they share it in proportion to their `weight`.
//!
//! With `reduce`, the receiver combines what arrives with what it has: with its own part of the partial sum, and with
//! what earlier transfers brought it. Boxes that parts of a sum arrive in on one rank are the same or disjoint. What
//! arrives in one box does so in list order, adding to it with `reduce` and replacing it without. A sum is sent by a
//! transfer that names, in `after`, what was added last; a transfer that names none of it sends the rank's own
//! part alone. What arrives later waits, by `after`, for those who send what was there before.
//!
//! A sum is thus added up in an order that the plan fixes, never in one that depends on timing. The receiver's own part
//! comes first, unless the first to arrive replaces it; then it joins behind the transfer that says `then_own`:
//!
//! ```text
//! r0 -> r2   b               r2: x0
//! r1 -> r2   b, reduce, then_own     x0 + x1, then + x2
//! r3 -> r2   b, reduce               x0 + x1 + x2 + x3
//! ```

use std::sync::{Arc, OnceLock};

use crate::id::{Rank, RegionId, TransferId};
use crate::region::Region;
use crate::sim::simulate;

use super::lower::{Touching, lower};
use super::problem::{PlanError, Problem};

/// One box on its way from one rank to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// Index into the problem's reshards.
    pub tensor: u32,
    pub src: Rank,
    pub dst: Rank,
    /// The stream it belongs to: that of the transfer it follows; else the number of its source's rank, unless the
    /// strategy gave it another.
    pub lane: u32,
    pub region: RegionId,
    pub bytes: u64,
    /// Its share of a contended link, against the weights of the others.
    pub weight: u64,
    pub reduce: bool,
    /// Once it has arrived, the receiver adds its own part of the sum.
    pub then_own: bool,
    after_start: u32,
    after_len: u32,
}

/// Transfers that turn the source layouts of a [`Problem`] into its destination layouts. Two plans are equal if they
/// say the same; how their tables of boxes are numbered does not matter.
#[derive(Debug, Clone)]
pub struct Plan {
    pub problem: Problem,
    /// The strategy's name, as the user would type it.
    pub strategy: String,
    /// How much of a transfer has to arrive before it can be forwarded.
    pub chunk_bytes: u64,
    /// Why the strategy chose what it chose, a sentence each.
    pub reasons: Vec<String>,
    /// Shared with the programs that are made of the plan.
    regions: Arc<Vec<Region>>,
    transfers: Vec<Transfer>,
    /// The `after` lists of all transfers, one behind the other.
    after: Vec<TransferId>,
    /// Which transfers touch which rank, once somebody has asked.
    touching: OnceLock<Arc<Touching>>,
}

impl PartialEq for Plan {
    fn eq(&self, other: &Self) -> bool {
        let said = |p: &Self, t: &Transfer| {
            (t.tensor, t.src, t.dst, t.lane, t.bytes, t.weight, t.reduce, t.then_own, p.after(t).to_vec())
        };
        let same = |(a, b): (&Transfer, &Transfer)| {
            said(self, a) == said(other, b) && self.region(a) == other.region(b)
        };
        self.problem == other.problem
            && (&self.strategy, self.chunk_bytes) == (&other.strategy, other.chunk_bytes)
            && self.reasons == other.reasons
            && self.transfers.len() == other.transfers.len()
            && self.transfers.iter().zip(&other.transfers).all(same)
    }
}

impl Plan {
    pub fn new(problem: Problem, strategy: impl Into<String>, chunk_bytes: u64) -> Self {
        Self {
            problem,
            strategy: strategy.into(),
            chunk_bytes,
            reasons: vec![],
            regions: Arc::default(),
            transfers: vec![],
            after: vec![],
            touching: OnceLock::new(),
        }
    }

    pub fn transfers(&self) -> &[Transfer] {
        &self.transfers
    }

    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    pub(crate) fn shared_regions(&self) -> Arc<Vec<Region>> {
        self.regions.clone()
    }

    /// Whether no transfer waits for another.
    pub(crate) fn is_unordered(&self) -> bool {
        self.after.is_empty()
    }

    /// Which transfers touch which rank: found once, and kept. With it a rank's part costs what the rank's own transfers cost.
    pub(crate) fn touching(&self) -> &Touching {
        self.touching.get_or_init(|| Arc::new(Touching::all(self)))
    }

    /// The same, if it has been found already.
    pub(crate) fn known_touching(&self) -> Option<&Touching> {
        self.touching.get().map(|touching| &**touching)
    }

    /// The `after` lists of all transfers as one, and where a transfer's list is in it.
    pub(crate) fn after_range(&self, transfer: &Transfer) -> std::ops::Range<u32> {
        transfer.after_start..transfer.after_start + transfer.after_len
    }

    pub fn region(&self, transfer: &Transfer) -> &Region {
        &self.regions[transfer.region.index()]
    }

    pub fn after(&self, transfer: &Transfer) -> &[TransferId] {
        &self.after[transfer.after_start as usize..][..transfer.after_len as usize]
    }

    pub fn add_region(&mut self, region: Region) -> RegionId {
        let regions = Arc::make_mut(&mut self.regions);
        regions.push(region);
        RegionId::at(regions.len() - 1)
    }

    /// Adds a transfer; its weight is its size.
    pub fn add(
        &mut self,
        tensor: u32,
        src: Rank,
        dst: Rank,
        region: RegionId,
        after: &[TransferId],
    ) -> TransferId {
        let dtype = self.problem.reshards[tensor as usize].src.layout.dtype();
        let bytes = self.regions[region.index()].volume() * dtype.bytes();
        self.touching.take();
        let after_start = self.after.len() as u32;
        self.after.extend_from_slice(after);
        let lane = self.usual_lane(tensor, src, region, after);
        self.transfers.push(Transfer {
            tensor,
            src,
            dst,
            lane,
            region,
            bytes,
            weight: bytes.max(1),
            reduce: false,
            then_own: false,
            after_start,
            after_len: after.len() as u32,
        });
        TransferId::at(self.transfers.len() - 1)
    }

    /// The lane of the next transfer, unless a strategy knows better: that of the transfer it follows, else the number
    /// of its source.
    fn usual_lane(&self, tensor: u32, src: Rank, region: RegionId, after: &[TransferId]) -> u32 {
        let lane_of_leader = |leader: &TransferId| {
            // An `after` that points forward, as a plan file's may, leads nobody; the verifier has its say about it.
            let leader = self.transfers.get(leader.index())?;
            let same_box = leader.region == region || self.region(leader) == &self.regions[region.index()];
            (leader.dst == src && leader.tensor == tensor && same_box).then_some(leader.lane)
        };
        after.iter().find_map(lane_of_leader).unwrap_or(src.0)
    }

    /// Whether a transfer's lane is not the one that [`Plan::add`] gave it.
    pub fn has_own_lane(&self, id: TransferId) -> bool {
        let t = &self.transfers[id.index()];
        let earlier: Vec<TransferId> = self.after(t).iter().copied().filter(|a| *a < id).collect();
        t.lane != self.usual_lane(t.tensor, t.src, t.region, &earlier)
    }

    pub fn transfer_mut(&mut self, id: TransferId) -> &mut Transfer {
        self.touching.take();
        &mut self.transfers[id.index()]
    }

    /// Makes it a part of a plan of a larger problem, in which its tensors have these numbers.
    pub(crate) fn renumber(&mut self, problem: Problem, numbers: &[u32]) {
        self.transfers.iter_mut().for_each(|t| t.tensor = numbers[t.tensor as usize]);
        self.problem = problem;
    }

    /// Ids are 32 bits wide, and so are a plan's tables.
    pub fn check_size(&self) -> Result<(), PlanError> {
        let limit = u64::from(u32::MAX);
        if self.transfers.len() as u64 > limit || self.after.len() as u64 > limit {
            return Err(PlanError::TooLarge { what: "transfers", limit });
        }
        Ok(())
    }

    /// Bytes over all transfers.
    pub fn bytes_moved(&self) -> u64 {
        self.transfers.iter().map(|t| t.bytes).sum()
    }

    /// How long the simulator takes it to run. For plans of our own: one that was read has to be verified first.
    pub(crate) fn predicted_s(&self) -> f64 {
        let trace = simulate(&lower(self), &self.problem.cluster);
        trace.expect("a planned program runs to its end").makespan_s
    }

    /// Over all transfers between hosts.
    pub fn bytes_between_hosts(&self) -> u64 {
        self.transfers.iter().filter(|t| self.crosses_hosts(t)).map(|t| t.bytes).sum()
    }

    /// Whether a transfer crosses the network.
    pub fn crosses_hosts(&self, transfer: &Transfer) -> bool {
        !self.problem.topology.same_host(transfer.src, transfer.dst)
    }
}
