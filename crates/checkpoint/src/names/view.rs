//! Dims seen as several: a flat range as boxes of its factors, and boxes of factors as flat ranges.
//!
//! ```text
//! rows 0..12 seen as 2 groups of 3 of 2:   range 3..9  is  [0, 1, 1]  [0, 2, 0:2]  [1, 0, 0:2]  [1, 1, 0]
//! ```

use crossmesh_core::region::Span;

/// The boxes that a range of the flat dim is, in its order; a span for every factor.
pub fn split(range: Span, sizes: &[u64]) -> Vec<Vec<Span>> {
    let [first, rest @ ..] = sizes else { return vec![vec![]] };
    if range.is_empty() {
        return vec![];
    }
    if rest.is_empty() {
        debug_assert!(range.end <= *first);
        return vec![vec![range]];
    }
    let inner: u64 = rest.iter().product();
    let mut boxes = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let (i, offset) = (at / inner, at % inner);
        if offset == 0 && range.end - at >= inner {
            // As many whole rows as there are.
            let rows = (range.end - at) / inner;
            let whole = rest.iter().map(|&n| Span::new(0, n));
            boxes.push(std::iter::once(Span::new(i, i + rows)).chain(whole).collect());
            at += rows * inner;
        } else {
            let end = range.end.min((i + 1) * inner);
            for tail in split(Span::new(offset, offset + end - at), rest) {
                boxes.push(std::iter::once(Span::new(i, i + 1)).chain(tail).collect());
            }
            at = end;
        }
    }
    boxes
}

/// A factor of a dim: how many there are, which of them, and how far apart they lie.
#[derive(Debug, Clone, Copy)]
pub struct Factor {
    pub size: u64,
    pub span: Span,
    pub stride: u64,
}

/// A range of the flat dim: where its first element lies behind that of the box, and its stride.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flat {
    pub span: Span,
    pub offset: u64,
    pub stride: u64,
}

/// The flat ranges that a box of factors is: as few as their strides allow.
pub fn merge(factors: &[Factor]) -> Vec<Flat> {
    let Some((first, rest)) = factors.split_first() else {
        return vec![Flat { span: Span::new(0, 1), offset: 0, stride: 0 }];
    };
    let inner: u64 = rest.iter().map(|f| f.size).product();
    let tails = merge(rest);
    if let [tail] = tails[..]
        && tail.span == Span::new(0, inner)
    {
        // A factor of one has no stride of its own.
        let stride = if inner == 1 { first.stride } else { tail.stride };
        if first.span.len() == 1 || first.stride == stride * inner {
            let span = Span::new(first.span.start * inner, first.span.end * inner);
            return vec![Flat { span, offset: tail.offset, stride }];
        }
    }
    let mut flats = Vec::new();
    for i in first.span.start..first.span.end {
        for tail in &tails {
            let span = Span::new(i * inner + tail.span.start, i * inner + tail.span.end);
            let offset = (i - first.span.start) * first.stride + tail.offset;
            flats.push(Flat { span, offset, stride: tail.stride });
        }
    }
    flats
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossmesh_testkit::seed::Seed;

    fn flat_indexes(boxes: &[Vec<Span>], sizes: &[u64]) -> Vec<u64> {
        let mut all = Vec::new();
        for spans in boxes {
            let mut indexes = vec![0];
            for (span, size) in spans.iter().zip(sizes) {
                indexes =
                    indexes.iter().flat_map(|i| (span.start..span.end).map(move |x| i * size + x)).collect();
            }
            all.extend(indexes);
        }
        all
    }

    #[test]
    fn a_range_is_its_boxes_in_order() {
        let mut seed = Seed(5);
        for _ in 0..2000 {
            let sizes: Vec<u64> = (0..1 + seed.below(4)).map(|_| 1 + seed.below(5) as u64).collect();
            let len = sizes.iter().product::<u64>() as usize;
            let (a, b) = (seed.below(len + 1) as u64, seed.below(len + 1) as u64);
            let range = Span::new(a.min(b), a.max(b));
            let boxes = split(range, &sizes);
            assert_eq!(flat_indexes(&boxes, &sizes), (range.start..range.end).collect::<Vec<_>>());
        }
    }

    #[test]
    fn merged_ranges_lie_where_their_elements_do() {
        let mut seed = Seed(6);
        for _ in 0..2000 {
            let sizes: Vec<u64> = (0..1 + seed.below(4)).map(|_| 1 + seed.below(4) as u64).collect();
            let mut stride = 2;
            let mut factors: Vec<Factor> = sizes
                .iter()
                .rev()
                .map(|&size| {
                    let (a, b) = (seed.below(size as usize) as u64, seed.below(size as usize) as u64);
                    let factor = Factor { size, span: Span::new(a.min(b), a.max(b) + 1), stride };
                    stride *= if seed.one_in(2) { size } else { size + 1 };
                    factor
                })
                .collect();
            factors.reverse();
            let mut slow = Vec::new();
            let spans: Vec<Span> = factors.iter().map(|f| f.span).collect();
            for flat in flat_indexes(&[spans], &sizes) {
                let (mut rest, mut at) = (flat, 0);
                for f in factors.iter().rev() {
                    at += (rest % f.size - f.span.start) * f.stride;
                    rest /= f.size;
                }
                slow.push((flat, at));
            }
            let element = |f: &Flat| {
                let (span, offset, stride) = (f.span, f.offset, f.stride);
                (span.start..span.end)
                    .map(move |x| (x, offset + (x - span.start) * stride))
                    .collect::<Vec<_>>()
            };
            assert_eq!(merge(&factors).iter().flat_map(element).collect::<Vec<_>>(), slow);
        }
    }
}
