//! Boxes looked up by place: which of many meet a given one, without looking at all of them.
//!
//! A tree of bounding boxes over a list that does not change. A node's boxes are halved along the dim in which they
//! spread the most; a look-up goes only where bounds meet what is asked:
//!
//! ```text
//! [0:9]  ->  [0:4]  ->  0:1  1:4          asked 2:3:   [0:4] meets, [4:9] does not
//!            [4:9]  ->  4:6  6:9
//! ```

use crate::region::{Region, Span};

/// So few boxes are looked at one by one.
const LEAF_LEN: usize = 8;

/// A fixed list of boxes, none of them empty, by place.
#[derive(Debug, Clone, Default)]
pub struct BoxIndex {
    num_dims: usize,
    /// The boxes in tree order, a span per dim each.
    spans: Vec<Span>,
    /// In tree order: the place of each in the list.
    ids: Vec<u32>,
    nodes: Vec<Node>,
    /// A span per dim and node.
    bounds: Vec<Span>,
}

/// The boxes `first..end` in tree order. Its first half follows it in the table, the second is at `second`.
#[derive(Debug, Clone, Copy)]
struct Node {
    first: u32,
    end: u32,
    /// 0 where the boxes are few: the root is nobody's half.
    second: u32,
}

impl BoxIndex {
    pub fn new<'a>(regions: impl ExactSizeIterator<Item = &'a Region> + Clone) -> Self {
        let num_dims = regions.clone().next().map_or(0, Region::num_dims);
        let list: Vec<&Region> = regions.collect();
        let mut ids: Vec<u32> = (0..).take(list.len()).collect();
        let mut index = Self { num_dims, ..Self::default() };
        if !list.is_empty() {
            index.grow(&list, &mut ids, 0);
        }
        index.spans = ids.iter().flat_map(|&id| list[id as usize].spans().iter().copied()).collect();
        index.ids = ids;
        index
    }

    pub fn len(&self) -> usize {
        self.ids.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Adds the node of `ids`, which start at `first` in tree order, and all below it. As deep as the list halves.
    fn grow(&mut self, list: &[&Region], ids: &mut [u32], first: u32) {
        let node = self.nodes.len();
        self.nodes.push(Node { first, end: first + ids.len() as u32, second: 0 });
        let bounds = bounds(list, ids, self.num_dims);
        self.bounds.extend_from_slice(&bounds);
        if ids.len() <= LEAF_LEN || self.num_dims == 0 {
            return;
        }
        let start = |id: u32, dim: usize| list[id as usize].spans()[dim].start;
        let spread = |dim: usize| {
            let starts = ids.iter().map(|&id| start(id, dim));
            starts.clone().max().unwrap_or(0) - starts.min().unwrap_or(0)
        };
        let dim = (0..self.num_dims).rev().max_by_key(|&dim| spread(dim)).unwrap_or(0);
        let half = ids.len() / 2;
        ids.select_nth_unstable_by_key(half, |&id| (start(id, dim), id));
        let (left, right) = ids.split_at_mut(half);
        self.grow(list, left, first);
        self.nodes[node].second = self.nodes.len() as u32;
        self.grow(list, right, first + half as u32);
    }

    /// Visits every box that has elements in common with these spans, in no particular order, until `visit` says to
    /// stop.
    pub fn visit_meeting(&self, asked: &[Span], mut visit: impl FnMut(u32, &[Span]) -> Visit) {
        let mut todo: Vec<u32> = Vec::with_capacity(16);
        let mut next = (!self.nodes.is_empty()).then_some(0u32);
        while let Some(at) = next.take().or_else(|| todo.pop()) {
            let node = self.nodes[at as usize];
            if !meet(self.of(&self.bounds, at), asked) {
                continue;
            }
            if node.second > 0 {
                todo.push(node.second);
                next = Some(at + 1);
                continue;
            }
            for i in node.first..node.end {
                let spans = self.of(&self.spans, i);
                if meet(spans, asked) && visit(self.ids[i as usize], spans) == Visit::Stop {
                    return;
                }
            }
        }
    }

    /// The boxes that have elements in common with these spans, in list order.
    pub fn meeting(&self, asked: &[Span]) -> Vec<u32> {
        let mut found = Vec::new();
        self.visit_meeting(asked, |id, _| {
            found.push(id);
            Visit::On
        });
        found.sort_unstable();
        found
    }

    pub fn any_meets(&self, asked: &[Span]) -> bool {
        let mut found = false;
        self.visit_meeting(asked, |_, _| {
            found = true;
            Visit::Stop
        });
        found
    }

    /// Whether one of the boxes contains all of these spans.
    pub fn any_contains(&self, asked: &[Span]) -> bool {
        let mut found = false;
        self.visit_meeting(asked, |_, spans| {
            found = spans.iter().zip(asked).all(|(held, span)| held.contains(*span));
            if found { Visit::Stop } else { Visit::On }
        });
        found
    }

    /// Two boxes of the list that have elements in common, if there are any: the first such pair in list order.
    pub fn first_overlap(&self) -> Option<(u32, u32)> {
        let mut pairs = Vec::new();
        for i in 0..self.len() as u32 {
            let id = self.ids[i as usize];
            let other = self.meeting(self.of(&self.spans, i)).into_iter().find(|&other| other != id);
            pairs.extend(other.map(|other| (id.min(other), id.max(other))));
        }
        pairs.into_iter().min()
    }

    fn of<'a>(&self, table: &'a [Span], at: u32) -> &'a [Span] {
        &table[at as usize * self.num_dims..][..self.num_dims]
    }
}

