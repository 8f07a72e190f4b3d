//! Kernels: what a device has to be able to do so that every model here runs on it.
//!
//! [`Kernels`] is the one trait between models and hardware. Models are written against it alone: they hold buffers they
//! cannot look into, name sizes, and call. [`cpu::Cpu`] is the implementation for the host; another device brings its own
//! buffers and its own loops, and no other definition of a model.
//!
//! Every kernel that has a gradient has it as a call of its own, and gradients with respect to inputs (for the pass B) are
//! apart from those with respect to weights (for the pass W).
//!
//! There are two kinds of numbers. Activations and weights are *elements*; what adds up many of them is *real*: gradients of weights,
//! statistics of norms and softmaxes, an optimizer's numbers. Both may be the same; where elements are narrower (bf16 beside f32) a
//! kernel computes in reals and rounds what it writes as elements once. A buffer knows which kind it holds:
//!
//! ```text
//! elements   x, y, dx, dy, weights, tables, logits and exponentials          Kernels::buffer
//! reals      stats, lse, row maxima and sums, gradients of weights, moments    Kernels::wide
//! ```

pub mod battery;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod random;
pub mod scalar;

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::fmt::Debug;
use std::ops::Range;

use crossmesh_comm::collectives::Element;
use random::Stream;
use scalar::Scalar;

/// Numbers in a device's memory.
pub trait Buffer: Send + Sync + Debug + 'static {
    /// Elements.
    fn len(&self) -> usize;

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether it holds reals, not elements.
    fn is_wide(&self) -> bool;
}

/// What a device could not do.
pub type DeviceError = Box<dyn std::error::Error + Send + Sync>;

/// A buffer from an element on: a weight in the flat buffer of all weights, say.
#[derive(Debug)]
pub struct BufSlice<'a, B> {
    pub buf: &'a B,
    pub start: usize,
}

impl<B> Clone for BufSlice<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for BufSlice<'_, B> {}

impl<'a, B> From<&'a B> for BufSlice<'a, B> {
    fn from(buf: &'a B) -> Self {
        Self { buf, start: 0 }
    }
}

/// A buffer from an element on, to write to.
#[derive(Debug)]
pub struct PartMut<'a, B> {
    pub buf: &'a mut B,
    pub start: usize,
}

impl<'a, B> From<&'a mut B> for PartMut<'a, B> {
    fn from(buf: &'a mut B) -> Self {
        Self { buf, start: 0 }
    }
}

/// Whether an operand of a product is used as it lies in memory, row-major, or transposed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    Plain,
    Transposed,
}

/// `c[m,n] = alpha * a[m,k] * b[k,n] + beta * c + bias[n]`. A transposed operand lies in memory as `[k,m]` or `[n,k]`.
#[derive(Debug, Clone, Copy)]
pub struct Gemm<T> {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: Order,
    pub b: Order,
    pub alpha: T,
    /// At zero what was in `c` is not read.
    pub beta: T,
}

impl<T: Scalar> Gemm<T> {
    /// `c = a b`, both as they lie.
    pub fn new(m: usize, n: usize, k: usize) -> Self {
        Self { m, n, k, a: Order::Plain, b: Order::Plain, alpha: T::ONE, beta: T::ZERO }
    }

    /// `a` lies as `[k,m]`.
    pub fn a_transposed(self) -> Self {
        Self { a: Order::Transposed, ..self }
    }

    /// `b` lies as `[n,k]`.
    pub fn b_transposed(self) -> Self {
        Self { b: Order::Transposed, ..self }
    }

    /// Adds to what is there.
    pub fn added(self) -> Self {
        Self { beta: T::ONE, ..self }
    }
}

/// A row-major matrix's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    pub rows: usize,
    pub cols: usize,
}

impl Rows {
    pub fn len(self) -> usize {
        self.rows * self.cols
    }

    pub fn is_empty(self) -> bool {
        self.len() == 0
    }
}

/// Which elements are dropped: element `i` of a buffer is element `first + i` of the whole model's tensor, and it is that
/// number that decides.
#[derive(Debug, Clone, Copy)]
pub struct Dropout {
    /// The share that is dropped; what stays is scaled by 1 / (1 - rate).
    pub rate: f64,
    pub stream: Stream,
    pub first: u64,
}

