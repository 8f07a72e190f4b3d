//! Demands: what has to move, with what stays put taken out, and alike things put together.
//!
//! What a device holds never moves. What its host holds moves inside the host. The rest has to enter the host from
//! outside, once. Pieces with the same holders and the same receivers form a [`Class`]; planning decides per class.
//!
//! ```text
//! piece   holders r0 r4      on hosts h0 h1
//!         receivers r4 r5 r8 r9
//!           r4  holds it already
//!           r5  gets it from r4, inside h1          a local class of h1
//!           r8 r9  on h2: it enters h2 once          a remote class, h0 h1 -> h2
//! ```

use rustc_hash::FxHashMap;

use crate::cluster::Topology;
use crate::id::{HostId, Rank};
use crate::region::Region;

use super::pieces::{Pieces, Tile};
use super::problem::{PlanError, Problem};

/// A set of ranks, kept once however many pieces share it.
pub(crate) type RankSet = u32;

/// A piece that has to move.
#[derive(Debug, Clone)]
pub(crate) struct Item {
    pub tensor: u32,
    pub region: Region,
    pub bytes: u64,
    pub holders: RankSet,
    /// Receivers that do not hold it.
    pub wanters: RankSet,
}

/// Items that the same nodes hold and the same nodes want. Nodes are hosts between hosts, and ranks inside one.
#[derive(Debug, Clone, Default)]
pub(crate) struct Class {
    pub bytes: u64,
    pub holders: Vec<u32>,
    pub receivers: Vec<u32>,
    /// Indices of items; those of a remote class with the same holders and wanters lie side by side.
    pub items: Vec<u32>,
}

/// A piece of a partial sum: its parts are held in different places and have to be combined.
#[derive(Debug, Clone)]
pub(crate) struct SumItem {
    pub tensor: u32,
    pub region: Region,
    pub bytes: u64,
    pub receivers: RankSet,
}

/// The holders of every part of a partial sum: the same for all pieces of a tile.
#[derive(Debug, Clone, Default)]
pub(crate) struct SumSource {
    pub parts: Vec<Vec<Rank>>,
}

/// Pieces of sums with the same parts and the same receivers.
#[derive(Debug, Clone)]
pub(crate) struct SumClass {
    pub bytes: u64,
    /// Whose parts: an index into [`Demands::sources`].
    pub source: u32,
    pub receivers: RankSet,
    /// Indices of sums.
    pub items: Vec<u32>,
}

/// Everything that has to move.
#[derive(Debug, Default)]
pub(crate) struct Demands {
    pub items: Vec<Item>,
    pub sums: Vec<SumItem>,
    pub sources: Vec<SumSource>,
    pub sum_classes: Vec<SumClass>,
    pub sets: Vec<Vec<Rank>>,
    /// Between hosts: nodes are host ids.
    pub remote: Vec<Class>,
    /// Inside hosts: nodes are ranks.
    pub local: Vec<Class>,
}

impl Demands {
    pub(crate) fn of(problem: &Problem) -> Result<Self, PlanError> {
        let mut demands = Demands::default();
        let mut sets: FxHashMap<Vec<Rank>, RankSet> = FxHashMap::default();
        for (tensor, reshard) in problem.reshards.iter().enumerate() {
            let pieces = Pieces::of(reshard)?;
            let width = reshard.src.layout.dtype().bytes();
            if reshard.src.layout.num_contributions() > 1 {
                demands.add_sums(tensor as u32, pieces, width, &mut sets);
            } else {
                demands.add_items(tensor as u32, pieces, width, &mut sets);
            }
        }
        demands.classify(&problem.topology);
        for class in &mut demands.remote {
            let items = &demands.items;
            class.items.sort_by_key(|&i| (items[i as usize].holders, items[i as usize].wanters));
        }
        Ok(demands)
    }

    pub(crate) fn set(&self, set: RankSet) -> &[Rank] {
        &self.sets[set as usize]
    }

