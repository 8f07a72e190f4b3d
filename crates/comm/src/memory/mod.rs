//! Memory that ranks move bytes out of and into: one mapping, private or shared with the processes of the host.
//!
//! All of the crate's `unsafe` is here, but for MPI's calls and two socket options in `transport::tcp`. What makes it sound:
//! - a mapping lives as long as its [`Memory`], and every access is checked against its length;
//! - a rank's memory is written only by the one thread that drives its engine (a `Memory` is handed to it), and during a
//!   pass by the device: what the pass makes or needs, of which the program has the engine keep away meanwhile;
//! - a peer that has the segment mapped only reads it, and only bytes that were offered to it. The verifier proved that
//!   nothing writes to those until the peer has said that it took them;
//! - elements of a [`crate::collectives::Buffer`] are seen as a slice only by who owns the buffer, and no program has it
//!   meanwhile: starting one takes the buffer away, and the end of the program gives it back.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::io::{self, IoSlice, IoSliceMut};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, memfd_create,
};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};

use crate::collectives::Element;
use crate::combine::Combine;
use crate::room::check_room;
use crate::view::View;

/// A mapping. Pages are zero until they are written.
#[derive(Debug)]
pub struct Memory {
    start: NonNull<u8>,
    len: usize,
    /// The segment behind it, where it is shared.
    segment: Option<OwnedFd>,
}

// SAFETY: the mapping belongs to this value alone; see the module's rules for who writes to it.
unsafe impl Send for Memory {}
// SAFETY: as above; the rules of the module leave no two threads writing to the same bytes.
unsafe impl Sync for Memory {}

impl Memory {
    /// For a rank that is a thread.
    pub fn private(len: u64) -> io::Result<Self> {
        let len = mapped_len(len)?;
        // SAFETY: a fresh anonymous mapping aliases nothing.
        let start = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        Ok(Self { start: non_null(start), len, segment: None })
    }

    /// A segment without a name, which vanishes with the last process that has it. Its pages are there from the start:
    /// one that could not be had later would end the process that touches it.
    pub fn shared(len: u64) -> io::Result<Self> {
        let len = mapped_len(len)?;
        check_room(len as u64)?;
        let segment = memfd_create(segment_name(), MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        fallocate(&segment, FallocateFlags::empty(), 0, len as u64)?;
        fcntl_add_seals(&segment, SealFlags::SHRINK | SealFlags::GROW)?;
        Self::map(segment, len, ProtFlags::READ | ProtFlags::WRITE)
    }

    /// A peer's segment, to read from. It has to be sealed: a segment that shrinks takes its readers down with it.
    pub fn of_peer(segment: OwnedFd) -> io::Result<Self> {
        // What has no seals at all is not even memory.
        if !fcntl_get_seals(&segment).is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the peer's segment may shrink"));
        }
        let len = usize::try_from(fstat(&segment)?.st_size).map_err(|_| io::ErrorKind::InvalidData)?;
        Self::map(segment, mapped_len(len as u64)?, ProtFlags::READ)
    }

    fn map(segment: OwnedFd, len: usize, access: ProtFlags) -> io::Result<Self> {
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing of this process.
        let start = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &segment, 0)? };
        Ok(Self { start: non_null(start), len, segment: Some(segment) })
    }

    pub fn len(&self) -> u64 {
        self.len as u64
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn segment(&self) -> Option<BorrowedFd<'_>> {
        self.segment.as_ref().map(|s| s.as_fd())
    }

    fn check(&self, (at, len): (u64, u64)) -> (usize, usize) {
        let end = at.checked_add(len).expect("runs end below 2^64");
        assert!(end <= self.len as u64, "bytes {at}..{end} of a memory of {} B", self.len);
        (at as usize, len as usize)
    }

    fn slice(&self, run: (u64, u64)) -> &[u8] {
        let (at, len) = self.check(run);
        // SAFETY: in bounds, mapped and initialised (zero pages); nobody writes to it meanwhile, by the module's rules.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(at), len) }
    }

    #[expect(clippy::mut_from_ref, reason = "disjoint parts of one mapping are written side by side")]
    fn slice_mut(&self, run: (u64, u64)) -> &mut [u8] {
        let (at, len) = self.check(run);
        // SAFETY: in bounds and mapped; the one thread that writes to this memory holds one slice of any byte at a
        // time, as the functions below let none escape but for the reads of one system call.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(at), len) }
    }
}

