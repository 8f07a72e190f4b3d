//! A launch function for each training kernel. What they compute stands in the `.cu` files; sizes that a kernel does not take are refused here.
//!
//! Everything is queued in the order of the calls, and nothing waits. All functions are `unsafe` for the same reason: they are given addresses. Who
//! calls them says that each is memory of the card, as large as the sizes say, that nobody else touches it until the queue is done, and that
//! what is written does not overlap what is read, but where a function says that it works in place.
#![allow(clippy::missing_safety_doc, reason = "the module says it for all of them")]

mod loss;
mod norms;
mod pointwise;
mod tables;
mod update;

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};

use super::{Cuda, Shared};
use crate::driver::Driver;
use crate::{CudaError, DeviceMemory};

pub use norms::{Norm, NormIn, NormOut, NormSaved};
pub use pointwise::{Activation, Rotary};
pub use tables::{SortedIds, Tables, sort_ids};
pub use update::{AdamState, AdamW, Sgd, SgdState};

/// What numbers are stored as; all are computed with in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Real {
    F32,
    Bf16,
}

impl Real {
    pub const ALL: [Real; 2] = [Real::F32, Real::Bf16];

    pub fn name(self) -> &'static str {
        match self {
            Real::F32 => "f32",
            Real::Bf16 => "bf16",
        }
    }

    pub fn bytes(self) -> u64 {
        match self {
            Real::F32 => 4,
            Real::Bf16 => 2,
        }
    }
}

/// A row-major matrix's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    pub rows: u32,
    pub cols: u32,
}

/// An address of the card's; 0 where there is none.
pub type At = u64;

/// Below which draws are dropped, and what scales the others.
pub(super) fn drop_numbers(rate: f64) -> (u32, f32) {
    ((rate * 4_294_967_296.0).clamp(0.0, 4_294_967_295.0) as u32, (1.0 / (1.0 - rate)) as f32)
}

/// The draws of a Philox stream: its key and the upper half of its counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Draws {
    pub key: [u32; 2],
    pub high: [u32; 2],
}

/// A stream of its own, with memory for partial sums.
#[derive(Debug)]
pub struct Queue {
    cuda: Arc<Cuda>,
    stream: Shared<sys::CUstream>,
    partial: Arc<DeviceMemory>,
}

/// The addresses of a kernel's arguments.
macro_rules! arguments {
    ($($value:expr),*) => { [$((&raw const $value).cast_mut().cast::<std::ffi::c_void>()),*] };
}

pub(super) use arguments;

/// Threads of kernels that go element by element.
pub(super) const THREADS: u32 = 256;

impl Queue {
    /// `partial` is memory for partial sums: 64 MiB is always enough.
    pub fn new(cuda: &Arc<Cuda>, partial: &Arc<DeviceMemory>) -> Result<Self, CudaError> {
        cuda.enter()?;
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes the stream.
        match unsafe { sys::cuStreamCreate(&raw mut stream, flags) } {
            CUresult::CUDA_SUCCESS => {
                Ok(Self { cuda: Arc::clone(cuda), stream: Shared(stream), partial: Arc::clone(partial) })
            }
            code => Err(cuda.failed("cuStreamCreate", code)),
        }
    }

    pub fn cuda(&self) -> &Cuda {
        &self.cuda
    }

    pub fn stream(&self) -> sys::CUstream {
        self.stream.0
    }

    /// Waits for all that was queued.
    pub fn finish(&self) -> Result<(), CudaError> {
        // SAFETY: a stream of ours.
        match unsafe { sys::cuStreamSynchronize(self.stream.0) } {
            CUresult::CUDA_SUCCESS => Ok(()),
            code => Err(self.cuda.failed("cuStreamSynchronize", code)),
        }
    }

    pub(super) unsafe fn launch(
        &self,
        kernel: (&str, &str),
        grid: (u32, u32),
        block: (u32, u32),
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        if grid.0 == 0 || grid.1 == 0 {
            return Ok(()); // nothing to do
        }
        // SAFETY: the module's.
        unsafe { self.cuda.launch(kernel, grid, block, self.stream.0, arguments) }
    }

    /// Blocks for so many elements, each thread with `each` of them, and no more than keep the card busy.
    pub(super) fn blocks(&self, elements: u64, each: u64) -> u32 {
        let most = u64::from(self.cuda.card().multiprocessors) * 16;
        elements.div_ceil(u64::from(THREADS) * each).min(most) as u32
    }

    pub(super) fn partial(&self, what: &'static str, bytes: u64) -> Result<At, CudaError> {
        match bytes <= self.partial.bytes() {
            true => Ok(self.partial.address()),
            false => Err(CudaError::Refused {
                what,
                found: format!("{bytes} B of partial sums"),
                needed: "no more than the queue has",
            }),
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: a stream of ours; what was queued still runs.
        let _gone = unsafe { sys::cuStreamDestroy_v2(self.stream.0) };
    }
}
