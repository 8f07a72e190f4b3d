//! A group of ranks over an engine that turns while they wait: for programs that compute and talk in one thread.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crossmesh_comm::collectives::{Buffer, CallError, Collectives, Element, GroupId, Pending, Reduction};
use crossmesh_core::collective::Counts;
use crossmesh_core::id::Rank;

use super::wired::counts;
use crate::group::{Group, GroupError, ReduceOp};
use crate::kernels::cpu::HostBuf;
use crate::kernels::scalar::Scalar;

/// See the module.
pub struct Direct {
    comm: Arc<Mutex<Collectives>>,
    group: GroupId,
    rank: usize,
    size: usize,
}

impl Direct {
    /// The group of these ranks, this one among them. All of them make their groups in one order.
    pub fn new(comm: &Arc<Mutex<Collectives>>, ranks: &[Rank]) -> Result<Self, CallError> {
        let mut locked = comm.lock().unwrap_or_else(PoisonError::into_inner);
        let group = locked.group(ranks)?;
        let rank = ranks.iter().position(|rank| *rank == locked.rank()).unwrap_or(0);
        Ok(Self { comm: Arc::clone(comm), group, rank, size: ranks.len() })
    }

    fn run<T: Element>(
        &self,
        operation: &'static str,
        elements: &[T],
        start: impl FnOnce(&mut Collectives, Buffer<T>) -> Result<Pending<T>, CallError>,
    ) -> Result<Buffer<T>, GroupError> {
        let mut comm = self.comm.lock().unwrap_or_else(PoisonError::into_inner);
        let buffer = comm.buffer_of(elements);
        let done = buffer.and_then(|buffer| start(&mut comm, buffer)).and_then(|pending| comm.wait(pending));
        done.map_err(|cause| GroupError {
            operation,
            elements: elements.len(),
            rank: self.rank,
            size: self.size,
            cause: cause.into(),
        })
    }
}

impl<T: Scalar + Element> Group<HostBuf<T>> for Direct {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn all_reduce(&self, buf: &mut HostBuf<T>, op: ReduceOp) -> Result<(), GroupError> {
        let sums =
            self.run("an all-reduce", buf, |comm, x| comm.start_all_reduce(self.group, x, op.into()))?;
        buf.copy_from_slice(&sums);
        Ok(())
    }

    fn all_gather(&self, whole: &mut HostBuf<T>, parts: &[Range<usize>]) -> Result<(), GroupError> {
        let counts = Counts::PerRank(counts(parts));
        let own = &whole[parts[self.rank].clone()];
        let all = self.run("an all-gather", own, |comm, x| comm.start_all_gather_v(self.group, x, counts))?;
        whole.copy_from_slice(&all);
        Ok(())
    }

    fn reduce_scatter(&self, whole: &mut HostBuf<T>, parts: &[Range<usize>]) -> Result<(), GroupError> {
        let counts = Counts::PerRank(counts(parts));
        let own = self.run("a reduce-scatter", whole, |comm, x| {
            comm.start_reduce_scatter_v(self.group, x, counts, Reduction::Sum)
        })?;
        whole[parts[self.rank].clone()].copy_from_slice(&own);
        Ok(())
    }
}
