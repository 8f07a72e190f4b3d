//! What other systems write, read into the same [`Layout`](super::Layout). Only reading: `Display` prints the native notation.
//!
//! ```text
//! native   f32[8,6]@A{dp:2,tp:4}(dp,tp)
//! Alpa     f32[8,6]@A:2x4 S0S1                          a letter per dim: R, or S and its mesh axes
//! torch    f32[8,6]@A{dp:2,tp:4}[Shard(0), Shard(1)]    a placement per mesh axis
//!          f32[8,6]@A{dp:2,tp:4}S(0)S(1)                the same, short
//! JAX      f32[8,6]@A{dp:2,tp:4}P('dp', 'tp')           an entry per dim; what is missing at the end is None
//! ```
//!
//! - The axes of `A:2x4` are called x, y, z and w in turn; `S01` splits a dim over both, axis 0 major.
//! - Several axes that shard one dim nest in mesh order for torch (`[Shard(0), Shard(0)]` is `dp+tp`), and in the
//!   order of the tuple for JAX (`P(('tp','dp'))` is `tp+dp`).
//! - torch's `Partial()` sums; `Shard(-1)` counts from the end; lists may also be printed tuples, `(Shard(dim=0),)`.
//! - JAX refuses most uneven shards; here they follow torch.chunk as everywhere else.
//!
//! ```
//! use crossmesh_core::layout::Layout;
//! let native = |text: &str| text.parse::<Layout>().unwrap().to_string();
//! assert_eq!(native("f32[8,6]@A:2x4 S01R"), "f32[8,6]@A{x:2,y:4}(x+y,_)");
//! assert_eq!(native("f32[8,6]@A{dp:2,tp:4}[Partial(), Shard(1)]"), "f32[8,6]@A{dp:2,tp:4}(_,tp | sum dp)");
//! assert_eq!(native("f32[8,6]@A{dp:2,tp:4}P(None, ('tp','dp'))"), "f32[8,6]@A{dp:2,tp:4}(_,tp+dp)");
//! ```

use std::ops::Range;

use super::notation::{Cursor, NotationError, Problem};
use super::{Partial, ReduceOp, Rule, Split};
use crate::mesh::{Axis, Mesh};

/// What the axes of a mesh given by sizes alone are called.
const SIZED_AXES: [&str; 4] = ["x", "y", "z", "w"];
/// Reductions torch knows, ours or not: what tells `P(max)` from JAX's `P('tp')`.
const TORCH_REDUCTIONS: [&str; 8] = ["sum", "max", "min", "avg", "product", "band", "bor", "bxor"];

/// Who wrote what stands after the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Native,
    /// Ours, by boxes.
    Boxes,
    Alpa,
    /// A list of placements, with the bracket that closes it.
    TorchList(char),
    TorchShort,
    Jax,
}

/// How each dim is split, and what is still to be combined.
type Splits = (Vec<Split>, Option<Partial>);

