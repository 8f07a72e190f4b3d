//! A driver without a GPU: device memory is host memory, every [`Way`] is a thread that takes its copies in order. It records each call, and
//! each rule that was broken: memory freed under a copy, a copy outside of what is allocated, an event that nobody forgets.
//!
//! Its memory can be handed to other processes as a GPU's can. What is allocated is full of [`POISON`], so that nobody gets by with zeros.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::driver::{Allocated, Card, Driver, Event, Then, Way};
use crate::{BoxCopy, CudaError};

/// What memory holds before anybody wrote to it.
pub const POISON: u8 = 0xCD;

/// A call, as it was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    Allocate { bytes: u64, export: bool },
    Import { bytes: u64 },
    Free { bytes: u64 },
    Pin { bytes: usize },
    Unpin { bytes: usize },
    Copy { way: Way, bytes: u64, combines: bool },
}

#[derive(Debug, Default)]
struct State {
    calls: Vec<Call>,
    broken: Vec<String>,
    /// Memory of the device and pinned memory: where each starts, and its length.
    mapped: BTreeMap<u64, u64>,
    /// Copies under way, by event: what they touch.
    under_way: BTreeMap<u64, [Range<u64>; 2]>,
    /// Events that were handed out and not forgotten.
    events: BTreeSet<u64>,
    next_event: u64,
    in_use: u64,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    passed: Condvar,
}

enum Work {
    Copy(BoxCopy, u64),
    Then(Then),
}

/// See the module. Copies hold the record: what was broken can be asked for when the driver is gone.
#[derive(Debug, Clone, Default)]
pub struct Record(Arc<Shared>);

impl Record {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn calls(&self) -> Vec<Call> {
        self.lock().calls.clone()
    }

    /// The rules that were broken, and what was left behind: with the driver gone, nothing may be.
    pub fn broken(&self) -> Vec<String> {
        let state = self.lock();
        let mut broken = state.broken.clone();
        if !state.mapped.is_empty() {
            broken.push(format!("{} memories were not freed", state.mapped.len()));
        }
        if !state.events.is_empty() {
            broken.push(format!("{} events were not forgotten", state.events.len()));
        }
        broken
    }
}

/// See the module.
#[derive(Debug)]
pub struct StandIn {
    card: Card,
    record: Record,
    queues: BTreeMap<Way, mpsc::Sender<Work>>,
    threads: Vec<JoinHandle<()>>,
}

impl StandIn {
    /// A device with so much memory.
    pub fn new(memory_bytes: u64) -> (Self, Record) {
        let record = Record::default();
        let (mut queues, mut threads) = (BTreeMap::new(), vec![]);
        for way in Way::ALL {
            let (queue, work) = mpsc::channel();
            let record = record.clone();
            queues.insert(way, queue);
            threads.push(std::thread::Builder::new().spawn(move || run(&work, &record)).expect("a thread"));
        }
        let card = Card {
            name: "a stand-in".into(),
            ordinal: 0,
            uuid: *b"crossmesh standi",
            capability: (9, 0),
            multiprocessors: 1,
            memory_bytes,
        };
        (Self { card, record: record.clone(), queues, threads }, record)
    }

    fn queue(&self, way: Way, work: Work) {
        self.queues[&way].send(work).expect("its thread runs until the driver goes");
    }

    fn map(&self, bytes: u64, segment: Option<&OwnedFd>) -> Result<u64, CudaError> {
        let (len, access) = (bytes.max(1) as usize, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let start = unsafe {
            match segment {
                Some(segment) => mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, segment, 0),
                None => mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE),
            }
        };
        let start = start.map_err(|e| self.failed("mmap", e))? as u64;
        self.record.lock().mapped.insert(start, bytes.max(1));
        Ok(start)
    }

    fn failed(&self, call: &'static str, why: rustix::io::Errno) -> CudaError {
        CudaError::Call { call, name: self.card.name.clone(), why: why.to_string() }
    }

    fn unmap(&self, start: u64) {
        let mut state = self.record.lock();
        let Some(len) = state.mapped.remove(&start) else {
            state.broken.push(format!("{start:#x} was freed twice, or never allocated"));
            return;
        };
        let gone = start..start + len;
        let touched = state.under_way.values().flatten().any(|r| r.start < gone.end && gone.start < r.end);
        if touched {
            state.broken.push(format!("{len} B were freed under a copy"));
        }
        drop(state);
        // SAFETY: it is a mapping of ours, whose address was just taken off the list.
        let unmapped = unsafe { munmap(start as *mut c_void, len as usize) };
        debug_assert!(unmapped.is_ok());
    }
}

