//! Layouts by boxes: for every device of the mesh the boxes it holds, and where they lie in its memory.
//!
//! Splits by axes say much with little, and not everything: chunks of a checkpoint, flat runs that end anywhere, spans
//! of tokens of any length, slices of a buffer that is wider than the tensor. A list of boxes says all of it:
//!
//! ```text
//! f32[8,6]@A{x:2}{0: [0:8, 0:3] by 6,1; 1: [0:4, 3:6] [6:8, 3:6]}
//!
//!          dim 1             memory of position 0, 6 wide     memory of position 1, packed
//!        0 0 0 1 1 1          0 0 0 . . . 0 0 0 . . .          1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1
//! dim 0  0 0 0 1 1 1
//!        0 0 0 . . .          rows 4 and 5 of the right half are nobody's
//! ```
//!
//! Boxes of different devices may overlap: those are replicas. What one device holds has a place of its own each.

use std::fmt;

use rustc_hash::FxHashMap;

use crate::id::Rank;
use crate::mesh::{Mesh, RankList};
use crate::region::Region;

use super::{MAX_DIMS, memory};

/// More boxes than this, counted on every device that holds them, are refused.
pub const MAX_BOXES: u64 = 1 << 22;

/// A box in a device's memory: element `x` of the tensor lies `offset_elements + Σ strides·(x - start)` elements behind
/// the start of the device's shard.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HeldBox {
    pub region: Region,
    /// Where its first element lies, in elements from the start of the shard.
    pub offset_elements: u64,
    /// For every dim, how many elements apart neighbours lie.
    pub strides: Vec<u64>,
}

impl HeldBox {
    /// A box that lies row-major in one stretch.
    pub fn packed(region: Region, offset_elements: u64) -> Self {
        let strides = row_major(&region);
        Self { region, offset_elements, strides }
    }

    /// Behind its last element. Layouts check once that this fits, in bytes too.
    pub fn end_elements(&self) -> u64 {
        self.checked_end().expect("a layout checks where its boxes end")
    }

    fn checked_end(&self) -> Option<u64> {
        let steps = self.region.spans().iter().zip(&self.strides);
        let last = steps
            .map(|(span, stride)| span.len().checked_sub(1)?.checked_mul(*stride))
            .try_fold(self.offset_elements, |at, step| at.checked_add(step?))?;
        last.checked_add(1)
    }

    pub fn is_row_major(&self) -> bool {
        self.strides == row_major(&self.region)
    }
}

/// The strides of a box that lies in one stretch, the last dim closest.
fn row_major(region: &Region) -> Vec<u64> {
    let mut strides = vec![1u64; region.num_dims()];
    for dim in (1..strides.len()).rev() {
        // Only a box outside every tensor is so large; it is refused for that.
        strides[dim - 1] = u64::saturating_mul(strides[dim], region.spans()[dim].len());
    }
    strides
}

/// What is wrong with the boxes of a layout. A `holder` is a position in the mesh, with its rank where that is known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BoxError {
    #[error("box {region} of {holder} {fault}")]
    Bad { holder: String, region: Box<Region>, fault: BoxFault },
    #[error("boxes {first} and {second} of {holder} share a place in its memory")]
    SharedPlace { holder: String, first: Box<Region>, second: Box<Region> },
    #[error("the layout has more than {MAX_BOXES} boxes, counted on every device that holds them")]
    TooManyBoxes,
    #[error("the tensor has more than 2^64 bytes or more than {MAX_DIMS} dims")]
    TensorTooLarge,
    #[error("{given} lists of boxes are given for {devices} devices")]
    PositionsDiffer { given: usize, devices: usize },
}

/// What is wrong with one box, as the end of a sentence about it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BoxFault {
    #[error("has {given} dims, the tensor has {dims}")]
    DimsDiffer { given: usize, dims: usize },
    #[error("reaches outside the tensor {}", Region::whole(shape))]
    OutsideShape { shape: Vec<u64> },
    #[error("is empty")]
    Empty,
    #[error("has {given} strides for {dims} dims")]
    StridesDiffer { given: usize, dims: usize },
    #[error("ends beyond 2^64 bytes of memory")]
    MemoryTooLarge,
    #[error("has strides that may put two of its elements into one place")]
    FoldsOntoItself,
}

impl BoxError {
    pub(super) fn hint(&self) -> Option<&'static str> {
        Some(match self {
            BoxError::Bad { fault, .. } => match fault {
                BoxFault::DimsDiffer { .. } => "give a span `start:end` for every dim",
                BoxFault::Empty => "leave it out: a device may hold nothing",
                BoxFault::StridesDiffer { .. } => "give a stride for every dim, in elements",
                BoxFault::FoldsOntoItself => "every stride must lead beyond all that the smaller ones reach",
                _ => return None,
            },
            BoxError::SharedPlace { .. } => {
                "move one of them with `at`, in elements; boxes without it lie one behind the other"
            }
            BoxError::TooManyBoxes => "merge boxes that lie side by side",
            BoxError::PositionsDiffer { .. } | BoxError::TensorTooLarge => return None,
        })
    }
}

/// The boxes of every position of a mesh. Positions with the same boxes share one list.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BoxTable {
    /// By first position that holds it; boxes rise by offset.
    kinds: Vec<Vec<HeldBox>>,
    /// By position.
    kind_of: Vec<u32>,
}

