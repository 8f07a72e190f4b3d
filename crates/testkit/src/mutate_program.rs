//! Changes a program in one place, in every way that something could make it wrong. Whether it is still right is for others to
//! find out.

use crossmesh_core::id::Rank;
use crossmesh_core::program::{DepKind, Holds, List, Op, OpKind, Program, RankProgram, TileId};
use crossmesh_core::region::{Region, Span};

use crate::seed::Seed;

/// Ways to change a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Change {
    DropOp,
    DropMessage,
    DuplicateMessage,
    RedirectPeer,
    ShrinkMessage,
    EnlargeMessage,
    ShrinkOp,
    SwapOps,
    SwapDependent,
    RetargetTile,
    MoveTile,
    ShareBuffer,
    ShrinkBuffer,
    RemoveDependency,
    StreamDependency,
    AddDependency,
    FlipReduce,
    ChangePart,
    ForgetGoal,
    SwapTags,
    DropTouched,
    AddTouched,
    RetargetTouched,
    MoveMade,
}

impl Change {
    pub const ALL: [Change; 24] = [
        Change::DropOp,
        Change::DropMessage,
        Change::DuplicateMessage,
        Change::RedirectPeer,
        Change::ShrinkMessage,
        Change::EnlargeMessage,
        Change::ShrinkOp,
        Change::SwapOps,
        Change::SwapDependent,
        Change::RetargetTile,
        Change::MoveTile,
        Change::ShareBuffer,
        Change::ShrinkBuffer,
        Change::RemoveDependency,
        Change::StreamDependency,
        Change::AddDependency,
        Change::FlipReduce,
        Change::ChangePart,
        Change::ForgetGoal,
        Change::SwapTags,
        Change::DropTouched,
        Change::AddTouched,
        Change::RetargetTouched,
        Change::MoveMade,
    ];

    /// Whether it changes what passes read and write, which only programs of steps have.
    pub fn is_of_passes(self) -> bool {
        matches!(self, Change::DropTouched | Change::AddTouched | Change::RetargetTouched | Change::MoveMade)
    }
}

