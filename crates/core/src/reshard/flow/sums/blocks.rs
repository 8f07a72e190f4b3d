//! Reduce-scatters over very many devices, in few transfers.
//!
//! With a star for every piece, `n` devices take `n * n` transfers. Instead every host adds up large blocks among its
//! devices, and sends what each other host wants out of them, in one box or two. There a *collector* adds up what comes
//! from all hosts, and hands it out to its neighbours:
//!
//! ```text
//! rows wanted on   h0 h0 | h1 h1 | h2 h2 | h3 h3       hosts with devices a and b
//! h0 adds up               [ block, at a ] [ b ]
//! h0.a -> h1.b  the first of h1's rows, h0.a -> h1.a  the second; so does everybody
//! h1.b -> h1.a  the first row, once all have come;   h1.a -> h1.b  the second
//! ```
//!
//! A collector does not collect what it wants itself: boxes that parts of a sum arrive in on one rank do not cross.

use std::collections::BTreeMap;

use crate::id::{HostId, Rank, TransferId};
use crate::region::{Region, Span};

use super::super::super::demand::{Demands, SumClass};
use super::super::emit::Emitter;
use super::holders::Holders;

/// Fewer transfers than this are no reason to put pieces together.
pub(super) const MANY_PAIRS: u64 = 200_000;

/// Small boxes would all be sent for at once; they come one after the other instead.
const GATED_BYTES: u64 = 64 << 10;

/// What is added up at one rank for its host.
struct Half {
    collector: Rank,
    region: Region,
    /// Boxes with who wants them.
    items: Vec<(Region, Vec<Rank>)>,
}

/// What a host wants of a sum.
struct Wanted {
    host: HostId,
    region: Region,
    halves: Vec<Half>,
}

/// A sum whose pieces are wanted on one host each, all of which have parts.
pub(super) struct Blocks {
    tensor: u32,
    /// In the order of their boxes.
    wanted: Vec<Wanted>,
    /// By place in `wanted`: the host's devices with a part.
    devices: Vec<Vec<Rank>>,
}

impl Blocks {
    /// `None` where pieces do not fit together in this way.
    pub(super) fn of(
        classes: &[&SumClass],
        holders: &Holders,
        demands: &Demands,
        hosts: &[HostId],
    ) -> Option<Self> {
        let mut by_host: BTreeMap<HostId, Vec<(Region, Vec<Rank>)>> = BTreeMap::new();
        let first = &demands.sums[*classes.first()?.items.first()? as usize];
        for (class, &host) in classes.iter().zip(hosts) {
            for &item in &class.items {
                let sum = &demands.sums[item as usize];
                let receivers = demands.set(sum.receivers).to_vec();
                by_host.entry(host).or_default().push((sum.region.clone(), receivers));
            }
        }
        let mut wanted: Vec<Wanted> =
            by_host.into_iter().map(|(host, items)| Wanted::of(host, items)).collect::<Option<_>>()?;
        wanted.sort_by_key(|w| starts(&w.region));
        let one_rank = |host: &HostId| -> Option<Vec<Rank>> {
            let on_host = holders.hosts.get(host)?;
            on_host.parts.iter().map(|(_, ranks)| (ranks.len() == 1).then(|| ranks[0])).collect()
        };
        let devices = wanted.iter().map(|w| one_rank(&w.host)).collect::<Option<Vec<_>>>()?;
        let blocks = Self { tensor: first.tensor, wanted, devices };
        let everybody = holders.hosts.len() == blocks.wanted.len() && holders.complete.is_empty();
        let fits = || (0..blocks.wanted.len()).all(|place| blocks.groups(place).is_some());
        (everybody && fits()).then_some(blocks)
    }

    /// What a host adds up for others: boxes, each of the hosts at consecutive places, one or two for every device.
    fn groups(&self, place: usize) -> Option<Vec<(Region, std::ops::Range<usize>)>> {
        let (count, devices) = (self.wanted.len(), self.devices[place].len());
        let size = (count - 1).div_ceil(devices).max(1);
        let mut groups = vec![];
        for run in [0..place, place + 1..count] {
            let mut start = run.start;
            while start < run.end {
                let group = start..(start + size).min(run.end);
                let region = union(self.wanted[group.clone()].iter().map(|w| &w.region))?;
                start = group.end;
                groups.push((region, group));
            }
        }
        Some(groups)
    }
}

