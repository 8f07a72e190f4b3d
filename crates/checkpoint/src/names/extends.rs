//! A map that says only in what it differs from one that comes along: `extends = "llama"`.
//!
//! Axes and keys of sides replace those of the same name. A tensor replaces all that share a name with it on any side, and is new where none does.

use std::collections::BTreeSet;

use serde::de::DeserializeOwned;
use toml::{Table, Value};

use super::NameMap;

/// Reads a document, together with the one that it extends.
pub fn read<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    let mut own: Table = toml::from_str(text).map_err(|e| e.to_string())?;
    let Some(base) = own.remove("extends") else {
        // From the text, so that an error has its line.
        return toml::from_str(text).map_err(|e| e.to_string());
    };
    let base = base.as_str().ok_or("what it extends is the name of a map, as in `extends = \"llama\"`")?;
    let known = || NameMap::families().collect::<Vec<_>>().join(", ");
    let unknown = || format!("it extends `{base}`, and no such map comes along\nhint: one of {}", known());
    let base = NameMap::text(base).ok_or_else(unknown)?;
    let mut all: Table = toml::from_str(base).map_err(|e| e.to_string())?;
    for (key, value) in own {
        match (key.as_str(), all.get_mut(&key), value) {
            ("axes", Some(Value::Table(all)), Value::Table(own)) => all.extend(own),
            ("sides", Some(Value::Table(all)), Value::Table(own)) => sides(all, own),
            ("tensor", Some(Value::Array(all)), Value::Array(own)) => tensors(all, own),
            (_, _, value) => drop(all.insert(key, value)),
        }
    }
    all.try_into().map_err(|e: toml::de::Error| e.to_string())
}

/// A key of a side replaces that key.
fn sides(all: &mut Table, own: Table) {
    for (name, side) in own {
        match (all.get_mut(&name), side) {
            (Some(Value::Table(all)), Value::Table(own)) => all.extend(own),
            (_, side) => drop(all.insert(name, side)),
        }
    }
}

fn tensors(all: &mut Vec<Value>, own: Vec<Value>) {
    for tensor in own {
        let names = names_of(&tensor);
        all.retain(|other| names_of(other).is_disjoint(&names));
        all.push(tensor);
    }
}

/// What a tensor is called, with the side that calls it so.
fn names_of(tensor: &Value) -> BTreeSet<(&str, &str)> {
    let mut names = BTreeSet::new();
    for (side, terms) in tensor.as_table().into_iter().flatten().filter(|(key, _)| *key != "bare") {
        let terms = terms.as_array().into_iter().flatten().filter_map(Value::as_str);
        names.extend(terms.map(|term| (side.as_str(), term.split('[').next().unwrap_or(term).trim())));
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_is_replaced_or_added_and_the_rest_stays() {
        let text = r#"
            extends = "llama"
            family = "mine"
            model_type = ["mine"]
            [axes]
            f = [40]
            r = ["rank"]
            [sides.hf]
            prefixes = ["base."]
            [[tensor]]
            hf = ["model.norm.scale [h]"]
            megatron = ["decoder.final_layernorm.weight [h]"]
            crossmesh = ["model.norm.weight [h]"]
            stage = "last"
            [[tensor]]
            hf = ["model.extra [r, h]"]
            megatron = ["extra [r, h]"]
            crossmesh = ["extra [r, h]"]
        "#;
        let (mine, llama) = (NameMap::parse(text, "mine").unwrap(), NameMap::built_in("llama").unwrap());
        assert_eq!((mine.family.as_str(), &mine.model_types[..]), ("mine", &["mine".to_string()][..]));
        assert_eq!(mine.rules.len(), llama.rules.len() + 1);
        let names = |map: &NameMap| -> BTreeSet<String> {
            map.rules.iter().flat_map(|r| &r.terms["hf"]).map(|t| t.name.shape()).collect()
        };
        let new: Vec<String> = names(&mine).difference(&names(&llama)).cloned().collect();
        let gone: Vec<String> = names(&llama).difference(&names(&mine)).cloned().collect();
        assert_eq!(
            (new, gone),
            (
                vec!["model.extra".to_string(), "model.norm.scale".to_string()],
                vec!["model.norm.weight".to_string()]
            )
        );
        // A key of a side that is not named stays.
        assert_eq!(mine.sides["hf"].prefixes, ["base."]);
        assert_eq!(mine.sides["hf"].states, llama.sides["hf"].states);
        assert_eq!(mine.axes["f"].len(), 1);
    }

    #[test]
    fn what_is_extended_has_to_come_along() {
        for (text, says) in [
            ("extends = \"bert\"", "it extends `bert`, and no such map comes along\nhint: one of llama"),
            ("extends = 5", "is the name of a map, as in `extends"),
            ("extends = \"llama\"\nfoo = 1", "unknown field `foo`"),
            ("extends = \"llama\"\n[sides.new]", "the side new is missing"),
            (
                "extends = \"llama\"\n[sides.new]\nlike = \"old\"",
                "the side new is like `old`, which is no side",
            ),
        ] {
            let error = NameMap::parse(text, "mine").unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