/// The bytes of some elements.
pub(crate) fn bytes_of<T: Element>(elements: &[T]) -> &[u8] {
    // SAFETY: an element is plain numbers without padding (`Element` is sealed), and bytes have no alignment.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

impl Memory {
    /// Elements that lie in it, `at` bytes from its start.
    pub(crate) fn elements<T: Element>(&self, at: u64, len: usize) -> &[T] {
        let (at, _) = self.check((at, (len * size_of::<T>()) as u64));
        assert!(at.is_multiple_of(align_of::<T>()), "elements start where their type may");
        // SAFETY: in bounds and aligned (the mapping starts at a page); any bits are an element (`Element` is sealed).
        // The owner of the buffer alone has it, by the module's rules.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(at).cast(), len) }
    }

    /// The same to change them. The caller owns them.
    #[expect(clippy::mut_from_ref, reason = "the buffer that owns these elements is borrowed mutably")]
    pub(crate) fn elements_mut<T: Element>(&self, at: u64, len: usize) -> &mut [T] {
        let (at, _) = self.check((at, (len * size_of::<T>()) as u64));
        assert!(at.is_multiple_of(align_of::<T>()), "elements start where their type may");
        // SAFETY: as above, and the owner borrowed its buffer mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(at).cast(), len) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: this is the mapping made in `private` or `map`; no slice outlives the value it borrows from.
        let unmapped = unsafe { unmap(self.start.as_ptr().cast::<c_void>(), self.len) };
        debug_assert!(unmapped);
    }
}

#[cfg(not(feature = "mpi"))]
unsafe fn unmap(start: *mut c_void, len: usize) -> bool {
    // SAFETY: as the caller says.
    unsafe { rustix::mm::munmap(start, len) }.is_ok()
}

/// By the C library's own function: MPI libraries keep what a NIC knows of memory, and forget it when they see this
/// call; a system call of ours they would not see.
#[cfg(feature = "mpi")]
unsafe fn unmap(start: *mut c_void, len: usize) -> bool {
    unsafe extern "C" {
        fn munmap(start: *mut c_void, len: usize) -> std::ffi::c_int;
    }
    // SAFETY: as the caller says; this is the signature that POSIX gives it.
    unsafe { munmap(start, len) == 0 }
}

/// What the system calls segments that this process makes; by it they are told from its peers'.
pub(crate) fn segment_name() -> String {
    format!("crossmesh.{}", std::process::id())
}

/// Gives heap that is not in use back to the system, so that what is taken afterwards can be seen.
pub(crate) fn trim_heap() {
    #[cfg(target_env = "gnu")]
    {
        unsafe extern "C" {
            fn malloc_trim(pad: usize) -> std::ffi::c_int;
        }
        // SAFETY: glibc's signature; it touches nothing that is in use.
        unsafe { malloc_trim(0) };
    }
}

fn non_null(start: *mut c_void) -> NonNull<u8> {
    NonNull::new(start.cast()).expect("a mapping that succeeded has an address")
}

/// A mapping of no bytes is an error to the kernel, so the smallest is one byte.
fn mapped_len(len: u64) -> io::Result<usize> {
    usize::try_from(len.max(1)).map_err(|_| io::ErrorKind::OutOfMemory.into())
}

/// A box in some memory.
#[derive(Debug, Clone)]
pub struct Place {
    pub memory: Arc<Memory>,
    pub view: View,
}

impl Place {
    pub fn bytes(&self) -> u64 {
        self.view.bytes()
    }

    /// The slices of a part of the stream, to write from; as many as there is room for. Returns how many bytes.
    pub(crate) fn slices<'a>(&'a self, part: Range<u64>, room: usize, out: &mut Vec<IoSlice<'a>>) -> u64 {
        let mut bytes = 0;
        for run in self.view.runs(part).take(room) {
            out.push(IoSlice::new(self.memory.slice(run)));
            bytes += run.1;
        }
        bytes
    }

    /// The same to read into.
    pub(crate) fn slices_mut<'a>(
        &'a self,
        part: Range<u64>,
        room: usize,
        out: &mut Vec<IoSliceMut<'a>>,
    ) -> u64 {
        let mut bytes = 0;
        for run in self.view.runs(part).take(room) {
            out.push(IoSliceMut::new(self.memory.slice_mut(run)));
            bytes += run.1;
        }
        bytes
    }

    /// Where a part of the stream lies, if it is one run of bytes. Whoever reads or writes there keeps to the module's
    /// rules, and keeps the memory.
    #[cfg(feature = "mpi")]
    pub(crate) fn in_one_run(&self, part: Range<u64>) -> Option<NonNull<[u8]>> {
        let bytes = part.end - part.start;
        let run = self.view.runs(part).next().filter(|run| run.1 == bytes)?;
        Some(NonNull::from(self.memory.slice_mut(run)))
    }

    /// Continues a checksum over a part of the stream.
    pub(crate) fn checksum(&self, part: Range<u64>, so_far: u32) -> u32 {
        self.view.runs(part).fold(so_far, |crc, run| crc32c::crc32c_append(crc, self.memory.slice(run)))
    }

    /// Appends a part of the stream.
    pub fn pack(&self, part: Range<u64>, out: &mut Vec<u8>) {
        for run in self.view.runs(part) {
            out.extend_from_slice(self.memory.slice(run));
        }
    }

    /// Puts bytes at `offset` of the stream, or combines them with what is there.
    pub fn unpack(&self, offset: u64, mut bytes: &[u8], combine: Option<Combine>) {
        for run in self.view.runs(offset..offset + bytes.len() as u64) {
            let (head, rest) = bytes.split_at(run.1 as usize);
            put(self.memory.slice_mut(run), head, combine);
            bytes = rest;
        }
    }

    /// Copies a part of another place's stream to the same part of this one's. The two must not overlap in memory.
    pub fn copy_from(&self, from: &Place, part: Range<u64>, combine: Option<Combine>) {
        let (mut source, mut target) = (from.view.runs(part.clone()), self.view.runs(part));
        let (mut have, mut want) = (source.next(), target.next());
        while let (Some(a), Some(b)) = (have, want) {
            let len = a.1.min(b.1);
            put(self.memory.slice_mut((b.0, len)), from.memory.slice((a.0, len)), combine);
            let rest = |run: (u64, u64)| (run.1 > len).then_some((run.0 + len, run.1 - len));
            have = rest(a).or_else(|| source.next());
            want = rest(b).or_else(|| target.next());
        }
    }
}

