//! A launch function for each training kernel. What they compute stands in the `.cu` files; sizes that a kernel does not take are refused here.
//!
//! Everything is queued in the order of the calls, and nothing waits. All functions are `unsafe` for the same reason: they are given addresses. Who
//! calls them says that each is memory of the card, as large as the sizes say, that nobody else touches it until the queue is done, and that
//! what is written does not overlap what is read, but where a function says that it works in place.
#![allow(clippy::missing_safety_doc, reason = "the module says it for all of them")]

use std::ffi::c_void;

use cudarc::driver::sys::{self, CUresult};

use super::Cuda;
use crate::driver::Driver;
use crate::{CudaError, DeviceMemory};

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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Norm {
    Layer,
    Rms,
}

impl Norm {
    fn name(self) -> &'static str {
        match self {
            Norm::Layer => "layer_norm",
            Norm::Rms => "rms_norm",
        }
    }

    /// How many sums by column its gradient has: of gamma, and of beta.
    pub fn sums(self) -> u32 {
        match self {
            Norm::Layer => 2,
            Norm::Rms => 1,
        }
    }
}

/// An address of the card's; 0 where there is none.
pub type At = u64;

/// What a norm reads. Without a residual, `x` is normalised; `beta` is a layer norm's alone.
#[derive(Debug, Clone, Copy)]
pub struct NormIn {
    pub x: At,
    pub residual: At,
    pub gamma: At,
    pub beta: At,
}

/// What it writes: the sum where there is a residual, and f32 statistics of every row.
#[derive(Debug, Clone, Copy)]
pub struct NormOut {
    pub sum: At,
    pub y: At,
    pub mean: At,
    pub rstd: At,
}

/// What its gradient reads: `x` is what was normalised; a residual's gradient is added to `dx`, if there is one.
#[derive(Debug, Clone, Copy)]
pub struct NormSaved {
    pub x: At,
    pub gamma: At,
    pub mean: At,
    pub rstd: At,
    pub dy: At,
    pub residual: At,
}

/// Rotary positions of rows `first..` of samples of `positions` rows; heads lie beside each other in rows `stride` elements apart.
#[derive(Debug, Clone, Copy)]
pub struct Rotary {
    /// f32, `[positions, head_dim / 2]`.
    pub cosines: At,
    pub sines: At,
    pub first: u32,
    pub positions: u32,
    pub rows: u32,
    pub heads: u32,
    pub head_dim: u32,
    pub stride: u32,
    pub back: bool,
}

/// The draws of a Philox stream: its key and the upper half of its counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Draws {
    pub key: [u32; 2],
    pub high: [u32; 2],
}

/// A table of token vectors, of which the rows `first..first + held` are here, and one of positions (or none) of `context` rows.
#[derive(Debug, Clone, Copy)]
pub struct Tables {
    pub tokens: At,
    pub positions: At,
    pub first: u32,
    pub held: u32,
    pub context: u32,
}

/// A step of AdamW, as numbers.
#[derive(Debug, Clone, Copy)]
pub struct AdamW {
    pub learning_rate: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub epsilon: f64,
    pub weight_decay: f64,
    /// Steps done before this one.
    pub step: u64,
}

/// What the kernel multiplies with.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct AdamNumbers {
    decay: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    rate: f32,
    second_scale: f32,
    epsilon: f32,
}

impl AdamNumbers {
    fn new(n: &AdamW) -> Self {
        let t = (n.step + 1) as f64;
        let (one, two) = (1.0 - n.beta1.powf(t), 1.0 - n.beta2.powf(t));
        Self {
            decay: (1.0 - n.learning_rate * n.weight_decay) as f32,
            beta1: n.beta1 as f32,
            rest1: (1.0 - n.beta1) as f32,
            beta2: n.beta2 as f32,
            rest2: (1.0 - n.beta2) as f32,
            rate: (n.learning_rate / one) as f32,
            second_scale: (1.0 / two.sqrt()) as f32,
            epsilon: n.epsilon as f32,
        }
    }
}

