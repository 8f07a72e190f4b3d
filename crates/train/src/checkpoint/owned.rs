//! Who writes what: of ranks that hold the same, one writes, and all of them in turn.
//!
//! Parameters that the same ranks hold are put one behind the other, and every one of those ranks writes a part of that row, as equal as can be. So
//! writing is spread evenly, and all but a few parameters stay in one piece:
//!
//! ```text
//! dp = 2, tp = 1        wte              | wpe | h.0.ln_1 | h.0.attn
//!                       |---- rank 0 ----------|---- rank 1 --------|
//! ```
//!
//! A rank finds out alone: the same rule on every rank gives every element to one of them.

use std::collections::BTreeMap;
use std::ops::Range;

use super::state::Sharding;
use crate::parameter::Parameter;
use crate::place::{Along, Place};

/// For every parameter the run of the flat buffer that this rank writes, of the run `shard` that it holds.
pub fn owned(
    parameters: &[Parameter],
    place: &Place,
    shard: &Range<usize>,
    sharding: Sharding,
    elsewhere: &[&str],
) -> Vec<Range<usize>> {
    let saves = |p: &&Parameter| !elsewhere.contains(&p.name.as_str());
    let mut rows: BTreeMap<Vec<usize>, usize> = BTreeMap::new();
    for parameter in parameters.iter().filter(saves) {
        *rows.entry(replicas(parameter, sharding)).or_default() += parameter.range.len();
    }
    let mut behind: BTreeMap<Vec<usize>, usize> = BTreeMap::new();
    let run = |parameter: &Parameter| {
        let (axes, range) = (replicas(parameter, sharding), &parameter.range);
        if !saves(&parameter) {
            return range.start..range.start;
        }
        let part = along(place, &axes).part(rows[&axes]);
        let start = behind.entry(axes).or_default();
        let own = clamp(&part, &(*start..*start + range.len()));
        let own = range.start + (own.start - *start)..range.start + (own.end - *start);
        *start += range.len();
        // Ranks along tp may have shards that end elsewhere, for their flat buffers need not be equally long: so the row is shared out
        // first, and cut to the shard then.
        clamp(&own, shard)
    };
    parameters.iter().map(run).collect()
}

/// The axes of the mesh along which ranks hold the same elements.
fn replicas(parameter: &Parameter, sharding: Sharding) -> Vec<usize> {
    let splits = parameter.layout.by_axes().expect("parameters are split by axes").splits();
    let different = |axis: usize, name: &str| {
        splits.iter().any(|s| s.axes.contains(&axis)) || (name == "dp" && sharding == Sharding::AlongDp)
    };
    let axes = parameter.layout.mesh().axes().iter().enumerate();
    axes.filter(|(i, axis)| !different(*i, &axis.name)).map(|(i, _)| i).collect()
}

/// A rank's place among all that differ from it along these axes only.
fn along(place: &Place, axes: &[usize]) -> Along {
    axes.iter().fold(Along { rank: 0, size: 1 }, |along, &axis| {
        let len = place.mesh().axes()[axis].len as usize;
        Along { rank: along.rank * len + place.coord()[axis] as usize, size: along.size * len }
    })
}

fn clamp(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.clamp(b.start, b.end);
    start..a.end.clamp(start, b.end.max(start))
}