impl BoxTable {
    /// Checks and shares the boxes of every position; they come in any order.
    pub(super) fn new(
        mesh: &Mesh,
        shape: &[u64],
        width: u64,
        positions: Vec<Vec<HeldBox>>,
    ) -> Result<Self, BoxError> {
        if positions.len() != mesh.len() {
            return Err(BoxError::PositionsDiffer { given: positions.len(), devices: mesh.len() });
        }
        if positions.iter().map(|boxes| boxes.len() as u64).sum::<u64>() > MAX_BOXES {
            return Err(BoxError::TooManyBoxes);
        }
        let mut table = Self { kinds: vec![], kind_of: Vec::with_capacity(positions.len()) };
        let mut known: FxHashMap<Vec<HeldBox>, u32> = FxHashMap::default();
        for (position, mut boxes) in positions.into_iter().enumerate() {
            if let Some(&kind) = known.get(&boxes) {
                table.kind_of.push(kind);
                continue;
            }
            let holder = || holder(mesh, position);
            for held in &boxes {
                check_box(held, shape, width).map_err(|fault| BoxError::Bad {
                    holder: holder(),
                    region: Box::new(held.region.clone()),
                    fault,
                })?;
            }
            let given = boxes.clone();
            boxes.sort_by(|a, b| (a.offset_elements, &a.region).cmp(&(b.offset_elements, &b.region)));
            check_places(&boxes, holder).map_err(|(.., error)| error)?;
            let kind = *known.entry(boxes).or_insert_with_key(|boxes| {
                table.kinds.push(boxes.clone());
                table.kinds.len() as u32 - 1
            });
            known.insert(given, kind);
            table.kind_of.push(kind);
        }
        Ok(table)
    }

    /// The boxes of a position, by rising offset.
    pub fn boxes(&self, position: usize) -> &[HeldBox] {
        &self.kinds[self.kind(position)]
    }

    /// Which list a position holds; those with the same one hold the same.
    pub fn kind(&self, position: usize) -> usize {
        self.kind_of[position] as usize
    }

    pub fn kinds(&self) -> &[Vec<HeldBox>] {
        &self.kinds
    }

    /// The first position of a list.
    pub fn first_position(&self, kind: usize) -> usize {
        self.kind_of.iter().position(|&k| k as usize == kind).expect("every list is some position's")
    }
}

/// A position for an error: its rank as well where the mesh lists ranks.
pub(super) fn holder(mesh: &Mesh, position: usize) -> String {
    match mesh.listed_ranks() {
        Some(ranks) => format!("position {position} of {} ({})", mesh.name(), ranks[position]),
        None => format!("position {position} of {}", mesh.name()),
    }
}

/// Whether a box can be one of a tensor's, in some memory.
pub(super) fn check_box(held: &HeldBox, shape: &[u64], width: u64) -> Result<(), BoxFault> {
    let (given, dims) = (held.region.num_dims(), shape.len());
    if given != dims {
        return Err(BoxFault::DimsDiffer { given, dims });
    }
    if held.region.spans().iter().zip(shape).any(|(span, len)| span.end > *len) {
        return Err(BoxFault::OutsideShape { shape: shape.to_vec() });
    }
    if held.region.is_empty() {
        return Err(BoxFault::Empty);
    }
    if held.strides.len() != dims {
        return Err(BoxFault::StridesDiffer { given: held.strides.len(), dims });
    }
    if held.checked_end().and_then(|end| end.checked_mul(width)).is_none() {
        return Err(BoxFault::MemoryTooLarge);
    }
    if memory::folds_onto_itself(held) { Err(BoxFault::FoldsOntoItself) } else { Ok(()) }
}

/// Whether the boxes, by rising offset, have places of their own; if not, which two have not.
pub(super) fn check_places(
    boxes: &[HeldBox],
    holder: impl Fn() -> String,
) -> Result<(), (usize, usize, BoxError)> {
    let Some((i, j)) = memory::collision(boxes) else { return Ok(()) };
    let (first, second) = (boxes[i].region.clone(), boxes[j].region.clone());
    let (first, second) = (Box::new(first), Box::new(second));
    Err((i, j, BoxError::SharedPlace { holder: holder(), first, second }))
}

/// Prints `0-1: [0:4]; 2: [4:8] at 6 by 2`, the inside of the braces.
impl fmt::Display for BoxTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut positions: Vec<Vec<Rank>> = vec![vec![]; self.kinds.len()];
        for (position, &kind) in self.kind_of.iter().enumerate() {
            positions[kind as usize].push(Rank::at(position));
        }
        let mut separator = "";
        for (boxes, positions) in self.kinds.iter().zip(&positions).filter(|(boxes, _)| !boxes.is_empty()) {
            write!(f, "{separator}{}:", RankList(positions))?;
            separator = "; ";
            let mut next = 0;
            for held in boxes {
                write!(f, " {}", held.region)?;
                if held.offset_elements != next {
                    write!(f, " at {}", held.offset_elements)?;
                }
                if !held.is_row_major() {
                    let strides: Vec<String> = held.strides.iter().map(u64::to_string).collect();
                    write!(f, " by {}", strides.join(","))?;
                }
                next = held.end_elements().max(next);
            }
        }
        Ok(())
    }
}
