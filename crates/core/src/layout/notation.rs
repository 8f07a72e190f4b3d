//! Reading the notation: a cursor over one line of text that remembers where it is, so that an error points at the
//! characters it is about.
//!
//! ```text
//! layout := dtype '[' numbers ']' '@' mesh '(' terms [ '|' op axes ] ')'
//! mesh   := name '{' [ name ':' number { ',' … } ] '}' [ '=' ranks ]
//! ranks  := number [ '-' number ] { ',' … }
//! term   := '_' | axes | axes '[' numbers ']' | axes 'of' number { '+' number }
//! axes   := name { '+' name }
//! ```
//!
//! Blanks may stand between tokens.

use std::fmt;
use std::ops::Range;

use super::{Layout, MAX_DIMS, Partial, ReduceOp, Rule, Split};
use crate::dtype::DType;
use crate::id::Rank;
use crate::mesh::{Axis, MAX_MESH_LEN, Mesh};

/// What is wrong with a piece of notation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    #[error("expected {expected}, found {found}")]
    Expected { expected: &'static str, found: String },
    #[error("unknown dtype `{name}`")]
    UnknownDType { name: String },
    #[error("mesh `{mesh}` has no axis `{axis}`")]
    UnknownAxis { mesh: String, axis: String, known: Vec<String> },
    #[error("layout splits two dims over the same axis `{axis}`")]
    AxisSplitsTwice { axis: String },
    #[error("axis `{axis}` both splits a dim and carries a partial {op}")]
    AxisSplitsAndReduces { axis: String, op: ReduceOp },
    #[error("axis `{axis}` is named twice")]
    AxisRepeated { axis: String },
    #[error("axis `{axis}` has length 0")]
    AxisEmpty { axis: String },
    #[error("the number {number} does not fit into 64 bits")]
    NumberTooLarge { number: String },
    #[error("the tensor has more than 2^64 bytes")]
    TensorTooLarge,
    #[error("the mesh has {len} devices, more than {MAX_MESH_LEN}")]
    MeshTooLarge { len: String },
    #[error("the tensor has {dims} dims, more than {MAX_DIMS}")]
    TooManyDims { dims: usize },
    #[error("the shape has {dims} dims, the layout splits {splits}")]
    DimsDiffer { dims: usize, splits: usize },
    #[error("rank {rank} is listed twice")]
    RankRepeated { rank: u32 },
    #[error("the mesh has {len} devices, {listed} ranks are listed")]
    RanksDiffer { len: usize, listed: usize },
    #[error("{given} cuts make {} parts, the axes make {parts}", given - 1)]
    CutsDiffer { given: usize, parts: usize },
    #[error("cuts run from {first} to {last}, the dim from 0 to {dim_len}")]
    CutsMissTheEnds { first: u64, last: u64, dim_len: u64 },
    #[error("cut {next} comes after cut {cut}")]
    CutsFall { cut: u64, next: u64 },
    #[error("fused parts add up to {sum}, the dim has {dim_len}")]
    PartsDiffer { sum: String, dim_len: u64 },
    #[error("unknown reduction `{name}`")]
    UnknownReduction { name: String },
}

impl Problem {
    /// A way out, where we know one.
    fn hint(&self) -> Option<String> {
        Some(match self {
            Problem::UnknownDType { .. } => format!("dtypes are {}", DType::ALL.map(|d| d.name()).join(" ")),
            Problem::UnknownAxis { known, .. } if known.is_empty() => "the mesh has no axes".into(),
            Problem::UnknownAxis { known, .. } => format!("its axes are {}", known.join(", ")),
            Problem::AxisSplitsTwice { .. } => {
                "an axis splits one dim at most; name another axis, or `_` to leave a dim whole".into()
            }
            Problem::AxisSplitsAndReduces { .. } => "name the axis on one side of the `|` only".into(),
            Problem::AxisEmpty { .. } => "an axis has at least one device".into(),
            Problem::DimsDiffer { dims, .. } => format!("give {dims} terms; `_` leaves a dim whole"),
            Problem::RanksDiffer { len, .. } => {
                format!("list {len} ranks, or none to take the next free ones")
            }
            Problem::CutsDiffer { parts, .. } => {
                format!("give {} cuts, from 0 to the dim's length", parts + 1)
            }
            Problem::UnknownReduction { .. } => "reductions are sum, max and min".into(),
            Problem::TooManyDims { .. } => "merge dims that are never split apart".into(),
            _ => return None,
        })
    }
}

