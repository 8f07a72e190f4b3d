//! What a key may be: kinds of values, read from TOML or from `--set`, and written as TOML again.

use std::fmt;

use crossmesh_core::mesh::Mesh;
use crossmesh_core::schedule::Name;
use crossmesh_core::units::{parse_bytes, parse_rate, parse_seconds};
use toml::de::DeValue;

use crate::stage_rank::DATA_AXES;

use super::error::nearest;

/// What a key wants.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// A whole number from `least` on.
    Count {
        least: u64,
    },
    /// A whole number up to this.
    Level(u64),
    /// A number between two, both allowed.
    Number {
        least: f64,
        most: f64,
    },
    Flag,
    Choice(&'static [&'static str]),
    Text,
    /// A name, or a list of them.
    Texts,
    /// A whole number, or a list of them.
    Counts {
        least: u64,
    },
    Flags,
    /// `1MiB`, or a number of bytes.
    Bytes,
    /// `10Gbit`, `100GB/s`.
    Rate,
    /// `10us`.
    Time,
    /// `dp 2, tp 4`.
    Mesh,
    Schedule,
}

/// A value that its key can be.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Count(u64),
    Number(f64),
    Flag(bool),
    Text(String),
    Texts(Vec<String>),
    Counts(Vec<u64>),
    Flags(Vec<bool>),
}

/// Why a value is none for its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadValue {
    pub reason: String,
    pub hint: String,
}

impl BadValue {
    fn new(reason: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { reason: reason.into(), hint: hint.into() }
    }
}

impl Kind {
    /// What to write, in words.
    pub fn wanted(self) -> String {
        match self {
            Kind::Count { least } => format!("a whole number, {least} or more"),
            Kind::Level(most) => format!("a whole number from 0 to {most}"),
            Kind::Number { least, most: f64::INFINITY } => format!("a number, {least} or more"),
            Kind::Number { least, most } => format!("a number from {least} to {most}"),
            Kind::Flag => "true or false".into(),
            Kind::Choice(names) => quoted(names),
            Kind::Text => "text in quotes".into(),
            Kind::Texts => "text in quotes, or a list of them".into(),
            Kind::Counts { least } => format!("a whole number, {least} or more, or a list of them"),
            Kind::Flags => "a list of true and false".into(),
            Kind::Bytes => "bytes, such as \"1MiB\"".into(),
            Kind::Rate => "a rate, such as \"10Gbit\"".into(),
            Kind::Time => "a time, such as \"10us\"".into(),
            Kind::Mesh => "a mesh, such as \"dp 2, tp 4\"".into(),
            Kind::Schedule => "the name of a schedule".into(),
        }
    }

    /// Whether `--set` may leave out the quotes.
    fn is_text(self) -> bool {
        use Kind::*;
        matches!(self, Choice(_) | Text | Texts | Bytes | Rate | Time | Mesh | Schedule)
    }

    /// A value of a file.
    pub fn read(self, value: &DeValue<'_>) -> Result<Value, BadValue> {
        let wrong = || BadValue::new(format!("{} is not {}", shown(value), self.wanted()), "");
        match (self, value) {
            (Kind::Flag, DeValue::Boolean(flag)) => Ok(Value::Flag(*flag)),
            (Kind::Count { least }, _) => count(value, least).map(Value::Count).ok_or_else(wrong),
            (Kind::Level(most), _) => {
                count(value, 0).filter(|n| *n <= most).map(Value::Count).ok_or_else(wrong)
            }
            (Kind::Number { least, most }, _) => {
                let inside = |n: &f64| (least..=most).contains(n) && n.is_finite();
                number(value).filter(inside).map(Value::Number).ok_or_else(wrong)
            }
            (Kind::Counts { least }, DeValue::Array(items)) => {
                let counts =
                    items.iter().map(|item| count(item.get_ref(), least)).collect::<Option<Vec<u64>>>();
                counts.filter(|counts| !counts.is_empty()).map(Value::Counts).ok_or_else(wrong)
            }
            (Kind::Counts { least }, _) => {
                count(value, least).map(|n| Value::Counts(vec![n])).ok_or_else(wrong)
            }
            (Kind::Flags, DeValue::Array(items)) => {
                let flags = items.iter().map(|item| item.get_ref().as_bool()).collect::<Option<Vec<bool>>>();
                flags.map(Value::Flags).ok_or_else(wrong)
            }
            (Kind::Texts, DeValue::Array(items)) => {
                let texts = items.iter().map(|i| i.get_ref().as_str().map(String::from));
                let texts = texts.collect::<Option<Vec<String>>>().filter(|texts| !texts.is_empty());
                texts.map(Value::Texts).ok_or_else(wrong)
            }
            (Kind::Bytes, DeValue::Integer(_)) => {
                count(value, 1).map(|n| Value::Text(format!("{n}B"))).ok_or_else(wrong)
            }
            (_, DeValue::String(text)) if self.is_text() => self.read_text(text),
            _ => Err(wrong()),
        }
    }