/// f32 masters and moments, which change in place, and the copy in bf16 that is written, if there is one.
#[derive(Debug, Clone, Copy)]
pub struct AdamState {
    pub params: At,
    pub first: At,
    pub second: At,
    pub copy: At,
}

/// The rows of a batch by the table's entries that they name: see [`sort_ids`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SortedIds {
    pub entries: Vec<u32>,
    pub starts: Vec<u32>,
    pub rows: Vec<u32>,
}

/// Sorts a batch's ids, so that gradients of a table are added up in the order of the rows. Entries count from the first that is held; ids of
/// others are left out.
pub fn sort_ids(ids: &[i32], first: u32, held: u32) -> SortedIds {
    let entry = |id: i32| u32::try_from(i64::from(id) - i64::from(first)).ok().filter(|entry| *entry < held);
    let mut pairs: Vec<(u32, u32)> =
        (0..).zip(ids).filter_map(|(row, id)| Some((entry(*id)?, row))).collect();
    pairs.sort_unstable();
    let mut sorted = SortedIds { rows: pairs.iter().map(|(_, row)| *row).collect(), ..SortedIds::default() };
    for (at, (entry, _)) in (0..).zip(&pairs) {
        if sorted.entries.last() != Some(entry) {
            sorted.entries.push(*entry);
            sorted.starts.push(at);
        }
    }
    sorted.starts.push(pairs.len() as u32);
    sorted
}

/// A stream of its own, with memory for partial sums.
#[derive(Debug)]
pub struct Queue<'a> {
    cuda: &'a Cuda,
    stream: sys::CUstream,
    partial: &'a DeviceMemory,
}

macro_rules! arguments {
    ($($value:expr),*) => { [$((&raw const $value).cast_mut().cast::<c_void>()),*] };
}

/// Threads of kernels that go element by element.
const THREADS: u32 = 256;

impl<'a> Queue<'a> {
    /// `partial` is memory for partial sums: 64 MiB is always enough.
    pub fn new(cuda: &'a Cuda, partial: &'a DeviceMemory) -> Result<Self, CudaError> {
        cuda.enter()?;
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes the stream.
        match unsafe { sys::cuStreamCreate(&raw mut stream, flags) } {
            CUresult::CUDA_SUCCESS => Ok(Self { cuda, stream, partial }),
            code => Err(cuda.failed("cuStreamCreate", code)),
        }
    }

