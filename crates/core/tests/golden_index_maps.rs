//! Our index maps agree with JAX and torch, by golden files that tests/regenerate_golden.py writes from the packages.

use std::path::Path;

use crossmesh_core::id::Rank;
use crossmesh_core::layout::Layout;
use crossmesh_core::region::{Region, Span};
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    package: String,
    version: String,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    native: String,
    foreign: String,
    short: Option<String>,
    /// Start and stop of every dim; nothing for an empty shard.
    boxes: Vec<Option<Vec<(u64, u64)>>>,
}

fn golden(package: &str) -> Golden {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../tests/golden/index_maps_{package}.json"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let golden: Golden = serde_json::from_str(&text).unwrap();
    assert_eq!(golden.package, package);
    assert!(golden.version.contains('.'));
    golden
}

/// Compares every device's box; `order` gives the positions of the mesh in the order of the golden boxes.
fn compare(case: &Case, order: fn(&Layout) -> Vec<usize>) {
    let layout: Layout = case.native.parse().unwrap_or_else(|e| panic!("{e}"));
    for foreign in [Some(&case.foreign), case.short.as_ref()].into_iter().flatten() {
        assert_eq!(foreign.parse::<Layout>().unwrap_or_else(|e| panic!("{e}")), layout, "{foreign}");
    }
    let order = order(&layout);
    assert_eq!(order.len(), case.boxes.len(), "{layout}");
    for (position, expected) in order.into_iter().zip(&case.boxes) {
        let coord = layout.mesh().coord(position);
        let spans = |spans: &Vec<(u64, u64)>| spans.iter().map(|&(a, b)| Span::new(a, b)).collect();
        let expected: Vec<Region> = expected.iter().map(spans).map(Region::new).collect();
        assert_eq!(layout.shard_at(&coord), expected, "{layout} at {coord:?}");
    }
}

#[test]
fn boxes_are_those_of_jax() {
    let golden = golden("jax");
    assert!(golden.cases.len() >= 100);
    let mut tuples = 0;
    for case in &golden.cases {
        compare(case, |layout| {
            let ranks: &[Rank] = layout.mesh().listed_ranks().expect("JAX cases list their devices");
            let mut positions: Vec<usize> = (0..ranks.len()).collect();
            positions.sort_unstable_by_key(|&p| ranks[p]);
            positions
        });
        tuples += usize::from(case.foreign.contains("(("));
    }
    assert!(tuples >= 5, "only {tuples} cases have several axes on one dim");
}

#[test]
fn boxes_are_those_of_torch() {
    let golden = golden("torch");
    assert!(golden.cases.len() >= 100);
    let (mut nested, mut empty) = (0, 0);
    for case in &golden.cases {
        compare(case, |layout| (0..layout.mesh().len()).collect());
        nested += usize::from(case.native.contains('+'));
        empty += usize::from(case.boxes.contains(&None) && case.boxes.iter().any(Option::is_some));
    }
    assert!(nested >= 20 && empty >= 20, "{nested} cases nest, {empty} have some empty shards");
}
