//! A class as a row of bytes: stretches of items that are alike, and boxes between two offsets.

use crate::cluster::Topology;
use crate::id::{HostId, Rank};
use crate::region::Region;

use super::super::super::demand::{Class, Demands, RankSet};
use super::super::boxes;
use super::lanes::RouteId;

/// Items of a class with the same holders and the same wanters, side by side.
#[derive(Debug, Clone)]
pub(super) struct Stretch {
    pub start: u64,
    pub end: u64,
    pub items: std::ops::Range<usize>,
    pub holders: RankSet,
    pub wanters: RankSet,
}

/// Items next to each other with the same sets. [`Demands::of`] has brought them together.
pub(super) fn stretches(class: &Class, demands: &Demands) -> Vec<Stretch> {
    let mut stretches: Vec<Stretch> = vec![];
    let mut at = 0;
    for (i, &index) in class.items.iter().enumerate() {
        let item = &demands.items[index as usize];
        let end = at + item.bytes;
        match stretches.last_mut() {
            Some(s) if s.holders == item.holders && s.wanters == item.wanters => {
                (s.end, s.items.end) = (end, i + 1)
            }
            _ => stretches.push(Stretch {
                start: at,
                end,
                items: i..i + 1,
                holders: item.holders,
                wanters: item.wanters,
            }),
        }
        at = end;
    }
    stretches
}

/// A stretch of a class between two cuts.
pub(super) struct Cell<'a> {
    pub key: (u32, u32),
    /// Where it starts, in its stretch.
    pub at: u64,
    pub stretch: &'a Stretch,
    /// The route, if it forwards.
    pub lane: Option<RouteId>,
}

/// Items as a row of bytes, walked from left to right.
pub(super) struct Row<'a> {
    items: &'a [u32],
    next: usize,
    /// Where item `next` starts.
    at: u64,
}

impl<'a> Row<'a> {
    pub(super) fn new(items: &'a [u32], at: u64) -> Self {
        Self { items, next: 0, at }
    }

    /// The boxes between two offsets; offsets do not fall from call to call.
    pub(super) fn for_each(
        &mut self,
        demands: &Demands,
        start: u64,
        end: u64,
        mut emit: impl FnMut(u32, Region),
    ) {
        while let Some(&index) = self.items.get(self.next) {
            let item = &demands.items[index as usize];
            let item_end = self.at + item.bytes;
            if self.at >= end {
                return;
            }
            let (from, to) = (start.saturating_sub(self.at), end.min(item_end) - self.at);
            if let Some(region) = boxes::part(&item.region, item.bytes, from, to) {
                emit(index, region);
            }
            if item_end > end {
                return;
            }
            self.at = item_end;
            self.next += 1;
        }
    }
}

/// The ranks of a sorted set that are on a host. A host's ranks follow each other.
pub(super) fn on_host<'a>(set: &'a [Rank], host: HostId, topology: &Topology) -> &'a [Rank] {
    let start = set.partition_point(|&r| topology.host(r) < host);
    let len = set[start..].partition_point(|&r| topology.host(r) == host);
    &set[start..start + len]
}
