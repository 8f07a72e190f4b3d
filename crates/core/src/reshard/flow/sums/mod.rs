//! Partial sums: combined on the way.
//!
//! A host that has every part adds up for itself. For the others, one holder of every part passes on what it has, host
//! by host; every rank on the way adds its own part, so each host sends its parts on as one, once. From the root, which
//! is on a receiver's host, the whole sum goes on through the other receivers.
//!
//! ```text
//! parts on h0 h1 h2, wanted on all three         third 0   h1 -> h0 <- h2,  then h0 -> h1, h0 -> h2
//! cut into three, each with a root of its own    third 1   h2 -> h1 <- h0,  then h1 -> h2, h1 -> h0
//!                                                third 2   h0 -> h2 <- h1,  then h2 -> h0, h2 -> h1
//!
//! parts on h0 h1 h2, wanted on h3 h4             h0 -> h1 -> h2 -> h3 -> h4
//! ```
//!
//! The first is an all-reduce, found as a special case. Which of the two it is, [`tree`] says. The devices through
//! which a host is entered and left take turns from cut to cut, so that all ports are used.
//!
//! A rank that adds up what it does not want needs memory for it. Under a limit everything goes along paths, in boxes
//! so small that several fit ([`room`]).

mod balanced;
mod between;
mod blocks;
mod chains;
pub(super) mod chunk;
mod cuts;
mod holders;
mod inside;
mod loads;
mod rails;
mod room;
mod roots;
mod served;
mod tree;
mod turns;

use std::collections::BTreeMap;

use super::emit::Emitter;
use crate::id::{HostId, Rank};

use super::super::demand::SumClass;
use super::super::problem::PlanError;
use blocks::Blocks;
pub(super) use blocks::MANY_PAIRS;
use cuts::{Cut, Draft, Line, Share, cuts};
use holders::{Holders, by_host, in_turn};
use room::Room;
use served::Served;
pub(super) use tree::Shape;

/// Beyond this many transfers, pieces are cut no more than they have to be.
const MANY_TRANSFERS: u64 = 100_000;

/// Trees by load.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Balanced {
    /// The shape between hosts towards the root and away from it.
    pub up: Shape,
    pub down: Shape,
    /// Boxes follow each other in so many batches: what comes next is under way while what came first is passed on.
    pub batches: u64,
    /// When all links should be done.
    pub bound_s: f64,
}

/// How hosts are told apart that could do the same.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Style {
    /// Everybody in turn: stars where they may be and put no more on any link than paths do. With `follow`, boxes follow each other as streams,
    /// one for every port, where they would take long to fill their paths side by side. `by_nic` they come together at all NICs of a host in turn,
    /// and go from there to the devices that want them: those may share NICs unevenly.
    Turns { stars: bool, follow: bool, by_nic: bool },
    /// By load.
    Balanced(Balanced),
    /// By hosts that want nothing, for sums that few want of many that add; others in turn.
    Served,
}

impl Style {
    /// What is tried first.
    pub(super) const IN_TURN: Self = Self::Turns { stars: true, follow: false, by_nic: false };
}

