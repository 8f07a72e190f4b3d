//! Partial sums: which parts are in which box of which rank, followed symbolically through the plan.
//!
//! Receives into one box of one rank form a *cell*; they happen in list order, each adding to the box or replacing it.
//! A send out of a cell carries what the receives it names in `after` left there:
//!
//! ```text
//! r0, r1, r2 hold parts {0}, {1}, {2} of box b
//! t0: r0 -> r1  b, add          cell (r1, b): {1}, then {0 1}
//! t1: r1 -> r2  b, add, after t0    carries {0 1}; cell (r2, b): {2}, then {0 1 2}
//! ```
//!
//! A transfer with `then_own` is followed by the receiver's own part.
//!
//! Sets that are added must be disjoint, and a destination's last set must be full.

use rustc_hash::FxHashMap;

use crate::id::{Rank, TransferId};
use crate::region::{Region, Span};
use crate::reshard::Plan;
use crate::reshard::shards::AllSides;

use super::error::VerifyError;
use super::holding::fill;
use super::program::Order;
use super::tiling::{Flaw, Tile, check_disjoint, uncovered};

pub fn check(plan: &Plan, sides: &AllSides, order: &Order) -> Result<(), VerifyError> {
    if !sides.any_partial() {
        return Ok(());
    }
    let mut sums = Sums::new(plan, sides);
    sums.check_cells()?;
    let transfers = order.nodes.iter().filter(|n| (**n as usize) < plan.transfers().len());
    for id in transfers.map(|n| TransferId(*n)) {
        if sums.is_partial(id) {
            sums.follow(id)?;
        }
    }
    sums.check_order(order)?;
    sums.check_destinations()
}

/// A box of a rank that parts of a sum arrive in.
struct Cell<'a> {
    tensor: u32,
    rank: Rank,
    region: &'a Region,
    /// In list order.
    arrivals: Vec<TransferId>,
    /// Sends out of it, and the last arrival each waits for.
    readers: Vec<(TransferId, TransferId)>,
}

const NONE: u32 = u32::MAX;

struct Sums<'a> {
    plan: &'a Plan,
    sides: &'a AllSides,
    cells: Vec<Cell<'a>>,
    /// By transfer: the cell it arrives in, or `NONE` for whole values.
    cell_of: Vec<u32>,
    sets: Sets,
    /// By transfer: the set in its cell once it has arrived, or `NONE` before.
    left: Vec<SetId>,
}

impl<'a> Sums<'a> {
    fn new(plan: &'a Plan, sides: &'a AllSides) -> Self {
        let mut cells: Vec<Cell> = Vec::new();
        let mut cell_of = vec![NONE; plan.transfers().len()];
        let mut known: FxHashMap<(u32, Rank, &[Span]), u32> = FxHashMap::default();
        for (i, t) in plan.transfers().iter().enumerate() {
            if !sides.tensor(t.tensor).src.is_partial() {
                continue;
            }
            let region = plan.region(t);
            let cell = *known.entry((t.tensor, t.dst, region.spans())).or_insert_with(|| {
                let (arrivals, readers) = (vec![], vec![]);
                cells.push(Cell { tensor: t.tensor, rank: t.dst, region, arrivals, readers });
                cells.len() as u32 - 1
            });
            cells[cell as usize].arrivals.push(TransferId::at(i));
            cell_of[i] = cell;
        }
        let left = vec![NONE; plan.transfers().len()];
        Self { plan, sides, cells, cell_of, sets: Sets::default(), left }
    }

    fn is_partial(&self, id: TransferId) -> bool {
        self.cell_of[id.index()] != NONE
    }

