//! A box inside a buffer, as runs of bytes at regular distances.
//!
//! A shard's box lies in memory row by row. A smaller box inside it is a run of bytes, repeated with a stride for every
//! dim in which it is narrower than what holds it:
//!
//! ```text
//! held [0:4, 0:6]        . . . . . .        region [1:3, 2:5]     run    3 elements
//!                        . . x x x .                              outer  2 times, 6 elements apart
//!                        . . x x x .
//!                        . . . . . .
//! ```
//!
//! Dims that the box fills merge into the run, so a contiguous box is one run. The runs, in order, are the box in
//! row-major order: the byte stream that a transfer of it is.

use std::ops::Range;
use std::sync::Arc;

use crossmesh_core::layout::MAX_DIMS;
use crossmesh_core::region::Region;

/// Where the bytes of a box are, in the order they travel. Programs have one or two for every op, so it is small.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View {
    base: u64,
    run: u64,
    /// None for a single run.
    outer: Option<Arc<[Outer]>>,
}

/// A dim that is not part of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Outer {
    pub count: u64,
    pub stride: u64,
}

impl View {
    /// No bytes at all.
    pub fn empty() -> Self {
        Self { base: 0, run: 0, outer: None }
    }

    /// The `region` of what `held` keeps at `base`, row-major, in elements of `element_bytes`.
    pub fn of_box(base: u64, held: &Region, region: &Region, element_bytes: u64) -> Option<Self> {
        Self::of_tile(base, held, None, region, element_bytes)
    }

    /// The same where a dim's elements are so many bytes apart; without strides, row-major.
    pub fn of_tile(
        base: u64,
        held: &Region,
        strides: Option<&[u64]>,
        region: &Region,
        element_bytes: u64,
    ) -> Option<Self> {
        if region.is_empty() {
            return Some(Self::empty());
        }
        if !held.contains(region) {
            return None;
        }
        let mut view = Self { base, run: element_bytes, ..Self::empty() };
        let mut row_major = element_bytes;
        let mut minor_first = vec![];
        for (dim, (have, want)) in held.spans().iter().zip(region.spans()).enumerate().rev() {
            let stride = strides.map_or(row_major, |strides| strides[dim]);
            view.base += (want.start - have.start) * stride;
            if view.run == stride && minor_first.is_empty() {
                view.run *= want.len();
            } else if want.len() > 1 {
                minor_first.push(Outer { count: want.len(), stride });
            }
            row_major *= have.len();
        }
        minor_first.reverse();
        view.outer = (!minor_first.is_empty()).then(|| minor_first.into());
        Some(view)
    }

    /// A view from its parts, as they come off the wire. None if it is not one, or does not fit into `memory_bytes`.
    pub fn from_parts(base: u64, run: u64, outer: &[Outer], memory_bytes: u64) -> Option<Self> {
        if outer.len() > MAX_DIMS {
            return None;
        }
        let mut end = base.checked_add(run)?;
        let mut bytes = run;
        for o in outer {
            end = end.checked_add(o.stride.checked_mul(o.count.checked_sub(1)?)?)?;
            bytes = bytes.checked_mul(o.count)?;
        }
        if end > memory_bytes {
            return None;
        }
        Some(Self { base, run, outer: (!outer.is_empty()).then(|| outer.into()) })
    }

    pub fn base(&self) -> u64 {
        self.base
    }

    pub fn run_bytes(&self) -> u64 {
        self.run
    }

    /// Major first.
    pub fn outer(&self) -> &[Outer] {
        self.outer.as_deref().unwrap_or_default()
    }

    pub fn bytes(&self) -> u64 {
        self.run * self.outer().iter().map(|o| o.count).product::<u64>()
    }

    /// The byte after its last one.
    pub fn end(&self) -> u64 {
        self.base + self.run + self.outer().iter().map(|o| o.stride * (o.count - 1)).sum::<u64>()
    }

    /// The runs of a part of the stream: where each starts, and its length.
    pub fn runs(&self, part: Range<u64>) -> Runs<'_> {
        debug_assert!(part.end <= self.bytes());
        let left = part.end.saturating_sub(part.start);
        let mut runs = Runs { view: self, digits: [0; MAX_DIMS], at: self.base, within: 0, left };
        if left > 0 {
            runs.seek(part.start);
        }
        runs
    }
}

