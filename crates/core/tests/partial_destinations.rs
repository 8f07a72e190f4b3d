//! Destinations that are partial sums: their parts, taken together, are what the source's parts were.
//!
//! Every element is followed as the set of the source's parts in it, from the layouts that were asked for: what they became on the
//! way into the plan is not looked at.

use std::collections::{BTreeMap, BTreeSet};

use crossmesh_core::id::Rank;
use crossmesh_core::layout::Layout;
use crossmesh_core::reshard::{PlanError, PlanOptions, Problem, Transfer, plan};
use crossmesh_core::verify::verify;
use crossmesh_testkit::seed::Seed;
use crossmesh_testkit::sweep;

/// A mesh's axes, and a layout of some elements that is partial along some of them.
fn layout(seed: &mut Seed, name: &str, parts: &[usize]) -> String {
    let mut axes: Vec<(String, usize)> =
        parts.iter().enumerate().map(|(i, len)| (format!("p{i}"), *len)).collect();
    axes.push(("x".into(), 1 + seed.below(3)));
    axes.push(("r".into(), 1 + seed.below(2)));
    let along: Vec<String> = (0..parts.len()).map(|i| format!("p{i}")).collect();
    let turn = seed.below(axes.len());
    axes.rotate_left(turn);
    let axes: Vec<String> = axes.iter().map(|(name, len)| format!("{name}:{len}")).collect();
    let split = if seed.one_in(2) { "x" } else { "_" };
    format!("u8[7]@{name}{{{}}}({split} | sum {})", axes.join(","), along.join("+"))
}

/// What a rank holds of every element: a set of parts of the source.
type Held = BTreeMap<(Rank, u64), BTreeSet<usize>>;

/// Ranks, their elements and their parts, in a layout whose first rank is this.
fn elements(layout: &Layout, first: u32) -> Vec<(Rank, u64, usize)> {
    let mesh = layout.mesh();
    let of = |position: usize| {
        let coord = mesh.coord(position);
        let part = layout.contribution_at(&coord);
        let boxes = layout.shard_at(&coord);
        let spans = boxes.into_iter().flat_map(|b| b.spans()[0].start..b.spans()[0].end);
        spans.map(move |element| (Rank(first + position as u32), element, part)).collect::<Vec<_>>()
    };
    (0..mesh.len()).flat_map(of).collect()
}

/// One transfer, element by element. What arrives replaces what is there or joins it; a rank's own part comes first.
fn carry(held: &mut Held, own: &Held, t: &Transfer, elements: std::ops::Range<u64>) {
    for element in elements {
        let at = |rank: Rank| (rank, element);
        let sent = held.get(&at(t.src)).or_else(|| own.get(&at(t.src))).expect("it holds something").clone();
        let mine = own.get(&at(t.dst)).cloned().unwrap_or_default();
        let there =
            held.entry(at(t.dst)).or_insert_with(|| if t.reduce { mine.clone() } else { BTreeSet::new() });
        if !t.reduce {
            there.clear();
        }
        let joined = sent.len() + there.len();
        there.extend(sent);
        assert_eq!(there.len(), joined, "a part is counted twice");
        if t.then_own {
            there.extend(mine);
        }
    }
}

#[test]
fn parts_of_the_destination_are_the_parts_of_the_source() {
    let (mut planned, mut fewer) = (0, 0);
    for number in 0..sweep::count(300) as u64 {
        let mut seed = Seed(number);
        let axes =
            |seed: &mut Seed| -> Vec<usize> { (0..1 + seed.below(2)).map(|_| 1 + seed.below(4)).collect() };
        let (from, mut to) = (axes(&mut seed), axes(&mut seed));
        if seed.one_in(2) {
            to = from.clone();
        }
        let (src, dst) = (layout(&mut seed, "A", &from), layout(&mut seed, "B", &to));
        let (a, b): (Layout, Layout) = (src.parse().unwrap(), dst.parse().unwrap());
        let (from, to) = (a.num_contributions(), b.num_contributions());
        let problem = match Problem::pair(a.clone(), b.clone()) {
            Ok(problem) => problem,
            Err(PlanError::PartialDestination { .. }) => {
                assert!(from != to, "{src} -> {dst} is refused");
                continue;
            }
            Err(other) => panic!("{src} -> {dst}: {other}"),
        };
        let plan = plan(&problem, &PlanOptions::default()).unwrap_or_else(|e| panic!("{src} -> {dst}: {e}"));
        verify(&plan).unwrap_or_else(|e| panic!("{src} -> {dst}: {e}"));
        let own: Held = elements(&a, 0).into_iter().map(|(r, e, part)| ((r, e), [part].into())).collect();
        let mut held = Held::new();
        for t in plan.transfers() {
            let span = plan.region(t).spans()[0];
            carry(&mut held, &own, t, span.start..span.end);
        }
        for (rank, element, part) in elements(&b, a.mesh().len() as u32) {
            let group = from / to;
            let wanted: BTreeSet<usize> = (part * group..(part + 1) * group).collect();
            assert_eq!(
                held.get(&(rank, element)),
                Some(&wanted),
                "{src} -> {dst}: {rank}, element {element}"
            );
        }
        planned += 1;
        fewer += usize::from(to > 1 && to < from);
    }
    assert!(planned > sweep::count(300) / 3 && fewer > 5, "{planned} planned, {fewer} with fewer parts");
}
