//! How calls reach the card: the queue, the call that waits for the next, memory, numbers there and back.

use bytemuck::Pod;
use crossmesh_cuda::cuda::lt::Product;
use crossmesh_cuda::cuda::ops::{At, Queue, Real};
use crossmesh_cuda::{Block, CudaError};

use super::buffers::{GpuBuf, GpuElem, elems};
use super::fuse::Waiting;
use super::times::Times;
use super::{Gpu, lock};
use crate::kernels::BufSlice;

/// Copies up to this many bytes go through pinned memory, so that nobody waits for them.
const PINNED_BYTES: usize = 4 << 20;

/// Queues a call of [`Queue`]'s.
macro_rules! go {
    ($gpu:expr, $call:ident ( $($argument:expr),* $(,)? )) => {
        // SAFETY: addresses of buffers whose sizes were checked; one stream orders all uses of their memory.
        $gpu.timed(stringify!($call), |queue| unsafe { queue.$call($($argument),*) })
    };
}

pub(super) use go;

impl<E: GpuElem> Gpu<E> {
    /// Queues something behind all that was asked for, unless a call failed before.
    pub(super) fn go<T>(&self, call: impl FnOnce(&Queue) -> Result<T, CudaError>) -> Option<T> {
        self.flush();
        self.queue(call)
    }

    /// Queues something before the call that waits.
    pub(super) fn queue<T>(&self, call: impl FnOnce(&Queue) -> Result<T, CudaError>) -> Option<T> {
        self.failure.unless(|| {
            self.queue.cuda().enter()?;
            call(&self.queue)
        })
    }

    /// The same, by the card's clock where that is asked for.
    pub(super) fn timed<T>(
        &self,
        name: &'static str,
        call: impl FnOnce(&Queue) -> Result<T, CudaError>,
    ) -> Option<T> {
        self.flush();
        self.queue_timed(name, call)
    }

    pub(super) fn queue_timed<T>(
        &self,
        name: &'static str,
        call: impl FnOnce(&Queue) -> Result<T, CudaError>,
    ) -> Option<T> {
        match &self.times {
            None => self.queue(call),
            Some(times) => self.queue(|queue| times.of(name, queue, || call(queue))),
        }
    }

    /// The call that waits, if one does: whoever takes it does it.
    pub(super) fn take_waiting(&self) -> Option<Waiting> {
        lock(&self.waiting).take()
    }

    /// Lets the call that waits go.
    pub(super) fn flush(&self) {
        // SAFETY: as `go!`; what it touches was not handed out again (`block`).
        match self.take_waiting() {
            None => {}
            Some(Waiting::Product { product, operands, into }) => {
                self.queue_timed(of_product(&product), |queue| unsafe {
                    self.products.multiply_any(queue, &product, operands, into)
                });
            }
            Some(Waiting::Residual { size, x, branch, y, real }) => {
                self.queue_timed("join", |queue| unsafe { queue.join(real, size, (x, branch, 0), None, y) });
            }
        }
    }

    /// Lets a call wait for the next.
    pub(super) fn wait(&self, call: Waiting) {
        self.flush();
        *lock(&self.waiting) = Some(call);
    }

    /// The call that waits and gelu as one product; or not at all, and then the call has gone.
    pub(super) fn with_gelu(
        &self,
        fuse: impl FnOnce(Waiting) -> Option<(Product, (At, At), At)>,
        name: &'static str,
    ) -> bool {
        let Some(waiting) = self.take_waiting() else { return false };
        if let Some((product, operands, into)) = fuse(waiting) {
            // SAFETY: as `go!`.
            let done = self.queue_timed(name, |queue| {
                match unsafe { self.products.multiply(queue, &product, operands, into) } {
                    // The library has no such algorithm: they go one behind the other.
                    Err(CudaError::Refused { .. }) => Ok(false),
                    done => done.map(|()| true),
                }
            });
            if done != Some(false) {
                return true;
            }
        }
        *lock(&self.waiting) = Some(waiting);
        self.flush();
        false
    }

    /// Waits for all that was queued.
    pub(super) fn settle(&self) {
        self.go(Queue::finish);
        self.times.iter().for_each(Times::settle);
        lock(&self.pinned).clear();
    }

