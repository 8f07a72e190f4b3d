//! A TOML table with the keys it may have: every look-up checks the type and the range, and errors carry the line.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::toml_file::ClusterError;
use crate::printable::one_line;
use crate::units::{UnitError, parse_bytes, parse_rate, parse_seconds, shown};

/// A table, the text it stands in, and the keys it may have.
pub(super) struct Table<'a> {
    text: &'a str,
    /// What to call it in errors.
    name: &'static str,
    pub(super) line: usize,
    entries: &'a DeTable<'a>,
}

/// A value and where it stands.
pub(super) struct Found<'a> {
    pub(super) key: &'static str,
    pub(super) line: usize,
    pub(super) value: &'a DeValue<'a>,
}

impl<'a> Table<'a> {
    /// Refuses keys that are not `known`.
    pub(super) fn new(
        text: &'a str,
        name: &'static str,
        at: Range<usize>,
        entries: &'a DeTable<'a>,
        known: &'static [&'static str],
    ) -> Result<Self, ClusterError> {
        for key in entries.keys() {
            if !known.contains(&key.get_ref().as_ref()) {
                let key_text = key.get_ref().as_ref();
                return Err(ClusterError::UnknownKey {
                    line: line_of(text, key.span().start),
                    table: name,
                    key: shown(key_text),
                    nearest: nearest(key_text, known),
                    known: known.join(", "),
                });
            }
        }
        Ok(Self { text, name, line: line_of(text, at.start), entries })
    }

    pub(super) fn get(&self, key: &'static str) -> Option<Found<'a>> {
        let value = self.entries.get(key)?;
        Some(Found { key, line: line_of(self.text, value.span().start), value: value.get_ref() })
    }

    /// The tables of `[[key]]`; none where there are none.
    pub(super) fn tables(
        &self,
        key: &'static str,
        name: &'static str,
        known: &'static [&'static str],
    ) -> Result<Vec<Table<'a>>, ClusterError> {
        let Some(found) = self.get(key) else { return Ok(vec![]) };
        let entries = found.value.as_array().ok_or_else(|| found.wrong_type(name))?;
        let mut tables = Vec::with_capacity(entries.len());
        for entry in entries {
            let entry: &Spanned<DeValue<'a>> = entry;
            let table = entry.get_ref().as_table().ok_or_else(|| found.wrong_type(name))?;
            tables.push(Table::new(self.text, name, entry.span(), table, known)?);
        }
        Ok(tables)
    }

    pub(super) fn rate(&self, key: &'static str) -> Result<Option<f64>, ClusterError> {
        self.get(key)
            .map(|found| found.quantity("a rate in quotes, such as \"400Gbit\"", parse_rate))
            .transpose()
    }

    pub(super) fn seconds(&self, key: &'static str) -> Result<Option<f64>, ClusterError> {
        self.get(key)
            .map(|found| found.quantity("a time in quotes, such as \"10us\"", parse_seconds))
            .transpose()
    }

    pub(super) fn bytes(&self, key: &'static str) -> Result<Option<u64>, ClusterError> {
        self.get(key)
            .map(|found| found.quantity("a size in quotes, such as \"80GiB\"", parse_bytes))
            .transpose()
    }

    /// Some words.
    pub(super) fn text(
        &self,
        key: &'static str,
        expected: &'static str,
    ) -> Result<Option<String>, ClusterError> {
        self.get(key).map(|found| found.text(expected).map(one_line)).transpose()
    }

    /// A whole number from 1 to `max`.
    pub(super) fn count(&self, key: &'static str, max: u32) -> Result<Option<u32>, ClusterError> {
        let Some(found) = self.get(key) else { return Ok(None) };
        let number = found.value.as_integer().ok_or_else(|| found.wrong_type("a whole number"))?;
        let value = u32::from_str_radix(number.as_str(), number.radix()).ok();
        match value.filter(|v| (1..=max).contains(v)) {
            Some(value) => Ok(Some(value)),
            None => Err(found.out_of_range(number.as_str(), format!("from 1 to {max}"))),
        }
    }

    /// A finite number above zero.
    pub(super) fn factor(&self, key: &'static str) -> Result<Option<f64>, ClusterError> {
        let Some(found) = self.get(key) else { return Ok(None) };
        let (text, value) = match found.value {
            DeValue::Float(number) => (number.as_str(), number.as_str().parse::<f64>().ok()),
            DeValue::Integer(number) => {
                let value = i64::from_str_radix(number.as_str(), number.radix()).ok();
                (number.as_str(), value.map(|v| v as f64))
            }
            _ => return Err(found.wrong_type("a number, such as 2.0")),
        };
        match value.filter(|v| v.is_finite() && *v > 0.0) {
            Some(value) => Ok(Some(value)),
            None => Err(found.out_of_range(text, "above zero and finite".into())),
        }
    }

    /// Which of two keys that exclude each other is there.
    pub(super) fn one_of(
        &self,
        key: &'static str,
        other: &'static str,
    ) -> Result<&'static str, ClusterError> {
        match (self.get(key), self.get(other)) {
            (Some(_), None) => Ok(key),
            (None, Some(_)) => Ok(other),
            (Some(found), Some(_)) => {
                Err(ClusterError::BothKeys { line: found.line, table: self.name, key, other })
            }
            (None, None) => {
                Err(ClusterError::NoKey { line: self.line, table: self.name, key, instead: Some(other) })
            }
        }
    }

    pub(super) fn missing(&self, key: &'static str) -> ClusterError {
        ClusterError::NoKey { line: self.line, table: self.name, key, instead: None }
    }

    pub(super) fn excludes(&self, key: &'static str, other: &'static str) -> Result<(), ClusterError> {
        match (self.get(key), self.get(other)) {
            (Some(_), Some(_)) => self.one_of(key, other).map(|_| ()),
            _ => Ok(()),
        }
    }
}