impl Cursor<'_> {
    /// Decides who wrote what comes next; nothing is taken.
    pub(super) fn form(&mut self, sized_mesh: bool) -> Form {
        let first = self.peek();
        let rest = self.rest();
        match first {
            Some('{') => Form::Boxes,
            _ if sized_mesh => Form::Alpa,
            Some('[') => Form::TorchList(']'),
            Some('(') if is_placement(rest[1..].trim_start()) => Form::TorchList(')'),
            Some('P') if rest.starts_with("PartitionSpec") || is_jax_spec(rest) => Form::Jax,
            Some('S' | 'R' | 'P') => Form::TorchShort,
            _ => Form::Native,
        }
    }

    pub(super) fn foreign_splits(
        &mut self,
        form: Form,
        mesh: &Mesh,
        shape: &[u64],
    ) -> Result<Splits, NotationError> {
        match form {
            Form::Alpa | Form::Native | Form::Boxes => self.alpa_spec(mesh, shape.len()),
            Form::TorchList(close) => self.torch_list(close, mesh, shape.len()),
            Form::TorchShort => self.torch_short(mesh, shape.len()),
            Form::Jax => self.jax_spec(mesh, shape.len()),
        }
    }

    /// The sizes of `A:2x4`.
    pub(super) fn sized_axes(&mut self) -> Result<Vec<Axis>, NotationError> {
        let open = self.at;
        let mut axes = Vec::new();
        loop {
            let Some(name) = SIZED_AXES.get(axes.len()) else {
                let expected = "at most 4 sizes (name the axes of a larger mesh: A{a:2,b:2})";
                let found = "another".into();
                return Err(self.error(open..self.at, Problem::Expected { expected, found }));
            };
            axes.push(Axis { name: (*name).into(), len: self.axis_len(name)? });
            if !self.take('x') {
                return Ok(axes);
            }
        }
    }

    fn alpa_spec(&mut self, mesh: &Mesh, dims: usize) -> Result<Splits, NotationError> {
        let open = self.at;
        let mut splits = Vec::new();
        loop {
            if self.take('R') {
                splits.push(Split::WHOLE);
            } else if self.take('S') {
                splits.push(chunked(self.alpa_axes(mesh)?));
            } else if self.peek().is_none() {
                break;
            } else {
                return Err(self.expected("`R`, or `S` and mesh axes (`S0`, `S1`, `S01`), for each dim"));
            }
        }
        self.check_dims(open, dims, splits.len(), "R")?;
        Ok((splits, None))
    }

    /// The digits of `S01`: each is a mesh axis.
    fn alpa_axes(&mut self, mesh: &Mesh) -> Result<Vec<usize>, NotationError> {
        let mut axes = Vec::new();
        while let Some(digit) = self.rest().chars().next().and_then(|c| c.to_digit(10)) {
            let at = self.at..self.at + 1;
            // An axis that is not there goes by its number.
            let digit_name = digit.to_string();
            let name = mesh.axes.get(digit as usize).map_or(digit_name.as_str(), |a| &a.name);
            self.add_axis(&mut axes, mesh, name, at)?;
            self.at += 1;
        }
        if axes.is_empty() { Err(self.expected("the number of a mesh axis after `S`")) } else { Ok(axes) }
    }

    fn torch_list(&mut self, close: char, mesh: &Mesh, dims: usize) -> Result<Splits, NotationError> {
        let open = self.at;
        self.token(if close == ']' { '[' } else { '(' }, "placements")?;
        let mut placements = Placements::new(dims);
        while self.peek() != Some(close) {
            let (word, at) = self.name("a placement: Shard(dim), Replicate() or Partial(sum)")?;
            let axis = placements.count;
            match word {
                "Shard" => self.torch_shard(&mut placements)?,
                "Replicate" => self.empty_parens()?,
                "Partial" => self.torch_partial(&mut placements, at)?,
                _ => return Err(self.error(at, Problem::UnknownPlacement { name: word.into() })),
            }
            placements.count = axis + 1;
            if !self.take(',') {
                break;
            }
        }
        self.token(close, if close == ']' { "`,` or `]`" } else { "`,` or `)`" })?;
        self.placed(open, placements, mesh)
    }

    fn torch_short(&mut self, mesh: &Mesh, dims: usize) -> Result<Splits, NotationError> {
        let open = self.at;
        let mut placements = Placements::new(dims);
        loop {
            self.skip_blanks();
            let start = self.at;
            if self.take('S') {
                self.torch_shard(&mut placements)?;
            } else if self.take('P') {
                self.torch_partial(&mut placements, start..start + 1)?;
            } else if !self.take('R') {
                break;
            }
            placements.count += 1;
        }
        self.placed(open, placements, mesh)
    }

    /// `(0)`, `(-1)` or `(dim=0)`.
    fn torch_shard(&mut self, placements: &mut Placements) -> Result<(), NotationError> {
        self.token('(', "`(` and the dim to shard")?;
        if self.peek() == Some('d') {
            self.word("dim", "`dim=`")?;
            self.token('=', "`=`")?;
        }
        self.skip_blanks();
        let start = self.at;
        let from_end = self.take('-');
        let (number, at) = self.number()?;
        let dims = placements.splits.len();
        let dim = if from_end { (dims as u64).checked_sub(number) } else { Some(number) };
        let Some(split) = dim.and_then(|d| placements.splits.get_mut(usize::try_from(d).ok()?)) else {
            let sign = if from_end { "-" } else { "" };
            return Err(
                self.error(start..at.end, Problem::NoSuchDim { dim: format!("{sign}{number}"), dims })
            );
        };
        split.axes.push(placements.count);
        self.token(')', "`)`")
    }

    /// `(sum)`, `('sum')`, `()`, or nothing at all.
    fn torch_partial(&mut self, placements: &mut Placements, at: Range<usize>) -> Result<(), NotationError> {
        let mut op = ReduceOp::Sum;
        if self.take('(') {
            if self.peek() != Some(')') {
                let quote = self.quote();
                op = self.reduction()?;
                self.end_quote(quote)?;
            }
            self.token(')', "`)`")?;
        }
        let partial = placements.partial.get_or_insert(Partial { op, axes: vec![] });
        if partial.op != op {
            let problem = Problem::ReductionsDiffer { first: partial.op, second: op };
            return Err(self.error(at.start..self.at, problem));
        }
        partial.axes.push(placements.count);
        Ok(())
    }

    fn placed(&self, open: usize, placements: Placements, mesh: &Mesh) -> Result<Splits, NotationError> {
        let (axes, count) = (mesh.axes.len(), placements.count);
        if axes != count {
            return Err(self.error(open..self.at, Problem::PlacementsDiffer { axes, placements: count }));
        }
        Ok((placements.splits, placements.partial))
    }

    fn jax_spec(&mut self, mesh: &Mesh, dims: usize) -> Result<Splits, NotationError> {
        let open = self.at;
        self.name("`P`")?;
        self.token('(', "`(` and an entry for each dim")?;
        let mut splits = Vec::new();
        while self.peek() != Some(')') {
            splits.push(chunked(self.jax_entry(mesh)?));
            if !self.take(',') {
                break;
            }
        }
        self.token(')', "`,` or `)`")?;
        if splits.len() > dims {
            self.check_dims(open, dims, splits.len(), "None")?;
        }
        splits.resize(dims, Split::WHOLE);
        Ok((splits, None))
    }

    /// `None`, `'tp'` or `('tp', 'dp')`.
    fn jax_entry(&mut self, mesh: &Mesh) -> Result<Vec<usize>, NotationError> {
        let mut axes = Vec::new();
        if self.peek() == Some('N') {
            self.word("None", "`None`")?;
        } else if self.take('(') {
            while self.peek() != Some(')') {
                self.jax_axis(&mut axes, mesh)?;
                if !self.take(',') {
                    break;
                }
            }
            self.token(')', "`,` or `)`")?;
        } else {
            self.jax_axis(&mut axes, mesh)?;
        }
        Ok(axes)
    }

    fn jax_axis(&mut self, axes: &mut Vec<usize>, mesh: &Mesh) -> Result<(), NotationError> {
        let Some(quote) = self.quote() else {
            return Err(self.expected("an axis in quotes, a tuple of them, or None"));
        };
        let (axis, at) = self.name("an axis name")?;
        self.end_quote(Some(quote))?;
        self.add_axis(axes, mesh, axis, at)
    }

    fn quote(&mut self) -> Option<char> {
        ['\'', '"'].into_iter().find(|&q| self.take(q))
    }

    fn end_quote(&mut self, quote: Option<char>) -> Result<(), NotationError> {
        match quote {
            Some(quote) => self.token(quote, "the closing quote"),
            None => Ok(()),
        }
    }

    fn empty_parens(&mut self) -> Result<(), NotationError> {
        self.token('(', "`()`")?;
        self.token(')', "`)`")
    }

    fn word(&mut self, word: &str, expected: &'static str) -> Result<(), NotationError> {
        let (found, at) = self.name(expected)?;
        if found == word {
            return Ok(());
        }
        self.at = at.start;
        Err(self.expected(expected))
    }

    fn check_dims(
        &self,
        open: usize,
        dims: usize,
        splits: usize,
        whole: &'static str,
    ) -> Result<(), NotationError> {
        match dims == splits {
            true => Ok(()),
            false => Err(self.error(open..self.at, Problem::DimsDiffer { dims, splits, whole })),
        }
    }
}

