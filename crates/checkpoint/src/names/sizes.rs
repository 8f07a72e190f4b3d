//! How long every axis is: from a config.json, and from the shapes of the tensors that are there.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::notation::{Axis, Term};
use super::{NameMap, Size};

/// The lengths of axes.
pub type Sizes = BTreeMap<String, u64>;

/// A tensor that a term names: its holes, and its shape.
pub struct Seen<'a> {
    pub term: &'a Term,
    pub name: &'a str,
    pub shape: &'a [u64],
    pub holes: super::notation::Holes,
}

/// Works out all axes, and refuses a tensor whose shape says otherwise.
pub fn solve(map: &NameMap, config: Option<&Value>, seen: &[Seen<'_>]) -> Result<Sizes, String> {
    let mut sizes = Sizes::new();
    for (axis, ways) in &map.axes {
        if let Some(size) = ways.iter().find_map(|way| said(way, config)) {
            sizes.insert(axis.clone(), size);
        }
    }
    count_holes(&mut sizes, seen);
    // A dim with one unknown axis tells it; each round can make others known. Padding tells least.
    for padding in [false, true] {
        loop {
            let before = sizes.len();
            seen.iter().for_each(|s| tell(s, &mut sizes, padding));
            if sizes.len() == before {
                break;
            }
        }
    }
    let needed: BTreeSet<&str> = seen
        .iter()
        .flat_map(|s| (0..s.term.parts().map_or(1, |p| p.len())).flat_map(|p| s.term.axes(p)))
        .collect();
    if let Some(axis) = needed.into_iter().find(|axis| !sizes.contains_key(*axis)) {
        let keys: Vec<String> = map.axes[axis].iter().map(|s| format!("`{s}`")).collect();
        return Err(format!(
            "nothing tells how long the axis `{axis}` is\nhint: give the model's config.json, which has it as {}",
            keys.join(" or ")
        ));
    }
    for s in seen {
        check(s, &sizes)?;
    }
    Ok(sizes)
}

impl std::fmt::Display for Size {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Size::Number(n) => write!(f, "{n}"),
            Size::Keys(keys) => write!(f, "{keys}"),
        }
    }
}

/// What the config says. Since version 5 transformers may keep a text model's under `text_config`.
fn said(way: &Size, config: Option<&Value>) -> Option<u64> {
    let keys = match way {
        Size::Number(n) => return Some(*n),
        Size::Keys(keys) => keys,
    };
    let config = config?;
    let number = |key: &str| {
        let inner = config.get("text_config").and_then(|c| c.get(key));
        config.get(key).or(inner)?.as_u64()
    };
    match keys.split_once('/') {
        None => number(keys.trim()),
        Some((a, b)) => {
            let (a, b) = (number(a.trim())?, number(b.trim())?);
            (b > 0 && a % b == 0).then(|| a / b)
        }
    }
}

/// As many as the highest number in a name tells; one that is missing is noticed when the tensors are taken.
fn count_holes(sizes: &mut Sizes, seen: &[Seen<'_>]) {
    let mut counts = Sizes::new();
    for (axis, index) in seen.iter().flat_map(|s| &s.holes) {
        let count = counts.entry(axis.clone()).or_default();
        *count = (*count).max(index.saturating_add(1));
    }
    counts.into_iter().for_each(|(axis, count)| {
        sizes.entry(axis).or_insert(count);
    });
}

/// The length of a factor, as far as it is known: what is known of it, and how often which axis is added.
fn factor<'t>(axis: &'t Axis, sizes: &Sizes) -> (u64, u64, Option<&'t str>) {
    let parts: Vec<Option<&str>> = match axis {
        Axis::Named { name, .. } => vec![Some(name)],
        Axis::Parts(parts) => parts.iter().map(|p| p.as_deref()).collect(),
    };
    let (mut known, mut times, mut unknown) = (0u64, 0, None);
    for part in parts {
        match part.map(|name| (name, sizes.get(name))) {
            None => known = known.saturating_add(1),
            Some((_, Some(size))) => known = known.saturating_add(*size),
            Some((name, None)) => (times, unknown) = (times + 1, Some(name)),
        }
    }
    (known, times, unknown)
}

fn tell(seen: &Seen<'_>, sizes: &mut Sizes, padding: bool) {
    for (dim, &len) in seen.term.dims.iter().zip(seen.shape) {
        let padded = dim.iter().any(|a| matches!(a, Axis::Named { padded: true, .. }));
        let factors: Vec<_> = dim.iter().map(|axis| factor(axis, sizes)).collect();
        let unknown: Vec<_> = factors.iter().filter(|f| f.2.is_some()).collect();
        let [&(known, times, Some(name))] = unknown[..] else { continue };
        let others = factors.iter().filter(|f| f.2.is_none()).try_fold(1u64, |v, f| v.checked_mul(f.0));
        let Some(others) = others.filter(|n| *n > 0 && len % n == 0) else { continue };
        let rest = (len / others).checked_sub(known).filter(|rest| rest % times == 0);
        if let Some(rest) = rest.filter(|_| !padded || padding) {
            sizes.insert(name.to_string(), rest / times);
        }
    }
}

fn check(seen: &Seen<'_>, sizes: &Sizes) -> Result<(), String> {
    let wanted = super::apply::shape_of(seen.term, sizes);
    let fits = wanted.len() == seen.shape.len()
        && seen.term.dims.iter().zip(seen.shape).zip(&wanted).all(|((dim, have), want)| {
            let padded = matches!(dim[..], [Axis::Named { padded: true, .. }]);
            have == want || (padded && have > want)
        });
    if fits {
        return Ok(());
    }
    Err(format!(
        "`{}` has the shape {:?}, where {wanted:?} is expected\nhint: is the config.json that of this model?",
        seen.name, seen.shape
    ))
}
