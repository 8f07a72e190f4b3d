//! Names of one system to those of another, as data: maps/*.toml, and files that users write.
//!
//! A rule says that tensors of two systems are the same numbers: each is a product of axes, and one of them may have
//! several of the other one behind the other. To apply a map is to say anew where boxes lie; no byte moves:
//!
//! ```text
//! q_proj [g q d, h]  \
//! k_proj [g   d, h]   =  linear_qkv [l, g (q|1|1) d, h]
//! v_proj [g   d, h]  /
//! ```

mod apply;
mod cut;
mod extends;
mod fit;
mod notation;
mod sizes;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Deserialize;

use crate::error::CheckpointError;
use notation::{Template, Term};

pub use apply::{Naming, OURS, Renamed};
pub use cut::Parallel;

pub(crate) use fit::Fit;
pub(crate) use notation::glob;

const SCHEMA: &str = "crossmesh.names/1";
/// Megatron's layers without Transformer Engine. Families whose names do not depend on that have no other names for it.
const LOCAL: &str = "local";
/// Ours have a few KiB.
const MAX_MAP_BYTES: u64 = 16 << 20;

/// The maps that come along.
const BUILT_IN: [(&str, &str); 5] = [
    ("llama", include_str!("../../maps/llama.toml")),
    ("qwen3", include_str!("../../maps/qwen3.toml")),
    ("qwen3_moe", include_str!("../../maps/qwen3_moe.toml")),
    ("mixtral", include_str!("../../maps/mixtral.toml")),
    ("gpt2", include_str!("../../maps/gpt2.toml")),
];

/// A map between two or more systems' names of a family of models.
#[derive(Debug, Clone)]
pub struct NameMap {
    pub family: String,
    pub model_types: Vec<String>,
    axes: BTreeMap<String, Vec<Size>>,
    sides: BTreeMap<String, Side>,
    rules: Vec<Rule>,
}

/// What an axis counts: a number, or keys of a config.json.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum Size {
    Number(u64),
    /// `a` or `a / b`.
    Keys(String),
}

/// A system's manner of naming.
#[derive(Debug, Clone, Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Side {
    /// What may stand before all names; the first is written.
    prefixes: Vec<String>,
    /// How an optimizer's state of a parameter is called, with `{name}` and `{state}`; the first is written.
    states: Vec<String>,
    /// Names with `*` that mean nothing to others.
    ignore: Vec<String>,
    /// Names of what is another tensor again, unless config.json's `tie_word_embeddings` is false.
    tied: Vec<String>,
    /// The state of a parameter that is one number, and the same for all of them: the optimizer's count of steps.
    count: Option<String>,
    /// Another side, whose names it has where a tensor says nothing else, and whose manner where it says nothing of its own.
    like: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    schema: String,
    family: String,
    #[serde(default)]
    model_type: Vec<String>,
    axes: BTreeMap<String, Vec<Size>>,
    sides: BTreeMap<String, Side>,
    tensor: Vec<RuleText>,
}

#[derive(Deserialize)]
struct RuleText {
    tp: Option<String>,
    ep: Option<String>,
    #[serde(default)]
    stage: Stage,
    #[serde(default)]
    optional: bool,
    /// Sides whose prefixes do not stand before it.
    #[serde(default)]
    bare: Vec<String>,
    /// By side, then by spelling.
    #[serde(default, rename = "or")]
    other: BTreeMap<String, BTreeMap<String, String>>,
    #[serde(flatten)]
    sides: BTreeMap<String, Vec<String>>,
}

/// Which stage of a pipeline has a tensor that belongs to no layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Stage {
    #[default]
    First,
    Last,
}

/// Tensors of all sides that are the same numbers.
#[derive(Debug, Clone)]
struct Rule {
    terms: BTreeMap<String, Vec<Term>>,
    /// Other names of a side's single tensor, by spelling.
    other: BTreeMap<String, BTreeMap<String, Template>>,
    tp: Option<String>,
    ep: Option<String>,
    stage: Stage,
    optional: bool,
    bare: Vec<String>,
}

