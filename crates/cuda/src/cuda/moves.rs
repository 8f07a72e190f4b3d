//! Copies in the order of a queue: to the card, from it and inside it. As unsafe as the launch functions of [`super::ops`].
#![allow(clippy::missing_safety_doc, reason = "the module says it for all of them")]

use cudarc::driver::sys::{self, CUresult};

use super::ops::{At, Queue};
use crate::CudaError;

impl Queue {
    fn done(&self, call: &'static str, code: CUresult) -> Result<(), CudaError> {
        match code {
            CUresult::CUDA_SUCCESS => Ok(()),
            code => Err(self.cuda().failed(call, code)),
        }
    }

    /// From the host. What is read stays, and stays as it is, until the queue is done.
    pub unsafe fn write(&self, from: *const u8, bytes: usize, to: At) -> Result<(), CudaError> {
        // SAFETY: as the caller says.
        self.done("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.stream())
        })
    }

    /// To the host. Nobody looks there until the queue is done.
    pub unsafe fn read(&self, from: At, bytes: usize, to: *mut u8) -> Result<(), CudaError> {
        // SAFETY: as the caller says.
        self.done("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.stream())
        })
    }

    /// Inside the card.
    pub unsafe fn copy(&self, from: At, bytes: u64, to: At) -> Result<(), CudaError> {
        // SAFETY: as the caller says.
        self.done("cuMemcpyDtoDAsync", unsafe {
            sys::cuMemcpyDtoDAsync_v2(to, from, bytes as usize, self.stream())
        })
    }

    /// The same 32 bits everywhere.
    pub unsafe fn fill_32(&self, bits: u32, len: u64, to: At) -> Result<(), CudaError> {
        // SAFETY: as the caller says.
        self.done("cuMemsetD32Async", unsafe { sys::cuMemsetD32Async(to, bits, len as usize, self.stream()) })
    }

    /// The same 16 bits everywhere.
    pub unsafe fn fill_16(&self, bits: u16, len: u64, to: At) -> Result<(), CudaError> {
        // SAFETY: as the caller says.
        self.done("cuMemsetD16Async", unsafe { sys::cuMemsetD16Async(to, bits, len as usize, self.stream()) })
    }
}
