//! Whether names are those of a side already, or have to be changed to them.
//!
//! DCP and safetensors of Hugging Face both have Hugging Face's names, as a rule. But what is saved is a state dict of somebody's own, as
//! `{"model": ..., "optim": ...}` is, whose names begin with `model.` once more; or it is how transformers has experts in memory.

use super::apply::{Finder, Naming};
use super::{NameMap, Rule};
use crate::catalog::Catalog;
use crate::error::CheckpointError;

/// What a map says of the names of a catalog.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fit {
    /// They are the target's. There may be others that the map knows nothing of.
    AsTheyAre,
    /// All of them are known, and some are called otherwise by the target.
    Renamed,
    /// Some are known by other names, and this one not at all.
    Neither(String),
}

impl NameMap {
    /// How the names of a catalog fit those of the side `naming.to`.
    pub(crate) fn fit(&self, catalog: &Catalog, naming: &Naming) -> Result<Fit, CheckpointError> {
        let wrong = |what: String| CheckpointError::Map { map: self.family.clone(), what };
        // Where no name is known on any side.
        let Ok(from) = self.side_of(catalog, naming) else {
            let first = catalog.tensors.keys().next().cloned().unwrap_or_default();
            return Ok(if catalog.tensors.is_empty() { Fit::AsTheyAre } else { Fit::Neither(first) });
        };
        let to = self.sides.get_key_value(&naming.to).map(|(side, _)| side.as_str());
        let to = to.ok_or_else(|| wrong(format!("it has no side `{}`", naming.to)))?;
        let is_ignored = self.ignored(catalog, &from, naming);
        let finders = (Finder::new(self, &from), Finder::new(self, to));
        let (mut as_written, mut otherwise, mut unknown) = (false, false, None);
        for name in catalog.tensors.keys().filter(|name| !is_ignored(name)) {
            match finders.1.parameter(name) {
                Some((rule, term, holes)) => {
                    let written = self.written(to, &self.rules[rule], term, &holes) == *name;
                    as_written |= written;
                    otherwise |= !written;
                }
                None if finders.0.find(name).is_some() => otherwise = true,
                None => drop(unknown.get_or_insert(name)),
            }
        }
        Ok(match unknown {
            None if otherwise => Fit::Renamed,
            Some(name) if otherwise || !as_written => Fit::Neither(name.clone()),
            _ => Fit::AsTheyAre,
        })
    }

    /// A parameter's name as a side writes it.
    fn written(&self, side: &str, rule: &Rule, term: usize, holes: &super::notation::Holes) -> String {
        let bare = rule.bare.iter().any(|b| b == side);
        let prefix = if bare { "" } else { &self.sides[side].prefixes[0] };
        format!("{prefix}{}", rule.terms[side][term].name.fill(holes))
    }
}
