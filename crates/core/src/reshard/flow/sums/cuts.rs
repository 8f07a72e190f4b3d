//! Pieces of sums, cut into boxes that each go a way of their own.

use std::collections::BTreeMap;

use crate::id::{HostId, Rank};
use crate::region::Region;

use super::super::super::demand::SumItem;
use super::super::boxes;
use super::holders::Holders;
use super::room::BOXES_IN_ROOM;
use super::roots::Job;
use super::tree::Tree;

/// A cut has at least this many bytes; below, the turns do not pay.
const MIN_CUT: u64 = 64 << 10;
/// A piece is cut into this many boxes at most, however little memory there is.
const MAX_BOXES: u64 = 1 << 16;

/// A cut of a piece on its way: between hosts, or inside one that has all parts.
pub(super) struct Cut<'a> {
    pub sum: &'a SumItem,
    pub region: Region,
    pub bytes: u64,
    /// Of how many classes with the same parts, the how manieth.
    pub place: (usize, usize),
    /// Whose turn it is, among devices that can stand in for each other.
    pub turn: usize,
    /// The same among receivers that may be the root.
    pub root_turn: usize,
    /// Adders by host (or for a cut inside a host, its own alone), each part with its holders.
    pub cover: Vec<(HostId, Vec<&'a [Rank]>)>,
    /// Receivers by host, without those that are served by their own host.
    pub receivers: BTreeMap<HostId, Vec<Rank>>,
}

/// A cut before it is known where it goes.
pub(super) struct Draft<'a> {
    pub sum: &'a SumItem,
    pub region: Region,
    pub bytes: u64,
    pub place: (usize, usize),
    pub turn: usize,
    pub root_turn: usize,
    pub holders: &'a Holders,
}

impl<'a> Draft<'a> {
    pub(super) fn with(
        &self,
        cover: Vec<(HostId, Vec<&'a [Rank]>)>,
        receivers: BTreeMap<HostId, Vec<Rank>>,
    ) -> Cut<'a> {
        let Draft { sum, bytes, place, turn, root_turn, .. } = *self;
        Cut { sum, region: self.region.clone(), bytes, place, turn, root_turn, cover, receivers }
    }
}

impl Cut<'_> {
    pub(super) fn among_hosts(&self) -> Job {
        let adders = self.cover.iter().map(|(host, _)| host.0).collect();
        Job { bytes: self.bytes, adders, receivers: self.receivers.keys().map(|h| h.0).collect() }
    }

    /// One holder of every part: a receiver rather than another.
    pub(super) fn among_devices(&self, first: u32) -> Job {
        let receivers: Vec<u32> = self.receivers.values().flatten().map(|r| r.0 - first).collect();
        let pick = |ranks: &&[Rank]| {
            let wanting = || ranks.iter().map(|r| r.0 - first).filter(|n| receivers.binary_search(n).is_ok());
            let turn = self.turn % wanting().count().max(1);
            wanting().nth(turn).unwrap_or(ranks[self.turn % ranks.len()].0 - first)
        };
        let mut adders: Vec<u32> = self.cover.iter().flat_map(|(_, parts)| parts.iter().map(pick)).collect();
        adders.sort_unstable();
        Job { bytes: self.bytes, adders, receivers }
    }

    /// Whether the root of a tree has the part that nobody else brings.
    pub(super) fn root_adds(&self, tree: &Tree) -> bool {
        tree.num_senders() - tree.relays.len() < self.num_parts()
    }

    /// How many parts are added up.
    pub(super) fn num_parts(&self) -> usize {
        self.cover.iter().map(|(_, parts)| parts.len()).sum()
    }

    /// Whether somebody may have to hold it for others.
    pub(super) fn needs_room(&self) -> bool {
        self.cover.iter().map(|(_, parts)| parts.len()).sum::<usize>() > 1
    }
}

/// All pieces of a source one behind the other, shared out evenly over ports: only what lies on the border of two is cut.
///
/// ```text
/// pieces   |   0   |   1   |   2   |   3   |
/// ports    |    0     |    1     |    2    |       boxes 0, 1a, 1b, 2a, 2b, 3: six instead of twelve
/// ```
pub(super) struct Line {
    pub bytes: u64,
    pub ports: u64,
    at: u64,
}

/// A box of a piece, whose turn it is, and whose among the receivers.
pub(super) struct Share {
    pub region: Region,
    pub turn: usize,
    pub root_turn: usize,
}

impl Line {
    pub(super) fn new(bytes: u64, ports: u64) -> Self {
        Self { bytes, ports: ports.max(1), at: 0 }
    }

    /// The boxes of the next piece, each cut `ways` ways more.
    pub(super) fn next(&mut self, sum: &SumItem, ways: u64) -> Vec<Share> {
        self.next_of(&sum.region, sum.bytes, ways)
    }

    /// The same of any box.
    pub(super) fn next_of(&mut self, whole: &Region, bytes: u64, ways: u64) -> Vec<Share> {
        let (start, end) = (self.at, self.at + bytes);
        self.at = end;
        let border = |port: u64| (u128::from(self.bytes) * u128::from(port) / u128::from(self.ports)) as u64;
        let first = (0..self.ports).rev().find(|&port| border(port) <= start).unwrap_or(0);
        let mut shares = vec![];
        let mut from = start;
        for port in first..self.ports {
            let mut to = if port + 1 < self.ports { border(port + 1).min(end) } else { end };
            // What is too small to pay is left to a neighbour.
            if end - to < MIN_CUT {
                to = end;
            }
            if to == end || to.saturating_sub(from) >= MIN_CUT {
                let offset = |way: u64| from - start + (to - from) * way / ways;
                for way in 0..ways {
                    let region = boxes::part(whole, bytes, offset(way), offset(way + 1));
                    let (turn, root_turn) = (port as usize + 1, way as usize);
                    shares.extend(region.map(|region| Share { region, turn, root_turn }));
                }
                from = to;
            }
            if to == end {
                break;
            }
        }
        shares
    }
}

/// Cuts a piece into boxes, `turns` of them or as many as make them small enough.
pub(super) fn cuts(sum: &SumItem, turns: u64, max_extra_bytes: Option<u64>) -> Vec<Region> {
    let Some(limit) = max_extra_bytes else {
        let count = turns.min((sum.bytes / MIN_CUT).max(1));
        let offset = |c: u64| (u128::from(sum.bytes) * u128::from(c) / u128::from(count)) as u64;
        let part = |c| boxes::part(&sum.region, sum.bytes, offset(c), offset(c + 1));
        return (0..count).filter_map(part).collect();
    };
    let steps = boxes::cut_dim(&sum.region).map_or(1, |dim| sum.region.spans()[dim].len());
    let step_bytes = sum.bytes / steps;
    let fitting = (limit / BOXES_IN_ROOM / step_bytes).max(steps.div_ceil(MAX_BOXES)).max(1);
    let per_box = fitting.min(steps.div_ceil(turns));
    let part = |c: u64| {
        boxes::part(&sum.region, sum.bytes, c * per_box * step_bytes, (c + 1) * per_box * step_bytes)
    };
    (0..steps.div_ceil(per_box)).filter_map(part).collect()
}
