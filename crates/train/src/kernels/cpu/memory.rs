//! Buffers of the host, used again and again.
//!
//! A step asks for the same sizes microbatch after microbatch. Giving memory back to the system each time would cost a
//! page fault for every 4 KiB the next time, so a dropped buffer goes to a [`Shelf`], where the next request that it fits finds it: one of its
//! length, and of large ones up to a fifth less, so that an embedding's gradient uses the memory of the head's, which has a norm beside it.
//! What a shelf holds was all in use at some moment, so it is bounded by what the largest moments needed.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use half::bf16;

use crate::kernels::Buffer;
use crate::kernels::scalar::Scalar;

/// A large buffer may be longer than what is asked for by one part in so many of that.
const MUCH_MORE: usize = 4;
const LARGE_BYTES: usize = 1 << 20;

/// Unused buffers, by the elements that they have room for.
#[derive(Debug)]
pub struct Shelf<T> {
    free: Mutex<BTreeMap<usize, Vec<Vec<T>>>>,
}

impl<T> Default for Shelf<T> {
    fn default() -> Self {
        Self { free: Mutex::default() }
    }
}

/// Numbers that a buffer may hold.
pub trait Stored: Copy + Send + Sync + 'static {
    const ZERO: Self;
    const NAN: Self;
}

impl<T: Scalar> Stored for T {
    const ZERO: Self = T::ZERO;
    const NAN: Self = T::NAN;
}

impl Stored for bf16 {
    const ZERO: Self = bf16::ZERO;
    const NAN: Self = bf16::NAN;
}

impl<T: Stored> Shelf<T> {
    /// A buffer with whatever its last user left in it.
    pub fn take(self: &Arc<Self>, len: usize) -> HostBuf<T> {
        let mut data = self.find(len).unwrap_or_default();
        match data.capacity() < len {
            true => data = vec![T::ZERO; len],
            false => data.resize(len, T::ZERO),
        }
        // Whoever reads what nobody wrote shall notice.
        if cfg!(debug_assertions) {
            data.fill(T::NAN);
        }
        HostBuf { data, home: Some(Arc::clone(self)), is_wide: false }
    }

    /// The smallest that has room, and not much more. Where there is none, one with a little less room gives way to what is made now: that will
    /// do for both.
    fn find(&self, len: usize) -> Option<Vec<T>> {
        let mut free = self.lock();
        if len * size_of::<T>() < LARGE_BYTES {
            return free.get_mut(&len)?.pop();
        }
        let fitting = free.range_mut(len..=len + len / MUCH_MORE).find_map(|(_, bufs)| bufs.pop());
        if fitting.is_none() {
            let least = len - len / (MUCH_MORE + 1);
            drop(free.range_mut(least..len).rev().find_map(|(_, bufs)| bufs.pop()));
        }
        fitting
    }

    /// Frees what nobody uses.
    pub fn clear(&self) {
        self.lock().clear();
    }

    /// Elements that wait for their next user.
    pub fn free_elements(&self) -> usize {
        self.lock().iter().map(|(room, bufs)| room * bufs.len()).sum()
    }
}

impl<T> Shelf<T> {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Vec<Vec<T>>>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Numbers in the host's memory. Reads like a slice.
pub struct HostBuf<T> {
    data: Vec<T>,
    home: Option<Arc<Shelf<T>>>,
    is_wide: bool,
}

impl<T> HostBuf<T> {
    /// As reals.
    pub fn wide(mut self) -> Self {
        self.is_wide = true;
        self
    }
}

impl<T> fmt::Debug for HostBuf<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostBuf({} elements)", self.data.len())
    }
}

impl<T> From<Vec<T>> for HostBuf<T> {
    fn from(data: Vec<T>) -> Self {
        Self { data, home: None, is_wide: false }
    }
}

impl<T> Drop for HostBuf<T> {
    fn drop(&mut self) {
        if let Some(home) = self.home.take().filter(|_| !self.data.is_empty()) {
            let data = std::mem::take(&mut self.data);
            home.lock().entry(data.capacity()).or_default().push(data);
        }
    }
}

impl<T> Deref for HostBuf<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.data
    }
}

impl<T> DerefMut for HostBuf<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.data
    }
}

impl<T: Send + Sync + 'static> Buffer for HostBuf<T> {
    fn len(&self) -> usize {
        self.data.len()
    }

    fn is_wide(&self) -> bool {
        self.is_wide
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_buffer_is_used_again() {
        let shelf = Arc::new(Shelf::<f32>::default());
        let first = shelf.take(1000);
        let address = first.as_ptr();
        drop(first);
        assert_eq!(shelf.free_elements(), 1000);
        assert_ne!(shelf.take(999).as_ptr(), address);
        assert_eq!(shelf.take(1000).as_ptr(), address);
        shelf.clear();
        assert_eq!(shelf.free_elements(), 0);
    }

    const LARGE: usize = LARGE_BYTES / size_of::<f32>();

    #[test]
    fn what_is_a_little_shorter_takes_a_large_one_too() {
        let shelf = Arc::new(Shelf::<f32>::default());
        let mut first = shelf.take(LARGE + 1000);
        first.fill(7.0);
        let address = first.as_ptr();
        drop(first);
        let shorter = shelf.take(LARGE);
        assert_eq!((shorter.as_ptr(), shorter.len()), (address, LARGE));
        drop(shorter);
        let again = shelf.take(LARGE + 1000);
        assert_eq!((again.as_ptr(), again.len()), (address, LARGE + 1000));
    }

    #[test]
    fn what_is_a_little_longer_takes_its_place() {
        let shelf = Arc::new(Shelf::<f32>::default());
        drop((shelf.take(LARGE), shelf.take(2 * LARGE)));
        let longer = shelf.take(LARGE + 1000);
        assert_eq!(shelf.free_elements(), 2 * LARGE);
        drop(longer);
        drop(shelf.take(LARGE));
        assert_eq!(shelf.free_elements(), 3 * LARGE + 1000);
    }
}
