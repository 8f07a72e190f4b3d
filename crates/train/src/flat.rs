//! A stage's weights and their gradients, as its passes see them: all in one flat buffer, or those of one unit at a time.
//!
//! Ops name a weight by its place in the flat buffer of all weights. Whether all of that buffer is there, or only what the unit under way
//! needs was fetched from other ranks, is the business of whoever holds it: [`Weights`] for F and B, [`Gradients`] for W.

use std::ops::Range;

use crate::kernels::{BufSlice, Buffer, PartMut};
use crate::stage::StageError;

/// Some of a flat buffer, in a buffer of its own.
#[derive(Debug)]
pub struct Part<B> {
    pub range: Range<usize>,
    pub buf: B,
}

/// A flat buffer, or the parts of it that are there.
#[derive(Debug)]
pub enum Flat<'a, B> {
    Whole(&'a B),
    Parts(&'a [Part<B>]),
}

impl<B> Clone for Flat<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for Flat<'_, B> {}

impl<'a, B> Flat<'a, B> {
    /// The weight that begins there.
    pub fn at(self, start: usize) -> BufSlice<'a, B> {
        match self {
            Flat::Whole(buf) => BufSlice { buf, start },
            Flat::Parts(parts) => {
                let Part { range, buf } = &parts[part_with(parts, start)];
                BufSlice { buf, start: start - range.start }
            }
        }
    }
}

/// The same, to write to.
#[derive(Debug)]
pub enum FlatMut<'a, B> {
    Whole(&'a mut B),
    Parts(&'a mut [Part<B>]),
}

impl<B> FlatMut<'_, B> {
    /// The gradient of the weight that begins there.
    pub fn at(&mut self, start: usize) -> PartMut<'_, B> {
        match self {
            FlatMut::Whole(buf) => PartMut { buf, start },
            FlatMut::Parts(parts) => {
                let Part { range, buf } = &mut parts[part_with(parts, start)];
                PartMut { start: start - range.start, buf }
            }
        }
    }
}

/// A weight without elements may begin where a part ends.
fn part_with<B>(parts: &[Part<B>], start: usize) -> usize {
    let found = parts.iter().position(|p| p.range.contains(&start));
    let found = found.or_else(|| parts.iter().position(|p| p.range.end == start));
    found.unwrap_or_else(|| panic!("the weight at {start} is not there"))
}

/// Which weights a stage's units use.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Buckets {
    /// Where the weights begin that are each unit's own; and where the last ones end.
    pub starts: Vec<usize>,
    /// By unit: weights of an earlier one that it uses too (tied ones).
    pub borrowed: Vec<Vec<Range<usize>>>,
}

impl Buckets {
    /// A unit's own.
    pub fn own(&self, unit: usize) -> Range<usize> {
        self.starts[unit]..self.starts[unit + 1]
    }

    /// All that it uses.
    pub fn ranges(&self, unit: usize) -> Vec<Range<usize>> {
        std::iter::once(self.own(unit)).chain(self.borrowed[unit].iter().cloned()).collect()
    }
}

/// Where F and B find a stage's weights.
pub trait Weights<B> {
    /// Those of a unit, until the next are fetched. `next` is the unit whose pass follows: its weights may be on their way meanwhile.
    fn fetch(&mut self, unit: usize, next: Option<usize>) -> Result<Flat<'_, B>, StageError>;

    /// The pass is over.
    fn done(&mut self) {}
}

/// Where W leaves the gradients of a stage's weights.
pub trait Gradients<B> {
    /// To be added to, by a unit.
    fn open(&mut self, unit: usize) -> FlatMut<'_, B>;

    /// The pass adds nothing more to the unit's own.
    fn close(&mut self, unit: usize) -> Result<(), StageError>;
}

/// All weights are there.
impl<B: Buffer> Weights<B> for &B {
    fn fetch(&mut self, _: usize, _: Option<usize>) -> Result<Flat<'_, B>, StageError> {
        Ok(Flat::Whole(self))
    }
}

/// There is room for all gradients.
impl<B: Buffer> Gradients<B> for &mut B {
    fn open(&mut self, _: usize) -> FlatMut<'_, B> {
        FlatMut::Whole(self)
    }

    fn close(&mut self, _: usize) -> Result<(), StageError> {
        Ok(())
    }
}
