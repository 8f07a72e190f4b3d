//! safetensors: eight bytes of length, a header in JSON, then the tensors one behind the other.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::catalog::checked_bytes;
use crate::element::Element;
use crate::error::CheckpointError;

/// The limit of the format's own crate.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// What is no tensor of a header.
pub(crate) const METADATA_KEY: &str = "__metadata__";
/// Said of a tensor of that name.
pub(crate) const RESERVED: &str =
    "safetensors keeps this name for itself\nhint: leave it out, or name it otherwise by a map";

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub element: Element,
    pub shape: Vec<u64>,
    /// From the end of the header.
    pub data_offsets: [u64; 2],
}

/// The same as it is written.
#[derive(Serialize, Deserialize)]
struct EntryText<'a> {
    #[serde(borrow)]
    dtype: std::borrow::Cow<'a, str>,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The header of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Header {
    pub entries: BTreeMap<String, Entry>,
    pub metadata: BTreeMap<String, String>,
    /// Where the tensors begin.
    pub start: u64,
}

impl Header {
    /// Reads and checks the header of a file: tensors as large as their shapes, one behind the other. That the file is as
    /// long as its header says is left to the reader: `Err` is for what cannot be understood.
    pub fn read(path: &Path) -> Result<Self, CheckpointError> {
        let file = File::open(path).map_err(CheckpointError::io("open", path))?;
        let text = read_text(&file, path)?;
        Self::parse(&text).map_err(|what| CheckpointError::damaged(path, what))
    }

    /// The same of an open file, which ends where its last tensor does.
    pub fn read_whole(file: &File, path: &Path) -> Result<Self, CheckpointError> {
        let damaged = |what: String| CheckpointError::damaged(path, what);
        let header = Self::parse(&read_text(file, path)?).map_err(damaged)?;
        let bytes = file.metadata().map_err(CheckpointError::io("read", path))?.len();
        let tensors = header.tensor_bytes();
        match header.start + tensors == bytes {
            true => Ok(header),
            false => {
                let what = format!("it is {bytes} bytes long, and its header speaks of {tensors} behind it");
                Err(damaged(what))
            }
        }
    }

    pub fn parse(text: &[u8]) -> Result<Self, String> {
        let members: Members<'_> =
            serde_json::from_slice(text).map_err(|e| format!("its header is damaged: {e}"))?;
        let mut header = Self { metadata: members.metadata, start: text.len() as u64 + 8, ..Self::default() };
        for (name, EntryText { dtype, shape, data_offsets }) in members.entries {
            let [start, end] = data_offsets;
            let element = Element::of_safetensors(&dtype)
                .ok_or_else(|| format!("`{name}` is of the type {dtype}, which is not known here"))?;
            if checked_bytes(&shape, element).is_none_or(|bytes| end.checked_sub(start) != Some(bytes)) {
                return Err(format!("`{name}`, {dtype} {shape:?}, cannot lie at {start}..{end}"));
            }
            header.entries.insert(name, Entry { element, shape, data_offsets });
        }
        header.in_a_row()?;
        Ok(header)
    }

    /// Bytes of a tensor in the file.
    pub fn range(&self, entry: &Entry) -> Range<u64> {
        let [start, end] = entry.data_offsets;
        self.start + start..self.start + end
    }

    /// The tensors in the order of their bytes.
    pub fn in_order(&self) -> Vec<(&String, &Entry)> {
        let mut sorted: Vec<_> = self.entries.iter().collect();
        sorted.sort_by_key(|(_, e)| e.data_offsets);
        sorted
    }

    /// Where the last tensor ends in the file.
    pub fn end(&self) -> u64 {
        self.start + self.tensor_bytes()
    }

    /// Bytes of all tensors together.
    fn tensor_bytes(&self) -> u64 {
        self.entries.values().map(|e| e.data_offsets[1]).max().unwrap_or(0)
    }

    /// The format leaves no bytes between tensors, and none to two.
    fn in_a_row(&self) -> Result<(), String> {
        let mut next = 0;
        for (name, entry) in self.in_order() {
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

/// The header of a file as it was written.
pub fn read_text(file: &File, path: &Path) -> Result<Vec<u8>, CheckpointError> {
    let damaged = |what: String| CheckpointError::damaged(path, what);
    let bytes = file.metadata().map_err(CheckpointError::io("read", path))?.len();
    let mut length = [0; 8];
    file.read_exact_at(&mut length, 0)
        .map_err(|_| damaged(format!("it is {bytes} bytes long, too short for a safetensors file")))?;
    let first = length[0];
    let length = u64::from_le_bytes(length);
    let too_long = length.saturating_add(8) > bytes;
    // A JSON document where a length belongs: `{"` or `{\n`.
    if first == b'{' && too_long {
        return Err(damaged(
            "it is a JSON document, as the index of a model in several files is, and no safetensors file\nhint: name the folder it lies in".into(),
        ));
    }
    if too_long || length > MAX_HEADER_BYTES {
        return Err(damaged(format!(
            "its header would be {length} bytes long: it is no safetensors file, or was cut short"
        )));
    }
    let mut text = vec![0; length as usize];
    file.read_exact_at(&mut text, 8).map_err(CheckpointError::io("read", path))?;
    Ok(text)
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
        let dtype = element.safetensors().expect("a type that the target was checked for").into();
        let entry = EntryText { dtype, shape, data_offsets: [at, at + bytes] };
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
struct Members<'a> {
    metadata: BTreeMap<String, String>,
    entries: BTreeMap<String, EntryText<'a>>,
}

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Members<'de>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Members<'de>, A::Error> {
                let mut members = Members { metadata: BTreeMap::new(), entries: BTreeMap::new() };
                while let Some(name) = map.next_key::<String>()? {
                    if name == METADATA_KEY {
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
