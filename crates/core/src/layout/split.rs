//! How one dim is cut into parts.

use crate::region::Span;

/// The axes that split a dim, major first (none leaves it whole), and where the cuts fall.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Split {
    pub axes: Vec<usize>,
    pub rule: Rule,
}

impl Split {
    pub const WHOLE: Split = Split { axes: Vec::new(), rule: Rule::Chunk };
}

/// Where the cuts of a split dim fall.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Rule {
    /// torch.chunk, axis by axis: parts of ceil(n/k), the last ones shorter or empty.
    Chunk,
    /// Explicit cuts, from 0 to the dim's length; part `i` is `cuts[i]..cuts[i + 1]`.
    Cuts(Vec<u64>),
    /// Tensors fused along the dim, each of them chunked on its own: a part is a slice of every one.
    ///
    /// ```text
    /// tp of 4+2, tp = 2      q q q q k k
    ///                        0 0 1 1 0 1
    /// ```
    Parts(Vec<u64>),
}

impl Rule {
    /// The spans of every part, empty ones left out, when the axes have these lengths (major first).
    pub(super) fn spans(&self, dim_len: u64, axis_lens: &[u32]) -> Vec<Vec<Span>> {
        let keep = |span: Span| if span.is_empty() { vec![] } else { vec![span] };
        match self {
            Rule::Chunk => chunks(Span::new(0, dim_len), axis_lens).into_iter().map(keep).collect(),
            Rule::Cuts(cuts) => cuts.windows(2).map(|w| keep(Span::new(w[0], w[1]))).collect(),
            Rule::Parts(parts) => {
                let num_parts = axis_lens.iter().map(|&n| n as usize).product();
                let mut spans: Vec<Vec<Span>> = vec![Vec::new(); num_parts];
                for tensor in fused(parts) {
                    for (out, span) in spans.iter_mut().zip(chunks(tensor, axis_lens)) {
                        append(out, span);
                    }
                }
                spans
            }
        }
    }

    /// The spans of one part, as `spans` has them: `part` counts row-major over the axes.
    pub(super) fn spans_of(&self, dim_len: u64, axis_lens: &[u32], part: usize) -> Vec<Span> {
        let mut spans = Vec::new();
        match self {
            Rule::Chunk => append(&mut spans, nth_chunk(Span::new(0, dim_len), axis_lens, part)),
            Rule::Cuts(cuts) => append(&mut spans, Span::new(cuts[part], cuts[part + 1])),
            Rule::Parts(parts) => {
                fused(parts).for_each(|tensor| append(&mut spans, nth_chunk(tensor, axis_lens, part)))
            }
        }
        spans
    }
}

/// The spans of tensors that lie one behind the other.
fn fused(parts: &[u64]) -> impl Iterator<Item = Span> {
    parts.iter().scan(0, |next, len| {
        let start = *next;
        *next += len;
        Some(Span::new(start, *next))
    })
}

/// Adds a span behind the others; neighbours become one, nothing stays nothing.
fn append(spans: &mut Vec<Span>, span: Span) {
    match spans.last_mut() {
        _ if span.is_empty() => {}
        Some(last) if last.end == span.start => last.end = span.end,
        _ => spans.push(span),
    }
}

/// Chunks a span over several axes, one inside the other: `10` over `(2, 4)` is `2,2,1,0 | 2,2,1,0`.
fn chunks(span: Span, axis_lens: &[u32]) -> Vec<Span> {
    let Some((&axis_len, inner)) = axis_lens.split_first() else { return vec![span] };
    (0..axis_len).flat_map(|i| chunks(chunk(span, axis_len, i), inner)).collect()
}

/// One of those chunks, found without the others.
fn nth_chunk(span: Span, axis_lens: &[u32], part: usize) -> Span {
    let Some((&axis_len, inner)) = axis_lens.split_first() else { return span };
    let inner_parts: usize = inner.iter().map(|&n| n as usize).product();
    nth_chunk(chunk(span, axis_len, (part / inner_parts) as u32), inner, part % inner_parts)
}

