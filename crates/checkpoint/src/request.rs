//! What a user asks for, in the words of the command line and of Python, made into a conversion.

use std::collections::BTreeSet;
use std::path::PathBuf;

use crate::catalog::{Catalog, Format};
use crate::convert::{Conversion, Explanation, Limits};
use crate::element::Element;
use crate::error::CheckpointError;
use crate::names::{Fit, NameMap, Naming, OURS, Parallel, glob};
use crate::target::{Cut, SHARD_BYTES, Spec, adopt};

/// What may lie beside a config.json and goes along with it to Hugging Face.
const BESIDE_CONFIG: [&str; 10] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
];

/// From what there is to what is wanted.
#[derive(Debug, Clone)]
pub struct Request {
    pub format: Format,
    /// A family of models, or a file: which map names are changed by. None: that of config.json, where names have to change.
    pub names: Option<String>,
    /// Sides of the map; what the source has, and what the target's format wants, where none is given.
    pub from_names: Option<String>,
    pub to_names: Option<String>,
    /// Which of several names of a tensor is written.
    pub spelling: Option<String>,
    pub tp: Option<u32>,
    pub pp: Option<u32>,
    pub ep: Option<u32>,
    /// Over how many ranks the first dim of every tensor is cut, where nothing else cuts it.
    pub ranks: Option<u32>,
    pub element: Option<Element>,
    pub shard_bytes: u64,
    /// Tensors to be left behind, with `*`.
    pub leave_out: Vec<String>,
    /// The model's config.json, where the source has none.
    pub config: Option<PathBuf>,
}

impl Request {
    pub fn new(format: Format) -> Self {
        Self {
            format,
            names: None,
            from_names: None,
            to_names: None,
            spelling: None,
            tp: None,
            pp: None,
            ep: None,
            ranks: None,
            element: None,
            shard_bytes: SHARD_BYTES,
            leave_out: vec![],
            config: None,
        }
    }

    /// Plans it. Nothing is read but headers, and nothing is written.
    pub fn plan(&self, mut catalog: Catalog) -> Result<Planned, CheckpointError> {
        // What is wrong with the source is said of its own names.
        catalog.checked()?;
        if let Some(path) = &self.config {
            catalog.config = Some(crate::open::read_json(path)?);
            catalog.extras.insert("config.json".into(), path.clone());
            // What belongs to a model at Hugging Face lies beside its config.json.
            let beside = BESIDE_CONFIG.iter().map(|name| (name, path.with_file_name(name)));
            for (name, path) in beside.filter(|(_, path)| self.format == Format::Hf && path.is_file()) {
                catalog.extras.entry(name.to_string()).or_insert(path);
            }
        }
        let parallel = self.parallel()?;
        let mut spec =
            Spec { element: self.element, shard_bytes: self.shard_bytes, ..Spec::new(self.format) };
        if let Some(ranks) = self.ranks {
            spec.cut = Cut::Rows(ranks);
        }
        let mut left_out = self.leave_states(&mut catalog);
        let naming = self.naming();
        let Some(map) = self.map(&catalog, parallel, &naming)? else {
            if let Some(spelling) = &self.spelling {
                let what = format!(
                    "names do not change, and `{spelling}` is a spelling of none\nhint: leave it away, or name a map"
                );
                return Err(CheckpointError::target(what));
            }
            let kept = |name: &String| !self.leave_out.iter().any(|pattern| glob(pattern, name));
            left_out.extend(catalog.tensors.keys().filter(|name| !kept(name)).cloned());
            catalog.tensors.retain(|name, _| kept(name));
            return Planned::new(catalog, spec, left_out, None);
        };
        let mut renamed = map.apply(&catalog, &naming)?;
        left_out.append(&mut renamed.left_out);
        if self.format == Format::Crossmesh {
            adopt(&mut renamed.catalog);
        }
        if let Some(parallel) = parallel {
            spec.cut = Cut::Boxes(map.cut(&renamed, parallel)?);
        }
        Planned::new(renamed.catalog, spec, left_out, Some(map.family))
    }

    fn naming(&self) -> Naming {
        Naming {
            from: self.from_names.clone(),
            to: self.to_names.clone().unwrap_or_else(|| side_of(self.format).to_string()),
            spelling: self.spelling.clone(),
            leave_out: self.leave_out.clone(),
            parameters_only: self.format == Format::Hf,
        }
    }

    /// Takes away an optimizer's states where the target has no place for them, and says which.
    fn leave_states(&self, catalog: &mut Catalog) -> Vec<String> {
        let states = self.states(catalog);
        catalog.tensors.retain(|name, _| !states.contains(name));
        states.into_iter().collect()
    }

