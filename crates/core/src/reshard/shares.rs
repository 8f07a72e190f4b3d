//! Destinations that are partial sums themselves.
//!
//! Parts of the source are put together to the parts of the destination, neighbours first: each part of the destination is a
//! tensor of its own, that some of the source's devices hold parts of and some of the destination's devices want whole.
//!
//! ```text
//! A{x:2,d:4}(x | sum d) -> B{d:2}(_ | sum d)
//!
//! part 0 of 2    A_d0to1{x:2,d:2}=0,1,4,5 (x | sum d)    ->    B_d0{d:1}=8 (_)
//! part 1 of 2    A_d2to3{x:2,d:2}=2,3,6,7 (x | sum d)    ->    B_d1{d:1}=9 (_)
//! ```
//!
//! With as many parts on both sides nothing is added up at all. A part that no part of the source goes to would be nothing: such
//! destinations are refused.

use std::ops::Range;

use crate::layout::{Holding, Layout};
use crate::mesh::{Axis, Mesh};

use super::problem::{Placed, PlanError};

/// What a partial destination comes to: a name and two layouts for each of its parts. Meshes list their ranks.
pub fn shares(name: &str, src: &Placed, dst: &Placed) -> Result<Vec<(String, Layout, Layout)>, PlanError> {
    let (from, to) = (src.layout.num_contributions(), dst.layout.num_contributions());
    let refused = |why: String| PlanError::PartialDestination {
        src: src.layout.summary(),
        dst: dst.layout.summary(),
        why,
    };
    if let (Some(a), Some(b)) = (src.layout.partial(), dst.layout.partial())
        && a.op != b.op
    {
        return Err(refused(format!("parts to be combined by {} are not parts of a {}", a.op, b.op)));
    }
    if to > from {
        let parts = if from == 1 { "whole values are one part" } else { "there are too few parts" };
        return Err(refused(format!("{parts}, {to} are wanted")));
    }
    (0..to)
        .map(|part| {
            let uneven = || refused(format!("{from} parts cannot be put together to {to} alike"));
            let of_src = kept(&src.layout, part, to).ok_or_else(uneven)?;
            let of_dst = kept(&dst.layout, part, to).ok_or_else(uneven)?;
            let name = match (to, name) {
                (1, name) => name.to_string(),
                (_, "") => format!("part {part} of {to}"),
                (_, name) => format!("{name}, part {part} of {to}"),
            };
            Ok((name, restricted(src, &of_src), restricted(dst, &of_dst)))
        })
        .collect()
}

/// By axis: the coordinates of the devices that hold what goes into one of `to` parts; none where they are no rows of the mesh.
fn kept(layout: &Layout, part: usize, to: usize) -> Option<Vec<Range<u32>>> {
    let axes = layout.mesh().axes();
    let mut kept: Vec<Range<u32>> = axes.iter().map(|axis| 0..axis.len).collect();
    let mut groups = to;
    let mut part = part;
    for &axis in layout.partial().map_or(&[][..], |partial| &partial.axes) {
        let len = axes[axis].len as usize;
        // The first axes tell parts far apart, the last ones neighbours.
        let here = if groups.is_multiple_of(len) { len } else { groups };
        if !len.is_multiple_of(here) {
            return None;
        }
        groups /= here;
        let (place, each) = (part / groups, len / here);
        part %= groups;
        kept[axis] = (place * each) as u32..((place + 1) * each) as u32;
    }
    (groups == 1).then_some(kept)
}

/// The layout on those devices alone, of values that are whole once its own parts are combined.
fn restricted(placed: &Placed, kept: &[Range<u32>]) -> Layout {
    let (layout, whole) = (&placed.layout, placed.layout.mesh());
    let is_kept = |position: &usize| {
        let coord = whole.coord(*position);
        coord.iter().zip(kept).all(|(at, kept)| kept.contains(at))
    };
    let positions: Vec<usize> = (0..whole.len()).filter(is_kept).collect();
    let axis = |(axis, kept): (&Axis, &Range<u32>)| Axis { len: kept.end - kept.start, ..axis.clone() };
    let mesh = Mesh {
        name: name_of(whole, kept),
        axes: whole.axes().iter().zip(kept).map(axis).collect(),
        ranks: Some(positions.iter().map(|position| placed.ranks[*position]).collect()),
    };
    let mut restricted = match &layout.holding {
        Holding::Splits(_) => Layout { mesh, ..layout.clone() },
        Holding::Boxes(_) => {
            let held = positions.iter().map(|position| layout.held_at(&whole.coord(*position))).collect();
            Layout::of_boxes(layout.dtype(), layout.shape().to_vec(), mesh, held)
                .expect("these boxes were a layout's before")
        }
    };
    restricted.partial = layout.partial.clone();
    if restricted.num_contributions() == 1 {
        restricted.partial = None;
    }
    restricted
}

/// The mesh's name, and the rows that are left of it: of equal names, equal devices.
fn name_of(mesh: &Mesh, kept: &[Range<u32>]) -> String {
    let mut name = mesh.name().to_string();
    for (axis, kept) in mesh.axes().iter().zip(kept).filter(|(axis, kept)| kept.end - kept.start < axis.len) {
        name += &match kept.end - kept.start {
            1 => format!("_{}{}", axis.name, kept.start),
            _ => format!("_{}{}to{}", axis.name, kept.start, kept.end - 1),
        };
    }
    name
}