impl NameMap {
    /// The families whose maps come along.
    pub fn families() -> impl Iterator<Item = &'static str> {
        BUILT_IN.iter().map(|(name, _)| *name)
    }

    /// The text of one that comes along: what a map of one's own may begin with.
    pub fn text(family: &str) -> Option<&'static str> {
        BUILT_IN.iter().find(|(name, _)| *name == family).map(|(_, text)| *text)
    }

    /// One that comes along, by family or by `model_type` of a config.json.
    pub fn built_in(name: &str) -> Result<Self, CheckpointError> {
        for (family, text) in BUILT_IN {
            let map = Self::parse(text, family)?;
            if family == name || map.model_types.iter().any(|t| t == name) {
                return Ok(map);
            }
        }
        let known: Vec<&str> = Self::families().collect();
        let what = format!(
            "no map of this name comes along\nhint: one of {}, or a file of your own",
            known.join(", ")
        );
        Err(CheckpointError::Map { map: name.into(), what })
    }

    /// A family's, or a file.
    pub fn find(name: &str) -> Result<Self, CheckpointError> {
        let path = Path::new(name);
        if path.extension().is_some_and(|e| e == "toml") {
            let text = String::from_utf8(crate::open::read_bytes(path, MAX_MAP_BYTES)?)
                .map_err(|e| CheckpointError::damaged(path, format!("it is no text: {e}")))?;
            return Self::parse(&text, name);
        }
        Self::built_in(name)
    }

    /// Reads a map and refuses one that does not make sense.
    pub fn parse(text: &str, name: &str) -> Result<Self, CheckpointError> {
        let wrong = |what: String| CheckpointError::Map { map: name.into(), what };
        let document: Document = extends::read(text).map_err(wrong)?;
        if document.schema != SCHEMA {
            return Err(wrong(format!(
                "its schema is `{}`; `{SCHEMA}` is what is read here",
                document.schema
            )));
        }
        if document.sides.len() < 2 {
            return Err(wrong("it has fewer than two sides".into()));
        }
        let mut sides = document.sides;
        inherit(&mut sides).map_err(wrong)?;
        sides.values_mut().filter(|s| s.prefixes.is_empty()).for_each(|s| s.prefixes.push(String::new()));
        let rules = document.tensor.into_iter().map(|rule| Rule::new(rule, &sides, &document.axes));
        let rules = rules.collect::<Result<Vec<_>, String>>().map_err(wrong)?;
        let map = Self {
            family: document.family,
            model_types: document.model_type,
            axes: document.axes,
            sides,
            rules,
        };
        map.each_name_once().map_err(wrong)?;
        Ok(map)
    }

    pub fn sides(&self) -> impl Iterator<Item = &str> {
        self.sides.keys().map(String::as_str)
    }

    /// What names of a tensor may be chosen by, where it has several.
    pub fn spellings(&self) -> BTreeSet<&str> {
        let of_rules = self.rules.iter().flat_map(|r| r.other.values()).flat_map(BTreeMap::keys);
        of_rules.map(String::as_str).chain([LOCAL]).collect()
    }

    fn knows_spelling(&self, naming: &Naming) -> Result<(), String> {
        let known = self.spellings();
        match naming.spelling.as_deref().filter(|spelling| !known.contains(spelling)) {
            None => Ok(()),
            Some(unknown) => {
                let known = known.into_iter().collect::<Vec<_>>().join(", ");
                Err(format!("it has no spelling `{unknown}`\nhint: one of {known}"))
            }
        }
    }

    fn each_name_once(&self) -> Result<(), String> {
        for side in self.sides.keys() {
            let mut seen = BTreeSet::new();
            for rule in &self.rules {
                let other = rule.other.get(side).into_iter().flat_map(|o| o.values());
                for name in rule.terms[side].iter().map(|t| &t.name).chain(other) {
                    if !seen.insert(name.shape()) {
                        return Err(format!("`{}` of {side} is named twice", name.shape()));
                    }
                }
            }
        }
        Ok(())
    }
}

/// Sides that are like another have its manner where they say nothing of their own.
fn inherit(sides: &mut BTreeMap<String, Side>) -> Result<(), String> {
    let all = sides.clone();
    for (name, side) in sides {
        let Some(like) = &side.like else { continue };
        let Some(other) = all.get(like).filter(|other| other.like.is_none()) else {
            return Err(format!(
                "the side {name} is like `{like}`, which is no side, or like another itself"
            ));
        };
        for (own, theirs) in [
            (&mut side.prefixes, &other.prefixes),
            (&mut side.states, &other.states),
            (&mut side.ignore, &other.ignore),
            (&mut side.tied, &other.tied),
        ] {
            if own.is_empty() {
                own.clone_from(theirs);
            }
        }
        side.count = side.count.take().or_else(|| other.count.clone());
    }
    Ok(())
}

impl RuleText {
    /// What a side that is like another has of it.
    fn inherit(&mut self, sides: &BTreeMap<String, Side>) {
        for (name, side) in sides {
            let Some(like) = &side.like else { continue };
            if self.sides.contains_key(name) {
                continue;
            }
            if let Some(terms) = self.sides.get(like).cloned() {
                self.sides.insert(name.clone(), terms);
            }
            if let Some(other) = self.other.get(like).cloned() {
                self.other.insert(name.clone(), other);
            }
            if self.bare.contains(like) {
                self.bare.push(name.clone());
            }
        }
    }
}