    /// Cells of one rank do not cross each other, nor the edge of the rank's own part.
    fn check_cells(&self) -> Result<(), VerifyError> {
        let mut by_rank: Vec<u32> = (0..self.cells.len() as u32).collect();
        let key = |c: u32| (self.cells[c as usize].tensor, self.cells[c as usize].rank);
        by_rank.sort_by_key(|&c| key(c));
        for group in by_rank.chunk_by(|&a, &b| key(a) == key(b)) {
            let (tensor, rank) = key(group[0]);
            let tile = |&c: &u32| Tile { spans: self.cells[c as usize].region.spans(), by: c };
            let mut tiles: Vec<Tile<u32>> = group.iter().map(tile).collect();
            let whole = Region::whole(self.plan.problem.reshards[tensor as usize].src.layout.shape());
            if let Err(Flaw::Overlap { region, first, second }) = check_disjoint(&whole, &mut tiles) {
                let arrival = |c: u32| self.cells[c as usize].arrivals[0];
                let (first, second) = (arrival(first.min(second)), arrival(first.max(second)));
                return Err(VerifyError::CrossingSums { rank, region, first, second });
            }
        }
        for cell in &self.cells {
            let own = &self.sides.tensor(cell.tensor).src;
            if own.overlaps(cell.rank, cell.region) && !own.contains(cell.rank, cell.region) {
                let (transfer, rank, region) = (cell.arrivals[0], cell.rank, cell.region.clone());
                return Err(VerifyError::CrossesOwnPart { transfer, rank, region });
            }
        }
        Ok(())
    }

    /// What a transfer carries, and what it leaves behind. Everything it waits for has been followed before.
    fn follow(&mut self, id: TransferId) -> Result<(), VerifyError> {
        let t = self.plan.transfers()[id.index()];
        let carried = self.carried_by(id)?;
        let cell = &self.cells[self.cell_of[id.index()] as usize];
        let before = cell.arrivals[..place(&cell.arrivals, id)].last().copied();
        let own = &self.sides.tensor(t.tensor).src;
        let held = match before {
            Some(before) => Some(self.left[before.index()]).filter(|set| *set != NONE),
            None if own.contains(t.dst, cell.region) => own.contribution(t.dst).map(|c| self.sets.single(c)),
            None => None,
        };
        let left = match held.filter(|_| t.reduce) {
            None => carried,
            Some(held) => self.sets.union(held, carried).map_err(|contribution| {
                let (rank, region) = (t.dst, cell.region.clone());
                VerifyError::PartTwice { transfer: id, rank, region, contribution }
            })?,
        };
        self.left[id.index()] = if t.then_own { self.with_own(id, left)? } else { left };
        Ok(())
    }

    /// The receiver's own part joins what is in the cell.
    fn with_own(&mut self, id: TransferId, left: SetId) -> Result<SetId, VerifyError> {
        let t = &self.plan.transfers()[id.index()];
        let (rank, region) = (t.dst, self.plan.region(t));
        let own = &self.sides.tensor(t.tensor).src;
        let Some(contribution) = own.contribution(rank).filter(|_| own.contains(rank, region)) else {
            return Err(VerifyError::NoOwnPart { transfer: id, rank, region: region.clone() });
        };
        let own = self.sets.single(contribution);
        self.sets.union(left, own).map_err(|contribution| {
            let region = region.clone();
            VerifyError::PartTwice { transfer: id, rank, region, contribution }
        })
    }

    fn carried_by(&mut self, id: TransferId) -> Result<SetId, VerifyError> {
        let t = self.plan.transfers()[id.index()];
        let region = self.plan.region(&t);
        let own = &self.sides.tensor(t.tensor).src;
        let last = self.last_named(id);
        if last.is_empty() {
            // Held from the start: `check_senders` has seen to that.
            return Ok(self.sets.single(own.contribution(t.src).unwrap_or(0)));
        }
        let boxes = last.iter().map(|(cell, _)| self.cells[*cell as usize].region.spans());
        if let Some(lacking) = uncovered(region, boxes).into_iter().next() {
            let region = region.clone();
            return Err(VerifyError::NotHeld { transfer: id, rank: t.src, region, lacking });
        }
        let mut carried = None;
        for &(cell, arrival) in &last {
            self.check_named(id, cell, arrival)?;
            let set = self.left[arrival.index()];
            if carried.replace(set).is_some_and(|other| other != set) {
                return Err(VerifyError::SumUneven { transfer: id, rank: t.src, region: region.clone() });
            }
            self.cells[cell as usize].readers.push((id, arrival));
        }
        Ok(carried.expect("at least one cell is named"))
    }