/// Whether a visit goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Visit {
    On,
    Stop,
}

fn meet(a: &[Span], b: &[Span]) -> bool {
    a.iter().zip(b).all(|(a, b)| a.start.max(b.start) < a.end.min(b.end))
}

fn bounds(list: &[&Region], ids: &[u32], num_dims: usize) -> Vec<Span> {
    let span = |dim: usize| {
        let spans = ids.iter().map(|&id| list[id as usize].spans()[dim]);
        let start = spans.clone().map(|s| s.start).min().unwrap_or(0);
        Span::new(start, spans.map(|s| s.end).max().unwrap_or(start))
    };
    (0..num_dims).map(span).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn arb_region(dims: usize) -> impl Strategy<Value = Region> {
        prop::collection::vec((0u64..30, 1u64..12), dims).prop_map(|v| {
            Region::new(v.into_iter().map(|(start, len)| Span::new(start, start + len)).collect())
        })
    }

    fn arb_list() -> impl Strategy<Value = (Vec<Region>, Region)> {
        (0usize..4).prop_flat_map(|dims| (prop::collection::vec(arb_region(dims), 0..80), arb_region(dims)))
    }

    proptest! {
        #[test]
        fn finds_what_a_look_at_all_of_them_finds((list, asked) in arb_list()) {
            let index = BoxIndex::new(list.iter());
            let slow: Vec<u32> = (0..).zip(&list).filter(|(_, r)| r.overlaps(&asked)).map(|(i, _)| i).collect();
            prop_assert_eq!(index.any_meets(asked.spans()), !slow.is_empty());
            prop_assert_eq!(index.meeting(asked.spans()), slow);
            prop_assert_eq!(index.any_contains(asked.spans()), list.iter().any(|r| r.contains(&asked)));
        }

        #[test]
        fn finds_an_overlap_where_there_is_one((list, _) in arb_list()) {
            let index = BoxIndex::new(list.iter());
            let pairs = (0..list.len()).flat_map(|i| (i + 1..list.len()).map(move |j| (i, j)));
            let slow = pairs.filter(|(i, j)| list[*i].overlaps(&list[*j])).map(|(i, j)| (i as u32, j as u32)).next();
            prop_assert_eq!(index.first_overlap(), slow);
        }
    }
}