impl Rule {
    fn new(
        mut text: RuleText,
        sides: &BTreeMap<String, Side>,
        axes: &BTreeMap<String, Vec<Size>>,
    ) -> Result<Self, String> {
        let mut terms: BTreeMap<String, Vec<Term>> = BTreeMap::new();
        text.inherit(sides);
        for (side, list) in &text.sides {
            if !sides.contains_key(side) {
                return Err(format!("a tensor has the key `{side}`, which is no side and nothing else"));
            }
            let list: Vec<Term> = list.iter().map(|t| Term::parse(t)).collect::<Result<_, _>>()?;
            terms.insert(side.clone(), list);
        }
        let first = text.sides.values().flatten().next().cloned().unwrap_or_default();
        if let Some(side) = sides.keys().find(|side| terms.get(*side).is_none_or(|t| t.is_empty())) {
            return Err(format!("`{first}`: the side {side} is missing"));
        }
        let mut other = BTreeMap::new();
        for (side, spellings) in text.other {
            if terms.get(&side).is_none_or(|t| t.len() != 1) {
                return Err(format!("`{first}`: other names of {side}, which has not one tensor here"));
            }
            let parse = |(k, v): (String, String)| Ok::<_, String>((k, Template::parse(&v)?));
            other.insert(side, spellings.into_iter().map(parse).collect::<Result<_, _>>()?);
        }
        if let Some(side) = text.bare.iter().find(|side| !sides.contains_key(*side)) {
            return Err(format!("`{first}`: it is bare in `{side}`, which is no side"));
        }
        let RuleText { tp, ep, stage, optional, bare, .. } = text;
        let rule = Self { terms, other, tp, ep, stage, optional, bare };
        rule.checked(&first, axes)?;
        Ok(rule)
    }

    /// Sides agree about how many parts there are, and about the axes of each.
    fn checked(&self, first: &str, known: &BTreeMap<String, Vec<Size>>) -> Result<(), String> {
        let count = self.num_parts();
        for (side, terms) in &self.terms {
            let fits = match terms.len() {
                1 => terms[0].parts().is_none_or(|parts| parts.len() == count),
                n => n == count && terms.iter().all(|t| t.parts().is_none()),
            };
            if !fits || (terms.len() == 1 && count > 1 && terms[0].parts().is_none()) {
                return Err(format!("`{first}`: {side} has not {count} parts, as others do"));
            }
        }
        for part in 0..count {
            let mut sides = self.terms.iter().map(|(side, terms)| (side, term_axes(terms, part)));
            let (one, axes) = sides.next().expect("two sides at least");
            for (two, others) in sides {
                if let Some(axis) = axes.symmetric_difference(&others).next() {
                    return Err(format!("`{first}`: the axis `{axis}` is of {one} or of {two} alone"));
                }
            }
            if let Some(axis) = axes.iter().find(|axis| !known.contains_key(**axis)) {
                return Err(format!("`{first}`: the axis `{axis}` is not in [axes]"));
            }
        }
        for axis in self.tp.iter().chain(&self.ep) {
            let everywhere =
                (0..count).any(|p| self.terms.values().all(|t| term_axes(t, p).contains(axis.as_str())));
            if !everywhere {
                return Err(format!("`{first}`: it is to be cut along `{axis}`, which it does not have"));
            }
        }
        Ok(())
    }

    /// How many tensors one side has behind each other.
    fn num_parts(&self) -> usize {
        self.terms
            .values()
            .map(|t| if t.len() > 1 { t.len() } else { t[0].parts().map_or(1, |p| p.len()) })
            .max()
            .unwrap_or(1)
    }
}

fn term_axes(terms: &[Term], part: usize) -> BTreeSet<&str> {
    if terms.len() > 1 { terms[part].axes(0) } else { terms[0].axes(part) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_map_that_comes_along_is_in_order() {
        for family in NameMap::families() {
            assert_eq!(NameMap::built_in(family).unwrap().family, family);
        }
        assert!(NameMap::built_in("bert").unwrap_err().to_string().contains("one of llama"));
    }

    fn refused(tensors: &str) -> String {
        let head = "schema = \"crossmesh.names/1\"\nfamily = \"x\"\n[axes]\nl = [\"n\"]\nh = [4]\nf = [2]\n[sides.a]\n[sides.b]\n";
        NameMap::parse(&format!("{head}{tensors}"), "mine").unwrap_err().to_string()
    }

    #[test]
    fn maps_that_make_no_sense_are_refused_with_the_place() {
        for (tensors, says) in [
            (
                "[[tensor]]\na=[\"x [h]\"]\nb=[\"y [h]\"]\n[[tensor]]\na=[\"x [f]\"]\nb=[\"z [f]\"]",
                "`x` of a is named twice",
            ),
            ("[[tensor]]\na=[\"x [h]\"]", "the side b is missing"),
            ("[[tensor]]\na=[\"x [h]\"]\nb=[\"y [f]\"]", "the axis `f` is of a or of b alone"),
            ("[[tensor]]\na=[\"x [k]\"]\nb=[\"y [k]\"]", "the axis `k` is not in [axes]"),
            ("[[tensor]]\na=[\"x [h]\", \"y [h]\"]\nb=[\"z [h]\"]", "b has not 2 parts"),
            ("[[tensor]]\na=[\"x [h]\"]\nb=[\"y [h]\"]\ntp=\"f\"", "cut along `f`"),
            ("[[tensor]]\na=[\"x\"]\nb=[\"y [h]\"]", "a tensor is a name and its dims"),
            ("[[tensor]]\na=[\"x [h]\"]\nb=[\"y [h]\"]\nc=[\"z [h]\"]", "which is no side"),
            ("[[tensor]]\na=[\"x.{l [h]\"]\nb=[\"y [h]\"]", "not closed"),
        ] {
            let error = refused(tensors);
            assert!(error.contains(says), "{error}");
        }
    }
}
