//! Our own format: a safetensors file for every rank, and a manifest with the hash of each (docs/checkpoint-format.md).

use std::collections::{BTreeMap, BTreeSet};

use crossmesh_core::id::Rank;
use crossmesh_core::region::Region;
use serde_json::Value;

use super::hf::natural;
use super::{Cut, OutFile, Part, Plan, What};
use crate::catalog::{Catalog, Tensor};
use crate::element::Element;
use crate::error::CheckpointError;
use crate::manifest::{
    BoxEntry, Facts, FileEntry, MANIFEST, Manifest, OptimizerFacts, SCHEMA, TensorEntry, VALUE, file_name,
    spans_of,
};
use crate::model::model_of;
use crate::safetensors::{METADATA_KEY, RESERVED, header_bytes};

/// A tensor of ours: the parameter, which state of it, and what the catalog calls it.
type Key<'a> = (&'a str, &'a str, &'a str);

pub fn files(plan: &Plan<'_>) -> Result<(Vec<OutFile>, Vec<String>), CheckpointError> {
    let element = element(plan)?;
    let keys = keys(plan);
    let facts = facts(plan, &keys)?;
    let mut by_rank: BTreeMap<u32, Vec<(&str, Vec<Region>)>> = BTreeMap::new();
    for (_, _, key) in &keys {
        for (rank, region) in &plan.boxes[*key] {
            let of_rank = by_rank.entry(*rank).or_default();
            match of_rank.last_mut().filter(|(last, _)| last == key) {
                Some((_, regions)) => regions.push(region.clone()),
                None => of_rank.push((key, vec![region.clone()])),
            }
        }
    }
    let num_ranks = by_rank.keys().last().map_or(1, |rank| rank + 1);
    let (mut files, mut entries, mut boxes) =
        (Vec::new(), Vec::new(), BTreeMap::<&str, Vec<BoxEntry>>::new());
    for (number, (rank, tensors)) in by_rank.into_iter().enumerate() {
        let file = file(plan, rank, element, &tensors);
        for (key, regions) in tensors {
            let mut at = 0;
            for region in regions {
                let entry = BoxEntry { file: number, key: key.into(), at, spans: spans_of(&region) };
                boxes.entry(key).or_default().push(entry);
                at += region.volume();
            }
        }
        entries.push(FileEntry { name: file.name.clone(), bytes: file.bytes, blake3: "0".repeat(64) });
        files.push(file);
    }
    let tensor = |(name, state, key): Key<'_>| TensorEntry {
        name: name.into(),
        state: state.into(),
        shape: plan.catalog.tensors[key].shape.clone(),
        layout: layout(plan, key, element, num_ranks),
        boxes: boxes.remove(key).unwrap_or_default(),
    };
    let mut tensors: Vec<TensorEntry> = keys.iter().copied().map(tensor).collect();
    tensors.sort_by(|a, b| (&a.name, &a.state).cmp(&(&b.name, &b.state)));
    let (schema, dtype) = (SCHEMA.to_string(), element.to_string());
    let manifest = Manifest { schema, facts, dtype, files: entries, tensors };
    manifest.check().map_err(CheckpointError::target)?;
    let bytes = manifest.to_text().len() as u64;
    let what = What::Manifest(Box::new(manifest));
    files.push(OutFile { name: MANIFEST.into(), bytes, parts: vec![Part { at: 0, what }] });
    Ok((files, plan.catalog.objects.keys().cloned().collect()))
}

/// The one type that all tensors have.
fn element(plan: &Plan<'_>) -> Result<Element, CheckpointError> {
    let mut first: Option<(&String, Element)> = None;
    for (name, &element) in plan.elements {
        let (other, wanted) = *first.get_or_insert((name, element));
        let wrong = |what: String| {
            let hint = "hint: `--dtype f32` makes all of them f32; bf16 and f16 become it without a loss";
            Err(CheckpointError::Tensor { tensor: name.clone(), what: format!("{what}\n{hint}") })
        };
        if name == METADATA_KEY {
            return Err(CheckpointError::Tensor { tensor: name.clone(), what: RESERVED.into() });
        }
        if ![Element::F32, Element::F64].contains(&element) {
            return wrong(format!("it is {element}, and ours are f32 or f64"));
        }
        if element != wanted {
            return wrong(format!("it is {element}, and `{other}` is {wanted}: ours are of one type"));
        }
    }
    Ok(first.map_or(Element::F32, |(_, element)| element))
}

/// All tensors, by name and state. What stands behind a slash is a state where what stands before it is a tensor.
fn keys<'a>(plan: &'a Plan<'_>) -> Vec<Key<'a>> {
    let key = |key: &'a String| match key.rsplit_once('/') {
        Some((name, state)) if plan.catalog.tensors.contains_key(name) => (name, state, key.as_str()),
        _ => (key.as_str(), VALUE, key.as_str()),
    };
    let mut keys: Vec<Key<'a>> = plan.catalog.tensors.keys().map(key).collect();
    // Layers in their order, so that files read as the model does.
    keys.sort_by_cached_key(|(name, state, _)| (natural(name), *state != VALUE, state.to_string()));
    keys
}

