//! From text to values: every key that the file or `--set` gives, checked against the list of keys.

use std::collections::BTreeMap;

use toml::de::{DeTable, DeValue};

use super::error::{ConfigError, Origin, nearest};
use super::keys::{KEYS, Key, SECTIONS, Section, keys_of, section};
use super::value::Value;

/// A value, and where it came from.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    pub value: Value,
    pub origin: Origin,
}

/// One table: its keys that were given.
#[derive(Debug, Clone, PartialEq)]
pub struct Given {
    pub origin: Origin,
    pub entries: BTreeMap<&'static str, Entry>,
}

impl Given {
    fn new(origin: Origin) -> Self {
        Self { origin, entries: BTreeMap::new() }
    }
}

/// All that was given: the tables of every section, one or several.
#[derive(Debug, Clone, PartialEq)]
pub struct Document {
    tables: BTreeMap<&'static str, Vec<Given>>,
}

impl Document {
    /// Reads a file's text; `file` is what errors call it.
    pub fn parse(file: &str, text: &str) -> Result<Self, ConfigError> {
        let line_of = |at: usize| 1 + text.get(..at).map_or(0, |before| before.matches('\n').count());
        let origin = |at: usize| Origin::Line { file: file.into(), line: line_of(at) };
        let parsed = DeTable::parse(text).map_err(|error| ConfigError {
            origin: origin(error.span().map_or(0, |span| span.start)),
            key: String::new(),
            reason: format!("this is no TOML: {}", error.message()),
            hint: String::new(),
        })?;
        let mut document = Self { tables: BTreeMap::new() };
        for (name, value) in parsed.get_ref() {
            let at = origin(name.span().start);
            let section = known_section(name.get_ref(), &at)?;
            let tables: Vec<(Origin, &DeTable<'_>)> = match value.get_ref() {
                DeValue::Table(table) if !section.many => vec![(at, table)],
                DeValue::Array(items) if section.many => {
                    let tables = items.iter().map(|item| match item.get_ref() {
                        DeValue::Table(table) => Ok((origin(item.span().start), table)),
                        _ => Err(not_a_table(section, origin(item.span().start))),
                    });
                    tables.collect::<Result<_, _>>()?
                }
                _ => return Err(not_a_table(section, at)),
            };
            for (at, table) in tables {
                let mut given = Given::new(at);
                for (name, value) in table {
                    let at = origin(name.span().start);
                    let key = known_key(section, name.get_ref(), &at)?;
                    let read = key.kind.read(value.get_ref());
                    let value = read.map_err(|bad| error(&at, &key.path(), bad.reason, bad.hint))?;
                    given.entries.insert(key.name, Entry { value, origin: at });
                }
                document.tables.entry(section.name).or_default().push(given);
            }
        }
        Ok(document)
    }

    /// Puts `section.key=value` (or `stage.0.key=value`) over what the file says.
    pub fn set(&mut self, assignment: &str) -> Result<(), ConfigError> {
        let origin = Origin::Set(assignment.into());
        let hint = "write section.key=value, such as train.steps=10 or stage.0.mesh=\"dp 2\"";
        let Some((path, text)) = assignment.split_once('=') else {
            return Err(error(&origin, "", "there is no `=`", hint));
        };
        let words: Vec<&str> = path.trim().split('.').collect();
        let (table, index, name) = match words[..] {
            [table, name] => (table, None, name),
            [table, index, name] => (table, Some(index), name),
            _ => return Err(error(&origin, path.trim(), "this names no key", hint)),
        };
        let section = known_section(table, &origin)?;
        let key = known_key(section, name, &origin)?;
        let read = key.kind.read_set(text.trim());
        let value = read.map_err(|bad| error(&origin, &key.path(), bad.reason, bad.hint))?;
        for given in self.meant(section, index, &origin)? {
            given.entries.insert(key.name, Entry { value: value.clone(), origin: origin.clone() });
        }
        Ok(())
    }