    fn add_items(
        &mut self,
        tensor: u32,
        pieces: Pieces,
        width: u64,
        sets: &mut FxHashMap<Vec<Rank>, RankSet>,
    ) {
        let src: Vec<RankSet> =
            pieces.src_tiles.iter().map(|t| intern(sorted(t), sets, &mut self.sets)).collect();
        let dst: Vec<RankSet> =
            pieces.dst_tiles.iter().map(|t| intern(sorted(t), sets, &mut self.sets)).collect();
        let ranks = |tiles: &[Tile]| {
            tiles.iter().flat_map(|t| t.ranks.iter().copied()).collect::<rustc_hash::FxHashSet<_>>()
        };
        let apart = ranks(&pieces.src_tiles).is_disjoint(&ranks(&pieces.dst_tiles));
        let mut overlaps: FxHashMap<(RankSet, RankSet), RankSet> = FxHashMap::default();
        for piece in pieces.pieces {
            let (holders, wanted_by) = (src[piece.src_tile as usize], dst[piece.dst_tile as usize]);
            let wanters = match apart {
                true => wanted_by,
                false => *overlaps.entry((holders, wanted_by)).or_insert_with(|| {
                    let held = &self.sets[holders as usize];
                    let rest = self.sets[wanted_by as usize].iter().copied();
                    let rest = rest.filter(|r| held.binary_search(r).is_err()).collect();
                    intern(rest, sets, &mut self.sets)
                }),
            };
            if !self.sets[wanters as usize].is_empty() {
                let bytes = piece.region.volume() * width;
                self.items.push(Item { tensor, region: piece.region, bytes, holders, wanters });
            }
        }
    }

    fn add_sums(
        &mut self,
        tensor: u32,
        pieces: Pieces,
        width: u64,
        sets: &mut FxHashMap<Vec<Rank>, RankSet>,
    ) {
        let first_source = self.sources.len() as u32;
        self.sources.extend(pieces.src_tiles.iter().map(SumSource::of));
        let dst: Vec<RankSet> =
            pieces.dst_tiles.iter().map(|t| intern(sorted(t), sets, &mut self.sets)).collect();
        let mut classes: FxHashMap<(u32, RankSet), u32> = FxHashMap::default();
        for piece in pieces.pieces {
            let (source, receivers) = (first_source + piece.src_tile, dst[piece.dst_tile as usize]);
            let bytes = piece.region.volume() * width;
            let class = *classes.entry((source, receivers)).or_insert_with(|| {
                self.sum_classes.push(SumClass { bytes: 0, source, receivers, items: vec![] });
                self.sum_classes.len() as u32 - 1
            });
            let class = &mut self.sum_classes[class as usize];
            class.bytes += bytes;
            class.items.push(self.sums.len() as u32);
            self.sums.push(SumItem { tensor, region: piece.region, bytes, receivers });
        }
    }

    /// Sorts the items into classes, in order of first appearance.
    fn classify(&mut self, topology: &Topology) {
        let mut hosts: FxHashMap<RankSet, HostSets> = FxHashMap::default();
        let mut remote: FxHashMap<(Vec<u32>, Vec<u32>), u32> = FxHashMap::default();
        let mut local: FxHashMap<(Vec<u32>, Vec<u32>), u32> = FxHashMap::default();
        // Pieces of one pair of sets are all alike: look the pair up, not its ranks.
        let mut known: FxHashMap<(RankSet, RankSet), Vec<(bool, u32)>> = FxHashMap::default();
        // Sets with no host in common are alike if only their hosts are, and of those there are far fewer.
        let names = HostNames::of(&self.sets, topology);
        let mut apart: FxHashMap<(u32, u32), Option<u32>> = FxHashMap::default();
        for (index, item) in self.items.iter().enumerate() {
            let pair = (names.of_set[item.holders as usize], names.of_set[item.wanters as usize]);
            let class = *apart.entry(pair).or_insert_with(|| {
                let (holders, wanters) = (&names.hosts[pair.0 as usize], &names.hosts[pair.1 as usize]);
                let is_apart = !wanters.iter().any(|h| holders.binary_search(h).is_ok());
                is_apart.then(|| class_of((holders.clone(), wanters.clone()), &mut remote, &mut self.remote))
            });
            if let Some(class) = class {
                self.remote[class as usize].items.push(index as u32);
                self.remote[class as usize].bytes += item.bytes;
                continue;
            }
            let places = known.entry((item.holders, item.wanters)).or_insert_with(|| {
                for set in [item.holders, item.wanters] {
                    hosts.entry(set).or_insert_with(|| HostSets::of(&self.sets[set as usize], topology));
                }
                let (holders, wanters) = (&hosts[&item.holders], &hosts[&item.wanters]);
                let mut places = Vec::new();
                let away: Vec<u32> =
                    wanters.ids().filter(|h| !holders.ranks.contains_key(h)).map(|h| h.0).collect();
                if !away.is_empty() {
                    let key = (holders.ids().map(|h| h.0).collect(), away);
                    places.push((true, class_of(key, &mut remote, &mut self.remote)));
                }
                for host in wanters.ids().filter(|h| holders.ranks.contains_key(h)) {
                    let on = |sets: &HostSets| sets.ranks[&host].iter().map(|r| r.0).collect::<Vec<u32>>();
                    places.push((false, class_of((on(holders), on(wanters)), &mut local, &mut self.local)));
                }
                places
            });
            for &(is_remote, class) in places.iter() {
                let classes = if is_remote { &mut self.remote } else { &mut self.local };
                classes[class as usize].items.push(index as u32);
                classes[class as usize].bytes += item.bytes;
            }
        }
    }
}

