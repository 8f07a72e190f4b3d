//! Memory of the caller's: a vector, a tensor of another library, pages that a device can read.
//!
//! ```text
//! caller   owner ---moves into---> Memory ---Arc---> RankBuffers::bind ---lease---> job
//!            |                                                                       |
//!          lets go of its handle at any time                 sends from it, receives into it, in place
//!                                                            the last of them frees the owner
//! ```
//!
//! Nothing is staged: a link writes from these bytes and reads into them. The owner is kept until the last job, link or handle
//! that knows the memory has let go of it, so that nobody can free it under a transfer; and as with any memory, it belongs to its
//! owner or to one engine at a time ([`super::Owned`]), so that nobody looks at half of one.
//!
//! Peers of the same host cannot map such memory. What goes to them goes through their socket.

use std::any::Any;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

use super::Memory;
use super::lease::InUse;
use crate::collectives::Element;

/// Whoever has some bytes; dropping it frees them.
pub(super) struct Owner(Box<dyn Any + Send>);

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Owner(..)")
    }
}

impl Memory {
    /// The elements of a vector, where they lie. [`Memory::into_vec`] gives them back.
    pub fn of_vec<T: Element>(elements: Vec<T>) -> Self {
        let mut elements = ManuallyDrop::new(elements);
        let (len, capacity) = (elements.len(), elements.capacity());
        let start = NonNull::new(elements.as_mut_ptr()).expect("a vector has an address");
        let owner = Allocation { start, len, capacity };
        // SAFETY: the allocation is the vector's, which exists no more; its elements are numbers, for which any bits will do.
        unsafe { Self::foreign(owner, start.cast(), len * size_of::<T>()) }
    }

    /// Bytes that somebody else has, to be used where they lie until `owner` is dropped, which happens when nobody can reach them
    /// through this memory any more.
    ///
    /// # Safety
    /// Until `owner` is dropped, `start` points to `len` initialised bytes that any thread may read and write. Nobody touches
    /// them but through this memory: what else there is to reach them by, such as a tensor of another library, rests. No other
    /// memory is made of any of them.
    pub unsafe fn foreign(owner: impl Any + Send, start: NonNull<u8>, len: usize) -> Self {
        let owner = Some(Owner(Box::new(owner)));
        Self { start, len, segment: None, writable: true, owner, device: None, in_use: InUse::default() }
    }

    /// The vector that the memory was made of, if it was one of such elements and nobody else knows the memory any more.
    pub fn into_vec<T: Element>(self: Arc<Self>) -> Result<Vec<T>, Arc<Self>> {
        let holds = |owner: &Owner| owner.0.is::<Allocation<T>>();
        if !self.owner.as_ref().is_some_and(holds) {
            return Err(self);
        }
        let mut memory = Arc::try_unwrap(self)?;
        let owner = memory.owner.take().expect("just looked at it");
        // The memory is no mapping; with its owner taken it must not unmap anything.
        std::mem::forget(memory);
        let allocation = owner.0.downcast::<Allocation<T>>().expect("just looked at it");
        Ok(allocation.into_vec())
    }
}

/// A vector's parts. Held as such, since a vector that exists has its elements to itself.
struct Allocation<T> {
    start: NonNull<T>,
    len: usize,
    capacity: usize,
}

// SAFETY: it is a vector of numbers, which may be sent.
unsafe impl<T: Element> Send for Allocation<T> {}

impl<T> Allocation<T> {
    fn into_vec(self) -> Vec<T> {
        let this = ManuallyDrop::new(self);
        // SAFETY: these are the parts of a vector that was taken apart, once.
        unsafe { Vec::from_raw_parts(this.start.as_ptr(), this.len, this.capacity) }
    }
}

impl<T> Drop for Allocation<T> {
    fn drop(&mut self) {
        // SAFETY: as above; whoever took it apart otherwise did not let this run.
        drop(unsafe { Vec::from_raw_parts(self.start.as_ptr(), self.len, self.capacity) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::lease::{Borrower, Lease};
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn a_vector_is_used_where_it_lies_and_comes_back() {
        let elements: Vec<f32> = (0..1000).map(|i| i as f32).collect();
        let address = elements.as_ptr().addr() as u64;
        let memory = Arc::new(Memory::of_vec(elements));
        assert_eq!((memory.address(), memory.len()), (address, 4000));
        memory.own().unwrap().elements_mut::<f32>(40, 1)[0] = -1.0;
        let back = memory.into_vec::<f32>().unwrap();
        assert_eq!((back.as_ptr().addr() as u64, back.len()), (address, 1000));
        assert_eq!(back[9..12], [9.0, -1.0, 11.0]);
    }

    #[test]
    fn a_vector_comes_back_whole_or_not_at_all() {
        let memory = Arc::new(Memory::of_vec(vec![1i64, 2, 3]));
        let lease = Lease::new(&memory, Borrower::new()).unwrap();
        let memory = memory.into_vec::<i64>().unwrap_err();
        drop(lease);
        let memory = memory.into_vec::<f32>().unwrap_err();
        assert_eq!(memory.into_vec::<i64>().unwrap(), [1, 2, 3]);
        assert!(Arc::new(Memory::private(8).unwrap()).into_vec::<i64>().is_err());
        assert!(Arc::new(Memory::of_vec(Vec::<f64>::new())).into_vec::<f64>().unwrap().is_empty());
    }

    #[test]
    fn an_owner_lives_as_long_as_anybody_can_reach_its_bytes() {
        struct Flag(Arc<AtomicBool>, #[expect(dead_code, reason = "its bytes are used")] Box<[u8]>);
        impl Drop for Flag {
            fn drop(&mut self) {
                self.0.store(true, Ordering::SeqCst);
            }
        }
        let freed = Arc::new(AtomicBool::new(false));
        let bytes: Box<[u8]> = vec![7; 64].into();
        let raw = Box::into_raw(bytes);
        let start = NonNull::new(raw.cast::<u8>()).unwrap();
        // SAFETY: nobody else has the bytes.
        let memory = Arc::new(unsafe { Memory::foreign(Flag(freed.clone(), Box::default()), start, 64) });
        let lease = Lease::new(&memory, Borrower::new()).unwrap();
        drop(memory);
        assert!(!freed.load(Ordering::SeqCst), "a job has it");
        drop(lease);
        assert!(freed.load(Ordering::SeqCst));
        // SAFETY: it came out of a box, and nobody has it any more.
        drop(unsafe { Box::from_raw(raw) });
    }
}