impl<'a> Found<'a> {
    fn quantity<T>(
        &self,
        expected: &'static str,
        parse: fn(&str) -> Result<T, UnitError>,
    ) -> Result<T, ClusterError> {
        let text = self.value.as_str().ok_or_else(|| self.wrong_type(expected))?;
        parse(text).map_err(|error| ClusterError::BadQuantity { line: self.line, key: self.key, error })
    }

    /// Some words; none are no words.
    pub(super) fn text(&self, expected: &'static str) -> Result<&'a str, ClusterError> {
        let text = self.value.as_str().filter(|text| !text.is_empty());
        text.ok_or_else(|| self.wrong_type(expected))
    }

    pub(super) fn wrong_type(&self, expected: &'static str) -> ClusterError {
        ClusterError::WrongType { line: self.line, key: self.key, expected, found: self.value.type_str() }
    }

    pub(super) fn out_of_range(&self, value: &str, range: String) -> ClusterError {
        ClusterError::OutOfRange { line: self.line, key: self.key, value: shown(value), range }
    }
}

fn line_of(text: &str, at: usize) -> usize {
    1 + text.as_bytes()[..at.min(text.len())].iter().filter(|&&b| b == b'\n').count()
}

/// The known key that fewest edits away, if it is near enough to be what was meant.
fn nearest(key: &str, known: &'static [&'static str]) -> Option<&'static str> {
    // Longer than any key of ours by this much, it is no misspelling.
    if key.len() > 40 {
        return None;
    }
    let scored = known.iter().map(|k| (edits(key, k), *k));
    scored.min().filter(|(edits, k)| *edits <= 1 + k.len() / 3).map(|(_, k)| k)
}

/// How many characters have to be put in, left out or changed (Levenshtein).
fn edits(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.chars().enumerate() {
            let replaced = diagonal + usize::from(ca != cb);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.chars().count()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_edits() {
        assert_eq!(edits("", "abc"), 3);
        assert_eq!(edits("device", "devices"), 1);
        assert_eq!(edits("kitten", "sitting"), 3);
        assert_eq!(nearest("nick", &["nic", "nics"]), Some("nic"));
        assert_eq!(nearest("colour", &["nic", "nics"]), None);
    }
}
