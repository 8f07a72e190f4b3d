//! What a rank's memory holds, followed symbolically through its ops.
//!
//! Memory that is written falls into *cells*: boxes of a space, none of which crosses a box that is written. A cell knows which
//! parts of its tensor it holds, who wrote it last and who has read it since. An op may touch it if these are over:
//!
//! ```text
//! r0, r1, r2 hold parts {0}, {1}, {2} of box b
//! t0: r0 -> r1  b, add               cell (r1, b): {1}, then {0 1}
//! t1: r1 -> r2  b, add, after t0     reads {0 1};  cell (r2, b): {2}, then {0 1 2}
//! ```
//!
//! Sets that are added must be disjoint, and a goal's last set must be full. A tensor of whole values has one part, so
//! the same rules say that every element arrives once.

use std::borrow::Cow;

use rustc_hash::FxHashMap;

use crate::box_index::BoxIndex;
use crate::id::{Rank, RegionId};
use crate::program::{Holds, Op, OpKind, Program, RankProgram, TileId};
use crate::region::Region;

use super::before::Over;
use super::error::{OpName, VerifyError};
use super::sets::PartSet;
use super::spaces::{Spaces, extent};
use super::tiling::{Flaw, Tile as Box_, check_disjoint, check_tiling, uncovered};

/// No op: what was there from the start.
const NOBODY: u32 = u32::MAX;
/// So many are looked at one by one.
const FEW_CELLS: usize = 16;
/// Boxes that cross are cut into this many cells at most, on one rank.
const MAX_ATOMS: usize = 1 << 14;

struct Cell<'a> {
    region: Cow<'a, Region>,
    holds: Option<PartSet>,
    writer: u32,
    readers: Vec<u32>,
    /// Lies in a goal.
    goal: bool,
}

/// The cells that a box meets: mostly one, which is the box.
enum Met {
    One(u32),
    Some(Vec<u32>),
}

impl std::ops::Deref for Met {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        match self {
            Met::One(cell) => std::slice::from_ref(cell),
            Met::Some(cells) => cells,
        }
    }
}

/// What happens to the tiles of a space over the whole program.
#[derive(Clone, Copy, Default)]
struct Use {
    read: bool,
    written: bool,
    reduced: bool,
}

/// A box of a space that some op writes.
#[derive(Clone, Copy)]
struct Written<'a> {
    space: u32,
    region: &'a Region,
    id: RegionId,
    op: u32,
}

pub struct RankMemory<'a> {
    program: &'a Program,
    ranked: &'a RankProgram,
    rank: Rank,
    spaces: Spaces,
    /// By space: where its cells are.
    cells_of: Vec<std::ops::Range<u32>>,
    cells: Vec<Cell<'a>>,
    /// By space and box: the cell that is this very box.
    exact: FxHashMap<(u32, RegionId), u32>,
    /// By space, where it has many cells: to find those that a box meets.
    indices: FxHashMap<u32, BoxIndex>,
    /// Boxes written to spaces that nobody reads: all that matters is that they fill their goals.
    filled: Vec<Written<'a>>,
    plain: Vec<bool>,
    /// By buffer: the spaces that share bytes with others and were touched.
    live: Vec<Vec<u32>>,
}

impl<'a> RankMemory<'a> {
    /// Of one rank's part of a program, which need not be among the program's ranks: only its tables are looked at.
    pub fn new(program: &'a Program, rank: Rank, ranked: &'a RankProgram) -> Result<Self, VerifyError> {
        let spaces = Spaces::of(program, ranked);
        let n = spaces.spaces.len();
        let mut memory = Self {
            program,
            ranked,
            rank,
            spaces,
            cells_of: vec![0..0; n],
            cells: vec![],
            exact: FxHashMap::default(),
            indices: FxHashMap::default(),
            filled: vec![],
            plain: vec![false; n],
            live: vec![vec![]; ranked.buffers.len()],
        };
        let written = memory.survey();
        memory.check_sources()?;
        memory.make_cells(written)?;
        // What holds something from the start is in use without having been touched.
        let holds = |space: &u32| {
            let mut cells = memory.cells_of[*space as usize].clone();
            cells.any(|c| memory.cells[c as usize].holds.is_some())
        };
        let shares = |space: &u32| memory.spaces.spaces[*space as usize].shares;
        let in_use: Vec<u32> = (0..n as u32).filter(|space| shares(space) && holds(space)).collect();
        in_use.into_iter().for_each(|space| memory.touch(space));
        Ok(memory)
    }

