//! A training config: from TOML to a [`Config`], with every key checked, and from there to a job.
//!
//! ```text
//! text, --set   document    which keys are given, each a value that its key can be      error: file:line, key, reason, nearest
//!               Config      all of it, with defaults
//!               resolve     a model, cut into stages on meshes, on a cluster: a Job
//! ```
//!
//! Pure: no file is opened here. A config printed by [`Config::to_toml`] reads back as the same one; ranks get theirs that way.

mod cut;
mod document;
mod error;
pub mod keys;
#[cfg(test)]
mod page;
mod policy;
mod preset;
mod resolve;
mod typed;
mod value;

pub use cut::{Balance, cut};
pub use error::{ConfigError, Origin, nearest};
pub use resolve::{AnyModel, Resolved, resolve};
pub use typed::{
    DataKind, DataSection, Device, Evaluate, Log, ModelKind, NonFinite, OptimizerSection, Pipeline,
    Precision, Saving, StageSection, Train,
};
pub use value::{parse_mesh, toml_text};

use std::fmt::Write as _;

use document::{Document, Entry, Given, error};
use keys::{Key, SECTIONS, keys_of};
use value::Value;

/// A config with every key checked. See the module.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// What the run is called: the file's name without its ending.
    pub name: String,
    pub model: ModelKind,
    pub data: DataSection,
    pub train: Train,
    pub optimizer: OptimizerSection,
    pub pipeline: Pipeline,
    /// One for every device, in order.
    pub stages: Vec<StageSection>,
    pub policies: Vec<policy::PolicySection>,
    pub cluster: typed::ClusterSection,
    pub evaluate: Evaluate,
    pub saving: Saving,
    pub log: Log,
    values: Values,
}

impl Config {
    /// Reads a file's text, puts assignments (`train.steps=10`) over it, and fills in the rest. `file` is what errors call it.
    pub fn read(file: &str, text: &str, sets: &[String]) -> Result<Self, ConfigError> {
        let mut document = Document::parse(file, text)?;
        for set in sets {
            document.set(set)?;
        }
        let name = file.rsplit('/').next().unwrap_or(file);
        let name = name.strip_suffix(".toml").unwrap_or(name);
        Self::of_values(name, Values { document, file: file.into() })
    }

    fn of_values(name: &str, values: Values) -> Result<Self, ConfigError> {
        values.check_kinds()?;
        Ok(Self {
            name: name.into(),
            model: ModelKind::of(&values)?,
            data: DataSection::of(&values)?,
            train: Train::of(&values)?,
            optimizer: OptimizerSection::of(&values)?,
            pipeline: Pipeline::of(&values),
            stages: typed::stages(&values)?,
            policies: policy::PolicySection::all(&values)?,
            cluster: typed::ClusterSection::of(&values)?,
            evaluate: Evaluate::of(&values),
            saving: Saving::of(&values, name),
            log: Log::of(&values, name),
            values,
        })
    }

    /// The whole config as TOML, defaults too. What follows from other keys is left out, or given as what it was found to be.
    pub fn to_toml(&self, found: &[(&str, String)]) -> String {
        let mut text = String::new();
        for section in SECTIONS {
            let tables = match section.many {
                false => vec![self.values.document.table(section.name)],
                true => match self.values.document.tables(section.name) {
                    // There is a stage where none is given.
                    [] if section.name == "stage" => vec![None],
                    tables => tables.iter().map(Some).collect(),
                },
            };
            for table in tables {
                let head = if section.many { "[[" } else { "[" };
                let tail = if section.many { "]]" } else { "]" };
                let _ =
                    writeln!(text, "{}{head}{}{tail}", if text.is_empty() { "" } else { "\n" }, section.name);
                for key in keys_of(section.name).filter(|key| self.values.applies(key)) {
                    let found =
                        found.iter().find(|(path, _)| *path == key.path()).map(|(_, value)| value.clone());
                    let given = self.values.entry_in(table, key).map(|entry| entry.value.to_string());
                    if let Some(value) = given.or(found) {
                        let _ = writeln!(text, "{} = {value}", key.name);
                    }
                }
            }
        }
        text
    }

    /// Every key of the sections that there is one of, with its value as it is written: given, or by default.
    pub fn written(&self) -> Vec<(String, String)> {
        let keys = keys::KEYS.iter().filter(|key| !keys::is_many(key.section) && self.values.applies(key));
        let entry = |key: &Key| Some((key.path(), self.values.entry(&key.path())?.value.to_string()));
        keys.filter_map(entry).collect()
    }

    /// What a rank is thought to compute in a second.
    pub fn operations_per_s(&self) -> f64 {
        let half = if self.train.precision == Precision::F64 { 0.5 } else { 1.0 };
        self.cluster.flops * self.train.threads as f64 * half
    }

    /// Why a GPU cannot do what the config asks for, if it cannot.
    pub fn check_gpu(&self) -> Result<(), ConfigError> {
        typed::check_gpu(&self.values)
    }

    /// An error about a key, wherever that was given.
    pub fn error(&self, path: &str, reason: impl Into<String>, hint: impl Into<String>) -> ConfigError {
        self.values.error(path, reason, hint)
    }

    /// An error about a key of one of the stages, by its place in the file.
    fn stage_error(&self, table: usize, name: &str, reason: String, hint: &str) -> ConfigError {
        self.values.error_in("stage", table, name, reason, hint)
    }
}

/// What every key is: given, or by default.
#[derive(Debug, Clone, PartialEq)]
struct Values {
    document: Document,
    file: String,
}

