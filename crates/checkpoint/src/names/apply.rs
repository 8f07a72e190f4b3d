//! Applying a map: the boxes of a catalog under the names of another side.

use std::collections::{BTreeMap, BTreeSet};

use crossmesh_core::region::{Region, Span};

use super::notation::{Axis, Holes, Template, Term, glob};
use super::sizes::{Seen, Sizes, solve};
use super::view::{Factor, merge, split};
use super::{NameMap, Rule, Side};
use crate::catalog::{Catalog, Format, StoredBox, Tensor};
use crate::element::Element;
use crate::error::CheckpointError;
use crate::load::Reader;

/// The side of our own names.
pub const OURS: &str = "crossmesh";

/// What a map is applied with.
#[derive(Debug, Clone, Default)]
pub struct Naming {
    /// Of the source; the side whose names are there, where none is given.
    pub from: Option<String>,
    /// Of the target.
    pub to: String,
    /// Which of several names of a tensor is written, where a map has others: `local`.
    pub spelling: Option<String>,
    /// Tensors to be left behind, with `*`.
    pub leave_out: Vec<String>,
    /// An optimizer's states are left behind: the target has no place for them.
    pub parameters_only: bool,
}

/// A catalog under other names.
#[derive(Debug)]
pub struct Renamed {
    pub catalog: Catalog,
    /// Tensors and objects that the other side has no name for, or that were to be left out.
    pub left_out: Vec<String>,
    pub(super) side: String,
    pub(super) sizes: Sizes,
    /// The rule and term, and the holes, of every tensor.
    pub(super) made: BTreeMap<String, Made>,
}

/// Where a tensor of the target comes from.
#[derive(Debug, Clone)]
pub(super) struct Made {
    pub rule: usize,
    pub term: usize,
    pub holes: Holes,
    /// Its name without the state, and the state.
    pub parameter: String,
    pub state: Option<String>,
}

/// A tensor of the source that a rule takes.
struct Taken {
    rule: usize,
    term: usize,
    holes: Holes,
    name: String,
    /// None for the parameter itself, or which state of it.
    state: Option<String>,
}

/// The shape that a term has.
pub(super) fn shape_of(term: &Term, sizes: &Sizes) -> Vec<u64> {
    let length = |axis: &Axis| factor_len(axis, sizes);
    term.dims.iter().map(|dim| dim.iter().map(length).product()).collect()
}

fn factor_len(axis: &Axis, sizes: &Sizes) -> u64 {
    let part = |p: &Option<String>| p.as_ref().map_or(1, |name| sizes[name]);
    match axis {
        Axis::Named { name, .. } => sizes[name],
        Axis::Parts(parts) => parts.iter().map(part).sum(),
    }
}

impl NameMap {
    /// The same boxes under the names of another side.
    pub fn apply(&self, catalog: &Catalog, naming: &Naming) -> Result<Renamed, CheckpointError> {
        let wrong = |what: String| CheckpointError::Map { map: self.family.clone(), what };
        if !self.sides.contains_key(&naming.to) {
            let sides: Vec<&str> = self.sides().collect();
            return Err(wrong(format!("it has no side `{}`\nhint: one of {}", naming.to, sides.join(", "))));
        }
        self.knows_spelling(naming).map_err(wrong)?;
        let from = self.side_of(catalog, naming).map_err(wrong)?;
        let (taken, mut left_out) = self.take(catalog, &from, naming).map_err(wrong)?;
        let (counts, taken): (Vec<Taken>, Vec<Taken>) =
            taken.into_iter().partition(|t| self.is_count(catalog, &from, t));
        let steps = match counts.is_empty() {
            true => catalog.optimizer_steps,
            false => Some(steps_of(catalog, &counts).map_err(|e| e.or(wrong))?),
        };
        let seen: Vec<Seen<'_>> = taken
            .iter()
            .map(|t| Seen {
                term: &self.rules[t.rule].terms[&from][t.term],
                name: &t.name,
                shape: &catalog.tensors[&t.name].shape,
                holes: t.holes.clone(),
            })
            .collect();
        let sizes = solve(self, catalog.config.as_ref(), &seen).map_err(wrong)?;
        self.all_there(&taken, &from, &sizes).map_err(wrong)?;
        let mut renamed = catalog.clone();
        renamed.tensors.clear();
        renamed.paths.clear();
        left_out.extend(std::mem::take(&mut renamed.objects).into_keys());
        renamed.optimizer_steps = steps;
        let mut made = BTreeMap::new();
        for t in &taken {
            let rule = Step { map: self, rule: t.rule, from: &from, naming, sizes: &sizes };
            rule.rename(t, &catalog.tensors[&t.name], &mut renamed.tensors, &mut made).map_err(wrong)?;
        }
        match (&self.sides[&naming.to].count, steps) {
            (Some(count), Some(steps)) => self.write_counts(count, steps, naming, &made, &mut renamed),
            // Ours keeps it beside the tensors.
            _ if naming.to == OURS => {}
            _ => left_out.extend(counts.into_iter().map(|t| t.name)),
        }
        Ok(Renamed { catalog: renamed, left_out, side: naming.to.clone(), sizes, made })
    }

