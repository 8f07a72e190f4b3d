//! From a call to a job of the engine: its plan, its memory, and where every element lies.

use std::marker::PhantomData;
use std::sync::Arc;

use crossmesh_core::collective::{Call, Collective, Counts, in_place, plan};
use crossmesh_core::id::Rank;
use crossmesh_core::program::{Holds, Role, Tile};
use crossmesh_core::reshard::Plan;
use crossmesh_core::reshard::lower::Addressing;
use crossmesh_core::verify::{Verified, VerifiedRank};

use super::element::{Element, Reduction};
use super::groups::GroupId;
use super::pool::{Buffer, Raw, Segment};
use super::{CallError, Collectives, Pending};
use crate::buffer::{ALIGN, Base, RankBuffers};
use crate::engine::{Handle, JobSpec};

/// Plans that are kept; more kinds of calls than this are planned anew.
const MAX_PLANS: usize = 1024;

/// A call's plan, on this rank.
pub(super) struct Planned {
    program: VerifiedRank,
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
        let staging = planned.program.buffers.iter().filter(|b| b.role == Role::Staging);
        let stage_bytes = staging.map(|b| b.bytes.next_multiple_of(ALIGN)).sum::<u64>();
        let stages = (stage_bytes > 0).then(|| self.pool.take(stage_bytes)).transpose();
        let stages = stages.map_err(|e| self.no_memory(stage_bytes as usize, &e))?;
        let buffers = planned.bind(&located, stages.as_ref());
        let mut spec = JobSpec::new(job, &buffers)?;
        let Located { source, result, .. } = located;
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
        let planned = Arc::new(Planned::new(call, &plan, self.me));
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
        if !planned.in_place {
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
    fn new(call: &Call, plan: &Plan, me: Rank) -> Self {
        // A part has to be brought to its place among the others, or the other way round.
        let one_address = !matches!(call.collective, Collective::AllGather | Collective::AllToAll);
        let may = one_address && plan.problem.reshards.len() == 1;
        let in_place = may.then(|| in_place(plan, me)).flatten();
        let (program, in_place) = match in_place {
            Some(program) => (program, true),
            None => (Verified::plan(plan, Addressing::Apart).expect("a plan of ours is right"), false),
        };
        let program = program.rank(me);
        let region = |tile: &Tile| &program.whole().boxes[tile.region];
        let sources = program.tiles.iter().filter(|t| matches!(t.holds, Holds::Source(_)));
        let src_len = sources.map(|t| region(t).volume()).sum();
        let goals = || program.tiles.iter().filter(|t| t.holds == Holds::Goal);
        let dst_len = goals().map(|t| region(t).volume()).sum();
        let first_of_result = goals().next().map_or(0, |t| region(t).spans()[0].start);
        Self { src_len, dst_len, in_place, first_of_result, program }
    }

    /// Every buffer's address.
    fn bind(&self, located: &Located, stages: Option<&Segment>) -> RankBuffers {
        let Located { source, result, origin } = located;
        let staged = stages.unwrap_or(&result.segment);
        let (mut in_source, mut in_result, mut in_stages) =
            (source.as_ref().map_or(0, |s| s.at), result.at, staged.at);
        let bases = self.program.buffers.iter().map(|buffer| match buffer.role {
            Role::Staging => {
                let at = in_stages;
                in_stages += buffer.bytes.next_multiple_of(ALIGN);
                Base { memory: staged.memory.clone(), at }
            }
            Role::Source(_) => {
                let source = source.as_ref().expect("sources and results lie apart");
                let at = in_source;
                in_source += buffer.bytes;
                Base { memory: source.segment.memory.clone(), at }
            }
            Role::InPlace(_) => Base { memory: result.segment.memory.clone(), at: *origin },
            Role::Destination(_) | Role::Crossing => {
                let at = in_result;
                in_result += buffer.bytes;
                Base { memory: result.segment.memory.clone(), at }
            }
        });
        let bases = bases.collect();
        RankBuffers::bound(self.program.clone(), bases)
    }
}
