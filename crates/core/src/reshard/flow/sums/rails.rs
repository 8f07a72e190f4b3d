//! Reduce-scatters over very many devices, by all NICs of a host at a time.
//!
//! Hosts stand in a ring. What a host has for those ahead of it is shared out over its NICs, a run of the ring for each: a *rail*. In every
//! step a NIC sends to the next host of its run and takes in from one, by the same rail, so that all keep step.
//!
//! ```text
//! hosts h0 to h6, two NICs      rail 0: the next three hosts     h0.a -> h1.a,  then h0.a -> h2.a,  then h0.a -> h3.a
//!                               rail 1: the three behind them    h0.b -> h4.b,  then h0.b -> h5.b,  then h0.b -> h6.b
//! ```
//!
//! The device that a box comes in by adds it up for its host, and hands it out in the end. It takes in what it wants itself in a box of its own,
//! since its neighbours add to that too: boxes that parts of a sum arrive in on one rank do not cross.
//!
//! What is sent first is added up inside the host chunk by chunk; what comes later while the boxes before are under way, so more of it in one box.

use crate::id::{HostId, Rank, RegionId, TransferId};
use crate::region::Region;

use super::super::emit::Emitter;
use super::blocks::{Blocks, turned, union};
use super::holders::nics;

/// A box of what a host wants, as one of its devices takes it in.
struct Cell {
    region: RegionId,
    /// Which pieces of the host are in it.
    pieces: std::ops::Range<usize>,
    /// What has arrived last.
    last: Option<TransferId>,
}

/// What a host has to send by one of its NICs.
struct Rail {
    at: Rank,
    /// Who wants it, by place, in the order in which they get it.
    to: Vec<usize>,
    /// How many of them follow each other whose boxes are added up as one.
    groups: Vec<usize>,
    /// The last transfer that has left.
    sent: Option<TransferId>,
    /// Since when what is sent next is added up, if it is in one box with others.
    since: Option<TransferId>,
}

/// Where every host has the same number of NICs, and parts and pieces on the devices beside them.
pub(super) struct Rails {
    /// By place: a device for every NIC.
    nics: Vec<Vec<Rank>>,
}

impl Rails {
    pub(super) fn of(blocks: &Blocks, emitter: &Emitter) -> Option<Self> {
        let topology = &emitter.problem.topology;
        if topology.num_tiers() > 0 {
            return None;
        }
        let by_place: Vec<Vec<Rank>> = blocks.hosts().map(|host: HostId| nics(topology, host)).collect();
        let count = by_place.first()?.len();
        let fits = (0..by_place.len()).all(|place| {
            let devices = &blocks.devices[place];
            let pieces = blocks.pieces(place);
            by_place[place].len() == count
                && by_place[place].iter().all(|rank| devices.contains(rank))
                && pieces.iter().all(|(_, ranks)| ranks.len() == 1 && devices.contains(&ranks[0]))
        });
        fits.then_some(Self { nics: by_place })
    }
}