    /// A value of `--set`, where text needs no quotes.
    pub fn read_set(self, text: &str) -> Result<Value, BadValue> {
        let line = format!("value = {text}");
        let parsed = toml::de::DeTable::parse(&line).ok();
        let value = parsed.as_ref().and_then(|table| table.get_ref().get("value"));
        let quoted = value.is_some_and(|v| v.get_ref().is_str() || v.get_ref().is_array());
        match value {
            Some(value) if quoted || !self.is_text() => self.read(value.get_ref()),
            _ if self.is_text() => self.read_text(text),
            _ => Err(BadValue::new(format!("`{text}` is not {}", self.wanted()), "")),
        }
    }

    fn read_text(self, text: &str) -> Result<Value, BadValue> {
        let checked = match self {
            Kind::Choice(names) => return choose(text, names).map(|name| Value::Text(name.into())),
            Kind::Schedule => return schedule(text),
            Kind::Mesh => parse_mesh("S", text).map(drop),
            Kind::Bytes => parse_bytes(text).map(drop).map_err(|e| split_hint(&e.to_string())),
            Kind::Rate => parse_rate(text).map(drop).map_err(|e| split_hint(&e.to_string())),
            Kind::Time => parse_seconds(text).map(drop).map_err(|e| split_hint(&e.to_string())),
            Kind::Texts => return Ok(Value::Texts(vec![text.into()])),
            _ => Ok(()),
        };
        checked.map(|()| Value::Text(text.into()))
    }
}

/// A message with a hint in its second line, as the project's errors have it.
pub fn split_hint(message: &str) -> BadValue {
    let (reason, hint) = message.split_once("\nhint: ").unwrap_or((message, ""));
    BadValue::new(reason, hint)
}

fn choose(text: &str, names: &'static [&'static str]) -> Result<&'static str, BadValue> {
    if let Some(name) = names.iter().find(|name| **name == text) {
        return Ok(name);
    }
    let hint =
        nearest(text, names.iter().copied()).map_or(String::new(), |n| format!("did you mean \"{n}\"?"));
    Err(BadValue::new(format!("\"{text}\" is none of {}", quoted(names)), hint))
}

fn schedule(text: &str) -> Result<Value, BadValue> {
    let names: Vec<&str> = Name::ALL.map(Name::name).to_vec();
    match text.parse::<Name>() {
        Ok(name) => Ok(Value::Text(name.name().into())),
        Err(_) => {
            let meant = nearest(text, names.iter().copied());
            let meant = meant.map_or(String::new(), |n| format!("did you mean \"{n}\"? "));
            let hint = format!("{meant}schedules are {}", names.join(", "));
            Err(BadValue::new(format!("there is no schedule \"{text}\""), hint))
        }
    }
}

