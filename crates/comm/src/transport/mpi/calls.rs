//! MPI's calls: the ones that do not wait, with memory that lives as long as they do.
//!
//! All of the crate's `unsafe` that is not in `memory` is here. What makes it sound:
//! - MPI was started by the [`Mpi`] that every call goes through, and ends with it; every [`Request`] keeps it;
//! - calls are made one at a time, under a lock, as the level of threading asks (`MPI_THREAD_SERIALIZED`);
//! - a request owns the memory it sends or fills, until MPI says that it is done. A request that is dropped before
//!   leaves its memory where it is, for good: then MPI is not ended either.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crossmesh_core::id::Rank;
use mpi::Threading;
use mpi::environment::{Universe, initialize_with_threading, processor_name};
use mpi::ffi::{self, MPI_Comm, MPI_Request, MPI_Status};
use mpi::traits::{AsRaw, Communicator};

use crate::memory::place::Lent;

/// MPI's error texts are shorter.
const ERROR_BYTES: usize = 1024;

/// What MPI has to say about a call.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum MpiError {
    #[error("MPI was started before")]
    Started,
    #[error(
        "this MPI library allows calls from its first thread only\nhint: another build of it allows more"
    )]
    Threads,
    #[error("{call}: {text}")]
    Call { call: &'static str, text: String },
}

/// MPI, started, and a communicator of ours with all ranks.
pub struct Mpi {
    comm: MPI_Comm,
    me: Rank,
    size: u32,
    host: String,
    one_at_a_time: Mutex<()>,
    /// Whether every call has come to its end.
    clean: AtomicBool,
    /// Ends MPI when it is dropped.
    universe: Option<Universe>,
}

// SAFETY: a communicator is a handle that any thread may use; calls with it are made one at a time.
unsafe impl Send for Mpi {}
// SAFETY: as above.
unsafe impl Sync for Mpi {}

impl Mpi {
    /// Starts MPI. Once in a process.
    pub fn start() -> Result<Arc<Self>, MpiError> {
        let (universe, threading) =
            initialize_with_threading(Threading::Serialized).ok_or(MpiError::Started)?;
        if threading < Threading::Serialized {
            return Err(MpiError::Threads);
        }
        let world = universe.world();
        let mut comm = MaybeUninit::uninit();
        // SAFETY: MPI is started, and the world's communicator is valid; the new one is written to before it is read.
        let comm = unsafe {
            checked("MPI_Comm_dup", ffi::MPI_Comm_dup(world.as_raw(), comm.as_mut_ptr()))?;
            comm.assume_init()
        };
        // SAFETY: the communicator was just made. Errors come back to us instead of ending the process.
        let set = unsafe { ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN) };
        checked("MPI_Comm_set_errhandler", set)?;
        Ok(Arc::new(Self {
            comm,
            me: Rank(world.rank() as u32),
            size: world.size() as u32,
            host: processor_name().unwrap_or_else(|_| "?".into()),
            one_at_a_time: Mutex::new(()),
            clean: AtomicBool::new(true),
            universe: Some(universe),
        }))
    }

    pub fn me(&self) -> Rank {
        self.me
    }

    pub fn size(&self) -> u32 {
        self.size
    }

    /// The name of our host.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Something of MPI's is left that will not end: then MPI is not ended either, which would wait for it.
    pub fn leave_unclean(&self) {
        self.clean.store(false, Ordering::Relaxed);
    }

    /// Ends all processes of the job, this one too, whatever they do.
    pub fn abort(&self, code: i32) {
        let _turn = self.turn();
        // SAFETY: the communicator lives as long as `self`.
        let _error = unsafe { ffi::MPI_Abort(self.comm, code) };
    }

    /// Done when the peer has begun to receive it: what is not done bounds the memory that MPI needs there.
    pub fn send_data(self: &Arc<Self>, to: Rank, tag: i32, bytes: Bytes) -> Result<Request, MpiError> {
        self.request("MPI_Issend", bytes, |at, len, request| {
            // SAFETY: `at` and `len` are the bytes that the request owns; see the module.
            unsafe { ffi::MPI_Issend(at, len, ffi::RSMPI_UINT8_T, to.0 as c_int, tag, self.comm, request) }
        })
    }

    /// Done when MPI has the bytes, wherever.
    pub fn send(self: &Arc<Self>, to: Rank, tag: i32, bytes: Bytes) -> Result<Request, MpiError> {
        self.request("MPI_Isend", bytes, |at, len, request| {
            // SAFETY: `at` and `len` are the bytes that the request owns; see the module.
            unsafe { ffi::MPI_Isend(at, len, ffi::RSMPI_UINT8_T, to.0 as c_int, tag, self.comm, request) }
        })
    }

    pub fn receive(self: &Arc<Self>, from: Rank, tag: i32, bytes: Bytes) -> Result<Request, MpiError> {
        self.request("MPI_Irecv", bytes, |at, len, request| {
            // SAFETY: as for sends; nobody else reads or writes the bytes until the request is done.
            unsafe { ffi::MPI_Irecv(at, len, ffi::RSMPI_UINT8_T, from.0 as c_int, tag, self.comm, request) }
        })
    }

    /// Done when every rank has come this far.
    pub fn barrier(self: &Arc<Self>) -> Result<Request, MpiError> {
        self.request("MPI_Ibarrier", Bytes::Owned(vec![]), |_, _, request| {
            // SAFETY: the communicator lives as long as `self`.
            unsafe { ffi::MPI_Ibarrier(self.comm, request) }
        })
    }

    /// Whether a message of this tag waits, and from whom.
    pub fn probe(&self, tag: i32) -> Result<Option<Rank>, MpiError> {
        let _turn = self.turn();
        let (mut flag, mut status) = (0, MaybeUninit::<MPI_Status>::uninit());
        // SAFETY: the communicator lives as long as `self`; the status is read only where the flag says that it is set.
        let found = unsafe {
            let code = ffi::MPI_Iprobe(ffi::RSMPI_ANY_SOURCE, tag, self.comm, &mut flag, status.as_mut_ptr());
            checked("MPI_Iprobe", code)?;
            (flag != 0).then(|| status.assume_init())
        };
        Ok(found.map(|status| Rank(status.MPI_SOURCE as u32)))
    }

    /// Starts a call with these bytes.
    fn request(
        self: &Arc<Self>,
        call: &'static str,
        bytes: Bytes,
        start: impl FnOnce(*mut c_void, c_int, *mut MPI_Request) -> c_int,
    ) -> Result<Request, MpiError> {
        let at = bytes.at();
        let len = c_int::try_from(at.len()).expect("frames are far below 2 GiB");
        let mut request = MaybeUninit::uninit();
        let code = {
            let _turn = self.turn();
            start(at.as_ptr().cast::<c_void>(), len, request.as_mut_ptr())
        };
        checked(call, code)?;
        // SAFETY: a call that succeeded has written its request.
        let raw = unsafe { request.assume_init() };
        Ok(Request { mpi: self.clone(), call, raw, bytes: Some(bytes) })
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        self.one_at_a_time.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        if !self.clean.load(Ordering::Relaxed) {
            std::mem::forget(self.universe.take());
        }
    }
}