    pub fn cuda(&self) -> &'a Cuda {
        self.cuda
    }

    pub fn stream(&self) -> sys::CUstream {
        self.stream
    }

    /// Waits for all that was queued.
    pub fn finish(&self) -> Result<(), CudaError> {
        // SAFETY: a stream of ours.
        match unsafe { sys::cuStreamSynchronize(self.stream) } {
            CUresult::CUDA_SUCCESS => Ok(()),
            code => Err(self.cuda.failed("cuStreamSynchronize", code)),
        }
    }

    unsafe fn launch(
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
        unsafe { self.cuda.launch(kernel, grid, block, self.stream, arguments) }
    }

    /// Blocks for so many elements, each thread with `each` of them, and no more than keep the card busy.
    fn blocks(&self, elements: u64, each: u64) -> u32 {
        let most = u64::from(self.cuda.card().multiprocessors) * 16;
        elements.div_ceil(u64::from(THREADS) * each).min(most) as u32
    }

    fn partial(&self, what: &'static str, bytes: u64) -> Result<At, CudaError> {
        match bytes <= self.partial.bytes() {
            true => Ok(self.partial.address()),
            false => Err(CudaError::Refused {
                what,
                found: format!("{bytes} B of partial sums"),
                needed: "no more than the queue has",
            }),
        }
    }

    /// How a row is shared out: vectors a thread, and threads; none where rows are no whole vectors, or too long.
    fn cut(real: Real, cols: u32, most: u32, addresses: &[At]) -> Option<(u32, u32)> {
        let lanes = 16 / real.bytes() as u32;
        let vectors = cols / lanes;
        let whole = cols.is_multiple_of(lanes) && addresses.iter().all(|at| at.is_multiple_of(16));
        let chunks = [1, 2, 4].into_iter().find(|chunks| vectors <= 512 * chunks)?;
        (whole && cols > 0 && chunks <= most)
            .then(|| (chunks, vectors.div_ceil(chunks).next_multiple_of(32).max(32)))
    }

    pub unsafe fn norm_forward(
        &self,
        norm: Norm,
        real: Real,
        size: Rows,
        from: NormIn,
        epsilon: f32,
        into: NormOut,
    ) -> Result<(), CudaError> {
        let all = [from.x, from.residual, from.gamma, from.beta, into.sum, into.y];
        let (how, threads) = match Self::cut(real, size.cols, 4, &all) {
            Some((chunks, threads)) => (chunks.to_string(), threads),
            None => ("any".into(), THREADS),
        };
        let name = format!("{}_forward_{how}_{}", norm.name(), real.name());
        let NormIn { x, residual, gamma, beta } = from;
        let NormOut { sum, y, mean, rstd } = into;
        let width = size.cols;
        let mut arguments = arguments![x, residual, gamma, beta, epsilon, width, sum, y, mean, rstd];
        // SAFETY: the module's.
        unsafe { self.launch(("norm", &name), (size.rows, 1), (threads, 0), &mut arguments) }
    }

    /// `dx = residual + gradient`; `sums`, f32 `[1 or 2, cols]`, are the gradients of gamma and beta, or are added to.
    pub unsafe fn norm_backward(
        &self,
        norm: Norm,
        real: Real,
        size: Rows,
        saved: NormSaved,
        dx: At,
        (sums, add): (At, bool),
    ) -> Result<(), CudaError> {
        let NormSaved { x, gamma, mean, rstd, dy, residual } = saved;
        let cut = Self::cut(real, size.cols, 2, &[x, gamma, dy, residual, dx]);
        let (how, threads, shared) = match cut {
            Some((chunks, threads)) => (chunks.to_string(), threads, 0),
            None => ("any".into(), THREADS, u64::from(norm.sums()) * u64::from(size.cols) * 4),
        };
        if shared > 200 << 10 {
            let found = format!("{} columns", size.cols);
            return Err(CudaError::Refused { what: "the width of a norm", found, needed: "at most 25600" });
        }
        let most = self.cuda.card().multiprocessors * (1024 / threads).max(1);
        let (strips, columns) = (size.rows.min(most), norm.sums() * size.cols);
        let partial = self.partial("a norm's gradient", u64::from(strips) * u64::from(columns) * 4)?;
        let name = format!("{}_backward_{how}_{}", norm.name(), real.name());
        let Rows { rows, cols } = size;
        let mut arguments = arguments![x, gamma, mean, rstd, dy, residual, rows, cols, dx, partial];
        // SAFETY: the module's.
        unsafe {
            self.launch(("norm", &name), (strips, 1), (threads, shared as u32), &mut arguments)?;
            self.add_strips(partial, strips, columns, add, sums)
        }
    }

    unsafe fn add_strips(
        &self,
        partial: At,
        strips: u32,
        cols: u32,
        add: bool,
        sums: At,
    ) -> Result<(), CudaError> {
        let add = u32::from(add);
        let mut arguments = arguments![partial, strips, cols, add, sums];
        // SAFETY: the module's.
        unsafe { self.launch(("columns", "add_strips"), (cols.div_ceil(32), 1), (1024, 0), &mut arguments) }
    }

    /// `sums`, f32 `[cols]`, are the sums of the rows of `x`, or are added to: the gradient of a bias.
    pub unsafe fn column_sums(
        &self,
        real: Real,
        size: Rows,
        x: At,
        (sums, add): (At, bool),
    ) -> Result<(), CudaError> {
        let lanes = 16 / real.bytes() as u32;
        let whole = size.cols.is_multiple_of(lanes) && x.is_multiple_of(16);
        let (how, wide) = if whole { ("", 32 * lanes) } else { ("_any", 32) };
        let (across, most) = (size.cols.div_ceil(wide), self.cuda.card().multiprocessors * 4);
        let strips = (most / across.max(1)).clamp(1, size.rows.div_ceil(8).max(1));
        let partial = self.partial("sums by column", u64::from(strips) * u64::from(size.cols) * 4)?;
        let name = format!("column_strips{how}_{}", real.name());
        let Rows { rows, cols } = size;
        let mut arguments = arguments![x, rows, cols, partial];
        // SAFETY: the module's.
        unsafe {
            self.launch(("columns", &name), (across, strips), (THREADS, 0), &mut arguments)?;
            self.add_strips(partial, strips, cols, add, sums)
        }
    }

    unsafe fn pointwise(
        &self,
        kernel: &str,
        real: Real,
        len: u64,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let name = format!("{kernel}_{}", real.name());
        let blocks = self.blocks(len, 16 / real.bytes());
        // SAFETY: the module's.
        unsafe { self.launch(("pointwise", &name), (blocks, 1), (THREADS, 0), arguments) }
    }

    pub unsafe fn gelu_forward(&self, real: Real, x: At, len: u64, y: At) -> Result<(), CudaError> {
        // SAFETY: the module's.
        unsafe { self.pointwise("gelu_forward", real, len, &mut arguments![x, len, y]) }
    }

    /// `dy *= gelu'(x)`.
    pub unsafe fn gelu_backward(&self, real: Real, x: At, len: u64, dy: At) -> Result<(), CudaError> {
        // SAFETY: the module's.
        unsafe { self.pointwise("gelu_backward", real, len, &mut arguments![x, len, dy]) }
    }

    /// `y = silu(gate) up`.
    pub unsafe fn swiglu_forward(
        &self,
        real: Real,
        (gate, up): (At, At),
        len: u64,
        y: At,
    ) -> Result<(), CudaError> {
        // SAFETY: the module's.
        unsafe { self.pointwise("swiglu_forward", real, len, &mut arguments![gate, up, len, y]) }
    }

    /// From `dy`, the gradients of both: that of `up` in its place.
    pub unsafe fn swiglu_backward(
        &self,
        real: Real,
        (gate, up): (At, At),
        len: u64,
        (dy, d_gate): (At, At),
    ) -> Result<(), CudaError> {
        // SAFETY: the module's.
        unsafe { self.pointwise("swiglu_backward", real, len, &mut arguments![gate, up, len, dy, d_gate]) }
    }

    /// `y += x`.
    pub unsafe fn add(&self, real: Real, x: At, len: u64, y: At) -> Result<(), CudaError> {
        // SAFETY: the module's.
        unsafe { self.pointwise("add", real, len, &mut arguments![x, len, y]) }
    }

    /// Drops a share of the elements and scales the others; element `i` here is element `first + i` of the draws. May be in place.
    pub unsafe fn dropout(
        &self,
        real: Real,
        x: At,
        (draws, first): (Draws, u64),
        rate: f64,
        len: u64,
        y: At,
    ) -> Result<(), CudaError> {
        let threshold = (rate * 4_294_967_296.0).clamp(0.0, 4_294_967_295.0) as u32;
        let scale = (1.0 / (1.0 - rate)) as f32;
        // SAFETY: the module's.
        unsafe {
            self.pointwise("dropout", real, len, &mut arguments![x, draws, first, threshold, scale, len, y])
        }
    }

    pub unsafe fn to_bf16(&self, x: At, len: u64, y: At) -> Result<(), CudaError> {
        let (blocks, mut arguments) = (self.blocks(len, 8), arguments![x, len, y]);
        // SAFETY: the module's.
        unsafe { self.launch(("pointwise", "to_bf16"), (blocks, 1), (THREADS, 0), &mut arguments) }
    }

    /// Turns the columns of every head, in place: the first half with the second.
    pub unsafe fn rotary(&self, real: Real, rotary: &Rotary, x: At) -> Result<(), CudaError> {
        let Rotary { cosines, sines, first, positions, rows, heads, head_dim, stride, back } = *rotary;
        if !head_dim.is_multiple_of(2) {
            let found = head_dim.to_string();
            return Err(CudaError::Refused { what: "a head's columns", found, needed: "an even number" });
        }
        let (half, sign) = (head_dim / 2, if back { -1.0f32 } else { 1.0 });
        // A block for every row, with a thread for every vector of it.
        let threads =
            (heads * half).div_ceil(16 / real.bytes() as u32).next_multiple_of(32).clamp(32, THREADS);
        let name = format!("rotary_{}", real.name());
        let mut arguments = arguments![cosines, sines, first, positions, heads, half, stride, sign, x];
        // SAFETY: the module's.
        unsafe { self.launch(("pointwise", &name), (rows, 1), (threads, 0), &mut arguments) }
    }

    /// Logits of rows `stride` elements apart become the gradients of `scale` times their cross-entropy, of which `loss`, f32, has every row's.
    pub unsafe fn classifier(
        &self,
        real: Real,
        size: Rows,
        (logits, stride): (At, u32),
        targets: At,
        scale: f32,
        loss: At,
    ) -> Result<(), CudaError> {
        if stride < size.cols || size.cols == 0 {
            let found = format!("{} classes in rows of {stride}", size.cols);
            return Err(CudaError::Refused {
                what: "a row of logits",
                found,
                needed: "room for every class, of which there is one",
            });
        }
        let (name, classes) = (format!("classifier_{}", real.name()), size.cols);
        let mut arguments = arguments![logits, targets, classes, stride, scale, loss];
        // SAFETY: the module's.
        unsafe { self.launch(("loss", &name), (size.rows, 1), (1024, 0), &mut arguments) }
    }

    /// `y[row] = tokens[ids[row]] + positions[row % context]`.
    pub unsafe fn embedding_forward(
        &self,
        real: Real,
        size: Rows,
        tables: &Tables,
        ids: At,
        y: At,
    ) -> Result<(), CudaError> {
        let Tables { tokens, positions, first, held, context } = *tables;
        let (name, width) = (format!("embedding_forward_{}", real.name()), size.cols);
        let mut arguments = arguments![tokens, positions, ids, first, held, context, width, y];
        // SAFETY: the module's.
        unsafe { self.launch(("embedding", &name), (size.rows, 1), (THREADS, 0), &mut arguments) }
    }

    /// Adds to an f32 table the rows of `dy`, in the order of [`sort_ids`], whose parts are on the card.
    pub unsafe fn embedding_backward(
        &self,
        real: Real,
        width: u32,
        dy: At,
        (entries, starts, rows, count): (At, At, At, u32),
        table: At,
    ) -> Result<(), CudaError> {
        let name = format!("embedding_backward_{}", real.name());
        let mut arguments = arguments![dy, entries, starts, rows, width, table];
        let grid = (count, width.div_ceil(THREADS * (16 / real.bytes() as u32)).min(64));
        // SAFETY: the module's.
        unsafe { self.launch(("embedding", &name), grid, (THREADS, 0), &mut arguments) }
    }

    /// Adds to an f32 table of positions the rows of every sample, in their order.
    pub unsafe fn positions_backward(
        &self,
        real: Real,
        size: Rows,
        context: u32,
        dy: At,
        table: At,
    ) -> Result<(), CudaError> {
        let name = format!("positions_backward_{}", real.name());
        let Rows { rows, cols } = size;
        let blocks = self.blocks(u64::from(context) * u64::from(cols), 1);
        let mut arguments = arguments![dy, rows, context, cols, table];
        // SAFETY: the module's.
        unsafe { self.launch(("embedding", &name), (blocks, 1), (THREADS, 0), &mut arguments) }
    }

    unsafe fn sums(&self, kernel: &str, x: At, len: u64, (total, add): (At, bool)) -> Result<(), CudaError> {
        let blocks = self.blocks(len, 16).max(1);
        let partial = self.partial("a sum", u64::from(blocks) * 8)?;
        let add = u32::from(add);
        // SAFETY: the module's.
        unsafe {
            self.launch(("update", kernel), (blocks, 1), (THREADS, 0), &mut arguments![x, len, partial])?;
            let mut arguments = arguments![partial, blocks, add, total];
            self.launch(("update", "add_partials"), (1, 1), (THREADS, 0), &mut arguments)
        }
    }

    /// `total`, an f64, is the sum of squares, or is added to.
    pub unsafe fn sum_squares(
        &self,
        real: Real,
        x: At,
        len: u64,
        total: (At, bool),
    ) -> Result<(), CudaError> {
        // SAFETY: the module's.
        unsafe { self.sums(&format!("sum_squares_{}", real.name()), x, len, total) }
    }

    /// `total`, an f64, is the sum of f32 numbers, or is added to: the loss of all rows.
    pub unsafe fn sum(&self, x: At, len: u64, total: (At, bool)) -> Result<(), CudaError> {
        // SAFETY: the module's.
        unsafe { self.sums("sum_f32", x, len, total) }
    }

    /// `scale`, an f32, is what brings gradients with this sum of squares (an f64) to a norm of at most `limit`.
    pub unsafe fn clip_scale(&self, squares: At, limit: f64, scale: At) -> Result<(), CudaError> {
        // SAFETY: the module's.
        unsafe {
            self.launch(("update", "clip_scale"), (1, 1), (1, 0), &mut arguments![squares, limit, scale])
        }
    }

    /// A step, with gradients of either sort; `scale` is an f32 on the card that they are multiplied with, or 0.
    pub unsafe fn adamw(
        &self,
        real: Real,
        grads: At,
        numbers: &AdamW,
        scale: At,
        len: u64,
        state: AdamState,
    ) -> Result<(), CudaError> {
        let (name, numbers) = (format!("adamw_{}", real.name()), AdamNumbers::new(numbers));
        let AdamState { params, first, second, copy } = state;
        let mut arguments = arguments![grads, numbers, scale, len, params, first, second, copy];
        // SAFETY: the module's.
        unsafe { self.launch(("update", &name), (self.blocks(len, 8), 1), (THREADS, 0), &mut arguments) }
    }
}