impl Emitter<'_> {
    pub(super) fn along_rails(&mut self, blocks: &Blocks, rails: &Rails) {
        let count = rails.nics.len();
        let num_rails = rails.nics[0].len();
        // By place and device of the host: the boxes it takes in.
        let mut cells: Vec<Vec<Vec<Cell>>> = (0..count)
            .map(|place| {
                let devices = &blocks.devices[place];
                devices.iter().map(|&device| self.cells(blocks, place, device)).collect()
            })
            .collect();
        let mut all: Vec<Vec<Rail>> = (0..count)
            .map(|place| (0..num_rails).map(|rail| rail_of(place, rail, rails)).collect())
            .collect();
        let steps = all.iter().flatten().map(|rail| rail.to.len()).max().unwrap_or(0);
        // By place and rail: what has come in last.
        let mut taken: Vec<Vec<Option<TransferId>>> = vec![vec![None; num_rails]; count];
        for step in 0..steps {
            for rail in 0..num_rails {
                for (place, own) in all.iter_mut().enumerate() {
                    let of = &mut own[rail];
                    let Some(&to) = of.to.get(step) else { continue };
                    let collector = rails.nics[to][rail];
                    let device = index_of(&blocks.devices[to], collector);
                    let is_streamed = self.add_up_for(blocks, place, step, of);
                    let (sent, came) = (of.sent, taken[to][rail]);
                    for cell in &mut cells[to][device] {
                        let since = match is_streamed {
                            true => self.chain(blocks, place, of.at, cell.region),
                            false => of.since,
                        };
                        let after: Vec<TransferId> = since.into_iter().chain(sent).chain(came).collect();
                        let id = self.add_up(blocks.tensor, (of.at, collector), cell.region, &after);
                        cell.last = Some(id);
                        of.sent = Some(id);
                        taken[to][rail] = Some(id);
                    }
                }
            }
        }
        for (place, cells) in cells.iter().enumerate() {
            self.hand_over(blocks, place, cells);
        }
    }

    /// What a host wants as boxes that arrive at one of its devices: what that one wants itself is apart.
    fn cells(&mut self, blocks: &Blocks, place: usize, device: Rank) -> Vec<Cell> {
        let pieces = blocks.pieces(place);
        let mut cells = vec![];
        let mut start = 0;
        for run in pieces.chunk_by(|a, b| a.1[0] != device && b.1[0] != device) {
            let whole = union(run.iter().map(|(region, _)| region));
            let each = |i: usize| (run[i].0.clone(), start + i..start + i + 1);
            let boxes: Vec<(Region, std::ops::Range<usize>)> = match whole {
                Some(whole) => vec![(whole, start..start + run.len())],
                None => (0..run.len()).map(each).collect(),
            };
            start += run.len();
            for (region, pieces) in boxes {
                cells.push(Cell { region: self.plan.add_region(region), pieces, last: None });
            }
        }
        cells
    }

    /// Adds up what a host sends in this step and in those after it, where that is due; whether it is added up box by box instead.
    fn add_up_for(&mut self, blocks: &Blocks, place: usize, step: usize, of: &mut Rail) -> bool {
        let mut first = 0;
        for &size in &of.groups {
            if first == step && size > 1 {
                let wanted = of.to[first..first + size].iter().map(|&to| blocks.region(to));
                let region = union(wanted).expect("it was tried");
                let region = self.plan.add_region(region);
                of.since = self.chain(blocks, place, of.at, region);
            }
            if (first..first + size).contains(&step) {
                return size == 1;
            }
            first += size;
        }
        true
    }

    /// Adds a box up along the devices of a host; `at` has it then.
    fn chain(&mut self, blocks: &Blocks, place: usize, at: Rank, region: RegionId) -> Option<TransferId> {
        let devices = &blocks.devices[place];
        let devices = turned(devices, index_of(devices, at) + 1);
        let mut since = None;
        for ends in devices.windows(2) {
            since = Some(self.add_up(blocks.tensor, (ends[0], ends[1]), region, since.as_slice()));
        }
        since
    }

    /// Every device of a host gives the others what it has of what they want.
    fn hand_over(&mut self, blocks: &Blocks, place: usize, cells: &[Vec<Cell>]) {
        for (piece, (region, ranks)) in blocks.pieces(place).into_iter().enumerate() {
            let region = self.plan.add_region(region);
            for (from, cells) in
                blocks.devices[place].iter().zip(cells).filter(|(from, _)| **from != ranks[0])
            {
                let cell = cells.iter().find(|cell| cell.pieces.contains(&piece));
                let last = cell.and_then(|cell| cell.last);
                self.add_up(blocks.tensor, (*from, ranks[0]), region, last.as_slice());
            }
        }
    }
}

/// What the host at a place sends by one of its NICs.
fn rail_of(place: usize, rail: usize, rails: &Rails) -> Rail {
    let (count, num_rails) = (rails.nics.len(), rails.nics[place].len());
    let ahead = |rail: usize| 1 + rail * (count - 1) / num_rails;
    let to: Vec<usize> = (ahead(rail)..ahead(rail + 1)).map(|offset| (place + offset) % count).collect();
    Rail { at: rails.nics[place][rail], groups: groups(&to), to, sent: None, since: None }
}

/// Each group is as large as all before it, none goes on behind the end of the list of places.
///
/// ```text
/// 5 6 7 8 0 1 2 3      5 | 6 | 7 8 | 0 1 2 3
/// ```
fn groups(to: &[usize]) -> Vec<usize> {
    let mut groups = vec![];
    let mut done = 0;
    while done < to.len() {
        let most = done.max(1).min(to.len() - done);
        let rest = &to[done..done + most];
        let size = rest.windows(2).position(|w| w[1] != w[0] + 1).map_or(most, |end| end + 1);
        groups.push(size);
        done += size;
    }
    groups
}

fn index_of(ranks: &[Rank], rank: Rank) -> usize {
    ranks.iter().position(|&r| r == rank).expect("its host has it")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_double_and_end_where_places_do() {
        assert_eq!(groups(&[5, 6, 7, 8, 0, 1, 2, 3]), [1, 1, 2, 4]);
        assert_eq!(groups(&[7, 8, 0, 1, 2]), [1, 1, 2, 1]);
        assert_eq!(groups(&[]), [0; 0]);
    }
}