/// A mesh as people write it: `dp 2, tp 4`, `dp:2,tp:4`, `{dp:2,tp:4}`, `1`.
pub fn parse_mesh(name: &str, text: &str) -> Result<Mesh, BadValue> {
    let hint = "write \"dp 2, tp 4\": dp splits samples, tp splits weights; \"1\" is a single rank";
    let bad = |reason: String| BadValue::new(reason, hint);
    let inner = text.trim().trim_start_matches('{').trim_end_matches('}').trim();
    let axes = if inner == "1" { "dp 1" } else { inner };
    let mut notation = vec![];
    for axis in axes.split(',') {
        let axis = axis.trim();
        let letters = axis.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(axis.len());
        let (which, len) = axis.split_at(letters);
        let len = len.trim_start_matches([' ', ':', '=']).trim();
        if which != "tp" && !DATA_AXES.contains(&which) {
            return Err(bad(format!(
                "\"{text}\" has an axis `{which}`, and a stage's mesh has `dp` (or `dpo` and `dpi`) and `tp`"
            )));
        }
        match len.parse::<u32>() {
            Ok(len) if len > 0 => notation.push(format!("{which}:{len}")),
            _ => return Err(bad(format!("\"{text}\" does not say how long `{which}` is"))),
        }
    }
    let mesh: Result<Mesh, _> = format!("{name}{{{}}}", notation.join(",")).parse();
    mesh.map_err(|error| bad(error.to_string().lines().next().unwrap_or_default().to_string()))
}

fn count(value: &DeValue<'_>, least: u64) -> Option<u64> {
    let DeValue::Integer(number) = value else { return None };
    let plain = number.as_str().trim_start_matches('+');
    u64::from_str_radix(plain, number.radix()).ok().filter(|n| *n >= least && i64::try_from(*n).is_ok())
}

fn number(value: &DeValue<'_>) -> Option<f64> {
    match value {
        DeValue::Float(number) => number.as_str().parse().ok(),
        DeValue::Integer(number) if number.radix() == 10 => number.as_str().parse().ok(),
        _ => None,
    }
}

/// A value as an error quotes it.
fn shown(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) => format!("\"{text}\""),
        DeValue::Integer(number) => number.to_string(),
        DeValue::Float(number) => number.to_string(),
        DeValue::Boolean(flag) => flag.to_string(),
        DeValue::Datetime(_) => "a date".into(),
        DeValue::Array(items) => {
            let items: Vec<String> = items.iter().map(|item| shown(item.get_ref())).collect();
            format!("[{}]", items.join(", "))
        }
        DeValue::Table(_) => "a table".into(),
    }
}

fn quoted(names: &[&str]) -> String {
    names.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |items: Vec<String>| format!("[{}]", items.join(", "));
        match self {
            Value::Count(n) => write!(f, "{n}"),
            // Both read back as the same number; TOML wants a point or an exponent.
            Value::Number(n) => {
                let (plain, short) = (format!("{n:?}"), format!("{n:e}"));
                f.write_str(if short.len() < plain.len() { &short } else { &plain })
            }
            Value::Flag(flag) => write!(f, "{flag}"),
            Value::Text(text) => f.write_str(&toml_text(text)),
            Value::Texts(texts) => match &texts[..] {
                [text] => f.write_str(&toml_text(text)),
                texts => f.write_str(&list(texts.iter().map(|t| toml_text(t)).collect())),
            },
            Value::Counts(counts) => match counts[..] {
                [n] => write!(f, "{n}"),
                _ => f.write_str(&list(counts.iter().map(u64::to_string).collect())),
            },
            Value::Flags(flags) => f.write_str(&list(flags.iter().map(bool::to_string).collect())),
        }
    }
}

