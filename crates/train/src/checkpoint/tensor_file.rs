//! safetensors: eight bytes of length, a header in JSON, then the tensors one behind the other.
//!
//! Written and read here rather than by the crate of that name: a writer that gets its bytes in the order of the file, and a reader that looks at the
//! header alone and fetches boxes, are a page each. The crate reads what this writes and writes what this reads in the tests.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::error::CheckpointError;

/// The crate's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// `F32`, `F64`, `BF16`, ..
    pub dtype: String,
    pub shape: Vec<u64>,
    /// From the end of the header.
    pub data_offsets: [u64; 2],
}

/// The header of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    pub entries: BTreeMap<String, Entry>,
    /// Where the tensors begin.
    pub start: u64,
    /// As it was written.
    pub text: String,
}

impl Header {
    /// Bytes of a tensor in the file.
    pub fn range(&self, entry: &Entry) -> Range<u64> {
        let [start, end] = entry.data_offsets;
        self.start + start..self.start + end
    }

    /// Reads and checks the header of a file of this length: tensors as large as their shapes, inside the file, none over another.
    pub fn read(file: &File, bytes: u64, path: &Path) -> Result<Self, CheckpointError> {
        let damaged = |what: String| CheckpointError::damaged(path, what);
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0)
            .map_err(|_| damaged(format!("it is {bytes} bytes long, too short")))?;
        let length = u64::from_le_bytes(length);
        let start = length.saturating_add(8);
        // A JSON document where a length belongs: `{"` or `{\n`.
        if length.to_le_bytes()[0] == b'{' && start > bytes {
            return Err(damaged(
                "it is a JSON document, as the index of a model in several files is, and no safetensors file\nhint: join the files into one model.safetensors first (`save_pretrained(max_shard_size=\"100GB\")`)".into(),
            ));
        }
        if start > bytes || length > MAX_HEADER_BYTES {
            return Err(damaged(format!(
                "its header would be {length} bytes long: it is no safetensors file"
            )));
        }
        let mut text = vec![0; length as usize];
        file.read_exact_at(&mut text, 8).map_err(CheckpointError::io("read", path))?;
        let text = String::from_utf8(text).map_err(|e| damaged(format!("its header is damaged: {e}")))?;
        let header = Self::parse(text).map_err(damaged)?;
        header.check(bytes).map_err(damaged)?;
        Ok(header)
    }

    /// A header that was written so.
    pub fn parse(text: String) -> Result<Self, String> {
        let Members(mut members) =
            serde_json::from_str(&text).map_err(|e| format!("its header is damaged: {e}"))?;
        members.remove("__metadata__");
        let mut entries = BTreeMap::new();
        for (key, value) in members {
            let entry: Entry =
                serde_json::from_value(value).map_err(|e| format!("its entry `{key}`: {e}"))?;
            entries.insert(key, entry);
        }
        Ok(Self { entries, start: text.len() as u64 + 8, text })
    }

    /// The start of the file.
    pub fn bytes(&self) -> Vec<u8> {
        [&(self.text.len() as u64).to_le_bytes()[..], self.text.as_bytes()].concat()
    }

    /// The tensors in the order of their bytes.
    pub fn in_order(&self) -> Vec<(&String, &Entry)> {
        let mut sorted: Vec<_> = self.entries.iter().collect();
        sorted.sort_by_key(|(_, e)| e.data_offsets);
        sorted
    }

    fn check(&self, bytes: u64) -> Result<(), String> {
        let mut next = 0;
        for (key, entry) in self.in_order() {
            let [start, end] = entry.data_offsets;
            let wanted =
                entry.shape.iter().try_fold(width(&entry.dtype).unwrap_or(0), |v, &n| v.checked_mul(n));
            // What is of an unknown type is nobody's business but for its place.
            let fits = width(&entry.dtype).is_none() || wanted == end.checked_sub(start);
            if !fits || start != next || end < start {
                let Entry { dtype, shape, .. } = entry;
                return Err(format!("`{key}`, {dtype} {shape:?}, cannot lie at {start}..{end}"));
            }
            next = end;
        }
        match self.start.checked_add(next) {
            Some(end) if end == bytes => Ok(()),
            _ => Err(format!("it is {bytes} bytes long, and its header speaks of {next} behind it")),
        }
    }
}

/// A JSON object in which no name is there twice: which of two tensors is meant, nobody could tell.
struct Members(BTreeMap<String, serde_json::Value>);

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Members;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
                let mut members = BTreeMap::new();
                while let Some((name, value)) = map.next_entry::<String, serde_json::Value>()? {
                    if members.insert(name.clone(), value).is_some() {
                        return Err(serde::de::Error::custom(format!("two tensors are called `{name}`")));
                    }
                }
                Ok(Members(members))
            }
        }

        deserializer.deserialize_map(Visitor)
    }
}

/// Bytes of an element.
pub fn width(dtype: &str) -> Option<u64> {
    match dtype {
        "F64" | "I64" | "U64" => Some(8),
        "F32" | "I32" | "U32" => Some(4),
        "F16" | "BF16" | "I16" | "U16" => Some(2),
        "BOOL" | "U8" | "I8" => Some(1),
        _ => None,
    }
}

/// The start of a file with these tensors, in the order in which their bytes follow.
pub fn header_bytes(metadata: &BTreeMap<String, String>, tensors: &[(String, String, Vec<u64>)]) -> Vec<u8> {
    let mut at = 0;
    let mut members = Vec::new();
    if !metadata.is_empty() {
        members.push(format!("\"__metadata__\":{}", json(metadata)));
    }
    for (key, dtype, shape) in tensors {
        let bytes = shape.iter().product::<u64>() * width(dtype).expect("a type that is written");
        let entry = Entry { dtype: dtype.clone(), shape: shape.clone(), data_offsets: [at, at + bytes] };
        at += bytes;
        members.push(format!("{}:{}", json(key), json(&entry)));
    }
    let mut text = format!("{{{}}}", members.join(","));
    // Numbers begin at a multiple of their width.
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("strings and numbers are JSON")
}