impl Emitter<'_> {
    /// Emits everything that has to be added up; in blocks what would take `many_pairs` transfers and more piece by piece.
    pub(super) fn sums(
        &mut self,
        max_extra_bytes: Option<u64>,
        style: Style,
        many_pairs: u64,
    ) -> Result<(), PlanError> {
        let demands = self.demands;
        if demands.sums.is_empty() {
            return Ok(());
        }
        let topology = &self.problem.topology;
        let holders: Vec<Holders> = demands.sources.iter().map(|s| Holders::of(s, topology)).collect();
        let few = self.num_transfers() <= MANY_TRANSFERS;
        let (mut between, mut inside) = (vec![], BTreeMap::<HostId, Vec<Cut>>::new());
        let mut sends = vec![0u64; topology.num_hosts()];
        let in_blocks = match max_extra_bytes {
            None => self.sums_in_blocks(&holders, many_pairs),
            Some(_) => vec![false; holders.len()],
        };
        self.are_blocks = in_blocks.iter().all(|done| *done);
        let (style, mut done) = (style, in_blocks);
        if style == Style::Served && max_extra_bytes.is_none() {
            for source in 0..holders.len() {
                if let Some(served) = Served::of(source, &holders[source], self).filter(|_| !done[source]) {
                    self.serve(&served);
                    done[source] = true;
                }
            }
        }
        let style = if style == Style::Served { Style::IN_TURN } else { style };
        let rest = demands.sum_classes.iter().enumerate().filter(|(_, c)| !done[c.source as usize]);
        let mut rest: Vec<(usize, &SumClass)> = rest.collect();
        let mut of_source = vec![(0, 0); holders.len()];
        demands.sum_classes.iter().for_each(|class| of_source[class.source as usize].1 += 1);
        let mut lines: Option<(Vec<Line>, bool)> = match (style, max_extra_bytes) {
            (Style::Turns { follow: true, by_nic, .. }, None) => {
                rest.sort_by_key(|(_, class)| self.place_of_end(class));
                Some((self.lines(&holders, by_nic), by_nic))
            }
            _ => None,
        };
        for (c, class) in rest {
            let place = of_source[class.source as usize];
            of_source[class.source as usize].0 += 1;
            let holders = &holders[class.source as usize];
            let (roots, devices) = match style {
                Style::Turns { by_nic, .. } => self.num_turns(class, holders, few, by_nic),
                Style::Balanced(style) => (self.num_boxes(class, holders, style, place.1), 1),
                Style::Served => (1, 1),
            };
            for &item in &class.items {
                let sum = &demands.sums[item as usize];
                let shares = match &mut lines {
                    // By NIC, a stream has one at those who want it too.
                    Some((lines, true)) => {
                        let shares = lines[class.source as usize].next(sum, 1).into_iter();
                        shares.map(|share| Share { root_turn: share.turn, ..share }).collect()
                    }
                    Some((lines, false)) => lines[class.source as usize].next(sum, self.num_ways(class)),
                    None => {
                        let cuts = cuts(sum, roots * devices, max_extra_bytes).into_iter().enumerate();
                        let share = |(i, region)| {
                            // Roots take turns by their load, devices one turn of all roots after the other.
                            let turn = match (self.many_ports, few) {
                                _ if matches!(style, Style::Balanced(_)) => i,
                                (true, true) => i / roots as usize,
                                (true, false) => c,
                                (false, _) => 0,
                            };
                            Share { region, turn, root_turn: turn }
                        };
                        cuts.map(share).collect()
                    }
                };
                for Share { region, turn, root_turn } in shares {
                    let bytes = region.volume() * (sum.bytes / sum.region.volume());
                    let cut = Draft { sum, region, bytes, place, turn, root_turn, holders };
                    self.sort_cut(cut, &mut sends, &mut between, &mut inside);
                }
            }
        }
        let mut room = self.room(&between, &inside, max_extra_bytes)?;
        self.between_hosts(&between, style, room.as_mut());
        for (host, cuts) in &inside {
            self.inside_host(*host, cuts, room.as_mut());
        }
        Ok(())
    }

    /// Which device of its host the first receiver is. Pieces that end at the devices of one place are a stream, so that it can go past them all:
    /// it enters hosts at the next place and comes by the others before.
    fn place_of_end(&self, class: &SumClass) -> u32 {
        let topology = &self.problem.topology;
        let first = self.demands.set(class.receivers).first().copied().unwrap_or(Rank(0));
        first.0 - topology.ranks_of(topology.host(first)).next().map_or(first.0, |r| r.0)
    }

    /// The pieces of every source as a line.
    fn lines(&self, holders: &[Holders], by_nic: bool) -> Vec<Line> {
        let (mut bytes, mut streams) = (vec![0; holders.len()], vec![1; holders.len()]);
        for class in &self.demands.sum_classes {
            let source = class.source as usize;
            bytes[source] += class.bytes;
            if by_nic {
                streams[source] = self.with_landings(class, streams[source]);
            }
        }
        let lines = holders.iter().zip(bytes).zip(streams);
        lines
            .map(|((holders, bytes), streams)| Line::new(bytes, self.num_streams(holders, streams)))
            .collect()
    }

    /// Emits sums that would take very many transfers piece by piece; says which.
    fn sums_in_blocks(&mut self, holders: &[Holders], many_pairs: u64) -> Vec<bool> {
        let (demands, topology) = (self.demands, &self.problem.topology);
        let mut by_source: Vec<Vec<&SumClass>> = vec![vec![]; holders.len()];
        demands.sum_classes.iter().for_each(|class| by_source[class.source as usize].push(class));
        let mut done = vec![false; holders.len()];
        for (source, classes) in by_source.iter().enumerate() {
            let pairs = classes.len() as u64 * demands.sources[source].parts.len() as u64;
            if pairs < many_pairs {
                continue;
            }
            let one_host = |class: &&SumClass| {
                let receivers = demands.set(class.receivers);
                let host = topology.host(*receivers.first()?);
                receivers.iter().all(|&r| topology.host(r) == host).then_some(host)
            };
            let Some(hosts) = classes.iter().map(one_host).collect::<Option<Vec<HostId>>>() else { continue };
            if let Some(blocks) = Blocks::of(classes, &holders[source], demands, &hosts) {
                self.blocks(&blocks);
                done[source] = true;
            }
        }
        done
    }

    /// How many transfers there will be at least.
    fn num_transfers(&self) -> u64 {
        let of = |class: &SumClass| {
            let source = &self.demands.sources[class.source as usize];
            (source.parts.len() + self.demands.set(class.receivers).len()) as u64 * class.items.len() as u64
        };
        self.demands.sum_classes.iter().map(of).sum()
    }

    /// Receivers on hosts with every part are served there; one of those hosts, or all that have some, serve the rest.
    fn sort_cut<'a>(
        &self,
        cut: Draft<'a>,
        sends: &mut [u64],
        between: &mut Vec<Cut<'a>>,
        inside: &mut BTreeMap<HostId, Vec<Cut<'a>>>,
    ) {
        let topology = &self.problem.topology;
        let mut remote = by_host(self.demands.set(cut.sum.receivers), topology);
        let complete = &cut.holders.complete;
        let mut served: BTreeMap<HostId, Vec<Rank>> = BTreeMap::new();
        for host in complete {
            served.extend(remote.remove(host).map(|ranks| (*host, ranks)));
        }
        if !remote.is_empty() {
            let rate = |h: HostId| self.problem.cluster.hosts[h.index()].out_bytes_per_s();
            let among: Vec<HostId> = if complete.is_empty() {
                remote.keys().copied().collect()
            } else {
                served.keys().copied().collect()
            };
            let cover = cut.holders.cover(&among, |h| sends[h.index()] as f64 / rate(h));
            cover.iter().for_each(|(host, _)| sends[host.index()] += cut.bytes);
            if let [(only, _)] = cover.as_slice() {
                remote.extend(served.remove(only).map(|ranks| (*only, ranks)));
            }
            between.push(cut.with(cover, remote));
        }
        for (host, ranks) in served {
            let parts = cut.holders.hosts[&host].parts.iter().map(|(_, ranks)| ranks.as_slice()).collect();
            inside.entry(host).or_default().push(cut.with(vec![(host, parts)], [(host, ranks)].into()));
        }
    }

    /// Room for the boxes that ranks hold for others, if there is a limit; or why there is not.
    fn room(
        &self,
        between: &[Cut],
        inside: &BTreeMap<HostId, Vec<Cut>>,
        max_extra_bytes: Option<u64>,
    ) -> Result<Option<Room>, PlanError> {
        let Some(limit) = max_extra_bytes else { return Ok(None) };
        let cuts = between.iter().chain(inside.values().flatten());
        let Some(largest) = cuts.filter(|c| c.needs_room()).max_by_key(|c| c.bytes) else { return Ok(None) };
        if largest.bytes > limit {
            let rank = in_turn(&largest.cover[0].1, largest.turn)[0];
            let needed = largest.bytes;
            return Err(PlanError::OverBudget { rank, needed, limit, smallest: needed });
        }
        Ok(Some(Room::new(limit, largest.bytes)))
    }
}