    /// The side whose names are there: most of the tensors have them.
    pub(super) fn side_of(&self, catalog: &Catalog, naming: &Naming) -> Result<String, String> {
        if let Some(side) = &naming.from {
            let known = self.sides.contains_key(side);
            return if known { Ok(side.clone()) } else { Err(format!("it has no side `{side}`")) };
        }
        // Our names may be those of Hugging Face; only ours have our shapes.
        if catalog.format == Format::Crossmesh && self.sides.contains_key(OURS) {
            return Ok(OURS.to_string());
        }
        let others = || self.sides.keys().filter(|side| *side != OURS);
        let count = |side: &&String| {
            let finder = Finder::new(self, side);
            catalog.tensors.keys().filter(|name| finder.find(name).is_some()).count()
        };
        let best = others().max_by_key(count).expect("two sides at least");
        if count(&best) == 0 {
            let first = catalog.tensors.keys().next().map_or("nothing", String::as_str);
            return Err(format!(
                "none of its names is there, but `{first}`\nhint: is this map of this model?"
            ));
        }
        Ok(best.clone())
    }

    fn is_count(&self, catalog: &Catalog, from: &str, taken: &Taken) -> bool {
        taken.state.is_some()
            && taken.state == self.sides[from].count
            && catalog.tensors[&taken.name].shape.is_empty()
    }

    /// The count of steps, for every parameter that has a state.
    fn write_counts(
        &self,
        count: &str,
        steps: u64,
        naming: &Naming,
        made: &BTreeMap<String, Made>,
        renamed: &mut Catalog,
    ) {
        let Some(pattern) = self.sides[&naming.to].states.first() else { return };
        let stateful: BTreeSet<&String> =
            made.values().filter(|m| m.state.is_some()).map(|m| &m.parameter).collect();
        for parameter in stateful {
            let name = pattern.replace("{name}", parameter).replace("{state}", count);
            let value = Some((steps as f32).to_le_bytes().to_vec());
            let tensor = Tensor { element: Element::F32, shape: vec![], boxes: vec![], value };
            renamed.tensors.insert(name, tensor);
        }
    }