/// torch's placements, turned from one per axis into one per dim as they are read.
struct Placements {
    splits: Vec<Split>,
    partial: Option<Partial>,
    /// Read so far, which is also the axis of the one being read.
    count: usize,
}

impl Placements {
    fn new(dims: usize) -> Self {
        Self { splits: vec![Split::WHOLE; dims], partial: None, count: 0 }
    }
}

fn chunked(axes: Vec<usize>) -> Split {
    Split { axes, rule: Rule::Chunk }
}

/// Whether a text starts like `Shard(`, which no native term does.
fn is_placement(text: &str) -> bool {
    let after = ["Shard", "Replicate", "Partial"].iter().find_map(|word| text.strip_prefix(word));
    after.is_some_and(|rest| rest.trim_start().starts_with('('))
}

/// Whether `P(` opens a JAX spec rather than torch's short `P(sum)`.
fn is_jax_spec(text: &str) -> bool {
    let Some(inside) = text.strip_prefix('P').and_then(|rest| rest.trim_start().strip_prefix('(')) else {
        return false;
    };
    let inside = inside.trim_start();
    let word = inside.find(|c: char| !c.is_ascii_alphanumeric()).map_or(inside, |end| &inside[..end]);
    !TORCH_REDUCTIONS.contains(&word)
}

