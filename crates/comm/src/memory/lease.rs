//! Who may touch a memory: its owner, or one engine.
//!
//! ```text
//! free --own--> owned: one reader or writer, by a guard          --drop--> free
//! free --lend-> lent to an engine: as many programs of it as like --drop of the last--> free
//! ```
//!
//! An engine is driven by one thread at a time, and what its programs do to a memory is in the order that was verified. An
//! owner has the memory to itself. So no two threads touch the same bytes, whatever safe code does: it is refused
//! instead. There are two exceptions, where somebody else holds the proof and `unsafe` says so: a pass under way writes what
//! it makes and reads what it needs of memory that its program is lent; and collectives cut a memory into buffers, each of
//! which has one owner.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Memory;
use crate::collectives::Element;
use crate::view::View;

/// An engine, as its memories know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Borrower(u64);

impl Borrower {
    /// One that no other engine of this process is.
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Use {
    #[default]
    Free,
    Owned,
    Lent {
        to: Borrower,
        programs: u32,
    },
}

/// What a memory is used for at present.
#[derive(Debug, Default)]
pub(super) struct InUse(Mutex<Use>);

impl InUse {
    fn lock(&self) -> MutexGuard<'_, Use> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a memory cannot be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unavailable {
    #[error("the memory is in use\nhint: wait for the program that runs on it, or give each its own")]
    InUse,
    /// Whoever made the segment writes to it as it likes: here nobody can have it to himself.
    #[error("the memory belongs to a peer, which may write to it at any time\nhint: copy out of it")]
    OfPeer,
}

impl Memory {
    /// The memory for its owner, alone.
    pub fn own(&self) -> Result<Owned<'_>, Unavailable> {
        if !self.writable {
            return Err(Unavailable::OfPeer);
        }
        let mut state = self.in_use.lock();
        if *state != Use::Free {
            return Err(Unavailable::InUse);
        }
        *state = Use::Owned;
        Ok(Owned(self))
    }
}

/// A memory that nobody else touches.
#[derive(Debug)]
pub struct Owned<'a>(&'a Memory);

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        *self.0.in_use.lock() = Use::Free;
    }
}

impl Owned<'_> {
    /// Elements that lie in it, `at` bytes from its start.
    pub fn elements<T: Element>(&self, at: u64, len: usize) -> &[T] {
        // SAFETY: nobody else has the memory, and who writes to it borrows this value mutably.
        unsafe { self.0.elements(at, len) }
    }

    /// The same to change them.
    pub fn elements_mut<T: Element>(&mut self, at: u64, len: usize) -> &mut [T] {
        // SAFETY: nobody else has the memory, and this value is borrowed mutably.
        unsafe { self.0.elements_mut(at, len) }
    }

    /// Puts bytes at `offset` of a view's stream. Only a device can fail at it.
    pub fn unpack(&mut self, view: &View, offset: u64, mut bytes: &[u8]) -> io::Result<()> {
        if self.0.gpu().is_some() {
            // SAFETY: nobody else has the memory.
            return unsafe { self.0.unpack_to_device(view, offset, bytes, None) };
        }
        for (at, len) in view.runs(offset..offset + bytes.len() as u64) {
            let (head, rest) = bytes.split_at(len as usize);
            self.elements_mut::<u8>(at, head.len()).copy_from_slice(head);
            bytes = rest;
        }
        Ok(())
    }

    /// Appends a part of a view's stream. Only a device can fail at it.
    pub fn pack(&self, view: &View, part: Range<u64>, out: &mut Vec<u8>) -> io::Result<()> {
        if self.0.gpu().is_some() {
            // SAFETY: nobody else has the memory.
            return unsafe { self.0.pack_from_device(view, part, out) };
        }
        for (at, len) in view.runs(part) {
            out.extend_from_slice(self.elements(at, len as usize));
        }
        Ok(())
    }
}

/// A memory that an engine has, until this is dropped.
#[derive(Debug)]
pub(crate) struct Lease(Arc<Memory>);

impl Lease {
    pub fn new(memory: &Arc<Memory>, borrower: Borrower) -> Result<Self, Unavailable> {
        if !memory.writable {
            return Err(Unavailable::OfPeer);
        }
        let mut state = memory.in_use.lock();
        *state = match *state {
            Use::Free => Use::Lent { to: borrower, programs: 1 },
            Use::Lent { to, programs } if to == borrower => Use::Lent { to, programs: programs + 1 },
            Use::Lent { .. } | Use::Owned => return Err(Unavailable::InUse),
        };
        drop(state);
        Ok(Self(Arc::clone(memory)))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut state = self.0.in_use.lock();
        *state = match *state {
            Use::Lent { to, programs } if programs > 1 => Use::Lent { to, programs: programs - 1 },
            _ => Use::Free,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memory_has_one_owner_or_one_engine() {
        let memory = Arc::new(Memory::private(64).unwrap());
        let (one, other) = (Borrower::new(), Borrower::new());
        let owned = memory.own().unwrap();
        assert_eq!(memory.own().err(), Some(Unavailable::InUse));
        assert_eq!(Lease::new(&memory, one).err(), Some(Unavailable::InUse));
        drop(owned);
        let leases = [Lease::new(&memory, one).unwrap(), Lease::new(&memory, one).unwrap()];
        assert_eq!(Lease::new(&memory, other).err(), Some(Unavailable::InUse));
        assert_eq!(memory.own().err(), Some(Unavailable::InUse));
        let [first, second] = leases;
        drop(first);
        assert_eq!(memory.own().err(), Some(Unavailable::InUse), "one program still runs");
        drop(second);
        assert!(memory.own().is_ok());
    }

    #[test]
    fn an_owner_reads_what_it_wrote() {
        let memory = Memory::private(256).unwrap();
        let mut owned = memory.own().unwrap();
        owned.elements_mut::<f32>(64, 4).copy_from_slice(&[1.0, 2.0, 3.0, 4.0]);
        assert_eq!(owned.elements::<f32>(68, 2), [2.0, 3.0]);
    }

    /// Threads that want the same memory get it one after the other, or not at all; Miri looks for a race.
    #[test]
    fn threads_do_not_race() {
        let memory = Memory::private(8).unwrap();
        let count = || {
            for _ in 0..20 {
                if let Ok(mut owned) = memory.own() {
                    owned.elements_mut::<i64>(0, 1)[0] += 1;
                }
            }
        };
        std::thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(count))));
        assert!((1..=40).contains(&memory.own().unwrap().elements::<i64>(0, 1)[0]));
    }
}
