//! Carries out a program byte by byte, in an order drawn from a seed, with as little order as a program asks for: ops that
//! nothing keeps apart run element by element through each other. What a race or a wrong buffer does, it does here.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use crossmesh_core::program::{DepKind, Holds, List, Op, OpKind, Program, RankProgram, Tile, TileId};
use crossmesh_core::region::Region;

use crate::replay::elements;
use crate::seed::Seed;

/// When a send is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sends {
    /// Once its bytes were read; they may arrive much later.
    Buffered,
    /// Once its bytes have arrived. Nothing moves before both ends are there, and a channel moves one message at a time.
    Rendezvous,
}

impl Sends {
    pub const ALL: [Sends; 2] = [Sends::Buffered, Sends::Rendezvous];
}

/// What an element of memory holds: an element of a tensor, and the parts added up in it, in which order.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Value {
    tensor: u32,
    element: Vec<u64>,
    parts: Vec<u32>,
    /// What was added to what: two values with the same have the same bits.
    sum: u64,
}

type Byte = Option<(Rc<Value>, u8)>;

/// What every goal ends up with: rank, tile and element, and how it was added up.
pub type Outcome = BTreeMap<(usize, usize, Vec<u64>), u64>;

/// Runs a program to its end. `Err` says what went wrong; an `Ok` of two runs that differ is a result that depends on luck.
pub fn interpret(program: &Program, sends: Sends, seed: u64) -> Result<Outcome, String> {
    let mut run = Run::new(program, sends, seed);
    while run.left > 0 {
        if !run.advance()? {
            return Err(format!("stuck: {:?} never ran", run.waiting()));
        }
    }
    run.outcome()
}

#[derive(Debug, Clone, Default)]
struct State {
    started: bool,
    done: bool,
    /// Elements moved.
    moved: usize,
    /// Larger goes first, mostly: some ops are slow, others fast.
    haste: usize,
    /// Of a pass: it has begun to write what it makes. From then on it reads no more.
    made: bool,
}

struct Run<'a> {
    program: &'a Program,
    sends: Sends,
    seed: Seed,
    hasty: bool,
    memory: Vec<Vec<Vec<Byte>>>,
    states: Vec<Vec<State>>,
    boxes: Vec<Vec<Rc<Vec<Vec<u64>>>>>,
    /// By tag: where its ends are, and what is on its way.
    ends: HashMap<u32, [Option<(usize, usize)>; 2]>,
    flying: HashMap<u32, Vec<Option<Rc<Value>>>>,
    /// By tag: the message before it on its channel.
    previous: HashMap<u32, u32>,
    left: usize,
}

impl<'a> Run<'a> {
    fn new(program: &'a Program, sends: Sends, seed: u64) -> Self {
        let mut seed = Seed(seed);
        let mut states: Vec<Vec<State>> =
            program.ranks.iter().map(|r| vec![State::default(); r.ops.len()]).collect();
        for state in states.iter_mut().flatten() {
            state.haste = seed.below(1000);
        }
        let of_op = |op: &Op| match op.bytes {
            0 => Rc::default(),
            _ => Rc::new(elements(&program.boxes[op.region])),
        };
        let left = program.ranks.iter().map(|r| r.ops.len()).sum();
        let mut run = Self {
            boxes: program.ranks.iter().map(|r| r.ops.iter().map(of_op).collect()).collect(),
            memory: program
                .ranks
                .iter()
                .map(|r| r.buffers.iter().map(|b| vec![None; b.bytes as usize]).collect())
                .collect(),
            hasty: seed.below(2) == 0,
            program,
            sends,
            seed,
            states,
            ends: HashMap::new(),
            flying: HashMap::new(),
            previous: HashMap::new(),
            left,
        };
        run.find_messages();
        run.fill_sources();
        run
    }