#[cfg(test)]
mod tests {
    use crate::layout::Layout;

    fn native(text: &str) -> String {
        text.parse::<Layout>().unwrap_or_else(|e| panic!("{e}")).to_string()
    }

    fn error(text: &str) -> String {
        text.parse::<Layout>().unwrap_err().to_string()
    }

    #[test]
    fn reads_alpa() {
        assert_eq!(native("f32[1024,1024,512]@A:2x4 S0RR"), "f32[1024,1024,512]@A{x:2,y:4}(x,_,_)");
        assert_eq!(native("f32[8,6]@A:2x4 S1S0"), "f32[8,6]@A{x:2,y:4}(y,x)");
        assert_eq!(native("f32[8,6]@A:2x4 RS01"), "f32[8,6]@A{x:2,y:4}(_,x+y)");
        assert_eq!(native("f32[8,6]@A:2x4=4-11 R S10"), "f32[8,6]@A{x:2,y:4}=4-11(_,y+x)");
        assert_eq!(native("f32[8]@A:4S0"), "f32[8]@A{x:4}(x)");
        assert_eq!(native("f32[]@A:2x2x2x1"), "f32[]@A{x:2,y:2,z:2,w:1}()");
    }

    #[test]
    fn reads_torch() {
        let mesh = "f32[8,6]@A{dp:2,tp:4}";
        for same in [
            "[Shard(0), Replicate()]",
            "[ Shard( dim = 0 ),Replicate(),]",
            "(Shard(dim=0), Replicate())",
            "S(0)R",
            "S(-2) R",
        ] {
            assert_eq!(native(&format!("{mesh}{same}")), format!("{mesh}(dp,_)"), "{same}");
        }
        for same in ["[Shard(1), Shard(1)]", "S(1)S(-1)"] {
            assert_eq!(native(&format!("{mesh}{same}")), format!("{mesh}(_,dp+tp)"), "{same}");
        }
        for same in [
            "[Partial(sum), Shard(0)]",
            "[Partial(), Shard(0)]",
            "[Partial('sum'), Shard(0)]",
            "PS(0)",
            "P(sum)S(0)",
        ] {
            assert_eq!(native(&format!("{mesh}{same}")), format!("{mesh}(tp,_ | sum dp)"), "{same}");
        }
        assert_eq!(native(&format!("{mesh}P(max)P(max)")), format!("{mesh}(_,_ | max dp+tp)"));
        assert_eq!(native("f32[8]@A{}[]"), "f32[8]@A{}(_)");
        assert_eq!(native("f32[8]@A{tp:2}=5,3[Shard(0)]"), "f32[8]@A{tp:2}=5,3(tp)");
    }

    #[test]
    fn reads_jax() {
        let mesh = "f32[8,6]@A{dp:2,tp:4}";
        for same in ["P('dp', None)", "P('dp')", "P(\"dp\",)", "PartitionSpec('dp', None)", "P(('dp',), ())"]
        {
            assert_eq!(native(&format!("{mesh}{same}")), format!("{mesh}(dp,_)"), "{same}");
        }
        assert_eq!(native(&format!("{mesh}P()")), format!("{mesh}(_,_)"));
        assert_eq!(native(&format!("{mesh}P(None, ('tp', 'dp'))")), format!("{mesh}(_,tp+dp)"));
        assert_eq!(native("f32[]@A{}P()"), "f32[]@A{}()");
    }

