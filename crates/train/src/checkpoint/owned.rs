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

use crate::deal::Share;
use crate::parameter::Parameter;
use crate::stage_rank::{Along, StageRank};

/// For every parameter the runs of the flat buffer that this rank writes, of what it keeps of it; and where each of them is kept.
pub fn owned(
    parameters: &[Parameter],
    place: &StageRank,
    share: &Share,
    elsewhere: &[&str],
) -> Vec<Vec<(Range<usize>, usize)>> {
    let saves = |p: &&Parameter| !elsewhere.contains(&p.name.as_str());
    let mut rows: BTreeMap<Vec<usize>, usize> = BTreeMap::new();
    for parameter in parameters.iter().filter(saves) {
        *rows.entry(replicas(parameter, &share.axes)).or_default() += parameter.range.len();
    }
    let mut behind: BTreeMap<Vec<usize>, usize> = BTreeMap::new();
    let run = |parameter: &Parameter| {
        let (axes, range) = (replicas(parameter, &share.axes), &parameter.range);
        if !saves(&parameter) {
            return vec![];
        }
        let part = along(place, &axes).part(rows[&axes]);
        let start = behind.entry(axes).or_default();
        let own = clamp(&part, &(*start..*start + range.len()));
        let own = range.start + (own.start - *start)..range.start + (own.end - *start);
        *start += range.len();
        // Ranks along tp may have shares that end elsewhere, for their flat buffers need not be equally long: so the row is shared out
        // first, and cut to the share then.
        share.runs.within(&own).collect()
    };
    parameters.iter().map(run).collect()
}

/// The axes of the mesh along which ranks hold the same elements.
fn replicas(parameter: &Parameter, dealt: &[usize]) -> Vec<usize> {
    let splits = parameter.layout.by_axes().expect("parameters are split by axes").splits();
    let different = |axis: &usize| splits.iter().any(|s| s.axes.contains(axis)) || dealt.contains(axis);
    (0..parameter.layout.mesh().axes().len()).filter(|axis| !different(axis)).collect()
}

/// A rank's place among all that differ from it along these axes only.
fn along(place: &StageRank, axes: &[usize]) -> Along {
    axes.iter().fold(Along { rank: 0, size: 1 }, |along, &axis| {
        let len = place.mesh().axes()[axis].len as usize;
        Along { rank: along.rank * len + place.coord()[axis] as usize, size: along.size * len }
    })
}

fn clamp(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.clamp(b.start, b.end);
    start..a.end.clamp(start, b.end.max(start))
}
