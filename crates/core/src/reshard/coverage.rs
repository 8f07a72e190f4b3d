//! Whether a source has all that its destination wants, and nobody wants an element twice.
//!
//! Splits by axes cannot go wrong here: they cover the tensor, each device's part once. Lists of boxes can:
//!
//! ```text
//! source        0: [0:4]   1: [6:8]          nobody holds [4:6]
//! destination   0: [0:6]   1: [4:8] [5:6]    r0 wants it; and r1 wants [5:6] twice
//! ```
//!
//! Elements that nobody wants need no holder. Of a partial sum every part must be held: what lacks one has no sum.

use crate::box_index::{BoxIndex, Visit};
use crate::region::{Region, Span};

use super::atoms::{Atom, atoms, atoms_of};
use super::problem::{Placed, PlanError};

/// Holes are looked for among this many boxes at a time.
const FEW_BOXES: usize = 32;

/// Checks the boxes of one tensor's two sides.
pub(super) fn check(src: &Placed, dst: &Placed) -> Result<(), PlanError> {
    check_wanted_once(dst)?;
    if src.layout.by_boxes().is_none() {
        return Ok(());
    }
    let wanted = atoms(&dst.layout)?;
    for part in 0..src.layout.num_contributions() {
        let coord = |position| src.layout.mesh().coord(position);
        let held = atoms_of(&src.layout, |position| src.layout.contribution_at(&coord(position)) == part)?;
        let cover = Cover { index: BoxIndex::new(held.iter().map(|a| &a.region)), held: &held };
        let hole = wanted.iter().find_map(|atom| Some((atom, cover.hole(&atom.region)?)));
        if let Some((atom, region)) = hole {
            let part = src.layout.partial().map(|partial| format!(" of part {part} of the {}", partial.op));
            let layouts = format!("{} -> {}", src.layout.summary(), dst.layout.summary());
            return Err(PlanError::NobodyHolds {
                region,
                what: part.unwrap_or_default().into(),
                rank: dst.ranks[atom.holders[0] as usize],
                layouts: layouts.into(),
            });
        }
    }
    Ok(())
}

fn check_wanted_once(dst: &Placed) -> Result<(), PlanError> {
    let Some(table) = dst.layout.by_boxes() else { return Ok(()) };
    for (kind, boxes) in table.kinds().iter().enumerate() {
        let Some((first, second)) = BoxIndex::new(boxes.iter().map(|b| &b.region)).first_overlap() else {
            continue;
        };
        let [first, second] = [first, second].map(|i| boxes[i as usize].region.clone());
        let region = first.intersect(&second).expect("the index finds what overlaps");
        let rank = dst.ranks[table.first_position(kind)];
        let dst = dst.layout.summary().into();
        let (first, second) = (Box::new(first), Box::new(second));
        return Err(PlanError::WantedTwice { rank, region, first, second, dst });
    }
    Ok(())
}

/// Boxes that do not overlap.
struct Cover<'a> {
    held: &'a [Atom],
    index: BoxIndex,
}

impl Cover<'_> {
    /// How much of a box is covered, and by how many boxes.
    fn covered(&self, region: &Region) -> (u64, usize) {
        let (mut volume, mut boxes) = (0, 0);
        self.index.visit_meeting(region.spans(), |_, spans| {
            let common =
                spans.iter().zip(region.spans()).map(|(a, b)| a.end.min(b.end) - a.start.max(b.start));
            volume += common.product::<u64>();
            boxes += 1;
            Visit::On
        });
        (volume, boxes)
    }

    /// A part of the box that nothing covers, if there is one.
    fn hole(&self, region: &Region) -> Option<Region> {
        let (volume, mut boxes) = self.covered(region);
        if volume == region.volume() {
            return None;
        }
        let mut part = region.clone();
        while boxes > FEW_BOXES {
            let mut lacking = halves(&part).into_iter().map(|half| (self.covered(&half), half));
            ((_, boxes), part) = lacking
                .find(|((volume, _), half)| *volume < half.volume())
                .expect("a box that is not covered has a half that is not");
        }
        let mut left = vec![part.clone()];
        for meeting in self.index.meeting(part.spans()) {
            let held = &self.held[meeting as usize].region;
            left = left.iter().flat_map(|rest| rest.subtract(held)).collect();
        }
        left.into_iter().min()
    }
}

