//! Memory that ranks move bytes out of and into: one mapping, private or shared with the processes of the host; memory of
//! the caller's ([`foreign`]), which is used where it lies; or memory of a GPU, which the host cannot touch (`moving`).
//!
//! Most of the crate's `unsafe` is here. What makes it sound:
//! - a mapping lives as long as its [`Memory`], and every access is checked against its length;
//! - in this process a memory belongs to one owner or to one engine at a time ([`lease`]), which safe code cannot get around;
//! - an engine reaches bytes through [`place::Lent`], of which it says that its program has them;
//! - a peer that has the segment mapped can only read it: the segment is sealed against any further writing but through our own
//!   mapping. What a peer puts into a segment of its own while we copy out of it changes values, never what is sound: its bytes
//!   have no owner here, are never a slice, and are copied by pointer; any bits are an element.
#![allow(unsafe_code)]

pub mod foreign;
pub(crate) mod lease;
pub(crate) mod moving;
pub mod place;

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use crossmesh_cuda::{DeviceMemory, Gpu};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};

pub use lease::{Owned, Unavailable};
pub use place::Place;

use crate::collectives::Element;
use crate::limits::no_descriptor;
use crate::room::check_room;
use foreign::Owner;
use lease::InUse;

/// A mapping, whose pages are zero until they are written; or what somebody else has.
#[derive(Debug)]
pub struct Memory {
    start: NonNull<u8>,
    len: usize,
    /// The segment behind it, where it is shared.
    segment: Option<OwnedFd>,
    /// A peer's is not.
    writable: bool,
    /// Whoever has the bytes, where they are no mapping of ours. It goes when the memory does.
    owner: Option<Owner>,
    /// Where it is memory of a device: `start` is its address there, and means nothing here.
    device: Option<DeviceMemory>,
    in_use: InUse,
}

