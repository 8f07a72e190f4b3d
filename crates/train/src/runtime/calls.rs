//! Calls from a pass to the engine: a pass computes in the device's thread, and the engine moves in its own.
//!
//! ```text
//! device   pass: .. compute .. | start ------------> | .. compute .. | wait .....| .. compute ..
//! engine                        '-> collective under way =============^ reply
//! ```
//!
//! A call that is started and waited for later runs beside the compute between the two. Ranks of a group start the same calls in the same
//! order, because their passes do.

use std::cell::Cell;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use crossmesh_comm::clock::{Clock as _, Monotonic};
use crossmesh_comm::collectives::{
    Allocator, Buffer, CallError, Collectives, Element, GroupId, Pending, Reduction,
};
use crossmesh_comm::device::Waker;
use crossmesh_core::collective::Counts;

/// What a pass stands still for is sent first, then what other stages wait for, then what has time until the step's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Urgency {
    Later = 0,
    Edges = 1,
    Now = 2,
}

/// Something for the engine to run.
pub trait Call: Send {
    fn start(self: Box<Self>, comm: &mut Collectives) -> Result<Box<dyn Running>, CallError>;
}

/// A call under way, on the engine's side.
pub trait Running {
    /// Replies if it has ended, without waiting; else it is handed back.
    fn finish(self: Box<Self>, comm: &mut Collectives) -> Option<Box<dyn Running>>;
}

/// The device's side.
#[derive(Clone)]
pub struct Calls {
    calls: Sender<Box<dyn Call>>,
    waker: Waker,
    allocator: Allocator,
}

/// The engine gave up; it knows why.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the engine ended before the call did")]
pub struct EngineGone;

/// A call that was started.
#[must_use = "a call's result comes when it is waited for"]
pub struct Promise<R> {
    reply: Receiver<R>,
}

thread_local! {
    /// How long this thread has stood still for calls.
    static WAITED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// How long this thread has stood still for calls since it was last asked.
pub fn take_waited() -> Duration {
    WAITED.take()
}

/// Puts back what was taken.
pub fn add_waited(waited: Duration) {
    WAITED.set(WAITED.get() + waited);
}

impl<R> Promise<R> {
    /// The result, if it is there already; else the promise again.
    pub fn now(self) -> Result<R, Self> {
        self.reply.try_recv().map_err(|_| self)
    }

    pub fn wait(self) -> Result<R, EngineGone> {
        let start = Monotonic.now_ns();
        let result = self.reply.recv().map_err(|_| EngineGone);
        add_waited(Duration::from_nanos(Monotonic.now_ns() - start));
        result
    }
}

/// A collective of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What {
    AllReduce(Reduction),
    /// A sum, dealt out: so many elements for each.
    ReduceScatter(Vec<u64>),
    /// Each brings so many elements.
    AllGather(Vec<u64>),
}

impl What {
    pub fn start<T: Element>(
        self,
        comm: &mut Collectives,
        group: GroupId,
        elements: Buffer<T>,
    ) -> Result<Pending<T>, CallError> {
        match self {
            What::AllReduce(reduction) => comm.start_all_reduce(group, elements, reduction),
            What::ReduceScatter(counts) => {
                comm.start_reduce_scatter_v(group, elements, Counts::PerRank(counts), Reduction::Sum)
            }
            What::AllGather(counts) => comm.start_all_gather_v(group, elements, Counts::PerRank(counts)),
        }
    }
}

impl Calls {
    pub fn new(waker: Waker, allocator: Allocator) -> (Self, Desk) {
        let (calls, desk) = channel();
        (Self { calls, waker, allocator }, Desk { calls: desk, running: vec![] })
    }

    /// A collective on a copy of some elements.
    pub fn start<T: Element>(
        &self,
        group: GroupId,
        what: What,
        elements: &[T],
        urgency: Urgency,
    ) -> Result<Promise<Buffer<T>>, CallError> {
        let elements = self.allocator.buffer_of(elements)?;
        Ok(self.hand_over(|reply| Box::new(Collective { group, what, elements, urgency, reply })))
    }

    /// Any call; `make` gets where to reply to.
    pub fn hand_over<R>(&self, make: impl FnOnce(Sender<R>) -> Box<dyn Call>) -> Promise<R> {
        let (sender, reply) = channel();
        // Where nobody takes the call, nobody keeps the sender, and waiting ends.
        let _gone = self.calls.send(make(sender));
        self.waker.wake();
        Promise { reply }
    }
}

struct Collective<T> {
    group: GroupId,
    what: What,
    elements: Buffer<T>,
    urgency: Urgency,
    reply: Sender<Buffer<T>>,
}

impl<T: Element> Call for Collective<T> {
    fn start(self: Box<Self>, comm: &mut Collectives) -> Result<Box<dyn Running>, CallError> {
        comm.set_priority(self.urgency as u32);
        let pending = self.what.start(comm, self.group, self.elements)?;
        Ok(Box::new(UnderWay { pending, reply: self.reply }))
    }
}

struct UnderWay<T> {
    pending: Pending<T>,
    reply: Sender<Buffer<T>>,
}

impl<T: Element> Running for UnderWay<T> {
    fn finish(self: Box<Self>, comm: &mut Collectives) -> Option<Box<dyn Running>> {
        let Self { pending, reply } = *self;
        match comm.finish(pending) {
            Ok(result) => {
                // A device that is gone needs no reply.
                let _gone = reply.send(result);
                None
            }
            Err(pending) => Some(Box::new(Self { pending, reply })),
        }
    }
}

/// The engine's side. What it drops, nobody waits for any longer.
pub struct Desk {
    calls: Receiver<Box<dyn Call>>,
    running: Vec<Box<dyn Running>>,
}

impl Desk {
    /// Starts what was asked for, and replies where something has ended.
    pub fn serve(&mut self, comm: &mut Collectives) -> Result<(), CallError> {
        while let Ok(call) = self.calls.try_recv() {
            self.running.push(call.start(comm)?);
        }
        let running = std::mem::take(&mut self.running);
        self.running = running.into_iter().filter_map(|call| call.finish(comm)).collect();
        Ok(())
    }

    pub fn is_idle(&self) -> bool {
        self.running.is_empty()
    }
}