    /// The tables that an assignment is for: of several, the one with the number, or all of them.
    fn meant(
        &mut self,
        section: &'static Section,
        index: Option<&str>,
        origin: &Origin,
    ) -> Result<&mut [Given], ConfigError> {
        let tables = self.tables.entry(section.name).or_default();
        if tables.is_empty() {
            tables.push(Given::new(origin.clone()));
        }
        let Some(index) = index else { return Ok(tables) };
        let len = tables.len();
        let place = index.parse::<usize>().ok().filter(|i| section.many && *i < len);
        let reason = match section.many {
            true => format!("there is no {} {index}: they go from 0 to {}", section.name, len - 1),
            false => format!("there is one [{}] only, and it has no number", section.name),
        };
        let at = place.ok_or_else(|| error(origin, &format!("{}.{index}", section.name), reason, ""))?;
        Ok(&mut tables[at..=at])
    }

    /// The tables of a section that were given.
    pub fn tables(&self, section: &str) -> &[Given] {
        self.tables.get(section).map_or(&[], |tables| tables)
    }

    /// The only table of a section.
    pub fn table(&self, section: &str) -> Option<&Given> {
        self.tables(section).first()
    }
}

pub fn error(origin: &Origin, key: &str, reason: impl Into<String>, hint: impl Into<String>) -> ConfigError {
    let (reason, hint) = (reason.into(), hint.into());
    let hint = match hint.is_empty() && !reason.contains("\nhint: ") {
        true => meaning(key),
        false => hint,
    };
    ConfigError { origin: origin.clone(), key: key.into(), reason, hint }
}

/// What a key is for, and what it is without: the hint where nobody has a better one.
fn meaning(path: &str) -> String {
    let words: Vec<&str> = path.split('.').collect();
    let key = match words[..] {
        [section, name] | [section, _, name] => keys_of(section).find(|key| key.name == name),
        _ => None,
    };
    match key {
        Some(Key { about, default: "", .. }) => about.to_string(),
        Some(Key { about, default, .. }) => format!("{about} Without it: {default}."),
        None => String::new(),
    }
}

fn not_a_table(section: &Section, origin: Origin) -> ConfigError {
    let written = if section.many { format!("[[{}]]", section.name) } else { format!("[{}]", section.name) };
    error(
        &origin,
        section.name,
        "this is a section, not a value",
        format!("write {written} on a line of its own"),
    )
}

fn known_section(name: &str, origin: &Origin) -> Result<&'static Section, ConfigError> {
    if let Some(section) = section(name) {
        return Ok(section);
    }
    let names: Vec<&str> = SECTIONS.iter().map(|s| s.name).collect();
    // A key may have been written where its section belongs.
    let elsewhere =
        KEYS.iter().find(|key| key.name == name).map(|key| format!("[{}] has a key `{name}`; ", key.section));
    let meant = nearest(name, names.iter().copied()).map(|near| format!("did you mean `{near}`? "));
    let hint = format!("{}sections are {}", meant.or(elsewhere).unwrap_or_default(), names.join(", "));
    Err(error(origin, name, "there is no such section", hint))
}