    fn find_messages(&mut self) {
        let mut last: HashMap<(usize, u32, u32), u32> = HashMap::new();
        for (rank, ranked) in self.program.ranks.iter().enumerate() {
            for (i, op) in ranked.ops.iter().enumerate() {
                match op.kind {
                    OpKind::Send { tag, to, lane, .. } => {
                        self.ends.entry(tag).or_default()[0] = Some((rank, i));
                        if let Some(before) = last.insert((rank, to.0, lane), tag) {
                            self.previous.insert(tag, before);
                        }
                    }
                    OpKind::Recv { tag, .. } => self.ends.entry(tag).or_default()[1] = Some((rank, i)),
                    _ => {}
                }
            }
        }
    }

    fn fill_sources(&mut self) {
        for (rank, ranked) in self.program.ranks.iter().enumerate() {
            for tile in &ranked.tiles {
                if let Holds::Source(part) = tile.holds {
                    self.make(rank, tile, part);
                }
            }
        }
    }

    /// Writes a part of a tensor into a tile.
    fn make(&mut self, rank: usize, tile: &Tile, part: u32) {
        for element in elements(&self.program.boxes[tile.region]) {
            let sum = u64::from(part) + 1;
            let value = Value { tensor: tile.tensor, element: element.clone(), parts: vec![part], sum };
            self.put(rank, tile, &element, Rc::new(value));
        }
    }