    /// Whether a name of a side means nothing to others, is another tensor again, or is to be left out.
    pub(super) fn ignored<'a>(
        &'a self,
        catalog: &Catalog,
        from: &'a str,
        naming: &'a Naming,
    ) -> impl Fn(&str) -> bool + use<'a> {
        let said =
            catalog.config.as_ref().and_then(|c| c.get("tie_word_embeddings")).and_then(|t| t.as_bool());
        let is_tied = said.unwrap_or(true);
        move |name: &str| {
            let tied = self.sides[from].tied.iter().filter(|_| is_tied);
            let mut patterns = self.sides[from].ignore.iter().chain(tied).chain(&naming.leave_out);
            patterns.any(|pattern| glob(pattern, name))
        }
    }

    /// Every tensor by its rule; what no rule names is refused.
    fn take(
        &self,
        catalog: &Catalog,
        from: &str,
        naming: &Naming,
    ) -> Result<(Vec<Taken>, Vec<String>), String> {
        let finder = Finder::new(self, from);
        let (mut taken, mut left_out) = (Vec::new(), Vec::new());
        let ignored = self.ignored(catalog, from, naming);
        for name in catalog.tensors.keys() {
            match finder.find(name) {
                _ if ignored(name) => left_out.push(name.clone()),
                Some((_, _, _, Some(_))) if naming.parameters_only => left_out.push(name.clone()),
                Some((rule, term, holes, state)) => {
                    taken.push(Taken { rule, term, holes, name: name.clone(), state });
                }
                None => {
                    return Err(format!(
                        "it does not name `{name}` {:?}, which is there\nhint: leave it out, or name it in a map of your own",
                        catalog.tensors[name].shape
                    ));
                }
            }
        }
        Ok((taken, left_out))
    }

    /// Every tensor that a rule names is there: for every state, every layer and every expert.
    fn all_there(&self, taken: &[Taken], from: &str, sizes: &Sizes) -> Result<(), String> {
        let mut there: BTreeSet<(usize, usize, Vec<u64>, Option<&str>)> = BTreeSet::new();
        for t in taken {
            let holes: Vec<u64> = t.holes.values().copied().collect();
            if !there.insert((t.rule, t.term, holes, t.state.as_deref())) {
                return Err(format!("`{}` is there under another name too", t.name));
            }
        }
        let states: BTreeSet<Option<&str>> = taken.iter().map(|t| t.state.as_deref()).collect();
        for (number, rule) in self.rules.iter().enumerate() {
            for state in &states {
                let any = there.iter().any(|(r, _, _, s)| *r == number && s == state);
                // A state may be kept of some parameters only; the parameters are all there.
                if !any && (rule.optional || state.is_some()) {
                    continue;
                }
                for (term, described) in rule.terms[from].iter().enumerate() {
                    let named: BTreeSet<&String> = described.name.holes().iter().collect();
                    for holes in all_holes(named.into_iter(), sizes) {
                        let key = (number, term, holes.values().copied().collect(), *state);
                        if !there.contains(&key) {
                            return Err(format!(
                                "it names `{}`, which is not there",
                                described.name.fill(&holes)
                            ));
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

/// The number that all counts are.
fn steps_of(catalog: &Catalog, counts: &[Taken]) -> Result<u64, CountError> {
    let mut reader = Reader::new(catalog, 64);
    let mut first: Option<(u64, &str)> = None;
    for taken in counts {
        let steps = reader.count(&taken.name).map_err(CountError::Read)?;
        let Some(steps) = steps else {
            return Err(CountError::Value(format!("`{}` is no number of steps", taken.name)));
        };
        let (other, name) = *first.get_or_insert((steps, &taken.name));
        if other != steps {
            return Err(CountError::Value(format!(
                "`{}` is {steps}, and `{name}` is {other}: ours and Megatron's optimizers have one count for all parameters\nhint: leave them out",
                taken.name
            )));
        }
    }
    Ok(first.map_or(0, |(steps, _)| steps))
}

enum CountError {
    Read(CheckpointError),
    Value(String),
}

impl CountError {
    fn or(self, wrong: impl FnOnce(String) -> CheckpointError) -> CheckpointError {
        match self {
            CountError::Read(error) => error,
            CountError::Value(what) => wrong(what),
        }
    }
}

/// All numbers that holes can have, in order.
fn all_holes<'a>(axes: impl Iterator<Item = &'a String>, sizes: &Sizes) -> Vec<Holes> {
    let mut all = vec![Holes::new()];
    for axis in axes {
        let with = |holes: &Holes| {
            let holes = holes.clone();
            (0..sizes.get(axis).copied().unwrap_or(0)).map(move |i| {
                let mut holes = holes.clone();
                holes.insert(axis.clone(), i);
                holes
            })
        };
        all = all.iter().flat_map(with).collect();
    }
    all
}

/// Finds the rule of a name, without looking at all of them: by its words without numbers.
pub(super) struct Finder<'a> {
    by_shape: BTreeMap<String, (usize, usize, Template)>,
    states: Vec<(&'a str, &'a str, bool)>,
}

pub(super) type Found = (usize, usize, Holes, Option<String>);

impl<'a> Finder<'a> {
    pub fn new(map: &'a NameMap, side: &str) -> Self {
        let mut by_shape = BTreeMap::new();
        for (r, rule) in map.rules.iter().enumerate() {
            for (t, term) in rule.terms[side].iter().enumerate() {
                let other = rule.other.get(side).into_iter().flat_map(|o| o.values());
                for name in std::iter::once(&term.name).chain(other) {
                    let bare = [String::new()];
                    let is_bare = rule.bare.iter().any(|b| b == side);
                    for prefix in if is_bare { &bare[..] } else { &map.sides[side].prefixes[..] } {
                        let template = name.with_prefix(prefix);
                        by_shape.entry(template.shape()).or_insert((r, t, template));
                    }
                }
            }
        }
        // Before, between and behind; and whether the name comes first.
        let cut = |pattern: &'a String| {
            let (before, rest) = pattern.split_once('{')?;
            let name_first = rest.starts_with("name}");
            let middle = rest.split_once('}')?.1.split_once('{')?.0;
            Some((before, middle, name_first))
        };
        Self { by_shape, states: map.sides[side].states.iter().filter_map(cut).collect() }
    }

    pub fn find(&self, name: &str) -> Option<Found> {
        if let Some((rule, term, holes)) = self.parameter(name) {
            return Some((rule, term, holes, None));
        }
        self.states.iter().find_map(|(before, middle, name_first)| {
            let rest = name.strip_prefix(before)?;
            let (inner, state) = match name_first {
                true => rest.rsplit_once(middle)?,
                false => rest.split_once(middle).map(|(state, inner)| (inner, state))?,
            };
            let (rule, term, holes) = self.parameter(inner)?;
            Some((rule, term, holes, Some(state.to_string())))
        })
    }

    pub fn parameter(&self, name: &str) -> Option<(usize, usize, Holes)> {
        let words: Vec<&str> = name.split('.').collect();
        // A number of a name is a hole of its template; few names have other numbers, and those have all tried.
        let shape: Vec<&str> = words
            .iter()
            .map(|w| if w.bytes().all(|b| b.is_ascii_digit()) && !w.is_empty() { "{}" } else { w })
            .collect();
        let (rule, term, template) =
            self.by_shape.get(&shape.join(".")).or_else(|| self.by_shape.get(name))?;
        Some((*rule, *term, template.matches(name)?))
    }
}

/// A rule at work.
struct Step<'a> {
    map: &'a NameMap,
    rule: usize,
    from: &'a str,
    naming: &'a Naming,
    sizes: &'a Sizes,
}

/// A box in the axes that both sides have: of every axis a span, and how far apart its elements lie.
#[derive(Debug, Clone)]
struct Logical {
    offset: u64,
    axes: BTreeMap<String, (Span, u64)>,
}

impl Step<'_> {
    fn the_rule(&self) -> &Rule {
        &self.map.rules[self.rule]
    }

    /// Adds the boxes of a source tensor to those of the target.
    fn rename(
        &self,
        taken: &Taken,
        tensor: &Tensor,
        out: &mut BTreeMap<String, Tensor>,
        made: &mut BTreeMap<String, Made>,
    ) -> Result<(), String> {
        let rule = self.the_rule();
        let source = &rule.terms[self.from][taken.term];
        for part in 0..rule.num_parts() {
            // A side with a tensor for every part has this one only.
            if rule.terms[self.from].len() > 1 && part != taken.term {
                continue;
            }
            let targets = &rule.terms[&self.naming.to];
            let number = if targets.len() > 1 { part } else { 0 };
            let target = &targets[number];
            self.announce(taken, target, number, tensor, out, made)?;
            for stored in &tensor.boxes {
                for logical in self.logical(source, part, taken, tensor, stored) {
                    self.place(target, part, taken, stored.file, logical, out)?;
                }
            }
        }
        Ok(())
    }

    /// The target's tensors are there even if no box has elements for them.
    fn announce(
        &self,
        taken: &Taken,
        target: &Term,
        number: usize,
        tensor: &Tensor,
        out: &mut BTreeMap<String, Tensor>,
        made: &mut BTreeMap<String, Made>,
    ) -> Result<(), String> {
        let free = target.name.holes().iter().filter(|axis| !taken.holes.contains_key(*axis));
        for mut holes in all_holes(free, self.sizes) {
            holes.extend(target.name.holes().iter().filter_map(|a| Some((a.clone(), *taken.holes.get(a)?))));
            let (parameter, name) = self.target_name(target, taken, &holes);
            let shape = shape_of(target, self.sizes);
            let made_of = || Tensor { element: tensor.element, shape, boxes: vec![], value: None };
            let element = out.entry(name.clone()).or_insert_with(made_of).element;
            if element != tensor.element {
                let other = tensor.element;
                return Err(format!(
                    "`{name}` is to be made of {element} and of `{}`, which is {other}",
                    taken.name
                ));
            }
            let state = taken.state.clone();
            made.entry(name).or_insert(Made { rule: self.rule, term: number, holes, parameter, state });
        }
        Ok(())
    }

    /// Of the parameter, and of the tensor.
    fn target_name(&self, target: &Term, taken: &Taken, holes: &Holes) -> (String, String) {
        let side = &self.map.sides[&self.naming.to];
        let spellings = self.the_rule().other.get(&self.naming.to);
        let spelling = self.naming.spelling.as_ref().and_then(|s| spellings?.get(s));
        let prefix = if self.the_rule().bare.contains(&self.naming.to) { "" } else { &side.prefixes[0] };
        let name = format!("{prefix}{}", spelling.unwrap_or(&target.name).fill(holes));
        (name.clone(), self.with_state(taken, side, name))
    }

    fn with_state(&self, taken: &Taken, side: &Side, name: String) -> String {
        match (&taken.state, side.states.first()) {
            (Some(state), Some(pattern)) => pattern.replace("{name}", &name).replace("{state}", state),
            (Some(state), None) => format!("{name}.{state}"),
            (None, _) => name,
        }
    }

    /// What a stored box has of a part, in the axes of both sides.
    fn logical(
        &self,
        source: &Term,
        part: usize,
        taken: &Taken,
        tensor: &Tensor,
        stored: &StoredBox,
    ) -> Vec<Logical> {
        let fixed = taken.holes.iter().map(|(axis, &i)| (axis.clone(), (Span::new(i, i + 1), 0)));
        let mut boxes = vec![Logical { offset: stored.offset, axes: fixed.collect() }];
        for (dim, axes) in source.dims.iter().enumerate() {
            let (span, stride) = (stored.region.spans()[dim], stored.strides[dim]);
            let sizes: Vec<u64> = match &axes[..] {
                // What is padded has the length that it has.
                [Axis::Named { padded: true, .. }] => vec![tensor.shape[dim]],
                _ => axes.iter().map(|axis| factor_len(axis, self.sizes)).collect(),
            };
            let mut next = Vec::new();
            for spans in split(span, &sizes) {
                let Some((offset, found)) = self.of_dim(axes, &sizes, &spans, (span, stride), part) else {
                    continue;
                };
                for logical in &boxes {
                    let mut logical = logical.clone();
                    logical.offset += offset;
                    logical.axes.extend(found.iter().map(|(axis, at)| (axis.to_string(), *at)));
                    next.push(logical);
                }
            }
            boxes = next;
        }
        boxes
    }

    /// A box of a dim's factors as spans of axes, and where it begins; None where it has nothing of the part.
    #[expect(clippy::type_complexity, reason = "an offset and a list")]
    fn of_dim<'t>(
        &self,
        axes: &'t [Axis],
        sizes: &[u64],
        spans: &[Span],
        (whole, stride): (Span, u64),
        part: usize,
    ) -> Option<(u64, Vec<(&'t str, (Span, u64))>)> {
        let mut found = Vec::new();
        let mut start = 0;
        let mut inner = 1;
        for ((axis, &size), span) in axes.iter().zip(sizes).zip(spans).rev() {
            let step = stride * inner;
            match axis {
                Axis::Named { name, .. } => {
                    // Padding is cut off.
                    let kept = span.intersect(Span::new(0, self.sizes[name]))?;
                    start += kept.start * inner;
                    found.push((name.as_str(), (kept, step)));
                }
                Axis::Parts(parts) => {
                    let (first, len) = part_range(parts, part, self.sizes);
                    let kept = span.intersect(Span::new(first, first + len))?;
                    start += kept.start * inner;
                    if let Some(name) = &parts[part] {
                        found.push((name.as_str(), (Span::new(kept.start - first, kept.end - first), step)));
                    }
                }
            }
            inner *= size;
        }
        Some(((start - whole.start) * stride, found))
    }

    /// Adds a logical box to the tensors of the target that it belongs to.
    fn place(
        &self,
        target: &Term,
        part: usize,
        taken: &Taken,
        file: u32,
        logical: Logical,
        out: &mut BTreeMap<String, Tensor>,
    ) -> Result<(), String> {
        // An axis that the target has in its name: a tensor for each of its indexes.
        let mut todo = vec![(Holes::new(), logical.offset)];
        for hole in target.name.holes() {
            let (span, stride) = logical.axes[hole];
            let each = |(holes, offset): &(Holes, u64)| {
                let (holes, offset) = (holes.clone(), *offset);
                (span.start..span.end).map(move |i| {
                    let mut holes = holes.clone();
                    holes.insert(hole.clone(), i);
                    (holes, offset + (i - span.start) * stride)
                })
            };
            todo = todo.iter().flat_map(each).collect();
        }
        let dims = target.dims.iter().map(|axes| merge(&self.factors(axes, part, &logical)));
        let dims: Vec<_> = dims.collect();
        for (holes, offset) in todo {
            let (_, name) = self.target_name(target, taken, &holes);
            let tensor = out.get_mut(&name).ok_or_else(|| format!("`{name}` was not announced"))?;
            let mut boxes = vec![(offset, vec![], vec![])];
            for flats in &dims {
                let with = |(offset, spans, strides): &(u64, Vec<Span>, Vec<u64>)| {
                    flats
                        .iter()
                        .map(|f| {
                            (
                                offset + f.offset,
                                [&spans[..], &[f.span]].concat(),
                                [&strides[..], &[f.stride]].concat(),
                            )
                        })
                        .collect::<Vec<_>>()
                };
                boxes = boxes.iter().flat_map(with).collect();
            }
            tensor.boxes.extend(boxes.into_iter().map(|(offset, spans, strides)| StoredBox {
                region: Region::new(spans),
                file,
                offset,
                strides,
            }));
        }
        Ok(())
    }

    fn factors(&self, axes: &[Axis], part: usize, logical: &Logical) -> Vec<Factor> {
        let factor = |axis: &Axis| match axis {
            Axis::Named { name, .. } => {
                let (span, stride) = logical.axes[name];
                Factor { size: self.sizes[name], span, stride }
            }
            Axis::Parts(parts) => {
                let (first, _) = part_range(parts, part, self.sizes);
                let (span, stride) =
                    parts[part].as_ref().map_or((Span::new(0, 1), 0), |name| logical.axes[name]);
                let span = Span::new(span.start + first, span.end + first);
                Factor { size: factor_len(axis, self.sizes), span, stride }
            }
        };
        axes.iter().map(factor).collect()
    }
}

/// Where a part begins behind the others, and its length.
pub(super) fn part_range(parts: &[Option<String>], part: usize, sizes: &Sizes) -> (u64, u64) {
    let len = |p: &Option<String>| p.as_ref().map_or(1, |name| sizes[name]);
    (parts[..part].iter().map(len).sum(), len(&parts[part]))
}
