//! One GPU: kernels of `crossmesh-cuda`, matrix products of cuBLASLt.
//!
//! ```text
//! pass        gemm  norm  attention ..  finish        host: asks, never waits until `finish` or a number is wanted
//! stream         [====][==][=========]..|             card: all of it, one behind the other
//! ```
//!
//! Everything is queued on one stream, so a buffer that is dropped may be used again at once ([`crossmesh_cuda::Arena`]): in a steady step the driver is
//! asked for no memory. What fails is kept and told by `finish` ([`failure::Failure`]). Sums have a fixed order; with [`Chosen::Same`] products have the same
//! algorithm in every run, and so the same bits come out.
#![allow(
    unsafe_code,
    reason = "kernels are given addresses; every one of them is checked against its buffer here"
)]

mod attention;
mod buffers;
mod calls;
pub mod failure;
mod fuse;
mod kernels;
mod norms;
pub mod times;

use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crossmesh_cuda::cuda::Cuda;
use crossmesh_cuda::cuda::dnn::Dnn;
use crossmesh_cuda::cuda::lt::{Choice, Products};
use crossmesh_cuda::cuda::ops::{self, Draws, Queue, Real};
use crossmesh_cuda::gpu::Gpu as Device;
use crossmesh_cuda::{Arena, CudaError, Staging};

use super::random::Stream;
use super::{Activation, Rows};
use attention::Turns;
pub use buffers::{GpuBuf, GpuElem};
use failure::Failure;
use fuse::Waiting;
use times::Times;

/// How algorithms of products are chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Chosen {
    /// The library's first choice: the same in every run.
    Same,
    /// The fastest by the clock, kept in this file, if there is one.
    Fastest(Option<PathBuf>),
}

/// See the module.
pub struct Gpu<E> {
    queue: Queue,
    products: Products,
    /// Fused attention, where the library is there; else why it is not.
    dnn: Result<Dnn, CudaError>,
    arena: Arc<Arena>,
    failure: Failure,
    times: Option<Times>,
    /// The last call, where it may become one with the next.
    waiting: Mutex<Option<Waiting>>,
    /// What copies that are queued read from.
    pinned: Mutex<Vec<Staging>>,
    /// Tables of rotary positions that are on the card.
    turns: Mutex<Vec<Turns>>,
    elem: PhantomData<fn() -> E>,
}

/// Memory for partial sums, and for products: enough for all sizes.
const SCRATCH_BYTES: u64 = 64 << 20;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn small(n: usize) -> u32 {
    u32::try_from(n).expect("sizes are below 2^32")
}

fn rows(size: Rows) -> ops::Rows {
    ops::Rows { rows: small(size.rows), cols: small(size.cols) }
}

fn activation(activation: Activation) -> ops::Activation {
    match activation {
        Activation::Gelu => ops::Activation::Gelu,
        Activation::Silu => ops::Activation::Silu,
    }
}

fn draws(stream: Stream) -> Draws {
    let (key, high) = stream.words();
    Draws { key, high }
}

impl<E: GpuElem> Gpu<E> {
    /// Kernels on a device.
    pub fn new(device: &Arc<Device>, chosen: &Chosen) -> Result<Self, CudaError> {
        let cuda = Arc::new(Cuda::open(device.card().ordinal)?);
        let scratch = || device.allocate(SCRATCH_BYTES, false).map(Arc::new);
        let (choice, file) = match chosen {
            Chosen::Same => (Choice::First, None),
            Chosen::Fastest(file) => (Choice::Timed, file.as_deref()),
        };
        let queue = Queue::new(&cuda, &scratch()?)?;
        let dnn = match E::REAL {
            Real::Bf16 => Dnn::open(&queue, *chosen == Chosen::Same),
            Real::F32 => {
                Err(CudaError::Refused { what: "attention by cuDNN", found: "f32".into(), needed: "bf16" })
            }
        };
        Ok(Self {
            queue,
            dnn,
            products: Products::new(&cuda, &scratch()?, choice, file)?,
            arena: Arena::new(device),
            failure: Failure::default(),
            times: Times::asked(),
            waiting: Mutex::default(),
            pinned: Mutex::default(),
            turns: Mutex::default(),
            elem: PhantomData,
        })
    }

    /// Why attention has its scores in memory: what the library or its version is, if it is that; None where it is fused, for sizes that the library takes.
    pub fn why_attention_is_slow(&self) -> Option<&CudaError> {
        self.dnn.as_ref().err()
    }

    /// Where the card's time went, where that was asked for ([`times::Times`]), and what memory was used.
    pub fn times(&self) -> Option<String> {
        let usage = self.arena.usage();
        let attention =
            self.dnn.as_ref().map_or_else(ToString::to_string, |dnn| format!("cuDNN {}", dnn.version()));
        Some(format!("{}{usage:?}\nattention: {attention}\n", self.times.as_ref()?.table()))
    }

    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }
}

impl<E> Drop for Gpu<E> {
    fn drop(&mut self) {
        // Copies that are queued read from pinned memory, which goes back now. A card that is lost reads nothing.
        let _lost = self.queue.cuda().enter().and_then(|()| self.queue.finish());
    }
}
