//! safetensors: eight bytes of length, a header in JSON, then the tensors one behind the other.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::catalog::checked_bytes;
use crate::element::Element;
use crate::error::CheckpointError;

/// The limit of the format's own crate.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    pub dtype: String,
    pub shape: Vec<u64>,
    /// From the end of the header.
    pub data_offsets: [u64; 2],
}

/// The header of a file.
#[derive(Debug, Clone, Default)]
pub struct Header {
    pub entries: BTreeMap<String, (Element, Entry)>,
    pub metadata: BTreeMap<String, String>,
    /// Where the tensors begin.
    pub start: u64,
}

impl Header {
    /// Reads and checks the header of a file: tensors as large as their shapes, one behind the other. That the file is as
    /// long as its header says is left to the reader: `Err` is for what cannot be understood.
    pub fn read(path: &Path) -> Result<(Self, u64), CheckpointError> {
        let damaged = |what: String| CheckpointError::damaged(path, what);
        let file = File::open(path).map_err(CheckpointError::io("open", path))?;
        let bytes = file.metadata().map_err(CheckpointError::io("read", path))?.len();
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0)
            .map_err(|_| damaged(format!("it is {bytes} bytes long, too short for a safetensors file")))?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER_BYTES || length.saturating_add(8) > bytes {
            return Err(damaged(format!(
                "its header would be {length} bytes long: it is no safetensors file, or was cut short"
            )));
        }
        let mut text = vec![0; length as usize];
        file.read_exact_at(&mut text, 8).map_err(CheckpointError::io("read", path))?;
        let header = Self::parse(&text).map_err(damaged)?;
        Ok((header, bytes))
    }

    pub fn parse(text: &[u8]) -> Result<Self, String> {
        let members: Members =
            serde_json::from_slice(text).map_err(|e| format!("its header is damaged: {e}"))?;
        let mut header = Self { metadata: members.metadata, start: text.len() as u64 + 8, ..Self::default() };
        for (name, entry) in members.entries {
            let Entry { dtype, shape, data_offsets: [start, end] } = &entry;
            let element = Element::of_safetensors(dtype)
                .ok_or_else(|| format!("`{name}` is of the type {dtype}, which is not known here"))?;
            if checked_bytes(shape, element).is_none_or(|bytes| end.checked_sub(*start) != Some(bytes)) {
                return Err(format!("`{name}`, {dtype} {shape:?}, cannot lie at {start}..{end}"));
            }
            header.entries.insert(name, (element, entry));
        }
        header.in_a_row()?;
        Ok(header)
    }

    /// The format leaves no bytes between tensors, and none to two.
    fn in_a_row(&self) -> Result<(), String> {
        let mut sorted: Vec<_> = self.entries.iter().collect();
        sorted.sort_by_key(|(_, (_, e))| e.data_offsets);
        let mut next = 0;
        for (name, (_, entry)) in sorted {
            let [start, end] = entry.data_offsets;
            if start != next {
                return Err(format!("`{name}` lies at {start}..{end}, where {next} comes next"));
            }
            next = end;
        }
        let fits = self.start.checked_add(next).is_some();
        if fits { Ok(()) } else { Err("its tensors end behind everything".into()) }
    }
}

/// The bytes before the tensors of a file with these, in the order in which they follow.
pub fn header_bytes(
    metadata: &BTreeMap<String, String>,
    tensors: impl Iterator<Item = (String, Element, Vec<u64>)>,
) -> Vec<u8> {
    let mut at = 0;
    let mut members = Vec::new();
    if !metadata.is_empty() {
        members.push(format!("\"__metadata__\":{}", json(metadata)));
    }
    for (name, element, shape) in tensors {
        let bytes = shape.iter().product::<u64>() * element.bytes();
        let dtype = element.safetensors().expect("a type that the target was checked for").to_string();
        let entry = Entry { dtype, shape, data_offsets: [at, at + bytes] };
        at += bytes;
        members.push(format!("{}:{}", json(&name), json(&entry)));
    }
    let mut text = format!("{{{}}}", members.join(","));
    // Numbers begin at a multiple of their width.
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("strings and numbers are JSON")
}

/// The JSON object of a header, in which no name is there twice.
struct Members {
    metadata: BTreeMap<String, String>,
    entries: BTreeMap<String, Entry>,
}

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Members;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
                let mut members = Members { metadata: BTreeMap::new(), entries: BTreeMap::new() };
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        members.metadata = map.next_value()?;
                    } else if let Some(_first) = members.entries.insert(name.clone(), map.next_value()?) {
                        return Err(serde::de::Error::custom(format!("two tensors are called `{name}`")));
                    }
                }
                Ok(members)
            }
        }

        deserializer.deserialize_map(Visitor)
    }
}