/// See [`View::runs`].
#[derive(Debug, Clone)]
pub struct Runs<'a> {
    view: &'a View,
    /// The place of the current run in each outer dim.
    digits: [u64; MAX_DIMS],
    at: u64,
    /// How much of the current run is already behind.
    within: u64,
    left: u64,
}

impl Runs<'_> {
    fn seek(&mut self, offset: u64) {
        let mut index = offset / self.view.run;
        self.within = offset % self.view.run;
        for (digit, outer) in self.digits.iter_mut().zip(self.view.outer()).rev() {
            *digit = index % outer.count;
            index /= outer.count;
            self.at += *digit * outer.stride;
        }
    }

    /// On to the next run, like an odometer.
    fn advance(&mut self) {
        for (digit, outer) in self.digits.iter_mut().zip(self.view.outer()).rev() {
            *digit += 1;
            self.at += outer.stride;
            if *digit < outer.count {
                return;
            }
            self.at -= outer.stride * outer.count;
            *digit = 0;
        }
    }
}

impl Iterator for Runs<'_> {
    type Item = (u64, u64);

    fn next(&mut self) -> Option<(u64, u64)> {
        if self.left == 0 {
            return None;
        }
        let len = (self.view.run - self.within).min(self.left);
        let run = (self.at + self.within, len);
        self.left -= len;
        self.within = 0;
        self.advance();
        Some(run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossmesh_core::region::Span;
    use crossmesh_testkit::replay::elements;
    use proptest::prelude::*;

    /// A box with a smaller one inside, up to 4 dims.
    fn arb_boxes() -> impl Strategy<Value = (Region, Region)> {
        let dim = (0u64..3, 1u64..6, 0u64..6, 0u64..6).prop_map(|(start, len, a, b)| {
            let (a, b) = (a.min(b).min(len), a.max(b).min(len));
            (Span::new(start, start + len), Span::new(start + a, start + b))
        });
        prop::collection::vec(dim, 0..5).prop_map(|dims| {
            let (held, wanted): (Vec<Span>, Vec<Span>) = dims.into_iter().unzip();
            (Region::new(held), Region::new(wanted))
        })
    }

    /// The address of every byte of the region, element by element.
    fn addresses(held: &Region, region: &Region, base: u64, element_bytes: u64) -> Vec<u64> {
        let mut out = vec![];
        for element in elements(region) {
            let index =
                held.spans().iter().zip(&element).fold(0, |at, (span, x)| at * span.len() + (x - span.start));
            out.extend((0..element_bytes).map(|byte| base + index * element_bytes + byte));
        }
        out
    }

    proptest! {
        #[test]
        fn runs_are_the_elements_in_order(
            (held, region) in arb_boxes(),
            base in 0u64..100,
            element_bytes in prop::sample::select(vec![1u64, 2, 4, 8]),
            cut in (0.0..1.0f64, 0.0..1.0f64),
        ) {
            let slow = addresses(&held, &region, base, element_bytes);
            let view = View::of_box(base, &held, &region, element_bytes).unwrap();
            prop_assert_eq!(view.bytes(), slow.len() as u64);
            if let Some(last) = slow.last() {
                prop_assert_eq!(view.end(), last + 1);
            }
            let at = |fraction: f64| (slow.len() as f64 * fraction) as u64;
            let (start, end) = (at(cut.0.min(cut.1)), at(cut.0.max(cut.1)));
            for part in [0..slow.len() as u64, start..end] {
                let fast: Vec<u64> = view.runs(part.clone()).flat_map(|(at, len)| at..at + len).collect();
                prop_assert_eq!(&fast, &slow[part.start as usize..part.end as usize]);
            }
            let parts = View::from_parts(view.base(), view.run_bytes(), view.outer(), view.end());
            prop_assert_eq!(parts, Some(view.clone()));
            if !slow.is_empty() {
                let parts = View::from_parts(view.base(), view.run_bytes(), view.outer(), view.end() - 1);
                prop_assert_eq!(parts, None);
            }
        }
    }

    #[test]
    fn a_whole_box_is_one_run() {
        let held = Region::whole(&[4, 3, 2]);
        let rows = held.with_span(0, Span::new(1, 3));
        let view = View::of_box(100, &held, &rows, 4).unwrap();
        assert_eq!(view.runs(0..view.bytes()).collect::<Vec<_>>(), [(124, 48)]);
    }

    #[test]
    fn refuses_a_box_that_sticks_out() {
        let held = Region::whole(&[4]);
        assert_eq!(View::of_box(0, &held, &Region::whole(&[5]), 4), None);
    }
}