/// The changed program; none where there is no place for the change.
pub fn change(program: &Program, change: Change, seed: &mut Seed) -> Option<Program> {
    let mut changed = program.clone();
    let busy: Vec<usize> = (0..program.ranks.len()).filter(|r| !program.ranks[*r].ops.is_empty()).collect();
    let rank = *busy.get(seed.below(busy.len().max(1)))?;
    let op = seed.below(program.ranks[rank].ops.len());
    let ranked = &mut changed.ranks[rank];
    match change {
        Change::DropOp => drop_op(ranked, op)?,
        Change::DropMessage | Change::DuplicateMessage => {
            let tag = ranked.ops[op].tag()?;
            let copied = change == Change::DuplicateMessage;
            let new = tags(program).max()? + 1;
            for ranked in &mut changed.ranks {
                let found = ranked.ops.iter().position(|o| o.tag() == Some(tag));
                match (found, copied) {
                    (Some(op), false) => drop_op(ranked, op)?,
                    (Some(op), true) => {
                        let mut again = ranked.ops[op].clone();
                        set_tag(&mut again, new);
                        ranked.ops.push(again);
                    }
                    _ => {}
                }
            }
        }
        Change::RedirectPeer => {
            let other = Rank::at(seed.below(program.ranks.len()));
            match &mut ranked.ops[op].kind {
                OpKind::Send { to, .. } => *to = other,
                OpKind::Recv { from, .. } => *from = other,
                _ => return None,
            }
        }
        Change::ShrinkMessage | Change::EnlargeMessage => {
            let tag = ranked.ops[op].tag().filter(|_| ranked.ops[op].bytes > 0)?;
            let (tensor, region) = (ranked.ops[op].tensor, &program.boxes[ranked.ops[op].region]);
            let shape = &program.tensors[tensor as usize].shape;
            let resized = resize(region, shape, change == Change::EnlargeMessage, seed)?;
            let bytes = resized.volume() * program.tensors[tensor as usize].dtype.bytes();
            let id = changed.boxes.push(resized);
            for op in changed.ranks.iter_mut().flat_map(|r| &mut r.ops).filter(|o| o.tag() == Some(tag)) {
                (op.region, op.bytes) = (id, bytes);
            }
        }
        Change::ShrinkOp => {
            let of = &ranked.ops[op];
            let shape = &program.tensors.get(of.tensor as usize)?.shape;
            let region = program.boxes.get(of.region).filter(|_| of.bytes > 0)?;
            let resized = resize(region, shape, false, seed)?;
            let bytes = resized.volume() * program.tensors[of.tensor as usize].dtype.bytes();
            ranked.ops[op].region = changed.boxes.push(resized);
            ranked.ops[op].bytes = bytes;
        }
        Change::SwapOps => {
            let other = seed.below(ranked.ops.len());
            swap_ops(ranked, op, other)?;
        }
        Change::SwapDependent => {
            let dep = pick_dep(ranked, op, seed)?;
            swap_ops(ranked, op, ranked.deps[dep].op as usize)?;
        }
        Change::RetargetTile => {
            let tile = TileId::at(seed.below(ranked.tiles.len().max(1)));
            retarget(&mut ranked.ops[op].kind, tile, seed)?;
        }
        Change::MoveTile => {
            let tile = seed.below(ranked.tiles.len().max(1));
            let tile = ranked.tiles.get_mut(tile)?;
            tile.offset = (tile.offset + seed.below(9) as u64).saturating_sub(4);
        }
        Change::ShareBuffer => {
            let tile = seed.below(ranked.tiles.len().max(1));
            let buffer = seed.below(ranked.buffers.len().max(1)) as u32;
            ranked.tiles.get_mut(tile)?.buffer = buffer;
        }
        Change::ShrinkBuffer => {
            let buffer = seed.below(ranked.buffers.len().max(1));
            let buffer = ranked.buffers.get_mut(buffer)?;
            buffer.bytes = buffer.bytes.checked_sub(1)?;
        }
        Change::RemoveDependency => {
            let dep = pick_dep(ranked, op, seed)?;
            // The list keeps its length: the op waits for another of its dependencies twice, or for fewer.
            let deps = ranked.ops[op].deps.clone();
            ranked.deps[dep] = ranked.deps[deps.start as usize];
            ranked.ops[op].deps = deps.start + 1..deps.end;
        }
        Change::StreamDependency => {
            let dep = pick_dep(ranked, op, seed)?;
            let kind = &mut ranked.deps[dep].kind;
            *kind = if *kind == DepKind::Done { DepKind::Stream } else { DepKind::Done };
        }
        Change::AddDependency => {
            let on = seed.below(ranked.ops.len()) as u32;
            let mut deps = ranked.deps(&ranked.ops[op]).to_vec();
            deps.push(crossmesh_core::program::Dep::done(on));
            let start = ranked.deps.len() as u32;
            ranked.deps.extend(deps);
            ranked.ops[op].deps = start..ranked.deps.len() as u32;
        }
        Change::FlipReduce => match &mut ranked.ops[op].kind {
            OpKind::Recv { reduce, .. } | OpKind::Copy { reduce, .. } => *reduce = !*reduce,
            _ => return None,
        },
        Change::ChangePart => {
            let tile = seed.below(ranked.tiles.len().max(1));
            match &mut ranked.tiles.get_mut(tile)?.holds {
                Holds::Source(part) | Holds::Made(part) => *part += 1,
                _ => return None,
            }
        }
        Change::ForgetGoal => {
            let tile = seed.below(ranked.tiles.len().max(1));
            let holds = &mut ranked.tiles.get_mut(tile)?.holds;
            *holds = if *holds == Holds::Transit { Holds::Goal } else { Holds::Transit };
        }
        Change::SwapTags => {
            let sends: Vec<usize> = (0..ranked.ops.len())
                .filter(|o| matches!(ranked.ops[*o].kind, OpKind::Recv { .. }))
                .collect();
            let (a, b) =
                (*sends.get(seed.below(sends.len().max(1)))?, *sends.get(seed.below(sends.len().max(1)))?);
            let (tag_a, tag_b) = (ranked.ops[a].tag()?, ranked.ops[b].tag()?);
            set_tag(&mut ranked.ops[a], tag_b);
            set_tag(&mut ranked.ops[b], tag_a);
        }
        Change::DropTouched | Change::AddTouched | Change::RetargetTouched => {
            let tile = TileId::at(seed.below(ranked.tiles.len().max(1)));
            touch_other(ranked, seed, |list, at| match change {
                Change::AddTouched => list.push(tile),
                _ if list.is_empty() => {}
                Change::DropTouched => drop(list.remove(at % list.len())),
                _ => {
                    let at = at % list.len();
                    list[at] = tile;
                }
            })?;
        }
        Change::MoveMade => {
            // Another pass of the rank makes it.
            let mut moved = None;
            touch_other(ranked, seed, |list, at| {
                moved = (!list.is_empty()).then(|| list.remove(at % list.len()));
            })?;
            let moved = moved?;
            touch_other(ranked, seed, |list, _| list.push(moved))?;
        }
    }
    (changed != *program).then_some(changed)
}

