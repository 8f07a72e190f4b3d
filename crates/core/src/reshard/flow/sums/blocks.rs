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
//!
//! Where uplinks are in the way, what a host has joins the [`chains`](super::chains) of its group. There the last device of
//! a host that adds does so piece by piece: what arrives from the host before is such a piece, and is passed on while it
//! arrives.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use crate::id::{HostId, Rank, RegionId, TransferId};
use crate::region::{Region, Span};

use super::super::super::demand::{Demands, SumClass};
use super::super::emit::Emitter;
use super::chains::{Chain, chains};
use super::holders::Holders;
use super::rails::Rails;

/// Fewer transfers than this are no reason to put pieces together.
pub(in super::super) const MANY_PAIRS: u64 = 200_000;

/// Small boxes would all be sent for at once; they come one after the other instead.
const GATED_BYTES: u64 = 64 << 10;

/// So many boxes are on their way along chains from a host while the next one begins. Where all groups are alike, all keep step
/// with one; with more, what is wanted last takes from what is wanted first: 118 hosts of 5 in racks of 2, 1.5 x, take 1.05 of the
/// bound with one, 1.12 with two, 1.16 with four, 1.27 with eight.
const UNDER_WAY: usize = 1;
/// Where groups are not alike, nobody keeps step: 104 hosts of 5 in racks of 3 and one of 2 take 1.50 with one, 1.14 with four.
const UNDER_WAY_UNEVEN: usize = 4;

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
    pub(super) tensor: u32,
    /// In the order of their boxes.
    wanted: Vec<Wanted>,
    /// By place in `wanted`: the host's devices with a part.
    pub(super) devices: Vec<Vec<Rank>>,
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

    /// The hosts that want something, in the order of their boxes.
    pub(super) fn hosts(&self) -> impl Iterator<Item = HostId> {
        self.wanted.iter().map(|w| w.host)
    }

    /// What the host at a place wants.
    pub(super) fn region(&self, place: usize) -> &Region {
        &self.wanted[place].region
    }

    /// The same by who wants it there.
    pub(super) fn pieces(&self, place: usize) -> Vec<(Region, Vec<Rank>)> {
        self.wanted[place].halves.iter().flat_map(|half| half.items.iter().cloned()).collect()
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

/// A rank that has a sum, and what brought it there, if anything did.
type Has = (Rank, Option<TransferId>);

/// What a host has of what another one wants.
#[derive(Clone, Copy)]
struct HostSum {
    at: Rank,
    since: Option<TransferId>,
    /// What its other devices have, where that is still to be added.
    rest: Option<Has>,
}

/// What hosts have sent to other groups, in order; and how often each has begun a chain. Devices of a host count as one: it is
/// their NIC that is kept from too much at a time, and a word from one to the next is rare, since they take turns block by
/// block.
#[derive(Default)]
struct Ends {
    /// So many boxes may be on their way from a host.
    under_way: usize,
    sent: FxHashMap<HostId, Vec<TransferId>>,
    begun: FxHashMap<HostId, usize>,
}

impl Ends {
    /// What has to be over before a host begins another chain.
    fn before(&mut self, host: HostId) -> Option<TransferId> {
        let begun = self.begun.entry(host).or_default();
        *begun += 1;
        self.sent.get(&host)?.get(begun.checked_sub(self.under_way + 1)?).copied()
    }
}

/// How many boxes may be on their way along chains from a host.
fn under_way(chains: &[Vec<Chain>]) -> usize {
    let lengths = |chains: &Vec<Chain>| -> Vec<usize> { chains.iter().map(|c| c.hosts.len()).collect() };
    match chains.windows(2).all(|w| lengths(&w[0]) == lengths(&w[1])) {
        true => UNDER_WAY,
        false => UNDER_WAY_UNEVEN,
    }
}

impl Emitter<'_> {
    pub(super) fn blocks(&mut self, blocks: &Blocks) {
        let hosts: Vec<HostId> = blocks.wanted.iter().map(|w| w.host).collect();
        let chains = chains(&hosts, &self.problem.cluster, &self.problem.topology);
        let are_alone = chains.iter().flatten().all(|chain| chain.hosts.len() == 1);
        if let Some(rails) = Rails::of(blocks, self) {
            return self.along_rails(blocks, &rails);
        }
        let sums = self.host_sums(blocks, are_alone);
        let mut arrived: Vec<Vec<Vec<TransferId>>> =
            blocks.wanted.iter().map(|w| vec![vec![]; w.halves.len()]).collect();
        let regions: Vec<Vec<_>> = blocks.wanted.iter().map(|w| self.half_regions(w)).collect();
        let mut ends = Ends { under_way: under_way(&chains), ..Ends::default() };
        for step in 0..chains.iter().map(Vec::len).max().unwrap_or(0) {
            for (to, wanted) in blocks.wanted.iter().enumerate() {
                let Some(chain) = chains[to].get(step) else { continue };
                for (h, half) in wanted.halves.iter().enumerate() {
                    let hosts = chain
                        .hosts
                        .iter()
                        .map(|&place| sums[place][to].expect("every other host has a block for it"));
                    let hosts: Vec<HostSum> = hosts.collect();
                    let (from, after) = self.along_chain(blocks.tensor, &hosts, regions[to][h], &mut ends);
                    let id =
                        self.collect(blocks.tensor, from, half, regions[to][h], after, &mut arrived[to][h]);
                    if chain.leaves_group {
                        ends.sent.entry(self.problem.topology.host(from)).or_default().push(id);
                    }
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

    /// By host that has something and host that wants it, both by place.
    fn host_sums(&mut self, blocks: &Blocks, are_alone: bool) -> Vec<Vec<Option<HostSum>>> {
        let count = blocks.wanted.len();
        let mut sums = vec![vec![None; count]; count];
        for (place, row) in sums.iter_mut().enumerate() {
            for (turn, (region, group)) in blocks.groups(place).expect("it was tried").into_iter().enumerate()
            {
                let devices = turned(&blocks.devices[place], turn + 1);
                let last = devices.len() - 1;
                let sum = match are_alone || last == 0 {
                    true => {
                        let (at, since) = self.add_block(blocks.tensor, &devices, region);
                        HostSum { at, since, rest: None }
                    }
                    false => {
                        let rest = self.add_block(blocks.tensor, &devices[..last], region);
                        HostSum { at: devices[last], since: None, rest: Some(rest) }
                    }
                };
                group.for_each(|to| row[to] = Some(sum));
            }
        }
        sums
    }

    /// Adds a box up along hosts; says who has it then, and what has to be over.
    fn along_chain(
        &mut self,
        tensor: u32,
        hosts: &[HostSum],
        region: RegionId,
        ends: &mut Ends,
    ) -> (Rank, Vec<TransferId>) {
        let mut sent: Option<(Rank, Vec<TransferId>)> = None;
        for (place, &HostSum { at, since, rest }) in hosts.iter().enumerate() {
            // What comes last is followed.
            let mut after: Vec<TransferId> = since.into_iter().collect();
            if let Some((device, since)) = rest {
                after.push(self.add_up(tensor, (device, at), region, since.as_slice()));
            }
            if let Some((from, mut before)) = sent {
                if place == 1 {
                    before.extend(ends.before(self.problem.topology.host(from)));
                }
                let id = self.add_up(tensor, (from, at), region, &before);
                self.alone.push(id);
                after.insert(0, id);
            }
            sent = Some((at, after));
        }
        sent.expect("a chain has hosts")
    }

    pub(super) fn add_up(
        &mut self,
        tensor: u32,
        (from, to): (Rank, Rank),
        region: RegionId,
        after: &[TransferId],
    ) -> TransferId {
        let id = self.plan.add(tensor, from, to, region, after);
        self.plan.transfer_mut(id).reduce = true;
        id
    }

    /// Adds a block up along devices of a host; the last one has it.
    fn add_block(&mut self, tensor: u32, devices: &[Rank], region: Region) -> Has {
        let region = self.plan.add_region(region);
        let mut since = None;
        for ends in devices.windows(2) {
            since = Some(self.add_up(tensor, (ends[0], ends[1]), region, since.as_slice()));
        }
        (devices[devices.len() - 1], since)
    }

    fn half_regions(&mut self, wanted: &Wanted) -> Vec<RegionId> {
        wanted.halves.iter().map(|half| self.plan.add_region(half.region.clone())).collect()
    }

    fn collect(
        &mut self,
        tensor: u32,
        from: Rank,
        half: &Half,
        region: RegionId,
        mut after: Vec<TransferId>,
        arrived: &mut Vec<TransferId>,
    ) -> TransferId {
        let width = self.problem.reshards[tensor as usize].src.layout.dtype().bytes();
        if half.region.volume() * width <= GATED_BYTES {
            after.extend(arrived.last());
        }
        let id = self.add_up(tensor, (from, half.collector), region, &after);
        arrived.push(id);
        id
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

pub(super) fn turned(devices: &[Rank], turn: usize) -> Vec<Rank> {
    let mut devices = devices.to_vec();
    let count = devices.len();
    devices.rotate_left(turn % count);
    devices
}

fn starts(region: &Region) -> Vec<u64> {
    region.spans().iter().map(|span| span.start).collect()
}

/// The box that these boxes fill; `None` if they leave gaps.
pub(super) fn union<'a>(regions: impl Iterator<Item = &'a Region> + Clone) -> Option<Region> {
    let mut spans: Vec<Span> = regions.clone().next()?.spans().to_vec();
    for region in regions.clone() {
        for (span, other) in spans.iter_mut().zip(region.spans()) {
            *span = Span::new(span.start.min(other.start), span.end.max(other.end));
        }
    }
    let whole = Region::new(spans);
    (regions.map(Region::volume).sum::<u64>() == whole.volume()).then_some(whole)
}
