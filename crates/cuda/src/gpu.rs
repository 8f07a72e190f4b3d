//! A GPU for crates that move bytes: memory with an owner, pinned staging that is kept, copies with tickets.
//!
//! A [`Ticket`] stands for a copy under way. Whoever holds one keeps what the copy touches; a ticket that is dropped waits for its copy, so that
//! nothing is freed or reused under a device. Copies take microseconds to milliseconds: the wait is short, and there only when a job is given up.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use crate::driver::{Allocated, Card, Driver, Event, Then, Way};
use crate::{BoxCopy, CudaError, Side};

/// Staging buffers are of these sizes: the least, and its powers of two.
const LEAST_STAGING_BYTES: usize = 64 << 10;

/// See the module.
#[derive(Debug)]
pub struct Gpu {
    driver: Box<dyn Driver>,
    /// Pinned buffers that nobody uses, by size: pinning takes longer than most copies.
    idle: Mutex<BTreeMap<usize, Vec<Pinned>>>,
}

#[derive(Debug, Clone, Copy)]
struct Pinned(NonNull<u8>);

// SAFETY: an address of memory that belongs to the pool, or to one staging buffer.
#[expect(unsafe_code, reason = "see above")]
unsafe impl Send for Pinned {}

impl Gpu {
    pub fn new(driver: Box<dyn Driver>) -> Arc<Self> {
        Arc::new(Self { driver, idle: Mutex::default() })
    }

    /// The GPU of that number, by NVIDIA's driver.
    #[cfg(feature = "driver")]
    pub fn open(ordinal: usize) -> Result<Arc<Self>, CudaError> {
        Ok(Self::new(Box::new(crate::cuda::Cuda::open(ordinal)?)))
    }

    #[cfg(not(feature = "driver"))]
    pub fn open(_: usize) -> Result<Arc<Self>, CudaError> {
        Err(CudaError::NotBuilt)
    }

    /// The GPU of a rank that is the `index`-th of its machine: one each, or with leave to share them the next in turn.
    pub fn choose(index: usize, share: bool) -> Result<Arc<Self>, CudaError> {
        let count = Self::count()?;
        match share {
            true => Self::open(index % count),
            false if index < count => Self::open(index),
            false => Err(CudaError::Taken { ranks: index + 1, count }),
        }
    }

    /// How many GPUs there are; at least one.
    #[cfg(feature = "driver")]
    pub fn count() -> Result<usize, CudaError> {
        crate::cuda::count()
    }

    #[cfg(not(feature = "driver"))]
    pub fn count() -> Result<usize, CudaError> {
        Err(CudaError::NotBuilt)
    }

    /// The cards, as the driver describes them; at least one. None of them is set up by it.
    #[cfg(feature = "driver")]
    pub fn cards() -> Result<Vec<Card>, CudaError> {
        (0..Self::count()?).map(crate::cuda::describe).collect()
    }

    #[cfg(not(feature = "driver"))]
    pub fn cards() -> Result<Vec<Card>, CudaError> {
        Err(CudaError::NotBuilt)
    }

    pub fn card(&self) -> &Card {
        self.driver.card()
    }

    pub fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    /// Memory of the device; `export` where other processes of the host are to map it.
    pub fn allocate(self: &Arc<Self>, bytes: u64, export: bool) -> Result<DeviceMemory, CudaError> {
        let allocated = self.driver.allocate(bytes, export)?;
        Ok(DeviceMemory { gpu: self.clone(), allocated: Some(allocated) })
    }

    /// Memory of another process.
    pub fn import(self: &Arc<Self>, handle: OwnedFd, bytes: u64) -> Result<DeviceMemory, CudaError> {
        let allocated = self.driver.import(handle, bytes)?;
        Ok(DeviceMemory { gpu: self.clone(), allocated: Some(allocated) })
    }

