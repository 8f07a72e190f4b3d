//! A group of a stage's ranks, over the engine.

use std::ops::Range;

use crossmesh_comm::collectives::{Buffer, Element, GroupId};

use super::calls::{Calls, Urgency, What};
use crate::group::{Group, GroupError, ReduceOp};
use crate::kernels::cpu::HostBuf;
use crate::kernels::scalar::Scalar;

/// See the module.
pub struct Wired {
    pub calls: Calls,
    pub group: GroupId,
    pub rank: usize,
    pub size: usize,
}

impl Wired {
    fn run<T: Element>(
        &self,
        operation: &'static str,
        what: What,
        elements: &[T],
    ) -> Result<Buffer<T>, GroupError> {
        let failed = |cause: Box<dyn std::error::Error + Send + Sync>| GroupError {
            operation,
            elements: elements.len(),
            rank: self.rank,
            size: self.size,
            cause,
        };
        let promise = self.calls.start(self.group, what, elements, Urgency::Now);
        promise.map_err(|e| failed(e.into()))?.wait().map_err(|e| failed(e.into()))
    }
}

impl<T: Scalar + Element> Group<HostBuf<T>> for Wired {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn all_reduce(&self, buf: &mut HostBuf<T>, op: ReduceOp) -> Result<(), GroupError> {
        let sums = self.run("an all-reduce", What::AllReduce(op.into()), buf)?;
        buf.copy_from_slice(&sums);
        Ok(())
    }

    fn all_gather(&self, whole: &mut HostBuf<T>, parts: &[Range<usize>]) -> Result<(), GroupError> {
        let own = &whole[parts[self.rank].clone()];
        let all = self.run("an all-gather", What::AllGather(counts(parts)), own)?;
        whole.copy_from_slice(&all);
        Ok(())
    }

    fn reduce_scatter(&self, whole: &mut HostBuf<T>, parts: &[Range<usize>]) -> Result<(), GroupError> {
        let own = self.run("a reduce-scatter", What::ReduceScatter(counts(parts)), whole)?;
        whole[parts[self.rank].clone()].copy_from_slice(&own);
        Ok(())
    }
}

/// How long parts are that follow each other from 0 on.
pub fn counts(parts: &[Range<usize>]) -> Vec<u64> {
    parts.iter().map(|part| part.len() as u64).collect()
}
