//! Numbers in a card's memory, and what they may be.

use bytemuck::Pod;
use crossmesh_comm::collectives::Element;
use crossmesh_cuda::Block;
use crossmesh_cuda::cuda::ops::{At, Real};
use half::bf16;

use crate::kernels::Buffer;

/// What a GPU may have for elements; reals are f32.
pub trait GpuElem: Element + Pod {
    const REAL: Real;
    fn of(value: f32) -> Self;
    fn value(self) -> f32;
}

impl GpuElem for f32 {
    const REAL: Real = Real::F32;

    fn of(value: f32) -> Self {
        value
    }

    fn value(self) -> f32 {
        self
    }
}

impl GpuElem for bf16 {
    const REAL: Real = Real::Bf16;

    fn of(value: f32) -> Self {
        bf16::from_f32(value)
    }

    fn value(self) -> f32 {
        self.to_f32()
    }
}

/// Numbers in a GPU's memory.
#[derive(Debug)]
pub struct GpuBuf {
    pub(super) block: Block,
    pub(super) len: usize,
    /// What they are stored as.
    pub(super) real: Real,
    pub(super) is_wide: bool,
}

impl Buffer for GpuBuf {
    fn len(&self) -> usize {
        self.len
    }

    fn is_wide(&self) -> bool {
        self.is_wide
    }
}

impl GpuBuf {
    /// Where `len` numbers from `start` on lie.
    pub(super) fn at(&self, start: usize, len: usize) -> At {
        assert!(start + len <= self.len, "{len} numbers from {start} on, of {}", self.len);
        self.block.address() + start as u64 * self.real.bytes()
    }

    pub(super) fn all(&self) -> At {
        self.at(0, self.len)
    }
}

/// A buffer, where a kernel wants elements.
pub(super) fn elems<E: GpuElem>(buf: &GpuBuf) -> &GpuBuf {
    assert_eq!(buf.real, E::REAL, "{buf:?} where a kernel wants elements");
    buf
}

/// A buffer, where a kernel wants reals.
pub(super) fn reals(buf: &GpuBuf) -> &GpuBuf {
    assert_eq!(buf.real, Real::F32, "{buf:?} where a kernel wants reals");
    buf
}
