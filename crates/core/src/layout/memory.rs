//! Whether boxes share a place in one device's memory.
//!
//! Boxes with strides may interleave and still be apart. Two halves of a matrix that is 6 wide, left and right:
//!
//! ```text
//! [0:2, 0:3] at 0 by 6,1        0 1 2 . . .   6 7 8 . . .
//! [0:2, 3:6] at 3 by 6,1        . . . 3 4 5   . . . 9 10 11
//! ```
//!
//! An element lies at `offset + Σ stride·x`. Two boxes share a place exactly if some `Σ a·x - Σ b·y` is the difference
//! of their offsets, which is decided stride by stride, the largest first: what smaller strides can still reach leaves
//! one or two choices at each. Where all boxes have the strides of one frame, places are compared as boxes of digits.

use crate::box_index::BoxIndex;
use crate::region::{Region, Span};

use super::held::HeldBox;

/// More choices than this for one pair, and the boxes are taken to share a place: no strides in use come near.
const MAX_CHOICES: u32 = 1 << 16;

/// Whether two elements of the box may share a place: a stride must lead beyond all that smaller ones reach.
pub(super) fn folds_onto_itself(held: &HeldBox) -> bool {
    let mut reach = 0u128;
    for (stride, len) in falling_strides(held).into_iter().rev().filter(|(_, len)| *len > 1) {
        if u128::from(stride) <= reach {
            return true;
        }
        reach += u128::from(stride) * u128::from(len - 1);
    }
    false
}

/// Two boxes that share a place, as places in the list, which rises by offset.
pub(super) fn collision(boxes: &[HeldBox]) -> Option<(usize, usize)> {
    debug_assert!(boxes.is_sorted_by_key(|b| b.offset_elements));
    let mut reach = 0;
    let in_a_row = boxes.iter().all(|b| {
        let behind = b.offset_elements >= reach;
        reach = b.end_elements();
        behind
    });
    if in_a_row {
        return None;
    }
    match digits(boxes) {
        Some(places) => {
            let pair = BoxIndex::new(places.iter()).first_overlap();
            pair.map(|(first, second)| (first as usize, second as usize))
        }
        None => colliding_pair(boxes),
    }
}

/// Compares all boxes whose stretches of memory meet, pair by pair.
fn colliding_pair(boxes: &[HeldBox]) -> Option<(usize, usize)> {
    let mut open: Vec<usize> = Vec::new();
    for (i, held) in boxes.iter().enumerate() {
        open.retain(|&o| boxes[o].end_elements() > held.offset_elements);
        if let Some(&other) = open.iter().find(|&&o| share_a_place(&boxes[o], held)) {
            return Some((other, i));
        }
        open.push(i);
    }
    None
}

/// Strides and lengths, the largest stride first.
fn falling_strides(held: &HeldBox) -> Vec<(u64, u64)> {
    let lens = held.region.spans().iter().map(|s| s.len());
    let mut terms: Vec<(u64, u64)> = held.strides.iter().copied().zip(lens).collect();
    terms.sort_unstable_by(|a, b| b.cmp(a));
    terms
}

/// Every box as a box of digits: how often each stride of the common frame goes into its places, and what is left.
/// None where the boxes have no common frame, or reach over its edge.
fn digits(boxes: &[HeldBox]) -> Option<Vec<Region>> {
    let strides =
        |b: &HeldBox| falling_strides(b).into_iter().map(|(stride, _)| stride).collect::<Vec<u64>>();
    let frame = strides(boxes.first()?);
    let digits = |held: &HeldBox| {
        let terms = falling_strides(held);
        if !terms.iter().map(|t| t.0).eq(frame.iter().copied()) || frame.contains(&0) {
            return None;
        }
        let mut rest = held.offset_elements;
        let mut spans = Vec::with_capacity(terms.len() + 1);
        for (stride, len) in &terms {
            spans.push(Span::new(rest / stride, (rest / stride).checked_add(*len)?));
            rest %= stride;
        }
        // The last place of the smaller digits, which must not carry into the larger ones.
        let mut last = rest;
        for ((stride, _), span) in terms.iter().zip(&spans).rev() {
            if last >= *stride {
                return None;
            }
            last = (span.end - 1).checked_mul(*stride)?.checked_add(last)?;
        }
        spans.push(Span::new(rest, rest + 1));
        Some(Region::new(spans))
    };
    boxes.iter().map(digits).collect()
}

/// A stride of both boxes: how often it may be taken, forwards for the one and backwards for the other.
struct Term {
    stride: i128,
    least: i128,
    most: i128,
    /// What the terms behind this one can reach together, and what divides all they reach.
    rest_least: i128,
    rest_most: i128,
    rest_gcd: i128,
}

/// Whether two boxes have an element in one place, or strides that nobody can tell apart.
pub(crate) fn share_a_place(a: &HeldBox, b: &HeldBox) -> bool {
    let mut terms: Vec<Term> = Vec::new();
    let mut add = |stride: u64, least: i128, most: i128| match terms
        .iter_mut()
        .find(|t| t.stride == stride.into())
    {
        Some(term) => (term.least, term.most) = (term.least + least, term.most + most),
        None => {
            terms.push(Term { stride: stride.into(), least, most, rest_least: 0, rest_most: 0, rest_gcd: 0 })
        }
    };
    let several = |held: &HeldBox| falling_strides(held).into_iter().filter(|(_, len)| *len > 1);
    several(a).for_each(|(stride, len)| add(stride, 0, i128::from(len) - 1));
    several(b).for_each(|(stride, len)| add(stride, 1 - i128::from(len), 0));
    terms.sort_unstable_by_key(|t| std::cmp::Reverse(t.stride));
    let (mut least, mut most, mut gcd) = (0, 0, 0);
    for term in terms.iter_mut().rev() {
        (term.rest_least, term.rest_most, term.rest_gcd) = (least, most, gcd);
        (least, most) = (least + term.stride * term.least, most + term.stride * term.most);
        gcd = greatest_common_divisor(gcd, term.stride);
    }
    let apart = i128::from(b.offset_elements) - i128::from(a.offset_elements);
    reaches(&terms, apart, &mut MAX_CHOICES.clone())
}

