//! Every kernel on a real card: held against f64 on the host, from the same rounded inputs, and timed against what the card's memory does.
//!
//! Sizes divide by nothing, outputs are full of NaN before a kernel runs, and everything runs twice: the same bits have to come out.

pub mod bench;
pub mod boxes;
pub mod check;
pub mod products;
pub mod reference;
pub mod run;

use std::ffi::c_void;
use std::fmt;

use cudarc::driver::sys::{self, CUresult};
use half::bf16;

use super::Cuda;
use super::ops::{At, Queue, Real};
use crate::CudaError;
use crate::driver::{Allocated, Driver};

/// What a check found.
#[derive(Debug, Clone)]
pub struct Checked {
    pub what: String,
    /// ‖found - expected‖ / ‖expected‖, of the worst output.
    pub error: f64,
    pub allowed: f64,
    /// The second time gave the same bits.
    pub same_bits: bool,
}

impl Checked {
    pub fn is_right(&self) -> bool {
        // A NaN is no error that is allowed.
        self.error <= self.allowed && self.same_bits
    }
}

impl fmt::Display for Checked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let right = if self.is_right() { "right" } else { "WRONG" };
        let bits = if self.same_bits { "" } else { ", other bits the second time" };
        write!(f, "{right}  {:<58} {:9.2e} of {:.1e}{bits}", self.what, self.error, self.allowed)
    }
}

/// Random numbers that are the same on every machine (splitmix64).
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.draw() % limit
    }

    /// In [-1, 1), about.
    pub fn number(&mut self) -> f32 {
        (self.draw() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Numbers as a card stores them, between -scale and scale.
    pub fn numbers(&mut self, real: Real, len: usize, scale: f32) -> Vec<f64> {
        (0..len).map(|_| rounded(real, f64::from(self.number() * scale))).collect()
    }
}

/// What is stored of a number.
pub fn rounded(real: Real, x: f64) -> f64 {
    match real {
        Real::F32 => f64::from(x as f32),
        Real::Bf16 => f64::from(bf16::from_f32(x as f32).to_f32()),
    }
}

pub fn allowed(real: Real) -> f64 {
    match real {
        Real::F32 => 1e-5,
        Real::Bf16 => 1.0 / 256.0,
    }
}

/// Memory of the card, exactly as large as asked for.
pub struct Buffer<'a> {
    cuda: &'a Cuda,
    allocated: Option<Allocated>,
}

impl Buffer<'_> {
    pub fn at(&self) -> At {
        self.allocated.as_ref().expect("until it is dropped").address
    }

    pub fn bytes(&self) -> u64 {
        self.allocated.as_ref().expect("until it is dropped").bytes
    }

    fn done(&self, call: &'static str, code: CUresult) -> Result<(), CudaError> {
        match code {
            CUresult::CUDA_SUCCESS => Ok(()),
            code => Err(self.cuda.failed(call, code)),
        }
    }

    pub fn write(&self, bytes: &[u8]) -> Result<(), CudaError> {
        assert!(bytes.len() as u64 <= self.bytes());
        // SAFETY: as many bytes as there are, on both sides.
        self.done("cuMemcpyHtoD", unsafe {
            sys::cuMemcpyHtoD_v2(self.at(), bytes.as_ptr().cast::<c_void>(), bytes.len())
        })?;
        // From memory that is not pinned it may return when the bytes are on their way: streams of ours would not wait for them.
        // SAFETY: waits for the context's work.
        self.done("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    pub fn read(&self) -> Result<Vec<u8>, CudaError> {
        let mut bytes = vec![0u8; self.bytes() as usize];
        // SAFETY: as above.
        self.done("cuMemcpyDtoH", unsafe {
            sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast::<c_void>(), self.at(), bytes.len())
        })?;
        Ok(bytes)
    }

    /// Fills it with what is no number in any type.
    pub fn poison(&self) -> Result<(), CudaError> {
        // SAFETY: all of it, and nothing else.
        self.done("cuMemsetD8", unsafe { sys::cuMemsetD8_v2(self.at(), 0xFF, self.bytes() as usize) })?;
        // SAFETY: waits for the context's work.
        self.done("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    pub fn numbers(&self, real: Real) -> Result<Vec<f64>, CudaError> {
        let bytes = self.read()?;
        Ok(match real {
            Real::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
            Real::Bf16 => {
                bytes.as_chunks::<2>().0.iter().map(|b| f64::from(bf16::from_le_bytes(*b).to_f32())).collect()
            }
        })
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        if let Some(allocated) = self.allocated.take() {
            self.cuda.free(allocated);
        }
    }
}

/// Numbers as bytes of the card's.
pub fn stored(real: Real, numbers: &[f64]) -> Vec<u8> {
    match real {
        Real::F32 => numbers.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect(),
        Real::Bf16 => numbers.iter().flat_map(|x| bf16::from_f32(*x as f32).to_le_bytes()).collect(),
    }
}

/// A card with a queue to try things on.
pub struct Lab<'a> {
    pub cuda: &'a Cuda,
    pub queue: Queue,
    pub random: Random,
}

impl<'a> Lab<'a> {
    pub fn bytes(&self, bytes: u64) -> Result<Buffer<'a>, CudaError> {
        let buffer = Buffer { cuda: self.cuda, allocated: Some(self.cuda.allocate(bytes.max(1), false)?) };
        buffer.poison()?;
        Ok(buffer)
    }

    pub fn empty(&self, real: Real, len: usize) -> Result<Buffer<'a>, CudaError> {
        self.bytes(len as u64 * real.bytes())
    }

    pub fn put(&self, real: Real, numbers: &[f64]) -> Result<Buffer<'a>, CudaError> {
        let buffer = self.empty(real, numbers.len())?;
        buffer.write(&stored(real, numbers))?;
        Ok(buffer)
    }

    pub fn put_words(&self, words: &[u32]) -> Result<Buffer<'a>, CudaError> {
        let buffer = self.bytes(words.len() as u64 * 4)?;
        buffer.write(&words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>())?;
        Ok(buffer)
    }

    /// Runs something twice on the same inputs, and holds what it writes against what it should. `prepare` puts inputs that change in place back.
    pub fn check(
        &self,
        what: String,
        allowed: f64,
        mut prepare: impl FnMut() -> Result<(), CudaError>,
        mut run: impl FnMut(&Queue) -> Result<(), CudaError>,
        outputs: &[(&Buffer<'_>, Real, &[f64])],
    ) -> Result<Checked, CudaError> {
        let mut times = vec![];
        for _ in 0..2 {
            prepare()?;
            run(&self.queue)?;
            self.queue.finish()?;
            times.push(outputs.iter().map(|(buffer, ..)| buffer.read()).collect::<Result<Vec<_>, _>>()?);
        }
        let mut error: f64 = 0.0;
        for (buffer, real, expected) in outputs {
            let found = buffer.numbers(*real)?;
            assert_eq!(found.len(), expected.len(), "{what}");
            let off: f64 = found.iter().zip(*expected).map(|(f, e)| (f - e) * (f - e)).sum();
            let size: f64 = expected.iter().map(|e| e * e).sum();
            let this = (off / size.max(1e-300)).sqrt();
            error = if this > error || this.is_nan() { this } else { error };
        }
        Ok(Checked { what, error, allowed, same_bits: times[0] == times[1] })
    }
}
