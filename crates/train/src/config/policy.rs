//! What becomes of what units keep, by unit and op: from `[[policy]]` to the rules of every unit.

use std::ops::Range;

use crate::graph::policy::{NEVER_AGAIN, OPS};
use crate::graph::{Action, Policies, Rule};
use crate::stage::Recompute;

use super::error::{ConfigError, nearest};
use super::keys::keys_of;
use super::resolve::AnyModel;
use super::value::Value;
use super::{Config, Values};

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicySection {
    pub action: Action,
    /// As they are written; all where this is empty.
    pub units: Vec<String>,
    pub ops: Vec<&'static str>,
    /// Which `[[policy]]` of the file says so.
    table: usize,
}

impl PolicySection {
    /// In the file's order.
    pub(super) fn all(values: &Values) -> Result<Vec<Self>, ConfigError> {
        (0..values.document.tables("policy").len()).map(|table| Self::of(values, table)).collect()
    }

    fn of(values: &Values, table: usize) -> Result<Self, ConfigError> {
        let entry = |name: &str| {
            let key = keys_of("policy").find(|key| key.name == name).expect("a key of a policy");
            values.entry_in(values.document.tables("policy").get(table), key).map(|entry| entry.value)
        };
        let texts = |name: &str| match entry(name) {
            Some(Value::Texts(texts)) => texts,
            _ => vec![],
        };
        let action = match entry("action") {
            Some(Value::Text(name)) => Action::named(&name),
            _ => None,
        };
        let Some(action) = action else {
            let hint = format!("write action = \"recompute\"; actions are {}", Action::NAMES.join(", "));
            return Err(values.error_in("policy", table, "action", "nothing is said to be done", hint));
        };
        let op = |name: &String| {
            known_op(name, action)
                .map_err(|(reason, hint)| values.error_in("policy", table, "ops", reason, hint))
        };
        let ops = texts("ops").iter().map(op).collect::<Result<_, _>>()?;
        Ok(Self { action, units: texts("units"), ops, table })
    }
}

/// An op that can be treated so, or why there is none and what there is.
fn known_op(name: &str, action: Action) -> Result<&'static str, (String, String)> {
    let known: Vec<&'static str> = match action {
        Action::Recompute => OPS.iter().copied().filter(|op| !NEVER_AGAIN.contains(op)).collect(),
        _ => OPS.to_vec(),
    };
    if let Some(op) = known.iter().find(|op| **op == name) {
        return Ok(op);
    }
    let meant =
        nearest(name, known.iter().copied()).map_or(String::new(), |n| format!("did you mean \"{n}\"? "));
    Err(match OPS.contains(&name) {
        true => {
            let reason =
                format!("\"{name}\" is never computed again: what was given or sent is not there twice");
            (reason, format!("ops that are: {}", known.join(", ")))
        }
        false => (format!("there is no op \"{name}\""), format!("{meant}ops are {}", known.join(", "))),
    })
}

/// The rules of every unit of a model.
pub(super) fn policies(config: &Config, model: &AnyModel) -> Result<Policies, ConfigError> {
    if config.policies.is_empty() {
        return Ok(Policies::default());
    }
    let refused = |reason: &str, hint: &str| Err(config.values.error_in("policy", 0, "action", reason, hint));
    if config.train.recompute == Recompute::Everything {
        let reason =
            "with `train.recompute = \"full\"` only a stage's inputs are kept, and nothing is left to say";
        return refused(
            reason,
            "leave one of them out: `[[policy]] action = \"recompute\"` drops all of a unit but what it is given",
        );
    }
    if config.train.activation_budget.is_some() {
        return refused(
            "what is computed again follows from `train.activation_budget`",
            "leave one of them out",
        );
    }
    let names = unit_names(model);
    let mut units: Vec<Vec<Rule>> = vec![vec![]; names.len()];
    for policy in &config.policies {
        let error = |name: &str, reason: String, hint: String| {
            config.values.error_in("policy", policy.table, name, reason, hint)
        };
        if policy.action == Action::Offload && config.train.offload.is_none() {
            let hint = "say which: train.offload = \"/tmp/run\"; a last policy of action = \"keep\" keeps the rest in memory";
            return Err(error("action", "there is no folder to offload to".into(), hint.into()));
        }
        let mut meant = vec![policy.units.is_empty(); names.len()];
        for text in &policy.units {
            let found = named(text, &names).map_err(|(reason, hint)| error("units", reason, hint))?;
            found.into_iter().for_each(|unit| meant[unit] = true);
        }
        for (rules, _) in units.iter_mut().zip(meant).filter(|(_, meant)| *meant) {
            rules.push(Rule { ops: policy.ops.clone(), action: policy.action });
        }
    }
    Ok(Policies::new(units))
}

/// What every unit is called; those that are called the same are numbered from 0.
fn unit_names(model: &AnyModel) -> Vec<&'static str> {
    match model {
        AnyModel::Gpt(gpt) => {
            let blocks = std::iter::repeat_n("block", gpt.config().layers);
            ["embed"].into_iter().chain(blocks).chain(["head"]).collect()
        }
        AnyModel::Unet(unet) => vec!["piece"; unet.len()],
    }
}

/// The units that `block`, `block 3` or `block 0-7` means.
fn named(text: &str, names: &[&'static str]) -> Result<Vec<usize>, (String, String)> {
    let (name, numbers) = text.trim().split_once(' ').unwrap_or((text.trim(), ""));
    let units: Vec<usize> = (0..names.len()).filter(|&unit| names[unit] == name).collect();
    let mut known = names.to_vec();
    known.dedup();
    if units.is_empty() {
        let meant =
            nearest(name, known.iter().copied()).map_or(String::new(), |n| format!("did you mean \"{n}\"? "));
        let hint = format!("{meant}this model has {}", known.join(", "));
        return Err((format!("there is no unit \"{name}\""), hint));
    }
    let bad = || {
        let reason = format!("\"{text}\" names no {name} there is: they go from 0 to {}", units.len() - 1);
        (
            reason,
            format!("write \"{name}\" for all of them, \"{name} 0\", or \"{name} 0-{}\"", units.len() - 1),
        )
    };
    let Range { start, end } = match numbers.trim() {
        "" => 0..units.len(),
        numbers => range(numbers).filter(|r| r.start < r.end && r.end <= units.len()).ok_or_else(bad)?,
    };
    Ok(units[start..end].to_vec())
}

/// `3`, or `0-7` with both ends.
fn range(text: &str) -> Option<Range<usize>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let number = |text: &str| text.trim().parse::<usize>().ok();
    Some(number(first)?..number(last)?.checked_add(1)?)
}