impl Drop for Queue<'_> {
    fn drop(&mut self) {
        // SAFETY: a stream of ours; what was queued still runs.
        let _gone = unsafe { sys::cuStreamDestroy_v2(self.stream) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_sorted_by_entry_and_then_by_row() {
        let sorted = sort_ids(&[7, 3, 7, -1, 9, 3, 2], 3, 5);
        assert_eq!(sorted.entries, [0, 4]);
        assert_eq!(sorted.starts, [0, 2, 4]);
        assert_eq!(sorted.rows, [1, 5, 0, 2]);
        assert_eq!(sort_ids(&[], 0, 5), SortedIds { starts: vec![0], ..SortedIds::default() });
    }

    #[test]
    fn rows_are_cut_into_vectors_where_they_can_be() {
        let cut = |real, cols| Queue::cut(real, cols, 4, &[0, 16]);
        assert_eq!(cut(Real::Bf16, 2048), Some((1, 256)));
        assert_eq!(cut(Real::Bf16, 2560), Some((1, 320)));
        assert_eq!(cut(Real::F32, 4096), Some((2, 512)));
        assert_eq!(cut(Real::Bf16, 24), Some((1, 32)));
        assert_eq!(cut(Real::Bf16, 12), None);
        assert_eq!(cut(Real::F32, 100_000), None);
        assert_eq!(Queue::cut(Real::F32, 4096, 1, &[]), None);
        assert_eq!(Queue::cut(Real::F32, 4096, 4, &[8]), None);
    }
}
