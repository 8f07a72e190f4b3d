//! Memory that peers may read: handed out as buffers, and kept for the next ones when they are dropped.
//!
//! A peer on the same host maps a segment when it first sees it, and keeps it; and a segment costs a descriptor. So
//! segments are not made for every call. They are cut into pieces of a few sizes, which go from buffer to buffer:
//!
//! ```text
//! segment 0   | 4 KiB | 4 KiB | 64 KiB          | ... free |      256 KiB
//! segment 1   | 1 MiB                           | 4 KiB    |      as much as there was before, up to 16 MiB
//! segment 2   | 40 MiB                                     |      large buffers have their own
//! ```
//!
//! Ten thousand gradients in flight take about a dozen descriptors.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::element::Element;
use crate::buffer::Sharing;
use crate::memory::{Memory, bytes_of};

/// The smallest piece: a page, so that no two buffers share one.
const MIN_BYTES: u64 = 4 << 10;
/// Segments that are cut into pieces. Their pages are there from the start, so they grow with what is needed.
const FIRST_SEGMENT_BYTES: u64 = 256 << 10;
const MAX_SEGMENT_BYTES: u64 = 16 << 20;

/// Memory that nobody uses at present.
#[derive(Debug)]
pub(super) struct Pool {
    sharing: Sharing,
    free: Mutex<Free>,
}

/// A part of a segment, and where it starts.
type Piece = (Arc<Memory>, u64);

#[derive(Debug, Default)]
struct Free {
    /// By size, all of them powers of two.
    pieces: BTreeMap<u64, Vec<Piece>>,
    /// What all segments hold that are cut into pieces.
    bytes: u64,
}

impl Pool {
    pub fn new(sharing: Sharing) -> Arc<Self> {
        Arc::new(Self { sharing, free: Mutex::default() })
    }

    /// At least so many bytes, of any content.
    pub fn take(self: &Arc<Self>, bytes: u64) -> io::Result<Segment> {
        let size = bytes.max(MIN_BYTES).checked_next_power_of_two().ok_or(io::ErrorKind::OutOfMemory)?;
        let mut free = self.lock();
        let known = free.pieces.get_mut(&size).and_then(Vec::pop);
        let (memory, at) = match known {
            Some(piece) => piece,
            None => self.cut(&mut free, size)?,
        };
        drop(free);
        Ok(Segment { memory, at, size, pool: self.clone() })
    }

    /// A piece of a larger one, or of a new segment; what is left of it goes to the others.
    fn cut(&self, free: &mut Free, size: u64) -> io::Result<Piece> {
        let larger = free.pieces.range_mut(size + 1..).find(|(len, pieces)| {
            // The pieces of large buffers are kept whole for the next ones.
            **len <= MAX_SEGMENT_BYTES && !pieces.is_empty()
        });
        let (len, (memory, at)) = match larger.and_then(|(len, pieces)| Some((*len, pieces.pop()?))) {
            Some(found) => found,
            None => {
                let len =
                    free.bytes.clamp(FIRST_SEGMENT_BYTES, MAX_SEGMENT_BYTES).next_power_of_two().max(size);
                let memory = self.segment(len)?;
                free.bytes += if len <= MAX_SEGMENT_BYTES { len } else { 0 };
                (len, (Arc::new(memory), 0))
            }
        };
        let mut rest = len;
        while rest > size {
            rest /= 2;
            free.pieces.entry(rest).or_default().push((memory.clone(), at + rest));
        }
        Ok((memory, at))
    }

    fn segment(&self, bytes: u64) -> io::Result<Memory> {
        match self.sharing {
            Sharing::Private => Memory::private(bytes),
            Sharing::Host => Memory::shared(bytes),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A piece in use; it returns to its pool.
pub(super) struct Segment {
    pub memory: Arc<Memory>,
    /// Where it starts there.
    pub at: u64,
    size: u64,
    pool: Arc<Pool>,
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} B of a segment of {} B", self.size, self.memory.len())
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        self.pool.lock().pieces.entry(self.size).or_default().push((self.memory.clone(), self.at));
    }
}

/// Some elements in a segment.
#[derive(Debug)]
pub(super) struct Raw {
    pub segment: Segment,
    /// Where they start in the memory, in bytes.
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
        Ok(Self { raw: Raw { at: segment.at, segment, len }, of: PhantomData })
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

    fn place<T>(buffer: &Buffer<T>) -> (*const Memory, u64) {
        (Arc::as_ptr(&buffer.raw.segment.memory), buffer.raw.at)
    }

    #[test]
    fn pieces_are_used_again() {
        let pool = Pool::new(Sharing::Private);
        let first = Buffer::copied_from(&pool, &[1.5f32, 2.5]).unwrap();
        let second = Buffer::<f32>::new(&pool, 2).unwrap();
        assert_ne!(place(&first), place(&second));
        assert_eq!(*first, [1.5, 2.5]);
        let before = place(&first);
        drop(first);
        let third = Buffer::<f64>::new(&pool, 500).unwrap();
        assert_eq!(place(&third), before);
    }

    /// Whatever is taken and given back in whatever order: no two buffers share a byte.
    #[test]
    fn buffers_do_not_overlap() {
        let pool = Pool::new(Sharing::Private);
        let mut held: Vec<Buffer<i64>> = vec![];
        let mut draw = 1u64;
        for number in 0..if cfg!(miri) { 60 } else { 2000 } {
            draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            if draw >> 62 == 0 && !held.is_empty() {
                let buffer = held.swap_remove((draw >> 8) as usize % held.len());
                assert!(buffer.windows(2).all(|pair| pair[0] == pair[1]), "somebody else wrote there");
            } else if held.len() < 200 {
                let mut buffer =
                    Buffer::new(&pool, 1 + (draw >> 33) as usize % (1 << (9 + draw % 6))).unwrap();
                buffer.fill(number);
                held.push(buffer);
            }
        }
        assert!(held.iter().all(|buffer| buffer.windows(2).all(|pair| pair[0] == pair[1])));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it takes long and touches nothing")]
    fn many_small_buffers_take_few_segments() {
        let pool = Pool::new(Sharing::Private);
        let buffers: Vec<_> = (0..10_000).map(|_| Buffer::<f32>::new(&pool, 1024).unwrap()).collect();
        let mut segments: Vec<_> = buffers.iter().map(|b| place(b).0).collect();
        segments.sort_unstable();
        segments.dedup();
        assert!(segments.len() <= 12, "{}", segments.len());
        // 40 MB of buffers; nobody pays for much more.
        assert!(pool.lock().bytes <= 96 << 20);
    }
}
