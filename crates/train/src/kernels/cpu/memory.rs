//! Buffers of the host, used again and again.
//!
//! A step asks for the same sizes microbatch after microbatch. Giving memory back to the system each time would cost a
//! page fault for every 4 KiB the next time, so a dropped buffer goes to a [`Shelf`], where the next request of its
//! length finds it. What a shelf holds was all in use at some moment, so it is bounded by what the largest moments needed.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::kernels::Buffer;
use crate::kernels::scalar::Scalar;

/// Unused buffers, by length.
#[derive(Debug)]
pub struct Shelf<T> {
    free: Mutex<BTreeMap<usize, Vec<Vec<T>>>>,
}

impl<T> Default for Shelf<T> {
    fn default() -> Self {
        Self { free: Mutex::default() }
    }
}

impl<T: Scalar> Shelf<T> {
    /// A buffer with whatever its last user left in it.
    pub fn take(self: &Arc<Self>, len: usize) -> HostBuf<T> {
        let used = self.lock().get_mut(&len).and_then(Vec::pop);
        let mut data = used.unwrap_or_else(|| vec![T::ZERO; len]);
        // Whoever reads what nobody wrote shall notice.
        if cfg!(debug_assertions) {
            data.fill(T::NAN);
        }
        HostBuf { data, home: Some(Arc::clone(self)) }
    }

    /// Frees what nobody uses.
    pub fn clear(&self) {
        self.lock().clear();
    }

    /// Elements that wait for their next user.
    pub fn free_elements(&self) -> usize {
        self.lock().iter().map(|(len, bufs)| len * bufs.len()).sum()
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
}

impl<T> fmt::Debug for HostBuf<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostBuf({} elements)", self.data.len())
    }
}

impl<T> From<Vec<T>> for HostBuf<T> {
    fn from(data: Vec<T>) -> Self {
        Self { data, home: None }
    }
}

impl<T> Drop for HostBuf<T> {
    fn drop(&mut self) {
        if let Some(home) = self.home.take().filter(|_| !self.data.is_empty()) {
            let data = std::mem::take(&mut self.data);
            home.lock().entry(data.len()).or_default().push(data);
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
}