impl Wanted {
    fn of(host: HostId, mut items: Vec<(Region, Vec<Rank>)>) -> Option<Self> {
        items.sort_by_key(|(region, _)| starts(region));
        let region = union(items.iter().map(|(region, _)| region))?;
        if items.len() == 1 {
            let collector = *items[0].1.first()?;
            let half = Half { collector, region: region.clone(), items };
            return Some(Self { host, region, halves: vec![half] });
        }
        let second = items.split_off(items.len() / 2);
        let collectors = (*second[0].1.first()?, *items[0].1.first()?);
        let half = |collector: Rank, items: Vec<(Region, Vec<Rank>)>| {
            let wants_it = items.iter().any(|(_, ranks)| ranks.contains(&collector));
            let region = union(items.iter().map(|(region, _)| region))?;
            (!wants_it).then_some(Half { collector, region, items })
        };
        let halves = vec![half(collectors.0, items)?, half(collectors.1, second)?];
        Some(Self { host, region, halves })
    }
}

impl Emitter<'_> {
    pub(super) fn blocks(&mut self, blocks: &Blocks) {
        let count = blocks.wanted.len();
        // By sending host and wanting host: who has the host's sum, and since when.
        let mut has = vec![vec![None; count]; count];
        for (place, row) in has.iter_mut().enumerate() {
            for (g, (region, group)) in blocks.groups(place).expect("it was tried").into_iter().enumerate() {
                let at = self.add_block(blocks.tensor, &blocks.devices[place], g, region);
                group.for_each(|to| row[to] = Some(at));
            }
        }
        let mut arrived: Vec<Vec<Vec<TransferId>>> =
            blocks.wanted.iter().map(|w| vec![vec![]; w.halves.len()]).collect();
        let regions: Vec<Vec<_>> = blocks.wanted.iter().map(|w| self.half_regions(w)).collect();
        for step in 1..count {
            for (to, wanted) in blocks.wanted.iter().enumerate() {
                let (from, since) =
                    has[(to + step) % count][to].expect("every other host has a block for it");
                for (h, half) in wanted.halves.iter().enumerate() {
                    let after: Vec<TransferId> = Option::into_iter(since).collect();
                    self.collect(blocks.tensor, from, half, regions[to][h], after, &mut arrived[to][h]);
                }
            }
        }
        for (to, wanted) in blocks.wanted.iter().enumerate() {
            for (h, half) in wanted.halves.iter().enumerate() {
                let neighbours = blocks.devices[to].iter().filter(|&&r| r != half.collector);
                for &from in neighbours {
                    self.collect(blocks.tensor, from, half, regions[to][h], vec![], &mut arrived[to][h]);
                }
                self.hand_out(blocks.tensor, half, &arrived[to][h]);
            }
        }
    }

    /// Adds a block up along the devices of a host; the last one has it.
    fn add_block(
        &mut self,
        tensor: u32,
        devices: &[Rank],
        turn: usize,
        region: Region,
    ) -> (Rank, Option<TransferId>) {
        let region = self.plan.add_region(region);
        let at = |i: usize| devices[(turn + 1 + i) % devices.len()];
        let mut since = None;
        for i in 1..devices.len() {
            let id = self.plan.add(tensor, at(i - 1), at(i), region, since.as_slice());
            self.plan.transfer_mut(id).reduce = true;
            since = Some(id);
        }
        (at(devices.len() - 1), since)
    }

    fn half_regions(&mut self, wanted: &Wanted) -> Vec<crate::id::RegionId> {
        wanted.halves.iter().map(|half| self.plan.add_region(half.region.clone())).collect()
    }

    fn collect(
        &mut self,
        tensor: u32,
        from: Rank,
        half: &Half,
        region: crate::id::RegionId,
        mut after: Vec<TransferId>,
        arrived: &mut Vec<TransferId>,
    ) {
        let width = self.problem.reshards[tensor as usize].src.layout.dtype().bytes();
        if half.region.volume() * width <= GATED_BYTES {
            after.extend(arrived.last());
        }
        let id = self.plan.add(tensor, from, half.collector, region, &after);
        self.plan.transfer_mut(id).reduce = true;
        arrived.push(id);
    }

    fn hand_out(&mut self, tensor: u32, half: &Half, arrived: &[TransferId]) {
        for (region, receivers) in &half.items {
            let region = self.plan.add_region(region.clone());
            let (mut from, mut after) = (half.collector, arrived.to_vec());
            for &to in receivers.iter().filter(|&&r| r != half.collector) {
                let id = self.plan.add(tensor, from, to, region, &after);
                (from, after) = (to, vec![id]);
            }
        }
    }
}

fn starts(region: &Region) -> Vec<u64> {
    region.spans().iter().map(|span| span.start).collect()
}

/// The box that these boxes fill; `None` if they leave gaps.
fn union<'a>(regions: impl Iterator<Item = &'a Region> + Clone) -> Option<Region> {
    let mut spans: Vec<Span> = regions.clone().next()?.spans().to_vec();
    for region in regions.clone() {
        for (span, other) in spans.iter_mut().zip(region.spans()) {
            *span = Span::new(span.start.min(other.start), span.end.max(other.end));
        }
    }
    let whole = Region::new(spans);
    (regions.map(Region::volume).sum::<u64>() == whole.volume()).then_some(whole)
}