/// An element-wise activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// GPT-2's: the form with tanh.
    Gelu,
    Silu,
}

/// Images `[samples, pixels, channels]`, normalised over the pixels and the channels of each group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupNorm {
    pub samples: usize,
    pub pixels: usize,
    pub channels: usize,
    pub groups: usize,
}

/// Attention's sizes. Heads attend each on their own; queries and keys are rows of `heads * head_dim`.
#[derive(Debug, Clone, Copy)]
pub struct Attention {
    pub samples: usize,
    pub heads: usize,
    /// Heads of keys and values: each is asked by as many heads of queries, in order.
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Queries of a sample.
    pub queries: usize,
    /// Keys of a sample.
    pub keys: usize,
    /// The last query sees all keys, and each one before it a key less.
    pub causal: bool,
    pub dropout: Option<AttentionDropout>,
}

/// Dropped attention: sample and head count in the whole model's tensor `[samples, heads, queries, keys]`.
#[derive(Debug, Clone, Copy)]
pub struct AttentionDropout {
    pub rate: f64,
    pub stream: Stream,
    pub first_sample: u64,
    pub first_head: u64,
    pub all_heads: u64,
}

/// Where queries, keys and values lie.
#[derive(Debug)]
pub enum Projected<'a, B> {
    /// Rows of queries, keys and values, one behind the other, as one fused projection writes them.
    Fused(&'a B),
    /// Queries on their own; rows of keys and values.
    Apart { q: &'a B, kv: &'a B },
    /// Each on its own.
    Three { q: &'a B, k: &'a B, v: &'a B },
}

/// Where their gradients go.
#[derive(Debug)]
pub enum ProjectedMut<'a, B> {
    Fused(&'a mut B),
    Apart { q: &'a mut B, kv: &'a mut B },
    Three { q: &'a mut B, k: &'a mut B, v: &'a mut B },
}

/// Rotary positions: for every position of a sample, cosines and sines for half of a head's columns, `[positions, head_dim / 2]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Rotary {
    pub head_dim: usize,
    pub positions: usize,
    pub cosines: Vec<f64>,
    pub sines: Vec<f64>,
}

/// A softmax over classes of which this rank holds a range.
#[derive(Debug, Clone)]
pub struct Classes<'a> {
    pub rows: usize,
    /// The classes that are columns here.
    pub held: Range<usize>,
    /// The class each row should have, among all.
    pub targets: &'a [i32],
}

impl Classes<'_> {
    pub fn size(&self) -> Rows {
        Rows { rows: self.rows, cols: self.held.len() }
    }
}

/// Rows picked from a table of which this rank holds a range.
#[derive(Debug, Clone)]
pub struct Lookup<'a> {
    pub ids: &'a [i32],
    /// The rows of the whole table that are here; another's row reads as zero.
    pub held: Range<usize>,
    pub cols: usize,
}

/// A convolution over images `[samples, height, width, channels]` with a square kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conv {
    pub samples: usize,
    pub height: usize,
    pub width: usize,
    pub channels: usize,
    pub kernel: usize,
    pub stride: usize,
    pub padding: usize,
}

impl Conv {
    pub fn out_height(&self) -> usize {
        (self.height + 2 * self.padding - self.kernel) / self.stride + 1
    }

    pub fn out_width(&self) -> usize {
        (self.width + 2 * self.padding - self.kernel) / self.stride + 1
    }

    /// The matrix whose rows are the patches under the kernel: one per pixel of the result.
    pub fn patches(&self) -> Rows {
        Rows {
            rows: self.samples * self.out_height() * self.out_width(),
            cols: self.kernel * self.kernel * self.channels,
        }
    }
}

/// Images `[samples, height, width, channels]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Images {
    pub samples: usize,
    pub height: usize,
    pub width: usize,
    pub channels: usize,
}

impl Images {
    pub fn len(self) -> usize {
        self.samples * self.height * self.width * self.channels
    }

    pub fn is_empty(self) -> bool {
        self.len() == 0
    }
}

/// One step of AdamW, as numbers.
#[derive(Debug, Clone, Copy)]
pub struct AdamW {
    pub learning_rate: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub epsilon: f64,
    pub weight_decay: f64,
    /// Steps done before this one.
    pub step: u64,
    /// Gradients count this much (clipping).
    pub grad_scale: f64,
}

