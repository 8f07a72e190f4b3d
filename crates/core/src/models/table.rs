//! A model that is a table of names and shapes, from anywhere: what tensor parallelism does with a weight is told by its name.
//!
//! ```json
//! {"dtype": "bf16",
//!  "tensors": {"model.embed_tokens.weight": [50, 24], "model.layers.0.self_attn.qkv_proj.weight": [48, 24], "…": [1]},
//!  "roles": {"qkv_proj": "column 24+12+12", "lm_head": "whole"}}
//! ```
//!
//! Names end in a module and its `weight` or `bias`. Modules of the usual models are known (`q_proj`, `gate_up_proj`, `down_proj`, …); `roles` says
//! it of others, by the ends of their names. What nobody knows stays whole.

use std::collections::BTreeSet;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};

use super::tensors::{ModelTensor, Role};
use super::{ConfigError, Model, Weights};

/// Modules whose outputs are cut: rows of their weights, and their biases.
const COLUMN: &[&str] = &[
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "query_key_value",
    "linear_qkv",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "w1",
    "w3",
    "fc1",
    "linear_fc1",
    "dense_h_to_4h",
    "embed_tokens",
    "word_embeddings",
    "tok_embeddings",
    "lm_head",
];
/// Modules whose inputs are cut: columns of their weights.
const ROW: &[&str] =
    &["o_proj", "out_proj", "wo", "down_proj", "w2", "fc2", "linear_fc2", "linear_proj", "dense_4h_to_h"];
/// Two of one size in one.
const HALVES: &[&str] = &["gate_up_proj"];
/// Query, key and value in one. How large each is does not follow from the shape.
const THREE: &[&str] = &["qkv_proj"];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    name: Option<String>,
    dtype: Option<String>,
    tensors: InOrder<Vec<u64>>,
    #[serde(default)]
    roles: InOrder<String>,
}

/// The entries of a map, in the order of the document.
struct InOrder<T>(Vec<(String, T)>);

impl<T> Default for InOrder<T> {
    fn default() -> Self {
        Self(vec![])
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for InOrder<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<T>(std::marker::PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Entries<T> {
            type Value = InOrder<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map by name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<InOrder<T>, A::Error> {
                let mut entries = vec![];
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(InOrder(entries))
            }
        }
        deserializer.deserialize_map(Entries(std::marker::PhantomData))
    }
}

impl Model {
    /// Reads the text of a table.
    pub fn from_table(text: &str) -> Result<Self, ConfigError> {
        let table: Table = serde_json::from_str(text).map_err(|e| ConfigError::Table(e.to_string()))?;
        let (InOrder(tensors), InOrder(roles)) = (table.tensors, table.roles);
        check_tensors(&tensors)?;
        if let Some((end, _)) =
            roles.iter().find(|(end, _)| !tensors.iter().any(|(name, _)| ends_in(name, end)))
        {
            return Err(ConfigError::NoTensor { end: end.clone() });
        }
        let layers = tensors.iter().filter_map(|(name, _)| layer_of(name)).max().map_or(1, |last| last + 1);
        let mut layer = 0;
        let mut all = Vec::with_capacity(tensors.len());
        for (name, shape) in &tensors {
            // What has no number stands where it is listed: embeddings before the layers, the head behind them.
            layer = layer_of(name).unwrap_or(layer);
            let role = match said(&roles, name) {
                Some(word) => read_role(name, shape, word)?,
                None => role_of(name, shape, &tensors)?,
            };
            all.push(ModelTensor { name: name.clone(), shape: shape.clone(), role, layer });
        }
        let dtype = table.dtype.as_deref().unwrap_or("bf16");
        Ok(Self {
            name: table.name.unwrap_or_else(|| "table".into()),
            dtype: dtype.parse().map_err(|()| ConfigError::UnknownDType(dtype.into()))?,
            weights: Weights::Table { tensors: all, layers },
        })
    }
}

/// Names stand for one tensor each, and all together are no more numbers than can be counted.
fn check_tensors(tensors: &[(String, Vec<u64>)]) -> Result<(), ConfigError> {
    let (mut names, mut left) = (BTreeSet::new(), u64::MAX);
    for (name, shape) in tensors {
        if !names.insert(name) {
            return Err(ConfigError::Twice { name: name.clone() });
        }
        let elements = shape.iter().try_fold(1u64, |all, len| all.checked_mul((*len).max(1)));
        left = elements
            .and_then(|elements| left.checked_sub(elements))
            .ok_or_else(|| ConfigError::TooLarge { name: name.clone(), shape: shape.clone() })?;
    }
    Ok(())
}

/// Whether a name ends in these words, its `weight` or `bias` apart.
fn ends_in(name: &str, end: &str) -> bool {
    let is_end = |name: &str| name == end || name.strip_suffix(end).is_some_and(|rest| rest.ends_with('.'));
    is_end(name) || is_end(module(name))
}

/// A name without its `weight` or `bias`.
fn module(name: &str) -> &str {
    name.strip_suffix(".weight").or_else(|| name.strip_suffix(".bias")).unwrap_or(name)
}

/// The first number in a name.
fn layer_of(name: &str) -> Option<u64> {
    name.split('.').find_map(|word| word.parse().ok()).filter(|layer| *layer < 10_000)
}

/// What `roles` says: the longest end that fits.
fn said<'a>(roles: &'a [(String, String)], name: &str) -> Option<&'a str> {
    let fitting = roles.iter().filter(|(end, _)| ends_in(name, end));
    fitting.max_by_key(|(end, _)| end.len()).map(|(_, word)| word.as_str())
}

