//! Reading the notation: a cursor over one line of text that remembers where it is, so that an error points at the
//! characters it is about.
//!
//! ```text
//! layout := dtype '[' numbers ']' '@' mesh ( '(' terms [ '|' op axes ] ')' | boxes )
//! mesh   := name '{' [ name ':' number { ',' … } ] '}' [ '=' ranks ]
//!         | name ':' number { 'x' number } [ '=' ranks ]
//! ranks  := [ number [ '-' number ] { ',' … } ] [ '+' number ]
//! term   := '_' | axes | axes '[' numbers ']' | axes 'of' number { '+' number }
//! axes   := name { '+' name }
//! ```
//!
//! Blanks may stand between tokens. Boxes are read in `box_notation.rs`, and what other systems write after the
//! mesh in `interop.rs`.

use std::collections::BTreeMap;
use std::ops::Range;

pub use super::notation_error::{NotationError, Problem};

use super::box_notation::Tensor;
use super::interop::Form;
use super::notation_error::MAX_FUSED_SPANS;
use super::{Holding, Layout, MAX_DIMS, Partial, ReduceOp, Rule, Split};
use crate::dtype::DType;
use crate::id::Rank;
use crate::mesh::{Axis, MAX_AXES, MAX_MESH_LEN, Mesh};

/// A place in a line of notation.
pub(crate) struct Cursor<'a> {
    text: &'a str,
    pub(super) at: usize,
}

/// Axes and how a term cuts them, before they are checked against the dim.
struct Term {
    split: Split,
    at: Range<usize>,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(text: &'a str) -> Self {
        Self { text, at: 0 }
    }

    pub(super) fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    pub(super) fn skip_blanks(&mut self) {
        self.at += self.rest().len() - self.rest().trim_start().len();
    }

    pub(super) fn error(&self, at: Range<usize>, problem: Problem) -> NotationError {
        NotationError { text: self.text.to_string(), at, problem }
    }

    pub(super) fn expected(&mut self, expected: &'static str) -> NotationError {
        self.skip_blanks();
        let next = self.rest().chars().next();
        let found = match next {
            Some(c) if c.is_control() => format!("`{}`", c.escape_default()),
            Some(c) => format!("`{c}`"),
            None => "the end".to_string(),
        };
        self.error(self.at..self.at + next.map_or(0, char::len_utf8), Problem::Expected { expected, found })
    }

    pub(super) fn peek(&mut self) -> Option<char> {
        self.skip_blanks();
        self.rest().chars().next()
    }

    pub(super) fn take(&mut self, c: char) -> bool {
        let found = self.peek() == Some(c);
        if found {
            self.at += c.len_utf8();
        }
        found
    }

    pub(super) fn token(&mut self, c: char, expected: &'static str) -> Result<(), NotationError> {
        if self.take(c) { Ok(()) } else { Err(self.expected(expected)) }
    }

    /// The end of the text.
    pub(crate) fn finish(mut self) -> Result<(), NotationError> {
        match self.peek() {
            None => Ok(()),
            Some(_) => Err(self.expected("the end")),
        }
    }

    /// A name, with its place: a letter, then letters, digits and underscores.
    pub(super) fn name(&mut self, expected: &'static str) -> Result<(&'a str, Range<usize>), NotationError> {
        self.skip_blanks();
        let rest = self.rest();
        let len = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        if !rest.starts_with(|c: char| c.is_ascii_alphabetic()) {
            return Err(self.expected(expected));
        }
        let at = self.at..self.at + len;
        self.at = at.end;
        Ok((&rest[..len], at))
    }

    pub(super) fn number(&mut self) -> Result<(u64, Range<usize>), NotationError> {
        self.skip_blanks();
        let rest = self.rest();
        let len = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        if len == 0 {
            return Err(self.expected("a number"));
        }
        let at = self.at..self.at + len;
        let number = rest[..len]
            .parse()
            .map_err(|_| self.error(at.clone(), Problem::NumberTooLarge { number: rest[..len].into() }))?;
        self.at = at.end;
        Ok((number, at))
    }

    fn number_u32(&mut self) -> Result<(u32, Range<usize>), NotationError> {
        let (number, at) = self.number()?;
        let number = u32::try_from(number).map_err(|_| {
            self.error(
                at.clone(),
                Problem::Expected { expected: "a number below 2^32", found: number.to_string() },
            )
        })?;
        Ok((number, at))
    }