/// One step of SGD with momentum, as numbers.
#[derive(Debug, Clone, Copy)]
pub struct Sgd {
    pub learning_rate: f64,
    pub momentum: f64,
    pub weight_decay: f64,
    pub grad_scale: f64,
}

/// A device. Sizes are checked by assertion: they come from a model's own arithmetic, never from input.
pub trait Kernels: Send + Sync + 'static {
    type Real: Scalar;
    /// [`Kernels::Real`], or narrower.
    type Elem: Element + bytemuck::Pod;
    type Buf: Buffer;

    /// Whether elements are narrower than reals: then weights have masters, which are reals.
    const IS_MIXED: bool;

    // Memory.

    /// A buffer of elements, with unspecified contents.
    fn buffer(&self, len: usize) -> Self::Buf;
    /// A buffer of reals, with unspecified contents.
    fn wide(&self, len: usize) -> Self::Buf;
    /// Elements, rounded.
    fn upload(&self, values: &[Self::Real]) -> Self::Buf;
    /// What is in a buffer of either kind.
    fn download(&self, buf: &Self::Buf) -> Vec<Self::Real>;
    /// A buffer's elements, on the host: where they are already, nothing is copied.
    fn elems<'a>(&self, from: BufSlice<'a, Self::Buf>, len: usize) -> Cow<'a, [Self::Elem]>;
    /// A buffer's reals, on the host.
    fn reals<'a>(&self, from: BufSlice<'a, Self::Buf>, len: usize) -> Cow<'a, [Self::Real]>;
    fn put_elems(&self, from: &[Self::Elem], to: PartMut<'_, Self::Buf>);
    fn put_reals(&self, from: &[Self::Real], to: PartMut<'_, Self::Buf>);
    /// Copies `len` numbers, from one kind to the other too.
    fn copy(&self, from: BufSlice<'_, Self::Buf>, to: PartMut<'_, Self::Buf>, len: usize);
    fn fill(&self, value: Self::Real, to: PartMut<'_, Self::Buf>, len: usize);

    /// A second buffer with the same in it.
    fn clone_of(&self, buf: &Self::Buf) -> Self::Buf {
        let mut second = if buf.is_wide() { self.wide(buf.len()) } else { self.buffer(buf.len()) };
        self.copy(buf.into(), (&mut second).into(), buf.len());
        second
    }

    /// Waits until everything that was asked for is done. The first call that failed says why: those behind it did nothing.
    fn finish(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    // Products and sums.

    /// `c` may be of either kind.
    fn gemm(
        &self,
        gemm: Gemm<Self::Real>,
        a: BufSlice<'_, Self::Buf>,
        b: BufSlice<'_, Self::Buf>,
        bias: Option<BufSlice<'_, Self::Buf>>,
        c: PartMut<'_, Self::Buf>,
    );
    /// `y[len] += x`; both of one kind.
    fn add(&self, x: BufSlice<'_, Self::Buf>, y: PartMut<'_, Self::Buf>, len: usize);
    /// `sums[cols] += ` the sum of the rows of `x`; sums are reals.
    fn sum_rows(&self, size: Rows, x: &Self::Buf, sums: PartMut<'_, Self::Buf>);
    /// `y = x + dropped(branch + bias)`.
    fn residual(&self, size: Rows, x: &Self::Buf, branch: Branch<'_, Self::Buf>, y: &mut Self::Buf);
    /// `y = dropped(x)`; a mask is its own gradient.
    fn dropout(&self, dropout: &Dropout, x: &Self::Buf, y: &mut Self::Buf);

    // Element by element.

    fn activate(&self, activation: Activation, x: &Self::Buf, y: &mut Self::Buf);
    /// `dy *= activation'(x)`.
    fn activate_grad(&self, activation: Activation, x: &Self::Buf, dy: &mut Self::Buf);
    /// `y = activation(gate) up`.
    fn gate(&self, activation: Activation, gate: &Self::Buf, up: &Self::Buf, y: &mut Self::Buf);
    /// From `dy`, the gradients of both: that of `up` in its place.
    fn gate_grad(
        &self,
        activation: Activation,
        gate: &Self::Buf,
        up: &Self::Buf,
        dy: &mut Self::Buf,
        d_gate: &mut Self::Buf,
    );

    // Norms. `stats` holds mean and 1/deviation of every row (or sample and group); weights are gamma and beta.

    fn layer_norm(
        &self,
        size: Rows,
        x: &Self::Buf,
        weights: NormWeights<'_, Self::Buf>,
        out: Normed<'_, Self::Buf>,
    );
    /// `dx = residual + gradient`; `sums` becomes the gradients of gamma and beta, `[2, cols]`.
    fn layer_norm_grad(
        &self,
        size: Rows,
        saved: NormSaved<'_, Self::Buf>,
        dy: &Self::Buf,
        out: NormGrad<'_, Self::Buf>,
    );
    fn group_norm(
        &self,
        size: GroupNorm,
        x: &Self::Buf,
        weights: NormWeights<'_, Self::Buf>,
        out: Normed<'_, Self::Buf>,
    );
    fn group_norm_grad(
        &self,
        size: GroupNorm,
        saved: NormSaved<'_, Self::Buf>,
        dy: &Self::Buf,
        out: NormGrad<'_, Self::Buf>,
    );

    /// `y = x / sqrt(mean(x²) + epsilon) gamma`; `stats` has the factor of every row.
    fn rms_norm(
        &self,
        size: Rows,
        x: &Self::Buf,
        gamma: BufSlice<'_, Self::Buf>,
        epsilon: f64,
        out: Normed<'_, Self::Buf>,
    );
    /// `dx = residual + gradient`; `sums` becomes the gradient of gamma, `[cols]`.
    fn rms_norm_grad(
        &self,
        size: Rows,
        saved: NormSaved<'_, Self::Buf>,
        dy: &Self::Buf,
        out: NormGrad<'_, Self::Buf>,
    );

    // Tables.

    /// `y[i] = table[ids[i]]`, or adds it; rows held elsewhere read as zero.
    fn lookup(&self, lookup: &Lookup<'_>, table: BufSlice<'_, Self::Buf>, add: bool, y: &mut Self::Buf);
    /// `table[ids[i]] += dy[i]`, in the order of the rows.
    fn lookup_grad(&self, lookup: &Lookup<'_>, dy: &Self::Buf, table: PartMut<'_, Self::Buf>);

    // Attention. `lse` is the logarithm of the sum of exponentials of every head and query, `[samples, heads, queries]`.

    fn attention(
        &self,
        size: &Attention,
        x: Projected<'_, Self::Buf>,
        y: &mut Self::Buf,
        lse: &mut Self::Buf,
    );
    fn attention_grad(
        &self,
        size: &Attention,
        x: Projected<'_, Self::Buf>,
        saved: AttentionSaved<'_, Self::Buf>,
        dy: &Self::Buf,
        dx: ProjectedMut<'_, Self::Buf>,
    );

    /// Rotates the columns of every head by its row's position in its sample, `first` for the first row: the first half with the second, as Hugging Face
    /// transformers does; or back.
    fn rotate(&self, rotary: &Rotary, first: usize, size: Rows, back: bool, x: &mut Self::Buf);

    // Losses.

    /// The largest column of every row.
    fn row_max(&self, size: Rows, x: &Self::Buf, max: &mut Self::Buf);
    /// Turns logits into `exp(logit - max)`; `sums[0, row]` is their sum here, `sums[1, row]` the target's logit less max, or zero
    /// where the target is held elsewhere.
    fn exp_sums(&self, classes: &Classes<'_>, max: &Self::Buf, logits: &mut Self::Buf, sums: &mut Self::Buf);
    /// The sum over the rows of the cross-entropy, from sums over all ranks.
    fn cross_entropy(&self, rows: usize, sums: &Self::Buf) -> f64;
    /// Turns exponentials into the gradient of `scale` times the cross-entropy with respect to the logits.
    fn cross_entropy_grad(&self, classes: &Classes<'_>, sums: &Self::Buf, scale: f64, exps: &mut Self::Buf);
    /// The sum of squared differences.
    fn squared_error(&self, x: &Self::Buf, target: &Self::Buf) -> f64;
    /// `dx = 2 * scale * (x - target)`.
    fn squared_error_grad(&self, x: &Self::Buf, target: &Self::Buf, scale: f64, dx: &mut Self::Buf);

    // Images.

    /// The patches of `samples` starting with sample `first`.
    fn patches(&self, conv: &Conv, first: usize, x: &Self::Buf, y: &mut Self::Buf);
    /// Adds the patches' gradients to the images they came from, which are set to zero first.
    fn patches_grad(&self, conv: &Conv, first: usize, dy: &Self::Buf, dx: &mut Self::Buf);
    /// Every pixel twice in both directions.
    fn upsample(&self, from: Images, x: &Self::Buf, y: &mut Self::Buf);
    /// `dx` = the sum of the four pixels it became; a quarter of it is 2x2 average pooling.
    fn upsample_grad(&self, from: Images, dy: &Self::Buf, dx: &mut Self::Buf);
    /// `y = [a | b]`, row by row.
    fn concat(&self, a: (&Self::Buf, usize), b: (&Self::Buf, usize), y: &mut Self::Buf);
    /// `[a | b] = y`.
    fn split(&self, y: &Self::Buf, a: (&mut Self::Buf, usize), b: (&mut Self::Buf, usize));
    /// `x[sample, pixel] += e[sample]`, for samples of `pixels` rows.
    fn add_per_sample(&self, pixels: usize, size: Rows, e: &Self::Buf, x: &mut Self::Buf);
    /// `de[sample] = ` the sum of the sample's rows.
    fn add_per_sample_grad(&self, pixels: usize, size: Rows, dx: &Self::Buf, de: &mut Self::Buf);
    /// Sines and cosines of every time step, `[steps, dim]`.
    fn time_waves(&self, steps: &[i32], dim: usize, y: &mut Self::Buf);

    // Optimizers, over runs of flat buffers of reals.

    fn adamw(&self, step: &AdamW, run: Range<usize>, state: AdamWState<'_, Self::Buf>);
    fn sgd(&self, step: &Sgd, run: Range<usize>, state: SgdState<'_, Self::Buf>);
    /// The sum of squares over runs of a buffer of reals, one run behind the other.
    fn sum_squares(&self, x: &Self::Buf, runs: &[Range<usize>]) -> f64;
}

/// A branch on its way back to the trunk.
#[derive(Debug)]
pub struct Branch<'a, B> {
    pub x: &'a B,
    pub bias: Option<BufSlice<'a, B>>,
    pub dropout: Option<Dropout>,
}

/// Gamma and beta.
#[derive(Debug)]
pub struct NormWeights<'a, B> {
    pub gamma: BufSlice<'a, B>,
    pub beta: BufSlice<'a, B>,
    pub epsilon: f64,
}

/// What a norm leaves.
#[derive(Debug)]
pub struct Normed<'a, B> {
    pub y: &'a mut B,
    pub stats: &'a mut B,
}

/// What a norm's gradient needs.
#[derive(Debug)]
pub struct NormSaved<'a, B> {
    pub x: &'a B,
    pub stats: &'a B,
    pub gamma: BufSlice<'a, B>,
}

/// What a norm's gradient leaves.
#[derive(Debug)]
pub struct NormGrad<'a, B> {
    pub residual: Option<&'a B>,
    pub dx: &'a mut B,
    pub sums: &'a mut B,
}

/// What attention's gradient needs beside the projections.
#[derive(Debug)]
pub struct AttentionSaved<'a, B> {
    pub y: &'a B,
    pub lse: &'a B,
}

/// Parameters, gradients and moments, each from its own element on.
#[derive(Debug)]
pub struct AdamWState<'a, B> {
    pub params: PartMut<'a, B>,
    /// Where the parameters' elements go, rounded; none where parameters are what passes use.
    pub rounded: Option<PartMut<'a, B>>,
    pub grads: BufSlice<'a, B>,
    pub first: PartMut<'a, B>,
    pub second: PartMut<'a, B>,
}

/// Parameters, gradients and velocity.
#[derive(Debug)]
pub struct SgdState<'a, B> {
    pub params: PartMut<'a, B>,
    pub rounded: Option<PartMut<'a, B>>,
    pub grads: BufSlice<'a, B>,
    pub velocity: PartMut<'a, B>,
}
