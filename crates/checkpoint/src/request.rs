//! What a user asks for, in the words of the command line and of Python, made into a conversion.

use std::path::PathBuf;

use crate::catalog::{Catalog, Format};
use crate::convert::Conversion;
use crate::element::Element;
use crate::error::CheckpointError;
use crate::names::{NameMap, Naming, Parallel, glob};
use crate::target::{Cut, SHARD_BYTES, Spec};

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
            let text = std::fs::read(path).map_err(CheckpointError::io("read", path))?;
            let parsed = serde_json::from_slice(&text);
            catalog.config = Some(parsed.map_err(|e| CheckpointError::damaged(path, e.to_string()))?);
        }
        let parallel = self.parallel()?;
        let mut spec =
            Spec { element: self.element, shard_bytes: self.shard_bytes, ..Spec::new(self.format) };
        if let Some(ranks) = self.ranks {
            spec.cut = Cut::Rows(ranks);
        }
        let Some(map) = self.map(&catalog, parallel)? else {
            let kept = |name: &String| !self.leave_out.iter().any(|pattern| glob(pattern, name));
            let left_out: Vec<String> = catalog.tensors.keys().filter(|name| !kept(name)).cloned().collect();
            catalog.tensors.retain(|name, _| kept(name));
            return Planned::new(catalog, spec, left_out, None);
        };
        let to = self.to_names.clone().unwrap_or_else(|| side_of(self.format).to_string());
        let naming = Naming {
            from: self.from_names.clone(),
            to,
            spelling: self.spelling.clone(),
            leave_out: self.leave_out.clone(),
            parameters_only: self.format == Format::Hf,
        };
        let renamed = map.apply(&catalog, &naming)?;
        if let Some(parallel) = parallel {
            spec.cut = Cut::Boxes(map.cut(&renamed, parallel)?);
        }
        Planned::new(renamed.catalog, spec, renamed.left_out, Some(map.family))
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

    fn map(&self, catalog: &Catalog, parallel: Option<Parallel>) -> Result<Option<NameMap>, CheckpointError> {
        if let Some(name) = &self.names {
            return NameMap::find(name).map(Some);
        }
        // Names of Megatron are read and written by Megatron alone.
        let of_megatron = |format: Format| format == Format::TorchDist;
        let crossing = of_megatron(catalog.format) != of_megatron(self.format);
        let needed = parallel.is_some() || crossing || self.to_names.is_some() || self.from_names.is_some();
        if !needed {
            return Ok(None);
        }
        let model_type = catalog.config.as_ref().and_then(|c| c.get("model_type")).and_then(|t| t.as_str());
        match model_type {
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

/// The side of a map whose names a format has.
fn side_of(format: Format) -> &'static str {
    if format == Format::TorchDist { "megatron" } else { "hf" }
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
}