/// Text as a basic string of TOML.
pub fn toml_text(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c.is_control() => out += &format!("\\u{:04X}", c as u32),
            c => out.push(c),
        }
    }
    out + "\""
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn set(kind: Kind, text: &str) -> Result<Value, String> {
        kind.read_set(text).map_err(|bad| bad.reason)
    }

    #[test]
    fn meshes_are_read_as_people_write_them() {
        for text in ["dp 2, tp 4", "dp:2,tp:4", "{dp:2,tp:4}", "dp2,tp4", "dp=2, tp=4"] {
            assert_eq!(parse_mesh("S0", text).unwrap().to_string(), "S0{dp:2,tp:4}", "{text}");
        }
        assert_eq!(parse_mesh("S", "tp 3").unwrap().to_string(), "S{tp:3}");
        assert_eq!(parse_mesh("S", "1").unwrap().len(), 1);
        let reason = |text| parse_mesh("S", text).unwrap_err().reason;
        assert_eq!(
            reason("pp 2"),
            "\"pp 2\" has an axis `pp`, and a stage's mesh has `dp` (or `dpo` and `dpi`) and `tp`"
        );
        assert_eq!(reason("dp"), "\"dp\" does not say how long `dp` is");
        assert_eq!(reason("dp 0"), "\"dp 0\" does not say how long `dp` is");
        assert!(reason("dp 2, dp 2").contains("dp"), "{}", reason("dp 2, dp 2"));
        assert!(parse_mesh("S", "").is_err() && parse_mesh("S", "dp 99999999999").is_err());
        assert!(parse_mesh("S", "dp 1000000, tp 1000000").is_err());
    }

    #[test]
    fn set_needs_no_quotes_around_text() {
        assert_eq!(set(Kind::Schedule, "1f1b"), Ok(Value::Text("1f1b".into())));
        assert_eq!(set(Kind::Schedule, "\"Eager-1F1B\""), Ok(Value::Text("eager-1f1b".into())));
        assert_eq!(set(Kind::Mesh, "dp 2, tp 2"), Ok(Value::Text("dp 2, tp 2".into())));
        assert_eq!(set(Kind::Text, "12"), Ok(Value::Text("12".into())));
        assert_eq!(set(Kind::Texts, "[\"a\", \"b\"]"), Ok(Value::Texts(vec!["a".into(), "b".into()])));
        assert_eq!(set(Kind::Counts { least: 1 }, "[1, 2]"), Ok(Value::Counts(vec![1, 2])));
        assert_eq!(
            set(Kind::Count { least: 1 }, "ten"),
            Err("`ten` is not a whole number, 1 or more".into())
        );
        assert_eq!(set(Kind::Count { least: 1 }, "0"), Err("0 is not a whole number, 1 or more".into()));
        assert_eq!(set(Kind::Number { least: 0.0, most: 1.0 }, "1"), Ok(Value::Number(1.0)));
        assert_eq!(
            set(Kind::Number { least: 0.0, most: 1.0 }, "2"),
            Err("2 is not a number from 0 to 1".into())
        );
        assert!(set(Kind::Number { least: 0.0, most: f64::INFINITY }, "nan").is_err());
        assert!(set(Kind::Rate, "10Gbit").is_ok() && set(Kind::Rate, "fast").is_err());
    }

    proptest! {
        #[test]
        fn text_survives_toml(text in ".*") {
            let written = Value::Text(text.clone()).to_string();
            let line = format!("value = {written}");
            let table = toml::de::DeTable::parse(&line).unwrap();
            let value = table.get_ref().get("value").unwrap();
            prop_assert_eq!(Kind::Text.read(value.get_ref()).unwrap(), Value::Text(text));
        }

        #[test]
        fn numbers_survive_toml(n in proptest::num::f64::POSITIVE) {
            prop_assume!(n.is_finite());
            let kind = Kind::Number { least: 0.0, most: f64::INFINITY };
            prop_assert_eq!(kind.read_set(&Value::Number(n).to_string()).unwrap(), Value::Number(n));
        }

        #[test]
        fn no_text_panics(text in ".*") {
            let kinds = [Kind::Mesh, Kind::Schedule, Kind::Bytes, Kind::Rate, Kind::Time, Kind::Texts, Kind::Flags,
                Kind::Counts { least: 0 }, Kind::Count { least: 0 }, Kind::Flag];
            for kind in kinds {
                let _ = kind.read_set(&text);
            }
        }
    }
}