fn known_key(section: &'static Section, name: &str, origin: &Origin) -> Result<&'static Key, ConfigError> {
    if let Some(key) = keys_of(section.name).find(|key| key.name == name) {
        return Ok(key);
    }
    let names: Vec<&str> = keys_of(section.name).map(|key| key.name).collect();
    let meant = nearest(name, names.iter().copied()).map(|near| format!("did you mean `{near}`? "));
    let elsewhere =
        KEYS.iter().find(|key| key.name == name).map(|key| format!("there is `{}`; ", key.path()));
    let hint =
        format!("{}[{}] has {}", meant.or(elsewhere).unwrap_or_default(), section.name, names.join(", "));
    Err(error(origin, &format!("{}.{name}", section.name), "there is no such key", hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        Document::parse("a.toml", text).unwrap_err().to_string()
    }

    #[test]
    fn a_mistyped_key_is_told_the_nearest() {
        let first_line = |text: &str| refused(text).lines().next().unwrap().to_string();
        assert_eq!(first_line("[train]\nstps = 3"), "a.toml:2: train.stps: there is no such key");
        assert!(
            refused("[train]\nstps = 3").contains("\nhint: did you mean `steps`? [train] has steps, batch,")
        );
        assert!(refused("[trian]\nsteps = 3").contains("did you mean `train`?"));
        assert!(refused("steps = 3").contains("[train] has a key `steps`"));
        assert!(refused("[train]\nlearning_rate = 3").contains("there is `optimizer.learning_rate`"));
        assert!(
            refused("\n\n[train]\nsteps = \"many\"")
                .starts_with("a.toml:4: train.steps: \"many\" is not a whole number")
        );
        assert!(refused("[train]\nsteps = -3").contains("-3 is not a whole number, 1 or more"));
        assert!(refused("[pipeline]\nschedule = \"1f2b\"").contains("did you mean \"1f1b\"?"));
        assert!(
            refused("[train]\ndtype = \"f16\"").contains("\"f16\" is none of \"f32\", \"f64\", \"bf16\"")
        );
        assert!(refused("[stage]\nmesh = \"dp 2\"").contains("write [[stage]] on a line of its own"));
        assert!(refused("train = 3").contains("a.toml:1: train: this is a section"));
        assert!(refused("a = [").starts_with("a.toml:1: this is no TOML:"));
        assert!(
            refused("[train]\nsteps = 1\nsteps = 2").contains("a.toml:3"),
            "{}",
            refused("[train]\nsteps = 1\nsteps = 2")
        );
    }

    #[test]
    fn a_wrong_value_is_told_what_its_key_is_for() {
        for key in KEYS {
            // A date is no value of any key.
            let many = section(key.section).unwrap().many;
            let header = if many { format!("[[{}]]", key.section) } else { format!("[{}]", key.section) };
            let error = refused(&format!("{header}\n{} = 1979-05-27", key.name));
            assert!(error.contains(&key.path()) && error.contains("\nhint: "), "{error}");
        }
        assert!(refused("[train]\nsteps = 0").ends_with(
            "\nhint: Steps of the whole run; a resumed one goes on to the same number. Without it: 100."
        ));
    }

    #[test]
    fn set_goes_over_the_file_and_has_the_same_errors() {
        let text = "[train]\nsteps = 3\n[[stage]]\nmesh = \"dp 2\"\n[[stage]]\nmesh = \"dp 2\"";
        let mut document = Document::parse("a.toml", text).unwrap();
        document.set("train.steps=7").unwrap();
        document.set("stage.1.mesh=dp 2, tp 2").unwrap();
        document.set("pipeline.schedule = eager-1f1b").unwrap();
        assert_eq!(document.table("train").unwrap().entries["steps"].value, Value::Count(7));
        assert_eq!(document.tables("stage")[0].entries["mesh"].value, Value::Text("dp 2".into()));
        assert_eq!(document.tables("stage")[1].entries["mesh"].value, Value::Text("dp 2, tp 2".into()));
        let mut refused = |set: &str| document.set(set).unwrap_err().to_string();
        assert!(refused("train.stps=7").starts_with(
            "--set train.stps=7: train.stps: there is no such key\nhint: did you mean `steps`?"
        ));
        assert!(refused("train.steps=x").contains("`x` is not a whole number"));
        assert!(refused("stage.2.mesh=dp 2").contains("there is no stage 2: they go from 0 to 1"));
        assert!(refused("train.0.steps=2").contains("there is one [train] only"));
        assert!(refused("train").contains("there is no `=`"));
        assert!(refused("a.b.c.d=1").contains("this names no key"));
    }
}