fn run(work: &mpsc::Receiver<Work>, record: &Record) {
    for work in work {
        match work {
            Work::Then(then) => then(),
            Work::Copy(copy, event) => {
                // SAFETY: whoever queued it says that both sides stay, and keeps away; that they are mapped was looked at.
                unsafe { copy.run_on_host() };
                record.lock().under_way.remove(&event);
                record.0.passed.notify_all();
            }
        }
    }
}

impl Driver for StandIn {
    fn card(&self) -> &Card {
        &self.card
    }

    fn allocate(&self, bytes: u64, export: bool) -> Result<Allocated, CudaError> {
        let mut state = self.record.lock();
        let free = self.card.memory_bytes - state.in_use;
        if bytes > free {
            let (name, total) = (self.card.name.clone(), self.card.memory_bytes);
            return Err(CudaError::OutOfMemory { what: "device memory", name, bytes, free, total });
        }
        state.in_use += bytes;
        state.calls.push(Call::Allocate { bytes, export });
        drop(state);
        let handle = match export {
            false => None,
            true => {
                let segment = memfd_create("crossmesh.standin", MemfdFlags::CLOEXEC);
                let segment = segment.map_err(|e| self.failed("memfd_create", e))?;
                ftruncate(&segment, bytes.max(1)).map_err(|e| self.failed("ftruncate", e))?;
                Some(segment)
            }
        };
        let address = self.map(bytes, handle.as_ref())?;
        // SAFETY: just mapped.
        unsafe { std::ptr::write_bytes(address as *mut u8, POISON, bytes as usize) };
        Ok(Allocated { address, bytes, reserved: bytes, handle })
    }

    fn import(&self, handle: OwnedFd, bytes: u64) -> Result<Allocated, CudaError> {
        self.record.lock().calls.push(Call::Import { bytes });
        let address = self.map(bytes, Some(&handle))?;
        Ok(Allocated { address, bytes, reserved: 0, handle: None })
    }

    fn free(&self, allocated: Allocated) {
        let mut state = self.record.lock();
        state.calls.push(Call::Free { bytes: allocated.bytes });
        state.in_use -= allocated.reserved;
        drop(state);
        self.unmap(allocated.address);
    }

    fn pin(&self, bytes: usize) -> Result<NonNull<u8>, CudaError> {
        self.record.lock().calls.push(Call::Pin { bytes });
        let start = self.map(bytes as u64, None)?;
        Ok(NonNull::new(start as *mut u8).expect("a mapping has an address"))
    }

    fn unpin(&self, start: NonNull<u8>, bytes: usize) {
        self.record.lock().calls.push(Call::Unpin { bytes });
        self.unmap(start.as_ptr().addr() as u64);
    }

    unsafe fn copy(&self, way: Way, copy: &BoxCopy) -> Result<Event, CudaError> {
        let mut state = self.record.lock();
        let touched = [copy.from.extent(), copy.into.extent()];
        for range in touched.iter().filter(|_| copy.bytes > 0) {
            let holder = state.mapped.range(..=range.start).next_back();
            if holder.is_none_or(|(start, len)| range.end > start + len) {
                let why = format!("{range:x?} is not memory of the device, nor pinned");
                state.broken.push(why.clone());
                return Err(CudaError::Call { call: "copy", name: self.card.name.clone(), why });
            }
        }
        let event = state.next_event;
        state.next_event += 1;
        state.calls.push(Call::Copy { way, bytes: copy.bytes, combines: copy.combine.is_some() });
        state.events.insert(event);
        if copy.bytes > 0 {
            state.under_way.insert(event, touched);
        }
        drop(state);
        if copy.bytes > 0 {
            self.queue(way, Work::Copy(copy.clone(), event));
        }
        Ok(Event(event))
    }

    fn passed(&self, event: Event) -> Result<bool, CudaError> {
        Ok(!self.record.lock().under_way.contains_key(&event.0))
    }

    fn wait(&self, event: Event) -> Result<(), CudaError> {
        let waiting = |state: &mut State| state.under_way.contains_key(&event.0);
        let _passed = self.record.0.passed.wait_while(self.record.lock(), waiting);
        Ok(())
    }