/// Whether the terms can be taken so often that they add up to `wanted`.
fn reaches(terms: &[Term], wanted: i128, choices: &mut u32) -> bool {
    let Some((term, rest)) = terms.split_first() else { return wanted == 0 };
    let least = ceil_div(wanted - term.rest_most, term.stride).max(term.least);
    let most = (wanted - term.rest_least).div_euclid(term.stride).min(term.most);
    let mut taken = least;
    while taken <= most {
        let left = wanted - taken * term.stride;
        let divides = if term.rest_gcd == 0 { left == 0 } else { left % term.rest_gcd == 0 };
        if divides {
            *choices = choices.saturating_sub(1);
            if *choices == 0 || reaches(rest, left, choices) {
                return true;
            }
        }
        taken += 1;
    }
    false
}

fn ceil_div(a: i128, b: i128) -> i128 {
    -(-a).div_euclid(b)
}

fn greatest_common_divisor(a: i128, b: i128) -> i128 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn held(offset: u64, terms: &[(u64, u64)]) -> HeldBox {
        HeldBox {
            region: Region::whole(&terms.iter().map(|t| t.1).collect::<Vec<_>>()),
            offset_elements: offset,
            strides: terms.iter().map(|t| t.0).collect(),
        }
    }

    fn places(held: &HeldBox) -> Vec<u64> {
        let mut out = vec![held.offset_elements];
        for (span, stride) in held.region.spans().iter().zip(&held.strides) {
            out = out.iter().flat_map(|at| (0..span.len()).map(move |x| at + x * stride)).collect();
        }
        out
    }

    fn arb_held() -> impl Strategy<Value = HeldBox> {
        (0u64..60, prop::collection::vec((0u64..30, 1u64..5), 0..4)).prop_map(|(at, terms)| held(at, &terms))
    }

    /// Boxes of one frame, anywhere in it, over its edge too.
    fn arb_framed() -> impl Strategy<Value = Vec<HeldBox>> {
        let one = (0u64..40, 1u64..4, 1u64..4, 1u64..3);
        (prop::collection::vec(one, 1..6), 1u64..3).prop_map(|(boxes, step)| {
            boxes
                .into_iter()
                .map(|(at, a, b, c)| held(at, &[(6 * step, a), (step, b), (20 * step, c)]))
                .collect()
        })
    }

    fn check(mut boxes: Vec<HeldBox>) -> Result<(), TestCaseError> {
        boxes.retain(|b| !folds_onto_itself(b));
        boxes.sort_by_key(|b| b.offset_elements);
        let all: Vec<BTreeSet<u64>> = boxes.iter().map(|b| places(b).into_iter().collect()).collect();
        let share = |i: usize, j: usize| !all[i].is_disjoint(&all[j]);
        let any = (0..boxes.len()).any(|i| (i + 1..boxes.len()).any(|j| share(i, j)));
        let found = collision(&boxes);
        prop_assert_eq!(found.is_some(), any, "{:?}", boxes);
        prop_assert!(found.is_none_or(|(i, j)| i != j && share(i, j)));
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]
        #[test]
        fn what_does_not_fold_has_a_place_for_each_element(held in arb_held()) {
            let places = places(&held);
            let different: BTreeSet<u64> = places.iter().copied().collect();
            prop_assert!(folds_onto_itself(&held) || different.len() == places.len());
        }

        #[test]
        fn shared_places_are_found(boxes in prop::collection::vec(arb_held(), 0..6)) {
            check(boxes)?;
        }

        #[test]
        fn shared_places_in_a_frame_are_found(boxes in arb_framed()) {
            check(boxes)?;
        }
    }

    #[test]
    fn columns_of_a_matrix_are_apart() {
        let columns =
            |width: u64| (0..100).map(|i| held(i * width, &[(1000, 8), (1, 10)])).collect::<Vec<_>>();
        assert_eq!(collision(&columns(10)), None);
        assert_eq!(collision(&columns(9)), Some((0, 1)));
        // A box of other strides among them, in the free rows behind and in the way.
        let with = |at: u64| {
            let mut boxes = columns(10);
            boxes.push(held(at, &[(2000, 4), (7, 2)]));
            boxes.sort_by_key(|b| b.offset_elements);
            collision(&boxes)
        };
        assert_eq!(with(8000), None);
        assert!(with(6990).is_some());
    }

    #[test]
    fn the_largest_offsets_are_compared_too() {
        let boxes =
            [held(0, &[(1 << 62, 4)]), held((1 << 62) - 1, &[(1 << 62, 3)]), held(1, &[(1 << 61, 7)])];
        assert!(!share_a_place(&boxes[0], &boxes[1]));
        assert!(!share_a_place(&boxes[0], &boxes[2]));
        assert!(share_a_place(&boxes[0], &held(3 << 62, &[(1, 9)])));
    }
}