// SAFETY: the mapping belongs to this value alone, and so does an owner, who may be sent.
unsafe impl Send for Memory {}
// SAFETY: what can be done through a shared reference in safe code is to ask for its length or its descriptor, and to become
// its owner, which one thread at a time can. All else is `unsafe`, and says what its caller has to see to.
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
                // Miri knows the plain sort only.
                if cfg!(miri) { MapFlags::PRIVATE } else { MapFlags::PRIVATE | MapFlags::NORESERVE },
            )?
        };
        Ok(Self {
            start: non_null(start),
            len,
            segment: None,
            writable: true,
            owner: None,
            device: None,
            in_use: InUse::default(),
        })
    }

    /// Memory of a GPU; `export` where processes of the host are to map it.
    pub fn on_device(gpu: &Arc<Gpu>, len: u64, export: bool) -> io::Result<Self> {
        Ok(Self::of_device(gpu.allocate(len.max(1), export).map_err(moving::failed)?, true))
    }

    /// A peer's memory on our GPU, to read from.
    pub fn of_peer_on_device(gpu: &Arc<Gpu>, handle: OwnedFd, len: u64) -> io::Result<Self> {
        Ok(Self::of_device(gpu.import(handle, len).map_err(moving::failed)?, false))
    }

    fn of_device(device: DeviceMemory, writable: bool) -> Self {
        let start =
            NonNull::new(device.address() as usize as *mut u8).expect("a device's memory has an address");
        let len = usize::try_from(device.bytes()).expect("a device's memory is addressed with 64 bits");
        Self {
            start,
            len,
            segment: None,
            writable,
            owner: None,
            device: Some(device),
            in_use: InUse::default(),
        }
    }

    /// The GPU that it is on.
    pub fn gpu(&self) -> Option<&Arc<Gpu>> {
        self.device.as_ref().map(DeviceMemory::gpu)
    }

    /// What a peer on the same GPU maps it by, where it is for that.
    pub fn device_handle(&self) -> Option<BorrowedFd<'_>> {
        self.device.as_ref().and_then(DeviceMemory::handle)
    }

    /// A segment without a name, which vanishes with the last process that has it. Its pages are there from the start:
    /// one that could not be had later would end the process that touches it.
    pub fn shared(len: u64) -> io::Result<Self> {
        let len = mapped_len(len)?;
        check_room(len as u64)?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let segment = memfd_create(segment_name(), flags).map_err(no_segment)?;
        fallocate(&segment, FallocateFlags::empty(), 0, len as u64)?;
        let start = map(&segment, len, ProtFlags::READ | ProtFlags::WRITE)?;
        let memory = Self {
            start,
            len,
            segment: Some(segment),
            writable: true,
            owner: None,
            device: None,
            in_use: InUse::default(),
        };
        memory.seal()?;
        Ok(memory)
    }

    /// From now on the segment keeps its size, and is written to through our mapping only: a peer that has the descriptor
    /// can map it to read, and change nothing, not even the seals.
    fn seal(&self) -> io::Result<()> {
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        let sealed = self.segment.as_ref().map_or(Ok(()), |segment| fcntl_add_seals(segment, seals));
        sealed.map_err(|e| {
            io::Error::new(
                e.kind(),
                format!("cannot seal a segment against writing: {e}\nhint: Linux 5.1 can"),
            )
        })
    }

    /// A peer's segment, to read from. It has to be sealed: a segment that shrinks takes its readers down with it.
    pub fn of_peer(segment: OwnedFd) -> io::Result<Self> {
        // What has no seals at all is not even memory.
        if !fcntl_get_seals(&segment).is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the peer's segment may shrink"));
        }
        let len = usize::try_from(fstat(&segment)?.st_size).map_err(|_| io::ErrorKind::InvalidData)?;
        let len = mapped_len(len as u64)?;
        // The mapping stays when the descriptor goes: descriptors are few.
        let start = map(&segment, len, ProtFlags::READ)?;
        Ok(Self {
            start,
            len,
            segment: None,
            writable: false,
            owner: None,
            device: None,
            in_use: InUse::default(),
        })
    }

    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Where it starts, as a number: to compare, not to use.
    pub fn address(&self) -> u64 {
        self.start.as_ptr().addr() as u64
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
        assert!(self.device.is_none(), "memory of a device is not touched by the host");
        (at as usize, len as usize)
    }

    /// Copies out of it, also where a peer may be writing: what it writes meanwhile is there or not, byte by byte.
    ///
    /// # Safety
    /// Nobody in this process writes to these bytes meanwhile, or has the bytes of `out` that many.
    unsafe fn copy_out(&self, at: u64, out: *mut u8, len: u64) {
        let (at, len) = self.check((at, len));
        // SAFETY: in bounds and mapped; the caller sees to the rest.
        unsafe { std::ptr::copy_nonoverlapping(self.start.as_ptr().add(at), out, len) };
    }

    /// Copies out of a peer's segment, as it is at present; and of no other memory: that has an owner.
    pub fn read_of_peer(&self, at: u64, out: &mut [u8]) {
        assert!(!self.writable, "what is read of is a peer's");
        // SAFETY: it is mapped here to be read only, and `out` has its bytes to itself.
        unsafe { self.copy_out(at, out.as_mut_ptr(), out.len() as u64) };
    }

    /// # Safety
    /// Nobody in this process writes to these bytes while the slice lives.
    unsafe fn slice(&self, run: (u64, u64)) -> &[u8] {
        let (at, len) = self.check(run);
        assert!(self.writable, "a peer's memory is copied out of, not looked at");
        // SAFETY: in bounds, mapped and initialised (zero pages); the caller sees to the rest.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(at), len) }
    }

    /// # Safety
    /// Nobody in this process reads or writes these bytes in another way while the slice lives.
    #[expect(clippy::mut_from_ref, reason = "disjoint parts of one mapping are written side by side")]
    unsafe fn slice_mut(&self, run: (u64, u64)) -> &mut [u8] {
        let (at, len) = self.check(run);
        assert!(self.writable, "a peer's memory is not written to");
        // SAFETY: in bounds and mapped; the caller sees to the rest.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(at), len) }
    }
}

fn no_segment(errno: Errno) -> io::Error {
    match errno {
        Errno::MFILE | Errno::NFILE => no_descriptor(errno),
        other => other.into(),
    }
}