    /// The cells that a transfer reads, each with the last arrival there that the transfer waits for.
    fn last_named(&self, id: TransferId) -> Vec<(u32, TransferId)> {
        let t = &self.plan.transfers()[id.index()];
        let mut last: Vec<(u32, TransferId)> = Vec::new();
        for &a in self.plan.after(t) {
            let named = &self.plan.transfers()[a.index()];
            let overlaps = || self.plan.region(named).overlaps(self.plan.region(t));
            if named.dst != t.src || named.tensor != t.tensor || !overlaps() {
                continue;
            }
            let cell = self.cell_of[a.index()];
            match last.iter_mut().find(|(c, _)| *c == cell) {
                Some((_, known)) => *known = a.max(*known),
                None => last.push((cell, a)),
            }
        }
        last
    }

    /// A sum is sent only by those who wait for all that was added up to there, back to where it was last replaced.
    fn check_named(&self, id: TransferId, cell: u32, last: TransferId) -> Result<(), VerifyError> {
        let t = &self.plan.transfers()[id.index()];
        let cell = &self.cells[cell as usize];
        for &arrival in cell.arrivals[..=place(&cell.arrivals, last)].iter().rev() {
            if !self.plan.after(t).contains(&arrival) {
                let (rank, region, unnamed) = (t.src, cell.region.clone(), arrival);
                return Err(VerifyError::SumUnfinished { transfer: id, rank, region, unnamed });
            }
            if !self.plan.transfers()[arrival.index()].reduce {
                break;
            }
        }
        Ok(())
    }

    /// Nothing arrives in a cell while a send still reads what was there before.
    fn check_order(&self, order: &Order) -> Result<(), VerifyError> {
        let mut search = Ancestors { plan: self.plan, order, seen: vec![], searches: 0 };
        for cell in &self.cells {
            for pair in cell.arrivals.windows(2) {
                let (before, arrival) = (pair[0], pair[1]);
                let replaces = !self.plan.transfers()[arrival.index()].reduce;
                let earlier = |last: TransferId| last == before || (replaces && last < arrival);
                let mut users: Vec<TransferId> =
                    cell.readers.iter().filter(|(_, last)| earlier(*last)).map(|(t, _)| *t).collect();
                if replaces && !cell.readers.iter().any(|(_, last)| *last == before) {
                    users.push(before);
                }
                if let Some(transfer) = users.into_iter().find(|u| !search.finds(*u, arrival)) {
                    let (rank, region, writer) = (cell.rank, cell.region.clone(), arrival);
                    return Err(VerifyError::Race { transfer, rank, region, writer });
                }
            }
        }
        Ok(())
    }

    /// The cells in a destination shard fill it, and each ends up with all parts, which it did not have before.
    fn check_destinations(&self) -> Result<(), VerifyError> {
        let mut of_rank: FxHashMap<(u32, Rank), Vec<&Cell>> = FxHashMap::default();
        for cell in &self.cells {
            if self.sides.tensor(cell.tensor).dst.contains(cell.rank, cell.region) {
                of_rank.entry((cell.tensor, cell.rank)).or_default().push(cell);
            }
        }
        for (tensor, sides) in (0..).zip(self.sides.iter()).filter(|(_, s)| s.src.is_partial()) {
            for &rank in &self.plan.problem.reshards[tensor as usize].dst.ranks {
                let cells = of_rank.get(&(tensor, rank)).map_or(&[][..], Vec::as_slice);
                let tiles = cells.iter().map(|c| Tile { spans: c.region.spans(), by: () }).collect();
                if let Err(Flaw::Missing(region)) = fill(&sides.dst.boxes(rank), tiles) {
                    return Err(VerifyError::Missing { tensor, rank, region });
                }
                for cell in cells {
                    self.check_full(cell, sides.src.num_contributions() as u32)?;
                }
            }
        }
        Ok(())
    }