/// Bytes that a request owns.
pub enum Bytes {
    Owned(Vec<u8>),
    /// A part of a place that is one run of bytes.
    InPlace(Lent, Range<u64>),
}

impl Bytes {
    /// In place if that can be, else not at all.
    pub fn in_place(place: &Lent, part: Range<u64>) -> Option<Self> {
        place.in_one_run(part.clone()).map(|_| Self::InPlace(place.clone(), part))
    }

    fn at(&self) -> NonNull<[u8]> {
        match self {
            // The heap block stays where it is while the vector is moved; nobody makes it longer.
            Self::Owned(bytes) => NonNull::from(bytes.as_slice()),
            Self::InPlace(place, part) => place.in_one_run(part.clone()).expect("checked when it was made"),
        }
    }
}

/// A call under way.
pub struct Request {
    mpi: Arc<Mpi>,
    call: &'static str,
    raw: MPI_Request,
    /// None once it is done.
    bytes: Option<Bytes>,
}

// SAFETY: a request is a handle that any thread may use; its bytes are sent along, and calls are made one at a time.
unsafe impl Send for Request {}

impl Request {
    /// Its bytes, and how many of them came, once it is done. It is not asked again then.
    pub fn test(&mut self) -> Result<Option<(Bytes, usize)>, MpiError> {
        let turn = self.mpi.turn();
        let (mut flag, mut status) = (0, MaybeUninit::<MPI_Status>::uninit());
        // SAFETY: the request is under way, as `bytes` says; the status is read only where the flag says that it is set.
        let count = unsafe {
            let code = ffi::MPI_Test(&mut self.raw, &mut flag, status.as_mut_ptr());
            if code != 0 {
                // Whether the request is done, nobody knows: its bytes are left alone.
                drop(turn);
                return Err(checked(self.call, code).expect_err("it is no success"));
            }
            if flag == 0 {
                return Ok(None);
            }
            let mut count = 0;
            ffi::MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &mut count);
            usize::try_from(count).unwrap_or(0)
        };
        Ok(self.bytes.take().map(|bytes| (bytes, count)))
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if let Some(bytes) = self.bytes.take() {
            // MPI may still read or write them.
            std::mem::forget(bytes);
            self.mpi.leave_unclean();
        }
    }
}

/// An error with MPI's own words.
fn checked(call: &'static str, code: c_int) -> Result<(), MpiError> {
    // `MPI_SUCCESS` is 0 in the standard.
    if code == 0 {
        return Ok(());
    }
    let (mut text, mut len) = ([0u8; ERROR_BYTES], 0);
    // SAFETY: the buffer is longer than any text of MPI's, whose length comes back.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut len) };
    let len = usize::try_from(len).unwrap_or(0).min(ERROR_BYTES);
    Err(MpiError::Call { call, text: String::from_utf8_lossy(&text[..len]).into_owned() })
}