/// What the source says of itself, as far as its tensors are there.
fn facts(plan: &Plan<'_>, keys: &[Key<'_>]) -> Result<Facts, CheckpointError> {
    let mut states: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (name, state, _) in keys {
        states.entry(name).or_default().insert(state);
    }
    let all: BTreeSet<&str> = keys.iter().map(|(_, state, _)| *state).collect();
    if let Some((name, has)) = states.iter().find(|(_, has)| **has != all) {
        let missing: Vec<&str> = all.difference(has).copied().collect();
        let what = format!(
            "its `{}` is not there, which others have: ours keeps all states of all parameters\nhint: leave the optimizer's states out, `--leave-out 'optim*'`",
            missing.join("`, `")
        );
        return Err(CheckpointError::Tensor { tensor: name.to_string(), what });
    }
    let catalog = plan.catalog;
    let moments: Vec<String> = all.into_iter().filter(|s| *s != VALUE).map(String::from).collect();
    let known = catalog.facts.clone();
    let optimizer = match known.as_ref().and_then(|f| f.optimizer.clone()) {
        _ if moments.is_empty() => None,
        Some(known) => Some(known),
        None => Some(OptimizerFacts {
            kind: kind_of(&moments)?.into(),
            steps: catalog.optimizer_steps.unwrap_or(0),
            moments,
        }),
    };
    match known {
        Some(facts) => Ok(Facts { optimizer, ..facts }),
        None => {
            let model = catalog.config.as_ref().map_or(Ok(Value::Null), model_of);
            let model =
                model.map_err(|e| CheckpointError::damaged(&catalog.folder.join("config.json"), e))?;
            // Steps of the optimizer are all that is known of the run.
            let step = optimizer.as_ref().map_or(0, |o| o.steps);
            Ok(Facts { step, samples: 0, seed: 0, model, run: Value::Null, optimizer })
        }
    }
}

/// The optimizer that remembers this of every parameter.
fn kind_of(moments: &[String]) -> Result<&'static str, CheckpointError> {
    let moments: Vec<&str> = moments.iter().map(String::as_str).collect();
    match moments[..] {
        ["exp_avg", "exp_avg_sq"] => Ok("adamw"),
        ["momentum"] => Ok("sgd"),
        _ => Err(CheckpointError::target(format!(
            "an optimizer's states `{}` are none that ours has: adamw keeps `exp_avg` and `exp_avg_sq`, sgd `momentum`\nhint: leave out those that are too many, or all of them: `--leave-out 'optim*'`",
            moments.join("`, `")
        ))),
    }
}

/// What others keep beside a parameter and ours has in another place. Megatron's `fp32_param` is what its narrower parameter was rounded from, so
/// it is the parameter: training goes on from it. torch's SGD says `momentum_buffer`.
pub fn adopt(catalog: &mut Catalog) {
    let with = |tensors: &BTreeMap<String, Tensor>, state: &str| -> Vec<(String, String)> {
        let split =
            |key: &String| Some((key.strip_suffix(state)?.strip_suffix('/')?.to_string(), key.clone()));
        let found = tensors.keys().filter_map(split);
        found.filter(|(name, key)| tensors.get(name).is_some_and(|t| t.shape == tensors[key].shape)).collect()
    };
    for (name, key) in with(&catalog.tensors, "fp32_param") {
        let master = catalog.tensors.remove(&key).expect("it was found there");
        catalog.tensors.insert(name, master);
    }
    for (name, key) in with(&catalog.tensors, "momentum_buffer") {
        let velocity = catalog.tensors.remove(&key).expect("it was found there");
        catalog.tensors.insert(format!("{name}/momentum"), velocity);
    }
}

/// How a tensor lies, for people.
fn layout(plan: &Plan<'_>, key: &str, element: Element, num_ranks: u32) -> String {
    let shape = &plan.catalog.tensors[key].shape;
    let lens = shape.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
    let head = format!("{element}[{lens}]@F{{rank:{num_ranks}}}");
    if let Cut::Boxes(_) = plan.spec.cut {
        let mut ranks: BTreeMap<u32, Vec<String>> = BTreeMap::new();
        plan.boxes[key].iter().for_each(|(rank, r)| ranks.entry(*rank).or_default().push(r.to_string()));
        let held: Vec<String> =
            ranks.iter().map(|(rank, boxes)| format!("{rank}: {}", boxes.join(" "))).collect();
        return format!("{head}{{{}}}", held.join("; "));
    }
    let dim = |(i, _): (usize, &u64)| if i == 0 && num_ranks > 1 { "rank" } else { "_" };
    format!("{head}({})", shape.iter().enumerate().map(dim).collect::<Vec<_>>().join(","))
}

fn file(plan: &Plan<'_>, rank: u32, element: Element, tensors: &[(&str, Vec<Region>)]) -> OutFile {
    // A box keeps its dims, so that other programs find a tensor where there is one; several are a row.
    let shape = |regions: &[Region]| match regions {
        [one] => one.spans().iter().map(|s| s.len()).collect(),
        several => vec![several.iter().map(Region::volume).sum()],
    };
    let entries = tensors.iter().map(|(key, regions)| (key.to_string(), element, shape(regions)));
    let header = header_bytes(&BTreeMap::new(), entries);
    let mut at = header.len() as u64;
    let mut parts = vec![Part { at: 0, what: What::Bytes(header) }];
    for (key, regions) in tensors {
        debug_assert_eq!(plan.elements[*key], element);
        for region in regions {
            let what = What::Box { tensor: key.to_string(), region: region.clone(), head_bytes: None };
            parts.push(Part { at, what });
            at += region.volume() * element.bytes();
        }
    }
    OutFile { name: file_name(Rank(rank)), bytes: at, parts }
}
