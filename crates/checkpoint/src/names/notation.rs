//! How a map writes a tensor: its name with holes, and its dims as products of axes.
//!
//! ```text
//! model.layers.{l}.self_attn.q_proj.weight [g q d, h]
//! decoder.layers.self_attention.linear_qkv.weight [l, g (q|1|1) d, h]
//! embedding.word_embeddings.weight [v+, h]
//! ```
//!
//! A comma stands between dims, a blank between the axes that a dim is the product of, `(a|b|c)` are parts one behind
//! the other, `{l}` in a name is a number, and `v+` may be longer than `v`: padding that nobody needs.

use std::collections::BTreeMap;

/// An axis's index for every hole of a name.
pub type Holes = BTreeMap<String, u64>;

/// A tensor of one side of a map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Term {
    pub name: Template,
    pub dims: Vec<Vec<Axis>>,
}

/// A factor of a dim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Axis {
    Named {
        name: String,
        padded: bool,
    },
    /// Parts one behind the other; None for a part of one.
    Parts(Vec<Option<String>>),
}

/// A name with holes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Template {
    /// Literal words; between two of them lies a hole.
    words: Vec<String>,
    holes: Vec<String>,
}

impl Template {
    pub fn parse(text: &str) -> Result<Self, String> {
        let (mut words, mut holes) = (Vec::new(), Vec::new());
        let mut rest = text;
        while let Some((word, tail)) = rest.split_once('{') {
            let (hole, tail) =
                tail.split_once('}').ok_or_else(|| format!("`{text}`: a `{{` is not closed"))?;
            words.push(word.to_string());
            holes.push(hole.to_string());
            rest = tail;
        }
        words.push(rest.to_string());
        if text.contains(char::is_whitespace) || text.is_empty() {
            return Err(format!("`{text}` is no name of a tensor"));
        }
        Ok(Self { words, holes })
    }

    pub fn holes(&self) -> &[String] {
        &self.holes
    }

    pub fn with_prefix(&self, prefix: &str) -> Self {
        let mut template = self.clone();
        template.words[0].insert_str(0, prefix);
        template
    }

    /// The same for every template that names the same tensors.
    pub fn shape(&self) -> String {
        self.words.join("{}")
    }

    pub fn fill(&self, holes: &Holes) -> String {
        let mut name = self.words[0].clone();
        for (hole, word) in self.holes.iter().zip(&self.words[1..]) {
            name.push_str(&holes[hole].to_string());
            name.push_str(word);
        }
        name
    }

    /// The numbers in the holes, if the name is one of these.
    pub fn matches(&self, name: &str) -> Option<Holes> {
        let mut rest = name.strip_prefix(self.words[0].as_str())?;
        let mut holes = Holes::new();
        for (hole, word) in self.holes.iter().zip(&self.words[1..]) {
            let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
            let number = rest[..digits].parse().ok().filter(|n: &u64| n.to_string() == rest[..digits])?;
            rest = rest[digits..].strip_prefix(word.as_str())?;
            if holes.insert(hole.clone(), number).is_some_and(|other| other != number) {
                return None;
            }
        }
        rest.is_empty().then_some(holes)
    }
}

impl Term {
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}`: a tensor is a name and its dims, as in `a.{{l}}.weight [g d, h]`");
        let (name, dims) = text.split_once('[').ok_or_else(wrong)?;
        let dims = dims.trim_end().strip_suffix(']').ok_or_else(wrong)?;
        let name = Template::parse(name.trim())?;
        let dims = match dims.trim() {
            "" => vec![],
            dims => dims.split(',').map(|dim| dim_of(dim, text)).collect::<Result<_, _>>()?,
        };
        let term = Self { name, dims };
        term.checked(text)?;
        Ok(term)
    }

    fn checked(&self, text: &str) -> Result<(), String> {
        let mut seen = std::collections::BTreeSet::new();
        for axis in self.name.holes() {
            if !seen.insert(axis.as_str()) {
                return Err(format!("`{text}`: the axis `{axis}` is there twice"));
            }
        }
        for axis in self.dims.iter().flatten() {
            if let Axis::Named { name, .. } = axis
                && !seen.insert(name)
            {
                return Err(format!("`{text}`: the axis `{name}` is there twice"));
            }
        }
        let many = self.dims.iter().flatten().filter(|a| matches!(a, Axis::Parts(_))).count();
        if many > 1 {
            return Err(format!("`{text}`: parts one behind the other are in two places"));
        }
        let padded = |dim: &&Vec<Axis>| dim.iter().any(|a| matches!(a, Axis::Named { padded: true, .. }));
        if self.dims.iter().filter(padded).any(|dim| dim.len() > 1) {
            return Err(format!("`{text}`: only a dim of one axis can be padded"));
        }
        Ok(())
    }

    /// The parts one behind the other, where there are some.
    pub fn parts(&self) -> Option<&[Option<String>]> {
        self.dims.iter().flatten().find_map(|axis| match axis {
            Axis::Parts(parts) => Some(&parts[..]),
            Axis::Named { .. } => None,
        })
    }

    /// All axes, of holes and of dims, as the part of this number has them.
    pub fn axes(&self, part: usize) -> std::collections::BTreeSet<&str> {
        let of_dims = self.dims.iter().flatten().filter_map(|axis| match axis {
            Axis::Named { name, .. } => Some(name.as_str()),
            Axis::Parts(parts) => parts[part.min(parts.len() - 1)].as_deref(),
        });
        self.name.holes().iter().map(String::as_str).chain(of_dims).collect()
    }
}

fn dim_of(dim: &str, text: &str) -> Result<Vec<Axis>, String> {
    let name = |word: &str| {
        let plain = !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        plain.then(|| word.to_string()).ok_or_else(|| format!("`{text}`: `{word}` is no axis"))
    };
    let mut axes = Vec::new();
    for word in dim.split_whitespace() {
        if let Some(parts) = word.strip_prefix('(').and_then(|w| w.strip_suffix(')')) {
            let part = |p: &str| if p == "1" { Ok(None) } else { name(p).map(Some) };
            axes.push(Axis::Parts(parts.split('|').map(part).collect::<Result<_, _>>()?));
        } else {
            let padded = word.ends_with('+');
            axes.push(Axis::Named { name: name(word.trim_end_matches('+'))?, padded });
        }
    }
    if axes.is_empty() {
        return Err(format!("`{text}`: a dim without an axis"));
    }
    Ok(axes)
}

/// Whether a name is what a pattern with `*` means.
pub fn glob(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((head, tail)) => name.strip_prefix(head).is_some_and(|rest| {
            let starts = rest.char_indices().map(|(i, _)| i).chain([rest.len()]);
            starts.into_iter().any(|i| glob(tail, &rest[i..]))
        }),
    }
}
