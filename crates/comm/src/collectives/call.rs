//! From a call to a job of the engine: its plan, its memory, and where every element lies.

use std::marker::PhantomData;
use std::sync::Arc;

use crossmesh_core::collective::{Call, Collective, Counts, in_place, plan};
use crossmesh_core::id::Rank;
use crossmesh_core::program::{Buffer as Place, OpKind, Program};
use crossmesh_core::region::Region;
use crossmesh_core::reshard::{Placed, Plan, Reshard, lower};
use crossmesh_core::verify::verify;

use super::element::{Element, Reduction};
use super::groups::GroupId;
use super::pool::{Buffer, Raw, Segment};
use super::{CallError, Collectives, Pending};
use crate::buffer::{ALIGN, HeldBox, RankBuffers, shard_of};
use crate::engine::{Handle, JobSpec};

/// Plans that are kept; more kinds of calls than this are planned anew.
const MAX_PLANS: usize = 1024;

/// A call's plan, on this rank.
pub(super) struct Planned {
    plan: Plan,
    program: Program,
    /// Elements in the rank's source and destination.
    src_len: u64,
    dst_len: u64,
    /// Both may lie in one place.
    in_place: bool,
    /// Where the rank's part of a dealt-out result begins.
    first_of_result: u64,
}

/// A call under way; it owns the memory that the engine moves.
pub(super) struct UnderWay {
    pub handle: Handle,
    pub result: Raw,
    pub divide_by: Option<u32>,
    /// Kept until the end.
    _source: Option<Raw>,
    _stages: Option<Segment>,
}

impl Collectives {
    pub(super) fn call<T: Element>(
        &self,
        collective: Collective,
        group: GroupId,
        counts: Counts,
    ) -> Result<Call, CallError> {
        let group = &self.groups.get(group)?.group;
        Ok(Call::new(collective, group, T::DTYPE, 0).with_counts(counts))
    }

    pub(super) fn start<T: Element>(
        &mut self,
        group: GroupId,
        call: Call,
        elements: Buffer<T>,
        reduction: Reduction,
    ) -> Result<Pending<T>, CallError> {
        let job = self.groups.next_job(group)?;
        self.start_job(job, call, elements, reduction)
    }

    pub(super) fn start_job<T: Element>(
        &mut self,
        job: u32,
        call: Call,
        elements: Buffer<T>,
        reduction: Reduction,
    ) -> Result<Pending<T>, CallError> {
        let parts = u32::try_from(call.group.len()).unwrap_or(u32::MAX);
        let planned = self.planned(&call)?;
        self.check_length(&call, &planned, elements.len())?;
        let located = self.places::<T>(&call, &planned, elements.raw)?;
        let program = &planned.program.ranks[self.me.index()];
        let stage_bytes = program.stages.iter().map(|bytes| bytes.next_multiple_of(ALIGN)).sum::<u64>();
        let stages = (stage_bytes > 0).then(|| self.pool.take(stage_bytes)).transpose();
        let stages = stages.map_err(|e| self.no_memory(stage_bytes as usize, &e))?;
        let buffers = planned.bind(self.me, &located, stages.as_ref());
        let mut spec = JobSpec::new(job, &planned.plan, &planned.program, self.me, &buffers)?;
        let Located { source, result, .. } = located;
        if source.is_none() {
            forget_copies(&mut spec);
        }
        spec.priority = self.priority;
        let handle = self.engine.start(spec)?;
        let divide_by = (reduction == Reduction::Mean && planned.dst_len > 0).then_some(parts);
        let under_way = UnderWay { handle, result, divide_by, _source: source, _stages: stages };
        self.under_way.insert(job, under_way);
        Ok(Pending { job, of: PhantomData })
    }

    /// The call's plan: known, or made, proven and kept.
    fn planned(&mut self, call: &Call) -> Result<Arc<Planned>, CallError> {
        let key = (call.clone(), self.options.clone());
        if let Some(known) = self.plans.get(&key) {
            return Ok(known.clone());
        }
        let plan = plan(std::slice::from_ref(call), &self.cluster, &self.options)?;
        verify(&plan).expect("a plan of ours is right");
        let planned = Arc::new(Planned::new(call, plan, self.me));
        if !call.has_rows() {
            if self.plans.len() >= MAX_PLANS {
                self.plans.clear();
            }
            self.plans.insert(key, planned.clone());
        }
        Ok(planned)
    }