/// What the name of a module says.
fn role_of(name: &str, shape: &[u64], all: &[(String, Vec<u64>)]) -> Result<Role, ConfigError> {
    let word = module(name).rsplit('.').next().unwrap_or_default();
    let (column, row) = (COLUMN.contains(&word), ROW.contains(&word));
    let rows = |dim: usize| match shape.get(dim) {
        Some(len) if HALVES.contains(&word) => vec![len / 2, len - len / 2],
        Some(len) => vec![*len],
        None => vec![],
    };
    Ok(match shape.len() {
        2 if THREE.contains(&word) => Role::Column { parts: three(name, shape, all)? },
        1 | 2 if column => Role::Column { parts: rows(0) },
        2 if row => Role::Row,
        3 if column && name.contains("experts") => Role::Experts { row: true, parts: rows(1) },
        3 if row && name.contains("experts") => Role::Experts { row: false, parts: vec![] },
        _ => Role::Whole,
    })
}

/// Rows of query, key and value: the output projection beside them takes in what the query heads put out.
fn three(name: &str, shape: &[u64], all: &[(String, Vec<u64>)]) -> Result<Vec<u64>, ConfigError> {
    let beside = module(name).rsplit_once('.').map_or("", |(block, _)| block);
    let output = all.iter().find(|(other, shape)| {
        let of_block =
            module(other).strip_prefix(beside).is_some_and(|rest| rest == ".o_proj" || rest == "o_proj");
        of_block && shape.len() == 2
    });
    let q = output.map_or(0, |(_, shape)| shape[1]);
    let kv = shape[0].checked_sub(q).filter(|kv| q > 0 && *kv > 0 && kv.is_multiple_of(2));
    let kv = kv.ok_or_else(|| ConfigError::Parts { name: name.into(), rows: shape[0] })?;
    Ok(vec![q, kv / 2, kv / 2])
}

/// `column`, `column 24+12+12`, `row`, `whole`, `experts column 8+8`, `experts row`.
fn read_role(name: &str, shape: &[u64], said: &str) -> Result<Role, ConfigError> {
    let bad = || ConfigError::Role { name: name.into(), role: said.into(), shape: shape.to_vec() };
    let (experts, word) = match said.strip_prefix("experts ") {
        Some(rest) => (true, rest),
        None => (false, said),
    };
    let (kind, parts) = word.split_once(' ').unwrap_or((word, ""));
    let dim = usize::from(experts);
    let fits = match (kind, experts) {
        ("whole", false) => true,
        ("row", false) => shape.len() == 2,
        ("column", false) => !shape.is_empty(),
        (_, true) => shape.len() == 3,
        _ => false,
    };
    if !fits {
        return Err(bad());
    }
    let parts: Vec<u64> = match parts {
        "" => vec![shape.get(dim).copied().unwrap_or(0)],
        list => {
            list.split('+').map(|part| part.trim().parse().map_err(|_| bad())).collect::<Result<_, _>>()?
        }
    };
    let whole = parts.iter().try_fold(0u64, |sum, part| sum.checked_add(*part)) == shape.get(dim).copied();
    match (kind, experts) {
        ("column", _) if !whole => Err(bad()),
        ("column", false) => Ok(Role::Column { parts }),
        ("column", true) => Ok(Role::Experts { row: true, parts }),
        ("row", _) if word != "row" => Err(bad()),
        ("row", false) => Ok(Role::Row),
        ("row", true) => Ok(Role::Experts { row: false, parts: vec![] }),
        ("whole", false) if word == "whole" => Ok(Role::Whole),
        _ => Err(bad()),
    }
}