    fn after(&self, way: Way, _: Event, then: Then) -> Result<(), CudaError> {
        // Behind all that was queued there, the event's copy among it.
        self.queue(way, Work::Then(then));
        Ok(())
    }

    fn forget(&self, event: Event) {
        let mut state = self.record.lock();
        if !state.events.remove(&event.0) {
            state.broken.push(format!("event {} was forgotten twice", event.0));
        }
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        self.queues.clear();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                self.record.lock().broken.push("a copy panicked".into());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Gpu, Side};

    fn gpu() -> (Arc<Gpu>, Record) {
        let (driver, record) = StandIn::new(1 << 20);
        (Gpu::new(Box::new(driver)), record)
    }

    fn packed(from: u64, into: u64, bytes: u64) -> BoxCopy {
        let side = |address| Side::packed(address, bytes);
        BoxCopy { from: side(from), into: side(into), bytes, combine: None }
    }

    #[test]
    fn bytes_go_up_and_come_down() {
        let (gpu, record) = gpu();
        let memory = gpu.allocate(1000, false).unwrap();
        let mut staging = gpu.stage(1000).unwrap();
        (0..).zip(staging.bytes_mut()).for_each(|(i, byte): (u32, _)| *byte = i as u8);
        let up = packed(staging.side(0..1000).base, memory.address(), 1000);
        // SAFETY: both are kept until the ticket is done.
        unsafe { gpu.copy(Way::In, &up) }.unwrap().wait().unwrap();
        let back = gpu.stage(1000).unwrap();
        let down = packed(memory.address(), back.side(0..1000).base, 1000);
        // SAFETY: as above.
        let ticket = unsafe { gpu.copy(Way::Out, &down) }.unwrap();
        let (tell, told) = mpsc::channel();
        ticket.then(Box::new(move || tell.send(()).unwrap())).unwrap();
        told.recv().unwrap();
        ticket.wait().unwrap();
        assert_eq!(back.bytes(), staging.bytes());
        drop((memory, staging, back, gpu));
        assert_eq!(record.broken(), Vec::<String>::new());
    }

    #[test]
    fn what_is_dropped_early_waits_for_its_copy() {
        let (gpu, record) = gpu();
        let memory = gpu.allocate(1 << 19, false).unwrap();
        let staging = gpu.stage(1 << 19).unwrap();
        for _ in 0..20 {
            let down = packed(memory.address(), staging.side(0..1 << 19).base, 1 << 19);
            // SAFETY: both are kept beyond the ticket.
            drop(unsafe { gpu.copy(Way::Out, &down) }.unwrap());
        }
        drop((memory, staging, gpu));
        assert_eq!(record.broken(), Vec::<String>::new());
    }

    #[test]
    fn broken_rules_are_noticed() {
        let (gpu, record) = gpu();
        let memory = gpu.allocate(100, false).unwrap();
        // SAFETY: it is refused.
        let outside = unsafe { gpu.copy(Way::Local, &packed(memory.address(), memory.address() + 60, 50)) };
        assert!(outside.unwrap_err().to_string().contains("not memory of the device"));
        std::mem::forget(memory);
        drop(gpu);
        let broken = record.broken();
        assert_eq!(broken.len(), 2, "{broken:?}");
        assert!(broken[1].contains("1 memories were not freed"), "{broken:?}");
    }

    #[test]
    fn memory_ends() {
        let (gpu, _record) = gpu();
        let _held = gpu.allocate(1 << 19, false).unwrap();
        let error = gpu.allocate(600_000, true).unwrap_err().to_string();
        assert!(
            error.starts_with("no 600000 B of device memory on a stand-in: 524288 B of 1048576 B"),
            "{error}"
        );
    }

    #[test]
    fn other_processes_map_what_was_exported() {
        let (gpu, record) = gpu();
        let mine = gpu.allocate(5000, true).unwrap();
        let theirs = gpu.import(mine.handle().unwrap().try_clone_to_owned().unwrap(), 5000).unwrap();
        let staging = gpu.stage(5000).unwrap();
        // SAFETY: all are kept, and used one after the other.
        unsafe { gpu.copy(Way::Out, &packed(theirs.address(), staging.side(0..5000).base, 5000)) }
            .unwrap()
            .wait()
            .unwrap();
        assert!(staging.bytes().iter().all(|byte| *byte == POISON));
        drop((mine, theirs, staging, gpu));
        assert_eq!(record.broken(), Vec::<String>::new());
    }
}