    fn ranked(&self, rank: usize) -> &'a RankProgram {
        &self.program.ranks[rank]
    }

    fn op(&self, (rank, i): (usize, usize)) -> &'a Op {
        &self.program.ranks[rank].ops[i]
    }

    fn element_bytes(&self, tile: &Tile) -> usize {
        self.program.tensors[tile.tensor as usize].dtype.bytes() as usize
    }

    fn address(&self, tile: &Tile, element: &[u64]) -> usize {
        address(&self.program.boxes[tile.region], tile, self.element_bytes(tile) as u64, element)
    }

    fn put(&mut self, rank: usize, tile: &Tile, element: &[u64], value: Rc<Value>) {
        let (at, bytes) = (self.address(tile, element), self.element_bytes(tile));
        for k in 0..bytes {
            self.memory[rank][tile.buffer as usize][at + k] = Some((value.clone(), k as u8));
        }
    }

    /// What lies in a tile at an element: none if its bytes are not those of one value.
    fn get(&self, rank: usize, tile: &Tile, element: &[u64]) -> Option<Rc<Value>> {
        let (at, bytes) = (self.address(tile, element), self.element_bytes(tile));
        let buffer = &self.memory[rank][tile.buffer as usize];
        let (first, _) = buffer[at].as_ref()?;
        let whole = (0..bytes).all(|k| {
            buffer[at + k].as_ref().is_some_and(|(v, byte)| Rc::ptr_eq(v, first) && *byte == k as u8)
        });
        whole.then(|| first.clone())
    }

    fn waiting(&self) -> Vec<(usize, usize)> {
        let all = self.states.iter().enumerate();
        all.flat_map(|(r, s)| s.iter().enumerate().filter(|(_, s)| !s.done).map(move |(i, _)| (r, i)))
            .collect()
    }

    /// Lets some op go on a little. False if none can.
    fn advance(&mut self) -> Result<bool, String> {
        let mut waiting = self.waiting();
        if self.hasty && self.seed.below(8) > 0 {
            waiting.sort_by_key(|(r, i)| std::cmp::Reverse(self.states[*r][*i].haste));
        } else {
            for k in (1..waiting.len()).rev() {
                waiting.swap(k, self.seed.below(k + 1));
            }
        }
        for at in waiting {
            if self.step(at)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Starts an op, moves an element of it, or ends it. False if it has to wait.
    fn step(&mut self, at: (usize, usize)) -> Result<bool, String> {
        let state = &self.states[at.0][at.1];
        if !state.started {
            let ready = self.may_start(at);
            if ready {
                self.states[at.0][at.1].started = true;
                self.check_needs(at)?;
            }
            return Ok(ready);
        }
        match self.op(at).kind {
            OpKind::Send { tag, from, .. } => self.step_send(at, tag, from),
            OpKind::Recv { tag, into, reduce, .. } => self.step_recv(at, tag, into, reduce),
            OpKind::Copy { from, into, reduce } => self.step_copy(at, from, into, reduce),
            OpKind::Compute { makes, .. } => self.step_compute(at, makes),
        }
    }

    /// A pass reads all the while until it writes, and writes somewhere between its start and its end: nonsense first, its
    /// values last.
    fn step_compute(&mut self, at: (usize, usize), makes: List) -> Result<bool, String> {
        let made = std::mem::replace(&mut self.states[at.0][at.1].made, true);
        if !made {
            self.check_needs(at)?;
            if self.seed.below(2) == 0 {
                self.write_made(at.0, makes, true);
                return Ok(true);
            }
        }
        self.write_made(at.0, makes, false);
        Ok(self.end(at))
    }

    fn write_made(&mut self, rank: usize, makes: List, unfinished: bool) {
        for tile in self.ranked(rank).touched(makes) {
            let tile = self.ranked(rank).tile(*tile);
            match tile.holds {
                Holds::Made(_) if unfinished => self.make(rank, tile, u32::MAX),
                Holds::Made(part) => self.make(rank, tile, part),
                _ => {}
            }
        }
    }

    fn may_start(&self, (rank, i): (usize, usize)) -> bool {
        let ranked = self.ranked(rank);
        ranked.deps(&ranked.ops[i]).iter().all(|dep| {
            let on = &self.states[rank][dep.op as usize];
            if dep.kind == DepKind::Done { on.done } else { on.started }
        })
    }

    fn end(&mut self, at: (usize, usize)) -> bool {
        self.states[at.0][at.1].done = true;
        self.left -= 1;
        true
    }

    fn started(&self, end: Option<(usize, usize)>) -> bool {
        end.is_some_and(|(r, i)| self.states[r][i].started)
    }

    fn done(&self, end: Option<(usize, usize)>) -> bool {
        end.is_some_and(|(r, i)| self.states[r][i].done)
    }

    /// Whether a message may move at all.
    fn may_move(&self, tag: u32) -> bool {
        let ends = self.ends[&tag];
        let free = || self.previous.get(&tag).is_none_or(|p| self.done(self.ends[p][1]));
        self.sends == Sends::Buffered || (self.started(ends[0]) && self.started(ends[1]) && free())
    }

    fn step_send(&mut self, at: (usize, usize), tag: u32, from: TileId) -> Result<bool, String> {
        let all = self.boxes[at.0][at.1].clone();
        let moved = self.states[at.0][at.1].moved;
        if moved == all.len() {
            let over = self.sends == Sends::Buffered || self.done(self.ends[&tag][1]);
            return Ok(over && self.end(at));
        }
        let ranked = self.ranked(at.0);
        let mut leaders = ranked.deps(self.op(at)).iter().filter(|d| d.kind == DepKind::Stream);
        let behind = leaders.any(|d| self.states[at.0][d.op as usize].moved <= moved);
        if behind || !self.may_move(tag) {
            return Ok(false);
        }
        let value = self.get(at.0, ranked.tile(from), &all[moved]);
        self.flying.entry(tag).or_default().push(value);
        self.states[at.0][at.1].moved += 1;
        Ok(true)
    }

    fn step_recv(
        &mut self,
        at: (usize, usize),
        tag: u32,
        into: TileId,
        reduce: bool,
    ) -> Result<bool, String> {
        let all = self.boxes[at.0][at.1].clone();
        let moved = self.states[at.0][at.1].moved;
        if moved == all.len() {
            let sent = self.started(self.ends[&tag][0]);
            return Ok(sent && self.may_move(tag) && self.end(at));
        }
        let Some(value) = self.flying.get(&tag).and_then(|f| f.get(moved)).cloned() else { return Ok(false) };
        self.combine(at.0, self.ranked(at.0).tile(into), &all[moved], value, reduce);
        self.states[at.0][at.1].moved += 1;
        Ok(true)
    }

    fn step_copy(
        &mut self,
        at: (usize, usize),
        from: TileId,
        into: TileId,
        reduce: bool,
    ) -> Result<bool, String> {
        let all = self.boxes[at.0][at.1].clone();
        let moved = self.states[at.0][at.1].moved;
        if moved == all.len() {
            return Ok(self.end(at));
        }
        let ranked = self.ranked(at.0);
        let value = self.get(at.0, ranked.tile(from), &all[moved]);
        self.combine(at.0, ranked.tile(into), &all[moved], value, reduce);
        self.states[at.0][at.1].moved += 1;
        Ok(true)
    }

    /// Puts a value where it belongs, or adds it to what is there. Nonsense stays nonsense.
    fn combine(&mut self, rank: usize, tile: &Tile, element: &[u64], value: Option<Rc<Value>>, reduce: bool) {
        let nonsense = || Value { tensor: u32::MAX, element: vec![], parts: vec![], sum: 0 };
        let value = value.map_or_else(nonsense, |v| (*v).clone());
        let value = match reduce {
            false => value,
            true => {
                let held = self.get(rank, tile, element).map_or_else(nonsense, |v| (*v).clone());
                if (held.tensor, &held.element) != (value.tensor, &value.element) {
                    nonsense()
                } else {
                    let mut parts = [held.parts, value.parts].concat();
                    parts.sort_unstable();
                    let sum = held.sum.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17) ^ value.sum;
                    Value { parts, sum, ..value }
                }
            }
        };
        self.put(rank, tile, element, Rc::new(value));
    }

    /// A pass finds whole values in what it needs, at its start and at its end.
    fn check_needs(&self, at: (usize, usize)) -> Result<(), String> {
        let OpKind::Compute { needs, .. } = self.op(at).kind else { return Ok(()) };
        for id in self.ranked(at.0).touched(needs) {
            let tile = self.ranked(at.0).tile(*id);
            for element in elements(&self.program.boxes[tile.region]) {
                self.check_whole(at.0, tile, &element).map_err(|e| format!("{at:?} needs {id:?}: {e}"))?;
            }
        }
        Ok(())
    }

    fn check_whole(&self, rank: usize, tile: &Tile, element: &[u64]) -> Result<u64, String> {
        let count = self.program.tensors[tile.tensor as usize].partial.map_or(1, |p| p.count);
        let wanted: Vec<u32> = (0..count).collect();
        match self.get(rank, tile, element) {
            Some(v) if v.tensor == tile.tensor && v.element == element && v.parts == wanted => Ok(v.sum),
            other => Err(format!("r{rank} has {other:?} for {element:?} of tensor {}", tile.tensor)),
        }
    }

    fn outcome(&self) -> Result<Outcome, String> {
        let mut outcome = Outcome::new();
        for (rank, ranked) in self.program.ranks.iter().enumerate() {
            for (i, tile) in ranked.tiles.iter().enumerate().filter(|(_, t)| t.holds == Holds::Goal) {
                for element in elements(&self.program.boxes[tile.region]) {
                    let sum = self.check_whole(rank, tile, &element)?;
                    outcome.insert((rank, i, element), sum);
                }
            }
        }
        Ok(outcome)
    }
}

/// The address of an element in a tile, in bytes from its buffer's start.
fn address(region: &Region, tile: &Tile, element_bytes: u64, element: &[u64]) -> usize {
    let mut stride = element_bytes;
    let mut at = tile.offset;
    for dim in (0..element.len()).rev() {
        let span = region.spans()[dim];
        let step = tile.strides.as_ref().map_or(stride, |s| s[dim]);
        at += (element[dim] - span.start) * step;
        stride *= span.len();
    }
    at as usize
}
