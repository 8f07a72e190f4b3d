//! Memory that peers may read: handed out as buffers, and kept for the next ones when they are dropped.
//!
//! A peer on the same host maps a segment when it first sees it, and keeps it. So segments are not made for every call;
//! they have a few sizes, and go from buffer to buffer.

#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

use super::element::Element;
use crate::buffer::Sharing;
use crate::memory::{Memory, bytes_of};

/// The smallest segment; pages that nobody touches cost nothing.
const MIN_BYTES: u64 = 64 << 10;

/// Segments that nobody uses at present.
#[derive(Debug)]
pub(super) struct Pool {
    sharing: Sharing,
    free: Mutex<Vec<Arc<Memory>>>,
}

impl Pool {
    pub fn new(sharing: Sharing) -> Arc<Self> {
        Arc::new(Self { sharing, free: Mutex::default() })
    }

    /// At least so many bytes, of any content.
    pub fn take(self: &Arc<Self>, bytes: u64) -> io::Result<Segment> {
        let size = bytes.max(MIN_BYTES).checked_next_power_of_two().ok_or(io::ErrorKind::OutOfMemory)?;
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let known = free.iter().position(|m| m.len() == size).map(|at| free.swap_remove(at));
        drop(free);
        let memory = match (known, self.sharing) {
            (Some(known), _) => known,
            (None, Sharing::Private) => Arc::new(Memory::private(size)?),
            (None, Sharing::Host) => Arc::new(Memory::shared(size)?),
        };
        Ok(Segment { memory, pool: self.clone() })
    }
}

/// A segment in use; it returns to its pool.
pub(super) struct Segment {
    pub memory: Arc<Memory>,
    pool: Arc<Pool>,
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a segment of {} B", self.memory.len())
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        let mut free = self.pool.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.push(self.memory.clone());
    }
}

/// Some elements in a segment.
#[derive(Debug)]
pub(super) struct Raw {
    pub segment: Segment,
    /// Where they start, in bytes.
    pub at: u64,
    /// How many.
    pub len: usize,
}

/// Elements in memory that peers on the same host can read: moved without another copy. It is a slice to its owner.
pub struct Buffer<T> {
    pub(super) raw: Raw,
    pub(super) of: PhantomData<T>,
}

impl<T: Element> Buffer<T> {
    pub(super) fn new(pool: &Arc<Pool>, len: usize) -> io::Result<Self> {
        let segment = pool.take((len * size_of::<T>()) as u64)?;
        Ok(Self { raw: Raw { segment, at: 0, len }, of: PhantomData })
    }

    pub(super) fn copied_from(pool: &Arc<Pool>, elements: &[T]) -> io::Result<Self> {
        let mut buffer = Self::new(pool, elements.len())?;
        buffer.copy_from_slice(elements);
        Ok(buffer)
    }

    /// The elements' bytes, as they travel.
    pub fn as_bytes(&self) -> &[u8] {
        bytes_of(self)
    }
}

impl<T: Element> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the pool handed these bytes to this buffer alone; a program has them only while it has the buffer.
        unsafe { self.raw.segment.memory.elements(self.raw.at, self.raw.len) }
    }
}

impl<T: Element> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and the buffer is borrowed mutably.
        unsafe { self.raw.segment.memory.elements_mut(self.raw.at, self.raw.len) }
    }
}

impl<T: Element + fmt::Debug> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_used_again() {
        let pool = Pool::new(Sharing::Private);
        let first = Buffer::copied_from(&pool, &[1.5f32, 2.5]).unwrap();
        let second = Buffer::<f32>::new(&pool, 2).unwrap();
        assert!(!Arc::ptr_eq(&first.raw.segment.memory, &second.raw.segment.memory));
        assert_eq!(*first, [1.5, 2.5]);
        let memory = first.raw.segment.memory.clone();
        drop(first);
        let third = Buffer::<f64>::new(&pool, 1000).unwrap();
        assert!(Arc::ptr_eq(&memory, &third.raw.segment.memory));
    }
}