fn put(into: &mut [u8], bytes: &[u8], combine: Option<Combine>) {
    match combine {
        None => into.copy_from_slice(bytes),
        Some(combine) => combine.apply(into, bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossmesh_core::region::{Region, Span};

    fn place(memory: &Arc<Memory>, base: u64, held: &Region, region: &Region) -> Place {
        Place { memory: memory.clone(), view: View::of_box(base, held, region, 2).unwrap() }
    }

    #[test]
    fn a_box_moves_between_buffers_of_different_shape() {
        let memory = Arc::new(Memory::private(4096).unwrap());
        let (wide, narrow) = (Region::whole(&[4, 6]), Region::new(vec![Span::new(1, 3), Span::new(1, 5)]));
        let whole = place(&memory, 0, &wide, &wide);
        whole.unpack(0, &(0..48).collect::<Vec<u8>>(), None);
        let (from, into) = (place(&memory, 0, &wide, &narrow), place(&memory, 100, &narrow, &narrow));
        for part in [0..3, 3..3, 3..16] {
            into.copy_from(&from, part, None);
        }
        let (mut sent, mut got) = (vec![], vec![]);
        from.pack(0..16, &mut sent);
        into.pack(0..16, &mut got);
        assert_eq!(sent, [14, 15, 16, 17, 18, 19, 20, 21, 26, 27, 28, 29, 30, 31, 32, 33]);
        assert_eq!(got, sent);
        assert_eq!(into.checksum(4..16, into.checksum(0..4, 0)), crc32c::crc32c(&sent));
    }

    #[test]
    fn a_peer_reads_what_is_shared() {
        let mine = Arc::new(Memory::shared(10_000).unwrap());
        let whole = Region::whole(&[100]);
        let written = place(&mine, 5000, &whole, &whole);
        let segment = mine.segment().unwrap().try_clone_to_owned().unwrap();
        let theirs = Arc::new(Memory::of_peer(segment).unwrap());
        written.unpack(0, &[7; 200], None);
        let mut read = vec![];
        place(&theirs, 5000, &whole, &whole).pack(0..200, &mut read);
        assert_eq!(read, [7; 200]);
    }

    #[test]
    fn a_memory_of_no_bytes_is_a_memory() {
        assert!(Memory::private(0).is_ok() && Memory::shared(0).is_ok());
    }
}