/// Part `i` of a span cut into `k` by torch.chunk's rule.
fn chunk(span: Span, k: u32, i: u32) -> Span {
    let part_len = span.len().div_ceil(u64::from(k));
    let start = span.start + (u64::from(i).saturating_mul(part_len)).min(span.len());
    // A dim may end at 2^64 - 1, and a rounded-up part reach beyond.
    Span::new(start, start.saturating_add(part_len).min(span.end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lens(rule: &Rule, dim_len: u64, axes: &[u32]) -> Vec<u64> {
        rule.spans(dim_len, axes).iter().map(|s| s.iter().map(|s| s.len()).sum()).collect()
    }

    #[test]
    fn follows_torch_chunk() {
        assert_eq!(lens(&Rule::Chunk, 10, &[4]), [3, 3, 3, 1]);
        assert_eq!(lens(&Rule::Chunk, 10, &[2, 4]), [2, 2, 1, 0, 2, 2, 1, 0]);
        assert_eq!(lens(&Rule::Chunk, 2, &[4]), [1, 1, 0, 0]);
        assert_eq!(lens(&Rule::Chunk, 0, &[3]), [0, 0, 0]);
    }

    #[test]
    fn fused_parts_are_split_one_by_one() {
        let spans = Rule::Parts(vec![4, 2]).spans(6, &[2]);
        assert_eq!(spans[0], [Span::new(0, 2), Span::new(4, 5)]);
        assert_eq!(spans[1], [Span::new(2, 4), Span::new(5, 6)]);
    }

    #[test]
    fn the_longest_dim_there_is_can_be_split() {
        assert_eq!(lens(&Rule::Chunk, u64::MAX, &[2]), [1 << 63, (1 << 63) - 1]);
        assert_eq!(lens(&Rule::Chunk, u64::MAX, &[4])[3], (1 << 62) - 1);
    }

    fn arb_rule() -> impl Strategy<Value = (Rule, u64, Vec<u32>)> {
        let axes = prop::collection::vec(1u32..5, 0..4);
        (axes, 0u64..40, prop::collection::vec(0u64..12, 1..5), 0..3).prop_map(
            |(axes, len, numbers, kind)| {
                let parts = axes.iter().product::<u32>() as usize;
                match kind {
                    0 => (Rule::Chunk, len, axes),
                    1 => {
                        let sum = numbers.iter().sum();
                        (Rule::Parts(numbers), sum, axes)
                    }
                    _ => {
                        let mut cuts: Vec<u64> = (1..parts as u64)
                            .map(|i| (i * numbers[0] + numbers[i as usize % numbers.len()]) % (len + 1))
                            .collect();
                        cuts.extend([0, len]);
                        cuts.sort_unstable();
                        (Rule::Cuts(cuts), len, axes)
                    }
                }
            },
        )
    }

    proptest! {
        #[test]
        fn one_part_is_found_as_all_parts_are((rule, len, axes) in arb_rule()) {
            for (part, spans) in rule.spans(len, &axes).into_iter().enumerate() {
                prop_assert_eq!(rule.spans_of(len, &axes, part), spans);
            }
        }

        #[test]
        fn every_index_is_in_one_part((rule, len, axes) in arb_rule()) {
            let mut owners = vec![0; len as usize];
            for span in rule.spans(len, &axes).into_iter().flatten() {
                prop_assert!(!span.is_empty());
                (span.start..span.end).for_each(|i| owners[i as usize] += 1);
            }
            prop_assert!(owners.iter().all(|&n| n == 1), "{:?}", owners);
        }

        #[test]
        fn shards_tile_the_dim(dim_len in 0u64..1000, outer in 1u32..9, inner in 1u32..9) {
            let mut next = 0;
            for spans in Rule::Chunk.spans(dim_len, &[outer, inner]) {
                for span in spans {
                    prop_assert_eq!(span.start, next);
                    next = span.end;
                }
            }
            prop_assert_eq!(next, dim_len);
        }
    }
}