    /// Memory, for whoever comes next. It is not what a call that waits still reads, if there is other: a norm would else get the memory of the branch
    /// that was just added up, and the two calls could not become one.
    pub(super) fn block(&self, bytes: u64) -> Block {
        let mut block = self.any_block(bytes);
        let mut in_use = vec![];
        while in_use.len() < 3 && self.touches_waiting(&block) {
            // A full card has no other.
            let Some(Ok(other)) = self.queue(|_| Ok(self.arena.take(bytes))) else { break };
            in_use.push(std::mem::replace(&mut block, other));
        }
        if self.touches_waiting(&block) {
            self.flush();
        }
        // Whoever reads what nobody wrote shall notice.
        if cfg!(debug_assertions) {
            // SAFETY: all of a block that nobody else has.
            self.queue(|queue| unsafe { queue.fill_16(u16::MAX, block.bytes() / 2, block.address()) });
        }
        block
    }

    fn touches_waiting(&self, block: &Block) -> bool {
        let memory = block.address()..block.address() + block.bytes();
        lock(&self.waiting).as_ref().is_some_and(|call| call.touches(&memory))
    }

    fn any_block(&self, bytes: u64) -> Block {
        let take = || self.queue(|_| Ok(self.arena.take(bytes)));
        let block = match take() {
            Some(Err(CudaError::OutOfMemory { .. })) => {
                // What nobody uses goes back, and nothing that was asked for may touch it any more.
                self.settle();
                self.arena.trim();
                take()
            }
            taken => taken,
        };
        // What is skipped needs no memory.
        let block = block.and_then(|taken| self.failure.unless(|| taken));
        block.unwrap_or_else(|| self.arena.take(0).expect("no bytes are always there"))
    }

    pub(super) fn take(&self, len: usize, real: Real, is_wide: bool) -> GpuBuf {
        GpuBuf { block: self.block(len as u64 * real.bytes()), len, real, is_wide }
    }

    /// Bytes of the host, on their way.
    pub(super) fn write(&self, bytes: &[u8], to: At) {
        if bytes.is_empty() {
            return;
        }
        if bytes.len() > PINNED_BYTES {
            // SAFETY: they are waited for before they may change.
            self.go(|queue| unsafe { queue.write(bytes.as_ptr(), bytes.len(), to) });
            return self.settle();
        }
        self.go(|queue| {
            let mut staging = self.arena.gpu().stage(bytes.len())?;
            staging.bytes_mut().copy_from_slice(bytes);
            // SAFETY: the staging buffer is kept until the queue was waited for.
            let queued = unsafe { queue.write(staging.bytes().as_ptr(), bytes.len(), to) };
            lock(&self.pinned).push(staging);
            queued
        });
    }

    /// Numbers of the card, on the host; NaNs where a call failed: `finish` tells, and no checkpoint takes them.
    pub(super) fn read<T: Pod>(&self, from: At, len: usize) -> Vec<T> {
        let mut read = vec![T::zeroed(); len];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut read);
        if !bytes.is_empty() {
            // SAFETY: as many bytes as there are; they are waited for.
            self.go(|queue| unsafe { queue.read(from, bytes.len(), bytes.as_mut_ptr()) });
            self.settle();
            if self.failure.check().is_err() {
                bytes.fill(0xFF);
            }
        }
        read
    }

    /// A sum that a kernel leaves as f64; NaN where a call failed.
    pub(super) fn number(&self, compute: impl FnOnce(At)) -> f64 {
        let total = self.block(8);
        compute(total.address());
        let read: Vec<f64> = self.read(total.address(), 1);
        if self.failure.check().is_err() { f64::NAN } else { read[0] }
    }

    pub(super) fn words<T: Pod>(&self, words: &[T]) -> Block {
        let bytes: &[u8] = bytemuck::cast_slice(words);
        let block = self.block(bytes.len() as u64);
        self.write(bytes, block.address());
        block
    }

    /// Elements of a weight.
    pub(super) fn weight(&self, from: BufSlice<'_, GpuBuf>, len: usize) -> At {
        elems::<E>(from.buf).at(from.start, len)
    }

    /// A kernel that no model which runs here needs.
    pub(super) fn missing(&self, what: &'static str) {
        self.failure.unless(|| {
            Err::<(), _>(CudaError::Refused {
                what: "a kernel",
                found: what.into(),
                needed: "one of those that GPUs have",
            })
        });
    }
}

/// What a table of times calls a product.
pub(super) fn of_product(product: &Product) -> &'static str {
    match (product.a_transposed, product.b_transposed) {
        (true, _) => "product, of weights' gradients",
        (_, true) => "product, b transposed",
        _ => "product",
    }
}