    /// States of an optimizer, by torch's names and by ours, where the target has no place for them.
    fn states(&self, catalog: &Catalog) -> BTreeSet<String> {
        let is_state = |name: &&String| {
            let of_parameter = |(name, _): (&str, &str)| catalog.tensors.contains_key(name);
            ["optimizer.", "optim."].iter().any(|head| name.starts_with(head))
                || name.rsplit_once('/').is_some_and(of_parameter)
        };
        match self.format == Format::Hf && catalog.format != Format::Hf {
            true => catalog.tensors.keys().filter(is_state).cloned().collect(),
            false => BTreeSet::new(),
        }
    }

    /// None where nothing was said of any axis.
    fn parallel(&self) -> Result<Option<Parallel>, CheckpointError> {
        if self.tp.or(self.pp).or(self.ep).is_none() {
            return Ok(None);
        }
        if self.format == Format::Hf {
            let what = "Hugging Face's files hold whole tensors: tp, pp and ep mean nothing to them\nhint: leave them away, or write dcp, dcp-hf or torch_dist";
            return Err(CheckpointError::target(what));
        }
        if self.ranks.is_some() {
            return Err(CheckpointError::target(
                "tensors are cut by tp, pp and ep, or over ranks, not by both",
            ));
        }
        let [tp, pp, ep] = [self.tp, self.pp, self.ep].map(|n| n.unwrap_or(1));
        Ok(Some(Parallel { tp, pp, ep }))
    }

    fn map(
        &self,
        catalog: &Catalog,
        parallel: Option<Parallel>,
        naming: &Naming,
    ) -> Result<Option<NameMap>, CheckpointError> {
        if let Some(name) = &self.names {
            return NameMap::find(name).map(Some);
        }
        // Names of Megatron are read and written by Megatron alone, as are ours by us.
        let crossing = side_of(catalog.format) != side_of(self.format);
        let needed = parallel.is_some() || crossing || self.to_names.is_some() || self.from_names.is_some();
        if !needed {
            return match self.format == Format::Hf && catalog.format != Format::Hf {
                true => map_to_files(catalog, naming),
                false => Ok(None),
            };
        }
        // A model that only we have keeps its names.
        let ours = [catalog.format, self.format].contains(&Format::Crossmesh);
        if ours && catalog.config.is_none() && catalog.facts.is_some() {
            return Ok(None);
        }
        match model_type(catalog) {
            Some(model_type) => NameMap::built_in(model_type).map(Some),
            None => {
                let known: Vec<&str> = NameMap::families().collect();
                Err(CheckpointError::target(format!(
                    "names have to change from {} to {}, and nothing tells what model this is\nhint: give a map, one of {}, or the model's config.json",
                    catalog.format,
                    self.format,
                    known.join(", ")
                )))
            }
        }
    }
}

/// The model that config.json says it is.
fn model_type(catalog: &Catalog) -> Option<&str> {
    catalog.config.as_ref()?.get("model_type")?.as_str()
}

/// The map by which a state dict's names become those that transformers looks for in files, where they are not: they may have something
/// in front, or be those of a model in memory. None where they are right, or nothing tells what they should be.
fn map_to_files(catalog: &Catalog, naming: &Naming) -> Result<Option<NameMap>, CheckpointError> {
    let Some(map) = model_type(catalog).and_then(|name| NameMap::built_in(name).ok()) else {
        return Ok(None);
    };
    match map.fit(catalog, naming)? {
        Fit::AsTheyAre => Ok(None),
        Fit::Renamed => Ok(Some(map)),
        Fit::Neither(name) => Err(CheckpointError::Map {
            what: format!(
                "the names are not those of Hugging Face's files, and it does not know `{name}` {:?}\nhint: leave it out, or bring the names to theirs by a map of your own",
                catalog.tensors[&name].shape
            ),
            map: map.family,
        }),
    }
}

/// The side of a map whose names a format has.
fn side_of(format: Format) -> &'static str {
    match format {
        Format::TorchDist => "megatron",
        Format::Crossmesh => OURS,
        Format::Hf | Format::Dcp | Format::DcpHf => "hf",
    }
}

/// A conversion that can run, and what it will not have.
#[derive(Debug)]
pub struct Planned {
    pub conversion: Conversion,
    /// Tensors and objects that the target has no name or no place for.
    pub left_out: Vec<String>,
    /// The map that names were changed by.
    pub map: Option<String>,
}

impl Planned {
    fn new(
        catalog: Catalog,
        spec: Spec,
        mut left_out: Vec<String>,
        map: Option<String>,
    ) -> Result<Self, CheckpointError> {
        let conversion = Conversion::plan(catalog, spec)?;
        left_out.extend(conversion.left_out().iter().cloned());
        Ok(Self { conversion, left_out, map })
    }

    /// What a run with these limits would do: with what is left behind, and the map.
    pub fn explain(&self, limits: Limits) -> Explanation {
        let explanation = self.conversion.explain(limits);
        Explanation { left_out: self.left_out.clone(), map: self.map.clone(), ..explanation }
    }
}