fn tags(program: &Program) -> impl Iterator<Item = u32> + '_ {
    program.ranks.iter().flat_map(|r| &r.ops).filter_map(Op::tag)
}

fn set_tag(op: &mut Op, new: u32) {
    if let OpKind::Send { tag, .. } | OpKind::Recv { tag, .. } = &mut op.kind {
        *tag = new;
    }
}

/// Takes an op out; what waited for it waits for what it waited for.
fn drop_op(ranked: &mut RankProgram, gone: usize) -> Option<()> {
    let inherited = ranked.deps(&ranked.ops[gone]).to_vec();
    let mut deps = vec![];
    let mut ops = vec![];
    let place = |op: u32| if op > gone as u32 { op - 1 } else { op };
    for (i, op) in ranked.ops.iter().enumerate().filter(|(i, _)| *i != gone) {
        let start = deps.len() as u32;
        for dep in ranked.deps(op) {
            let waits = if dep.op as usize == gone { &inherited[..] } else { std::slice::from_ref(dep) };
            deps.extend(waits.iter().filter(|d| d.op as usize != i).map(|d| {
                let kind = if dep.op as usize == gone { DepKind::Done } else { d.kind };
                crossmesh_core::program::Dep { op: place(d.op), kind }
            }));
        }
        ops.push(Op { deps: start..deps.len() as u32, ..op.clone() });
    }
    (ranked.ops, ranked.deps) = (ops, deps);
    Some(())
}

/// Lets two ops change places in the list. What waited for one goes on waiting for it.
fn swap_ops(ranked: &mut RankProgram, a: usize, b: usize) -> Option<()> {
    if a == b {
        return None;
    }
    ranked.ops.swap(a, b);
    for dep in &mut ranked.deps {
        if dep.op as usize == a {
            dep.op = b as u32;
        } else if dep.op as usize == b {
            dep.op = a as u32;
        }
    }
    Some(())
}

fn pick_dep(ranked: &RankProgram, op: usize, seed: &mut Seed) -> Option<usize> {
    let deps = &ranked.ops[op].deps;
    (deps.start < deps.end).then(|| deps.start as usize + seed.below((deps.end - deps.start) as usize))
}

fn retarget(kind: &mut OpKind, tile: TileId, seed: &mut Seed) -> Option<()> {
    match kind {
        OpKind::Send { from, .. } => *from = tile,
        OpKind::Recv { into, .. } => *into = tile,
        OpKind::Copy { from, into, .. } => *(if seed.below(2) == 0 { from } else { into }) = tile,
        OpKind::Compute { .. } => return None,
    }
    Some(())
}

/// Changes one of the lists of tiles that a pass of the rank touches, mostly one that is not empty.
fn touch_other(
    ranked: &mut RankProgram,
    seed: &mut Seed,
    change: impl FnOnce(&mut Vec<TileId>, usize),
) -> Option<()> {
    let passes = ranked.ops.iter().enumerate().filter_map(|(i, op)| match op.kind {
        OpKind::Compute { needs, makes, .. } => Some([(i, false, needs), (i, true, makes)]),
        _ => None,
    });
    let lists: Vec<(usize, bool, List)> = passes.flatten().collect();
    let full: Vec<(usize, bool, List)> = lists.iter().filter(|(.., list)| list.len > 0).copied().collect();
    let lists = if full.is_empty() || seed.one_in(8) { lists } else { full };
    let &(op, makes, list) = lists.get(seed.below(lists.len()))?;
    let mut tiles = ranked.touched(list).to_vec();
    let at = seed.below(tiles.len());
    change(&mut tiles, at);
    let changed = ranked.touch(tiles);
    if let OpKind::Compute { needs, makes: made, .. } = &mut ranked.ops[op].kind {
        *(if makes { made } else { needs }) = changed;
    }
    Some(())
}

/// The same box, an element longer or shorter in a dim.
fn resize(region: &Region, shape: &[u64], larger: bool, seed: &mut Seed) -> Option<Region> {
    let dim = seed.below(region.num_dims().max(1));
    let span = *region.spans().get(dim)?;
    let resized = match (larger, seed.below(2) == 0) {
        (false, true) => Span::new(span.start + 1, span.end),
        (false, false) => Span::new(span.start, span.end.checked_sub(1)?),
        (true, true) => Span::new(span.start.checked_sub(1)?, span.end),
        (true, false) => Span::new(span.start, span.end + 1),
    };
    (!resized.is_empty() && resized.end <= shape[dim]).then(|| region.with_span(dim, resized))
}