    #[test]
    fn an_axis_may_be_called_like_a_placement() {
        assert_eq!(native("f32[8]@A{Shard:2}(Shard)"), "f32[8]@A{Shard:2}(Shard)");
        assert_eq!(native("f32[8]@A{P:2}(P)"), "f32[8]@A{P:2}(P)");
    }

    #[test]
    fn errors_point_at_the_characters() {
        assert_eq!(
            error("f32[8,6]@A:2x4 S0S2"),
            "mesh `A` has no axis `2`\n  f32[8,6]@A:2x4 S0S2\n                    ^\nhint: its axes are x, y"
        );
        assert_eq!(
            error("f32[8,6]@A:2x4 S0"),
            "the shape has 2 dims, the layout splits 1\n  f32[8,6]@A:2x4 S0\n                 ^^\nhint: give 2 terms; `R` leaves a dim whole"
        );
        assert_eq!(
            error("f32[8,6]@A{dp:2,tp:4}[Shard(2), Replicate()]"),
            "the tensor has 2 dims, there is no dim 2\n  f32[8,6]@A{dp:2,tp:4}[Shard(2), Replicate()]\n                              ^"
        );
        assert_eq!(
            error("f32[8,6]@A{dp:2,tp:4}[Shard(0)]"),
            "the mesh has 2 axes, 1 placements are given\n  f32[8,6]@A{dp:2,tp:4}[Shard(0)]\n                       ^^^^^^^^^^\nhint: give 2 placements, one for each axis of the mesh"
        );
        assert_eq!(
            error("f32[8,6]@A{dp:2,tp:4}P('dp', 'sp')"),
            "mesh `A` has no axis `sp`\n  f32[8,6]@A{dp:2,tp:4}P('dp', 'sp')\n                                ^^\nhint: its axes are dp, tp"
        );
    }

    #[test]
    fn refuses_what_is_not_meant() {
        let starts = |text: &str, start: &str| assert!(error(text).starts_with(start), "{}", error(text));
        starts("f32[8,6]@A:2x4 SR", "expected the number of a mesh axis after `S`, found `R`");
        starts("f32[8,6]@A:2x4 S0S0", "layout splits two dims over the same axis `x`");
        starts("f32[8,6]@A:2x4 S00R", "axis `x` is named twice");
        starts("f32[8,6]@A:2x4(x,_)", "expected `R`, or `S` and mesh axes");
        starts("f32[8,6]@A:2x0 RR", "axis `y` has length 0");
        starts("f32[8,6]@A:1x1x1x1x1 RR", "expected at most 4 sizes");
        starts("f32[8,6]@2x4 RR", "expected a mesh name, found `2`");
        starts("f32[8,6]@A{dp:2,tp:4}S0R", "expected `(` and the dim to shard, found `0`");
        starts("f32[8,6]@A{dp:2,tp:4}[Shard(-3), Replicate()]", "the tensor has 2 dims, there is no dim -3");
        starts("f32[8,6]@A{dp:2,tp:4}[_StridedShard(0), Replicate()]", "expected a placement");
        starts("f32[8,6]@A{dp:2,tp:4}[Split(0), Replicate()]", "unknown placement `Split`");
        starts("f32[8,6]@A{dp:2,tp:4}P(sum)P(max)", "one layout has both a partial sum and a partial max");
        starts("f32[8,6]@A{dp:2,tp:4}P(avg)R", "unknown reduction `avg`");
        starts(
            "f32[8,6]@A{dp:2,tp:4}P(dp)",
            "expected an axis in quotes, a tuple of them, or None, found `d`",
        );
        starts("f32[8,6]@A{dp:2,tp:4}P('dp', 'dp')", "layout splits two dims over the same axis `dp`");
        starts("f32[8,6]@A{dp:2,tp:4}P('dp\", None)", "expected the closing quote");
        starts("f32[8,6]@A{dp:2,tp:4}P(None, None, None)", "the shape has 2 dims, the layout splits 3");
        starts("f32[8,6]@A{dp:2,tp:4}P(None", "expected `,` or `)`, found the end");
        starts("f32[8,6]@A{dp:2,tp:4}P(None) x", "expected the end, found `x`");
    }
}
