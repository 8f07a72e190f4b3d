//! Layers: forward, B and W as separate calls.
//!
//! A layer knows sizes and where its weights lie; it holds no tensors. What a later pass will need goes into [`Saved`], under a name, and
//! [`Elements`] says beforehand how much that is. Tensor parallelism is inside the composite layers ([`attention`], [`mlp`], ..), as
//! Megatron does it: a column-parallel product, something done to its columns alone, a row-parallel product, and a sum over the
//! group ([`region`]).

pub mod attention;
pub mod branch;
pub mod conv;
pub mod linear;
pub mod mlp;
pub mod norm;
pub mod region;

use std::collections::BTreeMap;

use crate::group::Group;
use crate::kernels::random::Stream;
use crate::kernels::{BufSlice, Buffer, Dropout, Kernels};
use crate::stage::{Microbatch, Recompute};

/// Whether a pass learns or only looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Train,
    Evaluate,
}

/// Everything around a layer's pass.
pub struct Ctx<'a, K: Kernels> {
    pub kernels: &'a K,
    /// The ranks along `tp`.
    pub tp: &'a dyn Group<K::Buf>,
    /// The flat buffer of parameters.
    pub params: &'a K::Buf,
    pub microbatch: Microbatch,
    /// The place in the step's batch of this rank's first sample.
    pub first_sample: u64,
    pub seed: u64,
    pub mode: Mode,
    pub recompute: Recompute,
}

impl<'a, K: Kernels> Ctx<'a, K> {
    pub fn weight(&self, start: usize) -> BufSlice<'a, K::Buf> {
        BufSlice { buf: self.params, start }
    }

    /// A mask for rows of `cols` elements, of which the first is row `row` of this rank's samples; none where nothing is dropped.
    pub fn dropout(&self, site: Site, row: u64, cols: usize) -> Option<Dropout> {
        let stream = Stream::new(self.seed, self.microbatch.step, site.id);
        let row = self.first_sample * site.rows as u64 + row;
        self.dropping(site.rate).then_some(Dropout { rate: site.rate, stream, first: row * cols as u64 })
    }

    pub fn dropping(&self, rate: f64) -> bool {
        self.mode == Mode::Train && rate > 0.0
    }
}

/// A place in a model where elements are dropped.
#[derive(Debug, Clone, Copy)]
pub struct Site {
    /// Unique in the model.
    pub id: u32,
    pub rate: f64,
    /// Rows of a sample.
    pub rows: usize,
}

/// What a layer remembers of a microbatch, by name.
#[derive(Debug)]
pub struct Saved<B> {
    bufs: BTreeMap<&'static str, B>,
    ids: BTreeMap<&'static str, Vec<i32>>,
    parts: BTreeMap<&'static str, Saved<B>>,
}

impl<B> Default for Saved<B> {
    fn default() -> Self {
        Self { bufs: BTreeMap::new(), ids: BTreeMap::new(), parts: BTreeMap::new() }
    }
}

impl<B: Buffer> Saved<B> {
    pub fn put(&mut self, name: &'static str, buf: B) {
        let old = self.bufs.insert(name, buf);
        assert!(old.is_none(), "`{name}` was saved twice");
    }

    pub fn get(&self, name: &'static str) -> &B {
        self.bufs.get(name).unwrap_or_else(|| panic!("no `{name}` was saved"))
    }

    pub fn take(&mut self, name: &'static str) -> B {
        self.bufs.remove(name).unwrap_or_else(|| panic!("no `{name}` was saved"))
    }

    pub fn put_ids(&mut self, name: &'static str, ids: Vec<i32>) {
        self.ids.insert(name, ids);
    }

    pub fn ids(&self, name: &'static str) -> &[i32] {
        self.ids.get(name).unwrap_or_else(|| panic!("no `{name}` was saved"))
    }

    pub fn take_ids(&mut self, name: &'static str) -> Vec<i32> {
        self.ids.remove(name).unwrap_or_else(|| panic!("no `{name}` was saved"))
    }

    /// What a layer within this one remembers.
    pub fn part(&mut self, name: &'static str) -> &mut Saved<B> {
        self.parts.entry(name).or_default()
    }

    /// Calls `f` with everything in it, always in the same order.
    pub fn each_mut(&mut self, f: &mut dyn FnMut(Item<'_, B>)) {
        self.bufs.values_mut().for_each(|buf| f(Item::Real(buf)));
        self.ids.values_mut().for_each(|ids| f(Item::Ids(ids)));
        self.parts.values_mut().for_each(|part| part.each_mut(f));
    }

    pub fn elements(&self) -> Elements {
        let own = Elements {
            real: self.bufs.values().map(Buffer::len).sum(),
            ids: self.ids.values().map(Vec::len).sum(),
        };
        self.parts.values().fold(own, |sum, part| sum + part.elements())
    }
}

/// Something remembered.
#[derive(Debug)]
pub enum Item<'a, B> {
    Real(&'a mut B),
    Ids(&'a mut Vec<i32>),
}

/// How much is remembered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Elements {
    pub real: usize,
    pub ids: usize,
}

impl Elements {
    pub fn real(real: usize) -> Self {
        Self { real, ids: 0 }
    }

    pub fn bytes(self, real_bytes: u64) -> u64 {
        self.real as u64 * real_bytes + self.ids as u64 * 4
    }
}

impl std::ops::Add for Elements {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { real: self.real + other.real, ids: self.ids + other.ids }
    }
}

impl std::iter::Sum for Elements {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::default(), |a, b| a + b)
    }
}

/// What a layer remembers between its passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Remembered {
    pub after_forward: Elements,
    pub after_backward_input: Elements,
}

impl std::ops::Add for Remembered {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            after_forward: self.after_forward + other.after_forward,
            after_backward_input: self.after_backward_input + other.after_backward_input,
        }
    }
}

impl std::iter::Sum for Remembered {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::default(), |a, b| a + b)
    }
}