/// A [`Problem`] and the characters it is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotationError {
    pub text: String,
    /// Byte range in `text`; may be empty, at the end.
    pub at: Range<usize>,
    pub problem: Problem,
}

impl fmt::Display for NotationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let before = self.text[..self.at.start].chars().count();
        let width = self.text[self.at.clone()].chars().count().max(1);
        writeln!(f, "{}", self.problem)?;
        writeln!(f, "  {}", self.text.replace(['\n', '\r', '\t'], " "))?;
        write!(f, "  {}{}", " ".repeat(before), "^".repeat(width))?;
        match self.problem.hint() {
            Some(hint) => write!(f, "\nhint: {hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for NotationError {}

/// A place in a line of notation.
pub(crate) struct Cursor<'a> {
    text: &'a str,
    at: usize,
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

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn skip_blanks(&mut self) {
        self.at += self.rest().len() - self.rest().trim_start().len();
    }

    fn error(&self, at: Range<usize>, problem: Problem) -> NotationError {
        NotationError { text: self.text.to_string(), at, problem }
    }

    fn expected(&mut self, expected: &'static str) -> NotationError {
        self.skip_blanks();
        let next = self.rest().chars().next();
        let found = next.map_or("the end".to_string(), |c| format!("`{c}`"));
        self.error(self.at..self.at + next.map_or(0, char::len_utf8), Problem::Expected { expected, found })
    }

    fn peek(&mut self) -> Option<char> {
        self.skip_blanks();
        self.rest().chars().next()
    }

    fn take(&mut self, c: char) -> bool {
        let found = self.peek() == Some(c);
        if found {
            self.at += c.len_utf8();
        }
        found
    }

    fn token(&mut self, c: char, expected: &'static str) -> Result<(), NotationError> {
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
    fn name(&mut self, expected: &'static str) -> Result<(&'a str, Range<usize>), NotationError> {
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

    fn number(&mut self) -> Result<(u64, Range<usize>), NotationError> {
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
    fn numbers(&mut self, separator: char, close: Option<char>) -> Result<Vec<u64>, NotationError> {
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
        let mesh = self.mesh()?;
        self.skip_blanks();
        let open = self.at;
        self.token('(', "`(` and how each dim is split")?;
        let (splits, partial) = self.splits(&mesh, &shape, open)?;
        Ok(Layout { dtype, shape, mesh, splits, partial })
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
        let (name, name_at) = self.name("a mesh name")?;
        self.token('{', "`{` and the mesh's axes")?;
        let mut axes: Vec<Axis> = Vec::new();
        while self.peek() != Some('}') {
            if !axes.is_empty() {
                self.token(',', "`,` or `}`")?;
            }
            let (axis, at) = self.name("an axis name")?;
            self.token(':', "`:` and the axis' length")?;
            let (len, len_at) = self.number_u32()?;
            if axes.iter().any(|a| a.name == axis) {
                return Err(self.error(at, Problem::AxisRepeated { axis: axis.into() }));
            }
            if len == 0 {
                return Err(self.error(len_at, Problem::AxisEmpty { axis: axis.into() }));
            }
            axes.push(Axis { name: axis.into(), len });
        }
        self.token('}', "`}`")?;
        let devices = axes.iter().try_fold(1u64, |n, a| n.checked_mul(u64::from(a.len)));
        if devices.is_none_or(|n| n > MAX_MESH_LEN) {
            let len = devices.map_or("over 2^64".into(), |n| n.to_string());
            return Err(self.error(name_at.start..self.at, Problem::MeshTooLarge { len }));
        }
        let mut mesh = Mesh { name: name.into(), axes, ranks: None };
        if self.take('=') {
            mesh.ranks = Some(self.ranks(mesh.len())?);
        }
        Ok(mesh)
    }

    fn ranks(&mut self, mesh_len: usize) -> Result<Vec<Rank>, NotationError> {
        self.skip_blanks();
        let open = self.at;
        let mut ranks: Vec<Rank> = Vec::new();
        let mut seen = std::collections::BTreeSet::new();
        loop {
            let (first, first_at) = self.number_u32()?;
            let (last, last_at) = if self.take('-') { self.number_u32()? } else { (first, first_at.clone()) };
            if last < first {
                let found = format!("{last} after {first}");
                let expected = "a range that rises (list falling ranks one by one)";
                return Err(self.error(first_at.start..last_at.end, Problem::Expected { expected, found }));
            }
            // A range that is far too long must not be spelt out first.
            for rank in (first..=last).take(mesh_len + 1) {
                if !seen.insert(rank) {
                    return Err(self.error(first_at.start..last_at.end, Problem::RankRepeated { rank }));
                }
                ranks.push(Rank(rank));
            }
            if ranks.len() > mesh_len || !self.take(',') {
                break;
            }
        }
        if ranks.len() != mesh_len {
            return Err(
                self.error(open..self.at, Problem::RanksDiffer { len: mesh_len, listed: ranks.len() })
            );
        }
        Ok(ranks)
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
            let problem = Problem::DimsDiffer { dims: shape.len(), splits: terms.len() };
            return Err(self.error(open..self.at, problem));
        }
        for (term, &dim_len) in terms.iter().zip(shape) {
            self.check_rule(term, mesh, dim_len)?;
        }
        let splits: Vec<Split> = terms.into_iter().map(|t| t.split).collect();
        self.check_axes(mesh, &splits, partial.as_ref(), open)?;
        Ok((splits, partial))
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
            let Some(index) = mesh.axis_index(axis) else {
                let known = mesh.axes.iter().map(|a| a.name.clone()).collect();
                let problem = Problem::UnknownAxis { mesh: mesh.name.clone(), axis: axis.into(), known };
                return Err(self.error(at, problem));
            };
            if axes.contains(&index) {
                return Err(self.error(at, Problem::AxisRepeated { axis: axis.into() }));
            }
            axes.push(index);
            if !self.take('+') {
                return Ok(axes);
            }
        }
    }

    fn partial(&mut self, mesh: &Mesh) -> Result<Partial, NotationError> {
        let (name, at) = self.name("a reduction")?;
        let op = ReduceOp::ALL
            .into_iter()
            .find(|op| op.name() == name)
            .ok_or_else(|| self.error(at, Problem::UnknownReduction { name: name.into() }))?;
        Ok(Partial { op, axes: self.axes(mesh)? })
    }

    fn check_rule(&self, term: &Term, mesh: &Mesh, dim_len: u64) -> Result<(), NotationError> {
        let parts = term.split.axes.iter().map(|&a| mesh.axes[a].len as usize).product::<usize>();
        let problem = match &term.split.rule {
            Rule::Chunk => None,
            Rule::Cuts(cuts) if cuts.len() != parts + 1 => {
                Some(Problem::CutsDiffer { given: cuts.len().max(1), parts })
            }
            Rule::Cuts(cuts) => match cuts.windows(2).find(|w| w[1] < w[0]) {
                Some(w) => Some(Problem::CutsFall { cut: w[0], next: w[1] }),
                None if cuts[0] != 0 || cuts[parts] != dim_len => {
                    Some(Problem::CutsMissTheEnds { first: cuts[0], last: cuts[parts], dim_len })
                }
                None => None,
            },
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