/// The two halves of a box, cut along its longest dim.
fn halves(region: &Region) -> [Region; 2] {
    let longest = (0..region.num_dims()).max_by_key(|&dim| region.spans()[dim].len());
    let dim = longest.expect("more than one box meets it, so it has dims");
    let Span { start, end } = region.spans()[dim];
    let middle = start + (end - start) / 2;
    [region.with_span(dim, Span::new(start, middle)), region.with_span(dim, Span::new(middle, end))]
}

#[cfg(test)]
mod tests {
    use crate::reshard::Problem;

    fn error(src: &str, dst: &str) -> String {
        match Problem::pair(src.parse().unwrap(), dst.parse().unwrap()) {
            Ok(_) => panic!("{src} -> {dst} is no error"),
            Err(error) => error.to_string().lines().next().unwrap_or_default().to_string(),
        }
    }

    #[test]
    fn holes_are_named_with_who_wants_them() {
        let src = "f32[8]@A{x:2}{0: [0:4]; 1: [6:8]}";
        assert_eq!(error(src, "f32[8]@B{x:2}(x)"), "nobody holds [4:6], which r3 wants");
        assert_eq!(error(src, "f32[8]@B{x:2}{1: [3:5]}"), "nobody holds [4:5], which r3 wants");
        let wanted_elsewhere = "f32[8]@B{x:2}{0: [0:4]; 1: [6:8]}".parse().unwrap();
        assert!(Problem::pair(src.parse().unwrap(), wanted_elsewhere).is_ok());
        assert_eq!(error("f32[8]@A{x:2}{}", "f32[8]@B{x:1}(_)"), "nobody holds [0:8], which r2 wants");
        assert_eq!(error("f32[]@A{x:2}{}", "f32[]@B{x:1}()"), "nobody holds [], which r2 wants");
    }

    #[test]
    fn a_hole_is_found_among_many_boxes() {
        let boxes = |skip: u64| {
            let all = (0..400u64).filter(|i| *i != skip);
            all.map(|i| format!(" [{}:{}, {}:{}]", i / 20, i / 20 + 1, i % 20, i % 20 + 1))
                .collect::<String>()
        };
        let src = |skip| format!("u8[20,20]@A{{x:1}}{{0:{}}}", boxes(skip));
        assert_eq!(error(&src(317), "u8[20,20]@B{x:1}(_,_)"), "nobody holds [15:16, 17:18], which r1 wants");
        assert!(Problem::pair(src(400).parse().unwrap(), "u8[20,20]@B{x:1}(_,_)".parse().unwrap()).is_ok());
    }

    #[test]
    fn every_part_of_a_sum_must_be_held() {
        let src = "f32[8]@A{d:2}{0: [0:8]; 1: [0:6] | sum d}";
        assert_eq!(error(src, "f32[8]@B{x:2}(x)"), "nobody holds [6:8] of part 1 of the sum, which r3 wants");
        let held = "f32[8]@A{d:2}{0: [0:8]; 1: [0:6] | sum d}";
        assert!(Problem::pair(held.parse().unwrap(), "f32[8]@B{x:1}{0: [1:6]}".parse().unwrap()).is_ok());
    }

    #[test]
    fn a_rank_wants_an_element_once() {
        let twice = "f32[8]@B{x:2}{0: [0:8]; 1: [0:4] [3:6]}";
        assert_eq!(error("f32[8]@A{x:2}(x)", twice), "r3 wants [3:4] twice: in [0:4] and in [3:6]");
        // A source may list it twice: both are the same.
        let source = "f32[8]@A{x:2}{0: [0:8]; 1: [0:4] [3:6]}".parse().unwrap();
        assert!(Problem::pair(source, "f32[8]@B{x:2}(x)".parse().unwrap()).is_ok());
    }
}
