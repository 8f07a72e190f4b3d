//! What becomes of what units keep from F to B, by unit and op: it stays, or is computed again, or waits in a file.
//!
//! A unit has rules, of which the first that names an op decides about the op's results:
//!
//! ```text
//! rules of block 3        attention: recompute    norm, input: offload
//! kept by block 3         x  stats  normed  q  k  v  attended  ..
//!                         file     file    again   again       memory, as nobody says otherwise
//! ```

use std::sync::Arc;

/// One of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Action {
    Keep,
    Recompute,
    Offload,
}

impl Action {
    /// As a config has them.
    pub const NAMES: &[&str] = &["keep", "recompute", "offload"];

    pub fn named(name: &str) -> Option<Self> {
        let at = Self::NAMES.iter().position(|known| *known == name)?;
        Some([Self::Keep, Self::Recompute, Self::Offload][at])
    }
}

/// What a unit is given, by the name that rules have for it.
pub const INPUT: &str = "input";

/// What rules may name: what a unit is given, and the ops that there are.
pub const OPS: &[&str] = &[
    INPUT,
    "activate",
    "add per sample",
    "attention",
    "concat",
    "conv",
    "cross-entropy",
    "dropout",
    "embed",
    "gate",
    "linear",
    "norm",
    "positions",
    "reshard",
    "residual",
    "rotate",
    "squared error",
    "time waves",
    "upsample",
];

/// Of those, what is never computed again: what is given, what was sent, and losses.
pub const NEVER_AGAIN: &[&str] = &[INPUT, "cross-entropy", "reshard", "squared error"];

/// What to do about the results of some ops, or of all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// All of them where this is empty.
    pub ops: Vec<&'static str>,
    pub action: Action,
}

/// The rules of every unit of a model.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Policies(Option<Arc<[Vec<Rule>]>>);

impl Policies {
    /// By unit.
    pub fn new(units: Vec<Vec<Rule>>) -> Self {
        Self(Some(units.into()))
    }

    /// Those of a unit.
    pub fn of(&self, unit: usize) -> &[Rule] {
        self.0.as_ref().and_then(|units| units.get(unit)).map_or(&[], |rules| rules)
    }
}

/// What rules say about an op; nothing where none names it.
pub(super) fn action(rules: &[Rule], op: &str) -> Option<Action> {
    let names = |rule: &&Rule| rule.ops.is_empty() || rule.ops.contains(&op);
    rules.iter().find(names).map(|rule| rule.action)
}