    /// Numbers with a separator between them; none at all if `close` comes first.
    pub(super) fn numbers(
        &mut self,
        separator: char,
        close: Option<char>,
    ) -> Result<Vec<u64>, NotationError> {
        if close.is_some() && self.peek() == close {
            return Ok(vec![]);
        }
        let mut numbers = vec![self.number()?.0];
        while self.take(separator) {
            numbers.push(self.number()?.0);
        }
        Ok(numbers)
    }

    pub(crate) fn layout(&mut self) -> Result<Layout, NotationError> {
        let (name, at) = self.name("a dtype")?;
        let dtype = name.parse().map_err(|()| self.error(at, Problem::UnknownDType { name: name.into() }))?;
        let shape = self.shape(dtype)?;
        self.token('@', "`@` and a mesh")?;
        let (mesh, sized) = self.mesh_or_sizes()?;
        self.skip_blanks();
        let open = self.at;
        let (splits, partial) = match self.form(sized) {
            Form::Boxes => {
                let (holding, partial) = self.boxes(&Tensor { dtype, shape: &shape, mesh: &mesh })?;
                return Ok(Layout { dtype, shape, mesh, holding, partial });
            }
            Form::Native => {
                self.token('(', "`(` and how each dim is split, or `{` and boxes")?;
                self.splits(&mesh, &shape, open)?
            }
            form => self.foreign_splits(form, &mesh, &shape)?,
        };
        self.check_axes(&mesh, &splits, partial.as_ref(), open)?;
        Ok(Layout { dtype, shape, mesh, holding: Holding::Splits(splits), partial })
    }

    fn shape(&mut self, dtype: DType) -> Result<Vec<u64>, NotationError> {
        self.skip_blanks();
        let open = self.at;
        self.token('[', "`[` and a shape")?;
        let shape = self.numbers(',', Some(']'))?;
        self.token(']', "`,` or `]`")?;
        if shape.len() > MAX_DIMS {
            return Err(self.error(open..self.at, Problem::TooManyDims { dims: shape.len() }));
        }
        // Zero-size dims do not excuse the others: offsets inside the tensor are products of any of them.
        let fits = shape.iter().try_fold(dtype.bytes(), |bytes, &len| bytes.checked_mul(len.max(1)));
        if fits.is_none() {
            return Err(self.error(open..self.at, Problem::TensorTooLarge));
        }
        Ok(shape)
    }

    pub(crate) fn mesh(&mut self) -> Result<Mesh, NotationError> {
        self.mesh_or_sizes().map(|(mesh, _)| mesh)
    }

    /// A mesh, and whether it was given by sizes alone (`A:2x4`), as Alpa does.
    fn mesh_or_sizes(&mut self) -> Result<(Mesh, bool), NotationError> {
        let (name, name_at) = self.name("a mesh name")?;
        let sized = self.take(':');
        let axes = if sized { self.sized_axes()? } else { self.named_axes()? };
        let mesh_at = name_at.start..self.at;
        if axes.len() > MAX_AXES {
            return Err(self.error(mesh_at, Problem::TooManyAxes { axes: axes.len() }));
        }
        let devices = axes.iter().try_fold(1u64, |n, a| n.checked_mul(u64::from(a.len)));
        if devices.is_none_or(|n| n > MAX_MESH_LEN) {
            let len = devices.map_or("over 2^64".into(), |n| n.to_string());
            return Err(self.error(mesh_at, Problem::MeshTooLarge { len }));
        }
        let mut mesh = Mesh { name: name.into(), axes, ranks: None };
        if self.take('=') {
            mesh.ranks = Some(self.ranks(mesh.len())?);
        }
        Ok((mesh, sized))
    }

    fn named_axes(&mut self) -> Result<Vec<Axis>, NotationError> {
        self.token('{', "`{` and the mesh's axes")?;
        let mut axes: Vec<Axis> = Vec::new();
        // One axis too many is enough to know; the names are compared pair by pair.
        while self.peek() != Some('}') && axes.len() <= MAX_AXES {
            if !axes.is_empty() {
                self.token(',', "`,` or `}`")?;
            }
            let (axis, at) = self.name("an axis name")?;
            self.token(':', "`:` and the axis' length")?;
            if axes.iter().any(|a| a.name == axis) {
                return Err(self.error(at, Problem::AxisRepeated { axis: axis.into() }));
            }
            axes.push(Axis { name: axis.into(), len: self.axis_len(axis)? });
        }
        if axes.len() <= MAX_AXES {
            self.token('}', "`}`")?;
        }
        Ok(axes)
    }

