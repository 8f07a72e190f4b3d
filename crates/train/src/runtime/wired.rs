//! A group of a stage's ranks, over the engine: numbers travel from host memory to host memory, wherever a device keeps them.

use std::ops::Range;
use std::sync::Arc;

use crossmesh_comm::collectives::{Buffer, Element, GroupId};

use super::calls::{Calls, Urgency, What};
use crate::group::{Collective, Coming, Group, GroupError, ReduceOp};
use crate::kernels::{BufSlice, Buffer as _, Kernels, PartMut};
use crate::strands::Turn;

/// A way to collectives of numbers on the host.
pub trait Channel: Send + Sync {
    fn rank(&self) -> usize;
    fn size(&self) -> usize;
    /// Starts a collective; its result comes from what it returns.
    fn start<T: Element>(&self, what: What, elements: &[T]) -> Result<Answer<T>, Cause>;
}

/// Waits for what a collective comes to.
pub type Answer<T> = Box<dyn FnOnce() -> Result<Buffer<T>, Cause> + Send>;

/// Why a collective failed.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

/// See the module.
pub struct Wired<K, C> {
    pub kernels: Arc<K>,
    pub channel: C,
}

impl<K: Kernels, C: Channel> Wired<K, C> {
    /// A collective that takes a part of a buffer and leaves its result in another.
    fn run(
        &self,
        operation: &'static str,
        what: What,
        buf: &mut K::Buf,
        (from, to): (Range<usize>, Range<usize>),
    ) -> Result<(), GroupError> {
        let (elements, rank, size) = (from.len(), self.channel.rank(), self.channel.size());
        let failed = |cause| GroupError { operation, elements, rank, size, cause };
        let source = BufSlice { buf: &*buf, start: from.start };
        if buf.is_wide() {
            let answer = self.channel.start(what, &self.kernels.reals(source, elements)).map_err(failed)?;
            let result = answer().map_err(failed)?;
            self.kernels.put_reals(&result[..to.len()], PartMut { buf, start: to.start });
        } else {
            let answer = self.channel.start(what, &self.kernels.elems(source, elements)).map_err(failed)?;
            let result = answer().map_err(failed)?;
            self.kernels.put_elems(&result[..to.len()], PartMut { buf, start: to.start });
        }
        Ok(())
    }
}

impl<K: Kernels, C: Channel> Group<K::Buf> for Wired<K, C> {
    fn rank(&self) -> usize {
        self.channel.rank()
    }

    fn size(&self) -> usize {
        self.channel.size()
    }

    fn start(&self, what: Collective<'_>, buf: K::Buf) -> Result<Coming<K::Buf>, GroupError> {
        let (rank, size, all) = (self.channel.rank(), self.channel.size(), 0..buf.len());
        let (operation, call, from) = match what {
            Collective::AllReduce(op) => ("an all-reduce", What::AllReduce(op.into()), all),
            Collective::AllGather(parts) => {
                ("an all-gather", What::AllGather(counts(parts)), parts[rank].clone())
            }
            Collective::ReduceScatter(parts) => ("a reduce-scatter", What::ReduceScatter(counts(parts)), all),
        };
        let elements = from.len();
        let failed = move |cause| GroupError { operation, elements, rank, size, cause };
        // Of a sum that is dealt out only a part comes back; everything else goes where it came from.
        let own = match what {
            Collective::ReduceScatter(parts) => Some(parts[rank].len()),
            _ => None,
        };
        let kernels = Arc::clone(&self.kernels);
        let source = BufSlice { buf: &buf, start: from.start };
        if buf.is_wide() {
            let answer = self.channel.start(call, &kernels.reals(source, elements)).map_err(failed)?;
            return Ok(Coming::new(move || {
                let result = answer().map_err(failed)?;
                let mut to = own.map_or(buf, |len| kernels.wide(len));
                let len = to.len();
                kernels.put_reals(&result[..len], (&mut to).into());
                Ok(to)
            }));
        }
        let answer = self.channel.start(call, &kernels.elems(source, elements)).map_err(failed)?;
        Ok(Coming::new(move || {
            let result = answer().map_err(failed)?;
            let mut to = own.map_or(buf, |len| kernels.buffer(len));
            let len = to.len();
            kernels.put_elems(&result[..len], (&mut to).into());
            Ok(to)
        }))
    }

    fn all_reduce(&self, buf: &mut K::Buf, op: ReduceOp) -> Result<(), GroupError> {
        let all = 0..buf.len();
        self.run("an all-reduce", What::AllReduce(op.into()), buf, (all.clone(), all))
    }

    fn all_gather(&self, whole: &mut K::Buf, parts: &[Range<usize>]) -> Result<(), GroupError> {
        let (own, all) = (parts[self.channel.rank()].clone(), 0..whole.len());
        self.run("an all-gather", What::AllGather(counts(parts)), whole, (own, all))
    }

    fn reduce_scatter(&self, whole: &mut K::Buf, parts: &[Range<usize>]) -> Result<(), GroupError> {
        let (own, all) = (parts[self.channel.rank()].clone(), 0..whole.len());
        self.run("a reduce-scatter", What::ReduceScatter(counts(parts)), whole, (all, own))
    }
}

/// How long parts are that follow each other from 0 on.
fn counts(parts: &[Range<usize>]) -> Vec<u64> {
    parts.iter().map(|part| part.len() as u64).collect()
}

/// From a pass, through the engine's desk.
pub struct Called {
    pub calls: Calls,
    pub group: GroupId,
    pub rank: usize,
    pub size: usize,
    /// Of a strand: the other one computes meanwhile.
    pub turn: Option<Turn>,
}

impl Channel for Called {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn start<T: Element>(&self, what: What, elements: &[T]) -> Result<Answer<T>, Cause> {
        let promise = self.calls.start(self.group, what, elements, Urgency::Now)?;
        let Some(turn) = self.turn.clone() else { return Ok(Box::new(|| Ok(promise.wait()?))) };
        Ok(Box::new(move || {
            turn.pass();
            let result = promise.wait();
            turn.take();
            Ok(result?)
        }))
    }
}
