//! Reading boxes: what a layout lists for every position of its mesh.
//!
//! ```text
//! boxes     := '{' [ holder { ';' holder } ] [ '|' op axes ] '}'
//! holder    := positions ':' { box }
//! positions := number [ '-' number ] { ',' … }
//! box       := '[' [ span { ',' span } ] ']' [ 'at' number ] [ 'by' number { ',' … } ]
//! span      := number ':' number
//! ```
//!
//! Positions count the devices of the mesh from 0, row-major. A box without `at` lies behind all that were listed
//! before it for the same positions, one without `by` row-major.

use std::ops::Range;
use std::sync::Arc;

use super::held::{BoxError, HeldBox, check_box, check_places, holder};
use super::notation::{Cursor, NotationError, Problem};
use super::{BoxTable, Holding, MAX_BOXES, Partial};
use crate::dtype::DType;
use crate::mesh::Mesh;
use crate::region::{Region, Span};

/// What is known before the boxes are read.
pub(super) struct Tensor<'a> {
    pub dtype: DType,
    pub shape: &'a [u64],
    pub mesh: &'a Mesh,
}

/// A box, and the characters that said it.
struct ReadBox {
    held: HeldBox,
    at: Range<usize>,
}

impl Cursor<'_> {
    pub(super) fn boxes(&mut self, tensor: &Tensor) -> Result<(Holding, Option<Partial>), NotationError> {
        let open = self.at;
        self.token('{', "`{` and the boxes of every device")?;
        let mut positions: Vec<Option<Vec<HeldBox>>> = vec![None; tensor.mesh.len()];
        let mut count = 0u64;
        while !matches!(self.peek(), Some('}' | '|')) {
            self.holder(tensor, &mut positions, &mut count)?;
            if !self.take(';') {
                break;
            }
        }
        let partial = if self.take('|') { Some(self.partial(tensor.mesh)?) } else { None };
        self.token('}', "a box, `;` or `}`")?;
        let positions = positions.into_iter().map(Option::unwrap_or_default).collect();
        let table = BoxTable::new(tensor.mesh, tensor.shape, tensor.dtype.bytes(), positions)
            .map_err(|error| self.error(open..self.at, Problem::Boxes(error)))?;
        Ok((Holding::Boxes(Arc::new(table)), partial))
    }

    /// Some positions, and the boxes that each of them holds.
    fn holder(
        &mut self,
        tensor: &Tensor,
        positions: &mut [Option<Vec<HeldBox>>],
        count: &mut u64,
    ) -> Result<(), NotationError> {
        let places = self.positions(positions)?;
        self.token(':', "`:` and boxes")?;
        let first = places[0];
        let mut read: Vec<ReadBox> = Vec::new();
        let mut end = 0;
        while self.peek() == Some('[') {
            let next = self.held_box(tensor, first, end)?;
            *count += places.len() as u64;
            if *count > MAX_BOXES {
                return Err(self.error(next.at, Problem::Boxes(BoxError::TooManyBoxes)));
            }
            end = next.held.end_elements().max(end);
            read.push(next);
        }
        self.check_places(tensor.mesh, first, &mut read)?;
        let boxes: Vec<HeldBox> = read.into_iter().map(|b| b.held).collect();
        places.into_iter().for_each(|place| positions[place] = Some(boxes.clone()));
        Ok(())
    }

    /// `0` or `0-1,4`: positions of the mesh that have not been listed before.
    fn positions(&mut self, known: &mut [Option<Vec<HeldBox>>]) -> Result<Vec<usize>, NotationError> {
        let mut places: Vec<usize> = Vec::new();
        loop {
            let (range, at) = self.rank_range()?;
            let (position, devices) = (range.end - 1, known.len());
            if position as usize >= devices {
                return Err(self.error(at, Problem::NoSuchPosition { position, devices }));
            }
            for position in range.map(|p| p as usize) {
                if known[position].replace(vec![]).is_some() {
                    return Err(self.error(at, Problem::PositionRepeated { position }));
                }
                places.push(position);
            }
            if !self.take(',') {
                return Ok(places);
            }
        }
    }

    /// One box; without `at` it lies at `next`.
    fn held_box(&mut self, tensor: &Tensor, position: usize, next: u64) -> Result<ReadBox, NotationError> {
        self.skip_blanks();
        let open = self.at;
        let region = self.region()?;
        let offset = if self.keyword("at") { self.number()?.0 } else { next };
        let mut held = HeldBox::packed(region, offset);
        if self.keyword("by") {
            held.strides = self.numbers(',', None)?;
        }
        let at = open..self.at;
        match check_box(&held, tensor.shape, tensor.dtype.bytes()) {
            Ok(()) => Ok(ReadBox { held, at }),
            Err(fault) => {
                let holder = holder(tensor.mesh, position);
                let error = BoxError::Bad { holder, region: Box::new(held.region), fault };
                Err(self.error(at, Problem::Boxes(error)))
            }
        }
    }

    fn region(&mut self) -> Result<Region, NotationError> {
        self.token('[', "`[` and a box")?;
        let mut spans = Vec::new();
        while self.peek() != Some(']') {
            if !spans.is_empty() {
                self.token(',', "`,` or `]`")?;
            }
            let (start, start_at) = self.number()?;
            self.token(':', "`:` and where the span ends")?;
            let (end, end_at) = self.number()?;
            if end < start {
                let found = format!("{start}:{end}");
                let expected = "a span that rises";
                let at = start_at.start..end_at.end;
                return Err(self.error(at, Problem::Expected { expected, found }));
            }
            spans.push(Span::new(start, end));
        }
        self.token(']', "`,` or `]`")?;
        Ok(Region::new(spans))
    }

    /// Takes a word if it comes next.
    fn keyword(&mut self, word: &str) -> bool {
        self.skip_blanks();
        let rest = self.rest();
        let len = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        // `at24` is read as well: a number cannot start a word.
        let letters = rest[..len].find(|c: char| c.is_ascii_digit()).unwrap_or(len);
        let found = &rest[..letters] == word;
        if found {
            self.at += word.len();
        }
        found
    }

    /// Whether the boxes of a position have places of their own; points at the later one of two that do not.
    fn check_places(&self, mesh: &Mesh, position: usize, read: &mut [ReadBox]) -> Result<(), NotationError> {
        read.sort_by_key(|b| b.held.offset_elements);
        let boxes: Vec<HeldBox> = read.iter().map(|b| b.held.clone()).collect();
        check_places(&boxes, || holder(mesh, position)).map_err(|(first, second, error)| {
            let at = [first, second].map(|i| read[i].at.clone()).into_iter().max_by_key(|at| at.start);
            self.error(at.unwrap_or(0..0), Problem::Boxes(error))
        })
    }
}
