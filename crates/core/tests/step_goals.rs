//! Steps whose programs are right by themselves and wrong for their schedule: what a pass needs and makes is held against
//! the schedule and the layouts.

use std::collections::BTreeMap;

use crossmesh_core::program::{Dep, DepKind, OpKind, Program, RankProgram, TileId};
use crossmesh_core::schedule::Name;
use crossmesh_core::step::{Instance, PassPart, Step, lower_step};
use crossmesh_core::verify::{check_step, verify_program};
use crossmesh_testkit::seed::Seed;
use crossmesh_testkit::{steps, sweep};

/// What lowering makes of a step: the program, and what its ops and tiles are said to be.
#[derive(Clone, PartialEq)]
struct Lowered {
    program: Program,
    parts: Vec<PassPart>,
    instances: Vec<Instance>,
}

impl Lowered {
    fn of(step: &Step) -> Self {
        let lowered = lower_step(step).unwrap_or_else(|e| panic!("{}: {e}", step.schedule.name()));
        let program = Program::clone(&lowered.program);
        Self { program, parts: lowered.parts, instances: lowered.instances }
    }
}

/// Mistakes that lowering could make.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Mistake {
    /// Two passes of the step go by each other's name.
    SwapNames,
    /// On one rank two passes change places.
    SwapPasses,
    /// A pass is not run.
    DropPass,
    /// A device begins a pass before the last one is over.
    Overtake,
    /// What crosses is said to be another microbatch's.
    SwapMicrobatches,
    /// On one rank, two things that cross change places.
    SwapTiles,
    /// A thing that crosses is forgotten, or said to be other tensors.
    ForgetInstance,
    OtherTensors,
    /// A pass does not wait for some of what it needs, or keeps it too short.
    DropNeed,
    /// It has some of another's instead.
    OtherNeed,
    DropMade,
}

impl Mistake {
    const ALL: [Mistake; 11] = [
        Mistake::SwapNames,
        Mistake::SwapPasses,
        Mistake::DropPass,
        Mistake::Overtake,
        Mistake::SwapMicrobatches,
        Mistake::SwapTiles,
        Mistake::ForgetInstance,
        Mistake::OtherTensors,
        Mistake::DropNeed,
        Mistake::OtherNeed,
        Mistake::DropMade,
    ];
}

/// The step with a mistake; none where there is no place for it.
fn mistaken(good: &Lowered, mistake: Mistake, seed: &mut Seed) -> Option<Lowered> {
    let mut bad = good.clone();
    let (rank, op) = some_pass(&good.program, seed)?;
    let ranked = &mut bad.program.ranks[rank];
    let instances = bad.instances.len();
    match mistake {
        Mistake::SwapNames => {
            let (a, b) = (seed.below(bad.parts.len()), seed.below(bad.parts.len()));
            bad.parts.swap(a, b);
        }
        Mistake::SwapPasses => {
            let (other, OpKind::Compute { pass, .. }) = (some_op(ranked, seed), ranked.ops[op].kind) else {
                unreachable!("it is a pass");
            };
            let theirs = std::mem::replace(pass_of(ranked, other), pass);
            *pass_of(ranked, op) = theirs;
        }
        Mistake::DropPass => {
            // The op stays, as part of the one before it.
            let passes = passes_of(ranked);
            let at = passes.iter().position(|i| *i == op)?.checked_sub(1)?;
            *pass_of(ranked, op) = *pass_of(ranked, passes[at]);
        }
        Mistake::Overtake => {
            let passes = passes_of(ranked);
            let at = passes.iter().position(|i| *i == op)?.checked_sub(1)?;
            remove_dep(ranked, op, passes[at] as u32)?;
        }
        Mistake::SwapMicrobatches => {
            let a = seed.below(instances);
            let alike = |i: &usize| {
                let (a, b) = (&bad.instances[a], &bad.instances[*i]);
                (a.crossing, a.direction) == (b.crossing, b.direction) && a.microbatch != b.microbatch
            };
            let others: Vec<usize> = (0..instances).filter(alike).collect();
            let b = *others.get(seed.below(others.len()))?;
            let theirs = bad.instances[a].microbatch;
            bad.instances[a].microbatch = std::mem::replace(&mut bad.instances[b].microbatch, theirs);
        }
        Mistake::SwapTiles => {
            let (a, b) = (seed.below(instances), seed.below(instances));
            let at =
                |i: &Instance| i.tiles.iter().position(|(r, tiles)| r.index() == rank && !tiles.is_empty());
            let (at_a, at_b) = (at(&bad.instances[a])?, at(&bad.instances[b])?);
            let theirs = bad.instances[a].tiles[at_a].1.clone();
            bad.instances[a].tiles[at_a].1 = std::mem::replace(&mut bad.instances[b].tiles[at_b].1, theirs);
        }
        Mistake::ForgetInstance => drop(bad.instances.swap_remove(seed.below(instances))),
        Mistake::OtherTensors => {
            let other = bad.instances[seed.below(instances)].first_tensor;
            bad.instances[seed.below(instances)].first_tensor = other;
        }
        Mistake::DropNeed | Mistake::OtherNeed | Mistake::DropMade => {
            let tile = TileId::at(seed.below(ranked.tiles.len().max(1)));
            let OpKind::Compute { needs, makes, .. } = ranked.ops[op].kind else { return None };
            let made = mistake == Mistake::DropMade;
            let mut tiles = ranked.touched(if made { makes } else { needs }).to_vec();
            let at = seed.below(tiles.len());
            match mistake {
                Mistake::OtherNeed => *tiles.get_mut(at)? = tile,
                _ => drop((at < tiles.len()).then(|| tiles.remove(at))?),
            }
            let list = ranked.touch(tiles);
            let OpKind::Compute { needs, makes, .. } = &mut ranked.ops[op].kind else { return None };
            *(if made { makes } else { needs }) = list;
        }
    }
    // A list of touched tiles may be another one and say the same.
    let differs = (&bad.parts, &bad.instances) != (&good.parts, &good.instances)
        || bad.program.ranks.iter().zip(&good.program.ranks).any(|(bad, good)| says(bad) != says(good));
    differs.then_some(bad)
}

