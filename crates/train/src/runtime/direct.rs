//! A group of ranks over an engine that turns while they wait: for programs that compute and talk in one thread.

use std::sync::{Arc, Mutex, PoisonError};

use crossmesh_comm::collectives::{CallError, Collectives, Element, GroupId};
use crossmesh_core::id::Rank;

use super::calls::What;
use super::wired::{Answer, Cause, Channel, Wired};
use crate::kernels::Kernels;

/// See the module.
pub struct Direct {
    comm: Arc<Mutex<Collectives>>,
    group: GroupId,
    rank: usize,
    size: usize,
}

impl Direct {
    /// The group of these ranks, this one among them, for buffers of these kernels. All ranks make their groups in one order.
    pub fn group<K: Kernels>(
        comm: &Arc<Mutex<Collectives>>,
        ranks: &[Rank],
        kernels: &Arc<K>,
    ) -> Result<Wired<K, Self>, CallError> {
        let mut locked = comm.lock().unwrap_or_else(PoisonError::into_inner);
        let group = locked.group(ranks)?;
        let rank = ranks.iter().position(|rank| *rank == locked.rank()).unwrap_or(0);
        let channel = Self { comm: Arc::clone(comm), group, rank, size: ranks.len() };
        Ok(Wired { kernels: Arc::clone(kernels), channel })
    }
}

impl Channel for Direct {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn start<T: Element>(&self, what: What, elements: &[T]) -> Result<Answer<T>, Cause> {
        let shared = Arc::clone(&self.comm);
        let mut comm = shared.lock().unwrap_or_else(PoisonError::into_inner);
        let elements = comm.buffer_of(elements)?;
        let pending = what.start(&mut comm, self.group, elements)?;
        drop(comm);
        Ok(Box::new(move || {
            let mut comm = shared.lock().unwrap_or_else(PoisonError::into_inner);
            Ok(comm.wait(pending)?)
        }))
    }
}