    fn space_of(&self, tile: TileId) -> u32 {
        self.spaces.of_tile[tile.index()]
    }

    /// What is done to every space, and which boxes are written.
    fn survey(&mut self) -> Vec<Written<'a>> {
        let (program, ranked) = (self.program, self.ranked);
        let mut uses = vec![Use::default(); self.spaces.spaces.len()];
        let mut written = vec![];
        let mut write = |uses: &mut [Use], space: u32, id: RegionId, op: u32, reduces: bool| {
            let of = &mut uses[space as usize];
            (of.written, of.reduced) = (true, of.reduced | reduces);
            written.push(Written { space, region: &program.boxes[id], id, op });
        };
        for (i, op) in (0..).zip(&ranked.ops) {
            if let OpKind::Compute { needs, makes, .. } = op.kind {
                for tile in ranked.touched(needs) {
                    uses[self.space_of(*tile) as usize].read = true;
                }
                for tile in ranked.touched(makes) {
                    write(&mut uses, self.space_of(*tile), ranked.tile(*tile).region, i, false);
                }
                continue;
            }
            let (from, into) = op.ends();
            if let Some(from) = from {
                uses[self.space_of(from) as usize].read = true;
            }
            if let Some(into) = into {
                write(&mut uses, self.space_of(into), op.region, i, reduces(op));
            }
        }
        for (space, uses) in uses.iter().enumerate() {
            let of = &self.spaces.spaces[space];
            let whole = program.tensors[of.tensor as usize].partial.is_none();
            let base = of.tiles.iter().any(|t| matches!(ranked.tiles[*t as usize].holds, Holds::Source(_)));
            self.plain[space] = uses.written && !uses.read && !uses.reduced && whole && !base && !of.shares;
        }
        written
    }

    /// What is there from the start has bytes of its own.
    fn check_sources(&self) -> Result<(), VerifyError> {
        let source = |space: &u32| {
            let tiles = self.spaces.spaces[*space as usize].tiles.iter().copied();
            tiles
                .filter(|t| matches!(self.ranked.tiles[*t as usize].holds, Holds::Source(_)))
                .collect::<Vec<_>>()
        };
        let sharing: Vec<u32> = (0..self.spaces.spaces.len() as u32)
            .filter(|s| self.spaces.spaces[*s as usize].shares && !source(s).is_empty())
            .collect();
        for (i, a) in sharing.iter().enumerate() {
            for b in &sharing[..i] {
                if self.spaces.meet(self.program, self.ranked, *a, *b) {
                    let (first, second) = (source(b)[0], source(a)[0]);
                    return Err(VerifyError::SourcesOverlap { rank: self.rank, first, second });
                }
            }
        }
        let several = |space: &u32| self.spaces.spaces[*space as usize].tiles.len() > 1;
        for space in (0..self.spaces.spaces.len() as u32).filter(several) {
            let tiles = source(&space);
            for (i, a) in tiles.iter().enumerate().skip(1) {
                let (a_tile, region) = (&self.ranked.tiles[*a as usize], |t: u32| {
                    &self.program.boxes[self.ranked.tiles[t as usize].region]
                });
                let meets = |b: &&u32| {
                    self.ranked.tiles[**b as usize].holds != a_tile.holds && region(**b).overlaps(region(*a))
                };
                if let Some(b) = tiles[..i].iter().find(meets) {
                    return Err(VerifyError::SourcesOverlap { rank: self.rank, first: *b, second: *a });
                }
            }
        }
        Ok(())
    }

    fn make_cells(&mut self, written: Vec<Written<'a>>) -> Result<(), VerifyError> {
        let written = by_space(written, self.spaces.spaces.len());
        let mut rest = &written[..];
        let mut filled = vec![];
        for space in 0..self.spaces.spaces.len() as u32 {
            let len = rest.partition_point(|w| w.space == space);
            let (own, behind) = rest.split_at(len);
            rest = behind;
            if self.plain[space as usize] {
                filled.extend_from_slice(own);
                continue;
            }
            let first = self.cells.len() as u32;
            if len > 0 || self.spaces.spaces[space as usize].shares {
                self.make_cells_of(space, own)?;
            }
            self.cells_of[space as usize] = first..self.cells.len() as u32;
            if self.cells.len() - first as usize > FEW_CELLS {
                let regions = self.cells[first as usize..].iter().map(|cell| &*cell.region);
                self.indices.insert(space, BoxIndex::new(regions));
            }
        }
        self.filled = filled;
        Ok(())
    }

    fn make_cells_of(&mut self, space: u32, written: &[Written<'a>]) -> Result<(), VerifyError> {
        let (program, ranked) = (self.program, self.ranked);
        let of = &self.spaces.spaces[space as usize];
        let tile_boxes = || of.tiles.iter().map(|t| &ranked.tiles[*t as usize]);
        let mut ids: Vec<(&'a Region, RegionId)> = written.iter().map(|w| (w.region, w.id)).collect();
        if of.shares {
            // Reads matter here even where nothing of the space is written.
            ids.extend(tile_boxes().map(|t| (&program.boxes[t.region], t.region)));
        }
        ids.sort_unstable();
        let mut boxes: Vec<&'a Region> = ids.iter().map(|(region, _)| *region).collect();
        boxes.dedup();
        let sources: Vec<&'a Region> = tile_boxes()
            .filter(|t| matches!(t.holds, Holds::Source(_)))
            .map(|t| &program.boxes[t.region])
            .collect();
        let crosses = |b: &Region| sources.iter().any(|s| s.overlaps(b) && !s.contains(b));
        let whole = Region::whole(&program.tensors[of.tensor as usize].shape);
        let mut tiles: Vec<Box_<()>> = boxes.iter().map(|b| Box_ { spans: b.spans(), by: () }).collect();
        if check_disjoint(&whole, &mut tiles).is_ok() && !boxes.iter().any(|b| crosses(b)) {
            for same in ids.chunk_by(|a, b| a.0 == b.0) {
                let cell = self.cells.len() as u32;
                self.exact.extend(same.iter().map(|(_, id)| ((space, *id), cell)));
                self.add_cell(space, Cow::Borrowed(same[0].0));
            }
            return Ok(());
        }
        boxes.extend(sources);
        for region in self.atoms(&boxes)? {
            self.add_cell(space, Cow::Owned(region));
        }
        Ok(())
    }

    /// Boxes cut so that none crosses another.
    fn atoms(&self, boxes: &[&Region]) -> Result<Vec<Region>, VerifyError> {
        let mut atoms: Vec<Region> = vec![];
        for b in boxes {
            let mut new = vec![(*b).clone()];
            let mut cut = Vec::with_capacity(atoms.len());
            for atom in atoms {
                if atom.overlaps(b) {
                    new = new.iter().flat_map(|n| n.subtract(&atom)).collect();
                    cut.extend(atom.subtract(b));
                    cut.extend(atom.intersect(b));
                } else {
                    cut.push(atom);
                }
            }
            cut.extend(new);
            atoms = cut;
            if atoms.len() > MAX_ATOMS {
                return Err(VerifyError::TooTangled { rank: self.rank, boxes: boxes.len() });
            }
        }
        Ok(atoms)
    }

    fn add_cell(&mut self, space: u32, region: Cow<'a, Region>) {
        let tiles = self.spaces.spaces[space as usize].tiles.iter().map(|t| &self.ranked.tiles[*t as usize]);
        let (mut holds, mut goal) = (None, false);
        for tile in tiles {
            let of = &self.program.boxes[tile.region];
            match tile.holds {
                Holds::Source(part) if of.contains(&region) => holds = Some(PartSet::single(part)),
                Holds::Goal => goal |= of.overlaps(&region),
                _ => {}
            }
        }
        self.cells.push(Cell { region, holds, writer: NOBODY, readers: vec![], goal });
    }

    fn name(&self, op: u32) -> OpName {
        OpName::of(self.rank, op, self.ranked)
    }

    /// The cells of a space that a box meets.
    fn cells_at(&self, space: u32, id: RegionId) -> Met {
        if let Some(cell) = self.exact.get(&(space, id)) {
            return Met::One(*cell);
        }
        let region = &self.program.boxes[id];
        let all = self.cells_of[space as usize].clone();
        if let Some(index) = self.indices.get(&space) {
            return Met::Some(index.meeting(region.spans()).into_iter().map(|c| all.start + c).collect());
        }
        Met::Some(all.filter(|c| self.cells[*c as usize].region.overlaps(region)).collect())
    }

    /// What an op reads: the parts that all of a box holds.
    pub fn read(&mut self, op: u32, tile: TileId, before: &mut dyn Over) -> Result<PartSet, VerifyError> {
        let space = self.space_of(tile);
        if let (true, Holds::Source(part)) =
            (self.cells_of[space as usize].is_empty(), self.ranked.tile(tile).holds)
        {
            return Ok(PartSet::single(part)); // nothing is ever written here
        }
        let id = self.region_of(op, tile);
        let region = &self.program.boxes[id];
        let met = self.cells_at(space, id);
        let mut found: Option<PartSet> = None;
        let mut uneven = false;
        for &c in &*met {
            let cell = &self.cells[c as usize];
            let common = || cell.region.intersect(region).expect("the cell meets the box");
            if cell.writer != NOBODY && !before.is_over(self.rank.0, cell.writer, op) {
                let (first, second) = (self.name(cell.writer), self.name(op));
                return Err(VerifyError::ReadRace { region: common(), first, second });
            }
            let Some(holds) = &cell.holds else {
                let (region, lacking) = (region.clone(), common());
                return Err(VerifyError::ReadsNothing { op: self.name(op), region, lacking });
            };
            uneven |= found.as_ref().is_some_and(|f| f != holds);
            found = Some(holds.clone());
        }
        for base in self.read_untouched(op, space, region, &met)? {
            uneven |= found.as_ref().is_some_and(|f| *f != base);
            found = Some(base);
        }
        if uneven {
            return Err(VerifyError::SumUneven { op: self.name(op), region: region.clone() });
        }
        self.note_reads(op, space, &met);
        Ok(found.expect("a box that is read is not empty"))
    }

    fn note_reads(&mut self, op: u32, space: u32, met: &[u32]) {
        for &c in met {
            self.cells[c as usize].readers.push(op);
        }
        self.touch(space);
    }

    /// What a box holds where nothing is ever written.
    fn read_untouched(
        &self,
        op: u32,
        space: u32,
        region: &Region,
        met: &[u32],
    ) -> Result<Vec<PartSet>, VerifyError> {
        if let [only] = met
            && *self.cells[*only as usize].region == *region
        {
            return Ok(vec![]);
        }
        let mut left = uncovered(region, met.iter().map(|c| self.cells[*c as usize].region.spans()));
        let mut found = vec![];
        for tile in &self.spaces.spaces[space as usize].tiles {
            let tile = &self.ranked.tiles[*tile as usize];
            let Holds::Source(part) = tile.holds else { continue };
            let of = &self.program.boxes[tile.region];
            if left.iter().any(|l| l.overlaps(of)) {
                found.push(PartSet::single(part));
                left = left.iter().flat_map(|l| l.subtract(of)).collect();
            }
        }
        match left.into_iter().next() {
            None => Ok(found),
            Some(lacking) => {
                Err(VerifyError::ReadsNothing { op: self.name(op), region: region.clone(), lacking })
            }
        }
    }

    fn region_of(&self, op: u32, tile: TileId) -> RegionId {
        let of = &self.ranked.ops[op as usize];
        match of.kind {
            OpKind::Compute { .. } => self.ranked.tile(tile).region,
            _ => of.region,
        }
    }

    /// What an op writes, or adds.
    pub fn write(
        &mut self,
        op: u32,
        tile: TileId,
        brought: &PartSet,
        before: &mut dyn Over,
    ) -> Result<(), VerifyError> {
        let space = self.space_of(tile);
        if self.plain[space as usize] {
            return Ok(()); // looked at in the end
        }
        let adds = reduces(&self.ranked.ops[op as usize]);
        for &c in &*self.cells_at(space, self.region_of(op, tile)) {
            let holds = self.written(c, op, brought, adds)?;
            self.check_over(c, op, before)?;
            let cell = &mut self.cells[c as usize];
            (cell.holds, cell.writer) = (Some(holds), op);
            cell.readers.clear();
        }
        if self.spaces.spaces[space as usize].shares {
            self.overwrite_others(op, space, tile, before)?;
            self.touch(space);
        }
        Ok(())
    }

    /// Whoever wrote or read a cell is done with it.
    fn check_over(&self, c: u32, op: u32, before: &mut dyn Over) -> Result<(), VerifyError> {
        let cell = &self.cells[c as usize];
        let race = |first: u32, does| {
            let (first, second) = (self.name(first), self.name(op));
            Err(VerifyError::WriteRace { region: cell.region.clone().into_owned(), first, second, does })
        };
        for &reader in &cell.readers {
            // A pass knows itself what it reads and writes when; a copy onto what it reads does not.
            let own = reader == op && matches!(self.ranked.ops[op as usize].kind, OpKind::Compute { .. });
            if !own && (reader == op || !before.is_over(self.rank.0, reader, op)) {
                return race(reader, "read");
            }
        }
        // Who has read it waited for who wrote it.
        let unread = cell.readers.is_empty() && cell.writer != NOBODY;
        if unread && cell.writer != op && !before.is_over(self.rank.0, cell.writer, op) {
            return race(cell.writer, "write");
        }
        Ok(())
    }

    fn written(&self, c: u32, op: u32, brought: &PartSet, adds: bool) -> Result<PartSet, VerifyError> {
        let cell = &self.cells[c as usize];
        let region = || cell.region.clone().into_owned();
        let tensor = self.ranked.ops[op as usize].tensor;
        let parts = self.parts(tensor);
        if cell.goal && cell.holds.as_ref().is_some_and(|h| h.first_missing(parts).is_none()) {
            let first = (cell.writer != NOBODY).then(|| self.name(cell.writer));
            let (rank, region, second) = (self.rank, region(), self.name(op));
            return Err(VerifyError::Twice { tensor, rank, region, first, second });
        }
        match &cell.holds {
            _ if !adds => Ok(brought.clone()),
            None => {
                let (op, lacking) = (self.name(op), region());
                Err(VerifyError::ReadsNothing { op, region: region(), lacking })
            }
            Some(holds) => holds.union(brought).map_err(|contribution| {
                let (op, region) = (self.name(op), region());
                VerifyError::PartTwice { op, region, contribution }
            }),
        }
    }

    fn parts(&self, tensor: u32) -> u32 {
        let tensor = self.program.tensors.get(tensor as usize);
        tensor.and_then(|t| t.partial).map_or(1, |p| p.count)
    }

    fn touch(&mut self, space: u32) {
        let of = &self.spaces.spaces[space as usize];
        let live = &mut self.live[of.buffer as usize];
        if of.shares && !live.contains(&space) {
            live.push(space);
        }
    }

    /// What a write to a space loses in others that share its bytes.
    fn overwrite_others(
        &mut self,
        op: u32,
        space: u32,
        tile: TileId,
        before: &mut dyn Over,
    ) -> Result<(), VerifyError> {
        let mut kept = vec![];
        let buffer = self.spaces.spaces[space as usize].buffer as usize;
        let live = std::mem::take(&mut self.live[buffer]);
        let (start, end) = extent(self.program, self.ranked.tile(tile));
        for other in live {
            let of = &self.spaces.spaces[other as usize];
            if other == space || of.extent.0 >= end || of.extent.1 <= start {
                kept.push(other);
                continue;
            }
            if !self.spaces.meet(self.program, self.ranked, space, other) {
                kept.push(other);
                continue;
            }
            let covered = start <= of.extent.0 && of.extent.1 <= end;
            for c in self.cells_of[other as usize].clone() {
                self.check_over(c, op, before)?;
                let cell = &mut self.cells[c as usize];
                (cell.holds, cell.writer) = (None, if covered { NOBODY } else { op });
                cell.readers.clear();
            }
            if !covered {
                kept.push(other);
            }
        }
        self.live[buffer] = kept;
        Ok(())
    }

    /// Whether all goals hold whole values.
    pub fn check_goals(&self) -> Result<(), VerifyError> {
        for (space, of) in (0..).zip(&self.spaces.spaces) {
            for &tile in &of.tiles {
                let tile = &self.ranked.tiles[tile as usize];
                if tile.holds != Holds::Goal {
                    continue;
                }
                match self.plain[space as usize] {
                    true => self.check_filled(space, of.tensor, &self.program.boxes[tile.region])?,
                    false => self.check_goal(space, of.tensor, tile.region)?,
                }
            }
        }
        Ok(())
    }

    fn check_filled(&self, space: u32, tensor: u32, goal: &Region) -> Result<(), VerifyError> {
        let first = self.filled.partition_point(|w| w.space < space);
        let own = self.filled[first..].iter().take_while(|w| w.space == space);
        let inside = own.filter(|w| goal.overlaps(w.region));
        let mut boxes: Vec<Box_<u32>> = inside.map(|w| Box_ { spans: w.region.spans(), by: w.op }).collect();
        check_tiling(goal, &mut boxes).map_err(|flaw| match flaw {
            Flaw::Missing(region) => VerifyError::Missing { tensor, rank: self.rank, region },
            Flaw::Overlap { region, first, second } => {
                let (first, second) = (self.name(first.min(second)), self.name(first.max(second)));
                VerifyError::Twice { tensor, rank: self.rank, region, first: Some(first), second }
            }
        })
    }

    fn check_goal(&self, space: u32, tensor: u32, goal: RegionId) -> Result<(), VerifyError> {
        let (rank, parts) = (self.rank, self.parts(tensor));
        let met = self.cells_at(space, goal);
        let goal = &self.program.boxes[goal];
        for &c in &*met {
            let cell = &self.cells[c as usize];
            let Some(region) = cell.region.intersect(goal) else { continue };
            match cell.holds.as_ref().map(|holds| holds.first_missing(parts)) {
                Some(None) => {}
                Some(Some(contribution)) if parts > 1 => {
                    return Err(VerifyError::MissingPart { tensor, rank, region, contribution });
                }
                _ => return Err(VerifyError::Missing { tensor, rank, region }),
            }
        }
        let mut left = uncovered(goal, met.iter().map(|c| self.cells[*c as usize].region.spans()));
        for tile in self.spaces.spaces[space as usize].tiles.iter().filter(|_| parts == 1) {
            let tile = &self.ranked.tiles[*tile as usize];
            if matches!(tile.holds, Holds::Source(_)) {
                left = left.iter().flat_map(|l| l.subtract(&self.program.boxes[tile.region])).collect();
            }
        }
        match left.into_iter().next() {
            None => Ok(()),
            Some(region) => Err(VerifyError::Missing { tensor, rank, region }),
        }
    }

    /// Whether a compute op gets whole values.
    pub fn check_whole(&self, op: u32, tile: TileId, found: &PartSet) -> Result<(), VerifyError> {
        let of = self.ranked.tile(tile);
        match found.first_missing(self.parts(of.tensor)) {
            None => Ok(()),
            Some(contribution) => {
                let (tensor, region) = (of.tensor, self.program.boxes[self.region_of(op, tile)].clone());
                Err(VerifyError::MissingPart { tensor, rank: self.rank, region, contribution })
            }
        }
    }
}

/// Sorts by space, and leaves what is of one space in its order. Spaces are numbered, so counting them does.
fn by_space(written: Vec<Written>, num_spaces: usize) -> Vec<Written> {
    if written.is_sorted_by_key(|w| w.space) {
        return written;
    }
    let mut next = vec![0; num_spaces + 1];
    written.iter().for_each(|w| next[w.space as usize + 1] += 1);
    for space in 0..num_spaces {
        next[space + 1] += next[space];
    }
    let mut sorted = written.clone();
    for w in written {
        let place = &mut next[w.space as usize];
        sorted[*place] = w;
        *place += 1;
    }
    sorted
}

fn reduces(op: &Op) -> bool {
    matches!(op.kind, OpKind::Recv { reduce: true, .. } | OpKind::Copy { reduce: true, .. })
}