    /// Pinned host memory of at least so many bytes.
    pub fn stage(self: &Arc<Self>, bytes: usize) -> Result<Staging, CudaError> {
        let room = bytes.max(LEAST_STAGING_BYTES).next_power_of_two();
        let idle = self.idle().get_mut(&room).and_then(Vec::pop);
        let start = match idle {
            Some(pinned) => pinned.0,
            None => self.driver.pin(room)?,
        };
        Ok(Staging { gpu: self.clone(), start: Pinned(start), room, len: bytes })
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, BTreeMap<usize, Vec<Pinned>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a copy.
    ///
    /// # Safety
    /// Until the ticket says that it is done, or is dropped: both sides stay, nobody writes to what is read, nobody touches what is written. Each
    /// is memory of this GPU or staging.
    #[expect(unsafe_code, reason = "addresses are the driver's language")]
    pub unsafe fn copy(self: &Arc<Self>, way: Way, copy: &BoxCopy) -> Result<Ticket, CudaError> {
        // SAFETY: as the caller says.
        let event = unsafe { self.driver.copy(way, copy)? };
        Ok(Ticket { gpu: self.clone(), way, event: Some(event) })
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        for (room, idle) in std::mem::take(&mut *self.idle()) {
            idle.into_iter().for_each(|pinned| self.driver.unpin(pinned.0, room));
        }
    }
}

/// Memory of a device, freed when it is dropped.
#[derive(Debug)]
pub struct DeviceMemory {
    gpu: Arc<Gpu>,
    allocated: Option<Allocated>,
}

impl DeviceMemory {
    fn allocated(&self) -> &Allocated {
        self.allocated.as_ref().expect("it is there until it is dropped")
    }

    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    pub fn address(&self) -> u64 {
        self.allocated().address
    }

    pub fn bytes(&self) -> u64 {
        self.allocated().bytes
    }

    /// What another process maps it by, where it was allocated for that.
    pub fn handle(&self) -> Option<BorrowedFd<'_>> {
        self.allocated().handle.as_ref().map(AsFd::as_fd)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if let Some(allocated) = self.allocated.take() {
            self.gpu.driver.free(allocated);
        }
    }
}

/// Pinned host memory, which goes back to its pool.
#[derive(Debug)]
pub struct Staging {
    gpu: Arc<Gpu>,
    start: Pinned,
    room: usize,
    len: usize,
}

#[expect(unsafe_code, reason = "the buffer is this value's alone, pinned and initialised")]
impl Staging {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its bytes. Whoever has a copy under way into or out of it keeps away meanwhile, as [`Gpu::copy`] asks.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `room` bytes are pinned at `start`, of which these are some.
        unsafe { std::slice::from_raw_parts(self.start.0.as_ptr(), self.len) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.0.as_ptr(), self.len) }
    }

    /// A part of it, for a copy.
    pub fn side(&self, part: Range<usize>) -> Side {
        assert!(part.start <= part.end && part.end <= self.len, "bytes {part:?} of {} staged", self.len);
        Side::packed(self.start.0.as_ptr().addr() as u64 + part.start as u64, (part.end - part.start) as u64)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        self.gpu.idle().entry(self.room).or_default().push(self.start);
    }
}

/// A copy under way.
#[derive(Debug)]
#[must_use = "a ticket that is dropped waits for its copy"]
pub struct Ticket {
    gpu: Arc<Gpu>,
    way: Way,
    event: Option<Event>,
}

impl Ticket {
    /// Whether the copy is done.
    pub fn is_done(&mut self) -> Result<bool, CudaError> {
        let Some(event) = self.event else { return Ok(true) };
        let passed = self.gpu.driver.passed(event)?;
        if passed {
            self.settle();
        }
        Ok(passed)
    }

    pub fn wait(mut self) -> Result<(), CudaError> {
        let waited = self.event.map_or(Ok(()), |event| self.gpu.driver.wait(event));
        self.settle();
        waited
    }

    /// Calls once it is done, from another thread.
    pub fn then(&self, call: Then) -> Result<(), CudaError> {
        match self.event {
            Some(event) => self.gpu.driver.after(self.way, event, call),
            None => {
                call();
                Ok(())
            }
        }
    }

    fn settle(&mut self) {
        if let Some(event) = self.event.take() {
            self.gpu.driver.forget(event);
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(event) = self.event {
            // A device that is lost has no copies under way either.
            let _lost = self.gpu.driver.wait(event);
            self.settle();
        }
    }
}