    fn check_full(&self, cell: &Cell, parts: u32) -> Result<(), VerifyError> {
        let (tensor, rank) = (cell.tensor, cell.rank);
        let missing = |id: &TransferId| self.sets.first_missing(self.left[id.index()], parts);
        let (last, earlier) = cell.arrivals.split_last().expect("a cell has an arrival");
        if let Some(contribution) = missing(last) {
            let region = cell.region.clone();
            return Err(VerifyError::MissingPart { tensor, rank, region, contribution });
        }
        if let Some(first) = earlier.iter().find(|id| missing(id).is_none()) {
            let (region, second) = (cell.region.clone(), *last);
            return Err(VerifyError::Twice { tensor, rank, region, first: Some(*first), second });
        }
        Ok(())
    }
}

/// Where an arrival stands among the arrivals of its cell, which rise.
fn place(arrivals: &[TransferId], id: TransferId) -> usize {
    arrivals.binary_search(&id).expect("an arrival is in its cell")
}

/// Looks for a transfer among all that another one waits for, directly or not.
struct Ancestors<'a> {
    plan: &'a Plan,
    order: &'a Order,
    seen: Vec<u32>,
    searches: u32,
}

impl Ancestors<'_> {
    fn finds(&mut self, target: TransferId, from: TransferId) -> bool {
        if self.seen.is_empty() {
            self.seen = vec![0; self.plan.transfers().len()];
        }
        self.searches += 1;
        let mut open = vec![from];
        while let Some(id) = open.pop() {
            for &next in self.plan.after(&self.plan.transfers()[id.index()]) {
                if next == target {
                    return true;
                }
                let too_early = self.order.places[next.index()] < self.order.places[target.index()];
                if !too_early && self.seen[next.index()] != self.searches {
                    self.seen[next.index()] = self.searches;
                    open.push(next);
                }
            }
        }
        false
    }
}

type SetId = u32;

/// Sets of parts, each kept once.
#[derive(Default)]
struct Sets {
    words: Vec<Vec<u64>>,
    ids: FxHashMap<Vec<u64>, SetId>,
    unions: FxHashMap<(SetId, SetId), Result<SetId, u32>>,
}

impl Sets {
    fn intern(&mut self, words: Vec<u64>) -> SetId {
        if let Some(id) = self.ids.get(&words) {
            return *id;
        }
        self.words.push(words.clone());
        self.ids.insert(words, self.words.len() as SetId - 1);
        self.words.len() as SetId - 1
    }

    fn single(&mut self, contribution: u32) -> SetId {
        let mut words = vec![0; contribution as usize / 64 + 1];
        words[contribution as usize / 64] = 1 << (contribution % 64);
        self.intern(words)
    }

    /// The union of two sets, or the first part that is in both.
    fn union(&mut self, a: SetId, b: SetId) -> Result<SetId, u32> {
        if let Some(known) = self.unions.get(&(a, b)) {
            return *known;
        }
        let (x, y) = (&self.words[a as usize], &self.words[b as usize]);
        let at = |words: &[u64], i: usize| words.get(i).copied().unwrap_or(0);
        let both = (0..x.len().min(y.len())).find(|&i| x[i] & y[i] != 0);
        let union = match both {
            Some(i) => Err(i as u32 * 64 + (x[i] & y[i]).trailing_zeros()),
            None => {
                let words = (0..x.len().max(y.len())).map(|i| at(x, i) | at(y, i)).collect();
                Ok(self.intern(words))
            }
        };
        self.unions.insert((a, b), union);
        union
    }

    /// The first of the parts `0..parts` that is not in the set.
    fn first_missing(&self, set: SetId, parts: u32) -> Option<u32> {
        let words = &self.words[set as usize];
        let holds = |c: u32| words.get(c as usize / 64).is_some_and(|w| w >> (c % 64) & 1 == 1);
        (0..parts).find(|&c| !holds(c))
    }
}