    pub(super) fn axis_len(&mut self, axis: &str) -> Result<u32, NotationError> {
        let (len, at) = self.number_u32()?;
        match len {
            0 => Err(self.error(at, Problem::AxisEmpty { axis: axis.into() })),
            len => Ok(len),
        }
    }

    /// `0-3`, `0-3+64` or `+64`: the ranks of a mesh as its job counts them, and how many come before the job's first.
    fn ranks(&mut self, mesh_len: usize) -> Result<Vec<Rank>, NotationError> {
        self.skip_blanks();
        let open = self.at;
        let mut ranks = match self.peek() {
            Some('+') => (0..).take(mesh_len).map(Rank).collect(),
            _ => self.listed_ranks(mesh_len)?,
        };
        if self.take('+') {
            let (offset, _) = self.number_u32()?;
            for rank in &mut ranks {
                let shifted = u64::from(rank.0) + u64::from(offset);
                *rank = match u32::try_from(shifted) {
                    Ok(shifted) if shifted < u32::MAX => Rank(shifted),
                    _ => return Err(self.error(open..self.at, Problem::RankTooLarge { rank: shifted })),
                };
            }
        }
        Ok(ranks)
    }

    fn listed_ranks(&mut self, mesh_len: usize) -> Result<Vec<Rank>, NotationError> {
        let open = self.at;
        let mut ranks: Vec<Rank> = Vec::new();
        // First and end of every range so far; they do not overlap.
        let mut seen: BTreeMap<u32, u32> = BTreeMap::new();
        let mut listed = 0u64;
        loop {
            let (range, at) = self.rank_range()?;
            if let Some((&start, _)) =
                seen.range(..range.end).next_back().filter(|(_, end)| **end > range.start)
            {
                return Err(self.error(at, Problem::RankRepeated { rank: start.max(range.start) }));
            }
            seen.insert(range.start, range.end);
            listed += u64::from(range.end - range.start);
            // Ranges that are far too long are counted, not spelt out.
            if listed <= mesh_len as u64 {
                ranks.extend(range.map(Rank));
            }
            if !self.take(',') {
                break;
            }
        }
        if listed != mesh_len as u64 {
            return Err(self.error(open..self.at, Problem::RanksDiffer { len: mesh_len, listed }));
        }
        Ok(ranks)
    }

    /// `4` or `4-7`. The largest rank leaves room for a count of all ranks.
    pub(super) fn rank_range(&mut self) -> Result<(Range<u32>, Range<usize>), NotationError> {
        let (first, first_at) = self.number_u32()?;
        let (last, last_at) = if self.take('-') { self.number_u32()? } else { (first, first_at.clone()) };
        let at = first_at.start..last_at.end;
        if last < first {
            let found = format!("{last} after {first}");
            let expected = "a range that rises (list falling ranks one by one)";
            return Err(self.error(at, Problem::Expected { expected, found }));
        }
        match last.checked_add(1) {
            Some(end) => Ok((first..end, at)),
            None => Err(self.error(last_at, Problem::RankTooLarge { rank: last.into() })),
        }
    }

    fn splits(
        &mut self,
        mesh: &Mesh,
        shape: &[u64],
        open: usize,
    ) -> Result<(Vec<Split>, Option<Partial>), NotationError> {
        let mut terms: Vec<Term> = Vec::new();
        while !matches!(self.peek(), Some(')' | '|') | None) {
            if !terms.is_empty() {
                self.token(',', "`,` or `)`")?;
            }
            terms.push(self.term(mesh)?);
        }
        let partial = if self.take('|') { Some(self.partial(mesh)?) } else { None };
        self.token(')', "`)`")?;

        if terms.len() != shape.len() {
            let problem = Problem::DimsDiffer { dims: shape.len(), splits: terms.len(), whole: "_" };
            return Err(self.error(open..self.at, problem));
        }
        for (term, &dim_len) in terms.iter().zip(shape) {
            self.check_rule(term, mesh, dim_len)?;
        }
        Ok((terms.into_iter().map(|t| t.split).collect(), partial))
    }