    fn check_length(&self, call: &Call, planned: &Planned, found: usize) -> Result<(), CallError> {
        let expected = match call.collective {
            Collective::Broadcast => planned.dst_len,
            _ => planned.src_len,
        };
        if found as u64 != expected {
            let (collective, me) = (call.collective, self.me);
            return Err(CallError::Length { collective, me, what: "brings", found, expected });
        }
        Ok(())
    }

    /// Where the source and the result are. The elements that were brought are the source, and the result too where that
    /// is possible.
    fn places<T: Element>(&self, call: &Call, planned: &Planned, brought: Raw) -> Result<Located, CallError> {
        let receives_nothing = call.collective == Collective::Reduce && call.root != self.me;
        let is_broadcast = call.collective == Collective::Broadcast;
        if !planned.in_place && !receives_nothing && !is_broadcast {
            let result = self.buffer::<T>(planned.dst_len as usize)?.raw;
            return Ok(Located { source: Some(brought), result, origin: 0 });
        }
        let origin = brought.at;
        let result = match call.collective {
            Collective::ReduceScatter => {
                let first = planned.first_of_result * size_of::<T>() as u64;
                Raw { at: brought.at + first, len: planned.dst_len as usize, ..brought }
            }
            _ => brought,
        };
        Ok(Located { source: None, result, origin })
    }
}

/// Where a call's elements are.
struct Located {
    /// None where an element has one address in both layouts.
    source: Option<Raw>,
    result: Raw,
    /// The address of the first element of all, in that case.
    origin: u64,
}

impl Planned {
    fn new(call: &Call, plan: Plan, me: Rank) -> Self {
        let volume = |side: fn(&Reshard) -> &Placed| {
            let boxes = plan.problem.reshards.iter().flat_map(|r| shard_of(side(r), me));
            boxes.map(|b| b.volume()).sum::<u64>()
        };
        let (src_len, dst_len) = (volume(|r| &r.src), volume(|r| &r.dst));
        // A part has to be brought to its place among the others, or the other way round.
        let one_address = !matches!(call.collective, Collective::AllGather | Collective::AllToAll);
        let in_place = one_address && src_len > 0 && dst_len > 0 && in_place(&plan, me);
        let mine = plan.problem.reshards.first().and_then(|r| shard_of(&r.dst, me).into_iter().next());
        let first_of_result = mine.map_or(0, |region| region.spans()[0].start);
        Self { program: lower(&plan), src_len, dst_len, in_place, first_of_result, plan }
    }

    /// Every box's address.
    fn bind(&self, me: Rank, located: &Located, stages: Option<&Segment>) -> RankBuffers {
        let Located { source, result, origin } = located;
        let packed = source.is_some();
        let shards = |side: fn(&Reshard) -> &Placed, raw: &Raw| {
            let mut next = raw.at;
            let mut held = |placed: &Placed| -> Vec<HeldBox> {
                let element = placed.layout.dtype().bytes();
                let boxes = shard_of(placed, me).into_iter();
                let place = |region: Region| {
                    let start = region.spans()[0].start * element;
                    let base = if packed { next } else { origin + start };
                    next += region.volume() * element;
                    HeldBox { base, region }
                };
                boxes.map(place).collect()
            };
            self.plan.problem.reshards.iter().map(|r| held(side(r))).collect()
        };
        let source = source.as_ref().unwrap_or(result);
        let staged = stages.unwrap_or(&result.segment);
        let mut next = staged.at;
        let stage = |bytes: &u64| {
            let base = next;
            next += bytes.next_multiple_of(ALIGN);
            base
        };
        RankBuffers {
            src: shards(|r| &r.src, source),
            dst: shards(|r| &r.dst, result),
            stages: self.program.ranks[me.index()].stages.iter().map(stage).collect(),
            src_memory: source.segment.memory.clone(),
            dst_memory: result.segment.memory.clone(),
            memory: staged.memory.clone(),
            // The tensors are the caller's.
            tensor_bytes: 0,
        }
    }
}

/// What already lies where it belongs need not be copied there.
fn forget_copies(spec: &mut JobSpec) {
    for (op, places) in spec.program.ops.iter().zip(&mut spec.places) {
        if matches!(op.kind, OpKind::Copy { from: Place::Src, into: Place::Dst, reduce: false }) {
            (places.from, places.into) = (None, None);
        }
    }
}