impl Values {
    /// A key of a section that there is one of, if it is given or has a default.
    fn entry(&self, path: &str) -> Option<Entry> {
        let key = key(path);
        self.entry_in(self.document.table(key.section), key)
    }

    fn entry_in(&self, table: Option<&Given>, key: &Key) -> Option<Entry> {
        if let Some(entry) = table.and_then(|given| given.entries.get(key.name)) {
            return Some(entry.clone());
        }
        let default = self.of_preset(key).or((!key.default.is_empty()).then(|| key.default.to_string()));
        let value = |text: String| key.kind.read_set(&text).expect("a test reads every default");
        default.map(|text| Entry { value: value(text), origin: Origin::Default })
    }

    /// What a key of the model is without, where a preset is named.
    fn of_preset(&self, key: &Key) -> Option<String> {
        let given = self.document.table("model").filter(|_| key.section == "model")?;
        let Value::Text(name) = &given.entries.get("preset")?.value else { return None };
        preset::default(name, key.name)
    }

    /// The `kind` of a key's section.
    fn kind_of(&self, section: &str) -> Option<String> {
        let path = format!("{section}.kind");
        keys_of(section).find(|key| key.name == "kind")?;
        match self.entry(&path).map(|entry| entry.value) {
            Some(Value::Text(kind)) => Some(kind),
            // What data there is by default depends on the model.
            _ => Some(
                if self.kind_of("model").as_deref() == Some("u-transformer") { "images" } else { "language" }
                    .into(),
            ),
        }
    }

    /// Whether the section is of a kind that has the key.
    fn applies(&self, key: &Key) -> bool {
        let kind = || self.kind_of(key.section).unwrap_or_default();
        key.only.is_empty() || key.only.contains(&kind().as_str())
    }

    /// Refuses keys of another kind than the section's.
    fn check_kinds(&self) -> Result<(), ConfigError> {
        if let (Some(of_preset), Some(kind)) = (self.of_preset(key("model.kind")), self.kind_of("model"))
            && of_preset != toml_text(&kind)
        {
            let reason = format!("the preset \"{}\" is of kind {of_preset}", self.text("model.preset"));
            return Err(self.error("model.kind", reason, "leave one of them out"));
        }
        for key in keys::KEYS.iter().filter(|key| !self.applies(key)) {
            let given = self.document.table(key.section).and_then(|given| given.entries.get(key.name));
            if let Some(entry) = given {
                let kind = self.kind_of(key.section).unwrap_or_default();
                let reason = format!("{} of kind \"{kind}\" has no such key", key.section);
                let hint = format!("it is for the kind {}", key.only.join(" and "));
                return Err(error(&entry.origin, &key.path(), reason, hint));
            }
        }
        Ok(())
    }

    fn error(&self, path: &str, reason: impl Into<String>, hint: impl Into<String>) -> ConfigError {
        let origin = self.entry(path).map_or(Origin::Default, |entry| entry.origin);
        let origin = match origin {
            // Whoever has to write the key has to know where.
            Origin::Default => Origin::Line { file: self.file.clone(), line: self.line_of_section(path) },
            given => given,
        };
        error(&origin, path, reason, hint)
    }

    /// About a key of one of several tables.
    fn error_in(
        &self,
        section: &str,
        table: usize,
        name: &str,
        reason: impl Into<String>,
        hint: impl Into<String>,
    ) -> ConfigError {
        let given = self.document.tables(section).get(table);
        let entry = given.and_then(|given| given.entries.get(name));
        let origin = entry.map(|e| &e.origin).or(given.map(|g| &g.origin)).unwrap_or(&Origin::Default);
        error(origin, &format!("{section}.{table}.{name}"), reason, hint)
    }

    fn line_of_section(&self, path: &str) -> usize {
        let section = path.split('.').next().unwrap_or_default();
        match self.document.table(section).map(|given| &given.origin) {
            Some(Origin::Line { line, .. }) => *line,
            _ => 1,
        }
    }

    fn count(&self, path: &str) -> usize {
        self.maybe_count(path).unwrap_or_else(|| panic!("{path} has no default"))
    }

    fn maybe_count(&self, path: &str) -> Option<usize> {
        match self.entry(path)?.value {
            Value::Count(n) => Some(n as usize),
            other => panic!("{path} is {other}, no count"),
        }
    }

    fn number(&self, path: &str) -> f64 {
        self.maybe_number(path).unwrap_or_else(|| panic!("{path} has no default"))
    }

    fn maybe_number(&self, path: &str) -> Option<f64> {
        match self.entry(path)?.value {
            Value::Number(n) => Some(n),
            other => panic!("{path} is {other}, no number"),
        }
    }

    fn flag(&self, path: &str) -> bool {
        matches!(self.entry(path).map(|e| e.value), Some(Value::Flag(true)))
    }

    fn maybe_flag(&self, path: &str) -> Option<bool> {
        self.entry(path).map(|entry| entry.value == Value::Flag(true))
    }

    fn text(&self, path: &str) -> String {
        self.maybe_text(path).unwrap_or_else(|| panic!("{path} has no default"))
    }

    fn maybe_text(&self, path: &str) -> Option<String> {
        match self.entry(path)?.value {
            Value::Text(text) => Some(text),
            other => panic!("{path} is {other}, no text"),
        }
    }
}

fn key(path: &str) -> &'static Key {
    let found = keys::KEYS
        .iter()
        .find(|key| path.strip_prefix(key.section).and_then(|rest| rest.strip_prefix('.')) == Some(key.name));
    found.unwrap_or_else(|| panic!("no key {path}"))
}

#[cfg(test)]
mod tests;