    fn term(&mut self, mesh: &Mesh) -> Result<Term, NotationError> {
        self.skip_blanks();
        let open = self.at;
        if self.take('_') {
            return Ok(Term { split: Split::WHOLE, at: open..self.at });
        }
        let axes = self.axes(mesh)?;
        let rule = if self.take('[') {
            let cuts = self.numbers(',', Some(']'))?;
            self.token(']', "`,` or `]`")?;
            Rule::Cuts(cuts)
        } else if self.peek() == Some('o') {
            let (word, at) = self.name("`of`")?;
            if word != "of" {
                self.at = at.start;
                return Err(self.expected("`of` and the fused parts"));
            }
            Rule::Parts(self.numbers('+', None)?)
        } else {
            Rule::Chunk
        };
        Ok(Term { split: Split { axes, rule }, at: open..self.at })
    }

    fn axes(&mut self, mesh: &Mesh) -> Result<Vec<usize>, NotationError> {
        let mut axes = Vec::new();
        loop {
            let (axis, at) = self.name("an axis, or `_` to leave the dim whole")?;
            self.add_axis(&mut axes, mesh, axis, at)?;
            if !self.take('+') {
                return Ok(axes);
            }
        }
    }

    /// Adds the axis of this name to a dim's axes.
    pub(super) fn add_axis(
        &self,
        axes: &mut Vec<usize>,
        mesh: &Mesh,
        axis: &str,
        at: Range<usize>,
    ) -> Result<(), NotationError> {
        let Some(index) = mesh.axis_index(axis) else {
            let known = mesh.axes.iter().map(|a| a.name.clone()).collect();
            let problem = Problem::UnknownAxis { mesh: mesh.name.clone(), axis: axis.into(), known };
            return Err(self.error(at, problem));
        };
        if axes.contains(&index) {
            return Err(self.error(at, Problem::AxisRepeated { axis: axis.into() }));
        }
        axes.push(index);
        Ok(())
    }

    pub(super) fn partial(&mut self, mesh: &Mesh) -> Result<Partial, NotationError> {
        Ok(Partial { op: self.reduction()?, axes: self.axes(mesh)? })
    }

    pub(super) fn reduction(&mut self) -> Result<ReduceOp, NotationError> {
        let (name, at) = self.name("a reduction")?;
        let op = ReduceOp::ALL.into_iter().find(|op| op.name() == name);
        op.ok_or_else(|| self.error(at, Problem::UnknownReduction { name: name.into() }))
    }

    fn check_rule(&self, term: &Term, mesh: &Mesh, dim_len: u64) -> Result<(), NotationError> {
        let parts = term.split.axes.iter().map(|&a| mesh.axes[a].len as usize).product::<usize>();
        let problem = match &term.split.rule {
            Rule::Chunk => None,
            Rule::Cuts(cuts) if cuts.len() != parts + 1 => {
                Some(Problem::CutsDiffer { given: cuts.len(), parts })
            }
            Rule::Cuts(cuts) => match cuts.windows(2).find(|w| w[1] < w[0]) {
                Some(w) => Some(Problem::CutsFall { cut: w[0], next: w[1] }),
                None if cuts[0] != 0 || cuts[parts] != dim_len => {
                    Some(Problem::CutsMissTheEnds { first: cuts[0], last: cuts[parts], dim_len })
                }
                None => None,
            },
            Rule::Parts(fused) if fused.len().saturating_mul(parts) > MAX_FUSED_SPANS => {
                Some(Problem::TooManyParts { fused: fused.len(), parts })
            }
            Rule::Parts(fused) => {
                let sum = fused.iter().map(|&p| u128::from(p)).sum::<u128>();
                (sum != u128::from(dim_len)).then(|| Problem::PartsDiffer { sum: sum.to_string(), dim_len })
            }
        };
        problem.map_or(Ok(()), |problem| Err(self.error(term.at.clone(), problem)))
    }

    fn check_axes(
        &self,
        mesh: &Mesh,
        splits: &[Split],
        partial: Option<&Partial>,
        open: usize,
    ) -> Result<(), NotationError> {
        for (index, axis) in mesh.axes.iter().enumerate() {
            let splitting = splits.iter().filter(|s| s.axes.contains(&index)).count();
            let reducing = partial.filter(|p| p.axes.contains(&index));
            let axis = axis.name.clone();
            let problem = match (splitting, reducing) {
                (0 | 1, None) | (0, Some(_)) => continue,
                (1, Some(p)) => Problem::AxisSplitsAndReduces { axis, op: p.op },
                _ => Problem::AxisSplitsTwice { axis },
            };
            return Err(self.error(open..self.at, problem));
        }
        Ok(())
    }
}