impl SumSource {
    fn of(tile: &Tile) -> Self {
        let num_parts = tile.contributions.iter().max().map_or(0, |&c| c as usize + 1);
        let mut parts = vec![Vec::new(); num_parts];
        for (rank, part) in tile.ranks.iter().zip(&tile.contributions) {
            parts[*part as usize].push(*rank);
        }
        parts.iter_mut().for_each(|p| p.sort_unstable());
        Self { parts }
    }
}

/// The number of a set of ranks, a new one if it is new.
fn intern(ranks: Vec<Rank>, sets: &mut FxHashMap<Vec<Rank>, RankSet>, all: &mut Vec<Vec<Rank>>) -> RankSet {
    *sets.entry(ranks).or_insert_with_key(|ranks| {
        all.push(ranks.clone());
        all.len() as u32 - 1
    })
}

fn sorted(tile: &Tile) -> Vec<Rank> {
    let mut ranks = tile.ranks.clone();
    ranks.sort_unstable();
    ranks
}

fn class_of(
    key: (Vec<u32>, Vec<u32>),
    known: &mut FxHashMap<(Vec<u32>, Vec<u32>), u32>,
    classes: &mut Vec<Class>,
) -> u32 {
    *known.entry(key).or_insert_with_key(|(holders, receivers)| {
        classes.push(Class { holders: holders.clone(), receivers: receivers.clone(), ..Class::default() });
        classes.len() as u32 - 1
    })
}

/// The hosts of every rank set; sets on the same hosts have the same number.
struct HostNames {
    of_set: Vec<u32>,
    /// By number, rising.
    hosts: Vec<Vec<u32>>,
}

impl HostNames {
    fn of(sets: &[Vec<Rank>], topology: &Topology) -> Self {
        let mut known: FxHashMap<Vec<u32>, u32> = FxHashMap::default();
        let mut hosts = Vec::new();
        let name = |set: &Vec<Rank>| {
            let mut on: Vec<u32> = set.iter().map(|rank| topology.host(*rank).0).collect();
            on.sort_unstable();
            on.dedup();
            *known.entry(on).or_insert_with_key(|on| {
                hosts.push(on.clone());
                hosts.len() as u32 - 1
            })
        };
        let of_set = sets.iter().map(name).collect();
        Self { of_set, hosts }
    }
}

/// A rank set, by host.
struct HostSets {
    ranks: std::collections::BTreeMap<HostId, Vec<Rank>>,
}

impl HostSets {
    fn of(ranks: &[Rank], topology: &Topology) -> Self {
        let mut by_host: std::collections::BTreeMap<HostId, Vec<Rank>> = Default::default();
        for &rank in ranks {
            by_host.entry(topology.host(rank)).or_default().push(rank);
        }
        Self { ranks: by_host }
    }

    fn ids(&self) -> impl Iterator<Item = HostId> + '_ {
        self.ranks.keys().copied()
    }
}
