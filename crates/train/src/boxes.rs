//! From runs of a rank's shard to boxes of the tensor.
//!
//! A run of a box in row-major order is a few smaller boxes, at most two for every dim and one more, and they follow each other as the
//! elements of the run do:
//!
//! ```text
//! . . . a        run 3..14 of [0:4, 0:4]:
//! b b b b        a [0:1, 3:4]
//! b b b b        b [1:3, 0:4]
//! c c . .        c [3:4, 0:2]
//! ```

use std::ops::Range;

use crossmesh_core::layout::Layout;
use crossmesh_core::region::{Region, Span};

/// The boxes of elements `run` of the shard at `coord`, counted in the shard's order.
pub fn of_run(layout: &Layout, coord: &[u32], run: &Range<u64>) -> Vec<Region> {
    let mut out = Vec::new();
    let mut start = 0;
    for region in layout.shard_at(coord) {
        let end = start + region.volume();
        let (from, to) = (run.start.max(start), run.end.min(end));
        if from < to {
            cut(&mut vec![], region.spans(), from - start..to - start, &mut out);
        }
        start = end;
    }
    out
}

/// Cuts elements `run` out of the box of `spans`; all of them lie at `prefix` in the dims before.
fn cut(prefix: &mut Vec<Span>, spans: &[Span], run: Range<u64>, out: &mut Vec<Region>) {
    let volume: u64 = spans.iter().map(|s| s.len()).product();
    if run == (0..volume) {
        out.push(Region::new(prefix.iter().chain(spans).copied().collect()));
        return;
    }
    let (span, inner) = spans.split_first().expect("a single element is no part of a run");
    let row = volume / span.len();
    let mut part = |rows: Range<u64>, run: Range<u64>, prefix: &mut Vec<Span>| {
        prefix.push(Span::new(span.start + rows.start, span.start + rows.end));
        if rows.end - rows.start == 1 {
            cut(prefix, inner, run, out);
        } else {
            out.push(Region::new(prefix.iter().chain(inner).copied().collect()));
        }
        prefix.pop();
    };
    // Rows from `first` to `last` are whole.
    let (first, last) = (run.start.div_ceil(row), run.end / row);
    if first > last {
        part(last..first, run.start - last * row..run.end - last * row, prefix);
        return;
    }
    if run.start < first * row {
        let before = (first - 1) * row;
        part(first - 1..first, run.start - before..row, prefix);
    }
    if first < last {
        part(first..last, 0..row, prefix);
    }
    if last * row < run.end {
        part(last..last + 1, 0..run.end - last * row, prefix);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parameter::shard_indices;
    use crossmesh_testkit::replay::elements;
    use proptest::prelude::*;

    fn boxes(layout: &str, coord: &[u32], run: Range<u64>) -> Vec<String> {
        of_run(&layout.parse().unwrap(), coord, &run).iter().map(Region::to_string).collect()
    }

    #[test]
    fn a_run_is_a_head_a_body_and_a_tail() {
        let boxes = |run| boxes("f32[8,4]@A{tp:2}(tp,_)", &[1], run);
        assert_eq!(boxes(3..14), ["[4:5, 3:4]", "[5:7, 0:4]", "[7:8, 0:2]"]);
        assert_eq!(boxes(0..16), ["[4:8, 0:4]"]);
        assert_eq!(boxes(5..7), ["[5:6, 1:3]"]);
        assert_eq!(boxes(4..8), ["[5:6, 0:4]"]);
        assert_eq!(boxes(6..6), [""; 0]);
    }

    fn arb_layout() -> impl Strategy<Value = (Layout, Vec<u32>)> {
        let split = prop::sample::select(vec!["_", "dp", "tp", "dp+tp", "tp of 2+3", "tp of 1+1+1"]);
        (prop::collection::vec((1u64..6, split), 0..4), 1u32..4, 1u32..4, 0u32..4, 0u32..4).prop_filter_map(
            "an axis splits one dim",
            |(dims, dp, tp, x, y)| {
                let len = |(len, split): &(u64, &str)| match *split {
                    "tp of 2+3" => 5,
                    "tp of 1+1+1" => 3,
                    _ => *len,
                };
                let shape: Vec<String> = dims.iter().map(|d| len(d).to_string()).collect();
                let splits: Vec<&str> = dims.iter().map(|d| d.1).collect();
                let text = format!("f32[{}]@A{{dp:{dp},tp:{tp}}}({})", shape.join(","), splits.join(","));
                Some((text.parse().ok()?, vec![x % dp, y % tp]))
            },
        )
    }

    proptest! {
        #[test]
        fn boxes_are_the_elements_of_the_run_in_order((layout, coord) in arb_layout(), a in 0.0..1.0f64, b in 0.0..1.0f64) {
            let all = shard_indices(&layout, &coord);
            let at = |f: f64| (f * (all.len() + 1) as f64) as usize;
            let run = at(a.min(b))..at(a.max(b));
            let boxes = of_run(&layout, &coord, &(run.start as u64..run.end as u64));
            let index = |e: Vec<u64>| e.iter().zip(layout.shape()).fold(0, |at, (x, n)| at * n + x);
            let found: Vec<u64> = boxes.iter().flat_map(elements).map(index).collect();
            prop_assert_eq!(&found[..], &all[run]);
            let shards = layout.shard_at(&coord).len();
            prop_assert!(boxes.len() <= shards + 2 * layout.shape().len(), "{} boxes", boxes.len());
        }
    }
}