fn map(segment: &OwnedFd, len: usize, access: ProtFlags) -> io::Result<NonNull<u8>> {
    // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing of this process.
    let start = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, segment, 0)? };
    Ok(non_null(start))
}

/// The bytes of some elements, to change them.
pub(crate) fn bytes_of_mut<T: Element>(elements: &mut [T]) -> &mut [u8] {
    // SAFETY: as below, and any bits are an element.
    unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), size_of_val(elements)) }
}

/// The bytes of some elements.
pub(crate) fn bytes_of<T: Element>(elements: &[T]) -> &[u8] {
    // SAFETY: an element is plain numbers without padding (`Element` is sealed), and bytes have no alignment.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

impl Memory {
    fn check_aligned<T>(&self, at: usize) {
        // Mappings start at a page; what a caller brings starts where it likes.
        let address = self.start.as_ptr().addr() + at;
        assert!(address.is_multiple_of(align_of::<T>()), "elements start where their type may");
    }

    /// Elements that lie in it, `at` bytes from its start.
    ///
    /// # Safety
    /// Nobody in this process writes to them while the slice lives.
    pub(crate) unsafe fn elements<T: Element>(&self, at: u64, len: usize) -> &[T] {
        let (at, _) = self.check((at, (len * size_of::<T>()) as u64));
        self.check_aligned::<T>(at);
        assert!(self.writable, "a peer's memory is copied out of, not looked at");
        // SAFETY: in bounds and aligned; any bits are an element (`Element` is sealed). The
        // caller sees to the rest.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(at).cast(), len) }
    }

    /// The same to change them.
    ///
    /// # Safety
    /// Nobody in this process reads or writes them in another way while the slice lives.
    #[expect(clippy::mut_from_ref, reason = "disjoint parts of one mapping are written side by side")]
    pub(crate) unsafe fn elements_mut<T: Element>(&self, at: u64, len: usize) -> &mut [T] {
        let (at, _) = self.check((at, (len * size_of::<T>()) as u64));
        self.check_aligned::<T>(at);
        assert!(self.writable, "a peer's memory is not written to");
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(at).cast(), len) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.owner.is_some() || self.device.is_some() {
            return; // whoever has it frees it, now
        }
        // SAFETY: this is the mapping made in `private` or by `map`; no slice outlives the value it borrows from.
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

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{OFlags, openat};

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no shared memory")]
    fn a_peer_reads_what_is_shared_and_writes_nothing() {
        let mine = Memory::shared(10_000).unwrap();
        let segment = || mine.segment().unwrap().try_clone_to_owned().unwrap();
        let theirs = Arc::new(Memory::of_peer(segment()).unwrap());
        let read = || {
            let mut bytes = [0; 200];
            theirs.read_of_peer(5000, &mut bytes);
            bytes
        };
        mine.own().unwrap().elements_mut::<u8>(5000, 200).fill(7);
        assert_eq!(read(), [7; 200]);
        // Its maker may write whenever it likes, so nobody has it, and no engine is lent it.
        assert_eq!(theirs.own().err(), Some(Unavailable::OfPeer));
        assert_eq!(lease::Lease::new(&theirs, lease::Borrower::new()).err(), Some(Unavailable::OfPeer));

        assert_eq!(
            map(&segment(), 4096, ProtFlags::WRITE).unwrap_err().kind(),
            io::ErrorKind::PermissionDenied
        );
        assert_eq!(rustix::io::write(segment(), b"x"), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(segment(), 0), Err(Errno::PERM));
        assert_eq!(fcntl_add_seals(segment(), SealFlags::WRITE), Err(Errno::PERM));
        // Not by another way to the same file either.
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&mine.segment().unwrap()));
        let again = openat(rustix::fs::CWD, path, OFlags::RDWR, rustix::fs::Mode::empty()).unwrap();
        assert_eq!(rustix::io::write(&again, b"x"), Err(Errno::PERM));
        // What we write is still seen.
        mine.own().unwrap().elements_mut::<u8>(5000, 1)[0] = 9;
        assert_eq!(read()[..2], [9, 7]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no shared memory")]
    fn a_memory_of_no_bytes_is_a_memory() {
        assert!(Memory::private(0).is_ok() && Memory::shared(0).is_ok());
    }
}