/// A pass, what it waits for, and the tiles that it needs and makes.
type Said = (u32, Vec<Dep>, Vec<TileId>, Vec<TileId>);

/// What a rank's passes are, wait for and touch.
fn says(ranked: &RankProgram) -> Vec<Said> {
    let sorted = |tiles: &[TileId]| {
        let mut tiles = tiles.to_vec();
        tiles.sort_unstable();
        tiles
    };
    let pass = |op: &crossmesh_core::program::Op| match op.kind {
        OpKind::Compute { pass, needs, makes, .. } => {
            let (needs, makes) = (ranked.touched(needs), ranked.touched(makes));
            Some((pass, ranked.deps(op).to_vec(), sorted(needs), sorted(makes)))
        }
        _ => None,
    };
    ranked.ops.iter().filter_map(pass).collect()
}

fn passes_of(ranked: &RankProgram) -> Vec<usize> {
    let is_pass = |i: &usize| matches!(ranked.ops[*i].kind, OpKind::Compute { .. });
    (0..ranked.ops.len()).filter(is_pass).collect()
}

fn some_op(ranked: &RankProgram, seed: &mut Seed) -> usize {
    let passes = passes_of(ranked);
    passes[seed.below(passes.len())]
}

fn some_pass(program: &Program, seed: &mut Seed) -> Option<(usize, usize)> {
    let rank = seed.below(program.ranks.len());
    let passes = passes_of(&program.ranks[rank]);
    Some((rank, *passes.get(seed.below(passes.len()))?))
}

fn pass_of(ranked: &mut RankProgram, op: usize) -> &mut u32 {
    match &mut ranked.ops[op].kind {
        OpKind::Compute { pass, .. } => pass,
        other => panic!("{other:?} is no pass"),
    }
}

/// Takes a dependency out; the others stay in their order.
fn remove_dep(ranked: &mut RankProgram, op: usize, on: u32) -> Option<()> {
    let deps = ranked.ops[op].deps.clone();
    let at = deps.clone().find(|d| ranked.deps[*d as usize] == Dep { op: on, kind: DepKind::Done })?;
    ranked.deps[deps.start as usize..=at as usize].rotate_right(1);
    ranked.ops[op].deps = deps.start + 1..deps.end;
    Some(())
}

#[test]
fn lowered_steps_are_what_their_schedules_say() {
    let mut schedules = BTreeMap::new();
    for number in 0..sweep::count(300) as u64 {
        let step = steps::step(number);
        let lowered = Lowered::of(&step);
        check_step(&step, &lowered.program, &lowered.parts, &lowered.instances)
            .unwrap_or_else(|e| panic!("step {number}: {e}"));
        *schedules.entry(step.schedule.name().to_string()).or_insert(0) += 1;
    }
    for name in Name::ALL {
        assert!(schedules.contains_key(name.name()), "no {name} in {schedules:?}");
    }
}

#[test]
fn mistakes_of_lowering_are_found() {
    let wanted = sweep::count(1_500);
    let mut seen: BTreeMap<Mistake, [usize; 2]> = BTreeMap::new();
    let mut count = 0;
    for number in sweep::first().. {
        let step = steps::step(number);
        let good = Lowered::of(&step);
        let mut seed = Seed(number);
        for mistake in Mistake::ALL {
            let Some(bad) = mistaken(&good, mistake, &mut seed) else { continue };
            count += 1;
            let alone = verify_program(&bad.program).is_ok();
            seen.entry(mistake).or_default()[usize::from(alone)] += 1;
            let held = check_step(&step, &bad.program, &bad.parts, &bad.instances);
            assert!(held.is_err() || !alone, "step {number}: {mistake:?} passes\n{}", bad.program);
        }
        if count >= wanted {
            break;
        }
    }
    eprintln!("{count} mistakes, seen in the program alone and by the schedule alone: {seen:?}");
    for mistake in Mistake::ALL {
        let [program, schedule] = seen.get(&mistake).copied().unwrap_or_default();
        assert!(program + schedule > wanted / 100, "{mistake:?}: {program} and {schedule}");
        assert!(schedule > 0 || mistake == Mistake::DropMade, "{mistake:?} is always seen in the program");
    }
}
